"""Episodes of logs as a value model sees them: pictures, words and state of every step, and how each episode ended.

    episodes = ValueEpisodes(["runs/pick"])
    train, held_out, by = episodes.split(range(len(episodes)), 0.25, seed=0)
    batch = episodes.batch(episodes.rows(train)[:64], inputs)

Pictures stay in the log until their step is drawn, so a log may be larger than the memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, OutcomesError, SchemaError, UnknownNameError
from hilt.core.progress import Report, silent
from hilt.core.trajectory import INSTRUCTION, STOPPED, Source, texts_of
from hilt.core.tree import Array, ArraySpec, flatten
from hilt.formats import located_log
from hilt.formats.experience import LogDataset
from hilt.formats.images import as_rgb, image_shape, is_image
from hilt.policies.frozen.frozen_config import BASE_POLICY
from hilt.replay.edits import SUCCESS_COLUMNS
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.value.chunk_inputs import ChunkInputs, observed_sizes, rows_of, views_of
from hilt.value.value_config import ValueConfig

OBSERVED, RECORDED = "observations/", "record/images"
"""Where the pictures of an episode lie: by camera, or in the records of a vision-language-action policy all in one"""
MIN_OF_EACH = 3
"""Successes, and failures, of which some can be held out twice"""
NO_PICTURES = (
    "there is no picture among its observations, and a value model looks at them. Give a log with cameras, or "
    "encoder=none for one that looks at the state alone."
)


@dataclass(frozen=True)
class ValuedEpisode:
    """One episode of a log."""

    log: Log
    trajectory: int
    first: int
    """The recorded number of its first step"""
    keys: Array
    """Of its steps in the log"""
    success: bool | None
    """None where the outcome is not known"""
    task: str
    texts: tuple[str, ...]
    """What is to be done, at each step"""
    state: str
    """The initial state it began in; where none is known, the episode itself"""
    human: bool
    """Whether a person acted in a step of it, by taking over or in a demonstration"""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def where(self) -> str:
        return f"{self.log.path}, trajectory {self.trajectory}"


@dataclass(frozen=True)
class ValueInputs:
    """What a model looks at in a log."""

    cameras: dict[str, tuple[int, int]]
    """By name, height and width"""
    state: dict[str, int]
    """Columns of numbers, and how many each has"""
    chunk: ChunkInputs | None = None
    """Of a value of chunks: how it sees them. Cameras and state then have the names that a policy gives them"""

    @classmethod
    def of(cls, log: Log, image_keys: Sequence[str], pictures: bool) -> ValueInputs:
        """All of a log, or the cameras that are named; raises where there is no picture and `pictures` are wanted. What
        a frozen policy computed of the observations is left out: the model would fit no environment without it."""
        specs = log.schema.columns
        cameras = {name: image_shape(spec.shape) or (0, 0) for name, (_, _, spec) in _cameras(specs).items()}
        if pictures and not cameras:
            raise SchemaError(f"{log.path}: {NO_PICTURES}")
        if missing := [name for name in image_keys if name not in cameras]:
            raise UnknownNameError("camera", missing[0], cameras, setting="image_keys")
        chosen = {name: size for name, size in cameras.items() if pictures and (not image_keys or name in image_keys)}
        numbers = {path: spec for path, spec in _numbers(log).items() if BASE_POLICY not in path.split("/")}
        state = {path: int(np.prod(spec.shape)) for path, spec in numbers.items()}
        if not chosen and not state:
            raise SchemaError(f"{log.path}: its observations have neither pictures nor numbers. Give another log.")
        return cls(chosen, state)

    def check(self, log: Log) -> None:
        """Raises where a log lacks one of them, or has it in another size."""
        cameras, numbers = _cameras(log.schema.columns), _numbers(log)
        cure = "Give logs of the same cameras and robot, or choose with image_keys=[...]."
        for name, size in self.cameras.items():
            found = image_shape(cameras[name][2].shape) if name in cameras else None
            if found != size:
                raise SchemaError(
                    f"{log.path}: camera {name} is {found or 'missing'}, expected {size[0]} x {size[1]}. {cure}"
                )
        for path, count in self.state.items():
            found_count = int(np.prod(numbers[path].shape)) if path in numbers else None
            if found_count != count:
                raise SchemaError(f"{log.path}: {path} has {found_count or 'no'} numbers, expected {count}. {cure}")


@dataclass(frozen=True)
class ObservedBatch:
    """What is seen in some steps."""

    images: dict[str, Array]
    """By camera, uint8 [B, H, W, 3]"""
    state: Array
    """float32 [B, P]"""
    texts: list[str]
    actions: Array | None = None
    """The chunks of these steps, float32 [B, actions, action_dim], where they are looked at"""


class ValueEpisodes:
    """The episodes of logs, recordings and runs; of a run with a person its demonstrations too. Those that have not
    ended, and those of which several lie in one trajectory, are passed over and counted."""

    def __init__(self, paths: Sequence[str | Path], report: Report = silent):
        if not paths:
            raise ConfigError("no data: give at least one log, recording or run.")
        self.episodes: list[ValuedEpisode] = []
        self.passed_over: Counter[str] = Counter()
        self._datasets: list[LogDataset] = []
        self._taught: dict[int, Array] = {}
        places = list(dict.fromkeys(place.resolve() for path in paths for place in _logs(path)))
        try:
            for place in places:
                self._read(place, report)
        except BaseException:
            self.close()
            raise
        tasks = {episode.task for episode in self.episodes} - {""}
        if len(tasks) == 1:  # demonstrations from elsewhere may not say what they show
            only = tasks.pop()
            self.episodes = [episode if episode.task else _of_task(episode, only) for episode in self.episodes]
        report("")

    def _read(self, place: Path, report: Report) -> None:
        dataset = LogDataset(place)
        self._datasets.append(dataset)
        columns = dataset.log.schema.columns
        told = [name for name in SUCCESS_COLUMNS if name in columns and columns[name].dtype == bool]
        of_trajectory = Counter(int(keys[0]) >> OFFSET_BITS for keys in dataset.episodes)
        with dataset.log.reading() as steps:
            for number, keys in enumerate(dataset.episodes):
                report(f"reading {place}", number + 1, len(dataset))
                names = ["terminated", "truncated", "source", *told]
                read = dict(zip(names, steps.fields(keys, names), strict=True))
                if of_trajectory[int(keys[0]) >> OFFSET_BITS] > 1:
                    self.passed_over["several in one trajectory"] += 1
                    continue
                facts = dataset.log.facts.about(int(keys[0]) >> OFFSET_BITS)
                if not (read["terminated"][-1] or read["truncated"][-1] or "success" in facts):
                    self.passed_over["not ended"] += 1
                    continue
                self.episodes.append(_episode(dataset.log, keys, facts, read, told))

    @property
    def logs(self) -> list[Log]:
        return [dataset.log for dataset in self._datasets]

    def close(self) -> None:
        for dataset in self._datasets:
            dataset.log.close()

    def __enter__(self) -> ValueEpisodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[ValuedEpisode]:
        return iter(self.episodes)

    def known(self) -> list[int]:
        """The episodes whose outcome is known."""
        return [number for number, episode in enumerate(self.episodes) if episode.success is not None]

    def digest(self) -> str:
        """Changes with the episodes that are learned from."""
        lines = [f"{e.trajectory} {e.first} {len(e)} {e.success} {e.task} {e.state}" for e in self.episodes]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def rows(self, episodes: Sequence[int]) -> Array:
        """All steps of these episodes, int64 [N, 2]: the number of the episode, and of its step."""
        parts = [np.stack([np.full(n := len(self.episodes[e]), e), np.arange(n)], 1) for e in episodes]
        return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)

    def remaining(self, rows: Array) -> Array:
        """T - t of these steps, int64 [N]."""
        lengths = np.array([len(episode) for episode in self.episodes], np.int64)
        return lengths[rows[:, 0]] - rows[:, 1]

    def successes(self, rows: Array) -> Array:
        """Whether their episodes succeeded, bool [N]."""
        return np.array([bool(episode.success) for episode in self.episodes])[rows[:, 0]]

    def split(self, episodes: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int], str]:
        """(the rest, held out, by what): about `share` of the initial states, or where these are too few of the
        episodes, of each task and each kind of outcome. Success and failure are on both sides."""
        for by in ("initial state", "episode"):
            groups: dict[str, list[int]] = defaultdict(list)
            for number in episodes:
                episode = self.episodes[number]
                groups[episode.state if by == "initial state" else episode.where].append(number)
            kinds: dict[tuple[Any, ...], list[str]] = defaultdict(list)
            for name, members in groups.items():
                chosen = [self.episodes[number] for number in members]
                kinds[(chosen[0].task, *sorted({bool(e.success) for e in chosen}))].append(name)
            rng, held = np.random.default_rng(seed), set[str]()
            for kind in sorted(kinds):
                names = kinds[kind]
                count = max(1, round(share * len(names))) if len(names) > 1 else 0
                held |= {names[place] for place in rng.permutation(len(names))[:count]}
            sides = [[n for name in groups if (name in held) == side for n in groups[name]] for side in (False, True)]
            if all({bool(self.episodes[number].success) for number in side} == {True, False} for side in sides):
                return sorted(sides[0]), sorted(sides[1]), by
        raise self.too_few(episodes)

    def too_few(self, episodes: Sequence[int]) -> OutcomesError:
        """The error for episodes that cannot be split."""
        counts = Counter(bool(self.episodes[number].success) for number in episodes)
        return OutcomesError(
            f"too few episodes to hold some out: {counts[True]} successes and {counts[False]} failures. Two parts are "
            f"held out, one to choose the weights by and one for the report, and each needs both: give {MIN_OF_EACH} "
            "of each kind or more, from different initial states."
        )

    def inputs(self, config: ValueConfig) -> ValueInputs:
        """What a model with these settings looks at in all of these episodes."""
        pictures = config.encoder != "none" and not config.policy
        if config.actions:
            found = self._chunk_inputs(config, pictures)
        elif config.policy:
            found = ValueInputs({}, {})  # features are all that it looks at
        else:
            found = ValueInputs.of(self.logs[0], config.image_keys, pictures)
        self.check(found)
        return found

    def check(self, inputs: ValueInputs) -> None:
        """Raises where a log lacks something that is looked at, or has it in another size."""
        if inputs.chunk is None:
            for log in self.logs:
                inputs.check(log)
            return
        for log, task, (cameras, state, action_dim) in self._sizes(inputs.chunk.suite, inputs.chunk.columns):
            there: dict[str, Any] = {name: cameras.get(name) for name in inputs.cameras}
            there |= {name: state.get(name) for name in inputs.state} | {"an action": action_dim}
            expected = {**inputs.cameras, **inputs.state, "an action": inputs.chunk.action_dim}
            for name, size in expected.items():
                if there[name] != size:
                    raise SchemaError(
                        f"{log.path}, task {task!r}: {name} is {there[name] or 'missing'}, expected {size}. Give logs "
                        "of the same cameras and robot, or choose with image_keys=[...]."
                    )

    def _chunk_inputs(self, config: ValueConfig, pictures: bool) -> ValueInputs:
        _, _, (cameras, state, action_dim) = next(self._sizes(config.suite, config.columns))
        if missing := [name for name in config.image_keys if name not in cameras]:
            raise UnknownNameError("camera", missing[0], cameras, setting="image_keys")
        if pictures and not cameras:
            raise SchemaError(f"{self.logs[0].path}: {NO_PICTURES}")
        keep = {
            n: size for n, size in cameras.items() if pictures and (not config.image_keys or n in config.image_keys)
        }
        chunk = ChunkInputs(config.actions, action_dim, config.suite, config.columns)
        return ValueInputs(keep, {} if config.policy else state, chunk)

    def _sizes(self, suite: str, columns: Mapping[str, str]) -> Iterator[tuple[Log, str, Any]]:
        """Yields for each task of each log what a policy sees in its first step."""
        firsts = {(id(episode.log), episode.task): episode for episode in reversed(self.episodes)}
        for episode in reversed(firsts.values()):
            try:
                adapter = views_of(suite, columns, episode.task)
            except UnknownNameError as error:
                raise _unknown_suite(error, episode.log) from None
            yield episode.log, episode.task, observed_sizes(adapter, episode.log, episode.keys[:1])

    def chunks(self, rows: Array, chunk: ChunkInputs) -> Array:
        """The actions from these steps on, as a policy gives them, float32 [B, actions, action_dim]. Each of these
        steps has as many before the end of its episode."""
        for number in np.unique(rows[:, 0]).tolist():
            if number not in self._taught:
                episode = self.episodes[number]
                read = np.asarray(episode.log.read(episode.keys, ["actions"])["actions"], np.float32)
                self._taught[number] = chunk.adapter(episode.task).taught(read).astype(np.float32)
        return np.stack([self._taught[number][step : step + chunk.actions] for number, step in rows.tolist()])

    def batch(self, rows: Array, inputs: ValueInputs) -> ObservedBatch:
        """What is seen in these steps; of a value of chunks, also what is done from there on."""
        if inputs.chunk is not None:
            return self._chunk_batch(rows, inputs, inputs.chunk)
        images = {name: np.empty((len(rows), *size, 3), np.uint8) for name, size in inputs.cameras.items()}
        state = np.zeros((len(rows), sum(inputs.state.values())), np.float32)
        logs = {id(self.episodes[e].log): self.episodes[e].log for e in np.unique(rows[:, 0]).tolist()}
        for name, log in logs.items():
            mine = np.array([place for place, (e, _) in enumerate(rows) if id(self.episodes[e].log) == name])
            keys = np.array([self.episodes[rows[place, 0]].keys[rows[place, 1]] for place in mine], np.int64)
            cameras = _cameras(log.schema.columns)
            columns = [*{cameras[camera][0] for camera in inputs.cameras}, *inputs.state]
            found = flatten(log.read(keys, columns))
            for camera in inputs.cameras:
                path, part, _ = cameras[camera]
                images[camera][mine] = as_rgb(found[path] if part is None else found[path][:, part])
            if inputs.state:
                parts = [found[path].reshape(len(keys), -1).astype(np.float32) for path in inputs.state]
                state[mine] = np.concatenate(parts, 1)
        return ObservedBatch(images, state, [self.episodes[e].texts[t] for e, t in rows.tolist()])

    def _chunk_batch(self, rows: Array, inputs: ValueInputs, chunk: ChunkInputs) -> ObservedBatch:
        """The same by a policy's names."""
        seen: list[dict[str, Any]] = [{}] * len(rows)
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for place, number in enumerate(rows[:, 0].tolist()):
            groups[(id(self.episodes[number].log), self.episodes[number].task)].append(place)
        for places in groups.values() if inputs.cameras or inputs.state else []:
            first = self.episodes[rows[places[0], 0]]
            keys = np.array([self.episodes[rows[place, 0]].keys[rows[place, 1]] for place in places], np.int64)
            views = chunk.adapter(first.task).views(first.log.read(keys, ["observations"])["observations"])
            for at, place in enumerate(places):
                seen[place] = {name: column[at] for name, column in views.items()}
        images, state = rows_of(seen, inputs.cameras, sum(inputs.state.values()))
        texts = [self.episodes[e].texts[t] for e, t in rows.tolist()]
        return ObservedBatch(images, state, texts, self.chunks(rows, chunk))


class TrajectoryEpisodes(ValueEpisodes):
    """Trajectories of a log that is open, each an episode whose outcome is a fact, and its task, unless it is `task`.
    Closing it leaves the log open."""

    def __init__(self, log: Log, trajectories: Sequence[int], task: str = ""):
        self.episodes, self.passed_over, self._datasets, self._taught = [], Counter(), [], {}
        self._log = log
        for number in trajectories:
            keys = log.trajectory_keys(number)
            read = {"source": log.read(keys, ["source"])["source"]}
            facts = log.facts.about(number)
            facts |= {"task": task} if task and not facts.get("task") else {}
            self.episodes.append(_episode(log, keys, facts, read, []))

    @property
    def logs(self) -> list[Log]:
        return [self._log]


def _of_task(episode: ValuedEpisode, task: str) -> ValuedEpisode:
    return replace(episode, task=task, texts=tuple(text or task for text in episode.texts))


def _logs(path: str | Path) -> list[Path]:
    """The log of a folder, and of a run with a person the one of its demonstrations; of post-training those of all
    ranks."""
    if ranks := [log.parent for log in sorted(Path(path).glob("rollouts/rank-*/log.json"))]:
        return ranks
    place = located_log(path)
    demos = place.parent / "demos"
    return [place, demos] if place != Path(path) and (demos / "log.json").is_file() else [place]


def _cameras(specs: Mapping[str, ArraySpec]) -> dict[str, tuple[str, int | None, ArraySpec]]:
    """Cameras by name: their column, their place in it where it has all of them, and what one picture is."""
    found: dict[str, tuple[str, int | None, ArraySpec]] = {}
    for path, spec in specs.items():
        if path.startswith(OBSERVED) and is_image(spec):
            found[path.removeprefix(OBSERVED)] = (path, None, spec)
        elif path == RECORDED and spec.dtype == np.uint8 and len(spec.shape) == 4:
            one = ArraySpec(spec.dtype, spec.shape[1:])
            found |= {f"{path}/{place}": (path, place, one) for place in range(spec.shape[0])}
    return found


def _unknown_suite(error: UnknownNameError, log: Log) -> ConfigError:
    """The error for a log whose observations have no known names for a policy, with columns that name them."""
    cameras = [name for name, (_, part, _) in _cameras(log.schema.columns).items() if part is None]
    names = dict(zip(("full_image", "wrist_image"), cameras, strict=False))
    numbers = [path.removeprefix(OBSERVED) for path in _numbers(log) if BASE_POLICY not in path.split("/")]
    names |= {"state": " + ".join(numbers)} if numbers else {}
    given = ", ".join(f"{name}: {path}" for name, path in names.items())
    return ConfigError(
        f"{log.path}: {error} Give suite=NAME, or the names by which a policy sees its observations, such as "
        f"'columns={{{given}}}'."
    )


def _numbers(log: Log) -> dict[str, ArraySpec]:
    """Columns of an observation that are numbers, in order."""
    return {
        path: spec
        for path, spec in sorted(log.schema.columns.items())
        if (path.startswith(OBSERVED) or path == "record/state")
        and spec.dtype.kind == "f"
        and path in log.schema.layout.inline
    }


def _episode(log: Log, keys: Array, facts: Mapping[str, Any], read: Mapping[str, Array], told: list[str]) -> Any:
    trajectory, first = int(keys[0]) >> OFFSET_BITS, int(keys[0] & ((1 << OFFSET_BITS) - 1))
    success = facts.get("success")
    if STOPPED in facts and "success" not in log.facts.edits.about(trajectory, {}):
        success = None  # it counts as a failure where it was learned from, and nobody knows how it would have ended
    elif success is None and told:
        success = any(bool(read[name].any()) for name in told)
    task = str(facts.get("task") or "")
    texts = texts_of(facts.get(INSTRUCTION, ""), first + len(keys))[first:]
    if not task:
        task = texts[0]
    where = f"{log.path} {trajectory}"
    state = f"{task} {facts.get('split')} {facts['state']}" if "state" in facts else where
    human = bool(np.isin(read["source"], [Source.HUMAN, Source.DEMO]).any())
    known = None if success is None else bool(success)
    return ValuedEpisode(log, trajectory, first, keys, known, task, tuple(t or task for t in texts), state, human)
