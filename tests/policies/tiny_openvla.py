"""A tiny OpenVLA for tests: random weights, the golden files' sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hilt.policies.vla.openvla import OpenVLA, OpenVLAConfig, OpenVLAOFT, OpenVLAOptions
from hilt.policies.vla.tokens import ByteTokenizer

VIT = {"patch_size": 14, "embed_dim": 24, "depth": 3, "num_heads": 2}
UPSTREAM = {
    "model_type": "openvla",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "llm_backbone_id": "llama2-7b-pure",
}
TEXT = {
    "vocab_size": 32064,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def statistics(size: int = 7) -> dict[str, Any]:
    rows = {
        "q01": [-1.0] * size,
        "q99": [1.0] * size,
        "min": [-2.0] * size,
        "max": [2.0] * size,
        "mask": [True] * (size - 1) + [False],
    }
    return {"action": rows, "proprio": {**rows, "mask": [True] * size}}


def tiny(seed: int = 0, **changes: Any) -> Any:
    return bare(**changes).initialize(seed)


def bare(causal: bool = False, options: OpenVLAOptions | None = None, **changes: Any) -> Any:
    """Without weights."""
    vits = [
        VIT | {"init_values": 0.1, "reg_tokens": 4, "no_embed_class": True},
        VIT | {"class_token": False, "global_pool": "map"},
    ]
    config = OpenVLAConfig(
        **{
            "upstream": dict(UPSTREAM),
            "norm_stats": {"libero_spatial_no_noops": statistics()},
            "text_config": dict(TEXT),
            "image_size": 28,
            "vit": vits,
            "variant": "ar" if causal else "oft",
            "chunk": 1 if causal else 3,
            **changes,
        }
    )
    kind = OpenVLA if causal else OpenVLAOFT
    return kind(config, tokenizer=ByteTokenizer(), unnorm_key="libero_spatial", options=options)


def observations(count: int = 2, seed: int = 0, state: int = 0) -> list[dict[str, Any]]:
    draws = np.random.default_rng(seed)
    words = ["pick up the bowl", "close the drawer now"]
    return [
        {
            "full_image": draws.integers(0, 256, (32, 32, 3), np.uint8),
            "wrist_image": draws.integers(0, 256, (32, 32, 3), np.uint8),
            "instruction": words[place % 2],
            "state": draws.standard_normal(state).astype(np.float32),
        }
        for place in range(count)
    ]


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
