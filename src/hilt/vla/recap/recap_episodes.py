"""Episodes of a policy of chunks, recorded step by step in a log, from which values and policies are learned."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError
from hilt.core.progress import Report, silent
from hilt.core.trajectory import INSTRUCTION, Source, Step
from hilt.core.tree import Tree
from hilt.envs.env_protocol import success_of
from hilt.envs.fitted import open_task
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import Suite
from hilt.recording.recording_folder import columns_of, nested_copy
from hilt.replay import Log, Schema
from hilt.teleop.intervene import attribute
from hilt.vla.rollout import ChunkAgent

SPLIT = "train"
"""Whose initial states are tried, from the first on and around again"""


@dataclass(frozen=True)
class EpisodePlan:
    """What a policy tries, and how."""

    task: str
    task_options: Mapping[str, Any]
    instruction: str = ""
    """Empty: that of the task"""
    episodes: int = 50
    temperature: float = 1.0
    seed: Sequence[int] = (0,)


def record_episodes(
    policy: Policy,
    suite: Suite,
    plan: EpisodePlan,
    path: Path,
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
) -> tuple[int, int]:
    """Lets a policy sample its actions in a task until the log at `path` has the episodes of the plan, and goes on
    where it was stopped. Returns how many there are and how many of them succeeded."""
    task = plan.task
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(contextlib.closing(open_task(task, dict(plan.task_options))))
        words = plan.instruction or str(attribute(env, "instruction", ""))
        known = attribute(env, "initial_states", {})
        count = known.get(SPLIT, 0)
        if (path / "log.json").is_file():
            log = stack.enter_context(Log.open(path, "a"))
            for trajectory in log.trajectories():
                if "success" not in log.facts.about(trajectory):  # it was interrupted
                    log.delete(trajectory)
        else:
            log = stack.enter_context(Log.create(path, Schema.declare(columns_of(env))))
        agent = stack.enter_context(contextlib.closing(ChunkAgent(policy, suite, words, temperature=plan.temperature)))
        while (done := len(log.trajectories())) < plan.episodes and not stop():
            report(f"{task}, episodes of the policy", done, plan.episodes)
            options = {"split": SPLIT, "state": done % count} if count else None
            episode_seed = int(np.random.SeedSequence([*plan.seed, done]).generate_state(1)[0])
            steps, info = _episode(env, agent, options, episode_seed)
            success = success_of(info)
            if success is None:
                raise ConfigError(
                    f"{task} does not report success, so no value can be learned of its episodes. Let it report one "
                    "in info, or label recorded episodes (hilt data label) and leave recap.rounds out."
                )
            writer = log.episode(actor="recap")
            for step in steps:
                writer.append(step)
            writer.end()
            facts = {"task": task, INSTRUCTION: words, "seed": episode_seed, **(options or {})}
            log.annotate(writer.trajectory, **facts, success=bool(success))
        there = log.trajectories()
        return len(there), sum(bool(log.facts.about(one)["success"]) for one in there)


def _episode(env: Any, agent: ChunkAgent, options: Any, seed: int) -> tuple[list[Tree], dict[str, Any]]:
    """The columns of all steps of one episode, and the info of its last one."""
    draws, steps = np.random.default_rng(seed), list[Tree]()
    observation, info = env.reset(seed=seed, options=options)
    before, ended = nested_copy(observation), False
    agent.begin()
    while not ended:
        observed = time.time()
        action = np.asarray(agent.sample_actions(before, seed=int(draws.integers(2**31)), argmax=False))
        sent = time.time()
        observation, reward, terminated, truncated, info = env.step(action)
        after, ended = nested_copy(observation), bool(terminated or truncated)
        times = {"observed": observed, "sent": sent, "applied": time.time()}
        earned: Any = np.float32(reward)
        ends = bool(terminated), bool(truncated)
        steps.append(Step(before, action, earned, after, *ends, Source.POLICY, 0, times).columns())
        before = after
    return steps, info
