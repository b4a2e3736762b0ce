"""Outliers, units, rotations and statistics: datasets with each fault, and those that only look like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.checks import check_dataset
from hilt.formats.episodes import Episode
from tests.checks.arm import arm, arms, found, looked_at, smooth, written


def test_outliers_in_length_return_and_actions():
    rng = np.random.default_rng(0)

    def change(number: int) -> dict[str, Any]:
        rewards = rng.normal(5 if number != 4 else 90, 0.1, 60).astype(np.float32)
        return {"rewards": rewards, **({"actions": rng.normal(size=(60, 3)) * 50} if number == 7 else {})}

    report = looked_at([*arms(12, change=change), arm(length=400), arm(length=2)], "outliers")
    wrong = {(finding.place, finding.what.split(" is ")[0]) for finding in report.findings}
    assert {("episode 12", "The length"), ("episode 13", "The length")} <= wrong
    assert {("episode 4", "The return"), ("episode 7", "The size of the actions")} <= wrong
    assert all(place in ("episode 4", "episode 7", "episode 12", "episode 13") for place, _ in wrong)


def test_outliers_are_not_failures_quick_successes_or_another_task():
    def change(number: int) -> dict[str, Any]:
        failed = {"rewards": np.zeros(60, np.float32)} if number == 3 else {}
        return failed | ({"length": 20} if number == 5 else {})

    other = [arm(length=400, seed=n, facts={"language_instruction": "build a tower"}) for n in range(2)]
    assert found(looked_at([*arms(12, change=change), *other], "outliers")) == []


def test_outliers_are_not_the_long_episodes_of_a_policy_that_learns():
    def change(number: int) -> dict[str, Any]:
        return {"length": 100 if number < 8 else 20}  # the first ones, before it has learned

    (finding,) = looked_at(arms(100, change=change), "outliers").findings
    assert finding.severity == "info" and finding.place == "dataset"
    assert "8 of the 100 episodes of the task are far from the median of 20, up to 100" in finding.what


def test_outliers_need_some_episodes_to_compare_with():
    assert found(looked_at([*arms(5), arm(length=400)], "outliers")) == []


@pytest.mark.parametrize(("factor", "unit"), [(180 / np.pi, "degrees"), (1000, "millimeters"), (100, "centimeters")])
def test_units_that_are_mixed(factor: float, unit: str):
    def change(number: int) -> dict[str, Any]:
        path = smooth(np.random.default_rng(number), 61, 3)
        return {"state": path * [factor, factor, 1]} if number in (2, 5) else {}

    (finding,) = looked_at(arms(8, change=change), "units").findings
    assert finding.severity == "warning" and finding.place == "episode 2, observations/state"
    assert f"Dimension 0, 1 mixes {unit}" in finding.what and "episode 2, episode 5" in finding.what


def test_units_are_not_mixed_where_motions_differ_in_size():
    def change(number: int) -> dict[str, Any]:
        path = smooth(np.random.default_rng(number), 61, 3)
        path[:, 0] *= 0 if number == 3 else 5.0 ** (number % 3)  # a joint that rests, moves little, or much
        return {"state": path}

    assert found(looked_at(arms(8, change=change), "units")) == []


def test_units_of_forces_that_are_small_or_large_are_not_mixed():
    sizes = [0.01, 0.02, 0.05, 0.1, 0.02, 2.0, 5.0, 1.5, 9.0, 3.0]
    rng = np.random.default_rng(0)
    assert found(looked_at([arm(state=size * rng.normal(size=(61, 3))) for size in sizes], "units")) == []
    contact = [arm(state=rng.normal(size=(61, 3)) * [1, 1, size]) for size in (1, 1.5, 57, 60)]
    assert found(looked_at(contact, "units")) == [], "one dimension of several"


def turning(number: int, axis: int = 2, order: str = "xyzw", quick: float = 1.0) -> np.ndarray:
    """A quaternion that turns about an axis, and a position beside it."""
    rng = np.random.default_rng(number)
    half = quick * np.linspace(0.3, 0.8, 61) + rng.uniform(-0.02, 0.02)
    quaternion = np.zeros((61, 4))
    quaternion[:, axis], quaternion[:, 3] = np.sin(half), np.cos(half)
    quaternion = quaternion[:, [3, 0, 1, 2]] if order == "wxyz" else quaternion
    return np.c_[smooth(rng, 61, 3), quaternion]


def states(*paths: np.ndarray) -> list[Episode]:
    return [arm(seed=n, state=path) for n, path in enumerate(paths)]


def test_rotations_that_change_sign():
    path = turning(1)
    path[30:, 3:] *= -1
    report = looked_at(states(turning(0), path), "rotations")
    assert found(report) == [("warning", "rotations", "episode 1, steps 29-30, observations/state")]


def test_rotations_in_another_order_and_not_of_length_1():
    paths = [turning(n, order="wxyz" if n == 4 else "xyzw") for n in range(6)]
    euler = turning(6)
    euler[:, 3:] = smooth(np.random.default_rng(6), 61, 4)
    report = looked_at(states(*paths, euler), "rotations")
    assert sorted(found(report)) == [
        ("warning", "rotations", "episode 4, observations/state"),
        ("warning", "rotations", "episode 6, observations/state"),
    ]


def test_rotations_that_go_round_or_stand_elsewhere_are_well():
    paths = [turning(n, quick=4) for n in range(3)]  # through w = 0, without a jump
    elsewhere = [turning(n, axis=n % 2) for n in range(3)]
    tasks = np.c_[smooth(np.random.default_rng(0), 61, 1), np.tile(np.eye(5)[4], (61, 1))]  # the number of a task
    others = np.c_[smooth(np.random.default_rng(1), 61, 1), np.tile(np.eye(5)[0], (61, 1))]
    assert found(looked_at(states(*paths, *elsewhere), "rotations")) == []
    assert found(looked_at(states(tasks, tasks, others), "rotations")) == []


def test_rotations_are_not_zeros_beside_a_gripper():
    gripper = np.where(np.arange(60) > 30, 1.0, -1.0)
    actions = np.c_[smooth(np.random.default_rng(0), 60, 3), np.zeros((60, 3)), gripper]
    assert found(looked_at([arm(actions=actions)], "rotations")) == []


def test_rotations_that_wrap():
    path = smooth(np.random.default_rng(0), 61, 3)
    wrapping = path.copy()
    wrapping[:, 1] = (np.arange(61) * 0.1 + 1) % (2 * np.pi) - np.pi
    far = path.copy()
    far[:, 1] = np.linspace(-3.1, 3.1, 61)
    report = looked_at(states(wrapping, far), "rotations")
    assert [(finding.severity, finding.label) for finding in report.findings] == [("warning", "episode 0")]


def test_rotations_that_wrap_are_not_forces_that_jump_as_far():
    rng = np.random.default_rng(0)
    force = rng.normal(size=(61, 3)) * 0.2
    force[30:, 1] += 6.28
    strong = rng.normal(size=(61, 3)) + 9  # more than an angle can be, in another episode
    assert found(looked_at(states(force, strong), "rotations")) == []
    inside = np.clip(force - [0, 3.14, 0], -3.14, 3.14)
    assert len(looked_at(states(inside), "rotations").findings) == 1, "within one turn it cannot be told"


def test_statistics_that_do_not_fit(tmp_path: Path):
    folder = written(tmp_path / "data", arms(3), "lerobot", images="png")
    file = folder / "meta/stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["std"][1] *= 2
    stats["observation.state"]["max"] = [value / 2 for value in stats["observation.state"]["max"]]
    file.write_text(json.dumps(stats))
    report = check_dataset(folder, only=["statistics"])
    assert sorted(found(report)) == [
        ("error", "statistics", "actions"),
        ("error", "statistics", "observations/state"),
    ]
    assert any("std of dimension 1" in finding.what for finding in report.findings)


def test_statistics_that_are_rounded_or_of_a_sample_fit(tmp_path: Path):
    folder = written(tmp_path / "data", arms(3), "lerobot", images="png")
    file = folder / "meta/stats.json"
    stats = json.loads(file.read_text())
    for name in ("action", "observation.state"):
        stats[name] = {stat: np.float32(np.array(values) * 1.002).tolist() for stat, values in stats[name].items()}
    file.write_text(json.dumps(stats))
    assert found(check_dataset(folder, only=["statistics"])) == []


@pytest.mark.parametrize("name", ["v3_image", "v21_image"])
def test_statistics_that_lerobot_wrote_fit(name: str):
    golden = Path(__file__).parent.parent / "golden/lerobot" / name
    from hilt.formats import open_dataset

    assert {"actions", "observations/state"} <= set(open_dataset(golden).stored_statistics())
    assert found(check_dataset(golden, only=["statistics"])) == []


def test_statistics_that_are_damaged_are_a_finding(tmp_path: Path):
    folder = written(tmp_path / "data", arms(1), "lerobot", images="png")
    (folder / "meta/stats.json").write_text('{"action": 3}')
    assert found(check_dataset(folder, only=["statistics"])) == [("error", "files", "dataset")]
