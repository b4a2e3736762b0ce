"""The held-out frames of a reward classifier, one by one: how it judged each of them, and what any threshold makes of
that. They lie in the classifier's folder as ``held_out.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.classifier.frames import Clip
from hilt.core.checksums import read_json
from hilt.core.errors import CorruptError
from hilt.core.tree import Array

HELD_OUT_FILE = "held_out.json"


@dataclass(frozen=True)
class HeldOutFrame:
    """One held-out frame."""

    log: str
    """The log that it lies in; empty where it is of another format"""
    trajectory: int
    step: int
    """The recorded number of the step that led to it"""
    where: str
    """The same place in words"""
    success: bool
    """Its label"""
    probability: float
    """What the classifier says: the probability of success"""


@dataclass(frozen=True)
class Confusion:
    """What happens at one threshold: a frame is called a success when its probability is at least that."""

    threshold: float
    hits: int
    """Successes that are called one"""
    missed: int
    """Successes that are not"""
    false_successes: int
    """Failures that are called a success"""
    rejected: int
    """Failures that are not"""

    @property
    def precision(self) -> float | None:
        """Share of successes among the frames that are called one; None when no frame is."""
        called = self.hits + self.false_successes
        return self.hits / called if called else None

    @property
    def recall(self) -> float | None:
        """Share of the successes that are called one; None when there is none."""
        successes = self.hits + self.missed
        return self.hits / successes if successes else None


class HeldOut:
    """Held-out frames: ``success`` and ``probability`` [N], and where each of them is."""

    def __init__(
        self, success: Array, probability: Array, episode: Array, step: Array, episodes: Sequence[dict[str, Any]]
    ):
        self.success = np.asarray(success, bool)
        self.probability = np.asarray(probability, np.float32)
        self._episode, self._step = np.asarray(episode, np.int64), np.asarray(step, np.int64)
        self._episodes = list(episodes)

    @classmethod
    def of(cls, clips: Sequence[Clip], probability: Array, success: int) -> HeldOut:
        """The frames of some episodes with the probability of the class `success` [N], in their order."""
        firsts = [clip.source.first if clip.source is not None else 0 for clip in clips]
        return cls(
            np.concatenate([clip.labels == success for clip in clips]),
            probability,
            np.repeat(np.arange(len(clips)), [len(clip) for clip in clips]),
            np.concatenate([clip.steps + first for clip, first in zip(clips, firsts, strict=True)]),
            [
                {
                    "where": clip.where,
                    "log": clip.source.path if clip.source is not None else "",
                    "trajectory": clip.source.trajectory if clip.source is not None else -1,
                }
                for clip in clips
            ],
        )

    def __len__(self) -> int:
        return len(self.success)

    def at(self, threshold: float) -> Confusion:
        """How often it is right and wrong at a threshold."""
        called = self.probability >= np.float32(threshold)
        hits, false_successes = int((called & self.success).sum()), int((called & ~self.success).sum())
        successes = int(self.success.sum())
        rejected = len(self) - successes - false_successes
        return Confusion(float(threshold), hits, successes - hits, false_successes, rejected)

    def curve(self, thresholds: Iterable[float]) -> list[dict[str, float | None]]:
        """Each of these thresholds with its counts, precision and recall, as plain values, in order."""
        points = [self.at(threshold) for threshold in sorted(set(thresholds))]
        return [{**asdict(point), "precision": point.precision, "recall": point.recall} for point in points]

    def worst(self, count: int) -> list[HeldOutFrame]:
        """The frames of which it is most sure and most wrong: up to `count` failures with the highest probability of
        success, and as many successes with the lowest, the worst first. Whatever the threshold, the worst mistakes that
        it makes there are among them."""
        wrong = np.where(self.success, 1 - self.probability, self.probability)
        order = np.argsort(-wrong, kind="stable")
        left = {True: count, False: count}
        chosen = []
        for place in order.tolist():
            kind = bool(self.success[place])
            if left[kind]:
                left[kind] -= 1
                chosen.append(self._frame(place))
        return chosen

    def _frame(self, place: int) -> HeldOutFrame:
        episode = self._episodes[int(self._episode[place])]
        return HeldOutFrame(
            **episode,
            step=int(self._step[place]),
            success=bool(self.success[place]),
            probability=float(self.probability[place]),
        )

    def to_json(self) -> dict[str, object]:
        """Returns the frames as they are kept in the classifier's folder."""
        return {
            "episodes": self._episodes,
            "episode": self._episode.tolist(),
            "step": self._step.tolist(),
            "success": self.success.tolist(),
            "probability": [float(f"{value:.9g}") for value in self.probability.tolist()],
        }


def read_held_out(folder: Path) -> HeldOut | None:
    """The held-out frames of a classifier; None for one that was made before they were kept."""
    file = folder / HELD_OUT_FILE
    if not file.is_file():
        return None
    found = read_json(file)
    try:
        episodes = [
            {"where": str(one["where"]), "log": str(one["log"]), "trajectory": int(one["trajectory"])}
            for one in found["episodes"]
        ]
        columns = [found[name] for name in ("success", "probability", "episode", "step")]
        if len({len(column) for column in columns}) > 1 or not set(found["episode"]) <= set(range(len(episodes))):
            raise ValueError("its columns differ in length")
        success, probability, episode, step = map(np.asarray, columns)
        return HeldOut(success, probability, episode, step, episodes)
    except (LookupError, TypeError, ValueError) as error:
        cure = "Train the classifier again with: hilt train classifier"
        raise CorruptError(f"{file}: these are no held-out frames ({error}). {cure}") from None
