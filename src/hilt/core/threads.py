"""The number of threads that torch computes with.

It is set before torch is imported where that is possible. On aarch64 the library that makes its
convolutions, and its products with a transposed matrix, reads the number once, when it is
loaded, and does not follow `torch.set_num_threads`.
"""

from __future__ import annotations

import os
import sys

ASKED = "OMP_NUM_THREADS"
"""The environment variable with the number of threads"""


def one_thread() -> None:
    """Sets one thread for this process and those that it starts, unless the environment
    sets another number. Commands call it first.

    The processes of a run share the cores. Two threads on busy cores are several times
    slower than one, for each waits for the other.
    """
    if ASKED not in os.environ:
        set_threads(1)


def set_threads(number: int) -> None:
    """Sets the number of threads, whatever the environment asks for."""
    os.environ[ASKED] = str(number)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(number)
