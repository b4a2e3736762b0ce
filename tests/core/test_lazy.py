"""The names that a package offers, and imports only when they are used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import hilt
import hilt.compat.rlinf
import hilt.compat.serl
import hilt.replay

PACKAGES = [module.name for module in pkgutil.walk_packages(hilt.__path__, "hilt.") if module.ispkg]
WITH_API = [name for name in PACKAGES if hasattr(importlib.import_module(name), "__all__")]


@pytest.mark.parametrize("package", WITH_API)
def test_every_name_of_a_package_can_be_imported_and_none_is_hidden_by_a_module(package: str):
    module = importlib.import_module(package)
    files = {file.name for file in pkgutil.iter_modules(module.__path__)}
    assert not files & set(module.__all__), "an import of that module would replace the name"
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in vars(module), "the second access does not import"


def test_every_package_of_the_floor_plan_has_an_api():
    parts = {name for name in PACKAGES if name.count(".") == 1} - {"hilt.cli", "hilt.compat", "hilt.recipes"}
    assert parts <= set(WITH_API)


@pytest.mark.parametrize("name", [*hilt.compat.serl.__all__, *hilt.compat.rlinf.__all__])
def test_names_of_other_systems_are_the_same_from_either_import_line(name: str):
    package = hilt.compat.serl if name in hilt.compat.serl.__all__ else hilt.compat.rlinf
    found = getattr(package, name)
    assert getattr(hilt.replay, name, found) is found


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'hilt\.replay' has no attribute 'Trajectori'"):
        hilt.replay.Trajectori  # noqa: B018


def test_the_launcher_of_hil_serl_is_importable_by_the_line_that_docs_promise():
    from hilt.compat.serl import launcher
    from hilt.policies.launcher import SACAgent, checkpoints, make_sac_pixel_agent

    assert (SACAgent, checkpoints, make_sac_pixel_agent) == (
        launcher.SACAgent,
        launcher.checkpoints,
        launcher.make_sac_pixel_agent,
    )


def test_importing_a_package_imports_nothing_that_is_slow_or_of_other_systems():
    code = (
        "import sys, importlib; [importlib.import_module(name) for name in "
        f"{[n for n in WITH_API if '.compat' not in n]}]; "
    )
    shown = (
        "print([name for name in sys.modules if name.startswith('hilt.compat') or name in ('torch', 'mujoco', 'ray')])"
    )
    done = subprocess.run([sys.executable, "-c", code + shown], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
