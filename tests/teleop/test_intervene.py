"""Who acts, what is executed, what info says of it; and that the arm does not jump when control changes hands."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hilt.core.errors import ConfigError, EmergencyStopError, RequestError, SchemaError
from hilt.core.trajectory import Source
from hilt.envs.chunk_executor import ExecutedChunk
from hilt.envs.tabletop.suite_env import TabletopEnv
from hilt.teleop import emergency_stop
from hilt.teleop.devices import Reading, open_device
from hilt.teleop.emergency_stop import LATCHED
from hilt.teleop.intervene import (
    BRIEF_SECONDS,
    FIRST_COMMAND,
    LET_GO,
    LET_GO_ARM,
    LET_GO_CONTACT,
    LET_GO_ESTOP,
    TakeOver,
    images_of,
)
from tests.teleop.played import Noting, Played, push

POLICY = np.full(7, 0.5)


def played(*readings: Reading, env: Any = None, **options: Any) -> TakeOver:
    taken = TakeOver(env or Noting(), Played(readings), **options)
    taken.reset()
    return taken


def infos(env: TakeOver, steps: int, action: Any = POLICY) -> list[dict[str, Any]]:
    return [env.step(action)[4] for _ in range(steps)]


# --- who acts
# ---------------------------------------------------------------------------------------------------------------------


def test_a_person_acts_while_the_device_is_held():
    env = played(Reading(), push(1), push(0.5, gripper=1), Reading(), push(0, -1))
    found = infos(env, 5)
    assert [info["source"] for info in found] == [
        Source.POLICY,
        Source.HUMAN,
        Source.HUMAN,
        Source.POLICY,
        Source.HUMAN,
    ]
    np.testing.assert_array_equal(env.unwrapped.got[1:4], [[1, 0, 0, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0, 1], POLICY])
    assert [("intervene_action" in info) for info in found] == [False, True, True, False, True]
    assert [info["intervention_count"] for info in found] == [0, 1, 1, 1, 2]
    assert [info["intervention_steps"] for info in found] == [0, 1, 2, 2, 3]
    env.reset()
    assert infos(env, 1)[0]["intervention_steps"] == 0


def test_take_over_info_has_the_executed_action():
    env = played(Reading(), push(3, 0.1, gripper=-1), push(0.1))
    for info, got in zip(infos(env, 3, np.array([2.0, -7, 0, 0, 0, 0, 0.3])), env.unwrapped.got, strict=True):
        assert info["executed_action"].dtype == got.dtype == np.float32
        assert env.action_space.contains(got)
        np.testing.assert_array_equal(info["executed_action"], got)
        np.testing.assert_array_equal(info.get("intervene_action", got), got)
    np.testing.assert_array_equal(
        env.unwrapped.got[:2], np.float32([[1, -1, 0, 0, 0, 0, 0.3], [1, 0.1, 0, 0, 0, 0, -1]])
    )


def test_take_over_info_is_safe_from_environments_that_change_actions():
    class Halving(Noting):
        def step(self, action: Any) -> Any:
            action *= 0.5
            return super().step(action)

    env = played(Reading(), push(1), env=Halving())
    assert [info["executed_action"][0] for info in infos(env, 2)] == [0.5, 1] and env.unwrapped.got[1][0] == 0.5


def test_a_toggle_switches_whatever_is_held():
    toggle = Reading(events=("toggle",))
    env = played(
        push(1), toggle, Reading(), push(0, 1), toggle, push(1), push(1, events=("toggle", "toggle")), mode="toggle"
    )
    found = infos(env, 7)
    assert [info["source"] for info in found] == [0, 1, 1, 1, 0, 0, 0]
    np.testing.assert_array_equal(env.unwrapped.got[1:4], [[0] * 7, [0] * 7, [0, 1, 0, 0, 0, 0, 0]])
    assert found[-1]["intervention_count"] == 1


def test_a_toggle_ends_with_the_episode():
    env = played(Reading(events=("toggle",)), mode="toggle")
    assert infos(env, 2)[1]["source"] == Source.HUMAN
    env.reset()
    assert infos(env, 1)[0]["source"] == Source.POLICY


def test_lost_contact_holds_still_until_it_is_back():
    env = played(push(1), push(1, lost=True, gripper=1), Reading(lost=True), Reading())
    found = infos(env, 4)
    assert [info.get("lost", False) for info in found] == [False, True, True, False]
    assert [info["source"] for info in found] == [1, 1, 1, 0]
    np.testing.assert_array_equal(env.unwrapped.got[1:3], np.zeros((2, 7)))
    assert [status.who for _, status in env.device.shown] == ["policy", "human", "none", "none", "policy"]


def test_a_pause_keeps_events_and_the_step_after_it_moves_nothing():
    env = played(
        Reading(), push(1), push(1, lost=True), Reading(lost=True, events=("reset",)), push(1), push(0), push(1)
    )
    found = infos(env, 3)
    assert env.poll().lost and not env.poll().lost
    *_, truncated, info = env.step(np.full(7, 0.5))
    assert truncated and info["lost"] and [info["intervention_steps"] for info in [*found, info]] == [0, 1, 1, 1]
    assert [got[0] for got in env.unwrapped.got] == [0.5, 1, 0, 0] and "lost" not in infos(env, 1)[0]


def test_released_the_policy_acts_until_contact_is_back():
    for mode in ("hold", "toggle"):
        env = played(push(0, events=("toggle",)), *[push(0, lost=True)] * 4, push(0), mode=mode)
        infos(env, 2)
        env.release()
        assert [info["source"] for info in infos(env, 4)] == [0, 0, 0, 1]


def test_take_over_ignores_inputs_held_when_contact_returns():
    now = iter([10.0, 10.1 + BRIEF_SECONDS])
    env = played(Reading(), push(1), push(1, lost=True), push(1), push(0), push(1), clock=now.__next__)
    infos(env, 6)
    assert [got[0] for got in env.unwrapped.got] == [0.5, 1, 0, 0, 0, 1]
    assert [status.message for _, status in env.device.shown[1:]] == ["", "", "", LET_GO_CONTACT, "", ""], (
        "and the reason is the right one"
    )


def test_take_over_continues_inputs_held_over_a_brief_stall():
    """A network or a computer that stalls for 0.2 s muted the keys, with the reason of a hand-over."""
    now = iter([10.0, 10.3])
    env = played(Reading(), push(1), push(1, lost=True), push(0, lost=True), push(1), push(1, 1), clock=now.__next__)
    infos(env, 6)
    assert [got[0] for got in env.unwrapped.got] == [0.5, 1, 0, 0, 1, 1] and env.unwrapped.got[-1][1] == 1
    assert not any(status.message for _, status in env.device.shown)


def test_the_reason_names_what_changed():
    env = played(push(1), push(1), push(0), push(1), push(1, arm=1), push(0, arm=1), env=Noting(14))
    infos(env, 6)
    assert [status.message for _, status in env.device.shown[1:]] == [LET_GO, LET_GO, "", "", LET_GO_ARM, ""]


def test_a_toggle_outlasts_lost_contact():
    """A gamepad that is plugged in again does not start the policy: the person who had taken over gives back."""
    toggle, lost = Reading(events=("toggle",)), Reading(lost=True)
    assert [info["source"] for info in infos(played(toggle, lost, Reading(), toggle, mode="toggle"), 4)] == [1, 1, 1, 0]


def test_a_person_sees_the_plan_of_the_policy_until_somebody_else_acts_or_it_is_undone():
    env = played(Reading(), push(0), Reading())
    env.show_plans(lambda: ExecutedChunk(0, np.zeros((3, 7)), 1, 0.6))
    env.count_down(lambda: 40)
    expected = iter([0.3, 0.1, 0.2, None, None])
    env.show_expectation(lambda: next(expected), 0.2)
    device = env.device
    assert isinstance(device, Played)
    assert device.shown[-1][1].confidence is None and device.shown[-1][1].episodes_left is None
    infos(env, 3)
    assert [status.confidence for _, status in device.shown[-3:]] == [0.6, None, 0.6], "the second step is a person's"
    assert [status.success_probability for _, status in device.shown[-3:]] == [0.3, 0.1, 0.2], "whoever acts"
    assert [status.alarm for _, status in device.shown[-3:]] == [False, True, False]
    env.rewound()
    assert device.shown[-1][1].confidence is None
    env.reset()
    assert device.shown[-1][1].episodes_left == 13, "of three steps each, as the first one"


def test_without_a_policy_doing_nothing_is_the_persons_too():
    env = played(Reading(), push(1), policy=False)
    found = infos(env, 2, np.zeros(7))
    assert [(info["source"], "intervene_action" in info) for info in found] == [
        (Source.HUMAN, False),
        (Source.HUMAN, True),
    ]
    assert [status.who for _, status in env.device.shown] == ["none", "none", "human"]


# --- the emergency stop
# -----------------------------------------------------------------------------------------------------------


class Served(Noting):
    """An arm behind a robot server: it has an emergency stop of its own, and refuses actions while that is latched."""

    action_scale = (0.03, 0.15)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.stopped = self.absent = False

    def _answer(self, what: str, stopped: bool) -> None:
        self.asked.append(what)
        if self.absent:
            raise RequestError("no robot server answers")
        self.stopped = stopped

    def estop(self) -> None:
        self._answer("estop", True)

    def release_estop(self) -> None:
        self._answer("release", False)

    def is_estopped(self) -> bool:
        return self.stopped

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action if not self.stopped else np.zeros(7, np.float32))
        return *rest, {**info, **({"estop": True} if self.stopped else {})}


@pytest.mark.parametrize("mode", ["hold", "toggle"])
def test_emergency_stop_holds_policy_person_and_script_until_it_is_released(mode: str):
    script = Reading(engaged=True, action=np.ones(7))
    env = played(
        Reading(events=("toggle",)),
        push(0),
        push(1),
        push(1, events=("estop",)),
        push(1, gripper=1),
        script,
        push(0, 1, events=("toggle", "toggle", "success", "fail", "reset")),
        push(1, events=("release_estop",)),
        push(0),
        push(1),
        env=Served(),
        mode=mode,
    )
    found = [env.step(POLICY) for _ in range(10)]
    infos = [info for *_, info in found]
    assert not any(terminated or truncated for _, _, terminated, truncated, _ in found), "nothing else counts"
    assert [info.get("estop", False) for info in infos] == [False] * 3 + [True] * 4 + [False] * 3
    assert all(info["lost"] for info in infos[3:7]) and "lost" not in infos[7]
    assert [got[0] for got in env.unwrapped.got[2:]] == [1, 0, 0, 0, 0, 0, 0, 1], "what is held is released first"
    np.testing.assert_array_equal([info["executed_action"] for info in infos[3:7]], np.zeros((4, 7)))
    assert (
        env.unwrapped.asked == ["estop", "release"]
        and [i["intervention_steps"] for i in infos][2:7] == [3 - (mode == "hold")] * 5
    )
    messages = [status.message for _, status in env.device.shown[1:]]
    assert messages[3:8] == [LATCHED] * 4 + [LET_GO_ESTOP]
    assert [status.estop for _, status in env.device.shown[1:]] == [False] * 3 + [True] * 4 + [False] * 3


def test_emergency_stop_outlasts_lost_contact_and_the_release_to_the_policy():
    env = played(Reading(events=("estop",)), Reading(lost=True), Reading(), Reading(events=("stop",)), env=Served())
    infos(env, 2)
    env.release()  # which lets the policy act although contact is lost
    (info,) = infos(env, 1)
    assert info["estop"] and not np.any(env.unwrapped.got)
    with pytest.raises(EmergencyStopError, match=r"call poll\(\) until a person has released it"):
        env.reset()
    *_, truncated, info = env.step(POLICY)
    assert truncated and info["stop"] and not np.any(env.unwrapped.got), "and the run can be ended"
    env.device.readings = [Reading(events=("release_estop",))]
    assert not env.poll().estop
    env.reset()
    assert "estop" not in infos(env, 1)[0]


def test_emergency_stop_stays_latched_where_its_release_does_not_reach_the_server():
    env = played(Reading(events=("estop",)), *[Reading(events=("release_estop",))] * 2, env=Served())
    env.unwrapped.absent = True
    assert [info.get("estop", False) for info in infos(env, 2)] == [True, True]
    env.unwrapped.absent = False
    assert "estop" not in infos(env, 1)[0]


def test_emergency_stop_at_the_robot_server_is_latched_here_until_it_is_released(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emergency_stop, "CHECK_INTERVAL_S", 0.0)
    env = played(env=Served())
    env.unwrapped.stopped = True  # by somebody else
    (info,) = infos(env, 1)
    assert info["estop"] and info["lost"] and info["source"] == Source.HUMAN and not np.any(info["executed_action"])
    assert env.poll().estop
    env.unwrapped.stopped = False
    assert not env.poll().estop and env.unwrapped.asked == []
    env.unwrapped.stopped = True
    infos(env, 1 + 1)
    env.device.readings = [Reading(events=("release_estop",))]
    assert not env.poll().estop and env.unwrapped.asked == ["release"], "or with the device"


def test_emergency_stop_during_a_reset_stops_the_arm_at_once():
    class Slow(Served):
        def reset(self, **how: Any) -> Any:
            deadline = time.monotonic() + 60
            while self.asked == [] and time.monotonic() < deadline:  # on its way to where the episode begins
                self.device.press("estop")
                time.sleep(0.001)
            if self.stopped:
                raise EmergencyStopError("refused with status 412")
            return super().reset(**how)

    arm, device = Slow(), Played()
    arm.device, env = device, TakeOver(arm, device)
    with pytest.raises(EmergencyStopError, match="412"):
        env.reset()
    assert arm.asked == ["estop"] and env.poll().estop


def test_the_first_motion_of_the_policy_after_a_person_is_limited_in_distance():
    far, hold, grip = np.full(7, 1.0), np.zeros(7), np.array([0, 0, 0, 0, 0, 0, 1.0])
    env = played(Reading(), push(1), *[Reading()] * 5, push(1), push(0, lost=True), env=Served())
    executed = [
        env.step(action)[4]["executed_action"] for action in (far, far, hold, grip, far, far, far, far, far, far)
    ]
    np.testing.assert_array_equal(executed[0], far)
    meters, radians = (np.array([0.03 * np.linalg.norm(a[:3]), 0.15 * np.linalg.norm(a[3:6])]) for a in executed[4:6])
    np.testing.assert_allclose(meters, FIRST_COMMAND, rtol=1e-5)
    assert executed[4][6] == 1 and executed[4][0] == executed[4][1] > 0, (
        "its direction and the gripper are the policy's"
    )
    assert (radians > 0.05).all() and (executed[5] == far).all(), "the second one is not limited"
    assert np.linalg.norm(executed[9][:3]) < 0.34, "nor is it jumped to when contact returns"
    near = np.array([0.1, 0, 0, 0.1, 0, 0, 0])
    env = played(push(1), Reading(), env=Served())
    np.testing.assert_allclose([env.step(near)[4]["executed_action"] for _ in range(2)][1], near, rtol=1e-6)


def test_the_first_motion_of_the_policy_has_a_limit_for_each_arm():
    class Two(Noting):
        action_scale = (0.03, 0.15)

    env = played(push(1), Reading(), env=Two(14), first_command=[0.003, 0.5])
    action = np.array([1, 0, 0, 1, 0, 0, 1, 0.05, 0, 0, 1, 1, 1, 1])
    executed = [env.step(action)[4]["executed_action"] for _ in range(2)][1]
    np.testing.assert_allclose(executed, [0.1, 0, 0, 1, 0, 0, 1, 0.05, 0, 0, 1, 1, 1, 1], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"first_command=\[0.1, 0.1\]: Noting has no action_scale"):
        played(first_command=[0.1, 0.1])
    with pytest.raises(ConfigError, match=r"first_command is \[0.1\]: expected \[METERS, RADIANS\], both above 0"):
        played(env=Two(), first_command=[0.1])


# --- events
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "reward", "terminated", "truncated", "told"),
    [
        (("success",), 1.0, True, False, {"succeed": True, "marked": True}),
        (("fail",), 0.0, True, False, {"succeed": False, "marked": False}),
        (("success", "fail"), 0.0, True, False, {"succeed": False, "marked": False}),
        (("reset",), 0.25, False, True, {}),
        (("stop",), 0.25, False, True, {"stop": True}),
        (("success", "stop"), 1.0, True, True, {"succeed": True, "marked": True, "stop": True}),
        ((), 0.25, False, False, {}),
    ],
)
def test_events_end_episodes(
    events: tuple[str, ...], reward: float, terminated: bool, truncated: bool, told: dict[str, bool]
):
    env = played(Reading(events=events))
    _, *found, info = env.step(POLICY)
    assert found == [reward, terminated, truncated]
    assert {key: info[key] for key in ("succeed", "marked", "stop") if key in info} == told


def test_take_over_ignores_events_before_an_episode_except_stop():
    device = Played()
    for event in ("success", "reset", "stop", "fail"):
        device.press(event)
    device.press("estop")
    device.reset()
    assert device.take_events() == ("stop", "estop")


# --- actions
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "arm", "expected"),
    [
        (3, 0, [0.1, 0.2, 0.3]),
        (4, 0, [0.1, 0.2, 0.3, -1]),
        (6, 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        (7, 1, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, -1]),
        (12, 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6] + [0] * 6),
        (14, 1, [0] * 7 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, -1]),
    ],
)
def test_known_action_spaces(length: int, arm: int, expected: list[float]):
    env = played(Reading(arm=arm), push(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, gripper=-1, arm=arm), env=Noting(length))
    infos(env, 2, np.zeros(length))
    np.testing.assert_array_equal(env.unwrapped.got[1], np.float32(expected))


def test_action_indices_leave_the_others_at_zero():
    env = played(Reading(), push(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, gripper=1), action_indices=[0, 2, 6])
    infos(env, 2)
    np.testing.assert_array_equal(env.unwrapped.got, np.float32([POLICY, [0.1, 0, 0.3, 0, 0, 0, 1]]))
    with pytest.raises(ConfigError, match=r"action_indices has \[7\]: .* dimensions are 0 to 6"):
        TakeOver(Noting(), Played(), action_indices=[1, 7])


def test_another_action_space_needs_a_function():
    cart = Noting(action_space=spaces.Discrete(2))
    for space in (spaces.Discrete(2), spaces.Box(-1, 1, (5,)), spaces.Box(0, 1, (7,)), spaces.Box(-1, 1, (7, 1))):
        with pytest.raises(ConfigError, match=r"the action space is .*: a device drives .* give TakeOver\(action_of="):
            TakeOver(Noting(action_space=space), Played())
    env = played(Reading(), push(-1), push(1), env=cart, action_of=steer)
    infos(env, 3, 1)
    assert cart.got == [1, 0, 1]
    named = TakeOver(
        cart, open_device("tests.teleop.played:Played", readings=[push(0), push(1)], action_of=f"{__name__}:steer")
    )
    named.reset()
    infos(named, 2, 1)
    assert cart.got == [0, 1]
    with pytest.raises(ConfigError, match=r"action_of is 3: expected a function, or module:name of one"):
        open_device("tests.teleop.played:Played", action_of=3)


def steer(reading: Reading, space: Any) -> int:
    return int(reading.motion[0] > 0)


def test_a_number_stays_one_that_can_be_a_key():
    env = played(replace(push(1), action=np.array(3)), env=Noting(action_space=spaces.Discrete(4)), action_of=steer)
    assert {0: "left", 3: "up"}[infos(env, 1, 0)[0]["executed_action"]] == "up"


@pytest.mark.parametrize("reading", [None, Reading(np.zeros(3)), Reading(gripper=2)])
def test_a_reading_that_is_none_is_named(reading: Any):
    with pytest.raises(
        SchemaError, match=r"the device played gave .*: expected a Reading with a motion of six numbers and a gripper"
    ):
        played(reading).step(POLICY)


def test_a_plain_gymnasium_environment_is_driven_and_shown():
    pendulum = gymnasium.make("Pendulum-v1", render_mode="rgb_array")
    env = TakeOver(pendulum, Played([Reading(), push(1)]), action_of=lambda reading, space: 2 * reading.motion[:1])
    env.reset(seed=0)
    assert infos(env, 2, np.float32([9]))[0]["executed_action"] == [2.0]
    images, status = env.device.shown[-1]
    assert images["view"].shape == (500, 500, 3) and status.who == "human" and status.step_limit == 0
    env.close()
    assert env.device.closed == 1


@pytest.mark.parametrize("action", [np.full(7, np.nan), np.zeros(6), np.zeros((1, 7))])
def test_an_action_that_is_none_is_refused(action: np.ndarray):
    with pytest.raises(SchemaError, match=r"the action is \[.*\]: expected 7 finite numbers"):
        played().step(action)


def test_a_wrong_mode_is_refused():
    with pytest.raises(ConfigError, match=r"mode is 'held': it is 'hold' .* or 'toggle'"):
        TakeOver(Noting(), Played(), mode="held")  # type: ignore[arg-type]


# --- what is shown
# ----------------------------------------------------------------------------------------------------------------


def test_the_status_is_shown_after_reset_and_every_step():
    env = played(Reading(), push(1, events=("success",)))
    env.message = "slowly"
    infos(env, 2)
    env.reset()
    images, statuses = zip(*env.device.shown, strict=True)
    assert [shown["front"][0, 0, 0] for shown in images] == [0, 1, 2, 0]
    assert [(s.who, s.episode, s.successes, s.step, s.reward) for s in statuses] == [
        ("policy", 1, 0, 0, 0.0),
        ("policy", 1, 0, 1, 0.25),
        ("human", 1, 1, 2, 1.25),
        ("policy", 2, 1, 0, 0.0),
    ]
    assert {(s.instruction, s.step_limit) for s in statuses} == {("note what comes", 100)} and statuses[
        -1
    ].message == "slowly"


def test_a_person_sees_larger_pictures_than_the_policy():
    env = played(env=TabletopEnv("reach", image_size=16, render_size=48))
    assert env.observation_space["images"]["front"].shape == (16, 16, 3)
    assert {name: image.shape for name, image in env.device.shown[-1][0].items()} == dict.fromkeys(
        ["front", "wrist"], (48, 48, 3)
    )
    assert env.device.shown[-1][1].gripper == pytest.approx([1], abs=0.1)
    env.close()


def test_images_are_found_wherever_they_are():
    image = np.zeros((2, 3, 3), np.uint8)
    observation = {"images": {"left/wrist": image}, "state": {"depth": image[..., 0], "eye": image}, "x": 1}
    assert list(images_of(observation)) == ["left/wrist", "state/eye"]
    assert list(images_of(image)) == ["image"] and images_of(image.astype(float)) == {}


# --- no jump at the hand-over: the arm itself
# -------------------------------------------------------------------------------------


class Arm:
    """The tabletop arm under TakeOver: the path of its tcp and its gripper, step by step."""

    def __init__(self, readings: list[Reading], policy: list[float], mode: str = "hold"):
        with TabletopEnv("reach", image_size=None, step_limit=100) as table:
            env = TakeOver(table, Played(readings), mode=mode)  # type: ignore[arg-type]
            observation, _ = env.reset(options={"split": "train", "state": 0})
            rows, self.actions = [observation["state"]], []
            for _ in readings:
                observation, _, _, _, info = env.step(np.array(policy))
                rows.append(observation["state"])
                self.actions.append(info["executed_action"])
        self.moved = np.diff([row["tcp_pose"][:3] for row in rows], axis=0)  # meters in each step
        self.turned = np.diff([row["tcp_pose"][3:] for row in rows], axis=0)
        self.gripper = np.array([row["gripper_pose"][0] for row in rows])


NOBODY, STILL = Reading(), push(0)


def test_taking_over_goes_on_from_where_the_arm_is_and_giving_back_too():
    policy = [0, 0.6, 0, 0, 0, 0, 0]
    alone = Arm([NOBODY] * 24, policy)
    arm = Arm([NOBODY] * 8 + [STILL] * 8 + [NOBODY] * 8, policy)
    speed = np.linalg.norm(alone.moved, axis=1).max()
    assert speed > 0.005, "the policy moves the arm"
    assert np.linalg.norm(arm.moved, axis=1).max() <= speed * 1.02, "never faster than the policy alone"
    assert (arm.moved[:, 1] > -0.001).all(), "never back: it stops where it was told to be"
    assert np.abs(arm.moved[13:16]).max() < 0.001, "and then it stands"
    assert np.abs(arm.moved[:, [0, 2]]).max() < 0.003 and np.abs(arm.turned).max() < 0.01
    np.testing.assert_allclose(
        arm.actions[16][1], FIRST_COMMAND[0] / 0.03, err_msg="the first one is limited", rtol=1e-6
    )
    np.testing.assert_array_equal(
        arm.actions[17:], np.float32([policy] * 7), "the policy's other actions are used as they are"
    )


@pytest.mark.parametrize("mode", ["hold", "toggle"])
def test_a_stick_that_was_deflected_before_moves_nothing_until_it_was_released(mode: str):
    away, held = push(0, -1, 1, engaged=False), push(0, -1, 1, events=("toggle",))
    pushed = push(0, -1, 1)
    arm = Arm([away] * 4 + [held, pushed, pushed, pushed] + [push(0, 0, 1)] * 4 + [pushed] * 4, [0] * 7, mode)
    assert np.abs(arm.moved[:12]).max() < 0.001, "deflected since before, and z until the end"
    assert (arm.moved[13:, 1] < -0.004).all(), "y was released in between"
    assert np.abs(arm.moved[:, 2]).max() < 0.003


def test_the_gripper_stays_as_it_is():
    close = [0.0] * 6 + [-1]
    before, button = push(0, gripper=1, engaged=False), push(0, gripper=1)
    arm = Arm(
        [NOBODY] * 8 + [STILL] * 4 + [NOBODY] * 2 + [before] * 2 + [button] * 4 + [STILL, button] + [STILL] * 6, close
    )
    assert arm.gripper[0] > 0.8, "open at first"
    assert arm.gripper[8:21].max() < 0.2, (
        "the policy closed it, and neither hand-over nor a button held since before opens it"
    )
    assert arm.gripper[-1] > 0.8, "pressed anew, the button does"


def test_another_arm_waits_until_the_stick_is_released():
    env = played(Reading(), push(1), push(1, arm=1), push(0, arm=1), push(1, arm=1), env=Noting(14))
    infos(env, 5, np.zeros(14))
    assert [got[0] for got in env.unwrapped.got] == [0, 1, 0, 0, 0]
    assert [got[7] for got in env.unwrapped.got] == [0, 0, 0, 0, 1]


def test_a_key_held_over_a_reset_moves_nothing():
    env = played(push(1), push(1), push(0), push(1))
    infos(env, 4)
    assert [got[0] for got in env.unwrapped.got] == [0, 0, 0, 1]
