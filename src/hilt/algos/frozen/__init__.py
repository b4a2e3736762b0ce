"""Reinforcement learning beside a policy that stays as it is."""
