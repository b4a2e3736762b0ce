"""ACT keeps the protocol of policies: it acts with z = 0, learns a chunk, comes back from its folder, and is refused
where log-probabilities are needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos.adam import Adam
from hilt.core.errors import ConfigError, SchemaError
from hilt.policies.act.act_config import ACTConfig
from hilt.policies.act.act_policy import ACT
from hilt.policies.base import Prefix, select
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import frozen_options
from hilt.policies.registry import is_new, load_policy, new_policy
from hilt.value.best_of import BestOf, ChunkVerifier
from hilt.value.value_model import load_value_model
from hilt.vla.config import Vla
from tests.policies.differences import assert_gradients
from tests.value.chosen import save_verifier

SIZES: dict[str, Any] = {
    "cameras": ("full_image", "wrist_image"), "image_size": 32, "state_dim": 3, "chunk": 4, "action_dim": 2,
    "width": 16, "depth": 2, "heads": 2, "keypoints": 3, "latent": 4,
}  # fmt: skip
TEXTS = ["touch the red cube", "touch the blue one", "open"]


def made(**more: Any) -> ACT:
    return ACT(ACTConfig(**SIZES | more), seed=1)


def seen(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {
            "full_image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "wrist_image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "state": random.normal(size=3).astype(np.float32),
            "instruction": TEXTS[row % 3],
        }
        for row in range(rows)
    ]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shown(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks, and a mask under which the second row ends after one action."""
    actions = np.random.default_rng(1).uniform(-1, 1, (rows, 4, 2)).astype(np.float32)
    mask = np.ones((rows, 4), bool)
    mask[1, 1:] = False
    return actions, mask


@pytest.mark.parametrize("more", [{}, {"vision": "patches", "keypoints": 8}, {"state_dim": 0}, {"decoder_depth": 2}])
def test_acting_is_of_style_0_and_sampling_of_a_drawn_one(more: dict[str, Any]):
    policy = made(**more)
    likeliest, record = policy.act(seen(5), sample=False)
    assert likeliest.shape == (5, 4, 2) and likeliest.dtype == np.float32 and np.abs(likeliest).max() <= 1
    assert np.array_equal(policy.act(seen(5), sample=False)[0], likeliest) and not record["style"].any()
    assert "log_prob" not in record
    drawn, record = policy.act(seen(5), generator=generator())
    assert np.abs(drawn - likeliest).max() > 1e-4 and record["style"].std() > 0.5
    assert np.array_equal(policy.act(seen(5), generator=generator())[0], drawn)
    hotter = policy.act(seen(5), temperature=2.0, generator=generator())[1]
    assert np.array_equal(hotter["style"], 2 * record["style"]) and hotter["temperature"].tolist() == [2.0] * 5
    # a row does not depend on its neighbors
    np.testing.assert_allclose(policy.act(seen(5)[3:], sample=False)[0], likeliest[3:], rtol=0, atol=1e-5)
    assert policy.features(seen(5)).shape == (5, 16)


def test_validation_is_the_error_of_what_it_does():
    """In evaluation mode the loss is that of the actions of `act`, whatever the posterior says."""
    policy = made()
    policy.fit(np.zeros((2, 3)), np.array([[-2.0, 0.0], [2.0, 0.5]]))
    actions, mask = shown(6)
    actions = actions * [2.0, 0.25] + [0.0, 0.25]
    done, _ = policy.act(seen(6), sample=False)
    wanted = (np.abs(done - actions) / [2.0, 0.25])[mask].mean()
    loss, figures = policy.eval().supervised_loss(seen(6), actions, mask)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5) and figures["l1"] == figures["loss"]
    trained, figures = policy.train().supervised_loss(seen(6), actions, mask, generator())
    whole = figures["l1"] + 10 * figures["style_kl"]
    assert figures["style_kl"] > 0 and float(trained.detach()) == pytest.approx(whole, rel=1e-5)
    light = ACT.supervised_loss(reweighted(policy, 0.0), seen(6), actions, mask, generator())[1]
    assert light["loss"] == pytest.approx(figures["l1"], rel=1e-6), "kl_weight=0 leaves the error alone"


def reweighted(policy: ACT, weight: float) -> ACT:
    policy.config = replace(policy.config, kl_weight=weight)
    return policy


def test_everything_is_trained_and_nothing_by_what_was_not_shown():
    policy = made()
    actions, mask = shown(6)
    loss, _ = policy.supervised_loss(seen(6), actions, mask, generator())
    loss.backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()] == []
    actions[1, 1:] = np.nan
    again, _ = policy.supervised_loss(seen(6), actions, mask, generator())
    assert float(again.detach()) == float(loss.detach())
    actions[1, 0] += 0.1  # of what was shown, the style knows
    assert float(policy.supervised_loss(seen(6), actions, mask, generator())[0].detach()) != float(loss.detach())


def test_it_learns_chunks_that_depend_on_the_state():
    policy, rows = made(chunk=2, depth=1), seen(8)
    actions = np.stack([[row["state"][:2], -row["state"][:2]] for row in rows]).clip(-1, 1)
    mask, draws = np.ones((8, 2), bool), generator()
    parameters = [p for p in policy.parameters() if p.requires_grad]
    adam = Adam(parameters, 1e-2)
    before = np.abs(policy.act(rows, sample=False)[0] - actions).mean()
    for _ in range(60):
        loss, _ = policy.supervised_loss(rows, actions, mask, draws)
        adam.step(torch.autograd.grad(loss, parameters))
    assert np.abs(policy.act(rows, sample=False)[0] - actions).mean() < 0.5 * before


def test_a_folder_gives_the_same_policy_back(tmp_path: Path):
    policy = made(kl_weight=3.0)
    policy.fit(np.random.default_rng(0).normal(size=(9, 3)), np.random.default_rng(1).normal(size=(9, 2)))
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert isinstance(again, ACT) and again.config == policy.config and again.config.kl_weight == 3.0
    assert np.array_equal(again.act(seen(3), sample=False)[0], policy.act(seen(3), sample=False)[0])
    assert load_policy(tmp_path / "policy", kl_weight=1.0).config.kl_weight == 1.0
    with pytest.raises(ConfigError, match="ACT has no setting 'kl_wait'; did you mean 'kl_weight'"):
        load_policy(tmp_path / "policy", kl_wait=1.0)


def test_shifted_images_are_for_training_alone():
    policy, (actions, mask) = made(shift=4), shown(4)
    plain = made()
    assert (
        policy.supervised_loss(seen(4), actions, mask, generator())[1]
        != plain.supervised_loss(seen(4), actions, mask, generator())[1]
    )
    losses = [each.eval().supervised_loss(seen(4), actions, mask)[1] for each in (policy, plain)]
    assert losses[0] == losses[1]


def test_it_is_made_by_its_name_with_the_sizes_of_the_data():
    sizes = {"cameras": ["full_image"], "image_size": 32, "state_dim": 3, "action_dim": 2}
    policy = new_policy("act", sizes, {"width": 16, "heads": 2, "chunk": 3}, 0)
    assert is_new("act") and isinstance(policy, ACT) and (policy.chunk, policy.action_dim) == (3, 2)
    assert policy.observed_fields().cameras == ("full_image",)
    with pytest.raises(ConfigError, match="the observations have no picture: ACT looks at one at least"):
        new_policy("act", {**sizes, "cameras": [], "image_size": 0}, {}, 0)


def test_post_training_is_refused_before_it_begins(tmp_path: Path):
    made().save_pretrained(tmp_path / "policy")
    for policy in ("act", str(tmp_path / "policy")):
        with pytest.raises(ConfigError, match=r"this ACT has no log-probabilities .* such as a small_vla"):
            Vla(policy=policy, tasks=["tabletop/reach"], task_options={"step_limit": 9})._check_policy()
    with pytest.raises(ConfigError, match="ACT has no log-probabilities of actions"):
        made().evaluate({})


def test_a_folder_of_another_act_is_refused(tmp_path: Path):
    made().save_pretrained(tmp_path / "policy")
    config = tmp_path / "policy/config.json"
    config.write_text(json.dumps({"type": "act", "chunk_size": 100}))
    with pytest.raises(ConfigError, match=r"the ACT in it is not of Hilt.*hilt train sft DATA policy=act"):
        load_policy(tmp_path / "policy")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": 15}, "width is 15; expected an even multiple of heads, which is 2"),
        ({"image_size": 40}, "and a multiple of 16 pixels"),
        ({"latent": 0}, "latent"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"vision": "patches"}, "keypoints=3"),
    ],
)
def test_settings_that_cannot_be_are_named(change: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        ACTConfig(**SIZES | change)


def test_what_it_cannot_do_is_said():
    policy, (actions, mask) = made(), shown(2)
    with pytest.raises(ConfigError, match="chance needs a generator"):
        policy.act(seen(1))
    with pytest.raises(ConfigError, match="chance needs a generator"):
        policy.supervised_loss(seen(2), actions, mask)
    with pytest.raises(ConfigError, match="this ACT cannot continue one"):
        policy.act(seen(1), sample=False, prefix=Prefix(np.zeros((1, 2, 2), np.float32), np.array([1])))
    with pytest.raises(ConfigError, match="max_delay=2: ACT cannot be trained with given actions"):
        ACT.delay_options(2)
    with pytest.raises(SchemaError, match=r"actions of the shape \[2, 3, 2\]"):
        policy.supervised_loss(seen(2), actions[:, :3], mask[:, :3], generator())
    with pytest.raises(SchemaError, match="state_mean has 3 numbers by the config"):
        policy.fit(np.zeros((2, 4)), np.zeros((2, 2)))
    _, record = policy.act(seen(3), sample=False)
    assert select(record, [0])["style"].shape == (1, 4)


def test_gradients_equal_finite_differences():
    policy, (actions, mask) = made().double(), shown(3)
    assert_gradients(policy, lambda: policy.supervised_loss(seen(3), actions, mask, generator())[0], directions=2)


def test_bfloat16_is_near_float32():
    exact, near = (made(precision=precision).act(seen(4), sample=False)[0] for precision in ("float32", "bfloat16"))
    assert exact.dtype == near.dtype == np.float32 and 0 < np.abs(exact - near).max() < 0.02


def test_best_of_several_chunks_and_a_correction_beside_it_take_it_as_any_policy(tmp_path: Path):
    policy = made()
    policy.save_pretrained(tmp_path / "policy")
    verifier = save_verifier(tmp_path / "verifier", {"state": "state"}, 3, 2, 2)
    best = BestOf(policy, ChunkVerifier(load_value_model(verifier)), 3)
    actions, record = best.act(seen(2), sample=False)
    assert actions.shape == (2, 4, 2) and record["style"].shape == (2, 4) and best.acting_figures()["plans"] == 2
    names = {"full_image": "images/top", "wrist_image": "images/wrist", "state": "state"}
    frozen = FrozenBase(frozen_options({"policy": str(tmp_path / "policy"), "columns": names}), chunk=2)
    columns = frozen.columns(seen(2))
    assert columns["features"].shape == (2, 16)
    np.testing.assert_allclose(columns["actions"], policy.act(seen(2), sample=False)[0][:, :2], atol=1e-6)
