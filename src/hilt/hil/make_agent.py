"""The agent that the settings of a run describe, as its learner, its actors and an evaluation make it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilt.algos.tables import off_policy_algorithm
from hilt.envs.env_protocol import HasSpaces
from hilt.hil.config import IMITATIONS, Hil, reinforces
from hilt.policies.agent.config import AGENTS
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space

if TYPE_CHECKING:
    from hilt.policies.agent.step_agent import StepAgent


def make_agent(config: Hil, env: HasSpaces, seed: int | None = None) -> StepAgent:
    """One that is still to be given its weights, for an environment or for its spaces; `seed`: instead of the run's own.

    Reinforcement learning has the tanh-Gaussian actor of soft actor-critic; imitation (bc, hg-dagger) a plain Gaussian, as HIL-SERL has.
    """
    from hilt.policies.agent.step_agent import StepAgent

    seen = nested(spec_of_space(env.observation_space, "observation_space"))
    keys, squashed = (config.image_keys, config.proprio_keys), reinforces(config)
    kind = AGENTS.load_class(config.agent.kind, StepAgent)
    agent = kind.make(seen, env.action_space, config.agent, *keys, config.seed if seed is None else seed, squashed)
    if config.algorithm not in ("rlpd", *IMITATIONS):
        agent.use_algorithm(off_policy_algorithm(config.algorithm, config.algorithm_options))
    return agent
