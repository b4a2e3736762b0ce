"""RLPD's update against a slow reference in float64, and what each of its options does."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hilt.algos import rlpd
from hilt.algos.adam import Adam
from hilt.algos.config import Rlpd
from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.validate import check
from hilt.policies.agent.actor_critic import ActorNetwork, Body, Critics, GraspCritic, Temperature
from hilt.replay.tensors import generator
from tests.algos.reference import Reference

torch.set_num_threads(1)
B, A, FEATURES = 6, 2, 3
ALL = frozenset({"actor", "critic", "temperature"})
BASE = Rlpd(discount=0.9, tau=0.1, learning_rate=1e-2, temperature=0.3)


def networks(settings: Rlpd, outcomes: int = 0, proprio: int = 0, bias: tuple[float, ...] = (0.0,)) -> rlpd.Networks:
    made, body = generator(3), Body(FEATURES, proprio, 5, [4], "tanh")
    parts: dict[str, nn.Module] = {
        "actor": ActorNetwork(body, A, made),
        "critic": Critics(body, A, made, settings.critics, bias),
        "temperature": Temperature(settings.temperature),
    }
    if outcomes:
        parts["grasp_critic"] = GraspCritic(body, outcomes, made)
    for part in parts.values():
        part.double()
    optimizers = {name: Adam(part.parameters(), settings.learning_rate) for name, part in parts.items()}
    slow = {f"target_{name}": copy.deepcopy(part) for name, part in parts.items() if "critic" in name}
    return rlpd.Networks(**parts, **slow, optimizers=optimizers)


def batch(seed: int, proprio: int = 0, outcomes: int = 3) -> rlpd.Transitions:
    r = np.random.default_rng(seed)
    z = {name: torch.tensor(r.normal(size=(B, FEATURES + proprio))) for name in ("z", "next_z", "target_z")}
    return rlpd.Transitions(
        **z,
        actions=torch.tensor(r.uniform(-0.95, 0.95, (B, A))),
        rewards=torch.tensor(r.random(B)),
        masks=torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64),
        demo=torch.tensor([False, False, True, False, True, True]),
        grasps=torch.tensor(r.integers(0, outcomes, B)),
        grasp_penalty=torch.tensor(-0.1 * r.random(B)),
    )


def numbers(part: nn.Module) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy().copy() for key, value in part.named_parameters()}


def run(settings: Rlpd, whiches: list[set[str]], n_steps: bool = False, outcomes: int = 0, proprio: int = 0) -> None:
    """Some updates of both, and every number of every network compared."""
    nets = networks(settings, outcomes, proprio)
    names = ["actor", "critic", "temperature", *(["grasp_critic"] if outcomes else [])]
    slow = Reference({name: numbers(getattr(nets, name)) for name in names}, settings, FEATURES, -1.0)
    draws = generator(11)
    updates = 0
    for i, which in enumerate(whiches):
        rows = batch(i, proprio, outcomes or 3)
        if n_steps:
            rows.n_steps = torch.tensor([1, 2, 3, 3, 2, 1])
        # what the update will draw, in its order: noise of the next actions, the subset, noise of the actor's actions
        ahead = generator(0)
        ahead.set_state(draws.get_state())
        next_noise = torch.randn(B, A, generator=ahead, dtype=torch.float64).numpy()
        members = list(range(settings.critics))
        if settings.subset:
            members = torch.randperm(settings.critics, generator=ahead)[: settings.subset].tolist()
        noise = torch.randn(B, A, generator=ahead, dtype=torch.float64).numpy()
        given = {key: value.numpy() for key, value in vars(rows).items() if isinstance(value, torch.Tensor)}
        slow.update({"n_steps": np.ones(B), **given}, which, next_noise, noise, members)
        rlpd.update(nets, rows, settings, draws, frozenset(which), updates, -1.0)
        updates += "actor" in which
    for name in names:
        for key, value in numbers(getattr(nets, name)).items():
            np.testing.assert_allclose(value, slow.p[name][key], atol=1e-7, err_msg=f"{name}.{key}")
        for key, value in numbers(getattr(nets, f"target_{name}")).items() if "critic" in name else ():
            np.testing.assert_allclose(value, slow.slow[name][key], atol=1e-7, err_msg=f"target of {name}.{key}")


CASES = {
    "plain": BASE,
    "subset": replace(BASE, critics=4, subset=2),
    "backup_entropy": replace(BASE, backup_entropy=True),
    "target_range": replace(BASE, target_range=[0.2, 0.6]),
    "reward_bias": replace(BASE, reward_bias=-0.5),
    "actor_q": replace(BASE, actor_q="min"),
    "critic_warmup": replace(BASE, critic_warmup=1),
    "imitation fades": replace(BASE, imitation_weight=0.7, imitation_updates=2),
    "imitation stays": replace(BASE, imitation_weight=0.7, imitation_loss="mse"),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_reference(name: str) -> None:
    run(CASES[name], [set(ALL), {"critic"}, set(ALL)])


def test_n_steps_discount_as_far_as_they_reach() -> None:
    run(replace(BASE, reward_bias=-0.3), [set(ALL), set(ALL)], n_steps=True)


@pytest.mark.parametrize("outcomes", [3, 9])
def test_grasp_critics_equal_the_reference(outcomes: int) -> None:
    whiches = [set(ALL | {"grasp_critic"}), {"critic", "grasp_critic"}, {"grasp_critic"}]
    run(replace(BASE, reward_bias=0.1), whiches, n_steps=True, outcomes=outcomes)


def test_a_proprio_branch_equals_the_reference() -> None:
    run(BASE, [set(ALL)], proprio=2)


@pytest.mark.parametrize("which", [{"actor"}, {"critic"}, {"temperature"}, {"grasp_critic"}])
def test_what_is_not_named_does_not_move(which: set[str]) -> None:
    """Upstream moves every network by the momentum of its Adam."""
    nets = networks(BASE, outcomes=3)
    parts = {**{name: getattr(nets, name) for name in (*ALL, "grasp_critic", "target_critic", "target_grasp_critic")}}
    rlpd.update(nets, batch(0), BASE, generator(0), ALL | {"grasp_critic"}, 0, -1.0)  # all have momentum now
    before = {name: numbers(part) for name, part in parts.items()}
    rlpd.update(nets, batch(1), BASE, generator(0), frozenset(which), 1, -1.0)
    moved = {
        name
        for name, part in parts.items()
        if any((value != before[name][key]).any() for key, value in numbers(part).items())
    }
    assert moved == which | {f"target_{name}" for name in which if "critic" in name}


def test_termination_does_not_bootstrap_and_truncation_does() -> None:
    rows = batch(0)
    ended = rows.masks == 0
    q = torch.full((2, B), 5.0, dtype=torch.float64)
    for settings in (BASE, replace(BASE, backup_entropy=True)):
        target = rlpd.backed_up(q.amin(0), rows, torch.full((B,), -3.0), torch.tensor(0.3), settings)
        assert torch.equal(target[ended], rows.rewards[ended])
        assert (target[~ended] > rows.rewards[~ended] + 4).all()


def test_numbers_that_are_not_finite_never_reach_a_network() -> None:
    nets, rows = networks(BASE), batch(0)
    before = numbers(nets.critic)
    rows.target_z[rows.masks == 0] = float("nan")  # what is behind the end does not matter
    rlpd.update(nets, rows, BASE, generator(0), frozenset({"critic"}), 0, -1.0)
    after = numbers(nets.critic)
    assert all(np.isfinite(value).all() for value in after.values()) and any(
        (after[key] != value).any() for key, value in before.items()
    )
    rows.rewards[0] = float("nan")
    with pytest.raises(
        SchemaError,
        match=r"critic_loss is nan: a row of the batch is not finite, or learning diverged. Nothing was changed",
    ):
        rlpd.update(nets, rows, BASE, generator(0), ALL, 0, -1.0)
    assert all((after[key] == value).all() for key, value in numbers(nets.critic).items())


def test_a_subset_never_has_one_critic_twice() -> None:
    """Upstream draws with repetition, so that two of ten are at times one."""
    q = torch.arange(10.0)[:, None].expand(10, B)
    settings = replace(BASE, critics=10, subset=9)
    rows = replace(batch(0), rewards=torch.zeros(B), masks=torch.ones(B))
    subsets = [rlpd.draw(rows, settings, generator(seed), frozenset({"critic"}))[1] for seed in range(50)]
    seen = {rlpd.backed_up(q[subset].amin(0), rows, q[0], q[0], settings)[0].item() for subset in subsets}
    # the least of all but one: critic 0, or critic 1 where 0 is left out
    assert sorted(seen) == pytest.approx([0, 0.9])


def test_imitation_needs_to_know_whom() -> None:
    rows = replace(batch(0), demo=None)
    with pytest.raises(SchemaError, match="demo: the batch has no such column"):
        rlpd.update(networks(BASE), rows, replace(BASE, critic_warmup=1), generator(0), ALL, 0, -1.0)


def test_warming_up_without_demonstrations_leaves_the_actor_alone() -> None:
    nets, settings = networks(BASE), replace(BASE, critic_warmup=5)
    rlpd.update(nets, batch(0), settings, generator(0), ALL, 0, -1.0)
    before = numbers(nets.actor)
    rlpd.update(nets, replace(batch(0), demo=torch.zeros(B, dtype=torch.bool)), settings, generator(0), ALL, 1, -1.0)
    assert all((before[key] == value).all() for key, value in numbers(nets.actor).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"discount": 1.1}, "rlpd.discount=1.1: expected a number from 0 to 1"),
        ({"tau": 0.0}, "rlpd.tau=0.0: expected a number above 0 and at most 1"),
        ({"critics": 0}, "rlpd.critics=0: expected a whole number of at least 1"),
        ({"subset": 3}, "rlpd.subset=3: expected at most as many as there are critics, 2, or 0 for all"),
        ({"temperature": 0.0}, "rlpd.temperature=0.0: expected a number above 0"),
        ({"learning_rate": -1.0}, "rlpd.learning_rate=-1.0: expected"),
        ({"target_range": [1.0, 0.0]}, r"rlpd.target_range=\[1.0, 0.0\]: expected 2 numbers, in ascending order"),
        ({"target_range": [1.0]}, "rlpd.target_range"),
        ({"random_crop": -1}, "rlpd.random_crop=-1"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(replace(Rlpd(), **change), "rlpd")  # type: ignore[arg-type]


def test_an_unknown_imitation_loss_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no imitation loss named 'msee'; did you mean 'mse'"):
        check(Rlpd(imitation_loss="msee"))
