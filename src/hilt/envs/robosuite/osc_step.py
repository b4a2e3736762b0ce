"""A control step of a robosuite arm under OSC_POSE, bit for bit as robosuite computes it, in half of its time.

robosuite evaluates the model three times in each of the 25 steps of 2 ms that a control step has: before its
controller runs, once more within it, and in MuJoCo's own step. Nothing but the torques differs between them, so that
the first half of MuJoCo's step before the controller, and the second half after it, give the same numbers. Names,
limits and ranges are looked up once for each control step instead of in each of the 25, and the buffers of recent
forces and velocities, which no observation of LIBERO contains, are not filled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hilt.core.tree import Array
from hilt.envs.tabletop.renderer import mujoco

Step = Callable[[Array], tuple[Any, float, bool, dict[str, Any]]]
"""``step(action)``: the observation, the reward, whether the task is solved, and further facts"""


def fast_step(env: Any) -> Step:
    """Returns what does the same as ``env.step`` of a task of LIBERO: one Panda under OSC_POSE with its usual settings.
    For any other robot or controller it is ``env.step`` itself."""
    own: Step = env.step
    return OscStep(env) if is_usual(env) else own


def is_usual(env: Any) -> bool:
    """Whether `OscStep` computes what this environment's arm does."""
    if len(env.robots) != 1:
        return False
    (robot,) = env.robots
    controller = robot.controller
    return (
        type(controller).__name__ == "OperationalSpaceController"
        and controller.impedance_mode == "fixed"
        and controller.uncoupling
        and controller.interpolator_pos is None
        and controller.interpolator_ori is None
        and type(robot.gripper).__name__ == "PandaGripper"
        and env.sim.model._model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
    )


class OscStep:
    """The control step of one environment."""

    def __init__(self, env: Any):
        self._env, self._utils = env, importlib.import_module("robosuite.utils.control_utils")
        (self._robot,) = env.robots
        self._steps = int(env.control_timestep / env.model_timestep)
        nv = env.sim.model.nv
        self._position, self._rotation = np.zeros((3, nv)), np.zeros((3, nv))
        self._mass = np.zeros((nv, nv))

    def __call__(self, action: Array) -> tuple[Any, float, bool, dict[str, Any]]:
        env, robot = self._env, self._robot
        model, data, controller = env.sim.model._model, env.sim.data._data, robot.controller
        site = env.sim.model.site_name2id(controller.eef_name)
        env.timestep += 1
        arm, fingers = robot._ref_joint_actuator_indexes, robot._ref_joint_gripper_actuator_indexes
        low, high = robot.torque_limits
        middle, half = _middle_and_half(model.actuator_ctrlrange[fingers])
        width = controller.control_dim
        closing = np.array([-1.0, 1.0]) * robot.gripper.speed * np.sign(action[width:])
        for step in range(self._steps):
            mujoco.mj_step1(model, data)
            if step == 0:  # by the controller itself, which just after a reset still has what it measured before
                controller.set_goal(action[:width])
                torques = controller.run_controller()
            else:
                torques = self._torques(model, data, controller, site)
            robot.torques = torques.clip(low, high)
            robot.gripper.current_action = (robot.gripper.current_action + closing).clip(-1.0, 1.0)
            data.ctrl[fingers] = middle + half * robot.gripper.current_action
            data.ctrl[arm] = robot.torques
            mujoco.mj_step2(model, data)
            env._update_observables()
        env.cur_time += env.control_timestep
        reward, _, info = env._post_action(action)
        observation = env._get_observations()
        return observation, reward, env._check_success(), info

    def _torques(self, model: Any, data: Any, controller: Any, site: int) -> Array:
        """Those of the joints, in robosuite's order of operations and with arrays laid out as there."""
        utils, joints = self._utils, controller.qvel_index
        mujoco.mj_jacSite(model, data, self._position, self._rotation, site)
        mujoco.mj_fullM(model, self._mass, data.qM)
        mass = self._mass[joints, :][:, joints]
        j_position, j_rotation = self._position[:, joints], self._rotation[:, joints]
        j_full = np.vstack([j_position, j_rotation])
        velocity, turning = np.dot(self._position, data.qvel), np.dot(self._rotation, data.qvel)
        turn = utils.orientation_error(np.array(controller.goal_ori), data.site_xmat[site].reshape((3, 3)))
        kp, kd = controller.kp, controller.kd
        force = (controller.goal_pos - data.site_xpos[site]) * kp[0:3] + -velocity * kd[0:3]
        torque = turn * kp[3:6] + -turning * kd[3:6]
        _, l_position, l_rotation, nullspace = utils.opspace_matrices(mass, j_full, j_position, j_rotation)
        wrench = np.concatenate([np.dot(l_position, force), np.dot(l_rotation, torque)])
        torques: Array = np.dot(j_full.T, wrench) + data.qfrc_bias[joints]
        torques += utils.nullspace_torques(
            mass, nullspace, controller.initial_joint, data.qpos[controller.qpos_index], data.qvel[joints]
        )
        return torques


def _middle_and_half(ranges: Array) -> tuple[Array, Array]:
    """Returns the middle and half the width of ranges, float64 [N, 2]."""
    return 0.5 * (ranges[:, 1] + ranges[:, 0]), 0.5 * (ranges[:, 1] - ranges[:, 0])
