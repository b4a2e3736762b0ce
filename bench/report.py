"""What a benchmark says: rows with their targets, as a table, as JSON and as Markdown. All benches share this file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hilt.core.files import DISK

ROOT = Path(__file__).parent.parent
KEYS = ("name", "ours", "unit", "peer", "peer_value", "limit", "ratio_to_peer", "ratio_to_limit", "target", "met")
"""What every row has, in every bench; further keys say more."""


@dataclass(frozen=True)
class Target:
    """A bound on our figure, or on its ratio to the best peer's or to the machine's limit."""

    of: Literal["ours", "peer", "limit"]
    sign: Literal[">=", "<=", "<"]
    value: float

    def text(self, unit: str) -> str:
        return (
            f"{self.sign} {number(self.value)} {unit}"
            if self.of == "ours"
            else f"{self.sign} {self.value:g}x {self.of}"
        )

    def met(self, value: float | None) -> bool:
        if value is None:
            return False
        return {">=": value >= self.value, "<=": value <= self.value, "<": value < self.value}[self.sign]


def at_least(value: float, of: Literal["ours", "peer", "limit"] = "ours") -> Target:
    return Target(of, ">=", value)


def at_most(value: float) -> Target:
    return Target("ours", "<=", value)


def below(value: float) -> Target:
    return Target("ours", "<", value)


@dataclass
class Row:
    """One figure of ours and what stands beside it."""

    name: str
    ours: float | None
    unit: str
    what: str
    """What was measured, in a line."""
    targets: Sequence[Target] = ()
    enough: Literal["all", "any"] = "all"
    """How many of the targets have to be met"""
    peers: dict[str, float] = field(default_factory=dict)
    """Each peer's figure, in the same unit."""
    best: str | None = None
    """The peer to be compared with; the one with the best figure unless given."""
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that were not measured, and why. The best peer is not known then, so no target counts as met."""
    limit: float | None = None
    limit_name: str = ""
    spread: tuple[float, float] | None = None
    """Our lowest and highest figure over the rounds."""
    size: str = ""
    """When the run was smaller than the workload: how small. No target counts as met then."""
    note: str = ""

    @property
    def peer(self) -> str | None:
        if not self.peers:
            return None
        smaller_is_better = any(t.sign != ">=" for t in self.targets)
        return self.best or (min if smaller_is_better else max)(self.peers, key=self.peers.__getitem__)

    @property
    def ratio_to_peer(self) -> float | None:
        return _ratio(self.ours, self.peers.get(self.peer or ""))

    @property
    def ratio_to_limit(self) -> float | None:
        return _ratio(self.ours, self.limit)

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None when the row has none."""
        if not self.targets:
            return None
        value = {"ours": self.ours, "peer": self.ratio_to_peer, "limit": self.ratio_to_limit}
        met = [t.met(value[t.of]) for t in self.targets]
        return not self.absent and not self.size and (any(met) if self.enough == "any" else all(met))

    @property
    def target(self) -> str:
        return (" or " if self.enough == "any" else " and ").join(t.text(self.unit) for t in self.targets)

    @property
    def notes(self) -> str:
        parts = [f"ran at another size: {self.size}"] if self.size else []
        parts += [f"{name} was not measured: {why}" for name, why in self.absent.items()]
        return "; ".join([*parts, self.note] if self.note else parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ours": self.ours,
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": self.peers.get(self.peer or ""),
            "limit": self.limit,
            "ratio_to_peer": self.ratio_to_peer,
            "ratio_to_limit": self.ratio_to_limit,
            "target": self.target or None,
            "met": self.met,
            "note": self.notes,
            "what": self.what,
            "limit_name": self.limit_name,
            "low": self.spread[0] if self.spread else None,
            "high": self.spread[1] if self.spread else None,
            "peers": self.peers,
        }


@dataclass
class Report:
    """The rows of one run, and where it ran."""

    command: str
    rows: list[Row]
    limits: dict[str, str]
    """The machine's limits measured on the way, in words."""
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    commit: str = field(default_factory=lambda: current_commit())

    def header(self) -> list[str]:
        machine = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        limits = "; ".join(f"{name} {value}" for name, value in self.limits.items())
        return [
            f"command: {self.command}",
            f"commit: {self.commit}",
            f"machine: {machine}",
            f"limits of the machine in this run: {limits or 'none measured'}",
        ]

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        wide = None if sys.stdout.isatty() else 200
        console = Console(width=wide, highlight=False)
        for line in self.header():
            console.print(line, markup=False)
        table = Table(*_COLUMNS, show_lines=False)
        for row in self.rows:
            met = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[row.met]
            table.add_row(*_cells(row), met)
        console.print(table)
        for row in self.rows:
            console.print(f"{row.name}: {row.what}" + (f". {row.notes}" if row.notes else ""), markup=False)
        counted = [row for row in self.rows if row.met is not None]
        console.print(f"{sum(bool(r.met) for r in counted)} of {len(counted)} targets met", markup=False)

    def write_json(self, path: Path) -> None:
        """A list with one object per row; each names the commit and the machine."""
        where = {"command": self.command, "commit": self.commit, "machine": self.machine, "limits": self.limits}
        DISK.replace(path, json.dumps([{**row.to_json(), **where} for row in self.rows], indent=1) + "\n")

    def write_markdown(self, path: Path, suite: str) -> None:
        """The same table as a page, or between the marks of this suite in a page that
        is there, such as docs/benchmarks.md."""
        begin, end = f"<!-- {suite}: begin -->\n", f"<!-- {suite}: end -->\n"
        page = path.read_text() if path.exists() else ""
        if begin in page and end in page:
            path.write_text(page.partition(begin)[0] + begin + self._markdown() + end + page.partition(end)[2])
        else:
            path.write_text(self._markdown())

    def _markdown(self) -> str:
        lines = [f"- {line}" for line in self.header()]
        lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
        for row in self.rows:
            met = {True: "yes", False: "**no**", None: ""}[row.met]
            lines.append("| " + " | ".join([*_cells(row), met]) + " |")
        lines += [
            "",
            *(f"- `{row.name}`: {row.what}" + (f". {row.notes}" if row.notes else "") + "." for row in self.rows),
            "",
        ]
        return "\n".join(lines)


_COLUMNS = (
    "row",
    "ours",
    "low - high",
    "unit",
    "best peer",
    "its figure",
    "to peer",
    "limit",
    "to limit",
    "target",
    "met",
)


def _cells(row: Row) -> list[str]:
    spread = f"{number(row.spread[0])} - {number(row.spread[1])}" if row.spread else ""
    return [
        row.name,
        number(row.ours),
        spread,
        row.unit,
        row.peer or "",
        number(row.peers.get(row.peer or "")),
        _times(row.ratio_to_peer),
        number(row.limit),
        _times(row.ratio_to_limit),
        row.target,
    ]


def number(value: float | None) -> str:
    """Three significant digits, and thousands set apart."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, kernel, and the versions that decide speed."""
    found = {"cpu": _first_line("/proc/cpuinfo", "model name", platform.processor() or "unknown")}
    found["cores"] = str(len(os.sched_getaffinity(0)))
    found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    found["kernel"] = platform.release()
    found["python"] = platform.python_version()
    for package in ("numpy", "torch"):
        found[package] = version_of(package) or "not installed"
    found["load before the run"] = f"{os.getloadavg()[0]:.2f}"
    return found


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def current_commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "bench")
        return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _first_line(path: str, key: str, otherwise: str) -> str:
    try:
        lines: Iterable[str] = Path(path).read_text().splitlines()
    except OSError:
        return otherwise
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), otherwise)
