"""DSRL with a critic of noise: the update against a slow reference in float64, and small problems whose answer is
known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos import rlpd
from hilt.algos.adam import Adam
from hilt.algos.config import Rlpd
from hilt.algos.frozen import noise_critic
from hilt.algos.frozen.action_spaces import DecodedNoise
from hilt.algos.frozen.noise_critic import OUTPUTS, DrawnNoise, NoiseAliasing
from hilt.core.errors import ConfigError, NotFiniteError, SchemaError
from hilt.policies.agent.actor_critic import ActorNetwork, Body, Critics, Temperature
from hilt.replay.tensors import generator
from tests.algos.reference import Params, Reference, actor, critics, outputs, slopes
from tests.algos.test_rlpd import ALL, BASE, FEATURES, A, B, batch, numbers

torch.set_num_threads(1)
W, N, BOUND, PULL = 3, 2, 1.5, 0.6
PLACES = [FEATURES - A + number for number in range(A)]
NAMES = ["actor", "critic", "noise_critic", "temperature"]


def networks(settings: Rlpd, pull: float = PULL, bound: float = BOUND) -> rlpd.Networks:
    made, body = generator(3), Body(FEATURES, 0, 5, [4], "tanh")
    parts: dict[str, Any] = {
        "actor": ActorNetwork(body, W, made),
        "critic": Critics(body, A, made, settings.critics),
        "temperature": Temperature(settings.temperature),
        "noise_critic": Critics(body, W, made, settings.critics, (0.0,) * OUTPUTS),
    }
    for part in parts.values():
        part.double()
    optimizers = {name: Adam(part.parameters(), settings.learning_rate) for name, part in parts.items()}
    slow = copy.deepcopy(parts["critic"])
    return rlpd.Networks(**parts, target_critic=slow, optimizers=optimizers, space=DrawnNoise(PLACES, bound, pull))


def rows(seed: int) -> rlpd.Transitions:
    r, made = np.random.default_rng(seed + 50), batch(seed)
    known = torch.tensor(r.integers(0, 2, (B, N)), dtype=torch.float64)
    known[0] = 1
    counted = torch.ones(B, N, A, dtype=torch.float64)
    counted[1, :, 1:] = 0
    noise, actions = r.normal(size=(B, N, W)), r.uniform(-1, 1, (B, N, A))
    made.decoded = DecodedNoise(torch.tensor(noise), torch.tensor(actions), known, counted)
    return made


class NoiseReference(Reference):
    """The same, of these networks; `pull` and `bound` as the space has them."""

    weight, bound = PULL, BOUND

    def step(self, b: Any, which: set[str], next_noise: np.ndarray, noise: np.ndarray, members: list[int]) -> None:
        s, f, d = self.s, self.features, b.decoded
        z, next_z, actions, rewards, masks = (
            getattr(b, name).numpy() for name in ("z", "next_z", "actions", "rewards", "masks")
        )
        temperature = np.log1p(np.exp(self.p["temperature"]["raw"]))
        next_own, next_log_prob, _, _ = actor(self.p["actor"], next_z, f, next_noise)
        value = outputs(self.p["noise_critic"], b.target_z.numpy(), self.bound * next_own, f)[members, :, 0].min(0)
        value = value - temperature * next_log_prob if s.backup_entropy else value
        target = rewards + masks * s.discount * value
        target = np.clip(target, *s.target_range) if s.target_range else target

        each, known = np.repeat(z, N, 0), d.known.numpy().reshape(-1)
        noises, taken, kept = (part.numpy().reshape(B * N, -1) for part in (d.noise, d.actions, d.counted))
        teacher = critics(self.slow["critic"], each, taken, f)
        away = np.array([((a - b)[k > 0] ** 2).mean() for a, b, k in zip(taken, each[:, PLACES], kept, strict=True)])

        def noise_loss(p: Params) -> float:
            found = outputs(p, each, noises, f)
            errors = (found[..., 0] - teacher) ** 2 + (found[..., 1] - away) ** 2
            return float((known * errors.mean(0)).sum() / known.sum())

        def actor_loss(p: Params) -> float:
            own, log_prob, _, _ = actor(p, z, f, noise)
            found = outputs(self.p["noise_critic"], z, self.bound * own, f)
            best = found[..., 0].mean(0) if s.actor_q == "mean" else found[..., 0].min(0)
            return float(-(best - temperature * log_prob).mean() + self.weight * found[..., 1].mean())

        losses: dict[str, Callable[[Params], float]] = {
            "critic": lambda p: float(((critics(p, z, actions, f) - target) ** 2).mean()),
            "noise_critic": noise_loss,
            "actor": actor_loss,
            "temperature": lambda p: float(np.log1p(np.exp(p["raw"])) * (-next_log_prob.mean() - self.target_entropy)),
        }
        asked = which | ({"noise_critic"} if "critic" in which else set())
        asked -= {"actor", "temperature"} if self.actor_updates < s.critic_warmup else set()
        self.actor_updates += "actor" in which
        for name, found in {name: slopes(losses[name], self.p[name]) for name in asked}.items():
            self.adam(name, found)
        for key in self.slow["critic"] if "critic" in which else ():
            self.slow["critic"][key] = (1 - s.tau) * self.slow["critic"][key] + s.tau * self.p["critic"][key]


def run(settings: Rlpd, whiches: list[set[str]], pull: float = PULL, bound: float = BOUND) -> None:
    """Some updates of both, every number of every network compared; the reference has the usual pull and bound."""
    nets, draws = networks(settings, pull, bound), generator(11)
    slow = NoiseReference({name: numbers(getattr(nets, name)) for name in NAMES}, settings, FEATURES, -1.0)
    updates = 0
    for number, which in enumerate(whiches):
        drawn, ahead = rows(number), generator(0)
        ahead.set_state(draws.get_state())
        next_noise = torch.randn(B, W, generator=ahead, dtype=torch.float64).numpy()
        members = list(range(settings.critics))
        if settings.subset:
            members = torch.randperm(settings.critics, generator=ahead)[: settings.subset].tolist()
        noise = torch.randn(B, W, generator=ahead, dtype=torch.float64).numpy()
        slow.step(drawn, which, next_noise, noise, members)
        NoiseAliasing().update(nets, drawn, settings, draws, frozenset(which), updates, -1.0)
        updates += "actor" in which
    for name in NAMES:
        for key, value in numbers(getattr(nets, name)).items():
            np.testing.assert_allclose(value, slow.p[name][key], atol=1e-7, err_msg=f"{name}.{key}")
    for key, value in numbers(nets.target_critic).items():
        np.testing.assert_allclose(value, slow.slow["critic"][key], atol=1e-7, err_msg=f"target of critic.{key}")


CASES = {
    "plain": BASE,
    "subset": replace(BASE, critics=4, subset=2),
    "backup_entropy": replace(BASE, backup_entropy=True),
    "target_range": replace(BASE, target_range=[0.2, 0.6]),
    "actor_q": replace(BASE, actor_q="min"),
    "critic_warmup": replace(BASE, critic_warmup=1),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_reference(name: str) -> None:
    run(CASES[name], [set(ALL), {"critic"}, set(ALL)])


@pytest.mark.parametrize("other", [{"pull": PULL / 2}, {"bound": BOUND / 2}])
def test_another_pull_or_bound_is_another_update(other: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="actor"):
        run(BASE, [set(ALL), set(ALL)], **other)


def test_draws_that_are_not_known_teach_nothing() -> None:
    first, second = rows(0), rows(0)
    assert second.decoded is not None
    unknown = second.decoded.known == 0
    assert unknown.any()
    second.decoded.actions[unknown] = 0.9
    second.decoded.noise[unknown] = -2.0
    found = []
    for each in (first, second):
        nets = networks(BASE)
        assert each.decoded is not None
        gradients, figures = noise_critic.taught(nets, each.z, each.decoded)
        found.append(([gradient.clone() for gradient in gradients], figures))
    (ours, figures), (theirs, others) = found
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert figures == others and 0 < figures["decoded"] < 1 and figures["noise_critic_loss"] > 0


def test_without_any_known_draw_the_critics_of_actions_still_learn() -> None:
    nets, drawn = networks(BASE), rows(0)
    assert drawn.decoded is not None
    drawn.decoded.known[:] = 0
    before = {name: numbers(getattr(nets, name)) for name in NAMES}
    info = noise_critic.update(nets, drawn, BASE, generator(0), frozenset({"critic"}), 0, -1.0)
    moved = {
        name
        for name in NAMES
        if any((value != before[name][key]).any() for key, value in numbers(getattr(nets, name)).items())
    }
    assert moved == {"critic"} and info["decoded"] == info["noise_critic_loss"] == 0


# --- a problem whose answer is known ---

BEST, DISCOUNT, ROWS = 0.6, 0.5, 64


def decode(noise: np.ndarray) -> np.ndarray:
    """A fixed map from two numbers of noise to one action, for which only their difference matters."""
    return 0.9 * np.tanh(noise[..., :1] - noise[..., 1:])


def chain(r: np.random.Generator, known: str) -> rlpd.Transitions:
    """Two states: of the first one every action leads to the second, whose reward is 1 - (a - BEST)^2, the last one.
    Behind the number of the state is the action of a frozen policy, 0."""
    second = r.integers(0, 2, ROWS)
    z = np.zeros((ROWS, 3), np.float32)
    z[np.arange(ROWS), second] = 1
    after = np.tile(np.float32([0, 1, 0]), (ROWS, 1))
    noise = r.uniform(-BOUND, BOUND, (ROWS, 2, 2)).astype(np.float32)
    actions = decode(noise).astype(np.float32)
    shown = r.uniform(-1, 1, (ROWS, 1)).astype(np.float32)  # of a person
    executed = actions[:, 0] if known == "executed" else shown
    there = np.ones((ROWS, 2), np.float32) * [known == "executed", known == "samples"]
    draws = (noise, actions, there, np.ones((ROWS, 2, 1)))
    rewards = np.where(second == 1, 1 - (executed[:, 0] - BEST) ** 2, 0).astype(np.float32)
    return rlpd.Transitions(
        z=torch.from_numpy(z),
        next_z=torch.from_numpy(after),
        target_z=torch.from_numpy(after),
        actions=torch.from_numpy(executed),
        rewards=torch.from_numpy(rewards),
        masks=torch.from_numpy(np.float32(second == 0)),
        decoded=DecodedNoise(*(torch.from_numpy(np.asarray(each, np.float32)) for each in draws)),
    )


def learned(known: str, pull: float = 0.0, updates: int = 900) -> tuple[float, float]:
    """The most likely action in the second state, and the value of the first one."""
    settings = Rlpd(discount=DISCOUNT, tau=0.05, learning_rate=3e-3, temperature=1e-3)
    made, body = generator(0), Body(3, 0, 0, [32, 32], "relu")
    parts: dict[str, Any] = {
        "actor": ActorNetwork(body, 2, made, 0.01, 0.1, (0.02, 0.3)),
        "critic": Critics(body, 1, made, 2),
        "temperature": Temperature(settings.temperature),
        "noise_critic": Critics(body, 2, made, 2, (0.0,) * OUTPUTS),
    }
    optimizers = {name: Adam(part.parameters(), settings.learning_rate) for name, part in parts.items()}
    space = DrawnNoise([2], BOUND, pull)
    nets = rlpd.Networks(**parts, target_critic=copy.deepcopy(parts["critic"]), optimizers=optimizers, space=space)
    r, draws = np.random.default_rng(0), generator(1)
    for _ in range(updates):
        noise_critic.update(nets, chain(r, known), settings, draws, ALL, 0, -4.0)
    with torch.no_grad():
        first, second = torch.tensor([[1.0, 0, 0]]), torch.tensor([[0, 1.0, 0]])
        noise = BOUND * torch.tanh(nets.actor(second)[0])
        return float(decode(noise.numpy())[0, 0]), float(nets.critic(first, torch.zeros(1, 1)).mean())


@pytest.mark.parametrize("known", ["executed", "samples"])
def test_the_actor_of_noise_finds_the_best_action(known: str) -> None:
    """From noise that was executed; or from the actions of a person, whose noise nobody knows, where samples of the
    prior were decoded."""
    action, value = learned(known)
    assert abs(action - BEST) < 0.15 and abs(value - DISCOUNT) < 0.1


def test_without_decoded_noise_it_finds_nothing_and_a_pull_leads_to_the_policy() -> None:
    lost, _ = learned("nothing", updates=300)
    assert abs(lost - BEST) > 0.3
    halfway, _ = learned("samples", pull=1.0)  # 1 - (a - BEST)^2 - a^2 is largest at BEST / 2
    assert abs(halfway - BEST / 2) < 0.12


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SchemaError, match="the batch has no noise of a flow with the actions that it became"):
        noise_critic.update(networks(BASE), batch(0), BASE, generator(0), ALL, 0, -1.0)
    with pytest.raises(ConfigError, match="cannot imitate: the noise of an action is not known"):
        DrawnNoise(PLACES, BOUND).own(batch(0).z, batch(0).actions)
    drawn = rows(0)
    assert drawn.decoded is not None
    drawn.decoded.actions[0, 0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match="noise_critic_loss is nan"):
        noise_critic.update(networks(BASE), drawn, BASE, generator(0), ALL, 0, -1.0)
