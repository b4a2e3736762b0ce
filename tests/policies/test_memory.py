"""The estimate beside what the allocator says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core import platform
from hilt.core.errors import ConfigError
from hilt.policies.io import lora, memory
from hilt.policies.io.memory import Estimate, estimate
from hilt.policies.vla.openvla import OpenVLAOptions
from tests.policies.tiny_openvla import TEXT, VIT, bare

WIDE = {
    "text_config": {**TEXT, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    "vit": [VIT | {"embed_dim": 128}] * 2,
}
"""9 million parameters"""


def record_of(policy: Any, rows: int) -> dict[str, np.ndarray]:
    size, shape = policy.config.image_size, (rows, policy.chunk, policy.action_dim)
    return {
        "images": np.zeros((rows, 1, size, size, 3), np.uint8),
        "prompt": np.full((rows, 20), 5, np.int32),
        "prompt_length": np.full(rows, 20, np.int32),
        "tokens": np.full(shape, policy.token.first, np.int32),
        "temperature": np.ones(rows, np.float32),
        "log_prob": np.zeros(shape, np.float32),
    }


def peak(call: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator has given out at most while this ran, from its own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@pytest.mark.parametrize(
    ("changes", "rows", "how"),
    [
        ({}, 8, "act"),
        (WIDE, 8, "train"),
        pytest.param({}, 32, "checkpointed", marks=pytest.mark.peers),
        pytest.param(WIDE, 8, "lora", marks=pytest.mark.peers),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_estimate_is_within_15_percent_of_the_peak(changes: dict[str, Any], rows: int, how: str):
    training = how != "act"

    def build() -> Any:
        return bare(options=OpenVLAOptions(checkpointed=float(how == "checkpointed")), **changes)

    def prepare(policy: Any) -> None:
        if how == "lora":
            lora.attach(policy, rank=4)

    def run() -> None:
        policy = build().initialize()
        prepare(policy)
        with torch.set_grad_enabled(training):
            found = policy.evaluate(record)
            if training:
                (found.log_prob.sum() + found.entropy.sum()).backward()

    record = record_of(build(), rows)
    needs = estimate(build, record, training, prepare=prepare)
    measured = peak(run)
    assert needs.total - needs.optimizer == pytest.approx(measured, rel=0.15)
    assert needs.optimizer == 2 * needs.gradients and (needs.gradients > 0) == training


def test_half_the_precision_is_half_the_weights():
    record = record_of(bare(), 2)
    whole, half = (estimate(bare, record, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.weights == pytest.approx(whole.weights / 2, rel=0.01)


def test_memory_estimate_that_does_not_fit_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    needs = Estimate(
        weights=15 * 10**9,
        gradients=15 * 10**9,
        optimizer=60 * 10**9,
        activations=20 * 10**9,
        largest=10**9,
        rows=32,
        training=True,
    )
    assert needs.total == 110 * 10**9 and needs.places("cuda:0") == {"cuda:0": needs.total, "cpu": 10**9}
    monkeypatch.setattr(memory, "free_bytes", lambda device: 80 * 10**9)
    with pytest.raises(
        ConfigError,
        match=r"training with 32 rows needs 110\.0 GB: weights 15\.0 GB, gradients 15\.0 GB, optimizer 60\.0 GB, "
        r"activations 20\.0 GB on cuda:0, which has 80\.0 GB free\. "
        r"Try fewer rows at a time than 32, gradient checkpointing, LoRA, dtype=torch\.bfloat16, or a device",
    ):
        needs.check("cuda:0")
    needs.check("cuda:0", free=139 * 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**8)
    with pytest.raises(ConfigError, match=r"needs 1\.0 GB on cpu, which has 100\.0 MB free"):
        needs.check("cuda:0", free=139 * 10**9)
    monkeypatch.undo()
    assert memory.free_bytes("cpu") > 10**6
    with pytest.raises(ConfigError, match="is not on this machine"):
        memory.free_bytes("cuda:99")
    for name, number in (
        ("memory.max", "5000"),
        ("memory.current", "2000"),
        ("memory.stat", "anon 5\ninactive_file 700"),
    ):
        (tmp_path / name).write_text(number + "\n")
    monkeypatch.setattr(platform, "CONTAINER", tmp_path)
    assert memory.free_bytes("cpu") == 3700
