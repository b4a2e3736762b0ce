"""``hilt train``, ``hilt learner`` and ``hilt actor`` as commands. Killed and resumed they are in tests/e2e."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.classifier.frames import Clip
from hilt.classifier.reward import ClassifierConfig, reward_function, save
from hilt.classifier.reward import train as classify
from hilt.cli.train_hil import _next
from hilt.compat.rlinf.rollout_experience import RolloutSender
from hilt.core.checksums import read_json
from hilt.core.config import build, freeze, thaw
from hilt.formats.episodes import map_leaves
from hilt.hil.config import Hil, Wire
from hilt.hil.environment import spaces
from hilt.hil.launch import begin_run, check_wire
from hilt.hil.learner import Learner
from hilt.observe.metrics import read_metrics
from hilt.policies import precision
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.recipes import recipe
from hilt.replay import Log
from hilt.runs.checkpoint import numbers
from hilt.wire import make_trainer_config
from tests.classifier.labeled import drawn
from tests.forked import ForkServer
from tests.wire.processes import free_port

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


def toy() -> Hil:
    agent = AgentConfig(encoder=EncoderConfig(kind="none"))
    return Hil(
        task="tests.hil.toy:Toy", demonstrations=2, max_steps=0, agent=agent, wire=Wire(port=0, broadcast_port=0)
    )


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_the_command_line_or_a_file_gives_stays_where_it_is_the_default() -> None:
    words = ("n_step=1", "batch_size=256", "cta_ratio=2", "agent.rlpd.learning_rate=3e-4")
    said = run("train", "tests.cli.test_train_hil:toy", *words, "--dry-run").stdout
    assert all(
        line in said
        for line in ("\nn_step: 1\n", "\nbatch_size: 256\n", "\ncta_ratio: 2\n", " learning_rate: 0.0003\n")
    )
    assert (
        "state only" in said and "tau=0.01" in said and not any(f" {word.partition('=')[0]}=" in said for word in words)
    )
    Path("plain.yaml").write_text("task: Pendulum-v1\ncta_ratio: 2\nsteps_per_update: 50\n")
    said = run("train", "plain.yaml", "log_period=10", "--dry-run").stdout
    assert all(
        line in said for line in ("\ncta_ratio: 2\n", "\nsteps_per_update: 50\n", "\nlog_period: 10\n", "max_ahead=200")
    )


def test_a_dry_run_shows_all_and_starts_nothing(tmp_path: Path):
    said = run("train", "hil_debug", "batch_size=24", "actors=2", "--dry-run").stdout
    assert "batch_size: 24" in said and "discount: 0.97" in said and "would begin in runs/hil_debug" in said
    assert (
        "2 demonstrations of tabletop/reach" in said
        and "actor-2: hilt actor runs/hil_debug/config.yaml --name actor-2" in said
    )
    assert said.count("precision: auto\n") == said.count("precision: float32 (this is a test)\n") == 1
    assert not list(tmp_path.iterdir())
    freeze(recipe("hil_debug"), tmp_path / "mine.yaml")
    assert "would begin in runs/mine" in run("train", "mine.yaml", "--dry-run").stdout
    begin_run(tmp_path / "there", "hil_debug", recipe("hil_debug"))
    assert "max_steps: 7" in run("train", "--run", "there", "--resume", "max_steps=7", "--dry-run").stdout
    said = run("train", "hil_debug", "--run", "there", "--resume", "--dry-run").stdout
    assert "goes on in there" in said and "precision: float32 (as the run was begun)" in said
    assert not read_json(tmp_path / "there" / "run.json")["changed"], "a dry run changes nothing"


def test_policy_is_a_folder_or_the_address_of_a_server():
    for word, said in (
        ("policy=nowhere", "agent.options.policy=nowhere"),
        ("policy=http://arm:8000", "agent.options.server is 'http://arm:8000'; expected ws://HOST:PORT"),
    ):
        assert said in run("train", "vla_person", word, "--dry-run", code=1).output


def test_where_the_precision_is_measured_the_import_of_torch_is_announced(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr("hilt.cli.train_hil.heavy_module", lambda name, purpose, extra: asked.append(name))
    monkeypatch.setattr(precision, "_by_instructions", lambda: "float32")
    monkeypatch.setattr(precision, "trial", lambda: precision.Trial(1.0, 10.0))
    run("train", "hil_debug", "--dry-run")
    assert asked == []
    said = run("train", "hil_debug", "agent.encoder.precision=bfloat16", "--dry-run").stdout
    assert asked == ["torch"] and "precision: bfloat16 is at least 10 times slower than float32 on this CPU" in said


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path):
    begin_run(tmp_path / "there", "hil_debug", recipe("hil_debug"))
    free = ("wire.port=0", "wire.broadcast_port=0")  # whoever else runs here
    for words, error in {
        ("train", "hil_debog"): "error: no recipe named 'hil_debog'; did you mean 'hil_debug'?",
        ("learner", "hil_debug", "batchsize=1"): "error: no setting named 'batchsize'; did you mean 'batch_size'?",
        (
            "train",
            "hil_debug",
            "--run",
            "there",
        ): "error: there has a run already: --resume goes on with it, --run FOLDER begins another.",
        ("train", "hil_debug", "--run", "there", "--dry-run"): "error: there has a run already",
        (
            "train",
            "hil_debug",
            "batch_size=0",
            "--dry-run",
        ): "error: batch_size=0: expected a whole number of at least 2",
        ("train", "hil_debug", "n_step=0"): "error: n_step=0: expected a whole number of at least 1",
        ("train", "hil_debug", "agent.hidden=[]"): "error: agent.hidden=[]: expected at least one",
        (
            "learner",
            "hil_debug",
            "agent.rlpd.tau=2",
            *free,
        ): "error: agent.rlpd.tau=2.0: expected a number above 0 and at most 1.",
        ("train", "hil_debug", "agent.encoder.kind=big"): "error: agent.encoder.kind: no encoder named 'big'",
        ("train", "hil_debug", "agent.action_indices=[9]"): "error: action_indices is [9]; expected some of 0 to 6",
        ("train", "hil_debug", "agent.pose_keys=[state/q]"): "error: no proprioception in pose_keys named 'state/q'",
        ("train", "hil_debug", "agent.device=abacus", "--dry-run"): "error: device 'abacus' is no torch device",
        ("train", "hil_debug", "task_options.color=red"): "error: tabletop/reach cannot be made with task_options={",
        (
            "train",
            "hil_debug",
            "actors=0",
        ): "error: actors=0: expected a whole number of at least 1. A learner alone is `hilt learner`.",
        (
            "actor",
            "hil_debug",
            "agent.rlpd.imitation_updates=9",
        ): "error: agent.rlpd.imitation_updates=9 would do nothing: it needs",
        (
            "train",
            "hil_debug",
            "demonstrations=0",
            "demonstration_options.speed=1",
        ): "error: demonstration_options={'speed': 1} would",
        (
            "learner",
            "--run",
            "there",
            "--resume",
            "seed=1",
        ): "error: seed was 42 in there and is 1 now, which a resumed run cannot change",
        (
            "train",
            "tabletop_pick",
            "--run",
            "there",
            "--resume",
        ): "error: there is a run of hil_debug, not of tabletop_pick",
        ("train", "--run", "nowhere", "--resume"): "error: nowhere has no run of `hilt train` to resume",
        ("actor", "hil_debug", "observations=flat"): "error: observations: no kind of observations named 'flat'",
        ("actor", "hil_debug", "--learner", "10.1.2.3"): "error: connecting to 10.1.2.3 without keys",
        ("train", "hil_debug", "wire.host=10.1.2.3"): "error: listening on 10.1.2.3 without keys: anybody",
    }.items():
        said = run(*words, code=1)
        assert said.stderr.startswith(error) and said.stderr.count("\n") == 1, said.output
    assert not (tmp_path / "runs").exists(), "so that the right settings may begin there"
    assert "give a RECIPE, such as hil_debug" in run("train", "max_steps=3", code=2).output
    assert "give a RECIPE" in run("actor", code=2).output


def test_ports_that_somebody_has_are_refused_before_anything_is_made(tmp_path: Path):
    begin_run(tmp_path / "there", "hil_debug", recipe("hil_debug"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cure = "by another run perhaps: give this one free ports with wire.port=0 wire.broadcast_port=0."
        for words in (
            ["hil_debug", f"wire.port={port}"],
            ["--run", "there", "--resume", "wire.port=0", f"wire.broadcast_port={port}"],
        ):
            for command, page in (("train", "training"), ("learner", "learner")):
                said = run(command, *words, code=1).stderr
                assert said == f"error: port {port} is taken on 127.0.0.1, {cure} See: hilt docs {page}\n"
    assert not (tmp_path / "runs").exists()
    check_wire(build(Hil(), "wire.port=0", "wire.broadcast_port=0"))


def test_a_learner_alone_records_its_demonstrations_and_goes_on_when_resumed(tmp_path: Path):
    said = run("learner", f"{__name__}:toy").stdout
    assert (
        "recorded 2 of 2 demonstrations" in said
        and "max_steps: 0 updates, 0 online steps, in runs/tests.cli.test_train_hil-toy" in said
    )
    with Log.open(tmp_path / "runs" / "tests.cli.test_train_hil-toy" / "demos", "r") as demos:
        assert len(demos.trajectories()) == 2, "which are the run's"
    assert "recorded" not in run("learner", f"{__name__}:toy", "--resume").stdout
    run("learner", "--run", str(tmp_path / "runs" / "tests.cli.test_train_hil-toy"), "--resume")  # named in another way
    said = run("learner", f"{__name__}:toy", "task_options.sides=3", "--run", "other", code=1).stderr
    assert (
        said.startswith("error: tests.hil.toy:Toy cannot be made with task_options={'sides': 3}: ")
        and "'sides'" in said
    )


def test_the_classifier_has_its_own_command_under_the_same_word():
    pytest.importorskip("hilt.cli.train_classifier")
    assert "RECIPE" in run("train", "--help").stdout
    said = run("train", "classifier", "--help").stdout
    assert "DATA" in said and "RECIPE" not in said


def test_who_was_started_by_hilt_train_ends_when_that_is_gone(tmp_path: Path):
    child = (
        "import os, signal, time\n"
        "from hilt.cli.train_hil import _ending\n"
        "with _ending() as asked:\n"
        "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.raise_signal(number)\n"
        "    assert not asked, 'these are for hilt train'\n"
        "    open('there', 'w').close()\n"
        "    while not asked: time.sleep(0.02)\n"
        "open('ended', 'w').close()\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env={{**os.environ, 'HILT_PARENT': str(os.getpid())}})\n"
        "while not os.path.exists('there'): time.sleep(0.02)\n"
        "assert not os.path.exists('ended')\nos.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", parent], cwd=tmp_path, timeout=600, check=False).returncode == -9
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


THRESHOLD = 0.99


@pytest.fixture(scope="module")
def debug_run(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """Where `hilt train hil_debug` was typed, with two actors and a classifier's word as the reward."""
    where = tmp_path_factory.mktemp("debug")
    labels = [
        Clip(drawn(np.array([n % 2] * 4), np.random.default_rng(n)), np.array([n % 2] * 4), f"state {n}", f"{n}")
        for n in range(8)
    ]
    save(where / "classifier", classify(labels, ClassifierConfig(steps=20, batch_size=8, features=8, hidden=8)))
    command = ["train", "hil_debug", "actors=2", f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}"]
    command += ["max_steps=30", "checkpoint_period=20"]
    # the actors wait for the learner, and it for them
    # what so small a classifier says of other pictures is chance, and episodes must go on until the script takes over
    command += ["classifier=classifier", f"classifier_threshold={THRESHOLD}", "max_ahead=100", "update_to_data=1"]
    done = fork_server.hilt(command, where, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    (where / "said").write_text(done.stdout)
    return where


def test_hil_debug_with_two_actors_from_demonstrations_to_its_end(debug_run: Path):
    for words in ("recorded 2 of 2 demonstrations", "ended: runs/hil_debug", "hilt eval runs/hil_debug"):
        assert words in (debug_run / "said").read_text()
    folder = debug_run / "runs" / "hil_debug"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = Counter(record["kind"] for record in records)
    assert kinds["update"] == 3 and kinds["episode"]
    assert {record["actor"] for record in records if record["kind"] == "actor"} == {"actor-1", "actor-2"}
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["0", "20", "30"]
    with Log.open(folder / "log", "r") as log, Log.open(folder / "demos", "r") as demos:
        assert 0 < len(log.by_source("random")) <= 40, "20 of each actor, but for those where the script took over"
        assert len(demos.trajectories()) == 2 and len(log.by_source("human")), (
            "demonstrations, and take-overs of the script"
        )
        first = [
            log.read(log.trajectory_keys(number)[:1], ["actions"])["actions"][0].tolist()
            for number in log.trajectories()[:2]
        ]
        assert first[0] != first[1], "no two actors do the same"
        steps = log.read(log.all().keys(), ["rewards", "next_observations/images", "succeed"])
    said = reward_function(debug_run / "classifier", THRESHOLD)
    judged = [
        said({"images": {name: frames[i] for name, frames in steps["next_observations"]["images"].items()}})
        for i in range(40)
    ]
    assert steps["rewards"][:40].tolist() == judged and (steps["succeed"] == (steps["rewards"] > 0)).all()


def test_the_same_episodes_of_hil_debug_give_the_same_curve_with_trajectories_as_its_store(
    debug_run: Path, tmp_path: Path
):
    folder = debug_run / "runs" / "hil_debug"
    with Log.open(folder / "log", "r") as log:
        with log.reading() as steps:
            ended = steps.ended_trajectories()
        ended.sort(key=lambda number: len(log.trajectory_keys(number)))
        # the shortest one may have one step
        episodes = [log.read(log.trajectory_keys(number)) for number in (*ended[:1], *ended[-3:])]
    frozen = build(
        thaw(Hil, folder / "config.yaml"), "max_steps=6", "log_period=1", "training_starts=1", "demonstrations=0"
    )
    curves = []
    for port, store in enumerate(("log", "trajectories")):
        config = build(frozen, f"store={store}", f"demo_path=[{folder / 'demonstrations'}]")
        wire = make_trainer_config(30_000 + 2 * port, 30_001 + 2 * port, transport="in-process")
        learner = Learner(config, tmp_path / store, env=spaces(config), wire=wire)
        for number, episode in enumerate(episodes):
            rows = [map_leaves(lambda column, t=t: column[t], episode) for t in range(len(episode["rewards"]))]
            if store == "log":
                with learner.experience.log.episode(actor="actor-1", boot="1", store="actor_env") as running:
                    for row in rows:
                        running.append(row)
            else:
                sender = RolloutSender(
                    SimpleNamespace(channel=lambda _, to=learner.experience.channel: to), f"{number}"
                )
                for row in rows:
                    sender.insert(row)
                assert sender.close(60) == 0
        learner.experience.take()
        learner.run()
        records = read_metrics(tmp_path / store, ["update"])
        curves.append(
            [(r["critic_loss"], r["actor_loss"], r["q/online"], r["q/demo"], r["human_steps"]) for r in records]
        )
    assert curves[0] == curves[1] and len(curves[0]) == 6


def test_an_alarm_of_the_learner_ends_the_command_with_its_sentence_and_a_checkpoint(
    tmp_path: Path, fork_server: ForkServer
):
    """A rate at which the critics leave the range of their targets, in five updates
    of a real learner with a real actor."""
    folder = tmp_path / "run"
    command = ["train", "tests.cli.test_train_hil:toy", "--trust", "tests", "--run", str(folder)]
    command += [f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}"]
    command += [
        "demonstrations=0",
        "max_steps=100000",
        "training_starts=10",
        "log_period=1",
        "batch_size=16",
        "defaults=images",
    ]
    wild = [
        "stop_on=[q_bound]",
        "agent.rlpd.learning_rate=1",
        "agent.rlpd.target_range=[0,1]",
        "agent.rlpd.backup_entropy=false",
    ]
    done = fork_server.hilt([*command, *wild, "agent.hidden=[16]"], tmp_path, ENV)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: learner: alarm q_bound: Q is from " in done.stderr and "The critics diverge: lower " in done.stderr
    assert f"hilt train --run {folder} --resume goes on from here" in done.stderr and "Traceback" not in done.stderr
    last, card = max(numbers(folder)), read_json(folder / "run.json")
    assert (card["ended"]["reason"], card["ended"]["step"]) == ("alarm", last) and last >= 5, (
        "it is raised by the mean of five records"
    )
    assert "q_bound" in {one["name"] for one in card["alarms"]}


def test_all_that_cannot_work_is_listed_in_a_dry_run_too(tmp_path: Path):
    words = ["bath_size=3", "operator=spacemose", "demo_path=[nowhere]", "demonstrations=0"]
    for command in (["train", "hil_debug", *words, "--dry-run"], ["train", "hil_debug", *words]):
        said = run(*command, code=1).stderr
        assert said.startswith(
            "error: 3 things cannot work as they are:\n  - no setting named 'bath_size'; did you mean 'batch_size'?"
        )
        assert "operator=spacemose: no device named" in said and "demo_path has nowhere" in said
    said = run("train", "vla_debug", "sed=1", "collect.group_size=1", "--dry-run", code=1).stderr
    assert "no setting named 'sed'" in said and "group_size=1" in said and said.startswith("error: 2 things")
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_is_not_said_to_be_ready_for_evaluation(tmp_path: Path):
    assert _next(tmp_path, ended=False) == [f"hilt train --run {tmp_path} --resume"]
    (tmp_path / "checkpoints" / "00000030").mkdir(parents=True)
    assert _next(tmp_path, ended=True) == [f"hilt {name} {tmp_path}" for name in ("eval", "plot", "open")]
