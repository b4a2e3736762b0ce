"""Records are joined and parted by rows; the prefix of an answer is checked in one place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, SchemaError
from hilt.policies.base import Prefix, check_prefix, join, select, widen
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
    """Of two calls, with words of different length. What is read back evaluates to the same numbers: bit for bit
    at the shapes that it had when acting, and within rounding where prompts are wider, as sums over more terms
    (here zeros) may be taken in another order."""
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


def taking(max_delay: int = 0) -> Any:
    """As much of a policy as `check_prefix` looks at: one that takes prefixes, of chunks of 4 actions of 2 numbers."""
    return SimpleNamespace(takes_prefix=True, chunk=4, action_dim=2, max_delay=max_delay)


def test_a_prefix_becomes_float32_and_int64() -> None:
    given = Prefix(np.ones((3, 4, 2)), np.array([0, 4, 2], np.int32))
    checked = check_prefix(taking(), given, 3, sample=False)
    assert checked is not None and checked.actions.dtype == np.float32 and checked.frozen.dtype == np.int64
    assert checked.frozen.tolist() == [0, 4, 2]
    assert check_prefix(taking(), None, 3, sample=True) is None
    # a trained policy is given as many as it was trained with, and may sample
    trained = check_prefix(taking(max_delay=3), given, 3, sample=True)
    assert trained is not None and trained.frozen.tolist() == [0, 3, 2]


@pytest.mark.parametrize(
    ("max_delay", "actions", "frozen", "said"),
    [
        (0, np.zeros((2, 4, 2)), [1], r"shape \[2, 4, 2\]; expected \[1, 1 to 4, 2\] for 1 observations"),
        (0, np.zeros((1, 5, 2)), [1], r"shape \[1, 5, 2\]; expected \[1, 1 to 4, 2\]"),
        (0, np.zeros((1, 0, 2)), [0], r"shape \[1, 0, 2\]"),
        (0, np.zeros((1, 4, 3)), [1], r"shape \[1, 4, 3\]"),
        (0, np.zeros((4, 2)), [1], r"shape \[4, 2\]"),
        (0, np.full((1, 4, 2), np.nan), [1], "prefix of observation 0 has NaN or infinity; give finite actions"),
        (0, np.zeros((1, 4, 2)), [1.0], r"frozen of a prefix is float64 \[1\]; expected int64 \[1\]"),
        (0, np.zeros((1, 4, 2)), [1, 1], r"frozen of a prefix is int64 \[2\]; expected int64 \[1\]"),
        (0, np.zeros((1, 3, 2)), [4], "frozen of a prefix is 4 and the prefix has 3 actions; expected 0 to 3"),
        (0, np.zeros((1, 3, 2)), [-1], "frozen of a prefix is -1 and the prefix has 3 actions; expected 0 to 3"),
        (2, np.zeros((1, 3, 2)), [4], "frozen of a prefix is 4 and the prefix has 3 actions; expected 0 to 3"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(max_delay: int, actions: np.ndarray, frozen: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        check_prefix(taking(max_delay), Prefix(actions, np.array(frozen)), 1, sample=False)


def test_a_prefix_is_refused_where_it_cannot_be_continued() -> None:
    given = Prefix(np.zeros((1, 2, 2), np.float32), np.ones(1, np.int64))
    with pytest.raises(ConfigError, match=r"sample=True: the draw of this SimpleNamespace is guided .* sample=False"):
        check_prefix(taking(), given, 1, sample=True)
    sizes = {"image_size": 32, "state_dim": 0, "chunk": 2, "action_dim": 2, "width": 16, "depth": 1, "heads": 2}
    policy = SmallVLA(SmallVLAConfig(**sizes, head="tokens"))
    assert not policy.takes_prefix
    row = {"full_image": np.zeros((32, 32, 3), np.uint8), "instruction": "go"}
    with pytest.raises(ConfigError, match="this SmallVLA cannot continue one: leave prefix out, or train"):
        policy.act([row], sample=False, prefix=given)
