"""The runs below some folders: which there are, and how each stands."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hilt.app.remote_runs import RemoteRuns
from hilt.core.checksums import read_json
from hilt.core.children import final_error
from hilt.core.errors import HiltError
from hilt.observe.live import Standing
from hilt.observe.metrics import FILE as METRICS
from hilt.observe.statistics import wilson
from hilt.replay.storage.lock import writer_of
from hilt.runs.evaluation import EVALUATION_FILE
from hilt.runs.folder import CONFIG, FAILURES, HIL, RUN_FILE

STATES = ("learning", "waiting", "stale", "failed", "died", "ended", "unknown", "unreachable")
STALE_S = 120.0
"""Seconds without a new record after which a run whose process is at work is shown as stale"""
REFRESH_S = 2.0
"""Seconds between two looks at all runs"""
DISK_S = 60.0
"""Seconds between two measurements of the space that a run takes on the disk"""
SEARCH_S, SEARCH_REST = 4.0, 30.0
"""Seconds between two searches for folders of runs; at least as many times the seconds that the last one took"""
MAX_DEPTH = 6
"""How many folders below a given one are searched"""
SKIPPED = {"segments", "checkpoints", "node_modules", "__pycache__", "site-packages"}
UNREADABLE = (HiltError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading the files of a damaged run may raise"""
OVER = {"failed", "died", "ended", "unknown"}
"""States of runs in which no process is at work"""


@dataclass
class RunSummary:
    """One run, as the table shows it."""

    id: str
    """Names the run in the addresses of pages: no path of the disk is taken from an address"""
    path: Path
    name: str
    kind: str = HIL
    recipe: str = ""
    task: str = ""
    state: str = "unknown"
    why: str = ""
    """Why it ended, as run.json has it, or the last error of its logs"""
    reason: str = ""
    """The key of a text of the catalog that says why, with `writer`"""
    writer: str = ""
    """The process that is at work"""
    success: float | None = None
    low: float = 0.0
    high: float = 0.0
    episodes: int = 0
    split: str = ""
    """Of the evaluation that the success is from; empty for the last episodes of training"""
    steps: int = 0
    updates: int = 0
    last: float = 0.0
    """When the newest record was written, in seconds since 1970"""
    began: str = ""
    disk: int = 0
    """Bytes"""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What its run.json has"""
    remote: str = ""
    """The address of the machine that it is on; empty for this one"""
    alarms: tuple[str, ...] = ()
    """Those that are raised"""


class RunLibrary:
    """All runs below these folders, looked at again every few seconds by a thread as long as it is entered.

    A run that cannot be read is listed in `errors`, and the others are shown.
    """

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.time, remotes: Sequence[RemoteRuns] = ()):
        self.paths, self._remotes = list(paths), list(remotes)
        self.runs: dict[str, RunSummary] = {}
        self.errors: dict[str, str] = {}
        self.looked = False
        """Whether all folders were looked at once"""
        self._now = now
        self._watched: dict[str, WatchedRun] = {}
        self._folders: list[tuple[Path, Path]] = []
        self._search_at = 0.0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> RunLibrary:
        self._thread = threading.Thread(target=self._watch, name="hilt-runs", daemon=True)
        self._thread.start()
        for remote in self._remotes:
            self._entered.enter_context(remote)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._entered.close()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(REFRESH_S)

    def look(self) -> None:
        """Looks for runs, and at each of them."""
        with self._lock:
            runs: dict[str, RunSummary] = {}
            errors: dict[str, str] = {}
            self._search()
            for root, folder in self._folders:
                key = id_of(folder)
                if key not in self._watched:
                    self._watched[key] = WatchedRun(key, folder, name_of(root, folder), self._now)
                try:
                    runs[key] = self._watched[key].summary()
                    if not self.looked:  # the first look may take seconds: what is found is shown
                        self.runs = dict(runs)
                except UNREADABLE as error:
                    errors[self._watched[key].name] = str(error) or repr(error)
            for remote in self._remotes:
                self._look_at(remote, runs, errors)
            self._watched = {key: self._watched[key] for key in self._watched if key in runs}
            self.runs, self.errors, self.looked = runs, errors, True

    def _look_at(self, remote: RemoteRuns, runs: dict[str, RunSummary], errors: dict[str, str]) -> None:
        """Adds the runs of another machine, as they are there; while it does not answer, as they were."""
        if remote.problem:
            errors[remote.address] = remote.problem
        for folder, shown in list(remote.found.items()):
            key, host = id_of(folder), remote.address.partition("://")[2]
            if key not in self._watched:
                self._watched[key] = WatchedRun(key, folder, f"{host}: {shown['name']}", self._now)
            try:
                run = self._watched[key].summary()
            except UNREADABLE as error:
                errors[self._watched[key].name] = str(error) or repr(error)
                continue
            for name, value in shown.items():
                if name != "name":
                    setattr(run, name, value)
            run.remote = remote.address
            if remote.problem:
                run.state, run.reason, run.why = "unreachable", "", remote.problem
            runs[key] = run

    def _search(self) -> None:
        """Looks for folders of runs, if it is time to."""
        began = time.monotonic()
        if began < self._search_at:
            self._folders = [(root, folder) for root, folder in self._folders if folder.is_dir()]
            return
        self._folders = [(root, folder) for root in self.paths for folder in run_folders(root)]
        ended = time.monotonic()
        self._search_at = ended + max(SEARCH_S, SEARCH_REST * (ended - began)) if self.looked else 0.0

    def standing(self, key: str) -> Standing:
        """The present numbers of a run, from its newest records."""
        return self._watched[key].standing


class WatchedRun:
    """One run that is read again as it grows."""

    def __init__(self, key: str, path: Path, name: str, now: Callable[[], float]):
        self.key, self.path, self.name, self._now = key, path, name, now
        self.standing = Standing(path, now)
        self._disk, self._measured = 0, -DISK_S
        self._task: tuple[float, str] = (0.0, "")
        self._evaluated: tuple[list[float], dict[str, Any] | None] = ([], None)

    def summary(self) -> RunSummary:
        """Reads what is new, and returns how the run stands."""
        run, path = RunSummary(self.key, self.path, self.name), self.path
        self.standing.read()
        run.metadata = read_json(path / RUN_FILE) if (path / RUN_FILE).is_file() else {}
        run.kind, run.recipe = str(run.metadata.get("kind", HIL)), str(run.metadata.get("recipe", ""))
        run.began, run.task = str(run.metadata.get("began", "")), self._tasks()
        run.steps, run.updates, run.alarms = self.standing.steps, self.standing.updates, tuple(self.standing.alarms)
        run.last = modified(path / METRICS) or modified(path / RUN_FILE)
        run.writer = writer_of(path) or ""
        run.state, run.reason, run.why = state_of(run, self.standing, self._now())
        self._add_success(run)
        if self._now() - self._measured > DISK_S or (not run.writer and self._measured < run.last):
            self._disk, self._measured = size_of(path), self._now()
        run.disk = self._disk
        return run

    def _tasks(self) -> str:
        changed = modified(self.path / CONFIG)
        if changed != self._task[0]:
            tasks = tasks_of(self.path)
            self._task = changed, f"{tasks[0]} (+{len(tasks) - 1})" if len(tasks) > 1 else "".join(tasks)
        return self._task[1]

    def _add_success(self, run: RunSummary) -> None:
        """The success of the newest evaluation with the most updates, of the split test if there is one; else
        that of the last episodes."""
        changed = [modified(path) for path in sorted(self.path.glob(f"evaluations/*/{EVALUATION_FILE}"))]
        if changed != self._evaluated[0]:
            found = max(evaluations(self.path), key=lambda one: (one["split"] == "test", one["update"]), default=None)
            self._evaluated = changed, found
        newest = self._evaluated[1]
        if newest is not None:
            run.success, run.low, run.high = newest["success"], newest["low"], newest["high"]
            run.episodes, run.split = newest["episodes"], newest["split"]
            return
        known = [bool(one["success"]) for one in self.standing.episodes if one.get("success") is not None]
        if known:
            run.success, run.episodes = sum(known) / len(known), len(known)
            run.low, run.high = wilson(sum(known), len(known))


def state_of(run: RunSummary, standing: Standing, now: float) -> tuple[str, str, str]:
    """Returns the state of a run, the key of a text of the catalog that explains it, and words of the run's own."""
    if run.writer:
        if now - run.last > STALE_S:
            return "stale", "why.silent", ""
        waits = not standing.steps and not standing.updates
        acting = [str(one.get("acting", "")) for one in standing.actors.values()]
        if waits or standing.is_paused or (acting and all(who == "waiting" for who in acting)):
            return "waiting", "why.begins" if waits else "", standing.event
        return "learning", "", ""
    ended = run.metadata.get("ended")
    if isinstance(ended, dict):
        reason, words = ended.get("reason", ""), str(ended.get("words") or ended.get("reason", ""))
        if reason in FAILURES:
            return "failed", "", words
        # before failures were noted, a learner that was asked to end because an actor had failed wrote "stopped"
        error = last_error(run.path) if reason == "stopped" else ""
        return ("failed", "", error) if error else ("ended", "", words)
    if now - run.last < STALE_S / 4 and not run.metadata:
        return "learning", "", ""
    if error := last_error(run.path):
        return "failed", "", error
    return ("died", "why.gone", "") if run.metadata else ("unknown", "why.no_process", "")


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run that know their success, oldest first; one that cannot be read is left out."""
    found = []
    for file in sorted(run.glob(f"evaluations/*/{EVALUATION_FILE}")):
        with contextlib.suppress(HiltError, KeyError):
            one = read_json(file)
            one["folder"] = file.parent
            if one["success"] is not None:
                found.append(one)
    return sorted(found, key=lambda one: one["update"])


def tasks_of(run: Path) -> list[str]:
    """The tasks in the frozen settings of a run. Only their lines are parsed: a table has many runs, and parsing all
    settings of one takes tens of milliseconds."""
    text = (run / CONFIG).read_text(errors="replace") if (run / CONFIG).is_file() else ""
    lines = re.search(r"^tasks?:.*(?:\n[ -].*)*", text, re.MULTILINE)
    try:
        found = next(iter(yaml.safe_load(lines[0]).values())) if lines else []
    except (yaml.YAMLError, AttributeError):
        return []
    return [task for task in (found if isinstance(found, list) else [found]) if isinstance(task, str)]


def last_error(run: Path) -> str:
    """The error with which a log of the run ends, of the process that said so last."""
    for log in sorted(run.glob("logs/*.log"), key=modified, reverse=True):
        if error := _error_at_end(log, modified(log), log.stat().st_size):
            return f"{log.stem}: {error}"
    return ""


@functools.lru_cache(4096)
def _error_at_end(log: Path, changed: float, size: int) -> str:
    """Read again only when the log was written since, or has another size."""
    return final_error(tail(log, 60))


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a text file."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 400 * lines))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def run_folders(root: Path) -> Iterator[Path]:
    """Folders of runs: `root` itself, or what lies below it. Nothing is looked for inside a run or a log."""
    folders = [(root, 0)]
    while folders:
        folder, depth = folders.pop()
        if (folder / METRICS).is_file() or ((folder / RUN_FILE).is_file() and (folder / CONFIG).is_file()):
            yield folder
        elif depth < MAX_DEPTH and not (folder / "log.json").is_file():
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                below = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and e.name not in SKIPPED]
                folders += [(path, depth + 1) for path in sorted(below, reverse=True) if path.name[0] != "."]


def id_of(folder: Path) -> str:
    """A short name for a folder, the same as long as it lies there."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]


def name_of(root: Path, folder: Path) -> str:
    """What a run is called: its folder, from the given one on."""
    if folder == root:
        return folder.resolve().name
    return folder.relative_to(root).as_posix()


def size_of(folder: Path) -> int:
    """The bytes that a folder takes on the disk."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
