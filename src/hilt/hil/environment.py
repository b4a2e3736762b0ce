"""Where a run takes place: the environment that its settings name, its spaces, and how actors and the learner speak."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces as gym_spaces

from hilt.core.errors import ConfigError, Problems
from hilt.core.web import is_loopback
from hilt.envs.env_protocol import Env
from hilt.envs.fitted import open_task
from hilt.envs.rate import Rate
from hilt.envs.rewards import REWARDS, Classifier, MultiCameraBinaryRewardClassifierWrapper, named_reward
from hilt.envs.wrappers import GripperPenaltyWrapper
from hilt.hil.config import GOAL_SPLIT, GROUP, MEMBER, MIXED, Goal, HelpRequests, Hil, ValueUse, reinforces
from hilt.policies.agent.config import FROZEN_VLA, AgentConfig
from hilt.policies.agent.layout import fit
from hilt.recording.buffered_device import as_hil_serl
from hilt.recording.record import RATE_HZ
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space
from hilt.teleop.devices import Device, Reading, open_device
from hilt.teleop.intervene import TakeOver, attribute
from hilt.teleop.operator import Script
from hilt.wire import TrainerConfig, make_trainer_config

if TYPE_CHECKING:
    from gymnasium.spaces import Space

    from hilt.value.online_value import OnlineValue
    from hilt.value.value_model import ValueModel

TAKES = ("mode", "action_indices", "first_command")


class Spaces(NamedTuple):
    """The observations and actions of an environment, and what else a learner needs to know of it."""

    observation_space: Any
    action_space: Any
    keeps_rate: bool = False
    """Whether it keeps a control rate itself, as an arm does"""
    has_expert: bool = False
    """Whether a script can demonstrate it"""
    control_hz: float = 0.0
    """Steps in a second, 0 where it has no rate of its own"""
    instruction: str = ""
    """What is to be done, in words; empty where it is known only after a reset"""
    instructions: tuple[str, ...] = ()
    """The same of each task of a mix; empty where there is one task"""


class NullDevice(Device):
    """At the controls when no operator is named: every action is the policy's."""

    name = "none"
    gives_actions = True

    def read(self) -> Reading:
        return Reading()


def make_env(config: Hil, operator: bool) -> Env:
    """The environment that the policy sees. `operator`: the operator of the settings may take over,
    and every info has who acted and what was executed; without it, as in an evaluation, no one can
    take over. Closing it closes the device too."""
    env = task(config)
    try:
        if operator:
            env = _with_operator(env, config)
        if config.observations == "hil-serl":
            env = as_hil_serl(env)
        if config.classifier:
            env = MultiCameraBinaryRewardClassifierWrapper(env, open_reward(config, env.observation_space))
        if config.agent.kind == FROZEN_VLA:
            env = _with_base(env, config)
        if operator and config.value.model:
            env = _with_value(env, config)  # which may look at features of the frozen policy
    except BaseException:
        env.close()
        raise
    return env


def open_reward(config: Hil, space: Space) -> Classifier:
    """Opens the reward that `classifier` names: the folder of a reward classifier, a name, or ``module:function``."""
    if REWARDS.is_name(config.classifier):
        return named_reward(config.classifier)
    from hilt.classifier.reward import reward_function  # needs torch, which recording does without

    return reward_function(config.classifier, config.classifier_threshold or None, space)


def open_value(config: Hil, space: Space = None) -> OnlineValue:
    """The value model of a run; with the observation `space`, one that does not fit it is an error now."""
    from hilt.value.online_value import OnlineValue
    from hilt.value.value_model import load_value_model

    model = load_value_model(config.value.model)
    if model.extractor is not None and config.agent.kind == FROZEN_VLA:
        _check_named_alike(config, model)
    return OnlineValue(model, space)


def _check_named_alike(config: Hil, model: ValueModel) -> None:
    """Refuses a value model of features for which the policy saw other columns of the observations than in the run."""
    from hilt.policies.vla.observation_adapters import same_suite

    given, options = model.config, config.agent.options
    if not (given.suite or given.columns):
        return
    suite, columns = str(options.get("suite") or config.task), options.get("columns") or {}
    if given.columns != columns or not (columns or same_suite(given.suite, suite)):
        raise ConfigError(
            f"the value model {config.value.model} was trained with suite={given.suite!r} and columns={given.columns}, "
            f"and the frozen policy of this run sees observations with suite={suite!r} and columns={columns}: its "
            "features are of other columns. Train the value model with those of the run."
        )


def _with_value(env: Env, config: Hil) -> Env:
    from hilt.value.online_value import ValueWatch  # needs torch, which recording does without

    use, value = config.value, open_value(config, env.observation_space)
    stop, alarm = (use.stop_below, use.stop_patience), (use.alarm_below, use.alarm_patience)
    return ValueWatch(env, value, config.agent.rlpd.discount, use.reward, *stop, *alarm)


def _with_base(env: Env, config: Hil) -> Env:
    from hilt.hil.frozen.base_observations import BaseObservations, open_base  # needs torch

    base = open_base(config)
    if base.acted is not None:
        _check_noise(config)
    return BaseObservations(env, base, config.agent.action_indices)


def _check_noise(config: Hil) -> None:
    """Refuses what an agent with a critic of noise cannot do, all of it at once. Whether there is one is known when the
    frozen policy is open."""
    from hilt.policies.frozen.noise_agent import check_noise_settings, refuse_help  # needs torch

    problems = Problems()
    problems.check(check_noise_settings, config.agent)
    if config.help.quantile:
        problems.check(refuse_help)
    problems.report()


def task(config: Hil) -> Env:
    """The task alone, as it is recorded: with the run's limit of steps and, where a critic
    works the gripper, the gripper's penalty."""
    env = open_task(config.task, task_options(config))
    space = env.observation_space
    state = space.spaces.get("state") if isinstance(space, gym_spaces.Dict) else None
    if (
        "learned-gripper" in config.agent.setup_mode
        and config.observations == "nested"
        and isinstance(state, gym_spaces.Dict)
    ):
        env = GripperPenaltyWrapper(env)
    return env


def task_options(config: Hil) -> dict[str, object]:
    """What `make` is given besides the name."""
    return {**config.task_options, **({"step_limit": config.max_traj_length} if config.max_traj_length else {})}


def simulated(config: Hil) -> Hil:
    """The settings of an actor that plays groups of episodes, with algorithm=mixed: in the task of the groups, with
    sampled actions, without an operator, and as fast as it goes."""
    mixed = config.mixed
    if config.algorithm != MIXED:
        raise ConfigError(
            f"--simulation plays groups of episodes, and algorithm={config.algorithm} learns from none: give "
            "algorithm=mixed, or leave --simulation out."
        )
    task, options = (mixed.task, mixed.task_options) if mixed.task else (config.task, config.task_options)
    acting = {"sample": True, "temperature": mixed.temperature, "mode": "synchronous"}
    agent = replace(config.agent, options={**config.agent.options, **acting})
    played = replace(config, agent=agent, task=task, task_options=options, value=ValueUse(), help=HelpRequests())
    return replace(played, operator="", operator_options={}, control_hz=0.0, random_steps=0, max_ahead=0)


class GroupPlay:
    """Assigns each episode of an actor to a group and to a place in it; without a `size`, to none. A group that was
    interrupted by the end of the process stays as it is, and the next process begins another one."""

    def __init__(self, size: int = 0):
        self.size, self.fresh = size, False
        """The number of episodes in a group, and whether one begins that has no step yet"""
        self._group, self._member, self._turn = -1, -1, 0

    def begin(self, number: int) -> int:
        """The actor's episode of this number begins. Returns the number that decides its initial state, which all
        members of a group share."""
        if not self.size:
            return number
        self._member = (self._member + 1) % self.size
        if self._member == 0:
            self._group, self._turn, self.fresh = secrets.randbits(62), number // self.size, True
        return self._turn

    def columns(self) -> dict[str, object]:
        """The columns of a step of the episode."""
        self.fresh = False
        return {GROUP: np.int64(self._group), MEMBER: np.int16(self._member)}


def control_rate(env: Env, config: Hil) -> tuple[Rate | None, Callable[[], dict[str, float]] | None]:
    """Paces an actor's loop and measures how well the rate is kept. An environment that keeps a rate itself is not
    paced again."""
    own = float(attribute(env, "control_hz", 0) or 0)
    if (timing := attribute(env, "timing", None)) is not None:
        if config.control_hz not in (0, own):
            given = f"control_hz={config.control_hz:g}, and {config.task} keeps {own:g} Hz itself"
            raise ConfigError(f"{given}: change that one in its settings, or leave this out.")
        return None, timing
    person = not isinstance(attribute(env, "device", None), Script | NullDevice)
    hz = config.control_hz or ((own or RATE_HZ) if person else 0.0)
    rate = Rate(hz) if hz else None
    return rate, None if rate is None else rate.timing


def spaces(config: Hil) -> Spaces:
    """For the learner, which has no arm: the environment is made and closed again;
    nothing is connected, no operator is awaited."""
    env = make_env(replace(config, classifier=""), operator=False)
    try:
        check_goal(config, env)
        keeps_rate, has_expert = attribute(env, "timing", None) is not None, env.has_wrapper_attr("expert")
        hz, words = float(attribute(env, "control_hz", 0) or 0), str(attribute(env, "instruction", "") or "")
        several = tuple(attribute(env, "instructions", ()))
        return Spaces(env.observation_space, env.action_space, keeps_rate, has_expert, hz, words, several)
    finally:
        env.close()


def check_goal(config: Hil, env: Env) -> None:
    """Refuses a goal in an environment that cannot be evaluated beside learning."""
    goal = config.goal
    if not goal.success:
        return
    why = ""
    if attribute(env, "timing", None) is not None:
        why = (
            "is an arm, and an evaluation beside learning would need a second one: leave goal.success out, "
            "and evaluate with hilt eval"
        )
    elif GOAL_SPLIT not in (known := attribute(env, "initial_states", {})):
        why = (
            f"has no initial states of the split {GOAL_SPLIT!r}, but "
            f"{', '.join(known) or 'none'}: leave goal.success out"
        )
    elif (there := known[GOAL_SPLIT]) < goal.states:
        why = (
            f"has {there} initial states of the split {GOAL_SPLIT!r}: give goal.states={there} "
            f"at most, not {goal.states}"
        )
    if why:
        raise ConfigError(f"goal.success={goal.success:g}: {config.task} {why}.")


def check_fit(config: Hil, made: Spaces | None = None) -> None:
    """Refuses an agent whose settings do not fit what the environment shows and takes, and a goal that it cannot be
    evaluated for. `made`: its spaces, where they are known."""
    made, agent = made or spaces(config), config.agent
    seen = nested(spec_of_space(made.observation_space, "observation_space"))
    fit(seen, made.action_space, agent, config.image_keys, config.proprio_keys)
    check_groups(config, made)
    if agent.encoder.weights and not Path(agent.encoder.weights).is_file():
        raise ConfigError(f"agent.encoder.weights={agent.encoder.weights}: there is no such file. Check the path.")
    if agent.kind == "vla":
        from hilt.hil.agents.vla_options import check_options  # which takes seconds to import

        check_options(agent.options)
    if agent.device != AgentConfig().device:
        from hilt.replay.tensors import check_device  # which takes seconds to import

        check_device(agent.device)


def check_groups(config: Hil, made: Spaces) -> None:
    """Refuses groups of episodes, with algorithm=mixed, in a task that is no simulation or does not fit the run's."""
    if config.algorithm != MIXED:
        return
    name = config.mixed.task or config.task
    groups = spaces(replace(simulated(config), goal=Goal())) if config.mixed.task else made
    if groups.keeps_rate:
        raise ConfigError(
            f"algorithm=mixed: {name} is an arm, and groups of episodes need a simulation. Give mixed.task=NAME, a "
            "simulation of the same task."
        )
    for what, ours, theirs in (
        ("observations", made.observation_space, groups.observation_space),
        ("actions", made.action_space, groups.action_space),
    ):
        if spec_of_space(ours, what) != spec_of_space(theirs, what):
            raise ConfigError(
                f"mixed.task={name} has other {what} than task={config.task}: {theirs}, expected {ours}. Give it "
                "mixed.task_options with which they are the same."
            )
    if len(groups.instructions) != len(made.instructions):
        raise ConfigError(
            f"mixed.task={name} has {len(groups.instructions) or 1} tasks, and task={config.task} has "
            f"{len(made.instructions) or 1}: give the simulation of each, in the same order."
        )


def trainer_config(config: Hil, learner: bool) -> TrainerConfig:
    """The wire's settings for one of the two sides."""
    wire, agent = config.wire, config.agent
    # Every interface needs keys, and so does an address of it: without them the wire
    # raises an error that explains how to make them.
    bind = {} if not learner or (wire.keys and not is_loopback(wire.host)) else {"bind_ip": wire.host}
    own = {} if learner or not wire.key_name else {"key_name": wire.key_name}
    keys = {"keys": wire.keys} if wire.keys else {}
    seen = ", ".join([*config.image_keys, *config.proprio_keys]) or "everything"
    encoder = f"{agent.encoder.kind} {agent.encoder.features}" + f", {agent.kind}" * (agent.kind != "actor_critic")
    if agent.kind == FROZEN_VLA:
        from hilt.hil.frozen.base_observations import weights_of  # needs torch

        encoder += f" of {weights_of(config)}"
    actor = "reinforcement learning" if reinforces(config) else "imitation"  # its actions are made in another way
    if config.defaults == "frozen_encoder":  # which another side that chooses by its own device may not have
        encoder += ", defaults=frozen_encoder"
    weights = f"{actor}, {agent.setup_mode}, {encoder}, {agent.hidden}, {config.observations} observations, sees {seen}"
    return make_trainer_config(wire.port, wire.broadcast_port, version=weights, **bind, **own, **keys)


def person_moves(config: Hil) -> list[int]:
    """The numbers of an action that a person or a script moves, where they are not all: those of the policy. Beside a
    frozen policy, which moves the others, they are all."""
    return [] if config.agent.kind == FROZEN_VLA else config.agent.action_indices


def _with_operator(env: Env, config: Hil) -> Env:
    """`mode`, `action_indices` and `first_command` of the operator's options are `TakeOver`'s; the others are the
    device's. Nobody moves what the policy cannot move."""
    options = dict(config.operator_options)
    if options and not config.operator:
        raise ConfigError(
            f"operator_options={options} without an operator: name one, such as operator=browser, or leave them out."
        )
    indices = person_moves(config)
    takes = {
        **({"action_indices": indices} if indices else {}),
        **{name: options.pop(name) for name in TAKES if name in options},
    }
    if config.operator == "script":
        options = {"operator": True, **options}
    device = open_device(config.operator, **options) if config.operator else NullDevice()
    try:
        return TakeOver(env, device, **takes)
    except BaseException:
        device.close()
        raise
