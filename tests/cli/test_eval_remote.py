"""``hilt eval RUN_OR_TASK --policy ws://...``: a policy that runs elsewhere tries the tasks of a run, or one task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from hilt import cli
from hilt.policies.base import ObservedFields
from hilt.policies.vla.observation_adapters import SUITES, Suite
from hilt.serving import PolicyServer
from hilt.serving.policy_server import ServerAccess
from hilt.vla import train
from tests.serving.served_toy import Known
from tests.serving.test_remote_policy import openpi_server
from tests.value.chosen import save_verifier
from tests.vla import toy_vla


class Turn(Known):
    """Turns the light as the words say; sampled, it does the contrary."""

    chunk, action_dim = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.fields = ObservedFields(("full_image",), 1)

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        signs = [
            (1.0 if seen["instruction"] == "turn it up" else -1.0) * (-1 if sample else 1) for seen in observations
        ]
        return np.array(signs, np.float32)[:, None, None].repeat(2, 1), {}


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with PolicyServer(Turn(), 42, access=ServerAccess(port=0)) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    train.begin_run(tmp_path / "run", "toy", toy_vla.config())
    return tmp_path / "run"


def evaluated(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["eval", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_the_tasks_of_a_run_are_tried_by_a_policy_that_runs_elsewhere(run: Path, server: PolicyServer):
    said = evaluated(run, "--policy", server.url, "--json", run.parent / "out.json")
    assert f"at {server.url}, version 42, actions the most likely, no take-overs" in said
    assert "all 2 tasks, split test: success in 6 of 6 episodes" in said
    assert [one["success"] for one in json.loads((run.parent / "out.json").read_text())] == [1.0, 1.0]
    assert len(list(run.parent.glob("evaluations/*/test-00000042/evaluation.json"))) == 2
    assert not (run / "evaluations").exists(), "those are of the run's own policies"
    said = evaluated(run, "--policy", server.url, "--sample", "--episodes", 1)
    assert "actions sampled" in said and "success in 0 of 2 episodes" in said


def test_the_best_of_its_chunks_is_chosen_here(run: Path, server: PolicyServer):
    verifier = save_verifier(run.parent / "verifier", {"state": "state"}, 1, 2, 1)
    chosen = ("--policy", server.url, "--episodes", 1, "--verifier", verifier, "--json", run.parent / "out.json")
    said = evaluated(run, *chosen, "--best-of", 2)
    assert "best of 2" in said and "ms to judge, for each plan" in said
    found = json.loads((run.parent / "out.json").read_text())
    assert [one["execution"]["best_of"] for one in found] == [2, 2]
    chosen = (*chosen, "--episodes", 9)
    assert "7 draws of this RemotePolicy are all the same" in evaluated(run, *chosen, "--best-of", 8, code=1)


def test_a_task_is_tried_without_a_run(run: Path, server: PolicyServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SUITES, "tests.vla", Suite(lambda raw: {"full_image": raw["front"], "state": raw["state"]}))
    assert "3 of 3: 100.0%" in evaluated(toy_vla.UP, "--policy", server.url)


def test_an_openpi_server_is_tried(run: Path):
    def infer(given: dict[str, Any]) -> Any:
        return {"actions": np.full((2, 1), 1.0 if given["prompt"] == "turn it up" else -1.0)}

    with openpi_server(infer) as url:
        said = evaluated(run, "--policy", url)
        assert "success in 6 of 6 episodes" in said and "version 0, actions sampled" in said
        assert "is openpi's, and decides that" in evaluated(run, "--policy", url, "--sample", code=1)


def test_a_policy_of_another_robot_is_refused_naming_both_sides(run: Path):
    known = Known()
    known.fields = None
    with PolicyServer(known, access=ServerAccess(port=0)) as server:
        said = evaluated(run, "--policy", server.url, code=1)
        assert f"{server.url} answers with actions of 2 numbers, and {toy_vla.UP} takes [1]: the policy is of" in said
    with PolicyServer(Known(), access=ServerAccess(port=0)) as server:
        said = evaluated(run, "--policy", server.url, code=1)
        assert "has no 'wrist_image' (openpi: 'observation/wrist_image'), which the policy looks at; it has" in said


def test_what_is_refused(run: Path, server: PolicyServer):
    for words, expected in (
        ([run, "--policy", server.url, "--checkpoint", "3"], "the server chooses the weights"),
        ([run, "--policy", server.url, "--workers", "2"], "one process asks the policy"),
        ([run, "--policy-key", "x.key"], "there is no --policy ws://HOST:PORT that it is for"),
        ([run, "--policy", "runs/x"], "expected ws://HOST:PORT"),
        (["no/such", "--policy", server.url], "no/such: expected the folder of a run, or a task of a suite"),
    ):
        assert expected in evaluated(*words, code=1)
