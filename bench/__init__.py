"""Benchmarks: ours, peers and the machine's limits side by side in one run. ``python -m bench replay``."""
