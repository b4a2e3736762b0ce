"""Wrappers of HIL-SERL and ours, put through the same steps; run as a program, with
HIL-SERL's own Python, it does upstream's half.

    python real_serl_wrappers.py CHECKOUT STEPS.npz OUT.npz

`run` is the same code for both: only the classes differ. What upstream imports and these wrappers do not need (cameras,
a SpaceMouse, jax for one function) is replaced by empty modules.
"""

import sys
import types

import gymnasium
import numpy as np
from gymnasium import spaces

SIZES = {"tcp_pose": 7, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}


class ReplayEnv(gymnasium.Env):
    """Gives the states of a file, whatever is done."""

    def __init__(self, data, prefixes=("",), rewards=(), end=None):
        self.data, self.rewards, self.end = data, rewards, end
        self.keys = [prefix + key for prefix in prefixes for key in SIZES]
        self.prefixes, self.actions = prefixes, []
        self.action_space = spaces.Box(-1.0, 1.0, (7 * len(prefixes),), np.float32)
        state = {key: spaces.Box(-np.inf, np.inf, (SIZES[key.split("/")[-1]],), np.float32) for key in self.keys}
        images = {"front": spaces.Box(0, 255, (2, 2, 3), np.uint8)}
        self.observation_space = spaces.Dict({"state": spaces.Dict(state), "images": spaces.Dict(images)})

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observed(), {}

    def step(self, action):
        self.t += 1
        self.actions.append(np.array(action))
        info = {}
        if self.t % 3 == 0:
            info["intervene_action"] = np.concatenate([self.data["interventions"][self.t]] * len(self.prefixes))
        reward = self.rewards[self.t - 1] if len(self.rewards) else 0.0
        return self.observed(), reward, self.t == self.end, False, info

    def observed(self):
        state = {}
        for i, key in enumerate(self.keys):  # two arms see different rows
            state[key] = self.data[key.split("/")[-1]][
                (self.t + 17 * (i // len(SIZES))) % len(self.data["tcp_pose"])
            ].copy()
        return {"state": state, "images": {"front": np.full((2, 2, 3), self.t, np.uint8)}}


def leaves(tree, path=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def rolled(env, below, actions):
    """Everything that comes out of an environment, stacked over its steps."""
    rows = []
    obs, info = env.reset()
    rows.append({**dict(leaves(obs))})
    first = {**rows[0], **{f"info.{key}": value for key, value in leaves(info)}}
    out = {}
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action.copy())
        row = {
            **dict(leaves(obs)),
            "reward": float(np.asarray(reward)),
            "done": bool(terminated),
            "truncated": bool(truncated),
        }
        row.update({f"info.{key}": value for key, value in leaves(info) if key in ("succeed", "grasp_penalty")})
        rows.append(row)
        for key in ("intervene_action",):
            if key in info:
                out.setdefault(key, []).append(np.array(info[key]))
    for key in rows[1]:
        out[key] = np.stack([np.asarray(row[key]) for row in rows[1:]])
    out.update({f"reset.{key}": np.asarray(value) for key, value in first.items() if "original" not in key})
    out["sent"] = np.stack(below.actions)
    return {key: np.asarray(value) for key, value in out.items()}


def run(w, data):
    """``{case: {name: array}}`` of the wrappers in `w`."""
    seven, fourteen, six = (
        data["actions"],
        np.concatenate([data["actions"], -data["actions"]], 1),
        data["actions"][:, :6],
    )
    cases = {}

    def case(name, below, wrap, actions):
        cases[name] = rolled(wrap(below), below, actions)

    full = lambda env: w.ChunkingWrapper(w.SERLObsWrapper(w.Quat2EulerWrapper(w.RelativeFrame(env))), 1, None)  # noqa: E731
    dual = lambda env: w.ChunkingWrapper(w.SERLObsWrapper(w.DualQuat2EulerWrapper(w.DualRelativeFrame(env))), 1, None)  # noqa: E731
    both = ("left/", "right/")
    case("relative", ReplayEnv(data), w.RelativeFrame, seven)
    case("not-relative", ReplayEnv(data), lambda env: w.RelativeFrame(env, include_relative_pose=False), seven)
    case("dual-relative", ReplayEnv(data, both), w.DualRelativeFrame, fourteen)
    case("r2", ReplayEnv(data), w.Quat2R2Wrapper, seven)
    case("full", ReplayEnv(data), full, seven)
    case("dual-full", ReplayEnv(data, both), dual, fourteen)
    case("few", ReplayEnv(data), lambda env: w.SERLObsWrapper(env, ["tcp_vel", "gripper_pose"]), seven)
    case("history", ReplayEnv(data), lambda env: w.ChunkingWrapper(env, 3, None), seven)
    case("close", ReplayEnv(data), lambda env: w.RelativeFrame(w.GripperCloseEnv(env)), six)
    case("penalty", ReplayEnv(data), lambda env: w.GripperPenaltyWrapper(full(env), penalty=-0.02), seven)
    verdict = lambda obs: int(obs["state"][0, 0] > 0.6)  # noqa: E731
    case(
        "classifier", ReplayEnv(data), lambda env: w.MultiCameraBinaryRewardClassifierWrapper(full(env), verdict), seven
    )
    stages = [lambda obs, i=i: np.array(10.0 * obs["state"][0, i]) for i in (0, 1, 14)]
    case("stages", ReplayEnv(data), lambda env: w.MultiStageBinaryRewardClassifierWrapper(full(env), stages), seven)
    return cases


def mistakes(w, data):
    """What upstream does wrong, as numbers that differ from ours."""
    env = w.ChunkingWrapper(below := ReplayEnv(data, rewards=[1.0, 2.0, 4.0, 8.0], end=3), 1, 4)
    env.reset()
    _, reward, done, _, _ = env.step(data["actions"][:4])
    found = {"chunk reward": reward, "chunk says done": float(done), "chunk steps": len(below.actions)}
    w.Quat2EulerWrapper(below := ReplayEnv(data))
    found["numbers in the space below"] = below.observation_space["state"]["tcp_pose"].shape[0]
    env = w.RelativeFrame(ReplayEnv(data))
    found["observation is in its space"] = float(env.observation_space.contains(env.reset()[0]))
    return found


def upstream(checkout):
    """Upstream's classes, by name."""
    for path in ("serl_launcher", "serl_robot_infra", "examples"):
        sys.path.insert(0, f"{checkout}/{path}")
    for name in (
        "pyrealsense2",
        "requests",
        "cv2",
        "jax",
        "franka_env.envs.franka_env",
        "franka_env.envs.franka_wrench_env",
    ):
        sys.modules[name] = types.ModuleType(name)
    for name in (
        "franka_env.spacemouse.spacemouse_expert",
        "franka_env.camera.video_capture",
        "franka_env.camera.rs_capture",
    ):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["franka_env.spacemouse.spacemouse_expert"].SpaceMouseExpert = None
    sys.modules["franka_env.camera.video_capture"].VideoCapture = sys.modules[
        "franka_env.camera.rs_capture"
    ].RSCapture = None
    franka = sys.modules["franka_env.envs.franka_env"]
    franka.FrankaEnv, franka.DefaultEnvConfig, sys.modules["franka_env.envs.franka_wrench_env"].FrankaWrenchEnv = (
        object,
        None,
        None,
    )

    sys.modules["jax"].tree_map = lambda function, tree, is_leaf: stacked(tree, function)

    from experiments.usb_pickup_insertion.wrapper import GripperPenaltyWrapper
    from franka_env.envs import relative_env, wrappers
    from serl_launcher.wrappers import chunking, serl_obs_wrappers

    names = {}
    for module in (relative_env, wrappers, chunking, serl_obs_wrappers):
        names.update(vars(module))
    return types.SimpleNamespace(**{**names, "GripperPenaltyWrapper": GripperPenaltyWrapper})


def stacked(tree, function):
    """jax.tree_map for what upstream gives it: lists of observations, or of nested ones."""
    if isinstance(tree, dict):
        return {key: stacked(value, function) for key, value in tree.items()}
    if isinstance(tree[0], dict):
        return {key: stacked([one[key] for one in tree], function) for key in tree[0]}
    return function(tree)


if __name__ == "__main__":
    checkout, steps, out = sys.argv[1:]
    with np.load(steps) as file:
        data = dict(file)
    classes = upstream(checkout)
    arrays = {f"{case}|{name}": value for case, values in run(classes, data).items() for name, value in values.items()}
    np.savez(out, **arrays, **{f"mistakes|{name}": value for name, value in mistakes(classes, data).items()})
