"""The frozen features of a vision-language-action policy, of steps of a log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.core import hub
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import INSTRUCTION
from hilt.core.tree import Array, flatten
from hilt.policies.frozen.frozen_config import FEATURES, base_path
from hilt.policies.io.weights_hash import weights_hash
from hilt.policies.registry import load_policy
from hilt.policies.vla.observation_adapters import same_suite
from hilt.replay.log import Log
from hilt.value.chunk_inputs import views_of
from hilt.value.kept_features import KeptFeatures, StepFeatures
from hilt.value.value_episodes import OBSERVED, RECORDED, ValuedEpisode, ValueEpisodes

AT_ONCE = 32
"""Observations that a policy reads together"""


class FrozenFeatures:
    """The features of steps of episodes. What neither the log nor its folder has is computed, with a policy that is
    loaded then, and kept in the folder: `hilt.value.kept_features`.

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
        self._logged = OBSERVED + base_path(self.weights, FEATURES)
        self._policy: Any = None
        self._kept: dict[Path, KeptFeatures] = {}

    @property
    def policy(self) -> Any:
        if self._policy is None:
            self._policy = load_policy(self._folder).eval()
        return self._policy

    def __call__(self, episodes: ValueEpisodes, rows: Array) -> Tensor:
        """float32 [N, width], in the order of the rows"""
        order, parts = [], []
        for number in np.unique(rows[:, 0]).tolist():
            (places,) = np.nonzero(rows[:, 0] == number)
            steps, back = np.unique(rows[places, 1], return_inverse=True)
            parts.append(self._of_episode(episodes.episodes[number], steps)[back])
            order.append(places)
        found = torch.cat(parts)
        out = torch.empty_like(found)
        out[np.concatenate(order)] = found
        return out

    def _of_episode(self, episode: ValuedEpisode, steps: Array) -> Tensor:
        """Returns those of different steps of an episode: from the log, where it has them as a column; from what is
        kept in its folder; and computed, which is kept there."""
        if self._is_logged(episode):
            return torch.from_numpy(np.array(_column(episode.log, episode.keys[steps], self._logged), np.float32))
        keys, texts = episode.keys[steps], [episode.texts[step] for step in steps.tolist()]
        files, names = self._files_of(episode.log), self._names(episode)
        kept = files.read(episode.trajectory, names)
        places = np.full(len(steps), -1) if kept is None else np.array(kept.places(keys, texts))
        (missing,) = np.nonzero(places < 0)
        if len(missing):
            made = self._computed(episode, steps[missing].tolist())
            new = StepFeatures.of(keys[missing], [texts[place] for place in missing.tolist()], made)
            kept = new if kept is None else kept.joined(new)
            files.write(episode.trajectory, names, kept)
            places[missing] = np.arange(len(kept.keys) - len(missing), len(kept.keys))
        assert kept is not None
        return kept.features[places]

    def _computed(self, episode: ValuedEpisode, steps: list[int]) -> Tensor:
        parts = []
        for first in range(0, len(steps), AT_ONCE):
            parts.append(self.of(self._observations(episode, steps[first : first + AT_ONCE])))
        return torch.cat(parts)

    def _is_logged(self, episode: ValuedEpisode) -> bool:
        """Whether the log of a run beside this policy has its features, for what is to be done now, and under the names
        that observations have here."""
        if self._logged not in episode.log.schema.columns or self._columns:
            return False
        if self._suite and not same_suite(self._suite, episode.task):
            return False
        facts = episode.log.facts
        given = facts.recorded(episode.trajectory), facts.about(episode.trajectory)
        return given[0].get(INSTRUCTION) == given[1].get(INSTRUCTION)

    def _names(self, episode: ValuedEpisode) -> str:
        """How the policy names what it sees in an episode."""
        if RECORDED in episode.log.schema.columns:
            return RECORDED
        adapter = views_of(self._suite, self._columns, episode.task)
        return adapter.name or json.dumps(self._columns, sort_keys=True)

    def _files_of(self, log: Log) -> KeptFeatures:
        if log.path not in self._kept or self._kept[log.path].log is not log:
            self._kept[log.path] = KeptFeatures(log, self.weights)
        return self._kept[log.path]

    def of(self, observations: Sequence[Mapping[str, Any]]) -> Tensor:
        """The features of observations by the policy's names, float32 [N, width]"""
        found: Tensor = self.policy.features(observations).float().cpu()
        return found

    def _observations(self, episode: ValuedEpisode, steps: list[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for step in steps:
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


def _column(log: Log, keys: Array, path: str) -> Array:
    found: Array = flatten(log.read(keys, [path]))[path]
    return found
