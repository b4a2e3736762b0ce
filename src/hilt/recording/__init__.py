"""Recording: a person or a script drives a task, and a log keeps the episodes; videos of them."""
