"""The experience store when it is large or busy: memory, many trajectories, a learner beside a writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import Any, Literal

import numpy as np

from bench.lab import Group, Lab, remove, resident
from bench.limits import touch_memory
from bench.report import ROOT, Row, at_most, below
from bench.timing import seconds_each, seconds_of
from bench.workloads import BATCH, W1, W3, as_trajectory, steps_of
from hilt.replay import Log, Schema


def memory(lab: Lab) -> list[Row]:
    """Another process samples from a log that is larger than its cache budget, and says what it held."""
    log_bytes, cache_bytes = lab.pick(8_000_000_000, 60_000_000), lab.pick(1_000_000_000, 10_000_000)
    work = W1(transitions=log_bytes // 99_000 // 100 * 100)
    lab.progress(f"memory: a log of {log_bytes / 1e9:g} GB")
    path = lab.new("large")
    with Log.create(path, Schema.of(steps_of(work.columns(0))[0]), durability="never") as log:
        for e in range(work.episodes):
            log.add(as_trajectory(work.columns(e)))
        size = log.live_bytes
    found = _in_subprocess("sampling_memory", path=str(path), cache_bytes=cache_bytes, batches=lab.pick(300, 5))
    remove(path)
    return [
        Row(
            name="memory_of_sampling",
            ours=found["private"] / 1e9,
            unit="GB",
            what="peak memory beyond the page cache (RssAnon + RssShmem) of a process that samples "
            f"W1 batches from a log of {size / 1e9:.1f} GB with cache_bytes={cache_bytes / 1e9:g} GB",
            targets=[at_most(1.5)],
            size=lab.size(log_bytes, 8_000_000_000, "bytes"),
            note=f"of which {found['start'] / 1e9:.2f} GB before the log was opened; pages of its files that "
            f"were mapped (RssFile: page cache, which the kernel may take back) {found['files'] / 1e9:.2f} "
            f"GB at most; all together {found['all'] / 1e9:.2f} GB; {found['rate']:.1f} batches/s",
        )
    ]


def sampling_memory(path: str, cache_bytes: int, batches: int) -> dict[str, float]:
    """Runs in a process of its own."""
    start = resident()
    log = Log.open(path, "r", cache_bytes=cache_bytes)
    sampler = log.all().sampler(seed=0)
    private = files = together = 0
    clock = time.perf_counter()
    for _ in range(batches):
        sampler.sample(BATCH)
        now = resident()
        private = max(private, now["RssAnon"] + now["RssShmem"])
        files = max(files, now["RssFile"])
        together = max(together, sum(now.values()))
    rate = batches / (time.perf_counter() - clock)
    return {
        "start": start["RssAnon"] + start["RssShmem"],
        "private": private,
        "files": files,
        "all": together,
        "rate": rate,
    }


def trajectories(lab: Lab) -> list[Row]:
    """A log of very many trajectories: what its index takes, how fast it opens, what adding costs."""
    full, per = 100_000, 10
    count = lab.pick(full, 300)
    lab.progress(f"trajectories: adding {count:,}")
    path = lab.new("many")
    trajectory = as_trajectory(W3(block=per).columns(0))
    large = Log.create(path, Schema.of(trajectory, leading=2), durability="never")
    view = large.all()
    for _ in range(count):
        large.add(trajectory)
    large.close()
    opened = _in_subprocess("opening", path=str(path), trajectories=count)
    small_path = lab.new("few")
    with Log.open(path) as large, Log.create(small_path, large.schema, durability="never") as small:
        views = large.all(), small.all()
        pairs = [
            (seconds_each(small.add, [trajectory] * 100), seconds_each(large.add, [trajectory] * 100))
            for _ in range(lab.pick(30, 2))
        ]
        assert len(views[0]) == count * per + len(views[1]) and len(view) == count * per
    remove(path)
    remove(small_path)
    few, many = (float(np.median(seconds)) / 100 for seconds in zip(*pairs[1:], strict=True))
    size = lab.size(count, full, "trajectories")
    return [
        Row(
            name="index_bytes",
            ours=opened["bytes"] / count,
            unit="bytes/trajectory",
            what="memory that an open log and one view hold per trajectory (live bytes by tracemalloc)",
            size=size,
            note=f"the index's own arrays are {opened['index_bytes'] / count:.0f} bytes of it",
        ),
        Row(
            name="open_many",
            ours=opened["seconds"],
            unit="s",
            what="opening a log of 100,000 trajectories for reading",
            targets=[below(1.0)],
            size=size,
            note=f"for appending {opened['append_seconds']:.2f} s; medians of three",
        ),
        Row(
            name="add_cost_growth",
            ours=many / few,
            unit="x",
            what="time of Log.add in a log of 100,000 trajectories over that in an empty one, "
            "with a view kept up to date",
            targets=[at_most(1.3)],
            size=size,
            note=f"{few * 1e6:.0f} us in an empty log, {many * 1e6:.0f} us in the large one, in "
            "turns, for 10 steps of W3",
        ),
    ]


def opening(path: str, trajectories: int) -> dict[str, float]:
    """Runs in a process of its own."""
    seconds = [seconds_of(_open_and_close, path, "r") for _ in range(3)]
    append_seconds = [seconds_of(_open_and_close, path, "a") for _ in range(3)]
    tracemalloc.start()
    log = Log.open(path, "r")
    view = log.all()
    assert len(view) == 10 * trajectories
    live = tracemalloc.get_traced_memory()[0]
    index_bytes = log.stats()["index_bytes"]
    log.close()
    return {
        "bytes": live,
        "index_bytes": index_bytes,
        "seconds": float(np.median(seconds)),
        "append_seconds": float(np.median(append_seconds)),
    }


def _open_and_close(path: str, mode: Literal["r", "a"]) -> None:
    with Log.open(path, mode) as log:
        log.all()


def stall(lab: Lab) -> list[Row]:
    """A learner that samples W1 batches all the time, alone and beside a writer thread."""
    work = W1(transitions=lab.pick(10_000, 300))
    lab.progress("stall: a learner beside a writer")
    touch_memory(lab.folder, 400_000 * work.transitions)
    seconds = 0.05 if lab.quick else 4.0
    with Log.create(
        lab.new("stall"), Schema.of(steps_of(work.columns(0))[0]), durability="never", capacity_steps=work.transitions
    ) as log:
        for e in range(work.episodes):
            log.add(as_trajectory(work.columns(e)))
        sampler = log.all().sampler(seed=0)
        shares: dict[str, list[float]] = {"20hz": [], "full": []}
        written: dict[str, list[float]] = {"20hz": [], "full": []}
        for _ in range(lab.pick(4, 1)):
            alone = _learn(sampler, seconds)
            for name, pause in (("20hz", 1 / 20), ("full", 0.0)):
                writer = _Writer(log, work, actors=8, period=pause)
                writer.start()
                beside = _learn(sampler, seconds)
                writer.finish()
                shares[name].append(max(0.0, 1 - beside / alone))
                written[name].append(writer.steps / writer.seconds)
    remove(log.path)
    rows = []
    for name, what in (("20hz", "8 actors at 20 Hz"), ("full", "8 actors as fast as they can")):
        rows.append(
            Row(
                name=f"stall_{name}",
                ours=100 * float(np.median(shares[name])),
                spread=(100 * min(shares[name]), 100 * max(shares[name])),
                unit="% of time",
                what=f"share of a learner's time lost to writes by {what}, in a thread of the same process: "
                "1 - (batches/s beside the writer) / (batches/s alone)",
                size="" if not lab.quick else f"{work.transitions:,} transitions instead of 10,000",
                note=f"{np.median(written[name]):,.0f} transitions/s written, process-safe; the learner "
                f"does nothing but sample W1 batches; {len(os.sched_getaffinity(0))} cores",
            )
        )
    return rows


class _Writer(threading.Thread):
    """Appends the steps of several running episodes in turn."""

    def __init__(self, log: Log, work: W1, actors: int, period: float):
        super().__init__(name="bench-writer", daemon=True)
        self._log, self._work, self._actors, self._period = log, work, actors, period
        self._done = threading.Event()
        self.steps, self.seconds = 0, 0.0

    def run(self) -> None:
        started = due = time.perf_counter()
        streams = [steps_of(self._work.columns(e)) for e in range(self._actors)]
        episodes = [self._log.episode(actor=str(a)) for a in range(self._actors)]
        at = 0
        while not self._done.is_set():
            for actor in range(self._actors):
                if at == 0:
                    episodes[actor] = self._log.episode(actor=str(actor))
                episodes[actor].append(streams[actor][at])
                self.steps += 1
            at = (at + 1) % self._work.episode
            due += self._period
            if self._period:
                self._done.wait(max(0.0, due - time.perf_counter()))
        for episode in episodes:
            episode.end()
        self.seconds = time.perf_counter() - started

    def finish(self) -> None:
        self._done.set()
        self.join()


def _learn(sampler: Any, seconds: float) -> float:
    batches, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        sampler.sample(BATCH)
        batches += 1
    return batches / (now - start)


def _in_subprocess(function: str, **arguments: Any) -> dict[str, float]:
    """A function of this file in a fresh process."""
    code = f"import json; from bench.replay_scale import {function} as f; print(json.dumps(f(**{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{function} failed in its process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


SCALE_GROUPS = {
    "memory": Group(("memory_of_sampling",), memory),
    "trajectories": Group(("index_bytes", "open_many", "add_cost_growth"), trajectories),
    "stall": Group(("stall_20hz", "stall_full"), stall),
}
