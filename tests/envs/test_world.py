"""The simulated bench: impedance, forces, grasps, exact states, and pictures."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.envs.rotations import from_euler, from_rotation_vector, inverse, multiply, to_matrix, to_rotation_vector
from hilt.envs.tabletop.world import DOWN, HIGHEST, HOME_JOINTS, PARAMETERS, TIMESTEP, World

BOX = 'type="box" size=".025 .025 .025"'


def thing(shape: str = BOX, mass: float = 0.2) -> str:
    return f'''<body name="cube" pos=".5 0 .05"><freejoint/>
    <geom {shape} mass="{mass}" friction="1 .02 .001" condim="4"/></body>'''


CUBE = thing()


def down(x: float, y: float, z: float) -> np.ndarray:
    return np.array([x, y, z, *DOWN])


def turn_between(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(to_rotation_vector(multiply(a[3:], inverse(b[3:])))))


def holding(shape: str = BOX, mass: float = 0.2) -> World:
    """Something in the hand, in the air."""
    world = World(thing(shape, mass))
    for pose, opening in ((down(0.5, 0, 0.025), 1.0), (down(0.5, 0, 0.025), 0.0), (down(0.5, 0, 0.2), 0.0)):
        world.command(pose)
        world.grip(opening)
        world.advance(1.0)
    assert world.body_pose("cube")[2] > 0.15
    return world


# ---- impedance


def test_home_is_a_pose_of_the_panda_that_points_down():
    state = World().arm()
    np.testing.assert_allclose(state.pose, down(0.45, 0, 0.24), atol=1e-6)
    np.testing.assert_allclose(state.q, HOME_JOINTS)
    assert state.gripper == 1.0


@pytest.mark.parametrize("turn", [(0, 0, 0), (0.4, 0, 0), (0, -0.4, 0), (0, 0, 1.0), (0.3, 0.3, -0.7)])
def test_arm_moves_to_its_command_and_stops(turn):
    world = World()
    pose = np.array([0.55, -0.15, 0.2, *multiply(from_euler(turn), DOWN)])
    world.command(pose)
    np.testing.assert_allclose(world.commanded()[:3], pose[:3])
    world.advance(2.5)
    state = world.arm()
    assert np.abs(state.pose[:3] - pose[:3]).max() < 2e-4 and turn_between(state.pose, pose) < 2e-3
    assert np.abs(state.vel).max() < 5e-3


def test_arm_is_near_critically_damped():
    for axis in range(3):
        world = World()
        start, goal = world.pose(), world.pose()
        goal[axis] += 0.015
        world.command(goal)
        way = []
        for _ in range(50):
            world.advance(0.02)
            way.append((world.pose() - start)[axis] / 0.015)
        assert max(way) < 1.1 and way[5] > 0.8 and abs(way[-1] - 1) < 0.01


def test_the_jacobian_is_the_poses_derivative():
    world = World()
    world.command(down(0.6, 0.2, 0.1))
    world.advance(0.2)
    before = world.arm()
    world.advance(0.004)
    after = world.arm()
    moved = np.concatenate(
        [after.pose[:3] - before.pose[:3], to_rotation_vector(multiply(after.pose[3:], inverse(before.pose[3:])))]
    )
    assert before.jacobian.shape == (6, 7) and np.linalg.norm(before.vel) > 0.1
    np.testing.assert_allclose((before.jacobian + after.jacobian) / 2 @ (after.q - before.q), moved, atol=1e-7)
    np.testing.assert_allclose(after.jacobian @ after.dq, after.vel, atol=1e-12)


def pushed(world: World, force: float, seconds: float = 2.0) -> float:
    """How far a sideways force at the hand moves the tcp."""
    start = world.pose()
    world.data.xfrc_applied[world.model.body("hand").id][1] = force
    world.advance(seconds)
    return float((world.pose() - start)[1])


def test_parameters_change_what_the_arm_does():
    stiff, soft = World(), World()
    soft.set_parameters({"translational_stiffness": 500.0, "rotational_stiffness": 50.0})
    assert pushed(soft, 5.0) > 3 * pushed(stiff, 5.0) > 0

    def reached(**parameters: float) -> np.ndarray:
        world = World()
        world.set_parameters(parameters)
        world.command(np.array([0.45, 0.1, 0.24, *multiply(from_euler([0, 0, 0.5]), DOWN)]))
        world.advance(0.1)
        return np.array([world.pose()[1], turn_between(world.pose(), down(0, 0, 0))])

    usual = reached()
    assert reached(translational_damping=115.0)[0] < 0.9 * usual[0]
    assert reached(rotational_damping=10.0)[1] < 0.85 * usual[1]
    assert reached(translational_clip_y=0.005)[0] < 0.5 * usual[0]
    assert reached(rotational_clip_z=0.02)[1] < 0.5 * usual[1]
    np.testing.assert_allclose(reached(translational_clip_neg_y=0.005, rotational_clip_neg_z=0.02), usual, rtol=0.05)


@pytest.mark.parametrize("kind, gain", [("translational", 60.0), ("rotational", 4.0)])
def test_the_integral_term_takes_away_what_a_load_leaves(kind, gain):
    loaded, integral = World(), World()
    integral.set_parameters({f"{kind}_Ki": gain})
    errors = []
    for world in (loaded, integral):
        goal = world.pose()
        world.data.xfrc_applied[world.model.body("hand").id] = (
            [0, 5, 0, 0, 0, 0] if kind == "translational" else [0, 0, 0, 0, 0, 1]
        )
        world.advance(3.0)
        errors.append(
            np.linalg.norm((world.pose() - goal)[:3]) if kind == "translational" else turn_between(world.pose(), goal)
        )
    assert errors[1] < 0.1 * errors[0]


def test_arm_is_stable_with_the_highest_parameters_in_every_corner():
    world, rng = World(), np.random.default_rng(0)
    world.set_parameters({name: value for name, value in HIGHEST.items() if "Ki" not in name})
    for _ in range(40):
        turn = from_rotation_vector(rng.uniform(-1, 1, 3))
        world.command([*rng.uniform([0.3, -0.3, 0.1], [0.7, 0.3, 0.4]), *multiply(turn, DOWN)])
        world.advance(0.3)
        assert np.abs(world.arm().vel).max() < 10
    world.command(down(0.5, 0, 0.2))
    world.advance(2.0)
    assert np.abs(world.arm().vel).max() < 1e-3


def test_arm_time_passes_equally_with_an_integral_term():
    world = World()
    world.set_parameters({"translational_Ki": 5.0})
    world.advance(5 * TIMESTEP)  # the integral's period is two steps
    assert world.data.time == pytest.approx(5 * TIMESTEP)


def test_worlds_are_rendered_in_turns():
    worlds = [
        World(f'<geom type="box" size=".05 .05 .05" pos=".5 0 .05" rgba="{color} 1"/>') for color in ("1 0 0", "0 0 1")
    ]
    alone = [world.render() for world in worlds]
    for _ in range(2):
        for world, picture in zip(worlds, alone, strict=True):
            np.testing.assert_array_equal(world.render(), picture)
    assert (alone[0] != alone[1]).any()


def test_world_reports_an_unstable_simulation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it stands
    world = World()
    world.data.qvel[0] = np.nan
    with pytest.raises(HiltError, match="became unstable"):
        world.advance(0.1)
    world.home()
    world.advance(0.1)


def test_parameters_that_cannot_be_are_refused_and_neutral_ones_pass():
    world = World()
    world.set_parameters({**PARAMETERS, "translational_Ki": 0, "rotational_Ki": 0.0})
    with pytest.raises(UnknownNameError, match="translational_stiffness"):
        world.set_parameters({"translational_stifness": 1.0})
    for value in (-1.0, np.nan, 1e6):
        with pytest.raises(ConfigError, match=r"translational_damping=.* between 0 and 120"):
            world.set_parameters({"rotational_damping": 1.0, "translational_damping": value})
    assert world.parameters[0] == PARAMETERS


# ---- what is sensed


def test_arm_pushes_with_stiffness_times_clip_and_senses_it():
    world = World()
    world.command(down(0.5, 0.0, -0.2))
    world.advance(1.5)
    state = world.arm()
    assert state.pose[2] == pytest.approx(0.01, abs=2e-3)  # the fingertips are on the table
    # the table pushes against the tcp's z axis, which points down
    assert state.force[2] == pytest.approx(-40.0, abs=0.5)
    world.set_parameters({"translational_clip_neg_z": 0.005})
    world.advance(1.0)
    assert world.arm().force[2] == pytest.approx(-10.0, abs=0.5)


def test_forces_and_torques_are_in_the_tools_frame():
    world = World(
        '<geom type="box" pos=".5 .03 .1" size=".02 .005 .1"/>'
    )  # under the finger at +y, which is -y for a tool that points down
    for z in (0.3, 0.1):
        world.command(down(0.5, 0, z))
        world.advance(1.5)
    state = world.arm()
    assert state.force[2] == pytest.approx(-40.0, abs=0.5)
    assert state.torque[0] == pytest.approx(0.028 * 40, abs=0.15) and np.abs(state.torque[1:]).max() < 0.1


def test_the_weight_of_what_is_held_is_felt_and_what_the_robot_does_itself_is_not():
    world = holding()
    np.testing.assert_allclose(world.arm().force, [0, 0, 0.2 * 9.81], atol=0.02)
    empty = World()
    pushed(empty, 5.0)
    np.testing.assert_allclose([*empty.arm().force, *empty.arm().torque], 0, atol=1e-9)


@pytest.mark.parametrize("shape", [BOX, 'type="cylinder" size=".02 .05"', 'type="sphere" size=".025"'])
def test_a_grasp_holds_while_the_hand_is_shaken(shape):
    world, rng = holding(shape, mass=0.1), np.random.default_rng(0)

    def in_hand() -> np.ndarray:
        pose = world.pose()
        return to_matrix(pose[3:]).T @ (world.body_pose("cube")[:3] - pose[:3])

    start, opening = in_hand(), world.arm().gripper
    position, turn = world.pose()[:3], np.zeros(3)
    for _ in range(60):
        position = np.clip(position + rng.choice([-0.09, 0.09], 3), [0.3, -0.3, 0.1], [0.7, 0.3, 0.4])
        turn = np.clip(turn + rng.uniform(-0.15, 0.15, 3), -1, 1)
        world.command([*position, *multiply(from_rotation_vector(turn), DOWN)])
        world.advance(0.2)
    assert np.linalg.norm(in_hand() - start) < 0.025  # 12 s at full speed
    assert world.arm().gripper == pytest.approx(opening, abs=0.06)
    world.grip(1.0)
    world.command(down(0.5, 0, 0.2))
    world.advance(1.5)
    assert world.body_pose("cube")[2] < 0.06 and world.arm().gripper > 0.99


def test_two_arms_move_apart_from_each_other():
    world = World(arms=2)
    assert world.cameras == ("front", "left/wrist", "right/wrist")
    left, right = world.pose(0), world.pose(1)
    assert left[1] > 0.2 and right[1] < -0.2
    goal = np.add(right, [0.05, 0.05, -0.05, 0, 0, 0, 0])
    world.command(goal, 1)
    world.grip(0.0, 1)
    world.advance(1.5)
    np.testing.assert_allclose(world.pose(0), left, atol=1e-6)
    np.testing.assert_allclose(world.pose(1), goal, atol=1e-3)
    assert world.arm(0).gripper > 0.99 and world.arm(1).gripper < 0.05
    with pytest.raises(ConfigError, match="1 or 2 arms"):
        World(arms=3)


# ---- placing


def test_bodies_and_joints_are_placed():
    world = World(
        CUBE + '<body name="rail" mocap="true"><body name="knob"><joint name="knob" type="slide" axis="0 1 0"/><geom '
        'size=".01"/></body></body>'
    )
    world.place("cube", [0.6, 0.1, 0.5, 0, 0, 1, 1])
    world.place("rail", down(0.4, 0.2, 0.3))
    world.place_joint("knob", 0.07)
    np.testing.assert_allclose(world.body_pose("cube"), [0.6, 0.1, 0.5, 0, 0, np.sqrt(0.5), np.sqrt(0.5)])
    np.testing.assert_allclose(world.body_pose("knob")[:3], [0.4, 0.13, 0.3], atol=1e-12)  # the rail lies upside down
    assert world.joint("knob") == 0.07
    with pytest.raises(UnknownNameError, match="did you mean 'cube'"):
        world.place("cub", down(0, 0, 0))
    with pytest.raises(ConfigError, match="<freejoint/>"):
        world.place("knob", down(0, 0, 0))


def test_world_refuses_impossible_values():
    world = World()
    for pose in ([0.5, 0, 0.2], [np.nan, 0, 0.2, 1, 0, 0, 0], [0.5, 0, 0.2, 0, 0, 0, 0]):
        with pytest.raises(ConfigError, match="7 finite numbers"):
            world.command(pose)
    with pytest.raises(ConfigError, match=r"between 0 \(closed\) and 1"):
        world.grip(1.5)
    with pytest.raises(ConfigError, match="MJCF is not accepted"):
        World("<body><geom/></body>")


# ---- the same again


def test_a_snapshot_continues_bit_for_bit():
    world = World(CUBE)
    world.set_parameters({"translational_Ki": 5.0})  # its sum is part of the state

    def run() -> list[np.ndarray]:
        found = []
        for i in range(8):
            world.advance(0.1)
            world.command(down(0.5, 0.02 * i, 0.02))
            world.grip(float(i < 3))
            found += [world.snapshot(), np.concatenate([world.arm().pose, world.arm().force, world.body_pose("cube")])]
        return found

    world.advance(0.5)
    world.command(down(0.5, 0.05, 0.02))  # not yet acted on
    start, pose, picture = world.snapshot(), world.pose(), world.render("wrist")
    first = run()
    world.home()
    world.restore(start)
    np.testing.assert_array_equal(world.pose(), pose)
    np.testing.assert_array_equal(world.render("wrist"), picture)
    for a, b in zip(first, run(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="another scene"):
        World().restore(start)


def story() -> str:
    """States and pixels of a short run, as one number."""
    world, summed = World(CUBE), hashlib.sha256()
    for z in (0.1, 0.03, 0.03, 0.2):
        world.command(down(0.5, 0.01, z))
        world.grip(float(z > 0.05))
        world.advance(0.3)
        for part in (world.snapshot(), world.arm().force, world.render("front"), world.render("wrist", 48, 80)):
            summed.update(part.tobytes())
    world.close()
    return summed.hexdigest()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )


def test_another_process_sees_the_same_and_ends_quietly():
    ended = python(
        "import tests.envs.test_world as t; import hilt.envs.tabletop.world as w; v = w.World(); "
        "v.render(); print(t.story())"
    )
    assert ended.stderr == ""
    assert ended.stdout.strip() == story()


# ---- pictures


def test_pictures_show_the_scene():
    world = World(CUBE)
    front = world.render("front", 48, 64)
    assert front.shape == (48, 64, 3) and front.dtype == np.uint8 and front.std() > 20
    again = world.render("front", 48, 64)
    np.testing.assert_array_equal(front, again)
    world.place("cube", [0.5, 0.2, 0.025, 0, 0, 0, 1])
    assert (world.render("front", 48, 64) != front).any()
    for height, width in ((300, 40), (40, 400), (300, 400)):  # more than was asked for before
        assert world.render("front", height, width).shape == (height, width, 3)
    np.testing.assert_array_equal(World(CUBE).render("front", 48, 64), front)  # another world beside it
    with pytest.raises(UnknownNameError, match="Known: front, wrist"):
        world.render("side")


def test_each_thread_renders():
    world, found = World(CUBE), []
    here = world.render()
    thread = threading.Thread(target=lambda: found.append(world.render()))
    thread.start()
    thread.join(60)
    np.testing.assert_array_equal(found[0], here)
    np.testing.assert_array_equal(world.render(), here)


def test_world_without_a_renderer_names_the_fix():
    code = "from hilt.envs.tabletop.world import World; w = World(); w.advance(0.1); print(w.arm().gripper); w.render()"
    ended = python(code, MUJOCO_GL="disable")
    assert ended.stdout == "1.0\n"
    for words in (
        "HiltError: no picture can be rendered with MUJOCO_GL=disable",
        "`hilt doctor`",
        "apt install libegl1",
        "MUJOCO_GL=osmesa",
    ):
        assert words in ended.stderr
    assert "mujoco does not start with MUJOCO_GL=nonsense" in python(code, MUJOCO_GL="nonsense").stderr


def test_world_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    for name in ("MUJOCO_GL", "LP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    World().render()
    assert dict(os.environ) == before


def test_world_reports_rendering_in_a_forked_process():
    world = World()
    world.render()
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        try:
            world.render()
        except HiltError as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    assert b"forked from one that had rendered" in os.read(readable, 1000)
