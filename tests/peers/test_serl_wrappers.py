"""HIL-SERL's own wrappers and ours, for the same random poses and actions.

Give a checkout of HIL-SERL's public repository (its serl_launcher folder) and a Python that has
gymnasium 0.29.1, gym 0.26.2, scipy and numpy below 2:

    HILT_HILSERL=hil-serl/serl_launcher HILT_HILSERL_PYTHON=venv/bin/python python -m pytest
    -m peers tests/peers/test_serl_wrappers.py -s
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from hilt.envs import rewards, wrappers
from tests.peers import real_serl_wrappers as program

pytestmark = pytest.mark.peers
STEPS = 200


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = {key: rng.normal(size=(STEPS + 1, size)).astype(np.float32) for key, size in program.SIZES.items()}
    values["tcp_pose"][:, 3:] = Rotation.random(STEPS + 1, rng=rng).as_quat()
    values["gripper_pose"] = rng.uniform(size=(STEPS + 1, 1)).astype(np.float32)
    made = {name: rng.uniform(-1, 1, (STEPS + 1, 7)).astype(np.float32) for name in ("actions", "interventions")}
    return {**values, **made, "actions": made["actions"][:STEPS]}


@pytest.fixture(scope="module")
def theirs(data: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout, python = os.environ.get("HILT_HILSERL"), os.environ.get("HILT_HILSERL_PYTHON")
    if not checkout or not python:
        pytest.skip("HILT_HILSERL and HILT_HILSERL_PYTHON do not name a checkout of HIL-SERL and a Python for it")
    folder = tmp_path_factory.mktemp("serl")
    np.savez(folder / "steps.npz", **data)
    command = [python, program.__file__, Path(checkout).parent, folder / "steps.npz", folder / "out.npz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "out.npz") as file:
        return dict(file)


OURS = SimpleNamespace(**{**vars(wrappers), **vars(rewards)})


def test_the_same_numbers_come_out(data: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
    ours = program.run(OURS, data)
    assert {f"{case}|{name}" for case, values in ours.items() for name in values} >= {
        key for key in theirs if "mistakes" not in key
    }
    for case, values in ours.items():
        worst = 0.0
        for name in sorted(values):
            if (key := f"{case}|{name}") in theirs:
                mine, its = one_sign(name, values[name]), one_sign(name, theirs[key])
                assert mine.shape == its.shape, key
                np.testing.assert_allclose(mine, its, rtol=2e-4, atol=2e-5, err_msg=key)
                worst = max(worst, float(np.abs(mine - its).max()))
        print(f"{case}: {len(values)} arrays of {STEPS} steps, largest difference {worst:.1e}")


def one_sign(name: str, values: np.ndarray) -> np.ndarray:
    """A quaternion and its negative are one rotation."""
    values = np.array(values, np.float64)
    if name.endswith("tcp_pose") and values.shape[-1] == 7:
        values[..., 3:] *= np.sign(values[..., 6:])
    return values


def test_serl_wrapper_errors_exist_upstream_and_not_here(data: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
    its = {key.partition("|")[2]: float(value) for key, value in theirs.items() if key.startswith("mistakes|")}
    ours = program.mistakes(OURS, data)
    print("upstream:", its, "\nours:    ", ours)
    assert its == {
        "chunk reward": 8.0,  # the last one, of a step after the end
        "chunk says done": 0.0,  # and the end is not told
        "chunk steps": 4,
        "numbers in the space below": 6,
        "observation is in its space": 0.0,
    }
    assert ours == {
        "chunk reward": 7.0,
        "chunk says done": 1.0,
        "chunk steps": 3,
        "numbers in the space below": 7,
        "observation is in its space": 1.0,
    }
