"""Document 004 (SimpleVLA-RL): `Role.RewardModel` is "optional, PRIME or normal". PRIME
in a run, and by the document's command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, SeveralErrors
from hilt.observe.metrics import read_metrics
from hilt.policies.io.tensor_files import Tensors
from hilt.recipes.simplevla_run import simplevla
from hilt.runs import checkpoint
from hilt.vla.config import Vla
from hilt.vla.footprint import footprint
from hilt.vla.train import begin_run, resume_run, train
from tests.cli.test_train_simplevla import COMMAND, MODEL, folder, run  # noqa: F401  # a fixture
from tests.recipes.test_simplevla_run import COMMAND as DOCUMENT
from tests.vla.toy_vla import config

QUIET = ("validation.before=false", "validation.period=0", "validation.after=false")
RM = "reward_model."
ON = ["prime.coefficient=1", "prime.beta=0.3"]


def updates(folder: Path) -> list[dict[str, Any]]:  # noqa: F811
    return [record for record in read_metrics(folder, ["update"]) if "policy_loss" in record]


def started(folder: Path, *changes: str) -> list[dict[str, Any]]:  # noqa: F811
    settings = config(*changes, *QUIET)
    begin_run(folder, "toy", settings)
    train(settings, folder)
    return updates(folder)


def same(a: Path, b: Path) -> bool:
    first, second = Tensors(a), Tensors(b)
    return set(first) == set(second) and all(
        np.array_equal(first[name].numpy(), second[name].numpy()) for name in first
    )


# --- in a run ---


def test_a_run_with_process_rewards_and_on_from_where_it_stopped_bit_for_bit(tmp_path: Path):
    told = started(tmp_path / "whole", *ON, "max_steps=2", "checkpoint_period=1")
    assert [
        math.isfinite(record[name]) for record in told for name in ("prime_loss", "prime_accuracy", "prime_reward")
    ] == [True] * 6
    assert told[0]["prime_reward"] == pytest.approx(0, abs=1e-4) and abs(told[1]["prime_reward"]) > 1e-3, (
        "it begins as its reference is"
    )
    started(tmp_path / "part", *ON, "max_steps=1", "checkpoint_period=1")
    train(resume_run(tmp_path / "part", "", ["max_steps=2"]), tmp_path / "part")
    assert same(tmp_path / "part/policy", tmp_path / "whole/policy")
    saved = [checkpoint.load(tmp_path / name, 2).agent["shared"]["prime"]["trained"] for name in ("part", "whole")]
    assert all(np.array_equal(saved[0][name], saved[1][name]) for name in saved[1]), "the reward policy, too"
    started(tmp_path / "plain", "max_steps=2")
    assert not same(tmp_path / "plain/policy", tmp_path / "whole/policy")


SHARED = [*ON, "max_steps=2", "collect.data_batch_size=8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return started(tmp_path_factory.mktemp("plain") / "run", *SHARED)


@pytest.mark.parametrize(
    "change",
    [
        "prime.granularity=token",
        "prime.scale=none",
        "prime.update=before",
        "prime.reference=policy",
        "prime.optimizer.learning_rate=0.1",
    ],
)
def test_each_setting_changes_the_run(change: str, tmp_path: Path, plain: list[dict[str, Any]]):
    other = started(tmp_path / "other", *SHARED, change)
    names = ("prime_loss", "prime_reward", "policy_loss", "prime_learning_rate")
    assert [[record[name] for name in names] for record in plain] != [
        [record[name] for name in names] for record in other
    ]


def test_reward_policy_and_reference_of_folders(tmp_path: Path):
    started(tmp_path / "first", "max_steps=2")
    policy = f"prime.policy={tmp_path / 'first/policy'}"
    told = started(tmp_path / "fixed", *ON[:1], policy, "prime.update=none", "max_steps=1", "lora.rank=2")
    assert told[0]["prime_reward"] != 0 and "prime_loss" not in told[0], (
        "trained before, it rewards from the first step and stays as it is"
    )
    equal = [policy, f"prime.reference_policy={tmp_path / 'first/policy'}", "reference.offload=true"]
    told = started(tmp_path / "equal", *ON, *equal, "max_steps=1")
    assert told[0]["prime_reward"] == pytest.approx(0, abs=1e-4)
    with pytest.raises(ConfigError, match=r"prime.policy=nowhere: expected the folder of a checkpoint"):
        config(*ON, "prime.policy=nowhere").check()


def test_what_would_do_nothing_is_refused_and_memory_is_counted():
    for changes, says in (
        (["prime.beta=0.1"], "prime.beta=0.1 would do nothing: it needs prime.coefficient above 0"),
        (
            [*ON, "prime.reference=policy", "reference.offload=true"],
            "offload=True would do nothing: it needs algorithm.kl.where",
        ),
        ([*ON, "solved_steps=3"], "solved_steps=3 would do nothing: it needs .*prime.coefficient=0"),
        ([*ON, "algorithm.estimator=remax"], "prime.coefficient with algorithm.estimator=remax"),
    ):
        with pytest.raises(ConfigError, match=says):
            config(*changes).check()
    lines = list(footprint(config(*ON)))
    assert [line.partition(" with ")[0] for line in lines[:3]] == [
        f"memory of the {role}" for role in ("policy, in training", "reference", "reward policy, in training")
    ]


# --- by the document's command line ---


def settings(*words: str) -> Vla:
    return simplevla([*DOCUMENT, *words], {"SFT_MODEL_PATH": "/models/sft"}).config


def test_the_keys_of_prime_in_the_documents_command_line():
    """The values of PRIME's own script, beside those of the document."""
    made = settings(
        "algorithm.adv_estimator=rloo",
        f"{RM}rm_type=prime",
        f"{RM}rm_coef=5",
        f"{RM}prime_model.path=/models/sft",
        f"{RM}prime_model.ref_path=/models/sft",
        f"{RM}model.input_tokenizer=null",
        f"{RM}prime_model.input_tokenizer=null",
        f"{RM}prime_granularity=token",
        f"{RM}micro_batch_size=8",
        f"{RM}prime_model.update=after",
        f"{RM}prime_model.beta_train=0.05",
        f"{RM}prime_model.optim.lr=1e-6",
        f"{RM}prime_model.optim.grad_clip=10.0",
    )
    prime = made.prime
    assert (prime.coefficient, prime.beta, prime.granularity, prime.scale) == (5, 0.05, "token", "batch")
    assert (prime.update, prime.policy, prime.reference, prime.reference_policy) == ("after", "", "frozen", ""), (
        "the policy's own folder"
    )
    assert (prime.optimizer.learning_rate, prime.optimizer.gradient_clip, prime.optimizer.weight_decay) == (1e-6, 10, 0)
    assert made.rewards.success == 5 and not made.rewards.classifier and made.reference.offload
    gae = [
        "algorithm.adv_estimator=gae",
        "data.filter_accuracy=False",
        "data.accuracy_lower_bound=0",
        "data.accuracy_upper_bound=1",
    ]
    other = [f"{RM}prime_model.update=before", f"{RM}prime_norm=none", f"{RM}prime_model.ref_type=policy"]
    made = settings(*gae, f"{RM}rm_coef=5", *other)
    assert (made.prime.granularity, made.prime.scale, made.prime.reference, made.prime.update) == (
        "chunk",
        "none",
        "policy",
        "before",
    )
    assert settings().prime.coefficient == 0, "as in the document: without a coefficient there is none"
    with pytest.raises((ConfigError, SeveralErrors), match=r"every reward would be 0. Give prime.update=after"):
        settings(f"{RM}rm_coef=5").prime.check()


def test_a_run_of_the_command_line_with_adapters(folder: Path, tmp_path: Path):  # noqa: F811
    words = [
        *COMMAND,
        f"{MODEL}path={folder}",
        "trainer.total_training_steps=2",
        f"{RM}rm_coef=5",
        f"{RM}prime_model.update=after",
    ]
    run(*words, f"{RM}prime_model.optim.lr=0.01", "trainer.save_freq=2", "--run", tmp_path / "run")
    told = updates(tmp_path / "run")
    assert told[0]["prime_reward"] == pytest.approx(0, abs=1e-4) and told[0]["prime_loss"] == pytest.approx(
        math.log(2), abs=0.01
    )
    assert abs(told[1]["prime_reward"]) > 1e-3
    assert told[0]["prime_learning_rate"] == 0.01 and told[0]["prime_gradient_norm"] > 0
    trained = checkpoint.load(tmp_path / "run", 2).agent["shared"]["prime"]["trained"]
    assert trained and all("lora" in name for name in trained), "the reward policy has adapters as the policy has"
