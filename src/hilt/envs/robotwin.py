"""RoboTwin's tasks of two arms: ``robotwin2/lift_pot`` (version 2.0) and ``robotwin/shoe_place`` (version 1.0).

RoboTwin is no package: clone it, install what it asks for, and give its folder as ``root`` or in
$HILT_ROBOTWIN. Observations are as it gives them, copied; `hilt.policies.vla.observation_adapters` takes the
head and wrist cameras and the joints from them, and divides the grippers of 1.0 by 0.045. An action is the
joints to go to, seven of each arm with its gripper.

A numbered state is a seed. Those of training and of evaluation are apart (``iid`` and ``ood`` upstream): for 1.0 they
begin at 100,000 and at 100,000,000; for 2.0 they are in two files of seeds for which a scene is known to be stable. A
seed whose scene falls over gives way to the next one that no other state has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import yaml  # type: ignore[import-untyped]
from gymnasium import spaces

from hilt.core.errors import ConfigError, DeadlineError, StorageError, UnknownNameError
from hilt.core.names import import_path
from hilt.core.tree import Array, Observation
from hilt.core.trust import permit_folder
from hilt.envs.env_protocol import Info, StepResult, choose_state

TASKS = {
    "robotwin": (
        "block_hammer_beat",
        "block_handover",
        "blocks_stack_easy",
        "blocks_stack_hard",
        "bottle_adjust",
        "container_place",
        "diverse_bottles_pick",
        "dual_bottles_pick_easy",
        "dual_bottles_pick_hard",
        "dual_shoes_place",
        "empty_cup_place",
        "mug_hanging_easy",
        "mug_hanging_hard",
        "pick_apple_messy",
        "put_apple_cabinet",
        "shoe_place",
        "tool_adjust",
    ),
    "robotwin2": (
        "beat_block_hammer",
        "blocks_ranking_rgb",
        "click_bell",
        "handover_block",
        "handover_mic",
        "lift_pot",
        "move_can_pot",
        "move_pillbottle_pad",
        "move_stapler_pad",
        "pick_dual_bottles",
        "place_a2b_left",
        "place_a2b_right",
        "place_container_plate",
        "place_empty_cup",
        "place_mouse_pad",
        "place_phone_stand",
        "place_shoe",
        "put_bottles_dustbin",
        "shake_bottle",
        "stack_blocks_two",
        "stack_bowls_two",
    ),
}
"""Of each version"""
FIRST_SEED = {"train": 100_000, "eval": 100_000_000}
"""Of version 1.0, and of 2.0 without files"""
STATES = {"train": 1_000, "eval": 128}
STATE_SIZE = 14
CAMERAS = ("head_camera", "left_camera", "right_camera")

_UNSTABLE = 20
"""Scenes that may fall over before it is no accident"""
_LOCK_TIMEOUT_S = 600.0
"""Seconds to wait for another thread that uses the simulator"""
_SETUP = threading.Lock()  # of which there is one in a process, whatever the number of scenes
_WHERE = "clone RoboTwin, install what its page asks for, and give root=FOLDER or set HILT_ROBOTWIN"


class RobotwinEnv(gymnasium.Env[Any, Any]):
    """One task. `task_config` and `instruction_type` are RoboTwin's own words, for 2.0.
    ``train_seeds`` and ``eval_seeds`` are files of seeds, ``{"lift_pot": {"success_seeds": [...]}}``.
    ``step_limit`` counts actions; None takes RoboTwin's."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - gymnasium has it so
    render_mode = "rgb_array"

    def __init__(
        self,
        version: str,
        task: str,
        *,
        root: str | os.PathLike[str] | None = None,
        task_config: str = "demo_randomized",
        instruction_type: str = "unseen",
        train_seeds: str = "",
        eval_seeds: str = "",
        step_limit: int | None = None,
    ):
        self.version, self.task = version, task
        self._root = folder(version, task, root)
        self._seeds = seeds(version, task, train_seeds, eval_seeds)
        self.initial_states = {split: len(numbers) for split, numbers in self._seeds.items()}
        self._instruction_type = instruction_type
        self._lock = threading.Lock()
        self._arguments = _arguments(self._root, version, task, task_config)
        self._sim: Any = None
        self._words, self._steps, self._over = task.replace("_", " "), 0, True
        limit = self._limit()
        if step_limit is not None and not 1 <= step_limit <= limit:
            raise ConfigError(
                f"step_limit={step_limit} cannot work: RoboTwin ends an episode of {task} after {limit} actions."
            )
        self.step_limit = step_limit or limit
        self.action_space = spaces.Box(-np.inf, np.inf, (STATE_SIZE,), np.float32)
        self.observation_space = _space(self._seen())

    def _limit(self) -> int:
        """Only a scene tells how long it may take, and the size of its pictures."""
        self._begin("train", 0)
        return int(self._sim.step_lim)

    @property
    def instruction(self) -> str:
        return self._words

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin in ``options={"split": "train", "state": 7}``; without a state, a random one of the split."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"split", "state"}:
            raise UnknownNameError("reset option", min(unknown), ["split", "state"])
        split = options.get("split", "train")
        state = choose_state(self.initial_states, split, options.get("state"), self.np_random)
        used = self._begin(split, state)
        return self._seen(), {"succeed": False, "split": split, "state": state, "seed": used}

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, rewards, terminated, truncated, info = self.step_chunk(np.asarray(action)[None])
        return observation, float(rewards[0]), terminated, truncated, info

    def step_chunk(self, actions: npt.ArrayLike) -> tuple[Observation, Array, bool, bool, Info]:
        """Carry out actions until one ends the episode, and look once, at the end: a
        reward for each that was carried out."""
        actions = np.asarray(actions, np.float64)
        if actions.ndim != 2 or len(actions) == 0 or actions.shape[1] != STATE_SIZE or not np.isfinite(actions).all():
            raise ConfigError(
                f"RoboTwin takes actions of {STATE_SIZE} finite numbers; given {actions.shape}: {actions.tolist()}."
            )
        if self._over:
            raise ConfigError("this episode of RoboTwin is over, or has not begun: call reset first.")
        rewards: list[float] = []
        with self._alone():
            act = getattr(self._sim, "take_action", None) or self._sim.step
            for action in actions[: self.step_limit - self._steps]:
                act(action.copy())
                succeed = bool(self._sim.eval_success)
                rewards.append(float(succeed))
                if succeed:
                    break
        self._steps += len(rewards)
        truncated = self._steps >= self.step_limit
        self._over = succeed or truncated
        return self._seen(), np.array(rewards, np.float32), succeed, truncated, {"succeed": succeed}

    def render(self) -> Array:
        """The head camera, for people."""
        picture: Array = self._seen()["observation"]["head_camera"]["rgb"]
        return picture

    def close(self) -> None:
        with self._alone():
            if self._sim is not None:
                self._sim.close_env()
            self._sim = None

    def _begin(self, split: str, state: int) -> int:
        """A scene of the state's seed, or of the first after it that stands; gives the seed."""
        numbers, taken = self._seeds[split], {seed for each in self._seeds.values() for seed in each}
        following = itertools.count(max(numbers) + 1 + state, len(numbers))
        for seed in [
            numbers[state],
            *itertools.islice((seed for seed in following if seed not in taken), _UNSTABLE - 1),
        ]:
            try:
                with self._alone(), _quiet(self._root):
                    self._set_up(seed)
            except Exception as error:
                if type(error).__name__ != "UnStableError":
                    raise
                continue
            self._steps, self._over = 0, False
            return seed
        raise ConfigError(
            f"{self.version}/{self.task}: {_UNSTABLE} scenes for state {state} of {split!r} fell "
            "over; give it other seeds."
        )

    def _set_up(self, seed: int) -> None:
        if self._sim is not None:
            self._sim.close_env()
        self._sim = _task_class(self._root, self.task)()
        self._sim.setup_demo(now_ep_num=0, seed=seed, is_test=True, **self._arguments)
        if self.version == "robotwin2":
            self._words = self._described(seed)
            self._sim.set_instruction(instruction=self._words)
        elif hasattr(self._sim, "get_instruction"):
            self._words = str(self._sim.get_instruction())

    def _described(self, seed: int) -> str:
        """One of the sentences that RoboTwin has for this scene, the same for this seed each time."""
        if hasattr(self._sim, "get_info"):
            facts = self._sim.get_info()
        else:  # then only its own demonstration tells what is what, and the scene is made again
            facts = self._sim.play_once()["info"]
            self._sim.close_env()
            self._sim.setup_demo(now_ep_num=0, seed=seed, is_test=True, **self._arguments)
        describe = importlib.import_module("generate_episode_instructions").generate_episode_descriptions
        sentences = describe(self.task, [facts], 1)[0]
        if self._instruction_type not in sentences:
            raise UnknownNameError("instruction_type", self._instruction_type, sentences)
        return str(np.random.default_rng(seed).choice(sentences[self._instruction_type]))

    def _seen(self) -> dict[str, Any]:
        """A copy: what RoboTwin holds is not changed, and does not change what was given."""
        with self._alone():
            raw = self._sim.get_obs()
        pictures = raw["observation"]
        cameras = {
            camera: {"rgb": np.array(pictures[camera]["rgb"], np.uint8)} for camera in CAMERAS if camera in pictures
        }
        joints = raw["joint_action"]
        vector = (
            {"vector": np.array(joints["vector"], np.float32)}
            if self.version == "robotwin2"
            else np.array(joints, np.float32)
        )
        return {"observation": cameras, "joint_action": vector}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise DeadlineError(
                f"waited {_LOCK_TIMEOUT_S:g} s for another thread that uses this scene of {self.version}/{self.task}."
            )
        try:
            yield
        finally:
            self._lock.release()


robotwin, robotwin2 = (functools.partial(RobotwinEnv, version) for version in TASKS)
"""What `hilt.envs.task.make` calls with the name of a task"""


def ready(
    names: Sequence[str], root: str | None = None, *, train_seeds: str = "", eval_seeds: str = "", **options: Any
) -> None:
    """For `hilt.envs.task.ready`: refuses tasks that cannot be made here, in one sentence, and makes nothing."""
    for version, _, task in (name.partition("/") for name in names):
        folder(version, task, root)
        seeds(version, task, train_seeds, eval_seeds)


def seeds(version: str, task: str, train_seeds: str = "", eval_seeds: str = "") -> dict[str, list[int]]:
    """The seed of each numbered state: ``train`` (iid) and ``eval`` (ood), which have none in common."""
    found: dict[str, list[int]] = {}
    for split, given in (("train", train_seeds), ("eval", eval_seeds)):
        if not given:
            found[split] = [*range(FIRST_SEED[split], FIRST_SEED[split] + STATES[split])]
            continue
        try:
            listed = json.loads(Path(given).read_text())
            found[split] = [int(seed) for seed in listed[task]["success_seeds"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{split}_seeds={given}: expected a file {{"{task}": {{"success_seeds": [1, 2]}}}} ({error!r}).'
            ) from error
        if not found[split]:
            raise ConfigError(f"{split}_seeds={given} has no seeds for {version}/{task}.")
    if both := set(found["train"]) & set(found["eval"]):
        raise ConfigError(
            f"{version}/{task}: seed {min(both)} is both in training and in evaluation; take "
            "it out of one of the files."
        )
    return found


def folder(version: str, task: str, root: str | os.PathLike[str] | None = None) -> Path:
    """RoboTwin's folder, which has this task."""
    if version not in TASKS:
        raise UnknownNameError("version of RoboTwin", version, TASKS)
    if task not in TASKS[version]:
        raise UnknownNameError("task", f"{version}/{task}", [f"{version}/{name}" for name in TASKS[version]])
    given = root or os.environ.get("HILT_ROBOTWIN")
    if not given:
        raise StorageError(f"{version}/{task} needs RoboTwin, which is not a package: {_WHERE}.")
    path = Path(given).expanduser().resolve()
    if root:
        permit_folder(path, "root")
    if not (path / "envs" / f"{task}.py").exists():
        raise StorageError(f"{version}/{task}: there is no envs/{task}.py in {path}; {_WHERE}.")
    return path


# --- RoboTwin itself ---


def _task_class(root: Path, task: str) -> Any:
    try:
        return getattr(importlib.import_module(f"envs.{task}"), task)
    except ImportError as error:
        raise StorageError(
            f"RoboTwin in {root} cannot be imported ({error}); install what its page asks for."
        ) from error


def _arguments(root: Path, version: str, task: str, task_config: str) -> dict[str, Any]:
    """What `setup_demo` wants to know, put together from RoboTwin's files as its own evaluation does."""
    configs = root / "task_config"
    found = _read(configs / f"{task_config if version == 'robotwin2' else task}.yml")
    cameras = _read(configs / "_camera_config.yml")
    found |= {"task_name": task, "eval_mode": True, "render_freq": 0}
    if version == "robotwin":
        for camera in ("head", "wrist", "front"):
            kind = cameras[found[f"{camera}_camera_type"]]
            found |= {f"{camera}_camera_{key}": kind[key] for key in ("fovy", "w", "h")}
        return found
    head = cameras[found["camera"]["head_camera_type"]]
    found |= {
        "head_camera_h": head["h"],
        "head_camera_w": head["w"],
        "eval_video_log": False,
        "task_config": task_config,
    }
    bodies, body = _read(configs / "_embodiment_config.yml"), found["embodiment"]
    left, right = body[0], body[1 if len(body) == 3 else 0]
    for side, name in (("left", left), ("right", right)):
        found[f"{side}_robot_file"] = bodies[name]["file_path"]
        found[f"{side}_embodiment_config"] = _read(root / bodies[name]["file_path"] / "config.yml")
    found["dual_arm_embodied"] = len(body) == 1
    return found | ({"embodiment_dis": body[2]} if len(body) == 3 else {})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise StorageError(f"RoboTwin's file {path} is not there; {_WHERE}.")
    return dict(yaml.safe_load(path.read_text()) or {})


def _space(tree: Mapping[str, Any]) -> spaces.Dict:
    def of(leaf: Array) -> spaces.Space:
        if isinstance(leaf, Mapping):
            return _space(leaf)
        return (
            spaces.Box(0, 255, leaf.shape, np.uint8)
            if leaf.dtype == np.uint8
            else spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
        )

    return spaces.Dict({key: of(leaf) for key, leaf in tree.items()})


@contextlib.contextmanager
def _quiet(root: Path) -> Iterator[None]:
    """RoboTwin's own place to work, one scene at a time: it finds its files from there, and seeds the global
    generators, which everybody else finds as they were."""
    if not _SETUP.acquire(timeout=_LOCK_TIMEOUT_S):
        raise DeadlineError(f"waited {_LOCK_TIMEOUT_S:g} s for another scene of RoboTwin to be made.")
    here, drawn, drawn_by_numpy = os.getcwd(), random.getstate(), np.random.get_state()
    os.chdir(root)
    try:
        with import_path(str(root), str(root / "description/utils")):
            yield
    finally:
        os.chdir(here)
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        _SETUP.release()
