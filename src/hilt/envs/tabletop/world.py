"""A table, one or two Franka-like arms and their cameras in MuJoCo, built from text: no asset files.

The arm feels as HIL-SERL's impedance controller makes it feel: the tcp hangs on a spring and a damper from a commanded
pose, and the spring's stretch is clipped, so that the arm pushes no harder than ``stiffness * clip``. Spring and damper
are MuJoCo actuators, so a whole control period is one call into MuJoCo.

Lengths are meters, angles radians. A pose is ``[x y z qx qy qz qw]`` of the tcp, the point between the finger
pads, in the frame of the table: x away from the (single) arm's base, y to its left, z up, and z = 0 is the
table's top. The frame is the same for both arms.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.envs.rotations import DOWN, Array, from_matrix, inverse, multiply, normalized, scalar_first, scalar_last
from hilt.envs.tabletop.renderer import Renderer, mujoco
from hilt.envs.tabletop.scene import FINGER_TRAVEL, mjcf
from hilt.envs.tabletop.scene import TIMESTEP as TIMESTEP

HOME_JOINTS = (0.0, -0.1671189, 0.0, -2.5074123, 0.0, 2.3402934, np.pi / 4)  # the tcp at x 0.45, z 0.24, pointing down
SIDES = ("left", "right")

KINDS = ("translational", "rotational")
PARAMETERS: dict[str, float] = {
    "translational_stiffness": 2000.0,  # N/m
    "translational_damping": 89.0,  # N s/m
    "translational_Ki": 0.0,  # N per meter and millisecond
    "rotational_stiffness": 150.0,  # N m/rad
    "rotational_damping": 7.0,  # N m s/rad
    "rotational_Ki": 0.0,  # N m per radian and millisecond
    **{f"translational_clip_{sign}{axis}": 0.02 for sign in ("", "neg_") for axis in "xyz"},  # m
    **{f"rotational_clip_{sign}{axis}": 0.1 for sign in ("", "neg_") for axis in "xyz"},  # rad
}
"""What ``set_parameters`` takes: the keys and the meaning of HIL-SERL's ``/update_param``, here with our values."""
HIGHEST = {
    "translational_stiffness": 5000.0,
    "translational_damping": 120.0,
    "translational_Ki": 60.0,
    "rotational_stiffness": 400.0,
    "rotational_damping": 10.0,
    "rotational_Ki": 4.0,
}
"""Above these the simulation's time step cannot follow; a clip is at most 1."""
UNSTABLE = [int(getattr(mujoco.mjtWarning, f"mjWARN_{name}")) for name in ("BADQPOS", "BADQVEL", "BADQACC")]
INTEGRAL_LIMIT = dict(zip(KINDS, (0.1, 0.3), strict=True))  # of the summed error, as upstream's controller
INTEGRAL_PERIOD = 0.008  # seconds


@dataclass(frozen=True)
class ArmState:
    """The sensor readings of one arm, in the table's frame unless noted."""

    pose: Array  # [7] of the tcp
    vel: Array  # [6] linear, angular
    force: Array  # [3] that the world does to the hand, in the tcp's own axes, as Franka's K_F_ext_hat_K
    torque: Array  # [3] the same, about the tcp
    q: Array  # [7]
    dq: Array  # [7]
    jacobian: Array  # [6, 7] tcp velocity from dq
    gripper: float  # 0 closed, 1 open


class World:
    """The scene and its physics.

    ``objects`` is MJCF for the inside of ``<worldbody>``, ``assets`` for the inside of ``<asset>``,
    ``extra`` goes beside them (for example ``<equality>``). A body that ``place`` shall move has a
    ``<freejoint/>``, or ``mocap="true"`` if nothing shall push it.
    """

    def __init__(self, objects: str = "", *, assets: str = "", extra: str = "", arms: int = 1):
        if arms not in (1, 2):
            raise ConfigError(f"arms={arms}: a world has 1 or 2 arms.")
        self.arms = arms
        self.prefixes = ("",) if arms == 1 else tuple(f"{side}/" for side in SIDES)
        try:
            self.model = mujoco.MjModel.from_xml_string(mjcf(objects, assets, extra, self.prefixes))
        except ValueError as error:
            raise ConfigError(f"the scene's MJCF is not accepted: {str(error).splitlines()[0]}") from error
        self.data = mujoco.MjData(self.model)
        self._alarms = self.data.warning.number  # a view
        self.cameras = tuple(self.model.camera(i).name for i in range(self.model.ncam))
        self.parameters = [dict(PARAMETERS) for _ in range(arms)]
        self._clips = [(np.zeros(6), np.zeros(6))] * arms
        self._arms = [_Arm(self.model, prefix) for prefix in self.prefixes]
        self._local = threading.local()
        for arm in range(arms):
            self.set_parameters({}, arm)
        self.home()

    def home(self) -> None:
        """Everything at its first place, the arms at their home posture with open grippers, at rest."""
        mujoco.mj_resetData(self.model, self.data)
        for arm in self._arms:
            self.data.qpos[arm.joints] = HOME_JOINTS
            self.data.qpos[arm.fingers] = FINGER_TRAVEL
        mujoco.mj_forward(self.model, self.data)
        for i in range(self.arms):
            self.command(self.pose(i), i)
            self.grip(1.0, i)
        mujoco.mj_forward(self.model, self.data)

    # -- acting

    def command(self, pose: npt.ArrayLike, arm: int = 0) -> None:
        """Where the arm's tcp shall be; it goes there as ``advance`` lets time pass."""
        a, pose = self._arms[arm], np.asarray(pose, np.float64)
        if pose.shape != (7,) or not np.isfinite(pose).all() or not np.any(pose[3:]):
            raise ConfigError(
                f"a pose is 7 finite numbers x y z qx qy qz qw, with a quaternion that is not 0; given {pose.tolist()}."
            )
        self.data.mocap_pos[a.target_position] = pose[:3]
        self.data.mocap_pos[a.target_rotation] = pose[:3]
        # the hand's reference axes are the table's when it points down, so that rotational_clip_z is about the vertical
        self.data.mocap_quat[a.target_rotation] = scalar_first(multiply(normalized(pose[3:]), inverse(DOWN)))

    def commanded(self, arm: int = 0) -> Array:
        """The last command."""
        a = self._arms[arm]
        rotation = multiply(scalar_last(self.data.mocap_quat[a.target_rotation]), DOWN)
        return np.concatenate([self.data.mocap_pos[a.target_position], rotation])

    def grip(self, opening: float, arm: int = 0) -> None:
        """How far the gripper shall be open: 0 closed, 1 open. Closing on something holds it."""
        if not 0 <= opening <= 1:
            raise ConfigError(f"an opening is between 0 (closed) and 1 (open); given {opening}.")
        self.data.ctrl[self._arms[arm].gripper] = opening * FINGER_TRAVEL

    def gripping(self, arm: int = 0) -> float:
        """The last ``grip``."""
        return float(self.data.ctrl[self._arms[arm].gripper]) / FINGER_TRAVEL

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        steps = round(seconds / TIMESTEP)
        integrals = [(i, keys) for i in range(self.arms) if (keys := self._integrals(i))]
        stride = max(steps, 1)
        if integrals:
            stride = round(INTEGRAL_PERIOD / TIMESTEP)
            mujoco.mj_fwdPosition(self.model, self.data)  # the error to the command of now
        for done in range(0, steps, stride):
            for arm, kinds in integrals:
                self._integrate(arm, kinds, min(stride, steps - done) * TIMESTEP)
            mujoco.mj_step(self.model, self.data, min(stride, steps - done))
        if self._alarms[UNSTABLE].any():
            raise HiltError(
                f"the simulation became unstable at {self.data.time:.3f} s and is at its beginning again: call home()."
            )
        # positions and forces of now, not of the last step's beginning; the same that restore() computes
        mujoco.mj_forward(self.model, self.data)

    def set_parameters(self, parameters: Mapping[str, float], arm: int = 0) -> None:
        """Change the impedance; what is not named stays as it is."""
        for name, value in parameters.items():
            if name not in PARAMETERS:
                raise UnknownNameError("impedance parameter", name, PARAMETERS)
            highest = HIGHEST.get(name, 1.0)
            if not 0 <= value <= highest:
                raise ConfigError(f"{name}={value}: it must be between 0 and {highest:g} in this simulation.")
        known, a = self.parameters[arm], self._arms[arm]
        known.update({name: float(value) for name, value in parameters.items()})
        low, high = (
            np.array([known[f"{kind}_clip_{sign}{axis}"] for kind in KINDS for axis in "xyz"]) for sign in ("neg_", "")
        )
        self._clips[arm] = low, high
        stiffness, damping = (
            np.repeat([known[f"{kind}_{word}"] for kind in KINDS], 3) for word in ("stiffness", "damping")
        )
        self.model.actuator_biasprm[a.springs, 1] = -stiffness
        self.model.actuator_forcerange[a.springs] = np.stack([-stiffness * low, stiffness * high], 1)
        self.model.actuator_biasprm[a.dampers, 2] = -damping

    def clips(self, arm: int = 0) -> tuple[Array, Array]:
        """How far behind its command the arm still pushes harder, below and above: each ``[6]``, meters and radians."""
        return self._clips[arm]

    def place(self, body: str, pose: npt.ArrayLike) -> None:
        """Put a free or mocap body somewhere, at rest. Only for the beginning of an episode."""
        pose, number = np.asarray(pose, np.float64), self._body(body)
        position, rotation = pose[:3], scalar_first(normalized(pose[3:]))
        joint, mocap = int(self.model.body_jntadr[number]), int(self.model.body_mocapid[number])
        if mocap >= 0:
            self.data.mocap_pos[mocap], self.data.mocap_quat[mocap] = position, rotation
        elif joint >= 0 and self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE:
            at, speed = self.model.jnt_qposadr[joint], self.model.jnt_dofadr[joint]
            self.data.qpos[at : at + 7] = [*position, *rotation]
            self.data.qvel[speed : speed + 6] = 0.0
        else:
            raise ConfigError(f'the body {body!r} cannot be placed: give it a <freejoint/> or mocap="true".')
        mujoco.mj_kinematics(self.model, self.data)

    def place_joint(self, joint: str, value: float) -> None:
        """Set a hinge or slide joint, at rest. Only for the beginning of an episode."""
        number = self._joint(joint)
        self.data.qpos[self.model.jnt_qposadr[number]], self.data.qvel[self.model.jnt_dofadr[number]] = value, 0.0
        mujoco.mj_kinematics(self.model, self.data)

    # -- sensing

    def pose(self, arm: int = 0) -> Array:
        """Where the arm's tcp is."""
        site = self._arms[arm].tcp
        return np.concatenate([self.data.site_xpos[site], from_matrix(self.data.site_xmat[site].reshape(3, 3))])

    def arm(self, arm: int = 0) -> ArmState:
        a, data = self._arms[arm], self.data
        jacobian = np.zeros((6, self.model.nv))
        mujoco.mj_jacSite(self.model, data, jacobian[:3], jacobian[3:], a.tcp)
        jacobian, dq = jacobian[:, a.dofs], data.qvel[a.dofs].copy()
        mujoco.mj_rnePostConstraint(self.model, data)
        wrench = data.cfrc_ext[a.hand_bodies].sum(0)  # torque, force, about the arm's center of mass
        hand, tcp, axes = a.hand_bodies[0], data.site_xpos[a.tcp], data.site_xmat[a.tcp].reshape(3, 3)
        force, torque = (
            wrench[3:],
            wrench[:3] + np.cross(data.subtree_com[self.model.body_rootid[hand]] - tcp, wrench[3:]),
        )
        if (push := data.xfrc_applied[hand]).any():  # a commanded wrench is the robot's doing, not the world's
            force, torque = force - push[:3], torque - push[3:] - np.cross(data.xipos[hand] - tcp, push[:3])
        return ArmState(
            pose=self.pose(arm),
            vel=jacobian @ dq,
            force=force @ axes,
            torque=torque @ axes,
            q=data.qpos[a.joints].copy(),
            dq=dq,
            jacobian=jacobian,
            gripper=float(np.clip(data.qpos[a.fingers].mean() / FINGER_TRAVEL, 0.0, 1.0)),
        )

    def body_pose(self, body: str) -> Array:
        number = self._body(body)
        return np.concatenate([self.data.xpos[number], scalar_last(self.data.xquat[number])])

    def joint(self, joint: str) -> float:
        """The position of a hinge or slide joint."""
        return float(self.data.qpos[self.model.jnt_qposadr[self._joint(joint)]])

    def render(self, camera: str = "front", height: int = 64, width: int = 64) -> Array:
        """What a camera sees: uint8 ``[height, width, 3]``."""
        if camera not in self.cameras:
            raise UnknownNameError("camera", camera, self.cameras)
        renderer = getattr(self._local, "renderer", None)
        if renderer is None or not renderer.fits(height, width):
            room = (256, 256) if renderer is None else renderer.room
            self.close()
            renderer = self._local.renderer = Renderer(self.model, max(height, room[0]), max(width, room[1]))
        return renderer.picture(self.data, self.model.camera(camera).id, height, width)

    def project(self, points: npt.ArrayLike, camera: str) -> Array:
        """Where points ``[N, 3]`` are in the picture of a camera, a square: ``[N, 2]`` from 0 to 1, to the right and
        down; NaN for those behind it."""
        number = self.model.camera(camera).id
        seen = (np.asarray(points) - self.data.cam_xpos[number]) @ self.data.cam_xmat[number].reshape(3, 3)
        depth = np.where(seen[:, 2] < 0, -seen[:, 2], np.nan)[:, None]
        half = np.tan(np.radians(self.model.cam_fovy[number]) / 2)
        return 0.5 + 0.5 * seen[:, :2] * [1, -1] / (half * depth)  # type: ignore[no-any-return]

    # -- the whole state

    def snapshot(self) -> Array:
        """All that the future depends on, but for the parameters: float64 ``[n]``.
        ``restore`` continues from it bit for bit."""
        state = np.empty(mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        return state

    def restore(self, snapshot: object) -> None:
        state = np.ascontiguousarray(snapshot, np.float64)
        size = mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION)
        if state.shape != (size,):
            raise ConfigError(
                f"a snapshot of this scene has {size} numbers; given {state.shape}: it is of another scene."
            )
        mujoco.mj_setState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(self.model, self.data)

    def close(self) -> None:
        """Give back what rendering holds in this thread."""
        if (renderer := getattr(self._local, "renderer", None)) is not None:
            renderer.close()
            self._local.renderer = None

    # -- inside

    def _integrals(self, arm: int) -> list[str]:
        return [kind for kind in INTEGRAL_LIMIT if self.parameters[arm][f"{kind}_Ki"] > 0]

    def _integrate(self, arm: int, kinds: list[str], seconds: float) -> None:
        # the sum is kept in the dampers' ctrl, so that a snapshot has it
        for kind in kinds:
            part = slice(0, 3) if kind == "translational" else slice(3, 6)
            a, gain = self._arms[arm], self.parameters[arm][f"{kind}_Ki"]
            summed = (
                self.data.ctrl[a.dampers[part]] - gain * self.data.actuator_length[a.springs[part]] * seconds * 1000
            )
            self.data.ctrl[a.dampers[part]] = np.clip(summed, -gain * INTEGRAL_LIMIT[kind], gain * INTEGRAL_LIMIT[kind])

    def _body(self, name: str) -> int:
        return self._number(mujoco.mjtObj.mjOBJ_BODY, "body", name, self.model.nbody)

    def _joint(self, name: str) -> int:
        return self._number(mujoco.mjtObj.mjOBJ_JOINT, "joint", name, self.model.njnt)

    def _number(self, kind: Any, word: str, name: str, count: int) -> int:
        number = int(mujoco.mj_name2id(self.model, kind, name))
        if number < 0:
            raise UnknownNameError(
                word, name, filter(None, (mujoco.mj_id2name(self.model, kind, i) for i in range(count)))
            )
        return number


class _Arm:
    """Where one arm's numbers lie in MuJoCo's vectors."""

    def __init__(self, model: Any, prefix: str):
        joints = [model.joint(f"{prefix}joint{i}") for i in range(1, 8)]
        self.joints = np.array([j.qposadr[0] for j in joints])
        self.dofs = np.array([j.dofadr[0] for j in joints])
        self.fingers = np.array([model.joint(f"{prefix}finger{i}").qposadr[0] for i in (1, 2)])
        self.hand_bodies = np.array([model.body(f"{prefix}{name}").id for name in ("hand", "finger1", "finger2")])
        self.tcp = model.site(f"{prefix}tcp").id
        self.target_position = model.body(f"{prefix}target_position").mocapid[0]
        self.target_rotation = model.body(f"{prefix}target_rotation").mocapid[0]
        self.gripper = model.actuator(f"{prefix}gripper").id
        self.springs = np.array([model.actuator(f"{prefix}spring{i}").id for i in range(6)])
        self.dampers = np.array([model.actuator(f"{prefix}damper{i}").id for i in range(6)])
