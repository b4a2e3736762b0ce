"""Frames with labels, for a reward classifier: read from recordings and from
HIL-SERL's pickles, and split so that the split is honest.

A label describes what a step **led to**, so the frame is the step's next observation, and of a stack the newest. Label
0 is failure and 1 success, or there are n classes, 0 to n - 1.

Labels are a column of what was recorded, and frame labels that people give afterwards
(`hilt.replay.Edits.label_frame`), which take precedence. Of an episode that has only the latter, the frames with a
label are used, and no others.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, FormatError, SchemaError, UnknownNameError
from hilt.core.progress import Report, silent
from hilt.core.tree import Array, flatten
from hilt.formats import open_dataset
from hilt.formats.episodes import Dataset, Episode, map_leaves
from hilt.formats.experience import LogDataset
from hilt.recording.recording_folder import LABELS
from hilt.replay.edits import frame_labels
from hilt.replay.key_ranges import OFFSET_BITS

MAX_CLASSES = 100
UNLABELED = -1
NO_LABELS = (
    "its frames have no labels. Record some with: hilt record TASK --classifier. Of a log, label frames with: "
    "hilt open LOG. Of HIL-SERL's, give classifier_data with its *_success_images_*.pkl and *_failure_images_*.pkl."
)


@dataclass(frozen=True)
class ClipSource:
    """Where the frames of a clip lie in a log."""

    path: str
    """The log"""
    trajectory: int
    first: int
    """The recorded number of the clip's step 0"""


@dataclass(frozen=True)
class Clip:
    """The frames of one episode, in order."""

    images: dict[str, Array]
    """By camera, uint8 [T, H, W, 3]"""
    labels: Array
    """int64 [T]"""
    state: str
    """The initial state it began in: what begins alike looks alike. Where none is known, the episode itself"""
    where: str
    """Which episode this is, in words"""
    ends: tuple[bytes, bytes] = (b"", b"")
    """Digests of what it began with and ended with, where others may go on from it; empty where not"""
    steps: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [T]: which steps of the episode the frames are; by default all from 0 on"""
    source: ClipSource | None = None
    """Where it lies, if that is a log"""

    def __post_init__(self) -> None:
        if not len(self.steps):
            object.__setattr__(self, "steps", np.arange(len(self.labels)))

    def __len__(self) -> int:
        return len(self.labels)

    def before_success(self, success: int, steps: int = 10) -> Array:
        """Returns a mask [T] of the frames that are no success and are followed by one within `steps` steps."""
        later = np.zeros(len(self), bool)
        for step in self.steps[self.labels == success]:
            later |= (self.steps >= step - steps) & (self.steps < step)
        result: Array = later & (self.labels != success)
        return result

    def failed(self, success: int) -> Array:
        """bool [T]: all frames of an attempt that never succeeded."""
        return np.full(len(self), not (self.labels == success).any())


def read_frames(paths: Sequence[str | Path], report: Report = silent) -> list[Clip]:
    """The episodes of any number of recordings, logs and pickles, with all their cameras."""
    places = [Path(path).resolve() for path in paths]
    if not places:
        raise ConfigError(
            "no data: give at least one recording of hilt record --classifier, or HIL-SERL's classifier_data."
        )
    if twice := [given for given, place in zip(paths, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]} is given twice, and its frames would count twice. Give it once.")
    clips = _joined([clip for path in paths for clip in _clips(Path(path), report)])
    if not clips:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: not one frame. Record some with: hilt record TASK --classifier."
        )
    return clips


def with_cameras(clips: Sequence[Clip], names: Sequence[str]) -> list[Clip]:
    """The same with these cameras only (none named: all of the first), which all episodes must have in one size."""
    first, names = clips[0], sorted(names or clips[0].images)
    if missing := [name for name in names if name not in first.images]:
        raise UnknownNameError("camera", missing[0], first.images, setting="image_keys")
    for clip in clips:
        for name in names:
            shape, found = first.images[name].shape[1:], clip.images[name].shape[1:] if name in clip.images else None
            if found != shape:
                differs = f"{name} is {found or 'absent'} in {clip.where} and {shape} in {first.where}"
                raise SchemaError(f"{differs}. Train from frames of the same cameras and size.")
    return [replace(clip, images={name: clip.images[name] for name in names}) for clip in clips]


def split(clips: Sequence[Clip], share: float, classes: int, seed: int) -> tuple[list[Clip], list[Clip], str]:
    """(training, held out, by what): about `share` of the initial states, or where that
    is not possible of the episodes, are held out.

    Those with the same classes in them are split among themselves, so that each class is on both sides.
    """
    for by in ("initial state", "episode"):
        groups: dict[str, list[Clip]] = defaultdict(list)
        for clip in clips:
            groups[clip.state if by == "initial state" else clip.where].append(clip)
        kinds: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, members in groups.items():
            kinds[tuple(np.unique(np.concatenate([clip.labels for clip in members])).tolist())].append(name)
        rng, held = np.random.default_rng(seed), set()
        for kind in sorted(kinds):
            names = kinds[kind]
            count = max(1, round(share * len(names))) if len(names) > 1 else 0
            held |= {names[i] for i in rng.permutation(len(names))[:count]}
        sides = [[clip for name in groups if (name in held) == side for clip in groups[name]] for side in (False, True)]
        if all(len(counts(side, classes)) and counts(side, classes).all() for side in sides):
            return sides[0], sides[1], by
    few = int(np.argmin([sum((clip.labels == number).any() for clip in clips) for number in range(classes)]))
    raise ConfigError(
        f"too few episodes to hold some out: {len(clips)} in all, and of class {few} in too few of them. "
        f"Each class must be in two episodes or more: record more of it, from other initial states."
    )


def counts(clips: Sequence[Clip], classes: int) -> Array:
    """Returns the number of frames of each class."""
    return np.bincount(np.concatenate([clip.labels for clip in clips] or [np.zeros(0, np.int64)]), minlength=classes)


def class_count(clips: Sequence[Clip]) -> int:
    """How many classes there are; one alone, or one without a frame, is an error."""
    found = counts(clips, 2)
    if not found.all():
        absent = int(np.flatnonzero(found == 0)[0])
        name = {0: "failure", 1: "success"}.get(absent, str(absent)) if len(found) == 2 else str(absent)
        cure = (
            "mark frames of success with the success key"
            if absent
            else "let steps pass unmarked, near misses above all"
        )
        given = f"{found.sum():,} frames of {len(clips)} episodes, and none is of the class {absent} ({name})"
        raise ConfigError(
            f"{given}: a classifier needs frames of every class. Record more with hilt record TASK "
            f"--classifier, and {cure}."
        )
    return len(found)


def _clips(path: Path, report: Report) -> Iterator[Clip]:
    """The episodes of one path; of HIL-SERL's pickles pieces of them."""
    recording = (path / "recording.json").is_file()
    if recording:
        place = path / "log"
    else:
        place = (
            path / "classifier_data"
            if (path / "classifier_data").is_dir() and not (path / "hilt.json").is_file()
            else path
        )
    dataset = open_dataset(place)
    if not isinstance(dataset, LogDataset):
        for number, episode in enumerate(dataset):
            report(f"reading {path}", number, len(dataset))
            yield _clip(dataset, episode, f"{path}, episode {number}")
        return
    with dataset.log:
        yield from _clips_of_log(dataset, path, recording, report)


def _clips_of_log(dataset: LogDataset, path: Path, recording: bool, report: Report) -> Iterator[Clip]:
    """Episodes without a label are not decoded, where no column has labels."""
    log, labeled = dataset.log, LABELS in dataset.log.schema.columns
    for number, keys in enumerate(dataset.episodes):
        report(f"reading {path}", number, len(dataset))
        trajectory = int(keys[0]) >> OFFSET_BITS
        facts = log.facts.about(trajectory)
        if recording and "task" not in facts:  # what a killed session left
            continue
        if not frame_labels(facts) and LABELS not in log.schema.columns:
            continue
        episode = next(iter(dataset.jobs(number)))()
        clip = _clip(dataset, episode, f"{path}, episode {number}") if episode is not None else None
        if clip is not None and len(clip):
            labeled = True
            yield replace(clip, source=ClipSource(str(dataset.path), trajectory, dataset.first_step(number)))
    if not labeled and len(dataset):
        raise FormatError(f"{path}: {NO_LABELS}")


def _clip(dataset: Dataset, episode: Episode, where: str) -> Clip:
    columns, facts, given = episode.columns, episode.facts, frame_labels(episode.facts)
    if LABELS in columns:
        labels = np.asarray(columns[LABELS])
        if (
            labels.ndim != 1
            or labels.dtype.kind not in "biu"
            or not 0 <= labels.min(initial=0) <= labels.max(initial=0) < MAX_CLASSES
        ):
            raise SchemaError(
                f"{where}: labels are {labels.dtype} {labels.shape}; expected a number from 0 to "
                f"{MAX_CLASSES - 1} a step."
            )
    elif dataset.format == "hil-serl" and {*dataset.describe()} <= {"files (success)", "files (failure)"}:
        labels = np.full(len(episode), facts["success"])
    elif dataset.format == "log":
        labels = np.full(len(episode), UNLABELED)
    else:
        raise FormatError(f"{where}: {NO_LABELS}")
    seen = columns["next_observations"]
    leaves = flatten(seen) if isinstance(seen, dict) else {}
    pictures = {
        name: leaf
        for name, leaf in leaves.items()
        if leaf.dtype == np.uint8 and leaf.ndim in (4, 5) and leaf.shape[-1] == 3
    }
    images = {name: leaf[:, -1] if leaf.ndim == 5 else leaf for name, leaf in pictures.items()}
    if not images:
        raise SchemaError(
            f"{where}: no images among its observations. Record with cameras: a classifier looks at nothing else."
        )
    state = f"{facts.get('task')} {facts.get('split')} {facts['state']}" if "state" in facts else ""
    if dataset.format == "log":
        labels = _with_frame_labels(labels.astype(np.int64), given, where)
        steps = np.flatnonzero(labels != UNLABELED)
        chosen = {name: image[steps] for name, image in images.items()} if len(steps) < len(labels) else images
        return Clip(chosen, labels[steps], state or where, where, steps=steps)
    ended = bool(columns["terminated"][-1] or columns["truncated"][-1])
    return Clip(
        images,
        labels.astype(np.int64),
        state,
        where,
        (_digest(columns["observations"], 0), b"" if ended else _digest(seen, -1)),
    )


def _with_frame_labels(labels: Array, given: Mapping[int, bool | None], where: str) -> Array:
    """The labels of an episode, changed by those that people gave to single frames; unknown ones are left out."""
    if given and labels.max(initial=0) > 1:
        raise SchemaError(
            f"{where}: its column {LABELS} has the class {labels.max()}, and its frame labels are success or failure. "
            "Take them back with: hilt data history, hilt data undo"
        )
    labels = labels.copy()
    for step, success in given.items():
        labels[step] = UNLABELED if success is None else int(success)
    return labels


def _joined(pieces: list[Clip]) -> list[Clip]:
    """HIL-SERL keeps the marked steps of an episode in one file and the others in another. One whose first
    observation is, bit by bit, what another ended with goes on from there: so they are episodes again. Those that
    begin alike began in the same initial state."""
    begins: dict[bytes, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        if piece.ends[0]:
            begins[piece.ends[0]].append(number)
    after: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        if piece.ends[1] and (near := [other for other in begins[piece.ends[1]] if other != number]):
            after[number] = near[0]
            begins[piece.ends[1]].remove(near[0])
    heads = [number for number in range(len(pieces)) if number not in after.values()]
    episodes, done = [], set[int]()
    for head in [*heads, *range(len(pieces))]:  # the rest are rings, of a task that returns to where it began
        chain, number = [], head
        while number not in done:
            done.add(number)
            chain.append(pieces[number])
            number = after.get(number, head)
        if chain:
            images = {name: np.concatenate([piece.images[name] for piece in chain]) for name in chain[0].images}
            labels = np.concatenate([piece.labels for piece in chain])
            steps = chain[0].steps if len(chain) == 1 else np.arange(len(labels))
            state = chain[0].state or chain[0].ends[0].hex()
            episodes.append(replace(chain[0], images=images, labels=labels, state=state, steps=steps))
    return episodes


def _digest(tree: Any, place: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in flatten(map_leaves(lambda column: column[place], {"seen": tree})).values():
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.digest()
