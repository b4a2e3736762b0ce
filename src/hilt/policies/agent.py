"""The agent that a learner trains and an actor carries (being written)."""

from __future__ import annotations

from hilt.policies.config import AgentConfig, EncoderConfig

__all__ = ["AgentConfig", "EncoderConfig"]
