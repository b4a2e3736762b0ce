"""Policies: the protocol that all of them follow, per-step agents with their
encoders and critics, and vision-language-action models.

`hilt.policies.agent` holds the agents, `hilt.policies.vla` and `hilt.policies.act` the models, and `hilt.policies.io`
their checkpoint folders.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.policies.act.act_config import ACTConfig
    from hilt.policies.act.act_policy import ACT
    from hilt.policies.agent.agent import Agent
    from hilt.policies.agent.config import AgentConfig, EncoderConfig
    from hilt.policies.base import Evaluation, Policy, Prefix
    from hilt.policies.registry import load_policy
    from hilt.policies.vla.flow import Flow
    from hilt.policies.vla.openvla import OpenVLA, OpenVLAOFT
    from hilt.policies.vla.openvla_config import OpenVLAConfig, OpenVLAOptions
    from hilt.policies.vla.pi0 import Pi0, Pi0Config
    from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
    from hilt.policies.vla.smolvla import SmolVLA, SmolVLAConfig

__all__ = [
    "ACT",
    "ACTConfig",
    "Agent",
    "AgentConfig",
    "EncoderConfig",
    "Evaluation",
    "Flow",
    "OpenVLA",
    "OpenVLAConfig",
    "OpenVLAOFT",
    "OpenVLAOptions",
    "Pi0",
    "Pi0Config",
    "Policy",
    "Prefix",
    "SmallVLA",
    "SmallVLAConfig",
    "SmolVLA",
    "SmolVLAConfig",
    "load_policy",
]
__getattr__ = lazy_exports(__name__, __file__)
