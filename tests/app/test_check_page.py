"""The page of checks: the command in a process of its own, and its findings as links to their frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.app.check_page import frame_address
from hilt.formats.listing.episode_source import source_key
from tests.app.test_open_app import needs_chromium, serving
from tests.checks.arm import arm, written
from tests.teleop import chromium


@pytest.mark.parametrize(
    ("finding", "address"),
    [
        ({"episode": 3, "label": "episode 5", "first": 7}, "/episode?data=d&source=s&number=3&step=7"),
        ({"episode": 0, "label": "trajectory 12", "first": None}, "/episode?data=d&source=s&number=12&step=0"),
        ({"episode": None, "label": "trajectory 2", "first": 1}, "/episode?data=d&source=s&number=2&step=1"),
        ({"episode": None, "label": "", "first": None}, ""),
        (
            {"episode": 0, "label": "trajectory 0", "first": 30, "trimmed": 10},
            "/episode?data=d&source=s&number=0&step=20",
        ),
    ],
)
def test_findings_lead_to_the_frame_of_their_episode(finding: dict[str, Any], address: str):
    assert frame_address("d", "s", {"trimmed": 0, **finding}) == address


@needs_chromium
def test_check_page_runs_the_command_and_its_findings_open_the_frame(tmp_path: Path, chromium_tab: Any):
    nasty = {"language_instruction": "<b>go</b>"}
    episodes = [arm(), arm(seed=1, terminated=np.zeros(60, bool), facts=nasty), arm(seed=2)]
    log = written(tmp_path / "log", episodes)
    with serving(log) as served:
        chromium_tab.get(served.url)
        chromium_tab.get(f"{served.base}/check")
        chromium.wait(chromium_tab, "return document.querySelector('.hilt-check .hilt-do')")
        assert f"hilt data check {log}" in chromium_tab.find_element("css selector", ".hilt-check code").text
        chromium_tab.find_element("css selector", ".hilt-do").click()
        chromium.wait(chromium_tab, "return document.querySelectorAll('.hilt-check tbody tr').length === 1")
        text = chromium_tab.find_element("css selector", ".hilt-check").text
        assert "0 errors, 1 warnings, 0 notes in 3 episodes, 180 steps" in text and "has no end" in text
        chromium_tab.find_element("css selector", ".hilt-language").click()
        shown = "return document.querySelector('.hilt-check tbody tr')?.innerText"
        text = chromium.wait(chromium_tab, f"{shown}.includes('该回合没有结束') && document.body.innerText")
        assert "轨迹 1、第 59 步" in text and "如果是录制被中止" in text and "has no end" not in text
        link = chromium_tab.find_element("css selector", ".hilt-check tbody a")
        assert f"source={source_key(log)}&number=1&step=59" in link.get_attribute("href")
        link.click()
        chromium.wait(chromium_tab, "return location.pathname === '/episode' && document.querySelector('canvas')")
        assert "59" in chromium_tab.find_element("css selector", ".hilt-main").text
