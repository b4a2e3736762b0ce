"""Episodes of logs and datasets in the browser: an index with filters, the lanes of one episode, and its frames."""
