"""Reward classifiers: frames with labels, training, and the reward that an environment asks for."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.classifier.frame_scores import score_frames
    from hilt.classifier.frames import Clip, read_frames
    from hilt.classifier.held_out import HeldOut, read_held_out
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
    "HeldOut",
    "RewardClassifier",
    "TrainedClassifier",
    "read_frames",
    "read_held_out",
    "reward_function",
    "save",
    "score_frames",
    "train",
]
__getattr__ = lazy_exports(__name__, __file__)
