"""The names of other systems, over Hilt's own parts: a script that was written for
one of them changes its imports and runs.

Nothing else in Hilt imports this package.
"""
