"""``hilt demo vla``: what it calls wrong; and the short one, whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.demos.demo_vla import DemoPhase, VlaStory, _gain, more, verdict
from hilt.core.checksums import read_json
from hilt.core.config import build
from hilt.recipes import vla_recipe

for package in ("torch", "gymnasium", "mujoco", "av"):
    pytest.importorskip(package)


def test_the_verdict() -> None:
    assert verdict({"blind": 0.1, "start": 0.4, "after": 0.95}, 0.9) == ([], "")
    assert verdict({"blind": 0.1, "start": 0.4}, 0.9) == ([], ""), (
        "without reinforcement learning there is nothing to be reached"
    )
    (one,), _ = verdict({"blind": 0.5, "start": 0.4, "after": 0.95}, 0.9)
    assert "replayed blindly succeeds in 50%" in one
    (few, none), _ = verdict({"blind": 0.1, "start": 0.6, "after": 0.5}, 0.9)
    assert (
        "50% of the exam, and 90% is the goal" in few
        and "began with 60% and ended with 50%: nothing was learned" in none
    )


def test_a_cap_in_minutes_is_no_failure_where_success_rises() -> None:
    shares = {"blind": 0.1, "start": 0.4, "after": 0.6}
    assert verdict(shares, 0.9, minutes=2) == (
        [], "stopped at 2 minutes, before the goal: it began with 40%, is at 60%, and 90% is the goal."
    )  # fmt: skip
    assert verdict({**shares, "after": 0.95}, 0.9, minutes=2) == ([], "")
    (none,), capped = verdict({**shares, "after": 0.4}, 0.9, minutes=2)
    assert "nothing was learned" in none and not capped


def test_a_run_goes_on_with_another_of_the_limit_that_ended_it() -> None:
    """Seconds and validations before count: with any other setting it would end at once."""
    from hilt.vla.train import CHANGEABLE  # it brings torch

    config = build(vla_recipe("vla_tabletop"), "max_steps=400", "max_seconds=180")
    assert [more(reason, config) for reason in ("max_seconds", "goal", "solved", "max_steps")] == [
        "max_seconds=360", "validation.goal=1", "solved_steps=0", "max_steps=800",
    ]  # fmt: skip
    assert {
        word.partition("=")[0] for word in (more(reason, config) for reason in ("max_seconds", "goal", "solved", "-"))
    } <= CHANGEABLE


def test_what_was_added_is_counted_over_the_same_states_in_any_order() -> None:
    before = [{"task": task, "state": state, "success": state % 2 == 0} for state in range(40) for task in "ab"]
    after = [{**card, "success": True} for card in reversed(before)]
    assert re.fullmatch(
        r"\+50\.0 points, 95% interval \+\d\d\.\d to \+\d\d\.\d \(the same states, paired; .*\)", _gain(before, after)
    )


def test_the_cost_of_a_run_with_validations_and_a_step_that_waited() -> None:
    validation = {"kind": "update", "update": 0, "step": 0, "validation_success": 0.4}
    learned = {"kind": "update", "episodes": 96.0, "steps": 800.0, "optimizer_steps": 2.0}
    waited = {"kind": "update", "episodes": 40.0, "steps": 300.0}
    phase = DemoPhase()
    phase.add([validation, learned, waited, learned])
    assert phase == DemoPhase(episodes=232, environment_steps=1900, gradient_steps=4)


def test_each_option_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[VlaStory] = []
    monkeypatch.setattr(VlaStory, "tell", lambda self: told.append(self))
    for name in ("warm_up", "learn", "show"):
        monkeypatch.setattr(VlaStory, name, lambda self: None)

    refused = CliRunner().invoke(cli.app, ["demo", "vla", "--set", "algorithm.lam=0.9"])
    assert refused.exit_code and not told and "lam=0.9 would do nothing" in refused.output, "before anything is made"

    def story(*options: str) -> VlaStory:
        assert CliRunner().invoke(cli.app, ["demo", "vla", *options]).exit_code == 0
        return told[-1]

    usual, fast = story(), story("--fast")
    assert (usual.demonstrations, usual.drawing.steps, usual.imitation.max_steps) == (1, 500, 600)
    assert (usual.config.max_steps, usual.states) == (400, 100)
    assert usual.config.validation.goal > 0.9 and not usual.config.max_seconds, "success ends it, and no clock"
    assert fast.config.max_steps < 400 and fast.states < 100
    assert fast.drawing.steps < usual.drawing.steps and fast.imitation.max_steps < usual.imitation.max_steps
    assert story("--pictures", "7").drawing.steps == 7 and story("--steps", "9").imitation.max_steps == 9
    assert story("--demonstrations", "3").demonstrations == 3
    assert story("--minutes", "2").config.max_seconds == 120 and story("--minutes", "0").config.max_steps == 0
    assert story("--seed", "4").config.seed == 4 and story("--run", "there").run == Path("there")
    rloo = story("--set", "algorithm.estimator=rloo")
    assert (
        rloo.config.algorithm.estimator == "rloo"
        and rloo._title("after") == "after RLOO"
        and usual._title("after") == "after GRPO"
    )
    assert usual.config.imitation.weight == 0.05 and story("--set", "imitation.weight=0").config.imitation.weight == 0
    flow = story("--head", "flow").config.policy_options
    assert flow["head"] == "flow" and "smoothing" not in flow and usual.config.policy_options["smoothing"]


@pytest.mark.peers
@pytest.mark.timeout(7200)  # it takes ten minutes of two quiet cores
def test_the_short_one_learns_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        cli.app, ["demo", "vla", "--fast", "--run", "it", "--set", "validation.before=true"]
    )
    assert done.exit_code == 0, done.output
    shares = [
        float(share)
        for share in re.findall(r"^(?:a demonstration|imitation|after).*? ([\d.]+)%", done.output, re.MULTILINE)[-3:]
    ]
    assert done.output.count("precision: float32 (this is a test)\n") == 1
    assert read_json(Path("it/grpo/run.json"))["precision_why"] == "this is a test"
    assert len(shares) == 3 and shares[0] < 30 and shares[2] > shares[1]
    assert Path("it/before-after.mp4").stat().st_size > 1000 and list(Path("it/plots").glob("*.png"))
