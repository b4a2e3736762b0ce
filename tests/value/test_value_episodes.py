"""Episodes as a value model sees them: which count, how they are split, and what is read of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import Array
from hilt.replay import Edits, Log, Schema
from hilt.value.value_episodes import ValuedEpisode, ValueEpisodes, ValueInputs
from tests.value.valued import episode, write_log


def test_steps_of_several_logs_are_read_in_the_order_that_is_asked_for(tmp_path: Path):
    paths = [write_log(tmp_path / name, 4, seed=seed) for seed, name in enumerate("ab")]
    with ValueEpisodes(paths) as episodes:
        assert len(episodes) == 8 and [e.success for e in episodes][:2] == [True, False]
        assert episodes.episodes[0].human and not episodes.episodes[1].human
        inputs = ValueInputs.of(episodes.logs[0], [], True)
        assert inputs.cameras == {"images/front": (16, 16)} and inputs.state == {"observations/state": 2}
        rows = np.array([[5, 3], [0, 2], [5, 0], [2, 1]])
        batch = episodes.batch(rows, inputs)
        for place, (number, step) in enumerate(rows.tolist()):
            one = episodes.episodes[number]
            alone = one.log.read(one.keys[step : step + 1], ["observations"])["observations"]
            assert (batch.images["images/front"][place] == alone["images"]["front"][0]).all()
            assert (batch.state[place] == alone["state"][0]).all()
        assert batch.texts == ["lift it"] * 4
        assert episodes.remaining(rows).tolist() == [17, 10, 20, 13]
        assert episodes.successes(rows).tolist() == [False, True, False, True]


def test_what_a_frozen_policy_computed_is_no_state(tmp_path: Path):
    """Another environment has no such columns, and a run with other weights none of this name."""
    columns = episode(0, True, np.random.default_rng(0))
    length = len(columns["rewards"])
    made = {"actions": np.zeros((length, 1, 1, 2), np.float32), "features": np.zeros((length, 1, 6), np.float32)}
    columns["observations"]["base_policy"] = {"0123456789ab": made}
    with Log.create(tmp_path / "log", Schema.of(columns, leading=2), durability="never") as log:
        log.add(columns, facts={"success": True})
    with ValueEpisodes([tmp_path / "log"]) as episodes:
        assert ValueInputs.of(episodes.logs[0], [], True).state == {"observations/state": 2}
        by_name = ValueInputs({}, {"observations/base_policy/0123456789ab/actions": 2})
        by_name.check(episodes.logs[0])  # a model that was trained before still judges the log


def test_what_cannot_be_used_is_passed_over_and_counted(tmp_path: Path):
    rng = np.random.default_rng(0)
    columns = episode(0, True, rng, pictures=False)
    with Log.create(tmp_path / "log", Schema.of(columns, leading=2), durability="never") as log:
        log.add(columns, facts={"success": True})
        two = {name: np.concatenate([columns[name]] * 2) for name in columns if not isinstance(columns[name], dict)}
        both = {name: {k: np.concatenate([v] * 2) for k, v in columns[name].items()} for name in columns.keys() - two}
        log.add({**two, **both}, facts={"success": True})
        log.add({**columns, "terminated": np.zeros_like(columns["terminated"])})
        log.add(columns)
    with ValueEpisodes([tmp_path / "log"]) as episodes:
        assert [e.success for e in episodes] == [True, None] and episodes.known() == [0]
        assert episodes.passed_over == {"several in one trajectory": 2, "not ended": 1}
        with pytest.raises(SchemaError, match="there is no picture among its observations"):
            ValueInputs.of(episodes.logs[0], [], True)
        with pytest.raises(UnknownNameError, match="camera"):
            ValueInputs.of(episodes.logs[0], ["front"], False)
    with pytest.raises(ConfigError, match="give at least one log"):
        ValueEpisodes([])


def test_a_run_has_its_demonstrations_too_and_a_label_counts_before_what_was_recorded(tmp_path: Path):
    write_log(tmp_path / "run" / "log", 4)
    write_log(tmp_path / "run" / "demos", 2, outcomes=(True,), tasks=("",))
    with Log.open(tmp_path / "run" / "log", "r") as log:
        Edits(log).label(0, False)
        Edits(log).trim(1, first=3)
    with ValueEpisodes([tmp_path / "run"]) as episodes:
        assert [e.success for e in episodes] == [False, False, True, False, True, True]
        assert {e.task for e in episodes} == {"lift"}  # the demonstrations do not say what they show
        assert (episodes.episodes[1].first, len(episodes.episodes[1])) == (3, 17)


def test_a_run_of_post_training_has_the_logs_of_all_ranks(tmp_path: Path):
    for rank in range(2):
        write_log(tmp_path / "run" / "rollouts" / f"rank-{rank}", 2 + rank, outcomes=(True, False), tasks=("",))
    with ValueEpisodes([tmp_path / "run"]) as episodes:
        assert len(episodes.episodes) == 5


def test_an_episode_that_a_value_model_ended_has_no_known_outcome_unless_a_person_labels_it(tmp_path: Path):
    write_log(tmp_path / "log", 4)
    with Log.open(tmp_path / "log", "a") as log:
        for number in (1, 3):
            log.annotate(number, stopped_by_value=0.02)
    with Log.open(tmp_path / "log", "r") as log:
        Edits(log).label(3, False)
    with ValueEpisodes([tmp_path / "log"]) as episodes:
        assert [e.success for e in episodes] == [True, None, True, False] and episodes.known() == [0, 2, 3]


def test_records_of_a_policy_have_pictures_too(tmp_path: Path):
    """The log of a VLA run has no observations, but what its policy saw."""
    rng = np.random.default_rng(0)
    steps, end = 3, np.array([[False], [False], [True]])
    columns = {
        "record": {
            "images": rng.integers(0, 255, (steps, 1, 2, 16, 16, 3), dtype=np.uint8),
            "state": rng.normal(size=(steps, 1, 4)).astype(np.float32),
        },
        "rewards": np.zeros((steps, 1), np.float32),
        "terminated": end,
        "truncated": ~end & False,
    }
    with Log.create(tmp_path / "log", Schema.of(columns, leading=2), durability="never") as log:
        log.add(columns, facts={"success": False, "task": "a", "split": "train", "state": 0})
    with ValueEpisodes([tmp_path / "log"]) as episodes:
        inputs = ValueInputs.of(episodes.logs[0], [], True)
        assert inputs == ValueInputs({"record/images/0": (16, 16), "record/images/1": (16, 16)}, {"record/state": 4})
        batch = episodes.batch(episodes.rows([0]), inputs)
        assert (batch.images["record/images/1"] == columns["record"]["images"][:, 0, 1]).all()


def test_another_camera_or_robot_is_refused(tmp_path: Path):
    with ValueEpisodes([write_log(tmp_path / "log", 2)]) as episodes:
        with pytest.raises(SchemaError, match=r"camera images/front is .*expected 32 x 32"):
            ValueInputs({"images/front": (32, 32)}, {}).check(episodes.logs[0])
        with pytest.raises(SchemaError, match="observations/pose has no numbers, expected 7"):
            ValueInputs({}, {"observations/pose": 7}).check(episodes.logs[0])


def alone(rows: list[tuple[int, bool]]) -> ValueEpisodes:
    """Episodes from these initial states, with these outcomes, of no log."""
    made = ValueEpisodes.__new__(ValueEpisodes)
    keys: Array = np.zeros(1, np.int64)
    log: Log = type("NoLog", (), {"path": "log"})()  # type: ignore[assignment]
    made.episodes = [
        ValuedEpisode(log, number, 0, keys, success, "lift", ("",), f"state {state}", False)
        for number, (state, success) in enumerate(rows)
    ]
    made.passed_over = Counter()
    return made


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=40), st.integers(0, 5))
def test_a_split_has_both_outcomes_on_both_sides_and_no_initial_state_twice(rows: list[tuple[int, bool]], seed: int):
    episodes = alone(rows)
    try:
        rest, held, by = episodes.split(range(len(rows)), 0.25, seed)
    except ConfigError as error:
        assert "too few episodes to hold some out" in str(error)
        assert min(Counter(success for _, success in rows).get(kind, 0) for kind in (True, False)) < 2
        return
    assert sorted([*rest, *held]) == list(range(len(rows)))
    assert {rows[number][1] for number in rest} == {rows[number][1] for number in held} == {True, False}
    if by == "initial state":
        assert not {rows[number][0] for number in rest} & {rows[number][0] for number in held}
    assert episodes.split(range(len(rows)), 0.25, seed) == (rest, held, by)
