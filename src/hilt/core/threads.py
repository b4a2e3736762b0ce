"""How many threads torch computes with.

Called before torch is imported where that is possible. On aarch64 the library that makes its convolutions, and its products with a
transposed matrix, reads the number once, when it is loaded, and does not follow `torch.set_num_threads`.
"""

from __future__ import annotations

import os
import sys

ASKED = "OMP_NUM_THREADS"
"""The variable of the environment that has the number"""


def one_thread() -> None:
    """One thread in this process and in those that it starts, unless the user asked for another number.

    The processes of a run share the cores. Two threads on busy cores are several times slower than one, for each waits for the other.
    """
    if ASKED not in os.environ:
        set_threads(1)


def set_threads(number: int) -> None:
    """Sets the number of threads, whatever the environment asks for."""
    os.environ[ASKED] = str(number)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(number)
