"""Recipes with published settings for pi0, pi0.5 and OpenVLA-OFT, by PPO and by GRPO:
``hilt train pi0_ppo policy=FOLDER device=cuda``.

`policy` is a folder that was fine-tuned on LIBERO's demonstrations before; nothing is downloaded. Sources: pi_RL (arXiv
2510.25889) and RLinf-VLA (arXiv 2510.06710), as the files under ``examples/embodiment/config`` of
github.com/RLinf/RLinf have it (read in August 2026); each recipe names its file. Sizes are those of all GPUs together
there, and of one rank here: divide `collect.data_batch_size` by the ranks.

What is not the same: the size of an optimizer step is in episodes, where theirs is in chunks; others are drawn in place
of groups that the filter drops, where theirs have smaller batches then; a time limit is an end, and no value is
expected after it; advantages of OpenVLA-OFT are of chunks, theirs of actions; a critic's gradient is clipped apart from
the policy's; theirs for `oft_ppo` expects a value after terminations, too (`bootstrap_type: always`); they train for
1,000 steps (`max_epochs`), and 200 are the cap here; they evaluate OpenVLA-OFT with draws at temperature 1.6 (GRPO) or
0.6 (PPO), and here the likeliest actions are taken.
"""

from __future__ import annotations

from typing import Any

from hilt.algos.config import Batching, Optimizer, PolicyGradient
from hilt.vla.collect import Collecting
from hilt.vla.config import Critic, SimulatorSettings, Validation, Vla
from hilt.vla.sft import Lora

TASKS = [f"libero_spatial/{number}" for number in range(10)]


def pi0_ppo() -> Vla:
    """pi0 by PPO with a critic on the expert's output, as in libero_spatial_ppo_openpi.yaml: Flow-SDE in 4 steps at
    level 0.5, chunks of 5, the language model frozen, ratios of chunks, discount 0.99, lambda 0.95, clip 0.2, 4 epochs,
    rates 5e-6 and 1e-4 (value head), betas 0.9 and 0.95. 2,048 chunks there are about 43 episodes: 64 in a step."""
    return Vla(
        policy="checkpoints/pi0_libero",
        policy_options={"flow": {"kind": "sde", "steps": 4, "level": 0.5}, "n_action_steps": 5, "trained": "expert"},
        tasks=list(TASKS),
        task_options={"step_limit": 240},
        pool=_simulators(),
        collect=Collecting(group_size=1, data_batch_size=512),
        algorithm=PolicyGradient(
            **_GAE,
            epochs=4,
            ratio="chunk",
            **_CLIP_PI0,
            batch=Batching(trajectories_per_step=64, chunks_per_pass=16),
        ),
        optimizer=Optimizer(learning_rate=5e-6, betas=[0.9, 0.95]),
        critic=Critic(kind="detached", optimizer=Optimizer(learning_rate=1e-4, betas=[0.9, 0.95])),
        validation=Validation(period=10),
        max_steps=200,
    )


def pi05_ppo() -> Vla:
    """pi0.5 by PPO, as in libero_spatial_ppo_openpi_pi05.yaml: pi0_ppo but for 3 steps of the flow and 1 epoch. The
    critic reads the language model's output (the prefix), as it does for every pi0.5."""
    config = pi0_ppo()
    config.policy = "checkpoints/pi05_libero"
    config.policy_options["flow"]["steps"] = 3
    config.algorithm.epochs = 1
    return config


def pi0_grpo() -> Vla:
    """pi0 by GRPO, as in libero_spatial_grpo_openpi.yaml: groups of 8, of which those with 10 to 90% successes are
    kept, 2 epochs; policy, ratio, clip and rate as in pi0_ppo. Scores are not discounted."""
    config = pi0_ppo()
    config.collect = _of_groups(512)
    batch = Batching(trajectories_per_step=64, chunks_per_pass=16)
    config.algorithm = PolicyGradient(epochs=2, ratio="chunk", **_CLIP_PI0, batch=batch)
    config.critic = Critic()
    return config


def oft_ppo() -> Vla:
    """OpenVLA-OFT by PPO with a critic on its trunk, as in maniskill_ppo_openvlaoft.yaml, which is of ManiSkill: RLinf
    has none for LIBERO. LoRA of rank 32, ratios of tokens, discount 0.99, lambda 0.95, clip 0.2 and 0.28, rates 1e-4
    and 3e-3 (value head), gradients up to 10, temperature 1, 256 episodes in 4 steps."""
    return Vla(
        policy="checkpoints/openvla_oft_libero_spatial",
        policy_options={"unnorm_key": "libero_spatial_no_noops"},
        lora=Lora(rank=32, alpha=32),
        tasks=list(TASKS),
        task_options={"step_limit": 512},
        pool=_simulators(),
        collect=Collecting(group_size=1, data_batch_size=256),
        algorithm=PolicyGradient(
            **_GAE,
            **_CLIP_OFT,
            batch=Batching(trajectories_per_step=64, chunks_per_pass=16),
        ),
        optimizer=Optimizer(learning_rate=1e-4, gradient_clip=10.0),
        critic=Critic(kind="shared", optimizer=Optimizer(learning_rate=3e-3, gradient_clip=10.0)),
        validation=Validation(period=10),
        max_steps=200,
    )


def oft_grpo() -> Vla:
    """OpenVLA-OFT by GRPO, as in libero_spatial_grpo_openvlaoft.yaml: all weights at 2e-5, groups of 8, those with 10
    to 90% successes are kept, temperature 1.6, ratios of tokens, clip 0.2 and 0.28, 1,024 episodes in 4 steps."""
    config = oft_ppo()
    config.lora, config.critic = Lora(), Critic()
    config.collect = _of_groups(1024, temperature=1.6)
    config.algorithm = PolicyGradient(**_CLIP_OFT, batch=Batching(trajectories_per_step=256, chunks_per_pass=16))
    config.optimizer = Optimizer(learning_rate=2e-5)
    return config


_GAE: dict[str, Any] = {"estimator": "gae", "discount": 0.99, "lam": 0.95, "value_coefficient": 1.0, "value_clip": 0.2}
_CLIP_PI0: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "reduction": "token_mean"}
_CLIP_OFT: dict[str, Any] = {**_CLIP_PI0, "clip_high": 0.28}


def _of_groups(episodes: int, temperature: float = 1.0) -> Collecting:
    return Collecting(
        group_size=8,
        data_batch_size=episodes,
        temperature=temperature,
        filter_accuracy=True,
        accuracy_lower_bound=0.1,
        accuracy_upper_bound=0.9,
    )


def _simulators() -> SimulatorSettings:
    """A simulator of LIBERO takes a gigabyte, and seconds to be made: a process keeps two."""
    return SimulatorSettings(workers=4, slots=8, envs_per_worker=2, start_s=600, step_s=300)
