"""Writing to a log: an episode to which steps are appended by hand, those of several senders, or a whole trajectory.

Of a sender's steps, which come one by one or as a packed block, each goes on with
the episode that ended with its observation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hilt.core.errors import ClosedError, HiltError, StorageError
from hilt.core.tree import Array, Tree
from hilt.replay.schema import FrameColumn
from hilt.replay.settings import as_sequence
from hilt.replay.step_encoder import BlockSteps, EncodedSteps, PackedBlock, StepEncoder, TrajectorySteps
from hilt.replay.storage.open_segments import ActiveSegment
from hilt.replay.storage.segment import Segment

if TYPE_CHECKING:
    from hilt.replay.log import Log

Sender = tuple[str, str, str]
"""(actor, boot, store)"""


class EpisodeWriter:
    """One running episode of a log. Append its steps in order, then `end` it; a context manager ends it by itself."""

    def __init__(self, log: Log, active: ActiveSegment, trajectory: int, origin: int):
        self.trajectory = trajectory
        """The number of this trajectory in its log."""
        self._log, self._active = log, active
        self._running = True
        self._terminal = False  # whether the last step ends it
        self._encoder = StepEncoder(log.schema, trajectory, origin)
        self._in_segment = 0  # how many of its steps lie in the segment that is being written
        self._place = self._place_version = -1

    @property
    def steps(self) -> int:
        """How many steps were appended."""
        return self._encoder.steps

    @property
    def ended(self) -> bool:
        """Whether nothing more can be appended."""
        return not self._running

    def append(self, step: Tree, sequence: int = -1, timeout: float | None = None) -> int:
        """Stores one step and returns its key. Process-safe when it returns; see `Log.durability` for more.

        `timeout` is how long a rate limiter may hold the step back, in seconds.
        """
        if self._log.closed:
            self._log.require_writable()
        leaves, sequence = self._log.check(step), as_sequence(sequence)
        # what the last step ended with is known here, also where threads share an episode
        with self._log.inserting(1, timeout):
            return self.append_leaves(leaves, self.continues(leaves), sequence)

    def end(self) -> None:
        """Nothing more will come; with durability 'every episode' all of it is power-safe when this returns."""
        if not self._running:
            return
        with self._log.lock:
            self._log.require_writable()
            if not self._running:
                return
            self._running = False
            if self._in_segment:
                self._close_extent()
            self._log.episode_written(self._active)

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # Inside `Log.inserting`

    def continues(self, leaves: Sequence[Array]) -> bool:
        """Whether this step begins with the observation that the last one ended with."""
        return self._running and self._encoder.continues(leaves, self._stored_frame)

    def append_leaves(self, leaves: Sequence[Array], follows: bool, sequence: int) -> int:
        """Stores a step whose leaves were checked; returns its key. `follows` says
        that it begins where the last one ended."""
        place = self._place_in_segment(self._log.active_segments.has_room(self._require_running()))
        key = self._commit(self._encoder.step(leaves, follows, sequence, self._active.segment), place)
        self.settle()
        return key

    def append_block(self, block: BlockSteps, first: int, stop: int, follows: bool, sequence: int) -> range:
        """Stores steps of a block from `first` on, as many as fit into the segment;
        returns their keys. Call `settle` after it."""
        self._log.require_writable()
        place = self._place_in_segment(self._log.active_segments.room(self._require_running()) > 0)
        stop = min(stop, first + self._log.active_segments.room(self._active))
        sequences = np.arange(sequence + first, sequence + stop)
        key = self._commit(self._encoder.many(block, first, stop, follows, sequences, self._active.segment), place)
        return range(key, key + stop - first)

    def settle(self) -> None:
        """Makes the steps that were stored as safe as promised, makes room for
        them, and ends the episode where they do."""
        self._log.written(self._active)
        if self._terminal:
            self.end()
        else:
            self._log.tidy()

    def _commit(self, encoded: EncodedSteps, place: int | None) -> int:
        first = self._active.segment.append(encoded.rows, encoded.steps, encoded.frames)
        self._place = self._log.catalog.enter(self._active, first, encoded, place)
        self._place_version = self._log.index.version
        self._encoder.advance(encoded)
        self._in_segment += encoded.steps
        self._terminal = encoded.ended
        return encoded.key

    def _require_running(self) -> ActiveSegment:
        if not self._running:
            raise ClosedError(f"trajectory {self.trajectory} has ended; begin another one with log.episode().")
        return self._active

    def _place_in_segment(self, has_room: bool) -> int | None:
        """Where the index has what this episode wrote into the segment; None when the
        next step is the first in its segment."""
        place = self._current_place() if self._in_segment else None
        if has_room:
            return place
        # first: when there is no room on the disk, the episode stays as it was
        active = self._log.active_segments.replace(self._active)
        if self._in_segment:
            self._close_extent()
        self._active, self._in_segment = active, 0
        self._encoder.leave_segment()
        return None

    def _current_place(self) -> int:
        index = self._log.index
        if self._place_version != index.version:
            self._place = index.places_of(self.trajectory)[-1]
            self._place_version = index.version
        return self._place

    def _close_extent(self) -> None:
        self._log.index.entries["open"][self._current_place()] = False

    def _stored_frame(self, column: FrameColumn, number: int) -> Array:
        return self._active.table.frame(column, self._active.slot, number)


class RunningEpisodes:
    """Running episodes of one log, by sender. Several episodes of an unnamed actor
    are distinguished by their frames."""

    def __init__(self, log: Log, unnamed: int = 1):
        self._log, self._unnamed = log, unnamed
        self._running: dict[Sender, list[EpisodeWriter]] = {}

    def insert(self, sender: Sender, leaves: Sequence[Array], sequence: int, timeout: float | None) -> int:
        """Stores a step whose leaves were checked; returns its key."""
        with self._log.inserting(1, timeout):
            episode, follows = self._episode_for(sender, leaves)
            key = episode.append_leaves(leaves, follows, sequence)
            self._tidy(sender, episode)
            return key

    def insert_block(self, sender: Sender, block: PackedBlock, sequence: int, timeout: float | None) -> list[int]:
        """Stores packed steps of which the first has this number; returns the keys of those that are stored. The rest,
        if there is one, must be inserted one by one, which says what is wrong with it."""
        keys: list[int] = []
        steps = BlockSteps.checked(self._log.schema, block)
        if steps is None:
            return keys
        with contextlib.suppress(HiltError), self._log.inserting(steps.count, timeout):
            for first, stop in steps.runs():
                episode, follows = self._episode_for(sender, steps.leaves(first))
                while first < stop:
                    stored = episode.append_block(steps, first, stop, follows, sequence)
                    keys += stored  # also where settling them fails: they are in the log
                    episode.settle()
                    first, follows = first + len(stored), True
                self._tidy(sender, episode)
        return keys

    def forget(self, sender: Sender) -> None:
        """This sender will send no more: what it left running is ended."""
        for episode in self._running.pop(sender, []):
            episode.end()

    def _episode_for(self, sender: Sender, leaves: Sequence[Array]) -> tuple[EpisodeWriter, bool]:
        """The running episode that this step goes on with, the latest one first, or
        a new one; and whether it goes on."""
        running = self._running.setdefault(sender, [])
        for episode in reversed(running):
            if episode.continues(leaves):
                if episode is not running[-1]:
                    running.remove(episode)
                    running.append(episode)
                return episode, True
        while len(running) >= (1 if sender[0] else self._unnamed):
            running.pop(0).end()
        running.append(self._log.episode(*sender))
        return running[-1], False

    def _tidy(self, sender: Sender, episode: EpisodeWriter) -> None:
        if episode.ended:
            self._running[sender].remove(episode)


def write_trajectory(log: Log, steps: TrajectorySteps, encoder: StepEncoder, sequence: int) -> None:
    """Writes a whole trajectory inside `Log.inserting`: all of it, or nothing when it raises."""
    number, active = encoder.trajectory, log.active_segments.acquire(steps.count)
    written: list[Segment] = []
    in_pieces = log.active_segments.room(active) < steps.count
    try:
        if in_pieces:  # longer than a segment: it counts when the last piece is there
            log.facts.begin(number)
            _sync_pieces(log, [])
        while encoder.steps < steps.count:
            if written:
                active = log.active_segments.replace(active)
            stop = min(steps.count, encoder.steps + log.active_segments.room(active))
            piece = encoder.many(steps, encoder.steps, stop, False, sequence, active.segment)
            log.catalog.enter(active, active.segment.append(piece.rows, piece.steps, piece.frames), piece, None)
            encoder.advance(piece)
            written.append(active.segment)
        if in_pieces:
            _sync_pieces(log, written)
            log.facts.finish(number)
            _sync_pieces(log, [])
    except BaseException:
        if log.catalog.take_back(number):
            with contextlib.suppress(StorageError):  # without this line, the next writer sees that it was not finished
                log.facts.delete(number)
        raise
    finally:
        log.active_segments.release(active)
    if log.durability.every_episode:
        log.sync_written(written)
    log.catalog.end_extents(number)


def _sync_pieces(log: Log, written: Sequence[Segment]) -> None:
    """Syncs the pieces, so that no power cut takes one and leaves the record that all are there."""
    if log.durability.words != "never":
        for segment in written:
            segment.sync()
        log.facts.sync()
