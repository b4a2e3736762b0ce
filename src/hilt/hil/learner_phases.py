"""What a learner does before it learns online, what its actors report, and its clock: which share of its time
torch, data and waiting take, and how fast its counters grow."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.core.errors import AlarmError
from hilt.core.progress import Phase
from hilt.hil.config import Hil, reinforces

if TYPE_CHECKING:
    from hilt.policies.agent.step_agent import StepAgent

MAX_VERSIONS = 1000
"""Versions of the weights that are remembered"""
MEANS = ("value_expected", "value_realized", "value_hopeless")
"""Figures of actors' reports whose mean over actors is in the learner's metrics, too"""
TELL_S = 5.0
"""Seconds between two messages about how far it is"""
Once = Callable[[str, int], Mapping[str, float]]
"""One update from a part of the data, with its number; returns its figures, none where it was left out"""


class Preparation:
    """The updates before the policy acts: `agent.encoder.pretrain_updates` of imitation, then `offline_updates` of the
    algorithm's own, in which actor and critics learn together. `over` tells whether the run ends."""

    def __init__(
        self,
        config: Hil,
        agent: StepAgent,
        imitate: Once,
        learn: Once,
        over: Callable[[], bool],
        look: Callable[[], None],
        notify: Callable[[str], None],
    ):
        self._config, self._agent, self._imitate, self._learn = config, agent, imitate, learn
        self._over, self._look, self._notify = over, look, notify

    @property
    def pending(self) -> bool:
        """Whether updates are still to be made."""
        return (
            self._agent.imitations < self._config.agent.encoder.pretrain_updates
            or self._offline() < self._config.offline_updates
        )

    def run(self, part: str) -> None:
        """Makes those that are left, from ``"demonstrations"``, or from these and what was ``"collected"``."""
        shown = part == "demonstrations"
        whom = "the demonstrations first" if shown else "demonstrations and take-overs, from scratch"
        wanted = self._config.agent.encoder.pretrain_updates
        self._repeat(
            f"imitates {whom}", wanted, lambda: self._agent.imitations, partial(self._imitate, part), "imitation_loss"
        )
        whence = "demonstrations" if shown else "demonstrations and what was collected"
        wanted, learn = self._config.offline_updates, partial(self._learn, part)
        self._repeat(f"actor and critics learn from {whence}, offline", wanted, self._offline, learn, "critic_loss")

    def _offline(self) -> int:
        """Learner steps that were made offline; later ones are counted on."""
        each = self._config.cta_ratio if reinforces(self._config) and self._agent.critics else 1
        return self._agent.updates // each

    def _repeat(
        self,
        what: str,
        wanted: int,
        made: Callable[[], int],
        once: Callable[[int], Mapping[str, float]],
        figure: str,
    ) -> None:
        if made() >= wanted:
            return
        phase, notified_at = Phase(what, wanted, made(), "updates"), time.monotonic()
        self._notify(phase.text())
        while made() < wanted:
            if self._over():
                return
            info = once(made() + 1)
            if figure in info:
                phase.move(made(), note=f"loss {info[figure]:.3f}")
            if time.monotonic() - notified_at >= TELL_S or made() >= wanted:
                self._notify(phase.text())
                notified_at = time.monotonic()
            self._look()


@dataclass(frozen=True)
class LearnerSummary:
    """The end of a run, or of one part of it: why it ended, and its figures."""

    reason: str
    """"goal": success held at its goal; "max_steps", "max_seconds", "max_env_steps"; "pressed": an operator
    at an actor pressed stop; "stopped" from outside; or "alarm": one that `stop_on` names, which is raised as
    an `AlarmError` when everything is closed"""
    update: int
    online: int


def not_finite(skipped: int, problem: str, run: Path, last: int, rate: float) -> AlarmError:
    """Returns the error of a run of which `skipped` updates in a row were not finite. `last`: the update of its newest
    checkpoint; `rate`: its learning rate."""
    return AlarmError(
        f"the last {skipped} updates were left out; of the last one: {problem} Go on from the checkpoint of update "
        f"{last:,} with a lower rate: hilt train --run {run} --resume agent.rlpd.learning_rate={rate / 10:g}. If that "
        "does not help, a step that is not finite is in the demonstrations or in the log."
    )


class ActorReports:
    """What actors report, beside the weights that were published: for how long they act with older ones, how often they
    asked for help, and how far the value model is off."""

    def __init__(self) -> None:
        self.update_of: dict[int, int] = {}
        """The update of each version of the weights, of the last ones"""
        self._replaced: dict[int, float] = {}  # when the version after this one was published
        self._last: dict[str, Mapping[str, Any]] = {}
        self._ages: dict[str, float] = {}

    def published(self, version: int, update: int) -> None:
        """Counts a version that is published now."""
        if self.update_of:
            self._replaced[max(self.update_of)] = time.monotonic()
        self.update_of[version] = update
        for old in list(self.update_of)[:-MAX_VERSIONS]:
            del self.update_of[old]
            self._replaced.pop(old, None)

    def heard(self, actor: str, report: Mapping[str, Any]) -> None:
        """Takes in the report of an actor. Only one in which it has made steps tells how old its weights are, for it
        takes up the newest ones before each step."""
        if "version" not in report or "steps" not in report:
            return
        before = self._last.get(actor)
        acts = before is not None and report["steps"] > before["steps"] and report.get("acting") == "policy"
        self._ages[actor] = self._age(int(report["version"])) if acts else 0.0
        self._last[actor] = dict(report)

    def _age(self, version: int) -> float:
        """Seconds since the weights after these were published."""
        known, replaced = list(self.update_of), dict(self._replaced)
        if known and replaced and version < min(known):  # so old that it is no longer known
            version = min(replaced)
        return time.monotonic() - replaced[version] if version in replaced else 0.0

    def left(self, actor: str) -> None:
        """The actor is gone."""
        self._ages.pop(actor, None)
        self._last.pop(actor, None)

    def figures(self) -> dict[str, float]:
        """The figures of all actors together: the largest age, the sum of counts, and means of shares."""
        ages, reports = list(self._ages.values()), list(self._last.values())
        found = {"weights_age": max(ages)} if ages else {}
        for name in MEANS:
            values = [float(report[name]) for report in reports if name in report]
            found |= {name: sum(values) / len(values)} if values else {}
        return found


class LearnerClock:
    """Measures on what the learner spends its time, since `shares` was last called."""

    def __init__(self, *counts: int) -> None:
        self._spent: Counter[str] = Counter()
        self._began = time.perf_counter()
        self._last = (counts[0], counts[1], self._began)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[what] += time.perf_counter() - began  # type: ignore[assignment]

    def move(self, source: str, target: str, seconds: float) -> None:
        self._spent[source] -= seconds  # type: ignore[assignment]
        self._spent[target] += seconds  # type: ignore[assignment]

    def shares(self) -> dict[str, float]:
        """Returns the shares of the time since the last call, by the names that they have in the metrics."""
        now = time.perf_counter()
        total = max(now - self._began, 1e-9)
        names = {"torch_share": "torch", "sample_wait_share": "data", "wait_share": "wait"}
        shares = {name: self._spent[what] / total for name, what in names.items()}
        self._spent.clear()
        self._began = now
        return {**shares, "other_share": max(0.0, 1.0 - sum(shares.values()))}

    def since(self, *counts: int) -> tuple[float, float, float]:
        """How far two counters have come since they were last given, and in how many seconds."""
        now, before = time.perf_counter(), self._last
        self._last = (counts[0], counts[1], now)
        return counts[0] - before[0], counts[1] - before[1], max(now - before[2], 1e-9)
