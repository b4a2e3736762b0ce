"""Samplers: which steps come next, and what a batch of them is.

    sampler = log.all().sampler("prioritized", exponent=0.6, beta=0.4, seed=0)
    batch = sampler.sample(256, keys=["observations", "actions", "rewards"])
    sampler.update_priorities(batch.steps, td_error)

A sampler owns its generator; `state` and `load_state` make it go on exactly where it was, also in another process. The
state of one whose batches are made ahead (`batches`) is that after the last batch that was delivered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.core.tree import Array, Tree, flatten, unflatten
from hilt.replay.key_ranges import OFFSET_BITS, Runs
from hilt.replay.sampling.assembly import Assembly, Batch, Episodes, assembly_of, check_out, put_into
from hilt.replay.sampling.limiters import RateLimiter
from hilt.replay.sampling.prefetch import Prefetch
from hilt.replay.sampling.randomness import TorchStream, as_stream
from hilt.replay.sampling.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    OrderedSelector,
    Prioritized,
    Selector,
    Uniform,
    importance_weights,
)
from hilt.replay.sampling.uniform import UniformDraw

if TYPE_CHECKING:
    from hilt.replay.snapshot import Snapshot
    from hilt.replay.tensors import Device
    from hilt.replay.view import View

_NOTHING = contextlib.nullcontext()
Position: TypeAlias = tuple[object, dict[str, int]]
"""The state of a sampler's generator, and its counts."""
SAMPLERS = ("uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap")


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
        _check_draw(how, replace, max_times_sampled, episodes)
        _check_priorities(how, exponent, beta)
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
        self._selector = (
            _selector(how, 0.6 if exponent is None else exponent) if how != "uniform" or max_times_sampled else None
        )
        self._seen, self._seen_version = Runs(), -1
        self._times: dict[int, int] = {}  # how often steps were drawn that may be drawn again
        self._top_priority = 1.0
        self._drawing = UniformDraw()
        self._pass: Array = np.zeros(0, np.int64)
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
        if self._selector is None or self.how in ("fifo", "lifo", "uniform"):
            raise ConfigError(f"a {self.how} sampler has no priorities; use 'prioritized', 'min_heap' or 'max_heap'.")
        steps, priorities = np.asarray(steps, np.int64), np.asarray(priorities, np.float64)
        if steps.shape != priorities.shape or steps.ndim != 1:
            raise ConfigError(
                f"expected one priority per step, got {steps.shape} steps and {priorities.shape} priorities."
            )
        with self.view.log.lock:
            self._follow_view()
            there = self._selector.contains(steps)
            if not np.isfinite(priorities).all() or (priorities < 0).any():
                self._selector.update(steps, priorities)  # names the bad one
            self._selector.update(steps[there], priorities[there])
            self._counts["stale_priorities"] += int((~there).sum())
            self._top_priority = max(self._top_priority, float(priorities[there].max(initial=0.0)))
            return int(there.sum())

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
            if self._selector is None and self._replace and self.limiter is None
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
            self._follow_view()
            runs = self.view.runs()
            stream, counts = (self._stream.state(), self._counts) if position is None else position
            return {
                "kind": self._kind(),
                "rng": stream,
                "pass": self._pass.copy(),
                "times": np.array(sorted(self._times.items()), np.int64).reshape(-1, 2),
                "top_priority": self._top_priority,
                "selector": self._selector.state() if self._selector is not None else None,
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
            self._pass = np.array(state["pass"], np.int64)
            self._times = {int(k): int(n) for k, n in state["times"]}
            self._top_priority = float(state["top_priority"])
            self.beta = float(state["beta"])
            self._counts = dict(state["counts"])
            if self._selector is not None:
                self._selector.load_state(state["selector"])
            self._seen, self._seen_version = Runs(*state["seen"]), -1

    def stats(self) -> dict[str, object]:
        limited = {"limiter": self.limiter.stats()} if self.limiter is not None else {}
        return {**self._counts, **limited}

    def __len__(self) -> int:
        """How many steps can be drawn."""
        with self.view.log.lock:
            if self._selector is None:
                return len(self.view)
            self._follow_view()
            return len(self._selector)

    # Inside; all under the log's lock

    def _draw(self, n: int, steps: Snapshot, places: Array | None) -> tuple[Array, Array, int]:
        """(keys, probabilities, how many steps there were)."""
        if self._selector is not None:
            return self._draw_items(n)
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
        if runs.version != self._seen_version:
            self._pass = self._pass[runs.contains(self._pass)]
            self._seen_version = runs.version
        while n:
            if not len(self._pass):
                self._pass = self._stream.generator.permutation(runs.keys())
            part, self._pass = self._pass[:n], self._pass[n:]
            parts.append(part)
            n -= len(part)
        return np.concatenate(parts)

    def _draw_items(self, n: int) -> tuple[Array, Array, int]:
        assert self._selector is not None
        self._follow_view()
        size = len(self._selector)
        if not self._max_times:
            if not size:
                self.view.require_steps()
            drawn, probabilities = self._selector.sample(n, self._stream.generator)
            return drawn, probabilities, size
        if size < n and (left := size * self._max_times - sum(self._times.values())) < n:  # before anything is drawn
            limit = f"max_times_sampled={self._max_times}"
            raise EmptyError(
                f"{n} draws were asked for and only {left} are left ({limit}); ask for fewer or add more steps."
            )
        parts: list[tuple[Array, Array]] = []
        while n:
            parts.append(self._next_items(n))
            n -= len(parts[-1][0])
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([chances for _, chances in parts]), size

    def _next_items(self, n: int) -> tuple[Array, Array]:
        """Up to `n` draws; steps that reached their limit are taken out."""
        assert self._selector is not None
        if isinstance(self._selector, OrderedSelector):
            drawn = self._selector.peek(n if self._max_times == 1 else 1)
            probabilities = np.ones(len(drawn))
        else:
            drawn, probabilities = self._selector.sample(1, self._stream.generator)
        for key in drawn.tolist() if self._max_times > 1 else ():
            self._times[key] = self._times.get(key, 0) + 1
        spent = np.array([k for k in drawn.tolist() if self._times.get(k, 1) >= self._max_times], np.int64)
        if len(spent):
            self._selector.delete(spent)
            for key in spent.tolist() if self._max_times > 1 else ():
                del self._times[key]
            if self.limiter is not None and self.view.selection is not None:  # as in Reverb, they count as deleted
                self.view.selection.spend(spent)
                self.view.log.update_limiters()
        return drawn, probabilities

    def _follow_view(self) -> None:
        """Takes into the selector what entered the view since, and out of it what left."""
        if self._selector is None:
            return
        runs = self.view.runs()
        if runs.version == self._seen_version:
            return
        added, removed = _changes(self._seen, runs)
        gone = removed.keys()
        gone = gone[self._selector.contains(gone)]
        if len(gone):
            self._selector.delete(gone)
        for key in removed.keys().tolist() if self._times else ():
            self._times.pop(key, None)
        fresh = added.keys()
        if len(fresh):
            self._selector.insert(fresh, np.full(len(fresh), self._top_priority))
        self._seen, self._seen_version = runs.copy(), runs.version

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
        spent = seen - (Runs() if self._max_times == 0 else _as_runs(state["selector"]["keys"]))
        limiter.load_state(state["limiter"])
        limiter.inserted(len(runs - seen))
        limiter.deleted(len(seen - runs) - len((seen - runs) & spent))
        selection.spent_before(spent & runs)

    def _kind(self) -> dict[str, Any]:
        """What a sampler must have in common with one that goes on from its state."""
        kind = {"how": self.how, "replace": self._replace, "max_times_sampled": self._max_times}
        kind["limiter"] = type(self.limiter).__name__ if self.limiter is not None else None
        return {**kind, "exponent": self._selector.exponent} if isinstance(self._selector, Prioritized) else kind


def require_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size: expected at least 1, got {batch_size}.")


def _changes(before: Runs, now: Runs) -> tuple[Runs, Runs]:
    """(added, removed), looking only at the runs that differ: most changes are at the two ends."""
    a, b = (before.starts, before.counts), (now.starts, now.counts)
    head = int(np.searchsorted(a[0], b[0][0])) if len(b[0]) else len(a[0])
    evicted = Runs(a[0][:head], a[1][:head])
    a = (a[0][head:], a[1][head:])
    n = min(len(a[0]), len(b[0]))
    differs = (a[0][:n] != b[0][:n]) | (a[1][:n] != b[1][:n])
    same = int(np.argmax(differs)) if differs.any() else n
    old, new = Runs(a[0][same:], a[1][same:]), Runs(b[0][same:], b[1][same:])
    return new - old - evicted, (old | evicted) - now


def _as_runs(keys: Array) -> Runs:
    keys = np.sort(keys)
    first = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 2) != 1)
    return Runs(keys[first], np.diff(first, append=len(keys)))


def _words(kind: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kind.items())


def _filled(n: int, value: float) -> Array:
    """Returns what `np.full` returns, at half its cost."""
    array = np.empty(n)
    array.fill(value)
    return array


def _check_draw(how: str, replace: bool, max_times_sampled: int, episodes: bool) -> None:
    """Raises for a way of drawing that there is not, and for options that do not go together."""
    if how not in SAMPLERS:
        raise UnknownNameError("sampler", how, SAMPLERS)
    if not replace and how != "uniform":
        raise ConfigError(f"replace=False is for uniform sampling, got how={how!r}; use max_times_sampled=1 instead.")
    if max_times_sampled < 0 or (max_times_sampled and (episodes or not replace)):
        raise ConfigError(
            f"max_times_sampled={max_times_sampled}: expected 0 or more, and without episodes= and replace=False."
        )
    if episodes and (how != "uniform" or not replace):
        raise ConfigError(f"whole episodes are drawn uniformly with replacement, got how={how!r}, replace={replace}.")


def _check_priorities(how: str, exponent: float | None, beta: float | None) -> None:
    """Raises for options of prioritized sampling where another one is asked for, and for a `beta` out of range."""
    if how != "prioritized" and (exponent is not None or beta is not None):
        raise ConfigError(f"exponent= and beta= are for prioritized sampling, got how={how!r}; leave them out.")
    if beta is not None and not 0 <= beta < np.inf:
        raise ConfigError(f"beta={beta}: expected 0 (no correction) to 1 (full correction).")


def _selector(how: str, exponent: float) -> Selector:
    if how == "prioritized":
        return Prioritized(exponent)
    kinds: dict[str, type[Any]] = {
        "uniform": Uniform,
        "fifo": Fifo,
        "lifo": Lifo,
        "min_heap": MinHeap,
        "max_heap": MaxHeap,
    }
    return kinds[how]()  # type: ignore[no-any-return]
