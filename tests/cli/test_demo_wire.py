"""``hilt demo wire``, small; and that it sees a step that is lost, there twice, or altered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli.demos import demo_wire
from hilt.replay import Log, Schema
from tests.lines import all_lines, no_line_twice


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["demo", "wire", *map(str, arguments)], env={"COLUMNS": "200"})


def test_everything_arrives_once(monkeypatch: pytest.MonkeyPatch):
    all_lines(monkeypatch)
    result = run("--steps", 120)
    assert result.exit_code == 0, result.output
    said = no_line_twice(result.stderr)
    assert re.search(r"^inserting steps: \d+ of 240, about \d+ s left$", said, re.MULTILINE)
    assert "comparing every pixel, steps: 9 of " in said
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.startswith("bench-")}
    assert rows.keys() == {"bench-1", "bench-2"}
    for inserted, in_the_log, lost, twice, versions in rows.values():
        assert int(in_the_log) >= int(inserted) >= 120 and (lost, twice) == ("0", "0") and int(versions) >= 1
    assert "On the way: learner killed 2×, actor killed 1×, learner paused 1×." in result.stdout
    assert "All is right: every step arrived exactly once, in order" in result.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lost", "bench-1: 1 steps whose insert returned are not there"),
        ("twice", "bench-1: 1 steps are there twice"),
        ("order", "bench-1: steps are out of order"),
        ("pixel", "1 steps have other pixels than were recorded"),
        ("unfinished", "bench-2 ended with: 3 steps are not acknowledged"),
    ],
)
def test_what_is_wrong_is_seen(tmp_path: Path, change: str, said: str, capsys: pytest.CaptureFixture[str]):
    story = demo_wire.WireStory(tmp_path, 4)
    with Log.create(tmp_path / "log", Schema.of(demo_wire._step(0, 0))) as log:
        for name, number in (("bench-1", 1000), ("bench-2", 2000)):
            story.inserted[name] = [(number, t) for t in range(4)]
            story.finished[name] = "all acknowledged"
            times = list(range(4))
            if name == "bench-1":
                times = {"lost": [0, 1, 2], "twice": [0, 1, 2, 3, 3], "order": [0, 2, 1, 3]}.get(change, times)
            elif change == "unfinished":
                story.finished[name] = "3 steps are not acknowledged"
            with log.episode(actor=name) as running:
                for t in times:
                    running.append(_altered(number, t, change == "pixel" and (name, t) == ("bench-2", 2)))
    story.check()
    assert story.wrong[0] == said
    assert not story.show()
    assert f"WRONG: {said}" in capsys.readouterr().out


def _altered(number: int, t: int, alter: bool) -> dict[str, Any]:
    step = demo_wire._step(number, t)
    if alter:
        step["observations"]["front"] = step["observations"]["front"].copy()
        step["observations"]["front"][5, 5, 0] ^= 1
    return step
