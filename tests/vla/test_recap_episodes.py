"""Episodes of a policy of chunks in a log, with all that values are learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.errors import ConfigError
from hilt.policies.vla.observation_adapters import columns
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay import Log
from hilt.value.value_episodes import ValueEpisodes
from hilt.vla.recap.recap_episodes import EpisodePlan, record_episodes
from tests.vla.signs import NAMES, TINY

SIZES: dict[str, Any] = {**TINY, "cameras": ("full_image",), "image_size": 16, "state_dim": 1, "action_dim": 1}


def test_episodes_are_recorded_until_there_are_enough(tmp_path: Path):
    policy, path = SmallVLA(SmallVLAConfig(**SIZES), seed=0).eval(), tmp_path / "log"
    plan = EpisodePlan("tests.vla.signs:signs", {}, episodes=10, seed=(3, 1))
    looks = iter([False] * 4 + [True])
    assert record_episodes(policy, columns(NAMES), plan, path, stop=lambda: next(looks))[0] == 4
    with Log.open(path, "a") as log:  # as a process leaves it that was killed
        first = log.read(log.trajectory_keys(0)[:1])
        writer = log.episode(actor="recap")
        writer.append({name: _one(value) for name, value in first.items()})
        writer.end()
    count, successes = record_episodes(policy, columns(NAMES), plan, path)
    assert count == 10 and 0 < successes < 10
    whole = record_episodes(policy, columns(NAMES), plan, tmp_path / "whole")
    assert whole == (count, successes), "going on gives the same episodes"
    with ValueEpisodes([path]) as episodes:
        assert [len(one) for one in episodes] == [2] * 10 and len({one.state for one in episodes}) == 10
        assert sum(bool(one.success) for one in episodes) == successes
        assert {one.texts[0] for one in episodes} == {"go"} and not any(one.human for one in episodes)


def test_a_task_that_reports_no_success_is_refused(tmp_path: Path):
    policy, plan = SmallVLA(SmallVLAConfig(**SIZES)).eval(), EpisodePlan("tests.vla.signs:silent", {})
    with pytest.raises(ConfigError, match="does not report success"):
        record_episodes(policy, columns(NAMES), plan, tmp_path / "log")


def _one(value: Any) -> Any:
    return {name: _one(part) for name, part in value.items()} if isinstance(value, dict) else value[0]
