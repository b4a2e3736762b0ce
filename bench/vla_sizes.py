"""The models of ``python -m bench vla``: OpenVLA-OFT at its own size, 7.5 billion
parameters, or a tiny one; and what it is asked."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hilt.algos.adam import Adam
from hilt.policies.base import Record
from hilt.policies.io import lora
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.openvla import OpenVLAConfig, OpenVLAOFT, OpenVLAOptions
from hilt.policies.vla.tokens import ByteTokenizer

PROMPT = 33
"""Tokens: with BOS, 256 patches, 56 slots and a stop, 346 in all"""
UPSTREAM = {
    "model_type": "openvla",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "llm_backbone_id": "llama2-7b-pure",
}
STATISTICS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "min": [-1.0] * 7, "max": [1.0] * 7, "mask": [True] * 6 + [False]}
TINY_VIT = {"patch_size": 14, "embed_dim": 24, "depth": 3, "num_heads": 2}
TINY = {
    "text_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vit": [TINY_VIT, TINY_VIT],
    "image_size": 28,
}
_STACK = {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
_SMALL: dict[str, Any] = {
    "vocabulary": 300,
    "chunk_size": 8,
    "n_action_steps": 8,
    "max_action_dim": 7,
    "max_state_dim": 8,
}
TINY_FLOW: dict[str, dict[str, Any]] = {
    "pi0": {**_SMALL, "vlm": StackConfig(**_STACK), "expert": StackConfig(**_STACK)},
    "smolvla": {
        **_SMALL,
        "vlm": StackConfig(**_STACK, gemma=False),
        "expert": StackConfig(**_STACK, gemma=False),
        "vision": VisionConfig(16, 1, 2, 24, 14, 56),
    },
}
TINY_FLOW["pi0"]["vision"] = VisionConfig(16, 1, 2, 24, 14, 28)
TINY_FLOW["pi05"] = TINY_FLOW["pi0"]
RANK, ALPHA = 32, 16


def bare(tiny: bool, options: OpenVLAOptions | None = None) -> Any:
    """Without weights. The tokenizer is of bytes: prompts are given as ids here."""
    config = OpenVLAConfig(
        upstream=dict(UPSTREAM), norm_stats={"libero_bench": {"action": STATISTICS}}, **(TINY if tiny else {})
    )  # type: ignore[arg-type]
    return OpenVLAOFT(config, tokenizer=ByteTokenizer(), options=options)


def record_of(policy: Any, rows: int) -> Record:
    """As `act` would have made it; the log-probabilities are those of a uniform policy."""
    draws, size, shape = np.random.default_rng(0), policy.config.image_size, (rows, policy.chunk, policy.action_dim)
    return {
        "images": draws.integers(0, 256, (rows, 1, size, size, 3), np.uint8),
        "prompt": draws.integers(3, 29000, (rows, PROMPT)).astype(np.int32),
        "prompt_length": np.full(rows, PROMPT, np.int32),
        "tokens": draws.integers(policy.token.first, policy.token.last + 1, shape).astype(np.int32),
        "temperature": np.full(rows, 1.6, np.float32),
        "log_prob": np.full(shape, -np.log(256), np.float32),
    }


def lora_policy(policy: Any) -> list[nn.Parameter]:
    """Adapters on every linear layer: of peft, or, where that is not installed, of the same operations here."""
    if importlib.util.find_spec("peft"):
        return lora.attach(policy, RANK, ALPHA)
    policy.requires_grad_(False)
    for name in lora._linear_layers(policy, "all-linear"):
        parent, _, child = name.rpartition(".")
        owner = policy.get_submodule(parent)
        setattr(owner, child, Adapted(getattr(owner, child)))
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


class Adapted(nn.Module):
    """A linear layer and an adapter, as in peft: x W' + b + (x A' B') alpha / rank."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        inside = {"bias": False, "dtype": layer.weight.dtype, "device": layer.weight.device}
        self.lora_A, self.lora_B = (
            nn.Linear(layer.in_features, RANK, **inside),
            nn.Linear(RANK, layer.out_features, **inside),
        )  # type: ignore[arg-type]
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * (ALPHA / RANK)


class MasterAdam:
    """AdamW for parameters in bfloat16: weights and both moments are kept in float32 beside them."""

    def __init__(self, parameters: list[nn.Parameter], learning_rate: float):
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.optimizers = [Adam([master], learning_rate) for master in self.masters]

    @torch.no_grad()
    def step(self, most: float = 1.0) -> None:
        """One step down the gradients, cut to a norm of `most`. They are made
        float32 one by one, and gone afterwards."""
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None], dtype=torch.float32)  # type: ignore[call-arg]
        scale = (most / torch.stack(norms).norm()).clamp(max=1.0)
        for parameter, master, optimizer in zip(self.parameters, self.masters, self.optimizers, strict=True):
            if parameter.grad is not None:
                optimizer.step([parameter.grad.float() * scale])
                parameter.copy_(master)
                parameter.grad = None
