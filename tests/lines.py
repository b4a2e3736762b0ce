"""What long commands print in a pipe, where every line is due at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from hilt.core import progress


def all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a line is due whenever something moves."""
    monkeypatch.setattr(progress, "LINE_S", 0.0)


def no_line_twice(text: str) -> str:
    """The same text, in which no line is followed by itself; empty ones apart."""
    pairs: Iterator[tuple[str, str]] = itertools.pairwise(line for line in text.splitlines() if line.strip())
    assert not [one for one, other in pairs if one == other]
    return text
