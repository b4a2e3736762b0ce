"""A run with a goal ends when success on evaluation states holds, and with the policy that reached it."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from hilt.core.checksums import read_json, write_json
from hilt.core.config import build, thaw
from hilt.core.errors import ConfigError, HiltError, SchemaError
from hilt.hil.config import Goal, Hil, check
from hilt.hil.environment import check_fit, check_goal
from hilt.hil.goal import LAST_EPISODES, MAX_DEATHS, GoalWatch, evaluations, holds
from hilt.hil.learner import Learner, LearnerSummary
from hilt.observe.metrics import Metrics, read_metrics
from hilt.runs import checkpoint
from tests.hil import toy_evaluation
from tests.hil.test_learner import learner, template  # noqa: F401  (a fixture)
from tests.hil.toy_evaluation import Walk, make_run

TASK = "tests.hil.test_goal:Whatever"
DEADLINE_S = 120


class Whatever(Walk):
    """Succeeds from the states `good`, whatever the policy does."""

    def __init__(self, good: list[int], silent: bool = False):
        super().__init__(silent=silent)
        self._good = good

    def step(self, action: Any) -> Any:
        seen, reward, _, _, info = super().step(action)
        return seen, reward, True, False, {name: self.state in self._good for name in info}


def awaited(watch: GoalWatch) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while (card := watch.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return card


@pytest.mark.parametrize(
    ("shares", "held"),
    [
        ([], False),
        ([0.9], False),
        ([0.9, 0.9], True),
        ([1.0, 0.8], False),
        ([0.8, 0.9, 1.0], True),
        ([0.9, 0.8, 0.9], False),
    ],
)
def test_goal_holds_when_the_last_evaluations_in_a_row_reach_it(shares: list[float], held: bool):
    assert holds(Goal(success=0.9, hold=2), shares) == held
    assert not holds(Goal(success=0.0, hold=1), [1.0]), "0 is off"
    assert holds(Goal(success=0.9, hold=1), shares) == (shares[-1:] > [0.85])


def test_goal_waits_until_a_person_has_taken_over_in_few_of_the_last_episodes(tmp_path: Path):
    run = make_run(tmp_path / "run")
    settings = thaw(Hil, run / "config.yaml")
    settings.goal = Goal(success=0.9, hold=1, take_overs=0.04)
    watch = GoalWatch(settings, run)
    watch._keep(10, 1.0)
    assert not watch.reached, "fifty episodes must have ended"
    for helped in [True] * 3 + [False] * (LAST_EPISODES - 3):
        watch.note_episode(helped)
    watch._keep(20, 1.0)
    assert not watch.reached, "3 of 50"
    watch.note_episode(False)
    assert not watch.reached, "the next evaluation says whether its policy succeeds, too"
    watch._keep(30, 1.0)
    assert watch.reached, "2 of 50"
    with Metrics(run) as metrics:
        for helped in watch._helped:
            metrics.write("episode", {"intervention_steps": 5 * helped}, update=30, step=0)
    again = GoalWatch(settings, run)
    assert again._helped == watch._helped and again._acts_alone(), "a resumed run knows them"


def test_checkpoints_are_evaluated_in_another_process_and_what_they_gave_is_kept(
    tmp_path: Path, fork: Any, monkeypatch: pytest.MonkeyPatch
):
    # that of the next test imports torch itself
    monkeypatch.setattr("hilt.core.children.process_context", lambda _: fork)
    run = make_run(tmp_path / "run")
    settings = thaw(Hil, run / "config.yaml")
    settings.task, settings.task_options = TASK, {"good": [0, 1]}
    settings.goal = Goal(success=0.6, states=3, hold=2)
    watch = GoalWatch(settings, run)
    try:
        for update in (10, 20):
            assert not watch.reached and not watch.busy
            watch.ask(update)
            card = awaited(watch)
            assert (card["update"], card["successes"], card["episodes"], card["errors"]) == (update, 2, 3, 0)
        assert watch.reached and watch.last == 20
        kept = [read_json(path) for path in sorted(run.glob("evaluations/*/evaluation.json"))]
        assert [(one["split"], one["update"], one["success"]) for one in kept] == [
            ("eval", 10, 2 / 3),
            ("eval", 20, 2 / 3),
        ]
        assert GoalWatch(settings, run).reached, "a resumed run knows what was evaluated before"
        again = GoalWatch(settings, run)
        again.forget_after(10)
        assert not again.reached and again.last == 10
        for deaths in (0, MAX_DEATHS - 1):
            if deaths:
                watch.ask(20)
                assert awaited(watch)["update"] == 20, "another one was started"
            os.kill(watch._process.pid, signal.SIGSTOP)  # so that it does not answer first
            watch.ask(20)
            os.kill(watch._process.pid, signal.SIGKILL)
            watch._deaths = deaths
            if not deaths:
                assert "ended with exit code -9; another one is started" in awaited(watch)["error"]
        with pytest.raises(
            HiltError, match=r"ended 3 times in a row, last with exit code -9.*--resume goal\.success=0"
        ):
            awaited(watch)
    finally:
        watch.close()


def test_a_task_that_does_not_report_success_is_an_error_and_so_is_what_the_process_raises(tmp_path: Path):
    run = make_run(tmp_path / "run")
    settings = thaw(Hil, run / "config.yaml")
    settings.task, settings.task_options, settings.goal = (
        TASK,
        {"good": [], "silent": True},
        Goal(success=0.5, states=2),
    )
    watch = GoalWatch(settings, run)
    try:
        watch.ask(10)
        with pytest.raises(
            ConfigError, match=r"goal\.success=0\.5: .*Whatever does not report success, so it is never reached"
        ):
            awaited(watch)
        (run / "checkpoints" / "20" / "agent.pt").write_bytes(b"")
        watch.ask(20)
        with pytest.raises(HiltError, match="its bytes do not have their checksum"):
            awaited(watch)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"success": 0.9, "states": 4}, "has 3 initial states of the split 'eval': give goal.states=3 at most, not 4"),
        ({"success": 1.5}, "goal.success=1.5: expected a number from 0 to 1"),
        ({"success": 0.9, "hold": 0}, "goal.hold=0: expected a whole number of at least 1"),
        ({"success": 0.9, "period": 0}, "goal.period=0: expected a whole number of at least 1"),
    ],
)
def test_a_goal_that_cannot_be_evaluated_is_refused_before_the_run_begins(goal: dict[str, Any], message: str):
    settings = build(toy_evaluation.config(), {"goal": goal})
    with pytest.raises(ConfigError) as error:
        check(settings)
        check_fit(settings)
    assert message in str(error.value)


def test_a_goal_on_an_arm_is_refused():
    class Arm(Walk):
        timing = staticmethod(dict)

    plain = Walk()
    plain.initial_states = {}
    settings = Hil(goal=Goal(success=0.9))
    with pytest.raises(ConfigError, match="is an arm, and an evaluation beside learning would need a second one"):
        check_goal(settings, Arm())
    with pytest.raises(ConfigError, match="has no initial states of the split 'eval', but none"):
        check_goal(settings, plain)
    check_goal(Hil(), Arm())


class Scripted(GoalWatch):
    """Evaluations whose successes are given, after the learner has asked for them this often in vain."""

    shares: ClassVar[list[float]] = []
    in_vain: ClassVar[int] = 0

    def ask(self, update: int) -> None:
        self.asked, self.busy, self._polls = update, True, 0

    def poll(self) -> dict[str, Any] | None:
        if not self.busy:
            return None
        self._polls += 1
        if self._polls <= self.in_vain:
            return None
        self.busy, share = False, self.shares.pop(0)
        self._keep(self.asked, share)
        card = {"update": self.asked, "success": share, "episodes": self.goal.states, "goal": self.goal.success}
        folder = self._run / "evaluations" / f"eval-{self.asked:08d}"
        folder.mkdir(parents=True)
        write_json(folder / "evaluation.json", {**card, "split": "eval"})
        return {
            **card,
            "successes": round(share * self.goal.states),
            "low": share,
            "high": share,
            "seconds": 0.0,
            "errors": 0,
            "pairs": "",
        }


def events(run: Path) -> list[str]:
    return [record["event"] for record in read_metrics(run, ["event"])]


@pytest.mark.parametrize("in_vain", [0, 25], ids=["at_once", "after_more_updates_than_a_period"])
def test_learning_ends_at_the_goal_with_the_policy_that_reached_it(
    template: Path,  # noqa: F811
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_vain: int,
):
    monkeypatch.setattr("hilt.hil.learner.GoalWatch", Scripted)
    monkeypatch.setattr(Scripted, "in_vain", in_vain)
    monkeypatch.setattr("hilt.hil.learner.REPORT_INTERVAL_S", 0.0)
    Scripted.shares = [0.95, 0.5, 0.9, 1.0]
    run = memory_path / "run"
    goal = {"success": 0.9, "states": 20, "period": 10, "hold": 2}

    def learn(**changes: Any) -> LearnerSummary:
        one: Learner = learner(template, run, max_steps=10**6, **changes)
        return one.run()

    done = learn(goal=goal)
    assert done.reason == "goal" and not Scripted.shares
    measured = [record for record in read_metrics(run, ["update"]) if "validation_success" in record]
    assert [record["validation_success"] for record in measured] == [0.95, 0.5, 0.9, 1.0]
    updates = [int(record["validation_update"]) for record in measured]
    assert all(b - a >= 10 for a, b in pairwise(updates)), "each evaluation is of another checkpoint"
    assert checkpoint.numbers(run)[-1] == updates[-1] <= done.update, (
        "the last checkpoint is the one that reached the goal"
    )
    assert f"the policy that reached the goal is the last checkpoint, of update {updates[-1]:,}" in events(run)
    assert any("success in 10 of 20 evaluation states" in text and "the goal is 90%" in text for text in events(run))

    assert learn(goal=goal).reason == "goal", "resumed, it has still reached it"
    Scripted.shares = [0.9, 1.0, 1.0]
    higher = learn(goal={**goal, "success": 1.0})
    assert higher.reason == "goal" and higher.update > updates[-1] and not Scripted.shares
    assert len(evaluations(run, Goal(states=20))) == 7


def test_a_run_whose_evaluation_fails_ends_with_that_error(
    template: Path,  # noqa: F811
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    class Failing(Scripted):
        def poll(self) -> dict[str, Any] | None:
            if self.busy:
                raise SchemaError("the evaluation failed")
            return None

    monkeypatch.setattr("hilt.hil.learner.GoalWatch", Failing)
    monkeypatch.setattr("hilt.hil.learner.REPORT_INTERVAL_S", 0.0)
    with pytest.raises(SchemaError, match="the evaluation failed"):
        learner(template, memory_path / "run", max_steps=10**6, goal={"success": 0.9, "period": 5}).run()
