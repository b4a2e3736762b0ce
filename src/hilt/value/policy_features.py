"""The frozen features of a vision-language-action policy, of steps of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hilt.core import hub
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.tree import Array
from hilt.policies.io.weights_hash import weights_hash
from hilt.policies.registry import load_policy
from hilt.value.chunk_inputs import views_of
from hilt.value.value_episodes import RECORDED, ValueEpisodes

AT_ONCE = 32
"""Observations that a policy reads together"""


class FrozenFeatures:
    """Computes the features of steps of episodes with a policy that is loaded at the first use.

    `weights`: the hash that its weights must have; features of others would mean something else."""

    def __init__(self, policy: str, suite_name: str = "", weights: str = "", columns: Mapping[str, str] | None = None):
        """`suite_name` or `columns`: how the policy names observations; by default as the task."""
        self._folder, self._suite, self._columns = hub.local(policy), suite_name, dict(columns or {})
        self.weights = weights_hash(self._folder)
        if weights and weights != self.weights:
            raise ConfigError(
                f"policy={policy}: its weights have the hash {self.weights}, and the value model was trained on "
                f"features of {weights}. Give that policy its place back, or train the value model again."
            )
        self._policy: Any = None

    @property
    def policy(self) -> Any:
        if self._policy is None:
            self._policy = load_policy(self._folder).eval()
        return self._policy

    def __call__(self, episodes: ValueEpisodes, rows: Array) -> Tensor:
        """float32 [N, width]"""
        parts = []
        for first in range(0, len(rows), AT_ONCE):
            parts.append(self.of(self._observations(episodes, rows[first : first + AT_ONCE])))
        return torch.cat(parts)

    def of(self, observations: Sequence[Mapping[str, Any]]) -> Tensor:
        """The features of observations by the policy's names, float32 [N, width]"""
        found: Tensor = self.policy.features(observations).float().cpu()
        return found

    def _observations(self, episodes: ValueEpisodes, rows: Array) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, step in rows.tolist():
            episode = episodes.episodes[number]
            key, text = episode.keys[step : step + 1], episode.texts[step]
            if RECORDED in episode.log.schema.columns:
                views = self._recorded(episode.log.read(key, ["record"])["record"])
            else:
                adapter = views_of(self._suite, self._columns, episode.task)
                read = adapter.views(episode.log.read(key, ["observations"])["observations"])
                views = {name: column[0] for name, column in read.items()}
            found.append({**views, "instruction": text})
        return found

    def _recorded(self, record: dict[str, Array]) -> dict[str, Any]:
        """What a policy of the same kind has seen: its pictures in the order of its cameras."""
        fields = self.policy.observed_fields()
        pictures = record["images"][0]
        if fields is None or len(fields.cameras) != len(pictures):
            raise SchemaError(
                f"the log has records of {len(pictures)} pictures, and the policy {self._folder} looks at others. Give "
                "the policy that made them, or a log with observations."
            )
        views = dict(zip(fields.cameras, pictures, strict=True))
        return {**views, **({"state": record["state"][0]} if "state" in record else {})}
