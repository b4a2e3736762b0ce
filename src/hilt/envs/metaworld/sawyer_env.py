"""A task of Meta-World (version 3): a Sawyer arm with a gripper at a table.

Actions are those of Meta-World: a motion of the hand in x, y and z, and the force of the gripper (1 closes it), each
from -1 to 1. What differs from Meta-World's own environment:

- the reward is 1 in the step that succeeds, which ends the episode, and 0 before; Meta-World's shaped reward is in
  ``info`` as ``dense_reward``;
- initial states are numbered: the goals and object positions that `metaworld.MT1` draws with the seeds in `SEEDS`;
- with images, a policy sees the hand's position and the opening of the gripper, and not where the objects are.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.errors import ConfigError, MissingPackageError, UnknownNameError
from hilt.core.platform import environment, renderer_variables
from hilt.core.tree import Array, Observation
from hilt.envs.env_protocol import Info, StepResult, choose_state

VERSION = "-v3"
"""The end of Meta-World's names of tasks, which may be left out"""
SEEDS = {"train": 0, "test": 1, "eval": 2}
"""Of the 50 initial states of each split"""
STATES = 50
NUMBERS, OWN_NUMBERS, ACTIONS = 39, 4, 4
"""Of a whole observation; of those, the hand's position and the gripper's opening; and of an action"""
WORKSPACE = "workspace"
"""The camera that we add: Meta-World's own show the whole table, where a goal is a pixel of an image of 64"""
WORKSPACE_VIEW: dict[str, Any] = {"lookat": (0.02, 0.68, 0.16), "distance": 1.1, "azimuth": 150.0, "elevation": -32.0}
"""In meters, from the robot's base, and degrees: all that the fifty tasks move lies within it"""
CAMERAS = (WORKSPACE, "gripperPOV")
MAX_STEPS = 500
"""Meta-World's own limit of an episode"""
QUALITIES = ("full", "draft")
"""As Meta-World draws, or the arm as ellipsoids and without antialiasing"""
ARM = "base"
"""The body that the arm stands on"""
VIEW_SIZE = 256
"""Pixels of the images for a person"""
INSTALL = "pip install 'hilt[metaworld]' && pip install --no-deps metaworld==3.1.1"
"""Without what it depends on, because it pins an older MuJoCo than ``hilt[sim]``"""


class MetaworldEnv(gymnasium.Env[Any, Any]):
    """Makes ``metaworld/TASK``, such as ``metaworld/door-open``.

    `image_size`: pixels of each camera; 0 for the state alone, the 39 numbers of Meta-World's own observation.
    `quality`: "draft" draws the links of the arm as ellipsoids. Without a GPU an image takes less than half the time.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 - gymnasium has it so
    render_mode = "rgb_array"

    def __init__(
        self,
        task: str,
        *,
        image_size: int = 0,
        cameras: Sequence[str] = CAMERAS,
        quality: str = "full",
        step_limit: int = 200,
    ) -> None:
        if not 1 <= step_limit <= MAX_STEPS:
            raise ConfigError(
                f"step_limit={step_limit} cannot work: Meta-World's episodes have 1 to {MAX_STEPS} steps."
            )
        if image_size < 0 or (image_size and not cameras):
            raise ConfigError(
                f"image_size={image_size} with cameras={list(cameras)}: expected pixels and the names of cameras, or "
                "image_size=0 for the state alone."
            )
        if quality not in QUALITIES:
            raise UnknownNameError("quality of images", quality, QUALITIES, setting="quality")
        if quality != "full" and not image_size:
            raise ConfigError(f"quality={quality} is about images, and image_size=0 has none: give image_size=64.")
        self.task, self.step_limit, self._size, self._cameras = full_name(task), step_limit, image_size, tuple(cameras)
        self._world = _library().ALL_V3_ENVIRONMENTS[self.task]()
        if quality == "draft":
            _draw_ellipsoids(self._world.model)
        self._renderer: Any = None
        self._seen, self._steps, self._over = np.zeros(NUMBERS), 0, True
        self.control_hz = 1.0 / float(self._world.dt)
        self.initial_states = dict.fromkeys(SEEDS, STATES)
        self.instruction = self.task.removesuffix(VERSION).replace("-", " ")
        self._views = {name: _camera(self._world.model, name) for name in self._cameras if image_size}
        self.action_space = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (OWN_NUMBERS if image_size else NUMBERS,), np.float32)
        images = {"images": spaces.Dict(dict.fromkeys(self._cameras, image))} if image_size else {}
        self.observation_space = spaces.Dict({"state": state, **images})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begins in ``options={"split": "test", "state": 7}``; without a state, in a random one of the split."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"split", "state"}:
            raise UnknownNameError("reset option", min(unknown), ["split", "state"])
        split = options.get("split", "train")
        state = choose_state(self.initial_states, split, options.get("state"), self.np_random)
        self._world.set_task(initial_states(self.task, split)[state])
        self._seen, self._steps, self._over = self._world.reset()[0], 0, False
        return self._observation(), {"succeed": False, "split": split, "state": state}

    def step(self, action: npt.ArrayLike) -> StepResult:
        action = np.asarray(action, np.float64)
        if action.shape != (ACTIONS,) or not np.isfinite(action).all():
            raise ConfigError(
                f"{self.task} takes actions of {ACTIONS} finite numbers; given {action.shape}: {action.tolist()}."
            )
        if self._over:
            raise ConfigError(f"this episode of {self.task} is over, or has not begun: call reset first.")
        self._seen, dense_reward, _, _, info = self._world.step(action.clip(-1, 1))
        self._steps += 1
        succeed, truncated = bool(info["success"]), self._steps >= self.step_limit
        self._over = succeed or truncated
        told: Info = {"succeed": succeed, "dense_reward": float(dense_reward)}
        return self._observation(), float(succeed), succeed, truncated, told

    def expert(self) -> Callable[[], Array]:
        """Meta-World's script for this task, which knows where the objects are."""
        script = _scripts()[self.task]()
        return lambda: np.clip(script.get_action(self._seen), -1.0, 1.0).astype(np.float32)

    def views(self) -> dict[str, Array]:
        """Larger images, for a person."""
        return {name: self._image(_camera(self._world.model, name), VIEW_SIZE) for name in self._cameras}

    def render(self) -> Array:
        return self._image(_camera(self._world.model, self._cameras[0]), VIEW_SIZE)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._world.close()

    def _observation(self) -> Observation:
        if not self._size:
            return {"state": self._seen.astype(np.float32)}
        images = {name: self._image(camera, self._size) for name, camera in self._views.items()}
        return {"state": self._seen[:OWN_NUMBERS].astype(np.float32), "images": images}

    def _image(self, camera: Any, size: int) -> Array:
        from hilt.envs.tabletop.renderer import Renderer

        if self._renderer is None or not self._renderer.fits(size, size):
            self._renderer = Renderer(self._world.model, max(size, VIEW_SIZE), max(size, VIEW_SIZE))
        image: Array = self._renderer.picture(self._world.data, camera, size, size)
        return image


def ready(names: Sequence[str], **options: Any) -> None:
    """For `hilt.envs.task.ready`: refuses tasks that cannot be made here, and makes nothing."""
    for name in names:
        full_name(name.partition("/")[2])


def full_name(task: str) -> str:
    """Meta-World's own name of a task, for a name with or without its version."""
    known = _scripts()
    name = task if task.endswith(VERSION) else f"{task}{VERSION}"
    if name not in known:
        raise UnknownNameError("task", f"metaworld/{task}", [f"metaworld/{one.removesuffix(VERSION)}" for one in known])
    return name


@functools.cache
def initial_states(task: str, split: str) -> list[Any]:
    """Returns the tasks of a split's numbered states, as Meta-World's `set_task` takes them."""
    drawn: list[Any] = _library().MT1(task, seed=SEEDS[split]).train_tasks
    return drawn


@functools.cache
def _library() -> Any:
    try:
        with environment(renderer_variables()):  # it imports MuJoCo
            importlib.import_module("metaworld.policies")
            return importlib.import_module("metaworld")
    except ImportError as error:
        broken = "" if (error.name or "").partition(".")[0] == "metaworld" else str(error)
        raise MissingPackageError("metaworld", "Meta-World", "metaworld", broken, INSTALL) from error


def _scripts() -> dict[str, Any]:
    scripts: dict[str, Any] = _library().policies.ENV_POLICY_MAP
    return scripts


def _draw_ellipsoids(model: Any) -> None:
    """Draws the meshes of the arm's links as ellipsoids of their size: they have 50,000 of the 68,000 triangles of a
    scene. Nothing touches them, so that motions stay the same; the hand, which touches objects, stays as it is."""
    from hilt.envs.tabletop.renderer import mujoco

    arm, mesh = model.body_rootid[model.body(ARM).id], int(mujoco.mjtGeom.mjGEOM_MESH)
    touches = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    links = (model.body_rootid[model.geom_bodyid] == arm) & (model.geom_type == mesh) & ~touches
    for geom in np.flatnonzero(links):
        center = np.empty(3)
        mujoco.mju_rotVecQuat(center, model.geom_aabb[geom, :3], model.geom_quat[geom])
        model.geom_pos[geom] += center
        model.geom_size[geom] = model.geom_aabb[geom, 3:]
        model.geom_type[geom], model.geom_dataid[geom] = int(mujoco.mjtGeom.mjGEOM_ELLIPSOID), -1
    model.vis.quality.offsamples = 0


def _camera(model: Any, name: str) -> Any:
    """Returns the number of a camera of the model, or the one of the workspace, for `Renderer.picture`."""
    if name == WORKSPACE:
        from hilt.envs.tabletop.renderer import free_camera

        return free_camera(**WORKSPACE_VIEW)
    known = [model.camera(number).name for number in range(model.ncam)]
    if name not in known:
        raise UnknownNameError("camera of Meta-World", name, [WORKSPACE, *known], setting="cameras")
    return known.index(name)
