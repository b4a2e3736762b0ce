"""Document 001, TF-Agents' tools from RLDS to Reverb, section by section, without
TensorFlow; with it where a test is marked `peers`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, MissingPackageError, SchemaError
from hilt.formats.rlds import (
    InvalidArgumentError,
    Trajectory,
    convert_rlds_to_trajectories,
    create_log_schema,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
)
from hilt.replay import Log

FIRST, MID, LAST = 0, 1, 2


def step(number: int, **flags: bool) -> dict[str, Any]:
    """A step of half-cheetah, with the fields, types and shapes of the document."""
    return {
        "action": np.full(6, number, np.float32),
        "discount": np.float32(1),
        "is_first": np.bool_(flags.get("first", False)),
        "is_last": np.bool_(flags.get("last", False)),
        "is_terminal": np.bool_(flags.get("terminal", False)),
        "observation": np.full(17, number, np.float32),
        "reward": np.float32(number),
    }


def episode(first: int, length: int, terminal: bool = False) -> dict[str, Any]:
    last = length - 1
    return {
        "steps": [step(first + i, first=i == 0, last=i == last, terminal=terminal and i == last) for i in range(length)]
    }


DATA = [episode(0, 3), episode(10, 2, terminal=True)]
NUMBERS = [0, 1, 2, 10, 11]

# 从数据集创建轨迹规范: create_trajectory_data_spec


def test_the_spec_of_trajectories_has_the_types_and_shapes_of_the_steps():
    spec = create_trajectory_data_spec(DATA)
    assert isinstance(spec, Trajectory) and spec.policy_info == ()
    fields = [getattr(spec, name) for name in ("observation", "action", "reward", "discount")]
    assert [(field.dtype.name, field.shape) for field in fields] == [
        ("float32", shape) for shape in ((17,), (6,), (), ())
    ]
    assert spec.step_type.dtype == spec.next_step_type.dtype == np.int32


@pytest.mark.parametrize(
    "function",
    [create_trajectory_data_spec, convert_rlds_to_trajectories, lambda data: push_rlds_to_reverb(data, None)],
)
def test_data_without_steps_is_a_value_error(function: Any):
    for data in ([], [{"steps": []}], [{"nothing": 1}]):
        with pytest.raises(ValueError, match="No dataset representing RLDS steps exist in the data"):
            function(data)


# 将 RLDS 数据转换为 TF Agents 轨迹: convert_rlds_to_trajectories; 转换过程: flattened, in overlapping pairs


def test_each_step_becomes_a_trajectory_with_the_type_of_the_next():
    found = list(convert_rlds_to_trajectories(DATA))
    assert [int(one.observation[0]) for one in found] == NUMBERS, "episodes are flattened"
    assert [(int(one.step_type), int(one.next_step_type)) for one in found] == [
        (FIRST, MID),
        (MID, LAST),
        (LAST, FIRST),
        (FIRST, LAST),
        (LAST, FIRST),  # a padding step of type first is behind the last episode
    ]
    assert [float(one.discount) for one in found] == [1, 1, 1, 1, 0], (
        "the third step truncates, the last one terminates"
    )
    assert [float(one.reward) for one in found] == NUMBERS and found[1].action.tolist() == [1] * 6


def test_policy_info_is_made_from_neighboring_steps():
    found = convert_rlds_to_trajectories(DATA, lambda now, after: {"ahead": after["reward"] - now["reward"]})
    assert [float(one.policy_info["ahead"]) for one in found][:3] == [1, 1, 8]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([{"steps": [step(0, first=True), step(1)]}, episode(5, 2)], "Mid step should not be followed by a first step"),
        (
            [{"steps": [step(0, first=True), step(1, terminal=True), step(2, last=True)]}],
            "Terminal step must be the last step",
        ),
        (
            [episode(0, 2), {"steps": [step(5), step(6, last=True)]}],
            "Last step of an episode must be followed by a first step",
        ),
    ],
)
def test_an_episode_that_ends_terminates_or_begins_wrongly_is_an_invalid_argument(
    wrong: Any, said: str, tmp_path: Path
):
    with pytest.raises(InvalidArgumentError, match=said):
        list(convert_rlds_to_trajectories(wrong))
    with Log.create(tmp_path / "log", create_log_schema(DATA)) as log, pytest.raises(InvalidArgumentError, match=said):
        push_rlds_to_reverb(wrong, log)


# What is returned is a dataset, with the methods of tf.data


def test_trajectories_are_mapped_taken_and_batched_as_with_tf_data():
    found = convert_rlds_to_trajectories(DATA)
    assert list(found.map(lambda one: float(one.reward)).take(3)) == [0, 1, 2]
    batches = list(found.batch(2))
    assert [one.observation.shape for one in batches] == [(2, 17), (2, 17), (1, 17)] and isinstance(
        batches[0], Trajectory
    )
    assert (
        batches[0].policy_info == ()
        and batches[1].step_type.tolist() == [LAST, FIRST]
        and batches[1].reward.dtype == np.float32
    )
    assert len(list(found.batch(2, drop_remainder=True))) == 2
    pairs = found.map(lambda one: (one.reward, one.discount))
    assert list(pairs.map(lambda reward, discount: float(reward * discount))) == [0, 1, 2, 10, 0]
    assert len(list(found.take(-1))) == 5 and len(list(found.as_numpy_iterator())) == 5
    nested = convert_rlds_to_trajectories(
        [{"steps": [{**one, "observation": {"state": one["observation"]}} for one in DATA[0]["steps"]]}]
    )
    assert next(iter(nested.batch(3))).observation["state"].shape == (3, 17)


def test_trajectories_are_shuffled_through_a_buffer():
    def order(dataset: Any) -> list[float]:
        return [float(one.reward) for one in dataset]

    data = [episode(100 * i, 20) for i in range(3)]
    plain = order(convert_rlds_to_trajectories(data))
    shuffled = convert_rlds_to_trajectories(data).shuffle(10, seed=0)
    first, second = order(shuffled), order(shuffled)
    assert sorted(first) == sorted(second) == sorted(plain) and first != plain and first != second
    assert order(convert_rlds_to_trajectories(data).shuffle(10, seed=0)) == first
    still = convert_rlds_to_trajectories(data).shuffle(10, seed=0, reshuffle_each_iteration=False)
    assert order(still) == order(still) == first
    assert all(plain.index(one) < place + 10 for place, one in enumerate(first)), "from the next ten only"
    assert order(convert_rlds_to_trajectories(data).shuffle(1, seed=0)) == plain, "as in tf.data"
    assert sorted(order(convert_rlds_to_trajectories(data).shuffle(1000))) == sorted(plain)


def test_datasets_read_only_what_is_asked_for():
    read: list[int] = []

    def episodes() -> Iterator[dict[str, Any]]:
        for i in range(100):
            read.append(i)
            yield episode(10 * i, 2)

    assert len(list(convert_rlds_to_trajectories(episodes()).take(4).batch(2))) == 2 and len(read) < 5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda data: data.batch(0), "batch: batch_size: expected a whole number from 1 on, got 0"),
        (lambda data: data.take("many"), "take: count: expected a whole number from -1 on, got 'many'"),
        (lambda data: data.shuffle(None), "shuffle: buffer_size: expected a whole number from 1 on, got None"),
        (lambda data: data.map(3), "map: expected a function of an element, got 3"),
    ],
)
def test_arguments_that_mean_nothing_are_explained(call: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        call(convert_rlds_to_trajectories(DATA))


def test_a_batch_of_unequal_shapes_names_the_field():
    uneven = convert_rlds_to_trajectories(DATA).map(lambda one: one._replace(observation=np.zeros(int(one.reward))))
    with pytest.raises(
        SchemaError, match=r"observation: expected one shape in a batch, got \(0,\), \(1,\); make them equal with map"
    ):
        list(uneven.batch(2))


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_a_tf_dataset_without_tensorflow_is_an_error_with_the_cure():
    with pytest.raises(
        MissingPackageError, match=r"as_tf_dataset=True needs the package 'tensorflow', .*pip install tensorflow"
    ):
        convert_rlds_to_trajectories(DATA, as_tf_dataset=True)


@pytest.mark.peers
def test_a_tf_dataset_has_the_same_trajectories():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = pytest.importorskip("tensorflow")
    found = convert_rlds_to_trajectories(DATA, lambda now, after: {"ahead": after["reward"]}, as_tf_dataset=True)
    assert isinstance(found, tf.data.Dataset) and found.element_spec.observation == tf.TensorSpec((17,), tf.float32)
    assert [float(one.reward) for one in found] == NUMBERS == [float(one.reward) for one in found]
    batch = next(iter(found.shuffle(5, seed=0).batch(5)))
    assert batch.observation.shape == (5, 17) and batch.policy_info["ahead"].shape == (5,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Mid step should not be followed by a first step"):
        list(
            convert_rlds_to_trajectories([{"steps": [step(0, first=True), step(1)]}, episode(5, 2)], as_tf_dataset=True)
        )


# 将 RLDS 数据推送到 Reverb: push_rlds_to_reverb


class Observer:
    """A Reverb observer as far as its interface goes; `tests/peers/test_reverb.py` has the real one."""

    def __init__(self, signature: Any):
        self.signature, self.got = signature, list[Any]()

    def get_table_signature(self) -> Any:
        return Trajectory(*(None if spec == () else self._outer(spec) for spec in self.signature))

    def _outer(self, spec: Any) -> Any:
        return type(spec)(spec.dtype, (None, *spec.shape), spec.name)

    def __call__(self, trajectory: Any) -> None:
        self.got.append(trajectory)


def test_pushing_counts_trajectories_and_compares_signatures(tmp_path: Path):
    observer = Observer(create_trajectory_data_spec(DATA))
    assert push_rlds_to_reverb(DATA, observer) == 5 == len(observer.got)
    other = [{"steps": [{**one, "observation": np.zeros(3, np.float32)} for one in DATA[0]["steps"]]}]
    with pytest.raises(
        ValueError, match=r"Replay buffer table signature spec should match RLDS data spec.*observation"
    ):
        push_rlds_to_reverb(other, observer)
    with Log.create(tmp_path / "log", create_log_schema(DATA)) as log:
        assert push_rlds_to_reverb(DATA, log) == 5 and len(log) == 3, (
            "transitions: the last step of an episode is where the last one ends"
        )


# RLDS 步骤如何映射到 TF Agents 轨迹


def test_what_a_last_step_has_beside_its_observation_means_nothing():
    data = [episode(0, 3, terminal=True)]
    data[0]["steps"][-1] |= {
        "reward": np.float32(np.nan),
        "action": np.full(6, np.nan, np.float32),
        "discount": np.float32(np.nan),
    }
    last = list(convert_rlds_to_trajectories(data))[-1]
    assert (float(last.reward), float(last.discount), last.action.tolist()) == (0, 0, [0] * 6)
