"""LIBERO's suites as tasks, in LIBERO's own simulator: ``libero_spatial/3``, ``libero_10/0``.

Observations have LIBERO's names, and its pictures are upside down as there;
`hilt.policies.vla.observation_adapters` turns them and maps the gripper. An action is ``[dx dy dz drx dry drz
grip]`` in [-1, 1], the gripper opens at -1 and closes at +1.

An episode begins in one of the 50 states that LIBERO stores for a task, after `wait_steps` steps in which
things fall to rest. The states are shared out: no one of training is one of evaluation. Two further splits
are for `hilt eval`: "published" has all 50, which are the 500 episodes of a suite that others report, and
"new" has 50 placements that LIBERO's own reset draws, none of which is in its files. Fixtures are no part of
a stored state: they stand where LIBERO's first reset
with seed 0 puts them, in every episode, so that a state is one and the same scene each time.

Pictures cost ten times as much as physics: of a chunk of actions (`step_chunk`) only the last is seen. They are those
that LIBERO gives with that step, but for shadows, which are left out unless asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium
import numpy as np
from gymnasium import spaces

from hilt.core.errors import ConfigError, MissingPackageError, StorageError, UnknownNameError
from hilt.core.platform import environment
from hilt.core.unpickle import safe_load
from hilt.core.validate import check_values
from hilt.envs.env_protocol import choose_state
from hilt.envs.libero_expert import expert

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
"""How many tasks each has"""
STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Those of OpenVLA's evaluation; waiting is not counted"""
SPLITS = {"train": range(30), "eval": range(30, 40), "test": range(40, 50)}
"""The stored states of each split"""
STORED = 50
NEW = 50
"""Placements of the split "new", as many as are stored"""
FIRST_NEW = 1_000_000
"""Their seeds begin here; LIBERO's files were drawn with none of these"""
CAMERAS = {"agentview_image": "agentview", "robot0_eye_in_hand_image": "robot0_eye_in_hand"}
STATE = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
WAIT = np.array([0, 0, 0, 0, 0, 0, -1.0])
"""The action of a step in which nothing is done: the arm holds still, the gripper opens"""
CONTROL_HZ = 20
QUALITIES = ("full", "draft")
"""As LIBERO draws, or the arm by its collision shapes and without antialiasing"""

_LISTED = 12
_SHADOW, _REFLECTION = 0, 2  # of mujoco.mjtRndFlag
_SHOWN, _HIDDEN = 1, 5  # groups of geoms for robosuite's renderer
_LARGE_MESH = 5000
_OPTIONS = ("assets", "image_size", "step_limit", "wait_steps", "splits")
INSTALL = "pip install 'hilt[libero]' && pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1"
"""Both parts: what LIBERO imports, and LIBERO itself without its pins"""
_WHERE = "give assets=FOLDER or set HILT_LIBERO_ASSETS to LIBERO's assets (on the hub: lerobot/libero-assets)"


@dataclass(frozen=True)
class LiberoPictures:
    """How the scene is drawn."""

    shadows: bool = False
    """LIBERO renders with them, and so should whoever evaluates a policy that was trained on its images"""
    reflections: bool = True
    """As in LIBERO; without them an image takes half the time"""
    cameras: Sequence[str] = tuple(CAMERAS.values())
    """Those that are rendered: both of LIBERO's, or one"""
    quality: str = "full"
    """ "draft": the arm is drawn by its collision shapes, without antialiasing. Without a GPU an image takes a third
    of the time; only policies that were trained on such images know them"""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LiberoPictures:
        known = [each.name for each in dataclasses.fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise UnknownNameError("option of LIBERO", unknown[0], [*_OPTIONS, *known])
        made = cls(**options)
        if not made.cameras:
            raise ConfigError(f"cameras=[]: expected at least one of {', '.join(CAMERAS.values())}.")
        for camera in made.cameras:
            if camera not in CAMERAS.values():
                raise UnknownNameError("camera of LIBERO", camera, CAMERAS.values())
        if made.quality not in QUALITIES:
            raise UnknownNameError("quality of images", made.quality, QUALITIES)
        return made

    def named(self) -> dict[str, str]:
        """The name of each camera's image in observations, to the camera."""
        return {key: camera for key, camera in CAMERAS.items() if camera in self.cameras}


class LiberoEnv(gymnasium.Env[Any, Any]):
    """One task of a suite, by its number.

    ``assets`` is the folder of meshes and textures; None takes $HILT_LIBERO_ASSETS, else what lies beside the
    installed package. ``image_size`` is in pixels, None for no pictures. ``step_limit`` counts steps of 50 ms; None
    takes the suite's. ``splits`` gives other stored states to the splits, ``{"train": [0, 50], "eval": [0, 50]}``:
    from the first up to the second, which is not in it. Further options are those of `LiberoPictures`.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012 - gymnasium has it so
    render_mode = "rgb_array"
    control_hz = float(CONTROL_HZ)

    def __init__(
        self,
        suite: str,
        task: str | int,
        *,
        assets: str | os.PathLike[str] | None = None,
        image_size: int | None = 256,
        step_limit: int | None = None,
        wait_steps: int = 10,
        splits: Mapping[str, Sequence[int]] | None = None,
        **pictures: Any,
    ):
        number = _number(suite, task)
        self._splits = _shared_out(splits)
        check_values(minimum=1, image_size=image_size, step_limit=step_limit)
        check_values(minimum=0, wait_steps=wait_steps)
        self._assets = assets_folder(assets)
        self.image_size, self.step_limit, self._wait = image_size, step_limit or STEP_LIMITS[suite], wait_steps
        self._pictures = LiberoPictures.of(pictures)
        self._cameras = self._pictures.named()
        self.initial_states = {split: len(states) for split, states in self._splits.items()} | {
            "published": STORED,
            "new": NEW,
        }
        self.states_of_train = {
            split: len(set(states) & set(self._splits.get("train", ()))) for split, states in self._stored_of().items()
        }
        """How many states of a split are of the split train, too"""
        name = task_names(suite)[number]
        self.instruction = re.sub(r"^.*SCENE\d+_", "", name).replace("_", " ")
        self._stored = stored_states(suite, number)
        self._suite, self._number, self._bddl = suite, number, _root() / "bddl_files" / suite / f"{name}.bddl"
        self._made: Any = None
        self._steps, self._over = 0, True
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        parts: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(-np.inf, np.inf, (size,), np.float32) for key, size in STATE.items()
        }
        if image_size is not None:
            parts |= {key: spaces.Box(0, 255, (image_size, image_size, 3), np.uint8) for key in self._cameras}
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin in ``options={"split": "train", "state": 7}``; without a state, a random one of the split."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"split", "state"}:
            raise UnknownNameError("reset option", min(unknown), ["split", "state"])
        split = options.get("split", next(iter(self.initial_states)))
        state = choose_state(self.initial_states, split, options.get("state"), self.np_random)
        stored = self._stored_of()
        raw = self.begin(self._stored[stored[split][state]] if split in stored else self.new_placement(state))
        return self._seen(raw), {"succeed": self.succeeded(), "split": split, "state": state}

    def _stored_of(self) -> dict[str, Sequence[int]]:
        """The stored states of each split that has such."""
        return {**self._splits, "published": range(STORED)}

    def new_placement(self, number: int) -> np.ndarray:
        """A state that LIBERO's own reset draws, for `begin`: the same for a number
        each time, and not solved already."""
        for turn in range(100):
            with _seeded(FIRST_NEW + number + turn * NEW):
                _reset(self._sim)
            if not self.succeeded():
                return self.state()
        raise ConfigError(
            f"{self._suite}/{self._number}: 100 new placements in a row are solved already. Take --split published."
        )

    def begin(self, flattened: Any) -> Mapping[str, Any]:
        """Set the whole simulator to a state, as LIBERO flattens it, and wait; gives what is then seen."""
        sim = self._sim
        self._look(False)
        with _seeded():
            _reset(sim)
        for robot in sim.robots:
            # it would go on from where the last episode ended
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        if self.image_size is not None:
            effects = {_SHADOW: self._pictures.shadows, _REFLECTION: self._pictures.reflections}
            for effect, wanted in effects.items():  # of a scene that a hard reset makes anew
                sim.sim._render_context_offscreen.scn.flags[effect] = wanted
        self._look(self._wait == 0)
        self._set(flattened)
        raw: Mapping[str, Any] = sim._get_observations(force_update=True)
        for left in range(self._wait, 0, -1):
            self._look(left == 1)
            raw = self._step(WAIT)[0]
        self._steps, self._over = 0, False
        return raw

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, rewards, terminated, truncated, info = self.step_chunk(np.asarray(action)[None])
        return observation, float(rewards[0]), terminated, truncated, info

    def step_chunk(self, actions: Any) -> tuple[Any, np.ndarray, bool, bool, dict[str, Any]]:
        """Carry out actions until one ends the episode, and look once, at the end: a
        reward for each that was carried out."""
        actions = np.asarray(actions, np.float64)
        if actions.ndim != 2 or len(actions) == 0 or actions.shape[1] != 7 or not np.isfinite(actions).all():
            raise ConfigError(
                f"LIBERO takes actions of 7 finite numbers; given an array of {actions.shape}: {actions.tolist()}."
            )
        if self._over:
            raise ConfigError("this episode of LIBERO is over, or has not begun: call reset first.")
        rewards: list[float] = []
        seeing = False
        for left in range(min(len(actions), self.step_limit - self._steps), 0, -1):
            seeing = left == 1
            self._look(seeing)
            raw, reward, succeed, _ = self._step(actions[len(rewards)].clip(-1.0, 1.0))
            self._steps += 1
            rewards.append(float(reward))
            if succeed:
                break
        truncated = self._steps >= self.step_limit
        self._over = bool(succeed) or truncated
        if not seeing:  # an action before the last one has succeeded
            raw = {
                **raw,
                **{key: self._render(camera) for key, camera in self._cameras.items() if self.image_size is not None},
            }
        return self._seen(raw), np.array(rewards, np.float32), bool(succeed), truncated, {"succeed": bool(succeed)}

    def expert(self) -> Callable[[], np.ndarray]:
        """A scripted expert for this episode, which reads the poses of everything in
        the simulator: each call gives the next action."""
        return expert(self._sim)

    def succeeded(self) -> bool:
        return bool(self._sim._check_success())

    def state(self) -> np.ndarray:
        """The whole simulator's state, flattened as LIBERO stores it, for `begin`."""
        result: np.ndarray = self._sim.sim.get_state().flatten()
        return result

    def snapshot(self) -> tuple[int, bool, list[np.ndarray]]:
        """All that the rest of the episode depends on; ``restore`` continues from it bit for bit."""
        return (
            self._steps,
            self._over,
            [self.state(), *(np.array(getattr(owner, name)) for owner, name in self._besides())],
        )

    def restore(self, snapshot: tuple[int, bool, list[np.ndarray]]) -> None:
        self._steps, self._over, (state, *besides) = snapshot
        self._set(state)
        # the solver's last answer, too, which `_set` has changed
        for (owner, name), part in zip(self._besides(), besides, strict=True):
            getattr(owner, name)[...] = part

    def _besides(self) -> list[tuple[Any, str]]:
        """What robosuite keeps from step to step that is not in a flattened state: owners and names of arrays."""
        data, (robot,) = self._sim.sim.data, self._sim.robots
        goal = [(robot.controller, "goal_pos"), (robot.controller, "goal_ori")]
        return [(data, "qacc_warmstart"), (data, "ctrl"), (robot.gripper, "current_action"), *goal]

    def _set(self, flattened: Any) -> None:
        sim = self._sim
        sim.sim.set_state_from_flattened(np.asarray(flattened))
        sim.sim.forward()
        sim._check_success()
        sim._post_process()

    def render(self) -> Any:
        """What the camera sees, the right way up, for people."""
        return None if self.image_size is None else self._render("agentview")[::-1].copy()

    def close(self) -> None:
        if self._made is not None:
            if self.image_size is not None:
                self._make_current()  # what is freed has numbers that another simulator uses, too
                self._made.sim._render_context_offscreen.con.free()
            self._made.close()
        self._made, self._over = None, True

    @property
    def _sim(self) -> Any:
        """Made when it is first needed: it takes seconds, and a gigabyte with its textures."""
        if self._made is None:
            _check_assets(self._suite, [self._number], self._assets)
            self._made = _simulator(self._bddl, self._assets, self.image_size)
            from hilt.envs.robosuite.osc_step import fast_step  # it imports mujoco, which recipes do without

            self._step = fast_step(self._made)
            if self._pictures.quality == "draft" and self.image_size is not None:
                _draw_draft(self._made.sim)
            # the rest is about objects, which a policy does not see
            for key, observable in self._made._observables.items():
                if key not in {*STATE, *self._cameras}:
                    observable.set_enabled(False)
                    observable.set_active(False)
        return self._made

    def _look(self, seeing: bool) -> None:
        """Whether the next step renders: when the rest is measured, for which robosuite counts the time that passed."""
        observables = self._sim._observables
        if seeing:
            self._make_current()
        for key in self._cameras.keys() & observables.keys():
            observables[key]._enabled = seeing
            observables[key]._sampled = observables["robot0_eef_pos"]._sampled
            observables[key]._time_since_last_sample = observables["robot0_eef_pos"]._time_since_last_sample

    def _make_current(self) -> None:
        """Let OpenGL draw with what this simulator has loaded: robosuite leaves the one current that was made last, and
        of two in a process the first would be drawn with the meshes and textures of the second."""
        if self.image_size is not None:
            self._sim.sim._render_context_offscreen.gl_ctx.make_current()

    def _render(self, camera: str) -> np.ndarray:
        self._make_current()
        result: np.ndarray = self._sim.sim.render(camera_name=camera, width=self.image_size, height=self.image_size)
        return result

    def _seen(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {key: np.array(raw[key], space.dtype) for key, space in self.observation_space.items()}


libero_spatial, libero_object, libero_goal, libero_10, libero_90 = (
    functools.partial(LiberoEnv, suite) for suite in SUITES
)
"""What `hilt.envs.task.make` calls with the number of a task"""


def ready(names: Sequence[str], assets: str | None = None, **options: Any) -> None:
    """For `hilt.envs.task.ready`: refuses tasks that cannot be made here, in one sentence, and makes nothing."""
    numbers: dict[str, list[int]] = {}
    for suite, _, task in (name.partition("/") for name in names):
        numbers.setdefault(suite, []).append(_number(suite, task))
    folder = assets_folder(assets)
    for suite, tasks in numbers.items():
        _check_assets(suite, tasks, folder)


def task_names(suite: str) -> list[str]:
    """LIBERO's names of a suite's tasks, in its order."""
    path = _root() / "benchmark/libero_suite_task_map.py"  # read alone: the package around it imports torch
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return list(module.libero_task_map[suite])


def stored_states(suite: str, number: int) -> np.ndarray:
    """The initial states of a task, [50, size], read without running what the file may carry."""
    path = _root() / "init_files" / suite / f"{task_names(suite)[number]}.pruned_init"
    with zipfile.ZipFile(path) as archive:
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return np.asarray(safe_load(archive.read(pickled), where=str(path)))


def assets_folder(assets: str | os.PathLike[str] | None = None) -> Path:
    """Where meshes and textures lie: as given, or $HILT_LIBERO_ASSETS, or beside the installed package."""
    given = assets or os.environ.get("HILT_LIBERO_ASSETS")
    folder = Path(given).expanduser() if given else _root() / "assets"
    if not (folder / "scenes").is_dir():
        raise StorageError(f"LIBERO's assets are not in {folder} (no folder 'scenes' there); {_WHERE}.")
    return folder


def missing_assets(suite: str, tasks: Sequence[int], folder: Path) -> list[str]:
    """The files that these tasks load and that are not in the folder."""
    libero, names = _libero(), task_names(suite)
    wanted: set[Path] = set()
    for number in tasks:
        text = (_root() / "bddl_files" / suite / f"{names[number]}.bddl").read_text()
        problem = libero.TASK_MAPPING[re.search(r"\(problem (\w+)\)", text)[1].lower()]  # type: ignore[index]
        source = inspect.getsource(problem.__init__)
        wanted.add(folder / re.search(r"scenes/\w+\.xml", source)[0])  # type: ignore[index]
        for kind, style in re.findall(r'"(floor|wall)_style": "([\w-]+)"', source):
            wanted.add(
                folder
                / "textures"
                / importlib.import_module("libero.libero.envs.arenas.style").STYLE_MAPPING[kind][style]
            )
        for section in re.findall(r"\(:(?:fixtures|objects)\b(.*?)\)", text, re.DOTALL):
            for category in re.findall(r"-\s+(\w+)", section):
                if found := _object_file(libero, category):
                    wanted.add(folder / found)
    for path in [path for path in wanted if path.suffix == ".xml" and path.exists()]:
        # of two of a name robosuite takes the first, and an arena puts the style's
        # own textures in place of two of the scene
        files = [element for element in ElementTree.parse(path).iter() if element.get("file")]
        named = {
            (element.tag, element.get("name", element.get("file"))): element.get("file", "")
            for element in reversed(files)
        }
        wanted |= {
            Path(os.path.normpath(path.parent / file))
            for (_, name), file in named.items()
            if name not in ("texplane", "tex-wall")
        }
    return sorted(os.path.relpath(path, folder) for path in wanted if not path.exists())


def _object_file(libero: Any, category: str) -> str | None:
    """The model of an object, as its class names it; a table is part of the scene."""
    if (kind := libero.OBJECTS_DICT.get(category)) is None:
        return None
    name = inspect.signature(kind).parameters["obj_name"].default
    return re.search(r'f"(\w+/.*\.xml)"', inspect.getsource(kind.__mro__[1]))[1].replace("{obj_name}", name)  # type: ignore[index]


def _check_assets(suite: str, tasks: Sequence[int], folder: Path) -> None:
    if missing := missing_assets(suite, tasks, folder):
        task = f"{suite}/{tasks[0]}" if len(tasks) == 1 else suite
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise StorageError(f"{task} needs files that {folder} lacks: {', '.join(missing[:_LISTED])}{more}; {_WHERE}.")


def _number(suite: str, task: str | int) -> int:
    if suite not in SUITES:
        raise UnknownNameError("LIBERO suite", suite, SUITES)
    if not str(task).isdecimal() or int(task) >= SUITES[suite]:
        raise ConfigError(f"{suite}/{task}: its tasks are {suite}/0 to {suite}/{SUITES[suite] - 1}.")
    return int(task)


def _shared_out(splits: Mapping[str, Sequence[int]] | None) -> dict[str, range]:
    if splits is None:
        return dict(SPLITS)
    for split, ends in splits.items():
        if len(ends) != 2 or not 0 <= ends[0] < ends[1] <= STORED:
            raise ConfigError(
                f"splits[{split!r}]={list(ends)}: expected [first, end] within the {STORED} "
                "stored states, such as [0, 30]."
            )
    if taken := {"published", "new"} & splits.keys():
        raise ConfigError(f"splits[{min(taken)!r}]: this one is LIBERO's own. Choose another name, such as 'eval'.")
    if not splits:
        raise ConfigError("splits={}: expected at least one split, such as {'train': [0, 30]}.")
    return {split: range(*ends) for split, ends in splits.items()}


# --- LIBERO itself ---


def _root() -> Path:
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("hf-libero", "LIBERO", "libero", command=INSTALL)
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


@functools.cache
def _libero() -> Any:
    """LIBERO's environments. On import it asks on the terminal for its folders,
    unless a file tells them: so one does."""
    root = _root()
    existing = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    with (
        tempfile.TemporaryDirectory()
        if not existing.exists()
        else contextlib.nullcontext(str(existing.parent)) as folder
    ):
        config = Path(folder) / "config.yaml"
        if not existing.exists():
            places = {
                "bddl_files": "bddl_files",
                "init_states": "init_files",
                "datasets": "../datasets",
                "assets": "assets",
            }
            config.write_text(
                json.dumps({"benchmark_root": str(root)} | {key: str(root / place) for key, place in places.items()})
            )
        robosuite_log = logging.getLogger("robosuite_logs")
        level = robosuite_log.level
        robosuite_log.setLevel(logging.ERROR)  # its import logs three warnings that mean nothing here
        try:
            with environment({"LIBERO_CONFIG_PATH": str(config.parent)}):
                return importlib.import_module("libero.libero.envs")
        except ImportError as error:  # of what it imports, if only the half of `INSTALL` was run
            raise MissingPackageError(error.name or "hf-libero", "LIBERO", "libero", str(error), INSTALL) from error
        finally:
            robosuite_log.setLevel(level)


def _simulator(bddl: Path, assets: Path, image_size: int | None) -> Any:
    """LIBERO's environment within its wrapper, whose reset repeats for ever whatever goes wrong."""
    _libero()
    package: Any = importlib.import_module("libero.libero")
    package._assets_path_cache = str(assets)  # else it looks beside itself, and then downloads
    seeing = image_size is not None
    size = image_size or 1
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper").ControlEnv
    with _seeded():
        sim = wrapper(
            bddl_file_name=str(bddl),
            use_camera_obs=seeing,
            has_offscreen_renderer=seeing,
            camera_names=list(CAMERAS.values()),
            camera_heights=size,
            camera_widths=size,
            control_freq=CONTROL_HZ,
            ignore_done=True,
            hard_reset=False,  # the model stays: a hard reset makes another, which takes seconds
        ).env
    # a hard reset adds them to the list once more, and what is drawn after them then differs
    sim.object_property_initializers *= 2
    return sim


def _draw_draft(sim: Any) -> None:
    """Draws an arm of 2,000 triangles: its meshes have 180,000 of the 200,000 of a scene. One link behind the others,
    whose collision shape is large, is left out."""
    model = sim.model._model
    for geom in range(model.ngeom):
        body = sim.model.body_id2name(model.geom_bodyid[geom])
        if not body.startswith(("robot0_", "gripper0_", "mount0_")):
            continue
        mesh = model.geom_dataid[geom]
        large = mesh >= 0 and model.mesh_facenum[mesh] > _LARGE_MESH
        solid = model.geom_contype[geom] or model.geom_conaffinity[geom]
        model.geom_group[geom] = _SHOWN if solid and not large else _HIDDEN
    model.vis.quality.offsamples = 0
    context = sim._render_context_offscreen
    context.gl_ctx.make_current()
    context.con.free()
    context._set_mujoco_context_and_buffers()


def _reset(sim: Any) -> None:
    for _ in range(100):
        try:
            sim.reset()
            return
        except importlib.import_module("robosuite.utils.errors").RandomizationError:
            continue  # no room for an object where it was drawn: the next draw
    raise ConfigError(
        "LIBERO found no place for this task's objects in 100 draws; its BDDL file asks for what has no room."
    )


@contextlib.contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: it finds it seeded, and everybody else finds it as it was."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
