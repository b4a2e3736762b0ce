"""HIL-SERL's names for agents: its arguments, its calls, its packed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.compat.serl.launcher import (
    BCAgent,
    SACAgent,
    checkpoints,
    encoder_of,
    make_bc_agent,
    make_sac_pixel_agent,
    make_sac_pixel_agent_hybrid_dual_arm,
    make_sac_pixel_agent_hybrid_single_arm,
    unpacked,
)
from hilt.core.errors import ConfigError
from hilt.core.tree import flatten
from hilt.recipes import migrate


def sample(
    rng: np.random.Generator, camera: str = "wrist", batch: tuple[int, ...] = (), frames: int = 1
) -> dict[str, Any]:
    return {
        camera: rng.integers(0, 256, (*batch, frames, 32, 32, 3), np.uint8),
        "state": rng.normal(size=(*batch, 1, 5)).astype(np.float32),
    }


def packed_batch(rng: np.random.Generator, actions: int, camera: str = "wrist", size: int = 8) -> dict[str, Any]:
    """As the buffer makes it: the image and the next one in one array, keys with a slash as levels."""
    seen = sample(rng, "image", (size,), frames=2)
    images = {"left": {"wrist": seen["image"]}} if camera == "left/wrist" else {camera: seen["image"]}
    return {
        "observations": {**images, "state": seen["state"]},
        "next_observations": {"state": seen["state"] + 1},
        "actions": rng.uniform(-1, 1, (size, actions)).astype(np.float32).round(),
        "rewards": np.ones(size, np.float32),
        "masks": np.ones(size, np.float32),
        "grasp_penalty": np.zeros(size, np.float32),
    }


MAKERS = [
    pytest.param(make_sac_pixel_agent, 6, "wrist", "single-arm-fixed-gripper", id="fixed"),
    pytest.param(make_sac_pixel_agent, 14, "left/wrist", "dual-arm-fixed-gripper", id="fixed-dual"),
    pytest.param(make_sac_pixel_agent_hybrid_single_arm, 7, "wrist", "single-arm-learned-gripper", id="hybrid-single"),
    pytest.param(make_sac_pixel_agent_hybrid_dual_arm, 14, "left/wrist", "dual-arm-learned-gripper", id="hybrid-dual"),
]


@pytest.mark.parametrize(("make", "actions", "camera", "mode"), MAKERS)
def test_the_lines_of_the_script(make: Any, actions: int, camera: str, mode: str):
    rng = np.random.default_rng(0)
    options = {
        "image_keys": [camera],
        "encoder_type": "small",
        "discount": 0.9,
        "reward_bias": 0.5,
        "target_entropy": -3.0,
    }
    agent, other = (
        make(seed=seed, sample_obs=sample(rng, camera), sample_action=np.zeros(actions, np.float32), **options)
        for seed in (1, 2)
    )
    assert agent.config.setup_mode == mode and isinstance(agent, SACAgent) == mode.endswith("fixed-gripper")
    rlpd = agent.config.rlpd
    assert (rlpd.discount, rlpd.reward_bias, rlpd.target_entropy) == (0.9, 0.5, -3.0)
    networks = {"critic", "actor", "temperature"} | ({"grasp_critic"} if "learned" in mode else set())
    updated, info = agent.update(packed_batch(rng, actions, camera), networks_to_update=frozenset(networks))
    assert updated is agent and np.isfinite(info["critic_loss"])
    observation = sample(rng, camera)
    assert agent.sample_actions(observations=observation, argmax=False).shape == (actions,)
    assert not np.array_equal(
        agent.sample_actions(observation, argmax=True), other.sample_actions(observation, argmax=True)
    )
    other = other.replace(state=other.state.replace(params=agent.state.params))
    assert np.array_equal(
        agent.sample_actions(observation, argmax=True), other.sample_actions(observation, argmax=True)
    )
    with pytest.raises(ConfigError, match=r"takes agent\.state\.replace\(params=…\), and got a dict"):
        agent.replace(state={})


def test_an_update_names_its_networks():
    rng = np.random.default_rng(0)
    agent = make_sac_pixel_agent(0, sample(rng), np.zeros(6, np.float32), image_keys=["wrist"], encoder_type="small")
    before = agent.state.params
    agent.update(packed_batch(rng, 6), networks_to_update={"critic"})
    moved = {
        name.split(".")[0] for name, value in agent.state.params.items() if not np.array_equal(value, before[name])
    }
    assert moved == {"encoder"}, "the critic's loss trains the encoder, and the actor stays"


def test_a_packed_batch_has_both_images():
    batch = packed_batch(np.random.default_rng(0), 6)
    both = batch["observations"]["wrist"]
    whole = unpacked(batch)
    assert np.array_equal(whole["observations"]["wrist"], both[:, :1]) and np.array_equal(
        whole["next_observations"]["wrist"], both[:, 1:]
    )
    assert {path: leaf.shape for path, leaf in flatten(unpacked(whole)).items()} == {
        p: leaf.shape for p, leaf in flatten(whole).items()
    }


def test_imitation():
    rng = np.random.default_rng(0)
    agent = make_bc_agent(0, sample(rng), np.zeros(6, np.float32), image_keys=["wrist"], encoder_type="small")
    assert isinstance(agent, BCAgent) and list(agent.config.hidden) == [512, 512, 512]
    batch = packed_batch(rng, 6)
    losses = [agent.update(batch)[1]["imitation_loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_behavior_cloning_has_upstreams_loss_at_upstreams_learning_rate():
    """A Gaussian without tanh on actions that are all at -1, 0 or 1, and Adam at 3e-4: what
    `serl_launcher.agents.continuous.bc` has."""
    rng = np.random.default_rng(0)
    agent = make_bc_agent(0, sample(rng), np.zeros(6, np.float32), image_keys=["wrist"], encoder_type="small")
    agent.config.rlpd.random_crop = 0
    batch = unpacked(packed_batch(rng, 6))
    with torch.no_grad():
        mean, std = (
            part.numpy()
            for part in agent.networks["actor"](
                agent.inputs.encode(agent.encoder, agent.inputs.leaves(batch["observations"]))
            )
        )
    log_prob = (-0.5 * ((batch["actions"] - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1)
    before = {key: value.clone() for key, value in agent.networks["actor"].state_dict().items()}
    np.testing.assert_allclose(agent.update(batch)[1]["imitation_loss"], -log_prob.mean(), rtol=1e-4)
    largest = max(
        (value - before[key]).abs().max().item() for key, value in agent.networks["actor"].state_dict().items()
    )
    assert abs(largest - 3e-4) < 3e-5, "the first step of Adam moves a weight by the learning rate"
    assert np.abs(agent.sample_actions(batch["observations"], seed=0)).max() <= 1


def test_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = tmp_path / "resnet10_params.pkl"
    monkeypatch.setattr(migrate, "PRETRAINED", weights)
    with pytest.raises(
        ConfigError, match=r"which is not there: copy HIL-SERL's resnet10_params\.pkl to it, or choose 'resnet'"
    ):
        encoder_of("resnet-pretrained")
    weights.touch()
    assert vars(encoder_of("resnet-pretrained")) | {
        "kind": "resnet10",
        "training": "head",
        "weights": str(weights),
    } == vars(encoder_of("resnet-pretrained"))
    assert (encoder_of("resnet").kind, encoder_of("resnet").training) == ("resnet10", "critic")
    with pytest.raises(
        ConfigError, match="encoder_type='mobilenet': expected 'resnet-pretrained', 'resnet' or 'small'"
    ):
        encoder_of("mobilenet")


def test_an_unknown_argument_is_named():
    with pytest.raises(ConfigError, match="discont: not an argument of this function; expected image_keys"):
        make_sac_pixel_agent(
            0, sample(np.random.default_rng(0)), np.zeros(6), image_keys=["wrist"], encoder_type="small", discont=0.9
        )


def test_checkpoints_under_their_names(tmp_path: Path):
    rng = np.random.default_rng(0)
    options = {"image_keys": ["wrist"], "encoder_type": "small"}
    agent, other = (make_sac_pixel_agent(seed, sample(rng), np.zeros(6, np.float32), **options) for seed in (1, 2))
    assert (
        checkpoints.latest_checkpoint(tmp_path) is None
        and checkpoints.restore_checkpoint(tmp_path, other.state) is other
    )
    for step in (9, 10, 11):
        checkpoints.save_checkpoint(str(tmp_path), agent.state, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_10", "checkpoint_11"]
    assert checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_11")
    other = other.replace(state=checkpoints.restore_checkpoint(tmp_path, other.state, step=10))
    batch = packed_batch(rng, 6)
    assert agent.update(batch)[1] == other.update(batch)[1], "it goes on as the one that was saved"
    (tmp_path / "checkpoint_5000").mkdir()
    with pytest.raises(ConfigError, match="checkpoint_5000 is a checkpoint of flax, whose weights are not read here"):
        checkpoints.latest_checkpoint(tmp_path)
