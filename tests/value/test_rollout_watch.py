"""A value model beside rollouts: what it is asked, when it ends an episode, what is refused, and the figures of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import STOPPED
from hilt.core.validate import check
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.value.online_value import JUDGED_EPISODES, OnlineValue
from hilt.value.rollout_watch import CHECKED_SHARE, Outlook, RolloutValue, RolloutWatch, value_figures
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_model import load_value_model
from hilt.value.value_training import train_value
from tests.value.valued import SIZE, save_untrained, write_log

TINY = SmallVLAConfig(cameras=("full_image",), image_size=16, state_dim=2, width=16, depth=1, heads=2, keypoints=2)
SEEN = [{"state": np.array([t / 4, -t / 3], np.float32)} for t in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_untrained(tmp_path / "value", {"observations/state": 2}, "lift")


def test_several_episodes_are_judged_as_each_alone(folder: Path):
    watch, alone = RolloutWatch(RolloutValue(str(folder)), ["lift"]), OnlineValue(load_value_model(folder))
    chances = watch.judge(SEEN, [{}] * 5, ["lift it"] * 5)
    assert len(set(chances)) == 5
    assert chances == pytest.approx([alone(seen, "lift it")[1] for seen in SEEN], rel=1e-5)
    assert watch.judge([], [], []) == []


def test_a_model_of_records_looks_at_what_the_policy_recorded(tmp_path: Path):
    """As of the log of a run of post-training."""
    folder = save_untrained(tmp_path / "value", {"record/state": 2}, "lift")
    watch = RolloutWatch(RolloutValue(str(folder)), ["lift"])
    assert watch.reads_records
    records = [{"state": seen["state"][None]} for seen in SEEN]
    alone = RolloutWatch(
        RolloutValue(str(save_untrained(tmp_path / "other", {"observations/state": 2}, "lift"))), ["lift"]
    )
    assert not alone.reads_records
    assert watch.judge([{}] * 5, records, [""] * 5) == pytest.approx(alone.judge(SEEN, [{}] * 5, [""] * 5))
    with pytest.raises(SchemaError, match="looks at record/state of 2 numbers, and here it has none"):
        watch.check(SEEN[0], {})


def test_a_model_of_pictures_sees_those_of_environments_and_of_records(tmp_path: Path):
    with ValueEpisodes([write_log(tmp_path / "log")]) as episodes:
        settings = ValueConfig(features=8, hidden=16, steps=10, evaluate_every=10, batch_size=16)
        assert train_value(episodes, settings, tmp_path / "value") is not None
    watch = RolloutWatch(RolloutValue(str(tmp_path / "value")), ["lift"])
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    seen = [{"state": np.zeros(2, np.float32), "images": {"front": picture + shade}} for shade in (0, 90, 180)]
    chances = watch.judge(seen, [{}] * 3, [""] * 3)
    assert len(set(chances)) == 3
    with pytest.raises(SchemaError, match=r"looks at images/front of 16 x 16 pixels, and here it is \(32, 32\)"):
        watch.judge([{**seen[0], "images": {"front": np.zeros((32, 32, 3), np.uint8)}}], [{}], [""])


def test_what_cannot_judge_these_episodes_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(SchemaError, match=r"on 'lift', and episodes of 'push' are to be .*Train one on both"):
        RolloutWatch(RolloutValue(str(folder)), ["lift", "push"])
    with pytest.raises(ConfigError, match=r"is no value model: it has no value.json. Make one with: hilt train value"):
        RolloutWatch(RolloutValue(str(tmp_path / "none")), ["lift"])
    SmallVLA(TINY, seed=0).save_pretrained(tmp_path / "policy")
    of_features = save_untrained(tmp_path / "features", {}, "lift", policy=(tmp_path / "policy", 8))
    with pytest.raises(ConfigError, match=r"features of the policy .*, which stays as it is, and in post-train"):
        RolloutWatch(RolloutValue(str(of_features)), ["lift"])
    for wrong, why in (
        ({"stop_below": 0.1}, "value.model=FOLDER"),
        ({"model": "value", "stop_patience": 5}, "value.stop_below"),
        ({"model": "value", "stop_below": 1.0}, "below 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            check(RolloutValue(**wrong), "value")


def test_an_episode_ends_after_as_many_hopeless_steps_in_a_row_unless_it_is_checked(folder: Path):
    watch = RolloutWatch(RolloutValue(str(folder), 0.2, 6), ["lift"])

    def ended(chances: list[float], start: int, executed: int = 2) -> tuple[int, bool]:
        """After how many chunks it ended, -1 for never; and whether it was let run on."""
        outlook = Outlook()
        for chunks, chance in enumerate(chances):
            if watch.hopeless(outlook, chance, executed * bool(chunks), (start, 0, 0)):
                return chunks, outlook.checked
        assert outlook.expected == pytest.approx(np.mean(chances))
        return -1, outlook.checked

    # a number for which chance lets none run on, and one for which it does
    drawn = [np.random.default_rng([start, 0, 0]).random() < CHECKED_SHARE for start in range(200)]
    ends, runs_on = drawn.index(False), drawn.index(True)
    assert 0.04 < np.mean(drawn) < 0.2
    assert ended([0.1] * 9, ends) == (3, False)
    assert ended([0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1], ends) == (6, False), "in a row"
    assert ended([0.1] * 9, ends, executed=6) == (1, False), "a chunk has as many steps as are executed"
    assert ended([0.3, 0.1] * 5, ends) == (-1, False)
    assert ended([0.1] * 9, runs_on) == (-1, True)
    assert ended([0.1] * 3, runs_on) == (-1, False), "it was not hopeless for long enough"
    watching = RolloutWatch(RolloutValue(str(folder)), ["lift"])
    outlook = Outlook()
    assert not any(watching.hopeless(outlook, 0.0, 5, (ends, 0, 0)) for _ in range(9)) and not outlook.checked


def test_figures_say_how_many_ended_early_and_how_often_that_is_wrong():
    def one(success: bool, expected: float = 0.5, checked: bool = False, **more: Any) -> dict[str, Any]:
        return {"success": success, "value_expected": expected, "value_checked": checked, **more}

    assert value_figures([{"success": True}]) == value_figures([]) == {}
    stopped = [one(False, 0.01, **{STOPPED: 0.02, "steps_saved": saved}) for saved in (10, 7, 0)]
    few = value_figures([*stopped, one(True, 0.9)])
    assert few == {"value_stopped": 3, "value_checked": 0, "value_steps_saved": 17}
    checked = [one(False, 0.1, True), one(True, 0.1, True), one(False, 0.1, True), one(False, 0.1, True)]
    others = [one(True, 0.8)] * 12 + [one(False, 0.4)] * 4
    figures = value_figures([*stopped, *checked, *others])
    assert len([*stopped, *checked, *others]) >= JUDGED_EPISODES
    assert figures["value_recovered"] == 0.25 and figures["value_checked"] == 4
    assert figures["value_hopeless"] == pytest.approx(3 / 23)
    assert figures["value_expected"] == pytest.approx((12 * 0.8 + 4 * 0.4 + 4 * 0.1) / 20)
    assert figures["value_realized"] == pytest.approx(13 / 20)
