"""MuJoCo, imported with a renderer that needs no screen, and images of its models."""

from __future__ import annotations

import atexit
import importlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hilt.core.errors import HiltError, optional_module
from hilt.core.platform import environment, renderer_name, renderer_variables
from hilt.core.tree import Array

RENDERING_CURE = (
    "`hilt doctor` tells which library is missing (Debian: apt install libegl1 libgl1); MUJOCO_GL=osmesa "
    "(libosmesa6) works without a graphics driver, and MUJOCO_GL=disable simulates without pictures."
)
try:
    with environment(renderer_variables()):  # it is read when mujoco is imported
        mujoco = optional_module("mujoco", "the tabletop simulation", "sim")
except (AttributeError, OSError, RuntimeError) as error:  # what PyOpenGL raises without its libraries
    raise HiltError(f"mujoco does not start with MUJOCO_GL={renderer_name()} ({error}): {RENDERING_CURE}") from error


class Renderer:
    """MuJoCo's renderer, in one thread of one process, with everything off that costs time and shows nothing. Give it
    the largest `height` and `width` that will be asked for."""

    _first_process = 0  # that rendered

    def __init__(self, model: Any, height: int, width: int):
        self.room, self._model, self._process = (height, width), model, os.getpid()
        if Renderer._first_process not in (0, self._process):
            raise HiltError(
                "this process was forked from one that had rendered, and OpenGL does not "
                "survive that: spawn it instead."
            )
        Renderer._first_process = self._process
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        # by its name: mujoco made its own choice when it was imported, perhaps before MUJOCO_GL was set here
        kind = renderer_name()
        try:
            module = importlib.import_module(f"mujoco.{kind}") if kind in ("egl", "osmesa") else mujoco
            # Mesa's: threads do not help images this small
            with environment({"LP_NUM_THREADS": os.environ.get("LP_NUM_THREADS", "0")}):
                self._gl = module.GLContext(width, height)
                self._gl.make_current()
                self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        except Exception as error:
            raise HiltError(f"no picture can be rendered with MUJOCO_GL={kind} ({error}): {RENDERING_CURE}") from error
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if not _OPEN:  # registered after mujoco's own, so that it runs before it: the display must still be there
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _OPEN.add(self)

    def fits(self, height: int, width: int) -> bool:
        return self._process == os.getpid() and height <= self.room[0] and width <= self.room[1]

    def picture(self, data: object, camera: Any, height: int, width: int) -> Array:
        """`camera`: the number of one of the model, or one of `free_camera`."""
        self._gl.make_current()
        if not isinstance(camera, mujoco.MjvCamera):
            self._camera.fixedcamid = camera
            camera = self._camera
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, camera, everything, self._scene)
        view, pixels = mujoco.MjrRect(0, 0, width, height), np.empty((height, width, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, view, self._context)
        return np.ascontiguousarray(pixels[::-1])

    def close(self) -> None:
        if getattr(self, "_context", None) is None:
            return
        if self._process == os.getpid():
            self._gl.make_current()
            self._context.free()
            self._gl.free()
        else:
            _LEFT_TO_THE_PARENT.append(self._gl)  # to free it here would hang
        self._context = None

    __del__ = close


def free_camera(lookat: Sequence[float], distance: float, azimuth: float, elevation: float) -> Any:
    """Returns a camera that is not in the model: `distance` from the point `lookat`, seen in the direction of these
    angles, in degrees."""
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:], camera.distance, camera.azimuth, camera.elevation = lookat, distance, azimuth, elevation
    return camera


_OPEN: weakref.WeakSet[Renderer] = weakref.WeakSet()
_LEFT_TO_THE_PARENT: list[Any] = []


def _close_all() -> None:
    for renderer in list(_OPEN):
        renderer.close()
