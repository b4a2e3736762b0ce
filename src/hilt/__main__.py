"""``python -m hilt`` is ``hilt``."""

import os
import sys

if sys.path[0] == os.getcwd() and not __file__.startswith(os.path.join(sys.path[0], "")):
    del sys.path[0]  # as for `hilt`, modules of the current folder hide none: see hilt.core.children

from hilt.cli import main

if __name__ == "__main__":
    main()
