"""The keys of SimpleVLA-RL's ``ppo_trainer.yaml``, each in one table, with what
becomes of it; see `hilt.recipes.simplevla_run`."""

from __future__ import annotations

from typing import Any

MODEL, ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}." for part in ("model", "actor", "ref", "rollout"))

SETTINGS: dict[str, tuple[Any, str]] = {
    "data.n_samples": (1, "collect.group_size"),
    "data.filter_accuracy": (False, "collect.filter_accuracy"),
    "data.accuracy_lower_bound": (0.0, "collect.accuracy_lower_bound"),
    "data.accuracy_upper_bound": (1.0, "collect.accuracy_upper_bound"),
    "data.filter_truncated": (False, "collect.filter_truncated"),
    "data.filter_format": (True, "collect.filter_format"),
    "data.oversample_factor": (1.0, "collect.oversample_factor"),
    f"{MODEL}lora_rank": (0, "lora.rank"),
    f"{MODEL}use_remove_padding": (False, "policy_options.packed"),
    f"{ACTOR}grad_clip": (1.0, "optimizer.gradient_clip"),
    f"{ACTOR}clip_ratio_high": (0.28, "algorithm.clip_high"),
    f"{ACTOR}clip_ratio_low": (0.2, "algorithm.clip_low"),
    f"{ACTOR}entropy_coeff": (0.0, "algorithm.entropy"),
    f"{ACTOR}ppo_epochs": (1, "algorithm.epochs"),
    f"{ACTOR}shuffle": (True, "algorithm.batch.shuffle"),
    f"{ACTOR}ppo_mini_batch_size": (256, "algorithm.batch.trajectories_per_step"),
    f"{ACTOR}optim.lr": (1e-6, "optimizer.learning_rate"),
    f"{ACTOR}optim.lr_warmup_steps_ratio": (0.0, "optimizer.warmup_ratio"),
    f"{ACTOR}optim.warmup_style": ("constant", "optimizer.schedule"),
    f"{ACTOR}optim.weight_decay": (0.01, "optimizer.weight_decay"),
    f"{ACTOR}optim.betas": ([0.9, 0.999], "optimizer.betas"),
    f"{ACTOR}optim.min_lr_ratio": (None, "optimizer.min_lr_ratio"),
    f"{ROLLOUT}temperature": (1.0, "collect.temperature"),
    f"{ROLLOUT}center_crop": (True, "policy_options.center_crop"),
    f"{ROLLOUT}num_images_in_input": (1, "policy_options.num_images"),
    "algorithm.gamma": (1.0, "algorithm.discount"),
    "algorithm.lam": (1.0, "algorithm.lam"),
    "algorithm.adv_estimator": ("gae", "algorithm.estimator"),
    "verifier.reward_coef": (5.0, "rewards.success"),
    "trainer.val_before_train": (False, "validation.before"),
    "trainer.default_hdfs_dir": (None, "copy_to"),
}
"""Their key: its default, and the setting of ours that it becomes"""

CRITIC: dict[str, tuple[Any, str]] = {
    "critic.optim.lr": (1e-5, "critic.optimizer.learning_rate"),
    "critic.optim.lr_warmup_steps_ratio": (0.0, "critic.optimizer.warmup_ratio"),
    "critic.optim.warmup_style": ("constant", "critic.optimizer.schedule"),
    "critic.optim.min_lr_ratio": (None, "critic.optimizer.min_lr_ratio"),
    "critic.optim.weight_decay": (0.01, "critic.optimizer.weight_decay"),
    "critic.optim.betas": ([0.9, 0.999], "critic.optimizer.betas"),
    "critic.grad_clip": (1.0, "critic.optimizer.gradient_clip"),
    "critic.cliprange_value": (0.5, "algorithm.value_clip"),
    "trainer.critic_warmup": (0, "critic.warmup_steps"),
}
"""The same, where there is a critic: with algorithm.adv_estimator=gae"""

RM = "reward_model."
PRIME: dict[str, tuple[Any, str]] = {
    f"{RM}prime_model.path": (None, "prime.policy"),
    f"{RM}prime_model.ref_path": (None, "prime.reference_policy"),
    f"{RM}prime_model.update": ("none", "prime.update"),
    f"{RM}prime_model.beta_train": (0.05, "prime.beta"),
    f"{RM}prime_model.optim.lr": (1e-6, "prime.optimizer.learning_rate"),
    f"{RM}prime_model.optim.lr_warmup_steps_ratio": (0.0, "prime.optimizer.warmup_ratio"),
    f"{RM}prime_model.optim.warmup_style": ("constant", "prime.optimizer.schedule"),
    f"{RM}prime_model.optim.min_lr_ratio": (None, "prime.optimizer.min_lr_ratio"),
    f"{RM}prime_model.optim.weight_decay": (0.0, "prime.optimizer.weight_decay"),
    f"{RM}prime_model.optim.grad_clip": (1.0, "prime.optimizer.gradient_clip"),
}
"""The same, with PRIME's process reward: reward_model.rm_type=prime and rm_coef above 0"""
PRIME_WORDS: dict[str, tuple[str, dict[str, str]]] = {
    f"{RM}prime_granularity": ("prime.granularity", {"token": "token", "whole": "whole"}),
    f"{RM}prime_norm": ("prime.scale", {"batch_norm": "batch", "none": "none"}),
    f"{RM}prime_model.ref_type": ("prime.reference", {"freeze": "frozen", "policy": "policy"}),
}
"""The same, of keys whose words are others here: the setting, and theirs to ours; the first is their default"""

READ: dict[str, Any] = {
    "data.task_suite_name": "libero_10",
    "data.num_trials_per_task": 50,
    "data.train_batch_size": 1024,
    "data.val_batch_size": 1312,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{MODEL}vla": "openvla-oft",
    f"{MODEL}action_token_len": 7,
    f"{MODEL}action_chunks_len": 8,
    f"{MODEL}path": "",
    f"{MODEL}enable_gradient_checkpointing": False,
    f"{MODEL}lora_alpha": 32,
    f"{MODEL}target_modules": ["all-linear"],
    f"{ACTOR}traj_mini_batch_size": 16,
    f"{ACTOR}ppo_micro_batch_size": 64,
    f"{ACTOR}use_dynamic_bsz": False,
    f"{ACTOR}ppo_max_token_len_per_gpu": 20480,
    f"{ACTOR}fsdp_config.param_offload": False,
    f"{ACTOR}fsdp_config.grad_offload": False,
    f"{ACTOR}fsdp_config.optimizer_offload": False,
    f"{REF}log_prob_micro_batch_size": 128,
    f"{REF}fsdp_config.param_offload": False,
    f"{ROLLOUT}micro_batch_size": 1,
    f"{ROLLOUT}val_micro_batch_size": 8,
    f"{ROLLOUT}log_prob_micro_batch_size": 128,
    f"{ROLLOUT}max_prompt_length": 512,
    f"{ROLLOUT}unnorm_key": "",
    f"{ROLLOUT}num_steps_wait": 10,
    f"{ROLLOUT}use_proprio": False,
    f"{ROLLOUT}dtype": "bfloat16",
    f"{ROLLOUT}twin2_task_config": "demo_randomized",
    f"{ROLLOUT}twin2_instruction_type": "unseen",
    "reward_model.enable": True,
    "reward_model.rm_coef": 0.0,
    "reward_model.rm_type": "prime",
    "reward_model.model.path": "",
    **{key: next(iter(words)) for key, (_, words) in PRIME_WORDS.items()},
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 6.0,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.wandb_mode": "online",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.default_local_dir": "",
    "trainer.val_only": False,
}
"""Keys that `CommandLine` converts to settings, and their defaults"""

AGREE: dict[str, str] = {
    f"{ACTOR}vla": f"{MODEL}vla",
    f"{ACTOR}action_token_len": f"{MODEL}action_token_len",
    f"{ACTOR}action_chunks_len": f"{MODEL}action_chunks_len",
    f"{ACTOR}use_proprio": f"{ROLLOUT}use_proprio",
    f"{ACTOR}use_remove_padding": f"{MODEL}use_remove_padding",
    f"{ACTOR}num_images_in_input": f"{ROLLOUT}num_images_in_input",
    f"{REF}log_prob_use_dynamic_bsz": f"{ACTOR}use_dynamic_bsz",
    f"{REF}log_prob_max_token_len_per_gpu": f"{ACTOR}ppo_max_token_len_per_gpu",
    f"{ROLLOUT}vla": f"{MODEL}vla",
    f"{ROLLOUT}action_chunks_len": f"{MODEL}action_chunks_len",
    f"{ROLLOUT}task_suite_name": "data.task_suite_name",
    f"{ROLLOUT}pretrained_checkpoint": f"{MODEL}path",
    f"{ROLLOUT}experiment_name": "trainer.experiment_name",
    f"{ROLLOUT}prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}response_length": "data.max_response_length",
    f"{ROLLOUT}twin2_ckpt_setting": f"{ROLLOUT}twin2_task_config",
    f"{ROLLOUT}log_prob_use_dynamic_bsz": f"{ACTOR}use_dynamic_bsz",
    f"{ROLLOUT}log_prob_max_token_len_per_gpu": f"{ACTOR}ppo_max_token_len_per_gpu",
    **{
        f"critic.{name}": f"{ACTOR}{name}"
        for name in (
            "ppo_mini_batch_size",
            "ppo_micro_batch_size",
            "use_dynamic_bsz",
            "ppo_max_token_len_per_gpu",
            "ppo_epochs",
            "shuffle",
        )
    },
    **{
        f"critic.model.{name}": f"{MODEL}{name}"
        for name in (
            "action_token_len",
            "action_chunks_len",
            "path",
            "use_remove_padding",
            "enable_gradient_checkpointing",
            "lora_rank",
            "lora_alpha",
            "target_modules",
        )
    },
    **{
        f"critic.model.fsdp_config.{name}": f"{ACTOR}fsdp_config.{name}"
        for name in ("param_offload", "grad_offload", "optimizer_offload")
    },
    "critic.model.tokenizer_path": f"{MODEL}path",
    "reward_model.model.input_tokenizer": f"{MODEL}path",
    **{
        f"reward_model.model.{name}": f"{MODEL}{name}"
        for name in ("action_token_len", "action_chunks_len", "use_remove_padding")
    },
    **{f"reward_model.{name}": f"{ACTOR}{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu")},
    "reward_model.forward_max_token_len_per_gpu": f"{ACTOR}ppo_max_token_len_per_gpu",
    "reward_model.mini_batch_size": f"{ACTOR}ppo_mini_batch_size",
    "reward_model.micro_batch_size": f"{ACTOR}ppo_micro_batch_size",
    "reward_model.prime_model.input_tokenizer": f"{MODEL}path",
    **{
        f"reward_model.prime_model.{name}": f"{MODEL}{name}"
        for name in ("enable_gradient_checkpointing", "use_remove_padding")
    },
    **{
        f"reward_model.prime_model.fsdp_config.{name}": f"{ACTOR}fsdp_config.{name}"
        for name in ("param_offload", "grad_offload", "optimizer_offload")
    },
    "critic.forward_micro_batch_size": "critic.ppo_micro_batch_size",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "algorithm.adv_params.verifier_gamma": "algorithm.gamma",
    "algorithm.adv_params.reward_model_gamma": "algorithm.gamma",
}
"""Keys that duplicate another one: one value counts for both"""

_ULYSSES = (
    "a sequence of a few hundred tokens is not split over GPUs (Ulysses), there as well; for memory give a smaller "
    f"{ACTOR}traj_mini_batch_size, {ACTOR}use_dynamic_bsz=True or {MODEL}enable_gradient_checkpointing=True"
)
_VLLM = "it is vllm's, and vllm cannot run a policy that answers with actions, there as well; rollout.name=hf is ours"
_TEXT = "it is of language models' training, and nothing of a robot's reads it, there as well"
_WRAP = "layers are gathered one at a time, whatever their size"
_STRATEGY = (
    "there is FSDP, and no Megatron: that has no OpenVLA, there as well; fsdp shards every weight over all ranks, and "
    f"{ACTOR}fsdp_config.param_offload=True keeps it in host memory"
)
_OUTSIDE = "nothing is imported from outside"
_BY_STEPS = "it follows from trainer.total_training_steps, or the number of epochs"

PASSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "data.tokenizer": ((None,), "the tokenizer is the checkpoint's own"),
    "data.filter_warmup": ((False,), "it raises there; groups are filtered from the first step on"),
    **dict.fromkeys(("data.return_raw_input_ids", "data.return_raw_chat", "data.zero"), ((False,), _TEXT)),
    "data.prompt_key": (("prompt",), _TEXT),
    "data.system_prompt": ((None,), _TEXT),
    "data.sample_num": ((-1,), _TEXT),
    "actor_rollout_ref.hybrid_engine": (
        (True,),
        "rollouts and training share the weights of a rank; apart: hilt.placement.rollout_ranks=N",
    ),
    f"{MODEL}resume": (
        (False,),
        "a projector of proprioception is found in the checkpoint; --resume goes on with a run",
    ),
    f"{MODEL}external_lib": ((None,), _OUTSIDE),
    f"{MODEL}override_config": (
        ({}, None),
        "a checkpoint is defined by its config.json; its options are hilt.policy_options.NAME=VALUE",
    ),
    f"{ACTOR}strategy": (("fsdp",), _STRATEGY),
    f"{ACTOR}ulysses_sequence_parallel_size": ((1,), _ULYSSES),
    f"{ACTOR}optim.total_training_steps": ((-1,), _BY_STEPS),
    f"{ACTOR}fsdp_config.wrap_policy.min_num_params": ((0,), _WRAP),
    f"{ACTOR}fsdp_config.fsdp_size": ((-1,), "weights are sharded over all ranks"),
    f"{REF}fsdp_config.wrap_policy.min_num_params": ((0,), _WRAP),
    f"{REF}fsdp_config.fsdp_size": ((-1,), "the reference is whole at each rank"),
    f"{REF}ulysses_sequence_parallel_size": ((1,), _ULYSSES),
    f"{ROLLOUT}model_family": (("openvla",), "other policies are folders for `hilt train RECIPE policy=FOLDER`"),
    f"{ROLLOUT}name": (("hf",), _VLLM),
    f"{ROLLOUT}top_k": ((-1, 0), "all action tokens may be drawn: a ratio is of the policy that acted"),
    f"{ROLLOUT}top_p": ((1,), "all action tokens may be drawn: a ratio is of the policy that acted"),
    f"{ROLLOUT}do_sample": (
        (True,),
        "without draws all members of a group are the same, and nothing is learned; validation draws none",
    ),
    f"{ROLLOUT}n": ((1,), "nothing reads it there; the group's size is data.n_samples"),
    f"{ROLLOUT}tensor_model_parallel_size": ((1,), _VLLM),
    f"{ROLLOUT}gpu_memory_utilization": ((0.5, 0.9), _VLLM),
    f"{ROLLOUT}ignore_eos": ((False,), _VLLM),
    f"{ROLLOUT}enforce_eager": ((True,), _VLLM),
    f"{ROLLOUT}free_cache_engine": ((True,), _VLLM),
    f"{ROLLOUT}load_format": (("dummy_dtensor",), _VLLM),
    f"{ROLLOUT}max_num_batched_tokens": ((8192,), _VLLM),
    f"{ROLLOUT}max_num_seqs": ((1024,), _VLLM),
    "critic.strategy": (("fsdp",), _STRATEGY),
    "critic.optim.total_training_steps": ((-1,), _BY_STEPS),
    "critic.model.override_config": (({}, None), "the critic begins as the policy does"),
    "critic.model.external_lib": ((None,), _OUTSIDE),
    "critic.model.fsdp_config.wrap_policy.min_num_params": ((0,), _WRAP),
    "critic.model.fsdp_config.fsdp_size": ((-1,), "weights are sharded over all ranks"),
    "critic.model.type": (
        ("value",),
        "a critic is a policy with a value head; PRIME's reward policy is reward_model.rm_type=prime",
    ),
    "critic.ulysses_sequence_parallel_size": ((1,), _ULYSSES),
    "verifier.type": (("prime",), "an episode is verified by the simulator's own success"),
    "reward_model.strategy": (("fsdp",), _STRATEGY),
    "reward_model.max_length": ((None,), _TEXT),
    "reward_model.ulysses_sequence_parallel_size": ((1,), _ULYSSES),
    "reward_model.model.external_lib": ((None,), _OUTSIDE),
    "reward_model.model.fsdp_config.min_num_params": ((0,), _WRAP),
    "reward_model.model.fsdp_config.param_offload": ((False,), "a classifier is small, and stays where it is"),
    "reward_model.prime_model.external_lib": ((None,), _OUTSIDE),
    "reward_model.prime_model.fsdp_config.wrap_policy.min_num_params": ((0,), _WRAP),
    "reward_model.prime_model.optim.total_training_steps": ((-1,), _BY_STEPS),
    "reward_model.prime_model.loss_type": (
        ("ce",),
        "the reward policy learns outcomes by cross-entropy, there as well",
    ),
    "trainer.runtime_env": (
        ("none", None),
        "ranks have the environment of this shell: export what the file (align.json) sets",
    ),
}
"""Keys without an effect: the accepted values, and the message for others"""


def known() -> list[str]:
    """All keys."""
    return [*SETTINGS, *CRITIC, *PRIME, *READ, *AGREE, *PASSING]
