"""Sizes and settings of an ACT policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hilt.core.errors import ConfigError, suggest
from hilt.core.validate import Need, check, setting
from hilt.policies.precision import PRECISIONS

MODEL_TYPE = "hilt_act"


@dataclass(frozen=True)
class ACTConfig:
    """About 2M parameters as it is."""

    cameras: tuple[str, ...] = ("full_image",)
    """Pictures of an observation, by name"""
    image_size: int = setting(64, minimum=16)
    """Pixels of their sides, a multiple of 16; others are resized"""
    state_dim: int = setting(8, minimum=0)
    """Numbers of proprioception; 0: none is looked at"""
    chunk: int = setting(10, minimum=1)
    """Actions in one answer, k in the paper: about a second of them is common"""
    action_dim: int = setting(7, minimum=1)
    """Numbers in one action"""
    latent: int = setting(32, minimum=1)
    """Numbers of the style z"""
    kl_weight: float = setting(10.0, minimum=0)
    """Weight of the KL from the posterior of z to its prior, beta in the paper; a smaller one lets z tell more of what
    was shown, and the policy, which acts with z = 0, less"""
    vision: str = setting("keypoints", choices=("keypoints", "patches"))
    """What a picture becomes: "keypoints" that the words ask for, or "patches" of 16 pixels"""
    keypoints: int = setting(8, minimum=1, needs=Need("vision=keypoints", lambda c: c.vision == "keypoints"))
    """In each picture"""
    width: int = setting(128, minimum=2)
    """Of all tokens; an even number"""
    depth: int = setting(4, minimum=1)
    """Layers that join the observation, and layers that infer the style"""
    decoder_depth: int = setting(1, minimum=1)
    """Layers that decode the chunk. The published code has seven and uses the first"""
    heads: int = setting(4, minimum=1)
    """Of the attention"""
    shift: int = setting(0, minimum=0)
    """The maximum shift of images in each direction for imitation, in pixels"""
    precision: str = setting("auto", choices=PRECISIONS)
    """Of convolutions and matrix products: "float32", "bfloat16", or "auto": the faster one. A run decides when it
    begins; the folder of a policy does not contain it"""

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.cameras or self.image_size % 16:
            yield (
                f"{here}cameras {self.cameras} of {self.image_size} pixels: give at least one, "
                "and a multiple of 16 pixels."
            )
        if self.width % self.heads or self.width % 2:
            yield f"{here}width is {self.width}; expected an even multiple of heads, which is {self.heads}."

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ACTConfig:
        """From what `to_json` gave. A key that is not known is refused."""
        settings = {key: value for key, value in found.items() if key != "model_type"}
        known = [each.name for each in dataclasses.fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ConfigError(f"ACT has no setting {unknown[0]!r}{suggest(unknown[0], known)}")
        made: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
        }
        return cls(**made)

    def to_json(self) -> dict[str, object]:
        """Returns all settings except the precision, which depends on the machine."""
        settings = dataclasses.asdict(self)
        del settings["precision"]
        return {"model_type": MODEL_TYPE, **settings}
