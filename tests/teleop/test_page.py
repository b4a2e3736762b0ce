"""The page in a real browser: real keys, fingers and tabs, and what the device and the arm make of them.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from hilt.core.trajectory import Source, Step
from hilt.replay import Log
from hilt.teleop.devices import Status
from hilt.teleop.intervene import LET_GO
from hilt.teleop.page import DRIFT, SEAT_SECONDS, MomentPictures, Viewer, Wheel
from tests.teleop import chromium
from tests.teleop.played import until

# Without a browser


def test_the_wheel_has_one_driver():
    wheel = Wheel()
    held = {"motion": [1.0] * 6, "gripper": 1, "arm": 1}
    assert wheel.take("a", 10) and not wheel.take("b", 10)
    wheel.hold("b", held, 10.1)
    assert wheel.message(10.1)["motion"] == [0] * 6
    wheel.hold("a", held, 10.2)
    assert wheel.message(10.3) == {"driving": True, "lost": False, "paused": False, "at": 10.2, **held}
    wheel.hold("a", {**held, "gripper": -1}, 10.1)  # older than the one before
    assert wheel.message(10.3)["gripper"] == 1
    wheel.give("b")
    assert wheel.driver == "a"
    wheel.give("a")
    assert wheel.message(11)["driving"] is False and wheel.message(11)["at"] == 11
    assert wheel.take("b", 12) and wheel.message(12)["motion"] == [0] * 6  # what the last one held is forgotten


def test_a_driver_who_is_gone_leaves_the_wheel_lost():
    wheel = Wheel()
    wheel.take("a", 10)
    wheel.check(10 + SEAT_SECONDS)
    assert wheel.driver == "a"
    wheel.check(10.01 + SEAT_SECONDS)
    assert wheel.driver is None and wheel.message(20)["lost"]
    wheel.hold("a", {"motion": [1.0] * 6, "gripper": 0, "arm": 0}, 21)  # too late
    assert wheel.message(21)["lost"] and not wheel.message(21)["driving"]
    wheel.give("b")
    assert not wheel.message(22)["lost"]
    wheel.take("a", 22), wheel.check(30)
    assert wheel.take("b", 31) and not wheel.message(31)["lost"]


def test_a_pause_is_ended_by_the_one_who_paused_or_when_they_are_gone():
    wheel, held = Wheel(), {"motion": [0.0] * 6, "gripper": 0, "arm": 0}
    wheel.pause("a", 10)
    wheel.pause("b", 10)
    wheel.resume("b")
    assert wheel.paused_by == "a" and wheel.message(10)["paused"] and not wheel.message(10)["driving"]
    wheel.hold("b", held, 12.5), wheel.hold("a", held, 11.5), wheel.check(11.5 + SEAT_SECONDS)
    assert wheel.paused_by == "a"
    wheel.check(11.6 + SEAT_SECONDS)
    assert not wheel.message(14)["paused"]
    wheel.take("a", 20), wheel.pause("b", 20)
    assert wheel.paused_by is None, "only the driver"
    wheel.pause("a", 20), wheel.resume("a")
    assert wheel.paused_by is None


def test_pictures_of_moments_are_those_of_the_running_try(monkeypatch: pytest.MonkeyPatch):
    moments = MomentPictures()
    assert moments.at(3) == [] and moments.first == 0
    for step in (0, 1, 2, 5):
        moments.add(1, step, [("front", bytes([step]))])
    assert moments.at(1) == [("front", b"\1")] and moments.at(4) == [("front", b"\2")]
    moments.add(1, 1, [("front", b"again")])
    assert moments.at(9) == [("front", b"again")] and moments.at(0) == [("front", b"\0")]
    moments.add(2, 0, [("front", b"other")])
    assert moments.at(9) == [("front", b"other")]
    monkeypatch.setattr("hilt.teleop.page.MOMENT_BYTES", 10)
    for step in range(1, 5):
        moments.add(2, step, [("front", b"12345")])
    assert moments.first == 3 and moments.at(0) == [("front", b"12345")], "the nearest that is kept"


def test_a_late_message_is_as_old_as_it_is_late():
    viewer = Viewer("a")
    assert viewer.sent_at(5.0, 105.02) == pytest.approx(105.02)  # the quickest so far
    assert viewer.sent_at(6.0, 106.01) == pytest.approx(106.01)
    assert viewer.sent_at(7.0, 107.51) == pytest.approx(107.01, abs=2 * DRIFT)  # half a second late
    assert viewer.sent_at(8.0, 108.01) == pytest.approx(108.01, abs=2 * DRIFT)
    for second in range(9, 600):  # clocks that part slowly do no harm
        assert viewer.sent_at(second, 100.01 + second * (1 + DRIFT / 2)) == pytest.approx(
            100.01 + second * (1 + DRIFT / 2), abs=0.01
        )


def test_a_clock_that_stood_still_counts_again_after_a_take():
    viewer = Viewer("a")
    viewer.sent_at(5.0, 105.0)
    assert viewer.sent_at(6.0, 116.0) < 107  # the phone slept for ten seconds: nothing it says seems new
    viewer.compare_clocks()
    assert viewer.sent_at(7.0, 117.0) == 117


# With one

needs_chromium = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def chrome(chromium_tab: Any) -> Any:
    return chromium_tab


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """A device whose page is served, started in a folder with a file that has the name of a module."""
    from hilt.teleop import browser
    from hilt.teleop.browser import Browser

    before = os.getcwd()
    if sys.version_info >= (3, 11):
        (folder / "re.py").write_text("raise SystemExit('a module of the folder that the person happens to be in')")
    os.chdir(folder)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(browser, "PATIENCE", 5.0)  # a busy machine stands still for longer than a second
    try:
        device = Browser("0.0.0.0")  # so that the token is needed, and the browser has to keep its cookie
    finally:
        os.chdir(before)
    with device:
        device.url = f"http://127.0.0.1:{urlsplit(device.url).port}/?token={device.token}"
        yield device
    monkeypatch.undo()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("folder")) as device:
        yield device


def face(chrome: Any, device: Any) -> None:
    """Brings the page of this device to the front, alone, at a desktop's size, with nobody at the wheel."""
    for handle in chrome.window_handles[1:]:
        chrome.switch_to.window(handle)
        chrome.close()
    chrome.switch_to.window(chrome.window_handles[0])
    chromium.shape(chrome, 1280, 800)
    device.reset()
    device.show({"front": PICTURE, "wrist": PICTURE}, Status("policy", "pick up the red cube", 1, 0, 7, 100))
    # else as the last test left it
    is_there = urlsplit(chrome.current_url).port == urlsplit(device.url).port
    if not is_there or not chrome.execute_script("return document.querySelector('.hilt')?.cockpit?.online"):
        chromium.open_page(chrome, device.url)
    # else no press counts
    chromium.wait(chrome, f"return document.querySelector('.hilt').cockpit.view.episode === {device._episode}")
    chrome.execute_script("document.querySelector('.hilt').cockpit.facing = false")
    if view(chrome, "lost"):
        click(chrome, ".resume")
    until(device, lambda reading: not reading.engaged)


@pytest.fixture
def page(chrome: Any, device: Any) -> Iterator[Any]:
    face(chrome, device)
    yield chrome
    if len(chrome.window_handles) == 1 and view(chrome, "driving"):
        click(chrome, ".take")
        until(device, lambda reading: not reading.engaged)


yy, xx = np.mgrid[:96, :96]
PICTURE = np.stack([xx * 2, yy * 2, 255 - xx - yy], -1).astype(np.uint8)


def view(browser: Any, name: str) -> Any:
    return browser.execute_script(f"return document.querySelector('.hilt').cockpit.view.{name}")


def banner(browser: Any) -> str:
    return str(browser.find_element("css selector", ".who strong").text)


def click(browser: Any, where: str) -> None:
    browser.find_element("css selector", where).click()


def take_over(browser: Any, device: Any) -> None:
    click(browser, ".take")
    until(device, lambda reading: reading.engaged)
    chromium.wait(browser, "return document.querySelector('.hilt').cockpit.view.driving")


@needs_chromium
def test_keys_sticks_and_gamepad_move_and_are_released(page: Any, device: Any):
    take_over(page, device)
    for key, wanted in (("w", 0), ("a", 1), ("e", 2), ("u", 3), ("i", 4), ("j", 5)):
        chromium.key(page, key, True)
        assert until(device, lambda reading: reading.motion.any()).motion.tolist() == np.eye(6)[wanted].tolist()
        chromium.key(page, key, False)
        until(device, lambda reading: not reading.motion.any())
    chromium.key(page, "w", True)
    chromium.key(page, "d", True)
    assert until(device, lambda reading: reading.motion.any() and reading.motion[1]).motion.tolist() == [
        1,
        -1,
        0,
        0,
        0,
        0,
    ]
    page.execute_script("window.dispatchEvent(new Event('blur'))")
    until(device, lambda reading: not reading.motion.any())
    chromium.key(page, "w", False)
    chromium.key(page, "d", False)

    chromium.key(page, "c", True)  # a tap shorter than a control step is not missed
    chromium.key(page, "c", False)
    assert until(device, lambda reading: reading.gripper).gripper == -1
    until(device, lambda reading: not reading.gripper)

    from selenium.webdriver import ActionChains

    left = page.find_element("css selector", ".stick")
    ActionChains(page).click_and_hold(left).move_by_offset(0, -60).perform()
    assert until(device, lambda reading: reading.motion[0] > 0.9).motion[1:] == pytest.approx(0, abs=0.01)
    ActionChains(page).release().perform()
    until(device, lambda reading: not reading.motion.any())
    page.execute_script("document.querySelector('.hilt').cockpit.speed = 0.3")
    right = page.find_elements("css selector", ".stick")[1]
    ActionChains(page).click_and_hold(right).move_by_offset(-60, 0).perform()
    assert until(device, lambda reading: reading.motion.any()).motion == pytest.approx([0, 0, 0, 0, 0, 0.3], abs=0.01)
    ActionChains(page).release().perform()
    until(device, lambda reading: not reading.motion.any())

    page.execute_script("document.querySelector('.hilt').cockpit.facing = true")
    chromium.key(page, "w", True)
    assert until(device, lambda reading: reading.motion.any()).motion == pytest.approx([-0.3, 0, 0, 0, 0, 0])
    chromium.key(page, "w", False)
    until(device, lambda reading: not reading.motion.any())
    page.find_element("xpath", "//button[text()='Behind the robot']").click()

    page.execute_script("document.querySelector('.hilt').cockpit.speed = 1")


def gamepad(browser: Any, axes: list[float], button: int = -1, layout: str = "standard") -> None:
    """A pad with its sticks there and that button pressed, as the browser would tell; and the page has seen it."""
    pressed = [{"pressed": index == button, "value": int(index == button)} for index in range(17)]
    pad = {"id": "Pad (test)", "connected": True, "mapping": layout, "axes": axes, "buttons": pressed}
    browser.execute_script(
        f"navigator.getGamepads = () => [{json.dumps(pad)}]; document.querySelector('.hilt').cockpit.turnOver()"
    )


@needs_chromium
def test_a_gamepad_drives_once_its_sticks_were_at_rest(page: Any, device: Any):
    gamepad(page, [0, -1, 0, 0.05])
    take_over(page, device)  # with a stick deflected
    gamepad(page, [0, -1, 0, 0.05])
    gamepad(page, [0, -1, 0, 0.05], button=7)
    reading = until(device, lambda reading: reading.gripper != 0)
    assert reading.gripper == -1 and not reading.motion.any()
    gamepad(page, [0, 0, 0, 0.05])
    gamepad(page, [0, -1, 0, 0.05])
    assert until(device, lambda reading: reading.motion.any()).motion.tolist() == [1, 0, 0, 0, 0, 0]
    gamepad(page, [0, 0, -1, 0], layout="")  # a trigger at rest, of a pad that the browser does not know
    assert not until(device, lambda reading: not reading.motion.any()).motion.any()
    assert "Pad : its layout is not known" in page.find_element("css selector", ".legend").text
    gamepad(page, [0, 0, 0, 0])
    gamepad(page, [0, 0, 0, 0], button=0)
    assert "success" in until(device, lambda reading: "success" in reading.events).events
    page.execute_script("navigator.getGamepads = () => []")


@needs_chromium
def test_page_releases_keys_whose_keyup_is_missing(page: Any, device: Any):
    take_over(page, device)
    numpad = {"code": "Numpad8", "windowsVirtualKeyCode": 38, "isKeypad": True}
    page.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "rawKeyDown", "key": "ArrowUp", **numpad})
    until(device, lambda reading: reading.motion[0] == 1)
    # Num Lock was pressed meanwhile
    page.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", "key": "8", **numpad})
    until(device, lambda reading: not reading.motion.any())
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    for kind in ("mousePressed", "mouseReleased"):  # a menu would swallow the release
        page.execute_cdp_cmd(
            "Input.dispatchMouseEvent", {"type": kind, "x": 300, "y": 300, "button": "right", "clickCount": 1}
        )
    until(device, lambda reading: not reading.motion.any())
    chromium.key(page, "w", False)


@needs_chromium
def test_page_focused_elements_get_their_keys(page: Any, device: Any):
    for _ in range(20):
        chromium.key(page, "Tab", True)
        chromium.key(page, "Tab", False)
        if page.execute_script("return document.activeElement.className") == "take":
            break
    chromium.key(page, "Enter", True, "\r")
    chromium.key(page, "Enter", False)
    assert until(device, lambda reading: bool(reading.events)).events == ("toggle",)  # and not success
    chromium.wait(page, "return document.querySelector('.hilt').cockpit.view.driving")


@needs_chromium
def test_page_reports_a_silent_process(page: Any, device: Any):
    take_over(page, device)
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    os.kill(device._page.pid, signal.SIGSTOP)
    try:
        assert not until(device, lambda reading: reading.lost).motion.any()
        chromium.wait(page, "return document.querySelector('.hilt').classList.contains('gone')")
        assert banner(page) == "No contact" and page.find_element("css selector", ".cameras.stale")
    finally:
        os.kill(device._page.pid, signal.SIGCONT)
    chromium.wait(page, "return document.querySelector('.hilt').cockpit.online")
    assert not until(device, lambda reading: not reading.lost or view(page, "lost")).motion.any()
    chromium.key(page, "w", False)


@needs_chromium
def test_page_loads_nothing_from_other_hosts(page: Any):
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) > 5 and {urlsplit(name).netloc for name in loaded if not name.startswith("data:")} == {
        urlsplit(page.current_url).netloc
    }


@needs_chromium
def test_a_task_without_pictures_is_no_wait(page: Any, device: Any):
    device.show({}, Status("policy", "balance the pole"))
    page.refresh()
    chromium.wait(page, "return document.querySelector('.cameras p')?.innerText === 'This task has no pictures'")
    assert "fps" not in page.find_element("css selector", ".link").text


@needs_chromium
def test_page_sends_every_button_once(page: Any, device: Any):
    buttons = (".success", "success"), (".fail", "fail"), (".reset", "reset"), (".stop", "stop"), (".estop", "estop")
    for where, event in buttons:
        click(page, where)
        assert until(device, lambda reading: bool(reading.events)).events == (event,)
    for key, event in (("Enter", "success"), ("Backspace", "fail"), ("r", "reset"), ("Escape", "stop"), (" ", "estop")):
        chromium.key(page, key, True)
        chromium.key(page, key, False)
        assert until(device, lambda reading: bool(reading.events)).events == (event,)
    time.sleep(0.3)
    assert device.read().events == ()


@needs_chromium
def test_page_shows_the_emergency_stop_and_releases_it(page: Any, device: Any):
    who = "return document.querySelector('.who strong').innerText"
    chromium.key(page, "g", True)  # nothing to release
    chromium.key(page, "g", False)
    device.show({"front": PICTURE}, Status("none", estop=True))
    chromium.wait(page, f"{who} === 'Emergency stop'")
    click(page, ".release")
    assert until(device, lambda reading: bool(reading.events)).events == ("release_estop",)
    chromium.key(page, "g", True)
    chromium.key(page, "g", False)
    assert until(device, lambda reading: bool(reading.events)).events == ("release_estop",)
    device.show({"front": PICTURE}, Status("policy"))
    chromium.wait(page, f"{who} === 'The policy is in control'")


@needs_chromium
def test_page_marks_nothing_before_the_first_step(page: Any, device: Any):
    device.show({"front": PICTURE}, Status("none", episode=2))
    chromium.wait(
        page, "return document.querySelector('.success').disabled && document.querySelector('.fail').disabled"
    )
    chromium.key(page, "Enter", True)
    chromium.key(page, "Enter", False)
    click(page, ".reset")
    assert until(device, lambda reading: bool(reading.events)).events == ("reset",)


@needs_chromium
def test_a_reloaded_page_has_its_seat_and_its_choices(page: Any, device: Any):
    page.execute_script("document.querySelector('.hilt').cockpit.facing = null")
    pressed = "return document.querySelector('[aria-pressed=true]:is(.hands > .choice > *)').innerText"
    assert page.execute_script(pressed) == "Facing the robot"  # as the camera of the name front does
    page.find_element("xpath", "//button[text()='Behind the robot']").click()
    take_over(page, device)
    page.refresh()
    chromium.wait(page, "return document.querySelector('.hilt')?.cockpit?.view.driving")
    assert page.execute_script(pressed) == "Behind the robot"
    assert not until(device, lambda reading: not reading.lost).motion.any()
    click(page, ".success")  # is not taken for one that was handled before
    assert "success" in until(device, lambda reading: bool(reading.events)).events


@needs_chromium
@pytest.mark.parametrize("size", [(1366, 625), (360, 640), (740, 360)])
def test_page_shows_controls_without_scrolling(page: Any, device: Any, size: tuple[int, int]):
    chromium.shape(page, *size)
    box = "document.querySelector('{}').getBoundingClientRect()"
    stick, foot, stop = (box.format(name) for name in (".stick:last-child", "footer", ".estop"))
    chromium.wait(page, f"return {stick}.bottom <= {foot}.top || {foot}.right <= {stick}.left")
    chromium.wait(page, f"return {stick}.bottom <= innerHeight && {stop}.bottom <= innerHeight")
    assert size[0] < 600 or chromium.wait(page, "return document.documentElement.scrollHeight <= innerHeight")


CUT = """return [...document.querySelectorAll('.legend, .legend *, footer, .hands, .facts')].filter((part) => {
    const box = part.getBoundingClientRect(), aside = part.closest('aside');
    const beside = aside && getComputedStyle(aside).display !== 'contents';
    const end = beside ? aside.getBoundingClientRect().bottom : innerHeight;
    return box.bottom > end + 1 || box.right > innerWidth + 1 || box.left < 0;
}).map((part) => part.outerHTML.slice(0, 80))"""
"""What of the page is not in sight"""


@needs_chromium
def test_the_legend_is_whole_with_two_arms_and_a_message(
    page: Any, device: Any, artifacts: Path, monkeypatch: pytest.MonkeyPatch
):
    """At 1280 x 657, a laptop's window, it was cut."""
    monkeypatch.setattr(device, "_arms", 2)
    device.show(
        {"front": PICTURE, "wrist": PICTURE}, Status("human", "pick up the red cube", 1, 0, 7, 100, message=LET_GO)
    )
    chromium.wait(page, "return document.querySelector('.hilt').cockpit.view.arms === 2")
    for pad, keys in ((False, 22), (True, 13)):
        if pad:
            gamepad(page, [0, 0, 0, 0])
        chromium.wait(page, f"return document.querySelectorAll('.legend kbd').length === {keys}")
        for width, height in ((1280, 657), (1366, 625), (900, 700), (1280, 800), (1440, 900), (1920, 1080)):
            chromium.shape(page, width, height)
            chromium.wait(page, f"return innerHeight === {height}")
            assert page.execute_script(CUT) == [], (width, height, pad)
        chromium.shape(page, 1280, 657)
        page.save_screenshot(str(artifacts / f"legend{'-pad' * pad}.png"))
    page.execute_script("navigator.getGamepads = () => []")


@needs_chromium
def test_page_explains_keys_before_take_over(page: Any, device: Any):
    """They did nothing, and nothing said so."""
    chromium.key(page, "w", True)
    chromium.key(page, "w", False)
    chromium.wait(
        page, "return document.querySelector('.who').innerText.includes('move nothing yet: press Take over (T) first.')"
    )
    assert banner(page) == "The policy is in control" and page.find_elements("css selector", ".hilt.nudged .take")
    assert not device.read().motion.any()
    take_over(page, device)
    chromium.wait(page, "return !document.querySelector('.hilt.nudged')")
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    chromium.key(page, "w", False)
    assert "The arm moves while you hold a key" in page.find_element("css selector", ".who").text


@needs_chromium
def test_the_legend_of_a_gamepad(page: Any, device: Any):
    gamepad(page, [0, 0, 0, 0])
    legend = "return document.querySelector('.legend').innerText.replace(/\\s+/g, ' ')"
    chromium.wait(page, f"{legend}.includes('Take over Start')")
    said = page.execute_script(legend)
    for line in (
        "Move Left stick",
        "Up, down, turn Right stick",
        "Pitch, roll Cross",
        "Open, close LTRT",
        "Success A",
        "Fail B",
    ):
        assert line in said, said
    page.find_element("xpath", "//section[contains(@class, 'legend')]//button[text()='Keys']").click()
    chromium.wait(page, f"{legend}.includes('Forward, back WS')")
    page.find_element("xpath", "//section[contains(@class, 'legend')]//button[text()='Gamepad']").click()
    gamepad(page, [0, -1, 0, 0])
    chromium.wait(page, "return document.querySelector('.who').innerText.includes('move nothing yet')")
    page.execute_script("navigator.getGamepads = () => []")
    chromium.wait(page, f"{legend}.includes('Forward, back WS')")


@needs_chromium
def test_page_shows_how_an_episode_ended_and_what_to_release(page: Any, device: Any):
    for message, kept in (("Recorded: 1 of 2. Take over to begin.", True), ("Dropped, no success: 1 of 2.", False)):
        device.show({"front": PICTURE}, Status("none", message=message, gripper=(0.25,)))
        chromium.wait(page, f"return document.querySelector('.outcome{'.kept' if kept else ':not(.kept)'}')")
        assert page.find_element("css selector", ".outcome").text == message.partition(" Take")[0]
    assert page.find_element("css selector", ".gripper").text == "25% open"
    take_over(page, device)
    device.show({"front": PICTURE}, Status("human", message=LET_GO))
    chromium.wait(page, f"return document.querySelector('.who').innerText.includes({LET_GO!r})")


@needs_chromium
def test_a_second_viewer_watches(page: Any, device: Any, artifacts: Path):
    take_over(page, device)
    first = page.current_window_handle
    page.switch_to.new_window("window")
    chromium.open_page(page, device.url)
    chromium.wait(page, "return document.querySelector('.hilt').classList.contains('other')")
    assert banner(page) == "Somebody else drives" and view(page, "viewers") == 2
    for where, enabled in ((".take", False), (".success", False), (".fail", False), (".reset", False), (".stop", True)):
        assert page.find_element("css selector", where).is_enabled() == enabled
    page.save_screenshot(str(artifacts / "watching.png"))
    chromium.key(page, "t", True)
    chromium.key(page, "t", False)
    chromium.key(page, "w", True)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert not device.read().motion.any()
        time.sleep(0.01)
    chromium.key(page, "w", False)
    page.close()
    page.switch_to.window(first)


@needs_chromium
def test_another_tab_in_front_releases_the_keys(page: Any, device: Any):
    take_over(page, device)
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    page.get("about:blank")
    until(device, lambda reading: not reading.motion.any())
    page.close()
    page.switch_to.window(first)
    time.sleep(0.3)
    assert not device.read().motion.any()  # until it is pressed anew
    chromium.key(page, "w", False)


@needs_chromium
def test_a_frozen_browser_is_lost_and_comes_back_with_no_key_held(page: Any, device: Any):
    take_over(page, device)
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    with frozen(page):
        reading = until(device, lambda reading: reading.lost)
        assert reading.engaged and not reading.motion.any()
        time.sleep(2.5)  # longer than a page may stand still without letting go of its keys
    until(device, lambda reading: not reading.lost or view(page, "lost"))
    time.sleep(0.3)
    assert not device.read().motion.any()
    chromium.key(page, "w", False)


@contextlib.contextmanager
def frozen(browser: Any) -> Iterator[None]:
    """The browser draws nothing, hears nothing and says nothing, as when a computer stalls."""
    renderers = renderers_of(browser.service.process.pid)
    assert renderers
    for pid in renderers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in renderers:
            os.kill(pid, signal.SIGCONT)


def renderers_of(driver: int) -> list[int]:
    """The processes of this browser that run pages: descendants of its driver."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue

    def ours(pid: int) -> bool:
        return pid == driver or (pid in parents and ours(parents[pid]))

    return [pid for pid in found if ours(pid)]


@needs_chromium
def test_a_closed_tab_is_lost_until_somebody_lets_it_go_on(page: Any, device: Any, artifacts: Path):
    first = page.current_window_handle
    page.switch_to.new_window("window")
    chromium.open_page(page, device.url)
    take_over(page, device)
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    page.close()
    assert not until(device, lambda reading: reading.lost).motion.any()
    page.switch_to.window(first)
    device.show({"front": PICTURE, "wrist": PICTURE}, Status("none"))  # as TakeOver does while contact is lost
    chromium.wait(page, "return document.querySelector('.hilt.lost')?.cockpit.view.lost")
    assert device.read().lost and banner(page) == "Contact lost"
    page.save_screenshot(str(artifacts / "lost.png"))
    click(page, ".resume")
    assert not until(device, lambda reading: not reading.lost).engaged


@needs_chromium
def test_a_broken_connection_comes_back_to_the_same_seat(page: Any, device: Any):
    take_over(page, device)
    chromium.key(page, "w", True)
    until(device, lambda reading: reading.motion.any())
    page.execute_script(
        "const cockpit = document.querySelector('.hilt').cockpit; cockpit.socket.close(); cockpit.press('stop')"
    )
    pressed: list[str] = []  # without a connection, told with the next: before or after the arm was held
    until(device, lambda reading: pressed.extend(reading.events) or not reading.motion.any())
    chromium.key(page, "w", False)
    until(device, lambda reading: pressed.extend(reading.events) or "stop" in pressed)
    chromium.wait(
        page,
        "return document.querySelector('.hilt').cockpit.online && document.querySelector('.hilt').cockpit.view.driving",
    )
    reading = until(device, lambda reading: not reading.lost)
    assert reading.engaged and not reading.motion.any() and reading.events == ()


@needs_chromium
def test_pictures_go_on_after_a_broken_connection(page: Any, device: Any):
    """They stood still, with the age of new ones beside them, for as many messages
    as had come before the connection broke."""
    device.show({"front": np.zeros_like(PICTURE)}, Status("policy"))
    pixel = (
        "return document.querySelector('canvas[data-camera=front]')?.getContext('2d').getImageData(5, 5, 1, 1).data[0]"
    )
    chromium.wait(page, f"{pixel} < 20")
    chromium.wait(page, "return document.querySelector('.hilt').cockpit.seen > 20")
    page.execute_script("document.querySelector('.hilt').cockpit.socket.close()")
    chromium.wait(page, "return !document.querySelector('.hilt').cockpit.online")
    chromium.wait(
        page, "const cockpit = document.querySelector('.hilt').cockpit; return cockpit.online && cockpit.seen < 10"
    )
    device.show({"front": np.full_like(PICTURE, 255)}, Status("policy"))
    chromium.wait(page, f"{pixel} > 235 ? 'drawn' : document.querySelector('.hilt').cockpit.seen > 18 && 'not drawn'")
    assert page.execute_script(pixel) > 235


@needs_chromium
def test_the_plan_of_the_policy_is_drawn_in_the_picture(page: Any, device: Any, artifacts: Path):
    path = {"front": [[[0.1, 0.5], [0.5, 0.5], [0.9, 0.5]]]}
    plan = {"path": path, "path_done": 1, "confidence": 0.73, "episodes_left": 12}
    plan |= {"success_probability": 0.08, "alarm": True}
    device.show({"front": np.zeros_like(PICTURE), "wrist": PICTURE}, Status("policy", episode=4, step=3, **plan))
    brightest = """return ((canvas) => {
        const pixels = canvas.getContext("2d").getImageData(%s * canvas.width, canvas.height / 2 - 3, 1, 6).data;
        const rows = [0, 1, 2, 3, 4, 5].map((row) => [...pixels.slice(4 * row, 4 * row + 3)]);
        return rows.sort((one, other) => other[0] - one[0])[0];
    })(document.querySelector("canvas[data-camera=front]"))"""
    yellow = "return ((color) => color[0] > 120 && color[2] < color[0] / 2)(" + (brightest % 0.7)[7:] + ")"
    chromium.wait(page, yellow)  # where it will go
    behind = page.execute_script(brightest % 0.3)
    assert min(behind) > 20 and max(behind) - min(behind) < 20, "white, and thin, where it has been"
    facts = page.find_element("css selector", ".facts").text
    assert "73%" in facts and "4 / ≈16" in facts and "8%" in facts
    assert page.find_element("css selector", ".alarm .expected").text == "8%"
    page.save_screenshot(str(artifacts / "plan.png"))
    device.show({"front": np.zeros_like(PICTURE), "wrist": PICTURE}, Status("human", step=4))
    chromium.wait(page, brightest % 0.7 + "[0] < 20")
    assert "73%" not in page.find_element("css selector", ".facts").text


@needs_chromium
def test_a_phone_drives_two_arms_with_a_finger(page: Any, device: Any, artifacts: Path):
    class Dual:
        action_space = type("Space", (), {"shape": (14,)})

    device.attach(Dual)
    device.show(
        {"front": PICTURE, "left/wrist": PICTURE, "right/wrist": PICTURE},
        Status("human", "lift the tray with both arms", 12, 9, 41, 120),
    )
    chromium.shape(page, 360, 740)
    chromium.wait(page, "return document.querySelectorAll('.choice button').length > 3")
    take_over(page, device)
    width = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width == [360, 360]  # nothing to the right of the screen
    seen = (
        "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return box.top >= 0 && "
        "box.bottom <= innerHeight"
    )
    assert (
        page.execute_script(seen, ".stop") and page.execute_script(seen, ".take") and page.execute_script(seen, ".who")
    )
    page.save_screenshot(str(artifacts / "phone-dual.png"))
    chromium.key(page, "Tab", True)
    chromium.key(page, "Tab", False)
    assert not until(device, lambda reading: reading.arm == 1).motion.any()
    chromium.key(page, "e", True)
    assert until(device, lambda reading: reading.motion.any()).motion[2] == 1
    chromium.key(page, "e", False)
    page.find_element("xpath", "//button[text()='Left arm']").click()
    assert until(device, lambda reading: reading.arm == 0 and not reading.motion.any())
    page.find_element("xpath", "//button[text()='Right arm']").click()
    stick = page.find_element("css selector", ".stick")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", stick)
    box = page.execute_script(
        "const box = arguments[0].getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]",
        stick,
    )
    for kind, points in (("touchStart", [(0, 0)]), ("touchMove", [(-20, 0)]), ("touchMove", [(-55, 0)])):
        touches = [{"x": box[0] + x, "y": box[1] + y} for x, y in points]
        page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})
    reading = until(device, lambda reading: reading.motion[1] > 0.9)
    assert reading.arm == 1 and reading.motion[[0, 2, 3, 4, 5]] == pytest.approx(0, abs=0.01)
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    until(device, lambda reading: not reading.motion.any())
    page.find_element("xpath", "//button[text()='Left arm']").click()
    device._arms = 1


# The whole way: browser, page, device, take-over, simulator, log


class Driven(threading.Thread):
    """A control loop: a policy that moves the arm slowly to the right, over which a
    person may take. Every step goes to a log."""

    def __init__(self, device: Any, folder: Path):
        super().__init__()
        self.device, self.folder = device, folder
        self.ending = threading.Event()
        self.error: Exception | None = None
        self.poses: list[np.ndarray] = []

    def run(self) -> None:
        try:
            self.control()
        except Exception as error:
            self.error = error  # told by the test
            raise

    def control(self) -> None:
        from hilt.envs.tabletop.suite_env import TabletopEnv
        from hilt.replay import Schema
        from hilt.teleop.intervene import TakeOver

        env = TakeOver(TabletopEnv("pick", image_size=128, step_limit=2000), self.device)
        log = None
        try:
            observation, info = env.reset(seed=0, options={"split": "train", "state": 0})
            while not self.ending.is_set():
                began = time.monotonic()
                after, reward, terminated, truncated, info = env.step(np.array([0, -0.1, 0, 0, 0, 0, 0], np.float32))
                step = Step(
                    observation,
                    info["executed_action"],
                    np.float32(reward),
                    after,
                    terminated,
                    truncated,
                    Source(info["source"]),
                )
                if log is None:
                    own = ("observations", "actions", "rewards", "next_observations")
                    log = Log.create(self.folder, Schema.of({name: step.columns()[name] for name in own}))
                    episode = log.episode()
                episode.append(step.columns())
                observation = after
                self.poses.append(env.unwrapped.world.arm().pose)
                if terminated or truncated:
                    episode.end()
                    log.annotate(episode.trajectory, success=bool(info["succeed"]))
                    break
                time.sleep(max(0.0, 0.1 - (time.monotonic() - began)))
        finally:
            if log is not None:
                log.close()
            env.env.close()  # the device stays

    def moved(self, steps: int = 5, seconds: float = 120) -> np.ndarray:
        """How the arm moves over so many steps from now, in meters."""
        first, deadline = len(self.poses), time.monotonic() + seconds
        while len(self.poses) < first + steps:
            assert self.error is None and time.monotonic() < deadline, self.error
            time.sleep(0.02)
        return self.poses[-1][:3] - self.poses[first - 1][:3]


@needs_chromium
def test_a_person_takes_over_drives_gives_back_and_marks_success(
    page: Any, device: Any, tmp_path: Path, artifacts: Path
):
    loop = Driven(device, tmp_path / "log")
    loop.start()
    try:
        deadline = time.monotonic() + 120
        while not loop.poses:
            assert loop.error is None and time.monotonic() < deadline, loop.error
            time.sleep(0.05)
        chromium.wait(page, "return document.querySelector('.hilt').cockpit.cameras.length === 2")
        loop.moved(10)
        assert banner(page) == "The policy is in control"
        assert loop.moved()[1] < -0.005  # the policy's way
        page.save_screenshot(str(artifacts / "policy.png"))

        chromium.key(page, "t", True)
        chromium.key(page, "t", False)
        chromium.wait(page, "return document.querySelector('.hilt').classList.contains('mine')")
        assert banner(page) == "You are in control"
        loop.moved()
        assert np.abs(loop.moved()).max() < 0.004  # no key is held: it holds still
        for _ in range(10):  # a machine too busy to keep contact has it pressed again
            chromium.key(page, "w", True)
            loop.moved(2)
            if (moved := loop.moved())[0] > 0.03:
                break
            chromium.key(page, "w", False)
            time.sleep(0.5)
        page.save_screenshot(str(artifacts / "driving.png"))
        chromium.shape(page, 360, 740)
        page.save_screenshot(str(artifacts / "phone.png"))
        chromium.shape(page, 1280, 800)
        with frozen(page):  # with the key held
            loop.moved(5)
            assert np.abs(loop.moved(4)).max() < 0.004
        chromium.wait(page, "return document.querySelector('.hilt').className.match(/mine|lost/)")
        chromium.key(page, "w", False)
        if view(page, "lost"):
            click(page, ".take")
            chromium.wait(page, "return document.querySelector('.hilt').classList.contains('mine')")
        assert moved[0] > 0.03 and abs(moved[1]) < 0.01, moved

        click(page, ".take")  # which is to give back now
        chromium.wait(page, "return document.querySelector('.hilt').classList.contains('policy')")
        loop.moved(4)
        assert loop.moved()[1] < -0.005
        click(page, ".success")
        loop.join(60)
        assert not loop.is_alive() and loop.error is None
    finally:
        loop.ending.set()
        loop.join(60)

    with Log.open(tmp_path / "log", "r") as log:
        steps = log.read(log.trajectory_keys(log.trajectories()[0]), ["source", "actions", "rewards", "terminated"])
        source, actions = steps["source"], steps["actions"]
        assert log.facts.about(log.trajectories()[0])["success"] is True
    human = source == Source.HUMAN
    assert set(source.tolist()) == {Source.POLICY, Source.HUMAN} and human.sum() >= 15
    assert np.diff(human.astype(int)).tolist().count(1) == 1  # one intervention, and one only
    assert (actions[~human] == np.array([0, -0.1, 0, 0, 0, 0, 0], np.float32)).all()
    assert set(map(tuple, actions[human].tolist())) == {(0,) * 7, (1, 0, 0, 0, 0, 0, 0)}
    assert steps["terminated"].tolist() == [False] * (len(source) - 1) + [True] and steps["rewards"][-1] == 1


@needs_chromium
def test_an_episode_is_recorded_from_the_page(chrome: Any, tmp_path: Path):
    """`hilt record` with a device of its own, to its end: every step is the person's, whether a key is held or not."""
    with opened(tmp_path) as device:
        face(chrome, device)
        record_an_episode(chrome, device, tmp_path)


def record_an_episode(page: Any, device: Any, tmp_path: Path) -> None:
    from hilt.envs.tabletop.suite_env import TabletopEnv
    from hilt.recording.record import Settings, record

    results: list[Any] = []

    def control() -> None:
        env = TabletopEnv("pick", image_size=64)
        results.append(record(env, device, tmp_path / "run", Settings("tabletop/pick", episodes=1), videos=False))
        env.close()

    thread = threading.Thread(target=control)
    thread.start()
    try:
        chromium.wait(page, "return document.querySelector('.hilt').classList.contains('none')")
        assert banner(page) == "No one is in control"
        for _ in range(5):  # contact is lost where the machine stalls for two seconds, and the episode begins anew
            chromium.key(page, "t", True)
            chromium.key(page, "t", False)
            chromium.wait(page, "return document.querySelector('.hilt').cockpit.status.who === 'human'")
            chromium.key(page, "s", True)
            step = page.execute_script("return document.querySelector('.hilt').cockpit.status.step")
            chromium.wait(page, f"return document.querySelector('.hilt').cockpit.status.step > {step + 5}")
            chromium.key(page, "s", False)
            chromium.key(page, "Enter", True)
            chromium.key(page, "Enter", False)
            thread.join(30)
            if not thread.is_alive():
                break
    finally:
        if thread.is_alive():
            click(page, ".stop")
            thread.join(60)
    assert results and results[0].successes == 1
    chromium.wait(page, "return document.querySelector('.hilt').classList.contains('ended')")
    click(page, ".take")
    until(device, lambda reading: not reading.engaged)
    device.close()
    chromium.wait(page, "return !document.querySelector('.hilt').cockpit.online")
    assert page.find_element("css selector", ".who").text.split("\n") == [
        "Recording has ended: 1 of 1.",
        "You may close this page.",
    ]
    with Log.open(tmp_path / "run/log", "r") as log:
        steps = log.read(log.trajectory_keys(log.trajectories()[0]), ["source", "actions"])
    assert set(steps["source"].tolist()) == {Source.HUMAN}
    assert (-1, 0, 0, 0, 0, 0, 0) in set(map(tuple, steps["actions"].tolist()))
