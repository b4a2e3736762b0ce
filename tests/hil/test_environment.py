"""The environment of a run's settings, and the wire's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym

from hilt.algos.config import Rlpd
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.hil import environment as workplace
from hilt.hil.config import Hil, ValueUse, Wire, check
from hilt.hil.environment import check_fit, make_env, spaces, task_options, trainer_config
from hilt.policies.agent.config import AgentConfig
from hilt.teleop.devices import Device, Reading, Status
from tests.value.valued import save_untrained

TOY = "tests.hil.toy:Toy"
REACH: dict[str, Any] = {"task": "tabletop/reach", "task_options": {"image_size": None}}
START = {"split": "train", "state": 0}


class Closes(Device):
    closed = False

    def __init__(self, number: int = 0):
        super().__init__()
        self.number = number

    def read(self) -> Reading:
        return Reading(engaged=True, action=np.ones(3))

    def close(self) -> None:
        Closes.closed = True


def step(config: Hil, action: Any, operator: bool = True) -> dict[str, Any]:
    with make_env(config, operator) as env:
        env.reset(seed=0, options=START)
        return env.step(action)[4]


def test_environment_without_an_operator_reports_executed_actions():
    info = step(Hil(task=TOY), np.full(3, 2.0))
    assert (
        info["source"] == Source.POLICY
        and info["executed_action"].tolist() == [1, 1, 1]
        and "intervene_action" not in info
    )
    # an evaluation: nobody could
    assert "executed_action" not in step(Hil(task=TOY, operator="script"), np.ones(3), operator=False)


def test_an_operator_takes_over_with_the_options_of_device_and_take_over():
    device = f"{__name__}:Closes"
    info = step(Hil(task=TOY, operator=device, operator_options={"number": 7, "action_indices": [1]}), np.zeros(3))
    assert info["source"] == Source.HUMAN and info["executed_action"].tolist() == [0, 1, 0] and Closes.closed
    assert (
        step(Hil(task=TOY, operator=device, operator_options={"mode": "toggle"}), np.zeros(3))["source"]
        == Source.POLICY
    )
    some = Hil(task=TOY, operator=device, agent=AgentConfig(action_indices=[0, 2]))
    assert step(some, np.zeros(3))["executed_action"].tolist() == [1, 0, 1], "nobody moves what the policy cannot move"
    Closes.closed = False
    with pytest.raises(ConfigError, match="action_indices has"):
        make_env(Hil(task=TOY, operator=device, operator_options={"action_indices": [9]}), True)
    assert Closes.closed, "what was opened before the error is closed"
    with pytest.raises(ConfigError, match=r"operator_options=\{'mode': 'hold'\} without an operator: name one"):
        make_env(Hil(task=TOY, operator_options={"mode": "hold"}), True)


def test_the_script_is_an_operator_who_watches_not_one_who_demonstrates():
    assert step(Hil(task=TOY, operator="script"), np.zeros(3))["source"] == Source.POLICY


def test_limits_observations_and_the_grippers_penalty():
    assert task_options(Hil(max_traj_length=7, task_options={"image_size": 8})) == {"image_size": 8, "step_limit": 7}
    learned = AgentConfig(setup_mode="single-arm-learned-gripper")
    with make_env(Hil(**REACH, max_traj_length=2, agent=learned), True) as env:
        env.reset(seed=0, options=START)
        close = np.array([0, 0, 0, 0, 0, 0, -1.0])
        results = [env.step(close) for _ in range(2)]
    assert [truncated for *_, truncated, _ in results] == [False, True]
    assert results[0][4]["grasp_penalty"] == -0.02, "an open gripper was told to close"
    assert "grasp_penalty" not in step(Hil(**REACH), close)
    hil_serl = spaces(Hil(task="tabletop/reach", task_options={"image_size": 16}, observations="hil-serl"))
    assert hil_serl.observation_space["state"].shape == (1, 19) and hil_serl.observation_space["front"].shape == (
        1,
        16,
        16,
        3,
    )
    assert isinstance(spaces(Hil(**REACH)).observation_space["state"], gym.Dict)
    with pytest.raises(UnknownNameError, match="no kind of observations named 'hilserl'; did you mean 'hil-serl'"):
        check(Hil(observations="hilserl"))


class Pictures(gymnasium.Env[Any, Any]):
    """Shows one picture, and takes what `moves` says."""

    observation_space = gym.Box(0, 255, (8, 8, 3), np.uint8)

    def __init__(self, low: float = -1.0, high: float = 1.0, **options: Any):
        self.action_space = gym.Box(low, high, (2,), np.float32)
        self.given: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.given.append(action)
        return np.zeros((8, 8, 3), np.uint8), 0.0, False, False, {}


def test_an_environment_of_gymnasiums_is_taken_as_it_is():
    with make_env(Hil(task="Pendulum-v1"), True) as env:
        first, _ = env.reset(seed=0, options=START)
        assert list(first) == ["state"] and env.observation_space["state"].shape == (3,)
        assert (env.action_space.low, env.action_space.high) == (-1, 1)
        *_, info = env.step(np.ones(1, np.float32))
        assert env.unwrapped.last_u == 2.0 and info["executed_action"] == 1.0, "its own bounds are -2 and 2"
    check_fit(Hil(task="Pendulum-v1"))
    pictures = {"task": f"{__name__}:Pictures", "max_traj_length": 5}
    with make_env(Hil(**pictures, task_options={"low": 0.0}), True) as env:
        assert (
            env.reset(options=START)[0]["images"]["front"].shape
            == env.observation_space["images"]["front"].shape
            == (8, 8, 3)
        )
        env.step(np.float32([-1, 1]))
        assert env.unwrapped.given[0].tolist() == [0, 1]
    for settings, words in (
        ({"task": "CartPole-v1"}, r"CartPole-v1 takes Discrete\(2\); expected numbers"),
        ({"task": "FrozenLake-v1"}, r"FrozenLake-v1 shows Discrete\(16\); expected numbers"),
        ({**pictures, "task_options": {"high": np.inf}}, "takes actions without bounds"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_fit(Hil(**settings))


def test_a_classifier_gives_the_reward_and_the_learner_does_not_need_it(monkeypatch: pytest.MonkeyPatch):
    reward = pytest.importorskip("hilt.classifier.reward")
    asked: list[Any] = []
    monkeypatch.setattr(
        reward,
        "reward_function",
        lambda folder, threshold, space: asked.append((folder, threshold, space)) or (lambda seen: 1.0),
    )
    with make_env(Hil(task=TOY, classifier="a/folder"), True) as env:
        env.reset(seed=0, options=START)
        _, given, terminated, _, info = env.step(np.zeros(3))
        assert (given, terminated, info["succeed"]) == (1.0, True, True)
        assert asked == [("a/folder", None, env.observation_space)]
    spaces(Hil(task=TOY, classifier="a/folder"))
    assert len(asked) == 1
    make_env(Hil(task=TOY, classifier="a/folder", classifier_threshold=0.9), True).close()
    assert asked[1][1] == 0.9


def test_a_value_model_adds_a_dense_reward_and_ends_hopeless_episodes(tmp_path: Path):
    model = str(save_untrained(tmp_path / "value", {"observations/state/left/point": 3}))

    def played(operator: bool = True, **use: Any) -> list[Any]:
        with make_env(Hil(task=TOY, value=ValueUse(model, **use)), operator) as env:
            env.reset(seed=0, options=START)
            return [env.step(np.full(3, 0.1)) for _ in range(3)]

    plain, dense = played(operator=False, reward=1.0), played(reward=1.0)
    assert [step[1] for step in plain] == [0.0] * 3  # an evaluation has the rewards of the task
    assert all(step[1] != 0 for step in dense)
    twice = played(reward=2.0)
    assert [step[1] for step in twice] == pytest.approx([2 * step[1] for step in dense])
    ended = played(stop_below=0.999, stop_patience=2)
    assert [step[3] for step in ended] == [False, True, True] and "stopped_by_value" in ended[1][4]
    assert [step[1:4] for step in played()] == [step[1:4] for step in plain], "alone it watches"
    check(Hil(value=ValueUse(model)))
    clipped = AgentConfig(rlpd=Rlpd(target_range=[0.0, 1.0]))
    with pytest.raises(ConfigError, match=r"Give agent.rlpd.target_range=null"):
        check(Hil(value=ValueUse(model, 1.0), agent=clipped))
    with pytest.raises(ConfigError, match="is no value model"):
        make_env(Hil(task=TOY, value=ValueUse("nowhere", 1.0)), True)


def test_a_value_model_shows_the_operator_what_it_expects(tmp_path: Path):
    class Screen(Device):
        screen = True

        def read(self) -> Reading:
            return Reading()

        def show(self, images: Any, status: Status) -> None:
            shown.append(status)

    shown: list[Status] = []
    model = str(save_untrained(tmp_path / "value", {"observations/state/left/point": 3}))
    workplace.open_device, before = (lambda *_, **__: Screen()), workplace.open_device
    try:
        for below, marked in ((0.0, False), (0.999, True)):
            shown.clear()
            config = Hil(task=TOY, operator="mine", value=ValueUse(model, alarm_below=below, alarm_patience=2))
            with make_env(config, True) as env:
                env.reset(seed=0, options=START)
                raised = []
                for _ in range(3):
                    env.step(np.full(3, 0.1))
                    raised.append(env.get_wrapper_attr("value_alarm")() is not None)
            assert raised == [False, marked, False], "after two steps in a row"
            assert (shown[0].success_probability, shown[0].alarm) == (None, False)
            assert 0 < shown[-1].success_probability < 1 and shown[-1].alarm == marked
    finally:
        workplace.open_device = before


def test_an_alarm_that_never_comes_is_refused():
    end = {"stop_below": 0.2, "stop_patience": 5}
    check(Hil(operator="script", value=ValueUse("m", alarm_below=0.2, alarm_patience=4, **end)))
    check(Hil(operator="script", value=ValueUse("m", alarm_below=0.3, alarm_patience=9, **end)))
    with pytest.raises(
        ConfigError, match=r"alarm_below=0\.1 with value\.stop_below=0\.2: the episode has ended before"
    ):
        check(Hil(operator="script", value=ValueUse("m", alarm_below=0.1, alarm_patience=5, **end)))
    with pytest.raises(ConfigError, match=r"value\.alarm_below=0\.1 would do nothing: it needs an operator"):
        check(Hil(value=ValueUse("m", alarm_below=0.1)))


def test_spaces_connects_to_nothing():
    # nobody is there
    robot = spaces(Hil(task="robot/127.0.0.1:9", task_options={"cameras": ["front"]}, operator="browser"))
    assert robot.action_space.shape == (7,)


def test_the_wires_settings():
    here, there = (
        trainer_config(Hil(wire=Wire(port=7001, broadcast_port=7002)), learner=learner) for learner in (True, False)
    )
    assert (here.port_number, here.broadcast_port, here.bind_ip, here.keys) == (7001, 7002, "127.0.0.1", None)
    assert here.agreement() == there.agreement() and there.bind_ip is None
    other = trainer_config(Hil(agent=AgentConfig(hidden=[64])), learner=False)
    assert other.agreement() != there.agreement(), "weights of other sizes are refused at the handshake"
    keys = Hil(wire=Wire(host="learner.lan", keys="keys", key_name="arm"))
    assert trainer_config(keys, learner=True).bind_ip is None and trainer_config(keys, learner=True).key_name is None
    assert trainer_config(keys, learner=False).key_name == "arm" and trainer_config(keys, learner=False).keys == "keys"
    # which the wire refuses without keys
    assert trainer_config(Hil(wire=Wire(host="192.168.1.5")), learner=True).bind_ip == "192.168.1.5"
    assert workplace.NullDevice().read().engaged is False
