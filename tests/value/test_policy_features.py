"""A value model on the frozen features of a policy: of any kind, and never of other weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.policies.base import Policy
from hilt.policies.io.weights_hash import weights_hash
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay import Edits, Log, Schema
from hilt.value.policy_features import FrozenFeatures
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import write_estimates
from hilt.value.value_model import load_value_model
from hilt.value.value_training import train_value
from tests.policies import test_pi0, test_small_vla, tiny_openvla
from tests.value.valued import episode, write_log

CONFIG = SmallVLAConfig(cameras=("full_image",), image_size=16, state_dim=2, width=16, depth=1, heads=2, keypoints=2)


@pytest.fixture(autouse=True)
def suite_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from hilt.policies.vla.observation_adapters import SUITES, columns

    monkeypatch.setitem(SUITES, "lift", columns({"full_image": "images/front", "state": "state"}))


def test_a_model_on_frozen_features(tmp_path: Path):
    policy = SmallVLA(CONFIG, seed=0)
    policy.save_pretrained(tmp_path / "policy")
    path = write_log(tmp_path / "log", 16)
    config = ValueConfig(policy=str(tmp_path / "policy"), hidden=16, steps=20, evaluate_every=10, batch_size=16)
    with ValueEpisodes([path]) as episodes:
        made = train_value(episodes, config, tmp_path / "value")
        assert made is not None and made.metadata["features"]["width"] == 16 and not made.inputs.cameras
        again = load_value_model(tmp_path / "value")
        assert (again.predict(episodes, 3).value == made.predict(episodes, 3).value).all()
        assert write_estimates(again, episodes).episodes == 16
        one = episodes.episodes[2]
        seen = one.log.read(one.keys[4:5], ["observations"])["observations"]
        observation = {"full_image": seen["images"]["front"][0], "state": seen["state"][0], "instruction": "lift it"}
        found = FrozenFeatures(config.policy)(episodes, np.array([[2, 4]]))
        torch.testing.assert_close(found, policy.features([observation]))
    SmallVLA(CONFIG, seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "policy" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its weights have the hash .* trained on features of"):
        load_value_model(tmp_path / "value")


class Looks:
    """Counts the observations that policies look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, features = 0, SmallVLA.features

        def counted(policy: SmallVLA, observations: Any) -> torch.Tensor:
            self.count += len(observations)
            return features(policy, observations)

        monkeypatch.setattr(SmallVLA, "features", counted)

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


def test_each_step_is_looked_at_once_whoever_needs_its_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, looks = SmallVLA(CONFIG, seed=0), Looks(monkeypatch)
    policy.save_pretrained(tmp_path / "policy")
    path = write_log(tmp_path / "log", 12)
    config = ValueConfig(policy=str(tmp_path / "policy"), hidden=16, steps=4, evaluate_every=2, batch_size=16)
    with ValueEpisodes([path]) as episodes:
        steps = sum(map(len, episodes))
        made = train_value(episodes, config, tmp_path / "value")
        assert made is not None and looks.taken() == steps
        write_estimates(made, episodes)
        train_value(episodes, replace(config, seed=1), tmp_path / "second")
    loaded = load_value_model(tmp_path / "value")
    with ValueEpisodes([path]) as episodes:
        np.testing.assert_array_equal(loaded.predict(episodes, 3).value, made.predict(episodes, 3).value)
        Edits(episodes.logs[0]).trim(4, first=3)
        Edits(episodes.logs[0]).instruction(5, "lift the blue one")
    with ValueEpisodes([path]) as episodes:
        assert loaded.extractor._policy is None and looks.taken() == 0, "nobody has loaded the policy again"
        loaded.predict(episodes, 4)
        assert looks.taken() == 0, "a trimmed episode has some of its steps"
        before = made.predict(episodes, 5).value
        assert looks.taken() == len(episodes.episodes[5]), "it was asked for something else"
        assert np.abs(before - loaded.predict(episodes, 5).value).max() == 0 == looks.taken()
        one = FrozenFeatures(config.policy, columns={"full_image": "images/front", "state": "state"})
        one(episodes, np.array([[2, 4], [1, 0], [2, 4], [2, 1]]))
        assert looks.taken() == 3, "other names are other features, and the same step is looked at once"
    log = write_log(tmp_path / "again", 12)
    with ValueEpisodes([log]) as episodes:
        loaded.predict(episodes, 0)
        assert looks.taken() == len(episodes.episodes[0]), "another log has its own"


def test_features_that_a_log_has_as_a_column_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, looks = SmallVLA(CONFIG, seed=0), Looks(monkeypatch)
    policy.save_pretrained(tmp_path / "policy")
    rng, weights = np.random.default_rng(0), weights_hash(tmp_path / "policy")
    columns = episode(0, True, rng)
    known = rng.normal(size=(len(columns["rewards"]), 1, 16)).astype(np.float32)
    columns["observations"]["base_policy"] = {weights: {"features": known}}
    with Log.create(tmp_path / "log", Schema.of(columns, leading=2), durability="never") as log:
        for _ in range(2):
            log.add(columns, facts={"success": True, "task": "lift", "language_instruction": "lift it"})
    rows = np.array([[0, 5], [1, 2], [0, 1]])
    plain, same = FrozenFeatures(str(tmp_path / "policy")), FrozenFeatures(str(tmp_path / "policy"), "lift")
    with ValueEpisodes([tmp_path / "log"]) as episodes:
        for features in (plain, same):
            np.testing.assert_array_equal(features(episodes, rows), known[[5, 2, 1], 0])
        assert looks.taken() == 0 and not (tmp_path / "log" / "features").exists()
        named = FrozenFeatures(str(tmp_path / "policy"), columns={"full_image": "images/front", "state": "state"})
        named(episodes, rows)
        assert looks.taken() == 3, "the column has those of the names of the task"
        Edits(episodes.logs[0]).instruction(1, "leave it")
        plain(episodes, rows)
        assert looks.taken() == 1, "the column has those of what was to be done then"


@pytest.mark.parametrize("kind", ["small_vla", "openvla", "openvla-oft", "sde", "pi05", "smolvla"])
def test_every_policy_gives_features_of_each_row_by_itself(kind: str):
    # "sde" is a pi0
    if kind == "small_vla":
        policy, rows = test_small_vla.made("tokens"), test_small_vla.seen(3)
    elif kind.startswith("openvla"):
        policy, rows = tiny_openvla.tiny(causal=kind == "openvla"), tiny_openvla.observations(3)
    else:
        policy, rows = test_pi0.made(kind), test_pi0.seen(3)
    found = policy.eval().features(rows)
    assert found.ndim == 2 and len(found) == 3 and found.shape[1] >= 8 and found.isfinite().all()
    assert not found.requires_grad and (found[0] - found[2]).abs().max() > 1e-3
    torch.testing.assert_close(policy.features(rows[2:]), found[2:], atol=1e-4, rtol=1e-3)
    assert "features" not in policy.act(rows, sample=False)[1]
    policy.keeps_features = True
    _, record = policy.act(rows, sample=False)
    if kind.startswith("openvla"):
        assert "features" not in record, "it takes two looks at an observation"
    else:
        assert record["features"].dtype == np.float32
        np.testing.assert_allclose(record["features"], found.numpy(), atol=1e-4, rtol=1e-3)


def test_a_policy_without_features_is_refused():
    class Silent(SmallVLA):
        features = Policy.features  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="Silent gives no features"):
        Silent(CONFIG).features([])
