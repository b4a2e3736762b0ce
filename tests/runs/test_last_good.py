"""A run that collapsed goes back to the newest checkpoint from before the alarm, and nothing of it is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, LockedError
from hilt.observe.alarm_watch import AlarmWatch
from hilt.observe.alarms import RunFacts
from hilt.observe.metrics import Metrics, read_metrics
from hilt.runs import checkpoint
from hilt.runs.last_good import LastGood, go_back, last_good, went_back_to

FACTS = RunFacts("vla")


def learned(run: Path, first: int, last: int, kl: float, every: int = 10, keep: int = 9) -> None:
    """Updates of a process with this KL, each of which writes its metrics, and a checkpoint of every tenth."""
    with Metrics(run) as metrics:
        watch = AlarmWatch(run, FACTS, metrics, lambda text: None)
        for update in range(first, last + 1):
            metrics.write("update", {"ppo_kl": kl, "entropy": 1.0}, update=update, step=5 * update)
            watch.take({"ppo_kl": kl, "entropy": 1.0}, update=update, step=5 * update)
            if update % every == 0:
                state = {"elapsed": 1.0, "best": update / 100, "best_step": update}
                weights = {"w": torch.tensor([float(update)])}
                checkpoint.save(run, update, weights, state, keep, alarm=watch.spans.earliest)


@pytest.fixture
def collapsed(tmp_path: Path) -> Path:
    """Twelve good updates, then 28 bad ones: the alarm is raised at the third of these, 15."""
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "run.json", {"id": "x", "kind": "vla"})
    learned(run, 1, 12, 0.01)
    learned(run, 13, 40, 0.13)
    for name in ("evaluations/eval-00000010", "evaluations/eval-00000020-2", "evaluations/videos-00000030"):
        (run / name).mkdir(parents=True)
    for step in (10, 20):
        (run / f"actor/global_step_{step}").mkdir(parents=True)
    return run


def test_last_good_is_before_the_alarm_and_all_else_is_set_aside(collapsed: Path):
    assert last_good(collapsed) == LastGood(10, "ppo_kl", 15, 40) and checkpoint.numbers(collapsed) == [10, 20, 30, 40]
    assert went_back_to(collapsed) == -1
    assert go_back(collapsed) == LastGood(10, "ppo_kl", 15, 40) and went_back_to(collapsed) == 10
    aside = collapsed / "set_aside/1"
    assert checkpoint.numbers(collapsed) == [10] and checkpoint.numbers(aside) == [20, 30, 40]
    assert float(checkpoint.load(aside, 40).agent["w"]) == 40.0, "it is whole there"
    found = checkpoint.latest(collapsed)
    assert found is not None and float(found.agent["w"]) == 10.0 and found.state["elapsed"] == 1.0
    assert (found.state["best"], found.state["best_step"]) == (0.4, 40), "the best weights are kept apart, and stay"
    assert {path.name for path in (aside / "evaluations").iterdir()} == {"eval-00000020-2", "videos-00000030"}
    assert [path.name for path in (aside / "actor").iterdir()] == ["global_step_20"]
    assert [record["update"] for record in read_metrics(collapsed, ["update"])] == list(range(1, 11))
    [noted] = read_json(collapsed / "run.json")["went_back"]
    assert (noted["update"], noted["from"], noted["alarm"], noted["raised_at"]) == (10, 40, "ppo_kl", 15)
    assert noted["set_aside"] == "set_aside/1" and read_json(collapsed / "run.json")["id"] == "x"
    with pytest.raises(ConfigError, match="no alarm is raised, so there is nothing to go back from"):
        go_back(collapsed)


def test_the_figures_of_the_collapse_raise_no_alarm_after_going_back(collapsed: Path):
    go_back(collapsed)
    learned(collapsed, 11, 14, 0.01)
    with pytest.raises(ConfigError, match="no alarm is raised"):
        last_good(collapsed)
    learned(collapsed, 15, 40, 0.13)
    assert last_good(collapsed) == LastGood(10, "ppo_kl", 17, 40)
    go_back(collapsed)
    assert checkpoint.numbers(collapsed / "set_aside/2") == [20, 30, 40] and checkpoint.numbers(collapsed) == [10]
    assert len(read_json(collapsed / "run.json")["went_back"]) == 2


def test_an_alarm_began_when_it_was_raised_first(collapsed: Path):
    """Two more processes went on with the run, and raised it anew; the second was killed before its first record."""
    learned(collapsed, 41, 60, 0.13)
    with Metrics(collapsed):
        pass
    assert last_good(collapsed) == LastGood(10, "ppo_kl", 15, 60)
    learned(collapsed, 61, 70, 0.01)
    with pytest.raises(ConfigError, match="no alarm is raised"):
        last_good(collapsed)


def test_the_last_good_checkpoint_is_not_removed_by_newer_ones(tmp_path: Path):
    tmp_path.joinpath("run").mkdir()
    run = tmp_path / "run"
    learned(run, 1, 30, 0.01, keep=2)
    assert checkpoint.numbers(run) == [20, 30]
    learned(run, 31, 90, 0.13, keep=2)
    assert checkpoint.numbers(run) == [30, 80, 90] and last_good(run).update == 30
    learned(run, 91, 110, 0.01, keep=2)
    assert checkpoint.numbers(run) == [30, 100, 110], "another process raises anew what holds: it may come yet"
    learned(run, 111, 120, 0.01, keep=2)
    assert checkpoint.numbers(run) == [110, 120], "it did not"


def test_runs_that_cannot_go_back_say_why(collapsed: Path, tmp_path: Path):
    for update in (10,):
        (collapsed / f"checkpoints/{update}").rename(tmp_path / str(update))
    with pytest.raises(
        ConfigError, match=r"raised at update 15, and the oldest checkpoint is of update 20: none is from"
    ):
        go_back(collapsed)
    assert checkpoint.numbers(collapsed) == [20, 30, 40], "nothing was moved"
    (tmp_path / "10").rename(collapsed / "checkpoints/10")
    with checkpoint.alone(collapsed, "is at work"), pytest.raises(LockedError, match="is being trained"):
        go_back(collapsed)


def test_a_run_that_ended_with_numbers_that_are_not_finite_goes_back_to_its_newest_checkpoint(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    learned(run, 1, 24, 0.01)
    write_json(run / "run.json", {"ended": {"reason": "not_finite", "step": 44}})
    assert go_back(run) == LastGood(20, "not_finite", 44, 20) and not (run / "set_aside").exists()
    assert read_json(run / "run.json")["went_back"][0]["set_aside"] is False


def test_checkpoint_whose_evaluation_raised_the_alarm_is_not_good(tmp_path: Path):
    """It is evaluated beside learning: the alarm comes when there is more than that checkpoint."""
    with Metrics(tmp_path) as metrics:
        watch = AlarmWatch(tmp_path, RunFacts("hil"), metrics, lambda text: None)
        for update in range(10, 50, 10):
            checkpoint.save(tmp_path, update, {"w": torch.zeros(1)}, {"elapsed": 1.0}, 2, alarm=watch.spans.earliest)
            evaluated = {"validation_success": 0.98 if update < 30 else 0.5, "validation_episodes": 100.0}
            evaluated |= {"validation_update": float(update)}
            metrics.write("update", evaluated, update=update + 5, step=0)
            watch.take(evaluated, update=update + 5, step=0)
    assert checkpoint.numbers(tmp_path) == [20, 30, 40], "the last good one stays"
    assert last_good(tmp_path) == LastGood(20, "validation", 30, 40)


def prepared(run: Path, kl: float) -> None:
    """Three updates before the first, with this KL."""
    with Metrics(run) as metrics:
        watch = AlarmWatch(run, FACTS, metrics, lambda text: None)
        for number in (1.0, 2.0, 3.0):
            values = {"ppo_kl": kl, "entropy": 1.0, "prepared_updates": number}
            metrics.write("update", values, update=0, step=0)
            watch.take(values, update=0, step=0)


def test_an_alarm_from_before_the_first_update_does_not_hide_a_later_one(tmp_path: Path):
    run = tmp_path / "other"
    run.mkdir()
    with Metrics(run) as metrics:
        watch = AlarmWatch(run, FACTS, metrics, lambda text: None)
        for update, entropy in [(0, 1.0)] * 3 + [(n, 1.0 if n <= 12 else 0.01) for n in range(1, 41)]:
            values = {"ppo_kl": 0.13, "entropy": entropy}
            metrics.write("update", values, update=update, step=0)
            watch.take(values, update=update, step=0)
            if update and update % 10 == 0:
                checkpoint.save(run, update, {"w": torch.zeros(1)}, {"elapsed": 1.0}, 2, alarm=watch.spans.earliest)
    assert watch.spans.standing["ppo_kl"] == 0 and watch.spans.earliest == watch.spans.standing["entropy"] > 12
    assert checkpoint.numbers(run) == [10, 30, 40], "the last good one stays"
    assert last_good(run) == LastGood(10, "entropy", watch.spans.standing["entropy"], 40)


def test_a_run_whose_only_alarm_is_from_before_the_first_update_says_so(tmp_path: Path):
    prepared(tmp_path, 0.13)
    raised = "alarm ppo_kl was raised before the first update, so no checkpoint is from before it. --resume"
    with pytest.raises(ConfigError, match=f"{raised} begins learning anew: give other settings with it"):
        last_good(tmp_path)
    checkpoint.save(tmp_path, 0, {"w": torch.zeros(1)}, {"elapsed": 1.0}, 2)
    with pytest.raises(ConfigError, match=f"{raised} goes on from the newest one"):
        last_good(tmp_path)
