"""Adam and AdamW beside torch's own."""

from __future__ import annotations

import pytest
import torch

from hilt.algos.adam import Adam, denormals_flushed


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_as_torch_has_it(decay: float):
    draws = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    adam, reference = Adam([ours], 0.1, decay), torch.optim.AdamW([theirs], 0.1, weight_decay=decay)
    for _ in range(5):
        gradient = torch.randn(5, generator=draws)
        adam.step([gradient])
        theirs.grad = gradient.clone()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert decay == 0 or not torch.allclose(ours, torch.randn(5, generator=torch.Generator().manual_seed(1)), atol=0.1)


def test_a_gradient_may_have_another_layout_than_its_weights():
    """A convolution of pictures gives one with its channels last. The kernel would read
    its memory in order, and move other weights."""
    weights, gradient = torch.randn(2, 2, 3, 2, 2, generator=torch.Generator().manual_seed(2)).unbind()
    ours, same = weights.clone(), weights.clone()
    Adam([ours], 0.1).step([gradient.contiguous(memory_format=torch.channels_last)])
    Adam([same], 0.1).step([gradient])
    assert torch.equal(ours, same) and torch.equal((weights - ours).sign(), gradient.sign())


def test_a_parameter_without_a_gradient_is_left_as_it_is_and_counts_no_step():
    ours, theirs = ([torch.ones(2).requires_grad_() for _ in range(2)] for _ in range(2))
    adam, reference = Adam(ours, 0.1), torch.optim.AdamW(theirs, 0.1, weight_decay=0.0)
    adam.step([None, None])
    for gradients in ([torch.ones(2), None], [torch.full((2,), -3.0), torch.ones(2)]):
        adam.step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    assert torch.allclose(torch.stack(ours), torch.stack(theirs)) and adam.tensors()["steps"].tolist() == [2, 1]


def test_moment_of_an_idle_weight_becomes_zero_where_denormals_are_flushed():
    """Elsewhere it stays at the smallest number there is, and costs time in every step on x86-64."""

    def moment_after_idle_steps() -> float:
        weight = torch.ones(1)
        adam = Adam([weight], 0.1)
        for gradient in [torch.ones(1)] + 1_100 * [torch.zeros(1)]:
            adam.step([gradient])
        return adam.tensors()["first.0"].item()

    assert 0 < moment_after_idle_steps() < 1e-38
    with denormals_flushed():
        assert moment_after_idle_steps() == 0
    assert (torch.full((1,), 1e-40) * 0.9).item() > 0, "it is as before"
