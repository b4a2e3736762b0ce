"""Everything that the timeline of one episode shows, as plain values: who acted, rewards, actions, states, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hilt.core.trajectory import ESTIMATES
from hilt.core.tree import Array
from hilt.formats.images import image_shape
from hilt.formats.listing.episode_source import EpisodeSource
from hilt.formats.listing.episode_table import SOURCES, shown_facts

MAX_PARTS = 64
"""Numbers in one column of a step; wider ones are named, and not drawn."""
GAP = 1.5
"""An interval this many times the median counts as a gap."""
FIRST = ("rewards", "success", "labels", "terminated", "truncated", "earned", "executed", "actions")
LEARNED = ("advantage", "value", "log_prob", "logprob", "score", "entropy")
"""Words in the names of what a policy or a classifier computed; these lanes come before the states."""
ESTIMATED = {"value": "", "advantage": "", "percentile": "%", "progress": ""}
"""What a value model finds about each step, with its unit; these lanes come first."""
UNITS = {
    "tcp_pose": (("x", "y", "z", "qx", "qy", "qz", "qw"), "m"),
    "tcp_vel": (("vx", "vy", "vz", "wx", "wy", "wz"), "m/s, rad/s"),
    "tcp_force": (("fx", "fy", "fz"), "N"),
    "tcp_torque": (("tx", "ty", "tz"), "N·m"),
}
"""Of columns whose meaning is fixed by HIL-SERL's robot server: the names of their numbers, and the unit."""


def episode_lanes(source: EpisodeSource, number: int, lane: int = 0) -> dict[str, object]:
    """The columns of an episode for a timeline, with its cameras and facts."""
    columns = source.columns(number, lane)
    length = len(next(iter(columns.values()), ()))
    wide = {name: column for name, column in columns.items() if column[:1].size > MAX_PARTS}
    cameras, facts, begin = source.cameras(number), source.facts(number), source.first_step(number)
    lanes, timing = _estimated(facts.get(ESTIMATES), begin, length), _timing(columns)
    for name in sorted((name for name in columns if name not in wide), key=_order):
        if name.startswith(("next_", "times/")) or name == "source" or columns[name].dtype.kind not in "biuf":
            continue
        lanes.append(_lane(name, columns[name], source.names(name)))
    lanes += [
        {
            "name": name,
            "kind": "number",
            "unit": "ms",
            "parts": [""],
            "values": [[None if value == "nan" else value for value in _numbers(values)]],
        }
        for name, values in timing.items()
    ]
    interval = timing.get("interval")
    usual = float(np.nanmedian(interval[1:])) if interval is not None and len(interval) > 1 else 0.0
    marks: Any = facts.get("marks")
    return {
        "steps": length,
        "hz": source.hz(number) or (1000.0 / usual if usual > 0 else 0.0),
        "source": np.asarray(columns.get("source", np.zeros(length)), np.int64).reshape(length, -1)[:, 0].tolist(),
        "sources": list(SOURCES),
        "cameras": [
            {"name": name, "height": size[0], "width": size[1]}
            for name, spec in cameras.items()
            for size in [image_shape(spec.shape) or (0, 0)]
        ],
        "lanes": lanes,
        "gaps": np.flatnonzero(interval > GAP * usual).tolist() if interval is not None and usual > 0 else [],
        "wide": {name: list(column.shape[1:]) for name, column in wide.items() if not name.startswith("next_")},
        "marks": [
            [step - begin, str(name)]
            for name, steps in _mapping(marks).items()
            for step in steps
            if 0 <= step - begin <= length
        ],
        "facts": shown_facts({name: value for name, value in facts.items() if name != ESTIMATES}),
    }


def _estimated(estimates: Any, begin: int, length: int) -> list[dict[str, Any]]:
    """What a value model found about the steps that are shown, one lane for each kind."""
    found, lanes = _mapping(estimates), []
    offset = begin - int(found.get("first", 0))
    for name, unit in ESTIMATED.items():
        given = found.get(name)
        if isinstance(given, list):
            at = range(offset, offset + length)
            values = [given[place] if 0 <= place < len(given) else None for place in at]
            lanes.append({"name": name, "kind": "number", "unit": unit, "chunk": 0, "parts": [""], "values": [values]})
    return lanes


def _lane(name: str, column: Array, given: Sequence[str]) -> dict[str, Any]:
    """One lane; of a chunk of actions the plan that the policy had at each step."""
    names, unit = UNITS.get(name.rpartition("/")[2], ((), ""))
    size = int(np.prod(column.shape[1:]))
    parts = [*given] if len(given) == size else [*names] if len(names) == size else _numbered(column.shape[1:])
    flat = column.reshape(len(column), -1)
    if column.dtype == bool:
        return {
            "name": name,
            "kind": "flag",
            "unit": "",
            "parts": parts,
            "values": [flat[:, i].tolist() for i in range(size)],
        }
    chunk = column.shape[1] if column.ndim == 3 and _is_action(name) else 0
    return {
        "name": name,
        "kind": "chunk" if chunk else "number",
        "unit": unit,
        "chunk": chunk,
        "parts": parts,
        "values": [_numbers(flat[:, i]) for i in range(size)],
    }


def _numbered(shape: tuple[int, ...]) -> list[str]:
    return [" ".join(map(str, place)) for place in np.ndindex(shape)] if shape else [""]


def _numbers(values: Array) -> list[Any]:
    """Numbers as JSON has them, exactly: a float32 is written with the digits that distinguish it."""
    if values.dtype.kind in "iu":
        return values.tolist()  # type: ignore[no-any-return]
    if values.dtype == np.float64:
        exact = values.tolist()
    else:
        exact = [float(text) for text in values.astype(np.float32).astype(str).tolist()]
    return [value if np.isfinite(value) else str(value) for value in exact]


def _timing(columns: dict[str, Array]) -> dict[str, Array]:
    """Milliseconds from seeing to acting, and from each step to the next, where the times were recorded."""
    observed, applied = columns.get("times/observed"), columns.get("times/applied")
    if observed is None or observed.ndim != 1 or not (observed > 0).all():
        return {}
    out = {"interval": np.concatenate([[np.nan], np.diff(observed) * 1e3])}
    if applied is not None and (applied > 0).all():
        out["latency"] = (applied - observed) * 1e3
    return out


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_action(name: str) -> bool:
    return "action" in name.rpartition("/")[2]


def _order(name: str) -> tuple[int, int, str]:
    last = name.rpartition("/")[2]
    if name in FIRST:
        return 0, FIRST.index(name), name
    if _is_action(name):
        return 1, 0, name
    if any(word in last for word in LEARNED):
        return 2, 0, name
    return (3, 0, name) if name.startswith("observations") else (4, 0, name)
