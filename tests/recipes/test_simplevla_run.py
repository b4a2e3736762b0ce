"""SimpleVLA-RL's command line as a run: every key is mapped, passes, or is refused with a sentence."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hilt.core import validate
from hilt.core.errors import ConfigError, SeveralErrors, UnknownNameError
from hilt.recipes import simplevla_run as recipe
from hilt.recipes.simplevla_keys import ACTOR, AGREE, CRITIC, MODEL, PASSING, PRIME, READ, REF, ROLLOUT, SETTINGS, known
from hilt.recipes.simplevla_names import suites
from hilt.recipes.simplevla_run import CommandLine, SimpleVLARun, simplevla
from hilt.vla.trials import starts_of

COMMAND = f"""
  data.task_suite_name=libero_10 data.n_samples=8 data.filter_accuracy=True data.accuracy_lower_bound=0.1
  data.accuracy_upper_bound=0.9
  data.train_batch_size=64 data.val_batch_size=496 data.max_prompt_length=256 data.max_response_length=128
  {MODEL}vla=openvla-oft
  {ACTOR}optim.lr=5e-6 {ACTOR}ppo_mini_batch_size=128 {ACTOR}ppo_micro_batch_size=8 {ACTOR}grad_clip=1
  {ACTOR}clip_ratio_high=0.28
  {ACTOR}clip_ratio_low=0.2 {ACTOR}entropy_coeff=0.0 {ROLLOUT}num_images_in_input=1 {ROLLOUT}use_proprio=False
  {ROLLOUT}temperature=1.6
  {ROLLOUT}micro_batch_size=1 {ROLLOUT}log_prob_micro_batch_size=32 {ROLLOUT}center_crop=True
  {REF}log_prob_micro_batch_size=32
  {REF}fsdp_config.param_offload=True algorithm.kl_ctrl.kl_coef=0.00 trainer.project_name=SimpleVLA-RL
  trainer.experiment_name=libero10_openvlaoft_grpo trainer.default_local_dir=ckpt/SimpleVLA-RL/libero10_openvlaoft_grpo
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=25 trainer.test_freq=4 trainer.total_epochs=100
  trainer.val_only=False
  algorithm.adv_estimator=grpo trainer.wandb_mode=online trainer.val_before_train=True
""".split()
"""The command line of seeds/004"""
KL, GAE, LORA = ["algorithm.kl_ctrl.kl_coef=0.01"], ["algorithm.adv_estimator=gae"], [f"{MODEL}lora_rank=8"]
ADAPTIVE = [*KL, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "algorithm.kl_ctrl.target_kl=0.1"]
UNFILTERED = ["data.filter_accuracy=False", "data.accuracy_lower_bound=0.0", "data.accuracy_upper_bound=1.0"]
NORMAL = ["reward_model.rm_coef=2", "reward_model.rm_type=normal"]
PROCESS = ["reward_model.rm_coef=2", "reward_model.prime_model.update=after"]
ROBOTWIN = ["data.task_suite_name=robotwin2_lift_pot", "data.num_trials_per_task=1000"]


def run(*words: str, **environment: str) -> SimpleVLARun:
    return simplevla([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft", **environment})


@functools.cache
def seen(*words: str) -> Any:
    """What a command line comes to before it is built, which takes longer; or why it comes to nothing."""
    try:
        told = CommandLine([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft", "WANDB_API_KEY": "key"})
        return {**told.settings(), "folder": told.folder, "environment": told.tracker()}
    except ConfigError as error:
        return str(error)


@pytest.fixture(autouse=True, scope="module")
def with_wandb() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_installed", lambda package: True)
        yield


def test_the_command_line_of_the_documents():
    found = run(ROBOT_PLATFORM="LIBERO", WANDB_API_KEY="key")
    config, batch = found.config, found.config.algorithm.batch
    assert (
        config.policy == "/models/sft"
        and config.policy_options["unnorm_key"] == "libero_10"
        and config.policy_options["chunk"] == 8
    )
    assert config.tasks == [f"libero_10/{number}" for number in range(10)] and config.task_options == {
        "step_limit": 512,
        "wait_steps": 10,
    }
    assert (config.collect.group_size, config.collect.data_batch_size, config.collect.temperature) == (8, 64, 1.6)
    assert (batch.trajectories_per_step, batch.chunks_per_pass, batch.log_prob_chunks_per_pass) == (128, 16, 4 * 64)
    assert (config.placement.kind, config.placement.ranks, config.sharding.enabled, config.sharding.precision) == (
        "processes",
        8,
        True,
        "bfloat16",
    )
    assert (config.max_steps, config.checkpoint_period, config.validation.period) == (100 * (500 // 64), 25, 4)
    assert config.algorithm.kl.where == "none" and config.rewards.success == 5 and config.sinks == ["wandb"]
    assert found.folder == Path("ckpt/SimpleVLA-RL/libero10_openvlaoft_grpo")
    assert found.environment == {
        "WANDB_PROJECT": "SimpleVLA-RL",
        "WANDB_RUN_GROUP": "libero10_openvlaoft_grpo",
        "WANDB_MODE": "online",
    }
    for words in (
        "64 groups (train_batch_size) x 8 (n_samples) = 512 episodes, 64 at each rank",
        "128 trajectories (ppo_mini_batch_size), 16 at each rank; 4 of them in a training step",
        "128 / 8 (ppo_micro_batch_size) = 16; a pass has 1 x 16 (traj_mini_batch_size) chunks",
        "4 trajectories x 64 = 256 chunks",
        "700 training steps",
    ):
        assert words in "\n".join(found.lines)


CHANGES: dict[str, str] = {
    "data.n_samples": "4",
    "data.accuracy_lower_bound": "0.2",
    "data.accuracy_upper_bound": "0.8",
    "data.filter_accuracy": "False",
    "data.filter_truncated": "True",
    "data.filter_format": "False",
    "data.oversample_factor": "1.5",
    f"{MODEL}lora_rank": "32",
    f"{MODEL}use_remove_padding": "True",
    f"{ACTOR}grad_clip": "0.5",
    f"{ACTOR}clip_ratio_high": "0.3",
    f"{ACTOR}clip_ratio_low": "0.1",
    f"{ACTOR}entropy_coeff": "0.001",
    f"{ACTOR}ppo_epochs": "2",
    f"{ACTOR}shuffle": "False",
    f"{ACTOR}ppo_mini_batch_size": "64",
    f"{ACTOR}optim.lr": "1e-5",
    f"{ACTOR}optim.lr_warmup_steps_ratio": "0.1",
    f"{ACTOR}optim.warmup_style": "cosine",
    f"{ACTOR}optim.weight_decay": "0.0",
    f"{ACTOR}optim.betas": "[0.9,0.95]",
    f"{ROLLOUT}temperature": "1.0",
    f"{ROLLOUT}center_crop": "False",
    f"{ROLLOUT}num_images_in_input": "2",
    "algorithm.gamma": "0.99",
    "algorithm.adv_estimator": "rloo",
    "verifier.reward_coef": "1",
    "trainer.val_before_train": "False",
    "data.task_suite_name": "libero_goal",
    "data.num_trials_per_task": "20",
    "data.train_batch_size": "32",
    "data.val_batch_size": "20",
    "data.max_prompt_length": "128",
    f"{ROLLOUT}max_prompt_length": "100",
    f"{MODEL}vla": "openvla",
    f"{MODEL}action_token_len": "14",
    f"{MODEL}action_chunks_len": "16",
    f"{MODEL}path": "/models/other",
    f"{MODEL}enable_gradient_checkpointing": "True",
    f"{ACTOR}traj_mini_batch_size": "8",
    f"{ACTOR}ppo_micro_batch_size": "16",
    f"{ACTOR}use_dynamic_bsz": "True",
    f"{ACTOR}fsdp_config.param_offload": "True",
    f"{ACTOR}fsdp_config.grad_offload": "True",
    f"{ACTOR}fsdp_config.optimizer_offload": "True",
    f"{REF}log_prob_micro_batch_size": "8",
    f"{ROLLOUT}micro_batch_size": "2",
    f"{ROLLOUT}val_micro_batch_size": "16",
    f"{ROLLOUT}log_prob_micro_batch_size": "16",
    f"{ROLLOUT}unnorm_key": "libero_90",
    f"{ROLLOUT}num_steps_wait": "5",
    f"{ROLLOUT}use_proprio": "True",
    f"{ROLLOUT}dtype": "float32",
    "algorithm.kl_ctrl.kl_coef": "0.1",
    "trainer.total_epochs": "10",
    "trainer.total_training_steps": "5",
    "trainer.project_name": "mine",
    "trainer.experiment_name": "mine",
    "trainer.logger": "[console]",
    "trainer.wandb_mode": "offline",
    "trainer.n_gpus_per_node": "4",
    "trainer.save_freq": "10",
    "trainer.test_freq": "8",
    "trainer.default_local_dir": "elsewhere",
    "trainer.val_only": "True",
    "trainer.default_hdfs_dir": "s3://there/run",
}
"""For each key that is accepted: another value"""

NEEDS: dict[str, tuple[str, list[str]]] = {
    f"{ACTOR}optim.min_lr_ratio": ("0.1", [f"{ACTOR}optim.warmup_style=cosine"]),
    "algorithm.lam": ("0.95", GAE),
    "data.max_response_length": ("300", ["data.filter_truncated=True"]),
    "critic.optim.lr": ("3e-5", GAE),
    "critic.optim.lr_warmup_steps_ratio": ("0.1", GAE),
    "critic.optim.warmup_style": ("cosine", GAE),
    "critic.optim.min_lr_ratio": ("0.1", [*GAE, "critic.optim.warmup_style=cosine"]),
    "critic.optim.weight_decay": ("0.0", GAE),
    "critic.optim.betas": ("[0.9,0.95]", GAE),
    "critic.grad_clip": ("0.5", GAE),
    "critic.cliprange_value": ("0.2", GAE),
    "trainer.critic_warmup": ("2", GAE),
    f"{MODEL}lora_alpha": ("16", LORA),
    f"{MODEL}target_modules": ("[q_proj,v_proj]", LORA),
    f"{ACTOR}ppo_max_token_len_per_gpu": ("40960", [f"{ACTOR}use_dynamic_bsz=True"]),
    f"{REF}fsdp_config.param_offload": ("False", KL),
    f"{ROLLOUT}twin2_task_config": ("demo_clean", ROBOTWIN),
    f"{ROLLOUT}twin2_instruction_type": ("seen", ROBOTWIN),
    "reward_model.enable": ("False", NORMAL),
    "reward_model.rm_coef": ("3", NORMAL),
    "reward_model.rm_type": ("prime", NORMAL),
    "reward_model.model.path": ("other", [*NORMAL, "reward_model.model.path=judge"]),
    "reward_model.prime_granularity": ("whole", PROCESS),
    "reward_model.prime_norm": ("none", PROCESS),
    "reward_model.prime_model.ref_type": ("policy", PROCESS),
    "reward_model.prime_model.path": ("/models/judge", PROCESS),
    "reward_model.prime_model.ref_path": ("/models/other", PROCESS),
    "reward_model.prime_model.update": ("before", ["reward_model.rm_coef=2"]),
    "reward_model.prime_model.beta_train": ("0.1", PROCESS),
    "reward_model.prime_model.optim.lr": ("3e-6", PROCESS),
    "reward_model.prime_model.optim.lr_warmup_steps_ratio": ("0.1", PROCESS),
    "reward_model.prime_model.optim.warmup_style": ("cosine", PROCESS),
    "reward_model.prime_model.optim.min_lr_ratio": (
        "0.1",
        [*PROCESS, "reward_model.prime_model.optim.warmup_style=cosine"],
    ),
    "reward_model.prime_model.optim.weight_decay": ("0.1", PROCESS),
    "reward_model.prime_model.optim.grad_clip": ("10.0", PROCESS),
    "algorithm.kl_penalty": ("mse", KL),
    "algorithm.kl_ctrl.type": ("fixed", ADAPTIVE),
    "algorithm.kl_ctrl.horizon": ("500", ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": ("0.2", ADAPTIVE),
    "trainer.nnodes": ("2", [f"{ACTOR}ppo_micro_batch_size=16"]),
}
"""The same, of those that need others beside them"""


def test_every_key_is_in_one_table_and_has_its_change():
    assert len(known()) == len(set(known())) == len({*SETTINGS, *CRITIC, *PRIME, *READ}) + len(AGREE) + len(PASSING)
    assert {*CHANGES, *NEEDS} == {*SETTINGS, *CRITIC, *PRIME, *READ}
    for key in (
        "data.n_samples",
        f"{ACTOR}ulysses_sequence_parallel_size",
        "trainer.runtime_env",
        "algorithm.adv_params.verifier_gamma",
    ):
        assert key in known()


@pytest.mark.parametrize("key", [*CHANGES, *NEEDS])
def test_each_accepted_key_changes_the_run(key: str):
    value, beside = NEEDS.get(key) or (CHANGES[key], [])
    assert seen(*beside) != seen(*beside, f"{key}={value}")


@pytest.mark.parametrize("key", AGREE)
def test_simplevla_duplicate_keys_must_agree(key: str):
    other = AGREE[key]
    while other in AGREE:
        other = AGREE[other]
    value, beside = NEEDS.get(other) or (CHANGES[other], [])
    once = seen(*beside, f"{other}={value}")
    assert isinstance(once, dict) and seen(*beside, f"{other}={value}", f"{key}={value}") == once
    refused = seen(*beside, f"{key}={value}")
    assert f"{key}=" in refused and f"{AGREE[key]}=" in refused and "differ: one value counts for both" in refused


@pytest.mark.parametrize("key", PASSING)
def test_simplevla_keys_without_effect_accept_only_defaults(key: str):
    passing, _ = PASSING[key]
    for value in passing:
        assert seen(f"{key}={json.dumps(value)}") == seen()
    strange = {bool: str(not passing[0]), int: "7", float: "0.7"}.get(type(passing[0]), "strange")
    refused = seen(f"{key}={strange}")
    assert (
        re.match(f"{key}={strange} has no meaning here: .{{20,}}", refused) or f"{key}={strange}: expected" in refused
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.n_sample=8"], r"no key of SimpleVLA-RL named 'data.n_sample'; did you mean 'data.n_samples'\?"),
        (["data.n_samples=many"], "data.n_samples=many: expected a whole number, such as 1."),
        (["data.filter_format=2"], "data.filter_format=2: expected true or false"),
        (["data.n_samples"], "expected KEY=VALUE, such as data.n_samples=8"),
        (
            ["data.task_suite_name=libero_100"],
            r"no task suite named 'libero_100'; did you mean 'libero_10'\? Known: " + ", ".join(sorted(suites())),
        ),
        (["data.task_suite_name=robotwin2_fold"], "no task suite named 'robotwin2_fold'"),
        (["data.train_batch_size=60"], "data.train_batch_size=60 groups do not divide among 8 ranks: give 64"),
        ([f"{ACTOR}ppo_micro_batch_size=4"], "ppo_micro_batch_size=4 trajectories do not divide among 8 ranks: give 8"),
        (
            [f"{ACTOR}ppo_micro_batch_size=24"],
            "ppo_micro_batch_size=24 must divide ppo_mini_batch_size=128 trajectories",
        ),
        ([f"{ACTOR}ppo_mini_batch_size=1024"], "and that the 512 episodes of a training step"),
        (["data.train_batch_size=1024"], "has 10 tasks x 50 initial states = 500: an epoch would have no step"),
        (
            ["reward_model.prime_norm=none"],
            "prime_norm=none would do nothing: it needs reward_model.rm_coef above 0 and rm_type",
        ),
        (
            ["reward_model.prime_model.optim.lr=1e-4", "reward_model.rm_coef=1"],
            "it needs reward_model.prime_model.update=after or before",
        ),
        (["reward_model.rm_type=dpo"], "no reward_model.rm_type named 'dpo'"),
        (["reward_model.prime_granularity=step", *PROCESS], "no reward_model.prime_granularity named 'step'"),
        (["critic.optim.lr=3e-5"], "would do nothing: only algorithm.adv_estimator=gae has a critic"),
        ([f"{MODEL}lora_alpha=8"], "they need actor_rollout_ref.model.lora_rank=N"),
        ([f"{ACTOR}ppo_max_token_len_per_gpu=99"], "it needs actor_rollout_ref.actor.use_dynamic_bsz=True"),
        (
            ["algorithm.kl_ctrl.type=adaptive", *KL],
            "algorithm.kl_ctrl.horizon and algorithm.kl_ctrl.type=adaptive go together",
        ),
        (["algorithm.kl_penalty=mse"], "they need algorithm.kl_ctrl.kl_coef above 0"),
        ([f"{ROLLOUT}twin2_task_config=demo_clean"], "twin2_task_config=demo_clean would do nothing with libero_10"),
        (["trainer.logger=[console,swanlab]"], "no logger named 'swanlab'"),
        ([f"{ROLLOUT}name=vllm"], "vllm cannot run a policy"),
        (["hilt.pool.worker=4"], r"no setting named 'pool.worker'; did you mean 'workers'\?"),
    ],
)
def test_simplevla_errors_are_raised_before_anything_starts(words: list[str], expected: str):
    with pytest.raises((ConfigError, UnknownNameError), match=expected):
        run(*words)


def test_settings_of_ours_and_a_machine_without_a_gpu():
    found = run(
        "trainer.n_gpus_per_node=0",
        "hilt.pool.workers=3",
        "hilt.policy_options.allow_untrained=true",
        "+trainer.total_training_steps=2",
    )
    config = found.config
    assert (
        config.device == "cpu"
        and config.placement.ranks == 1
        and not config.sharding.enabled
        and config.pool.workers == 3
    )
    assert config.policy_options["compute"] == "auto"  # their bfloat16 is meant for a GPU
    assert run("trainer.n_gpus_per_node=0", f"{ROLLOUT}dtype=bfloat16").config.policy_options["compute"] == "bfloat16"
    assert (
        config.policy_options["allow_untrained"] is True
        and config.max_steps == 2
        and config.collect.data_batch_size == 512
    )
    assert run("data.task_suite_name=tabletop/reach", "trainer.total_training_steps=1").config.tasks == [
        "tabletop/reach"
    ]
    assert run(*ADAPTIVE).config.algorithm.kl.controller == "adaptive"
    two = run("trainer.nnodes=2", f"{ACTOR}ppo_micro_batch_size=16").config
    assert (two.placement.kind, two.placement.ranks, two.placement.address, two.collect.idle_ranks) == (
        "ray",
        16,
        "auto",
        "steal",
    )


@pytest.mark.parametrize(
    "words",
    [
        KL,
        ADAPTIVE,
        [*GAE, *UNFILTERED],
        LORA,
        [*NORMAL, "reward_model.model.path=judge"],
        ROBOTWIN,
        [f"{ACTOR}use_dynamic_bsz=True"],
    ],
)
def test_simplevla_sizes_are_printed_in_order(words: list[str]):
    config = run(*words).config
    validate.check(config)


def test_filters_that_mislead_a_critic_are_refused():
    with pytest.raises(ConfigError, match=r"collect\.filter_accuracy=true with algorithm\.estimator=gae"):
        validate.check(run(*GAE).config)


def test_the_environment(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"which checkpoint\? Give actor_rollout_ref.model.path=FOLDER, or export SFT_MODEL_PATH"
    ):
        simplevla(COMMAND, {})
    offline = run()
    assert offline.environment["WANDB_MODE"] == "offline" and "WANDB_API_KEY is not set: wandb is offline" in "\n".join(
        offline.lines
    )
    assert run("trainer.wandb_mode=disabled").config.sinks == []
    with pytest.raises(UnknownNameError, match="no ROBOT_PLATFORM named 'LIBRO'; did you mean 'LIBERO'"):
        run(ROBOT_PLATFORM="LIBRO")
    with pytest.raises(
        ConfigError, match="ALOHA has chunks of 25 actions of 14 numbers, and the command line has 8 of 7"
    ):
        run(ROBOT_PLATFORM="ALOHA")
    (tmp_path / "config.json").write_text(
        json.dumps({"norm_stats": {"aloha": {"action": {"q01": [0.0] * 14}}}, "hilt": {"chunk": 25}})
    )
    assert run(f"{MODEL}path={tmp_path}", ROBOT_PLATFORM="ALOHA").config.policy == str(tmp_path)
    with pytest.raises(ConfigError, match=f"LIBERO has chunks of 8 actions of 7 numbers, and {tmp_path} has 25 of 14"):
        run(f"{MODEL}path={tmp_path}", ROBOT_PLATFORM="LIBERO")


SCRIPT = """set -x
export ROBOT_PLATFORM=LIBERO # a comment
NAME='my run'
SUITE="libero_goal"
GPUS=0
HYDRA_FULL_ERROR=1 python -u -m verl.trainer.main_ppo \\
    data.task_suite_name=$SUITE \\
    trainer.experiment_name=${NAME} trainer.n_gpus_per_node=$GPUS \\
    trainer.logger=['console'] \\
    data.train_batch_size=64 actor_rollout_ref.model.path=here \\


"""


def test_a_script_is_read_and_not_run(tmp_path: Path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    run = simplevla([str(path), "data.n_samples=4"], {})
    assert run.config.tasks[0] == "libero_goal/0" and run.config.policy == "here" and run.config.collect.group_size == 4
    assert run.folder.name == "my run" and run.config.sinks == []
    for change, words in {
        ("$SUITE", "$OTHER"): r"\$OTHER is not set in the script",
        ("$GPUS", "$(nproc)"): "runs a command, and a script is only read here",
        ("verl.trainer.main_ppo", "verl.trainer.main"): r"calls verl\.trainer\.main_ppo; there is no such call in it",
        ("'my run'", "'my run"): "cannot be read as a line of a shell",
    }.items():
        path.write_text(SCRIPT.replace(*change))
        with pytest.raises(ConfigError, match=words):
            simplevla([str(path)], {})


def test_simplevla_errors_are_listed_together():
    words = [
        "data.n_sample=8",
        "trainer.runtime_env=align.json",
        "data.n_samples=many",
        "data.val_batch_size=0",
        "trainer.logger=[paper]",
    ]
    words += ["data.train_batch_size=64"]
    with pytest.raises(SeveralErrors) as error:
        simplevla(words, {"ROBOT_PLATFORM": "MOON"}, here=True)
    said = str(error.value)
    wanted = [
        "'data.n_sample'",
        "runtime_env=align.json has no meaning",
        "n_samples=many",
        "which checkpoint?",
        "val_batch_size=0",
    ]
    wanted += ["'MOON'", "'paper'"]
    assert all(word in said for word in wanted), said


@pytest.mark.parametrize(("most", "each", "at_most"), [(4, 1, 4), (10, 1, 0), (25, 3, 25), (496, 0, 0)])
def test_a_validation_has_at_most_so_many_episodes(most: int, each: int, at_most: int):
    validation = run(f"data.val_batch_size={most}").config.validation
    assert (validation.episodes, validation.at_most) == (each, at_most)
    pool = SimpleNamespace(describe=lambda task: {"initial_states": {"eval": 10}})
    starts = starts_of(pool, [f"task {n}" for n in range(10)], "eval", validation.episodes, 0, validation.at_most)
    assert len(starts) == min(most, 100)
