"""A package outside of this repository extends Hilt: it is installed, and each of
its parts is used through the command line."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gymnasium")

from typer.testing import CliRunner

from hilt.cli import app
from hilt.core import trust
from hilt.observe.metrics import read_metrics
from hilt.replay import Log
from tests.forked import ForkServer
from tests.wire.processes import free_port

PACKAGE, ROOT = Path(__file__).parent / "hilt_example", Path(__file__).parents[2]
TRAIN = ["train", "hilt_example.recipes:lamps", "--run", "run"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder into which the package is installed, from a copy that is not of this repository."""
    folder = tmp_path_factory.mktemp("extension")
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "--quiet"]
    copy = folder / "source"
    subprocess.run(["cp", "-r", PACKAGE, copy], check=True)
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        )
        trust.installed.cache_clear()
        yield folder / "site"
    trust.installed.cache_clear()


@pytest.fixture(autouse=True)
def _elsewhere(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def hilt(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())


# --- a vision-language-action policy


@pytest.fixture(scope="module")
def tuned(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `hilt train sft` of the package's policy on demonstrations of its environment."""
    run = tmp_path_factory.mktemp("tuned") / "run"
    words = [
        "policy=linear",
        "policy_options.chunk=2",
        "tasks=[example/up, example/down]",
        "demonstrations=3",
        "columns={state: state}",
    ]
    words += ["max_steps=40", "validation=0", "learning_rate=0.05", "batch_size=8"]
    hilt("train", "sft", *words, "--run", str(run))
    return run


def test_policy_is_fine_tuned_and_keeps_its_own_folder(tuned: Path):
    assert sorted(path.name for path in (tuned / "policy").iterdir()) == [
        "bias.txt",
        "config.json",
        "log_std.txt",
        "weight.txt",
    ]
    losses = [record["loss"] for record in read_metrics(tuned, ["update"])]
    assert losses[-1] < 0.2 * losses[0]


def test_policy_is_evaluated(tuned: Path):
    shown = hilt("eval", str(tuned))
    assert len(re.findall(r"3 of 3: 100\.0%", shown)) == 2, shown


def test_policy_of_a_folder_is_post_trained(tuned: Path, tmp_path: Path):
    assert "max_steps is reached" in hilt(*TRAIN, f"policy={tuned / 'policy'}")
    assert (tmp_path / "run" / "policy" / "weight.txt").is_file()
    assert "100.0%" in hilt("eval", "run")


def test_policy_as_module_class_is_post_trained_evaluated_and_resumed(tmp_path: Path):
    words = ["policy=hilt_example.policy:LinearPolicy", "policy_options.chunk=1"]
    dry = hilt(*TRAIN, *words, "--dry-run")
    assert (
        "0.05, as is usual for a hilt_example.policy:LinearPolicy" in dry
        and "memory: it is not estimated for LinearPolicy" in dry
    )
    hilt(*TRAIN, *words)
    hilt("eval", "run")
    hilt("train", "--run", "run", "--resume", "max_steps=3")
    assert "a linear policy has no such option; it has chunk" in refused(*TRAIN, *words, "policy_options.depth=3")


def test_policy_of_a_folder_that_names_code_runs_only_if_it_is_trusted(tuned: Path, tmp_path: Path):
    folder = tmp_path / "theirs"
    subprocess.run(["cp", "-r", tuned / "policy", folder], check=True)
    (tmp_path / "unknown.py").write_text("from hilt_example.policy import LinearPolicy as Mine\n")
    card = folder / "config.json"
    card.write_text(card.read_text().replace('"linear"', '"unknown:Mine"'))
    said = refused(*TRAIN, f"policy={folder}")
    assert (
        "config.json names 'unknown:Mine', code that is not Hilt's; nothing of it was run" in said
        and "--trust unknown" in said
    )
    assert "unknown" not in sys.modules
    hilt(*TRAIN, f"policy={folder}", "max_steps=1", "--trust", "unknown")


def test_policy_that_is_not_there_is_refused_with_those_that_are():
    assert re.search(r"policy=linaer: expected the folder .*small_vla, .*linear", refused(*TRAIN, "policy=linaer"))
    assert "a new Pi0 cannot be made: give policy=FOLDER" in refused(*TRAIN, "policy=pi0")


# --- an advantage estimator and a loss


def test_estimator_and_loss_are_used_in_post_training(tmp_path: Path):
    hilt(*TRAIN, "algorithm.estimator=best_of", "algorithm.loss=hilt_example.algorithms:Unclipped")
    updates = [record for record in read_metrics(tmp_path / "run", ["update"]) if "mean_ratio" in record]
    assert len(updates) == 2 and updates[0]["mean_ratio"] == pytest.approx(1, abs=0.2)
    assert "clip_low=0.1 would do nothing" in refused(*TRAIN, "algorithm.loss=unclipped", "algorithm.clip_low=0.1")


# --- an environment, a device, an arm and a reward


def test_device_drives_an_environment_that_is_recorded(tmp_path: Path):
    hilt(
        "record",
        "example/up",
        "--device",
        "pusher",
        "-d",
        "by=0.8",
        "--episodes",
        "2",
        "--no-video",
        "--out",
        "recording",
    )
    with Log.open(tmp_path / "recording" / "log", "r") as log:
        assert np.unique(log.read(log.all().keys(), ["actions"])["actions"]) == pytest.approx([0.8])
    hilt(
        "record",
        "example/down",
        "--device",
        "hilt_example.device:Pusher",
        "-d",
        "by=-0.9",
        "--episodes",
        "1",
        "--no-video",
    )


def test_arm_is_served():
    words = [
        sys.executable,
        "-m",
        "hilt",
        "serve-robot",
        "--backend",
        "example_arm",
        "--set",
        "height=0.3",
        "--port",
        "0",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            url = re.search(r"arm 0 \(example_arm\) at (http://\S+)", line)
            assert url is not None, line
            asked = urllib.request.Request(f"{url[1].rstrip('/')}/getstate", data=b"{}", method="POST")
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["pose"][:3] == pytest.approx([0.5, 0.0, 0.3])
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def test_reward_of_a_function_counts_in_post_training(tmp_path: Path):
    hilt(*TRAIN, "rewards.classifier=lit", "rewards.learned=1", "rewards.success=0", "policy_options.chunk=4")
    with Log.open(tmp_path / "run" / "rollouts" / "rank-0", "r") as log:
        earned = log.read(log.all().keys(), ["earned"])["earned"]
    assert set(np.unique(earned)) == {0.0, 1.0}


@pytest.mark.parametrize("name", ["lit", "hilt_example.rewards:Shaped"])
def test_reward_decides_in_a_run_with_a_person(name: str):
    from hilt.hil.config import Hil
    from hilt.hil.environment import make_env

    env = make_env(Hil(task="example/up", classifier=name), operator=False)
    env.reset()
    _, reward, terminated, _, info = env.step(np.ones(1, np.float32))
    assert (reward, terminated, info["succeed"], info["task_success"]) == (1.0, True, True, False)


# --- a per-step agent and an off-policy algorithm


@pytest.fixture
def trained(fork_server: ForkServer, tmp_path: Path) -> Callable[..., None]:
    """`hilt train`, with a learner and an actor in processes of their own, which
    are forked from one that has imported torch."""

    def train(*words: str) -> None:
        ports = [f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}"]
        done = fork_server.hilt(["train", *words, *ports], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    return train


LEARN = "hilt_example.recipes:lamp_with_a_person"


def test_agent_device_reward_and_sink_are_used_in_a_run_with_a_person(tmp_path: Path, trained: Callable[..., None]):
    trained(
        LEARN,
        "agent.kind=bandit",
        "agent.options.rate=0.5",
        "operator=pusher",
        "classifier=lit",
        "sinks=[tally]",
        "--run",
        "run",
    )
    updates = read_metrics(tmp_path / "run", ["update"])
    assert [record["update"] for record in updates if "bandit_reward" in record] == [5, 10, 15, 20]
    assert json.loads((tmp_path / "run" / "tally.json").read_text())["update"] == len(updates)
    assert "after 20 learner steps" in hilt("eval", "run", "--episodes", "2")


def test_algorithm_is_used_in_a_run_with_a_person(tmp_path: Path, trained: Callable[..., None]):
    trained(LEARN, "algorithm=hilt_example.off_policy:Regression", "algorithm_options.strength=2", "--run", "run")
    made = [record for record in read_metrics(tmp_path / "run", ["update"]) if "regressions" in record]
    assert made[-1]["update"] == 20 and made[-1]["regressions"] == 40, (
        "two updates in a learner step, as cta_ratio says"
    )


def test_agent_and_algorithm_that_are_not_there_are_refused():
    run = ["train", "hilt_example.recipes:lamp_with_a_person", "--run", "run"]
    assert "no agent named 'bandi'; did you mean 'bandit'?" in refused(*run, "agent.kind=bandi")
    assert "no algorithm named 'regresion'; did you mean 'regression'?" in refused(*run, "algorithm=regresion")
    assert "algorithm_options={'strength': 2} would do nothing: it needs another algorithm" in refused(
        *run, "algorithm_options.strength=2"
    )


# --- a dataset format and a metrics sink


def test_format_is_listed_written_recognized_and_read(tuned: Path, tmp_path: Path):
    assert "json-lines" in hilt("data", "formats")
    source = tuned / "tasks" / "example-up" / "demonstrations" / "log"
    hilt("data", "convert", str(source), "lines", "--to", "json-lines")
    assert "3" in hilt("data", "inspect", "lines")
    hilt("data", "convert", "lines", "back", "-o", "first=1")
    with Log.open(source, "r") as before, Log.open(tmp_path / "back", "r") as after:
        assert len(after.trajectories()) == 2
        theirs = [
            log.read(log.trajectory_keys(log.trajectories()[-1]), ["actions", "observations"])
            for log in (before, after)
        ]
        np.testing.assert_array_equal(*(read["actions"] for read in theirs))
    hilt("data", "convert", str(source), "named", "--to", "hilt_example:json_lines")


def test_sink_gets_every_record(tmp_path: Path):
    hilt(*TRAIN, "sinks=[tally]")
    counts = json.loads((tmp_path / "run" / "tally.json").read_text())
    assert counts["run"] == "run" and counts["episode"] == len(read_metrics(tmp_path / "run", ["episode"]))
    assert "no sink named 'taly'; did you mean 'tally'?" in refused(*TRAIN, "sinks=[taly]")


# --- code that only a file names

FILES = {
    "hilt.vla.train": ("lamps", ["policy: linear", "estimator: grpo", "loss: clipped", "classifier: ''", "sinks: []"]),
    "hilt.hil.launch": (
        "lamp_with_a_person",
        ["kind: actor_critic", "algorithm: rlpd", "classifier: ''", "operator: ''", "sinks: []"],
    ),
}


@pytest.mark.parametrize("module", FILES)
def test_nothing_that_only_a_file_names_is_imported(module: str, tmp_path: Path):
    """The settings of a run are changed by somebody else: whichever of them names
    code, it is refused before it is imported."""
    from hilt_example import recipes

    recipe, lines = FILES[module]
    importlib.import_module(module).begin_run(tmp_path / "run", recipe, getattr(recipes, recipe)())
    (tmp_path / "suspect.py").write_text("raise AssertionError('it was imported')\n")
    settings = tmp_path / "run" / "config.yaml"
    before = settings.read_text()
    for line in lines:
        assert line in before, before
        key, _, value = line.partition(" ")
        settings.write_text(before.replace(line, f"{key} {'[suspect:Thing]' if value == '[]' else 'suspect:Thing'}", 1))
        resume = ["train", "--run", "run", "--resume"]
        for command in (resume, [*resume, "--dry-run"], *([["eval", "run"]] if key == "policy:" else [])):
            said = refused(*command)
            assert "names 'suspect:Thing', code that is not Hilt's; nothing of it was run" in said, (
                line,
                command,
                said,
            )
            assert "process" not in said, "no learner and no actor was started"
    assert "suspect" not in sys.modules
