"""Rewards that the environment does not give by itself: from a classifier that looks at
the observation, or from a person who is asked."""

from __future__ import annotations

import select
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, DeadlineError
from hilt.core.names import ExtensionPoint
from hilt.core.tree import Observation
from hilt.envs.env_protocol import TASK_SUCCESS, Info, StepResult, success_of
from hilt.envs.rate import Rate

Classifier = Callable[[Any], npt.ArrayLike | tuple[float, bool]]
"""From an observation to one number, of which anything but 0 is success; or to a
pair of the reward and whether it is a success"""
REWARDS = ExtensionPoint("reward", "hilt.rewards", {})
"""Rewards by name, beside the folders of reward classifiers: functions of this
kind, or classes that are made without arguments"""


def named_reward(name: str) -> Classifier:
    """The reward of this name, or of ``module:function``. Code that a file names
    must be annotated to return a number."""
    found = REWARDS.load(name, float, tuple, RewardFunction)
    return _callable(found() if isinstance(found, type) else found)


class RewardFunction(ABC):
    """A reward that keeps something between its calls, or that takes long to make:
    a class that is named like a function."""

    @abstractmethod
    def __call__(self, observation: Any) -> float | tuple[float, bool]: ...


def reward_and_success(given: object) -> tuple[float, bool]:
    """The reward and the success that a `Classifier` gave."""
    if isinstance(given, tuple):
        reward, succeeded = given
        return _number(reward), bool(succeeded)
    return (reward := _number(given)), bool(reward)


class _RewardWrapper(gymnasium.Wrapper):
    """Another reward and another ``succeed``; success ends the episode, and a time limit stays a
    time limit. The success reported by the task itself is kept in ``task_success``: None if it
    reports none, as an arm without a target pose."""

    classifies = True
    """Whether it may be wrong: a person's word is the truth"""
    episode_state: ClassVar[tuple[str, ...]] = ()

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        obs, info = self.env.reset(**options)
        return obs, {**info, "succeed": False, **self._truth(info)}

    def step(self, action: npt.ArrayLike) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # a person has marked success or failure with ``TakeOver``'s device, which takes precedence
        if "marked" in info:
            return obs, float(reward), bool(terminated), bool(truncated), info
        reward, succeed = self.judged(obs, float(reward), bool(terminated or truncated))
        return (
            obs,
            reward,
            bool(terminated) or succeed,
            bool(truncated),
            {**info, "succeed": succeed, **self._truth(info)},
        )

    def _truth(self, info: dict[str, Any]) -> dict[str, Any]:
        return {TASK_SUCCESS: success_of(info)} if self.classifies else {}

    def judged(self, obs: Observation, reward: float, ended: bool) -> tuple[float, bool]:
        """(reward, whether the task is done) of a step; `ended`: the episode ends with it in any case."""
        raise NotImplementedError


class MultiCameraBinaryRewardClassifierWrapper(_RewardWrapper):
    """The reward is the output of the classifier for the observation; anything but 0 is success.

    With `target_hz` a step lasts at least its period, by deadlines that do not drift.
    """

    def __init__(self, env: gymnasium.Env, reward_classifier_func: Classifier, target_hz: float | None = None):
        super().__init__(env)
        self._classifier = _callable(reward_classifier_func)
        self._rate = None if target_hz is None else Rate(target_hz)

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        result = super().reset(**options)
        if self._rate:
            self._rate.restart()
        return result

    def judged(self, obs: Observation, reward: float, ended: bool) -> tuple[float, bool]:
        judged = reward_and_success(self._classifier(obs))
        if self._rate:
            self._rate.wait()
        return judged


class MultiStageBinaryRewardClassifierWrapper(_RewardWrapper):
    """One point for each stage, the first time its classifier's logit has a sigmoid of at
    least `threshold`; success when all have."""

    episode_state = ("received",)

    def __init__(self, env: gymnasium.Env, reward_classifier_func: Sequence[Classifier], threshold: float = 0.75):
        super().__init__(env)
        self._stages = [_callable(stage) for stage in reward_classifier_func]
        if not self._stages or not 0 < threshold < 1:
            raise ConfigError(
                f"{len(self._stages)} stages, threshold={threshold}: give one stage or more, and "
                "a threshold within (0, 1)."
            )
        self._logit = float(np.log(threshold / (1 - threshold)))
        self.received = [False] * len(self._stages)

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        self.received = [False] * len(self._stages)
        return super().reset(**options)

    def judged(self, obs: Observation, reward: float, ended: bool) -> tuple[float, bool]:
        before = sum(self.received)
        self.received = [
            got or _number(stage(obs)) >= self._logit for got, stage in zip(self.received, self._stages, strict=True)
        ]
        return float(sum(self.received) - before), all(self.received)


class HumanClassifierWrapper(_RewardWrapper):
    """A person decides at the end of an episode, also of one that ran out of time, whether it succeeded.

    `ask(question, seconds)` gives True or False, or raises ``DeadlineError``; by
    default it reads 1 or 0 from the console.
    """

    classifies = False

    def __init__(
        self, env: gymnasium.Env, ask: Callable[[str, float], bool] | None = None, answer_seconds: float = 600.0
    ):
        super().__init__(env)
        self._ask, self._seconds = ask or ask_on_console, answer_seconds

    def judged(self, obs: Observation, reward: float, ended: bool) -> tuple[float, bool]:
        succeed = ended and bool(self._ask("Success? (1/0) ", self._seconds))
        return float(succeed), succeed


def ask_on_console(question: str, seconds: float) -> bool:
    """Asks until the answer is 1 or 0."""
    deadline = time.monotonic() + seconds
    while True:
        sys.stderr.write(question)
        sys.stderr.flush()
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, deadline - time.monotonic()))
        line = sys.stdin.readline() if ready else ""
        if line.strip() in ("0", "1"):
            return line.strip() == "1"
        if not line:
            why = "the console is closed" if ready else f"there was no answer within {seconds:g} s"
            raise DeadlineError(
                f"{question.strip()}: {why}. Answer 1 or 0 in time, or give HumanClassifierWrapper another `ask`."
            )


def _callable(classifier: Any) -> Classifier:
    if not callable(classifier):
        raise ConfigError(
            f"the classifier is {classifier!r}; a function from the observation to one number was expected."
        )
    result: Classifier = classifier
    return result


def _number(value: Any) -> float:
    """The one number that a classifier gives, be it a float, a bool or an array of any library."""
    array = np.asarray(value)
    if array.size != 1 or not np.isfinite(array).all():
        raise ConfigError(f"the classifier gave {array.tolist()}; one finite number was expected.")
    return float(array.reshape(-1)[0])
