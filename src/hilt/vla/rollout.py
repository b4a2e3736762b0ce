"""Rollouts: a policy acts in many environments at once, a chunk at a time.

The slots of a pool are two halves. While one half simulates, the policy answers the other; the halves take turns, and
each waits for all of its slots. So what happens does not depend on how many processes the pool has or how quick they
are, and a run can be repeated bit for bit. A slot whose episode has ended takes the next start immediately; the
policy is not evaluated for an episode that has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hilt.core.errors import ConfigError, HiltError, NotFiniteError
from hilt.envs.chunk_executor import ChunkExecutor, ChunkSettings
from hilt.envs.env_protocol import SUCCESS_KEYS
from hilt.envs.pool import EpisodePool, Reply
from hilt.policies.base import Observation, Policy, Prefix, Record, join, select
from hilt.policies.vla.observation_adapters import Suite
from hilt.value.rollout_watch import Outlook, RolloutWatch
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start, digest

_Answer = tuple[np.ndarray, Record, str]
"""The actions of a chunk, the record of them, and what is wrong with them"""


@dataclass(frozen=True)
class RolloutSettings:
    """How the policy acts in a rollout, and what happens when it or a simulator fails."""

    temperature: float = 1.0
    sample: bool = True
    """Whether actions are sampled; otherwise they are the likeliest ones"""
    execute: int = 0
    """The number of actions of each chunk that are executed; 0: all"""
    rows_at_once: int = 0
    """Observations that go through the policy together; 0: those of half the slots"""
    retries: int = 0
    """Times that an episode is begun again after its simulator failed, before it counts as lost"""
    strict: bool = False
    """An ill-formed chunk ends its episode, and so does a policy that raises; otherwise what the policy raises is
    raised, and only numbers that are not finite end an episode"""
    chunks: ChunkSettings | None = None
    """How chunks are executed by `roll_out_steps`, in control steps; None: one after the other, by `roll_out`"""
    drawn_share: float = 1.0
    """With `sample`, the share of the chunks that `roll_out` samples; the others are the likeliest ones, and NaN is the
    log-probability of each of their numbers, which no loss counts"""


def roll_out(
    policy: Policy,
    pool: EpisodePool,
    starts: Iterable[Start],
    *,
    suite: Suite,
    settings: RolloutSettings | None = None,
    generator: torch.Generator | None = None,
    version: int = 0,
    begun: Mapping[int, Start] | None = None,
    stop: Callable[[], bool] = lambda: False,
    watch: RolloutWatch | None = None,
) -> Iterator[RolloutEpisode | LostEpisode]:
    """Each episode as it ends, in an order that the starts alone decide. Starts are taken when a slot is free.

    `begun`: slots whose `pool.start` was called before. `watch`: a value model that looks at them, and may end those
    that it expects to fail. Closed early or stopped by `stop`, it waits for what the
    simulators are doing, so that the pool can be used again.
    """
    settings = settings or RolloutSettings()
    if not 0 <= (execute := settings.execute) <= policy.chunk:
        raise ConfigError(
            f"execute={execute}: this policy answers with {policy.chunk} actions; give 1 to "
            f"{policy.chunk}, or 0 for all."
        )
    ask = _Asking(policy, settings, generator)
    slots = _Slots(
        pool,
        iter(starts),
        settings.retries,
        {slot: _Running(start, version) for slot, start in (begun or {}).items()},
        version,
    )
    halves = range(pool.slots // 2), range(pool.slots // 2, pool.slots)
    try:
        slots.fill()
        for half in itertools.cycle(halves):
            if not slots.running or stop():
                return
            ended, acting = slots.collect(half)
            answers: Iterable[_Answer] = ask(
                [suite.observe(running.observation, running.instruction) for running in acting.values()]
            )
            hopeless: dict[int, float] = {}
            if watch is not None:
                answers = list(answers)
                hopeless = _hopeless(watch, acting, answers)
            for (slot, running), (actions, record, fault) in zip(acting.items(), answers, strict=True):
                fatal = settings.strict or not np.isfinite(actions).all()
                outcome = running.given_up(hopeless[slot]) if slot in hopeless else None
                if outcome := outcome or running.answered(record, fault, fatal, settings.strict):
                    ended.append(outcome)
                    slots.begin(slot)
                else:
                    slots.step(slot, running, np.asarray(suite.command(actions[: execute or policy.chunk]), np.float32))
            yield from ended  # after the simulators have their orders
    finally:
        slots.settle()


@dataclass
class _Slots:
    """The slots of a pool, with the episodes that are simulated in them and the starts that wait for a slot."""

    pool: EpisodePool
    coming: Iterator[Start]
    retries: int
    running: dict[int, _Running]
    """By slot, the episodes of which a reply of the simulator is awaited"""
    version: int
    again: deque[Start] = field(default_factory=deque)
    failures: dict[Start, int] = field(default_factory=dict)

    def fill(self) -> None:
        for slot in range(self.pool.slots):
            if slot not in self.running:
                self.begin(slot)

    def begin(self, slot: int) -> None:
        """Starts the next episode in a slot; episodes that are begun again come first."""
        start = self.again.popleft() if self.again else next(self.coming, None)
        if start is not None:
            self.pool.start(slot, start)
            self.running[slot] = _Running(start, self.version)

    def step(self, slot: int, running: _Running, commands: np.ndarray) -> None:
        self.pool.step(slot, commands)
        self.running[slot] = running

    def collect(self, half: Iterable[int]) -> tuple[list[RolloutEpisode | LostEpisode], dict[int, _Running]]:
        """Waits for the simulators of these slots. Returns the episodes that ended, whose slots begin the next ones,
        and by slot those that go on, for the policy to answer."""
        ended: list[RolloutEpisode | LostEpisode] = []
        acting: dict[int, _Running] = {}
        there = [slot for slot in half if slot in self.running]
        replies = self.pool.collect(there) if there else []
        for slot, reply in zip(there, replies, strict=True):
            running = self.running.pop(slot)
            outcome = running.take(reply)
            if outcome is None:
                acting[slot] = running
                continue
            if not self._tried_again(outcome):
                ended.append(outcome)
            self.begin(slot)
        return ended, acting

    def _tried_again(self, outcome: RolloutEpisode | LostEpisode) -> bool:
        failed = self.failures.get(outcome.start, 0)
        if not isinstance(outcome, LostEpisode) or failed >= self.retries:
            return False
        self.failures[outcome.start] = failed + 1
        self.again.append(outcome.start)
        return True

    def settle(self) -> None:
        """Waits for what the simulators are still doing, so that the pool can be used again."""
        if self.running:
            with contextlib.suppress(HiltError):  # of a pool that failed: what it raised is on its way
                self.pool.collect(sorted(self.running))


@dataclass
class _Running:
    """An episode under way."""

    start: Start
    version: int
    rows: list[Record] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    first: bytes = b""
    instruction: str = ""
    ill_formed: str = ""
    observation: Any = None
    """Valid until the slot's next call"""
    outlook: Outlook = field(default_factory=Outlook)

    def take(self, reply: Reply) -> RolloutEpisode | LostEpisode | None:
        """What the environment answered; None: it goes on."""
        if reply.error:
            return LostEpisode(self.start, reply.error)
        self.observation = reply.observation
        if not self.first:
            self.first, self.instruction = digest(reply.observation), reply.instruction
            return None
        self.executed.append(int(reply.executed))
        self.rewards.append(float(np.sum(reply.rewards[: reply.executed])))
        if not (reply.terminated or reply.truncated):
            return None
        if reply.success is None:
            raise ConfigError(
                f"{self.start.task} does not report success: at the end of an episode its info has none of "
                f"{', '.join(SUCCESS_KEYS)}, and every episode would count as a failure. Let the environment "
                "report it in info, or name a function of yours as the task, package.module:function, that returns "
                "hilt.envs.task.as_task(env, success=...)."
            )
        return self._ended(reply.success, bool(reply.truncated and not reply.terminated))

    def answered(self, record: Record, fault: str, fatal: bool, strict: bool) -> RolloutEpisode | None:
        """What the policy answered; an episode when that is its end. A chunk that is not carried out is no
        row of it; but an episode that may be learned from (not `strict`) has a row at least, the first
        chunk's, of which no action was carried out."""
        self.ill_formed = self.ill_formed or fault
        if fault and fatal:
            if not strict and not self.rows:
                self.rows.append(_finite(record))
                self.executed.append(0)
                self.rewards.append(0.0)
            return self._ended(False, False)
        self.rows.append(record)
        return None

    def given_up(self, chance: float) -> RolloutEpisode:
        """The episode, which ends before it is known how; `chance`: the probability of success."""
        end = self._ended(False, True)
        end.stopped_by_value = chance
        return end

    def _ended(self, success: bool, truncated: bool) -> RolloutEpisode:
        executed, rewards = np.array(self.executed, np.int32), np.array(self.rewards, np.float32)
        record = join(self.rows) if self.rows else {}
        end = RolloutEpisode(
            self.start, record, executed, rewards, success, int(executed.sum()), truncated, self.version, self.first
        )
        end.ill_formed, end.instruction, end.last = self.ill_formed, self.instruction, _copied(self.observation)
        end.outlook = self.outlook if self.outlook.looks else None
        return end


def _hopeless(watch: RolloutWatch, acting: Mapping[int, _Running], answers: Sequence[_Answer]) -> dict[int, float]:
    """Returns the episodes that a value model ends: their slots, and the probability of success. Those with an
    ill-formed answer are not looked at."""
    sound = [
        (slot, one, record)
        for (slot, one), (_, record, fault) in zip(acting.items(), answers, strict=True)
        if not fault
    ]
    texts = [one.instruction or one.start.task for _, one, _ in sound]
    chances = watch.judge([one.observation for _, one, _ in sound], [record for *_, record in sound], texts)
    ending = {}
    for (slot, one, _), chance in zip(sound, chances, strict=True):
        start, executed = one.start, one.executed[-1] if one.executed else 0
        if watch.hopeless(one.outlook, chance, executed, (start.seed, start.group, start.member)):
            ending[slot] = chance
    return ending


@dataclass
class _Asking:
    """The policy, asked about some rows: for each its actions, the record of them, and what is wrong with them."""

    policy: Policy
    settings: RolloutSettings
    generator: torch.Generator | None

    def __call__(self, observations: Sequence[Observation]) -> Iterator[_Answer]:
        at_once = self.settings.rows_at_once or len(observations) or 1
        for low in range(0, len(observations), at_once):
            yield from self._answers(observations[low : low + at_once])

    def _answers(self, observations: Sequence[Observation]) -> Iterator[_Answer]:
        before = self.generator.get_state() if self.generator is not None else None
        try:
            actions, record, drawn = self._asked(observations)
        except HiltError:
            raise  # a mistake of who set it up, not of what was drawn
        except Exception:  # a policy may raise anything
            if not self.settings.strict:
                raise
            if len(observations) == 1:
                yield (
                    np.full((self.policy.chunk, self.policy.action_dim), np.nan, np.float32),
                    {},
                    traceback.format_exc(),
                )
                return
            if self.generator is not None and before is not None:
                self.generator.set_state(before)
            for one in observations:  # whose fault it is
                yield from self._answers([one])
            return
        for row in range(len(observations)):
            own = {name: np.array(array[row : row + 1]) for name, array in record.items()}
            fault = ill_formed(self.policy, actions[row], own)
            if not drawn[row]:
                own["log_prob"] = np.full_like(own["log_prob"], np.nan)
            yield actions[row], own, fault

    def _asked(self, observations: Sequence[Observation]) -> tuple[np.ndarray, Record, np.ndarray]:
        """Returns actions, the record, and which rows were drawn, or are to be recorded as if they were."""
        settings, count = self.settings, len(observations)
        if not settings.sample or settings.drawn_share >= 1:
            drawn = np.ones(count, bool)
            return *self.policy.act(observations, settings.sample, settings.temperature, self.generator), drawn
        drawn = torch.rand(count, generator=self.generator).numpy() < settings.drawn_share
        parts, rows = [], []
        for sample in (True, False):
            if len(own := np.flatnonzero(drawn == sample)):
                asked = [observations[row] for row in own.tolist()]
                generator = self.generator if sample else None  # from which a flow would begin
                parts.append(self.policy.act(asked, sample, settings.temperature, generator))
                rows.append(own)
        order = np.argsort(np.concatenate(rows))
        record = select(join([made for _, made in parts]), order)
        return np.concatenate([actions for actions, _ in parts])[order], record, drawn


def ill_formed(policy: Policy, actions: np.ndarray, record: Record) -> str:
    """What is wrong with a chunk and its record of one row; nothing when it is well-formed."""
    if not np.isfinite(actions).all():
        return "an action is not finite"
    if "log_prob" in record and not np.isfinite(record["log_prob"]).all():
        return "a log-probability is not finite"
    if (tokens := record.get("tokens")) is not None and (span := getattr(policy, "token_range", None)) is not None:
        low, high = span
        if (outside := tokens[(tokens < low) | (tokens > high)]).size:
            return f"token {outside[0]} is none of the action tokens {low} to {high}"
    return ""


def _finite(record: Record) -> Record:
    """With zeros for numbers that are not finite: they count in no loss, and in a
    network they would make every gradient NaN."""
    return {
        name: np.where(np.isfinite(array), array, 0) if array.dtype.kind == "f" else array
        for name, array in record.items()
    }


def _copied(observation: Any) -> Any:
    if isinstance(observation, Mapping):
        return {name: _copied(value) for name, value in observation.items()}
    return np.array(observation)


class ChunkOptions(NamedTuple):
    """How a person wants chunks to be executed and chosen; what is None is left to the run and its task."""

    mode: str | None = None
    delay: int | None = None
    execute: int | None = None
    wrap: Callable[[Policy], Policy] | None = None
    """Returns the policy that acts, of the run's, such as the best of several chunks"""
    ensemble_decay: float | None = None
    temperature: float | None = None
    """Of what is sampled, by a policy that draws whole chunks"""

    def acting(self, policy: Policy) -> Policy:
        return policy if self.wrap is None else self.wrap(policy)

    def settings(self, execute: int = 0, real_time: bool = False) -> ChunkSettings | None:
        """`execute`: the run's own. `real_time`: whether the task keeps its own rate, as an arm does; a policy then has
        the time that it has, unless a delay is given. None where nothing is wanted: chunks are executed as ever."""
        if all(option is None for option in (*self[:3], self.ensemble_decay)):
            return None
        delay = self.delay if self.delay is not None or real_time else 0
        rate = ChunkSettings.ensemble_decay if self.ensemble_decay is None else self.ensemble_decay
        chosen = execute if self.execute is None else self.execute
        return ChunkSettings(self.mode or "synchronous", chosen, delay, rate)


class ChunkAgent:
    """A policy that acts in one environment, a control step at a time: its chunks are executed as `settings` have it.
    By default each is executed to its end before the policy is evaluated again, and nothing is waited for."""

    def __init__(
        self,
        policy: Policy,
        suite: Suite,
        instruction: str,
        settings: ChunkSettings | None = None,
        *,
        temperature: float = 1.0,
        keep: bool = False,
    ):
        """`instruction`: empty for that of each episode. `keep`: whether the records of the policy's answers are kept,
        in `records`."""
        self._settings, self._policy, self._suite, self._given = settings, policy, suite, instruction
        self._temperature, self._keep = temperature, keep
        chosen = settings or ChunkSettings(delay=0)
        check_chunks(policy, suite, chosen)
        action_dim = policy.action_dim
        held = suite.hold
        hold = None if held is None else lambda raw, last: held(raw, last, action_dim)
        self._executor = ChunkExecutor(self._plan, chosen, action_dim=action_dim, hold=hold)
        self._draws, self._sample = torch.Generator(), False
        self.begin()

    def begin(self, instruction: str = "", paced: bool = False) -> None:
        """An episode begins: what is left of the last chunk was of another."""
        self._executor.reset()
        self._instruction = self._given or instruction
        self.records: list[Record] = []
        """Of this episode, if they are kept: one for each chunk that the policy was asked for"""
        self.chunks: list[int] = []
        """Of this episode, the number of the chunk of each step's action; -1 where the arm held"""

    def sample_actions(self, observation: Observation, *, seed: int = 0, argmax: bool = False) -> np.ndarray:
        self._draws, self._sample = torch.Generator().manual_seed(seed), not argmax
        step = self._executor.next(observation)
        self.chunks.append(step.chunk)
        return self._suite.command(step.action)

    def execution(self) -> dict[str, object]:
        """How chunks were executed and chosen, and what came of it, over all episodes; nothing where no settings were
        given and the policy chooses among none."""
        chosen = self._policy.acting_figures()
        if self._temperature != 1.0:
            chosen = {"temperature": self._temperature, **chosen}
        if self._settings is None:
            return {**chosen}
        figures = self._executor.metrics()
        named = ("steps", "held", "late", "idle_share", "delay_steps", "planning_seconds")
        return {**self._settings.to_json(), **{name: figures[name] for name in named}, **chosen}

    def close(self) -> None:
        self._executor.close()

    def _plan(self, observation: Any, planned: np.ndarray | None, frozen: int) -> np.ndarray:
        row, options = self._suite.observe(observation, self._instruction), dict[str, Any]()
        if planned is not None:
            options["prefix"] = Prefix(planned[None], np.array([frozen], np.int64))
        if self._temperature != 1.0:
            options["temperature"] = self._temperature
        actions, record = self._policy.act([row], sample=self._sample, generator=self._draws, **options)
        if self._keep:
            self.records.append(record)
        first: np.ndarray = actions[0]
        return first


def check_chunks(policy: Policy, suite: Suite, settings: ChunkSettings, sample: bool = False) -> None:
    """Raises where the policy, or what is known of its suite, does not fit how its chunks are to be executed."""
    kind = type(policy).__name__
    if not 0 <= settings.execute <= policy.chunk:
        raise ConfigError(
            f"execute={settings.execute}: this policy answers with {policy.chunk} actions; give 1 to "
            f"{policy.chunk}, or 0 for all."
        )
    if settings.delay != 0 and suite.hold is None:
        raise ConfigError(
            f"delay={'real time' if settings.delay is None else settings.delay}: an arm holds until the policy has "
            "answered, and how it does is not known for observations that are named by columns. Give delay=0; in "
            "Python, columns(names, hold=...)."
        )
    if settings.mode != "rtc":
        return
    if not policy.takes_prefix:
        raise ConfigError(
            f"mode=rtc: this {kind} cannot continue a chunk. Take asynchronous, a policy with a flow, or train it with "
            "max_delay=N (hilt train sft)."
        )
    if sample and not policy.max_delay:
        raise ConfigError(
            f"mode=rtc with sampled actions: this {kind} is guided toward the chunk that it continues, and cannot "
            "sample then. Leave sampling out."
        )


def roll_out_steps(
    policy: Policy,
    pool: EpisodePool,
    starts: Iterable[Start],
    *,
    suite: Suite,
    settings: RolloutSettings,
    seed: Sequence[int],
    version: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[RolloutEpisode | LostEpisode, ChunkAgent | None]]:
    """Rolls out a control step at a time, with chunks executed as `settings.chunks` have it; for evaluations. Yields
    each episode with the agent that acted in it. The policy is evaluated for one environment at a time, and draws from
    the seed of the start, so that episodes do not depend on each other."""
    chunks = settings.chunks or ChunkSettings(delay=0)
    check_chunks(policy, suite, chunks, settings.sample)
    if chunks.delay is None:
        raise ConfigError("delay: the simulators of a pool wait for the policy; give a number of control steps.")
    slots = _Slots(pool, iter(starts), settings.retries, {}, version)
    halves = range(pool.slots // 2), range(pool.slots // 2, pool.slots)
    agents: dict[Start, ChunkAgent] = {}
    draws: dict[Start, np.random.Generator] = {}
    try:
        slots.fill()
        for half in itertools.cycle(halves):
            if not slots.running or stop():
                return
            ended, acting = slots.collect(half)
            for slot, running in acting.items():
                start = running.start
                if not running.executed:  # an episode begins, perhaps for the second time
                    agents[start] = ChunkAgent(
                        policy, suite, running.instruction, chunks, temperature=settings.temperature, keep=True
                    )
                    draws[start] = np.random.default_rng([*seed, start.group, start.seed])
                drawn = int(draws[start].integers(2**31))
                try:
                    action = agents[start].sample_actions(running.observation, seed=drawn, argmax=not settings.sample)
                except NotFiniteError as error:
                    ended += filter(None, [running.answered({}, str(error), True, True)])
                    slots.begin(slot)
                else:
                    slots.step(slot, running, np.asarray(action, np.float32)[None])
            yield from ((_by_chunk(one, agents.get(one.start)), agents.pop(one.start, None)) for one in ended)
    finally:
        slots.settle()


def _by_chunk(one: RolloutEpisode | LostEpisode, agent: ChunkAgent | None) -> RolloutEpisode | LostEpisode:
    """The episode with one row for each chunk that the policy was asked for, not for each step. What is earned in a
    step in which the arm holds belongs to the chunk before it."""
    if isinstance(one, LostEpisode) or agent is None:
        return one
    rows, numbers = len(agent.records), np.array(agent.chunks[: len(one.executed)], np.int64)
    owners = np.maximum.accumulate(np.maximum(numbers, 0)) if len(numbers) else numbers
    one.record = join(agent.records) if rows else {}
    one.rewards = np.bincount(owners, one.rewards, minlength=rows)[:rows].astype(np.float32)
    one.executed = np.bincount(numbers[numbers >= 0], minlength=rows)[:rows].astype(np.int32)
    return one
