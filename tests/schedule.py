"""Which tests run and in what order, from how long each took when `tools/durations.py` last wrote tests/durations.tsv."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

DURATIONS = Path(__file__).parent / "durations.tsv"
FAST_FILE_S = 2.0
"""`make test-fast` leaves out the files whose tests together took longer than this."""


def recorded() -> dict[str, float]:
    """Seconds by test, its parameters together. A test that is not in it takes next to nothing, or is new."""
    if not DURATIONS.exists():
        return {}
    rows = (line.split("\t") for line in DURATIONS.read_text().splitlines() if not line.startswith("#"))
    return {test: float(seconds) for seconds, test in rows}


def file_of(test: str) -> str:
    return test.split("::", 1)[0]


def slow_files(seconds: dict[str, float]) -> set[str]:
    """Whole files, because what a module's fixtures build is paid for by whichever of its tests comes first."""
    together: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        together[file_of(test)] += taken
    return {file for file, taken in together.items() if taken > FAST_FILE_S}


def longest_first(tests: list[str], seconds: dict[str, float], workers: int) -> list[int]:
    """The order, as indices into ``tests``, in which only quick tests are left when a worker has nothing more to do.

    pytest-xdist cuts the row into equal numbers of tests, one piece for each worker, and a worker that has finished takes half of what
    another still has, from its end. So each piece begins with the files that have the longest tests. A file is kept together (but for the
    last of a piece), because its tests share fixtures.
    """
    longest: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        longest[file_of(test)] = max(longest[file_of(test)], taken)
    files: dict[str, list[int]] = defaultdict(list)
    for index, test in enumerate(tests):
        files[file_of(test)].append(index)
    pieces: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(files, key=lambda file: (-longest[file], file)):
        min(pieces, key=len).extend(files[file])
    sizes = [len(tests) * (i + 1) // workers - len(tests) * i // workers for i in range(workers)]
    spare = [index for piece, size in zip(pieces, sizes, strict=True) for index in piece[size:]]
    row: list[int] = []
    for piece, size in zip(pieces, sizes, strict=True):
        missing = max(0, size - len(piece))
        row += piece[:size] + spare[:missing]
        del spare[:missing]
    return row
