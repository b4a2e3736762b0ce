"""The tab from which a person takes over a run: a real actor in simulation, the real app, and a real browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.app.run_library import id_of
from hilt.app.take_over_page import watching
from hilt.app.take_over_words import TAKE_OVER_WORDS
from hilt.core.trajectory import Source
from hilt.hil.operator_page import operator_pages
from hilt.replay import Log
from tests.app.operated_run import act_until_asked_to_end, operated
from tests.app.test_open_app import get, serving
from tests.app.test_run_library import make_run
from tests.effort import need
from tests.teleop import chromium

need("nicegui")
need("mujoco")
needs_chromium = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")
DEADLINE_S = 120.0
COCKPIT = "document.querySelector('.hilt').cockpit"
PAGE_JS = Path(__file__).parents[2] / "src/hilt/teleop/page.js"


def wait(ready: Any) -> Any:
    """What it returns, as soon as that is something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, fork: Any) -> Iterator[Any]:
    """A run whose actor can be started and ended."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "reach")
    config, processes = operated(), []

    def start() -> None:
        processes.append(fork.Process(target=act_until_asked_to_end, args=(config, folder)))
        processes[-1].start()
        wait(lambda: operator_pages(folder) or not processes[-1].is_alive())
        assert processes[-1].is_alive()

    def end(kill: bool = False) -> None:
        process = processes.pop()
        process.kill() if kill else process.terminate()
        process.join(DEADLINE_S)
        assert not process.is_alive()

    start()
    yield SimpleNamespace(folder=folder, id=id_of(folder), start=start, end=end, processes=processes)
    while processes:
        end(kill=True)


@pytest.fixture(scope="module")
def served(run: Any) -> Iterator[Any]:
    with serving(run.folder.parent) as found:
        yield found


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelectorAll('.hilt-table tbody tr').length === 1")
    return chromium_tab


def open_tab(chrome: Any, base: str, run: Any) -> None:
    chrome.get(f"{base}/take-over?id={run.id}")
    chromium.wait(
        chrome, f"return document.querySelector('.hilt')?.cockpit && {COCKPIT}.online && {COCKPIT}.age !== null"
    )


def human_steps(run: Any) -> np.ndarray:
    """Where the arm was in x at the steps that a person made, as the run's log has them."""
    with Log.open(run.folder / "log", "r") as log:
        read = log.read(log.all().keys(), ["source", "next_observations/state/tcp_pose"])
        poses: np.ndarray = read["next_observations"]["state"]["tcp_pose"]
        return poses[read["source"] == Source.HUMAN, 0]


@needs_chromium
def test_take_over_tab_drives_the_arm_of_a_running_actor(chrome: Any, served: Any, run: Any):
    chrome.get(f"{served.base}/run?id={run.id}")
    chromium.wait(chrome, "return document.querySelectorAll('.hilt-tab').length === 2")
    chrome.find_elements("css selector", ".hilt-tab")[1].click()
    chromium.wait(chrome, f"return document.querySelector('.hilt')?.cockpit && {COCKPIT}.age !== null")
    assert "front" in chrome.execute_script(f"return {COCKPIT}.cameras")
    chrome.find_element("css selector", ".hilt .take").click()
    chromium.wait(chrome, f"return {COCKPIT}.view.driving")
    chrome.execute_script(f"{COCKPIT}.facing = false")
    chromium.key(chrome, "w", True)
    try:
        wait(lambda: len(found := human_steps(run)) > 5 and found[-1] > found[0] + 0.02)
    finally:
        chromium.key(chrome, "w", False)
    chromium.key(chrome, "t", True), chromium.key(chrome, "t", False)
    chromium.wait(chrome, f"return !{COCKPIT}.view.taken")
    assert chrome.current_url.endswith("actor=actor-1"), "the keys of the app did not act besides"


@needs_chromium
@pytest.mark.parametrize("size", [(390, 664), (844, 390)])
def test_buttons_of_the_tab_lie_on_nothing_on_a_phone(chrome: Any, served: Any, run: Any, size: tuple[int, int]):
    chromium.shape(chrome, *size)
    try:
        open_tab(chrome, served.base, run)
        pictures, foot, tabs, tall = chrome.execute_script("""
            document.querySelector("h1").innerText = "a_long_name_".repeat(9);
            const box = (name) => document.querySelector(name).getBoundingClientRect();
            return [box(".hilt .cameras").bottom, box(".hilt footer").top, box(".hilt-tabs").height, innerHeight]
        """)
        assert pictures <= foot + 1 and foot < tall and tabs < 40, "the tabs take one row"
        assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        hits = chrome.execute_script("""
            return [...document.querySelectorAll(".hilt footer button")].filter((one) => one.offsetWidth).map((one) => {
              const box = one.getBoundingClientRect();
              return one.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2));
            })
        """)
        assert hits and all(hits)
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_chromium
def test_rewind_in_the_tab_restores_the_moment_and_begins_another_episode(chrome: Any, served: Any, run: Any):
    open_tab(chrome, served.base, run)
    episode = chrome.execute_script(f"return {COCKPIT}.status.episode")
    chrome.execute_script(f"{COCKPIT}.press('reset')")
    chromium.wait(chrome, f"return {COCKPIT}.status.episode > {episode} && {COCKPIT}.status.step > 12")
    chrome.find_element("css selector", ".hilt .pause").click()
    paused = f"{COCKPIT}.view.pausing && {COCKPIT}.status.who === 'none'"
    last = chromium.wait(chrome, f"return {paused} && {COCKPIT}.status.step")
    for _ in range(5):
        chromium.key(chrome, "ArrowLeft", True), chromium.key(chrome, "ArrowLeft", False)
    moment = last - 5
    chromium.wait(chrome, f"return {COCKPIT}.moment === {moment}")
    chrome.find_element("css selector", ".hilt .rewind .again.mine").click()
    chromium.wait(chrome, f"return {COCKPIT}.view.driving && {COCKPIT}.status.who === 'human'")
    chromium.key(chrome, "t", True), chromium.key(chrome, "t", False)
    chromium.wait(chrome, f"return !{COCKPIT}.view.taken")
    rewound, after = wait(lambda: rewound_episodes(run, last))
    assert rewound["truncated"][-1] and not rewound["truncated"][:-1].any()
    assert np.array_equal(rewound["poses"][moment], after["poses"][0]), "to the last bit"
    assert not after["truncated"][:3].any() and after["source"][0] == Source.HUMAN


def rewound_episodes(run: Any, steps: int) -> Any:
    """The episode that was rewound after so many steps, and the one that began at that moment."""
    with Log.open(run.folder / "log", "r") as log:
        numbers = log.trajectories()
        found = []
        for number in numbers[-2:]:
            read = log.read(log.trajectory_keys(number), ["source", "truncated", "observations/state/tcp_pose"])
            found.append({**read, "poses": read["observations"]["state"]["tcp_pose"]})
        return found if len(found) == 2 and len(found[0]["poses"]) == steps and len(found[1]["poses"]) > 3 else None


@needs_chromium
def test_take_over_tab_goes_away_and_comes_back_with_the_actor(chrome: Any, served: Any, run: Any):
    open_tab(chrome, served.base, run)
    run.end(kill=True)
    chromium.wait(chrome, f"return {COCKPIT}.mood === 'away'")
    assert "The actor is not running" in chrome.find_element("css selector", ".hilt .who").text
    assert (run.folder / "actors" / "actor-1" / "operator.json").exists() and not operator_pages(run.folder)
    chrome.execute_script(f"{COCKPIT}.press('stop')")  # meant for nobody, and not for the next actor
    chrome.switch_to.new_window("tab")
    chrome.get(f"{served.base}/run?id={run.id}")
    chromium.wait(chrome, "return document.querySelector('.hilt-curves') && !document.querySelector('.hilt-tab')")
    run.start()
    chromium.wait(chrome, "return document.querySelectorAll('.hilt-tab').length === 2")
    chrome.close()
    chrome.switch_to.window(chrome.window_handles[0])
    step = chromium.wait(chrome, f"return {COCKPIT}.online && {COCKPIT}.mood === 'policy' && {COCKPIT}.status.step")
    chromium.wait(chrome, f"return {COCKPIT}.status.step > {step}")
    assert chrome.execute_script(f"return {COCKPIT}.unsent.length") == 0


@needs_chromium
def test_take_over_tab_of_an_app_that_only_shows_gives_no_control(chrome: Any, served: Any, run: Any):
    with serving(run.folder.parent, "--view") as viewed:
        chrome.switch_to.new_window("tab")
        chrome.get(viewed.url)
        chromium.wait(chrome, "return document.querySelectorAll('.hilt-table tbody tr').length === 1")
        open_tab(chrome, viewed.base, run)
        assert not chrome.find_elements("css selector", ".hilt button")
        before = chrome.execute_script(f"return [{COCKPIT}.status.episode, {COCKPIT}.status.step]")
        chrome.execute_script(f"for (const event of ['take', 'reset', 'stop']) {COCKPIT}.press(event)")
        chromium.wait(chrome, f"return {COCKPIT}.status.step > {before[1] + 10}")
        taken, episode = chrome.execute_script(f"return [{COCKPIT}.view.taken, {COCKPIT}.status.episode]")
        assert not taken and episode == before[0] and len(operator_pages(run.folder)) == 1
        chrome.close()
        chrome.switch_to.window(chrome.window_handles[0])


def test_watching_passes_on_neither_presses_nor_what_is_held():
    assert watching('{"event": "stop", "number": 1, "episode": 0}') is None and watching("[]") is None
    named = json.loads(watching('{"viewer": "the name of a driver"}') or "")
    assert list(named) == ["viewer"] and len(named["viewer"]) == 32
    held = json.loads(watching('{"sent": 1.5, "seen": 3, "motion": [1, 1, 1, 1, 1, 1], "gripper": 1, "arm": 1}') or "")
    assert held == {"sent": 1.5, "seen": 3, "motion": [0.0] * 6, "gripper": 0, "arm": 0}


def test_drive_socket_is_closed_to_foreign_pages_and_strangers(served: Any, run: Any):
    from websockets.exceptions import ConnectionClosed, InvalidStatus
    from websockets.sync.client import connect

    cookie = get(served, f"/?token={served.token}")[2]["Set-Cookie"].partition(";")[0]
    place = f"127.0.0.1:{served.port}"
    address = f"ws://{place}/take-over/drive?id={run.id}"

    def knock(origin: str, **headers: str) -> Any:
        return connect(address, origin=origin, additional_headers=headers, proxy=None)  # type: ignore[arg-type]

    for origin, headers in (
        ("http://evil.example", {"Cookie": cookie}),
        (f"http://{place}", {}),
        (f"http://{place}", {"Cookie": cookie, "Host": "evil.example"}),
    ):
        with pytest.raises(InvalidStatus, match="403"), knock(origin, **headers):
            pass
    with knock(f"http://{place}", Cookie=cookie) as socket:
        socket.send(json.dumps({"viewer": "a"}))
        assert int.from_bytes(socket.recv(60)[:4], "little") > 0, "the page answers"
        socket.send("not of this page")
        with pytest.raises(ConnectionClosed, match="not a message of this page"):
            while True:
                socket.recv(60)


def test_words_of_the_take_over_page_are_complete_in_chinese():
    code = PAGE_JS.read_text()
    asked = set(re.findall(r"""\bw\("([^"]+)"|\bw\('([^']+)'""", code))
    texts = {first or second for first, second in asked}
    legends = re.findall(r"const (?:PAD_)?LEGEND = \[(.*?)\n\];", code, re.DOTALL)
    texts |= {text for legend in legends for text in re.findall(r'\["([^"]+)"', legend)} | {"Other arm"}
    texts |= {"Left stick", "Right stick", "Cross"}
    assert texts == {*TAKE_OVER_WORDS}
    for english, chinese in TAKE_OVER_WORDS.items():
        assert re.search(r"[\u4e00-\u9fff]", chinese)
        assert set(re.findall(r"{\w+}", english)) == set(re.findall(r"{\w+}", chinese))
