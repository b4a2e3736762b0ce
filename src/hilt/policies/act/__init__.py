"""ACT, action chunking with transformers: a policy that imitates demonstrations of one task or a few."""
