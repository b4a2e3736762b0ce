"""The steps that a log has of one sender. They are read from the rows themselves; there
is no second file that could contradict them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log


class DeliveredSequence:
    """The sequence numbers of one sender that are here. Senders send in rising
    order, so one number says nearly everything."""

    def __init__(self, high: int, above: Iterable[int] = ()):
        self.high = high
        """Everything up to here came, or will never come."""
        self._above = {number for number in above if number > high}  # after a power cut: what survived beyond a gap
        self._close_up()

    @property
    def has_gaps(self) -> bool:
        return bool(self._above)

    def __contains__(self, number: int) -> bool:
        return number <= self.high or number in self._above

    def note(self, number: int) -> None:
        """This one came, and nothing below it will come any more."""
        if number > self.high:
            self.high = number
            self._close_up()

    def _close_up(self) -> None:
        while self.high + 1 in self._above:
            self.high += 1
        if self._above:
            self._above = {number for number in self._above if number > self.high}


def received_by(log: Log, actor: str, boot: str, store: str, first: int) -> DeliveredSequence:
    """What a log has of a sender whose numbers below `first` were acknowledged before."""
    with log.lock:
        origin = log.facts.known_origin(actor, boot, store)
        if origin is None:
            return DeliveredSequence(first - 1)
        high = max(first - 1, log.facts.seen.get(origin, -1))
        entries = log.index.entries
        is_mine = entries["origin"] == origin
        is_mine &= entries["sequence"] > high
        mine = entries[is_mine]
        if not len(mine):
            return DeliveredSequence(high)
        keys = np.concatenate([int(e["key"]) + np.arange(e["steps"], dtype=np.int64) for e in mine])
        with log.reading() as steps:
            numbers = steps.fields(keys, ["#sequence"])[0]
        # of a trajectory whose first steps were evicted, what is below the first that is left came and went
        evicted = np.isin(keys >> OFFSET_BITS, [t for t, before in log.facts.deleted.items() if before])
        if evicted.any():
            high = max(high, int(numbers[evicted].min()) - 1)
        return DeliveredSequence(high, numbers.tolist())
