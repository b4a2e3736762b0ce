"""Agents of a run with a person: what they are made from."""
