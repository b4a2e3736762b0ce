"""What the checks of a dataset found: each finding with its severity, its place, a sentence, and what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hilt.checks.finding_texts import render, render_place
from hilt.core.tree import JsonObject

Severity = Literal["error", "warning", "info"]
"""``error``: the data is not what it claims to be, and must not be trained on as it is. ``warning``: it can be read,
and training on it probably suffers. ``info``: worth knowing, and often intended."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
MAX_FINDINGS = 1000
"""Findings of one check that are kept; further ones are counted."""


@dataclass(frozen=True)
class DatasetFinding:
    """One thing that is wrong with a dataset, or looks so."""

    severity: Severity
    text: str
    """Its key in `hilt.checks.finding_texts.TEXTS`: the name of the check, and what it found."""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers and names in its text."""
    episode: int | None = None
    """The number of the episode in the dataset, counted from 0; None where it is about the whole dataset."""
    label: str = ""
    """The same episode in the terms of its format, such as ``trajectory 7``."""
    first: int | None = None
    """The first step concerned, counted from 0 as recorded."""
    last: int | None = None
    """The last step concerned."""
    column: str = ""
    """The camera, or another column."""
    trimmed: int = 0
    """The number of recorded steps before the first one that is shown."""
    weight: float = 0.0
    """How bad it is among findings of the same text: the largest are shown as examples."""

    @property
    def check(self) -> str:
        """The name of the check."""
        return self.text.partition(".")[0]

    @property
    def what(self) -> str:
        """A sentence."""
        return render(self.text, self.values)[0]

    @property
    def cure(self) -> str:
        """What to do about it."""
        return render(self.text, self.values)[1]

    @property
    def place(self) -> str:
        """The place in words: ``episode 3, steps 10-14, observations/front``."""
        return render_place(self.label, self.first, self.last, self.column)

    def to_json(self) -> JsonObject:
        words = {name: getattr(self, name) for name in ("what", "cure", "check", "place")}
        return {**{name: value for name, value in asdict(self).items() if name != "weight"}, **words}


@dataclass
class CheckReport:
    """What was looked at, and everything that was found."""

    path: str
    format: str
    checks: list[str] = field(default_factory=list)
    """The names of the checks that ran."""
    episodes: int = 0
    """Episodes that could be read."""
    steps: int = 0
    damaged: int = 0
    """Episodes that could not be read."""
    seconds: float = 0.0
    findings: list[DatasetFinding] = field(default_factory=list)
    """At most 1,000 of each check."""
    by_check: Counter[str] = field(default_factory=Counter)
    """The number of findings of each check, listed or not."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of findings by severity, listed or not."""

    def add(self, finding: DatasetFinding) -> None:
        self.counts[finding.severity] += 1
        self.by_check[finding.check] += 1
        if self.by_check[finding.check] <= MAX_FINDINGS:
            self.findings.append(finding)

    @property
    def ok(self) -> bool:
        """Whether there is no finding of the severity ``error``."""
        return not self.counts["error"]

    def sorted(self) -> list[DatasetFinding]:
        """The findings, the most severe first."""
        return sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))

    def grouped(self) -> dict[str, list[DatasetFinding]]:
        """The findings by check, the most severe and worst first; checks with a severe finding come first."""
        out: dict[str, list[DatasetFinding]] = {}
        for finding in sorted(self.findings, key=lambda one: (SEVERITIES.index(one.severity), -one.weight)):
            out.setdefault(finding.check, []).append(finding)
        return out

    def to_json(self) -> JsonObject:
        """The report as plain values, with the most severe findings first."""
        return {
            **{name: value for name, value in vars(self).items() if name not in ("findings", "counts")},
            "ok": self.ok,
            "severities": {severity: self.counts[severity] for severity in SEVERITIES},
            "findings": [finding.to_json() for finding in self.sorted()],
        }
