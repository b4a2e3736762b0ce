"""``hilt demo person``: a vision-language-action policy begins with one demonstration of each task; a person takes over
when it gets nowhere, and it learns from that while it acts.

Every step is what a user has as well: `hilt train sft`, `hilt train` with ``agent.kind=vla``, `hilt eval`. Before them
the policy's perception learns from drawn pictures, as in `hilt demo vla`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilt.cli.demos.demo_vla import VlaStory, imitation
from hilt.cli.demos.hil_story import DemoPlan, HilStory
from hilt.cli.show import PROGRESS, heavy_module
from hilt.core.errors import require_module
from hilt.core.threads import one_thread

if TYPE_CHECKING:
    from hilt.hil.config import Hil

WHOLE = DemoPlan("vla_person", 400, 0.95, workers=2, usual_steps=7_000)
FAST = DemoPlan("vla_person", 40, 0.0, workers=2, usual_steps=300)
ALGORITHMS = ("hg-dagger", "filtered", "mixed")


def person(
    fast: Annotated[bool, typer.Option("--fast", help="Little of everything, for a first look.")] = False,
    human: Annotated[bool, typer.Option("--human", help="You take over, in the browser, instead of a script.")] = False,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="What it learns from: hg-dagger, filtered or mixed.")
    ] = ALGORITHMS[0],
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="A cap on how long it learns.", show_default="none", min=0.01)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.", min=0)] = 0,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FOLDER", help="Where it is kept.", show_default="runs/person-TIME")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, as hilt train has them.")
    ] = None,
) -> None:
    """See a vision-language-action policy learn from a person who takes over."""
    one_thread()
    for package, extra in (("torch", "torch"), ("gymnasium", "sim"), ("mujoco", "sim"), ("av", "formats")):
        require_module(package, "hilt demo person", extra)
    heavy_module("torch", "hilt demo person", "torch", then="hilt.vla.drawn_pictures")
    from hilt.core.config import override
    from hilt.hil.config import check

    folder = run or Path("runs") / time.strftime("person-%Y%m%d-%H%M%S")
    taught = _taught(folder / "imitation", seed, fast)
    config = settings(taught, algorithm, seed, fast)
    if human:
        config.operator, config.operator_options, config.control_hz = "browser", {}, 5.0
    long = {} if minutes is None else {"max_seconds": 60 * minutes}
    story = PersonStory(FAST if fast else WHOLE, override(config, long, *(overrides or [])), folder / "run")
    check(story.config)  # before minutes of perception and imitation
    story.tell()
    with PROGRESS.phases() as taught.report:
        taught.warm_up()
    story.learn()
    story.exam()
    story.show()
    if story.wrong:
        raise typer.Exit(1)


def settings(taught: VlaStory, algorithm: str, seed: int, fast: bool = False) -> Hil:
    """The settings of the run: four tasks by turns, from the policy that has imitated one demonstration of each."""
    from hilt.core.config import override
    from hilt.hil.config import Goal
    from hilt.recipes import recipe
    from hilt.vla.sft import demonstrations_of

    config = override(recipe("vla_person"), {"algorithm": algorithm, "seed": seed})
    config.task_options = dict(taught.config.task_options)
    config.demo_path = [str(demonstrations_of(taught.run, task) / "log") for task in taught.config.tasks]
    config.agent.options["policy"] = str(taught.run / "imitation" / "policy")
    config.operator_options = {"window": 3, "teaches": 55}  # an episode has six steps, if all goes well
    config.wire.port = config.wire.broadcast_port = 0
    if fast:
        config.max_steps, config.updates_per_step, config.goal = 300, 3.0, Goal()
    config.max_env_steps = ceil(config.max_steps / config.updates_per_step)  # so that the page can count down
    return config


def _taught(run: Path, seed: int, fast: bool) -> VlaStory:
    """Returns the story of what comes before: perception from drawn pictures, and the imitation of one demonstration
    of each task."""
    from hilt.recipes import recipe, vla_recipe
    from hilt.vla.drawn_pictures import DrawingSettings

    config, drawing, shown = vla_recipe("vla_tabletop"), DrawingSettings(), imitation()
    config.seed, config.task_options = seed, recipe("vla_person").task_options
    if fast:
        drawing, shown = replace(drawing, steps=100), replace(shown, max_steps=100, warmup_steps=10)
    return VlaStory(config, drawing, shown, 1, 10 if fast else 25, run, fast)


@dataclass
class PersonStory(HilStory):
    """What happened, and what was wrong about it."""

    def tell(self) -> None:
        c = self.config
        what = {
            "filtered": "demonstrations, take-overs and the episodes that succeeded",
            "hg-dagger": "demonstrations and take-overs",
            "mixed": f"what {c.mixed.imitation} imitates and from groups of simulated episodes",
        }.get(c.algorithm, "demonstrations")
        self._notify(
            "An arm presses the button that words name. Four buttons change places; it sees them "
            "through the camera of its hand.",
            "1. Perception learns from drawn pictures, and a script shows each of the four tasks once.",
            "2. A small vision-language-action policy imitates that.",
            f"3. It acts, and {self.who}. It learns meanwhile from {what},",
            *self._until(),
            *self._privileges(),
            f"4. The exam: {self.plan.states} initial states that were used for nothing else, without an operator.",
            f"Everything is kept in {self.run.parent}",
        )

    def _until(self) -> list[str]:
        goal, most = self.config.goal, f"at most {self.config.max_steps:,} updates."
        if not goal.success:
            return [f"   {most}"]
        share = f"{goal.success:.0%} of {goal.states} evaluation states, {goal.hold} times in a row,"
        return [
            f"   until it succeeds alone in {share}",
            f"   and is helped in at most {goal.take_overs:.0%} of the last 50 episodes; {most}",
        ]

    def _privileges(self) -> list[str]:
        if self.config.operator != "script":
            return []
        first = f"first {self.config.operator_options.get('teaches', 0)} episodes"
        return [
            f"   The script knows where the buttons are, which the policy has to see. In its {first} it",
            "   takes over at the first step that goes elsewhere; then only when the policy does not come nearer, or",
            "   when half of an episode is over. It acts through actions only.",
        ]

    @property
    def names(self) -> tuple[str, str]:
        return "imitation of 1 demonstration of each task", f"after learning from take-overs ({self.config.algorithm})"

    def facts(self) -> list[list[object]]:
        """Rows that tell how much help it had."""
        from hilt.observe.metrics import read_metrics

        episodes = [one for one in read_metrics(self.run) if one["kind"] == "episode"]
        helped = [one for one in episodes if one["intervention_steps"]]
        steps = sum(int(one["intervention_steps"]) for one in helped)
        late = sum(bool(one["intervention_steps"]) for one in episodes[-50:])
        return [
            ["help", f"in {len(helped)} of {len(episodes)} episodes, {steps} steps; in {late} of the last 50"],
            *super().facts(),
        ]
