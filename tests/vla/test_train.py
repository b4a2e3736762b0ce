"""Post-training from the first validation to the kept policy, and on from wherever it was interrupted, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.checksums import read_json
from hilt.core.config import thaw
from hilt.core.errors import AlarmError, ConfigError, EmptyError, LockedError, MissingPackageError, SchemaError
from hilt.core.progress import silent
from hilt.distributed.optimizer import DataParallelOptimizer, learning_rate
from hilt.observe.live import Standing
from hilt.observe.metrics import Metrics, read_metrics
from hilt.observe.statistics import clustered, effective, wilson
from hilt.policies.registry import load_policy
from hilt.replay import Log
from hilt.replay.storage.lock import WriterLock
from hilt.runs import checkpoint, evaluation
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_training import train_value
from hilt.vla import train as post_train
from hilt.vla import worker as roles
from hilt.vla.config import Vla
from hilt.vla.rollout import ChunkOptions
from hilt.vla.train import Controller, TrainSummary, begin_run, resume_run, train
from hilt.vla.trained import evaluate, policy_of
from tests.effort import devices
from tests.value.valued import BLIND, save_untrained
from tests.vla.toy_vla import DOWN, UP, config, weights

MEASURED = {f"{name}_share" for name in ("simulator", "beside", "model", "update", "other")}
MEASURED |= {"time", "env_steps_per_second", "updates_per_second"}
MEASURED |= {"rollout_quantize_ms", "step_seconds", "validation_seconds", "trajectory", "prefetched"}
"""What is another in each run; what was begun ahead when a run was stopped is begun again later"""


def started(run: Path, *changes: Any, **more: Any) -> TrainSummary:
    report = more.pop("report", silent)
    settings = config(*changes, **more)
    begin_run(run, "toy", settings)
    return train(settings, run, report=report)


def resumed(run: Path, *changes: str, **more: Any) -> TrainSummary:
    return train(resume_run(run, "", changes), run, **more)


def told(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in read_metrics(run, ["update", "episode"])
    ]


def logged(run: Path) -> list[tuple[Any, ...]]:
    """All that the log has, but for the numbers of its trajectories: those of a step that was made again are higher."""
    with Log.open(run / "rollouts" / "rank-0", "r") as log:
        found = []
        for trajectory in log.trajectories():
            facts = {name: fact for name, fact in log.facts.about(trajectory).items() if name != "trajectory"}
            rows = log.read(log.trajectory_keys(trajectory), ["record", "rewards", "executed", "earned"])
            found.append(
                (json.dumps(facts, sort_keys=True), *(rows["record"][n].tobytes() for n in sorted(rows["record"])))
            )
        return found


@pytest.mark.parametrize("device", devices())
def test_it_learns_validates_and_keeps_its_best(device: str, tmp_path: Path):
    run, phases = tmp_path / "run", list[tuple[Any, ...]]()
    sizes = ["collect.data_batch_size=32", "algorithm.batch.trajectories_per_step=16", "validation.period=5"]
    done = started(run, "max_steps=10", f"device={device}", *sizes, report=lambda *given: phases.append(given))
    assert list(dict.fromkeys(name for name, *_ in phases))[:6] == [
        *(
            "starting the rank: the policy and the simulators",
            "after step 0: validating",
            "step 1: collecting episodes",
        ),
        *("step 1: learning from the chunks", "step 2: collecting episodes", "step 2: learning from the chunks"),
    ]
    assert [one[:3] for one in phases if "validating" in one[0]][:3] == [
        ("after step 0: validating", *n) for n in ((), (1, 10), (2, 10))
    ]
    assert ("step 3: collecting episodes", 32, 32, "") in phases and phases[-2:] == [
        ("writing a checkpoint",),
        ("writing the policy",),
    ]
    learned = [count for name, *count in phases if name == "step 3: learning from the chunks"]
    assert learned[-1][0] == learned[-1][1] and learned[1:] == sorted(learned[1:])
    updates = read_metrics(run, ["update"])
    validated = [record for record in updates if "validation_success" in record]
    assert [record["update"] for record in validated] == [0, 5, 10]
    assert validated[-1]["validation_success"] >= validated[0]["validation_success"] + 0.4, "GRPO learns both tasks"
    assert (done.reason, done.step, done.success) == (
        "max_steps",
        10,
        max(record["validation_success"] for record in validated),
    )
    # five states of each of two tasks, all of them
    low, high = wilson(round(10 * validated[-1]["validation_success"]), 10)
    assert (validated[-1]["validation_low"], validated[-1]["validation_high"]) == (low, high)
    for task in (UP, DOWN):
        result = read_json(run / "evaluations" / f"eval-00000010-{task}" / "evaluation.json")
        assert (
            result["episodes"] == 5
            and result["success"] == validated[-1][f"validation_success/{task}"]
            and result["split"] == "eval"
        )
        assert [one["state"] for one in result["outcomes"]] == [0, 1, 2, 3, 4]
    learned = [record for record in updates if "policy_loss" in record]
    assert [record["update"] for record in learned] == list(range(1, 11)) and learned[0]["used_episodes"] == 32
    for record in learned:
        assert sum(record[f"{name}_share"] for name in ("simulator", "model", "update", "other")) == pytest.approx(1)
    episodes = read_metrics(run, ["episode"])
    with Log.open(run / "rollouts" / "rank-0", "r") as log:
        assert len(episodes) == len(log.trajectories()) == 10 * 32, "every collected episode is a trajectory of the log"
        facts = [log.facts.about(trajectory) for trajectory in log.trajectories()]
    assert {fact["split"] for fact in facts} == {"train"} and {fact["task"] for fact in facts} == {UP, DOWN}
    assert [fact["success"] for fact in facts] == [episode["success"] for episode in episodes]
    assert read_json(run / "result.json")["best_step"] == done.best_step
    kept = load_policy(run / "policy").state_dict()
    best = policy_of(run, "best").state_dict()
    assert all(np.array_equal(kept[name].numpy(), best[name].numpy()) for name in kept)
    assert len(list((run / "best").iterdir())) == 1 and checkpoint.numbers(run) == [10]


@pytest.mark.parametrize("before", [True, False])
def test_an_environment_that_does_not_report_success_is_refused_with_its_first_episode(tmp_path: Path, before: bool):
    tasks = {"tasks": ["tests.vla.toy_vla:silent"], "validation": {"before": before}}
    with pytest.raises(
        ConfigError, match=r"silent does not report success: .* none of succeed, is_success, success.*as_task\(env"
    ):
        started(tmp_path / "run", **tasks)


def test_the_first_validation_of_a_run_without_a_checkpoint_is_recorded_once(tmp_path: Path):
    """It was killed between the validation before the first step and the first checkpoint."""
    run, settings = tmp_path / "run", config(*SMALL)
    begin_run(run, "toy", settings)
    with Metrics(run) as metrics:
        metrics.event("begins", update=0, step=0)
        metrics.write("update", {"validation_success": 0.5}, update=0, step=0)
    train(settings, run)
    validated = [record["update"] for record in read_metrics(run, ["update"]) if "validation_success" in record]
    assert validated.count(0) == 1 and validated[-1] == 3
    assert next(record["event"] for record in read_metrics(run, ["event"])) == "begins", "events stay"
    standing = Standing(run)
    standing.read()
    assert standing.updates == 3


def test_a_policy_that_never_succeeds_is_mentioned(tmp_path: Path):
    settings, said = config(*SMALL, tasks=["tests.vla.toy_vla:hopeless"]), list[str]()
    begin_run(tmp_path / "run", "toy", settings)
    train(settings, tmp_path / "run", notify=said.append)
    assert [line for line in said if "none of 24 episodes in training succeeded" in line and "after step 3" in line]


SMALL = ["max_steps=3", "collect.data_batch_size=8", "algorithm.batch.trajectories_per_step=4", "validation.episodes=1"]
WAYS = {
    "grpo with a surplus that the log has no room for, begun ahead, an adaptive KL": [
        "collect.groups_at_once=3",
        "collect.prefetch=true",
        "algorithm.kl.where=reward",
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.target=0.001",
        "algorithm.kl.coefficient=0.1",
        "rollouts_gb=1e-6",
        "collect.dynamic_sampling=true",
        "algorithm.recompute_log_prob=true",
        "policy_options.rollout_precision=fp8_emulated",
    ],
    "gae with a critic of its own": [
        "algorithm.estimator=gae",
        "critic.kind=separate",
        "algorithm.epochs=2",
        "optimizer.schedule=cosine",
    ],
}


def test_rollouts_in_float8_are_measured_and_corrected_for(tmp_path: Path):
    float8 = ["policy_options.rollout_precision=fp8_emulated", "algorithm.recompute_log_prob=true"]
    started(tmp_path / "run", *SMALL, *float8)
    learned = [record for record in read_metrics(tmp_path / "run", ["update"]) if "policy_loss" in record]
    assert len(learned) == 3
    for record in learned:
        assert 0 < record["rollout_kl"] < 0.01 and 0 <= record["rollout_changed"] <= 1
        assert record["rollout_quantize_ms"] >= 0
        # the weights that acted are those that learn: all that is corrected for is their precision
        assert record["importance_weight"] == pytest.approx(1, abs=0.05) and record["importance_weight_max"] != 1
        assert abs(record["behavior_kl"]) < 0.05


class Stop:
    """Tells the group to stop while the so-manieth episode is written down, or fails in that update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.after, self.fail_in = 10**9, -1
        add, update, open_group = roles.EpisodeLog.add, roles.Worker.update, post_train.open_group

        def opened(*given: Any, **named: Any) -> Any:
            self.group = open_group(*given, **named)
            return self.group

        def added(log: Any, *given: Any) -> int:
            self.after -= 1
            if self.after == 0:
                self.group.stop()
            return add(log, *given)

        def updated(worker: Any, *given: Any) -> Any:
            figures = update(worker, *given)
            if worker.updater.updates - 1 == self.fail_in:
                raise RuntimeError("the power went")
            return figures

        monkeypatch.setattr(post_train, "open_group", opened)
        monkeypatch.setattr(roles.EpisodeLog, "add", added)
        monkeypatch.setattr(roles.Worker, "update", updated)


@pytest.mark.parametrize("way", WAYS)
def test_on_from_where_it_was_interrupted_bit_for_bit(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    started(whole, *SMALL, *WAYS[way])
    stop = Stop(monkeypatch)
    stop.after = 14  # in the middle of collecting
    assert started(parts, *SMALL, *WAYS[way]).reason == "stopped"
    stop.fail_in = 2  # after an update that no checkpoint has
    with pytest.raises(RuntimeError, match="the power went"):
        resumed(parts)
    stop.fail_in = -1
    done = resumed(parts)
    assert done.reason == "max_steps" and done.step == 3
    one, other = weights(whole), weights(parts)
    assert set(one) == set(other)
    different = [
        name
        for name in one
        if not np.array_equal(one[name], other[name]) and "trajectory" not in name and "log_end" not in name
    ]
    assert not different
    assert logged(whole) == logged(parts)
    assert told(whole) == told(parts)


def test_a_surplus_that_somebody_removed_is_collected_anew(tmp_path: Path):
    run, said = tmp_path / "run", list[str]()
    started(run, *SMALL, "max_steps=1", "collect.groups_at_once=3")
    with Log.open(run / "rollouts" / "rank-0") as log:
        log.delete(log.trajectories()[-1])
    assert resumed(run, "max_steps=2", notify=said.append).step == 2
    assert any("rank 0: 1 groups that were carried over are no longer in" in line for line in said)


def test_stopped_in_a_validation_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, stop, validate = tmp_path / "run", Stop(monkeypatch), roles.Worker.validate

    def stopped(worker: Any, step: int) -> Any:
        stop.group.stop()
        return validate(worker, step)

    monkeypatch.setattr(roles.Worker, "validate", stopped)
    assert (
        started(run) == TrainSummary("stopped", 0, -1, -1.0, pytest.approx(0, abs=60)) and not (run / "policy").exists()
    )
    elapsed = checkpoint.latest(run).state["elapsed"]
    assert resumed(run).reason == "stopped" and checkpoint.latest(run).state["elapsed"] > elapsed, (
        "in the same step once more"
    )
    monkeypatch.setattr(roles.Worker, "validate", validate)
    assert resumed(run, "max_steps=1").step == 1 and (run / "policy").is_dir()
    assert [record["update"] for record in read_metrics(run, ["update"]) if "validation_success" in record] == [0, 1]


def test_a_run_that_is_stopped_writes_its_policy_after_what_it_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, never = tmp_path / "run", ("validation.before=false", "validation.period=0", "validation.after=false")
    settings = config(*never, "max_steps=9", "checkpoint_period=9")
    begin_run(run, "toy", settings)

    def updates() -> list[dict[str, Any]]:
        return read_metrics(run, ["update"]) if (run / "metrics.jsonl").exists() else []

    def stopped_after(step: int, **more: Any) -> TrainSummary:
        now = resume_run(run, "", ())
        return train(now, run, stop=lambda: any(record["update"] >= step for record in updates()), **more)

    done = stopped_after(1)
    assert done.reason == "stopped" and done.best_step == done.step >= 1 and done.success == -1, (
        "without a validation the last is kept"
    )
    assert read_json(run / "result.json") == {
        **read_json(run / "result.json"),
        "reason": "stopped",
        "best_step": done.step,
    }
    last = policy_of(run, "last").state_dict()
    kept = load_policy(run / "policy").state_dict()
    assert all(np.array_equal(kept[name], last[name]) for name in last)

    def killed(*given: Any) -> None:
        raise RuntimeError("the grace period is over")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the grace period is over"):
        patch.setattr(post_train.exports, "export", killed)
        stopped_after(done.step + 1)
    ended = read_json(run / "run.json")["ended"]
    assert ended["reason"] == "stopped" and ended["step"] == max(checkpoint.numbers(run)) > done.step
    assert read_json(run / "result.json")["step"] == done.step, "of the policy that is there"
    assert [result.update for result in evaluate(run, "last", episodes=1)] == [ended["step"]] * 2
    stepped = evaluate(run, "last", episodes=1, chunks=ChunkOptions("asynchronous"))
    figures = {"mode": "asynchronous", "execute": 0, "delay": 0, "held": 0, "idle_share": 0.0}
    assert [result.execution for result in stepped] == [
        {**figures, "steps": result.outcomes[0].steps} for result in stepped
    ]
    assert (
        stepped[0].folder
        and read_json(stepped[0].folder / evaluation.EVALUATION_FILE)["execution"] == stepped[0].execution
    )
    assert resumed(run, "max_steps=4" if ended["step"] < 4 else f"max_steps={ended['step']}").reason == "max_steps"


def test_time_that_was_lost_with_a_worker_was_spent(tmp_path: Path):
    class Nobody:
        def call(self, *given: Any) -> list[Any]:
            return []

    with Metrics(tmp_path) as metrics:
        controller: Any = Controller(config(), tmp_path, Nobody(), metrics, print)
        controller._began -= 1000
        controller._restore()
        assert controller._seconds() >= 1000


def test_how_often_it_is_validated(tmp_path: Path):
    def times(name: str, *changes: str) -> list[int]:
        started(tmp_path / name, "max_steps=3", *changes)
        return [
            record["update"] for record in read_metrics(tmp_path / name, ["update"]) if "validation_success" in record
        ]

    assert times("default") == [0, 2, 3]
    assert times("later", "validation.before=false") == [2, 3], "a multiple of the period, but not the start"
    assert times("never", "validation.before=false", "validation.period=0", "validation.after=false") == []
    assert read_json(tmp_path / "never/result.json")["best_step"] == 3, "what is last is kept"
    assert resumed(tmp_path / "never", "max_steps=4").best_step == 4, "and of a run that goes on, what is last then"
    assert times("only", "max_steps=0", "validation.sample=true", "validation.episodes=2") == [0]
    results = [read_json(path) for path in (tmp_path / "only").glob("evaluations/*/evaluation.json")]
    assert [result["episodes"] for result in results] == [2, 2] and all(result["sample"] for result in results)


def test_max_seconds_ends_it_after_a_step_and_it_goes_on(tmp_path: Path):
    assert started(tmp_path / "run", "max_seconds=0.001", "validation.before=false").reason == "max_seconds"
    assert resumed(tmp_path / "run", "max_seconds=0", "max_steps=2").step == 2


def test_the_schedule_follows_the_end_that_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It went by max_steps alone: a run that max_seconds ended had never left its highest learning rate."""
    monkeypatch.setattr(post_train.Controller, "_seconds", lambda self: self._elapsed + 10.0 * self.step)
    run, given = (
        tmp_path / "run",
        ("optimizer.schedule=cosine", "validation.before=false", "validation.period=0", "validation.after=false"),
    )
    assert started(run, *given, "max_steps=1000", "max_seconds=40", "checkpoint_period=1").reason == "max_seconds"

    def rates() -> list[float]:
        return [record["learning_rate"] for record in read_metrics(run, ["update"]) if "learning_rate" in record]

    assert rates() == pytest.approx([learning_rate(config(*given).optimizer, p) for p in (0.001, 0.25, 0.5, 0.75)])
    assert resumed(run, "max_seconds=0", "max_steps=8").step == 8
    assert rates()[4:] == pytest.approx([learning_rate(config(*given).optimizer, n / 8) for n in (5, 6, 7, 8)])


def test_seconds_before_the_first_training_step_are_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The validation before it, one of 60 of 900 seconds, passed a warm-up over."""
    monkeypatch.setattr(post_train.Controller, "_seconds", lambda self: 60.0 + 10.0 * self.step)
    run, given = (
        tmp_path / "run",
        ("optimizer.schedule=cosine", "validation.before=false", "validation.period=0", "validation.after=false"),
    )
    assert started(run, *given, "max_steps=1000", "max_seconds=80").step == 2
    assert resumed(run, "max_seconds=100").step == 4
    rates = [record["learning_rate"] for record in read_metrics(run, ["update"]) if "learning_rate" in record]
    assert rates == pytest.approx(
        [learning_rate(config(*given).optimizer, p) for p in (0.001, 10 / 20, 20 / 40, 30 / 40)]
    )


def test_a_run_in_which_every_group_succeeds_ends_as_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a filter it ended with an error, and left no policy."""
    run, said = tmp_path / "run", list[str]()
    easy = {
        "tasks": ["tests.vla.toy_vla:easy"],
        "collect": {"group_size": 8, "data_batch_size": 64, "dynamic_sampling": True},
    }
    settings = config(
        "max_steps=50", "algorithm.batch.trajectories_per_step=0", "solved_steps=2", "validation.before=false", **easy
    )
    begin_run(run, "", settings)
    done = train(settings, run, notify=said.append)
    assert (done.reason, done.step) == ("solved", 2) and (run / "policy").is_dir() and checkpoint.numbers(run) == [2]
    assert any("all members of all 32 groups" in line for line in said)
    ended = read_json(run / "run.json")["ended"]
    assert (
        ended["reason"] == "solved"
        and ended["words"] == "solved: all members of all groups succeeded in 2 training steps in a row"
    )
    assert resumed(run).step == 2, "it is still solved"
    monkeypatch.setattr(post_train, "WAITING", 1)
    assert resumed(run, "solved_steps=0", "max_steps=3").reason == "exhausted", "nothing is left to learn from"
    assert [(one["step"], one["settings"]["solved_steps"]) for one in read_json(run / "run.json")["changed"]] == [
        (2, {"was": 2, "now": 0})
    ]


def test_a_step_whose_groups_only_wait_is_no_training_step(tmp_path: Path):
    """It counted in max_steps, and in the schedule of the learning rate."""
    run, quiet = (
        tmp_path / "run",
        ("validation.before=false", "validation.period=0", "validation.after=false", "checkpoint_period=1"),
    )
    few = (
        "collect.dynamic_sampling=true",
        "collect.max_sampling_attempts=1",
        "algorithm.batch.trajectories_per_step=0",
    )
    given = (*quiet, *few, "optimizer.learning_rate=1e-6", "optimizer.schedule=cosine", "critic.kind=none")
    done = started(run, *given, "max_steps=2")
    assert done.reason == "max_steps" and done.waited > 0 and done.step == 2 + done.waited
    records = read_metrics(run, ["update"])
    learned = [record for record in records if record.get("optimizer_steps")]
    assert len(records) == done.step and len(learned) == 2 and records[-1]["waited_steps"] == done.waited
    assert {record["used_episodes"] for record in learned} == {16}, "of whole batches"
    rates = [learning_rate(config(*given).optimizer, progress) for progress in (1 / 2, 1)]
    assert [record["learning_rate"] for record in learned] == pytest.approx(rates)
    again = resumed(run, "max_steps=3")
    assert again.step == 3 + again.waited and again.waited >= done.waited
    assert Standing(run).left({"max_steps": 4}) != 0, "the table counts training steps, too"


def test_a_run_that_finds_nothing_to_learn_from_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(post_train, "WAITING", 3)
    run, never = tmp_path / "run", {"tasks": ["tests.vla.toy_vla:hopeless"], "collect": {"dynamic_sampling": True}}
    done = started(run, "collect.max_sampling_attempts=1", "validation.before=false", "max_steps=2", **never)
    assert (done.reason, done.step, done.waited) == ("exhausted", 3, 3) and (run / "policy").is_dir()
    assert read_json(run / "run.json")["ended"]["words"].startswith(
        "3 steps in a row found too few groups to learn from"
    )


def test_gradients_that_are_not_finite_end_a_run_that_goes_on_with_another_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, backward = tmp_path / "run", DataParallelOptimizer.backward

    def spoiled(optimizer: DataParallelOptimizer, loss: Any) -> None:
        backward(optimizer, loss * (math.nan if optimizer.settings.learning_rate > 1e-3 else 1.0))

    monkeypatch.setattr(DataParallelOptimizer, "backward", spoiled)
    quiet = (
        "validation.before=false",
        "validation.period=0",
        "validation.after=false",
        "checkpoint_period=1",
        "max_steps=9",
    )
    with pytest.raises(
        AlarmError, match=r"the last 6 steps of the optimizer .* from step 0.*--resume optimizer\.learning_rate=0\.001"
    ):
        started(run, *quiet)
    skipped = [
        (one["skipped_steps"], one["skipped_in_a_row"])
        for one in read_metrics(run, ["update"])
        if "skipped_steps" in one
    ]
    assert skipped == [(2, 2), (2, 4), (2, 6)] and not checkpoint.numbers(run)
    done = resumed(run, "optimizer.learning_rate=0.001", "max_steps=2", "collect.group_size=8", "algorithm.epochs=2")
    assert (done.reason, done.step) == ("max_steps", 2)
    change = read_json(run / "run.json")["changed"][0]["settings"]
    assert change["optimizer.learning_rate"] == {"was": 0.01, "now": 0.001} and change["collect.group_size"] == {
        "was": 4,
        "now": 8,
    }
    last = [one for one in read_metrics(run, ["update"]) if "skipped_steps" in one][-1]
    assert last["skipped_steps"] == 0 and last["optimizer_steps"] == 4


def test_an_alarm_ends_a_run_with_a_checkpoint_and_it_goes_on(tmp_path: Path):
    """A learning rate at which the policy jumps: it is raised in a real run."""
    run, quiet = (
        tmp_path / "run",
        ("validation.before=false", "validation.period=0", "validation.after=false", "max_steps=20"),
    )
    with pytest.raises(
        AlarmError,
        match=r"alarm ppo_kl: the policy moves .* nats .* --resume goes on from here. The policy .*run/policy",
    ):
        started(run, *quiet, "optimizer.learning_rate=0.3", "algorithm.epochs=4", "stop_on=[ppo_kl]")
    *good, last = checkpoint.numbers(run)
    raised = read_json(run / "run.json")["alarms"][0]["update"]
    assert len(good) == 1 and good[0] < raised <= last, "and the last one before the alarm, to go back to"
    kept, now = (policy.state_dict() for policy in (load_policy(run / "policy"), policy_of(run, "last")))
    assert all(np.array_equal(kept[name], now[name]) for name in now), (
        "as when it is stopped: without a validation the last is kept"
    )
    assert read_json(run / "result.json")["reason"] == "alarm" and read_json(run / "result.json")["best_step"] == last
    result = read_json(run / "run.json")
    assert (
        result["ended"]["reason"] == "alarm"
        and result["ended"]["step"] == last
        and result["alarms"][0]["name"] == "ppo_kl"
    )
    calm = ("optimizer.learning_rate=0.0001", "algorithm.epochs=1", f"max_steps={last + 3}")
    assert resumed(run, *calm).reason == "max_steps" and read_json(run / "run.json")["ended"]["reason"] == "max_steps"
    with pytest.raises(
        ConfigError, match=r"stop_on=explained_variance would do nothing: it needs algorithm\.estimator=gae"
    ):
        config("stop_on=[explained_variance]").check()


def test_an_alarm_at_a_validation_keeps_the_policy_of_the_best_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shares, validate = iter(["alarm validation: worse", ""]), post_train.AlarmWatch.take

    def worse(self: Any, values: Any, **given: Any) -> str:
        validate(self, values, **given)
        return next(shares) if "validation_success" in values and given["update"] else ""

    monkeypatch.setattr(post_train.AlarmWatch, "take", worse)
    run = tmp_path / "run"
    with pytest.raises(
        AlarmError,
        match=r"alarm validation: worse It was ended because stop_on .* The policy so far is in .*run/policy",
    ):
        started(run, "validation.period=1", "validation.episodes=1", "max_steps=3", "stop_on=[validation]")
    result, ended = read_json(run / "result.json"), read_json(run / "run.json")["ended"]
    assert (result["reason"], result["step"], ended["reason"], ended["step"]) == ("alarm", 1, "alarm", 1) and result[
        "success"
    ] >= 0
    kept, best = (policy.state_dict() for policy in (load_policy(run / "policy"), policy_of(run, "best")))
    assert all(np.array_equal(kept[name], best[name]) for name in best) and checkpoint.numbers(run) == [1]
    assert resumed(run, "max_steps=2", "stop_on=[]").reason == "max_steps"


def test_goal_ends_training_when_validations_in_a_row_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shares = iter([0.5, 1.0, 0.5, 1.0, 1.0, 0.0])
    validate = post_train.Controller._validate

    def validated(self: Any) -> None:
        validate(self)
        self._successes[-1] = next(shares)

    monkeypatch.setattr(post_train.Controller, "_validate", validated)
    goal = ("validation.goal=0.9", "validation.hold=2", "validation.period=1", "validation.episodes=1")
    done = started(tmp_path / "run", *goal, "max_steps=3")
    assert (done.reason, done.step) == ("max_steps", 3), (
        "validations 0, 1, 2, 3: the goal was reached, and did not hold"
    )
    done = resumed(tmp_path / "run", "max_steps=100")
    assert (done.reason, done.step) == ("goal", 4), "the one before it was resumed counts"
    assert (tmp_path / "run" / "policy").is_dir()
    assert resumed(tmp_path / "run", "validation.goal=0", "max_steps=5").reason == "max_steps"


def test_a_lost_episode_of_a_validation_is_a_failure_and_told(tmp_path: Path):
    said: list[str] = []
    settings = config("max_steps=0", "task_options.fails=3", "collect.retries=0")
    begin_run(tmp_path / "run", "", settings)
    train(settings, tmp_path / "run", notify=said.append)
    result = read_json(tmp_path / "run/evaluations" / f"eval-00000000-{UP}" / "evaluation.json")
    assert result["episodes"] == 5 and result["errors"] == 1 and "the lamp is broken" in result["outcomes"][3]["error"]
    assert any("2 lost" in line for line in said)


def test_a_validation_of_tasks_that_share_their_scenes_counts_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "scene_of", lambda task: "one")
    started(tmp_path / "run", "max_steps=0")
    (validated,) = (record for record in read_metrics(tmp_path / "run", ["update"]) if "validation_success" in record)
    results = [
        read_json(tmp_path / "run/evaluations" / f"eval-00000000-{task}" / "evaluation.json") for task in (UP, DOWN)
    ]
    outcomes, states = zip(
        *((bool(one["success"]), one["state"]) for result in results for one in result["outcomes"]), strict=True
    )
    assert (validated["validation_low"], validated["validation_high"]) == pytest.approx(clustered(outcomes, states))
    assert validated["validation_effective_episodes"] == pytest.approx(effective(outcomes, states))


def test_videos_of_a_validation(tmp_path: Path):
    pytest.importorskip("av")
    started(tmp_path / "run", "max_steps=0", "validation.videos=2")
    filmed = [path.stem for path in (tmp_path / "run/evaluations/videos-00000000").glob("*.mp4")]
    assert len({name.rpartition("-")[0] for name in filmed}) == len(filmed) == 2, "one of each task"


def test_videos_without_their_package_are_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started(tmp_path / "made", "max_steps=0")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "av" else find(name, *more))
    missing = r"needs the package 'av', which is not installed: pip install 'hilt\[formats\]'"
    with pytest.raises(ConfigError, match=rf"validation\.videos {missing}"):
        begin_run(tmp_path / "run", "mine", config("validation.videos=2"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingPackageError, match=rf"A video of an episode {missing}"):
        evaluate(tmp_path / "made", videos=1)


@pytest.mark.peers  # peft takes as long to import as all else here takes
def test_adapters_are_trained_alone_merged_and_gone_on_with(tmp_path: Path):
    first, run = tmp_path / "first", tmp_path / "run"
    started(first, "max_steps=0")
    settings = config("max_steps=2", "lora.rank=2", "lora.targets=[up,down]", policy=str(first / "policy"))
    settings.policy_options = {}
    begin_run(run, "", settings)
    train(settings, run)
    assert resumed(run, "max_steps=3").step == 3
    before, after = (load_policy(one / "policy").state_dict() for one in (first, run))
    last = policy_of(run, "last")
    changed = {name.split(".")[-2] for name in before if not np.array_equal(before[name].numpy(), after[name].numpy())}
    assert set(before) == set(after) and changed <= {"up", "down", "out"}, "adapters, and the head in full"
    assert {
        name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in last.named_parameters() if ".lora_" in name
    } == {"up", "down"}
    assert (run / "adapter/adapter_model.safetensors").is_file()


def test_what_cannot_go_on_is_said_and_a_refused_start_is_no_run(tmp_path: Path):
    run = tmp_path / "run"
    started(run, "max_steps=1")
    with pytest.raises(
        ConfigError, match=r"critic\.kind was 'none' in .* and is 'shared' now, which a resumed run cannot change"
    ):
        resumed(run, "critic.kind=shared", "algorithm.estimator=gae")
    with pytest.raises(ConfigError, match="has no run of post-training to resume"):
        resume_run(tmp_path, "", [])
    with pytest.raises(ConfigError, match="is a run of toy, not of other"):
        resume_run(run, "other", [])
    assert resume_run(run, "", ["pool.slots=4"]).pool.slots == 4 and thaw(Vla, run / "config.yaml").pool.slots == 4
    with WriterLock(run), pytest.raises(LockedError, match="is being trained already"):
        resumed(run)
    refused = tmp_path / "refused"
    with pytest.raises(Exception, match=r"no tabletop task named 'pik'"):
        started(refused, tasks=["tabletop/pik"], columns={}, suite="tabletop")
    assert list(refused.iterdir()) == []
    with pytest.raises(ConfigError, match=r"checkpoint 'first': expected best, last, or the number of one: 1"):
        policy_of(run, "first")
    with pytest.raises(EmptyError, match="has 0 of 4 groups"):
        given = (
            "collect.dynamic_sampling=true",
            "collect.max_sampling_attempts=1",
            "collect.temperature=0.001",
            "seed=5",
        )
        given = (*given, "collect.when_exhausted=error")
        started(tmp_path / "none", *given, "validation.before=false")
    assert (tmp_path / "none/rollouts/rank-0").is_dir(), "what was collected stays to be looked at"


def test_rollouts_that_a_value_model_of_an_earlier_run_finds_hopeless_end_early(tmp_path: Path):
    sizes = ["collect.data_batch_size=48", "algorithm.batch.trajectories_per_step=24", "validation.before=false"]
    started(tmp_path / "first", "max_steps=2", *sizes)
    with ValueEpisodes([tmp_path / "first" / "rollouts" / "rank-0"]) as episodes:
        assert train_value(episodes, ValueConfig(**{**BLIND, "steps": 150}), tmp_path / "value") is not None
    limits = [f"value.model={tmp_path / 'value'}", "value.stop_below=0.15", "value.stop_patience=2"]
    started(run := tmp_path / "run", "max_steps=3", *sizes, *limits)
    rolled = read_metrics(run, ["episode"])
    stopped = [record for record in rolled if "stopped_by_value" in record]
    assert len(stopped) > 10 and len(rolled) == 3 * 48
    for record in stopped:  # of four steps in chunks of two
        assert record["stopped_by_value"] < 0.15 and record["truncated"] and not record["success"]
        assert (record["length"], record["steps_saved"]) == (2, 2)
    checked = [record for record in rolled if record["value_checked"]]
    assert checked and not any("stopped_by_value" in record for record in checked)
    updates = [record for record in read_metrics(run, ["update"]) if "episodes" in record]
    assert [record["value_stopped"] for record in updates] == [
        sum(record["training_step"] == step for record in stopped) for step in (1, 2, 3)
    ]
    assert sum(record["value_steps_saved"] for record in updates) == 2 * len(stopped)
    assert sum(record["value_checked"] for record in updates) == len(checked)
    assert sum(record.get("value_recovered", 0) * record["value_checked"] for record in updates) == pytest.approx(
        sum(record["success"] for record in checked)
    )
    assert all(0 < record["value_hopeless"] < 1 for record in updates)
    # a validation ends no episode early
    last = read_json(run / "evaluations" / f"eval-00000003-{UP}" / "evaluation.json")
    assert all(outcome["success"] or outcome["steps"] == 4 for outcome in last["outcomes"])
    with Log.open(run / "rollouts" / "rank-0", "r") as log:
        facts = [log.facts.about(number) for number in log.trajectories()]
        marked = [fact for fact in facts if "stopped_by_value" in fact]
        assert len(marked) == len(stopped) and not any(fact["success"] for fact in marked)
    with ValueEpisodes([run / "rollouts" / "rank-0"]) as episodes:
        assert len(episodes.known()) == len(episodes) - len(stopped), "nothing is known of how they would have ended"
    resumed(run, "max_steps=4", "value.stop_below=0", "value.stop_patience=10")
    assert read_metrics(run, ["update"])[-2]["value_stopped"] == 0


def test_a_value_model_that_does_not_fit_is_refused_before_there_is_a_run(tmp_path: Path):
    def refused(error: type[Exception], match: str, seen: dict[str, int], tasks: tuple[str, ...] = (UP, DOWN)) -> None:
        folder = save_untrained(tmp_path / str(len(list(tmp_path.iterdir()))), seen, tasks)
        with pytest.raises(error, match=match):
            begin_run(tmp_path / "run", "toy", config(f"value.model={folder}"))
        assert not (tmp_path / "run").exists()

    refused(SchemaError, "looks at state of 3 numbers, and here it has 1", {"observations/state": 3})
    refused(SchemaError, "looks at arm of 1 numbers, and here it has none", {"observations/arm": 1})
    refused(SchemaError, f"was trained on '{UP}', and episodes of '{DOWN}' are to be", {"observations/state": 1}, (UP,))
    # what is recorded is known when there is a policy: before the first episode
    folder = save_untrained(tmp_path / "records", {"record/state": 3}, (UP, DOWN))
    with pytest.raises(SchemaError, match="looks at record/state of 3 numbers, and here it has 1"):
        started(tmp_path / "run", f"value.model={folder}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
