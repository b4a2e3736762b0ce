"""What a run begins with: demonstrations in any format, and the buffers of a
HIL-SERL folder, checked and imported into its logs."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, Problems, SchemaError, StorageError
from hilt.core.hub import local
from hilt.core.progress import paced
from hilt.core.trajectory import INSTRUCTION, STOPPED, texts_of
from hilt.core.tree import Array, ArraySpec, flatten, unflatten
from hilt.envs.env_protocol import TASK_SUCCESS, HasSpaces
from hilt.formats import open_dataset
from hilt.formats.convert import EpisodeChange, decode
from hilt.formats.episodes import Dataset, Episode, map_leaves, plain
from hilt.hil.config import CHUNK, CHUNK_INDEX, DECIDED, GROUP, MEMBER, MIXED, RECORD, TASK_COLUMN, Hil
from hilt.hil.environment import open_value
from hilt.hil.make_agent import instructions_of
from hilt.policies.agent.config import FROZEN_VLA
from hilt.policies.frozen.frozen_config import NOISE, NOISE_ACTIONS, STEP_NOISE, base_hash, check_same_weights
from hilt.recording.recording_folder import GRASP, SHAPING, columns_of
from hilt.replay import Log, Schema
from hilt.replay.schema import BUILT_IN

BaseFill = Callable[[Episode, str], Episode]
"""Adds the columns of a frozen policy to an episode of this path: `hilt.hil.frozen.base_observations.BaseColumns`"""
FILLED = {
    **{"times": 0.0, "succeed": False, "lost": False, TASK_SUCCESS: -1, SHAPING: 0.0, STOPPED: -1.0},
    **{CHUNK: -1, CHUNK_INDEX: -1, RECORD: 0, DECIDED: -1, GROUP: -1, MEMBER: -1, STEP_NOISE: 0},
}
"""What demonstrations may leave out, and have then"""


def columns_for(config: Hil, env: HasSpaces) -> dict[str, object]:
    """The columns of a run's logs. `env` is anything that has an observation_space and an action_space."""
    flag = ArraySpec(np.dtype(bool))
    penalty = {GRASP: ArraySpec(np.dtype(np.float32))} if "learned" in config.agent.setup_mode else {}
    # 1 or 0; -1: the task does not say
    truth = {TASK_SUCCESS: ArraySpec(np.dtype(np.int8), default=-1)} if config.classifier else {}
    chunks: dict[str, ArraySpec] = {}
    if config.agent.kind == "vla" or config.agent.chunk > 1:
        chunks = {
            CHUNK: ArraySpec(np.dtype(np.int32), default=-1),
            CHUNK_INDEX: ArraySpec(np.dtype(np.int16), default=-1),
        }
    if config.algorithm == MIXED:
        chunks |= {
            GROUP: ArraySpec(np.dtype(np.int64), default=-1),
            MEMBER: ArraySpec(np.dtype(np.int16), default=-1),
        }
    dense = {SHAPING: ArraySpec(np.dtype(np.float32), default=0.0)} if config.value.reward else {}
    # the probability of success with which a value model ended the episode; -1: it did not
    given_up = {STOPPED: ArraySpec(np.dtype(np.float32), default=-1.0)} if config.value.stop_below else {}
    several = {TASK_COLUMN: ArraySpec(np.dtype(np.int16))} if len(instructions_of(env)) > 1 else {}
    more = {**penalty, **truth, **dense, **given_up, **chunks, **several}
    return {**columns_of(env), "succeed": flag, "lost": flag, **more}


SHAPED = "shaped_by"
"""The fact of episodes of an older version, whose `rewards` themselves have a dense part: the value model that it is
from. Now it is a column of its own"""


def check_imports(config: Hil, env: HasSpaces) -> None:
    """Refuses what cannot be imported, all of it at once: paths that are not there, and demonstrations whose first
    episode is of another task than `env`, which is anything that has an observation_space and an action_space."""
    problems, schema = Problems(), Schema.declare(columns_for(config, env))
    for path in config.demo_path:
        with problems.collected():
            for each in expanded([path]):
                problems.check(_check_dataset, each, schema, instructions_of(env), config.demo_where)
    if config.checkpoint_path:
        problems.check(check_buffers, config.checkpoint_path)
    problems.report()


def _check_dataset(path: str, schema: Schema, instructions: Sequence[str], where: str) -> None:
    if not local(path).exists():
        raise StorageError(f"demo_path has {path}, and there is no such file or folder. Check the path.")
    if (episode := _first(path, where)) is not None:
        _fitted(schema, episode, path, instructions)
        return
    raise ConfigError(f"demo_path has {path}, and there is no episode in it. Record some with: hilt record")


def _opened(path: str, where: str) -> Dataset:
    """A dataset, and of a log with a filter the episodes that it chooses."""
    return open_dataset(path, **({"where": where} if where else {}))


def _first(path: str, where: str) -> Episode | None:
    return next(
        (
            episode
            for done in decode(_opened(path, where), 0, EpisodeChange())
            if (episode := done.result()[0]) is not None
        ),
        None,
    )


def other_tasks(config: Hil) -> list[str]:
    """A sentence for each path whose demonstrations were recorded of another task than
    the run's, though they have the same columns.

    Only names of one suite or module can be compared: neither the address of an arm
    nor a config of HIL-SERL names its task.
    """
    lines, suite = [], _suite(config.task)
    for path in expanded(config.demo_path):
        task = getattr(_first(path, config.demo_where), "facts", {}).get("task")
        known = (config.task, *config.task.split("+"))
        if isinstance(task, str) and task not in known and _suite(task) == suite != "robot":
            lines.append(
                f"WARNING: demonstrations in {path} were recorded of {task}, and this run learns "
                f"{config.task}; check demo_path."
            )
    return lines


def other_rates(config: Hil, env: HasSpaces) -> list[str]:
    """A sentence for each path whose demonstrations were recorded at another rate than the task has here. `env` is
    anything that has an observation_space and an action_space, and may have control_hz."""
    lines, hz = [], float(getattr(env, "control_hz", 0) or config.control_hz)
    for path in expanded(config.demo_path):
        recorded = getattr(_first(path, config.demo_where), "facts", {}).get("fps")
        if hz and isinstance(recorded, int | float) and abs(recorded - hz) > 0.01 * hz:
            lines.append(
                f"WARNING: demonstrations in {path} were recorded at {recorded:g} steps a second, and {config.task} "
                f"has {hz:g} here, so that their actions are other motions; give task_options.control_hz={recorded:g} "
                "in simulation, or record at this rate."
            )
    return lines


def _suite(task: str) -> str:
    return re.split("[/:]", task, maxsplit=1)[0]


def check_buffers(path: str) -> None:
    if not any(Path(path, name).is_dir() for name in ("buffer", "demo_buffer")):
        raise ConfigError(
            f"checkpoint_path={path}: expected a folder of HIL-SERL's with buffer/ or "
            "demo_buffer/ in it. Check the path."
        )


def expanded(paths: Sequence[str]) -> list[str]:
    """All files, each once, however often and in whatever way it is named."""
    out: dict[Path, str] = {}
    for path in paths:
        found = sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]
        if not found:
            raise StorageError(f"demo_path has {path}, and there is no such file. Check the pattern.")
        for each in found:
            out.setdefault(local(each).resolve(), each)
    return list(out.values())


class RewardShape:
    """Gives imported episodes the dense reward of the run's value model, which the steps of its actors have."""

    def __init__(self, config: Hil):
        self._value = open_value(config)
        self._discount, self._weight = config.agent.rlpd.discount, config.value.reward

    def __call__(self, columns: Mapping[str, Array], episode: Episode, path: str) -> Array:
        """The dense rewards of an episode, from its columns by path."""
        from hilt.value.online_value import shaping_rewards  # needs torch

        if SHAPED in episode.facts:
            raise ConfigError(
                f"{path}: an older version of Hilt has added the dense reward of {episode.facts[SHAPED]} to its "
                "rewards, and value.reward would add it again. Give demonstrations with the rewards of their task."
            )
        texts = texts_of(episode.facts.get(INSTRUCTION, ""), len(episode))
        return shaping_rewards(columns, self._value, texts, self._discount, self._weight)


def additions(config: Hil, instructions: Sequence[str] = ()) -> tuple[RewardShape | None, BaseFill | None]:
    """What episodes that are imported into the logs of a run are given: a dense reward, and the columns of a frozen
    policy."""
    shape = RewardShape(config) if config.value.reward else None
    if config.agent.kind != FROZEN_VLA:
        return shape, None
    from hilt.hil.frozen.base_observations import BaseColumns, open_base  # needs torch

    return shape, BaseColumns(open_base(config), instructions)


def import_dataset(
    log: Log,
    path: str,
    notify: Callable[[str], None],
    instructions: Sequence[str] = (),
    shape: RewardShape | None = None,
    base: BaseFill | None = None,
    where: str = "",
) -> int:
    """All episodes of a dataset in any format, or of a recording of `hilt record`; of a log those that a filter
    chooses (`where`). `instructions`: those of the tasks of a mix, by which an episode is one of them. `base` adds the
    columns of a frozen policy."""
    dataset = _opened(path, where)
    report, count = paced(notify), 0
    for number, done in enumerate(decode(dataset, 0, EpisodeChange())):
        report(f"importing {path}, episodes", number, len(dataset))
        count += _add(log, done.result()[0], path, instructions, shape, base)
    for note, times in dataset.notes.counts.items():
        notify(f"{path}: {note}" + (f" ({times} times)" if times > 1 else ""))
    return count


def import_buffer(
    log: Log,
    path: str,
    kind: str,
    notify: Callable[[str], None],
    shape: RewardShape | None = None,
    base: BaseFill | None = None,
) -> dict[str, int]:
    """One of the two buffers of a HIL-SERL folder. An intervention that is in both
    is online data that a person made."""
    if not path:
        return {}
    check_buffers(path)
    dataset: Any = open_dataset(Path(path), "hil-serl")
    report, count = paced(notify), 0
    for number, done in enumerate(decode(dataset, 0, EpisodeChange())):
        report(f"importing {path}, {kind} episodes", number, len(dataset))
        if dataset.kind_of(number) == kind:
            count += _add(log, done.result()[0], path, shape=shape, base=base)
    return {f"{path}, {'buffer' if kind == 'online' else 'demo_buffer'}": count}


def _add(
    log: Log,
    episode: Episode | None,
    path: str,
    instructions: Sequence[str] = (),
    shape: RewardShape | None = None,
    base: BaseFill | None = None,
) -> int:
    if episode is None:
        return 0
    episode = episode if base is None else base(episode, path)
    columns = _fitted(log.schema, episode, path, instructions)
    facts = {**plain(episode.facts), "imported": path}
    if shape is not None:
        columns[SHAPING] = shape(columns, episode, path)
    whole = map_leaves(lambda column: column[:, None], unflatten(columns))
    log.add(whole, actor="import", facts=facts)
    return len(episode)


def _fitted(schema: Schema, episode: Episode, path: str, instructions: Sequence[str] = ()) -> dict[str, Array]:
    """The columns of a run's log, from an episode of another source; one of another task is refused."""
    given, columns = flatten(episode.columns), {}
    if wanted := base_hash(schema.columns):
        check_same_weights(base_hash(given), wanted, path)
    anew = _drawn_anew(given, schema)
    for name, spec in schema.columns.items():
        if name in given and name not in anew:
            columns[name] = _cast(name, np.asarray(given[name]), spec, path)
        elif name.partition("/")[0] in FILLED:
            columns[name] = np.full((len(episode), *spec.shape), FILLED[name.partition("/")[0]], spec.dtype)
            if name == "succeed":
                columns[name][-1] = bool(episode.facts.get("success"))
        elif name == TASK_COLUMN:
            columns[name] = np.full(len(episode), _task_number(episode, path, instructions), spec.dtype)
        elif name not in BUILT_IN and not base_hash([name]):  # what a frozen policy computes is added
            has = ", ".join(sorted(given))
            nested = (
                any(key.startswith("observations/images/") for key in given)
                and name == f"observations/{name.rpartition('/')[2]}"
            )
            cure = (
                "Record it with `hilt record TASK --observations hil-serl`"
                if nested
                else "Give demonstrations of the same task"
            )
            raise SchemaError(f"{path} has no {name}, which this run's task has; it has {has}. {cure}.")
    return columns


def _drawn_anew(given: Mapping[str, Array], schema: Schema) -> set[str]:
    """The columns with noise of a frozen policy that are of other settings than the run's: draws in another number,
    which the run decodes once more, and noise of an actor in another width, which is not known here."""
    start, known = f"{STEP_NOISE}/start", f"{STEP_NOISE}/known"
    drawn = {
        name
        for name, spec in schema.columns.items()
        if (name == start or (base_hash([name]) and name.rpartition("/")[2] in (NOISE, NOISE_ACTIONS)))
        and np.shape(given.get(name, ()))[1:] != spec.shape
    }
    return drawn | {known} if start in drawn else drawn


def _task_number(episode: Episode, path: str, instructions: Sequence[str]) -> int:
    """The number of the task of a mix that an episode is of, by its instruction."""
    given = episode.facts.get(INSTRUCTION)
    if given not in instructions:
        known = ", ".join(map(repr, instructions))
        raise SchemaError(
            f"{path}: an episode has the instruction {given!r}, and the tasks of this run have {known}. Give "
            "demonstrations of these tasks."
        )
    return instructions.index(given)


def _cast(name: str, column: Array, spec: ArraySpec, path: str) -> Array:
    fits = column.dtype.kind == spec.dtype.kind or (spec.dtype.kind == "f" and column.dtype.kind in "iu")
    if column.shape[1:] != spec.shape or not fits:
        got = f"{column.dtype} {column.shape[1:]}"
        cure = "Convert it first (hilt data convert has --image-size), or give demonstrations of the same task."
        raise SchemaError(f"{path}: {name} is {got}, and this run's task has {spec.dtype} {spec.shape}. {cure}")
    return np.ascontiguousarray(column, spec.dtype)
