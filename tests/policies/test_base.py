"""Records are joined and parted by rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.core.errors import SchemaError
from hilt.policies.base import join, select, widen
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay import Log, Schema


def record(rows: int, width: int) -> dict[str, np.ndarray]:
    return {"prompt": np.ones((rows, width), np.int32), "prompt_length": np.full(rows, width, np.int32)}


def test_records_with_prompts_of_different_length_are_joined() -> None:
    joined = join([record(2, 3), record(1, 5)])
    assert joined["prompt"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]
    assert joined["prompt_length"].tolist() == [3, 3, 5]
    assert select(joined, [2])["prompt_length"].tolist() == [5]


def test_records_of_two_policies_are_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"record 1 has the fields \['tokens'\] and record 0 has \['prompt', 'prompt_length'\]"
    ):
        join([record(1, 2), {"tokens": np.zeros((1, 7))}])
    with pytest.raises(SchemaError, match="given no record"):
        join([])


def test_records_go_through_a_log(tmp_path: Path) -> None:
    """Of two calls, with words of different length. What is read back evaluates to the same numbers: bit for bit at the shapes that it had
    when acting, and within rounding where prompts are wider, as sums over more terms (here zeros) may be taken in another order."""
    sizes = {"image_size": 32, "state_dim": 2, "chunk": 2, "action_dim": 2, "width": 16, "depth": 1, "heads": 2}
    policy = SmallVLA(SmallVLAConfig(**sizes, head="flow", value="shared"))
    chance, random = torch.Generator().manual_seed(0), np.random.default_rng(0)
    acted = [
        policy.act(
            [{"full_image": random.integers(0, 256, (32, 32, 3), np.uint8), "state": np.ones(2), "instruction": words}],
            generator=chance,
        )[1]
        for words in ("go", "go there, and then home")
    ]
    assert acted[0]["prompt"].shape != acted[1]["prompt"].shape
    steps = [{"record": {name: array[:, None] for name, array in widen(record, prompt=40).items()}} for record in acted]
    with Log.create(tmp_path / "log", Schema.of(steps[0], leading=2), durability="never") as log:
        for step in steps:
            log.add(step)
        again = log.read(log.all().keys(), ["record"])["record"]
    found, before = policy.evaluate(again), policy.evaluate(join(acted))
    assert again["prompt"].shape == (2, 40)
    for ours, theirs in zip(found, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    narrow = {**select(again, [0]), "prompt": again["prompt"][:1, : acted[0]["prompt"].shape[1]]}
    assert np.array_equal(policy.evaluate(narrow).log_prob.detach().numpy(), acted[0]["log_prob"])
    alone, other = (policy.evaluate(select(again, [row])).log_prob.detach().numpy() for row in (0, 1))
    np.testing.assert_allclose(alone, acted[0]["log_prob"], rtol=1e-5, atol=1e-6)
    assert np.abs(other - acted[0]["log_prob"]).max() > 1e-2, "other words, other numbers"
    with pytest.raises(SchemaError, match="a prompt of 24 tokens does not go into a column of 23; make a wider one"):
        widen(acted[1], prompt=23)
