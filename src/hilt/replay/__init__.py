"""Experience: one log, many views."""
