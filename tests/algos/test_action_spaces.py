"""Actions beside those of a frozen policy: RLPD's update in each space against a slow reference in float64, and the
properties of each space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilt.algos import rlpd
from hilt.algos.frozen.action_spaces import ActionSpace, EditSpace, NoiseSpace, ResidualSpace
from hilt.core.errors import ConfigError
from hilt.replay.tensors import generator
from tests.algos.reference import Reference
from tests.algos.test_rlpd import ALL, BASE, FEATURES, A, B, batch, networks, numbers

torch.set_num_threads(1)
PLACES = [FEATURES - A + number for number in range(A)]
BOUND = 0.4


def rows(seed: int) -> rlpd.Transitions:
    """A batch whose states end with the actions of a frozen policy, small enough for no sum to be cut off."""
    made = batch(seed)
    for z in (made.z, made.next_z, made.target_z):
        z[:, PLACES] = 0.5 * torch.tanh(z[:, PLACES])
    return made


def run(settings: rlpd.Rlpd, space: ActionSpace, slow_space: dict) -> dict[str, float]:
    """Some updates of both, every number of every network compared; the last figures."""
    nets = networks(settings)
    nets.space = space
    names = ["actor", "critic", "temperature"]
    slow = Reference({name: numbers(getattr(nets, name)) for name in names}, settings, FEATURES, -1.0)
    vars(slow).update(slow_space)
    draws, info = generator(11), {}
    for number in range(2):
        drawn, ahead = rows(number), generator(0)
        ahead.set_state(draws.get_state())
        next_noise, noise = (torch.randn(B, A, generator=ahead, dtype=torch.float64).numpy() for _ in range(2))
        seen = {key: value.numpy() for key, value in vars(drawn).items() if isinstance(value, torch.Tensor)}
        slow.update({"n_steps": np.ones(B), **seen}, set(ALL), next_noise, noise, [0, 1])
        info = rlpd.update(nets, drawn, settings, draws, ALL, number, -1.0)
    for name in names:
        for key, value in numbers(getattr(nets, name)).items():
            np.testing.assert_allclose(value, slow.p[name][key], atol=1e-7, err_msg=f"{name}.{key}")
    return info


PULL = 0.6
PULLED = {"pull": lambda z, actions: PULL * ((actions - z[:, PLACES]) ** 2).mean()}
RESIDUAL = {
    "compose": lambda z, own: z[:, PLACES] + BOUND * own,
    "invert": lambda z, actions: np.clip((actions - z[:, PLACES]) / BOUND, -1, 1),
}


@pytest.mark.parametrize("imitates", [False, True])
def test_residual_updates_equal_the_reference(imitates: bool) -> None:
    settings = replace(BASE, imitation_weight=0.7, imitation_loss="mse") if imitates else BASE
    info = run(settings, ResidualSpace(PLACES, BOUND), RESIDUAL)
    assert 0 < info["correction"] < BOUND and info["pull_loss"] == 0
    run(settings, ResidualSpace(PLACES, BOUND, PULL), RESIDUAL | PULLED)
    for other in (ResidualSpace(PLACES, BOUND / 2, PULL), ResidualSpace(PLACES, BOUND)):
        with pytest.raises(AssertionError):  # another bound, or another pull, is another update
            run(settings, other, RESIDUAL | PULLED)


def test_while_critics_warm_up_the_frozen_policy_stays_as_it_is() -> None:
    settings = replace(BASE, critic_warmup=1, imitation_weight=0.7, imitation_loss="mse")
    run(settings, ResidualSpace(PLACES, BOUND), RESIDUAL | {"holds": True})
    with pytest.raises(AssertionError):
        run(settings, ResidualSpace(PLACES, BOUND), RESIDUAL)


EDIT = PULLED | {
    "compose": lambda z, own: np.tanh(np.arctanh(z[:, PLACES]) + np.arctanh(own)),
    "invert": lambda z, actions: np.tanh(np.arctanh(actions) - np.arctanh(z[:, PLACES])),
}


@pytest.mark.parametrize("imitates", [False, True])
def test_edit_updates_equal_the_reference(imitates: bool) -> None:
    settings = replace(BASE, imitation_weight=0.7, imitation_loss="mse") if imitates else BASE
    info = run(settings, EditSpace(PLACES, PULL), EDIT)
    assert 0 < info["pull_loss"] < PULL and info["correction"] > 0
    with pytest.raises(AssertionError):  # another pull is another update
        run(settings, EditSpace(PLACES, PULL / 2), EDIT)


def test_edit_reaches_every_action_and_nothing_is_the_frozen_policys() -> None:
    space, z = EditSpace([0, 1], PULL), torch.tensor([[1.0, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(space.compose(z, torch.zeros_like(z)), torch.tensor([[0.99, -0.4]]).double())
    for wanted in (-0.98, 0.0, 0.98):
        actions = torch.full_like(z, wanted)
        torch.testing.assert_close(space.compose(z, space.own(z, actions)), actions)
    for end in (-1.0, 1.0):  # what the actor draws may be rounded to 1
        own = torch.full_like(z, end)
        actions = space.compose(z, own)
        down, _ = space.backward(z, own, actions, torch.ones_like(z))
        assert actions.isfinite().all() and down.isfinite().all()


def test_pull_alone_leads_back_to_the_frozen_policy() -> None:
    z, pull = torch.tensor([[0.3, -0.6]] * 4, dtype=torch.float64), EditSpace([0, 1], 1.0)
    own = torch.full_like(z, 0.7)
    for _ in range(500):
        actions = pull.compose(z, own)
        own = own - 0.5 * pull.backward(z, own, actions, torch.zeros_like(z))[0]
    torch.testing.assert_close(pull.compose(z, own), z, atol=1e-3, rtol=0)
    free = EditSpace([0, 1], 0.0)
    assert not free.backward(z, own, free.compose(z, own + 0.1), torch.zeros_like(z))[0].any()


def test_a_pull_that_has_faded_is_the_pull_that_is_left() -> None:
    space = ResidualSpace(PLACES, BOUND, 4 * PULL)
    for updates, left in ((0, 4.0), (10, 2.0), (15, 2**0.5), (40, 0.25), (20, 1.0)):
        space.fade(updates, 10)
        assert space.pull == pytest.approx(left * PULL)
    run(BASE, space, RESIDUAL | PULLED)


WIDTH = FEATURES - A
NOISE = {"compose": lambda z, own: np.tanh(z[:, :WIDTH] + BOUND * own + 0.5 * (BOUND * own[:, ::-1]) ** 2)}


def flow(features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.tanh(features + noise + 0.5 * noise.flip(1).square())


def test_noise_updates_equal_the_reference() -> None:
    info = run(BASE, NoiseSpace(PLACES, WIDTH, BOUND, flow), NOISE)
    assert info["correction"] > 0
    run(BASE, NoiseSpace(PLACES, WIDTH, BOUND, flow, PULL), NOISE | PULLED)
    with pytest.raises(AssertionError):
        run(BASE, NoiseSpace(PLACES, WIDTH, BOUND / 2, flow), NOISE)
    with pytest.raises(ConfigError, match="cannot imitate"):
        run(replace(BASE, imitation_weight=0.7), NoiseSpace(PLACES, WIDTH, BOUND, flow), NOISE)


def test_noise_of_several_draws_is_that_of_each() -> None:
    space, z = NoiseSpace(PLACES, WIDTH, BOUND, flow), rows(0).z
    own = torch.rand(3, B, A, dtype=torch.float64) * 2 - 1
    together = space.compose(z, own)
    torch.testing.assert_close(together, torch.stack([space.compose(z, each) for each in own]))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=2), st.lists(st.floats(-1, 1), min_size=2, max_size=2))
def test_correction_is_never_above_its_bound(base: list[float], own: list[float]) -> None:
    space = ResidualSpace([0, 1], BOUND)
    z, drawn = torch.tensor([base], dtype=torch.float64), torch.tensor([own], dtype=torch.float64)
    actions = space.compose(z, drawn)
    assert (actions - z).abs().max() <= BOUND + 1e-12 and actions.abs().max() <= 1
    nearest = space.compose(z, space.own(z, actions))  # what it can do, it can be shown
    torch.testing.assert_close(nearest, actions)


def test_imitated_action_out_of_reach_is_the_nearest_correction() -> None:
    space, z = ResidualSpace([0, 1], 0.2), torch.tensor([[0.5, -0.5]])
    own = space.own(z, torch.tensor([[-1.0, -0.6]]))
    torch.testing.assert_close(own, torch.tensor([[-1.0, -0.5]]))


def test_gradient_at_the_limit_counts_only_if_it_leads_inside() -> None:
    space, z = ResidualSpace([0, 1], 0.5), torch.tensor([[0.9, 0.9], [-0.9, 0.0]])
    own = torch.tensor([[0.9, 0.9], [-0.9, 0.5]])
    actions = space.compose(z, own)
    torch.testing.assert_close(actions, torch.tensor([[1.0, 1.0], [-1.0, 0.25]]))
    down, _ = space.backward(z, own, actions, torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    # descending along 1 lowers an action: at 1 it comes back inside; at -1 it would go further out
    torch.testing.assert_close(down, torch.tensor([[0.5, 0.0], [0.0, -0.5]]))


def test_best_of_several_is_chosen_among_actions_and_not_among_corrections() -> None:
    nets = networks(BASE)
    nets.space = ResidualSpace(PLACES, BOUND)
    seen: list[torch.Tensor] = []
    run_once = nets.critic.run

    def watched(z: torch.Tensor, actions: torch.Tensor, *more: object, **named: object) -> object:
        seen.append(actions)
        return run_once(z, actions, *more, **named)

    nets.critic.run = watched
    rlpd.update(nets, rows(0), replace(BASE, samples=3), generator(0), frozenset({"critic"}), 0, -1.0)
    chosen = next(actions for actions in seen if len(actions) == 3 * B).view(3, B, A)
    assert (chosen - rows(0).next_z[:, PLACES]).abs().max() <= BOUND
