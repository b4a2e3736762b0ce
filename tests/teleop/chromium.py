"""A real browser for tests and bench: Debian's Chromium, headless, driven by selenium. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

ABSENT = "Chromium is not here, install it with: apt-get install chromium chromium-driver"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"]


def absent() -> str:
    """Why no browser can be started; empty when one can."""
    return "" if shutil.which("chromium") and shutil.which("chromedriver") else ABSENT


def start(profile: Path, width: int = 1280, height: int = 800) -> Any:
    """A browser with a new profile in this folder. Call quit() on it."""
    os.environ |= {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(30)
    return browser


def shape(browser: Any, width: int, height: int) -> None:
    """The page's own size, which a window's frame would make smaller; a narrow one is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
