"""The embedded simulator: a table, Franka-like arms and 23 tasks in MuJoCo, with scripted experts."""
