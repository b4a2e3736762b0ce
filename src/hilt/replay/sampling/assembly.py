"""From keys to batches: single steps, n-step returns, sequences, stacked frames, whole episodes.

What follows a step is known from the log: the next step of its trajectory whose observation *is* this step's next
observation. A gap, an end or the edge of what is recorded ends the chain, and nothing is ever read across it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import Array, ArraySpec, flatten
from hilt.replay.schema import FOLLOWS, PAIRS, Schema
from hilt.replay.settings import as_whole_number
from hilt.replay.snapshot import Snapshot, check_target

if TYPE_CHECKING:
    from hilt.replay.view import View


class Batch(dict[str, Any]):
    """A nested batch, and which steps it is made of."""

    steps: Array
    """The key of every element, ``[n]``: what `update_priorities` and `Log.read` take."""
    probabilities: Array
    """With which probability each was drawn, ``[n]``."""
    weights: Array
    """Importance weights, ``[n]``, 1 at most; all 1 unless sampling is prioritized."""
    counts: dict[str, int]
    """Of a `Mix` or a `JointSampler`: how many elements each source gave."""


class Assembly(Protocol):
    """Turns the keys that a sampler drew into columns."""

    added: ClassVar[tuple[str, ...]]
    """Names of columns that it adds to those of the log."""

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        """What a batch of `n` elements consists of."""

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        """The batch; what is in `out` was checked against `leaves`. Called inside `Log.reading`."""


@dataclass(frozen=True)
class Steps:
    """Every key is one step: columns ``[batch, ...]``."""

    added: ClassVar[tuple[str, ...]] = ()

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        return _leaves(schema, columns, n)

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        return steps.gather(keys, steps.schema.select(columns), out)


@dataclass(frozen=True)
class NStep:
    """Returns over up to `n` steps: for a step at time t that is followed by k - 1 others (k <= n),

        rewards = sum over i < k of discount^i * r[t+i],    discounts = discount^k, or 0 when step t+k-1 terminated,

    the columns of `also` are summed in the same way, and the next observation, `terminated` and `truncated` are those
    of step t+k-1. Termination and truncation end the
    sum; so do gaps and the end of what is recorded, where k is smaller and the bootstrap is still right. The columns
    ``discounts`` and ``n_steps`` (k) are added.
    """

    n: int
    discount: float
    reward: str = "rewards"
    also: tuple[str, ...] = ()
    """Further columns that are rewards, such as a penalty that is kept apart"""
    whole: tuple[str, ...] = ()
    """Columns, such as the actions, that are given of all n steps, ``[batch, n, ...]``; behind the last one of the sum,
    its own is repeated"""
    added: ClassVar[tuple[str, ...]] = ("discounts", "n_steps")

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.discount <= 1:
            raise ConfigError(
                f"n-step: expected n >= 1 and a discount in [0, 1], got n={self.n}, discount={self.discount}."
            )

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        own = {"discounts": ArraySpec(np.dtype(np.float32), (n,)), "n_steps": ArraySpec(np.dtype(np.int64), (n,))}
        deep = {path: spec for path, spec in _leaves(schema, columns, n, self.n).items() if path in self.whole}
        return {**_leaves(schema, columns, n), **deep, **own}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        summed = (self.reward, *self.also)
        for path in summed:
            if path not in steps.schema.layout.inline or steps.schema.columns[path].shape:
                got = steps.schema.columns[path]
                raise SchemaError(f"{path}: n-step returns need a column with one number per step, got {got}.")
        window, inside = chain(steps, keys, self.n)
        flat = window.reshape(-1)
        *rewards, terminated = (x.reshape(window.shape) for x in steps.fields(flat, [*summed, "terminated"]))
        taken = inside.sum(axis=1)  # k
        powers = self.discount ** np.arange(self.n)
        last = window[np.arange(len(keys)), taken - 1]
        ended = terminated[np.arange(len(keys)), taken - 1].astype(bool)
        paths = steps.schema.select(columns)
        from_last = [
            p for p in paths if p.split("/")[0] in PAIRS.values() or p in ("terminated", "truncated", "masks", "dones")
        ]
        batch = steps.gather(keys, [p for p in paths if p not in (*from_last, *summed, *self.whole)], out)
        batch.update(steps.gather(last, from_last, out))
        for path, values in steps.gather(flat, [p for p in paths if p in self.whole]).items():
            batch[path] = values.reshape(*window.shape, *values.shape[1:])
        for path, each in zip(summed, rewards, strict=True):
            if path in paths:
                batch[path] = (np.where(inside, each, 0) * powers).sum(axis=1).astype(steps.schema.columns[path].dtype)
        batch["discounts"] = np.where(ended, 0.0, self.discount**taken).astype(np.float32)
        batch["n_steps"] = taken.astype(np.int64)
        return batch


@dataclass(frozen=True)
class Sequences:
    """Every key begins a window of `length` steps: columns ``[batch, length, ...]``, and ``mask [batch, length]``.

    Where the chain ends earlier, the window is padded with zeros and the mask is False.
    """

    length: int
    added: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"sequences: expected a length of at least 1 step, got {self.length}.")

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        return {**_leaves(schema, columns, n, self.length), "mask": ArraySpec(np.dtype(bool), (n, self.length))}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        window, inside = chain(steps, keys, self.length)
        flat_out = {p: x.reshape(-1, *x.shape[2:]) for p, x in out.items()} if out is not None else None
        flat = steps.gather(window.reshape(-1), steps.schema.select(columns), flat_out)
        for values in flat.values():
            values[~inside.reshape(-1)] = 0
        given = out or {}
        batch = {
            p: given[p] if p in given else values.reshape(*window.shape, *values.shape[1:])
            for p, values in flat.items()
        }
        batch["mask"] = inside
        return batch


@dataclass(frozen=True)
class Chunks:
    """Every key is one step, with the actions from it on: ``actions`` is ``[batch, length, ...]``, every other column
    is the step's own, and ``mask [batch, length]`` is added.

    The mask is False from where the chain ends; with `within`, also from the first step on that is not in that view.
    There the last action is repeated.
    """

    length: int
    within: View | None = None
    added: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"chunks: expected a length of at least 1 action, got {self.length}.")

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        own = {path: spec for path, spec in _leaves(schema, columns, n, self.length).items() if path == "actions"}
        return {**_leaves(schema, columns, n), **own, "mask": ArraySpec(np.dtype(bool), (n, self.length))}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        window, inside = chain(steps, keys, self.length)
        if self.within is not None:
            belongs = self.within.runs().contains(window.reshape(-1)).reshape(window.shape)
            inside = np.logical_and.accumulate(inside & belongs, axis=1)
        paths = steps.schema.select(columns)
        batch = steps.gather(keys, [path for path in paths if path != "actions"], out)
        if "actions" in paths:
            actions = steps.gather(window.reshape(-1), ["actions"])["actions"]
            batch["actions"] = actions.reshape(*window.shape, *actions.shape[1:])
        batch["mask"] = inside
        return batch


@dataclass(frozen=True)
class Stacked:
    """Every observation column in `columns` gets its last `frames` values: ``[batch, frames, ...]``, oldest first.

    At the beginning of a chain its first observation is repeated.
    """

    frames: int
    columns: tuple[str, ...]
    added: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.frames < 1 or not self.columns:
            raise ConfigError(
                f"stacked frames: expected at least 1 frame and 1 column, got {self.frames} of {self.columns}."
            )

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        stacked = {*self.columns, *self._nexts(schema)}
        deep = _leaves(schema, columns, n, self.frames)
        return {p: deep[p] if p in stacked else spec for p, spec in _leaves(schema, columns, n).items()}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        paths = steps.schema.select(columns)
        nexts = self._nexts(steps.schema)
        batch = steps.gather(keys, [p for p in paths if p not in self.columns and p not in nexts], out)
        back = self._back(steps, keys)  # [batch, frames]
        for path in paths:
            if path in self.columns:
                batch[path] = self._stack(steps, back, path)
            elif path in nexts:  # the next stack is this one moved on by one: its newest frame is the next observation
                newest = steps.gather(keys, [path])[path]
                older = self._stack(steps, back, nexts[path])[:, 1:]
                batch[path] = np.concatenate([older, newest[:, None]], axis=1)
        return batch

    def _nexts(self, schema: Schema) -> dict[str, str]:
        """The next observations of the stacked columns, and whose they are."""
        mates = dict(schema.layout.pairs)
        for path in self.columns:
            if path not in mates:
                raise SchemaError(
                    f"{path}: only observations with a next observation can be stacked: "
                    f"{', '.join(mates) or 'none here'}."
                )
        return {mates[path]: path for path in self.columns}

    def _back(self, steps: Snapshot, keys: Array) -> Array:
        width = steps.widths(keys)
        back = np.repeat(keys[:, None], self.frames, axis=1)
        for i in range(self.frames - 2, -1, -1):
            later = back[:, i + 1]
            goes_on = steps.follows(later)
            earlier = np.where(goes_on, later - width, later)
            back[:, i] = np.where(steps.exist(earlier), earlier, later)
        return back

    def _stack(self, steps: Snapshot, back: Array, path: str) -> Array:
        flat = steps.gather(back.reshape(-1), [path])[path]
        return flat.reshape(*back.shape, *flat.shape[1:])


@dataclass(frozen=True)
class Episodes:
    """Every key stands for its whole trajectory: columns ``[batch, longest, ...]``, padded with zeros, and ``mask``."""

    added: ClassVar[tuple[str, ...]] = ("mask",)

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        raise ConfigError("out= cannot be used with whole episodes: their length is not known before they are drawn.")

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        whole = [steps.trajectory(int(key) >> 32) for key in keys]
        longest = max(len(k) for k in whole)
        inside = np.array([np.arange(longest) < len(k) for k in whole])
        window = np.array([np.r_[k, np.full(longest - len(k), k[-1])] for k in whole])
        flat = steps.gather(window.reshape(-1), steps.schema.select(columns))
        for values in flat.values():
            values[~inside.reshape(-1)] = 0
        batch = {path: values.reshape(*window.shape, *values.shape[1:]) for path, values in flat.items()}
        batch["mask"] = inside
        return batch


def chain(steps: Snapshot, keys: Array, length: int) -> tuple[Array, Array]:
    """The keys of the steps that follow, ``[n, length]``, and which of them belong
    to the chain; the rest repeat the last."""
    width = steps.widths(keys)
    window = np.repeat(keys[:, None], length, axis=1)
    inside = np.zeros(window.shape, bool)
    inside[:, 0] = True
    terminated, truncated = steps.fields(keys, ["terminated", "truncated"])
    goes_on = ~(terminated | truncated).astype(bool)
    for i in range(1, length):
        following = window[:, i - 1] + width
        goes_on &= steps.exist(following)
        safe = np.where(goes_on, following, window[:, i - 1])
        flags, terminated, truncated = steps.fields(safe, ["#flags", "terminated", "truncated"])
        goes_on &= (flags & FOLLOWS).astype(bool)
        window[:, i] = np.where(goes_on, following, window[:, i - 1])
        inside[:, i] = goes_on
        goes_on = goes_on & ~(terminated | truncated).astype(bool)
    return window, inside


def _leaves(schema: Schema, columns: Sequence[str] | None, *leading: int) -> dict[str, ArraySpec]:
    specs = {path: schema.columns[path] for path in schema.select(columns)}
    return {path: ArraySpec(spec.dtype, (*leading, *spec.shape)) for path, spec in specs.items()}


def check_out(leaves: Mapping[str, ArraySpec], out: Mapping[str, object]) -> None:
    """Whether a batch of these leaves can be put into these arrays."""
    for path, target in out.items():
        if path not in leaves:
            raise UnknownNameError("field of the batch for out=", path, leaves)
        check_target(path, leaves[path], target)


def put_into(out: Mapping[str, Array], batch: dict[str, Array]) -> dict[str, Array]:
    """The batch, in the arrays that were given; what was not gathered into them right away is copied."""
    for path, target in out.items():
        if batch[path] is not target:
            target[...] = batch[path]
            batch[path] = target
    return batch


def assembly_of(given: Assembly | None = None, **options: Any) -> Assembly:
    """The assembly that was given, or that a sampler's options ask for; more than one kind at once is refused."""
    made: list[Assembly] = [] if given is None else [given]
    if options.get("n_step") is not None:
        made.append(NStep(options["n_step"], 0.99 if options.get("discount") is None else options["discount"]))
    elif options.get("discount") is not None:
        raise ConfigError("discount= is only used with n_step=; give both.")
    if options.get("sequence_length") is not None:
        made.append(Sequences(options["sequence_length"]))
    if options.get("stack") is not None:
        frames, columns = options["stack"]
        made.append(Stacked(frames, (columns,) if isinstance(columns, str) else tuple(columns)))
    if options.get("episodes"):
        made.append(Episodes())
    if len(made) > 1:
        raise ConfigError(
            f"choose one of n_step, sequence_length, stack, episodes and assembly, got {len(made)} of them."
        )
    return made[0] if made else Steps()


# Several batches as one


def concat_batches(a: Mapping[str, object], b: Mapping[str, object], axis: int = 0) -> dict[str, object]:
    """Two nested batches, one behind the other. A key that only one of them has is an error that names it."""
    for where, batch in (("first", a), ("second", b)):
        if not isinstance(batch, Mapping):
            raise SchemaError(
                f"the {where} batch: expected a mapping, as sample() returns it, got {type(batch).__name__}."
            )
    return joined([a, b], as_whole_number("axis", axis, "the axis of the batch, nearly always 0"))


def joined(batches: Sequence[Mapping[str, Any]], axis: int, within: str = "") -> dict[str, Any]:
    """Nested batches of the same keys, one behind the other. `within` is the path of the subtree that they are."""
    first, made = batches[0], {}
    if any(other.keys() != first.keys() for other in batches):
        raise _different([flatten(batch, within) for batch in batches])
    for name in first:
        path, leaves = f"{within}/{name}" if within else name, [batch[name] for batch in batches]
        trees = sum(type(each) is not np.ndarray and isinstance(each, Mapping) for each in leaves)
        if 0 < trees < len(leaves):
            raise _different([flatten(batch, within) for batch in batches])
        made[name] = joined(leaves, axis, path) if trees else _concat(path, leaves, axis)
    return made


def _different(flat: Sequence[Mapping[str, Any]]) -> SchemaError:
    """The error of batches whose leaves have different paths."""
    number, other = next((number, other) for number, other in enumerate(flat[1:], 2) if other.keys() != flat[0].keys())
    path = min(flat[0].keys() ^ other.keys())
    where = "first" if path in flat[0] else "second" if number == 2 else f"{number}th"
    return SchemaError(f"{path}: only the {where} batch has this field; sample both with the same keys.")


def _concat(path: str, leaves: Sequence[Any], axis: int) -> Any:
    if any(type(leaf) is not np.ndarray and hasattr(leaf, "numpy") for leaf in leaves):
        from hilt.replay import tensors as bridge

        return bridge.concatenate(leaves, axis)
    try:
        return np.concatenate(leaves, axis=axis)
    except ValueError:
        shapes = " and ".join(str(np.shape(leaf)) for leaf in leaves)
        raise SchemaError(f"{path}: batches of shapes {shapes} cannot be joined along axis {axis}.") from None


def scattered(parts: Sequence[tuple[Array, Mapping[str, Array]]], n: int) -> dict[str, Array]:
    """The columns of a batch of `n` elements, of which each part has some rows."""
    if len(parts) == 1:
        return dict(parts[0][1])
    out: dict[str, Array] = {}
    for rows, columns in parts:
        for path, column in columns.items():
            if path not in out:
                out[path] = np.empty((n, *column.shape[1:]), column.dtype)
            out[path][rows] = column
    return out
