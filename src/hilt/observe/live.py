"""Shows the state of a run in a terminal: a table that keeps itself up to date, or in a pipe a line at intervals.

It reads the run's ``metrics.jsonl``, so showing it needs no connection to the learner; a thread does so for as long as
it is shown. What the process that shows it does itself comes through `Live.report`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from hilt.core import progress
from hilt.core.files import storage_errors
from hilt.core.progress import Phases, elapsed
from hilt.observe.metrics import FILE, GOES_ON, RESUMED, is_paused

EPISODES = 20
"""The last ones, over which success and interventions are counted"""
EVENTS = 200
"""The last ones that are kept"""
POLL_INTERVAL_S, TABLE_S = 0.25, 0.5
"""Seconds between two looks whether anything is due, and between two states of the table"""
SHARES = {"torch_share": "torch", "sample_wait_share": "batches", "wait_share": "waiting for steps"}
SHARES |= {"simulator_share": "simulator", "model_share": "policy", "update_share": "learning", "other_share": "other"}
"""Where the learner's time goes, and that of post-training"""
SILENT_S = 10.0
"""Seconds without a report after which an actor is shown as silent"""


class Standing:
    """The state of a run, from the records in its file so far."""

    def __init__(self, run: Path, now: Callable[[], float] = time.time):
        self._path, self._place, self._now = run / FILE, 0, now
        self.update: dict[str, Any] = {}
        """The newest value of every metric of the learner"""
        self.episodes: deque[dict[str, Any]] = deque(maxlen=EPISODES)
        self.actors: dict[str, dict[str, Any]] = {}
        self.alarms: dict[str, str] = {}
        """Those that are raised now: sentence and cure"""
        self.event = ""
        self.events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        """The last events, each with its time in seconds since 1970"""
        self.happens = False
        """Whether the event is the newest of all records"""
        self.steps = self.updates = 0
        self._first: float | None = None
        self._last = self._paused = 0.0
        self.is_paused = False
        """Whether the run is paused, as while the operator is out of reach"""
        # until there is more, no process is at work
        self._before = self._path.stat().st_size if self._path.exists() else 0

    def read(self) -> bool:
        """Takes in the lines that are new, and whole; whether there were any."""
        if not self._path.exists():
            return False
        with storage_errors(self._path), self._path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._place += whole
        for line in data[:whole].splitlines():
            self._take(json.loads(line))
        return whole > 0

    def _take(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if self._first is not None and (self.is_paused or record.get("event") == GOES_ON):
            self._paused += record["time"] - self._last
        self.is_paused = is_paused(record, self.is_paused)
        if record.get("event") in (GOES_ON, RESUMED):
            self.alarms.clear()  # who goes on raises anew what is still so
        elif "alarm" in record:
            self.alarms.pop(record["alarm"], None)
            self.alarms |= {record["alarm"]: record["event"]} if record[f"alarm/{record['alarm']}"] else {}
        if record.get("event") == RESUMED:
            self.updates = max(0, record["update"])
        elif kind == "update":
            self.update |= record
        elif kind == "episode":
            self.episodes.append(record)
        elif kind == "actor":
            self.actors[str(record.get("actor", "?"))] = record
        self.happens = kind == "event" or (self.happens and kind == "actor")
        if kind == "event":
            self.event = str(record["event"])
            self.events.append((record["time"], self.event))
        self.steps, self.updates = max(self.steps, record["step"]), max(self.updates, record["update"])
        if self._first is None and record["step"] > 0:
            self._first = record["time"]
        self._last = record["time"]

    def seconds(self) -> float:
        """Since the first online step, without pauses and without the time in which no learner was running."""
        now = self._now() if self._place > self._before and not self.is_paused else self._last
        return 0.0 if self._first is None else max(0.0, now - self._first - self._paused)

    def left(self, limits: Mapping[str, float]) -> float | None:
        """Seconds until the first of the limits is reached, as fast as it goes now; None when there is none."""
        learned = self.updates - int(self.update.get("waited_steps") or 0)
        rates = {"max_steps": ("updates_per_second", learned), "max_env_steps": ("env_steps_per_second", self.steps)}
        found = [limits["max_seconds"] - self.seconds()] if limits.get("max_seconds") else []
        for name, (rate, done) in rates.items():
            if limits.get(name) and self.update.get(rate):
                found.append((limits[name] - done) / self.update[rate])
        return max(0.0, min(found)) if found else None

    def remaining(self, limits: Mapping[str, float]) -> str:
        """The same in words. With `usual_steps`, the number of updates after which a run of this
        kind has usually reached its goal, it is the time until then; beyond that, the time until
        the first limit, which is all that is known."""
        usual, rate = limits.get("usual_steps", 0), self.update.get("updates_per_second")
        if rate and self.updates < usual:
            return f"about {clock((usual - self.updates) / rate)} left"
        left = self.left(limits)
        return "" if left is None else f"{'at most ' if usual else ''}{clock(left)} left"

    def success(self) -> str:
        """The success of all episodes, and of those that the policy ended alone; a dash where
        the environment does not report success."""
        known = [one for one in self.episodes if one.get("success") is not None]
        alone = [one for one in known if not one.get("intervention_steps") and not one.get("lost_steps")]
        if not known:
            return "–" if self.episodes else "no episode yet"
        shown = f"{_share(known)} of the last {len(known)} episodes"
        return shown + f"; {_share(alone)} of {len(alone)} without take-over" * any(
            "intervention_steps" in one for one in known
        )

    def validation(self) -> str:
        """The success of post-training on states that are not trained on."""
        u = self.update
        if not _is(u, "validation_success"):
            return ""
        return (
            f"{100 * u['validation_success']:.0f}% [{100 * u['validation_low']:.0f}, {100 * u['validation_high']:.0f}]"
        )

    def person(self) -> str:
        steps = sum(one.get("length", 0) for one in self.episodes)
        made = sum(one.get("intervention_steps", 0) for one in self.episodes)
        return f"{100 * made / steps:.0f}% of steps" if steps else "–"

    def lost(self) -> str:
        """How often contact to the operator was lost, and what of it is in the last episodes."""
        times = sum(one.get("contact_losses", 0) for one in self.actors.values())
        steps = sum(one.get("lost_steps", 0) for one in self.episodes)
        return (
            f"{times} times so far; {steps:,} steps of the last {len(self.episodes)} episodes" if times or steps else ""
        )

    def help(self) -> str:
        """The number of times that the policy asked the operator for help, and that they answered."""
        asked, answered = (
            sum(one.get(name, 0) for one in self.actors.values()) for name in ("help_requests", "help_answered")
        )
        return f"{asked:.0f} times, answered {answered:.0f} times" if asked else ""

    def acting(self) -> str:
        """Who acts, at each actor."""
        now = self._now()
        acting = {
            name: "silent" if now - one["time"] > SILENT_S else str(one.get("acting", "there"))
            for name, one in self.actors.items()
        }
        return ", ".join(f"{name}: {who}" for name, who in sorted(acting.items())) or "none yet"

    def spooled(self) -> str:
        """How many steps wait at actors for the learner; empty if none do."""
        waiting = {name: one.get("spooled") or 0 for name, one in sorted(self.actors.items())}
        return ", ".join(f"{name}: {count:,} steps" for name, count in waiting.items() if count)

    def rows(self, over: bool = False) -> list[tuple[str, str]]:
        """The rows of the table; values that were not reported are left out. `over`: no process is at work, and what
        is so only while one is, such as rates and who acts, is left out."""
        u, length = self.update, [one["length"] for one in self.episodes if one.get("length")]
        returns = [one["return"] for one in self.episodes if one.get("return") is not None]
        late = [one["lateness_p99_ms"] for one in self.actors.values() if one.get("lateness_p99_ms") is not None]
        now = {} if over else u
        shares = [f"{100 * now[name]:.0f}% {word}" for name, word in SHARES.items() if _is(now, name)]
        found = [
            ("who acts", "" if over else self.acting()),
            ("online steps", f"{self.steps:,}{_rate(now, 'env_steps_per_second')}"),
            ("updates", "   ".join([f"{self.updates:,}{_rate(now, 'updates_per_second')}", *shares])),
            ("success", self.success()),
            ("validation", self.validation()),
            ("a person makes", self.person() if any("intervention_steps" in one for one in self.episodes) else ""),
            ("contact lost", self.lost()),
            ("asked for help", self.help()),
            ("episode", f"{sum(length) / len(length):.0f} steps" if length else ""),
            ("return", f"{sum(returns) / len(returns):.3g}" if returns else ""),
            ("losses", _values(u, {"critic": "critic_loss", "actor": "actor_loss", "temperature": "temperature_loss"})),
            ("ratios", _values(u, {"clipped": "clip_fraction", "KL": "kl"})),
            (
                "Q values",
                _values(u, {"online": "q/online", "demo": "q/demo", "human": "q/human"}) or _values(u, {"mean": "q"}),
            ),
            ("policy", _values(u, {"entropy": "entropy", "temperature": "temperature"})),
            ("acting weights", f"{u['staleness']:.0f} updates old" if _is(u, "staleness") else ""),
            ("spool", self.spooled()),
            ("steps kept", _values(u, {"online": "log_steps", "demo": "demo_steps", "human": "human_steps"}, ",.0f")),
            ("control rate", f"{max(late):.1f} ms late at the 99th percentile" if late else ""),
            ("last event", self.event if self.event not in self.alarms.values() and not over else ""),
        ]
        alarms = [("ALARM", text.removeprefix("alarm ")) for text in self.alarms.values()]
        return [*alarms, *((name, text) for name, text in found if text)]

    def line(self, limits: Mapping[str, float]) -> str:
        """All of it that fits in a line; before learning, which may take minutes, what happens."""
        if not self.steps and not self.updates:
            return self.event
        parts = [
            clock(self.seconds()),
            f"{self.steps:,} steps{_rate(self.update, 'env_steps_per_second')}",
            f"{self.updates:,} updates{_rate(self.update, 'updates_per_second')}",
            f"success {self.success()}" if self.episodes else "",
            f"validation {self.validation()}" if self.validation() else "",
            f"person {self.person()}" if any("intervention_steps" in one for one in self.episodes) else "",
            f"contact lost {self.lost()}" if self.lost() else "",
            _values(self.update, {"critic loss": "critic_loss"}),
            self.remaining(limits),
            f"ALARM {', '.join(self.alarms)}" if self.alarms else "",
            self.event if self.happens or not self.updates else "",
        ]
        return "  ".join(part for part in parts if part)


class Live:
    """Shows a run for as long as it is entered. It looks at the run by itself;
    `look` does so at once, when something is due."""

    def __init__(
        self,
        run: Path,
        title: str = "",
        limits: Mapping[str, float] | None = None,
        file: TextIO | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        beat: bool = True,
    ):
        """`limits`: max_seconds, max_steps, max_env_steps as the run's settings have them, 0 is none; and usual_steps,
        for a run that ends at a goal (see `Standing.remaining`). `beat`: whether there is a thread that looks."""
        from rich.console import Console

        self._standing, self._title, self._limits = Standing(run), title or str(run), dict(limits or {})
        self._console = Console(file=file or sys.stdout)
        self._now = now
        self._began = self._shown = self._since = now()
        self._line = self._said = ""
        self._beat = beat
        self._phases = Phases(now)
        self._live: Any = None
        self._lock = threading.RLock()
        self._over = threading.Event()

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            from rich.live import Live as Screen

            self._live = Screen(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        if self._beat:
            self._thread = threading.Thread(target=self._watch, name="hilt-live", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._beat:
            self._thread.join(5)
        self.report("")
        self.look(last=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notify(self, text: str) -> None:
        """A line of its own, above the table."""
        with self._lock:
            self._console.print(progress.printable(text), markup=False, highlight=False, soft_wrap=True)

    def report(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """What this process does, a `hilt.core.progress.Report`: shown beside the run
        until there is another, or an empty name."""
        with self._lock:
            self._phases.turn(phase, done, total, note)
            self.look()

    def look(self, last: bool = False) -> None:
        with self._lock:
            now = self._now()
            if not last and now - self._shown < (TABLE_S if self._live is not None else progress.LINE_S):
                return
            self._shown = now
            news = self._standing.read()
            if self._live is not None:
                self._live.update(self._table(), refresh=True)
            elif news or not last:
                self._print(now)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone: the next write raises the error
            while not self._over.wait(POLL_INTERVAL_S):
                self.look()

    def _print(self, now: float) -> None:
        """Prints one line. If nothing has changed since the last one, it shows for how long."""
        parts = [self._standing.line(self._limits), phase.text() if (phase := self._phases.current) is not None else ""]
        line = "  ".join(part for part in parts if part)
        if not line:
            return
        if line != self._line:
            self._line, self._since = line, now
        else:
            line = f"{line} ({elapsed(now - self._since)} so far)"
        if line != self._said:
            self._said = line
            self.notify(line)

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        left, seconds = self._standing.remaining(self._limits), self._standing.seconds()
        when = (
            f"{clock(seconds)} since the first step"
            if seconds
            else f"{clock(self._now() - self._began)} since it began"
        )
        when += f", {left}" if left else ""
        made = Table(box=None, show_header=False, pad_edge=False)
        now = [("now", phase.text())] if (phase := self._phases.current) is not None else []
        for name, text in [*now, *self._standing.rows()]:
            style = {"success": "bold", "ALARM": "bold red"}.get(name, "")
            made.add_row(Text(name, "bold red" if name == "ALARM" else "dim"), Text(progress.printable(text), style))
        return Group(Text(f"{self._title}   {when}", "bold"), made)


def clock(seconds: float) -> str:
    """``3:07``, ``1:02:15``"""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _is(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is not None


def _rate(values: Mapping[str, Any], name: str) -> str:
    return f" ({values[name]:.3g}/s)" if _is(values, name) else ""


def _share(episodes: list[dict[str, Any]]) -> str:
    return f"{100 * sum(one['success'] for one in episodes) / len(episodes):.0f}%" if episodes else "–"


def _values(values: Mapping[str, Any], names: Mapping[str, str], form: str = ".3g") -> str:
    return "   ".join(f"{word} {values[name]:{form}}" for word, name in names.items() if _is(values, name))
