"""Everything that a run with a person in the loop is told: what to do, how to learn, when to save. Names are HIL-SERL's if it has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hilt.algos.tables import ALGORITHMS
from hilt.core.errors import ConfigError, Problems, UnknownNameError
from hilt.observe.alarms import RunFacts, check_stop_on
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.config import check as check_agent

IMITATIONS = ("bc", "hg-dagger")
"""Algorithms that imitate; those of `hilt.algos.tables.ALGORITHMS` learn from rewards"""
STORES = {"log": "hilt.hil.data:Experience", "trajectories": "hilt.compat.rlinf.rollout_experience:Rollouts"}
"""What the learner keeps experience in, by name"""
SENDERS = {"trajectories": "hilt.compat.rlinf.rollout_experience:RolloutSender"}
"""How an actor sends what the learner does not keep in a log: whole episodes, without a spool"""
DEFAULTS = ("auto", "images", "state")
LOST_CONTACT = ("policy", "nobody")
STORE = "actor_env"
"""The learner's name for what actors send"""


def of_run(run: str, store: str = STORE) -> str:
    """That name at the learner of one run: no other learner takes what was meant for it."""
    return f"{store}@{run}" if run else store


@dataclass
class Wire:
    """How actors reach the learner."""

    host: str = "127.0.0.1"
    """Where the learner is; beyond this machine both sides need keys"""
    port: int = 5588
    """For steps and requests"""
    broadcast_port: int = 5589
    """For weights"""
    keys: str = ""
    """A folder of keys made by `hilt keys new`; empty: none, on one machine only"""
    key_name: str = ""
    """Which key of that folder is an actor's own; empty: the only one"""


@dataclass
class Goal:
    """When a task counts as learned. Beside learning, checkpoints are evaluated on the initial states of the split "eval", alone and with
    the likeliest actions; the states of the split "test" are left for `hilt eval`. For simulations only."""

    success: float = 0.0
    """The run ends when the policy succeeds in at least this share of the evaluation states; 0: success does not end it"""
    states: int = 100
    """Number of evaluation states, from the first on, that each evaluation tries once"""
    period: int = 1_000
    """Learner steps between the beginnings of two evaluations; one that takes longer delays the next"""
    hold: int = 2
    """Number of evaluations in a row, each of another checkpoint, that must reach it"""


@dataclass
class Hil:
    """A run: actors act, a person takes over, a learner trains from replay."""

    task: str = "tabletop/pick"
    """What `hilt.envs.task.make` makes"""
    task_options: dict[str, Any] = field(default_factory=dict)
    """What it is given besides"""
    observations: str = "nested"
    """"nested", as the environment gives them; or "hil-serl", as that one's wrappers make them"""
    image_keys: list[str] = field(default_factory=list)
    """The cameras that the policy sees, such as images/front; empty: all"""
    proprio_keys: list[str] = field(default_factory=list)
    """What else it sees, such as state/tcp_pose; empty: all"""
    classifier: str = ""
    """A folder made by `hilt train classifier`, or a reward by name or module:function: the reward is what it says; empty: the
    environment's own"""
    control_hz: float = 0.0
    """Steps in a second; 0: the task's own rate for an arm or a person, as fast as it goes for a simulation"""
    max_traj_length: int = 0
    """Steps after which an episode is truncated; 0: the task's own limit"""

    demo_path: list[str] = field(default_factory=list)
    """Demonstrations: any number of paths, in any format that `hilt data formats` lists"""
    demonstrations: int = 0
    """So many are recorded by the task's own script before the run begins, into RUN/demonstrations; 0: none"""
    demonstration_options: dict[str, Any] = field(default_factory=dict)
    """What that script is opened with"""
    checkpoint_path: str = ""
    """A folder of HIL-SERL's whose two buffers are imported once; empty: none"""
    operator: str = ""
    """Who may take over: browser, keyboard, gamepad, spacemouse, script; empty: nobody"""
    operator_options: dict[str, Any] = field(default_factory=dict)
    """What the device is opened with"""
    lost_contact: str = "policy"
    """Who goes on when contact to the operator has been lost for `lost_contact_seconds`: "policy"; or "nobody": the run stays paused"""
    lost_contact_seconds: float = 30.0
    """Seconds that the run is paused for an operator who is out of reach, before the policy goes on"""
    actors: int = 1
    """How many `hilt train` starts"""

    defaults: str = "auto"
    """What is chosen for settings that have no other value: "images" leaves them as they are, HIL-SERL's; "state" has what suits a policy
    that sees no images; "auto": the one that fits what it sees, decided when a run begins"""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """The policy, and how it learns"""
    algorithm: str = "rlpd"
    """"rlpd", "bc" (demonstrations only), or "hg-dagger" (imitates demonstrations and take-overs); or another one that learns from rewards,
    by name or module:Class"""
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    """What another algorithm is made with"""
    store: str = "log"
    """Where the learner keeps experience: "log", or "trajectories", RLinf's TrajectoryReplayBuffer"""
    seed: int = 42
    """Of everything random"""
    batch_size: int = 256
    """Half of it online, half demonstrations"""
    n_step: int = 1
    """Rewards of so many steps are summed before the critic looks ahead"""
    cta_ratio: int = 2
    """Critic updates for each update of the actor"""
    update_to_data: float = 0.0
    """At most so many learner steps for each online step; 0: as many as the machine can"""
    max_ahead: int = 0
    """A simulation waits while online steps are so many ahead of learner steps, so that it does not outrun the learner; 0: never"""
    random_steps: int = 0
    """So many first steps are random"""
    collect_steps: int = 0
    """So many first online steps are driven by the pretrained policy and the operator; then pretraining is repeated from scratch, with
    their successful episodes besides the demonstrations, before learning begins; 0: it is not"""
    training_starts: int = 100
    """Online steps before the first update"""
    steps_per_update: int = 50
    """Learner steps between two publications of the weights"""
    max_steps: int = 1_000_000
    """Learner steps after which the run ends"""
    max_seconds: float = 0.0
    """Seconds from the first online step after which the run ends; 0: no limit"""
    max_env_steps: int = 0
    """Online steps after which the run ends; 0: no limit"""
    goal: Goal = field(default_factory=Goal)
    """Success at which the run ends"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the run when they are raised, with a checkpoint, such as [q_bound, overestimation]: docs/observe.md lists them"""
    replay_buffer_capacity: int = 200_000
    """Online steps that are kept"""
    checkpoint_period: int = 0
    """Learner steps between two checkpoints; 0: every five minutes. One is always made at the end"""
    checkpoint_keep: int = 10
    """How many of them stay"""
    buffer_period: int = 0
    """Online steps between two copies of the buffers in HIL-SERL's files; 0: none, for the log is on the disk anyway"""
    log_period: int = 10
    """Learner steps between two lines of metrics"""
    sinks: list[str] = field(default_factory=list)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, trackio; or another one by name or module:Class"""
    wire: Wire = field(default_factory=Wire)
    """How actors reach the learner"""


MINIMUM = {
    **dict.fromkeys(("n_step", "cta_ratio", "steps_per_update", "log_period", "checkpoint_keep", "replay_buffer_capacity"), 1),
    **dict.fromkeys(("training_starts", "random_steps", "max_ahead", "update_to_data", "max_steps", "max_seconds", "max_env_steps"), 0),
    **dict.fromkeys(("checkpoint_period", "buffer_period", "demonstrations", "control_hz", "max_traj_length", "collect_steps"), 0),
    "lost_contact_seconds": 0,
    "batch_size": 2,
}


def check(config: Hil) -> None:
    """Refuses what cannot work, all of it at once."""
    problems = Problems()
    for what, given, known in (
        ("store", config.store, STORES),
        ("defaults", config.defaults, DEFAULTS),
        ("lost_contact", config.lost_contact, LOST_CONTACT),
    ):
        with problems.collected():
            if given not in known:
                raise UnknownNameError(what, given, known)
    problems.check(_check_algorithm, config)
    for name, smallest in MINIMUM.items():
        with problems.collected():
            if not getattr(config, name) >= smallest:
                raise ConfigError(f"{name}={getattr(config, name)}: expected at least {smallest}.")
    problems.check(_check_goal, config.goal)
    problems.check(check_agent, config.agent)
    problems.check(_check_together, config)
    problems.check(check_stop_on, config.stop_on, facts(config))
    if config.collect_steps:
        problems.check(_check_collecting, config)
    problems.report()


def reinforces(config: Hil) -> bool:
    """Whether the run learns from rewards, and does not only imitate."""
    return config.algorithm not in IMITATIONS


def _check_algorithm(config: Hil) -> None:
    if reinforces(config):
        if not ALGORITHMS.is_name(config.algorithm):
            raise UnknownNameError("algorithm", config.algorithm, [*ALGORITHMS.known(), *IMITATIONS, "package.module:Class"])
        ALGORITHMS.check(config.algorithm)


def facts(config: Hil) -> RunFacts:
    """What alarms must know of these settings."""
    rlpd, learns = config.agent.rlpd, config.algorithm == "rlpd"
    low_high = rlpd.target_range
    return RunFacts(
        "hil",
        validates=config.goal.success > 0,
        rlpd=learns,
        discount=rlpd.discount**config.n_step,
        q_range=(low_high[0], low_high[1]) if low_high else None,
        entropy_in_q=rlpd.backup_entropy,
        update_to_data=config.update_to_data,
    )


def _check_together(config: Hil) -> None:
    encoder = config.agent.encoder
    if encoder.pretrain_predict and not encoder.pretrain_updates:
        raise ConfigError(f"pretrain_predict={encoder.pretrain_predict} is for the encoder's pretraining: give pretrain_updates, too.")
    ahead, share = config.max_ahead, config.update_to_data
    if ahead and (ahead < config.training_starts or 0 < share < 1) and reinforces(config):
        why = f"update_to_data={share:g}, below 1" if ahead >= config.training_starts else f"training_starts={config.training_starts}"
        raise ConfigError(f"max_ahead={ahead} with {why}: actors and the learner would wait for each other. Leave max_ahead out.")


def _check_goal(goal: Goal) -> None:
    if not 0 <= goal.success <= 1:
        raise ConfigError(f"goal.success={goal.success}: expected a share of the evaluation states, from 0 (off) to 1.")
    for name in ("states", "period", "hold"):
        if getattr(goal, name) < 1:
            raise ConfigError(f"goal.{name}={getattr(goal, name)}: expected at least 1.")


def _check_collecting(config: Hil) -> None:
    room = config.replay_buffer_capacity
    for fits, why in (
        (config.agent.encoder.pretrain_updates > 0, "repeats the pretraining, and there is none: give agent.encoder.pretrain_updates, too"),
        (reinforces(config), f"comes before reinforcement learning, and algorithm is {config.algorithm}: leave it out"),
        (config.store == "log", f"reads episodes back from the log, and store is {config.store}: set store=log, or leave it out"),
        (room >= config.collect_steps, f"is more than is kept: make it less, or replay_buffer_capacity={room} larger"),
    ):
        if not fits:
            raise ConfigError(f"collect_steps={config.collect_steps} {why}.")
