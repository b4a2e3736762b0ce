"""Rotations as HIL-SERL and scipy write them: quaternions are ``[x y z w]``, Euler angles extrinsic ``xyz`` in radians.

A pose is seven numbers, ``[x y z  qx qy qz qw]``. MuJoCo keeps the scalar first: ``scalar_first`` and ``scalar_last`` turn one order
into the other, and nothing else in Hilt knows of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def scalar_first(quaternion: Any) -> Array:
    """MuJoCo's order from ours."""
    return np.roll(np.asarray(quaternion, np.float64), 1)


def scalar_last(quaternion: Any) -> Array:
    """Our order from MuJoCo's."""
    return np.roll(np.asarray(quaternion, np.float64), -1)


def normalized(quaternion: Any) -> Array:
    quaternion = np.asarray(quaternion, np.float64)
    return quaternion / np.linalg.norm(quaternion)


def multiply(a: Any, b: Any) -> Array:
    """The rotation that does b first, then a."""
    ax, ay, az, aw = np.asarray(a, np.float64)
    bx, by, bz, bw = np.asarray(b, np.float64)
    return np.array(
        [
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
            aw * bw - ax * bx - ay * by - az * bz,
        ]
    )


def inverse(quaternion: Any) -> Array:
    """The opposite rotation, of a quaternion of length one."""
    return np.asarray(quaternion, np.float64) * (-1.0, -1.0, -1.0, 1.0)


def to_matrix(quaternion: Any) -> Array:
    """``[3, 3]``; its columns are the rotated axes."""
    x, y, z, w = normalized(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def from_matrix(matrix: Any) -> Array:
    m = np.asarray(matrix, np.float64)
    # of the four ways to write it, the one that divides by the largest number
    choices = np.array([m[0, 0], m[1, 1], m[2, 2], np.trace(m)])
    k = int(np.argmax(choices))
    if k == 3:
        quaternion = np.array([m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], 1 + choices[3]])
    else:
        i, j, quaternion = (k + 1) % 3, (k + 2) % 3, np.empty(4)
        quaternion[k] = 1 - choices[3] + 2 * m[k, k]
        quaternion[i] = m[i, k] + m[k, i]
        quaternion[j] = m[j, k] + m[k, j]
        quaternion[3] = m[j, i] - m[i, j]
    return normalized(quaternion)


def from_euler(angles: Any) -> Array:
    """About the fixed x, then y, then z axis."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(np.asarray(angles, np.float64) / 2), np.sin(np.asarray(angles, np.float64) / 2)
    return np.array(
        [
            sx * cy * cz - cx * sy * sz,
            cx * sy * cz + sx * cy * sz,
            cx * cy * sz - sx * sy * cz,
            cx * cy * cz + sx * sy * sz,
        ]
    )


def to_euler(quaternion: Any) -> Array:
    """The inverse of ``from_euler``; at a pitch of 90 degrees, where roll and yaw are one, the yaw is 0."""
    m = to_matrix(quaternion)
    pitch = np.arcsin(np.clip(-m[2, 0], -1.0, 1.0))
    if abs(m[2, 0]) > 1 - 1e-12:
        return np.array([np.arctan2(-m[1, 2], m[1, 1]), pitch, 0.0])
    return np.array([np.arctan2(m[2, 1], m[2, 2]), pitch, np.arctan2(m[1, 0], m[0, 0])])


def from_rotation_vector(vector: Any) -> Array:
    """A turn about the vector's direction, by its length in radians."""
    vector = np.asarray(vector, np.float64)
    angle = float(np.linalg.norm(vector))
    scale = 0.5 * np.sinc(angle / (2 * np.pi))  # sin(angle / 2) / angle, defined at 0 too
    return np.array([*(scale * vector), np.cos(angle / 2)])


def to_rotation_vector(quaternion: Any) -> Array:
    """The shortest turn that does the same."""
    quaternion = normalized(quaternion)
    if quaternion[3] < 0:
        quaternion = -quaternion
    sine = float(np.linalg.norm(quaternion[:3]))
    angle = 2 * np.arctan2(sine, quaternion[3])
    return quaternion[:3] * (angle / sine if sine > 1e-12 else 2.0)
