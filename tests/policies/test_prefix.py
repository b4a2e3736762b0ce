"""Real-time chunking: answers of policies that continue actions which are executed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hilt.algos.adam import Adam
from hilt.core.errors import ConfigError
from hilt.policies.base import Policy, Prefix, join, select
from hilt.policies.registry import load_policy
from hilt.policies.vla import flow
from hilt.policies.vla.flow import Flow, FlowStep
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.policies.vla.tokens import ByteTokenizer
from tests.effort import sampled
from tests.policies import test_pi0, test_small_vla
from tests.vla.taught import Row

STEPS = 20
LENGTH, KNOWN, FROZEN = 8, 6, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- guidance, on a field that is known exactly ---


class GaussianWalk:
    """Chunks that are a random walk of 8 numbers with drift: the field of a Gaussian is linear, and known exactly."""

    mean = np.linspace(0.0, 1.4, LENGTH)
    covariance = 0.3 * np.minimum.outer(np.arange(1, LENGTH + 1), np.arange(1, LENGTH + 1))

    def denoiser(self, t: float) -> tuple[np.ndarray, np.ndarray]:
        """Matrix and offset of the expected chunk given ``x = t noise + (1 - t) chunk``."""
        spread = t * t * np.eye(LENGTH) + (1 - t) ** 2 * self.covariance
        matrix = (1 - t) * self.covariance @ np.linalg.inv(spread)
        return matrix, self.mean - (1 - t) * matrix @ self.mean

    def field(self, x: Tensor, times: Tensor) -> FlowStep:
        matrix, offset = (torch.from_numpy(each) for each in self.denoiser(float(times[0])))
        clean = x[..., 0] @ matrix.T + offset
        return FlowStep(((x[..., 0] - clean) / times[:, None])[..., None])


def published_guidance(walk: GaussianWalk, noise: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The algorithm of arXiv 2506.07339 in its notation: tau runs from 0, noise, to 1, and v points to the chunk."""
    x = noise.copy()
    for tau in np.arange(STEPS) / STEPS:
        matrix, offset = walk.denoiser(1 - tau)
        clean = matrix @ x + offset
        velocity = (clean - x) / (1 - tau)
        r_squared = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        factor = min(5.0, (1 - tau) / (tau * r_squared)) if tau else 5.0
        x = x + (velocity + factor * ((target - clean) * weights) @ matrix) / STEPS
    return x


def drawn(walk: GaussianWalk, noise: Tensor, given: flow.Given | None) -> np.ndarray:
    field = walk.field if given is None else flow.guided(walk.field, given)
    heat = torch.ones(len(noise), dtype=noise.dtype)
    with torch.no_grad():
        found = flow.draw(field, tuple(noise.shape), Flow(steps=STEPS), heat, None, sample=False, start=noise)
    assert not found.actions.requires_grad
    result: np.ndarray = found.actions[..., 0].numpy()
    return result


def test_guided_steps_equal_the_published_algorithm() -> None:
    walk, noise = GaussianWalk(), torch.randn(4, LENGTH, 1, generator=generator(), dtype=torch.float64)
    known = torch.randn(4, KNOWN, 1, generator=generator(1), dtype=torch.float64)
    frozen = torch.tensor([0, 2, FROZEN, KNOWN])
    given = flow.given_actions(known, frozen, LENGTH, 1)
    found = drawn(walk, noise, given)
    for row in range(4):
        target, weights = given.actions[row, :, 0].numpy(), given.weights[row, :, 0].numpy()
        wanted = published_guidance(walk, noise[row, :, 0].numpy(), target, weights)
        np.testing.assert_allclose(found[row], wanted, rtol=1e-6, atol=1e-6)
    unguided = drawn(walk, noise, None)
    assert np.abs(unguided - found).max() > 0.1
    nothing = given._replace(weights=torch.zeros_like(given.weights))
    np.testing.assert_allclose(drawn(walk, noise, nothing), unguided, rtol=1e-12)


def test_guided_draws_keep_the_frozen_actions_and_go_on_from_there() -> None:
    walk, rows = GaussianWalk(), 200
    noise = torch.randn(rows, LENGTH, 1, generator=generator(), dtype=torch.float64)
    before = drawn(walk, torch.randn(rows, LENGTH, 1, generator=generator(1), dtype=torch.float64), None)
    known = torch.from_numpy(before[:, :KNOWN, None])
    given = flow.given_actions(known, torch.full((rows,), FROZEN), LENGTH, 1)
    after, alone = drawn(walk, noise, given), drawn(walk, noise, None)

    def away(chunks: np.ndarray, first: int, last: int) -> float:
        return float(np.sqrt(np.square(chunks - before)[:, first:last].mean()))

    assert away(after, 0, FROZEN) < 0.15 * away(alone, 0, FROZEN)
    # what may change is the freer the later it is
    assert away(after, 0, FROZEN) < away(after, FROZEN, KNOWN) < away(after, KNOWN, LENGTH)

    def jump(chunks: np.ndarray) -> float:
        """From the last action that is executed to the first of the new chunk, beside a usual step of the walk."""
        return float(np.sqrt(np.square(chunks[:, FROZEN] - before[:, FROZEN - 1]).mean()) / np.sqrt(0.3 + 0.2**2))

    assert jump(before) == pytest.approx(1, abs=0.2)
    assert jump(after) < 1.3 < 2 < jump(alone)


def test_weights_of_guidance_are_the_published_soft_mask() -> None:
    given = flow.given_actions(torch.ones(3, 4, 2), torch.tensor([0, 2, 4]), 6, 3)
    share = [np.exp(c) * c - c for c in (4 / 5, 3 / 5, 2 / 5, 1 / 5, 2 / 3, 1 / 3)]
    share = [float(each / (np.e - 1)) for each in share]
    wanted = [[*share[:4], 0, 0], [1, 1, *share[4:], 0, 0], [1, 1, 1, 1, 0, 0]]
    np.testing.assert_allclose(given.weights[..., 0], wanted, rtol=1e-5)
    assert torch.equal(given.weights[..., 0], given.weights[..., 1]) and not given.weights[..., 2].any()
    assert given.frozen[..., 0].sum(1).tolist() == [0, 2, 4]
    assert given.actions.shape == (3, 6, 3) and given.actions.sum() == 3 * 4 * 2


# --- guidance of each policy ---

FLOWS: dict[str, tuple[Any, Any]] = {
    "small_vla-sde": (lambda: test_small_vla.made("sde", chunk=3), test_small_vla.seen),
    "small_vla-noise": (lambda: test_small_vla.made("noise", chunk=3), test_small_vla.seen),
    **{name: (lambda name=name: test_pi0.made(name), test_pi0.seen) for name in test_pi0.POLICIES},
}


def in_range(policy: Policy, rows: int, length: int) -> np.ndarray:
    """Actions in the robot's units, as the policy may have planned them."""
    usual = np.random.default_rng(3).uniform(-0.8, 0.8, (rows, length, policy.action_dim))
    statistics = getattr(policy, "statistics", {}).get("action", {"mean": 0.0, "std": 1.0})
    return (usual * statistics["std"] + statistics["mean"]).astype(np.float32)


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_policy_continues_a_prefix(name: str) -> None:
    policy, observations = FLOWS[name][0](), FLOWS[name][1](3)
    assert policy.takes_prefix and policy.max_delay == 0 and policy.chunk == 3
    known = in_range(policy, 3, 3)
    prefix = Prefix(known, np.array([2, 2, 0]))
    alone, _ = policy.act(observations, sample=False, generator=generator())
    actions, record = policy.act(observations, sample=False, generator=generator(), prefix=prefix)
    scale = known.std((0, 1))
    away, before = (np.abs((each - known) / scale)[:2, :2].max() for each in (actions, alone))
    assert away < 0.25 * before and away < 0.3, f"{away:.3f} of {before:.3f} without the prefix"
    # nothing but the rows' own prefix plays a role, and nothing that was there is changed
    other = Prefix(known[::-1].copy(), np.array([2, 2, 0]))
    again, _ = policy.act(observations, sample=False, generator=generator(), prefix=other)
    np.testing.assert_allclose(again[1], actions[1], rtol=1e-4, atol=1e-5)
    assert np.abs(again[0] - actions[0]).max() > 0.01 * scale.min()
    assert all(parameter.grad is None for parameter in policy.parameters())
    repeated, _ = policy.act(observations, sample=False, generator=generator())
    assert np.array_equal(repeated, alone)
    # nothing was sampled, so the record has no log-probability, with the prefix as without
    assert not record["log_prob"].any() and not policy.evaluate(record).log_prob.any()
    with pytest.raises(ConfigError, match=r"sample=True: the draw of this \w+ is guided toward the prefix"):
        policy.act(observations, sample=True, generator=generator(), prefix=prefix)


# --- policies that are trained with given actions ---

TRAINED: dict[str, Any] = {
    **{
        f"small_vla-{kind}": lambda kind=kind, **more: test_small_vla.made(kind, chunk=3, **more)
        for kind in ("tokens", "gaussian", "sde", "noise")
    },
    **{name: lambda name=name, **more: test_pi0.made(name, **more) for name in test_pi0.POLICIES},
}


def trained(name: str, max_delay: int = 2) -> tuple[Any, Any]:
    """A policy whose weights all matter, as if it had been trained, and three observations."""
    policy = TRAINED[name](max_delay=max_delay)
    for parameter in [p for n, p in policy.named_parameters() if "given" in n or ".dense." in n]:
        torch.nn.init.normal_(parameter, std=0.2, generator=generator(5))
    return policy, (test_small_vla if name.startswith("small") else test_pi0).seen(3)


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_policy_begins_with_the_prefix_and_samples_the_rest(name: str) -> None:
    policy, observations = trained(name)
    prefix = Prefix(in_range(policy, 3, 3), np.array([2, 1, 0]))
    for sample in (True, False):
        actions, record = policy.act(observations, sample, 0.8, generator(), prefix)
        known = np.arange(3) < prefix.frozen[:, None]
        assert np.array_equal(actions[known], prefix.actions[known])
        assert not np.isclose(actions[~known], prefix.actions[~known]).all()
        # the record has all that its log-probability needs; what was given has none
        found = policy.evaluate(record)
        assert np.array_equal(found.log_prob.detach().numpy(), record["log_prob"])
        assert not record["log_prob"][known].any() and not found.entropy.detach().numpy()[known].any()
        if sample or "chain" not in record:
            assert record["log_prob"][~known].all()
        # rows do not see each other, and a record without a prefix can be joined with one that has it
        alone, other = policy.act(observations[2:], sample, 0.8, generator())
        both = policy.evaluate(join([select(record, [0]), other])).log_prob.detach().numpy()
        np.testing.assert_allclose(both[0], record["log_prob"][0], rtol=0, atol=1e-5)
        assert alone.shape == (1, 3, 2)
    # what is given changes what follows, and more of it than was trained with is not looked at
    again, _ = policy.act(observations, False, 0.8, generator(), prefix._replace(actions=prefix.actions[::-1].copy()))
    assert np.abs(again[0, 2] - actions[0, 2]).max() > 1e-4
    longer, _ = policy.act(observations, False, 0.8, generator(), prefix._replace(frozen=np.array([3, 1, 0])))
    assert np.array_equal(longer[0], actions[0])


@pytest.mark.parametrize("name", TRAINED)
def test_without_a_prefix_a_trained_policy_is_what_it_would_be_anyway(name: str) -> None:
    policy, observations = trained(name)
    plain = TRAINED[name]()
    assert plain.max_delay == 0 and not any("given" in n for n, _ in plain.named_parameters())
    plain.load_state_dict({n: t for n, t in policy.state_dict().items() if n in plain.state_dict()})
    ours, record = policy.act(observations, True, 0.8, generator())
    theirs, usual = plain.act(observations, True, 0.8, generator())
    near = {"rtol": 1e-5, "atol": 1e-5} if name in test_pi0.POLICIES else {"rtol": 0, "atol": 0}  # one time, or many
    np.testing.assert_allclose(ours, theirs, **near)
    assert record.keys() - usual.keys() == {"prefix", "frozen"} and not record["frozen"].any()
    np.testing.assert_allclose(record["log_prob"], usual["log_prob"], **near)


def test_delays_are_the_smaller_of_two_draws_and_leave_something_to_learn() -> None:
    whole = np.ones((3000, 4), bool)
    drawn = flow.training_delays(whole, 3, generator())
    wanted = [3000 * share / 16 for share in (7, 5, 3, 1)]
    assert np.bincount(drawn.numpy()) == pytest.approx(wanted, abs=120)
    short = np.arange(4) < np.arange(5)[:, None]  # rows with 0 to 4 actions until their episodes end
    for seed in range(20):
        assert (flow.training_delays(short, 3, generator(seed)).numpy() <= [0, 0, 1, 2, 3]).all()


def shown(policy: Policy, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return in_range(policy, 3, 3) + np.float32(0.01 * seed), np.ones((3, 3), bool)


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_is_of_the_actions_that_are_not_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, observations = trained(name)
    actions, mask = shown(policy)
    monkeypatch.setattr(flow, "training_delays", lambda *_: torch.tensor([2, 1, 0]))
    monkeypatch.setattr("hilt.policies.vla.small_vla.training_delays", flow.training_delays)
    whole = policy.supervised_loss(observations, actions, mask, generator())[0].item()
    masked = mask & (np.arange(3) >= np.array([2, 1, 0])[:, None])
    again = policy.supervised_loss(observations, actions, masked, generator())[0].item()
    assert again == pytest.approx(whole, rel=1e-6)
    # a mask that leaves the given actions alone leaves nothing to learn
    loss, _ = policy.supervised_loss(observations, actions, mask & ~masked, generator())
    assert loss.item() == 0
    plain = TRAINED[name]()
    plain.load_state_dict({n: t for n, t in policy.state_dict().items() if n in plain.state_dict()})
    other = plain.supervised_loss(observations, actions, masked, generator())[0].item()
    assert other != pytest.approx(whole, rel=1e-4), "what is given plays no role"


@pytest.mark.parametrize("name", [*test_pi0.POLICIES, "small_vla-sde", "small_vla-noise"])
def test_a_flow_is_taught_what_it_is_asked_when_it_acts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the error of the velocity of the very field that `act` follows, where given actions are clean."""
    policy, observations = trained(name)
    actions, mask = shown(policy)
    monkeypatch.setattr(flow, "training_delays", lambda *_: torch.tensor([2, 1, 0]))
    monkeypatch.setattr("hilt.policies.vla.small_vla.training_delays", flow.training_delays)
    loss = float(policy.eval().supervised_loss(observations, actions, mask, generator())[0].detach())
    prefix = Prefix(actions, np.array([2, 1, 0]))
    with torch.no_grad():
        given = policy._given(prefix)
        if isinstance(policy, SmallVLA):
            field = policy.action_head._field(policy._features(policy._record(observations))[0], given)
        else:
            field = policy._field(policy._prefix(policy._read(observations)), given)
        draws, shape = generator(), given.actions.shape
        noise, times = torch.randn(shape, generator=draws), flow.training_times(3, draws)
        clean = given.actions.clone()
        if shape[1] > 3:  # a chunk of pi0 has an action more than is answered: the last one once more
            clean[:, 3] = clean[:, 2]
        x = times[:, None, None] * noise + (1 - times[:, None, None]) * clean
        error = (field(x, times).velocity - (noise - clean)).square()[:, :3, :2]
    free = torch.arange(3) >= torch.tensor([2, 1, 0])[:, None]
    assert loss == pytest.approx(float(error[free].mean()), rel=1e-4)


MODES: dict[str, dict[str, Any]] = {
    "tokens": {"head": "tokens", "bins": 7, "smoothing": 0.5},
    "gaussian": {"head": "gaussian"},
    "flow": {"head": "flow", "flow": Flow(steps=5)},
}


def two_modes(rows: int, seed: int) -> np.ndarray:
    """Chunks of four actions that go left or right, whatever is seen."""
    side = np.random.default_rng(seed).choice([-1.0, 1.0], (rows, 1, 1))
    return (side * np.linspace(0.6, 0.9, 4)[:, None]).astype(np.float32)


@pytest.mark.parametrize("head", sampled(list(MODES), "tokens", "flow"))
def test_a_trained_policy_continues_the_way_that_the_prefix_goes(head: str) -> None:
    sizes = {"image_size": 16, "state_dim": 0, "chunk": 4, "action_dim": 1, "width": 16, "depth": 1, "heads": 2}
    policy = SmallVLA(SmallVLAConfig(**sizes, keypoints=1, max_delay=2, **MODES[head]), seed=0)
    row = {"full_image": np.zeros((16, 16, 3), np.uint8), "instruction": "go"}
    parameters, chance = list(policy.parameters()), generator()
    optimizer = Adam(parameters, 0.01)
    for step in range(80):
        loss, _ = policy.supervised_loss([row] * 24, two_modes(24, step), np.ones((24, 4), bool), chance)
        optimizer.step(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    planned = two_modes(32, 999)
    side = np.sign(planned[:, 0, 0])

    def share(frozen: int) -> float:
        """The share of answers that go on, in all the actions that are not given, on the side of the plan."""
        prefix = Prefix(planned, np.full(32, frozen))
        answers, _ = policy.act([row] * 32, sample=False, generator=generator(), prefix=prefix)
        return float((np.sign(answers[:, frozen:, 0]) == side[:, None]).all(1).mean())

    assert share(1) > 0.9 and share(2) > 0.9
    assert share(0) < 0.8, "without a prefix it cannot know the side"


@pytest.mark.parametrize("name", ["small_vla-tokens", "small_vla-sde", "pi05"])
def test_a_folder_keeps_the_delay_that_a_policy_was_trained_with(name: str, tmp_path: Path) -> None:
    policy, observations = trained(name)
    prefix = Prefix(in_range(policy, 3, 3), np.array([2, 1, 0]))
    policy.save_pretrained(tmp_path / "policy")
    options = {} if name.startswith("small") else {"tokenizer": ByteTokenizer()}
    again: Any = load_policy(tmp_path / "policy", **options)
    assert again.max_delay == 2 and again.config == policy.config
    for each in (True, False):
        wanted, _ = policy.act(observations, each, 1.0, generator(), prefix)
        found, _ = again.act(observations, each, 1.0, generator(), prefix)
        np.testing.assert_array_equal(found, wanted)
    # one that was not trained so can be, from its folder on
    TRAINED[name]().save_pretrained(tmp_path / "plain")
    later: Any = load_policy(tmp_path / "plain", max_delay=1, **options)
    assert later.max_delay == 1 and later.takes_prefix
    later.supervised_loss(observations, *shown(policy), generator())


def test_training_with_given_actions_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"max_delay is 3 and chunk is 3: .* Give a smaller max_delay"):
        TRAINED["small_vla-tokens"](max_delay=3)
    with pytest.raises(ConfigError, match="max_delay is 3 and n_action_steps is 3"):
        TRAINED["sde"](max_delay=3)
    with pytest.raises(ConfigError, match="max_delay=2: Row cannot be trained with given actions; leave max_delay out"):
        Row.delay_options(2)
    policy, observations = trained("small_vla-tokens")
    with pytest.raises(ConfigError, match="max_delay=2 gives actions at random: give supervised_loss a generator"):
        policy.supervised_loss(observations, *shown(policy))
