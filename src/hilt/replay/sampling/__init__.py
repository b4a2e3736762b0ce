"""From a view to batches: samplers, selectors, rate limiters, mixes, prefetching and torch datasets."""
