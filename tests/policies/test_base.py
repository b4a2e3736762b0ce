"""Records are joined and parted by rows."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import SchemaError
from hilt.policies.base import join, select


def record(rows: int, width: int) -> dict[str, np.ndarray]:
    return {"prompt": np.ones((rows, width), np.int32), "prompt_length": np.full(rows, width, np.int32)}


def test_records_with_prompts_of_different_length_are_joined() -> None:
    joined = join([record(2, 3), record(1, 5)])
    assert joined["prompt"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]
    assert joined["prompt_length"].tolist() == [3, 3, 5]
    assert select(joined, [2])["prompt_length"].tolist() == [5]


def test_records_of_two_policies_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"record 1 has the fields \['tokens'\] and record 0 has \['prompt', 'prompt_length'\]"):
        join([record(1, 2), {"tokens": np.zeros((1, 7))}])
    with pytest.raises(SchemaError, match="given no record"):
        join([])
