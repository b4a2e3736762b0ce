"""Evaluation counts every episode from every state, with nobody else at the
controls, and is the same with any number of workers."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilt.cli.eval_command import show_all
from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, StorageError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.hil import evaluate as evaluation
from hilt.hil.config import Hil
from hilt.hil.environment import make_env, spaces
from hilt.hil.evaluate import evaluate, find_checkpoint, load_agent, make_agent
from hilt.observe.statistics import clustered, wilson
from hilt.recording.before_after import before_after
from hilt.replay import Log
from hilt.runs.evaluation import EvaluationResult, over_tasks
from tests.effort import need
from tests.hil.toy_evaluation import STATES, TASK, Walker, config, make_run


def told(done: EvaluationResult) -> list[tuple[int, bool, int, float]]:
    return [(one.state, one.success, one.steps, one.total) for one in done.outcomes]


def test_wilsons_interval():
    assert wilson(95, 100) == pytest.approx((0.88825, 0.97846), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5) and wilson(10, 10) == pytest.approx(
        (0.72247, 1.0), abs=1e-5
    )
    with pytest.raises(ConfigError, match="3 successes of 2 episodes"):
        wilson(3, 2)
    with pytest.raises(ConfigError, match="0 successes of 0 episodes: expected at least one episode"):
        wilson(0, 0)


@given(st.integers(1, 2000).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_wilsons_interval_is_scipys(given: tuple[int, int]):
    from scipy import stats

    found = stats.binomtest(*given).proportion_ci(method="wilson")
    assert wilson(*given) == pytest.approx((found.low, found.high), abs=1e-9)


def test_every_state_is_tried_once_and_counted():
    done = evaluate(config(), Walker())
    assert told(done) == [
        (0, True, 1, 1),
        (1, True, 2, 1),
        (2, True, 3, 1),
        (3, True, 4, 1),
        (4, False, 4, 0),
        (5, False, 4, 0),
    ]
    result = done.to_json()
    assert (result["successes"], result["episodes"], result["steps_per_success"], result["length"]) == (
        4,
        STATES,
        2.5,
        3.0,
    )
    assert result["success"] == result["return"] == 4 / 6 and (result["low"], result["high"]) == wilson(4, 6)
    assert evaluate(config(limit=1), Walker(), states=[5]).to_json()["steps_per_success"] is None


def test_evaluate_selects_states():
    assert [one[0] for one in told(evaluate(config(), Walker(), "eval"))] == [0, 1, 2]
    assert [one[0] for one in told(evaluate(config(), Walker(), "train", episodes=5))] == [0, 1, 0, 1, 0]
    assert [one[0] for one in told(evaluate(config(), Walker(), states=[4, 1]))] == [4, 1]
    again = evaluate(config(), Walker(), "train", episodes=4)
    assert len({one.seed for one in again.outcomes}) == 4, "a state that comes again is another episode"
    assert {one.seed for one in evaluate(config(), Walker(), seed=1).outcomes}.isdisjoint(
        one.seed for one in again.outcomes
    )


def test_the_likeliest_action_unless_it_is_to_be_drawn():
    for sample in (False, True):
        walker = Walker()
        evaluate(config(), walker, sample=sample)
        assert {argmax for _, argmax in walker.asked} == {not sample}
        assert len({seed for seed, _ in walker.asked}) == len(walker.asked), "every draw has a seed of its own"


def test_an_environment_that_fails_costs_one_episode(tmp_path: Path):
    done = evaluate(config(broken=(0, 3)), Walker(), folder=tmp_path)
    assert told(done)[3] == (3, False, 1, 0.0) and done.outcomes[3].error == "RuntimeError: the arm fell off"
    assert [one.state for one in done.errors] == [3], "from state 0 there is no second step"
    assert (done.successes, len(done.outcomes)) == (3, STATES) and done.to_json()["errors"] == 1
    with Log.open(done.folder / "log", "r") as log:
        assert (
            log.facts.about(3)["error"] == "RuntimeError: the arm fell off" and log.facts.about(3)["success"] is False
        )


def test_evaluate_refuses_take_overs():
    with pytest.raises(
        ConfigError, match=r"a person acted in an evaluation\. Evaluate without the wrapper through which they do"
    ):
        evaluate(config(person=True), Walker())
    settings = replace(config(), operator="no such device")
    assert evaluate(settings, Walker()).successes == 4, "an operator that the settings name is not even opened"


def test_evaluate_a_task_without_success():
    done = evaluate(config(silent=True), Walker())
    assert [one[1] for one in told(done)] == [
        None
    ] * STATES and done.success is done.interval is done.steps_per_success is None
    result = done.to_json()
    assert [result[name] for name in ("success", "low", "high", "successes")] == [None, None, None, 0] and result[
        "return"
    ] > 0
    some = replace(done, outcomes=[replace(done.outcomes[0], success=True), *done.outcomes[1:]])
    assert some.success == 1 / STATES, "one that tells it only when it is so has told it of all"
    lost = replace(done, outcomes=[replace(done.outcomes[0], success=False, error="it fell")])
    assert lost.success is None, "an episode that was lost tells nothing"


def test_a_classifier_that_is_wrong_is_not_measured_in_place_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It calls the second place a success, wherever the goal is. The walker of state n
    succeeds at place n + 1, within four steps."""
    monkeypatch.setattr(
        "hilt.classifier.reward.reward_function",
        lambda folder, threshold, space: lambda seen: seen["state"]["left/place"][0] >= 2,
    )
    settings = replace(config(), classifier="folder")
    done = evaluate(settings, Walker(), folder=tmp_path)
    assert [(one.success, one.verdict, one.judge, one.steps) for one in done.outcomes] == [
        (True, False, "task", 1),  # the task ends it, and the classifier has missed it
        (True, True, "task", 2),
        *[(False, True, "task", 2)] * (STATES - 2),  # the classifier ends it, as in the run
    ]
    assert done.success == 2 / STATES
    result = done.to_json()
    assert result["decided_by"] == ["task"] and result["classifier"] == {
        "episodes": STATES,
        "verdicts_of_success": STATES - 1,
        "agree": 1,
        "false_successes": STATES - 2,
        "missed_successes": 1,
    }
    with Log.open(done.folder / "log", "r") as log:
        about = log.facts.about(log.trajectories()[3])
        assert (about["success"], about["verdict"], about["judge"]) == (False, True, "task")


def test_where_the_task_does_not_know_a_person_is_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def ask(question: str, seconds: float) -> bool:
        asked.append(question)
        return len(asked) > 2

    done = evaluate(config(silent=True), Walker(), ask=ask)
    assert done.judges == ["person"] and done.successes == STATES - 2 and done.agreement is None
    assert asked[1] == "episode from state 1, 2 steps: success? (1/0) "
    assert evaluate(config(), Walker(), ask=ask).judges == ["task"] and len(asked) == STATES, (
        "where it knows, nobody is asked"
    )
    monkeypatch.setattr(
        "hilt.classifier.reward.reward_function",
        lambda folder, threshold, space: lambda seen: seen["state"]["left/place"][0] >= 2,
    )
    settings = replace(config(silent=True), classifier="folder")
    alone, both = evaluate(settings, Walker()), evaluate(settings, Walker(), ask=ask)
    assert alone.judges == ["classifier"] and alone.successes == STATES - 1 and alone.agreement is None
    assert (
        both.judges == ["person"]
        and both.successes == STATES
        and both.agreement
        and both.agreement["missed_successes"] == 1
    )
    with pytest.raises(ConfigError, match="2 workers, and a person is to be asked after each episode"):
        evaluate(config(), Walker(), ask=ask, workers=2)


def test_evaluate_writes_a_log(tmp_path: Path):
    done = evaluate(config(), Walker(), folder=tmp_path / "evaluations", update=30)
    assert done.folder == tmp_path / "evaluations" / "test-00000030"
    assert read_json(done.folder / "evaluation.json") == done.to_json()
    with Log.open(done.folder / "log", "r") as log:
        steps = log.read(log.trajectory_keys(3))
        assert (
            len(log.trajectories()) == STATES
            and [log.facts.about(n)["success"] for n in log.trajectories()] == [True] * 4 + [False] * 2
        )
        assert steps["rewards"].tolist() == [0, 0, 0, 1] and steps["terminated"].tolist() == [False] * 3 + [True]
        assert set(steps["source"]) == {Source.POLICY} and set(steps["policy_version"]) == {30}
        assert steps["observations"]["images"]["front"][2, 0, 0, 0] == 80, "a copy: the environment went on"
        assert log.read(log.trajectory_keys(5))["truncated"].tolist() == [False] * 3 + [True]
    assert evaluate(config(), Walker(), folder=tmp_path / "evaluations", update=30).folder.name == "test-00000030-2"
    assert (
        evaluate(config(), Walker(), folder=tmp_path / "evaluations", sample=True).folder.name
        == "test-00000000-sampled"
    )


def test_the_outcome_is_the_same_with_any_number_of_workers(tmp_path: Path, fork: Any, monkeypatch: pytest.MonkeyPatch):
    # other tests start workers that import torch themselves
    monkeypatch.setattr("hilt.core.children.process_context", lambda _: fork)
    settings = config(noise=0.3, shaped=0.1, limit=6)
    agent = make_agent(settings, spaces(settings))
    columns = ["observations", "actions", "rewards", "terminated", "truncated", "source", "policy_version"]
    found, seen = [], []
    for workers in (1, 2):
        done = evaluate(
            settings,
            agent,
            sample=True,
            episodes=7,
            seed=3,
            workers=workers,
            folder=tmp_path,
            watch=lambda _, *n: seen.append(n),
        )
        with Log.open(done.folder / "log", "r") as log:
            found.append((done.outcomes, [log.read(log.trajectory_keys(n), columns) for n in log.trajectories()]))
    assert seen == 2 * [(count, 7) for count in range(1, 8)]
    (alone, first), (together, second) = found
    assert alone == together and len({one.total for one in alone} | {one.steps for one in alone}) > 1
    for one, other in zip(first, second, strict=True):
        np.testing.assert_equal(one, other)
    assert evaluate(settings, agent, sample=True, episodes=7, seed=4).outcomes != alone


def test_tasks_that_share_their_scenes_are_not_as_many_independent_episodes():
    def tried(*tasks: str) -> list[tuple[str, int, bool]]:
        # each scene is lost or solved by all
        return [(task, state, state % 5 > 0) for task in tasks for state in range(100)]

    apart, together = (
        tried(*(f"tabletop/{name}" for name in names)) for names in (("reach", "push"), ("press_red", "press_blue"))
    )
    assert over_tasks(apart) == (*wilson(160, 200), 200) and over_tasks(tried("Mine-v0", "Yours-v0"))[2] == 200
    low, high, counted = over_tasks(together)
    assert counted == pytest.approx(99) and (low, high) == pytest.approx(
        clustered([one[2] for one in together], list(range(100)) * 2)
    )
    assert over_tasks(tried("tabletop/press_red")) == (*wilson(80, 100), 100)
    outcomes = [{"state": state, "success": state % 5 > 0} for state in range(100)]
    result = {"split": "test", "success": 0.8, "successes": 80, "episodes": 100, "outcomes": outcomes}
    cards = [result | {"task": task} for task in ("tabletop/press_red", "tabletop/press_blue")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        show_all(cards)
    assert f"160 of 200 episodes, 80.0%, 95% interval {100 * low:.1f}% to {100 * high:.1f}%" in said.getvalue()


@pytest.mark.parametrize("sample", [False, True])
def test_workers_have_the_copy_of_the_actor_that_is_tried(monkeypatch: pytest.MonkeyPatch, sample: bool):
    """The slow one, as without workers; what is drawn, is drawn by the quick one."""
    settings = config(noise=0.3, shaped=0.1, limit=6)
    settings.agent.rlpd.actor_average = 0.005
    agent = make_agent(settings, spaces(settings))
    with torch.no_grad():
        for parameter in agent.targets["actor"].parameters():
            parameter += 0.3

    def here(plan: Any, weights: Any, tries: Any, workers: int) -> Any:
        other, env = make_agent(plan.config, spaces(plan.config)), make_env(plan.config, operator=False)
        other.load_acting_state(weights)
        return evaluation._alone(plan, other, env, tries)

    monkeypatch.setattr(evaluation, "_together", here)
    alone, together = (
        evaluate(settings, agent, sample=sample, episodes=3, workers=workers).outcomes for workers in (1, 2)
    )
    assert alone == together and not any(one.error for one in alone)


def test_evaluate_reports_errors_of_workers():
    agent = make_agent(config(), spaces(config()))
    with pytest.raises(ConfigError, match="a person acted in an evaluation"):
        evaluate(config(person=True), agent, episodes=1, workers=2)


def test_evaluate_reports_workers_that_cannot_start():
    code = "from tests.hil.toy_evaluation import Walker, config\nfrom hilt.hil.evaluate import evaluate\n"
    code += "Walker.acting_state = lambda self, slow: {}\nevaluate(config(), Walker(), workers=2)\n"
    path = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable], input=code, env=path, capture_output=True, text=True, timeout=600, check=False
    )
    assert "a process of the evaluation ended with exit code 1. See its error above; a script" in done.stderr


@pytest.mark.peers  # minutes on a busy machine
def test_evaluate_workers_end_with_their_parent(tmp_path: Path):
    """Killed from outside, it leaves no process behind."""
    code = f"""if True:
        from tests.hil.toy_evaluation import config
        from hilt.hil.evaluate import *
        if __name__ == "__main__":
            agent = make_agent(config(), spaces(config()))
            began = {str(tmp_path / "began")!r}
            evaluate(config(), agent, episodes=10**6, workers=2, watch=lambda *_: open(began, "w"))
    """
    (tmp_path / "script.py").write_text(code)
    path = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], env=path, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: (tmp_path / "began").exists(), 240)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        wait_for(lambda: not group_lives(process.pid), 20)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(happens: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_checkpoints_by_name(tmp_path: Path):
    run = make_run(tmp_path / "run", (10, 20, 30))
    assert [find_checkpoint(run, which).update for which in ("last", 10, "20")] == [30, 10, 20]
    with pytest.raises(
        ConfigError,
        match=r"no checkpoint was evaluated on the split eval. First: hilt eval .* --split eval --checkpoint N",
    ):
        find_checkpoint(run, "best")
    for update, limit, split in ((10, 3, "eval"), (20, 1, "eval"), (30, 9, "test")):
        evaluate(config(limit=limit), Walker(), split, update=update, folder=run / "evaluations")
    for update, limit in ((10, 1), (20, 4)):
        evaluate(
            config(limit=limit, silent=True),
            Walker(),
            "eval",
            update=update,
            folder=tmp_path / "silent" / "evaluations",
        )
    shutil.copytree(run / "checkpoints", tmp_path / "silent" / "checkpoints")
    assert find_checkpoint(tmp_path / "silent", "best").update == 20, "by return where success is unknown"
    assert find_checkpoint(run, "best").update == 10, "what was tried on the states that are reported does not count"
    with pytest.raises(StorageError, match=r"there is no checkpoint 40\. There are: 10, 20, 30"):
        find_checkpoint(run, 40)
    with pytest.raises(ConfigError, match="checkpoint 'first': expected last, best, or the number of one: 10, 20, 30"):
        find_checkpoint(run, "first")
    settings = config()
    settings.seed = 20
    wanted, found = make_agent(settings, spaces(settings)).acting_state(), load_agent(run, 20).acting_state()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert any(not np.array_equal(load_agent(run).acting_state()[name], wanted[name]) for name in wanted)
    with pytest.raises(ConfigError, match=r"is not a run: there is no config\.yaml in it"):
        load_agent(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        find_checkpoint(make_run(tmp_path / "new", ()))


def test_evaluate_errors(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="no split named 'tests'; did you mean 'test'"):
        evaluate(config(), Walker(), "tests")
    with pytest.raises(ConfigError, match=f"initial state 6 of test: {TASK} has 6 there, counted from 0"):
        evaluate(config(), Walker(), states=[6])
    with pytest.raises(ConfigError, match="workers=0: expected a number of at least 1"):
        evaluate(config(), Walker(), workers=0)
    with pytest.raises(ConfigError, match="2 videos were asked for, and no folder to record in: give folder="):
        evaluate(config(), Walker(), videos=2)
    need("av")
    blind = Hil(task="tabletop/reach", task_options={"image_size": None})
    with pytest.raises(ConfigError, match="tabletop/reach: the observations have no images, so there are no videos"):
        evaluate(blind, Walker(), videos=2, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_videos_and_two_of_them_side_by_side(tmp_path: Path):
    av = pytest.importorskip("av")

    def frames(path: Path) -> list[Any]:
        with av.open(str(path)) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

    done = evaluate(config(), Walker(), folder=tmp_path, videos=3)
    assert [path.name for path in done.videos] == [f"episode-{n:06d}.mp4" for n in range(3)]
    short, long = done.videos[0], done.videos[2]
    assert (len(frames(short)), len(frames(long))) == (11, 13), "each step, and a second of its end"
    before_after([short], [long, short], tmp_path / "both.mp4", ("at first", "in the end"))
    both, (height, width, _) = frames(tmp_path / "both.mp4"), frames(long)[0].shape
    assert len(both) == 24 and both[0].shape[0] >= height + 30 and both[0].shape[1] >= 2 * width
    title, left, right = both[0].shape[0] - height, both[-1][:, :width], both[5][:, width + 8 : 2 * width + 8]
    assert np.abs(left[title:].astype(int) - frames(short)[-1]).mean() < 6, "the shorter one shows its end"
    assert np.abs(right[title:].astype(int) - frames(long)[5]).mean() < 6 and both[0][:title].max() > 150
    before_after([long, short], [short, long], tmp_path / "pairs.mp4")
    pairs = frames(tmp_path / "pairs.mp4")
    assert len(pairs) == 26, "two episodes that are compared begin at the same moment"
    assert np.abs(pairs[13][title:, :width].astype(int) - frames(short)[0]).mean() < 6
    assert np.abs(pairs[12][title:, width + 8 : 2 * width + 8].astype(int) - frames(short)[-1]).mean() < 6
    with pytest.raises(ConfigError, match="videos of no frames a second"):
        before_after([], [], tmp_path / "none.mp4")
