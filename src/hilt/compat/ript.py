"""The names by which scripts of RIPT's kind collect rollouts, over our tasks, rings
and pool. `hilt train rloo` needs none of them.

    # 9 tasks, 2 ranks: [0, 2, 4, 6, 8] and [1, 3, 5, 7]
    tasks = get_distributed_tasks(range(9), rank, world_size)
    runner = LIBEROEnvRunner(policy, task_names_to_use=tasks, benchmark_name="libero_spatial", num_parallel_envs=2)
    states = DistributedInitialStateDataset(num_states=50, state_dim=8, rank=rank, world_size=world_size)
    runner.set_current_task_by_cursor()
    batches = distributed_collect_batches(runner, None, states, SmartSampler(config), config, iteration)
    runner.advance_task_cursor()

An initial state is its number among those of a task, and a row of `state_dim` numbers
that begins with it; the simulator has the rest.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hilt.core.errors import (
    ConfigError,
    EmptyError,
    HiltError,
    MissingPackageError,
    SchemaError,
    StorageError,
    UnknownNameError,
)
from hilt.envs.pool import Pool
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import suite
from hilt.replay.tensors import generator
from hilt.vla.collect import check_alike
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start
from hilt.vla.rollout import RolloutSettings, roll_out
from hilt.vla.tasks import MODES, Ring, shards

T = TypeVar("T")
Rollout = tuple[bool, float, dict[str, Any]]
"""(success, total reward, the rest: `RolloutEpisode` and its fields by name)"""
EXHAUSTED = ("partial", "error")
"""What becomes of a batch for which the attempts did not suffice"""
logger = logging.getLogger("hilt.compat")


def get_distributed_tasks(all_tasks: Sequence[T], rank: int, world_size: int) -> list[T]:
    """The tasks of a rank: task i is rank i % world_size's."""
    return shards(all_tasks, world_size)[rank]


def compute_state_hash(states: object) -> str:
    """sha256 of initial states, their type and shape."""
    array = np.ascontiguousarray(states)
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()


class DistributedInitialStateDataset:
    """The initial states of a task in a ring: the next ones each time, and again from the first."""

    def __init__(
        self, num_states: int = 50, state_dim: int = 8, rank: int = 0, world_size: int = 1, states: Any = None
    ):
        """`states`: an array of one's own, [N, state_dim]. Without it, state i is a row that begins with i, its number
        in the simulator, and has zeros after it: made-up joint angles would be no state of the simulator's.
        ``state_dim=0``: the numbers alone, [N]."""
        self.states = _numbered(num_states, state_dim) if states is None else np.asarray(states)
        if not len(self.states):
            raise ConfigError(f"rank {rank} of {world_size} was given no initial states; give at least one.")
        if states is not None and self.states.ndim > 1 and self.states.shape[1:] != (state_dim,):
            raise ConfigError(
                f"states have the shape {list(self.states.shape)}; expected [N, {state_dim}] by state_dim."
            )
        self.rank, self.world_size = rank, world_size
        self._ring = Ring(range(len(self.states)))

    @property
    def init_state_cursor(self) -> int:
        return self._ring.cursor

    def sample_batch_circular(self, batch_size: int) -> np.ndarray:
        """Returns the next states in ring order: of 10 states, 4 at a time, first 0-3, then 4-7, then 8, 9, 0, 1."""
        return np.asarray(self.states[self._ring.take(batch_size)])

    def get_states_for_envs(self, num_parallel_envs: int, rloo_batch_size: int) -> np.ndarray:
        """One for each rollout, all different while there are enough."""
        return self.sample_batch_circular(num_parallel_envs * rloo_batch_size)

    def state_dict(self) -> dict[str, object]:
        return {"init_state_cursor": self._ring.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ring.cursor = int(state["init_state_cursor"]) % len(self.states)


def smart_sample_init_state(
    init_dataset: DistributedInitialStateDataset,
    num_parallel_envs: int,
    rloo_batch_size: int,
    init_state_mode: str = "distinct",
) -> tuple[np.ndarray, str]:
    """The next initial states, one for each rollout, and their hash. "distinct": as many states as rollouts,
    in the order of the ring; "group", as GRPO has it: one state for each environment, `rloo_batch_size` times
    in a row, so that like is compared with like."""
    if init_state_mode not in MODES:
        raise UnknownNameError("init_state_mode", init_state_mode, MODES)
    if init_state_mode == "group":
        states = np.repeat(init_dataset.sample_batch_circular(num_parallel_envs), rloo_batch_size, axis=0)
    else:
        states = init_dataset.get_states_for_envs(num_parallel_envs, rloo_batch_size)
    return states, compute_state_hash(states)


class SmartSampler:
    """`smart_sample_init_state` with the sizes of a config: num_parallel_envs, rloo_batch_size, init_state_mode."""

    def __init__(self, config: Any):
        self.config = config

    def smart_sample_init_state(self, init_dataset: DistributedInitialStateDataset) -> tuple[np.ndarray, str]:
        mode = getattr(self.config, "init_state_mode", "distinct")
        return smart_sample_init_state(init_dataset, self.config.num_parallel_envs, self.config.rloo_batch_size, mode)

    def compute_state_hash(self, states: object) -> str:
        return compute_state_hash(states)


class LIBEROEnvRunner:
    """Rollouts of a policy in the tasks that a rank was assigned, one task at a
    time. Any suite that has a name will do."""

    def __init__(
        self,
        policy: Policy,
        task_names_to_use: Sequence[int | str] | None = None,
        benchmark_name: str = "libero_spatial",
        num_parallel_envs: int = 1,
        max_episode_length: int | None = None,
        *,
        workers: int | None = None,
        task_options: Mapping[str, Any] | None = None,
        split: str | None = None,
        temperature: float = 1.0,
        sample: bool = True,
        seed: int = 0,
    ):
        """`workers`: processes of the pool; without it, one for each environment, and none for a single one.
        `split`: whose initial states; without it, all that a suite has stored (LIBERO's 50, which its evaluations
        use as well), else those of training."""
        self.policy, self.benchmark_name, self.num_parallel_envs = policy, benchmark_name, num_parallel_envs
        self.assigned_tasks = list(task_names_to_use or [])
        self.task_cursor = 0
        self.current_task: int | str | None = None
        self._workers = (num_parallel_envs if num_parallel_envs > 1 else 0) if workers is None else workers
        self._options = dict(task_options or {}) | ({"step_limit": max_episode_length} if max_episode_length else {})
        self._split, self._settings, self._seed = split, RolloutSettings(temperature, sample), seed
        self._draws = generator(seed)
        self._pool: Pool | None = None
        self.carried: dict[Any, list[dict[str, Any]]] = {}
        """By task, the members of a group that the last batch of that task had no room for"""

    def set_current_task_by_cursor(self) -> int | str | None:
        """The task of this iteration; None on a rank without tasks, which goes on to its collectives with nothing."""
        self.current_task = (
            self.assigned_tasks[self.task_cursor % len(self.assigned_tasks)] if self.assigned_tasks else None
        )
        return self.current_task

    def advance_task_cursor(self) -> int | str | None:
        self.task_cursor += 1
        return self.set_current_task_by_cursor()

    def create_parallel_envs(self, env_name: object = None) -> Pool:
        """The environments of this runner, in processes that stay: one pool for all tasks.
        `env_name` is made now rather than later."""
        if self._pool is None:
            self._pool = Pool(self._workers, self.num_parallel_envs, task_options=self._options)
        if env_name is not None:
            self._pool.describe(self._full(env_name))
        return self._pool

    def run_single_task(self, task: object, init_states: object) -> list[Rollout]:
        """All rollouts of one task."""
        return list(self.run_policy_in_env(task, init_states))

    def run_policy_in_env(self, env_name: object, all_init_states: object) -> Iterator[Rollout]:
        """(success, total_reward, episode_data) of a rollout from each state, in the order of the states. One that is
        lost with its simulator is raised, with the simulator's traceback; closed early, nothing is left running."""
        task, numbers = self._full(env_name), _numbers(all_init_states)
        split = self._split_of(task, numbers)
        starts = [Start(task, split, int(state), self._seed, 0, place) for place, state in enumerate(numbers)]
        ended: dict[int, RolloutEpisode] = {}
        next_number = 0
        pool = self.create_parallel_envs()
        rollouts = roll_out(
            self.policy, pool, starts, suite=suite(task), settings=self._settings, generator=self._draws
        )
        try:
            for outcome in rollouts:
                if isinstance(outcome, LostEpisode):
                    raise HiltError(f"a rollout of {task}, state {outcome.start.state}, failed:\n{outcome.error}")
                ended[outcome.start.member] = outcome
                while next_number in ended:
                    episode = ended.pop(next_number)
                    next_number += 1
                    yield episode.success, float(episode.rewards.sum()), {**vars(episode), "episode": episode}
        finally:
            rollouts.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _split_of(self, task: str, numbers: np.ndarray) -> str:
        """The split that is rolled out, which has to have these states."""
        there = self.create_parallel_envs().describe(task)["initial_states"]
        if self._split is None:
            self._split = "published" if "published" in there else "train"
            also = (
                ", which evaluations use as well; split='train' leaves some to them"
                if self._split == "published"
                else ""
            )
            logger.info("initial states are those of the split %r%s", self._split, also)
        if self._split not in there:
            raise UnknownNameError(f"split of {task}", self._split, there)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < there[self._split]:
            raise ConfigError(
                f"initial state {numbers.max()} of {task} was asked for, and its split "
                f"{self._split!r} has the states 0 to {there[self._split] - 1}: give "
                f"DistributedInitialStateDataset(num_states={there[self._split]}) or another split."
            )
        return self._split

    def _full(self, name: Any) -> str:
        return str(name) if "/" in str(name) else f"{self.benchmark_name}/{name}"


def distributed_collect_batches(
    env_runner: LIBEROEnvRunner,
    reward_function: Callable[[dict[str, Any]], float] | None,
    init_dataset: DistributedInitialStateDataset,
    sampler: SmartSampler,
    config: Any,
    iteration: int,
) -> list[list[dict[str, Any]]]:
    """One batch of exactly `config.data_batch_size` episodes of the runner's current task, in groups of
    `config.rloo_batch_size`; no batch on a rank without a task. `reward_function` judges an episode;
    without it, its total reward is the environment's.

    Where the number is no multiple of the group's size, the last group is rolled out whole, and the members beyond the
    number are the first ones of the task's next batch (`LIBEROEnvRunner.carried`). Every episode has ``group_rewards``,
    the total rewards of its whole group, so that its advantage does not depend on where the batch was cut.

    A rollout that fails counts as an attempt and is logged with its traceback. After
    `config.max_sampling_attempts` (10) the batch has what was found, maybe nothing; with ``config.when_exhausted
    = "error"`` that is an error. With `config.enable_dynamic_sampling`, groups that all succeeded or all failed
    do not count. Target and result are logged at every rank.
    """
    task, wanted = env_runner.current_task, int(config.data_batch_size)
    where = f"iteration {iteration + 1}, rank {init_dataset.rank}"
    if task is None:
        logger.info("%s: no task is assigned to this rank", where)
        return []
    otherwise = getattr(config, "when_exhausted", "partial")
    if otherwise not in EXHAUSTED:
        raise UnknownNameError("when_exhausted", otherwise, EXHAUSTED)
    logger.info("%s: task %s, target %d episodes", where, task, wanted)
    most = int(getattr(config, "max_sampling_attempts", 10))
    batch = env_runner.carried.pop(task, [])
    attempts, uniform, failed, last = 0, 0, 0, ""
    while len(batch) < wanted and attempts < most:
        attempts += 1
        states, _ = sampler.smart_sample_init_state(init_dataset)
        try:
            rollouts = env_runner.run_single_task(task, states)
        except (ConfigError, MissingPackageError, SchemaError, StorageError, UnknownNameError):
            raise  # no other try would mend it
        except Exception:  # noqa: BLE001  # broad: simulator and policy may raise anything, and RIPT tries again
            failed, last = failed + 1, traceback.format_exc()
            logger.warning("%s: an attempt at task %s failed:\n%s", where, task, last)
            continue
        for group in _groups(rollouts, config, reward_function):
            batch += group
            uniform += not group
            if len(batch) >= wanted:
                break
    if len(batch) < wanted:
        why = f"{failed} attempts failed, {uniform} groups all succeeded or all failed"
        short = f"{where}, task {task}: {len(batch)} of {wanted} episodes after {most} attempts; {why}."
        if otherwise == "error":
            raise EmptyError(short + (f"\nThe last failure:\n{last}" if last else ""))
        logger.warning("%s", short)
    if len(batch) > wanted:
        env_runner.carried[task] = batch[wanted:]
    logger.info("%s: task %s, collected %d of %d episodes", where, task, min(len(batch), wanted), wanted)
    return [batch[:wanted]] if batch else []


def _groups(
    rollouts: Sequence[Rollout], config: Any, reward_function: Callable[[dict[str, Any]], float] | None
) -> Iterator[list[dict[str, Any]]]:
    """Yields the episodes of each group of `config.rloo_batch_size` rollouts, with the total rewards of the whole group
    beside each; none for a group that `config.enable_dynamic_sampling` leaves out."""
    size, dynamic = int(config.rloo_batch_size), bool(getattr(config, "enable_dynamic_sampling", False))
    grouped = getattr(config, "init_state_mode", "distinct") == "group"
    for low in range(0, len(rollouts), size):
        group = [{"success": won, "total_reward": reward, **rest} for won, reward, rest in rollouts[low : low + size]]
        if grouped:
            check_alike([episode["episode"] for episode in group])
        if dynamic and len({episode["success"] for episode in group}) == 1:
            yield []
            continue
        for episode in group:
            if reward_function is not None:
                episode["total_reward"] = float(reward_function(episode))
        rewards = np.array([episode["total_reward"] for episode in group])
        yield [{**episode, "group_rewards": rewards} for episode in group]


def _numbered(num_states: int, state_dim: int) -> np.ndarray:
    numbers = np.arange(num_states)
    return np.pad(numbers[:, None].astype(np.float32), ((0, 0), (0, state_dim - 1))) if state_dim else numbers


def _numbers(states: Any) -> np.ndarray:
    """The numbers of initial states, given as they are or as rows that begin with them."""
    given = np.asarray(states)
    if (
        given.ndim == 2
        and given.shape[1]
        and not given[:, 1:].any()
        and (given[:, 0] == given[:, 0].astype(np.int64)).all()
    ):
        given = given[:, 0].astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise SchemaError(
            f"initial states are {given.dtype} {list(given.shape)}; expected their numbers, [N], or rows that "
            "begin with them and are 0 otherwise, as DistributedInitialStateDataset makes them: the simulator "
            "has the states themselves."
        )
    return given
