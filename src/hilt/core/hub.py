"""Names of policies and datasets of the Hugging Face Hub, which stand wherever a folder may: ``hf:org/name@commit``.

    local("hf:org/name@0a1b...")  # the folder on this machine, where `hilt fetch` has put it; never uses the network
    local("runs/sft/policy")      # any other path, as it is

Only the commands `hilt fetch` and `hilt push` use the network (`hilt.cli.hub_transfer`): a name in a
file starts no download. It has a commit, so that it always means the same files.
``hf:datasets/org/name`` is a dataset, as in the Hub's own addresses.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from hilt.core.errors import ConfigError

PREFIX = "hf:"
ROOT = "HILT_HUB"
"""The environment variable with the folder for what was fetched; without it, ~/.cache/hilt/hub"""
NAME = re.compile(r"hf:(?P<kind>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Name:
    """``hf:[datasets/]org/name[@revision]``, taken apart."""

    repo: str
    kind: str
    """``model`` or ``dataset``"""
    revision: str = ""
    """A commit, tag or branch; empty when none was given"""

    def __str__(self) -> str:
        return f"{PREFIX}{'datasets/' * (self.kind == 'dataset')}{self.repo}{f'@{self.revision}' * bool(self.revision)}"

    @property
    def is_pinned(self) -> bool:
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> Path:
        """Where its snapshots are; each in a folder named by its commit."""
        root = os.environ.get(ROOT) or Path.home() / ".cache" / "hilt" / "hub"
        return Path(root) / f"{self.kind}s" / self.repo


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    return os.fspath(name).startswith(PREFIX)


def parse(name: str) -> Name:
    found = NAME.fullmatch(name)
    if found is None or ".." in name:
        raise ConfigError(
            f"{name!r}: expected hf:ORG/NAME or hf:datasets/ORG/NAME, and @COMMIT, @TAG or "
            "@BRANCH after it if you like."
        )
    return Name(found["repo"], "dataset" if found["kind"] else "model", found["revision"] or "")


def local(name: str | os.PathLike[str]) -> Path:
    """The folder of a name that was fetched before; any other path as it is."""
    if not is_hub_name(name):
        return Path(name)
    asked = parse(os.fspath(name))
    there = sorted(path.name for path in asked.folder.glob("*") if COMMIT.fullmatch(path.name))
    if not asked.is_pinned:
        cure = f"hilt fetch {asked} fetches it and shows the name with its commit"
        if there and not asked.revision:
            cure = (
                "one of " + ", ".join(str(replace(asked, revision=commit)) for commit in there) + " is on this machine"
            )
        raise ConfigError(
            f"{asked}: the name needs a commit (@ and 40 digits), so that it always means the same files; {cure}."
        )
    if asked.revision not in there:
        raise ConfigError(f"{asked} is not on this machine, and only one command downloads it: hilt fetch {asked}.")
    return asked.folder / asked.revision
