"""Recipes for runs with a person in the loop."""

from __future__ import annotations

from hilt.algos.config import Rlpd
from hilt.policies.config import AgentConfig, EncoderConfig
from hilt.runtime.config import Hil


def hil_debug() -> Hil:
    """Every part at work, in seconds: too short to learn anything."""
    return Hil(
        task="tabletop/reach",
        task_options={"image_size": 32, "step_limit": 30},
        demonstrations=2,
        operator="script",
        agent=AgentConfig(encoder=EncoderConfig(features=16), hidden=[32, 32]),
        batch_size=32,
        training_starts=40,
        random_steps=20,
        steps_per_update=10,
        max_steps=60,
        checkpoint_period=30,
    )


def tabletop_pick() -> Hil:
    """A cube is picked up: two cameras of 64 pixels, twenty demonstrations, and a script that takes over like a person."""
    return Hil(
        task="tabletop/pick",
        demonstrations=20,
        operator="script",
        agent=AgentConfig(
            encoder=EncoderConfig(training="frozen", pretrain_updates=1_000),
            rlpd=Rlpd(discount=0.96, tau=0.01, learning_rate=5e-4, target_range=[0.0, 1.0], target_entropy=-1.0, critic_warmup=1_000),
        ),
        batch_size=128,
        n_step=3,
        cta_ratio=1,
        update_to_data=1.0,
        max_seconds=600.0,
    )


def tabletop_peg() -> Hil:
    """A peg goes into its hole: contact, and millimetres."""
    config = tabletop_pick()
    config.task, config.max_seconds = "tabletop/peg", 1200.0
    return config
