"""The machinery under `Log`: segments and their slots, the index, lanes, eviction, and readers that are never disturbed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ClosedError, DiskFullError, ReadOnlyError, StorageError
from hilt.core.files import Files, leftovers, storage_errors
from hilt.core.platform import allow_open_files
from hilt.core.tree import Array
from hilt.replay.durability import Syncer
from hilt.replay.facts import Facts
from hilt.replay.key_ranges import OFFSET_BITS, key_of
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import Schema
from hilt.replay.settings import ReadOptions
from hilt.replay.snapshot import Snapshot
from hilt.replay.step_encoder import EncodedSteps
from hilt.replay.storage.index import ENTRY, Index
from hilt.replay.storage.lock import after_fork, wait_before_fork
from hilt.replay.storage.opening import Opener
from hilt.replay.storage.quarantine import Quarantine
from hilt.replay.storage.readers import Readers
from hilt.replay.storage.scan import Damage, damage_in
from hilt.replay.storage.seal import LogSeal
from hilt.replay.storage.segment import Segment
from hilt.replay.storage.table import Table

if TYPE_CHECKING:
    from hilt.replay.view import Selection

logger = logging.getLogger("hilt.replay")


@dataclass
class Lane:
    """A segment that is being written. One running episode writes to a lane at a time, so its rows lie together."""

    segment: Segment
    slot: int
    table: Table


class Catalog:
    """Where every step of a log lies, on disk and in memory."""

    def __init__(self, path: Path, settings: dict[str, Any], files: Files, write: bool, options: ReadOptions):
        self.path, self.settings = path, settings
        whole = Schema.from_json(settings["schemas"][-1])
        self.schema = whole.reduced(options.without)
        unread = frozenset(column.name for column in whole.layout.frames if column.name not in self.schema.columns)
        self.lock = threading.RLock()
        self.pool = BufferPool()
        self.index = Index()
        self.facts = Facts(path / "annotations.jsonl", files, write)
        self.quarantine = Quarantine(path / "quarantine.json", files)
        self._selections: list[weakref.ref[Selection]] = []
        self.seal = LogSeal(path, files)
        schemas = [Schema.from_json(schema) for schema in settings["schemas"]]
        self._opener = Opener(path, schemas, files, write, self.quarantine, self.seal, unread)
        self.recovery = self._opener.recovery
        self.counts = dict.fromkeys(("inserted", "sampled", "evicted", "rejected", "corrupt", "segments_deleted"), 0)
        self.live_steps = self.live_bytes = self.appended = 0
        self._syncer: Syncer | None = None
        self.closed = self.cut_by_fork = False
        self.process = os.getpid()
        after_fork(self, "stop_writing")
        wait_before_fork(self)
        self._files, self._write, self._options = files, write, options
        self._tables: list[Table] = []
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, tuple[int, int]] = {}  # segment number -> table number, slot
        self._extents_in: dict[int, int] = {}  # segment number -> extents that are still wanted
        self._scanned: dict[int, int] = {}  # of a reader: rows of growing segments that it has seen
        self._held = np.zeros(0, ENTRY)  # of a reader: pieces of trajectories that are not whole yet
        self._on_disk: set[int] = set()  # trajectories found when opening, deleted ones among them
        self._oldest: dict[int, int] = {}  # segment -> the lowest trajectory that has rows in it
        self._tidy_above = 4096  # lines of facts
        self._settings_bytes = len(json.dumps(settings, indent=1)) + 512  # with its checksum, and the lock beside it
        self._idle: list[Lane] = []
        self._busy: set[int] = set()  # segments of lanes in use
        self._next_trajectory = self._next_segment = 0
        self._readers = Readers()

    # Opening

    def load(self) -> None:
        """Reads what is on disk. A writer also cuts torn tails and removes leftovers."""
        started = time.perf_counter()
        if self._write:
            for folder in [self.path, self.path / "segments", *self.path.glob("segments/[0-9]*/")]:
                for leftover in leftovers(folder):
                    self._files.remove(leftover)
        self.quarantine.load()
        self.seal.load()
        self.load_new()
        self._opener.find_losses(self.facts.corrupt > 0)
        if self._write:
            self.facts.recover()
            self.facts.compact({int(key) >> OFFSET_BITS for key in self.index.keys}, self._on_disk, self.seal.forget_facts)
            self.recovery.torn_bytes = self.facts.torn_bytes
        if self.quarantine.lost:
            self.recovery.mended.append("quarantine.json: does not have its checksum; every byte of the log was read instead")
            if self._write:
                self.quarantine.found_again()
        self.recovery.seconds = time.perf_counter() - started
        if text := self.recovery.in_words():
            logger.warning("%s: %s", self.path, text)

    def load_new(self) -> None:
        """Segments, rows and facts that appeared since the last look."""
        with storage_errors(self.path):
            folders = sorted(f for f in (self.path / "segments").iterdir() if f.name.isdigit() and f.is_dir())
        numbers = {int(f.name) for f in folders}
        for gone in [n for n in self._segments if n not in numbers or not (self._write or self._segments[n].is_there())]:
            self._forget_segment(gone)
        found = []
        for folder in folders:
            number = int(folder.name)
            if number not in self._segments:
                found.append(self._load_segment(folder))
            elif number in self._scanned:
                found.append(self._load_grown(number))
        changed = self.facts.read_new()  # after the rows: a trajectory that is being written in pieces is known as such
        if found or len(self._held):
            entries = np.concatenate([self._held, *found])
            self._on_disk = set(np.unique(entries["key"] >> OFFSET_BITS).tolist())
            self._enter(self._hold_unfinished(entries))
        self._next_trajectory = max(self._next_trajectory, self.facts.used["trajectory"] + 1)
        self._next_segment = max(self._next_segment, self.facts.used["segment"] + 1)
        for trajectory in self.facts.deleted.keys() & set(np.unique(self.index.keys >> OFFSET_BITS).tolist()):
            self._drop_before(trajectory, self.facts.deleted[trajectory])
        for selection in self.selections():
            selection.refresh(changed)
        self._next_segment = max(self._next_segment, self._opener.count_set_aside())
        self.recovery.corrupt_steps = self.quarantine.steps() + self._opener.aside_steps
        self.recovery.corrupt_facts = self.facts.corrupt
        self.counts["corrupt"] = self.recovery.corrupt_steps + self.facts.corrupt
        if self._write:  # a reader learns from the facts what the writer evicted
            self.enforce_capacity()

    def _hold_unfinished(self, entries: Array) -> Array:
        """The entries without those of trajectories that are not written to their end. A reader sees them later; the next
        writer knows that nobody was promised them, and deletes them."""
        self._held = np.zeros(0, ENTRY)
        numbers = entries["key"] >> OFFSET_BITS
        torn = np.isin(numbers, list(self.facts.unfinished))
        if not torn.any():
            return entries
        if not self._write:
            self._held = entries[torn]
            return entries[~torn]
        self.recovery.torn_steps += int(entries["steps"][torn].sum())
        for number in np.unique(numbers[torn]).tolist():
            self.facts.delete(number)
        return entries

    def _load_segment(self, folder: Path) -> Array:
        self._next_segment = max(self._next_segment, int(folder.name) + 1)
        opened = self._opener.open(folder)
        if opened is None:
            return np.zeros(0, ENTRY)
        segment, extents = opened
        lane = self._place(segment)
        if segment.sealed is None:
            if self._write:
                self._idle.append(lane)
            else:
                self._scanned[segment.number] = segment.rows
        return self._entries(segment, extents)

    def _load_grown(self, number: int) -> Array:
        """What the writer appended to a segment that this reader has open."""
        segment = self._segments[number]
        complete = (segment.folder / "seal.json").exists()  # before the look: then nothing comes after what it shows
        extents = self._opener.look_again(segment, self._scanned[number])
        self._scanned[number] = segment.rows
        if complete:
            del self._scanned[number]
        return self._entries(segment, extents)

    def _entries(self, segment: Segment, extents: Array) -> Array:
        table, slot = self._slots[segment.number]
        out = np.zeros(len(extents), ENTRY)
        for name in ("sequence", "steps", "width", "origin", "sources", "ended"):
            out[name] = extents[name]
        out["key"] = (extents["trajectory"] << OFFSET_BITS) | extents["offset"]
        out["at"] = extents["row"] + slot * self._tables[table].rows_per_slot
        out["segment"], out["table"] = segment.number, table
        self._oldest[segment.number] = int(extents["trajectory"].min(initial=self._next_trajectory))
        return out

    def _enter(self, entries: Array) -> None:
        self.index.extend(entries)
        self.live_steps += int(entries["steps"].sum())
        for number, count in zip(*np.unique(entries["segment"], return_counts=True), strict=True):
            self._extents_in[int(number)] = self._extents_in.get(int(number), 0) + int(count)
        self.live_bytes = sum(s.nbytes() for s in self._segments.values())
        if len(entries):
            self._next_trajectory = max(self._next_trajectory, int(entries["key"].max() >> OFFSET_BITS) + 1)
            self.facts.used["origin"] = max(self.facts.used["origin"], int(entries["origin"].max()))
        for selection in self.selections():
            for entry in entries:
                selection.added(int(entry["key"]), int(entry["steps"]), None)

    def _place(self, segment: Segment) -> Lane:
        """Gives a segment its slot in the table of its schema."""
        wanted = (segment.room, segment.schema.to_json())
        number = next((n for n, t in enumerate(self._tables) if (t.rows_per_slot, t.schema.to_json()) == wanted), len(self._tables))
        if number == len(self._tables):
            self._tables.append(Table(segment.schema, segment.room, self.pool, self._options, self._readers.later))
        table = self._tables[number]
        slot = table.add(segment)
        allow_open_files(len(self._segments) * (2 + len(segment.layout.frames)))
        self._segments[segment.number] = segment
        self._slots[segment.number] = (number, slot)
        return Lane(segment, slot, table)

    @cached_property
    def rows_per_segment(self) -> int:
        """How many steps a segment takes: by bytes, and few enough that old ones are deleted in time."""
        rows: int = max(1, self.settings["segment_bytes"] // self.schema.layout.step_bytes)
        if self.settings["capacity_steps"] is not None:
            rows = min(rows, max(64, self.settings["capacity_steps"] // 8))
        if self.settings["capacity_bytes"] is not None:
            rows = min(rows, max(1, self.settings["capacity_bytes"] // 8 // self.schema.layout.step_bytes))
        return min(rows, 1 << 18)

    def watch(self, selection: Selection) -> None:
        """Tells a selection about every change from now on, as long as somebody holds it."""
        self._selections = [ref for ref in self._selections if ref() is not None] + [weakref.ref(selection)]

    def selections(self) -> list[Selection]:
        return [selection for ref in self._selections if (selection := ref()) is not None]

    # Writing

    def take_trajectory(self) -> int:
        self._next_trajectory += 1
        return self._next_trajectory - 1

    def take_lane(self, steps: int = 1) -> Lane:
        """A lane that nobody writes to, with room for so many steps if a whole segment has it."""
        while self._idle:
            lane = self._idle.pop()
            fits = self.room(lane) >= min(steps, self.rows_per_segment) or not lane.segment.rows
            if fits and (lane.segment.schema is self.schema or lane.segment.schema.to_json() == self.schema.to_json()):
                self._busy.add(lane.segment.number)
                return lane
            self._seal(lane)
        return self._new_lane()

    def give_lane(self, lane: Lane) -> None:
        self._busy.discard(lane.segment.number)
        self._idle.append(lane)

    def next_lane(self, lane: Lane) -> Lane:
        """A fresh lane in place of a full one, which is sealed."""
        if self.settings["durability"] != "never":
            lane.segment.sync()
        fresh = self._new_lane()  # first: when there is no room for it, the full lane stays as it was
        try:
            self._seal(lane)
        except BaseException:
            self.give_lane(fresh)
            raise
        self._busy.discard(lane.segment.number)
        return fresh

    def room(self, lane: Lane) -> int:
        """How many more steps a lane takes, whatever frames they bring."""
        rooms = [min(self.rows_per_segment, lane.segment.room) - lane.segment.rows]
        for column in lane.segment.layout.frames:
            rooms.append((lane.segment.room - lane.segment.frames[column.name]) // column.frames_per_step)
        return max(0, min(rooms))

    def has_room(self, lane: Lane) -> bool:
        """Whether one more step fits, whatever frames it brings."""
        segment = lane.segment
        if segment.rows >= self.rows_per_segment or segment.rows >= segment.room:
            return False
        return all(segment.frames[c.name] + c.frames_per_step <= segment.room for c in segment.layout.frames)

    def _new_lane(self) -> Lane:
        number = self._next_segment
        self._next_segment += 1  # whatever happens: a half-made folder is never in the way of the next one
        folder = self.path / "segments" / f"{number:06d}"
        room = self.schema.layout.room(self.rows_per_segment)
        segment = Segment.create(folder, self.schema, room, self._files, durable=self.settings["durability"] != "never")
        lane = self._place(segment)
        self.live_bytes += segment.nbytes()
        self._busy.add(number)
        return lane

    def seal_idle(self) -> None:
        """Completes every segment that nobody writes to, as if it were full: what is compressed is compressed."""
        while self._idle:
            self._seal(self._idle.pop())

    def _seal(self, lane: Lane) -> None:
        segment = lane.segment
        extents = self.index.extents_of(segment.number, lane.slot * lane.table.rows_per_slot)
        if not segment.rows or not len(extents):
            self._extents_in.pop(segment.number, None)
            self._delete_segment(segment.number)
            return
        self.live_bytes -= segment.nbytes()
        try:
            segment.seal(extents, durable=self.settings["durability"] != "never")
        except DiskFullError as error:  # all steps are there; the next writer will scan them, and seal it
            logger.warning("%s: not sealed: %s", segment.folder, error)
        else:
            self.sealed(segment)
        finally:
            self.live_bytes += segment.nbytes()

    def sealed(self, segment: Segment) -> None:
        """Called when a segment is complete; `Log` compresses it in the background."""

    def write_seal(self) -> None:
        """Writes down what the log holds, as the last thing before it is closed: from then on missing bytes are known as such."""
        durable = self.settings["durability"] != "never"
        with self.lock:
            try:
                for number, segment in self._segments.items():
                    if segment.sealed is None and segment.rows:
                        first = self._slots[number][1] * segment.room
                        segment.list_held(self.index.extents_of(number, first), durable)
                self.seal.write(self.segments, (self.facts.nbytes, self.facts.crc), durable)
            except StorageError as error:  # no step is lost by it, and somebody may have removed the folder
                logger.warning("%s: what it holds was not written down: %s", self.path, error)

    def enter(self, lane: Lane, first: int, encoded: EncodedSteps, place: int | None) -> int:
        """Enters steps that were appended to a lane at row `first`: into their trajectory's extent at `place`, or into a new one.
        From now on every view has them. Returns the place."""
        extends = place is not None
        if place is None:
            place = self._open_extent(lane, first, encoded)
        else:
            self.index.grow(place, encoded.steps, encoded.sources, encoded.sequence, encoded.ended)
        layout = lane.segment.layout
        self.live_steps += encoded.steps
        self.appended += encoded.steps
        self.counts["inserted"] += encoded.steps
        self.live_bytes += encoded.steps * layout.row.itemsize
        for column in layout.frames:
            self.live_bytes += column.nbytes * len(encoded.frames[column.name])
        for ref in self._selections:
            if (selection := ref()) is not None:
                rows = None if selection.is_all else np.frombuffer(encoded.rows, layout.row)
                selection.added(encoded.key, encoded.steps, rows, extends)
        return place

    def _open_extent(self, lane: Lane, first: int, encoded: EncodedSteps) -> int:
        number, extent = lane.segment.number, np.zeros(1, ENTRY)[0]
        extent["key"], extent["steps"], extent["width"], extent["origin"] = encoded.key, encoded.steps, encoded.width, encoded.origin
        extent["sequence"], extent["sources"], extent["ended"] = encoded.sequence, encoded.sources, encoded.ended
        extent["at"], extent["segment"] = first + lane.slot * lane.table.rows_per_slot, number
        extent["table"], extent["open"] = self._slots[number][0], True
        self._oldest[number] = min(self._oldest.get(number, self._next_trajectory), encoded.key >> OFFSET_BITS)
        self._extents_in[number] = self._extents_in.get(number, 0) + 1
        return self.index.add(extent)

    # Removing

    def enforce_capacity(self) -> None:
        """Evicts the oldest trajectories until the log is within its capacity; a running one is spared while others are there."""
        steps, size = self.settings["capacity_steps"], self.settings["capacity_bytes"]
        while (steps is not None and self.live_steps > steps) or (size is not None and self._folder_bytes() > size):
            oldest = self.index.first_ended()
            if oldest is None:
                if not self._evict_running():
                    return
                continue
            if len(self.index) == 1 and (steps is None or self.live_steps <= steps):
                return  # one trajectory larger than capacity_bytes: it stays until the next one comes
            self._evict(int(self.index.keys[oldest] >> OFFSET_BITS))

    def _folder_bytes(self) -> int:
        return self.live_bytes + self.facts.nbytes + self._settings_bytes

    def _evict(self, trajectory: int) -> None:
        ended = [place for place in self.index.places_of(trajectory) if not self.index.entries["open"][place]]
        self._note_evicted(int(self.index.keys[ended[-1]]) + int(self.index.entries["steps"][ended[-1]]))
        self.counts["evicted"] += self.drop(trajectory)

    def _note_evicted(self, before: int) -> None:
        """The steps of a trajectory that lie before this key are going. Without the note they come back and go again."""
        if self._write:
            with contextlib.suppress(DiskFullError):
                self.facts.delete(before >> OFFSET_BITS, before & 0xFFFFFFFF)

    def drop(self, trajectory: int) -> int:
        """Takes a trajectory's ended extents out of the index and of all views; returns how many steps that were."""
        dropped = 0
        for place in reversed(self.index.places_of(trajectory)):
            entry = self.index.entries[place].copy()
            if entry["open"]:
                continue
            self.index.remove(place)
            dropped += self._dropped(entry)
        return dropped

    def _dropped(self, entry: Any) -> int:
        number, steps = int(entry["segment"]), int(entry["steps"])
        self.live_steps -= steps
        self.facts.saw(int(entry["origin"]), int(entry["sequence"]))
        for selection in self.selections():
            selection.removed(int(entry["key"]), steps)
        self._extents_in[number] -= 1
        if not self._extents_in[number] and number not in self._busy:
            del self._extents_in[number]
            self._idle = [lane for lane in self._idle if lane.segment.number != number]
            self._delete_segment(number)
        return steps

    def _evict_running(self) -> bool:
        """Only running episodes are left: the first steps of the oldest go, a good many at once. False when none can."""
        if not len(self.index):
            return False
        key, steps, capacity = int(self.index.keys[0]), int(self.index.entries["steps"][0]), self.settings["capacity_steps"]
        if capacity is not None and self.live_steps > capacity:
            wanted = max(self.live_steps - capacity, capacity // 16)
            steps = min(wanted, steps - 1 if self.index.entries["open"][0] else steps)
        elif self.index.entries["open"][0]:
            return False  # its bytes stay until its segment is full
        if steps > 0:
            before = self.live_steps
            self._note_evicted(key + steps)
            self._drop_before(key >> OFFSET_BITS, (key & 0xFFFFFFFF) + steps)
            self.counts["evicted"] += before - self.live_steps
        return steps > 0

    def _drop_before(self, trajectory: int, offset: int) -> None:
        """Drops the steps of a trajectory that lie before an offset."""
        for place in reversed(self.index.places_of(trajectory)):
            key, steps = int(self.index.keys[place]), int(self.index.entries["steps"][place])
            gone = min(steps, key_of(trajectory, offset) - key)
            if gone == steps:
                entry = self.index.entries[place].copy()
                self.index.remove(place)
                self._dropped(entry)
            elif gone > 0:
                self._shorten(place, gone)

    def _shorten(self, place: int, steps: int) -> None:
        for selection in self.selections():
            selection.removed(int(self.index.keys[place]), steps)
        self.index.shorten(place, steps)
        self.live_steps -= steps

    def _delete_segment(self, number: int) -> None:
        """Removes a segment's files now, and its map as soon as nobody reads from it."""
        segment = self._segments[number]
        folder, segment.deleted = segment.folder, True
        self.live_bytes -= segment.nbytes()
        if self._write:
            with contextlib.suppress(DiskFullError):
                self.facts.segment_gone(number)
            self.seal.forget(number)
            trash = folder.with_name(f".{folder.name}.trash")
            self._files.rename(folder, trash)
            if self.settings["durability"] != "never":  # else a power cut may leave a folder without its files
                self._files.sync_folder(folder.parent)
            self._files.remove(trash)
            self.counts["segments_deleted"] += 1
            self.quarantine.forget(number)
            self._oldest.pop(number, None)
            self._tidy_facts()
        self._retire(number)

    def _tidy_facts(self) -> None:
        """Now and then, forgets what is known about trajectories of which no row is left."""
        if self.facts.lines < self._tidy_above:
            return
        live = set(np.unique(self.index.keys >> OFFSET_BITS).tolist())
        oldest = min(self._oldest.values(), default=self._next_trajectory)
        with contextlib.suppress(DiskFullError):
            on_disk = live | {trajectory for trajectory in self.facts.deleted if trajectory >= oldest}
            self.facts.compact(live, on_disk, self.seal.forget_facts)
        self._tidy_above = 2 * self.facts.lines + 4096

    def _forget_segment(self, number: int) -> None:
        """Forgets a segment, in a reader: the writer deleted it, or it must be read again."""
        for place in reversed(np.flatnonzero(self.index.entries["segment"] == number).tolist()):
            entry = self.index.entries[place].copy()
            self.index.remove(place)
            self.live_steps -= int(entry["steps"])
            for selection in self.selections():
                selection.removed(int(entry["key"]), int(entry["steps"]))
        self._held = self._held[self._held["segment"] != number]
        self._extents_in.pop(number, None)
        self._scanned.pop(number, None)
        self._retire(number)

    def reopen(self, number: int) -> None:
        """Opens a segment's files anew, in another slot; readers at work keep the old one until they are done."""
        old = self._segments[number]
        table, slot = self._slots[number]
        fresh = Segment.open(old.folder, self._files, self._write)
        self.live_bytes += fresh.nbytes() - old.nbytes()
        self._retire(number)
        lane = self._place(fresh)
        entries = self.index.entries
        mine = entries["segment"] == number
        entries["at"][mine] += (lane.slot - slot) * self._tables[table].rows_per_slot
        self.index.version += 1

    def _retire(self, number: int) -> None:
        table, slot = self._slots.pop(number)
        del self._segments[number]
        self._readers.later(lambda: self._tables[table].remove(slot))

    def close_tables(self) -> None:
        """Lets go of all files and maps, as soon as nobody reads from them."""
        self._readers.later(*(table.close for table in self._tables))

    # Reading

    def reading(self) -> Snapshot:
        """The log as it is now, for a ``with``: until its end no step changes place and none of their bytes disappear."""
        with self.lock:
            self.require_open()
            epoch = self._readers.enter()
            return Snapshot(self.schema, self.index, self._tables, self.facts, self.pool, partial(self._done_reading, epoch))

    def _done_reading(self, epoch: int) -> None:
        with self.lock:
            self._readers.leave(epoch)

    def stop_writing(self) -> None:
        """In a forked process: its parent goes on writing. The threads that hold inner locks do not exist here."""
        self._write = False
        self.facts.renew_locks()
        for table in self._tables:
            table.renew_locks()

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path}: this log is closed; open it again.")
        if self.cut_by_fork:
            raise ClosedError(f"{self.path}: this process was forked while a thread changed it; open it again, with mode='r'.")

    def require_writable(self) -> None:
        self.require_open()
        if not self._write and self.process != os.getpid():
            who = f"process {self.process} writes to this log, and this one was forked from it"
            raise ReadOnlyError(f"{self.path}: {who}; open it with mode='r'.")
        if not self._write:
            raise ReadOnlyError(f"{self.path}: opened for reading; open it with mode='a' to write.")
        if self._syncer is not None:
            self._syncer.check()

    @property
    def segments(self) -> list[Segment]:
        return [self._segments[n] for n in sorted(self._segments)]

    def damage(self) -> list[Damage]:
        """Reads every byte and lists what is not as it was written."""
        with self.reading():  # so that no segment is closed meanwhile, and one that was deleted meanwhile has no files
            return [damage for segment in self.segments for damage in damage_in(segment) if segment.number in self._segments]
