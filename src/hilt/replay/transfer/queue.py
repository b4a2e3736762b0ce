"""An actor's outbox: transitions that wait to be taken by the learner."""

from __future__ import annotations

import copy
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, DeadlineError, HiltError, explained_calls
from hilt.core.tree import Spec
from hilt.replay.durability import Durability
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.settings import as_seconds, as_transitions, as_whole_number
from hilt.replay.step_encoder import BLOCK_STEPS, PackedSteps
from hilt.replay.storage.lock import after_fork
from hilt.replay.transfer.spool import Spool

FULL = ("spill", "block", "drop_oldest")
MEMORY_BYTES = 1 << 30
"""With ``full="spill"``, what is kept in memory at most, however many transitions that are."""
_PLAIN_BYTES = 8 << 10
"""The estimated size in bytes of values that are not arrays, whose size is not measured."""
KEPT_BLOCKS = 96
"""Blocks whose memory is used again after a burst: some 250 MB at most, and only if so much once waited."""
_FROM_DISK = 16
"""Transitions that are read from disk at a time."""


@dataclass(frozen=True)
class Parcel:
    """Transitions with consecutive numbers of one boot, ready to be sent."""

    boot: str
    first: int
    last: int
    packed: dict[str, Any] | None
    """Arrays, for `hilt.replay.step_encoder.PackedBlock`."""
    items: list[Any] | None
    """Or what was inserted, where it is not arrays."""
    nbytes: int = 0
    """About how large it is."""


@explained_calls
class QueuedDataStore:
    """Transitions numbered from 0 in the order of their insertion, kept until they are acknowledged.

    The newest `capacity` ones are in memory, copied, so that the caller may use its arrays again. What happens when
    that is full is said by `full`: ``"spill"`` keeps the oldest in a log on disk, ``"block"`` makes `insert` wait
    until some are acknowledged, and ``"drop_oldest"`` drops and counts them. With a `path` every transition is
    written to a log there before `insert` returns: it is process-safe (see `Log` for `durability`), and the next
    process that opens the same path sends what this one did not.
    """

    def __init__(
        self,
        capacity: int,
        *,
        full: str = "spill",
        path: str | os.PathLike[str] | None = None,
        durability: str = "never",
    ):
        capacity = as_whole_number(
            "capacity", capacity, "the number of transitions that are kept in memory, such as 50000", 1
        )
        if full not in FULL:
            raise ConfigError(f"full={full!r}: expected one of {', '.join(FULL)}.")
        if path is not None and full != "spill":
            raise ConfigError(f"path= is where full='spill' keeps transitions; with full={full!r} nothing is written.")
        if path is None and Durability.parse(durability).words != "never":
            raise ConfigError(f"durability={durability!r} is for transitions on disk; give a path= too.")
        self.capacity, self._full, self._write_through = capacity, full, path is not None
        self.boot = secrets.token_hex(8)
        """Tells this opening of the queue from every other, so that numbers may begin at 0 again."""
        self.policy_version: int | None = None
        """The version of the weights that act now; transitions that do not name one get it. `TrainerClient` sets it."""
        self.on_insert: Callable[[], None] | None = None
        """Called after every insert; `TrainerClient` sets it."""
        self._spool = Spool(path, self.boot, durability)
        self._blocks: deque[_Block] = deque()
        self._pool = BufferPool(KEPT_BLOCKS)
        self._in_memory = 0
        self._memory_bytes = 0
        self._latest = self._spool.latest
        self._acknowledged = self._latest if self._spool.first is None else self._spool.first - 1
        self.renew_locks()
        after_fork(self, "renew_locks")
        self._counts = {"inserted": 0, "dropped": 0, "spilled": 0}

    def renew_locks(self) -> None:
        """Also in a forked process."""
        self._changed = threading.Condition()

    def insert(self, transition: Any, timeout: float = 60.0) -> int:
        """Keeps a transition; returns its number. Waits at most `timeout` seconds, and only with ``full="block"``."""
        if self.policy_version is not None and isinstance(transition, Mapping) and "policy_version" not in transition:
            transition = {**transition, "policy_version": np.int64(self.policy_version)}
        with self._changed:
            if self._in_memory >= self.capacity:
                self._make_room(timeout)
            if self._write_through:
                self._spool.append(self._latest + 1, transition)
            self._latest += 1
            self._keep(transition)
            self._counts["inserted"] += 1
            if self._write_through or self._full == "spill":
                while self._memory_bytes > MEMORY_BYTES and len(self._blocks) > 1:
                    self._move_oldest_to_disk()
            number = self._latest
        if self.on_insert is not None:
            self.on_insert()
        return number

    def batch_insert(self, transitions: Iterable[Any]) -> None:
        for transition in as_transitions(transitions):
            self.insert(transition)

    def latest_data_id(self) -> int:
        """The number of the newest transition, -1 when there was none."""
        with self._changed:
            return self._latest

    def get_latest_data(self, from_id: int) -> list[Any]:
        """The transitions after number `from_id` that are still kept, oldest first."""
        return [transition for _, transition in self.get_since(from_id)]

    def get_since(self, from_id: int) -> list[tuple[int, Any]]:
        """The same with their numbers, so that nothing inserted meanwhile is counted among them."""
        from_id = as_whole_number("from_id", from_id, "the number of a transition, or -1 for all that are kept")
        with self._changed:
            found: list[tuple[int, Any]] = []
            if self._first_in_memory > from_id + 1:
                on_disk = self._spool.read(from_id, len(self._spool))
                found += [(number, transition) for number, transition in on_disk if number < self._first_in_memory]
            for block in self._blocks:
                start = max(block.first, from_id + 1)
                if start <= block.last:
                    found += zip(range(start, block.last + 1), block.items(start, block.last), strict=True)
            return found

    def parcel(self, after: int, max_bytes: int = 1 << 30) -> Parcel | None:
        """The next transitions with numbers above `after`, as many as lie together
        and fit; None when there are none."""
        after = as_whole_number(
            "after", after, "the number of the last transition that was sent, or -1 for all that are kept"
        )
        max_bytes = as_whole_number("max_bytes", max_bytes, "the size that a parcel has at most, such as 1 << 30", 1)
        with self._changed:
            first = max(after + 1, self._acknowledged + 1)
            if first < self._first_in_memory and (parcel := self._from_disk(first, max_bytes)) is not None:
                return parcel
            for block in self._blocks:
                if block.last >= first:
                    return block.parcel(self.boot, max(block.first, first), max_bytes)
            return None

    def last_of(self, boot: str) -> int:
        """The number of the newest transition that is kept of a boot: of this one, or of
        one before it. -1 when there is none."""
        with self._changed:
            return self._latest if boot == self.boot else self._spool.last_of(boot)

    def acknowledge(self, up_to: int) -> None:
        """Lets go of the transitions up to this number: they are safe elsewhere."""
        up_to = as_whole_number("up_to", up_to, "the number of a transition")
        with self._changed:
            self._acknowledged = max(self._acknowledged, min(up_to, self._latest))
            self._spool.acknowledge(up_to)
            while self._blocks and self._blocks[0].first <= up_to:
                self._drop_from_memory(min(up_to, self._blocks[0].last))
            self._changed.notify_all()

    def __len__(self) -> int:
        """How many are kept."""
        with self._changed:
            return self._in_memory + self._only_on_disk()

    def stats(self) -> dict[str, int]:
        with self._changed:
            kept = {"kept": len(self), "on_disk": len(self._spool)}
            return {**self._counts, **kept, "latest": self._latest, "acknowledged": self._acknowledged}

    def close(self) -> None:
        """Lets go of the files. Transitions on disk stay there for the next process that opens the same path."""
        with self._changed:
            self._spool.close()

    # Inside; all under the lock

    @property
    def _first_in_memory(self) -> int:
        return self._blocks[0].first if self._blocks else self._latest + 1

    def _only_on_disk(self) -> int:
        return len(self._spool) - (self._in_memory if self._write_through else 0)

    def _keep(self, transition: Any) -> None:
        if not self._blocks or not self._blocks[-1].take(transition):
            self._blocks.append(_Block.of(transition, self._latest, self._pool))
            self._memory_bytes += self._blocks[-1].nbytes
        self._in_memory += 1

    def _make_room(self, timeout: float) -> None:
        if self._full == "spill":
            self._move_oldest_to_disk()
        elif self._full == "drop_oldest":
            self._drop_from_memory(self._first_in_memory)
            self._counts["dropped"] += 1
        else:
            deadline = time.monotonic() + as_seconds("timeout", timeout)
            while self._in_memory >= self.capacity:
                if (
                    not self._changed.wait(timeout=max(0.0, deadline - time.monotonic()))
                    and time.monotonic() >= deadline
                ):
                    raise DeadlineError(
                        f"waited {timeout:g} s for room: {self._in_memory} of {self.capacity} "
                        "transitions are not acknowledged. Is the learner running? Or use full='spill'."
                    )

    def _move_oldest_to_disk(self) -> None:
        block = self._blocks[0]
        if not self._write_through:
            self._spool.append(block.first, block.items(block.first, block.first)[0])
        self._drop_from_memory(block.first)
        self._counts["spilled"] += 1

    def _drop_from_memory(self, up_to: int) -> None:
        """Drops the oldest block."""
        block = self._blocks[0]
        self._in_memory -= up_to + 1 - block.first
        block.first = up_to + 1
        if block.first > block.last:
            self._blocks.popleft()
            self._memory_bytes -= block.nbytes

    def _from_disk(self, first: int, max_bytes: int) -> Parcel | None:
        found = [one for one in self._spool.read(first - 1, _FROM_DISK) if one[0] < self._first_in_memory]
        if not found:
            return None
        boot, block = self._spool.boot_of(found[0][0]), _Block.of(found[0][1], found[0][0], self._pool)
        for number, transition in found[1:]:
            if number != block.last + 1 or self._spool.boot_of(number) != boot or not block.take(transition):
                break
        return block.parcel(boot, block.first, max_bytes)


class _Block:
    """Transitions with consecutive numbers: packed, or as they were given where they are not arrays."""

    def __init__(self, number: int, packed: PackedSteps | None, plain: list[Any]):
        self.first, self.last, self._base = number, number, number
        self._packed, self._plain = packed, plain
        self.nbytes = packed.nbytes if packed is not None else 0

    @classmethod
    def of(cls, transition: object, number: int, pool: BufferPool) -> _Block:
        if isinstance(transition, Mapping):
            try:
                packed = PackedSteps(Spec.of(transition), pool)
            except HiltError:  # something in it is not an array of numbers
                return cls(number, None, [_copied(transition)])
            leaves = packed.spec.match(transition)
            if leaves:
                packed.append(leaves)
                return cls(number, packed, [])
        return cls(number, None, [_copied(transition)])

    def take(self, transition: Any) -> bool:
        """Takes the next transition, if it has the same layout and there is room."""
        if self._packed is None:
            if len(self._plain) >= BLOCK_STEPS or _Block.of(transition, 0, BufferPool())._packed is not None:
                return False
            self._plain.append(_copied(transition))
        else:
            leaves = None if self._packed.full else self._packed.spec.match(transition)
            if leaves is None:
                return False
            self._packed.append(leaves)
        self.last += 1
        return True

    def items(self, first: int, last: int) -> list[Any]:
        start, stop = first - self._base, last + 1 - self._base
        return self._plain[start:stop] if self._packed is None else self._packed.steps(start, stop)

    def parcel(self, boot: str, first: int, max_bytes: int) -> Parcel:
        start, stop = first - self._base, self.last + 1 - self._base
        if self._packed is None:
            stop = min(stop, start + max(1, max_bytes // _PLAIN_BYTES))
            return Parcel(boot, first, self._base + stop - 1, None, self._plain[start:stop])
        step_bytes = max(1, self.nbytes // self._packed.room)
        stop = min(stop, start + max(1, max_bytes // step_bytes))
        return Parcel(
            boot, first, self._base + stop - 1, self._packed.slice(start, stop), None, (stop - start) * step_bytes
        )


def _copied(transition: Any) -> Any:
    try:
        return copy.deepcopy(transition)
    except (TypeError, copy.Error):  # a lock, an open file: it cannot be sent either, and sending raises the error
        return transition
