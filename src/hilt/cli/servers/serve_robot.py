"""``hilt serve-robot``: put an arm, real or simulated, behind HIL-SERL's HTTP routes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from hilt.cli.show import shell, show_next
from hilt.core.errors import ConfigError, RequestError

app = typer.Typer(add_completion=False)


@app.command()
def serve_robot(
    backend: Annotated[
        str, typer.Option("--backend", help="tabletop, or an arm of your own by name or module:Class.")
    ] = "tabletop",
    host: Annotated[
        str, typer.Option("--host", help="Address to serve at; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port of the first arm; a second arm has the next one.", min=0, max=65534)
    ] = 5000,
    task: Annotated[
        str | None, typer.Option("--task", help="The tabletop task to serve, for example pick.", show_default="pick")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An argument of the backend's class.")
    ] = None,
    tokens: Annotated[
        list[Path] | None,
        typer.Option(
            "--token", metavar="FILE", help="A token that lets its holder in; the file's name is the holder's."
        ),
    ] = None,
    max_speed: Annotated[
        float, typer.Option("--max-speed", help="Meters per second, of the commanded tool point.")
    ] = 0.6,
    max_turn: Annotated[float, typer.Option("--max-turn", help="Radians per second.")] = 3.0,
    max_jerk: Annotated[float, typer.Option("--max-jerk", help="Change of its acceleration, m/s³.")] = 1000.0,
    max_turn_jerk: Annotated[float, typer.Option("--max-turn-jerk", help="The same in rad/s³.")] = 5000.0,
    heartbeat: Annotated[
        float, typer.Option("--heartbeat", help="Seconds of silence after which the arm holds where it is.")
    ] = 0.3,
    rate: Annotated[float, typer.Option("--rate", help="Ticks of the control loop per second.")] = 100.0,
) -> None:
    """Serve an arm over HTTP as HIL-SERL's franka_server does, with limits on pose, speed and jerk,
    a heartbeat, and one controller at a time."""
    from hilt.robot.control import ArmLimits
    from hilt.robot.robot_server import RobotServer

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = backend_options(task, settings or [])
    limits = ArmLimits(max_speed, max_turn, max_jerk, max_turn_jerk, heartbeat, rate)
    server = RobotServer(backend, options, host=host, port=port, tokens=tokens or [], limits=limits)

    def show() -> None:
        for arm, url in enumerate(server.urls):
            typer.echo(f"arm {arm} ({backend}) at {url}")
        priority = (
            "with real-time priority"
            if server.control.hello["realtime"]
            else "without real-time priority (root may have it)"
        )
        typer.echo(f"control at {rate:g} Hz {priority}; holds after {heartbeat:g} s of silence. Ctrl-C ends.")
        show_next(*next_commands(server.urls, backend == "tabletop", bool(tokens)))

    asyncio.run(server.serve(show, (signal.SIGINT, signal.SIGTERM)))
    if server.control.failure is not None:
        raise RequestError(f"the control process had ended: {server.control.failure.strip().splitlines()[-1]}")


def backend_options(task: str | None, settings: Sequence[str]) -> dict[str, str]:
    """What the backend's class is made with."""
    options = {"task": task} if task is not None else {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name in options:
            raise ConfigError(f"--set {setting!r}: expected NAME=VALUE, once for each name.")
        options[name] = value
    return options


def next_commands(urls: Sequence[str], simulated: bool, tokens: bool) -> list[str]:
    """Commands that drive these arms from another terminal."""
    arms = ",".join(urlsplit(url).netloc for url in urls)
    options = ["-o", 'cameras=["front", "wrist"]'] * simulated + ["-o", "token_file=FILE"] * tokens
    return [shell("hilt", "record", f"robot/{arms}", "--device", "browser", *options)]
