"""What a page does while somebody looks: it follows runs and logs, plays, labels, and refuses what it must not do.

One server and one browser for all of it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from hilt.app.episodes.episode_pages import KEYS, LIST_KEYS
from hilt.app.episodes.episode_shelf import data_key
from hilt.app.run_library import id_of
from hilt.app.words import Words
from hilt.formats.listing.episode_source import source_key
from hilt.replay import Log, Schema
from hilt.runs.folder import note_end
from tests.app.episode_samples import facts, make_log, trajectory
from tests.app.test_compare_page import evaluate
from tests.app.test_open_app import serving
from tests.app.test_run_commands import HOLD
from tests.app.test_run_library import make_run
from tests.teleop import chromium

LIST, ONE = "document.querySelector('.episodes')?.component", "document.querySelector('.episode')?.component"
ROWS = "[...document.querySelectorAll('.hilt-table tbody tr')]"
EPISODES = 60

pytestmark = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The app on two runs that were evaluated on the same states, a log, and a log of a policy that plans chunks."""
    folder = tmp_path_factory.mktemp("pages")
    make_log(folder / "many", EPISODES, images=False)
    rows = {
        "record": {"actions": np.arange(6 * 4 * 2, dtype=np.float32).reshape(6, 1, 4, 2)},
        "rewards": np.zeros((6, 1), np.float32),
    }
    with Log.create(folder / "chunks", Schema.of(rows, leading=2), durability="never") as log:
        log.add(rows)
    for name, good in (("one", 5), ("other", 15)):
        run = make_run(folder / name, 20)
        evaluate(run, 100, [number < good for number in range(20)])
        (run / "logs").mkdir()
        (run / "logs" / "learner.log").write_text("begun\n<b>not bold</b>\n")
    make_log(folder / "one" / "log", 1, images=False)
    videos = folder / "one" / "evaluations" / "test-100" / "videos"
    videos.mkdir()
    (videos / "state-3.mp4").write_bytes(b"no film, and the page shows its name")
    with serving(folder) as found:
        yield SimpleNamespace(**vars(found), many=folder / "many")


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    chromium_tab.set_window_size(1360, 1000)
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelector('.hilt-nav')")
    return chromium_tab


def press(chrome: Any, *keys: str) -> None:
    ActionChains(chrome).send_keys(*keys).perform()


def in_sight(chrome: Any, selector: str) -> Any:
    """Whether the first such element is within the window."""
    inside = "const {top, bottom} = document.querySelector(arguments[0]).getBoundingClientRect()"
    return chrome.execute_script(f"{inside}; return top >= 0 && bottom <= innerHeight", selector)


def stay(chrome: Any) -> None:
    """Remembers that the page was not loaded again."""
    chrome.execute_script("window.same = true")


def open_list(chrome: Any, base: str, log: Path, query: str = "") -> None:
    chrome.get(f"{base}/episodes?data={data_key(log)}{query}")
    chromium.wait(chrome, f"return {LIST}?.page && !{LIST}.page.opening && {LIST}.page.unread === 0")


def open_episode(chrome: Any, base: str, log: Path, number: int = 0) -> None:
    place = {"data": data_key(log), "source": source_key(log), "number": number}
    chrome.get(f"{base}/episode?{urlencode(place)}")
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === {number}")


def test_table_follows_runs_that_begin_stop_and_end(chrome: Any, served: Any):
    chrome.get(served.base)
    chromium.wait(chrome, f"return {ROWS}.length === 2 && {ROWS}.every((row) => row.innerText.includes('50%'))")
    stay(chrome)
    run = make_run(served.folder / "third")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            third = f"{ROWS}.find((row) => row.innerText.includes('third'))?.innerText"
            chromium.wait(chrome, f"return {third}?.includes('learning')")
            assert chrome.execute_script("return window.same")
            chrome.get(f"{served.base}/run?id={id_of(run)}")
            chromium.wait(chrome, "return document.querySelector('.hilt-do .hilt-button')")
            stay(chrome)
            stop = chrome.find_element("css selector", ".hilt-do")
            assert f"kill -INT {process.pid}" in stop.text
            stop.find_element("css selector", ".hilt-button").click()
            chromium.wait(chrome, "return document.querySelector('.q-dialog .hilt-button')")
            chrome.execute_script("document.querySelector('.q-dialog .hilt-button').click()")
            assert process.wait(60) in (1, -signal.SIGINT)
        finally:
            process.kill()
    chromium.wait(chrome, "return document.querySelector('.hilt-main').innerText.includes('died')")
    chromium.wait(chrome, "return document.querySelector('.to-logs').offsetParent !== null")
    chrome.find_element("css selector", ".to-logs").click()
    assert in_sight(chrome, ".hilt-logs h2")
    note_end(run, "goal", 20, "goal, after 20 updates")
    chromium.wait(chrome, "return document.querySelector('.hilt-main').innerText.includes('goal, after 20 updates')")
    assert chrome.execute_script("return window.same")


def test_run_page_shows_evaluations_videos_and_log_lines_as_they_come(chrome: Any, served: Any):
    run = served.folder / "one"
    chrome.get(f"{served.base}/run?id={id_of(run)}")
    main = "document.querySelector('.hilt-main').innerText"
    chromium.wait(chrome, f"return {main}.includes('<b>not bold</b>') && {main}.includes('50% [0%, 100%]')")
    video = chrome.find_element("css selector", ".hilt-films video")
    assert video.get_attribute("src").endswith("evaluations/test-100/videos/state-3.mp4")
    assert "test 100: state-3" in chrome.find_element("css selector", ".hilt-films figcaption").text
    with (run / "logs" / "learner.log").open("a") as log:
        log.write("error: the arm is gone\n")
    evaluate(run, 200, [True] * 20)
    chromium.wait(chrome, f"return {main}.includes('the arm is gone') && {main}.includes('200')")


def open_compare(chrome: Any, served: Any) -> None:
    query = urlencode([("id", id_of(served.folder / name)) for name in ("one", "other")])
    chrome.get(f"{served.base}/compare?{query}")
    chromium.wait(chrome, "return document.querySelector('.hilt-curves')?.curves?.charts.length > 3")


def test_choice_of_data_has_the_task_of_a_run(chrome: Any, served: Any):
    chrome.get(served.base)
    chromium.wait(chrome, f"return {ROWS}.length >= 2")  # the runs are known
    chrome.get(f"{served.base}/episodes")
    entry = "[...document.querySelectorAll('.episode-data li')].find((one) => /^one\\s/.test(one.innerText))"
    assert "tabletop/button" in chromium.wait(chrome, f"return {entry}?.innerText")


def test_compare_page_has_the_difference_of_success_with_its_interval(chrome: Any, served: Any):
    open_compare(chrome, served)
    text = chrome.find_element("css selector", ".hilt-main").text
    assert "Difference to one" in text and re.search(r"[+-]\d+% \[[+-]\d+%, [+-]\d+%\] \(test\)", text)


def test_cursor_has_the_values_of_every_curve_in_every_chart_with_the_run_it_is_of(chrome: Any, served: Any):
    open_compare(chrome, served)
    curves = "document.querySelector('.hilt-curves').curves"
    ActionChains(chrome).move_to_element(chrome.find_element("css selector", ".hilt-nav")).perform()  # no chart
    chrome.execute_script(
        "const drawn = CanvasRenderingContext2D.prototype, write = drawn.fillText; window.texts = [];"
        "drawn.fillText = function (...given) { window.texts.push(given[0]); return write.apply(this, given); };"
        f"{curves}.level = 0; {curves}.ask(true)"
    )
    chromium.wait(chrome, "return document.querySelector('.hilt-charts strong').innerText.includes('last 1 episodes')")
    chrome.execute_script(f"window.texts.length = 0; {curves}.cursor = 205")  # the last record before is the 10th
    legends = "[...document.querySelectorAll('.hilt-charts figure')].map((one) => one.innerText)"
    chromium.wait(chrome, f"return {legends}.some((text) => text.split('0.0909').length > 2)")
    shown = {text.partition("\n")[0]: text for text in chrome.execute_script(f"return {legends}")}
    loss = next(text for title, text in shown.items() if title.startswith("Critic loss"))
    assert re.search(r"one\W+0\.0909\W+other\W+0\.0909", loss) and len(shown) > 3
    written = "window.texts.filter((text) => String(text) === '{}').length"  # beside the cursor of each chart, too
    chromium.wait(chrome, f"return {written.format('0.0909')} >= 2 && {written.format('205')} >= {len(shown)}")
    chrome.execute_script(f"{curves}.zoom = [0, 1000]; {curves}.cursor = 900")  # behind the end of both
    chromium.wait(chrome, f"return {legends}.every((text) => !text.includes('0.0909'))")


def test_list_follows_a_log_that_grows_and_filters_by_date_and_fact(chrome: Any, served: Any):
    open_list(chrome, served.base, served.many)
    chromium.wait(chrome, f"return {LIST}.page.matched === {EPISODES}")
    stay(chrome)
    with Log.open(served.many, "a") as log:
        log.add(trajectory(7, 13, images=False), facts={**facts(7), "level": 77})
    chromium.wait(chrome, f"return {LIST}.page.matched === {EPISODES + 1}")
    assert chrome.execute_script("return window.same")
    press(chrome, "/")
    field = "document.activeElement === document.querySelector('.hilt-filter input')"
    chromium.wait(chrome, f"return {field}")
    press(chrome, "level=77 date>=2026-05-01 source=policy", Keys.ENTER)
    chromium.wait(chrome, f"return {LIST}.page.matched === 1 && {LIST}.page.rows[0].number === {EPISODES}")
    open_list(chrome, served.base, served.many, "&filter=success%3Dunknown")
    assert "No episode matches" in chrome.find_element("css selector", ".episodes .none").text
    order = {"task": "task", "length": "length", "return": "return", "success": "success", "human": "who"}
    order |= {"version": "version", "date": "date", "tags": "tags"}
    open_list(chrome, served.base, served.many)
    for sort, column in order.items():
        chrome.find_element("css selector", f"th.{column} button").click()
        chromium.wait(chrome, f"return {LIST}.sort === '{sort}' && document.querySelector('th.{column}').ariaSort")


def test_sixty_episodes_are_labeled_with_keys_alone(chrome: Any, served: Any):
    open_list(chrome, served.base, served.many)
    press(chrome, "j", *["s", "f"] * 25)
    press(chrome, "n")
    chromium.wait(
        chrome, f"return {LIST}.first === 50 && {LIST}.page.rows.length >= 10 && {LIST}.page.rows[0].number === 50"
    )
    press(chrome, "j", *["s", "f"] * 5)
    chrome.execute_async_script(f"{LIST}.queue.then(arguments[0])")
    assert chrome.execute_script(f"return {LIST}.error") == ""
    chrome.execute_script("scrollTo(0, document.body.scrollHeight)")  # what was saved is in sight at the last row too
    chromium.wait(
        chrome, "return document.querySelector('.episodes .top').innerText.includes('✓ Saved: label failure')"
    )
    assert in_sight(chrome, ".episodes .top")
    with Log.open(served.many, "r") as log:
        assert [log.facts.about(number)["success"] for number in range(60)] == [True, False] * 30


def test_episode_is_deleted_and_brought_back(chrome: Any, served: Any):
    open_episode(chrome, served.base, served.many, 9)
    [button] = [one for one in chrome.find_elements("css selector", ".labels button") if one.text == "Delete"]
    button.click()
    chromium.wait(
        chrome, "return document.querySelector('[role=alertdialog]')?.innerText.includes('Delete this episode')"
    )
    press(chrome, Keys.ENTER)
    alert = chromium.wait(chrome, "return document.querySelector('.episode [role=alert]')?.innerText")
    assert "This episode is deleted" in alert
    with Log.open(served.many, "r") as log:
        assert 9 not in log.trajectories()
    press(chrome, "z")
    chromium.wait(chrome, "return !document.querySelector('.episode [role=alert]')")
    with Log.open(served.many, "r") as log:
        assert 9 in log.trajectories()


def test_episode_loops_in_a_range_backwards_and_faster(chrome: Any, served: Any):
    open_episode(chrome, served.base, served.many, 20)
    press(chrome, *[Keys.ARROW_RIGHT] * 4, "i", *[Keys.ARROW_RIGHT] * 3, "o")
    chromium.wait(chrome, f"return {ONE}.into === 4 && {ONE}.out === 7")
    chrome.execute_script(
        f"window.seen = []; const one = {ONE}; one.$watch('step', (step) => window.seen.push(step), {{flush: 'sync'}})"
    )
    press(chrome, "l", "l")
    chromium.wait(chrome, f"return {ONE}.playing === 2 && window.seen.filter((step) => step === 4).length >= 2")
    press(chrome, "k", "j")
    chromium.wait(chrome, f"return {ONE}.playing === -1 && window.seen.length > 12")
    press(chrome, "k")
    assert {*chrome.execute_script("return window.seen")} <= {4, 5, 6, 7}, "it stays in the range"
    chrome.execute_script("document.querySelector('.transport input[type=checkbox]').click()")
    press(chrome, "l")
    chromium.wait(chrome, f"return !{ONE}.playing && {ONE}.step === 7")
    lanes = "document.querySelectorAll('.lane').length"
    before = chrome.execute_script(f"return {lanes}")
    chrome.find_element("css selector", ".numbers input:checked").click()
    chromium.wait(chrome, f"return {lanes} === {before - 1}")


def test_episode_of_a_policy_with_chunks_draws_the_plan_at_the_cursor(chrome: Any, served: Any):
    open_episode(chrome, served.base, served.folder / "chunks")
    pixels = (
        "const canvas = [...document.querySelectorAll('.lane.chunk canvas')][0];"
        "return canvas?.width && [...canvas.getContext('2d').getImageData(0, 0, canvas.width, 70).data].join()"
    )
    first = chromium.wait(chrome, pixels)
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    chromium.wait(chrome, f"return {ONE}.step === 2")
    assert any(value != "0" for value in first.split(",")) and chrome.execute_script(pixels) != first


def test_help_lists_every_key_in_both_languages(chrome: Any, served: Any):
    for language, other in (("en", "zh"), ("zh", "en")):
        words = Words(language)
        for opened, keys in ((open_list, LIST_KEYS), (open_episode, KEYS)):
            opened(chrome, served.base, served.many)
            for box in chrome.find_elements("css selector", "td.number input")[:1]:
                box.click()  # the key works from there too
            press(chrome, "?")
            shown = chromium.wait(
                chrome, "const help = document.querySelector('.hilt-help'); return help.open && help.innerText"
            )
            for key, text in keys:
                assert key in shown and words(text) in shown, (language, key)
        if other == "zh":
            press(chrome, "?")
            chrome.find_element("css selector", ".hilt-language").click()
            chromium.wait(chrome, "return document.documentElement.lang === 'zh'")
    chrome.delete_cookie("hilt-language")


def test_edit_from_a_foreign_page_is_refused(chrome: Any, served: Any):
    """A page of another origin, in the browser that has the cookie, tries to label an episode."""
    with Log.open(served.many, "r") as log:
        before = len(log.facts.edits.edits)
    chrome.get(served.url)  # the cookie of this server
    body = json.dumps({"data": data_key(served.many), "source": source_key(served.many), "number": 0, "action": "bad"})
    chrome.get("data:text/html,<title>foreign</title>")
    script = (
        "fetch(arguments[0], {method: 'POST', body: arguments[1], credentials: 'include', mode: 'no-cors'})"
        ".then((one) => arguments[2](one.type), (error) => arguments[2](String(error)))"
    )
    assert chrome.execute_async_script(script, f"{served.base}/episodes/edit", body) in (
        "opaque",
        "TypeError: Failed to fetch",
    )
    with Log.open(served.many, "r") as log:
        assert len(log.facts.edits.edits) == before and "bad" not in log.facts.about(0)
