"""The catalog of words is complete in both languages, and the app uses exactly what it has."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest

from hilt.app.episodes.edit_words import EDIT_WORDS
from hilt.app.open_app import PARTS
from hilt.app.run_library import STATES
from hilt.app.words import LANGUAGES, WORDS, Words, language_of
from hilt.runs.folder import COMMANDS

APP = Path(__file__).parents[2] / "src/hilt/app"
SOURCE = "".join(path.read_text() for kind in ("py", "js") for path in APP.rglob(f"*.{kind}"))
USED = re.compile(r"""["']((?:[a-z_]+\.)+[a-z_]+)["']""")


def fields(text: str) -> set[str | None]:
    return {name for _, name, _, _ in Formatter().parse(text)} - {None}


@pytest.mark.parametrize("key", WORDS)
def test_word_is_there_in_every_language(key: str):
    texts = WORDS[key]
    assert len(texts) == len(LANGUAGES) and all(text.strip() for text in texts)
    assert len({frozenset(fields(text)) for text in texts}) == 1, "a value that only one language shows"
    assert re.search(r"[\u4e00-\u9fff]", texts[1]) and not re.search(r"[\u4e00-\u9fff]", texts[0])


def test_words_are_those_that_the_app_uses():
    code = SOURCE
    catalogs = (
        "words.py",
        "run_words.py",
        "classifiers/classifier_words.py",
        "episodes/edit_words.py",
        "error_words.py",
        "value_models/value_words.py",
    )
    for catalog in catalogs:
        code = code.replace((APP / catalog).read_text(), "")
    spelled = set(USED.findall(code)) & {*WORDS}
    made = {
        key for key in WORDS for part in [key.partition(".")[0]] if f'f"{part}.{{' in code or f'"{part}." +' in code
    }
    assert {*WORDS} - {*EDIT_WORDS} - spelled - made == set()  # the names of edits come from logs: test_edit_words.py
    assert {*re.findall(r'word\("([^"]+)"', code)} <= {*WORDS}
    assert {f"state.{state}" for state in STATES} | {f"kind.{kind}" for kind in COMMANDS} <= {*WORDS}
    assert PARTS[0] == "hilt.app.run_pages"


def test_words_are_those_of_the_language_chosen_or_accepted():
    assert language_of("zh", "en") == "zh" and language_of("xx", "") == "en"
    assert language_of("", "fr-FR,zh-CN;q=0.8,en;q=0.5") == "zh"
    assert language_of("", "en-US,en;q=0.9,zh;q=oops") == "en"
    assert Words("en")("runs.count", count=3, paths="runs") == "3 runs below runs"
