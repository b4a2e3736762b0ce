"""The policy of a run beside a frozen one, as one folder, and as `hilt serve-policy` serves it."""

from __future__ import annotations

from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.hil.config import Hil
from hilt.hil.environment import spaces
from hilt.hil.frozen.base_observations import open_base
from hilt.hil.make_agent import make_agent
from hilt.policies.agent.step_agent import StepAgent
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_policy import FrozenVlaPolicy
from hilt.runs.checkpoint import Checkpoint

POLICY = "policy"
"""The folder of the policy in that of a run, written when the run ends"""


def policy_of_agent(config: Hil, agent: StepAgent) -> FrozenVlaPolicy:
    """The policy of a run whose agent has come so far."""
    if not isinstance(agent, FrozenAgent):
        raise ConfigError(f"agent.kind={config.agent.kind}: expected an agent beside a frozen policy, frozen_vla.")
    return FrozenVlaPolicy.of(agent, open_base(config))


def policy_of_checkpoint(config: Hil, found: Checkpoint) -> FrozenVlaPolicy:
    """The policy of a run as a checkpoint has it."""
    agent = make_agent(config, spaces(config))
    agent.load_state_dict(found.agent)
    return policy_of_agent(config, agent)


def export_policy(config: Hil, agent: StepAgent, run: Path) -> Path:
    """Writes RUN/policy, with a copy of the frozen policy in it; one that is there is replaced."""
    folder = run / POLICY
    policy_of_agent(config, agent).save_pretrained(folder)
    return folder
