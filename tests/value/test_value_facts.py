"""Values as late facts of a log: written once, undone, renewed when the outcome changes, and cut with their episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import UnknownNameError
from hilt.formats.experience import LogDataset
from hilt.formats.listing.log_episodes import episodes_where
from hilt.replay import Edits, Log
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import Written, percentiles, write_estimates
from hilt.value.value_model import ValueModel
from tests.value.valued import write_log


def write(model: ValueModel, path: Path) -> Written:
    with ValueEpisodes([path]) as episodes:
        return write_estimates(model, episodes, author="test")


def test_facts_are_written_once_and_name_the_model(blind_model: ValueModel, tmp_path: Path):
    path = write_log(tmp_path / "log", 6, pictures=False)
    assert write(blind_model, path) == Written(episodes=6, known=0, edits=1)
    size = (path / "edits.jsonl").stat().st_size
    assert write(blind_model, path) == Written(episodes=0, known=6, edits=0)
    assert (path / "edits.jsonl").stat().st_size == size
    with Log.open(path, "r") as log, ValueEpisodes([path]) as episodes:
        about, found = log.facts.about(1), blind_model.predict(episodes, 1)
        estimates = about["estimates"]
        assert about["value_model"] == estimates["model"] == blind_model.id and estimates["first"] == 0
        np.testing.assert_allclose(estimates["value"], found.value, atol=1e-4)
        assert {len(estimates[name]) for name in ("value", "advantage", "percentile", "progress")} == {20}
        assert about["value"] == pytest.approx(np.mean(estimates["value"]), abs=1e-3)
        assert about["value_last"] == estimates["value"][-1]
        assert all(0 <= x <= 1 for x in estimates["progress"]) and all(0 <= x <= 100 for x in estimates["percentile"])
        # the last step of a failure led to the floor, which lies below every value
        assert estimates["advantage"][-1] == pytest.approx(-2 - 0.0769 - estimates["value"][-1], abs=0.03)
        edit = Edits(log).history()[-1]
        assert (edit.action, edit.author, edit.episodes) == (f"value model {blind_model.id}", "test", tuple(range(6)))


def test_two_processes_write_the_facts_of_an_episode_once(blind_model: ValueModel, tmp_path: Path):
    """Both have seen that there are none; the second finds them when it may write."""
    path = write_log(tmp_path / "log", 2, pictures=False)
    found = {0: {"model": "m", "first": 0, "success": True, "value": [0.5, 1.0]}}
    with Log.open(path, "r") as one, Log.open(path, "r") as other:
        assert Edits(one).estimates(found) is not None
        assert Edits(other).estimates(found) is None
        assert Edits(other, dry_run=True).estimates({1: found[0]}) is not None
        with pytest.raises(UnknownNameError, match="trajectory"):
            Edits(one).estimates({7: found[0]})
        one.refresh()
        assert [edit.episodes for edit in Edits(one).history()] == [(0,)]
        assert one.facts.about(0)["value"] == 0.75


def test_facts_can_be_undone_and_follow_a_new_label(blind_model: ValueModel, tmp_path: Path):
    path = write_log(tmp_path / "log", 4, pictures=False)
    write(blind_model, path)
    with Log.open(path, "r") as log:
        before = log.facts.about(1)["estimates"]
        Edits(log).label(1, True)
    assert write(blind_model, path) == Written(episodes=1, known=3, edits=1)
    with Log.open(path, "r") as log:
        after = log.facts.about(1)["estimates"]
        assert after["value"] == before["value"] and after["advantage"][-1] > before["advantage"][-1] + 1
        Edits(log).undo()
        assert log.facts.about(1)["estimates"] == before
        Edits(log).undo(1)
        assert "value" not in log.facts.about(0) and "estimates" not in log.facts.about(0)


def test_episodes_are_filtered_by_their_values(blind_model: ValueModel, tmp_path: Path):
    path = write_log(tmp_path / "log", 6, pictures=False)
    write(blind_model, path)
    with Log.open(path, "r") as log:
        last = [log.facts.about(number)["value_last"] for number in range(6)]
        assert max(last[1::2]) < min(last[::2])  # failures are at odd places
        assert episodes_where(log, [f"value_last<{(max(last[1::2]) + min(last[::2])) / 2:.4f}"]) == [1, 3, 5]
        assert episodes_where(log, [f"value_model={blind_model.id}", "success=true"]) == [0, 2, 4]
        best = episodes_where(log, ["advantage_percentile>=40"])
        assert best and set(best) == {
            number for number in range(6) if log.facts.about(number)["advantage_percentile"] >= 40
        }


def test_a_view_has_the_steps_with_a_high_advantage_and_follows_the_facts(blind_model: ValueModel, tmp_path: Path):
    path = write_log(tmp_path / "log", 4, pictures=False)
    with Log.open(path, "r") as log:
        good = log.all().estimated("percentile", lambda percentile: percentile >= 70)
        assert len(good) == 0  # no step has one yet
        write(blind_model, path)
        log.refresh()
        want = [
            int(key)
            for number in range(4)
            for key, x in zip(
                log.trajectory_keys(number), log.facts.about(number)["estimates"]["percentile"], strict=True
            )
            if x >= 70
        ]
        assert good.keys().tolist() == want and 0 < len(want) < len(log)
        assert len(good.sample(8, keys=["rewards"])["rewards"]) == 8
        Edits(log).undo()
        assert len(good) == 0
        with pytest.raises(UnknownNameError, match="did you mean 'percentile'"):
            log.all().estimated("percentiles", lambda x: x > 0)


def test_facts_are_cut_with_their_episode(blind_model: ValueModel, tmp_path: Path):
    path = write_log(tmp_path / "log", 4, pictures=False)
    write(blind_model, path)
    with Log.open(path, "a") as log:
        whole = log.facts.about(1)["estimates"]["value"]
        Edits(log).split(1, 5)
        first, second = log.trajectories()[-2:]
        pieces = [log.facts.about(number)["estimates"] for number in (first, second)]
        assert pieces[0]["value"] == whole[:5] and pieces[1]["value"] == whole[5:]
        assert {piece["first"] for piece in pieces} == {0}
        assert log.facts.about(first)["value_last"] == whole[4]
        Edits(log).join([0, 2])
        joined = log.facts.about(log.trajectories()[-1])
        assert not {"estimates", "value", "value_last", "value_model"} & joined.keys()
        Edits(log).trim(3, first=4)
    dataset = LogDataset(path)
    with dataset.log:
        shown = next(job for number, job in enumerate(dataset.jobs()) if dataset.label(number) == "trajectory 3")()
        assert shown is not None
        assert shown.facts["estimates"]["value"] == dataset.log.facts.about(3)["estimates"]["value"][4:]


def test_percentiles_are_shares_of_the_steps_of_a_task():
    known = np.linspace(-1, 1, 101)
    assert percentiles(np.array([-2.0, 0.0, 2.0]), known) == [0.0, 50.0, 100.0]
    assert percentiles(np.array([0.0]), [0.0] * 101) == [50.0]  # all alike
