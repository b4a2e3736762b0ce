"""Which tests run and in what order, from how long they took when
`tools/durations.py` last wrote tests/durations.tsv."""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parent / "durations.tsv"
FAST_S = 120.0
"""Seconds, one test after the other, for which `make test-fast` takes files"""


@dataclass(frozen=True)
class Taken:
    """Seconds that the tests of a file took."""

    together: float = 0.0
    longest: float = 0.0
    tests: int = 1


NEW = Taken()
"""A file that is not in the table takes next to nothing, for all that is known."""


@cache
def recorded() -> dict[str, Taken]:
    if not DURATIONS.exists():
        return {}
    rows = (line.split("\t") for line in DURATIONS.read_text().splitlines() if not line.startswith("#"))
    return {file: Taken(float(together), float(longest), int(tests)) for together, longest, tests, file in rows}


def file_of(test: str) -> str:
    return test.split("::", 1)[0]


def fast(files: set[str], taken: dict[str, Taken]) -> set[str]:
    """Of these files the ones with the quickest tests, as many as go into `FAST_S`.

    Whole files, because what a module's fixtures build is paid for by whichever of its tests comes first.
    """
    chosen, left = set(), FAST_S
    for file in sorted(files, key=lambda file: (taken.get(file, NEW).together / taken.get(file, NEW).tests, file)):
        left -= taken.get(file, NEW).together
        if left < 0:
            break
        chosen.add(file)
    return chosen


SHARED = (
    ("app", "teleop", "hil"),
    ("policies", "seeds", "recipes", "vla", "compat", "test_golden.py"),
    ("cli", "e2e", "extension", "bench", "test_docs.py"),
)
"""Folders whose tests share what each worker that runs one of them starts or imports once, for seconds of CPU time: a
browser and the server of its pages; transformers, and torch's tracing of shapes; a process that commands are forked
from"""


def longest_first(tests: list[str], taken: dict[str, Taken], workers: int) -> list[int]:
    """The order, as indices into ``tests``, in which only quick tests are left when a worker has nothing more to do.

    pytest-xdist cuts the row into equal numbers of tests, one piece for each worker, and a worker that has finished
    takes half of what another still has, from its end. So each piece begins with the files that have the longest tests,
    and takes about as long as the others. A file is kept together (but for the last of a piece), because its tests
    share fixtures, and so are the folders of `SHARED`, as far as they fit.
    """
    files: dict[str, list[int]] = defaultdict(list)
    for index, test in enumerate(tests):
        files[file_of(test)].append(index)
    pieces = [[index for file in piece for index in files[file]] for piece in _pieces(files, taken, workers)]
    sizes = [len(tests) * (i + 1) // workers - len(tests) * i // workers for i in range(workers)]
    spare = [index for piece, size in zip(pieces, sizes, strict=True) for index in piece[size:]]
    row: list[int] = []
    for piece, size in zip(pieces, sizes, strict=True):
        missing = max(0, size - len(piece))
        row += piece[:size] + spare[:missing]
        del spare[:missing]
    return row


def _pieces(files: Iterable[str], taken: dict[str, Taken], workers: int) -> list[list[str]]:
    """The files of each worker, those with the longest tests first."""
    order = sorted(files, key=lambda file: (-taken.get(file, NEW).longest, file))
    homes = {file: _home(file) for file in order}
    order.sort(key=lambda file: homes[file] is None)  # the others fill up what is left
    each = sum(taken.get(file, NEW).together for file in order) / workers
    pieces: list[list[str]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for file in order:
        seconds, home = taken.get(file, NEW).together, homes[file]
        place = min(range(workers), key=lambda piece: (loads[piece], len(pieces[piece])))
        if home is not None and loads[home % workers] + seconds <= each:
            place = home % workers
        pieces[place].append(file)
        loads[place] += seconds
    return [sorted(piece, key=lambda file: (-taken.get(file, NEW).longest, file)) for piece in pieces]


def _home(file: str) -> int | None:
    """Which of `SHARED` a file is in."""
    parts = file.split("/")
    return next((number for number, folders in enumerate(SHARED) if len(parts) > 1 and parts[1] in folders), None)


def files_in(root: Path, places: Iterable[str]) -> list[Path]:
    """The test files in these places, which are what pytest was called with."""
    paths = {root / file_of(place) for place in places}
    return sorted({file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])})


def import_share(root: Path, files: Sequence[Path], worker: int, workers: int) -> None:
    """Import one of ``workers`` shares of these files, before they are collected.

    Each worker collects all tests, in the same order. In a new clone each would compile every file with its assertions
    written out, which takes half a minute: beginning with its own share, it finds most of the others' files compiled.
    """
    for file in files[worker::workers]:
        # pytest imports it again, and reports what is wrong with it
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
