"""How much a test does: a few rounds in `make test`, many in `make test-long`."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import sys
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


def need_rendering() -> None:
    """Skip the test where MuJoCo has no library to render with. `make test` installs one (``hilt doctor --fix``) where it may."""
    need("mujoco")
    kind = os.environ.get("MUJOCO_GL", "egl").lower()
    library = {"egl": "EGL", "osmesa": "OSMesa"}.get(kind, "")
    if kind in ("disable", "disabled", "off") or (sys.platform == "linux" and library and ctypes.util.find_library(library) is None):
        pytest.skip(f"nothing can be rendered here with MUJOCO_GL={kind}: see hilt doctor")
