"""What an OpenVLA checkpoint is made of (`OpenVLAConfig`, as in its config.json),
and how it is run (`OpenVLAOptions`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.validate import check, setting
from hilt.policies.float8 import ACTS_IN_FLOAT8, FIRST_LAYER, ROLLOUT_PRECISIONS
from hilt.policies.io.preprocess import IMAGENET, SIGLIP
from hilt.policies.precision import PRECISIONS
from hilt.policies.vla.llama import DEFAULTS
from hilt.policies.vla.vit import VitConfig

VARIANTS, HEADS, NORMALIZATIONS = ("ar", "oft"), ("tokens", "l1", "laplace"), ("q99", "minmax")
CAMERAS = {1: ("full_image",), 2: ("full_image", "wrist_image"), 3: ("full_image", "left_wrist", "right_wrist")}
TIMM = {
    "dinosiglip-vit-so-224px": (224, ["vit_large_patch14_reg4_dinov2", "vit_so400m_patch14_siglip_224"]),
    "dinosiglip-vit-so-384px": (384, ["vit_large_patch14_reg4_dinov2", "vit_so400m_patch14_siglip_384"]),
    "dinov2-vit-l": (224, ["vit_large_patch14_reg4_dinov2"]),
    "siglip-vit-so400m": (224, ["vit_so400m_patch14_siglip_224"]),
    "siglip-vit-so400m-384px": (384, ["vit_so400m_patch14_siglip_384"]),
}
"""Upstream's names of vision backbones: pixels at a side, and the transformers"""
OURS = "hilt"
"""The key of config.json with the values that upstream's files do not contain"""
SHARED = ("text_config", "use_proprio", "proprio_dim")
"""Fields that have upstream's names"""


@dataclass
class OpenVLAConfig:
    """Everything that decides which weights there are and what they mean."""

    upstream: dict[str, Any] = field(default_factory=dict)
    """config.json as it was, but for ours and the statistics: it is written again by `to_json`"""
    norm_stats: dict[str, Any] = field(default_factory=dict)
    """Statistics by dataset"""
    text_config: dict[str, Any] = field(default_factory=dict)
    """Sizes of the language model; the defaults are Llama-2-7B's"""
    variant: str = setting("oft", choices=VARIANTS)
    """`ar`: a token at a time, causal; `oft`: a chunk in one pass"""
    head: str = setting("tokens", choices=HEADS)
    """What reads the action slots: `tokens`, `l1`, or `laplace`, which is `l1` with a scale"""
    chunk: int = setting(8, minimum=1)
    """Actions in one answer"""
    max_delay: int = setting(0, minimum=0)
    """In imitation up to this many actions at the start of a chunk are given, at random, so that an answer can continue
    what is executed meanwhile; 0: none"""
    action_dim: int = 0
    """Numbers in an action; 0: as many as the statistics have"""
    num_images: int = setting(1, minimum=1)
    use_proprio: bool = False
    proprio_dim: int = setting(0, minimum=0)
    film: bool = False
    """Whether the vision transformers listen to the words"""
    value_head: bool = False
    normalization: str = setting("q99", choices=NORMALIZATIONS)
    """`q99`: between the quantiles 0.01 and 0.99; `minmax`: between the least and the most"""
    image_size: int = 224
    """Pixels at a side"""
    vit: list[dict[str, Any]] | None = None
    """timm's keyword arguments of the vision transformers, where they have no name there"""
    means: list[list[float]] = field(default_factory=list)
    """Of the pixels' channels, for each vision transformer; from the folder's
    preprocessor_config.json. Empty: those of its kind"""
    stds: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self)
        kinds = [IMAGENET if vit.class_token else SIGLIP for vit in self.vits()]
        self.means = self.means or [list(mean) for mean, _ in kinds]
        self.stds = self.stds or [list(std) for _, std in kinds]

    def conflicts(self, here: str) -> Iterator[str]:
        if self.variant == "ar" and (self.head != "tokens" or self.film or self.use_proprio or self.num_images > 1):
            yield (
                "OpenVLA answers a token at a time from one image: other heads, images, FiLM "
                "and proprio are variant=oft."
            )
        if self.max_delay and (self.variant == "ar" or self.max_delay >= self.chunk):
            yield (
                f"{here}max_delay is {self.max_delay}, variant {self.variant} and chunk {self.chunk}: actions are "
                "given to variant=oft, fewer than its chunk has. Give a smaller max_delay, or leave it out."
            )
        if self.use_proprio and self.proprio_dim < 1:
            yield f"{here}proprio_dim={self.proprio_dim}: expected at least 1 with use_proprio."

    @classmethod
    def from_json(cls, document: Mapping[str, Any], **changes: Any) -> OpenVLAConfig:
        """From a config.json, upstream's or ours; `changes` are fields that it does not have, or has otherwise."""
        upstream = {key: value for key, value in document.items() if key not in (OURS, "norm_stats", *SHARED)}
        ours = {**{name: document[name] for name in SHARED if name in document}, **document.get(OURS, {})}
        known = [item.name for item in fields(cls)]
        for name in [*ours, *changes]:
            if name not in known:
                raise UnknownNameError(f"key of config.json's {OURS!r}" if name in ours else "option", name, known)
        if ours.get("use_proprio") is False:
            ours["proprio_dim"] = 0
        backbone = upstream.get("vision_backbone_id", "dinosiglip-vit-so-224px")
        if "image_sizes" in upstream:
            ours.setdefault("image_size", upstream["image_sizes"][0])
        elif backbone in TIMM:
            ours.setdefault("image_size", TIMM[backbone][0])
        return cls(**{"upstream": upstream, "norm_stats": dict(document.get("norm_stats") or {}), **ours, **changes})

    def to_json(self) -> dict[str, Any]:
        """A config.json that `from_json` and upstream's loader read."""
        shared = {name: getattr(self, name) for name in ("norm_stats", *SHARED)}
        ours = {name: value for name, value in asdict(self).items() if name != "upstream" and name not in shared}
        return {**self.upstream, **shared, OURS: ours}

    def vits(self) -> list[VitConfig]:
        if self.vit is not None:
            return [VitConfig.of(options) for options in self.vit]
        backbone = self.upstream.get("vision_backbone_id", "dinosiglip-vit-so-224px")
        ids = self.upstream.get("timm_model_ids")
        if ids is None and backbone not in TIMM:
            raise UnknownNameError("vision backbone", backbone, TIMM)
        if any(self.upstream.get("timm_override_act_layers") or []):
            raise ConfigError(
                f"{backbone} needs another activation, {self.upstream['timm_override_act_layers']}; only GELU is built."
            )
        return [VitConfig.named(name) for name in ids or TIMM[backbone][1]]

    def cameras(self) -> tuple[str, ...]:
        """The fields of an observation that are its images, in order."""
        if self.num_images not in CAMERAS:
            raise ConfigError(f"{self.num_images} images: expected {', '.join(map(str, CAMERAS))}.")
        return CAMERAS[self.num_images]

    @property
    def width(self) -> int:
        return int(self.text_config.get("hidden_size", DEFAULTS["hidden_size"]))

    @property
    def n_action_bins(self) -> int:
        return int(self.upstream.get("n_action_bins", 256))

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer, without the rows that only fill up: the last ones are the actions."""
        return int(self.text_config.get("vocab_size", DEFAULTS["vocab_size"])) - int(
            self.upstream.get("pad_to_multiple_of", 64)
        )


@dataclass
class OpenVLAOptions:
    """How a policy is run; no weights depend on it."""

    compute: str = setting("float32", choices=PRECISIONS)
    """`float32`: in the precision of the weights; `bfloat16`: products in bfloat16, weights, sums and log-probabilities
    as they are; `auto`: on a CPU whichever is faster there, on a GPU float32. Runs on a CPU begin with `auto`"""
    rollout_precision: str = setting("same", choices=ROLLOUT_PRECISIONS)
    """Of the large products while it acts: "same" as it learns; "fp8" on GPUs that have it; "fp8_emulated", its numbers
    on any device, slower. A run corrects for the difference: algorithm.recompute_log_prob=true"""
    fp8_first_layer: int = setting(FIRST_LAYER, minimum=0, needs=ACTS_IN_FLOAT8)
    """The first layer of the language model that acts in float8. Errors of early layers grow in all later ones: a
    higher number is nearer to the policy that learns, and slower"""
    acting: str = setting("eager", choices=("eager", "captured"))
    """How OpenVLA-OFT's `act` is run: "eager"; "captured" as CUDA graphs, one for each number of rows and length of
    prompt"""
    layers: str = setting("auto", choices=("auto", "eager", "compiled"))
    """Whether the layers of OpenVLA-OFT are compiled by torch, each kind once for any number of rows; the first passes
    then take a minute. "auto": on CUDA, of language models at least 1,024 wide"""
    checkpointed: float = setting(0.0, minimum=0, maximum=1)
    """Share of the layers, from 0 to 1, that are computed once more for the
    gradient instead of being remembered: less memory"""
    packed: bool = False
    """Whether rows of different length lie one behind the other, without padding, where all of an answer is known"""
    support: str = setting("actions", choices=("actions", "vocabulary"))
    """What may be drawn: the action tokens, or any of the `vocabulary`, as upstream's greedy decoding does"""
    detach_value: bool = False
    """Whether the value's gradient stops at its head"""
    log_scale_range: tuple[float, float] | None = None
    """Bounds of the scale head's answer; RIPT-VLA trains with (-2, 0.5)"""
    center_crop: bool = True
    """Whether images lose a tenth of their area, as they did in training with random crops"""
    max_prompt_length: int = setting(0, minimum=0)
    """Tokens that a prompt may have; a longer one is refused. 0: any number"""
    augment: bool = True
    """Whether imitation sees images cropped at random (with center_crop) and in
    other colors, as published; never when it acts"""

    def __post_init__(self) -> None:
        check(self)
