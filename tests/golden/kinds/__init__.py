"""One module for each kind of golden file."""
