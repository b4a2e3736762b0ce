"""What `verify` and `repair` found in a log, each thing with its file, its steps and what is done about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from hilt.core.tree import Array

Kind = Literal["damage", "quarantined", "torn", "leftover"]
"""``damage``: bytes are not those that were written. ``quarantined``: likewise, known, and shown by no view. ``torn``:
what was being written when a process ended, and had not been acknowledged. ``leftover``: of no use, and harmless."""


MAX_SPANS = 8
"""Stretches of steps that the text of a finding names."""


@dataclass(frozen=True)
class Span:
    """Consecutive steps of one trajectory."""

    trajectory: int
    first: int
    """Offset of the first step in its trajectory."""
    steps: int

    def __str__(self) -> str:
        if self.steps == 1:
            return f"trajectory {self.trajectory} step {self.first}"
        return f"trajectory {self.trajectory} steps {self.first}-{self.first + self.steps - 1}"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    file: str
    """Its path inside the log's folder."""
    what: str
    cure: str
    """What `repair` does about it."""
    steps: tuple[Span, ...] = ()
    """The steps that cannot be used because of it."""
    column: str = ""
    """Of a file of frames, its column."""

    def __str__(self) -> str:
        more = f" and {len(self.steps) - MAX_SPANS} more stretches" if len(self.steps) > MAX_SPANS else ""
        where = f" ({', '.join(map(str, self.steps[:MAX_SPANS]))}{more})" if self.steps else ""
        return f"{self.file}: {self.what}{where}"


@dataclass
class LogReport:
    """What was read, and everything that was found."""

    path: Path
    segments: int = 0
    steps: int = 0
    """Steps whose every byte is as it was written."""
    trajectories: int = 0
    frames: int = 0
    """Frames that these steps refer to."""
    facts: int = 0
    """Whole lines of late facts."""
    bytes: int = 0
    """Bytes of all files."""
    seconds: float = 0.0
    writing: bool = False
    """Whether a writer was at work: then only what was committed has been looked at."""
    closed: bool = False
    """Whether the log says what it held when it was closed. Without that, nothing
    shows that a growing file was cut at its end."""
    findings: list[Finding] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    """Of a repair: what was done."""

    @property
    def ok(self) -> bool:
        """Whether everything that can be sampled is as it was written."""
        return not self.of("damage")

    def damaged_columns(self) -> list[str]:
        """The columns whose frames are damaged, when nothing else is: without them every step can be kept."""
        found = {finding.column for finding in self.of("damage")}
        return sorted(found) if "" not in found else []

    @property
    def lost_steps(self) -> int:
        """How many steps cannot be used because of the damage; one that two findings name counts once."""
        named = [(s.trajectory, s.first, s.first + s.steps) for finding in self.of("damage") for s in finding.steps]
        lost, end = 0, (-1, 0)
        for trajectory, first, stop in sorted(named):
            seen = end[1] if end[0] == trajectory else 0
            lost += max(0, stop - max(first, seen))
            end = (trajectory, max(stop, seen))
        return lost

    def of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def kinds(self) -> dict[str, int]:
        """How many findings of each kind."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


def spans(trajectory: Array, offset: Array) -> tuple[Span, ...]:
    """The steps with these trajectories and offsets as few spans."""
    if not len(trajectory):
        return ()
    order = np.lexsort((offset, trajectory))
    trajectory, offset = np.asarray(trajectory, np.int64)[order], np.asarray(offset, np.int64)[order]
    apart = (trajectory[1:] != trajectory[:-1]) | (offset[1:] > offset[:-1] + 1)
    starts = np.flatnonzero(np.r_[True, apart])
    stops = np.r_[starts[1:], len(offset)] - 1
    return tuple(
        Span(int(trajectory[a]), int(offset[a]), int(offset[b] - offset[a]) + 1)
        for a, b in zip(starts, stops, strict=True)
    )
