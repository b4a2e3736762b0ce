"""The random numbers of a sampler, from a generator of numpy's or of torch's."""

from __future__ import annotations

from typing import Any

import numpy as np

from hilt.core.tree import Array
from hilt.replay.settings import as_generator


class NumpyStream:
    """Draws from a generator of numpy's."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def places(self, n: int, size: int) -> Array:
        """`n` numbers below `size`, with replacement: half the cost of `integers`,
        and as even to one part in 2**53 / size."""
        return (self.generator.random(n) * size).astype(np.int64)

    def state(self) -> object:
        return self.generator.bit_generator.state

    def load_state(self, state: Any) -> None:
        self.generator.bit_generator.state = state


class TorchStream:
    """Draws from a generator of torch's, the numbers of ``torch.randint``, whatever
    sizes of batches they are drawn in."""

    def __init__(self, generator: Any):
        self._generator = generator

    @property
    def generator(self) -> np.random.Generator:
        raise AssertionError("only uniform draws with replacement are made from a torch generator")

    def places(self, n: int, size: int) -> Array:
        from hilt.replay import tensors

        return tensors.randint(self._generator, size, n)

    def state(self) -> object:
        return self._generator.get_state().numpy().copy()

    def load_state(self, state: object) -> None:
        from hilt.replay import tensors

        self._generator.set_state(tensors.as_tensor(np.asarray(state, np.uint8), "a generator's state"))


RandomStream = NumpyStream | TorchStream


def as_stream(seed: object) -> RandomStream:
    """The stream of a seed, or of a generator that was made already; a stream is returned as it is."""
    if isinstance(seed, NumpyStream | TorchStream):
        return seed
    return TorchStream(seed) if hasattr(seed, "initial_seed") else NumpyStream(as_generator(seed))
