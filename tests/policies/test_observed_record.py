"""Observations as the first fields of a record, and those that lack something."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import MissingFieldError, SchemaError
from hilt.policies.io.observed_record import observed_record
from hilt.policies.vla.tokens import ByteTokenizer


def test_images_have_one_size_and_words_are_padded():
    rows = [
        {"top": np.full((8, 8, 3), 7, np.uint8), "state": [1.0, 2.0], "instruction": "go on"},
        {"top": np.full((16, 16, 3), 9, np.uint8), "state": [3.0, 4.0], "instruction": "go"},
    ]
    record = observed_record(rows, ["top"], 16, 2)
    assert record["images"].shape == (2, 1, 16, 16, 3) and record["images"].dtype == np.uint8
    assert (record["images"][0] == 7).all() and (record["images"][1] == 9).all()
    assert record["state"].tolist() == [[1, 2], [3, 4]] and record["state"].dtype == np.float32
    assert record["prompt_length"].tolist() == [len(ByteTokenizer().encode(words)) for words in ("go on", "go")]
    assert record["prompt"][0].tolist() == ByteTokenizer().encode("go on")
    assert record["prompt"][1, :3].tolist() == ByteTokenizer().encode("go") and not record["prompt"][1, 3:].any()
    assert "state" not in observed_record(rows, ["top"], 16, 0)


def test_what_is_missing_or_of_another_shape_is_named():
    row = {"top": np.zeros((16, 16, 3), np.uint8), "state": [1.0], "instruction": "go"}
    with pytest.raises(SchemaError, match="no observation was given; give at least one"):
        observed_record([], ["top"], 16, 1)
    with pytest.raises(MissingFieldError, match="observation 1 has no 'wrist', which this policy looks at"):
        observed_record([{**row, "wrist": row["top"]}, row], ["wrist"], 16, 1)
    with pytest.raises(SchemaError, match=r"the state of observation 0 is \[1\]; expected is \[3\]"):
        observed_record([row], ["top"], 16, 3)
    with pytest.raises(SchemaError, match=r"top of observation 0 is float64 \[16, 16, 3\]"):
        observed_record([{**row, "top": np.zeros((16, 16, 3))}], ["top"], 16, 1)
