"""The memory of a run before anything of it is loaded: new policies, folders, adapters, the other roles."""

from __future__ import annotations

import re
import shutil
import types
from dataclasses import replace
from pathlib import Path

import pytest

from hilt.core.config import build
from hilt.recipes import vla_recipe
from hilt.vla import footprint as module
from hilt.vla.config import Vla
from hilt.vla.footprint import blank_record, disk, footprint, new_sizes
from hilt.vla.sft import Lora
from hilt.vla.train import begin_run, train
from hilt.vla.worker import first_policy
from tests.policies.tiny_openvla import tiny
from tests.vla.test_worker import SIZES
from tests.vla.toy_vla import config


def megabytes(line: str, part: str) -> float:
    found = re.search(rf"{part} ([\d.]+) MB", line)
    assert found is not None, line
    return float(found[1])


def test_each_role_has_a_line():
    lines = [
        *footprint(
            config(
                "algorithm.estimator=gae", "critic.kind=separate", "algorithm.kl.where=reward", "reference.offload=true"
            )
        )
    ]
    assert [line.split(":")[0] for line in lines] == [
        "memory of the policy, in training with 64 chunks in a pass",
        "memory of the reference, on the host but for its passes with 64 chunks in a pass",
        "memory of the critic, in training with 64 chunks in a pass",
        "disk for the run",
        "memory that cpu has free here",
    ]
    assert "with 10 chunks in a pass" in next(footprint(config("algorithm.batch.tokens_per_pass=420"))), (
        "prompts of 40 tokens, chunks of 2"
    )
    count = sum(p.numel() for p in first_policy(config(), SIZES).parameters())
    assert megabytes(lines[0], "weights") == pytest.approx(4 * count / 1e6, abs=0.1)
    assert "optimizer" not in lines[1] and megabytes(lines[2], "weights") >= megabytes(lines[0], "weights")


def test_float8_copies_have_a_line():
    float8 = ["policy_options.rollout_precision=fp8_emulated", "algorithm.recompute_log_prob=true"]
    ahead = ["collect.ahead=1", "pool.workers=1"]
    lines = [list(footprint(config(*float8, *more)))[-3] for more in ([], ahead)]
    policy = first_policy(config(*float8), SIZES)
    layers = policy.float8_layers()
    once = sum(layer.weight.numel() + 4 * len(layer.weight) for layer in layers) / 1e6
    told = "memory of the float8 copies for rollouts:"
    assert lines == [
        f"{told} {once:.1f} MB",
        f"{told} {2 * once:.1f} MB, once for the policy that acts and once for the one that learns",
    ]


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_a_blank_record_is_what_other_heads_take(head: str):
    options = {name: value for name, value in config().policy_options.items() if name not in ("bins", "smoothing")}
    policy = first_policy(replace(config(), policy_options={**options, "head": head}), SIZES)
    assert policy.evaluate(blank_record(policy, 3)).log_prob.shape == (3, 2, 1)


def test_of_a_folder_nothing_is_loaded_and_adapters_need_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny().save_pretrained(tmp_path / "oft")
    settings = Vla(policy=str(tmp_path / "oft"), tasks=["libero_spatial/0"])
    monkeypatch.setattr(module, "free_bytes", lambda device: 10**9)
    whole, few = (next(footprint(replace(settings, lora=Lora(rank)))) for rank in (0, 2))
    assert megabytes(few, "gradients") < megabytes(whole, "gradients") / 2


def test_disk_of_a_run_is_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small_vla whose numbers outweigh what is beside them, one training step, a validation after it."""
    small = build(vla_recipe("vla_debug"), "max_steps=1", "policy_options.width=96", "critic.kind=none")
    run = tmp_path / "run"
    (planned,) = (line for line in footprint(small, run) if line.startswith("disk for the run:"))
    assert "too little" not in planned and "are free" in planned
    said: list[str] = []
    train(begin_run(run, "vla_debug", small), run, notify=said.append)
    assert not any(line.startswith("disk") for line in said), "a run whose disk has room does not speak of it"
    sizes = {
        name: sum(path.stat().st_size for path in (run / name).rglob("*") if path.is_file()) / 1e6
        for name in ("checkpoints", "best", "policy")
    }
    found = re.search(
        r"2 checkpoints of ([\d.]+) MB .*, ([\d.]+) MB for the best.* ([\d.]+) MB for the policy", planned
    )
    assert found is not None, planned
    assert [sizes[name] for name in ("checkpoints", "best", "policy")] == pytest.approx(
        [float(size) for size in found.groups()], rel=0.1
    )
    enough = int(1.2e6 * sizes["checkpoints"])  # for the checkpoint that is written beside the one that is there
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=enough))
    assert not list(disk(small, new_sizes(small), run, begins=True)), "what a run that goes on has counts"
    assert list(disk(small, new_sizes(small), tmp_path / "elsewhere", begins=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10**6))
    (short,) = disk(small, new_sizes(small), tmp_path / "elsewhere", begins=True)
    assert short.endswith("1.0 MB are free; that is too little, give --run a folder of a larger disk")
