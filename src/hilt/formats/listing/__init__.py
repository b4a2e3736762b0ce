"""What is known of the episodes of logs and datasets, as a table, and filters of it: for ``--where`` and the app."""
