"""``python -m hilt`` is ``hilt``."""

from hilt.cli import main

if __name__ == "__main__":
    main()
