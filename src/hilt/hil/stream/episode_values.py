"""The estimates of a value model about episodes that end while a run goes on: late facts of its log, as
`hilt train value` writes them. The app shows them, and a learner that is started again reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hilt.core.errors import SchemaError
from hilt.core.trajectory import ESTIMATES
from hilt.hil.config import Hil
from hilt.replay import Edits, Log
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.recut import facts_of_estimates
from hilt.value.value_episodes import TrajectoryEpisodes
from hilt.value.value_facts import estimates_of
from hilt.value.value_model import ValueModel, load_value_model

OFFSETS = (1 << OFFSET_BITS) - 1


class EpisodeValues:
    """Finds and keeps the estimates of episodes of one log. `task` is that of episodes whose facts have none."""

    def __init__(self, log: Log, model: ValueModel, task: str = ""):
        self._log, self._model, self._task = log, model, task

    def known(self, number: int) -> Mapping[str, Any] | None:
        """The facts of an episode, if they are of this model, for its outcome and its steps of now."""
        facts, keys = self._log.facts.about(number), self._log.trajectory_keys(number)
        found = facts.get(ESTIMATES)
        if not isinstance(found, Mapping):
            return None
        same = (found.get("model"), found.get("success"), found.get("first"), len(found.get("advantage", ())))
        return found if same == (self._model.id, facts.get("success"), int(keys[0] & OFFSETS), len(keys)) else None

    def find(self, number: int) -> Mapping[str, Any]:
        """What the model finds of an episode, or has found before."""
        if (known := self.known(number)) is not None:
            return known
        episodes = TrajectoryEpisodes(self._log, [number], self._task)
        try:
            self._model.check(episodes)
        except SchemaError as error:
            raise SchemaError(f"{self._log.facts.about(number).get('imported', self._log.path)}: {error}") from error
        return estimates_of(self._model, episodes, 0)

    def write(self, number: int, found: Mapping[str, Any]) -> bool:
        """Makes facts of what was found, if they are not; whether they were not."""
        if self.known(number) is not None:
            return False
        self._log.annotate(number, **facts_of_estimates(found))
        if self.known(number) is None:  # what somebody has edited counts before what was recorded
            Edits(self._log).estimates({number: found})
        return True


class WatchedEpisodes:
    """Writes the estimates of the model that watches a run (`value.model`) about each episode, when it has ended."""

    def __init__(self, config: Hil, log: Log, notify: Callable[[str], None]):
        model = load_value_model(config.value.model)
        self._log, self._values, self._tasks = log, EpisodeValues(log, model), set(model.tasks)
        why = ""
        if strange := sorted(set(config.task.split("+")) - self._tasks):
            why = f"it was trained on {listed(self._tasks)}, and not on {listed(strange)}"
        try:
            model.inputs.check(log)
        except SchemaError as error:  # it looks at what the environment shows, and the log does not keep
            self._tasks, why = set(), str(error)
        if why:
            notify(
                f"value.model={config.value.model}: there will be no values below the videos of this run: {why}. For "
                "that, train one on its episodes: hilt train value RUN --out NEW"
            )

    def value(self, number: int) -> None:
        """Values an episode that has ended, once its task and its outcome are facts."""
        if str(self._log.facts.about(number).get("task", "")) in self._tasks:
            self._values.write(number, self._values.find(number))


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
