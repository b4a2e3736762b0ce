"""The one schedule of learning rates."""

from __future__ import annotations

import pytest

from hilt.algos.schedule import learning_rate_factor


def test_schedule_rises_linearly_then_stays_or_falls_along_a_half_cosine():
    assert [learning_rate_factor(p, 0.5, "constant") for p in (0.1, 0.25, 0.5, 1.0)] == [0.2, 0.5, 1.0, 1.0]
    assert [learning_rate_factor(p, 0.2, final=0.1) for p in (0.1, 0.2, 0.4, 0.6, 1.0)] == pytest.approx(
        [0.5, 1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1]
    )
    assert [learning_rate_factor(p) for p in (0.0, 0.5, 1.0, 1.5)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert learning_rate_factor(1.0, 1.0) == 1.0 and learning_rate_factor(0.5, 1.0) == 0.5, "nothing but a warm-up"
    assert learning_rate_factor(1.0, 2.0) == 0.5, "a warm-up longer than the run"
