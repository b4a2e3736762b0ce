"""Measures the success of a policy on numbered initial states, without an operator; every episode counts.

The policy takes its most likely actions (`sample`: it samples them, as in training). Each episode has a seed of its
own, derived from the evaluation's, so that the outcome is the same with any number of workers. Success comes with a 95%
interval (Wilson's). An episode in which the environment fails counts as lost, and is shown.

Success is what the task itself reports. Where it does not, as on an arm, a person can be asked after each
episode. A reward classifier ends episodes as it does in the run, and its verdict is kept beside the
success; it decides only where there is no other answer.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.children import PipedProcess
from hilt.core.config import thaw
from hilt.core.errors import ConfigError, DeadlineError, HiltError, UnknownNameError, optional_module
from hilt.core.files import DISK
from hilt.core.progress import Report, silent
from hilt.core.signals import leave_to_parent
from hilt.core.threads import one_thread
from hilt.core.trajectory import Source, Step
from hilt.core.tree import Array, Tree
from hilt.core.validate import check_values
from hilt.envs.env_protocol import TASK_SUCCESS, Env, success_of
from hilt.envs.task import split_to_report
from hilt.formats.episodes import INSTRUCTION
from hilt.hil.config import Hil
from hilt.hil.environment import make_env, spaces
from hilt.hil.make_agent import make_agent as make_agent
from hilt.recording.film import cameras, film, video_of
from hilt.recording.record import RATE_HZ
from hilt.recording.recording_folder import columns_of, nested_copy
from hilt.replay import Log, Schema
from hilt.runs.evaluation import EVALUATION_FILE, EpisodeOutcome, EvaluationResult, new_folder
from hilt.runs.run_precision import settle
from hilt.teleop.intervene import attribute

if TYPE_CHECKING:
    from hilt.policies.agent.step_agent import StepAgent
    from hilt.runs.checkpoint import Checkpoint

EPISODE_S = 600.0
"""The maximum duration of an episode of a worker, in seconds"""


Watch = Callable[[EpisodeOutcome, int, int], None]
"""Called with each episode: its outcome, how many are done, and the total"""
Ask = Callable[[str, float], bool]
"""Asks a person a question that is answered by yes or no, within a timeout in seconds"""
ANSWER_S = 3_600.0
"""The timeout for the answer of a person, in seconds"""


def evaluate(
    config: Hil,
    agent: StepAgent,
    split: str = "",
    states: Sequence[int] = (),
    episodes: int | None = None,
    *,
    seed: int = 0,
    sample: bool = False,
    update: int = 0,
    workers: int = 1,
    folder: Path | None = None,
    videos: int = 0,
    watch: Watch = lambda outcome, done, total: None,
    report: Report = silent,
    ask: Ask | None = None,
) -> EvaluationResult:
    """Tries each of `states` (all of the split when empty) once (`split`: empty for the one to be reported, as
    `split_to_report` has it); or `episodes` in all, from the first state on and around again.

    `agent` has ``sample_actions(observation, seed=, argmax=)``, ``begin()`` if it has to know where an episode begins,
    and ``execution()`` if it executes chunks; with several `workers` it is an `Agent`, which they make again from its
    weights. With a `folder` the episodes are recorded in a new folder below it, with ``evaluation.json`` and
    `videos` of the first ones. `ask`: called after each episode of which the task reports no success, to
    ask a person, as `hilt.envs.rewards.ask_on_console` does.
    """
    _check_wishes(workers, episodes, seed, folder, videos, ask)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(contextlib.closing(make_env(config, operator=False)))
        known = attribute(env, "initial_states", {})
        split = split or split_to_report(known)
        of_train = attribute(env, "states_of_train", {}).get(split, 0)
        done = EvaluationResult(config.task, split, update, sample, seed, of_train=of_train)
        tries = _tries(config.task, known, split, states, episodes, seed)
        one = workers == 1
        settled = config if one else settle(config)[0]  # workers compute in the precision of this process
        plan = EvaluationPlan(settled, split, update, sample, keep=folder is not None)
        record = None
        if folder is not None:
            record = stack.enter_context(contextlib.closing(EvaluationRecorder(folder, env, plan, videos)))
        if one:
            made = _alone(plan, agent, env, tries, ask)
        else:
            made = _together(plan, agent.acting_state(slow=not sample), tries, workers)
        name = f"{config.task}, {split} states"
        report(name, 0, len(tries))
        for outcome, steps in stack.enter_context(contextlib.closing(made)):
            done.outcomes.append(outcome)
            if record is not None:
                record.add(outcome, steps)
            watch(outcome, len(done.outcomes), len(tries))
            report(name, len(done.outcomes), len(tries), f"{done.successes} succeeded" if done.interval else "")
        done.seconds, done.execution = time.monotonic() - began, getattr(agent, "execution", dict)()
        if record is not None:
            done.folder = record.folder
            done.videos = record.finish(done, report)
    return done


def _check_wishes(
    workers: int, episodes: int | None, seed: int, folder: Path | None, videos: int, ask: Ask | None
) -> None:
    """Refuses what cannot be done, before hours of work."""
    check_values(minimum=1, workers=workers, episodes=episodes)
    check_values(minimum=0, videos=videos, seed=seed)
    if ask is not None and workers > 1:
        raise ConfigError(
            f"{workers} workers, and a person is to be asked after each episode: one process tries "
            "them then. Give workers=1."
        )
    if videos and folder is None:
        raise ConfigError(f"{videos} videos were asked for, and no folder to record in: give folder=.")
    if videos:
        optional_module("av", "A video of an episode", "formats")


# Which weights


def load_agent(run: Path, checkpoint: str | int = "last") -> StepAgent:
    """The agent of a run as a checkpoint has it: "last", "best" (see `find_checkpoint`), or of this update."""
    config = config_of(run)
    agent = make_agent(config, spaces(config))
    agent.load_state_dict(find_checkpoint(run, checkpoint).agent)
    return agent


def find_checkpoint(run: Path, which: str | int = "last") -> Checkpoint:
    """ "best" is the one with the highest success, or return where success is unknown, in an evaluation on the split
    "eval": never one on the states that are reported."""
    from hilt.runs.checkpoint import latest, load, numbers

    if str(which) == "best":
        results = [read_json(path) for path in sorted(run.glob(f"evaluations/*/{EVALUATION_FILE}"))]
        there = set(numbers(run))
        found = [result for result in results if result["split"] == "eval" and result["update"] in there]
        if not found:
            raise ConfigError(
                f"{run}: no checkpoint was evaluated on the split eval. First: hilt eval {run} "
                "--split eval --checkpoint N."
            )
        good = [
            (result["return"] if result["success"] is None else result["success"], result["update"]) for result in found
        ]
        return load(run, max(good)[1])
    if str(which) == "last":
        if (newest := latest(run)) is None:
            raise ConfigError(
                f"{run} has no checkpoint yet. One is made when the run ends, and every "
                "checkpoint_period learner steps."
            )
        return newest
    if not str(which).isdecimal():
        raise ConfigError(
            f"checkpoint {which!r}: expected last, best, or the number of one: "
            f"{', '.join(map(str, numbers(run))) or 'none'}."
        )
    return load(run, int(which))


def config_of(run: Path) -> Hil:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run: there is no config.yaml in it. Give the folder that `hilt train` made.")
    return thaw(Hil, run / "config.yaml")


# The episodes


@dataclass(frozen=True)
class EvaluationPlan:
    """What all episodes have in common."""

    config: Hil
    split: str
    update: int
    sample: bool
    keep: bool
    """Whether the steps are wanted, for a log"""


Steps = list[Tree]
Try = tuple[int, int]
"""An initial state, and a seed"""


class EnvironmentFailed(Exception):
    """Raised when an environment fails: it costs the episode, not the evaluation."""


def _alone(
    plan: EvaluationPlan, agent: StepAgent, env: Env, tries: Sequence[Try], ask: Ask | None = None
) -> Generator[tuple[EpisodeOutcome, Steps]]:
    """One after the other, in this process. An environment that failed is made anew;
    the one that was given stays its owner's."""
    own = None
    try:
        for one in tries:
            outcome, steps = _episode(plan, agent, own or env, one, ask)
            yield outcome, steps
            if outcome.error:
                if own is not None:
                    own.close()
                own = make_env(plan.config, operator=False)
    finally:
        if own is not None:
            own.close()


def _episode(
    plan: EvaluationPlan, agent: StepAgent, env: Env, one: Try, ask: Ask | None
) -> tuple[EpisodeOutcome, Steps]:
    state, seed = one
    draw = np.random.default_rng(seed)
    steps: Steps = []
    count, total, info, ended = 0, 0.0, dict[str, Any](), False
    try:
        observation, info = _asked(env.reset, seed=seed, options={"split": plan.split, "state": state})
        before = nested_copy(observation)
        if hasattr(agent, "begin"):
            words = str(attribute(env, "instruction", "") or "")
            agent.begin(words, paced=attribute(env, "timing", None) is not None)
        while not ended:
            observed = time.time()
            action = agent.sample_actions(before, seed=int(draw.integers(2**31)), argmax=not plan.sample)
            sent = time.time()
            observation, reward, terminated, truncated, info = _asked(env.step, action)
            if info.get("intervene_action") is not None or info.get("source") == Source.HUMAN:
                raise ConfigError(
                    f"{plan.config.task}: a person acted in an evaluation. Evaluate without the "
                    "wrapper through which they do."
                )
            after, ended = nested_copy(observation), bool(terminated or truncated)
            count, total = count + 1, total + float(reward)
            if plan.keep:
                times = {"observed": observed, "sent": sent, "applied": time.time()}
                earned: Any = np.float32(reward)
                ends = bool(terminated), bool(truncated)
                step = Step(before, np.asarray(action), earned, after, *ends, Source.POLICY, plan.update, times)
                steps.append(step.columns())
            before = after
    except EnvironmentFailed as error:
        return EpisodeOutcome(state, seed, False, count, total, str(error)), steps
    success, verdict, judge = judged(info, ask, f"episode from state {state}, {count} steps: success? (1/0) ")
    return EpisodeOutcome(state, seed, success, count, total, "", verdict, judge), steps


def judged(info: Mapping[str, object], ask: Ask | None, question: str) -> tuple[bool | None, bool | None, str]:
    """(success, the classifier's verdict, who decided) of an episode that ended with this info."""
    reported = success_of(info)
    verdict, truth = (reported, info[TASK_SUCCESS]) if TASK_SUCCESS in info else (None, reported)
    if truth is not None:
        return bool(truth), verdict, "task"
    if ask is not None:
        return bool(ask(question, ANSWER_S)), verdict, "person"
    return verdict, verdict, "" if verdict is None else "classifier"


def _asked(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return call(*given, **named)
    except Exception as error:
        raise EnvironmentFailed("".join(traceback.format_exception_only(error)).strip()) from error


def _together(
    plan: EvaluationPlan, weights: Mapping[str, Array], tries: Sequence[Try], workers: int
) -> Generator[tuple[EpisodeOutcome, Steps]]:
    """In processes of their own, each every N-th episode for N workers; they are returned in order."""
    running: dict[Any, PipedProcess] = {}
    ready: dict[int, tuple[EpisodeOutcome, Steps]] = {}
    try:
        for number in range(min(workers, len(tries))):
            process = PipedProcess(_work, name=f"hilt-evaluate-{number}")
            running[process.pipe] = process
        for number, pipe in enumerate(running):
            with contextlib.suppress(BrokenPipeError):  # its end is seen below
                pipe.send((plan, weights, list(enumerate(tries))[number::workers]))
        for place in range(len(tries)):
            while place not in ready:
                if not running:
                    raise _ended_early(0)
                ready |= _received(running)
            yield ready.pop(place)
    finally:
        for process in running.values():
            process.end()


def _received(running: dict[Any, PipedProcess]) -> dict[int, tuple[EpisodeOutcome, Steps]]:
    """Waits for the workers, and returns the episodes that have ended, by their places. Workers that are done are taken
    out of `running`; what one of them raised is raised."""
    answered: list[Any] = wait(list(running), EPISODE_S)
    if not answered:
        raise DeadlineError(f"no episode of the evaluation ended within {EPISODE_S:.0f} s.")
    received: dict[int, tuple[EpisodeOutcome, Steps]] = {}
    for pipe in answered:
        try:
            place, answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            if code := running.pop(pipe).exit_code(EPISODE_S):
                raise _ended_early(code) from None
            continue
        if isinstance(answer, HiltError):
            raise answer
        received[place] = answer
    return received


def _ended_early(code: int | None) -> HiltError:
    cure = "See its error above; a script that evaluates with workers needs: if __name__ == '__main__'."
    return HiltError(f"a process of the evaluation ended with exit code {code}. {cure}")


def _work(pipe: Any) -> None:
    """Runs in a worker process; it ends when the process that started it is gone."""
    leave_to_parent()
    one_thread()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        plan, weights, tries = pipe.recv()
        try:
            env = make_env(plan.config, operator=False)
            agent = make_agent(plan.config, env)
            agent.load_acting_state(weights)
            made = _alone(plan, agent, env, [one for _, one in tries])
            for (place, _), answer in zip(tries, made, strict=True):
                pipe.send((place, answer))
            env.close()
        except HiltError as error:
            pipe.send((-1, error))


class EvaluationRecorder:
    """The log of an evaluation, in a new folder below the one that is given."""

    def __init__(self, parent: Path, env: Env, plan: EvaluationPlan, videos: int):
        self._videos = videos
        self._hz = float(attribute(env, "control_hz", 0) or RATE_HZ)
        self._facts = {
            "split": plan.split,
            "task": plan.config.task,
            INSTRUCTION: str(attribute(env, "instruction", "")),
        }
        self.folder = new_folder(parent, plan.split, plan.update, plan.sample)
        self._log = Log.create(self.folder / "log", Schema.declare(columns_of(env)))
        if videos and not cameras(self._log):
            self._log.close()
            DISK.remove(self.folder)
            raise ConfigError(f"{plan.config.task}: the observations have no images, so there are no videos.")

    def add(self, outcome: EpisodeOutcome, steps: Steps) -> None:
        if not steps:
            return
        episode = self._log.episode(actor="evaluation")
        for step in steps:
            episode.append(step)
        episode.end()
        facts = {
            name: getattr(outcome, name) for name in ("state", "seed", "success", "steps", "error", "verdict", "judge")
        }
        facts = {name: value for name, value in facts.items() if value not in (None, "")}
        self._log.annotate(episode.trajectory, **self._facts, **facts)

    def finish(self, done: EvaluationResult, report: Report = silent) -> list[Path]:
        """Writes what came of it, and makes the videos."""
        write_json(self.folder / EVALUATION_FILE, done.to_json())
        made: list[Path] = []
        for trajectory in self._log.trajectories()[: self._videos]:
            report("making videos", len(made), self._videos)
            DISK.make_folders(self.folder / "videos")
            made.append(video_of(self.folder / "videos", trajectory))
            film(self._log, trajectory, made[-1], self._hz)
        return made

    def close(self) -> None:
        self._log.close()


def _tries(
    task: str, known: Mapping[str, int], split: str, states: Sequence[int], episodes: int | None, seed: int
) -> list[Try]:
    if split not in known:
        raise UnknownNameError("split", split, known)
    if wrong := [state for state in states if not 0 <= state < known[split]]:
        raise ConfigError(f"initial state {wrong[0]} of {split}: {task} has {known[split]} there, counted from 0.")
    chosen = list(states) or list(range(known[split]))
    seeds = np.random.SeedSequence([seed]).generate_state(episodes or len(chosen))
    return [(chosen[number % len(chosen)], int(drawn)) for number, drawn in enumerate(seeds)]
