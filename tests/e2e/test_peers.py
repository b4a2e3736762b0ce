"""The peers that the benchmarks run beside us are there, at the version we say, and work with our torch and numpy."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"


@pytest.mark.peers
@pytest.mark.parametrize("package", ["cpprb", "torchrl"])
def test_peer_is_at_its_pinned_version_and_imports(package: str):
    assert f"{package}=={importlib.metadata.version(package)}" in CONSTRAINTS.read_text().splitlines()
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
