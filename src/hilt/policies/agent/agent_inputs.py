"""What an agent sees: observations and batches become the numbers that its networks take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.tree import ArraySpec, flatten
from hilt.policies.agent.actor_critic import ProprioNormalizer
from hilt.policies.agent.agent_state import found
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.encoders import Encoder, random_crop, shift_of, shifted
from hilt.replay.tensors import as_tensor

FEATURES, STATES = "features", "z"
"""Under these names a batch may bring what a frozen encoder makes of its images, instead of these; or all that the
networks see, as `hilt.policies.agent.agent.Agent.states` makes it, instead of observations"""
ENCODED_TOGETHER = 16
"""The number of images that are encoded together for a cache; constant, for the last bits of a result depend on it"""


class AgentInputs:
    """Observations of these shapes as ``z``, by an encoder; `proprio` are the paths of what is seen besides images.
    Random numbers come from the agent's generator."""

    def __init__(
        self,
        shapes: Mapping[str, ArraySpec],
        proprio: list[str],
        config: AgentConfig,
        encoder: Encoder,
        device: torch.device | None,
        generator: Generator,
    ):
        self.shapes, self.proprio, self.config = shapes, proprio, config
        self.encoder, self.device, self.generator = encoder, device, generator
        self.normalizer: nn.Module = nn.Identity()
        """What normalizes proprioception, if that is asked for: the agent's own network"""
        given = {path: int(np.prod(shapes[path].shape)) for path in proprio}
        self.sizes = {path: size // 7 * 9 if path in config.pose_keys else size for path, size in given.items()}
        """The numbers that each proprioception becomes"""

    @property
    def width(self) -> int:
        """Numbers that the networks see of an observation: features of the images, and proprioception."""
        return self.encoder.width + sum(self.sizes.values())

    @property
    def frozen(self) -> bool:
        """Whether the images' features never change under updates, so that they may be cached."""
        return bool(self.encoder.paths) and self.config.encoder.training == "frozen"

    def leaves(self, observations: Mapping[str, Any]) -> dict[str, Tensor]:
        """The images (or their features) and the proprioception, by path."""
        given = flatten(observations)
        if STATES in given and self.frozen:
            return {STATES: self.tensor(given[STATES], STATES)}
        images = [FEATURES] if FEATURES in given and self.frozen else self.encoder.paths
        return {path: self.tensor(found(given, path), path) for path in [*images, *self.proprio]}

    def cropped(self, batch: Mapping[str, Any], name: str, pixels: int | None = None) -> dict[str, Tensor]:
        leaves = self.leaves(found(batch, name))
        pixels = self.config.rlpd.random_crop if pixels is None else pixels
        return {
            path: random_crop(leaf, pixels, self.generator) if path in self.encoder.paths else leaf
            for path, leaf in leaves.items()
        }

    def encode(
        self, encoder: nn.Module, leaves: Mapping[str, Tensor], dropout: Generator | None = None, trunk: bool = True
    ) -> Tensor:
        """``z [B, features + proprio]``."""
        if STATES in leaves:
            if leaves[STATES].shape[1:] != (self.width,):
                raise SchemaError(
                    f"z: expected [B, {self.width}] as Agent.states makes it, got {tuple(leaves[STATES].shape)}."
                )
            return leaves[STATES]
        parts = (
            [leaves[FEATURES]]
            if FEATURES in leaves
            else [encoder(leaves, dropout, trunk)]
            if self.encoder.paths
            else []
        )
        if self.proprio:
            together = torch.cat([self.seen(path, leaves[path]) for path in self.proprio], dim=1)
            parts.append(self.normalizer(together) if self.config.normalize_proprio else together)
        if parts[0].shape[1] != self.encoder.width and FEATURES in leaves:
            raise SchemaError(
                f"features: expected [B, {self.encoder.width}] as trunk_features makes them, "
                f"got {tuple(parts[0].shape)}."
            )
        return torch.cat(parts, dim=1)

    @property
    def shifts(self) -> int:
        """The number of shifts of each image whose features are kept."""
        return self.config.encoder.kept_shifts if self.frozen else 1

    def trunk_features(self, images: Mapping[str, Any], shift: int = 0) -> npt.NDArray[np.float32]:
        """``[N, features of all cameras]`` of images ``{path: uint8 [N, ...]}``, in the shift of this number, of which
        0 is none; those of an image are the same, bit for bit, whatever other images are in the call."""
        if not self.frozen:
            training = self.config.encoder.training if self.encoder.paths else "no cameras"
            raise ConfigError(f"features may be kept only of an encoder with training=frozen; this one has {training}.")
        leaves = {path: self.tensor(found(images, path), path) for path in self.encoder.paths}
        if shift:
            moves = [shift_of(shift, number, self.config.encoder.pretrain_crop) for number in range(len(leaves))]
            leaves = {path: shifted(leaf, *move) for (path, leaf), move in zip(leaves.items(), moves, strict=True)}
        n = len(next(iter(leaves.values())))
        features = np.empty((n, self.encoder.width), np.float32)
        for start in range(0, n, ENCODED_TOGETHER):
            part = {path: leaf[start : start + ENCODED_TOGETHER] for path, leaf in leaves.items()}
            size = len(next(iter(part.values())))
            if size < ENCODED_TOGETHER:
                part = {
                    path: torch.cat([leaf, leaf.new_zeros(ENCODED_TOGETHER - size, *leaf.shape[1:])])
                    for path, leaf in part.items()
                }
            with torch.no_grad():
                features[start : start + size] = self.encoder(part)[:size].cpu().numpy()
        return features

    def repeated(self, encoder: nn.Module, leaves: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
        """The proprioception of each observation as many times, one after the other, and ``z``, for which the images
        are encoded once."""
        with torch.no_grad():
            z = self.encode(encoder, leaves)
        kept = {path: leaves[path] for path in self.proprio if path in leaves} | {STATES: z}
        return {path: leaf.repeat_interleave(times, dim=0) for path, leaf in kept.items()}

    def normalized_future(self, future: Tensor) -> Tensor:
        """The proprioception that comes, ``future [B, 2, ...]``, in the unit of the normalized one, ``[B, 2 * n]``."""
        path = self.config.encoder.pretrain_predict
        start = sum(self.sizes[other] for other in self.proprio[: self.proprio.index(path)])
        columns = slice(start, start + self.sizes[path])
        if future.shape[1:] != (2, *self.shapes[path].shape):
            raise SchemaError(f"future: expected [B, 2, ...], {path} twice, got {tuple(future.shape)}.")
        normal = cast(ProprioNormalizer, self.normalizer)
        seen = [self.seen(path, future[:, when]) for when in (0, 1)]
        return torch.cat([(one - normal.mean[columns]) / normal.scale[columns] for one in seen], dim=1)

    def blurred(self, z: Tensor) -> Tensor:
        """With noise on the features, not on proprioception: what a frozen encoder never saw it places a little off."""
        if not (deviation := self.config.rlpd.feature_noise):
            return z
        noise = deviation * torch.randn(len(z), self.encoder.width, generator=self.generator)
        return torch.cat([z[:, : self.encoder.width] + noise.to(z), z[:, self.encoder.width :]], dim=1)

    def seen(self, path: str, leaf: Tensor) -> Tensor:
        """Proprioception as numbers ``[B, n]``."""
        if leaf.shape[1:] != self.shapes[path].shape:
            raise SchemaError(f"{path}: expected [B, ...] of {self.shapes[path].shape}, got {tuple(leaf.shape)}.")
        leaf = leaf.float()
        return (rotation_columns(leaf) if path in self.config.pose_keys else leaf).reshape(len(leaf), -1)

    def column(self, batch: Mapping[str, Any], name: str) -> Tensor:
        return self.tensor(found(batch, name), name)

    def tensor(self, value: Any, path: str) -> Tensor:
        tensor: Tensor = as_tensor(value, path)
        return tensor.to(self.device) if self.device is not None else tensor


def rotation_columns(pose: Tensor) -> Tensor:
    """``[..., 7]`` position and quaternion to ``[..., 9]`` position and two columns of
    the rotation: equal turns, equal numbers."""
    position, (x, y, z, w) = pose[..., :3], pose[..., 3:].unbind(-1)
    first = (1 - 2 * (y * y + z * z), 2 * (x * y + z * w), 2 * (x * z - y * w))
    second = (2 * (x * y - z * w), 1 - 2 * (x * x + z * z), 2 * (y * z + x * w))
    return torch.cat([position, torch.stack([*first, *second], dim=-1)], dim=-1)
