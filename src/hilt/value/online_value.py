"""A value model beside a running episode: what it expects for a person to see, an alarm, a dense reward for learning,
and an early end of hopeless episodes.

value = OnlineValue(load_value_model("value"), env.observation_space)
env = ValueWatch(env, value, discount=0.97, reward=1.0, stop_below=0.05)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hilt.algos.value_distribution import shaped
from hilt.core.errors import ConfigError, SchemaError, suggest
from hilt.core.trajectory import STOPPED
from hilt.core.tree import Array, Observation, flatten
from hilt.envs.env_protocol import TASK_REWARD, Info, StepResult, success_of
from hilt.formats.images import as_rgb, image_shape
from hilt.policies.frozen.frozen_config import FEATURES, base_hash, base_path
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space
from hilt.value.value_episodes import OBSERVED, ObservedBatch
from hilt.value.value_model import ValueModel, observed_tensors

JUDGED_EPISODES = 20
"""Episodes, the last ones, whose outcomes are compared with what was expected of them"""


class OnlineValue:
    """Values of observations as an environment gives them, and of columns of observations."""

    def __init__(self, model: ValueModel, space: Any = None):
        """With the environment's observation `space`, one that the model cannot judge is an error now, not at the
        first step."""
        if model.inputs.chunk is not None:
            raise ConfigError(
                f"the value model {model.folder} judges chunks (actions={model.inputs.chunk.actions}), and beside a "
                "running episode one of observations is needed: hilt train value DATA --out NEW, without actions="
            )
        self.model = model
        self._features = "" if model.extractor is None else base_path(model.extractor.weights, FEATURES)
        if space is not None:
            tree = nested(spec_of_space(space, "observation_space"))
            self.check(flatten(tree) if isinstance(tree, Mapping) else {})

    def __call__(self, observation: Observation, text: str = "") -> tuple[float, float]:
        """The value of one observation, and the probability of success."""
        leaves = flatten(nested(observation)) if isinstance(observation, Mapping) else {}
        value, success = self.of_columns({name: np.asarray(leaf)[None] for name, leaf in leaves.items()}, [text])
        return float(value[0]), float(success[0])

    def of_columns(self, leaves: Mapping[str, Array], texts: Sequence[str]) -> tuple[Array, Array]:
        """Values and probabilities of success [N] of observations, by path, each [N, ...]."""
        self.check(leaves, leading=1)
        with torch.no_grad():
            logits = self.model.network(self._seen(leaves, texts))
            return self.model.support.value(logits).numpy(), self.model.support.success(logits).numpy()

    def _seen(self, leaves: Mapping[str, Array], texts: Sequence[str]) -> dict[str, Tensor]:
        """What the network reads: the features that the observations have, or their pictures, words and state."""
        if self._features:
            return {"features": torch.from_numpy(np.array(leaves[self._features], np.float32))}
        inputs, count = self.model.inputs, len(texts)
        images = {name: np.ascontiguousarray(as_rgb(leaves[name])) for name in inputs.cameras}
        parts = [leaves[path.removeprefix(OBSERVED)].reshape(count, -1).astype(np.float32) for path in inputs.state]
        state = np.concatenate(parts, 1) if parts else np.zeros((count, 0), np.float32)
        return observed_tensors(ObservedBatch(images, state, list(texts)), self.model.network.words)

    def check(self, leaves: Mapping[str, Any], leading: int = 0) -> None:
        """Raises where an observation, by path, or with 1 `leading` axis several, cannot be looked at."""
        if self._features:
            return self._check_features(leaves)
        cure = "Train one on logs of this environment: hilt train value RUN --out NEW"
        for name, size in self.model.inputs.cameras.items():
            found = image_shape(tuple(leaves[name].shape[leading:])) if name in leaves else None
            if found != size:
                raise SchemaError(
                    f"the value model {self.model.folder} looks at {name} of {size[0]} x {size[1]} pixels, and here it "
                    f"is {found or 'missing'}{suggest(name, leaves)} {cure}"
                )
        for path, count in self.model.inputs.state.items():
            name = path.removeprefix(OBSERVED)
            numbers = int(np.prod(leaves[name].shape[leading:])) if name in leaves else 0
            if numbers != count:
                raise SchemaError(
                    f"the value model {self.model.folder} looks at {name} of {count} numbers, and here it has "
                    f"{numbers or 'none'}{suggest(name, leaves)} {cure}"
                )

    def _check_features(self, leaves: Mapping[str, Any]) -> None:
        if self._features in leaves:
            return
        wanted = self.model.extractor.weights
        others = f", but of one with {there}" if (there := base_hash(leaves)) else ""
        raise ConfigError(
            f"the value model {self.model.folder} looks at features of the policy {self.model.config.policy}, whose "
            f"weights have the hash {wanted}, and observations have no features of it here{others}. Give it to a run "
            "beside this policy (hilt train frozen_vla policy=FOLDER), or a model that has an encoder of its own: "
            "hilt train value DATA --out NEW, without policy="
        )


class ValueWatch(gymnasium.Wrapper):
    """Asks a value model at every step.

    With `reward`, this times ``discount * V(s') - V(s)`` is added to the reward, with V(s') = 0 where the episode has
    terminated: a dense reward that changes no optimal policy. `discount` is that of the learner. The info has the
    reward without it as ``hilt/task_reward``.

    With `stop_below`, an episode is truncated when the probability of success has been below it for `patience` steps in
    a row in which no person acted; the info of its last step has it as ``stopped_by_value``.

    With `alarm_below`, `value_alarm` gives the probability of success, once, when it has been below that for at least
    `alarm_patience` such steps in a row.

    A person who may take over sees the probability, and `value_figures` compares what was expected of the last episodes
    with what came."""

    episode_state: ClassVar[tuple[str, ...]] = (
        *("potential", "hopeless", "doubtful", "asked", "expected", "success_probability"),
    )

    def __init__(
        self,
        env: gymnasium.Env,
        value: OnlineValue,
        discount: float,
        reward: float = 0.0,
        stop_below: float = 0.0,
        patience: int = 10,
        alarm_below: float = 0.0,
        alarm_patience: int = 5,
    ):
        super().__init__(env)
        self._value, self._discount, self._weight = value, discount, reward
        self._below, self._patience = stop_below, patience
        self._alarm_below, self._alarm_patience, self._alarms = alarm_below, alarm_patience, 0
        self.potential, self.hopeless, self.doubtful = 0.0, 0, 0
        self.asked = False
        """Whether a person was asked for help since the probability has been below `alarm_below`"""
        self.expected: tuple[float, int] = (0.0, 0)
        """Of the episode: the sum of the probabilities of success, and the number of steps"""
        self.success_probability: float | None = None
        """The probability of success after the last step; None where it was not judged yet"""
        self._ended: deque[tuple[float, bool | None, bool]] = deque(maxlen=JUDGED_EPISODES)
        if env.has_wrapper_attr("show_expectation"):
            env.get_wrapper_attr("show_expectation")(lambda: self.success_probability, alarm_below)

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        self.success_probability = None  # what is shown of the new episode is nothing of the one before
        observation, info = self.env.reset(**options)
        self.potential, self.success_probability = self._judged(observation)
        self.hopeless, self.doubtful, self.asked, self.expected = 0, 0, False, (0.0, 0)
        return observation, info

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        before, (self.potential, success) = self.potential, self._judged(observation)
        dense = self._discount * self.potential * (not terminated) - before
        alone, self.success_probability = "intervene_action" not in info, success
        self.hopeless = self.hopeless + 1 if alone and success < self._below else 0
        self.doubtful = self.doubtful + 1 if alone and success < self._alarm_below else 0
        self.asked = self.asked and self.doubtful > 0
        if self.hopeless >= self._patience and not terminated:
            truncated, info = True, {**info, STOPPED: success}
        total, steps = self.expected
        self.expected = total + success, steps + 1
        if terminated or truncated:
            self._ended.append((self.expected[0] / self.expected[1], success_of(info), STOPPED in info))
        info = {**info, TASK_REWARD: float(reward)} if self._weight else info
        return observation, float(reward) + self._weight * dense, bool(terminated), bool(truncated), info

    def value_alarm(self) -> float | None:
        """The probability of success, if a person is to be asked for help now: it has been below `alarm_below` for long
        enough, and they were not asked since it was above, or a person has acted."""
        if not self._alarm_below or self.asked or self.doubtful < self._alarm_patience:
            return None
        self._alarms, self.asked = self._alarms + 1, True
        return self.success_probability

    def value_figures(self) -> dict[str, float]:
        """Returns ``value_success``, the probability of success after the last step; with an alarm ``value_alarms``,
        how often a person was asked; and of the last episodes ``value_hopeless``, the share that was ended as hopeless;
        of the others ``value_expected``, the mean probability of success over their steps, and ``value_realized``, the
        share that succeeded. There are none of episodes while there are too few."""
        figures = {} if self.success_probability is None else {"value_success": self.success_probability}
        figures |= {"value_alarms": float(self._alarms)} if self._alarm_below else {}
        if len(self._ended) < JUDGED_EPISODES:
            return figures
        figures["value_hopeless"] = sum(stopped for *_, stopped in self._ended) / len(self._ended)
        known = [(one, came) for one, came, stopped in self._ended if came is not None and not stopped]
        if len(known) >= JUDGED_EPISODES // 2:
            figures["value_expected"] = sum(one for one, _ in known) / len(known)
            figures["value_realized"] = sum(came for _, came in known) / len(known)
        return figures

    def _judged(self, observation: Observation) -> tuple[float, float]:
        known = self.env.has_wrapper_attr("instruction")
        return self._value(observation, str(self.env.get_wrapper_attr("instruction") or "") if known else "")


def shaping_rewards(
    columns: Mapping[str, Array], value: OnlineValue, texts: Sequence[str], discount: float, weight: float = 1.0
) -> Array:
    """What `ValueWatch` would have added to the rewards of an episode that was recorded without a value model, [T].
    `columns`: those of a log, by path."""
    seen = []
    for prefix in (OBSERVED, f"next_{OBSERVED}"):
        leaves = {path.removeprefix(prefix): column for path, column in columns.items() if path.startswith(prefix)}
        seen.append(torch.from_numpy(value.of_columns(leaves, texts)[0]).double() * weight)
    ended = torch.from_numpy(np.asarray(columns["terminated"], bool))
    found: Array = shaped(torch.zeros_like(seen[0]), seen[0], seen[1], ended, discount).numpy().astype(np.float32)
    return found
