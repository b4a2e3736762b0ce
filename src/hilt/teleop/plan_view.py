"""What a policy has planned, for a person who may take over: its chunk as a path in the pictures, and how sure it is.

A task can draw it that has ``planned_points(actions)``, the places in meters that its arms would go through,
``[arms, actions + 1, 3]``, and ``project(points)``, where points ``[N, 3]`` are in the picture of each camera:
``{camera: [N, 2]}`` from 0 to 1, to the right and down, NaN for what a camera does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hilt.envs.chunk_executor import ExecutedChunk

NOTHING: dict[str, Any] = {"path": {}, "path_done": 0, "confidence": None}


class PlanView:
    """The plan that is being executed, as fields of a `Status`."""

    def __init__(
        self,
        planned: Callable[[], ExecutedChunk | None] = lambda: None,
        points: Callable[[Any], Any] | None = None,
        project: Callable[[Any], dict[str, Any]] | None = None,
    ):
        """`points`, `project`: ``planned_points`` and ``project`` of the task, where it has them."""
        self._planned, self._points, self._project = planned, points, project
        self.clear()

    def clear(self) -> None:
        """Nothing is planned."""
        self._chunk: ExecutedChunk | None = None
        self._first, self._places = 0, np.zeros((0, 0, 3))

    def note(self) -> None:
        """An action of the plan is about to be executed: a new plan is a path from where the arms are now."""
        chunk, last = self._planned(), self._chunk
        if chunk is None:
            self.clear()
            return
        if self._points is not None and (last is None or chunk.number != last.number):
            self._first = max(0, chunk.done - 1)
            self._places = np.asarray(self._points(chunk.actions[self._first :]))
        self._chunk = chunk

    def shown(self) -> dict[str, Any]:
        """The fields ``path``, ``path_done`` and ``confidence`` of a `Status`."""
        chunk = self._chunk
        if chunk is None:
            return NOTHING
        path: dict[str, list[list[list[float]]]] = {}
        if self._project is not None and self._places.size:
            arms, count = self._places.shape[:2]
            for camera, places in self._project(self._places.reshape(-1, 3)).items():
                lines = np.asarray(places).reshape(arms, count, 2)
                path[camera] = [line[np.isfinite(line).all(1)].round(4).tolist() for line in lines]
        return {"path": path, "path_done": chunk.done - self._first, "confidence": chunk.confidence}
