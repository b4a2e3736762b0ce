"""`Batch` keeps the contracts of verl's DataProto."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.compat.simplevla.batch import Batch
from hilt.core.errors import ConfigError, SchemaError, UnknownNameError


def made(rows: int = 6, **meta: Any) -> Batch:
    names = np.array([f"row {row}" for row in range(rows)], object)
    return Batch.from_single_dict(
        {"x": torch.arange(rows), "pixels": torch.zeros(rows, 2, 3), "name": names}, meta_info=meta
    )


def rows_of(batch: Batch) -> list[int]:
    numbers: list[int] = batch.batch["x"].tolist()
    assert [f"row {row}" for row in numbers] == batch.non_tensor_batch["name"].tolist(), (
        "tensors and objects stay together"
    )
    return numbers


def test_what_a_batch_is_made_of():
    batch = made(temperature=1.6)
    assert len(batch) == 6 and set(batch.batch) == {"x", "pixels"} and set(batch.non_tensor_batch) == {"name"}
    assert batch.meta_info == {"temperature": 1.6}
    pairs = Batch.from_dict({"x": torch.zeros(2)}, {"tree": [{"a": 1}, [1, 2]]}).non_tensor_batch["tree"]
    assert pairs.shape == (2,) and pairs[1] == [1, 2], "an object may be a list"
    for wrong, words in (
        ({"x": [1, 2]}, "x is list; expected is a tensor, or a numpy array"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, "y has 3 rows and x 2"),
        ({"x": torch.zeros(2), "name": np.array(["a"], object)}, "name has 1 rows and x 2"),
        ({"x": torch.tensor(1.0)}, "x is Tensor; expected is a tensor with one row"),
        ({}, "no key"),
    ):
        with pytest.raises(SchemaError, match=words):
            Batch.from_single_dict(wrong)


def test_keys():
    batch = made(temperature=1.6, step=3)
    some = batch.select(["x"], meta_info_keys=["step"])
    assert set(some.batch) == {"x"} and set(some.non_tensor_batch) == {"name"} and some.meta_info == {"step": 3}
    assert some.batch["x"] is batch.batch["x"] and batch.select(["x"], deepcopy=True).batch["x"] is not batch.batch["x"]
    taken = batch.pop(["pixels"], ["name"], ["step"])
    assert set(taken.batch) == {"pixels"} and set(batch.batch) == {"x"}
    assert not batch.non_tensor_batch and batch.meta_info == {"temperature": 1.6}
    assert set(taken.rename("pixels", "frames").batch) == {"frames"}
    with pytest.raises(UnknownNameError, match=r"no key of this batch named 'frame'; did you mean 'frames'\?"):
        taken.select(["frame"])
    with pytest.raises(ConfigError, match="1 keys are to be renamed and 2 names"):
        taken.rename("frames", ["a", "b"])
    with pytest.raises(ConfigError, match="x is in this batch already"):
        made().rename("pixels", "x")


def test_union_holds_equal_values_only():
    batch = made(a=1).union(
        Batch({"x": torch.arange(6), "y": torch.ones(6)}, {"name": made().non_tensor_batch["name"]}, {"b": 2})
    )
    assert set(batch.batch) == {"x", "pixels", "y"} and batch.meta_info == {"a": 1, "b": 2}
    for other, words in (
        (Batch({"x": torch.arange(6) + 1}), "both batches have x, and it differs"),
        (Batch({"x": torch.arange(6).int()}), "both batches have x"),
        (Batch({"y": torch.zeros(6)}, {"name": ["?"] * 6}), "both batches have name"),
        (Batch({"y": torch.zeros(6)}, meta_info={"a": 7}), "both batches have a"),
        (Batch({"y": torch.zeros(5)}), "batches of 6 and of 5 rows"),
    ):
        with pytest.raises(SchemaError, match=words):
            made(a=1).union(other)


def test_rows_by_mask_range_list_and_number():
    batch = made(step=3)
    assert rows_of(batch.slice(range(1, 4))) == [1, 2, 3] and rows_of(batch[2]) == [2] and rows_of(batch[-2:]) == [4, 5]
    assert rows_of(batch.slice(torch.arange(6) % 2 == 0)) == [0, 2, 4] and rows_of(batch.slice(np.array([5, 0]))) == [
        5,
        0,
    ]
    assert len(batch[[]]) == 0 and len(batch.slice(range(0))) == 0 and batch[[1]].meta_info == {"step": 3}
    batch.reorder(torch.tensor([5, 4, 3, 2, 1, 0]))
    assert rows_of(batch) == [5, 4, 3, 2, 1, 0]
    assert batch.to("cpu") is batch


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 13), st.integers(1, 13))
def test_pieces_and_their_sum(rows: int, pieces: int):
    batch = made(rows, step=3)
    if pieces > rows:
        with pytest.raises(ConfigError, match=f"{rows} rows do not make {pieces} pieces"):
            batch.chunk(pieces)
        return
    found = batch.chunk(pieces)
    sizes = [len(piece) for piece in found]
    assert len(found) == pieces and max(sizes) - min(sizes) <= 1
    again = Batch.concat(found)
    assert rows_of(again) == list(range(rows)) and again.meta_info == {"step": 3}


def test_concat_wants_the_same_keys():
    with pytest.raises(SchemaError, match="only some of the batches have y"):
        Batch.concat([Batch({"x": torch.zeros(1)}), Batch({"x": torch.zeros(1), "y": torch.zeros(1)})])
    with pytest.raises(SchemaError, match="no batch"):
        Batch.concat([])


def test_mini_batches():
    batch = made()
    assert [rows_of(each) for each in batch.make_iterator(3, epochs=2)] == [[0, 1, 2], [3, 4, 5]] * 2
    state = torch.random.get_rng_state()
    first, again, other = (
        [row for each in batch.make_iterator(2, epochs=2, seed=seed) for row in rows_of(each)] for seed in (1, 1, 2)
    )
    assert (
        first == again != other and sorted(first[:6]) == sorted(first[6:]) == list(range(6)) and first[:6] != first[6:]
    )
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left alone"
    with pytest.raises(ConfigError, match="6 rows do not divide into mini-batches of 4"):
        batch.make_iterator(4, epochs=1)
