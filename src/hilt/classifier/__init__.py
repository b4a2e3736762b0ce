"""Reward classifiers: frames with labels, training, and the reward that an environment asks for."""
