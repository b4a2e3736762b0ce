"""A value model beside an episode: the dense reward, in an environment and of a recorded episode, and the early end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import STOPPED
from hilt.core.tree import Array
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.value.online_value import JUDGED_EPISODES, OnlineValue, ValueWatch, shaping_rewards
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_model import load_value_model
from hilt.value.value_training import train_value
from tests.value.valued import save_untrained, write_log

TINY = SmallVLAConfig(cameras=("full_image",), image_size=16, state_dim=2, width=16, depth=1, heads=2, keypoints=2)
STATE = {"observations/state": 2}


class Line(gymnasium.Env[Any, Any]):
    """A point that goes on by itself, and arrives after 8 steps."""

    observation_space = Dict({"state": Box(-9, 9, (2,), np.float32)})
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, human: tuple[int, ...] = ()):
        self.steps, self.human = 0, human

    def reset(self, **_: Any) -> Any:
        self.steps = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        info = {"intervene_action": action} if self.steps in self.human else {}
        return self.seen(), float(self.steps == 8), self.steps == 8, False, info

    def seen(self) -> dict[str, Array]:
        return {"state": np.array([self.steps / 4, -self.steps / 3], np.float32)}


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> OnlineValue:
    folder = save_untrained(tmp_path_factory.mktemp("online") / "value", STATE)
    return OnlineValue(load_value_model(folder), Line.observation_space)


def played(env: gymnasium.Env) -> list[Any]:
    env.reset()
    steps = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(np.zeros(1)))
    return steps


def test_dense_reward_is_the_difference_of_potentials_and_the_same_of_a_recorded_episode(value: OnlineValue):
    steps = played(ValueWatch(Line(), value, discount=0.9, reward=2.0))
    seen = [{"state": np.array([t / 4, -t / 3], np.float32)} for t in range(9)]
    v = [value(each)[0] for each in seen]
    assert len({round(x, 4) for x in v}) > 4  # the potential is not a constant
    want = [(t == 7) + 2 * (0.9 * v[t + 1] * (t < 7) - v[t]) for t in range(8)]
    np.testing.assert_allclose([step[1] for step in steps], want, rtol=1e-5, atol=1e-6)
    # what was added comes to -V(s_0), whatever was done: the order of policies stays
    added = sum(0.9**t * (step[1] - (t == 7)) for t, step in enumerate(steps))
    assert added == pytest.approx(-2 * v[0], rel=1e-4)
    states = np.stack([each["state"] for each in seen])
    columns = {
        "observations/state": states[:-1],
        "next_observations/state": states[1:],
        "terminated": np.arange(8) == 7,
    }
    of_task = np.float32([step[4]["hilt/task_reward"] for step in steps])
    assert of_task.tolist() == [0] * 7 + [1]
    dense = shaping_rewards(columns, value, [""] * 8, 0.9, 2.0)
    np.testing.assert_allclose(of_task + dense, want, rtol=1e-5, atol=1e-6)


def test_hopeless_episodes_are_truncated_unless_a_person_acts(value: OnlineValue):
    # below 1 is every probability
    steps = played(ValueWatch(Line(), value, 0.9, stop_below=1.0, patience=3))
    assert len(steps) == 3 and steps[-1][2:4] == (False, True) and 0 < steps[-1][4][STOPPED] < 1
    assert [step[1] for step in steps] == [0.0] * 3  # no reward was asked for
    helped = played(ValueWatch(Line(human=(2, 5)), value, 0.9, stop_below=1.0, patience=3))
    assert len(helped) == 8 and helped[-1][2] and STOPPED not in helped[-1][4]  # it arrived before the third in a row
    assert len(played(ValueWatch(Line(), value, 0.9, stop_below=1e-9, patience=1))) == 8


def test_an_alarm_comes_once_in_a_row_of_doubtful_steps_in_which_no_person_acts(value: OnlineValue):
    def alarms(human: tuple[int, ...] = (), since: int = 1, **limits: Any) -> list[int]:
        env = ValueWatch(Line(human), value, 0.9, **limits)
        env.reset()
        raised = []
        for step in range(1, 9):
            env.step(np.zeros(1))
            assert env.success_probability == env.value_figures()["value_success"]
            if step < since:  # as an actor does while its steps are random
                continue
            if (found := env.value_alarm()) is not None:
                assert found == env.success_probability
                raised.append(step)
            assert env.value_alarm() is None, "a second question is not asked"
        assert env.value_figures().get("value_alarms", 0) == len(raised)
        return raised

    assert alarms(alarm_below=1.0, alarm_patience=3) == [3]  # below 1 is every probability
    assert alarms((4,), alarm_below=1.0, alarm_patience=3) == [3, 7], "after a person it is asked again"
    assert alarms((2,), alarm_below=1.0, alarm_patience=3) == [5]
    assert alarms(since=6, alarm_below=1.0, alarm_patience=3) == [6], "as soon as it is asked"
    assert alarms((7,), since=6, alarm_below=1.0, alarm_patience=1) == [6, 8]
    assert alarms(alarm_below=1e-9, alarm_patience=1) == [] and alarms() == []


def test_a_person_sees_what_is_expected_of_this_episode(value: OnlineValue):
    shown: list[Any] = []

    class Page(gymnasium.Wrapper):
        def show_expectation(self, success: Any, alarm_below: float) -> None:
            self.success = success
            shown.append(alarm_below)

        def reset(self, **given: Any) -> Any:
            shown.append(self.success())
            return super().reset(**given)

        def step(self, action: Any) -> Any:
            shown.append(self.success())
            return super().step(action)

    env = ValueWatch(Page(Line()), value, 0.9, alarm_below=0.25)
    env.reset()
    env.step(np.zeros(1))
    env.step(np.zeros(1))
    env.reset()
    seen = [value({"state": np.array([t / 4, -t / 3], np.float32)})[1] for t in range(2)]
    assert shown == [0.25, None, pytest.approx(seen[0]), pytest.approx(seen[1]), None]


def test_value_figures_compare_what_was_expected_with_what_came(value: OnlineValue):
    class Known(Line):
        """Every fourth episode is no success."""

        episodes = 0

        def reset(self, **given: Any) -> Any:
            self.episodes += 1
            return super().reset(**given)

        def step(self, action: Any) -> Any:
            *seen, info = super().step(action)
            return (*seen, {**info, "succeed": self.episodes % 4 > 0})

    env = ValueWatch(Known(), value, 0.9, reward=1.0)
    for _ in range(JUDGED_EPISODES):
        assert env.value_figures().keys() <= {"value_success"}, "which is of the running episode"
        played(env)
    figures = env.value_figures()
    each = [value({"state": np.array([t / 4, -t / 3], np.float32)})[1] for t in range(1, 9)]
    assert figures["value_expected"] == pytest.approx(np.mean(each, dtype=np.float64), rel=1e-6)
    assert (figures["value_realized"], figures["value_hopeless"]) == (0.75, 0.0)
    ended = ValueWatch(Known(), value, 0.9, stop_below=1.0, patience=3)
    for _ in range(JUDGED_EPISODES):
        played(ended)
    found = ended.value_figures()
    assert found.pop("value_success") > 0 and found == {"value_hopeless": 1.0}, "an end tells nothing of the outcome"


def test_an_environment_that_does_not_fit_is_refused_at_once(value: OnlineValue, tmp_path: Path):
    with pytest.raises(SchemaError, match="looks at state of 2 numbers, and here it has 3"):
        OnlineValue(value.model, Dict({"state": Box(0, 1, (3,), np.float32)}))


def test_a_model_on_features_takes_those_of_the_observations(tmp_path: Path):
    SmallVLA(TINY, seed=0).save_pretrained(tmp_path / "policy")
    config = ValueConfig(policy=str(tmp_path / "policy"), hidden=16, steps=4, evaluate_every=2, batch_size=16)
    with ValueEpisodes([write_log(tmp_path / "log", 12, tasks=("tabletop/pick",))]) as episodes:
        config = replace(config, columns={"full_image": "images/front", "state": "state"})
        made = train_value(episodes, config, tmp_path / "value")
        assert made is not None
        expected = made.predict(episodes, 2)
        features = made.extractor(episodes, episodes.rows([2])).numpy()
    model = load_value_model(tmp_path / "value")
    weights = model.extractor.weights

    def space(name: str) -> Dict:
        return Dict({"base_policy": Dict({name: Dict({"features": Box(-np.inf, np.inf, (16,), np.float32)})})})

    value = OnlineValue(model, space(weights))
    for step in (0, 5):
        got = value({"base_policy": {weights: {"features": features[step]}}, "state": np.zeros(3)}, "lift it")
        assert got == pytest.approx((expected.value[step], expected.success[step]), rel=1e-5, abs=1e-6)
    leaves = {f"base_policy/{weights}/features": features}
    np.testing.assert_allclose(value.of_columns(leaves, [""] * len(features))[0], expected.value, rtol=1e-5, atol=1e-6)
    assert model.extractor._policy is None, "nobody has loaded the policy"
    with pytest.raises(ConfigError, match=f"have the hash {weights}, and .* here, but of one with ffff00001111. Give"):
        OnlineValue(model, space("ffff00001111"))
    with pytest.raises(ConfigError, match=r"have no features of it here\. Give it to a run beside this policy"):
        OnlineValue(model, Line.observation_space)
