"""How good a value model is on episodes that it has not seen: whether it ranks successes above failures while an
episode goes on, and whether its probabilities come true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hilt.algos.value_distribution import ValueSupport, auc, calibration_error, reliability
from hilt.core.tree import Array
from hilt.observe.drawing import WIDTH, Chart, Line, Pixels, draw

if TYPE_CHECKING:
    from hilt.value.value_episodes import ValueEpisodes
    from hilt.value.value_model import ValueModel

HALF_WAY = 0.5
SHARES = (0.25, HALF_WAY, 0.75)
"""Of an episode, after which it is judged"""
RESAMPLES = 1000
"""Of the episodes, for the interval of an AUC"""
CURVES = 4
"""Episodes of each outcome in the picture"""


@dataclass(frozen=True)
class HeldOutEpisode:
    """One held-out episode, and what was predicted at each of its steps."""

    log: str
    trajectory: int
    task: str
    succeeded: bool
    value: Array
    """float32 [T]"""
    success: Array
    """The probability of success, float32 [T]"""

    @classmethod
    def of(cls, model: ValueModel, episodes: ValueEpisodes, number: int) -> HeldOutEpisode:
        episode, found = episodes.episodes[number], model.predict(episodes, number)
        where = str(episode.log.path)
        return cls(where, episode.trajectory, episode.task, bool(episode.success), found.value, found.success)

    def after(self, share: float) -> int:
        """The step that comes after this share of the episode."""
        return min(int(share * len(self.value)), len(self.value) - 1)

    def to_json(self) -> dict[str, Any]:
        rounded = {name: [round(float(x), 4) for x in getattr(self, name)] for name in ("value", "success")}
        return {**asdict(self), **rounded}


def held_out_report(episodes: Sequence[HeldOutEpisode], seed: int = 0) -> dict[str, Any]:
    """AUC of success after each of `SHARES`, with its 95% interval over episodes, and the expected calibration error of
    the same predictions. With several tasks, also the mean AUC within each of them: that some tasks are harder than
    others is easily learned, and ranks nothing within a task."""
    truth = torch.tensor([episode.succeeded for episode in episodes])
    after = []
    for share in SHARES:
        places = [episode.after(share) for episode in episodes]
        value = torch.tensor([float(e.value[t]) for e, t in zip(episodes, places, strict=True)])
        success = torch.tensor([float(e.success[t]) for e, t in zip(episodes, places, strict=True)])
        after.append(
            {
                "share": share,
                "auc": auc(value, truth),
                "interval": _interval(value.numpy(), truth.numpy(), seed),
                "auc_within_tasks": _within_tasks(value, truth, [episode.task for episode in episodes]),
                "calibration_error": calibration_error(success, truth),
            }
        )
    predicted = torch.tensor([float(e.success[e.after(share)]) for share in SHARES for e in episodes])
    every = truth.repeat(len(SHARES))
    return {
        "after": after,
        "calibration_error": calibration_error(predicted, every),
        "always_the_same_error": float(2 * every.double().mean() * (1 - every.double().mean())),
        "reliability": [asdict(group) for group in reliability(predicted, every)],
        "tasks": [
            _of_task(task, [e for e in episodes if e.task == task]) for task in sorted({e.task for e in episodes})
        ],
    }


def _of_task(task: str, episodes: Sequence[HeldOutEpisode]) -> dict[str, Any]:
    """How one task is judged: the AUC after each of `SHARES`, None where it has one outcome only."""
    truth = torch.tensor([episode.succeeded for episode in episodes])
    values, predicted = (
        torch.tensor([[float(getattr(e, name)[e.after(share)]) for e in episodes] for share in SHARES])
        for name in ("value", "success")
    )
    return {
        "task": task,
        "episodes": len(episodes),
        "successes": int(truth.sum()),
        "auc": [auc(scores, truth) for scores in values],
        "calibration_error": calibration_error(predicted.flatten(), truth.repeat(len(SHARES))),
    }


def _interval(scores: Array, truth: Array, seed: int) -> list[float] | None:
    """Percentiles 2.5 and 97.5 of the AUC of episodes that are drawn again, as many of each outcome."""
    rng, yes, no = np.random.default_rng(seed), scores[truth], scores[~truth]
    if not len(yes) or not len(no):
        return None
    wins = (yes[:, None] > no).astype(np.float64) + 0.5 * (yes[:, None] == no)
    drawn = [rng.multinomial(len(side), np.full(len(side), 1 / len(side)), RESAMPLES) for side in (yes, no)]
    found = ((drawn[0] @ wins) * drawn[1]).sum(1) / wins.size
    return [round(float(x), 4) for x in np.percentile(found, [2.5, 97.5])]


def _within_tasks(scores: torch.Tensor, truth: torch.Tensor, tasks: Sequence[str]) -> float | None:
    """The mean over the tasks that have both outcomes, by their number of episodes; None with one task."""
    if len(set(tasks)) < 2:
        return None
    parts = []
    for task in sorted(set(tasks)):
        mine = torch.tensor([other == task for other in tasks])
        if (found := auc(scores[mine], truth[mine])) is not None:
            parts.append((found, int(mine.sum())))
    return sum(a * n for a, n in parts) / sum(n for _, n in parts) if parts else None


def report_picture(episodes: Sequence[HeldOutEpisode], found: Mapping[str, Any], support: ValueSupport) -> bytes:
    """A PNG: how often predictions came true, from `held_out_report`, and the values of some episodes."""
    groups = found["reliability"]
    x, y = (np.array([group[name] for group in groups]) for name in ("predicted", "observed"))
    perfect = np.array([0.0, 1.0])
    charts = [
        Chart(
            f"Reliability: calibration error {found['calibration_error']:.3f}",
            "share that succeeded",
            "predicted probability of success",
            [Line("perfect", perfect, perfect, 7, dash=1), Line("held-out episodes", x, y, 0, dots=len(x) < 2)],
            percent=True,
        )
    ]
    lines = []
    for succeeded, color in ((True, 2), (False, 4)):
        chosen = [episode for episode in episodes if episode.succeeded == succeeded]
        for episode in chosen[:: -(-len(chosen) // CURVES)] if chosen else []:
            name = "successes" if succeeded else "failures"
            lines.append(Line(name, np.arange(len(episode.value)), episode.value, color))
    charts.append(Chart("Values of held-out episodes", f"value, failure {support.failure:g}", "step", lines))
    on = Pixels(len(charts), 1, 0)
    for place, chart in enumerate(charts):
        on.corner = (place * WIDTH, 0.0)
        draw(chart, on)
    return on.png()
