"""The alarms of a training that takes minutes and is no run: that of a classifier or of a value model.

    alarms = TrainingAlarms("value", stop_on=["validation"], notify=print)
    ends = alarms.take({"loss": 0.4, "validation_loss": 0.9}, step)      # after each look at held-out data
    if ends:
        raise alarms.ended(ends, "Nothing was written")

They are said while it learns, and `raised` has them for the folder that it writes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hilt.core.errors import AlarmError, NotFiniteError
from hilt.observe.alarms import Alarms, Record, RunFacts, check_stop_on

MAX_SKIPPED = 5
"""Steps in a row with a loss or a gradient that is not finite, after which learning ends with an error"""


LOOKS = 3
"""Held-out losses of which the mean is looked at"""


def silent(text: str) -> None:
    """Says nothing."""


class TrainingAlarms:
    """Takes the figures of a training; raises and ends alarms by them."""

    def __init__(
        self, job: str, stop_on: Iterable[str], notify: Callable[[str], None] = silent, learning_rate: float = 0.0
    ):
        """`job`: "classifier" or "value". `stop_on`: alarms that end the training; a name that is none is refused.
        `learning_rate`: for errors that recommend a lower one."""
        facts = RunFacts(job)
        check_stop_on(stop_on, facts)
        self._alarms, self._stop_on, self._notify, self._rate = Alarms(facts), set(stop_on), notify, learning_rate
        self._in_a_row, self._held = 0, deque[float](maxlen=LOOKS)
        self.raised: list[dict[str, Any]] = []
        """The name, step and text of each alarm that was raised, and whether it ended the training"""

    def resume(self, raised: Iterable[Mapping[str, Any]], looks: Iterable[tuple[int, Record]]) -> None:
        """Goes on after another process: with the alarms that it raised, and its looks by their steps. What still holds
        is said again; an alarm that ended the training is reset."""
        self.raised = [dict(one) for one in raised]
        stops = {(one["step"], one["name"]) for one in self.raised if one["stops"]}
        for step, record in looks:
            self._alarms.take(self._with_mean(record))
            for name in [name for at, name in stops if at == step]:
                self._alarms.forget(name)
        self._alarms.on.clear()

    def take(self, record: Record, step: int) -> str:
        """Takes in figures after a step; returns the text of an alarm that ends the training, else nothing."""
        ends = ""
        for change in self._alarms.take(self._with_mean(record)):
            self._notify(f"step {step:,}: {change.text}")
            if change.raised:
                stops = change.name in self._stop_on
                self.raised.append({"name": change.name, "step": step, "text": change.text, "stops": stops})
                ends = ends or change.text * stops
        return ends

    def learned(self, step: int) -> None:
        """A step was made."""
        if self._in_a_row:
            self._in_a_row = 0
            self.take({"skipped_steps": 0.0}, step)

    def left_out(self, step: int, error: NotFiniteError) -> str:
        """A step was left out, since it was not finite; returns what `take` does. Several in a row are an error."""
        self._in_a_row += 1
        if self._in_a_row < MAX_SKIPPED:
            return self.take({"skipped_steps": 1.0}, step)
        raise AlarmError(
            f"the last {MAX_SKIPPED} steps were left out; of the last one, step {step}, {error} {self._lower_rate()}"
        )

    def check_finite(self, loss: float, step: int) -> None:
        """Raises where no weights can be kept, for the held-out loss of the best ones is not finite."""
        if not math.isfinite(loss):
            raise AlarmError(
                f"the held-out loss was not a finite number until step {step:,}, so nothing was kept. "
                f"{self._lower_rate()}"
            )

    def ended(self, text: str, kept: str) -> AlarmError:
        """The error with which a training ends that `stop_on` ends. `kept`: what became of it, in a sentence."""
        return AlarmError(f"{text} It was ended because stop_on names this alarm. {kept}")

    def _with_mean(self, record: Record) -> Record:
        """With the mean of the last held-out losses, which tell more than one where few are held out."""
        held = record.get("validation_loss")
        if held is None or not math.isfinite(held):
            return record
        self._held.append(held)
        return {**record, "validation_loss_mean": sum(self._held) / LOOKS} if len(self._held) == LOOKS else record

    def _lower_rate(self) -> str:
        return (
            f"Begin anew with a lower rate than {self._rate:g}: learning_rate={self._rate / 10:g}. If that does not "
            "help, a number that is not finite is in the data."
        )


__all__ = ["MAX_SKIPPED", "TrainingAlarms", "silent"]
