"""Names of the Hugging Face Hub, against a server that speaks its HTTP interface, through the Hub's own library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli import hub_transfer as transfer
from hilt.core import hub
from hilt.core.errors import ConfigError
from hilt.replay import Log, Schema
from tests.core.hub_server import HubServer
from tests.effort import need

need("huggingface_hub")

FILES = {
    "config.json": b'{"model_type": "hilt_small_vla"}',
    "model.safetensors": bytes(range(256)) * 20,
    "README.md": b"# mine\n",
}
CODE = {"modeling.py": b"raise SystemExit('run')", "pytorch_model.bin": b"\x80\x04" * 900}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    made = HubServer()
    for name, value in {
        hub.ROOT: str(tmp_path / "hub"),
        "HF_ENDPOINT": made.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_test",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, made.endpoint)
    read = {
        "ENDPOINT": made.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": True,
    }
    for name, constant in read.items():  # what the library took from the environment when it was imported
        monkeypatch.setattr(constants, name, constant)
    yield made
    made.close()


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def hilt(*words: str, as_a_process: bool = False) -> Done:
    """As a process where asked, which is how a user runs it: then the Hub's library
    reads its settings from the environment."""
    if as_a_process:
        command, environment = [sys.executable, "-m", "hilt", *words], os.environ | {"COLUMNS": "300"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        return Done(ended.returncode, ended.stdout, ended.stderr)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, words)
    return Done(result.exit_code, result.stdout, result.stderr)


def name_in(said: str) -> str:
    return re.findall(r"hf:\S+@[0-9a-f]{40}", said)[-1]


def test_hub_fetch_gets_data_under_a_name_with_its_commit(server: HubServer):
    first = server.commit("model", "org/arm", {**FILES, **CODE})
    server.commit("model", "org/arm", {**FILES, "README.md": b"# newer\n"})
    done = hilt("fetch", f"hf:org/arm@{first}", as_a_process=True)
    assert done.exit_code == 0, done.stderr
    folder = hub.local(f"hf:org/arm@{first}")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != transfer.MANIFEST} == FILES
    assert "left on the Hub, for they are not data that Hilt reads: modeling.py, pytorch_model.bin" in done.stdout
    assert name_in(done.stdout) == f"hf:org/arm@{first}"
    assert not any("modeling.py" in request or ".bin" in request for request in server.requests), "not even asked for"

    newest = hilt("fetch", "hf:org/arm")
    assert (hub.local(name_in(newest.stdout)) / "README.md").read_bytes() == b"# newer\n"
    with pytest.raises(
        ConfigError, match=r"hf:org/arm: the name needs a commit \(@ and 40 digits\).*is on this machine"
    ):
        hub.local("hf:org/arm")


def test_datasets_keep_their_folders(server: HubServer):
    files = {
        "meta/info.json": b"{}",
        "data/chunk-000/file-000.parquet": b"PAR1" * 500,
        "videos/front/file-000.mp4": b"film" * 400,
    }
    commit = server.commit("dataset", "org/picks", {**files, "picks.py": b"raise SystemExit"})
    assert hilt("fetch", "hf:datasets/org/picks").exit_code == 0
    folder = hub.local(f"hf:datasets/org/picks@{commit}")
    assert {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != transfer.MANIFEST
    } == files
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_hub_only_fetch_uses_the_network(server: HubServer):
    commit = server.commit("model", "org/arm", FILES)
    done = hilt("train", "vla_tabletop", f"policy=hf:org/arm@{commit}", "--dry-run")
    assert (
        done.exit_code == 1
        and f"hf:org/arm@{commit} is not on this machine" in done.stderr
        and f"hilt fetch hf:org/arm@{commit}" in done.stderr
    )
    assert not server.requests


def test_a_file_that_is_not_what_the_hub_announced_is_refused_and_another_try_goes_on(server: HubServer):
    commit = server.commit("model", "org/arm", FILES)
    server.lies["model.safetensors"] = FILES["model.safetensors"][::-1]
    done = hilt("fetch", "hf:org/arm")
    assert done.exit_code == 1 and re.search(r"model.safetensors of hf:org/arm@\w+: its checksum is", done.stderr), (
        done.stderr
    )
    with pytest.raises(ConfigError, match="is not on this machine"):
        hub.local(f"hf:org/arm@{commit}")
    server.lies.clear()
    assert hilt("fetch", "hf:org/arm").exit_code == 0
    assert (hub.local(f"hf:org/arm@{commit}") / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_hub_fetch_verifies_again_without_the_network(server: HubServer):
    commit = server.commit("model", "org/arm", FILES)
    assert hilt("fetch", "hf:org/arm").exit_code == 0
    server.requests.clear()
    assert hilt("fetch", f"hf:org/arm@{commit}").exit_code == 0 and not server.requests
    (hub.local(f"hf:org/arm@{commit}") / "config.json").write_text("{}")
    done = hilt("fetch", f"hf:org/arm@{commit}")
    assert done.exit_code == 1 and "config.json has changed since it was fetched" in done.stderr


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../../evil.json": b"{}"}, "would be written outside of its folder; nothing was fetched"),
        ({"config.json": b"{}", "pytorch_model.bin": b"\x80"}, "has its weights in pytorch_model.bin only"),
        ({"run.py": b""}, "none of its 1 files is data"),
    ],
)
def test_repositories_that_are_refused(server: HubServer, files: dict[str, bytes], said: str, tmp_path: Path):
    server.commit("model", "org/arm", files)
    done = hilt("fetch", "hf:org/arm")
    assert done.exit_code == 1 and said in done.stderr
    assert not list(tmp_path.rglob("evil.json"))


@pytest.mark.parametrize("name", ["hf:org", "hf:org/name/more", "hf:../x", "hf:org/name@", "hf:org/na me"])
def test_names_that_are_none(name: str):
    with pytest.raises(ConfigError, match="expected hf:ORG/NAME or hf:datasets/ORG/NAME"):
        hub.parse(name)


def test_a_repository_that_is_not_there(server: HubServer):
    done = hilt("fetch", "hf:org/none")
    assert (
        done.exit_code == 1
        and done.stderr.count("\n") == 1
        and "hf:org/none was not fetched" in done.stderr
        and "HF_TOKEN" in done.stderr
    )


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_hub_push_and_fetch(server: HubServer, kind: str, tmp_path: Path):
    folder, name = tmp_path / "policy", "hf:datasets/org/mine" if kind == "dataset" else "hf:org/mine"
    for path, data in {**FILES, **CODE, "meta/tasks.jsonl": b"{}\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    done = hilt("push", str(folder), name, as_a_process=kind == "model")
    assert done.exit_code == 0, done.stderr
    assert "not pushed, for they are not data that hilt fetch takes: modeling.py, pytorch_model.bin" in done.stdout
    pushed = name_in(done.stdout)
    assert server.repositories[kind, "org/mine"][pushed.rpartition("@")[2]] == {**FILES, "meta/tasks.jsonl": b"{}\n"}, (
        "no code, no pickles"
    )
    assert server.private["org/mine"]
    assert hilt("fetch", pushed).exit_code == 0
    assert (hub.local(pushed) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_log_is_not_pushed_without_its_steps(server: HubServer, tmp_path: Path):
    with Log.create(tmp_path / "run" / "log", Schema.of({"rewards": np.float32(0)})) as log, log.episode() as episode:
        episode.append({"rewards": np.float32(1), "terminated": True})
    done = hilt("push", str(tmp_path / "run" / "log"), "hf:datasets/org/mine")
    assert done.exit_code == 1 and f"hilt data convert {tmp_path / 'run' / 'log'} NEW --to lerobot" in done.stderr
    (tmp_path / "run" / "policy").mkdir()
    done = hilt("push", str(tmp_path / "run"), "hf:org/mine")
    assert done.exit_code == 1 and f"for the policy, push {tmp_path / 'run' / 'policy'}" in done.stderr
    assert not server.repositories


def test_a_dataset_is_not_pushed_as_a_model(server: HubServer, tmp_path: Path):
    (tmp_path / "data" / "meta").mkdir(parents=True)
    (tmp_path / "data" / "meta" / "info.json").write_text('{"codebase_version": "v3.0"}')
    done = hilt("push", str(tmp_path / "data"), "hf:org/mine")
    assert done.exit_code == 1 and "push it to hf:datasets/org/mine" in done.stderr
    assert not server.repositories


def test_hub_missing_repository_is_an_error(server: HubServer):
    done = hilt("fetch", "hf:org/absent")
    assert done.exit_code == 1 and "no such repository or revision, or it is private" in done.stderr
