"""``hilt eval``: a trained policy tries every evaluation state, alone; its success comes with a 95% interval."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.show import PROGRESS, heavy_module, table
from hilt.cli.train_options import Trust
from hilt.core.errors import ConfigError, optional_module
from hilt.core.files import DISK
from hilt.core.progress import Report
from hilt.core.threads import one_thread

if TYPE_CHECKING:
    from hilt.runs.evaluation import EvaluationResult

app = typer.Typer(add_completion=False)


def _option(metavar: str, help: str, default: str | bool = True, **rest: Any) -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=default, **rest)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder that `hilt train` made.", show_default=False)],
    checkpoint: Annotated[
        str,
        _option(
            "WHICH", "last, best (on the split eval), or its number of learner or training steps. Of sft: leave it out."
        ),
    ] = "last",
    split: Annotated[
        str,
        _option(
            "NAME",
            "Whose initial states are tried.",
            "published where a task has it (LIBERO: 50 of each task), else test",
        ),
    ] = "",
    episodes: Annotated[
        int | None, _option("N", "How many episodes, from the first state on.", "every state once", min=1)
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample actions as in training; default: the most likely.")
    ] = False,
    seed: Annotated[int, _option("N", "Of whatever is random.", min=0)] = 0,
    videos: Annotated[int, _option("N", "The number of first episodes to make videos of.", min=0)] = 0,
    workers: Annotated[int, _option("N", "Processes; the outcome is the same with any number.", min=1)] = 1,
    ask: Annotated[
        bool | None,
        typer.Option(
            "--ask/--no-ask",
            help="Ask on the terminal after each episode whether it succeeded, if the task does not report it.",
            show_default="on an arm, at a terminal",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there too.", show_default=False)
    ] = None,
    trusted: Trust = None,
) -> None:
    """Evaluate a policy on all evaluation states, without take-overs. A run of several tasks is evaluated on each of them;
    of `hilt train sft` it is RUN/policy: the policy as it was at its lowest held-out loss."""
    one_thread()
    optional_module("gymnasium", "hilt eval", "sim")
    heavy_module("torch", "hilt eval", "torch", then="hilt.vla.train")
    for line in _warnings(run):
        typer.echo(line)
    evaluated = []
    with PROGRESS.phases() as report:
        report(f"loading the policy of {run}")
        for done in results(EvalSettings(run, checkpoint, split, episodes, sample, seed, videos, workers, ask), report):
            report("")
            evaluated.append(done.to_json())
            show(done)
    if len(evaluated) > 1:
        show_all(evaluated)
    if json_file is not None:
        DISK.replace(
            json_file,
            json.dumps(evaluated[0] if len(evaluated) == 1 else evaluated, indent=1).encode() + b"\n",
            durable=False,
        )


@dataclass(frozen=True)
class EvalSettings:
    """The options of `hilt eval` that say what is tried, and how."""

    run: Path
    checkpoint: str
    split: str
    episodes: int | None
    sample: bool
    seed: int
    videos: int
    workers: int
    ask: bool | None


def results(given: EvalSettings, report: Report) -> Iterator[EvaluationResult]:
    """Yields the result of each task of the run: those of a post-trained policy together, as its tasks take turns, others one by one."""
    from hilt.hil.evaluate import evaluate as tried
    from hilt.vla import train as post_train

    run, split = given.run, given.split
    options: dict[str, Any] = {"seed": given.seed, "sample": given.sample, "videos": given.videos}
    if post_train.is_run(run):
        if given.ask is not None:
            raise ConfigError(f"--ask: the tasks of {run} report success themselves. Leave it out.")
        options |= {"episodes": given.episodes or 0, "workers": given.workers if given.workers > 1 else 0}
        watch = partial(report, f"{run}, {split} states".replace("  ", " "))
        yield from post_train.evaluate(run, given.checkpoint, split, watch=watch, **options)
        return
    options |= {"episodes": given.episodes, "workers": given.workers, "folder": run / "evaluations", "report": report}
    for config, agent, update in _tried(run, given.checkpoint, given.workers):
        yield tried(config, agent, split, update=update, ask=_asking(given.ask, config), **options)


def _asking(wanted: bool | None, config: Any) -> Any:
    """What asks the person at the console, if somebody is to be asked: by default on an arm, whose task may not know, at a terminal."""
    from hilt.envs.rewards import ask_on_console
    from hilt.hil.environment import spaces

    if wanted is None:
        wanted = sys.stdin.isatty() and spaces(config).keeps_rate
    return ask_on_console if wanted else None


def _warnings(run: Path) -> list[str]:
    """That the precision of the run, begun on another machine perhaps, is slow on this one."""
    from hilt.hil.evaluate import config_of
    from hilt.runs import run_precision as precision
    from hilt.vla import sft
    from hilt.vla import train as post_train

    kind: Any = post_train.Vla if post_train.is_run(run) else sft.Sft if sft.is_run(run) else None
    return precision.warnings(config_of(run) if kind is None else precision.frozen(kind, run))


def _tried(run: Path, checkpoint: str, workers: int) -> Iterator[tuple[Any, Any, int]]:
    """The task, the policy and its age; of a run of several tasks, each of them."""
    from hilt.hil.config import Hil
    from hilt.vla.sft import KIND, agents

    if KIND.is_run(run):
        if checkpoint != "last" or workers != 1:
            raise ConfigError(
                f"{run} is of hilt train sft, and has one policy, which one process tries: leave --checkpoint and --workers out."
            )
        options = dict(KIND.frozen(run).task_options)
        for task, acting, step in agents(run):
            yield Hil(task=task, task_options=options), acting, step
        return
    from hilt.hil.environment import spaces
    from hilt.hil.evaluate import config_of, find_checkpoint, make_agent

    config = config_of(run)
    found = find_checkpoint(run, checkpoint)
    agent = make_agent(config, spaces(config))
    agent.load_state_dict(found.agent)
    yield config, agent, found.update


def show_all(results: Sequence[Mapping[str, Any]]) -> None:
    """All tasks of a run together, every episode counted."""
    from hilt.runs.evaluation import over_tasks

    if any(result["success"] is None for result in results):
        return
    successes, episodes = (sum(result[name] for result in results) for name in ("successes", "episodes"))
    low, high, _ = over_tasks(
        [(result["task"], one["state"], bool(one["success"])) for result in results for one in result["outcomes"]]
    )
    share = f"{100 * successes / episodes:.1f}%, 95% interval {100 * low:.1f}% to {100 * high:.1f}%"
    typer.echo(
        f"all {len(results)} tasks, split {results[0]['split']}: success in {successes:,} of {episodes:,} episodes, {share}"
    )


def show(done: EvaluationResult) -> None:
    from rich.console import Console

    result, (low, high) = done.to_json(), done.interval or (0.0, 0.0)
    share = f"{100 * (done.success or 0.0):.1f}%, 95% interval {100 * low:.1f}% to {100 * high:.1f}%"
    rows: list[list[object]] = [
        ["task", f"{done.task}, {_many(len(done.outcomes), 'episode')} from the states of {done.split}"],
        [
            "policy",
            f"after {done.update:,} learner steps, actions {'sampled' if done.sample else 'the most likely'}, no take-overs",
        ],
        [
            "success",
            "–: the environment does not tell"
            if done.success is None
            else f"{done.successes} of {len(done.outcomes)}: {share}",
        ],
        *_judged(done),
        ["steps per success", "–" if done.steps_per_success is None else f"{done.steps_per_success:.1f}"],
        ["episode length", f"{result['length']:.1f} steps"],
        ["return", f"{result['return']:.3f}"],
        ["took", f"{done.seconds:.1f} s, {len(done.outcomes) / done.seconds:.1f} episodes/s"],
        ["recorded in", done.folder],
    ]
    rows += [["video", path] for path in done.videos]
    lost = [str(one.state) for one in done.outcomes if not one.success and not one.error]
    if lost and done.success is not None:
        rows.append(["failed states", ", ".join(lost[:20]) + ", …" * (len(lost) > 20)])
    rows += [
        [f"lost: {count}", f"the environment failed: {error}"]
        for error, count in Counter(one.error for one in done.errors).items()
    ]
    wide = 24 + max(len(str(text)) for _, text in rows)  # a path that is folded cannot be copied
    Console(width=wide, soft_wrap=True).print(table("", "", rows=rows))


JUDGES = {
    "task": "the task itself",
    "person": "the person who was asked",
    "classifier": "the reward classifier: the task does not report success, and no person was asked (--ask), so its mistakes count, too",
    "": "unknown",
}


def _judged(done: EvaluationResult) -> list[list[object]]:
    """Whether it is a test of new states; who decided the success, if it is not the task, and the classifier's decisions."""
    rows: list[list[object]] = []
    if done.of_train:
        rows.append(["of training", f"{done.of_train} of the states of {done.split} are of the split train, too"])
    if done.agreement or set(done.judges) - {"task", ""}:
        rows.append(["decided by", "; ".join(JUDGES[judge] for judge in done.judges)])
    if (agreement := done.agreement) is not None:
        wrong = (
            f"{_many(agreement['false_successes'], 'false success', 'es')}, {agreement['missed_successes']:,} missed"
        )
        verdicts = f"success in {agreement['verdicts_of_success']:,} of {agreement['episodes']:,}; right in {agreement['agree']:,}: {wrong}"
        rows.append(["classifier", verdicts])
    return rows


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{plural * (count != 1)}"
