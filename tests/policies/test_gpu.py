"""On a GPU a policy gives the actions, log-probabilities and gradients that it gives on the CPU, but for rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.policies import test_openvla, test_pi0, test_small_vla

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

POLICIES = [
    *(("small_vla", kind) for kind in test_small_vla.HEADS),
    *(("openvla", kind) for kind in test_openvla.KINDS),
    *(("pi0", kind) for kind in test_pi0.POLICIES),
]
NEAR = 2e-2
"""Convolutions have 10 bits there, as cuDNN's default is TF32"""
NEAR_IN_BFLOAT16 = 5e-2


def made(family: str, kind: str) -> tuple[Any, Any]:
    """A policy, always the same, and what it sees."""
    if family == "openvla":
        return test_openvla.policy_of(kind), test_openvla.seen(3)
    module = test_small_vla if family == "small_vla" else test_pi0
    return module.made(kind), module.seen(3)


@pytest.mark.parametrize(("family", "kind"), POLICIES)
def test_a_gpu_gives_what_the_cpu_gives(family: str, kind: str):
    (ours, seen), (theirs, _) = made(family, kind), made(family, kind)
    near = NEAR_IN_BFLOAT16 if kind == "bfloat16" else NEAR
    theirs.to("cuda:0")
    actions, record = ours.act(seen, generator=torch.Generator().manual_seed(0))
    again, other = theirs.act(seen, generator=torch.Generator().manual_seed(0))
    assert again.shape == actions.shape and {name: array.shape for name, array in other.items()} == {
        n: a.shape for n, a in record.items()
    }
    np.testing.assert_allclose(again, actions, rtol=0, atol=near * np.abs(actions).max())

    here, there = ours.evaluate(record), theirs.evaluate(record)
    for name, one, two in zip(here._fields, here, there, strict=True):
        assert (one is None) == (two is None), name
        if one is not None:
            assert two.is_cuda
            torch.testing.assert_close(two.cpu(), one, rtol=near, atol=near * float(one.detach().abs().max()), msg=name)
    for found in (here, there):
        sum(part.float().mean() for part in found if part is not None).backward()
    flat = [
        torch.cat([p.grad.cpu().flatten() for p in policy.parameters() if p.grad is not None])
        for policy in (ours, theirs)
    ]
    assert float((flat[0] - flat[1]).norm() / flat[0].norm()) < 5 * near and flat[0].norm() > 0


@pytest.mark.parametrize("kind", test_pi0.POLICIES)
def test_given_noise_leads_on_a_gpu_where_act_leads(kind: str):
    policy, seen = made("pi0", kind)
    expected = policy.act_from(seen, start := torch.randn(3, *policy.start_shape, generator=_generator()).numpy())
    policy.to("cuda:0")
    drawn, _ = policy.act(seen, sample=False, generator=_generator())
    found = policy.act_from(seen, start)
    np.testing.assert_allclose(found, drawn, rtol=0, atol=1e-5 * np.abs(drawn).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR * np.abs(expected).max())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
