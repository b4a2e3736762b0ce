"""Recipes of pi0 in the RLOO loop of RIPT's kind: ``hilt train pi0_rloo policy=FOLDER device=cuda``.

The loop is that of ``multi_task_distributed.yaml`` in the plan of a distributed RLOO trainer for pi0 on LIBERO-Spatial
(RIPT-VLA's, arXiv 2505.17016), which `hilt train rloo --config FILE` reads as it is: nine tasks, divided among the
ranks in turn; each rank works on one of its tasks in a training step and on the next one in the next; initial states
are taken from a ring, another one for each rollout; exactly `data_batch_size` episodes; one epoch; one optimizer step.
Its sizes are those of a test (groups of 2, 4 episodes of 50 steps, 6 training steps), in which nothing can be learned:
here groups have 8, a step 32 episodes of at most 220 steps (LIBERO-Spatial's limit in OpenVLA-OFT's evaluation), and a
run 100 training steps. The flow is pi_RL's (arXiv 2510.25889), as in `pi0_ppo`: Flow-SDE in 4 steps at level 0.5,
chunks of 5.

`policy` is a folder that was fine-tuned on LIBERO's demonstrations before; nothing is downloaded.
"""

from __future__ import annotations

from hilt.algos.config import Batching, Kl, Optimizer, PolicyGradient
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla
from hilt.vla.sft import Lora

TASKS = [f"libero_spatial/{number}" for number in range(9)]
EXPERT = ["gemma_expert.model.*_proj", "action_in_proj", "action_out_proj", "action_time_mlp_*", "state_proj"]
"""The linear layers of the action expert and around it"""


def pi0_rloo() -> Vla:
    """pi0 by RLOO, all weights in float32, with products in bfloat16, an eighth of the time of a step on an H200: the
    least share of its layers is computed twice that fits the GPU."""
    return Vla(
        policy="checkpoints/pi0_libero",
        policy_options={
            "flow": {"kind": "sde", "steps": 4, "level": 0.5},
            "n_action_steps": 5,
            "gradient_checkpointing": "auto",
            "compute": "bfloat16",
        },
        tasks=list(TASKS),
        task_options={"step_limit": 220},
        # a simulator of LIBERO takes a gigabyte, and seconds to be made: a process keeps two
        pool=SimulatorSettings(workers=8, slots=16, envs_per_worker=2, start_s=600, step_s=300),
        collect=Collecting(
            group_size=8,
            data_batch_size=32,
            tasks_per_step=1,
            init_state_mode="distinct",
            when_exhausted="partial",
            report_ranks=True,
        ),
        algorithm=PolicyGradient(
            estimator="rloo", clip_low=0.1, clip_high=0.1, ratio="chunk", batch=Batching(chunks_per_pass=16)
        ),
        optimizer=Optimizer(learning_rate=1e-6),
        validation=Validation(before=False, period=10),
        max_steps=100,
    )


def pi0_rloo_24gb() -> Vla:
    """The same on a GPU of 24 GB: adapters of rank 32 on the action expert alone, in float32 beside weights in bfloat16
    that stay (each multiplies in its own precision); the policy as it was, from which a KL of weight 0.01 keeps it,
    shares them; passes of 32 chunks. `memory_limit_gb` keeps a run on a larger GPU to the same."""
    config = pi0_rloo()
    config.policy_options |= {"dtype": "bfloat16", "compute": "float32"}
    config.memory_limit_gb = 24.0
    config.lora = Lora(rank=32, alpha=32, targets=list(EXPERT))
    config.algorithm.kl = Kl(where="loss", estimate="mse", coefficient=0.01)
    config.algorithm.batch = Batching(chunks_per_pass=32)
    config.optimizer = Optimizer(learning_rate=1e-4)
    return config
