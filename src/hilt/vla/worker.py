"""The worker of a rank: the roles of post-training as one plain object, which lives where its rank lives.

    actor-rollout   the policy, the simulators it acts in, and the log of what came of it
    reference       the policy as it was at the start, which a divergence is measured from
    critic          what a state is worth: a head on the policy, or a policy of its own
    process reward  what each chunk earns, by a policy that learns from outcomes (PRIME)
    reward          what an episode earned: the success verifier, the format, the environment, a learned classifier

The controller (`hilt.vla.train`) calls the same methods whether the worker is in its process, in one beside
it, or an actor of Ray on another machine: `collect`, `begin_collect`, `update`, `validate`, and `shared`, `own` and
`trained` for what is kept. Answers are small: figures and summaries. `collect` and `validate` are a rank's
own affair; in `update` and `shared` all ranks do the same.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.algos.config import Optimizer
from hilt.algos.tables import estimator
from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.core.progress import Report, silent
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.distributed.placement import rank_folder
from hilt.distributed.ranks import Ranks
from hilt.distributed.remote_workers import Stopped
from hilt.envs.pool import Pool, Reply
from hilt.envs.rewards import REWARDS, Classifier, named_reward, reward_and_success
from hilt.policies.base import Policy, Record, at_least_float32
from hilt.policies.copies import ActingCopy, ReferencePolicy
from hilt.policies.float8 import learning_precision, mismatch
from hilt.policies.io.memory import limit_memory, peak_memory
from hilt.policies.registry import is_new, new_policy, policy_class, policy_sizes
from hilt.policies.vla.flow import check_entropy, check_flow
from hilt.policies.vla.observation_adapters import Suite
from hilt.value.rollout_watch import RolloutWatch
from hilt.vla.collect import AheadCollection, Collected, Collector
from hilt.vla.config import Critic, Rewards, Vla
from hilt.vla.demonstrations import Imitating, words
from hilt.vla.episode import RolloutEpisode, Start, episode_summary, pack, unpack
from hilt.vla.episode_log import EpisodeLog
from hilt.vla.phase_clock import PhaseClock, TimedPolicy, TimedPool
from hilt.vla.sft import open_to_train
from hilt.vla.trials import starts_of, tried
from hilt.vla.update import ProcessReward, Updater


def make_worker(
    settings: Mapping[str, object],
    run: str,
    *,
    ranks: Ranks,
    stop: Callable[[], bool] = lambda: False,
    role: str = "both",
) -> Worker:
    """The worker of one rank, from settings as a tree. `role`: it trains, rolls out, or both."""
    return Worker(build(Vla(), settings), Path(run), ranks, stop, role)


class Worker:
    """All that a rank has."""

    def __init__(
        self, config: Vla, run: Path, ranks: Ranks, stop: Callable[[], bool] = lambda: False, role: str = "both"
    ):
        config = config.settled()
        self._config, self._ranks, self._stop = config, ranks, stop
        self._run = rank_folder(config.placement, run, ranks.rank)
        self._messages: list[str] = []
        self.report: Report = silent
        """Called with the progress of `collect`, `update` and `validate`; the group sets its own"""
        self._clock = PhaseClock()
        self._suite = words(config)
        self._rollout = role != "train"
        limit_memory(config.device, config.memory_limit_gb)
        self._pool = pool_of(config, config.pool.workers if self._rollout else 0)
        self._sizes = sizes_of(config.tasks[0], self._pool, self._suite) if is_new(config.policy) else {}
        self._mind_stop()
        self.policy = first_policy(config, self._sizes)
        self._mind_stop()
        if (kind := flow_kind(self.policy)) is not None:
            check_entropy(config.algorithm.entropy, kind)
        if config.learns_velocity:
            check_flow(config.algorithm.loss, kind)
        self._judge = _classifier(config.rewards.classifier) if config.rewards.classifier else None
        self.episodes: list[RolloutEpisode] = []
        """Of the step that is under way"""
        self._rewards: list[np.ndarray] = []
        self._earned: dict[int, np.ndarray] = {}
        """By trajectory, of the episodes of this step and of the surplus"""
        self._baselines: dict[int, float] | None = None
        self._beside: list[tuple[int, np.ndarray]] = []
        """Group and rewards of episodes of other steps, with which those of this one are compared"""
        self._before: dict[str, Any] | None = None
        self._ahead: AheadCollection[tuple[Collected, dict[str, object]] | None] | None = None
        """The collection of the next step, while it is under way"""
        self._following: dict[str, Any] | None = None
        """Where this rank stood when that began"""
        self._copy: ActingCopy | None = None
        self._noted = ("collecting episodes", 0, 0, "")
        self._threads = ThreadPoolExecutor(1, "hilt-collect")
        self._version = -1
        """Of the weights that came from a trainer"""
        self._saved: deque[Mapping[str, Any]] = deque(maxlen=config.checkpoint_keep)
        """This rank's own, as the checkpoints have it"""
        if self._rollout:
            kept = (int(config.rollouts_gb * 1e9), config.learns_velocity)
            self.log = EpisodeLog(self._run / "rollouts" / f"rank-{ranks.rank}", *kept)
            self._timed = TimedPool(self._pool, self._clock)
            self._collector = Collector(
                config.collect, config.tasks, self._timed, self._suite,
                rank=ranks.rank, ranks=ranks.size, seed=config.seed, notify=self._messages.append,
                watch=open_watch(config, self._pool, self.policy.eval()),
            )  # fmt: skip
            self._actor: Any = TimedPolicy(self.policy, self._clock)
        if role == "roll_out":
            attach_adapters(self.policy, config)
        else:
            self._learn()

    def _mind_stop(self) -> None:
        """Between parts that take long to make: a start that is stopped goes no
        further, and leaves no simulator behind."""
        if self._stop():
            self._pool.close()
            raise Stopped

    def _learn(self) -> None:
        """The side that trains."""
        config, critic, reference = self._config, None, None
        attach_adapters(self.policy, config)
        if config.has_reference:  # new adapters change nothing yet; what is sharded has no weights to share
            reference = ReferencePolicy(self.policy, config.reference.offload, share=not config.sharding.enabled)
        if config.critic.kind == "separate":
            judge = first_policy(config, self._sizes, value="shared")
            self._mind_stop()
            attach_adapters(judge, config)  # its value head is trained in full
            critic = self._make_optimizer(judge, config.critic.optimizer)
        self.process = self._process_reward(reference)
        head = config.critic.optimizer if config.critic.kind in ("shared", "detached") else None
        self.optimizer, self.critic = self._make_optimizer(self.policy, config.optimizer, head), critic
        extra = (
            Imitating(config, self._run, self.policy, self._suite, self._ranks.rank)
            if config.imitation.weight
            else None
        )
        self._extra = extra
        self.updater = Updater(
            config.algorithm, self.optimizer, ranks=self._ranks, critic=critic,
            reference=reference if config.algorithm.kl.where != "none" else None, extra_loss=extra,
            critic_warmup=config.critic.warmup_steps, process=self.process, seed=config.seed,
        )  # fmt: skip
        self.updater.report = self._tell

    def _process_reward(self, reference: Any) -> ProcessReward | None:
        """PRIME's reward policy, and what its log-ratio is to; `reference` is the policy as it was at the start."""
        prime, config = self._config.prime, replace(self._config, critic=Critic())
        if not prime.coefficient:
            return None
        judge = first_policy(replace(config, policy=prime.policy or config.policy), self._sizes)
        attach_adapters(judge, config)
        if prime.reference_policy:
            other = first_policy(replace(config, policy=prime.reference_policy), self._sizes)
            reference = ReferencePolicy(other, config.reference.offload)
        fixed = prime.update == "none"  # then no step is made, and no rate was chosen
        optimizer = replace(prime.optimizer, learning_rate=0.0) if fixed else prime.optimizer
        return ProcessReward(
            prime, self._make_optimizer(judge, optimizer), reference if prime.reference == "frozen" else None
        )

    def _tell(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        self.report(phase, done, total, note)

    def _note(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Keeps how far a collection beside an update is: its thread does not speak for the rank."""
        self._noted = (phase, done, total, note)

    def _make_optimizer(self, module: Policy, optimizer: Optimizer, head: Optimizer | None = None) -> Any:
        if self._config.sharding.enabled:
            from hilt.distributed.shard import Sharded

            return Sharded(module, optimizer, self._ranks, self._config.sharding, head)
        return DataParallelOptimizer(module, optimizer, self._ranks, head)

    # Collecting

    def collect(self, step: int, version: int | None = None) -> dict[str, object]:
        """The episodes of a step, of which the log and this worker have the frames, and the answer has summaries.
        `version`: of the weights that are here, if they are not those of this step."""
        if self._ahead is not None and self._ahead.step == step:
            made, self._ahead = self._ahead.finish(lambda: self._tell(*self._noted)), None
        else:
            self._leave_ahead()
            self._before = self._standing()
            self._collector.report = self._tell
            self.policy.eval()
            with self._whole():
                made = self._roll_out(step, self._actor, step if version is None else version, self._stop)
        if made is None:
            self._restore(self._before, step)
            return {"stopped": True}
        found, answer = made
        self.episodes = found.episodes
        self._rewards = [self._earned[episode.trajectory] for episode in self.episodes]
        self._beside = [(episode.start.group, self._earned[episode.trajectory]) for episode in found.beside]
        self._baselines = {
            group: float(self._earned[episode.trajectory].sum()) for group, episode in found.greedy.items()
        }
        self._earned = {number: self._earned[number] for number in _carried(self._standing())}
        self._pin()
        messages, self._messages[:] = list(self._messages), []
        return {**answer, "messages": messages}

    def begin_collect(self, step: int, version: int) -> None:
        """Begins the collection of the next step with the weights of now, which are of this `version`, beside the
        update that comes first. `collect` waits for it."""
        self._following = self._standing()
        self._copy = self._copy or ActingCopy(self.policy)
        actor = TimedPolicy(self._copy.refresh(), self._clock)
        self._collector.report = self._note
        beside = self._copy.beside()

        def roll_out(left: Callable[[], bool]) -> tuple[Collected, dict[str, object]] | None:
            with beside:
                return self._roll_out(step, actor, version, lambda: left() or self._stop())

        self._ahead = AheadCollection(step, roll_out, self._threads)

    def _roll_out(
        self, step: int, actor: Any, version: int, stop: Callable[[], bool]
    ) -> tuple[Collected, dict[str, Any]] | None:
        """Rolls out the episodes of a step. Returns them and the answer to the controller, or None when stopped."""
        began, summaries = self._timed.begin(), []

        def keep(episode: RolloutEpisode) -> None:
            earned = reward_of(episode, self._config.rewards, self._judge)
            self._earned[self.log.add(episode, step, earned)] = earned
            episode.last = None  # it was judged
            limit = self._timed.describe(episode.start.task)["step_limit"]
            summaries.append(episode_summary(episode, step, limit))

        greedy = estimator(self._config.algorithm.estimator).needs_greedy
        found = self._collector.collect(actor, version, step=step, greedy=greedy, keep=keep, stop=stop)
        if found.stopped:
            return None
        answer = {"episodes": summaries, "figures": found.figures, "version": version}
        return found, {**answer, "seconds": self._clock.since(began)}

    def _leave_ahead(self) -> None:
        """Gives up the collection that is under way; it is made again, by newer weights."""
        if self._ahead is not None:
            step = self._ahead.step
            self._ahead.leave()
            self._ahead = None
            self._restore(self._before, step)

    def _pin(self) -> None:
        """What the next step, this one made again, or a checkpoint goes on with
        stays in the log, whatever room there is."""
        states = [self._standing(), *self._saved, *([self._before] if self._before is not None else [])]
        self.log.pin({number for state in states for number in _carried(state)})

    # Learning

    def update(self, progress: float, ahead: bool = False) -> dict[str, float]:
        """One update from the episodes of this step; the figures are the same on all ranks. `progress`: how much of the
        run is done with it, for the learning rate. `ahead`: simulators may begin the next step."""
        if ahead and self._rollout and self._ahead is None:
            self._collector.ahead()
        apart = mismatch(self.policy.eval(), [episode.record for episode in self.episodes], self._ranks.sum_)
        self.policy.train()
        figures: dict[str, float] = apart | self.updater.update(
            self.episodes,
            self._rewards,
            progress=progress,
            baselines=self._baselines,
            beside=self._beside,
            expected=self._config.episodes,
        )
        figures |= self._weights_age() | peak_memory(self._config.device, self._ranks.max)
        self.episodes, self._rewards, self._baselines, self._beside = [], [], None, []
        self._before, self._following = self._following, None
        return figures

    def _weights_age(self) -> dict[str, float]:
        """How many training steps older than the newest weights those are that made the episodes, on the average."""
        newest = self._ranks.max(max((episode.version for episode in self.episodes), default=0))
        behind = torch.tensor([newest - episode.version for episode in self.episodes], dtype=torch.float64)
        age, count = self._ranks.sum_(torch.tensor([behind.sum(), len(behind)], dtype=torch.float64)).tolist()
        return {"weights_age": age / count} if count else {}

    # Validation

    def validate(self, step: int) -> dict[str, object]:
        """This rank's part of the validation: every N-th episode for N ranks. A
        lost one is a failure, with its error."""
        config, settings, rank = self._config, self._config.validation, self._ranks.rank
        self._leave_ahead()
        self._collector.settle()
        chosen = starts_of(self._pool, config.tasks, settings.split, settings.episodes, config.seed, settings.at_most)
        starts = chosen[rank :: self._ranks.size]
        acting = config.collect.rollout_settings(sample=settings.sample)
        options: dict[str, Any] = {"version": step, "seed": (config.seed, step, rank), "filmed": settings.videos}
        videos = self._run / "evaluations" / f"videos-{step:08d}"
        self.policy.eval()
        with self._whole(), learning_precision(self.policy):
            given = tried(
                self._actor, self._pool, starts, self._suite, acting, **options, videos=videos, stop=self._stop
            )
            outcomes = []
            for summary in given:
                outcomes.append(summary)
                self.report("validating", len(outcomes), len(starts))
        return {"stopped": True} if len(outcomes) < len(starts) else {"outcomes": outcomes}

    # What a checkpoint has

    def own(self) -> dict[str, object]:
        """What is this rank's alone: cursors, draws, and the surplus as numbers in the log.
        In the middle of a step, as it began."""
        self.log.sync()
        self._saved.append(self._before if self._before is not None else self._standing())
        return dict(self._saved[-1])

    def _standing(self) -> dict[str, Any]:
        return {**self._collector.state_dict(_in_the_log), "log_end": self.log.end()}

    def load_own(self, states: Sequence[Mapping[str, object]], step: int = 0, keep: bool = False) -> None:
        """Restores the state of each rank after this number of steps; without states it begins. Later
        steps in its log are removed, for they are made again; with `keep` they stay beside these."""
        self._leave_ahead()
        if states:
            self._saved.append(states[self._ranks.rank])
        self._restore(states[self._ranks.rank] if states else None, step, keep)

    def _restore(self, state: Mapping[str, Any] | None, step: int, keep: bool = False) -> None:
        self._before, self._earned = None, {}
        if (state is not None or not step) and not keep:
            self.log.forget_after(int(state["log_end"]) if state is not None else -1)

        def find(held: Mapping[str, Any]) -> RolloutEpisode:
            episode, earned = self.log.read(int(held["trajectory"]))
            self._earned[episode.trajectory] = earned
            return episode

        if state is not None:
            waiting = {
                n: group
                for n, group in state["surplus"].items()
                if all(held["trajectory"] in self.log for held in group.values())
            }
            if gone := len(state["surplus"]) - len(waiting):
                self._messages.append(
                    f"rank {self._ranks.rank}: {gone} groups that were carried over are no longer in "
                    f"{self.log.path}: others are collected in their place, and it does not go on bit for bit."
                )
            self._collector.load_state_dict({**state, "surplus": waiting}, find)
        self._pin()

    def shared(self) -> dict[str, object]:
        """What all ranks have in common; whole at rank 0."""
        tree = {"actor": self.optimizer.state_dict(), "updater": self.updater.state_dict()}
        if self.critic is not None:
            tree["critic"] = self.critic.state_dict()
        if self.process is not None:
            tree["prime"] = self.process.optimizer.state_dict()
        if self._extra is not None:
            tree["imitation"] = self._extra.state_dict()
        return tree if self._ranks.rank == 0 else {}

    def load_shared(self, tree: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(tree["actor"])
        self.updater.load_state_dict(tree["updater"])
        if self.critic is not None:
            self.critic.load_state_dict(tree["critic"])
        if self.process is not None:
            self.process.optimizer.load_state_dict(tree["prime"])
        if self._extra is not None:
            self._extra.load_state_dict(tree["imitation"])

    def trained(self) -> dict[str, torch.Tensor]:
        """What is trained, by name; whole at rank 0."""
        state: dict[str, torch.Tensor] = self.optimizer.state_dict()["trained"]
        return state if self._ranks.rank == 0 else {}

    def sizes(self) -> dict[str, object]:
        """Returns the sizes of a new policy, as the first task has them."""
        return self._sizes

    # Where those that roll out are not those that train

    def hand_out(self) -> list[object]:
        """The episodes of this step, for a trainer; rewards beside them."""
        given = [(pack(episode), rewards) for episode, rewards in zip(self.episodes, self._rewards, strict=True)]
        self.episodes, self._rewards, self._before = [], [], None
        return [given, self._baselines, self._beside]

    def take_in(self, parts: Sequence[Any]) -> None:
        for given, baselines, beside in parts:
            self._beside += [(int(group), rewards) for group, rewards in beside]
            self.episodes += [unpack(packed) for packed, _ in given]
            self._rewards += [rewards for _, rewards in given]
            self._baselines = baselines if self._baselines is None else {**self._baselines, **(baselines or {})}

    def weights(self) -> tuple[int, dict[str, np.ndarray]]:
        """What is trained, and its version."""
        return int(self.updater.updates), {
            name: at_least_float32(tensor).numpy() for name, tensor in self.trained().items()
        }

    def take_weights(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """What a trainer has learned; the version that is here already is not copied again."""
        if version == self._version:
            return
        self._version = version
        own = dict(self.policy.named_parameters())
        with torch.no_grad():
            for name, array in weights.items():
                own[name].copy_(torch.from_numpy(np.array(array)))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.leave()
        self._threads.shutdown()
        with contextlib.suppress(AttributeError):
            self.log.close()
        self._pool.close()

    def _whole(self) -> Any:
        """Within it all weights are there, also where ranks share them."""
        return self.optimizer.whole() if hasattr(self, "optimizer") else contextlib.nullcontext()


# --- actor ---


def pool_of(config: Vla, workers: int) -> Pool:
    """The simulators of a rank."""
    pool = config.pool
    options: dict[str, Any] = {
        "start_s": pool.start_s,
        "step_s": pool.step_s,
        "restarts": pool.restarts,
        "envs_per_worker": pool.envs_per_worker,
    }
    return Pool(workers, pool.slots, task_options=config.task_options, **options)


def first_policy(config: Vla, sizes: Mapping[str, object], value: str = "", device: str = "") -> Policy:
    """The policy as the run begins with it, with a value head if it is to have one. `sizes`: those of a new one."""
    value, device = (
        value or (config.critic.kind if config.critic.kind in ("shared", "detached") else ""),
        device or config.device,
    )
    options = {**config.policy_options}
    if value:
        options |= policy_class(config.policy).value_options(value, options)
    if is_new(config.policy):
        policy: Policy = new_policy(config.policy, sizes, options, config.seed).to(device)
    else:
        policy = open_to_train(config.policy, device, options, config.policy_options.get("dtype"), config.lora)
    policy.keeps_answers = config.learns_velocity
    return policy


def flow_kind(policy: Policy) -> str | None:
    """Returns the kind of noise of a policy with a flow ("sde", "cps" or "noise"), and None for other policies."""
    config: Any = getattr(policy, "config", None)
    return config.flow.kind if hasattr(config, "flow") and getattr(config, "head", "flow") == "flow" else None


def attach_adapters(policy: Policy, config: Vla) -> None:
    if config.lora.rank:
        from hilt.policies.io.lora import attach

        attach(
            policy,
            config.lora.rank,
            config.lora.alpha,
            config.lora.targets or "all-linear",
            seed=config.seed,
            dtype=torch.float32,
        )


def first_reply(task: str, pool: Pool) -> Reply:
    """What a task shows first."""
    pool.start(0, Start(task, next(iter(pool.describe(task)["initial_states"])), 0, 0))
    (reply,) = pool.collect([0])
    if reply.error:
        raise ConfigError(f"{task} does not begin:\n{reply.error}")
    return reply


def open_watch(config: Vla, pool: Pool, policy: Policy | None = None) -> RolloutWatch | None:
    """The value model that looks at rollouts, if there is one. One that cannot look at the first task is an error now;
    one that learned from the records of a policy is checked where there is a `policy`."""
    if not config.value.model:
        return None
    watch = RolloutWatch(config.value, config.tasks)
    if policy is None and watch.reads_records:
        return watch
    reply = first_reply(config.tasks[0], pool)
    record: Record = {}
    if policy is not None and watch.reads_records:
        _, record = policy.act([words(config).observe(reply.observation, reply.instruction)], False)
    watch.check(reply.observation, record)
    return watch


def check_value(config: Vla) -> None:
    """Refuses a value model that cannot look at the first task; other machines have simulators of their own."""
    if config.value.model and config.placement.kind != "ray":
        with pool_of(config, 0) as pool:
            open_watch(config, pool)


def sizes_of(task: str, pool: Pool, suite: Suite) -> dict[str, object]:
    """What a new policy must know of a task: its cameras and their size, and how
    many numbers states and actions have."""
    row = suite.views(first_reply(task, pool).observation)
    return policy_sizes(row, len(row.get("state", ())), int(pool.describe(task)["action_dim"]))


def trained_policy(
    config: Vla, sizes: Mapping[str, object], trained: Mapping[str, torch.Tensor], device: str = "cpu"
) -> Policy:
    """The policy of a run with what it has learned, adapters beside its weights if it has some."""
    policy = first_policy(config, sizes, device=device)
    attach_adapters(policy, config)
    own = dict(policy.named_parameters())
    with torch.no_grad():
        for name, tensor in trained.items():
            own[name].copy_(tensor)
    policy.eval()
    return policy


# --- reward ---


def reward_of(episode: RolloutEpisode, rewards: Rewards, judge: Classifier | None = None) -> np.ndarray:
    """What each row earned, float32 [rows]: environment's rewards where they came, all else at the last one.

    r_t = environment * e_t,   r_last += success * [it succeeded] + format * [no chunk was ill-formed] + learned *
                               classifier(last frame)
    """
    earned = rewards.environment * episode.rewards.astype(np.float32)
    if episode.rows:
        earned[-1] += rewards.success * episode.success + rewards.format * (not episode.ill_formed)
        if judge is not None:
            earned[-1] += rewards.learned * reward_and_success(judge(episode.last))[0]
    return earned


def _classifier(folder: str) -> Classifier:
    if REWARDS.is_name(folder):
        return named_reward(folder)
    from hilt.classifier.reward import reward_function

    return reward_function(folder)


def _in_the_log(episode: RolloutEpisode) -> dict[str, int]:
    return {"trajectory": episode.trajectory}


def _carried(state: Mapping[str, Any]) -> list[int]:
    """The trajectories of the episodes that wait for the next step."""
    return [int(held["trajectory"]) for group in state["surplus"].values() for held in group.values()]
