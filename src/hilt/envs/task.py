"""The task contract: what recording, training and evaluation ask of an environment, real or simulated.

A task is a ``gymnasium.Env`` that also has, itself or in one of its wrappers,

- ``instruction``: what is to be done, in words;
- ``step_limit``: the number of steps after which an episode is truncated;
- ``initial_states``: how many numbered initial states each split has, ``{"train": 50, "eval": 50, "test": 100}``;
  ``reset(options={"split": "eval", "state": 7})`` begins exactly there, without
  options in a random state of the first split;
- success in ``info`` of every reset and step: see `success_of`.

It may have ``control_hz``; ``states_of_train``, how many states of a split are of the split train, too; ``expert()``,
which gives a function without arguments that gives the next action; ``views()``, pictures by
name that are larger than a policy's, for a person who drives; ``step_chunk(actions)``, see the
function of that name; and ``snapshot()`` and ``restore(snapshot)``, with which one environment
carries on many episodes in turns, each as if it were alone, and a person goes back to a moment of an episode
(`hilt.envs.rewind`).

Plain gymnasium environments work as they are (`as_task`), `check_task` tells an author
what is missing, and `make` knows tasks by name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.names import ExtensionPoint, import_named, load
from hilt.core.platform import environment, renderer_variables
from hilt.core.tree import Array, Observation
from hilt.core.trust import NAME, permit
from hilt.envs.batched import OneOf
from hilt.envs.check import findings
from hilt.envs.env_protocol import Env, Info, StepResult, choose_state, success_of

STATES = {"train": 50, "eval": 50, "test": 100}
"""The numbered initial states of an environment that has none of its own"""
Success = Callable[[float, bool, bool, Mapping[str, object]], bool]
"""Whether a step succeeded, from its reward, terminated, truncated and info"""

_SEEDS_PER_SPLIT = 1_000_000
TASKS = ExtensionPoint(
    "task",
    "hilt.tasks",
    {
        "tabletop": "hilt.envs.tabletop.suite_env:TabletopEnv",
        "robot": "hilt.robot.env:robot_task",
        **{
            suite: f"hilt.envs.libero:{suite}"
            for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
        },
        "metaworld": "hilt.envs.metaworld.sawyer_env:MetaworldEnv",
        "robotwin": "hilt.envs.robotwin:robotwin",
        "robotwin2": "hilt.envs.robotwin:robotwin2",
    },
)
"""The prefix of a task's name to a function of the rest of it, which makes the environment"""


def make(name: str, **options: Any) -> Env:
    """The task of this name, so that a recipe swaps an arm for a simulator in one line.

    - ``tabletop/pick``: of our suite; ``robot/127.0.0.1:5000``: an arm behind a robot server; ``libero_spatial/3``,
      ``metaworld/door-open``, ``robotwin2/lift_pot``: of those simulators; options are those of each;
    - ``CartPole-v1``, ``gym_hil:gym_hil/PandaPickCube-v0`` (a module to import, and an id): what gymnasium knows;
    - ``package.module:factory``: a function or class of yours, installed or in the current folder;
    - several of these joined by ``+``: each episode is of one of them (`hilt.envs.task_mix`);
    - ``prefix/REST``, where an installed package has registered the prefix (`register`, or
      an entry point of the group ``hilt.tasks``).

    For gymnasium's and yours, the options of `as_task` may be given too. What a file names
    is run only if it may: see `hilt.core.trust`.
    """
    if len(names := name.split("+")) > 1 and all(names):
        from hilt.envs.task_mix import TaskMix

        return TaskMix(names, lambda one: make(one, **options))
    prefix, _, rest = name.partition("/")
    if (is_known := prefix in TASKS.known()) and rest:
        return as_task(TASKS.load(prefix)(rest, **options))
    if is_known:
        raise UnknownNameError("task", name, [known for known in _known_names() if known.startswith(f"{prefix}/")])
    with _rendering():
        return _make(name, options)


def _make(name: str, options: dict[str, Any]) -> Env:
    ours: dict[str, Any] = {
        key: options.pop(key) for key in ("instruction", "states", "success", "step_limit") if key in options
    }
    module, colon, rest = name.partition(":")
    if rest.isidentifier():
        return as_task(load(name, gymnasium.Env, gymnasium.vector.VectorEnv)(**options), **ours)
    if colon:
        permit(name)
        import_named(module)
    if (gym_id := rest or name) not in gymnasium.registry:
        raise UnknownNameError("task", name, _known_names())
    if "step_limit" in ours:
        options["max_episode_steps"] = ours.pop("step_limit")
    return as_task(gymnasium.make(gym_id, **options), **ours)


def ready(names: Sequence[str], **options: Any) -> None:
    """Refuses tasks that cannot be made here, in one sentence, before anything is started; makes nothing. A module of
    ours that makes tasks may have a function of this name for it: other people's tell it when they are made."""
    modules: dict[str, list[str]] = {}
    for name in (one for mixed in names for one in mixed.split("+")):
        factory = TASKS.get(name.partition("/")[0])
        if factory is None and NAME.fullmatch(name):
            permit(name)
        if isinstance(factory, str) and factory.startswith("hilt."):
            modules.setdefault(factory.partition(":")[0], []).append(name)
    for module, theirs in modules.items():
        if (check := getattr(importlib.import_module(module), "ready", None)) is not None:
            check(theirs, **options)


def register(prefix: str, factory: Callable[..., Env] | str) -> None:
    """Make ``prefix/REST`` a name: ``factory(REST, **options)`` gives the environment;
    ``"module:attribute"`` is imported on first use."""
    if not prefix or "/" in prefix or ":" in prefix:
        raise ConfigError(
            f"register({prefix!r}): expected a word without '/' and ':', which begins the names of your tasks."
        )
    TASKS[prefix] = factory


def factory_names() -> dict[str, str | None]:
    """What was registered, as ``module:attribute`` for another process; None for
    what has no name there, such as a lambda."""
    names: dict[str, str | None] = {}
    for prefix, factory in TASKS.items():
        if not isinstance(factory, str):
            module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
            known = module != "__main__" and getattr(sys.modules.get(module), name, None) is factory
            factory = f"{module}:{name}" if known else ""
        names[prefix] = factory or None
    return names


def step_chunk(env: Env, actions: Sequence[npt.ArrayLike] | Array) -> tuple[Observation, Array, bool, bool, Info]:
    """Carry out ``[n, ...]`` actions one after the other until the episode ends, and observe at the end of them.

    As ``step``, but the rewards are float32 [executed]. Simulators spend most of their time on images that are not
    needed: one that has a ``step_chunk`` itself renders once. States, rewards and success are those of single steps.
    """
    if hasattr(env, "step_chunk"):
        result: tuple[Any, Any, bool, bool, dict[str, Any]] = env.step_chunk(actions)
        return result
    rewards = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return observation, np.array(rewards, np.float32), bool(terminated), bool(truncated), info


def as_task(
    env: Env,
    *,
    instruction: str | None = None,
    step_limit: int | None = None,
    states: Mapping[str, int] | None = None,
    success: Success | None = None,
) -> Env:
    """Any gymnasium environment as a task; one that is a task already, and of which
    nothing is asked, comes back as it is.

    Numbered initial states are seeds, different ones in each split. `success` is for environments that do
    not tell it in ``info``; without it their success stays unknown. A simulator that steps many
    environments at once is one when it runs a single one.
    """
    if hasattr(getattr(env, "unwrapped", env), "num_envs"):
        env = OneOf(env)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"as_task takes a gymnasium.Env, got {type(env).__name__}; hilt.envs.adapters has "
            "adapters for other interfaces."
        )
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    own = {
        key: env.get_wrapper_attr(key)
        for key in ("instruction", "step_limit", "initial_states")
        if env.has_wrapper_attr(key)
    }
    if len(own) == 3 and (instruction, step_limit, states, success) == (None,) * 4:
        task: Env = env
        return task
    limit = own.get("step_limit", env.spec and env.spec.max_episode_steps)
    if limit is None and step_limit is None:
        raise ConfigError(
            f"{name} has no step limit; give one: task_options.step_limit=200 in a run, -o step_limit=200 for "
            "hilt record; in Python, as_task(env, step_limit=200)."
        )
    if step_limit is not None and not 1 <= step_limit <= (limit or step_limit):
        raise ConfigError(
            f"step_limit={step_limit} cannot work: {name} ends an episode after {limit or 'at least 1'} steps."
        )
    if states is not None and "initial_states" in own:
        raise ConfigError(f"{name} has numbered initial states of its own, so states= cannot be given; leave it out.")
    if states is not None and not (states and all(0 < n <= _SEEDS_PER_SPLIT for n in states.values())):
        raise ConfigError(
            f"states={states!r}: expected splits with 1 to {_SEEDS_PER_SPLIT:,} states each, such as {STATES}."
        )
    words = instruction or (None if "instruction" in own else _in_words(name))
    return PlainTask(
        env, words, int(step_limit or limit), None if "initial_states" in own else states or STATES, success
    )


class PlainTask(gymnasium.Wrapper):
    """Adds to an environment what it lacks of the contract; None is for what it has itself."""

    episode_state = ("_steps", "_draw")

    def __init__(
        self,
        env: Env,
        instruction: str | None,
        step_limit: int,
        states: Mapping[str, int] | None,
        success: Success | None,
    ):
        super().__init__(env)
        self.step_limit = step_limit
        self.initial_states = states or env.get_wrapper_attr("initial_states")
        self._numbers_states, self._instruction, self._success = states is not None, instruction, success
        self._steps = 0
        self._draw = np.random.default_rng()  # not the environment's own, which each numbered state seeds anew

    @property
    def instruction(self) -> str:
        return self._instruction or self.env.get_wrapper_attr("instruction")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self._steps = 0
        if not self._numbers_states:
            with _rendering():
                result: tuple[Any, dict[str, Any]] = self.env.reset(seed=seed, options=options)
            return result
        if seed is not None:
            self._draw = np.random.default_rng(seed)
        options = dict(options or {})
        split = options.pop("split", next(iter(self.initial_states)))
        state = choose_state(self.initial_states, split, options.pop("state", None), self._draw)
        first = list(self.initial_states).index(split) * _SEEDS_PER_SPLIT
        with _rendering():
            observation, info = self.env.reset(seed=first + state, options=options or None)
        return observation, {**info, "succeed": bool(success_of(info)), "split": split, "state": state}

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        truncated = bool(truncated) or self._steps >= self.step_limit
        succeeded = (
            success_of(info) if self._success is None else bool(self._success(reward, terminated, truncated, info))
        )
        if succeeded is not None:
            info = {**info, "succeed": succeeded}
        return observation, reward, bool(terminated), truncated, info

    def render(self) -> Array | None:
        with _rendering():
            picture: Array | None = self.env.render()
            return picture


def split_to_report(states: Mapping[str, int]) -> str:
    """The split that an evaluation takes by default: the states that published figures
    are of, where a task has them; else "test"."""
    return "published" if "published" in states else "test"


def scene_of(name: str) -> str:
    """What tasks whose initial states are the same have in common, as
    tabletop/press_red and press_blue; else the task's name."""
    prefix, _, task = name.partition("/")
    if prefix != "tabletop":
        return name
    from hilt.envs.tabletop.suite import SUITE

    return f"tabletop/{SUITE[task].scene or task}" if task in SUITE else name


def check_task(
    env: Env, act: Callable[[Observation], npt.ArrayLike] | None = None, tolerance: float = 0.0
) -> list[str]:
    """What an environment lacks to be a task, in sentences, found by running it; nothing for one that is fine.

    Actions are random ones of its space. For a real arm give `act`, which gets the observation and gives a gentle
    action, and the `tolerance` within which two resets to one state begin alike.
    """
    return findings(env, act, tolerance)


def _rendering() -> contextlib.AbstractContextManager[None]:
    """Within it, other people's environments make their renderers: when they are imported
    or made, at a reset, or for the first image.

    On Linux, MuJoCo's own choice needs a screen, and aborts the process where there is none."""
    has_screen = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return contextlib.nullcontext() if has_screen else environment(renderer_variables())


def _known_names() -> list[str]:
    newest = {name.rpartition("-v")[0]: name for name in sorted(gymnasium.registry) if not name.startswith("GymV")}
    ours = [f"{prefix}/..." for prefix in TASKS.known() if prefix not in ("tabletop", "robot")]
    ours += ["robot/127.0.0.1:5000", "robot/my_arm.yaml"]
    try:
        ours += [f"tabletop/{task}" for task in importlib.import_module("hilt.envs.tabletop.suite").SUITE]
    except ImportError:  # without mujoco
        ours.append("tabletop/...")
    return [*ours, *newest.values(), "package.module:factory"]


def _in_words(name: str) -> str:
    """``gym_hil/PandaPickCube-v0`` → ``panda pick cube``"""
    bare = re.sub(r"-v\d+$", "", name.rpartition("/")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+|-+", " ", bare).lower()
