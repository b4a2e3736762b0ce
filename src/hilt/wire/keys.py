"""Who may speak with whom: ZeroMQ's CURVE keys in a folder, and the thread that lets only these in.

``NAME.key`` is a secret key with its public one, readable by its owner alone; ``NAME.pub`` is the
public one. The learner's machine has ``learner.key`` and the ``.pub`` of every actor; an actor's
machine has its own ``.key`` and ``learner.pub``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from hilt.core.errors import ConfigError, FormatError, HiltError
from hilt.core.files import DISK, storage_errors
from hilt.wire.sockets import EVERYTHING, JOIN_S, LeveledLogger

LEARNER = "learner"
DOMAIN = b"hilt"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
POLL_MS = 100
LOOK_AGAIN_S = 0.5
"""How long a change inside a key file may go unseen; a file that comes or goes is seen at once."""
CLOCK_TICK_S = 0.05
"""Two changes of a folder within a tick of the file system's clock look like one."""
WARN_EVERY_S = 10.0
MAX_FILE_BYTES = 4096

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


# --- making them
# ------------------------------------------------------------------------------------------------------------------


def new_keys(folder: str | os.PathLike[str], names: Sequence[str]) -> list[Path]:
    """Makes a pair of keys for each name; returns the files, ``.key`` and ``.pub``
    in turn. Nothing is ever overwritten."""
    home = Path(folder)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r}: not a name for a key; expected up to 64 letters, digits, '-' and '_', such as actor-1."
            )
        if list(names).count(name) > 1:
            raise ConfigError(f"{name!r}: given twice; expected each name once.")
    paths = [home / f"{name}{end}" for name in names for end in (".key", ".pub")]
    for path in paths:
        if os.path.lexists(path):
            raise _exists(path)
    DISK.make_folders(home)
    for secret_path, public_path in zip(paths[::2], paths[1::2], strict=True):
        public, secret = zmq.curve_keypair()
        lines = b"# A secret key of Hilt. Keep it on one machine, readable by its owner alone.\n"
        _create(secret_path, lines + b"public = %s\nsecret = %s\n" % (public, secret), 0o600)
        _create(
            public_path, b"# A public key of Hilt. It may be copied to other machines.\npublic = %s\n" % public, 0o644
        )
    DISK.sync_folder(home)
    return paths


def _create(path: Path, data: bytes, mode: int) -> None:
    """Writes a file that is whole or absent, has its mode from the start and takes no other's place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    with storage_errors(beside):
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            with storage_errors(beside):
                os.fchmod(fd, mode)
            DISK.write(fd, data, 0)
            DISK.sync(fd)
        finally:
            DISK.close(fd)
        with storage_errors(path):
            try:
                os.link(beside, path)  # unlike a rename, it fails where something is
            except FileExistsError:
                raise _exists(path) from None
    finally:
        DISK.remove(beside)


def _exists(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: it exists already, and keys are never overwritten. Choose another name, or move this file away first."
    )


# --- reading them
# -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyFile:
    """One key of a folder."""

    name: str
    public: bytes
    secret: bytes | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)


def fingerprint(public: bytes) -> str:
    """Sixteen digits by which people can compare public keys."""
    digits = hashlib.sha256(public).hexdigest()
    return "-".join(digits[i : i + 4] for i in range(0, 16, 4))


def read_key(path: Path) -> KeyFile:
    """A ``.key`` or ``.pub`` file, checked: its permissions, its content, that the
    two halves of a pair belong together."""
    wants_secret = path.suffix == ".key"
    shown = shlex.quote(str(path))
    with storage_errors(path), path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if wants_secret and mode & 0o077:
            raise ConfigError(
                f"{path}: others may use this secret key (mode {mode:04o}, expected 0600). Run: chmod 600 {shown}"
            )
        text = file.read(MAX_FILE_BYTES)
    found = dict(line.split(b" = ", 1) for line in text.splitlines() if b" = " in line and not line.startswith(b"#"))
    if any(not _Z85_KEY.fullmatch(value) for value in found.values()) or "public" not in {
        name.decode("latin-1") for name in found
    }:
        raise _damaged(path, "no public key is in it")
    public, secret = found[b"public"], found.get(b"secret")
    if wants_secret and secret is None:
        raise ConfigError(
            f"{path}: this is a public key under the name of a secret one. Copy {path.name} "
            "here from where it was made."
        )
    if not wants_secret and secret is not None:
        raise ConfigError(
            f"{path}: this is a secret key under the name of a public one, so others may have seen it. "
            f"Remove it, and make a new pair with: hilt keys new NAME --dir {shlex.quote(str(path.parent))}"
        )
    if secret is not None and zmq.curve_public(secret) != public:
        raise _damaged(path, "its two halves do not belong together")
    return KeyFile(path.stem, public, secret)


def list_keys(folder: str | os.PathLike[str]) -> tuple[list[KeyFile], list[HiltError]]:
    """The keys of a folder by name, the secret ones first, and what is wrong with the files that cannot be read."""
    home = _folder(folder)
    keys: dict[str, KeyFile] = {}
    problems: list[HiltError] = []
    for path in (*_files(home, ".key"), *_files(home, ".pub")):
        try:
            keys.setdefault(path.stem, read_key(path))
        except HiltError as error:
            problems.append(error)
    return list(keys.values()), problems


def _damaged(path: Path, why: str) -> FormatError:
    return FormatError(
        f"{path}: not a whole key ({why}). Copy it again from where it was made, or make new "
        "ones with: hilt keys new NAME"
    )


def _folder(folder: str | os.PathLike[str]) -> Path:
    home = Path(folder)
    if not home.is_dir():
        raise ConfigError(
            f"{home}: no such folder of keys. Make keys with: {_make(home)}, or copy the folder "
            "from where they were made."
        )
    return home


def _make(home: Path, names: str = f"{LEARNER} ACTOR") -> str:
    return f"hilt keys new {names} --dir {shlex.quote(str(home))}"


def _files(home: Path, end: str) -> list[Path]:
    with storage_errors(home):
        return sorted(
            path for path in home.iterdir() if path.suffix == end and not path.name.startswith(".") and path.is_file()
        )


def _secret(home: Path, name: str) -> tuple[bytes, bytes]:
    path = home / f"{name}.key"
    if not path.is_file():
        have = ", ".join(p.name for p in _files(home, ".key")) or "none"
        raise ConfigError(
            f"{path}: no such key (secret keys here: {have}). "
            f"Make it with: {_make(home, shlex.quote(name))}, or copy it from where it was made."
        )
    key = read_key(path)
    return key.public, key.secret or b""


# --- using them
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerKeys:
    """The learner's own pair, and the folder with the public keys of those whom it lets in."""

    folder: Path
    name: str
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], name: str | None = None) -> ServerKeys:
        """Reads the pair `name` (the learner's, if None). A damaged public key of someone else is an error too."""
        home = _folder(folder)
        keys = cls(home, name or LEARNER, *_secret(home, name or LEARNER))
        for path in keys._others():
            read_key(path)
        return keys

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Must be called before the socket is bound. Without a `Gatekeeper` in its context, no client is accepted."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def allowed(self) -> tuple[dict[bytes, str], list[str]]:
        """The public keys that may come in, with their names: every ``.pub`` but its
        own; and what is wrong with damaged ones."""
        found: dict[bytes, str] = {}
        problems = []
        for path in self._others():
            try:
                found.setdefault(read_key(path).public, path.stem)
            except HiltError as error:  # one bad file must not keep the others out
                problems.append(str(error))
        found.pop(self.public, None)
        return found, problems

    def _others(self) -> list[Path]:
        return [path for path in _files(self.folder, ".pub") if path.stem != self.name]


@dataclass(frozen=True)
class ClientKeys:
    """An actor's own pair, and the learner's public key."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    @classmethod
    def load(cls, folder: str | os.PathLike[str], name: str | None = None, server: str = LEARNER) -> ClientKeys:
        """Reads the pair `name`; if None, the only one that is not the learner's."""
        home = _folder(folder)
        if name is None:
            names = [path.stem for path in _files(home, ".key") if path.stem != server]
            if not names:
                have = ", ".join(sorted(p.name for end in (".key", ".pub") for p in _files(home, end))) or "nothing"
                raise ConfigError(
                    f"{home}: no secret key of an actor is here (found: {have}). "
                    f"Copy ACTOR.key here from where it was made, or make it with: {_make(home, 'ACTOR')}"
                )
            if len(names) > 1:
                raise ConfigError(
                    f"{home}: several actors' keys are here ({', '.join(names)}). Say which is "
                    f"used: key_name={names[0]!r}."
                )
            name = names[0]
        public, secret = _secret(home, name)
        path = home / f"{server}.pub"
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file, without which the {server} cannot be known. Copy it "
                f"from the {server}'s machine."
            )
        return cls(name, public, secret, read_key(path).public)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before the socket connects."""
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.CURVE_SERVERKEY, self.server)


class Gatekeeper:
    """Answers ZeroMQ's question whether a key may come in, for all sockets of a context (RFC 27, ZAP)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys, logger: LeveledLogger = EVERYTHING):
        self.let_in = 0
        """How many connections were let in."""
        self.refused = 0
        """How many were not."""
        self._keys, self._logger = keys, logger
        self._allowed: dict[bytes, str] = {}
        self._problems: list[str] = []
        self._changed_at: int | None = None
        self._read_at = -float("inf")
        self._warned_at = -float("inf")
        self._look()
        self._socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self._socket.close(0)
            raise ConfigError(
                "a second server with keys in one zmq context; expected one. Give each its own context."
            ) from None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="hilt-gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accepts no new clients from now on. Connected clients stay connected."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _answer(self) -> None:
        try:
            with contextlib.suppress(zmq.ContextTerminated):
                while not self._stop.is_set():
                    if self._socket.poll(POLL_MS):
                        self._socket.send_multipart(self.reply(self._socket.recv_multipart()))
        finally:
            self._socket.close(0)

    def reply(self, request: list[bytes]) -> list[bytes]:
        """The answer to one request: version, request, domain, address, identity, mechanism, key."""
        if (
            len(request) != 7
            or request[0] != b"1.0"
            or request[2] != DOMAIN
            or request[5] != b"CURVE"
            or len(request[6]) != 32
        ):
            self.refused += 1
            return [b"1.0", request[1][:255] if len(request) > 1 else b"", b"400", b"malformed", b"", b""]
        self._look()
        public = z85.encode(request[6])
        name = self._allowed.get(public)
        if name is None:
            self.refused += 1
            self._warn(public, request[3])
            return [b"1.0", request[1], b"400", b"unknown key", b"", b""]
        self.let_in += 1
        return [b"1.0", request[1], b"200", b"", name.encode()[:255], b""]

    def _look(self) -> None:
        """Reads the folder again if it changed. The usual case costs one system call."""
        now = time.monotonic()
        try:
            changed_at = os.stat(self._keys.folder).st_mtime_ns
            if changed_at == self._changed_at and now - self._read_at < LOOK_AGAIN_S:
                return
            # before reading: a change from here on must be seen
            fresh = abs(time.time() - changed_at / 1e9) < CLOCK_TICK_S
            self._allowed, problems = self._keys.allowed()
        except (OSError, HiltError) as error:
            self._allowed, changed_at, fresh = {}, 0, False
            problems = [f"{self._keys.folder}: the keys cannot be read, so no new client is accepted ({error})"]
        for problem in problems:
            if problem not in self._problems:
                self._logger.warning("%s", problem)
        self._problems, self._changed_at, self._read_at = problems, None if fresh else changed_at, now

    def _warn(self, public: bytes, address: bytes) -> None:
        """Rarely, so that a stranger who comes often costs nothing."""
        now = time.monotonic()
        if now - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            where = ascii(address.decode("latin-1"))[1:60].rstrip("'")
            text = (
                "the key %s, from %s, is not on the list and was refused (%d refused so far). To let it in, "
                "put its .pub file into %s."
            )
            self._logger.warning(text, fingerprint(public), where, self.refused, self._keys.folder)
