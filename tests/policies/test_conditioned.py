"""A policy that is asked for good actions: the words that it reads, conditions that are left out, and its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.policies.base import Prefix
from hilt.policies.conditioned import (
    ADVANTAGE,
    NEGATIVE,
    POSITIVE,
    UNKNOWN,
    WRONG_LOSS,
    ConditionedPolicy,
    guided_more,
)
from hilt.policies.registry import load_policy
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

SIZES = {"cameras": ("full_image",), "image_size": 16, "state_dim": 1, "action_dim": 1, "chunk": 2, "width": 16}


def made(seed: int = 0, **options: Any) -> SmallVLA:
    return SmallVLA(SmallVLAConfig(**SIZES, depth=1, heads=2, keypoints=2, **options), seed=seed).eval()


def seen(words: str = "go", **more: Any) -> dict[str, Any]:
    return {
        "full_image": np.zeros((16, 16, 3), np.uint8),
        "state": np.ones(1, np.float32),
        "instruction": words,
        **more,
    }


def test_words_say_what_is_wanted():
    inside = made()
    policy = ConditionedPolicy(inside)
    for label, words in ((None, f"go. {POSITIVE}"), (NEGATIVE, f"go. {NEGATIVE}"), (UNKNOWN, "go")):
        row = seen() if label is None else seen(**{ADVANTAGE: label})
        found, record = policy.act([row], sample=False)
        want, same = inside.act([seen(words)], sample=False)
        assert (found == want).all() and (record["prompt"] == same["prompt"]).all()
        assert torch.equal(policy.features([row]), inside.features([seen(words)]))
    with torch.no_grad():
        np.testing.assert_allclose(policy.evaluate(record).log_prob, record["log_prob"], atol=1e-6)
    assert policy.observed_fields() == inside.observed_fields() and policy.horizon == 2


def test_conditions_are_left_out_in_training_alone(monkeypatch: pytest.MonkeyPatch):
    policy, asked = ConditionedPolicy(made(), dropout=0.4), list[str]()
    learn = policy.policy.supervised_loss

    def noted(rows: Any, *given: Any) -> Any:
        asked.extend(row["instruction"] for row in rows)
        return learn(rows, *given)

    monkeypatch.setattr(policy.policy, "supervised_loss", noted)
    rows = [seen(**{ADVANTAGE: NEGATIVE})] * 400
    batch = (np.zeros((400, 2, 1), np.float32), np.ones((400, 2), bool))
    policy.eval().supervised_loss(rows, *batch, torch.Generator().manual_seed(0))
    assert set(asked[:400]) == {f"go. {NEGATIVE}"} and set(asked[400:]) == {f"go. {POSITIVE}"}
    asked.clear()
    policy.train().supervised_loss(rows, *batch, torch.Generator().manual_seed(0))
    assert set(asked) == {f"go. {NEGATIVE}", "go"} and 0.3 < np.mean([words == "go" for words in asked]) < 0.5
    with pytest.raises(ConfigError, match="needs a generator"):
        policy.supervised_loss(rows, *batch)


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_validation_shows_whether_the_condition_makes_a_difference(head: str):
    policy = ConditionedPolicy(made(head=head), dropout=0.4).eval()
    rows = [seen(**{ADVANTAGE: label}) for label in (POSITIVE, NEGATIVE)]
    opposite = [seen(**{ADVANTAGE: label}) for label in (NEGATIVE, POSITIVE)]
    batch = (np.array([1, -1], np.float32).repeat(2).reshape(2, 2, 1), np.ones((2, 2), bool))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        loss, figures = policy.supervised_loss(rows, *batch, draws)
        drawn = draws.get_state()
        want, others = policy.supervised_loss(opposite, *batch, draws.manual_seed(0))
    assert figures[WRONG_LOSS] == pytest.approx(float(want), abs=1e-6)
    assert others[WRONG_LOSS] == pytest.approx(float(loss), abs=1e-6) and figures[WRONG_LOSS] != float(loss)
    assert torch.equal(draws.get_state(), drawn)
    assert WRONG_LOSS not in policy.supervised_loss([seen()], batch[0][:1], batch[1][:1], draws)[1]


def test_its_folder_is_opened_as_any_policy(tmp_path: Path):
    policy = ConditionedPolicy(made(3), guidance=1.5)
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy", decode="likeliest").eval()
    assert isinstance(again, ConditionedPolicy) and again.guidance == 1.5
    assert again.policy.config.decode == "likeliest"  # type: ignore[union-attr]
    plain = load_policy(tmp_path / "policy", guidance=1.0).eval()
    want = policy.policy.act([seen(f"go. {POSITIVE}")], sample=False)[0]
    assert (plain.act([seen()], sample=False)[0] == want).all()


def test_what_cannot_work_is_refused():
    for wrong in ({"guidance": 0.0}, {"dropout": 1.0}):
        with pytest.raises(ConfigError, match="expected one above 0"):
            ConditionedPolicy(made(), **wrong)
    with pytest.raises(ConfigError, match="this SmallVLA was trained without a condition"):
        guided_more(made(), 2.0)
    policy = guided_more(ConditionedPolicy(made(head="flow")).eval(), 2.0)
    assert policy.guidance == 2 and not policy.training
    assert not policy.takes_prefix and ConditionedPolicy(made(head="flow")).takes_prefix
    with pytest.raises(ConfigError, match="cannot continue one"):
        policy.act([seen()], False, prefix=Prefix(np.zeros((1, 1, 1), np.float32), np.array([1])))
    with pytest.raises(ConfigError, match="guidance=2 is for acting"):
        policy.evaluate({})
