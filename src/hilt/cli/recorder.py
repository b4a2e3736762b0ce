"""The robot of ``hilt demo store``: a world that can be recomputed, and the process that records it and gets killed.

Every pixel follows from an episode's number and the time in it, so that whatever comes back out of a log can be
compared with what must have gone in. Run as a program it records steps and reports each one when the log has promised
it: ``step EPISODE TIME``, ``fact EPISODE``, and at the end ``done STEPS SECONDS``, the time spent in the log.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.replay import Log, Schema

LENGTH = 100
"""Steps of an episode."""
SIZE = 128
"""Height and width of both pictures."""
_BLOB, _WORLD = 27, 320


@dataclass(frozen=True)
class SimulatedEpisode:
    """One episode: a hand that an action moves over a table, toward a goal."""

    number: int
    actions: Array  # [LENGTH, 2]
    places: Array  # [LENGTH + 1, 2] in 0..1
    table: Array  # [SIZE, SIZE, 3] the front camera's picture without the hand

    @property
    def success(self) -> bool:
        return self.number % 3 != 0

    def front(self, t: int) -> Array:
        """A camera that looks at the whole table: the hand moves through the picture."""
        picture = self.table.copy()
        y, x = (self.places[t] * (SIZE - _BLOB)).astype(int)
        shape, color = _hand()
        picture[y : y + _BLOB, x : x + _BLOB][shape] = color
        return picture

    def wrist(self, t: int) -> Array:
        """A camera on the hand: the table moves through the picture."""
        y, x = (self.places[t] * (_WORLD - SIZE)).astype(int)
        picture = _world()[y : y + SIZE, x : x + SIZE].copy()
        picture[:, 61:67] //= 2
        picture[100:, 40:88] = (60, 62, 70)
        picture[:4, :4] = self.number % 251, t, 255
        return picture

    def observation(self, t: int) -> dict[str, Array]:
        return {"front": self.front(t), "wrist": self.wrist(t), "place": self.places[t]}

    def source(self, t: int) -> Source:
        """The first two episodes are random; in every second one after them a person takes over for a while."""
        if self.number < 2:
            return Source.RANDOM
        return Source.HUMAN if self.number % 2 == 0 and 40 <= t < 60 else Source.POLICY

    def reward(self, t: int) -> np.float32:
        return np.float32(1.0 if self.success and t == LENGTH - 1 else -0.01 * float(np.abs(self.actions[t]).sum()))

    def step(self, t: int, before: dict[str, Array] | None = None) -> dict[str, Any]:
        """Everything a log stores of the step at time t."""
        return {
            "observations": before or self.observation(t),
            "actions": self.actions[t],
            "rewards": self.reward(t),
            "next_observations": self.observation(t + 1),
            "terminated": np.bool_(self.success and t == LENGTH - 1),
            "truncated": np.bool_(not self.success and t == LENGTH - 1),
            "source": np.uint8(self.source(t)),
            "policy_version": np.int64(self.number // 10 if self.source(t) is Source.POLICY else -1),
            "episode": np.int32(self.number),
            "time": np.int32(t),
        }


@lru_cache(maxsize=256)
def episode(number: int) -> SimulatedEpisode:
    generator = np.random.default_rng(number)
    pushes = generator.normal(size=(LENGTH, 2))
    actions = np.clip(0.25 * np.cumsum(pushes, axis=0) / np.sqrt(1 + np.arange(LENGTH))[:, None] + 0.6 * pushes, -1, 1)
    path = np.vstack([generator.random((1, 2)), 0.05 * actions]).cumsum(axis=0)
    places = np.abs((path + 1) % 2 - 1)  # reflected at the table's edges
    ramp = np.linspace(0, 60, SIZE)
    table = np.empty((SIZE, SIZE, 3), np.uint8)
    for channel, base in enumerate(generator.integers(110, 190, 3)):
        table[..., channel] = base + ramp[:, None] * (0.2 + 0.3 * channel) - ramp[None, :] * 0.4
    table[::16, :] -= 18
    table[:, ::16] -= 18
    y, x = generator.integers(8, SIZE - 28, 2)
    table[y : y + 20, x : x + 20] = (40, 150, 90)
    table[y + 4 : y + 16, x + 4 : x + 16] = (225, 240, 230)
    return SimulatedEpisode(number, actions.astype(np.float32), places.astype(np.float32), table)


@lru_cache(maxsize=1)
def _hand() -> tuple[Array, Array]:
    """The hand's shape and the colors of its points."""
    y, x = np.mgrid[:_BLOB, :_BLOB] - _BLOB // 2
    radius = np.hypot(y, x)
    shape = radius <= _BLOB // 2
    shade = (1 - radius / _BLOB)[..., None] * (235, 88, 52)
    return shape, shade[shape].astype(np.uint8)


@lru_cache(maxsize=1)
def _world() -> Array:
    """The table as the wrist sees it: large, with a pattern that is nowhere the same."""
    y, x = np.mgrid[:_WORLD, :_WORLD]
    waves = [np.sin(y / 17 + x / 53), np.sin(x / 13 - y / 71), np.sin((x + y) / 29)]
    picture = np.stack([base + 22 * wave for base, wave in zip((176, 158, 132), waves, strict=True)], axis=-1)
    picture[(y // 20 + x // 20) % 2 == 0] += 24
    return picture.astype(np.uint8)


def create(folder: Path) -> Log:
    return Log.create(folder, Schema.of(episode(0).step(0)), durability="every episode")


def record(folder: Path, first: int, steps: int) -> None:
    """Records episodes from number `first` on, with this number of steps in total,
    and reports the acknowledged steps."""
    spent, sequence = 0.0, 0
    with create(folder) if not (folder / "log.json").exists() else Log.open(folder) as log:
        for number in range(first, first + -(-steps // LENGTH)):
            made, before = episode(number), None
            with log.episode(actor="demo-robot", boot=str(first)) as running:
                for t in range(min(LENGTH, steps - sequence)):
                    step = made.step(t, before)
                    before = step["next_observations"]
                    started = time.perf_counter()
                    running.append(step, sequence=sequence)
                    spent += time.perf_counter() - started
                    sequence += 1
                    _report(f"step {number} {t}")
            if running.steps == LENGTH:
                log.annotate(running.trajectory, success=made.success, episode=number)
                _report(f"fact {number}")
    _report(f"done {sequence} {spent:.6f}")


def _report(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # one system call: a line is reported whole or not at all


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
