"""Keeps which episodes the filter of a run has chosen when it began: a resumed run learns from the same ones, whatever
has been found out about the episodes of its data since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError
from hilt.core.tree import JsonObject
from hilt.formats.experience import LogDataset

CHOSEN = "chosen_episodes.json"
"""The file in a run's folder"""


class ChosenEpisodes:
    """Opens the logs of a run with their filters. What they choose is kept in the run's folder; without a folder they
    choose anew each time."""

    def __init__(self, run: Path | None, notify: Callable[[str], None]):
        self._run, self._notify = run, notify
        self._known = read_json(run / CHOSEN)["logs"] if run is not None and (run / CHOSEN).is_file() else {}
        self._logs: dict[str, JsonObject] = {}

    def open(self, number: int, path: Path, where: str) -> LogDataset:
        """Returns the episodes of a log that the filter chooses, or has chosen when the run began. `number`: which of
        the paths of the run's data it is."""
        known = self._known.get(str(number), {})
        if known.get("where") == where:
            dataset = self._opened_again(path, where, [(trajectory, row) for trajectory, row in known["rows"]])
        else:
            dataset = LogDataset(path, where=where)
            self._notify(f"{len(dataset)} episodes of {path} are chosen by where={where!r}")
        self._logs[str(number)] = {"where": where, "rows": list(map(list, dataset.rows or ()))}
        return dataset

    def keep(self) -> None:
        """Writes what was chosen, whole or not at all."""
        if self._run is not None and self._logs != self._known:
            write_json(self._run / CHOSEN, {"logs": self._logs})

    def _opened_again(self, path: Path, where: str, rows: list[tuple[int, int]]) -> LogDataset:
        dataset = LogDataset(path, rows=rows)
        numbers = {number for number, _ in rows}
        if gone := sorted(numbers.difference(dataset.log.trajectories())):
            dataset.log.close()
            raise ConfigError(
                f"where={where!r} chose {len(rows)} episodes of {path} when {self._run} began, and of "
                f"{len(gone)} trajectories (number {', '.join(map(str, gone[:5]))}{', ...' * (len(gone) > 5)}) nothing "
                "is shown now: they are bad, deleted, split or joined. Take these edits back (hilt data history "
                f"{path} lists them, hilt data undo), or begin another run."
            )
        self._notify(f"{len(dataset)} episodes of {path} were chosen by where={where!r} when the run began")
        return dataset
