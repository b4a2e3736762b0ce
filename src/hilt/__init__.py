"""Hilt trains robot policies by reinforcement learning, with a person in the loop."""

__version__ = "0.1.0"
