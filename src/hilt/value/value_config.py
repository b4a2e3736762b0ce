"""The settings of a value model. This module does not import torch, so that commands that only read settings are
fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hilt.core.validate import Need, setting

_PICTURES = Need("pictures: encoder=small or resnet10, and no policy", lambda c: not c.policy and c.encoder != "none")
_NAMES = Need("policy=FOLDER or actions=N", lambda c: c.policy or c.actions)
_STATES = Need("actions=0: values of chunks give no advantages", lambda c: not c.actions)
_STEPS = Need("returns=steps", lambda c: c.returns == "steps")
_DISCOUNTED = Need("returns=discounted", lambda c: c.returns == "discounted")
_GAUSS = Need("target=hl_gauss", lambda c: c.target == "hl_gauss")


@dataclass
class ValueConfig:
    """What a value model looks at, what it predicts, and how it is trained."""

    image_keys: list[str] = setting(factory=list, needs=_PICTURES)
    """The cameras it looks at, such as images/front; empty: all"""
    encoder: str = setting("small", choices=("small", "resnet10", "none"))
    """How pictures become numbers: "small" (three convolutions per camera), "resnet10" (HIL-SERL's), or "none": it
    looks at the state and the words alone"""
    weights: str = setting("", needs=_PICTURES)
    """A file for the trunk of "resnet10", which then stays as it is; empty: all is learned"""
    policy: str = ""
    """The folder of a vision-language-action policy, whose frozen features are looked at in place of pictures, words
    and state; empty: an encoder of its own"""
    actions: int = setting(0, minimum=0, maximum=512)
    """The value of doing something: actions from a step on that are looked at beside what is seen there, at most the
    chunk of the policy that is to choose by it (best-of-N); 0: the value of what is seen"""
    suite: str = setting("", needs=_NAMES)
    """How a policy names observations: a suite such as tabletop or libero; empty: that of the task"""
    columns: dict[str, str] = setting(factory=dict, needs=_NAMES)
    """Instead of a suite: the policy's names to paths in the observations, full_image: images/top"""
    features: int = setting(64, minimum=1, needs=_PICTURES)
    """Numbers that each camera becomes"""
    hidden: int = setting(256, minimum=1)
    """Width of the two layers behind them"""
    dropout: float = setting(0.2, minimum=0, below=1)
    """Share of each of these layers that is left out at each step of training"""
    random_crop: int = setting(4, minimum=0, off=0, needs=_PICTURES)
    """The maximum shift of pictures in training, in pixels; 0: none"""
    bins: int = setting(201, minimum=3)
    """Values that are distinguished: the first is failure, the others are returns of successes"""
    returns: str = setting("steps", choices=("steps", "discounted"))
    """What is predicted: "steps" to success, from -1 to 0, or the "discounted" reward of 1 for success, from 0 to 1"""
    discount: float = setting(0.98, above=0, below=1, needs=_DISCOUNTED)
    """Per step, of discounted returns"""
    horizon: int = setting(0, minimum=0)
    """Steps to success that are distinguished, what takes longer counts as this; 0: the longest success"""
    failure_penalty: float = setting(1.0, above=0, needs=_STEPS)
    """How far a failure lies below the slowest success"""
    target: str = setting("hl_gauss", choices=("hl_gauss", "two_hot"))
    """How a return becomes a distribution over the bins"""
    smoothing: float = setting(0.75, above=0, needs=_GAUSS)
    """The standard deviation of that distribution, in bins"""
    advantage_steps: int = setting(10, minimum=1, needs=_STATES)
    """N of the N-step advantage: an action is judged by the value this many steps later"""
    steps: int = setting(400, minimum=1)
    """Gradient steps at most; the weights with the lowest loss on the validation episodes are kept"""
    evaluate_every: int = setting(50, minimum=1)
    """Gradient steps between two looks at the validation episodes, with a checkpoint"""
    batch_size: int = setting(128, minimum=1)
    """Steps of episodes in a batch"""
    learning_rate: float = setting(1e-3, above=0, maximum=1)
    """Of AdamW"""
    weight_decay: float = setting(0.01, minimum=0)
    """Of AdamW"""
    held_out: float = setting(0.25, minimum=0.01, maximum=0.9)
    """Share of the initial states whose episodes are not trained on, but judged"""
    validation: float = setting(0.2, minimum=0.01, maximum=0.9)
    """Share of the other initial states by whose episodes the weights are chosen"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the training when they are raised, with a checkpoint: validation, ranking, not_finite"""
    seed: int = 0
    """Of the split, the first weights and the batches"""

    def conflicts(self, here: str) -> Iterator[str]:
        if self.weights and self.encoder != "resnet10":
            yield f"{here}weights is {self.weights!r}, but only encoder=resnet10 reads a file; it is {self.encoder!r}."
        if self.suite and self.columns:
            yield f"{here}suite={self.suite} and columns={self.columns}: both name the observations. Give one of them."
