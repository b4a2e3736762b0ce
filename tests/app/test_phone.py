"""The app on a phone with a finger alone, and as a screen reader gets it: names, roles, and lanes in words.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from hilt.app.episodes.episode_shelf import data_key
from hilt.formats.listing.episode_source import source_key
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log
from tests.app.test_open_app import serving
from tests.teleop import chromium

LIST, ONE = "document.querySelector('.episodes')?.component", "document.querySelector('.episode')?.component"
CONTROLS = {"button", "link", "checkbox", "textbox", "searchbox", "combobox", "slider", "spinbutton", "radio", "switch"}
PICTURES = {"image", "img"}

pytestmark = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_log(tmp_path_factory.mktemp("phone") / "a_log_with_a_rather_long_name_of_its_own", 4)
    with Log.open(path, "r") as opened:
        Edits(opened, "ann").mark(3, 2, "grasp")
        Edits(opened, "ann").instruction(1, "pick-up-the-red-cube-" * 6)
    return path


@pytest.fixture(scope="module")
def served(log: Path) -> Iterator[Any]:
    with serving(log) as found:
        yield found


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    """A phone: narrow, and with a finger instead of a mouse."""
    chromium.shape(chromium_tab, 390, 844)
    chromium_tab.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 5})
    chromium_tab.execute_cdp_cmd("Emulation.setEmitTouchEventsForMouse", {"enabled": True, "configuration": "mobile"})
    chromium_tab.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "pointer", "value": "coarse"}, {"name": "hover", "value": "none"}]},
    )
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelector('.hilt-nav')")
    return chromium_tab


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_list(chrome: Any, served: Any) -> None:
    chrome.get(f"{served.base}/episodes")
    chromium.wait(chrome, f"return {LIST}?.page?.matched === 4 && {LIST}.page.unread === 0")


def open_episode(chrome: Any, served: Any, log: Path, number: int) -> None:
    place = {"data": data_key(log), "source": source_key(log), "number": number}
    chrome.get(f"{served.base}/episode?{urlencode(place)}")
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.cameras.every((one) => one.shown === 0)")


def touch(chrome: Any, script: str) -> None:
    """Puts a finger on the middle of the element that the script finds, after scrolling to it."""
    found = (
        f"const found = {script}; found.scrollIntoView({{block: 'center'}}); const box = found.getBoundingClientRect();"
    )
    x, y = chrome.execute_script(f"{found} return [box.x + box.width / 2, box.y + box.height / 2]")
    inside = "return document.elementFromPoint(arguments[0], arguments[1])"
    assert chrome.execute_script(
        f"{found} const hit = (() => {{ {inside} }})(...arguments); return found.contains(hit)", x, y
    )
    chrome.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    chrome.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def too_wide(chrome: Any) -> list[str]:
    """The elements that reach beyond the screen, without those inside of what scrolls sideways by itself."""
    return chrome.execute_script("""
        const hides = (one) => ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX);
        const scrolls = (one) => one !== document.body && (hides(one) || scrolls(one.parentElement));
        const wide = [...document.querySelectorAll(".hilt-head *, .hilt-main *")].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.width && (box.right > innerWidth + 1 || box.left < -1) && !scrolls(one.parentElement);
        });
        const page = document.documentElement.scrollWidth > innerWidth + 1 ? ["the page"] : [];
        return [...page, ...wide.map((one) => one.tagName + "." + one.className).slice(0, 5)];
    """)


def covered(chrome: Any) -> list[str]:
    """Cells of the list that lie on another cell of their row, and parts of the head that lie on others."""
    return chrome.execute_script("""
        const boxes = (row) => [...row.querySelectorAll("td:not(:empty)")].map((one) =>
          [one.className, (one.querySelector("img") ?? one).getBoundingClientRect()]).filter(([, box]) => box.width);
        const apart = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 1;
        const over = (a, b) => !apart(a, b) && !apart(b, a);
        const rows = [...document.querySelectorAll(".episodes tbody tr")];
        const pairs = (all) => all.flatMap((one, i) => all.slice(i + 1).map((other) => [one, other]));
        const head = [...document.querySelectorAll(".hilt-nav, .hilt-tools, .hilt-brand")];
        return [...rows.map(boxes), head.map((one) => [one.className, one.getBoundingClientRect()])]
          .flatMap(pairs).filter(([[, a], [, b]]) => over(a, b)).map(([[name], [other]]) => name + " on " + other);
    """)


def unnamed(chrome: Any) -> list[str]:
    """Controls and pictures without a name in the tree that a screen reader gets."""
    nodes = chrome.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = [
        node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in CONTROLS | PICTURES
    ]
    assert len(seen) > 8, "the tree has no controls"
    return [str(node["role"]["value"]) for node in seen if not str(node.get("name", {}).get("value", "")).strip()]


def test_phone_lists_opens_and_labels_with_a_finger(chrome: Any, served: Any, log: Path, artifacts: Path):
    open_list(chrome, served)
    frames = "[...document.querySelectorAll('.episodes td.frames img')]"
    chromium.wait(chrome, f"return {frames}.some((one) => one.complete && one.naturalHeight)")
    assert too_wide(chrome) == [] and covered(chrome) == []
    touch(chrome, "document.querySelectorAll('.episodes .quick button')[1]")  # episode 0 is a failure
    touch(chrome, "document.querySelectorAll('.episodes .quick button')[4]")  # episode 2 is a success
    chromium.wait(chrome, f"return {LIST}.page.rows[2].success === true && {LIST}.done.startsWith('✓')")
    chrome.save_screenshot(str(artifacts / "phone-list.png"))
    for row in (1, 3):
        touch(chrome, f"document.querySelectorAll('.episodes td.number input')[{row}]")
    touch(chrome, "document.querySelector('.selection .in-terminal')")
    chromium.wait(chrome, "return document.querySelectorAll('.selection code').length > 5")
    assert too_wide(chrome) == [] and unnamed(chrome) == []
    chrome.save_screenshot(str(artifacts / "phone-selection.png"))
    touch(chrome, "document.querySelector('.selection .bad')")
    chromium.wait(chrome, f"return {LIST}.page.matched === 2 && {LIST}.done.includes('(2')")
    touch(chrome, "document.querySelector('.selection .undo')")
    chromium.wait(chrome, f"return {LIST}.page.matched === 4")
    touch(chrome, "document.querySelector('.selection .unselect')")
    chromium.wait(chrome, "return !document.querySelector('.selection')")
    touch(chrome, "document.querySelectorAll('.episodes td.task a')[3]")
    chromium.wait(
        chrome,
        f"return {ONE}?.episodes[0]?.row.number === 3 && {ONE}.episodes[0].cameras.every((one) => one.shown >= 0)",
    )
    assert too_wide(chrome) == []
    chrome.save_screenshot(str(artifacts / "phone-episode.png"))
    touch(chrome, "document.querySelector('.labels .failure')")
    chromium.wait(chrome, f"return {ONE}.episodes[0].row.success === false")
    chrome.save_screenshot(str(artifacts / "phone-labels.png"))
    assert too_wide(chrome) == []
    touch(chrome, "document.querySelector('.transport .play')")
    chromium.wait(chrome, f"return {ONE}.step > 2")
    small = chrome.execute_script(
        "return [...document.querySelectorAll('.labels button, .transport button')]"
        ".filter((one) => one.offsetHeight < 36).length"
    )
    assert small == 0, "too small for a finger"
    with Log.open(log, "r") as opened:
        assert [opened.facts.about(number)["success"] for number in range(4)] == [False, True, True, False]


def test_phone_pages_do_not_overflow(chrome: Any, served: Any, log: Path, artifacts: Path):
    open_episode(chrome, served, log, 1)
    assert too_wide(chrome) == []
    for path in ("/", "/check"):
        chrome.get(served.base + path)
        chromium.wait(chrome, "return document.querySelector('.hilt-main h1, .hilt-main h2, .hilt-main p')")
        assert too_wide(chrome) == [], path
        assert unnamed(chrome) == [], path


def test_screen_reader_gets_a_name_for_every_control_and_every_picture(chrome: Any, served: Any, log: Path):
    open_list(chrome, served)
    assert unnamed(chrome) == []
    images = chrome.execute_script(
        "return [...document.querySelectorAll('img')].filter((one) => !one.hasAttribute('alt')).length"
    )
    assert images == 0
    open_episode(chrome, served, log, 3)
    assert unnamed(chrome) == []
    lanes = chrome.execute_script("return [...document.querySelectorAll('.lane canvas')].map((one) => one.ariaLabel)")
    assert lanes[0] == "Who acted: policy 67%, person 33%; marks: grasp 2"
    assert "rewards: 0 … 1" in lanes and "terminated: steps 8" in lanes
    slider = chrome.execute_script("return document.querySelector('[role=slider]').ariaValueText")
    assert slider == "step 0 (of 0 to 8)"
    headings = chrome.execute_script("return [...document.querySelectorAll('h1')].length")
    landmarks = chrome.execute_script(
        "return ['main', 'nav[aria-label]', 'header'].map((one) => !!document.querySelector(one))"
    )
    assert headings == 1 and all(landmarks)
