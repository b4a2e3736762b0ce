"""``trajectories.json``: RLDS episodes, and what TF-Agents' conversion makes of them, or its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hilt.formats import rlds
from tests import golden

FIELDS = ("step_type", "next_step_type", "discount", "reward", "observation", "action")


def matches(path: Path) -> Path | None:
    return path if path.name == "trajectories.json" and path.is_file() else None


def compare(case: Path) -> golden.Result:
    cases = json.loads(case.read_text())
    ours = {str(number): converted(one["episodes"]) for number, one in enumerate(cases)}
    return golden.compare(
        ours, {str(number): {k: v for k, v in one.items() if k != "episodes"} for number, one in enumerate(cases)}
    )


def converted(episodes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The numbers of each trajectory, or the text of the error, in the file's own form."""
    data = [{"steps": [as_arrays(step) for step in steps]} for steps in episodes]
    try:
        return {
            "trajectories": [
                [getattr(one, name).item() for name in FIELDS] for one in rlds.convert_rlds_to_trajectories(data)
            ]
        }
    except rlds.InvalidArgumentError as error:
        return {"error": str(error)}


def as_arrays(step: dict[str, Any]) -> dict[str, Any]:
    return {name: np.bool_(value) if isinstance(value, bool) else np.float32(value) for name, value in step.items()}
