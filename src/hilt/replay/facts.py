"""Late facts: what became known about trajectories and steps after they were written.

Success marked afterwards, a relabeled reward, a deleted episode, who sent what: each is a line appended to one file
beside the log, with its checksum before it. The steps themselves never change; a batch shows the newest fact. These are
the facts of the log's writer; what people edit, in whichever process, is in a file of its own and counts before them
(`EditState`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.edit_state import EditState
from hilt.replay.key_ranges import OFFSET_BITS, key_of
from hilt.replay.relabeled import RelabeledValues
from hilt.replay.storage.journal import Journal

ALL_STEPS = (1 << OFFSET_BITS) - 1
NOTHING: dict[str, Any] = {}
"""The facts about a trajectory of which there are none"""


class Facts:
    """The newest facts of a log, and the file they are appended to."""

    def __init__(self, path: Path, files: Files, write: bool):
        self._journal = Journal(path, files, write)
        self.edits = EditState(path.parent, files)
        self._about: dict[int, dict[str, Any]] = {}
        self._origins: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self.deleted: dict[int, int] = {}  # trajectory -> the offset before which its steps are gone
        self._values = RelabeledValues(path.name)
        self.unfinished: set[int] = set()  # trajectories of which not all pieces were written yet
        # the highest numbers ever given, which are not given again
        self.used = {"trajectory": -1, "segment": -1, "origin": 0}
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
        changed = self.edits.read_new()
        about, largest = self._about, -1
        for fact in self._journal.read_new():
            trajectory = int(fact.get("trajectory", -1))
            changed.add(trajectory)
            if len(fact) == 2 and "facts" in fact and trajectory not in about:  # most lines, in a long file
                about[trajectory], largest = fact["facts"], max(largest, trajectory)
            else:
                self._take(fact)
        self.used["trajectory"] = max(self.used["trajectory"], largest)
        return changed

    def recover(self) -> None:
        self._journal.cut_tail()

    def origin(self, actor: str, boot: str, store: str) -> int:
        """The number that rows carry for this sender."""
        name = (actor, boot, store)
        if name not in self._origins:
            self._write({"origin": self.used["origin"] + 1, "actor": actor, "boot": boot, "store": store})
            # before any row has this number: after a power cut it would be free, and be given to another
            self._journal.sync()
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

    def annotate(self, trajectory: int, facts: Mapping[str, object]) -> None:
        self._write({"trajectory": trajectory, "facts": plain_facts(facts)})

    def about(self, trajectory: int) -> dict[str, Any]:
        """Every fact about a trajectory, the newest of each name; what was edited counts before what was recorded."""
        return self.edits.about(trajectory, self._about.get(trajectory, {}))

    def about_each(self, trajectories: Iterable[int]) -> list[Mapping[str, Any]]:
        """The same of many trajectories, to be read only: what was not edited is not copied."""
        recorded, edited = self._about.get, self.edits.edited()
        if not edited:
            return [recorded(trajectory, NOTHING) for trajectory in trajectories]
        return [
            self.about(trajectory) if trajectory in edited else recorded(trajectory, NOTHING)
            for trajectory in trajectories
        ]

    def recorded(self, trajectory: int) -> dict[str, Any]:
        """The facts about a trajectory without edits."""
        return dict(self._about.get(trajectory, {}))

    def success(self, trajectory: int) -> bool | None:
        value = self.about(trajectory).get("success")
        return None if value is None else bool(value)

    @property
    def relabeled(self) -> dict[str, dict[int, Any]]:
        """Recorded values that replace those of rows: column, key and value."""
        return self._values.by_column

    @property
    def any_relabeled(self) -> bool:
        """Whether any step has another value than its row."""
        return bool(self._values.by_column or self.edits.values.by_column)

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

        Of one that is deleted while its rows still lie in a segment, the deletion is kept.
        `before` is called before the file changes.
        """
        dead = self._journal.lines - len(self._origins) - len(live & self._about.keys()) - len(self.relabeled)
        if dead > 1000 and 2 * dead > self._journal.lines and not self.corrupt:
            before()
            facts = [fact for fact in self._journal.read_all() if "origin" in fact or _is_kept(fact, live, on_disk)]
            self._journal.rewrite([{"used": dict(self.used), "seen": self._unnoted({})}, *facts])
            self.deleted = {trajectory: before for trajectory, before in self.deleted.items() if trajectory in on_disk}
            self._about = {trajectory: about for trajectory, about in self._about.items() if trajectory in live}
            self._values.keep(lambda key: key >> OFFSET_BITS in live)

    def overlay(self, keys: Array, batch: Mapping[str, Array], edited: bool = True) -> None:
        """Puts relabeled values into a batch, and edited ones over them."""
        for values in (self._values, *[self.edits.values] * edited):
            if values:
                values.overlay(keys, batch)

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()

    def renew_locks(self) -> None:
        """In a forked process."""
        self._values.renew_lock()
        self.edits.renew_locks()
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
            self._values.put(fact["column"], first, fact["values"])
        elif "deleted_before" in fact:
            self.deleted[int(fact["trajectory"])] = int(fact["deleted_before"])
            self.unfinished.discard(int(fact["trajectory"]))
        elif "whole" in fact:
            (self.unfinished.discard if fact["whole"] else self.unfinished.add)(int(fact["trajectory"]))


def _is_kept(fact: Mapping[str, Any], live: set[int], on_disk: set[int]) -> bool:
    trajectory = fact.get("trajectory", -1)
    return trajectory in live or (trajectory in on_disk and "deleted_before" in fact)


def plain_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts as JSON takes them; numpy's numbers become Python's."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
            raise SchemaError(f"fact {name!r}: expected a number, text, list or mapping, got {type(value).__name__}.")
        out[name] = value
    return out
