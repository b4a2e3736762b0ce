"""Recipes for supervised fine-tuning."""

from __future__ import annotations

from hilt.vla.recap.recap_settings import Recap
from hilt.vla.sft import Sft


def sft_debug() -> Sft:
    """Every part at work, in seconds: too short to learn anything."""
    return Sft(
        tasks=["tabletop/reach"],
        task_options={"image_size": 32, "step_limit": 60},
        demonstrations=3,
        policy_options={"width": 32, "depth": 1, "chunk": 4},
        validation=0.3,
        validation_period=10,
        patience=2,
        max_steps=30,
        batch_size=16,
    )


def sft_tabletop() -> Sft:
    """One small policy for three tasks, of which two differ in a word only, from forty demonstrations of each."""
    return Sft(
        tasks=["tabletop/pick_red", "tabletop/pick_blue", "tabletop/drawer"],
        task_options={"image_size": 64},
        demonstrations=40,
        demonstration_options={"speed": 0.7, "noise": 0.1},
        policy_options={"shift": 2},
        validation_period=150,
        patience=4,
        max_steps=1_500,
        warmup_steps=50,
        schedule="cosine",
    )


def imitation(policy: str, **options: object) -> Sft:
    """A baseline beside RLPD: a policy imitates demonstrations like those of the recipe `tabletop_pick`."""
    return Sft(
        policy=policy,
        policy_options={"chunk": 10, "shift": 2, **options},
        tasks=["tabletop/pick"],
        task_options={"image_size": 64},
        demonstrations=20,
        demonstration_options={"speed": 0.7, "noise": 0.15},
        validation_period=150,
        patience=4,
        max_steps=1_500,
        warmup_steps=50,
        schedule="cosine",
    )


def act() -> Sft:
    """ACT, action chunking with transformers, imitates twenty demonstrations of a task."""
    return imitation("act")


def flow_bc() -> Sft:
    """Behavior cloning by flow matching over chunks of actions, from twenty demonstrations of a task."""
    return imitation("small_vla", head="flow")


def recap_debug() -> Sft:
    """RECAP with every part at work, in a minute: too short to learn anything."""
    return Sft(
        tasks=["tabletop/reach"],
        task_options={"image_size": 32, "step_limit": 20},
        demonstrations=8,
        policy_options={"width": 32, "depth": 1, "chunk": 4},
        validation=0.2,
        validation_period=10,
        patience=2,
        max_steps=20,
        batch_size=16,
        recap=Recap(
            threshold=0.6,
            rounds=1,
            episodes=8,
            value={"encoder": "none", "hidden": 32, "steps": 20, "evaluate_every": 10, "batch_size": 32},
        ),
    )


def recap_tabletop() -> Sft:
    """RECAP in two rounds of 100 episodes, from forty demonstrations of a task."""
    return Sft(
        tasks=["tabletop/pick"],
        task_options={"image_size": 64},
        demonstrations=40,
        demonstration_options={"speed": 0.7, "noise": 0.1},
        policy_options={"shift": 2},
        validation_period=150,
        patience=4,
        max_steps=1_500,
        warmup_steps=50,
        schedule="cosine",
        recap=Recap(threshold=0.6, rounds=2, episodes=100, temperature=0.5),
    )


def distill() -> Sft:
    """What an agent has learned beside a frozen policy goes back into the policy, which imitates the agent's successes:
    give it the log of a run of `frozen_vla`, and policy=FOLDER, the policy that was frozen."""
    return Sft(policy="", tasks=["tabletop/button"], task_options={"image_size": 64, "control_hz": 5})
