"""The ``hilt`` command.

A command's module is imported when that command runs, so ``hilt --help`` stays quick whatever the
commands need. Each module has a typer app named ``app``; one with several commands (or with one that is
called by its name) also has an ``@app.callback()``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hilt import __version__
from hilt.cli.help import tidy, tidy_params, with_page, write_examples
from hilt.core.errors import HiltError
from hilt.core.progress import printable
from hilt.core.signals import hold_back_signals, remember_interrupts
from hilt.core.trust import command_line

# name: (module, or module:app, one line for the help)
COMMANDS = {
    "demo": ("hilt.cli.demos.demo", "Watch an arm learn a task in minutes; also: demo vla, person, store, wire."),
    "eval": ("hilt.cli.eval_command", "Evaluate a policy: success on all evaluation states, intervals, videos."),
    "open": ("hilt.app.open_command", "Open runs, episodes and datasets in the browser."),
    "plot": ("hilt.cli.plot", "Draw the learning curves of runs, as PNG files and as one page."),
    "recipes": ("hilt.cli.recipes:recipes", "List the recipes that ship with Hilt."),
    "settings": ("hilt.cli.recipes:settings", "Show all settings of a recipe: value, default, unit and meaning."),
    "train": (
        "hilt.cli.train_hil:train",
        "Train from a recipe: with a person in the loop, or a VLA policy on rollouts.",
    ),
    "train classifier": ("hilt.cli.train_classifier", "Train a reward classifier from frames of success and failure."),
    "train value": ("hilt.cli.data.value_command", "Train a value model from successes and failures in logs."),
    "train sft": ("hilt.cli.train_sft", "Fine-tune a VLA policy on demonstrations, full or LoRA."),
    "train rloo": ("hilt.cli.rloo", "Post-train a VLA policy by RLOO, from the YAML file of a RIPT-style trainer."),
    "train simplevla": ("hilt.cli.train_simplevla", "Post-train a VLA policy with the command line of SimpleVLA-RL."),
    "learner": ("hilt.cli.train_hil:learner", "Run a learner alone, which actors on this or other machines join."),
    "actor": ("hilt.cli.train_hil:actor", "Run an actor alone, for a learner on this or another machine."),
    "record": ("hilt.cli.record_command", "Record episodes of a person or a script, in a simulator or on an arm."),
    "data": (
        "hilt.cli.data.data_commands",
        "Inspect, check and convert datasets; verify, repair, merge, split, edit logs.",
    ),
    "fetch": ("hilt.cli.fetch:fetching", "Fetch a policy or a dataset from the Hugging Face Hub, hf:org/name."),
    "push": ("hilt.cli.fetch:pushing", "Push a policy or a dataset to the Hugging Face Hub."),
    "keys": ("hilt.cli.new_keys", "Make the keys with which a learner and its actors authenticate."),
    "serve-policy": (
        "hilt.cli.servers.serve_policy",
        "Serve a policy over a websocket, to openpi's clients and Hilt's.",
    ),
    "serve-robot": (
        "hilt.cli.servers.serve_robot",
        "Serve an arm, real or simulated, over HTTP, like HIL-SERL's robot server.",
    ),
    "docs": ("hilt.cli.guide.docs_command", "Read the installed documentation, or search in it; needs no network."),
    "completion": (
        "hilt.cli.guide.completion_command",
        "Print a script that completes commands, recipes and settings in a shell.",
    ),
    "doctor": ("hilt.cli.doctor", "Check this machine, and print how to install what is missing."),
}


class LazyGroup(TyperGroup):
    """The commands above, imported on use; their errors as one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["hilt.words"] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `train classifier` is a command, and `train hil_debug` one with an argument
        if " ".join(args[:2]) in COMMANDS:
            args = [" ".join(args[:2]), *args[2:]]
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            module, _, app = COMMANDS[name][0].partition(":")
            command = tidy(typer.main.get_command(getattr(importlib.import_module(module), app or "app")), name)
        return name, command, rest

    def get_params(self, ctx: Any) -> list[Any]:
        return tidy_params(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        write_examples("", formatter)

    def invoke(self, ctx: Any) -> Any:
        from hilt.cli.show import PROGRESS

        PROGRESS.restart()
        try:
            with command_line(ctx.meta["hilt.words"]):
                return super().invoke(ctx)
        except HiltError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            else:
                typer.echo(printable(f"error: {with_page(str(error), ctx.meta['hilt.words'])}"), err=True)
            raise typer.Exit(1) from error
        except OSError as error:
            # the reader of the output is gone: typer ends silently
            if ctx.params["debug"] or error.errno == errno.EPIPE:
                raise
            typer.echo(printable(f"error: {_in_words(error)}"), err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _in_words(error: OSError) -> str:
    """What the operating system refused: a path that is too long, a disk without
    room; or what a driver or a network raised, with the line that did so."""
    why, name = error.strerror or str(error), str(error.filename or "")
    if not name and error.errno not in OUTPUT_ERRORS:
        at = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {why}".rstrip(".: ")
        return f"{why} (raised in {at.filename}, line {at.lineno}). `hilt --debug` shows the whole traceback."
    if not name:
        # else Python tries to write the rest once more at its end, and fails with a traceback
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"the output cannot be written: {why}. Give it another place. `hilt --debug` shows where it happened."
    shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}... ({len(name)} characters)"
    return f"{shown}: {why}. Check the path. `hilt --debug` shows where it happened."


OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN)
"""What a write to the output fails with; an error of the system that names no file"""
MAX_SHOWN = 120
"""Characters of a path that an error shows"""
INTERRUPTED = 130
"""The exit code that a shell expects of a program that ended by Ctrl-C"""
HELP = {"help_option_names": ["-h", "--help"]}
"""Inherited by every command"""
app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, context_settings=HELP
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hilt {__version__}")
        raise typer.Exit


@app.callback()
def hilt(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Robot policies by reinforcement learning, with a person in the loop."""


def _placeholder() -> None:
    """Gives a command its line in the help; the real one takes its place in ``LazyGroup``."""


for _name, (_module, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_placeholder)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")  # a terminal that has no such letter shows a question mark
    try:
        remember_interrupts()
        app()
    except KeyboardInterrupt:  # before the command began
        sys.exit(INTERRUPTED)
    except SystemExit as ending:
        if isinstance(ending.code, int) and ending.code > 128:  # by a signal: a second one does not change what is said
            hold_back_signals()
        raise
