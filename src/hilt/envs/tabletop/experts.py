"""Scripted experts: how each tabletop task is done, by someone who sees where everything is.

``expert(task, world)`` gives a function that returns the next action. It reads the world and never writes it; all
it can do is the action, ``[dx dy dz drx dry drz grip]`` for each arm, once a control step. A script is a generator
of such actions, one per arm. Goals are looked up at every step, so that a script follows what it handles, and one
that came to its end without success begins again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hilt.envs.rotations import Array, to_matrix
from hilt.envs.scripted_hand import UP, Script, ScriptedHand
from hilt.envs.tabletop import suite
from hilt.envs.tabletop.suite import ACTION_SCALE, TabletopTask, holds, position
from hilt.envs.tabletop.world import World

CLOSE, OPEN = ScriptedHand.CLOSE, ScriptedHand.OPEN


def expert(task: TabletopTask, world: World, action_scale: tuple[float, float] = ACTION_SCALE) -> Callable[[], Array]:
    """The next action each time it is called; make a new one for each episode. ``action_scale`` is the environment's.
    What has succeeded is left as it is: an environment may go on, for more pictures of it."""
    scripts = [_again(SCRIPTS[task.name], Hand(world, arm, action_scale)) for arm in range(task.arms)]
    still = np.zeros(7 * task.arms, np.float32)
    return lambda: (
        still.copy() if task.success(world) else np.concatenate([next(script) for script in scripts]).astype(np.float32)
    )


def _again(script: Callable[[Hand], Script], hand: Hand) -> Script:
    while True:
        yield from script(hand)
        yield hand.toward(hand.position, hand.yaw)


class Hand(ScriptedHand):
    """One arm of a tabletop task."""

    world: World

    def __init__(self, world: World, arm: int = 0, action_scale: tuple[float, float] = ACTION_SCALE):
        super().__init__(world, arm, action_scale, ACTION_SCALE[0] / action_scale[0])

    def is_over(self, point: Array) -> bool:
        """Whether it only has to go down: a plan may begin in the middle of the task, and one that rose first would
        contradict the one that went down here."""
        return bool(np.linalg.norm((point - self.position)[:2]) < 0.015)

    def grasp(self, point: Callable[[], Array], yaw: Callable[[], float] = lambda: 0.0, near: float = 0.005) -> Script:
        """From above, round a point. What is in the hand already stays there: a
        plan may begin in the middle of the task."""
        if holds(self.world, point(), self.arm):
            return

        def gone() -> bool:
            return bool(np.linalg.norm((point() - self.position)[:2]) > 0.04)

        off = self.position - point()
        above = np.linalg.norm(off[:2]) < 0.025 and -0.01 < off[2] < 0.10 and abs(yaw() - self.yaw) < 0.2
        if not above:
            yield from self.approach(lambda: point() + 0.08 * UP, yaw, OPEN)
        yield from self.go(point, yaw, OPEN, near=near, until=gone)
        if not gone():
            yield from self.hold(CLOSE)


def yaw_of(world: World, body: str) -> float:
    turned = to_matrix(world.body_pose(body)[3:])
    return float(np.arctan2(turned[1, 0], turned[0, 0]))


def side_of(world: World, body: str) -> float:
    """The smallest turn that lines up with a square."""
    return (yaw_of(world, body) + np.pi / 4) % (np.pi / 2) - np.pi / 4


def at(world: World, body: str, x: float, y: float, z: float) -> Array:
    """A point given in a body's own frame."""
    result: Array = position(world, body) + to_matrix(world.body_pose(body)[3:]) @ np.array([x, y, z])
    return result


# ---- one arm


def reach(hand: Hand) -> Script:
    yield from hand.go(lambda: position(hand.world, "ball"), near=0.0)


def push(hand: Hand) -> Script:
    """From behind, in line with the target; the block sticks to the fingers, so that
    what it lacks is what the hand has to move. A hand that is behind it already pushes on."""

    def lacks() -> Array:
        return (position(hand.world, "target") - position(hand.world, "block")) * (1, 1, 0)

    way = lacks() / np.linalg.norm(lacks())
    yaw = float(np.clip(np.arctan2(way[1], way[0]), -0.8, 0.8))

    def behind(height: float) -> Array:
        return np.array([*(position(hand.world, "block") - 0.07 * way)[:2], height])

    def onward() -> Array:
        return np.array([*(hand.position + lacks())[:2], 0.025])

    pushes = hand.position[2] < 0.04 and abs(yaw - hand.yaw) < 0.2 and not slipped(hand, "block", way)
    if not (pushes and np.linalg.norm((hand.position - position(hand.world, "block"))[:2]) < 0.085):
        yield from hand.approach(lambda: behind(0.10), lambda: yaw, CLOSE)
        yield from hand.go(lambda: behind(0.025), lambda: yaw, CLOSE, near=0.01)
    yield from hand.go(
        onward, lambda: yaw, CLOSE, near=0.0, until=lambda: lacks() @ way < 0.005 or slipped(hand, "block", way)
    )
    yield from hand.hold(CLOSE, 3)
    back = hand.position - 0.03 * way + 0.08 * UP
    yield from hand.go(lambda: back, lambda: yaw, CLOSE, near=0.02)


def slipped(hand: Hand, block: str, way: Array) -> bool:
    """What the hand pushes this way is no longer before it."""
    offset = (position(hand.world, block) - hand.position) * (1, 1, 0)
    return bool(offset @ way < 0.0 or np.linalg.norm(offset - (offset @ way) * way) > 0.03)


def pick(name: str) -> Callable[[Hand], Script]:
    def script(hand: Hand) -> Script:
        yield from hand.grasp(lambda: position(hand.world, name), lambda: side_of(hand.world, name))
        yield from hand.lift(0.14)

    return script


def put(name: str, goal: str, height: float) -> Callable[[Hand], Script]:
    """Takes a cube and lets it go with its middle so high above the middle of another thing."""

    def script(hand: Hand) -> Script:
        def over(clearance: float) -> Array:
            there = position(hand.world, goal) + (height + clearance) * UP
            return np.asarray(hand.position + there - position(hand.world, name))

        def yaw() -> float:
            return side_of(hand.world, goal)

        yield from hand.grasp(lambda: position(hand.world, name), lambda: side_of(hand.world, name))
        yield from hand.lift(0.10, near=0.03)
        yield from hand.go(lambda: over(0.06), yaw, CLOSE, near=0.01)
        yield from hand.go(lambda: over(0.003), yaw, CLOSE, near=0.004, speed=0.3)
        yield from hand.hold(OPEN)
        yield from hand.go(lambda: position(hand.world, goal) + (height + 0.12) * UP, yaw, OPEN)

    return script


def stalled(number: Callable[[], float], steps: int, least: float = 0.002) -> Callable[[], bool]:
    """Returns a function to call once a step: whether `number()` fell by less than `least` in the last `steps`."""
    seen: list[float] = []

    def asked() -> bool:
        seen.append(number())
        return len(seen) > steps and seen[-1 - steps] - seen[-1] < least

    return asked


def peg(hand: Hand) -> Script:
    """A peg that meets the rim of the hole is lifted and lined up again: pressing on would not bring it in."""

    def low() -> Array:
        """The peg's lower end, seen from the hole."""
        return suite.lower_end(hand.world) - position(hand.world, "hole")

    def over(height: float) -> Array:
        """Where the hand is when the peg's lower end is this high over the bottom of the hole."""
        return np.asarray(hand.position + height * UP - low())

    def yaw() -> float:
        return side_of(hand.world, "hole")

    def fits() -> bool:
        turned = side_of(hand.world, "peg") - yaw()
        aside = np.abs(to_matrix(hand.world.body_pose("hole")[3:]).T @ low())[:2].max()
        width = suite.PEG * (np.abs(np.cos(turned)) + np.abs(np.sin(turned)))
        return bool(aside + width < suite.PEG + suite.CLEARANCE)

    def is_in() -> bool:
        return bool(np.linalg.norm(low()[:2]) < suite.PEG and low()[2] < 0.6 * suite.HOLE_DEPTH)

    def in_hand() -> bool:
        return bool(np.linalg.norm(hand.position - position(hand.world, "peg")) < suite.TALL)

    def descend() -> Script:
        rests = stalled(lambda: low()[2], round(3 * hand.finer))
        yield from hand.go(lambda: over(0.005), yaw, CLOSE, near=0.002, speed=0.3, until=lambda: rests() and not fits())

    yield from hand.grasp(
        lambda: position(hand.world, "peg") + 0.025 * UP, lambda: side_of(hand.world, "peg"), near=0.01
    )
    while in_hand() and not is_in():
        if np.linalg.norm(low()[:2]) > suite.PEG and low()[2] < 0.055:
            yield from hand.lift(0.10, near=0.02)
        if not fits():
            yield from hand.go(lambda: over(0.07), yaw, CLOSE, near=0.003)
        yield from descend()
    yield from hand.hold(OPEN)
    yield from hand.go(lambda: position(hand.world, "hole") + 0.2 * UP, yaw, OPEN)


def open_drawer(hand: Hand) -> Script:
    def yaw() -> float:
        return yaw_of(hand.world, "cabinet")

    yield from hand.grasp(lambda: at(hand.world, "drawer", -0.045, 0, 0.015), yaw)
    pulled = at(hand.world, "cabinet", -0.195, 0, 0.055)
    yield from hand.go(lambda: pulled, yaw, CLOSE)


def close_drawer(hand: Hand) -> Script:
    def yaw() -> float:
        return yaw_of(hand.world, "cabinet")

    yield from hand.approach(lambda: at(hand.world, "drawer", -0.12, 0, 0.10), yaw, CLOSE)
    yield from hand.go(lambda: at(hand.world, "drawer", -0.11, 0, 0.015), yaw, CLOSE, near=0.01)
    yield from hand.go(lambda: at(hand.world, "cabinet", -0.055, 0, 0.055), yaw, CLOSE)


def button(hand: Hand) -> Script:
    if not hand.is_over(at(hand.world, "base", 0, 0, 0)):
        yield from hand.approach(lambda: at(hand.world, "base", 0, 0, 0.11), grip=CLOSE)
    yield from hand.go(lambda: at(hand.world, "base", 0, 0, 0.035), grip=CLOSE)


def press(name: str) -> Callable[[Hand], Script]:
    """Quickly: an arm that has little time. A hand that is low beside the button rises first: on the straight way it
    would catch at its side."""

    def script(hand: Hand) -> Script:
        here, above = hand.position, at(hand.world, f"{name} base", 0, 0, 0.08)
        if not hand.is_over(above):
            if here[2] < above[2] - 0.015:
                up = np.array([*here[:2], above[2]])
                yield from hand.go(lambda: up, grip=CLOSE, near=0.02, speed=0.8)
            yield from hand.go(lambda: at(hand.world, f"{name} base", 0, 0, 0.08), grip=CLOSE, near=0.02, speed=0.8)
        yield from hand.go(lambda: at(hand.world, f"{name} base", 0, 0, 0.02), grip=CLOSE, speed=0.8)

    return script


def lever(hand: Hand) -> Script:
    def yaw() -> float:
        return yaw_of(hand.world, "base")

    yield from hand.approach(lambda: at(hand.world, "base", -0.12, 0, 0.18), yaw, CLOSE)
    yield from hand.go(lambda: at(hand.world, "base", -0.11, 0, 0.11), yaw, CLOSE, near=0.015)
    yield from hand.go(lambda: at(hand.world, "base", 0.06, 0, 0.11), yaw, CLOSE)
    yield from hand.go(lambda: at(hand.world, "base", 0.0, 0, 0.22), yaw, CLOSE)


def dial(hand: Hand) -> Script:
    def yaw() -> float:
        return yaw_of(hand.world, "dial")

    yield from hand.grasp(lambda: at(hand.world, "base", 0, 0, 0.062), yaw)
    turned = yaw_of(hand.world, "base") + 1.25
    yield from hand.go(lambda: at(hand.world, "base", 0, 0, 0.062), lambda: turned, CLOSE)
    yield from hand.hold(OPEN)


def slide(hand: Hand) -> Script:
    def there() -> Array:
        along = to_matrix(hand.world.body_pose("rail")[3:])[:, 1]
        off = along @ (position(hand.world, "mark") - position(hand.world, "rail")) - hand.world.joint("knob")
        return np.asarray(hand.position + off * along)

    yield from hand.grasp(lambda: at(hand.world, "knob", 0, 0, 0.034), lambda: yaw_of(hand.world, "rail"))
    yield from hand.go(there, lambda: yaw_of(hand.world, "rail"), CLOSE, near=0.002)
    yield from hand.hold(CLOSE)


def knock(hand: Hand) -> Script:
    """In the direction that keeps both the hand and the falling bottle farthest from the other one."""
    bottle, other = position(hand.world, "yellow")[:2], position(hand.world, "purple")[:2]
    ways = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.arange(8) * np.pi / 4]

    def clearance(way: Array) -> float:
        return float(min(np.linalg.norm(bottle + along * way - other) for along in np.linspace(-0.08, 0.25, 12)))

    way = max(ways, key=clearance)
    yield from hand.approach(lambda: np.array([*(bottle - 0.08 * way), 0.2]), grip=CLOSE)
    yield from hand.go(lambda: np.array([*(bottle - 0.07 * way), 0.1]), grip=CLOSE, near=0.015)
    yield from hand.go(lambda: np.array([*(bottle + 0.06 * way), 0.1]), grip=CLOSE, speed=0.8)
    yield from hand.hold(CLOSE, 6)


def sweep(hand: Hand) -> Script:
    for name in ("one", "two"):
        yield from _sweep(hand, name)


def _sweep(hand: Hand, block: str) -> Script:
    def beside(ahead: float, height: float) -> Array:
        where = position(hand.world, block)
        return np.array([where[0] + ahead, where[1], height])

    def swept() -> bool:
        return bool(position(hand.world, block)[0] > suite.SWEPT + 0.012)

    if swept():
        return
    yield from hand.approach(lambda: beside(-0.07, 0.09), grip=CLOSE)
    yield from hand.go(lambda: beside(-0.06, 0.02), grip=CLOSE, near=0.01)
    yield from hand.go(
        lambda: beside(0.05, 0.02),
        grip=CLOSE,
        near=0.0,
        until=lambda: swept() or slipped(hand, block, np.array([1.0, 0.0, 0.0])),
    )
    back = hand.position + np.array([-0.03, 0.0, 0.08])
    yield from hand.go(lambda: back, grip=CLOSE, near=0.03)


# ---- two arms


def other_grips(hand: Hand) -> bool:
    return bool(hand.world.arm(1 - hand.arm).gripper < 0.6)


def lift_tray(hand: Hand) -> Script:
    yield from hand.grasp(
        lambda: suite.post(hand.world, "tray", hand.arm, suite.TRAY, suite.POST), lambda: yaw_of(hand.world, "tray")
    )
    yield from hand.hold(CLOSE, 60, lambda: other_grips(hand))
    yield from hand.lift(0.14)


def handover(hand: Hand) -> Script:
    def grip() -> Array:
        return suite.post(hand.world, "baton", hand.arm, suite.BATON, suite.POST)

    def yaw() -> float:
        return yaw_of(hand.world, "baton")

    def offered() -> bool:
        baton = position(hand.world, "baton")
        return bool(abs(baton[1]) < 0.02 and baton[2] > 0.10)

    if hand.arm == 0:
        yield from hand.grasp(grip, yaw)
        out = at(hand.world, "garage", 0, suite.BATON / 2 + 0.09, suite.POST - 0.01)
        yield from hand.go(lambda: out, yaw, CLOSE, near=0.01)
        yield from hand.lift(0.14, near=0.02)
        middle = np.array([0.45, 0.0, 0.15])
        yield from hand.go(lambda: hand.position + middle - position(hand.world, "baton"), grip=CLOSE, near=0.006)
        yield from hand.hold(CLOSE, 60, lambda: other_grips(hand))
        yield from hand.hold(CLOSE, 2)
        yield from hand.hold(OPEN)
        yield from hand.lift(0.10, OPEN)
    else:
        yield from hand.hold(OPEN, 60, offered)
        yield from hand.grasp(grip, yaw)
        yield from hand.hold(CLOSE, 60)


SCRIPTS: dict[str, Callable[[Hand], Script]] = {
    "reach": reach,
    "push": push,
    "pick": pick("cube"),
    "pick_red": pick("red"),
    "pick_blue": pick("blue"),
    "place": put("cube", "target", suite.CUBE),
    "stack": put("red", "blue", 2 * suite.CUBE),
    "peg": peg,
    "insert": peg,
    "drawer": open_drawer,
    "close_drawer": close_drawer,
    "button": button,
    **{f"press_{name}": press(name) for name in suite.HUES},
    "lever": lever,
    "dial": dial,
    "slide": slide,
    "knock": knock,
    "sweep": sweep,
    "lift_tray": lift_tray,
    "handover": handover,
}
