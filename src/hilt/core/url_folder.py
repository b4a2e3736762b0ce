"""Folders at a URL, on any file system that fsspec knows: ``hdfs://``, ``s3://``,
``gs://``, ``file://``, ``memory://``, or a plain path.

    place = UrlFolder("s3://bucket/run")
    place.check()                                                  # it can be written to and read from, within a minute
    place.upload("actor/global_step_25", {"config.json": Path("config.json")})
    place.folders("actor")                                         # the complete ones: ["global_step_25"]
    place.download("actor/global_step_25", Path("here"))

Every file is read back after it was written, and its size and SHA-256 are compared. A manifest is written last, so that
a folder without one was not finished and does not count. What is downloaded is compared with the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, StorageError, optional_module
from hilt.core.files import DISK, storage_errors
from hilt.core.progress import Report, silent

MANIFEST = "hilt-copy.json"
"""Beside the files of a folder: the size and the SHA-256 of each"""
CONNECT_TIMEOUT_S = 60.0
"""Timeout in seconds for a file system to take, return and remove a small file"""
BLOCK = 1 << 22
CURES = {
    "hdfs": (
        "It needs `pip install pyarrow`, Hadoop's libhdfs, and HADOOP_HOME, JAVA_HOME and CLASSPATH "
        "(`hadoop classpath --glob`)"
    ),
    "s3": "It needs `pip install s3fs`, and credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in ~/.aws",
    "gs": "It needs `pip install gcsfs`, and credentials of `gcloud auth application-default login`",
}
"""What a file system needs on this machine, by its protocol"""


class UrlFolder:
    """A folder at a URL. Nothing is opened before it is used."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def check(self) -> None:
        """Writes a small file, reads it back and removes it; raises `ConfigError` with the
        cure if that fails or takes too long."""
        failed: list[BaseException] = []
        thread = threading.Thread(target=self._probe, args=(failed,), name="hilt-remote", daemon=True)
        thread.start()
        thread.join(CONNECT_TIMEOUT_S)
        if thread.is_alive():
            raise ConfigError(f"{self.url}: there was no answer within {CONNECT_TIMEOUT_S:g} s. {self._cure}.")
        if failed:
            raise ConfigError(f"{self.url} cannot be written to: {_first_line(failed[0])}. {self._cure}.") from failed[
                0
            ]

    def _probe(self, failed: list[BaseException]) -> None:
        data, name = secrets.token_bytes(16), f".hilt-{secrets.token_hex(8)}"
        try:
            files, root = self._files()
            files.makedirs(root, exist_ok=True)
            with files.open(f"{root}/{name}", "wb") as file:
                file.write(data)
            with files.open(f"{root}/{name}", "rb") as file:
                if file.read() != data:
                    raise OSError("a file that was written was read back with other bytes")
            files.rm(f"{root}/{name}")
        except Exception as error:  # noqa: BLE001  # broad: every file system of fsspec has errors of its own; `check` raises them
            failed.append(error)

    def upload(self, folder: str, given: Mapping[str, Path], report: Report = silent) -> None:
        """Writes files under their names into a folder of this one, checks each, and writes the manifest."""
        with self._errors(f"{self.url}/{folder} was not written"):
            files, root = self._files()
            place, sums = _join(root, folder), dict[str, dict[str, Any]]()
            if files.exists(_join(place, MANIFEST)):
                files.rm(_join(place, MANIFEST))  # not complete until all files are those of now
            for number, (name, path) in enumerate(sorted(given.items())):
                report(f"copying to {self.url}", number, len(given), name)
                sums[name] = self._write(files, path, _join(place, name))
            with files.open(_join(place, MANIFEST), "wb") as file:
                file.write(json.dumps({"files": sums}, indent=1, sort_keys=True).encode())
            files.invalidate_cache()
        report(f"copying to {self.url}", len(given), len(given))

    def _write(self, files: Any, path: Path, place: str) -> dict[str, Any]:
        """One file; its size and checksum, after it was read back."""
        files.makedirs(place.rpartition("/")[0], exist_ok=True)
        with storage_errors(path), path.open("rb") as source, files.open(place, "wb") as target:
            written = _streamed(source, target.write)
        files.invalidate_cache()
        size = int(files.info(place)["size"])
        with files.open(place, "rb") as again:
            found = _streamed(again)
        if found != written or size != written["size"]:
            raise CorruptError(
                f"{self.url}: {path} was copied to {place}, which has {size} bytes with the SHA-256 "
                f"{found['sha256'][:12]}..., where {written['size']} bytes with {written['sha256'][:12]}... "
                "were written. Copy it again."
            )
        return written

    def folders(self, under: str, complete: bool = True) -> list[str]:
        """The names of the complete folders in one of this one, or of all of them, in
        order; none where that does not exist."""
        with self._errors(f"{self.url}/{under} was not read"):
            files, root = self._files()
            place = _join(root, under)
            files.invalidate_cache()
            if not files.exists(place):
                return []
            names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in files.ls(place, detail=False))
            return [name for name in names if not complete or files.exists(_join(_join(place, name), MANIFEST))]

    def download(self, folder: str, target: Path, report: Report = silent) -> None:
        """Brings the files of a complete folder here, each compared with the manifest."""
        with self._errors(f"{self.url}/{folder} was not read"):
            files, root = self._files()
            place = _join(root, folder)
            with files.open(_join(place, MANIFEST), "rb") as file:
                known = json.loads(file.read())["files"]
            for number, (name, expected) in enumerate(sorted(known.items())):
                report(f"fetching from {self.url}", number, len(known), name)
                _check_name(name, f"{self.url}/{folder}")
                DISK.make_folders((target / name).parent)
                with files.open(_join(place, name), "rb") as source, (target / name).open("wb") as written:
                    found = _streamed(source, written.write)
                if found != expected:
                    raise CorruptError(
                        f"{self.url}/{folder}/{name}: its bytes do not have their checksum; use another copy."
                    )

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a small file; None where it does not exist."""
        with self._errors(f"{self.url}/{name} was not read"):
            files, root = self._files()
            files.invalidate_cache()
            return files.cat_file(_join(root, name)) if files.exists(_join(root, name)) else None

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        with self._errors(f"{self.url}/{name} was not written"):
            files, root = self._files()
            files.makedirs(root, exist_ok=True)
            files.pipe_file(_join(root, name), data)
            files.invalidate_cache()

    def remove(self, folder: str) -> None:
        with self._errors(f"{self.url}/{folder} was not removed"):
            files, root = self._files()
            files.rm(_join(root, folder), recursive=True)
            files.invalidate_cache()

    def _files(self) -> tuple[Any, str]:
        """The file system, and the path on it."""
        if self._opened is None:
            files, path = optional_module("fsspec.core", "a copy at a URL", "remote", "fsspec").url_to_fs(self.url)
            self._opened = files, str(path).rstrip("/")
        return self._opened

    @property
    def _cure(self) -> str:
        protocol = self.url.partition("://")[0] if "://" in self.url else "file"
        usual = (
            "Check the address, the permissions and the network, and that fsspec knows the protocol "
            "(fsspec.available_protocols())"
        )
        return f"{CURES[protocol]}; check the address, too" if protocol in CURES else usual

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raises errors of the file system as ours."""
        try:
            yield
        except HiltError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise StorageError(f"{what}: {_first_line(error)}. {self._cure}.") from error


def files_of(folder: Path, under: str = "") -> dict[str, Path]:
    """The files below a folder, by their paths relative to it, after `under`; links and hidden files are left out."""
    prefix = f"{under}/" if under else ""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        prefix + name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))
    }


def _streamed(source: Any, write: Callable[[bytes], Any] = lambda block: None) -> dict[str, Any]:
    """Reads a file to its end, block by block; its size and checksum."""
    sha256, size = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        sha256.update(block)
        write(block)
        size += len(block)
    return {"size": size, "sha256": sha256.hexdigest()}


def _check_name(name: str, where: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise FormatError(
            f"{where} lists a file {name!r}, which would be written outside of its folder; nothing more is fetched."
        )


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if name else folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
