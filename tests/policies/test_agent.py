"""The agent: what it sees and does, what each update moves, and that its state is all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gym
from scipy.spatial.transform import Rotation

from hilt.algos import rlpd
from hilt.core.errors import ConfigError, MissingFieldError, NotFiniteError, SchemaError, UnknownNameError
from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent import Agent, AgentConfig
from hilt.policies.agent.agent_inputs import rotation_columns
from hilt.policies.agent.config import EncoderConfig
from hilt.policies.agent.layout import ActionLayout
from hilt.replay.tensors import load_pt, save_pt
from tests.policies.agents import MODES, batch, config, make, moved, numbers, spaces

FROZEN = EncoderConfig(features=8, training="frozen")
ALL = {"actor", "critic", "temperature"}


def same(a: Agent, b: Agent) -> bool:
    ours, theirs = numbers(a), numbers(b)
    return all(np.array_equal(ours[key], theirs[key]) for key in ours)


# What each update moves


@pytest.mark.parametrize("training", ["critic", "head", "frozen"])
def test_the_encoder_learns_by_the_critics_alone(training: str) -> None:
    agent = make("single-arm-learned-gripper", EncoderConfig(features=8, training=training))
    agent.update(batch(0))  # everyone has momentum now
    before = numbers(agent)
    agent.update(batch(1), {"actor", "temperature", "grasp_critic"})
    after = numbers(agent)
    assert moved(before, after) == {"actor", "temperature", "grasp_critic", "target grasp_critic"}
    agent.update(batch(2), {"critic"})
    trained = set() if training == "frozen" else {"encoder", "target encoder"}
    assert moved(after, numbers(agent)) == {"critic", "target critic"} | trained
    trunk_moved = any(
        not np.array_equal(v, after[k]) for k, v in numbers(agent).items() if k.startswith("encoder.trunks")
    )
    assert trunk_moved == (training == "critic")


def test_pretraining_moves_a_frozen_encoder_and_its_target() -> None:
    for training, expected in (("frozen", {"encoder", "actor"}), ("critic", {"encoder", "actor", "target encoder"})):
        agent = make(encoder=EncoderConfig(features=8, training=training))
        before = numbers(agent)
        agent.imitate(batch(0), encoder=True)
        assert moved(before, numbers(agent)) == expected
    assert all(
        np.array_equal(v, numbers(agent)[f"target {k}"]) for k, v in numbers(agent).items() if k.startswith("encoder")
    )
    before = numbers(agent)
    agent.imitate(batch(0))
    assert moved(before, numbers(agent)) == {"actor"}


def test_a_demonstration_that_is_not_finite_changes_nothing() -> None:
    agent, rows = make(), batch(0)
    rows["actions"][3, 2] = np.nan
    before = numbers(agent)
    for call in (lambda: agent.imitate(rows), lambda: agent.imitate(rows, encoder=True), lambda: agent.update(rows)):
        with pytest.raises(SchemaError, match=r"_loss is nan: a row of the batch is not finite"):
            call()
    assert moved(before, numbers(agent)) == set()


@pytest.mark.parametrize("encoder", [False, True])
def test_a_gradient_of_the_grasp_critic_that_is_not_finite_changes_nothing(encoder: bool) -> None:
    agent, rows = make("single-arm-learned-gripper"), batch(0)
    weight = next(agent.networks["grasp_critic"].parameters())
    weight.register_hook(lambda gradient: gradient * math.inf)
    before = numbers(agent)
    with pytest.raises(NotFiniteError, match=r"the gradient of grasp_critic is (inf|nan)"):
        agent.imitate(rows, encoder=encoder)
    assert moved(before, numbers(agent)) == set() and agent.imitations == 0


def test_imitation_learns_what_was_shown_grippers_too() -> None:
    agent, rows = make("dual-arm-learned-gripper", learning_rate=3e-3, random_crop=0), batch(0, actions=14)
    infos = [agent.imitate(rows) for _ in range(150)]
    assert infos[-1]["mse"] < 0.3 * infos[0]["mse"] and infos[-1]["grasp_accuracy"] == 1.0
    done = agent.sample_actions(rows["observations"], argmax=True)
    np.testing.assert_array_equal(done[:, [6, 13]], rows["actions"][:, [6, 13]].round())


def test_termination_hides_the_next_state_and_truncation_does_not() -> None:
    """A mask is 0 where the task ended. A step that was merely cut short has mask 1, whatever `truncated` says."""
    results = []
    for seed, mask in ((1, 0), (2, 0), (1, 1), (2, 1)):
        agent, rows = make(), batch(0)
        rows["masks"] = np.full(8, mask, np.float32)
        rows["next_observations"] = batch(seed)["observations"]
        agent.update(rows, {"critic"})
        results.append(numbers(agent)["critic.weights.0"])
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[2], results[3])


def test_every_image_of_an_update_is_moved_by_itself() -> None:
    agent, rows = make(random_crop=4), batch(0, n=64)
    rows["observations"]["images"]["wrist"] = rows["observations"]["images"]["front"]
    moved_images = [agent.inputs.cropped({"observations": rows["observations"]}, "observations") for _ in range(2)]
    front, wrist, again = (
        moved_images[0]["images/front"],
        moved_images[0]["images/wrist"],
        moved_images[1]["images/front"],
    )
    for other in (wrist, again):
        assert (front == other).flatten(1).all(1).sum() < 12  # of 64; 1 in 81 by chance


# Every setting changes what happens


@pytest.mark.parametrize(
    "change",
    [
        {"discount": 0.5},
        {"tau": 0.5},
        {"critics": 3},
        {"critics": 3, "subset": 1},
        {"learning_rate": 1e-2},
        {"temperature": 1.0},
        {"target_entropy": 3.0},
        {"backup_entropy": True},
        {"reward_bias": -1.0},
        {"target_range": [0.0, 0.1]},
        {"actor_q": "min"},
        {"actor_average": 0.5},
        {"critic_warmup": 10},
        {"critic_warmup": 10, "imitation_loss": "mse"},
        {"imitation_weight": 1.0},
        {"imitation_weight": 1.0, "imitation_updates": 2},
        {"random_crop": 0},
    ],
    ids=str,
)
def test_a_setting_of_rlpd_changes_what_is_learned(change: dict[str, Any]) -> None:
    base = {key: value for key, value in change.items() if key != list(change)[-1]}  # all but the last
    results = []
    for given in (base, change):
        agent = make(**given)
        for seed in range(2):
            agent.update(batch(seed))
        results.append(agent.sample_actions(batch(9)["observations"], argmax=True))
        results.append(agent.networks["critic"](torch.zeros(1, 20), torch.zeros(1, 7)).detach().numpy().mean())
        results.append(agent.targets["critic"](torch.zeros(1, 20), torch.zeros(1, 7)).detach().numpy().mean())
        results.append(agent.networks["temperature"]().item())
    assert any(not np.array_equal(a, b) for a, b in zip(results[:4], results[4:], strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"conservative": 1.0},
        {"conservative": 1.0, "conservative_samples": 2},
        {"conservative": 1.0, "conservative_updates": 1},
        {"conservative": 1.0, "calibrated": False},
    ],
    ids=str,
)
def test_the_conservative_term_follows_its_settings(change: dict[str, Any]) -> None:
    """Also through an encoder that the critics train; after `conservative_updates` it is gone."""
    results = []
    for given in ({key: value for key, value in change.items() if key != list(change)[-1]}, change):
        agent, infos = make(**given), []
        for seed in range(2):
            rows = batch(seed) | {"returns": np.linspace(-1, 9, 8, dtype=np.float32)}
            infos.append(agent.update(rows, {"critic"})[1])
        results.append(numbers(agent))
    assert any(not np.array_equal(value, results[1][key]) for key, value in results[0].items())
    assert ["conservative_loss" in info for info in infos] == [True, "conservative_updates" not in change]
    assert ("bounded_share" in infos[0]) == ("calibrated" not in change)


def test_an_agent_that_only_imitates_is_a_plain_gaussian() -> None:
    """Its mean is the action, cut off at the limits; it is never updated by reinforcement
    learning, nor given such an agent's state."""
    agent = Agent.make(*spaces(), config(), seed=0, squashed=False)
    with torch.no_grad():
        agent.networks["actor"].mlp.out.weight.zero_()
        agent.networks["actor"].mlp.out.bias[:7] = torch.tensor([-9.0, -1, -0.5, 0, 0.5, 1, 9])
    np.testing.assert_allclose(
        agent.sample_actions(batch(0)["observations"], argmax=True)[0], [-1, -1, -0.5, 0, 0.5, 1, 1]
    )
    with pytest.raises(ConfigError, match=r"update: this agent was made with squashed=False, to imitate"):
        agent.update(batch(0))
    agent.begin_anew()
    assert not agent.squashed
    twin = Agent.make(*spaces(), config(), seed=1, squashed=False)
    twin.load_state_dict(agent.state_dict())
    squashed = make()
    older = {key: value for key, value in squashed.state_dict().items() if key != "squashed"}
    for state, one, cure in ((older, agent, "train it again"), (agent.state_dict(), squashed, "Check algorithm=")):
        with pytest.raises(
            SchemaError, match=rf"this state is of an actor with the .* Gaussian.*{cure}|-Gaussian.*{cure}"
        ):
            one.load_state_dict(state)
    squashed.load_state_dict(older)


@pytest.mark.parametrize("encoder", [False, True])
def test_imitation_without_pretraining_has_one_learning_rate_and_one_crop(encoder: bool) -> None:
    def after(rate: float = 1e-3, crop: int = 4, **pretraining: Any) -> np.ndarray:
        agent = make(encoder=EncoderConfig(features=8, **pretraining), learning_rate=rate, random_crop=crop)
        agent.imitate(batch(0), encoder=encoder)
        return agent.sample_actions(batch(9)["observations"], argmax=True)

    base = after()
    assert not np.array_equal(base, after(rate=1e-4)) and not np.array_equal(base, after(crop=0))
    assert np.array_equal(base, after(pretrain_learning_rate=1e-1, pretrain_crop=0)), (
        "which are of pretraining, and there is none"
    )


def test_after_pretraining_a_grippers_target_is_its_critic() -> None:
    """Else the first updates bootstrap from a random network, and unlearn what was shown."""
    agent = make("single-arm-learned-gripper", encoder=EncoderConfig(features=8, pretrain_updates=3))
    for seed in range(3):
        agent.imitate(batch(seed), encoder=True)
    z = torch.randn(4, 20)
    assert torch.equal(agent.targets["grasp_critic"](z), agent.networks["grasp_critic"](z))


def test_the_margin_of_a_gripper_is_heeded() -> None:
    a, b = (make("single-arm-learned-gripper", grasp_margin=margin) for margin in (0.1, 1.0))
    assert a.imitate(batch(0))["grasp_loss"] < b.imitate(batch(0))["grasp_loss"]


@pytest.mark.parametrize(
    "change",
    [{"features": 16}, {"precision": "bfloat16"}, {"kind": "none"}, {"training": "frozen"}, {"training": "head"}],
    ids=str,
)
def test_a_setting_of_the_encoder_changes_what_is_learned(change: dict[str, Any]) -> None:
    results = []
    for encoder in (EncoderConfig(features=8), replace(EncoderConfig(features=8), **change)):
        agent = make(encoder=encoder)
        agent.update(batch(0))
        results.append((agent.encoder.width, agent.sample_actions(batch(9)["observations"], argmax=True)))
        results[-1] += (
            numbers(agent).get("encoder.heads.0.out.linear.weight"),
            numbers(agent).get("encoder.trunks.0.convolutions.0.weight"),
        )
    assert any(not np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_settings_of_pretraining_are_heeded() -> None:
    def after(**change: Any) -> np.ndarray:
        agent = make(encoder=replace(FROZEN, pretrain_updates=4, **change))
        agent.imitate(batch(0), encoder=True)
        return agent.trunk_features({f"images/{k}": v for k, v in batch(1)["observations"]["images"].items()})

    base = after()
    assert not np.array_equal(base, after(pretrain_crop=0)) and not np.array_equal(
        base, after(pretrain_learning_rate=1e-4)
    )


@pytest.mark.parametrize("change", [{"hidden": [16]}, {"activation": "relu"}])
def test_agent_body_follows_the_config(change: dict[str, Any]) -> None:
    agents = [Agent.make(*spaces(), replace(config(), **given), seed=0) for given in ({}, change)]
    a, b = (agent.sample_actions(batch(0)["observations"], argmax=True) for agent in agents)
    assert not np.array_equal(a, b)
    with pytest.raises(UnknownNameError, match="no activation named 'swish'"):
        Agent.make(*spaces(), replace(config(), activation="swish"))


def test_the_device_is_checked() -> None:
    with pytest.raises(ConfigError, match="device 'abacus' is no torch device"):
        Agent.make(*spaces(), replace(config(), device="abacus"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_learns_the_same() -> None:
    exact = config(encoder=EncoderConfig(features=8, precision="float32"))  # a CPU may have bfloat16 by itself
    agents = [Agent.make(*spaces(), replace(exact, device=device), seed=0) for device in ("cpu", "cuda:0")]
    with torch.backends.cudnn.flags(allow_tf32=False):  # convolutions of ten bits, by default
        for agent in agents:
            agent.imitate(batch(9), encoder=True)
            agent.update(batch(0), details=True)
            agent.load_state_dict(agent.state_dict())
            agent.update(batch(1))
    assert next(agents[1].networks["actor"].parameters()).is_cuda
    seen = batch(2)["observations"]
    np.testing.assert_allclose(*(agent.sample_actions(seen, argmax=True) for agent in agents), atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": []}, r"agent.hidden=\[\]: expected at least one"),
        ({"proprio_width": -1}, "agent.proprio_width=-1"),
        ({"proprio_floor": {"state/pose": 0.0}}, "agent.proprio_floor"),
        ({"actor_scale": 0.0}, "agent.actor_scale=0.0: expected a number above 0"),
        ({"std_range": [1.0]}, r"agent.std_range=\[1.0\]: expected 2 numbers, above 0, in ascending order"),
        ({"initial_std": -1.0}, "agent.initial_std=-1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Agent.make(*spaces(), replace(config(), **change))


# The lab's settings


def test_the_policy_moves_only_some_of_the_numbers() -> None:
    agent = Agent.make(*spaces(), replace(config(), action_indices=[0, 1, 6]))
    done = agent.sample_actions(batch(0)["observations"], seed=0)
    assert (
        done.shape == (8, 7)
        and (done[:, 2:6] == 0).all()
        and (done[:, [0, 1, 6]] != 0).all()
        and agent.target_entropy == -1.5
    )
    twin = Agent.make(*spaces(), replace(config(), action_indices=[0, 1, 6]))
    rows, others = batch(0), batch(0)
    others["actions"][:, 2:6] = 0.5
    agent.update(rows)
    twin.update(others)
    assert same(agent, twin), "what the others were does not matter"
    with pytest.raises(ConfigError, match=r"action_indices is \[7\]; expected some of 0 to 6"):
        Agent.make(*spaces(), replace(config(), action_indices=[7]))


def test_proprioception_is_normalized_by_the_demonstrations() -> None:
    agents = [
        Agent.make(*spaces(), replace(config(), normalize_proprio=on, proprio_floor={"state/pose": 0.5}), seed=0)
        for on in (False, True)
    ]
    seen = batch(0, n=50)["observations"]
    seen["state"]["grip"] = 100 + 7 * seen["state"]["grip"]
    seen["state"]["pose"][:, 0] *= 0.01
    for agent in agents:
        agent.fit_proprio(seen)
    normal = agents[1].networks["proprio"]
    # in the order of the paths, with the floor
    scales = [seen["state"]["grip"].std(), 0.5, *seen["state"]["pose"][:, 1:].std(0)]
    np.testing.assert_allclose(normal.scale, scales, rtol=1e-5)  # type: ignore[arg-type]
    np.testing.assert_allclose(normal.mean, [seen["state"]["grip"].mean(), *seen["state"]["pose"].mean(0)], rtol=1e-4)  # type: ignore[arg-type]
    assert not np.array_equal(*(agent.sample_actions(seen, argmax=True) for agent in agents))
    actor = Agent.make(*spaces(), agents[1].config, seed=1)
    actor.load_acting_state(agents[1].acting_state())
    assert np.array_equal(actor.sample_actions(seen, argmax=True), agents[1].sample_actions(seen, argmax=True))
    with pytest.raises(UnknownNameError, match="no proprioception in proprio_floor named 'state/pos'"):
        Agent.make(*spaces(), replace(config(), normalize_proprio=True, proprio_floor={"state/pos": 1.0})).fit_proprio(
            seen
        )


def test_a_pose_is_seen_as_columns_of_its_rotation() -> None:
    """A quaternion and its negative are the same turn."""
    space = {"state": {"tcp_pose": ArraySpec(np.dtype(np.float32), (7,))}}
    agents = [
        Agent.make(space, spaces()[1], replace(config(), pose_keys=keys), seed=0) for keys in ([], ["state/tcp_pose"])
    ]
    pose = np.array([[0.1, 0.2, 0.3, 0.5, -0.5, 0.5, 0.5], [0, 0, 0, 0, 0, 0, 1]], np.float32)
    negative = pose * ([1] * 3 + [-1] * 4)
    same_turn = [
        np.array_equal(
            *(a.sample_actions({"state": {"tcp_pose": p}}, argmax=True) for p in (pose, negative.astype(np.float32)))
        )
        for a in agents
    ]
    assert same_turn == [False, True]
    columns = rotation_columns(torch.from_numpy(pose)).numpy()
    matrices = Rotation.from_quat(pose[:, 3:]).as_matrix()
    np.testing.assert_allclose(
        columns, np.concatenate([pose[:, :3], matrices[:, :, 0], matrices[:, :, 1]], axis=1), atol=1e-6
    )
    with pytest.raises(ConfigError, match="a pose has 7 numbers"):
        Agent.make(*spaces(), replace(config(), pose_keys=["state/pose"]))


def test_pretraining_foresees_what_is_asked() -> None:
    rows = batch(0)
    rows["future"] = np.random.default_rng(1).normal(size=(8, 2, 3)).astype(np.float32)
    settings = {
        weight: config(encoder=replace(FROZEN, pretrain_predict="state/pose", pretrain_predict_weight=weight))
        for weight in (0.0, 1.0)
    }
    agents = {weight: Agent.make(*spaces(), each, seed=0) for weight, each in settings.items()}
    first = {weight: agent.imitate(rows, encoder=True)["forecast_loss"] for weight, agent in agents.items()}
    last = {
        weight: [agent.imitate(rows, encoder=True) for _ in range(60)][-1]["forecast_loss"]
        for weight, agent in agents.items()
    }
    assert first[0.0] == first[1.0] and last[1.0] < 0.5 * first[1.0] < last[0.0]
    with pytest.raises(MissingFieldError, match="future: no such field"):
        agents[1.0].imitate(batch(0), encoder=True)
    with pytest.raises(UnknownNameError, match="no proprioception to predict named 'state/pse'"):
        make(encoder=replace(FROZEN, pretrain_predict="state/pse"))


def test_only_rows_that_are_to_be_imitated_are() -> None:
    encoder = replace(FROZEN, pretrain_predict="state/pose")
    rows = batch(0) | {
        "imitated": np.arange(8) < 5,
        "future": np.random.default_rng(1).normal(size=(8, 2, 3)).astype(np.float32),
    }
    other = batch(0)["actions"]
    other[5:] *= -1
    later = rows["future"].copy()
    later[5:] += 1
    results = []
    for change in ({}, {"actions": other}, {"future": later}, {"imitated": np.ones(8, bool)}):
        agent = make("single-arm-learned-gripper", encoder)
        agent.imitate({**rows, **change}, encoder=True)
        results.append(numbers(agent))
    assert moved(results[0], results[1]) == set(), "nobody learns what others did"
    assert "encoder" in moved(results[0], results[2]), "but what came of it is foreseen in every row"
    assert {"encoder", "actor", "grasp_critic"} <= moved(results[0], results[3])
    agent.imitate({**rows, "imitated": np.zeros(8, bool)}, encoder=True)  # none is no error


def test_agent_can_be_reinitialized() -> None:
    agent, made = make(encoder=FROZEN, actor_average=0.1), make(encoder=FROZEN, actor_average=0.1)
    agent.imitate(batch(0), encoder=True)
    agent.update(batch(0, features=16))
    agent.begin_anew()
    assert moved(numbers(made), numbers(agent)) == set() and agent.updates == agent.imitations == 0
    assert agent.update(batch(0, features=16))[1] == made.update(batch(0, features=16))[1], (
        "and its generator is where it was"
    )


def test_noise_on_features_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, rows, given = make(encoder=FROZEN, feature_noise=0.5), batch(0, 512, features=16), []
    update = rlpd.update
    monkeypatch.setattr(rlpd, "update", lambda nets, made, *rest: given.append(made) or update(nets, made, *rest))
    agent.update(rows)
    for name, z in (("observations", given[0].z), ("next_observations", given[0].next_z)):
        noise = z[:, :16].numpy() - rows[name]["features"]
        assert abs(noise.std() - 0.5) < 0.02 and abs(noise.mean()) < 0.02
        assert (
            z[:, 16:].numpy() == agent.inputs.encode(agent.encoder, agent.inputs.leaves(rows[name]))[:, 16:].numpy()
        ).all()
    assert given[0].target_z is given[0].next_z
    again = make(encoder=FROZEN, feature_noise=0.5, seed=1)
    again.load_state_dict(agent.state_dict())
    assert again.update(rows)[1] == agent.update(rows)[1], "its generator is in the checkpoint"
    losses = [make(encoder=FROZEN, feature_noise=noise).imitate(rows)["mse"] for noise in (0.0, 0.5)]
    assert losses[0] != losses[1]
    with pytest.raises(
        ConfigError, match=r"rlpd.feature_noise=0.1 is for the features of a frozen encoder, and there is none. Set"
    ):
        make(feature_noise=0.1)
    with pytest.raises(ConfigError, match=r"rlpd.feature_noise=-1: expected a number of at least 0"):
        make(feature_noise=-1)


def test_the_rate_of_pretraining_rises_and_falls() -> None:
    agent = make(encoder=replace(FROZEN, pretrain_updates=2))
    agent.imitate(batch(0), encoder=True)
    agent.imitate(batch(0), encoder=True)
    before = numbers(agent)
    agent.imitate(batch(0), encoder=True)
    assert moved(before, numbers(agent)) == set(), "the end is reached"


def test_a_slow_copy_of_the_actor_is_evaluated() -> None:
    agent = make(actor_average=0.1)
    seen, before = batch(0)["observations"], numbers(agent)["actor.mlp.out.weight"]
    first = agent.sample_actions(seen, argmax=True)
    agent.update(batch(0))
    after = numbers(agent)
    np.testing.assert_allclose(
        after["target actor.mlp.out.weight"], 0.9 * before + 0.1 * after["actor.mlp.out.weight"], atol=1e-7
    )
    slow = agent.sample_actions(seen, argmax=True)
    actor = make(actor_average=0.1, seed=1)
    actor.load_acting_state(agent.acting_state())
    quick = actor.sample_actions(seen, argmax=True)
    assert 0 < np.abs(slow - first).max() < np.abs(quick - first).max(), "an actor has the quick one only"
    agent.imitate(batch(0), encoder=True)
    assert np.array_equal(numbers(agent)["target actor.mlp.out.weight"], numbers(agent)["actor.mlp.out.weight"])


@pytest.mark.parametrize(
    "change", [{"actor_scale": 0.1}, {"initial_std": 0.2}, {"std_range": [0.3, 0.31]}, {"proprio_width": 0}], ids=str
)
def test_agent_actor_initial_std(change: dict[str, Any]) -> None:
    agents = [Agent.make(*spaces(), replace(config(), **given), seed=0) for given in ({}, change)]
    z = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    (mean, std), (changed_mean, changed_std) = (agent.networks["actor"](z) for agent in agents)
    if "actor_scale" in change:
        assert changed_mean.std().item() == pytest.approx(0.1 * mean.std().item(), rel=1e-4)
    elif "initial_std" in change:
        below = std < 5  # where it is not cut off
        np.testing.assert_allclose(changed_std[below].detach(), 0.2 * std[below].detach(), rtol=1e-4)
    elif "std_range" in change:
        assert changed_std.min().item() == pytest.approx(0.3) and changed_std.max().item() == pytest.approx(0.31)
    else:
        assert numbers(agents[1])["actor.mlp.layers.0.weight"].shape == (16, 20)


# What is told of an update


def test_agent_details_are_by_source() -> None:
    agent, twin = make(random_crop=0), make(random_crop=0)
    rows = batch(0)
    rows["rewards"] = np.where(rows["demo"], 10.0, 0.0).astype(np.float32)  # demonstrations teach much more
    _, info = agent.update(rows, {"critic"}, details=True)
    assert (info["rows/online"], info["rows/demo"], info["rows/human"]) == (4, 4, 2)
    assert info["reward/online"] == 0 and info["reward/demo"] == info["reward/human"] == 10
    assert info["gradient_share/online"] + info["gradient_share/demo"] == pytest.approx(1)
    assert info["gradient_share/demo"] > 0.8 > info["gradient_share/human"] > info["gradient_share/online"]
    assert info["td_error/demo"] > info["td_error/online"]
    mean = (info["q/online"] + info["q/demo"]) / 2
    assert info["q"] == pytest.approx(mean, rel=1e-5)
    _, plain = twin.update(rows, {"critic"})
    assert same(agent, twin) and not any("/" in key for key in plain), "to ask for details changes nothing"
    _, without = make().update({k: v for k, v in rows.items() if k not in ("demo", "source")}, {"critic"}, details=True)
    assert not any("/" in key for key in without)


def test_agent_update_returns_metrics() -> None:
    _, info = make("single-arm-learned-gripper").update(batch(0))
    assert set(info) >= {
        "critic_loss",
        "q",
        "target_q",
        "actor_loss",
        "entropy",
        "temperature_loss",
        "temperature",
        "grasp_critic_loss",
    }
    assert all(type(value) is float and np.isfinite(value) for value in info.values())


# Observations and actions


@pytest.mark.parametrize("mode", MODES)
def test_actions_have_the_layout_of_the_setup_mode(mode: str) -> None:
    agent, n = make(mode), MODES[mode]
    rows = batch(0, actions=n)
    many = agent.sample_actions(rows["observations"])
    one = agent.sample_actions({k: {p: v[0] for p, v in part.items()} for k, part in rows["observations"].items()})
    assert many.shape == (8, n) and one.shape == (n,) and many.dtype == one.dtype == np.float32
    assert (np.abs(many) <= 1).all()
    grippers = {"single-arm-learned-gripper": [6], "dual-arm-learned-gripper": [6, 13]}.get(mode, [])
    assert np.isin(many[:, grippers], (-1, 0, 1)).all()
    free = np.delete(many, grippers, axis=1)  # one that a tanh rounds to 1 is among them on some machines
    assert all(len(set(column)) > 3 for column in free.T), "the others are not three values"
    agent.update(rows)


def test_two_grippers_make_nine_outcomes() -> None:
    layout = ActionLayout("dual-arm-learned-gripper", 14)
    actions = torch.zeros(9, 14)
    actions[:, 6], actions[:, 13] = (
        torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1, 1.0]),
        torch.tensor([-1, 0, 1, -1, 0, 1, -1, 0, 1.0]),
    )
    continuous, outcomes = layout.split(actions + torch.arange(14) * 1e-3)
    assert outcomes is not None and outcomes.tolist() == list(range(9))
    np.testing.assert_allclose(continuous[0], np.array([*range(6), *range(7, 13)]) * 1e-3)
    assert torch.equal(layout.join(torch.zeros(9, 12), outcomes), actions)


def test_the_default_target_entropy_counts_continuous_actions() -> None:
    assert {mode: make(mode).target_entropy for mode in MODES} == {
        "single-arm-learned-gripper": -3.0,
        "dual-arm-learned-gripper": -6.0,
        "single-arm-fixed-gripper": -3.5,
        "dual-arm-fixed-gripper": -7.0,
    }


def test_a_seed_repeats_an_action_and_argmax_draws_nothing() -> None:
    agent, seen = make(), batch(0)["observations"]
    kept = agent.generator.get_state()
    assert np.array_equal(agent.sample_actions(seen, seed=3), agent.sample_actions(seen, seed=3))
    assert np.array_equal(agent.sample_actions(seen, argmax=True), agent.sample_actions(seen, argmax=True))
    assert torch.equal(kept, agent.generator.get_state())
    assert not np.array_equal(agent.sample_actions(seen), agent.sample_actions(seen))


def test_only_the_keys_asked_for_are_seen() -> None:
    agent = Agent.make(*spaces(), config(), image_keys=["images/wrist"], proprio_keys=["state/pose"])
    a, b = batch(0)["observations"], batch(0)["observations"]
    b["images"]["front"], b["state"]["grip"] = a["images"]["front"][::-1], a["state"]["grip"][::-1]
    assert np.array_equal(agent.sample_actions(a, argmax=True), agent.sample_actions(b, argmax=True))
    b["images"]["wrist"] = a["images"]["wrist"][::-1]
    assert not np.array_equal(agent.sample_actions(a, argmax=True), agent.sample_actions(b, argmax=True))
    with pytest.raises(
        UnknownNameError, match=r"image_keys: no image .* named 'images/frnt'; did you mean 'images/front'"
    ):
        Agent.make(*spaces(), config(), image_keys=["images/frnt"])


def test_spaces_of_gymnasium_and_stacks_of_frames() -> None:
    """HIL-SERL's flat observations, a stack of two frames in front."""
    space = gym.Dict({"front": gym.Box(0, 255, (2, 32, 32, 3), np.uint8), "state": gym.Box(-1, 1, (2, 5), np.float32)})
    agent = Agent.make(space, gym.Box(-1, 1, (7,), np.float32), config())
    one = {key: np.asarray(value) for key, value in space.sample().items()}
    assert agent.sample_actions(one).shape == (7,)
    assert agent.sample_actions({key: np.stack([value] * 3) for key, value in one.items()}).shape == (3, 7)
    swapped = {"front": one["front"][::-1].copy(), "state": one["state"]}
    assert not np.array_equal(agent.sample_actions(one, argmax=True), agent.sample_actions(swapped, argmax=True))


def test_agent_refuses_batches_that_do_not_fit() -> None:
    space, action = spaces()
    for given, message in [
        ((gym.Box(-1, 1, (3,), np.float32), action), "expected observations by name"),
        ((space, gym.Box(-2, 2, (7,), np.float32)), "expected actions from -1 to 1, got -2.0 to 2.0"),
        ((space, ArraySpec(np.dtype(np.float32), (2, 7))), "expected actions of one axis"),
        (({"images": space["images"]}, action, config(encoder=EncoderConfig(kind="none"))), "the policy sees nothing"),
        ((space, action, AgentConfig("single-arm")), "no setup_mode named 'single-arm'"),
        ((space, spaces(13)[1], AgentConfig("dual-arm-learned-gripper")), "needs actions of 7 numbers for each arm"),
    ]:
        with pytest.raises((ConfigError, UnknownNameError), match=message):
            Agent.make(*given)
    agent = make()
    with pytest.raises(UnknownNameError, match="no network to update named 'grasp_critic'"):
        agent.update(batch(0), {"grasp_critic"})
    with pytest.raises(MissingFieldError, match="masks: no such field"):
        agent.update({key: value for key, value in batch(0).items() if key != "masks"})
    with pytest.raises(SchemaError, match=r"actions: expected \[B, 7\], got \(8, 6\)"):
        agent.update(batch(0, actions=6))
    with pytest.raises(MissingFieldError, match="images/front: no such field"):
        agent.sample_actions({"state": batch(0)["observations"]["state"]})
    with pytest.raises(ConfigError, match="expected uint8 images"):
        rows = batch(0)
        agent.update(
            {
                **rows,
                "observations": rows["observations"]
                | {"images": {k: v[:, 1:] for k, v in rows["observations"]["images"].items()}},
            }
        )
    with pytest.raises(SchemaError, match="no 'grasp_penalty'"):
        learned = batch(0)
        del learned["grasp_penalty"]
        make("single-arm-learned-gripper").update(learned)


# Features that are kept


def test_features_may_be_kept_of_a_frozen_encoder() -> None:
    agent, twin = make(encoder=FROZEN, random_crop=0), make(encoder=FROZEN, random_crop=0)
    rows = batch(0)
    kept = dict(rows)
    for name in ("observations", "next_observations"):
        features = agent.trunk_features({f"images/{key}": value for key, value in rows[name]["images"].items()})
        assert features.shape == (8, 16) and features.dtype == np.float32
        kept[name] = {"state": rows[name]["state"], "features": features}
    agent.update(rows)
    twin.update(kept)
    for (key, ours), theirs in zip(numbers(agent).items(), numbers(twin).values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=key)
    a = agent.sample_actions(kept["observations"], argmax=True)
    np.testing.assert_allclose(a, agent.sample_actions(rows["observations"], argmax=True), atol=1e-5)
    with pytest.raises(SchemaError, match=r"features: expected \[B, 16\]"):
        agent.update(
            {**kept, "observations": {"state": rows["observations"]["state"], "features": np.zeros((8, 4), np.float32)}}
        )


def test_agent_states_of_a_frozen_encoder_can_be_cached() -> None:
    agents = [make(encoder=FROZEN, random_crop=0) for _ in range(2)]
    rows, features, kept = batch(0), dict(batch(0)), dict(batch(0))
    for name in ("observations", "next_observations"):
        images = {f"images/{key}": value for key, value in rows[name]["images"].items()}
        proprio = {f"state/{key}": value for key, value in rows[name]["state"].items()}
        features[name] = {"state": rows[name]["state"], "features": agents[0].trunk_features(images)}
        kept[name] = {"z": agents[0].states({**images, **proprio})}
        assert kept[name]["z"].shape == (8, agents[0].width) == (8, 20) and kept[name]["z"].dtype == np.float32
    for agent, given in zip(agents, (features, kept), strict=True):
        agent.update(given)
        agent.imitate(given)
    ours, theirs = (numbers(agent) for agent in agents)
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours), "bit for bit"
    actions = [agents[0].sample_actions(given["observations"], argmax=True) for given in (features, kept)]
    assert np.array_equal(*actions)
    with pytest.raises(SchemaError, match=r"z: expected \[B, 20\] as Agent.states makes it, got \(8, 4\)"):
        agents[0].update({**kept, "observations": {"z": np.zeros((8, 4), np.float32)}})


def test_features_do_not_depend_on_the_neighbors() -> None:
    agent, r = make(encoder=FROZEN), np.random.default_rng(0)
    images = {f"images/{key}": r.integers(0, 256, (50, 32, 32, 3), np.uint8) for key in ("front", "wrist")}
    whole = agent.trunk_features(images)
    for n in (1, 2, 17, 49):
        some = r.permutation(50)[:n]
        part = agent.trunk_features({key: value[some] for key, value in images.items()})
        assert np.array_equal(part.view(np.int32), whole[some].view(np.int32))
    with pytest.raises(ConfigError, match="only of an encoder with training=frozen; this one has critic"):
        make().trunk_features(images)
    assert agent.frozen and not make().frozen and not make(encoder=EncoderConfig(kind="none", training="frozen")).frozen


# State


@pytest.mark.parametrize("mode", ["single-arm-fixed-gripper", "dual-arm-learned-gripper"])
def test_a_loaded_state_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    n = MODES[mode]
    agent, other = make(mode), make(mode, seed=5)
    agent.imitate(batch(8, actions=n), encoder=True)
    for seed in range(3):
        agent.update(batch(seed, actions=n))
    state = agent.state_dict()
    save_pt(state, tmp_path / "agent.pt")
    for seed in range(3, 6):
        _, info = agent.update(batch(seed, actions=n))
    agent.imitate(batch(9, actions=n), encoder=True)
    other.load_state_dict(load_pt(tmp_path / "agent.pt"))
    for seed in range(3, 6):
        _, again = other.update(batch(seed, actions=n))
    other.imitate(batch(9, actions=n), encoder=True)
    assert info == again and same(agent, other) and agent.updates == other.updates == 6
    assert (other.actor_updates, other.imitations) == (6, 2)
    seen = batch(0)["observations"]
    assert np.array_equal(agent.sample_actions(seen), other.sample_actions(seen))
    for name, optimizer in agent.optimizers.items():
        assert all(torch.equal(t, other.optimizers[name].tensors()[key]) for key, t in optimizer.tensors().items())


def test_an_actor_needs_only_the_acting_state() -> None:
    agent, actor = make("single-arm-learned-gripper"), make("single-arm-learned-gripper", seed=1)
    agent.update(batch(0))
    state = agent.acting_state()
    assert {key.split(".")[0] for key in state} == {"encoder", "proprio", "actor", "grasp_critic"}
    assert all(value.dtype == np.float32 for value in state.values())
    seen = batch(0)["observations"]
    expected = agent.sample_actions(seen, argmax=True)
    agent.update(batch(1))  # what was handed out stays as it was
    actor.load_acting_state(state)
    assert np.array_equal(actor.sample_actions(seen, argmax=True), expected)
    with pytest.raises(SchemaError, match=r"these weights are of another agent: 'actor\.mlp.*' differs"):
        make("dual-arm-learned-gripper").load_acting_state(state)


def test_equal_seeds_are_equal_and_the_global_generators_stay() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    a, b, c = make(), make(), make(seed=1)
    for agent in (a, b, c):
        agent.update(batch(0))
        agent.imitate(batch(0), encoder=True)
        agent.sample_actions(batch(0)["observations"])
    assert same(a, b) and not same(a, c)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
