"""``hilt record``: a person or a script drives a task; the episodes stay, each power-safe when it ends.

Exit codes: 0 when all is recorded or somebody pressed stop, 130 after Ctrl-C (143 after SIGTERM), 1 when something fails.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.show import table
from hilt.core.errors import ConfigError, optional_module

if TYPE_CHECKING:
    from hilt.runtime.record import Recorded, Summary

app = typer.Typer(add_completion=False)
PAIR: dict[str, Any] = {"metavar": "NAME=VALUE", "show_default": False}


@app.command()
def record(
    task: Annotated[str, typer.Argument(help="Such as tabletop/pick, robot/127.0.0.1:5000, or a gymnasium id.", show_default=False)],
    episodes: Annotated[int | None, typer.Option(min=1, help="How many there are to be in the end.", show_default="20")] = None,
    device: Annotated[str, typer.Option(help="browser, keyboard, gamepad, spacemouse, or script: the task's own expert.")] = "browser",
    out: Annotated[Path | None, typer.Option(help="The recording's folder.", show_default="recordings/TASK")] = None,
    keep: Annotated[str, typer.Option(help="Which episodes stay: successes, or all, marked.")] = "successes",
    mode: Annotated[str, typer.Option(help="A person acts while they hold the device, or toggle.")] = "hold",
    classifier: Annotated[bool, typer.Option("--classifier", help="Record frames of success and failure for a reward classifier.")] = False,
    successes_needed: Annotated[
        int | None, typer.Option(min=1, help="With --classifier: frames marked as success.", show_default="200")
    ] = None,
    split: Annotated[str, typer.Option(help="Where initial states come from.")] = "train",
    states: Annotated[str, typer.Option(metavar="0-9,15", help="Their numbers.", show_default="all of the split")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the states, and of what else is random.")] = 0,
    image_size: Annotated[int | None, typer.Option(min=1, help="Height and width of images.", show_default="the task's")] = None,
    observations: Annotated[str, typer.Option(help="nested, as the task gives them, or hil-serl, as its wrappers make them.")] = "nested",
    video: Annotated[bool, typer.Option("--video/--no-video", help="A video of each episode.")] = True,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="An option of the task.", **PAIR)] = None,
    device_option: Annotated[
        list[str] | None, typer.Option("--device-option", "-d", help="An option of the device, such as port=8080.", **PAIR)
    ] = None,
) -> None:
    """Record episodes, or frames for a reward classifier. Stopped in any way, the same command goes on where it was."""
    if classifier and episodes is not None:
        raise typer.BadParameter("--classifier counts frames, not episodes: give --successes-needed instead of --episodes.")
    if classifier and keep != "successes":
        raise typer.BadParameter("--classifier keeps every episode with a mark and without: leave out --keep.")
    if successes_needed is not None and not classifier:
        raise typer.BadParameter("--successes-needed is for --classifier.")
    optional_module("gymnasium", "hilt record", "sim")
    from hilt.envs.task import make
    from hilt.runtime.record import Settings
    from hilt.runtime.record import record as run
    from hilt.teleop.devices import open_device

    options = {**_pairs(option), **({} if image_size is None else {"image_size": image_size})}
    folder = out or Path("recordings") / (re.sub(r"\W+", "-", task).strip("-") + ("-frames" if classifier else ""))
    frames = (successes_needed or 200) if classifier else 0
    settings = Settings(task, options, episodes or 20, keep, frames, split, _numbers(states), seed, mode, observations)
    env = _made(make, task, options, "-o")
    try:
        with _made(open_device, device, _pairs(device_option), "-d") as opened:
            if url := getattr(opened, "url", ""):
                typer.echo(f"open {url}")
            with Terminal("frames marked" if classifier else "episodes") as watch, stop_signals() as stopped:
                summary = run(env, opened, folder, settings, watch=watch, stop=lambda: bool(stopped), videos=video)
    finally:
        env.close()
    show_summary(summary, task)
    if stopped:
        raise typer.Exit(128 + stopped[0])


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM drop the running episode and end the session in order; a second one ends it at once."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        restore()


class Terminal:
    """Shows a session: a line for each episode, and on a terminal what is going on now."""

    def __init__(self, noun: str):
        self._noun, self._shown = noun, (0.0, 0)
        self._live: Any = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, s: Summary) -> None:
        if s.unfinished:
            typer.echo(f"{s.unfinished} unfinished episode{'s' * (s.unfinished > 1)} of a session that was killed: dropped")
        for note in s.notes:
            typer.echo(note)
        typer.echo(f"recording into {s.path}: have {self._have(s)}")
        if sys.stderr.isatty() and not s.complete:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=10, transient=True)
            self._live.start()

    def step(self, s: Summary) -> None:
        if self._live is not None and (passed := time.monotonic() - self._shown[0]) > 0.5:
            from rich.text import Text

            rate = (s.steps - self._shown[1]) / passed
            self._shown = time.monotonic(), s.steps
            now = f"step {s.step}, {rate:.1f} steps/s" if s.step else "take over to begin"
            now = f"episode {s.attempts}: {now}; have {self._have(s)}, {s.successes} succeeded"
            self._live.update(Text(now))

    def episode(self, recorded: Recorded, s: Summary) -> None:
        how = {True: "success", False: "no success", None: "success unknown"}[recorded.success]
        what = f"dropped: {recorded.dropped}" if recorded.dropped else f"{how}, power-safe"
        typer.echo(f"episode {s.attempts}: {recorded.steps} steps, {what}; have {self._have(s)}")

    def _have(self, s: Summary) -> str:
        return f"{s.have} of {s.wanted} {self._noun}"


def show_summary(s: Summary, task: str) -> None:
    from rich.console import Console

    dropped = ", ".join(f"{count} {reason}" for reason, count in s.discarded.items())
    rows = [
        ["task", task],
        ["in the log", f"{s.episodes} episodes, {s.successes} of them succeeded"],
        ["this session", f"{s.attempts} episodes, {s.steps:,} steps" + (f"; dropped: {dropped}" if dropped else "")],
        ["control rate", s.rate()],
        ["videos", f"{s.videos} in {s.path / 'videos'}" if s.videos else "none"],
        *[["", note] for note in s.notes],
    ]
    Console().print(table("", "", rows=rows))
    if not s.complete:
        typer.echo(f"\nThere are {s.have} of {s.wanted}. The same command goes on.")
    if s.episodes:
        typer.echo(f"\nhilt data inspect {s.path / 'log'}\nhilt data convert {s.path / 'log'} {s.path / 'hil-serl'} --to hil-serl")


def _made(maker: Callable[..., Any], name: str, options: dict[str, Any], flag: str) -> Any:
    try:
        return maker(name, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ConfigError(f"{name} cannot be made with the options {options}: {error}. Check what you gave with {flag}.") from error


def _pairs(given: list[str] | None) -> dict[str, Any]:
    """``NAME=VALUE``, where a value is a number, true, false or null, and text otherwise."""
    out: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r}: expected NAME=VALUE.")
        try:
            out[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            out[name.replace("-", "_")] = value
    return out


def _numbers(text: str) -> list[int]:
    """``0-9,15``"""
    out: list[int] = []
    for part in text.split(",") if text else []:
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise typer.BadParameter(f"--states {text!r}: expected numbers and ranges, such as 0-9,15.")
        out += range(int(match[1]), int(match[2] or match[1]) + 1)
    return out
