"""The page of classifiers in a real browser: frames labeled by keys, training in the background, mistakes, threshold.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from hilt.app.episodes.episode_shelf import data_key
from hilt.app.open_app import LANGUAGE_COOKIE, THEME_COOKIE
from hilt.replay import Edits, Log
from hilt.replay.edits import frame_labels
from tests.app.test_open_app import needs_chromium, serving
from tests.classifier.labeled import clips, write_log
from tests.teleop import chromium

PAGE = "document.querySelector('.classifier')?.component"
QUICK = "steps=12 batch_size=16 features=8 hidden=16 random_crop=0"
pytestmark = needs_chromium


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten episodes with two labeled frames in all but the last two, one of them wrong."""
    path = write_log(tmp_path_factory.mktemp("data") / "pick", clips(10), labels=False)
    with Log.open(path, "r") as opened:
        edits = Edits(opened, "ann")
        for number in range(8):
            edits.label_frame(number, 1, False)
            edits.label_frame(number, 10, bool(number % 3))
    return path


@pytest.fixture(scope="module")
def served(log: Path) -> Iterator[Any]:
    with serving(log.parent) as found:
        yield found


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    chromium_tab.set_window_size(1280, 1400)
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelector('.hilt-nav')")
    return chromium_tab


def press(chrome: Any, *keys: str) -> None:
    for key in keys:
        ActionChains(chrome).send_keys(key).perform()


def text(chrome: Any, selector: str) -> str:
    return chrome.find_element("css selector", selector).text


def labels_of(log: Path) -> dict[int, dict[int, bool | None]]:
    with Log.open(log, "r") as opened:
        return {number: frame_labels(opened.facts.about(number)) for number in opened.trajectories()}


def test_frames_are_labeled_by_keys_and_a_classifier_is_trained_and_judged(
    chrome: Any, served: Any, log: Path, artifacts: Path
):
    before = labels_of(log)
    chrome.get(f"{served.base}/classifier?data={data_key(log)}")
    chromium.wait(chrome, f"return {PAGE}?.frames.length === 104 && !{PAGE}.scoring")
    assert "There is no classifier yet" in text(chrome, ".held") and "spread over the episodes" in text(
        chrome, ".label"
    )
    assert "Labeled: 5 success, 11 failure, 0 unknown" in text(chrome, ".label")
    chromium.wait(chrome, "return [...document.querySelectorAll('.frame img')].every((one) => one.naturalHeight)")
    chosen = []
    for number, key in enumerate("sffus"):
        frame = chrome.execute_script(f"return {PAGE}.frame")
        chosen.append((frame["number"], frame["step"], {"s": True, "f": False, "u": None}[key]))
        press(chrome, key)
        chromium.wait(chrome, f"return {PAGE}.made.length === {number + 1} && !{PAGE}.busy")
    assert "✓ Saved: frame label success" in text(chrome, ".counts")
    chrome.save_screenshot(str(artifacts / "classifier-label.png"))
    press(chrome, "z")
    chromium.wait(chrome, f"return {PAGE}.made.length === 4 && !{PAGE}.busy")
    assert chrome.execute_script(f"return {PAGE}.frame.step") == chosen[-1][1]
    press(chrome, "f")
    chromium.wait(chrome, f"return {PAGE}.made.length === 5 && !{PAGE}.busy")
    chosen[-1] = (*chosen[-1][:2], False)
    after = labels_of(log)
    assert {
        (n, step): value for n, found in after.items() for step, value in found.items() if step not in before[n]
    } == {(n, step): value for n, step, value in chosen}
    with Log.open(log, "r") as opened:
        assert sum("undo" in edit.action for edit in Edits(opened).history()) == 1

    chrome.find_element("css selector", ".train .settings").send_keys(QUICK, Keys.TAB)
    chromium.wait(chrome, "return document.querySelector('.train code').innerText.includes('random_crop=0 --out')")
    assert f"hilt train classifier {log} steps=12" in text(chrome, ".train code")
    chrome.find_element("css selector", ".train .start").click()
    ready = f"{PAGE}.report && !{PAGE}.training && !{PAGE}.scoring && {PAGE}.frames.length === 99"
    chromium.wait(chrome, f"return {ready}", 400)  # two processes that import torch
    folder = log.parent / "pick-classifiers" / "1"
    assert (folder / "held_out.json").is_file() and "It is trained." in text(chrome, ".train")
    order = chrome.execute_script(f"return {PAGE}.frames.map((one) => Math.abs(one.probability - 0.5))")
    assert order == sorted(order) and "least certain come first" in text(chrome, ".label")


def test_confusion_threshold_and_worst_mistakes(chrome: Any, served: Any, log: Path, artifacts: Path):
    chrome.get(f"{served.base}/classifier?data={data_key(log)}")
    chromium.wait(chrome, f"return {PAGE}?.report?.worst.length && !{PAGE}.scoring && {PAGE}.use")
    frames = chrome.execute_script(f"return {PAGE}.report.frames")
    for value in (0.01, 0.99):
        chrome.execute_script(
            "const slider = document.querySelector('.slider input'); slider.value = arguments[0];"
            "slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change'));",
            value,
        )
        chromium.wait(chrome, f"return {PAGE}.use.command.includes('classifier_threshold={value}')")
        cells = [int(cell.text) for cell in chrome.find_elements("css selector", ".confusion tbody td")]
        assert sum(cells) == frames
        wrong = len(chrome.find_elements("css selector", ".worst .pictures > *"))
        assert wrong == cells[1] + cells[2] <= 24
    assert "Recall" in text(chrome, ".legend") and "hilt train RECIPE classifier=" in text(chrome, ".use code")
    press(chrome, "t", Keys.ARROW_LEFT)
    chromium.wait(chrome, f"return {PAGE}.point.threshold === 0.98")
    chrome.execute_script("document.querySelector('.held').scrollIntoView()")
    chrome.save_screenshot(str(artifacts / "classifier-held-out.png"))
    chrome.execute_script(f"const page = {PAGE}; page.threshold = page.report.worst[0].success ? 0.99 : 0.01")
    link = chromium.wait(chrome, "return document.querySelector('.worst a')?.href")
    worst = chrome.execute_script(f"return {PAGE}.report.worst[0]")
    assert f"number={worst['trajectory']}&step={worst['step'] + 1}" in link
    chrome.get(link)
    shown = "document.querySelector('.episode')?.component"
    chromium.wait(chrome, f"return {shown}?.step === {worst['step'] + 1} && {shown}.episodes[0]?.cameras.length")


def test_training_is_stopped_when_asked_and_leaves_nothing(chrome: Any, served: Any, log: Path):
    chrome.get(f"{served.base}/classifier?data={data_key(log)}")
    chromium.wait(chrome, f"return {PAGE}?.report && !{PAGE}.scoring")
    press(chrome, "?")
    assert "leave the frame out of training" in chromium.wait(
        chrome, "return document.querySelector('dialog[open]')?.innerText"
    )
    press(chrome, "?")
    chrome.find_element("css selector", ".train .settings").send_keys("steps=100000", Keys.TAB)
    chromium.wait(chrome, "return document.querySelector('.train code').innerText.includes('steps=100000')")
    chrome.find_element("css selector", ".train .start").click()
    chromium.wait(chrome, f"return {PAGE}.training && document.querySelector('.train .stop')")
    chrome.find_element("css selector", ".train .stop").click()
    chromium.wait(chrome, f"return !{PAGE}.training", 400)
    assert "It ended with exit code" in text(chrome, ".train")
    assert [path.name for path in log.parent.glob("pick-classifiers/*")] == ["1"]


def test_classifier_page_in_chinese_dark_on_a_phone(chrome: Any, served: Any, log: Path, artifacts: Path):
    for name, value in ((LANGUAGE_COOKIE, "zh"), (THEME_COOKIE, "dark")):
        chrome.add_cookie({"name": name, "value": value})
    chromium.shape(chrome, 390, 844)
    chrome.get(f"{served.base}/classifier")
    chromium.wait(chrome, f"return {PAGE}?.report && !{PAGE}.scoring && {PAGE}.frame")
    assert "标注帧" in text(chrome, ".label h2") and "classifier." not in text(chrome, ".classifier").replace(
        "classifier.json", ""
    )
    assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    chrome.save_screenshot(str(artifacts / "classifier-phone.png"))
    for name in (LANGUAGE_COOKIE, THEME_COOKIE):
        chrome.delete_cookie(name)
    chromium.shape(chrome, 1280, 1400)


def test_classifier_page_that_only_shows(chrome: Any, log: Path, tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    with serving(log.parent, "--view") as viewed:
        chrome.get(viewed.url)
        chrome.get(f"{viewed.base}/classifier?data={data_key(log)}")
        chromium.wait(chrome, f"return {PAGE}?.report && {PAGE}.use")
        assert "hilt data score" in text(chrome, ".label .score")
        assert not chrome.find_elements("css selector", ".label .keys, .train .start, .use .start")
        press(chrome, "s")
        asked = "fetch('/classifier/train', {method: 'POST', body: '{}'}).then((one) => one.text()).then(arguments[0])"
        assert "only shows: nothing can be changed or started" in chrome.execute_async_script(asked)
        assert len(labels_of(log)[0]) <= 12 and not list(log.parent.glob("pick-classifiers/2"))
