"""What the command line teaches by itself: the installed pages of the documentation, and completion in shells."""
