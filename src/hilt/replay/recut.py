"""Episodes cut into several, and several made into one: the copies that such edits need, and their facts.

The recorded episodes stay, hidden by the edit, so that undoing it shows them again and hides the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError
from hilt.core.trajectory import ESTIMATES, INSTRUCTION, text_fact, texts_of
from hilt.core.tree import Array, flatten, unflatten
from hilt.replay.log import Log

VALUE_MODEL = "value_model"
"""The fact with the id of the model that estimates are from."""
ACTOR = "edit"
"""The sender of copies, which have no sequence numbers: they count for no sender's delivery."""


ESTIMATE_MEANS = {"value": "value", "advantage": "advantage", "percentile": "advantage_percentile"}
"""Lists of estimates, and the fact that has the mean of each."""
ESTIMATE_FACTS = (ESTIMATES, VALUE_MODEL, *ESTIMATE_MEANS.values(), "value_last")


def facts_of_estimates(estimates: Mapping[str, Any]) -> dict[str, Any]:
    """All facts of what a value model found about an episode, from its lists: ``value``, ``advantage``, ``percentile``
    and ``progress``, one number for each step from ``first`` on, and the id of the ``model``. The means over the steps
    and the last value are facts of their own, so that episodes can be filtered by them."""
    out: dict[str, Any] = {ESTIMATES: dict(estimates), VALUE_MODEL: estimates["model"]}
    for name, fact in ESTIMATE_MEANS.items():
        if given := estimates.get(name, []):
            out[fact] = round(sum(given) / len(given), 4)
    if estimates["value"]:
        out["value_last"] = estimates["value"][-1]
    return out


def cut_steps(facts: Mapping[str, Any], at: int | str) -> list[int]:
    """The steps at which an episode is cut: one that is given, or all that have a mark of this name."""
    if not isinstance(at, str):
        return [int(at)]
    marks = facts.get("marks", {})
    if at not in marks:
        raise ConfigError(f"split at {at!r}: expected a step, or a mark of the episode, which has {sorted(marks)}.")
    return [int(step) for step in marks[at]]


def read_columns(log: Log, keys: Array, width: int) -> dict[str, Array]:
    """The columns of an episode as edits show them, ``[T, B, ...]`` by path."""
    columns = flatten(log.read(keys))
    return {path: column.reshape(-1, width, *column.shape[1:]) for path, column in columns.items()}


def piece(columns: Mapping[str, Array], first: int, stop: int) -> dict[str, Any]:
    """Some steps of an episode as an episode. If it went on, this one was cut short."""
    out = {path: column[first:stop].copy() for path, column in columns.items()}
    if stop < len(columns["terminated"]):
        terminated = out["terminated"][-1]
        out["truncated"][-1] |= ~terminated
    return unflatten(out)


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, object]:
    """Episodes one after the other as one, which goes on where the first ones ended."""
    out = {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}
    for end in np.cumsum([len(part["terminated"]) for part in parts])[:-1]:
        out["terminated"][end - 1] = out["truncated"][end - 1] = False
    return unflatten(out)


def facts_of_piece(facts: Mapping[str, Any], first: int, stop: int, last: bool) -> dict[str, object]:
    """The facts of a piece: marks and instructions are those of its steps, and only the last piece has the success of
    the whole."""
    out = {name: value for name, value in facts.items() if name != "marks" and (last or name != "success")}
    if ESTIMATES in out:
        out = {name: value for name, value in out.items() if name not in ESTIMATE_FACTS}
        known, begin = facts[ESTIMATES], first - int(facts[ESTIMATES].get("first", 0))
        of_steps = {
            name: value[max(0, begin) :][: stop - first] for name, value in known.items() if type(value) is list
        }
        out |= facts_of_estimates({**known, **of_steps, "first": max(0, -begin)})
    if INSTRUCTION in out:
        out[INSTRUCTION] = text_fact(texts_of(out[INSTRUCTION], stop)[first:])
    marks = {name: [s - first for s in at if first <= s < stop] for name, at in facts.get("marks", {}).items()}
    return {**out, **({"marks": marks} if (marks := {name: at for name, at in marks.items() if at}) else {})}


def facts_of_joined(facts: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, object]:
    """The facts of episodes that become one: the success of the last, all instructions, tags and marks, else those of
    the first."""
    out = {**facts[-1], **facts[0]}
    for name in ("success", *ESTIMATE_FACTS):  # they are about other steps than the whole has
        out.pop(name, None)
    out |= {"success": facts[-1]["success"]} if "success" in facts[-1] else {}
    marks: dict[str, list[int]] = {}
    for known, before in zip(facts, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True):
        for name, at in known.get("marks", {}).items():
            marks.setdefault(name, []).extend(step + before for step in at)
    if any(INSTRUCTION in known for known in facts):
        texts = [texts_of(known.get(INSTRUCTION, ""), length) for known, length in zip(facts, lengths, strict=True)]
        out[INSTRUCTION] = text_fact([text for part in texts for text in part])
    tags = sorted({tag for known in facts for tag in known.get("tags", [])})
    return {**out, **({"marks": marks} if marks else {}), **({"tags": tags} if tags else {})}
