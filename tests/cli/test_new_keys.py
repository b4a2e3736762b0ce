"""``hilt keys``, through the command line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.wire.keys import ClientKeys, ServerKeys, list_keys


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["keys", *arguments], env={"COLUMNS": "200"})


def test_new_makes_them_and_says_where_they_go():
    result = run("new", "learner", "actor-1", "actor-2")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "made keys/learner.key (secret, mode 0600)",
        "made keys/learner.pub (public)",
        "made keys/actor-1.key (secret, mode 0600)",
        "made keys/actor-1.pub (public)",
        "made keys/actor-2.key (secret, mode 0600)",
        "made keys/actor-2.pub (public)",
        "",
        "The learner's machine needs learner.key and actor-1.pub, actor-2.pub in its folder of keys.",
        "The machine of actor-1 needs actor-1.key and learner.pub.",
        "The machine of actor-2 needs actor-2.key and learner.pub.",
        (
            "Copy the files with scp -p, which keeps their modes: a .key file must have mode 0600 (chmod "
            "600) and be nowhere else."
        ),
        "Then give wire.keys=keys to hilt learner and hilt actor (in Python, keys='keys' to make_trainer_config).",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path("keys").glob("*.key")} == {0o600}
    ServerKeys.load("keys")
    assert ClientKeys.load("keys", "actor-2").name == "actor-2"


def test_one_side_alone_and_another_folder():
    assert (
        "The learner's machine needs learner.key and every actor's .pub in its folder"
        in run("new", "learner", "--dir", "a/b").stdout
    )
    text = run("new", "actor-3", "--dir", "c").stdout
    assert "The learner's machine needs actor-3.pub in its folder of keys." in text
    assert "Then give wire.keys=c to hilt learner and hilt actor (in Python, keys='c' to make_trainer_config)." in text
    assert {path.as_posix() for path in Path().rglob("*.key")} == {"a/b/learner.key", "c/actor-3.key"}


def test_nothing_is_overwritten():
    run("new", "learner")
    before = Path("keys/learner.key").read_bytes()
    result = run("new", "actor-1", "learner")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: keys/learner.key: it exists already, and keys are never overwritten. Choose another name, or "
        "move this file away first. See: hilt docs wire\n"
    )
    assert Path("keys/learner.key").read_bytes() == before
    assert not Path("keys/actor-1.key").exists()


def test_list():
    run("new", "learner", "actor-1")
    Path("keys/actor-1.key").unlink()
    result = run("list")
    assert result.exit_code == 0
    marks = {key.name: key.fingerprint for key in list_keys("keys")[0]}
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["name", "here", "fingerprint"],
        ["learner", "secret", "and", "public", marks["learner"]],
        ["actor-1", "public", marks["actor-1"]],
    ]


def test_list_names_what_is_wrong_and_shows_the_rest():
    run("new", "learner", "actor-1")
    Path("keys/learner.key").chmod(0o640)
    result = run("list")
    assert result.exit_code == 1
    assert "actor-1  secret and public" in result.stdout and "learner  public" in result.stdout
    assert result.stderr == (
        "error: keys/learner.key: others may use this secret key (mode 0640, expected 0600). Run: "
        "chmod 600 keys/learner.key\n"
    )


def test_list_of_nothing():
    result = run("list")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: keys: no such folder of keys. Make keys with: hilt keys new learner ACTOR --dir keys, or copy"
    )
    Path("keys").mkdir()
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "keys: no keys. Make them with: hilt keys new learner ACTOR\n")


def test_a_name_is_needed():
    result = run("new")
    assert result.exit_code == 2
    assert "NAME..." in result.stderr
