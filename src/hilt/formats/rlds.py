"""RLDS: episodes of steps as TF-Agents' trajectories, as transitions of a log, and back. TensorFlow is not needed.

    episodes = open_dataset("bridge/1.0.0")
    for trajectory in convert_rlds_to_trajectories(episodes):
        ...
    with Log.create("bridge-log", create_log_schema(episodes)) as log:
        push_rlds_to_reverb(episodes, log)

The three functions have the names, arguments, results and errors of TF-Agents' ``rlds_to_reverb``. Their
`rlds_data` may be an opened RLDS dataset, any iterable of episodes ``{"steps": steps, ...}`` with steps as
dictionaries of arrays, or a ``tf.data.Dataset`` of them. A step t holds ``(o_t, a_t, r_t, d_t)``: what was
seen, what was done there, and what that earned.

On a last step, action, reward and discount mean nothing: they may be zero, NaN or absent. NaN and
what is absent become 0 (a discount: 1 unless the step is terminal), so that no loss ever meets
them. Elsewhere all seven features must be there.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hilt.core.errors import ConfigError, HiltError, SchemaError
from hilt.core.tree import Array, flatten, unflatten
from hilt.formats.dataset import LazyDataset, as_tensorflow, import_tensorflow
from hilt.formats.episodes import Episode, Notes, StoredSteps, map_leaves
from hilt.formats.steps import (
    AT_THE_END,
    FEATURES,
    RESERVED,
    as_leaf,
    as_list,
    as_steps,
    flags_of,
    per_step,
    rows_of,
    to_episode,
    zero_of,
)
from hilt.replay.log import Log
from hilt.replay.schema import BUILT_IN, Schema

FIRST, MID, LAST = 0, 1, 2
NO_STEPS = "No dataset representing RLDS steps exist in the data."
MISMATCH = "Replay buffer table signature spec should match RLDS data spec."
NO_BEGINNING = "Last step of an episode must be followed by a first step."
CHECKS = (
    "Terminal step must be the last step of an episode.",
    "Mid step should not be followed by a first step.",
    NO_BEGINNING,
)
STRICT_CHECKS = (
    "A first step that is not the last must not be followed by another episode.",
    "A first step must not follow a first step of the same episode.",
    "An episode must begin with a first step.",
)
ON_EVERY_STEP = tuple(name for name in FEATURES if name not in AT_THE_END)
logger = logging.getLogger("hilt.formats")

PolicyInfo = Callable[[dict[str, Any], dict[str, Any]], object]


class InvalidArgumentError(HiltError, ValueError):
    """Raised when an episode is malformed. Where TensorFlow is loaded it is TensorFlow's class of this name, too."""

    episode: int
    step: int
    pushed: int | None = None
    """How many trajectories the target got before; None where nothing is pushed."""


class Trajectory(NamedTuple):
    """One step and what kind of step follows, as in TF-Agents; or the spec of each of these."""

    step_type: Any
    """int32: 0 first, 1 mid, 2 last"""
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any
    """float32; 0 where the episode terminated"""


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one field."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] = ()
    name: str | None = None


@dataclass(frozen=True)
class BoundedTensorSpec(TensorSpec):
    minimum: float = 0.0
    maximum: float = 1.0


def create_trajectory_data_spec(rlds_data: object) -> Trajectory:
    """The specs of the trajectories that `rlds_data` gives, for a Reverb table and replay buffer:

        spec = create_trajectory_data_spec(rlds_data)
        table = reverb.Table(..., signature=tensor_spec.add_outer_dim(spec))

    Where TF-Agents is loaded they are its own specs, else `TensorSpec` with numpy's types. Raises ValueError when
    there are no steps, or when they lack a feature.
    """
    return _Data(rlds_data).spec()


def create_log_schema(rlds_data: object, policy_info_fn: PolicyInfo | None = None) -> Schema:
    """The schema of a log that `push_rlds_to_reverb` can fill with all that `rlds_data` has."""
    return Schema.of(_Data(rlds_data).transition(policy_info_fn), leading=1)


def convert_rlds_to_trajectories(
    rlds_data: object, policy_info_fn: PolicyInfo | None = None, strict: bool = False, *, as_tf_dataset: bool = False
) -> Any:
    """One trajectory for each step, made while they are asked for: a `LazyDataset` with ``map``,
    ``take``, ``batch`` and ``shuffle`` as ``tf.data`` has them, or with `as_tf_dataset` a
    ``tf.data.Dataset``, for which TensorFlow must be installed.

    Episodes are flattened into one row of steps::

        episode 1 │ step 1  step 2  step 3 │   ──►   step 1   step 2   step 3   step 4   step 5
        episode 2 │ step 4  step 5         │         first    mid      last     first    last

    A padding step of type `first` is added, and neighbors make overlapping pairs::

        step 1   step 2   step 3   step 4   step 5   padding
           └───1───┘└───2───┘└───3───┘└───4───┘└───5───┘

    Each pair becomes a trajectory: all of its first step, and the type of its second::

        (o_3, a_3, r_3, d_3) last, terminal   ──►   Trajectory(step_type=LAST, observation=o_3, action=a_3,
                                              policy_info=(),
        (o_4, a_4, r_4, d_4) first                             next_step_type=FIRST, reward=r_3, discount=0)

    An episode of one step has both types `LAST`. The discount is 0 on a last step that is terminal, else the step's
    own. ``policy_info_fn(step, next_step)`` makes the policy's info. Trajectories span two steps, here as in TF-Agents.
    Longer windows come from a log's sequence sampler: ``log.all().sampler(sequence_length=8)``.

    Raises ValueError when there are no steps or they lack a feature; and while it is iterated `InvalidArgumentError`,
    at an episode that does not end with a last step, at a terminal step that is not the last, and at a last step that
    no first step follows. `strict` also rejects what TF-Agents lets pass: a first step that is not the last before
    another episode, two first steps in a row inside one episode, and an episode that does not begin with a first step.
    """
    if as_tf_dataset:
        import_tensorflow()
    data = _Data(rlds_data)
    trajectories = LazyDataset(lambda: _trajectories(data, policy_info_fn, strict))
    if not as_tf_dataset:
        return trajectories
    kind = _their_trajectory()
    return as_tensorflow(trajectories.map(lambda one: kind(*one)), data.spec(policy_info_fn))


def push_rlds_to_reverb(
    rlds_data: object, reverb_observer: object, policy_info_fn: PolicyInfo | None = None, strict: bool = False
) -> int:
    """Gives `rlds_data` to a target, episode after episode, and returns how many trajectories (RLDS steps) that were.

    The target is one of TF-Agents' Reverb observers, which gets each trajectory; or a `Log`, a `TrainerClient` with one
    data store, or a data store. Those hold transitions: an episode of N steps is N - 1 of them, the last step being
    only where the last of them ends; all N steps are counted. What the target has no place for (the policy's info,
    further columns of the steps) is left out, with a warning. Nothing is flushed or closed.

    Raises ValueError when there are no steps, when they lack a feature, and when the target has another signature or
    schema than the data, with what differs. Raises `InvalidArgumentError` at a malformed episode, as
    `convert_rlds_to_trajectories` does: the episodes before it were pushed, nothing of it was. This error, like any
    other on the way, has the exact count so far in `pushed`.
    """
    data, pushed = _Data(rlds_data), 0
    give = _giver(reverb_observer, data, policy_info_fn)
    try:
        for episode in data.checked(strict):
            last = (len(episode.steps) - 1, NO_BEGINNING)  # then it is the next one that is malformed
            good = (
                _Checked(episode.number, episode.episode, _padding(episode.steps), strict)
                if episode.bad == last
                else episode
            )
            for count in give(good) if good.bad is None else ():
                pushed += count
            if episode.bad is not None:
                raise _invalid(*episode.bad, episode.number, pushed)
    except Exception as error:
        error.pushed = pushed  # type: ignore[attr-defined]
        raise
    return pushed


# RLDS data of any kind


class _Data:
    """RLDS data, episode by episode. What was looked at of something that can be read only once is kept."""

    def __init__(self, data: Any):
        if isinstance(data, (str, bytes, Mapping)) or not (hasattr(data, "rlds") or isinstance(data, Iterable)):
            raise SchemaError(NO_STEPS)
        self._data, self._kept = data, list[dict[str, Any]]()
        self._tensorflow = _tensorflow_spec(data)
        self._example = self._look()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        kept, self._kept = self._kept, []
        yield from kept
        for episode in self._data.rlds() if hasattr(self._data, "rlds") else self._data:
            yield {**_checked_keys(episode), "steps": as_list(episode["steps"])}

    def _look(self) -> dict[str, Any]:
        """One value of every column. A last step may lack some, then later ones have to show them."""
        found, seen = dict[str, Any](), list[dict[str, Any]]()
        for episode in self:
            seen += [episode] if isinstance(self._data, Iterator) else []
            for i in range(len(episode["steps"])):
                step = episode["steps"][i]
                found = {**{name: value for name, value in step.items() if value is not None}, **found}
                if all(name in found for name in FEATURES):
                    self._kept, self._beside = seen, {**episode, "steps": None}
                    result: dict[str, Any] = map_leaves(as_leaf, found)
                    return result
                _require_features(step)
        if self._tensorflow is None:
            raise SchemaError(_lacking(found) if found else NO_STEPS)
        return {}

    def spec(self, policy_info_fn: PolicyInfo | None = None) -> Trajectory:
        step = self._tensorflow or map_leaves(_spec_of, self._example)
        info = (
            map_leaves(_spec_of, policy_info_fn(self._example, self._example))
            if policy_info_fn and self._example
            else ()
        )
        step_type, discount = (
            TensorSpec(np.dtype(np.int32), (), "step_type"),
            BoundedTensorSpec(np.dtype(np.float32), (), "discount"),
        )
        spec = Trajectory(step_type, step["observation"], step["action"], info, step_type, step["reward"], discount)
        theirs = sys.modules.get("tf_agents.specs.tensor_spec")
        return spec if theirs is None else _their_trajectory()(*theirs.add_outer_dims_nest(spec, ()))

    def transition(self, policy_info_fn: PolicyInfo | None) -> dict[str, Any]:
        """The columns of a transition, made from one step."""
        if not self._example:
            raise SchemaError(NO_STEPS)
        steps = as_steps([{**self._example, "is_first": flag} for flag in (np.True_, np.False_)])
        found = _Checked(0, {**self._beside, "steps": steps}, steps[0], strict=False).transitions(policy_info_fn)
        assert found is not None
        return found.columns

    def checked(self, strict: bool) -> Iterator[_Checked]:
        """Every episode that has steps, once it is known what follows it."""
        waiting: tuple[int, dict[str, Any]] | None = None
        for number, episode in enumerate(self):
            if len(episode["steps"]):
                episode["steps"] = self._mended(episode["steps"])
                if waiting is not None:
                    yield _Checked(*waiting, episode["steps"][0], strict)
                waiting = number, episode
        if waiting is not None:
            yield _Checked(*waiting, _padding(waiting[1]["steps"]), strict)

    def _mended(self, steps: StoredSteps | list[Any]) -> StoredSteps:
        """Steps with all features, and nothing in a last one that could do harm."""
        if not isinstance(steps, StoredSteps):
            for step in steps:
                _require_features(step)
        columns = dict(as_steps(steps, self._example).columns)
        _require_features(columns, FEATURES)
        _, last, terminal = flags_of(columns, len(columns["is_last"]))
        for name in AT_THE_END:
            good = ~terminal if name == "discount" else np.zeros(len(last), bool)
            columns[name] = map_leaves(functools.partial(_finite_at, last, good), columns[name])
        return StoredSteps(columns)


class _Checked:
    """An episode with the types of its steps, and the first thing that is wrong with it."""

    def __init__(self, number: int, episode: dict[str, Any], following: dict[str, Any], strict: bool):
        self.number, self.episode, self.steps, self.following = number, episode, episode["steps"], following
        self.first, last, terminal = flags_of(self.steps.columns, len(self.steps))
        first, discount = self.first, per_step(self.steps.columns, "discount", len(self.steps))
        next_first, next_last = (
            np.append(first[1:], bool(following["is_first"])),
            np.append(last[1:], bool(following["is_last"])),
        )
        place, alone = np.arange(len(first)), first & next_first
        wrong = [terminal & ~last, ~last & ~first & next_first, last & ~next_first]
        if strict:
            inside = place < len(first) - 1
            wrong += [alone & ~last & ~inside, alone & inside, ~first & (place == 0)]
        places = [
            (int(np.argmax(found)), text)
            for found, text in zip(wrong, CHECKS + STRICT_CHECKS, strict=False)
            if found.any()
        ]
        self.bad = min(places, default=None, key=lambda bad: bad[0])
        self.types, self.next_types = _types(first, last, alone), _types(next_first, next_last, alone)
        self.discounts = np.where(last & terminal, 0, discount).astype(np.float32)

    def trajectories(self, policy_info_fn: PolicyInfo | None) -> Iterator[Trajectory]:
        """Yields the trajectories of all steps, or of those before the first that is wrong."""
        for i in range(len(self.steps) if self.bad is None else self.bad[0]):
            step, kind, next_kind = self.steps[i], self.types[i], self.next_types[i]
            info = policy_info_fn(step, self._after(i)) if policy_info_fn is not None else ()
            yield Trajectory(
                kind, step["observation"], step["action"], info, next_kind, step["reward"], self.discounts[i]
            )

    def transitions(self, policy_info_fn: PolicyInfo | None) -> Episode | None:
        found = to_episode(self.episode, Notes())
        if found is not None and policy_info_fn is not None:
            rows = np.arange(len(self.steps))[rows_of(self.first, keep_last=False)[0]]
            infos = [{"policy_info": policy_info_fn(self.steps[i], self._after(i))} for i in rows.tolist()]
            found.columns.update(as_steps(infos).columns)
        return found

    def _after(self, i: int) -> dict[str, Any]:
        return self.steps[i + 1] if i + 1 < len(self.steps) else self.following


def _trajectories(data: _Data, policy_info_fn: PolicyInfo | None, strict: bool) -> Iterator[Trajectory]:
    for episode in data.checked(strict):
        yield from episode.trajectories(policy_info_fn)
        if episode.bad is not None:
            raise _invalid(*episode.bad, episode.number)


def _types(first: Array, last: Array, alone: Array) -> Array:
    return np.select([alone, first, last], [LAST, FIRST, LAST], MID).astype(np.int32)


def _spec_of(value: Any) -> TensorSpec:
    dtype = object if isinstance(value, (bytes, str)) else np.asarray(as_leaf(value)).dtype
    return TensorSpec(np.dtype(dtype), np.shape(value))


def _their_trajectory() -> Any:
    """TF-Agents' class where it is loaded: its observers need it, and so does what samples for its agents."""
    return getattr(sys.modules.get("tf_agents.trajectories.trajectory"), "Trajectory", Trajectory)


def _padding(steps: StoredSteps) -> dict[str, Any]:
    """The step after the last one."""
    return {**map_leaves(zero_of, steps[0]), "is_first": np.True_}


def _checked_keys(episode: Any) -> Mapping[str, Any]:
    if not isinstance(episode, Mapping) or "steps" not in episode:
        raise SchemaError(NO_STEPS)
    return episode


def _require_features(step: Mapping[str, Any], names: tuple[str, ...] | None = None) -> None:
    """All features; of a last step, those that mean something."""
    names = names or (ON_EVERY_STEP if step.get("is_last") else FEATURES)
    if any(step.get(name) is None for name in names):
        raise SchemaError(_lacking(step))


def _lacking(step: Mapping[str, Any]) -> str:
    return (
        f"Invalid RLDS step spec. Features expected are {list(FEATURES)}, but found "
        f"{[name for name in step if step[name] is not None]}"
    )


def _tensorflow_spec(data: Any) -> dict[str, Any] | None:
    """The specs of a step, where the data is a ``tf.data.Dataset``."""
    if not (hasattr(data, "element_spec") and hasattr(data, "flat_map")):
        return None
    _checked_keys(data.element_spec)
    step = data.flat_map(lambda episode: episode["steps"]).element_spec
    _require_features(step, FEATURES)
    specs: dict[str, Any] = map_leaves(
        lambda spec: TensorSpec(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape), spec.name), step
    )
    return specs


def _finite_at(last: Array, good: Array, column: Any) -> Any:
    """The column with good values instead of those of last steps that are not finite."""
    if column.dtype.kind != "f" or np.isfinite(column[last]).all():
        return column
    last, good = (np.expand_dims(flags, tuple(range(1, column.ndim))) for flags in (last, good))
    return np.where(last & ~np.isfinite(column), good, column).astype(column.dtype, copy=False)


def _invalid(place: int, text: str, episode: int, pushed: int | None = None) -> InvalidArgumentError:
    message = (
        text
        if pushed is None
        else f"{text} It is step {place} of episode {episode}; {pushed} steps were pushed before."
    )
    theirs = getattr(getattr(sys.modules.get("tensorflow"), "errors", None), "InvalidArgumentError", None)
    error = InvalidArgumentError(message) if theirs is None else _of_both(theirs)(None, None, message)
    error.episode, error.step, error.pushed = episode, place, pushed
    return error


@functools.cache
def _of_both(theirs: type[Exception]) -> Any:
    return type(
        "InvalidArgumentError", (InvalidArgumentError, theirs), {"__init__": theirs.__init__, "__module__": __name__}
    )


# Targets


def _giver(target: Any, data: _Data, policy_info_fn: PolicyInfo | None) -> Callable[[_Checked], Iterator[int]]:
    """Pushes one episode to a target, and yields the number of steps after each part."""
    if hasattr(target, "get_table_signature"):
        theirs = _fields(target.get_table_signature())
        if policy_info_fn is not None and not any(path.startswith("policy_info") for path in theirs):
            logger.warning("the table's signature has no policy_info: left out")
            policy_info_fn = None
        ours = _fields(data.spec(policy_info_fn), outer=(None,))
        _require_same("table", theirs, ours, [*ours, *theirs])
        kind = _their_trajectory()
        return lambda episode: (target(kind(*each)) or 1 for each in episode.trajectories(policy_info_fn))
    stores = getattr(target, "data_stores", None)
    if isinstance(stores, Mapping):
        if len(stores) != 1:
            names = ", ".join(stores) or "none"
            raise ConfigError(
                f"expected a client with one data store, got {len(stores)} ({names}); give client.data_stores[NAME]."
            )
        (target,) = stores.values()
    log = target if isinstance(target, Log) else getattr(target, "log", None)
    if target is None or isinstance(target, list) or (log is not target and not hasattr(target, "insert")):
        raise ConfigError(
            "expected a TF-Agents Reverb observer, a Log, a TrainerClient or a data store, "
            f"got {type(target).__name__}."
        )
    wanted = _columns_for(log.schema, data.transition(policy_info_fn)) if isinstance(log, Log) else None

    def give(episode: _Checked) -> Iterator[int]:
        found, steps = episode.transitions(policy_info_fn), len(episode.steps)
        if found is not None and wanted is not None:
            found.columns = unflatten(
                {path: column for path, column in flatten(_with_masks(found.columns)).items() if path in wanted}
            )
        if found is not None and isinstance(target, Log):
            target.add(
                map_leaves(lambda column: column[:, None], found.columns),
                actor="rlds",
                sequence=episode.number,
                facts=found.facts,
            )
        elif found is not None:
            for step in StoredSteps(found.columns):
                target.insert(step)
                yield 1
            steps -= len(found)
        yield steps

    return give


def _columns_for(schema: Schema, given: dict[str, Any]) -> set[str]:
    """The columns that a log and the data have. One that the data lacks or has otherwise is an error; one
    of a step's that the log lacks is left out."""
    ours = {path: f"{column.dtype} {column.shape[1:]}" for path, column in flatten(_with_masks(given)).items()}
    theirs = {path: str(spec) for path, spec in schema.columns.items()}
    needed = [path for path in theirs if path in ours or path not in BUILT_IN]
    _require_same("log", theirs, ours, needed + [path for path in ours if path.split("/")[0] in RESERVED])
    if left := [path for path in flatten(given) if path not in theirs]:
        logger.warning("the log has no column for %s: left out", ", ".join(left))
    return set(ours) & set(theirs)


def _with_masks(columns: dict[str, Any]) -> dict[str, Any]:
    """With HIL-SERL's ``dones`` and ``masks``, in case the log wants them."""
    if "terminated" not in columns or "truncated" not in columns:  # an episode that we wrote, from a log without them
        return columns
    masks = 1 - columns["terminated"].astype(np.float32)
    return {"dones": columns["terminated"] | columns["truncated"], "masks": masks, **columns}


def _require_same(name: str, theirs: Mapping[str, str], ours: Mapping[str, str], paths: list[str]) -> None:
    differing = [path for path in dict.fromkeys(paths) if theirs.get(path) != ours.get(path)]
    if differing:
        differences = [
            f"{path}: the {name} has {theirs.get(path, 'nothing')}, the data {ours.get(path, 'nothing')}"
            for path in differing
        ]
        raise SchemaError(f"{MISMATCH} {'; '.join(differences)}.")


def _fields(spec: Any, path: str = "", outer: tuple[None, ...] = ()) -> dict[str, str]:
    """Type and shape of every field of nested specs, by path."""
    if hasattr(spec, "dtype"):
        return {path: f"{np.dtype(getattr(spec.dtype, 'as_numpy_dtype', spec.dtype))} {(*outer, *spec.shape)}"}
    inner = (
        spec._asdict()
        if hasattr(spec, "_asdict")
        else spec
        if isinstance(spec, Mapping)
        else dict(enumerate(spec or ()))
    )
    return {
        name: found for key in inner for name, found in _fields(inner[key], f"{path}/{key}".lstrip("/"), outer).items()
    }
