"""Alarms: what goes wrong in a run, in a sentence with its cure, from the figures that the run writes anyway.

    alarms = Alarms(Facts("vla", gae=True))
    for change in alarms.take({"ppo_kl": 0.4}):      # after each record of metrics of the kind "update"
        print(change.text)

`TABLE` has all of them, for each job: "hil", a run with a person in the loop, "vla", post-training, "sft", supervised
fine-tuning, and "classifier" and "value", the trainings of a reward classifier and of a value model. An
alarm is raised when its condition becomes true, and over when it no longer is. Conditions look at means
over several records, so that one bad batch raises none. The limits are rules of thumb, each far outside of
what healthy runs show; docs/alarms.md lists them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hilt.core.errors import ConfigError, Problems, UnknownNameError
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
CONDITION_LOOKS = 5
"""Looks after which a policy has had the time to learn what its condition means"""
LOSS_BACK = 0.5
"""Of what a held-out loss fell by since the first validation, or of its lowest value, the share by which it may be
above that again"""
LOSS_RISE = 0.05
"""By how much a held-out loss may rise however low it is: shares of a loss near 0, or one that may be below 0, say
little; of normalized actions and of nats this is little, too"""
UPDATES_PER_STEP = 20.0
"""Learner steps for each online step"""
REFERENCE_KL = 2.0
"""Nats of each number that the policy may be away from its reference"""
POLICY_KL = 20.0
"""Nats of each number by which the policy of a run with a person may change between two looks at its networks"""
IMITATION_KL = 3.0
"""The same of fine-tuning: a healthy small_vla changes by less than 0.5 (tokens, Gaussian and flow), and one with a
learning rate of 1 by 2 to 9"""
DEAD = 0.5
"""Share of the ReLUs that may be 0 for a whole batch"""
RANK_LEFT = 0.1
"""Of the effective rank of the features at the start, this share must be left"""
WEIGHTS_AGE_S, WEIGHTS_AGE_STEPS = 60.0, 4.0
"""Seconds for which newer weights may be there that an actor does not act with; training steps between the weights
that collected an episode and those that learn from it"""
CONDITIONED = {
    "sft": ("validation_loss", "validation_loss_of_wrong_condition"),
    "hil": ("imitation/conditioned_loss", "imitation/loss_of_wrong_condition"),
}
"""The figures of the loss with the right condition and with the wrong one"""
HOPELESS = 0.9
"""Share of the last episodes that the value model may end as hopeless"""
VALUE_ERROR = 0.4
"""By how much the value model's probability of success may differ from the share of successes"""
CONSTANT = 0.01
"""Probabilities of success on held-out data that are no further apart than this are all the same"""
CHANCE = 0.5
"""The AUC of a model that ranks no better than chance"""
MINUTES = ("classifier", "value")
"""Trainings that take minutes, and are no runs"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """The settings of a run that alarms depend on."""

    job: str
    """"hil", "vla", "sft", "classifier" or "value" """
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
    reference: bool = False
    """Whether the policy is compared with a reference"""
    measured: bool = True
    """Whether the networks are looked at: `hilt.policies.plasticity`"""
    imitates_chunks: bool = False
    """Whether a run with a person trains a policy that answers with chunks"""
    moves: bool = True
    """Whether it is measured how far the policy moves between two looks"""
    relus: bool = True
    """Whether networks that are trained have ReLUs"""
    conditioned: bool = False
    """Whether the policy is told which actions were good, and the loss of the opposite is measured"""
    value_model: bool = False
    """Whether a value model looks at the episodes"""


class History:
    """The last values of each figure; what is not a finite number is left out, and only its name is kept."""

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
        self.not_finite: set[str] = set()
        """Figures that were no finite number when they came last; metrics.jsonl has null for these"""

    def add(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.last[name] = value
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                self.not_finite.add(name)
            else:
                self.not_finite.discard(name)
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
    if facts.job == "hil" and facts.rlpd:
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
    if facts.job == "vla":
        return _overvalues(h)
    q, realized = h.mean("q/online", 5), h.mean("realized_q", 5)
    size = max(abs(h.low.get("reward_min", 0.0)), abs(h.high.get("reward_max", 0.0)), abs(realized))
    if not size or not q - realized > OVER * size:
        return ""
    return (
        f"Q is {q:.3g} on the average, and the last episodes realized {realized:.3g} (limit "
        f"{realized + OVER * size:.3g})"
    )


def _overvalues(h: History) -> str:
    """The same for the critic of post-training."""
    value, realized = h.mean("value", 5), h.mean("realized_return", 5)
    size = max(abs(h.low.get("realized_return", 0.0)), abs(h.high.get("realized_return", 0.0)))
    if not size or not value - realized > OVER * size:
        return ""
    return (
        f"the critic expects {value:.3g} on the average, and the episodes realized {realized:.3g} (mean of 5 "
        f"updates; limit {realized + OVER * size:.3g})"
    )


def _left_reference(h: History, facts: RunFacts) -> str:
    kl = h.mean("kl", 3)
    if not kl > REFERENCE_KL:
        return ""
    return f"each number is {kl:.3g} nats from the reference (kl, mean of 3 updates; limit {REFERENCE_KL:g})"


def _jumped(h: History, facts: RunFacts) -> str:
    kl, limit = h.mean("policy_kl", 3), IMITATION_KL if _imitates(facts) else POLICY_KL
    if not kl > limit:
        return ""
    return f"each number of the policy moves {kl:.3g} nats between two looks (policy_kl, 3 looks; limit {limit:g})"


def _dead(h: History, facts: RunFacts) -> str:
    share = h.mean("dead_relus", 3)
    return f"{share:.0%} of the ReLUs are 0 for a whole batch (3 looks; limit {DEAD:.0%})" if share > DEAD else ""


def _lost_rank(h: History, facts: RunFacts) -> str:
    start, now = h.first("effective_rank", 3), h.mean("effective_rank", 3)
    if h.count.get("effective_rank", 0) < 6 or not now < RANK_LEFT * start:
        return ""
    limit = RANK_LEFT * start
    return f"the effective rank of the features fell from {start:.3g} to {now:.3g} (3 looks; limit {limit:.3g})"


def _stale(h: History, facts: RunFacts) -> str:
    if facts.job == "vla":
        age = h.mean("weights_age", 3)
        return (
            f"the episodes are by weights of {age:.3g} training steps before (mean of 3 updates; limit "
            f"{WEIGHTS_AGE_STEPS:g})"
            if age > WEIGHTS_AGE_STEPS
            else ""
        )
    age = h.mean("weights_age", 1)
    return (
        f"an actor acts with weights that were replaced {age:.0f} s ago (limit {WEIGHTS_AGE_S:g} s)"
        if age > WEIGHTS_AGE_S
        else ""
    )


def _misjudges(h: History, facts: RunFacts) -> str:
    if (share := h.mean("value_hopeless", 1)) > HOPELESS:
        return f"the value model ends {share:.0%} of the last episodes as hopeless (limit {HOPELESS:.0%})"
    expected, came = h.mean("value_expected", 1), h.mean("value_realized", 1)
    if not abs(expected - came) > VALUE_ERROR:
        return ""
    return (
        f"the value model expects success with {expected:.0%}, and the last episodes succeeded in {came:.0%} (limit: "
        f"{100 * VALUE_ERROR:.0f} points apart)"
    )


def _ignores_condition(h: History, facts: RunFacts) -> str:
    right_name, wrong_name = CONDITIONED[facts.job]
    right, wrong = h.mean(right_name, 3), h.mean(wrong_name, 3)
    if h.count.get(wrong_name, 0) < CONDITION_LOOKS or not wrong <= right:
        return ""
    return f"the loss is {right:.3g}, and {wrong:.3g} with good and bad exchanged, which should be higher (3 looks)"


def _got_worse(h: History, facts: RunFacts) -> str:
    """In pairs, where both validations tried the same states; else as if they were independent."""
    if facts.job in ("sft", *MINUTES):
        return _loss_rose(h, facts)
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


def _loss_rose(h: History, facts: RunFacts) -> str:
    """The same for a loss on held-out episodes: all of them, with the same draws every time."""
    name = "validation_loss_mean" if facts.job in MINUTES else "validation_loss"
    first, now, best = h.first(name, 1), h.mean(name, 1), h.low.get(name, math.nan)
    limit = best + max(LOSS_BACK * max(first - best, abs(best)), LOSS_RISE)
    if not now > limit:
        return ""
    text = f"the held-out loss is {now:.3g}, and was {best:.3g} (limit {limit:.3g}"
    return (
        f"{text}, means of 3 looks); in training it is {h.mean('loss', 1):.3g}" if facts.job in MINUTES else f"{text})"
    )


def _ranks_nothing(h: History, facts: RunFacts) -> str:
    """At the end of a training, of data by which nothing was chosen."""
    if facts.job == "classifier":
        found, false = h.mean("held_out_recall", 1), h.mean("held_out_false", 1)
        text = f"it calls {found:.1%} of the held-out successes a success, and {false:.1%} of the failures"
        ranks = found > false
    else:
        auc, least = h.mean("held_out_auc", 1), h.mean("held_out_auc_low", 1)
        text = (
            f"half-way through held-out episodes it ranks no better than chance: AUC {auc:.3f} (95% interval from "
            f"{least:.3f}; limit {CHANCE:g})"
        )
        ranks = not least <= CHANCE
    low, high = h.mean("held_out_lowest", 1), h.mean("held_out_highest", 1)
    if high - low < CONSTANT:
        text = f"on held-out data it predicts a constant, a probability of success from {low:.3f} to {high:.3f}"
    return "" if ranks else text


def _outruns_data(h: History, facts: RunFacts) -> str:
    made, steps, limit = h.mean("update", 1), h.mean("step", 1), max(UPDATES_PER_STEP, 1.5 * facts.update_to_data)
    if not steps or not made / steps > limit:
        return ""
    return f"{made:,.0f} updates were made for {steps:,.0f} online steps, {made / steps:.0f} for each (limit {limit:g})"


def _not_finite(h: History, facts: RunFacts) -> str:
    if "validation_loss" in h.not_finite:
        return "the held-out loss is not a finite number"
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


def _imitates(facts: RunFacts) -> bool:
    return facts.job == "sft" or facts.imitates_chunks


_MEASURED = ("with a person agent.kind=actor_critic, frozen_vla or vla", lambda facts: facts.measured)
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
          "agent.rlpd.target_entropy, or with algorithm=mixed a lower mixed.weight.",
          ("algorithm=rlpd or mixed", lambda facts: facts.rlpd or facts.groups)),
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
    Alarm("overestimation", ("hil", "vla"), ("realized_q", "realized_return"), _overestimates,
          "The critics believe in what does not happen: lower update_to_data, give more critics with "
          "agent.rlpd.subset=2, or actor_q=min; in post-training give the critic a higher rate, or a warm-up "
          "(critic.warmup_steps).",
          ("algorithm=rlpd, backup_entropy=false; in post-training algorithm.estimator=gae",
           lambda facts: facts.gae if facts.job == "vla" else facts.rlpd and not facts.entropy_in_q)),
    Alarm("reference_kl", ("vla",), ("kl",), _left_reference,
          "It forgets what it knew: give a higher algorithm.kl.coefficient, or a lower optimizer.learning_rate.",
          ("algorithm.kl.where=loss or reward", lambda facts: facts.reference)),
    Alarm("policy_kl", ("hil", "sft"), ("policy_kl",), _jumped,
          "The policy jumps: lower the learning rate (agent.rlpd.learning_rate; of agent.kind=vla "
          "agent.options.learning_rate; in fine-tuning learning_rate, or give warmup_steps), or give more critics.",
          ("algorithm=rlpd with agent.kind=actor_critic or frozen_vla; agent.kind=vla, and in fine-tuning a policy "
           "with log-probabilities (not act), with recap.guidance=1",
           lambda facts: facts.moves and (_imitates(facts) or (facts.measured and facts.rlpd)))),
    Alarm("dead_relus", ("vla", "hil", "sft"), ("dead_relus",), _dead,
          "What is 0 everywhere learns nothing: lower the learning rate; with an actor and critics give "
          "agent.activation=tanh or agent.critic.reset_period; else begin anew from an earlier policy.",
          ("networks with ReLUs that are trained (agent.activation=relu, agent.critic.network=simba or bro, an encoder "
           "that is not frozen)", lambda facts: facts.measured and facts.relus)),
    Alarm("plasticity", ("vla", "hil", "sft"), ("effective_rank",), _lost_rank,
          "The features collapse, and what is new is hardly learned: lower the learning rate or update_to_data; with "
          "critics give agent.critic.reset_period or agent.critic.weight_decay.", _MEASURED),
    Alarm("stale_weights", ("vla", "hil"), ("weights_age",), _stale,
          "What is collected is not by the policy that learns: look at the network between actor and learner, and at "
          "the actor's log; in post-training lower collect.oversample_factor."),
    Alarm("value_model", ("hil", "vla"), ("value_hopeless", "value_expected"), _misjudges,
          "It knows other episodes than these: train it again with those of this run (hilt train value RUN), or lower "
          "value.stop_below and value.reward.",
          ("value.model", lambda facts: facts.value_model)),
    Alarm("condition", ("hil", "sft"), tuple(wrong for _, wrong in CONDITIONED.values()), _ignores_condition,
          "The policy makes nothing of its condition, or the labels are noise: look at how the value model ranks "
          "held-out episodes (AUC), give recap.condition=embedding, a lower recap.dropout or more steps, or another "
          "recap.threshold.",
          ("with a person algorithm=recap; in fine-tuning recap.threshold above 0 and validation",
           lambda facts: facts.conditioned)),
    Alarm("validation", ("vla", "hil", "sft", *MINUTES), ("validation_success", "validation_loss"), _got_worse,
          "It got worse: RUN/best or an earlier checkpoint is better. Resume with a lower learning rate, or end "
          "the run; a classifier or a value model needs more episodes, a higher dropout or fewer steps.",
          ("validations (validation.period, goal.success; in fine-tuning validation)", lambda facts: facts.validates)),
    Alarm("update_to_data", ("hil",), ("q",), _outruns_data,
          "The learner repeats what it has: give update_to_data=4, or look why no steps come.",
          ("algorithm=rlpd", lambda facts: facts.rlpd)),
    Alarm("ranking", MINUTES, ("held_out_highest",), _ranks_nothing,
          "Do not use it: look for wrong labels, and give more episodes of both outcomes; of a classifier look at "
          "mistakes.png, and of a constant lower the learning rate."),
    Alarm("not_finite", ("vla", "hil", "sft", *MINUTES), ("skipped_steps", "skipped_updates", "validation_loss"),
          _not_finite, "Lower the learning rate; look for numbers that are not finite in rewards and observations."),
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
