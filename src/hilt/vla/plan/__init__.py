"""What a training step will need, before anything starts: memory, and which layers are computed twice to save it."""
