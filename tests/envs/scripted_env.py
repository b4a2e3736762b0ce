"""An environment that does what a test says, and keeps what it was given: for what wrappers do with exact numbers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from scipy.spatial.transform import Rotation

SIZES = {"tcp_pose": 7, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Random states from a seed. `rewards`, `infos` and `ends` (``{3: "terminated"}``) are by step, counted from 1."""

    def __init__(self, prefixes=("",), rewards=None, infos=None, ends=None, images=True, seed=0):
        self.prefixes, self.rewards, self.infos, self.ends = prefixes, rewards or {}, infos or {}, ends or {}
        self.action_space = spaces.Box(-1.0, 1.0, (7 * len(prefixes),), np.float32)
        state = {
            p + key: spaces.Box(-np.inf, np.inf, (size,), np.float32) for p in prefixes for key, size in SIZES.items()
        }
        parts: dict[str, Any] = {"state": spaces.Dict(state)}
        if images:
            parts["images"] = spaces.Dict({"front": spaces.Box(0, 255, (4, 4, 3), np.uint8)})
        self.observation_space = spaces.Dict(parts)
        self.rng = np.random.default_rng(seed)
        self.actions: list[Any] = []
        self.observations: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {}

    def step(self, action):
        self.steps += 1
        self.actions.append(np.array(action))
        end = self.ends.get(self.steps)
        info = dict(self.infos.get(self.steps, {}))
        return self._observed(), self.rewards.get(self.steps, 0.0), end == "terminated", end == "truncated", info

    def _observed(self):
        state = {}
        for key, space in self.observation_space["state"].spaces.items():
            value = self.rng.normal(size=space.shape) * 0.4
            if key.endswith("tcp_pose"):
                value[3:] = Rotation.random(rng=self.rng).as_quat()
            if key.endswith("gripper_pose"):
                value = self.rng.uniform(size=1)
            state[key] = value.astype(np.float32)
        obs = {"state": state}
        if "images" in self.observation_space.spaces:
            obs["images"] = {"front": self.rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)}
        self.observations.append(obs)
        return obs
