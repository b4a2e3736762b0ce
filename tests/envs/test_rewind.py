"""Rewinding: an episode goes on from an earlier moment, bit for bit as the first time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.core.tree import equal, flatten
from hilt.envs import check_task, make
from hilt.envs.rewind import restore_state, save_state, why_not_rewound
from hilt.envs.wrappers import EpisodeStatistics, GripperPenaltyWrapper
from hilt.recording.buffered_device import as_hil_serl
from hilt.recording.recording_folder import nested
from hilt.teleop.intervene import TakeOver
from tests.effort import need, sampled
from tests.teleop.played import Noting, Played


def same(a: Any, b: Any) -> bool:
    first, second = flatten(nested({"seen": a})), flatten(nested({"seen": b}))
    return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("wrapped", sampled([False, True], True))
@pytest.mark.parametrize("task", sampled(["pick", "insert", "drawer", "button", "lift_tray"], "pick", "lift_tray"))
def test_rewound_simulation_gives_the_same_observations_for_the_same_actions(task: str, wrapped: bool):
    need("mujoco")
    made: Any = make(f"tabletop/{task}", image_size=16, render_size=16)
    with EpisodeStatistics(GripperPenaltyWrapper(as_hil_serl(TakeOver(made, Played())))) if wrapped else made as env:
        env.reset(seed=3, options={"split": "train", "state": 1})
        actions = np.random.default_rng(0).uniform(-1, 1, (24, *env.action_space.shape)).astype(np.float32)
        before = [env.step(action) for action in actions[:8]]
        saved = save_state(env)
        first = [env.step(action) for action in actions[8:]]
        for _ in range(2):
            restore_state(env, saved)
            again = [env.step(action) for action in actions[8:]]
            for a, b in zip(first, again, strict=True):
                assert same(a[0], b[0]) and a[1:4] == b[1:4]
                assert a[4].get("grasp_penalty") == b[4].get("grasp_penalty")
        assert not same(before[-1][0], again[-1][0]), "the arm has moved"


def test_environment_without_snapshots_or_with_an_unknown_wrapper_is_not_rewound():
    with pytest.raises(ConfigError, match=r"Noting cannot be rewound: only a simulation can, whose environment has"):
        save_state(Noting())

    class Stacking(gymnasium.Wrapper):
        """One that says nothing of what it keeps."""

    with pytest.raises(ConfigError, match=r"Stacking cannot be rewound: .* Give the wrapper episode_state"):
        save_state(Stacking(Snapshots()))
    assert why_not_rewound(gymnasium.wrappers.TimeLimit(Snapshots(), 5)) == ""


def test_robot_refuses_to_be_rewound():
    env = make("robot/127.0.0.1:9", cameras=[])
    assert "cannot be rewound: only a simulation can" in why_not_rewound(env)
    env.close()


class Snapshots(Noting):
    """An environment whose next observation depends on its random generator, too."""

    def __init__(self, forgets: bool = False):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.initial_states, self._forgets, self._speed = {"train": 3}, forgets, 0.0

    def _see(self) -> Any:
        return np.array([self._speed, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._np_random = np.random.default_rng((options or {}).get("state", 0))
        self.got, self._speed = [], 0.0
        return self._see(), {"succeed": False, **(options or {})}

    def step(self, action: Any) -> Any:
        self._speed += float(np.sum(action))
        return super().step(action)

    def snapshot(self) -> Any:
        return list(self.got), 0.0 if self._forgets else self._speed

    def restore(self, snapshot: Any) -> None:
        self.got, self._speed = snapshot


def test_rewound_environment_draws_the_same_random_numbers():
    env = gymnasium.wrappers.TimeLimit(Snapshots(), 4)
    env.reset(seed=0)
    saved = save_state(env)
    first = [env.step(np.ones(7, np.float32)) for _ in range(4)]
    restore_state(env, saved)
    again = [env.step(np.ones(7, np.float32)) for _ in range(4)]
    assert all(np.array_equal(a[0], b[0]) and a[3] == b[3] for a, b in zip(first, again, strict=True))
    assert first[-1][3] and not first[-2][3], "the time limit counts from the moment on"


def test_check_task_finds_a_snapshot_that_forgets_something():
    assert not [finding for finding in check_task(Snapshots()) if "restore" in finding]
    assert [finding for finding in check_task(Snapshots(forgets=True)) if "after restore(snapshot)" in finding]
