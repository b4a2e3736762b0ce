"""``hilt train``, ``hilt learner`` and ``hilt actor`` as commands. Killed and resumed they are in tests/e2e."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.core.config import freeze
from hilt.core.files import read_json
from hilt.policies.config import AgentConfig, EncoderConfig
from hilt.recipes import recipe
from hilt.replay import Log
from hilt.runtime.config import Hil, Wire
from hilt.runtime.train import begin_run

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


def toy() -> Hil:
    agent = AgentConfig(encoder=EncoderConfig(kind="none"))
    return Hil(task="tests.runtime.toy:Toy", demonstrations=2, max_steps=0, agent=agent, wire=Wire(port=0, broadcast_port=0))


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_shows_all_and_starts_nothing(tmp_path: Path):
    said = run("train", "hil_debug", "batch_size=24", "actors=2", "--dry-run").stdout
    assert "batch_size: 24" in said and "discount: 0.97" in said and "would begin in runs/hil_debug" in said
    assert "2 demonstrations of tabletop/reach" in said and "actor-2: hilt actor runs/hil_debug/config.yaml --name actor-2" in said
    assert not list(tmp_path.iterdir())
    freeze(recipe("hil_debug"), tmp_path / "mine.yaml")
    assert "would begin in runs/mine" in run("train", "mine.yaml", "--dry-run").stdout
    begin_run(tmp_path / "there", "hil_debug", recipe("hil_debug"))
    assert "max_steps: 7" in run("train", "--run", "there", "--resume", "max_steps=7", "--dry-run").stdout
    assert "goes on in there" in run("train", "hil_debug", "--run", "there", "--resume", "--dry-run").stdout
    assert not read_json(tmp_path / "there" / "run.json")["changed"], "a dry run changes nothing"


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path):
    begin_run(tmp_path / "there", "hil_debug", recipe("hil_debug"))
    for words, error in {
        ("train", "hil_debog"): "error: no recipe named 'hil_debog'; did you mean 'hil_debug'?",
        ("learner", "hil_debug", "batchsize=1"): "error: no setting named 'batchsize'; did you mean 'batch_size'?",
        ("train", "hil_debug", "--run", "there"): "error: there has a run already: --resume goes on with it, --run FOLDER begins another.",
        ("train", "hil_debug", "--run", "there", "--dry-run"): "error: there has a run already",
        ("learner", "--run", "there", "--resume", "seed=1"): "error: seed was 42 in there and is 1 now, which a resumed run cannot change",
        ("train", "tabletop_pick", "--run", "there", "--resume"): "error: there is a run of hil_debug, not of tabletop_pick",
        ("train", "--run", "nowhere", "--resume"): "error: nowhere has no run to resume",
        ("actor", "hil_debug", "observations=flat"): "error: no kind of observations named 'flat'",
        ("actor", "hil_debug", "--learner", "10.1.2.3"): "error: connecting to 10.1.2.3 without keys",
    }.items():
        said = run(*words, code=1)
        assert said.stderr.startswith(error) and said.stderr.count("\n") == 1, said.output
    assert "give a RECIPE, such as hil_debug" in run("train", "max_steps=3", code=2).output
    assert "give a RECIPE" in run("actor", code=2).output


def test_a_learner_alone_records_its_demonstrations_and_goes_on_when_resumed(tmp_path: Path):
    said = run("learner", f"{__name__}:toy").stdout
    assert "recorded 2 of 2 demonstrations" in said and "max_steps: 0 updates, 0 online steps, in runs/tests.cli.test_train-toy" in said
    with Log.open(tmp_path / "runs" / "tests.cli.test_train-toy" / "demos", "r") as demos:
        assert len(demos.trajectories()) == 2, "which are the run's"
    assert "recorded" not in run("learner", f"{__name__}:toy", "--resume").stdout
    run("learner", "--run", str(tmp_path / "runs" / "tests.cli.test_train-toy"), "--resume")  # named in another way
    said = run("learner", f"{__name__}:toy", "task_options.sides=3", "--run", "other", code=1).stderr
    assert said.startswith("error: tests.runtime.toy:Toy cannot be made with task_options={'sides': 3}: ") and "'sides'" in said


def test_the_classifier_has_its_own_command_under_the_same_word():
    pytest.importorskip("hilt.cli.classifier")
    assert "RECIPE" in run("train", "--help").stdout
    said = run("train", "classifier", "--help").stdout
    assert "DATA" in said and "RECIPE" not in said


def test_who_was_started_by_hilt_train_ends_when_that_is_gone(tmp_path: Path):
    child = (
        "import os, signal, sys, time\n"
        "from hilt.cli.train import _end_with_parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('ended', 'w').close(), os._exit(0)))\n"
        "_end_with_parent()\nopen('there', 'w').close()\ntime.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env={{**os.environ, 'HILT_PARENT': str(os.getpid())}})\n"
        "while not os.path.exists('there'): time.sleep(0.02)\n"
        "assert not os.path.exists('ended')\nos.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", parent], cwd=tmp_path, timeout=60, check=False).returncode == -9
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_hil_debug_with_two_actors_from_demonstrations_to_its_end(tmp_path: Path):
    command = [sys.executable, "-m", "hilt", "train", "hil_debug", "actors=2", "wire.port=0", "wire.broadcast_port=0"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("recorded 2 of 2 demonstrations", "ended: runs/hil_debug", "hilt eval runs/hil_debug"):
        assert words in done.stdout
    folder = tmp_path / "runs" / "hil_debug"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = Counter(record["kind"] for record in records)
    assert kinds["update"] == 6 and kinds["episode"]
    assert {record["actor"] for record in records if record["kind"] == "actor"} == {"actor-1", "actor-2"}
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())][-1] == "60"
    with Log.open(folder / "log", "r") as log, Log.open(folder / "demos", "r") as demos:
        assert 0 < len(log.by_source("random")) <= 40, "20 of each actor, but for those where the script took over"
        assert len(demos.trajectories()) == 2 and len(log.by_source("human")), "demonstrations, and take-overs of the script"
        first = [log.read(log.trajectory_keys(number)[:1], ["actions"])["actions"][0].tolist() for number in log.trajectories()[:2]]
        assert first[0] != first[1], "no two actors do the same"
