"""Drawing steps with a selector: by priority, in order, or each a limited number of times.

A selector holds the keys of the steps of a view. It follows the view: before each draw, what entered the view since the
last one is put into it, and what left is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, UnknownNameError
from hilt.core.tree import Array
from hilt.replay.key_ranges import Runs, changes
from hilt.replay.sampling.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    OrderedSelector,
    Prioritized,
    Selector,
    Uniform,
)

if TYPE_CHECKING:
    from hilt.replay.view import View

SAMPLERS = ("uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap")


class SelectorDraw:
    """Steps of a view as a selector chooses them. The caller holds the log's lock in all of its methods.

    `max_times`: a step that was drawn so often is not drawn again; 0 for no limit. With `limited`, the rate limiters of
    the log count such steps as deleted, as in Reverb.
    """

    def __init__(self, view: View, how: str, exponent: float | None, max_times: int, limited: bool):
        self._view, self._max_times, self._limited = view, max_times, limited
        self.selector = _selector(how, 0.6 if exponent is None else exponent)
        self._seen, self._seen_version = Runs(), -1
        self._times: dict[int, int] = {}  # how often steps were drawn that may be drawn again
        self._top_priority = 1.0

    def __len__(self) -> int:
        """How many steps can be drawn."""
        self.follow_view()
        return len(self.selector)

    def follow_view(self) -> None:
        """Takes into the selector what entered the view since, and out of it what left."""
        runs = self._view.runs()
        if runs.version == self._seen_version:
            return
        added, removed = changes(self._seen, runs)
        gone = removed.keys()
        gone = gone[self.selector.contains(gone)]
        if len(gone):
            self.selector.delete(gone)
        for key in removed.keys().tolist() if self._times else ():
            self._times.pop(key, None)
        fresh = added.keys()
        if len(fresh):
            self.selector.insert(fresh, np.full(len(fresh), self._top_priority))
        self._seen, self._seen_version = runs.copy(), runs.version

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Array, Array, int]:
        """(keys, probabilities, how many steps there were)."""
        size = len(self)
        if not self._max_times:
            if not size:
                self._view.require_steps()
            drawn, probabilities = self.selector.sample(n, generator)
            return drawn, probabilities, size
        if size < n and (left := size * self._max_times - sum(self._times.values())) < n:  # before anything is drawn
            limit = f"max_times_sampled={self._max_times}"
            raise EmptyError(
                f"{n} draws were asked for and only {left} are left ({limit}); ask for fewer or add more steps."
            )
        parts: list[tuple[Array, Array]] = []
        while n:
            parts.append(self._next(n, generator))
            n -= len(parts[-1][0])
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([chances for _, chances in parts]), size

    def update(self, steps: Array, priorities: Array) -> int:
        """New priorities of steps; those that left the view are passed over. Returns how many were there."""
        self.follow_view()
        there = self.selector.contains(steps)
        if not np.isfinite(priorities).all() or (priorities < 0).any():
            self.selector.update(steps, priorities)  # names the bad one
        self.selector.update(steps[there], priorities[there])
        self._top_priority = max(self._top_priority, float(priorities[there].max(initial=0.0)))
        return int(there.sum())

    def state(self) -> dict[str, object]:
        return {
            "times": np.array(sorted(self._times.items()), np.int64).reshape(-1, 2),
            "top_priority": self._top_priority,
            "selector": self.selector.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a sampler's state, in which `seen` is what the view had then."""
        self._times = {int(k): int(n) for k, n in state["times"]}
        self._top_priority = float(state["top_priority"])
        self.selector.load_state(state["selector"])
        self._seen, self._seen_version = Runs(*state["seen"]), -1

    def _next(self, n: int, generator: np.random.Generator) -> tuple[Array, Array]:
        """Up to `n` draws; steps that reached their limit are taken out."""
        if isinstance(self.selector, OrderedSelector):
            drawn = self.selector.peek(n if self._max_times == 1 else 1)
            probabilities = np.ones(len(drawn))
        else:
            drawn, probabilities = self.selector.sample(1, generator)
        for key in drawn.tolist() if self._max_times > 1 else ():
            self._times[key] = self._times.get(key, 0) + 1
        spent = np.array([k for k in drawn.tolist() if self._times.get(k, 1) >= self._max_times], np.int64)
        if len(spent):
            self.selector.delete(spent)
            for key in spent.tolist() if self._max_times > 1 else ():
                del self._times[key]
            if self._limited and self._view.selection is not None:
                self._view.selection.spend(spent)
                self._view.log.update_limiters()
        return drawn, probabilities


def check_draw(how: str, replace: bool, max_times_sampled: int, episodes: bool) -> None:
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


def check_priorities(how: str, exponent: float | None, beta: float | None) -> None:
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
