"""Videos of recorded episodes: all cameras side by side, a bar in the color of who
acted, the step, the reward and how it ended.

They are made by a process of their own that reads the log, so the control loop never compresses an image.
Run as a program, ``python -m hilt.recording.film LOG VIDEOS HZ`` makes a video of each trajectory whose
number it reads, and prints what it could not make.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hilt.core.children import ChildProcess, run_module
from hilt.core.errors import ConfigError, HiltError, MissingPackageError
from hilt.core.files import DISK, leftovers, replacing
from hilt.core.signals import leave_to_parent
from hilt.core.trajectory import Source
from hilt.core.tree import Array, flatten
from hilt.formats.video import VideoWriter
from hilt.replay import Log

COLORS = {
    Source.POLICY: (120, 124, 132),
    Source.HUMAN: (232, 119, 34),
    Source.DEMO: (52, 120, 210),
    Source.RANDOM: (150, 80, 180),
}
PAPER, INK, GREEN, RED = (24, 26, 30), (235, 235, 230), (60, 170, 90), (200, 60, 50)
HEIGHT, BAR, CAPTION, GAP = 240, 8, 44, 4
"""In pixels: cameras are shown at least so high; the bar, the two lines of text, and what lies between cameras"""
LAST_SECONDS = 1.0
"""So long the end is shown"""
DEADLINE_S, POLL_INTERVAL_S = 120.0, 0.5
"""Seconds to wait for the last videos, and seconds between two counts of them"""


class Filmer:
    """The process that makes videos of a log, and the numbers of those it is asked for."""

    def __init__(self, log: Log, folder: Path, hz: float):
        for module, package in (("av", "av"), ("PIL", "pillow")):
            if importlib.util.find_spec(module) is None:
                raise MissingPackageError(package, "A video of each episode", "formats")
        if not cameras(log):
            raise ConfigError("the observations have no images.")
        DISK.make_folders(folder)
        for rest in leftovers(folder):
            DISK.remove(rest)
        self._folder = folder
        self.notes: list[str] = []
        self.made = 0
        """Videos that were there when it was closed"""
        command = run_module("hilt.recording.film", str(log.path), str(folder), str(hz))
        self._process = ChildProcess(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for trajectory in log.trajectories():  # those that an earlier session did not get
            if not video_of(folder, trajectory).exists():
                self.ask(trajectory)

    def ask(self, trajectory: int) -> None:
        """Returns at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `close` finds that it is missing
            self._process.stdin.write(f"{trajectory}\n")
            self._process.stdin.flush()

    def close(
        self, trajectories: list[int], wait: bool = True, watch: Callable[[int], None] = lambda made: None
    ) -> None:
        """Waits for the videos that were asked for, ends the process, and counts what there is of
        these trajectories. `watch` is called with
        again and again how many there are."""
        if not wait:
            self._process.kill()
        end, output = time.monotonic() + DEADLINE_S, None
        try:
            while output is None and (left := end - time.monotonic()) > 0:
                watch(self._count(trajectories))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output = self._process.communicate(timeout=min(left, POLL_INTERVAL_S))[0]
            self.notes += [f"videos were not done after {DEADLINE_S:.0f} s"] if output is None else output.splitlines()
        finally:
            self._process.end()
        self.made = self._count(trajectories)
        if missing := len(trajectories) - self.made:
            self.notes.append(
                f"{missing} video{'s are' if missing != 1 else ' is'} missing; the same command makes what is missing"
            )

    def _count(self, trajectories: list[int]) -> int:
        return sum(video_of(self._folder, trajectory).exists() for trajectory in trajectories)


def video_of(folder: Path, trajectory: int) -> Path:
    return folder / f"episode-{trajectory:06d}.mp4"


def cameras(log: Log) -> list[str]:
    """The columns that are images: uint8, ``[height, width, 3]``, or a stack of such."""
    found = {
        name: spec
        for name, spec in log.schema.columns.items()
        if name.startswith("observations") and spec.dtype == np.uint8
    }
    return [name for name, spec in found.items() if len(spec.shape) in (3, 4) and spec.shape[-1] == 3]


def film(log: Log, trajectory: int, path: Path, hz: float) -> None:
    """Makes one video; the file is whole or absent."""
    with replacing(path, sole_writer=True) as place:
        writer = None
        for frame in frames(log, trajectory, hz):
            writer = writer or VideoWriter(place, hz, frame.shape[0], frame.shape[1], "h264")
            writer.add(frame[None])
        if writer is not None:
            writer.close()


def frames(log: Log, trajectory: int, hz: float) -> Iterator[Array]:
    """The pictures of an episode: what was seen before each action, and at last what came of the last one."""
    names, keys, facts = cameras(log), log.trajectory_keys(trajectory), log.facts.about(trajectory)
    small = log.read(keys, [name for name in ("source", "rewards", "labels") if name in log.schema.columns])
    words = str(facts.get("language_instruction", ""))
    for step, key in enumerate(keys):
        seen = flatten(log.read([key], names))
        source = Source(int(small["source"][step]))
        marked = "labels" in small and small["labels"][step] > 0
        text = f"step {step + 1} of {len(keys)}   {source.name.lower()}   reward {small['rewards'][step]:.2f}"
        yield picture(
            [seen[name][0] for name in names], COLORS[source], [words, text], ("marked", GREEN) if marked else None
        )
    after = flatten(log.read(keys[-1:], [f"next_{name}" for name in names]))
    end = picture(
        [after[f"next_{name}"][0] for name in names],
        COLORS[source],
        [words, f"after {len(keys)} steps   reward {small['rewards'].sum():.2f} in all"],
        {True: ("SUCCESS", GREEN), False: ("no success", RED), None: None}[facts.get("success")],
    )
    yield from [end] * max(1, round(hz * LAST_SECONDS))


def picture(
    images: list[Array], color: tuple[int, int, int], lines: list[str], mark: tuple[str, tuple[int, int, int]] | None
) -> Array:
    """One frame of the video, of even height and width, as its encoder wants them."""
    from PIL import Image, ImageDraw, ImageFont

    newest = [image[-1] if image.ndim == 4 else image for image in images]
    large = [
        np.repeat(np.repeat(image, factor, 0), factor, 1)
        for image in newest
        for factor in [-(-HEIGHT // image.shape[0])]
    ]
    height, width = max(image.shape[0] for image in large), sum(image.shape[1] + GAP for image in large) - GAP
    out = np.full((BAR + height + CAPTION + height % 2, width + width % 2, 3), PAPER, np.uint8)
    out[:BAR] = color
    left = 0
    for image in large:
        out[BAR : BAR + image.shape[0], left : left + image.shape[1]] = image
        left += image.shape[1] + GAP
    canvas = Image.fromarray(out)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(14)
    for number, line in enumerate(lines):
        draw.text((6, BAR + height + 3 + 20 * number), line, INK, font)
    if mark is not None:
        word, shade = mark
        long = draw.textlength(word, font) + 12
        draw.rectangle((width - long, BAR + height + 22, width, BAR + height + CAPTION), shade)
        draw.text((width - long + 6, BAR + height + 23), word, INK, font)
    return np.asarray(canvas)


def main(log_path: str, folder: str, hz: str) -> None:
    """Makes videos until there is nothing more to read, or the parent process is gone."""
    leave_to_parent()
    os.nice(10)  # the control of an arm has priority
    parent = os.getppid()
    for line in sys.stdin:
        if os.getppid() != parent:
            return
        try:
            with Log.open(log_path, "r") as log:
                film(log, int(line), video_of(Path(folder), int(line)), float(hz))
        except (HiltError, OSError, ValueError, RuntimeError) as error:
            # an encoder's too: one video must not cost the others
            sys.stdout.write(f"no video of trajectory {int(line)}: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
