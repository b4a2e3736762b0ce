"""Tools that look at a whole log: verify, repair, salvage, merge, split and summarize."""
