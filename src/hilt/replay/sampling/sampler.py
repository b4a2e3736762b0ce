"""Samplers: batches from one view, and from several at once, with exact shares or as from one view.

    sampler = log.all().sampler("prioritized", exponent=0.6, beta=0.4, seed=0)
    batch = sampler.sample(256, keys=["observations", "actions", "rewards"])
    sampler.update_priorities(batch.steps, td_error)

    # each step as likely as any other
    demo = JointSampler({"demonstrations": demos.all(), "human": log.by_source("human")}, seed=1)
    mix = Mix({"online": log.all().sampler(seed=0), "demo": demo})
    batch = mix.sample(256)  # 128 of each, online first

A sampler owns its generator; `state` and `load_state` make it go on exactly where it was, also in another process. The
state of one whose batches are made ahead (`batches`) is that after the last batch that was delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError
from hilt.core.tree import Array, Tree, flatten, unflatten
from hilt.replay.key_ranges import OFFSET_BITS, Runs, as_runs
from hilt.replay.sampling.assembly import (
    Assembly,
    Batch,
    Episodes,
    assembly_of,
    check_out,
    joined,
    put_into,
    scattered,
)
from hilt.replay.sampling.limiters import RateLimiter
from hilt.replay.sampling.prefetch import Prefetch
from hilt.replay.sampling.randomness import TorchStream, as_stream
from hilt.replay.sampling.selector_draw import SelectorDraw, check_draw, check_priorities
from hilt.replay.sampling.selectors import Prioritized, importance_weights
from hilt.replay.sampling.uniform import UniformDraw

if TYPE_CHECKING:
    from hilt.replay.snapshot import Snapshot
    from hilt.replay.tensors import Device
    from hilt.replay.view import View

_NOTHING = nullcontext()
Position: TypeAlias = tuple[object, dict[str, int]]
"""The state of a sampler's generator, and its counts."""
_NOT_SELECTED = {"times": np.zeros((0, 2), np.int64), "top_priority": 1.0, "selector": None}
"""What the state of a sampler without a selector has in the place of the selector's."""


class Drawn(NamedTuple):
    """Steps that were drawn, and the moment of the log that they are read from."""

    keys: Array
    probabilities: Array
    size: int
    """Steps that there were to draw from"""
    reading: Snapshot


class Sampler:
    """Draws batches from a view.

    how
        ``uniform`` (with replacement, or ``replace=False``: every step once per pass, in a new order each pass),
        ``prioritized`` (probability proportional to priority ** exponent; importance weights with `beta`), ``fifo``,
        ``lifo``, ``min_heap``, ``max_heap`` (by priority).
    seed
        A whole number, None for a different stream each time, or a generator, numpy's or torch's, that
        several samplers may share. From a torch generator the draws are those of ``torch.randint``, as
        RLinf's buffers have them: uniformly, with replacement.
    max_times_sampled
        A step that was drawn so often is not drawn again; 0 for no limit.
    n_step, discount / sequence_length / stack / episodes
        What an element of the batch is; see `hilt.replay.sampling.assembly`. ``stack=(frames, columns)``.
    assembly
        The same as an object: one of that module's with options of its own, or any other that follows its protocol.
    limiter
        A rate limiter that this sampler and the log's writers obey.
    """

    def __init__(
        self,
        view: View,
        how: str = "uniform",
        *,
        seed: Any = None,
        replace: bool = True,
        exponent: float | None = None,
        beta: float | None = None,
        max_times_sampled: int = 0,
        limiter: RateLimiter | None = None,
        n_step: int | None = None,
        discount: float | None = None,
        sequence_length: int | None = None,
        stack: tuple[int, Sequence[str]] | None = None,
        episodes: bool = False,
        assembly: Assembly | None = None,
    ):
        check_draw(how, replace, max_times_sampled, episodes)
        check_priorities(how, exponent, beta)
        self.view, self.how = view, how
        self.beta = 0.4 if beta is None else beta
        """How far importance weights correct for the priorities; may be raised while training."""
        element: dict[str, Any] = {
            "n_step": n_step,
            "discount": discount,
            "sequence_length": sequence_length,
            "stack": stack,
        }
        self.assembly: Assembly = assembly_of(assembly, **element, episodes=episodes)
        for name in self.assembly.added:
            if name in view.log.schema.columns:
                raise SchemaError(
                    f"{name}: this sampler adds a column of this name, and the log has one already. Rename that one."
                )
        self._stream = as_stream(seed)
        if isinstance(self._stream, TorchStream) and (how != "uniform" or not replace or max_times_sampled or episodes):
            raise ConfigError(
                "seed: a torch generator draws steps uniformly, with replacement and without a "
                "limit; give a whole number."
            )
        self._replace, self._max_times = replace, max_times_sampled
        self._selected = (
            SelectorDraw(view, how, exponent, max_times_sampled, limiter is not None)
            if how != "uniform" or max_times_sampled
            else None
        )
        self._drawing = UniformDraw()
        self._pass: Array = np.zeros(0, np.int64)  # the steps that are left of a pass without replacement
        self._pass_version = -1
        self._counts = {"sampled": 0, "batches": 0, "stale_priorities": 0}
        self.limiter = limiter
        if limiter is not None:
            self._attach(limiter)

    def sample(
        self,
        batch_size: int,
        keys: Sequence[str] | None = None,
        out: Tree | None = None,
        timeout: float | None = None,
    ) -> Batch:
        """A batch. `keys` names the columns wanted, so that images are not read
        when they are not; `out` takes the arrays.

        `timeout` is how long a rate limiter may hold it back, in seconds.
        """
        schema, made = self.view.log.schema, self.assembly
        if out is None:
            if keys is not None:
                schema.select(keys)  # what is wrong with them is said before anything is drawn
            return self.sample_with(batch_size, lambda steps, drawn: made.batch(steps, drawn, keys, None), timeout)
        arrays = flatten(out)
        check_out(made.leaves(schema, keys, batch_size), arrays)
        return self.sample_with(
            batch_size, lambda steps, drawn: put_into(arrays, made.batch(steps, drawn, keys, arrays)), timeout
        )

    def sample_with(
        self, batch_size: int, read: Callable[[Snapshot, Array], dict[str, Array]], timeout: float | None = None
    ) -> Batch:
        """Does what `sample` does, with another way to read the steps that were drawn."""
        require_size(batch_size)
        allowed = self.limiter.sampling(batch_size, timeout) if self.limiter is not None else _NOTHING
        with allowed, self.view.log.lock:
            drawn = self.draw(batch_size)
        with drawn.reading as steps:
            batch = Batch(unflatten(read(steps, drawn.keys)))
        batch.steps, batch.probabilities = drawn.keys, drawn.probabilities
        prioritized = self.how == "prioritized"
        batch.weights = (
            importance_weights(drawn.probabilities, drawn.size, self.beta)
            if prioritized
            else _filled(len(drawn.keys), 1.0)
        )
        return batch

    def draw(self, batch_size: int, places: Array | None = None) -> Drawn:
        """Draws steps, to be read from the same moment of the log; called under its lock.
        `places` are used instead of random ones."""
        log = self.view.log
        log.look_for_edits()
        reading = log.reading()
        try:
            drawn = Drawn(*self._draw(batch_size, reading, places), reading)
        except BaseException:
            reading.__exit__()
            raise
        log.counts["sampled"] += len(drawn.keys)
        self._counts["sampled"] += len(drawn.keys)
        self._counts["batches"] += 1
        return drawn

    def update_priorities(self, steps: Array, priorities: Array) -> int:
        """New priorities of steps by key; those that were evicted meanwhile are
        passed over. Returns how many were there."""
        if self._selected is None or self.how in ("fifo", "lifo", "uniform"):
            raise ConfigError(f"a {self.how} sampler has no priorities; use 'prioritized', 'min_heap' or 'max_heap'.")
        steps, priorities = np.asarray(steps, np.int64), np.asarray(priorities, np.float64)
        if steps.shape != priorities.shape or steps.ndim != 1:
            raise ConfigError(
                f"expected one priority per step, got {steps.shape} steps and {priorities.shape} priorities."
            )
        with self.view.log.lock:
            there = self._selected.update(steps, priorities)
            self._counts["stale_priorities"] += len(steps) - there
            return there

    def batches(
        self,
        batch_size: int,
        *,
        prefetch: int = 2,
        device: Device | str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread; with `device`, as torch tensors there. Meanwhile the sampler is the
        thread's, and its state is to be asked of what this returns."""
        return Prefetch(lambda: self.sample(batch_size, timeout=timeout, **options), prefetch, device, self)

    def position(self) -> Position | None:
        """Where a sampler stands whose draws depend on its generator alone: uniform, with
        replacement, without a limiter; else None."""
        return (
            (self._stream.state(), dict(self._counts))
            if self._selected is None and self._replace and self.limiter is None
            else None
        )

    def seek(self, position: Position) -> None:
        """Goes on as it would have from this position."""
        state, counts = position
        self._stream.load_state(state)
        self._counts = dict(counts)

    def state(self, position: Position | None = None) -> dict[str, object]:
        """All that decides the next batches, as arrays and plain values; with `position`, as it was there."""
        with self.view.log.lock:
            if self._selected is not None:
                self._selected.follow_view()
            runs = self.view.runs()
            stream, counts = (self._stream.state(), self._counts) if position is None else position
            return {
                "kind": self._kind(),
                "rng": stream,
                "pass": self._pass.copy(),
                **(_NOT_SELECTED if self._selected is None else self._selected.state()),
                "seen": [runs.starts.copy(), runs.counts.copy()],
                "beta": self.beta,
                "counts": dict(counts),
                "limiter": self.limiter.state() if self.limiter is not None else None,
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the sampler was that gave this state. What the log gained or lost since is taken in."""
        if state["kind"] != self._kind():
            theirs, ours = _words(state["kind"]), _words(self._kind())
            raise ConfigError(f"this state is of a sampler with {theirs}, and this one has {ours}; make the same kind.")
        with self.view.log.lock:
            if self.limiter is not None:
                self._resume_limiter(self.limiter, state)
            self._stream.load_state(state["rng"])
            self._pass, self._pass_version = np.array(state["pass"], np.int64), -1
            self.beta = float(state["beta"])
            self._counts = dict(state["counts"])
            if self._selected is not None:
                self._selected.load_state(state)

    def stats(self) -> dict[str, object]:
        limited = {"limiter": self.limiter.stats()} if self.limiter is not None else {}
        return {**self._counts, **limited}

    def __len__(self) -> int:
        """How many steps can be drawn."""
        with self.view.log.lock:
            return len(self.view if self._selected is None else self._selected)

    # Inside; all under the log's lock

    def _draw(self, n: int, steps: Snapshot, places: Array | None) -> tuple[Array, Array, int]:
        """(keys, probabilities, how many steps there were)."""
        if self._selected is not None:
            return self._selected.draw(n, self._stream.generator)
        runs = self.view.runs()
        size = len(runs)
        if not size:
            self.view.require_steps()
        if isinstance(self.assembly, Episodes):
            numbers = runs.trajectories()
            drawn = numbers[self._stream.generator.integers(len(numbers), size=n)]
            # of each, the first step in the view
            first = runs.starts[np.searchsorted(runs.starts, drawn << OFFSET_BITS)]
            return first, np.full(n, 1 / len(numbers)), len(numbers)
        if self._replace:
            places = self._stream.places(n, size) if places is None else places
            drawn = self._drawing.draw(runs, places, steps) if self.view.runs_are_extents else runs.draw(places)
            return drawn, _filled(n, 1 / size), size
        return self._draw_pass(runs, n), np.full(n, 1 / size), size

    def _draw_pass(self, runs: Runs, n: int) -> Array:
        parts: list[Array] = []
        if runs.version != self._pass_version:
            self._pass = self._pass[runs.contains(self._pass)]
            self._pass_version = runs.version
        while n:
            if not len(self._pass):
                self._pass = self._stream.generator.permutation(runs.keys())
            part, self._pass = self._pass[:n], self._pass[n:]
            parts.append(part)
            n -= len(part)
        return np.concatenate(parts)

    def _attach(self, limiter: RateLimiter) -> None:
        selection = self.view.selection
        if selection is None:
            raise ConfigError(
                "a rate limiter needs a view that steps enter one by one: all(), by_source(), successes() or where()."
            )
        self.view.log.limit(limiter, selection)

    def _resume_limiter(self, limiter: RateLimiter, state: Mapping[str, Any]) -> None:
        """Goes on from the limiter's counts, and counts what the view gained and lost since."""
        selection, seen, runs = self.view.selection, Runs(*state["seen"]), self.view.runs()
        assert selection is not None
        spent = seen - (Runs() if self._max_times == 0 else as_runs(state["selector"]["keys"]))
        limiter.load_state(state["limiter"])
        limiter.inserted(len(runs - seen))
        limiter.deleted(len(seen - runs) - len((seen - runs) & spent))
        selection.spent_before(spent & runs)

    def _kind(self) -> dict[str, Any]:
        """What a sampler must have in common with one that goes on from its state."""
        kind = {"how": self.how, "replace": self._replace, "max_times_sampled": self._max_times}
        kind["limiter"] = type(self.limiter).__name__ if self.limiter is not None else None
        selector = None if self._selected is None else self._selected.selector
        return {**kind, "exponent": selector.exponent} if isinstance(selector, Prioritized) else kind


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
        batch = Batch(unflatten(scattered(parts, batch_size)))
        batch.steps = scattered([(rows, {"": each.keys}) for rows, each in drawn.values()], batch_size)[""]
        batch.probabilities, batch.weights = np.full(batch_size, 1 / size), np.ones(batch_size)
        batch.counts = {name: len(drawn[name][0]) if name in drawn else 0 for name in self.sources}
        return batch

    def batches(
        self, batch_size: int, *, prefetch: int = 2, device: Device | str | None = None, **options: Any
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
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
            name: source if isinstance(source, Sampler | JointSampler) else source.sampler()
            for name, source in sources.items()
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
        merged = Batch(joined(parts, axis=0) if len(parts) > 1 else parts[0])
        for name in ("steps", "probabilities", "weights"):
            setattr(merged, name, np.concatenate([getattr(part, name) for part in parts]))
        merged.counts = counts
        return merged

    def batches(
        self, batch_size: int, *, prefetch: int = 2, device: Device | str | None = None, **options: Any
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread; see `Sampler.batches`."""
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


def require_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size: expected at least 1, got {batch_size}.")


def _words(kind: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kind.items())


def _filled(n: int, value: float) -> Array:
    """Returns what `np.full` returns, at half its cost."""
    array = np.empty(n)
    array.fill(value)
    return array
