"""Collection: the episodes of one training step of one rank, exactly as many as were asked for, in groups.

    collector = Collector(Collecting(group_size=8, data_batch_size=64), ["tabletop/pick"], pool, suite("tabletop"))
    episodes = collector.collect(policy, version=3).episodes      # 64; each 8 of them began alike

A *group* is `group_size` rollouts from one task and initial state; how its members ended is compared with one another.
Groups that teach nothing are dropped by filters, and others are rolled out in their place; what is rolled out beyond
the need is carried over to the next step, and so are the groups of a step for which no whole batch was found. The
members of a group share task, state and first frame, or `collect` raises: without that, comparing them means nothing.

Ranks do not communicate here. One without a task collects nothing, and returns figures with the same names.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.core.progress import Report, silent
from hilt.core.validate import Need, check, setting
from hilt.envs.pool import EpisodePool
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import Suite
from hilt.replay.tensors import as_tensor, generator
from hilt.value.rollout_watch import RolloutWatch
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start, pack, unpack
from hilt.vla.rollout import RolloutSettings, roll_out
from hilt.vla.tally import Tally
from hilt.vla.tasks import MODES, Agenda, Solved

T = TypeVar("T")
CHOOSING = (
    "group_size", "data_batch_size", "split", "states_per_task", "init_state_mode", "tasks_per_step", "groups_at_once",
    "oversample_factor", "idle_ranks", "skip_solved",
)  # fmt: skip
"""Settings that choose where episodes begin"""
WAIT_INTERVAL_S = 0.5
"""Seconds between two reports while a collection in another thread is waited for"""
Roll = Callable[..., Iterator[RolloutEpisode | LostEpisode]]
"""`roll_out` with all but the starts and the settings"""


_GROUPS = Need("a {here}group_size of at least 2", lambda c: c.group_size > 1)
_BY_ACCURACY = Need("{here}filter_accuracy=true", lambda c: c.filter_accuracy)
_SURPLUS = Need(
    "{here}oversample_factor above 1 or {here}groups_at_once, without which there is no surplus",
    lambda c: c.groups_at_once or c.oversample_factor > 1 or c.data_batch_size % max(1, c.group_size),
)


@dataclass
class Collecting:
    """How the episodes of a training step are collected, at each rank."""

    group_size: int = setting(8, minimum=1)
    """Rollouts from one initial state (rloo_batch_size, n_samples)"""
    data_batch_size: int = setting(64, minimum=1)
    """Number of episodes of a training step at each rank that has work. Where it is no multiple of
    group_size, the last group is rolled out whole, and the members beyond the number are learned from in the
    next step; each is compared with its whole group"""
    temperature: float = setting(1.0, above=0)
    """Of the policy's draws"""
    drawn_share: float = setting(1.0, above=0, maximum=1)
    """The share of the decisions that are drawn. The others, chosen by chance, are the most likely ones and are not
    learned from: fewer draws leave more episodes that succeed, and fewer decisions by which an episode can differ"""
    execute: int = setting(0, minimum=0)
    """Actions of each chunk that are carried out; 0: all"""
    split: str = "train"
    """Whose initial states; validation has another split"""
    states_per_task: int = setting(0, minimum=0)
    """The number of initial states of each task, from the first on; 0: all of the split"""
    init_state_mode: str = setting("group", choices=MODES, needs=_GROUPS)
    """ "group": one initial state for all members; "distinct": the next one for each
    member, so that they differ in difficulty"""
    tasks_per_step: int = setting(0, minimum=0)
    """Tasks of a rank that one training step works on, the next step on the next
    ones; 0: on all, group by group in turn"""
    groups_at_once: int = setting(0, minimum=0)
    """Groups that are drawn at a time, which is one attempt (num_parallel_envs); 0: as many as are missing"""
    oversample_factor: float = setting(
        1.0, minimum=1, needs=Need("{here}groups_at_once=0", lambda c: not c.groups_at_once)
    )
    """The number of drawn groups relative to the missing ones, so that filters leave enough"""
    carry_over: bool = setting(True, needs=_SURPLUS)
    """Groups beyond the need are learned from in the next step; otherwise they are thrown away"""
    filter_accuracy: bool = setting(
        False, needs=Need("a bound", lambda c: (c.accuracy_lower_bound, c.accuracy_upper_bound) != (0, 1))
    )
    """Groups are dropped whose share of successes is outside the bounds"""
    accuracy_lower_bound: float = setting(0.0, minimum=0, maximum=1, needs=_BY_ACCURACY)
    """A share that is kept"""
    accuracy_upper_bound: float = setting(1.0, minimum=0, maximum=1, needs=_BY_ACCURACY)
    """A share that is kept"""
    filter_truncated: bool = False
    """Groups are dropped of which a member came to the step limit"""
    filter_format: bool = True
    """Groups are dropped of which a member has an ill-formed chunk: a number that is not finite, a token outside the
    action range, or the policy raised. Otherwise such a token is carried out, a number that is not finite is a
    failure, and what the policy raises is raised"""
    dynamic_sampling: bool = setting(False, needs=_GROUPS)
    """Groups are dropped whose members all succeeded or all failed: they have no advantage"""
    max_sampling_attempts: int = setting(10, minimum=1)
    """Draws of a training step, at most. One whose rollouts failed counts too"""
    when_exhausted: str = setting("continue", choices=("error", "continue", "partial"))
    """When they found fewer groups than a batch: "continue", the groups wait for the next step, which draws what is
    missing; "partial", the step learns from those that were found; or "error" """
    idle_ranks: str = setting("zero", choices=("zero", "steal"))
    """A rank for which no task is left: "zero" weight, or it will "steal" a share
    of the states of another rank's task"""
    skip_solved: bool = False
    """A state whose last `group_size` rollouts all succeeded is passed over, three times at most (RIPT)"""
    same_first_frame: bool = setting(
        True, needs=Need("{here}init_state_mode=group", lambda c: c.init_state_mode == "group")
    )
    """The members of a group must begin with the same observation, bit for bit. Off: for a
    simulator that does not render alike twice"""
    prefetch: bool = setting(False, needs=Need("{here}ahead=0, with which they are rolled out", lambda c: not c.ahead))
    """The next step's first episodes are reset while the policy learns"""
    ahead: int = setting(0, minimum=0, maximum=1)
    """1: the next step's episodes are rolled out while the policy learns, by the weights from before that update, so
    that each step learns from episodes of one version earlier; 0: one after the other"""
    rows_at_once: int = setting(0, minimum=0)
    """Observations that go through the policy together; 0: those of half the slots"""
    report_ranks: bool = False
    """A line for each rank in each training step: its tasks, the number of episodes that it is to collect
    and has collected, or that it has no task"""
    retries: int = setting(1, minimum=0)
    """Times that an episode is begun again after its simulator failed, before it counts as lost"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self)

    def rollout_settings(self, *, sample: bool = True, strict: bool = False) -> RolloutSettings:
        each = (self.temperature, sample, self.execute, self.rows_at_once, self.retries, strict)
        return RolloutSettings(*each, drawn_share=self.drawn_share)

    def conflicts(self, here: str) -> Iterator[str]:
        most = self.groups_at_once * self.max_sampling_attempts
        wanted = math.ceil(self.data_batch_size / self.group_size)
        if 0 < most < wanted:
            yield (
                f"{here}groups_at_once={self.groups_at_once} in "
                f"max_sampling_attempts={self.max_sampling_attempts} are {most} groups, and "
                f"data_batch_size={self.data_batch_size} needs {wanted}: raise one of the two, or give "
                "groups_at_once=0 for all at once."
            )
        if self.accuracy_lower_bound > self.accuracy_upper_bound:
            yield (
                f"{here}accuracy_lower_bound={self.accuracy_lower_bound} is above "
                f"accuracy_upper_bound={self.accuracy_upper_bound}: expected lower <= upper."
            )


@dataclass
class Collected:
    """What a rank has for one training step."""

    episodes: list[RolloutEpisode] = field(default_factory=list)
    """Groups, member by member, one after the other: a whole batch, none where groups wait for the next step, or with
    when_exhausted=partial fewer. Only the first and the last group may lack members, which are in `beside`"""
    beside: list[RolloutEpisode] = field(default_factory=list)
    """Members of the first and the last group that the step before learned from, or
    the next one will: for comparison only"""
    greedy: dict[int, RolloutEpisode] = field(default_factory=dict)
    """Where it was asked for: by the number of a group, the episode of the likeliest actions
    from its initial state (ReMax's baseline)"""
    figures: dict[str, float] = field(default_factory=dict)
    report: str = ""
    """The figures in words"""
    stopped: bool = False
    """From outside: there are no episodes, and the collector is as it was before"""


class AheadCollection(Generic[T]):
    """The collection of a step in a thread of its own, beside the update from the step before."""

    def __init__(self, step: int, roll_out: Callable[[Callable[[], bool]], T], threads: ThreadPoolExecutor):
        """`roll_out` is given a function that tells whether its episodes are still wanted."""
        self.step, self._left = step, threading.Event()
        self._made = threads.submit(roll_out, self._left.is_set)

    def finish(self, waiting: Callable[[], None]) -> T:
        """Waits for the result of `roll_out` and returns it; `waiting` is called twice a second meanwhile."""
        while not wait([self._made], WAIT_INTERVAL_S).done:
            waiting()
        return self._made.result()

    def leave(self) -> None:
        """Stops it and returns when it has ended; its episodes are not used."""
        self._left.set()
        wait([self._made])


class Collector:
    """One rank's part of collection, over the pool that it has."""

    def __init__(
        self,
        config: Collecting,
        tasks: Sequence[str],
        pool: EpisodePool,
        suite: Suite,
        *,
        states: Mapping[str, int] | None = None,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        notify: Callable[[str], None] = lambda text: None,
        watch: RolloutWatch | None = None,
    ):
        """`states`: how many initial states each task has in the split; without it, the pool is asked. `watch`: a value
        model that looks at the episodes."""
        config.check()
        self._watch = watch
        self._config, self._pool, self._suite, self._rank, self._notify = config, pool, suite, rank, notify
        self.report: Report = silent
        solved, steal = (Solved(config.group_size) if config.skip_solved else None), config.idle_ranks == "steal"
        self.agenda = Agenda(
            tasks,
            lambda task: _states(
                config, pool.describe(task)["initial_states"] if states is None else {config.split: states[task]}, task
            ),
            rank=rank,
            ranks=ranks,
            steal=steal,
            split=config.split,
            mode=config.init_state_mode,
            tasks_at_once=config.tasks_per_step,
            seed=seed,
            solved=solved,
        )
        self._solved = solved
        self._draws = generator(int(np.random.SeedSequence([seed, rank, 1]).generate_state(1)[0]))
        self._surplus: list[list[RolloutEpisode]] = []
        self._taken = 0
        """Members of the first group of the surplus that were learned from already"""
        self._planned: list[Start] = []
        """Drawn for the next step already"""
        self._begun: dict[int, Start] = {}
        """Slots where these are being reset"""

    def collect(
        self,
        policy: Policy,
        version: int = 0,
        *,
        step: int | None = None,
        greedy: bool = False,
        keep: Callable[[RolloutEpisode], None] = lambda episode: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Collected:
        """The episodes of one training step: by default the one whose number is the `version` of the policy's weights.
        `keep` is called with every episode that ended, including those that are dropped or carried over."""
        if greedy and self._config.init_state_mode == "distinct":
            raise ConfigError("a greedy episode is of one initial state: it needs init_state_mode=group.")
        before = self.state_dict(store=lambda episode: {"": episode})
        tally = Tally(self._surplus, self._taken, self._solved)
        baselines: dict[int, RolloutEpisode] = {}
        try:
            given: dict[str, Any] = {"version": version, "stop": stop, "watch": self._watch}
            roll = partial(roll_out, policy, self._pool, suite=self._suite, **given)
            whole = self._collected(roll, tally, keep, baselines if greedy else None) if self.agenda.tasks else True
            if whole is None:
                self.load_state_dict(before, find=lambda held: held[""])
                return Collected(stopped=True)
            episodes, beside = self._shared_out() if whole or self._config.when_exhausted == "partial" else ([], [])
        except BaseException:
            self.load_state_dict(before, find=lambda held: held[""])
            raise
        if self._config.report_ranks:
            self._notify(self._line(version if step is None else step, episodes, tally))
        figures = tally.figures(episodes, self._surplus, self._solved)
        return Collected(episodes, beside, baselines, figures, tally.report())

    @property
    def _wanted(self) -> int:
        """Groups of a whole batch, the one included that the step before has begun."""
        return math.ceil((self._taken + self._config.data_batch_size) / self._config.group_size)

    def _shared_out(self) -> tuple[list[RolloutEpisode], list[RolloutEpisode]]:
        """Returns the episodes of this step, from the groups that were accepted, and the other members of
        their groups. The rest is the surplus."""
        size, wanted, low = self._config.group_size, self._wanted, self._taken
        found = [episode for group in self._surplus[:wanted] for episode in group]
        high = min(low + self._config.data_batch_size, len(found))
        self._surplus, self._taken = self._surplus[high // size :], high % size
        if not self._config.carry_over:
            self._surplus, self._taken = [], 0
        return found[low:high], found[:low] + found[high:]

    def _line(self, step: int, episodes: Sequence[RolloutEpisode], tally: Tally) -> str:
        where = f"iteration {step + 1}, rank {self._rank}"
        if not self.agenda.tasks:
            return f"{where}: no task is assigned to this rank; it takes part in the update with zero weight"
        tasks = ", ".join(dict.fromkeys(episode.start.task for episode in episodes)) or ", ".join(self.agenda.current)
        held = min(tally.carried_episodes, len(episodes))
        carried = f" ({held} of them carried over from the iteration before)" if held else ""
        return (
            f"{where}: task {tasks}, target {self._config.data_batch_size} episodes, collected {len(episodes)}{carried}"
        )

    def _collected(
        self,
        roll: Roll,
        tally: Tally,
        keep: Callable[[RolloutEpisode], None],
        baselines: dict[int, RolloutEpisode] | None,
    ) -> bool | None:
        """Puts the groups of this step in front of the surplus; where `baselines` are asked for, with a greedy episode
        of each. Returns whether they are a whole batch. None: stopped."""
        config, accepted = self._config, list(self._surplus)
        if not self._planned:
            self.agenda.begin()
        while True:
            while len(accepted) < (wanted := self._wanted):
                if tally.attempts >= config.max_sampling_attempts or (
                    tally.solved(wanted) and config.when_exhausted != "error"
                ):
                    self._exhausted(len(accepted), wanted, tally)
                    break
                starts, self._planned = self._planned or self._drawn(wanted - len(accepted)), []
                tally.attempts += 1
                groups = self._rolled(roll, starts, tally, keep)
                if groups is None:
                    return None
                accepted += [group for group in groups if self._accepts(group, tally)]
            if len(accepted) < wanted:
                break
            lost = self._greedy(roll, accepted[:wanted], baselines, tally, keep) if baselines is not None else set()
            if lost is None:
                return None
            if not lost:
                break
            if accepted[0][0].start.group in lost:
                self._taken = 0
            accepted = [group for group in accepted if group[0].start.group not in lost]
        self.agenda.end()
        self._surplus = accepted
        return len(accepted) >= wanted

    def _drawn(self, missing: int) -> list[Start]:
        config = self._config
        return self.agenda.draw(
            config.groups_at_once or math.ceil(missing * config.oversample_factor), config.group_size
        )

    def _rolled(
        self, roll: Roll, starts: list[Start], tally: Tally, keep: Callable[[RolloutEpisode], None]
    ) -> list[list[RolloutEpisode]] | None:
        """The groups of these starts, in their order; those with a lost member are not there. None: stopped."""
        begun, self._begun = self._begun, {}
        tally.prefetched += len(begun)
        ended: dict[Start, RolloutEpisode | LostEpisode] = {}
        settings = self._config.rollout_settings(strict=self._config.filter_format)
        for outcome in roll(starts[len(begun) :], settings=settings, generator=self._draws, begun=begun):
            start = outcome.start
            ended[start] = outcome
            note = [f"rank {self._rank}: {start.task}"] * self._config.report_ranks + [f"attempt {tally.attempts}"] * (
                tally.attempts > 1
            )
            self.report("collecting episodes", len(ended), len(starts), ", ".join(note))
            if isinstance(outcome, LostEpisode):
                self._lost(outcome, tally)
                continue
            keep(outcome)
            tally.take(outcome, self._notify)
            self.agenda.ended(start, outcome.success)
        if len(ended) < len(starts):
            return None
        size, groups = self._config.group_size, []
        for low in range(0, len(starts), size):
            members = [ended[start] for start in starts[low : low + size]]
            groups.append([member for member in members if isinstance(member, RolloutEpisode)])
        tally.dropped["lost"] += sum(len(group) < size for group in groups)
        return [group for group in groups if len(group) == size]

    def _lost(self, outcome: LostEpisode, tally: Tally) -> None:
        tally.lost.append(outcome)
        start = outcome.start
        self._notify(f"rank {self._rank}: an episode of {start.task}, state {start.state}, is lost:\n{outcome.error}")

    def _greedy(
        self,
        roll: Roll,
        groups: list[list[RolloutEpisode]],
        baselines: dict[int, RolloutEpisode],
        tally: Tally,
        keep: Callable[[RolloutEpisode], None],
    ) -> set[int] | None:
        """An episode of the likeliest actions for each group that has none yet, from where its first member began.
        Gives the numbers of the groups whose episode was lost, which go with it; None: stopped."""
        starts = [
            replace(group[0].start, member=len(group)) for group in groups if group[0].start.group not in baselines
        ]
        lost: set[int] = set()
        for outcome in roll(starts, settings=self._config.rollout_settings(sample=False)):
            if isinstance(outcome, LostEpisode):
                self._lost(outcome, tally)
                lost.add(outcome.start.group)
                continue
            keep(outcome)
            baselines[outcome.start.group] = outcome
        tally.dropped["lost"] += len(lost)
        tally.groups -= len(lost)  # their members were all there
        return lost if all(start.group in {*baselines, *lost} for start in starts) else None

    def _accepts(self, group: list[RolloutEpisode], tally: Tally) -> bool:
        if self._config.init_state_mode == "group":
            check_alike(group, self._config.same_first_frame)
        config, successes = self._config, sum(episode.success for episode in group)
        share, reason = successes / len(group), ""
        low, high = (config.accuracy_lower_bound, config.accuracy_upper_bound) if config.filter_accuracy else (0.0, 1.0)
        if config.filter_format and any(episode.ill_formed for episode in group):
            reason = "ill_formed"
        elif config.filter_truncated and any(episode.truncated for episode in group):
            reason = "truncated"
        elif (config.dynamic_sampling and successes in (0, len(group))) or not low <= share <= high:
            reason = {0.0: "all_failed", 1.0: "all_succeeded"}.get(share, "too_easy" if share > high else "too_hard")
        tally.groups += 1
        tally.all_succeeded += successes == len(group)
        tally.all_failed += successes == 0
        tally.dropped[reason] += bool(reason)
        return not reason

    def _exhausted(self, accepted: int, wanted: int, tally: Tally) -> None:
        """Fewer groups than a batch were found. Where all of them were lost or
        ill-formed, going on would find no others."""
        message = (
            f"rank {self._rank} has {accepted} of {wanted} groups of {', '.join(self.agenda.current)} after "
            f"max_sampling_attempts={self._config.max_sampling_attempts}: {tally.report()}."
        )
        if self._config.when_exhausted != "error" and not tally.faulty:
            solved = (
                f"rank {self._rank}: all members of all {tally.groups} groups of "
                f"{', '.join(self.agenda.current)} succeeded."
            )
            waits = (
                "are learned from in this step"
                if self._config.when_exhausted == "partial"
                else "wait for the next step"
            )
            waiting = (
                f" {accepted} of {wanted} groups {waits}." if accepted else " Nothing is learned from in this step."
            )
            cure = "" if accepted or tally.solved(wanted) else f" {tally.cure()}"
            self._notify((solved if tally.solved(wanted) else message) + waiting + cure)
            return
        why = tally.lost[-1].error if tally.lost else tally.fault
        raise EmptyError(f"{message} {tally.cure()}" + (f"\nThe last failure:\n{why}" if why else ""))

    # --- between two steps ---

    def ahead(self) -> None:
        """Option `prefetch`: begins to reset the first episodes of the next step. The pool is
        then in use until `collect` or `settle`."""
        missing = self._wanted - len(self._surplus)
        if not self._config.prefetch or not self.agenda.tasks or missing < 1:
            return
        if not self._planned:
            self.agenda.begin()
            self._planned = self._drawn(missing)
        for slot, start in list(enumerate(self._planned))[: 0 if self._begun else self._pool.slots]:
            self._pool.start(slot, start)
            self._begun[slot] = start

    def settle(self) -> None:
        """The pool is free when this returns; what was begun is begun again later, with the same result."""
        if self._begun:
            self._pool.collect(sorted(self._begun))
            self._begun = {}

    def state_dict(self, store: Callable[[RolloutEpisode], Mapping[str, Any]] = pack) -> dict[str, object]:
        """Cursors, draws, the surplus and what is planned, as arrays and text. `store`: of an episode what finds
        it again, where it is in a log already."""
        planned = [asdict(start) for start in self._planned]
        surplus = {
            str(i): {str(j): store(episode) for j, episode in enumerate(group)} for i, group in enumerate(self._surplus)
        }
        return {
            "agenda": json.dumps(self.agenda.state_dict()),
            "planned": json.dumps(planned),
            "planned_by": self._planned_by,
            "draws": self._draws.get_state().numpy().copy(),
            "surplus": surplus,
            "taken": json.dumps(self._taken),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], find: Callable[[Mapping[str, Any]], RolloutEpisode] = unpack
    ) -> None:
        self.settle()
        self.agenda.load_state_dict(json.loads(state["agenda"]))
        # the settings may be others than before, when a run is resumed
        planned = json.loads(state["planned"]) if state.get("planned_by") == self._planned_by else []
        self._planned = [Start(**start) for start in planned]
        self._draws.set_state(as_tensor(state["draws"], "draws"))
        size = self._config.group_size
        held = [[find(held) for held in group.values()] for group in state["surplus"].values() if len(group) == size]
        self._surplus = [group for group in held if self._fits([episode.start for episode in group])]
        begun = bool(self._surplus) and len(state["surplus"].get("0", ())) == size and self._surplus[0] is held[0]
        self._taken = int(json.loads(state.get("taken", "0"))) if begun else 0
        if gone := len(state["surplus"]) - len(self._surplus):
            self._notify(
                f"rank {self._rank}: {gone} groups that were carried over do not fit collect.* as "
                "it is set now (group_size, init_state_mode, split, states_per_task, idle_ranks): others are "
                "collected in their place."
            )

    @property
    def _planned_by(self) -> str:
        return json.dumps({name: getattr(self._config, name) for name in CHOOSING})

    def _fits(self, starts: Sequence[Start]) -> bool:
        """Whether a whole group could have been drawn with the settings of now."""
        if any(s.split != self._config.split or s.task not in self.agenda.rings for s in starts):
            return False
        numbers, states = self.agenda.rings[starts[0].task].numbers, {start.state for start in starts}
        alike = self._config.init_state_mode == "group" or min(len(starts), len(numbers)) == 1
        return states <= set(numbers) and (len(states) == 1) == alike


def check_alike(group: Sequence[RolloutEpisode], first_frames: bool = True) -> None:
    """Raises unless the members of a group began alike: what comparing them rests on."""
    first = group[0]
    where = f"of group {first.start.group} ({first.start.task}, state {first.start.state})"
    for other in group[1:]:
        if other.start.place != first.start.place:
            raise SchemaError(
                f"the members {where} began in {first.start.place} and in {other.start.place}: expected is one place."
            )
        if first_frames and other.first != first.first:
            raise SchemaError(
                f"members 0 and {other.start.member} {where} did not begin with the same observation: reset() "
                "with one state and seed must begin alike. Mend the environment, or give "
                "same_first_frame=false for one that does not render alike twice."
            )


def _states(config: Collecting, there: Mapping[str, int], task: str) -> int:
    """How many initial states are used."""
    if config.split not in there:
        raise UnknownNameError(f"split of {task}", config.split, there)
    if config.states_per_task > there[config.split]:
        raise ConfigError(
            f"states_per_task={config.states_per_task}: {task} has {there[config.split]} in its split {config.split!r}."
        )
    return config.states_per_task or there[config.split]
