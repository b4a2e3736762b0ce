"""Scripted experts for LIBERO's tasks, by someone who sees where everything is.

``expert(sim)`` gives a function that returns the next action. It is made from the goal of the task's BDDL file ("On
bowl plate", "Open drawer") and reads what a policy does not see: the poses of objects and fixtures, their collision
geometry, and contacts. It never writes them; all that it can do is the action that LIBERO's own OSC_POSE controller
takes. Goals are looked up at every step; what slips out of the hand is taken again.

It knows how to grasp the objects in `GRASPS` and how to handle the fixtures in `DRAWERS` and `KNOBS`: those of
libero_spatial and libero_goal. Other goals are refused with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError
from hilt.envs.rotations import (
    DOWN,
    Array,
    from_euler,
    inverse,
    multiply,
    scalar_last,
    to_matrix,
    to_rotation_vector,
)
from hilt.envs.scripted_hand import UP, Script, ScriptedHand

SCALE = (0.015, 0.15)
"""What an action of 1 moves the hand in a step of 50 ms, in meters and radians, once it is at full speed: the
controller adds 0.05 and 0.5 to the hand's pose, and its stiffness brings the hand there with a lag."""
BOX = 6
"""MuJoCo's number for geoms that are boxes."""
FINGER = 0.012
"""Half the thickness of a finger, in meters, with what it needs around it."""
OPENING = 0.04
"""How far each finger of the open hand is from the middle, in meters."""
FINGERS, PALM = (-0.012, 0.01, 0.035), (0.05, 0.08, 0.11, 0.14)
"""Heights above the fingertips at which there are fingers, and at which there is the hand, in meters."""
REACH = 0.6
"""How far from its shoulder the wrist moves freely, in meters: farther out the elbow is nearly straight."""
SHOULDER, WRIST = (0.0, 0.333), (-0.088, 0.204)
"""Outward and up, in meters: the shoulder seen from the base, and the wrist seen from the fingertips of a hand that
points down."""
TILT = 1.4
"""How far a hand that pulls a drawer is tilted from pointing down, in radians."""
PATH_WIDTH = 0.12
"""How far from the middle of its way a moving hand may touch something, in meters."""


@dataclass(frozen=True)
class Boxes:
    """Boxes that can be touched."""

    centers: Array
    """[boxes, 3]"""
    rotations: Array
    """[boxes, 3, 3]; the columns are the axes of a box"""
    half_sizes: Array
    """[boxes, 3]"""

    def distances(self, points: Array) -> Array:
        """From each point to each box, [points, boxes]; 0 inside of it."""
        local = np.einsum("bji,pbj->pbi", self.rotations, points[:, None] - self.centers)
        result: Array = np.linalg.norm(np.maximum(np.abs(local) - self.half_sizes, 0.0), axis=-1)
        return result

    def tops(self) -> Array:
        """The height of the highest point of each box."""
        result: Array = self.centers[:, 2] + (np.abs(self.rotations[:, 2]) * self.half_sizes).sum(-1)
        return result


class LiberoScene:
    """Where everything is in one of LIBERO's simulators; it only reads."""

    def __init__(self, sim: Any):
        self.sim, self.model, self.data = sim, sim.sim.model, sim.sim.data
        (self.robot,) = sim.robots

    def pose(self, arm: int = 0) -> Array:
        """The point between the fingertips, and the rotation of the hand."""
        hand = self.model.body_name2id(f"{self.robot.robot_model.naming_prefix}right_hand")
        point = self.data.site_xpos[self.robot.eef_site_id]
        return np.concatenate([point, scalar_last(self.data.body_xquat[hand])])

    commanded = pose

    @property
    def base(self) -> Array:
        """The position of the arm's base, [x, y, z]."""
        return np.array(self.data.get_body_xpos(self.robot.robot_model.root_body))

    @property
    def opening(self) -> float:
        """The distance between the fingers."""
        left, right = (self.data.qpos[i] for i in self.robot._ref_gripper_joint_pos_indexes)
        return float(left - right)

    def position(self, name: str) -> Array:
        """The origin of an object, or of a region of it or of the table."""
        if name in self.sim.object_sites_dict:
            return np.array(self.data.get_site_xpos(name))
        return np.array(self.data.body_xpos[self.sim.obj_body_id[name]])

    def rotation(self, name: str) -> Array:
        """The rotation of an object, as a matrix."""
        result: Array = to_matrix(scalar_last(self.data.body_xquat[self.sim.obj_body_id[name]]))
        return result

    def body(self, name: str) -> Array:
        """The origin of a part of a fixture."""
        return np.array(self.data.get_body_xpos(name))

    def body_rotation(self, name: str) -> Array:
        """The rotation of a part of a fixture, as a matrix."""
        return np.array(self.data.get_body_xmat(name)).reshape(3, 3)

    def handle(self, body: str) -> Callable[[], Array]:
        """Where the handle of a drawer is: its outermost box."""
        boxes, origin = self.boxes(lambda name: name == body), self.body(body)
        out = self.body_rotation(body)[:, 1]
        offset = boxes.centers[int(np.argmin(boxes.centers @ out))] - origin
        return lambda: np.asarray(self.body(body) + offset)

    def axis(self, joint: str) -> Array:
        """The direction in which a joint moves or about which it turns."""
        return np.array(self.data.xaxis[self.model.joint_name2id(joint)])

    def joint(self, name: str) -> float:
        return float(self.data.qpos[self.model.get_joint_qpos_addr(name)])

    def boxes(self, bodies: Callable[[str], bool]) -> Boxes:
        """The boxes of these bodies."""
        solid = (self.model.geom_contype != 0) | (self.model.geom_conaffinity != 0)
        numbers = np.flatnonzero(solid & (self.model.geom_type == BOX)).tolist()
        found = [number for number in numbers if bodies(self._body(number))]
        rotations = np.array(self.data.geom_xmat[found]).reshape(-1, 3, 3)
        return Boxes(np.array(self.data.geom_xpos[found]), rotations, np.array(self.model.geom_size[found]))

    def obstacles(self, name: str) -> Boxes:
        """All that a hand which takes or carries an object should not hit."""
        return self.boxes(lambda body: not body.startswith((name, "robot", "gripper", "mount", "table")))

    def touches(self, name: str) -> bool:
        """Whether something other than the robot touches an object."""
        for contact in self.data.contact[: self.data.ncon]:
            one, other = self._body(contact.geom1), self._body(contact.geom2)
            for mine, theirs in ((one, other), (other, one)):
                if mine.startswith(name) and not theirs.startswith((name, "robot", "gripper")):
                    return True
        return False

    def held(self, name: str) -> bool:
        """Whether a finger touches an object."""
        for contact in self.data.contact[: self.data.ncon]:
            bodies = sorted((self._body(contact.geom1), self._body(contact.geom2)))
            if any(body.startswith(name) for body in bodies) and any(body.startswith("gripper") for body in bodies):
                return True
        return False

    def _body(self, geom: int) -> str:
        return str(self.model.body_id2name(self.model.geom_bodyid[geom]))


class LiberoHand(ScriptedHand):
    """The Panda's hand under LIBERO's controller."""

    CLOSE, OPEN = 1.0, -1.0
    SPEED = 1.0
    GAIN = 0.6

    world: LiberoScene

    def __init__(self, scene: LiberoScene):
        super().__init__(scene, 0, SCALE, 2.0)

    def turn_to(self, yaw: float) -> float:
        goal = multiply(from_euler([0.0, 0.0, yaw]), self.rest)
        return float(np.linalg.norm(to_rotation_vector(multiply(goal, inverse(self.world.pose()[3:])))))

    def back(self, distance: float) -> Array:
        """A step of this length away from where the fingers point."""
        return np.asarray(-distance * to_matrix(self.world.pose()[3:])[:, 2])

    def close(self, steps: int = 8) -> Script:
        """Shuts the fingers until they stand still."""
        before = [0.1] * 3
        yield from self.hold(self.CLOSE, 2)

        def still() -> bool:
            before.append(self.world.opening)
            return before[-4] - before[-1] < 0.0005

        yield from self.hold(self.CLOSE, steps, still)


@dataclass(frozen=True)
class Grasp:
    """A way to take hold of something: where, and how the hand is turned then."""

    point: Array
    yaw: float


def rim(center: Array, radius: float, height: float, angle: float) -> Grasp:
    """A pinch of a round rim in the direction `angle` from its middle, one finger inside and one outside."""
    out = np.array([np.cos(angle), np.sin(angle), 0.0])
    return Grasp(center + radius * out + height * UP, half_turn(angle - np.pi / 2))


def half_turn(angle: float) -> float:
    """The same for fingers, which may be swapped: from -90 to 90 degrees."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


def hand_points(grasp: Grasp) -> Array:
    """Points in the two open fingers of a hand at a grasp, from their tips on, and in the hand above them."""
    along = np.array([-np.sin(grasp.yaw), np.cos(grasp.yaw), 0.0])
    across = np.array([along[1], -along[0], 0.0])
    places = [
        *((side * (OPENING + FINGER / 2), 0.008 * wide, z) for side in (-1, 1) for wide in (-1, 0, 1) for z in FINGERS),
        *((0.035 * side, 0.03 * wide, z) for side in range(-3, 4) for wide in (-1, 0, 1) for z in PALM),
    ]
    return np.asarray(grasp.point + np.array(places) @ np.stack([along, across, UP]))


def clearance(grasp: Grasp, boxes: Boxes) -> float:
    """Returns the distance of the open hand to the nearest box."""
    return float(boxes.distances(hand_points(grasp)).min(initial=1.0))


def clear_height(start: Array, end: Array, boxes: Boxes, below: float) -> float:
    """How high a hand has to be to pass over all boxes from one point to another, with something that hangs so far
    below it."""
    shares = np.linspace(0.0, 1.0, 2 + int(np.linalg.norm((end - start)[:2]) / 0.03))
    way = start + shares[:, None] * (end - start)
    points = np.repeat(way[:, None], len(boxes.centers), 1)
    points[..., 2] = boxes.centers[:, 2]  # only the distance along the table counts
    near = [i for i in range(len(boxes.centers)) if boxes.distances(points[:, i])[:, i].min() < PATH_WIDTH]
    return float(max([*boxes.tops()[near], min(start[2], end[2]) - below])) + below + 0.03


def stretch(point: Array) -> float:
    """From the shoulder to the wrist, for fingertips at a point that is seen from the base."""
    out = float(np.linalg.norm(point[:2])) + WRIST[0] - SHOULDER[0]
    return float(np.hypot(out, point[2] + WRIST[1] - SHOULDER[1]))


def choose(grasps: list[Grasp], boxes: Boxes, yaw: float, base: Array) -> Grasp:
    """Among those with room for the hand the one for which it turns least, but within the reach of the arm on this
    base; else the one with most room."""

    def cost(grasp: Grasp) -> float:
        return abs(grasp.yaw - yaw) + 50.0 * max(0.0, stretch(grasp.point - base) - REACH)

    room = [clearance(grasp, boxes) for grasp in grasps]
    free = [grasp for grasp, distance in zip(grasps, room, strict=True) if distance > FINGER]
    return min(free, key=cost) if free else grasps[int(np.argmax(room))]


def _bowl(scene: LiberoScene, name: str) -> list[Grasp]:
    center = scene.position(name)
    return [rim(center, 0.049, 0.042, angle) for angle in np.arange(24) * np.pi / 12]


def _bottle(scene: LiberoScene, name: str) -> list[Grasp]:
    neck = scene.position(name) + scene.rotation(name) @ np.array([0.0, 0.0, 0.13])
    return [Grasp(neck, yaw) for yaw in np.arange(-3, 4) * np.pi / 12]


def _flat_box(scene: LiberoScene, name: str) -> list[Grasp]:
    """Across the narrower of the two sides that are upright."""
    boxes = scene.boxes(lambda body: body.startswith(name))
    center, turned, sizes = boxes.centers[0], boxes.rotations[0], boxes.half_sizes[0]
    upright = [axis for axis in range(3) if abs(turned[2, axis]) < 0.7]
    narrow = turned[:, min(upright, key=lambda axis: sizes[axis])]
    return [Grasp(center + 0.005 * UP, half_turn(float(np.arctan2(narrow[1], narrow[0])) - np.pi / 2))]


GRASPS: dict[str, Callable[[LiberoScene, str], list[Grasp]]] = {
    "akita_black_bowl": _bowl,
    "wine_bottle": _bottle,
    "cream_cheese": _flat_box,
}
"""How objects are grasped, by their category."""


# --- the scripts ---


def carry(scene: LiberoScene, hand: LiberoHand, thing: str, place: str) -> Script:
    """Takes an object and sets it down on another one, or in a region."""
    yield from _take(scene, hand, thing)
    offset = scene.position(thing) - hand.position

    def slipped() -> bool:
        return bool(np.linalg.norm(scene.position(thing) - hand.position - offset) > 0.05)

    def over(height: float) -> Array:
        """Where the hand is when the object is this high over its place."""
        return np.asarray(hand.position + scene.position(place) + height * UP - scene.position(thing))

    yaw = hand.yaw
    here, there = hand.position, over(0.05)
    level = max(there[2], clear_height(here, there, scene.obstacles(thing), -offset[2]))
    yield from hand.go(lambda: np.array([*here[:2], level]), lambda: yaw, hand.CLOSE, near=0.03, until=slipped)
    yield from hand.go(lambda: np.array([*over(0.0)[:2], level]), lambda: yaw, hand.CLOSE, near=0.025, until=slipped)
    yield from hand.go(lambda: over(0.03), lambda: yaw, hand.CLOSE, near=0.012, until=slipped)
    yield from hand.go(
        lambda: over(-0.02),
        lambda: yaw,
        hand.CLOSE,
        near=0.0,
        speed=0.4,
        until=lambda: slipped() or scene.touches(thing),
    )
    if not slipped():
        yield from hand.hold(hand.OPEN, 4)
    yield from hand.lift(0.10, hand.OPEN, near=0.02)


def _take(scene: LiberoScene, hand: LiberoHand, thing: str) -> Script:
    """Grasps an object from above, where there is room for the fingers."""
    if scene.held(thing) and scene.opening < 0.07:
        return
    boxes = scene.obstacles(thing)
    chosen = choose(GRASPS[category(thing)](scene, thing), boxes, hand.yaw, scene.base)
    offset = chosen.point - scene.position(thing)

    def point() -> Array:
        return np.asarray(scene.position(thing) + offset)

    here, turned = hand.position, hand.yaw
    level = max(point()[2] + 0.05, clear_height(here, point(), boxes, 0.015))
    if here[2] < level - 0.03 and np.linalg.norm((point() - here)[:2]) > 0.03:
        yield from hand.go(lambda: np.array([*here[:2], level]), lambda: turned, hand.OPEN, near=0.03)
    yield from hand.go(lambda: np.array([*point()[:2], level]), lambda: chosen.yaw, hand.OPEN, near=0.025)
    yield from hand.go(point, lambda: chosen.yaw, hand.OPEN, near=0.008, speed=0.7)
    yield from hand.close()


def category(name: str) -> str:
    """Returns what an object is, by its name in the BDDL file: akita_black_bowl of akita_black_bowl_1."""
    return re.sub(r"_\d+$", "", name)


def open_drawer(scene: LiberoScene, hand: LiberoHand, drawer: str) -> Script:
    """Takes the handle with a hand that comes from the front, fingers above and below it, and pulls."""
    body, joint = DRAWERS[drawer]
    handle, out = scene.handle(body), -scene.axis(joint)
    yaw = float(np.arctan2(-out[0], out[1]))
    hand.rest = multiply(from_euler([-TILT, 0.0, 0.0]), DOWN)
    level = max(hand.position[2], handle()[2] + 0.10)
    front = handle() + 0.17 * out
    if not (0.01 < scene.opening < 0.05 and np.linalg.norm(hand.position - handle()) < 0.03):
        yield from hand.go(lambda: np.array([*front[:2], level]), lambda: yaw, hand.OPEN, near=0.03)
        yield from hand.go(lambda: handle() + hand.back(0.09), lambda: yaw, hand.OPEN, near=0.015)
        yield from hand.go(handle, lambda: yaw, hand.OPEN, near=0.008, speed=0.6)
        yield from hand.close()
    yield from hand.go(
        lambda: hand.position + 0.06 * out + (handle() - hand.position) * (1 - np.abs(out)),
        lambda: yaw,
        hand.CLOSE,
        near=0.0,
        until=lambda: scene.joint(joint) < -0.155 or bool(np.linalg.norm(hand.position - handle()) > 0.03),
    )


def turn_on(scene: LiberoScene, hand: LiberoHand, fixture: str) -> Script:
    """Turns a knob: pinches its fin from above, and turns the hand."""
    body, height = KNOBS[category(fixture)]

    def knob() -> Array:
        return scene.body(f"{fixture}_{body}") + height * UP

    def yaw() -> float:
        across = scene.body_rotation(f"{fixture}_{body}")[:, 0]
        return half_turn(float(np.arctan2(across[1], across[0])) - np.pi / 2)

    level = max(hand.position[2], knob()[2] + 0.08)
    yield from hand.go(lambda: np.array([*knob()[:2], level]), yaw, hand.OPEN, near=0.025)
    yield from hand.go(knob, yaw, hand.OPEN, near=0.008, speed=0.6)
    yield from hand.close()
    turned = yaw() + 1.0
    yield from hand.go(knob, lambda: turned, hand.CLOSE, near=0.01, steps=20)
    yield from hand.hold(hand.OPEN, 3)
    yield from hand.lift(0.08, hand.OPEN, near=0.02)


DRAWERS = {
    "wooden_cabinet_1_top_region": ("wooden_cabinet_1_cabinet_top", "wooden_cabinet_1_top_level"),
    "wooden_cabinet_1_middle_region": ("wooden_cabinet_1_cabinet_middle", "wooden_cabinet_1_middle_level"),
}
"""The body and the joint of drawers that can be pulled, by the region that is in them."""
KNOBS = {"flat_stove": ("button", 0.04)}
"""The body of knobs that can be turned, and how high above its origin they are grasped, by the fixture."""
SCRIPTS: dict[str, Callable[..., Script]] = {"on": carry, "open": open_drawer, "turnon": turn_on}
"""How the goals of BDDL files are reached, by their predicates."""
KNOWN: dict[str, Collection[str]] = {"on": GRASPS, "open": DRAWERS, "turnon": KNOBS}
"""What the first name of each of these goals may be."""


def expert(sim: Any) -> Callable[[], Array]:
    """The next action each time it is called; make a new one for each episode. What has succeeded is left as it is."""
    goals = [tuple(goal) for goal in sim.parsed_problem["goal_state"]]
    for predicate, *names in goals:
        if not {names[0], category(names[0])} & set(KNOWN.get(predicate, ())):
            raise ConfigError(
                f"there is no scripted expert for the goal ({predicate} {' '.join(names)}): it can place "
                f"{', '.join(sorted(GRASPS))}, open {', '.join(sorted(DRAWERS))} and turn on "
                f"{', '.join(sorted(KNOBS))}. Record it with another device, such as --device browser."
            )
    scene = LiberoScene(sim)
    script = _until_solved(sim, goals, scene, LiberoHand(scene))
    return lambda: np.zeros(7, np.float32) if sim._check_success() else next(script).astype(np.float32)


def _until_solved(sim: Any, goals: list[tuple[str, ...]], scene: LiberoScene, hand: LiberoHand) -> Script:
    while True:
        for goal in goals:
            if not sim._eval_predicate(goal):
                hand.rest = DOWN
                yield from SCRIPTS[goal[0]](scene, hand, *goal[1:])
        yield hand.toward(hand.position, hand.yaw, hand.OPEN)
