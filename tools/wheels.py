"""Whether the default install can be had as wheels on every system and Python that we promise: ``python3 tools/wheels.py``.

It resolves what `make` installs, with the versions of constraints.txt, without installing anything, and needs a package index. Packages
that have no wheel anywhere must be pure Python, and are named here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PURE = ("easyhid",)
GOOD = f"a wheel of every package, but for {', '.join(PURE)}, pure Python"
MACOS = "14.0"  # the oldest for which torch has wheels


def main() -> None:
    uv = ROOT / ".venv" / "bin" / "uv"
    if not uv.exists():
        raise SystemExit("no .venv/bin/uv here: run make test first, which installs it")
    extras = re.search(r"^\$\(VENV\)/\.installed:.*\n.*install\.py \$\(VENV\) (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras, "Makefile: the line that installs .venv"
    wrong = 0
    for platform in PLATFORMS:
        for python in PYTHONS:
            why = resolve(uv, extras[1].split(","), platform, python)
            wrong += bool(why)
            print(f"{platform}, Python {python}: {why or GOOD}", flush=True)
    sys.exit(bool(wrong))


def resolve(uv: Path, extras: list[str], platform: str, python: str) -> str:
    """Empty, or why it cannot be installed there."""
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--python-platform", platform, "--python-version", python]
    command += ["--constraint", "constraints.txt", "--only-binary", ":all:", "pyproject.toml"]
    command += [word for extra in extras for word in ("--extra", extra)] + [word for name in PURE for word in ("--no-binary", name)]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=600)
    return done.stderr.strip() if done.returncode else ""


if __name__ == "__main__":
    main()
