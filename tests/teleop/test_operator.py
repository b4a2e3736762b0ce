"""The scripted operator: its rule on a made-up expert, then on the tabletop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.envs.tabletop.suite_env import TabletopEnv
from hilt.envs.wrappers import GripperCloseEnv
from hilt.teleop.devices import open_device
from hilt.teleop.intervene import TakeOver
from hilt.teleop.operator import LATE, PROGRESS_WINDOW, TURN, Script
from tests.teleop.played import Noting

WISH = np.array([0.5, 0, -0.5, 0, 0, 0.1, 1])


class Known(Noting):
    """An expert that always wants the same."""

    plans = 0

    def expert(self) -> Any:
        self.plans += 1
        return lambda: WISH


def sources(env: Any, action: Any, steps: int, mode: str = "hold") -> list[int]:
    taken = TakeOver(env, Script(operator=True), mode=mode)  # type: ignore[arg-type]
    taken.reset()
    return [taken.step(action)[4]["source"] for _ in range(steps)]


# --- the rule
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hold", "toggle"])
@pytest.mark.parametrize("action", [np.zeros(7), -WISH, [0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1], 0.2 * WISH])
def test_a_policy_without_progress_is_taken_over_and_given_back(action: Any, mode: str):
    env = Known(limit=10_000)
    watched, acted = [Source.POLICY] * PROGRESS_WINDOW, [Source.HUMAN] * TURN
    assert sources(env, np.asarray(action), 2 * (PROGRESS_WINDOW + TURN), mode) == (watched + acted) * 2
    np.testing.assert_array_equal(env.got[PROGRESS_WINDOW : PROGRESS_WINDOW + TURN], np.float32([WISH] * TURN))
    assert env.plans == 2 * PROGRESS_WINDOW + 2, (
        "a new one at each step that it watches, and one each time it takes over"
    )


@pytest.mark.parametrize("action", [WISH, 0.3 * WISH, 9 * WISH, [0.5, 0.9, -0.5, 0, 0, 0, -1]])
def test_a_policy_that_makes_progress_is_left_alone_until_it_is_late(action: Any):
    limit = 200
    late = int(LATE * limit)
    env = Known(limit=limit)
    assert sources(env, np.asarray(action), limit) == [Source.POLICY] * late + [Source.HUMAN] * (limit - late)
    assert env.plans == late, "a new one at each step that it watches, and the last one goes on"


def test_each_episode_begins_with_the_policy():
    env = TakeOver(Known(limit=10_000), Script(operator=True))
    env.reset()
    for _ in range(PROGRESS_WINDOW - 1):
        env.step(np.zeros(7))
    for _ in range(2):
        env.reset()
        found = [env.step(np.zeros(7))[4] for _ in range(PROGRESS_WINDOW + 3)]
        assert [info["source"] for info in found] == [Source.POLICY] * PROGRESS_WINDOW + [Source.HUMAN] * 3
        assert (found[-1]["intervention_count"], found[-1]["intervention_steps"]) == (1, 3)


# --- the tabletop
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hold", "toggle"])
def test_a_demonstration_is_the_experts_from_the_first_step(mode: str):
    with TabletopEnv("reach", image_size=None) as table:
        env = TakeOver(table, open_device("script"), mode=mode, policy=False)  # type: ignore[arg-type]
        for state in (0, 1):
            env.reset(options={"split": "train", "state": state})
            ended, steps = False, 0
            while not ended:
                _, _, terminated, truncated, info = env.step(np.zeros(7))
                ended, steps = terminated or truncated, steps + 1
                assert info["source"] == Source.DEMO
            assert info["succeed"] and info["intervention_steps"] == steps


def test_the_operator_rescues_an_episode_and_never_sets_the_simulators_state():
    with TabletopEnv("push", image_size=None) as table:
        operator = Script(operator=True)
        read, changed = operator.read, []

        def watched() -> Any:
            before = table.world.snapshot()
            reading = read()
            changed.append(not np.array_equal(before, table.world.snapshot()))
            return reading

        operator.read = watched  # type: ignore[method-assign]
        env = TakeOver(table, operator)
        env.reset(options={"split": "train", "state": 0})
        ended = False
        while not ended:
            _, _, terminated, truncated, info = env.step(np.zeros(7))
            ended = terminated or truncated
        assert info["succeed"] and info["source"] == Source.HUMAN and info["intervention_count"] == 1
        assert len(changed) > PROGRESS_WINDOW and not any(changed)


def test_an_environment_that_leaves_the_gripper_out_gets_the_rest():
    with GripperCloseEnv(TabletopEnv("reach", image_size=None)) as table:
        env = TakeOver(table, Script(), policy=False)
        env.reset(options={"split": "train", "state": 0})
        assert env.step(np.zeros(6))[4]["intervene_action"].shape == (6,)


# --- without an expert
# ------------------------------------------------------------------------------------------------------------


def test_script_without_an_expert_reports_what_to_provide():
    with pytest.raises(
        ConfigError,
        match=r"has no expert\(\) for the device script: give it a method expert\(\).*-d expert=module:function",
    ):
        TakeOver(Noting(), Script())
    env = TakeOver(Noting(action_space=spaces.Discrete(3)), Script(expert=f"{__name__}:always_two"))
    env.reset()
    env.step(0)
    assert env.unwrapped.got == [2]


def always_two(env: Any) -> Any:
    return lambda: 2


def test_an_expert_that_makes_no_function_is_refused():
    env = TakeOver(Noting(), Script(expert=lambda env: WISH))
    env.reset()
    with pytest.raises(ConfigError, match="expected a function that gives the next action"):
        env.step(np.zeros(7))


def test_script_expert_with_an_argument_is_an_error():
    env = TakeOver(Noting(), Script(expert=lambda env: lambda observation: WISH))
    env.reset()
    with pytest.raises(
        ConfigError, match=r"cannot be called without arguments \(missing a required argument: 'observation'\)"
    ):
        env.step(np.zeros(7))


def test_an_operator_judges_boxes_only():
    with pytest.raises(ConfigError, match="an operator judges actions of a Box with one axis"):
        TakeOver(Noting(action_space=spaces.Discrete(3)), Script(operator=True, expert=lambda env: lambda: 2))


def test_an_expert_can_be_made_slower_inexact_and_restricted_to_some_numbers():
    wish = np.array([1, -1, 0.5, 1, 1, 1, -1.0])
    space = spaces.Box(-1, 1, (7,), np.float32)

    def actions(**options: Any) -> np.ndarray:
        script = Script(expert=lambda env: lambda: wish, **options)
        env = TakeOver(Noting(action_space=space), script, policy=False)
        env.reset()
        return np.array([script.read().action for _ in range(500)])

    assert (actions(speed=0.5) == [*wish[:6] * 0.5, -1]).all(), "the gripper is not slower"
    noisy = actions(noise=0.2, seed=3)
    assert (
        (noisy[:, 6] == -1).all()
        and np.abs(noisy.std(0)[:6] - 0.2).max() < 0.03
        and np.abs(noisy.mean(0) - wish).max() < 0.05
    )
    assert (noisy == actions(noise=0.2, seed=3)).all() and (noisy != actions(noise=0.2, seed=4))[:, :6].all()
    assert (actions(action_indices=[0, 6]) == [1, 0, 0, 0, 0, 0, -1]).all()
    with pytest.raises(ConfigError, match=r"speed=0, noise=0\.0: expected a share of the expert's speed"):
        Script(speed=0)


def test_an_operator_with_a_reaction_time_acts_later_and_one_that_tires_only_watches_in_the_end():
    still, once = np.zeros(7), [Source.POLICY] * PROGRESS_WINDOW + [Source.HUMAN] * TURN
    env = Known(limit=10_000)
    late = TakeOver(env, Script(operator=True, delay=4))
    late.reset()
    got = [late.step(still)[4]["source"] for _ in range(PROGRESS_WINDOW + TURN + 4)]
    assert got == [Source.POLICY] * 4 + once, "four steps after it decided to take over, and to give back"
    tired = TakeOver(Known(limit=10_000), Script(operator=True, tires_after=TURN + 5))
    for wanted in (once + once[: PROGRESS_WINDOW + 5] + [Source.POLICY] * (TURN - 5), [Source.POLICY] * 2 * len(once)):
        tired.reset()
        assert [tired.step(still)[4]["source"] for _ in range(2 * len(once))] == wanted
    for wrong in ({"operator": True, "delay": -1}, {"tires_after": 5}):
        with pytest.raises(ConfigError, match="expected numbers of steps from 0 on, of an operator"):
            Script(**wrong)


def test_an_operator_judges_by_as_many_steps_as_it_is_told():
    env = TakeOver(Known(limit=10_000), Script(operator=True, window=3))
    env.reset()
    got = [env.step(np.zeros(7))[4]["source"] for _ in range(5)]
    assert got == [Source.POLICY] * 3 + [Source.HUMAN] * 2
    for wrong, given in (
        ({"window": 0}, "window=0, teaches=0"),
        ({"teaches": -1}, "window=15, teaches=-1"),
    ):
        with pytest.raises(
            ConfigError, match=f"{given}: expected a number of steps from 1 on, and a number of episodes"
        ):
            Script(operator=True, **wrong)


def test_an_operator_that_teaches_takes_over_at_the_first_step_that_is_not_right():
    env = TakeOver(Known(limit=10_000), Script(operator=True, teaches=2))
    nearly, poor = 0.95 * WISH, 0.8 * WISH
    for first in ([Source.POLICY, Source.POLICY, Source.HUMAN], [Source.POLICY, Source.POLICY, Source.HUMAN]):
        env.reset()
        got = [env.step(action)[4]["source"] for action in (nearly, poor, poor)]
        assert got == first, "it lets the first step pass, and not the second"
    env.reset()
    got = [env.step(poor)[4]["source"] for _ in range(PROGRESS_WINDOW + 1)]
    assert got == [Source.POLICY] * len(got), "after two episodes it is as patient as any"


def test_an_operator_that_is_asked_takes_over_for_a_turn():
    """A policy that makes progress is left alone, unless it asks for help itself."""
    device = Script(operator=True)
    env = TakeOver(Known(limit=10_000), device)
    env.reset()
    made = [env.step(WISH)[4]["source"] for _ in range(3)]
    env.ask("help")
    made += [env.step(WISH)[4]["source"] for _ in range(TURN + 3)]
    assert made == [Source.POLICY] * 3 + [Source.HUMAN] * TURN + [Source.POLICY] * 3
    assert env.message == "help" and not device.waited_for


@pytest.mark.parametrize(
    ("task", "options", "window"),
    [("button", {}, 3), ("push", {}, PROGRESS_WINDOW), ("press_blue", {"control_hz": 5, "step_limit": 18}, 3)],
)
def test_operator_does_not_take_over_from_its_own_expert(task: str, options: dict[str, Any], window: int):
    """It judges by a new plan at each step, which must want what the plan that is under way wants."""
    env = TakeOver(TabletopEnv(task, image_size=None, **options), Script(operator=True, window=window))
    for state in range(3):
        env.reset(options={"split": "test", "state": state})
        plan, ended, info = env.get_wrapper_attr("expert")(), False, dict[str, Any]()
        while not ended:
            *_, terminated, truncated, info = env.step(plan())
            ended = terminated or truncated
        assert info["succeed"] and info["intervention_steps"] == 0
    env.close()
