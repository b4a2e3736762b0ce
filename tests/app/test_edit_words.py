"""The names of edits in Chinese, for every edit that can be made, and the errors of the pages in both languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilt.app.episodes.edit_words import EDIT_WORDS, edit_in_chinese
from hilt.app.episodes.episode_edits import shown_edit
from hilt.app.error_words import ERROR_WORDS, PageError
from hilt.app.words import Words
from hilt.core.errors import ConfigError
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log


def test_edit_words_name_every_edit_that_a_log_can_have(tmp_path: Path):
    with Log.open(make_log(tmp_path / "log", 4, images=False), "a") as log:
        edits = Edits(log)
        for success in (True, False, None):
            edits.label(0, success)
            edits.label(0, success, reward=0.5)
            edits.label_frame(0, 1, success)
        edits.bad(0)
        edits.bad(0, False)
        edits.tag(0, "slow at step 3")
        edits.untag(0, "slow at step 3")
        edits.instruction(0, "lift it\nslowly")
        edits.facts(0, level=3)
        edits.mark(0, 2, "grasp")
        edits.unmark(0, 2, "grasp")
        edits.reward(0, 1, -0.25)
        edits.values(0, "rewards", 0.0, 2)
        for first, last in ((1, 3), (None, 3), (1, None), (None, None)):
            edits.trim(0, first, last)
        edits.undo(edits.undo(edits.delete(0).number).number)
        edits.split(1, 3)
        edits.join([2, 3])
        actions = [shown_edit(edit)["action"] for edit in edits.history()]
    named = {action: Words("zh").edit(action) for action in actions}
    assert all(Words("en").edit(action) == action for action in actions)
    assert [action for action, name in named.items() if name == action] == []
    assert named["tag slow at step 3"] == "添加标签 slow at step 3" and named["trim 1 to 3"] == "裁剪：保留第 1 至 3 步"
    assert (
        named["undo: undo: delete"] == "撤销：撤销：删除" and named["rewards from step 2 on"] == "从第 2 步起的 rewards"
    )
    assert named["instruction 'lift it\\nslowly'"] == r"指令 'lift it\nslowly'"
    plain = {chinese for _, chinese in EDIT_WORDS.values() if "{" not in chinese}
    assert plain <= {*named.values()} and len(named) >= len(EDIT_WORDS), "no name that no edit has"
    assert edit_in_chinese("something of another version") == "something of another version"


@pytest.mark.parametrize("key", ERROR_WORDS)
def test_error_of_a_page_is_shown_in_its_language(key: str):
    values = {name: f"[{name}]" for name in ("number", "name", "most", "path", "command", "count", "format", "seconds")}
    values |= {name: f"[{name}]" for name in ("why", "value", "given", "known", "run", "threshold")}
    error = PageError(key, **values)
    assert isinstance(error, ConfigError) and Words("en").error(error) == str(error)
    assert Words("zh").error(error) == ERROR_WORDS[key][1].format(**values)
    assert Words("zh").error(OSError("as it is")) == "as it is"
