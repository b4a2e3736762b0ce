"""Our side of the formats: what reads RLDS, what makes a log of it, and the bare
decoders; each a process of its own."""

from __future__ import annotations

import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from bench.lab import remove, resident
from bench.sides import serve
from hilt.core.tree import flatten
from hilt.formats.convert import convert
from hilt.formats.rlds import push_rlds_to_reverb
from hilt.formats.tensorflow_files.example import decode
from hilt.formats.tensorflow_files.tfds import open_dataset
from hilt.formats.tensorflow_files.tfrecord import RecordFile
from hilt.replay.log import Log
from hilt.replay.schema import Schema

CORES = 2


def two_cores() -> None:
    """Every contender has the same two cores for all its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


class Reader:
    def __init__(self) -> None:
        two_cores()

    def read(self, path: str) -> dict[str, float]:
        """Every episode of a folder, decoded; nothing of it is kept. `check` is a sum over all pixels."""
        start, steps, check = time.perf_counter(), 0, 0
        for episode in open_dataset(Path(path)).rlds(CORES):
            steps += len(episode["steps"])
            check += sum(
                int(column.ravel()[::4099].sum())
                for column in flatten(episode["steps"].columns).values()
                if column.dtype == np.uint8
            )
        return {"seconds": time.perf_counter() - start, "steps": steps, "check": check}

    def peak(self, path: str) -> float:
        """Bytes by which reading a folder raises this process's memory, at the most."""
        before = resident()["RssAnon"]
        most = before
        for _ in open_dataset(Path(path)).rlds(CORES):
            most = max(most, resident()["RssAnon"])
        return most - before


class Logger:
    def __init__(self) -> None:
        two_cores()

    def convert(self, path: str, target: str) -> dict[str, float]:
        """A folder as a new log, complete and synced."""
        start = time.perf_counter()
        summary = convert(path, target, workers=CORES)
        seconds = time.perf_counter() - start
        remove(Path(target))
        # an episode of N steps is N - 1 transitions
        return {"seconds": seconds, "steps": summary.steps + summary.episodes}

    def push(self, path: str, target: str) -> dict[str, float]:
        """The same through the function that TF-Agents has."""
        start = time.perf_counter()
        dataset = open_dataset(Path(path))
        first = next(iter(dataset))
        with Log.create(target, Schema.of(first.columns, leading=1)) as log:
            steps = push_rlds_to_reverb(dataset, log)
        seconds = time.perf_counter() - start
        remove(Path(target))
        return {"seconds": seconds, "steps": steps}


class Decoder:
    """The decoders by themselves: images in memory, two threads, an array for each episode."""

    def start(self, path: str) -> None:
        two_cores()
        self._episodes: list[list[bytes]] = []
        for file in sorted(Path(path).glob("*.tfrecord-*")):
            records = RecordFile(file)
            for place in records.places():
                self._episodes.append([bytes(image) for image in decode(records.read(*place))["steps/observation"]])  # type: ignore[arg-type]
        self._shape = np.asarray(Image.open(io.BytesIO(self._episodes[0][0]))).shape

    def decode(self) -> dict[str, float]:
        start = time.perf_counter()
        with ThreadPoolExecutor(CORES) as pool:
            steps = sum(pool.map(self._episode, self._episodes))
        return {"seconds": time.perf_counter() - start, "steps": steps}

    def _episode(self, images: list[bytes]) -> int:
        out = np.empty((len(images), *self._shape), np.uint8)
        for image, place in zip(images, out, strict=True):
            if image[:2] == b"\xff\xd8":
                simplejpeg.decode_jpeg(image, fastdct=True, buffer=place)
            else:
                place[:] = np.asarray(Image.open(io.BytesIO(image)))
        return len(images)


if __name__ == "__main__":
    roles: dict[str, Any] = {"reader": Reader, "logger": Logger, "decoder": Decoder}
    serve(roles)
