"""A reward classifier: is what the cameras see a success? Head, loss, batches, and how good it is at which threshold.

    two-way   one logit z      p(success) = sigmoid(z)        loss = -[y log p + (1 - y) log(1 - p)]
    n-way     n logits z       p(class i) = softmax(z)_i      loss = -log p(y)

Batches have as many frames of each class, however rare it is, so a probability is that
of a world where all classes are equally frequent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init  # modules as torch makes them would draw from the global generator

THRESHOLDS = tuple(round(0.01 * i, 2) for i in range(1, 100))
LOWEST = 0.5
"""The lowest threshold that is recommended: below, a frame is more likely no success"""
BETA = 0.5
"""Precision counts twice as much as recall: a false success is learned by the policy, a missed one costs it a step"""
PLATEAU = 0.005
"""Scores as near to the best one are as good: they differ by a frame or two"""


class Classifier(nn.Module):
    """An encoder that turns images into features, and HIL-SERL's head: Dense, dropout, LayerNorm, relu,
    Dense. First values are the caller's matter."""

    def __init__(self, encoder: nn.Module, width: int, classes: int = 2, hidden: int = 256, dropout: float = 0.1):
        super().__init__()
        self.encoder, self.dropout = encoder, dropout
        self.dense, self.norm = skip_init(nn.Linear, width, hidden), skip_init(nn.LayerNorm, hidden, eps=1e-6)
        self.out = skip_init(nn.Linear, hidden, 1 if classes == 2 else classes)

    def forward(self, images: Mapping[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """Logits [B, 1] or [B, n] of uint8 images; dropout only with a `generator`, that is, in training."""
        hidden = self.dense(self.encoder(images, generator))
        if generator is not None and self.dropout:
            keep = 1 - self.dropout
            hidden = hidden * torch.empty_like(hidden).bernoulli_(keep, generator=generator) / keep
        return self.out(torch.relu(self.norm(hidden)))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy; `labels` are int [B]."""
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels.to(logits.dtype))
    return F.cross_entropy(logits, labels.long())


def probabilities(logits: Tensor) -> Tensor:
    """The probability of each class, [B, n]."""
    if logits.shape[-1] == 1:
        success = torch.sigmoid(logits)
        return torch.cat([1 - success, success], -1)
    return torch.softmax(logits, -1)


def balanced(labels: Tensor, classes: int, count: int, generator: torch.Generator) -> Tensor:
    """Places of `count` frames, as many of each class (the first ones get the rest), drawn with replacement."""
    drawn = []
    for number in range(classes):
        places = torch.nonzero(labels == number)[:, 0]
        share = count // classes + (number < count % classes)
        drawn.append(places[torch.randint(0, len(places), (share,), generator=generator)])
    return torch.cat(drawn)


@dataclass(frozen=True)
class At:
    """What happens at one threshold: a frame is called a success when its probability is at least that."""

    threshold: float
    precision: float | None
    """Share of successes among the frames that are called one; None when no frame is"""
    recall: float
    """Share of the successes that are called one"""
    false_successes: int
    """Frames that are none and are called one"""

    @property
    def score(self) -> float:
        """F-beta = (1 + b²) P R / (b² P + R)"""
        if not self.precision or not self.recall:
            return 0.0
        return (1 + BETA**2) * self.precision * self.recall / (BETA**2 * self.precision + self.recall)


def accuracy(probability: Tensor, labels: Tensor) -> float:
    """Share of frames whose likeliest class is their own: for two classes, at the threshold 0.5."""
    return float((probability.argmax(-1) == labels).float().mean())


def majority(labels: Tensor) -> float:
    """Returns the accuracy of always predicting the most frequent class."""
    return float(torch.bincount(labels).max() / len(labels))


def curve(success: Tensor, truth: Tensor, thresholds: Sequence[float] = THRESHOLDS) -> list[At]:
    """Precision and recall of p(success) [N] against bool truth [N] at each threshold."""
    out = []
    for threshold in thresholds:
        called = success >= threshold
        hits, wrong = int((called & truth).sum()), int((called & ~truth).sum())
        out.append(
            At(threshold, hits / (hits + wrong) if hits + wrong else None, hits / max(1, int(truth.sum())), wrong)
        )
    return out


def recommended(points: Sequence[At]) -> At:
    """The middle of the widest stretch of thresholds from `LOWEST` up whose score is the best, or as good."""
    able = [point for point in points if point.threshold >= LOWEST]
    best = max(point.score for point in able)
    stretches: list[list[At]] = [[]]
    for point in able:
        if point.score >= best - PLATEAU:
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    widest = max(stretches, key=len)
    return widest[len(widest) // 2]
