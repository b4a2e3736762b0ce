"""Policies as files: checkpoint folders, tensors, adapters, memory, and how images are prepared."""
