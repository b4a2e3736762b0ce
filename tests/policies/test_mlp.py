"""Passes and gradients that are written out, beside autograd's of the plain formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hilt.policies.agent.actor_critic import ActorNetwork, Body, BranchedNetwork, Critics, GraspCritic, Temperature
from hilt.replay.tensors import generator

torch.set_num_threads(1)
A, FEATURES = 2, 3
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative to the largest number: float64 shows that the formula is right, float32 that it is stable on any CPU"""


def body(hidden: list[int], activation: str = "relu", proprio: int = 0) -> Body:
    return Body(FEATURES, proprio, 4, hidden, activation)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def stir(network: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Scales, shifts and biases are other numbers than 1 and 0, so that one in another's place is noticed."""
    network.to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter += 0.3 * random(*parameter.shape, seed=number, dtype=dtype)
    return network


def assert_close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=CLOSE[ours.dtype] * max(1.0, theirs.abs().max().item()), rtol=0)


@settings(deadline=None, max_examples=30)
@given(
    members=st.integers(1, 4),
    rows=st.integers(1, 9),
    hidden=st.lists(st.integers(4, 8), min_size=1, max_size=3),  # fewer, and a norm divides by nearly nothing
    activation=st.sampled_from(["tanh", "relu"]),
    proprio=st.sampled_from([0, 2]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    shared=st.booleans(),
)
def test_critics_are_those_of_autograd(
    members: int, rows: int, hidden: list[int], activation: str, proprio: int, dtype: torch.dtype, shared: bool
) -> None:
    critics = stir(Critics(body(hidden, activation, proprio), A, generator(1), members), dtype)
    z, actions, dq = (
        random(*shape, seed=9, dtype=dtype) for shape in ((rows, FEATURES + proprio), (rows, A), (members, rows))
    )
    actions.requires_grad_()
    expected = critics(z, actions)
    tape = critics.run(z, actions.detach(), critics.of_states(z) if shared else None)
    assert not tape.out.requires_grad
    assert_close([tape.out.squeeze(-1)], [expected.detach()])
    trained = list(critics.parameters())
    *theirs, dactions = torch.autograd.grad(expected, [*trained, actions], dq)
    found = critics.gradients(tape, dq[..., None], trained)
    assert_close(found, theirs)
    # Adam's kernel reads their memory in order
    assert [each.stride() for each in found] == [each.stride() for each in trained]
    assert_close([critics.action_gradients(tape, dq[..., None])], [dactions])


def test_where_z_comes_from_learns_too() -> None:
    """An encoder has its gradient through the critics, as often as it is asked for."""
    critics, encoder = stir(Critics(body([5, 4]), A, generator(1), 2)), torch.nn.Linear(6, FEATURES).double()
    frames, actions, dq = random(7, 6), random(7, A), random(2, 7)
    trained = [*critics.parameters(), *encoder.parameters()]
    expected = torch.autograd.grad(critics(encoder(frames), actions), trained, dq)
    z = encoder(frames)
    tape = critics.run(z, actions, critics.of_states(z))
    assert_close(critics.gradients(tape, dq[..., None], trained, again=True), expected)
    assert_close(critics.gradients(tape, 2 * dq[..., None], trained), [2 * each for each in expected])


@pytest.mark.parametrize("proprio", [0, 2])
def test_rows_behind_have_no_gradient(proprio: int) -> None:
    """The actor sees states and next states in one pass, and learns from the states."""
    actor = stir(ActorNetwork(body([5, 4], proprio=proprio), A, generator(1)))
    z, dmean, dstd = (random(*shape) for shape in ((8, FEATURES + proprio), (3, A), (3, A)))
    tape, trained = actor.run(z), list(actor.parameters())
    mean, std = actor.gaussian(tape.out[0])
    assert_close([mean, std], [each.detach() for each in actor(z)])
    dout = actor.gaussian_backward(tape.out[0, :3], dmean, dstd)
    assert_close(
        actor.gradients(tape, dout, trained, rows=3), torch.autograd.grad(actor(z[:3]), trained, [dmean, dstd])
    )


def test_a_deviation_at_its_limit_has_no_gradient() -> None:
    actor = ActorNetwork(body([4]), A, generator(1), limits=(0.5, 2.0)).double()
    out = torch.tensor([[0.1, 0.2, -3.0, 0.3], [0.3, 0.4, 3.0, -0.2]], dtype=torch.float64, requires_grad=True)
    dmean, dstd = random(2, A), random(2, A, seed=1)
    expected = torch.autograd.grad(actor.gaussian(out), out, [dmean, dstd])[0]
    assert_close([actor.gaussian_backward(out.detach(), dmean, dstd)[0]], [expected])
    assert (expected[:, 2] == 0).all() and (expected[:, 3] != 0).all()


def test_a_grasp_critic_and_a_temperature() -> None:
    critic, z, dq = (
        stir(GraspCritic(body([5], "tanh", proprio=2), 9, generator(1))),
        random(6, FEATURES + 2),
        random(6, 9),
    )
    trained = list(critic.parameters())
    tape = critic.run(z)
    assert_close(critic.gradients(tape, dq[None], trained), torch.autograd.grad(critic(z), trained, dq))
    temperature = Temperature(0.3).double()
    assert_close(
        temperature.gradients(torch.tensor(0.7, dtype=torch.float64)),
        torch.autograd.grad(0.7 * temperature(), [temperature.raw]),
    )


def moved(network: BranchedNetwork, z: Tensor, *more: Tensor) -> Tensor:
    """Its outputs before and after each of its parameters has changed in place."""
    before = network.run(z, *more).out.clone()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    return torch.stack([before, network.run(z, *more).out])


def test_mlp_follows_parameters_that_change_and_move() -> None:
    """Its views are made once: they are those of the parameters as they are now, of another type, and of a copy."""
    critics, z, actions = Critics(body([4]), A, generator(1), 2), random(5, FEATURES).float(), random(5, A).float()
    twin = copy.deepcopy(critics)
    first = moved(critics, z, actions)
    assert not torch.equal(*first)
    assert torch.equal(twin.run(z, actions).out, first[0])
    critics.double()
    torch.testing.assert_close(critics.run(z.double(), actions.double()).out.float(), first[1], atol=1e-5, rtol=0)
    copied = copy.deepcopy(critics)
    assert torch.equal(moved(critics, z.double(), actions.double()), moved(copied, z.double(), actions.double()))
