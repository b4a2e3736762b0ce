"""``hilt data label``, ``tag``, ``trim``, ``delete``, ``undo`` and ``history``: what they change, say and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.formats import open_dataset
from hilt.replay import Log
from hilt.replay.edits import frame_labels
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


def test_delete_can_be_undone(log: Path):
    said = run("delete", log, "0,2-3", "--dry-run")
    assert said == "would be: delete: 3 episodes (0, 2, 3)\n" and left(log) == [0, 1, 2, 3]
    said = run("delete", log.parent, "--where", "success=false")
    assert said.startswith("edit 1: delete: 2 episodes (1, 3)\n") and f"hilt data undo {log.parent} 1" in said
    assert left(log) == [0, 2]
    assert "no episode has success=false" in run("delete", log, "--where", "success=false")
    assert run("undo", log).startswith("edit 2: undo 1 (delete): 2 episodes (1, 3)\n") and left(log) == [0, 1, 2, 3]
    assert verify(log).ok


def test_delete_for_good(log: Path):
    said = run("delete", log, "0,2-3", "--for-good", "--dry-run")
    assert "would delete 3 of 4 trajectories, 15 of 20 steps, for good" in said and left(log) == [0, 1, 2, 3]
    said = run("delete", log, "1", "--for-good", code=1)
    assert "delete 1 of 4 trajectories, 5 of 20 steps, for good? There is no terminal to ask: add --yes" in said
    run("delete", log, "3")
    said = run("delete", log.parent, "--where", "deleted=true", "--for-good", "--yes")
    assert said.startswith("deleted 1 of 4 trajectories, 5 of 20 steps; ") and said.endswith("15 steps are left\n")
    run("delete", log, "0,2", "--for-good", "-y")
    assert left(log) == [1] and verify(log).ok
    assert "give either the NUMBERS" in run("delete", log, code=2)
    assert "give either the NUMBERS" in run("delete", log, "1", "--where", "steps>0", code=2)
    assert "--yes is for --for-good" in run("delete", log, "1", "--yes", code=2)


def test_label_steps_and_facts(log: Path):
    said = run("label", log, "0-1", "rewards=0", "--fact", "success=true", "--fact", "reviewed_by=ann", "--dry-run")
    assert "would be: rewards from step 0 on: 2 episodes (0, 1)" in said and rewards(log, 1) == [10, 11, 12, 13, 14]
    run("label", log, "0-1", "rewards=0", "--fact", "success=true", "--fact", "reviewed_by=ann")
    assert rewards(log, 0) == rewards(log, 1) == [0] * 5 and rewards(log, 2) == [20, 21, 22, 23, 24]
    run("label", log, "2", "rewards=[1, 2.5]", "--first", "3")
    assert rewards(log, 2) == [20, 21, 22, 1, 2.5]
    run("label", log, "3", "rewards=7", "actions=[1,2,3]", "--first", "4")
    assert rewards(log, 3) == [30, 31, 32, 33, 7]
    with Log.open(log, "r") as opened:
        assert opened.facts.about(1) == {"success": True, "reviewed_by": "ann"} and len(opened.successes()) == 15
        np.testing.assert_array_equal(opened.read(opened.trajectory_keys(3)[-1:], ["actions"])["actions"], [[1, 2, 3]])
    assert verify(log).ok


def test_label_frames(log: Path):
    said = run("label", log, "0-1", "--frame", "success", "--step", 3)
    assert "frame label success at step 3: 2 episodes (0, 1)" in said
    run("label", log, "0", "--frame", "unknown", "--step", "-1")
    with Log.open(log, "r") as opened:
        assert frame_labels(opened.facts.about(1)) == {3: True}
        last = len(opened.trajectory_keys(0)) - 1
        assert frame_labels(opened.facts.about(0)) == {3: True, last: None}
    said = run("label", log, "0", "--frame", "maybe", "--step", 1, code=2)
    assert "--frame maybe: expected success, failure, unknown." in said


def test_label_tag_trim_and_history(log: Path):
    with Log.open(log):  # a run that uses the log is in nobody's way
        run("label", log, "0", "--failure", "--reward", "-1", "--author", "ann")
        run("label", log, "0", "--mark", "grasp", "--step", "2", "--instruction", "take it")
        run("tag", log, "rescued", "0,2")
        run("trim", log, "--where", "tag=rescued", "--last", "3")
        run("label", log, "--where", "mark=grasp", "--where", "instruction~TAKE", "--bad")
    assert left(log) == [1, 2, 3] and rewards(log, 2) == [20, 21, 22, 23]
    run("label", log, "--where", "bad=true", "--good")
    run("tag", log, "rescued", "2", "--remove")
    run("trim", log, "2", "--clear")
    with Log.open(log, "r") as opened:
        assert opened.facts.about(0) == {
            "success": False,
            "marks": {"grasp": [2]},
            "language_instruction": "take it",
            "tags": ["rescued"],
        }
        assert opened.facts.about(2) == {"success": True} and len(opened.all()) == 19
    run("undo", log, "1")
    assert rewards(log, 0) == [0, 1, 2, 3]
    assert "10, which hide 0 trajectories and 1 steps in all" in run("inspect", log)
    shown = run("history", log)
    assert "label failure, reward -1" in shown and "undone" in shown and "ann" in shown
    made = json.loads(run("history", log, "2", "--json"))["edits"]
    assert [edit["action"] for edit in made] == [
        "tag rescued",
        "trim the beginning to 3",
        "untag rescued",
        "show all steps",
    ]
    assert run("history", log, "1") == "no edits\n"


def test_cut_and_join(log: Path):
    assert "would be: split at 2: 1 episode (1)" in run("cut", log, "1", "--step", "2", "--dry-run")
    run("cut", log, "1", "--step", "2")
    assert left(log) == [0, 2, 3, 4, 5] and rewards(log, 5) == [12, 13, 14]
    run("join", log, "4-5")
    assert left(log) == [0, 2, 3, 6] and rewards(log, 6) == [10, 11, 12, 13, 14]
    assert "give either the --step" in run("cut", log, "0", code=2)
    run("undo", log)
    run("undo", log)
    assert left(log) == [0, 1, 2, 3]


def test_label_is_respected_by_conversions(log: Path, tmp_path: Path):
    run("label", log, "0", "--bad")
    run("label", log, "1", "--success", "--reward", "1")
    run("trim", log, "2", "--first", "2")
    run("convert", log, tmp_path / "lerobot", "--to", "lerobot", "-o", "fps=10")
    one, two, three = (job() for job in open_dataset(tmp_path / "lerobot").jobs())
    assert one.columns["rewards"].tolist() == [10, 11, 12, 13, 1] and one.facts["success"] is True
    assert two.columns["rewards"].tolist() == [22, 23, 24] and len(three) == 5 and three.facts["success"] is False


def test_where_takes_several_conditions_in_one_text_or_in_several(log: Path):
    assert "2 episodes (1, 3)" in run("tag", log, "x", "--dry-run", "--where", "success!=true return >= 60")
    assert "1 episode (3)" in run("tag", log, "x", "--dry-run", "--where", "success!=true", "--where", "trajectory>2")


def test_where_refuses_what_it_does_not_know(log: Path):
    assert "no property or fact of an episode named 'stepps'" in run("tag", log, "x", "--where", "stepps<3", code=1)
    assert "expected a comparison with a number" in run("tag", log, "x", "--where", "steps<few", code=1)
    assert "expected a name, one of = != ~" in run("tag", log, "x", "--where", "steps", code=1)


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
        (["0", "rewards=1", "--first", "5"], "trajectory 0 has the steps 0 to 4, and step 5 was given", 1),
        (["0"], "give a label: --success or --failure", 2),
        (["0", "rewards", "--bad"], "expected numbers of trajectories and ranges", 2),
        (["zero", "rewards=1"], "expected numbers of trajectories and ranges", 2),
        (["0", "--mark", "grasp"], "--mark, --unmark and --frame need the --step", 2),
        (["0", "--success", "--step", "1"], "--step is for --reward", 2),
        (["0", "--success", "--first", "1"], "--first is for COLUMN=VALUE", 2),
    ],
)
def test_label_refuses(log: Path, words: list[str], said: str, code: int):
    text = " ".join(run("label", log, *words, code=code).split())
    assert said in text, text
    assert rewards(log, 0) == [0, 1, 2, 3, 4], "nothing was changed"
