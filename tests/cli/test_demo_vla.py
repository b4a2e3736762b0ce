"""``hilt demo vla``: what it calls wrong; and the short one, whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.demo_vla import Story, verdict
from hilt.core.files import read_json

for package in ("torch", "gymnasium", "mujoco", "av"):
    pytest.importorskip(package)


def test_the_verdict() -> None:
    assert verdict({"blind": 0.1, "shown": 0.2, "start": 0.4, "after": 0.95}, 0.9) == ([], "")
    assert verdict({"blind": 0.1, "start": 0.4}, 0.9) == ([], ""), "without reinforcement learning there is nothing to be reached"
    (one,), _ = verdict({"blind": 0.5, "start": 0.4, "after": 0.95}, 0.9)
    assert "replayed blindly succeeds in 50%" in one
    (few, none), _ = verdict({"blind": 0.1, "start": 0.6, "after": 0.5}, 0.9)
    assert "50% of the exam, and 90% is the goal" in few and "began with 60% and ended with 50%: nothing was learned" in none


def test_a_cap_in_minutes_is_no_failure_where_success_rises() -> None:
    shares = {"blind": 0.1, "start": 0.4, "after": 0.6}
    assert verdict(shares, 0.9, minutes=2) == (
        [], "stopped at 2 minutes, still rising: it began with 40%, is at 60%, and 90% is the goal."
    )  # fmt: skip
    assert verdict({**shares, "after": 0.95}, 0.9, minutes=2) == ([], "")
    (none,), capped = verdict({**shares, "after": 0.4}, 0.9, minutes=2)
    assert "nothing was learned" in none and not capped


def test_each_option_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Story] = []
    monkeypatch.setattr(Story, "tell", lambda self: told.append(self))
    for name in ("warm_up", "learn", "show"):
        monkeypatch.setattr(Story, name, lambda self: None)

    refused = CliRunner().invoke(cli.app, ["demo", "vla", "--set", "algorithm.lam=0.9"])
    assert refused.exit_code and not told and "lam=0.9 would do nothing" in refused.output, "before anything is made"

    def story(*options: str) -> Story:
        assert CliRunner().invoke(cli.app, ["demo", "vla", *options]).exit_code == 0
        return told[-1]

    usual, fast = story(), story("--fast")
    assert (usual.demonstrations, usual.playing.scenes, usual.config.max_steps, usual.states) == (1, 60, 400, 100)
    assert usual.config.validation.goal > 0.9 and not usual.config.max_seconds, "success ends it, and no clock"
    assert fast.config.max_steps < 400 and fast.playing.steps < usual.playing.steps and fast.states < 100
    assert story("--play", "7").playing.scenes == 7 and story("--steps", "9").playing.steps == 9 and usual.playing.steps == 1_000
    assert story("--demonstrations", "3").demonstrations == 3
    assert story("--minutes", "2").config.max_seconds == 120 and story("--minutes", "0").config.max_steps == 0
    assert story("--seed", "4").config.seed == 4 and story("--run", "there").run == Path("there")
    rloo = story("--set", "algorithm.estimator=rloo")
    assert rloo.config.algorithm.estimator == "rloo" and rloo._title("after") == "after RLOO" and usual._title("after") == "after GRPO"
    assert usual.config.imitation.weight == 0.05 and story("--set", "imitation.weight=0").config.imitation.weight == 0
    flow = story("--head", "flow").config.policy_options
    assert flow["head"] == "flow" and "smoothing" not in flow and usual.config.policy_options["smoothing"]


@pytest.mark.peers
def test_the_short_one_learns_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["demo", "vla", "--fast", "--run", "it"])
    assert done.exit_code == 0, done.output
    shares = [float(share) for share in re.findall(r"^(?:a demonstration|imitation|after).*? ([\d.]+)%", done.output, re.MULTILINE)[-4:]]
    assert done.output.count("precision: float32 (this is a test)\n") == 1
    assert read_json(Path("it/grpo/run.json"))["precision_why"] == "this is a test"
    assert len(shares) == 4 and shares[0] < 30 and shares[3] > shares[2]
    assert Path("it/before-after.mp4").stat().st_size > 1000 and list(Path("it/plots").glob("*.png"))
