"""The texts of findings are complete in English and Chinese, and the checks use exactly those that there are."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest

from hilt.checks import CHECKS
from hilt.checks.finding_texts import LANGUAGES, PLACES, TEXTS, render, render_place

FOLDER = Path(__file__).parents[2] / "src/hilt/checks"


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("key", TEXTS)
def test_text_is_there_in_both_languages_with_the_same_values(key: str):
    text = TEXTS[key]
    assert key.split(".")[0] in CHECKS
    assert fields(text.en) == fields(text.zh) and fields(text.en_cure) == fields(text.zh_cure)
    assert not re.search(r"[\u4e00-\u9fff]", text.en + text.en_cure)
    assert bool(text.en_cure) == bool(text.zh_cure)
    for chinese in (text.zh, text.zh_cure):
        words = re.sub(r"\{.*?\}", "", chinese).strip(" 。")
        assert not words or re.search(r"[\u4e00-\u9fff]", words), "not translated"


def test_texts_are_those_that_the_checks_use():
    code = "".join(path.read_text() for path in FOLDER.glob("*.py") if path.name != "finding_texts.py")
    spelled = {key for key in TEXTS if f'"{key}"' in code}
    made = {prefix for prefix in re.findall(r'f"([a-z-]+\.(?:[a-z]+_)?)\{', code)}
    assert {key for key in TEXTS if key not in spelled and not any(key.startswith(one) for one in made)} == set()
    named = {key for key in re.findall(r'"([a-z-]+\.[a-z_]+)"', code) if key.split(".")[0] in CHECKS}
    assert named <= {*TEXTS}


def test_text_fills_in_numbers_lists_and_names():
    assert render("timestamps.gap", {"count": 1, "longest": 0.5, "usual": 0.1})[0] == (
        "1 interval is too long: up to 0.5 instead of 0.1."
    )
    seven = {"dimensions": list(range(7)), "width": 9}
    assert render("constant-actions.dimension", seven)[0].startswith("Dimension 0, 1, 2, 3, 4 and 2 more of 9")
    assert render("duplicates.same", {"other": "trajectory 3"}, "zh")[0] == "该回合每一步的观测和动作都与 轨迹 3 相同。"
    wrong = [{"text": "statistics.value", "name": "std", "dimension": 1, "value": 2.0, "stored": None}]
    assert "std of dimension 1 is 2, stored is nan" in render("statistics.differ", {"wrong": wrong})[0]
    evil = {"sentence": "{0.__class__} <b>"}
    assert render("counts.unlisted", evil)[0] == "{0.__class__} <b>", "what a dataset holds is not filled in again"


def test_place_is_there_in_both_languages():
    assert render_place("trajectory 7", 3, 9, "observations/front", "zh") == "轨迹 7、第 3-9 步、observations/front"
    assert render_place("data.hdf5: demo_0", 3, 3, "", "en") == "data.hdf5: demo_0, step 3"
    assert render_place("", None, None, "", "zh") == "数据集"
    assert {*PLACES} == {*LANGUAGES} and len({frozenset(words) for words in PLACES.values()}) == 1
