"""Where policies act: the task contract, the embedded tabletop suite, a robot behind HTTP, wrappers."""
