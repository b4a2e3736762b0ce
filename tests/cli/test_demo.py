"""``hilt demo --fast`` learns from images, whole; its check sees when nothing is
learned; and its options do what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli.demos import demo, hil_story
from hilt.core.checksums import read_json, write_json
from hilt.hil.config import Goal, Hil
from hilt.recipes import recipe
from hilt.runs.evaluation import EpisodeOutcome, EvaluationResult
from tests.effort import is_long, rounds
from tests.forked import ForkServer
from tests.lines import no_line_twice

for package in ("torch", "gymnasium", "mujoco", "av"):
    pytest.importorskip(package)

ENV = {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


PLAN = hil_story.DemoPlan("any", 10, 0.8, workers=1, usual_steps=100)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", ENV["MUJOCO_GL"])


def run(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["demo", "--fast", "--run", "it", *map(str, words)])


def tried(successes: int, of: int = 10) -> EvaluationResult:
    return EvaluationResult(
        "task", "test", 0, False, 0, [EpisodeOutcome(state, 0, state < successes, 5, 0.0) for state in range(of)]
    )


def run_forked(
    server: ForkServer, words: list[str], first: str = "", **plan: float
) -> subprocess.CompletedProcess[str]:
    """The same command in a process of its own, whose plan is another; its learner and its actor are forked."""
    first += (
        f"from dataclasses import replace; from hilt.cli.demos import demo; demo.FAST = replace(demo.FAST, **{plan})"
    )
    return server.hilt(["demo", "--fast", "--run", "it", *words], Path.cwd(), {**ENV, "COLUMNS": "200"}, first)


def test_it_learns(fork_server: ForkServer):
    """It ends by itself when success holds, on a machine of any speed.

    In `make test` pictures, networks and batches are smaller, less success is asked for, so that the first evaluation
    usually reaches the goal, it is made on fewer states, and the exam of that checkpoint proves the rest: how often the
    goal must be reached in a row is tested in tests/hil/test_goal.py.
    """
    usual = recipe(demo.FAST.recipe).goal
    goal = replace(
        usual,
        success=rounds(0.6, usual.success),
        hold=rounds(1, usual.hold),
        period=rounds(800, usual.period),
        states=rounds(10, usual.states),
    )
    less = ["task_options.image_size=32", "training_starts=100", "agent.rlpd.critic_warmup=50", "batch_size=64"]
    less += ["agent.encoder.pretrain_batch=32", "agent.hidden=[128,128]"]
    less += ["update_to_data=2", "updates_per_step=2", "agent.rlpd.learning_rate=0.001"]  # less work, in larger steps
    less = [] if is_long() else less
    plan = replace(demo.FAST, states=rounds(16, demo.FAST.states), goal=rounds(0.5, demo.FAST.goal))
    given = (f"goal.{name}={getattr(goal, name)}" for name in ("success", "hold", "period", "states"))
    words = [f"--set={change}" for change in (*given, *less)]
    done = run_forked(fork_server, words, states=plan.states, goal=plan.goal)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout + done.stderr and "It has learned" in done.stdout
    assert done.stdout.rstrip().endswith("Open it in the browser: hilt open it")
    names = f"imitation of {recipe(demo.FAST.recipe).demonstrations} demonstrations", "after reinforcement learning"
    shares = [int(re.findall(rf"^{name} +(\d+)%", done.stdout, re.MULTILINE)[0]) for name in names]
    cards = sorted(
        (read_json(path) for path in Path("it").glob("evaluations/*/evaluation.json")), key=lambda card: card["update"]
    )
    before, after = (card for card in cards if card["split"] == "test")
    held = [card for card in cards if card["split"] == "eval"]
    assert [round(100 * card["success"]) for card in (before, after)] == shares
    assert after["success"] >= plan.goal and after["success"] > before["success"]
    for card in (before, after):
        assert card["split"] == "test" and card["errors"] == 0
        assert [one["state"] for one in card["outcomes"]] == list(range(plan.states)), (
            "each state once, the same for both"
        )
    assert (before["update"], after["update"]) == (0, held[-1]["update"]), (
        "the policy that reached the goal is the one of the exam"
    )
    assert all(card["success"] >= goal.success for card in held[-goal.hold :])
    video, curves = Path("it/before-after.mp4"), list(Path("it/plots").glob("*.png"))
    assert video.stat().st_size > 1000 and curves and Path("it/config.yaml").exists()
    assert str(video) in done.stdout and str(curves[0]) in done.stdout


def test_where_nothing_is_learned_it_fails(fork_server: ForkServer):
    less = (
        "demonstrations=3",
        "agent.encoder.pretrain_updates=10",
        "max_steps=20",
        "training_starts=20",
        "max_ahead=20",
        "goal.success=0",
    )
    less += ("task_options.step_limit=25", "task_options.image_size=32", "agent.rlpd.learning_rate=0")
    every_line = "from hilt.core import progress; progress.LINE_S = 0.0; "
    words = [f"--set={change}" for change in less]
    done = run_forked(fork_server, words, every_line, states=4, goal=0.0, usual_steps=100)
    assert done.returncode == 1, done.stdout + done.stderr
    said = no_line_twice(done.stderr) + no_line_twice(done.stdout)
    for phase in (
        *(
            "recording demonstrations of tabletop/",
            "waiting until the learner has started",
            "imitates the demonstrations first: ",
        ),
        *("exam, after: 3 of 4", "making before-after.mp4, episodes: ", "drawing curves: "),
    ):
        assert phase in said
    assert re.search(
        r"WRONG: imitation alone succeeds in (\d+%), what came after it in \1: nothing was learned\.", done.stderr
    )
    assert "It has learned" not in done.stdout + done.stderr and Path("it/before-after.mp4").exists()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (4, 9, []),
        (4, 8, []),
        (4, 7, ["it succeeds in 70% of the exam, and 80% is the goal."]),
        (9, 9, ["imitation alone succeeds in 90%, what came after it in 90%: nothing was learned."]),
        (10, 9, ["imitation alone succeeds in 100%, what came after it in 90%: nothing was learned."]),
        (6, 6, ["it succeeds in 60%", "imitation alone succeeds in 60%"]),
    ],
)
def test_what_counts_as_learned(before: int, after: int, words: list[str]):
    wrong, capped = hil_story.verdict(PLAN, tried(before), tried(after))
    assert len(wrong) == len(words) and all(
        sentence.startswith(start) for sentence, start in zip(wrong, words, strict=True)
    )
    assert not capped


def test_a_cap_in_minutes_is_no_failure_where_success_rises():
    assert hil_story.verdict(PLAN, tried(4), tried(6), minutes=2.5) == (
        [], "stopped at 2.5 minutes, before the goal: 40% by imitation, 60% now, and 80% is the goal."
    )  # fmt: skip
    assert hil_story.verdict(PLAN, tried(4), tried(9), minutes=2.5) == ([], ""), "it has learned all the same"
    (wrong,), capped = hil_story.verdict(PLAN, tried(4), tried(4), minutes=2.5)
    assert "nothing was learned" in wrong and not capped


def test_a_run_that_reached_its_goal_was_not_stopped_by_the_cap(tmp_path: Path):
    story = demo.HilStory(PLAN, Hil(max_seconds=150, goal=Goal(success=0.9, states=10, hold=1)), tmp_path)
    assert story._stopped_at() == 2.5
    (tmp_path / "evaluations" / "eval-00000010").mkdir(parents=True)
    card = {"split": "eval", "update": 10, "success": 0.9, "episodes": 10, "goal": 0.9}
    write_json(tmp_path / "evaluations" / "eval-00000010" / "evaluation.json", card)
    assert story._stopped_at() == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[demo.HilStory]:
    """The stories that would be told."""
    stories: list[demo.HilStory] = []
    monkeypatch.setattr(demo.HilStory, "learn", lambda self: stories.append(self))
    monkeypatch.setattr(demo.HilStory, "exam", lambda self: None)
    monkeypatch.setattr(demo.HilStory, "show", lambda self: None)
    return stories


def test_options(asked: list[demo.HilStory]):
    for words in ([], ["--human"], ["--minutes", "2", "--seed", "3"], ["--set", "batch_size=32"]):
        assert run(*words).exit_code == 0
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == 0
    plain, human, long, small, whole = asked
    assert plain.plan == demo.FAST and plain.run == Path("it") and plain.config.operator == "script"
    assert (human.config.operator, human.config.operator_options) == ("browser", {})
    for story in (plain, whole):
        assert story.config.goal.success > story.plan.goal and not story.config.max_seconds, (
            "success ends it, and no clock"
        )
        assert story.plan.usual_steps < story.config.max_steps
    assert (long.config.max_seconds, long.config.max_steps, long.config.seed) == (
        120,
        recipe(demo.FAST.recipe).max_steps,
        3,
    )
    assert small.config.batch_size == 32
    assert whole.plan == demo.WHOLE and str(whole.run).startswith("runs/demo-")


def test_a_person_is_told_that_they_take_over(monkeypatch: pytest.MonkeyPatch):
    """No browser is opened: the page's address is said by the actor."""
    monkeypatch.setattr("hilt.hil.launch.train", lambda config, run, **rest: stop())
    assert "you take over, on the page whose address is below" in run("--human").stdout


def test_the_first_part_of_the_exam_goes_on_beside_learning_without_a_cap_in_minutes(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    monkeypatch.setattr(
        demo.HilStory, "_try", lambda self, name, move: tried.append(name) or self._tried.update({name: TRIED[name]})
    )
    by_clock, by_number, broken = (
        demo.HilStory(demo.FAST, Hil(max_seconds=seconds), Path("it")) for seconds in (9, 0, 0)
    )
    by_number.begin_early()
    assert by_number._early is None, "there is no checkpoint yet"
    Path("it/checkpoints/0").mkdir(parents=True)
    for story in (by_clock, by_number, by_number):
        story.begin_early()
    by_number.exam()
    assert tried == ["before", "after"] and by_clock._early is None and not by_number.wrong
    monkeypatch.setattr(demo.HilStory, "_try_beside", lambda self: None)  # as if it had failed there
    broken.begin_early()
    broken.exam()
    assert tried == ["before", "after"] * 2


TRIED = {"before": tried(4), "after": tried(9)}


def stop() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_a_run_that_goes_on(fork_server: ForkServer):
    output = Path("output")
    process = fork_server.start_run(["demo", "--fast", "--run", "it"], output, ENV)
    try:
        deadline = time.monotonic() + 240
        while not Path("it/logs/learner.log").exists():
            assert process.poll() is None and time.monotonic() < deadline, "it never began to learn"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    said = output.read_text()
    assert process.returncode == 130, said
    assert "stopped; it goes on with: hilt train --run it --resume" in said
