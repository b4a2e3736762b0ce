"""The catalog of a log: where every step lies, on disk and in memory."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import DiskFullError, StorageError
from hilt.core.files import Files, leftovers, storage_errors
from hilt.core.tree import Array
from hilt.replay.edit_state import MIN_GONE
from hilt.replay.facts import Facts
from hilt.replay.key_ranges import OFFSET_BITS, key_of
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import Schema
from hilt.replay.settings import ReadOptions
from hilt.replay.step_encoder import EncodedSteps
from hilt.replay.storage.index import ENTRY, Index
from hilt.replay.storage.open_segments import ActiveSegment, OpenSegments
from hilt.replay.storage.opening import Opener
from hilt.replay.storage.quarantine import Quarantine
from hilt.replay.storage.seal import LogSeal
from hilt.replay.storage.segment import Segment

if TYPE_CHECKING:
    from hilt.replay.view import Watcher

logger = logging.getLogger("hilt.replay")


class Catalog:
    """Finds, enters and drops steps. The caller holds the log's lock in all of its methods."""

    def __init__(self, path: Path, settings: dict[str, Any], files: Files, write: bool, options: ReadOptions):
        self.path, self.settings = path, settings
        whole = Schema.from_json(settings["schemas"][-1])
        self.schema = whole.reduced(options.without)
        unread = frozenset(column.name for column in whole.layout.frames if column.name not in self.schema.columns)
        self.pool = BufferPool()
        self.index = Index()
        self.segments = OpenSegments(self.pool, options)
        self.facts = Facts(path / "annotations.jsonl", files, write)
        self.quarantine = Quarantine(path / "quarantine.json", files)
        self._selections: list[weakref.ref[Watcher]] = []
        self.seal = LogSeal(path, files)
        schemas = [Schema.from_json(schema) for schema in settings["schemas"]]
        self._opener = Opener(path, schemas, files, write, self.quarantine, self.seal, unread)
        self.recovery = self._opener.recovery
        self.counts = dict.fromkeys(("inserted", "sampled", "evicted", "rejected", "corrupt", "segments_deleted"), 0)
        self.live_steps = self.live_bytes = self.appended = 0
        self.closed = False
        self._files, self._write = files, write
        self.durable: bool = settings["durability"] != "never"
        """Whether files and names shall outlive a power cut."""
        self._extents_in: dict[int, int] = {}  # segment number -> extents that are still wanted
        self._scanned: dict[int, int] = {}  # of a reader: rows of growing segments that it has seen
        self._held = np.zeros(0, ENTRY)  # of a reader: pieces of trajectories that are not whole yet
        self._on_disk: set[int] = set()  # trajectories found when opening, deleted ones among them
        self._oldest: dict[int, int] = {}  # segment -> the lowest trajectory that has rows in it
        self._tidy_above = 4096  # lines of facts
        self._tidy_edits_above = MIN_GONE  # edits
        self._incomplete: list[ActiveSegment] = []  # of a writer: segments that an earlier process left
        self._protected: set[int] = set()  # segments to which a running episode is written
        self._next_trajectory = self._next_segment = 0

    # Opening

    def load(self, evict: Callable[[], None]) -> list[ActiveSegment]:
        """Reads what is on disk; returns the segments to which more may be appended. A writer also cuts torn tails,
        removes leftovers, and calls `evict` once it is known what is there."""
        started = time.perf_counter()
        if self._write:
            for folder in [self.path, self.path / "segments", *self.path.glob("segments/[0-9]*/")]:
                for leftover in leftovers(folder):
                    self._files.remove(leftover)
        self.quarantine.load()
        self.seal.load()
        self.load_new()
        if self._write:  # a reader learns from the facts what the writer evicted
            evict()
        self._opener.find_losses(self.facts.corrupt > 0)
        if self._write:
            self.facts.recover()
            self.facts.compact(
                {int(key) >> OFFSET_BITS for key in self.index.keys}, self._on_disk, self.seal.forget_facts
            )
            self.recovery.torn_bytes = self.facts.torn_bytes
            self._tidy_edits()
        if self.quarantine.lost:
            self.recovery.mended.append(
                "quarantine.json: does not have its checksum; every byte of the log was read instead"
            )
            if self._write:
                self.quarantine.found_again()
        self.recovery.seconds = time.perf_counter() - started
        if text := self.recovery.in_words():
            logger.warning("%s: %s", self.path, text)
        incomplete, self._incomplete = self._incomplete, []
        return incomplete

    def load_new(self) -> None:
        """Segments, rows and facts that appeared since the last look."""
        with storage_errors(self.path):
            folders = sorted(f for f in (self.path / "segments").iterdir() if f.name.isdigit() and f.is_dir())
        numbers = {int(f.name) for f in folders}
        for segment in self.segments:
            if segment.number not in numbers or not (self._write or segment.is_there()):
                self._forget_segment(segment.number)
        found = []
        for folder in folders:
            number = int(folder.name)
            if number not in self.segments:
                found.append(self._load_segment(folder))
            elif number in self._scanned:
                found.append(self._load_grown(number))
        changed = self.facts.read_new()  # after the rows: a trajectory that is being written in pieces is known as such
        if any(map(len, found)) or len(self._held):
            entries = np.concatenate([self._held, *found])
            trajectories = entries["key"] >> OFFSET_BITS
            self._on_disk = set(np.unique(trajectories).tolist())
            self._enter(self._hold_unfinished(entries))
        if found:
            self.live_bytes = self.segments.nbytes()
        used = max(self.facts.used["trajectory"], self.facts.edits.last_trajectory())
        self._next_trajectory = max(self._next_trajectory, used + 1)
        self._next_segment = max(self._next_segment, self.facts.used["segment"] + 1)
        for trajectory in self._there(self.facts.deleted):
            self.drop_before(trajectory, self.facts.deleted[trajectory])
        self.refresh_selections(changed)
        self._next_segment = max(self._next_segment, self._opener.count_set_aside())
        self.recovery.corrupt_steps = self.quarantine.steps() + self._opener.aside_steps
        self.recovery.corrupt_facts = self.facts.corrupt
        self.counts["corrupt"] = self.recovery.corrupt_steps + self.facts.corrupt

    def _there(self, trajectories: Iterable[int]) -> list[int]:
        """Those of these trajectories that have a step in the index."""
        numbers = np.fromiter(trajectories, np.int64)
        first = np.searchsorted(self.index.keys, numbers << OFFSET_BITS)
        behind = np.append(self.index.keys >> OFFSET_BITS, -1)[first] if len(numbers) else numbers
        found: list[int] = numbers[behind == numbers].tolist()
        return found

    def _hold_unfinished(self, entries: Array) -> Array:
        """The entries without those of trajectories that are not written to their end. A reader sees them later; the
        next writer knows that they were not acknowledged, and deletes them."""
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
        self.segments.add(segment)
        if segment.sealed is None:
            if self._write:
                self._incomplete.append(self.segments.active(segment.number))
            else:
                self._scanned[segment.number] = segment.rows
        return self._entries(segment, extents)

    def _load_grown(self, number: int) -> Array:
        """What the writer appended to a segment that this reader has open."""
        segment = self.segments[number]
        complete = (segment.folder / "seal.json").exists()  # before the look: then nothing comes after what it shows
        extents = self._opener.look_again(segment, self._scanned[number])
        self._scanned[number] = segment.rows
        if complete:
            del self._scanned[number]
        return self._entries(segment, extents)

    def _entries(self, segment: Segment, extents: Array) -> Array:
        out = np.zeros(len(extents), ENTRY)
        for name in ("sequence", "steps", "width", "origin", "sources", "ended"):
            out[name] = extents[name]
        out["key"] = extents["trajectory"] << OFFSET_BITS
        out["key"] |= extents["offset"]
        out["at"] = extents["row"] + self.segments.first_row(segment.number)
        out["segment"], out["table"] = segment.number, self.segments.table_of(segment.number)
        self._oldest[segment.number] = int(extents["trajectory"].min(initial=self._next_trajectory))
        return out

    def _enter(self, entries: Array) -> None:
        if not len(entries):
            return
        self.index.extend(entries)
        self.live_steps += int(entries["steps"].sum())
        for number, count in zip(*np.unique(entries["segment"], return_counts=True), strict=True):
            self._extents_in[int(number)] = self._extents_in.get(int(number), 0) + int(count)
        self._next_trajectory = max(self._next_trajectory, int(entries["key"].max() >> OFFSET_BITS) + 1)
        self.facts.used["origin"] = max(self.facts.used["origin"], int(entries["origin"].max()))
        for selection in self.selections():
            for entry in entries:
                selection.added(int(entry["key"]), int(entry["steps"]), None)

    def load_edits(self) -> bool:
        """Takes in what people edited since the last look; returns whether that is anything."""
        changed = self.facts.edits.read_new()
        self.refresh_selections(changed)
        return bool(changed)

    def refresh_selections(self, changed: set[int]) -> None:
        """Facts about these trajectories changed."""
        moved, self.facts.edits.moved = self.facts.edits.moved, set()
        for selection in self.selections():
            selection.refresh(changed, moved)

    def watch(self, selection: Watcher) -> None:
        """Reports every change to a selection, or another watcher, from now on, as long as it is referenced."""
        self._selections = [ref for ref in self._selections if ref() is not None] + [weakref.ref(selection)]

    def selections(self) -> list[Watcher]:
        return [selection for ref in self._selections if (selection := ref()) is not None]

    # Writing

    @property
    def next_trajectory(self) -> int:
        """The number of the trajectory that is written next."""
        return self._next_trajectory

    def take_trajectory(self) -> int:
        self._next_trajectory += 1
        return self._next_trajectory - 1

    def enter(self, active: ActiveSegment, first: int, encoded: EncodedSteps, place: int | None) -> int:
        """Enters steps that were appended to a segment at row `first`: into their trajectory's extent at `place`, or
        into a new one. From now on every view has them. Returns the place."""
        extends = place is not None
        if place is None:
            place = self._open_extent(active, first, encoded)
        else:
            self.index.grow(place, encoded.steps, encoded.sources, encoded.sequence, encoded.ended)
        layout = active.segment.layout
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

    def end_extents(self, trajectory: int) -> None:
        """Marks a trajectory as ended: nothing is appended to it any more."""
        for place in self.index.places_of(trajectory):
            self.index.entries["open"][place] = False

    def _open_extent(self, active: ActiveSegment, first: int, encoded: EncodedSteps) -> int:
        number, extent = active.segment.number, np.zeros(1, ENTRY)[0]
        extent["key"], extent["steps"], extent["width"], extent["origin"] = (
            encoded.key,
            encoded.steps,
            encoded.width,
            encoded.origin,
        )
        extent["sequence"], extent["sources"], extent["ended"] = encoded.sequence, encoded.sources, encoded.ended
        extent["at"], extent["segment"] = first + active.first_row, number
        extent["table"], extent["open"] = self.segments.table_of(number), True
        self._oldest[number] = min(self._oldest.get(number, self._next_trajectory), encoded.key >> OFFSET_BITS)
        self._extents_in[number] = self._extents_in.get(number, 0) + 1
        return self.index.add(extent)

    def new_segment(self, room: int) -> ActiveSegment:
        """Creates a segment with room for this number of rows."""
        number = self._next_segment
        self._next_segment += 1  # whatever happens: a half-made folder is never in the way of the next one
        segment = Segment.create(self.path / "segments" / f"{number:06d}", self.schema, room, self._files, self.durable)
        self.segments.add(segment)
        self.live_bytes += segment.nbytes()
        return self.segments.active(number)

    def protect(self, segment: Segment) -> None:
        """Keeps a segment to which a running episode is written, also while nothing in it is wanted."""
        self._protected.add(segment.number)

    def unprotect(self, segment: Segment) -> None:
        self._protected.discard(segment.number)

    def complete(self, active: ActiveSegment) -> bool:
        """Seals a segment to which nothing more is appended, or deletes it when nothing in it is
        wanted. Returns whether it is sealed."""
        segment = active.segment
        extents = self.index.extents_of(segment.number, active.first_row)
        if not segment.rows or not len(extents):
            self._extents_in.pop(segment.number, None)
            self.delete_segment(segment.number)
            return False
        self.live_bytes -= segment.nbytes()
        try:
            segment.seal(extents, self.durable)
        except DiskFullError as error:  # all steps are there; the next writer will scan them, and seal it
            logger.warning("%s: not sealed: %s", segment.folder, error)
            return False
        finally:
            self.live_bytes += segment.nbytes()
        return True

    def write_seal(self) -> None:
        """Writes down what the log holds, as the last thing before it is closed: from
        then on missing bytes are known as such."""
        try:
            for segment in self.segments:
                if segment.sealed is None and segment.rows:
                    segment.list_held(
                        self.index.extents_of(segment.number, self.segments.first_row(segment.number)), self.durable
                    )
            self.seal.write(list(self.segments), (self.facts.nbytes, self.facts.crc), self.durable)
        except StorageError as error:  # no step is lost by it, and the folder may have been removed
            logger.warning("%s: what it holds was not written down: %s", self.path, error)

    # Removing

    def note_evicted(self, before: int) -> None:
        """The steps of a trajectory that lie before this key are going. Without the
        note they come back and go again."""
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

    def take_back(self, trajectory: int) -> int:
        """Drops a trajectory as if it had never been appended; returns how many steps that were."""
        self.end_extents(trajectory)
        for selection in self.selections():
            selection.taken_back(key_of(trajectory), 1 << OFFSET_BITS)
        dropped = self.drop(trajectory)
        self.appended -= dropped
        self.counts["inserted"] -= dropped
        return dropped

    def _dropped(self, entry: Any) -> int:
        number, steps = int(entry["segment"]), int(entry["steps"])
        self.live_steps -= steps
        self.facts.saw(int(entry["origin"]), int(entry["sequence"]))
        for selection in self.selections():
            selection.removed(int(entry["key"]), steps)
        self._extents_in[number] -= 1
        if not self._extents_in[number] and number not in self._protected:
            del self._extents_in[number]
            self.delete_segment(number)
        return steps

    def drop_before(self, trajectory: int, offset: int) -> None:
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

    def delete_segment(self, number: int) -> None:
        """Removes a segment's files now, and its map as soon as no reader uses it."""
        segment = self.segments[number]
        folder, segment.deleted = segment.folder, True
        self.live_bytes -= segment.nbytes()
        if self._write:
            with contextlib.suppress(DiskFullError):
                self.facts.segment_gone(number)
            self.seal.forget(number)
            trash = folder.with_name(f".{folder.name}.trash")
            self._files.rename(folder, trash)
            if self.durable:  # else a power cut may leave a folder without its files
                self._files.sync_folder(folder.parent)
            self._files.remove(trash)
            self.counts["segments_deleted"] += 1
            self.quarantine.forget(number)
            self._oldest.pop(number, None)
            self._tidy_facts()
            self._tidy_edits()
        self.segments.retire(number)

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

    def _tidy_edits(self) -> None:
        """Now and then, forgets the edits of trajectories of which no row is left; in a log that is damaged, none: its
        trajectories may come back."""
        edits = self.facts.edits
        damaged = self.recovery.corrupt_steps or self.facts.corrupt or self.seal.losses
        if len(edits.edits) <= self._tidy_edits_above or damaged:
            return
        live = set(np.unique(self.index.keys >> OFFSET_BITS).tolist())
        with contextlib.suppress(DiskFullError):
            if edits.compact(live | self.facts.unfinished, self.durable):
                self._tidy_edits_above = 2 * len(edits.edits) + MIN_GONE

    def _forget_segment(self, number: int) -> None:
        """Forgets a segment, in a reader: the writer deleted it, or it must be read again."""
        for place in reversed(np.flatnonzero(self.index.entries["segment"] == number).tolist()):
            entry = self.index.entries[place].copy()
            self.index.remove(place)
            self.live_steps -= int(entry["steps"])
            for selection in self.selections():
                selection.removed(int(entry["key"]), int(entry["steps"]))
        elsewhere = self._held["segment"] != number
        self._held = self._held[elsewhere]
        self._extents_in.pop(number, None)
        self._scanned.pop(number, None)
        self.segments.retire(number)

    def reopen(self, number: int) -> None:
        """Opens a segment's files anew, in another slot; readers at work keep the old one until they are done."""
        old, first_row = self.segments[number], self.segments.first_row(number)
        fresh = Segment.open(old.folder, self._files, self._write)
        self.live_bytes += fresh.nbytes() - old.nbytes()
        self.segments.retire(number)
        self.segments.add(fresh)
        mine = self.index.entries["segment"] == number
        self.index.entries["at"][mine] += self.segments.first_row(number) - first_row
        self.index.version += 1

    # Ending

    def stop_writing(self) -> None:
        """In a forked process: its parent goes on writing. The threads that hold inner locks do not exist here."""
        self._write = False
        self.facts.renew_locks()
        self.segments.renew_locks()

    def close(self) -> None:
        """Releases all files and maps, as soon as no reader uses them."""
        self.closed = True
        self.segments.close()
        self.facts.close()
