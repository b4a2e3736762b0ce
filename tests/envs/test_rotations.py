"""Our rotations against scipy's, for the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from hilt.envs import rotations

RANDOM = [Rotation.random(rng=seed).as_quat() for seed in range(50)]
TURNS = [[0, 0, 0], [180, 0, 0], [0, 90, 0], [30, -90, 10], [0, 0, 180]]
SPECIAL = [Rotation.from_euler("xyz", turns, degrees=True).as_quat() for turns in TURNS]


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(rotations.to_matrix(a), rotations.to_matrix(b), atol=1e-9)


@pytest.mark.parametrize("quaternion", [*RANDOM, *SPECIAL])
def test_every_form_is_scipys(quaternion: np.ndarray):
    scipy = Rotation.from_quat(quaternion)
    np.testing.assert_allclose(rotations.to_matrix(quaternion), scipy.as_matrix(), atol=1e-12)
    same(rotations.from_matrix(scipy.as_matrix()), quaternion)
    same(rotations.from_euler(rotations.to_euler(quaternion)), quaternion)
    same(rotations.from_rotation_vector(rotations.to_rotation_vector(quaternion)), quaternion)
    same(rotations.multiply(quaternion, RANDOM[3]), (scipy * Rotation.from_quat(RANDOM[3])).as_quat())
    same(rotations.multiply(quaternion, rotations.inverse(quaternion)), np.array([0, 0, 0, 1.0]))
    np.testing.assert_array_equal(rotations.scalar_last(rotations.scalar_first(quaternion)), quaternion)


@pytest.mark.parametrize("quaternion", RANDOM)
def test_angles_are_the_same_numbers(quaternion: np.ndarray):
    scipy = Rotation.from_quat(quaternion)
    np.testing.assert_allclose(rotations.to_euler(quaternion), scipy.as_euler("xyz"), atol=1e-9)
    np.testing.assert_allclose(rotations.to_rotation_vector(quaternion), scipy.as_rotvec(), atol=1e-9)
    np.testing.assert_allclose(
        rotations.from_euler([0.1, -0.2, 0.3]), Rotation.from_euler("xyz", [0.1, -0.2, 0.3]).as_quat(), atol=1e-12
    )
