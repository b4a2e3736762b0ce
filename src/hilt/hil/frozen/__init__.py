"""Runs whose agent is trained beside a frozen policy: what that computes goes into observations and logs."""
