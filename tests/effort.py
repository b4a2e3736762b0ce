"""How much a test does: a few rounds in `make test`, many in `make test-long`."""

from __future__ import annotations

import importlib.util
import os
from typing import TypeVar

import pytest

Amount = TypeVar("Amount", int, float)

LONG = "HILT_TEST_LONG"
"""An environment variable, so that the processes that tests start know it too. ``pytest --long`` sets it."""


def is_long() -> bool:
    return os.environ.get(LONG, "") not in ("", "0")


def rounds(short: Amount, long: Amount) -> Amount:
    """How often a test repeats what it does: examples, kills, cuts of power, seconds of a soak. Also right where a module is imported."""
    return long if is_long() else short


def need(*packages: str) -> None:
    """Skip the module, or the test, where a package is not installed. Unlike ``pytest.importorskip`` this imports nothing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
