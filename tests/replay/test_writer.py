"""Which frames are the same: by their bytes, or because they are one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.replay import Log, writer
from hilt.replay.writer import same_rows
from tests.replay.toy_steps import SCHEMA, numbers, step, trajectory


def test_rows_with_the_same_bytes():
    a = np.random.default_rng(0).integers(0, 255, (9, 5, 3)).astype(np.uint8)
    b = a.copy()
    b[4, 2, 1] += 1
    assert same_rows(a, a.copy()).tolist() == [True] * 9
    assert same_rows(a, b).tolist() == [True] * 4 + [False] + [True] * 4
    assert same_rows(a[1:], a[:-1]).tolist() == [False] * 8, "other rows of one array"
    assert same_rows(a[::2], a[:5]).tolist() == [True] + [False] * 4, "the same beginning, another stride"
    assert same_rows(a[:0], a[:0]).tolist() == []


def test_one_array_seen_twice_is_not_compared(monkeypatch: pytest.MonkeyPatch):
    frames = np.full((9, 5), np.nan, np.float32)
    now, after = frames[:-1], frames[1:]
    monkeypatch.setattr(writer.np, "concatenate", None)  # what a comparison ends with
    assert same_rows(now[1:], after[:-1]).tolist() == [True] * 7
    with pytest.raises(TypeError):
        same_rows(now, after)


@pytest.mark.parametrize("sequence", ["a", None, 1.5, -2, 1 << 70])
def test_a_sequence_that_is_no_number_of_a_transition_is_refused_before_anything_is_stored(sequence: Any):
    with Log.anonymous(SCHEMA) as log:
        said = "sequence: expected a whole number from -1 on"
        with pytest.raises(ConfigError, match=said), log.episode() as episode:
            episode.append(step(0), sequence)
        with pytest.raises(ConfigError, match=said):
            log.add(trajectory([numbers(0, 2)]), sequence=sequence)
        assert not len(log.all())
