"""What a policy is taught by: steps of episodes, from logs or from whatever a log
can be made of, with the actions that follow each.

    lessons = Demonstrations([Path("demos/log")], Path("run/data"), suite("tabletop"))
    train, held_out = lessons.split(0.1, seed=0)
    observations, actions, mask = lessons.batch(train[:64], horizon=8)

Actions are in memory. Pictures stay in the log until their step is drawn, so a dataset may be larger than the memory.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, UnknownNameError
from hilt.core.hub import local
from hilt.core.progress import Report, silent
from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.formats import detect, located
from hilt.formats.convert import convert
from hilt.formats.episodes import INSTRUCTION
from hilt.formats.experience import LogDataset
from hilt.policies.base import Policy
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE
from hilt.policies.vla.observation_adapters import SUITES, Suite, columns, hold_of, known_suites, suite
from hilt.replay.tensors import generator
from hilt.vla.imitation.chosen_episodes import ChosenEpisodes

if TYPE_CHECKING:
    from hilt.vla.config import Vla

AT_ONCE, MAX_STATES = 256, 4096
"""Steps that are looked at together, and at most, to know what states are like"""


@dataclass(frozen=True)
class Lesson:
    """One episode."""

    log: Any
    keys: Array
    """Of its steps in the log"""
    actions: Array
    """float32 [T, D], as the policy is to give them"""
    human: Array
    """In which of them a person acted, bool [T]; in none where the data does not say who did"""
    texts: tuple[str, ...]
    begins: tuple[int, ...]
    """The steps from which each text is what is to be done"""

    def instruction(self, step: int) -> str:
        return self.texts[bisect.bisect_right(self.begins, step) - 1]

    @cached_property
    def turns(self) -> list[int]:
        """The steps from which on somebody else acts: a person in the place of a policy, or the other way round; and
        the end of the episode."""
        return [*(np.flatnonzero(np.diff(self.human)) + 1).tolist(), len(self.human)]

    def turn_after(self, step: int) -> int:
        """The first of `turns` after a step."""
        return self.turns[bisect.bisect_right(self.turns, step)]


class Demonstrations:
    """All steps of the episodes that are to be imitated. A *row* is a pair: the episode's number and the step's."""

    def __init__(
        self,
        paths: Sequence[Path],
        folder: Path,
        suite: Suite,
        instruction: str = "",
        successes_only: bool = True,
        notify: Callable[[str], None] = lambda text: None,
        report: Report = silent,
        where: Sequence[str] = (),
        run: Path | None = None,
    ):
        """Converts other formats to a log in `folder`, once. An `instruction` applies to every
        episode; empty: the instructions in the data.
        `successes_only` passes over episodes that are known to have failed. `where`: a filter of the episodes of each
        of the first paths, empty where all are taken. In the folder of a `run` its choice is kept."""
        filters, chosen = [*where, *[""] * (len(paths) - len(where))], ChosenEpisodes(run, notify)
        self._suite, self._datasets = suite, list[LogDataset]()
        for number, path in enumerate(paths):
            log = _log_of(path, folder, number, notify, report)
            self._datasets.append(chosen.open(number, log, filters[number]) if filters[number] else LogDataset(log))
        chosen.keep()
        self.lessons: list[Lesson] = []
        self.labels: list[Array] | None = None
        """Of each episode whether its steps are good, bool [T], where that is known: observations then have it as
        `hilt.policies.conditioned.ADVANTAGE`"""
        failed = 0
        for path, dataset in zip(paths, self._datasets, strict=True):
            done = 0
            if dataset.episodes:
                _look(suite, dataset, path)
            for keys, job in zip(dataset.episodes, dataset.jobs(images=False), strict=True):
                report(f"reading {path}, episodes", done := done + 1, len(dataset.episodes))
                episode: Any = job()
                if successes_only and episode.facts.get("success") is False:
                    failed += 1
                    continue
                given = instruction or episode.facts.get(INSTRUCTION, "")
                texts, begins = (
                    ((given,), (0,)) if isinstance(given, str) else (tuple(given["texts"]), tuple(given["begins"]))
                )
                if not all(texts):
                    raise ConfigError(f"{path}: an episode has no instruction; give instruction=TEXT.")
                actions, human = _taught(suite, episode.columns, path), _human(episode.columns, len(keys))
                self.lessons.append(Lesson(dataset.log, keys, actions, human, texts, begins))
        if not self.lessons:
            lost = f"; {failed} failed, and successes_only=true" if failed else ""
            raise ConfigError(
                "there is no episode to learn from in "
                f"{', '.join(map(str, paths)) or 'nothing: give data=[PATH]'}{lost}."
            )
        if len(widths := {lesson.actions.shape[1] for lesson in self.lessons}) > 1:
            raise SchemaError(
                f"the episodes have actions of {' and '.join(map(str, sorted(widths)))} numbers; "
                "teach one robot at a time."
            )
        if failed:
            notify(f"{failed} episodes that failed are passed over")

    def close(self) -> None:
        for dataset in self._datasets:
            dataset.log.close()

    def __len__(self) -> int:
        return sum(len(lesson.keys) for lesson in self.lessons)

    @property
    def action_dim(self) -> int:
        return int(self.lessons[0].actions.shape[1])

    def rows(self, episodes: Sequence[int] | None = None) -> Array:
        """All steps of these episodes, or of all, int64 [N, 2]."""
        chosen = range(len(self.lessons)) if episodes is None else episodes
        parts = [np.stack([np.full(n := len(self.lessons[e].keys), e), np.arange(n)], 1) for e in chosen]
        return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)

    def split(self, share: float, seed: int) -> tuple[list[int], list[int]]:
        """Episodes to learn from, and those held out: this share of each instruction's, and one
        at least. Every instruction is learned."""
        groups: dict[str, list[int]] = {}
        for number, lesson in enumerate(self.lessons):
            groups.setdefault(lesson.texts[0], []).append(number)
        draw, held = np.random.default_rng(seed), []
        for group in groups.values():
            draw.shuffle(group)
            held += group[: min(round(share * len(group)), len(group) - 1)]
        if share and not held:
            largest = max(groups.values(), key=len)
            if len(largest) < 2:
                raise ConfigError(
                    f"validation={share:g} holds out whole episodes, and there is one for each "
                    "instruction: give more, or validation=0 and max_steps."
                )
            held = largest[:1]
        return sorted(set(range(len(self.lessons))) - set(held)), sorted(held)

    def batch(self, rows: Array, horizon: int) -> tuple[list[dict[str, Any]], Array, Array]:
        """Observations, the actions from there on, float32 [B, horizon, D], and which of these are in the chunk, bool
        [B, horizon]. After its end the last one is repeated.

        A chunk ends with its episode. With `labels` it also ends where a person takes over or hands back: the label is
        that of the chunk's first step, and does not hold for what somebody else did. Without labels all is imitated
        alike, and what a person did next is the best continuation that there is."""
        steps = rows[:, 1:] + np.arange(horizon)
        ends = np.array([self._end(self.lessons[e], t) for e, t in rows.tolist()])[:, None]
        mask = steps < ends
        steps = np.minimum(steps, ends - 1)
        actions = np.stack([self.lessons[e].actions[at] for e, at in zip(rows[:, 0], steps, strict=True)])
        return self._observations(rows), actions, mask

    def _end(self, lesson: Lesson, step: int) -> int:
        """The step with which a chunk from `step` on has ended."""
        return len(lesson.keys) if self.labels is None else lesson.turn_after(step)

    def numbers(self, episodes: Sequence[int]) -> tuple[Array, Array]:
        """States [N, P], of some thousand steps at most since they are read with their
        pictures, and all actions [M, D] of episodes."""
        rows, states = self.rows(episodes), []
        rows = rows[:: math.ceil(len(rows) / MAX_STATES)]
        for first in range(0, len(rows), AT_ONCE):
            states += [
                row.get("state", np.zeros(0, np.float32)) for row in self._observations(rows[first : first + AT_ONCE])
            ]
        return np.stack(states), np.concatenate([self.lessons[e].actions for e in episodes])

    def _observations(self, rows: Array) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{}] * len(rows)
        logs = {id(self.lessons[e].log): self.lessons[e].log for e in rows[:, 0]}
        for name, log in logs.items():
            mine = [place for place, (e, _) in enumerate(rows) if id(self.lessons[e].log) == name]
            keys = [self.lessons[rows[place, 0]].keys[rows[place, 1]] for place in mine]
            views = self._suite.views(log.read(keys, ["observations"])["observations"])
            for at, place in enumerate(mine):
                text = self.lessons[rows[place, 0]].instruction(int(rows[place, 1]))
                found[place] = {**{view: column[at] for view, column in views.items()}, "instruction": text}
        if self.labels is not None:
            for place, (e, t) in enumerate(rows.tolist()):
                found[place][ADVANTAGE] = POSITIVE if self.labels[e][t] else NEGATIVE
        return found


class NamesObservations(Protocol):
    """Settings for the names of observations."""

    columns: dict[str, str]
    suite: str
    tasks: list[str]


def words(config: NamesObservations) -> Suite:
    """How the observations of a run are named."""
    if config.columns:
        return columns(config.columns, hold_of(config.tasks))
    if not config.suite and not config.tasks:
        raise ConfigError(
            "whose names do the observations have? Give suite=NAME, such as libero, or columns={full_image: PATH, ...}."
        )
    try:
        return suite(config.suite or config.tasks[0])
    except UnknownNameError:
        if config.suite:
            raise
        raise ConfigError(
            f"{config.tasks[0]} is of no suite that Hilt knows: give the paths of its observations by "
            "the policy's names, such as columns={full_image: images/front, state: state}; or suite=NAME where they "
            f"are named as those of a suite ({', '.join(known_suites())})."
        ) from None


def batches(rows: Array, size: int, seed: int, first: int = 0) -> Iterator[Array]:
    """Without end, from batch number `first` on: every row once in each round, in an
    order that the seed and the round decide."""
    size, orders = min(size, len(rows)), dict[int, Array]()
    for number in itertools.count(first):
        rounds, places = np.divmod(np.arange(number * size, (number + 1) * size), len(rows))
        orders = {
            r: orders[r] if r in orders else np.random.default_rng([seed, r]).permutation(len(rows))
            for r in rounds.tolist()
        }
        yield rows[[orders[r][place] for r, place in zip(rounds.tolist(), places, strict=True)]]


def _log_of(path: Path, folder: Path, number: int, notify: Callable[[str], None], report: Report) -> Path:
    """The log of a dataset, which is made in `folder` of one in another format."""
    path = located(path)
    if detect(path) == "log":
        return path
    made = folder / f"{number}-{path.name}"
    if not made.exists():
        summary = convert(path, made, progress=partial(report, f"converting {path}, episodes"))
        notify(f"{summary.episodes} episodes, {summary.steps} steps were read from {path} into {made}")
    return made


def _look(suite: Suite, dataset: LogDataset, path: Path) -> None:
    """At the first step: whether the observations are named as the suite has them."""
    try:
        suite.views(dataset.log.read(dataset.episodes[0][:1], ["observations"])["observations"])
    except MissingFieldError as error:
        cure = (
            f"suite={suite.name} is of other data: give the right one ({', '.join(SUITES)}), or"
            if suite.name
            else "Mend"
        )
        raise MissingFieldError(f"{path}: {error} {cure} columns={{full_image: PATH, state: PATH}}.") from None


def _human(columns: Any, count: int) -> Array:
    source = np.asarray(columns["source"]) if "source" in columns else np.full(count, Source.POLICY)
    return np.isin(source, [Source.HUMAN, Source.DEMO])


def _taught(suite: Suite, columns: Any, path: Path) -> Array:
    actions = np.asarray(columns["actions"])
    if actions.ndim != 2 or actions.dtype.kind != "f":
        raise SchemaError(
            f"{path}: its actions are {actions.dtype} {list(actions.shape[1:])}; expected rows of real numbers."
        )
    if not np.isfinite(actions).all():
        raise SchemaError(
            f"{path}: step {int(np.argwhere(~np.isfinite(actions))[0, 0])} of an episode has an action "
            "that is no finite number."
        )
    return suite.taught(actions).astype(np.float32)


class Imitating:
    """A term of the loss: some samples of the demonstrations, drawn anew for each optimizer step."""

    def __init__(self, config: Vla, run: Path, policy: Policy, suite: Suite, rank: int):
        self._policy, self._weight, self._seed = policy, config.imitation.weight, [config.seed, rank, 4]
        self._lessons = Demonstrations([local(path) for path in config.imitation.data], run / "data", suite)
        self._horizon = int(getattr(policy, "horizon", policy.chunk))

        def from_batch(first: int) -> Iterator[np.ndarray]:
            return batches(self._lessons.rows(), config.imitation.batch_size, config.seed + rank, first)

        self._from_batch = from_batch
        self._made, self._coming = 0, from_batch(0)

    def __call__(self) -> tuple[Tensor, dict[str, float]]:
        observations, actions, mask = self._lessons.batch(next(self._coming), self._horizon)
        draws = generator(int(np.random.SeedSequence([*self._seed, self._made]).generate_state(1)[0]))
        self._made += 1
        loss, _ = self._policy.supervised_loss(observations, actions, mask, generator=draws)
        return self._weight * loss, {"imitation_loss": float(loss.detach())}

    def state_dict(self) -> dict[str, object]:
        """The same on all ranks."""
        return {"made": self._made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made, self._coming = int(state["made"]), self._from_batch(int(state["made"]))
