"""The control step of robosuite's arms: the same numbers as robosuite's own loop, whose equations are written out here
as robosuite evaluates them. tests/peers compares it with robosuite itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest

from hilt.envs.robosuite.osc_step import OscStep, fast_step

ARM = """
<mujoco><option timestep="0.002"/><worldbody>
  {links}
  <body pos="0.3 0 0.6"><freejoint/><geom size="0.05"/></body>
</worldbody><actuator>
  {motors}<position name="left" joint="j7" ctrlrange="0 0.04"/><position name="right" joint="j8" ctrlrange="-0.04 0"/>
</actuator></mujoco>
"""


def arm() -> Any:
    """Seven links that turn about changing axes, and two that slide, above a ball."""
    axes = ["0 0 1", "0 1 0", "1 0 0", "0 1 0", "1 0 0", "0 1 0", "0 0 1"]
    links = "".join(
        f'<body pos="0.1 0 0.1"><joint name="j{number}" axis="{axis}" damping="0.1"/>'
        '<geom type="capsule" fromto="0 0 0 0.1 0 0.1" size="0.02"/>'
        for number, axis in enumerate(axes)
    )
    fingers = "".join(
        f'<body><joint name="j{number}" type="slide" axis="0 1 0" damping="1"/>'
        f'<geom pos="0 {side} 0" size="0.01"/></body>'
        for number, side in ((7, 0.1), (8, -0.1))
    )
    motors = "".join(f'<motor joint="j{number}" ctrlrange="-20 20"/>' for number in range(7))
    whole = links + '<site name="grip" pos="0.1 0 0.1"/>' + fingers + "</body>" * 7
    return mujoco.MjModel.from_xml_string(ARM.format(links=whole, motors=motors))


class OperationalSpaceController:
    """With robosuite's names."""

    impedance_mode, uncoupling, interpolator_pos, interpolator_ori = "fixed", True, None, None
    eef_name, control_dim, qvel_index, qpos_index = "grip", 6, list(range(7)), list(range(7))
    kp, kd = np.full(6, 150.0), np.full(6, 2 * np.sqrt(150.0))

    def __init__(self, model: Any, data: Any) -> None:
        self.model, self.data = model, data
        self.initial_joint = np.array(data.qpos[:7])
        self.new_update = True
        self.update()

    def update(self) -> None:
        """Measures, unless it has since the last torques: as just after a reset."""
        if not self.new_update:
            return
        mujoco.mj_forward(self.model, self.data)
        data, joints = self.data, self.qvel_index
        position, rotation = np.zeros((3, self.model.nv)), np.zeros((3, self.model.nv))
        mujoco.mj_jacSite(self.model, data, position, rotation, 0)
        mass = np.zeros((self.model.nv, self.model.nv))
        mujoco.mj_fullM(self.model, mass, data.qM)
        self.mass = mass[joints, :][:, joints]
        self.speeds = np.dot(position, data.qvel), np.dot(rotation, data.qvel)
        self.jacobians = np.array(position[:, joints]), np.array(rotation[:, joints])
        self.at, self.turned = np.array(data.site_xpos[0]), np.array(data.site_xmat[0].reshape(3, 3))
        self.joints = np.array(data.qpos[:7]), np.array(data.qvel[:7])
        self.new_update = False

    def set_goal(self, action: np.ndarray) -> None:
        self.update()
        self.goal_pos = self.at + 0.05 * action[:3]
        turn = np.zeros(9)
        mujoco.mju_axisAngle2Quat(quat := np.zeros(4), np.array([0.0, 0.0, 1.0]), 0.5 * action[5])
        mujoco.mju_quat2Mat(turn, quat)
        self.goal_ori = turn.reshape(3, 3) @ self.turned

    def run_controller(self) -> np.ndarray:
        self.update()
        full = np.vstack(self.jacobians)
        force = (self.goal_pos - self.at) * 150 - self.speeds[0] * self.kd[:3]
        torque = UTILS.orientation_error(self.goal_ori, self.turned) * 150 - self.speeds[1] * self.kd[3:]
        _, l_position, l_rotation, null = UTILS.opspace_matrices(self.mass, full, *self.jacobians)
        wrench = np.concatenate([np.dot(l_position, force), np.dot(l_rotation, torque)])
        more = UTILS.nullspace_torques(self.mass, null, self.initial_joint, *self.joints)
        self.new_update = True
        torques: np.ndarray = np.dot(full.T, wrench) + self.data.qfrc_bias[:7] + more
        return torques


class PandaGripper:
    speed = 0.01

    def __init__(self) -> None:
        self.current_action = np.zeros(2)


class ArmEnv:
    """An environment with the methods of robosuite's that a step calls; `step` is robosuite's loop."""

    control_timestep, model_timestep = 0.05, 0.002

    def __init__(self) -> None:
        self.model = arm()
        self.data = mujoco.MjData(self.model)
        self.data.qpos[:7] = [0.1, -0.4, 0.2, 0.7, -0.1, 0.5, 0.3]
        mujoco.mj_forward(self.model, self.data)
        named = SimpleNamespace(_model=self.model, nv=self.model.nv, site_name2id=lambda name: 0)
        self.sim = SimpleNamespace(model=named, data=SimpleNamespace(_data=self.data))
        self.robots = [
            SimpleNamespace(
                controller=OperationalSpaceController(self.model, self.data),
                gripper=PandaGripper(),
                torque_limits=(np.full(7, -20.0), np.full(7, 20.0)),
                _ref_joint_actuator_indexes=list(range(7)),
                _ref_joint_gripper_actuator_indexes=[7, 8],
            )
        ]
        self.timestep, self.cur_time, self.observed = 0, 0.0, 0

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, dict[str, Any]]:
        (robot,), model, data = self.robots, self.model, self.data
        for number in range(25):
            mujoco.mj_forward(model, data)
            if number == 0:
                robot.controller.set_goal(action[:6])
            data.ctrl[:7] = np.clip(robot.controller.run_controller(), *robot.torque_limits)
            gripper = robot.gripper
            gripper.current_action = np.clip(
                gripper.current_action + np.array([-1.0, 1.0]) * gripper.speed * np.sign(action[6:]), -1, 1
            )
            low, high = model.actuator_ctrlrange[7:].T
            data.ctrl[7:] = 0.5 * (high + low) + 0.5 * (high - low) * gripper.current_action
            mujoco.mj_step(model, data)
            self._update_observables()
        return self._get_observations(), 0.0, False, {}

    def _update_observables(self) -> None:
        self.observed += 1

    def _post_action(self, action: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        return 0.5, False, {"asked": action}

    def _get_observations(self) -> dict[str, Any]:
        return {"qpos": np.array(self.data.qpos)}

    def _check_success(self) -> bool:
        return bool(self.observed == 50)


def _matrices(mass: np.ndarray, full: np.ndarray, position: np.ndarray, rotation: np.ndarray) -> Any:
    inverse = np.linalg.inv(mass)
    lambdas = [np.linalg.pinv(each @ inverse @ each.T) for each in (full, position, rotation)]
    return (*lambdas, np.eye(7) - inverse @ full.T @ lambdas[0] @ full)


def _turn(desired: np.ndarray, current: np.ndarray) -> np.ndarray:
    return 0.5 * sum(np.cross(current[:, axis], desired[:, axis]) for axis in range(3))


UTILS = SimpleNamespace(
    opspace_matrices=_matrices,
    orientation_error=_turn,
    nullspace_torques=lambda mass, null, initial, at, speed: (
        null.T @ (mass @ (10 * (initial - at) - 2 * np.sqrt(10) * speed))
    ),
)


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("robosuite", "robosuite.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "robosuite.utils.control_utils", UTILS)


def test_osc_step_moves_the_arm_as_robosuites_loop_does() -> None:
    theirs, ours = ArmEnv(), ArmEnv()
    step = fast_step(ours)
    assert isinstance(step, OscStep)
    for env in (theirs, ours):  # set to a state, after a reset: the controller measures it after its first torques
        env.data.qpos[:7] += 0.1
        mujoco.mj_forward(env.model, env.data)
    moved = np.array(theirs.data.qpos)
    for action in np.random.default_rng(0).uniform(-1, 1, (6, 7)):
        theirs.step(action)
        step(action)
        assert np.array_equal(theirs.data.qpos, ours.data.qpos) and np.array_equal(theirs.data.qvel, ours.data.qvel)
        assert np.array_equal(theirs.data.ctrl, ours.data.ctrl)
        gripper = [env.robots[0].gripper.current_action for env in (theirs, ours)]
        assert np.array_equal(*gripper) and gripper[0].any()
    assert np.abs(theirs.data.qpos - moved)[:7].max() > 0.05, "it did move"


def test_osc_step_answers_as_an_environment_of_libero_does() -> None:
    env = ArmEnv()
    step = fast_step(env)
    step(np.zeros(7))
    observation, reward, success, info = step(np.full(7, 0.5))
    assert observation["qpos"].shape == env.data.qpos.shape and (reward, success) == (0.5, True)
    assert info["asked"].tolist() == [0.5] * 7 and env.timestep == 2 and env.cur_time == pytest.approx(0.1)
    assert env.robots[0].controller.new_update, "the next goal is set from where the arm then is"


@pytest.mark.parametrize(
    "change",
    [
        lambda env: env.robots.append(env.robots[0]),
        lambda env: setattr(env.robots[0].controller, "impedance_mode", "variable"),
        lambda env: setattr(env.robots[0].controller, "uncoupling", False),
        lambda env: setattr(env.robots[0].controller, "interpolator_pos", object()),
        lambda env: setattr(env.robots[0].controller, "interpolator_ori", object()),
        lambda env: setattr(env.robots[0], "gripper", SimpleNamespace()),
        lambda env: setattr(env.model.opt, "integrator", mujoco.mjtIntegrator.mjINT_IMPLICIT),
    ],
)
def test_other_arms_and_controllers_step_as_robosuite_has_it(change: Any) -> None:
    env = ArmEnv()
    change(env)
    assert fast_step(env) == env.step
