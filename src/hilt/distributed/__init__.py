"""Training on many ranks: who they are, how they reduce and shard, and where they run (here, in processes, on a Ray cluster)."""
