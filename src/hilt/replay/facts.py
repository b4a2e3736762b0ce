"""Late facts: what became known about trajectories and steps after they were written.

Success marked afterwards, a relabelled reward, a deleted episode, who sent what: each is a line appended to one file
beside the log, with its checksum before it. The steps themselves never change; a batch shows the newest fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.journal import Journal
from hilt.replay.runs import key_of


class Facts:
    """The newest facts of a log, and the file they are appended to."""

    def __init__(self, path: Path, files: Files, write: bool):
        self._journal = Journal(path, files, write)
        self._about: dict[int, dict[str, Any]] = {}
        self._origins: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self.deleted: set[int] = set()
        self.relabelled: dict[str, dict[int, Any]] = {}  # column -> key -> value

    @property
    def torn_bytes(self) -> int:
        return self._journal.torn_bytes

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
            self._write({"origin": max(self._origins.values()) + 1, "actor": actor, "boot": boot, "store": store})
        return self._origins[name]

    def origins(self) -> dict[int, tuple[str, str, str]]:
        return {number: name for name, number in self._origins.items()}

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

    def delete(self, trajectory: int) -> None:
        self._write({"trajectory": trajectory, "deleted": True})

    def overlay(self, keys: Array, batch: Mapping[str, Array]) -> None:
        """Puts relabelled values into a batch."""
        for column, values in self.relabelled.items():
            if column in batch:
                known = np.fromiter(values, np.int64, len(values))
                for i in np.flatnonzero(np.isin(keys, known)).tolist():
                    batch[column][i] = values[int(keys[i])]

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()

    def _write(self, fact: dict[str, Any]) -> None:
        self._journal.append(fact)
        self._take(fact)

    def _take(self, fact: Mapping[str, Any]) -> None:
        if "origin" in fact:
            self._origins[(fact["actor"], fact["boot"], fact["store"])] = int(fact["origin"])
        elif "facts" in fact:
            self._about.setdefault(int(fact["trajectory"]), {}).update(fact["facts"])
        elif "column" in fact:
            first = key_of(int(fact["trajectory"]), int(fact["first"]))
            self.relabelled.setdefault(fact["column"], {}).update({first + i: v for i, v in enumerate(fact["values"])})
        elif fact.get("deleted"):
            self.deleted.add(int(fact["trajectory"]))


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
