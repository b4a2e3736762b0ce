"""What a policy is taught by."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError
from hilt.policies.vla.observation_adapters import Suite, columns, suite
from hilt.replay import Edits, Log
from hilt.vla.demonstrations import Demonstrations, batches
from tests.formats.toy_episodes import made
from tests.golden import FOLDER
from tests.vla.taught import NAMES, write_log


def opened(tmp_path: Path, *paths: Path, **more: Any) -> Demonstrations:
    return Demonstrations(paths, tmp_path / "data", columns(NAMES), **more)


def test_a_batch_is_what_was_seen_and_what_follows(tmp_path: Path):
    logs = (
        write_log(tmp_path / "a", [(5, "put", True)]),
        write_log(tmp_path / "b", [(3, "take", None), (4, "put", True)]),
    )
    lessons, episodes = opened(tmp_path, *logs), [made(5, 0), made(3, 0), made(4, 1)]
    assert len(lessons) == 12 and lessons.action_dim == 2 and lessons.rows([1]).tolist() == [[1, 0], [1, 1], [1, 2]]
    rows = np.array([[2, 3], [0, 1], [1, 0], [0, 4]])
    observations, actions, mask = lessons.batch(rows, horizon=3)
    for row, (episode, step) in enumerate(rows.tolist()):
        had = episodes[episode].columns
        assert np.array_equal(observations[row]["full_image"], had["observations"]["front"][step])
        assert np.array_equal(observations[row]["state"], had["observations"]["state"][step])
        assert observations[row]["instruction"] == ["put", "take", "put"][episode]
        follow = [min(step + k, len(had["actions"]) - 1) for k in range(3)]
        assert np.array_equal(actions[row], had["actions"][follow])
        assert mask[row].tolist() == [step + k < len(had["actions"]) for k in range(3)]
    states, taught = lessons.numbers([0, 1])
    assert np.array_equal(states, np.concatenate([e.columns["observations"]["state"] for e in episodes[:2]]))
    assert np.array_equal(taught, np.concatenate([e.columns["actions"] for e in episodes[:2]]))
    lessons.close()


def test_failures_are_passed_over_and_words_may_be_given(tmp_path: Path):
    log, said = write_log(tmp_path / "a", [(5, "put", False), (3, "take", None), (4, "", True)]), list[str]()
    with pytest.raises(ConfigError, match="an episode has no instruction; give instruction=TEXT"):
        opened(tmp_path, log)
    lessons = opened(tmp_path, log, instruction="go", notify=said.append)
    assert [len(one.keys) for one in lessons.lessons] == [3, 4] and said == ["1 episodes that failed are passed over"]
    assert {row["instruction"] for row in lessons.batch(lessons.rows(), 1)[0]} == {"go"}
    assert len(opened(tmp_path, log, instruction="go", successes_only=False)) == 12
    with pytest.raises(ConfigError, match=r"there is no episode to learn from in .*1 failed, and successes_only=true"):
        opened(tmp_path, write_log(tmp_path / "b", [(2, "x", False)]))


def test_demonstrations_are_as_people_edited_them(tmp_path: Path):
    log = write_log(tmp_path / "a", [(5, "put", True), (3, "take", None), (4, "", True), (2, "put", True)])
    with Log.open(log, "r") as opened_log:
        edits = Edits(opened_log)
        edits.instruction(2, "lift")
        edits.trim(2, first=1)
        edits.label(1, success=False)
        edits.bad(3)
    lessons = opened(tmp_path, log)
    assert [(len(one.keys), one.texts) for one in lessons.lessons] == [(5, ("put",)), (3, ("lift",))]
    observations, actions, mask = lessons.batch(np.array([[1, 2]]), 2)
    had = made(4, 2).columns
    assert np.array_equal(observations[0]["state"], had["observations"]["state"][3]) and mask.tolist() == [
        [True, False]
    ]
    assert np.array_equal(actions[0, 0], had["actions"][3])
    lessons.close()


def test_words_that_change_within_an_episode(tmp_path: Path):
    log = write_log(tmp_path / "a", [(5, {"texts": ["reach", "lift"], "begins": [0, 3]}, True)])  # type: ignore[list-item]
    lessons = opened(tmp_path, log)
    assert [row["instruction"] for row in lessons.batch(lessons.rows(), 1)[0]] == ["reach"] * 3 + ["lift"] * 2


def test_another_format_becomes_a_log_once(tmp_path: Path):
    names, said, phases = columns({"full_image": "image", "state": "state"}), list[str](), list[tuple[Any, ...]]()
    path = FOLDER / "rlds/bridge_like/1.0.0"
    for _ in range(2):
        report = lambda *given: phases.append(given)  # noqa: E731
        lessons = Demonstrations([path], tmp_path / "data", names, "go", notify=said.append, report=report)
        assert lessons.batch(lessons.rows([0])[:1], 2)[0][0]["full_image"].dtype == np.uint8
        lessons.close()
    reading = [(f"reading {path}, episodes", done, 3) for done in (1, 2, 3)]
    assert phases == [*((f"converting {path}, episodes", done, 4) for done in (1, 2, 3, 4)), *reading, *reading], (
        "one of them is empty"
    )
    assert len(said) == 1 and "were read from" in said[0] and (tmp_path / "data/0-1.0.0/log.json").is_file()


def test_states_are_looked_at_in_part_and_all_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.vla.demonstrations.MAX_STATES", 4)
    lessons = opened(tmp_path, write_log(tmp_path / "a", [(9, "x", True)]))
    states, actions = lessons.numbers([0])
    assert np.array_equal(states, made(9, 0).columns["observations"]["state"][::3]) and len(actions) == 9


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            suite("libero"),
            r"log: .* has no .ee_pos.; it has: .*suite=libero is of other data: give the right one \(libero, .*tab",
        ),
        (suite("tabletop/pick"), r"no .tcp_pose., but an array in its place\. suite=tabletop is of other data"),
        (columns({"full_image": "top"}), r"no 'top'; it has: .* Mend columns={full_image: PATH, state: PATH}"),
    ],
)
def test_observations_of_another_suite(names: Suite, says: str, tmp_path: Path):
    with pytest.raises(MissingFieldError, match=says):
        Demonstrations([write_log(tmp_path / "log", [(3, "x", True)])], tmp_path, names)


def test_an_action_that_is_no_number(tmp_path: Path):
    log = write_log(tmp_path / "a", [(3, "x", True)], action=lambda n: np.nan)
    with pytest.raises(SchemaError, match="step 0 of an episode has an action that is no finite number"):
        opened(tmp_path, log)


def test_robots_are_not_mixed(tmp_path: Path):
    logs = write_log(tmp_path / "a", [(2, "x", True)]), write_log(tmp_path / "b", [(2, "x", True)])

    class Wider:
        views = staticmethod(lambda raw: {})

        @staticmethod
        def taught(actions: Any, calls: list[int] = []) -> Any:  # noqa: B006 - counts
            calls.append(0)
            return np.pad(actions, [(0, 0), (0, len(calls))])

    with pytest.raises(SchemaError, match="actions of 3 and 4 numbers; teach one robot at a time"):
        Demonstrations(logs, tmp_path, Wider())  # type: ignore[arg-type]


def test_whole_episodes_of_each_instruction_are_held_out(tmp_path: Path):
    lessons = opened(tmp_path, write_log(tmp_path / "a", [(2, words, True) for words in "aaaaabbbbbc"]))
    learned, held = lessons.split(0.4, seed=0)
    assert sorted([*learned, *held]) == list(range(11))
    assert [sum(n in held for n in part) for part in (range(5), range(5, 10), range(10, 11))] == [2, 2, 0]
    assert lessons.split(0.4, seed=0) == (learned, held) and lessons.split(0.4, seed=1) != (learned, held)
    assert len(lessons.split(0.01, seed=0)[1]) == 1 and lessons.split(0.0, seed=0)[1] == []
    alone = opened(tmp_path, write_log(tmp_path / "b", [(2, "a", True), (2, "b", True)]))
    with pytest.raises(
        ConfigError, match="holds out whole episodes, and there is one for each instruction: give more, or validation=0"
    ):
        alone.split(0.1, seed=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 9))
def test_every_row_comes_once_in_a_round(count: int, size: int, first: int):
    rows = np.arange(count)
    found = np.concatenate(list(islice(batches(rows, size, 3), 30)))
    for start in range(0, len(found) - count + 1, count):
        assert sorted(found[start : start + count]) == list(range(count))
    assert np.array_equal(next(batches(rows, size, 3, first)), list(islice(batches(rows, size, 3), 10))[first])


def test_a_filter_chooses_the_episodes_of_the_paths_that_have_one(tmp_path: Path):
    one = write_log(tmp_path / "a", [(5, "put", True), (3, "take", True), (4, "put", True)])
    two, said = write_log(tmp_path / "b", [(2, "put", True), (6, "put", True)]), list[str]()
    lessons = opened(tmp_path, one, two, where=["steps<5 instruction=put"], notify=said.append)
    assert [len(lesson.keys) for lesson in lessons.lessons] == [4, 2, 6]
    assert said == [f"1 episodes of {one} are chosen by where='steps<5 instruction=put'"]
    lessons.close()
    with pytest.raises(ConfigError, match=r"where='steps>9' chooses none of the 2 episodes of .*b"):
        opened(tmp_path, one, two, where=["steps>3", "steps>9"])
