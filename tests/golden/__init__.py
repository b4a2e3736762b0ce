"""Our numbers beside those of the original implementations.

    python -m tests.golden                         # all of tests/golden
    python -m tests.golden FILE_OR_FOLDER...

A *kind* is a module in `kinds/` with two functions:

    matches(path) -> Path | None      the file that stands for a golden case when `path` is a part of one: the same
                                      for each part
    compare(path) -> Result           computes our values from the inputs, and compares them with the ones in that file

What is computed never comes from the values that it is compared with: `compare` is given the two apart.
"""

from __future__ import annotations

import importlib
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hilt.core.errors import HiltError

FOLDER = Path(__file__).parent
KINDS = ("rlds", "trajectories", "lerobot", "rlinf", "hilserl", "reverb", "image", "openvla", "pi0", "algos")
"""The modules of `kinds/`. An issue that brings golden files of a new kind adds its name here."""
BROKEN = (
    HiltError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ImportError,
    AssertionError,
    zipfile.BadZipFile,
)
"""What a damaged or foreign golden file may raise: a FAIL of that file, and the others are still compared."""

Difference = tuple[float, str | None]
"""The largest difference of two values, and what is wrong with it, if anything is."""


@dataclass
class Result:
    cases: int = 0
    """Values compared, by name; for files that list cases, the cases."""
    largest: float = 0.0
    """Largest absolute difference of two numbers; within what is allowed if there are no failures."""
    failures: list[str] = field(default_factory=list)

    def add(self, key: str, difference: Difference) -> None:
        self.cases += 1
        self.largest = max(self.largest, difference[0])
        if difference[1] is not None:
            self.failures.append(f"{key}{difference[1]}")


def compare(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], allowed: Callable[[str], Any] = lambda key: exact
) -> Result:
    """Every value of the one with its namesake of the other; `allowed` says by name how two values are compared."""
    result = Result()
    for key in [*theirs, *(key for key in ours if key not in theirs)]:
        if key not in ours:
            result.add(key, (0.0, ": expected, but not among ours"))
        elif key not in theirs:
            result.add(key, (0.0, ": among ours, but not expected"))
        else:
            result.add(key, allowed(key)(ours[key], theirs[key]))
    if not theirs:
        result.failures.append("there is nothing in it to compare with")
    return result


def exact(ours: Any, theirs: Any) -> Difference:
    """The same type, shape and values; NaN is like NaN."""
    if isinstance(theirs, (np.ndarray, np.generic)):
        return _arrays(ours, theirs, lambda apart: apart == 0)
    return _plain(ours, theirs, "")


def close(relative: float) -> Callable[[Any, Any], Difference]:
    """Numbers that differ by no more than this share of the expected one."""
    return lambda ours, theirs: _arrays(
        np.asarray(ours), np.asarray(theirs), lambda apart: apart <= relative * np.abs(theirs)
    )


def jpeg(ours: Any, theirs: Any) -> Difference:
    """Within one level on at least 99.9% of the pixels' numbers, and within three everywhere."""
    largest, wrong = _arrays(ours, theirs, lambda apart: apart <= 3)
    if wrong is None and (share := np.mean(np.abs(ours.astype(int) - theirs.astype(int)) <= 1)) < 0.999:
        wrong = f": {share:.2%} of the numbers are within one level of what is expected, and 99.9% have to be"
    return largest, wrong


def lossy(decibels: float) -> Callable[[Any, Any], Difference]:
    """Pictures that went through a lossy codec: a peak signal-to-noise ratio of at least this."""

    def near(ours: Any, theirs: Any) -> Difference:
        largest, wrong = _arrays(ours, theirs, lambda apart: apart <= 255)
        if wrong is None and (ratio := signal_to_noise(ours, theirs)) < decibels:
            wrong = f": {ratio:.1f} dB from what is expected, and at least {decibels} are needed"
        return largest, wrong

    return near


def signal_to_noise(ours: Any, theirs: Any) -> float:
    """In decibels, of uint8 pictures."""
    error = float(np.mean((ours.astype(float) - theirs.astype(float)) ** 2))
    return math.inf if not error else 10 * math.log10(255**2 / error)


def _arrays(ours: Any, theirs: Any, fits: Callable[[Any], Any]) -> Difference:
    if not isinstance(ours, (np.ndarray, np.generic)):
        return math.inf, f": ours is of type {type(ours).__name__}, expected an array of {theirs.dtype}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return math.inf, f": ours is {ours.dtype}{list(ours.shape)}, expected {theirs.dtype}{list(theirs.shape)}"
    if theirs.dtype.kind not in "biufc" and theirs.dtype.itemsize != 2:
        same = np.asarray(ours == theirs)
        apart = np.where(same, 0.0, math.inf)
    elif theirs.dtype.kind in "iu" and theirs.dtype.itemsize == 8:
        # beyond 2**53 a float would not see a difference of one
        apart = np.abs(ours.astype(object) - theirs.astype(object)).astype(float) if ours.size else np.zeros(ours.shape)
    else:
        wide = complex if theirs.dtype.kind == "c" else float
        a, b = np.asarray(ours).astype(wide), np.asarray(theirs).astype(wide)
        alike = (a == b) | ((a != a) & (b != b))
        with np.errstate(invalid="ignore"):
            apart = np.where(alike, 0.0, np.nan_to_num(np.abs(a - b), nan=math.inf))
    bad = np.argwhere(~np.asarray(fits(apart)))
    largest = float(apart.max()) if apart.size else 0.0
    if not len(bad):
        return largest, None
    place = tuple(bad[0].tolist())
    where = f"[{', '.join(map(str, place))}]" if place else ""
    return largest, f"{where}: ours is {np.asarray(ours)[place]!s}, expected {np.asarray(theirs)[place]!s}"


def _plain(ours: Any, theirs: Any, place: str) -> Difference:
    """Values as JSON has them."""
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return math.inf, f"{place}: ours has {len(ours)} entries, expected {len(theirs)}"
        pairs = [_plain(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return math.inf, f"{place}: ours has the keys {sorted(ours)}, expected {sorted(theirs)}"
        pairs = [_plain(ours[key], theirs[key], f"{place}/{key}") for key in theirs]
    else:
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (ours, theirs))
        same = (type(ours) is type(theirs) or numbers) and (ours == theirs or (ours != ours and theirs != theirs))
        largest = 0.0 if same else abs(float(ours) - float(theirs)) if numbers else math.inf
        return largest, None if same else f"{place}: ours is {ours!r}, expected {theirs!r}"
    return max((largest for largest, _ in pairs), default=0.0), next((wrong for _, wrong in pairs if wrong), None)


# --- which files there are ---


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"tests.golden.kinds.{name}") for name in KINDS]


def find(paths: Iterable[Path]) -> tuple[dict[Path, ModuleType], list[Path]]:
    """What there is to compare in files and folders, each with its kind; and files that no kind knows."""
    found: dict[Path, ModuleType] = {}
    unknown: list[Path] = []
    known = modules()

    def look(path: Path) -> None:
        for kind in known:
            if (case := kind.matches(path)) is not None:
                found.setdefault(case, kind)
                return
        if path.is_dir():
            for inner in sorted(path.iterdir()):
                if inner.suffix not in (".md", ".py") and inner.name != "__pycache__":
                    look(inner)
        else:
            unknown.append(path)

    for path in paths:
        look(path.resolve())
    return found, unknown


def run(case: Path, kind: ModuleType) -> Result:
    """`kind.compare`, and a FAIL where it cannot be done at all."""
    try:
        return kind.compare(case)
    except BROKEN as error:
        return Result(0, math.inf, [f"{type(error).__name__}: {error}"])
