"""Transitions that say themselves what they must contain, and the check of a
learner's log against what actors say they inserted.

A transition is a number `n` in one life (one process) of an actor. Everything in it is arithmetic on the three,
the pixels included, and all three are in its state. So a step that is lost, there twice, in the wrong place or
with another one's image is seen from the log alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hilt.core.tree import Array, unflatten
from hilt.replay import Log, ReplayBufferDataStore
from hilt.replay.maintenance.repair import verify

ENV, INTERVENTION = "actor_env", "actor_env_intvn"
STORES = (ENV, INTERVENTION)
SIDE = 24
LENGTH = 20
"""Steps of an episode; the longest ends without being terminated."""

_PLACE = np.arange(SIDE * SIDE * 3, dtype=np.uint32)


def _space(dtype: Any, *shape: int) -> Any:
    """As much of a Gymnasium space as the buffers look at."""
    return SimpleNamespace(shape=shape, dtype=dtype)


SPACE = SimpleNamespace(spaces={"image": _space(np.uint8, SIDE, SIDE, 3), "state": _space(np.float32, 6)})
ACTION_SPACE = _space(np.float32, 2)


def make_buffer(
    path: Path | None, capacity: int = 1_000_000, durability: str = "at most 10 ms", **settings: Any
) -> ReplayBufferDataStore:
    """A learner's buffer. Its segments hold some two hundred steps, so that they turn over all the time."""
    settings.setdefault("segment_bytes", 200 * SIDE * SIDE * 3)
    return ReplayBufferDataStore(SPACE, ACTION_SPACE, capacity, path=path, durability=durability, **settings)


def transition(actor: int, life: int, n: int, milliseconds: float = 0) -> dict[str, Any]:
    return {**columns(actor, life, n), "actions": np.array([n, milliseconds], np.float32)}


def is_intervention(n: Any) -> Any:
    """Whether a person acts in this step: it goes to the second store too."""
    return np.asarray(n) % 9 < 3


def wanted_in(store: str, n: Any) -> Any:
    return is_intervention(n) if store == INTERVENTION else np.ones(np.shape(n), bool)


def columns(actor: Any, life: Any, n: Any) -> dict[str, Any]:
    """The transitions with these numbers, all of any one shape. `actions` is left
    out: it carries the time of the insert."""
    actor, life, n = np.broadcast_arrays(
        np.asarray(actor, np.int64), np.asarray(life, np.int64), np.asarray(n, np.int64)
    )
    done = n % LENGTH == LENGTH - 1
    cut_short = n // LENGTH % 3 == 2
    return {
        "observations": _observation(actor, life, n, n % LENGTH),
        "next_observations": _observation(actor, life, n, n % LENGTH + 1),
        "rewards": np.asarray(n % 97 + actor / 4, np.float32)[()],
        "masks": np.asarray(np.where(done & ~cut_short, 0, 1), np.float32)[()],
        "dones": np.asarray(done)[()],
    }


def _observation(actor: Array, life: Array, n: Array, t: Array) -> dict[str, Array]:
    episode = n // LENGTH
    first = (actor * 1_000_003 + life * 7919 + episode * 104_729 + t * 31 + 12_345).astype(np.uint32)[..., None]
    pixels = ((_PLACE * (2 * first + 1)) ^ (first * np.uint32(2_654_435_761))) >> np.uint32(13)
    state = np.stack([actor, life, episode * LENGTH, t, actor + life, episode - t], axis=-1).astype(np.float32)
    return {"image": pixels.astype(np.uint8).reshape(*n.shape, SIDE, SIDE, 3), "state": state}


def numbers_of(observations: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Which transitions begin with these observations: (actors, lives, n)."""
    state = np.asarray(observations["state"]).astype(np.int64)
    return state[..., 0], state[..., 1], state[..., 2] + state[..., 3]


def check_pixels(batch: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Compares every field of a batch with what it must be; returns which transitions they are."""
    actor, life, n = numbers_of(batch["observations"])
    expected = columns(actor, life, n)
    for name, value in _leaves(expected):
        found = batch
        for part in name.split("/"):
            found = found[part]
        wrong = np.flatnonzero((np.asarray(found) != value).reshape(len(n), -1).any(axis=1))
        assert not len(wrong), (
            f"{name} is wrong in {len(wrong)} of {len(n)} steps, first in actor {actor[wrong[0]]} n {n[wrong[0]]}"
        )
    assert np.array_equal(batch["actions"][:, 0], n.astype(np.float32)), "actions are wrong"
    return actor, life, n


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}/") if isinstance(value, dict) else [(prefix + key, value)]


Life = tuple[int, int]
"""An actor's number, and which of its processes."""
Sender = tuple[str, str, str]
"""An actor's name, its boot, and the store, as the log knows them."""


@dataclass
class Told:
    """What an actor's process said about one store, in its journal."""

    begun: int = -1
    """The last n whose insert was begun."""
    inserted: dict[int, int] = field(default_factory=dict)
    """n -> the spool's number, for each insert that returned."""
    acknowledged: int = -1
    """The spool's number up to which all is acknowledged."""

    def promised(self, disk: bool) -> set[int]:
        """The transitions that must be in the log."""
        return {n for n, number in self.inserted.items() if disk or number <= self.acknowledged}


class Arrived:
    """What a learner's log of one store holds. Looked at once, or again and again, while old steps go to make room."""

    def __init__(self, store: str):
        self.store = store
        self.boots: set[Sender] = set()
        self._seen: set[int] = set()
        self._rows: dict[Sender, list[tuple[int, ...]]] = defaultdict(list)  # key, sequence, version, actor, life, n

    @property
    def steps(self) -> int:
        return len(self._seen)

    def look(self, log: Log) -> None:
        """Takes in the steps that are new, and checks every field of them.

        From beside a learner that is writing, a later step may be seen sooner than an
        earlier one; their order is in their keys.
        """
        keys = np.array([key for key in log.all().keys().tolist() if key not in self._seen], np.int64)
        names = log.facts.origins()
        for start in range(0, len(keys), 512):
            part = keys[start : start + 512]
            with log.reading() as steps:
                part = part[steps.exist(part)]
                sequences, origins = steps.fields(part, ["#sequence", "#origin"])
                batch = unflatten(steps.gather(part, list(log.schema.columns)))
            actor, life, n = check_pixels(batch)
            rows = zip(*(x.tolist() for x in (part, sequences, batch["policy_version"], actor, life, n)), strict=True)
            for origin, row in zip(origins.tolist(), rows, strict=True):
                self._rows[names[origin]].append(row)
            self._seen.update(part.tolist())
            self.boots.update(names[origin] for origin in set(origins.tolist()))

    @property
    def order(self) -> dict[Life, list[int]]:
        """The n of each life, in the order of the log. Per sender, numbers rise with
        no two alike, and versions never fall."""
        found: dict[Life, list[int]] = defaultdict(list)
        for sender, rows in self._rows.items():
            table = np.array(sorted(rows), np.int64)
            wrong = np.flatnonzero(np.diff(table[:, 1]) <= 0)
            assert not len(wrong), f"{sender}: sequence {table[wrong[0] + 1, 1]} comes after {table[wrong[0], 1]}"
            wrong = np.flatnonzero(np.diff(table[:, 2]) < 0)
            assert not len(wrong), f"{sender}: version {table[wrong[0] + 1, 2]} comes after {table[wrong[0], 2]}"
            lives = {(a, i) for a, i in table[:, 3:5].tolist()}
            assert len(lives) == 1, f"{sender}: steps of several processes: {lives}"
            found[lives.pop()] += table[:, 5].tolist()
        return found

    def numbers(self) -> Counter[tuple[int, int]]:
        """How often each (life, n) is there, of one actor."""
        return Counter((row[4], row[5]) for rows in self._rows.values() for row in rows)

    def check(self, told: dict[Life, Told], disk: Iterable[int]) -> Counter[str]:
        """Compares with what the actors said. `disk`: the numbers of the actors whose spool is on disk."""
        counts: Counter[str] = Counter()
        on_disk, found = set(disk), self.order
        assert set(found) <= set(told), f"{self.store}: steps of actors that never were: {set(found) - set(told)}"
        for (actor, life), said in sorted(told.items()):
            where = f"{self.store}, actor {actor}, life {life}"
            order = found.get((actor, life), [])
            twice = [n for n, times in Counter(order).items() if times > 1]
            assert not twice, (
                f"{where}: {len(twice)} of {len(order)} steps are there twice, the first is n={min(twice)}"
            )
            promised = said.promised(actor in on_disk)
            lost = sorted(promised - set(order))
            assert not lost, (
                f"{where}: {len(lost)} of {len(promised)} promised steps are lost, from n={lost[0]} to n={lost[-1]}"
            )
            assert order == sorted(order), f"{where}: out of order: {_first_disorder(order)}"
            never = [n for n in order if n > said.begun]
            assert not never, (
                f"{where}: {len(never)} steps are there that were never inserted, the first is n={never[0]}"
            )
            expected = [n for n in range((order[-1] if order else -1) + 1) if wanted_in(self.store, n)]
            missing = sorted(set(expected) - set(order))
            assert order == expected, (
                f"{where}: of {len(expected)} steps up to n={order[-1]}, {len(missing)} are missing: {missing[:5]}"
            )
            counts["promised"] += len(promised)
            counts["unpromised but there"] += len(order) - len(promised)
            counts["lost with their memory"] += len(said.inserted) - len(set(order) & set(said.inserted))
        return counts


def _first_disorder(order: list[int]) -> str:
    at = next(i for i in range(1, len(order)) if order[i] < order[i - 1])
    return f"n={order[at]} comes after n={order[at - 1]}"


def check_log(path: Path, store: str, told: dict[Life, Told], disk: Iterable[int]) -> tuple[Arrived, Counter[str]]:
    """Opens a learner's log after everything ended, and checks all of it."""
    report = verify(path)
    assert report.ok, "; ".join(str(finding) for finding in report.findings)
    arrived = Arrived(store)
    with Log.open(path) as log:
        assert log.recovery.corrupt_steps == 0
        assert log.damage() == []
        arrived.look(log)
    return arrived, arrived.check(told, disk)
