"""Between RLDS steps and transitions: N steps of an episode are N - 1 transitions, and back.

step        (o_0, a_0, r_0)   (o_1, a_1, r_1)   (o_2, -, -) last, terminal
transition  (o_0, a_0, r_0, o_1)   (o_1, a_1, r_1, o_2) terminated
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.trajectory import Source
from hilt.core.tree import Array, Spec, flatten, unflatten
from hilt.formats.episodes import (
    INSTRUCTION,
    Episode,
    Notes,
    StoredSteps,
    cut,
    gaps,
    map_leaves,
    plain,
    text_fact,
    texts_of,
    transitions,
)
from hilt.replay.schema import BUILT_IN

FEATURES = ("observation", "action", "reward", "discount", "is_first", "is_last", "is_terminal")
FLAGS = FEATURES[4:]
AT_THE_END = ("action", "reward", "discount")
"""What means nothing on a last step"""
RESERVED = ("observations", "actions", "rewards", "next_observations", *BUILT_IN)
"""Names that mean something in a log"""
MARK = "hilt"
"""The metadata of an episode that we wrote: its facts, and which column was which."""
_TO_RLDS = {"observations": "observation", "actions": "action", "rewards": "reward"}
_INSTRUCTIONS = (INSTRUCTION, "natural_language_instruction", "instruction")


def to_episode(rlds_episode: Mapping[str, object], notes: Notes, keep_last: bool = False) -> Episode | None:
    """An RLDS episode of N steps as N - 1 transitions; None when that is none.

    Further columns of the steps keep their names (``extra/NAME`` where a log means something else by it); texts
    and metadata become facts. The last step's action and reward belong to no transition: if they are not zero,
    they become the fact ``last_step``. `keep_last` makes a transition of it, whose next observation is its own.
    What we wrote ourselves comes back as it was.
    """
    steps = as_steps(rlds_episode["steps"])
    if (own := _marked(rlds_episode, steps)) is not None:
        return own
    columns, facts = _without_text(steps, notes)
    first, last, terminal = flags_of(columns, len(steps))
    rows, after = rows_of(first, keep_last)
    ends, length = rows if keep_last else after, len(first[rows])
    if not length:
        notes.add("an episode of one step has no transition")
        return None
    if (terminal & ~last).any():
        notes.add("is_terminal on a step that is not the last: not taken for an end")
    out: dict[str, Any] = {}
    if "observation" in columns:
        out |= {
            "observations": _take(columns["observation"], rows),
            "next_observations": _take(columns["observation"], after),
        }
    if "action" in columns:
        out["actions"] = _take(columns["action"], rows)
    if "reward" not in columns:
        notes.add("no rewards in this dataset: 0 everywhere")
    out["rewards"] = map_leaves(_as_reward, _take(columns.get("reward", np.zeros(len(steps), np.float32)), rows))
    out |= {"terminated": (terminal & last)[ends], "truncated": (last & ~terminal)[ends]}
    further = {
        name: _take(column, rows) for name, column in columns.items() if name not in FEATURES or name == "discount"
    }
    out["source"] = np.full(length, Source.DEMO, np.uint8)
    for name in ("is_intervention", "intervention"):
        if name in further and np.shape(further[name]) == (length,):
            out["source"] = np.where(further[name], Source.HUMAN, Source.POLICY).astype(np.uint8)
    if clashing := {name: column for name, column in further.items() if name in (*RESERVED, "extra")}:
        out["extra"] = clashing
    out |= {name: column for name, column in further.items() if name not in clashing}
    facts |= _facts_of_all(rlds_episode, columns)
    if not keep_last and (last_step := _last_action_and_reward(columns)):
        facts["last_step"] = last_step
        notes.add("the last step's action and reward belong to no transition: kept as the fact last_step")
    return Episode(out, facts)


def to_steps(episode: Episode, notes: Notes) -> list[dict[str, Any]]:
    """An episode of T transitions as T + 1 steps, ``{"steps": Steps, "episode_metadata":
    {...}}``; `to_episode` makes the same of it.

    RLDS stores each observation once: there is one such episode for each stretch without a gap, or an end, inside.
    """
    columns = episode.columns
    specs = [
        dict(Spec.of({"seen": columns[name]}, 1)) for name in ("observations", "next_observations") if name in columns
    ]
    paired = len(specs) == 2 and specs[0] == specs[1]
    ended = np.zeros(len(episode), bool) | columns.get("terminated", False) | columns.get("truncated", False)
    cuts = sorted({*(gaps(episode).tolist() if paired else ()), *(np.flatnonzero(ended[:-1]) + 1).tolist()})
    if cuts:
        notes.add("an episode with gaps or ends inside was cut there", len(cuts))
    parts = cut(episode, cuts)
    return [_with_last_step(part, paired, part is parts[-1]) for part in parts]


def as_list(steps: Any) -> StoredSteps | list[Any]:
    """Steps that can be read again: dictionaries of any iterable, or columns."""
    if isinstance(steps, StoredSteps):
        return steps
    if isinstance(steps, Mapping):
        return StoredSteps(map_leaves(np.asarray, steps))
    found = list(steps.as_numpy_iterator() if hasattr(steps, "as_numpy_iterator") else steps)
    if strange := [step for step in found if not isinstance(step, Mapping)]:
        raise SchemaError(f"steps: expected a dictionary of arrays for each step, got {type(strange[0]).__name__}.")
    return found


def as_steps(steps: object, example: Mapping[str, object] | None = None) -> StoredSteps:
    """Steps as columns. What a step lacks is NaN or 0, of the type that other steps or the example have."""
    steps = as_list(steps)
    return steps if isinstance(steps, StoredSteps) else StoredSteps(_stacked(steps, example) if steps else {})


def _stacked(values: list[Any], example: Any) -> Any:
    given = [value for value in values if value is not None]
    model = given[0] if given else example
    if isinstance(model, Mapping):
        examples = example if isinstance(example, Mapping) else {}
        names = dict.fromkeys([*(name for value in given for name in value), *examples])
        return {
            name: _stacked([None if value is None else value.get(name) for value in values], examples.get(name))
            for name in names
        }
    model = as_leaf(model)
    absent = np.full_like(model, np.nan) if np.asarray(model).dtype.kind == "f" else zero_of(model)
    leaves = [absent if value is None else as_leaf(value) for value in values]
    if not any(isinstance(leaf, (bytes, str)) for leaf in leaves) and len({np.shape(leaf) for leaf in leaves}) == 1:
        column, wanted = np.stack(leaves), np.asarray(model).dtype
        return column.astype(wanted, copy=False) if np.can_cast(column.dtype, wanted, "same_kind") else column
    return np.fromiter(leaves, object)


def as_leaf(value: object) -> Array | np.generic | bytes | str:
    """A value as numpy has it; plain numbers get the types that TensorFlow would give them."""
    if isinstance(value, (np.ndarray, np.generic, bytes, str)):
        return value
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return (
        array
        if hasattr(value, "dtype")
        else array.astype({"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype))[()]
    )


def zero_of(value: object) -> Array | np.generic | bytes | str:
    return type(value)() if isinstance(value, (bytes, str)) else np.zeros_like(value)[()]


def _take(tree: Any, rows: Any) -> Any:
    return map_leaves(lambda column: column[rows], tree)


def rows_of(first: Array, keep_last: bool) -> tuple[Any, Any]:
    """The steps where transitions begin, and those where they end. A last step only ends one, unless it is kept."""
    rows, over = np.arange(len(first)), np.append(first[1:], True)
    if keep_last:
        return slice(None), np.where(over, rows, rows + 1)
    return (slice(0, -1), slice(1, None)) if not over[:-1].any() else (rows[~over], rows[~over] + 1)


def flags_of(columns: Mapping[str, object], length: int) -> tuple[Array, Array, Array]:
    """Returns the flags of the steps that are first, last and terminal."""
    first, last, terminal = (per_step(columns, name, length).astype(bool) for name in FLAGS)
    return first, last, terminal


def per_step(columns: Mapping[str, Any], name: str, length: int) -> Array:
    """A column with one number a step; a flag that the data lacks is as it should be."""
    if name not in columns:
        result: Array = np.arange(length) == {"is_first": 0, "is_last": length - 1}.get(name, -1)
        return result
    if np.shape(columns[name]) != (length,):
        raise SchemaError(
            f"{name}: expected one number for each of {length} steps, got shape {np.shape(columns[name])}."
        )
    return np.asarray(columns[name])


def _as_reward(column: Array) -> Array:
    return column if column.dtype == np.float64 else column.astype(np.float32, copy=False)


def _without_text(steps: StoredSteps, notes: Notes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of numbers, and texts as facts; what else has no fixed shape is left out."""
    columns, facts = {}, dict[str, Any]()
    for path, column in flatten(steps.columns).items():
        if column.dtype.kind not in "OSU":
            columns[path] = column
        elif all(isinstance(value, (bytes, str)) for value in column):
            texts = text_fact(plain(list(column[: max(1, len(column) - 1)])))
            if path.split("/")[-1] in _INSTRUCTIONS and INSTRUCTION not in facts:
                facts[INSTRUCTION] = texts
            else:
                facts.setdefault("texts", {})[path] = texts
        else:
            notes.add(f"{path}: its shape changes from step to step, not carried over")
    return unflatten(columns), facts


def _facts_of_all(rlds_episode: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of an episode, and whether it succeeded, if that is recorded."""
    metadata = rlds_episode.get("episode_metadata", {})
    beside = {name: value for name, value in rlds_episode.items() if name not in ("steps", "episode_metadata")}
    metadata = plain({**beside, **(metadata if isinstance(metadata, Mapping) else {"episode_metadata": metadata})})
    facts = {"episode_metadata": metadata} if metadata else {}
    for name in ("success", "is_success"):
        if isinstance(success := metadata.get(name), (bool, int, float)):
            return {**facts, "success": bool(success)}
        if isinstance(column := columns.get(name), np.ndarray) and column.ndim == 1:
            return {**facts, "success": bool(column.any())}
    return facts


def _last_action_and_reward(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns action, reward and discount of a last step, unless the first two are zeros and NaN."""
    found = {name: _take(columns[name], -1) for name in AT_THE_END if name in columns}
    leaves = flatten({name: value for name, value in found.items() if name != "discount"})
    return plain(found) if any(np.nan_to_num(leaf).any() for leaf in leaves.values()) else {}


def _with_last_step(episode: Episode, paired: bool, is_end: bool) -> dict[str, Any]:
    """Transitions as steps, and one more for the last observation. `is_end`: the
    episode that they are a part of ends with them."""
    columns, facts, length = episode.columns, episode.facts, len(episode)
    words = facts.get("last_step") if is_end else None
    names, steps = dict[str, str](), dict[str, Any]()
    for name, column in columns.items():
        if name == "next_observations" and paired:
            continue
        rlds = _TO_RLDS.get(name, f"{MARK}_{name}" if name in (*FEATURES, INSTRUCTION) and name != "discount" else name)
        last = (
            _take(columns["next_observations"], -1)
            if paired and name == "observations"
            else map_leaves(zero_of, _take(column, 0))
        )
        if (
            isinstance(words, dict)
            and isinstance(column, np.ndarray)
            and np.shape(words.get(rlds, [[]])) == column.shape[1:]
        ):
            last = np.nan_to_num(np.array(words[rlds], float)).astype(column.dtype)
        names[rlds], steps[rlds] = name, _joined(column, last)
    place = np.arange(length + 1)
    steps.setdefault("discount", np.ones(length + 1, np.float32))
    terminated = np.any(columns["terminated"][-1]) if "terminated" in columns else False
    steps |= {"is_first": place == 0, "is_last": place == length, "is_terminal": (place == length) & terminated}
    texts = texts_of(facts.get(INSTRUCTION, ""), length)
    steps[INSTRUCTION] = np.array([text.encode(errors="replace") for text in (*texts, texts[-1])], object)
    mark = json.dumps({"columns": names, "paired": paired, "facts": facts}, sort_keys=True).encode()
    metadata = facts.get("episode_metadata")
    return {
        "episode_metadata": {**(metadata if isinstance(metadata, dict) else {}), MARK: mark},
        "steps": StoredSteps(steps),
    }


def _marked(rlds_episode: Mapping[str, Any], steps: StoredSteps) -> Episode | None:
    """What `_piece` was made from; None when it was not made by us."""
    metadata = rlds_episode.get("episode_metadata")
    mark = metadata.get(MARK) if isinstance(metadata, Mapping) else None
    if not isinstance(mark, (bytes, str)) or len(steps) < 2:
        return None
    try:
        known = json.loads(mark)
        found = {name: steps.columns[rlds] for rlds, name in known["columns"].items() if rlds in steps.columns}
        gone = {"rewards", "terminated", "truncated", "source"} & set(known["columns"].values()) - set(found)
        facts, paired = plain(known["facts"]), known["paired"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if (
        not isinstance(facts, dict)
        or not found
        or gone
        or any(column.dtype.hasobject for column in flatten(found).values())
    ):
        return None
    pair = transitions(found["observations"]) if paired and "observations" in found else {}
    return Episode({**{name: _take(column, slice(0, -1)) for name, column in found.items()}, **pair}, facts)


def _joined(columns: Any, last: Any) -> Any:
    if isinstance(columns, Mapping):
        return {name: _joined(columns[name], last[name]) for name in columns}
    return np.concatenate([columns, np.asarray(last)[None]])
