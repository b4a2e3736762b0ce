"""The policy that a run has made: of post-training, with the weights of its best validation or of a checkpoint, and its
evaluation; of fine-tuning, as it acts in each task of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, require_module
from hilt.envs.fitted import open_task
from hilt.policies.base import Policy
from hilt.policies.io.tensor_files import Tensors
from hilt.runs import checkpoint
from hilt.runs.evaluation import EVALUATION_FILE, EvaluationResult
from hilt.runs.run_precision import frozen as frozen_settings
from hilt.teleop.intervene import attribute
from hilt.vla.config import Vla
from hilt.vla.demonstrations import words
from hilt.vla.rollout import ChunkAgent, ChunkOptions
from hilt.vla.sft import RESULT, Sft, open_policy
from hilt.vla.trials import evaluations_of, starts_of, tried
from hilt.vla.worker import pool_of, trained_policy

if TYPE_CHECKING:
    from torch import Tensor

BEST, SIZES = "best", "sizes.json"
"""Of a run: the folder of the best weights so far, and the file of the sizes that a new policy took from its task"""


def policy_of(run: Path, which: str = "best", device: str = "cpu") -> Policy:
    """The policy of a run: as it was at its "best" validation, at the "last"
    checkpoint, or at the one of a training step."""
    return policy_and_step(run, which, device)[0]


def policy_and_step(run: Path, which: str = "best", device: str = "cpu") -> tuple[Policy, int]:
    """The same, and the training step that its weights are from."""
    step, weights = trained_weights(run, which)
    return trained_policy(frozen_settings(Vla, run), sizes_of_run(run), weights, device), step


def sizes_of_run(run: Path) -> dict[str, object]:
    """What a new policy took from its first task; of a policy that came from a folder, nothing."""
    return read_json(run / SIZES) if (run / SIZES).is_file() else {}


def evaluate(
    run: Path,
    which: str = "best",
    split: str = "",
    episodes: int = 0,
    *,
    sample: bool = False,
    seed: int = 0,
    workers: int = 0,
    videos: int = 0,
    chunks: ChunkOptions | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[EvaluationResult]:
    """Lets the policy of a run try this number of episodes of each of its tasks; 0: every state of the split once. An
    empty `split` stands for the states that published figures are of, where the tasks have them, else "test". `watch`
    is called with the numbers of episodes that are done and of all; with 0 and 0 while the simulators start. `chunks`:
    how they are executed and chosen, if not as in the run."""
    config, began = frozen_settings(Vla, run), time.monotonic()
    if videos:
        require_module("av", "A video of an episode", "formats")
    policy, step = policy_and_step(run, which, config.device)
    policy = (chunks or ChunkOptions()).acting(policy)
    watch(0, 0)
    with contextlib.closing(pool_of(config, workers)) as pool:
        starts = starts_of(pool, config.tasks, split, episodes, seed)
        split = starts[0].split
        of_train = {task: pool.describe(task).get("states_of_train", {}).get(split, 0) for task in config.tasks}
        folder, outcomes = run / "evaluations", list[dict[str, Any]]()
        executed = (chunks or ChunkOptions()).settings(config.collect.execute)
        acting = replace(config.collect.rollout_settings(sample=sample), chunks=executed, drawn_share=1.0)
        if chunks is not None and chunks.temperature is not None:
            acting = replace(acting, temperature=chunks.temperature)
        options: dict[str, Any] = {
            "version": step,
            "seed": (seed, step),
            "videos": folder / f"videos-{step:08d}",
            "filmed": videos,
        }
        for outcome in tried(policy, pool, starts, words(config), acting, **options):
            outcomes.append(outcome)
            watch(len(outcomes), len(starts))
    seconds = time.monotonic() - began
    made = evaluations_of(outcomes, config.tasks, split, step, sample, seed, seconds, folder, of_train=of_train)
    drawn = {"temperature": acting.temperature} if sample and acting.temperature != 1.0 else {}
    if chosen := {**drawn, **policy.acting_figures()}:  # of all tasks together
        for one in made:
            one.execution |= chosen
            write_json(Path(one.folder or folder) / EVALUATION_FILE, one.to_json())
    return made


def agents(run: Path, chunks: ChunkOptions | None = None) -> Iterator[tuple[str, ChunkAgent, int]]:
    """Yields for each task of a run of fine-tuning: its name, the policy as it acts there, and the number of steps that
    it had learned. `chunks`: how they are executed and chosen, if not one after the other."""
    config = frozen_settings(Sft, run)
    if not (run / RESULT).is_file():
        raise ConfigError(
            f"{run} has no policy yet: it is written when the run ends or is stopped. Go on with: hilt "
            f"train sft --run {run} --resume"
        )
    if not config.tasks:
        raise ConfigError(f"{run} names no task to try its policy on: it was given data, and no tasks=[NAME].")
    policy = open_policy(run, config).eval()
    for name in config.tasks:
        with contextlib.closing(open_task(name, config.task_options)) as env:
            instruction = config.instruction or str(env.get_wrapper_attr("instruction"))
            keeps_rate = attribute(env, "timing", None) is not None
        wanted = chunks or ChunkOptions()
        settings = wanted.settings(real_time=keeps_rate)
        heat = 1.0 if wanted.temperature is None else wanted.temperature
        made = ChunkAgent(wanted.acting(policy), words(config), instruction, settings, temperature=heat)
        with contextlib.closing(made) as agent:
            yield name, agent, int(read_json(run / RESULT)["best_step"])


def trained_weights(run: Path, which: str) -> tuple[int, Mapping[str, Tensor]]:
    """The training step and the weights that were trained."""
    if which == "best":
        if (step := newest_step(run, which)) < 0:
            raise ConfigError(
                f"{run} has no best policy yet: it was never validated. Give --checkpoint last, or go on with it first."
            )
        return step, weights_at(run, which, step)
    if which != "last" and not which.isdecimal():
        known = ", ".join(map(str, checkpoint.numbers(run))) or "none"
        raise ConfigError(f"checkpoint {which!r}: expected best, last, or the number of one: {known}.")
    saved = checkpoint.latest(run) if which == "last" else checkpoint.load(run, int(which))
    if saved is None:
        raise ConfigError(
            f"{run} has no checkpoint yet: one is made every checkpoint_period training steps, and "
            "when it ends or is stopped."
        )
    return saved.update, saved.agent["shared"]["actor"]["trained"]


def newest_step(run: Path, which: str) -> int:
    """The training step of the "best" or the "last" weights of a run so far; -1: there are none."""
    if which == "best":  # each was better than before
        return max((int(path.name) for path in (run / BEST).glob("*") if path.name.isdecimal()), default=-1)
    return max(checkpoint.numbers(run), default=-1)


def weights_at(run: Path, which: str, step: int) -> Mapping[str, Tensor]:
    """The weights that `newest_step` has found."""
    if which == "best":
        return Tensors(run / BEST / str(step))
    return trained_weights(run, str(step))[1]
