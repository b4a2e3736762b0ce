"""SmolVLA: half of SmolVLM2 reads pictures, words and the state; a narrower expert
beside it turns noise into a chunk of actions.

    policy = SmolVLA.from_pretrained("smolvla_base",
    tokenizer="SmolVLM2-500M-Video-Instruct", action_dim=7, state_dim=8)

Every other layer of the expert looks at the actions so far and at the language model; those between look at the
language model only. The parameters have the names of the published checkpoint (lerobot).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies.base import at_least_float32
from hilt.policies.flow_context import Context
from hilt.policies.io.flow_folders import published, to_published
from hilt.policies.vla.flow import embed_times
from hilt.policies.vla.flow_config import FlowPolicyConfig
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.gemma import (
    GemmaStack,
    Rotation,
    Runner,
    Sight,
    Siglip,
    StackConfig,
    VisionConfig,
    looking_at,
    plain,
    projected,
)

TEXT = StackConfig(
    width=960, depth=32, mlp_dim=2560, num_heads=15, num_kv_heads=5, head_dim=64, gemma=False, epsilon=1e-5
)
TOWER = VisionConfig(768, 12, 12, 3072, 16, 512)
MODELS = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": (TEXT, TOWER),
    "HuggingFaceTB/SmolVLM2-500M-Instruct": (TEXT, TOWER),
}
"""The language models that we know the sizes of: a published config.json only has their name."""


@dataclass(frozen=True, kw_only=True)
class SmolVLAConfig(FlowPolicyConfig):
    """The sizes of SmolVLA; the defaults are the published ones."""

    vlm: StackConfig = field(default_factory=lambda: replace(TEXT, depth=16))
    """The language model, as many layers of it as are used"""
    expert: StackConfig = field(default_factory=lambda: replace(TEXT, depth=16, width=720, mlp_dim=2048))
    """The action expert"""
    vision: VisionConfig = TOWER
    """The tower for pictures"""
    vocabulary: int = 49_280
    """Words of the language model"""
    shuffle: int = 4
    """The number of patches in each direction that become one token"""
    self_attn_every_n_layers: int = 2
    """Layers 0, n, 2n ... of the expert look at the actions, too; 0: none does, 1: all do"""
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    """Where lerobot finds the sizes of the language model"""

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def widths(self) -> tuple[int, int]:
        return self.vlm.width, self.expert.width

    @classmethod
    def from_published(cls, given: Mapping[str, Any], names: frozenset[str]) -> SmolVLAConfig:
        if (name := given.get("vlm_model_name", next(iter(MODELS)))) not in MODELS:
            raise UnknownNameError("language model of SmolVLA (vlm_model_name)", name, MODELS)
        if given.get("num_expert_layers", -1) not in (-1, 0, given.get("num_vlm_layers", 16)):
            raise ConfigError(
                f"the checkpoint has {given['num_expert_layers']} layers of its expert; here it has "
                "those of the language model."
            )
        text, vision = MODELS[name]
        depth = given.get("num_vlm_layers", 16)
        vlm = replace(text, depth=depth if depth > 0 else text.depth)
        width = int(vlm.width * given.get("expert_width_multiplier", 0.75))
        crosses = "cross" in given.get("attention_mode", "cross_attn")
        return cls(
            vlm=vlm,
            expert=replace(vlm, width=width, mlp_dim=256 * -(-int(4 * int(2 * width / 3)) // 256)),
            vision=vision,
            self_attn_every_n_layers=max(given.get("self_attn_every_n_layers", 2), 0) if crosses else 1,
            vlm_model_name=name,
            **published(given),
        )

    def to_published(self) -> dict[str, Any]:
        return to_published(
            self,
            type="smolvla",
            vlm_model_name=self.vlm_model_name,
            num_vlm_layers=self.vlm.depth,
            expert_width_multiplier=self.expert.width / self.vlm.width,
            attention_mode="cross_attn",
            self_attn_every_n_layers=self.self_attn_every_n_layers or -1,
            resize_imgs_with_padding=[self.image_size, self.image_size],
            num_steps=self.flow.steps,
        )


class SmolVLA(FlowPolicy):
    """SmolVLA."""

    config: SmolVLAConfig
    config_class = SmolVLAConfig
    anchor = "corner"
    big = "vlm_with_expert"
    tied = ("vlm_with_expert.vlm.lm_head.weight", "vlm_with_expert.vlm.model.text_model.embed_tokens.weight")
    stored_prefix = "model."

    def build(self) -> None:
        config = self.config
        wide, width = config.widths
        self.vlm_with_expert = SmolVLMWithExpert(config)
        self.state_proj = nn.Linear(config.max_state_dim, wide)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    @property
    def state_token_width(self) -> int:
        return self.config.vlm.width

    def freeze(self) -> None:
        vlm = self.vlm_with_expert.vlm
        if self.config.trained != "all":
            (vlm if self.config.trained == "expert" else vlm.model.vision_model).requires_grad_(False)

    def float8_parts(self) -> Sequence[nn.Module]:
        return list(self.vlm_with_expert.vlm.model.text_model.layers[self.config.fp8_first_layer :])

    def prefix(
        self,
        pixels: Tensor,
        present: Tensor,
        prompt: Tensor,
        worded: Tensor,
        state: Tensor,
        run: Runner = plain,
        condition: Tensor | None = None,
    ) -> Context:
        model, config = self.vlm_with_expert.vlm.model, self.config.vlm
        language, scale = model.text_model, config.width**0.5
        pictures = model.connector.modality_projection.proj(
            shuffled(model.vision_model(pixels.flatten(0, 1), run), self.config.shuffle)
        )
        pictures = pictures.unflatten(0, present.shape)  # [B, slots, tokens, width]
        words = language.embed_tokens(prompt) * scale
        tokens = self.state_token(state, condition)[:, None].to(words.dtype)
        x = torch.cat([pictures.flatten(1, 2) * scale, words, tokens], 1)
        shown = present[..., None].expand(-1, -1, pictures.shape[2]).flatten(1)
        valid = torch.cat([shown, worded, torch.ones_like(worded[:, :1])], 1)
        is_state = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
        # pictures and words do not see the state
        mask = (valid[:, None, :] & (~is_state[None, :] | is_state[:, None]))[:, None]
        rotation = Rotation(valid.cumsum(1) - 1, config.head_dim)
        cache, output = language.read(x, Sight(rotation, mask), run, self.config.value == "prefix")
        expert = self.vlm_with_expert.lm_expert
        cache = [
            layer.across(kept) if layer.crosses else kept for layer, kept in zip(expert.layers, cache, strict=False)
        ]
        return Context(cache, valid, self._sights(valid), run, output)

    def _sights(self, valid: Tensor) -> tuple[Sight, Sight]:
        """The sights of the actions in layers with attention of their own, and in those that look across."""
        place, head_dim = torch.arange(self.horizon, device=valid.device), self.config.expert.head_dim
        own = looking_at(valid, self.horizon, self.horizon, Rotation(valid.sum(1, keepdim=True) + place, head_dim))
        seen = valid[:, None, None, :].expand(-1, -1, self.horizon, -1)
        return own, Sight(Rotation(place.expand(len(valid), -1), head_dim), seen, valid)

    def moments(self, times: Tensor) -> Tensor:
        return embed_times(times, self.config.expert.width, self.config.min_period, self.config.max_period)

    def suffix(self, context: Context, noisy: Tensor, moments: Tensor) -> Tensor:
        actions = context.run(projected, self.action_in_proj, noisy)
        both = torch.cat([actions, (moments if moments.ndim == 3 else moments[:, None]).expand_as(actions)], -1)
        both = context.run(projected, self.action_time_mlp_in, both, True)
        x = context.run(projected, self.action_time_mlp_out, both)
        expert = self.vlm_with_expert.lm_expert
        x = x.to(expert.layers[0].self_attn.q_proj.weight.dtype)
        return at_least_float32(expert.through(x, context.sights, context.cache, context.run))

    def prompt(self, instruction: str, state: np.ndarray) -> str:
        return instruction if instruction.endswith("\n") else f"{instruction}\n"


class SmolVLMWithExpert(nn.Module):
    """The modules under their published names. The head for words is part of the
    checkpoints, and no use is made of it."""

    def __init__(self, config: SmolVLAConfig):
        super().__init__()
        every = config.self_attn_every_n_layers
        shared = config.vlm.num_kv_heads * config.vlm.head_dim
        tower = Siglip(config.vision)
        projection = nn.Linear(config.vision.hidden_size * config.shuffle**2, config.vlm.width, bias=False)
        connector = nn.ModuleDict({"modality_projection": nn.ModuleDict({"proj": projection})})
        text = GemmaStack(config.vlm, config.vocabulary)
        head = nn.Linear(config.vlm.width, config.vocabulary, bias=False).requires_grad_(False)
        model = nn.ModuleDict({"vision_model": tower, "connector": connector, "text_model": text})
        self.vlm: Any = nn.ModuleDict({"model": model, "lm_head": head})
        self.lm_expert: Any = GemmaStack(
            config.expert, key_width=lambda layer: 0 if every and layer % every == 0 else shared
        )


def shuffled(x: Tensor, side: int) -> Tensor:
    """[B, patches, width] to squares of `side` x `side` patches: [B, patches / side^2, width * side^2]."""
    rows = int(x.shape[1] ** 0.5) // side
    x = x.unflatten(1, (rows, side, rows, side)).transpose(2, 3)  # [B, rows, columns, side, side, width]
    return x.flatten(3).flatten(1, 2)
