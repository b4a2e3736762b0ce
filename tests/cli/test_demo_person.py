"""``hilt demo person``: its options and what it says; and the short one, whole, in long tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.demos import demo_person
from hilt.cli.demos.demo_person import PersonStory
from hilt.cli.demos.demo_vla import VlaStory
from hilt.core.errors import HiltError
from hilt.hil.config import Hil, check
from hilt.observe.metrics import Metrics

for package in ("torch", "gymnasium", "mujoco", "av"):
    pytest.importorskip(package)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PersonStory]:
    stories: list[PersonStory] = []
    monkeypatch.setattr(VlaStory, "warm_up", lambda self: None)
    monkeypatch.setattr(PersonStory, "learn", lambda self: stories.append(self))
    for name in ("exam", "show"):
        monkeypatch.setattr(PersonStory, name, lambda self: None)
    return stories


def demo(*words: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["demo", "person", *words])


def test_each_option_does_what_it_says(asked: list[PersonStory]):
    for words in (
        ["--run", "it"],
        ["--human", "--seed", "3", "--minutes", "2"],
        ["--fast", "--algorithm", "filtered", "--set", "batch_size=8"],
    ):
        assert demo(*words).exit_code == 0
    script, human, fast = (story.config for story in asked)
    assert (script.operator, script.algorithm, script.goal.success, script.control_hz) == (
        "script",
        "hg-dagger",
        0.97,
        0,
    )
    assert asked[0].run == Path("it/run") and asked[0].plan == demo_person.WHOLE
    assert (human.operator, human.seed, human.max_seconds, human.control_hz) == ("browser", 3, 120, 5)
    assert (fast.algorithm, fast.batch_size, fast.max_steps, fast.goal.success) == ("filtered", 8, 300, 0)
    assert script.agent.kind == "vla" and script.agent.options["policy"] == "it/imitation/imitation/policy"
    assert script.operator_options == {"window": 3, "teaches": 55} and human.operator_options == {}
    assert script.task.count("+") == 3 and len(script.demo_path) == 4
    for config in (script, human, fast):
        check(config)


def test_it_says_what_the_script_knows_that_the_policy_has_to_see(asked: list[PersonStory]):
    shown = demo().output
    assert "The script knows where the buttons are, which the policy has to see." in shown
    assert "learns meanwhile from demonstrations and take-overs," in shown
    assert "until it succeeds alone in 97% of 100 evaluation states, 2 times in a row" in shown
    shown = demo("--human", "--algorithm", "filtered").output
    assert "The script" not in shown and "you take over" in shown
    assert "learns meanwhile from demonstrations, take-overs and the episodes that succeeded" in shown
    assert "meanwhile from what hg-dagger imitates and from groups of simul" in demo("--algorithm", "mixed").output
    assert asked[-1].config.algorithm == "mixed" and asked[-1].config.mixed.simulations == 1


def test_an_algorithm_that_is_unknown_is_refused_before_anything_is_learned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VlaStory, "warm_up", lambda self: pytest.fail("it began"))
    with pytest.raises(HiltError, match="no algorithm named 'dagger'; did you mean 'hg-dagger'"):
        demo_person.person(algorithm="dagger", run=Path("it"))


def test_help_is_counted_by_episodes(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        for number in range(60):
            helped = {"intervention_steps": 4 if number < 12 else 0, "length": 8}
            metrics.write("episode", helped, update=number, step=8 * number)
    (name, text), (_, share) = PersonStory(demo_person.FAST, Hil(), tmp_path).facts()
    assert (name, text) == ("help", "in 12 of 60 episodes, 48 steps; in 2 of the last 50")
    assert "0% of the steps of the last 20 episodes" in share


@pytest.mark.long
def test_the_short_demo_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = demo("--fast", "--run", "it")
    assert done.exit_code in (0, 1), done.output  # so short that it need not have learned
    assert "after learning from take-overs (hg-dagger)" in done.output and "help" in done.output
    assert (tmp_path / "it" / "run" / "before-after.mp4").exists()
