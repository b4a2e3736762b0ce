"""A recording on the disk, and its episodes played again.

- ``recording.json``: what is recorded here: the task, its options, how observations look, demonstrations or labelled frames
- ``log/``: the episodes, a log as docs/replay.md has it
- ``videos/``: one mp4 for each (`hilt.runtime.film`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, HiltError
from hilt.core.files import DISK, leftovers, read_json, storage_errors, write_json
from hilt.core.tree import ArraySpec, flatten, unflatten
from hilt.replay import Log, Schema
from hilt.replay.schema import spec_of_space

DEMONSTRATIONS, LABELLED = "demonstrations", "labelled frames"
"""What a recording is, also told by the fact `recorded_as` of its episodes"""
TIMES = ("observed", "sent", "applied")
GRASP = "grasp_penalty"
LABELS = "labels"
"""Of frames for a classifier: 1 success, 0 failure"""


def open_recording(folder: Path, task: str, options: Mapping[str, Any], observations: str, env: Any, labels: bool) -> Log:
    """The log of a recording, new or to go on with; one of something else is refused."""
    what = LABELLED if labels else DEMONSTRATIONS
    told = {"task": task, "options": json.loads(json.dumps(dict(options))), "observations": observations, "what": what}
    card, path, schema = folder / "recording.json", folder / "log", Schema.declare(columns_of(env, labels))
    if card.exists():
        if (found := read_json(card)) != told:
            words = "{what} of {task} with the options {options} and {observations} observations"
            there, asked = (words.format(**it) for it in (found, told))
            raise ConfigError(f"{folder} has {there}, and {asked} were to be added. Choose another folder with --out.")
    else:
        DISK.make_folders(folder)
        with storage_errors(folder):
            if others := set(folder.iterdir()) - set(leftovers(folder)):
                raise ConfigError(f"{folder} is not a recording: {min(others).name} is in it, and no recording.json. Choose another --out.")
        write_json(card, told)
    if not (path / "log.json").exists():
        return Log.create(path, schema)
    log = Log.open(path)
    try:
        (with_penalty(schema) if GRASP in log.schema.columns else schema).grown_from(log.schema)
    except HiltError:
        log.close()
        raise
    return log


def columns_of(env: Any, labels: bool = False) -> dict[str, Any]:
    """The columns of a log for this environment: its spaces, and what every recording has."""
    seen = nested(spec_of_space(env.observation_space, "observation_space"))
    return {
        "observations": seen,
        "actions": spec_of_space(env.action_space, "action_space"),
        "rewards": ArraySpec(np.dtype(np.float32)),
        "next_observations": seen,
        "times": dict.fromkeys(TIMES, ArraySpec(np.dtype(np.float64))),
        **({LABELS: ArraySpec(np.dtype(np.int32))} if labels else {}),
    }


def with_penalty(schema: Schema) -> Schema:
    """The same columns, and the gripper's penalty; steps from before there was one have 0."""
    return Schema.declare({**schema.columns, GRASP: ArraySpec(np.dtype(np.float32), default=0.0)})


def nested(observation: Any) -> Any:
    """With a level for each slash in a key, such as ``left/tcp_pose``, as a log has it."""
    if not isinstance(observation, Mapping):
        return observation
    return unflatten({key: nested(value) for key, value in observation.items()})


def replay_open_loop(log: Log, trajectory: int, env: Any) -> dict[str, float]:
    """Plays the actions of a recorded episode from its initial state: how far each observation is from the recorded one, at most.

    `env` is what `hilt.envs.task.make` makes of the episode's facts `task` and `options`. In a deterministic simulator all are 0.
    """
    facts, steps = log.facts.about(trajectory), log.read(log.trajectory_keys(trajectory), ["observations", "actions", "next_observations"])
    start = {name: facts[name] for name in ("split", "state") if name in facts}
    furthest: dict[str, float] = {}

    def compare(seen: Any, recorded: Any, step: int) -> None:
        there = flatten({"observations": recorded})
        for path, found in flatten({"observations": nested(seen)}).items():
            distance = np.abs(np.asarray(found, np.float64) - there[path][step]).max(initial=0.0)
            furthest[path] = max(float(distance), furthest.get(path, 0.0))

    compare(env.reset(seed=facts["seed"], options=start or None)[0], steps["observations"], 0)
    for step, action in enumerate(steps["actions"]):
        compare(env.step(action)[0], steps["next_observations"], step)
    return furthest
