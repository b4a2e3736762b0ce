"""A task of three steps that a tiny policy learns in seconds: lights are to be turned up, or down, as the words say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:  # a simulator's process imports no torch
    from hilt.vla.config import Vla

UP, DOWN = "tests.vla.toy_vla:up", "tests.vla.toy_vla:down"


class Light(gymnasium.Env[Any, Any]):
    """An action changes the light by at most 1; turned by 1.5 the right way within four steps, it is a success."""

    initial_states = {"train": 6, "eval": 5, "test": 3}  # noqa: RUF012
    step_limit, control_hz = 4, 10.0

    def __init__(self, sign: int, fails: int = -1):
        """`fails`: the simulator raises in this initial state."""
        self._sign, self._fails = sign, fails
        self.instruction = "turn it up" if sign > 0 else "turn it down"
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        image = spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.observation_space = spaces.Dict({"front": image, "state": spaces.Box(-99, 99, (1,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        options = {"split": "train", "state": 0, **(options or {})}
        self._state, self._steps = options["state"], 0
        self._light = self._first = (list(self.initial_states).index(options["split"]) * 10 + self._state) / 10
        return self._seen(), {"succeed": False, **options}

    def step(self, action: Any) -> Any:
        if self._state == self._fails:
            raise RuntimeError("the lamp is broken")
        self._steps += 1
        self._light += float(np.clip(action, -1, 1)[0])
        done = (self._light - self._first) * self._sign > 1.5
        return self._seen(), float(done), done, self._steps >= self.step_limit, {"succeed": done}

    def _seen(self) -> Any:
        return {
            "front": np.full((16, 16, 3), round(20 * self._light) % 256, np.uint8),
            "state": np.array([self._light], np.float32),
        }


def up(**options: Any) -> Light:
    return Light(1, **options)


def down(**options: Any) -> Light:
    return Light(-1, **options)


class Silent(Light):
    """As many environments of gymnasium, it does not tell whether it succeeded."""

    def step(self, action: Any) -> Any:
        *seen, _ = super().step(action)
        return (*seen, {})


class Easy(Light):
    """Whatever is done is a success."""

    def step(self, action: Any) -> Any:
        seen, *_ = super().step(action)
        return seen, 1.0, True, False, {"succeed": True}


class Hopeless(Light):
    """It says that nothing ever succeeds."""

    def step(self, action: Any) -> Any:
        seen, reward, _, truncated, _ = super().step(action)
        return seen, reward, False, truncated, {"success": False}


def silent(**options: Any) -> Light:
    return Silent(1, **options)


def easy(**options: Any) -> Light:
    return Easy(1, **options)


def hopeless(**options: Any) -> Light:
    return Hopeless(1, **options)


def config(*changes: Any, **more: Any) -> Vla:
    """Small in every way; changes as on a command line."""
    from hilt.algos.config import Batching, Optimizer, PolicyGradient
    from hilt.core.config import build
    from hilt.vla.collect import Collecting
    from hilt.vla.config import SimulatorSettings, Validation, Vla

    base = Vla(
        tasks=[UP, DOWN],
        columns={"full_image": "front", "state": "state"},
        policy_options={"width": 16, "depth": 1, "heads": 2, "keypoints": 2, "chunk": 2, "bins": 5, "smoothing": 0.5},
        pool=SimulatorSettings(slots=6),
        collect=Collecting(group_size=4, data_batch_size=16),
        algorithm=PolicyGradient(batch=Batching(trajectories_per_step=8)),
        optimizer=Optimizer(learning_rate=1e-2, weight_decay=0.0),
        validation=Validation(period=2),
        max_steps=4,
        checkpoint_period=2,
    )
    return build(base, *changes, *([more] if more else []))


def weights(run: Path) -> dict[str, np.ndarray]:
    """Everything that the newest checkpoint of a run has, by name."""
    from hilt.runs import checkpoint

    found: dict[str, np.ndarray] = {}

    def take(path: str, tree: Any) -> None:
        if isinstance(tree, dict):
            for name, value in tree.items():
                take(f"{path}/{name}", value)
        else:
            found[path] = np.asarray(tree)

    saved = checkpoint.latest(run)
    assert saved is not None
    take("", saved.agent)
    return found
