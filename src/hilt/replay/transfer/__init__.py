"""Steps on their way to a log: an actor's queue and spool, what was delivered of it, and channels between threads."""
