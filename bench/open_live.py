"""What ten pages on one live run cost its learner: updates in a second of its processor time, with and without them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.teleop import chromium

from bench.lab import Lab, cpu_seconds
from bench.open_sides import AWAKE, App, visitor
from bench.report import Row, at_most
from bench.sides import ROOT

PAGES, ROUNDS, SECONDS = 10, 10, 12.0
RECIPE = ("hil_debug", "batch_size=128", "max_steps=10000000", "checkpoint_period=100000")
BEGIN_TIMEOUT_S = 300.0


def live(lab: Lab) -> list[Row]:
    """ABAB: some seconds without any page, some with ten tabs of one browser that show the run, and so on."""
    names, rounds = ("learner_cost", "app_cpu"), lab.pick(ROUNDS, 1)
    if why := chromium.absent():
        return [Row(name, None, "%", "not measured", [at_most(0)], absent={"Chromium": why}) for name in names]
    seconds, pages = (2.0, 2) if lab.quick else (SECONDS, PAGES)
    alone, watched, used = [], [], []
    with running(lab.new("run")) as (run, learner), App([run]) as app, visitor(app, lab.new("tabs"), AWAKE) as browser:
        rate(run, learner, seconds)  # not counted: the first updates make their memory
        for number in range(rounds):
            # in the second half of the rounds the other one comes first
            for with_pages in (number % 2 == 0, number % 2 == 1):
                if with_pages:
                    show(browser, app, pages)
                before = cpu_seconds(app.pid)
                found = rate(run, learner, seconds)
                (watched if with_pages else alone).append(found)
                if with_pages:
                    used.append(100 * (cpu_seconds(app.pid) - before) / seconds)
                    hide(browser)
            lab.progress(f"live: round {number + 1} of {rounds}")
    cost = [100 * (1 - b / a) for a, b in zip(alone, watched, strict=True)]
    size = lab.size(rounds * pages, ROUNDS * PAGES, "pages and rounds")
    return [
        Row(
            name="learner_cost",
            ours=float(np.median(cost)),
            spread=(min(cost), max(cost)),
            unit="%",
            what=f"fewer updates of the learner in a second of its own processor time while {pages} pages "
            "show its run, all tabs of one browser on the same machine, each as if somebody looked at it",
            targets=[at_most(3.0)],
            size=size,
            note=f"median over {rounds} rounds of {seconds:g} s each without and with; "
            f"{np.median(alone):.1f} updates in such a second without, {np.median(watched):.1f} with",
        ),
        Row(
            name="app_cpu",
            ours=float(np.median(used)),
            spread=(min(used), max(used)),
            unit="% of a core",
            what=f"processor time of the app meanwhile, for {pages} pages",
            size=size,
        ),
    ]


@contextlib.contextmanager
def running(run: Path) -> Iterator[tuple[Path, int]]:
    """A run of `hilt train` that learns, and the process of its learner."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "hilt", "train", *RECIPE, "--run", str(run)]
    with (run.parent / "train.txt").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": path})
    try:
        end = time.monotonic() + BEGIN_TIMEOUT_S
        while newest(run) == 0:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"hilt train did not learn: {(run.parent / 'train.txt').read_text()[-2000:]}")
            time.sleep(0.1)
        yield run, child(process.pid, "learner")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def child(parent: int, word: str) -> int:
    """The process that this one has started with this word in its command."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if word in words:
                    return int(folder.name)
    raise RuntimeError(f"process {parent} has started no {word}")


def newest(run: Path) -> int:
    """The newest update in the metrics of a run, 0 before the first."""
    with contextlib.suppress(OSError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        for line in reversed(file.read().split(b"\n")[1:-1]):
            record: dict[str, Any] = json.loads(line)
            if record["kind"] == "update":
                return int(record["update"])
    return 0


def rate(run: Path, learner: int, seconds: float) -> float:
    """Updates in a second of the learner's processor time, over about this number of seconds."""
    (begun, first), end = _next(run, learner), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
    stop, last = _next(run, learner)
    return (stop - begun) / (last - first)


def _next(run: Path, learner: int) -> tuple[int, float]:
    """The next update that is written, and the learner's processor time then."""
    before, end = newest(run), time.monotonic() + 60
    while (now := newest(run)) == before:
        if time.monotonic() > end:
            raise RuntimeError("the learner wrote no metrics for a minute")
        time.sleep(0.005)
    return now, cpu_seconds(learner)


def show(browser: Any, app: App, pages: int) -> None:
    """Opens the run in this number of tabs, and waits until each shows its curves."""
    browser.get(app.base)
    address = chromium.wait(browser, "return document.querySelector('a[href*=\"/run?\"]')?.href")
    for _ in range(pages - 1):
        browser.switch_to.new_window("tab")
        browser.get(address)
    browser.switch_to.window(browser.window_handles[0])
    browser.get(address)
    for handle in browser.window_handles:
        browser.switch_to.window(handle)
        chromium.wait(browser, "return document.querySelector('canvas, svg.chart, .hilt-chart')")


def hide(browser: Any) -> None:
    """Closes all tabs but one, which shows nothing."""
    for handle in browser.window_handles[1:]:
        browser.switch_to.window(handle)
        browser.close()
    browser.switch_to.window(browser.window_handles[0])
    browser.get("about:blank")
