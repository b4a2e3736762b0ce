"""What an environment lacks to be a task, found by running it: the sentences of ``check_task``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import HiltError, SchemaError
from hilt.core.tree import Observation, equal
from hilt.envs.env_protocol import Env, success_of
from hilt.envs.rewind import restore_state, save_state, why_not_rewound

_STATES, _EPISODES, _STEPS = 3, 3, 2_000
"""How much is run: initial states of each split, episodes until one reaches the step limit, and steps of each"""
_ACTIONS = 5
"""Steps after which an environment that can be restored is, and that it makes again"""
_NOISE = 1e-9
"""Observations that differ by less are of one state"""


def findings(env: Env, act: Callable[[Observation], npt.ArrayLike] | None, tolerance: float) -> list[str]:
    if not isinstance(env, gymnasium.Env):
        return [
            f"{type(env).__name__} is no gymnasium.Env: derive it from one, or use an adapter of hilt.envs.adapters."
        ]
    return list(dict.fromkeys(_Check(env, act, tolerance).run()))


class _Over(HiltError):
    """Raised when something is so wrong that the rest cannot be run; the message is the finding."""


class _Check:
    """One run. It keeps the last observation and a copy of it, for nothing that follows may change it."""

    def __init__(self, env: Env, act: Callable[[Any], Any] | None, tolerance: float):
        self.env, self.tolerance = env, tolerance
        space = copy.deepcopy(env.action_space)
        space.seed(0)
        self.act = act or (lambda observation: space.sample())
        self.last: Any = None
        self.last_copy: Any = None

    def run(self) -> Iterator[str]:
        self.states: Mapping[str, int] = {}
        self.limit = 0
        try:
            yield from self.reset(None)  # an arm or a custom interface may know its instruction only now
            yield from self.declarations()
            yield from self.resets()
            for number in range(_EPISODES):
                if (yield from self.episode(number)):
                    break
            yield from self.rewinds()
        except _Over as error:
            yield str(error)

    def declarations(self) -> Iterator[str]:
        instruction, limit, states = (self._declared(name) for name in ("instruction", "step_limit", "initial_states"))
        cure = "set it in your environment, or give it to as_task"
        if not isinstance(instruction, str) or not instruction.strip():
            yield (
                f"instruction is {instruction!r}; expected what is to be done, in words: {cure}(env, instruction=...)."
            )
        if _whole(limit):
            self.limit = limit
        else:
            yield (
                f"step_limit is {limit!r}; expected after how many steps an episode is truncated: "
                f"{cure}(env, step_limit=...)."
            )
        if isinstance(states, Mapping) and states and all(map(_whole, states.values())):
            self.states = states
        else:
            yield (
                f"initial_states is {states!r}; expected how many each split has, such as {{'train': "
                f"50}}: {cure}(env, states=...)."
            )
        if getattr(self.env.action_space, "dtype", None) == np.float64:
            yield "the action space is float64; policies, devices and logs have float32: give the Box dtype=np.float32."
        for path, space in _leaves(self.env.observation_space):
            yield from _picture(path, space)

    def resets(self) -> Iterator[str]:
        """Numbered states are there, begin the same every time, and are not one and the same."""
        begins: dict[tuple[str, int], Any] = {}
        tried = [(split, state) for split, count in self.states.items() for state in range(min(count, _STATES))]
        for split, state in tried + tried[:1]:
            try:
                yield from self.reset({"split": split, "state": state})
            except TypeError as error:
                yield f"reset does not take options ({error}): define it as reset(self, *, seed=None, options=None)."
                self.states = {}
                return
            if not _same(begins.setdefault((split, state), self.last_copy), self.last_copy, self.tolerance):
                yield (
                    f"two resets to state {state} of {split!r} begin differently: draw all that is "
                    "random from the state's number."
                )
        alike = [(a, b) for a, b in itertools.combinations(begins, 2) if _same(begins[a], begins[b], _NOISE)]
        if any(a[0] == b[0] for a, b in alike):  # then what differs is not seen, and may differ between splits too
            named = ", ".join(
                f"{split} {state}" for split, state in begins if any((split, state) in pair for pair in alike)
            )
            cure = (
                "does reset use options['split'] and ['state'], and is it seen? An arm without cameras sees no objects."
            )
            yield f"states {named} begin with one and the same observation: {cure}"
            return
        declared = self.env.get_wrapper_attr("states_of_train") if self.env.has_wrapper_attr("states_of_train") else {}
        for split, other in dict.fromkeys((a[0], b[0]) for a, b in alike):
            if split != other and declared.get(other):  # it declares them, and evaluations use them
                continue
            yield f"the splits {split!r} and {other!r} overlap: a state of one begins as a state of the other."

    def episode(self, number: int) -> Generator[str, None, bool]:
        """One episode; True when it went on to the step limit."""
        split = next(iter(self.states), None)
        yield from self.reset({"split": split, "state": number % self.states[split]} if split else None)
        for step in range(1, min(self.limit or _STEPS, _STEPS) + 1):
            action = self.act(self.last)
            before = copy.deepcopy(action)
            result = self.env.step(action)
            if not isinstance(result, tuple) or len(result) != 5:
                raise _Over("step does not give five things: return observation, reward, terminated, truncated, info.")
            observation, reward, terminated, truncated, info = result
            if not _same(before, action):
                yield (
                    "step changes the action that it is given: work on a copy, or another action is "
                    "recorded than the one sent."
                )
            succeeded = yield from self.seen(observation, info, "step")
            if np.size(reward) != 1 or not np.isfinite(reward):
                yield f"the reward is {reward!r}; expected one finite number."
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if not isinstance(flag, bool | np.bool_):
                    yield f"{name} is {flag!r}; expected True or False."
            if step == self.limit and terminated and not truncated and not succeeded:
                yield (
                    "at the step limit terminated is True and truncated is not: a value would not be carried "
                    "beyond it. Set truncated."
                )
            elif step == self.limit and not terminated and not truncated:
                yield f"truncated is not True at step {step}, the step limit."
            elif truncated and self.limit and step < self.limit:
                yield f"truncated is True at step {step}; the step limit is {self.limit}."
            if terminated or truncated:
                return step == self.limit
        return True

    def rewinds(self) -> Iterator[str]:
        """An environment that can be restored goes on from there as the first time."""
        if why_not_rewound(self.env):
            return
        split = next(iter(self.states), None)
        yield from self.reset({"split": split, "state": 0} if split else None)
        yield from (finding for _, _, found in self._steps([self.act(self.last)]) for finding in found)
        saved = save_state(self.env)
        first = list(self._steps(_ACTIONS * [None]))
        restore_state(self.env, saved)
        again = list(self._steps([action for action, _, _ in first]))
        if any(not _same(a[1], b[1]) for a, b in zip(first, again, strict=False)) or len(first) != len(again):
            yield (
                "after restore(snapshot) the same actions give other observations: keep all that the rest of an "
                "episode depends on in snapshot(), or leave out both."
            )

    def _steps(self, actions: list[Any]) -> Iterator[tuple[Any, Any, list[str]]]:
        """The action, a copy of what it gave, and what is wrong with that, until the episode ends; random actions
        for None."""
        for given in actions:
            action = self.act(self.last) if given is None else given
            observation, reward, terminated, truncated, info = self.env.step(action)
            found = list(self.seen(observation, info, "step"))
            yield action, (copy.deepcopy(observation), reward, terminated, truncated), found
            if terminated or truncated:
                return

    def reset(self, options: Mapping[str, object] | None) -> Iterator[str]:
        result = self.env.reset(options=options) if options else self.env.reset()
        if not isinstance(result, tuple) or len(result) != 2:
            raise _Over("reset does not give two things: return observation, info.")
        observation, info = result
        if (yield from self.seen(observation, info, "reset")):
            yield "info reports success right after a reset."
        if any(info.get(key) != value for key, value in (options or {}).items()):
            yield (
                "info of reset does not tell the split and state that were asked for: set "
                "info['split'] and info['state']."
            )

    def seen(
        self, observation: Observation, info: Mapping[str, object], where: str
    ) -> Generator[str, None, bool | None]:
        """Findings of what a reset or step gives; returns whether it succeeded."""
        if not _same(self.last, self.last_copy):
            yield (
                "an observation that was returned is written into later, so what was kept of it changes: return a copy."
            )
        self.last, self.last_copy = observation, copy.deepcopy(observation)
        for path, space in _leaves(self.env.observation_space):
            yield from _unfit(path, space, observation)
        try:
            succeeded = success_of(info)
        except SchemaError as error:
            yield f"{where}: {error}"
            return None
        if succeeded is None:
            yield (
                f"info of {where} does not tell success: set info['succeed'], or give a rule to "
                "as_task(env, success=...)."
            )
        return succeeded

    def _declared(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name) if self.env.has_wrapper_attr(name) else None


def _leaves(space: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(space, gymnasium.spaces.Dict):
        for key, inner in space.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, space


def _picture(path: tuple[str, ...], space: Any) -> Iterator[str]:
    """A space of three axes, the first or the last of 3 or 4, is taken for a picture."""
    shape: tuple[int, ...] = space.shape or ()
    if len(shape) != 3 or not {shape[0], shape[-1]} & {3, 4}:
        return
    if shape[-1] not in (3, 4):
        yield f"{_name(path)} has the shape {shape}; pictures are [height, width, channels]."
    if space.dtype != np.uint8:
        yield f"{_name(path)} is {space.dtype}; pictures are uint8, 0 to 255."


def _unfit(path: tuple[str, ...], space: Any, observation: Any) -> Iterator[str]:
    """Yields how one leaf of an observation violates its space."""
    value = observation
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            yield f"{_name(path)} is in the observation space and not in the observation."
            return
        value = value[key]
    array = np.asarray(value) if space.shape is not None else np.zeros(0)  # a Tuple of spaces is no array
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        yield f"{_name(path)} has values that are not finite."
    elif not space.contains(value):
        if space.shape is not None and (array.dtype, array.shape) != (space.dtype, space.shape):
            yield f"{_name(path)} is {array.dtype} {array.shape}; its space has {space.dtype} {space.shape}."
        else:
            yield f"{_name(path)} is outside its space {space}."


def _name(path: tuple[str, ...]) -> str:
    return "/".join(("observation", *path))


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)


def _same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two observations are equal, to the last bit or as near as is asked;
    pictures are not compared by nearness."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    a, b = np.asarray(a), np.asarray(b)
    if tolerance and a.dtype.kind == "f":
        return np.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)
    return (tolerance > _NOISE and a.ndim == 3) or equal(a, b)
