"""The bytes of a log on disk: segments, their tables and index, journals and locks,
and what is checked when they are read."""
