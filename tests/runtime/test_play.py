"""Play: touches are found by the joints, named by how they look, and teach a policy where things are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mujoco")

from hilt.envs.suite import HUES
from hilt.envs.task import make
from hilt.policies.small_vla import SmallVLA, SmallVLAConfig
from hilt.policies.suites import suite
from hilt.runtime.play import Examples, Playing, Touch, learn, named, play, played, straight
from hilt.runtime.vla_config import Vla
from tests.effort import need_rendering

torch.set_num_threads(1)
OPTIONS = {"image_size": 64, "cameras": ["wrist"], "control_hz": 5, "step_limit": 1_000_000}
SEEN = {"red": (200, 40, 30), "green": (40, 170, 50), "blue": (40, 70, 200), "yellow": (230, 190, 30)}


def touch(looks: tuple[int, int, int]) -> Touch:
    return Touch(np.array(looks, float), [{"state": np.zeros(1, np.float32)}] * 2, np.ones((2, 3), np.float32))


def test_a_touch_gets_the_words_of_the_demonstration_that_ended_alike_and_none_when_it_is_between_two() -> None:
    ends = {"red": np.array([200.0, 0, 0]), "blue": np.array([0, 0, 200.0])}
    found = named([touch((180, 20, 20)), touch((90, 0, 100)), touch((20, 0, 210))], ends)
    assert [one["instruction"] for one in found.observations] == ["red", "red", "blue", "blue"]
    assert found.ways.shape == (4, 3)
    assert named([], ends).ways.shape == (0, 3)


def test_touches_lie_on_the_things_that_they_look_like() -> None:
    """The test may ask the simulator where things are; play may not."""
    need_rendering()
    env, rng, right = make("tabletop/press_red", **OPTIONS), np.random.default_rng(0), []
    for state in range(4):
        home = np.array(env.reset(options={"split": "train", "state": state})[0]["state"]["tcp_pose"][:3])
        buttons = {name: env.unwrapped.world.body_pose(name)[:2] for name in HUES}
        for one in play(env, suite("tabletop/press_red"), state, rng, 6, 0.06):
            assert one.views[0]["wrist_image"].shape == (64, 64, 3) and len(one.views) == len(one.ways) >= 1
            there = (home + one.ways[0])[:2] if np.allclose(one.views[0]["state"], home[2], atol=1e-3) else None
            if there is not None:  # the first view is from home, unless the touch lay behind it
                nearest = min(buttons, key=lambda name: float(np.linalg.norm(buttons[name] - there)))
                assert np.linalg.norm(buttons[nearest] - there) < 0.05
                looks = {name: np.array(colour, float) for name, colour in SEEN.items()}
                for instruction in {str(each["instruction"]) for each in named([one], looks).observations}:
                    right.append(instruction == nearest)
    assert len(right) >= 3 and np.mean(right) >= 0.9


def test_it_tells_how_many_scenes_are_played() -> None:
    need_rendering()
    told: list[tuple[Any, ...]] = []
    config = Vla(tasks=["tabletop/press_red"], task_options=OPTIONS)
    played(config, Playing(scenes=2, descents=1), lambda *given: told.append(given))
    assert told == [("playing, scenes", 0, 2), ("playing, scenes", 1, 2)]


class Shown:
    """Lessons of one step."""

    def rows(self) -> np.ndarray:
        return np.zeros((1, 2), np.int64)

    def batch(self, rows: np.ndarray, horizon: int) -> tuple[list[dict[str, object]], np.ndarray, np.ndarray]:
        seen = {"wrist_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "red"}
        return [seen] * len(rows), np.zeros((len(rows), horizon, 3), np.float32), np.ones((len(rows), horizon), bool)


def dot(column: int) -> np.ndarray:
    image = np.zeros((16, 16, 3), np.uint8)
    image[:, column : column + 4] = (255, 0, 0)
    return image


def test_ways_are_learned_beside_demonstrations() -> None:
    columns = list(range(13))
    views = [{"wrist_image": dot(c), "state": np.zeros(1, np.float32), "instruction": "red"} for c in columns]
    examples = Examples(views, np.array([[0.0, 0.06 * (c - 6) / 6, 0.0] for c in columns], np.float32))
    sizes = {"image_size": 16, "state_dim": 1, "chunk": 2, "action_dim": 3, "width": 32, "depth": 1}
    policy = SmallVLA(SmallVLAConfig(cameras=("wrist_image",), **sizes), seed=0)
    seen: list[dict[str, float]] = []
    settings = Playing(steps=40, batch_size=13, demonstrated=1)
    learn(policy, Shown(), examples, 0.06, settings, torch.Generator().manual_seed(0), lambda step, values: seen.append(values))  # type: ignore[arg-type]
    moves = policy.act(views, sample=False)[0][:, 0, 1]
    assert len(seen) == 40 and np.corrcoef(moves, examples.ways[:, 1])[0, 1] > 0.9
    learn(policy, Shown(), named([], {}), 0.06, Playing(steps=1), torch.Generator(), lambda step, values: seen.append(values))  # type: ignore[arg-type]
    assert "play_loss" in seen[0] and "play_loss" not in seen[-1]


def test_a_straight_way_takes_as_many_actions_as_it_is_long() -> None:
    actions, needed = straight(np.array([[0.12, -0.06, 0.0], [0.0, 0.0, 0.01]], np.float32), 3, 0.06)
    assert needed.tolist() == [[True, True, False], [True, False, False]]
    assert actions[0, :2] == pytest.approx(np.array([[1.0, -0.5, 0.0]] * 2)) and actions[1, 0] == pytest.approx([0, 0, 1 / 6])
