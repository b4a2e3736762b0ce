"""``hilt eval``: a trained policy tries every evaluation state, alone; its success comes with a 95% interval."""

from __future__ import annotations

import contextlib
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
    from hilt.hil.config import Hil
    from hilt.policies.agent.step_agent import StepAgent
    from hilt.policies.base import Policy
    from hilt.runs.evaluation import EvaluationResult
    from hilt.value.best_of import BestOfSettings
    from hilt.vla.rollout import ChunkAgent, ChunkOptions

app = typer.Typer(add_completion=False)


def _option(metavar: str, help: str, default: str | bool = True, **rest: Any) -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=default, **rest)


Ask = Annotated[
    bool | None,
    typer.Option(
        "--ask/--no-ask",
        help="Ask about success; default: on an arm.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    str,
    _option("WHICH", "last (default), best on split eval, or its number.", False),
]
Split = Annotated[str, _option("NAME", "Whose states; default: published, or else test.", False)]
Mode = Annotated[str | None, _option("MODE", "synchronous, asynchronous, rtc, ensemble: of chunks.", False)]
Delay = Annotated[int | None, _option("N", "Control steps of a plan; default: 0 (arms: real).", False, min=0)]
Execute = Annotated[int | None, _option("N", "Actions of a chunk; 0: all; default: the run's.", False, min=0)]
EnsembleDecay = Annotated[float | None, _option("M", "How chunks weigh in an ensemble; default: 0.01.", False)]
BestOfN = Annotated[int | None, _option("N", "The policy draws N chunks; the verifier chooses.", False, min=2)]
Verifier = Annotated[str, _option("FOLDER", "Of hilt train value DATA actions=N.", False)]
Guidance = Annotated[float | None, _option("W", "Of a policy of RECAP, instead of its own.", False, min=0)]
DrawTemperature = Annotated[float | None, _option("T", "Of what a VLA draws; default: the run's, or 1.", False)]


@app.command()
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="The folder that `hilt train` made; with --policy also a task.", show_default=False)
    ],
    checkpoint: Checkpoint = "last",
    split: Split = "",
    episodes: Annotated[
        int | None, _option("N", "Episodes, from the first state on; default: all.", False, min=1)
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample actions, instead of the most likely.")] = False,
    seed: Annotated[int, _option("N", "Of whatever is random.", min=0)] = 0,
    videos: Annotated[int, _option("N", "How many of the first are filmed.", min=0)] = 0,
    workers: Annotated[int, _option("N", "Processes, for the same outcome.", min=1)] = 1,
    ask: Ask = None,
    mode: Mode = None,
    delay: Delay = None,
    execute: Execute = None,
    ensemble_decay: EnsembleDecay = None,
    best_of: BestOfN = None,
    verifier: Verifier = "",
    draw_temperature: DrawTemperature = None,
    guidance: Guidance = None,
    policy: Annotated[str, _option("ADDRESS", "The policy at ws://HOST:PORT, not the run's.", False)] = "",
    policy_key: Annotated[
        Path | None, _option("FILE", "Its key; for hilt://HOST:PORT the folder of keys.", False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there too.", show_default=False)
    ] = None,
    trusted: Trust = None,
) -> None:
    """Evaluate a policy on all evaluation states, without take-overs. A run of several tasks is evaluated on each of
    them; of `hilt train sft` it is RUN/policy: the policy as it was at its lowest held-out loss."""
    one_thread()
    optional_module("gymnasium", "hilt eval", "sim")
    heavy_module("torch", "hilt eval", "torch", then="hilt.vla.train")
    chunks = (mode, delay, execute, ensemble_decay)
    chooser = best_of_settings(best_of, verifier, draw_temperature, sample)
    given = EvalSettings(
        *(run, checkpoint, split, episodes, sample, seed, videos, workers, ask, policy, policy_key, chunks),
        best_of=chooser,
        guidance=guidance,
        temperature=draw_temperature if chooser is None else None,
    )
    evaluated = shown_results(given)
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
    policy: str = ""
    """The address of a policy server, instead of the run's own policy"""
    policy_key: Path | None = None
    chunks: tuple[str | None, int | None, int | None, float | None] = (None, None, None, None)
    """--mode, --delay, --execute and --ensemble-decay: how the chunks of a policy are executed"""
    best_of: BestOfSettings | None = None
    """--best-of: how one of several chunks is chosen"""
    guidance: float | None = None
    """--guidance: how much the condition of a policy of RECAP counts"""
    temperature: float | None = None
    """--draw-temperature, of --sample"""

    def chunk_options(self) -> ChunkOptions:
        """How chunks are executed and chosen."""
        from hilt.vla.rollout import ChunkOptions

        wrap = None if self.best_of is None and self.guidance is None else self.acting
        return ChunkOptions(*self.chunks[:3], wrap, self.chunks[3], self.temperature)

    def acting(self, policy: Policy) -> Policy:
        """Wraps the policy that is evaluated with guidance and best-of-N, where they are asked for."""
        from hilt.policies.conditioned import guided_more

        policy = policy if self.guidance is None else guided_more(policy, self.guidance)
        return policy if self.best_of is None else self.best_of.wrap(policy)


def best_of_settings(
    count: int | None, verifier: str, temperature: float | None, sample: bool | None = None
) -> BestOfSettings | None:
    """The options --best-of, --verifier and --draw-temperature; None without the first. `sample`: whether actions are
    sampled without it, in a command whose temperature may be of these."""
    from hilt.value.best_of import BestOfSettings

    if temperature is not None and temperature <= 0:
        raise ConfigError(
            f"--draw-temperature {temperature:g}: expected a number above 0; with 1 it is as was learned."
        )
    if not count:
        if verifier:
            raise ConfigError(
                f"--verifier {verifier}: it chooses among chunks; give --best-of N, too, or leave it out."
            )
        if temperature is not None and not sample:
            cure = "--best-of N" if sample is None else "--sample or --best-of N"
            raise ConfigError(
                f"--draw-temperature {temperature:g}: nothing is drawn; give {cure}, too, or leave it out."
            )
        return None
    made = BestOfSettings(count, verifier, 1.0 if temperature is None else temperature)
    made.check()
    return made


def shown_results(given: EvalSettings) -> list[dict[str, Any]]:
    """Evaluates, and prints the table of each task as it is done. Returns the results as JSON has them."""
    evaluated = []
    for line in [] if given.policy else _warnings(given.run):
        typer.echo(line)
    with PROGRESS.phases() as report:
        report(f"connecting to {given.policy}" if given.policy else f"loading the policy of {given.run}")
        for done in results(given, report):
            report("")
            evaluated.append(done.to_json())
            show(done, given.policy)
    if len(evaluated) > 1:
        show_all(evaluated)
    return evaluated


def results(given: EvalSettings, report: Report) -> Iterator[EvaluationResult]:
    """Yields the result of each task of the run: those of a post-trained policy together,
    as its tasks take turns, others one by one."""
    from hilt.hil.evaluate import evaluate as tried
    from hilt.vla.train import is_run
    from hilt.vla.trained import evaluate as evaluate_trained

    run, split, chunks = given.run, given.split, given.chunk_options()
    if given.policy or given.policy_key is not None:
        from hilt.cli.eval_remote import remote_results

        yield from remote_results(given, report, partial(_asking, given.ask))
        return
    options: dict[str, Any] = {"seed": given.seed, "sample": given.sample, "videos": given.videos}
    if is_run(run):
        if given.ask is not None:
            raise ConfigError(f"--ask: the tasks of {run} report success themselves. Leave it out.")
        options |= {"episodes": given.episodes or 0, "workers": given.workers if given.workers > 1 else 0}
        watch = partial(report, f"{run}, {split} states".replace("  ", " "))
        yield from evaluate_trained(run, given.checkpoint, split, watch=watch, chunks=chunks, **options)
        return
    options |= {"episodes": given.episodes, "workers": given.workers, "folder": run / "evaluations", "report": report}
    for config, agent, update in _tried(given, chunks):
        yield tried(config, agent, split, update=update, ask=_asking(given.ask, config), **options)


def _asking(wanted: bool | None, config: Any) -> Any:
    """What asks the person at the console, if somebody is to be asked: by default on an
    arm, whose task may not know, at a terminal."""
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


def _tried(given: EvalSettings, chunks: ChunkOptions) -> Iterator[tuple[Any, Any, int]]:
    """The task, the policy and its age; of a run of several tasks, each of them."""
    from hilt.hil.config import Hil
    from hilt.vla.sft import KIND
    from hilt.vla.trained import agents

    run, checkpoint, workers = given.run, given.checkpoint, given.workers
    if KIND.is_run(run):
        if checkpoint != "last" or workers != 1:
            raise ConfigError(
                f"{run} is of hilt train sft, and has one policy, which one process tries: leave "
                "--checkpoint and --workers out."
            )
        options = dict(KIND.frozen(run).task_options)
        for task, acting, step in agents(run, chunks):
            yield Hil(task=task, task_options=options), acting, step
        return
    if any(option is not None for option in given.chunks):
        raise ConfigError(
            "--mode, --delay, --execute and --ensemble-decay are for runs of hilt train sft and of post-training, and "
            f"{run} is a run with a person: its own settings decide. Leave them out."
        )
    from hilt.hil.environment import spaces
    from hilt.hil.evaluate import config_of, find_checkpoint, make_agent

    config = config_of(run)
    if given.temperature is not None:
        raise ConfigError(
            f"--draw-temperature {given.temperature:g}: {run} is a run with a person, whose agent has a distribution "
            "of its own. Leave it out."
        )
    found = find_checkpoint(run, checkpoint)
    agent: Any = make_agent(config, spaces(config))
    agent.load_state_dict(found.agent)
    if given.best_of is not None or given.guidance is not None:
        agent = _chosen(given, config, agent)
    with contextlib.closing(agent):
        yield config, agent, found.update


def _chosen(given: EvalSettings, config: Hil, agent: StepAgent) -> Any:
    """The agent of a run with a person as it acts with --best-of and --guidance."""
    from hilt.hil.vla_agent import VlaAgent

    if given.workers != 1:
        raise ConfigError(
            f"--best-of and --guidance: one process chooses among chunks, and --workers is {given.workers}. Leave it "
            "out."
        )
    if isinstance(agent, VlaAgent):
        agent.choose_by(given.acting)
        return agent
    if given.best_of is None:
        raise ConfigError(
            f"--guidance {given.guidance:g}: it is of a policy of RECAP, and {given.run} has agent.kind="
            f"{config.agent.kind}. Leave it out."
        )
    return _best_of_agent(given.best_of, config, agent)


def _best_of_agent(chooser: BestOfSettings, config: Hil, agent: StepAgent) -> ChunkAgent:
    """An agent whose policy draws several actions, or chunks, of which a verifier chooses one."""
    from hilt.hil.config import reinforces
    from hilt.policies.agent.agent_policy import AgentPolicy
    from hilt.policies.vla.observation_adapters import Suite
    from hilt.vla.rollout import ChunkAgent

    rlpd = config.agent.rlpd
    if rlpd.imitation_loss == "mse" and (rlpd.actor == "behavior" or not reinforces(config)):
        raise ConfigError(
            f"--best-of {chooser.count}: with agent.rlpd.imitation_loss=mse the policy of this run has learned one "
            "action for each observation, and no distribution to draw others from. Train one with imitation_loss=nll."
        )
    if chooser.temperature != 1:
        raise ConfigError(
            f"--draw-temperature {chooser.temperature:g}: the agent of a run with a person draws from the distribution "
            "that it has learned. Leave it out."
        )
    own_names = Suite(dict)  # the agent sees what its environment gives
    return ChunkAgent(chooser.wrap(AgentPolicy(agent), config.task), own_names, "")


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
        f"all {len(results)} tasks, split {results[0]['split']}: success in {successes:,} of "
        f"{episodes:,} episodes, {share}"
    )


def show(done: EvaluationResult, policy: str = "") -> None:
    """Prints the table of one task. `policy`: the address of the policy, if it is not the run's."""
    from rich.console import Console

    result, (low, high) = done.to_json(), done.interval or (0.0, 0.0)
    share = f"{100 * (done.success or 0.0):.1f}%, 95% interval {100 * low:.1f}% to {100 * high:.1f}%"
    which = f"at {policy}, version {done.update:,}" if policy else f"after {done.update:,} learner steps"
    rows: list[list[object]] = [
        ["task", f"{done.task}, {_many(len(done.outcomes), 'episode')} from the states of {done.split}"],
        ["policy", f"{which}, actions {_drawn(done)}, no take-overs"],
        [
            "success",
            "–: the environment does not tell"
            if done.success is None
            else f"{done.successes} of {len(done.outcomes)}: {share}",
        ],
        *_judged(done),
        *_executed(done.execution),
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


def _drawn(done: EvaluationResult) -> str:
    if not done.sample:
        return "the most likely"
    heat = done.execution.get("temperature")
    return "sampled" if heat is None else f"sampled at temperature {heat:g}"


JUDGES = {
    "task": "the task itself",
    "person": "the person who was asked",
    "classifier": (
        "the reward classifier: the task does not report success, and no person was asked (--ask), "
        "so its mistakes count, too"
    ),
    "": "unknown",
}


def _judged(done: EvaluationResult) -> list[list[object]]:
    """Whether it is a test of new states; who decided the success, if it is not the
    task, and the classifier's decisions."""
    rows: list[list[object]] = []
    if done.of_train:
        rows.append(["of training", f"{done.of_train} of the states of {done.split} are of the split train, too"])
    if done.agreement or set(done.judges) - {"task", ""}:
        rows.append(["decided by", "; ".join(JUDGES[judge] for judge in done.judges)])
    if (agreement := done.agreement) is not None:
        wrong = (
            f"{_many(agreement['false_successes'], 'false success', 'es')}, {agreement['missed_successes']:,} missed"
        )
        verdicts = (
            f"success in {agreement['verdicts_of_success']:,} of {agreement['episodes']:,}; right in "
            f"{agreement['agree']:,}: {wrong}"
        )
        rows.append(["classifier", verdicts])
    return rows


def _executed(found: Mapping[str, Any]) -> list[list[object]]:
    """How chunks were executed and chosen, if that was asked for."""
    rows: list[list[object]] = []
    if "best_of" in found:
        cost = f"{found['draw_ms']:.1f} ms to draw and {found['judge_ms']:.1f} ms to judge, for each plan"
        rows.append(
            [f"best of {found['best_of']:.0f}", f"{cost}; the likeliest was chosen in {found['likeliest']:.0%}"]
        )
    if "mode" not in found:
        return rows
    delay = "in real time" if found["delay"] is None else f"a delay of {_many(found['delay'], 'step')}"
    late = f", {_many(int(found['late']), 'late answer')}" if found.get("late") else ""
    actions = f"{_many(found['execute'], 'action') if found['execute'] else 'all actions'} of each"
    if found["mode"] == "ensemble":
        actions = f"the mean of all with a decay of {found['ensemble_decay']:g}"
    held = f"held in {100 * found['idle_share']:.1f}% of steps{late}"
    return [["chunks", f"{found['mode']}, {delay}, {actions}; the arm {held}"], *rows]


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{plural * (count != 1)}"
