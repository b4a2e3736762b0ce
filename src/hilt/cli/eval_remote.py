"""``hilt eval --policy ws://HOST:PORT``: a policy that runs elsewhere tries the tasks of a run, or one task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hilt.cli.train_options import plain
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.progress import Report

if TYPE_CHECKING:
    from hilt.cli.eval_command import EvalSettings
    from hilt.policies.vla.observation_adapters import Suite
    from hilt.runs.evaluation import EvaluationResult
    from hilt.serving import RemotePolicy

FOLDER = Path("evaluations")
"""Where they are recorded: a run's own evaluations are of its own policies"""


class TriedTasks(NamedTuple):
    """What is tried, and how a policy sees and acts there."""

    tasks: list[str]
    options: dict[str, Any]
    suite: Suite
    instruction: str
    """Empty: that of the task"""
    execute: int
    """Actions of each chunk that are executed; 0: all"""


def remote_results(given: EvalSettings, report: Report, asking: Callable[[Any], Any]) -> Iterator[EvaluationResult]:
    """Yields the result of each task. `asking`: returns what asks the person at the console, if somebody is."""
    from hilt.envs.chunk_executor import ChunkSettings
    from hilt.hil.config import Hil
    from hilt.hil.environment import spaces
    from hilt.hil.evaluate import evaluate
    from hilt.serving.remote_policy import RemotePolicy, server_key
    from hilt.vla.rollout import ChunkAgent

    _check(given)
    tried = tried_tasks(given.run)
    with contextlib.closing(RemotePolicy(given.policy, key=server_key(given.policy, given.policy_key))) as policy:
        if given.sample and not policy.is_hilt:
            raise ConfigError(f"--sample: the server at {policy.url} is openpi's, and decides that. Leave it out.")
        suite = tried.suite if policy.is_hilt else replace(tried.suite, command=np.asarray)
        if given.best_of is not None and not policy.is_hilt:
            raise ConfigError(f"--best-of: the server at {policy.url} is openpi's, and decides how actions are drawn.")
        acting = given.chunk_options().acting(policy)
        for task in tried.tasks:
            config = Hil(task=task, task_options=dict(tried.options))
            instruction = check_policy(policy, task, tried._replace(suite=suite))
            wanted = given.chunk_options()
            real_time = any(option is not None for option in given.chunks) and spaces(config).keeps_rate
            chunks = wanted.settings(tried.execute, real_time) or ChunkSettings(execute=tried.execute, delay=0)
            agent: Any
            heat = 1.0 if given.temperature is None else given.temperature
            with contextlib.closing(ChunkAgent(acting, suite, instruction, chunks, temperature=heat)) as agent:
                yield evaluate(
                    config,
                    agent,
                    given.split,
                    episodes=given.episodes,
                    seed=given.seed,
                    sample=given.sample or not policy.is_hilt,  # openpi's policies draw noise
                    update=policy.version,
                    folder=FOLDER / plain(task),
                    videos=given.videos,
                    report=report,
                    ask=asking(config),
                )


def _check(given: EvalSettings) -> None:
    if not given.policy:
        raise ConfigError(f"--policy-key {given.policy_key}: there is no --policy ws://HOST:PORT that it is for.")
    if given.checkpoint != "last":
        raise ConfigError(
            f"--checkpoint {given.checkpoint}: the server chooses the weights of {given.policy}. Leave it out."
        )
    if given.workers != 1:
        raise ConfigError(f"--workers {given.workers}: one process asks the policy at {given.policy}. Leave it out.")


def tried_tasks(run: Path) -> TriedTasks:
    """Returns the tasks of a run, or the task that was given instead of a run."""
    from hilt.hil.evaluate import config_of
    from hilt.policies.vla.observation_adapters import known_suites, suite
    from hilt.runs.folder import CONFIG
    from hilt.vla import sft, train
    from hilt.vla.demonstrations import words

    if train.is_run(run):
        post = train.KIND.frozen(run)
        return TriedTasks(list(post.tasks), dict(post.task_options), words(post), "", post.collect.execute)
    if sft.KIND.is_run(run):
        taught = sft.KIND.frozen(run)
        return TriedTasks(list(taught.tasks), dict(taught.task_options), words(taught), taught.instruction, 0)
    config = config_of(run) if (run / CONFIG).is_file() else None
    task, options = (str(run), {}) if config is None else (config.task, dict(config.task_options))
    try:
        return TriedTasks([task], options, suite(task), "", 0)
    except UnknownNameError:
        raise ConfigError(
            f"{run}: expected the folder of a run, or a task of a suite whose observations Hilt can name "
            f"({', '.join(known_suites())}), such as tabletop/pick."
        ) from None


def check_policy(policy: RemotePolicy, task: str, tried: TriedTasks) -> str:
    """Asks the policy about the first observation of a task, so that what does not fit is refused before an episode:
    cameras and state by the server, the size of actions here. Returns the instruction."""
    from hilt.envs.fitted import open_task
    from hilt.teleop.intervene import attribute

    with contextlib.closing(open_task(task, tried.options)) as env:
        instruction = tried.instruction or str(attribute(env, "instruction", ""))
        first = next(iter(attribute(env, "initial_states", {})), "")
        observation, _ = env.reset(seed=0, options={"split": first, "state": 0} if first else None)
        assert isinstance(observation, Mapping)  # `open_task` gives names to observations without
        actions, _ = policy.act([tried.suite.observe(observation, instruction)], sample=False)
        commands = np.asarray(tried.suite.command(actions[0]))
        expected = tuple(env.action_space.shape or ())
    if commands.shape[1:] != expected:
        raise ConfigError(
            f"{policy.url} answers with actions of {policy.action_dim} numbers, and {task} takes {list(expected)}"
            + (
                f" (as commands they have {list(commands.shape[1:])})"
                if commands.shape[1:] != actions.shape[2:]
                else ""
            )
            + ": the policy is of another robot. Evaluate it on its own task."
        )
    return instruction
