"""ACT, action chunking with transformers (Zhao et al., 2023, arXiv 2304.13705): a policy that imitates.

    hilt train sft act                                              a complete run
    hilt train sft demos/ policy=act suite=tabletop                 from demonstrations of yours

    policy = ACT(ACTConfig(cameras=("full_image",), state_dim=8, chunk=10, action_dim=7), seed=0)
    policy.fit(states, actions)
    loss, figures = policy.supervised_loss(observations, actions, mask, generator)

The loss is in `hilt.algos.offline.act_loss`. ACT has no log-probabilities, so that no gradient of a policy can be
estimated from its episodes; as a policy it is served, evaluated and executed as others are, and a person can take over
from it and teach it (``agent.kind=vla``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from hilt.algos.offline.act_loss import act_loss, style
from hilt.core.errors import ConfigError
from hilt.core.files import new_folder
from hilt.policies.act.act_config import MODEL_TYPE, ACTConfig
from hilt.policies.act.act_network import ACTNetwork
from hilt.policies.base import (
    Evaluation,
    Observation,
    ObservedFields,
    Policy,
    Prefix,
    Record,
    check_prefix,
    check_temperature,
    to_imitate,
)
from hilt.policies.io.lora import merged
from hilt.policies.io.observed_record import observed_record
from hilt.policies.io.tensor_files import Tensors, check_device, load_into, read_json, write_tensors
from hilt.policies.vla.augment import shifted
from hilt.policies.vla.small_vla import fit_ranges

MIN_RANGE = 1e-6
"""The least range of a number of the actions by which it is divided"""


class ACT(Policy):
    """A policy by the protocol of `policies/base.py`. With ``sample`` it draws the style z from its prior, N(0, 1)
    times the temperature; otherwise z is 0."""

    precision_option = "precision"
    has_log_prob = False

    def __init__(self, config: ACTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.chunk, self.action_dim = config.chunk, config.action_dim
        self.network = ACTNetwork(config, seed)
        self.register_buffer("state_mean", torch.zeros(config.state_dim))
        self.register_buffer("state_std", torch.ones(config.state_dim))
        self.register_buffer("action_low", -torch.ones(config.action_dim))
        self.register_buffer("action_high", torch.ones(config.action_dim))

    @classmethod
    def create(cls, sizes: Mapping[str, object], options: Mapping[str, object], seed: int) -> ACT:
        if not {**sizes, **options}["cameras"]:
            raise ConfigError("the observations have no picture: ACT looks at one at least. Name it in columns=.")
        return cls(ACTConfig.from_json({**sizes, **options}), seed=seed)

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        ACTConfig.from_json(options)

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """The record has the style that was drawn, and no log-probabilities."""
        check_temperature(temperature, sample)
        check_prefix(self, prefix, len(observations), sample)
        record, drawn = self._record(observations), torch.zeros(len(observations), self.config.latent)
        if sample:
            drawn = temperature * torch.randn(drawn.shape, generator=_drawing(generator))
        with torch.no_grad():
            chunks = self.network.decoded(self._joined(record, drawn.to(self.action_low)))
            actions = self.action_low + (chunks.float().clamp(-1, 1) + 1) / 2 * (self.action_high - self.action_low)
        record["style"], record["temperature"] = drawn.numpy(), np.full(len(drawn), temperature, np.float32)
        return actions.cpu().numpy(), record

    def evaluate(self, record: Record) -> Evaluation:
        raise ConfigError(
            "ACT has no log-probabilities of actions, which post-training needs. Let it imitate (hilt train sft), or "
            "post-train a small_vla, whose heads have them."
        )

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of ACT in training mode; in evaluation mode the absolute error of what it does, with z = 0."""
        actions, mask = to_imitate(self, actions, mask)
        record = self._record(observations)
        there = torch.as_tensor(mask, device=self.device)
        shown = self._normalized(torch.as_tensor(actions, device=self.device).to(self.action_low))
        if not self.training:
            none = shown.new_zeros(len(shown), self.config.latent)
            found = act_loss(self.network.decoded(self._joined(record, none)), shown, there, none, none, 0.0)
            return found.l1, {"loss": found.l1.item(), "l1": found.l1.item()}
        if self.config.shift:
            record["images"] = shifted(record["images"], self.config.shift, generator)
        mean, log_variance = self.network.posterior(self._state(record), shown, there)
        noise = torch.randn(mean.shape, generator=_drawing(generator)).to(mean)
        chunks = self.network.decoded(self._joined(record, style(mean, log_variance, noise)))
        found = act_loss(chunks, shown, there, mean, log_variance, self.config.kl_weight)
        return found.loss, {"loss": found.loss.item(), "l1": found.l1.item(), "style_kl": found.kl.item()}

    def features(self, observations: Sequence[Observation]) -> Tensor:
        record = self._record(observations)
        with torch.no_grad():
            tokens = self._joined(record, self.action_low.new_zeros(len(observations), self.config.latent))
        return tokens[:, 0].float()

    def observed_fields(self) -> ObservedFields:
        return ObservedFields(tuple(self.config.cameras), self.config.state_dim)

    def fit(self, states: np.ndarray, actions: np.ndarray) -> None:
        """Takes the mean and the deviation of states [N, P] and the range of actions [N, action_dim], by which they
        are normalized. Before it, states are taken as they are, and actions range from -1 to 1."""
        fit_ranges(self, states, actions)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """A folder with the weights, adapters merged, and the config: whole or not there at all."""
        state, value = merged(self)
        with new_folder(folder) as beside:
            write_tensors(beside, state, value=value)
            (beside / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], device: torch.device | str = "cpu", **changes: Any) -> ACT:
        """From a folder; `changes` are settings that leave the weights as they are, such as ``kl_weight``."""
        tensors = Tensors(folder)
        document = read_json(tensors.path / "config.json")
        if document.get("model_type") != MODEL_TYPE:
            raise ConfigError(
                f"{folder}: the ACT in it is not of Hilt, whose folders have model_type={MODEL_TYPE}; networks of "
                "LeRobot and of the published code have other layers. Train one: hilt train sft DATA policy=act"
            )
        policy = cls(ACTConfig.from_json(document | changes))
        load_into(policy, tensors)
        result: ACT = policy.to(check_device(device))
        return result

    # -- inside

    def _record(self, observations: Sequence[Observation]) -> Record:
        config = self.config
        return observed_record(observations, config.cameras, config.image_size, config.state_dim)

    def _state(self, record: Record) -> Tensor | None:
        if not self.config.state_dim:
            return None
        return (torch.from_numpy(record["state"]).to(self.action_low) - self.state_mean) / self.state_std

    def _joined(self, record: Record, drawn: Tensor) -> Tensor:
        return self.network.joined(record, self._state(record), drawn)

    def _normalized(self, actions: Tensor) -> Tensor:
        """Actions of the robot from -1 to 1 over their range."""
        return 2 * (actions - self.action_low) / (self.action_high - self.action_low).clamp(min=MIN_RANGE) - 1


def _drawing(generator: Generator | None) -> Generator:
    if generator is None:
        raise ConfigError("chance needs a generator: give one (torch.Generator, on the CPU), or sample=False.")
    return generator
