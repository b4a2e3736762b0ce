"""The page of value models in a real browser: ranking, reliability, tasks, and the worst-judged episodes.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hilt.app.open_app import LANGUAGE_COOKIE, THEME_COOKIE
from hilt.core.checksums import read_json
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import write_estimates
from hilt.value.value_training import train_value
from tests.app.test_open_app import needs_chromium, serving
from tests.app.test_value_data import ALARM, make_value_model
from tests.teleop import chromium
from tests.value.valued import BLIND, write_log

PAGE = "document.querySelector('.value-model')"
pytestmark = needs_chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two tasks, and a model that was trained on it."""
    found = tmp_path_factory.mktemp("data")
    log = write_log(found / "log", 40, tasks=("lift", "push"))
    with ValueEpisodes([log]) as episodes:
        model = train_value(episodes, ValueConfig(**BLIND), found / "value")
        assert model is not None
        write_estimates(model, episodes)
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Any]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    made.mkdir(parents=True, exist_ok=True)
    return made


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    chromium_tab.set_window_size(1280, 1400)
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelector('.hilt-nav')")
    return chromium_tab


def text(chrome: Any, selector: str) -> str:
    return str(chrome.find_element("css selector", selector).text)


def test_ranking_reliability_tasks_and_the_command(chrome: Any, served: Any, folder: Path, artifacts: Path):
    chrome.get(f"{served.base}/value")
    chromium.wait(chrome, f"return {PAGE}?.querySelectorAll('circle').length")
    held = read_json(folder / "value" / "value.json")["held_out"]
    rows = chrome.find_elements("css selector", ".value-model .ranking tbody tr")
    shown = [row.text.split()[1:3] for row in rows]
    assert [share for share, _ in shown] == ["25%", "50%", "75%"]
    assert [float(auc) for _, auc in shown] == pytest.approx([one["auc"] for one in held["after"]], abs=6e-4)
    assert "Calibration error 0." in text(chrome, ".reliability") and "of all three" in text(chrome, ".reliability")
    circles = chrome.find_elements("css selector", ".reliability circle")
    assert len(circles) == len(held["reliability"])
    first = held["reliability"][0]
    title = chrome.execute_script("return arguments[0].querySelector('title').textContent", circles[0])
    assert title == f"predicted {first['predicted']:.0%}: {first['observed']:.0%} of {first['count']} succeeded"
    tasks = chrome.find_elements("css selector", ".tasks tbody tr")
    assert [row.text.split()[:3] for row in tasks] == [
        [one["task"], str(one["episodes"]), str(one["successes"])] for one in held["tasks"]
    ]
    assert f"hilt data value LOG --model {folder / 'value'}" in text(chrome, ".hilt-main")
    assert f"hilt train RECIPE value.model={folder / 'value'}" in text(chrome, ".hilt-main")
    chrome.save_screenshot(str(artifacts / "value-light.png"))


def test_a_badly_judged_episode_leads_to_its_curves(chrome: Any, served: Any, folder: Path):
    chrome.get(f"{served.base}/value")
    link = chromium.wait(chrome, "return document.querySelector('.worst a')?.href")
    shown = len(chrome.find_elements("css selector", ".worst .episodes polyline"))
    held = read_json(folder / "value" / "value.json")["held_out"]
    judged = read_json(folder / "value" / "held_out.json")["episodes"]
    wrong = [abs(one["succeeded"] - one["success"][len(one["success"]) // 2]) > 0.5 for one in judged]
    assert len(chrome.find_elements("css selector", ".worst .wrong")) == sum(wrong) > 0
    assert shown == len(chrome.find_elements("css selector", ".worst a")) == held["episodes"] <= 12
    chrome.get(link)
    page = "document.querySelector('.episode')?.component"
    chromium.wait(
        chrome, f"return {page}?.episodes[0]?.cameras.length && document.body.innerText.includes('advantage')"
    )
    assert chrome.execute_script(f"return {page}.step") > 0


def test_value_page_in_chinese_dark_on_a_phone(chrome: Any, served: Any, artifacts: Path):
    for name, value in ((LANGUAGE_COOKIE, "zh"), (THEME_COOKIE, "dark")):
        chrome.add_cookie({"name": name, "value": value})
    chromium.shape(chrome, 390, 844)
    chrome.get(f"{served.base}/value")
    chromium.wait(chrome, f"return {PAGE}?.querySelectorAll('circle').length")
    assert "能否排序" in text(chrome, ".ranking h2") and "value_model." not in text(chrome, ".hilt-main")
    assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    chrome.save_screenshot(str(artifacts / "value-phone.png"))
    for name in (LANGUAGE_COOKIE, THEME_COOKIE):
        chrome.delete_cookie(name)
    chromium.shape(chrome, 1280, 1400)


def test_several_models_one_of_which_ranks_nothing_and_one_that_is_gone(chrome: Any, tmp_path: Path):
    make_value_model(tmp_path / "good", [])
    counts = {"episodes": 4, "successes": 2, "frames": 40}
    make_value_model(tmp_path / "useless", [], training={**counts, "alarms": [ALARM]})
    with serving(tmp_path) as other:
        chrome.get(other.url)
        chrome.get(f"{other.base}/value")
        chromium.wait(chrome, "return document.querySelectorAll('.hilt-tab').length === 2")
        chrome.find_element("link text", "useless").click()
        chromium.wait(chrome, "return document.querySelector('.value-model .hilt-alarm')")
        assert "it predicts a constant" in text(chrome, ".value-model .hilt-alarm")
        assert "no command is suggested" in text(chrome, ".hilt-main") and "hilt train" not in text(
            chrome, ".hilt-main"
        )
        chrome.get(f"{other.base}/value?model=none")
        chromium.wait(chrome, "return document.querySelector('.hilt-main .hilt-alarm')")
        assert "There is no such model any more" in text(chrome, ".hilt-main")


def test_without_a_model_the_page_has_the_command_that_makes_one(chrome: Any, tmp_path: Path):
    with serving(tmp_path) as other:
        chrome.get(other.url)
        chrome.get(f"{other.base}/value")
        chromium.wait(chrome, "return document.querySelector('.hilt-empty .hilt-command')")
        assert "hilt train value DATA --out value" in text(chrome, ".hilt-empty")
