"""Several tasks as one, for a policy that is told in words what to do: each episode is of one of them.

    env = make("tabletop/press_red+tabletop/press_blue")
    env.reset(options={"split": "train", "state": 5})     # state 5 of the mix: the third state of the second task
    env.instruction                                       # what is to be done in this episode

The numbered states of a split take turns: state ``n`` of the mix is state ``n // tasks`` of task ``n % tasks``. All
tasks show the same observations and take the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError
from hilt.core.tree import Array, Observation
from hilt.envs.env_protocol import Env, Info, StepResult, choose_state

TASK_NUMBER = "task_number"
"""In every ``info`` of a mix, and a column of what actors send: the place of the episode's task in the mix"""


class TaskMix(gymnasium.Env):
    """The tasks of `names`, made with `make`. What an environment has besides the contract of a task, such as an
    expert, is that of the episode's task."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Env]):
        if len(set(names)) < len(names):
            raise ConfigError(f"the mix of tasks {'+'.join(names)} has one of them twice; name each once.")
        self.names, self.tasks = tuple(names), list[Env]()
        try:
            for name in names:
                self.tasks.append(make(name))
            self._check_alike()
        except BaseException:
            self.close()
            raise
        self._number, self._draw = 0, np.random.default_rng()
        first = self.tasks[0]
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.metadata, self.render_mode = first.unwrapped.metadata, first.unwrapped.render_mode
        self.instructions = tuple(str(task.get_wrapper_attr("instruction")) for task in self.tasks)
        """What is to be done, in words, in each of the tasks"""
        states = [task.get_wrapper_attr("initial_states") for task in self.tasks]
        common = [split for split in states[0] if all(split in each for each in states)]
        self.initial_states = {split: len(states) * min(each[split] for each in states) for split in common}

    @property
    def task(self) -> Env:
        """The task of this episode."""
        return self.tasks[self._number]

    @property
    def instruction(self) -> str:
        return self.instructions[self._number]

    @property
    def step_limit(self) -> int:
        return int(self.task.get_wrapper_attr("step_limit"))

    @property
    def control_hz(self) -> float:
        """Steps in a second; 0 where the tasks have no rate of their own."""
        return float(self.task.get_wrapper_attr("control_hz")) if self.task.has_wrapper_attr("control_hz") else 0.0

    @property
    def action_scale(self) -> tuple[float, float]:
        """The meters and radians of an action of 1, where the tasks have them."""
        scale: tuple[float, float] = self.task.get_wrapper_attr("action_scale")
        return scale

    @property
    def views(self) -> Callable[[], dict[str, Array]]:
        """The pictures for a person who drives, where the tasks have them; as are `planned_points` and `project`."""
        found: Callable[[], dict[str, Array]] = self.task.get_wrapper_attr("views")
        return found

    @property
    def planned_points(self) -> Callable[[npt.ArrayLike], Array]:
        found: Callable[[Any], Array] = self._of_task("planned_points")
        return found

    @property
    def project(self) -> Callable[[npt.ArrayLike], dict[str, Array]]:
        found: Callable[[Any], dict[str, Array]] = self._of_task("project")
        return found

    def _of_task(self, name: str) -> Callable[..., Any]:
        """A function of the task of the episode in which it is called."""
        self.task.get_wrapper_attr(name)
        return lambda *given: self.task.get_wrapper_attr(name)(*given)

    def expert(self) -> Callable[[], Array]:
        """A script that demonstrates the task of this episode."""
        made: Callable[[], Array] = self.task.get_wrapper_attr("expert")()
        return made

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        if seed is not None:
            self._draw = np.random.default_rng(seed)
        options = dict(options or {})
        split = options.pop("split", next(iter(self.initial_states)))
        state = choose_state(self.initial_states, split, options.pop("state", None), self._draw)
        own, self._number = divmod(state, len(self.tasks))
        observation, info = self.task.reset(seed=seed, options={**options, "split": split, "state": own})
        return observation, {**info, "split": split, "state": state, TASK_NUMBER: self._number}

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, reward, terminated, truncated, info = self.task.step(action)
        return observation, reward, terminated, truncated, {**info, TASK_NUMBER: self._number}

    def render(self) -> Array | None:
        picture: Array | None = self.task.unwrapped.render()
        return picture

    def close(self) -> None:
        for task in self.tasks:
            task.close()

    def _check_alike(self) -> None:
        """Refuses tasks that one policy cannot see and move alike."""
        first, *others = self.tasks
        for name, other in zip(self.names[1:], others, strict=True):
            for what in ("observation_space", "action_space"):
                one, two = getattr(first, what), getattr(other, what)
                if one != two:
                    raise ConfigError(
                        f"{self.names[0]} and {name} cannot be mixed: the {what} of the first is {one}, and that of "
                        f"the second {two}. Mix tasks of one suite, with the same cameras and options."
                    )
