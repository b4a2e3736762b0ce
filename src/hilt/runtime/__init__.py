"""Programs that run for long: so far the one that records demonstrations."""
