"""Going back to an earlier moment of an episode, in simulation: all that the future depends on, saved and restored.

The environment itself has ``snapshot()`` and ``restore(snapshot)`` (`hilt.envs.task`). A wrapper around it names the
attributes in which it keeps something from step to step, as ``episode_state = ("_recent",)``, or ``()`` if it keeps
nothing. A wrapper that says neither may keep something that nobody restores, so nothing is rewound with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium

from hilt.core.errors import ConfigError
from hilt.envs.env_protocol import Env

OF_GYMNASIUM: dict[str, tuple[str, ...]] = {
    "OrderEnforcing": (),
    "PassiveEnvChecker": (),
    "RescaleAction": (),
    "TimeLimit": ("_elapsed_steps",),
}
"""What gymnasium's own wrappers that a task usually has keep from step to step"""


@dataclass(frozen=True)
class SavedState:
    """A moment of an episode."""

    simulation: Any
    """What ``snapshot()`` of the environment gave"""
    random: Any
    """The state of the environment's random generator"""
    wrappers: tuple[dict[str, Any], ...]
    """What each wrapper keeps, from the outermost one on"""


def save_state(env: Env) -> SavedState:
    """Saves all that the rest of the episode depends on; refused where `why_not_rewound` has a reason."""
    if reason := why_not_rewound(env):
        raise ConfigError(reason)
    base = env.unwrapped
    wrappers = tuple({name: copy.deepcopy(getattr(layer, name)) for name in names} for layer, names in _kept(env))
    generator = getattr(base, "_np_random", None)
    return SavedState(
        copy.deepcopy(base.snapshot()), None if generator is None else generator.bit_generator.state, wrappers
    )


def restore_state(env: Env, saved: SavedState) -> None:
    """Goes on from a saved moment of the same environment: the same actions give the same observations again."""
    base = env.unwrapped
    base.restore(copy.deepcopy(saved.simulation))
    if saved.random is not None:
        base.np_random.bit_generator.state = saved.random
    for (layer, _), values in zip(_kept(env), saved.wrappers, strict=True):
        for name, value in values.items():
            setattr(layer, name, copy.deepcopy(value))


def why_not_rewound(env: Env) -> str:
    """Why an environment cannot be rewound; empty where it can."""
    base = env.unwrapped
    if not (callable(getattr(base, "snapshot", None)) and callable(getattr(base, "restore", None))):
        return (
            f"{type(base).__name__} cannot be rewound: only a simulation can, whose environment has snapshot() and "
            "restore(snapshot)."
        )
    unknown = [type(layer).__name__ for layer in _wrappers(env) if _names(layer) is None]
    if unknown:
        return (
            f"{unknown[0]} cannot be rewound: it does not say what it keeps from step to step. Give the wrapper "
            'episode_state = ("_attribute", ...), or () if it keeps nothing.'
        )
    return ""


def _kept(env: Any) -> list[tuple[Any, tuple[str, ...]]]:
    return [(layer, _names(layer) or ()) for layer in _wrappers(env)]


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _names(layer: Any) -> tuple[str, ...] | None:
    kind = type(layer)
    known = OF_GYMNASIUM.get(kind.__name__) if kind.__module__.startswith("gymnasium.") else None
    names: tuple[str, ...] | None = getattr(kind, "episode_state", known)
    return names
