"""SimpleVLA-RL's environments: a process for an episode of LIBERO, a wrapper for one of RoboTwin, over our tasks."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hilt.compat.simplevla.dataloader import place_of
from hilt.core.errors import ConfigError, RequestError, UnknownNameError, optional_module
from hilt.core.tree import Observation
from hilt.envs import libero
from hilt.envs.env_protocol import Env, Info
from hilt.envs.pool import Pool
from hilt.envs.task import make
from hilt.policies.io.preprocess import center_crop
from hilt.policies.vla.observation_adapters import suite
from hilt.recipes.simplevla_names import split_name
from hilt.vla.episode import Start

if TYPE_CHECKING:
    from PIL import Image

VERSIONS = {"1.0": "robotwin", "2.0": "robotwin2"}


def center_crop_image(image: np.ndarray | Image.Image) -> np.ndarray | Image.Image:
    """The middle of a picture with 0.9 of its area, as 224 x 224 pixels in RGB; of
    PIL's Image, or of an array uint8 [H, W, 3]."""
    if isinstance(image, np.ndarray):
        return center_crop(image)
    pillow = optional_module("PIL.Image", "center_crop_image", "images", package="pillow")
    return pillow.fromarray(center_crop(np.array(image.convert("RGB"))))


def get_libero_env(task: Any, model_family: str = "openvla", resolution: int = 256) -> tuple[LiberoSimulator, str]:
    """A task of LIBERO with its own pictures, shadows among them, and its sentence. `task` is LIBERO's own
    (``task_suite.get_task(3)``), or our name of it, ``libero_10/3``."""
    if model_family != "openvla":
        raise UnknownNameError("model_family", model_family, ["openvla"])
    if not isinstance(task, str):
        task = f"{task.problem_folder}/{libero.task_names(task.problem_folder).index(task.name)}"
    env = make(task, image_size=resolution, wait_steps=0, shadows=True)
    return LiberoSimulator(env), str(env.get_wrapper_attr("instruction"))


class LiberoSimulator:
    """LIBERO's own interface over our task: ``reset``, ``set_init_state``, ``step`` with four results, ``close``."""

    def __init__(self, env: Env):
        self.env = env

    def seed(self, seed: int) -> None:
        """Does nothing but check: where fixtures stand is that of seed 0 in every episode, as there."""
        if seed:
            raise ConfigError(
                f"seed({seed}): LIBERO's fixtures stand where seed 0 puts them, as in SimpleVLA-RL; give 0."
            )

    def reset(self) -> Observation:
        return self.env.reset(seed=0)[0]

    def set_init_state(self, init_state: npt.ArrayLike) -> Observation:
        """Begins in a state as LIBERO flattens it; nothing is waited for."""
        result: Observation = self.env.get_wrapper_attr("begin")(init_state)
        return result

    def step(self, action: npt.ArrayLike) -> tuple[Observation, float, bool, Info]:
        """Observation, reward, whether it succeeded, and the task's facts."""
        observation, reward, terminated, _, info = self.env.step(np.asarray(action, np.float64))
        return observation, float(reward), bool(terminated), info

    def close(self) -> None:
        self.env.close()


def env_worker(
    task_name: str,
    task_id: int,
    trial_id: int,
    config: Any,
    input_queue: Any,
    output_queue: Any,
    is_valid: bool,
    global_steps: int,
    max_steps: int,
) -> None:
    """One episode of LIBERO, for a process or a thread of its own: chunks of a policy's
    actions come by `input_queue`, None ends it.

    The first answer has the type ``init`` and `task_description`; each other has the type ``step``; all have
    `obs`, `active`, `complete`, `finish_step` and `valid_images`: with `is_valid`, the picture after the chunk.
    Grippers are mapped from the policy's units here.
    """
    name = f"{task_name}_task_{task_id}_trial_{trial_id}"
    views = suite(task_name)
    options = {"step_limit": max_steps, "wait_steps": int(config.num_steps_wait), "shadows": True}
    with contextlib.closing(Pool(0, 1, task_options=options)) as pool:
        split, state = place_of(task_name, trial_id)
        pool.start(0, Start(f"{task_name}/{task_id}", split, state, 0))
        answer, steps = _only(pool), 0
        facts = {
            "type": "init",
            "task_description": answer.instruction,
            "task_file_name": name,
            "global_steps": global_steps,
        }
        while True:
            over, success = bool(answer.terminated or answer.truncated), bool(answer.success)
            seen = {key: np.array(value) for key, value in answer.observation.items()}
            images = [np.array(views.views(seen)["full_image"])] if is_valid else []
            report = {
                "obs": seen,
                "active": not over,
                "complete": over and success,
                "finish_step": steps,
                "valid_images": images,
            }
            output_queue.put({**facts, **report})
            actions = input_queue.get()
            if actions is None:
                return
            pool.step(0, np.asarray(views.command(np.asarray(actions)), np.float32))
            answer, facts = _only(pool), {"type": "step"}
            steps += int(answer.executed)


def _only(pool: Pool) -> Any:
    (reply,) = pool.collect([0])
    if reply.error:
        raise RequestError(f"the simulator failed:\n{reply.error}")
    return reply


class RobotwinEnvWrapper:
    """One episode of RoboTwin, which several threads may hold: ``initialize``, ``get_obs``,
    ``get_instruction``, ``step``, ``close``."""

    def __init__(self, task_name: str, trial_id: int, trial_seed: int, config: Any = None, version: str = ""):
        """`version`: "1.0" or "2.0"; empty, it is that of the name (``robotwin2_lift_pot``). `config` has
        ``twin2_task_config`` and ``twin2_instruction_type`` of the second."""
        name = task_name if task_name.startswith("robotwin") else f"{VERSIONS.get(version, version)}_{task_name}"
        self.version, (self.task_name, *more) = split_name(name)
        if more or (version and VERSIONS.get(version) != self.version):
            raise ConfigError(
                f"task_name={task_name}, version={version}: expected one task, such as lift_pot, and its version."
            )
        self.trial_id, self.trial_seed, self.config = trial_id, trial_seed, config
        self.lock = threading.RLock()
        self.env: Any = None
        self.active, self.complete, self.finish_step = True, False, 0
        self._place = place_of(name, trial_seed)

    def initialize(self) -> None:
        """Makes the scene of the trial's seed."""
        options = {}
        if self.version == "robotwin2":
            there = {"task_config": "twin2_task_config", "instruction_type": "twin2_instruction_type"}
            options = {
                ours: str(getattr(self.config, name)) for ours, name in there.items() if hasattr(self.config, name)
            }
        with self.lock:
            if self.env is None:
                self.env = make(f"{self.version}/{self.task_name}", **options)
            self._seen, _ = self.env.reset(options=dict(zip(("split", "state"), self._place, strict=True)))
            self.active, self.complete, self.finish_step = True, False, 0

    def get_obs(self) -> Any:
        with self.lock:
            self._check()
            return self._seen

    def get_instruction(self) -> str:
        with self.lock:
            self._check()
            return str(self.env.get_wrapper_attr("instruction"))

    def step(self, action: npt.ArrayLike) -> tuple[Any, bool]:
        """Carries out actions [n, 14] until one succeeds, and looks once; gives
        what is seen, and whether it succeeded."""
        with self.lock:
            self._check()
            self._seen, rewards, done, truncated, _ = self.env.get_wrapper_attr("step_chunk")(np.atleast_2d(action))
            self.finish_step += len(rewards)
            if done or truncated:
                self.active, self.complete = False, bool(done)
            return self._seen, bool(done)

    def close(self) -> None:
        with self.lock:
            if self.env is not None:
                self.env.close()
            self.env = None

    def _check(self) -> None:
        if self.env is None:
            raise ConfigError("this episode of RoboTwin has not begun, or is closed: call initialize() first.")
