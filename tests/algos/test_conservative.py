"""The conservative term of the critics beside the formula, and what it does where the data does not show everything."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from hilt.algos import rlpd
from hilt.algos.adam import Adam
from hilt.algos.config import Rlpd
from hilt.algos.conservative import candidates
from hilt.algos.value_heads import C51Head
from hilt.core.errors import SchemaError
from hilt.policies.agent.actor_critic import ActorNetwork, Body, Critics, Temperature
from hilt.replay.tensors import generator
from tests.algos.test_rlpd import BASE, B, batch, networks

torch.set_num_threads(1)
K = 3
UNKNOWN = float("-inf")
RETURNS = torch.tensor([0.3, UNKNOWN, 5.0, -5.0, 0.0, 0.1], dtype=torch.float64)
"""Of one row the log does not know it; one is above and one below whatever the critics say"""


@pytest.mark.parametrize(
    ("head", "calibrated", "chunk"),
    [
        ("scalar", False, False),
        ("scalar", True, False),
        ("scalar", True, True),
        ("c51", False, False),
        ("c51", True, True),
    ],
)
def test_updates_with_the_conservative_term_equal_the_formula(head: str, calibrated: bool, chunk: bool) -> None:
    settings = replace(BASE, conservative=0.8, conservative_samples=K, calibrated=calibrated)
    states = C51Head(-1.0, 2.0, 7) if head == "c51" else None
    nets = networks(settings, bias=(0.0,) if states is None else states.bias)
    nets.head = nets.head if states is None else states
    valid = torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64) if chunk else None
    rows = replace(batch(0), demo=None, returns=RETURNS, valid=valid)
    plain, twin, draws = copy.deepcopy(nets), copy.deepcopy(nets), generator(5)
    # in its order: the noise of the next actions, then what the term draws
    ahead = generator(5)
    torch.randn(B, 2, generator=ahead, dtype=torch.float64)
    uniform = torch.rand(K, B, 2, generator=ahead, dtype=torch.float64) * 2 - 1
    noise = torch.randn(K, 2 * B, 2, generator=ahead, dtype=torch.float64)

    def q_of(actions: torch.Tensor) -> torch.Tensor:
        out = twin.critic(rows.z, actions)
        return out if states is None else torch.softmax(out, -1) @ states.centers.double()

    terms = [[], []]  # of each critic, what is inside the exponentials
    for kind in range(3):
        z = rows.z if kind < 2 else rows.next_z
        mean, std = (part.detach() for part in twin.actor(z))
        for k in range(K):
            u = mean + std * noise[k, : B if kind < 2 else None][-B:]
            actions = uniform[k] if kind == 0 else torch.tanh(u)
            density = torch.full((B,), 0.25, dtype=torch.float64)
            if kind:
                normal = torch.distributions.Normal(mean, std).log_prob(u).exp()
                density = (normal / (1 - torch.tanh(u) ** 2)).prod(1)
            q = q_of(actions)
            for i in range(2):
                value = torch.maximum(q[i], RETURNS) if kind and calibrated else q[i]
                terms[i].append(value - density.log())
    gaps = torch.stack([torch.logsumexp(torch.stack(terms[i]), 0) - math.log(3 * K) for i in range(2)])
    gaps = gaps - q_of(rows.actions)
    kept = [0, 1, 3, 4] if chunk else list(range(B))
    loss = 0.8 * gaps[:, kept].mean()
    found = torch.autograd.grad(loss, list(twin.critic.parameters()))
    which = frozenset({"critic"})
    optimizer = plain.optimizers["critic"]
    taken: list[list[torch.Tensor]] = []
    optimizer.step = lambda gradients: taken.append([each.clone() for each in gradients])  # type: ignore[method-assign]
    rlpd.update(plain, rows, replace(settings, conservative=0.0), generator(5), which, 0, -1.0)
    info = rlpd.update(nets, rows, settings, draws, which, 0, -1.0)
    assert info["conservative_loss"] == pytest.approx(loss.item())
    assert ("bounded_share" in info) == calibrated
    parameters = list(twin.critic.parameters())
    Adam(parameters, settings.learning_rate).step([a + b for a, b in zip(taken[0], found, strict=True)])
    for ours, theirs in zip(nets.critic.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


def test_candidates_are_uniform_and_of_the_policy_with_their_densities() -> None:
    nets, rows = networks(BASE), batch(0)
    actions, log_density = candidates(nets, rows, 200, generator(0))
    assert actions.shape == (600, B, 2) and log_density.shape == (600, B)
    assert (log_density[:200] == -2 * math.log(2)).all() and abs(actions[:200].mean()) < 0.05
    # importance weights of all three kinds: the mean of 1 / density is the volume of all actions, 4
    volume = torch.exp(-log_density).reshape(3, 200 * B).mean(1)
    assert volume[0] == pytest.approx(4) and (volume[1:] > 1).all()


def test_calibration_needs_returns() -> None:
    rows = replace(batch(0), returns=None)
    settings = replace(BASE, conservative=1.0)
    with pytest.raises(SchemaError, match=r"returns: the batch has no such column, .* Or set calibrated=false"):
        rlpd.update(networks(BASE), rows, settings, generator(0), frozenset({"critic"}), 0, -1.0)
    rlpd.update(networks(BASE), rows, replace(settings, calibrated=False), generator(0), frozenset({"critic"}), 0, -1.0)


def made(settings: Rlpd, states: int, draws: torch.Generator) -> rlpd.Networks:
    """Networks of a task with numbered states and one number as action."""
    body = Body(states, 0, 0, [32], "relu")
    parts = {"actor": ActorNetwork(body, 1, draws), "critic": Critics(body, 1, draws, 2)}
    parts["temperature"] = Temperature(0.1)
    optimizers = {part: Adam(net.parameters(), settings.learning_rate) for part, net in parts.items()}
    return rlpd.Networks(**parts, target_critic=copy.deepcopy(parts["critic"]), optimizers=optimizers)


def learned(conservative: float, calibrated: bool) -> tuple[float, float]:
    """Q of what was done, and of what was never done, in a task of one step: every action shown, from -1 to 0, had a
    reward of 0.5."""
    settings = Rlpd(learning_rate=1e-2, conservative=conservative, conservative_samples=4, calibrated=calibrated)
    draws = generator(0)
    nets = made(settings, 1, draws)
    z, half = torch.ones(16, 1), torch.full((16,), 0.5)
    for _ in range(150):
        actions = -torch.rand(16, 1, generator=draws)
        rows = rlpd.Transitions(z, z, z, actions, rewards=half, masks=torch.zeros(16), returns=half)
        rlpd.update(nets, rows, settings, draws, frozenset({"critic"}), 0, -1.0)
    places = torch.linspace(0.05, 0.95, 10)[:, None]
    q = [nets.critic(torch.ones(10, 1), actions).mean().item() for actions in (-places, places)]
    return q[0], q[1]


def test_what_was_never_done_is_not_overrated_and_calibration_keeps_the_size_of_values() -> None:
    shown, _ = learned(0.0, False)
    assert shown == pytest.approx(0.5, abs=0.05), "by temporal differences alone"
    cql_shown, cql_unseen = learned(1.0, False)
    assert cql_unseen < cql_shown - 0.5, "the term lowers what was never done"
    cal_shown, cal_unseen = learned(1.0, True)
    assert cql_unseen < cal_unseen < cal_shown, "and with the bound it does so less far"
    assert abs(cal_shown - 0.5) < abs(cql_shown - 0.5) + 0.1


CHAIN, DISCOUNT = 4, 0.9
"""Places of a chain, each of which is left by any action; behind the last one is a reward of 1"""


def on_chain(conservative: float, calibrated: bool, seed: int = 0) -> list[float]:
    """Q at each place of the chain of what the policy does, whose actions are around 0.5. The log has a positive action
    in three rows of ten."""
    settings = Rlpd(learning_rate=5e-3, conservative=conservative, conservative_samples=4, calibrated=calibrated)
    settings, draws = replace(settings, discount=DISCOUNT, tau=0.1), generator(seed)
    nets, eye = made(settings, CHAIN, draws), torch.eye(CHAIN)
    nets.actor.gaussian = lambda out: (torch.full((len(out), 1), 0.55), torch.full((len(out), 1), 0.25))
    for _ in range(400):
        places = torch.randint(CHAIN, (64,), generator=draws)
        last, returns = (places == CHAIN - 1).float(), DISCOUNT ** (CHAIN - 1 - places).float()
        z, after = eye[places], eye[(places + 1).clamp(max=CHAIN - 1)]
        sign = torch.where(torch.rand(64, 1, generator=draws) < 0.3, 1.0, -1.0)
        actions = sign * torch.rand(64, 1, generator=draws)
        rows = rlpd.Transitions(z, after, after, actions, rewards=last, masks=1 - last, returns=returns)
        rlpd.update(nets, rows, settings, draws, frozenset({"critic"}), 0, -1.0)
    acted = torch.linspace(0.3, 0.7, 10)[:, None]
    return [nets.critic(eye[place].expand(10, -1), acted).mean().item() for place in range(CHAIN)]


def test_on_a_chain_cql_undershoots_the_return_and_the_bound_keeps_values_at_it() -> None:
    """All ways to the end are equally long, so that every value is the return. CQL lowers those of what the policy does
    more often than the log, and the next backup takes them: what is missing grows along the chain."""
    returns = [DISCOUNT ** (CHAIN - 1 - place) for place in range(CHAIN)]
    assert on_chain(0.0, False) == pytest.approx(returns, abs=0.1), "by temporal differences alone"
    missing = [known - q for known, q in zip(returns, on_chain(0.3, False), strict=True)]
    assert missing == sorted(missing, reverse=True) and missing[0] > 0.4 and missing[-1] > 0.1
    assert on_chain(0.3, True) == pytest.approx(returns, abs=0.1), "Cal-QL"
