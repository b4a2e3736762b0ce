"""The geometry of LIBERO's scripted expert: grasps, room for the hand, and ways over obstacles. That it succeeds in the
real simulator is tested in tests/peers/test_libero.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.envs.libero_expert import (
    OPENING,
    PATH_WIDTH,
    Boxes,
    Grasp,
    category,
    choose,
    clear_height,
    clearance,
    expert,
    half_turn,
    hand_points,
    rim,
    stretch,
)
from hilt.envs.rotations import from_euler, to_matrix

BASE = np.array([-0.66, 0.0, 0.912])
BOWL = np.array([-0.1, 0.0, 0.9])


def boxes(*placed: tuple[Any, Any], turned: float = 0.0) -> Boxes:
    """Boxes by their centers and half sizes, all turned about the vertical axis."""
    rotation = to_matrix(from_euler([0.0, 0.0, turned]))
    centers, sizes = (np.array([box[i] for box in placed], float).reshape(-1, 3) for i in (0, 1))
    return Boxes(centers, np.tile(rotation, (len(placed), 1, 1)), sizes)


def test_distances_to_boxes_follow_their_rotation() -> None:
    turned = boxes(([0, 0, 0], [0.2, 0.1, 0.05]), turned=np.pi / 2)
    points = np.array([[0.0, 0.3, 0.0], [0.3, 0.0, 0.0], [0.05, 0.15, 0.0], [0.0, 0.0, 0.15], [0.13, 0.24, 0.0]])
    assert np.allclose(turned.distances(points)[:, 0], [0.1, 0.2, 0.0, 0.1, 0.05])
    tilted = Boxes(np.zeros((1, 3)), to_matrix(from_euler([np.pi / 2, 0, 0]))[None], np.array([[0.2, 0.1, 0.05]]))
    assert np.allclose([turned.tops()[0], tilted.tops()[0]], [0.05, 0.1])


def test_a_rim_is_pinched_with_one_finger_inside_and_one_outside() -> None:
    for angle in np.arange(12) * np.pi / 6:
        grasp = rim(BOWL, 0.05, 0.04, angle)
        assert np.isclose(np.linalg.norm((grasp.point - BOWL)[:2]), 0.05) and np.isclose(grasp.point[2], 0.94)
        assert -np.pi / 2 <= grasp.yaw < np.pi / 2
        fingers = hand_points(grasp)[:18]
        radii = np.linalg.norm((fingers - BOWL)[:, :2], axis=1)
        assert (radii < 0.05 - OPENING / 2).sum() == (radii > 0.05 + OPENING / 2).sum() == 9
    assert np.isclose(half_turn(np.pi * 0.75), -np.pi * 0.25) and np.isclose(half_turn(-np.pi * 0.6), np.pi * 0.4)


def test_the_hand_turns_only_where_it_has_no_room() -> None:
    grasps = [rim(BOWL, 0.05, 0.04, angle) for angle in np.arange(24) * np.pi / 12]
    nothing = boxes()
    assert clearance(grasps[0], nothing) == 1.0
    assert abs(choose(grasps, nothing, 0.0, BASE).yaw) < 1e-9
    between = boxes(*(([-0.1, side * 0.12, 0.95], [0.2, 0.02, 0.1]) for side in (-1, 1)))
    chosen = choose(grasps, between, 0.0, BASE)
    assert clearance(chosen, between) > 0.012 and clearance(choose(grasps, nothing, 0.0, BASE), between) == 0.0
    everywhere = boxes(([-0.1, 0, 0.95], [1, 1, 1]))
    assert choose(grasps, everywhere, 0.0, BASE) in grasps


def test_what_is_far_away_is_grasped_at_its_near_side() -> None:
    far = np.array([0.06, -0.28, 1.126])
    grasps = [rim(far, 0.05, 0.04, angle) for angle in np.arange(24) * np.pi / 12]
    near = choose(grasps, boxes(), 0.0, BASE).point - BASE
    assert stretch(near) < stretch(far - BASE) and np.linalg.norm(near[:2]) < np.linalg.norm((far - BASE)[:2]) - 0.02
    assert np.isclose(stretch(np.array([0.088 + 0.5, 0.0, 0.333 - 0.204])), 0.5)


def test_a_way_leads_over_what_is_near_it() -> None:
    start, end = np.array([-0.2, 0.0, 1.0]), np.array([0.1, 0.2, 0.95])
    tower = ([-0.05, 0.1, 1.0], [0.02, 0.02, 0.15])
    assert np.isclose(clear_height(start, end, boxes(tower), 0.05), 1.15 + 0.05 + 0.03)
    beside = ([-0.05, 0.1 - PATH_WIDTH - 0.2, 1.0], tower[1])
    assert np.isclose(clear_height(start, end, boxes(beside), 0.05), 0.95 + 0.03)
    assert np.isclose(clear_height(start, end, boxes(beside, tower), 0.05), 1.23)
    assert np.isclose(clear_height(start, end, boxes(), 0.05), 0.95 + 0.03)


@pytest.mark.parametrize("goal", [["on", "milk_1", "basket_1"], ["open", "microwave_1"], ["stack", "a_1", "b_1"]])
def test_a_goal_without_a_script_is_refused_with_what_to_do(goal: list[str]) -> None:
    sim = SimpleNamespace(parsed_problem={"goal_state": [goal]})
    with pytest.raises(ConfigError, match=rf"no scripted expert for the goal \({' '.join(goal)}\).*--device browser"):
        expert(sim)
    assert category("akita_black_bowl_1") == "akita_black_bowl" and isinstance(Grasp(BOWL, 0.0).yaw, float)
