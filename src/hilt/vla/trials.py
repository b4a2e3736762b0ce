"""How good a policy of chunks is: it tries numbered initial states of several tasks
through a pool, and every try counts.

Post-training validates with it, and `hilt eval` tries the policy of such a run.
`hilt.hil.evaluate` is for agents of single steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.errors import UnknownNameError
from hilt.core.files import DISK
from hilt.envs.pool import EpisodePool
from hilt.envs.task import split_to_report
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import Suite
from hilt.replay.tensors import generator
from hilt.runs.evaluation import EVALUATION_FILE, EpisodeOutcome, EvaluationResult
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start
from hilt.vla.episode_log import film
from hilt.vla.rollout import ChunkAgent, RolloutSettings, roll_out, roll_out_steps

VIDEO_HZ = 4.0
"""Chunks that a video shows in a second"""


def starts_of(
    pool: EpisodePool, tasks: Sequence[str], split: str, episodes: int, seed: int, at_most: int = 0
) -> list[Start]:
    """The starts of `episodes` for each task, from the first state on, cyclically; 0: every state once. `split`: empty
    for the one to be reported, as `split_to_report` has it. `group` is a start's place, in which
    the tasks take turns: videos of the first few show all of them, and `at_most`
    above 0 limits the total number of starts."""
    found: list[Start] = []
    for turn, task in enumerate(tasks):
        there = pool.describe(task)["initial_states"]
        chosen = split or split_to_report(there)
        if chosen not in there:
            raise UnknownNameError(f"split of {task}", chosen, there)
        seeds = np.random.SeedSequence([seed, 3]).generate_state(episodes or there[chosen])
        found += [
            Start(task, chosen, n % there[chosen], int(one), group=n * len(tasks) + turn) for n, one in enumerate(seeds)
        ]
    return [start for start in found if start.group < at_most] if at_most else found


def tried(
    policy: Policy,
    pool: EpisodePool,
    starts: Sequence[Start],
    suite: Suite,
    settings: RolloutSettings,
    *,
    version: int,
    seed: Sequence[int],
    videos: Path | None = None,
    filmed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each episode as it ends: its place, the fields of an `EpisodeOutcome`, its task.
    Writes `videos` of the first `filmed` places. With `settings.chunks`, an outcome has the number of steps in which
    the arm was ``held``, and these settings as ``chunks``, too."""
    draws = generator(int(np.random.SeedSequence([*seed, 2]).generate_state(1)[0]))
    acting: dict[str, Any] = {"suite": suite, "settings": settings, "version": version, "stop": stop}
    episodes: Iterator[tuple[RolloutEpisode | LostEpisode, ChunkAgent | None]]
    if settings.chunks is None:
        episodes = ((one, None) for one in roll_out(policy, pool, starts, generator=draws, **acting))
    else:
        episodes = roll_out_steps(policy, pool, starts, seed=seed, **acting)
    for one, agent in episodes:
        if videos is not None and one.start.group < filmed and isinstance(one, RolloutEpisode) and one.rows:
            DISK.make_folders(videos)
            film(one, videos / f"{one.start.task.replace('/', '-')}-{one.start.state:03d}.mp4", VIDEO_HZ)
        held = {} if settings.chunks is None else {"chunks": settings.chunks.to_json()}
        yield {**outcome_of(one), **held, **({} if agent is None else {"held": agent.chunks.count(-1)})}


def outcome_of(one: RolloutEpisode | LostEpisode) -> dict[str, object]:
    """A lost one is a failure, with the last line of its error."""
    start = {"place": one.start.group, "task": one.start.task, "state": one.start.state, "seed": one.start.seed}
    if isinstance(one, LostEpisode):
        return {**start, "success": False, "steps": 0, "total": 0.0, "error": one.error.strip().splitlines()[-1]}
    return {**start, "success": one.success, "steps": one.steps, "total": float(one.rewards.sum()), "error": ""}


def evaluations_of(
    outcomes: Sequence[dict[str, Any]],
    tasks: Sequence[str],
    split: str,
    version: int,
    sample: bool,
    seed: int,
    seconds: float,
    folder: Path,
    again: bool = False,
    of_train: Mapping[str, int] | None = None,
) -> list[EvaluationResult]:
    """One for each task, all episodes counted, and written below the folder: beside what is there, or, when made
    `again`, in its place. `of_train`: how many states of the split train each task's have among them."""
    made = []
    for task in tasks:
        mine = sorted(
            (outcome for outcome in outcomes if outcome["task"] == task), key=lambda outcome: outcome["place"]
        )
        one = EvaluationResult(
            task,
            split,
            version,
            sample,
            seed,
            seconds=seconds * len(mine) / len(outcomes),
            of_train=(of_train or {}).get(task, 0),
        )
        one.outcomes = [
            EpisodeOutcome(**{name: outcome[name] for name in ("state", "seed", "success", "steps", "total", "error")})
            for outcome in mine
        ]
        if mine and "chunks" in mine[0]:
            steps, held = (sum(outcome.get(name, 0) for outcome in mine) for name in ("steps", "held"))
            one.execution = {**mine[0]["chunks"], "steps": steps, "held": held, "idle_share": held / max(1, steps)}
        stem = f"{split}-{version:08d}-{task.replace('/', '-')}" + "-sampled" * sample
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        one.folder = next(path for path in (folder / name for name in names) if again or not path.exists())
        DISK.make_folders(one.folder)
        write_json(one.folder / EVALUATION_FILE, one.to_json())
        made.append(one)
    return made
