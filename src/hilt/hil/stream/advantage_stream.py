"""RECAP in the stream of a run with a person: episodes are valued as they end, and each step of the policy is good or
bad by its advantage.

The formulas are in `hilt.algos.offline.recap`. The values are facts of the log, as `hilt train value` writes them: the
app shows them, and a learner that is started again reads them. Where a step lies is decided anew with every episode,
for the threshold of its task moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hilt.algos.offline.recap import indicators, thresholds
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import ESTIMATES, Source
from hilt.core.tree import Array
from hilt.hil.config import Hil
from hilt.hil.stream.episode_values import OFFSETS, EpisodeValues
from hilt.hil.stream.labelled import GOOD, Labelled
from hilt.replay import Log
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.sampling import Chunks, Sampler
from hilt.replay.view import View
from hilt.value.value_model import ValueModel, load_value_model

if TYPE_CHECKING:
    from gymnasium.spaces import Space

PEOPLE, OTHERS = ("human", "demo"), ("policy", "random")
"""The sources of steps that are always good, and of those that are judged"""
LIVE, EARLIER = "log", "demos"
"""The log of what actors send, and that of what the run began with"""


def open_model(config: Hil, space: Space | None = None) -> ValueModel:
    """The value model of a run with algorithm=recap. One that does not fit its tasks, or the observation `space`, is
    refused."""
    model = load_value_model(config.recap.model)
    if model.inputs.chunk is not None:
        raise ConfigError(
            f"recap.model={config.recap.model} judges chunks (actions={model.inputs.chunk.actions}), and steps are "
            "labeled by a value of observations: hilt train value DATA --out NEW, without actions="
        )
    if strange := sorted(set(config.task.split("+")) - model.tasks.keys()):
        raise SchemaError(
            f"recap.model={config.recap.model} was trained on {', '.join(map(repr, sorted(model.tasks)))}, and this "
            f"run has the task {strange[0]!r}. Train one on episodes of all its tasks: hilt train value DATA... --out "
            "NEW"
        )
    if space is not None and model.extractor is None:
        from hilt.value.online_value import OnlineValue

        OnlineValue(model, space)
    return model


@dataclass(frozen=True)
class ValuedSteps:
    """What is known of the steps of one episode that was valued."""

    task: str
    success: bool | None
    first: int
    """The recorded number of the first step that has an advantage"""
    advantage: Array
    """float64 [T]"""
    judged: Array
    """The advantages of its steps in which no person acted, float64"""
    people: int
    """The number of its other steps"""


class AdvantageStream:
    """Values the episodes of a run with algorithm=recap, and tells which of their steps are good. `logs`: by the names
    `LIVE` and `EARLIER`; the steps of a policy in what the run began with are judged, too."""

    def __init__(self, config: Hil, logs: Mapping[str, Log], notify: Callable[[str], None]):
        self._model, self._quantile = open_model(config), config.recap.threshold
        self._folder, self._logs, self._notify = Path(config.recap.model), dict(logs), notify
        self._only = "" if "+" in config.task else config.task  # what episodes show that do not say what
        self._values = {name: EpisodeValues(log, self._model, self._only) for name, log in logs.items()}
        self._lock = threading.Lock()  # batches are made in another thread than episodes are valued in
        self._known: dict[tuple[str, int], ValuedSteps] = {}
        self._limits: dict[str, float] = {}
        self._told = 0
        for log in self._logs.values():
            self._model.inputs.check(log)
        self.judged: dict[str, View] = {
            name: log.all().estimated("advantage", np.isfinite, model=self._model.id) & log.by_source(*OTHERS)
            for name, log in self._logs.items()
        }
        """The steps of each log that are good or bad by their advantage"""
        self.shown: View = self._logs[EARLIER].by_source(*PEOPLE)
        """The steps of people in what the run began with, which are good"""
        self._catch_up()

    # Valuing

    def _catch_up(self) -> None:
        """Takes in episodes that have values, and values those that ended before this learner was started and have
        none of this model."""
        count = 0
        for name, log in self._logs.items():
            with log.reading() as steps:
                ended = steps.ended_trajectories() if name == LIVE else log.trajectories()
            for number in ended:
                facts = log.facts.about(number)
                if name == LIVE and "task" not in facts:  # it is still to be reported, with its outcome
                    continue
                if name == EARLIER and not self._is_judged(log, number):
                    continue
                found = self._values[name].find(number)
                self._take(name, number, found)
                count += self._values[name].write(number, found)
        if count:
            self._notify(f"{count} episodes of before were valued by {self._folder}")
        self._set_limits()
        self._tell()

    def _is_judged(self, log: Log, number: int) -> bool:
        """Whether a step of an episode is a policy's."""
        source = log.read(log.trajectory_keys(number), ["source"])["source"]
        return bool((~np.isin(source, [Source.parse(name) for name in PEOPLE])).any())

    def value(self, trajectory: int) -> None:
        """Values an episode of the run's own log that has ended, once its task and its outcome are facts."""
        found = self._values[LIVE].find(trajectory)
        self._take(LIVE, trajectory, found)
        self._set_limits()
        self._values[LIVE].write(trajectory, found)  # from now on batches have these steps
        if self._count() >= 2 * self._told:
            self._tell()

    def _take(self, name: str, number: int, found: Mapping[str, Any] | None = None) -> ValuedSteps:
        """Keeps the advantages of an episode: those that were found now, or else the facts of the log."""
        log = self._logs[name]
        with log.lock:
            facts, keys = log.facts.about(number), log.trajectory_keys(number)
            source = log.read(keys, ["source"])["source"]
        found = facts[ESTIMATES] if found is None else found
        first, advantage = int(found.get("first", 0)), np.asarray(found["advantage"], np.float64)
        places = (keys & OFFSETS) - first
        others = np.isin(source, [Source.parse(one) for one in OTHERS]) & (places >= 0) & (places < len(advantage))
        judged = advantage[places[others]]
        made = ValuedSteps(
            str(facts.get("task") or self._only), facts.get("success"), first, advantage, judged, int((~others).sum())
        )
        with self._lock:
            self._known[name, number] = made
        return made

    def _set_limits(self) -> None:
        """The threshold of each task, from all steps of the policy that are kept."""
        there = {name: set(log.trajectories()) for name, log in self._logs.items()}
        with self._lock:
            self._known = {place: one for place, one in self._known.items() if place[1] in there[place[0]]}
            known = list(self._known.values())
            tasks = [one.task for one in known for _ in one.judged]
            if tasks:
                advantages = torch.from_numpy(np.concatenate([one.judged for one in known]))
                self._limits = thresholds(advantages, tasks, torch.zeros(len(tasks), dtype=torch.bool), self._quantile)

    # What comes of it

    def good(self, name: str, keys: Array) -> Array:
        """Returns which of these steps of a log are good, bool [N]. Each of them is one of `judged`."""
        with self._lock:
            known, limits = dict(self._known), dict(self._limits)
        advantages, tasks = np.empty(len(keys)), []
        for place, key in enumerate(keys.tolist()):
            number = key >> OFFSET_BITS
            one = known.get((name, number)) or self._take(name, number)
            advantages[place] = one.advantage[(key & OFFSETS) - one.first]
            tasks.append(one.task)
        none = torch.zeros(len(tasks), dtype=torch.bool)
        found: Array = indicators(torch.from_numpy(advantages), tasks, none, limits).numpy()
        return found

    def samplers(self, human: View, horizon: int, seeds: Mapping[str, Any]) -> dict[str, Sampler]:
        """Batches of what is learned from, by the names of views, with the column `GOOD`. A chunk ends where another
        one begins to act."""
        views: dict[str, tuple[View, Callable[[Array], Array]]] = {
            "demonstrations": (self.shown, _all_good),
            "human": (human, _all_good),
            "policy": (self.judged[LIVE], partial(self.good, LIVE)),
            "earlier": (self.judged[EARLIER], partial(self.good, EARLIER)),
        }
        return {
            name: Sampler(view, assembly=Labelled(Chunks(horizon, view), {GOOD: label}), seed=seeds.get(name))
            for name, (view, label) in views.items()
        }

    def counts(self) -> dict[str, int]:
        """Steps of the policy that are learned from, and episodes that have values."""
        return {"policy_steps": sum(map(len, self.judged.values())), "valued_episodes": self._count()}

    def _count(self) -> int:
        with self._lock:
            return sum(len(one.judged) > 0 for one in self._known.values())

    def _tell(self) -> None:
        """Shows what counts as good in each task."""
        self._told = max(1, self._count())
        with self._lock:
            known, limits = list(self._known.values()), dict(self._limits)
        for task, limit in limits.items():
            mine = [one for one in known if one.task == task]
            steps = np.concatenate([one.judged for one in mine])
            failed = sum(one.success is False for one in mine)
            self._notify(
                f"{task}: {len(mine)} episodes were valued, of which {failed} failed; {(steps > limit).mean():.0%} of "
                f"{len(steps):,} steps of the policy have an advantage above {limit:.4f} and are good, and so are "
                f"{sum(one.people for one in mine):,} steps of a person"
            )


def _all_good(keys: Array) -> Array:
    return np.ones(len(keys), bool)
