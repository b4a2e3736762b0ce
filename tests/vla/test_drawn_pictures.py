"""Drawn pictures: the named shape is where the picture says it is, and a policy
learns to look at it and at nothing else."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.envs.tabletop import suite
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.vla.drawn_pictures import COLORS, DrawingSettings, drawn, learn

torch.set_num_threads(1)
SIZES = {"image_size": 32, "width": 32, "depth": 1, "heads": 2, "keypoints": 2, "precision": "float32"}


def eyes(**changes: object) -> SmallVLA:
    return SmallVLA(SmallVLAConfig(**{**SIZES, **changes}))  # type: ignore[arg-type]


def test_the_color_that_is_named_is_at_the_place_that_is_told() -> None:
    made = drawn(np.random.default_rng(0), 200, 64)
    assert made.pictures.shape == (200, 64, 64, 3) and made.pictures.dtype == np.uint8
    right = []
    for picture, sentence, (x, y) in zip(*made, strict=True):
        (named,) = (name for name in COLORS if name in sentence)
        hue, saturation, value = colorsys.rgb_to_hsv(*(picture[int(y * 64), int(x * 64)] / 255.0))
        (low, high), *ranges = COLORS[named]
        pale, bright = (
            few - 0.12 <= number <= most + 0.12 for number, (few, most) in zip((saturation, value), ranges, strict=True)
        )
        # within the range, and noise of the camera
        turned = (360 * hue - low + 8) % 360 <= high - low + 16 or named in ("white", "black")
        right.append(turned and bright and (pale or named == "black"))
    assert np.mean(right) > 0.95


def test_no_shade_is_that_of_the_buttons() -> None:
    """The demo's tasks are of four shades; a policy is to know the words, and not these."""
    rng = np.random.default_rng(0)
    made = drawn(rng, 400, 32)
    at = (made.places * 32).astype(int)
    for name, text in (("red", suite.RED), ("green", suite.GREEN), ("blue", suite.BLUE), ("yellow", suite.YELLOW)):
        button = np.array(text.split()[:3], float)
        shades = np.array(
            [made.pictures[i, at[i, 1], at[i, 0]] / 255.0 for i, said in enumerate(made.sentences) if name in said]
        )
        near = np.linalg.norm(shades - button, axis=1) < 0.1
        assert len(shades) > 20 and near.mean() < 0.25, name


def test_pictures_are_new_and_come_from_the_seed() -> None:
    one, other = np.random.default_rng(1), np.random.default_rng(1)
    first, again, second = drawn(one, 4, 32), drawn(other, 4, 32), drawn(one, 4, 32)
    assert np.array_equal(first.pictures, again.pictures) and first.sentences == again.sentences
    assert not np.array_equal(first.pictures, second.pictures)


def test_a_policy_learns_to_look_at_what_is_named_and_its_actions_are_left_alone() -> None:
    policy, unseen = eyes(), drawn(np.random.default_rng(9), 128, 32)
    before, head = policy.pointing_loss(*unseen).item(), policy.action_head.out.weight.clone()
    told: list[int] = []
    learn(
        policy,
        DrawingSettings(steps=120, batch_size=32, learning_rate=4e-3),
        seed=0,
        watch=lambda step, loss: told.append(step),
    )
    after = policy.pointing_loss(*unseen).item()
    others = policy.pointing_loss(unseen.pictures, unseen.sentences[1:] + unseen.sentences[:1], unseen.places).item()
    assert told == list(range(120)) and torch.equal(policy.action_head.out.weight, head)
    assert after < 0.5 * before and others > 2 * after, "the words decide where it looks"


def test_the_loss_is_the_cross_entropy_of_the_place() -> None:
    policy, made = eyes(), drawn(np.random.default_rng(3), 1, 32)
    with torch.no_grad():
        policy.eyes.queries.weight.zero_()
        policy.eyes.queries.bias.zero_()  # it looks everywhere alike
    h, w = policy.eyes.looks(torch.from_numpy(made.pictures[:, None]), torch.zeros(1, policy.eyes.queries.in_features))[
        0
    ].shape[1:3]
    assert policy.pointing_loss(*made).item() == pytest.approx(np.log(h * w), rel=1e-5)


def test_eyes_that_cannot_point_are_refused() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "keypoints"}
    policy = SmallVLA(SmallVLAConfig(vision="patches", **sizes))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="vision=patches looks at the whole picture and cannot point; it needs vision=keypoints"
    ):
        policy.pointing_loss(*drawn(np.random.default_rng(0), 2, 32))
