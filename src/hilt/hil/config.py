"""The settings of a run with a person in the loop: what to do, how to learn, when
to save. Names are HIL-SERL's where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hilt.algos.config import CONDITIONS, GROUPED, CriticConfig
from hilt.algos.tables import ALGORITHMS
from hilt.core import validate
from hilt.core.errors import Problems, UnknownNameError
from hilt.core.validate import Need, setting
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.observe.alarms import RunFacts, check_stop_on
from hilt.policies.agent.config import CHUNK as CHUNK
from hilt.policies.agent.config import CHUNK_INDEX as CHUNK_INDEX
from hilt.policies.agent.config import FROZEN_VLA, AgentConfig

IMITATIONS = {
    "bc": ("demonstrations",),
    "hg-dagger": ("demonstrations", "human"),
    "filtered": ("demonstrations", "human", "successes"),
    "recap": ("demonstrations", "human", "policy", "earlier"),
}
"""Algorithms that imitate, and the views that they learn from; those of `hilt.algos.tables.ALGORITHMS` learn from
rewards"""
RECAP = "recap"
"""The algorithm that imitates good and bad steps, conditioned on which they are"""
PARTS = {"bc": "demonstrations", "hg-dagger": "demo", "filtered": "filtered", RECAP: RECAP}
"""The part of the data that each of them draws its batches from"""
MIXED = "mixed"
"""The algorithm that imitates, and learns from groups of simulated episodes besides"""
TASK_COLUMN = "task"
"""A column of steps: which task of a mix the episode is of"""
RECORD, DECIDED = "record", "decided"
"""Columns of the first step of a chunk: what the policy drew, as in the logs of post-training; and the number of steps
since that with whose observation it was planned, -1 in steps that have no record"""
GROUP, MEMBER = "group", "member"
"""Columns of steps of a run with algorithm=mixed: which group of simulated episodes, and which episode of it, from 0;
-1 in steps that belong to none"""
STORES = {"log": "hilt.hil.data:Experience", "trajectories": "hilt.compat.rlinf.rollout_experience:Rollouts"}
"""What the learner keeps experience in, by name"""
SENDERS = {"trajectories": "hilt.compat.rlinf.rollout_experience:RolloutSender"}
"""How an actor sends what the learner does not keep in a log: whole episodes, without a spool"""
OBSERVATIONS = ("nested", "hil-serl")
DEFAULTS = ("auto", "images", "frozen_encoder", "state")
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
    port: int = setting(5588, minimum=0, maximum=65535)
    """For steps and requests"""
    broadcast_port: int = setting(5589, minimum=0, maximum=65535)
    """For weights"""
    keys: str = ""
    """A folder of keys made by `hilt keys new`; empty: none, on one machine only"""
    key_name: str = setting("", needs=Need("{here}keys=FOLDER", lambda c: c.keys))
    """Which key of that folder is an actor's own; empty: the only one"""


_SEEKS_GOAL = Need("{here}success", lambda c: c.success)
AVERAGE_KL = 0.25
"""Nats that the policy that is trained may be away from its moving average, which acts: see the alarm ppo_kl"""
LOOKED_AT = ("actor_critic", FROZEN_VLA, "vla")
"""Agents that measure whether their networks can still learn; those of other packages may not"""
GOAL_SPLIT = "eval"
"""The split of the initial states on which checkpoints are evaluated beside learning"""


@dataclass
class Goal:
    """When a task counts as learned. Beside learning, checkpoints are evaluated on the initial
    states of the split "eval", alone and with the likeliest actions; the states of the split "test"
    are left for `hilt eval`. For simulations only."""

    success: float = setting(0.0, minimum=0, maximum=1)
    """The run ends when the policy succeeds in at least this share of the
    evaluation states; 0: success does not end it"""
    states: int = setting(100, minimum=1, needs=_SEEKS_GOAL)
    """Number of evaluation states, from the first on, that each evaluation tries once"""
    period: int = setting(1_000, minimum=1, needs=_SEEKS_GOAL)
    """Learner steps between the beginnings of two evaluations; one that takes longer delays the next"""
    hold: int = setting(2, minimum=1, needs=_SEEKS_GOAL)
    """Number of evaluations in a row, each of another checkpoint, that must reach it"""
    take_overs: float = setting(1.0, minimum=0, maximum=1, needs=_SEEKS_GOAL)
    """A person has taken over in at most this share of the last 50 episodes; 1: however often"""


@dataclass
class Mixed:
    """With algorithm=mixed: what is imitated, and the groups of simulated episodes that the policy learns from
    besides. The members of a group begin in the same initial state, with sampled actions, and are compared."""

    imitation: str = setting("hg-dagger", choices=tuple(name for name in IMITATIONS if name != RECAP))
    """What is imitated: "bc", "hg-dagger" or "filtered", as the algorithms of these names do"""
    task: str = ""
    """The simulated task of the groups, with the observations, actions and number of tasks of the run's own; empty:
    the run's own"""
    task_options: dict[str, Any] = setting(factory=dict, needs=Need("{here}task=NAME", lambda c: c.task))
    """What that task is given besides"""
    simulations: int = setting(1, minimum=0)
    """Actors for groups that `hilt train` starts; 0: none, they are started with `hilt actor --simulation`"""
    group_size: int = setting(8, minimum=2)
    """Episodes in a group"""
    groups: int = setting(4, minimum=1)
    """Groups in an update that has some"""
    period: int = setting(10, minimum=1)
    """Learner steps between two updates that have groups; the learner waits until they are complete"""
    max_age: int = setting(10, minimum=0)
    """A group is dropped if more versions of the weights than this were published since its oldest action"""
    weight: float = setting(1.0, above=0)
    """Weight of the loss of the groups; that of imitation is 1"""
    temperature: float = setting(1.0, above=0)
    """The temperature at which actions of groups are sampled"""
    estimator: str = setting("grpo", choices=GROUPED)
    """Of advantages, from the successes of a group: grpo, dr_grpo or rloo"""
    clip_low: float = setting(0.2, minimum=0, maximum=1)
    """A probability ratio below 1 - clip_low gains nothing more"""
    clip_high: float = setting(0.28, minimum=0)
    """Nor one above 1 + clip_high"""


_HAS_MODEL = Need("{here}model=FOLDER", lambda c: c.model)


@dataclass
class ValueUse:
    """What a value model of `hilt train value` does while actors act: alone it watches, and its probability of success
    is on the take-over page and in the metrics. It does nothing in an evaluation."""

    model: str = ""
    """A folder made by `hilt train value`; empty: none"""
    reward: float = setting(0.0, minimum=0, needs=_HAS_MODEL)
    """Weight of a dense reward, which is added to that of each step, demonstrations included: discount * V(s') - V(s),
    with which the best policy stays the best; 0: none"""
    stop_below: float = setting(0.0, minimum=0, below=1, needs=_HAS_MODEL)
    """An episode is truncated when the probability of success stays below this; 0: never"""
    stop_patience: int = setting(10, minimum=1, needs=Need("{here}stop_below", lambda c: c.stop_below))
    """The number of steps in a row for which it does, in which no person acts"""
    alarm_below: float = setting(0.0, minimum=0, below=1, needs=_HAS_MODEL)
    """The operator is asked for help when the probability of success stays below this; 0: never"""
    alarm_patience: int = setting(5, minimum=1, needs=Need("{here}alarm_below", lambda c: c.alarm_below))
    """The number of steps in a row for which it does, in which no person acts; it asks once in a row"""

    def conflicts(self, here: str) -> Iterator[str]:
        if 0 < self.alarm_below <= self.stop_below and self.stop_patience <= self.alarm_patience:
            yield (
                f"{here}alarm_below={self.alarm_below:g} with {here}stop_below={self.stop_below:g}: the episode has "
                f"ended before anybody is asked. Give {here}alarm_below a larger probability, or a smaller "
                f"{here}alarm_patience than {here}stop_patience={self.stop_patience}."
            )


@dataclass
class LiveRecap:
    """With algorithm=recap: episodes are valued as they end, and the policy imitates all of them, conditioned on which
    steps are good, and acts as in good ones (`hilt.algos.offline.recap`)."""

    model: str = ""
    """The value model, a folder made by `hilt train value` of episodes of the same tasks"""
    threshold: float = setting(0.6, above=0, below=1)
    """The share of what the policy did in each task that counts as bad; what a person did is always good"""
    dropout: float = setting(0.3, minimum=0, below=1)
    """The share of samples that are learned without the condition"""
    guidance: float = setting(1.0, above=0, maximum=20)
    """How much the condition counts when the policy acts: 1 as it was learned, more for less of what was bad"""
    condition: str = setting("words", choices=CONDITIONS)
    """What the policy is told it by: "words" behind the instruction; or an "embedding", which is learned and added to
    the token of the state"""


_ASKS = Need("{here}quantile", lambda c: c.quantile)


@dataclass
class HelpRequests:
    """When the policy asks the operator for help: where its critics disagree more than they mostly do, or the chunks
    that a VLA draws differ so; and, with `value.alarm_below`, where a value model expects a failure."""

    quantile: float = setting(0.0, minimum=0, below=1)
    """It asks where the standard deviation of Q over the critics, or of drawn chunks, is above this quantile of its
    last values, such as 0.99: in about 1% of the steps, or plans; 0: it never asks"""
    window: int = setting(1000, minimum=20, needs=_ASKS)
    """The number of last values, and of steps, or plans, before it asks first"""
    samples: int = setting(4, minimum=2, needs=_ASKS)
    """With agent.kind=vla: the number of chunks that are drawn beside each plan, to see how much they differ"""
    wait_seconds: float = setting(10.0, minimum=0)
    """Seconds for which it holds still until the operator takes over, or presses a button; then it goes on. 0: it goes
    on at once, while the message is shown"""


def reinforces(config: Hil) -> bool:
    """Whether the run learns from rewards by an off-policy algorithm, and does not imitate."""
    return config.algorithm not in (*IMITATIONS, MIXED)


def imitation(config: Hil) -> str:
    """The algorithm by which a run imitates, one of `IMITATIONS`; empty if it does not."""
    return config.mixed.imitation if config.algorithm == MIXED else "" if reinforces(config) else config.algorithm


def _check_algorithm(name: str) -> None:
    if name not in (*IMITATIONS, MIXED):
        if not ALGORITHMS.is_name(name):
            known = [*ALGORITHMS.known(), *IMITATIONS, MIXED, "package.module:Class"]
            raise UnknownNameError("algorithm", name, known)
        ALGORITHMS.check(name)


def _is_vla(config: Hil) -> bool:
    return config.agent.kind == "vla"


def _clones(config: Hil) -> bool:
    return config.agent.rlpd.actor == "behavior"


def _imitates(config: Hil) -> bool:
    return not reinforces(config) or config.agent.encoder.pretrain_updates > 0


def _judges_by_folder(config: Hil) -> bool:
    if not config.classifier:
        return False
    from hilt.envs.rewards import REWARDS  # late: it needs gymnasium

    return not REWARDS.is_name(config.classifier)


_OPERATOR = Need("an operator, such as operator=browser", lambda c: c.operator)
_ASKS_FOR_HELP = Need(
    "help.quantile or value.alarm_below", lambda c: c.help.quantile or c.value.alarm_below, of=("wait_seconds",)
)
_CLASSIFIER = Need("classifier=FOLDER", _judges_by_folder)
_GOES_ON = Need("lost_contact=policy", lambda c: c.lost_contact == "policy")
_RLPD = Need("algorithm=rlpd", reinforces)
_IMITATES = Need(
    "algorithm=hg-dagger, filtered, recap or mixed", lambda c: c.algorithm in ("hg-dagger", "filtered", RECAP, MIXED)
)
_RECAP = Need("algorithm=recap", lambda c: c.algorithm == RECAP, of=tuple(item.name for item in fields(LiveRecap)))
_MIXED = Need("algorithm=mixed", lambda c: c.algorithm == MIXED, of=tuple(item.name for item in fields(Mixed)))
_OTHER_ALGORITHM = Need(
    "another algorithm, algorithm=module:Class", lambda c: c.algorithm not in ("rlpd", *IMITATIONS, MIXED)
)
_STEPWISE = Need("agent.chunk=1: the rewards of a chunk are summed anyway", lambda c: c.agent.chunk == 1)
_SHOWN = Need(
    "demonstrations=N, demo_path or checkpoint_path", lambda c: c.demonstrations or c.demo_path or c.checkpoint_path
)
_LOOKS = Need("an encoder (agent.encoder.kind=small or resnet10)", lambda c: c.agent.encoder.kind != "none")
_PRETRAINS = Need("agent.encoder.pretrain_updates", lambda c: c.agent.encoder.pretrain_updates > 0)
_OF_RLPD = {"chunk": 1, "rlpd.samples": 1, "rlpd.actor": "soft", "rlpd.conservative": 0}
"""Settings of the agent that rlpd alone has, of the algorithms that learn from rewards, and their defaults"""
_OF_AGENT = (
    Need(
        _RLPD.needed,
        _RLPD.there,
        of=(
            *(
                "rlpd.discount",
                "rlpd.tau",
                "rlpd.critics",
                "rlpd.subset",
                "rlpd.temperature",
                "rlpd.target_entropy",
                "rlpd.backup_entropy",
            ),
            *("rlpd.reward_bias", "rlpd.target_range", "rlpd.actor_q", "rlpd.critic_warmup", "rlpd.imitation_weight"),
            *("rlpd.imitation_updates", "rlpd.actor", "rlpd.samples", "chunk"),
            *("rlpd.conservative", "rlpd.conservative_samples", "rlpd.conservative_updates", "rlpd.calibrated"),
        ),
    ),
    Need(_RLPD.needed, _RLPD.there, of=tuple(f"critic.{item.name}" for item in fields(CriticConfig))),
    Need(
        "imitation (agent.rlpd.imitation_weight, critic_warmup or actor=behavior, or agent.encoder.pretrain_updates)",
        lambda c: _imitates(c) or c.agent.rlpd.imitation_weight or c.agent.rlpd.critic_warmup or _clones(c),
        of=("rlpd.imitation_loss",),
    ),
    Need(
        "imitation (algorithm=bc or hg-dagger, or agent.encoder.pretrain_updates)", _imitates, of=("rlpd.grasp_margin",)
    ),
)
"""What settings of the agent need of the run"""


@dataclass
class Hil:
    """A run: actors act, a person takes over, a learner trains from replay."""

    task: str = "tabletop/pick"
    """What `hilt.envs.task.make` makes"""
    task_options: dict[str, Any] = field(default_factory=dict)
    """What it is given besides"""
    observations: str = setting("nested", choices=OBSERVATIONS, noun="kind of observations")
    """"nested", as the environment gives them; or "hil-serl", as that one's wrappers make them"""
    image_keys: list[str] = setting(factory=list, needs=_LOOKS)
    """The cameras that the policy sees, such as images/front; empty: all"""
    proprio_keys: list[str] = field(default_factory=list)
    """What else it sees, such as state/tcp_pose; empty: all"""
    classifier: str = ""
    """A folder made by `hilt train classifier`, or a reward by name or module:function: the reward is
    what it says; empty: the environment's own"""
    classifier_threshold: float = setting(0.0, minimum=0, below=1, needs=_CLASSIFIER)
    """An observation is a success from this probability on; 0: the threshold that the classifier has itself"""
    value: ValueUse = setting(
        factory=ValueUse,
        needs=(
            Need(_RLPD.needed, _RLPD.there, of=("reward",)),
            Need(_OPERATOR.needed, _OPERATOR.there, of=("alarm_below",)),
        ),
    )
    """A value model that watches episodes: it can add a dense reward, end hopeless ones, and ask for the operator"""
    control_hz: float = setting(0.0, minimum=0)
    """Steps in a second; 0: the task's own rate for an arm or a person, as fast as it goes for a simulation"""
    max_traj_length: int = setting(0, minimum=0)
    """Steps after which an episode is truncated; 0: the task's own limit"""

    demo_path: list[str] = field(default_factory=list)
    """Demonstrations: any number of paths, in any format that `hilt data formats` lists"""
    demo_where: str = setting("", known=EpisodeFilter.parse, needs=Need("demo_path=[PATH]", lambda c: c.demo_path))
    """Which episodes of the logs in `demo_path` are imported: a filter as `hilt data tag --where` takes, such as
    "success=true advantage_percentile>=60" or tag=good; empty: all"""
    demonstrations: int = setting(0, minimum=0)
    """The number recorded by the task's own script before the run begins, into RUN/demonstrations; 0: none"""
    demonstration_options: dict[str, Any] = setting(
        factory=dict, needs=Need("demonstrations=N", lambda c: c.demonstrations)
    )
    """What that script is opened with"""
    checkpoint_path: str = ""
    """A folder of HIL-SERL's whose two buffers are imported once; empty: none"""
    operator: str = ""
    """Who may take over: browser, keyboard, gamepad, spacemouse, leader, script; empty: no one"""
    operator_options: dict[str, Any] = setting(factory=dict, needs=_OPERATOR)
    """What the device is opened with"""
    lost_contact: str = setting("policy", choices=("policy", "pause"), needs=_OPERATOR)
    """When contact to the operator is lost for `lost_contact_seconds`: "policy": the
    policy continues; "pause": the run stays paused"""
    lost_contact_seconds: float = setting(30.0, minimum=0, needs=(_OPERATOR, _GOES_ON))
    """Seconds that the run is paused for an operator who is out of reach, before the policy goes on"""
    help: HelpRequests = setting(
        factory=HelpRequests,
        needs=(
            Need(_OPERATOR.needed, _OPERATOR.there, of=("quantile",)),
            Need(
                "algorithm=rlpd or agent.kind=vla", lambda c: reinforces(c) or c.agent.kind == "vla", of=("quantile",)
            ),
            Need("agent.kind=vla", lambda c: c.agent.kind == "vla", of=("samples",)),
            _ASKS_FOR_HELP,
        ),
    )
    """When the operator is asked for help"""
    actors: int = setting(1, minimum=1, hint="A learner alone is `hilt learner`.")
    """How many `hilt train` starts"""

    defaults: str = setting("auto", choices=DEFAULTS)
    """What is chosen for settings that have no other value: "images" leaves them as they are, HIL-SERL's;
    "frozen_encoder" has what suits images, demonstrations and a CPU; "state", what suits a policy that sees no images;
    "auto": the one that fits what it sees, decided when a run begins"""
    agent: AgentConfig = setting(factory=AgentConfig, needs=_OF_AGENT)
    """The policy, and how it learns"""
    algorithm: str = setting("rlpd", known=_check_algorithm)
    """"rlpd", "bc" (demonstrations only), "hg-dagger" (imitates demonstrations and take-overs), "filtered" (these,
    and the episodes that succeeded), "mixed" (one of these three, and groups of simulated episodes) or "recap" (all
    episodes, conditioned on which steps are good); or another one that learns from rewards, by name or module:Class"""
    mixed: Mixed = setting(factory=Mixed, needs=_MIXED)
    """The groups of simulated episodes of algorithm=mixed"""
    recap: LiveRecap = setting(factory=LiveRecap, needs=_RECAP)
    """The value model of algorithm=recap, and what it makes good"""
    view_shares: dict[str, float] = setting(factory=dict, minimum=0, needs=_IMITATES)
    """The shares of demonstrations, human and successes (with recap: policy and earlier) in each batch of imitation,
    exact to one step; empty: every step is as likely as any other. The part of a view that has no step yet is the
    others'"""
    algorithm_options: dict[str, Any] = setting(factory=dict, needs=_OTHER_ALGORITHM)
    """What another algorithm is made with"""
    store: str = setting("log", choices=tuple(STORES))
    """Where the learner keeps experience: "log", or "trajectories": whole episodes, which RLinf's folder has too"""
    seed: int = 42
    """The seed of everything random"""
    batch_size: int = setting(256, minimum=2)
    """Half of it online, half demonstrations"""
    n_step: int = setting(1, minimum=1, needs=(_RLPD, _STEPWISE))
    """The number of steps whose rewards are summed before bootstrapping; with agent.chunk, those of a chunk are"""
    cta_ratio: int = setting(2, minimum=1, needs=_RLPD)
    """Critic updates for each update of the actor"""
    update_to_data: float = setting(0.0, minimum=0, needs=_RLPD)
    """The maximum number of learner steps for each online step; 0: no limit"""
    max_ahead: int = setting(0, minimum=0)
    """A simulation waits while online steps are this number ahead of learner steps, so
    that it does not outrun the learner; 0: never"""
    updates_per_step: float = setting(1.0, above=0, needs=Need("max_ahead=N", lambda c: c.max_ahead))
    """The number of learner steps that count as one online step for `max_ahead`"""
    random_steps: int = setting(0, minimum=0)
    """The number of first steps that are random"""
    collect_steps: int = setting(0, minimum=0, needs=(_RLPD, _PRETRAINS))
    """The number of first online steps that are driven by the pretrained policy and the operator;
    then pretraining is repeated from scratch, with
    their successful episodes besides the demonstrations, before learning begins; 0: it is not"""
    offline_updates: int = setting(0, minimum=0, needs=(_RLPD, _SHOWN))
    """Learner steps that are made from the demonstrations alone before the policy acts, after pretraining: actor and
    critics learn together, where the critics would begin at random; 0: none"""
    demo_share: float = setting(0.5, minimum=0, below=1, needs=_RLPD)
    """Share of demonstrations and take-overs in each batch, the rest being online; 0: demonstrations are for
    pretraining and offline_updates alone"""
    training_starts: int = setting(100, minimum=0, needs=_RLPD)
    """Online steps before the first update; after offline_updates, those of a warm-up by the policy as it is then"""
    steps_per_update: int = setting(50, minimum=1)
    """Learner steps between two publications of the weights"""
    max_steps: int = setting(1_000_000, minimum=0)
    """Learner steps after which the run ends"""
    max_seconds: float = setting(0.0, minimum=0)
    """Seconds from the first online step after which the run ends; 0: no limit"""
    max_env_steps: int = setting(0, minimum=0)
    """Online steps after which the run ends; 0: no limit"""
    goal: Goal = field(default_factory=Goal)
    """Success at which the run ends"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the run when they are raised, with a checkpoint, such as [q_bound,
    overestimation]: docs/observe.md lists them"""
    replay_buffer_capacity: int = setting(200_000, minimum=1)
    """Online steps that are kept"""
    checkpoint_period: int = setting(0, minimum=0)
    """Learner steps between two checkpoints; 0: every five minutes. One is always made at the end"""
    checkpoint_keep: int = setting(10, minimum=1)
    """How many of them stay"""
    buffer_period: int = setting(0, minimum=0)
    """Online steps between two copies of the buffers in HIL-SERL's files; 0: none, for the log is on the disk anyway"""
    log_period: int = setting(10, minimum=1)
    """Learner steps between two lines of metrics"""
    sinks: list[str] = field(default_factory=list)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, trackio; or another one by name or module:Class"""
    wire: Wire = field(default_factory=Wire)
    """How actors reach the learner"""

    def conflicts(self, here: str) -> Iterator[str]:
        ahead, share, room = self.max_ahead, self.update_to_data, self.replay_buffer_capacity
        if ahead and (ahead < self.training_starts or 0 < share < 1) and reinforces(self):
            why = (
                f"update_to_data={share:g}, below 1"
                if ahead >= self.training_starts
                else f"training_starts={self.training_starts}"
            )
            least = f"max_ahead={self.training_starts} or more, or " if not 0 < share < 1 else ""
            yield (
                f"max_ahead={ahead} with {why}: actors and the learner would wait for each other. Give {least}"
                "max_ahead=0, no limit."
            )
        rlpd, critic = self.agent.rlpd, self.agent.critic
        if self.value.reward and (
            rlpd.target_range is not None or (critic.head != "scalar" and not critic.value_range)
        ):
            yield (
                "value.reward with agent.rlpd.target_range or a critic whose range follows from the rewards: with a "
                "dense reward Q becomes Q - V, which lies elsewhere. Give agent.rlpd.target_range=null, and "
                "agent.critic.value_range where the critic needs one."
            )
        yield from self._conflicts_of_help() if self.help.quantile else ()
        imitated = imitation(self)
        known = IMITATIONS.get(imitated, ())
        for name in self.view_shares if known else ():
            if name not in known:
                yield f"view_shares has {name!r}, and {imitated} imitates {', '.join(known)}."
        other = self.algorithm not in ("rlpd", *IMITATIONS, MIXED)
        for name, default in _OF_RLPD.items() if other else ():
            if (value := validate.value_of(self.agent, name)) != default:
                yield (
                    f"agent.{name}={value} with algorithm={self.algorithm}: only rlpd has it. Give algorithm=rlpd, or "
                    f"leave it out."
                )
        if self.agent.chunk > 1 and self.store != "log":
            yield (
                f"agent.chunk={self.agent.chunk} with store={self.store}: chunks are read from the log. Give store=log."
            )
        if self.agent.critic.head != "scalar" and self.algorithm not in ("rlpd", *IMITATIONS, MIXED):
            yield (
                f"agent.critic.head={self.agent.critic.head} with algorithm={self.algorithm}: another algorithm "
                "takes the critics' outputs for values. Give agent.critic.head=scalar, or algorithm=rlpd."
            )
        yield from self._conflicts_of_groups() if self.algorithm == MIXED else ()
        yield from self._conflicts_of_recap() if self.algorithm == RECAP else ()
        yield from self._conflicts_of_frozen() if self.agent.kind == FROZEN_VLA else ()
        if self.view_shares and not sum(self.view_shares.values()):
            yield "view_shares are all 0: there is nothing to learn from."
        if self.collect_steps > room:
            yield (
                f"collect_steps={self.collect_steps} is more than is kept: make it less, or "
                f"replay_buffer_capacity={room} larger."
            )

    def _conflicts_of_help(self) -> Iterator[str]:
        asked = f"help.quantile={self.help.quantile:g}"
        if self.agent.rlpd.critics < 2 and reinforces(self):
            yield f"{asked}: only several critics can disagree. Give agent.rlpd.critics=2, or leave it out."
        if _is_vla(self) and self.agent.options.get("server"):
            yield f"{asked}: a policy server answers with one chunk, and none differ. Leave agent.options.server out."

    def _conflicts_of_frozen(self) -> Iterator[str]:
        looks = self.defaults != "auto" and self.agent.encoder.kind != "none"
        if looks or self.image_keys or self.proprio_keys:
            yield (
                f"agent.kind={self.agent.kind} sees what the frozen policy computes, and nothing else: give "
                "agent.encoder.kind=none, and leave image_keys and proprio_keys out."
            )
        if reinforces(self) and self.algorithm != "rlpd":
            yield (
                f"algorithm={self.algorithm} with agent.kind={self.agent.kind}: another algorithm takes the actor's "
                "numbers for actions. Give algorithm=rlpd."
            )
        if self.agent.options.get("space") == "noise" and not reinforces(self):
            yield (
                f"algorithm={self.algorithm} with agent.options.space=noise: the noise of an action is not known, and "
                "cannot be imitated. Give algorithm=rlpd."
            )
        if self.store != "log":
            yield (
                f"store={self.store} with agent.kind={self.agent.kind}: what the frozen policy computes is kept in the "
                "log. Give store=log."
            )

    def _conflicts_of_recap(self) -> Iterator[str]:
        if not self.recap.model:
            yield (
                "algorithm=recap: which episodes are good? Give recap.model=FOLDER, a value model of the same tasks: "
                "hilt train value DATA --out FOLDER."
            )
        if self.agent.kind != "vla":
            yield (
                f"algorithm=recap with agent.kind={self.agent.kind}: only a vision-language-action policy reads the "
                "condition. Give agent.kind=vla, or another algorithm."
            )
        if self.store != "log":
            yield f"algorithm=recap with store={self.store}: values are facts of the log. Give store=log."

    def _conflicts_of_groups(self) -> Iterator[str]:
        if self.agent.kind != "vla":
            yield (
                f"algorithm=mixed with agent.kind={self.agent.kind}: groups of episodes need the log-probabilities of "
                "a vision-language-action policy. Give agent.kind=vla, or another algorithm."
            )
        elif self.agent.options.get("server"):
            yield (
                "algorithm=mixed with agent.options.server: a policy server sends no log-probabilities, which groups "
                "of episodes need. Leave the server out, or give algorithm=hg-dagger."
            )
        if self.store != "log":
            yield f"algorithm=mixed with store={self.store}: groups are read from the log. Give store=log."


def check(config: Hil) -> None:
    """Refuses what cannot work, and what would do nothing, all of it at once."""
    problems = Problems()
    problems.check(validate.check, config)
    if not problems.errors:
        problems.check(check_stop_on, config.stop_on, facts(config))
    problems.report()


def facts(config: Hil) -> RunFacts:
    """The settings that alarms depend on."""
    rlpd, learns = config.agent.rlpd, config.algorithm == "rlpd"
    low_high = rlpd.target_range
    return RunFacts(
        "hil",
        validates=config.goal.success > 0,
        rlpd=learns,
        groups=config.algorithm == MIXED,
        target_kl=AVERAGE_KL if config.agent.options.get("average") else 0.0,
        discount=rlpd.discount ** max(config.n_step, config.agent.chunk),
        q_range=(low_high[0], low_high[1]) if low_high else None,
        entropy_in_q=rlpd.backup_entropy,
        update_to_data=config.update_to_data,
        measured=config.agent.kind in LOOKED_AT,
        imitates_chunks=config.agent.kind == "vla",
        conditioned=config.algorithm == RECAP,
        moves=config.agent.kind != "vla" or config.recap.guidance == 1,
        relus=_has_relus(config),
        value_model=bool(config.value.model),
    )


def _has_relus(config: Hil) -> bool:
    """Whether networks that are trained have ReLUs."""
    agent = config.agent
    looks = agent.encoder.kind != "none" and agent.encoder.training != "frozen"
    blocks = agent.critic.network != "mlp" and reinforces(config)
    return agent.activation == "relu" or blocks or looks or agent.kind == "vla"
