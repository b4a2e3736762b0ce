"""``hilt train RECIPE`` of post-training: a policy rolls out groups of episodes
over tasks, and learns from how they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hilt.cli.show import CHECKING, heavy_module, progress_bar
from hilt.cli.train_options import leave
from hilt.core.errors import Problems, UnknownNameError, optional_module
from hilt.core.hub import local
from hilt.core.signals import stop_signals
from hilt.core.threads import one_thread
from hilt.core.trust import check_names

if TYPE_CHECKING:
    from hilt.observe.live import Live
    from hilt.vla.config import Vla


def run(
    config: Vla | None,
    folder: Path,
    recipe: str = "",
    overrides: Sequence[str | Mapping[str, object]] = (),
    resume: bool = False,
    dry_run: bool = False,
    also: Sequence[str] = (),
) -> None:
    """Begins a run with a config, or resumes the one in the folder with `overrides`; `also`
    are lines that are printed before it starts."""
    one_thread()
    optional_module("gymnasium", "hilt train", "sim")
    heavy_module("torch", "hilt train", "torch", then="hilt.vla.train")
    from hilt.runs import run_precision as precision
    from hilt.runs.folder import undone_if_nothing_is_kept
    from hilt.vla.plan import recomputation
    from hilt.vla.train import begin_run, in_words, resume_run, resumed_settings, train

    if resume and not dry_run:
        _fetch(folder, overrides)
    if dry_run:
        shown = resumed_settings(folder, recipe, overrides)[0] if resume else config
        assert shown is not None
        _show(shown, folder, resume, also)
        return
    with progress_bar(CHECKING):
        if resume:
            config = resume_run(folder, recipe, overrides)
        else:
            assert config is not None
            config = begin_run(folder, recipe, config)
    undone = contextlib.nullcontext() if resume else undone_if_nothing_is_kept(folder)
    with stop_signals() as stopped:
        with undone, live(folder, config) as screen:
            chosen = (*precision.lines(config, folder, resume), *recomputation.lines(folder))
            for line in (*also, *config.arithmetic(), *chosen):
                screen.notify(line)
            done = train(config, folder, notify=screen.notify, stop=lambda: bool(stopped), report=screen.report)
        why = in_words(config, done)
        kept = "" if done.best_step < 0 else f"; the policy of step {done.best_step} is kept" + _share(done.success)
        waited = f" and {done.waited} that only collected" * bool(done.waited)
        typer.echo(f"{why}: {done.step - done.waited} training steps{waited}, {done.seconds:.0f} s{kept}")
        end = f"\n{folder / 'policy'}" * (folder / "policy").is_dir() + f"\nhilt train --run {folder} --resume" * (
            done.reason == "stopped"
        )
        typer.echo(f"{end}\nhilt eval {folder}\nhilt plot {folder}\nhilt open {folder}")
        leave(stopped)


def _fetch(folder: Path, overrides: Sequence[str | Mapping[str, Any]]) -> None:
    """Where a run that is to go on is not on this machine, it comes from its copy, if `copy_to` is given."""
    from hilt.core.config import build
    from hilt.vla.config import Vla
    from hilt.vla.exports import fetch_run
    from hilt.vla.train import is_run

    if not is_run(folder) and (url := build(Vla(), *overrides).copy_to):
        with progress_bar(f"fetching the run from {url}", "files") as move:
            fetch_run(url, folder, typer.echo, lambda phase, done=0, total=0, note="": move(done, total))


def _share(success: float) -> str:
    return f", success {100 * success:.1f}%" if success >= 0 else ""


def live(folder: Path, config: Vla, usual_steps: int = 0) -> Live:
    """The table of the run. `usual_steps`: training steps after which a run of this kind has usually reached its
    goal, for the remaining time that is shown."""
    from hilt.observe.live import Live

    limits = {"max_steps": config.max_steps, "max_seconds": config.max_seconds, "usual_steps": usual_steps}
    named = ", ".join(config.tasks[:3]) + (f" and {len(config.tasks) - 3} more" if len(config.tasks) > 3 else "")
    return Live(folder, f"{named} in {folder}", limits)


def _show(config: Vla, folder: Path, resume: bool, also: Sequence[str]) -> None:
    from hilt.core.config import to_yaml
    from hilt.policies.registry import is_new
    from hilt.runs import run_precision as precision
    from hilt.runs.folder import check_new
    from hilt.vla.footprint import footprint
    from hilt.vla.plan import recomputation, step_time

    problems, lacking = Problems(), Problems()
    problems.check(config.check, False)
    problems.check(check_names, config)
    if not resume:
        problems.check(check_new, folder)
    lacking.check(config.check_place)
    problems.errors += [error for error in lacking.errors if isinstance(error, UnknownNameError)]  # no machine has that
    problems.report()
    typer.echo(to_yaml(config))
    typer.echo(f"{'goes on in' if resume else 'would begin in'} {folder}")
    for line in (*also, *config.arithmetic(), *precision.lines(config, folder if resume else None, resume)):
        typer.echo(line)
    if is_new(config.policy) or local(config.policy).is_dir():
        settled, choice = recomputation.with_all(config), None
        with lacking.collected():
            settled, choice = recomputation.settle(config)
            if choice is not None:
                typer.echo(str(choice))
            recomputation.check_limit(settled, choice)
        with lacking.collected():
            for line in footprint(settled, folder, None if choice is None else choice.roles):
                typer.echo(line)
        if not lacking.errors:
            with lacking.collected():
                for line in step_time.predicted_lines(settled):
                    typer.echo(line)
    if lacking.errors:
        typer.echo("this machine lacks, for a start:")
    for error in lacking.errors:
        typer.echo(f"  - {error}")
