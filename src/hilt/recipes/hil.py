"""Recipes for runs with a person in the loop. They end by updates, so that they
come to the same on any machine; the clock is a cap.

The numbers of updates are those with which the tasks were measured (docs/benchmarks.md), on two cores without a GPU: of
`push` and `peg`, which were not measured to the end, that of `insert`.
"""

from __future__ import annotations

from typing import Any

from hilt.algos.config import Rlpd
from hilt.hil.config import Goal, Hil
from hilt.policies.agent.config import AgentConfig, EncoderConfig

XYZ_GRIP, XYZ_YAW, XYZ_YAW_GRIP = [0, 1, 2, 6], [0, 1, 2, 5], [0, 1, 2, 5, 6]
"""Numbers of an action that a policy moves"""


def hil_debug() -> Hil:
    """Every part at work, in seconds: too short to learn anything."""
    return Hil(
        task="tabletop/reach",
        task_options={"image_size": 32, "step_limit": 60},
        demonstrations=2,
        operator="script",
        defaults="images",
        agent=AgentConfig(encoder=EncoderConfig(features=16), hidden=[32, 32]),
        batch_size=32,
        training_starts=40,
        random_steps=20,
        steps_per_update=10,
        max_steps=60,
        checkpoint_period=30,
    )


CAP_S = 3600.0
"""The maximum duration of a run in seconds, however few updates the machine has made"""


def tabletop(task: str, moves: list[int], max_steps: int, speed: float = 0.7, noise: float = 0.15) -> Hil:
    """A task of the embedded suite from two cameras of 64 pixels, with twenty demonstrations that are slow and
    not exact, and a script that takes over like a person. The encoder learns by imitating them and by
    foreseeing where the gripper will act; then it is frozen, and its features are kept. The policy begins with
    that imitation, and RLPD goes on from there."""
    return Hil(
        task=f"tabletop/{task}",
        task_options={"image_size": 64},
        demonstrations=20,
        demonstration_options={"speed": speed, "noise": noise},
        operator="script",
        agent=AgentConfig(
            encoder=EncoderConfig(training="frozen", pretrain_updates=1_000, pretrain_predict="state/tcp_pose"),
            action_indices=moves,
            pose_keys=["state/tcp_pose"],
            normalize_proprio=True,
            proprio_floor={
                "state/tcp_pose": 0.05,
                "state/tcp_vel": 0.05,
                "state/gripper_pose": 0.1,
                "state/tcp_force": 1.0,
                "state/tcp_torque": 0.2,
            },
            proprio_width=0,
            activation="relu",
            actor_scale=0.1,
            initial_std=0.2,
            std_range=[0.0183, 1.65],
            rlpd=Rlpd(
                discount=0.96,
                tau=0.01,
                learning_rate=5e-4,
                target_entropy=-float(len(moves)),
                target_range=[0.0, 1.0],
                actor_q="min",
                actor_average=0.005,
                critic_warmup=1_000,
                imitation_loss="mse",
            ),
        ),
        batch_size=128,
        n_step=3,
        cta_ratio=1,
        update_to_data=4.0,
        max_ahead=200,
        training_starts=200,
        steps_per_update=10,
        log_period=50,
        max_steps=max_steps,
        max_seconds=CAP_S,
    )


def until(config: Hil, goal: Goal) -> Hil:
    """It ends when success holds at the goal, on any machine; its number of updates is the cap, and no clock."""
    config.goal, config.max_seconds = goal, 0.0
    return config


def tabletop_pick() -> Hil:
    """A cube is picked up."""
    return until(tabletop("pick", XYZ_GRIP, 60_000), Goal(success=0.98, period=2_000, hold=3))


def tabletop_button() -> Hil:
    """A button is pressed, at five steps a second: few steps to success, so that `hilt demo --fast` learns it in about
    a minute. Imitation holds the policy while the critics know little yet."""
    config = until(tabletop("button", XYZ_GRIP, 8_000), Goal(success=0.95, states=40, period=500))
    config.task_options["control_hz"] = 5
    config.demonstrations = 10
    agent, rlpd = config.agent, config.agent.rlpd
    agent.encoder.pretrain_updates, agent.encoder.pretrain_batch = 120, 64
    agent.std_range = [0.0183, 0.25]
    rlpd.temperature, rlpd.tau, rlpd.critic_warmup, rlpd.imitation_weight = 0.001, 0.02, 300, 0.5
    return config


def wsrl() -> Hil:
    """WSRL, of the button of `tabletop_button`: actor and critics learn from demonstrations alone, held by CQL's term
    with Cal-QL's bound; the policy as it is then warms up the log; and online steps alone are learned from."""
    config = tabletop_button()
    rlpd, count = config.agent.rlpd, 2_000
    rlpd.conservative, rlpd.conservative_updates, config.offline_updates = 0.05, count, count
    config.training_starts = config.max_ahead = count
    config.demo_share = 0.0
    return config


def tabletop_pick_red() -> Hil:
    """The red cube of two is picked up."""
    return tabletop("pick_red", XYZ_YAW_GRIP, 50_000, noise=0.1)


def tabletop_drawer() -> Hil:
    """A drawer is pulled open."""
    return tabletop("drawer", XYZ_YAW_GRIP, 30_000)


def seen_twice(config: Hil, steps: int, imitation: float = 0.0) -> Hil:
    """For tasks in which twenty demonstrations are too few to train the encoder: the operator's steps are used, too,
    before the encoder is frozen; and its features are not taken at their word."""
    config.collect_steps = steps
    config.agent.encoder.pretrain_learning_rate = 3e-3
    config.agent.rlpd.feature_noise, config.agent.rlpd.imitation_weight = 0.1, imitation
    return config


def tabletop_push() -> Hil:
    """A block is pushed to its place."""
    return seen_twice(tabletop("push", XYZ_YAW_GRIP, 65_000, noise=0.1), 4_000, imitation=0.1)


def tabletop_insert() -> Hil:
    """A peg that is in the hand goes into its hole: contact, and millimeters."""
    return seen_twice(tabletop("insert", XYZ_YAW, 65_000, noise=0.1), 6_000)


def tabletop_peg() -> Hil:
    """A peg is picked up, and goes into its hole."""
    config = seen_twice(tabletop("peg", XYZ_YAW_GRIP, 65_000, noise=0.1), 10_000, imitation=0.1)
    config.agent.encoder.pretrain_updates = 1_500
    return config


PERSON_VLA: dict[str, Any] = {
    "mode": "asynchronous",
    "execute": 1,
    "learning_rate": 1e-3,
    "halved_after": 2_000,
    "average": 0.003,
}
"""It looks again after each action, as a chunk of three that is executed to its end passes the button now and then; at
a control rate the arm goes on with the last chunk meanwhile. The learning rate falls and an average acts, because there
is nothing new to learn once a person takes over rarely"""


def vla_person() -> Hil:
    """A person takes over from a vision-language-action policy, which learns from that: the four buttons of
    `hilt demo person`. Give it agent.options.policy, a folder that `hilt train sft` made, and demo_path. A simulation
    waits for ten updates for each step, so that the policy is as new as it would be beside an arm. It has learned
    when it succeeds alone, and a person had to take over in at most two of the last 50 episodes."""
    return Hil(
        task="+".join(f"tabletop/press_{color}" for color in ("red", "green", "blue", "yellow")),
        task_options={"image_size": 64, "cameras": ["wrist"], "control_hz": 5, "step_limit": 18},
        operator="script",
        agent=AgentConfig(kind="vla", options=dict(PERSON_VLA)),
        algorithm="hg-dagger",
        batch_size=32,
        max_ahead=20,
        updates_per_step=10.0,
        steps_per_update=10,
        log_period=50,
        max_steps=20_000,
        goal=Goal(success=0.97, period=1_000, take_overs=0.04),
    )


def frozen_vla() -> Hil:
    """A small actor-critic beside a vision-language-action policy that stays as it is: the button of `tabletop_button`.
    Give it agent.options.policy, a folder that `hilt train sft` made of the same task, and demo_path."""
    moves = XYZ_GRIP
    config = Hil(
        task="tabletop/button",
        task_options={"image_size": 64, "control_hz": 5},
        operator="script",
        agent=AgentConfig(
            kind="frozen_vla",
            encoder=EncoderConfig(kind="none"),
            action_indices=moves,
            proprio_width=0,
            activation="relu",
            actor_scale=0.01,
            initial_std=0.1,
            std_range=[0.0183, 0.3],
            rlpd=Rlpd(
                discount=0.96,
                tau=0.02,
                learning_rate=5e-4,
                temperature=0.001,
                target_entropy=-float(len(moves)),
                target_range=[0.0, 1.0],
                actor_q="min",
                actor_average=0.005,
            ),
        ),
        batch_size=128,
        n_step=3,
        cta_ratio=1,
        update_to_data=4.0,
        max_ahead=200,
        training_starts=200,
        steps_per_update=10,
        log_period=50,
        max_steps=8_000,
    )
    return until(config, Goal(success=0.95, states=40, period=500))
