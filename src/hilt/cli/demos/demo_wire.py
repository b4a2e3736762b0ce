"""``hilt demo wire``: a learner and two actors, with keys, while processes are killed and paused before your eyes.

Run as a program it is one of the two roles: ``learner FOLDER PORT PORT`` or ``actor FOLDER PORT PORT NAME FIRST_EPISODE
STEPS``. An actor reports every step whose insert returned: ``step EPISODE TIME``.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hilt.cli.recorder import LENGTH, episode
from hilt.cli.show import PROGRESS
from hilt.core.children import ChildProcess, run_module
from hilt.core.files import temporary_folder
from hilt.core.progress import Report, silent
from hilt.core.tree import flatten
from hilt.replay import Log, QueuedDataStore, Schema
from hilt.wire import TrainerClient, TrainerServer, make_trainer_config
from hilt.wire.keys import new_keys

ACTORS = ("bench-1", "bench-2")
RATE_HZ = 100
STORE = "actor_env"
DEADLINE_S = 120.0


def wire(
    steps: Annotated[
        int, typer.Option("--steps", help="Transitions of each of the two actors, at 100 per second.", min=40)
    ] = 800,
) -> None:
    """A learner and two actors with keys; the learner is killed and paused, an
    actor is killed; then every pixel is compared."""
    with temporary_folder("hilt-demo-") as folder:
        with PROGRESS.phases() as report:
            story = WireStory(folder, steps, report)
            try:
                story.play()
            finally:
                story.end()
            story.check()
        if not story.show():
            raise typer.Exit(1)


class WireStory:
    """Who runs, what was inserted, and what came of it."""

    def __init__(self, folder: Path, steps: int, report: Report = silent):
        self._folder, self._steps, self._ports, self._report = folder, steps, _free_ports(), report
        self._running: dict[str, ChildProcess] = {}
        self._reporters: list[threading.Thread] = []
        self.inserted: dict[str, list[tuple[int, int]]] = {name: [] for name in ACTORS}
        self.finished: dict[str, str] = {}
        self.faults: Counter[str] = Counter()
        self.rows: list[tuple[Any, ...]] = []
        self.wrong: list[str] = []

    def play(self) -> None:
        """Starts everybody; at a quarter, a half and three quarters of the way something happens."""
        new_keys(self._folder / "keys", ["learner", *ACTORS])
        self._start("learner")
        for number, name in enumerate(ACTORS):
            self._start(name, str(1000 * (number + 1)), str(self._steps))
        _notify(
            f"two actors insert {RATE_HZ} steps a second each, with keys; the learner stores them "
            "and publishes weights ..."
        )
        self._await_steps(0.25)
        self._kill("learner")
        self._start("learner")
        self._await_steps(0.5)
        self._kill(ACTORS[0])
        done = len(self.inserted[ACTORS[0]])
        self._start(ACTORS[0], "1500", str(max(1, self._steps - done)))
        self._kill("learner")
        self._start("learner")
        self._await_steps(0.75)
        _notify("pausing the learner for a second ...")
        self._running["learner"].send_signal(signal.SIGSTOP)
        self.faults["learner paused"] += 1
        time.sleep(1)
        self._running["learner"].send_signal(signal.SIGCONT)
        self._await(lambda inserted: all(self._running[name].poll() is not None for name in ACTORS))
        _notify("comparing every pixel ...")
        self._running["learner"].terminate()
        self._running["learner"].end(DEADLINE_S)

    def end(self) -> None:
        for process in self._running.values():
            process.end()
            process.wait(DEADLINE_S)
        for reporter in self._reporters:
            reporter.join(DEADLINE_S)

    def check(self) -> None:
        """Every step whose insert returned must be in the log once, in order, with its pixels."""
        with Log.open(self._folder / "log", "r") as log:
            keys = log.all().keys()
            with log.reading() as steps:
                actors = [log.facts.origins()[int(origin)][0] for origin in steps.fields(keys, ["#origin"])[0]]
            batch = log.read(keys, ["episode", "time", "policy_version"])
            places = list(zip(batch["episode"].tolist(), batch["time"].tolist(), strict=True))
            different = 0
            for number, (key, place) in enumerate(zip(keys, places, strict=True)):
                self._report("comparing every pixel, steps", number, len(keys))
                different += not _same(log, int(key), place)
        for name in ACTORS:
            mine = [place for place, actor in zip(places, actors, strict=True) if actor == name]
            lost, twice = set(self.inserted[name]) - set(mine), len(mine) - len(set(mine))
            versions = {int(v) for v, actor in zip(batch["policy_version"], actors, strict=True) if actor == name}
            self.rows.append((name, f"{len(self.inserted[name]):,}", f"{len(mine):,}", len(lost), twice, len(versions)))
            self._expect(not lost, f"{name}: {len(lost)} steps whose insert returned are not there")
            self._expect(not twice, f"{name}: {twice} steps are there twice")
            self._expect(mine == sorted(mine), f"{name}: steps are out of order")
            self._expect(self.finished.get(name) == "all acknowledged", f"{name} ended with: {self.finished.get(name)}")
        self._expect(not different, f"{different} steps have other pixels than were recorded")

    def show(self) -> bool:
        from rich.console import Console

        from hilt.cli.show import table

        headers = ("actor", "inserted", "in the log", "lost", "twice", "policy versions")
        Console().print(
            table(
                *headers, rows=self.rows, title=f"hilt demo wire, {self._steps:,} transitions each", right=range(1, 6)
            )
        )
        typer.echo(f"On the way: {', '.join(f'{what} {count}×' for what, count in self.faults.items())}.")
        if self.wrong:
            typer.echo(f"WRONG: {'; '.join(self.wrong)}.")
        else:
            typer.echo(
                "All is right: every step arrived exactly once, in order, and every pixel is the one that was recorded."
            )
        return not self.wrong

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    def _start(self, name: str, *more: str) -> None:
        role = ["learner"] if name == "learner" else ["actor"]
        command = run_module("hilt.cli.demos.demo_wire", *role, str(self._folder), *map(str, self._ports))
        command += [] if name == "learner" else [name, *more]
        process = ChildProcess(command, leaves_signals=False, stdout=subprocess.PIPE, text=True)
        self._running[name] = process
        reporter = threading.Thread(target=self._hear, args=(name, process), daemon=True)
        self._reporters.append(reporter)
        reporter.start()

    def _hear(self, name: str, process: ChildProcess) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if not line.endswith("\n"):
                break  # cut off by the kill: it was not acknowledged
            if word == "step":
                number, t = map(int, rest.split())
                self.inserted[name].append((number, t))
            elif word == "end":
                self.finished[name] = rest

    def _kill(self, name: str) -> None:
        _notify(f"killing {name} with SIGKILL, and starting it again ...")
        self._running[name].end()
        self.faults[f"{'learner' if name == 'learner' else 'actor'} killed"] += 1

    def _await_steps(self, share: float) -> None:
        self._await(lambda inserted: inserted >= share * self._steps * len(ACTORS))

    def _await(self, reached: Callable[[int], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not reached(inserted := sum(map(len, self.inserted.values()))):
            self._report("inserting steps", inserted, self._steps * len(ACTORS))
            if time.monotonic() > until or any(self._running[name].poll() not in (None, 0) for name in ACTORS):
                raise typer.BadParameter("the actors came to a halt; their errors are above.")
            time.sleep(0.02)


def learner(folder: Path, ports: tuple[int, int]) -> None:
    """Serves actors and publishes weights until it receives a signal."""
    # no threading.Event: the thread that the signal interrupts may hold its lock, and would wait for itself
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    schema = Schema.of(_step(0, 0))
    log = (
        Log.open(folder / "log")
        if (folder / "log").exists()
        else Log.create(folder / "log", schema, durability="at most 10 ms")
    )
    with log, TrainerServer(_config(folder, ports, "learner"), log_level=logging.ERROR) as server:
        server.register_data_store(STORE, log)
        server.start(threaded=True)
        while not ended:
            server.publish_network({"policy": np.zeros(10_000, np.float32)})
            time.sleep(0.1)


def actor(folder: Path, ports: tuple[int, int], name: str, first: int, steps: int) -> None:
    """Inserts at its rate, whatever the learner does, and reports what was inserted."""
    spool = QueuedDataStore(1000, path=folder / f"spool-{name}")
    config = _config(folder, ports, name)
    client = TrainerClient(
        name, "127.0.0.1", config, data_stores={STORE: spool}, log_level=logging.ERROR, wait_for_server=DEADLINE_S
    )
    client.recv_network_callback(lambda weights: None)
    for number, t in _places(first, steps):
        spool.insert(_step(number, t))
        os.write(sys.stdout.fileno(), f"step {number} {t}\n".encode())
        time.sleep(1 / RATE_HZ)
    done = client.update(timeout_ms=1000 * DEADLINE_S / 2)
    print(f"end {'all acknowledged' if done else done.problem}", flush=True)
    client.stop()


def _notify(text: str) -> None:
    PROGRESS.notify(text, err=True)


def _config(folder: Path, ports: tuple[int, int], name: str) -> Any:
    return make_trainer_config(*ports, keys=str(folder / "keys"), key_name=name, bind_ip="127.0.0.1")


def _step(number: int, t: int) -> dict[str, Any]:
    step = episode(number).step(t)
    del step["policy_version"]  # the client knows which weights act
    return step


def _places(first: int, steps: int) -> Iterator[tuple[int, int]]:
    return ((first + i // LENGTH, i % LENGTH) for i in range(steps))


def _same(log: Log, key: int, place: tuple[int, int]) -> bool:
    stored = flatten(log.read([key]))
    return all(np.array_equal(stored[path][0], value) for path, value in flatten(_step(*place)).items())


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


if __name__ == "__main__":
    role, folder, *rest = sys.argv[1:]
    ports = int(rest[0]), int(rest[1])
    if role == "learner":
        learner(Path(folder), ports)
    else:
        actor(Path(folder), ports, rest[2], int(rest[3]), int(rest[4]))
