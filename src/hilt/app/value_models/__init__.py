"""The page of value models."""
