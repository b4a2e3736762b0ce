"""Several tasks as one: whose turn it is, what is to be done, and tasks that cannot be mixed."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.envs.task import check_task, make
from hilt.envs.task_mix import TASK_NUMBER, TaskMix
from tests.hil.toy import Toy

OPTIONS = {"image_size": 16, "cameras": ["wrist"], "control_hz": 5, "step_limit": 9}


class Lift(Toy):
    instruction = "lift it"

    def __init__(self):
        super().__init__()
        self.initial_states = {"test": 3, "train": 4, "eval": 1}


def mix(**tasks):
    return TaskMix(list(tasks), lambda name: tasks[name]())


def test_states_take_turns_between_the_tasks():
    env = mix(reach=Toy, lift=Lift)
    assert env.initial_states == {"train": 8, "test": 4}  # of each the fewest, and only common splits
    assert env.instructions == ("reach the goal", "lift it")
    for state, (task, own) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        _, info = env.reset(options={"split": "test", "state": state})
        assert (info[TASK_NUMBER], info["state"], env.task.state) == (task, state, own)
        assert env.instruction == env.instructions[task] and env.task is env.tasks[task]
        assert env.step(np.zeros(3))[4][TASK_NUMBER] == task
    assert [env.reset(seed=5)[1]["state"] for _ in range(3)] == [env.reset(seed=5)[1]["state"]] * 3
    with pytest.raises(ConfigError, match="state 4 of split 'test' was asked for; it has the states 0 to 3"):
        env.reset(options={"split": "test", "state": 4})


def test_expert_and_limits_are_those_of_the_episodes_task():
    class Short(Lift):
        def __init__(self):
            super().__init__()
            self.step_limit, self.control_hz = 2, 7.0

    env = mix(reach=Toy, lift=Short)
    env.reset(options={"split": "train", "state": 1})
    assert (env.step_limit, env.control_hz) == (2, 7.0)
    np.testing.assert_array_equal(env.expert()(), env.task.expert()())
    assert [env.step(np.zeros(3))[3] for _ in range(2)] == [False, True]


def test_tasks_that_differ_in_what_they_show_or_take_are_refused_and_closed():
    closed = []

    class Other(Toy):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

        def close(self):
            closed.append("other")

    with pytest.raises(
        ConfigError, match=r"reach and other cannot be mixed: the action_space of the first is .*\(3,\)"
    ):
        mix(reach=Toy, other=Other)
    assert closed == ["other"]
    with pytest.raises(ConfigError, match=r"reach\+reach has one of them twice"):
        TaskMix(["reach", "reach"], lambda name: Toy())


def test_names_joined_by_a_plus_make_a_mix_that_is_a_task():
    env = make("tabletop/press_red+tabletop/pick", **OPTIONS)
    assert isinstance(env, TaskMix) and check_task(env) == []
    assert env.instructions == ("press the red button and no other", make("tabletop/pick").instruction)
    env.close()
    with pytest.raises(UnknownNameError, match="no tabletop task named 'press_rot'"):
        make("tabletop/press_red+tabletop/press_rot", **OPTIONS)
