"""Ours beside TF-Agents, a real Reverb server and tensorflow_datasets, live.

Runs in a venv with `hilt[reverb]`, which `make test-peers` makes:

    python -m pytest -m peers tests/peers/test_rlds.py
"""

from __future__ import annotations

import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-peers makes the venv")
reverb = pytest.importorskip(
    "reverb", reason="no dm-reverb: it has wheels for Linux on x86-64 and Python up to 3.11 only"
)
tfds = pytest.importorskip("tensorflow_datasets")

import ml_dtypes  # noqa: E402
from tf_agents.replay_buffers import reverb_replay_buffer, reverb_utils, rlds_to_reverb  # noqa: E402
from tf_agents.specs import tensor_spec  # noqa: E402

from hilt.core.tree import flatten  # noqa: E402
from hilt.formats import rlds  # noqa: E402
from hilt.formats.episodes import Episode, Notes  # noqa: E402
from hilt.formats.steps import to_steps  # noqa: E402
from hilt.formats.tensorflow_files.tfds_write import create  # noqa: E402
from hilt.replay import Log  # noqa: E402
from tests.formats.rlds_steps import LAST, MID, TERMINAL, as_numbers, episode, expected, random_episodes, step  # noqa: E402
from tests.formats.test_steps import random_episode  # noqa: E402
from tests.formats.toy_episodes import made, write  # noqa: E402

pytestmark = pytest.mark.peers
FIRST = 1000 * int(os.environ.get("HILT_FUZZ_SEED", "0"))


def as_dataset(episodes: list[dict[str, Any]]) -> Any:
    """A tf.data.Dataset of episodes."""
    stacked = [stack(one["steps"]) for one in episodes]
    return tf.data.Dataset.from_tensor_slices(
        {"steps": [tf.data.Dataset.from_tensor_slices(columns) for columns in stacked]}
    )


def stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: stack([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


def run(trajectories: Any) -> tuple[list[tuple[Any, ...]], str | None]:
    found = []
    try:
        for trajectory in trajectories:
            found.append(as_numbers(trajectory))
    except tf.errors.InvalidArgumentError as error:
        return found, next(text for text in (TERMINAL, MID, LAST) if text in str(error))
    return found, None


# Trajectories


def test_a_tf_dataset_is_asked_for_by_name() -> None:
    """Its elements are TF-Agents' trajectories, as those of the original."""
    episodes = random_episodes(np.random.default_rng(3), 0.0)
    found = rlds.convert_rlds_to_trajectories(episodes, as_tf_dataset=True)
    theirs = rlds_to_reverb.convert_rlds_to_trajectories(as_dataset(episodes))
    assert isinstance(found, tf.data.Dataset) and run(found) == run(theirs)
    assert tf.nest.map_structure(lambda spec: (spec.shape, spec.dtype), found.element_spec) == tf.nest.map_structure(
        lambda spec: (spec.shape, spec.dtype), theirs.element_spec
    )
    batch = next(iter(found.batch(2)))
    assert batch.observation.shape == (2, 2)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 40))
def test_conversion_is_that_of_tf_agents(seed: int) -> None:
    episodes = random_episodes(np.random.default_rng(seed), spoil=(0.0, 0.05, 0.2)[seed % 3])
    data = as_dataset(episodes)
    theirs = run(rlds_to_reverb.convert_rlds_to_trajectories(data))
    assert theirs == expected(episodes)  # the reference that the other tests use
    assert run(rlds.convert_rlds_to_trajectories(data)) == theirs
    assert run(rlds.convert_rlds_to_trajectories(episodes)) == theirs


def test_types_are_those_of_tf_agents() -> None:
    episodes = [episode(0, 3), episode(5, 1)]
    theirs = list(rlds_to_reverb.convert_rlds_to_trajectories(as_dataset(episodes)).as_numpy_iterator())
    for data in (episodes, as_dataset(episodes)):
        for ours, real in zip(rlds.convert_rlds_to_trajectories(data), theirs, strict=True):
            assert type(ours).__name__ == type(real).__name__ and ours._fields == real._fields
            assert [np.asarray(x).dtype for x in ours] == [np.asarray(x).dtype for x in real]
            assert [np.shape(x) for x in ours] == [np.shape(x) for x in real]


def test_nested_observations_are_wrong_upstream_and_right_here() -> None:
    steps = [step(i, i == 0, i == 2, observation={"a": np.full(3, i, np.float32)}) for i in range(3)]
    data = as_dataset([{"steps": steps}])
    theirs = [t.observation["a"].numpy().tolist() for t in rlds_to_reverb.convert_rlds_to_trajectories(data)]
    assert theirs[0] == [[0] * 3, [1] * 3]  # the pair, where the step should be
    assert [t.observation["a"].tolist() for t in rlds.convert_rlds_to_trajectories(data)] == [[0] * 3, [1] * 3, [2] * 3]


def test_specs_are_those_of_tf_agents() -> None:
    for observation in (np.zeros((2, 3), np.uint8), {"a": np.zeros(4), "b": {"c": np.int64(1)}}):
        episodes = [{"steps": [step(0, True, True, observation=observation)]}]
        theirs = rlds_to_reverb.create_trajectory_data_spec(as_dataset(episodes))
        for data in (episodes, as_dataset(episodes)):
            ours = rlds.create_trajectory_data_spec(data)
            assert ours == theirs and type(ours) is type(theirs)
            assert tensor_spec.add_outer_dim(ours) == tensor_spec.add_outer_dim(theirs)


def test_their_own_tests_pass_with_our_functions() -> None:
    """TF-Agents' test file, with ours in the place of theirs. Where ours say more in an error, the rest is cut off."""
    module: Any = __import__("tf_agents.replay_buffers.rlds_to_reverb_test", fromlist=["x"])

    def push(*arguments: Any) -> int:
        try:
            return rlds.push_rlds_to_reverb(*arguments)
        except ValueError as error:
            if str(error).startswith(rlds.MISMATCH):
                raise ValueError(rlds.MISMATCH) from error
            raise

    ours = types.SimpleNamespace(
        get_rlds_step_features=lambda: list(rlds.FEATURES),
        create_trajectory_data_spec=rlds.create_trajectory_data_spec,
        convert_rlds_to_trajectories=lambda *given: _Iterable(rlds.convert_rlds_to_trajectories(*given)),
        push_rlds_to_reverb=push,
    )
    module.rlds_to_reverb, theirs = ours, module.rlds_to_reverb
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        result = unittest.TextTestRunner(stream=sys.stderr, verbosity=0).run(suite)
    finally:
        module.rlds_to_reverb = theirs
    assert result.testsRun == 41 and result.wasSuccessful(), (result.failures + result.errors)[:1]


class _Iterable:
    """As much of a tf.data.Dataset as their tests use."""

    def __init__(self, trajectories: Any):
        self._trajectories = trajectories

    def __iter__(self) -> Iterator[Any]:
        return iter(self._trajectories)

    as_numpy_iterator = __iter__


# A real server


class Server:
    """A server with tables of one signature: `ours` and `theirs`."""

    def __init__(self, data: Any, sequence_length: int | None, signature: Any = "ours", policy_info: Any = ()):
        spec = rlds.create_trajectory_data_spec(data)._replace(policy_info=policy_info)
        signature = tensor_spec.add_outer_dim(spec) if signature == "ours" else signature
        self.length = sequence_length
        fifo = reverb.selectors.Fifo
        limiter = reverb.rate_limiters.MinSize
        self.server = reverb.Server(
            [reverb.Table(n, fifo(), fifo(), 1000, limiter(1), signature=signature) for n in ("ours", "theirs")]
        )
        self.client = self.server.localhost_client()

    def observer(self, table: str, **options: Any) -> Any:
        if self.length is None:
            return reverb_utils.ReverbAddEpisodeObserver(self.client, table, max_sequence_length=100, **options)
        return reverb_utils.ReverbAddTrajectoryObserver(self.client, table, self.length, **options)

    def items(self, table: str, observer: Any) -> list[list[Any]]:
        """Every item of a table, oldest first, field by field."""
        observer.flush()
        count = self.client.server_info()[table].current_size
        found = []
        for _ in range(count):
            (sample,) = self.client.sample(table, 1, emit_timesteps=False)
            found.append([np.asarray(x) for x in tf.nest.flatten(sample.data)])
            self.client.mutate_priorities(table, deletes=[sample.info.key])
        return found


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*arguments: Any, **options: Any) -> Server:
        servers.append(Server(*arguments, **options))
        return servers[-1]

    yield make
    for one in servers:
        one.server.stop()


def assert_same_items(ours: list[list[Any]], theirs: list[list[Any]]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert [x.dtype for x in a] == [x.dtype for x in b]
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


OBSERVERS = [
    (2, {}),
    (3, {"pad_end_of_episodes": True}),
    (3, {"pad_end_of_episodes": True, "tile_end_of_episodes": True}),
    (None, {}),
]


@pytest.mark.parametrize("given", ["list", "tf.data"])
@pytest.mark.parametrize(("length", "options"), OBSERVERS)
def test_what_is_sampled_back_is_what_tf_agents_pushes(
    serve: Any, length: int | None, options: dict[str, Any], given: str
) -> None:
    rng = np.random.default_rng(0)
    episodes = [*random_episodes(rng, 0), *random_episodes(rng, 0), episode(0, 1), episode(50, 4, terminal=False)]
    data = as_dataset(episodes)
    server = serve(episodes, length)
    ours, theirs = server.observer("ours", **options), server.observer("theirs", **options)
    count = sum(len(e["steps"]) for e in episodes)
    assert rlds.push_rlds_to_reverb(episodes if given == "list" else data, ours) == count
    assert rlds_to_reverb.push_rlds_to_reverb(data, theirs) == count  # into a table with our spec
    assert_same_items(server.items("ours", ours), server.items("theirs", theirs))


def test_episodes_sampled_back_are_the_episodes(serve: Any) -> None:
    """Nested observations, which TF-Agents cannot push."""
    steps = [
        step(
            i,
            i == 0,
            i == 4,
            i == 4,
            observation={"image": np.full((4, 4, 3), i, np.uint8), "state": np.full(2, i, np.float64)},
        )
        for i in range(5)
    ]
    episodes = [{"steps": steps}, {"steps": [{**one, "action": np.float32(-1)} for one in steps]}]
    server = serve(episodes, None)
    observer = server.observer("ours")
    assert rlds.push_rlds_to_reverb(episodes, observer) == 10
    items = server.items("ours", observer)
    assert len(items) == 2
    for item, one in zip(items, episodes, strict=True):
        step_type, image, state, action, next_type, reward, discount = item
        assert step_type.tolist() == [0, 1, 1, 1, 2] and next_type.tolist() == [1, 1, 1, 2, 0]
        assert (
            np.array_equal(image, stack([s["observation"]["image"] for s in one["steps"]])) and image.dtype == np.uint8
        )
        assert (
            np.array_equal(state, stack([s["observation"]["state"] for s in one["steps"]]))
            and state.dtype == np.float64
        )
        assert action.tolist() == [s["action"] for s in one["steps"]] and reward.tolist() == [0, 1, 2, 3, 4]
        assert discount.tolist() == [0.5] * 4 + [0]


def test_a_replay_buffer_of_tf_agents_samples_them(serve: Any) -> None:
    episodes = [episode(10 * i, 4) for i in range(5)]
    server = serve(episodes, 2)
    spec = rlds.create_trajectory_data_spec(episodes)
    buffer = reverb_replay_buffer.ReverbReplayBuffer(
        spec, sequence_length=2, table_name="ours", local_server=server.server
    )
    observer = reverb_utils.ReverbAddTrajectoryObserver(buffer.py_client, "ours", 2)
    assert rlds.push_rlds_to_reverb(episodes, observer) == 20
    observer.flush()
    assert buffer.num_frames() == 15
    for experience, _ in buffer.as_dataset(sample_batch_size=4, num_steps=2).take(3):
        assert np.array_equal(experience.observation[..., 0], experience.reward) and experience.is_boundary().shape == (
            4,
            2,
        )


def test_policy_info_goes_where_the_table_has_it(serve: Any) -> None:
    def info(now: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {"sum": now["reward"] + after["reward"]}

    episodes = [episode(0, 3)]
    server = serve(episodes, None, policy_info={"sum": tf.TensorSpec((), tf.float32)})
    observer = server.observer("ours")
    assert rlds.push_rlds_to_reverb(episodes, observer, info) == 3
    assert server.items("ours", observer)[0][3].tolist() == [1, 3, 2]
    with pytest.raises(ValueError, match=r"policy_info/sum: the table has float32 \(None,\), the data nothing"):
        rlds.push_rlds_to_reverb(episodes, observer)
    server = serve(episodes, None)
    observer = server.observer("ours")
    assert rlds.push_rlds_to_reverb(episodes, observer, info) == 3
    assert len(server.items("ours", observer)[0]) == 6


def test_another_signature(serve: Any) -> None:
    episodes = [episode(0, 3)]
    other = [{"steps": [step(0, True, True, observation=np.zeros(3, np.float64))]}]
    server = serve(other, 2)
    for data in (episodes, as_dataset(episodes)):
        with pytest.raises(ValueError) as error:
            rlds.push_rlds_to_reverb(data, server.observer("ours"))
        assert (
            str(error.value)
            == f"{rlds.MISMATCH} observation: the table has float64 (None, 3), the data float32 (None, 2)."
        )
    with pytest.raises(ValueError, match=rlds.MISMATCH):
        rlds_to_reverb.push_rlds_to_reverb(as_dataset(episodes), server.observer("theirs"))
    server = serve(episodes, 2, signature=None)
    with pytest.raises(ValueError, match="step_type: the table has nothing, the data int32"):
        rlds.push_rlds_to_reverb(episodes, server.observer("ours"))


def test_empty_data(serve: Any) -> None:
    episodes = [episode(0, 3)]
    server = serve(episodes, 2)
    empty = as_dataset(episodes).take(0)
    assert rlds_to_reverb.push_rlds_to_reverb(empty, server.observer("theirs")) == 0
    assert rlds.push_rlds_to_reverb(empty, server.observer("ours")) == 0
    assert list(rlds.convert_rlds_to_trajectories(empty)) == []
    with pytest.raises(ValueError) as error:
        rlds.push_rlds_to_reverb([], server.observer("ours"))
    assert str(error.value) == "No dataset representing RLDS steps exist in the data."


@pytest.mark.parametrize("given", ["list", "tf.data"])
@pytest.mark.parametrize("length", [2, None])
@pytest.mark.parametrize("text", [TERMINAL, MID, LAST])
def test_a_bad_episode_half_way(serve: Any, text: str, length: int | None, given: str) -> None:
    bad = {
        TERMINAL: [step(0, first=True), step(1, terminal=True), step(2, last=True)],
        MID: [step(0, first=True), step(1), step(2)],
        LAST: [step(0), step(1), step(2, last=True)],
    }[text]
    good = [episode(0, 3), episode(10, 4)]
    episodes = [*good, {"steps": bad}, episode(20, 5)]
    server = serve(episodes, length)
    ours, theirs = server.observer("ours"), server.observer("theirs")
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        rlds.push_rlds_to_reverb(episodes if given == "list" else as_dataset(episodes), ours)
    assert isinstance(error.value, rlds.InvalidArgumentError) and isinstance(error.value, ValueError)
    assert str(error.value).startswith(text) and error.value.pushed == 7
    assert rlds_to_reverb.push_rlds_to_reverb(as_dataset(good), theirs) == 7
    # the good ones, and nothing of the bad one
    assert_same_items(server.items("ours", ours), server.items("theirs", theirs))


def test_a_tf_dataset_into_a_log() -> None:
    episodes = [episode(0, 4), episode(10, 1), episode(20, 3, terminal=False)]
    with (
        Log.anonymous(rlds.create_log_schema(as_dataset(episodes))) as log,
        Log.anonymous(rlds.create_log_schema(episodes)) as other,
    ):
        assert rlds.push_rlds_to_reverb(as_dataset(episodes), log) == rlds.push_rlds_to_reverb(episodes, other) == 8
        a, b = (flatten(one.read(one.all().keys())) for one in (log, other))
        assert set(a) == set(b) and all(
            np.array_equal(a[path], b[path]) and a[path].dtype == b[path].dtype for path in a
        )


# What we write, opened by tensorflow_datasets


def assert_tfds_has(folder: Path, episodes: list[Episode]) -> None:
    """Every value of every step, as the real library decodes it."""
    pieces = [piece for one in episodes for piece in to_steps(one, Notes())]
    found = list(tfds.builder_from_directory(str(folder)).as_dataset(split="train"))
    assert len(found) == len(pieces)
    for theirs, ours in zip(found, pieces, strict=True):
        steps = list(theirs["steps"].as_numpy_iterator())
        assert len(steps) == len(ours["steps"])
        for a, b in zip(steps, ours["steps"], strict=True):
            a, b = flatten(a), flatten(b)
            assert set(a) == set(b)
            for path in a:
                x, y = np.asarray(a[path]), np.asarray(b[path])
                assert (x.dtype, x.shape) == (y.dtype, y.shape), path
                assert a[path] == b[path] if x.dtype.hasobject or x.dtype.kind == "S" else x.tobytes() == y.tobytes(), (
                    path
                )
        metadata = {name: value.numpy() for name, value in theirs["episode_metadata"].items()}
        assert metadata["hilt"] == ours["episode_metadata"]["hilt"]


def test_tensorflow_datasets_opens_what_we_write(tmp_path: Path) -> None:
    more = lambda n: {  # noqa: E731
        "bf16": np.linspace(-3, 3, n).astype(ml_dtypes.bfloat16),
        "f16": np.linspace(-3, 3, n).astype(np.float16),
        "f64": np.pi * np.arange(2 * n).reshape(n, 2),
        "u64": np.full(n, 2**64 - 1, np.uint64),
        "u32": np.full((n, 2), 2**32 - 1, np.uint32),
        "i8": np.full((n, 2, 2), -128, np.int8),
        "stack": np.arange(n * 2 * 30 * 40 * 3, dtype=np.uint32).astype(np.uint8).reshape(n, 2, 30, 40, 3),
        "gray": np.arange(n * 12, dtype=np.uint8).reshape(n, 3, 4, 1),
        "rgba": np.arange(n * 48, dtype=np.uint8).reshape(n, 3, 4, 4),
        "empty": np.zeros((n, 0)),
        "nested": {"x": {"y": np.arange(n)}},
    }
    episodes = [made(n, n, **more(n)) for n in (4, 1, 6, 3)]
    episodes[0].facts["episode_metadata"] = {"file": "a.h5", "n": 3, "x": 0.1, "ok": True}
    write(create(tmp_path, name="toy", version="2.1.0", shard_bytes=10_000), episodes)
    builder = tfds.builder_from_directory(str(tmp_path))
    assert (
        builder.info.name == "toy"
        and str(builder.version) == "2.1.0"
        and builder.info.splits["train"].num_examples == 4
    )
    assert len(builder.info.splits["train"].shard_lengths) > 1
    assert_tfds_has(tmp_path, episodes)
    first = next(iter(builder.as_dataset(split="train[:1]")))["episode_metadata"]
    assert {k: v.numpy() for k, v in first.items() if k != "hilt"} == {"file": b"a.h5", "n": 3, "x": 0.1, "ok": True}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 12))
def test_random_columns(tmp_path: Path, seed: int) -> None:
    one = random_episode(seed, cuts=bool(seed % 2))
    write(create(tmp_path), [one])
    assert_tfds_has(tmp_path, [one])


def test_tf_agents_converts_what_we_write(tmp_path: Path) -> None:
    episodes = [made(4, 0), made(1, 1, ended=""), made(3, 2, ended="truncated")]
    for one in episodes:
        for name in ("observations", "next_observations"):
            one.columns[name] = one.columns[name]["state"]
    write(create(tmp_path), episodes)
    data = tfds.builder_from_directory(str(tmp_path)).as_dataset(split="train")
    theirs = run(rlds_to_reverb.convert_rlds_to_trajectories(data))
    assert theirs[1] is None and len(theirs[0]) == 11
    assert run(rlds.convert_rlds_to_trajectories(data, strict=True)) == theirs
