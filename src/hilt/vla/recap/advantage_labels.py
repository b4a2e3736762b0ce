"""Labels of good and bad steps of episodes, by the advantages that a value model has written into their logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hilt.algos.offline.recap import indicators, thresholds
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import ESTIMATES
from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.vla.demonstrations import Demonstrations, Lesson

OFFSETS = (1 << OFFSET_BITS) - 1


@dataclass(frozen=True)
class _Judged:
    """What is known of the steps of one episode."""

    task: str
    human: Array
    """Whether a person acted, bool [T]"""
    advantage: Array
    """float64 [T]; 0 where nobody else acted"""
    model: str
    """The id of the value model; empty where a person acted in all steps"""
    success: bool | None


def advantage_labels(
    lessons: Demonstrations, threshold: float, notify: Callable[[str], None] = lambda text: None
) -> list[Array]:
    """Returns for each episode which of its steps are good, bool [T]: those of a person, and in each task those whose
    advantage is above the quantile `threshold` of what the policy did."""
    judged = [_judged(lesson) for lesson in lessons.lessons]
    models = sorted({one.model for one in judged} - {""})
    if len(models) > 1:
        raise ConfigError(
            f"the episodes have values of {len(models)} models ({', '.join(models[:3])}), whose advantages cannot be "
            "compared. Write those of one into all logs: hilt data value LOG... --model FOLDER"
        )
    if not models:
        raise ConfigError(
            "a person acted in all steps, so all of them count as good and there is nothing to tell apart. Give the "
            "episodes of a policy, too, with their values; or leave recap.threshold out, which is imitation."
        )
    tasks = [one.task for one in judged for _ in one.human]
    human = torch.from_numpy(np.concatenate([one.human for one in judged]))
    advantage = torch.from_numpy(np.concatenate([one.advantage for one in judged]))
    limits = thresholds(advantage, tasks, human, threshold)
    good = indicators(advantage, tasks, human, limits).numpy()
    if not any(one.success is False for one in judged if one.model):
        notify(
            "CAUTION: no episode of the policy failed: its advantages tell fast from slow, and nothing of what fails. "
            "Give a log with failures."
        )
    for task, limit in limits.items():
        mine = np.array([name == task for name in tasks])
        others = mine & ~human.numpy()
        notify(
            f"{task or 'unnamed task'}: {int(others.sum()):,} steps of the policy, {good[others].mean():.0%} of them "
            f"with an advantage above {limit:.4f}; {int((mine & human.numpy()).sum()):,} steps of a person"
        )
    return np.split(good, np.cumsum([len(one.human) for one in judged])[:-1])


def _judged(lesson: Lesson) -> _Judged:
    log, trajectory = lesson.log, int(lesson.keys[0]) >> OFFSET_BITS
    facts: Mapping[str, Any] = log.facts.about(trajectory)
    task = str(facts.get("task") or lesson.texts[0])
    human, success = lesson.human, facts.get("success")
    if human.all():
        return _Judged(task, human, np.zeros(len(human)), "", success)
    known = facts.get(ESTIMATES)
    if not isinstance(known, Mapping) or "advantage" not in known:
        raise ConfigError(
            f"{log.path}, trajectory {trajectory}: it has no advantages, by which good actions are told from bad ones. "
            f"Write them with: hilt train value {log.path} --out value, or by a model that there is: hilt data value "
            f"{log.path} --model value"
        )
    return _Judged(task, human, _advantages(lesson, known, trajectory), str(known.get("model", "")), success)


def _advantages(lesson: Lesson, known: Mapping[str, Any], trajectory: int) -> Array:
    """Those of its steps: an episode that was trimmed since has fewer of them, or others."""
    values: Sequence[float] = known["advantage"]
    places = (lesson.keys & OFFSETS) - int(known.get("first", 0))
    if places.min() < 0 or places.max() >= len(values):
        raise SchemaError(
            f"{lesson.log.path}, trajectory {trajectory}: its advantages are of other steps than it has now. Renew "
            f"them with: hilt data value {lesson.log.path} --model FOLDER"
        )
    found: Array = np.asarray(values, np.float64)[places]
    return found
