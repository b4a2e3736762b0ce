"""The episodes that a rank collected, as trajectories of a log: written once, where
they were made, and read back bit for bit.

One step of the log is one chunk: the policy's record, how many of its actions were carried out, the environment's
reward of these (``rewards``) and what is learned from (``earned``). What is known
of the whole episode (task, state, seed, group, success) are facts of its
trajectory, so `hilt data` shows and selects it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError
from hilt.core.files import replacing
from hilt.core.trajectory import STOPPED, Source
from hilt.core.tree import unflatten
from hilt.formats.episodes import INSTRUCTION
from hilt.formats.video import VideoWriter
from hilt.policies.base import widen
from hilt.recording.film import COLORS, GREEN, RED, picture
from hilt.replay import Log, Schema
from hilt.replay.settings import segment_bytes_for
from hilt.vla.episode import RolloutEpisode, Start

PROMPT = 255
"""Tokens for which a log has room, at least: a column has one width, and instructions have many"""
STARTED = ("task", "split", "state", "seed", "group", "member")
ENDED = ("success", "steps", "truncated", "version", "ill_formed")


class EpisodeLog:
    """Opened by the one rank that writes it. `path` is made with the first episode, which determines the columns.
    Beyond `capacity_bytes` the oldest go that are not pinned; 0: none does. `answers`: records have the answers of a
    flow; a log that was begun otherwise is refused."""

    def __init__(self, path: Path, capacity_bytes: int = 0, answers: bool = False):
        self.path, self._capacity = path, capacity_bytes
        self._log = Log.open(path, "a", capacity_bytes=None) if (path / "log.json").is_file() else None
        self._pinned: set[int] = set()
        if self._log is not None and ("record/answer" in self._log.schema.columns) != answers:
            self._log.close()
            raise ConfigError(
                f"{path}: the episodes of this run were recorded with{'out' if answers else ''} the answers of a flow, "
                f"which algorithm.loss=nft needs and other losses do not have: a run cannot go on "
                "with the other kind. Resume it with the loss that it began with, or begin a new run from its policy."
            )

    def add(self, episode: RolloutEpisode, step: int, earned: np.ndarray) -> int:
        """Writes an episode of training step `step` and what its rows `earned`, float32 [rows]; its number is also in
        `episode.trajectory`, and it is pinned. One without a chunk has none: a trajectory has a row at least."""
        if not episode.rows:
            return -1
        record = episode.record
        width = record["prompt"].shape[1] if "prompt" in record else 0
        if width:
            record = widen(record, self._prompt(width))
        end = np.zeros((2, episode.rows), bool)
        end[int(episode.truncated), -1] = True
        columns = {
            "record": record,
            "rewards": episode.rewards,
            "executed": episode.executed,
            "earned": earned,
            "terminated": end[0],
            "truncated": end[1],
            "source": np.full(episode.rows, Source.POLICY, np.uint8),
            "policy_version": np.full(episode.rows, episode.version, np.int64),
        }
        trajectory = _wide(columns)
        if self._log is None:
            most = segment_bytes_for(self._capacity or None)  # they go one by one
            self._log = Log.create(self.path, Schema.of(trajectory, leading=2), durability="never", segment_bytes=most)
        facts = {name: getattr(episode.start, name) for name in STARTED} | {
            name: getattr(episode, name) for name in ENDED
        }
        facts |= {
            INSTRUCTION: episode.instruction,
            "first": episode.first.hex(),
            "prompt_width": width,
            "training_step": step,
            **({} if episode.stopped_by_value is None else {STOPPED: episode.stopped_by_value}),
        }
        episode.trajectory = self._log.add(trajectory, actor="rollout", facts=facts)
        self._pinned.add(episode.trajectory)
        self._make_room()
        return episode.trajectory

    def pin(self, trajectories: Iterable[int]) -> None:
        """From now on these stay whatever room there is, and no others of those that are there."""
        self._pinned = set(trajectories)
        self._make_room()

    def _make_room(self) -> None:
        """A log's own capacity knows of no pins; its bytes go when nothing of a segment is wanted."""
        if self._log is None or not self._capacity or self._log.live_bytes <= self._capacity:
            return
        for trajectory in self._log.trajectories(hidden=True):
            if trajectory not in self._pinned:
                self._log.delete(trajectory)
                if self._log.live_bytes <= self._capacity:
                    return

    def read(self, trajectory: int) -> tuple[RolloutEpisode, np.ndarray]:
        """An episode as it was added, and what it earned; people may have edited it meanwhile."""
        if self._log is None:
            raise ConfigError(
                f"{self.path}: there is no log, and its trajectory {trajectory} is asked for. Restore the run's folder."
            )
        facts = self._log.facts.recorded(trajectory)
        with self._log.reading() as steps:
            paths = self._log.schema.select(["record", "rewards", "executed", "earned"])
            columns = unflatten(steps.gather(steps.trajectory(trajectory, hidden=True), paths, edited=False))
        record = dict(columns["record"])
        if facts["prompt_width"]:
            record["prompt"] = np.ascontiguousarray(record["prompt"][:, : facts["prompt_width"]])
        stored = {name: facts[name] for name in ENDED} | {
            "instruction": facts[INSTRUCTION],
            "first": bytes.fromhex(facts["first"]),
            STOPPED: facts.get(STOPPED),
        }
        start = Start(**{name: facts[name] for name in STARTED})
        return RolloutEpisode(
            start, record, columns["executed"], columns["rewards"], **stored, trajectory=trajectory
        ), columns["earned"]

    def __contains__(self, trajectory: int) -> bool:
        """Whether it is there."""
        return self._log is not None and trajectory in self._log.trajectories(hidden=True)

    def end(self) -> int:
        """The number of the last one, -1 when there is none."""
        return max(self._log.trajectories(hidden=True), default=-1) if self._log is not None else -1

    def forget_after(self, last: int) -> None:
        """Takes out those of a step that was interrupted: it is made again."""
        for trajectory in self._log.trajectories(hidden=True) if self._log is not None else []:
            if trajectory > last:
                self._log.delete(trajectory)  # type: ignore[union-attr]

    def sync(self) -> None:
        """What was added is power-safe when this returns."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _prompt(self, width: int) -> int:
        if self._log is None:
            return max(PROMPT, 2 * width)
        return int(self._log.schema.columns["record/prompt"].shape[0])


def film(episode: RolloutEpisode, path: Path, hz: float) -> None:
    """A video of what the policy saw, one picture for each chunk; the file is whole or absent."""
    if "images" not in episode.record:
        raise ConfigError(
            "a video shows what the policy saw, and the records of this one have no images: leave "
            "the number of videos out."
        )
    images = episode.record["images"]  # [rows, cameras, H, W, 3]
    mark = ("SUCCESS", GREEN) if episode.success else ("no success", RED)
    with replacing(path, sole_writer=True) as place:
        shown = [
            picture(
                list(row), COLORS[Source.POLICY], [episode.instruction, f"chunk {number + 1} of {len(images)}"], last
            )
            for number, row in enumerate(images)
            for last in [mark if number == len(images) - 1 else None]
        ]
        writer = VideoWriter(place, hz, shown[0].shape[0], shown[0].shape[1], "h264")
        for frame in [*shown, *[shown[-1]] * max(1, round(hz))]:
            writer.add(frame[None])
        writer.close()


def _wide(tree: Any) -> Any:
    """With the second axis of a trajectory, of one episode."""
    return {
        name: _wide(value) if isinstance(value, dict) else np.asarray(value)[:, None] for name, value in tree.items()
    }
