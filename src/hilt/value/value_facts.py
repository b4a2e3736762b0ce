"""What a value model finds about the episodes of a log, as late facts of the log: value, advantage and progress of
every step, each with the id of the model.

    with ValueEpisodes(["runs/pick"]) as episodes:
        write_estimates(load_value_model("value"), episodes)

They are edits, as `hilt.replay.Edits` makes them: with author and time, written once, and undone by ``hilt data undo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hilt.core.progress import Report, silent
from hilt.core.trajectory import ESTIMATES
from hilt.core.tree import Array
from hilt.replay import Edits
from hilt.replay.log import Log
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_model import ValueModel

AT_ONCE = 100
"""Episodes in one edit"""
DIGITS = 4


@dataclass
class Written:
    """What was written into logs."""

    episodes: int = 0
    """Episodes that have new facts"""
    known: int = 0
    """Episodes that had them already"""
    edits: int = 0


def estimates_of(model: ValueModel, episodes: ValueEpisodes, number: int) -> dict[str, Any]:
    """What `hilt.replay.Edits.estimates` takes of one episode: numbers with four digits for each of its steps.

    progress: the share of the way to success, 1 - (steps left, if it succeeds) / (steps that are usually left at the
    beginning of the task), within 0 and 1. percentile: the share of the steps of the task, in percent, that have a
    lower advantage."""
    episode, found = episodes.episodes[number], model.predict(episodes, number)
    task = model.tasks[episode.task]
    value = np.round(found.value.astype(np.float64), DIGITS)
    steps = model.metadata["advantage_steps"]
    advantage = model.support.advantages(torch.from_numpy(value), episode.success, steps).numpy()
    progress = 1 - found.steps_left.astype(np.float64) / max(1.0, task["steps_at_start"])
    return {
        "model": model.id,
        "first": episode.first,
        "success": episode.success,
        "value": value.tolist(),
        "advantage": np.round(advantage, DIGITS).tolist(),
        "percentile": percentiles(advantage, task["advantage_quantiles"]),
        "progress": np.round(np.clip(progress, 0, 1), DIGITS).tolist(),
    }


def percentiles(advantages: Array, quantiles: Sequence[float]) -> list[float]:
    """Where advantages lie among the quantiles of a task, evenly spaced from 0 to 1: from 0 to 100, one digit."""
    known = np.asarray(quantiles, np.float64)
    below, up_to = np.searchsorted(known, advantages, "left"), np.searchsorted(known, advantages, "right")
    return [round(float(place), 1) for place in 50 * (below + up_to) / len(known)]


def write_estimates(model: ValueModel, episodes: ValueEpisodes, author: str = "", report: Report = silent) -> Written:
    """Writes the facts of all episodes that do not have those of this model, for their outcome of now, into their
    logs. A process that was killed meanwhile has written some of them; the next one writes the others."""
    model.check(episodes)
    written, done = Written(), 0
    for log in episodes.logs:
        mine = [number for number, episode in enumerate(episodes) if episode.log is log]
        fresh = [number for number in mine if not _is_known(log, episodes, number, model.id)]
        written.known += len(mine) - len(fresh)
        done += len(mine) - len(fresh)
        for begin in range(0, len(fresh), AT_ONCE):
            found = {}
            for number in fresh[begin : begin + AT_ONCE]:
                found[episodes.episodes[number].trajectory] = estimates_of(model, episodes, number)
                done += 1
                report("writing values, episodes", done, len(episodes))
            made = Edits(log, author=author).estimates(found)
            count = 0 if made is None else len(made.episodes)
            written.edits += made is not None
            written.episodes += count
            written.known += len(found) - count
    return written


def _is_known(log: Log, episodes: ValueEpisodes, number: int, model: str) -> bool:
    """Whether an episode has these facts, before anything is computed."""
    episode = episodes.episodes[number]
    known = log.facts.about(episode.trajectory).get(ESTIMATES)
    if not isinstance(known, dict):
        return False
    same = (known.get("model"), known.get("first"), known.get("success"), len(known.get("value", ())))
    return same == (model, episode.first, episode.success, len(episode))
