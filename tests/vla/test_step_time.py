"""The time of a training step: its arithmetic with a made-up machine, and, with --long, beside what is measured here.

pytest --long -s tests/vla/test_step_time.py -k measured
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.core.config import build
from hilt.distributed.ranks import Alone
from hilt.envs import task
from hilt.policies.cost.fits import Fit
from hilt.policies.cost.machine_speed import Calibration, SimulatorTime, measure, simulator_key
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.openvla import LARGE, OpenVLAOptions
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.tokens import ByteTokenizer
from hilt.recipes import vla_recipe
from hilt.vla.config import Vla
from hilt.vla.plan.step_time import (
    PolicyTimes,
    TaskLength,
    measure_simulator,
    pass_ways,
    policy_times,
    predict,
    step_time,
)
from hilt.vla.worker import Worker
from tests.cli.test_train_simplevla import StandIn
from tests.policies.test_machine_speed import MADE_UP
from tests.policies.tiny_openvla import TEXT, VIT, tiny
from tests.policies.tiny_pi0 import SIZES
from tests.recipes.test_published import OWN, SMALL
from tests.vla.toy_vla import UP, config

TIMES = PolicyTimes(act_s=0.1, act_rows=3, gradient_s=2.0, look_s=0.5, pass_rows=64, trained=1000, adam_s=0.25, chunk=2)
LENGTH = TaskLength(4, "turn it up")
KEY = simulator_key(UP, {})
KNOWN = MADE_UP.with_simulator(KEY, SimulatorTime(start_s=1.0, step_s=0.1, observe_s=0.05))


def parts(*changes: Any, calibration: Calibration = KNOWN) -> Any:
    return step_time(config(*changes), calibration, TIMES, LENGTH)


def test_arithmetic_of_a_step():
    """16 episodes of two chunks: 11 calls of 3 rows, half a pass of 64 chunks, two steps of the optimizer."""
    found = parts()
    assert found.seconds == {
        "acting": pytest.approx(1.1),
        "simulation": pytest.approx(16 * (1.0 + 2 * 0.05 + 4 * 0.1)),
        "learning": pytest.approx(0.5 * 2.0),
        "optimizer": pytest.approx(2 * 0.25),
    }
    assert found.total == pytest.approx(sum(found.seconds.values()))
    assert found.lines()[:2] == [
        f"time of a training step on cpu (a machine that is made up): {found.total:.2f} s",
        "  acting           1.10 s   32 chunks (16 episodes of 2) in 11 calls of 3",
    ]


@pytest.mark.parametrize(
    ("changes", "part", "seconds"),
    [
        (["collect.execute=1"], "acting", 22 * 0.1),
        (["collect.data_batch_size=14"], "acting", 1.1),  # whole groups are rolled out
        (["collect.oversample_factor=1.5"], "acting", 1.6),
        (["algorithm.epochs=3"], "learning", 3.0),
        (["algorithm.epochs=3"], "optimizer", 1.5),
        (["algorithm.recompute_log_prob=true"], "learning", 1.0 + 0.25),
        (["algorithm.recompute_log_prob=true", "algorithm.batch.trajectories_per_step=0"], "learning", 1.0),
        (["algorithm.kl.where=reward"], "learning", 1.25),
        (["algorithm.estimator=gae", "critic.kind=separate"], "learning", 2 * 1.0 + 0.25),
        (["algorithm.estimator=gae", "critic.kind=separate"], "optimizer", 1.0),
        (["pool.workers=4"], "simulation", 16 * 1.5 / 4),
    ],
)
def test_settings_change_the_time_of_their_part(changes: list[str], part: str, seconds: float):
    changes = [*changes, "algorithm.batch.trajectories_per_step=7"] if "=14" in changes[0] else changes
    assert parts(*changes).seconds[part] == pytest.approx(seconds)


def test_what_runs_at_the_same_time_counts_once():
    beside = parts("pool.workers=4")
    assert beside.total == pytest.approx(beside.seconds["simulation"] + 1.5), "simulators are slower than acting"
    ahead = parts("pool.workers=4", "collect.ahead=1")
    assert ahead.total == pytest.approx(ahead.seconds["simulation"])


def test_simulator_that_was_not_measured_is_named_with_the_command():
    found = parts("task_options.fails=9", calibration=MADE_UP)
    assert found.seconds["simulation"] == 0
    assert found.notes["simulation"].endswith(f"hilt doctor --calibrate --task {UP} --option fails=9")


def test_another_task_of_the_suite_with_the_same_options_will_do():
    sized = config("tasks=[tabletop/pick]", "task_options={image_size: 64, step_limit: 9}")
    for key, there in (("tabletop/reach image_size=64", True), ("tabletop/reach image_size=32", False)):
        known = MADE_UP.with_simulator(key, SimulatorTime(1.0, 0.0, 0.0))
        assert (step_time(sized, known, TIMES, LENGTH).seconds["simulation"] > 0) == there


PLAIN = ("acting", "gradient", "acting")
COMPILED = ("compiled acting", "compiled gradient", "compiled acting")
WIDE = {**TEXT, "hidden_size": LARGE, "num_attention_heads": 8}


def flow(**options: Any) -> Pi0:
    return Pi0(Pi0Config(**{**SIZES, **options}), ByteTokenizer(), {})


def oft(**options: Any) -> Any:
    text = options.pop("text_config", TEXT)
    return tiny(text_config=text, options=OpenVLAOptions(**options))


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (flow, {}, ("captured compiled acting", *COMPILED[1:])),
        (flow, {"acting": "compiled"}, ("captured compiled acting", *COMPILED[1:])),
        (flow, {"acting": "captured"}, ("captured acting", *COMPILED[1:])),
        (flow, {"acting": "eager"}, ("acting", *COMPILED[1:])),
        (flow, {"learning": "eager"}, ("captured compiled acting", *PLAIN[1:])),
        (oft, {}, PLAIN),  # a narrow language model
        (oft, {"text_config": WIDE}, COMPILED),
        (oft, {"text_config": WIDE, "layers": "eager"}, PLAIN),
        (oft, {"layers": "compiled"}, COMPILED),
        (oft, {"layers": "compiled", "acting": "captured"}, ("captured compiled acting", *COMPILED[1:])),
        (oft, {"acting": "captured"}, ("captured acting", *PLAIN[1:])),
    ],
)
def test_policies_are_like_the_layers_that_are_gone_through_as_theirs_are(
    make: Any, options: dict[str, Any], expected: tuple[str, str, str]
):
    policy = make(**options)
    forms = {f"{form}{way}" for form in ("", "compiled ") for way in ("acting", "gradient")}
    forms |= {"captured acting", "captured compiled acting"}
    known = replace(MADE_UP, fits=dict.fromkeys(forms, Fit(1, 1, 0)))
    run = Vla(policy="pi0", device="cuda", tasks=[UP])
    assert pass_ways(run, policy, known) == expected
    assert pass_ways(replace(run, device="cpu"), policy, known) == PLAIN
    without = replace(known, fits={name: fit for name, fit in known.fits.items() if "compiled" not in name})
    assert pass_ways(run, policy, without) == tuple(way.replace("compiled ", "") for way in expected)


def test_other_policies_are_neither_compiled_nor_captured():
    known = replace(MADE_UP, fits={**MADE_UP.fits, "compiled acting": Fit(1, 1, 0)})
    policy: Any = torch.nn.Linear(1, 1)
    assert pass_ways(Vla(policy="small_vla", device="cuda", tasks=[UP]), policy, known) == PLAIN


def test_policy_is_counted_with_its_rows_and_its_adapters():
    """On the made-up machine, whose time is proportional to the work."""
    steady = replace(MADE_UP, fits={"acting": Fit(1, 1, 0), "gradient": Fit(1, 1, 0)})
    few, many = (policy_times(config(f"algorithm.batch.chunks_per_pass={rows}"), steady, LENGTH) for rows in (4, 16))
    assert (few.act_rows, few.pass_rows, many.pass_rows, few.chunk) == (3, 4, 16, 2)
    assert few.act_s == many.act_s > 0 and few.gradient_s > 2 * few.look_s
    assert 1.5 * few.gradient_s < many.gradient_s < 4 * few.gradient_s
    assert few.trained > 1000 and few.adam_s == pytest.approx(few.trained / 1e6)


def test_dry_run_shows_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["train", "tests.vla.toy_vla:config", "--dry-run", "--run", str(tmp_path / "run")]
    said = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"}).output
    assert "time of a training step: not predicted, since this machine is not measured yet: hilt doctor --cal" in said
    KNOWN.save()
    said = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"}).output
    assert "time of a training step on cpu (a machine that is made up): " in said
    assert "  simulation" in said and "16 starts and 64 steps" in said and "2 steps of " in said


def test_simulators_are_measured():
    key, found = measure_simulator(UP, {}, episodes=1)
    assert key == UP and min(found.start_s, found.step_s, found.observe_s) >= 0


def test_simulators_beside_a_gpu_are_measured_by_the_clock(monkeypatch: pytest.MonkeyPatch):
    """It may render, which takes no time of the process."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    _, found = measure_simulator(UP, {}, episodes=1, device="cuda")
    assert found == SimulatorTime(start_s=1.0, step_s=0.0, observe_s=1.0), "one tick for each question"


# --- beside what is measured, which takes minutes and depends on what else the machine does ---


def small() -> Vla:
    return build(
        vla_recipe("vla_debug"),
        *("task_options={image_size: 64, step_limit: 30}", "policy_options={chunk: 5}", "pool.slots=8"),
        *("collect.data_batch_size=8", "algorithm.batch={trajectories_per_step: 4, chunks_per_pass: 32}"),
    )


def published(name: str, policy: Any, place: Path) -> Vla:
    policy.save_pretrained(place)
    options = OWN["oft" if name.startswith("oft") else "pi"]
    sizes = ("task_options={step_limit: 10, wait_steps: 0}", "pool.slots=8", "collect.filter_accuracy=false")
    bounds = ("collect.accuracy_lower_bound=0", "collect.accuracy_upper_bound=1")
    return build(vla_recipe(name), f"policy={place}", *SMALL, *options, *sizes, *bounds)


def wide_oft(place: Path) -> Vla:
    text = {**TEXT, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    vits = [VIT | {"embed_dim": 96, "class_token": False, "global_pool": "map"}] * 2
    policy = tiny(text_config=text, vit=vits, chunk=5, image_size=56)
    return build(published("oft_grpo", policy, place), "policy_options.unnorm_key=libero_spatial")


def wide_pi0(place: Path) -> Vla:
    sizes = {
        "vision": VisionConfig(64, 4, 4, 128, 14, 56),
        "vlm": StackConfig(128, 4, 256, 4, 2, 32),
        "expert": StackConfig(64, 4, 128, 4, 2, 32),
        "chunk_size": 10,
        "n_action_steps": 5,
    }
    policy = Pi0(Pi0Config(**{**SIZES, **sizes}), ByteTokenizer(), {})
    return published("pi0_grpo", policy, place)


def measured_step(settings: Vla, run: Path) -> dict[str, float]:
    """Seconds of the process in one training step, the fastest of three after a first one."""
    worker = Worker(settings, run, Alone())
    rows = []
    for step in range(4):
        times = [time.process_time()]
        worker.collect(step)
        times.append(time.process_time())
        worker.update(1.0)
        times.append(time.process_time())
        rows.append(np.diff(times))
    worker.close()
    collect, update = np.min(rows[1:], 0)
    return {"collect": float(collect), "update": float(update), "all": float(collect + update)}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["small_vla", "oft", "pi0"])
def test_prediction_is_within_25_percent_of_the_measured_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(task.TASKS, "libero_goal", StandIn)
    settings = {
        "small_vla": small,
        "oft": lambda: wide_oft(tmp_path / "policy"),
        "pi0": lambda: wide_pi0(tmp_path / "policy"),
    }[kind]()
    settings = settings.settled()
    torch.set_num_threads(1)
    calibration = measure("cpu").with_simulator(*measure_simulator(settings.tasks[0], settings.task_options))
    found, step = predict(settings, calibration), measured_step(settings, tmp_path / "run")
    rollout = found.seconds["acting"] + found.seconds["simulation"]
    with capsys.disabled():
        print(f"\n{kind}: load {os.getloadavg()[0]:.1f}; predicted {found.total:.3f} s, measured {step['all']:.3f} s, "
              f"ratio {found.total / step['all']:.2f}; rollouts {rollout:.3f} and {step['collect']:.3f}, "
              f"update {found.total - rollout:.3f} and {step['update']:.3f}")  # fmt: skip
        print("\n".join(found.lines()))
    assert 0.75 <= found.total / step["all"] <= 1.25
