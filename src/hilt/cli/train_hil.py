"""``hilt train``, ``hilt learner``, ``hilt actor``: a run from a recipe, all of it or one side.

Exit codes: 0 when the run came to its end or somebody pressed stop, 130 after Ctrl-C (143 after
SIGTERM, 129 after SIGHUP), 1 when something fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilt.cli.show import CHECKING, PROGRESS, heavy_module, progress_bar
from hilt.cli.train_options import FromLastGood, Overrides, Resume, Run, Trust, go_back, leave, plain
from hilt.core.errors import Problems, optional_module
from hilt.core.progress import Report, silent
from hilt.core.signals import ASK_TO_END, leave_to_parent, stop_signals
from hilt.core.threads import one_thread
from hilt.core.trust import check_names

if TYPE_CHECKING:
    from hilt.hil.config import Hil
    from hilt.observe.live import Live

train, learner, actor = (typer.Typer(add_completion=False) for _ in range(3))

Recipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="hil_debug, tabletop_pick, vla_debug, a run.yaml, or module:function of yours.",
        show_default=False,
    ),
]


@train.command("train")
def train_command(
    context: typer.Context,
    recipe: Recipe = None,
    overrides: Overrides = None,
    run: Run = None,
    resume: Resume = False,
    from_last_good: FromLastGood = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what would be started; start nothing.")
    ] = False,
    trusted: Trust = None,
) -> None:
    """Train: a learner and actors on this machine; or, of a recipe of post-training, a vision-language-action policy on
    its own rollouts. Stopped in any way, --resume goes on; no step is lost.

    Others have their own help: `hilt train sft` (a policy imitates demonstrations),
    `hilt train classifier` (a reward from frames).
    """
    one_thread()
    recipe, words = _words(recipe, overrides)
    folder, resume = _folder(recipe, run), resume or from_last_good
    if from_last_good:
        _go_back(recipe, words, folder, dry_run)
    if _of_post_training(recipe, folder, resume, words):
        _post_train(recipe, words, folder, resume, dry_run)
        return
    if dry_run:
        _show(recipe, words, folder, resume)
        return
    with progress_bar(CHECKING):
        config = _opened(recipe, words, folder, resume, whole=True)
    from hilt.hil.launch import train as run_all
    from hilt.runs.folder import undone_if_nothing_is_kept

    undone = contextlib.nullcontext() if resume else undone_if_nothing_is_kept(folder)
    with undone, stop_signals() as stopped, _live(folder, config) as screen:
        stop, debug = (lambda: bool(stopped)), bool(context.find_root().params.get("debug"))
        outcome = run_all(config, folder, notify=screen.notify, stop=stop, report=screen.report, debug=debug)
    killed = ", ".join(f"{name} {count}" for name, count in outcome.restarts.items())
    typer.echo(
        f"{'ended' if outcome.ended else 'stopped'}: {folder}"
        + (f"; killed and started again: {killed}" if killed else "")
    )
    typer.echo("\n" + "\n".join(_next(folder, outcome.ended)))
    leave(stopped)


@learner.command("learner")
def learner_command(
    recipe: Recipe = None,
    overrides: Overrides = None,
    run: Run = None,
    resume: Resume = False,
    from_last_good: FromLastGood = False,
    trusted: Trust = None,
) -> None:
    """The learner alone. Beyond this machine it needs keys: see hilt keys."""
    recipe, words = _words(recipe, overrides)
    folder, resume = _folder(recipe, run), resume or from_last_good
    one_thread()
    if from_last_good:
        _go_back(recipe, words, folder)
    with progress_bar(CHECKING):
        config = _opened(recipe, words, folder, resume)
    heavy_module("torch", "hilt learner", "torch", then="hilt.hil.learner")
    from hilt.hil.environment import spaces
    from hilt.hil.launch import demonstrate, with_demonstrations
    from hilt.hil.learner import Learner

    with _ending() as stopped, _shown(folder, config) as (notify, report):
        demonstrate(config, folder, notify, lambda: bool(stopped), report)
        report(f"opening {config.task}")
        env = spaces(config)
        report("")
        _let_actors_go_first(config, env.keeps_rate)
        shown = with_demonstrations(config, folder)
        summary = None if stopped else Learner(shown, folder, resume=resume, env=env).run(lambda: bool(stopped))
    if summary is not None:
        typer.echo(f"{summary.reason}: {summary.update:,} updates, {summary.online:,} online steps, in {folder}")
    leave(stopped)


@actor.command("actor")
def actor_command(
    recipe: Recipe = None,
    overrides: Overrides = None,
    host: Annotated[
        str | None, typer.Option("--learner", metavar="HOST", help="Where the learner is.", show_default="wire.host")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="The name of this actor, which also determines its seeds.")
    ] = socket.gethostname(),
    spool: Annotated[
        Path | None,
        typer.Option("--spool", metavar="FOLDER", help="Steps wait here for the learner.", show_default="spools/NAME"),
    ] = None,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Play groups of episodes in simulation, for algorithm=mixed.")
    ] = False,
    trusted: Trust = None,
) -> None:
    """An actor alone, for a learner here or elsewhere. Whatever happens to either, no step is lost."""
    recipe, words = _words(recipe, overrides)
    one_thread()
    optional_module("gymnasium", "hilt actor", "sim")
    heavy_module("torch", "hilt actor", "torch", then="hilt.hil.actor")
    sys.setswitchinterval(0.001)  # a thread that sends holds up the one that drives for no longer than this
    from hilt.hil.actor import act
    from hilt.hil.config import check
    from hilt.hil.defaults import chosen
    from hilt.hil.environment import spaces

    config = _config(recipe, [*words, *([] if host is None else [f"wire.host={host}"])])
    check(config)
    if config.defaults == "auto":  # of a recipe; a run's own settings have what was chosen
        config = chosen(config, spaces(config))[0]
    with _ending() as stopped, PROGRESS.phases() as report:
        folder = spool or Path("spools") / plain(name)
        acted = act(
            config,
            folder,
            name,
            stop=lambda: bool(stopped),
            notify=PROGRESS.notify,
            report=report,
            simulation=simulation,
        )
    typer.echo(f"{acted.reason}: {acted.steps:,} steps, {acted.episodes:,} episodes")
    if acted.spooled and config.store == "log":
        typer.echo(f"{acted.spooled:,} steps wait for the learner; the same command sends them")
    elif acted.spooled:
        typer.echo(
            f"{acted.spooled:,} episodes did not reach the learner and are lost: store={config.store} "
            "keeps none on the disk here"
        )
    leave(stopped)


def _next(folder: Path, ended: bool) -> list[str]:
    """Commands that work now: without a checkpoint, as of a run that was stopped before its
    first update, there is nothing to evaluate."""
    from hilt.runs.checkpoint import numbers

    looks = [f"hilt eval {folder}", f"hilt plot {folder}", f"hilt open {folder}"] if numbers(folder) else []
    return [*looks, *([] if ended else [f"hilt train --run {folder} --resume"])]


def _of_post_training(recipe: str, folder: Path, resume: bool, words: list[str]) -> bool:
    if resume and not recipe and (folder / "run.json").is_file():
        from hilt.core.checksums import read_json

        return read_json(folder / "run.json").get("kind") == "vla"
    # it is not here yet, and only post-training has copies
    if resume and any(word.startswith("copy_to=") for word in words):
        return True
    from hilt.recipes import is_vla

    return bool(recipe) and is_vla(recipe)


def _go_back(recipe: str, words: list[str], folder: Path, dry_run: bool = False) -> None:
    """Goes back to the last good checkpoint, if the run can be resumed with these settings."""
    optional_module("gymnasium", "hilt train", "sim")
    heavy_module("torch", "hilt train", "torch")
    from hilt.hil import launch

    if _of_post_training(recipe, folder, True, []):
        from hilt.vla import train as post_training

        post_training.resumed_settings(folder, recipe, words)
    else:
        launch.resumed_settings(folder, recipe, _in_full(words))
    go_back(folder, dry_run)


def _post_train(recipe: str, words: list[str], folder: Path, resume: bool, dry_run: bool) -> None:
    from hilt.cli.train_vla import run
    from hilt.core.config import build
    from hilt.recipes import vla_recipe

    heavy_module("torch", "hilt train", "torch")
    config = None
    if not resume:
        base, problems = vla_recipe(recipe), Problems()
        config = build(base, *(word for word in words if problems.check(build, base, word)))
        if problems.errors:  # beside what else cannot work
            problems.check(config.check)
            problems.report()
    run(config, folder, recipe, words, resume, dry_run)


def _live(folder: Path, config: Hil) -> Live:
    from hilt.observe.live import Live

    limits = {name: getattr(config, name) for name in ("max_seconds", "max_steps", "max_env_steps")}
    return Live(folder, f"{config.task} in {folder}", limits)


@contextlib.contextmanager
def _shown(folder: Path, config: Hil) -> Iterator[tuple[Callable[[str], None], Report]]:
    """The live table of a learner alone. For one whose parent shows it, its messages go into its log."""
    if _parent():
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
        yield typer.echo, silent
        return
    with _live(folder, config) as screen:
        yield screen.notify, screen.report


def _words(recipe: str | None, overrides: list[str] | None) -> tuple[str, list[str]]:
    """The recipe, which may be left out, and the rest."""
    words = list(overrides or [])
    if recipe is not None and "=" in recipe:
        return "", [recipe, *words]
    return recipe or "", words


def _folder(recipe: str, run: Path | None) -> Path:
    if run is None and not recipe:
        raise typer.BadParameter(
            "give a RECIPE, such as hil_debug (hilt recipes lists them), or a run with --run and --resume."
        )
    return run or Path("runs") / plain(recipe.removesuffix(".yaml").removesuffix(".yml"))


def _in_full(overrides: list[str]) -> list[str]:
    """The same settings, with ``policy=`` in full: the folder of a policy, or the address of a server that has one."""
    full = []
    for word in overrides:
        name, _, value = word.partition("=")
        option = "server" if "://" in value else "policy"
        full.append(f"agent.options.{option}={value}" if name == "policy" else word)
    return full


def _config(recipe: str, overrides: list[str]) -> Hil:
    if not recipe:
        raise typer.BadParameter("give a RECIPE, such as hil_debug; hilt recipes lists them.")
    overrides = _in_full(overrides)
    from hilt.core.config import build, override
    from hilt.hil.preflight import check_begin
    from hilt.recipes import recipe as named

    base, problems = named(recipe), Problems()
    known = [word for word in overrides if problems.check(build, base, word)]
    config = override(base, *known)
    if problems.errors:  # beside what else cannot work
        with problems.collected():
            check_begin(config, make_task=not check_names(config), notify=_warn)
        problems.report()
    return config


def _opened(recipe: str, overrides: list[str], folder: Path, resume: bool, whole: bool = False) -> Hil:
    """The settings of a run that begins or goes on; its folder has them from now
    on. `whole`: both sides are started here."""
    optional_module("gymnasium", "hilt train", "sim")
    from hilt.hil import defaults
    from hilt.hil.importing import other_tasks
    from hilt.hil.launch import begin_run, check_wire, own_ports, resume_run
    from hilt.replay.storage.lock import writer_of
    from hilt.runs import run_precision as precision

    if not resume:
        config = _config(recipe, overrides)
        config = own_ports(config, typer.echo) if whole else config
        ready_to_measure(config)
        config = begin_run(folder, recipe, config, lambda: check_wire(config), whole=whole, notify=_warn)
        _echo(other_tasks(config))
    else:
        config = resume_run(folder, recipe, _in_full(overrides))
        if not writer_of(folder):  # else its own former learner has them, which is awaited
            if whole and (wire := own_ports(config, typer.echo).wire) != config.wire:
                config = resume_run(
                    folder, recipe, [f"wire.port={wire.port}", f"wire.broadcast_port={wire.broadcast_port}"]
                )
            check_wire(config)
        ready_to_measure(config)
    # a parent has printed it
    for line in [] if _parent() else [*defaults.lines(folder), *precision.lines(config, folder, resume)]:
        typer.echo(line)
    return config


def _echo(warnings: list[str]) -> None:
    for line in warnings:
        _warn(line)


def _warn(line: str) -> None:
    typer.echo(line, err=True)


def ready_to_measure(config: Hil) -> None:
    """Imports torch, with a message, if the precision of a run is determined by timing."""
    from hilt.runs import run_precision as precision

    if precision.measures(config):
        heavy_module("torch", "hilt train", "torch")


def _show(recipe: str, overrides: list[str], folder: Path, resume: bool) -> None:
    from hilt.core.config import to_yaml
    from hilt.hil.importing import other_tasks
    from hilt.hil.launch import check_wire, commands, own_ports, resumed_settings
    from hilt.hil.preflight import check_begin
    from hilt.runs import run_precision as precision
    from hilt.runs.folder import check_new

    if resume:
        config = resumed_settings(folder, recipe, _in_full(overrides))[0]
    else:
        config = own_ports(_config(recipe, overrides), typer.echo)
    unseen = check_names(config)
    new = () if resume else (lambda: check_new(folder), lambda: check_wire(config))
    config, choice = check_begin(config, *new, whole=True, make_task=not unseen, notify=_warn)
    if not resume:
        _echo(other_tasks(config))
    typer.echo(to_yaml(config))
    typer.echo(f"{'goes on in' if resume else 'would begin in'} {folder}, with")
    ready_to_measure(config)
    if choice is not None and choice.changed:
        typer.echo(str(choice))
    for line in precision.lines(config, folder if resume else None, resume):
        typer.echo(line)
    if config.demonstrations and not resume:
        typer.echo(f"{config.demonstrations} demonstrations of {config.task}, recorded by its script")
    if unseen:
        typer.echo(
            f"{', '.join(unseen)}: code that a file names, which a dry run does not import; what it shows "
            "and takes was not checked"
        )
    for name, command in commands(config, folder).items():
        typer.echo(f"{name}: {' '.join(command[command.index('hilt') :])}")


def _let_actors_go_first(config: Hil, keeps_rate: bool) -> None:
    """The learner of `hilt train` shares a machine with control loops, which must not be late. A simulation
    that goes as fast as it can has no rate to keep: there the learner is the one that others wait for, and
    on a busy machine it would get too little."""
    if _parent() and (keeps_rate or config.control_hz or config.operator not in ("", "script")):
        os.nice(5)


@contextlib.contextmanager
def _ending() -> Iterator[list[int]]:
    """The signals that ask a learner or an actor to end. One that `hilt train` has started is asked by it alone, and
    ends in the same way when that is gone, however it went."""
    parent = _parent()
    if not parent:
        with stop_signals() as stopped:
            yield stopped
        return
    asked, over = list[int](), threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            if over.wait(0.5):
                return
        asked.append(ASK_TO_END)

    signal.signal(ASK_TO_END, lambda number, _: asked.append(number))
    leave_to_parent()
    thread = threading.Thread(target=watch, name="hilt-parent", daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join(5)
        # Python's end takes handlers away, and the signal would end it with another exit code
        signal.signal(ASK_TO_END, signal.SIG_IGN)


def _parent() -> int:
    """The process that started this one as a part of a run; 0 if there is none."""
    from hilt.hil.launch import PARENT

    return int(os.environ.get(PARENT, 0))
