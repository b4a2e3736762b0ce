"""Checks that a release can be made: ``python tools/release_check.py``, which `make release-check` runs.

The version has its heading in CHANGELOG.md and stands in CITATION.cff; the wheel and the sdist are built; and the wheel
is installed in clean environments, with numpy 1.26 and with numpy 2, in which `hilt doctor`, `hilt docs` and
`hilt demo --fast` run. Needs the network. ``--numpy 2 --no-demo`` does a part of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from install import make_venv, uv_settings
from install import run as run_in_phase

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
EXTRAS = "torch,zstd,formats,sim,teleop"
NUMPY = {"1.26": "numpy==1.26.*", "2": "numpy>=2"}
TIMEOUT_S = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks that a release can be made.")
    parser.add_argument("--numpy", choices=NUMPY, action="append", help="only with this one; default: both")
    parser.add_argument("--no-demo", action="store_true", help="without `hilt demo --fast`")
    parser.add_argument("--any-version", action="store_true", help="also where CHANGELOG.md has no such version")
    given = parser.parse_args()
    if not given.any_version and (wrong := wrong_versions(ROOT)):
        raise SystemExit("\n".join(wrong))
    wheel = build()
    for numpy in given.numpy or NUMPY:
        if numpy == "1.26" and sys.version_info >= (3, 13):
            print("SKIPPED numpy 1.26: it has no build for this Python; use Python 3.10 to 3.12")
            continue
        check(wheel, numpy, demo=not given.no_demo)
    print(f"ready: {', '.join(path.name for path in sorted(DIST.iterdir()))}")


def wrong_versions(root: Path) -> list[str]:
    """What does not have the version of the package."""
    found = re.search(r'__version__ = "(.+)"', (root / "src/hilt/__init__.py").read_text())
    version = found[1] if found else ""
    wrong = []
    if f"\n## [{version}]" not in (root / "CHANGELOG.md").read_text():
        wrong.append(f"CHANGELOG.md has no heading `## [{version}]`: give *Unreleased* this version and its date.")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        wrong.append(f"CITATION.cff has another version than src/hilt/__init__.py: expected `version: {version}`.")
    return wrong


def build() -> Path:
    """The wheel, made from the sdist, as pip makes it of what is published."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", DIST, ROOT])
    return next(DIST.glob("*.whl"))


def check(wheel: Path, numpy: str, demo: bool) -> None:
    venv = ROOT / "build" / f"release-numpy-{numpy}"
    shutil.rmtree(venv, ignore_errors=True)
    make_venv(venv)
    packages = [f"{wheel}[{EXTRAS}]", NUMPY[numpy]]
    settings = uv_settings(venv)
    if settings is None:
        run([venv / "bin/pip", "install", "--quiet", *packages])
    else:
        options, environment = settings
        command = [venv / "bin/uv", "pip", "install", "--python", venv / "bin/python", *options, *packages]
        if run_in_phase(f"installing with numpy {numpy}", command, environment):
            raise SystemExit(f"hilt[{EXTRAS}] cannot be installed with {NUMPY[numpy]}: the error is above")
    empty = venv / "empty"
    empty.mkdir()
    for words in (["--version"], ["doctor"], ["docs", "questions"], *([["demo", "--fast"]] if demo else [])):
        run([venv / "bin/hilt", *words], empty)
    print(f"numpy {numpy}: ok", flush=True)


def run(command: list[str | Path], folder: Path = ROOT) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    print("$", " ".join(map(str, command)), flush=True)
    done = subprocess.run(command, cwd=folder, env=clean, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: the error is above")


if __name__ == "__main__":
    main()
