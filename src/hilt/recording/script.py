"""Demonstrations that the script of a task records by itself, before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hilt.core.progress import Report, silent
from hilt.envs.env_protocol import Env
from hilt.recording.record import Recorded, RecordingSummary, Settings, record
from hilt.replay import Log
from hilt.teleop.devices import open_device


def record_with_script(
    wanted: Settings,
    folder: Path,
    make_task: Callable[[], Env],
    script: Mapping[str, object],
    notify: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
) -> None:
    """Records the demonstrations that `folder` is to have and does not have yet. `script`
    is what the device "script" is opened with."""
    if not wanted.episodes or _recorded(folder) >= wanted.episodes:
        return
    notify(f"recording {wanted.episodes} demonstrations of {wanted.task} with its script, into {folder}")
    with make_task() as env, open_device("script", **{"seed": wanted.seed, **script}) as device:
        summary = record(env, device, folder, wanted, watch=_Watch(wanted.task, report), stop=stop, videos=False)
    notify(f"recorded {summary.have} of {wanted.episodes} demonstrations, in {summary.attempts} attempts")


class _Watch:
    """Reports the progress of a recording."""

    def __init__(self, task: str, report: Report):
        self._name, self._report = f"recording demonstrations of {task}", report

    def step(self, summary: RecordingSummary) -> None:
        self._report(self._name, summary.have, summary.wanted)

    begin = end = step

    def episode(self, recorded: Recorded, summary: RecordingSummary) -> None:
        self.step(summary)


def _recorded(folder: Path) -> int:
    if not (folder / "log" / "log.json").exists():
        return 0
    with Log.open(folder / "log", "r") as log:
        return sum("task" in log.facts.about(trajectory) for trajectory in log.trajectories())
