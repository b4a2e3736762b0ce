"""Perception from drawn pictures: a small policy learns to look at what words name, before it has seen a robot.

A large vision-language-action model has seen the pictures and words of the internet before it is shown a task; a small
one that begins with random weights has not. Here it is given the least that makes up for it: pictures of colored shapes
on plain backgrounds, drawn by a program, each with a sentence that names the color of one shape ("where is the red
cup?"). The policy's keypoints learn to look at that shape. The pictures contain no robot, no table and no button, and
the sentences are not those of any task; actions are not learned at all.

    learn(policy, Drawing(), seed=0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hilt.algos.adam import Adam
from hilt.algos.schedule import learning_rate_factor
from hilt.core.tree import Array
from hilt.policies.vla.small_vla import SmallVLA

COLORS = {
    "red": ((-14, 12), (0.55, 1.0), (0.4, 1.0)),
    "orange": ((20, 40), (0.65, 1.0), (0.55, 1.0)),
    "yellow": ((48, 66), (0.55, 1.0), (0.55, 1.0)),
    "green": ((88, 155), (0.45, 1.0), (0.25, 0.95)),
    "blue": ((200, 250), (0.45, 1.0), (0.3, 1.0)),
    "purple": ((265, 305), (0.4, 1.0), (0.3, 1.0)),
    "white": ((0, 360), (0.0, 0.06), (0.88, 1.0)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.14)),
}
"""What people call by these names: hue in degrees, saturation and value, each from
a range. No shade is that of a certain thing"""
THINGS = ("disc", "thing", "ball", "cup", "block", "plate", "dot", "box")
SENTENCES = (
    "the {color} {thing}",
    "find the {color} {thing}",
    "where is the {color} {thing}?",
    "look at the {color} {thing}",
    "a {color} {thing} on a table",
    "point to the {color} {thing}",
    "is that {thing} {color}?",
    "move to the {color} {thing}",
    "that {thing} there, it is {color}",
)
MAX_COLORED, MAX_GRAY = 5, 3
"""Shapes in one picture"""


@dataclass
class DrawingSettings:
    """How long a policy learns from drawn pictures."""

    steps: int = 500
    """Gradient steps; 0: it does not"""
    batch_size: int = 64
    """Pictures in each, all of them new"""
    learning_rate: float = 2e-3
    """Of Adam, at its highest: it rises for a tenth of the steps and falls as a cosine"""


class DrawnPictures(NamedTuple):
    """Pictures, each with a sentence that names the color of one shape in it."""

    pictures: Array
    """uint8 [N, size, size, 3]"""
    sentences: list[str]
    places: Array
    """float32 [N, 2]: the center of the named shape, x and y, from 0 to 1"""


def learn(
    policy: SmallVLA,
    drawing: DrawingSettings,
    seed: int = 0,
    watch: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Trains the eyes of a policy and its reading of words, and nothing else of it.
    `watch` is called with each step and its loss."""
    trained = [*policy.eyes.parameters(), *policy.text.parameters()]
    adam, rng = Adam(trained, drawing.learning_rate), np.random.default_rng([seed, 5])
    for step in range(drawing.steps):
        loss = policy.pointing_loss(*drawn(rng, drawing.batch_size, policy.config.image_size))
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        adam.learning_rate = drawing.learning_rate * learning_rate_factor((step + 1) / drawing.steps, warmup=0.1)
        adam.step([g / max(1.0, length) for g in gradients])
        watch(step, loss.item())


def drawn(rng: np.random.Generator, count: int, size: int) -> DrawnPictures:
    """Returns this number of new pictures of `size` pixels: one to five colored shapes,
    no color twice, over up to three gray ones."""
    canvas = rng.uniform(0.25, 0.8, (count, 1, 1, 1)) + rng.uniform(-0.08, 0.08, (count, 1, 1, 3))
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    light = rng.uniform(-0.15, 0.15, (count, 2, 1, 1))
    canvas = (canvas + (light[:, 0] * (x - 0.5) + light[:, 1] * (y - 0.5))[..., None]).astype(np.float32)
    names, known = list(COLORS), np.array(list(COLORS.values()), float)
    chosen = rng.permuted(np.tile(np.arange(len(names)), (count, 1)), axis=1)[:, :MAX_COLORED]
    grays, colored = rng.integers(0, MAX_GRAY + 1, count), rng.integers(1, MAX_COLORED + 1, count)
    for number in range(MAX_GRAY):
        shade = rng.uniform(0.1, 0.9, (count, 1)) + rng.uniform(-0.03, 0.03, (count, 3))
        _paint(canvas, rng, grays > number, shade, (0.05, 0.25))
    places = np.zeros((count, 2), np.float32)
    for number in reversed(range(MAX_COLORED)):  # the one that is named comes last, and is covered by none
        low, high = known[chosen[:, number]].transpose(2, 0, 1)
        places = _paint(canvas, rng, colored > number, _rgb(rng.uniform(low, high)), (0.04, 0.17))
    canvas += rng.normal(0.0, 0.02, canvas.shape)
    sentences = [
        SENTENCES[rng.integers(len(SENTENCES))].format(color=names[one], thing=THINGS[rng.integers(len(THINGS))])
        for one in chosen[:, 0]
    ]
    return DrawnPictures((canvas.clip(0, 1) * 255).astype(np.uint8), sentences, places)


def _paint(canvas: Array, rng: np.random.Generator, there: Array, shades: Array, radii: tuple[float, float]) -> Array:
    """An ellipse, a rectangle or a diamond in each picture where one is to be. Gives their centers."""
    count, size = len(canvas), canvas.shape[1]
    centers, radius, aspect = (
        rng.uniform(0.05, 0.95, (count, 2)),
        rng.uniform(*radii, (count, 1, 1)),
        rng.uniform(0.5, 1.0, (count, 1, 1)),
    )
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    across, down = (
        np.abs(x - centers[:, 0, None, None]) / radius,
        np.abs(y - centers[:, 1, None, None]) / (radius * aspect),
    )
    kind = rng.integers(3, size=(count, 1, 1))
    inside = np.where(
        kind == 0, across**2 + down**2 < 1, np.where(kind == 1, np.maximum(across, down) < 1, across + down < 1.2)
    )
    inside &= there[:, None, None]
    canvas[inside] = np.broadcast_to(shades[:, None, None].clip(0, 1), canvas.shape)[inside]
    return centers.astype(np.float32)


def _rgb(shades: Array) -> Array:
    """From hue in degrees, saturation and value [N, 3] to red, green and blue."""
    hue, saturation, value = shades.T
    sector = (np.array([5.0, 3.0, 1.0]) + hue[:, None] / 60) % 6
    return np.asarray(value[:, None] * (1 - saturation[:, None] * np.minimum(sector, 4 - sector).clip(0, 1)))
