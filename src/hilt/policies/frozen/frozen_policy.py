"""A frozen policy and the agent that was trained beside it, as one policy in one folder.

    FOLDER/config.json          the settings of the agent, and the hash of the frozen weights
    FOLDER/model.safetensors    what the agent acts with
    FOLDER/base/                the frozen policy's own folder

It answers as the agent acts: with `agent.chunk` actions, in the units of the frozen policy.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from hilt.core import hub
from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.core.files import replacing, storage_errors
from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent_policy import drawn_rows
from hilt.policies.agent.config import AgentConfig
from hilt.policies.base import Evaluation, Observation, ObservedFields, Policy, Prefix, Record, check_temperature
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import BASE_POLICY, FROZEN_VLA, base_path, check_same_weights, frozen_options
from hilt.policies.frozen.noise_agent import agent_class
from hilt.policies.io.tensor_files import Tensors, read_json, write_tensors
from hilt.policies.io.weights_hash import former_weights_hash
from hilt.policies.registry import CONFIG

BASE_FOLDER = "base"
NETWORKS = "networks."
"""Before the names of the agent's weights among those of the policy"""


class FrozenVlaPolicy(Policy):
    """The policy of an agent beside a frozen one."""

    def __init__(self, agent: FrozenAgent, base: FrozenBase):
        super().__init__()
        check_same_weights(base.weights, agent.weights, base.options.policy)
        self.agent, self._frozen = agent, base
        self.base = base.policy
        acting = sorted({name.partition(".")[0] for name in agent.acting_state()})
        self.networks = nn.ModuleDict({name: agent.networks[name] for name in acting})
        self.chunk, self.action_dim = agent.config.chunk, base.policy.action_dim

    @classmethod
    def of(cls, agent: FrozenAgent, base: FrozenBase) -> FrozenVlaPolicy:
        """The policy that an agent has become; later updates of the agent leave it alone. Critics by which the agent
        asks an operator for help are left out, for a policy asks nobody."""
        config = acting_config(agent.config, agent.options.policy)
        made = type(agent)(agent.shapes, [], list(agent.proprio), agent.layout.actions, config, 0, agent.squashed)
        state = agent.acting_state(slow=True)
        made.load_acting_state({name: state[name] for name in made.acting_state()})
        return cls(made, base)

    has_log_prob = False

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """The record has no log-probabilities: what it draws is a number of the agent's, and not the action."""
        check_temperature(temperature, sample)
        if prefix is not None or (sample and temperature != 1):
            raise ConfigError("a policy of frozen_vla continues no chunk and has the temperature 1: leave both out.")
        if sample and generator is None:
            raise ConfigError("chance needs a generator: give one (torch.Generator, on the CPU), or sample=False.")
        rows, draws = drawn_rows(observations)
        seen = {BASE_POLICY: {self.agent.weights: self._frozen.columns(rows)}}
        seed = int(torch.randint(2**31, (), generator=generator)) if sample else 0
        actions = self.agent.chunks(seen, seed, argmax=not sample, draws=draws, rows=rows)
        answer = np.asarray(self._frozen.suite.taught(actions), np.float32)
        unknown = np.full(answer.shape, np.nan, np.float32)
        return answer, {"temperature": np.full(len(answer), temperature, np.float32), "log_prob": unknown}

    def evaluate(self, record: Record) -> Evaluation:
        raise ConfigError(
            "a policy of frozen_vla has no log-probabilities of actions: continue its run (hilt train --run RUN "
            "--resume), or train the base policy on its episodes: docs/frozen-vla.md."
        )

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        raise ConfigError(
            f"a policy of frozen_vla does not imitate: train the one in {BASE_FOLDER}/ on its episodes, with `hilt "
            "train sft`: docs/frozen-vla.md."
        )

    def features(self, observations: Sequence[Observation]) -> Tensor:
        return self.base.features(observations)

    def observed_fields(self) -> ObservedFields | None:
        return self.base.observed_fields()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the folder, with a copy of the frozen policy's; one of the same name is replaced."""
        folder, agent = Path(folder), self.agent
        document = {
            "model_type": FROZEN_VLA,
            "base_weights": agent.weights,
            "actions": agent.layout.actions,
            "squashed": agent.squashed,
            "shapes": {path: list(agent.shapes[path].shape) for path in agent.proprio},
            "agent": dataclasses.asdict(agent.config),
        }
        with replacing(folder) as beside, storage_errors(folder):
            beside.mkdir(parents=True)
            shutil.copytree(hub.local(self._frozen.options.policy), beside / BASE_FOLDER)
            write_tensors(beside, {name: torch.as_tensor(array) for name, array in agent.acting_state().items()})
            (beside / CONFIG).write_text(json.dumps(document, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> FrozenVlaPolicy:
        """From a folder that `save_pretrained` wrote. `options` are those of the frozen policy, and the ``device``."""
        place = Path(folder)
        document, device = read_json(place / CONFIG), str(options.pop("device", "cpu"))
        config = acting_config(build(AgentConfig(), document["agent"]), str(place / BASE_FOLDER), device)
        config.options["policy_options"] = {**config.options.get("policy_options", {}), **options}
        base = FrozenBase(frozen_options(config.options), config.chunk, device)
        document = with_newer_hash(document, base.weights, place / BASE_FOLDER)
        check_same_weights(base.weights, document["base_weights"], str(place / BASE_FOLDER))
        shapes = {path: ArraySpec(np.dtype(np.float32), tuple(shape)) for path, shape in document["shapes"].items()}
        sizes = int(document["actions"]), config, 0, bool(document["squashed"])
        agent = agent_class(config)(shapes, [], list(shapes), *sizes)
        agent.load_acting_state(dict(Tensors(place)))
        return cls(agent, base)


def with_newer_hash(document: dict[str, Any], weights: str, folder: Path) -> dict[str, Any]:
    """The settings of a folder with the hash `weights` of its frozen policy, where an earlier version has written them
    with its own hash of the same policy."""
    former = str(document["base_weights"])
    if former == weights or former != former_weights_hash(folder):
        return document
    shapes = {base_path(weights, path.rpartition("/")[2]): shape for path, shape in document["shapes"].items()}
    return {**document, "base_weights": weights, "shapes": shapes}


def acting_config(config: AgentConfig, policy: str, device: str = "cpu") -> AgentConfig:
    """The settings of an agent that acts with the weights that it is given: it has no moving average of its own."""
    return dataclasses.replace(
        config,
        options={**config.options, "policy": policy},
        device=device,
        rlpd=dataclasses.replace(config.rlpd, actor_average=0.0),
    )


def acting_weights(policy: FrozenVlaPolicy, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The newer parameters of such a policy by name, from the state of its agent as a checkpoint has it."""
    parts = {name: state["networks"][name] for name in ("actor", "critic") if name in policy.networks}
    parts |= {name: state["targets"][name] for name in ("actor",) if name in state["targets"]}
    return {f"{NETWORKS}{part}.{name}": tensor for part, each in parts.items() for name, tensor in each.items()}
