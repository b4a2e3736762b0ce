"""pi0 and pi0.5: PaliGemma reads pictures and words, an action expert beside it turns noise into a chunk of actions.

    policy = Pi0.from_pretrained("pi0_base", tokenizer="paligemma-3b-pt-224",
    images=("full_image", "wrist_image"), value="actions")

The parameters have the names of the published PyTorch checkpoints (openpi, lerobot). pi0 gets
the state as a token before the actions; pi0.5 (`adaptive`) gets it as numbers in the prompt,
and the time of the flow in the norms of the expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies.base import at_least_float32
from hilt.policies.flow_context import Context
from hilt.policies.io.flow_folders import published, set_dtype, to_published
from hilt.policies.io.tensor_files import check_dtype
from hilt.policies.vla.flow import Flow, embed_times
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
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.tokens import ByteTokenizer, load_tokenizer

VARIANTS = {
    "gemma_2b": StackConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_300m": StackConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
    "dummy": StackConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
}
VOCABULARY = 257_152


@dataclass(frozen=True, kw_only=True)
class Pi0Config(FlowPolicyConfig):
    """The sizes of pi0; the defaults are the published ones."""

    adaptive: bool = False
    """pi0.5: the state is in the prompt, and the time in the norms of the expert"""
    vlm: StackConfig = VARIANTS["gemma_2b"]
    """The language model"""
    expert: StackConfig = VARIANTS["gemma_300m"]
    """The action expert"""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """The tower for pictures"""
    vocabulary: int = VOCABULARY
    """Words of the language model"""
    augment: bool = True
    """As in `FlowPolicyConfig`"""

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def usual_value(self) -> str:
        """Returns where pi_RL reads the value (arXiv 2510.25889): pi0's on the expert's
        output, pi0.5's on the language model's."""
        return "prefix" if self.adaptive else "actions"

    @property
    def widths(self) -> tuple[int, int]:
        return self.vlm.width, self.expert.width

    @classmethod
    def from_published(cls, given: Mapping[str, Any], names: frozenset[str]) -> Pi0Config:
        sizes: dict[str, Any] = {}
        for ours, theirs, default in (
            ("vlm", "paligemma_variant", "gemma_2b"),
            ("expert", "action_expert_variant", "gemma_300m"),
        ):
            if (variant := given.get(theirs, default)) not in VARIANTS:
                raise UnknownNameError("variant of Gemma", variant, VARIANTS)
            sizes[ours] = VARIANTS[variant]
        vision = VisionConfig(image_size=given.get("image_resolution", [224])[0])
        adaptive = given.get("type") == "pi05" or any(
            name.endswith("time_mlp_in.weight") and "action" not in name for name in names
        )
        kind = "QUANTILES" if adaptive else "MEAN_STD"
        usual = {
            "tokenizer_max_length": 200 if adaptive else 48,
            "normalization_mapping": {"STATE": kind, "ACTION": kind},
        }
        return cls(adaptive=adaptive, vision=vision, **sizes, **published({**usual, **given}))

    def to_published(self) -> dict[str, Any]:
        variants = {size: name for name, size in VARIANTS.items()}
        return to_published(
            self,
            type="pi05" if self.adaptive else "pi0",
            paligemma_variant=variants.get(self.vlm, "other"),
            action_expert_variant=variants.get(self.expert, "other"),
            image_resolution=[self.image_size, self.image_size],
            num_inference_steps=self.flow.steps,
        )


NEW = "random_weights"
"""The option without which no new one is made: nobody is to train one by mistake that has learned nothing"""


class Pi0(FlowPolicy):
    """pi0, or pi0.5 if its config is `adaptive`."""

    config: Pi0Config
    config_class = Pi0Config
    big = "paligemma_with_expert"
    tied = (
        "paligemma_with_expert.paligemma.lm_head.weight",
        "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight",
    )

    @classmethod
    def create(cls, sizes: Mapping[str, object], options: Mapping[str, object], seed: int) -> Pi0:
        """A new one with random weights, at its full size or another: for measurements, and to try settings without a
        checkpoint. Its tokenizer has bytes, unless `tokenizer` names a folder.

        `options` are fields of `Pi0Config`; `vlm` and `expert` may be names of Gemma's variants. `dtype` as in
        `from_pretrained`."""
        config = cls._new_config(sizes, options)
        folder: Any = options.get("tokenizer")
        policy = cls(config, load_tokenizer(folder) if folder else ByteTokenizer(), {}, seed)
        kind: Any = options.get("dtype")
        if (dtype := check_dtype(kind)) is not None:
            set_dtype(policy, dtype)
        return policy

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        auto = options.get(cls.recomputation_option) == "auto"  # which a run replaces when it begins
        cls._new_config({}, {**options, cls.recomputation_option: 0.0} if auto else options)

    @classmethod
    def _new_config(cls, sizes: Mapping[str, Any], options: Mapping[str, Any]) -> Pi0Config:
        if options.get(NEW) is not True:
            raise ConfigError(
                f"a new {cls.__name__} cannot be made: give policy=FOLDER, that of a checkpoint. One that has learned "
                f"nothing, to measure or to try settings: policy_options.{NEW}=true."
            )
        fields = {name: value for name, value in options.items() if name not in (NEW, "tokenizer", "dtype")}
        known = {field.name for field in dataclass_fields(Pi0Config)}
        if unknown := sorted(set(fields) - known):
            raise UnknownNameError(f"option of a new {cls.__name__}", unknown[0], known | {NEW, "tokenizer", "dtype"})
        for name in ("vlm", "expert"):
            if isinstance(given := fields.get(name), str):
                if given not in VARIANTS:
                    raise UnknownNameError("variant of Gemma", given, VARIANTS)
                fields[name] = VARIANTS[given]
            elif isinstance(given, Mapping):
                fields[name] = StackConfig(**given)
        for name, kind in (("vision", VisionConfig), ("flow", Flow)):
            if isinstance(given := fields.get(name), Mapping):
                fields[name] = kind(**given)
        seen = {"images": tuple(sizes["cameras"])} if sizes else {}
        seen |= {name: sizes[name] for name in ("state_dim", "action_dim") if name in sizes}
        found = {**seen, **fields}
        if found.get("value") == "auto":
            found["value"] = "prefix" if found.get("adaptive") else "actions"
        if isinstance(images := found.get("images"), list):
            found["images"] = tuple(images)
        return Pi0Config(**found)

    def fit(self, states: np.ndarray, actions: np.ndarray) -> None:
        self.use_statistics({"state": statistics(states), "action": statistics(actions)})

    def build(self) -> None:
        config = self.config
        width = config.expert.width
        expert = replace(config.expert, condition=width if config.adaptive else 0)
        self.paligemma_with_expert = PaliGemmaWithExpert(config.vision, config.vlm, expert, config.vocabulary)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        if config.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.max_state_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    @property
    def state_token_width(self) -> int:
        return 0 if self.config.adaptive else self.config.expert.width

    def freeze(self) -> None:
        paligemma = self.paligemma_with_expert.paligemma
        if self.config.trained != "all":
            (paligemma if self.config.trained == "expert" else paligemma.model.vision_tower).requires_grad_(False)

    def float8_parts(self) -> Sequence[nn.Module]:
        return list(self.paligemma_with_expert.paligemma.model.language_model.layers[self.config.fp8_first_layer :])

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
        model = self.paligemma_with_expert.paligemma.model
        language, config = model.language_model, self.config.vlm
        pictures = model.multi_modal_projector.linear(model.vision_tower.vision_model(pixels.flatten(0, 1), run))
        pictures = pictures.unflatten(0, present.shape).flatten(1, 2)  # [B, slots * patches, width]
        words = language.embed_tokens(prompt) * config.width**0.5
        x = torch.cat([pictures.to(words.dtype), words], 1)
        valid = torch.cat([present[..., None].expand(-1, -1, self.config.vision.tokens).flatten(1), worded], 1)
        rotation = Rotation(valid.cumsum(1) - 1, config.head_dim)
        sight = Sight(rotation, valid[:, None, None, :], valid)
        cache, output = language.read(x, sight, run, self.config.value == "prefix")
        states = 0 if self.config.adaptive else 1  # tokens of the state, which see no action
        place = torch.arange(self.horizon + states, device=valid.device)
        rotation = Rotation(valid.sum(1, keepdim=True) + place, self.config.expert.head_dim)
        sight = looking_at(valid, self.horizon + states, states, rotation)
        known = None if self.config.adaptive else self.state_token(state, condition)
        return Context(cache, valid, (sight, sight), run, output, known)

    def moments(self, times: Tensor) -> Any:
        moment = embed_times(times, self.config.expert.width, self.config.min_period, self.config.max_period)
        if not self.config.adaptive:
            return moment
        condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(moment))))
        expert = self.paligemma_with_expert.gemma_expert.model
        return expert.modulations(condition)

    def suffix(self, context: Context, noisy: Tensor, moments: Any) -> Tensor:
        expert = self.paligemma_with_expert.gemma_expert.model
        x = context.run(projected, self.action_in_proj, noisy)
        if context.state is not None:
            both = torch.cat([x, (moments if moments.ndim == 3 else moments[:, None]).expand_as(x)], -1)
            both = context.run(projected, self.action_time_mlp_in, both, True)
            x = torch.cat([context.state[:, None], context.run(projected, self.action_time_mlp_out, both)], 1)
        x = x.to(expert.layers[0].self_attn.q_proj.weight.dtype)
        conditions = moments if self.config.adaptive else None
        x = expert.through(x, context.sights, context.cache, context.run, conditions)
        return at_least_float32(x[:, -noisy.shape[1] :])

    def other_name(self, name: str) -> str:
        return name.replace(".vision_tower.vision_model.", ".vision_tower.")  # with transformers of 2026

    def prompt(self, instruction: str, state: np.ndarray) -> str:
        text = instruction.strip().replace("_", " ").replace("\n", " ")
        if not self.config.adaptive:
            return f"{text}\n"
        bins = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
        return f"Task: {text}, State: {' '.join(map(str, bins))};\nAction: "


class PaliGemmaWithExpert(nn.Module):
    """The modules under their published names. The heads for words are part of the
    checkpoints, and no use is made of them."""

    def __init__(self, vision: VisionConfig, vlm: StackConfig, expert: StackConfig, vocabulary: int):
        super().__init__()
        tower = nn.ModuleDict({"vision_model": Siglip(vision)})
        projector = nn.ModuleDict({"linear": nn.Linear(vision.hidden_size, vlm.width)})
        language = GemmaStack(vlm, vocabulary)
        head = nn.Linear(vlm.width, vocabulary, bias=False)
        head.weight = language.embed_tokens.weight
        model = nn.ModuleDict({"vision_tower": tower, "multi_modal_projector": projector, "language_model": language})
        self.paligemma: Any = nn.ModuleDict({"model": model, "lm_head": head})
        unused = nn.Linear(expert.width, vocabulary, bias=False).requires_grad_(False)
        self.gemma_expert: Any = nn.ModuleDict({"model": GemmaStack(expert), "lm_head": unused})
