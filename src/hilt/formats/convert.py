"""From one dataset to another, episode by episode: several threads decode, one writes, and nothing is done twice.

    summary = convert("bridge/1.0.0", "bridge-log", split="train[:10%]")

What is written lies in a hidden folder beside the target until it is complete. A conversion that was stopped, by Ctrl-C
or by a power cut, goes on from there when it is called again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    HiltError,
    LockedError,
    MissingPackageError,
    SchemaError,
    UnknownNameError,
    optional_module,
)
from hilt.core.files import DISK
from hilt.core.platform import usable_cpus
from hilt.core.tree import Array, JsonObject, flatten, unflatten
from hilt.formats import check_filter, check_options, create, detect, located, open_dataset, options_of
from hilt.formats.episodes import Dataset, Episode, Job, Writer
from hilt.replay.schema import mate
from hilt.replay.storage.journal import Journal
from hilt.replay.storage.lock import WriterLock

Progress = Callable[[int, int], None]


@dataclass
class ConversionSummary:
    """What a conversion did, or what a dataset holds."""

    source: str
    source_format: str
    target: str = ""
    target_format: str = ""
    episodes: int = 0
    steps: int = 0
    successes: int = 0
    failures: int = 0
    unknown: int = 0
    """The number of episodes whose success is unknown"""
    damaged: int = 0
    """Episodes that could not be read, and were passed over"""
    empty: int = 0
    """Episodes without a single transition"""
    went_on_from: int = 0
    """The episode at which an earlier attempt had been stopped"""
    source_bytes: int = 0
    target_bytes: int = 0
    seconds: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)
    """Whatever could not be carried over, with how often"""

    def count(self, line: dict[str, Any]) -> None:
        """Takes in one line of the record of a conversion."""
        self.episodes += line["steps"] > 0
        self.steps += line["steps"]
        self.damaged += line["damaged"]
        self.empty += not line["damaged"] and not line["steps"]
        if line["steps"]:
            name = {True: "successes", False: "failures", None: "unknown"}[line["success"]]
            setattr(self, name, getattr(self, name) + 1)
        self.notes.update(line["notes"])

    def to_json(self) -> JsonObject:
        return {**vars(self), "notes": dict(self.notes)}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str = "auto",
    to: str = "log",
    skip_corrupt: bool = False,
    drop: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ConversionSummary:
    """Writes a dataset in another format into a new folder.

    `options` are those of the format read or of the one written (``hilt data formats`` lists them).
    `skip_corrupt` passes over damaged episodes and counts them. `drop` leaves out columns, and with
    ``observations/x`` also ``next_observations/x``. `image_size` makes all images (height, width).
    `progress` gets episodes done and episodes in all.
    """
    began, place, goal = time.monotonic(), located(source, format), Path(target)
    _check_new(goal)
    name = detect(place) if format == "auto" else format
    reads, writes = options_of(name, "open_dataset"), options_of(to, "create")
    check_filter(options, name, place)
    check_options(options, {**reads, **writes}, f"from {name} to {to}:")
    if ends := [path for path in drop if path in ("terminated", "truncated")]:
        raise ConfigError(f"{ends[0]}: where episodes end cannot be left out; leave out other columns.")
    if name == to == "log" and not (options or drop or image_size):
        raise ConfigError(f"{place} is a log already; copy it with: hilt data merge {place} --into {goal}")
    dataset = open_dataset(place, name, **{option: options[option] for option in options if option in reads})
    change = EpisodeChange(tuple(drop), image_size)
    task = {
        "source": str(place.resolve()),
        "formats": [name, to],
        "episodes": len(dataset),
        "bytes": bytes_in(place),
        "options": {**options, **asdict(change)},
    }
    summary = ConversionSummary(str(place), name, str(goal), to, source_bytes=bytes_in(place))
    with contextlib.ExitStack() as stack:
        workshop = stack.enter_context(_Workshop(goal, task))
        writer = create(workshop.result, to, **{option: options[option] for option in options if option in writes})
        stack.callback(writer.close)
        summary.went_on_from = writer.next
        for line in workshop.lines(writer.next):
            summary.count(line)
        for number, done in enumerate(decode(dataset, writer.next, change, workers), writer.next):
            workshop.written = True
            summary.count(_write(writer, number, done, dataset, skip_corrupt, workshop.record))
            if progress is not None:
                with _kept_when_stopped(writer):
                    progress(number + 1, len(dataset))
        writer.finish()
        summary.notes.update(writer.notes.counts)
        summary.notes.update(dataset.notes.counts)
        workshop.hand_over()
    summary.target_bytes, summary.seconds = bytes_in(goal), time.monotonic() - began
    return summary


def survey(dataset: Dataset, progress: Progress | None = None, workers: int | None = None) -> ConversionSummary:
    """Counts a dataset without decoding its images; damaged episodes are counted and passed over."""
    began, total = time.monotonic(), len(dataset)
    summary = ConversionSummary(str(dataset.path), dataset.format, source_bytes=bytes_in(dataset.path))
    for number, done in enumerate(decode(dataset, 0, EpisodeChange(), workers, images=False)):
        summary.count(_line(number, *_outcome(done, dataset, skip_corrupt=True)))
        if progress is not None:
            progress(number + 1, total)
    summary.notes.update(dataset.notes.counts)
    summary.seconds = time.monotonic() - began
    return summary


@dataclass(frozen=True)
class EpisodeChange:
    """What is done to each episode on its way."""

    drop: tuple[str, ...] = ()
    """Columns, or whole subtrees, that are left out"""
    image_size: tuple[int, int] | None = None
    """Height and width of all images"""

    def apply(self, episode: Episode) -> Episode:
        if not self.drop and self.image_size is None:
            return episode
        columns = flatten(episode.columns)
        for column in self.dropped(columns):
            del columns[column]
        if self.image_size is not None:
            columns = {
                path: resize(column, *self.image_size) if is_image(column) else column
                for path, column in columns.items()
            }
        return replace(episode, columns=unflatten(columns))

    def dropped(self, columns: Collection[str]) -> list[str]:
        """Returns the columns that are left out: those that were named, what lies below them, and of an observation the
        next one too, as it is the same picture a step later."""
        out: dict[str, None] = {}
        for path in self.drop:
            named = [path, mate(path)] if mate(path) else [path]
            found = [[c for c in columns if c == name or c.startswith(f"{name}/")] for name in named]
            if not found[0]:
                raise UnknownNameError("column", path, columns)
            out |= dict.fromkeys(c for some in found for c in some)
        return list(out)


Done = Future[tuple[Episode | None, Counter[str]]]


def decode(
    dataset: Dataset, first: int, change: EpisodeChange, workers: int | None = None, images: bool = True
) -> Iterator[Done]:
    """The episodes from number `first` on, in order. Twice as many as there are
    workers are decoded ahead, and no more."""
    workers = workers or usable_cpus()

    def work(job: Job) -> tuple[Episode | None, Counter[str]]:
        episode, noted = dataset.notes.during(job)
        if episode is not None and change.drop:
            noted[f"left out by --drop: {', '.join(change.dropped(flatten(episode.columns)))}"] += 1
        return episode and change.apply(episode), noted

    waiting: deque[Done] = deque()
    with ThreadPoolExecutor(workers, "hilt-decode") as pool:
        try:
            for job in dataset.jobs(first, images):
                waiting.append(pool.submit(work, job))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()


def is_image(column: Array) -> bool:
    """Pictures of every step: uint8, with one, three or four channels last."""
    return column.dtype == np.uint8 and column.ndim >= 4 and column.shape[-1] in (1, 3, 4)


def resize(images: Array, height: int, width: int) -> Array:
    """The same pictures in another size; they are smoothed when they become smaller."""
    if images.shape[-3:-1] == (height, width):
        return images
    Image = optional_module("PIL.Image", "Changing the size of images", "images", "pillow")
    *axes, _, _, channels = images.shape
    out = np.empty((*axes, height, width, channels), np.uint8)
    for place in np.ndindex(*axes):
        picture = Image.fromarray(images[place].squeeze(-1) if channels == 1 else images[place])
        out[place] = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS)).reshape(
            height, width, channels
        )
    return out


def bytes_in(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _check_new(goal: Path) -> None:
    if goal.exists() and not goal.is_dir():
        raise ConfigError(f"{goal} is a file; expected the name of a folder to make. Choose another path.")
    if goal.exists() and any(goal.iterdir()):
        raise ConfigError(
            f"{goal}: expected a new or empty folder, got one with other files in it. Choose another path."
        )


@contextlib.contextmanager
def _kept_when_stopped(writer: Writer) -> Iterator[None]:
    """Between two episodes: what was written so far is there when the conversion goes on."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(HiltError):
            writer.keep()
        raise


_HOPELESS = (ConfigError, FormatError, MissingPackageError, SchemaError, UnknownNameError)
"""Errors after which the same command cannot go on: another one is needed, and it begins anew."""


class _Workshop:
    """The hidden folder in which a dataset is made, one conversion at a time: the
    result so far, and a record of its episodes.

    It stays when a conversion is stopped that can go on, and is removed otherwise.
    """

    def __init__(self, goal: Path, task: dict[str, Any]):
        self._goal, self._task = goal, json.loads(json.dumps(task))
        self._folder = goal.with_name(f".{goal.name}.converting")
        self.result = self._folder / "result"
        self.written = False
        """Whether there is anything that is worth keeping"""

    def __enter__(self) -> _Workshop:
        DISK.make_folders(self._folder)
        try:
            self._lock = WriterLock(self._folder).__enter__()
        except LockedError as error:
            raise LockedError(
                f"{self._goal}: another conversion is writing it ({error}) Wait for it, or stop it."
            ) from None
        try:
            path = self._folder / "task.json"
            if self.result.exists():
                self._check_same(read_json(path))
                self.written = True
            write_json(path, self._task)
            self.record = Journal(self._folder / "record.jsonl", DISK, write=True)
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def _check_same(self, old: dict[str, Any]) -> None:
        if old == self._task:
            return
        before, now = (
            {**task["options"], **{name: task[name] for name in task if name != "options"}}
            for task in (old, self._task)
        )
        differs = [
            f"{name} {before.get(name)}, now {now.get(name)}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        cure = f"Repeat that command to complete it, or begin anew after: rm -r {self._folder}"
        raise ConfigError(f"{self._goal}: an unfinished conversion is there, with {'; '.join(differs)}. {cure}")

    def lines(self, end: int) -> list[dict[str, Any]]:
        """The record of the episodes before number `end`; whatever else it holds is
        forgotten, since it will be done again."""
        known = {line["number"]: line for line in self.record.read_new() if line["number"] < end}
        self.record.rewrite([known[number] for number in sorted(known)])
        return list(known.values())

    def hand_over(self) -> None:
        """The result takes its name."""
        DISK.rename(self.result, self._goal)
        DISK.sync_folder(self._goal.parent)
        DISK.remove(self._folder)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.record.close()
        if kind is not None and (not self.written or issubclass(kind, _HOPELESS)):
            DISK.remove(self._folder)
        self._lock.__exit__()


def _write(
    writer: Writer, number: int, done: Done, dataset: Dataset, skip_corrupt: bool, record: Journal
) -> dict[str, Any]:
    """Records an episode, and writes it: in this order, so that none is there that was not recorded."""
    episode, noted, damage = _outcome(done, dataset, skip_corrupt)
    line = _line(number, episode, noted, damage)
    record.append(line)
    if episode is not None:
        try:
            more = writer.notes.during(partial(writer.add, number, episode))[1]
        except SchemaError as error:
            cure = "Leave a column out with --drop, or make all images one size with --image-size."
            raise SchemaError(f"{dataset.path}, episode {number}: {error} {cure}") from error
        if more:
            line = {**line, "notes": noted + more}
            record.append(line)
    return line


def _outcome(done: Done, dataset: Dataset, skip_corrupt: bool) -> tuple[Episode | None, Counter[str], bool]:
    """An episode, what was noted about it, and whether it is damaged."""
    try:
        return *done.result(), False
    except CorruptError as error:
        if not skip_corrupt:
            raise CorruptError(f"{error} Pass over damaged episodes, and count them, with --skip-corrupt.") from error
        return None, Counter({f"damaged, passed over: {error}": 1}), True


def _line(number: int, episode: Episode | None, noted: Counter[str], damaged: bool) -> dict[str, Any]:
    """What is kept of an episode in the record of a conversion."""
    success = None if episode is None else success_of(episode)
    return {
        "number": number,
        "steps": 0 if episode is None else len(episode),
        "success": success,
        "damaged": damaged,
        "notes": noted,
    }


def success_of(episode: Episode) -> bool | None:
    """Returns the success from the facts of an episode, or else from a column ``success``; None if it is unknown."""
    known = episode.facts.get("success")
    if known is None and "success" in episode.columns:
        return bool(np.any(episode.columns["success"]))
    return None if known is None else bool(known)
