"""What `make lint` checks, and what importing Hilt costs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff():
    run("-m", "ruff", "check", ".")


def test_mypy():
    run("-m", "mypy")


def test_mypy_is_strict_where_promised(tmp_path: Path):
    """The settings in pyproject.toml refuse a function without types in core, replay and wire."""
    (tmp_path / "hilt").mkdir()
    (tmp_path / "hilt/__init__.py").touch()
    for part in ("core", "replay", "wire"):
        (tmp_path / "hilt" / part).mkdir()
        (tmp_path / "hilt" / part / "__init__.py").touch()
        (tmp_path / "hilt" / part / "loose.py").write_text("def loose(x):\n    return x\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"), "hilt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    for part in ("core", "replay", "wire"):
        assert f"hilt/{part}/loose.py:1: error: Function is missing a type annotation" in done.stdout


def test_a_constant_of_a_module_is_assigned_once():
    """Two that were given one name by a renaming: the first value was lost, and the learner looked around fifty times as often."""
    twice = []
    for path in sorted((ROOT / "src" / "hilt").rglob("*.py")):
        assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        names = [name.id for node in assigned for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        twice += [f"{path.name}: {name}" for name in sorted(set(names)) if name.isupper() and names.count(name) > 1]
    assert not twice


@pytest.mark.parametrize("module", ["hilt", "hilt.core", "hilt.replay", "hilt.cli"])
def test_import_brings_no_torch(module: str):
    assert run("-c", f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_import_is_quick():
    clock = "import time; start = time.process_time(); import hilt; print(time.process_time() - start)"  # the machine may be busy
    seconds = min(float(run("-c", clock)) for _ in range(3))
    assert seconds < 0.3


def test_a_cpu_build_of_torch_brings_no_cuda():
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this is a CUDA build of torch: pip knows of no CPU build here, or the machine has a GPU")
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert [name for name in names if name.startswith(("nvidia-", "cuda-"))] == []


def test_every_extra_that_an_error_names_exists():
    """``optional_module(name, purpose, extra)`` and ``MissingPackageError(package, purpose, extra)``; an empty one has its own cure."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    named = {
        call.args[2].value: f"{path.name}:{call.lineno}"
        for path in (ROOT / "src").rglob("*.py")
        if re.search("optional_module|MissingPackageError", path.read_text())
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("optional_module", "MissingPackageError")
        if len(call.args) > 2 and isinstance(call.args[2], ast.Constant) and (call.args[2].value or len(call.args) < 5)
    }
    assert {"sim", "robot", "teleop", "formats"} <= set(named)
    assert {extra: place for extra, place in named.items() if extra not in extras} == {}


def test_the_makefile_stays_small():
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert len(phony.split()) - 1 <= 10
