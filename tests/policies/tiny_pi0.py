"""A tiny pi0 for tests: random weights, two pictures, the seven numbers of LIBERO's actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from hilt.policies.vla.flow import Flow
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.tokens import ByteTokenizer

SIZES: dict[str, Any] = {
    "vision": VisionConfig(16, 1, 2, 24, 14, 28),
    "vlm": StackConfig(16, 2, 24, 4, 2, 4),
    "expert": StackConfig(12, 2, 16, 4, 2, 4),
    "vocabulary": 300,
    "chunk_size": 10,
    "n_action_steps": 10,
    "max_action_dim": 7,
    "max_state_dim": 8,
    "action_dim": 7,
    "state_dim": 8,
    "images": ("full_image", "wrist_image"),
    "tokenizer_max_length": 120,
    "flow": Flow("noise", steps=2),
}


def tiny(seed: int = 0) -> Pi0:
    rows = np.random.default_rng(0).normal(0, 0.3, (50, 8))
    return Pi0(
        Pi0Config(**SIZES), ByteTokenizer(), {"state": statistics(rows), "action": statistics(rows[:, :7])}, seed
    )
