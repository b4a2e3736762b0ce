from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, FormatError, SchemaError, UnknownNameError
from hilt.policies.vla.normalize import (
    Normalizer,
    gripper_inverted,
    gripper_signs,
    read_statistics,
    resolve_key,
    statistics,
)

STATS = {
    "q01": [-2.0, 0.0],
    "q99": [2.0, 10.0],
    "min": [-4.0, 0.0],
    "max": [4.0, 20.0],
    "mean": [1.0, 2.0],
    "std": [0.5, 4.0],
}


@pytest.mark.parametrize(
    ("kind", "x", "normal"),
    [("q99", [1.0, 5.0], [0.5, 0.0]), ("minmax", [1.0, 5.0], [0.25, -0.5]), ("mean_std", [2.0, 0.0], [2.0, -0.5])],
)
def test_each_kind(kind: str, x: list[float], normal: list[float]):
    made = Normalizer(STATS, kind, epsilon=0)
    assert made.normalize(np.array(x)).tolist() == normal
    assert made.unnormalize(np.array(normal)).tolist() == x


def test_epsilon_mask_and_clip():
    assert Normalizer(STATS, epsilon=1.0).unnormalize(np.array([1.0, 1.0])).tolist() == [3.0, 11.0]
    assert Normalizer(STATS, epsilon=1.0).normalize(np.array([3.0, 11.0])).tolist() == [1.0, 1.0]
    masked = Normalizer({**STATS, "mask": [True, False]}, epsilon=0)
    assert masked.normalize(np.array([1.0, 7.0])).tolist() == [0.5, 7.0] and masked.unnormalize(
        np.array([0.5, 7.0])
    ).tolist() == [1.0, 7.0]
    assert Normalizer(STATS, clip=True).normalize(np.array([9.0, -9.0])).tolist() == [1.0, -1.0]
    assert Normalizer(STATS, epsilon=0).normalize(np.array([9.0, -9.0])).tolist() == [4.5, -2.8]


def test_a_number_that_never_moved():
    still = Normalizer({"q01": [3.0], "q99": [3.0]}, epsilon=0)
    for x in (np.array([3.0]), torch.tensor([3.0])):
        assert still.normalize(x).item() == -1.0 and still.unnormalize(still.normalize(x)).item() == 3.0


@given(st.sampled_from(["q99", "minmax", "mean_std"]), st.lists(st.floats(-100, 100), min_size=2, max_size=2))
def test_normalizer_round_trip_of_arrays_and_tensors(kind: str, numbers: list[float]):
    made, x = Normalizer(STATS, kind), np.array(numbers)
    assert np.allclose(made.unnormalize(made.normalize(x)), x, atol=1e-9)
    assert np.array_equal(made.normalize(torch.from_numpy(x)).numpy(), made.normalize(x))
    assert made.normalize(torch.from_numpy(x).float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Normalizer(STATS, "q9"), UnknownNameError, "no kind of normalization named 'q9'"),
        (
            lambda: Normalizer({"q01": [0.0]}),
            SchemaError,
            "normalization 'q99' needs q01 and q99; these statistics lack q99 and have ['q01']",
        ),
        (lambda: Normalizer({**STATS, "mask": [True]}), SchemaError, "have the shapes (2,), (2,) and (1,)"),
        (lambda: Normalizer(STATS).normalize(np.zeros(3)), SchemaError, "width 3 were given to a normalization of 2"),
        (lambda: Normalizer(STATS, "mean_std", clip=True), ConfigError, "has no bounds to clip to"),
        (lambda: statistics(np.zeros((0, 2))), SchemaError, "finite rows [N, D], N > 0; (0, 2) was given."),
        (lambda: statistics(np.array([[np.nan]])), SchemaError, "(1, 1) was given, with NaN or infinity."),
    ],
)
def test_refusals(call: Any, error: type[Exception], says: str):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)


def test_statistics_of_our_own():
    rows = np.arange(101.0)[:, None] * [1, 2]
    made = statistics(rows, mask=[True, False])
    assert made["q01"] == [1, 2] and made["q99"] == [99, 198] and made["min"] == [0, 0] and made["max"] == [100, 200]
    assert made["mean"] == [50, 100] and made["mask"] == [True, False] and json.dumps(made)
    assert Normalizer(made, epsilon=0).normalize(rows)[50].tolist() == [0.0, 100.0]


def test_statistics_key_is_resolved():
    stats = {"libero_goal_no_noops": 1, "bridge": 2}
    assert resolve_key(stats, "bridge") == "bridge" and resolve_key(stats, "libero_goal") == "libero_goal_no_noops"
    assert (
        resolve_key({"lift_pot": 1, "b": 1}, "robotwin2_lift_pot") == "lift_pot" and resolve_key({"only": 1}) == "only"
    )
    with pytest.raises(
        ConfigError, match="statistics of 2 datasets; name one as unnorm_key: bridge, libero_goal_no_noops"
    ):
        resolve_key(stats)
    with pytest.raises(
        UnknownNameError, match=r"unnorm_key.* named 'libero_gaol'.*Known: bridge, libero_goal_no_noops"
    ):
        resolve_key(stats, "libero_gaol")


def test_a_file_of_statistics(tmp_path: Path):
    file = tmp_path / "dataset_statistics.json"
    file.write_text(json.dumps({"x": {"action": STATS}}))
    assert read_statistics(file) == {"x": {"action": STATS}}
    for text, says in (("{", "no statistics can be read"), ('{"x": {}}', "each with an 'action'")):
        file.write_text(text)
        with pytest.raises(FormatError, match=says):
            read_statistics(file)


def test_grippers():
    given_actions = np.array([[3.0, 1.0], [3.0, 0.2], [3.0, 0.5]])
    assert gripper_signs(given_actions)[:, 1].tolist() == [1, -1, 0]
    assert gripper_inverted(gripper_signs(given_actions)).tolist() == [[3, -1], [3, 1], [3, 0]]
    assert given_actions[1, 1] == 0.2
