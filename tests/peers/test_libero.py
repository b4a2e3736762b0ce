"""The real LIBERO: its simulator, its 50 stored states, its rules for success,
through our environment, pool and trainer.

Assets come from $HILT_LIBERO_ASSETS; 46 files suffice for libero_spatial and libero_goal. In these tests pictures are
small and episodes short: a picture takes 0.1 s without a GPU.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt.cli import app
from hilt.compat.simplevla import env_worker, get_libero_env
from hilt.core.config import build
from hilt.core.errors import StorageError
from hilt.envs import libero
from hilt.envs.libero import LiberoEnv
from hilt.envs.robosuite.osc_step import OscStep
from hilt.envs.task import check_task, make, ready
from hilt.observe.metrics import read_metrics
from hilt.policies.registry import load_policy
from hilt.recipes import vla_recipe
from hilt.recipes.ript_run import rloo
from hilt.replay import Log
from hilt.vla.train import begin_run, resume_run, train
from tests.policies.tiny_pi0 import tiny

ASSETS = os.environ.get("HILT_LIBERO_ASSETS", "")
pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]
if find_spec("robosuite") is None:
    pytest.skip("LIBERO is not installed: make test-peers installs it", allow_module_level=True)
if not Path(ASSETS, "scenes").is_dir():
    pytest.skip("LIBERO's assets are not here: set HILT_LIBERO_ASSETS to their folder", allow_module_level=True)
STATE = {"split": "train", "state": 1}
EXPERTS = ["libero_spatial/4", "libero_goal/2", "libero_goal/6", "libero_goal/0", "libero_goal/7"]
"""Tasks in which each of the expert's scripts and grasps is needed: bowl, bottle, cream cheese, drawer, knob."""


@pytest.fixture(scope="module")
def bowl() -> Any:
    """The black bowl in the drawer, to be put on the plate, as LIBERO renders it."""
    env = make("libero_spatial/4", image_size=32, shadows=True)
    yield env
    env.close()


def actions(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, 7))


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def libero_itself(script: str, folder: Path) -> str:
    """Run in a process that knows nothing of Hilt; LIBERO finds its folders in a file, or it would ask for them."""
    root = libero._root()
    (folder / "config.yaml").write_text(
        json.dumps({"benchmark_root": str(root), "bddl_files": str(root / "bddl_files")})
    )
    begin = f"import numpy as np, libero.libero\nlibero.libero._assets_path_cache = {ASSETS!r}\n"
    told = os.environ | {"LIBERO_CONFIG_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", begin + script],
        cwd=folder,
        env=told,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_episode_is_the_one_that_libero_plays(bowl: Any, tmp_path: Path) -> None:
    """Step by step, pictures among it, bit for bit; ours in chunks."""
    bddl = libero._root() / "bddl_files/libero_spatial" / f"{libero.task_names('libero_spatial')[4]}.bddl"
    np.savez(tmp_path / "given.npz", states=libero.stored_states("libero_spatial", 4), actions=actions(8))
    script = f"""
from libero.libero.envs import OffScreenRenderEnv
given = np.load("given.npz")
env = OffScreenRenderEnv(bddl_file_name={str(bddl)!r}, camera_heights=32, camera_widths=32)
env.seed(0)
env.reset()
env.set_init_state(given["states"][1])
rows = [env.step([0, 0, 0, 0, 0, 0, -1])[0] for _ in range(10)][-1:]
rows += [env.step(action)[0] for action in given["actions"]]
keys = {[*libero.STATE, *libero.CAMERAS]!r}
np.savez("rows.npz", state=env.get_sim_state(), **{{key: np.stack([row[key] for row in rows]) for key in keys}})
"""
    libero_itself(script, tmp_path)
    theirs = np.load(tmp_path / "rows.npz")
    ours = [bowl.reset(options=STATE)[0], *(bowl.step_chunk(part)[0] for part in np.split(actions(8), [3, 4]))]
    for row, number in zip(ours, (0, 3, 4, 8), strict=True):
        for key, value in row.items():
            assert np.array_equal(value, theirs[key][number].astype(value.dtype)), (key, number)
    assert np.array_equal(bowl.state(), theirs["state"])


def test_a_state_begins_and_goes_on_the_same_each_time(bowl: Any) -> None:
    runs = []
    for _ in range(2):
        first, info = bowl.reset(options=STATE)
        assert info == {"succeed": False, **STATE}
        runs.append([first, bowl.step_chunk(actions(6))[0], {"state": bowl.state()}])
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))
    bowl.reset(options=STATE)
    rows = [bowl.step(action)[0] for action in actions(6)]
    assert equal(rows[-1], runs[0][1])  # one by one is the same as at once
    other = bowl.reset(options={"split": "train", "state": 2})[0]
    assert not equal(other, runs[0][0])


def test_two_episodes_in_turns_are_as_each_alone(bowl: Any) -> None:
    """So that one simulator, a gigabyte with its textures, serves all slots of a process."""
    starts = [STATE, {"split": "eval", "state": 3}]
    moves = [actions(12), -actions(12)]
    moves[1][4:, 3:6] = 0  # the controller then holds the turn that it was last told
    alone = []
    for start, move in zip(starts, moves, strict=True):
        bowl.reset(options=start)
        alone.append([bowl.step_chunk(part)[0] for part in np.split(move, 3)] + [{"state": bowl.state()}])
    begun = []
    for start in starts:
        bowl.reset(options=start)
        begun.append(bowl.snapshot())
    for turn in range(3):
        for episode in (0, 1):
            bowl.restore(begun[episode])
            assert equal(bowl.step_chunk(np.split(moves[episode], 3)[turn])[0], alone[episode][turn]), (turn, episode)
            begun[episode] = bowl.snapshot()
    assert equal({"state": bowl.state()}, alone[1][-1])


def test_osc_step_is_robosuites_own_in_a_third_of_its_evaluations() -> None:
    """Bit for bit over whole seconds, with contacts, closing fingers and motions without a turn."""
    env = make("libero_goal/7", image_size=None)
    moves = actions(40)
    moves[20:, 3:6] = 0
    runs = []
    for own in (True, False):
        env.reset(options=STATE)
        assert isinstance(env._step, OscStep)
        step = env._sim.step if own else env._step
        runs.append([(step(move), env.state()) for move in moves])
    for (theirs, state), (ours, our_state) in zip(*runs, strict=True):
        assert np.array_equal(state, our_state) and theirs[1:] == ours[1:] and equal(theirs[0], ours[0])
    env.close()


def test_each_of_two_simulators_in_a_process_is_drawn_with_its_own_meshes(bowl: Any) -> None:
    """Also while the other one is made and closed."""
    before = bowl.reset(options=STATE)[0]
    other = make("libero_goal/1", image_size=32, quality="draft", cameras=["agentview"])
    seen = other.reset(options=STATE)[0]
    assert equal(bowl.reset(options=STATE)[0], before) and equal(other.reset(options=STATE)[0], seen)
    full = make("libero_goal/1", image_size=32)
    assert not np.array_equal(full.reset(options=STATE)[0]["agentview_image"], seen["agentview_image"])
    assert "robot0_eye_in_hand_image" not in seen
    for env in (other, full):
        env.close()
    gc.collect()
    assert equal(bowl.reset(options=STATE)[0], before)


def settled(env: Any, joint: str, place: np.ndarray) -> tuple[list[float], bool]:
    """The rewards of steps in which nothing is done, from the scene with one joint put elsewhere."""
    env.reset(options=STATE)
    sim = env._sim.sim
    flat, begin = env.state(), sim.model.get_joint_qpos_addr(joint)
    begin = begin[0] if isinstance(begin, tuple) else begin
    flat[1 + begin : 1 + begin + len(place)] = place
    env.begin(flat)
    _, rewards, terminated, _, info = env.step_chunk(np.tile(libero.WAIT, (20, 1)))
    assert info["succeed"] == terminated == env.succeeded()
    return rewards.tolist(), terminated


def test_success_is_seen_when_the_bowl_is_on_the_plate(bowl: Any) -> None:
    bowl.reset(options=STATE)
    data = bowl._sim.sim.data
    plate = np.array(data.get_joint_qpos("plate_1_joint0"))
    bowls = np.array(data.get_joint_qpos("akita_black_bowl_1_joint0"))
    on = np.concatenate([plate[:2], plate[2:3] + 0.03, bowls[3:]])
    rewards, terminated = settled(bowl, "akita_black_bowl_1_joint0", on)
    assert terminated and rewards[-1] == 1 and sum(rewards) == 1
    beside = on + np.array([0.2, 0, 0, 0, 0, 0, 0])
    assert settled(bowl, "akita_black_bowl_1_joint0", beside) == ([0.0] * 20, False)
    assert settled(bowl, "akita_black_bowl_2_joint0", on)[1] is False  # the other bowl


def test_success_is_seen_when_the_drawer_is_open() -> None:
    number = libero.task_names("libero_goal").index("open_the_middle_drawer_of_the_cabinet")
    env = LiberoEnv("libero_goal", number, image_size=None, wait_steps=0)
    assert env.instruction == "open the middle drawer of the cabinet" and env.step_limit == 300
    env.reset(options=STATE)
    assert settled(env, "wooden_cabinet_1_middle_level", np.array([-0.15]))[1] is True
    assert settled(env, "wooden_cabinet_1_top_level", np.array([-0.15]))[1] is False
    env.close()


def test_real_libero_env_is_a_task() -> None:
    env = make("libero_goal/1", image_size=32, step_limit=5, wait_steps=1)  # the arm's own state is always the same
    assert check_task(env) == []
    env.close()


def test_every_task_has_its_states_and_its_words(tmp_path: Path) -> None:
    script = f"import json\nfrom libero.libero import benchmark\nfor name in {list(libero.SUITES)}:\n"
    told = libero_itself(script + "    print(json.dumps(benchmark.get_benchmark(name)().tasks))", tmp_path)
    # between lines about the order of tasks
    theirs = [json.loads(line) for line in told.splitlines() if line.startswith("[[")]
    for (suite, count), tasks in zip(libero.SUITES.items(), theirs, strict=True):
        assert libero.task_names(suite) == [task[0] for task in tasks] and len(tasks) == count
        for number, task in enumerate(tasks):
            env = LiberoEnv(suite, number)
            assert (
                env.instruction == task[1] and env._stored.shape[0] == libero.STORED and env._stored.dtype == np.float64
            )


def test_files_that_are_missing_are_named_before_anything_starts() -> None:
    ready([f"{suite}/{number}" for suite in ("libero_spatial", "libero_goal") for number in range(10)])
    for suite, file in {
        "libero_object": "scenes/libero_floor_base_style.xml",
        "libero_10": "articulated_objects/microwave.xml",
    }.items():
        if not Path(ASSETS, file).exists():
            with pytest.raises(StorageError, match=rf"{suite} needs files that .* lacks: .*{file}.*HILT_LIBERO_ASSETS"):
                ready([f"{suite}/{number}" for number in range(10)])
            with pytest.raises(StorageError, match=f"{suite}/0 needs files"):
                make(f"{suite}/0").reset()


def test_real_libero_asks_nothing_and_writes_nothing(tmp_path: Path) -> None:
    script = "from hilt.envs.task import ready; ready(['libero_spatial/0']); import sys; print('torch' in sys.modules)"
    told = {key: value for key, value in os.environ.items() if key != "LIBERO_CONFIG_PATH"} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=told, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
    assert not (tmp_path / ".libero").exists()


# --- the scripted expert ---


@pytest.mark.parametrize("name", EXPERTS)
def test_the_expert_solves_a_task_of_each_kind(name: str) -> None:
    """It only acts: what the simulator is, it leaves to LIBERO."""
    env = make(name, image_size=None)
    env.reset(options=STATE)
    act, done = env.get_wrapper_attr("expert")(), False
    while not done:
        before = env.state()
        action = act()
        assert np.array_equal(env.state(), before) and env.action_space.contains(action)
        _, _, succeeded, truncated, _ = env.step(action)
        done = succeeded or truncated
    env.close()
    assert succeeded


def test_a_demonstration_is_recorded_exported_and_played_again(tmp_path: Path) -> None:
    """By the commands that a user types, and from the file alone: its actions and its initial state."""
    words = "record libero_spatial/2 --device script --episodes 1 --no-video --image-size 32 -o reflections=false"
    recorded = CliRunner().invoke(app, [*words.split(), "-d", "noise=0.05", "--out", str(tmp_path / "bowl")])
    assert recorded.exit_code == 0, recorded.output
    words = f"data convert {tmp_path / 'bowl'} {tmp_path / 'hdf5'} --to robomimic -o names=libero"
    exported = CliRunner().invoke(app, words.split())
    assert exported.exit_code == 0, exported.output
    with h5py.File(tmp_path / "hdf5/data.hdf5") as file:
        demo = file["data/demo_0"]
        facts = json.loads(demo["hilt_facts"].asstr()[()])[0]
        problem = json.loads(file["data"].attrs["problem_info"])
        moves, seen = demo["actions"][()], demo["obs/agentview_rgb"][()]
    assert facts["success"] and problem["language_instruction"] == make(facts["task"]).instruction
    env = make(facts["task"], **facts["options"])
    first, _ = env.reset(seed=facts["seed"], options={name: facts[name] for name in ("split", "state")})
    assert np.array_equal(first["agentview_image"], seen[0])
    _, rewards, terminated, _, info = env.step_chunk(moves)
    env.close()
    assert terminated and info["succeed"] and len(rewards) == len(moves)


# --- SimpleVLA-RL's names ---


def played_by_libero(folder: Path, state: int, moves: Any, size: int) -> tuple[Any, Any]:
    """LIBERO's fourth task of libero_spatial as its benchmark has it, and an
    episode of these actions: what each step gave."""
    bddl = libero._root() / "bddl_files/libero_spatial" / f"{libero.task_names('libero_spatial')[4]}.bddl"
    np.savez(folder / "given.npz", state=libero.stored_states("libero_spatial", 4)[state], actions=moves)
    script = f"""
import json
from libero.libero import benchmark
from libero.libero.envs import OffScreenRenderEnv
given = np.load("given.npz")
with open("task.json", "w") as file:
    json.dump(benchmark.get_benchmark("libero_spatial")().get_task(4)._asdict(), file)
env = OffScreenRenderEnv(bddl_file_name={str(bddl)!r}, camera_heights={size}, camera_widths={size})
env.seed(0)
env.reset()
rows = [(env.set_init_state(given["state"]), 0.0, False)]
rows += [env.step(action.tolist())[:3] for action in given["actions"]]
keys = {[*libero.STATE, *libero.CAMERAS]!r}
told = {{"reward": [row[1] for row in rows], "done": [row[2] for row in rows]}}
np.savez("rows.npz", **told, **{{key: np.stack([row[0][key] for row in rows]) for key in keys}})
"""
    libero_itself(script, folder)
    return SimpleNamespace(**json.loads((folder / "task.json").read_text())), np.load(folder / "rows.npz")


def test_get_libero_env_plays_what_libero_plays(tmp_path: Path) -> None:
    """Bit for bit, with pictures, from the task that LIBERO's own benchmark gives."""
    moves = np.concatenate([[libero.WAIT] * 2, actions(4)])
    task, theirs = played_by_libero(tmp_path, 31, moves, 32)
    env, words = get_libero_env(task, "openvla", resolution=32)
    assert words == task.language
    env.seed(0)
    env.reset()
    rows = [(env.set_init_state(libero.stored_states("libero_spatial", 4)[31]), 0.0, False)]
    rows += [env.step(move)[:3] for move in moves.tolist()]
    env.close()
    for number, (seen, reward, done) in enumerate(rows):
        assert (reward, done) == (theirs["reward"][number], theirs["done"][number])
        for key in (*libero.STATE, *libero.CAMERAS):
            assert np.array_equal(seen[key], theirs[key][number].astype(np.asarray(seen[key]).dtype)), (key, number)


def test_env_worker_plays_an_episode_of_libero_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As SimpleVLA-RL starts it. A policy's gripper is 1 for open and 0 for closed, LIBERO's -1 and 1."""
    chunk = actions(3)
    chunk[:, 6] = [1, 0, 0.9]
    asked_of_libero = np.concatenate([chunk[:, :6], np.array([[-1], [1], [-1]])], 1).astype(np.float32)
    task, theirs = played_by_libero(tmp_path, 31, np.concatenate([[libero.WAIT] * 10, asked_of_libero]), 256)
    context = multiprocessing.get_context("spawn")
    asked, answered = context.Queue(), context.Queue()
    config = SimpleNamespace(num_steps_wait=10)
    given = ("libero_spatial", 4, 31, config, asked, answered, True, 0, 5)
    worker = context.Process(target=env_worker, args=given, daemon=True)
    worker.start()

    def same(answer: Any, row: int) -> bool:
        return all(np.array_equal(value, theirs[key][row].astype(value.dtype)) for key, value in answer["obs"].items())

    first = answered.get(timeout=600)
    assert (first["type"], first["task_description"], first["task_file_name"]) == (
        "init",
        task.language,
        "libero_spatial_task_4_trial_31",
    )
    assert (first["active"], first["complete"], first["finish_step"]) == (True, False, 0) and same(first, 10)
    asked.put(chunk)
    second = answered.get(timeout=600)
    assert (second["type"], second["active"], second["complete"], second["finish_step"]) == (
        "step",
        True,
        False,
        3,
    ) and same(second, 13)
    (picture,) = second["valid_images"]
    assert np.array_equal(picture, second["obs"]["agentview_image"][::-1, ::-1]), "turned, as its policies were trained"
    asked.put(chunk)
    last = answered.get(timeout=600)
    assert (last["active"], last["complete"], last["finish_step"]) == (False, False, 5), "cut off at max_steps"
    asked.put(None)
    worker.join(120)
    assert worker.exitcode == 0


# --- through the trainer ---


def visited(run: Path, rank: int) -> list[str]:
    """The tasks of a rank's episodes, in their order."""
    with Log.open(run / "rollouts" / f"rank-{rank}", "r") as log:
        return [log.facts.about(trajectory)["task"] for trajectory in log.trajectories()]


def test_small_vla_goes_through_the_whole_trainer(tmp_path: Path) -> None:
    config = vla_recipe("libero_debug")
    begin_run(tmp_path / "run", "libero_debug", config)
    done = train(config, tmp_path / "run")
    assert done.step == 2 and done.reason == "max_steps"
    assert visited(tmp_path / "run", 0)[:4] == ["libero_spatial/0"] * 2 + ["libero_goal/0"] * 2
    episodes, updates = (read_metrics(tmp_path / "run", [kind]) for kind in ("episode", "update"))
    assert len(episodes) == 8 and not any(record["success"] for record in episodes)  # it has learned nothing
    assert all(record["gradient_norm"] > 0 for record in updates[:2])
    assert updates[2]["validation_success/libero_goal/0"] == updates[2]["validation_success/libero_spatial/0"] == 0
    again = train(resume_run(tmp_path / "run", "", ["max_steps=3"]), tmp_path / "run")
    assert again.step == 3 and len(visited(tmp_path / "run", 0)) == 12
    assert (tmp_path / "run/policy").is_dir()


PLAN = """
task: {benchmark_name: libero_spatial, task_names_to_use: [0, 1, 2, 3, 4, 5, 6, 7, 8],
       num_parallel_envs: 2, max_episode_length: 20}
algo: {rloo_batch_size: 2, data_batch_size: 4, num_epochs: 1, gradient_accumulation_steps: 1}
training: {num_train_steps: 1}
"""


def test_pi0_learns_by_rloo_on_two_ranks_over_nine_tasks_and_goes_on(tmp_path: Path) -> None:
    """The whole of a distributed RLOO trainer: two iterations, the second one resumed. It
    never succeeds, so only entropy moves it."""
    policy = tiny()
    policy.save_pretrained(tmp_path / "pi0")
    (tmp_path / "plan.yaml").write_text(PLAN)
    settings = [
        f"policy={tmp_path / 'pi0'}",
        "placement.kind=processes",
        "placement.ranks=2",
        "algorithm.entropy=0.01",
        "pool.workers=1",
    ]
    settings += ["task_options.image_size=64", "task_options.reflections=false", "pool.start_s=900", "pool.step_s=600"]
    config = build(rloo(tmp_path / "plan.yaml"), *settings, "optimizer.learning_rate=0.01")
    run = tmp_path / "run"
    begin_run(run, "rloo", config)
    assert train(config, run).step == 1
    assert train(resume_run(run, "", ["max_steps=2"]), run).step == 2
    assert [list(dict.fromkeys(visited(run, rank))) for rank in (0, 1)] == [
        ["libero_spatial/0", "libero_spatial/2"],
        ["libero_spatial/1", "libero_spatial/3"],
    ]
    assert [len(visited(run, rank)) for rank in (0, 1)] == [8, 8]
    before, after = policy.state_dict(), load_policy(run / "policy").state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
