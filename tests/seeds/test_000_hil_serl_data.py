"""Document 000, how HIL-SERL keeps its data, section by section, with its own code and changed imports.

Two arms' cameras and a state by name, an actor with a person who takes over, queues, the wire, two buffers, files, and
batches that are half demonstrations; then the same with Isaac Sim in the place of the arm.
"""

from __future__ import annotations

import glob
import os
import pickle as pkl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hilt.compat.serl import (
    IsaacSimFrankaEnv,
    MemoryEfficientReplayBufferDataStore,
    QueuedDataStore,
    ReplayBufferDataStore,
    SpacemouseIntervention,
    TrainerClient,
    TrainerServer,
    concat_batches,
    make_trainer_config,
)
from hilt.core.errors import ConfigError, HiltError, SchemaError, UnknownNameError
from hilt.core.unpickle import safe_load
from hilt.envs.wrappers import ChunkingWrapper, Quat2EulerWrapper, RelativeFrame, SERLObsWrapper
from hilt.teleop.devices import Device, Reading
from hilt.teleop.intervene import TakeOver
from tests.wire.processes import free_port

CAMERAS = ("wrist_1", "wrist_2")
STATE = {"tcp_pose": 7, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}


class FrankaEnv(gymnasium.Env):
    """Observations as the document has them. An episode succeeds at its fifth step."""

    def __init__(self, shape: tuple[int, ...] = (16, 16, 3)):
        images = {name: spaces.Box(0, 255, shape, np.uint8) for name in CAMERAS}
        state = {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in STATE.items()}
        self.observation_space = spaces.Dict({"images": spaces.Dict(images), "state": spaces.Dict(state)})
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)
        self.shape, self.steps, self.number = shape, 0, 0

    def reset(self, **_: Any) -> Any:
        self.steps, self.number = 0, self.number + 1
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.steps, self.number = self.steps + 1, self.number + 1
        succeed = self.steps == 5
        return self.seen(), float(succeed), succeed, False, {"succeed": succeed}

    def seen(self) -> dict[str, Any]:
        images = {name: np.full(self.shape, self.number + 100 * place, np.uint8) for place, name in enumerate(CAMERAS)}
        return {
            "images": images,
            "state": {name: np.full(size, self.number, np.float32) for name, size in STATE.items()},
        }


class Person(Device):
    """Holds the mouse in the second, third and fifth step of each episode: two take-overs."""

    def reset(self) -> None:
        self.step = 0

    def read(self) -> Reading:
        self.step += 1
        held = self.step in (2, 3, 5)
        return Reading(motion=np.eye(6)[0] * (0.25 if held else 0), engaged=held)


config = SimpleNamespace(
    image_keys=list(CAMERAS), replay_buffer_capacity=200, batch_size=16, max_steps=20, buffer_period=10
)


def demonstrations(env: Any, episodes: int) -> list[dict[str, Any]]:
    """What record_demos.py keeps: the transitions of episodes that succeeded."""
    kept = []
    for _ in range(episodes):
        obs, trajectory, done = env.reset()[0], [], False
        while not done:
            actions = np.zeros(7, np.float32)
            next_obs, reward, done, _, info = env.step(actions)
            ends = {"rewards": reward, "masks": 1.0 - done, "dones": done, "infos": info}
            trajectory.append({"observations": obs, "actions": actions, "next_observations": next_obs, **ends})
            obs = next_obs
        if info["succeed"]:
            kept += trajectory
    return kept


def buffer(
    env: Any, image_keys: Any = None, capacity: Any = 200, **options: Any
) -> MemoryEfficientReplayBufferDataStore:
    """As the document constructs it."""
    image_keys = config.image_keys if image_keys is None else image_keys
    return MemoryEfficientReplayBufferDataStore(
        env.observation_space, env.action_space, capacity=capacity, image_keys=image_keys, **options
    )


@pytest.fixture
def made() -> Iterator[Callable[[Any], Any]]:
    """Closes what a test makes."""
    all_made: list[Any] = []
    yield lambda one: all_made.append(one) or one
    for one in reversed(all_made):
        (one.close if hasattr(one, "close") else one.stop)()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing arrived for 120 s"
        time.sleep(0.01)


# 数据类型, 1: demonstrations


@pytest.mark.parametrize("image_keys", [CAMERAS, ["images/wrist_1", "images/wrist_2"]], ids=["by leaf", "by path"])
@pytest.mark.parametrize("shape", [(16, 16, 3), (32, 32, 3), (1, 16, 16, 3)], ids=str)
def test_demonstrations_with_nested_images_are_loaded_and_come_back_pixel_for_pixel(
    tmp_path: Path, made: Any, shape: Any, image_keys: Any
):
    env = FrankaEnv(shape)
    path = tmp_path / "demo_data" / "usb_2_demos_2026-11-16_10-00-00.pkl"
    path.parent.mkdir()
    path.write_bytes(pkl.dumps(demonstrations(env, 2)))
    demo_buffer = made(buffer(env, image_keys))
    with open(path, "rb") as f:
        transitions = safe_load(f, where=str(path))
        for transition in transitions:
            demo_buffer.insert(transition)
    assert len(demo_buffer) == 10

    plain = demo_buffer.sample(10, indx=np.arange(10))
    packed = demo_buffer.sample(10, indx=np.arange(10), pack_obs_and_next_obs=True)
    for place, name in enumerate(CAMERAS):
        for key in ("observations", "next_observations"):
            expected = np.stack([transition[key]["images"][name] for transition in transitions])
            assert np.array_equal(plain[key]["images"][name], expected)
            assert np.array_equal(
                plain[key]["state"]["tcp_pose"][:, 0].astype(np.uint8) + 100 * place, expected.reshape(10, -1)[:, 0]
            )
        stacks = packed["observations"]["images"][name]
        assert stacks.shape == (10, (shape[0] if len(shape) == 4 else 1) + 1, *shape[-3:])
        assert np.array_equal(
            stacks[:, -1].reshape(10, -1)[:, 0], plain["next_observations"]["images"][name].reshape(10, -1)[:, -1]
        )
        assert np.array_equal(
            stacks[:, 0].reshape(10, -1)[:, 0], plain["observations"]["images"][name].reshape(10, -1)[:, 0]
        )
    assert "images" not in packed["next_observations"] and packed["next_observations"]["state"]["tcp_vel"].shape == (
        10,
        6,
    )
    assert plain["masks"].tolist() == [1, 1, 1, 1, 0] * 2 and plain["dones"].tolist() == [False] * 4 + [True] + [
        False
    ] * 4 + [True]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"image_keys": ["images"]},
            "'images' is not an image but a group of images/wrist_1, images/wrist_2; give the images' names",
        ),
        (
            {"image_keys": "wrist_1"},
            r"image_keys: expected a list of names, such as \['wrist_1', 'wrist_2'\], got 'wrist_1'",
        ),
        ({"image_keys": 5}, "image_keys: expected a list of names"),
        ({"image_keys": [None]}, "no image key in the observation space named 'None'. Known: images/wrist_1"),
        (
            {"image_keys": ["wrist_3"]},
            "no image key in the observation space named 'wrist_3'. Known: images/wrist_1, images/wrist_2",
        ),
        (
            {"image_keys": ["tcp_pose"]},
            r"expected an image \(H, W, C\) or a stack \(stack, H, W, C\), got float32 \(7,\) for 'tcp_pose'",
        ),
        ({"capacity": None}, "capacity: expected a whole number from 1 on, .*; got None"),
        ({"capacity": "200"}, "capacity: expected a whole number from 1 on, .*; got '200'"),
        ({"capacity": 2e5}, "capacity: expected a whole number from 1 on, .*; got 200000.0"),
        ({"capacity": 0}, "capacity: expected a whole number from 1 on, .*; got 0"),
        ({"image_keys": [["wrist_1"]]}, "no image key in the observation space named .*wrist_1"),
        ({"path": 3}, "path: expected the name of a folder, text or a pathlib.Path, got 3"),
        ({"path": b"buffer"}, "path: expected the name of a folder, .* got b'buffer'"),
        ({"seed": "x"}, "seed: expected a whole number from 0 on, or None .*; got 'x'"),
        ({"seed": -1}, "seed: expected a whole number from 0 on, .*; got -1"),
        ({"capacity_bytes": "1 GB"}, "capacity_bytes: expected a number above 0 or None, got '1 GB'"),
        ({"segment_bytes": [1]}, r"segment_bytes: expected a number above 0 or None, got \[1\]"),
        ({"compression": "zstd"}, "compression: expected a codec by column, .*; got 'zstd'"),
        (
            {"capactiy_bytes": 1},
            "MemoryEfficientReplayBufferDataStore: no argument named 'capactiy_bytes'; did you mean 'capacity_bytes'",
        ),
        (
            {"image_key": ["wrist_1"]},
            r"no argument named 'image_key'; did you mean 'image_keys'\? Known: observation_space, action_space,",
        ),
        (
            {"capacity": 1 << 70},
            "capacity: expected a whole number from 1 on of at most 64 bits, .*; got 1180591620717411303424",
        ),
    ],
)
def test_a_buffer_that_cannot_be_made_says_what_was_given_and_what_to_do(given: dict[str, Any], said: str):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        buffer(FrankaEnv(), **given)


def test_a_leaf_that_two_groups_have_must_be_given_by_path(made: Any):
    arm = spaces.Dict({"wrist": spaces.Box(0, 255, (16, 16, 3), np.uint8)})
    arms = SimpleNamespace(
        observation_space=spaces.Dict({"left": arm, "right": arm}), action_space=spaces.Box(-1, 1, (14,), np.float32)
    )
    with pytest.raises(
        ConfigError, match="'wrist' was given, and left/wrist, right/wrist all end so; give the whole paths"
    ):
        buffer(arms, ["wrist"])
    made(buffer(arms, ["left/wrist", "right/wrist"]))


def test_calls_with_wrong_arguments_are_explained(made: Any):
    env = FrankaEnv()
    store = made(buffer(env, capacity=np.int64(20)))  # a number of numpy's is a number
    (transition, *_) = demonstrations(env, 1)
    store.insert(transition)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: store.insert([transition]), "a transition: expected a mapping with .* got list. .* batch_insert"),
        (lambda: store.insert(None), "got NoneType"),
        (lambda: store.sample(None), "batch_size: expected a whole number from 1 on, .* got None"),
        (lambda: store.sample(2, keys=[1]), r"keys: expected the names of columns, .* got \[1\]"),
        (lambda: store.get_iterator(sample_args=8), "sample_args: expected a mapping of sample.*got 8"),
        (
            lambda: store.get_iterator(sample_args={"batch_size": 2, "pack_obs": True}),
            "named 'pack_obs'; did you mean 'pack_obs_and",
        ),
        (
            lambda: store.get_iterator(queue_size=None, sample_args={"batch_size": 2}),
            "queue_size: expected a whole number",
        ),
        (lambda: store.sample(0), "batch_size: expected a whole number from 1 on, .* got 0"),
        (lambda: store.sample(2, keys="actions"), "keys: expected the names of columns, .* got 'actions'"),
        (lambda: store.sample(2, indx=[[0], [0, 0]]), r"indx: expected whole numbers in \[0, 1\), got"),
        (lambda: store.get_latest_data(None), "from_id: expected a whole number, .* got None"),
        (lambda: store.get_latest_data(1.5), "from_id: expected a whole number, .* got 1.5"),
        (lambda: store.batch_insert(None), "batch_insert: expected a list of transitions, got NoneType"),
        (
            lambda: store.batch_insert(transition),
            "batch_insert: expected a list .* got dict. One transition is stored with insert",
        ),
        (
            lambda: store.insert(transition, sequence="a"),
            "sequence: expected a whole number from -1 on, the number of .*; got 'a'",
        ),
        (lambda: store.insert(transition, sequence=1.5), "sequence: expected a whole number from -1 on, .*; got 1.5"),
        (
            lambda: store.insert(transition, sequence=1 << 70),
            "sequence: expected a whole number from -1 on of at most 64 bits, .*; got 11",
        ),
        (
            lambda: store.insert(transition, sequnce=3),
            "DataStore.insert: no argument named 'sequnce'; did you mean 'sequence'",
        ),
        (lambda: store.sample(2, kyes=["actions"]), "DataStore.sample: no argument named 'kyes'; did you mean 'keys'"),
        (lambda: store.seed("x"), "seed: expected a whole number from 0 on, .*; got 'x'"),
        (lambda: concat_batches(None, {}), "the first batch: expected a mapping, as sample.. returns it, got NoneType"),
        (lambda: concat_batches({}, [1]), "the second batch: expected a mapping, .* got list"),
        (
            lambda: concat_batches({"a": np.zeros(1)}, {"a": np.zeros(1)}, axis=None),
            "axis: expected a whole number, .* got None",
        ),
    ]
    for call, said in calls:
        with pytest.raises(HiltError, match=said):
            call()
    plain = made(ReplayBufferDataStore(env.observation_space, env.action_space, 20))
    with pytest.raises(
        ConfigError, match=r"pack_obs_and_next_obs was given, .* use MemoryEfficientReplayBufferDataStore"
    ):
        plain.get_iterator(sample_args={"batch_size": 2, "pack_obs_and_next_obs": True})
    with pytest.raises(
        ConfigError, match=r"image_keys=\['wrist_1'\] was given, .* use MemoryEfficientReplayBufferDataStore"
    ):
        ReplayBufferDataStore(env.observation_space, env.action_space, 20, image_keys=["wrist_1"])
    with pytest.raises(
        ConfigError, match=r"ReplayBufferDataStore: no argument named 'capcity'; did you mean 'capacity'\?"
    ):
        ReplayBufferDataStore(env.observation_space, env.action_space, capcity=20)
    assert set(store.sample(2, keys=(key for key in ["actions"]))) == {"actions"}, "names may come from a generator"
    store.insert({**transition, 3: "a key that is no text"})
    assert len(store) == 2


def test_a_queue_with_wrong_arguments_explains_them():
    queue = QueuedDataStore(10)
    queue.insert({"rewards": 0.0})
    full = QueuedDataStore(1, full="block")
    full.insert({"rewards": 0.0})
    known = r"Expected QueuedDataStore\(capacity, \*, full='spill', path=None, durability='never'\)"
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: QueuedDataStore(capcity=3),
            rf"QueuedDataStore: no argument named 'capcity'; did you mean 'capacity'\? {known}",
        ),
        (lambda: QueuedDataStore(), rf"QueuedDataStore: missing a required argument: 'capacity'\. {known}"),
        (lambda: QueuedDataStore(3, "block"), rf"QueuedDataStore: too many positional arguments\. {known}"),
        (
            lambda: queue.insert({}, tmeout=3),
            r"QueuedDataStore.insert: no argument named 'tmeout'; did you mean 'timeout'\?",
        ),
        (
            lambda: full.insert({"rewards": 0.0}, timeout="1"),
            "timeout: expected a number of seconds from 0 on, such as 60.0; got '1'",
        ),
        (lambda: queue.parcel(None), "after: expected a whole number, .* or -1 for all that are kept; got None"),
        (lambda: queue.parcel(-1, None), "max_bytes: expected a whole number from 1 on, .*; got None"),
        (lambda: QueuedDataStore(None), "capacity: expected a whole number from 1 on, .* such as 50000; got None"),
        (lambda: QueuedDataStore("50000"), "capacity: expected a whole number from 1 on, .* got '50000'"),
        (lambda: QueuedDataStore(2.5), "capacity: expected a whole number from 1 on, .* got 2.5"),
        (lambda: QueuedDataStore(10, path=3), "path: expected the name of a folder, .* got 3"),
        (lambda: QueuedDataStore(10).get_latest_data(None), "from_id: expected a whole number, .* got None"),
        (lambda: QueuedDataStore(10).acknowledge("1"), "up_to: expected a whole number, .* got '1'"),
        (lambda: QueuedDataStore(10).batch_insert(None), "batch_insert: expected a list of transitions, got NoneType"),
        (lambda: QueuedDataStore(10).batch_insert({"rewards": 0.0}), "got dict. One transition is stored with insert"),
    ]
    for call, said in calls:
        with pytest.raises(ConfigError, match=said):
            call()


# 数据类型, 2 and 3, and 数据存储组件: online data and interventions, over the network, and in both buffers


def act(env: Any, data_store: Any, intvn_data_store: Any, steps: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The document's loop of the actor, with HIL-SERL's counts of an episode."""
    everything, episodes = [], []
    intervention_count, intervention_steps, already_intervened = 0, 0, False
    obs, _ = env.reset()
    for _ in range(steps):
        actions = np.zeros(7, np.float32)
        next_obs, reward, done, truncated, info = env.step(actions)
        if "intervene_action" in info:
            actions = info.pop("intervene_action")
            intervention_steps += 1
            intervention_count += not already_intervened
            already_intervened = True
        else:
            already_intervened = False
        transition = {
            "observations": obs,
            "actions": actions,
            "next_observations": next_obs,
            "rewards": reward,
            "masks": 1.0 - done,
            "dones": done,
        }
        data_store.insert(transition)
        everything.append(transition)
        if already_intervened:
            intvn_data_store.insert(transition)
        obs = next_obs
        if done or truncated:
            told = {name: info[name] for name in ("intervention_count", "intervention_steps")}
            episodes.append({"counted": (intervention_count, intervention_steps), **told})
            intervention_count, intervention_steps, already_intervened = 0, 0, False
            obs, _ = env.reset()
    return everything, episodes


def through_the_wire(
    env: Any, replay_buffer: Any, demo_buffer: Any, made: Any, steps: int = 20
) -> tuple[list[Any], list[Any], Any]:
    """An actor and a learner as the document connects them; returns what was inserted,
    the episodes, and the weights that arrived."""
    ports = {"port_number": free_port(), "broadcast_port": free_port()}
    server = TrainerServer(make_trainer_config(**ports))
    server.register_data_store("actor_env", replay_buffer)
    server.register_data_store("actor_env_intvn", demo_buffer)
    server.start(threaded=True)
    made(server)
    data_store, intvn_data_store = QueuedDataStore(50000), QueuedDataStore(50000)
    client = TrainerClient(
        "actor_env",
        "localhost",
        make_trainer_config(**ports),
        data_stores={"actor_env": data_store, "actor_env_intvn": intvn_data_store},
        wait_for_server=True,
    )
    made(client)
    received: list[Any] = []
    client.recv_network_callback(received.append)
    inserted, episodes = act(env, data_store, intvn_data_store, steps)
    client.update()
    until(
        lambda: len(replay_buffer) == steps and len(demo_buffer) == sum(one["intervention_steps"] for one in episodes)
    )
    server.publish_network({"weights": np.arange(3.0)})
    until(lambda: bool(received))
    return inserted, episodes, received[-1]


def test_the_actor_sends_everything_and_interventions_twice_and_gets_weights(made: Any):
    env = TakeOver(FrankaEnv(), Person())
    replay_buffer, demo_buffer = made(buffer(env)), made(buffer(env))
    inserted, episodes, weights = through_the_wire(env, replay_buffer, demo_buffer, made)
    assert episodes == [{"counted": (2, 3), "intervention_count": 2, "intervention_steps": 3}] * 4
    assert weights["weights"].tolist() == [0, 1, 2]
    online, human = replay_buffer.sample(20, indx=np.arange(20)), demo_buffer.sample(12, indx=np.arange(12))
    assert online["actions"][:, 0].tolist() == [0, 0.25, 0.25, 0, 0.25] * 4, (
        "the person's action is the one that is stored"
    )
    assert (human["actions"][:, 0] == 0.25).all()
    for name in CAMERAS:
        expected = np.stack([one["next_observations"]["images"][name] for one in inserted])
        assert np.array_equal(online["next_observations"]["images"][name], expected)
    held = [t for t in inserted if t["actions"][0]]
    assert np.array_equal(
        human["observations"]["images"]["wrist_2"], np.stack([t["observations"]["images"]["wrist_2"] for t in held])
    )


def test_an_episode_of_a_run_has_its_intervention_count_beside_its_steps():
    """In metrics.jsonl, counted as HIL-SERL counts: take-overs that began in the episode."""
    from hilt.algos.rlpd import Rlpd
    from hilt.core.trajectory import Source
    from hilt.hil.stream.ended_episodes import episode_figures

    source = np.array([Source.POLICY, Source.HUMAN, Source.HUMAN, Source.POLICY, Source.HUMAN])
    columns = {
        name: np.zeros(5) for name in ("rewards", "terminated", "lost", "succeed", "times/observed", "times/applied")
    }
    record = episode_figures({**columns, "source": source}, Rlpd())
    assert (record["intervention_count"], record["intervention_steps"]) == (2, 3)


def test_spacemouse_intervention_is_the_take_over_with_a_spacemouse(monkeypatch: pytest.MonkeyPatch):
    env = SpacemouseIntervention(FrankaEnv(), action_indices=[0, 1], device=Person())
    assert isinstance(env, TakeOver)
    env.reset()
    steps = [env.step(np.full(7, -1, np.float32))[-1] for _ in range(3)]
    assert ["intervene_action" in info for info in steps] == [False, True, True]
    assert steps[-1]["intervene_action"].tolist() == [0.25, 0, 0, 0, 0, 0, 0]
    env.close()
    opened: list[str] = []
    monkeypatch.setattr("hilt.compat.serl.intervention.open_device", lambda name: opened.append(name) or Person())
    SpacemouseIntervention(FrankaEnv()).close()
    assert opened == ["spacemouse"]


# 数据持久化: files at every buffer_period, and back


def test_buffers_are_saved_by_the_period_and_restored_in_any_order(tmp_path: Path, made: Any):
    env, checkpoint_path = TakeOver(FrankaEnv(), Person()), str(tmp_path)
    transitions, demo_transitions = [], []
    obs, _ = env.reset()
    for step in range(1, config.max_steps + 1):
        next_obs, reward, done, _, info = env.step(np.zeros(7, np.float32))
        kept = {"observations": obs, "actions": info["executed_action"], "next_observations": next_obs}
        transitions.append({**kept, "rewards": reward, "masks": 1.0 - done, "dones": done})
        demo_transitions += [transitions[-1]] * ("intervene_action" in info)
        obs = env.reset()[0] if done else next_obs
        if step % config.buffer_period == 0:
            for name, held in (("buffer", transitions), ("demo_buffer", demo_transitions)):
                os.makedirs(os.path.join(checkpoint_path, name), exist_ok=True)
                with open(os.path.join(checkpoint_path, name, f"transitions_{step}.pkl"), "wb") as f:
                    pkl.dump(held, f)
            transitions, demo_transitions = [], []

    replay_buffer, demo_buffer = made(buffer(env)), made(buffer(env))
    for name, store in (("buffer", replay_buffer), ("demo_buffer", demo_buffer)):
        files = sorted(glob.glob(os.path.join(checkpoint_path, name, "*.pkl")), reverse=True)
        assert [os.path.basename(file) for file in files] == ["transitions_20.pkl", "transitions_10.pkl"]
        for file in files:
            with open(file, "rb") as f:
                for transition in safe_load(f, where=file):
                    store.insert(transition)
    assert (len(replay_buffer), len(demo_buffer)) == (20, 12)
    for store, size in ((replay_buffer, 20), (demo_buffer, 12)):
        batch = store.sample(size, indx=np.arange(size))
        numbers = batch["observations"]["state"]["tcp_pose"][:, 0]
        assert np.array_equal(batch["observations"]["images"]["wrist_1"][:, 0, 0, 0], numbers)
        assert np.array_equal(batch["next_observations"]["images"]["wrist_1"][:, 0, 0, 0], numbers + 1)


# 数据采样策略 (RLPD): half online, half demonstrations


def test_half_of_each_batch_is_online_and_half_is_demonstrations(made: Any):
    env = FrankaEnv()
    replay_buffer, demo_buffer = made(buffer(env)), made(buffer(env))
    replay_buffer.batch_insert({**one, "rewards": 0.0} for one in demonstrations(env, 4))
    demo_buffer.batch_insert({**one, "rewards": 1.0} for one in demonstrations(env, 2))
    sample_args = {"batch_size": config.batch_size // 2, "pack_obs_and_next_obs": True}
    replay_iterator = made(replay_buffer.get_iterator(sample_args=sample_args, device=None))
    demo_iterator = made(demo_buffer.get_iterator(sample_args=sample_args, device=None))
    for _ in range(3):
        batch = concat_batches(next(replay_iterator), next(demo_iterator), axis=0)
        assert batch["rewards"].tolist() == [0.0] * 8 + [1.0] * 8
        assert batch["observations"]["images"]["wrist_1"].shape == (16, 2, 16, 16, 3)


# 与 Isaac Sim 方案的关联: another environment, and nothing else changes


class IsaacLab(gymnasium.Env):
    """A stand-in with Isaac Lab's interface: groups of observation terms, tensors with an axis of
    environments that it writes over, spaces that call everything an unbounded float32, resets
    inside ``step``. Isaac Lab itself was not run."""

    is_vector_env = True
    metadata: ClassVar = {"render_modes": [None]}

    def __init__(
        self, num_envs: int = 1, compute_final_obs: bool = True, ends: bool = True, scalar_first: bool = False
    ):
        self.torch = pytest.importorskip("torch")
        self.num_envs, self.device, self.ends = num_envs, "cpu", ends
        self.cfg = SimpleNamespace(compute_final_obs=compute_final_obs)
        self.max_episode_length, self.scalar_first = 5, scalar_first
        self.commands: list[Any] = []
        box = lambda *shape: spaces.Box(-np.inf, np.inf, shape, np.float32)  # noqa: E731
        terms = {
            "tcp_pose": box(7),
            "tcp_vel": box(6),
            "gripper_pose": box(1),
            "tcp_force": box(3),
            "tcp_torque": box(3),
        }
        cameras = {"wrist_1": box(16, 16, 3), "wrist_2": box(16, 16, 3)}
        self.single_observation_space = spaces.Dict({"policy": spaces.Dict(terms), "rgb": spaces.Dict(cameras)})
        self.single_action_space = box(7)
        self.obs_buf = {
            "policy": {name: self.torch.zeros(num_envs, *space.shape) for name, space in terms.items()},
            "rgb": {name: self.torch.zeros(num_envs, 16, 16, 3, dtype=self.torch.uint8) for name in cameras},
        }
        self.steps = self.torch.zeros(num_envs, dtype=self.torch.long)

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        self.steps[:] = 0
        self.compute()
        return self.obs_buf, {}

    def step(self, action: Any) -> Any:
        assert action.dtype == self.torch.float32 and action.shape == (self.num_envs, 7)
        self.commands.append(action.clone())
        self.steps += 1
        extras: dict[str, Any] = {"log": {"Episode_Reward/reach": 0.5}}
        over = (self.steps >= self.max_episode_length) & self.ends
        self.compute()
        if over.any() and self.cfg.compute_final_obs:
            extras["final_obs"] = {
                group: {name: term.clone() for name, term in terms.items()} for group, terms in self.obs_buf.items()
            }
        self.steps[over] = 0
        self.compute()
        return self.obs_buf, over.float(), over, self.torch.zeros_like(over), extras

    def compute(self) -> None:
        for terms in self.obs_buf.values():
            for name, term in terms.items():
                term.copy_(self.steps.reshape(-1, *[1] * (term.ndim - 1)).expand(term.shape))
                if name == "tcp_pose":
                    identity = [1, 0, 0, 0] if self.scalar_first else [0, 0, 0, 1]
                    term[:, 3:] = self.torch.tensor(identity)


def test_isaac_drives_the_unchanged_data_path(made: Any):
    simulator = IsaacLab()
    env = IsaacSimFrankaEnv(simulator, quaternion="xyzw")
    assert env.observation_space["images"]["wrist_1"] == spaces.Box(0, 255, (16, 16, 3), np.uint8)
    assert {name: space.shape for name, space in env.observation_space["state"].items()} == {
        name: (n,) for name, n in STATE.items()
    }
    env = SpacemouseIntervention(env, device=Person())
    env = ChunkingWrapper(SERLObsWrapper(Quat2EulerWrapper(RelativeFrame(env))), obs_horizon=1, act_exec_horizon=None)
    replay_buffer, demo_buffer = made(buffer(env)), made(buffer(env))
    _, episodes, _ = through_the_wire(env, replay_buffer, demo_buffer, made)
    assert episodes == [{"counted": (2, 3), "intervention_count": 2, "intervention_steps": 3}] * 4
    online = replay_buffer.sample(20, indx=np.arange(20))
    assert online["observations"]["wrist_1"][:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4] * 4
    assert online["next_observations"]["wrist_1"][:, 0, 0, 0, 0].tolist() == [1, 2, 3, 4, 5] * 4, (
        "with the last frames of episodes"
    )
    assert online["rewards"].tolist() == [0, 0, 0, 0, 1] * 4 and online["masks"].tolist() == [1, 1, 1, 1, 0] * 4
    assert online["observations"]["state"].shape == (20, 1, 19)
    assert len(demo_buffer) == 12


def test_isaac_of_release_2_has_other_quaternions_and_ends_by_what_is_given(made: Any):
    simulator = IsaacLab(compute_final_obs=False, ends=False, scalar_first=True)
    env = IsaacSimFrankaEnv(
        simulator, quaternion="wxyz", success=lambda seen: seen["policy"]["tcp_vel"][0] == 3, step_limit=4
    )
    seen, _ = env.reset()
    assert seen["state"]["tcp_pose"][3:].tolist() == [0, 0, 0, 1], "x, y, z, w as scipy and HIL-SERL have it"
    steps = [env.step(np.zeros(7)) for _ in range(4)]
    assert [(reward, terminated, truncated) for _, reward, terminated, truncated, _ in steps] == [
        (0.0, False, False),
        (0.0, False, False),
        (1.0, True, False),
        (0.0, False, True),
    ]
    assert steps[2][-1]["succeed"] is True and env.step_limit == 4
    env.close()


def test_isaac_keeps_the_gripper_where_no_command_is_given():
    simulator = IsaacLab()
    env = IsaacSimFrankaEnv(simulator, quaternion="xyzw")
    env.reset()
    for command in (0.0, -1.0, 0.2, 0.8):
        env.step(np.array([2, 0, 0, 0, 0, 0, command]))
    assert [command[0, 6].item() for command in simulator.commands] == [1, -1, -1, 1]
    assert all(command[0, 0] == 1 for command in simulator.commands), "clipped to the action space"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: IsaacSimFrankaEnv(IsaacLab(4), quaternion="xyzw"),
            "a task is one environment, and this simulator runs 4",
        ),
        (
            lambda: IsaacSimFrankaEnv(IsaacLab(), quaternion="zyxw"),
            "quaternion is 'zyxw': expected 'wxyz' .Isaac Lab 2. or 'xyzw'",
        ),
        (
            lambda: IsaacSimFrankaEnv(IsaacLab(), quaternion="xyzw", state=["tcp_poze"]),
            "did you mean 'policy/tcp_pose'",
        ),
        (
            lambda: IsaacSimFrankaEnv(IsaacLab(), quaternion="xyzw", state={"tcp_pose": "tcp_vel"}),
            "tcp_pose has 6 numbers .* expected 7",
        ),
        (
            lambda: IsaacSimFrankaEnv(IsaacLab(), quaternion="xyzw", images=["tcp_vel"]),
            r"tcp_vel is float32 \[6\]; expected uint8",
        ),
        (lambda: IsaacSimFrankaEnv(FrankaEnv(), quaternion="xyzw"), "FrankaEnv has no num_envs"),
    ],
)
def test_a_simulator_that_does_not_fit_is_explained(make: Callable[[], Any], said: str):
    with pytest.raises((ConfigError, SchemaError, UnknownNameError), match=said):
        make()


def test_a_simulator_that_hides_how_an_episode_ended_is_refused():
    env = IsaacSimFrankaEnv(IsaacLab(compute_final_obs=False), quaternion="xyzw")
    env.reset()
    with pytest.raises(SchemaError, match="Isaac Lab: compute_final_obs=True"):
        for _ in range(5):
            env.step(np.zeros(7))


def test_many_environments_at_once_fill_the_same_buffer(made: Any):
    """The snippet of docs/hil-serl.md."""
    from hilt.envs.adapters import Batched, space_of

    batch = Batched(IsaacLab(3))
    first = batch.reset()
    space = space_of({group: {name: term[0] for name, term in terms.items()} for group, terms in first.items()})
    store = made(
        MemoryEfficientReplayBufferDataStore(space, spaces.Box(-1, 1, (7,), np.float32), 200, image_keys=CAMERAS)
    )
    for _ in range(6):
        for number, step in enumerate(batch.step(np.zeros((3, 7), np.float32))):
            if step is not None:
                ends = {
                    "rewards": step.reward,
                    "masks": 1.0 - step.terminated,
                    "dones": step.terminated or step.truncated,
                }
                kept = {
                    "observations": step.observation,
                    "actions": step.action,
                    "next_observations": step.next_observation,
                }
                store.insert({**kept, **ends}, actor=f"isaac_{number}")
    assert len(store) == 18
    held = store.sample(18, indx=np.arange(18))
    assert np.array_equal(
        held["next_observations"]["rgb"]["wrist_1"][:, 0, 0, 0], held["observations"]["policy"]["tcp_vel"][:, 0] + 1
    )
