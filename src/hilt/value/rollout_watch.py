"""A value model beside the rollouts of post-training: what it expects of them, and an early end of hopeless ones.

    watch = RolloutWatch(RolloutValue("value", stop_below=0.05), ["tabletop/pick_red"])
    episodes = roll_out(policy, pool, starts, suite=suite("tabletop"), watch=watch)

An episode that is ended early counts as a failure, though it might have recovered. So that this can be seen, a share of
the hopeless episodes is let run on, chosen by where they begin: `value_figures` has how many of them succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import STOPPED
from hilt.core.tree import Array, Observation, flatten
from hilt.core.validate import Need, setting
from hilt.recording.recording_folder import nested
from hilt.value.online_value import JUDGED_EPISODES, OnlineValue
from hilt.value.value_episodes import OBSERVED, RECORDED
from hilt.value.value_model import load_value_model

CHECKED_SHARE = 0.1
"""Share of the hopeless episodes that are let run on, to see how many of them succeed"""
RECORD = "record/"
"""Before the names of what a model looks at that learned from the records of a policy"""
_HAS_MODEL = Need("{here}model=FOLDER", lambda c: c.model)


@dataclass
class RolloutValue:
    """What a value model of `hilt train value` does while episodes are rolled out: alone it watches, and how probable
    it found success and what came of it are in the metrics. It does nothing in a validation."""

    model: str = ""
    """A folder made by `hilt train value`, of episodes of these tasks; empty: none"""
    stop_below: float = setting(0.0, minimum=0, below=1, needs=_HAS_MODEL)
    """An episode ends as a failure when the probability of success stays below this, but for every tenth, which is let
    run on to see how often that is wrong; 0: never"""
    stop_patience: int = setting(10, minimum=1, needs=Need("{here}stop_below", lambda c: c.stop_below))
    """The number of control steps in a row for which it does. The model is asked once for each chunk, and all executed
    steps of a chunk count as the observation after it"""


@dataclass
class Outlook:
    """What a value model has expected of one episode so far."""

    steps_below: int = 0
    """Control steps in a row that count as hopeless"""
    total: float = 0.0
    """The sum of the probabilities of success"""
    looks: int = 0
    checked: bool = False
    """Whether it was hopeless, and was let run on"""

    @property
    def expected(self) -> float:
        """The mean probability of success; NaN while it was not looked at."""
        return self.total / self.looks if self.looks else float("nan")


class RolloutWatch:
    """A value model that is asked about several episodes at once, each before a chunk of it is executed."""

    def __init__(self, settings: RolloutValue, tasks: Sequence[str]):
        """Refuses a model that cannot judge episodes of these tasks, as far as that is known without one."""
        model = load_value_model(settings.model)
        if model.extractor is not None:
            raise ConfigError(
                f"value.model={settings.model} looks at features of the policy {model.config.policy}, which stays as "
                "it is, and in post-training the policy changes. Give a model that has an encoder of its own: "
                "hilt train value DATA --out NEW, without policy="
            )
        self.settings, self._value = settings, OnlineValue(model)
        if strange := [task for task in tasks if task not in model.tasks]:
            raise SchemaError(
                f"value.model={settings.model} was trained on {_listed(model.tasks)}, and episodes of "
                f"{_listed(strange)} are to be rolled out. Train one on both: hilt train value DATA... --out NEW"
            )
        inputs = model.inputs
        self._names = [*inputs.cameras, *(path.removeprefix(OBSERVED) for path in inputs.state)]
        self.reads_records = any(name.startswith(RECORD) for name in self._names)
        """Whether it looks at what a policy records, and not only at what the environment gives"""

    def check(self, observation: Observation, record: Mapping[str, Array]) -> None:
        """Raises where it cannot look at this: an observation of the environment, and the record of the policy's answer
        to it."""
        self._value.check(_leaves(observation, record))

    def judge(
        self, observations: Sequence[Observation], records: Sequence[Mapping[str, Array]], texts: Sequence[str]
    ) -> list[float]:
        """The probability of success of each episode, from its last observation, the record of the policy's answer to
        it, and what is to be done."""
        if not observations:
            return []
        seen = [_leaves(*each) for each in zip(observations, records, strict=True)]
        for leaves in seen:
            self._value.check(leaves)
        columns = {name: np.stack([np.asarray(leaves[name]) for leaves in seen]) for name in self._names}
        chances: list[float] = self._value.of_columns(columns, texts)[1].tolist()
        return chances

    def hopeless(self, outlook: Outlook, chance: float, executed: int, start: Sequence[int]) -> bool:
        """Takes note of the probability of success after `executed` steps. Returns whether the episode is to end.
        `start`: numbers that are those of no other episode, by which it is chosen whether it is let run on."""
        outlook.total, outlook.looks = outlook.total + chance, outlook.looks + 1
        outlook.steps_below = outlook.steps_below + executed if chance < self.settings.stop_below else 0
        if outlook.checked or outlook.steps_below < self.settings.stop_patience:
            return False
        outlook.checked = bool(np.random.default_rng([*start]).random() < CHECKED_SHARE)
        return not outlook.checked


def value_figures(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of a training step, from the summaries of its episodes; nothing without a value model.

    ``value_stopped`` is the number of episodes that were ended early, and ``value_steps_saved`` that of control steps
    that were left to them until their time limit. ``value_checked`` is the number of hopeless episodes that were let
    run on, and ``value_recovered`` the share of these that succeeded, which is how often an early end is wrong. Of
    enough episodes, ``value_hopeless`` is the share that was ended early; of the others ``value_expected`` is the mean
    probability of success, and ``value_realized`` the share that succeeded."""
    judged = [one for one in episodes if "value_expected" in one]
    if not judged:
        return {}
    stopped, known = [one for one in judged if STOPPED in one], [one for one in judged if STOPPED not in one]
    checked = [one for one in known if one.get("value_checked")]
    figures = {"value_stopped": float(len(stopped)), "value_checked": float(len(checked))}
    figures["value_steps_saved"] = float(sum(one["steps_saved"] for one in stopped))
    if checked:
        figures["value_recovered"] = sum(bool(one["success"]) for one in checked) / len(checked)
    if len(judged) >= JUDGED_EPISODES:
        figures["value_hopeless"] = len(stopped) / len(judged)
        if len(known) >= JUDGED_EPISODES // 2:
            figures["value_expected"] = sum(one["value_expected"] for one in known) / len(known)
            figures["value_realized"] = sum(bool(one["success"]) for one in known) / len(known)
    return figures


def _leaves(observation: Observation, record: Mapping[str, Array]) -> dict[str, Any]:
    """What a model may look at, by path: as the log of a run with a person has it, and as that of post-training. Of a
    record, which has one row."""
    leaves = flatten(nested(observation)) if isinstance(observation, Mapping) else {}
    if (pictures := record.get("images")) is not None:
        leaves |= {f"{RECORDED}/{place}": picture for place, picture in enumerate(pictures[0])}
    if (state := record.get("state")) is not None:
        leaves[f"{RECORD}state"] = state[0]
    return leaves


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    shown = [repr(name) for name in list(names)[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
