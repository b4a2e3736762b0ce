"""Fine-tuning is watched: alarms are shown, written, end a run, and it goes on from before them with one command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.app.run_commands import commands_of
from hilt.core.checksums import read_json
from hilt.core.errors import AlarmError, ConfigError
from hilt.observe.live import Standing
from hilt.observe.metrics import read_metrics
from hilt.policies.conditioned import WRONG_LOSS
from hilt.runs import checkpoint
from hilt.vla import sft
from hilt.vla.imitation import sft_guard
from hilt.vla.recap.recap_settings import Recap
from hilt.vla.sft import Sft, begin_run, resume_run, train
from tests.app.test_run_library import summary
from tests.vla.taught import NAMES, Row, kept, write_log


class Fading(Row):
    """A `Row` with a layer, whose features have the rank that it is given."""

    rank = 32

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        if not self.training:
            self.layer(torch.eye(32) * (torch.arange(32) < self.rank))
        return super().supervised_loss(observations, actions, mask, generator)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of a `Fading`, which is looked at after every step."""
    monkeypatch.setattr(sft_guard, "LOOK_RECORDS", 1)
    monkeypatch.setattr(sft, "make_policy", lambda *_: Fading())
    return tmp_path / "run"


def settings(run: Path, **changes: Any) -> Sft:
    if not (log := run.parent / "log").exists():
        write_log(log, [(4, "go", True)] * 12, action=lambda n: 1.0)
    base: dict[str, Any] = {"data": [str(log)], "columns": NAMES, "validation": 0.25, "learning_rate": 0.01}
    base |= {"batch_size": 8, "validation_period": 5, "log_period": 1, "max_steps": 24, "patience": 99}
    return Sft(**{**base, **changes})


def collapse(run: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """Trains a run whose features are worth nothing from step 13 on; returns what was said."""
    said: list[str] = []
    with monkeypatch.context() as fading:
        train(
            begin_run(run, "", settings(run, **changes)),
            run,
            notify=said.append,
            watch=lambda step, _: fading.setattr(Fading, "rank", 32 if step < 12 else 1),
        )
    return said


def test_a_collapse_is_said_written_and_shown_and_the_run_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch):
    said = collapse(run, monkeypatch)
    [alarm] = [line for line in said if line.startswith("alarm ")]
    assert alarm.startswith(
        "alarm plasticity: the effective rank of the features fell from 32 to 1 (3 looks; limit 3.2)"
    )
    assert "lower the learning rate" in alarm
    [event] = [record for record in read_metrics(run, ["event"]) if record.get("alarm")]
    assert (event["update"], event["alarm"], event["alarm/plasticity"], event["stops"]) == (15, "plasticity", 1, False)
    assert [(one["name"], one["update"]) for one in read_json(run / "run.json")["alarms"]] == [("plasticity", 15)]
    standing = Standing(run)
    standing.read()
    assert dict(standing.rows())["ALARM"] == alarm.removeprefix("alarm ")
    assert checkpoint.numbers(run) == [10, 24], "the newest, and the newest from before the alarm"
    [back] = [one for one in commands_of(summary(run)) if one.name == "go_back"]
    assert back.text == f"hilt train sft --run {run} --from-last-good"


def test_a_healthy_run_raises_none_and_keeps_one_checkpoint(run: Path):
    said: list[str] = []
    done = train(begin_run(run, "", settings(run)), run, notify=said.append)
    assert done.reason == "max_steps" and not [line for line in said if "alarm" in line]
    looks = [record for record in read_metrics(run, ["update"]) if "effective_rank" in record]
    assert [record["update"] for record in looks] == list(range(1, 25)) and checkpoint.numbers(run) == [24]
    assert "alarms" not in read_json(run / "run.json")


def test_looks_come_every_tenth_record_and_change_nothing_that_is_learned(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sft_guard, "LOOK_RECORDS", 10)
    train(begin_run(run, "", settings(run, log_period=2, max_steps=40)), run)
    looks = [record["update"] for record in read_metrics(run, ["update"]) if "effective_rank" in record]
    assert looks == [20, 40]
    other = run.parent / "other"
    monkeypatch.setattr(sft_guard, "LOOK_RECORDS", 1)
    train(begin_run(other, "", settings(other, max_steps=40)), other)
    assert np.array_equal(kept(run), kept(other))


def test_stop_on_ends_a_run_and_one_command_goes_on_from_before_the_alarm(run: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        AlarmError,
        match=r"^alarm plasticity: .*; hilt train sft --run .* --resume goes on from here\. The policy so far",
    ):
        collapse(run, monkeypatch, stop_on=["plasticity"])
    ended = read_json(run / "run.json")["ended"]
    assert (ended["reason"], ended["step"]) == ("alarm", 15) and ended["words"].startswith("alarm plasticity: ")
    assert checkpoint.numbers(run) == [10, 15] and read_json(run / "result.json")["reason"] == "alarm"
    words = ["train", "sft", "--run", str(run), "--from-last-good"]
    shown = CliRunner().invoke(cli.app, [*words, "--dry-run"])
    assert shown.output == "goes back to update 10: alarm plasticity was raised at update 15\n" and not shown.exit_code
    assert checkpoint.numbers(run) == [10, 15], "nothing was moved yet"
    refused = CliRunner().invoke(cli.app, [*words, "batch_size=3"])
    assert refused.exit_code == 1 and "batch_size was 8" in refused.output and checkpoint.numbers(run) == [10, 15]
    done = CliRunner().invoke(cli.app, [*words, "learning_rate=0.005"])
    assert done.exit_code == 0 and "max_steps is reached: 24 steps" in done.output
    assert "goes back to update 10: alarm plasticity was raised at update 15\n" in done.output
    assert [record["update"] for record in read_metrics(run, ["update"]) if "loss" in record] == list(range(1, 25))
    [rate] = {record["learning_rate"] for record in read_metrics(run, ["update"]) if record["update"] == 11}
    assert rate == 0.005, "step 11 was made again"
    assert checkpoint.numbers(run / "set_aside/1") == [15] and "ended" in read_json(run / "run.json")
    again = CliRunner().invoke(cli.app, words)
    assert again.exit_code == 1 and "no alarm is raised, so there is nothing to go back from" in again.output


def test_an_alarm_that_ended_a_run_is_reset_by_a_plain_resume(run: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AlarmError):
        collapse(run, monkeypatch, stop_on=["plasticity"])
    monkeypatch.setattr(Fading, "rank", 1)
    done = train(resume_run(run, "", []), run)
    assert (done.reason, done.step) == ("max_steps", 24), "it is compared with the features of now"


def test_a_held_out_loss_that_rises_far_above_its_lowest_ends_a_run(run: Path):
    """The rate is far too high: the row oscillates around what it is to learn."""
    config = settings(run, validation_period=1, learning_rate=0.9, stop_on=["validation"], max_steps=200)
    with pytest.raises(
        AlarmError, match=r"alarm validation: the held-out loss is .*, and was .* \(limit .*\)\. It got wor"
    ):
        train(begin_run(run, "", config), run)
    records = [record for record in read_metrics(run, ["update"]) if "validation_loss" in record]
    losses = [record["validation_loss"] for record in records]
    assert losses[-1] > min(losses) + 0.5 * max(losses[0] - min(losses), min(losses))
    best = read_json(run / "result.json")
    assert best["loss"] == min(losses) and (run / "policy").is_dir(), "the policy is that of the lowest"


@pytest.mark.parametrize(("difference", "reads"), [(0.0, False), (0.1, True)])
def test_a_policy_that_ignores_its_condition_is_noticed(
    run: Path, monkeypatch: pytest.MonkeyPatch, difference: float, reads: bool
):
    whole = Fading.supervised_loss

    def judged(self: Fading, *given: Any, **named: Any) -> Any:
        loss, figures = whole(self, *given, **named)
        return loss, figures if self.training else {**figures, WRONG_LOSS: float(loss) + difference}

    monkeypatch.setattr(Fading, "supervised_loss", judged)
    monkeypatch.setattr(sft, "advantage_labels", lambda *_: None)
    config = settings(run, recap=Recap(threshold=0.5), validation_period=1, stop_on=["condition"])
    begin_run(run, "", config)
    if reads:
        assert train(config, run).reason == "max_steps"
        return
    with pytest.raises(
        AlarmError, match=r"alarm condition: the loss is (\S+), and \1 with good and bad exchanged, which"
    ):
        train(config, run)
    assert read_json(run / "run.json")["ended"]["step"] == 5, "from the fifth look on"


def test_a_step_that_is_not_finite_is_left_out_counted_and_said(run: Path, monkeypatch: pytest.MonkeyPatch):
    whole, steps = Fading.supervised_loss, list[int]()

    def spoiled(self: Fading, *given: Any, **named: Any) -> Any:
        loss, figures = whole(self, *given, **named)
        steps.append(0)
        return (loss * math.nan if self.training and len(steps) == 3 else loss), figures

    monkeypatch.setattr(Fading, "supervised_loss", spoiled)
    monkeypatch.setattr(sft_guard, "LOOK_RECORDS", 99)
    said: list[str] = []
    done = train(begin_run(run, "", settings(run)), run, notify=said.append)
    assert done.step == 24 and np.isfinite(kept(run)).all()
    assert "step 3 is left out: the loss is nan" in said and "alarm not_finite is over" in said
    assert [record["skipped_steps"] for record in read_metrics(run, ["update"]) if "loss" in record][:4] == [0, 0, 1, 0]


def test_a_run_that_ended_with_numbers_that_are_not_finite_goes_on_with_one_command(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    train(begin_run(run, "", settings(run, max_steps=7)), run)
    with monkeypatch.context() as spoiled:
        spoiled.setattr(Fading, "supervised_loss", lambda self, *_, **__: (self.row.sum() * math.nan, {}))
        with pytest.raises(AlarmError, match="step 12, the loss is nan"):
            train(resume_run(run, "", ["max_steps=24"]), run)
    done = CliRunner().invoke(cli.app, ["train", "sft", "--run", str(run), "--from-last-good", "learning_rate=0.001"])
    assert "goes back to update 7: alarm not_finite was raised at update 8\n" in done.output
    assert done.exit_code == 0 and "24 steps" in done.output


def test_a_run_with_no_checkpoint_from_before_its_alarm_says_so(run: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AlarmError):
        collapse(run, monkeypatch, stop_on=["plasticity"], checkpoint_period=1000)
    from hilt.runs.last_good import go_back

    with pytest.raises(ConfigError, match="the oldest checkpoint is of update 15: none is from before it"):
        go_back(run)


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(run: Path):
    """What the dead process wrote is neither shown nor compared with."""

    def die(step: int, _: Any) -> None:
        if step == 20:
            raise RuntimeError("killed")

    config = settings(run, validation_period=1, learning_rate=0.03, checkpoint_period=1000, stop_on=["validation"])
    with pytest.raises(RuntimeError, match="killed"):
        train(begin_run(run, "", config), run, watch=die)
    losses = [one["validation_loss"] for one in read_metrics(run, ["update"]) if "validation_loss" in one]
    assert losses[-1] < 0.5 * losses[0] and not checkpoint.numbers(run), "the first of the next would raise the alarm"
    assert train(resume_run(run, "", []), run).reason == "max_steps"
    assert [record["update"] for record in read_metrics(run, ["update"]) if "loss" in record] == list(range(1, 25))


def test_steps_that_were_not_finite_before_the_first_checkpoint_are_forgotten_by_a_resume(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as spoiled:
        spoiled.setattr(Fading, "supervised_loss", lambda self, *_, **__: (self.row.sum() * math.nan, {}))
        with pytest.raises(AlarmError, match="step 5, the loss is nan"):
            train(begin_run(run, "", settings(run)), run)
    train(resume_run(run, "", []), run)
    assert [record["update"] for record in read_metrics(run, ["update"]) if "loss" in record] == list(range(1, 25))


def spoil_validations(monkeypatch: pytest.MonkeyPatch, spoiled: Any) -> None:
    """Makes the loss NaN of validations with these numbers, counted from 1; the loss of training stays."""
    whole, validated = sft.Training._validate, list[int]()

    def validate(self: sft.Training) -> dict[str, float]:
        validated.append(0)
        with monkeypatch.context() as patch:
            if spoiled(len(validated)):
                patch.setattr(Fading, "supervised_loss", lambda self, *_, **__: (self.row.sum() * math.nan, {}))
            return whole(self)

    monkeypatch.setattr(sft.Training, "_validate", validate)


def test_a_validation_that_is_not_finite_raises_an_alarm(run: Path, monkeypatch: pytest.MonkeyPatch):
    spoil_validations(monkeypatch, lambda number: number == 2)
    said: list[str] = []
    done = train(begin_run(run, "", settings(run)), run, notify=said.append)
    assert done.reason == "max_steps" and done.best_step == 24, "it went on, and fell"
    assert [line for line in said if "alarm not_finite" in line] == [
        "alarm not_finite: the held-out loss is not a finite number. Lower the learning rate; look for numbers that "
        "are not finite in rewards and observations.",
        "alarm not_finite is over",
    ]


def test_a_run_without_one_validation_that_is_finite_ends_with_an_error(run: Path, monkeypatch: pytest.MonkeyPatch):
    spoil_validations(monkeypatch, lambda number: True)
    with pytest.raises(
        AlarmError,
        match=r"held-out loss was not a finite number at any validation until step 24, so no policy was kept\. "
        r"Begin another run with a lower rate than 0\.01 \(learning_rate=0\.001\)",
    ):
        train(begin_run(run, "", settings(run)), run)
    assert read_json(run / "run.json")["ended"]["reason"] == "not_finite" and not (run / "policy").exists()


def test_samples_at_once_changes_no_look(run: Path, monkeypatch: pytest.MonkeyPatch):
    """The rank of what each sample adds to is that of the samples."""
    whole = Row.supervised_loss

    def each(self: Fading, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        if not self.training:
            self.layer(torch.randn(len(observations), 32, generator=generator))
        return whole(self, observations, actions, mask, generator)

    monkeypatch.setattr(Fading, "supervised_loss", each)
    said: list[str] = []
    train(begin_run(run, "", settings(run, batch_size=32, max_steps=12)), run)
    train(resume_run(run, "", ["samples_at_once=1", "max_steps=24"]), run, notify=said.append)
    ranks = [one["effective_rank"] for one in read_metrics(run, ["update"]) if "effective_rank" in one]
    assert len(ranks) == 24 and min(ranks) > 25 and not [line for line in said if "alarm" in line]


def test_an_alarm_that_too_few_samples_cannot_raise_is_named_once(run: Path):
    write_log(run.parent / "log", [(4, "go", True)] * 7, action=lambda n: 1.0)
    said: list[str] = []
    train(begin_run(run, "", settings(run, stop_on=["plasticity", "validation"])), run, notify=said.append)
    assert [line for line in said if "cannot raise" in line] == [
        "this run cannot raise dead_relus, plasticity: there are 20 samples to look at, and it takes 32. "
        "stop_on=[plasticity] does not end it.",
        "this run cannot raise policy_kl: the policy draws no actions.",
    ]
    assert not [one for one in read_metrics(run, ["update"]) if "effective_rank" in one]


def test_alarms_that_a_compiled_policy_cannot_raise_are_named_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Fading, "_compiles", lambda self: True, raising=False)
    said: list[str] = []
    train(begin_run(run, "", settings(run, stop_on=["not_finite"])), run, notify=said.append)
    compiled = "the passes of the policy are compiled or captured in graphs, which are not looked into"
    assert f"this run cannot raise policy_kl, dead_relus, plasticity: {compiled}." in said


def test_rows_to_look_at_are_spread_evenly():
    assert sft_guard.rows_to_look_at(np.arange(640), np.arange(9)).tolist()[::21] == [0, 213, 426, 639]
    assert sft_guard.rows_to_look_at(np.arange(32), np.arange(99)).tolist() == [*range(32)]
    assert len(sft_guard.rows_to_look_at(np.arange(31), np.arange(100, 900))) == 64
