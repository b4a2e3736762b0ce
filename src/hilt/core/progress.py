"""Shows what a long command does, how far it is, and the time left: a bar in a
terminal, at most one line in ten seconds in a pipe.

    progress = Progress()
    with progress.phase("exam, before", total=100) as move:
        move(34, note="31 succeeded")            # exam, before: 34 of 100, 31 succeeded, about 20 s left
    with progress.phase("importing torch"):      # without a count: importing torch, 10 s so far
        import torch

A function that has several phases takes a `Report` and calls it as ``report("recording", 3, 20)``: a new name
begins a new phase, 0 as the total means that there is no count. `Progress.phases` and `hilt.observe.live.Live` give
one, so the function does not know who shows it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

LINE_S = 10.0
"""Seconds between two lines in a pipe"""
POLL_INTERVAL_S = 0.5
"""Seconds between two looks whether a line is due, while nothing moves"""
JOIN_S = 5.0
"""How long the end of the last phase waits for the thread that looks, in seconds"""
WINDOW_S = 60.0
"""The rate is measured over this many seconds"""
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What would steer a terminal, or cannot be written to one"""
MARK_S = 1.0
"""Seconds between two marks that the rate is measured from"""


class Report(Protocol):
    """Called with a phase: its name, how much of it is done, the total (0: there is no count), and a note."""

    def __call__(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None: ...


class Move(Protocol):
    """Moves a phase on; without a total, the one that it has stays."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


def silent(phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
    """The `Report` that shows nothing."""


def paced(notify: Callable[[str], None], interval_s: float = 5.0, now: Callable[[], float] = time.monotonic) -> Report:
    """A `Report` that prints lines: one when a phase begins, then one every `interval_s`
    seconds, and one at the end of a counted phase."""
    phases, shown_at, last = Phases(now), 0.0, ""

    def report(phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        nonlocal shown_at, last
        before, one = phases.current, phases.turn(phase, done, total, note)
        if (
            one is not None
            and (one is not before or now() - shown_at >= interval_s or one.ended)
            and (text := one.text()) != last
        ):
            notify(text)
            shown_at, last = now(), text

    return report


def printable(text: str) -> str:
    """A text with everything in it visible that would steer a terminal: escape sequences, other control
    characters but for new lines and tabs, and marks that turn the direction of writing. The names of datasets,
    actors and files may come from untrusted sources."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Phase:
    """One part of a long command: how far it is, and the rate of the last minute."""

    def __init__(
        self, name: str, total: int = 0, done: int = 0, unit: str = "", now: Callable[[], float] = time.monotonic
    ):
        """`done`: what was done before, by an earlier process for instance, and does not count
        for the rate. `unit`: what is counted."""
        self.name, self.done, self.total, self.note, self._unit, self._now = (
            name,
            done,
            total,
            "",
            unit and f" {unit}",
            now,
        )
        self._began = now()
        self._marks = deque([(self._began, done)])

    def move(self, done: int, total: int | None = None, note: str = "") -> None:
        now = self._now()
        self.total = self.total if total is None else total
        self.note = note
        if done < self.done:  # it was begun anew
            self._marks = deque([(now, done)])
        elif done > self.done and now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, done))
            while len(self._marks) > 2 and now - self._marks[1][0] > WINDOW_S:
                self._marks.popleft()
        self.done = done

    @property
    def ended(self) -> bool:
        """Whether all is done of what is counted."""
        return self.done >= self.total > 0

    def seconds(self) -> float:
        """Since it began."""
        return self._now() - self._began

    def left(self) -> float | None:
        """Seconds until all is done, at the measured rate; None while there is nothing to measure."""
        since, before = self._marks[0]
        if not self.total or self.done <= before:
            return None
        return max(0, self.total - self.done) * (self._now() - since) / (self.done - before)

    def text(self) -> str:
        """``exam, before: 34 of 100, about 20 s left``; without a count ``importing torch, 10 s so far``."""
        left = self.left()
        if left is not None and self.done < self.total:
            when = f"about {spell(left)} left"
        else:
            when = f"{elapsed(self.seconds())} so far" if self.seconds() >= 1 else ""
        count = f"{self.name}: {self.done:,} of {self.total:,}{self._unit}" if self.total else self.name
        return ", ".join(part for part in (count, self.note, when) if part)

    def last(self) -> str:
        """``exam, before: 100 of 100, done in 58 s``"""
        count = f": {self.done:,} of {self.total:,}," if self.total else ":"
        return f"{self.name}{count} done in {spell(self.seconds())}"


class Phases:
    """One phase after the other, as a `Report` receives them. An unfinished phase that
    is reported again continues with its rate."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.current: Phase | None = None
        self._now, self._paused = now, dict[str, Phase]()

    def turn(self, phase: str, done: int, total: int, note: str) -> Phase | None:
        """The one of this name, moved; None for an empty name."""
        if self.current is not None and self.current.name != phase:
            if self.current.total and not self.current.ended:
                self._paused[self.current.name] = self.current
            self.current = None
        if phase and self.current is None:
            self.current = self._paused.pop(phase, None) or Phase(phase, total, done, now=self._now)
        if self.current is not None:
            self.current.move(done, total, note)
        return self.current


class Progress:
    """The phases of one command, on the standard error output by default. The
    innermost phase is shown; in a terminal, all of them.

    While a phase is open, a thread prints lines when they are due, whether the phase is moved or not.
    """

    def __init__(self, file: TextIO | None = None, now: Callable[[], float] = time.monotonic, beat: bool = True):
        """`beat`: whether there is that thread; without it `tick` does the same."""
        self._given, self._now, self._beat = file, now, beat
        self._open: list[_Shown] = []
        self._lock = threading.RLock()
        self._line = ""
        self._shown = self._ended = now()
        self._screen: Any = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 0, done: int = 0, unit: str = "", announce: bool = False) -> Iterator[Move]:
        """Shown for as long as it is entered. `announce`: in a pipe it is named at once, for
        what may keep every thread from running."""
        one = self._begin(Phase(name, total, done, unit, self._now), announce)

        def move(done: int, total: int | None = None, note: str = "") -> None:
            with self._lock:
                one.phase.move(done, total, note)
                self._show(one)

        try:
            yield move
        except BaseException:
            self._end(one, whole=False)
            raise
        else:
            self._end(one)
        finally:
            self._join()

    @contextlib.contextmanager
    def phases(self) -> Iterator[Report]:
        """For a function that reports its phases itself: each ends when the next begins, or
        when this is left. An empty name ends it."""
        phases, shown = Phases(self._now), list[_Shown]()

        def report(phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
            with self._lock:
                one = phases.turn(phase, done, total, note)
                over = [before for before in shown if before.phase is not one]
                if one is not None and len(over) == len(shown):
                    shown.append(self._begin(one))
                for before in over:  # after the next has begun, so that a bar does not go and come
                    shown.remove(before)
                    self._end(before, whole=not before.phase.total or before.phase.ended)
                for now in shown:
                    self._show(now)

        try:
            yield report
        except BaseException:
            for one in shown:
                self._end(one, whole=False)
            raise
        else:
            report("")
        finally:
            self._join()

    def restart(self) -> None:
        """A new command begins, which was not silent until now."""
        with self._lock:
            self._line, self._shown = "", self._now()

    def notify(self, text: str, err: bool = False) -> None:
        """A line of the command's own on the standard output, or beside the phases (`err`). Within phases it takes the
        place of `echo`, which would write into a bar."""
        text = printable(text)
        with self._lock:
            if self._screen is not None and (err or sys.stdout.isatty()):
                self._screen.console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif err:
                self._print(text)
            else:
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    def tick(self) -> None:
        """Prints a line if one is due."""
        with self._lock:
            if self._open and self._screen is None and self._now() - self._shown >= LINE_S:
                one = self._open[-1]
                text = one.phase.text()
                if text == self._line:
                    text += f", {elapsed(one.phase.seconds())} so far"
                one.lines += 1
                self._print(text)

    # Inside

    def _begin(self, phase: Phase, announce: bool = False) -> _Shown:
        with self._lock:
            one = _Shown(phase)
            if not self._open and self._now() - self._ended > LINE_S:  # what was between is not this one's to tell
                self._shown = self._now()
            self._open.append(one)
            if self._is_terminal():
                one.task = self._bar(one.phase)
            elif len(self._open) == 1 and self._beat:
                self._over = threading.Event()
                self._thread = threading.Thread(
                    target=self._look, args=(self._over,), name="hilt-progress", daemon=True
                )
                self._thread.start()
            if announce and one.task is None:
                self._print(f"{phase.name} ...")
        return one

    def _show(self, one: _Shown) -> None:
        if one.task is not None:
            self._screen.update(one.task, completed=one.phase.done, total=one.phase.total or None)
        else:
            self.tick()

    def _end(self, one: _Shown, whole: bool = True) -> None:
        with self._lock:
            self._open.remove(one)
            if one.task is not None:
                self._screen.remove_task(one.task)
            elif whole and one.lines:
                self._print(one.phase.last())
            if not self._open:
                self._ended = self._now()
                self._over.set()
                if self._screen is not None:
                    self._screen.stop()
                    self._screen = None

    def _join(self) -> None:
        """Waits for the thread after the last phase. Its lock is not held here,
        since the thread may need it once more."""
        with self._lock:
            thread = None if self._open else self._thread
        if thread is not None:
            thread.join(JOIN_S)

    def _look(self, over: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone: the next write raises the error
            while not over.wait(POLL_INTERVAL_S):
                self.tick()

    def _print(self, text: str) -> None:
        text = printable(text)
        self._shown = self._now()
        if text != self._line:
            self._line = text
            self._file.write(f"{text}\n")
            self._file.flush()

    def _bar(self, phase: Phase) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, Task
        from rich.progress import Progress as Screen
        from rich.text import Text

        class Words(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(task.fields["phase"].text())

        if self._screen is None:
            console = Console(file=self._given, stderr=self._given is None)
            # what goes into a file or another program must not come out here instead
            self._screen = Screen(
                Words(), BarColumn(), console=console, transient=True, redirect_stdout=sys.stdout.isatty()
            )
            self._screen.start()
        return self._screen.add_task(phase.name, total=phase.total or None, phase=phase)

    def _is_terminal(self) -> bool:
        there = find_spec("rich") is not None  # there may be none yet: this is used to install packages
        return there and self._file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    @property
    def _file(self) -> TextIO:
        return self._given or sys.stderr


class _Shown:
    """A phase, and what has been shown of it."""

    def __init__(self, phase: Phase):
        self.phase, self.lines = phase, 0
        self.task: Any = None


def spell(seconds: float) -> str:
    """``45 s``, ``7 min``, ``2.5 h``"""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def elapsed(seconds: float) -> str:
    """To the second, so that two lines differ: ``45 s``, ``2:10 min``, ``1:02:15 h``"""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
