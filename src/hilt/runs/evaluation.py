"""The result of an evaluation: the outcome of every episode, the success with its
95% interval, and the folder that records it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hilt.core.files import DISK
from hilt.envs.task import scene_of
from hilt.observe.statistics import in_clusters, over_scenes, wilson

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class EpisodeOutcome:
    """One episode."""

    state: int
    """The initial state's number in its split"""
    seed: int
    success: bool | None
    """None if unknown"""
    steps: int
    total: float
    """Sum of its rewards"""
    error: str = ""
    """What the environment raised: the episode is lost"""
    verdict: bool | None = None
    """The decision of the run's reward classifier; None without one"""
    judge: str = "task"
    """Who decided the success: the "task", a "person" who was asked, or the "classifier"; empty if unknown"""


@dataclass
class EvaluationResult:
    """All episodes of an evaluation, and what follows from them."""

    task: str
    split: str
    update: int
    """Learner steps that the policy had made"""
    sample: bool
    seed: int
    outcomes: list[EpisodeOutcome] = field(default_factory=list)
    seconds: float = 0.0
    folder: Path | None = None
    """Where it is recorded"""
    videos: list[Path] = field(default_factory=list)
    of_train: int = 0
    """How many of the split's initial states are of the split train, too"""
    execution: dict[str, Any] = field(default_factory=dict)
    """How the chunks of a policy were executed, and what came of it, where that was asked for"""

    @property
    def successes(self) -> int:
        return sum(bool(one.success) for one in self.outcomes)

    @property
    def success(self) -> float | None:
        """The share of episodes that succeeded; None if the environment never reports success."""
        return self.successes / len(self.outcomes) if self.interval else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the success."""
        known = any(one.success is not None for one in self.outcomes if not one.error)
        return wilson(self.successes, len(self.outcomes)) if known else None

    @property
    def steps_per_success(self) -> float | None:
        """The mean over episodes that succeeded; None when none did."""
        lengths = [one.steps for one in self.outcomes if one.success]
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def judges(self) -> list[str]:
        """Who decided the success of these episodes."""
        return sorted({one.judge for one in self.outcomes if not one.error})

    @property
    def agreement(self) -> dict[str, int] | None:
        """How the classifier's verdicts compare with the success, where somebody else
        decided that; None without such episodes."""
        pairs = [
            (one.verdict, one.success)
            for one in self.outcomes
            if one.verdict is not None and one.judge in ("task", "person")
        ]
        if not pairs:
            return None
        return {
            "episodes": len(pairs),
            "verdicts_of_success": sum(bool(verdict) for verdict, _ in pairs),
            "agree": sum(verdict == success for verdict, success in pairs),
            "false_successes": sum(bool(verdict and not success) for verdict, success in pairs),
            "missed_successes": sum(bool(success and not verdict) for verdict, success in pairs),
        }

    @property
    def errors(self) -> list[EpisodeOutcome]:
        return [one for one in self.outcomes if one.error]

    def to_json(self) -> dict[str, object]:
        """Returns the evaluation as JSON has it."""
        low, high = self.interval or (None, None)
        return {
            **{
                name: getattr(self, name)
                for name in ("task", "split", "update", "sample", "seed", "successes", "success")
            },
            "scene": scene_of(self.task),
            **{"low": low, "high": high, "episodes": len(self.outcomes), "errors": len(self.errors)},
            "decided_by": self.judges,
            "states_of_train": self.of_train,
            **({"classifier": self.agreement} if self.agreement else {}),
            **({"execution": self.execution} if self.execution else {}),
            "steps_per_success": self.steps_per_success,
            "return": sum(one.total for one in self.outcomes) / len(self.outcomes),
            "length": sum(one.steps for one in self.outcomes) / len(self.outcomes),
            "seconds": round(self.seconds, 3),
            "outcomes": [asdict(one) for one in self.outcomes],
        }


def over_tasks(outcomes: Sequence[tuple[str, int, bool]]) -> tuple[float, float, float]:
    """Returns the 95% interval of the success of all (task, initial state, success) together, and the number
    of independent episodes that they stand for.

    Tasks that share their scenes, such as those of tabletop/press_*, begin alike:
    see `hilt.observe.statistics.over_scenes`.
    """
    return over_scenes([(task, scene_of(task), state, success) for task, state, success in outcomes])


def as_pairs(outcomes: Iterable[tuple[str, int, bool]]) -> str:
    """Returns the (task, initial state, success) of a validation as the metrics have them,
    so that alarms can compare it with others."""
    return in_clusters((scene_of(task), state, task, success) for task, state, success in outcomes)


def new_folder(parent: Path, split: str, update: int, sample: bool = False) -> Path:
    """A folder of its own for an evaluation of this policy."""
    stem = f"{split}-{update:08d}" + "-sampled" * sample
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    folder = next(path for name in names if not (path := parent / name).exists())
    DISK.make_folders(folder)
    return folder
