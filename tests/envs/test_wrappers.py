"""What each wrapper does, on a real environment for its spaces and on a scripted one for its numbers.

A test named after a mistake of upstream's fails with upstream's behavior;
tests/peers/test_serl_wrappers.py runs upstream's own.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scipy.spatial.transform import Rotation

from hilt.core.errors import ConfigError, DeadlineError, UnknownNameError
from hilt.envs.rate import Rate
from hilt.envs.rewards import (
    HumanClassifierWrapper,
    MultiCameraBinaryRewardClassifierWrapper,
    MultiStageBinaryRewardClassifierWrapper,
)
from hilt.envs.tabletop.suite_env import TabletopEnv
from hilt.envs.task import as_task
from hilt.envs.wrappers import (
    ChunkingWrapper,
    DualQuat2EulerWrapper,
    DualRelativeFrame,
    EpisodeStatistics,
    GripperCloseEnv,
    GripperPenaltyWrapper,
    Quat2EulerWrapper,
    Quat2R2Wrapper,
    RelativeFrame,
    SERLObsWrapper,
    adjoint,
)
from hilt.teleop.devices import Device, Reading
from hilt.teleop.intervene import TakeOver
from tests.envs.scripted_env import ScriptedEnv

BOTH = ("left/", "right/")


def stacked_up(env: Any, **chunking: Any) -> Any:
    """The order of HIL-SERL's own tasks."""
    env = SERLObsWrapper(Quat2EulerWrapper(RelativeFrame(env)))
    return ChunkingWrapper(env, **({"obs_horizon": 1, "act_exec_horizon": None} | chunking))


# --- spaces, on a real environment ---

WRAPPED = {
    "relative": RelativeFrame,
    "relative-uncoupled": lambda env: RelativeFrame(env, include_relative_pose=False, coupled=False),
    "euler": Quat2EulerWrapper,
    "r2": Quat2R2Wrapper,
    "serl": SERLObsWrapper,
    "serl-few": lambda env: SERLObsWrapper(env, sorted(env.observation_space["state"].spaces)[-3:]),
    "chunk-1": lambda env: ChunkingWrapper(env, 1, None),
    "chunk-3-2": lambda env: ChunkingWrapper(env, 3, 2),
    "close": GripperCloseEnv,
    "penalty": GripperPenaltyWrapper,
    "statistics": EpisodeStatistics,
    "classifier": lambda env: MultiCameraBinaryRewardClassifierWrapper(env, lambda obs: 0),
    "stages": lambda env: MultiStageBinaryRewardClassifierWrapper(env, [lambda obs: -9.0, lambda obs: 9.0]),
    "human": lambda env: HumanClassifierWrapper(env, lambda question, seconds: False),
    "all": lambda env: EpisodeStatistics(GripperPenaltyWrapper(stacked_up(env, obs_horizon=2))),
}


@pytest.fixture(scope="module", params=["reach", "lift_tray"], ids=["one-arm", "two-arms"])
def tabletop(request):
    env = TabletopEnv(request.param, image_size=8)
    yield env
    env.close()


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_spaces_are_true(tabletop: TabletopEnv, wrap: Any):
    env = wrap(tabletop)
    before = copy.deepcopy(tabletop.observation_space), copy.deepcopy(tabletop.action_space)
    env.action_space.seed(0)
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    for _ in range(3):
        action = env.action_space.sample()
        given = action.copy()
        obs, reward, terminated, truncated, info = env.step(action)
        assert env.observation_space.contains(obs)
        np.testing.assert_array_equal(action, given)
        assert (
            isinstance(reward, float)
            and isinstance(terminated, bool)
            and isinstance(truncated, bool)
            and isinstance(info, dict)
        )
    # upstream's Quat2EulerWrapper changes the space of the environment below it
    assert (tabletop.observation_space, tabletop.action_space) == before


def test_the_contract_of_a_task_reaches_through_all_wrappers(tabletop: TabletopEnv):
    env = WRAPPED["all"](tabletop)
    assert (
        env.get_wrapper_attr("instruction") == tabletop.instruction
        and env.get_wrapper_attr("step_limit") == tabletop.step_limit
    )
    assert env.reset(options={"split": "eval", "state": 3})[1]["state"] == 3


def test_a_state_has_19_numbers_in_alphabetical_order():
    env = stacked_up(below := ScriptedEnv())
    obs, info = env.reset()
    assert obs["state"].shape == (1, 19) and obs["front"].shape == (1, 4, 4, 3)
    state = below.observations[0]["state"]
    np.testing.assert_array_equal(obs["state"][0, 0], state["gripper_pose"][0])
    np.testing.assert_array_equal(obs["state"][0, 1:4], state["tcp_force"])
    np.testing.assert_allclose(obs["state"][0, 4:10], 0, atol=1e-6)  # the pose at reset, relative to itself
    np.testing.assert_array_equal(obs["state"][0, 10:13], state["tcp_torque"])
    inverse = np.linalg.inv(adjoint(state["tcp_pose"]))
    np.testing.assert_allclose(obs["state"][0, 13:], inverse @ state["tcp_vel"], rtol=1e-5)
    np.testing.assert_array_equal(info["original_state_obs"]["tcp_pose"], state["tcp_pose"])


# --- relative frame ---


@pytest.mark.parametrize("prefixes", [("",), BOTH])
def test_relative_frame_turns_actions_and_poses_of_every_arm(prefixes: tuple[str, ...]):
    env = RelativeFrame(below := ScriptedEnv(prefixes))
    env.reset()
    first = below.observations[0]["state"]
    action = np.linspace(-1, 1, 7 * len(prefixes)).astype(np.float32)
    obs, *_ = env.step(action)
    now = below.observations[1]["state"]
    for i, prefix in enumerate(prefixes):
        mine, sent = action[7 * i : 7 * i + 7], below.actions[0][7 * i : 7 * i + 7]
        rotation, position = Rotation.from_quat(first[prefix + "tcp_pose"][3:]), first[prefix + "tcp_pose"][:3]
        linear = rotation.apply(mine[:3])
        np.testing.assert_allclose(sent[:3], linear, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            sent[3:6], np.cross(position, linear) + rotation.apply(mine[3:6]), rtol=1e-4, atol=1e-6
        )
        assert sent[6] == mine[6]
        relative = rotation.inv() * Rotation.from_quat(now[prefix + "tcp_pose"][3:])
        pose = obs["state"][prefix + "tcp_pose"]
        np.testing.assert_allclose(
            pose[:3], rotation.inv().apply(now[prefix + "tcp_pose"][:3] - position), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(Rotation.from_quat(pose[3:]).as_matrix(), relative.as_matrix(), atol=1e-5)


def test_uncoupled_a_motion_does_not_turn_the_gripper():
    env = RelativeFrame(below := ScriptedEnv(), coupled=False)
    env.reset()
    env.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(below.actions[0][3:6], 0)
    assert np.abs(adjoint(below.observations[0]["state"]["tcp_pose"])[3:, 0]).max() > 0.01  # upstream's would


def test_relative_frame_leaves_the_arrays_below_as_they_are():
    """Upstream writes into the observation that the environment may keep."""
    env = Quat2EulerWrapper(RelativeFrame(below := ScriptedEnv()))
    env.reset()
    kept = copy.deepcopy(below.observations[0])
    action = np.ones(7, np.float32)
    action.flags.writeable = False
    env.step(action)
    np.testing.assert_equal(below.observations[0], kept)
    assert below.observations[1]["state"]["tcp_pose"].shape == (7,)


@pytest.mark.parametrize("prefixes", [("",), BOTH])
def test_an_intervention_comes_up_as_the_numbers_that_would_do_the_same(prefixes: tuple[str, ...]):
    """With the pose before the step: after it, the gripper has turned."""
    size = 7 * len(prefixes)
    done = np.linspace(1, -1, size).astype(np.float32)
    env = RelativeFrame(below := ScriptedEnv(prefixes, infos={1: {"intervene_action": done, "executed_action": done}}))
    env.reset()
    adjoints = env._adjoints
    *_, info = env.step(np.zeros(size, np.float32))
    for key in ("intervene_action", "executed_action"):
        np.testing.assert_allclose(env._turned(info[key], adjoints), done, atol=1e-5)
    # not the adjoint of after the step
    assert np.abs(env._turned(info["intervene_action"], env._adjoints) - done).max() > 0.05
    np.testing.assert_array_equal(below.infos[1]["intervene_action"], done)


class Pushing(Device):
    """A person who waits for one step, then pushes along x and turns about z."""

    name, reads = "pushing", 0

    def read(self) -> Reading:
        self.reads += 1
        return (
            Reading(np.array([0.8, 0.3, 0, 0, 0, 0.9]), 0, True) if self.reads > 1 else Reading(np.zeros(6), 0, False)
        )


def test_relative_frame_replays_a_persons_actions_as_the_same_motion():
    driven = RelativeFrame(TakeOver(TabletopEnv("reach", image_size=None), Pushing()))
    replayed = RelativeFrame(TabletopEnv("reach", image_size=None))
    for env in (driven, replayed):
        env.reset(options={"split": "train", "state": 0})
    for _ in range(8):
        expected, *_, info = driven.step(np.zeros(7, np.float32))
        obs, *_ = replayed.step(info["executed_action"])
        np.testing.assert_array_equal(info["executed_action"], info.get("intervene_action", np.zeros(7)))
    np.testing.assert_allclose(obs["state"]["tcp_pose"], expected["state"]["tcp_pose"], atol=1e-4)
    assert np.abs(obs["state"]["tcp_pose"][:3]).max() > 0.05
    driven.close()
    replayed.close()


def test_relative_frame_turns_whole_numbers_as_it_turns_others():
    below = [ScriptedEnv(), ScriptedEnv()]
    for env, action in zip(map(RelativeFrame, below), ([1, 0, -1, 0, 1, 0, 1], [1.0, 0, -1, 0, 1, 0, 1]), strict=True):
        env.reset()
        env.step(action)
    np.testing.assert_array_equal(below[0].actions[0], below[1].actions[0])
    assert np.abs(below[0].actions[0]).max() % 1 > 0


def test_relative_frame_needs_a_reset_and_an_arm():
    """Upstream's matrix of zeros makes any action a zero action."""
    with pytest.raises(ConfigError, match="Call reset"):
        RelativeFrame(ScriptedEnv()).step(np.zeros(7))
    with pytest.raises(ConfigError, match="no tcp_pose in the state, which has no named parts"):
        RelativeFrame(SERLObsWrapper(ScriptedEnv()))
    with pytest.raises(ConfigError, match="6 or 7 numbers for each of 1 arm"):
        RelativeFrame(ChunkingWrapperOfActions(ScriptedEnv()))


class ChunkingWrapperOfActions(gymnasium.Wrapper):
    """Only the action space, to be refused."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.action_space = spaces.Box(-1, 1, (2, 7))


# --- poses ---


@pytest.mark.parametrize("prefixes", [("",), BOTH])
def test_euler_and_r2_are_scipys(prefixes: tuple[str, ...]):
    for wrapper in (Quat2EulerWrapper, Quat2R2Wrapper):
        below = ScriptedEnv(prefixes)
        obs, _ = wrapper(below).reset()
        for prefix in prefixes:
            pose = below.observations[0]["state"][prefix + "tcp_pose"]
            rotation = Rotation.from_quat(pose[3:])
            expected = rotation.as_euler("xyz") if wrapper is Quat2EulerWrapper else rotation.as_matrix()[:, :2].ravel()
            np.testing.assert_allclose(obs["state"][prefix + "tcp_pose"], [*pose[:3], *expected], rtol=1e-4, atol=1e-6)
    assert DualQuat2EulerWrapper is Quat2EulerWrapper and DualRelativeFrame is RelativeFrame


def test_a_pose_is_converted_once():
    with pytest.raises(ConfigError, match=r"tcp_pose has the shape \(6,\); a position and a quaternion"):
        Quat2R2Wrapper(Quat2EulerWrapper(ScriptedEnv()))


# --- flat observation ---


def test_the_order_of_the_state_is_alphabetical_however_it_is_asked_for():
    below = ScriptedEnv(images=False)
    env = SERLObsWrapper(below, ["tcp_vel", "gripper_pose"])
    obs, _ = env.reset()
    state = below.observations[0]["state"]
    np.testing.assert_array_equal(obs["state"], [*state["gripper_pose"], *state["tcp_vel"]])
    assert list(obs) == ["state"] and env.observation_space["state"].shape == (7,)
    with pytest.raises(UnknownNameError, match=r"no part of the state named 'tcp_velo'; did you mean 'tcp_vel'\?"):
        SERLObsWrapper(ScriptedEnv(), ["tcp_velo"])


def test_a_camera_may_not_be_named_state():
    env = ScriptedEnv()
    env.observation_space.spaces["images"] = spaces.Dict({"state": spaces.Box(0, 255, (4, 4, 3), np.uint8)})
    with pytest.raises(ConfigError, match="a camera is named 'state'"):
        SERLObsWrapper(env)


# --- chunking ---


def test_observations_are_stacked_oldest_first_and_the_first_is_repeated():
    env = ChunkingWrapper(below := ScriptedEnv(), 3, None)
    obs, _ = env.reset()
    poses = [o["state"]["tcp_pose"] for o in below.observations]
    np.testing.assert_array_equal(obs["state"]["tcp_pose"], [poses[0]] * 3)
    env.step(np.zeros(7))
    obs, *_ = env.step(np.zeros(7))
    np.testing.assert_array_equal(obs["state"]["tcp_pose"], [o["state"]["tcp_pose"] for o in below.observations])


def test_a_stack_remembers_what_the_environment_writes_over():
    class Reuses(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Box(-1, 1, (1,), np.float32)
        seen = np.zeros(1, np.float32)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.seen, {}

        def step(self, action: Any) -> Any:
            self.seen += 1
            return self.seen, 0.0, False, False, {}

    env = ChunkingWrapper(Reuses(), 3, None)
    env.reset()
    env.step(np.zeros(1))
    assert env.step(np.zeros(1))[0].ravel().tolist() == [0, 1, 2]


def test_a_chunk_sums_its_rewards():
    """Upstream gives the last one only."""
    env = ChunkingWrapper(below := ScriptedEnv(rewards={1: 1.0, 2: 0.5, 3: 0.25}), 1, 3)
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.arange(28).reshape(4, 7))
    assert (reward, terminated, truncated, info["executed"]) == (1.75, False, False, 3)
    np.testing.assert_array_equal(below.actions, np.arange(21).reshape(3, 7))
    assert env.action_space.shape == (3, 7)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_chunk_stops_where_the_episode_ends(end: str):
    """Upstream steps on, into an episode that is over, and gives what happens there."""
    env = ChunkingWrapper(below := ScriptedEnv(rewards={2: 1.0, 3: 7.0}, ends={2: end}), 2, 4)
    env.reset()
    obs, reward, terminated, truncated, info = env.step(np.zeros((4, 7)))
    assert (reward, info["executed"], len(below.actions)) == (1.0, 2, 2)
    assert (terminated, truncated) == (end == "terminated", end == "truncated")
    np.testing.assert_array_equal(obs["state"]["tcp_pose"][-1], below.observations[-1]["state"]["tcp_pose"])


def test_chunking_wrapper_reports_executed_actions_of_a_person():
    persons = np.full(7, 0.5, np.float32)
    infos = {
        1: {"grasp_penalty": -0.25, "source": 1, "intervene_action": persons, "executed_action": persons},
        2: {"grasp_penalty": -0.5, "source": 0, "executed_action": persons / 2},
    }
    env = ChunkingWrapper(ScriptedEnv(infos=infos, ends={2: "terminated"}), 1, 3)
    env.reset()
    asked = np.zeros((3, 7), np.float32)
    *_, info = env.step(asked)
    np.testing.assert_array_equal(info["intervene_action"], [persons, asked[1], asked[2]])
    np.testing.assert_array_equal(info["executed_action"], [persons, persons / 2, asked[2]])
    assert info["grasp_penalty"] == -0.75 and info["source"] == 1 and not asked.any()


def test_horizons_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="horizons are at least 1: obs_horizon=0"):
        ChunkingWrapper(ScriptedEnv(), 0, None)
    env = ChunkingWrapper(ScriptedEnv(), 1, 3)
    env.reset()
    with pytest.raises(ConfigError, match="a chunk of 2 actions was given; act_exec_horizon=3"):
        env.step(np.zeros((2, 7)))


# --- gripper ---


@pytest.mark.parametrize("prefixes", [("",), BOTH])
def test_gripper_close_adds_the_grippers_number_and_takes_it_away(prefixes: tuple[str, ...]):
    size = len(prefixes)
    person = np.arange(7 * size, dtype=np.float32)
    env = GripperCloseEnv(
        below := ScriptedEnv(prefixes, infos={1: {"intervene_action": person, "executed_action": person}})
    )
    assert env.action_space.shape == (6 * size,)
    env.reset()
    *_, info = env.step(np.ones(6 * size, np.float32))
    np.testing.assert_array_equal(below.actions[0].reshape(size, 7), [[1, 1, 1, 1, 1, 1, 0]] * size)
    for key in ("intervene_action", "executed_action"):
        np.testing.assert_array_equal(info[key], person.reshape(size, 7)[:, :6].ravel())
    with pytest.raises(ConfigError, match=r"actions have the shape \(6,\)"):
        GripperCloseEnv(GripperCloseEnv(ScriptedEnv()))


class Opening(ScriptedEnv):
    """The gripper is as open as the test says, observation by observation."""

    def __init__(self, *openings: Any, **options: Any):
        super().__init__(**options)
        self.openings = openings

    def _observed(self):
        obs = super()._observed()
        for prefix, opening in zip(
            self.prefixes, np.atleast_1d(self.openings[len(self.observations) - 1]), strict=True
        ):
            obs["state"][prefix + "gripper_pose"][:] = opening
        return obs


@pytest.mark.parametrize("wrap", [lambda env: env, stacked_up], ids=["by-name", "flat"])
def test_changing_the_grippers_mind_costs(wrap: Any):
    person = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    env = GripperPenaltyWrapper(wrap(Opening(1.0, 1.0, 0.2, 0.2, 0.2, 0.2, infos={5: {"intervene_action": person}})))
    env.reset()
    # open: nothing; close: costs; again: nothing; leave: nothing; the person opens: costs
    told = [1.0, -1.0, -1.0, 0.3, -1.0]
    paid = [env.step(np.array([0, 0, 0, 0, 0, 0, grip], np.float32))[4]["grasp_penalty"] for grip in told]
    assert [*map(str, paid)] == ["0.0", "-0.02", "0.0", "0.0", "-0.02"], "and no -0.0"


def test_the_penalty_knows_the_right_arms_gripper():
    """Upstream looks at number 19 of the state at reset and at number 13, a velocity, from then on."""
    env = GripperPenaltyWrapper(stacked_up(Opening([1, 0], [1, 0], [1, 0], [1, 0], prefixes=BOTH)), penalty=-1.0)
    env.reset()
    close_right, open_right, close_both = np.zeros((3, 14), np.float32)
    close_right[13], open_right[13], close_both[[6, 13]] = -1, 1, -1
    assert [env.step(a)[4]["grasp_penalty"] for a in (close_right, open_right, close_both)] == [0.0, -1.0, -1.0]


def test_the_penalty_looks_at_the_newest_observation_of_a_stack():
    """Upstream looks at the oldest."""
    env = GripperPenaltyWrapper(stacked_up(Opening(1.0, 0.1, 0.1), obs_horizon=3), penalty=-1.0)
    env.reset()
    close = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
    assert [env.step(close)[4]["grasp_penalty"] for _ in range(2)] == [-1.0, 0.0]


def test_the_penalty_needs_the_gripper_and_single_actions():
    with pytest.raises(ConfigError, match="no gripper_pose in the state, which has tcp_pose"):
        GripperPenaltyWrapper(SERLObsWrapper(ScriptedEnv(), ["tcp_pose"]))
    with pytest.raises(ConfigError, match="Put it below ChunkingWrapper"):
        GripperPenaltyWrapper(stacked_up(ScriptedEnv(), act_exec_horizon=2))


# --- statistics ---


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_statistics_of_an_episode_with_its_interventions(end: str):
    infos = {3: {"intervention_count": 2, "intervention_steps": 5, "succeed": True}}
    env = EpisodeStatistics(ScriptedEnv(rewards={1: 0.25, 3: 1.0}, infos=infos, ends={3: end}))
    for _ in range(2):  # a new episode begins at 0
        env.reset()
        assert all("episode" not in env.step(np.zeros(7))[4] for _ in range(2))
        info = env.step(np.zeros(7))[4]
        episode = info["episode"]
        assert (episode["r"], episode["l"], episode["intervention_count"], episode["intervention_steps"]) == (
            1.25,
            3,
            2,
            5,
        )
        assert [type(episode[key]) for key in "rlt"] == [float, int, float] and 0 <= episode["t"] < 60
        assert info["succeed"] is True


def test_episode_statistics_count_executed_steps_also_without_take_over():
    env = EpisodeStatistics(ChunkingWrapper(ScriptedEnv(ends={5: "terminated"}), 1, 3))
    env.reset()
    env.step(np.zeros((3, 7)))
    episode = env.step(np.zeros((3, 7)))[4]["episode"]
    assert (episode["l"], episode["intervention_count"], episode["intervention_steps"]) == (5, 0, 0)


# --- rewards ---


def test_a_classifier_gives_the_reward_and_ends_the_episode():
    """Upstream makes `done` the classifier's number, and an array where the classifier gives one."""
    verdicts = iter([np.array([0]), np.array([[1]])])
    env = MultiCameraBinaryRewardClassifierWrapper(ScriptedEnv(rewards={1: 5.0}), lambda obs: next(verdicts))
    assert env.reset()[1]["succeed"] is False
    _, *first = env.step(np.zeros(7))
    _, *second = env.step(np.zeros(7))
    assert first == [0.0, False, False, {"succeed": False, "task_success": None}]
    assert second == [1.0, True, False, {"succeed": True, "task_success": None}] and type(second[1]) is bool


@pytest.mark.parametrize("truth", [True, False])
def test_reward_wrapper_keeps_the_success_of_the_task(truth: bool):
    env = MultiCameraBinaryRewardClassifierWrapper(
        as_task(ScriptedEnv(), success=lambda *_: truth, step_limit=9), lambda obs: not truth
    )
    env.reset()
    info = env.step(np.zeros(7))[4]
    assert (info["succeed"], info["task_success"]) == (not truth, truth)


@pytest.mark.parametrize("verdict", [0, 1])
def test_a_time_limit_stays_one(verdict: int):
    env = MultiCameraBinaryRewardClassifierWrapper(ScriptedEnv(ends={1: "truncated"}), lambda obs: verdict)
    env.reset()
    _, reward, terminated, truncated, _ = env.step(np.zeros(7))
    assert (reward, terminated, truncated) == (verdict, bool(verdict), True)


@pytest.mark.parametrize("word", [True, False])
def test_a_persons_word_counts_more_than_the_classifiers(word: bool):
    """Success and failure alike; `marked` is what ``TakeOver`` puts into info."""

    class Person(Device):
        def read(self) -> Reading:
            return Reading(events=("success" if word else "fail",))

    env = MultiCameraBinaryRewardClassifierWrapper(TakeOver(ScriptedEnv(), Person()), lambda obs: int(not word))
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.zeros(7))
    assert (reward, terminated, truncated, info["succeed"]) == (float(word), True, False, word)


def test_reward_wrapper_refuses_what_is_no_classifier():
    with pytest.raises(ConfigError, match="the classifier is None; a function"):
        MultiCameraBinaryRewardClassifierWrapper(ScriptedEnv(), None)  # type: ignore[arg-type]
    for wrong in ([1, 2], np.nan):
        env = MultiCameraBinaryRewardClassifierWrapper(ScriptedEnv(), lambda obs, wrong=wrong: wrong)
        env.reset()
        with pytest.raises(ConfigError, match="one finite number was expected"):
            env.step(np.zeros(7))


def test_stages_give_a_point_each_once():
    # sigmoid(1.0) = .73, sigmoid(1.2) = .77; what was reached stays
    logits = {0: [-5, 1.2, 5, -5], 1: [-5, 1.0, -5, 2.0]}
    step = [-1]
    stages = [lambda obs: np.array(logits[0][step[0]]), lambda obs: logits[1][step[0]]]
    env = MultiStageBinaryRewardClassifierWrapper(ScriptedEnv(rewards={1: 9.0}, ends={1: "truncated"}), stages)
    for _ in range(2):
        env.reset()
        seen = []
        for step[0] in range(4):
            _, reward, terminated, truncated, info = env.step(np.zeros(7))
            seen.append((reward, terminated, truncated, info["succeed"]))
        assert seen == [
            (0, False, True, False),
            (1, False, False, False),
            (0, False, False, False),
            (1, True, False, True),
        ]
    with pytest.raises(ConfigError, match="0 stages"):
        MultiStageBinaryRewardClassifierWrapper(ScriptedEnv(), [])


def test_a_person_is_asked_at_the_end_also_when_time_ran_out():
    """Upstream does not ask at `truncated`."""
    asked: list[str] = []
    env = HumanClassifierWrapper(
        ScriptedEnv(ends={2: "truncated"}, rewards={1: 3.0}), lambda question, seconds: not asked.append(question)
    )
    assert env.reset()[1] == {"succeed": False}
    _, *first = env.step(np.zeros(7))
    assert first == [0.0, False, False, {"succeed": False}] and not asked
    _, *second = env.step(np.zeros(7))
    assert second == [1.0, True, True, {"succeed": True}] and asked == ["Success? (1/0) "]


def test_the_console_is_asked_until_it_answers_and_not_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    reading, writing = os.pipe()
    with os.fdopen(reading) as console:
        monkeypatch.setattr(sys, "stdin", console)
        env = HumanClassifierWrapper(ScriptedEnv(ends={1: "terminated"}), answer_seconds=0.2)
        env.reset()
        os.write(writing, b"yes\n")
        with pytest.raises(DeadlineError, match="there was no answer within"):
            env.step(np.zeros(7))
        assert capsys.readouterr().err == "Success? (1/0) " * 2
        os.write(writing, b"1\n")
        env.reset()
        assert env.step(np.zeros(7))[4]["succeed"] is True
        os.close(writing)
        env.reset()
        with pytest.raises(DeadlineError, match="the console is closed"):
            env.step(np.zeros(7))


# --- rate ---


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 0.001  # as real ones, it sleeps a little longer


def test_a_rate_does_not_drift_and_never_sleeps_less_than_nothing():
    clock = Clock()
    rate = Rate(10, lambda: clock.now, clock.sleep)
    for busy in [0.05] * 100:  # a sleep that fills up a period would be at 10.1 by now
        clock.now += busy
        rate.wait()
    assert abs(clock.now - 10.001) < 1e-6
    clock.now += 0.34  # three periods are lost: it goes on at the next deadline of the same grid, without hurry
    rate.wait()
    rate.wait()
    assert abs(clock.now - 10.401) < 1e-6 and rate.missed == 2 and min(clock.slept) >= 0
    timing = rate.timing()
    assert (
        timing["steps"] == 102
        and abs(timing["p50"] - 0.1) < 1e-6
        and abs(timing["max"] - 0.34) < 1e-6
        and timing["missed"] == 2
    )
    assert abs(timing["late_p50"] - 0.001) < 1e-6  # the sleep; and once it came 0.24 s after the deadline
    assert abs(np.percentile([0.001] * 101 + [0.24], 99) - timing["late_p99"]) < 1e-6
    with pytest.raises(ConfigError, match="a rate of 0 Hz"):
        Rate(0)


def test_a_classifier_can_pace_the_loop():
    env = MultiCameraBinaryRewardClassifierWrapper(ScriptedEnv(), lambda obs: 0, target_hz=100)
    env.reset()
    for _ in range(5):
        env.step(np.zeros(7))
    assert env._rate is not None and env._rate.timing()["steps"] == 5 and env._rate.timing()["p50"] > 0.005
