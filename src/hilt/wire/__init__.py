"""Learner and actors on different machines: every step arrives exactly once, and the newest weights win.

The names and arguments are agentlace's, so that moving over is an import change.
"""

from hilt.wire.client import TrainerClient, Update
from hilt.wire.config import TrainerConfig, make_trainer_config
from hilt.wire.server import TrainerServer

__all__ = ["TrainerServer", "TrainerClient", "TrainerConfig", "make_trainer_config", "Update"]
