"""Best-of-N: a policy draws several chunks, and a value of chunks chooses the one that is executed.

    verifier = ChunkVerifier(load_value_model("verifier"))     # hilt train value DATA actions=5 --out verifier
    policy = BestOf(load_policy("runs/sft/policy"), verifier, count=8)
    actions, record = policy.act(observations, sample=False, generator=generator)

It is a policy itself, so whatever runs one runs it: an evaluation, a server, the executor of chunks. It learns nothing,
and its chunks are not distributed as the policy's: it is for acting, not for post-training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, UnknownNameError
from hilt.core.tree import Array, flatten
from hilt.core.validate import check, setting
from hilt.formats.images import image_shape
from hilt.policies.base import Evaluation, Observation, ObservedFields, Policy, Prefix, Record, join, select
from hilt.policies.frozen.frozen_config import FEATURES, base_path
from hilt.policies.vla.observation_adapters import same_suite
from hilt.value.chunk_inputs import STATE, rows_of
from hilt.value.value_episodes import ObservedBatch
from hilt.value.value_model import ValueModel, load_value_model, observed_tensors

SAME_PLANS = 10
"""First plans whose draws are all the same by which a policy counts as one that cannot sample"""
CURE = "Train one on logs of what the policy sees: hilt train value DATA actions=N"


@dataclass(frozen=True)
class BestOfSettings:
    """How many chunks are drawn, and what chooses among them."""

    count: int = setting(8, minimum=2, maximum=1024)
    """Chunks that are drawn for each plan"""
    verifier: str = ""
    """The folder of a value of chunks, of `hilt train value DATA actions=N`"""
    temperature: float = setting(1.0, above=0)
    """Of these draws, for policies that have one"""

    def check(self) -> None:
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.verifier:
            yield (
                f"best of {self.count}: what chooses? Give the folder of a value of chunks as verifier; make one with: "
                "hilt train value DATA actions=5 --out verifier"
            )

    def wrap(self, policy: Policy, task: str = "") -> BestOf:
        """The policy that chooses among the draws of this one. `task`: of which the policy sees the environment's own
        observations, as an `AgentPolicy` does; empty: it sees them by a policy's names."""
        self.check()
        return BestOf(policy, ChunkVerifier(load_value_model(self.verifier), task), self.count, self.temperature)


class ChunkVerifier:
    """A value of chunks, asked about what a policy is about to do."""

    def __init__(self, model: ValueModel, task: str = ""):
        """`task`: the one whose environment gives the observations and takes the actions that it is asked about; empty:
        they have the names and the units of a policy."""
        if model.inputs.chunk is None:
            raise ConfigError(
                f"{model.folder} is a value of observations: all chunks that begin at one observation have the same, "
                "so it cannot choose among them. Train one that looks at actions, too: hilt train value DATA actions=5 "
                "--out NEW"
            )
        self.model, self.chunk = model, model.inputs.chunk
        try:
            self._adapter = self.chunk.adapter(task) if task else None
        except UnknownNameError as error:
            raise ConfigError(
                f"the verifier {model.folder} names what it sees as the suite of a task does: {error} Train one on "
                "logs of this task: hilt train value DATA actions=N 'columns={full_image: PATH, state: PATH}'"
            ) from None
        self._has_features = bool(task) and not self.chunk.columns and same_suite(self.chunk.suite or task, task)

    def check(self, policy: Policy) -> None:
        """Raises where it cannot judge the chunks of a policy."""
        if (given := self._taught(np.zeros((1, policy.action_dim), np.float32)).shape[-1]) != self.chunk.action_dim:
            raise ConfigError(
                f"the verifier {self.model.folder} judges actions of {self.chunk.action_dim} numbers, and the policy "
                f"gives {given}: it is of another robot. Train one on logs of this one."
            )
        if policy.chunk < self.chunk.actions:
            fewer = ", or fewer" if policy.chunk > 1 else ""
            raise ConfigError(
                f"the verifier {self.model.folder} looks at {self.chunk.actions} actions, and the policy answers with "
                f"{policy.chunk}. Train one with actions={policy.chunk}{fewer}."
            )

    def scores(self, observations: Sequence[Observation], chunks: Array) -> Array:
        """Values of chunks [B, N, chunk, action_dim] that begin at these observations: float32 [B, N]."""
        rows, count = chunks.shape[:2]
        seen = self._seen(observations)
        repeated = {name: tensor.repeat_interleave(count, 0) for name, tensor in seen.items()}
        actions = np.ascontiguousarray(self._taught(chunks[:, :, : self.chunk.actions]), np.float32)
        repeated["actions"] = torch.from_numpy(actions).flatten(0, 1)
        with torch.no_grad():
            values = self.model.support.value(self.model.network(repeated))
        scores: Array = values.view(rows, count).numpy()
        return scores

    def _taught(self, actions: Array) -> Array:
        """Actions in the units of a policy."""
        return actions if self._adapter is None else self._adapter.taught(actions)

    def _seen(self, given: Sequence[Observation]) -> dict[str, torch.Tensor]:
        if self.model.extractor is not None:
            logged = self._logged_features(given)
            return {"features": self.model.extractor.of(self._named(given)) if logged is None else logged}
        observations = self._named(given)
        inputs = self.model.inputs
        for place, row in enumerate(observations):
            self._check_row(place, row)
        images, state = rows_of(observations, inputs.cameras, sum(inputs.state.values()))
        texts = [str(row.get("instruction", "")) for row in observations]
        return observed_tensors(ObservedBatch(images, state, texts), self.model.network.words)

    def _named(self, given: Sequence[Observation]) -> Sequence[Observation]:
        """Observations by a policy's names."""
        if self._adapter is None:
            return given
        try:
            return [self._adapter.observe(row, str(row.get("instruction", ""))) for row in given]
        except MissingFieldError as error:
            raise MissingFieldError(f"the verifier {self.model.folder} looks at more: {error} {CURE}") from None

    def _logged_features(self, given: Sequence[Observation]) -> torch.Tensor | None:
        """The features that observations of a run beside the verifier's own policy have already."""
        if not self._has_features:
            return None
        path = base_path(self.model.extractor.weights, FEATURES)
        found = [leaves[path] for leaves in map(flatten, given) if path in leaves]
        return torch.from_numpy(np.stack(found).astype(np.float32)) if len(found) == len(given) else None

    def _check_row(self, place: int, row: Mapping[str, Any]) -> None:
        inputs = self.model.inputs
        for name in (*inputs.cameras, *inputs.state):
            if row.get(name) is None:
                raise MissingFieldError(
                    f"observation {place} has no {name!r}, which the verifier {self.model.folder} looks at; it has "
                    f"{sorted(row)}. Send it, too; or train one with image_keys=[...]."
                )
        for name, size in inputs.cameras.items():
            if (found := image_shape(np.shape(row[name])) or np.shape(row[name])[:2]) != size:
                raise SchemaError(
                    f"{name} of observation {place} has {found[0]} x {found[1]} pixels, and the verifier "
                    f"{self.model.folder} looks at {size[0]} x {size[1]}. {CURE}"
                )
        if inputs.state and (count := int(np.size(row[STATE]))) != inputs.state[STATE]:
            raise SchemaError(
                f"the state of observation {place} has {count} numbers, and the verifier {self.model.folder} looks at "
                f"{inputs.state[STATE]}. {CURE}"
            )


class BestOf(Policy):
    """Draws `count` chunks for each observation and answers with the one that the verifier values most.

    Without `sample` one of them is the likeliest chunk, and the others are drawn at `temperature`; with `sample` all
    are drawn, at the temperature that is asked for."""

    def __init__(self, policy: Policy, verifier: ChunkVerifier, count: int = 8, temperature: float = 1.0):
        super().__init__()
        verifier.check(policy)
        self.policy, self.verifier, self.count, self.temperature = policy, verifier, count, temperature
        self.chunk, self.action_dim, self.max_delay = policy.chunk, policy.action_dim, policy.max_delay
        self.token_range = policy.token_range
        self._draws = torch.Generator().manual_seed(0)
        self._varies, self._same = False, 0  # whether draws have differed, and the number of plans before
        self._plans, self._likeliest, self._draw_s, self._judge_s, self._gain = 0, 0, 0.0, 0.0, 0.0

    @property
    def takes_prefix(self) -> bool:
        """Only a policy that was trained with given actions can sample and continue them."""
        return self.policy.takes_prefix and self.max_delay > 0

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def observed_fields(self) -> ObservedFields | None:
        """What the policy looks at, and what the verifier does besides."""
        fields, inputs = self.policy.observed_fields(), self.verifier.model.inputs
        if fields is None:
            return None
        cameras = (*fields.cameras, *(name for name in inputs.cameras if name not in fields.cameras))
        return ObservedFields(cameras, fields.state_dim or inputs.state.get(STATE, 0), fields.all_cameras)

    def warm_up(self, sample: bool, notify: Callable[[str], None]) -> None:
        self.policy.warm_up(sample, notify)

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """The best of the chunks, and the record of its draw. Without a `generator`, draws come from one of its own:
        without `sample`, others see no chance in it."""
        began, generator = time.perf_counter(), generator or self._draws
        draws = self.count if sample else self.count - 1
        heat = temperature if sample else self.temperature
        made = self._drawn(observations, draws, True, heat, generator, prefix)
        if not sample:
            likeliest = self._drawn(observations, 1, False, heat, generator, prefix)
            made = _together(likeliest, made)
        chunks, record = made
        self._check_draws(chunks, draws)
        drawn = time.perf_counter()
        scores = self.verifier.scores(observations, chunks)
        if not np.isfinite(scores).all():
            raise ConfigError(f"the verifier {self.verifier.model.folder} gave values that are not finite.")
        best = scores.argmax(1)
        self._count(scores, best, sample, drawn - began, time.perf_counter() - drawn)
        rows = np.arange(len(chunks)) * self.count + best
        return chunks[np.arange(len(chunks)), best], select(record, rows) if record else {}

    def acting_figures(self) -> dict[str, float]:
        """What choosing has cost and changed so far, for each plan: milliseconds to draw and to judge, how much more
        the chosen chunk is worth than a drawn one on average, and without sampling how often it was the likeliest."""
        plans = max(1, self._plans)
        return {
            "best_of": float(self.count),
            "plans": float(self._plans),
            "draw_ms": 1000 * self._draw_s / plans,
            "judge_ms": 1000 * self._judge_s / plans,
            "gain": self._gain / plans,
            "likeliest": self._likeliest / plans,
        }

    def evaluate(self, record: Record) -> Evaluation:
        raise self._only_acts("evaluate()")

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        raise self._only_acts("supervised_loss()")

    def features(self, observations: Sequence[Observation]) -> torch.Tensor:
        return self.policy.features(observations)

    def _only_acts(self, call: str) -> ConfigError:
        return ConfigError(
            f"{call}: the best of {self.count} chunks is for acting; a policy that chooses has no log-probabilities. "
            "Train the policy itself."
        )

    def _drawn(
        self,
        observations: Sequence[Observation],
        count: int,
        sample: bool,
        temperature: float,
        generator: torch.Generator | None,
        prefix: Prefix | None,
    ) -> tuple[Array, Record]:
        """Chunks [B, count, chunk, action_dim], and their record of B * count rows."""
        options: dict[str, Any] = {}  # a policy that continues no prefix may lack the argument
        if prefix is not None:
            options["prefix"] = Prefix(np.repeat(prefix.actions, count, 0), np.repeat(prefix.frozen, count, 0))
        repeated = [row for row in observations for _ in range(count)]
        try:
            actions, record = self.policy.act(repeated, sample, temperature, generator, **options)
        except ConfigError as error:
            if not sample:
                raise
            raise ConfigError(f"the best of {self.count} chunks needs a policy that can sample: {error}") from error
        return np.asarray(actions).reshape(len(observations), count, self.chunk, self.action_dim), record

    def _check_draws(self, chunks: Array, draws: int) -> None:
        """Raises where a policy answers the same however often it is asked; it may be sure of a few chunks."""
        if draws < 2 or self._varies:
            return
        sampled = chunks[:, -draws:]
        self._varies = bool((sampled != sampled[:, :1]).any())
        self._same += len(chunks)
        if not self._varies and self._same >= SAME_PLANS:
            raise ConfigError(
                f"{draws} draws of this {type(self.policy).__name__} are all the same: it cannot sample, and there is "
                "nothing to choose from. Take a policy with a distribution (tokens, a Gaussian, a flow)."
            )

    def _count(self, scores: Array, best: Array, sample: bool, draw_s: float, judge_s: float) -> None:
        self._plans += len(best)
        self._draw_s, self._judge_s = self._draw_s + draw_s, self._judge_s + judge_s
        self._likeliest += 0 if sample else int((best == 0).sum())
        self._gain += float((scores.max(1) - scores.mean(1)).sum())


def _together(first: tuple[Array, Record], more: tuple[Array, Record]) -> tuple[Array, Record]:
    """The chunks of both for each observation, the first ones in front, and their records in the same order."""
    rows, counts = len(first[0]), (first[0].shape[1], more[0].shape[1])
    chunks = np.concatenate([first[0], more[0]], 1)
    if not first[1]:
        return chunks, {}
    places = np.concatenate(
        [
            np.arange(rows * counts[0]).reshape(rows, -1),
            rows * counts[0] + np.arange(rows * counts[1]).reshape(rows, -1),
        ],
        1,
    )
    return chunks, select(join([first[1], more[1]]), places.flatten())
