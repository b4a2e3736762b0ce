"""Recipes for LIBERO: complete, checked, and refused with the cure where LIBERO is
not there. Runs of them are in tests/peers."""

from __future__ import annotations

import pytest

from hilt.core.config import build
from hilt.core.errors import MissingPackageError
from hilt.envs import libero
from hilt.recipes import LIBERO, vla_recipe


@pytest.mark.parametrize("name", LIBERO)
def test_libero_recipes_report_missing_files_before_they_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(vla_recipe(name), "seed=1")
    if name in libero.SUITES:
        assert config.tasks == [f"{name}/{number}" for number in range(libero.SUITES[name])]
    assert config.validation.split == "eval" and config.collect.split == "train"
    monkeypatch.setattr(libero.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(MissingPackageError, match="hf-libero"):  # the last of all checks: everything else is fine
        config.check()
