"""``hilt demo vla``: a small vision-language-action policy imitates one
demonstration of each task, and GRPO does the rest.

Every step is what a user has as well: `hilt record` with a script, `hilt train sft`, `hilt train
vla_tabletop`, `hilt eval`. Before them the policy's perception learns from drawn pictures
(`hilt.vla.drawn_pictures`), which stand for the pretraining of a large one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.show import PROGRESS, heavy_module, table
from hilt.core.errors import require_module
from hilt.core.progress import Report, silent
from hilt.core.signals import stop_signals
from hilt.core.threads import one_thread

if TYPE_CHECKING:
    from hilt.policies.base import Policy
    from hilt.vla.config import Vla
    from hilt.vla.demonstrations import Demonstrations
    from hilt.vla.drawn_pictures import DrawingSettings
    from hilt.vla.sft import Sft

GOAL, WORDS_MATTER = 0.9, 0.3
"""What is to be reached in the end; and what replaying a demonstration blindly must
stay below, or words and pictures do not matter"""
DEMONSTRATIONS = 1
"""Of each task"""
USUAL_STEPS = 60
"""Training steps after which success on the validation states has usually held at
its goal, for the remaining time that is shown"""
VIDEOS = 4
"""Episodes that are shown side by side, before and after: one of each task"""
ROWS = {"blind": "a demonstration, replayed blindly", "start": "imitation"}


def vla(
    fast: Annotated[bool, typer.Option("--fast", help="Little of everything, for a first look.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="A cap on learning from success; 0: none of it.", min=0.0)
    ] = None,
    demonstrations: Annotated[int, typer.Option("--demonstrations", help="Of each task.", min=1)] = DEMONSTRATIONS,
    pictures: Annotated[
        int | None, typer.Option("--pictures", help="Gradient steps on drawn pictures.", min=0, show_default="500")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Gradient steps of imitation.", min=1, show_default="600")
    ] = None,
    head: Annotated[str, typer.Option("--head", help="How the policy answers: tokens, gaussian or flow.")] = "tokens",
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.", min=0)] = 0,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FOLDER", help="Where it is kept.", show_default="runs/vla-TIME")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, as hilt train has them.")
    ] = None,
) -> None:
    """See a vision-language-action policy learn from one demonstration of each task and from success."""
    one_thread()
    for package, extra in (("torch", "torch"), ("gymnasium", "sim"), ("mujoco", "sim"), ("av", "formats")):
        require_module(package, "hilt demo vla", extra)
    heavy_module("torch", "hilt demo vla", "torch", then="hilt.vla.drawn_pictures")
    from hilt.core.config import build
    from hilt.recipes import vla_recipe
    from hilt.vla.config import Imitation, Validation
    from hilt.vla.drawn_pictures import DrawingSettings

    config, drawing, taught, states = vla_recipe("vla_tabletop"), DrawingSettings(), imitation(), 100
    config.imitation.weight = 0.05  # of what was shown, all along
    if fast:
        config.max_steps, config.validation = 15, Validation(before=False, period=0, after=False)
        drawing, taught, states = replace(drawing, steps=250), replace(taught, max_steps=300), 25
    drawing = drawing if pictures is None else replace(drawing, steps=pictures)
    taught = taught if steps is None else replace(taught, max_steps=steps, warmup_steps=steps // 10)
    if head != "tokens":
        config.policy_options = {
            **{name: value for name, value in config.policy_options.items() if name != "smoothing"},
            "head": head,
        }
    long: dict[str, Any] = (
        {} if minutes is None else {"max_seconds": 60 * minutes, **({} if minutes else {"max_steps": 0})}
    )
    settings = build(config, {"seed": seed, **long}, *(overrides or []))
    story = VlaStory(settings, drawing, taught, demonstrations, states, _folder(run), fast)
    replace(story.config, imitation=Imitation()).check()  # what is imitated is recorded first
    story.tell()
    with PROGRESS.phases() as story.report:
        story.warm_up()
    story.learn()
    story.show()
    if story.wrong:
        raise typer.Exit(1)


def imitation() -> Sft:
    """The settings of `hilt train sft` here: every demonstration is learned from, for a
    number of steps that is fixed beforehand."""
    from hilt.vla.sft import Sft

    return Sft(validation=0.0, max_steps=600, batch_size=96, learning_rate=2e-3, warmup_steps=60, schedule="cosine")


@dataclass
class DemoPhase:
    """The episodes, environment steps, gradient steps and seconds that one part of the demo took."""

    episodes: int = 0
    environment_steps: int = 0
    gradient_steps: int = 0
    seconds: float = 0.0

    def add(self, updates: Sequence[Mapping[str, Any]]) -> None:
        """What the training steps of a run cost. A validation has no such figures, and a step
        whose groups wait has no gradient steps."""
        self.episodes += sum(int(each.get("episodes", 0)) for each in updates)
        self.environment_steps += sum(int(each["steps"]) for each in updates if "episodes" in each)
        self.gradient_steps += sum(int(each.get("optimizer_steps", 0)) for each in updates)


@dataclass
class VlaStory:
    """What happened, and what was wrong about it."""

    config: Vla
    drawing: DrawingSettings
    imitation: Sft
    demonstrations: int
    states: int
    """Of the split test, of each task"""
    run: Path
    fast: bool = False
    wrong: list[str] = field(default_factory=list)
    report: Report = silent
    phases: dict[str, DemoPhase] = field(default_factory=dict)
    _tried: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _reason: str = ""
    """Why learning ended"""

    def tell(self) -> None:
        long = f"at most {self.config.max_steps} steps" + f" or {self.config.max_seconds / 60:.3g} minutes" * bool(
            self.config.max_seconds
        )
        if goal := self.config.validation.goal:
            long = (
                f"until {goal:.0%} of the validation episodes succeed, "
                f"{self.config.validation.hold} times in a row; {long}"
            )
        self._notify(
            "An arm presses the button that words name. Four buttons change places; it sees them "
            "through the camera of its hand.",
            f"1. Perception: {self.drawing.steps} gradient steps on drawn pictures of colored "
            "shapes, with sentences that name",
            "   a color. They show no robot and no button.",
            f"2. Imitation: a script shows each of {len(self.config.tasks)} tasks {self.demonstrations} time(s).",
            f"3. {self._algorithm}: groups of {self.config.collect.group_size} tries, and for each "
            "only whether it succeeded,",
            f"   {long}.",
            f"4. The exam: {self.states} initial states of each task that were used for nothing else.",
            f"Everything is kept in {self.run}",
        )

    def warm_up(self) -> None:
        """Demonstrations, and a policy that has learned from drawn pictures and then imitated them."""
        from hilt.policies.precision import of_former_name
        from hilt.runs import run_precision as precision
        from hilt.runs.folder import check_new
        from hilt.vla.demonstrations import Demonstrations, words

        check_new(self.run)
        self._notify(*precision.lines(self.config))
        with self._phase("demonstrations") as phase:
            paths = self._demonstrate()
            lessons = Demonstrations(paths, self.run / "data", words(self.config), report=self.report)
            phase.episodes, phase.environment_steps = (
                len(lessons.lessons),
                sum(len(one.actions) for one in lessons.lessons),
            )
        with contextlib.closing(lessons):
            self._tried["blind"] = self._replayed(lessons)
            chosen = {
                name: value for name, value in of_former_name(self.config.policy_options).items() if name == "precision"
            }
            self._perceive(lessons).save_pretrained(self.run / "perception")
        self._imitate(paths, chosen)
        self.config.policy, self.config.policy_options = str(self.run / "imitation" / "policy"), chosen
        self.config.imitation.data = [str(path) for path in paths if self.config.imitation.weight]

    def learn(self) -> None:
        """`hilt train vla_tabletop`, from what was taught."""
        if not self.config.max_steps:
            return
        from hilt.cli.train_vla import live
        from hilt.observe.metrics import FILE, read_metrics
        from hilt.vla.train import begin_run, train
        from hilt.vla.trained import policy_of

        folder = self.run / "grpo"
        self.config = begin_run(folder, "vla_tabletop", self.config)
        with (
            stop_signals() as stopped,
            live(folder, self.config, USUAL_STEPS if self.config.validation.goal else 0) as screen,
        ):
            # of its lines the validations: that in the end most groups succeed altogether
            # and are dropped is as it should be
            notify, stop = (
                (lambda text: screen.notify(text) if text.startswith("step") else None),
                (lambda: bool(stopped)),
            )
            with self._phase(self._algorithm) as phase:
                self._reason = train(self.config, folder, notify=notify, stop=stop, report=screen.report).reason
        if stopped:
            self._notify(f"stopped; it goes on with: hilt train --run {folder} --resume")
            raise typer.Exit(128 + stopped[0])
        phase.add(read_metrics(folder / FILE, ["update"]))
        with PROGRESS.phases() as self.report:
            self.report("loading the policy")
            self._exam("after", policy_of(folder, "last"))

    def show(self) -> None:
        """The table, the curve, and the video."""
        from rich.console import Console

        from hilt.observe.plots import plot
        from hilt.recording.before_after import before_after

        names = [task.rpartition("_")[2] for task in self.config.tasks]
        title = (
            f"seed {self.config.seed}, {self.demonstrations} demonstration(s) of each task, "
            f"{self.states} unseen states of each"
        )
        rows = [_row(self._title(name), outcomes, self.config.tasks) for name, outcomes in self._tried.items()]
        screen = Console(soft_wrap=True)
        screen.print()
        screen.print(
            table("", "success", "95% interval", *names, rows=rows, title=title, right=range(1, 3 + len(names)))
        )
        costs = [
            [
                name,
                *(f"{number:,}" for number in (each.episodes, each.environment_steps, each.gradient_steps)),
                f"{each.seconds:.0f} s",
            ]
            for name, each in self.phases.items()
        ]
        columns = ("", "episodes", "environment steps", "gradient steps", "time")
        screen.print(table(*columns, rows=costs, title="what it learned from", right=range(1, 5)))
        minutes = self.config.max_seconds / 60 if self._reason == "max_seconds" else 0.0
        shares = {name: _share(outcomes) for name, outcomes in self._tried.items()}
        self.wrong, capped = verdict(shares, 0.0 if self.fast else GOAL, minutes)
        facts: list[list[object]] = [["the whole demo took", f"{time.monotonic() - self._began:.0f} s"]]
        if "after" in self._tried:
            before, after = (sorted((self.run / "videos" / name).glob("*.mp4")) for name in ("start", "after"))
            with PROGRESS.phases() as report:
                before_after(
                    before, after, self.run / "before-after.mp4", (self._title("start"), self._title("after")), report
                )
                curves = plot([self.run / "grpo"], self.run / "plots", report=report)
            facts += [[f"what {self._algorithm} added", _gain(self._tried["start"], self._tried["after"])]]
            facts += [["curves", ", ".join(map(str, curves))], ["video", self.run / "before-after.mp4"]]
            goes_on = f"hilt train --run {self.run / 'grpo'} --resume {more(self._reason, self.config)}"
            facts += [["the run", f"{self.run / 'grpo'}; it goes on with: {goes_on}"]]
        screen.print(table("", "", rows=facts))
        for sentence in self.wrong:
            typer.echo(f"WRONG: {sentence}", err=True)
        if capped:
            self._notify("", capped)

    def _demonstrate(self) -> list[Path]:
        from hilt.envs.fitted import open_task
        from hilt.recording.record import Settings
        from hilt.recording.script import record_with_script
        from hilt.vla.sft import demonstrations_of

        folders = {task: demonstrations_of(self.run, task) for task in self.config.tasks}
        for task, folder in folders.items():
            wanted = Settings(task, self.config.task_options, self.demonstrations, seed=self.config.seed)
            record_with_script(
                wanted, folder, partial(open_task, task, self.config.task_options), {}, self._notify, report=self.report
            )
        return [folder / "log" for folder in folders.values()]

    def _perceive(self, lessons: Demonstrations) -> Any:
        """A new policy whose eyes have learned from drawn pictures. Of the demonstrations it takes
        the sizes, and what states are usual."""
        import numpy as np

        from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
        from hilt.vla.drawn_pictures import learn

        states, _ = lessons.numbers(range(len(lessons.lessons)))
        row = lessons.batch(lessons.rows()[:1], 1)[0][0]
        sizes = {"cameras": ["wrist_image"], "image_size": len(row["wrist_image"]), "state_dim": len(row["state"])}
        sizes |= {"action_dim": lessons.action_dim, **self.config.policy_options}
        policy = SmallVLA(SmallVLAConfig.from_json(sizes), seed=self.config.seed).to(self.config.device)
        # few demonstrations do not show how far an action may go
        whole = np.ones((2, lessons.action_dim), np.float32) * [[-1], [1]]
        policy.fit(states, whole)

        def watch(step: int, loss: float) -> None:
            self.report(
                "perception from drawn pictures, gradient steps", step + 1, self.drawing.steps, f"loss {loss:.3f}"
            )

        if self.drawing.steps:
            with self._phase("drawn pictures") as phase:
                learn(policy, self.drawing, self.config.seed, watch)
                phase.gradient_steps = self.drawing.steps
        return policy

    def _imitate(self, paths: Sequence[Path], options: dict[str, Any]) -> None:
        """`hilt train sft`, from the policy that perceives."""
        from hilt.vla.sft import begin_run, open_policy, train

        folder, known = self.run / "imitation", self.config
        config = replace(
            self.imitation,
            policy=str(self.run / "perception"),
            policy_options=options,
            device=known.device,
            seed=known.seed,
        )
        config = replace(config, data=[str(path) for path in paths], tasks=known.tasks, task_options=known.task_options)
        with self._phase("imitation") as phase:
            config = begin_run(folder, "demo", config)
            phase.gradient_steps = train(config, folder, notify=self._notify, report=self.report).step
        self._exam("start", open_policy(folder, config))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[DemoPhase]:
        phase, began = self.phases.setdefault(name, DemoPhase()), time.monotonic()
        yield phase
        phase.seconds += time.monotonic() - began

    def _exam(self, name: str, policy: Policy) -> None:
        from hilt.vla.demonstrations import words
        from hilt.vla.trials import starts_of, tried
        from hilt.vla.worker import pool_of

        phase = f"exam, {self._title(name)}"
        self.report(phase)
        with contextlib.closing(pool_of(self.config, self.config.pool.workers)) as pool:
            starts = starts_of(pool, self.config.tasks, "test", self.states, self.config.seed)
            acting = self.config.collect.rollout_settings(sample=False)
            known: dict[str, Any] = {
                "version": 0,
                "seed": (self.config.seed,),
                "videos": self.run / "videos" / name,
                "filmed": VIDEOS,
            }
            outcomes = self._tried[name] = []
            for outcome in tried(policy.eval(), pool, starts, words(self.config), acting, **known):
                outcomes.append(outcome)
                self.report(
                    phase, len(outcomes), len(starts), f"{sum(bool(one['success']) for one in outcomes)} succeeded"
                )
        self.report("")
        self._notify(f"{self._title(name)}: {_share(self._tried[name]):.0%}")

    @property
    def _algorithm(self) -> str:
        return {"gae": "PPO with a critic", "reinforce_plus_plus": "REINFORCE++"}.get(
            name := self.config.algorithm.estimator, name.upper()
        )

    def _title(self, name: str) -> str:
        if name == "after":
            return f"after {self._algorithm}"
        return ROWS[name]

    def _replayed(self, lessons: Demonstrations) -> list[dict[str, Any]]:
        from hilt.envs.task import make
        from hilt.vla.demonstrations import words

        outcomes, suite = [], words(self.config)
        first = {lesson.texts[0]: lesson for lesson in reversed(lessons.lessons)}
        for task in self.config.tasks:
            with contextlib.closing(make(task, **{**self.config.task_options, "image_size": None})) as env:
                actions = suite.command(first[env.unwrapped.instruction].actions)
                for state in range(self.states):
                    env.reset(options={"split": "test", "state": state})
                    outcomes.append({"task": task, "state": state, "success": env.unwrapped.step_chunk(actions)[2]})
                    self.report(
                        "replaying demonstrations blindly, states", len(outcomes), self.states * len(self.config.tasks)
                    )
        return outcomes

    @staticmethod
    def _notify(*lines: str) -> None:
        PROGRESS.notify("\n".join(lines))


def verdict(shares: dict[str, float], goal: float, minutes: float = 0.0) -> tuple[list[str], str]:
    """What is wrong, as sentences, none when it has learned; and how it stands where
    a cap in minutes ended it before the goal."""
    wrong, old, new = [], shares["start"], shares.get("after")
    if shares["blind"] >= WORDS_MATTER:
        wrong.append(
            f"a demonstration that is replayed blindly succeeds in {shares['blind']:.0%}: the words hardly matter."
        )
    if new is None:
        return wrong, ""
    if minutes and old < new < goal:
        stands = f"it began with {old:.0%}, is at {new:.0%}, and {goal:.0%} is the goal"
        return wrong, f"stopped at {minutes:.3g} minutes, before the goal: {stands}."
    if new < goal and not minutes:
        wrong.append(f"it succeeds in {new:.0%} of the exam, and {goal:.0%} is the goal.")
    if new <= old:
        wrong.append(f"it began with {old:.0%} and ended with {new:.0%}: nothing was learned.")
    return wrong, ""


def more(reason: str, config: Vla) -> str:
    """Returns the setting with which a run that ended for this reason goes on."""
    others = {
        "max_seconds": f"max_seconds={2 * config.max_seconds:g}",
        "goal": "validation.goal=1",
        "solved": "solved_steps=0",
    }
    return others.get(reason, f"max_steps={2 * config.max_steps}")


def _share(outcomes: Sequence[dict[str, Any]]) -> float:
    return sum(bool(outcome["success"]) for outcome in outcomes) / len(outcomes)


def _row(name: str, outcomes: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[str]:
    from hilt.observe.statistics import clustered

    successes, scenes = [bool(outcome["success"]) for outcome in outcomes], [outcome["state"] for outcome in outcomes]
    low, high = clustered(successes, scenes)  # the tasks share their scenes
    each = [f"{_share([outcome for outcome in outcomes if outcome['task'] == task]):.0%}" for task in tasks]
    return [name, f"{_share(outcomes):.1%}", f"{low:.0%} to {high:.0%}", *each]


def _gain(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    from hilt.observe.statistics import paired_difference

    old, new = (
        {(outcome["task"], outcome["state"]): bool(outcome["success"]) for outcome in outcomes}
        for outcomes in (before, after)
    )
    starts = sorted(old)
    gain, low, high = paired_difference(
        [old[one] for one in starts], [new[one] for one in starts], [state for _, state in starts]
    )
    return (
        f"{100 * gain:+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f} (the same states, "
        "paired; scenes drawn anew)"
    )


def _folder(run: Path | None) -> Path:
    return run or Path("runs") / time.strftime("vla-%Y%m%d-%H%M%S")
