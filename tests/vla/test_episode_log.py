"""Episodes in a rank's log: written where they were made, and read back bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.replay import Edits, Log
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.episode_log import EpisodeLog, film


def episode(rows: int = 3, words: int = 7, **changes: Any) -> RolloutEpisode:
    draw = np.random.default_rng(rows)
    record = {
        "images": draw.integers(0, 256, (rows, 2, 16, 16, 3), dtype=np.uint8),
        "prompt": draw.integers(1, 99, (rows, words), dtype=np.int32),
        "prompt_length": np.full(rows, words, np.int32),
        "log_prob": draw.normal(size=(rows, 4, 2)).astype(np.float32),
    }
    executed = np.array([4] * (rows - 1) + [1], np.int32)
    made = RolloutEpisode(
        Start("tabletop/pick", "train", 5, 77, group=3, member=1),
        record,
        executed,
        draw.normal(size=rows).astype(np.float32),
        success=True,
        steps=int(executed.sum()),
        truncated=False,
        version=12,
        first=b"\x00\xff" * 16,
        instruction="pick it up",
    )
    return replace(made, **changes)


def same(one: RolloutEpisode, other: RolloutEpisode) -> bool:
    arrays = all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in [(one.executed, other.executed), (one.rewards, other.rewards)]
        + [(one.record[name], other.record[name]) for name in one.record]
    )
    plain = [item.name for item in fields(RolloutEpisode) if item.name not in ("record", "executed", "rewards", "last")]
    return (
        arrays
        and set(one.record) == set(other.record)
        and all(getattr(one, name) == getattr(other, name) for name in plain)
    )


def test_an_episode_comes_back_bit_for_bit_also_in_another_process(tmp_path: Path):
    given = [episode(3, 7), episode(5, 30, success=False, truncated=True, ill_formed="it is not finite")]
    given[1].stopped_by_value = 0.0625
    log = EpisodeLog(tmp_path / "log")
    assert log.end() == -1
    assert [log.add(one, 4, 2 * one.rewards) for one in given] == [one.trajectory for one in given] == [0, 1]
    log.close()
    with Log.open(tmp_path / "log", "r") as edited:
        edits = Edits(edited)
        redone = [edits.label(0, success=False, reward=7.0), edits.bad(1), edits.trim(0, 1)]
    again = EpisodeLog(tmp_path / "log")  # the run goes on with what it recorded
    assert 1 in again and again.end() == 1 and all(same(one, again.read(one.trajectory)[0]) for one in given)
    assert all(np.array_equal(2 * one.rewards, again.read(one.trajectory)[1]) for one in given)
    again.close()
    with Log.open(tmp_path / "log", "r") as plain:  # as every other part reads it
        assert plain.trajectories() == [0] and plain.facts.success(0) is False
        for edit in redone:
            Edits(plain).undo(edit.number)
        facts = plain.facts.about(1)
        assert (facts["task"], facts["state"], facts["training_step"], facts["success"]) == (
            "tabletop/pick",
            5,
            4,
            False,
        )
        assert facts["language_instruction"] == "pick it up" and len(plain.successes()) == 3
        ends = plain.read(plain.trajectory_keys(1), ["terminated", "truncated", "policy_version"])
        assert (
            not ends["terminated"].any()
            and ends["truncated"].tolist() == [False] * 4 + [True]
            and set(ends["policy_version"]) == {12}
        )


def test_what_came_after_a_checkpoint_is_taken_out(tmp_path: Path):
    log = EpisodeLog(tmp_path / "log")
    for number in range(4):
        log.add(episode(), number, np.zeros(3, np.float32))
    log.forget_after(1)
    assert log.end() == 1 and log.add(episode(), 2, np.zeros(3, np.float32)) > 1
    log.close()
    again = EpisodeLog(tmp_path / "log")
    assert same(again.read(again.end())[0], episode(trajectory=again.end()))
    empty = episode(record={}, executed=np.zeros(0, np.int32), rewards=np.zeros(0, np.float32))
    assert again.add(empty, 2, empty.rewards) == empty.trajectory == -1, (
        "the policy's first chunk was ill-formed: there is nothing"
    )
    again.close()


def test_beyond_its_capacity_the_oldest_go_but_for_those_that_are_pinned(tmp_path: Path):
    log = EpisodeLog(tmp_path / "log", capacity_bytes=300_000)
    for number in range(4):
        log.add(episode(40), number, np.zeros(40, np.float32))
    assert all(number in log for number in range(4)), "of a step that is under way every one may be carried over"
    log.pin([1])
    assert [number in log for number in range(4)] == [False, True, False, True]
    log.close()
    again = EpisodeLog(tmp_path / "log", capacity_bytes=1)
    assert 1 in again, "nothing goes before it is known what is pinned"
    again.pin([1])
    again.add(episode(40), 5, np.zeros(40, np.float32))
    assert same(again.read(1)[0], episode(40, trajectory=1)) and 3 not in again
    again.close()


def test_there_is_no_log_to_read_from(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no log, and its trajectory 3 is asked for"):
        EpisodeLog(tmp_path / "log").read(3)


def test_a_video_has_a_picture_for_each_chunk(tmp_path: Path):
    av = pytest.importorskip("av")
    film(episode(5), tmp_path / "one.mp4", hz=2)
    with av.open(str(tmp_path / "one.mp4")) as video:
        assert len(list(video.decode(video=0))) == 5 + 2  # and the last one for a second
