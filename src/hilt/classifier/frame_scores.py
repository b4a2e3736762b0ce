"""Frames of a log that are worth a label: those of which a reward classifier is least certain, or, without one, frames
that are spread over the episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.progress import Report, silent
from hilt.core.tree import Array, ArraySpec, flatten
from hilt.formats import located_log
from hilt.formats.experience import LogDataset
from hilt.formats.images import is_image
from hilt.recording.recording_folder import LABELS
from hilt.replay.edits import FRAME_LABELS, frame_labels
from hilt.replay.key_ranges import OFFSET_BITS

CHUNK = 128
"""Frames that are read and judged together"""
SEEN = "next_observations/"
"""A label describes what a step led to"""
PER_EPISODE = 3
"""Frames of each episode, at least: its last, its first and one between; fewer episodes are chosen before that"""


class FrameJudge(Protocol):
    """What gives frames a probability of success: `hilt.classifier.reward.RewardClassifier`."""

    def cameras(self, leaves: Mapping[str, ArraySpec]) -> dict[str, str]:
        """Returns which of these images it looks at, by the name of each camera."""

    def probabilities(self, images: Mapping[str, Array]) -> Array:
        """Returns the probability of success [N] of frames, by the name of each camera."""


@dataclass(frozen=True)
class FrameScore:
    """One frame that may be labeled."""

    log: str
    trajectory: int
    step: int
    """The recorded number of the step that led to it"""
    first: int
    """The recorded number of the first step that is shown of its trajectory"""
    probability: float | None
    """Of success; None without a classifier"""
    label: int | None
    """What the column of labels has, where the log has one"""

    @property
    def certainty(self) -> float:
        """0 where a success is as likely as none, 0.5 where the classifier is sure."""
        return 0.0 if self.probability is None else abs(self.probability - 0.5)


@dataclass
class FrameScores:
    """Frames without a frame label, the least certain first, and what was labeled already."""

    frames: list[FrameScore] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    labeled: dict[str, int] = field(default_factory=lambda: {_word(value): 0 for value in FRAME_LABELS})
    """Frame labels: the number of each"""
    wide: int = 0
    """Episodes that are left out, because others were recorded side by side with them"""


def score_frames(
    paths: Sequence[str | Path], judge: FrameJudge | None = None, count: int = 1000, report: Report = silent
) -> FrameScores:
    """Up to `count` frames of some logs that have no frame label yet, spread over their episodes, the least certain
    first; without a `judge`, in the order of `spread`."""
    scores = FrameScores()
    for path in paths:
        dataset = LogDataset(located_log(path))
        with dataset.log:
            scores.frames += _scored(dataset, judge, max(1, count // len(paths)), scores, report)
    if judge is not None:
        scores.frames.sort(key=lambda frame: (frame.certainty, frame.log, frame.trajectory, frame.step))
    return scores


def spread(lengths: Sequence[int], count: int, taken: Set[tuple[int, int]] = frozenset()) -> list[tuple[int, int]]:
    """Up to `count` frames, each as (episode, step), of episodes of these lengths: of every episode its last and first
    frame, then the middle between those that were taken, and so on. Of very many episodes, some are chosen evenly. The
    frames in `taken` are left out."""
    chosen = np.arange(len(lengths))
    if len(lengths) * PER_EPISODE > count:
        chosen = np.unique(np.linspace(0, len(lengths) - 1, max(1, count // PER_EPISODE)).round().astype(int))
    orders = {episode: _bisected(lengths[episode]) for episode in chosen.tolist() if lengths[episode]}
    found: list[tuple[int, int]] = []
    while orders and len(found) < count:
        for episode, order in list(orders.items()):
            step = next((step for step in order if (episode, step) not in taken), None)
            if step is None:
                del orders[episode]
            elif len(found) < count:
                found.append((episode, step))
    return found


def _bisected(length: int) -> Iterator[int]:
    """All steps of an episode: the last, the first, then the middles between those before."""
    seen, parts = {length - 1, 0}, 2
    yield from dict.fromkeys((length - 1, 0))
    while len(seen) < length:
        for odd in range(1, parts, 2):
            if (step := round(odd * (length - 1) / parts)) not in seen:
                seen.add(step)
                yield step
        parts *= 2


def _scored(
    dataset: LogDataset, judge: FrameJudge | None, count: int, scores: FrameScores, report: Report
) -> list[FrameScore]:
    """The frames of one log; counts what it has in `scores`."""
    log, episodes = dataset.log, dataset.episodes
    scores.episodes += len(episodes)
    scores.steps += sum(map(len, episodes))
    offset, starts, usable = (1 << OFFSET_BITS) - 1, list[int](), list[Array]()
    with log.reading() as steps:
        widths = steps.widths(np.array([keys[0] for keys in episodes], np.int64)) if episodes else ()
    taken: set[tuple[int, int]] = set()
    labeled: dict[int, dict[int, bool | None]] = {}
    for keys, width in zip(episodes, widths, strict=True):
        if width > 1:
            scores.wide += 1
            continue
        trajectory, first = int(keys[0]) >> OFFSET_BITS, int(keys[0] & offset)
        if trajectory not in labeled:
            labeled[trajectory] = frame_labels(log.facts.about(trajectory))
        for step, value in labeled[trajectory].items():
            if first <= step < first + len(keys):
                scores.labeled[_word(value)] += 1
                taken.add((len(usable), step - first))
        starts.append(first)
        usable.append(keys)
    chosen = spread([len(keys) for keys in usable], count, taken)
    found = np.array([usable[episode][step] for episode, step in chosen], np.int64)
    probabilities = _judged(dataset, found, judge, report)
    labels = log.read(found, [LABELS])[LABELS].tolist() if LABELS in log.schema.columns and len(found) else None
    shown = {number: bounds[0] for number, bounds in log.facts.edits.shown.ranges.items()}
    return [
        FrameScore(
            str(dataset.path),
            int(key) >> OFFSET_BITS,
            int(key & offset),
            shown.get(int(key) >> OFFSET_BITS, 0),
            None if probabilities is None else float(probabilities[place]),
            None if labels is None else int(labels[place]),
        )
        for place, key in enumerate(found)
    ]


def _judged(dataset: LogDataset, keys: Array, judge: FrameJudge | None, report: Report) -> Array | None:
    """The probability of success of what these steps led to."""
    specs = {
        path.removeprefix(SEEN): spec
        for path, spec in dataset.log.schema.columns.items()
        if path.startswith(SEEN) and is_image(spec)
    }
    if not specs:
        raise SchemaError(f"{dataset.path}: no images among its observations. A classifier looks at nothing else.")
    if judge is None:
        return None
    cameras, order = judge.cameras(specs), np.argsort(keys)
    out = np.zeros(len(keys), np.float32)
    for begin in range(0, len(keys), CHUNK):
        report(f"judging {dataset.path}", begin, len(keys))
        places = order[begin : begin + CHUNK]  # neighbours lie together on the disk
        read = flatten(dataset.log.read(keys[places], [SEEN + path for path in cameras.values()]))
        images = {name: read[SEEN + path] for name, path in cameras.items()}
        out[places] = judge.probabilities({name: i[:, -1] if i.ndim == 5 else i for name, i in images.items()})
    return out


def _word(value: bool | None) -> str:
    return FRAME_LABELS[value].partition(" ")[0]
