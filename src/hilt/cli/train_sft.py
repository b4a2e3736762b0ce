"""``hilt train sft``: a vision-language-action policy imitates demonstrations,
until the loss on held-out episodes is lowest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.show import CHECKING, PROGRESS, heavy_module, progress_bar, table
from hilt.cli.train_options import FromLastGood, Resume, Run, Trust, go_back, leave, plain
from hilt.core.errors import ConfigError
from hilt.core.signals import stop_signals
from hilt.core.threads import one_thread
from hilt.core.trust import check_names

if TYPE_CHECKING:
    from hilt.vla.sft import Sft, SftSummary

app = typer.Typer(add_completion=False)
WORDS = (
    "A recipe (sft_debug, sft_tabletop, act, flow_bc, a run.yaml, module:function); datasets; and settings, such as "
    "policy=FOLDER lora.rank=32."
)

TRY = "\nhilt eval {0} --episodes 10    # a first look; all test states, in minutes: hilt eval {0}"


@app.command("train sft")
def sft(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [DATA]... [KEY=VALUE]...", help=WORDS, show_default=False)
    ] = None,
    run: Run = None,
    resume: Resume = False,
    from_last_good: FromLastGood = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what would be read; start nothing.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="Show all settings and what they mean; train nothing.")
    ] = False,
    trusted: Trust = None,
) -> None:
    """Fine-tune a policy on demonstrations. Stopped in any way, --resume goes on, bit for bit."""
    one_thread()
    heavy_module("torch", "hilt train sft", "torch", then="hilt.vla.sft")
    from hilt.runs import run_precision as precision
    from hilt.vla.recap.recap_rounds import train
    from hilt.vla.sft import KIND, begin_run, resume_run

    recipe, data, overrides = _sorted(words or [])
    folder = run or Path("runs") / plain(recipe.removesuffix(".yaml").removesuffix(".yml") or "sft")
    resume = resume or from_last_good
    if resume and data:
        raise ConfigError(f"{data[0]}: a resumed run has its data; leave it out, or begin another run with --run.")
    if from_last_good and not settings:
        KIND.resumed(folder, recipe, overrides)  # what cannot be resumed stays as it is
        go_back(folder, dry_run)
    if settings or (dry_run and not from_last_good):
        _show(_config(recipe, data, overrides), folder, settings)
    if settings or dry_run:
        return
    with progress_bar(CHECKING):
        if resume:
            config = resume_run(folder, recipe, overrides)
        else:
            config = begin_run(folder, recipe, _config(recipe, data, overrides))
    for line in precision.lines(config, folder, resume):
        typer.echo(line)
    with PROGRESS.phases() as report, stop_signals() as stopped:

        def watch(step: int, values: dict[str, float]) -> None:
            if "validation_loss" in values:
                PROGRESS.notify(f"step {step:,} of {config.max_steps:,}: {_validation_text(step, values)}")

        done = train(config, folder, notify=PROGRESS.notify, watch=watch, stop=lambda: bool(stopped), report=report)
    _show_end(done, folder, has_tasks=bool(config.tasks), was_stopped=bool(stopped))
    leave(stopped)


def _validation_text(step: int, values: dict[str, float]) -> str:
    """Returns the loss of the validation at this step, beside the lowest one."""
    lowest = "so far" if values["best_step"] == step else f"was at step {values['best_step']:.0f}"
    return f"validation loss {values['validation_loss']:.4f}, the lowest {lowest}"


def _show_end(done: SftSummary, folder: Path, *, has_tasks: bool, was_stopped: bool) -> None:
    """Prints why the run ended, which policy is kept, and the commands that come next."""
    from hilt.vla.recap.recap_rounds import KEPT

    goes_on = f"hilt train sft --run {folder} --resume"
    if done.reason == KEPT:
        typer.echo(f"there was nothing to learn: {folder / 'policy'} is the policy that the run began with")
        return
    if not done.best_step:
        typer.echo(f"stopped after {done.step:,} steps, before there was anything to keep\n\n{goes_on}")
        return
    reasons = {"best": "held-out episodes got no better", "max_steps": "max_steps is reached"}
    reasons["stopped"] = "it was stopped"
    typer.echo(
        f"{reasons[done.reason]}: {done.step:,} steps, {done.seconds:.0f} s; the policy of step "
        f"{done.best_step:,}, loss {done.loss:.4f}, is kept"
    )
    typer.echo(f"\n{folder / 'policy'}" + TRY.format(folder) * has_tasks + f"\n{goes_on}" * was_stopped)


def _sorted(words: list[str]) -> tuple[str, list[str], list[str]]:
    """Recipe, data and settings, in whatever order they are given. What exists is data, but for a file of settings."""
    from hilt.recipes import SFT_RECIPES

    recipe, data, overrides = "", [], []
    for word in words:
        if "=" in word and not Path(word).exists():
            overrides.append(word)
        elif word in SFT_RECIPES or word.endswith((".yaml", ".yml")) or (":" in word and not Path(word).exists()):
            if recipe:
                raise ConfigError(f"two recipes were given, {recipe} and {word}: give one.")
            recipe = word
        elif Path(word).exists():
            data.append(word)
        else:
            raise ConfigError(
                f"{word} is no recipe ({', '.join(SFT_RECIPES)}), no setting (KEY=VALUE), and there "
                "is no such file or folder."
            )
    return recipe, data, overrides


def _config(recipe: str, data: list[str], overrides: list[str]) -> Sft:
    from hilt.core.config import override
    from hilt.recipes import sft_recipe
    from hilt.vla.sft import Sft

    config = override(sft_recipe(recipe) if recipe else Sft(), *overrides)
    config.data += data
    return config


def _show(config: Sft, folder: Path, meanings: bool) -> None:
    from rich.console import Console

    from hilt.core.config import describe, to_yaml
    from hilt.runs import run_precision as precision
    from hilt.runs.folder import check_new
    from hilt.vla.sft import Sft

    if meanings:
        rows: list[list[Any]] = [[key, default, meaning] for key, _, default, meaning in describe(Sft)]
        Console(soft_wrap=not sys.stdout.isatty()).print(table("setting", "default", "meaning", rows=rows))
        return
    config.check()
    check_names(config)
    check_new(folder)
    typer.echo(to_yaml(config))
    typer.echo(f"would begin in {folder}, with {config.policy}")
    for line in precision.lines(config):
        typer.echo(line)
    if config.demonstrations:
        typer.echo(
            f"{config.demonstrations} demonstrations of each of {', '.join(config.tasks)}, recorded by its script"
        )
    from hilt.formats import detect, located

    for path in config.data:
        typer.echo(f"{path}: {detect(located(path))}")
