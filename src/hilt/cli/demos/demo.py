"""``hilt demo``: an arm learns a task from images, with demonstrations and take-overs, before your eyes; and the proof.

Everything is done by the same commands that a user has: a recipe, `hilt train`, `hilt eval`, `hilt plot`. ``hilt demo
store`` and ``hilt demo wire`` show what lies below: a log and a wire that are killed and lose nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hilt.cli.demos.demo_person import person
from hilt.cli.demos.demo_store import store
from hilt.cli.demos.demo_vla import vla
from hilt.cli.demos.demo_wire import wire
from hilt.cli.demos.hil_story import DemoPlan, HilStory
from hilt.core.errors import require_module
from hilt.core.threads import one_thread

app = typer.Typer(add_completion=False)
app.command("store")(store)
app.command("wire")(wire)
app.command("vla")(vla)
app.command("person")(person)

WHOLE = DemoPlan("tabletop_pick", 100, 0.95, workers=2, usual_steps=12_000)
FAST = DemoPlan("tabletop_button", 40, 0.8, workers=1, usual_steps=2_000)


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    fast: Annotated[bool, typer.Option("--fast", help="A smaller task, in a minute or two.")] = False,
    human: Annotated[bool, typer.Option("--human", help="You take over, in the browser, instead of a script.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="A cap on how long it learns.", show_default="none", min=0.01)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.", min=0)] = 0,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FOLDER", help="Where it is kept.", show_default="runs/demo-TIME")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, as hilt train has them.")
    ] = None,
) -> None:
    """See an arm learn a task from images, with demonstrations and take-overs."""
    if context.invoked_subcommand is not None:
        return
    one_thread()
    for package, extra in (("torch", "torch"), ("gymnasium", "sim"), ("mujoco", "sim"), ("av", "formats")):
        require_module(package, "hilt demo", extra)
    from hilt.core.config import override
    from hilt.recipes import recipe

    plan = FAST if fast else WHOLE
    long = {} if minutes is None else {"max_seconds": 60 * minutes}
    config = override(
        recipe(plan.recipe), {"seed": seed, "wire": {"port": 0, "broadcast_port": 0}, **long}, *(overrides or [])
    )
    if human:
        config.operator, config.operator_options = "browser", {}
    story = HilStory(plan, config, run or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    story.tell()
    story.learn()
    story.exam()
    story.show()
    if story.wrong:
        raise typer.Exit(1)
