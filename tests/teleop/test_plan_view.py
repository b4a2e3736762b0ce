"""A policy's plan as a path in the pictures: when it is drawn anew, how far the arm is, and where nothing is drawn."""

from __future__ import annotations

import numpy as np

from hilt.envs.chunk_executor import ExecutedChunk
from hilt.teleop.plan_view import NOTHING, PlanView

ACTIONS = np.array([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0]])


class Table:
    """One arm whose actions are motions in meters, and a camera that looks down onto a square meter."""

    def __init__(self) -> None:
        self.at = np.zeros(3)

    def points(self, actions: np.ndarray) -> np.ndarray:
        moves = np.pad(actions, ((1, 0), (0, 1)))
        return (self.at + np.cumsum(moves, 0))[None]

    def project(self, points: np.ndarray) -> dict[str, np.ndarray]:
        return {"top": np.where(points[:, :1] < 0.55, points[:, :2], np.nan)}


def test_a_new_plan_is_a_path_from_where_the_arm_is():
    table, plans = Table(), [ExecutedChunk(0, ACTIONS, 1, 0.4)]
    view = PlanView(lambda: plans[-1], table.points, table.project)
    assert view.shown() == NOTHING
    view.note()
    path = [[0.0, 0.0], [0.1, 0.0], [0.3, 0.0]]  # the last place is out of sight
    assert view.shown() == {"path": {"top": [path]}, "path_done": 1, "confidence": 0.4}
    table.at = np.array([0.1, 0.0, 0.0])
    plans.append(ExecutedChunk(0, ACTIONS, 2, 0.4))
    view.note()  # the same plan: the path stays where it is
    assert view.shown() == {"path": {"top": [path]}, "path_done": 2, "confidence": 0.4}
    plans.append(ExecutedChunk(1, ACTIONS, 3))  # asked for two steps ago, and taken over in the middle
    view.note()
    assert view.shown() == {"path": {"top": [[[0.1, 0.0], [0.4, 0.0]]]}, "path_done": 1, "confidence": None}
    view.clear()
    assert view.shown() == NOTHING


def test_nothing_is_drawn_where_the_task_cannot_and_while_the_policy_plans_nothing():
    plans = [ExecutedChunk(0, ACTIONS, 1, 0.9)]
    view = PlanView(lambda: plans[-1])
    view.note()
    assert view.shown() == {"path": {}, "path_done": 1, "confidence": 0.9}
    plans.append(None)
    view.note()
    assert view.shown() == NOTHING
