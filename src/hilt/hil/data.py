"""The data that a learner trains on: two logs in the run's folder, the views of
them, and batches that are half and half.

- ``log/``: all that actors send, up to `replay_buffer_capacity` steps. All of it is
  *online*; what a person did in it is *human* too
- ``demos/``: demonstrations, imported once from `demo_path`, whatever format they are in

    demo = demos + human, each step as likely as any other          batch = half online, half demo, by exact count,
                                                                    online first

They are drawn by a `Mix` of a `Sampler` and a `JointSampler` of `hilt.replay`; those with images ahead, in a thread
(`Experience.next_batch`).

Each log is made beside its name and renamed, so an import is there as a whole or not at all, and is made once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, EmptyError, UnknownNameError
from hilt.core.files import replacing
from hilt.core.trajectory import INSTRUCTION, STOPPED
from hilt.core.tree import Array, flatten, unflatten
from hilt.envs.env_protocol import HasSpaces
from hilt.hil.config import GROUP, MEMBER, MIXED, RECAP, STORE, TASK_COLUMN, Hil, imitation, of_run
from hilt.hil.importing import additions, columns_for, expanded, import_buffer, import_dataset
from hilt.hil.make_agent import instructions_of
from hilt.hil.states import KeptSteps, StateTable
from hilt.hil.stream.ended_episodes import EndedEpisodes
from hilt.hil.stream.labelled import Labelled
from hilt.policies.frozen.frozen_config import base_hash, check_same_weights
from hilt.recording.recording_folder import GRASP, SHAPING, SUMMED
from hilt.replay import Log, Schema
from hilt.replay import tensors as bridge
from hilt.replay.key_ranges import Runs
from hilt.replay.sampling import Assembly, Chunks, JointSampler, Mix, NStep, Prefetch, Sampler
from hilt.replay.sampling.returns import ReturnsToGo
from hilt.replay.view import View
from hilt.runs.checkpoint import generator_state, set_generator_state

if TYPE_CHECKING:
    from hilt.policies.agent.step_agent import StepAgent
    from hilt.wire import TrainerServer

DURABILITY = "at most 1000 ms"
"""Durability of the log: a thread of its own syncs it, so that neither learning nor receiving waits for the disk"""
AHEAD = 1
"""Batches that are ready before they are asked for; one more is in the making"""
TREES = ("observations", "next_observations")
IN_RUN = "RUN/"
"""How the path of what is in the run's own folder begins"""
IMITATED = ("demo", "filtered", RECAP)
"""The parts of the data that hg-dagger, filtered and recap imitate"""
Batch = dict[str, Any]
logger = logging.getLogger("hilt.hil")


class Experience:
    """The two logs and the batches drawn from them. `agent` determines the observations, and
    computes the features of a frozen encoder."""

    def __init__(self, run: Path, config: Hil, env: HasSpaces, agent: Any, notify: Callable[[str], None] = logger.info):
        schema = Schema.declare({**columns_for(config, env), **agent.step_columns()})
        self._config, self._agent, self._notify = config, agent, notify
        self._facts, self._tasks = _facts_of(config, env), config.task.split("+")
        self._instructions: Sequence[str] = instructions_of(env)
        self._imitation = imitation(config)
        self.group_instructions: Sequence[str] = self._instructions
        self.demos, self.log = open_logs(run, config, schema, notify, instructions_of(env))
        self.online, self.human = (
            self.log.all(),
            self.log.by_source("human") - self.log.where("lost", lambda lost: lost),
        )
        self._demonstrations, self._collected = self.demos.all(), self.online.only(())
        self._successes = self.log.successes() - self.human if self._imitation == "filtered" else self._collected
        self.groups: View | None = None
        """With algorithm=mixed: the steps of groups of simulated episodes, which count for nothing else"""
        if config.algorithm == MIXED:
            self.groups = self.log.where(GROUP, lambda group: group >= 0)
            self.online, self.human = self.online - self.groups, self.human - self.groups
            self._successes = self._successes - self.groups
        self.stream: Any = None
        """With algorithm=recap: what values the episodes, and labels their steps"""
        if self._imitation == RECAP:
            from hilt.hil.stream.advantage_stream import AdvantageStream  # needs the value model

            self.stream = AdvantageStream(config, {"log": self.log, "demos": self.demos}, notify)
            self._demonstrations = self.stream.shown
        self._watched = _watched(config, self.log, notify) if self.stream is None else None
        self._draws = {"online": bridge.generator(config.seed), "demo": bridge.generator(config.seed + 1)}
        self._draws |= {
            name: bridge.generator(config.seed + 2 + n) for n, name in enumerate(sorted(config.view_shares))
        }
        self._sources: dict[tuple[str, bool], Mix | JointSampler] = {}
        self._ahead: tuple[tuple[int, str, bool], Prefetch] | None = None
        trees = TREES[:1] if agent.horizon else TREES  # who imitates does not look at what came after
        images = [f"{which}/{path}" for which in trees for path in agent.image_paths]
        proprio = [f"{which}/{path}" for which in trees for path in agent.proprio]
        more = [name for name in (GRASP, SHAPING, TASK_COLUMN) if name in schema.columns]
        plain = ["actions", "rewards", "terminated", "source", *more, *agent.batch_columns]
        self._columns = [*images, *proprio, *plain]
        self._discount = config.agent.rlpd.discount
        self._whole = ("actions", "source") if config.agent.chunk > 1 else ()
        steps, summed = max(config.n_step, config.agent.chunk), tuple(path for path in more if path in SUMMED)
        self._returns = NStep(steps, self._discount, also=summed, whole=self._whole)
        seen, views = [*agent.image_paths, *agent.proprio], {"log": self.online, "demos": self._demonstrations}
        self._table: StateTable | None = None
        self._kept: dict[str, KeptSteps] = {}
        if agent.frozen:
            self._table = table = StateTable(agent.width, {path: schema.columns[path] for path in plain}, agent.shifts)
            kept = partial(KeptSteps, table=table, seen=seen, states=agent.states, n=steps, notify=notify)
            self._kept = {name: kept(view) for name, view in views.items()}
        self._foresight = {name: Foresight(config.agent.encoder.pretrain_predict) for name in ("log", "demos")}
        self._foresight["demos"].read(self.demos, self.demos.trajectories(hidden=True))
        self._before = len(self.online)  # online steps that were there, or were there once, when this process began
        self._appended = self._arrived()
        self._episodes = EndedEpisodes(self.log, config.agent.rlpd)
        self._alone = False

    # What there is

    def register(self, server: TrainerServer, run: str) -> None:
        """Actors send to this log from now on; those of `hilt actor` by the name that only this run's learner has."""
        for name in {STORE, of_run(run)}:
            server.register_data_store(name, self.log)

    def take(self) -> None:
        """Does nothing: steps that arrive are in the log already."""

    @property
    def total(self) -> int:
        """Online steps of the run so far, those that are gone included."""
        return self._before + self._arrived() - self._appended

    def _arrived(self) -> int:
        """Online steps that were appended to the log since it was opened, without those of groups."""
        selection = None if self.groups is None else self.groups.selection
        with self.log.lock:
            return self.log.appended - (0 if selection is None else selection.entered)

    def counts(self) -> dict[str, int]:
        return {
            "log_steps": len(self.online),
            "demo_steps": len(self._demonstrations) + len(self.human),
            "human_steps": len(self.human),
            **({"success_steps": len(self._successes)} if self._imitation == "filtered" else {}),
            **({"group_steps": len(self.groups)} if self.groups is not None else {}),
            **({} if self.stream is None else self.stream.counts()),
        }

    def newest_versions(self, trajectories: int) -> list[int]:
        """The versions of the weights that made the last steps of the newest trajectories."""
        with self.log.lock:
            last = [self.log.trajectory_keys(number)[-1] for number in self.log.trajectories()[-trajectories:]]
            return self.log.read(last, ["policy_version"])["policy_version"].tolist() if last else []

    def finished(self) -> Iterator[dict[str, Any]]:
        """Returns the figures of each trajectory that has ended and was not reported before."""
        return self._episodes.finished()

    def note_outcome(self, trajectory: int, success: bool | None) -> None:
        """Keeps the task of an episode, its instruction and rate, and its success, if that is known, as facts of the
        log: lists, filters and conversions of episodes show them. With algorithm=recap or value.model it is valued."""
        with contextlib.suppress(UnknownNameError):  # evicted meanwhile
            facts, first = dict(self._facts), self.log.trajectory_keys(trajectory)[:1]
            tasks, words = self._tasks, self._instructions
            if self.groups is not None and len(first) and self.groups.runs().contains(first)[0]:
                read = self.log.read(first, [GROUP, MEMBER])
                facts |= {name: int(read[name][0]) for name in (GROUP, MEMBER)}
                tasks, words = (self._config.mixed.task or self._config.task).split("+"), self.group_instructions
                facts |= {"task": tasks[0], **({INSTRUCTION: words[0]} if words else {})}
            if len(tasks) > 1:
                number = int(self.log.read(first, [TASK_COLUMN])[TASK_COLUMN][0])
                facts |= {"task": tasks[number], INSTRUCTION: words[number]}
            if STOPPED in self.log.schema.columns and len(last := self.log.trajectory_keys(trajectory)[-1:]):
                chance = float(self.log.read(last, [STOPPED])[STOPPED][0])
                facts |= {STOPPED: chance} if chance >= 0 else {}
            self.log.annotate(trajectory, **facts, **({} if success is None else {"success": success}))
            if (values := self.stream or self._watched) is not None:
                values.value(trajectory)

    def note_rewind(self, actor: str, at: int, to: int) -> None:
        """An actor's step of this number is the last one before a person went back to step `to` of the episode."""
        self._episodes.rewinds[actor, at] = to

    def reported(self, trajectories: Sequence[int]) -> None:
        """Marks trajectories that an earlier process has reported."""
        self._episodes.known.update(trajectories)

    def demonstrated(self) -> dict[str, object]:
        """The proprioception of all demonstrations."""
        return demonstrated(self.demos, self._agent)

    def ended_episodes(self, without: set[int]) -> dict[int, dict[str, Array]]:
        """The columns of every trajectory that has ended and is not among these, by its number."""
        with self.log.reading() as steps:
            ended = [number for number in steps.ended_trajectories() if number not in without]
        return {number: flatten(self.log.read(self.log.trajectory_keys(number))) for number in ended}

    def successful(self) -> list[int]:
        """The trajectories that have ended with success."""
        with self.log.reading() as steps:
            ended = steps.ended_trajectories()
            return [number for number in ended if steps.gather(steps.trajectory(number), ["succeed"])["succeed"].any()]

    def collect(self, trajectories: Sequence[int]) -> int:
        """Batches of the part ``"collected"`` are from these of the log and from
        demonstrations. How many steps they have in the log."""
        self._put_back()
        self._collected = self.online.only(trajectories)
        self._sources = {asked: source for asked, source in self._sources.items() if asked[0] != "collected"}
        self._foresight["log"].read(self.log, self._collected.trajectories())
        return len(self._collected)

    # Batches

    def next_batch(self, batch_size: int, part: str = "both", images: bool = False) -> Batch:
        """Does what `sample` does; where images are read, ahead: a thread makes the next batches of this
        kind meanwhile, from what the log has then. Batches of numbers are made when they are asked for:
        made ahead they gave fewer updates per second."""
        asked = (batch_size, part, images)
        if self._ahead is None or self._ahead[0] != asked:
            self._put_back()
            if not images and (self._kept or not self._agent.image_paths):
                return self.sample(*asked)
            self._ahead = asked, Prefetch(lambda: self.sample(*asked), AHEAD, source=self)
        try:
            return next(self._ahead[1])
        except BaseException:
            self._put_back()
            raise

    def sample(self, batch_size: int, part: str = "both", images: bool = False) -> Batch:
        """Half online and half demo; or only ``"demo"``; or these and the episodes that succeeded, ``"filtered"``; or
        only ``"demonstrations"``; or these and what was ``"collected"``, where ``imitated`` tells what a person did; or
        all that has values, ``"recap"``, where ``good`` tells what is to be repeated.
        With a frozen encoder there is ``z`` instead of observations, unless `images` are asked for: an encoder is to be
        trained, and what it is to foresee is there as ``future``."""
        if (part, images) not in self._sources:
            self._sources[part, images] = self._source(part, images)
        source = self._sources[part, images]
        if part == "both" and not len(self.online):
            raise EmptyError("there is no online step to draw yet; wait until there is one.")
        if part != "both" and not self._steps_in(source):
            what = "demonstrations" if part == "demonstrations" else "demonstrations or take-overs"
            raise EmptyError(f"there are no {what} to learn from: give some with demo_path.")
        batch = source.sample(batch_size, keys=self._columns if images or not self._kept else None)
        online = batch.counts.get("online", 0)
        if online == batch_size and not self._alone:
            self._notify("there are no demonstrations and no take-overs yet: batches are all online")
            self._alone = True
        if self._table is not None and not images:
            draw = partial(bridge.randint, self._draws["online"])
            batch.update(unflatten(self._table.batch(batch.pop("window"), self._discount, self._whole, draw)))
        return finish(batch, online)

    def _source(self, part: str, images: bool) -> Mix | JointSampler:
        """Demonstrations and what a person did are drawn from as if they were one, each step as likely as any other;
        in imitation with `view_shares`, in these shares."""
        parts: dict[str, dict[str, View]] = {
            "demonstrations": {},
            "collected": {"collected": self._collected},
            "filtered": {"human": self.human, "successes": self._successes},
        }
        more = parts.get(part, {"human": self.human})
        accepted = self.human | self._successes if part == "filtered" else self.human

        def sampler(log: str, view: View, seed: object = None) -> Sampler:
            within = accepted if log == "log" and part in IMITATED else None
            return Sampler(view, assembly=self._assembly(log, part, images, within), seed=seed)

        shares = self._config.view_shares if part in IMITATED else {}
        seeds = {name: self._draws[name] for name in shares}
        views = (
            self.stream.samplers(self.human, self._agent.horizon, seeds)
            if part == RECAP
            else {
                "demonstrations": sampler("demos", self._demonstrations, seeds.get("demonstrations")),
                **{name: sampler("log", view, seeds.get(name)) for name, view in more.items()},
            }
        )
        if shares:
            return Mix({name: views[name] for name in shares}, shares, empty="share")
        demo, share = JointSampler(views, self._draws["demo"]), self._config.demo_share
        ratios = {"online": 1 - share, "demo": share}
        return (
            Mix({"online": sampler("log", self.online, self._draws["online"]), "demo": demo}, ratios, empty="share")
            if part == "both"
            else demo
        )

    @staticmethod
    def _steps_in(source: Mix | JointSampler) -> int:
        sources = source.sources.values() if isinstance(source, Mix) else [source]
        return sum(len(each) for each in sources)

    def _assembly(self, log: str, part: str, images: bool, within: View | None = None) -> Assembly:
        """What a batch of this part has of a step of this log, ``"log"`` or ``"demos"``. `within`: the steps whose
        actions are imitated; None: all."""
        if self._agent.horizon:
            return Chunks(self._agent.horizon, within)
        more: dict[str, Callable[[Array], Array]] = {}
        if images and self._foresight[log].path and part in ("demonstrations", "collected"):
            more["future"] = self._foresight[log].of
        if part == "collected":
            more["imitated"] = (
                (lambda keys: self.human.runs().contains(keys))
                if log == "log"
                else (lambda keys: np.ones(len(keys), bool))
            )
        own: Assembly = self._kept[log] if self._kept and not images else self._returns
        rlpd = self._config.agent.rlpd
        if rlpd.conservative and rlpd.calibrated and part not in IMITATED:
            dense = tuple(path for path in self._columns if path == SHAPING)
            own = ReturnsToGo(own, self.demos if log == "demos" else self.log, rlpd.discount, rlpd.reward_bias, dense)
        return Labelled(own, more) if more else own

    @property
    def torch_seconds(self) -> float:
        """Spent in a frozen encoder so far: it is torch's time, not the time of waiting for data."""
        return sum(kept.seconds for kept in self._kept.values())

    # Going on

    def position(self) -> dict[str, str]:
        """Returns the state of the random generators that batches are drawn with."""
        return {name: generator_state(each) for name, each in self._draws.items()}

    def seek(self, position: Mapping[str, str]) -> None:
        for name, each in self._draws.items():
            set_generator_state(each, position[name])

    def state(self, position: Mapping[str, str] | None = None) -> dict[str, object]:
        """All that decides the next batches besides the logs, and what the online view
        had; batches made ahead do not count."""
        if position is None and self._ahead is not None:
            return self._ahead[1].state()
        with self.log.lock:
            runs = self.online.runs()
            seen = {"starts": runs.starts.tolist(), "counts": runs.counts.tolist()}
            return {"total": self.total, "seen": seen, "draws": dict(position or self.position())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where that was. Steps that came later are in the log, and are counted."""
        self._put_back()
        with self.log.lock:
            seen = Runs(state["seen"]["starts"], state["seen"]["counts"])
            self._before = state["total"] + len(self.online.runs() - seen)
            self._appended = self._arrived()
        self.seek(state["draws"])

    def close(self) -> None:
        self._put_back()
        self.log.close()
        self.demos.close()

    def _put_back(self) -> None:
        """What was made ahead."""
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None


def _watched(config: Hil, log: Log, notify: Callable[[str], None]) -> Any:
    """With value.model: what values each episode, so that the app has its curve."""
    if not config.value.model:
        return None
    from hilt.hil.stream.episode_values import WatchedEpisodes  # needs the value model

    return WatchedEpisodes(config, log, notify)


def _facts_of(config: Hil, env: HasSpaces) -> dict[str, Any]:
    """What all episodes of a run have in common, by the names that demonstrations use; what is unknown is absent."""
    hz, words = config.control_hz or getattr(env, "control_hz", 0), getattr(env, "instruction", "")
    said = {INSTRUCTION: str(words)} if words else {}
    return {"task": config.task, **({"fps": float(hz)} if hz else {}), **said}


def demonstrated(demos: Log, agent: StepAgent) -> dict[str, object]:
    """The proprioception of all demonstrations, from which an agent takes mean and deviation."""
    if not len(demos):
        raise ConfigError(
            "normalize_proprio takes mean and deviation from demonstrations, and there are none: "
            "give some with demo_path."
        )
    seen: dict[str, Any] = demos.read(demos.all().keys(), [f"observations/{path}" for path in agent.proprio])[
        "observations"
    ]
    return seen


class Foresight:
    """A proprioception as it will be, for each step of a demonstration: at the
    gripper's next command, and at the episode's end."""

    def __init__(self, path: str):
        self.path = path
        self.columns = ["actions", f"observations/{path}", f"next_observations/{path}"]
        self._rows: dict[int, Array] = {}

    def read(self, log: Log, trajectories: Sequence[int]) -> None:
        """All of these trajectories, if there is something to foresee."""
        for number in trajectories if self.path else ():
            keys = log.trajectory_keys(number, hidden=True)  # an edit may show hidden steps later
            self.add(keys, flatten(log.read(keys, self.columns)))

    def add(self, keys: Sequence[int] | Array, columns: Mapping[str, Array]) -> None:
        """Adds one episode. A gripper is the last of seven numbers, and its command counts from a
        half on; before the first it is open."""
        actions, now, after = (columns[name] for name in self.columns)
        seen, width = np.concatenate([now, after[-1:]]), actions.shape[1]
        given = actions[:, 6::7] if width % 7 == 0 else np.zeros((len(actions), 1))
        command = np.ones(given.shape[1])
        changes = np.zeros(len(actions), bool)
        for t, numbers in enumerate(given):
            held, command = command, np.where(np.abs(numbers) >= 0.5, np.sign(numbers), command)
            changes[t] = t > 0 and bool((held != command).any())
        following = len(actions)
        for t in reversed(range(len(actions))):
            self._rows[int(keys[t])] = np.stack([seen[following], seen[-1]]).astype(np.float32)
            following = t if changes[t] else following

    def of(self, keys: Array) -> Array:
        """``[n, 2, ...]``"""
        return np.stack([self._rows[key] for key in keys.tolist()])


def finish(batch: Batch, online: int) -> Batch:
    """What an agent is given: `masks` (0 where the task came to its end; a time
    limit bootstraps), `rewards` with the dense reward, and which rows are `demo`."""
    if SHAPING in batch:
        batch["rewards"] = batch["rewards"] + batch.pop(SHAPING)
    batch["masks"] = (~batch.pop("terminated").astype(bool)).astype(np.float32)
    batch["demo"] = np.arange(len(batch["masks"])) >= online
    batch.pop("discounts", None)
    return batch


# Importing


def open_logs(
    run: Path, config: Hil, schema: Schema, notify: Callable[[str], None], instructions: Sequence[str] = ()
) -> tuple[Log, Log]:
    """(demos, log), made at the first start with all that is to be imported; later ones find them."""
    folder, more = config.checkpoint_path, additions(config, instructions)
    asked = {"demo_path": [_within(run, path) for path in config.demo_path], "checkpoint_path": folder}
    asked |= {"demo_where": config.demo_where}

    def fill_demos(log: Log) -> dict[str, int]:
        counts = {}
        for path in expanded(config.demo_path):
            where = "" if _within(run, path).startswith(IN_RUN) else config.demo_where  # it has recorded its own
            counts[path] = import_dataset(log, path, notify, instructions, *more, where)
        return {**counts, **import_buffer(log, folder, "human", notify, *more)}

    makers: dict[str, Callable[[Log], dict[str, int]]] = {
        "demos": fill_demos,
        "log": lambda log: import_buffer(log, folder, "online", notify, *more),
    }
    capacity = {"demos": None, "log": config.replay_buffer_capacity}
    for name, fill in makers.items():
        if not (run / name).exists():
            with replacing(run / name, sole_writer=True) as made:
                with Log.create(made, schema, durability=DURABILITY, capacity_steps=capacity[name]) as log:
                    counted = fill(log)
                write_json(run / f"imported_{name}.json", {**asked, "steps": counted})
            for path, steps in counted.items():
                notify(f"{steps} steps imported from {path}")
    _check_same(run, asked)
    demos = Log.open(run / "demos", schema=_known(run / "demos", schema))
    try:
        return demos, Log.open(
            run / "log", schema=_known(run / "log", schema), capacity_steps=config.replay_buffer_capacity
        )
    except BaseException:
        demos.close()
        raise


def _known(path: Path, schema: Schema) -> Schema:
    """Refuses a log of another task: its steps cannot be learned from here. It may lack columns that have a default."""
    found = Schema.from_json(read_json(path / "log.json")["schemas"][-1])
    check_same_weights(base_hash(found.columns), base_hash(schema.columns), str(path))
    grown = [name for name, spec in schema.columns.items() if name not in found.columns and spec.default is not None]
    if lines := [line for line in found.columns.difference(schema.columns) if line.split(": ")[0] not in grown]:
        raise ConfigError(
            f"{path} is of another task or setting: {'; '.join(lines[:3])}. Begin another run folder, or set it back."
        )
    return schema


def _check_same(run: Path, asked: Mapping[str, Any]) -> None:
    for name in ("demos", "log"):
        found = read_json(run / f"imported_{name}.json")
        for key in asked:
            if found.get(key, "") != asked[key] and (name, key) not in (("log", "demo_path"), ("log", "demo_where")):
                was, now = found.get(key) or "nothing", asked[key] or "nothing"
                raise ConfigError(
                    f"{key} was {was} when {run} began, and is {now} now; it is imported once. Begin another run."
                )


def _within(run: Path, path: str) -> str:
    """A path as it is, or from the run's folder on, which may be moved, and named in several ways."""
    whole, folder = Path(path).resolve(), run.resolve()
    return f"{IN_RUN}{whole.relative_to(folder)}" if whole.is_relative_to(folder) else path
