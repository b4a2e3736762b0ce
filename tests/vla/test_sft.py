"""Supervised fine-tuning: to the validation minimum, with what each setting does, and on from where it was stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.checksums import read_json
from hilt.core.config import freeze
from hilt.core.errors import AlarmError, ConfigError, HiltError, LockedError, UnknownNameError
from hilt.envs.chunk_executor import ChunkSettings
from hilt.observe.metrics import read_metrics
from hilt.policies.vla.observation_adapters import Suite
from hilt.replay import Edits, Log
from hilt.replay.storage.lock import WriterLock
from hilt.runs import checkpoint
from hilt.vla import sft
from hilt.vla.imitation import sft_guard
from hilt.vla.recap.recap_settings import Recap
from hilt.vla.rollout import ChunkAgent
from hilt.vla.sft import Lora, Sft, begin_run, learning_rate, resume_run, train
from tests.effort import devices
from tests.vla.taught import NAMES, Row, kept, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Nine episodes whose actions are all 1, and three (those held out with seed 0) whose actions are 0.5."""
    held = opened_split(write_log(tmp_path / "first", [(4, "go", True)] * 12))
    return write_log(tmp_path / "log", [(4, "go", True)] * 12, action=lambda n: 0.5 if n in held else 1.0)


def opened_split(path: Path) -> list[int]:
    from hilt.policies.vla.observation_adapters import columns
    from hilt.vla.demonstrations import Demonstrations

    return Demonstrations([path], path.parent, columns(NAMES)).split(0.25, seed=0)[1]


@pytest.fixture
def start(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains a `Row` in a folder; settings may be given, and after how many steps it is stopped."""
    rows: list[Row] = []

    def make(*_: Any) -> Row:
        rows.append(Row())
        return rows[-1]

    monkeypatch.setattr(sft, "make_policy", make)

    def started(
        name: str = "run", stop_at: int | None = None, resume: bool = False, **changes: Any
    ) -> tuple[Path, Any, Row]:
        run = tmp_path / name
        base = {
            "data": [str(log)],
            "columns": NAMES,
            "validation": 0.25,
            "learning_rate": 0.05,
            "batch_size": 8,
            "validation_period": 2,
        }
        config = (
            resume_run(run, "", [f"{k}={v}" for k, v in changes.items()])
            if resume
            else begin_run(run, "", Sft(**{**base, **changes}))
        )
        steps: list[int] = []
        done = train(config, run, stop=lambda: (steps.append(0), stop_at is not None and len(steps) > stop_at + 1)[1])
        return run, done, rows[-1]

    return started


def test_it_stops_after_the_validation_minimum_and_keeps_that(start: Callable[..., Any]):
    run, done, policy = start(max_steps=200, patience=3, log_period=1)
    assert done.reason == "best" and done.step == done.best_step + 3 * 2 < 60
    assert np.allclose(kept(run), 0.5, atol=0.12) and done.loss < 0.01
    records = [record for record in read_metrics(run, ["update"]) if "validation_loss" in record]
    assert (
        min(records, key=lambda record: record["validation_loss"])["update"]
        == done.best_step
        == records[-1]["best_step"]
    )
    learned = [record for record in read_metrics(run, ["update"]) if "loss" in record]
    assert [record["update"] for record in learned] == list(range(1, done.step + 1))
    assert {"learning_rate", "gradient_norm", "samples_per_second", "far"} <= learned[
        0
    ].keys() and "validation_far" in records[0]
    assert read_json(run / "result.json")["best_step"] == done.best_step and sorted(
        p.name for p in (run / "best").iterdir()
    ) == [str(done.best_step)]
    assert torch.equal(policy.idle.detach(), torch.ones(2))  # it has no part in the loss
    ended = read_json(run / "run.json")["ended"]
    assert (ended["reason"], ended["step"]) == ("best", done.step) and ended["words"].startswith("best, after")


def test_without_validation_it_learns_from_all_and_keeps_the_last(start: Callable[..., Any]):
    run, done, _ = start(max_steps=100, validation=0.0, validation_period=100)
    assert (done.reason, done.step, done.best_step) == ("max_steps", 100, 100) and np.allclose(
        kept(run), 0.875, atol=0.1
    )
    assert not [record for record in read_metrics(run, ["update"]) if "validation_loss" in record]


def test_on_from_where_it_was_stopped_bit_for_bit(start: Callable[..., Any], tmp_path: Path):
    options: dict[str, Any] = {
        "max_steps": 17,
        "patience": 50,
        "warmup_steps": 5,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
    # so that it matters which rows come when
    options["data"] = [str(write_log(tmp_path / "different", [(4, "go", True)] * 9))]
    whole, done, _ = start("whole", **options)
    parts, first, _ = start("parts", stop_at=7, **options)
    assert (first.reason, first.step) == ("stopped", 7) and (parts / "policy").is_dir()
    _, second, _ = start("parts", resume=True)
    assert (second.step, second.best_step, second.loss) == (done.step, done.best_step, done.loss)
    assert np.array_equal(kept(whole), kept(parts))
    told = [
        [{k: v for k, v in r.items() if k not in ("time", "samples_per_second")} for r in read_metrics(run, ["update"])]
        for run in (whole, parts)
    ]
    assert [r for r in told[0] if "validation_loss" in r] == [r for r in told[1] if "validation_loss" in r]


def test_training_with_given_actions_goes_on_bit_for_bit(log: Path, tmp_path: Path):
    options = {"width": 16, "depth": 1, "heads": 2, "chunk": 3, "keypoints": 1, "precision": "float32"}
    base = Sft(data=[str(log)], columns=NAMES, policy_options=options, max_delay=2, max_steps=4, batch_size=4)
    base = replace(base, validation_period=2, learning_rate=0.01, seed=3)
    for name in ("whole", "parts"):
        steps: list[int] = []
        stop = partial(
            lambda steps, last: (steps.append(0), len(steps) > last + 1)[1], steps, 4 if name == "whole" else 2
        )
        train(begin_run(tmp_path / name, "", base), tmp_path / name, stop=stop)
    train(resume_run(tmp_path / "parts", "", []), tmp_path / "parts")
    whole, parts = (sft.open_policy(tmp_path / name, base) for name in ("whole", "parts"))
    assert whole.max_delay == parts.max_delay == 2 and whole.takes_prefix
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name
    assert whole.get_parameter("action_head.given.leave.weight").any(), "the given actions were learned from"
    with pytest.raises(ConfigError, match=r"max_delay was 2 in .* and is 1 now, which a resumed run cannot change"):
        resume_run(tmp_path / "parts", "", ["max_delay=1"])


def test_stopped_before_there_is_anything_to_keep(start: Callable[..., Any]):
    run, done, _ = start(stop_at=1)
    assert (done.step, done.best_step) == (1, 0) and not (run / "policy").exists()
    assert start(resume=True, max_steps=4)[1].best_step > 0


def test_parts_of_a_batch_give_the_gradient_of_the_whole(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Row, "train", lambda self, mode=True: torch.nn.Module.train(self, False))  # without its noise
    whole, _, one = start("whole", max_steps=6)
    parts, _, three = start("parts", max_steps=6, samples_at_once=3)
    assert np.allclose(kept(whole), kept(parts), atol=1e-6) and max(one.seen) == 8 and max(three.seen) == 3


def test_what_the_optimizer_is_told(start: Callable[..., Any]):
    plain = kept(start("plain", max_steps=2, patience=50)[0])
    assert not np.array_equal(plain, kept(start("decay", max_steps=2, weight_decay=5.0)[0]))
    assert not np.array_equal(plain, kept(start("seed", max_steps=2, seed=1)[0]))
    assert not np.array_equal(plain, kept(start("rate", max_steps=2, learning_rate=0.01)[0]))
    clipped, _, _ = start("clip", max_steps=2, gradient_clip=1e-9, log_period=1)
    assert read_metrics(clipped, ["update"])[0]["gradient_norm"] > 0.1
    # so small that Adam's epsilon counts
    assert np.all(kept(clipped) < 0.06) and not np.array_equal(plain, kept(clipped))


def test_the_learning_rate():
    config = Sft(learning_rate=2.0, warmup_steps=4, max_steps=12)
    assert [learning_rate(config, step) for step in (0, 1, 3, 4, 11)] == pytest.approx([0.5, 1, 2, 2, 2])
    config.schedule, config.final_learning_rate = "cosine", 0.2
    assert [learning_rate(config, step) for step in (1, 3, 7, 11)] == pytest.approx([1, 2, 1.2, 0.4])


def test_a_loss_that_is_no_number_is_left_out_and_five_in_a_row_end_the_run(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Row, "supervised_loss", lambda self, *_, **__: (self.row.sum() * math.nan, {}))
    with pytest.raises(
        AlarmError,
        match=r"the last 5 steps were left out; of the last one, step 5, the loss is nan\. Go on from step 0 .*hilt "
        r"train sft --run .*--resume learning_rate=0\.005",
    ):
        start()


def test_a_gradient_that_is_not_finite_changes_nothing_and_it_goes_on_with_another_rate(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """The loss was finite, and so NaN came into every weight."""
    run, _, _ = start(max_steps=2)
    with monkeypatch.context() as spoiled:
        spoiled.setattr(Row, "supervised_loss", lambda self, *_, **__: ((self.row - self.row).sum().sqrt(), {}))
        with pytest.raises(AlarmError, match=r"step 7, the norm of the gradient is nan\. Go on from step 2 "):
            start(resume=True, max_steps=9)
    assert read_json(run / "run.json")["ended"]["reason"] == "not_finite" and checkpoint.numbers(run) == [2]
    _, done, policy = start(resume=True, learning_rate=0.005)
    assert done.step == 9 and all(bool(p.isfinite().all()) for p in policy.parameters())
    assert read_json(run / "run.json")["changed"][-1]["settings"] == {"learning_rate": {"was": 0.05, "now": 0.005}}


def test_actions_of_another_robot(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Row, "action_dim", 7)
    with pytest.raises(ConfigError, match="the policy gives actions of 7 numbers, and the data has 2"):
        start()


def test_what_does_not_fit_is_refused_before_the_first_step(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    # four float32, their gradients and two moments
    monkeypatch.setattr(sft, "free_bytes", lambda device: 3 * 4 * 4 - 1)
    with pytest.raises(
        ConfigError, match=r"gradients and optimizer need 0.0 GB on cpu, .*train adapters \(lora.rank=32\)"
    ):
        start()
    monkeypatch.setattr(sft, "free_bytes", lambda device: 3 * 4 * 4)
    assert start("other", max_steps=1)[1].step == 1


def test_one_process_trains(start: Callable[..., Any], tmp_path: Path):
    run, _, _ = start(max_steps=2)
    with WriterLock(run), pytest.raises(LockedError, match="is being trained already"):
        start(resume=True)


def test_statistics_of_the_data(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row, asked = Row(), dict[str, Any]()
    monkeypatch.setattr("hilt.vla.sft.load_policy", lambda folder, **options: (asked.update(options), row)[1])
    config = Sft(
        policy=str(tmp_path),
        data=[str(log)],
        columns=NAMES,
        statistics="data",
        max_steps=1,
        policy_options={"chunk": 3},
    )
    train(begin_run(tmp_path / "run", "", config), tmp_path / "run")
    assert asked == {"device": "cpu", "chunk": 3} and row.used[1] == "data"
    assert row.used[0]["action"]["max"] == [1, 1] and len(row.used[0]["proprio"]["mean"]) == 3
    monkeypatch.delattr(Row, "use_statistics")
    with pytest.raises(ConfigError, match="is a Row, which keeps its own; leave statistics out"):
        train(begin_run(tmp_path / "other", "", config), tmp_path / "other")


def test_resuming_changes_only_what_can_be_changed(start: Callable[..., Any], tmp_path: Path):
    run, _, _ = start(max_steps=2)
    unchangeable = (
        r"batch_size was 8 in .* and is 4 now, which a resumed run cannot change: .* These can be "
        r"changed: checkpoint_period"
    )
    with pytest.raises(ConfigError, match=unchangeable):
        resume_run(run, "", ["batch_size=4"])
    with pytest.raises(ConfigError, match="is a run of no recipe, not of sft_debug"):
        resume_run(run, "sft_debug", [])
    with pytest.raises(ConfigError, match="has no run of `hilt train sft` to resume"):
        resume_run(tmp_path / "none", "", [])
    assert start(resume=True, max_steps=4, patience=9)[1].step == 4
    (change,) = read_json(run / "run.json")["changed"]
    assert change["step"] == 2 and change["settings"] == {
        "max_steps": {"was": 2, "now": 4},
        "patience": {"was": 5, "now": 9},
    }


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"batch_size": 0}, ConfigError, "batch_size=0: expected a whole number of at least 1."),
        ({"validation": 1.0}, ConfigError, "validation=1.0: expected a number from 0 to 0.9."),
        ({"schedule": "linear"}, UnknownNameError, "no schedule named 'linear'"),
        ({"statistics": "mine"}, UnknownNameError, "no statistics named 'mine'"),
        (
            {"data": []},
            ConfigError,
            "there is nothing to learn from: give data=[PATH], or tasks=[tabletop/pick] and demonstrations=20.",
        ),
        (
            {"policy_options": {"rollout_precision": "fp8_emulated"}},
            ConfigError,
            "policy_options.rollout_precision would do nothing: imitation has no rollouts.",
        ),
        ({"where": "success"}, ConfigError, "filter 'success': expected a name, one of = != ~ < <= > >= and a value"),
        (
            {"data": [], "tasks": ["tabletop/pick"], "demonstrations": 2, "where": "tag=good"},
            ConfigError,
            "where=tag=good would do nothing: it needs data=[PATH]",
        ),
        ({"columns": {}}, ConfigError, "whose names do the observations have? Give suite=NAME"),
        ({"columns": {}, "suite": "nowhere"}, UnknownNameError, "no suite named 'nowhere'"),
        ({"suite": "libero"}, ConfigError, "suite=libero would do nothing: it needs no columns beside it"),
        ({"demonstrations": 3}, ConfigError, "demonstrations=3 would do nothing: it needs tasks=[NAME]"),
        ({"demonstration_options": {"speed": 1}}, ConfigError, "it needs demonstrations=N"),
        ({"validation": 0.0, "patience": 2}, ConfigError, "patience=2 would do nothing: it needs validation"),
        ({"final_learning_rate": 0.1}, ConfigError, "it needs schedule=cosine"),
        ({"statistics": "data"}, ConfigError, "it needs policy=FOLDER"),
        ({"lora": Lora(alpha=3)}, ConfigError, "lora.alpha=3 would do nothing: it needs lora.rank=N"),
        ({"lora": Lora(rank=-1)}, ConfigError, "lora.rank=-1: expected a whole number of at least 0."),
        ({"max_delay": 5}, ConfigError, "max_delay is 5 and chunk is 5: an answer has more actions than are given."),
        ({"stop_on": ["q_bound"]}, UnknownNameError, "stop_on: no alarm named 'q_bound'"),
        (
            {"validation": 0.0, "stop_on": ["validation"]},
            ConfigError,
            "stop_on=validation would do nothing: it needs validations",
        ),
        (
            {"policy": "act", "stop_on": ["policy_kl"]},
            ConfigError,
            "stop_on=policy_kl would do nothing: it needs algorithm=rlpd with agent.kind=actor_critic or frozen_vla; "
            "agent.kind=vla, and in fine-tuning a policy with log-probabilities (not act)",
        ),
        (
            {"tasks": ["tabletop/pick"], "recap": Recap(threshold=0.5, rounds=1), "stop_on": ["plasticity"]},
            ConfigError,
            "stop_on=['plasticity'] with recap.rounds: each round is a run of its own. Leave stop_on out",
        ),
        ({"max_delay": -1}, ConfigError, "max_delay=-1: expected a whole number of at least 0."),
        ({"device": "gpu"}, ConfigError, "device 'gpu': expected the name of one, such as 'cpu'"),
        (
            {"policy": "openvla/openvla-7b"},
            ConfigError,
            "expected the folder of a checkpoint, or small_vla for a new one. Give a folder on this machine",
        ),
    ],
)
def test_settings_that_cannot_work_or_would_do_nothing(changes: dict[str, Any], error: type[HiltError], says: str):
    with pytest.raises(error) as caught:
        Sft(**{"data": ["x"], "columns": NAMES, **changes}).check()
    assert says in str(caught.value)


def test_a_start_that_is_refused_is_no_run(log: Path, tmp_path: Path):
    """What is wrong with a policy is told before anything is recorded, and the folder is free again."""
    run, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    config = Sft(policy=str(empty), tasks=["tabletop/reach"], demonstrations=2)
    with pytest.raises(ConfigError, match=r"there is no config\.json in it"):
        train(begin_run(run, "", config), run)
    assert not list(run.iterdir())
    (run / "tasks").mkdir(parents=True)  # as if they had been recorded, before another thing was refused
    freeze(config, run / "config.yaml")
    sft.write_json(run / "run.json", {"kind": "sft", "recipe": "", "changed": []})
    with pytest.raises(ConfigError, match=r"there is no config\.json in it"):
        train(config, run)
    assert resume_run(run, "", ["policy=small_vla", "lora.rank=3"]).lora.rank == 3, "nothing was learned yet"
    with pytest.raises(ConfigError, match=r"demonstrations was 2 in .* and is 3 now"):
        resume_run(run, "", ["demonstrations=3"])


def test_small_vla_needs_a_picture(log: Path, tmp_path: Path):
    config = Sft(data=[str(log)], columns={"state": "state"})
    with pytest.raises(ConfigError, match="the observations have no picture: a small_vla looks at one at least"):
        train(begin_run(tmp_path / "run", "", config), tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "openvla",
            {
                "statistics": "data",
                "policy_options": {"allow_untrained": True, "unnorm_key": "libero_spatial", "center_crop": False},
            },
        ),
        ("openvla", {"lora": Lora(rank=2), "policy_options": {"dtype": "bfloat16", "allow_untrained": True}}),
        ("l1", {"policy_options": {}}),
        ("sde", {"policy_options": {}, "lora": Lora(rank=2, targets=["q_proj"]), "max_delay": 2}),
        ("smolvla", {"policy_options": {}, "max_steps": 4, "validation_period": 2, "batch_size": 4}),
    ],
)
@pytest.mark.parametrize("device", devices())
def test_every_policy_is_taught(
    device: str, kind: str, changes: dict[str, Any], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From a folder with weights in bfloat16 to a folder that opens again; trained and looked at in float32."""
    pytest.importorskip("transformers")
    from tests.policies import test_pi0, tiny_openvla

    monkeypatch.setattr(sft_guard, "LOOK_RECORDS", 1)
    if kind in ("openvla", "l1"):
        stats = {"norm_stats": {"libero_spatial_no_noops": tiny_openvla.statistics(2)}}
        policy = tiny_openvla.tiny(**stats, head="tokens" if kind == "openvla" else "l1").to(torch.bfloat16)
    else:
        policy = test_pi0.made(kind)
    policy.save_pretrained(tmp_path / "policy")
    base = {
        "policy": str(tmp_path / "policy"),
        "policy_options": {"allow_untrained": True},
        "data": [str(log)],
        "columns": NAMES,
    }
    config = Sft(
        **{
            **base,
            "max_steps": 2,
            "validation_period": 1,
            "batch_size": 2,
            "learning_rate": 0.002,
            "device": device,
            "log_period": 1,
            **changes,
        }
    )
    train(begin_run(tmp_path / "run", "", config), tmp_path / "run")
    saved = checkpoint.latest(tmp_path / "run")
    assert saved is not None and {tensor.dtype for tensor in saved.agent["adam"].values()} == {torch.float32}
    losses = [
        record["validation_loss"]
        for record in read_metrics(tmp_path / "run", ["update"])
        if "validation_loss" in record
    ]
    assert losses[1] < losses[0]
    looks = [record for record in read_metrics(tmp_path / "run", ["update"]) if "effective_rank" in record]
    assert looks and all(record["effective_rank"] >= 1 for record in looks)
    assert ("policy_kl" in looks[-1]) == (kind != "l1")
    opened = sft.open_policy(tmp_path / "run", config)
    assert (opened.chunk, opened.action_dim) == (policy.chunk, 2)
    assert opened.max_delay == config.max_delay
    if config.statistics == "data":
        assert opened.unnorm_key == "data" and not opened.options.center_crop


def test_all_weights_are_trained_in_float32(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.vla.sft.load_policy", lambda *_, **__: Row().to(torch.bfloat16))
    config = Sft(policy=str(tmp_path), policy_options={"dtype": "bfloat16"}, data=[str(log)], columns=NAMES)
    with pytest.raises(
        ConfigError, match=r"policy_options.dtype=bfloat16: weights that are trained are float32. Leave it out"
    ):
        train(begin_run(tmp_path / "run", "", config), tmp_path / "run")


def test_a_chunk_is_used_up_before_the_policy_looks_again():
    asked: list[Any] = []

    class Counted(Row):
        def act(self, observations: Any, **options: Any) -> Any:
            asked.append((observations[0], options["sample"]))
            return super().act(observations, **options)

    words = Suite(lambda raw: {"state": raw}, command=lambda actions: actions * 10)
    agent = ChunkAgent(Counted(), words, "go", ChunkSettings(execute=2, delay=0))
    given = [agent.sample_actions(n, seed=n, argmax=True)[0] for n in range(3)]
    assert given == [0, 10, 0] and asked == [
        ({"state": 0, "instruction": "go"}, False),
        ({"state": 2, "instruction": "go"}, False),
    ]
    agent.begin()
    assert agent.sample_actions(7, argmax=True)[0] == 0 and len(asked) == 3
    drawn = [ChunkAgent(Counted(), words, "go").sample_actions(0, seed=seed)[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and asked[-1][1] is True
    with pytest.raises(ConfigError, match="execute=4: this policy answers with 3 actions; give 1 to 3, or 0 for all"):
        ChunkAgent(Row(), words, "go", ChunkSettings(execute=4, delay=0))


def test_a_filter_of_the_data_decides_what_is_learned(start: Callable[..., Any], log: Path):
    with Log.open(log) as opened:
        Edits(opened).tag(opened_split(log), "half")
    run, _, _ = start(where="tag=half", validation=0.0, validation_period=100, max_steps=100)
    assert np.allclose(kept(run), 0.5, atol=0.1), "the actions of the three episodes with this tag"


def test_a_resumed_run_learns_from_the_episodes_that_were_chosen_when_it_began(start: Callable[..., Any], log: Path):
    """A run that is resumed when the filter would choose other episodes is as one that was not stopped."""
    options: dict[str, Any] = {"where": "tag=half", "validation": 0.4, "max_steps": 6, "patience": 50}
    half = sorted({*opened_split(log), *range(6)})
    with Log.open(log) as opened:
        edits = Edits(opened)
        edits.tag(half, "half")
        whole, done, _ = start("whole", **options)
        parts, first, _ = start("parts", stop_at=3, **options)
        edits.untag(half[1:], "half")
        edits.tag([n for n in range(12) if n not in half], "half")
    assert (first.reason, first.step) == ("stopped", 3)
    _, second, _ = start("parts", resume=True)
    assert (second.step, second.loss) == (done.step, done.loss) and np.array_equal(kept(whole), kept(parts))
    other, _, _ = start("other", **options)
    assert not np.array_equal(kept(whole), kept(other)), "it would have learned something else"


def test_a_filter_may_be_another_one_until_the_run_has_learned(
    start: Callable[..., Any], log: Path, monkeypatch: pytest.MonkeyPatch
):
    with Log.open(log) as opened:
        Edits(opened).tag(opened_split(log), "half")
    options: dict[str, Any] = {"validation": 0.0, "validation_period": 100, "max_steps": 100}
    with monkeypatch.context() as broken, pytest.raises(NameError):
        broken.delattr(sft, "make_policy")
        start(where="success=true", **options)
    run, _, _ = start(resume=True, where="tag=half")
    assert np.allclose(kept(run), 0.5, atol=0.1), "the actions of the three episodes with this tag"
