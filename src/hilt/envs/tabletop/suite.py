"""The tabletop suite: twenty-three tasks, each a handful of bodies, a way to place them, and what counts as done.

A task is data for ``World``: an MJCF fragment and two functions. Lengths are meters, the table's top is z = 0, the
arm's base looks along +x. What an episode may place is either free (cubes, pegs) or a mocap body (targets, cabinets,
bases of buttons), so that all of a scene is in ``world.snapshot()``. Success is read from the physics alone.

State ``i`` of a split is drawn from a generator seeded by (scene, split, i): the
same everywhere, and no two states are the same.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hilt.core.errors import ConfigError
from hilt.envs.rotations import Array, from_euler, to_matrix
from hilt.envs.tabletop.world import World

SPLITS: Mapping[str, int] = {"train": 50, "eval": 100, "test": 100}
"""How many numbered initial states each split of a task has, unless the task overrides it."""
ACTION_SCALE = (0.03, 0.15)
"""The largest step along an axis, in meters, and the largest turn about one, in radians, of a control step of 0.1 s."""
Point: TypeAlias = Sequence[float] | Array


@dataclass(frozen=True)
class TabletopTask:
    """What is on the table, where it may lie at the beginning, what is asked for, and when it is done."""

    name: str
    instruction: str
    step_limit: int
    """Control steps, at 10 a second."""
    objects: str
    """MJCF bodies."""
    place: Callable[[World, np.random.Generator], object]
    success: Callable[[World], bool]
    arms: int = 1
    scene: str = ""
    """Tasks with one scene share its initial states, so that only the words tell them apart; empty: the task's name."""
    states: Mapping[str, int] = field(default_factory=lambda: SPLITS)
    """How many initial states each split has."""

    def begin(self, world: World, split: str, state: int) -> None:
        """Starts the numbered initial state: the arm at home, the objects where that number puts them."""
        if split not in self.states:
            raise ConfigError(f"tabletop/{self.name} has no split {split!r}: choose one of {', '.join(self.states)}.")
        if not 0 <= state < self.states[split]:
            raise ConfigError(f"tabletop/{self.name} has {split} states 0 to {self.states[split] - 1}, not {state}.")
        world.home()
        self.place(
            world,
            np.random.default_rng([zlib.crc32((self.scene or self.name).encode()), list(SPLITS).index(split), state]),
        )


# ---- bodies

RED, GREEN, BLUE, YELLOW, PURPLE = ".85 .15 .12 1", ".15 .7 .2 1", ".15 .3 .85 1", ".95 .8 .1 1", ".55 .2 .7 1"
GRAY, WOOD = ".3 .32 .36 1", ".55 .34 .18 1"
CUBE = 0.025  # half an edge
# Moving parts of fixtures meet the arm and the table, never the fixture they slide in.
PART = 'contype="2" conaffinity="1" '
GHOST = 'contype="0" conaffinity="0" '


def geom(kind: str, size: str, rgba: str, pos: str = "0 0 0", more: str = "") -> str:
    return f'<geom type="{kind}" size="{size}" rgba="{rgba}" pos="{pos}" {more}/>'


def free(name: str, *geoms: str) -> str:
    """Something that can be picked up."""
    return f'<body name="{name}"><freejoint name="{name}"/>{"".join(geoms)}</body>'


def fixed(name: str, *inside: str) -> str:
    """Something that stays where an episode places it."""
    return f'<body name="{name}" mocap="true">{"".join(inside)}</body>'


def moving(name: str, pos: str, joint: str, *geoms: str) -> str:
    """A part of a fixture, on a joint of the same name."""
    return f'<body name="{name}" pos="{pos}"><joint name="{name}" {joint}/>{"".join(geoms)}</body>'


def cube(name: str, rgba: str, half: float = CUBE) -> str:
    return free(name, geom("box", f"{half} {half} {half}", rgba, more='density="500"'))


def disc(name: str, rgba: str, radius: float = 0.05) -> str:
    """A mark painted on the table."""
    return fixed(name, geom("cylinder", f"{radius} .001", rgba, more=GHOST))


# ---- places

LOW, HIGH = np.array([0.40, -0.18]), np.array([0.60, 0.18])  # where most objects begin


def pose(at: Point, z: float, yaw: float = 0.0) -> Array:
    return np.array([at[0], at[1], z, *from_euler([0.0, 0.0, yaw])])


def two_points(rng: np.random.Generator, gap: float, low: Point = LOW, high: Point = HIGH) -> Array:
    return points(rng, 2, gap, low, high)


def points(rng: np.random.Generator, count: int, gap: float, low: Point = LOW, high: Point = HIGH) -> Array:
    """In a rectangle, at least ``gap`` from each other."""
    while True:  # every caller's rectangle has room for twice as many
        drawn = rng.uniform(low, high, (count, 2))
        if all(np.linalg.norm(one - other) >= gap for one, other in itertools.combinations(drawn, 2)):
            return drawn


# ---- what is measured


def position(world: World, body: str) -> Array:
    return np.asarray(world.body_pose(body)[:3])


def distance(world: World, a: str, b: str) -> float:
    """Along the table."""
    return float(np.linalg.norm(position(world, a)[:2] - position(world, b)[:2]))


def uprightness(world: World, body: str) -> float:
    """1 standing, 0 lying."""
    return float(to_matrix(world.body_pose(body)[3:])[2, 2])


def rests(world: World, body: str, height: float) -> bool:
    """Its middle is so high, and it does not move."""
    return (
        abs(position(world, body)[2] - height) < 0.005 and float(np.linalg.norm(world.data.joint(body).qvel[:3])) < 0.03
    )


def is_open(world: World, arm: int = 0) -> bool:
    """Wider than anything that it could hold."""
    return world.arm(arm).gripper > 0.8


def holds(world: World, point: Array, arm: int = 0) -> bool:
    """The fingers are round the point, neither open nor shut on nothing."""
    state = world.arm(arm)
    return bool(np.linalg.norm(state.pose[:3] - point) < 0.03 and 0.05 < state.gripper < 0.8)


# ---- the tasks

SUITE: dict[str, TabletopTask] = {}  # every task by its name


def add(name: str, instruction: str, step_limit: int, objects: str, place: Any, success: Any, **more: Any) -> None:
    SUITE[name] = TabletopTask(
        name, instruction, step_limit, objects, place, lambda world: bool(success(world)), **more
    )


def place_ball(world: World, rng: np.random.Generator) -> None:
    ball = world.pose()[:3]
    while np.linalg.norm(ball - world.pose()[:3]) < 0.12:
        ball = rng.uniform([0.35, -0.25, 0.06], [0.62, 0.25, 0.35])
    world.place("ball", pose(ball, ball[2]))


add(
    "reach",
    "move the hand to the green ball",
    40,
    fixed("ball", geom("sphere", ".025", GREEN, more=GHOST)),
    place_ball,
    lambda world: np.linalg.norm(world.pose()[:3] - position(world, "ball")) < 0.01,
)


def place_push(world: World, rng: np.random.Generator) -> None:
    block = rng.uniform([0.37, -0.14], [0.45, 0.14])
    angle, length = rng.uniform(-0.5, 0.5), rng.uniform(0.12, 0.17)
    target = block + length * np.array([np.cos(angle), np.sin(angle)])
    world.place("block", pose(block, 0.025, angle + rng.uniform(-0.3, 0.3)))
    world.place("target", pose(target, 0.001))


add(
    "push",
    "push the blue block onto the red target",
    80,
    free("block", geom("box", ".03 .03 .025", BLUE, more='density="400"')) + disc("target", RED, 0.045),
    place_push,
    lambda world: distance(world, "block", "target") < 0.02 and rests(world, "block", 0.025),
)


def place_cube(world: World, rng: np.random.Generator) -> None:
    world.place("cube", pose(rng.uniform(LOW, HIGH), 0.03, rng.uniform(-0.1, 0.1)))


def lifted(world: World, body: str, not_this: str | None = None) -> bool:
    """Up in the air, between the fingers."""
    where = position(world, body)
    return where[2] > 0.12 and holds(world, where) and (not_this is None or position(world, not_this)[2] < CUBE + 0.01)


add("pick", "pick up the red cube", 60, cube("cube", RED, 0.03), place_cube, lambda world: lifted(world, "cube"))


def place_two_cubes(world: World, rng: np.random.Generator) -> None:
    for name, point in zip(("red", "blue"), two_points(rng, 0.14), strict=True):
        world.place(name, pose(point, CUBE, rng.uniform(-0.5, 0.5)))


for color, rest in (("red", "blue"), ("blue", "red")):
    add(
        f"pick_{color}",
        f"pick up the {color} cube and leave the other one",
        60,
        cube("red", RED) + cube("blue", BLUE),
        place_two_cubes,
        lambda world, wanted=color, other=rest: lifted(world, wanted, other),
        scene="pick_color",
    )


def place_cube_and_target(world: World, rng: np.random.Generator) -> None:
    start, target = two_points(rng, 0.14)
    world.place("cube", pose(start, CUBE, rng.uniform(-0.6, 0.6)))
    world.place("target", pose(target, 0.001))


def placed(world: World) -> bool:
    return distance(world, "cube", "target") < 0.025 and rests(world, "cube", CUBE) and is_open(world)


add(
    "place",
    "put the red cube on the green target",
    90,
    cube("cube", RED) + disc("target", GREEN),
    place_cube_and_target,
    placed,
)


def stacked(world: World) -> bool:
    return distance(world, "red", "blue") < CUBE and rests(world, "red", 3 * CUBE) and is_open(world)


add(
    "stack", "stack the red cube on the blue cube", 100, cube("red", RED) + cube("blue", BLUE), place_two_cubes, stacked
)

PEG, TALL, CLEARANCE, HOLE_DEPTH = 0.012, 0.055, 0.003, 0.05  # half the peg's sides, the gap on each side, meters


def hole_block() -> str:
    """Four walls round a square hole."""
    inner, outer = PEG + CLEARANCE, 0.05
    middle, thick, half = (inner + outer) / 2, (outer - inner) / 2, HOLE_DEPTH / 2
    long = "".join(geom("box", f"{thick} {outer} {half}", WOOD, f"{side * middle} 0 {half}") for side in (-1, 1))
    short = "".join(geom("box", f"{inner} {thick} {half}", WOOD, f"0 {side * middle} {half}") for side in (-1, 1))
    return fixed("hole", long + short)


def place_peg(world: World, rng: np.random.Generator) -> None:
    world.place("peg", pose(rng.uniform([0.40, -0.18], [0.58, -0.04]), 0.055, rng.uniform(-0.5, 0.5)))
    world.place("hole", pose(rng.uniform([0.42, 0.08], [0.58, 0.18]), 0.0, rng.uniform(-0.5, 0.5)))


def lower_end(world: World) -> Array:
    """Where the middle of the peg's lower end is."""
    axis = to_matrix(world.body_pose("peg")[3:])[:, 2]
    return np.asarray(position(world, "peg") - TALL * axis * np.sign(axis[2]))


def inserted(world: World) -> bool:
    """The peg's lower end is four fifths down the hole."""
    low = lower_end(world)
    return bool(np.linalg.norm(low[:2] - position(world, "hole")[:2]) < PEG and low[2] < 0.2 * HOLE_DEPTH)


PEG_AND_HOLE = free("peg", geom("box", f"{PEG} {PEG} {TALL}", YELLOW, more='density="800"')) + hole_block()
add("peg", "insert the yellow peg into the hole", 120, PEG_AND_HOLE, place_peg, inserted)


def place_held_peg(world: World, rng: np.random.Generator) -> None:
    """In the closed hand, a little differently each time, as parts are in HIL-SERL's insertions."""
    world.place("hole", pose(rng.uniform([0.40, -0.18], [0.58, 0.18]), 0.0, rng.uniform(-0.5, 0.5)))
    hand = world.pose()
    world.place(
        "peg",
        pose(hand[:2] + np.array([rng.uniform(-0.004, 0.004), 0.0]), hand[2] - 0.025 + rng.uniform(-0.006, 0.006), 0.0),
    )
    for finger in ("finger1", "finger2"):
        world.place_joint(finger, PEG + 0.0005)
    world.grip(0.0)


add("insert", "insert the peg in the hand into the hole", 60, PEG_AND_HOLE, place_held_peg, inserted)


def cabinet() -> str:
    """A drawer with a handle that points at the robot."""
    sides = ((".08 .005 .035", ".08 -.095 .035"), (".08 .005 .035", ".08 .095 .035"), (".005 .1 .035", ".165 0 .035"))
    shell = "".join(geom("box", size, WOOD, where, PART) for size, where in (*sides, (".085 .1 .004", ".085 0 .074")))
    drawer = moving(
        "drawer",
        "0 0 .04",
        'type="slide" axis="-1 0 0" range="0 .15" damping="4" frictionloss="1.5"',
        geom("box", ".006 .085 .03", BLUE, "-.006 0 0", PART + 'mass=".3"'),
        geom("box", ".07 .08 .004", GRAY, ".07 0 -.025", PART + 'mass=".2"'),
        geom("box", ".025 .008 .022", YELLOW, "-.037 0 .01", PART + 'mass=".05"'),
    )
    return fixed("cabinet", shell, drawer)


def place_cabinet(world: World, rng: np.random.Generator) -> None:
    world.place("cabinet", pose(rng.uniform([0.58, -0.15], [0.65, 0.15]), 0.0, rng.uniform(-0.3, 0.3)))


def place_open_cabinet(world: World, rng: np.random.Generator) -> None:
    place_cabinet(world, rng)
    world.place_joint("drawer", rng.uniform(0.07, 0.14))


add("drawer", "open the drawer", 80, cabinet(), place_cabinet, lambda world: world.joint("drawer") > 0.12)
add("close_drawer", "close the drawer", 80, cabinet(), place_open_cabinet, lambda world: world.joint("drawer") < 0.008)


def place_at(name: str, turn: float = 0.0) -> Callable[[World, np.random.Generator], None]:
    """One fixture anywhere on the table, turned by at most so much."""
    return lambda world, rng: world.place(name, pose(rng.uniform(LOW, HIGH), 0.0, rng.uniform(-turn, turn)))


add(
    "button",
    "press the red button",
    50,
    fixed(
        "base",
        geom("box", ".05 .05 .015", GRAY, "0 0 .015", PART),
        moving(
            "button",
            "0 0 .036",
            'type="slide" axis="0 0 -1" range="0 .012" stiffness="250" springref="-.006" damping="3"',
            geom("cylinder", ".028 .012", RED, more=PART + 'mass=".05"'),
        ),
    ),
    place_at("base", 0.5),
    lambda world: world.joint("button") > 0.009,
)

HUES = {"red": RED, "green": GREEN, "blue": BLUE, "yellow": YELLOW}


def place_buttons(world: World, rng: np.random.Generator) -> None:
    for name, point in zip(HUES, points(rng, len(HUES), 0.095, [0.40, -0.16], [0.58, 0.16]), strict=True):
        world.place(f"{name} base", pose(point, 0.0))


def pressed(world: World, wanted: str) -> bool:
    """This one, and no other."""
    return all((world.joint(name) > 0.008) == (name == wanted) for name in HUES)


BUTTONS = "".join(
    fixed(
        f"{name} base",
        geom("cylinder", ".04 .012", GRAY, "0 0 .012", PART),
        moving(
            name,
            "0 0 .032",
            'type="slide" axis="0 0 -1" range="0 .012" stiffness="250" damping="3"',
            geom("cylinder", ".03 .012", rgba, more=PART + 'mass=".01"'),
        ),
    )
    for name, rgba in HUES.items()
)
for color in HUES:
    add(
        f"press_{color}",
        f"press the {color} button and no other",
        40,
        BUTTONS,
        place_buttons,
        lambda world, wanted=color: pressed(world, wanted),
        scene="press_color",
        # many to learn on, for reinforcement learning from few demonstrations
        states={"train": 2_000, "eval": 100, "test": 100},
    )


def place_lever(world: World, rng: np.random.Generator) -> None:
    place_at("base", 0.5)(world, rng)
    world.place_joint("lever", rng.uniform(-0.65, -0.4))


add(
    "lever",
    "push the lever over, away from the robot",
    70,
    fixed(
        "base",
        geom("box", ".04 .05 .02", GRAY, "0 0 .02", PART),
        moving(
            "lever",
            "0 0 .04",
            'axis="0 1 0" range="-.65 .65" damping=".05" frictionloss=".12"',
            geom("capsule", ".008 .05", GRAY, "0 0 .05", PART + 'mass=".05"'),
            geom("sphere", ".018", RED, "0 0 .11", PART + 'mass=".03"'),
        ),
    ),
    place_lever,
    lambda world: world.joint("lever") > 0.45,
)

add(
    "dial",
    "turn the dial to the left",
    80,
    fixed(
        "base",
        geom("cylinder", ".05 .01", GRAY, "0 0 .01", PART),
        moving(
            "dial",
            "0 0 .02",
            'axis="0 0 1" range="-.1 1.4" damping=".05" frictionloss=".05"',
            geom("cylinder", ".04 .008", BLUE, "0 0 .008", PART + 'mass=".1"'),
            geom("box", ".035 .009 .022", YELLOW, "0 0 .036", PART + 'mass=".05"'),
        ),
    ),
    lambda world, rng: world.place("base", pose(rng.uniform(LOW, HIGH), 0.0, rng.uniform(-0.9, 0.2))),
    lambda world: world.joint("dial") > 1.0,
)


def place_slide(world: World, rng: np.random.Generator) -> None:
    where, yaw = rng.uniform([0.42, -0.06], [0.58, 0.06]), rng.uniform(-0.4, 0.4)
    along = rng.choice([-1.0, 1.0]) * rng.uniform(0.04, 0.11) * np.array([-np.sin(yaw), np.cos(yaw)])
    across = -0.035 * np.array([np.cos(yaw), np.sin(yaw)])
    world.place("rail", pose(where, 0.0, yaw))
    world.place("mark", pose((where + along + across), 0.001, yaw))


def slid(world: World) -> bool:
    """The knob is beside the mark, along the rail, and stays there."""
    rail, knob = to_matrix(world.body_pose("rail")[3:])[:, 1], world.data.joint("knob")
    off = rail @ (position(world, "mark") - position(world, "rail")) - knob.qpos[0]
    return bool(abs(off) < 0.008 and abs(knob.qvel[0]) < 0.02)


add(
    "slide",
    "slide the knob to the green mark",
    80,
    fixed(
        "rail",
        geom("box", ".015 .15 .008", GRAY, "0 0 .008", PART),
        moving(
            "knob",
            "0 0 .016",
            'type="slide" axis="0 1 0" range="-.125 .125" damping="2" frictionloss="1"',
            geom("box", ".018 .011 .024", RED, "0 0 .026", PART + 'mass=".08"'),
        ),
    )
    + fixed("mark", geom("box", ".02 .008 .001", GREEN, more=GHOST)),
    place_slide,
    slid,
)


def place_bottles(world: World, rng: np.random.Generator) -> None:
    for name, point in zip(("yellow", "purple"), two_points(rng, 0.15), strict=True):
        world.place(name, pose(point, 0.06))


add(
    "knock",
    "knock over the yellow bottle and leave the purple one standing",
    60,
    "".join(
        free(name, geom("cylinder", ".022 .06", hue, more='density="400"'))
        for name, hue in (("yellow", YELLOW), ("purple", PURPLE))
    ),
    place_bottles,
    lambda world: uprightness(world, "yellow") < 0.3 and uprightness(world, "purple") > 0.95,
)

SWEPT, MAT = 0.57, (0.07, 0.22)  # where the mat begins, in x, and half of its length and width


def place_crumbs(world: World, rng: np.random.Generator) -> None:
    for name, point in zip(("one", "two"), two_points(rng, 0.09, [0.40, -0.14], [0.48, 0.14]), strict=True):
        world.place(name, pose(point, 0.018, rng.uniform(-0.3, 0.3)))
    world.place("mat", pose((SWEPT + MAT[0], 0.0), 0.001))


def swept(world: World, name: str) -> bool:
    """It lies on the mat, not beside or behind it."""
    off = np.abs(position(world, name) - position(world, "mat"))[:2]
    return bool((off < MAT).all()) and rests(world, name, 0.018)


add(
    "sweep",
    "sweep both blocks onto the green mat",
    120,
    cube("one", RED, 0.018)
    + cube("two", YELLOW, 0.018)
    + fixed("mat", geom("box", f"{MAT[0]} {MAT[1]} .001", GREEN, more=GHOST)),
    place_crumbs,
    lambda world: all(swept(world, name) for name in ("one", "two")),
)

# ---- two arms: objects with a post on either side, gripped from above


def posts(apart: float, height: float) -> str:
    """The left one is red, the right one blue."""
    return "".join(
        geom("box", f".018 .009 {height / 2}", rgba, f"0 {side * apart / 2} {height / 2}", 'density="300"')
        for side, rgba in ((1, RED), (-1, BLUE))
    )


def post(world: World, body: str, arm: int, apart: float, height: float) -> Array:
    """Where an arm should grip."""
    local = np.array([0.0, (0.5 if arm == 0 else -0.5) * apart, height - 0.015])
    result: Array = position(world, body) + to_matrix(world.body_pose(body)[3:]) @ local
    return result


TRAY, BATON, POST = 0.36, 0.28, 0.07  # between the posts of each, and their height


def place_tray(world: World, rng: np.random.Generator) -> None:
    world.place("tray", pose(rng.uniform([0.36, -0.08], [0.56, 0.08]), 0.0, rng.uniform(-0.3, 0.3)))


def lifted_by_both(world: World) -> bool:
    level = uprightness(world, "tray") > 0.97
    return (
        position(world, "tray")[2] > 0.10
        and level
        and all(holds(world, post(world, "tray", arm, TRAY, POST), arm) for arm in (0, 1))
    )


add(
    "lift_tray",
    "lift the tray with both hands and keep it level",
    80,
    free("tray", geom("box", f".06 {TRAY / 2 + 0.01} .006", WOOD, "0 0 .006", 'density="300"'), posts(TRAY, POST)),
    place_tray,
    lifted_by_both,
    arms=2,
)


def garage() -> str:
    """Round the baton's right post, open to the left: only the left hand can pull it out."""
    right = -BATON / 2
    walls = [geom("box", ".005 .035 .045", GRAY, f"{side * 0.045} {right} .045") for side in (-1, 1)]
    walls += [
        geom("box", ".05 .005 .045", GRAY, f"0 {right - 0.04} .045"),
        geom("box", ".05 .045 .004", GRAY, f"0 {right - 0.01} .094"),
    ]
    return fixed("garage", *walls)


def place_baton(world: World, rng: np.random.Generator) -> None:
    start = pose(rng.uniform([0.38, 0.02], [0.56, 0.10]), 0.0, rng.uniform(-0.2, 0.2))
    world.place("baton", start)
    world.place("garage", start)


def handed_over(world: World) -> bool:
    """In the right hand, in the air, and out of the left one."""
    far = np.linalg.norm(world.arm(0).pose[:3] - post(world, "baton", 0, BATON, POST)) > 0.06
    held = holds(world, post(world, "baton", 1, BATON, POST), 1)
    return bool(position(world, "baton")[2] > 0.05 and held and is_open(world, 0) and far)


add(
    "handover",
    "hand the baton from the left hand to the right hand",
    140,
    free("baton", geom("box", f".01 {BATON / 2} .01", WOOD, "0 0 .01", 'density="300"'), posts(BATON, POST)) + garage(),
    place_baton,
    handed_over,
    arms=2,
)
