"""Returns of the steps that are drawn, from the log."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hilt.replay.sampling import NStep, Sampler
from hilt.replay.sampling.returns import ReturnsToGo
from tests.replay.toy_steps import new_log, step, write

UNKNOWN = float("-inf")


def test_returns_by_hand(tmp_path: Path):
    """Rewards are the numbers of the steps: 1 + 0.5 * (2 + 0.5 * 3) where the task ended, and unknown where a time
    limit or a gap cut the episode, or while it goes on."""
    with new_log(tmp_path) as log:
        write(log, [step(1), step(2), step(3, terminated=True)])
        write(log, [step(11), step(12, truncated=True)])
        write(log, [step(21), step(30), step(31, terminated=True)])  # 30 does not begin where 21 ended
        running = log.episode()
        for n in (41, 42):
            running.append(step(n))
        assembly = ReturnsToGo(NStep(2, 0.5), log, 0.5)
        sampler = Sampler(log.all(), "fifo", max_times_sampled=1, assembly=assembly)
        expected = [2.75, 3.5, 3.0, UNKNOWN, UNKNOWN, UNKNOWN, 45.5, 31.0, UNKNOWN, UNKNOWN]
        batch = sampler.sample(10)
        assert batch["returns"].tolist() == expected and batch["returns"].dtype == np.float32
        assert batch["n_steps"].tolist() == [2, 2, 1, 2, 1, 1, 2, 1, 2, 1]
        running.append(step(43, terminated=True))  # now it is known
        running.end()
        again = Sampler(log.all(), "fifo", max_times_sampled=1, assembly=assembly).sample(11)
        assert again["returns"].tolist() == [*expected[:8], 41 + 0.5 * (42 + 0.5 * 43), 42 + 0.5 * 43, 43]
        biased = Sampler(
            log.all(), "fifo", max_times_sampled=1, assembly=ReturnsToGo(NStep(1, 0.5), log, 0.5, bias=-1.0)
        ).sample(3)
        assert biased["returns"].tolist() == [0 + 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2]
