"""docs/hil-serl.md, followed literally: a config of HIL-SERL's kind, its
demonstrations, and its script as two processes."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.trajectory import Source
from hilt.envs.task import make
from hilt.recipes import recipe
from hilt.recording.buffered_device import as_hil_serl
from hilt.replay import Log
from hilt.teleop.devices import open_device
from hilt.teleop.intervene import TakeOver
from tests.forked import ForkServer
from tests.wire.processes import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hil-serl.md").read_text()


def file_of_the_page(name: str) -> str:
    found = re.search(rf"\*\*{name}\*\*.*?```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"docs/hil-serl.md has no {name}"
    return found[1]


def record_demos(path: Path, episodes: int) -> int:
    """What HIL-SERL's record_demos.py does, with its keys and no others; returns the number of transitions."""
    env = as_hil_serl(TakeOver(make("tabletop/reach", image_size=32, step_limit=20), open_device("script")))
    transitions = []
    for state in range(episodes):
        obs, _ = env.reset(options={"split": "train", "state": state})
        done = False
        while not done:
            next_obs, reward, done, _, info = env.step(np.zeros(7, np.float32))
            kept = dict(observations=obs, actions=info["intervene_action"], next_observations=next_obs, rewards=reward)
            transitions.append(copy.deepcopy({**kept, "masks": 1.0 - done, "dones": done, "infos": info}))
            obs = next_obs
        assert info["succeed"]
    env.close()
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(transitions))
    return len(transitions)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files, and demonstrations."""
    for name in ("my_task.py", "my_recipe.py", "train.py"):
        (tmp_path / name).write_text(file_of_the_page(name))
    record_demos(tmp_path / "demo_data" / "reach_2_demos_2026-11-15_10-00-00.pkl", 2)
    return tmp_path


def export_recording(folder: Path) -> int:
    """Demonstrations that `hilt record` made and `hilt data convert --to hil-serl` wrote in the current
    folder, beside the others; returns their steps."""
    record = [
        "record",
        "tabletop/reach",
        "--device",
        "script",
        "--episodes",
        "2",
        "--observations",
        "hil-serl",
        "--image-size",
        "32",
    ]
    for words in (
        [*record, "--out", "recorded", "--no-video"],
        ["data", "convert", "recorded/log", "exported", "--to", "hil-serl"],
    ):
        done = CliRunner().invoke(cli.app, words)
        assert done.exit_code == 0, done.output
    (made,) = (folder / "exported" / "demo_data").glob("*.pkl")
    made.rename(folder / "demo_data" / made.name)
    with Log.open(folder / "recorded" / "log", "r") as log:
        return len(log)


UNHURRIED = {
    "timeout_ms=3000": "timeout_ms=120_000",
    "    done = client.update(timeout_ms=20_000)\n": (
        "    while not client.policy_version:\n        time.sleep(0.02)\n"
        "    done = client.update(timeout_ms=120_000)\n    open('all_arrived', 'w').close()\n"
    ),
    "    time.sleep(1.0)\n": "    while not glob.glob('all_arrived'):\n        time.sleep(0.02)\n",
}
"""Of the script, where it counts on a machine that does not stand still: the actor waits for its first weights, and the
learner until both stores of the actor are there."""


def test_the_script_runs_as_two_processes(folder: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer):
    monkeypatch.chdir(folder)
    demonstrated_there = len(pickle.loads(next((folder / "demo_data").glob("*.pkl")).read_bytes()))
    exported = export_recording(folder)
    # others may use the usual ones now
    ports = f"make_trainer_config(port_number={free_port()}, broadcast_port={free_port()})"
    script = (folder / "train.py").read_text().replace("make_trainer_config()", ports)
    for before, after in UNHURRIED.items():
        assert before in script
        script = script.replace(before, after)
    (folder / "train.py").write_text(script)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = {role: fork_server.start(["train.py", role], one_thread) for role in ("learner", "actor")}
    said = {}
    try:
        for role, process in running.items():
            said[role] = process.stdout.read()
            assert process.wait() == 0, said
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    acted = re.search(r"acted with version (\d+) interventions (\d+)", said["actor"])
    assert acted is not None and int(acted[1]) >= 1, f"the actor got no weights: {said['actor']}"
    demonstrated = int(re.search(r"demonstrated (\d+)", said["learner"])[1])  # type: ignore[index]
    assert demonstrated == exported + demonstrated_there > exported > 0
    assert f"online 120 demo {demonstrated + int(acted[2])}" in said["learner"], (
        "a take-over is in both, and nothing is lost"
    )
    assert "learned 30 steps, critic loss" in said["learner"] and said["learner"].count("stats {") >= 5


def test_the_config_is_a_recipe_with_its_demonstrations_and_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
):
    """``hilt train hil-serl:…``: pickles as they are, a folder of buffers imported,
    take-overs of the environment's own wrapper."""
    (demos,) = (folder / "demo_data").glob("*.pkl")
    episode = [
        {key: value for key, value in step.items() if key != "infos"} for step in pickle.loads(demos.read_bytes())[:8]
    ]
    for name, steps in (("buffer", episode), ("demo_buffer", episode[2:5])):
        (folder / "old" / name).mkdir(parents=True)
        (folder / "old" / name / "transitions_1000.pkl").write_bytes(pickle.dumps(steps))
    settings = [
        "demo_path=[demo_data/*.pkl]",
        "checkpoint_path=old",
        "max_steps=20",
        "training_starts=60",
        "checkpoint_period=0",
        "max_ahead=60",  # the actor waits for the learner
    ]
    ports = [f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}"]
    monkeypatch.chdir(folder)
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = ["train", "hil-serl:my_task:TrainConfig", *settings, *ports, "--run", "run"]
    done = fork_server.hilt(words, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    with Log.open(folder / "run" / "log", "r") as log, Log.open(folder / "run" / "demos", "r") as demonstrated:
        sources = log.read(log.all().keys(), ["source"])["source"]
        assert sources[:8].tolist() == [0, 0, 1, 1, 1, 0, 0, 0], (
            "the imported steps come first, and say on which a person acted"
        )
        assert set(sources[8:].tolist()) == {Source.RANDOM, Source.POLICY, Source.HUMAN} and len(sources) >= 60
        assert len(demonstrated) == len(pickle.loads(demos.read_bytes()))
    hil = recipe("my_recipe:reach")
    assert (
        hil.demo_path == ["demo_data/*.pkl"]
        and hil.task_options == {"config": "my_task:TrainConfig"}
        and hil.max_steps == 30
    )
