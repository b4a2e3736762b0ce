"""Late facts: what became known about trajectories and steps after they were written.

Success marked afterwards, a relabeled reward, a deleted episode, who sent what: each is a line appended to one file
beside the log, with its checksum before it. The steps themselves never change; a batch shows the newest fact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError, SchemaError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS, key_of
from hilt.replay.storage.journal import Journal

ALL_STEPS = (1 << OFFSET_BITS) - 1


class Facts:
    """The newest facts of a log, and the file they are appended to."""

    def __init__(self, path: Path, files: Files, write: bool):
        self._journal = Journal(path, files, write)
        self._about: dict[int, dict[str, Any]] = {}
        self._origins: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self.deleted: dict[int, int] = {}  # trajectory -> the offset before which its steps are gone
        self.relabeled: dict[str, dict[int, Any]] = {}  # column -> key -> value
        self._sorted: dict[
            str, tuple[Array, Array]
        ] = {}  # the same as sorted keys and values, made when a batch needs them
        self._relabeling = threading.Lock()  # of these two: batches are made while facts are written
        self.unfinished: set[int] = set()  # trajectories of which not all pieces were written yet
        self.used = {
            "trajectory": -1,
            "segment": -1,
            "origin": 0,
        }  # the highest numbers ever given, which are not given again
        self.seen: dict[int, int] = {}  # origin -> the highest of its numbers among the steps that are gone
        self._noted: dict[int, int] = {}  # what of this is in the file

    @property
    def torn_bytes(self) -> int:
        return self._journal.torn_bytes

    @property
    def nbytes(self) -> int:
        return self._journal.nbytes

    @property
    def crc(self) -> int:
        return self._journal.crc

    @property
    def lines(self) -> int:
        return self._journal.lines

    @property
    def corrupt(self) -> int:
        return len(self._journal.corrupt_lines)

    @property
    def corrupt_lines(self) -> list[int]:
        return self._journal.corrupt_lines

    def read_new(self) -> set[int]:
        """Takes in what was appended since; returns the trajectories that it is about."""
        changed = set()
        for fact in self._journal.read_new():
            self._take(fact)
            changed.add(int(fact.get("trajectory", -1)))
        return changed

    def recover(self) -> None:
        self._journal.cut_tail()

    def origin(self, actor: str, boot: str, store: str) -> int:
        """The number that rows carry for this sender."""
        name = (actor, boot, store)
        if name not in self._origins:
            self._write({"origin": self.used["origin"] + 1, "actor": actor, "boot": boot, "store": store})
            self._journal.sync()  # before any row has this number: after a power cut it would be free, and be given to another
        return self._origins[name]

    def known_origin(self, actor: str, boot: str, store: str) -> int | None:
        """The same, of a sender that has sent something."""
        return self._origins.get((actor, boot, store))

    def origins(self) -> dict[int, tuple[str, str, str]]:
        return {number: name for name, number in self._origins.copy().items()}  # others may add some meanwhile

    def saw(self, origin: int, sequence: int) -> None:
        """A step is gone, and its sender need not send it again. This is written when its rows are deleted."""
        if sequence > self.seen.get(origin, -1):
            self.seen[origin] = sequence

    def annotate(self, trajectory: int, facts: Mapping[str, Any]) -> None:
        self._write({"trajectory": trajectory, "facts": _plain(facts)})

    def about(self, trajectory: int) -> dict[str, Any]:
        """Every fact about a trajectory, the newest of each name."""
        return dict(self._about.get(trajectory, {}))

    def success(self, trajectory: int) -> bool | None:
        value = self._about.get(trajectory, {}).get("success")
        return None if value is None else bool(value)

    def relabel(self, trajectory: int, column: str, values: Array, first: int) -> None:
        self._write({"trajectory": trajectory, "column": column, "first": first, "values": values.tolist()})

    def delete(self, trajectory: int, before: int = ALL_STEPS) -> None:
        """A trajectory, or its first steps, were deleted or evicted: they do not come back when the log is opened."""
        self._write({"trajectory": trajectory, "deleted_before": before})

    def begin(self, trajectory: int) -> None:
        """A trajectory is going to be written in pieces, and does not count before `finish`."""
        self._write({"trajectory": trajectory, "whole": False})

    def finish(self, trajectory: int) -> None:
        """All pieces of a trajectory were written."""
        self._write({"trajectory": trajectory, "whole": True})

    def compact(self, live: set[int], on_disk: set[int], before: Callable[[], None] = lambda: None) -> None:
        """Rewrites the file without what is about trajectories that are gone, once that is most of it.

        Of one that is deleted while its rows still lie in a segment, the deletion is kept. `before` is called before the file changes.
        """
        dead = self._journal.lines - len(self._origins) - len(live & self._about.keys()) - len(self.relabeled)
        if dead > 1000 and 2 * dead > self._journal.lines and not self.corrupt:
            before()
            facts = [fact for fact in self._journal.read_all() if "origin" in fact or _is_kept(fact, live, on_disk)]
            self._journal.rewrite([{"used": dict(self.used), "seen": self._unnoted({})}, *facts])
            self.deleted = {trajectory: before for trajectory, before in self.deleted.items() if trajectory in on_disk}
            self._about = {trajectory: about for trajectory, about in self._about.items() if trajectory in live}
            with self._relabeling:
                kept = {
                    c: {k: v for k, v in known.items() if k >> OFFSET_BITS in live}
                    for c, known in self.relabeled.items()
                }
                self.relabeled, self._sorted = {column: known for column, known in kept.items() if known}, {}

    def overlay(self, keys: Array, batch: Mapping[str, Array]) -> None:
        """Puts relabeled values into a batch."""
        for column in batch:
            with self._relabeling:
                known = self.relabeled.get(column)
                if known is None:
                    continue
                if column not in self._sorted:
                    order = sorted(known)
                    self._sorted[column] = (
                        np.array(order, np.int64),
                        _values(column, [known[key] for key in order], batch[column]),
                    )
                relabeled, values = self._sorted[column]
            place = np.minimum(np.searchsorted(relabeled, keys), len(relabeled) - 1)
            there = relabeled[place] == keys
            batch[column][there] = values[place[there]]

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()

    def renew_locks(self) -> None:
        """In a forked process."""
        self._relabeling = threading.Lock()
        self._journal.renew_locks()

    def _write(self, fact: dict[str, Any]) -> None:
        self._journal.append(fact)
        self._take(fact)

    def segment_gone(self, number: int) -> None:
        """A segment's files were deleted."""
        self._write(
            {"used": {**self.used, "segment": max(number, self.used["segment"])}, "seen": self._unnoted(self._noted)}
        )

    def _unnoted(self, noted: Mapping[int, int]) -> dict[str, int]:
        return {str(origin): number for origin, number in self.seen.items() if noted.get(origin, -1) < number}

    def _take(self, fact: Mapping[str, Any]) -> None:
        if "trajectory" in fact:
            self.used["trajectory"] = max(self.used["trajectory"], int(fact["trajectory"]))
        if "used" in fact:
            self.used = {name: max(number, int(fact["used"].get(name, -1))) for name, number in self.used.items()}
            for origin, number in fact.get("seen", {}).items():
                self._noted[int(origin)] = int(number)
                self.saw(int(origin), int(number))
        elif "origin" in fact:
            self.used["origin"] = max(self.used["origin"], int(fact["origin"]))
            self._origins[(fact["actor"], fact["boot"], fact["store"])] = int(fact["origin"])
        elif "facts" in fact:
            self._about.setdefault(int(fact["trajectory"]), {}).update(fact["facts"])
        elif "column" in fact:
            first = key_of(int(fact["trajectory"]), int(fact["first"]))
            with self._relabeling:
                self._sorted.pop(fact["column"], None)
                self.relabeled.setdefault(fact["column"], {}).update(
                    {first + i: v for i, v in enumerate(fact["values"])}
                )
        elif "deleted_before" in fact:
            self.deleted[int(fact["trajectory"])] = int(fact["deleted_before"])
            self.unfinished.discard(int(fact["trajectory"]))
        elif "whole" in fact:
            (self.unfinished.discard if fact["whole"] else self.unfinished.add)(int(fact["trajectory"]))


def _values(column: str, values: list[Any], like: Array) -> Array:
    """Relabeled values as an array; values of a file that another program wrote are checked."""
    try:
        made = np.array(values, like.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptError(f"annotations.jsonl: relabeled values of {column} are not {like.dtype} ({error}).") from None
    if made.shape[1:] != like.shape[1:]:
        raise CorruptError(
            f"annotations.jsonl: relabeled values of {column} have shape {made.shape[1:]}, expected {like.shape[1:]}."
        )
    return made


def _is_kept(fact: Mapping[str, Any], live: set[int], on_disk: set[int]) -> bool:
    trajectory = fact.get("trajectory", -1)
    return trajectory in live or (trajectory in on_disk and "deleted_before" in fact)


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as JSON takes them; numpy's numbers become Python's."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
            raise SchemaError(f"fact {name!r}: expected a number, text, list or mapping, got {type(value).__name__}.")
        out[name] = value
    return out
