"""Keys on disk, and real sockets that let in those on the list and nobody else."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from hilt.core.errors import ConfigError, FormatError, StorageError
from hilt.wire import keys as keys_module
from hilt.wire.keys import ClientKeys, Gatekeeper, KeyFile, ServerKeys, fingerprint, list_keys, new_keys, read_key

DEADLINE_MS = 120_000
MOMENT_MS = 150


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The keys of a learner and two actors."""
    new_keys(tmp_path / "keys", ["learner", "actor-1", "actor-2"])
    return tmp_path / "keys"


class Door:
    """A learner's socket behind a gatekeeper, and actors' sockets in a context of their own."""

    def __init__(self, folder: Path, gatekeeper: bool = True):
        self.folder = folder
        self.context, self.outside = zmq.Context(), zmq.Context()
        self.context.linger = self.outside.linger = 0
        keys = ServerKeys.load(folder)
        self.gatekeeper = Gatekeeper(self.context, keys) if gatekeeper else None
        self.socket = self.context.socket(zmq.ROUTER)
        keys.secure(self.socket)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def knock(self, keys: ClientKeys | None) -> Any:
        client = self.outside.socket(zmq.DEALER)
        if keys is not None:
            keys.secure(client)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        # refused before it spoke: it has nobody to say it to, and would wait for ever
        with contextlib.suppress(zmq.Again):
            client.send(b"hello", zmq.NOBLOCK)
        return client

    def enters(self, keys: ClientKeys | None) -> bool:
        """Whether what this client says is heard and answered. A refusal is known from the gatekeeper's count."""
        assert self.gatekeeper is not None
        before, client = self.gatekeeper.refused, self.knock(keys)
        deadline = time.monotonic() + DEADLINE_MS / 1000
        while not self.socket.poll(20):
            if self.gatekeeper.refused > before:
                assert not self.socket.poll(MOMENT_MS) and not client.poll(MOMENT_MS)
                return False
            assert time.monotonic() < deadline, "neither let in nor refused"
        sender, _ = self.socket.recv_multipart()
        self.socket.send_multipart([sender, b"welcome"])
        assert client.poll(DEADLINE_MS) and client.recv() == b"welcome"
        return True

    def close(self) -> None:
        self.outside.destroy(0)
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self.context.destroy(0)


@pytest.fixture
def door(folder: Path) -> Iterator[Door]:
    made = Door(folder)
    yield made
    made.close()


def strange_keys(tmp_path: Path, server: Path) -> ClientKeys:
    new_keys(tmp_path / "strange", ["actor-1"])
    shutil.copy(server / "learner.pub", tmp_path / "strange")
    return ClientKeys.load(tmp_path / "strange")


# --- who gets in
# ------------------------------------------------------------------------------------------------------------------


def test_listed_key_is_accepted_and_known_by_name(door: Door, folder: Path):
    assert door.enters(ClientKeys.load(folder, "actor-1"))
    client = door.knock(ClientKeys.load(folder, "actor-2"))
    assert door.socket.poll(DEADLINE_MS)
    frame = door.socket.recv_multipart(copy=False)[1]
    assert frame.get("User-Id") == "actor-2" and not client.closed
    assert (door.gatekeeper.let_in, door.gatekeeper.refused) == (2, 0)


def test_a_stranger_gets_no_answer(door: Door, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stranger = strange_keys(tmp_path, folder)
    with caplog.at_level(logging.WARNING, "hilt.wire"):
        assert not door.enters(stranger)
        assert not door.enters(stranger)
    assert [record.getMessage() for record in caplog.records] == [
        f"the key {fingerprint(stranger.public)}, from 127.0.0.1, is not on the list and was "
        f"refused (1 refused so far). To let it in, put its .pub file into {folder}."
    ], "once in a while, not for each"
    assert door.enters(ClientKeys.load(folder, "actor-1"))
    assert (door.gatekeeper.let_in, door.gatekeeper.refused) == (1, 2)


def test_the_learners_own_key_is_no_actors(door: Door, folder: Path):
    shutil.copy(folder / "learner.pub", folder / "copy.pub")
    assert not door.enters(ClientKeys.load(folder, "learner"))


def test_connections_without_keys_or_to_the_wrong_learner_are_refused(door: Door, folder: Path, tmp_path: Path):
    keys = ClientKeys.load(folder, "actor-1")
    new_keys(tmp_path / "other", ["learner"])
    wrong = ClientKeys(keys.name, keys.public, keys.secret, read_key(tmp_path / "other" / "learner.pub").public)
    clients = [door.knock(None), door.knock(wrong)]
    assert not door.socket.poll(3 * MOMENT_MS)
    assert not any(client.poll(1) for client in clients)
    assert door.enters(keys)


def test_socket_without_a_gatekeeper_accepts_no_client(folder: Path):
    door = Door(folder, gatekeeper=False)
    client = door.knock(ClientKeys.load(folder, "actor-1"))
    assert not door.socket.poll(3 * MOMENT_MS) and not client.poll(1)
    door.close()


def test_the_list_may_change_while_the_learner_runs(door: Door, folder: Path, tmp_path: Path):
    stranger, known = strange_keys(tmp_path, folder), ClientKeys.load(folder, "actor-1")
    inside = door.knock(known)
    assert door.socket.poll(DEADLINE_MS)
    door.socket.recv_multipart()
    for _ in range(5):
        assert not door.enters(stranger)
        shutil.copy(tmp_path / "strange" / "actor-1.pub", folder / "new.pub")
        assert door.enters(stranger)
        (folder / "new.pub").unlink()
        (folder / "actor-1.pub").rename(folder / "actor-1.gone")
        assert not door.enters(known)
        (folder / "actor-1.gone").rename(folder / "actor-1.pub")
        assert door.enters(known)
    inside.send(b"still here")
    assert door.socket.poll(DEADLINE_MS)


def test_a_file_that_gets_another_key_in_it_is_seen_soon(door: Door, folder: Path, tmp_path: Path):
    stranger = strange_keys(tmp_path, folder)
    assert not door.enters(stranger)
    (folder / "actor-1.pub").write_bytes((tmp_path / "strange" / "actor-1.pub").read_bytes())
    deadline = time.monotonic() + 120
    while not door.enters(stranger):
        assert time.monotonic() < deadline
    assert not door.enters(ClientKeys.load(folder, "actor-1"))


def test_a_damaged_file_keeps_no_other_out(door: Door, folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / "actor-2.pub").write_text("nonsense")
    os.mkfifo(folder / "pipe.pub")
    (folder / "folder.pub").mkdir()
    with caplog.at_level(logging.WARNING, "hilt.wire"):
        assert not door.enters(ClientKeys.load(folder, "actor-2"))
        assert door.enters(ClientKeys.load(folder, "actor-1"))
    told = [record.getMessage() for record in caplog.records if "actor-2.pub" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith(
        f"{folder}/actor-2.pub: not a whole key (no public key is in it). Copy it again"
    )


def test_missing_key_folder_accepts_no_client(door: Door, folder: Path, caplog: pytest.LogCaptureFixture):
    keys = ClientKeys.load(folder, "actor-1")
    folder.rename(folder.with_name("moved"))
    with caplog.at_level(logging.WARNING, "hilt.wire"):
        assert not door.enters(keys)
    assert f"{folder}: the keys cannot be read, so no new client is accepted" in caplog.text
    folder.with_name("moved").rename(folder)
    assert door.enters(keys)


def test_the_folder_is_not_read_for_every_stranger(folder: Path, monkeypatch: pytest.MonkeyPatch):
    keys = ServerKeys.load(folder)
    os.utime(folder, (1, 1))
    reads = []
    monkeypatch.setattr(ServerKeys, "allowed", lambda self: reads.append(1) or ({}, []))
    monkeypatch.setattr(keys_module, "LOOK_AGAIN_S", 60.0)
    context = zmq.Context()
    gatekeeper = Gatekeeper(context, keys)
    for _ in range(1000):
        assert gatekeeper.reply(request())[2] == b"400"
    assert len(reads) == 1 and gatekeeper.refused == 1000
    gatekeeper.close()
    context.destroy(0)


# --- the gatekeeper's protocol
# ----------------------------------------------------------------------------------------------------


def request(**changes: bytes) -> list[bytes]:
    frames = {
        "version": b"1.0",
        "id": b"7",
        "domain": b"hilt",
        "address": b"127.0.0.1",
        "identity": b"",
        "mechanism": b"CURVE",
    }
    return list({**frames, "key": bytes(32), **changes}.values())


def test_a_malformed_question_gets_a_refusal(door: Door, folder: Path):
    known = z85.decode(read_key(folder / "actor-1.pub").public)
    assert door.gatekeeper.reply(request(key=known)) == [b"1.0", b"7", b"200", b"", b"actor-1", b""]
    malformed = [
        [],
        [b""],
        [b"1.0"],
        request()[:6],
        [*request(key=known), b""],
        request(version=b"2.0", key=known),
        request(domain=b"", key=known),
        request(mechanism=b"NULL", key=known),
        request(mechanism=b"PLAIN", key=known),
        request(key=known[:31]),
        request(key=b""),
    ]
    for frames in malformed:
        reply = door.gatekeeper.reply(frames)
        assert reply[2:] == [b"400", b"malformed", b"", b""] and reply[0] == b"1.0"
    assert door.gatekeeper.reply(request(id=b"9"))[1:4] == [b"9", b"400", b"unknown key"]
    asking = door.context.socket(zmq.REQ)
    asking.connect(keys_module.ZAP_ADDRESS)
    for frames in malformed[1:]:  # and through the real socket
        asking.send_multipart(frames)
        assert asking.poll(DEADLINE_MS) and asking.recv_multipart()[2] == b"400"
    asking.close(0)
    assert door.enters(ClientKeys.load(folder, "actor-1"))


def test_two_in_one_context(door: Door, folder: Path):
    with pytest.raises(ConfigError, match=r"^a second server with keys in one zmq context; expected one"):
        Gatekeeper(door.context, ServerKeys.load(folder))


def test_gatekeeper_ends_with_its_context(folder: Path):
    context = zmq.Context()
    gatekeeper = Gatekeeper(context, ServerKeys.load(folder))
    context.term()
    gatekeeper._thread.join(DEADLINE_MS / 1000)
    assert not gatekeeper._thread.is_alive()
    gatekeeper.close()


# --- files
# ----------------------------------------------------------------------------------------------------------------------


def test_new_keys_are_whole_and_private(tmp_path: Path):
    old = os.umask(0)
    try:
        paths = new_keys(tmp_path / "deep" / "keys", ["learner", "a_1"])
    finally:
        os.umask(old)
    assert [path.name for path in paths] == ["learner.key", "learner.pub", "a_1.key", "a_1.pub"]
    assert sorted(paths) == sorted((tmp_path / "deep" / "keys").iterdir()), "nothing else is left there"
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o644, 0o600, 0o644]
    secret, public = read_key(paths[0]), read_key(paths[1])
    assert secret.public == public.public and public.secret is None
    assert zmq.curve_public(secret.secret) == public.public
    assert secret.public != read_key(paths[2]).public


def test_secrets_are_not_shown(folder: Path):
    for keys in (read_key(folder / "learner.key"), ServerKeys.load(folder), ClientKeys.load(folder, "actor-1")):
        assert repr(keys.secret) not in repr(keys) and "secret=" not in repr(keys)


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", ".hidden", "-x", "a.pub", "x" * 65, "é"])
def test_names(tmp_path: Path, name: str):
    with pytest.raises(ConfigError) as error:
        new_keys(tmp_path, ["fine", name])
    assert (
        str(error.value)
        == f"{name!r}: not a name for a key; expected up to 64 letters, digits, '-' and '_', such as actor-1."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_name_given_twice(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^'a': given twice; expected each name once"):
        new_keys(tmp_path, ["a", "b", "a"])


@pytest.mark.parametrize("end", [".key", ".pub"])
@pytest.mark.parametrize("how", ["before", "meanwhile", "a link to nowhere"])
def test_keys_are_not_overwritten(tmp_path: Path, end: str, how: str, monkeypatch: pytest.MonkeyPatch):
    there = tmp_path / f"learner{end}"
    if how == "a link to nowhere":
        there.symlink_to(tmp_path / "nowhere")
    else:
        there.write_text("mine")
    if how == "meanwhile":
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(ConfigError) as error:
        new_keys(tmp_path, ["learner"])
    cure = "Choose another name, or move this file away first."
    assert str(error.value) == f"{there}: it exists already, and keys are never overwritten. {cure}"
    assert there.is_symlink() or there.read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "keys").write_text("")
    with pytest.raises(StorageError, match="keys: Not a directory"):
        new_keys(tmp_path / "keys", ["learner"])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o610, 0o700 | 0o007])
def test_a_secret_that_others_may_read(folder: Path, mode: int):
    path = (folder / "learner.key").rename(folder / "my learner.key")
    path.chmod(mode)
    with pytest.raises(ConfigError) as error:
        ServerKeys.load(folder, "my learner")
    assert (
        str(error.value)
        == f"{path}: others may use this secret key (mode {mode:04o}, expected 0600). Run: chmod 600 '{path}'"
    )
    path.chmod(0o400)
    assert ServerKeys.load(folder, "my learner").name == "my learner"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no public key is in it"),
        (b"\xff\xfe\x00", "no public key is in it"),
        (b"public = tooshort\n", "no public key is in it"),
        (b"x" * 10_000, "no public key is in it"),
        (b"secret = " + b"0" * 40, "no public key is in it"),
        (b"public = %s\nsecret = " + b"0" * 40, "its two halves do not belong together"),
        (b"public = " + b"0" * 40 + b"\nsecret = %s", "its two halves do not belong together"),
        (b"public = %s\nsecret = %s", "its two halves do not belong together"),
    ],
)
def test_a_damaged_secret(folder: Path, content: bytes, why: str):
    path = folder / "learner.key"
    whole = read_key(path)
    path.write_bytes(
        content.replace(b"public = %s", b"public = " + whole.public).replace(b"%s", zmq.curve_keypair()[1])
    )
    with pytest.raises(FormatError) as error:
        ServerKeys.load(folder)
    cure = "Copy it again from where it was made, or make new ones with: hilt keys new NAME"
    assert str(error.value) == f"{path}: not a whole key ({why}). {cure}"


def test_every_cut_of_a_key_file_is_found(folder: Path):
    for name in ("learner.key", "learner.pub"):
        path = folder / name
        whole = path.read_bytes()
        for size in range(len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises((FormatError, ConfigError)):
                read_key(path)
        path.write_bytes(whole[:-1])
        assert read_key(path).name == "learner"


def test_swapped_files(folder: Path):
    public, secret = (folder / "actor-1.pub").read_bytes(), (folder / "actor-1.key").read_bytes()
    (folder / "actor-1.key").write_bytes(public)
    with pytest.raises(ConfigError) as error:
        ClientKeys.load(folder, "actor-1")
    assert str(error.value) == (
        f"{folder}/actor-1.key: this is a public key under the name of a secret one. Copy actor-1.key "
        "here from where it was made."
    )
    (folder / "actor-1.pub").write_bytes(secret)
    with pytest.raises(ConfigError) as error:
        ServerKeys.load(folder)
    assert str(error.value) == (
        f"{folder}/actor-1.pub: this is a secret key under the name of a public one, so others may have seen it. "
        f"Remove it, and make a new pair with: hilt keys new NAME --dir {folder}"
    )


def test_missing_keys_are_reported(folder: Path, tmp_path: Path):
    def said(load: Any, *arguments: Any) -> str:
        with pytest.raises(ConfigError) as error:
            load(*arguments)
        return str(error.value)

    nowhere = tmp_path / "nowhere"
    cure = f"Make keys with: hilt keys new learner ACTOR --dir {nowhere}, or copy the folder from where they were made."
    assert (
        said(ServerKeys.load, nowhere) == said(ClientKeys.load, nowhere) == f"{nowhere}: no such folder of keys. {cure}"
    )

    several = f"{folder}: several actors' keys are here (actor-1, actor-2). Say which is used: key_name='actor-1'."
    assert said(ClientKeys.load, folder) == several
    have = "secret keys here: actor-1.key, actor-2.key, learner.key"
    assert said(ClientKeys.load, folder, "actor-3") == (
        f"{folder}/actor-3.key: no such key ({have}). "
        f"Make it with: hilt keys new actor-3 --dir {folder}, or copy it from where it was made."
    )
    for name in ("actor-1.key", "actor-2.key", "actor-2.pub"):
        (folder / name).unlink()
    assert said(ClientKeys.load, folder) == (
        f"{folder}: no secret key of an actor is here (found: actor-1.pub, learner.key, learner.pub). "
        f"Copy ACTOR.key here from where it was made, or make it with: hilt keys new ACTOR --dir {folder}"
    )
    (folder / "learner.key").rename(folder / "actor-1.key")
    assert said(ServerKeys.load, folder).startswith(
        f"{folder}/learner.key: no such key (secret keys here: actor-1.key). Make it with:"
    )
    (folder / "learner.pub").unlink()
    assert said(ClientKeys.load, folder) == (
        f"{folder}/learner.pub: no such file, without which the learner cannot be known. Copy it "
        "from the learner's machine."
    )


def test_an_actors_machine_needs_two_files(folder: Path, tmp_path: Path):
    robot = tmp_path / "robot"
    robot.mkdir()
    for name in ("actor-1.key", "learner.pub"):
        shutil.copy2(folder / name, robot)
    keys = ClientKeys.load(robot)
    assert keys.name == "actor-1" and keys.server == ServerKeys.load(folder).public
    shutil.copy2(folder / "learner.key", robot)  # one machine for both
    assert ClientKeys.load(robot) == keys


def test_list_keys(folder: Path):
    (folder / "actor-1.key").unlink()
    (folder / "actor-2.pub").write_text("")
    (folder / "actor-2.key").chmod(0o644)
    (folder / "notes.txt").write_text("")
    found, problems = list_keys(folder)
    assert [(key.name, key.secret is not None) for key in found] == [("learner", True), ("actor-1", False)]
    assert [str(problem).split(": ")[0] for problem in problems] == [f"{folder}/actor-2.key", f"{folder}/actor-2.pub"]


def test_fingerprints():
    assert fingerprint(b"0" * 40) == KeyFile("x", b"0" * 40).fingerprint == "9692-e67b-8378-a6f6"
    assert fingerprint(b"0" * 40) != fingerprint(b"1" * 40)
