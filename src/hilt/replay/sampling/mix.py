"""Batches from several views at once, with exact shares.

mix = Mix({"online": online.sampler(), "demo": demos.sampler()})   # half and half
batch = mix.sample(256)                                            # 128 of each, online first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError
from hilt.core.tree import flatten, unflatten
from hilt.replay.sampling.joint import JointSampler
from hilt.replay.sampling.sampler import Batch, Sampler, require_size
from hilt.replay.settings import as_whole_number
from hilt.replay.view import View

if TYPE_CHECKING:
    from hilt.replay.sampling.prefetch import Prefetch


class Mix:
    """Draws every batch from several samplers, joint samplers, or views, each sampled uniformly, in fixed shares.

    The counts are exact: they add up to the batch size and differ from `ratios` by rounding only (largest remainder,
    the first of equals). `empty` says what happens when a source has no step: ``"error"``, or ``"share"``: the others
    take its part.
    """

    def __init__(
        self, sources: Mapping[str, Sampler | JointSampler | View], ratios: Mapping[str, float] | None = None, empty: str = "error"
    ):
        if not sources:
            raise ConfigError("a mix needs at least one source.")
        ratios = dict(ratios) if ratios is not None else dict.fromkeys(sources, 1.0)
        if set(ratios) != set(sources):
            raise ConfigError(f"ratios are for {', '.join(ratios)}, sources are {', '.join(sources)}; name the same ones.")
        if any(not np.isfinite(r) or r < 0 for r in ratios.values()) or not sum(ratios.values()):
            raise ConfigError(f"ratios: expected numbers of 0 or more, not all 0, got {ratios}.")
        if empty not in ("error", "share"):
            raise ConfigError(f"empty={empty!r}: expected 'error' or 'share'.")
        self.sources = {name: source.sampler() if isinstance(source, View) else source for name, source in sources.items()}
        self.ratios, self._empty = {name: ratios[name] for name in sources}, empty
        self._shares: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}

    def counts(self, batch_size: int) -> dict[str, int]:
        """How many elements of a batch come from each source now."""
        wanted = [name for name, ratio in self.ratios.items() if ratio]
        there = tuple(name for name in wanted if len(self.sources[name]))
        missing = [name for name in wanted if name not in there]
        if missing and (self._empty == "error" or not there):
            raise EmptyError(f"the source {missing[0]!r} of this mix holds no step; fill it first, or make the mix with empty='share'.")
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

    def batches(self, batch_size: int, *, prefetch: int = 2, device: Any = None, **options: Any) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
        from hilt.replay.sampling.prefetch import Prefetch

        return Prefetch(lambda: self.sample(batch_size, **options), prefetch, device, self)

    def position(self) -> Any:
        """Of all sources, or None if one has none; see `Sampler.position`."""
        positions = {name: source.position() for name, source in self.sources.items()}
        return None if any(position is None for position in positions.values()) else positions

    def seek(self, position: Any) -> None:
        for name, source in self.sources.items():
            source.seek(position[name])

    def state(self, position: Any = None) -> dict[str, Any]:
        return {name: source.state(position and position[name]) for name, source in self.sources.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.sources):
            raise ConfigError(f"this state is of the sources {', '.join(state)}, this mix has {', '.join(self.sources)}.")
        for name, sampler in self.sources.items():
            sampler.load_state(state[name])

    def stats(self) -> dict[str, Any]:
        return {name: sampler.stats() for name, sampler in self.sources.items()}


def concat_batches(a: Mapping[str, Any], b: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """Two nested batches, one behind the other. A key that only one of them has is an error that names it."""
    for where, batch in (("first", a), ("second", b)):
        if not isinstance(batch, Mapping):
            raise SchemaError(f"the {where} batch: expected a mapping, as sample() returns it, got {type(batch).__name__}.")
    return _joined([a, b], as_whole_number("axis", axis, "the axis of the batch, nearly always 0"))


def _joined(batches: Sequence[Mapping[str, Any]], axis: int) -> dict[str, Any]:
    flat = [flatten(batch) for batch in batches]
    for number, other in enumerate(flat[1:], 2):
        if odd := set(flat[0]) ^ set(other):
            path = sorted(odd)[0]
            where = "first" if path in flat[0] else "second" if number == 2 else f"{number}th"
            raise SchemaError(f"{path}: only the {where} batch has this field; sample both with the same keys.")
    return unflatten({path: _concat(path, [other[path] for other in flat], axis) for path in flat[0]})


def _concat(path: str, leaves: Sequence[Any], axis: int) -> Any:
    if any(hasattr(leaf, "numpy") for leaf in leaves):
        from hilt.replay import tensors as bridge

        return bridge.concatenate(leaves, axis)
    try:
        return np.concatenate(leaves, axis=axis)
    except ValueError:
        shapes = " and ".join(str(np.shape(leaf)) for leaf in leaves)
        raise SchemaError(f"{path}: batches of shapes {shapes} cannot be joined along axis {axis}.") from None
