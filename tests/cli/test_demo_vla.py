"""``hilt demo vla``: what it calls wrong; and the short one, whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.demo_vla import verdict

for package in ("torch", "gymnasium", "mujoco", "av"):
    pytest.importorskip(package)


def test_the_verdict() -> None:
    assert verdict({"blind": 0.1, "shown": 0.2, "start": 0.4, "after": 0.95}, 0.9) == []
    assert verdict({"blind": 0.1, "start": 0.4}, 0.9) == [], "without reinforcement learning there is nothing to be reached"
    (one,) = verdict({"blind": 0.5, "start": 0.4, "after": 0.95}, 0.9)
    assert "replayed blindly succeeds in 50%" in one
    few, none = verdict({"blind": 0.1, "start": 0.6, "after": 0.5}, 0.9)
    assert "50% of the exam, and 90% is the goal" in few and "began with 60% and ended with 50%: nothing was learned" in none


@pytest.mark.peers
def test_the_short_one_learns_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["demo", "vla", "--fast", "--run", "it"])
    assert done.exit_code == 0, done.output
    shares = [float(share) for share in re.findall(r"^(?:a demonstration|imitation|after).*? ([\d.]+)%", done.output, re.MULTILINE)[-4:]]
    assert len(shares) == 4 and shares[0] < 30 and shares[3] > shares[2]
    assert Path("it/before-after.mp4").stat().st_size > 1000 and list(Path("it/plots").glob("*.png"))
