"""Steps on their way to a log: an actor's queue and spool, the assembler of running episodes, and channels between threads."""
