"""What `hilt fetch` and `hilt push` do: policies and datasets come from the Hugging Face
Hub, and go there. `hilt.core.hub` has the names.

    fetched = fetch("hf:org/name")                # its newest commit, or hf:org/name@v1.0; only files that hold data
    push(Path("runs/sft/policy"), "hf:org/mine")  # a private repository, made if there is none

Every file is compared with the checksum that the Hub has of it, and a folder is there as a whole or not at all. Code,
pickles and all else that is not known to be data stays on the Hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, RequestError, optional_module
from hilt.core.files import DISK, storage_errors
from hilt.core.hub import ROOT, Name, parse
from hilt.core.progress import Report, silent

MANIFEST = "hilt-hub.json"
"""Beside the files of a snapshot: where they come from, and the checksum of each"""
DATA = {
    *(
        ".safetensors",
        ".json",
        ".jsonl",
        ".txt",
        ".model",
        ".md",
        ".jinja",
        ".vocab",
        ".merges",
        ".yaml",
        ".yml",
        ".csv",
    ),
    *(".parquet", ".mp4", ".png", ".jpg", ".jpeg", ".hdf5", ".h5", ".tfrecord", ".array_record", ".npz"),
}
"""Endings of the files that are fetched. Weights come as safetensors alone"""
WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".onnx"}
"""Endings of weights in formats that may run code, or that Hilt does not read"""
TIMEOUT_S = 30.0
"""Timeout in seconds for the Hub to answer a request"""
BLOCK = 1 << 22


@dataclass(frozen=True)
class Fetched:
    """A snapshot on this machine."""

    name: str
    """With the commit"""
    folder: Path
    files: int
    size: int
    """Of all files, bytes"""
    left_out: list[str]
    """Files that stay on the Hub, because they are not known to be data"""


@dataclass(frozen=True)
class Pushed:
    """What `push` uploaded."""

    name: str
    """With its commit"""
    files: int
    left_out: list[str]
    """Files in the folder that `fetch` would not take, and that were not uploaded"""


def fetch(name: str, report: Report = silent) -> Fetched:
    """Brings the files of a repository here, or checks those that are here already."""
    api, asked = _hub(), parse(name)
    if asked.is_pinned and (asked.folder / asked.revision).exists():
        return _checked(asked, report)
    with _errors(f"{asked} was not fetched"):
        info = api.repo_info(
            asked.repo, repo_type=asked.kind, revision=asked.revision or None, files_metadata=True, timeout=TIMEOUT_S
        )
    pinned = replace(asked, revision=info.sha)
    target = pinned.folder / info.sha
    if target.exists():
        return _checked(pinned, report)
    wanted = {one.rfilename: one for one in info.siblings if PurePosixPath(one.rfilename).suffix.lower() in DATA}
    left_out = sorted(one.rfilename for one in info.siblings if one.rfilename not in wanted)
    _check_files(pinned, list(wanted), left_out)
    part = target.with_name(f".{info.sha}.part")  # kept when it breaks off, so that another try goes on
    with storage_errors(part):
        part.mkdir(parents=True, exist_ok=True)
    _check_room(part, sum(one.size or 0 for one in wanted.values()))
    sums: dict[str, str] = {}
    for number, (path, one) in enumerate(sorted(wanted.items())):
        report("fetching files", number, len(wanted), f"{path}, {(one.size or 0) / 1e6:,.1f} MB")
        with _errors(f"{path} of {pinned} was not fetched; the same command goes on with the rest"):
            api.hf_hub_download(asked.repo, path, repo_type=asked.kind, revision=info.sha, local_dir=part)
        sums[path] = _compared(part / path, one, pinned)
    report("fetching files", len(wanted), len(wanted))
    with storage_errors(part):
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the Hub's own notes of the download
    write_json(part / MANIFEST, {"name": str(pinned), "endpoint": api.endpoint, "sha256": sums, "left_out": left_out})
    DISK.rename(part, target)
    DISK.sync_folder(target.parent)
    return _fetched(pinned, sums, left_out)


def push(folder: Path, name: str, public: bool = False, report: Report = silent) -> Pushed:
    """Uploads the data in a folder as one commit."""
    asked = parse(name)
    if asked.revision:
        raise ConfigError(f"{name}: a push makes a new commit; leave out @{asked.revision}.")
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != MANIFEST
    )
    _check_whole(folder, paths)
    chosen = [path for path in paths if path.suffix.lower() in DATA]
    left_out = [path.relative_to(folder).as_posix() for path in paths if path.suffix.lower() not in DATA]
    if not chosen:
        raise ConfigError(
            f"{folder}: there are no files in it that the Hub would be given ({', '.join(sorted(DATA))})."
        )
    api = _hub()
    from huggingface_hub import CommitOperationAdd

    with _errors(f"{folder} was not pushed to {asked}"):
        report(f"pushing {len(chosen)} files to {asked}")
        api.create_repo(asked.repo, repo_type=asked.kind, private=not public, exist_ok=True)
        adds = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in chosen]
        done = api.create_commit(asked.repo, adds, repo_type=asked.kind, commit_message=f"hilt push {folder.name}")
    report("")
    return Pushed(str(replace(asked, revision=done.oid)), len(chosen), left_out)


def _check_whole(folder: Path, paths: list[Path]) -> None:
    """Refuses logs: their steps and frames have no ending that `fetch` would take, so
    that only their descriptions would arrive."""
    log = next((path.parent for path in paths if path.name == "log.json" and (path.parent / "segments").is_dir()), None)
    if log is None:
        return
    cure = (
        f"push a dataset made of it: hilt data convert {log} NEW --to lerobot, then hilt push NEW hf:datasets/ORG/NAME"
    )
    if log != folder and (folder / "policy").is_dir():
        cure = f"for the policy, push {folder / 'policy'}; for the steps, {cure}"
    raise ConfigError(f"{log} is a log of Hilt's, which does not go to the Hub as it is; {cure}.")


def _check_files(name: Name, wanted: list[str], left_out: list[str]) -> None:
    """Names that stay below the folder; and among them weights that Hilt reads, where there are weights at all."""
    for path in wanted:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or "\\" in path or "\0" in path or parts.parts[0] == ".cache":
            raise FormatError(
                f"{name} has a file {path!r}, which would be written outside of its folder; nothing was fetched."
            )
    if not wanted:
        raise FormatError(
            f"{name}: none of its {len(left_out)} files is data that Hilt reads ({', '.join(sorted(DATA))})."
        )
    weights = [path for path in left_out if PurePosixPath(path).suffix.lower() in WEIGHTS]
    if name.kind == "model" and weights and not any(path.endswith(".safetensors") for path in wanted):
        raise FormatError(
            f"{name} has its weights in {weights[0]} only, and Hilt fetches no format that may run "
            "code. Ask for safetensors."
        )


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{folder.parent}: {size / 1e9:.1f} GB are to be fetched and {free / 1e9:.1f} GB are free. Set "
            f"{ROOT} to another folder."
        )


def _compared(path: Path, expected: Any, name: Name) -> str:
    """The file's SHA-256, after it was compared with what the Hub says of it: that, or git's SHA-1 for small files."""
    if not path.is_file() or path.is_symlink():
        raise CorruptError(f"{path}: expected a file, as {name} has it.")
    sha256, size = hashlib.sha256(), path.stat().st_size
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with storage_errors(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            sha256.update(block)
            git.update(block)
    given, wanted = (sha256.hexdigest(), expected.lfs.sha256) if expected.lfs else (git.hexdigest(), expected.blob_id)
    if given != wanted:
        with storage_errors(path):
            path.unlink()
        raise CorruptError(
            f"{path.name} of {name}: its checksum is {given[:12]}..., the Hub's is "
            f"{str(wanted)[:12]}.... Fetch it again."
        )
    return sha256.hexdigest()


def _checked(name: Name, report: Report) -> Fetched:
    """What was fetched before is still what it was."""
    folder = name.folder / name.revision
    manifest = read_json(folder / MANIFEST)
    for number, (path, known) in enumerate(sorted(manifest["sha256"].items())):
        report("checking files", number, len(manifest["sha256"]), path)
        with storage_errors(folder / path), (folder / path).open("rb") as file:
            sha256 = hashlib.sha256()
            while block := file.read(BLOCK):
                sha256.update(block)
        if sha256.hexdigest() != known:
            raise CorruptError(
                f"{folder / path} has changed since it was fetched. Remove {folder} and fetch {name} again."
            )
    report("checking files", len(manifest["sha256"]), len(manifest["sha256"]))
    return _fetched(name, manifest["sha256"], manifest["left_out"])


def _fetched(name: Name, sums: dict[str, str], left_out: list[str]) -> Fetched:
    folder = name.folder / name.revision
    return Fetched(str(name), folder, len(sums), sum((folder / path).stat().st_size for path in sums), left_out)


def _hub() -> Any:
    return optional_module("huggingface_hub", "hilt fetch and hilt push", "hub").HfApi()


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """What the Hub's library raises, as one line of ours."""
    try:
        yield
    except HiltError:
        raise
    except Exception as error:  # its own, and those of the library below it, have no base of their own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if getattr(getattr(error, "response", None), "status_code", 0) == 404:
            first = "there is no such repository or revision, or it is private"
        raise RequestError(
            f"{what}: {first} ({os.environ.get('HF_ENDPOINT', 'the Hub')}; HF_TOKEN or `hf auth login` gives access)."
        ) from error
