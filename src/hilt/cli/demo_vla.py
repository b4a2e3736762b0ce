"""``hilt demo vla``: a small vision-language-action policy is shown four tasks once each, plays, and then learns from success alone.

Every step is what a user has as well: `hilt record` with a script, `hilt.runtime.play`, `hilt train vla_tabletop`, `hilt eval`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.record import stop_signals
from hilt.cli.show import PROGRESS, heavy_module, table
from hilt.core.errors import require_module
from hilt.core.progress import Report, silent
from hilt.core.threads import one_thread

if TYPE_CHECKING:
    from hilt.runtime.demonstrations import Demonstrations
    from hilt.runtime.play import Playing
    from hilt.runtime.vla_config import Vla

GOAL, WORDS_MATTER = 0.9, 0.3
"""What is to be reached in the end; and what replaying a demonstration blindly must stay below, or words and pictures do not matter"""
USUAL_STEPS = 60
"""Training steps after which success on the validation states has usually held at its goal, for the remaining time that is shown"""
VIDEOS = 4
"""Episodes that are shown side by side, before and after: one of each task"""
ROWS = {"blind": "a demonstration, replayed blindly", "shown": "imitation alone", "start": "imitation and play"}


def vla(
    fast: Annotated[bool, typer.Option("--fast", help="Little of everything, for a first look.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="A cap on learning from success; 0: none of it.", min=0.0)] = None,
    play: Annotated[int | None, typer.Option("--play", help="Scenes in which the arm plays; 0: none.", min=0)] = None,
    demonstrations: Annotated[int, typer.Option("--demonstrations", help="Of each task.", min=1)] = 1,
    steps: Annotated[int | None, typer.Option("--steps", help="Gradient steps of imitation.", min=1, show_default="1000")] = None,
    head: Annotated[str, typer.Option("--head", help="How the policy answers: tokens, gaussian or flow.")] = "tokens",
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.", min=0)] = 0,
    run: Annotated[Path | None, typer.Option("--run", metavar="FOLDER", help="Where it is kept.", show_default="runs/vla-TIME")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, as hilt train has them.")] = None,
) -> None:
    """See a vision-language-action policy learn from one demonstration of each task and from success."""
    one_thread()
    for package, extra in (("torch", "torch"), ("gymnasium", "sim"), ("mujoco", "sim"), ("av", "formats")):
        require_module(package, "hilt demo vla", extra)
    heavy_module("torch", "hilt demo vla", "torch", then="hilt.runtime.play")
    from hilt.core.config import build
    from hilt.recipes import vla_recipe
    from hilt.runtime.play import Playing
    from hilt.runtime.vla_config import Imitation, Validation

    config, playing, states = vla_recipe("vla_tabletop"), Playing(), 100
    config.imitation.weight = 0.05  # of what was shown, all along
    if fast:
        config.max_steps, config.validation = 15, Validation(before=False, period=0, after=False)
        playing, states = replace(playing, steps=300), 25
    playing = replace(playing, scenes=playing.scenes if play is None else play, steps=steps or playing.steps)
    if head != "tokens":
        config.policy_options = {**{name: value for name, value in config.policy_options.items() if name != "smoothing"}, "head": head}
    long: dict[str, Any] = {} if minutes is None else {"max_seconds": 60 * minutes, **({} if minutes else {"max_steps": 0})}
    story = Story(build(config, {"seed": seed, **long}, *(overrides or [])), playing, demonstrations, states, _folder(run), fast)
    replace(story.config, imitation=Imitation()).check()  # what is imitated is recorded first
    story.tell()
    with PROGRESS.phases() as story.report:
        story.warm_up()
    story.learn()
    story.show()
    if story.wrong:
        raise typer.Exit(1)


@dataclass
class Story:
    """What happened, and what was wrong about it."""

    config: Vla
    playing: Playing
    demonstrations: int
    states: int
    """Of the split test, of each task"""
    run: Path
    fast: bool = False
    wrong: list[str] = field(default_factory=list)
    report: Report = silent
    _tried: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _reason: str = ""
    """Why learning ended"""

    def tell(self) -> None:
        long = f"at most {self.config.max_steps} steps" + f" or {self.config.max_seconds / 60:.3g} minutes" * bool(self.config.max_seconds)
        if goal := self.config.validation.goal:
            long = f"until {goal:.0%} of the validation episodes succeed, {self.config.validation.hold} times in a row; {long}"
        self._say(
            "An arm presses the button that words name. Four buttons change places; it sees them through the camera of its hand.",
            f"1. A script shows each of {len(self.config.tasks)} tasks {self.demonstrations} time(s).",
            f"2. The arm plays in {self.playing.scenes} scenes: it feels for things, and those that look like where a demonstration ended",
            "   get its words. Nobody tells it where anything is.",
            f"3. {self._algorithm}: groups of {self.config.collect.group_size} tries, and for each only whether it succeeded,",
            f"   {long}.",
            f"4. The exam: {self.states} initial states of each task that were used for nothing else.",
            f"Everything is kept in {self.run}",
        )

    def warm_up(self) -> None:
        """Demonstrations, play, and the two policies that come of them: of the first alone, and of both."""
        from hilt.policies.precision import of_former_name
        from hilt.runtime import precision
        from hilt.runtime.demonstrations import Demonstrations
        from hilt.runtime.play import played
        from hilt.runtime.sft import words
        from hilt.runtime.train import check_new

        check_new(self.run)
        self._say(*precision.lines(self.config))
        paths = self._demonstrate()
        lessons = Demonstrations(paths, self.run / "data", words(self.config), report=self.report)
        with contextlib.closing(lessons):
            self._tried["blind"] = self._replayed(lessons)
            if self.playing.scenes:
                self._exam("shown", self._taught(lessons, [], "shown"))
            began = time.monotonic()
            touches = played(self.config, self.playing, self.report)
            self._say(f"play: {len(touches)} touches in {time.monotonic() - began:.0f} s")
            self._exam("start", self._taught(lessons, touches, "start"))
        chosen = {name: value for name, value in of_former_name(self.config.policy_options).items() if name == "precision"}
        self.config.policy, self.config.policy_options = str(self.run / "start"), chosen
        self.config.imitation.data = [str(path) for path in paths if self.config.imitation.weight]

    def learn(self) -> None:
        """`hilt train vla_tabletop`, from what was taught."""
        if not self.config.max_steps:
            return
        from hilt.cli.post_train import live
        from hilt.runtime.post_train import begin_run, policy_of, train

        folder = self.run / "grpo"
        self.config = begin_run(folder, "vla_tabletop", self.config)
        with stop_signals() as stopped, live(folder, self.config, USUAL_STEPS if self.config.validation.goal else 0) as screen:
            # of its lines the validations: that in the end most groups succeed altogether and are dropped is as it should be
            say, stop = (lambda text: screen.say(text) if text.startswith("step") else None), (lambda: bool(stopped))
            self._reason = train(self.config, folder, say=say, stop=stop, report=screen.report).reason
        if stopped:
            self._say(f"stopped; it goes on with: hilt train --run {folder} --resume")
            raise typer.Exit(128 + stopped[0])
        with PROGRESS.phases() as self.report:
            self.report("loading the policy")
            self._exam("after", policy_of(folder, "last"))

    def show(self) -> None:
        """The table, the curve, and the video."""
        from rich.console import Console

        from hilt.observe.plots import plot
        from hilt.runtime.evaluate import before_after

        names = [task.rpartition("_")[2] for task in self.config.tasks]
        title = f"seed {self.config.seed}, {self.demonstrations} demonstration(s) of each task, {self.states} unseen states of each"
        rows = [_row(self._title(name), cards, self.config.tasks) for name, cards in self._tried.items()]
        screen = Console(soft_wrap=True)
        screen.print()
        screen.print(table("", "success", "95% interval", *names, rows=rows, title=title, right=range(1, 3 + len(names))))
        minutes = self.config.max_seconds / 60 if self._reason == "max_seconds" else 0.0
        shares = {name: _share(cards) for name, cards in self._tried.items()}
        self.wrong, capped = verdict(shares, 0.0 if self.fast else GOAL, minutes)
        facts: list[list[object]] = [["the whole demo took", f"{time.monotonic() - self._began:.0f} s"]]
        if "after" in self._tried:
            before, after = (sorted((self.run / "videos" / name).glob("*.mp4")) for name in ("start", "after"))
            with PROGRESS.phases() as report:
                before_after(before, after, self.run / "before-after.mp4", (self._title("start"), self._title("after")), report)
                curves = plot([self.run / "grpo"], self.run / "plots", report=report)
            facts += [["curves", ", ".join(map(str, curves))], ["video", self.run / "before-after.mp4"]]
            facts += [["the run", f"{self.run / 'grpo'}; it goes on with: hilt train --run {self.run / 'grpo'} --resume max_steps=N"]]
        screen.print(table("", "", rows=facts))
        for sentence in self.wrong:
            typer.echo(f"WRONG: {sentence}", err=True)
        if capped:
            self._say("", capped)

    def _demonstrate(self) -> list[Path]:
        from hilt.runtime.config import Hil
        from hilt.runtime.train import demonstrate

        for task in self.config.tasks:
            known: dict[str, Any] = {"task": task, "task_options": dict(self.config.task_options), "seed": self.config.seed}
            demonstrate(Hil(**known, demonstrations=self.demonstrations), self._shown(task), self._say, report=self.report)
        return [self._shown(task) / "demonstrations" / "log" for task in self.config.tasks]

    def _shown(self, task: str) -> Path:
        return self.run / "tasks" / task.replace("/", "-")

    def _taught(self, lessons: Demonstrations, touches: Sequence[Any], name: str) -> Any:
        from hilt.runtime.play import taught

        phase = f"imitating demonstrations{' and play' * bool(touches)}, gradient steps"

        def watch(step: int, values: dict[str, float]) -> None:
            self.report(phase, step + 1, self.playing.steps, f"loss {values.get('play_loss', values['loss']):.3f}")

        self.report(phase)
        policy = taught(self.config, lessons, touches, self.playing, watch)
        policy.save_pretrained(self.run / name)
        return policy

    def _exam(self, name: str, policy: Any) -> None:
        from hilt.runtime.roles import pool_of
        from hilt.runtime.sft import words
        from hilt.runtime.trials import starts_of, tried

        phase = f"exam, {self._title(name)}"
        self.report(phase)
        with contextlib.closing(pool_of(self.config, self.config.pool.workers)) as pool:
            starts = starts_of(pool, self.config.tasks, "test", self.states, self.config.seed)
            known: dict[str, Any] = {"sample": False, "version": 0, "seed": (self.config.seed,)}
            known |= {"videos": self.run / "videos" / name, "filmed": 0 if name == "shown" else VIDEOS}
            cards = self._tried[name] = []
            for card in tried(policy.eval(), pool, starts, words(self.config), self.config.collect, **known):
                cards.append(card)
                self.report(phase, len(cards), len(starts), f"{sum(bool(one['success']) for one in cards)} succeeded")
        self.report("")
        self._say(f"{self._title(name)}: {_share(self._tried[name]):.0%}")

    @property
    def _algorithm(self) -> str:
        return {"gae": "PPO with a critic", "reinforce_plus_plus": "REINFORCE++"}.get(name := self.config.algorithm.estimator, name.upper())

    def _title(self, name: str) -> str:
        if name == "after":
            return f"after {self._algorithm}"
        return ROWS["shown" if name == "start" and not self.playing.scenes else name]

    def _replayed(self, lessons: Demonstrations) -> list[dict[str, Any]]:
        from hilt.envs.task import make
        from hilt.runtime.sft import words

        cards, suite = [], words(self.config)
        first = {lesson.texts[0]: lesson for lesson in reversed(lessons.lessons)}
        for task in self.config.tasks:
            with contextlib.closing(make(task, **{**self.config.task_options, "image_size": None})) as env:
                actions = suite.command(first[env.unwrapped.instruction].actions)
                for state in range(self.states):
                    env.reset(options={"split": "test", "state": state})
                    cards.append({"task": task, "success": env.unwrapped.step_chunk(actions)[2]})
                    self.report("replaying demonstrations blindly, states", len(cards), self.states * len(self.config.tasks))
        return cards

    @staticmethod
    def _say(*lines: str) -> None:
        PROGRESS.say("\n".join(lines))


def verdict(shares: dict[str, float], goal: float, minutes: float = 0.0) -> tuple[list[str], str]:
    """What is wrong, as sentences, none when it has learned; and how it stands where a cap in minutes ended it before the goal."""
    wrong, old, new = [], shares["start"], shares.get("after")
    if shares["blind"] >= WORDS_MATTER:
        wrong.append(f"a demonstration that is replayed blindly succeeds in {shares['blind']:.0%}: the words hardly matter.")
    if new is None:
        return wrong, ""
    if minutes and old < new < goal:
        stands = f"it began with {old:.0%}, is at {new:.0%}, and {goal:.0%} is the goal"
        return wrong, f"stopped at {minutes:.3g} minutes, still rising: {stands}."
    if new < goal and not minutes:
        wrong.append(f"it succeeds in {new:.0%} of the exam, and {goal:.0%} is the goal.")
    if new <= old:
        wrong.append(f"it began with {old:.0%} and ended with {new:.0%}: nothing was learned.")
    return wrong, ""


def _share(cards: Sequence[dict[str, Any]]) -> float:
    return sum(bool(card["success"]) for card in cards) / len(cards)


def _row(name: str, cards: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[str]:
    from hilt.runtime.evaluate import wilson

    low, high = wilson(sum(bool(card["success"]) for card in cards), len(cards))
    each = [f"{_share([card for card in cards if card['task'] == task]):.0%}" for task in tasks]
    return [name, f"{_share(cards):.1%}", f"{low:.0%} to {high:.0%}", *each]


def _folder(run: Path | None) -> Path:
    return run or Path("runs") / time.strftime("vla-%Y%m%d-%H%M%S")
