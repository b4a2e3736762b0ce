"""A condition as an embedding: it reaches every policy that has a token of the state, each row has its own, and it is
kept beside the files of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies.base import drawn_fields, rejoin
from hilt.policies.condition_embedding import GOOD, NONE, embedding_of
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE, UNKNOWN, Condition, ConditionedPolicy, guided_more
from hilt.policies.guidance import act_guided
from hilt.policies.io.lora import attach
from hilt.policies.io.tensor_files import Tensors
from hilt.policies.registry import load_policy
from tests.policies import test_conditioned, test_pi0, tiny_openvla, tiny_pi0

PROPRIO = {"use_proprio": True, "proprio_dim": 7}


def made(kind: str) -> tuple[Any, list[dict[str, Any]]]:
    """A policy, and two observations."""
    if kind in ("tokens", "gaussian", "flow"):
        return test_conditioned.made(head=kind), [test_conditioned.seen(), test_conditioned.seen("stop")]
    if kind == "pi0":
        rows = tiny_openvla.observations(2, state=8)
        return tiny_pi0.tiny().eval(), rows
    if kind == "smolvla":
        return test_pi0.made(kind).eval(), test_pi0.seen(2)
    head = {"head": "l1"} if kind == "oft l1" else {}
    return tiny_openvla.tiny(**PROPRIO, **head).eval(), tiny_openvla.observations(2, state=7)


KINDS = ("tokens", "gaussian", "flow", "smolvla", "pi0", "oft", "oft l1")


def loss_of(policy: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    shape = (len(rows), getattr(policy, "horizon", policy.chunk), policy.action_dim)
    actions = np.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    draws = torch.Generator().manual_seed(0)
    loss: torch.Tensor = policy.supervised_loss(rows, actions, np.ones(shape[:2], bool), draws)[0]
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_condition_of_each_row_reaches_loss_and_actions(kind: str):
    inside, rows = made(kind)
    before = inside.act(rows, sample=False, generator=torch.Generator().manual_seed(0))[0]
    policy = ConditionedPolicy(inside, kind="embedding")
    embedding = embedding_of(inside)
    assert embedding is not None and not embedding.weight[NONE].any() and embedding.weight[GOOD].any()
    with torch.no_grad():
        embedding.weight.mul_(50)

    def acted(*labels: str) -> np.ndarray:
        asked = [{**row, ADVANTAGE: label} for row, label in zip(rows, labels, strict=True)]
        found: np.ndarray = policy.act(asked, sample=False, generator=torch.Generator().manual_seed(0))[0]
        return found

    np.testing.assert_array_equal(acted(UNKNOWN, UNKNOWN), before)
    good, mixed = acted(POSITIVE, POSITIVE), acted(POSITIVE, NEGATIVE)
    np.testing.assert_allclose(mixed[0], good[0], atol=1e-5)
    np.testing.assert_allclose(mixed[1], acted(NEGATIVE, NEGATIVE)[1], atol=1e-5)
    np.testing.assert_array_equal(
        policy.act(rows, sample=False, generator=torch.Generator().manual_seed(0))[0], good
    )  # by default
    if kind not in ("tokens", "oft"):  # whose bins may be the same ones
        assert np.abs(good - before).max() > 1e-4
    policy.train()
    losses = {}
    for label in (POSITIVE, NEGATIVE, UNKNOWN):
        policy.zero_grad()
        loss = loss_of(policy, [{**row, ADVANTAGE: label} for row in rows])
        loss.backward()
        assert embedding.weight.grad is not None
        losses[label] = loss.item()
        moved = embedding.weight.grad.abs().sum(1) > 0
        assert moved.tolist() == [label == UNKNOWN, label == POSITIVE, label == NEGATIVE]
    assert len(set(losses.values())) == 3


@pytest.mark.parametrize("kind", ["tokens", "flow", "smolvla", "oft"])
def test_a_record_has_its_condition(kind: str):
    inside, rows = made(kind)
    policy = ConditionedPolicy(inside, kind="embedding")
    with torch.no_grad():
        policy.policy.condition_embedding.weight.mul_(50)
    asked = [{**rows[0], ADVANTAGE: NEGATIVE}, rows[1]]
    _, record = policy.act(asked, sample=True, generator=torch.Generator().manual_seed(0))
    assert record["condition"].tolist() == [2, 1]
    with torch.no_grad():
        np.testing.assert_allclose(policy.evaluate(record).log_prob, record["log_prob"], atol=1e-4, rtol=1e-4)
        other = policy.evaluate({**record, "condition": np.array([1, 1])}).log_prob
    assert not np.allclose(other[0], record["log_prob"][0], atol=1e-6)
    np.testing.assert_allclose(other[1], record["log_prob"][1], atol=1e-4, rtol=1e-4)
    assert "condition" not in drawn_fields(record), "it comes with the observation"
    assert rejoin(policy, asked, drawn_fields(record))["condition"].tolist() == [2, 1]


def test_guidance_is_away_from_the_embedding_of_nothing():
    inside, rows = made("gaussian")
    policy = ConditionedPolicy(inside, kind="embedding")
    with torch.no_grad():
        inside.condition_embedding.weight.normal_(generator=torch.Generator().manual_seed(1))
    without, good = (inside.act([{**row, "condition": n} for row in rows], sample=False)[0] for n in (NONE, GOOD))
    found = guided_more(policy, 2.0).act(rows, sample=False)[0]
    np.testing.assert_allclose(found, without + 2 * (good - without), atol=1e-5)
    pairs = ([{**row, "condition": n} for row in rows] for n in (GOOD, NONE))
    np.testing.assert_allclose(act_guided(inside, *pairs, 2.0, sample=False)[0], found, atol=1e-6)


@pytest.mark.parametrize("kind", ["tokens", "pi0"])
def test_the_folder_has_the_embedding_beside_the_policy_as_it_is_published(kind: str, tmp_path: Path):
    inside, rows = made(kind)
    inside.save_pretrained(tmp_path / "plain")
    policy = ConditionedPolicy(inside, guidance=1.5, kind="embedding")
    with torch.no_grad():
        inside.condition_embedding.weight.normal_(generator=torch.Generator().manual_seed(1))
    policy.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole/config.json").read_text())["condition"] == "embedding"
    files = {path.name for path in (tmp_path / "whole" / "policy").iterdir()}
    assert files == {path.name for path in (tmp_path / "plain").iterdir()}
    assert set(Tensors(tmp_path / "whole/policy")) == set(Tensors(tmp_path / "plain"))
    again: Any = load_policy(tmp_path / "whole").eval()
    assert (again.kind, again.guidance) == ("embedding", 1.5)
    assert torch.equal(again.policy.condition_embedding.weight, inside.condition_embedding.weight)
    for label in (POSITIVE, NEGATIVE):
        asked = [{**row, ADVANTAGE: label} for row in rows]
        ours, theirs = (each.act(asked, sample=False, generator=test_pi0.generator())[0] for each in (policy, again))
        np.testing.assert_array_equal(ours, theirs)
    alone: Any = load_policy(tmp_path / "whole" / "policy")
    assert embedding_of(alone) is None, "the policy inside is one like any other"
    (tmp_path / "whole/config.json").write_text('{"model_type": "hilt_conditioned", "guidance": 1.0}')
    before: Any = load_policy(tmp_path / "whole")
    assert before.kind == "words", "as folders from before there was a choice"


def test_beside_adapters_it_is_trained_in_full_and_kept():
    inside, rows = made("tokens")
    policy = ConditionedPolicy(inside, kind="embedding")
    attach(policy, 2, seed=0)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert "policy.condition_embedding.weight" in trained and any("lora_A" in name for name in trained)
    loss_of(policy.train(), rows).backward()
    assert inside.condition_embedding.weight.grad[GOOD].any()


def test_policies_without_a_token_of_the_state_are_refused():
    for inside in (tiny_openvla.tiny(), test_pi0.made("pi05")):
        with pytest.raises(ConfigError, match=r"this .* has no token of the state .*Give condition=words"):
            ConditionedPolicy(inside, kind="embedding")
        assert ConditionedPolicy(inside).kind == "words"
    with pytest.raises(UnknownNameError, match="embeding"):
        ConditionedPolicy(test_conditioned.made(), kind="embeding")


def test_a_condition_of_another_kind_is_not_forgotten_by_mistake():
    learned = ConditionedPolicy(test_conditioned.made(), kind="embedding")
    with pytest.raises(ConfigError, match=r"condition=words: this policy has learned its condition as embedding"):
        Condition(1.0, 0.3).of(learned)
    again = Condition(2.0, 0.3, "embedding").of(learned)
    assert again.policy is learned.policy and (again.guidance, again.dropout, again.kind) == (2.0, 0.3, "embedding")
    assert embedding_of(ConditionedPolicy(learned.policy).policy) is None
