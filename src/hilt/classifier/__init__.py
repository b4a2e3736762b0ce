"""Reward classifiers: frames with labels, training, and the reward that an environment asks for."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.classifier.frames import Clip, read_frames
    from hilt.classifier.reward import (
        ClassifierConfig,
        RewardClassifier,
        TrainedClassifier,
        reward_function,
        save,
        train,
    )

__all__ = [
    "ClassifierConfig",
    "Clip",
    "RewardClassifier",
    "TrainedClassifier",
    "read_frames",
    "reward_function",
    "save",
    "train",
]
__getattr__ = lazy_exports(__name__, __file__)
