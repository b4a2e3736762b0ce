"""Batches from several views as if they were one.

    demo = JointSampler({"demonstrations": demos.all(), "human": log.by_source("human")}, seed=1)
    batch = Mix({"online": log.all().sampler(seed=0), "demo": demo}).sample(256)

Views of one log are joined by ``|``; these may be of several logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, EmptyError
from hilt.core.tree import Array, unflatten
from hilt.replay.sampling.randomness import as_stream
from hilt.replay.sampling.sampler import Batch, Drawn, Sampler, require_size
from hilt.replay.view import View

if TYPE_CHECKING:
    from hilt.replay.sampling.prefetch import Prefetch


class JointSampler:
    """Draws steps of several views uniformly, with replacement: every step of any of them is as likely as any other.

    A source is a view, or a uniform sampler that says what an element of the batch is (``n_step=``, ``assembly=`` and so on); its own
    generator is not used. `seed` is that of a `Sampler`. Elements are in the order in which they were drawn.
    """

    def __init__(self, sources: Mapping[str, Sampler | View], seed: Any = None):
        if not sources:
            raise ConfigError("a joint sampler needs at least one source.")
        self.sources = {name: source if isinstance(source, Sampler) else source.sampler() for name, source in sources.items()}
        if odd := [name for name, source in self.sources.items() if source.position() is None]:
            expected = "a uniform sampler, with replacement and without a limiter"
            raise ConfigError(f"the source {odd[0]!r} of a joint sampler: expected {expected}.")
        self._stream = as_stream(seed)

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """A batch. Its attribute ``counts`` says how many elements each source gave, and ``steps`` are keys in the log of each. `timeout`
        is there for a `Mix`: nothing holds this sampler back."""
        require_size(batch_size)
        with ExitStack() as readings:
            drawn, size = self._draw(batch_size, readings)
            parts = [(rows, self.sources[name].assembly.batch(each.reading, each.keys, keys, None)) for name, (rows, each) in drawn.items()]
        batch = Batch(unflatten(_scattered(parts, batch_size)))
        batch.steps = _scattered([(rows, {"": each.keys}) for rows, each in drawn.values()], batch_size)[""]
        batch.probabilities, batch.weights = np.full(batch_size, 1 / size), np.ones(batch_size)
        batch.counts = {name: len(drawn[name][0]) if name in drawn else 0 for name in self.sources}
        return batch

    def batches(self, batch_size: int, *, prefetch: int = 2, device: Any = None, **options: Any) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
        from hilt.replay.sampling.prefetch import Prefetch

        return Prefetch(lambda: self.sample(batch_size, **options), prefetch, device, self)

    def position(self) -> Any:
        """See `Sampler.position`."""
        return self._stream.state()

    def seek(self, position: Any) -> None:
        self._stream.load_state(position)

    def state(self, position: Any = None) -> dict[str, Any]:
        """All that decides the next batches, as arrays and plain values; with `position`, as it was there."""
        return {"kind": {"how": "joint", "sources": list(self.sources)}, "rng": self.position() if position is None else position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = self.state()["kind"]
        if state["kind"] != own:
            raise ConfigError(f"this state is of a sampler with {state['kind']}, and this one has {own}; make the same kind.")
        self._stream.load_state(state["rng"])

    def stats(self) -> dict[str, Any]:
        return {name: sampler.stats() for name, sampler in self.sources.items()}

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return sum(len(sampler) for sampler in self.sources.values())

    def _draw(self, n: int, readings: ExitStack) -> tuple[dict[str, tuple[Array, Drawn]], int]:
        """What was drawn from each source that gave any, with the rows of the batch that it makes; and how many steps there were."""
        with ExitStack() as locks:  # all sources are drawn from at one moment
            for sampler in self.sources.values():
                locks.enter_context(sampler.view.log.lock)
            ends = np.cumsum([len(sampler.view) for sampler in self.sources.values()])
            if not (size := int(ends[-1])):
                raise EmptyError(f"the sources {', '.join(self.sources)} of this joint sampler hold no step yet; fill one first.")
            places = self._stream.places(n, size)
            of, drawn = ends.searchsorted(places, "right"), {}
            for number, (name, sampler) in enumerate(self.sources.items()):
                if len(rows := np.flatnonzero(of == number)):
                    before = int(ends[number - 1]) if number else 0
                    drawn[name] = rows, sampler.draw(len(rows), places[rows] - before)
                    readings.enter_context(drawn[name][1].reading)
        return drawn, size


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
