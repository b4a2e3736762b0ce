"""The tabletop suite: where episodes begin, and what counts as done."""

from __future__ import annotations

import itertools
from typing import Any

import mujoco
import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.envs.rotations import from_euler, to_matrix
from hilt.envs.tabletop.suite import BATON, CUBE, HUES, POST, SPLITS, SUITE, TabletopTask, pose
from hilt.envs.tabletop.world import World
from tests.effort import rounds

Array = np.ndarray[Any, Any]
EVERY_TASK = pytest.mark.parametrize("name", SUITE)
EVERY_STATE = [(split, state) for split, count in SPLITS.items() for state in range(count)]


def make(name: str) -> tuple[TabletopTask, World]:
    return SUITE[name], World(SUITE[name].objects, arms=SUITE[name].arms)


def placed_bodies(world: World) -> list[str]:
    """What the task brought to the table and may place."""
    model = world.model
    freed = {int(model.jnt_bodyid[i]) for i in range(model.njnt) if model.jnt_type[i] == mujoco.mjtJoint.mjJNT_FREE}
    names = [model.body(i).name for i in range(model.nbody) if i in freed or model.body_mocapid[i] >= 0]
    return [name for name in names if not name.endswith(("target_position", "target_rotation"))]


def layout(world: World) -> Array:
    """Where all of it lies, and how it is turned: meters, and the x axis times 5 cm."""
    poses = [world.body_pose(name) for name in placed_bodies(world)]
    return np.concatenate([np.concatenate([p[:3], 0.05 * to_matrix(p[3:])[:2, 0]]) for p in poses])


def test_the_suite_has_what_the_issue_asks_for() -> None:
    asked = {"reach", "push", "pick", "place", "stack", "peg", "drawer", "button"}
    assert asked <= set(SUITE) and len(SUITE) >= 12 and sum(task.arms == 2 for task in SUITE.values()) >= 1
    assert SPLITS == {"train": 50, "eval": 100, "test": 100}
    assert len({task.instruction for task in SUITE.values()}) == len(SUITE)
    assert all(task.name == name and 40 <= task.step_limit <= 150 for name, task in SUITE.items())


@EVERY_TASK
def test_initial_states_are_free_of_overlap_unsolved_disjoint_and_wide(name: str) -> None:
    task, world = make(name)
    layouts: dict[str, list[Array]] = {split: [] for split in SPLITS}
    for split, state in EVERY_STATE[:: rounds(4, 1)]:
        task.begin(world, split, state)
        mujoco.mj_forward(world.model, world.data)
        assert not task.success(world), (split, state)
        depths = world.data.contact.dist
        assert depths.size == 0 or depths.min() > -1e-3, (split, state, depths.min())
        layouts[split].append(layout(world))
    for a, b in itertools.combinations(SPLITS, 2):
        gaps = np.linalg.norm(np.stack(layouts[a])[:, None] - np.stack(layouts[b])[None], axis=-1)
        assert gaps.min() > 5e-4, (a, b, gaps.min())
    for split in SPLITS:  # at least one thing on the table can be almost anywhere on it
        spread = np.ptp(np.stack(layouts[split]).reshape(len(layouts[split]), -1, 5), axis=0)
        assert spread[:, 0].max() > 0.05 and spread[:, 1].max() > 0.05, (split, spread)


@EVERY_TASK
def test_tabletop_objects_rest_before_the_arm_moves(name: str) -> None:
    task, world = make(name)
    for split in SPLITS:
        task.begin(world, split, 7)
        before = layout(world)
        world.advance(0.5)
        assert np.abs(layout(world) - before).max() < 2e-3
        assert not task.success(world)


@pytest.mark.parametrize("name", ["pick", "place"])
def test_cube_and_target_are_seen_by_both_cameras_in_64_pixels(name: str) -> None:
    task, world = make(name)
    for split, state in EVERY_STATE[:: rounds(16, 2)]:
        task.begin(world, split, state)
        world.advance(0.02)
        for camera, least in (("front", 20), ("wrist", 40)):
            red, green, blue = np.moveaxis(world.render(camera, 64, 64).astype(float), -1, 0)
            assert np.sum((red > 90) & (red > 2 * green) & (red > 2 * blue)) >= least, (camera, split, state)
            if name == "place":
                assert np.sum((green > 60) & (green > 1.8 * red) & (green > 1.8 * blue)) >= least, (
                    camera,
                    split,
                    state,
                )


def test_a_numbered_state_is_the_same_everywhere_and_after_anything() -> None:
    (task, world), (_, other) = make("pick"), make("pick")
    task.begin(world, "train", 0)
    first = world.snapshot()
    world.command(world.pose() + np.array([0.05, 0, -0.1, 0, 0, 0, 0]))
    world.advance(1.0)
    task.begin(world, "train", 0)
    task.begin(other, "test", 5)
    task.begin(other, "train", 0)
    assert np.array_equal(world.snapshot(), first) and np.array_equal(other.snapshot(), first)
    # other machines and versions draw the same: these numbers are part of the suite
    assert world.body_pose("cube")[:2] == pytest.approx(PINNED["train"], abs=1e-9)
    task.begin(world, "test", 99)
    assert world.body_pose("cube")[:2] == pytest.approx(PINNED["test"], abs=1e-9)


PINNED = {"train": (0.44755430902932364, 0.10184864831199619), "test": (0.5554430098965144, -0.05957458370986991)}


def test_a_state_that_does_not_exist_is_refused_in_words() -> None:
    task, world = make("reach")
    with pytest.raises(ConfigError, match="no split 'validation': choose one of train, eval, test"):
        task.begin(world, "validation", 0)
    with pytest.raises(ConfigError, match="has eval states 0 to 99, not 100"):
        task.begin(world, "eval", 100)
    with pytest.raises(ConfigError, match="not -1"):
        task.begin(world, "test", -1)


def test_pick_red_and_pick_blue_differ_only_in_the_instruction() -> None:
    (red, world), (blue, other) = make("pick_red"), make("pick_blue")
    for split, state in EVERY_STATE[::20]:
        red.begin(world, split, state)
        blue.begin(other, split, state)
        assert np.array_equal(world.snapshot(), other.snapshot())
    hold(world, "blue")
    assert blue.success(world) and not red.success(world)
    world.place("red", pose((0.4, 0.2), 0.1))
    assert not blue.success(world), "the other one is not left alone"


def hold(world: World, cube: str) -> None:
    """The arm closes on a cube that is placed between its fingers, in the air at home."""
    world.place(cube, np.array([*world.pose()[:3], 0, 0, 0, 1]))
    world.grip(0.0)
    world.advance(0.6)


def test_pick_wants_the_cube_held_and_not_just_high() -> None:
    task, world = make("pick")
    task.begin(world, "train", 1)
    world.place("cube", pose((0.6, 0.1), 0.3))
    assert not task.success(world)
    task.begin(world, "train", 1)
    hold(world, "cube")
    assert task.success(world)


def test_place_wants_the_cube_on_the_target_and_let_go() -> None:
    task, world = make("place")
    task.begin(world, "train", 2)
    x, y = world.body_pose("target")[:2]
    world.place("cube", pose((x + 0.02, y), CUBE))
    assert task.success(world)
    world.place("cube", pose((x + 0.03, y), CUBE))
    assert not task.success(world)
    world.place("cube", pose((x, y), CUBE + 0.05))
    assert not task.success(world), "in the air"
    world.place("cube", pose((x, y), CUBE))
    world.grip(0.5)
    world.advance(0.5)
    assert not task.success(world), "the gripper is not open"


def test_stack_wants_it_on_top_and_let_go() -> None:
    task, world = make("stack")
    task.begin(world, "train", 2)
    x, y = world.body_pose("blue")[:2]
    world.place("red", pose((x, y), 3 * CUBE))
    world.advance(0.3)
    assert task.success(world)
    world.grip(0.5)
    world.advance(0.5)
    assert not task.success(world)
    world.place("red", pose((x + 2.2 * CUBE, y), CUBE))
    assert not task.success(world), "beside it"


def test_peg_wants_depth() -> None:
    task, world = make("peg")
    task.begin(world, "train", 2)
    x, y, _, *turn = world.body_pose("hole")
    for low_end, done in ((0.001, True), (0.02, False), (0.05, False)):
        world.place("peg", np.array([x, y, 0.055 + low_end, *turn]))
        assert task.success(world) is done, low_end
    world.place("peg", pose((x - 0.09, y), 0.055))
    assert not task.success(world), "beside the block"


def test_the_peg_fits_with_three_millimeters_on_each_side_and_not_askew() -> None:
    task, world = make("peg")
    task.begin(world, "train", 2)
    world.place("hole", pose((0.5, 0.0), 0.0))
    for off, yaw, touches in ((0.0025, 0.0, False), (0.004, 0.0, True), (0.0, 0.15, False), (0.0, 0.5, True)):
        world.place("peg", pose((0.5 + off, 0.0), 0.056, yaw))
        mujoco.mj_forward(world.model, world.data)
        assert bool(world.data.ncon) is touches, (off, yaw)


def test_knock_wants_the_other_bottle_standing() -> None:
    task, world = make("knock")
    task.begin(world, "train", 2)
    lying = np.array([0.5, 0.25, 0.022, *from_euler([np.pi / 2, 0, 0])])
    world.place("yellow", lying)
    assert task.success(world)
    world.place("purple", lying + np.array([0.1, 0, 0, 0, 0, 0, 0]))
    assert not task.success(world)


def test_sweep_wants_both_on_the_mat() -> None:
    """Not beside it, nor behind it."""
    task, world = make("sweep")
    task.begin(world, "train", 2)
    down = from_euler([0, 0, 0])
    world.place("one", np.array([0.6, 0.1, 0.018, *down]))
    assert not task.success(world)
    for x, y, done in ((0.6, -0.1, True), (0.56, 0.0, False), (0.75, 0.0, False), (0.6, 0.25, False)):
        world.place("two", np.array([x, y, 0.018, *down]))
        assert task.success(world) is done, (x, y)


def test_slide_wants_the_knob_to_stop_at_the_mark() -> None:
    task, world = make("slide")
    task.begin(world, "train", 2)
    rail = to_matrix(world.body_pose("rail")[3:])[:, 1]
    there = float(rail @ (world.body_pose("mark") - world.body_pose("rail"))[:3])
    world.place_joint("knob", there)
    assert task.success(world)
    world.data.joint("knob").qvel[0] = 0.1
    assert not task.success(world), "on its way past"
    world.place_joint("knob", there + 0.01)
    assert not task.success(world)


def test_two_hands_are_wanted() -> None:
    task, world = make("lift_tray")
    task.begin(world, "train", 2)
    world.place("tray", pose((0.45, 0.0), 0.2))
    assert not task.success(world), "nobody holds it"
    task, world = make("handover")
    task.begin(world, "train", 2)
    # so that the right post is between the right fingers
    there = world.pose(1)[:3] + np.array([0, BATON / 2, 0.015 - POST])
    world.place("baton", pose(there, there[2]))
    assert not task.success(world), "between open fingers"
    world.grip(0.0, 1)
    world.advance(0.5)
    assert task.success(world)
    world.grip(0.0, 0)
    world.advance(0.5)
    assert not task.success(world), "the left hand is not open"


@pytest.mark.parametrize(
    ("name", "joint", "short", "done"),
    [
        ("drawer", "drawer", 0.11, 0.13),
        ("close_drawer", "drawer", 0.02, 0.0),
        ("button", "button", 0.006, 0.011),
        ("lever", "lever", 0.3, 0.6),
        ("dial", "dial", 0.9, 1.1),
    ],
)
def test_tabletop_joints_must_move_far_enough(name: str, joint: str, short: float, done: float) -> None:
    task, world = make(name)
    task.begin(world, "train", 2)
    world.place_joint(joint, short)
    assert not task.success(world)
    world.place_joint(joint, done)
    assert task.success(world)


def test_only_the_named_button_counts_and_there_are_more_states_to_learn_on() -> None:
    task, world = make("press_green")
    assert all(SUITE[f"press_{name}"].scene == task.scene for name in HUES), "one scene: only the words differ"
    assert task.states == {"train": 2_000, "eval": 100, "test": 100} and SUITE["button"].states == SPLITS
    task.begin(world, "train", 1_999)
    with pytest.raises(ConfigError, match="train states 0 to 1999, not 2000"):
        task.begin(world, "train", 2_000)
    for pressed, counts in ((("green",), True), (("red",), False), (("green", "red"), False), ((), False)):
        for name in HUES:
            world.place_joint(name, 0.011 if name in pressed else 0.0)
        assert task.success(world) == counts, pressed
