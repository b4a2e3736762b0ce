"""Batches of HIL-SERL's replay buffers (tests/golden/hilserl/README.md).

The transitions are the file's own ``in/*``. Ours draws as the plain buffer does; of the memory-efficient one,
and of one that wrapped around, every row is compared with what ours gives for the same transition, which the
last state of a row names. Of ``facts.json``: layouts, how many transitions there are, and under ``wrong`` the
states: the pictures are what upstream gets wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten, unflatten
from hilt.replay import MemoryEfficientReplayBufferDataStore, ReplayBufferDataStore
from tests import golden


@dataclass
class Box:
    """As much of a Gymnasium space as the buffers look at."""

    shape: tuple[int, ...]
    dtype: Any = np.float32


@dataclass
class Dict:
    spaces: dict[str, Any] = field(default_factory=dict)


def matches(path: Path) -> Path | None:
    known = path.name in ("buffers_n1.npz", "buffers_n2.npz") or (
        path.name == "facts.json" and path.with_name("buffers_n1.npz").is_file()
    )
    return path if known and path.is_file() else None


def compare(case: Path) -> golden.Result:
    if case.name == "facts.json":
        theirs = json.loads(case.read_text())
        return golden.compare(facts(case.parent), comparable_facts(theirs))
    given = groups(case)
    columns = given.pop("in")
    theirs = {f"{group}/{path}": values for group, inner in given.items() for path, values in inner.items()}
    ours = batches(columns, {name: theirs[f"{name}/observations/state"] for name in given}, theirs["plain_indx/indx"])
    return golden.compare(ours, theirs)


def batches(columns: dict[str, Any], states: dict[str, Any], places: Any) -> dict[str, Any]:
    """What our buffers give, by group; of `states` only the names of the transitions in them are used."""
    buffer = filled("plain", columns)
    buffer.seed(3)
    ours = {"plain_seed3_0": buffer.sample(8), "plain_seed3_1": buffer.sample(8)}
    ours["plain_indx"] = {**buffer.sample(len(places), indx=places), "indx": np.asarray(places)}
    ours["plain_download_2_6"] = buffer.sample(4, indx=np.arange(2, 6))
    buffer.close()
    for name, state in states.items():
        if name.startswith(("efficient", "plain_wrapped")):
            ours[name] = rows(columns, name, state[:, -1, 0].tolist())
    return flatten(ours)


def rows(columns: dict[str, Any], group: str, names: list[float]) -> dict[str, Any]:
    """The named transitions, from a buffer as small as upstream's; those that ours no longer has, from a larger one."""
    kind, pack = (
        group.split("_")[0],
        {"pack_obs_and_next_obs": "unpacked" not in group} if group.startswith("efficient") else {},
    )
    found: dict[float, dict[str, Any]] = {}
    for capacity in (50, 12 if "cap12" in group else 7 if "wrapped7" in group else 50):
        buffer = filled(kind, columns, capacity)
        everything = flatten(buffer.sample(len(buffer), indx=np.arange(len(buffer)), **pack))
        for i, name in enumerate(everything["observations/state"][:, -1, 0].tolist()):
            found[name] = {path: values[i] for path, values in everything.items()}
        buffer.close()
    return unflatten({path: np.stack([found[name][path] for name in names]) for path in everything})


def facts(folder: Path) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for n in (1, 2):
        columns = groups(folder / f"buffers_n{n}.npz")["in"]
        for kind, word in (("plain", ""), ("efficient", "_packed"), ("efficient", "_unpacked")):
            buffer = filled(kind, columns)
            options = {"pack_obs_and_next_obs": word == "_packed"} if word else {}
            batch = flatten(buffer.sample(12 if word else 8, **options))
            ours[f"layout/{kind}{word}_n{n}"] = {
                path: [str(values.dtype), list(values.shape)] for path, values in batch.items()
            }
            if word:
                ours[f"valid/efficient_cap50_n{n}"] = len(buffer)
            buffer.close()
    for name, steps in {"gaps": (3, 4, 10, 11, 20), "truncation": (0, 1, 2, 3, 100, 101, 102, 103)}.items():
        frames = [np.full((1, 3), step, np.float32) for step in steps]
        picture = {"front": np.zeros((1, 8, 8, 3), np.uint8), "wrist": np.zeros((1, 8, 8, 3), np.uint8)}
        buffer = make("efficient", 1, 50)
        for frame in frames:
            seen = {"observations": {"state": frame, **picture}, "next_observations": {"state": frame + 1, **picture}}
            buffer.insert({**seen, "actions": np.zeros(2, np.float32), "rewards": 0.0, "masks": 1.0, "dones": False})
        batch = flatten(buffer.sample(len(steps), indx=np.arange(len(steps))))
        ours[f"wrong/{name}"] = [
            [int(batch[f"{part}/state"][i, -1, 0]) for part in ("observations", "next_observations")]
            for i in range(len(steps))
        ]
        buffer.close()
    return ours


def comparable_facts(stored: dict[str, Any]) -> dict[str, Any]:
    theirs = {f"layout/{name}": layout for name, layout in stored["layout"].items()}
    theirs |= {f"valid/{name}": slots["valid"] for name, slots in stored["slots"].items() if "cap50" in name}
    return theirs | {f"wrong/{name}": [[row[0], row[2]] for row in seen] for name, seen in stored["wrong"].items()}


def groups(path: Path) -> dict[str, dict[str, Any]]:
    """By the first part of the key."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(path) as file:
        for key, values in file.items():
            group, _, rest = key.partition("/")
            found.setdefault(group, {})[rest] = values
    return found


def filled(kind: str, columns: dict[str, Any], capacity: int = 50) -> Any:
    buffer = make(kind, columns["observations/front"].shape[1], capacity)
    buffer.batch_insert(
        [unflatten({path: values[i] for path, values in columns.items()}) for i in range(len(columns["rewards"]))]
    )
    return buffer


def make(kind: str, stack: int, capacity: int) -> Any:
    image = Box((stack, 8, 8, 3), np.uint8)
    space = Dict({"front": image, "state": Box((stack, 3)), "wrist": image})
    if kind == "plain":
        return ReplayBufferDataStore(space, Box((2,)), capacity)
    return MemoryEfficientReplayBufferDataStore(space, Box((2,)), capacity, image_keys=("front", "wrist"))
