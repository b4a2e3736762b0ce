"""Any order of inserting gives back exactly what was inserted, pixel for pixel.

The machine below does what a bench does to a store, in any order: several episodes at once, gaps, truncation, whole
trajectories, eviction at capacity, late facts, deletion, reopening. After every step of it, every field of every step
is compared with what was inserted.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hilt.core.tree import flatten
from hilt.replay import Log, Schema
from hilt.replay.key_ranges import key_of
from tests.effort import rounds

IMAGE = (20, 20, 3)  # 1,200 bytes: stored as frames
SOURCES = ("policy", "human", "demo", "random")


def observation(number: int) -> dict[str, Any]:
    """A picture and a state that no other number has."""
    image = np.full(IMAGE, number % 251, np.uint8)
    image[0, 0] = np.frombuffer(np.uint32(number).tobytes()[:3], np.uint8)
    return {"state": np.array([number, -number], np.float32), "image": image}


def transition(
    now: int, after: int, source: int = 0, terminated: bool = False, truncated: bool = False
) -> dict[str, Any]:
    return {
        "observations": observation(now),
        "actions": np.full(3, now * 0.5, np.float32),
        "rewards": np.float32(now),
        "next_observations": observation(after),
        "terminated": terminated,
        "truncated": truncated,
        "source": source,
        "policy_version": now,
    }


SCHEMA = Schema.of({k: v for k, v in transition(0, 1).items() if k not in ("source", "policy_version")})


def same(a: dict[str, Any], b: dict[str, Any], i: int) -> None:
    """Element `i` of batch `a` is the step `b`."""
    left, right = flatten(a), flatten(b)
    assert set(left) == set(right)
    for path, values in left.items():
        assert np.array_equal(values[i], right[path]), path


class Bench(RuleBasedStateMachine):
    """A log beside a plain dictionary that says what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="hilt-test-")
        self.log = Log.create(f"{self.folder}/log", SCHEMA, capacity_steps=60, segment_bytes=20_000, durability="never")
        self.expected: dict[int, dict[str, Any]] = {}  # key -> step
        self.order: list[int] = []  # trajectories by age
        self.running: list[tuple[Any, int]] = []  # (episode, number of its last observation)
        self.success: dict[int, bool] = {}
        self.fresh = 0
        self.views = self._views()

    def _views(self) -> dict[str, Any]:
        log = self.log
        return {
            "all": log.all(),
            "human": log.by_source("human"),
            "odd": log.where("rewards", lambda r: r.astype(int) % 2 == 1),
            "bright": log.where("observations/image", lambda x: x[:, 5, 5, 0] > 100),
            "success": log.successes(),
            "last": log.last(2),
            "human and last": log.by_source("human") & log.last(3),
            "odd or human": log.where("rewards", lambda r: r.astype(int) % 2 == 1) | log.by_source("human"),
            "all but human": log.all() - log.by_source("human"),
        }

    def next_number(self) -> int:
        self.fresh += 2
        return self.fresh

    @rule()
    @precondition(lambda self: len(self.running) < 3)
    def begin(self) -> None:
        self.running.append((self.log.episode(actor=f"actor {len(self.running)}"), self.next_number()))

    @rule(
        which=st.integers(0, 2),
        gap=st.booleans(),
        end=st.sampled_from(["no", "no", "no", "terminated", "truncated"]),
        source=st.integers(0, 3),
    )
    @precondition(lambda self: self.running)
    def step(self, which: int, gap: bool, end: str, source: int) -> None:
        place = which % len(self.running)
        episode, last = self.running[place]
        now = self.next_number() if gap else last
        after = self.next_number()
        step = transition(now, after, source, terminated=end == "terminated", truncated=end == "truncated")
        key = episode.append(step)
        if episode.trajectory not in self.order:
            self.order.append(episode.trajectory)
            self.order.sort()
        self.expected[key] = step
        self.running[place] = (episode, after)
        if end != "no":
            self.running.pop(place)
        self._forget_evicted()

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.running)
    def stop(self, which: int) -> None:
        episode, _ = self.running.pop(which % len(self.running))
        episode.end()
        self._forget_evicted()

    @rule(length=st.integers(1, 6), width=st.integers(1, 4), source=st.integers(0, 3))
    def add(self, length: int, width: int, source: int) -> None:
        chains = [[self.next_number() for _ in range(length + 1)] for _ in range(width)]
        steps = [transition(chains[b][t], chains[b][t + 1], source) for t in range(length) for b in range(width)]
        flat = [flatten(s) for s in steps]
        batch: dict[str, Any] = {}
        for path in flat[0]:
            values = np.stack([np.asarray(f[path]) for f in flat])
            values = values.astype(SCHEMA.columns[path].dtype)
            node = batch
            *parents, name = path.split("/")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = values.reshape(length, width, *values.shape[1:])
        number = self.log.add(batch)
        self.order.append(number)
        for offset, step in enumerate(steps):
            self.expected[key_of(number, offset)] = step
        self._forget_evicted()

    @rule(which=st.integers(0, 50), value=st.booleans())
    @precondition(lambda self: self.order)
    def mark(self, which: int, value: bool) -> None:
        trajectory = self.order[which % len(self.order)]
        self.log.annotate(trajectory, success=value)
        self.success[trajectory] = value

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: [t for t in self.order if t not in {e.trajectory for e, _ in self.running}])
    def delete(self, which: int) -> None:
        ended = [t for t in self.order if t not in {e.trajectory for e, _ in self.running}]
        trajectory = ended[which % len(ended)]
        self.log.delete(trajectory)
        self._forget(trajectory)

    @rule(which=st.integers(0, 50), value=st.integers(1000, 2000))
    @precondition(lambda self: self.expected)
    def relabel(self, which: int, value: int) -> None:
        key = sorted(self.expected)[which % len(self.expected)]
        self.log.relabel(key >> 32, "rewards", [value], first=key & 0xFFFFFFFF)
        self.expected[key] = {**self.expected[key], "rewards": np.float32(value)}

    @rule()
    def reopen(self) -> None:
        for episode, _ in self.running:
            episode.end()
        self.running = []
        self.log.close()
        self.log = Log.open(f"{self.folder}/log")
        assert self.log.recovery.torn_steps == 0
        self.views = self._views()
        self._forget_evicted()

    @invariant()
    def everything_is_right(self) -> None:
        keys = self.views["all"].keys()
        assert sorted(self.expected) == keys.tolist()
        assert len(self.log) == len(self.expected)
        if len(keys):
            shuffled = np.random.default_rng(len(keys)).permutation(keys)
            batch = self.log.read(shuffled)
            for i, key in enumerate(shuffled.tolist()):
                same(batch, self.expected[key], i)

    @invariant()
    def views_are_right(self) -> None:
        kept = sorted(self.expected)
        human = {k for k in kept if self.expected[k]["source"] == 1}
        odd = {k for k in kept if int(self.expected[k]["rewards"]) % 2 == 1}
        trajectories = sorted({k >> 32 for k in kept})
        last = {n: {k for k in kept if k >> 32 in trajectories[-n:]} for n in (2, 3)}
        wanted = {
            "human": human,
            "odd": odd,
            "bright": {k for k in kept if self.expected[k]["observations"]["image"][5, 5, 0] > 100},
            "success": {k for k in kept if self.success.get(k >> 32)},
            "last": last[2],
            "human and last": human & last[3],
            "odd or human": odd | human,
            "all but human": set(kept) - human,
        }
        for name, keys in wanted.items():
            assert self.views[name].keys().tolist() == sorted(keys), name
            assert len(self.views[name]) == len(keys), name

    def _forget(self, trajectory: int) -> None:
        self.expected = {k: s for k, s in self.expected.items() if k >> 32 != trajectory}
        if trajectory in self.order:
            self.order.remove(trajectory)

    def _forget_evicted(self) -> None:
        """The oldest ended trajectories go while there are too many steps; then the
        first steps of the oldest running one."""
        running = {e.trajectory for e, _ in self.running}
        while len(self.expected) > 60:
            ended = [t for t in self.order if t not in running]
            if ended:
                self._forget(ended[0])
            else:  # at least a sixteenth of the capacity at once
                oldest = [k for k in sorted(self.expected) if k >> 32 == min(self.expected) >> 32]
                for key in oldest[: max(60 // 16, len(self.expected) - 60)]:
                    del self.expected[key]

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)


TestBench = Bench.TestCase
TestBench.settings = settings(
    max_examples=rounds(8, 100),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


@pytest.mark.parametrize("order", ["as recorded", "reversed", "shuffled"])
def test_chunks_reloaded_in_any_order(tmp_path: Any, order: str) -> None:
    """HIL-SERL's loading loop inserts pickles in glob order: every image still belongs to its own step."""
    log = Log.create(tmp_path / "log", SCHEMA, durability="never")
    steps = [transition(t, t + 1, terminated=t % 10 == 9) for t in range(50)]
    chunks = [steps[i : i + 7] for i in range(0, 50, 7)]
    if order == "reversed":
        chunks.reverse()
    if order == "shuffled":
        chunks = [chunks[i] for i in np.random.default_rng(0).permutation(len(chunks))]
    for chunk in chunks:
        episode = log.episode()
        for step in chunk:
            if episode.ended:
                episode = log.episode()
            episode.append(step)
        episode.end()
    batch = log.read(log.all().keys())
    for i in range(50):
        same(batch, steps[int(batch["rewards"][i])], i)
