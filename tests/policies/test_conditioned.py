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
from hilt.policies.vla.tokens import ByteTokenizer
from tests.policies import test_pi0, tiny_openvla

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


def published(kind: str, longest: int = 100) -> tuple[Any, list[dict[str, Any]]]:
    """A tiny policy of a published kind, and two observations. `longest`: tokens that a flow policy reads at most."""
    if kind.startswith("openvla"):
        return tiny_openvla.tiny(causal=kind == "openvla").eval(), tiny_openvla.observations(2)
    name = {"pi0": "noise", "pi0.5": "pi05"}.get(kind, kind)
    return test_pi0.made(name, tokenizer_max_length=longest).eval(), test_pi0.seen(2)


def asked(rows: list[dict[str, Any]], label: str, **more: Any) -> list[dict[str, Any]]:
    return [{**row, ADVANTAGE: label, **more} for row in rows]


def read_words(policy: ConditionedPolicy, rows: list[dict[str, Any]]) -> list[str]:
    """What the policy reads in each row."""
    record = policy.act(rows, sample=False, generator=torch.Generator().manual_seed(0))[1]
    lengths = zip(record["prompt"].tolist(), record["prompt_length"].tolist(), strict=True)
    return [ByteTokenizer().decode([token for token in prompt[:length] if token < 259]) for prompt, length in lengths]


@pytest.mark.parametrize("kind", ["openvla", "openvla-oft", "pi0", "pi0.5", "smolvla"])
def test_the_words_reach_every_published_policy_and_change_what_it_does(kind: str):
    inside, rows = published(kind)
    policy = ConditionedPolicy(inside)
    found: dict[str, list[Any]] = {}
    for label in (POSITIVE, NEGATIVE, UNKNOWN):
        now = asked(rows, label)
        for row, words in zip(rows, read_words(policy, now), strict=True):
            assert f"{row['instruction']}. {label}".rstrip(". ").lower() in words.lower()
            assert words.lower().count("advantage") == bool(label)
        shape = (2, policy.horizon, policy.action_dim)
        actions, mask = np.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape), np.ones(shape[:2])
        with torch.no_grad():
            loss, _ = inside.supervised_loss(policy._asked(now), actions, mask > 0, torch.Generator().manual_seed(0))
        acted = policy.act(now, sample=False, generator=torch.Generator().manual_seed(0))[0]
        found[label] = [float(loss), policy.features(now), acted]
    for label, other in ((POSITIVE, NEGATIVE), (POSITIVE, UNKNOWN), (NEGATIVE, UNKNOWN)):
        (loss, features, acted), (loss_of_other, features_of_other, acted_of_other) = found[label], found[other]
        assert abs(loss - loss_of_other) > 1e-6, "the loss"
        assert ((features - features_of_other).abs().amax(1) > 1e-5).all(), "the features of each row"
        if not kind.startswith("openvla"):  # the likeliest bins of random weights may be the same ones
            assert (np.abs(acted - acted_of_other).max((1, 2)) > 1e-6).all(), "the actions of each row"


@pytest.mark.parametrize(
    ("kind", "longest", "end"), [("pi0", 48, "\n"), ("pi0.5", 90, "Action: "), ("smolvla", 48, "\n")]
)
def test_a_long_instruction_is_shortened_and_its_condition_is_not(
    kind: str, longest: int, end: str, caplog: pytest.LogCaptureFixture
):
    inside, rows = published(kind, longest)
    policy, words = ConditionedPolicy(inside), f"pick the red cube up and put it into the {kind} box on the left"
    good, bad, none = (
        [*read_words(policy, asked(rows, label, instruction=words))] for label in (POSITIVE, NEGATIVE, UNKNOWN)
    )
    for one, label in ((good, POSITIVE), (bad, NEGATIVE)):
        assert all(f". {label}" in each and "pick the red" in each and each.endswith(end) for each in one)
        assert all("the left" not in each for each in one)
    assert none == read_words(inside, [{**row, "instruction": words} for row in rows]), "cut off as published"
    assert f"{words + '. ' + POSITIVE!r} is read as 'pick the red" in caplog.text
    with pytest.raises(
        ConfigError, match=r"would be cut off.*Give policy_options\.tokenizer_max_length=\d+, or a shorter"
    ):
        ConditionedPolicy(published(kind, 24)[0]).act(asked(rows, POSITIVE, instruction="open"), sample=False)


@pytest.mark.parametrize("kind", ["pi0", "smolvla"])
def test_a_long_instruction_without_spaces_is_shortened_by_letters_and_without_a_condition_cut_off(kind: str):
    words = "把红色的方块从桌子上拿起来放进左边的盒子里"
    inside, rows = published(kind, 40)
    (good,), (none,) = (
        read_words(ConditionedPolicy(inside), asked(rows[:1], label, instruction=words))
        for label in (POSITIVE, UNKNOWN)
    )
    assert good == f"把红色的方. {POSITIVE}\n"
    assert none == read_words(inside, [{**rows[0], "instruction": words}])[0] and words.startswith(none[:12])


def test_without_a_condition_a_prompt_is_cut_off_as_published_and_that_is_reported(caplog: pytest.LogCaptureFixture):
    inside, rows = published("pi0", 12)
    words = [{**row, "instruction": "put the block away"} for row in rows]
    assert read_words(inside, words) == ["put the blo"] * 2
    assert caplog.text.count("the prompt of 'put the block away' has 20 tokens and is cut off after 12") == 1


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
