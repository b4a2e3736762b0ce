"""Ctrl-C before a program can end in order. Signals to real runs are in tests/vla/test_signals.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOST_INTERRUPT = """
import os, signal, weakref
from hilt.core.signals import remember_interrupts, stop_signals

class Module: ...
def interrupt(reference): os.kill(os.getpid(), signal.SIGINT); [None for _ in range(1000)]

{first}
module = Module()
reference = weakref.ref(module, interrupt)
del module
print("lost")
with stop_signals():
    print("went on")
"""


@pytest.mark.parametrize("remembered", [True, False])
def test_an_interrupt_that_an_import_loses_ends_the_program_when_it_begins_to_work(remembered: bool):
    """Python ignores exceptions in callbacks of weak references, which its imports use."""
    code = LOST_INTERRUPT.format(first="remember_interrupts()" if remembered else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Exception ignored" in done.stderr and done.stdout.startswith("lost\n")
    assert ("went on" in done.stdout) is not remembered
    assert done.returncode == (-2 if remembered else 0)
