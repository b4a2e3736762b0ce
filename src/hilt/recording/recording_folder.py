"""A recording on the disk, and its episodes played again.

- ``recording.json``: what is recorded here: the task, its options, an arm's
  settings, how observations look, and what is recorded
- ``log/``: the episodes, a log as docs/replay.md has it
- ``videos/``: one mp4 for each (`hilt.recording.film`)
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, HiltError
from hilt.core.files import DISK, leftovers, storage_errors
from hilt.core.tree import ArraySpec, Observation, flatten, unflatten
from hilt.envs.env_protocol import Env, HasSpaces
from hilt.recording.disturbed import disturbed_as_recorded
from hilt.replay import Log, Schema
from hilt.replay.schema import spec_of_space

DEMONSTRATIONS, LABELED = "demonstrations", "labeled frames"
"""The kind of a recording, also in the fact `recorded_as` of its episodes"""
TIMES = ("observed", "sent", "applied")
GRASP = "grasp_penalty"
SHAPING = "shaping_reward"
"""A column of steps: the dense reward that is learned from besides `rewards`, which are those of the task"""
SUMMED = frozenset({"rewards", GRASP, SHAPING})
"""Columns that n-step returns sum: a gripper's critic has its penalty over the same steps as the reward"""
LABELS = "labels"
"""Of frames for a classifier: 1 success, 0 failure"""


FIXED = ("hz", "action_scale", "lead", "compliance", "target_pose", "reward_threshold", "cameras")
"""Of an arm's settings, those that must be the same in all of a recording: what an
action does, what is seen, and what is success"""


def open_recording(
    folder: Path, task: str, options: Mapping[str, object], observations: str, env: Env, labels: bool
) -> Log:
    """The log of a recording, new or to go on with; one of something else is refused, unless nothing is in it."""
    what = LABELED if labels else DEMONSTRATIONS
    metadata = {
        "task": task,
        "options": dict(options),
        "observations": observations,
        "what": what,
        "settings": fixed_settings(env),
    }
    metadata = json.loads(json.dumps(metadata))
    recording_file, path, schema = folder / "recording.json", folder / "log", Schema.declare(columns_of(env, labels))
    if recording_file.exists() and (log := _log_of(path)) is not None:
        try:
            _check_same(folder, {**metadata, **read_json(recording_file)}, metadata)
            (with_penalty(schema) if GRASP in log.schema.columns else schema).grown_from(log.schema)
        except HiltError:
            log.close()
            raise
        return log
    DISK.make_folders(folder)
    with storage_errors(folder):
        if not recording_file.exists() and (others := set(folder.iterdir()) - set(leftovers(folder))):
            raise ConfigError(
                f"{folder} is not a recording: {min(others).name} is in it, and no "
                "recording.json. Choose another --out."
            )
    write_json(recording_file, metadata)
    return Log.create(path, schema)


def fixed_settings(env: Env) -> dict[str, object]:
    """What an environment tells of `FIXED` in its `settings`; of a camera without its deadlines."""
    given = env.get_wrapper_attr("settings") if env.has_wrapper_attr("settings") else {}
    fixed = {key: value for key, value in given.items() if key.rpartition("/")[2] in FIXED}
    for key in [key for key in fixed if key.endswith("cameras")]:
        fixed[key] = {
            name: {k: v for k, v in camera.items() if not k.endswith("_seconds")} for name, camera in fixed[key].items()
        }
    return fixed


def _log_of(path: Path) -> Log | None:
    """To go on with, if there is something in it; an empty one goes."""
    if not (path / "log.json").exists():
        return None
    log = Log.open(path)
    if log.trajectories():
        return log
    log.close()
    with storage_errors(path):
        shutil.rmtree(path)
    return None


def _check_same(folder: Path, found: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    if found == metadata:
        return
    cure = "Choose another folder with --out."
    if changed := [key for key in metadata["settings"] if found["settings"].get(key) != metadata["settings"][key]]:
        key = changed[0]
        values = f"{key} was {found['settings'].get(key)} in {folder} and is {metadata['settings'][key]} now"
        raise ConfigError(f"{values}: both in one log cannot be distinguished. {cure} Or set it back.")
    words = "{what} of {task} with the options {options} and {observations} observations"
    there, asked = (words.format(**it) for it in (found, metadata))
    raise ConfigError(f"{folder} has {there}, and {asked} were to be added. {cure}")


def columns_of(env: HasSpaces, labels: bool = False) -> dict[str, object]:
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


def nested_copy(observation: Observation) -> Any:
    """Returns a copy of an observation, nested as a log has it: an environment may use
    its arrays again for the next observation."""
    return copy.deepcopy(nested(observation))


def nested(observation: Observation) -> Any:
    """Returns an observation with a level for each slash in a key, such as ``left/tcp_pose``, as a log has it."""
    if not isinstance(observation, Mapping):
        return observation
    return unflatten({key: nested(value) for key, value in observation.items()})


def replay_open_loop(log: Log, trajectory: int, env: Env) -> dict[str, float]:
    """Plays the actions of a recorded episode from its initial state: how far each
    observation is from the recorded one, at most.

    `env` is what `hilt.envs.task.make` makes of the episode's facts `task` and
    `options`. Motions that were disturbed are disturbed in the same way. In a deterministic simulator all are 0.
    """
    facts, steps = (
        log.facts.about(trajectory),
        log.read(log.trajectory_keys(trajectory), ["observations", "actions", "next_observations"]),
    )
    env = disturbed_as_recorded(env, facts)
    start: dict[str, Any] = {name: facts[name] for name in ("split", "state") if name in facts}
    furthest: dict[str, float] = {}

    def compare(seen: Observation, recorded: Observation, step: int) -> None:
        there = flatten({"observations": recorded})
        for path, found in flatten({"observations": nested(seen)}).items():
            distance = np.abs(np.asarray(found, np.float64) - there[path][step]).max(initial=0.0)
            furthest[path] = max(float(distance), furthest.get(path, 0.0))

    compare(env.reset(seed=facts["seed"], options=start or None)[0], steps["observations"], 0)
    for step, action in enumerate(steps["actions"]):
        compare(env.step(action)[0], steps["next_observations"], step)
    return furthest
