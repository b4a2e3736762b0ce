"""``hilt serve-policy`` as a person meets it: a run whose newer weights are taken up, a folder, and what is refused."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from hilt import cli
from hilt.cli.servers.serve_policy import compile_aside
from hilt.core.checksums import write_json
from hilt.hil.config import Hil
from hilt.policies.conditioned import ConditionedPolicy
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.runs import checkpoint
from hilt.serving import PolicyServer, RemotePolicy
from hilt.serving.observation_names import our_name
from hilt.vla import train
from hilt.vla.trained import SIZES
from tests.serving.served_toy import WAIT_S, OpenpiClient, connected
from tests.value.chosen import save_verifier
from tests.vla import toy_vla
from tests.wire.processes import free_ports_in_a_row

SIZE = {"cameras": ["full_image"], "image_size": 16, "state_dim": 1, "action_dim": 1}


def save(run: Path, step: int, policy: SmallVLA) -> None:
    weights = {name: value.detach().clone() for name, value in policy.named_parameters()}
    checkpoint.save(run, step, {"shared": {"actor": {"trained": weights}}}, {}, keep=9)


def tiny(seed: int) -> SmallVLA:
    options = {**toy_vla.config().policy_options, **SIZE, "cameras": ("full_image",)}
    return SmallVLA(SmallVLAConfig(**options), seed=seed).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of post-training with a checkpoint, made without training."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train.begin_run(folder, "toy", toy_vla.config())
    write_json(folder / SIZES, SIZE)
    save(folder, 3, tiny(0))
    return folder


def seen() -> dict[str, Any]:
    picture = np.full((16, 16, 3), 99, np.uint8)
    return {"observation/image": picture, "observation/state": np.ones(1, np.float32), "prompt": "turn it up"}


def own_answer(policy: SmallVLA) -> np.ndarray:
    ours = {"full_image": seen()["observation/image"], "state": np.ones(1, np.float32), "instruction": "turn it up"}
    return policy.act([ours], sample=False)[0][0]


def served(monkeypatch: pytest.MonkeyPatch, words: list[str], ask: Callable[[OpenpiClient], None]) -> str:
    """Runs the command while `ask` is called in a thread, then ends it by Ctrl-C. Returns its output."""
    urls: queue.Queue[str] = queue.Queue()
    problems: list[Exception] = []
    serve = PolicyServer.serve

    async def announced(self: PolicyServer, ready: Callable[[], None], signals: Any) -> None:
        await serve(self, lambda: (ready(), urls.put(self.url)), signals)

    def client() -> None:
        try:
            with connected(urls.get(timeout=WAIT_S)) as one:
                ask(one)
        except Exception as error:
            problems.append(error)
            raise
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PolicyServer, "serve", announced)
    thread = threading.Thread(target=client)
    thread.start()
    done = CliRunner().invoke(cli.app, ["serve-policy", *words, "--port", "0"])
    thread.join(WAIT_S)
    if problems:
        raise problems[0]
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_is_served_and_newer_weights_are_taken_up(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(run, tmp_path / "run")

    def ask(client: OpenpiClient) -> None:
        assert (client.metadata["version"], client.metadata["chunk"], client.metadata["action_dim"]) == (3, 2, 1)
        answer = client.ask(seen())
        assert answer["version"] == 3
        np.testing.assert_allclose(answer["actions"], own_answer(tiny(0)), atol=1e-6)
        save(folder, 8, tiny(1))
        for _ in range(int(WAIT_S / 0.02)):
            if (answer := client.ask(seen()))["version"] == 8:
                break
            threading.Event().wait(0.02)
        np.testing.assert_allclose(answer["actions"], own_answer(tiny(1)), atol=1e-6)

    said = served(monkeypatch, [str(folder)], ask)
    assert f"{folder}, version 3, at ws://127.0.0.1:" in said and "hilt eval RUN --policy ws://127.0.0.1:" in said


def test_a_folder_is_served_with_options_of_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny(2).save_pretrained(tmp_path / "policy")

    def ask(client: OpenpiClient) -> None:
        assert client.metadata["version"] == 0 and client.metadata["sample"] is True
        drawn = [client.ask(seen())["actions"] for _ in range(20)]
        assert any((one != drawn[0]).any() for one in drawn)
        ours = {our_name(name): value for name, value in seen().items()}
        with contextlib.closing(RemotePolicy(wire)) as remote:
            np.testing.assert_allclose(
                remote.act([ours], sample=False)[0][0], client.ask({**ours, "sample": False})["actions"], atol=1e-6
            )

    port = free_ports_in_a_row(2)
    wire = f"hilt://127.0.0.1:{port}"
    words = [str(tmp_path / "policy"), "-o", "decode=likeliest", "--sample", "--wire-port", str(port)]
    said = served(monkeypatch, words, ask)
    assert "version 0, at ws://" in said and f" and {wire}\n" in said


def test_a_policy_within_another_one_is_compiled_in_the_background_too():
    inner = tiny(0)
    outer = ConditionedPolicy(inner)
    compile_aside(outer)
    assert inner.compiles_aside and outer.compiles_aside and not tiny(0).compiles_aside


def test_the_best_of_several_chunks_is_served_and_newer_weights_are_taken_up(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = shutil.copytree(run, tmp_path / "run")
    verifier = save_verifier(tmp_path / "verifier", {"state": "state"}, 1, 2, 1)

    def ask(client: OpenpiClient) -> None:
        assert client.metadata["policy"] == f"{folder}, best of 6"
        first = client.ask(seen())
        assert first["version"] == 3 and first["actions"].shape == (2, 1)
        save(folder, 8, tiny(1))
        for _ in range(int(WAIT_S / 0.02)):
            if client.ask(seen())["version"] == 8:
                break
            threading.Event().wait(0.02)
        else:
            raise AssertionError("the newer weights were not taken up")
        page = urllib.request.urlopen(
            f"http://127.0.0.1:{client.socket.remote_address[1]}/metrics", timeout=WAIT_S
        ).read()
        assert b"hilt_serving_best_of 6.0" in page and b"hilt_serving_judge_ms " in page

    served(monkeypatch, [str(folder), "--best-of", "6", "--verifier", str(verifier)], ask)


def refused(*words: object) -> str:
    done = CliRunner().invoke(cli.app, ["serve-policy", *map(str, words)])
    assert done.exit_code == 1 and done.output.count("error: ") == 1, done.output
    return done.output


def test_what_is_refused(run: Path, tmp_path: Path):
    assert "--key-file policy.key; or give TLS" in refused(run, "--host", "0.0.0.0")
    assert "expected best, last, or the number of one: 3" in refused(run, "--checkpoint", "first")
    assert "they are for the wire; give --wire-port N" in refused(run, "--keys", "keys")
    assert "which has its options. Leave -o out" in refused(run, "-o", "width=3")
    tiny(0).save_pretrained(tmp_path / "policy")
    assert "--checkpoint last" in refused(tmp_path / "policy", "--checkpoint", "last")
    assert "there is no config.json in it" in refused(tmp_path)
    assert "is no value model" in refused(tmp_path / "policy", "--best-of", 4, "--verifier", tmp_path)
    (tmp_path / "hil").mkdir()
    from hilt.core.config import freeze

    freeze(Hil(), tmp_path / "hil" / "config.yaml")
    assert "is a run with a person in the loop" in refused(tmp_path / "hil")
