"""A policy that is asked for actions of high advantage: words behind the instruction say which kind is wanted, or an
embedding that is added to the token of the state.

    policy = ConditionedPolicy(load_policy("runs/sft/policy"), guidance=1.5)
    policy.act(observations)                                    # asks for good actions
    policy.supervised_loss([{**row, "advantage": POSITIVE}], actions, mask, generator)

It is what `hilt train sft DATA recap.threshold=0.6` makes of a policy. The words are read by the policy itself, so it
can be any that reads instructions. The embedding is for policies that make little of words, and have such a token:
`hilt.policies.condition_embedding`.

    FOLDER/config.json              its guidance, and the kind of its condition
    FOLDER/policy/                  the policy, as it is published
    FOLDER/condition.safetensors    the embedding, if it has one
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.algos.config import CONDITIONS
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.files import new_folder
from hilt.policies.base import (
    CONDITION,
    KEPT_ENDING,
    Evaluation,
    Observation,
    ObservedFields,
    Policy,
    Prefix,
    Record,
    check_prefix,
)
from hilt.policies.condition_embedding import BAD, GOOD, NONE, add_embedding, embedding_of, remove_embedding
from hilt.policies.guidance import act_guided, check_guidance
from hilt.policies.io.tensor_files import Tensors, load_into, read_json, write_tensors
from hilt.policies.registry import load_policy

MODEL_TYPE = "hilt_conditioned"
ADVANTAGE = "advantage"
"""Of an observation: one of the words below, or no words at all; by default good actions are asked for"""
POSITIVE, NEGATIVE, UNKNOWN = "Advantage: positive", "Advantage: negative", ""
OPPOSITES = {POSITIVE: NEGATIVE, NEGATIVE: POSITIVE}
WRONG_LOSS = "loss_of_wrong_condition"
"""The figure of validation that tells whether a condition makes a difference"""
INSIDE = "policy"
"""The folder of the policy that reads the words"""
EMBEDDING_FILE = "condition.safetensors"
NUMBERS = {POSITIVE: GOOD, NEGATIVE: BAD, UNKNOWN: NONE}
"""The conditions as an embedding has them"""


class ConditionedPolicy(Policy):
    """The policy of another one that is asked for good actions."""

    def __init__(self, policy: Policy, guidance: float = 1.0, dropout: float = 0.0, kind: str = "words"):
        """`guidance`: how much more the condition counts than it does by itself, see `hilt.algos.offline.recap`.
        `dropout`: the share of what it is trained on whose condition is left out. `kind`: what the condition is,
        "words" or an "embedding"; a policy that has one keeps it."""
        super().__init__()
        if kind not in CONDITIONS:
            raise UnknownNameError("kind of condition", kind, CONDITIONS)
        if not 0 <= dropout < 1 or not 0 < guidance < 100:
            raise ConfigError(
                f"guidance={guidance}, dropout={dropout}: expected one above 0, and one from 0 to below 1."
            )
        check_guidance(policy, guidance)
        (add_embedding if kind == "embedding" else remove_embedding)(policy)
        self.policy, self.guidance, self.dropout, self.kind = policy, guidance, dropout, kind
        self.chunk, self.action_dim, self.max_delay = policy.chunk, policy.action_dim, policy.max_delay
        self.token_range = policy.token_range

    @property
    def horizon(self) -> int:
        """Actions that are imitated from each step on."""
        return int(getattr(self.policy, "horizon", self.chunk))

    @property
    def takes_prefix(self) -> bool:
        """With guidance, it continues nothing."""
        return self.policy.takes_prefix and self.guidance == 1

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def observed_fields(self) -> ObservedFields | None:
        return self.policy.observed_fields()

    def warm_up(self, sample: bool, notify: Callable[[str], None]) -> None:
        self.policy.warm_up(sample, notify)

    def fit(self, states: np.ndarray, actions: np.ndarray) -> None:
        self.policy.fit(states, actions)

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        given = check_prefix(self, prefix, len(observations), sample)
        rows = self._asked(observations)
        options: dict[str, Any] = {"sample": sample, "temperature": temperature, "generator": generator}
        if self.guidance == 1:
            options |= {} if given is None else {"prefix": given}  # a policy that continues none may lack the argument
            return self.policy.act(rows, **options)
        without = self._asked([{**row, ADVANTAGE: UNKNOWN} for row in observations])
        return act_guided(self.policy, rows, without, self.guidance, **options)

    @property
    def start_shape(self) -> tuple[int, int] | None:
        """With guidance there are two flows, and no noise leads to an action by one of them."""
        return self.policy.start_shape if self.guidance == 1 else None

    def act_from(self, observations: Sequence[Observation], start: np.ndarray) -> np.ndarray:
        if self.guidance != 1:
            raise ConfigError(
                f"act_from(): guidance={self.guidance:g} mixes two flows, of which each would begin with noise of its "
                "own. Open the policy with guidance=1."
            )
        return self.policy.act_from(self._asked(observations), start)

    @property
    def keeps_context(self) -> bool:  # that of the policy inside
        return self.policy.keeps_context

    @keeps_context.setter
    def keeps_context(self, value: bool) -> None:
        self.policy.keeps_context = value

    def forget_context(self) -> None:
        self.policy.forget_context()

    def evaluate(self, record: Record) -> Evaluation:
        if self.guidance != 1:
            raise ConfigError(
                f"evaluate(): guidance={self.guidance:g} is for acting; what is guided is not the policy that learns. "
                "Open the policy with guidance=1."
            )
        return self.policy.evaluate(record)

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of imitation. In training the condition of some rows is left out. Otherwise the figures have the
        loss under the opposite conditions, too: where it is no higher, the policy tells nothing by the condition."""
        rows = list(observations)
        if not self.training and any(row.get(ADVANTAGE) for row in rows):
            return self._validated(rows, actions, mask, generator)
        if self.training and self.dropout:
            if generator is None:
                raise ConfigError("to leave out conditions, supervised_loss() needs a generator: give it one.")
            left_out = torch.rand(len(rows), generator=generator) < self.dropout
            rows = [{**row, ADVANTAGE: UNKNOWN} if out else row for row, out in zip(rows, left_out, strict=True)]
        return self.policy.supervised_loss(self._asked(rows), actions, mask, generator)

    def _asked(self, observations: Sequence[Observation]) -> list[Mapping[str, Any]]:
        """The observations with their conditions, as the policy inside takes them."""
        return _worded(observations) if self.kind == "words" else _numbered(observations)

    def _validated(
        self, rows: Sequence[Observation], actions: np.ndarray, mask: np.ndarray, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        before = None if generator is None else generator.get_state()
        loss, figures = self.policy.supervised_loss(self._asked(rows), actions, mask, generator)
        if generator is not None and before is not None:  # the same noise for both
            generator.set_state(before)
        opposite = [{**row, ADVANTAGE: OPPOSITES.get(str(row.get(ADVANTAGE, "")), UNKNOWN)} for row in rows]
        with torch.no_grad():
            wrong, _ = self.policy.supervised_loss(self._asked(opposite), actions, mask, generator)
        return loss, {**figures, WRONG_LOSS: float(wrong)}

    def features(self, observations: Sequence[Observation]) -> torch.Tensor:
        return self.policy.features(self._asked(observations))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        with new_folder(folder) as beside:
            self.policy.save_pretrained(beside / INSIDE)
            document = {"model_type": MODEL_TYPE, "guidance": self.guidance, "condition": self.kind}
            if (embedding := embedding_of(self.policy)) is not None:
                write_tensors(beside, {"weight": embedding.weight.detach().float()}, name=EMBEDDING_FILE)
            (beside / "config.json").write_text(json.dumps(document, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], guidance: float = 0.0, **options: Any
    ) -> ConditionedPolicy:
        """`guidance`: instead of that of the folder; `options`: of the policy that reads the words."""
        place = Path(folder)
        document = read_json(place / "config.json")
        kind = str(document.get("condition", "words"))
        made = cls(load_policy(place / INSIDE, **options), guidance or float(document["guidance"]), kind=kind)
        if (embedding := embedding_of(made.policy)) is not None:
            load_into(embedding, Tensors(place / EMBEDDING_FILE), device=made.device)
        return made


def _worded(observations: Sequence[Observation]) -> list[Mapping[str, Any]]:
    """The observations with the words of their condition behind the instruction, where none of them is cut off."""
    rows: list[Mapping[str, Any]] = []
    for row in observations:
        words = row.get(ADVANTAGE, POSITIVE)
        known = {name: value for name, value in row.items() if name != ADVANTAGE}
        ending = f". {words}" if words else ""
        text = f"{row.get('instruction', '')}{ending}" if words else row["instruction"]
        rows.append({**known, "instruction": text, KEPT_ENDING: ending})
    return rows


def _numbered(observations: Sequence[Observation]) -> list[Mapping[str, Any]]:
    """The observations with the numbers of their conditions."""
    return [
        {
            **{name: value for name, value in row.items() if name != ADVANTAGE},
            CONDITION: NUMBERS[str(row.get(ADVANTAGE, POSITIVE))],
        }
        for row in observations
    ]


@dataclass(frozen=True)
class Condition:
    """What a policy is conditioned with."""

    guidance: float = 1.0
    dropout: float = 0.0
    kind: str = "words"

    def of(self, policy: Policy) -> ConditionedPolicy:
        """The policy with this condition. One that has a condition already keeps what it has learned of it, and must be
        of the same kind."""
        if not isinstance(policy, ConditionedPolicy):
            return ConditionedPolicy(policy, self.guidance, self.dropout, self.kind)
        if policy.kind != self.kind:
            raise ConfigError(
                f"condition={self.kind}: this policy has learned its condition as {policy.kind}. Give "
                f"condition={policy.kind}, or a policy without a condition."
            )
        return ConditionedPolicy(policy.policy, self.guidance, self.dropout, self.kind)


def guided_more(policy: Policy, guidance: float) -> ConditionedPolicy:
    """The policy with another guidance than its own."""
    if not isinstance(policy, ConditionedPolicy):
        raise ConfigError(
            f"guidance={guidance:g}: this {type(policy).__name__} was trained without a condition. Leave it out, or "
            "train a policy with recap.threshold=0.6 (hilt train sft)."
        )
    made = ConditionedPolicy(policy.policy, guidance, policy.dropout, policy.kind)
    made.train(policy.training)
    return made
