"""What the demos of runs with a person have in common: they learn, take an exam, and show what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hilt.cli.show import CHECKING, PROGRESS, progress_bar, table
from hilt.cli.train_hil import ready_to_measure
from hilt.core.platform import let_others_go_first
from hilt.core.signals import stop_signals

if TYPE_CHECKING:
    from hilt.hil.config import Hil
    from hilt.runs.evaluation import EvaluationResult

VIDEOS = 3
"""Episodes that are shown side by side, before and after"""
LATEST = 20
"""The number of episodes for which the rate of take-overs is reported"""


@dataclass(frozen=True)
class DemoPlan:
    """What is learned, and what counts as learned."""

    recipe: str
    states: int
    """Initial states of the split test, used for nothing else, on which it is tried"""
    goal: float
    """The share of them on which it must succeed in the end"""
    workers: int
    """Processes of the exam; a short one is over before others have started"""
    usual_steps: int
    """Updates after which the run has usually reached its own goal, for the remaining time that is shown"""


@dataclass
class HilStory:
    """What happened, and what was wrong about it."""

    plan: DemoPlan
    config: Hil
    run: Path
    wrong: list[str] = field(default_factory=list)
    _tried: dict[str, EvaluationResult] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _early: threading.Thread | None = None
    _moved: tuple[int, int] = (0, 1)
    capped: str = ""
    """Returns the message for a run that a user's limit ended before the goal"""

    @property
    def who(self) -> str:
        """Says who takes over."""
        if self.config.operator == "browser":
            return "you take over, on the page whose address is below"
        return "a script takes over, like a person"

    def tell(self) -> None:
        """Prints what is going to happen."""
        c = self.config
        caps = [f"{c.max_seconds / 60:.3g} minutes"] if c.max_seconds else []
        cap = f"at most {' or '.join([*caps, f'{c.max_steps:,} updates'])}"
        until = f"{c.goal.success:.0%} of {c.goal.states} evaluation states, {c.goal.hold} times in a row"
        self._notify(
            f"An arm learns {c.task} from the images of two cameras and from where its hand is.",
            f"1. A script shows the task {c.demonstrations} times, slowly and not very well.",
            "2. A network learns to see by imitating that. This alone is not enough: it has its own "
            "row in the table at the end.",
            f"3. Reinforcement learning, until it succeeds alone in {until}; {cap}.",
            "   One process acts, another learns. Half of each batch is what the arm did, half is demonstrations.",
            f"   When the policy gets nowhere, {self.who}: such steps count as both.",
            f"4. The exam: {self.plan.states} initial states that were used for nothing else, without an operator.",
            f"Everything is kept in {self.run}",
        )

    def learn(self) -> None:
        """`hilt train RECIPE`, with its table."""
        from hilt.hil.launch import begin_run, train
        from hilt.observe.live import Live
        from hilt.runs import run_precision as precision

        c = self.config
        ready_to_measure(c)
        with progress_bar(CHECKING):
            self.config = begin_run(self.run, self.plan.recipe, c)
            lines = precision.lines(self.config, self.run)
        self._notify(*lines)
        limits = {name: getattr(c, name) for name in ("max_seconds", "max_steps", "max_env_steps")}
        limits["usual_steps"] = self.plan.usual_steps if c.goal.success else 0
        with stop_signals() as stopped, Live(self.run, f"{c.task}, seed {c.seed}", limits) as screen:

            def look() -> None:
                screen.look()
                self.begin_early()

            train(
                self.config, self.run, notify=screen.notify, look=look, stop=lambda: bool(stopped), report=screen.report
            )
        if stopped:
            self._notify(f"stopped; it goes on with: hilt train --run {self.run} --resume")
            raise typer.Exit(128 + stopped[0])

    def begin_early(self) -> None:
        """The policy that only imitates is tried beside learning, on what that leaves of the processors; not with a
        cap in minutes, for it would learn less."""
        from hilt.runs.checkpoint import numbers

        if self._early is None and not self.config.max_seconds and 0 in numbers(self.run):
            self._early = threading.Thread(target=self._try_beside, name="hilt-exam", daemon=True)
            self._early.start()

    def _try_beside(self) -> None:
        let_others_go_first(niceness=10)  # this thread alone: actor and learner come before it

        def move(done: int, total: int) -> None:
            self._moved = done, total

        self._try("before", move)

    def exam(self) -> None:
        """The policy that only imitates, and the last one, on the same states."""
        if self._early is not None:
            self._await_early()
        for name in ("before", "after"):
            if name not in self._tried:  # also where it went wrong beside learning: now everybody sees why
                with progress_bar(f"exam, {name}") as move:
                    self._try(name, move)
        self.wrong, self.capped = verdict(self.plan, self._tried["before"], self._tried["after"], self._stopped_at())

    def _await_early(self) -> None:
        """Its first part may still be at work: it has the machine for itself now."""
        with progress_bar("exam, before") as move:
            while self._early is not None and self._early.is_alive():
                move(*self._moved)
                self._early.join(0.5)

    def _stopped_at(self) -> float:
        """The minutes after which a cap of the user's ended learning; 0 when it was not this."""
        from hilt.hil.goal import evaluations, holds

        goal = self.config.goal
        reached = holds(goal, [result["success"] for result in evaluations(self.run, goal)])
        return 0.0 if reached else self.config.max_seconds / 60

    def _try(self, name: str, move: Callable[[int, int], None]) -> None:
        from hilt.hil.environment import spaces
        from hilt.hil.evaluate import evaluate, find_checkpoint, make_agent

        found, agent = (
            find_checkpoint(self.run, 0 if name == "before" else "last"),
            make_agent(self.config, spaces(self.config)),
        )
        agent.load_state_dict(found.agent)
        self._tried[name] = evaluate(
            self.config,
            agent,
            "test",
            states=range(self.plan.states),
            update=found.update,
            workers=self.plan.workers,
            folder=self.run / "evaluations",
            videos=VIDEOS,
            watch=lambda outcome, done, total: move(done, total),
        )

    def show(self) -> None:
        """The table, the curve, and the video."""
        from rich.console import Console

        from hilt.observe.plots import plot
        from hilt.recording.before_after import before_after

        before, after = self._tried["before"], self._tried["after"]
        title = (
            f"{self.config.task}, seed {self.config.seed}: {self.plan.states} unseen initial "
            "states, without an operator"
        )
        rows: list[list[Any]] = [["demonstrations", "", "", f"{self.demonstrated:.1f}"]]
        first, last = self.names
        rows += [_row(first, before), _row(last, after)]
        screen = Console(soft_wrap=True)
        screen.print()
        screen.print(table("", "success", "95% interval", "steps per success", rows=rows, title=title, right=(1, 3)))
        screen.print()
        video = self.run / "before-after.mp4"
        with PROGRESS.phases() as report:
            before_after(before.videos, after.videos, video, ("imitation only", last), report)
            curves = plot([self.run], self.run / "plots", report=report)
        c = self.config
        more = (
            f"max_seconds={2 * c.max_seconds:g}"
            if self.capped
            else f"max_steps={2 * c.max_steps}"
            if self.wrong
            else "goal.success=1"
        )
        facts: list[list[object]] = [
            *self.facts(),
            ["learned", f"{after.update:,} updates; the whole demo took {time.monotonic() - self._began:.0f} s"],
            ["curves", ", ".join(str(path) for path in curves)],
            ["video", video],
            ["the run", f"{self.run}. It goes on with: hilt train --run {self.run} --resume {more}"],
        ]
        screen.print(table("", "", rows=facts))
        for sentence in self.wrong:
            typer.echo(f"WRONG: {sentence}", err=True)
        if not self.wrong:
            self._notify("", self.capped or "It has learned: see the video.")
        self._notify(f"Open it in the browser: hilt open {self.run}")

    @property
    def names(self) -> tuple[str, str]:
        """What the policies that are tried are called: before learning from what the arm did, and after it."""
        return f"imitation of {self.config.demonstrations} demonstrations", "after reinforcement learning"

    def facts(self) -> list[list[object]]:
        """What is shown of the help that it had."""
        return [["taken over", _take_overs(self.run)]]

    @property
    def demonstrated(self) -> float:
        """Steps of a demonstration, on the average."""
        from hilt.replay import Log

        with Log.open(self.run / "demos", "r") as log:
            return len(log) / len(log.trajectories())

    @staticmethod
    def _notify(*lines: str) -> None:
        typer.echo("\n".join(lines) + "\n")


def verdict(
    plan: DemoPlan, before: EvaluationResult, after: EvaluationResult, minutes: float = 0.0
) -> tuple[list[str], str]:
    """Returns what went wrong, as sentences (none if the policy reached the goal), and how far it came where the cap in
    minutes ended the run first. The latter is no failure: a run with a cap was not asked to reach the goal."""
    old, new = before.success or 0.0, after.success or 0.0
    if minutes and new < plan.goal and new > old:
        shares = f"{old:.0%} by imitation, {new:.0%} now, and {plan.goal:.0%} is the goal"
        return [], f"stopped at {minutes:.3g} minutes, before the goal: {shares}."
    wrong = []
    if new < plan.goal and not minutes:
        wrong.append(f"it succeeds in {new:.0%} of the exam, and {plan.goal:.0%} is the goal.")
    if new <= old:
        wrong.append(f"imitation alone succeeds in {old:.0%}, what came after it in {new:.0%}: nothing was learned.")
    return wrong, ""


def _row(name: str, done: EvaluationResult) -> list[str]:
    share, interval = (
        (f"{done.success:.0%}", "{:.0%} to {:.0%}".format(*done.interval)) if done.interval else ("–", "–")
    )
    steps = done.steps_per_success
    return [name, share, interval, "–" if steps is None else f"{steps:.1f}"]


def _take_overs(run: Path) -> str:
    """The share of steps made by a person, in the first and in the last episodes."""
    from hilt.observe.metrics import read_metrics

    episodes = [(one["intervention_steps"], one["length"]) for one in read_metrics(run) if one["kind"] == "episode"]
    ends = {"first": episodes[:LATEST], "last": episodes[-LATEST:]}
    parts = [
        f"{sum(a for a, _ in some) / sum(b for _, b in some):.0%} of the steps of the {name} {len(some)} episodes"
        for name, some in ends.items()
        if some
    ]
    return ", ".join(parts) or "no episode ended"
