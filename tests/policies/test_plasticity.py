"""Dead ReLUs and effective ranks are those of an independent reference, in agents and in passes of post-training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hilt.algos.config import CriticConfig
from hilt.policies.agent.agent import Agent
from hilt.policies.base import Evaluation, Policy
from hilt.policies.plasticity import ChunkLooks, LayerWatch, WatchedPasses, any_part, effective_rank, policy_change
from tests.policies.agents import batch, config, moved, numbers, spaces


def reference_rank(features: np.ndarray) -> int:
    """By the definition, in float64."""
    sizes = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    shares = np.cumsum(sizes) / sizes.sum()
    return int(np.argmax(shares >= 0.99)) + 1


@pytest.mark.parametrize(("rows", "width", "rank"), [(64, 20, 20), (20, 64, 20), (128, 32, 3), (50, 50, 1)])
def test_effective_rank_is_that_of_the_singular_values(rows: int, width: int, rank: int):
    draws = np.random.default_rng(rank)
    features = draws.normal(size=(rows, rank)) @ np.diag(0.7 ** np.arange(rank)) @ draws.normal(size=(rank, width))
    assert effective_rank(torch.from_numpy(features.astype(np.float32))) == reference_rank(features) <= rank


def test_effective_rank_of_many_rows_is_of_some_and_of_nothing_is_0():
    many = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    assert effective_rank(many) == reference_rank(many[::4].numpy())
    assert effective_rank(torch.zeros(4, 3)) == effective_rank(torch.full((4, 3), torch.nan)) == 0


def test_dead_relus_are_counted_by_unit_channel_and_member():
    x = torch.tensor([[1.0, -1.0, 0.0, -2.0], [2.0, -3.0, -1.0, 5.0]])
    with LayerWatch() as watch:
        F.relu(x)
    assert (watch.dead, watch.relus, watch.rank()) == (2, 4, 0)
    tokens = torch.stack([x, -x])  # [B, T, width]: what is dead in one row is not in the other
    with LayerWatch() as watch:
        nn.ReLU()(tokens)
    assert (watch.dead, watch.relus) == (0, 4)
    with LayerWatch(members=2) as watch:
        torch.relu(tokens)
    assert (watch.dead, watch.relus) == (3, 8), "of an ensemble, each member has units of its own"
    with LayerWatch() as watch:
        F.relu(torch.stack([-torch.ones(3, 3), torch.ones(3, 3)])[None])
    assert (watch.dead, watch.relus) == (1, 2), "channels of a convolution"


def test_a_watch_changes_no_result_and_sees_what_the_last_layer_takes_in():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    network[0].bias.data[:8] = -100.0
    x = torch.randn(40, 6)
    plain = network(x)
    with LayerWatch() as watch:
        seen = network(x)
    assert torch.equal(plain, seen) and watch.relus == 48 and watch.dead >= 8
    assert watch.rank() == reference_rank(network[:4](x).detach().numpy())
    seen.sum().backward()
    assert network[0].weight.grad is not None


@pytest.mark.parametrize("network", ["mlp", "simba"])
def test_the_health_of_an_agent_is_that_of_its_networks_and_changes_nothing(network: str):
    settings = replace(config(), activation="relu", critic=CriticConfig(network=network, width=16, depth=1))
    one, other = (Agent.make(*spaces(), settings, seed=0) for _ in range(2))
    rows = batch(n=24)
    first = one.health(rows)
    assert set(first) == {"dead_relus", "effective_rank"} and 0 <= first["dead_relus"] < 1
    taken: list[torch.Tensor] = []
    products = torch.baddbmm

    def product(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taken.append(x[0].detach())
        return products(bias, x, weight)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "baddbmm", product)
        z = one.inputs.encode(one.encoder, one.inputs.leaves(rows["observations"]))
        one.networks["critic"](z, torch.from_numpy(rows["actions"]))
    assert first["effective_rank"] == reference_rank(taken[-1].numpy())
    for agent in (one, other):
        agent.update(rows)
    assert one.health(rows)["policy_kl"] > 0 and not moved(numbers(one), numbers(other))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    clones = Agent.make(*spaces(), settings, seed=0, squashed=False)
    assert clones.health(rows)["effective_rank"] >= 1, "of the actor, where critics are not trained"


@pytest.mark.parametrize("head", ["scalar", "hl_gauss"])
def test_disagreement_is_the_deviation_of_q_over_the_critics(head: str):
    settings = replace(
        config(critics=5), critic=CriticConfig(head=head, value_range=None if head == "scalar" else [0, 1])
    )
    agent = Agent.make(*spaces(), settings, seed=0)
    seen = {"state": {"pose": np.ones(3, np.float32), "grip": np.float32(0.5)}}
    seen["images"] = {name: np.full((32, 32, 3), 99, np.uint8) for name in ("front", "wrist")}
    small, plain = agent.acting_state(), agent.sample_actions(seen, seed=3)
    assert agent.disagreement is None
    agent.measure_disagreement()
    action = agent.sample_actions(seen, seed=3)
    assert np.array_equal(action, plain), "it changes no action"
    with torch.no_grad():
        z = agent.inputs.encode(agent.encoder, agent.inputs.leaves(unsqueezed(seen)))
        out = agent.networks["critic"](z, torch.from_numpy(action)[None]).double().numpy()
    if head == "hl_gauss":
        p = np.exp(out - out.max(-1, keepdims=True))
        centers = agent.head.centers.double().numpy()
        out = (p / p.sum(-1, keepdims=True) * centers).sum(-1)
    assert agent.disagreement == pytest.approx(float(np.std(out[:, 0], ddof=1)), rel=1e-4) and agent.disagreement > 0
    assert {key for key in agent.acting_state() if key.startswith("critic.")} and len(agent.acting_state()) > len(small)
    agent.sample_actions(seen, argmax=True)
    assert agent.disagreement is None, "nobody is asked in an evaluation"


def unsqueezed(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: unsqueezed(leaf) if isinstance(leaf, dict) else np.asarray(leaf)[None] for key, leaf in tree.items()}


def test_only_the_first_pass_of_an_update_is_watched():
    passes, network = WatchedPasses(), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    total = lambda *numbers: [float(number) for number in numbers]  # noqa: E731
    assert passes.figures(total) == {}
    with passes.first(network, 0):
        network(torch.zeros(0, 3))
    with passes.first(network, 4) as watch:
        network(torch.ones(4, 3))
    assert isinstance(watch, LayerWatch)
    with passes.first(network, 4) as other:
        network(torch.ones(4, 3))
    figures = passes.figures(total)
    assert other is None and set(figures) == {"dead_relus", "effective_rank"} and figures["effective_rank"] == 1
    network._compiles = lambda: True  # type: ignore[assignment]
    assert not isinstance(passes.first(network, 4), LayerWatch), "a compiled one is not looked into"


def test_policy_change_is_the_kl_of_gaussians():
    draws = torch.Generator().manual_seed(0)
    mean, new_mean = (torch.randn(5, 3, generator=draws, dtype=torch.float64) for _ in range(2))
    std, new_std = (0.5 + torch.rand(5, 3, generator=draws, dtype=torch.float64) for _ in range(2))
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(new_mean, new_std)
    ).mean()
    assert float(policy_change((mean, std), (new_mean, new_std))) == pytest.approx(float(wanted), rel=1e-12)
    assert float(policy_change((mean, std), (mean, std))) == pytest.approx(0.0, abs=1e-12)


class Normal(Policy):
    """Draws numbers around a mean, and imitates by a layer with 12 features, of which some are dead."""

    chunk, action_dim, std = 2, 3, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))
        self.first, self.last = nn.Linear(2, 12), nn.Linear(12, 3)
        self.compiled = self.captured = False

    def _compiles(self) -> bool:
        return self.compiled

    def _captures(self) -> bool:
        return self.captured

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        assert sample and not self.training and not torch.is_grad_enabled()
        drawn = self.mean + self.std * torch.randn(len(observations), 2, 3, generator=generator)
        return drawn.numpy(), {"drawn": drawn.numpy(), "log_prob": self._of(drawn).log_prob(drawn).numpy()}

    def _of(self, drawn: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean.expand_as(drawn), self.std)

    def evaluate(self, record: Any) -> Evaluation:
        drawn = torch.from_numpy(record["drawn"])
        return Evaluation(self._of(drawn).log_prob(drawn), self._of(drawn).entropy(), None)

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        seen = torch.from_numpy(np.stack([row["state"] for row in observations]))
        return self.last(F.relu(self.first(seen))).square().mean(), {}


def test_looks_at_a_policy_of_chunks_tell_how_far_it_moves_and_what_is_dead():
    policy, looks = Normal(), ChunkLooks(seed=3)
    policy.first.bias.data[:6] = -100.0
    rows = [{"state": row} for row in np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)]
    batch = rows, np.zeros((400, 2, 3), np.float32), np.ones((400, 2), bool)
    before = torch.get_rng_state()
    first = looks.look(policy, *batch)
    assert set(first) == {"effective_rank", "dead_relus"} and first["dead_relus"] >= 0.5
    assert first["effective_rank"] == reference_rank(np.asarray(hidden(policy, rows))[::2])
    same = looks.look(policy, *batch)
    assert same["policy_kl"] == pytest.approx(0, abs=1e-6)
    assert same["entropy"] == pytest.approx(0.5 * np.log(2 * np.pi * np.e * 0.25), abs=1e-5)
    policy.mean.data += torch.tensor([1.0, -1.0, 1.0])
    assert looks.look(policy, *batch)["policy_kl"] == pytest.approx(1 / (2 * 0.25), rel=0.4), "m^2 / 2 s^2, by 96 draws"
    assert looks.look(policy, *batch)["policy_kl"] == pytest.approx(0, abs=1e-6), "since the look before"
    assert policy.training and torch.equal(before, torch.get_rng_state()), "it is as it was"
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("at_once", [1, 7, 200, 400, 999])
def test_a_look_in_parts_is_a_look_at_all_of_them(at_once: int):
    policy = Normal()
    policy.first.bias.data[:6] = -1.0
    rows = [{"state": row} for row in np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)]
    batch = rows, np.zeros((400, 2, 3), np.float32), np.ones((400, 2), bool)
    assert ChunkLooks().look(policy, *batch, at_once) == ChunkLooks().look(policy, *batch)


def test_a_look_at_too_few_samples_and_at_what_draws_nothing_says_so(monkeypatch: pytest.MonkeyPatch):
    policy, looks = Normal(), ChunkLooks(least=5)
    batch = [{"state": np.ones(2, np.float32)}] * 4, np.zeros((4, 2, 3), np.float32), np.ones((4, 2), bool)
    assert looks.look(policy, *batch) == {}
    few = "there are 4 samples to look at, and it takes 5"
    assert looks.lacking == {"effective_rank": few, "dead_relus": few}
    looks = ChunkLooks(least=4)
    assert set(looks.look(policy, *batch)) == {"effective_rank", "dead_relus"} and not looks.lacking
    monkeypatch.setattr(Normal, "act", lambda *_, **__: (np.zeros(1), {}))
    looks.look(policy, *batch)
    assert looks.lacking == {"policy_kl": "the policy draws no actions"}


def hidden(policy: Normal, rows: Any) -> Any:
    return F.relu(policy.first(torch.from_numpy(np.stack([row["state"] for row in rows])))).detach()


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"compiled": True}, set()),
        ({"captured": True}, {"effective_rank", "dead_relus"}),
        ({"guidance": 2.0}, {"effective_rank", "dead_relus"}),
        ({"has_log_prob": False}, {"effective_rank", "dead_relus"}),
        ({}, {"effective_rank", "dead_relus", "policy_kl", "entropy"}),
    ],
)
def test_looks_leave_out_what_cannot_be_seen(changes: dict[str, Any], known: set[str]):
    policy, looks = Normal(), ChunkLooks()
    whole = nn.Sequential(policy)  # as a wrapper has it inside
    for name, value in changes.items():
        setattr(policy, name, value)
    batch = [{"state": np.ones(2, np.float32)}] * 4, np.zeros((4, 2, 3), np.float32), np.ones((4, 2), bool)
    looks.look(policy, *batch)
    assert set(looks.look(policy, *batch)) == known
    assert any_part(whole, "_compiles") == ("compiled" in changes)
    assert {*looks.lacking} == {"effective_rank", "dead_relus", "policy_kl"} - known
