"""n-step returns, sequences, stacked frames and whole episodes, against a plain model of what follows what."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.core.tree import flatten
from hilt.replay import Log, Schema
from hilt.replay.key_ranges import key_of
from hilt.replay.sampling import Chunks, NStep, Sampler
from tests.effort import rounds
from tests.replay.toy_steps import IMAGE, SCHEMA, check, new_log, numbers, observation, step, trajectory, write

END = st.sampled_from(["", "", "", "terminated", "truncated"])
STEP = st.tuples(st.booleans(), END)  # whether there is a gap before it, and how it ends
EPISODE = st.lists(STEP, min_size=1, max_size=7)
WHOLE = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(STEP, min_size=length, max_size=length), min_size=1, max_size=3)
)
RECORDED = st.lists(st.one_of(EPISODE, WHOLE), min_size=1, max_size=4)
QUICK = settings(max_examples=rounds(12, 100), deadline=None, suppress_health_check=list(HealthCheck))


class Model:
    """The steps of a log by key, and which of them follow which, as one would write it down by hand."""

    def __init__(self, log: Log):
        self.log = log
        self.steps: dict[int, dict[str, Any]] = {}
        self.width: dict[int, int] = {}
        self._number = 0

    def chain(self, plan: list[tuple[bool, str]]) -> list[dict[str, Any]]:
        self._number += 10
        now, made = self._number, []
        for gap, end in plan:
            now = now + 2 if gap else now
            made.append(
                step(now, now + 1, terminated=end == "terminated", truncated=end == "truncated", policy_version=0)
            )
            now += 1
        self._number = now
        return made

    def record(self, plans: list[Any]) -> None:
        """A list of steps is appended one by one, and ends with its first end; a
        list of lists is added as ``[T, B]``."""
        for plan in plans:
            if isinstance(plan[0], tuple):
                ends = [i for i, (_, end) in enumerate(plan) if end]
                chain = self.chain(plan[: ends[0] + 1] if ends else plan)
                for key, made in zip(write(self.log, chain), chain, strict=True):
                    self.steps[key], self.width[key] = made, 1
            else:
                chains = [self.chain(part) for part in plan]
                number, width = self.log.add(trajectory(chains)), len(chains)
                for b, chain in enumerate(chains):
                    for t, made in enumerate(chain):
                        self.steps[key_of(number, t * width + b)] = made
                        self.width[key_of(number, t * width + b)] = width

    def follower(self, key: int) -> int | None:
        one, other = self.steps[key], key + self.width[key]
        if one["terminated"] or one["truncated"] or other not in self.steps:
            return None
        return (
            other
            if np.array_equal(one["next_observations"]["image"], self.steps[other]["observations"]["image"])
            else None
        )

    def window(self, key: int, length: int) -> list[int]:
        keys = [key]
        while len(keys) < length and (following := self.follower(keys[-1])) is not None:
            keys.append(following)
        return keys

    def before(self, key: int) -> int | None:
        other = key - self.width[key]
        return other if other in self.steps and self.follower(other) == key else None


@contextmanager
def recorded(plans: list[Any], **settings: Any) -> Iterator[Model]:
    folder = Path(tempfile.mkdtemp(prefix="hilt-test-"))
    try:
        with new_log(folder, **settings) as log:
            model = Model(log)
            model.record(plans)
            yield model
    finally:
        shutil.rmtree(folder)


# -- n-step
# ----------------------------------------------------------------------------------------------------------------------


@QUICK
@given(RECORDED, st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.sampled_from([None, 6_000]))
def test_n_step_returns(plans: list[Any], n: int, discount: float, segment_bytes: int | None):
    with recorded(plans, segment_bytes=segment_bytes) as model:
        batch = model.log.all().sampler(n_step=n, discount=discount, seed=0).sample(40)
        for i, key in enumerate(batch.steps.tolist()):
            window = model.window(key, n)
            first, last = model.steps[key], model.steps[window[-1]]
            total = sum(discount**k * float(model.steps[other]["rewards"]) for k, other in enumerate(window))
            assert np.isclose(batch["rewards"][i], total)
            assert batch["n_steps"][i] == len(window)
            assert batch["discounts"][i] == np.float32(0.0 if last["terminated"] else discount ** len(window))
            ours = {name: value for name, value in batch.items() if name not in ("rewards", "n_steps", "discounts")}
            ends = {name: last[name] for name in ("next_observations", "terminated", "truncated")}
            check(ours, i, {name: value for name, value in (first | ends).items() if name != "rewards"})


def test_n_step_by_hand(tmp_path: Path):
    """1 + 0.5 * 2 + 0.25 * 3, and what termination, truncation and the end of the record do to it."""
    with new_log(tmp_path) as log:
        running = log.episode()
        for n in (1, 2, 3, 4):
            running.append(step(n))
        write(log, [step(11), step(12, terminated=True)])
        write(log, [step(21), step(22, truncated=True)])
        sampler = log.all().sampler("fifo", max_times_sampled=1, n_step=3, discount=0.5)
        batch = sampler.sample(8)
        assert batch["rewards"].tolist() == [2.75, 4.5, 5.0, 4.0, 17.0, 12.0, 32.0, 22.0]
        assert batch["n_steps"].tolist() == [3, 3, 2, 1, 2, 1, 2, 1]
        assert batch["discounts"].tolist() == [0.125, 0.125, 0.25, 0.5, 0.0, 0.0, 0.25, 0.5]
        assert batch["next_observations"]["state"][:, 0].tolist() == [4, 5, 5, 5, 13, 13, 23, 23]
        assert batch["observations"]["state"][:, 0].tolist() == [1, 2, 3, 4, 11, 12, 21, 22]
        running.end()


def test_n_step_with_whole_columns(tmp_path: Path):
    """Those of all n steps, beside the sum; the last one is repeated where the sum ends earlier."""
    with new_log(tmp_path) as log:
        write(log, [step(1), step(2), step(3, truncated=True)])
        sampler = Sampler(log.all(), "fifo", max_times_sampled=1, assembly=NStep(2, 0.5, whole=("actions",)))
        batch = sampler.sample(3)
        actions = log.read(log.all().keys(), ["actions"])["actions"]
        assert np.array_equal(batch["actions"], actions[[[0, 1], [1, 2], [2, 2]]])
        assert batch["rewards"].tolist() == [2.0, 3.5, 3.0] and batch["n_steps"].tolist() == [2, 2, 1]
        out = {"actions": np.zeros((3, 2, *actions.shape[1:]), actions.dtype)}
        again = Sampler(log.all(), "fifo", max_times_sampled=1, assembly=NStep(2, 0.5, whole=("actions",)))
        assert again.sample(3, out=out)["actions"] is out["actions"] and np.array_equal(
            out["actions"], batch["actions"]
        )


def test_n_step_of_hil_serl_columns(tmp_path: Path):
    """Masks and dones are those of the last step, as the learner's target needs them."""
    columns = {**dict(SCHEMA.columns), "masks": (np.float32, ()), "dones": (bool, ())}
    with new_log(tmp_path, Schema.declare(columns)) as log:
        write(log, [step(n, masks=float(n < 2), dones=n == 2, terminated=n == 2) for n in range(3)])
        batch = log.all().sampler("fifo", max_times_sampled=1, n_step=2).sample(3)
        assert batch["masks"].tolist() == [1, 0, 0]
        assert batch["dones"].tolist() == [False, True, True]
        assert np.allclose(batch["discounts"], [0.99**2, 0, 0])  # 0.99 unless said


def test_n_step_with_keys_and_out(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 6))
        out = {
            "rewards": np.zeros(4, np.float32),
            "discounts": np.zeros(4, np.float32),
            "n_steps": np.zeros(4, np.int64),
        }
        out_obs = {"next_observations": {"image": np.zeros((4, *IMAGE), np.uint8)}}
        sampler = log.all().sampler(n_step=2, discount=1.0, seed=0)
        batch = sampler.sample(4, keys=["rewards", "next_observations"], out={**out, **out_obs})
        assert set(flatten(batch)) == {
            "rewards",
            "discounts",
            "n_steps",
            "next_observations/image",
            "next_observations/state",
        }
        for name, array in out.items():
            assert batch[name] is array
        assert batch["next_observations"]["image"] is out_obs["next_observations"]["image"]
        first = (batch.steps & 0xFFFFFFFF).astype(int)
        assert out["rewards"].tolist() == [n + min(n + 1, 5) * (n < 5) for n in first.tolist()]
        assert out_obs["next_observations"]["image"][:, 5, 5, 0].tolist() == [min(n + 2, 6) for n in first.tolist()]
        assert "rewards" not in sampler.sample(4, keys=["actions"])


def test_n_step_needs_a_reward(tmp_path: Path):
    with new_log(tmp_path, Schema.declare({"observations": (np.float32, (2,)), "rewards": (np.float32, (2,))})) as log:
        with log.episode() as episode:
            episode.append({"observations": np.zeros(2, np.float32), "rewards": np.zeros(2, np.float32)})
        with pytest.raises(
            SchemaError, match=r"rewards: n-step returns need a column with one number per step, got float32 \(2,\)"
        ):
            log.all().sampler(n_step=2).sample(1)
    with new_log(tmp_path / "other", Schema.declare({"observations": (np.float32, (2,))})) as log:
        with log.episode() as episode:
            episode.append({"observations": np.zeros(2, np.float32)})
        with pytest.raises((SchemaError, UnknownNameError), match="rewards"):
            log.all().sampler(n_step=2).sample(1)


def test_n_step_sees_relabeled_rewards(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
        log.relabel(0, "rewards", [100.0], first=1)
        batch = log.all().sampler("fifo", max_times_sampled=1, n_step=2, discount=0.5).sample(3)
        assert batch["rewards"].tolist() == [50.0, 101.0, 2.0]


# -- sequences
# ---------------------------------------------------------------------------------------------------------------------


@QUICK
@given(RECORDED, st.integers(1, 6), st.sampled_from([None, 6_000]))
def test_sequences(plans: list[Any], length: int, segment_bytes: int | None):
    with recorded(plans, segment_bytes=segment_bytes) as model:
        batch = model.log.all().sampler(sequence_length=length, seed=0).sample(30)
        flat = flatten(batch)
        for i, key in enumerate(batch.steps.tolist()):
            window = model.window(key, length)
            assert batch["mask"][i].tolist() == [t < len(window) for t in range(length)]
            for t in range(length):
                wanted = flatten(model.steps[window[t]]) if t < len(window) else None
                for path, values in flat.items():
                    if path != "mask":
                        assert np.array_equal(values[i, t], wanted[path] if wanted else np.zeros_like(values[i, t])), (
                            path
                        )


@QUICK
@given(RECORDED, st.integers(1, 4), st.sampled_from([None, 6_000]))
def test_chunks_are_the_actions_of_the_sequence_and_the_rest_of_its_first_step(
    plans: list[Any], length: int, segment_bytes: int | None
):
    with recorded(plans, segment_bytes=segment_bytes) as model:
        columns = ["actions", "observations/state", "rewards"]
        chunks = model.log.all().sampler(assembly=Chunks(length), seed=0).sample(30, keys=columns)
        whole = model.log.all().sampler(sequence_length=length, seed=0).sample(30, keys=columns)
        np.testing.assert_array_equal(chunks.steps, whole.steps)
        np.testing.assert_array_equal(chunks["mask"], whole["mask"])
        np.testing.assert_array_equal(chunks["actions"][chunks["mask"]], whole["actions"][whole["mask"]])
        for given in (lambda batch: batch["observations"]["state"], lambda batch: batch["rewards"]):
            np.testing.assert_array_equal(given(chunks), given(whole)[:, 0])


def test_chunks_end_with_the_view_that_they_are_within(tmp_path: Path):
    with new_log(tmp_path / "log") as log:
        sources = [Source.POLICY, Source.HUMAN, Source.HUMAN, Source.POLICY, Source.HUMAN]
        with log.episode() as episode:
            for t, source in enumerate(sources):
                episode.append(step(t, t + 1, source=source))
        human = log.by_source("human")
        batch = human.sampler("fifo", max_times_sampled=1, assembly=Chunks(3, human)).sample(3, keys=["actions"])
        assert batch["mask"].tolist() == [[True, True, False], [True, False, False], [True, False, False]]
        whole = human.sampler("fifo", max_times_sampled=1, assembly=Chunks(3)).sample(3, keys=["actions"])
        assert whole["mask"].tolist() == [[True, True, True], [True, True, True], [True, False, False]]
        np.testing.assert_array_equal(batch["actions"], whole["actions"])
        with pytest.raises(ConfigError, match="chunks: expected a length of at least 1 action, got 0"):
            Chunks(0)


def test_sequences_into_arrays(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 5))
        sampler = log.all().sampler("fifo", max_times_sampled=1, sequence_length=3)
        image, mask = np.full((4, 3, *IMAGE), 9, np.uint8), np.zeros((4, 3), bool)
        batch = sampler.sample(4, out={"observations": {"image": image}, "mask": mask})
        assert batch["observations"]["image"] is image and batch["mask"] is mask
        assert image[:, :, 5, 5, 0].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0]]
        assert mask.tolist() == [[True] * 3] * 3 + [[True, True, False]]
        for wrong in (np.zeros((3, 4, *IMAGE), np.uint8), np.zeros((12, *IMAGE), np.uint8)):  # as many elements
            with pytest.raises(
                SchemaError, match=r"out\['observations/image'\]: expected contiguous uint8 \(4, 3, 20, 20, 3\)"
            ):
                sampler.sample(4, out={"observations": {"image": wrong}})


def test_without_next_observations_steps_follow_as_they_were_recorded(tmp_path: Path):
    """Nothing says that there is a gap, whether the steps came one by one or as a whole trajectory."""
    schema = Schema.declare({"observations": (np.float32, (1,)), "rewards": (np.float32, ())})
    steps = [{"observations": np.float32([n]), "rewards": np.float32(n), "truncated": n == 3} for n in range(6)]
    with new_log(tmp_path, schema) as log:
        write(log, steps[:4])
        columns = {name: np.stack([np.asarray(s[name]) for s in steps])[:, None] for name in steps[0]}
        log.add(columns)
        batch = log.all().sampler("fifo", max_times_sampled=1, sequence_length=3).sample(10)
        assert batch["mask"].sum(axis=1).tolist() == [3, 3, 2, 1, 3, 3, 2, 1, 2, 1]


# -- stacked frames
# ----------------------------------------------------------------------------------------------------------------


@QUICK
@given(RECORDED, st.integers(1, 4), st.sampled_from([None, 6_000]))
def test_stacked_frames(plans: list[Any], frames: int, segment_bytes: int | None):
    with recorded(plans, segment_bytes=segment_bytes) as model:
        batch = model.log.all().sampler(stack=(frames, ["observations/image"]), seed=0).sample(30)
        for i, key in enumerate(batch.steps.tolist()):
            back = [key]
            while len(back) < frames:
                earlier = model.before(back[0])
                back.insert(0, back[0] if earlier is None else earlier)
            images = [model.steps[k]["observations"]["image"] for k in back]
            after = model.steps[key]["next_observations"]["image"]
            assert np.array_equal(batch["observations"]["image"][i], np.stack(images))
            assert np.array_equal(batch["next_observations"]["image"][i], np.stack([*images[1:], after]))
            assert np.array_equal(batch["observations"]["state"][i], model.steps[key]["observations"]["state"])


def test_stacked_frames_into_arrays_and_by_name(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 5))
        sampler = log.all().sampler("fifo", max_times_sampled=1, stack=(2, "observations/state"))
        out = {"observations": {"state": np.zeros((3, 2, 2), np.float32)}, "rewards": np.zeros(3, np.float32)}
        batch = sampler.sample(3, keys=["observations/state", "rewards"], out=out)
        assert batch["observations"]["state"] is out["observations"]["state"] and batch["rewards"] is out["rewards"]
        assert out["observations"]["state"][:, :, 0].tolist() == [[0, 0], [0, 1], [1, 2]]
        assert set(flatten(batch)) == {"observations/state", "rewards"}
    with new_log(tmp_path / "other") as log:
        write(log, numbers(0, 2))
        with pytest.raises(
            SchemaError, match="actions: only observations with a next observation can be stacked: observations/state, "
        ):
            log.all().sampler(stack=(2, ["actions"])).sample(1)


# -- whole episodes
# ----------------------------------------------------------------------------------------------------------------


def test_whole_episodes(tmp_path: Path):
    with new_log(tmp_path) as log:
        lengths = [3, 1, 5]
        for number, length in enumerate(lengths):
            write(log, numbers(10 * number, length))
        batch = log.all().sampler(episodes=True, seed=0).sample(30)
        drawn = (batch.steps >> 32).astype(int)
        assert set(drawn.tolist()) == {0, 1, 2}
        assert np.allclose(batch.probabilities, 1 / 3)
        for i, number in enumerate(drawn.tolist()):
            assert batch["mask"][i].tolist() == [t < lengths[number] for t in range(5)]
            for t in range(5):
                number_of = 10 * number + t
                wanted = flatten(step(number_of)) if t < lengths[number] else None
                for path, values in flatten(batch).items():
                    if path != "mask":
                        assert np.array_equal(values[i, t], wanted[path] if wanted else np.zeros_like(values[i, t])), (
                            path
                        )
        with pytest.raises(
            ConfigError,
            match="out= cannot be used with whole episodes: their length is not known before they are drawn",
        ):
            log.all().sampler(episodes=True).sample(1, out={"rewards": np.zeros((1, 5), np.float32)})


def test_the_steps_of_whole_episodes_can_be_read(tmp_path: Path):
    """Also of an episode that lost its first steps, and in a view that shows only some."""
    with new_log(tmp_path, capacity_steps=20) as log:
        running = log.episode()
        for n in range(30):
            running.append(step(n, source=n % 2))
        assert len(log) <= 20
        batch = log.by_source("human").sampler(episodes=True, seed=0).sample(2)
        assert batch["mask"].sum(axis=1).tolist() == [len(log)] * 2
        read = log.read(batch.steps)
        assert read["source"].tolist() == [1, 1]
        running.end()


def test_a_trajectory_of_many_is_given_flat(tmp_path: Path):
    with new_log(tmp_path) as log:
        log.add(trajectory([numbers(0, 3), numbers(100, 3)]))
        batch = log.all().sampler(episodes=True).sample(1)
        assert batch["rewards"].tolist() == [[0, 100, 1, 101, 2, 102]]


# -- chains over the edges of what is kept
# -------------------------------------------------------------------------------------------


def test_chains_end_where_steps_were_evicted(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=20, segment_bytes=6_000) as log:
        running = log.episode()
        for n in range(31):
            running.append(step(n))
        batch = log.all().sampler(stack=(3, ["observations/image"]), seed=0).sample(60)
        oldest = int(log.all().keys()[0] & 0xFFFFFFFF)
        assert oldest > 0
        for i, number in enumerate((batch.steps & 0xFFFFFFFF).tolist()):
            wanted = [max(oldest, number - back) for back in (2, 1, 0)]
            assert np.array_equal(
                batch["observations"]["image"][i], np.stack([observation(n)["image"] for n in wanted])
            )
        running.end()
