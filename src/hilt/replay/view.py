"""Views: selections of a log's steps that stay up to date by themselves.

    online = log.by_source("policy", "random")
    human = log.by_source("human")
    good = log.successes() & log.last(100)
    batch = (human | good).sample(256, keys=["observations/state", "actions", "rewards"])

An intervention is in the online view and in the human one because both show it, not because it was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.core.trajectory import ESTIMATES, Source
from hilt.core.tree import Array, Tree
from hilt.replay.key_ranges import OFFSET_BITS, Runs, key_of

if TYPE_CHECKING:
    from hilt.replay.log import Log
    from hilt.replay.sampling.assembly import Batch
    from hilt.replay.sampling.sampler import Sampler
    from hilt.replay.snapshot import Snapshot


ESTIMATED = ("value", "advantage", "percentile", "progress")
"""What a value model finds about a step"""


class View:
    """Steps of one log. Views are cheap: make as many as you like, and combine them with ``&``, ``|`` and ``-``."""

    def __init__(self, log: Log, keys: KeySet):
        self.log = log
        self._keys = keys
        self._sampler: Sampler | None = None

    def runs(self) -> Runs:
        """The steps that are in the view now. Do not change them."""
        with self.log.lock:
            return self._keys.current()

    def keys(self) -> Array:
        """The key of every step, oldest trajectory first."""
        with self.log.lock:
            return self.runs().keys()

    def __len__(self) -> int:
        """How many steps."""
        with self.log.lock:
            return len(self.runs())

    def trajectories(self) -> list[int]:
        """The trajectories that have a step in the view, oldest first."""
        with self.log.lock:
            return self.runs().trajectories().tolist()  # type: ignore[no-any-return]

    def last(self, trajectories: int) -> View:
        """Only the newest trajectories that have a step in this view; 0 means all of them."""
        if trajectories < 0:
            raise ConfigError(f"last({trajectories}): expected how many trajectories, 0 for all.")
        return View(self.log, _Window(self._keys, trajectories)) if trajectories else self

    def only(self, trajectories: Iterable[int]) -> View:
        """Only these trajectories, as far as they have steps in this view."""
        return View(self.log, _Chosen(self._keys, trajectories))

    def estimated(self, name: str, predicate: Callable[[Array], Array], model: str = "") -> View:
        """Only the steps for which a predicate holds on what a value model found about them (`hilt train value`):
        ``value``, ``advantage``, ``percentile`` or ``progress``. It gets ``[n]`` numbers and returns ``[n]`` booleans;
        steps that have none are left out. With the id of a `model`, what other models found counts as none."""
        if name not in ESTIMATED:
            raise UnknownNameError("estimate of a value model", name, ESTIMATED)
        return self & View(self.log, Selection.estimated(self.log, name, predicate, model))

    def __and__(self, other: View) -> View:
        return self._combined(other, lambda a, b: a & b)

    def __or__(self, other: View) -> View:
        return self._combined(other, lambda a, b: a | b)

    def __sub__(self, other: View) -> View:
        return self._combined(other, lambda a, b: a - b)

    def sampler(self, how: str = "uniform", **options: Any) -> Sampler:
        """A sampler of this view with a generator and a state of its own; see `Sampler` for the options."""
        from hilt.replay.sampling.sampler import Sampler

        return Sampler(self, how, **options)

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, out: Tree | None = None) -> Batch:
        """A uniform batch, with replacement, by a sampler that this view keeps."""
        if self._sampler is None:
            self._sampler = self.sampler()
        return self._sampler.sample(batch_size, keys=keys, out=out)

    def stats(self) -> dict[str, object]:
        """Size of the view, and what its own sampler counted."""
        with self.log.lock:
            runs = self.runs()
            own = {} if self._sampler is None else self._sampler.stats()
            return {"steps": len(runs), "trajectories": len(runs.trajectories()), **own}

    def require_steps(self) -> None:
        if not len(self):
            raise EmptyError(
                f"the view of {self.log.path} holds no step yet; add some, or wait with a rate limiter (MinSize)."
            )

    @property
    def selection(self) -> Selection | None:
        """The rule of this view, when it is one that steps enter once: not for `last` and combinations."""
        return self._keys if isinstance(self._keys, Selection) else None

    @property
    def runs_are_extents(self) -> bool:
        """Whether each of the view's runs is one of the last extents of the log, in order: true for `all` and `last`,
        while edits hide nothing."""
        keys = self._keys.parent if isinstance(self._keys, _Window) else self._keys
        return isinstance(keys, Selection) and keys.is_all and not self.log.facts.edits.shown

    def _combined(self, other: View, rule: Callable[[Runs, Runs], Runs]) -> View:
        if other.log is not self.log:
            raise ConfigError("views of two logs cannot be one view; sample both with Mix.")
        return View(self.log, _Combination(self._keys, other._keys, rule))


class KeySet(Protocol):
    """Something that knows which keys it holds now."""

    def current(self) -> Runs: ...


class Watcher(Protocol):
    """Something that a log reports every change to."""

    @property
    def is_all(self) -> bool:
        """Whether it does without the rows of new steps."""

    def added(self, key: int, steps: int, rows: Array | None, extends: bool = False) -> None: ...
    def removed(self, key: int, steps: int) -> None: ...
    def taken_back(self, key: int, steps: int) -> None: ...
    def refresh(self, trajectories: set[int], moved: Set[int] = frozenset()) -> None: ...


Rule = Callable[["Snapshot", Array, "Array | None"], Array]


class Selection:
    """The steps that a rule admits, kept up to date by the log.

    A rule gets keys and returns booleans. It also gets the rows when they are just being written, so that small columns
    need not be read back. `entered` and `left` count steps, for rate limiters. A rule that fails does not affect
    writers of the log: its error is raised where the view is used.
    """

    def __init__(self, log: Log, admits: Rule | None, whole_trajectories: bool = False):
        self._log, self._admits, self._whole = log, admits, whole_trajectories
        self._runs = Runs()
        self._spent = Runs()  # steps that a sampler drew as often as it may: for its limiter they have left
        self._failure: Exception | None = None
        self.entered = self.left = 0
        with log.lock:
            self._fill()
            log.watch(self)

    @classmethod
    def all(cls, log: Log) -> Selection:
        return cls(log, None)

    @classmethod
    def by_source(cls, log: Log, sources: Sequence[str]) -> Selection:
        if not sources:
            raise ConfigError("by_source() needs at least one of policy, human, demo, random.")
        wanted = np.array([int(Source.parse(s)) for s in sources], np.uint8)

        def admits(steps: Snapshot, keys: Array, rows: Array | None) -> Array:
            acted = rows["source"] if rows is not None else steps.fields(keys, ["source"])[0]
            return np.isin(acted, wanted)

        return cls(log, admits)

    @classmethod
    def successes(cls, log: Log) -> Selection:
        flagged = "success" in log.schema.columns

        def admits(steps: Snapshot, keys: Array, rows: Array | None) -> Array:
            known = log.facts.success(int(keys[0] >> OFFSET_BITS))
            if known is None and flagged:
                known = bool(steps.fields(steps.trajectory(int(keys[0] >> OFFSET_BITS)), ["success"])[0].any())
            return np.full(len(keys), bool(known))

        return cls(log, admits, whole_trajectories=True)

    @classmethod
    def where(cls, log: Log, column: str, predicate: Callable[[Array], Array]) -> Selection:
        (path,) = log.schema.select([column])[:1]
        if path != column:
            raise SchemaError(
                f"{column}: expected one column, got a subtree; choose one of {', '.join(log.schema.select([column]))}."
            )

        def admits(steps: Snapshot, keys: Array, rows: Array | None) -> Array:
            values = (
                rows[path]
                if rows is not None and path in log.schema.layout.inline
                else steps.gather(keys, [path])[path]
            )
            return _verdict(path, predicate, values)

        return cls(log, admits)

    @classmethod
    def estimated(cls, log: Log, name: str, predicate: Callable[[Array], Array], model: str = "") -> Selection:
        def admits(steps: Snapshot, keys: Array, rows: Array | None) -> Array:
            found = log.facts.about(int(keys[0] >> OFFSET_BITS)).get(ESTIMATES, {})
            other = bool(model) and found.get("model") != model
            given = np.asarray([] if other else found.get(name, []), np.float64)
            place = (keys & ((1 << OFFSET_BITS) - 1)) - int(found.get("first", 0))
            known = (place >= 0) & (place < len(given))
            known[known] = _verdict(name, predicate, given[place[known]])
            return known

        return cls(log, admits, whole_trajectories=True)

    @property
    def is_all(self) -> bool:
        return self._admits is None

    def current(self) -> Runs:
        if self._failure is not None:
            raise SchemaError(
                f"the rule of this view failed on a new step: {self._failure!r}. Mend it and make the view again."
            )
        return self._runs

    def spend(self, keys: Array) -> None:
        """A sampler will not draw these steps again, so they count as gone; the view still shows them."""
        for key in keys.tolist():
            self._spent.add(key)
        self.left += len(keys)

    def spent_before(self, spent: Runs) -> None:
        """These steps were spent before this view was made; see `spend`."""
        self._spent = spent

    def added(self, key: int, steps: int, rows: Array | None, extends: bool = False) -> None:
        """Consecutive steps of one trajectory were appended: to an extent that was there, or as a new one."""
        shown = self._log.facts.edits.shown
        if shown and key >> OFFSET_BITS in shown.ranges:  # a trajectory that was edited while it is written
            self._judge(key >> OFFSET_BITS)
        elif self._admits is None:
            self._runs.add(key, steps, join=extends)  # so that runs are extents; see `View.runs_are_extents`
            self.entered += steps
        elif self._whole:
            self._judge(key >> OFFSET_BITS)
        else:
            self._admit(np.arange(key, key + steps), rows)

    def removed(self, key: int, steps: int) -> None:
        before = self._live()
        self._runs.remove(key, steps)
        self._spent.remove(key, steps)
        self.left += before - self._live()

    def taken_back(self, key: int, steps: int) -> None:
        """Does what `removed` does for steps that never counted: their writing failed."""
        before = len(self._runs)
        self._runs.remove(key, steps)
        self.entered -= before - len(self._runs)

    def refresh(self, trajectories: set[int], moved: Set[int] = frozenset()) -> None:
        """Facts about these trajectories changed; of those in `moved`, other steps are shown than before."""
        for trajectory in moved if self._admits is None else trajectories:
            if len(self._log.index.places_of(trajectory)):
                self._judge(trajectory)

    def _live(self) -> int:
        return len(self._runs) - len(self._spent)

    def _fill(self) -> None:
        entries = self._log.index.entries
        if self._admits is None:
            self._runs = Runs(*self._log.facts.edits.shown.clip(entries["key"], entries["steps"].astype(np.int64)))
            return
        for key, steps in zip(entries["key"].tolist(), entries["steps"].tolist(), strict=True):
            self.added(key, steps, None)
            if self._failure is not None:
                raise self._failure

    def _judge(self, trajectory: int) -> None:
        before, entered = self._live(), self.entered
        keys = self._log.trajectory_keys(trajectory, hidden=True)
        self._runs.remove(key_of(trajectory), 1 << OFFSET_BITS)
        shown = self._log.facts.edits.shown
        if self._admits is None:
            places = self._log.index.places_of(trajectory)
            entries = self._log.index.entries[places.start : places.stop]
            for first, steps in zip(*shown.clip(entries["key"], entries["steps"].astype(np.int64)), strict=True):
                self._runs.add(int(first), int(steps), join=False)
        elif len(visible := keys[shown.contain(keys)]):
            self._admit(visible, None)
        for key in keys[self._spent.contains(keys) & ~self._runs.contains(keys)].tolist():
            self._spent.remove(key, 1)
        change = self._live() - before
        self.entered = entered + max(0, change)
        self.left += max(0, -change)

    def _admit(self, keys: Array, rows: Array | None) -> None:
        assert self._admits is not None
        with self._log.reading() as steps:
            try:
                good = keys[self._admits(steps, keys, rows)]
            except Exception as error:  # noqa: BLE001  # broad: the predicate is the user's; raised to those who use the view
                self._failure = error
                return
        if len(good):
            self.entered += len(good)
            breaks = np.flatnonzero(np.diff(good) != 1) + 1
            for part in np.split(good, breaks):
                self._runs.add(int(part[0]), len(part))


def _verdict(name: str, predicate: Callable[[Array], Array], values: Array) -> Array:
    verdict = np.asarray(predicate(values))
    if verdict.shape != (len(values),) or verdict.dtype != bool:
        got = f"{verdict.dtype} {verdict.shape}"
        raise SchemaError(f"the predicate on {name}: expected booleans of shape ({len(values)},), got {got}.")
    return verdict


class _Window:
    """The last trajectories of a key set."""

    def __init__(self, parent: KeySet, trajectories: int):
        self.parent, self._trajectories = parent, trajectories
        self._seen = -1
        self._runs = Runs()

    def current(self) -> Runs:
        runs = self.parent.current()
        if runs.version != self._seen:
            self._runs, self._seen = runs.since(self._first(runs)), runs.version
        return self._runs

    def _first(self, runs: Runs) -> int:
        """The oldest trajectory that is still among the last ones, found from the end."""
        starts, look = runs.starts, self._trajectories
        while True:
            tail = np.unique(starts[max(0, len(starts) - look) :] >> OFFSET_BITS)
            if len(tail) >= self._trajectories or look >= len(starts):
                return int(tail[max(0, len(tail) - self._trajectories)]) if len(tail) else 0
            look *= 2


class _Chosen:
    """The steps of a key set that are of certain trajectories."""

    def __init__(self, parent: KeySet, trajectories: Iterable[int]):
        self._parent, self._trajectories = parent, np.array(sorted(set(trajectories)), np.int64)
        self._seen = -1
        self._runs = Runs()

    def current(self) -> Runs:
        runs = self._parent.current()
        if runs.version != self._seen:
            chosen = np.isin(runs.starts >> OFFSET_BITS, self._trajectories)
            self._runs, self._seen = Runs(runs.starts[chosen], runs.counts[chosen]), runs.version
        return self._runs


class _Combination:
    """Two key sets under a set operation, worked out when asked for and when one of them changed."""

    def __init__(self, a: KeySet, b: KeySet, rule: Callable[[Runs, Runs], Runs]):
        self._a, self._b, self._rule = a, b, rule
        self._seen = (-1, -1)
        self._runs = Runs()

    def current(self) -> Runs:
        a, b = self._a.current(), self._b.current()
        seen = (a.version, b.version)
        if seen != self._seen:
            self._runs, self._seen = self._rule(a, b), seen
        return self._runs
