"""The noise of a frozen policy's flow that becomes actions where the policy acts, and not in an update: that of the
actor, and draws of the prior, which are decoded with each frame as examples for a critic of noise.

    observations/base_policy/HASH/noise            float32 [agent.options.noise_samples, W], within the bound
    observations/base_policy/HASH/noise_actions    float32 [agent.options.noise_samples, agent.chunk, A], as the task
                                                   takes them

W is the numbers of noise of one action of the policy, or of all of its plan without agent.options.repeat_noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hilt.core.errors import ConfigError
from hilt.core.tree import Array
from hilt.policies.base import Observation
from hilt.policies.conditioned import ConditionedPolicy
from hilt.policies.frozen.frozen_config import NOISE, NOISE_ACTIONS, FrozenOptions
from hilt.policies.frozen.noise_decoder import flow_refusal

if TYPE_CHECKING:
    from hilt.policies.frozen.frozen_base import FrozenBase


class ActedNoise:
    """Noise ``[N, width]`` of the policy, and the actions that it becomes."""

    def __init__(self, base: FrozenBase):
        guidance = base.policy.guidance if isinstance(base.policy, ConditionedPolicy) else 1.0
        if guidance != 1:
            raise ConfigError(
                f"agent.options.space=noise: the policy in {base.options.policy} acts with guidance={guidance:g}, "
                "which mixes two flows. Give agent.options.policy_options.guidance=1, or space=residual or edit."
            )
        if (shape := base.policy.start_shape) is None:
            raise ConfigError(
                f"agent.options.space=noise: the policy in {base.options.policy} does not compute its actions by a "
                "flow, whose noise an agent could decide. Give pi0, pi0.5, SmolVLA or a small_vla with "
                "policy_options.head=flow, or space=residual or edit."
            )
        self._base, self._shape, self._options = base, shape, base.options
        self.width = shape[1] if base.options.repeat_noise else shape[0] * shape[1]

    def actions(self, rows: Sequence[Observation], noise: Array) -> Array:
        """The first actions of the plans that begin with this noise, as the task takes them, ``[N, chunk, A]``."""
        of_steps = np.asarray(noise, np.float32).reshape(len(rows), -1, self._shape[1])
        start = np.broadcast_to(of_steps, (len(rows), *self._shape)).copy()
        return self._base.commands(self._base.policy.act_from(rows, start))

    def samples(self, rows: Sequence[Observation]) -> dict[str, Array]:
        """Draws of the prior for each row and their actions, by the names of their columns."""
        drawn = np.stack([self._drawn(row) for row in rows])
        made = [self.actions(rows, drawn[:, number]) for number in range(drawn.shape[1])]
        return {NOISE: drawn, NOISE_ACTIONS: np.stack(made, axis=1)}

    def sampled(self, columns: dict[str, Array]) -> bool:
        """Whether columns of a log have the draws that these options ask for."""
        wanted = (self._options.noise_samples, self.width)
        return not wanted[0] or (NOISE in columns and columns[NOISE].shape[1:] == wanted)

    def _drawn(self, row: Observation) -> Array:
        """Draws by a seed that follows from the row: an observation that is read again has the same draws."""
        seed = 0
        for name, value in sorted(row.items()):
            seed = zlib.crc32(value.encode() if isinstance(value, str) else np.ascontiguousarray(value), seed)
            seed = zlib.crc32(name.encode(), seed)
        shape, bound = (self._options.noise_samples, self.width), self._options.noise_bound
        return np.random.default_rng(seed).normal(size=shape).clip(-bound, bound).astype(np.float32)


def acted_noise(base: FrozenBase) -> ActedNoise | None:
    """What decodes the noise of an agent where its policy acts; None where an update does, or nothing decides noise."""
    options = base.options
    if options.space != "noise" or options.noise_gradient == "flow":
        return None
    if options.noise_gradient == "critic" or flow_refusal(base):
        return ActedNoise(base)
    plain = FrozenOptions()
    for name in ("noise_samples", "repeat_noise"):
        if (given := getattr(options, name)) != getattr(plain, name):
            raise ConfigError(
                f"agent.options.{name}={given} would do nothing: the actor learns through the flow of the policy in "
                f"{options.policy}. Leave it out, or give agent.options.noise_gradient=critic."
            )
    return None
