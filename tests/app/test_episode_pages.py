"""The pages of episodes in a real browser: the list with its filters, and one episode with its frames and numbers.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from typer.testing import CliRunner

import hilt.cli
from hilt.formats.convert import convert
from hilt.replay import Edits, Log
from tests.app.episode_samples import facts, make_log, trajectory
from tests.app.opened import serving
from tests.teleop import chromium

NASTY = "<img src=x onerror=alert(1)>"
LIST, ONE = "document.querySelector('.episodes')?.component", "document.querySelector('.episode')?.component"

pytestmark = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`hilt open` on a log of 60 episodes, on a copy of a few of them in LeRobot's format, and on a damaged log."""
    folder = tmp_path_factory.mktemp("data")
    log, few = folder / "pick", make_log(folder / "few", 4)
    make_log(log, 8)
    with Log.open(log, "a") as opened:
        for episode in range(8, 60):
            opened.add(trajectory(episode % 8, 6 + episode % 8), facts={**facts(episode % 8), "task": "more"})
        opened.annotate(4, language_instruction=NASTY)
    convert(few, folder / "lerobot", to="lerobot", fps=10, codec="h264")
    make_log(folder / "damaged", 1)
    (folder / "damaged/log.json").write_text("{")
    with serving(folder, state=folder / "state") as found:
        yield SimpleNamespace(**vars(found), log=log, links={})


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    chromium_tab.set_window_size(1360, 1000)
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelector('.hilt-nav')")
    return chromium_tab


def open_list(chrome: Any, served: Any, name: str, query: str = "") -> None:
    """Opens the list of the data of this name, by the link that the choice of data has, which is looked up once."""
    if name not in served.links:
        chrome.get(served.base + "/episodes")
        link = f"[...document.querySelectorAll('.episode-data a')].find((one) => one.innerText.startsWith('{name}'))"
        served.links[name] = chromium.wait(chrome, f"return {link}?.href")
    chrome.get(served.links[name] + query)
    chromium.wait(chrome, f"return {LIST}?.page && !{LIST}.page.opening")


def numbers(chrome: Any) -> list[str]:
    return [cell.text for cell in chrome.find_elements("css selector", ".episodes td.number a")]


def press(chrome: Any, *keys: str) -> None:
    for key in keys:
        ActionChains(chrome).send_keys(key).perform()


def wait_for_rows(chrome: Any, matched: int) -> None:
    """Waits until the list shows as many, all of which were read; the rows below the screen are drawn last."""
    chromium.wait(chrome, f"return {LIST}.page.matched === {matched} && {LIST}.page.unread === 0")
    chromium.wait(chrome, f"return {LIST}.drawn === {LIST}.count")


def test_list_filters_sorts_pages_and_shows_text_as_text(chrome: Any, served: Any, artifacts: Path):
    open_list(chrome, served, "pick")
    wait_for_rows(chrome, 60)
    asked = "performance.getEntriesByType('resource').map((one) => one.name).filter((name) => name.includes('/list?'))"
    first, *later = chrome.execute_script(f"return {asked}")
    assert "&count=50" in first and "sort=" not in first, "the page asks before the script of the list is there"
    assert all("sort=number" in name for name in later) and len(numbers(chrome)) == 50
    shown = chrome.find_element("css selector", ".episodes").text
    assert "60 of 60 episodes" in shown and NASTY in shown and "1 to 50 of 60" in shown
    assert not chrome.find_elements("css selector", ".episodes img:not([src*='/episodes/frame'])")
    press(chrome, "n")
    chromium.wait(chrome, f"return {LIST}.page.rows.length === 10")
    chrome.find_element("css selector", ".filters select").send_keys("pick")
    chromium.wait(chrome, f"return {LIST}.page.matched === 4")
    field = chrome.find_element("css selector", ".hilt-filter input")
    field.send_keys(" success=true steps>=7", Keys.ENTER)
    chromium.wait(chrome, f"return {LIST}.page.matched === 2")
    assert numbers(chrome) == ["1", "5"] and "filter=task%3Dpick+success%3Dtrue" in chrome.current_url
    cells = "[...document.querySelectorAll('td.version')].map((one) => one.innerText)"
    assert chrome.execute_script(f"return {cells}") == ["v10", "v50"]
    chrome.find_element("css selector", "th.length button").click()
    chromium.wait(chrome, f"return {LIST}.page.rows[0]?.number === 5")
    frames = "[...document.querySelectorAll('.episodes td.frames img')]"
    chromium.wait(chrome, f"return {frames}.every((one) => one.complete && one.naturalHeight === 48)")
    chrome.save_screenshot(str(artifacts / "episodes.png"))
    field.clear()
    field.send_keys("sucess=true", Keys.ENTER)
    assert "did you mean 'success'" in chromium.wait(chrome, "return document.querySelector('[role=alert]')?.innerText")


def test_policy_versions_are_short_numbers_that_count_from_the_start_of_a_run(chrome: Any, served: Any):
    open_list(chrome, served, "pick")
    for first, last, per, shown in (
        (1200, 1250, 0, "v1,200-1,250"),
        (1_001_250, 1_001_250, 1_000_000, "v1,250"),
        (2_000_003, 2_000_017, 1_000_000, "v3-17 (start 2)"),
        (1_001_249, 2_000_003, 1_000_000, "v1,249 - v3 (start 2)"),
        (None, None, 0, ""),
    ):
        row = {"first_version": first, "version": last, "versions_per_start": per}
        assert chrome.execute_script(f"return {LIST}.versions({json.dumps(row)})") == shown


def test_list_saves_a_view_and_shows_the_command_that_exports_it(chrome: Any, served: Any, tmp_path: Path):
    open_list(chrome, served, "pick", "&filter=success%3Dfalse+task%3Dpick")
    chromium.wait(chrome, f"return {LIST}.page.matched === 2")
    chrome.find_element("css selector", ".views form input").send_keys("failed picks", Keys.ENTER)
    chromium.wait(chrome, "return document.querySelector('.views .view')?.innerText.includes('failed picks')")
    open_list(chrome, served, "pick")
    chrome.find_element("css selector", ".views .view button").click()
    chromium.wait(chrome, f"return {LIST}.page.matched === 2")
    chrome.find_element("css selector", ".views [aria-expanded]").click()
    command = chromium.wait(chrome, "return document.querySelector('.export code')?.innerText")
    assert command.endswith(f"{served.log}-lerobot --to lerobot --where 'success=false task=pick'")
    assert "what the filter shows (2 episodes)" in chrome.find_element("css selector", ".export label").text
    where = chrome.find_element("css selector", ".export .where code").text
    chrome.find_element("css selector", ".filters .clear").click()
    chromium.wait(chrome, f"return {LIST}.filter === '' && {LIST}.page.matched > 2")
    assert not chrome.find_elements("css selector", ".filters .clear")
    chrome.find_element("css selector", ".views .view button").click()
    chromium.wait(chrome, f"return {LIST}.page.matched === 2")
    assert where == f"hilt data tag {served.log} chosen --dry-run --where 'success=false task=pick'"
    result = CliRunner().invoke(hilt.cli.app, shlex.split(where)[1:])
    assert result.output == "would be: tag chosen: 2 episodes (0, 4)\n"
    Select(chrome.find_element("css selector", ".export select")).select_by_visible_text("robomimic")
    chromium.wait(chrome, "return document.querySelector('.export code').innerText.includes('--to robomimic')")
    chrome.find_element("css selector", ".export .run").click()
    chromium.wait(chrome, f"return {LIST}.started?.code === 0 && {LIST}.output.includes('exit code 0')")
    made = served.log.with_name(f"{served.log.name}-robomimic").rename(tmp_path / "made")  # no other test lists it
    written = convert(made, tmp_path / "log")
    assert written.episodes == 2 and written.failures == 2
    body = f"JSON.stringify({{data: {LIST}.data, command: 'hilt data delete {served.log} 0'}})"
    posted = f"fetch('/episodes/run', {{method: 'POST', body: {body}}}).then((answer) => answer.json())"
    assert "Open the export once more" in chrome.execute_script(f"return {posted}")["error"]


def test_episode_plays_steps_and_shows_the_row_under_the_cursor(chrome: Any, served: Any, artifacts: Path):
    open_list(chrome, served, "pick", "&filter=source%3Dhuman")
    chromium.wait(chrome, f"return {LIST}.page.rows[1]?.number === 3")
    press(chrome, "j", "j", Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.cameras.every((one) => one.shown === 0)")
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, ".", ".")
    chromium.wait(chrome, f"return {ONE}.step === 3 && {ONE}.episodes[0].cameras.every((one) => one.shown === 3)")
    shown = chrome.find_element("css selector", ".numbers").text
    for value in trajectory(3, 9)["observations"]["state"][3, 0]:
        assert str(np.float32(value)).removesuffix(".0") in shown
    pixel = "return [...document.querySelector('.episode canvas').getContext('2d').getImageData(5, 20, 1, 1).data]"
    assert abs(chrome.execute_script(pixel)[0] - 8 * 3) <= 3  # the band of the step, after JPEG
    press(chrome, Keys.END)
    chromium.wait(chrome, f"return {ONE}.step === 9 && {ONE}.episodes[0].cameras.every((one) => one.shown === 9)")
    press(chrome, Keys.HOME, " ")
    chromium.wait(chrome, f"return {ONE}.playing && {ONE}.step > 3")
    press(chrome, "k")
    assert chrome.execute_script(f"return {ONE}.playing") == 0
    assert chrome.find_element("css selector", ".head .version").text == "v30"
    lanes = chrome.execute_script(f"return {ONE}.shownLanes({ONE}.episodes[0]).map((lane) => lane.name)")
    assert lanes[:2] == ["who", "rewards"] and "actions" in lanes and "latency" in lanes
    timeline = chrome.find_element("css selector", ".timeline .lane canvas")
    ActionChains(chrome).move_to_element_with_offset(timeline, 0, 0).click().perform()
    chromium.wait(chrome, f"return {ONE}.step >= 4 && {ONE}.step <= 5")
    chrome.save_screenshot(str(artifacts / "episode.png"))
    press(chrome, Keys.ARROW_DOWN)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 6")
    camera = f"{ONE}.episodes[0].cameras[0]"  # after a jump, frames ahead wait a moment for the next one
    assert chrome.execute_script(f"{camera}.show(0, 1); {camera}.show(12, -1); return !!{camera}.resting")
    chromium.wait(chrome, f"return !{camera}.resting && {camera}.shown === 12 && {camera}.images.has(11)")


def test_episodes_of_a_lerobot_video_side_by_side_in_step(chrome: Any, served: Any, artifacts: Path):
    open_list(chrome, served, "lerobot")
    wait_for_rows(chrome, 4)
    press(chrome, "j", "x", "j", "j", "j", "x")
    chromium.wait(chrome, f"return {LIST}.chosen.size === 2")
    assert not chrome.find_elements("css selector", ".selection .delete"), "a dataset of another system is not edited"
    [button] = [one for one in chrome.find_elements("css selector", ".views > .hilt-button") if "side" in one.text]
    button.click()
    chromium.wait(chrome, f"return {ONE}?.episodes.length === 2")
    chrome.execute_script(f"{ONE}.seek(4)")
    every = (
        f"{ONE}.episodes.every((one) => one.cameras.length === 2 && one.cameras.every((camera) => camera.shown === 4))"
    )
    chromium.wait(chrome, f"return {every}")
    pixels = chrome.execute_script(
        "return [...document.querySelectorAll('.episode section')].map((one) => "
        "[...one.querySelector('canvas').getContext('2d').getImageData(5, 5, 1, 1).data])"
    )
    assert [round(pixel[0] / 20) for pixel in pixels] == [0, 3]  # the bands of the episodes
    assert "cannot be edited here" in chrome.find_element("css selector", ".facts").text
    chrome.save_screenshot(str(artifacts / "side-by-side.png"))


def test_episodes_are_labeled_trimmed_and_undone_with_keys_alone(chrome: Any, served: Any, artifacts: Path):
    open_list(chrome, served, "few")
    wait_for_rows(chrome, 4)
    press(chrome, "j", "f", "s", "b")  # episode 0 fails, 1 succeeds, 2 is bad
    chromium.wait(chrome, "return document.querySelector('.episodes').innerText.includes('✓ Saved: mark as bad')")
    with Log.open(served.log.parent / "few", "r") as log:
        assert log.facts.about(0)["success"] is False and log.facts.about(1)["success"] is True
        assert log.facts.about(2)["bad"] and 2 not in log.all().trajectories()
    press(chrome, "z")
    chromium.wait(
        chrome, "return document.querySelector('.episodes').innerText.includes('Undone: mark as bad (episode 2)')"
    )
    chromium.wait(chrome, f"return {LIST}.page.rows.length === 4 && {LIST}.page.rows[{LIST}.at]?.number === 3")
    press(chrome, Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 3")
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "i", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    chrome.find_element("css selector", ".range button:nth-of-type(2)").click()  # up to here
    assert "steps 2 to 4 ×" in chrome.find_element("css selector", ".range").text
    assert "step 4 (of 0 to 8)" in chrome.find_element("css selector", ".clock").text
    press(chrome, "c")
    ticked(chrome, "trim 2 to 4 · Attention: a step with reward was cut away · Attention: the end of the episode")
    chromium.wait(chrome, f"return {ONE}.episodes[0]?.lanes.steps === 3")
    chromium.wait(chrome, f"return {ONE}.episodes[0].cameras.every((one) => one.shown === {ONE}.step)")
    pixel = "return [...document.querySelector('.episode canvas').getContext('2d').getImageData(5, 20, 1, 1).data]"
    step = chrome.execute_script(f"return {ONE}.step")
    assert abs(chrome.execute_script(pixel)[0] - 8 * (step + 2)) <= 3  # the frame that was recorded two steps later
    press(chrome, "m", "t", "slow", Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}.episodes[0]?.row.tags.includes('slow')")
    assert "trim 2 to 4" in chrome.find_element("css selector", ".history").text
    chrome.save_screenshot(str(artifacts / "labels.png"))
    press(chrome, "z", "z", "z")
    chromium.wait(chrome, f"return {ONE}.episodes[0]?.lanes.steps === 9")
    ticked(chrome, "Undone: trim 2 to 4 (episode 3)")
    with Log.open(served.log.parent / "few", "r") as log:
        assert len(log.trajectory_keys(3)) == 9 and not log.facts.about(3).get("tags")


def test_reward_instruction_unmark_split_and_join_with_keys_alone(chrome: Any, served: Any, artifacts: Path):
    few = served.log.parent / "few"
    open_list(chrome, served, "few")
    wait_for_rows(chrome, 4)
    with Log.open(few, "r") as log:
        made = len(Edits(log).history())
    press(chrome, "j", Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 0")
    chrome.execute_script("document.querySelector('.history input').value = 'ann'")
    chrome.execute_script("document.querySelector('.history input').dispatchEvent(new Event('input'))")
    chrome.execute_script(f"{ONE}.keep()")
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "r", "0.25", Keys.ENTER)
    ticked(chrome, "reward 0.25 at step 2")
    press(chrome, "e", "lift <b>it</b>", Keys.ENTER)
    ticked(chrome, "instruction 'lift <b>it</b>'")
    press(chrome, "m")
    ticked(chrome, "mark grasp at step 2")
    press(chrome, Keys.ARROW_RIGHT, "m")
    ticked(chrome, "mark grasp at step 3")
    press(chrome, "n")
    ticked(chrome, "unmark grasp at step 3")
    press(chrome, "r", "much", Keys.ENTER)
    assert "expected a number" in chromium.wait(chrome, "return document.querySelector('[role=alert]')?.innerText")
    chrome.save_screenshot(str(artifacts / "more-labels.png"))
    press(chrome, "x")
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 4 && {ONE}.episodes[0].lanes.steps === 2")
    ticked(chrome, "split at grasp")
    press(chrome, "z")  # undoing it shows the episode again
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 0 && {ONE}.episodes[0].lanes.steps === 6")
    press(chrome, "x")
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 6 && {ONE}.episodes[0].following?.number === 7")
    press(chrome, "a", Keys.ESCAPE, "a")
    asked = chromium.wait(chrome, "return document.querySelector('[role=alertdialog]')?.innerText")
    assert asked.startswith("Join with episode 7 of 4 steps, the next that was recorded? (")
    press(chrome, Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 8 && {ONE}.episodes[0].lanes.steps === 6")
    ticked(chrome, "join 6, 7")
    said = CliRunner().invoke(hilt.cli.app, ["data", "history", str(few)], env={"COLUMNS": "200"}).output
    mine = [line for line in said.splitlines() if "ann" in line]
    for action in ("reward 0.25 at step 2", "instruction 'lift", "unmark grasp", "split at grasp", "join 6, 7"):
        assert any(action in line for line in mine), action
    with Log.open(few, "r") as log:
        assert len(Edits(log).history()) >= made + 8 and log.trajectories() == [1, 2, 3, 8]
        drawn = log.all().only([8]).sample(300, keys=["rewards", "terminated", "truncated"])
        rewards = dict(zip(drawn.steps.tolist(), drawn["rewards"].tolist(), strict=True))
        assert rewards == {(8 << 32) + step: 0.25 if step == 2 else 0.0 for step in range(6)}
        assert log.facts.about(8)["language_instruction"] == "lift <b>it</b>"


def test_undo_reaches_an_episode_that_has_left_the_filtered_list(chrome: Any, served: Any):
    chrome.execute_script("sessionStorage.clear()")
    open_list(chrome, served, "pick", "&filter=success%3Dfalse+task%3Dplace")
    wait_for_rows(chrome, 2)
    press(chrome, "z")
    chromium.wait(chrome, f"return {LIST}.done.startsWith('Nothing to undo')")
    press(chrome, Keys.ARROW_DOWN, Keys.ENTER)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 2")
    places = "[...document.querySelectorAll('.labels button')].map((one) => Math.round(one.getBoundingClientRect().x))"
    before = chrome.execute_script(f"return {places}")
    press(chrome, "s")
    ticked(chrome, "label success")
    press(chrome, Keys.ARROW_RIGHT)
    assert chrome.execute_script(f"return {places}") == before, "no button moves under the mouse"
    press(chrome, Keys.ARROW_DOWN)
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 6")
    press(chrome, "z")
    ticked(chrome, "Undone: label success (episode 2)")
    assert "number=2" in chrome.find_element("css selector", ".labels a").get_attribute("href")
    press(chrome, "z")
    shown = "document.querySelector('.labels [role=status]').innerText"
    chromium.wait(chrome, f"return {shown}.startsWith('Nothing to undo')")
    with Log.open(served.log, "r") as log:
        assert log.facts.about(2)["success"] is False
    open_list(chrome, served, "pick")
    legend = chrome.find_element("css selector", ".legend").text.split()
    assert legend[-5:] == ["Who", "acted:", "policy", "person", "demonstration"]
    chrome.find_element("css selector", ".quick-filter").click()
    chromium.wait(
        chrome, f"return {LIST}.filter === 'source=human' && {LIST}.page.rows.every((row) => row.sources.human)"
    )
    chrome.find_element("css selector", ".hilt-filter input").send_keys(Keys.ESCAPE)
    assert chrome.execute_script("return document.activeElement === document.body")


def test_many_episodes_are_selected_and_edited_at_once_and_undone_as_one(chrome: Any, served: Any, artifacts: Path):
    open_list(chrome, served, "pick", "&filter=task%3Dmore")
    wait_for_rows(chrome, 52)
    boxes = chrome.find_elements("css selector", "td.number input")
    boxes[1].click()
    ActionChains(chrome).key_down(Keys.SHIFT).click(boxes[4]).key_up(Keys.SHIFT).perform()
    boxes[2].click()
    assert "3 selected" in chrome.find_element("css selector", ".selection").text
    press(chrome, "t", "odd", Keys.ENTER)
    done_in_list(chrome, "Saved: tag odd (3 episodes)")
    chrome.find_element("css selector", ".selection .in-terminal").click()
    commands = "[...document.querySelectorAll('.selection code')].map((one) => one.innerText)"
    chromium.wait(chrome, f"return {commands}.includes('hilt data label {served.log} 9,11-12 --bad')")
    chrome.find_element("css selector", ".views [aria-expanded]").click()  # exports what is selected
    exported = "document.querySelector('.export')?.innerText"
    chromium.wait(chrome, f"return {exported}?.includes('-o trajectories=9,11-12')")
    chromium.wait(chrome, f"return {exported}.includes('hilt data tag {served.log} chosen 9,11-12 --dry-run')")
    assert "the selected episodes (3)" in chrome.execute_script(f"return {exported}")
    chrome.find_element("css selector", ".selection .unselect").click()  # and without any, what the filter shows
    chromium.wait(chrome, f"return {exported}.includes('--to lerobot --where task=more')")
    assert "what the filter shows (52 episodes)" in chrome.execute_script(f"return {exported}")
    chrome.find_element("css selector", ".views [aria-expanded]").click()
    chrome.save_screenshot(str(artifacts / "selection.png"))
    press(chrome, "a")  # also those of the other page
    chromium.wait(chrome, f"return {LIST}.chosen.size === 52")
    chromium.wait(chrome, f"return {commands}.includes('hilt data delete {served.log} --where task=more')")
    press(chrome, "b")
    done_in_list(chrome, "Saved: mark as bad (52 episodes)")
    chromium.wait(chrome, f"return {LIST}.page.matched === 0")
    press(chrome, "z")
    done_in_list(chrome, "Undone: mark as bad (52 episodes)")
    chromium.wait(chrome, f"return {LIST}.page.matched === 52")
    press(chrome, Keys.ESCAPE)
    chrome.find_element("css selector", "th.number input").click()
    chromium.wait(chrome, f"return {LIST}.chosen.size === 50")
    press(chrome, Keys.DELETE)
    asked = chromium.wait(chrome, "return document.querySelector('.selection [role=alertdialog]')?.innerText")
    assert asked.startswith("Delete 50 episodes? Undo brings them back.")
    press(chrome, Keys.ENTER)
    done_in_list(chrome, "Saved: delete (50 episodes)")
    chromium.wait(chrome, f"return {LIST}.page.matched === 2 && !{LIST}.chosen.size")
    chrome.find_element("css selector", "td.task a").click()  # undone from the page of an episode, too
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 58")
    press(chrome, "z")
    ticked(chrome, "Undone: delete (50 episodes)")
    press(chrome, "z")
    ticked(chrome, "Undone: tag odd (3 episodes)")
    with Log.open(served.log, "r") as log:
        assert len(log.trajectories()) == 60 and not log.facts.about(9).get("tags")
        made = [(edit.action, len(edit.episodes)) for edit in Edits(log).history() if edit.undoes is None][-3:]
        assert made == [("tag odd", 3), ("mark as bad", 52), ("delete", 50)]


def done_in_list(chrome: Any, text: str) -> None:
    chromium.wait(chrome, f"return {LIST}.done === {json.dumps('✓ ' + text)}")


def ticked(chrome: Any, action: str) -> None:
    """Waits for the tick of an edit, after which it is on the disk."""
    shown = "document.querySelector('.labels [role=status]')?.innerText"
    chromium.wait(chrome, f"return {shown}?.startsWith('✓') && {shown}.includes({json.dumps(action)})")


def test_episodes_of_all_runs_and_logs_in_one_list_with_one_filter(chrome: Any, served: Any):
    chrome.get(served.base + "/episodes")
    chromium.wait(chrome, "return document.querySelector('a.together')").click()
    chromium.wait(chrome, f"return {LIST}?.page && !{LIST}.page.opening")
    assert chrome.find_element("css selector", "h1").text == "All runs and logs"
    assert chrome.execute_script(f"return Object.keys({LIST}.page.problems)") == [str(served.folder / "damaged")]
    chrome.execute_script(f"{LIST}.apply('task=pick success=true steps<9')")
    wait_for_rows(chrome, 2)
    parts = chrome.execute_script(f"return {LIST}.page.rows.map((row) => [row.group, row.number, row.length])")
    assert sorted(parts) == [["few", 1, 7], ["pick", 1, 7]]
    chrome.execute_script(f"{LIST}.choose('group', 'few')")
    wait_for_rows(chrome, 1)
    chrome.find_element("css selector", "td.task a").click()  # one of them, and back
    chromium.wait(chrome, f"return {ONE}?.episodes[0]?.row.number === 1")
    press(chrome, "s")
    ticked(chrome, "label success")
    with Log.open(served.folder / "few", "r") as log:
        assert Edits(log).history(1)[-1].action == "label success"


def test_list_of_a_damaged_log_shows_its_error(chrome: Any, served: Any):
    open_list(chrome, served, "damaged")
    assert "log.json" in chromium.wait(chrome, "return document.querySelector('.hilt-alarm')?.innerText")
    answer = chrome.execute_async_script(
        "fetch('/episodes/one?data=nothing').then((one) => one.text()).then(arguments[0])"
    )
    assert "run, log or dataset" in json.loads(answer)["error"]
