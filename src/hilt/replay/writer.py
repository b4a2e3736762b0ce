"""Running episodes of a log: one to which steps are appended by hand, or those of several senders.

Of a sender's steps, which come one by one or as a packed block, each goes on with the episode that ended with its observation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hilt.core.errors import ClosedError, HiltError
from hilt.core.tree import Array, Tree
from hilt.replay.schema import FrameColumn
from hilt.replay.settings import as_sequence
from hilt.replay.step_encoder import BlockSteps, EncodedSteps, PackedBlock, StepEncoder

if TYPE_CHECKING:
    from hilt.replay.catalog import Lane
    from hilt.replay.log import Log

Sender = tuple[str, str, str]
"""(actor, boot, store)"""


class EpisodeWriter:
    """One running episode of a log. Append its steps in order, then `end` it; a context manager ends it by itself."""

    def __init__(self, log: Log, lane: Lane, trajectory: int, origin: int):
        self.trajectory = trajectory
        """The number of this trajectory in its log."""
        self._log, self._lane = log, lane
        self._running = True
        self._terminal = False  # whether the last step ends it
        self._encoder = StepEncoder(log.schema, trajectory, origin)
        self._in_lane = 0  # how many of its steps lie in the segment that is being written
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
        with self._log.inserting(1, timeout):  # what the last step ended with is known here, also where threads share an episode
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
            if self._in_lane:
                self._close_extent()
            self._log.episode_written(self._lane)

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # Inside `Log.inserting`

    def continues(self, leaves: Sequence[Array]) -> bool:
        """Whether this step begins with the observation that the last one ended with."""
        return self._running and self._encoder.continues(leaves, self._stored_frame)

    def append_leaves(self, leaves: Sequence[Array], follows: bool, sequence: int) -> int:
        """Stores a step whose leaves were checked; returns its key. `follows` says that it begins where the last one ended."""
        place = self._place_in_lane(self._log.has_room(self._require_lane()))
        key = self._commit(self._encoder.step(leaves, follows, sequence, self._lane.segment), place)
        self.settle()
        return key

    def append_block(self, block: BlockSteps, first: int, stop: int, follows: bool, sequence: int) -> range:
        """Stores steps of a block from `first` on, as many as fit into the segment; returns their keys. Call `settle` after it."""
        self._log.require_writable()
        place = self._place_in_lane(self._log.room(self._require_lane()) > 0)
        stop = min(stop, first + self._log.room(self._lane))
        sequences = np.arange(sequence + first, sequence + stop)
        key = self._commit(self._encoder.many(block, first, stop, follows, sequences, self._lane.segment), place)
        return range(key, key + stop - first)

    def settle(self) -> None:
        """Makes the steps that were stored as safe as promised, makes room for them, and ends the episode where they do."""
        self._log.written(self._lane)
        if self._terminal:
            self.end()
        else:
            self._log.tidy()

    def _commit(self, encoded: EncodedSteps, place: int | None) -> int:
        first = self._lane.segment.append(encoded.rows, encoded.steps, encoded.frames)
        self._place = self._log.enter(self._lane, first, encoded, place)
        self._place_version = self._log.index.version
        self._encoder.advance(encoded)
        self._in_lane += encoded.steps
        self._terminal = encoded.ended
        return encoded.key

    def _require_lane(self) -> Lane:
        if not self._running:
            raise ClosedError(f"trajectory {self.trajectory} has ended; begin another one with log.episode().")
        return self._lane

    def _place_in_lane(self, has_room: bool) -> int | None:
        """Where the index has what this episode wrote into the segment; None when the next step is the first in its segment."""
        place = self._current_place() if self._in_lane else None
        if has_room:
            return place
        lane = self._log.next_lane(self._lane)  # first: when there is no room on the disk, the episode stays as it was
        if self._in_lane:
            self._close_extent()
        self._lane, self._in_lane = lane, 0
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
        return self._lane.table.frame(column, self._lane.slot, number)


class RunningEpisodes:
    """Running episodes of one log, by sender. Of an unnamed actor several are told apart by their frames."""

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
        """Stores packed steps of which the first has this number; returns the keys of those that are stored. The rest, if
        there is one, must be inserted one by one, which says what is wrong with it."""
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
        """The running episode that this step goes on with, the latest one first, or a new one; and whether it goes on."""
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
