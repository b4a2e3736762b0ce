"""DSRL's space: an agent that decides the initial noise of a frozen policy's flow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.core.tree import ArraySpec
from hilt.policies.agent.config import AgentConfig, EncoderConfig, Rlpd
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import frozen_options
from hilt.policies.frozen.noise_decoder import NoiseDecoder
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

torch.set_num_threads(1)
SIZES = {"cameras": ["full_image"], "image_size": 16, "state_dim": 10, "action_dim": 7, "chunk": 3, "width": 32}
NUMBERS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small policy with a flow that has learned nothing, but gives other actions for other noise."""
    path = tmp_path_factory.mktemp("policy") / "flow"
    policy = SmallVLA(SmallVLAConfig.from_json({**SIZES, "depth": 1, "keypoints": 2, "head": "flow"}), seed=0)
    with torch.no_grad():
        policy.action_head.out.weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    policy.fit(np.zeros((2, 10)), np.array([[-0.5] * 7, [0.8] * 7]))
    policy.save_pretrained(path)
    return path


def base_of(folder: Path, chunk: int = 2, suite: str = "tabletop") -> FrozenBase:
    return FrozenBase(frozen_options({"policy": str(folder), "suite": suite, "space": "noise"}), chunk)


def rows(count: int) -> list[dict[str, Any]]:
    r = np.random.default_rng(0)
    return [
        {
            "full_image": r.integers(0, 255, (16, 16, 3), np.uint8),
            "state": r.normal(size=10).astype(np.float32),
            "instruction": "reach",
        }
        for _ in range(count)
    ]


def seen(base: FrozenBase, count: int) -> dict[str, Any]:
    return {"base_policy": {base.weights: base.columns(rows(count))}}


def agent(folder: Path, chunk: int = 2, seed: int = 0, **changes: Any) -> FrozenAgent:
    base = base_of(folder, chunk)
    columns = {"actions": (chunk, NUMBERS), "features": (32,), "state": (10,)}
    spaces = {"base_policy": {base.weights: {k: ArraySpec(np.dtype(np.float32), v) for k, v in columns.items()}}}
    config = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[16], kind="frozen_vla", chunk=chunk)
    options = {"policy": str(folder), "suite": "tabletop", "space": "noise", **changes.pop("options", {})}
    config = replace(config, options=options, **{"rlpd": Rlpd(learning_rate=1e-2), **changes})
    return FrozenAgent.make(spaces, ArraySpec(np.dtype(np.float32), (NUMBERS,)), config, seed=seed)


def batch(base: FrozenBase, seed: int, count: int = 16) -> dict[str, Any]:
    r, tree = np.random.default_rng(seed), seen(base, count)
    return {
        "observations": tree,
        "next_observations": tree,
        "actions": r.uniform(-1, 1, (count, base.chunk, NUMBERS)).astype(np.float32),
        "rewards": r.random(count).astype(np.float32),
        "masks": np.ones(count, np.float32),
        "demo": np.arange(count) >= count // 2,
        "n_steps": np.full(count, base.chunk),
        "source": np.zeros((count, base.chunk), np.int64),
    }


def test_no_noise_gives_the_actions_that_the_policy_would_take(folder: Path):
    base = base_of(folder)
    columns = base.columns(rows(5))
    decoder = NoiseDecoder(base, range(NUMBERS))
    found = decoder(torch.from_numpy(columns["features"]), torch.zeros(5, 2 * NUMBERS))
    np.testing.assert_allclose(found.numpy().reshape(5, 2, 7), columns["actions"], atol=1e-5)
    noise = torch.zeros(5, 2 * NUMBERS)
    noise[:, 0] = 1.5
    other = decoder(torch.from_numpy(columns["features"]), noise)
    assert (other - found).abs().max() > 0.01 and other.max() <= 0.8 + 1e-6 and other.min() >= -0.5 - 1e-6


def test_given_noise_is_where_the_flow_of_act_begins(folder: Path):
    """With the noise that `act` draws from a generator, of all numbers of all actions."""
    base = base_of(folder, chunk=3)
    actions, _ = base.policy.act(rows(4), sample=False, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(5))
    found = NoiseDecoder(base, range(NUMBERS))(base.policy.features(rows(4)), noise.flatten(1))
    np.testing.assert_allclose(found.numpy().reshape(4, 3, 7), actions, atol=1e-5)


def test_gradients_through_the_flow_equal_differences_in_float64(folder: Path):
    made = agent(folder)
    space, features = made.space, torch.from_numpy(base_of(folder).columns(rows(2))["features"]).double()
    policy = base_of(folder).policy.double()
    try:
        r = torch.Generator().manual_seed(0)
        z = torch.cat([features, torch.zeros(2, 24, dtype=torch.float64)], 1)
        own, slope = (torch.rand(2, 14, generator=r, dtype=torch.float64) - 0.5 for _ in range(2))
        assert space is not None
        down = space.through(z, own, space.compose(z, own), slope)
        for place in ((0, 0), (1, 9)):
            moved = [own.clone(), own.clone()]
            for each, step in zip(moved, (1e-6, -1e-6), strict=True):
                each[place] += step
            above, below = ((space.compose(z, each) * slope).sum() for each in moved)
            torch.testing.assert_close(down[place], (above - below) / 2e-6, rtol=1e-5, atol=1e-9)
    finally:
        policy.float()


def test_it_begins_as_the_policy_learns_and_goes_on_bit_for_bit(folder: Path):
    base = base_of(folder)
    first, tree = agent(folder, actor_scale=1e-6), seen(base, 6)
    columns = tree["base_policy"][base.weights]
    np.testing.assert_allclose(first.chunks(tree), columns["actions"], atol=1e-4)
    weights = {name: tensor.clone() for name, tensor in base.policy.state_dict().items()}
    for number in range(5):
        first.update(batch(base, number))
    assert np.abs(first.chunks(tree) - columns["actions"]).max() > 1e-3
    assert all(torch.equal(weights[name], tensor) for name, tensor in base.policy.state_dict().items()), "it is frozen"
    second = agent(folder, seed=3)
    second.load_state_dict(first.state_dict())
    for number in range(5, 7):
        assert first.update(batch(base, number))[1] == second.update(batch(base, number))[1]
    np.testing.assert_array_equal(first.chunks(tree), second.chunks(tree))


def test_every_answer_is_one_that_the_flow_can_give(folder: Path):
    made, base = agent(folder, options={"noise_bound": 0.5}), base_of(folder)
    tree = seen(base, 3)
    low, high = base.policy.action_low.numpy(), base.policy.action_high.numpy()
    decided = made.chunks(tree, seed=1, argmax=False)
    assert (decided >= low - 1e-6).all() and (decided <= high + 1e-6).all()
    wide = agent(folder, options={"noise_bound": 3.0}).chunks(tree, seed=1, argmax=False)
    away = [np.abs(each - tree["base_policy"][base.weights]["actions"]).mean() for each in (decided, wide)]
    assert away[1] > 2 * away[0]


def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="takes the policy's actions as they are, and libero changes them"):
        NoiseDecoder(base_of(folder, suite="libero"), range(NUMBERS))
    SmallVLA(SmallVLAConfig.from_json({**SIZES, "depth": 1, "keypoints": 2}), seed=0).save_pretrained(tmp_path / "bins")
    with pytest.raises(ConfigError, match="does not compute its actions by a flow"):
        NoiseDecoder(base_of(tmp_path / "bins"), range(NUMBERS))
    few = {**SIZES, "depth": 1, "keypoints": 2, "head": "flow", "knots": 2}
    SmallVLA(SmallVLAConfig.from_json(few), seed=0).save_pretrained(tmp_path / "knots")
    with pytest.raises(ConfigError, match=r"gives each action noise of its own, and the policy in .*knots=2"):
        NoiseDecoder(base_of(tmp_path / "knots"), range(NUMBERS))
    for changes in ({"rlpd": Rlpd(imitation_weight=1.0)}, {"rlpd": Rlpd(actor="behavior", samples=2)}):
        with pytest.raises(ConfigError, match=r"space=noise with imitation"):
            agent(folder, **changes)
    with pytest.raises(ConfigError, match="the flow takes features as they are"):
        agent(folder, normalize_proprio=True)
    with pytest.raises(ConfigError, match=r"noise_bound=2(\.0)? would do nothing"):
        agent(folder, options={"space": "edit", "noise_bound": 2.0})
