"""DSRL beside a frozen policy whose flow an update cannot follow: pi0, pi0.5, SmolVLA, or any other that can begin with
given noise. The actor decides the initial noise of a plan, which becomes actions once, where the agent acts; critics of
noise train it: `hilt.algos.frozen.noise_critic`.

    noise/start    float32 [W], in steps of the log: the noise with which the actor began a plan in this step
    noise/known    bool: whether it did so and its action was executed as it was decided; not where a person acted, nor
                   in the later steps of a chunk
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hilt.algos import rlpd
from hilt.algos.adam import Adam
from hilt.algos.frozen.action_spaces import ActionSpace, DecodedNoise
from hilt.algos.frozen.noise_critic import OUTPUTS, DrawnNoise, NoiseAliasing
from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.core.tree import ArraySpec, Tree, flatten
from hilt.policies.agent.actor_critic import ActorNetwork, Critics
from hilt.policies.agent.config import CHUNK_INDEX, AgentConfig
from hilt.policies.agent.residual_critics import ResidualCritics, make_critics
from hilt.policies.base import Observation
from hilt.policies.frozen.acted_noise import ActedNoise
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import (
    FEATURES,
    FROZEN_VLA,
    NOISE,
    NOISE_ACTIONS,
    STEP_NOISE,
    base_path,
    check_same_weights,
    frozen_options,
)

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from typing_extensions import Self

START, KNOWN = f"{STEP_NOISE}/start", f"{STEP_NOISE}/known"


class NoiseAgent(FrozenAgent):
    """The actor decides the noise of a frozen policy's flow, and learns from critics of noise."""

    def __init__(
        self,
        shapes: Mapping[str, ArraySpec],
        images: list[str],
        proprio: list[str],
        actions: int,
        config: AgentConfig,
        seed: int,
        squashed: bool = True,
    ):
        check_noise_settings(config)
        options = frozen_options(config.options)
        self._frozen = FrozenBase(options, config.chunk, config.device)
        self._acted = self._frozen.acted or ActedNoise(self._frozen)
        self._instruction, self._start = "", np.zeros(self._acted.width, np.float32)
        self._decided = np.zeros(actions, np.float32)
        self._rows_seen: Callable[[], Sequence[Observation]] = list
        super().__init__(shapes, images, proprio, actions, config, seed, squashed)
        check_same_weights(self._frozen.weights, self.weights, options.policy)
        self._trained.noise_critic = self.networks["noise_critic"]
        self.algorithm = NoiseAliasing()
        wanted = config.rlpd.target_entropy
        self.target_entropy = self._acted.width * (-0.5 if wanted is None else wanted / self.layout.continuous)

    def _make_space(self) -> ActionSpace:
        return DrawnNoise(self._places(), self.options.noise_bound, self.options.pull)

    def _make_networks(self) -> dict[str, nn.Module]:
        made, config, body, width = super()._make_networks(), self.config, self._body(), self._acted.width
        limits = config.actor_scale, config.initial_std, config.std_range
        made["actor"] = ActorNetwork(body, width, self.generator, *limits).to(self.device)
        bias, members = (0.0,) * OUTPUTS, config.rlpd.critics
        critics = make_critics(config.critic, body, width, self.generator, members, bias)
        return {**made, "noise_critic": critics.to(self.device)}

    def _make_optimizers(self) -> dict[str, Adam]:
        critics = cast("Critics | ResidualCritics", self.networks["noise_critic"])
        rate, decay = self.config.rlpd.learning_rate, self.config.critic.weight_decay
        made = Adam(critics.parameters(), rate)
        if decay:
            made = Adam(critics.parameters(), rate, decay, decayed=critics.matrices())
        return {**super()._make_optimizers(), "noise_critic": made}

    def measure_disagreement(self, samples: int = 4) -> None:
        refuse_help()

    # Acting

    def use_instructions(self, instructions: Sequence[str]) -> None:
        self._instruction = instructions[0] if instructions else ""

    def begin(self, instruction: str = "", paced: bool = False) -> None:
        self._instruction = instruction or self._instruction
        super().begin(instruction, paced)

    def sample_actions(
        self, observations: Tree, seed: int | None = None, argmax: bool = False
    ) -> npt.NDArray[np.float32]:
        """Like that of every agent; the observations have what the policy looks at, besides its columns."""
        self._rows_seen = partial(self._read, observations)
        return super().sample_actions(observations, seed, argmax)

    def chunks(
        self,
        observations: Tree,
        seed: int = 0,
        argmax: bool = True,
        draws: int = 1,
        rows: Sequence[Observation] | None = None,
    ) -> npt.NDArray[np.float32]:
        seen = self._read(observations) if rows is None else rows
        self._rows_seen = partial(list, [row for row in seen for _ in range(draws)])
        return super().chunks(observations, seed, argmax, draws)

    def _read(self, observations: Mapping[str, Any]) -> list[Observation]:
        """Observations of the task by the policy's names."""
        features = flatten(observations)[base_path(self.weights, FEATURES)]
        if features.ndim == 1:
            return [self._frozen.row(observations, self._instruction)]
        return self._frozen.rows(observations, [self._instruction] * len(features))

    def _decide(self, leaves: Mapping[str, Tensor], seed: int | None, argmax: bool) -> npt.NDArray[np.float32]:
        noise = self._draw(leaves, seed, argmax)[0].float().cpu().numpy()
        decided = self._with_others(np.asarray(self._acted.actions(self._rows_seen(), noise), np.float32), leaves)
        self._start, self._decided = noise[0].copy(), decided[0, 0].copy()
        return decided

    def acted(self, source: Source, executed: npt.ArrayLike | None) -> dict[str, object]:
        noted = super().acted(source, executed)
        known = source == Source.POLICY and noted.get(CHUNK_INDEX, 0) == 0 and self._was_decided(executed)
        start = self._start if known else np.zeros_like(self._start)
        return {**noted, STEP_NOISE: {"start": start, "known": np.bool_(known)}}

    def _was_decided(self, executed: npt.ArrayLike | None) -> bool:
        """Whether the action that the noise became is what was executed: the first one after a take-over may be scaled
        down."""
        return executed is not None and np.allclose(np.asarray(executed), self._decided, rtol=0, atol=1e-5)

    def step_columns(self) -> dict[str, object]:
        start = ArraySpec(np.dtype(np.float32), (self._acted.width,), default=0)
        return {STEP_NOISE: {"start": start, "known": ArraySpec(np.dtype(bool), default=False)}}

    # Learning

    @property
    def batch_columns(self) -> list[str]:  # type: ignore[override]
        return [START, KNOWN, *(f"observations/{path}" for path in self._sampled())]

    def _sampled(self) -> list[str]:
        """The paths of the draws of noise in observations, and of the actions that they became."""
        names = (NOISE, NOISE_ACTIONS) if self.options.noise_samples else ()
        return [base_path(self.weights, name) for name in names]

    def _rows(
        self, batch: Mapping[str, Any], z: Tensor, next_z: Tensor, target_z: Tensor, details: bool
    ) -> rlpd.Transitions:
        made = super()._rows(batch, z, next_z, target_z, details)
        made.decoded = self._decoded(batch, made)
        return made

    def _decoded(self, batch: Mapping[str, Any], rows: rlpd.Transitions) -> DecodedNoise:
        """The noise that the actor has executed, where it has, and the draws that came with the frames."""
        noted, actions = flatten(batch), rows.actions
        known, counted = self.inputs.column(noted, KNOWN).to(actions), torch.ones_like(actions)
        if rows.taken is not None and rows.shown is not None and rows.valid is not None:
            counted = rows.taken.to(actions).repeat_interleave(self.layout.continuous, dim=1)
            known = known * rows.valid * (rows.taken == rows.shown).all(1)  # not where a person ended the chunk
        made = DecodedNoise(
            self.inputs.column(noted, START).float()[:, None], actions[:, None], known[:, None], counted[:, None]
        )
        if not self._sampled():
            return made
        draws, became = (self.inputs.column(noted, f"observations/{path}").float() for path in self._sampled())
        shown = became[..., self.layout.moving].flatten(2)  # [B, K, chunk * numbers]
        every = shown.new_ones(shown.shape[:2])
        more = DecodedNoise(draws, shown, every, torch.ones_like(shown))
        parts = zip(vars(made).values(), vars(more).values(), strict=True)
        return DecodedNoise(*(torch.cat(pair, dim=1) for pair in parts))


class FrozenVlaAgent(FrozenAgent):
    """What ``agent.kind=frozen_vla`` names: `make` gives an agent with critics of noise where the noise of its policy
    needs them, and a plain one elsewhere."""

    @classmethod
    def make(
        cls,
        observation_space: Space,
        action_space: Space,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> Self:
        config = config or AgentConfig(kind=FROZEN_VLA)
        spaces = observation_space, action_space
        made = agent_class(config).make(*spaces, config, image_keys, proprio_keys, seed, squashed)
        return cast("Self", made)  # one of the two, in the place of this class


def agent_class(config: AgentConfig) -> type[FrozenAgent]:
    """The class of an agent with these settings."""
    options = frozen_options(config.options)
    if options.space != "noise" or FrozenBase(options, config.chunk, config.device).acted is None:
        return FrozenAgent
    return NoiseAgent


def refuse_help() -> None:
    """Refuses to ask an operator for help by the disagreement of critics."""
    raise ConfigError(
        "help.quantile with agent.options.space=noise: the critics of actions are not where the agent acts. Leave "
        "help.quantile out, or give agent.options.noise_gradient=flow or another space."
    )


def check_noise_settings(config: AgentConfig) -> None:
    """Refuses settings of an agent that critics of noise do not know."""
    refused = {
        f"agent.rlpd.samples={config.rlpd.samples}": config.rlpd.samples > 1,
        f"agent.critic.head={config.critic.head}": config.critic.head != "scalar",
        f"agent.critic.reset_period={config.critic.reset_period}": config.critic.reset_period > 0,
    }
    if wrong := [name for name, is_wrong in refused.items() if is_wrong]:
        raise ConfigError(
            f"{' and '.join(wrong)} with a critic of noise (agent.options.space=noise), which is a scalar, is never "
            "reset, and does not choose among several draws. Leave it out."
        )
