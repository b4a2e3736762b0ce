"""Episodes of an arm as it should be recorded: it moves smoothly, the camera sees it, and actions cause its motion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hilt.checks import CheckReport, check_dataset
from hilt.checks.finding_texts import LANGUAGES, render
from hilt.checks.run_checks import check_episodes
from hilt.core.tree import Array
from hilt.formats import create
from hilt.formats.episodes import Dataset, Episode, Job, transitions

SIZE = 16
INSTRUCTION = "put the cube down"


def smooth(rng: np.random.Generator, length: int, width: int, scale: float = 0.4) -> Array:
    """A path of slow and quick phases, in radians, ``[length, width]``."""
    time = np.arange(length)[:, None]
    path = np.zeros((length, width))
    for period in (17.0, 29.0, 61.0):
        path += rng.uniform(0.3, 1, width) * np.sin(2 * np.pi * time / period + rng.uniform(0, 2 * np.pi, width))
    return scale * path


def pictures(path: Array) -> Array:
    """A bright block on a gray ground, which is where the first two joints are."""
    frames = np.full((len(path), SIZE, SIZE, 3), 90, np.uint8)
    places = np.clip((path[:, :2] + 1) / 2 * (SIZE - 5), 0, SIZE - 5)
    for frame, (row, column) in zip(frames, places, strict=True):
        grid = np.arange(SIZE)
        inside = np.clip(3 - np.abs(grid - row - 2), 0, 1)[:, None] * np.clip(3 - np.abs(grid - column - 2), 0, 1)
        frame += (inside[..., None] * 150).astype(np.uint8)
    return frames


def arm(length: int = 60, seed: int = 0, *, facts: dict[str, Any] | None = None, **changes: Any) -> Episode:
    """One episode; `changes` replace columns of the observations (``state``, ``front``) or of the steps."""
    rng = np.random.default_rng(seed)
    path = smooth(rng, length + 1, 3)
    seen = {"state": path, "front": pictures(path)}
    seen = {name: np.asarray(changes.pop(name, column)) for name, column in seen.items()}
    seen["state"] = seen["state"].astype(np.float32)
    last = np.arange(length) == length - 1
    columns = {
        **transitions(seen),
        "actions": np.diff(path, axis=0).astype(np.float32),
        "rewards": last.astype(np.float32),
        "terminated": last,
        "truncated": np.zeros(length, bool),
        "source": np.full(length, 2, np.uint8),
        **changes,
    }
    return Episode(columns, {"success": True, "language_instruction": INSTRUCTION, "fps": 10, **(facts or {})})


def arms(
    count: int = 4, length: int = 60, change: Callable[[int], dict[str, Any]] = lambda number: {}
) -> list[Episode]:
    """Several of them; `change` has what differs in the one of a number."""
    return [arm(**{"length": length, "seed": number, **change(number)}) for number in range(count)]


def written(folder: Path, episodes: Sequence[Episode], format: str = "log", **options: Any) -> Path:
    writer = create(folder, format, **options)
    for number, episode in enumerate(episodes):
        writer.add(number, episode)
    writer.finish()
    writer.close()
    return folder


def checked(folder: Path, episodes: Sequence[Episode], *only: str, format: str = "log", **options: Any) -> CheckReport:
    """What the checks of these names say of a dataset of these episodes."""
    return render_all(check_dataset(written(folder, episodes, format, **options), only=only, workers=1))


class ListDataset(Dataset):
    """Episodes in memory, for checks that are not about files."""

    format = "list"

    def __init__(self, episodes: Sequence[Episode]):
        super().__init__(Path("memory"))
        self._episodes = episodes

    def __len__(self) -> int:
        return len(self._episodes)

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        for episode in self._episodes[first:]:
            yield partial(lambda found: found, episode)

    def describe(self) -> dict[str, Any]:
        return {}


def render_all(report: CheckReport) -> CheckReport:
    """Fills in the texts of all findings in both languages, which raises where a value is missing."""
    for finding in report.findings:
        for language in LANGUAGES:
            assert all("{" not in text for text in render(finding.text, finding.values, language))
    return report


def looked_at(episodes: Sequence[Episode], *only: str) -> CheckReport:
    """What the checks of these names say of episodes in memory."""
    report = CheckReport("memory", "list", list(only))
    check_episodes(ListDataset(episodes), report, workers=1)
    return render_all(report)


def found(report: CheckReport) -> list[tuple[str, str, str]]:
    """Severity, check and place of every finding."""
    return [(finding.severity, finding.check, finding.place) for finding in report.findings]
