"""Tries the versions that pyproject.toml promises. Needs the network, and is no part of `make test`.

    python3 tools/versions.py resolve                        do all packages go together and have a wheel, for each
                                                             Python and system?
    python3 tools/versions.py resolve --lowest               and the lowest version of each that pyproject.toml allows?
    python3 tools/versions.py resolve --pinned               and those of constraints.txt, which `make` installs?
    python3 tools/versions.py resolve --extras hdf5,sinks    other extras than those that `make test` needs
    python3.10 tools/versions.py test --lowest tests/algos   runs tests with this Python and the lowest versions
    python3.13 tools/versions.py test tests/algos            runs tests with this Python and the newest versions
    python3 tools/versions.py types                          are all of Python's functions and arguments in src those of
                                                             the lowest Python?

`test` keeps a virtual environment of its own: .venv-3.10-lowest, .venv-3.13.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from install import make_venv, run, uv_settings

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SYSTEMS = {  # as uv calls them; for Macs with an Intel processor there are no wheels of torch
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
MACOS = "14.0"
"""The oldest for which torch has wheels"""
PURE = ("easyhid", "hilt")
"""Without wheels, and pure Python: pip builds them anywhere"""
SHOWN = ("torch", "numpy", "mujoco", "transformers", "ray")

BUFFERS = ("arg-type", "call-overload", "no-any-return", "unused-ignore")
"""The errors of mypy that come from numpy's arrays, which are declared to be buffers from Python 3.12 on only"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("resolve", "test"):
        command = commands.add_parser(name)
        command.add_argument(
            "--lowest", action="store_true", help="the lowest version of each package that pyproject.toml allows"
        )
        command.add_argument("--pinned", action="store_true", help="the versions of constraints.txt")
        command.add_argument("--extras", default=installed_extras(), help="default: %(default)s")
        if name == "resolve":
            command.add_argument("--pythons", default=",".join(PYTHONS), help="default: %(default)s")
    commands.add_parser("types")
    given, rest = parser.parse_known_args()
    if rest and given.command != "test":
        parser.error(f"{' '.join(rest)}: only `test` takes more arguments, which are those of pytest")
    os.chdir(ROOT)
    if given.command == "resolve":
        sys.exit(resolve(given))
    elif given.command == "test":
        sys.exit(test(given, rest))
    else:
        sys.exit(types())


def installed_extras() -> str:
    """What the Makefile installs for `make test`."""
    return re.findall(r"install\.py \$\(VENV\) (dev,\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


def resolve(given: argparse.Namespace) -> int:
    """Prints a line for each Python and system, and returns the number of those with packages
    that do not go together, or have no wheel."""
    options, environment = _uv(VENV)
    failed = 0
    for python in given.pythons.split(","):
        for system, platform in SYSTEMS.items():
            command = [VENV / "bin/uv", "pip", "compile", "pyproject.toml", "--no-header", *options, *_choice(given)]
            command += ["--python-version", python, "--python-platform", platform]
            command += [part for extra in given.extras.split(",") for part in ("--extra", extra)]
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
            shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
            outcome = f"{len(found)} packages: {shown}" if done.returncode == 0 else f"FAILED\n{done.stderr.strip()}"
            print(f"Python {python}, {system}: {outcome} ({time.perf_counter() - began:.0f} s)", flush=True)
            failed += done.returncode != 0
    return failed


def test(given: argparse.Namespace, arguments: list[str]) -> int:
    """Runs tests with the Python that runs this."""
    venv = (
        ROOT / f".venv-{sys.version_info[0]}.{sys.version_info[1]}{'-lowest' * given.lowest}{'-pinned' * given.pinned}"
    )
    done = venv / ".installed"
    if not done.exists() or done.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        make_venv(venv)
        options, environment = _uv(venv)
        command = [venv / "bin/uv", "pip", "install", "--python", venv / "bin/python", *options, *_choice(given)]
        if code := run(f"installing into {venv.name}", [*command, "--editable", f".[{given.extras}]"], environment):
            return code
        done.touch()
    return subprocess.run([venv / "bin/python", "-m", "pytest", *arguments]).returncode


def types() -> int:
    disabled = [part for kind in BUFFERS for part in ("--disable-error-code", kind)]
    return subprocess.run([VENV / "bin/python", "-m", "mypy", "--python-version", PYTHONS[0], *disabled]).returncode


def _choice(given: argparse.Namespace) -> list[str]:
    """uv's options for which versions are taken. With `--lowest` they are those of the packages that pyproject.toml
    names; what these bring along is the newest, as its bounds are theirs."""
    lowest = ["--resolution", "lowest-direct"] if given.lowest else []
    pinned = ["--constraint", "constraints.txt"] if given.pinned else []
    return ["--only-binary", ":all:", *(part for name in PURE for part in ("--no-binary", name)), *lowest, *pinned]


def _uv(venv: Path) -> tuple[list[str], dict[str, str]]:
    make_venv(venv)
    settings = uv_settings(venv)
    if settings is None:
        raise SystemExit("uv cannot be installed here, or pip's settings cannot be read: see tools/install.py")
    options, environment = settings
    return options, {"MACOSX_DEPLOYMENT_TARGET": MACOS, "UV_PYTHON_DOWNLOADS": "never"} | environment


if __name__ == "__main__":
    main()
