"""A robot arm behind HTTP: the server with its control loop and cameras, and the gymnasium environment on the other side."""
