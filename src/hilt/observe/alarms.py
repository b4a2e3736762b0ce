"""Alarms: what goes wrong in a run, in a sentence with its cure, from the figures that the run writes anyway.

    alarms = Alarms(Facts("vla", gae=True))
    for change in alarms.take({"ppo_kl": 0.4}):      # after each record of metrics of the kind "update"
        print(change.text)

`TABLE` has all of them, for both jobs: "hil", a run with a person in the loop, and "vla", post-training. An
alarm is raised when its condition becomes true, and over when it no longer is. Conditions look at means
over several records, so that one bad batch raises none. The limits are rules of thumb, each far outside of
what healthy runs show; docs/observe.md lists them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import AlarmError, ConfigError, Problems, UnknownNameError
from hilt.observe.metrics import Metrics, Value, read_metrics
from hilt.observe.statistics import paired_loss

KEPT = 20
"""Values of each figure that are remembered"""
KL = {"token": 0.1, "action": 0.5, "chunk": 1.0}
"""Nats that the policy may move in an update, by what a ratio is of"""
CLIPPED = 0.4
"""Share of terms that the clip may decide"""
ENTROPY_LEFT, ENTROPY_FALL = 0.1, 2.3
"""Of the entropy at the start, this share must be left, and no more nats of each
number may be lost: it is a tenth as wide then"""
BELOW_TARGET = 3.0
"""Nats of each number that the entropy of a run with a person may be below its target"""
NO_SIGNAL = 0.9
"""Share of groups in which all members succeeded, or all failed"""
BEYOND = 0.5
"""Of its range, the share by which the extremes of Q in a batch may exceed its bounds:
healthy critics overshoot by 0.2 while they begin"""
OVER = 0.5
"""Q may be above realized returns by this share of them, or of the largest reward"""
ERRORS = 3.0
"""Standard errors that a validation may be below the best one"""
UPDATES_PER_STEP = 20.0
"""Learner steps for each online step"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """The settings of a run that alarms depend on."""

    job: str
    """"hil" or "vla" """
    gae: bool = False
    ratio: str = "token"
    target_kl: float = 0.0
    compares: bool = True
    """Whether members of a group are compared by their success alone"""
    validates: bool = True
    rlpd: bool = True
    groups: bool = False
    """Whether a run with a person learns from groups of simulated episodes, too"""
    discount: float = 1.0
    """Of a target of Q, over all of its n steps"""
    q_range: tuple[float, float] | None = None
    """Where targets of Q are kept, if they are"""
    entropy_in_q: bool = False
    target_entropy: float = 0.0
    actions: int = 1
    """Continuous numbers of an action"""
    update_to_data: float = 0.0


class History:
    """The last values of each figure; what is not a finite number is left out."""

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self.count: dict[str, int] = {}
        self.low: dict[str, float] = {}
        self.high: dict[str, float] = {}
        self.last: dict[str, str] = {}
        """The last of each text"""
        self.best: Record = {}
        """The validation with the highest success"""

    def add(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.last[name] = value
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._last.setdefault(name, deque(maxlen=KEPT)).append(float(value))
                first = self._first.setdefault(name, [])
                first += [float(value)] if len(first) < KEPT else []
                self.count[name] = self.count.get(name, 0) + 1
                self.low[name], self.high[name] = (
                    min(value, self.low.get(name, value)),
                    max(value, self.high.get(name, value)),
                )
        if record.get("validation_success", -1.0) > self.best.get("validation_success", -1.0):
            self.best = record

    def mean(self, name: str, count: int) -> float:
        """Returns the mean of the last `count` values; NaN, with which nothing compares, while there are fewer."""
        last = list(self._last.get(name, ()))[-count:]
        return sum(last) / count if len(last) == count else math.nan

    def first(self, name: str, count: int) -> float:
        """Returns the mean of the first `count` values."""
        first = self._first.get(name, [])[:count]
        return sum(first) / count if len(first) == count else math.nan


# --- what goes wrong: each gives the sentence, or nothing ---


def _moved_far(h: History, facts: RunFacts) -> str:
    limit, kl = max(KL[facts.ratio], 2 * facts.target_kl), h.mean("ppo_kl", 3)
    return (
        f"the policy moves {kl:.3g} nats from the one that collected (ppo_kl, mean of 3 updates; limit {limit:g})"
        if kl > limit
        else ""
    )


def _clips(h: History, facts: RunFacts) -> str:
    share = h.mean("clip_fraction", 5)
    return f"{share:.0%} of the ratios are clipped (mean of 5 updates; limit {CLIPPED:.0%})" if share > CLIPPED else ""


def _narrowed(h: History, facts: RunFacts) -> str:
    if facts.job == "hil":
        limit, now = facts.target_entropy - BELOW_TARGET * facts.actions, h.mean("entropy", 5)
        return (
            f"the entropy is {now:.3g} nats, and its target {facts.target_entropy:.3g} (limit {limit:.3g})"
            if now < limit
            else ""
        )
    start, now = h.first("entropy", 3), h.mean("entropy", 3)
    if h.count.get("entropy", 0) < 6 or not (start - now > ENTROPY_FALL or 0 <= now < ENTROPY_LEFT * start):
        return ""
    return (
        f"the entropy of each number fell from {start:.3g} to {now:.3g} nats (limit: a tenth of it, or "
        f"{ENTROPY_FALL} nats less)"
    )


def _critic_blind(h: History, facts: RunFacts) -> str:
    explained = h.mean("explained_variance", 10)
    if h.count.get("explained_variance", 0) < KEPT or not explained < 0:
        return ""
    return f"the critic explains {explained:.2f} of the variance of returns (mean of 10 updates; a constant explains 0)"


def _no_signal(h: History, facts: RunFacts) -> str:
    groups, good, bad = (h.mean(name, 5) for name in ("groups", "groups_all_succeeded", "groups_all_failed"))
    if not groups or not (good + bad) / groups > NO_SIGNAL:
        return ""
    most = "succeed" if good > bad else "fail"
    return (
        f"in {(good + bad) / groups:.0%} of the groups all members end alike, and most of these {most} (5 "
        f"steps; limit {NO_SIGNAL:.0%})"
    )


def _beyond_bounds(h: History, facts: RunFacts) -> str:
    lowest, highest = h.mean("q_min", 5), h.mean("q_max", 5)
    if facts.q_range is not None:
        low, high = facts.q_range
    else:
        worst, best = min(0.0, h.low.get("reward_min", 0.0)), max(0.0, h.high.get("reward_max", 0.0))
        low, high = (reward / (1 - facts.discount) for reward in (worst, best))
    slack = BEYOND * (high - low)
    if not slack or not (lowest < low - slack or highest > high + slack):  # no slack: there was no reward yet
        return ""
    return (
        f"Q is from {lowest:.3g} to {highest:.3g}, and rewards and discount allow {low:.3g} to {high:.3g} (5 records)"
    )


def _overestimates(h: History, facts: RunFacts) -> str:
    q, realized = h.mean("q/online", 5), h.mean("realized_q", 5)
    size = max(abs(h.low.get("reward_min", 0.0)), abs(h.high.get("reward_max", 0.0)), abs(realized))
    if not size or not q - realized > OVER * size:
        return ""
    return (
        f"Q is {q:.3g} on the average, and the last episodes realized {realized:.3g} (limit "
        f"{realized + OVER * size:.3g})"
    )


def _got_worse(h: History, facts: RunFacts) -> str:
    """In pairs, where both validations tried the same states; else as if they were independent."""
    last, best = h.last.get("validation_outcomes", ""), h.best.get("validation_outcomes", "")
    if (pair := paired_loss(best, last)) is not None:
        lost, error = pair
        if not lost > ERRORS * error or not error:
            return ""
        shares = h.mean("validation_success", 1), h.best["validation_success"]
        return _worse(*shares, lost / error, ", state by state")
    # in older runs
    counts = "validation_effective_episodes" if "validation_effective_episodes" in h.best else "validation_episodes"
    n, m = h.mean(counts, 1), h.best.get(counts, math.nan)
    now, most = h.mean("validation_success", 1), h.best.get("validation_success", math.nan)
    share = (n * now + m * most) / (n + m)
    error = math.sqrt(share * (1 - share) * (1 / n + 1 / m)) if 0 < share < 1 else math.nan
    if not most - now > ERRORS * error:
        return ""
    return _worse(now, most, (most - now) / error)


def _worse(now: float, best: float, errors: float, how: str = "") -> str:
    return (
        f"validation succeeds in {now:.0%}, and did in {best:.0%}: {errors:.1f} standard errors "
        f"less{how} (limit {ERRORS:g})"
    )


def _outruns_data(h: History, facts: RunFacts) -> str:
    made, steps, limit = h.mean("update", 1), h.mean("step", 1), max(UPDATES_PER_STEP, 1.5 * facts.update_to_data)
    if not steps or not made / steps > limit:
        return ""
    return f"{made:,.0f} updates were made for {steps:,.0f} online steps, {made / steps:.0f} for each (limit {limit:g})"


def _not_finite(h: History, facts: RunFacts) -> str:
    name = "skipped_updates" if facts.job == "hil" else "skipped_steps"
    # of the learner it is a running total
    now = h.mean(name, 1) - (2 * h.mean(name, 2) - h.mean(name, 1) if facts.job == "hil" else 0.0)
    return f"{now:.0f} steps of the optimizer were left out: a loss or a gradient was not finite" if now > 0 else ""


class Alarm(NamedTuple):
    """One row of the table."""

    name: str
    jobs: tuple[str, ...]
    figures: tuple[str, ...]
    """It looks when a record has one of these"""
    look: Callable[[History, RunFacts], str]
    cure: str
    needs: tuple[str, Callable[[RunFacts], bool]] = ("", lambda facts: True)
    """Settings without which it is never raised, in words, and whether they are there"""


_GROUPS = ("algorithm=mixed", lambda facts: facts.job == "vla" or facts.groups)

TABLE = (
    Alarm("ppo_kl", ("vla", "hil"), ("ppo_kl",), _moved_far,
          "Lower optimizer.learning_rate or algorithm.epochs, or give algorithm.target_kl; with a person lower "
          "agent.options.learning_rate or mixed.max_age.", _GROUPS),
    Alarm("clip_fraction", ("vla", "hil"), ("clip_fraction",), _clips,
          "Lower optimizer.learning_rate or algorithm.epochs, or give larger steps "
          "(algorithm.batch.trajectories_per_step); with a person lower agent.options.learning_rate or mixed.max_age.",
          _GROUPS),
    Alarm("entropy", ("vla", "hil"), ("entropy",), _narrowed,
          "It explores no more: give algorithm.entropy, algorithm.kl or a lower learning rate; with a person "
          "agent.rlpd.target_entropy.",
          ("algorithm=rlpd", lambda facts: facts.rlpd)),
    Alarm("explained_variance", ("vla",), ("explained_variance",), _critic_blind,
          "The critic does harm: give it a higher rate (critic), critic.warmup_steps, or an estimator without a "
          "critic (grpo).",
          ("algorithm.estimator=gae", lambda facts: facts.gae)),
    Alarm("no_signal", ("vla", "hil"), ("groups",), _no_signal,
          "If they fail, begin with a better policy or easier states; if they succeed, end the run, or give harder "
          "states.",
          ("an estimator of groups and rewards of success alone; with a person algorithm=mixed",
           lambda facts: facts.compares and _GROUPS[1](facts))),
    Alarm("q_bound", ("hil",), ("q_max",), _beyond_bounds,
          "The critics diverge: lower agent.rlpd.learning_rate or tau, give more critics, or agent.rlpd.target_range.",
          ("algorithm=rlpd, a discount below 1, backup_entropy=false",
           lambda facts: facts.rlpd and not facts.entropy_in_q and (facts.discount < 1 or facts.q_range is not None))),
    Alarm("overestimation", ("hil",), ("realized_q",), _overestimates,
          "The critics believe in what does not happen: lower update_to_data, give more critics with "
          "agent.rlpd.subset=2, or actor_q=min.",
          ("algorithm=rlpd, backup_entropy=false", lambda facts: facts.rlpd and not facts.entropy_in_q)),
    Alarm("validation", ("vla", "hil"), ("validation_success",), _got_worse,
          "It got worse: RUN/best or an earlier checkpoint is better. Resume with a lower learning rate, or end "
          "the run.",
          ("validations (validation.period, goal.success)", lambda facts: facts.validates)),
    Alarm("update_to_data", ("hil",), ("q",), _outruns_data,
          "The learner repeats what it has: give update_to_data=4, or look why no steps come.",
          ("algorithm=rlpd", lambda facts: facts.rlpd)),
    Alarm("not_finite", ("vla", "hil"), ("skipped_steps", "skipped_updates"), _not_finite,
          "Lower the learning rate; look for numbers that are not finite in rewards and observations."),
)  # fmt: skip


class AlarmChange(NamedTuple):
    """An alarm that was raised, or is over."""

    name: str
    raised: bool
    text: str
    """The sentence and the cure, or that it is over"""


class Alarms:
    """The alarms of one run, fed with its records."""

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._histories = {alarm.name: History() for alarm in table(facts)}
        self.on: dict[str, str] = {}
        """Those that are raised now, with their texts"""

    def take(self, record: Record) -> list[AlarmChange]:
        """Takes in a record of the metrics, and returns the alarms that it raises or ends."""
        changes = []
        for alarm in table(self._facts):
            history = self._histories[alarm.name]
            history.add(record)
            if not any(name in record for name in alarm.figures):
                continue
            if found := alarm.look(history, self._facts):
                if alarm.name not in self.on:
                    changes.append(AlarmChange(alarm.name, True, f"alarm {alarm.name}: {found}. {alarm.cure}"))
                self.on[alarm.name] = f"{alarm.name}: {found}. {alarm.cure}"
            elif self.on.pop(alarm.name, None):
                changes.append(AlarmChange(alarm.name, False, f"alarm {alarm.name} is over"))
        return changes

    def forget(self, name: str) -> None:
        """Clears an alarm that ended the run, so that it is raised anew after a resume."""
        self._histories[name] = History()


def table(facts: RunFacts) -> list[Alarm]:
    """The alarms that a run with these settings can raise."""
    return [alarm for alarm in TABLE if facts.job in alarm.jobs and alarm.needs[1](facts)]


def check_stop_on(names: Iterable[str], facts: RunFacts) -> None:
    """Refuses names that are no alarms of this job, and alarms that would never be raised."""
    problems, known = Problems(), {alarm.name: alarm for alarm in TABLE if facts.job in alarm.jobs}
    for name in names:
        with problems.collected():
            if name not in known:
                raise UnknownNameError("alarm", name, known, setting="stop_on")
            needed, there = known[name].needs
            if not there(facts):
                raise ConfigError(f"stop_on={name} would do nothing: it needs {needed}. Give that, or leave it out.")
    problems.report()


class AlarmWatch:
    """Watches a run: its alarms are shown to the user, and written into metrics.jsonl as events and into run.json."""

    def __init__(
        self, run: Path, facts: RunFacts, metrics: Metrics, notify: Callable[[str], None], stop_on: Iterable[str] = ()
    ):
        self._run_file, self._metrics, self._notify, self._stop_on = run / "run.json", metrics, notify, set(stop_on)
        self.alarms = Alarms(facts)
        for record in read_metrics(run, ["update", "event"]):  # of a run that goes on
            if record["kind"] == "update":
                self.alarms.take(record)
            elif record.get("stops"):
                self.alarms.forget(record["alarm"])
        self.alarms.on.clear()  # conditions that still hold are reported again

    def take(self, values: Record, *, update: int, step: int) -> str:
        """Takes the record of an update; returns the text of an alarm that ends the run, else nothing."""
        ends = ""
        for change in self.alarms.take({**values, "update": update, "step": step}):
            stops = change.raised and change.name in self._stop_on and not ends
            event: dict[str, Value] = {"event": change.text, "alarm": change.name, "stops": stops}
            event[f"alarm/{change.name}"] = float(change.raised)
            self._metrics.write("event", event, update=update, step=step)
            self._notify(change.text)
            if change.raised and self._run_file.is_file():
                metadata = read_json(self._run_file)
                raised = {"name": change.name, "update": update, "text": change.text}
                write_json(self._run_file, {**metadata, "alarms": [*metadata.get("alarms", []), raised]})
            ends = change.text if stops else ends
        return ends


def stopped(text: str, run: Path) -> AlarmError:
    """The error with which a run ends that `stop_on` ends."""
    kept = f" The policy so far is in {run / 'policy'}." * (run / "policy").is_dir()
    return AlarmError(
        f"{text} It was ended because stop_on names this alarm; hilt train --run {run} "
        f"--resume goes on from here.{kept}"
    )
