"""A sequence that is read while it is iterated, with the methods that users of
``tf.data`` know; and the same as a ``tf.data.Dataset``.

    for batch in convert_rlds_to_trajectories(episodes).shuffle(1000, seed=0).batch(32):
        ...

TensorFlow is needed by `as_tensorflow` alone.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from hilt.core.errors import ConfigError, MissingPackageError, SchemaError

T = TypeVar("T")


class LazyDataset(Generic[T]):
    """Elements that are made while they are asked for. It can be iterated again if what it reads can.

    Each method returns another dataset and reads nothing yet.
    """

    def __init__(self, read: Callable[[], Iterable[T]]):
        self._read = read

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())

    def as_numpy_iterator(self) -> Iterator[T]:
        """The same as ``iter``: elements are arrays already."""
        return iter(self)

    def map(self, function: Callable[..., Any]) -> LazyDataset[Any]:
        """``function(element)`` of each element; of one that is a plain tuple,
        ``function(*element)``, as ``tf.data`` calls it."""
        if not callable(function):
            raise ConfigError(f"map: expected a function of an element, got {function!r}.")
        return LazyDataset(lambda: (_called(function, each) for each in self))

    def take(self, count: int) -> LazyDataset[T]:
        """The first `count` elements; -1 is all of them."""
        count = _number("take: count", count, -1)
        return self if count == -1 else LazyDataset(lambda: itertools.islice(self, count))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> LazyDataset[T]:
        """Elements of the same structure with arrays ``[batch_size, ...]``. The
        last one may have fewer, or is left out."""
        batch_size = _number("batch: batch_size", batch_size, 1)
        return LazyDataset(lambda: self._batches(batch_size, drop_remainder))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> LazyDataset[T]:
        """Draws each element from the next `buffer_size` ones. With a `seed` the order is always the same, iteration by
        iteration; without `reshuffle_each_iteration` each iteration has the order of the first."""
        buffer_size = _number("shuffle: buffer_size", buffer_size, 1)
        chosen = np.random.SeedSequence().entropy if seed is None else _number("shuffle: seed", seed, 0)
        iterations = itertools.count()
        return LazyDataset(
            lambda: self._shuffled(buffer_size, [chosen, next(iterations) if reshuffle_each_iteration else 0])
        )

    def _batches(self, batch_size: int, drop_remainder: bool) -> Iterator[T]:
        elements = iter(self)
        while part := list(itertools.islice(elements, batch_size)):
            if len(part) == batch_size or not drop_remainder:
                yield _stacked(part, "")

    def _shuffled(self, buffer_size: int, seed: Any) -> Iterator[T]:
        rng, held = np.random.default_rng(seed), list[T]()
        for element in self:
            held.append(element)
            if len(held) == buffer_size:
                yield _drawn(held, rng)
        while held:
            yield _drawn(held, rng)


def as_tensorflow(dataset: LazyDataset[Any], spec: Any) -> Any:
    """The same elements as a ``tf.data.Dataset`` of this structure; `spec` has
    `dtype`, `shape` and `name` for each leaf."""
    tensorflow = import_tensorflow()

    def signature(each: Any) -> Any:
        if not hasattr(each, "dtype"):
            return _nested(each, [signature(inner) for inner in _children(each)])
        kind = np.dtype(getattr(each.dtype, "as_numpy_dtype", each.dtype))
        return tensorflow.TensorSpec(tuple(each.shape), tensorflow.string if kind.hasobject else kind, each.name)

    return tensorflow.data.Dataset.from_generator(lambda: iter(dataset), output_signature=signature(spec))


def import_tensorflow() -> ModuleType:
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        broken = "" if isinstance(error, ModuleNotFoundError) and error.name == "tensorflow" else str(error)
        cure = (
            "pip install tensorflow. Without it leave as_tf_dataset out: what is returned then has map, "
            "take, batch and shuffle, too"
        )
        raise MissingPackageError("tensorflow", "as_tf_dataset=True", "", broken, cure) from error


def _called(function: Callable[..., Any], element: Any) -> Any:
    return function(*element) if type(element) is tuple else function(element)


def _drawn(held: list[T], rng: np.random.Generator) -> T:
    place = int(rng.integers(len(held)))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()


def _stacked(elements: list[Any], path: str) -> Any:
    first = elements[0]
    if isinstance(first, Mapping | tuple | list):
        names = list(first) if isinstance(first, Mapping) else getattr(first, "_fields", range(len(first)))
        columns = zip(*(_children(each) for each in elements), strict=True)
        return _nested(
            first,
            [_stacked(list(each), f"{path}/{name}".lstrip("/")) for name, each in zip(names, columns, strict=True)],
        )
    try:
        return np.stack([np.asarray(each) for each in elements])
    except ValueError:
        shapes = sorted({str(np.shape(each)) for each in elements})
        where = path or "an element"
        raise SchemaError(
            f"{where}: expected one shape in a batch, got {', '.join(shapes)}; make them equal with map()."
        ) from None


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, Mapping) else list(node)


def _nested(like: Any, children: list[Any]) -> Any:
    """The children in a mapping, named tuple or tuple like this one."""
    if isinstance(like, Mapping):
        return dict(zip(like, children, strict=True))
    return type(like)(*children) if hasattr(like, "_fields") else tuple(children)


def _number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name}: expected a whole number from {least} on, got {value!r}.")
    return int(value)
