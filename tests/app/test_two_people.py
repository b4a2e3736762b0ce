"""Two people with a browser each, and a command beside them: each sees the edits of the others, and none is lost."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

import hilt.cli
from hilt.app.episodes.episode_shelf import data_key
from hilt.formats.listing.episode_source import source_key
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log
from tests.app.opened import serving
from tests.teleop import chromium

LIST, ONE = "document.querySelector('.episodes')?.component", "document.querySelector('.episode')?.component"

pytestmark = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("two") / "log", 6, images=False)


@pytest.fixture(scope="module")
def browsers(chromium_tab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    other = chromium.start(tmp_path_factory.mktemp("bob"))
    yield [chromium_tab, other]
    other.quit()


@pytest.fixture(scope="module")
def served(log: Path) -> Iterator[Any]:
    """The app, which the last test kills."""
    with serving(log, state=log.parent / "state") as found:
        yield found


def open_as(browser: Any, served: Any, author: str) -> None:
    browser.get(served.url)
    chromium.wait(browser, "return document.querySelector('.hilt-nav')")
    browser.execute_script(f"localStorage.setItem('hilt-author', '{author}')")


def open_list(browser: Any, served: Any) -> None:
    browser.get(f"{served.base}/episodes")
    chromium.wait(browser, f"return {LIST}?.page?.matched === 6 && {LIST}.page.unread === 0")
    browser.execute_script("window.same = true")  # gone if the page is loaded again


def open_episode(browser: Any, served: Any, log: Path, number: int) -> None:
    place = {"data": data_key(log), "source": source_key(log), "number": number}
    browser.get(f"{served.base}/episode?{urlencode(place)}")
    chromium.wait(browser, f"return {ONE}?.episodes[0]?.row.number === {number}")
    browser.execute_script("window.same = true")


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def run(*words: object) -> None:
    result = CliRunner().invoke(hilt.cli.app, ["data", *map(str, words)])
    assert result.exit_code == 0, result.output


def history(log: Path) -> list[Any]:
    with Log.open(log, "r") as opened:
        return Edits(opened).history()


def test_two_people_and_a_command_see_each_other_and_lose_nothing(log: Path, served: Any, browsers: list[Any]):
    ann, bob = browsers
    open_as(ann, served, "ann")
    open_as(bob, served, "bob")
    open_list(ann, served)
    open_episode(bob, served, log, 0)
    press(ann, "j", "s")  # ann labels the episode that bob looks at
    seen = f"{ONE}.episodes[0].history.map((edit) => edit.author + ' ' + edit.action)"
    chromium.wait(bob, f"return {ONE}.episodes[0].row.success === true && {seen}.includes('ann label success')")
    assert "ann" in bob.find_element("css selector", ".history ol").text
    press(bob, "f")
    chromium.wait(ann, f"return {LIST}.page.rows[0].success === false")
    run("tag", log, "odd", "0", "--author", "eve")
    run("label", log, "0", "--mark", "grasp", "--step", "2", "--author", "eve")
    chromium.wait(ann, "return document.querySelector('.episodes td.tags')?.innerText.includes('odd')")
    chromium.wait(bob, f"return JSON.stringify({ONE}.marks) === '[[2,\"grasp\"]]'")
    assert ann.execute_script("return window.same") and bob.execute_script("return window.same")
    before = len(history(log))
    press(ann, *["s", "f"] * 10)
    press(bob, *["s", "f"] * 10)
    for step in range(5):
        run("label", log, "3", "--mark", "seen", "--step", step, "--author", "eve")
    for browser, page in ((ann, LIST), (bob, ONE)):
        browser.set_script_timeout(120)
        browser.execute_async_script(f"{page}.queue.then(arguments[0])")
        assert browser.execute_script(f"return {page}.error") == ""
    made = history(log)
    assert Counter(edit.author for edit in made[before:]) == {"ann": 20, "bob": 20, "eve": 5}
    assert [edit.number for edit in made] == list(range(1, len(made) + 1))


def test_label_survives_a_kill_of_the_app_right_after_its_tick(log: Path, served: Any, browsers: list[Any]):
    bob = browsers[1]
    open_as(bob, served, "bob")
    open_episode(bob, served, log, 5)
    press(bob, "e", "press the button", Keys.ENTER)
    status = "document.querySelector('.labels [role=status]')?.innerText"
    chromium.wait(bob, f"return {status}.startsWith('✓')")
    served.process.kill()
    assert served.process.wait(60) == -signal.SIGKILL
    press(bob, "s")
    alert = chromium.wait(bob, "return document.querySelector('.episode [role=alert]')?.innerText")
    assert "The server does not answer" in alert and bob.execute_script(f"return {status}") == ""
    last = history(log)[-1]
    assert (last.author, last.action) == ("bob", "instruction 'press the button'")
    with serving(log, state=log.parent / "state") as again:
        open_as(bob, again, "bob")
        open_episode(bob, again, log, 5)
        assert bob.execute_script(f"return {ONE}.episodes[0].row.instruction") == "press the button"
