"""``hilt train RECIPE`` of post-training as a person meets it: what would be done, a
run, Ctrl-C, resuming, trying and drawing it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json
from hilt.observe.metrics import read_metrics
from hilt.policies.registry import load_policy
from hilt.replay import Log
from hilt.runs.checkpoint import numbers
from hilt.vla import worker as roles
from tests.cli.test_train_sft import run
from tests.lines import all_lines, no_line_twice

RECIPE = "tests.vla.toy_vla:config"


def test_what_would_be_done_is_shown_and_nothing_started(tmp_path: Path):
    said = run("train", RECIPE, "max_steps=3", "algorithm.kl.where=reward", "--dry-run", "--run", tmp_path / "new")
    for words in (
        "estimator: grpo",
        "max_steps: 3",
        "would begin in",
        "training step: 16 of each of 1 rank with work = 16 episodes",
        "memory of the policy, in training with 64 chunks in a pass: ",
        "memory of the reference with 64 chunks in a pass: ",
        "memory that cpu has free here: ",
        "precision: float32 (this is a test)\n",
    ):
        assert words in said
    assert not (tmp_path / "new").exists()
    for words, expected in (
        ("colect.group_size=4", "no setting named 'colect'; did you mean 'collect'?"),
        (
            "algorithm.batch.trajectories_per_step=5",
            "which are not whole steps of the optimizer; give 4, or 0 for all in one.",
        ),
        ("policy=nowhere", "policy=nowhere: expected the folder of a checkpoint"),
        ("tasks=[tabletop/pik]", "no tabletop task named 'pik'; did you mean 'pick'?"),
    ):
        said = run("train", RECIPE, words, "columns={full_image: images/front}", "--run", tmp_path / "refused", code=1)
        assert expected in said.splitlines()[-1] and said.count("error: ") == 1, "one line"
        assert not (tmp_path / "refused").exists() or not list((tmp_path / "refused").iterdir())


def test_an_alarm_is_shown_and_ends_the_command(tmp_path: Path):
    quiet = ("validation.before=false", "validation.period=0", "validation.after=false", "stop_on=[ppo_kl]")
    wild = ("optimizer.learning_rate=0.3", "algorithm.epochs=4", "max_steps=20")
    said = run("train", RECIPE, *quiet, *wild, "checkpoint_period=1", "--run", tmp_path / "run", code=1)
    assert "error: alarm ppo_kl: the policy moves " in said and "Lower optimizer.learning_rate" in said
    assert (
        f"hilt train --run {tmp_path / 'run'} --resume goes on" in said
        and read_json(tmp_path / "run" / "run.json")["alarms"]
    )
    folder, (*_, good, last) = tmp_path / "run", numbers(tmp_path / "run")
    episodes = Log.open(folder / "rollouts/rank-0", "r").trajectories()
    again = ("train", "--run", folder, "--from-last-good")
    said = run(*again, "--dry-run", "policy=other", code=1)
    assert "which a resumed run cannot change" in said and numbers(folder)[-1] == last, "it is refused before"
    goes = f"goes back to update {good}: alarm ppo_kl was raised at update {last}"
    assert goes in run(*again, "--dry-run") and numbers(folder)[-1] == last
    calm = ("optimizer.learning_rate=0.0001", "algorithm.epochs=1", f"max_steps={last}")
    said = run(*again, *calm)
    assert goes in said and f"max_steps is reached: {last} training steps" in said
    assert numbers(folder)[-1] == last and numbers(folder / "set_aside/1") == [last]
    kept = Log.open(folder / "rollouts/rank-0", "r").trajectories()
    assert {*episodes} < {*kept}, "the episodes of the collapse stay in the log"
    assert read_json(folder / "run.json")["went_back"][0]["update"] == good
    shown = [one for one in read_metrics(folder, ["update"]) if "weights_age" in one]
    assert [one["update"] for one in shown] == [*range(1, last + 1)] and shown[-1]["weights_age"] == 0
    assert all(0 <= one["dead_relus"] < 1 and one["effective_rank"] >= 1 for one in shown)


def test_a_run_that_is_stopped_goes_on_and_is_tried_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, collect = tmp_path / "run", roles.Worker.collect

    def interrupted(worker: Any, step: int) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(2000):
                if worker._stop():
                    break
                time.sleep(0.01)
        return collect(worker, step)

    monkeypatch.setattr(roles.Worker, "collect", interrupted)
    said = run("train", RECIPE, "max_steps=2", "validation.period=0", "--run", folder, code=130)
    assert (
        "it was stopped: 1 training steps" in said
        and f"{folder / 'policy'}\nhilt train --run {folder} --resume" in said
    )
    assert read_json(folder / "result.json")["reason"] == "stopped" and load_policy(folder / "policy").chunk == 2
    monkeypatch.undo()
    with monkeypatch.context() as lines:
        all_lines(lines)
        said = no_line_twice(run("train", "--run", folder, "--resume"))
    for words in (
        "= 16 episodes = 4 groups of 4",
        "step 2: success on eval states",
        "max_steps is reached: 2 training steps",
    ):
        assert words in said
    for phase in (
        *(
            "starting the rank: the policy and the simulators",
            "step 2: collecting episodes: 5 of 16",
            "step 2: learning from the chunks: ",
        ),
        *("after step 2: validating: 1 of ", "writing a checkpoint", "writing the policy"),
    ):
        assert phase in said
    assert "has a run already: --resume goes on with it" in run("train", RECIPE, "--run", folder, code=1)
    assert "goes on in" in run("train", "--run", folder, "--resume", "max_steps=3", "--dry-run")
    assert "3 training steps" in run("train", "--run", folder, "--resume", "max_steps=3")
    card = read_json(folder / "run.json")
    assert [(one["step"], one["settings"]) for one in card["changed"]] == [(2, {"max_steps": {"was": 2, "now": 3}})]
    assert card["ended"] == {
        "at": card["ended"]["at"],
        "reason": "max_steps",
        "step": 3,
        "words": "max_steps is reached",
    }
    said = run("eval", folder, "--checkpoint", "best", "--json", tmp_path / "cards.json")
    assert (
        said.count("3 episodes from the states of test") == 2
        and len(json.loads((tmp_path / "cards.json").read_text())) == 2
    )
    assert "after 3 learner steps" in run("eval", folder, "--episodes", 1)
    assert run("plot", folder).count("plots/curves") == 3
    assert load_policy(folder / "policy").chunk == 2
