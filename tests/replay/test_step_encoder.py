"""The encoder of steps: the same rows and frames however they come, and which frames are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.tree import Spec
from hilt.replay import Log, step_encoder
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.step_encoder import (
    BlockSteps,
    EncodedSteps,
    PackedBlock,
    PackedSteps,
    StepEncoder,
    TrajectorySteps,
    same_rows,
)
from tests.replay.toy_steps import SCHEMA, numbers, step, trajectory


def encoded(log: Log, how: str, given: list[dict[str, Any]]) -> list[EncodedSteps]:
    schema, encoder = log.schema, StepEncoder(log.schema, trajectory=3, origin=2)
    segment = log.active_segments.acquire().segment
    if how == "one by one":
        out: list[EncodedSteps] = []
        for sequence, one in enumerate(given, 7):
            leaves = schema.check(one)
            out.append(encoder.step(leaves, bool(out), sequence, segment))
            encoder.advance(out[-1])
            segment.append(out[-1].rows, 1, out[-1].frames)
        return out
    if how == "packed":
        packed = PackedSteps(Spec.of(given[0]), BufferPool())
        for one in given:
            leaves = packed.spec.match(one)
            assert leaves is not None
            packed.append(leaves)
        block = BlockSteps.checked(schema, PackedBlock(packed.slice(0, len(given))))
        assert block is not None and block.runs() == [(0, len(given))]
        return [encoder.many(block, 0, len(given), False, np.arange(7, 7 + len(given)), segment)]
    whole = schema.check_batch(trajectory([given]))[1]
    sequences = np.arange(7, 7 + len(given))
    return [encoder.many(TrajectorySteps(schema, whole, (len(given), 1)), 0, len(given), False, sequences, segment)]


@pytest.mark.parametrize("how", ["packed", "trajectory"])
def test_encoder_makes_the_same_rows_and_frames_however_steps_come(tmp_path: Path, how: str):
    given = [*numbers(5, 6, source=np.uint8(1)), step(11, 11), step(11, 20, terminated=True)]
    given = [
        {**one, "source": np.uint8(one["source"]), "policy_version": np.int64(one["policy_version"])} for one in given
    ]
    with (
        Log.create(tmp_path / "a", SCHEMA, durability="never") as one,
        Log.create(tmp_path / "b", SCHEMA, durability="never") as other,
    ):
        wanted, (found,) = encoded(one, "one by one", given), encoded(other, how, given)
    rows = np.frombuffer(b"".join(bytes(part.rows) for part in wanted), SCHEMA.layout.row)
    names = [name for name in rows.dtype.names or () if name not in ("#count", "#crc")]  # of a commit
    for name in names:
        assert np.frombuffer(found.rows, rows.dtype)[name].tolist() == rows[name].tolist(), name
    image = "observations/image"
    assert [bytes(frame) for frame in found.frames[image]] == [
        bytes(frame) for part in wanted for frame in part.frames[image]
    ]
    assert len(found.frames[image]) == len(given) + 1, "each frame once"
    assert (found.key, found.steps, found.sequence, found.ended) == (
        wanted[0].key,
        len(given),
        wanted[-1].sequence,
        True,
    )
    assert (found.sources, found.origin, found.width) == (0b11, 2, 1)
    if how == "packed":
        assert found.tail == wanted[-1].tail


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
    monkeypatch.setattr(step_encoder.np, "concatenate", None)  # what a comparison ends with
    assert same_rows(now[1:], after[:-1]).tolist() == [True] * 7
    with pytest.raises(TypeError):
        same_rows(now, after)
