"""Guidance by a condition: each head and each flow against the formula, written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.policies.conditioned import ConditionedPolicy
from hilt.policies.guidance import act_guided
from tests.policies import test_conditioned, test_pi0, tiny_openvla

WEIGHT = 2.5


def pair(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return [{**row, "instruction": f"{row['instruction']}. good"} for row in rows], rows


def test_tokens_are_guided_by_their_logits():
    policy = test_conditioned.made(decode="likeliest")
    policy.action_head.out.weight.data.mul_(20)  # it has opinions
    good, plain = pair([test_conditioned.seen(words) for words in ("go", "stop", "turn")])
    logits = [
        policy.action_head.out(policy.features(rows)).view(3, 2, 1, 13).detach().double() for rows in (plain, good)
    ]
    want = torch.log_softmax(logits[0] + WEIGHT * (logits[1] - logits[0]), -1)
    found, record = act_guided(policy, good, plain, WEIGHT, sample=False)
    np.testing.assert_allclose(found, want.argmax(-1) / 6 - 1, atol=1e-5)
    np.testing.assert_allclose(record["log_prob"], want.amax(-1), atol=1e-4)
    draws = torch.Generator().manual_seed(0)
    many, _ = act_guided(policy, good * 3000, plain * 3000, WEIGHT, sample=True, generator=draws)
    share = [(many[0::3].round(4) == round(float(value), 4)).mean((0, 2)) for value in torch.linspace(-1, 1, 13)]
    np.testing.assert_allclose(np.stack(share, -1), want.exp()[0, :, 0], atol=0.03)
    assert not np.allclose(found, policy.act(good, sample=False)[0])
    np.testing.assert_array_equal(
        act_guided(policy, good, plain, 1.0, sample=False)[0], policy.act(good, sample=False)[0]
    )


def test_gaussians_are_guided_by_their_mean():
    policy = test_conditioned.made(head="gaussian")
    good, plain = pair([test_conditioned.seen(), test_conditioned.seen("stop")])
    mean = [policy.act(rows, sample=False)[0] for rows in (plain, good)]
    found, _ = act_guided(policy, good, plain, WEIGHT, sample=False)
    np.testing.assert_allclose(found, mean[0] + WEIGHT * (mean[1] - mean[0]), atol=1e-5)


@pytest.mark.parametrize("kind", ["small_vla", "sde", "smolvla"])
def test_flows_are_guided_by_their_velocity(kind: str):
    # "sde" is a pi0
    policy: Any = test_conditioned.made(head="flow") if kind == "small_vla" else test_pi0.made(kind).eval()
    rows = [test_conditioned.seen(), test_conditioned.seen("stop")] if kind == "small_vla" else test_pi0.seen(2)
    good, plain = pair(rows)
    found, _ = act_guided(policy, good, plain, WEIGHT, sample=False)  # begins at 0 without a generator
    with torch.no_grad():
        if kind == "small_vla":
            fields = [policy.action_head._field(policy.features(side), None) for side in (plain, good)]
            steps, x = policy.config.flow.steps, torch.zeros(2, 2, 1)
        else:
            fields = [policy.field_of(side) for side in (plain, good)]
            steps, x = policy.config.flow.steps, torch.zeros(policy._shape(2))
        for i in range(steps):
            times = torch.full((2,), 1 - i / steps)
            without, conditioned = (field(x, times).velocity for field in fields)
            x = x - (without + WEIGHT * (conditioned - without)) / steps
    if kind == "small_vla":
        np.testing.assert_allclose(found, x.clamp(-1, 1), atol=1e-5)
    else:
        want = policy._normalize("action", policy._answered(x).numpy(), back=True)
        np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)
    assert not np.allclose(found, policy.act(good, sample=False)[0], atol=1e-6)
    again = act_guided(policy, good, plain, 1.0, sample=False)[0]
    np.testing.assert_allclose(again, policy.act(good, sample=False)[0], atol=1e-5)


def test_tokens_of_openvla_oft_are_guided():
    policy = tiny_openvla.tiny(causal=False).eval()
    good, plain = pair(tiny_openvla.observations(2))
    shape = (2, policy.chunk * policy.action_dim, -1)
    logits = []
    with torch.no_grad():
        for rows in (plain, good):
            _, record = policy.act(rows, sample=False)
            logits.append(policy.token_log_probs(record).double().view(shape))
    want = torch.log_softmax(logits[0] + WEIGHT * (logits[1] - logits[0]), -1)
    _, record = act_guided(policy, good, plain, WEIGHT, sample=False)
    places = torch.from_numpy(record["tokens"]).view(2, -1) - policy._first
    np.testing.assert_allclose(record["log_prob"].reshape(2, -1), want.amax(-1), atol=1e-4)
    assert (places == want.argmax(-1)).float().mean() > 0.95  # near ties may fall otherwise
    np.testing.assert_array_equal(
        act_guided(policy, good, plain, 1.0, sample=False)[0], policy.act(good, sample=False)[0]
    )
    assert policy._unconditioned is None


def test_other_policies_are_refused():
    with pytest.raises(ConfigError, match=r"guidance=2: this .* cannot be guided; small_vla, pi0"):
        ConditionedPolicy(tiny_openvla.tiny(causal=True), guidance=2.0)
    assert ConditionedPolicy(tiny_openvla.tiny(causal=True)).guidance == 1
