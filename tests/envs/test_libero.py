"""LIBERO's suites without LIBERO: what is asked of a stand-in for its simulator, and
what is refused. tests/peers has the real one."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest

from hilt.core.errors import ConfigError, MissingPackageError, StorageError, UnknownNameError, UnsafeError
from hilt.envs import libero
from hilt.envs.libero import SPLITS, STEP_LIMITS, STORED, SUITES, LiberoEnv
from hilt.envs.task import check_task, make, ready, split_to_report
from hilt.policies.vla.observation_adapters import suite

BOWL = "pick_up_the_black_bowl_next_to_the_plate"
SCENE = "KITCHEN_SCENE10_close_the_top_drawer"


class Eye:
    """An observable of robosuite."""

    def __init__(self) -> None:
        self._enabled, self._sampled, self._time_since_last_sample = True, True, 0.0

    def set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def set_active(self, active: bool) -> None:
        self.active = active


class StandIn:
    """With LIBERO's method names: things fall a little in each step, and the task
    succeeds when the third action's x sums to 3."""

    solved = 0.0
    """What the next reset draws as the sum that is success from 3 on"""
    current: StandIn | None = None
    """The one whose graphics context is current: only that one is seen"""

    def __init__(self, size: int | None) -> None:
        self.size, self.state, self.actions, self.drawn, self.looked = size, np.zeros(3), [], [], 0
        self._observables = {key: Eye() for key in [*libero.STATE, "bowl_pos", *(libero.CAMERAS if size else ())]}
        self.controller = SimpleNamespace(goal_pos=np.zeros(3), goal_ori=np.eye(3))
        self.robots = [
            SimpleNamespace(gripper=SimpleNamespace(dof=1, current_action=np.ones(1)), controller=self.controller)
        ]
        self.sim = SimpleNamespace(
            data=SimpleNamespace(qacc_warmstart=np.zeros(2), ctrl=np.zeros(2)),
            set_state_from_flattened=lambda state: setattr(self, "state", np.array(state)),
            forward=lambda: None,
            get_state=lambda: self.state.copy(),
            render=lambda camera_name, width, height: np.full((height, width, 3), 7 * self.is_current(), np.uint8),
            _render_context_offscreen=SimpleNamespace(
                scn=SimpleNamespace(flags=np.ones(8)),
                gl_ctx=SimpleNamespace(make_current=self.make_current),
                con=SimpleNamespace(free=self.free),
            ),
        )
        StandIn.current, self.freed_by = self, None

    def make_current(self) -> None:
        StandIn.current = self

    def is_current(self) -> bool:
        return StandIn.current is self

    def free(self) -> None:
        self.freed_by = StandIn.current

    def reset(self) -> None:
        self.drawn.append(np.random.uniform())
        self.state, self.actions = np.array([self.drawn[-1], self.solved, 0.0]), []
        self.solved = 0.0
        self.controller.goal_pos[:] = 0  # as a new controller has it
        self.sim._render_context_offscreen.scn.flags[:] = 1  # as after a hard reset

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(np.array(action))
        self.controller.goal_pos += 0.1 * action[:3]
        self.state[1] += action[0] + self.controller.goal_pos[0] * 0.01
        self.state[2] += 0.01
        return self._get_observations(), float(self._check_success()), self._check_success(), {}

    def _check_success(self) -> bool:
        return bool(self.state[1] >= 3)

    def _post_process(self) -> None: ...

    def _get_observations(self, force_update: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {key: np.full(size, self.state.sum()) for key, size in libero.STATE.items()}
        for key in libero.CAMERAS.keys() & self._observables.keys():
            self.looked += self._observables[key]._enabled
            seen = self._observables[key]._enabled and self.is_current()
            found[key] = np.full((self.size, self.size, 3), int(self.state.sum() * 50) * seen, np.uint8)
        return found

    def close(self) -> None:
        self.closed = True


def archive(value: Any) -> bytes:
    """As torch.save writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
    return file.getvalue()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with LIBERO's files of three tasks, and assets beside it."""
    root = tmp_path / "libero/libero"
    names = {"libero_spatial": [BOWL] * 10, "libero_10": [SCENE] * 10}
    files = {"benchmark/libero_suite_task_map.py": f"libero_task_map = {names!r}", "assets/scenes/s.xml": "<mujoco/>"}
    for name, tasks in names.items():
        files[f"bddl_files/{name}/{tasks[0]}.bddl"] = "(define (problem P))"
        (root / "init_files" / name).mkdir(parents=True)
        (root / f"init_files/{name}/{tasks[0]}.pruned_init").write_bytes(
            archive(np.arange(STORED * 3.0).reshape(STORED, 3) / 1000)
        )
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "libero/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("HILT_LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(libero, "_check_assets", lambda suite, tasks, folder: None)
    monkeypatch.setattr(libero, "_simulator", lambda bddl, assets, size: StandIn(size))
    monkeypatch.setattr(libero, "_reset", lambda sim: sim.reset())
    return root


def test_libero_env_is_a_task(installed: Path) -> None:
    env = make("libero_spatial/3", image_size=8, step_limit=9)
    assert isinstance(env, LiberoEnv) and check_task(env) == []
    assert env.instruction == "pick up the black bowl next to the plate"
    assert (
        make("libero_10/0").instruction == "close the top drawer"
        and make("libero_10/0").step_limit == STEP_LIMITS["libero_10"] == 520
    )
    assert list(SUITES) == list(STEP_LIMITS) and sum(SUITES.values()) == 130
    env.close()
    with pytest.raises(ConfigError, match="call reset first"):
        env.step(np.zeros(7))


def test_no_state_of_training_is_one_of_evaluation(installed: Path) -> None:
    assert sorted(number for numbers in SPLITS.values() for number in numbers) == list(range(STORED))
    env = make("libero_spatial/0", wait_steps=0, image_size=None)
    for split, numbers in SPLITS.items():
        assert env.initial_states[split] == len(numbers)
        for state in (0, len(numbers) - 1):
            env.reset(options={"split": split, "state": state})
            assert env.state()[0] == numbers[state] * 3 / 1000
    everything = make("libero_spatial/0", splits={"train": [0, 50], "eval": [0, 50]}, wait_steps=0, image_size=None)
    assert everything.initial_states == {"train": 50, "eval": 50, "published": 50, "new": 50}
    assert everything.states_of_train["published"] == 50 and env.states_of_train == {
        "train": 30,
        "eval": 0,
        "test": 0,
        "published": 30,
    }
    for wrong in ({"train": [0, 51]}, {"train": [5, 5]}, {"new": [0, 5]}, {}):
        with pytest.raises(ConfigError, match=r"expected|this one is LIBERO's own"):
            make("libero_spatial/0", splits=wrong)


def test_the_published_states_are_all_fifty_and_new_ones_are_none_of_them(installed: Path) -> None:
    """Five hundred episodes of a suite of ten tasks, as published; or as many placements that LIBERO itself draws."""
    env = make("libero_spatial/0", wait_steps=0, image_size=None)
    stored = [float(env.unwrapped._stored[number][0]) for number in range(STORED)]
    found: dict[str, list[float]] = {"published": [], "new": []}
    for split in found:
        assert env.initial_states[split] == 50
        for state in range(50):
            env.reset(options={"split": split, "state": state})
            found[split].append(float(env.state()[0]))
    assert found["published"] == stored and len({*found["new"], *stored}) == 100
    env.unwrapped._sim.solved = 3.0  # the first that is drawn is solved already: another one takes its place
    env.reset(options={"split": "new", "state": 7})
    assert env.state()[0] not in (found["new"][7], *stored)
    env.reset(options={"split": "new", "state": 7})
    assert env.state()[0] == found["new"][7], "the same each time"
    assert env.unwrapped._sim.drawn[-1] == env.unwrapped._sim.drawn[1], (
        "fixtures stand where seed 0 puts them, as for stored states"
    )
    assert split_to_report(env.initial_states) == "published" and split_to_report({"train": 1, "test": 1}) == "test"


def test_a_chunk_is_seen_once_and_ends_where_the_episode_does(installed: Path) -> None:
    env = make("libero_spatial/0", image_size=8, step_limit=12, wait_steps=4)
    observation, info = env.reset(options={"split": "eval", "state": 0})
    sim = env._sim
    assert (
        len(sim.actions) == 4
        and all((action == libero.WAIT).all() for action in sim.actions)
        and info["succeed"] is False
    )
    assert sim.looked == 2 and observation["agentview_image"].any()  # each camera once, with the last step of waiting
    still = np.zeros((5, 7))
    observation, rewards, terminated, truncated, _ = env.step_chunk(still)
    assert sim.looked == 4 and rewards.tolist() == [0] * 5 and not terminated and not truncated
    assert observation["agentview_image"].any() and observation["robot0_eef_pos"].dtype == np.float32
    go = still + np.array([1, 0, 0, 0, 0, 0, 1.0])
    observation, rewards, terminated, truncated, info = env.step_chunk(go)
    assert rewards.tolist() == [0, 0, 1] and terminated and not truncated and info["succeed"]
    # the end came before the picture: one is made of it
    assert (observation["agentview_image"] == 7).all() and sim.looked == 4
    with pytest.raises(ConfigError, match="is over"):
        env.step(still[0])
    env.reset(options={"split": "eval", "state": 0})
    rewards, truncated = env.step_chunk(np.zeros((20, 7)))[1::2]
    assert len(rewards) == 12 and truncated
    assert all(not eye._enabled for key, eye in sim._observables.items() if key == "bowl_pos")


def test_one_camera_alone_is_rendered(installed: Path) -> None:
    env = make("libero_spatial/0", image_size=8, wait_steps=4, cameras=["robot0_eye_in_hand"])
    observation, _ = env.reset(options={"split": "eval", "state": 0})
    assert "agentview_image" not in observation and observation["robot0_eye_in_hand_image"].any()
    assert env._sim.looked == 1 and not env._sim._observables["agentview_image"]._enabled
    seen = suite("libero_spatial/0").observe(observation, env.instruction)
    assert set(seen) == {"wrist_image", "state", "instruction"} and env.observation_space.contains(observation)
    go = np.tile([3.0, 0, 0, 0, 0, 0, 1], (5, 1))
    assert "agentview_image" not in env.step_chunk(go)[0], "nor where an episode ends within a chunk"
    with pytest.raises(UnknownNameError, match="robot0_eye_in_hand"):
        make("libero_spatial/0", cameras=["wrist"])
    with pytest.raises(ConfigError, match="at least one of agentview, robot0_eye_in_hand"):
        make("libero_spatial/0", cameras=[])


def test_each_of_two_simulators_is_drawn_with_its_own_meshes(installed: Path) -> None:
    """robosuite leaves the context current that was made last."""
    start = {"split": "eval", "state": 0}
    first, second = (make("libero_spatial/0", image_size=8) for _ in range(2))
    both = [env.reset(options=start)[0]["agentview_image"] for env in (first, second, first)]
    assert all(picture.any() for picture in both)
    second.reset(options=start)
    assert first.step_chunk(np.zeros((2, 7)))[0]["agentview_image"].any() and second.render().any()
    sim = first._sim
    first.close()
    assert sim.freed_by is sim, "what another one has loaded is not freed"


def test_a_draft_draws_the_arm_by_its_collision_shapes(installed: Path) -> None:
    ball = '<geom type="sphere" size="0.1" group="{}" contype="{}" conaffinity="{}"/>'
    both = ball.format(1, 0, 0) + ball.format(0, 1, 1)
    bodies = "".join(f'<body name="{name}">{both}</body>' for name in ("robot0_link1", "gripper0_hand", "bowl"))
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")
    made: list[int] = []
    context = SimpleNamespace(
        gl_ctx=SimpleNamespace(make_current=lambda: None),
        con=SimpleNamespace(free=lambda: made.append(-1)),
        _set_mujoco_context_and_buffers=lambda: made.append(int(model.vis.quality.offsamples)),
    )
    named = SimpleNamespace(_model=model, body_id2name=lambda number: model.body(number).name)
    libero._draw_draft(SimpleNamespace(model=named, _render_context_offscreen=context))
    assert model.geom_group.tolist() == [5, 1, 5, 1, 1, 0], "the arm's, the hand's and, as they were, the bowl's"
    assert made == [-1, 0], "a new buffer, without samples"
    with pytest.raises(UnknownNameError, match="quality of images"):
        make("libero_spatial/0", quality="low")
    with pytest.raises(UnknownNameError, match=r"no option of LIBERO named 'image_sise'.*image_size"):
        make("libero_spatial/0", image_sise=64)


def test_one_state_is_one_scene_and_numpys_generator_is_left_alone(installed: Path) -> None:
    env = make("libero_spatial/0", image_size=8)
    before = np.random.get_state()[1].copy()
    env.reset(seed=1)
    env._sim.robots[0].gripper.current_action[:] = 1
    env.reset(seed=2)
    assert len(set(env._sim.drawn)) == 1  # the fixtures stand where they stood
    assert (np.random.get_state()[1] == before).all()
    assert (env._sim.robots[0].gripper.current_action == 0).all()


def test_two_episodes_in_turns_are_as_each_alone(installed: Path) -> None:
    env = make("libero_spatial/0", image_size=8, step_limit=5)
    moves = np.random.default_rng(0).uniform(-1, 1, (2, 6, 7))
    alone: list[list[Any]] = []
    for state in (0, 1):
        env.reset(options={"split": "eval", "state": state})
        alone.append([env.step_chunk(part) for part in np.split(moves[state], 3)])
    begun = []
    for state in (0, 1):
        env.reset(options={"split": "eval", "state": state})
        begun.append(env.snapshot())
    for turn in range(3):
        for state in (0, 1):
            env.restore(begun[state])
            now, before = env.step_chunk(np.split(moves[state], 3)[turn]), alone[state][turn]
            assert all(np.array_equal(now[0][key], before[0][key]) for key in now[0]) and now[2:] == before[2:]
            begun[state] = env.snapshot()
    assert now[3] and env._over  # the last chunk came to the limit


@pytest.mark.parametrize("options", [{}, {"shadows": True}, {"reflections": False}])
def test_shadows_are_off_after_each_reset(installed: Path, options: dict[str, bool]) -> None:
    env = make("libero_spatial/0", image_size=8, **options)
    for _ in range(2):
        env.reset()
        flags = env._sim.sim._render_context_offscreen.scn.flags
        assert flags[0] == options.get("shadows", False) and flags[2] == options.get("reflections", True)
    assert make("libero_spatial/0", image_size=None).observation_space.keys() == libero.STATE.keys()


def test_the_policys_gripper_is_liberos(installed: Path) -> None:
    env = make("libero_spatial/0", image_size=8)
    words = suite("libero_spatial/0")
    row = words.observe(env.reset()[0], env.instruction)
    assert row["full_image"].shape == (8, 8, 3) and row["state"].shape == (8,) and row["instruction"] == env.instruction
    env.step_chunk(words.command(np.array([[0, 0, 0, 0, 0, 0, 1.0], [0, 0, 0, 0, 0, 0, 0.0]])))
    assert [action[6] for action in env._sim.actions[-2:]] == [-1, 1]  # 1 is open for the policy, -1 opens there


def test_libero_env_refuses_wrong_options(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="libero_spatial/12: its tasks are libero_spatial/0 to libero_spatial/9"):
        make("libero_spatial/12")
    with pytest.raises(UnknownNameError, match="libero_spatial"):
        LiberoEnv("libero_spacial", 0)
    for name in ("image_size", "step_limit"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            make("libero_spatial/0", **{name: 0})
    with pytest.raises(ConfigError, match="wait_steps=-1"):
        make("libero_spatial/0", wait_steps=-1)
    with pytest.raises(StorageError, match=r"no folder 'scenes'.*HILT_LIBERO_ASSETS"):
        make("libero_spatial/0", assets=str(tmp_path))
    monkeypatch.setenv("HILT_LIBERO_ASSETS", str(tmp_path / "nowhere"))
    with pytest.raises(StorageError, match="nowhere"):
        make("libero_spatial/0")
    env = make("libero_spatial/0", assets=str(installed / "assets"), image_size=8)
    with pytest.raises(UnknownNameError, match="reset option"):
        env.reset(options={"stat": 1})
    env.reset()
    for wrong in (np.zeros((2, 6)), np.full((1, 7), np.nan), np.zeros((0, 7))):
        with pytest.raises(ConfigError, match="7 finite numbers"):
            env.step_chunk(wrong)


def test_stored_states_that_carry_code_are_not_run(installed: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (installed / f"init_files/libero_spatial/{BOWL}.pruned_init").write_bytes(archive(Evil()))
    with pytest.raises(UnsafeError):
        make("libero_spatial/0")
    assert not (tmp_path / "ran").exists()


def test_libero_missing_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero.importlib.util, "find_spec", lambda name: None)
    for what in (lambda: make("libero_goal/0"), lambda: ready(["libero_goal/0"])):
        with pytest.raises(
            MissingPackageError, match=r"is not installed: pip install 'hilt\[libero\]' && pip install --no-deps hf"
        ):
            what()


def test_libero_partly_missing_names_the_whole_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIBERO itself, without what it imports: it was a traceback of robosuite's."""
    package = tmp_path / "libero" / "libero" / "envs"
    package.mkdir(parents=True)
    for folder in (tmp_path / "libero", package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text("import a_package_that_is_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    libero._libero.cache_clear()
    said = (
        r"the package 'a_package_that_is_nowhere', which cannot be imported \(.*\): pip install 'hilt\[libero\]' && pip"
    )
    with pytest.raises(MissingPackageError, match=said):
        libero._libero()
