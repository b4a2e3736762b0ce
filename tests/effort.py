"""How much a test does: a few rounds in `make test`, many in `make test-long`."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Amount = TypeVar("Amount", int, float, str)

LONG = "HILT_TEST_LONG"
"""An environment variable, so that the processes that tests start know it too. ``pytest --long`` sets it."""


def is_long() -> bool:
    return os.environ.get(LONG, "") not in ("", "0")


def rounds(short: Amount, long: Amount) -> Amount:
    """How often a test repeats what it does: examples, kills, cuts of power, seconds of a
    soak. Also right where a module is imported."""
    return long if is_long() else short


def some_of(kinds: Sequence[Hashable], short: int) -> list[int]:
    """Which of these places (calls at which a writer is killed, say) a test tries: all of
    them in `make test-long`, else about `short`.

    Those are the first and the last of each kind, and others evenly between the first and the last place.
    """
    if is_long() or len(kinds) <= short:
        return list(range(len(kinds)))
    first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    last = {kind: place for place, kind in enumerate(kinds)}
    between = max(short - len({*first.values(), *last.values()}), 2)
    return sorted(
        {*first.values(), *last.values(), *(round(i * (len(kinds) - 1) / (between - 1)) for i in range(between))}
    )


def sampled(values: Iterable[Any], *kept: Any, names: int = 1) -> list[Any]:
    """Parameters of a test: those in ``kept`` run in `make test`, all of them in `make test-long`. Where the
    parameters have several ``names``, each value is a tuple."""
    return [
        value if value in kept else pytest.param(*(value if names > 1 else (value,)), marks=pytest.mark.long)
        for value in values
    ]


def need(*packages: str) -> None:
    """Skip the module, or the test, where a package is not installed. Unlike
    ``pytest.importorskip`` this imports nothing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def devices() -> list[Any]:
    """For `pytest.mark.parametrize`: the CPU, and the GPU where there is one."""
    import torch

    return ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def need_rendering() -> None:
    """Skip the test where MuJoCo has no library to render with. `make test` installs
    one (``hilt doctor --fix``) where it may."""
    need("mujoco")
    kind = os.environ.get("MUJOCO_GL", "egl").lower()
    library = {"egl": "EGL", "osmesa": "OSMesa"}.get(kind, "")
    if kind in ("disable", "disabled", "off") or (
        sys.platform == "linux" and library and ctypes.util.find_library(library) is None
    ):
        pytest.skip(f"nothing can be rendered here with MUJOCO_GL={kind}: see hilt doctor")
