"""The agent that the settings of a run describe, as its learner, its actors and an evaluation make it alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hilt.algos.tables import off_policy_algorithm
from hilt.envs.env_protocol import HasSpaces
from hilt.hil.config import RECAP, Hil, reinforces
from hilt.policies.agent.config import AGENTS, FROZEN_VLA
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space

if TYPE_CHECKING:
    from hilt.policies.agent.step_agent import StepAgent
    from hilt.policies.conditioned import Condition


def instructions_of(env: HasSpaces) -> tuple[str, ...]:
    """What is to be done, in words, in each of the tasks of an environment, or of its spaces."""
    own = getattr(env, "get_wrapper_attr", None)
    found = {}
    for name in ("instructions", "instruction"):
        if own is None:
            found[name] = getattr(env, name, "")
        elif env.has_wrapper_attr(name):  # type: ignore[attr-defined]  # gymnasium's wrappers hide what is below them
            found[name] = own(name)
    return tuple(found.get("instructions") or ([str(found["instruction"])] if found.get("instruction") else ()))


def condition_of(config: Hil) -> Condition | None:
    """What the policy of a run is conditioned with; None without algorithm=recap."""
    if config.algorithm != RECAP:
        return None
    from hilt.policies.conditioned import Condition

    return Condition(config.recap.guidance, config.recap.dropout, config.recap.condition)


def make_agent(config: Hil, env: HasSpaces, seed: int | None = None) -> StepAgent:
    """One that is still to be given its weights, for an environment or for its
    spaces; `seed`: instead of the run's own.

    Reinforcement learning has the tanh-Gaussian actor of soft actor-critic; imitation (bc,
    hg-dagger, ...) a plain Gaussian, as HIL-SERL has.
    """
    from hilt.policies.agent.step_agent import StepAgent

    seen = nested(spec_of_space(env.observation_space, "observation_space"))
    keys, squashed = (config.image_keys, config.proprio_keys), reinforces(config)
    kind, settings = AGENTS.load_class(config.agent.kind, StepAgent), config.agent
    if settings.kind in ("vla", FROZEN_VLA):
        settings = replace(settings, options={"suite": config.task, **settings.options})
    agent = kind.make(seen, env.action_space, settings, *keys, config.seed if seed is None else seed, squashed)
    agent.use_instructions(instructions_of(env))
    if (condition := condition_of(config)) is not None:
        agent.condition(condition)
    if config.help.quantile:
        agent.measure_disagreement(config.help.samples)
    if hasattr(env, "has_wrapper_attr") and env.has_wrapper_attr("show_plans"):
        env.get_wrapper_attr("show_plans")(agent.planned)  # type: ignore[attr-defined]
    if config.algorithm != "rlpd" and reinforces(config):
        agent.use_algorithm(off_policy_algorithm(config.algorithm, config.algorithm_options))
    return agent
