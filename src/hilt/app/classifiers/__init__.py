"""The page of reward classifiers: frames to label, training, mistakes, and the threshold."""
