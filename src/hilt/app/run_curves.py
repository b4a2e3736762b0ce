"""The curves of runs as JSON, for the charts of the app: the same as `hilt plot` draws, read again as a run grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.app.run_library import UNREADABLE, modified
from hilt.app.words import Words
from hilt.core.errors import EmptyError
from hilt.core.tree import Array
from hilt.observe.drawing import PALETTE, Chart, Line
from hilt.observe.metrics import FILE as METRICS
from hilt.observe.plots import DARK, PlottedRun, RunGroup, all_charts

MAX_KEPT = 16
"""Runs whose records are kept in memory"""
MAX_SMOOTH = 1000
REST = 10.0
"""A run is read again at the earliest after this many times the seconds that reading it took"""


@dataclass(frozen=True)
class ReadRun:
    """A run as it was read."""

    stamp: str
    """Changes with its files"""
    again: float
    """When it may be read again"""
    run: PlottedRun | None
    problem: str = ""
    """Why it cannot be drawn"""


class RunCurves:
    """Reads runs for charts. Many browsers that look at one run cost one reading of it."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[Path, ReadRun] = {}

    def stamp(self, paths: Sequence[Path]) -> str:
        """Changes when one of the runs has something new to draw."""
        with self._lock:
            return "/".join(self._read(path).stamp for path in paths)

    def charts(
        self, paths: Sequence[Path], names: Sequence[str], axis: str, smooth: int, word: Words
    ) -> dict[str, object]:
        """All charts of these runs, and what is wrong with those that cannot be drawn. Of several runs, each has a
        curve of its own with its name."""
        with self._lock:
            read = [self._read(path) for path in paths]
            runs = list(zip(read, names, strict=True))
            groups = [RunGroup([one.run], name) for one, name in runs if one.run is not None]
            made = all_charts(groups, axis, smooth) if groups else []
            return {
                "charts": [_plain(chart, smooth, word) for chart in made],
                "problems": [f"{name}: {one.problem}" for one, name in runs if one.problem],
                "palette": PALETTE,
                "dark": DARK,
                "stamp": "/".join(one.stamp for one in read),
            }

    def _read(self, path: Path) -> ReadRun:
        """The run, read again if its files have changed and enough time is over."""
        newest = max([modified(path / METRICS), *map(modified, path.glob("evaluations/*/evaluation.json"))])
        size = (path / METRICS).stat().st_size if (path / METRICS).exists() else 0
        stamp, known, began, problem = f"{size}-{newest}", self._known.get(path), self._now(), ""
        if known is not None and (known.stamp == stamp or began < known.again):
            return known
        run = None
        try:
            run = PlottedRun.load(path) if size else None
        except EmptyError:
            pass
        except UNREADABLE as error:
            problem = str(error) or repr(error)
        self._known.pop(path, None)
        self._known[path] = ReadRun(stamp, began + REST * (self._now() - began), run, problem)
        while len(self._known) > MAX_KEPT:
            self._known.pop(next(iter(self._known)))
        return self._known[path]


def _plain(chart: Chart, smooth: int, word: Words) -> dict[str, Any]:
    title = word.metric(chart.title.replace(f" {smooth} ", " {n} ")).replace("{n}", str(smooth))
    return {
        "key": chart.title,
        "title": title,
        "unit": word.metric(chart.unit),
        "x_label": word.metric(chart.x_label),
        "percent": chart.percent,
        "lines": [_plain_line(line, word) for line in chart.lines],
    }


def _plain_line(line: Line, word: Words) -> dict[str, Any]:
    return {
        "name": word.metric(line.name),
        "whose": line.whose,
        "color": line.color,
        "dash": line.dash,
        "dots": line.dots,
        "x": _numbers(line.x),
        "y": _numbers(line.y),
        "low": None if line.low is None else _numbers(line.low),
        "high": None if line.high is None else _numbers(line.high),
    }


def _numbers(values: Array) -> list[float | None]:
    """Six digits are more than a screen shows; what is not finite is null."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
