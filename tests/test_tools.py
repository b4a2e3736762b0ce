"""The scripts of ``make`` that run before there is any package: what they say while others work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.lines import all_lines, no_line_twice

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # it looks for hilt beside itself
    spec = importlib.util.spec_from_file_location("hilt_tools_install", TOOLS / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_install_reports_progress(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    all_lines(monkeypatch)
    program = (
        "print('Resolved 143 packages in 2.1s'); print(' + numpy==2.0'); print('Installed 143 packages', flush=True)"
    )
    assert install.run("installing with uv", [sys.executable, "-c", program]) == 0
    said = no_line_twice(capsys.readouterr().err)
    assert "installing with uv, Resolved 143 packages in 2.1s" in said and "installing with uv: done in " in said
    assert "numpy" not in said, "the list at the end is no news"


def test_an_install_that_fails_shows_the_error(install: ModuleType, capsys: pytest.CaptureFixture[str]):
    assert install.run("getting uv", [sys.executable, "-c", "print('no such index'); raise SystemExit(3)"]) == 3
    assert capsys.readouterr().err == "no such index\n"
