"""Each alarm is raised by figures that are wrong, and none by those of a healthy run;
they are said, written, shown, and end a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, SeveralErrors, UnknownNameError
from hilt.observe import Metrics
from hilt.observe.alarm_watch import AlarmWatch
from hilt.observe.alarms import TABLE, Alarms, RunFacts, check_stop_on
from hilt.observe.live import Standing
from hilt.observe.metrics import read_metrics

VLA = RunFacts("vla", gae=True, reference=True, value_model=True)
HIL = RunFacts("hil", discount=0.97, target_entropy=-2.0, actions=4, value_model=True, conditioned=True)
SFT = RunFacts("sft", conditioned=True)
MIXED = RunFacts("hil", rlpd=False, groups=True, target_kl=0.25)
STEP = {"ppo_kl": 0.01, "clip_fraction": 0.1, "entropy": 1.2, "explained_variance": 0.4, "skipped_steps": 0.0}
STEP |= {"groups": 64.0, "groups_all_succeeded": 20.0, "groups_all_failed": 10.0}
STEP |= {"value": 0.4, "realized_return": 0.5, "kl": 0.2, "weights_age": 1.0}
LOOK = {"dead_relus": 0.1, "effective_rank": 60.0, "policy_kl": 0.5}
STEP |= {name: LOOK[name] for name in ("dead_relus", "effective_rank")}
LEARNED = {"loss": 0.2, "skipped_steps": 0.0, **LOOK}
UPDATE = {
    "q": 0.5,
    "q/online": 0.5,
    "q_max": 1.1,
    "q_min": -0.1,
    "reward_max": 1.0,
    "reward_min": 0.0,
    "realized_q": 0.4,
    "entropy": -3.0,
}
UPDATE |= {"skipped_updates": 0.0, "update": 1000.0, "step": 500.0, "weights_age": 2.0, **LOOK}
UPDATE |= {"value_hopeless": 0.1, "value_expected": 0.5, "value_realized": 0.7}


def raised(facts: RunFacts, *records: Any) -> list[str]:
    alarms = Alarms(facts)
    return [change.name for record in records for change in alarms.take(record) if change.raised]


WRONG: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "ppo_kl": (VLA, [STEP | {"ppo_kl": 0.2}] * 3),
    "clip_fraction": (VLA, [STEP | {"clip_fraction": 0.5}] * 5),
    "entropy": (VLA, [STEP] * 6 + [STEP | {"entropy": 0.05}] * 3),
    "explained_variance": (VLA, [STEP | {"explained_variance": -0.2}] * 20),
    "no_signal": (VLA, [STEP | {"groups_all_failed": 40.0}] * 5),
    "validation": (VLA, [{"validation_success": p, "validation_episodes": 100} for p in (0.5, 0.9, 0.65)]),
    "not_finite": (VLA, [STEP, STEP | {"skipped_steps": 2.0}]),
    "overestimation": (VLA, [STEP | {"value": 0.9}] * 5),
    "reference_kl": (VLA, [STEP | {"kl": 3.0}] * 3),
    "dead_relus": (VLA, [STEP | {"dead_relus": 0.7}] * 3),
    "plasticity": (VLA, [STEP] * 3 + [STEP | {"effective_rank": 3.0}] * 3),
    "stale_weights": (VLA, [STEP | {"weights_age": 6.0}] * 3),
    "value_model": (VLA, [STEP | {"value_hopeless": 0.95}]),
}
WRONG_HIL: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "entropy": (HIL, [UPDATE | {"entropy": -15.0}] * 5),
    "q_bound": (HIL, [UPDATE | {"q_max": 60.0}] * 5),
    "overestimation": (HIL, [UPDATE | {"q/online": 0.95}] * 5),
    "validation": (HIL, [{"validation_success": p, "validation_episodes": 100.0} for p in (0.9, 0.6)]),
    "update_to_data": (HIL, [UPDATE | {"update": 12_000.0}]),
    "not_finite": (HIL, [UPDATE, UPDATE | {"skipped_updates": 1.0}]),
    "ppo_kl": (MIXED, [STEP | {"ppo_kl": 0.6}] * 3),
    "clip_fraction": (MIXED, [STEP | {"clip_fraction": 0.5}] * 5),
    "no_signal": (MIXED, [STEP | {"groups_all_failed": 40.0}] * 5),
    "policy_kl": (HIL, [UPDATE | {"policy_kl": 40.0}] * 3),
    "dead_relus": (HIL, [UPDATE | {"dead_relus": 0.7}] * 3),
    "plasticity": (HIL, [UPDATE] * 3 + [UPDATE | {"effective_rank": 3.0}] * 3),
    "stale_weights": (HIL, [UPDATE | {"weights_age": 90.0}]),
    "value_model": (HIL, [UPDATE | {"value_expected": 0.05}]),
    "condition": (HIL, [{"imitation/conditioned_loss": 0.3, "imitation/loss_of_wrong_condition": 0.29}] * 5),
}
STREAM = RunFacts("hil", rlpd=False, imitates_chunks=True)
WRONG_STREAM: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "policy_kl": (STREAM, [LEARNED | {"policy_kl": 4.0}] * 3),
    "dead_relus": (STREAM, [LEARNED | {"dead_relus": 0.7}] * 3),
    "plasticity": (STREAM, [LEARNED] * 3 + [LEARNED | {"effective_rank": 3.0}] * 3),
    "entropy": (MIXED, [LEARNED | {"entropy": 1.2}] * 6 + [LEARNED | {"entropy": 0.05}] * 3),
}
WRONG_SFT: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "validation": (SFT, [LEARNED] + [{"validation_loss": loss} for loss in (0.9, 0.3, 0.1, 0.55)]),
    "condition": (SFT, [{"validation_loss": 0.3, "validation_loss_of_wrong_condition": 0.3}] * 5),
    "not_finite": (SFT, [LEARNED, LEARNED | {"skipped_steps": 1.0}]),
    "policy_kl": (SFT, [LEARNED | {"policy_kl": 4.0}] * 3),
    "dead_relus": (SFT, [LEARNED | {"dead_relus": 0.7}] * 3),
    "plasticity": (SFT, [LEARNED] * 3 + [LEARNED | {"effective_rank": 3.0}] * 3),
}
JUDGED = {"held_out_lowest": 0.1, "held_out_highest": 0.9}
LOOKED = [{"loss": 0.1, "validation_loss_mean": loss, "validation_loss": loss} for loss in (4.0, 2.0, 3.5)]
WRONG_CLASSIFIER: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "validation": (RunFacts("classifier"), LOOKED),
    "ranking": (RunFacts("classifier"), [JUDGED | {"held_out_recall": 0.4, "held_out_false": 0.4}]),
    "not_finite": (RunFacts("classifier"), [{"skipped_steps": 1.0}]),
}
WRONG_VALUE: dict[str, tuple[RunFacts, list[dict[str, float]]]] = {
    "validation": (RunFacts("value"), LOOKED),
    "ranking": (RunFacts("value"), [JUDGED | {"held_out_auc": 0.7, "held_out_auc_low": 0.5}]),
    "not_finite": (RunFacts("value"), [{"skipped_steps": 1.0}]),
}


def test_a_validation_counts_as_many_episodes_as_are_independent():
    records = [
        {"validation_success": p, "validation_episodes": 400.0, "validation_effective_episodes": 100.0}
        for p in (0.6, 0.45)
    ]
    assert not raised(VLA, *records), "in 100 scenes of four tasks that is 2.1 standard errors"
    assert raised(VLA, *[record | {"validation_effective_episodes": 400.0} for record in records]) == ["validation"]


def test_validations_of_the_same_states_are_compared_in_pairs():
    """As if independent, 90 and 80 of 100 are 2 standard errors apart; but all that
    failed before fails again, and ten more."""

    def validated(failed: int, states: int = 100) -> dict[str, Any]:
        tried = " ".join("0" if state < failed else "1" for state in range(states))
        return {
            "validation_success": 1 - failed / states,
            "validation_episodes": float(states),
            "validation_outcomes": tried,
        }

    assert raised(VLA, validated(10), validated(20)) == raised(HIL, validated(10), validated(20)) == ["validation"]
    assert not raised(VLA, validated(10), validated(18)), "8 of them are 2.8 standard errors"
    other = {**validated(20), "validation_outcomes": validated(20)["validation_outcomes"][::-1]}
    assert not raised(VLA, validated(10), other), "others fail now: 10 of 30 that changed"
    assert not raised(VLA, validated(10), validated(10, states=50)), "of other states: as if independent"


@pytest.mark.parametrize("name", WRONG)
def test_each_alarm_of_post_training_is_raised_alone(name: str):
    assert raised(*(WRONG[name][0], *WRONG[name][1])) == [name]
    assert set(WRONG) == {alarm.name for alarm in TABLE if "vla" in alarm.jobs}


@pytest.mark.parametrize("name", WRONG_HIL)
def test_each_alarm_of_a_run_with_a_person_is_raised_alone(name: str):
    assert raised(*(WRONG_HIL[name][0], *WRONG_HIL[name][1])) == [name]
    assert set(WRONG_HIL) == {alarm.name for alarm in TABLE if "hil" in alarm.jobs}


@pytest.mark.parametrize("name", WRONG_SFT)
def test_each_alarm_of_fine_tuning_is_raised_alone(name: str):
    assert raised(*(WRONG_SFT[name][0], *WRONG_SFT[name][1])) == [name]
    assert set(WRONG_SFT) == {alarm.name for alarm in TABLE if "sft" in alarm.jobs}


@pytest.mark.parametrize(("job", "wrong"), [("classifier", WRONG_CLASSIFIER), ("value", WRONG_VALUE)])
def test_each_alarm_of_a_training_of_minutes_is_raised_alone(job: str, wrong: dict[str, Any]):
    assert set(wrong) == {alarm.name for alarm in TABLE if job in alarm.jobs}
    for name, (facts, records) in wrong.items():
        assert raised(facts, *records) == [name]


@pytest.mark.parametrize(
    ("recall", "false", "ranks"), [(0.0, 0.0, False), (0.5, 0.5, False), (0.6, 0.5, True), (0.1, 0.0, True)]
)
def test_a_classifier_ranks_if_it_calls_more_successes_than_failures_one(recall: float, false: float, ranks: bool):
    record = JUDGED | {"held_out_recall": recall, "held_out_false": false}
    assert raised(RunFacts("classifier"), record) == [] if ranks else ["ranking"]


def test_a_value_model_ranks_if_its_interval_is_above_chance():
    ranks = JUDGED | {"held_out_auc": 0.7, "held_out_auc_low": 0.51}
    assert raised(RunFacts("value"), ranks) == []
    alike = {"held_out_lowest": 0.895}
    assert raised(RunFacts("value"), ranks | alike) == [], "small differences rank, too"
    [change] = Alarms(RunFacts("value")).take(ranks | alike | {"held_out_auc_low": 0.5})
    assert "it predicts a constant, a probability of success from 0.895 to 0.900. Do not use it" in change.text


@pytest.mark.parametrize("name", WRONG_STREAM)
def test_alarms_of_a_person_who_teaches_a_policy_of_chunks(name: str):
    assert raised(*(WRONG_STREAM[name][0], *WRONG_STREAM[name][1])) == [name]
    check_stop_on([name], WRONG_STREAM[name][0])


def test_a_policy_that_imitates_may_be_as_sure_as_what_it_is_shown():
    narrow = [LEARNED | {"entropy": 2.0 - n / 10} for n in range(40)]
    assert raised(STREAM, *narrow) == [] and set(raised(MIXED, *narrow)) == {"entropy"}
    with pytest.raises(ConfigError, match="stop_on=entropy would do nothing: it needs algorithm=rlpd or mixed"):
        check_stop_on(["entropy"], STREAM)


def test_a_policy_that_reads_its_condition_more_and_more_raises_none():
    losses = [{"validation_loss": 0.3, "validation_loss_of_wrong_condition": 0.3 + 0.01 * n} for n in range(20)]
    assert raised(SFT, *losses) == [], "at first it knows nothing of it"
    noisy = [{"validation_loss": 0.3, "validation_loss_of_wrong_condition": 0.29 + 0.05 * (n % 2)} for n in range(20)]
    assert raised(SFT, *noisy[1:]) == [], "one look alone is below"
    with pytest.raises(ConfigError, match=r"stop_on=condition would do nothing: it needs .*recap\.threshold above 0"):
        check_stop_on(["condition"], RunFacts("sft"))


def test_a_healthy_fine_tuning_raises_none():
    """The held-out loss falls, and rises again a little as it does where episodes are learned by heart."""
    wave = [0.1 * math.sin(n) for n in range(60)]
    for at_first, lowest in ((0.9, 0.1), (0.12, 0.1), (-1.0, -2.0)):
        losses = [lowest + (at_first - lowest) * max(0.0, 1 - n / 20) + 0.3 * abs(lowest) * (n > 40) for n in range(60)]
        records = [
            LEARNED | {"validation_loss": loss, "policy_kl": 1 + w} for loss, w in zip(losses, wave, strict=True)
        ]
        assert raised(SFT, *records) == []
    records = [LEARNED | {"effective_rank": 60 - n / 2, "dead_relus": 0.2 + w} for n, w in enumerate(wave)]
    assert raised(SFT, *records) == []
    risen = [{"validation_loss": loss} for loss in (-1.0, -2.0, -0.9)]
    assert raised(SFT, *risen) == ["validation"], "a log-density may be below 0"


@pytest.mark.parametrize("losses", [(0.01, 0.02), (-0.02, 0.0), (0.02, 0.01, 0.05), (1e-6, 0.03)])
def test_a_held_out_loss_near_0_may_rise_a_little(losses: tuple[float, ...]):
    assert raised(SFT, *[{"validation_loss": loss} for loss in losses]) == []
    assert raised(SFT, *[{"validation_loss": loss} for loss in (*losses, min(losses) + 0.06)]) == ["validation"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_held_out_loss_that_is_not_finite_is_an_alarm_until_it_is(loss: Any):
    alarms = Alarms(SFT)
    assert not alarms.take({"validation_loss": 0.5}) and not alarms.take(LEARNED)
    [change] = alarms.take({"validation_loss": loss})
    assert change.text.startswith("alarm not_finite: the held-out loss is not a finite number. Lower the learning rate")
    assert not alarms.take(LEARNED | {"skipped_steps": 0.0}), "it holds until the next validation"
    assert [change.text for change in alarms.take({"validation_loss": 0.5})] == ["alarm not_finite is over"]


def test_settings_of_fine_tuning_without_which_an_alarm_is_never_raised():
    check_stop_on([alarm.name for alarm in TABLE if "sft" in alarm.jobs], SFT)
    with pytest.raises(
        ConfigError, match=r"stop_on=validation would do nothing: it needs validations .*in fine-tuning"
    ):
        check_stop_on(["validation"], RunFacts("sft", validates=False))
    with pytest.raises(ConfigError, match=r"stop_on=policy_kl would do nothing: it needs .*a policy with log-probabil"):
        check_stop_on(["policy_kl"], RunFacts("sft", moves=False))
    with pytest.raises(UnknownNameError, match="no alarm named 'q_bound'"):
        check_stop_on(["q_bound"], SFT)


def test_a_healthy_run_raises_none():
    wave = [0.1 * math.sin(n) for n in range(60)]
    steps = [
        STEP | {"ppo_kl": 0.02 + w / 5, "entropy": 1.5 - n / 60 + w, "explained_variance": -0.3 + n / 30}
        for n, w in enumerate(wave)
    ]
    learned = [
        {"validation_success": min(0.97, 0.3 + n / 60) + w / 4, "validation_episodes": 100} for n, w in enumerate(wave)
    ]
    assert raised(VLA, *steps, *learned) == []
    updates = [
        UPDATE | {"q": 0.5 + w, "q/online": 0.5 + w, "entropy": -2.0 - n / 20, "update": 10.0 * n}
        for n, w in enumerate(wave)
    ]
    assert raised(HIL, *updates, *learned) == []
    assert raised(RunFacts("vla", ratio="chunk"), *[STEP | {"ppo_kl": 0.4}] * 5) == [], "a chunk has many numbers"
    assert raised(RunFacts("vla", target_kl=0.2), *[STEP | {"ppo_kl": 0.3}] * 5) == [], "as far as was asked for"
    assert raised(RunFacts("vla"), *[STEP | {"entropy": -1.0 - n / 10} for n in range(12)]) == [], (
        "a continuous one may be below 0"
    )
    assert raised(RunFacts("vla"), *[STEP | {"entropy": -1.0 - n / 2} for n in range(12)]) == ["entropy"]


def test_bounds_follow_rewards_discount_and_the_range_of_targets():
    deep = [UPDATE | {"q_min": -90.0, "reward_min": -3.0}] * 5
    assert raised(HIL, *deep) == [] and raised(HIL, *[UPDATE | {"q_min": -20.0}] * 5) == ["q_bound"], (
        "no reward was below 0"
    )
    assert raised(RunFacts("hil", discount=0.97, q_range=(0.0, 1.0)), *[UPDATE | {"q_max": 2.0}] * 5) == ["q_bound"]
    nothing = UPDATE | {"reward_max": 0.0, "realized_q": 0.0}
    assert raised(HIL, *[nothing] * 9) == [], "as long as nobody has seen a reward"
    assert raised(RunFacts("hil", discount=0.97, entropy_in_q=True), *[UPDATE | {"q_max": 99.0}] * 5) == [], (
        "entropy has no bound"
    )


def test_entropy_in_q_is_no_overestimation():
    """With backup_entropy Q has a term for the entropy, and the returns that it is compared with have none."""
    high = [UPDATE | {"q/online": 9.0}] * 5
    assert raised(RunFacts("hil", discount=0.97), *high) == ["overestimation"]
    assert raised(RunFacts("hil", discount=0.97, entropy_in_q=True), *high) == []
    with pytest.raises(
        ConfigError, match="stop_on=overestimation would do nothing: it needs algorithm=rlpd, backup_entropy=false"
    ):
        check_stop_on(["overestimation"], RunFacts("hil", entropy_in_q=True))


def test_alarm_is_reported_once_until_it_is_over(tmp_path: Path):
    write_json(tmp_path / "run.json", {"id": "x"})
    said: list[str] = []
    with Metrics(tmp_path) as metrics:
        watch = AlarmWatch(tmp_path, VLA, metrics, said.append)
        for number, kl in enumerate([0.3] * 5 + [0.0] * 5):
            metrics.write("update", STEP | {"ppo_kl": kl}, update=number, step=0)
            assert watch.take(STEP | {"ppo_kl": kl}, update=number, step=0) == "", "nothing that ends the run"
            if number == 4:
                standing = Standing(tmp_path)
                standing.read()
                shown = dict(standing.rows())["ALARM"]
                assert "moves 0.3 nats" in shown and "Lower optimizer.learning_rate" in shown
                assert "ALARM ppo_kl" in standing.line({})
    assert [line.partition(":")[0] for line in said] == ["alarm ppo_kl", "alarm ppo_kl is over"]
    standing.read()
    assert "ALARM" not in dict(standing.rows())
    events = read_metrics(tmp_path, ["event"])
    assert [(one["update"], one["alarm/ppo_kl"]) for one in events] == [(2, 1.0), (6, 0.0)]
    assert [(one["name"], one["update"]) for one in read_json(tmp_path / "run.json")["alarms"]] == [("ppo_kl", 2)]


def test_alarm_that_ended_the_run_is_reset_and_others_continue(tmp_path: Path):
    both = STEP | {"ppo_kl": 0.3, "clip_fraction": 0.9}
    with Metrics(tmp_path) as metrics:
        watch = AlarmWatch(tmp_path, VLA, metrics, print, ["ppo_kl"])
        for number in range(3):
            metrics.write("update", both, update=number, step=0)
            ended = watch.take(both, update=number, step=0)
        assert ended.startswith("alarm ppo_kl: ")
    with Metrics(tmp_path) as metrics:
        resumed = AlarmWatch(tmp_path, VLA, metrics, print, ["ppo_kl"])
        assert resumed.take(both, update=3, step=0) == "" and not resumed.alarms.on
        resumed.take(both, update=4, step=0)
        assert list(resumed.alarms.on) == ["clip_fraction"], "five updates, three of them before it was resumed"
        assert resumed.take(both, update=5, step=0).startswith("alarm ppo_kl: ")


def test_names_that_would_end_nothing_are_refused():
    check_stop_on(["ppo_kl", "explained_variance"], VLA)
    with pytest.raises(UnknownNameError, match=r"stop_on: no alarm named 'ppokl'; did you mean 'ppo_kl'\?"):
        check_stop_on(["ppokl"], VLA)
    with pytest.raises(UnknownNameError, match=r"no alarm named 'q_bound'"):
        check_stop_on(["q_bound"], VLA)
    with pytest.raises(
        ConfigError, match=r"stop_on=explained_variance would do nothing: it needs algorithm\.estimator=gae"
    ):
        check_stop_on(["explained_variance"], RunFacts("vla"))
    check_stop_on(["ppo_kl", "no_signal"], MIXED)
    with pytest.raises(ConfigError, match=r"stop_on=ppo_kl would do nothing: it needs algorithm=mixed"):
        check_stop_on(["ppo_kl"], HIL)
    with pytest.raises(SeveralErrors):
        check_stop_on(["validation", "overestimation"], RunFacts("hil", rlpd=False, validates=False))


def test_alarms_that_a_run_cannot_raise_are_named_once(tmp_path: Path):
    def said(facts: RunFacts, stop_on: list[str], *records: dict[str, float]) -> list[str]:
        lines: list[str] = []
        with Metrics(tmp_path) as metrics:
            watch = AlarmWatch(tmp_path, facts, metrics, lines.append, stop_on)
            for number, record in enumerate(records):
                watch.take(record, update=number, step=0)
        return lines

    learns, looked = {"optimizer_steps": 3.0}, {"effective_rank": 9.0}
    compiled = (
        "this run cannot raise dead_relus, plasticity: the policy is compiled, and its passes are not looked into."
    )
    assert said(VLA, [], learns, learns) == [compiled]
    assert said(VLA, ["plasticity"], learns) == [f"{compiled} stop_on=[plasticity] does not end it."]
    assert said(VLA, ["plasticity"], {"optimizer_steps": 0.0}, learns | looked | {"dead_relus": 0.1}) == []
    bare = (
        "this run cannot raise dead_relus: nothing that is looked at has a ReLU. stop_on=[dead_relus] does not end it."
    )
    for facts in (VLA, SFT):
        assert said(facts, ["dead_relus"], learns | looked, learns | looked) == [bare]
        assert said(facts, ["plasticity"], learns | looked) == [], "most policies have none"
