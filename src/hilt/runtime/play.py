"""Play: what an arm finds out by itself about the things that one demonstration of each task has named. Nobody labels anything.

The hand goes down at random places of training scenes. Where it is stopped above the table it touches something: its own joints tell.
What the camera shows before the fingers then is compared with the last picture of each demonstration, and the one that looks most alike
lends the touch its words. From every other picture of that scene the way to the touch is known, again from the joints alone, and so are
the actions that go straight there. A policy imitates them beside the demonstrations, and learns to find what words name in hundreds of
scenes, although it was named once. The simulator is never asked where anything is.

    policy = taught(config, lessons, played(config, playing), playing)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hilt.algos.adam import Adam
from hilt.core.progress import Report, silent
from hilt.core.tree import Array
from hilt.envs.task import make
from hilt.policies.base import Observation
from hilt.policies.small_vla import SmallVLA, SmallVLAConfig
from hilt.policies.suites import Suite
from hilt.replay.torch import generator
from hilt.runtime.demonstrations import Demonstrations, batches
from hilt.runtime.sft import words

if TYPE_CHECKING:
    from hilt.runtime.vla_config import Vla

LOW, HIGH = np.array([0.38, -0.18]), np.array([0.60, 0.18])
"""Where the hand goes down, metres"""
HEIGHTS, FLOOR, STOPPED = (0.08, 0.24), 0.012, 0.028
"""From where, how deep it would go, and above what it was stopped by something, metres"""
BEFORE_THE_FINGERS = (slice(27, 36), slice(26, 38))
"""Where the wrist's camera sees what the hand touches, rows and columns of 64 pixels"""
BEHIND = -0.04
"""What lies farther behind the fingers is not in the picture of a camera that looks ahead, metres"""
CLEARLY = 0.6
"""A touch gets the words of an end that is at most this many times as far from it, in colour, as the next"""


@dataclass
class Playing:
    """How much is played, and how a policy learns from it and from demonstrations together."""

    scenes: int = 60
    """Training states in which the arm plays; 0: demonstrations alone are learned from"""
    descents: int = 6
    """Times that the hand goes down in each"""
    steps: int = 1_000
    """Gradient steps"""
    batch_size: int = 64
    """Ways in each"""
    demonstrated: int = 32
    """Steps of demonstrations in each; without play, as many more as there would be ways"""
    learning_rate: float = 2e-3
    """Of Adam, at its highest: it rises for a tenth of the steps and falls as a cosine"""


class Touch(NamedTuple):
    """Something that stopped the hand, and from where it was seen."""

    looks: Array
    """[3]: the mean colour before the fingers"""
    views: list[dict[str, Any]]
    """What the policy saw elsewhere in that scene"""
    ways: Array
    """float32 [views, 3]: from there to the touch, metres"""


class Examples(NamedTuple):
    """Pictures with words, and the way to what they name."""

    observations: list[Observation]
    ways: Array
    """float32 [N, 3], metres"""


def taught(
    config: Vla,
    lessons: Demonstrations,
    touches: Sequence[Touch],
    playing: Playing,
    watch: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> SmallVLA:
    """A new policy that has learned from demonstrations, and from touches if there are any."""
    examples, row = named(touches, ends(lessons)), lessons.batch(lessons.rows()[:1], 1)[0][0]
    sizes = {"cameras": ["wrist_image"], "image_size": len(row["wrist_image"]), "state_dim": len(row["state"])}
    settings = {**sizes, "action_dim": lessons.action_dim, **config.policy_options}
    policy = SmallVLA(SmallVLAConfig.from_json(settings), seed=config.seed).to(config.device)
    seen = examples.observations or lessons.batch(lessons.rows(), 1)[0]
    whole = np.ones((2, lessons.action_dim), np.float32) * [[-1], [1]]  # few demonstrations do not show how far an action may go
    policy.fit(np.stack([one["state"] for one in seen]), whole)
    learn(policy, lessons, examples, stride_of(config), playing, generator(config.seed), watch)
    return policy


def played(config: Vla, playing: Playing, report: Report = silent) -> list[Touch]:
    """All touches in the scene that the tasks of a run share."""
    rng, suite = np.random.default_rng([config.seed, 5]), words(config)
    with contextlib.closing(make(config.tasks[0], **{**config.task_options, "step_limit": 1_000_000})) as env:
        states = rng.integers(env.unwrapped.initial_states["train"], size=playing.scenes).tolist()
        touches: list[Touch] = []
        for number, state in enumerate(states):
            report("playing, scenes", number, len(states))
            touches += play(env, suite, state, rng, playing.descents, stride_of(config))
        return touches


def stride_of(config: Vla) -> float:
    """Metres that an action of 1 moves the hand."""
    from hilt.envs.tabletop import ACTION_SCALE

    return ACTION_SCALE[0] * 10 / float(config.task_options.get("control_hz", 10))


def play(env: Any, suite: Suite, state: int, rng: np.random.Generator, descents: int, stride: float) -> Iterator[Touch]:
    """Touches of one training scene."""
    raw, _ = env.reset(options={"split": "train", "state": state})
    views, places, touched = [suite.views(raw)], [_hand(raw)], []
    for _ in range(descents):
        above, below = np.array([*rng.uniform(LOW, HIGH), rng.uniform(*HEIGHTS)]), np.array([*rng.uniform(LOW, HIGH), FLOOR])
        for goal in (above, (above + below) / 2, below):
            raw = _go(env, goal - _hand(raw), stride)
            if goal is not below or _hand(raw)[2] > STOPPED:
                touched += [len(views)] if goal is below else []
                views.append(suite.views(raw))
                places.append(_hand(raw))
        raw = _go(env, np.array([0.0, 0.0, 0.06]), stride)
    for at in touched:
        seen = [i for i in range(len(views)) if i not in touched and places[at][0] - places[i][0] > BEHIND]
        if seen:
            ways = np.stack([places[at] - places[i] for i in seen]).astype(np.float32)
            yield Touch(_looks(views[at]), [views[i] for i in seen], ways)


def ends(lessons: Demonstrations) -> dict[str, Array]:
    """How each instruction's first demonstration looks before the fingers in its last picture."""
    found: dict[str, Array] = {}
    for number, lesson in enumerate(lessons.lessons):
        if lesson.texts[-1] not in found:
            found[lesson.texts[-1]] = _looks(lessons.batch(lessons.rows([number])[-1:], 1)[0][0])
    return found


def named(touches: Sequence[Touch], looks: Mapping[str, Array]) -> Examples:
    """Those touches that look clearly more like the end of one demonstration than of any other, with its words."""
    observations: list[Observation] = []
    ways: list[Array] = []
    for touch in touches:
        (nearest, said), (next_one, _) = sorted((float(np.linalg.norm(touch.looks - look)), said) for said, look in looks.items())[:2]
        if nearest < CLEARLY * next_one:
            observations += [{**view, "instruction": said} for view in touch.views]
            ways.append(touch.ways)
    return Examples(observations, np.concatenate([np.zeros((0, 3), np.float32), *ways]))


def learn(
    policy: SmallVLA,
    lessons: Demonstrations,
    examples: Examples,
    stride: float,
    config: Playing,
    draws: torch.Generator,
    watch: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> None:
    """Imitates the demonstrations, and with the same weight the straight ways to what was touched."""
    trained = list(policy.parameters())
    shown = config.demonstrated if examples.observations else config.demonstrated + config.batch_size  # as many samples either way
    adam, rows = Adam(trained, config.learning_rate), batches(lessons.rows(), shown, 0)
    actions, needed = straight(examples.ways, policy.chunk, stride)
    for step in range(config.steps):
        loss, values = policy.supervised_loss(*lessons.batch(next(rows), policy.chunk), draws)
        if examples.observations:
            drawn = torch.randint(len(examples.ways), (config.batch_size,), generator=draws).tolist()
            more, figures = policy.supervised_loss([examples.observations[i] for i in drawn], actions[drawn], needed[drawn], draws)
            loss, values["play_loss"] = loss + more, figures["loss"]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        length, passed = math.sqrt(sum(float(g.square().sum()) for g in gradients)), step / config.steps
        adam.learning_rate = config.learning_rate * min(1.0, 10 * passed + 1 / config.steps) * (1 + math.cos(math.pi * passed)) / 2
        adam.step([g / max(1.0, length) for g in gradients])
        watch(step, values)


def straight(ways: Array, chunk: int, stride: float) -> tuple[Array, Array]:
    """The actions [N, chunk, 3] that go these ways as fast as the arm may, and which of them it takes, bool [N, chunk]."""
    steps = np.maximum(1, np.ceil(np.abs(ways).max(-1) / stride))
    each = (ways / stride / steps[:, None]).astype(np.float32)
    return np.repeat(each[:, None], chunk, 1), np.arange(chunk) < steps[:, None]


def _hand(raw: Mapping[str, Any]) -> Array:
    return np.asarray(raw["state"]["tcp_pose"][:3], np.float64)


def _looks(view: Mapping[str, Any]) -> Array:
    return np.asarray(view["wrist_image"][BEFORE_THE_FINGERS].reshape(-1, 3).mean(0))


def _go(env: Any, way: Array, stride: float) -> Any:
    """Straight there, with closed fingers, as fast as the arm may; what is seen in the end."""
    steps = max(1, math.ceil(float(np.abs(way).max()) / stride))
    actions = np.zeros((steps, 7), np.float32)
    actions[:, :3], actions[:, 6] = way / stride / steps, -1.0
    return env.unwrapped.step_chunk(actions)[0]
