"""The running episodes of several senders: each step goes on with the episode that ended with its observation.

A sender's steps come one by one, or as a block of packed steps, which costs half as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hilt.core.checksums import checksum
from hilt.core.errors import HiltError, SchemaError
from hilt.core.tree import Array
from hilt.replay.key_ranges import key_of
from hilt.replay.log import Log
from hilt.replay.packed import PackedBlock
from hilt.replay.schema import FOLLOWS, REFERENCE, FrameColumn, check_sources
from hilt.replay.storage.segment import Segment
from hilt.replay.writer import EpisodeWriter, Reference

Sender = tuple[str, str, str]
"""(actor, boot, store)"""


class RunningEpisodes:
    """Running episodes of one log, by sender. Of an unnamed actor several are told apart by their frames."""

    def __init__(self, log: Log, unnamed: int = 1):
        self._log, self._unnamed = log, unnamed
        self._running: dict[Sender, list[EpisodeWriter]] = {}

    def insert(self, sender: Sender, leaves: Sequence[Array], sequence: int, timeout: float | None) -> int:
        """Stores a step whose leaves were checked; returns its key."""
        with self._log.inserting(1, timeout):
            episode = self._continued(sender, leaves)
            follows = episode is not None
            if episode is None:
                episode = self._begin(sender)
            key = self._log.commit_step(episode, leaves, follows, sequence)
            self._tidy(sender, episode)
            return key

    def insert_block(self, sender: Sender, block: PackedBlock, sequence: int, timeout: float | None) -> list[int]:
        """Stores packed steps of which the first has this number; returns the keys of those that are stored. The rest, if
        there is one, must be inserted one by one, which says what is wrong with it."""
        leaves = _checked(self._log, block)
        if leaves is None or not block.steps:
            return []
        rows = _Rows(self._log, leaves)
        with contextlib.suppress(HiltError), self._log.inserting(block.steps, timeout):
            for first, stop in rows.runs():
                episode = self._continued(sender, rows.leaves_of(first))
                follows = episode is not None
                if episode is None:
                    episode = self._begin(sender)
                while first < stop:
                    first = rows.commit(episode, first, stop, follows, sequence)
                    follows = True
                self._tidy(sender, episode)
        return rows.keys

    def forget(self, sender: Sender) -> None:
        """This sender will send no more: what it left running is ended."""
        for episode in self._running.pop(sender, []):
            episode.end()

    def _continued(self, sender: Sender, leaves: Sequence[Array]) -> EpisodeWriter | None:
        """The running episode that this step goes on with, the latest one first."""
        running = self._running.get(sender, [])
        for episode in reversed(running):
            if episode.continues(leaves):
                if episode is not running[-1]:
                    running.remove(episode)
                    running.append(episode)
                return episode
        return None

    def _begin(self, sender: Sender) -> EpisodeWriter:
        running = self._running.setdefault(sender, [])
        while len(running) >= (1 if sender[0] else self._unnamed):
            running.pop(0).end()
        running.append(self._log.episode(*sender))
        return running[-1]

    def _tidy(self, sender: Sender, episode: EpisodeWriter) -> None:
        if episode.lane is None:
            self._running[sender].remove(episode)


def _checked(log: Log, block: PackedBlock) -> dict[str, Any] | None:
    """Returns for each path an ``[n, ...]`` array or (frames, numbers) as the schema has them; None when a step by itself must be looked
    at."""
    if any(column.stack > 1 for column in log.schema.layout.frames):
        return None
    found: dict[str, Any] = {**block.columns, **block.images}
    for path, value in log.schema.complete({}).items():
        found.setdefault(path, np.broadcast_to(value, (block.steps,)))
    if found.keys() != set(log.schema.columns):
        return None
    try:
        for path, spec in log.schema.columns.items():
            is_frame, image = path in log.schema.layout.frame_of, isinstance(found[path], tuple)
            values, numbers = found[path] if image else (found[path], np.arange(block.steps))
            values = spec.check_column(path, values)
            found[path] = (values, numbers) if is_frame else values[numbers] if image else values
        check_sources(found["source"])
    except SchemaError:
        return None
    return found


class _Rows:
    """The rows of a block, committed in pieces that each go on with one episode and fit into one segment."""

    def __init__(self, log: Log, leaves: Mapping[str, Any]):
        self._log, self._leaves, self._layout = log, leaves, log.schema.layout
        self._ended = np.asarray(leaves["terminated"] | leaves["truncated"], bool)
        self.steps = len(self._ended)
        self.keys: list[int] = []
        """Of the steps that were committed."""

    def runs(self) -> list[tuple[int, int]]:
        """Stretches of steps of which each goes on where the one before it ended."""
        joined = ~self._ended[:-1]
        for now, after in self._layout.pairs:
            if now in self._layout.frame_of:
                same = (self._leaves[now][0] is self._leaves[after][0]) & (self._leaves[now][1][1:] == self._leaves[after][1][:-1])
            else:
                a, b = (np.ascontiguousarray(self._leaves[path]).reshape(self.steps, -1) for path in (now, after))
                same = (a[1:].view(np.uint8) == b[:-1].view(np.uint8)).all(axis=1)
            joined = joined & same
        cuts = np.flatnonzero(~joined) + 1
        return list(zip([0, *cuts.tolist()], [*cuts.tolist(), self.steps], strict=True))

    def leaves_of(self, step: int) -> list[Array]:
        """One step, as `EpisodeWriter.continues` takes it."""
        out = []
        for path, spec in self._log.schema.columns.items():
            leaf = self._leaves[path]
            out.append(leaf[0][leaf[1][step]].reshape(spec.shape) if isinstance(leaf, tuple) else np.asarray(leaf[step]))
        return out

    def commit(self, episode: EpisodeWriter, first: int, stop: int, follows: bool, sequence: int) -> int:
        """Appends steps from `first` on to an episode, as many as its segment takes; returns the first that it did not."""
        log = self._log
        log.require_writable()
        lane = episode.lane_for_append()
        place = log._place_of(episode) if episode.steps_in_lane else None
        if not log.room(lane):
            lane, place = log.next_lane(lane), None  # first: when there is no room on the disk, the episode stays as it was
            if episode.steps_in_lane:
                log._close_extent(episode)
            episode.move_to(lane)
        stop = min(stop, first + log.room(lane))
        rows, frames, tail = self._encode(episode, lane.segment, first, stop, follows, sequence)
        episode.place = log.commit_rows(lane, rows, frames, place)
        episode.place_version = log.index.version
        key = key_of(episode.trajectory, episode.steps)
        self.keys += range(key, key + stop - first)
        episode.committed_many(stop - first, self.leaves_of(stop - 1), tail)
        log.settle(episode, lane, bool(self._ended[stop - 1]))
        return stop

    def _encode(self, episode: EpisodeWriter, segment: Segment, first: int, stop: int, follows: bool, sequence: int) -> Any:
        count = stop - first
        rows = np.zeros(count, self._layout.row)
        rows["#trajectory"], rows["#origin"], rows["#width"] = episode.trajectory, episode.origin, 1
        rows["#sequence"], rows["#offset"] = np.arange(sequence + first, sequence + stop), np.arange(episode.steps, episode.steps + count)
        rows["#flags"] = FOLLOWS
        rows["#flags"][0] = FOLLOWS if follows else 0
        for path in self._layout.inline:
            rows[path] = self._leaves[path][first:stop]
        frames: dict[str, Array] = {}
        tail: dict[str, list[Reference]] = {}
        for column in self._layout.frames:
            known = episode.tail_of(column.name) if follows else None
            frames[column.name], references = self._store(column, segment.frames[column.name], first, stop, known)
            for path, of_steps in references.items():
                rows[path] = of_steps[:, None] if column.stack else of_steps
            if len(column.columns) > 1:
                frame, crc = references[column.columns[1]][-1].tolist()
                tail[column.name] = [(frame, crc)]
        return rows, frames, tail

    def _store(
        self, column: FrameColumn, base: int, first: int, stop: int, known: list[Reference] | None
    ) -> tuple[Array, dict[str, Array]]:
        """The frames that are new, ``[m, bytes]``, and per path the references of each step."""
        stream, _ = self._leaves[column.columns[0]]
        numbers = {path: self._leaves[path][1][first:stop] for path in column.columns}
        if len(column.columns) > 1 and self._leaves[column.columns[1]][0] is not stream:  # cast, or packed by somebody else
            other, of_step = self._leaves[column.columns[1]]
            numbers[column.columns[1]] = of_step[first:stop] + len(stream)
            stream = np.concatenate([stream, other])
        used = np.unique(np.concatenate(list(numbers.values())))
        is_new = used != numbers[column.columns[0]][0] if known is not None else np.ones(len(used), bool)
        flat, new = np.ascontiguousarray(stream).reshape(len(stream), -1).view(np.uint8), used[is_new]
        together = len(new) and new[-1] - new[0] == len(new) - 1
        frames = flat[new[0] : new[-1] + 1] if together else flat[new]
        references = np.zeros(len(used), REFERENCE)
        references["frame"][is_new] = base + np.arange(len(new))
        references["crc"][is_new] = [checksum(frame) for frame in frames]
        if known is not None:
            references[~is_new] = known[0]
        return frames, {path: references[np.searchsorted(used, of_step)] for path, of_step in numbers.items()}
