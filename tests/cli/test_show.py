"""What commands show: a module that takes long to import is named before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hilt.cli.show import heavy_module
from hilt.core.errors import MissingPackageError


def test_a_slow_import_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("hilt_test_heavy", "hilt_test_ours"):
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert heavy_module("hilt_test_heavy", "a test", "torch", then="hilt_test_ours").__name__ == "hilt_test_heavy"
    assert capsys.readouterr().err == "importing hilt_test_heavy ...\n" and "hilt_test_ours" in sys.modules
    with pytest.raises(MissingPackageError, match=r"pip install 'hilt\[torch\]'"):
        heavy_module("hilt_test_absent", "a test", "torch")
