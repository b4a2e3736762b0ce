"""Complete checkpoint folders of the policy while a run goes on, and a copy of the run at a URL.

    RUN/actor/global_step_N/                 the policy after N training steps: config, weights with adapters merged,
                                             tokenizer, statistics
    RUN/actor/global_step_N/lora_adapter/    of a policy with adapters: these alone, as peft writes them
    URL/actor/global_step_N/                 the same files (`copy_to`)
    URL/resume/SEQUENCE-step_N/              what `--resume` goes on from: settings, metrics, evaluations, the best
                                             weights, the checkpoint
    URL/policy/, URL/adapter/, URL/run.json  what the end of the run has; which run it is

A folder under its name is complete, here and there. Collected episodes (``rollouts/``) are not copied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, CorruptError, StorageError
from hilt.core.files import DISK, replacing
from hilt.core.progress import Report, silent
from hilt.core.url_folder import UrlFolder, files_of
from hilt.policies.base import Policy
from hilt.runs import checkpoint
from hilt.runs.folder import CONFIG, RUN_FILE

FOLDER, RESUME, STEP, ADAPTER = "actor", "resume", "global_step_", "lora_adapter"
ENDS = ("policy", "adapter")
"""Folders that a run has when it has ended"""
RESUMED = ("sizes.json", "metrics.jsonl")
"""Files of a run that a resumed one goes on with, besides its settings and its identity"""


def save_checkpoint(policy: Policy, local_path: str | os.PathLike[str], hdfs_path: str | None = None) -> None:
    """Writes a policy as a complete folder: adapters merged into the weights, and alone in ``lora_adapter``; of one
    without adapters all weights. `hdfs_path`, any URL that fsspec knows, gets a checked copy."""
    folder = Path(local_path)
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} has files, and is no checkpoint that could be replaced: give the path of a new folder."
        )
    _write(policy, folder, adapter=True)
    if hdfs_path:
        UrlFolder(hdfs_path).upload("", files_of(folder))


def export(policy: Policy, run: Path) -> None:
    """Writes ``run/policy``, a complete folder; and of a policy with adapters these alone in ``run/adapter``."""
    from hilt.policies.io import lora

    if lora.adapted(policy):
        DISK.remove(run / ENDS[1])
        lora.save_adapter(policy, run / ENDS[1])
    _write(policy, run / ENDS[0])


def _write(policy: Policy, folder: Path, adapter: bool = False) -> None:
    """Writes a complete folder in place of the one that is there, if any; with
    `adapter`, the adapters alone are in it, too."""
    from hilt.policies.io import lora

    DISK.make_folders(folder.parent)
    with replacing(folder, sole_writer=True) as made:
        policy.save_pretrained(made)
        if adapter and lora.adapted(policy):
            lora.save_adapter(policy, made / ADAPTER)


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"{STEP}{step}"


def steps_of(run: Path) -> list[int]:
    """The training steps of which there is a complete folder, in order."""
    return _steps([path.name for path in (run / FOLDER).glob(f"{STEP}*")])


def forget_after(run: Path, step: int) -> None:
    """Removes the folders of later training steps: they are made again."""
    for later in steps_of(run):
        if later > step:
            DISK.remove(folder_of(run, later))


def prune(run: Path, keep: int) -> None:
    """Removes all but the newest `keep` folders; 0: none is removed."""
    for old in steps_of(run)[:-keep] if keep else []:
        DISK.remove(folder_of(run, old))


class RunCopy:
    """The copy of a run at a URL. Each state to resume from is a folder of its own,
    and older ones go when it is complete."""

    def __init__(self, url: str, run: Path):
        """Raises `ConfigError` if the URL has the copy of another run."""
        self._place, self._run, self._copied = UrlFolder(url), run, -1
        mine = read_json(run / RUN_FILE)["id"]
        there = self._place.read(RUN_FILE)
        if there is None:
            self._place.write(RUN_FILE, json.dumps({"id": mine}).encode())
        elif (other := json.loads(there).get("id")) != mine:
            raise ConfigError(
                f"copy_to={url} has the copy of another run ({other}; this one is {mine}): give another URL, "
                "or go on with that run by naming a new folder: --run FOLDER --resume."
            )

    def forget_after(self, step: int) -> None:
        """Removes the folders of later training steps: they are made again."""
        for later in _steps(self._place.folders(FOLDER, complete=False)):
            if later > step:
                self._place.remove(f"{FOLDER}/{STEP}{later}")

    def update(self, step: int, keep_exports: int, keep_states: int, report: Report = silent) -> None:
        """Copies the folders of the policy that are not there, and the state of this training step."""
        there = _steps(self._place.folders(FOLDER))
        for new in sorted(set(steps_of(self._run)) - set(there)):
            self._place.upload(f"{FOLDER}/{STEP}{new}", files_of(folder_of(self._run, new)), report)
        for old in sorted({*there, *steps_of(self._run)})[:-keep_exports] if keep_exports else []:
            self._place.remove(f"{FOLDER}/{STEP}{old}")
        if step != self._copied and step in checkpoint.numbers(self._run):
            self._copy_state(step, keep_states, report)
            self._copied = step

    def _copy_state(self, step: int, keep: int, report: Report) -> None:
        run, given = self._run, {name: self._run / name for name in (RUN_FILE, CONFIG)}
        given |= {name: run / name for name in RESUMED if (run / name).is_file()}
        for folder in (f"{checkpoint.FOLDER}/{step}", "best", "evaluations"):
            given |= {name: path for name, path in files_of(run / folder, folder).items() if "/videos-" not in name}
        sequence = 1 + max((int(name.partition("-")[0]) for name in self._place.folders(RESUME)), default=0)
        self._place.upload(f"{RESUME}/{sequence:06d}-step_{step}", given, report)
        kept = self._place.folders(RESUME)[-keep:]
        for name in self._place.folders(RESUME, complete=False):
            if name not in kept:
                self._place.remove(f"{RESUME}/{name}")

    def finish(self, report: Report = silent) -> None:
        """Copies what the end of the run has."""
        for name in ENDS:
            if (self._run / name).is_dir():
                self._place.upload(name, files_of(self._run / name), report)


def fetch_run(url: str, run: Path, notify: Callable[[str], None] = lambda text: None, report: Report = silent) -> None:
    """Makes the folder of a run from its copy, so that it can be resumed here. A
    damaged state is skipped with a message."""
    place = UrlFolder(url)
    place.check()
    if run.exists() and any(run.iterdir()):
        raise ConfigError(
            f"{run} is not empty, and has no run to resume: name a new folder with --run to go on from {url}."
        )
    DISK.make_folders(run.parent)
    with replacing(run, sole_writer=True) as part:
        name = _download_newest(place, part, notify, report)
    notify(f"{run} goes on from {url}/{RESUME}/{name}")


def _download_newest(place: UrlFolder, part: Path, notify: Callable[[str], None], report: Report) -> str:
    for name in reversed(place.folders(RESUME)):
        DISK.remove(part)
        try:
            place.download(f"{RESUME}/{name}", part, report)
        except (CorruptError, StorageError) as error:
            notify(f"{name} is passed over, the one before it is taken: {error}")
        else:
            return name
    raise ConfigError(
        f"{place.url} has no complete state to resume from: leave out --resume to begin a run, or "
        "give the URL of its copy_to."
    )


def _steps(names: list[str]) -> list[int]:
    numbers = [name.removeprefix(STEP) for name in names if name.startswith(STEP)]
    return sorted(int(number) for number in numbers if number.isdecimal())
