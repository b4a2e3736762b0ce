"""Goes back to the checkpoint from before an alarm: a run that collapsed is resumed from where it was still good.

    found = last_good(Path("runs/pick"))       # which alarm stands, since when, and which checkpoint is before it
    go_back(Path("runs/pick"))                 # the next --resume goes on from there

The alarm is the one that ended the run, or of those that stand the one that began first. Nothing is deleted: what came
after the checkpoint is moved to ``RUN/set_aside/N``, and stays in the logs. ``run.json`` has a record of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError
from hilt.core.files import DISK
from hilt.observe.alarm_watch import AlarmSpans
from hilt.observe.metrics import FILE, Metrics, read_metrics
from hilt.runs import checkpoint
from hilt.runs.folder import RUN_FILE, now

SET_ASIDE = "set_aside"
WENT_BACK = "went_back"
"""In ``run.json``: the list of the times that a run went back"""
BY_UPDATE = {
    checkpoint.FOLDER: re.compile(r"(\d+)"),
    "actor": re.compile(r"global_step_(\d+)"),
    "evaluations": re.compile(r"(?:\w+-)+(\d{8,})(?:-.*)?"),
}
"""Folders of a run whose entries are of an update, and where their names have it"""
BEST = ("best", "best_step")
"""In the state of a checkpoint of post-training: the best validation so far, whose weights are kept apart"""


@dataclass(frozen=True)
class LastGood:
    """The checkpoint to go back to."""

    update: int
    alarm: str
    began: int
    """The update at which the alarm was raised"""
    newest: int
    """The update of the newest checkpoint"""

    @property
    def text(self) -> str:
        """Where it goes back to, and why, in a line."""
        return f"goes back to update {self.update:,}: alarm {self.alarm} was raised at update {self.began:,}"


def last_good(run: Path) -> LastGood:
    """The newest checkpoint from before the alarm; an error says why there is none."""
    spans = AlarmSpans()
    for record in read_metrics(run, ["update", "event"]) if (run / FILE).exists() else []:
        spans.take(record)
    standing = dict(spans.standing)
    ended = read_json(run / RUN_FILE).get("ended", {}) if (run / RUN_FILE).is_file() else {}
    if not standing and ended.get("reason") == "not_finite":
        standing = {"not_finite": int(ended["step"])}
    if not standing:
        raise ConfigError(f"{run}: no alarm is raised, so there is nothing to go back from. --resume goes on.")
    there = checkpoint.numbers(run)
    later = {name: at for name, at in standing.items() if at > 0} or standing
    alarm = spans.stopped if spans.stopped in later else min(later, key=lambda name: later[name])
    began = later[alarm]
    good = [number for number in there if number < began]
    if not good:
        raise ConfigError(f"{run}: alarm {alarm} was raised {_none_before(began, there)}")
    return LastGood(good[-1], alarm, began, there[-1])


def _none_before(began: int, there: list[int]) -> str:
    """When an alarm was raised that no checkpoint is from before, and what can be done; `there`: the checkpoints."""
    goes_on = "goes on from the newest one" if there else "begins learning anew: give other settings with it"
    if not began:
        return f"before the first update, so no checkpoint is from before it. --resume {goes_on}."
    oldest = f"the oldest checkpoint is of update {there[0]:,}" if there else "there is no checkpoint"
    return (
        f"at update {began:,}, and {oldest}: none is from before it. Begin another run, with a smaller "
        f"checkpoint_period; --resume {goes_on}."
    )


def go_back(run: Path) -> LastGood:
    """Moves aside what came after the last good checkpoint, and records it. Refused while a process is at work."""
    with checkpoint.alone(run, "is being trained", "Stop it first."):
        found = last_good(run)
        newest = checkpoint.load(run, found.newest) if found.newest != found.update else None
        good = checkpoint.load(run, found.update)  # a damaged one is an error, before anything is moved
        if newest is not None and BEST[0] in newest.state:
            best = {name: newest.state[name] for name in BEST}
            checkpoint.save(run, found.update, good.agent, {**good.state, **best}, keep=found.newest + 1)
        folder = _next_folder(run)
        moved = _set_aside(run, folder, found.update)
        metadata = read_json(run / RUN_FILE) if (run / RUN_FILE).is_file() else {}
        record = {
            "at": now(),
            "update": found.update,
            "from": found.newest,
            "alarm": found.alarm,
            "raised_at": found.began,
            SET_ASIDE: moved and folder.relative_to(run).as_posix(),
        }
        write_json(run / RUN_FILE, {**metadata, WENT_BACK: [*metadata.get(WENT_BACK, []), record]})
        step = read_metrics(run)[-1]["step"] if (run / FILE).exists() else 0
        with Metrics(run) as metrics:
            metrics.event(found.text, update=found.update, step=step)
            metrics.resumed(found.update, step)
    return found


def went_back_to(run: Path) -> int:
    """The update that a run went back to last; -1: it never did."""
    records = read_json(run / RUN_FILE).get(WENT_BACK, []) if (run / RUN_FILE).is_file() else []
    return int(records[-1]["update"]) if records else -1


def _set_aside(run: Path, folder: Path, update: int) -> bool:
    """Moves what is of later updates, newest first; whether there was any."""
    moved = False
    for name, pattern in BY_UPDATE.items():
        entries = [(int(match[1]), path) for path in (run / name).glob("*") if (match := pattern.fullmatch(path.name))]
        for number, path in sorted(entries, reverse=True):
            if number > update:
                DISK.make_folders(folder / name)
                DISK.rename(path, folder / name / path.name)
                moved = True
    return moved


def _next_folder(run: Path) -> Path:
    known = [int(path.name) for path in (run / SET_ASIDE).glob("*") if path.name.isdecimal()]
    return run / SET_ASIDE / str(max(known, default=0) + 1)


__all__ = ["LastGood", "go_back", "last_good", "went_back_to"]
