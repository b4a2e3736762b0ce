"""What the benchmark of `hilt open` drives: the app as a process of its own, and pages of it in a real browser."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.teleop import chromium

from bench.lab import resident
from bench.sides import ROOT

START_TIMEOUT_S = 60.0
AWAKE = ("--disable-background-timer-throttling", "--disable-renderer-backgrounding")
AWAKE += ("--disable-backgrounding-occluded-windows",)
"""Flags with which a browser treats each of its tabs as one that somebody looks at"""
ROWS_AT = """
const look = () => document.querySelector('.episodes tbody tr td.number a')
  ? requestAnimationFrame((now) => (window.benchRowsAt = performance.now())) : requestAnimationFrame(look);
requestAnimationFrame(look);
"""
"""In every page: when the first row was on the screen, in milliseconds since the navigation"""
FILTER = """
const [text, done] = arguments, list = document.querySelector('.episodes').component;
const field = document.querySelector('.hilt-filter input');
field.focus();
field.value = text;
field.dispatchEvent(new Event('input'));
field.addEventListener('keydown', (event) => {
  const begun = event.timeStamp, before = list.page;
  const look = () => list.page !== before || list.error
    ? requestAnimationFrame(() => done([performance.now() - begun, list.error])) : requestAnimationFrame(look);
  requestAnimationFrame(look);
}, {once: true});
window.benchReady = true;
"""
"""Types a filter; the time runs from the press of Enter to the frame that shows its rows"""
SCRUB = """
const [steps, pace, done] = arguments, one = document.querySelector('.episode').component;
const cameras = one.episodes[0].cameras, took = [];
const drawn = (camera, step) => new Promise((resolve, reject) => {
  const timer = setTimeout(() => reject(`step ${step} did not come within 20 s`), 20000);
  camera.draw = function (at, image) {
    Object.getPrototypeOf(this).draw.call(this, at, image);
    if (this.shown !== step) return;
    this.canvas.getContext('2d').getImageData(0, 0, 1, 1); // waits until it is decoded and drawn
    clearTimeout(timer);
    resolve();
  };
});
(async () => {
  for (const step of steps) {
    const begun = performance.now(), shown = Promise.all(cameras.map((camera) => drawn(camera, step)));
    one.seek(step);
    await shown;
    took.push(performance.now() - begun);
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, begun + pace - performance.now())));
  }
  cameras.forEach((camera) => delete camera.draw);
  done(took);
})().catch((error) => done(String(error)));
"""
"""Moves the cursor as a person who drags it; milliseconds from each wish until all cameras show exactly that step"""


class App:
    """``hilt open`` on some paths, started and serving. It ends with its `with` block."""

    def __init__(self, paths: Sequence[Path]):
        words = [sys.executable, "-m", "hilt", "open", *map(str, paths), "--port", "0", "--no-browser"]
        self._state = tempfile.TemporaryDirectory()
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": self._state.name}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("open ").strip()
        self.base, self.token = f"http://{urlsplit(self.url).netloc}", urlsplit(self.url).query
        self._wait()

    def _wait(self) -> None:
        """Until it answers; without its token it refuses, and builds nothing."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(self.base, timeout=START_TIMEOUT_S)
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"hilt open did not answer within {START_TIMEOUT_S:.0f} s")

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self) -> dict[str, int]:
        """Its bytes in memory, by kind."""
        return resident(self.pid)

    def __enter__(self) -> App:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._state.cleanup()


@contextlib.contextmanager
def chromium_alone(profile: Path, flags: Sequence[str] = ()) -> Iterator[Any]:
    """A browser with an empty profile."""
    browser = chromium.start(profile, 1360, 1000, flags)
    try:
        browser.set_script_timeout(600)
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": ROWS_AT})
        yield browser
    finally:
        browser.quit()


@contextlib.contextmanager
def visitor(app: App, profile: Path, flags: Sequence[str] = ()) -> Iterator[Any]:
    """A browser with an empty profile that has the cookie of the app, and has seen nothing else of it."""
    with chromium_alone(profile, flags) as browser:
        enter(browser, app)
        yield browser


def enter(browser: Any, app: App) -> None:
    """Gives the app its token, at an address that is no page."""
    browser.get(f"{app.base}/api/curves?{app.token}")


def first_paint(browser: Any, app: App, query: str = "") -> float:
    """Milliseconds from the navigation to the list until its rows are on the screen."""
    browser.get(f"{app.base}/episodes{query}")
    return float(chromium.wait(browser, "return window.benchRowsAt"))


def filter_list(browser: Any, text: str) -> float:
    """Milliseconds from Enter to the rows that a filter admits."""
    browser.execute_script("window.benchDone = null; window.benchReady = false;")
    browser.execute_script(FILTER.replace("arguments", f"[{text!r}, (found) => (window.benchDone = found)]"))
    chromium.wait(browser, "return window.benchReady")
    chromium.key(browser, "Enter", True, "\r")
    took, error = chromium.wait(browser, "return window.benchDone")
    chromium.key(browser, "Enter", False)
    if error:
        raise RuntimeError(f"the filter {text}: {error}")
    return float(took)


def open_episode(browser: Any, address: str) -> None:
    """Opens an episode, and waits until all of its cameras show a frame."""
    browser.get(address)
    shown = "document.querySelector('.episode')?.component?.episodes[0]?.cameras"
    chromium.wait(browser, f"return {shown}?.every((camera) => camera.shown >= 0)")


def scrub(browser: Any, steps: Sequence[int], pace_ms: float) -> list[float]:
    """Milliseconds of each step on the way over the timeline of the episode that is open."""
    found = browser.execute_async_script(SCRUB, list(steps), pace_ms)
    if isinstance(found, str):
        raise RuntimeError(f"scrubbing: {found}")
    return [float(took) for took in found]
