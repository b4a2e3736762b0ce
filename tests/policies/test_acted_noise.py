"""Noise that becomes actions where a frozen policy acts: that of an actor, and the draws that come with each frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.core.validate import check
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE, ConditionedPolicy
from hilt.policies.frozen.acted_noise import ActedNoise
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import FrozenOptions, frozen_options
from hilt.policies.registry import load_policy
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from tests.policies import test_pi0

torch.set_num_threads(1)
KINDS = {"pi0": "sde", "pi05": "pi05", "smolvla": "smolvla"}
COLUMNS = {"full_image": "images/front", "wrist_image": "images/wrist", "state": "state"}
WIDTH, HORIZON = 5, 4
"""Numbers of noise of an action of these tiny policies, and actions of a plan"""


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tiny policies that have learned nothing."""
    place = tmp_path_factory.mktemp("policies")
    for name, kind in KINDS.items():
        policy = test_pi0.made(kind)
        rows = np.random.default_rng(0).normal(0, 0.2, (50, 2))  # few actions are cut off at -1 and 1
        policy.use_statistics({"action": statistics(rows)})
        policy.save_pretrained(place / name)
    return {name: place / name for name in KINDS}


def base_of(folder: Path, chunk: int = 2, **options: Any) -> FrozenBase:
    given = {"policy": str(folder), "columns": COLUMNS, "instruction": "push", "space": "noise", **options}
    return FrozenBase(frozen_options(given), chunk)


def frames(count: int, seed: int = 0) -> dict[str, Any]:
    """Observations of a task."""
    r = np.random.default_rng(seed)
    images = {name: r.integers(0, 255, (count, 28, 28, 3), np.uint8) for name in ("front", "wrist")}
    return {"images": images, "state": r.normal(size=(count, 3)).astype(np.float32)}


def frame(tree: dict[str, Any], place: int) -> dict[str, Any]:
    return {"images": {name: each[place] for name, each in tree["images"].items()}, "state": tree["state"][place]}


@pytest.mark.parametrize("kind", ["words", "embedding"])
def test_noise_of_a_policy_with_a_condition(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    policy = ConditionedPolicy(load_policy(folders["pi0"]), guidance=1.5, kind=kind)
    with pytest.raises(ConfigError, match=r"guidance=1\.5 mixes two flows"):
        policy.act_from([], np.zeros(0))
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"acts with guidance=1\.5.*Give agent\.options\.policy_options\.guidance=1"):
        base_of(tmp_path / "policy")
    base = base_of(tmp_path / "policy", policy_options={"guidance": 1, "tokenizer_max_length": 40})
    assert base.acted is not None and base.acted.width == WIDTH and base.policy.policy.keeps_context
    rows = base.rows(frames(3), ["push"] * 3)
    start = np.random.default_rng(1).normal(size=(3, HORIZON, WIDTH)).astype(np.float32)
    found = base.policy.act_from(rows, start)
    bad = base.policy.act_from([{**row, ADVANTAGE: NEGATIVE} for row in rows], start)
    if kind == "words":
        said = [{**row, "instruction": f"push. {POSITIVE}"} for row in rows]
        np.testing.assert_allclose(
            found, load_policy(folders["pi0"], tokenizer_max_length=40).act_from(said, start), atol=1e-5
        )
        assert np.abs(found - bad).max() > 1e-6
    assert found.shape[:1] == (3,)
    base.of_many(frames(3), ["push"] * 3)
    assert base.policy.policy._last._last is None, "what it has read is freed after an episode"


@pytest.mark.parametrize("name", KINDS)
def test_noise_becomes_what_the_policy_makes_of_it(folders: dict[str, Path], name: str) -> None:
    base = base_of(folders[name])
    assert base.acted is not None and base.acted.width == WIDTH
    rows = base.rows(frames(3), ["push"] * 3)
    noise = np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32)
    found = base.acted.actions(rows, noise)
    start = np.repeat(noise[:, None], HORIZON, axis=1)  # each action of the plan begins with it
    np.testing.assert_array_equal(found, np.clip(base.policy.act_from(rows, start)[:, :2], -1, 1))
    np.testing.assert_array_equal(base.acted.actions(rows, 0 * noise), base.columns(rows)["actions"])
    assert np.abs(base.acted.actions(rows, -noise) - found).max() > 1e-3
    each = base_of(folders[name], repeat_noise=False).acted
    assert each is not None and each.width == HORIZON * WIDTH
    np.testing.assert_array_equal(each.actions(rows, start.reshape(3, -1)), found)


def test_draws_belong_to_a_frame_and_stay_within_the_bound(folders: dict[str, Path]) -> None:
    base, tree = base_of(folders["pi0"], noise_samples=3, noise_bound=0.7), frames(4)
    columns = base.of_many(tree, ["push"] * 4)
    noise, actions = columns["noise"], columns["noise_actions"]
    assert noise.shape == (4, 3, WIDTH) and actions.shape == (4, 3, 2, 2)
    assert np.abs(noise).max() == np.float32(0.7) and len(np.unique(noise[np.abs(noise) < 0.7])) > 20
    for place in range(4):
        one = base.of_one(frame(tree, place), "push")
        np.testing.assert_array_equal(one["noise"], noise[place], err_msg="the same frame, the same draws")
        np.testing.assert_allclose(one["noise_actions"], actions[place], atol=1e-5)
    assert base.acted is not None
    rows = base.rows(tree, ["push"] * 4)
    np.testing.assert_array_equal(base.acted.actions(rows, noise[:, 1]), actions[:, 1])
    assert "noise" not in base.columns(rows), "who only acts asks for none"
    assert set(base_of(folders["pi0"], noise_samples=0).of_one(frame(tree, 0), "push")) == {
        *("features", "actions", "state")
    }


def test_a_frame_is_read_once_for_its_plan_and_all_draws(folders: dict[str, Path]) -> None:
    base, read = base_of(folders["smolvla"], noise_samples=2), []
    once = base.policy.prefix
    base.policy.prefix = lambda *given, **named: read.append(1) or once(*given, **named)
    try:
        base.of_one(frame(frames(1, seed=8), 0), "push")
        assert base.acted is not None
        base.acted.actions(base.rows(frames(1, seed=8), ["push"]), np.ones((1, WIDTH)))
        assert len(read) == 1, "the noise of the actor is of the same frame"
        base.of_many(frames(5, seed=9), ["push"] * 5)
        assert len(read) == 2
    finally:
        del base.policy.prefix


def test_a_log_has_the_draws_that_are_asked_for(folders: dict[str, Path]) -> None:
    base = base_of(folders["pi0"], noise_samples=3)
    assert base.acted is not None
    columns = base.of_many(frames(2), ["push"] * 2)
    assert base.acted.sampled(columns) and not base.acted.sampled({"actions": columns["actions"]})
    fewer = base_of(folders["pi0"], noise_samples=2).acted
    assert fewer is not None and not fewer.sampled(columns)
    none = base_of(folders["pi0"], noise_samples=0).acted
    assert none is not None and none.sampled({})


def test_what_an_update_can_compute_is_not_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    sizes = {"cameras": ["full_image", "wrist_image"], "image_size": 16, "state_dim": 3, "action_dim": 2, "chunk": 3}
    flow = {**sizes, "width": 32, "depth": 1, "keypoints": 2, "head": "flow"}
    SmallVLA(SmallVLAConfig.from_json(flow), seed=0).save_pretrained(tmp_path / "flow")
    assert base_of(tmp_path / "flow").acted is None
    assert base_of(tmp_path / "flow", space="edit").acted is base_of(folders["pi0"], space="edit").acted is None
    asked = base_of(tmp_path / "flow", noise_gradient="critic").acted
    assert isinstance(asked, ActedNoise) and asked.width == 2
    with pytest.raises(ConfigError, match=r"noise_samples=4 would do nothing: the actor learns through the flow"):
        base_of(tmp_path / "flow", noise_samples=4)
    SmallVLA(SmallVLAConfig.from_json({**flow, "knots": 2}), seed=0).save_pretrained(tmp_path / "knots")
    assert base_of(tmp_path / "knots").acted is not None, "its flow decides knots"
    SmallVLA(SmallVLAConfig.from_json({**flow, "head": "tokens"}), seed=0).save_pretrained(tmp_path / "bins")
    with pytest.raises(ConfigError, match="does not compute its actions by a flow, whose noise an agent could decide"):
        base_of(tmp_path / "bins")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"noise_gradient": "flow", "noise_samples": 2}, "noise_samples=2 would do nothing"),
        ({"noise_gradient": "flow", "repeat_noise": False}, "repeat_noise=False would do nothing"),
        ({"space": "edit", "noise_gradient": "critic"}, "noise_gradient=critic would do nothing"),
        ({"noise_gradient": "both"}, "both"),
        ({"noise_samples": -1}, "noise_samples=-1: expected a whole number of at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    made = FrozenOptions(**{"policy": str(tmp_path), "space": "noise", **options})
    with pytest.raises((ConfigError, KeyError), match=error):
        check(made, "agent.options")
