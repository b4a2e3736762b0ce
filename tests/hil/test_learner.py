"""The learner: every option at work, resumed bit for bit after a SIGKILL, each episode told of once, weights first."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.checksums import write_json
from hilt.core.errors import AlarmError, ConfigError, EmptyError, LockedError, SchemaError, UnknownNameError
from hilt.core.tree import flatten
from hilt.hil import learner as learner_module
from hilt.hil import learner_phases
from hilt.hil.data import columns_for, open_logs
from hilt.hil.learner import Learner, LearnerSummary
from hilt.hil.learner_phases import ActorReports
from hilt.observe import alarms
from hilt.observe.metrics import read_metrics
from hilt.observe.sinks import SINKS
from hilt.policies import precision
from hilt.policies.agent import agent as agent_module
from hilt.policies.agent.step_agent import StepAgent
from hilt.replay import Log, QueuedDataStore, Schema
from hilt.runs import checkpoint
from hilt.runs.checkpoint import latest, load, numbers
from hilt.runs.last_good import LastGood, go_back, last_good
from hilt.wire import TrainerClient
from tests.effort import rounds, sampled
from tests.hil.toy_run import IMAGES, config, demonstrations, episode, fill, spaces, wire

torch.set_num_threads(1)
DEADLINE_S = 120


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with six online episodes and four demonstrations, in which nothing was learned yet."""
    folder = tmp_path_factory.mktemp("template")
    shown, run = demonstrations(folder / "shown", range(50, 54), images=True), folder / "run"
    run.mkdir()
    settings = config(demo_path=[str(shown)])
    for log in open_logs(run, settings, Schema.declare(columns_for(settings, spaces(True))), lambda _: None)[::-1]:
        if log.path.name == "log":
            fill(log, range(6), images=True, human=(1, 2), lost=(2,))
        log.close()
    return folder


def learner(template: Path, run: Path, **changes: Any) -> Learner:
    """On a copy of the template's run, or what became of it."""
    if not run.exists():
        shutil.copytree(template / "run", run)
    one = Learner(
        config(demo_path=[str(template / "shown")], **changes), run, resume=True, env=spaces(True), wire=wire()
    )
    save = one._saver.save

    def saved(*given: Any) -> bool:
        """Which updates have a checkpoint must not depend on how soon another one was written."""
        begun = save(*given)
        one._saver.close(DEADLINE_S)
        return begun

    one._saver.save = saved  # type: ignore[method-assign]
    return one


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return read_metrics(run, [kind])


def same(a: Any, b: Any) -> bool:
    ours, theirs = flatten(a), flatten(b)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(np.asarray(ours[path]), np.asarray(theirs[path])) for path in ours
    )


def test_rates_are_those_of_the_updates_also_where_an_actor_is_behind(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = learner(template, memory_path / "run", log_period=5, max_steps=10)
    since = learner_phases.LearnerClock.since
    monkeypatch.setattr(learner_phases.LearnerClock, "since", lambda clock, *counts: (*since(clock, *counts)[:2], 2.0))
    monkeypatch.setattr(one.experience, "newest_versions", lambda count: [7])
    one._reports.update_of[7] = 1
    one.run()
    found = [(r["updates_per_second"], r["staleness"]) for r in records(memory_path / "run", "update")]
    assert found == [(2.5, 4.0), (2.5, 9.0)]


# Updates that are not finite


def test_updates_that_are_not_finite_are_left_out_and_counted(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One row that was not finite ended the run, and so did every resume that drew it again."""
    one, bad = learner(template, memory_path / "run", log_period=1, max_steps=12), {3, 4, 8}
    sample = one.experience.next_batch

    def drawn(*given: Any) -> Any:
        batch = sample(*given)
        return {**batch, "rewards": batch["rewards"] * np.nan} if one.update in bad else batch

    monkeypatch.setattr(one.experience, "next_batch", drawn)
    assert one.run() == LearnerSummary("max_steps", 12, 30)
    assert [r["skipped_updates"] for r in records(memory_path / "run", "update")] == [
        0,
        0,
        0,
        1,
        2,
        2,
        2,
        2,
        3,
        3,
        3,
        3,
    ]
    assert sum(" is left out: " in r["event"] for r in records(memory_path / "run", "event")) == 2, (
        "once for each series"
    )
    saved = latest(memory_path / "run").agent
    assert (
        all(np.isfinite(np.asarray(leaf)).all() for leaf in flatten(saved["networks"]).values())
        and saved["updates"] == 9
    )


def test_learner_keeps_critic_updates_before_a_skipped_one(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one, update = learner(template, memory_path / "run", cta_ratio=3, max_steps=2), agent_module.rlpd.update
    calls: list[int] = []

    def drawn(nets: Any, batch: Any, *given: Any) -> Any:
        calls.append(len(calls))
        batch.rewards = batch.rewards * (np.nan if len(calls) == 3 else 1)  # the last of the first step's three
        return update(nets, batch, *given)

    monkeypatch.setattr(agent_module.rlpd, "update", drawn)
    one.run()
    said = [r["event"] for r in records(memory_path / "run", "event") if " is left out: " in r["event"]]
    assert len(said) == 1 and said[0].endswith(
        "Before it, in the same step, the critics had 2 good updates, which stay."
    ), said
    assert one.agent.updates == 5 and one.agent.actor_updates == 1


def test_a_run_that_diverged_ends_with_the_way_to_go_on(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, update = memory_path / "run", agent_module.rlpd.update

    def diverged(nets: Any, batch: Any, settings: Any, *given: Any) -> Any:
        batch.rewards = batch.rewards * (np.inf if settings.learning_rate > 1e-4 else 1)
        return update(nets, batch, settings, *given)

    monkeypatch.setattr(agent_module.rlpd, "update", diverged)
    with pytest.raises(
        AlarmError, match=r"the last 20 updates were left out; .* of update 0 with a lower rate: .*learning_rate=3e-05"
    ):
        learner(template, run, max_steps=50).run()
    rate = {"agent": {"encoder": {"kind": "none"}, "hidden": [16], "rlpd": {"random_crop": 0, "learning_rate": 3e-5}}}
    assert learner(template, run, **rate).run() == LearnerSummary("max_steps", 10, 30)


def test_an_alarm_ends_the_run_and_it_goes_on(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With one online step for many updates, which is what happens when actors stand still."""
    each = int(rounds(2, alarms.UPDATES_PER_STEP))
    monkeypatch.setattr(alarms, "UPDATES_PER_STEP", each)
    run, many, late = memory_path / "run", {"log_period": 10, "max_steps": 2000}, 30 * each + 10
    with pytest.raises(
        AlarmError, match=rf"alarm update_to_data: {late} updates were made for 30 online steps, {each} for each"
    ):
        learner(template, run, stop_on=["update_to_data"], **many).run()
    assert numbers(run)[-1] == late, "with a checkpoint"
    event = next(record for record in records(run, "event") if "alarm" in record)
    assert (event["alarm"], event["alarm/update_to_data"], event["stops"]) == ("update_to_data", 1.0, True)
    assert learner(template, run, stop_on=[], **{**many, "max_steps": late + 10}).run() == LearnerSummary(
        "max_steps", late + 10, 30
    )
    assert [record["alarm"] for record in records(run, "event") if "alarm" in record] == ["update_to_data"] * 2, (
        "it is still so"
    )


def test_learner_goes_on_from_the_last_good_checkpoint(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(alarms, "UPDATES_PER_STEP", 1.0)
    monkeypatch.setattr(learner_module, "LOOK_RECORDS", 2)
    run, settings = memory_path / "run", {"log_period": 5, "checkpoint_period": 10, "max_steps": 100}
    with pytest.raises(AlarmError, match=r"--resume goes on from here\. With --from-last-good it goes on from the"):
        learner(template, run, stop_on=["update_to_data"], **settings).run()
    assert numbers(run) == [0, 10, 20, 30, 35] and last_good(run) == LastGood(30, "update_to_data", 35, 35)
    good = load(run, 30)
    go_back(run)
    assert numbers(run) == [0, 10, 20, 30] and numbers(run / "set_aside/1") == [35]
    one = learner(template, run, **{**settings, "max_steps": 40})
    assert one.update == 30 and same(one.agent.state_dict(), good.agent)
    assert one.run() == LearnerSummary("max_steps", 40, 30)
    assert [record["update"] for record in records(run, "update")] == [*range(5, 41, 5)], "none twice"
    looked = [record for record in records(run, "update") if "effective_rank" in record]
    assert [record["update"] for record in looked] == [10, 20, 30, 40]
    assert all(1 <= record["effective_rank"] <= 16 for record in looked) and "dead_relus" not in looked[0], "of tanh"
    assert [record["policy_kl"] > 0 for record in looked if "policy_kl" in record] == [True, True]


def test_actors_that_act_with_replaced_weights_are_noticed(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(learner_phases.time, "monotonic", lambda: clock.now)
    reports, acting = ActorReports(), {"acting": "policy", "version": 1}
    reports.published(1, 0)
    reports.heard("arm", {**acting, "steps": 1})
    clock.now = 10.0
    reports.published(2, 50)
    clock.now = 75.0
    reports.heard("arm", {**acting, "steps": 1})
    assert reports.figures() == {"weights_age": 0.0}, "it made no step, as during a reset"
    reports.heard("arm", {**acting, "steps": 2, "acting": "human"})
    assert reports.figures() == {"weights_age": 0.0}, "a person acts"
    reports.heard("arm", {**acting, "steps": 3, "value_expected": 0.5})
    reports.heard("other", {**acting, "steps": 3, "version": 2, "value_expected": 0.7})
    assert reports.figures() == {"weights_age": 65.0, "value_expected": 0.6}
    monkeypatch.setattr(learner_phases, "MAX_VERSIONS", 2)
    for version in (3, 4, 5):
        clock.now += 1
        reports.published(version, 50 * version)
    reports.heard("arm", {**acting, "steps": 4})
    assert reports.update_of == {4: 200, 5: 250} and reports.figures()["weights_age"] >= 0.0
    reports.heard("arm", {**acting, "steps": 5, "version": 5})
    reports.left("other")
    assert reports.figures() == {"weights_age": 0.0}


def test_learner_logs_realized_q(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_module, "REALIZED", 3)
    learner(template, memory_path / "run", log_period=5).run()
    last = records(memory_path / "run", "update")[-1]
    ended = [(one["return_to_go"], one["cut_share"]) for one in records(memory_path / "run", "episode")][-3:]
    assert last["realized_q"] == pytest.approx(np.mean([came + cut * last["q/online"] for came, cut in ended]))


# Resume

FROZEN = {"agent": {"encoder": {**IMAGES, "pretrain_updates": 4, "pretrain_batch": 8}}, "n_step": 3}
FORESEEING = {**FROZEN["agent"]["encoder"], "pretrain_predict": "state/point"}  # type: ignore[index]
COLLECTING = {"agent": {"encoder": FORESEEING, "rlpd": {"feature_noise": 0.1}}, "collect_steps": 20}
TRAINED = {"agent": {"encoder": {**IMAGES, "training": "critic"}, "rlpd": {"random_crop": 2}}, "cta_ratio": 2}


def run_until(template: Path, run: Path, kill_at: int, changes: dict[str, Any]) -> None:
    one = learner(template, run, **changes)

    def stop() -> bool:
        if one.update >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    one.run(stop)


KINDS = {"frozen": FROZEN, "collecting": COLLECTING, "trained": TRAINED, "hg-dagger": {"algorithm": "hg-dagger"}}


@pytest.mark.parametrize("kind", sampled(KINDS, "collecting", "trained", "hg-dagger"))
def test_killed_and_resumed_it_learns_the_same_bit_for_bit(template: Path, memory_path: Path, kind: str, fork: Any):
    changes = {**KINDS[kind], "max_steps": 20, "checkpoint_period": 10, "log_period": 2}
    learner(template, memory_path / "whole", **changes).run()
    child = fork.Process(target=run_until, args=(template, memory_path / "cut", 14, changes))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == -signal.SIGKILL and numbers(memory_path / "cut")[-1] in (10, 11)
    assert learner(template, memory_path / "cut", **changes).run() == LearnerSummary("max_steps", 20, 30)
    whole, cut = (load(memory_path / name, 20) for name in ("whole", "cut"))
    assert same(whole.agent, cut.agent) and whole.state["experience"] == cut.state["experience"]
    measured = ("time", "elapsed_seconds", "updates_per_second", "env_steps_per_second", "staleness", "publish_ms")
    curves = [
        [
            {k: v for k, v in r.items() if k not in measured and "share" not in k.partition("/")[0]}
            for r in records(memory_path / name, "update")
        ]
        for name in ("whole", "cut")
    ]
    online = [r["update"] for r in curves[0] if "prepared_updates" not in r]
    assert curves[0] == curves[1] and online == list(range(2, 21, 2))
    told = [[r["trajectory"] for r in records(memory_path / name, "episode")] for name in ("whole", "cut")]
    assert told == [[0, 1, 2, 3, 4, 5]] * 2  # each once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["collecting", "trained"])
def test_learner_on_a_gpu_learns_and_resumes(template: Path, memory_path: Path, kind: str):
    changes = {**KINDS[kind], "agent": {**KINDS[kind]["agent"], "device": "cuda:0"}, "checkpoint_period": 5}
    assert learner(template, memory_path / "run", **changes).run() == LearnerSummary("max_steps", 10, 30)
    again = learner(template, memory_path / "run", **{**changes, "max_steps": 15})
    assert next(again.agent.networks["actor"].parameters()).is_cuda
    assert again.run() == LearnerSummary("max_steps", 15, 30)
    figures = [
        value
        for record in records(memory_path / "run", "update")
        for value in record.values()
        if isinstance(value, float)
    ]
    assert np.isfinite(figures).all() and len(figures) > 10


def test_stopped_before_the_first_update_it_repeats_the_pretraining_alike(template: Path, memory_path: Path):
    changes = {**COLLECTING, "max_steps": 2}
    learner(template, memory_path / "whole", **changes).run()
    one = learner(template, memory_path / "cut", **changes)
    assert one.run(lambda: one._owes) == LearnerSummary("stopped", 0, 30), "it was repeated, and no checkpoint has it"
    learner(template, memory_path / "cut", **changes).run()
    assert same(*(load(memory_path / name, 2).agent for name in ("whole", "cut")))


def test_learner_skips_a_damaged_checkpoint(template: Path, memory_path: Path):
    run = memory_path / "run"
    learner(template, run, max_steps=20, checkpoint_period=10).run()
    (run / "checkpoints" / "20" / "agent.pt").write_bytes(b"torn")
    again = learner(template, run, max_steps=25, checkpoint_period=10)
    assert again.update == 10
    again.run()
    assert any("checkpoint 20 is skipped" in r["event"] for r in records(run, "event"))
    assert numbers(run) == [0, 10, 20, 25] and load(run, 20).update == 20


def test_steps_that_came_after_the_checkpoint_are_not_lost(template: Path, memory_path: Path):
    run = memory_path / "run"
    learner(template, run, max_steps=5).run()
    with Log.open(run / "log") as log:
        fill(log, range(6, 8), images=True)
    again = learner(template, run, max_steps=10)
    assert again.experience.total == 40
    again.run()
    assert [r["trajectory"] for r in records(run, "episode")] == list(range(8))


def test_one_learner_for_one_run(template: Path, memory_path: Path):
    first = learner(template, memory_path / "run", max_steps=1)
    with pytest.raises(LockedError, match=r"run has a learner already: .*process \d+ .*One run has one learner"):
        learner(template, memory_path / "run")
    first.run()
    with pytest.raises(ConfigError, match=r"has a run in it already. Go on with it"):
        Learner(config(), memory_path / "run", env=spaces(True), wire=wire())


# Options


def test_learner_periods_and_ratios(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = learner(
        template,
        memory_path / "a",
        max_steps=12,
        cta_ratio=3,
        steps_per_update=4,
        log_period=3,
        checkpoint_period=5,
        batch_size=9,
    )
    published, sizes = [], []
    publish, update = one.server.publish_network, one.agent.update
    monkeypatch.setattr(one.server, "publish_network", lambda *given: published.append(one.update) or publish(*given))
    monkeypatch.setattr(
        one.agent,
        "update",
        lambda batch, *given, **named: sizes.append(len(batch["masks"])) or update(batch, *given, **named),
    )
    assert one.run() == LearnerSummary("max_steps", 12, 30)
    assert one.agent.updates == 36 and one.agent.actor_updates == 12  # two of the critics alone for each of all
    assert set(sizes) == {9}
    assert published == [0, 4, 8, 12, 12]  # the last one once more at the end
    assert [r["update"] for r in records(memory_path / "a", "update")] == [3, 6, 9, 12]
    assert numbers(memory_path / "a") == [0, 5, 10, 12]
    last, named = (
        records(memory_path / "a", "update")[-1],
        {name for r in records(memory_path / "a", "update") for name in r},
    )
    assert {
        f"{what}/{who}" for what in ("q", "td_error", "reward", "gradient_share") for who in ("online", "demo", "human")
    } <= named
    assert (
        last["rows/online"] == 5
        and last["rows/demo"] == 4
        and last["gradient_share/online"] + last["gradient_share/demo"] == pytest.approx(1)
    )
    assert sum(last[f"{what}_share"] for what in ("torch", "sample_wait", "wait", "other")) == pytest.approx(1)
    assert (last["log_steps"], last["demo_steps"], last["human_steps"]) == (30, 26, 6)


def test_checkpoints_by_the_clock_and_how_many_stay(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.hil.learner.CHECKPOINT_S", 0.0)
    learner(template, memory_path / "a", max_steps=30, checkpoint_keep=2).run()
    assert len(numbers(memory_path / "a")) == 3 and numbers(memory_path / "a")[-1] == 30


def test_update_to_data_caps_and_waiting_is_measured(template: Path, memory_path: Path):
    one = learner(template, memory_path / "a", update_to_data=0.5, max_steps=1000, log_period=1)

    def stop() -> bool:
        waited = one._clock._spent["wait"] > 0.05
        if one.update == 15 and one.experience.total == 30 and waited:
            fill(one.experience.log, range(6, 7), images=True)
        return one.update == 17 and waited

    assert one.run(stop) == LearnerSummary("stopped", 17, 35)  # 17 is the whole part of half of 35
    logged = records(memory_path / "a", "update")
    assert max(r["wait_share"] for r in logged) > 0
    assert all(r["weights_mb"] > 0 and r["publish_ms"] > 0 for r in logged), "what went to each actor"


def test_learner_waits_for_training_starts(memory_path: Path):
    one = Learner(config(training_starts=12, max_steps=3), memory_path / "run", env=spaces(), wire=wire())
    fill(one.experience.log, range(2))

    def stop() -> bool:
        if any("waits" in r["event"] for r in records(memory_path / "run", "event")) and one.experience.total == 10:
            assert one.update == 0
            fill(one.experience.log, range(2, 3))
        return False

    assert one.run(stop) == LearnerSummary("max_steps", 3, 15)
    said = [r["event"] for r in records(memory_path / "run", "event")]
    assert "waits: learning starts with 12 online steps, and there are 10" in said
    assert "there are no demonstrations and no take-overs yet: batches are all online" in said


@pytest.mark.parametrize(
    ("limit", "reason"), [({"max_env_steps": 30}, "max_env_steps"), ({"max_seconds": 1.0}, "max_seconds")]
)
def test_learner_limits(template: Path, memory_path: Path, limit: dict[str, Any], reason: str):
    summary = learner(template, memory_path / "a", max_steps=10**6, **limit).run()
    assert summary.reason == reason and (summary.update == 0) == (reason == "max_env_steps")
    if reason == "max_seconds":  # they are counted over restarts
        assert learner(template, memory_path / "a", max_steps=10**6, **limit).run().update <= summary.update + 1


def test_time_that_was_learned_counts_also_where_no_checkpoint_was_written_after_it(template: Path, memory_path: Path):
    run = memory_path / "a"
    learner(template, run, max_steps=20, log_period=1).run()
    spent = max(record["elapsed_seconds"] for record in records(run, "update"))
    shutil.rmtree(run / "checkpoints")  # it was killed before it saved one
    again = learner(template, run, max_steps=10**6, max_seconds=spent + 0.05)
    time.sleep(0.3)  # the time until it runs is nobody's
    began = time.monotonic()
    assert again.run().reason == "max_seconds"
    ran = time.monotonic() - began
    seconds = [record["elapsed_seconds"] for record in records(run, "update")]
    assert seconds[-1] == max(seconds) and spent <= latest(run).state["elapsed"] < spent + ran


def test_the_seed_the_capacity_and_n_step_change_what_is_learned(template: Path, memory_path: Path):
    runs = {"base": {}, "seed": {"seed": 4}, "n": {"n_step": 3}, "small": {"replay_buffer_capacity": 10}, "again": {}}
    agents = {}
    for name, changes in runs.items():
        learner(template, memory_path / name, **changes).run()
        agents[name] = load(memory_path / name, 10).agent["networks"]["critic"]
    assert same(agents["base"], agents["again"])
    assert not any(same(agents["base"], agents[name]) for name in ("seed", "n", "small"))


def test_learner_keys_and_sinks(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept: list[Any] = []
    sink = SimpleNamespace(write=kept.append, resumed=lambda update: None, close=lambda: kept.append("closed"))
    monkeypatch.setitem(SINKS, "kept", lambda folder, run: sink)
    looks = {"agent": {"encoder": {"kind": "small"}}}
    for keys, error in (
        ({"image_keys": ["images/top"], **looks}, "no image .*'images/top'"),
        ({"proprio_keys": ["q"]}, "no proprioception .*'q'"),
    ):
        with pytest.raises(UnknownNameError, match=error):
            learner(template, memory_path / "a", sinks=["kept"], **keys)
    assert kept == ["closed"] * 2
    learner(template, memory_path / "a", sinks=["kept"]).run()
    assert sum(record["kind"] == "update" for record in kept[2:-1]) == 2 and kept[-1] == "closed"


def test_imitation_learns_from_what_it_should(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    sources: set[int] = set()
    for algorithm, expected in (("bc", {2}), ("hg-dagger", {1, 2})):
        one, sources = learner(template, memory_path / algorithm, algorithm=algorithm), set()
        imitate = one.agent.imitate

        def seen(batch, imitate=imitate, sources=sources, **named):
            sources.update(batch["source"].tolist())
            return imitate(batch, **named)

        monkeypatch.setattr(one.agent, "imitate", seen)
        one.run()
        assert sources == expected and one.agent.updates == 0 and one.agent.imitations == 10
    with pytest.raises(EmptyError, match="no demonstrations to learn from"):
        Learner(config(algorithm="bc"), memory_path / "none", env=spaces(), wire=wire()).run()


def test_when_an_error_ends_it_the_checkpoint_that_was_begun_is_written(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing writes into the run any more when the next learner may open it."""
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given: time.sleep(0.5) or save(*given))
    with pytest.raises(EmptyError, match="no demonstrations to learn from"):
        Learner(config(algorithm="bc"), memory_path / "none", env=spaces(), wire=wire()).run()
    assert numbers(memory_path / "none") == [0]


def test_the_encoder_is_pretrained_on_demonstrations_first(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    half = learner(template, memory_path / "a", **FROZEN)
    # begins anew
    assert half.run(lambda: half.agent.imitations == 2).reason == "stopped" and numbers(memory_path / "a") == []
    one = learner(template, memory_path / "a", **FROZEN)
    before = {key: value.clone() for key, value in one.agent.encoder.state_dict().items()}
    sizes, imitate = [], one.agent.imitate
    seen = lambda batch, **named: sizes.append(len(batch["masks"])) or imitate(batch, **named)  # noqa: E731
    monkeypatch.setattr(one.agent, "imitate", seen)
    one.run()
    assert sizes == [8] * 4, "as pretrain_batch says; the learner's own are of 16"
    said = [record["event"] for record in read_metrics(memory_path / "a", ["event"])]
    first, *_, last = (line for line in said if line.startswith("imitates the demonstrations first: "))
    assert first.endswith(": 0 of 4 updates") and ": 4 of 4 updates, loss " in last and "opens the logs" in said
    first, last = (load(memory_path / "a", update).agent["networks"]["encoder"] for update in (0, 10))
    assert same(first, last) and not same(first, before)  # it moved, and then it was frozen
    assert one.agent.imitations == 4
    again = learner(template, memory_path / "a", **{**FROZEN, "max_steps": 11})
    again.run()
    assert again.agent.imitations == 4  # not again


def test_offline_updates_train_actor_and_critics_before_the_policy_acts(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From demonstrations alone, after pretraining, and before weights are published; a resumed run does not repeat
    them. With the conservative term while they last, and WSRL's warm-up after them."""
    rlpd = {"conservative": 1.0, "conservative_updates": 6}
    changes = {"offline_updates": 3, "cta_ratio": 2, "demo_share": 0.0, "max_steps": 2, "agent": {"rlpd": rlpd}}
    one = learner(template, memory_path / "a", **changes)
    rows, published, update, publish = [], [], one.agent.update, one._publish

    def seen(batch: Any, *given: Any, **named: Any) -> Any:
        made = update(batch, *given, **named)
        rows.append((batch["demo"].tolist(), "conservative_loss" in made[1]))
        return made

    monkeypatch.setattr(one.agent, "update", seen)
    monkeypatch.setattr(one, "_publish", lambda **named: published.append(len(rows)) or publish(**named))
    before = {key: value.clone() for key, value in one.agent.networks["critic"].state_dict().items()}
    one.run()
    assert rows == [([True] * 16, True)] * 6 + [([False] * 16, False)] * 4, "the critics and everything, each time"
    assert published[0] == 6 and one.update == 2 and one.agent.updates == 10
    assert not same(load(memory_path / "a", 0).agent["networks"]["critic"], before), "they do not begin at random"
    said = [record["event"] for record in read_metrics(memory_path / "a", ["event"])]
    lines = [line for line in said if line.startswith("actor and critics learn from demonstrations, offline: ")]
    assert lines[0].endswith(": 0 of 3 updates") and ": 3 of 3 updates, loss " in lines[-1]
    again = learner(template, memory_path / "a", **{**changes, "max_steps": 3})
    again.run()
    assert again.agent.updates == 12 and again.update == 3


def test_updates_before_online_learning_write_metrics(template: Path, memory_path: Path, monkeypatch: Any):
    monkeypatch.setattr(learner_module, "LOOK_RECORDS", 2)
    encoder = {**IMAGES, "pretrain_updates": 5, "pretrain_batch": 8}
    changes = {"agent": {"encoder": encoder}, "offline_updates": 9, "cta_ratio": 2, "log_period": 2, "max_steps": 2}
    learner(template, memory_path / "run", **changes).run()
    before = [one for one in records(memory_path / "run", "update") if "prepared_updates" in one]
    assert [one["prepared_updates"] for one in before] == [2, 4, 2, 4, 6, 8] and {one["update"] for one in before} == {
        0
    }
    assert all("imitation_loss" in one for one in before[:2])
    assert all({"critic_loss", "q_max", "q/demo", "skipped_updates", "torch_share"} <= one.keys() for one in before[2:])
    assert ["effective_rank" in one for one in before] == [False] * 2 + [False, True, False, True]


def test_critics_that_diverge_offline_are_seen_and_end_the_run(template: Path, memory_path: Path):
    """With a rate that is far too high Q leaves what rewards allow, long before the first online update."""
    rlpd = {"learning_rate": 0.3, "target_range": [0.0, 1.0]}
    changes = {"agent": {"rlpd": rlpd}, "offline_updates": 200, "log_period": 2, "stop_on": ["q_bound"]}
    run = memory_path / "run"
    with pytest.raises(
        AlarmError, match=r"alarm q_bound: Q is from .*--resume begins learning anew: give other settings"
    ):
        learner(template, run, **changes).run()
    [event] = [record for record in records(run, "event") if record.get("alarm") == "q_bound"]
    assert (event["update"], event["stops"]) == (0, True) and not numbers(run)
    calm = {**changes, "agent": {"rlpd": {**rlpd, "learning_rate": 1e-3}}, "offline_updates": 30, "max_steps": 3}
    assert learner(template, run, **calm).run() == LearnerSummary("max_steps", 3, 30), "it begins anew, and is healthy"
    assert len([record for record in records(run, "event") if record.get("alarm") == "q_bound"]) == 1


def test_alarms_that_the_agent_cannot_raise_are_named_once(
    template: Path, memory_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(StepAgent, "lacking", {"effective_rank": "the policy is compiled"})
    with caplog.at_level("INFO", "hilt.hil"):
        learner(template, memory_path / "run", log_period=1, max_steps=3, stop_on=["plasticity"]).run()
    named = "this run cannot raise plasticity: the policy is compiled. stop_on=[plasticity] does not end it."
    assert [record.getMessage() for record in caplog.records if "cannot raise" in record.getMessage()] == [named]


def test_figures_of_a_process_that_died_before_online_learning_are_forgotten(template: Path, memory_path: Path):
    """Its critics had diverged; those that begin anew are not blamed for it."""
    rlpd = {"learning_rate": 0.3, "target_range": [0.0, 1.0]}
    changes = {"agent": {"rlpd": rlpd}, "offline_updates": 200, "log_period": 2}
    run = memory_path / "run"
    one = learner(template, run, **changes)

    def die() -> bool:
        if "q_bound" in one._watch.alarms.on:
            raise RuntimeError("killed")
        return False

    with pytest.raises(RuntimeError, match="killed"):
        one.run(die)
    calm = {"agent": {"rlpd": {**rlpd, "learning_rate": 1e-3}}, "offline_updates": 6, "max_steps": 3}
    again = learner(template, run, **{**changes, **calm, "stop_on": ["q_bound"]})
    assert again.run() == LearnerSummary("max_steps", 3, 30)
    made = [one["prepared_updates"] for one in records(run, "update") if "prepared_updates" in one]
    assert made == [2, 4, 6], "those of the dead process are not shown"


def test_learner_pretrains_with_the_demonstrations(template: Path, memory_path: Path):
    changes = {**FROZEN, "agent": {"encoder": FORESEEING, "normalize_proprio": True}}
    one = learner(template, memory_path / "a", **changes)
    batch = one.experience.sample(8, "demonstrations", images=True)
    # no gripper: the end, twice
    assert batch["future"].shape == (8, 2, 3) and (batch["future"][:, 0] == batch["future"][:, 1]).all()
    points = {
        number: [step["next_observations"]["state"]["point"] for step in episode(2 * number)]
        for number in range(50, 54)
    }
    for point, future in zip(batch["observations"]["state"]["point"], batch["future"], strict=True):
        assert (future[0] == points[int(point[0]) // 2][-1]).all()
    one.run()
    mean = np.mean([step["observations"]["state"]["point"] for n in points for step in episode(2 * n)], axis=0)
    again = learner(template, memory_path / "a", **{**changes, "max_steps": 11})
    assert np.allclose(again.agent.networks["proprio"].mean, mean, atol=1e-5)  # kept in the checkpoint
    again.run()
    with pytest.raises(
        ConfigError, match="normalize_proprio takes mean and deviation from demonstrations, and there are none"
    ):
        Learner(config(agent={"normalize_proprio": True}), memory_path / "b", env=spaces(), wire=wire()).run()


# Collecting


def killed_while_it_repeats_pretraining(template: Path, run: Path) -> None:
    one = learner(template, run, **COLLECTING)

    def stop() -> bool:
        if "online" in one._collected and one.agent.imitations == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    one.run(stop)


def test_pretraining_is_repeated_from_scratch_with_what_was_collected(
    template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch, fork: Any
):
    whole, published, given = learner(template, memory_path / "whole", **COLLECTING, log_period=1), [], []
    publish, update = whole.server.publish_network, whole.agent.update
    monkeypatch.setattr(
        whole.server, "publish_network", lambda state, *version: published.append(state) or publish(state, *version)
    )
    monkeypatch.setattr(whole.agent, "update", lambda batch, **named: given.append(batch) or update(batch, **named))
    assert whole.run() == LearnerSummary("max_steps", 10, 30) and numbers(memory_path / "whole") == [0, 1, 10]
    made = [r["prepared_updates"] for r in records(memory_path / "whole", "update") if "prepared_updates" in r]
    assert made == [1, 2, 3, 4], "of the repetition alone"
    first, second = (load(memory_path / "whole", update).agent["networks"] for update in (0, 1))
    seen = [{name: state[f"encoder.{name}"] for name in first["encoder"]} for state in published]
    assert same(seen[0], first["encoder"]) and all(same(one, second["encoder"]) for one in seen[1:]), (
        "never one that is half trained"
    )
    assert not same(first["encoder"], second["encoder"]) and same(second["encoder"], whole.agent.encoder.state_dict())
    frames = {
        tuple(s["observations"]["state"]["point"]): s["observations"]["images"]
        for n in range(6)
        for s in episode(n, images=True)
    }
    for z in given[0]["observations"]["z"][:8]:
        features = whole.agent.trunk_features({"images/front": frames[tuple(z[4:])]["front"][None]})[0]
        assert (features == z[:4]).all(), "of the new one"

    child = fork.Process(target=killed_while_it_repeats_pretraining, args=(template, memory_path / "cut"))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == -signal.SIGKILL and numbers(memory_path / "cut") == [0]
    with Log.open(memory_path / "cut" / "log") as log:
        fill(log, range(6, 8), images=True, human=(0,))  # what came later is learned from, but the eye is the same
    cut = learner(template, memory_path / "cut", **COLLECTING)
    assert cut.run() == LearnerSummary("max_steps", 10, 40)
    assert same(load(memory_path / "cut", 1).agent["networks"]["encoder"], second["encoder"])


def test_learner_collects_and_imitates(template: Path, memory_path: Path):
    one = learner(template, memory_path / "a", **COLLECTING)
    assert one.experience.successful() == [0, 2, 4] and one.experience.collect([0, 2, 4, 99]) == 15
    batch = one.experience.sample(400, "collected", images=True)
    steps = {
        tuple(step["observations"]["state"]["point"]): (number, t)
        for number in (0, 2, 4, *range(100, 108, 2))
        for t, step in enumerate(episode(number))
    }
    ends = {number: list(episode(number))[-1]["next_observations"]["state"]["point"] for number, _ in steps.values()}
    rows = [steps[tuple(point)] for point in batch["observations"]["state"]["point"]]
    assert set(rows) == set(steps.values()), "all of these, and no episode that failed"
    assert batch["imitated"].tolist() == [number >= 100 or t == 1 for number, t in rows], (
        "on step 2 the person was lost"
    )
    assert all((future == ends[number]).all() for (number, _), future in zip(rows, batch["future"], strict=True))
    one.run(lambda: True)


def test_while_it_collects_actors_need_not_wait_for_updates(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_module, "GOODBYE_S", DEADLINE_S)  # it is asked after its last update
    shown = demonstrations(memory_path / "shown", range(50, 52), images=True)
    settings = config(demo_path=[str(shown)], **{**COLLECTING, "collect_steps": 8})
    made = Learner(settings, memory_path / "run", env=spaces(True), wire=wire())
    with Driven(made) as driven:
        waits = "waits: 0 of 8 steps are collected, with the pretrained policy and the operator"
        driven.until(
            lambda: bool(driven.weights) and any(r["event"] == waits for r in records(memory_path / "run", "event"))
        )

        def ahead() -> int:
            answer = driven.client.request("send-stats", {"actor": "arm"})
            return answer["online"] - answer["update"]

        for count, total in ((5, 5), (10, 10)):
            for step in list(episode(count, images=True, human=(1,))):
                driven.spool.insert(step)
            driven.until(lambda total=total: made.experience.total == total)
            assert ahead() <= total - 8 if total > 8 else ahead() == made.update == 0
        driven.until(lambda: made.update == 10)
        driven.spool.insert(next(episode(6, images=True)))
        driven.until(lambda: made.experience.total == 11 and ahead() == 11 - made._collected["online"] - 10)
    said = [record["event"] for record in records(memory_path / "run", "event")]
    assert any(line.startswith("imitates demonstrations and take-overs, from scratch: 4 of 4 updates") for line in said)


def test_the_clock_goes_on_over_a_stop_while_it_collects(template: Path, memory_path: Path):
    changes = {**COLLECTING, "collect_steps": 100, "max_seconds": 1000.0}
    one = learner(template, memory_path / "a", **changes)
    assert one.run(lambda: numbers(memory_path / "a") == [0] and one._seconds() > 0.05).reason == "stopped"
    again = learner(template, memory_path / "a", **changes)
    assert again._elapsed > 0.05 and again.run(lambda: True).update == 0


def test_buffers_in_hil_serls_files(template: Path, memory_path: Path):
    run = memory_path / "a"
    learner(template, run, buffer_period=10, max_steps=3).run()
    assert [p.name for p in (run / "buffer").iterdir()] == ["transitions_30.pkl"]
    (run / "buffer" / "transitions_99.pkl").write_bytes(b"of one that was killed")
    with Log.open(run / "log") as log:
        fill(log, range(6, 8), images=True)
    learner(template, run, buffer_period=10, max_steps=6).run()
    for name in ("buffer", "demo_buffer"):
        assert sorted(p.name for p in (run / name).iterdir()) == ["transitions_30.pkl", "transitions_40.pkl"]
    changes = {"checkpoint_path": str(run), "max_steps": 1, "max_seconds": 1e-9}
    other = Learner(config(**changes), memory_path / "b", env=spaces(True), wire=wire())
    # found again among the actor's
    assert other.experience.counts() == {"log_steps": 40, "demo_steps": 6, "human_steps": 6}
    assert other.run().reason == "max_steps", "no step was made in this run, from which seconds would count"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "ppo"}, "no algorithm named 'ppo'"),
        ({"store": "table"}, "no store named 'table'"),
        ({"batch_size": 1}, "batch_size=1: expected a whole number of at least 2"),
        ({"update_to_data": -1}, "update_to_data=-1"),
        (
            {"agent": {"encoder": {"pretrain_predict": "state/point"}}},
            "pretrain_predict=state/point would do nothing: it needs",
        ),
        ({"collect_steps": 9}, "collect_steps=9 would do nothing: it needs agent.encoder.pretrain_updates"),
        ({**COLLECTING, "algorithm": "bc"}, "collect_steps=20 would do nothing: it needs algorithm=rlpd"),
        ({**COLLECTING, "replay_buffer_capacity": 19}, "collect_steps=20 is more than is kept"),
        ({"cta_ratio": 0}, "cta_ratio=0: expected a whole number of at least 1"),
        ({"random_steps": -1}, "random_steps=-1: expected a whole number of at least 0"),
        (
            {"max_ahead": 9},
            r"max_ahead=9 with training_starts=10: .* each other. Give max_ahead=10 or more, or max_ahe",
        ),
        ({"max_ahead": 10, "update_to_data": 0.5}, "max_ahead=10 with update_to_data=0.5, below 1"),
    ],
)
def test_learner_refuses_wrong_settings(memory_path: Path, changes: dict[str, Any], said: str):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        Learner(config(**changes), memory_path / "run", env=spaces(), wire=wire())
    assert not (memory_path / "run").exists()


# Actors


class Driven:
    """A learner in a thread, and a client of it."""

    def __init__(self, one: Learner):
        self.learner, self.stopped = one, threading.Event()
        self.summary: list[LearnerSummary] = []
        self._thread = threading.Thread(target=lambda: self.summary.append(one.run(self.stopped.is_set)), daemon=True)
        self._thread.start()
        self.spool = QueuedDataStore(1000)
        self.weights: list[Any] = []
        self.client = TrainerClient(
            "arm", "127.0.0.1", one.server.config, data_stores={"actor_env": self.spool}, wait_for_server=DEADLINE_S
        )
        # within its own 0.8 s, a machine that stands still has no answer
        self.client.request = partial(self.client.request, timeout_ms=1e3 * DEADLINE_S)  # type: ignore[method-assign]
        self.client.recv_network_callback(self.weights.append)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.01)

    def end(self) -> LearnerSummary:
        self._thread.join(DEADLINE_S)
        return self.summary[0]

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._thread.join(DEADLINE_S)
        self.client.stop()


def test_learner_sends_the_precision_to_actors(template: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`auto` is decided for all of its processes, here where nobody did before."""
    monkeypatch.setattr(precision, "_automatic", lambda device: precision.PrecisionChoice("bfloat16", "it is faster"))
    made = learner(template, memory_path / "run", agent={"encoder": {**IMAGES, "precision": "auto"}})
    assert (
        made.agent.encoder.config.precision == made._answer("send-stats", {"actor": "arm"})["precision"] == "bfloat16"
    )
    made.run(lambda: True)


def test_steps_come_in_and_weights_and_answers_go_out(memory_path: Path):
    run = memory_path / "run"
    run.mkdir()
    write_json(run / "run.json", {"id": "abc"})
    made = Learner(
        config(max_steps=15, training_starts=5, steps_per_update=5), run, resume=True, env=spaces(), wire=wire()
    )
    with Driven(made) as driven:
        driven.until(lambda: driven.client.policy_version)  # before a single step is there
        assert driven.client.policy_version == 1_000_000 and set(driven.weights[0]) == set(made.agent.acting_state())
        answer = driven.client.request("send-stats", {"actor": "arm", "steps": 0, "nested": {"late": 1.5}})
        assert answer == {"stop": False, "update": 0, "online": 0, "run": "abc"}  # without an encoder, no precision
        with pytest.raises(SchemaError, match=r"send-stats: bad is a list"):
            driven.client.request("send-stats", {"actor": "arm", "bad": [1]})
        for step in episode(4):
            driven.spool.insert({**step, "policy_version": np.int64(1_000_000)})
        driven.until(lambda: made.update == 15)
        driven.until(lambda: driven.client.request("send-stats", {"actor": "arm"})["stop"])
        driven.spool.insert(next(episode(6)))  # under way when it hears of the end
        assert driven.client.update(timeout_ms=1e3 * DEADLINE_S)
        driven.client.request("send-stats", {"actor": "arm", "bye": True})
        driven.client.stop()
        assert driven.end() == LearnerSummary("max_steps", 15, 6)
    (told,) = records(run, "episode")
    assert told["actor"] == "arm" and told["length"] == 5 and told["success"]
    assert records(run, "actor")[0]["nested/late"] == 1.5
    assert records(run, "update")[-1]["staleness"] == 15  # the only steps were made with the first weights


def test_learner_hears_of_a_rewind_before_the_step_that_ends_it(memory_path: Path):
    with Driven(Learner(config(training_starts=90), memory_path / "run", env=spaces(), wire=wire())) as driven:
        driven.client.request("send-stats", {"actor": "arm", "says_success": "yes"})
        driven.client.request("send-stats", {"actor": "arm", "rewound_at": 4, "rewound_to": 3})
        for step in [*episode(1), *episode(2), *episode(3)]:
            driven.spool.insert(step)
        driven.until(lambda: len(records(memory_path / "run", "episode")) == 3)
    told = records(memory_path / "run", "episode")
    assert [(one["success"], one["success_alone"]) for one in told] == [(None, None), (True, None), (False, False)]
    assert not [one for one in records(memory_path / "run", "actor") if "rewound_at" in one]
    with Log.open(memory_path / "run" / "log", "r") as log:
        rewound, again, other = (log.facts.about(one["trajectory"]) for one in told)
    assert rewound["rewound_to"] == 3 and "success" not in rewound and "rewound_to" not in again
    assert (again["rewound_from"], again["begins_at"], again["success"]) == (told[0]["trajectory"], 3, True)
    assert "rewound_from" not in other


def test_learner_success_is_unknown_without_reports(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_module, "ACTIVE_S", DEADLINE_S)  # after which it would be told anyway
    env, settings = spaces(), config(max_env_steps=99, training_starts=90, control_hz=5)
    env.instruction, env.control_hz = "press the red button", 20
    with Driven(Learner(settings, memory_path / "run", env=env, wire=wire())) as driven:
        assert driven.client.request("send-stats", {"actor": "arm", "says_success": "not yet"})["left"] == 99
        for step in [*episode(0), *episode(1, human=(2,))]:
            driven.spool.insert(step)
        driven.until(lambda: driven.learner.experience.total == 10 and len(driven.learner._ended) == 2)
        assert not records(memory_path / "run", "episode"), "it is about to tell"
        driven.client.request("send-stats", {"actor": "arm", "says_success": "no"})
        driven.until(lambda: len(records(memory_path / "run", "episode")) == 2)
        driven.client.request("send-stats", {"actor": "arm", "says_success": "yes"})
        for step in [*episode(2), *episode(4, human=(2,)), *episode(3)]:
            driven.spool.insert(step)
        driven.until(lambda: len(records(memory_path / "run", "episode")) == 5)
    told = [(record["success"], record["success_alone"]) for record in records(memory_path / "run", "episode")]
    assert told == [(None, None), (None, None), (True, True), (True, None), (False, False)]
    with Log.open(memory_path / "run" / "log", "r") as log:  # where lists and conversions find it
        known = [log.facts.about(record["trajectory"]) for record in records(memory_path / "run", "episode")]
        assert [facts.get("success") for facts in known] == [None, None, True, True, False]
        about = [(facts["task"], facts["fps"], facts["language_instruction"]) for facts in known]
        assert about == [(config().task, 5.0, "press the red button")] * 5
        assert log.successes().trajectories() == [
            record["trajectory"] for record in records(memory_path / "run", "episode")[2:4]
        ]


def test_resumed_it_publishes_what_it_knows_first_and_an_actor_may_stop_it(memory_path: Path):
    run = memory_path / "run"
    first = Learner(config(max_steps=3, training_starts=5), run, env=spaces(), wire=wire())
    fill(first.experience.log, range(2))
    first.run()
    made = Learner(config(max_steps=10**6, update_to_data=0.1), run, resume=True, env=spaces(), wire=wire())
    expected = made.agent.acting_state()
    with Driven(made) as driven:
        driven.until(lambda: driven.client.policy_version)
        assert all((driven.weights[0][key] == value).all() for key, value in expected.items())
        assert driven.client.policy_version == 2_000_000
        driven.client.request("send-stats", {"actor": "arm", "stop": True})
        driven.until(lambda: driven.client.request("send-stats", {"actor": "other"})["stop"])  # the others hear of it
        for name in ("arm", "other"):
            driven.client.request("send-stats", {"actor": name, "bye": True})
        driven.client.stop()
        assert driven.end().reason == "pressed"
