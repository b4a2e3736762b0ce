"""Names that a package offers and imports only when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hilt.compat.rlinf
import hilt.compat.serl
import hilt.replay


@pytest.mark.parametrize("name", [*hilt.compat.serl.MODULES, *hilt.compat.rlinf.MODULES])
def test_names_of_other_systems_are_the_same_from_either_import_line(name: str):
    package = hilt.compat.serl if name in hilt.compat.serl.MODULES else hilt.compat.rlinf
    found = getattr(package, name)
    assert getattr(hilt.replay, name, found) is found
    assert name in vars(package), "the second access does not import"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'hilt\.replay' has no attribute 'Trajectori'"):
        hilt.replay.Trajectori  # noqa: B018


def test_the_launcher_of_hil_serl_is_importable_by_the_line_that_docs_promise():
    from hilt.compat.serl import launcher
    from hilt.policies.launcher import SACAgent, checkpoints, make_sac_pixel_agent

    assert (SACAgent, checkpoints, make_sac_pixel_agent) == (launcher.SACAgent, launcher.checkpoints, launcher.make_sac_pixel_agent)


def test_importing_the_store_imports_nothing_of_other_systems():
    code = "import sys, hilt.replay; print([name for name in sys.modules if name.startswith('hilt.compat')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
