"""Batches from several views at once: with exact shares, or as from one view.

Example:

    # each step as likely as any other
    demo = JointSampler({"demonstrations": demos.all(), "human": log.by_source("human")}, seed=1)
    mix = Mix({"online": log.all().sampler(seed=0), "demo": demo})                                  # half and half
    # 128 of each, online first
    batch = mix.sample(256)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError
from hilt.core.tree import Array, flatten, unflatten
from hilt.replay.sampling.assembly import Batch
from hilt.replay.sampling.randomness import as_stream
from hilt.replay.sampling.sampler import Drawn, Sampler, require_size
from hilt.replay.settings import as_whole_number
from hilt.replay.view import View

if TYPE_CHECKING:
    from hilt.replay.sampling.prefetch import Prefetch
    from hilt.replay.tensors import Device


class JointSampler:
    """Draws steps of several views uniformly, with replacement: every step of any of them is as likely as any other.

    A source is a view, or a uniform sampler that says what an element of the batch is (``n_step=``, ``assembly=`` and
    so on); its own generator is not used. `seed` is that of a `Sampler`. Elements are in the order in which they were
    drawn. Views of one log can be joined by ``|`` too; these may be of several logs.
    """

    def __init__(self, sources: Mapping[str, Sampler | View], seed: Any = None):
        if not sources:
            raise ConfigError("a joint sampler needs at least one source.")
        self.sources = {
            name: source if isinstance(source, Sampler) else source.sampler() for name, source in sources.items()
        }
        if odd := [name for name, source in self.sources.items() if source.position() is None]:
            expected = "a uniform sampler, with replacement and without a limiter"
            raise ConfigError(f"the source {odd[0]!r} of a joint sampler: expected {expected}.")
        self._stream = as_stream(seed)

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """A batch. Its attribute ``counts`` says how many elements each source gave, and ``steps`` are keys in the log
        of each. `timeout` is there for a `Mix`: nothing holds this sampler back."""
        require_size(batch_size)
        with ExitStack() as readings:
            drawn, size = self._draw(batch_size, readings)
            parts = [
                (rows, self.sources[name].assembly.batch(each.reading, each.keys, keys, None))
                for name, (rows, each) in drawn.items()
            ]
        batch = Batch(unflatten(_scattered(parts, batch_size)))
        batch.steps = _scattered([(rows, {"": each.keys}) for rows, each in drawn.values()], batch_size)[""]
        batch.probabilities, batch.weights = np.full(batch_size, 1 / size), np.ones(batch_size)
        batch.counts = {name: len(drawn[name][0]) if name in drawn else 0 for name in self.sources}
        return batch

    def batches(
        self, batch_size: int, *, prefetch: int = 2, device: Device | str | None = None, **options: Any
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
        from hilt.replay.sampling.prefetch import Prefetch

        return Prefetch(lambda: self.sample(batch_size, **options), prefetch, device, self)

    def position(self) -> object:
        """See `Sampler.position`."""
        return self._stream.state()

    def seek(self, position: object) -> None:
        self._stream.load_state(position)

    def state(self, position: object = None) -> dict[str, object]:
        """All that decides the next batches, as arrays and plain values; with `position`, as it was there."""
        return {
            "kind": {"how": "joint", "sources": list(self.sources)},
            "rng": self.position() if position is None else position,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = self.state()["kind"]
        if state["kind"] != own:
            raise ConfigError(
                f"this state is of a sampler with {state['kind']}, and this one has {own}; make the same kind."
            )
        self._stream.load_state(state["rng"])

    def stats(self) -> dict[str, object]:
        return {name: sampler.stats() for name, sampler in self.sources.items()}

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return sum(len(sampler) for sampler in self.sources.values())

    def _draw(self, n: int, readings: ExitStack) -> tuple[dict[str, tuple[Array, Drawn]], int]:
        """What was drawn from each source that gave any, with the rows of the batch that it
        makes; and how many steps there were."""
        with ExitStack() as locks:  # all sources are drawn from at one moment
            for sampler in self.sources.values():
                locks.enter_context(sampler.view.log.lock)
            ends = np.cumsum([len(sampler.view) for sampler in self.sources.values()])
            if not (size := int(ends[-1])):
                raise EmptyError(
                    f"the sources {', '.join(self.sources)} of this joint sampler hold no step yet; fill one first."
                )
            places = self._stream.places(n, size)
            of, drawn = ends.searchsorted(places, "right"), {}
            for number, (name, sampler) in enumerate(self.sources.items()):
                if len(rows := np.flatnonzero(of == number)):
                    before = int(ends[number - 1]) if number else 0
                    drawn[name] = rows, sampler.draw(len(rows), places[rows] - before)
                    readings.enter_context(drawn[name][1].reading)
        return drawn, size


class Mix:
    """Draws every batch from several samplers, joint samplers, or views, each sampled uniformly, in fixed shares.

    The counts are exact: they add up to the batch size and differ from `ratios` by rounding only (largest remainder,
    the first of equals). `empty` says what happens when a source has no step: ``"error"``, or ``"share"``: the others
    take its part.
    """

    def __init__(
        self,
        sources: Mapping[str, Sampler | JointSampler | View],
        ratios: Mapping[str, float] | None = None,
        empty: str = "error",
    ):
        if not sources:
            raise ConfigError("a mix needs at least one source.")
        ratios = dict(ratios) if ratios is not None else dict.fromkeys(sources, 1.0)
        if set(ratios) != set(sources):
            raise ConfigError(
                f"ratios are for {', '.join(ratios)}, sources are {', '.join(sources)}; name the same ones."
            )
        if any(not np.isfinite(r) or r < 0 for r in ratios.values()) or not sum(ratios.values()):
            raise ConfigError(f"ratios: expected numbers of 0 or more, not all 0, got {ratios}.")
        if empty not in ("error", "share"):
            raise ConfigError(f"empty={empty!r}: expected 'error' or 'share'.")
        self.sources = {
            name: source.sampler() if isinstance(source, View) else source for name, source in sources.items()
        }
        self.ratios, self._empty = {name: ratios[name] for name in sources}, empty
        self._shares: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}

    def counts(self, batch_size: int) -> dict[str, int]:
        """How many elements of a batch come from each source now."""
        wanted = [name for name, ratio in self.ratios.items() if ratio]
        there = tuple(name for name in wanted if len(self.sources[name]))
        missing = [name for name in wanted if name not in there]
        if missing and (self._empty == "error" or not there):
            raise EmptyError(
                f"the source {missing[0]!r} of this mix holds no step; fill it first, or make "
                "the mix with empty='share'."
            )
        if (batch_size, there) not in self._shares:
            self._shares[batch_size, there] = self._share(batch_size, there)
        return dict(self._shares[batch_size, there])

    def _share(self, batch_size: int, names: Sequence[str]) -> dict[str, int]:
        total = sum(Fraction(self.ratios[name]) for name in names)
        exact = {name: batch_size * Fraction(self.ratios[name]) / total for name in names}
        counts = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_remainder[: batch_size - sum(counts.values())]:
            counts[name] += 1
        return {name: counts.get(name, 0) for name in self.sources}

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """A batch, source after source. Its attribute ``counts`` says how many came from each."""
        require_size(batch_size)
        counts = self.counts(batch_size)
        try:
            parts = [self.sources[name].sample(n, keys=keys, timeout=timeout) for name, n in counts.items() if n]
        except EmptyError:
            if self._empty == "error" or self.counts(batch_size) == counts:
                raise
            return self.sample(batch_size, keys, timeout)  # the last step of a source was evicted since it was counted
        merged = Batch(_joined(parts, axis=0) if len(parts) > 1 else parts[0])
        for name in ("steps", "probabilities", "weights"):
            setattr(merged, name, np.concatenate([getattr(part, name) for part in parts]))
        merged.counts = counts
        return merged

    def batches(
        self, batch_size: int, *, prefetch: int = 2, device: Device | str | None = None, **options: Any
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
        from hilt.replay.sampling.prefetch import Prefetch

        return Prefetch(lambda: self.sample(batch_size, **options), prefetch, device, self)

    def position(self) -> dict[str, object] | None:
        """Returns the positions of all sources, or None if one has none; see `Sampler.position`."""
        known = {name: at for name, source in self.sources.items() if (at := source.position()) is not None}
        return known if len(known) == len(self.sources) else None

    def seek(self, position: Mapping[str, Any]) -> None:
        for name, source in self.sources.items():
            source.seek(position[name])

    def state(self, position: Mapping[str, Any] | None = None) -> dict[str, object]:
        return {
            name: source.state(None if position is None else position[name]) for name, source in self.sources.items()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.sources):
            raise ConfigError(
                f"this state is of the sources {', '.join(state)}, this mix has {', '.join(self.sources)}."
            )
        for name, sampler in self.sources.items():
            sampler.load_state(state[name])

    def stats(self) -> dict[str, object]:
        return {name: sampler.stats() for name, sampler in self.sources.items()}


def concat_batches(a: Mapping[str, object], b: Mapping[str, object], axis: int = 0) -> dict[str, object]:
    """Two nested batches, one behind the other. A key that only one of them has is an error that names it."""
    for where, batch in (("first", a), ("second", b)):
        if not isinstance(batch, Mapping):
            raise SchemaError(
                f"the {where} batch: expected a mapping, as sample() returns it, got {type(batch).__name__}."
            )
    return _joined([a, b], as_whole_number("axis", axis, "the axis of the batch, nearly always 0"))


def _joined(batches: Sequence[Mapping[str, Any]], axis: int, within: str = "") -> dict[str, Any]:
    first, joined = batches[0], {}
    if any(other.keys() != first.keys() for other in batches):
        raise _different([flatten(batch, within) for batch in batches])
    for name in first:
        path, leaves = f"{within}/{name}" if within else name, [batch[name] for batch in batches]
        trees = sum(type(each) is not np.ndarray and isinstance(each, Mapping) for each in leaves)
        if 0 < trees < len(leaves):
            raise _different([flatten(batch, within) for batch in batches])
        joined[name] = _joined(leaves, axis, path) if trees else _concat(path, leaves, axis)
    return joined


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


def _scattered(parts: Sequence[tuple[Array, Mapping[str, Array]]], n: int) -> dict[str, Array]:
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
