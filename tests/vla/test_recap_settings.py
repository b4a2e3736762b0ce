"""A policy that learns from good and bad episodes alike acts as in the good ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.observe.metrics import read_metrics
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, UNKNOWN, ConditionedPolicy
from hilt.runs import checkpoint
from hilt.vla import sft
from hilt.vla.recap.recap_settings import Recap
from hilt.vla.sft import Sft
from tests.vla.signs import NAMES, TINY, means, write_advantages, write_signs


def config(log: Path, **changes: Any) -> Sft:
    made = Sft(data=[str(log)], columns=NAMES, policy_options=TINY, validation=0.1, validation_period=50)
    made.max_steps, made.batch_size, made.learning_rate = 250, 32, 3e-3
    made.recap = Recap(threshold=0.4, **changes)
    return made


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_signs(tmp_path_factory.mktemp("signs") / "log", 120)
    write_advantages(path)
    return path


@pytest.fixture(scope="module")
def run(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "recap"
    sft.train(sft.begin_run(place, "", config(log)), place)
    return place


def test_good_actions_are_asked_for(run: Path):
    policy = sft.open_policy(run, sft.KIND.frozen(run)).eval()
    assert isinstance(policy, ConditionedPolicy) and policy.guidance == 1
    low, high = means(policy)
    assert low < -0.5 and high > 0.5
    low, high = means(policy, **{ADVANTAGE: NEGATIVE})  # it has learned what is bad, too
    assert low > 0.3 and high < -0.3
    low, high = means(policy, **{ADVANTAGE: UNKNOWN})  # without a condition: what was logged, of both signs
    assert abs(low) < 0.4 and abs(high) < 0.4


def test_an_embedding_is_learned_as_the_condition_and_goes_on_bit_for_bit(log: Path, tmp_path: Path):
    place, settled = tmp_path / "run", config(log, condition="embedding", guidance=1.5)
    sft.train(sft.begin_run(place, "", settled), place)
    policy = sft.open_policy(place, sft.KIND.frozen(place)).eval()
    assert isinstance(policy, ConditionedPolicy) and (policy.kind, policy.guidance) == ("embedding", 1.5)
    low, high = means(policy)
    assert low < -0.5 and high > 0.5
    low, high = means(policy, **{ADVANTAGE: NEGATIVE})
    assert low > 0.3 and high < -0.3
    last = [row for row in read_metrics(place / "metrics.jsonl") if "validation_loss" in row][-1]
    assert last["validation_loss_of_wrong_condition"] > last["validation_loss"] + 0.5, last
    weights = []
    for name, stops in (("whole", [8]), ("cut", [5, 8])):
        for steps in stops:
            shorter = config(log, condition="embedding")
            shorter.max_steps, shorter.checkpoint_period = steps, 1
            run = tmp_path / name
            settled = sft.begin_run(run, "", shorter) if not sft.is_run(run) else shorter
            sft.train(settled, run)
        weights.append(dict(checkpoint.load(run, 8).agent["trained"]))
    assert "policy.condition_embedding.weight" in weights[0]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_metrics_tell_that_the_condition_makes_a_difference(run: Path):
    validated = [row for row in read_metrics(run / "metrics.jsonl") if "validation_loss" in row]
    last = validated[-1]
    assert last["validation_loss_of_wrong_condition"] > last["validation_loss"] + 0.5, last


def test_a_run_goes_on_from_a_conditioned_policy_with_guidance(run: Path, log: Path, tmp_path: Path):
    changed = config(log, guidance=1.5)
    changed.policy, changed.policy_options, changed.max_steps = str(run / "policy"), {}, 1
    sft.train(sft.begin_run(tmp_path / "more", "", changed), tmp_path / "more")
    policy = sft.open_policy(tmp_path / "more", changed).eval()
    assert isinstance(policy, ConditionedPolicy) and policy.guidance == 1.5
    assert not isinstance(policy.policy, ConditionedPolicy)
    low, high = means(policy)
    assert low < -0.5 and high > 0.5


@pytest.mark.parametrize("wrong", [1.0, 1.5, -0.2])
def test_a_threshold_outside_is_refused(log: Path, wrong: float):
    changed = config(log)
    changed.recap.threshold = wrong
    with pytest.raises(ConfigError, match=r"recap\.threshold=.*expected a number"):
        changed.check()


def test_settings_that_would_do_nothing_are_refused(log: Path):
    changed = config(log)
    changed.recap = Recap(guidance=2.0)
    with pytest.raises(ConfigError, match=r"recap\.guidance.*needs recap\.threshold above 0"):
        changed.check()


def test_missing_advantages_are_an_error_before_training(tmp_path: Path):
    path = write_signs(tmp_path / "log", 6)
    sft.begin_run(tmp_path / "run", "", config(path))
    with pytest.raises(ConfigError, match="it has no advantages"):
        sft.train(config(path), tmp_path / "run")
