"""``hilt data delete`` and ``hilt data relabel``: what they change, what they say, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.replay import Log
from hilt.replay.maintenance.repair import verify
from tests.replay.toy_steps import new_log, numbers, step, write


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["data", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Four episodes of five steps, of which the second and the last failed."""
    with new_log(tmp_path) as made:
        for number in range(4):
            write(made, [*numbers(10 * number, 4), step(10 * number + 4, terminated=True)])
            made.annotate(number, success=number % 2 == 0)
    return made.path


def rewards(log: Path, trajectory: int) -> list[float]:
    with Log.open(log, "r") as opened:
        return opened.read(opened.trajectory_keys(trajectory), ["rewards"])["rewards"].tolist()


def left(log: Path) -> list[int]:
    with Log.open(log, "r") as opened:
        return opened.trajectories()


def test_delete_by_number(log: Path):
    assert "would delete 3 of 4 trajectories, 15 of 20 steps" in run("delete", log, "0,2-3", "--dry-run") and left(
        log
    ) == [0, 1, 2, 3]
    said = run("delete", log.parent, "0,2-3", "--yes")
    assert said.startswith("deleted 3 of 4 trajectories, 15 of 20 steps; ") and said.endswith("5 steps are left\n")
    assert left(log) == [1] and verify(log).ok


def test_delete_what_failed(log: Path):
    run("delete", log, "--failures", "-y")
    assert left(log) == [0, 2]
    assert "no trajectory is known to have failed" in run("delete", log, "--failures", "-y")


def test_delete_asks_first(log: Path):
    said = run("delete", log, "1", code=1)
    assert (
        "delete 1 of 4 trajectories, 5 of 20 steps, for good? There is no terminal to ask: add --yes" in said
        and len(left(log)) == 4
    )
    assert "give the NUMBERS of trajectories, or --failures" in run("delete", log, code=2)
    assert "give the NUMBERS of trajectories, or --failures" in run("delete", log, "1", "--failures", code=2)


def test_relabel_steps_and_facts(log: Path):
    said = run("relabel", log, "0-1", "rewards=0", "--fact", "success=true", "--fact", "reviewed_by=ann", "--dry-run")
    assert "would set rewards of 5 steps of trajectory 1" in said and rewards(log, 1) == [10, 11, 12, 13, 14]
    run("relabel", log, "0-1", "rewards=0", "--fact", "success=true", "--fact", "reviewed_by=ann")
    assert rewards(log, 0) == rewards(log, 1) == [0] * 5 and rewards(log, 2) == [20, 21, 22, 23, 24]
    run("relabel", log, "2", "rewards=[1, 2.5]", "--first", "3")
    assert rewards(log, 2) == [20, 21, 22, 1, 2.5]
    run("relabel", log, "3", "rewards=7", "actions=[1,2,3]", "--first", "4")
    assert rewards(log, 3) == [30, 31, 32, 33, 7]
    with Log.open(log, "r") as opened:
        assert opened.facts.about(1) == {"success": True, "reviewed_by": "ann"} and len(opened.successes()) == 15
        np.testing.assert_array_equal(opened.read(opened.trajectory_keys(3)[-1:], ["actions"])["actions"], [[1, 2, 3]])
    assert verify(log).ok


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["9", "rewards=0"], "no trajectory named '9'", 1),
        (
            ["0", "success=false"],
            "success is a fact of a trajectory, and no column of its steps: --fact success=false.",
            1,
        ),
        (["0", "reward=0"], "no column of numbers named 'reward'; did you mean 'rewards'", 1),
        (["0", "rewards=much"], "rewards='much': expected float32 ()", 1),
        (["0", "rewards=[1,2,3]", "--first", "3"], "expected one value or up to 2, of shape ()", 1),
        (["0", "rewards=1", "--first", "5"], "--first 5: trajectory 0 has 5 steps", 1),
        (["0"], "give COLUMN=VALUE, such as rewards=0, or --fact", 2),
        (["0", "rewards"], "expected COLUMN=VALUE", 2),
        (["zero", "rewards=1"], "expected numbers of trajectories and ranges", 2),
    ],
)
def test_relabel_refuses(log: Path, words: list[str], said: str, code: int):
    text = " ".join(run("relabel", log, *words, code=code).split())
    assert said in text, text
    assert rewards(log, 0) == [0, 1, 2, 3, 4], "nothing was changed"
