"""``hilt record``: a person or a script drives a task; the episodes stay, each power-safe when it ends.

Exit codes: 0 when all is recorded or somebody pressed stop, 130 after Ctrl-C (143 after
SIGTERM, 129 after SIGHUP), 1 when something fails.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.show import PROGRESS, shell, show_next, table
from hilt.cli.train_options import option_values
from hilt.core.errors import ConfigError, optional_module
from hilt.core.signals import stop_signals
from hilt.core.trajectory import Source

if TYPE_CHECKING:
    from hilt.recording.record import Recorded, RecordingSummary, Settings
    from hilt.teleop.devices import Device

app = typer.Typer(add_completion=False)
PERSONS_LIMIT = 3
"""Number of times the steps of a simulated task, which are a script's, or of an arm
without a limit of its own, that a person has"""


def _option(metavar: str, help: str, default: str | bool = True, names: Sequence[str] = (), **rest: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, show_default=default, **rest)


@app.command()
def record(
    task: Annotated[
        str, typer.Argument(help="Such as tabletop/pick, robot/127.0.0.1:5000, or a gymnasium id.", show_default=False)
    ],
    episodes: Annotated[int | None, _option("N", "The total number of episodes.", "20", min=1)] = None,
    device: Annotated[
        str, _option("NAME", "browser, keyboard, gamepad, spacemouse, or script (the task's expert).")
    ] = "browser",
    out: Annotated[Path | None, _option("FOLDER", "The folder of the recording.", "recordings/TASK")] = None,
    keep: Annotated[str, _option("RULE", "successes, or all: failures are kept, too.")] = "successes",
    mode: Annotated[str, _option("MODE", "hold: act while held. toggle: press to change.")] = "hold",
    classifier: Annotated[bool, typer.Option("--classifier", help="Record frames for a reward classifier.")] = False,
    successes_needed: Annotated[
        int | None, _option("N", "With --classifier: the number of success frames.", "200", min=1)
    ] = None,
    split: Annotated[str, _option("NAME", "The split of initial states.")] = "train",
    states: Annotated[str, _option("0-9,15", "Only these initial states.", "all")] = "",
    seed: Annotated[int, _option("N", "The seed of the order of states.", min=0)] = 0,
    image_size: Annotated[int | None, _option("N", "Image size in pixels.", "the task's", min=1)] = None,
    observations: Annotated[str, _option("KIND", "nested, or hil-serl: with its wrappers.")] = "nested",
    disturb: Annotated[float, _option("STD", "Noise on the motions; the log has them without.", False)] = 0.0,
    no_video: Annotated[bool, typer.Option("--no-video", help="Make no videos of the episodes.")] = False,
    option: Annotated[
        list[str] | None, _option("NAME=VALUE", "An option of the task.", False, names=["--option", "-o"])
    ] = None,
    device_option: Annotated[
        list[str] | None,
        _option("NAME=VALUE", "An option of the device, such as port=8080.", False, names=["--device-option", "-d"]),
    ] = None,
) -> None:
    """Record episodes, or frames for a reward classifier. After a stop of any kind,
    the same command continues the recording."""
    _check_counts(classifier, keep, episodes, successes_needed)
    optional_module("gymnasium", "hilt record", "sim")
    from hilt.envs.task import make
    from hilt.recording.record import Settings
    from hilt.recording.record import record as run
    from hilt.teleop.devices import open_device

    options = {**option_values(option), **({} if image_size is None else {"image_size": image_size})}
    folder = out or Path("recordings") / (re.sub(r"\W+", "-", task).strip("-") + ("-frames" if classifier else ""))
    frames = (successes_needed or 200) if classifier else 0
    count = episodes or successes_needed or 20
    chosen = (split, _numbers(states), seed, mode, observations, disturb)
    settings = Settings(task, options, count, keep, frames, *chosen)
    env = _made(make, task, options, "-o")
    try:
        with _made(open_device, device, option_values(device_option), "-d") as opened:
            if opened.source == Source.HUMAN and "step_limit" not in options and hasattr(env.unwrapped, "give_time"):
                env.unwrapped.give_time(PERSONS_LIMIT)
            with Terminal(settings, opened) as watch, stop_signals(second_ends=True) as stopped:
                summary = run(
                    env, opened, folder, settings, watch=watch, stop=lambda: bool(stopped), videos=not no_video
                )
    finally:
        env.close()
    show_summary(summary, settings, device, watch.printed)
    if stopped:
        raise typer.Exit(128 + stopped[0])


def _check_counts(classifier: bool, keep: str, episodes: int | None, successes_needed: int | None) -> None:
    """Raises for options about the number of episodes or frames that contradict each other."""
    if classifier and episodes is not None:
        raise typer.BadParameter(
            "--classifier counts frames, not episodes: give --successes-needed instead of --episodes."
        )
    if classifier and keep != "successes":
        raise typer.BadParameter("--classifier keeps every episode with a mark and without: leave out --keep.")
    if not classifier and None not in (episodes, successes_needed):
        raise typer.BadParameter(
            "--successes-needed is another name of --episodes, but for --classifier: give one of them."
        )


class Terminal:
    """Shows a session: a line for each episode, and on a terminal what is going on now."""

    def __init__(self, settings: Settings, device: Device):
        self._settings, self._device, self._shown, self._rate = settings, device, (0.0, 0), 0.0
        self._open = contextlib.ExitStack()
        self._ending = False
        self.printed = 0
        """Notes that were shown"""

    def __enter__(self) -> Terminal:
        self._report = self._open.enter_context(PROGRESS.phases())
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def begin(self, s: RecordingSummary) -> None:
        if s.unfinished:
            PROGRESS.notify(
                f"{s.unfinished} unfinished episode{'s' * (s.unfinished > 1)} of a session that was killed: dropped"
            )
        for note in s.notes:
            PROGRESS.notify(note)
        self.printed = len(s.notes)
        if s.complete:
            option = "--successes-needed" if self._settings.successes_needed else "--episodes"
            PROGRESS.notify(f"{s.path} already has {s.have}: {option} {s.have + s.wanted} records {s.wanted} more")
            return
        PROGRESS.notify(f"recording into {s.path}: have {self._have(s)}")
        if url := getattr(self._device, "url", ""):
            PROGRESS.notify(f"open {url}")
        if self._device.name == "keyboard":
            PROGRESS.notify(keys())

    def step(self, s: RecordingSummary) -> None:
        if (passed := time.monotonic() - self._shown[0]) > 0.5:
            self._rate = (s.steps - self._shown[1]) / passed
            self._shown = time.monotonic(), s.steps
        now = f"step {s.step}, {self._rate:.1f} steps/s" if s.step else s.hint or "resetting"
        self._report("recording", s.have, s.wanted, f"episode {s.attempts}: {now}")

    def episode(self, recorded: Recorded, s: RecordingSummary) -> None:
        how = {True: "success", False: "no success", None: "success unknown"}[recorded.success]
        what = f"dropped: {recorded.dropped}" if recorded.dropped else f"{how}, power-safe"
        PROGRESS.notify(f"episode {s.attempts}: {_many(recorded.steps, 'step')}, {what}; have {self._have(s)}")

    def end(self, s: RecordingSummary) -> None:
        if not self._ending:
            self._ending = True
            PROGRESS.notify("finishing the videos" + (": Ctrl-C leaves them to the next session" if s.stopped else ""))
        self._report("finishing the videos", s.videos, s.episodes)

    def _have(self, s: RecordingSummary) -> str:
        return f"{s.have} of {s.wanted} {'frames marked' if self._settings.successes_needed else 'episodes'}"


def keys() -> str:
    """What the keys of a keyboard do."""
    from hilt.teleop.devices import KEYS

    meanings: dict[str, list[str]] = {}
    for key, meaning in KEYS.items():
        meanings.setdefault(meaning, []).append({" ": "space"}.get(key) or (key if len(key) > 1 else key.upper()))
    return (
        "keys: "
        + ", ".join(f"{' or '.join(names)} {meaning}" for meaning, names in meanings.items())
        + ("\n(a simulation is seen with --device browser)")
    )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def show_summary(s: RecordingSummary, settings: Settings, device: str, printed: int = 0) -> None:
    from rich.console import Console

    dropped = ", ".join(f"{count} {reason}" for reason, count in s.discarded.items())
    rows = [
        ["task", settings.task],
        ["in the log", f"{_many(s.episodes, 'episode')}, {s.successes} of them succeeded"],
        [
            "this session",
            f"{_many(s.attempts, 'episode')}, {_many(s.steps, 'step')}" + (f"; dropped: {dropped}" if dropped else ""),
        ],
        ["control rate", s.rate()],
        ["videos", f"{s.videos} in {s.path / 'videos'}" if s.videos else "none"],
        *[["", note] for note in s.notes[printed:]],
    ]
    Console().print(table("", "", rows=rows))
    if not s.complete:
        typer.echo(f"\nThere are {s.have} of {s.wanted}. The same command goes on.")
    if s.episodes:
        show_next(*next_commands(s.path, settings, device))


def next_commands(folder: Path, settings: Settings, device: str) -> list[str]:
    """What is done with a recording."""
    look = shell("hilt", "data", "inspect", folder)
    if settings.successes_needed:
        return [look, shell("hilt", "train", "classifier", folder, "--out", "classifier")]
    from hilt.recipes import recipe as named
    from hilt.recipes import recipe_of

    if settings.observations == "hil-serl":  # HIL-SERL itself cannot use nested observations
        train, format = ["hil-serl:MODULE:CONFIG"], "hil-serl"
    else:
        recipe, format = recipe_of(settings.task), "lerobot"
        train = [recipe] if recipe else ["RECIPE", f"task={settings.task}"]
        options = dict(settings.options)
        if recipe and "control_hz" in named(recipe).task_options and "control_hz" not in options:
            options["control_hz"] = _rate_of(folder)  # the recipe has another one than the task
        train += [f"task_options.{name}={json.dumps(value)}" for name, value in options.items()]
    operator = [f"operator={device}"] if device != "script" else []
    return [
        look,
        shell("hilt", "train", *train, "demonstrations=0", f"demo_path=[{folder}]", *operator),
        shell("hilt", "data", "convert", folder, folder / format, "--to", format),
    ]


def _rate_of(folder: Path) -> float:
    """The control rate of a recording, of its newest episode."""
    from hilt.replay import Log

    with Log.open(folder / "log", "r") as log:
        return float(log.facts.about(log.trajectories()[-1])["fps"])


def _made(maker: Callable[..., Any], name: str, options: dict[str, Any], flag: str) -> Any:
    try:
        return maker(name, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ConfigError(
            f"{name} cannot be made with the options {options}: {error}. Check what you gave with {flag}."
        ) from error


def _numbers(text: str) -> list[int]:
    """``0-9,15``"""
    out: list[int] = []
    for part in text.split(",") if text else []:
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise typer.BadParameter(f"--states {text!r}: expected numbers and ranges, such as 0-9,15.")
        out += range(int(match[1]), int(match[2] or match[1]) + 1)
    return out
