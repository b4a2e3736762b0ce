"""What cannot work or would do nothing is refused in a sentence, before anything
starts; what the sizes come to is said in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.config import build
from hilt.core.errors import ConfigError, HiltError, SeveralErrors
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.policies.base import select
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recipes.vla import vla_debug
from hilt.vla import config as vla_config
from hilt.vla.config import Vla
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.update import Updater
from tests.vla.toy_vla import UP, config

NEVER = ("validation.before=false", "validation.period=0", "validation.after=false")
REFUSED: dict[str, tuple[list[str], str]] = {
    "no task": (["tasks=[]"], "there is nothing to try: give tasks="),
    "a task twice": (["tasks=[tabletop/pick,tabletop/pick]"], "names tabletop/pick twice"),
    "too large": (
        ["algorithm.batch.trajectories_per_step=64"],
        r"=64: a training step has 16 episodes \(16 of each of 1 rank.* give 16",
    ),
    "not whole": (
        ["algorithm.batch.trajectories_per_step=6"],
        "which are not whole steps of the optimizer; give 4, or 0",
    ),
    "cut groups that pay": (
        ["collect.data_batch_size=10", "algorithm.batch.trajectories_per_step=0", "algorithm.kl.where=reward"],
        (
            "collect.data_batch_size=10 cuts groups of collect.group_size=4, and algorithm.kl.where=reward "
            "compares .* give a multiple"
        ),
    ),
    "a group of one": (["collect.group_size=1"], "grpo compares the members of a group; give 2 or more"),
    "no critic": (["algorithm.estimator=gae"], "gae needs a critic: give critic.kind=shared, detached or separate"),
    "a filter that misleads a critic": (
        ["algorithm.estimator=gae", "critic.kind=shared", "collect.dynamic_sampling=true"],
        (
            "collect.dynamic_sampling=true with algorithm.estimator=gae: groups are kept by how they ended, and "
            "the critic .* false for it"
        ),
    ),
    "filters that mislead a mean": (
        [
            "algorithm.estimator=reinforce_plus_plus",
            "collect.filter_truncated=true",
            "collect.filter_accuracy=true",
            "collect.accuracy_upper_bound=0.9",
        ],
        (
            "filter_accuracy=true and collect.filter_truncated=true with .*reinforce_plus_plus.* take "
            "one of grpo, dr_grpo, rloo"
        ),
    ),
    "a filter that misleads remax": (
        ["algorithm.estimator=remax", "collect.dynamic_sampling=true"],
        "a greedy episode, is not one of",
    ),
    "rollouts in another precision": (
        ["policy_options.rollout_precision=fp8_emulated"],
        r"rollout_precision=fp8_emulated: the policy that acts is then not quite the one that learns, which must be "
        r"corrected for: give algorithm\.recompute_log_prob=true\.",
    ),
    "float8 copies of shards": (
        ["policy_options.rollout_precision=fp8_emulated", "algorithm.recompute_log_prob=true", "sharding.enabled=true"],
        "rollout_precision=fp8_emulated with sharding.enabled: no rank keeps whole weights",
    ),
    "float8 without a GPU": (
        ["policy_options.rollout_precision=fp8", "algorithm.recompute_log_prob=true"],
        "rollout_precision=fp8 needs a GPU with float8 products, and the policy is on cpu",
    ),
    "an idle critic": (["critic.kind=shared"], "kind=shared would do nothing: it needs algorithm.estimator=gae"),
    "another critic": (["critic.kind=twin"], "no critic named 'twin'"),
    "an idle optimizer": (["critic.optimizer.weight_decay=0"], "would do nothing: it needs algorithm.estimator=gae"),
    "the entropy of fixed noise": (
        [
            "algorithm.entropy=0.01",
            "policy_options.head=flow",
            "policy_options.flow={kind: cps}",
            "policy_options.bins=13",
            "policy_options.smoothing=1.0",
        ],
        "algorithm.entropy=0.01 would do nothing: the noise of a flow of kind cps is fixed",
    ),
    "an idle reference": (["reference.offload=true"], "offload=True would do nothing: it needs algorithm.kl.where"),
    "no classifier": (["rewards.learned=1"], "learned=1.0 would do nothing: it needs rewards.classifier=FOLDER"),
    "no coefficient": (["rewards.classifier=here"], "it needs a coefficient, rewards.learned=1"),
    "an absent classifier": (
        ["rewards.classifier=here", "rewards.learned=1"],
        "here: no classifier is there. Make one with",
    ),
    "the same for all": (
        ["rewards.format=0.1"],
        "format=0.1 would do nothing: it needs collect.filter_format=false, without which every",
    ),
    "a deadline of nobody": (["pool.step_s=9"], "step_s=9.0 would do nothing: it needs pool.workers above 0"),
    "an idle start_s": (["pool.start_s=9"], "start_s=9.0 would do nothing: it needs pool.workers above 0"),
    "restarts of nobody": (["pool.restarts=9"], "restarts=9 would do nothing: it needs pool.workers above 0"),
    "no reward": (["rewards.success=0"], "all coefficients of rewards are 0"),
    "imitation of nothing": (["imitation.weight=0.1"], "it needs imitation.weight and imitation.data together"),
    "absent data": (["imitation.weight=0.1", "imitation.data=[nowhere]"], "imitation.data: there is no nowhere"),
    "the states that it trains on": (["validation.split=train"], "are the states that are trained on"),
    "an idle split": ([*NEVER, "validation.split=test"], "needs one of validation.before, period and after"),
    "nothing to do": (["max_steps=0", "validation.before=false"], "there is nothing to do"),
    "too many videos": (["validation.videos=9", "validation.episodes=2"], "a validation has 4 episodes"),
    "idle adapters": (["lora.alpha=3"], "lora.alpha=3.0 would do nothing: it needs lora.rank=N"),
    "an absent policy": (
        ["policy=nowhere", "policy_options={}"],
        "policy=nowhere: expected the folder of a checkpoint, or small_vla",
    ),
    "a wrong setting of a new one": (["policy_options.wide=3"], "'wide'"),
    "two names for one": (["suite=tabletop"], "suite=tabletop would do nothing: it needs no columns beside it"),
    "below its least": (["pool.slots=0"], "pool.slots=0: expected a whole number of at least 1"),
    "an absent device": (["device=cuda:99"], "is not on this machine"),
    "ahead of nobody": (
        ["collect.prefetch=true", "placement.kind=ray", "placement.rollout_ranks=1"],
        "prefetch=True would do nothing: it needs placement.rollout_ranks=0",
    ),
    "ahead beside simulators of the same process": (
        ["collect.ahead=1"],
        "simulators need processes of their own, pool.workers=1 or more; or give ranks of their own to rollouts",
    ),
    "ahead in pieces": (
        ["collect.ahead=1", "pool.workers=1", "sharding.enabled=true"],
        "no rank has all weights to act by; give 0, or give ranks of their own to rollouts",
    ),
    "reset and rolled out": (
        ["collect.ahead=1", "pool.workers=1", "collect.prefetch=true"],
        "prefetch=True would do nothing: it needs collect.ahead=0",
    ),
    "several ranks here": (["placement.ranks=2"], "needs placement.kind=processes or ray"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_a_sentence(what: str):
    changes, expected = REFUSED[what]
    with pytest.raises(HiltError, match=expected) as error:
        config(*changes).check()
    found = error.value.errors if isinstance(error.value, SeveralErrors) else [error.value]
    assert all("\n" not in str(one) for one in found)


def test_an_unknown_key_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no setting named 'collect.groupsize'; did you mean 'group_size'\?"):
        config("collect.groupsize=4")
    with pytest.raises(
        ConfigError, match=r"is of no suite that Hilt knows: give .* columns=\{full_image: images/front, state: state\}"
    ):
        build(Vla(), {"tasks": [UP]}).check()  # a task that tells nothing of how its observations are named


def test_the_sizes_in_words():
    said = config().arithmetic()
    assert said[0] == "tasks: 2, over 1 rank; in flight at each 6 environments in the rank's own process"
    assert said[1] == "training step: 16 of each of 1 rank with work = 16 episodes = 4 groups of 4"
    assert said[2].startswith(
        "update: 1 epoch of 16 episodes, 8 in each step of the optimizer = 2 steps; passes of at most 64 chunks at each"
    )
    assert said[3] == "learning rate: 0.01, where 0.0003 is usual for a small_vla"
    assert said[4] == "run: 4 training steps = 64 episodes to learn from, 8 steps of the optimizer"
    assert said[5] == "validation: 3 times every eval state of every task"
    many = [
        "placement.kind=processes",
        "placement.ranks=3",
        "pool.workers=2",
        "algorithm.epochs=3",
        "collect.oversample_factor=1.5",
    ]
    many += [
        "algorithm.batch.trajectories_per_step=0",
        "algorithm.batch.tokens_per_pass=2048",
        "max_seconds=60",
        "validation.episodes=5",
    ]
    said = config(*many).arithmetic()
    assert said[0].endswith("over 3 ranks; in flight at each 6 environments in 2 processes")
    assert said[1].startswith(
        "training step: 16 of each of 2 ranks with work = 32 episodes = 8 groups of 4, and what is rolled out beyond"
    )
    assert said[2].startswith(
        "update: 3 epochs of 32 episodes, 32 in each step of the optimizer = 3 steps; passes of at most 2,048 tokens at"
    )
    assert said[4].endswith("12 steps of the optimizer, or 60 s") and said[5] == "validation: 3 times 10 episodes"
    stealing = config(*many, "collect.idle_ranks=steal")
    assert stealing.episodes == 48, "the third rank has a share of another one's task"
    never = replace(config().validation, before=False, period=0, after=False)
    assert replace(config(), validation=never).arithmetic()[-1] == "validation: none"


def test_the_learning_rate_goes_by_what_is_trained(tmp_path: Path):
    plain = Vla(tasks=[UP])
    assert plain.optimizer.learning_rate is None and plain.settled().optimizer.learning_rate == 3e-4
    assert (
        "learning rate: 0.0003, as is usual for a small_vla" in plain.arithmetic()
        and plain.settled().arithmetic() == plain.arithmetic()
    )
    adapters = replace(plain, lora=replace(plain.lora, rank=8), policy=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    large = replace(adapters, lora=plain.lora)
    assert adapters.settled().optimizer.learning_rate == 1e-4 and large.settled().optimizer.learning_rate == 5e-6
    (tmp_path / "config.json").write_text('{"model_type": "hilt_small_vla"}')
    assert large.settled().optimizer.learning_rate == 3e-4
    assert build(large, "optimizer.learning_rate=0.5").settled().optimizer.learning_rate == 0.5
    judged = [
        build(plain, *given, "critic.kind=shared").settled().critic.optimizer.learning_rate
        for given in ([], ["optimizer.learning_rate=5e-6"], ["critic.optimizer.learning_rate=0.02"])
    ]
    assert judged == [3e-4, 1e-4, 0.02], "a critic learns no slower than its policy"


def test_plain_settings_learn_from_an_imitated_start():
    """What was rarely done becomes usual within 20 training steps of the plain sizes: at
    5e-6, the rate of a large policy, it does not."""
    settings = Vla(tasks=["toy/right"]).settled()
    policy = SmallVLA(SmallVLAConfig(image_size=16, state_dim=1, chunk=2, action_dim=2, precision="float32"))
    seen = {"full_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "go right"}
    draws, shown = torch.Generator().manual_seed(0), np.tile(np.float32([0.3, 0.0]), (16, 2, 1))
    teacher = DataParallelOptimizer(policy, settings.optimizer)
    for _ in range(8):
        teacher.backward(policy.supervised_loss([seen] * 16, shown, np.ones((16, 2), bool), draws)[0])
        teacher.step(1.0)
    updater, successes, size = (
        Updater(settings.algorithm, DataParallelOptimizer(policy, settings.optimizer)),
        [],
        settings.collect.group_size,
    )
    for step in range(20):
        actions, record = policy.act([seen] * settings.collect.data_batch_size, generator=draws)
        won = actions[:, :, 0].sum(1) > 1
        made = [
            RolloutEpisode(
                Start("toy/right", "train", 0, 0, step * 8 + i // size, i % size),
                select(record, [i]),
                np.int32([2]),
                np.zeros(1),
                bool(w),
                2,
                False,
                step,
                b"",
            )
            for i, w in enumerate(won)
        ]
        updater.update(made, [np.float32([w]) for w in won])
        successes.append(float(won.mean()))
    assert np.mean(successes[:4]) < 0.25 and np.mean(successes[-4:]) > np.mean(successes[:4]) + 0.15, successes


def test_the_recipe_is_whole(monkeypatch: pytest.MonkeyPatch):
    """Whether this machine can simulate and render its tasks is no matter here."""
    asked: list[Any] = []
    monkeypatch.setattr(vla_config, "ready", lambda tasks, **options: asked.append((tasks, options)))
    vla_debug().check()
    assert asked == [(["tabletop/reach", "tabletop/button"], {"image_size": 32, "step_limit": 12})]
    given = ("collect.filter_format=false", "pool.workers=1", "pool.start_s=9", "pool.step_s=9", "pool.restarts=9")
    config("rewards.format=0.1", *given).check()


def settings(path: Path, text: str) -> Any:
    path.write_text(text)
    return path


def test_which_recipes_are_of_post_training(tmp_path: Path):
    from hilt.recipes import is_vla, vla_recipe

    assert is_vla("vla_debug") and not is_vla("hil_debug") and not is_vla("nothing") and not is_vla("hil-serl:a:B")
    assert is_vla("tests.vla.toy_vla:config") and vla_recipe("tests.vla.toy_vla:config") == config()
    assert not is_vla("hilt.recipes.hil:hil_debug")
    mine = settings(tmp_path / "mine.yaml", f"tasks: ['{UP}']\nmax_steps: 7\n")
    assert is_vla(str(mine)) and vla_recipe(str(mine)).max_steps == 7
    assert not is_vla(str(settings(tmp_path / "other.yaml", "task: tabletop/pick\n"))) and not is_vla(
        str(tmp_path / "absent.yaml")
    )
    with pytest.raises(ConfigError, match=r"expected a hilt\.vla\.config\.Vla"):
        vla_recipe("hilt.recipes.hil:hil_debug")
