"""``hilt demo store``: an experience log records, is killed, recovers, is sampled and verified, before your eyes."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hilt.cli.recorder import episode
from hilt.cli.show import human_bytes, progress_bar, table
from hilt.core.children import ChildProcess, run_module
from hilt.core.errors import DeadlineError, DiskFullError, HiltError
from hilt.core.trajectory import Source
from hilt.core.tree import Array, flatten
from hilt.replay import Batch, Log, Mix
from hilt.replay.maintenance.repair import verify

BATCH = 256
BATCHES = 12
"""Batches of each kind that are drawn and compared."""
STEP_BYTES = 110_000
N_STEP, DISCOUNT = 5, 0.97
SILENCE_SECONDS = 60.0
"""Seconds of silence after which a recording process counts as failed."""


def store(
    steps: Annotated[
        int, typer.Option("--steps", help="Transitions to record, two pictures of 128 × 128 each.", min=4)
    ] = 20_000,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to make the log.", show_default="a temporary folder")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the log.")] = False,
) -> None:
    """Record transitions with images, get killed half-way, recover, go on, sample, and check everything."""
    with _workplace(folder, steps, keep) as log:
        story = StoreStory(log, steps)
        story.record_and_kill()
        story.recover()
        story.go_on()
        story.sample()
        story.check_bytes()
        story.show()
        if story.wrong:
            raise typer.Exit(1)


@dataclass
class StoreStory:
    """What happened, and what was wrong about it."""

    folder: Path
    steps: int
    promised: set[tuple[int, int]] = field(default_factory=set)
    """(episode, time) of every step whose append returned."""
    facts: set[int] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _next_episode: int = 0
    _left: int = 0
    _speed: float = 0.0
    """Steps per second, as the recorder that reached its end measured them."""

    def record_and_kill(self) -> None:
        """Records until about half-way, then sends SIGKILL at a random moment."""
        chance = random.SystemRandom()
        enough = int(self.steps * chance.uniform(0.4, 0.6))
        with (
            progress_bar("recording, until it is killed", announce=True) as progress,
            RecorderProcess(self.folder, 0, self.steps) as recorder,
        ):
            for line in recorder.lines():
                self._hear(line)
                progress(len(self.promised), self.steps)
                if len(self.promised) >= enough:
                    break
            time.sleep(chance.uniform(0, 0.01))
            recorder.kill()
            for line in recorder.lines():
                self._hear(line)
        number, t = max(self.promised)
        self.values["killed at"] = (
            "its end: it was quicker than the kill" if self._speed else f"episode {number}, step {t}, with SIGKILL"
        )
        self.values["promised before the kill"] = f"{len(self.promised):,} steps"

    def recover(self) -> None:
        """Opens the log as the next writer does, and looks for everything that was promised."""
        with Log.open(self.folder) as log:
            recovery = log.recovery
            found = _places(log)
            facts = {log.facts.about(t).get("episode") for t in log.trajectories()}
        self._left = self.steps - len(found)
        self._next_episode = 1 + max(number for number, _ in found)
        self.values["found after"] = f"{len(found):,} steps"
        self.values["torn, cut"] = f"{recovery.torn_steps:,} steps that were not acknowledged"
        self.values["recovered in"] = f"{recovery.seconds:.2f} s"
        self._expect(not self.promised - set(found), f"{len(self.promised - set(found))} promised steps are gone")
        self._expect(not self.facts - facts, f"{len(self.facts - facts)} promised facts are gone")
        self._expect(recovery.corrupt_steps == 0, f"{recovery.corrupt_steps} steps are damaged")

    def go_on(self) -> None:
        """The rest, by a second process; then everything must be there once."""
        if self._left:
            rest = RecorderProcess(self.folder, self._next_episode, self._left)
            with progress_bar("going on to the end", announce=True) as progress, rest as recorder:
                for line in recorder.lines():
                    self._hear(line)
                    progress(min(len(self.promised), self.steps), self.steps)
        with Log.open(self.folder, "r") as log:
            places, size = _places(log), log.stats()["bytes"]
        self.values = {"recorded": f"{len(places):,} steps", **self.values}
        lost, doubled = len(self.promised - set(places)), len(places) - len(set(places))
        self.values["lost"] = f"{lost:,} steps"
        self.values["duplicated"] = f"{doubled:,} steps"
        self.values["inserted"] = (
            f"{self._speed:,.0f} steps/s, one by one (process-safe; power-safe at each episode's end)"
        )
        self.values["on disk"] = f"{size / max(1, len(places)):,.0f} bytes per transition, {human_bytes(size)} in all"
        self._expect(not lost, f"{lost} promised steps are gone")
        self._expect(not doubled, f"{doubled} steps are there twice")
        self._expect(len(places) == self.steps, f"{len(places)} steps are there, not {self.steps}")

    def sample(self) -> None:
        """Draws batches in four ways and compares every field of every element with what must have gone in."""
        with (
            Log.open(self.folder, "r") as log,
            progress_bar("sampling and comparing every pixel", announce=True) as progress,
        ):
            lengths = _lengths(_places(log))
            human, policy = log.by_source("human"), log.by_source("policy", "random")
            mixed = Mix({"policy": policy.sampler(seed=1), "human": human.sampler(seed=2)}) if len(human) else None
            kinds: dict[str, Any] = {"uniform": log.all().sampler(seed=0)}
            if mixed is not None:
                kinds |= {"human": human.sampler(seed=3), "mix 50/50": mixed}
            kinds["n-step"] = log.all().sampler(seed=4, n_step=N_STEP, discount=DISCOUNT)
            done = 0
            for kind, sampler in kinds.items():
                seconds = size = 0.0
                for _ in range(BATCHES):
                    started = time.perf_counter()
                    batch = sampler.sample(BATCH)
                    seconds += time.perf_counter() - started
                    size += sum(leaf.nbytes for leaf in flatten(batch).values())
                    self._compare(kind, batch, lengths)
                    done += 1
                    progress(done, BATCHES * len(kinds))
                speed = f"{BATCHES / seconds:,.1f} batches/s, {size / seconds / 1e6:,.0f} MB/s"
                self.values[f"sampled, {kind}"] = f"{speed} ({BATCHES} × {BATCH}, every pixel compared)"

    def check_bytes(self) -> None:
        with progress_bar("verifying all checksums", announce=True) as progress:
            report = verify(self.folder, progress)
        self._expect(report.ok, f"verify: {'; '.join(map(str, report.of('damage')[:3]))}")
        whole = f"{report.steps:,} steps and {report.frames:,} frames are whole"
        self.values["verified"] = f"{whole}, {human_bytes(report.bytes)} in {report.seconds:.1f} s"

    def show(self) -> None:
        from rich.console import Console

        Console().print(
            table("what", "value", rows=list(self.values.items()), title=f"hilt demo store, {self.steps:,} transitions")
        )
        if self.wrong:
            typer.echo(f"WRONG: {'; '.join(self.wrong)}.")
        else:
            typer.echo(
                "All is right: nothing promised was lost, nothing is there twice, and every pixel is "
                "the one that was recorded."
            )

    # Inside

    def _hear(self, line: str) -> None:
        """Takes in one report of a recorder."""
        word, *numbers = line.split()
        if word == "step":
            self.promised.add((int(numbers[0]), int(numbers[1])))
        elif word == "fact":
            self.facts.add(int(numbers[0]))
        elif word == "done":
            self._speed = int(numbers[0]) / float(numbers[1])

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds and otherwise not in self.wrong:
            self.wrong.append(otherwise)

    def _compare(self, kind: str, batch: Batch, lengths: Mapping[int, int]) -> None:
        leaves = flatten(batch)
        for i in range(BATCH):
            number, t = int(leaves["episode"][i]), int(leaves["time"][i])
            wanted = expected(number, t, lengths[number], kind)
            for path, value in flatten(wanted).items():
                if not np.array_equal(leaves[path][i], value):
                    self._expect(False, f"{kind}: {path} of episode {number}, step {t} is not what was recorded")
        if kind == "mix 50/50":
            self._expect(batch.counts == {"policy": BATCH // 2, "human": BATCH // 2}, f"the mix gave {batch.counts}")
        people = leaves["source"][BATCH // 2 :] if kind == "mix 50/50" else leaves["source"] if kind == "human" else []
        self._expect(all(source == Source.HUMAN for source in people), f"{kind}: a step that no human made")


def expected(number: int, t: int, length: int, kind: str) -> dict[str, Any]:
    """A step as the generator makes it; for n-step, the sum over the steps that follow as far as they were recorded."""
    made = episode(number)
    step = made.step(t)
    if kind != "n-step":
        return step
    taken = min(N_STEP, length - t)
    last = made.step(t + taken - 1)
    rewards = sum(np.float64(made.reward(t + i)) * DISCOUNT**i for i in range(taken))
    ends = {name: last[name] for name in ("next_observations", "terminated", "truncated")}
    discount = np.float32(0.0 if last["terminated"] else DISCOUNT**taken)
    return {**step, **ends, "rewards": np.float32(rewards), "discounts": discount, "n_steps": np.int64(taken)}


class RecorderProcess:
    """The recording process, and what it reports."""

    def __init__(self, folder: Path, first: int, steps: int):
        command = run_module("hilt.cli.recorder", str(folder), str(first), str(steps))
        self._process = ChildProcess(command, leaves_signals=False, stdout=subprocess.PIPE)
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """The lines of its output, until it ends. A last line that was cut off is left out."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            line, ended, rest = self._rest.partition(b"\n")
            if ended:
                self._rest = rest  # before the yield: the caller may stop there and ask again later
                yield line.decode()
                continue
            ready, _, _ = select.select([pipe], [], [], SILENCE_SECONDS)
            if not ready:
                raise DeadlineError(f"the recording process reported nothing for {SILENCE_SECONDS:.0f} s.")
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            self._rest += data
        if self._process.wait(SILENCE_SECONDS) not in (0, -signal.SIGKILL):
            raise HiltError(
                f"the recording process ended with exit code {self._process.returncode}; its error is above."
            )

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def __enter__(self) -> RecorderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def _workplace(folder: Path | None, steps: int, keep: bool) -> Iterator[Path]:
    """A folder for the log, removed at the end unless it is to be kept or something was wrong."""
    parent = folder if folder is not None else Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(parent).free, steps * STEP_BYTES
    if free < needed:
        room = f"{steps:,} steps need {human_bytes(needed)}, {human_bytes(free)} are free"
        raise DiskFullError(f"{parent}: {room}; give --steps or --folder.")
    place = Path(tempfile.mkdtemp(prefix="hilt-demo-", dir=parent))
    log = place / "log"
    try:
        yield log
    except typer.Exit:
        keep = True
        raise
    finally:
        if keep:
            typer.echo(f"The log is in {log}. Look into it with: hilt data inspect {log}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def _places(log: Log) -> list[tuple[int, int]]:
    """(episode, time) of every step of the log."""
    keys: Array = log.all().keys()
    batch = log.read(keys, ["episode", "time"])
    return list(zip(batch["episode"].tolist(), batch["time"].tolist(), strict=True))


def _lengths(places: list[tuple[int, int]]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for number, t in places:
        lengths[number] = max(lengths.get(number, 0), t + 1)
    return lengths
