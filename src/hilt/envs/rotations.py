"""Rotations as HIL-SERL and scipy write them: quaternions are ``[x y z w]``, Euler angles extrinsic ``xyz`` in radians.

A pose is seven numbers, ``[x y z  qx qy qz qw]``. MuJoCo keeps the scalar first: ``scalar_first`` and ``scalar_last``
                                   turn one order
into the other, and nothing else in Hilt knows of it.

A simulator asks for these some ten times in each of its steps, so the arithmetic is on Python's own numbers: numpy's
single ones, which give the same to the last bit, are many times as slow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = np.ndarray[Any, Any]

DOWN = np.array([1.0, 0.0, 0.0, 0.0])
"""The rotation of a gripper that points at the table and whose fingers open along y: Euler angles (pi, 0, 0)."""


def scalar_first(quaternion: npt.ArrayLike) -> Array:
    """MuJoCo's order from ours."""
    x, y, z, w = _plain(quaternion)
    return np.array([w, x, y, z])


def scalar_last(quaternion: npt.ArrayLike) -> Array:
    """Our order from MuJoCo's."""
    w, x, y, z = _plain(quaternion)
    return np.array([x, y, z, w])


def normalized(quaternion: npt.ArrayLike) -> Array:
    quaternion = np.asarray(quaternion, np.float64)
    result: Array = quaternion / _length(quaternion)
    return result


def multiply(a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
    """The rotation that does b first, then a."""
    (ax, ay, az, aw), (bx, by, bz, bw) = _plain(a), _plain(b)
    return np.array(
        [
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
            aw * bw - ax * bx - ay * by - az * bz,
        ]
    )


def inverse(quaternion: npt.ArrayLike) -> Array:
    """The opposite rotation, of a quaternion of length one."""
    x, y, z, w = _plain(quaternion)
    return np.array([-x, -y, -z, w])


def to_matrix(quaternion: npt.ArrayLike) -> Array:
    """``[3, 3]``; its columns are the rotated axes."""
    x, y, z, w = _plain(normalized(quaternion))
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def from_matrix(matrix: npt.ArrayLike) -> Array:
    m = _plain(matrix)
    # of the four ways to write it, the one that divides by the largest number
    trace = m[0][0] + m[1][1] + m[2][2]
    choices = [m[0][0], m[1][1], m[2][2], trace]
    k = choices.index(max(choices))
    if k == 3:
        return normalized([m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1 + trace])
    i, j, quaternion = (k + 1) % 3, (k + 2) % 3, [0.0] * 4
    quaternion[k] = 1 - trace + 2 * m[k][k]
    quaternion[i] = m[i][k] + m[k][i]
    quaternion[j] = m[j][k] + m[k][j]
    quaternion[3] = m[j][i] - m[i][j]
    return normalized(quaternion)


def from_euler(angles: npt.ArrayLike) -> Array:
    """About the fixed x, then y, then z axis."""
    half = np.asarray(angles, np.float64) / 2
    (cx, cy, cz), (sx, sy, sz) = np.cos(half).tolist(), np.sin(half).tolist()
    return np.array(
        [
            sx * cy * cz - cx * sy * sz,
            cx * sy * cz + sx * cy * sz,
            cx * cy * sz - sx * sy * cz,
            cx * cy * cz + sx * sy * sz,
        ]
    )


def to_euler(quaternion: npt.ArrayLike) -> Array:
    """The inverse of ``from_euler``; at a pitch of 90 degrees, where roll and yaw are one, the yaw is 0."""
    m = to_matrix(quaternion)
    sine = np.clip(-m[2, 0], -1.0, 1.0)
    pitch = np.arcsin(sine)
    if abs(m[2, 0]) > 1 - 1e-12:
        return np.array([np.arctan2(-m[1, 2], m[1, 1]), pitch, 0.0])
    return np.array([np.arctan2(m[2, 1], m[2, 2]), pitch, np.arctan2(m[1, 0], m[0, 0])])


def from_rotation_vector(vector: npt.ArrayLike) -> Array:
    """A turn about the vector's direction, by its length in radians."""
    vector = np.asarray(vector, np.float64)
    angle = _length(vector)
    half = math.pi * (angle / (2 * math.pi)) or 1e-20
    x, y, z = _plain(0.5 * (np.sin(half) / half) * vector)  # sin(angle / 2) / angle, defined at 0 too
    return np.array([x, y, z, np.cos(angle / 2)])


def to_rotation_vector(quaternion: npt.ArrayLike) -> Array:
    """The shortest turn that does the same."""
    quaternion = normalized(quaternion)
    if quaternion[3] < 0:
        quaternion = -quaternion
    sine = _length(quaternion[:3])
    angle = 2 * np.arctan2(sine, quaternion[3])
    result: Array = quaternion[:3] * (angle / sine if sine > 1e-12 else 2.0)
    return result


def _plain(values: Any) -> Any:
    """The numbers, in lists."""
    return np.asarray(values, np.float64).tolist()


def _length(vector: Array) -> float:
    return math.sqrt(vector.dot(vector))
