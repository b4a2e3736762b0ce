"""Watches over a run of supervised fine-tuning: its alarms, steps that are left out, and looks at its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hilt.core.errors import AlarmError
from hilt.core.tree import Array
from hilt.observe.alarm_watch import AlarmWatch
from hilt.observe.metrics import Metrics
from hilt.observe.training_alarms import MAX_SKIPPED
from hilt.policies.base import Observation, Policy
from hilt.policies.plasticity import ChunkLooks
from hilt.runs import checkpoint
from hilt.runs.folder import note_end
from hilt.vla.imitation.sft_settings import Sft

LOOK_RECORDS = 10
"""Records of metrics between two looks at whether the policy can still learn"""
LOOK_ROWS, LEAST_ROWS = 64, 32
"""Samples that are looked at, and without how many the rank of their features tells nothing about the policy"""


class SftGuard:
    """Takes the records of a run as they are written. A resumed run makes it after its metrics were reset."""

    def __init__(self, config: Sft, run: Path, metrics: Metrics, notify: Callable[[str], None]):
        self._config, self._run, self._notify = config, run, notify
        self._watch = AlarmWatch(run, config.facts, metrics, notify, config.stop_on)
        self._looks = ChunkLooks(config.seed, LEAST_ROWS)
        self._skipped = self._in_a_row = 0
        self.alarm = ""
        """The text of one that `stop_on` names, which ends the run"""

    @property
    def is_sound(self) -> bool:
        """Whether the last step was finite; no checkpoint is made while it was not."""
        return not self._in_a_row

    @property
    def alarm_since(self) -> int | None:
        """The step at which the first alarm was raised of those that stand."""
        return self._watch.spans.earliest

    def take(self, values: Mapping[str, float], step: int, samples: int) -> None:
        """Raises and ends alarms by a record of the metrics."""
        self.alarm = self._watch.take(values, update=step, step=samples) or self.alarm

    def left_out(self, step: int, what: str, value: float) -> None:
        """Counts a step that was left out; several in a row end the run."""
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        if self._in_a_row == 1:
            self._notify(f"step {step:,} is left out: the {what} is {value}")
        if self._in_a_row < MAX_SKIPPED:
            return
        last, rate = max(checkpoint.numbers(self._run), default=0), self._config.learning_rate
        note_end(self._run, "not_finite", step, f"the last {MAX_SKIPPED} steps were not finite")
        raise AlarmError(
            f"the last {MAX_SKIPPED} steps were left out; of the last one, step {step}, the {what} is {value}. Go on "
            f"from step {last} with a lower rate than {rate:g}: hilt train sft --run {self._run} --resume "
            f"learning_rate={rate / 10:g}. If that does not help, a number that is not finite is in the data or in the "
            "policy's checkpoint."
        )

    def nothing_kept(self, step: int) -> AlarmError:
        """The error of a run that ends without a policy: its held-out loss was not finite at any validation."""
        note_end(self._run, "not_finite", step, "the held-out loss was never a finite number")
        rate = self._config.learning_rate
        return AlarmError(
            f"the held-out loss was not a finite number at any validation until step {step:,}, so no policy was kept. "
            f"Begin another run with a lower rate than {rate:g} (learning_rate={rate / 10:g}). If that does not help, "
            "a number that is not finite is in the held-out episodes."
        )

    def learned(self) -> None:
        """A step was made."""
        self._in_a_row = 0

    def figures(self) -> dict[str, float]:
        """``skipped_steps``: those that were left out since the last call."""
        skipped, self._skipped = self._skipped, 0
        return {"skipped_steps": float(skipped)}

    def is_due(self, step: int) -> bool:
        """Whether the policy is to be looked at after this step."""
        return step % (LOOK_RECORDS * self._config.log_period) == 0

    def look(
        self, policy: Policy, observations: Sequence[Observation], actions: Array, mask: Array
    ) -> dict[str, float]:
        """Looks at a policy while it imitates these samples, which are the same at every look."""
        at_once = self._config.samples_at_once or self._config.batch_size
        found = self._looks.look(policy, observations, actions, mask, at_once)
        self._watch.cannot_raise(self._looks.lacking)
        return found


def rows_to_look_at(held: Array, learned: Array) -> Array:
    """The same samples at every look, however many are learned from at once: at even distances of those that are held
    out, or of those to learn from where too few are."""
    some: Array = held if len(held) >= LEAST_ROWS else learned
    return some.take(np.linspace(0, len(some) - 1, min(len(some), LOOK_ROWS)).astype(int), axis=0)


__all__ = ["LOOK_RECORDS", "MAX_SKIPPED", "SftGuard", "rows_to_look_at"]
