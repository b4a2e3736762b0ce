"""The built wheel, installed where there is nothing else: no torch, no source tree.
Needs a package index that pip can reach."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hilt
from tests.effort import is_long

ROOT = Path(__file__).parent.parent.parent


STORE = """
import numpy as np
from hilt.replay import Log, Mix, Schema

print(np.__version__)

def see(t):
    return {"state": np.full(3, t, np.float32), "image": np.full((32, 32, 3), t, np.uint8)}

def step(t):
    actions = {"actions": np.full(2, t, np.float32), "rewards": np.float32(t)}
    return {"observations": see(t), **actions, "next_observations": see(t + 1)}

with Log.create("log", Schema.of(step(0)), compression={"observations/image": "zlib"}, segment_bytes=50_000) as log:
    for e in range(4):
        with log.episode() as episode:
            for t in range(10):
                episode.append({**step(10 * e + t), "terminated": t == 9})
with Log.open("log", "r") as log:
    mix = Mix({"all": log.all().sampler(seed=0), "important": log.all().sampler("prioritized", seed=0)})
    batch = mix.sample(64)
    assert (batch["observations"]["image"][:, 0, 0, 0] == batch["rewards"]).all()
    assert (batch["next_observations"]["image"][:, 5, 5, 2] == batch["rewards"] + 1).all()
    assert log.damage() == []
    print(len(log), "steps, all right")
"""


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "COLUMNS": "200"
    }
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bin(wheel: Path, folder: Path) -> Path:
    """The programs of a clean environment with the wheel in it.

    pip takes 15 s of CPU time to unpack the packages that the wheel names, so only `make test-long` lets it. In
    `make test` the same packages, as this environment has them, are linked there, and no others.
    """
    # to install pip there takes longer than the wheel
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    # compiling what nothing imports takes seconds
    pip(folder / "venv/bin", "install", "--quiet", "--no-compile", *([] if is_long() else ["--no-deps"]), str(wheel))
    if not is_long():
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        link_packages(required(metadata_of(wheel)), site)
    return folder / "venv/bin"


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"hilt-{hilt.__version__}.dist-info/METADATA"))


def required(metadata: email.message.Message) -> set[str]:
    """The packages that a package needs without its extras, and what those need."""
    names: set[str] = set()
    waiting = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    while waiting:
        one = waiting.pop()
        if one.name in names or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        names.add(one.name)
        waiting += [Requirement(line) for line in importlib.metadata.distribution(one.name).requires or []]
    return names


def link_packages(names: set[str], site: Path) -> None:
    for name in names:
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(package.locate_file(top))


def pip(bin: Path, *arguments: str) -> str:
    """This environment's pip, for the other one."""
    return run(sys.executable, "-m", "pip", "--python", bin / "python", *arguments, cwd=bin)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    metadata = metadata_of(wheel)
    files = (path for kind in ("*.py", "*.js", "*.css") for path in (ROOT / "src/hilt").rglob(kind))
    source = {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert "hilt/py.typed" in names
    assert source <= set(names)
    pages = {f"hilt/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert {name for name in names if name.startswith("hilt/docs/")} == pages, (
        "what `hilt docs` shows, without pictures"
    )
    assert [name for name in names if not name.startswith(("hilt/", f"hilt-{hilt.__version__}.dist-info/"))] == []
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "torch>=2.6; extra == 'torch'" in metadata.get_all("Requires-Dist", [])


def test_the_command_runs(bin: Path, folder: Path):
    assert run(bin / "hilt", "--version", cwd=folder) == f"hilt {hilt.__version__}\n"
    table = run(bin / "hilt", "doctor", cwd=folder)
    assert "pip install 'hilt[torch]'" in table
    assert "### My gripper never closes" in run(bin / "hilt", "docs", "questions", "gripper", cwd=folder)


def test_replay_needs_no_torch(bin: Path, folder: Path):
    where = run(bin / "python", "-c", "import hilt.replay; print(hilt.replay.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(folder)
    assert "torch" not in pip(bin, "list")


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no build for this Python")
def test_the_oldest_numpy_will_do(bin: Path, folder: Path):
    pip(bin, "install", "--quiet", "numpy==1.26.*")
    (folder / "store.py").write_text(STORE)
    found = run(bin / "python", "store.py", cwd=folder)
    assert found.startswith("1.26.")
    assert "40 steps, all right" in found
    in_one_process = re.search(
        r"## In one process.*?```python\n(.*?)```", (ROOT / "docs/wire.md").read_text(), re.DOTALL
    )
    assert in_one_process is not None
    (folder / "wire.py").write_text(in_one_process[1])
    run(bin / "python", "wire.py", cwd=folder)
