"""Groups of simulated episodes, from which a vision-language-action policy learns beside imitation:
``algorithm=mixed``.

Actors with ``--simulation`` play each initial state `group_size` times with sampled actions, and their steps go into
the run's log as all others do, with the record of each decision. Every `period`-th update takes the oldest complete
groups from the log, and adds the gradient of the clipped surrogate of `hilt.algos.surrogate`, with the advantages of
`hilt.algos.advantage`, to that of imitation:

    loss = imitation + weight * mean over episodes of the mean surrogate of their numbers

Each group is learned from once, or dropped and counted: where more versions of the weights than `max_age` were
published since its oldest action, or where a member has no end. A group whose members all succeeded, or all failed,
has advantages of 0: it counts as one of the update's groups and adds no gradient.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hilt.algos.advantage import advantages
from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import terms, weights
from hilt.algos.tables import policy_loss
from hilt.core.errors import ConfigError
from hilt.core.tree import Array, unflatten
from hilt.envs.env_protocol import HasSpaces
from hilt.hil.config import CHUNK, CHUNK_INDEX, DECIDED, GROUP, MEMBER, MIXED, RECORD, TASK_COLUMN, Hil, Mixed
from hilt.hil.data import Experience
from hilt.hil.environment import simulated, spaces
from hilt.hil.make_agent import instructions_of
from hilt.policies.base import Policy, Record, join, rejoin, select
from hilt.replay.snapshot import Snapshot

ROWS_PER_PASS = 64
"""Decisions that go through the policy together; the gradient is the same with fewer"""
LOOK_INTERVAL_S = 0.05
"""Seconds between two looks at the log while the learner waits for groups"""
FACTS = ("succeed", "terminated", "truncated", "policy_version", DECIDED, CHUNK, CHUNK_INDEX)


@dataclass
class GroupBatch:
    """The decisions of whole groups, one after the other: R of them, in E episodes."""

    rows: list[Any]
    """The observation of each, as the policy takes it"""
    drawn: Record
    """What was drawn for each: `hilt.policies.base.drawn_fields`"""
    executed: Array
    """int64 [R]: the number of actions of each chunk that were executed"""
    of: Array
    """int64 [R]: whose"""
    success: Array
    """bool [E]"""
    group: Array
    """int64 [E]"""


def policy_gradient(mixed: Mixed) -> PolicyGradient:
    """The settings of the surrogate and its advantages."""
    return PolicyGradient(mixed.estimator, clip_low=mixed.clip_low, clip_high=mixed.clip_high)


def add_gradient(policy: Policy, batch: GroupBatch, settings: PolicyGradient, weight: float) -> dict[str, float]:
    """Adds the gradient of the surrogate loss of these groups, times `weight`; gives figures. Groups without signal
    count in the mean over episodes and are not evaluated."""
    of, old = torch.from_numpy(batch.of), torch.from_numpy(batch.drawn["log_prob"])
    at = torch.cat([torch.arange(int(n)) for n in torch.bincount(of, minlength=len(batch.success))])
    there = torch.zeros(len(batch.success), int(at.max()) + 1, dtype=torch.float64)
    there[of, at] = 1.0
    rewards = torch.zeros_like(there)  # 1 for success, with the last chunk
    rewards[torch.arange(len(there)), there.sum(1).long() - 1] = torch.from_numpy(batch.success).double()
    worth = advantages(settings, rewards, there, torch.from_numpy(batch.group))[0][of, at].float()
    done = torch.arange(old.shape[1]) < torch.from_numpy(batch.executed)[:, None]
    mask = done[..., None] & torch.isfinite(old)
    before, counted = terms(old, mask, settings.ratio)
    counts = counted.flatten(1).sum(1).float()
    share = weights(settings.reduction, counts, of, float(counts.sum()), len(there), settings.horizon)
    learned = torch.nonzero(worth != 0)[:, 0]
    sums, all_terms = Counter[str](), float(counts[learned].sum())
    for part in learned.split(ROWS_PER_PASS) if len(learned) else ():
        record = rejoin(policy, [batch.rows[row] for row in part.tolist()], select(batch.drawn, part.numpy()))
        policy.train()
        seen = policy.evaluate(record)
        policy.eval()
        device = seen.log_prob.device
        log_prob, inside = terms(seen.log_prob, mask[part].to(device), settings.ratio)
        change = log_prob - before[part].to(device)
        advantage = worth[part].to(device).view(-1, *(1,) * (change.dim() - 1)).expand_as(change)
        each, shown = policy_loss(settings.loss).terms(change, advantage, settings)
        loss = (torch.where(inside, each, 0.0).flatten(1).sum(1) * share[part].to(device)).sum()
        (weight * loss).backward()
        sums["groups/loss"] += loss.item()
        for name, value in {"ppo_kl": -change, "groups/entropy": seen.entropy, **shown}.items():
            sums[name] += torch.where(inside, value.detach(), 0.0).sum().item() / all_terms
    return dict(sums)


@dataclass
class _Group:
    """A group that nothing was decided about yet."""

    actor: str
    members: dict[int, list[int]] = field(default_factory=dict)
    """The trajectories of each member; the log has several of an episode during which the learner was restarted"""
    keys: list[Array] = field(default_factory=list)
    """The steps of each member, when all of them have ended"""
    success: list[bool] = field(default_factory=list)
    version: int = -1
    """The oldest version of the weights that acted in it"""

    @property
    def complete(self) -> bool:
        return bool(self.keys)


class Groups:
    """The groups in the log of a run, and what was decided about each. `agent` is a `hilt.hil.vla_agent.VlaAgent`;
    `versions`: the update that each version of the weights was published after, as the learner keeps it."""

    def __init__(self, config: Hil, experience: Experience, agent: Any, env: HasSpaces, versions: dict[int, int]):
        self.settings: Mixed = config.mixed
        if "log_prob" not in agent.step_columns().get(RECORD, {}):
            raise ConfigError(
                f"algorithm=mixed: the policy in {agent.options.policy} records no log-probabilities of what it does, "
                "which groups of episodes need. Give algorithm=hg-dagger, or another policy, such as a small_vla."
            )
        assert experience.groups is not None
        self._log, self._view, self._agent, self._versions = experience.log, experience.groups, agent, versions
        self._words = instructions_of(spaces(simulated(config)) if config.mixed.task else env)
        experience.group_instructions = self._words
        self._gradient = policy_gradient(config.mixed)
        self._batch_size = config.batch_size
        self._known: dict[int, int] = {}  # the group of each trajectory
        self._open: dict[int, _Group] = {}
        self._decided: set[int] = set()
        self._totals = Counter[str]()
        self._since = Counter[str]()  # the last line of metrics
        self._shown: dict[str, float] = {}
        self._looked = 0.0
        self.waiting = 0
        """Complete groups that are not too old and were not learned from yet"""

    # Finding them

    def look(self) -> None:
        """Takes in what has arrived."""
        with self._log.lock:
            reading, there = self._log.reading(), self._view.trajectories()
        with reading as steps:
            if new := [number for number in there if number not in self._known]:
                self._take_in(steps, new)
            self._known = {number: self._known[number] for number in there}
            ended = set(steps.ended_trajectories())
            newest = {group.actor: number for number, group in self._open.items()}
            for number, group in list(self._open.items()):
                if not self._goes_on(steps, group, ended, newest[group.actor] == number):
                    self._decide(number, "interrupted")
        for number, group in list(self._open.items()):
            if group.complete and self._age(group.version) > self.settings.max_age:
                self._decide(number, "too_old")
        self.waiting = sum(group.complete for group in self._open.values())
        self._looked = time.monotonic()

    def _goes_on(self, steps: Snapshot, group: _Group, ended: set[int], newest: bool) -> bool:
        """Whether a group is complete, or may still become so. `newest`: its actor plays no other one yet."""
        if group.complete:
            return bool(steps.exist(np.concatenate(group.keys)).all())  # else steps were evicted since
        whole = len(group.members) == self.settings.group_size
        if whole and all(trajectories[-1] in ended for trajectories in group.members.values()):
            return self._complete(steps, group)
        return newest

    def _take_in(self, steps: Snapshot, trajectories: Sequence[int]) -> None:
        senders = steps.senders()
        first = np.array([steps.trajectory(number)[0] for number in trajectories])
        columns = steps.gather(first, [GROUP, MEMBER])
        for number, group, member in zip(trajectories, columns[GROUP].tolist(), columns[MEMBER].tolist(), strict=True):
            self._known[number] = group
            if group not in self._decided:
                found = self._open.setdefault(group, _Group(senders[number][0]))
                found.members.setdefault(member, []).append(number)

    def _complete(self, steps: Snapshot, group: _Group) -> bool:
        """Reads how the members of a group ended. False if steps of one are missing, evicted or hidden by an edit."""
        keys, successes, versions = [], [], []
        for _, trajectories in sorted(group.members.items()):
            if not set(trajectories) <= self._known.keys():
                return False
            member = np.concatenate([steps.trajectory(number) for number in trajectories])
            facts, sequence = steps.gather(member, list(FACTS)), steps.sequences(member)
            ends, decided = facts["terminated"] | facts["truncated"], facts[DECIDED] >= 0
            begins = facts[CHUNK][0] == facts[CHUNK_INDEX][0] == facts[DECIDED][0] == 0
            if not begins or (np.diff(sequence) != 1).any() or ends[:-1].any() or not ends[-1]:
                return False
            keys.append(member)
            successes.append(bool(facts["succeed"].any()))
            versions.append(int(facts["policy_version"][decided].min()))
        group.keys, group.success, group.version = keys, successes, min(versions)
        return True

    def _age(self, version: int) -> float:
        """The number of versions that were published after this one; of one that no checkpoint knows, infinity."""
        if version not in self._versions:
            return math.inf
        return len({update for update in self._versions.values() if update > self._versions[version]})

    def _decide(self, number: int, what: str) -> None:
        del self._open[number]
        self._decided.add(number)
        self._totals[what] += 1

    # Learning from them

    def _due(self, update: int) -> bool:
        return update % self.settings.period == 0

    def must_wait(self, update: int) -> str:
        """What has to come before this update; empty when it may be made."""
        if not self._due(update):
            return ""
        if self.waiting >= self.settings.groups or time.monotonic() - self._looked >= LOOK_INTERVAL_S:
            self.look()  # what is too old by now is dropped
        if self.waiting >= self.settings.groups:
            return ""
        wanted = f"{self.settings.groups} groups of {self.settings.group_size} episodes"
        return f"{self.waiting} of {wanted} are complete, from simulations (hilt actor --simulation)"

    def learn(self, update: int, policy: Policy) -> dict[str, float]:
        """Adds the gradient of this update's groups, if it has some; see `add_gradient`."""
        self._since["imitated"] += self._batch_size
        if not self._due(update):
            return {}
        with self._log.reading() as steps:
            there = [
                number
                for number, group in self._open.items()
                if group.complete and steps.exist(np.concatenate(group.keys)).all()
            ]
            chosen = there[: self.settings.groups]
            if not chosen:
                return {}
            batch = self._read(steps, [self._open[number] for number in chosen])
        for number in chosen:
            success = self._open[number].success
            self._since["groups"] += 1
            self._since["groups_all_succeeded"] += all(success)
            self._since["groups_all_failed"] += not any(success)
            self._decide(number, "used" if any(success) and not all(success) else "no_signal")
        self.waiting -= len(chosen)
        self._since["decisions"] += len(batch.rows)
        self._since["episodes"] += len(batch.success)
        self._since["successes"] += int(batch.success.sum())
        self._shown = add_gradient(policy, batch, self._gradient, self.settings.weight)
        return {}

    def _read(self, steps: Snapshot, groups: Sequence[_Group]) -> GroupBatch:
        """The decisions of these groups."""
        parts, success, numbers = list[tuple[Record, Array, int]](), list[bool](), list[int]()
        rows, columns = list[Any](), steps.schema.columns
        observed = [f"observations/{path}" for path in (*self._agent.image_paths, *self._agent.proprio)]
        recorded = [path for path in columns if path.startswith(f"{RECORD}/")]
        for number, group in enumerate(groups):
            for keys, succeeded in zip(group.keys, group.success, strict=True):
                facts = steps.gather(keys, [DECIDED, CHUNK])
                at = np.flatnonzero(facts[DECIDED] >= 0)
                seen = keys[at - facts[DECIDED][at]]
                tasks = steps.gather(seen, [TASK_COLUMN])[TASK_COLUMN] if TASK_COLUMN in columns else [0] * len(at)
                views = unflatten(steps.gather(seen, observed))["observations"]
                rows += self._agent.observed(views, tasks, self._words)
                drawn = {path.partition("/")[2]: array for path, array in steps.gather(keys[at], recorded).items()}
                executed = np.array([(facts[CHUNK] == chunk).sum() for chunk in facts[CHUNK][at]])
                parts.append((drawn, executed, len(at)))
                success.append(succeeded)
                numbers.append(number)
        return GroupBatch(
            rows,
            join([drawn for drawn, _, _ in parts]),
            np.concatenate([executed for _, executed, _ in parts]),
            np.repeat(np.arange(len(parts)), [count for _, _, count in parts]),
            np.array(success),
            np.array(numbers),
        )

    # Telling and keeping

    def figures(self) -> dict[str, float]:
        """Since the last line of metrics, and in all; see docs/person-and-groups.md."""
        since, self._since = self._since, Counter()
        shown, self._shown = self._shown, {}
        rows = since["decisions"] + since["imitated"]
        figures = {"share/groups": since["decisions"] / rows if rows else 0.0}
        if since["groups"]:
            figures |= {name: float(since[name]) for name in ("groups", "groups_all_succeeded", "groups_all_failed")}
            figures["groups/success"] = since["successes"] / since["episodes"]
        totals = {
            f"groups/{name}": float(self._totals[name]) for name in ("used", "no_signal", "too_old", "interrupted")
        }
        return {**shown, **figures, **totals}

    def state(self) -> dict[str, object]:
        """What was decided, which the log does not tell; and the versions of the weights, by which ages are counted."""
        self._decided &= set(self._known.values())  # what the log has no longer does not come back
        return {
            "decided": sorted(self._decided),
            "versions": [list(pair) for pair in self._versions.items()],
            "totals": dict(self._totals),
            "since": dict(self._since),
            "shown": dict(self._shown),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._decided = set(state["decided"])
        self._versions.update({version: update for version, update in state["versions"]})
        self._totals, self._since = Counter(state["totals"]), Counter(state["since"])
        self._shown = dict(state["shown"])
        self._open = {number: group for number, group in self._open.items() if number not in self._decided}


def groups_of(
    config: Hil, experience: Experience, agent: object, env: HasSpaces, versions: dict[int, int]
) -> Groups | None:
    """The groups of a run with algorithm=mixed; None of another one."""
    return Groups(config, experience, agent, env, versions) if config.algorithm == MIXED else None
