"""A real browser for tests and bench: Debian's Chromium, headless, driven by selenium. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABSENT = "Chromium is not here, install it with: apt-get install chromium chromium-driver"
SIZE = 1280, 800
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"]


def absent() -> str:
    """Why no browser can be started; empty when one can."""
    return "" if shutil.which("chromium") and shutil.which("chromedriver") else ABSENT


def start(profile: Path, width: int = SIZE[0], height: int = SIZE[1], flags: Sequence[str] = ()) -> Any:
    """A browser with a new profile in this folder. Call quit() on it."""
    os.environ |= {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    browser.set_page_load_timeout(120)
    browser.set_script_timeout(110)  # selenium itself waits for two minutes
    return browser


def leave(browser: Any) -> None:
    """Nothing of its tabs stays, nor of what was asked of them, nor a cookie: it is as if it had just been started."""
    before = browser.window_handles
    browser.switch_to.new_window("tab")
    opened = browser.current_window_handle
    for handle in before:
        browser.switch_to.window(handle)
        browser.close()
    browser.switch_to.window(opened)
    browser.execute_cdp_cmd("Network.clearBrowserCookies", {})


def shape(browser: Any, width: int, height: int) -> None:
    """The page's own size, which a window's frame would make smaller; a narrow one is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def open_page(browser: Any, url: str) -> Any:
    """Opens the page and waits until it has drawn a picture or is connected; returns its Vue component's element."""
    browser.get(url)
    wait(browser, "return document.querySelector('.hilt')?.cockpit?.online === true")
    return browser.find_element("css selector", ".hilt")


def wait(browser: Any, script: str, seconds: float = 120) -> Any:
    """What the script returns, as soon as that is something."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, 0.05).until(lambda it: it.execute_script(script), f"never true: {script}")


def key(browser: Any, name: str, down: bool, text: str = "") -> None:
    """A key of the keyboard, pressed or released, as the operating system would tell
    the browser; with the text that it types."""
    code = {"Enter": 13, "Escape": 27, "Backspace": 8, "Tab": 9, "ArrowLeft": 37}.get(name) or ord(name.upper())
    event = {
        "key": name,
        "code": f"Key{name.upper()}" if len(name) == 1 else name,
        "windowsVirtualKeyCode": code,
        "text": text,
    }
    kind = ("keyDown" if text else "rawKeyDown") if down else "keyUp"
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, **event})


def measure(folder: Path, pixels: int = 128, rate_hz: float = 20.0, presses: int = 40) -> dict[str, float]:
    """Frame age and key latency of the page, on this machine, in milliseconds.

    ``frame_age``: from `Browser.show` to the drawn canvas, as the page shows it. ``key_latency``: from
    the order to press a real key to the `Browser.read` that has it, the way through chromedriver
    included. Two cameras of `pixels` squared at `rate_hz`.
    """
    import threading
    import time

    import numpy as np

    from hilt.teleop.browser import Browser
    from hilt.teleop.devices import Status

    rng = np.random.default_rng(0)
    pictures = [
        np.kron(rng.integers(0, 256, (pixels // 8, pixels // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        for _ in range(16)
    ]
    found: dict[str, float] = {}
    with Browser() as device:
        device.reset()
        browser, done = start(folder / "profile"), threading.Event()

        def show() -> None:
            step = 0
            while not done.wait(1 / rate_hz):
                device.show(
                    {"front": pictures[step % 16], "wrist": pictures[(step + 5) % 16]}, Status("human", step=step)
                )
                step += 1

        thread = threading.Thread(target=show)
        thread.start()
        try:
            open_page(browser, device.url)
            key(browser, "t", True), key(browser, "t", False)
            wait(browser, "return document.querySelector('.hilt').cockpit.view.driving")
            latencies = []
            for _ in range(presses):
                pressed = time.perf_counter()
                key(browser, "w", True)
                while not device.read().motion.any() and time.perf_counter() < pressed + 5:
                    time.sleep(0.0005)
                latencies.append(time.perf_counter() - pressed)
                key(browser, "w", False)
                time.sleep(0.25)
                while device.read().motion.any() and time.perf_counter() < pressed + 5:
                    time.sleep(0.0005)
            ages = browser.execute_script("return document.querySelector('.hilt').cockpit.ages")
            for name, values in (("frame_age", ages[20:]), ("key_latency", latencies)):
                found |= {
                    f"{name}_p{part}_ms": round(1000 * float(np.percentile(values, part)), 1) for part in (50, 95)
                }
        finally:
            done.set()
            thread.join()
            browser.quit()
    return found
