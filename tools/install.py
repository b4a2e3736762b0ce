"""Make a virtual environment and install this repository into it: ``python3 tools/install.py .venv dev,torch``.

What is named after the extras is installed too, without what it depends on: ``...
.venv-lerobot lerobot lerobot==0.4.4``.

Needs nothing but Python, and says what it does every ten seconds. Packages come through uv, which is
several times faster than pip. It does not read pip's configuration, so it is handed what pip would use
(indexes, find-links, certificate); a CPU build of torch that is known there is the one taken. Where uv
cannot be had, or fails, pip does the same work.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from hilt.core.progress import Progress  # needs no package

PROGRESS = Progress()
LINES_OF_AN_ERROR = 30

# Run by the new environment's Python: the settings that pip arrives at from its files and from the environment.
PIP_SETTINGS = """
import json
from pip._internal.commands import create_command
print(json.dumps(vars(create_command("install").parse_args([])[0]), default=str))
"""


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python3 tools/install.py FOLDER EXTRA[,EXTRA...] [PACKAGE==VERSION...]")
    os.chdir(Path(__file__).resolve().parent.parent)
    venv, extras = Path(sys.argv[1]), sys.argv[2]
    alone = sys.argv[3:]
    print(f"installing {' '.join([f'hilt[{extras}]', *alone])} into {venv}, once", flush=True)
    make_venv(venv)
    install(venv, ["--constraint", "constraints.txt", "--editable", f".[{extras}]"])
    if alone:
        install(venv, ["--no-deps", *alone])


def make_venv(venv: Path) -> None:
    if (venv / "bin/pip").exists():
        return
    if importlib.util.find_spec("ensurepip") is None:  # Debian ships it apart from Python
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise SystemExit("this Python cannot make virtual environments; on Debian: apt-get install python3-venv")
        for apt in (["update"], ["install", "-y", "--no-install-recommends", "python3-venv"]):
            if run(f"apt-get {apt[0]}", ["apt-get", "-qq", *apt], os.environ | {"DEBIAN_FRONTEND": "noninteractive"}):
                raise SystemExit(f"apt-get {' '.join(apt)} failed: its error is above")
    if run(f"making {venv}", [sys.executable, "-m", "venv", "--clear", venv]):
        raise SystemExit(f"{venv} was not made: the error is above")


def install(venv: Path, packages: list[str]) -> None:
    if not install_with_uv(venv, packages):
        print("uv cannot be used here: installing with pip, which takes longer", flush=True)
        if code := run("installing with pip", [venv / "bin/pip", "install", "--progress-bar", "off", *packages]):
            sys.exit(code)


def install_with_uv(venv: Path, packages: list[str]) -> bool:
    if (settings := uv_settings(venv)) is None:
        return False
    options, environment = settings
    command = [venv / "bin/uv", "pip", "install", "--python", venv / "bin/python", *options, *packages]
    return run("installing with uv", command, environment) == 0


def uv_settings(venv: Path) -> tuple[list[str], dict[str, str]] | None:
    """Options and environment with which the environment's uv, installed here, finds what
    its pip would; None where that cannot be."""
    if run("getting uv", [venv / "bin/pip", "install", "-qq", "uv"]):
        return None
    asked = subprocess.run([venv / "bin/python", "-c", PIP_SETTINGS], capture_output=True, text=True)
    if asked.returncode != 0:  # a pip whose insides have moved
        return None
    pip = json.loads(asked.stdout)
    # pip takes the best version of all indexes; uv, unless told, the first index that knows the name
    options = ["--no-config", "--index-strategy", "unsafe-best-match"]
    options += ["--no-index"] if pip["no_index"] else ["--default-index", pip["index_url"]]
    for url in pip["extra_index_urls"]:
        options += ["--index", url]
    for place in pip["find_links"]:
        options += ["--find-links", place]
    return options, os.environ | ({"SSL_CERT_FILE": pip["cert"]} if pip["cert"] else {})


def run(phase: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> int:
    """The exit code. What the command says is shown as a note, its last line; all of it, nearly, where it fails."""
    lines: list[str] = []
    with PROGRESS.phase(phase) as move:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if not line.startswith((" +", " -", " ~")):  # uv's list of packages, which comes at the end
                move(0, note=lines[-1].strip()[:100])
        code = process.wait()
    if code:
        print("\n".join(lines[-LINES_OF_AN_ERROR:]), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
