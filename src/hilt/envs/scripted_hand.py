"""Smooth motions of a scripted hand, of which the experts of all simulators are made.

A script is a generator of actions, ``[dx dy dz drx dry drz grip]``, one for each control step. Goals are functions
that are called at every step, so that a script follows what it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from hilt.envs.rotations import DOWN, Array, from_euler, inverse, multiply, to_rotation_vector

Script = Iterator[Array]

LEAVE = 0.0
"""The grip of an action that leaves the fingers as they are."""
UP = np.array([0.0, 0.0, 1.0])


class Arms(Protocol):
    """The part of a simulator that a scripted hand reads: poses of its arms, ``[x y z  qx qy qz qw]``."""

    def pose(self, arm: int = 0) -> Array:
        """Returns the pose of the hand."""

    def commanded(self, arm: int = 0) -> Array:
        """Returns the pose that the next action is added to."""


class ScriptedHand:
    """One arm, steered smoothly: speed grows by at most ``EAGERNESS`` of the full
    one in a step, and fades toward the goal. ``action_scale`` is what an action of 1 moves the hand in a step, in
    meters and radians, and ``finer`` the number of steps in 0.1 s."""

    CLOSE, OPEN = -1.0, 1.0
    SPEED = 0.5
    """The share of the full speed at which it moves unless a motion is given another."""
    EAGERNESS = 0.25
    GAIN = 0.5
    """The share of the way to the goal that one step asks for."""
    STRICT_STEPS = 12
    """The steps after which a goal need not be met as exactly: an arm that is disturbed may never meet it."""

    def __init__(self, world: Arms, arm: int, action_scale: tuple[float, float], finer: float):
        self.world, self.arm, self.scale, self.finer = world, arm, action_scale, finer
        self.velocity = np.zeros(6)  # the last action, without the grip
        self.rest = DOWN
        """The hand's rotation at a yaw of 0."""

    @property
    def position(self) -> Array:
        return np.asarray(self.world.pose(self.arm)[:3])

    @property
    def yaw(self) -> float:
        return float(to_rotation_vector(multiply(self.world.pose(self.arm)[3:], inverse(self.rest)))[2])

    def turn_to(self, yaw: float) -> float:
        """The angle between the hand and this yaw."""
        return abs(yaw - self.yaw)

    def toward(self, goal: Array, yaw: float = 0.0, grip: float = LEAVE, speed: float = 0.0) -> Array:
        """One action on the way to a point, the hand turned by `yaw` from its rotation at rest."""
        speed = speed or self.SPEED
        pose = self.world.commanded(self.arm)
        turn = multiply(multiply(from_euler([0.0, 0.0, yaw]), self.rest), inverse(pose[3:]))
        gain, eagerness = min(self.GAIN / self.finer, 0.8), self.EAGERNESS / self.finer
        wish = gain * np.concatenate([(goal - pose[:3]) / self.scale[0], to_rotation_vector(turn) / self.scale[1]])
        for part in (slice(0, 3), slice(3, 6)):
            wish[part] *= min(1.0, speed / max(float(np.linalg.norm(wish[part])), 1e-9))
            change = wish[part] - self.velocity[part]
            self.velocity[part] += change * min(1.0, eagerness / max(float(np.linalg.norm(change)), 1e-9))
        return np.array([*np.clip(self.velocity, -1.0, 1.0), grip])

    def go(
        self,
        goal: Callable[[], Array],
        yaw: Callable[[], float] = lambda: 0.0,
        grip: float = LEAVE,
        *,
        near: float = 0.006,
        speed: float = 0.0,
        until: Callable[[], bool] = lambda: False,
        steps: int = 40,
    ) -> Script:
        """Moves until it is as near as that, or something has happened, or it has taken
        too long; with time it asks for less."""
        for step in range(round(steps * self.finer)):
            relaxation = 1.1 ** max(0, step / self.finer - self.STRICT_STEPS)
            there = (
                np.linalg.norm(goal() - self.position) < relaxation * near and self.turn_to(yaw()) < relaxation * 0.06
            )
            if there or until():
                return
            yield self.toward(goal(), yaw(), grip, speed)

    def hold(self, grip: float, steps: int = 5, until: Callable[[], bool] = lambda: False) -> Script:
        """Stays, and moves the fingers."""
        goal, yaw = np.array(self.world.commanded(self.arm)[:3]), self.yaw
        for _ in range(round(steps * self.finer)):
            if until():
                return
            yield self.toward(goal, yaw, grip)

    def lift(self, height: float, grip: float | None = None, *, near: float = 0.006) -> Script:
        """Straight up, closed unless a grip is given."""
        goal, yaw = self.position + height * UP, self.yaw
        yield from self.go(lambda: goal, lambda: yaw, self.CLOSE if grip is None else grip, near=near)

    def approach(
        self, point: Callable[[], Array], yaw: Callable[[], float] = lambda: 0.0, grip: float = LEAVE
    ) -> Script:
        """To a point above something; a hand that is low and elsewhere rises first, not to sweep the table."""
        here, turned = self.position, self.yaw
        if here[2] < point()[2] and np.linalg.norm((point() - here)[:2]) > 0.04:
            yield from self.go(lambda: np.array([*here[:2], point()[2]]), lambda: turned, grip, near=0.02)
        yield from self.go(point, yaw, grip, near=0.02)
