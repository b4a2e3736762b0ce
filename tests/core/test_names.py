"""Extension points: built-in names, entry points of installed packages, and ``module:Class`` are found in one way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hilt.core import trust
from hilt.core.errors import ConfigError, UnknownNameError, UnsafeError
from hilt.core.names import ExtensionPoint


class Base:
    pass


class BuiltIn(Base):
    pass


@pytest.fixture
def point() -> ExtensionPoint:
    return ExtensionPoint("device", "hilt.devices", {"built_in": f"{__name__}:BuiltIn", "itself": BuiltIn})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers a class, a module, and a name that is built in."""
    package = tmp_path / "somebodys-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = f"theirs = {__name__}:BuiltIn\na_module = {__name__}\nbuilt_in = nothing:Nothing\n"
    (package / "entry_points.txt").write_text(f"[hilt.devices]\n{points}[hilt.others]\nmore = {__name__}:Base\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trust.installed.cache_clear()
    yield
    trust.installed.cache_clear()


def test_a_point_finds_built_in_names_and_module_class(point: ExtensionPoint):
    for name in ("built_in", "itself", f"{__name__}:BuiltIn"):
        point.check(name)
        assert point.load_class(name, Base) is BuiltIn
    point["added"] = f"{__name__}:BuiltIn"
    assert point.load("added") is BuiltIn


def test_a_point_finds_entry_points_and_a_built_in_name_comes_first(point: ExtensionPoint, installed: None):
    assert point.load("theirs") is BuiltIn
    assert point.load("a_module").BuiltIn is BuiltIn
    assert point.load("built_in") is BuiltIn
    assert list(point.known()) == ["built_in", "itself", "theirs", "a_module"]


def test_an_unknown_name_is_refused_with_the_near_one_and_all_others(point: ExtensionPoint, installed: None):
    wanted = (
        r"no device named 'biult_in'; did you mean 'built_in'\?.*a_module, built_in, itself, "
        r"package.module:Class, theirs"
    )
    for ask in (point.check, point.load):
        with pytest.raises(UnknownNameError, match=wanted):
            ask("biult_in")


def test_a_class_of_another_kind_is_refused(point: ExtensionPoint):
    with pytest.raises(ConfigError, match=r"expected a subclass of .*Base, got .*Path.*docs/extending.md"):
        point.load_class("pathlib:Path", Base)


def test_names_that_cannot_be_imported_are_errors(
    point: ExtensionPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "unfinished.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match="the device 'unfinished:Thing' cannot be imported: No module named 'a_package_that"
    ):
        point.load("unfinished:Thing")


def test_names_that_are_not_trusted_are_refused_before_import(
    point: ExtensionPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "suspect.py").write_text("raise AssertionError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with trust.command_line([]):
        for ask in (point.check, point.load):
            with pytest.raises(UnsafeError, match="nothing of it was run"):
                ask("suspect:Thing")


def test_a_group_that_trust_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"the group 'hilt.toys' .*hilt.tasks"):
        ExtensionPoint("toy", "hilt.toys", {})


def test_every_point_is_documented_and_used_by_a_package_outside():
    root = Path(__file__).parents[2]
    page, package = (root / path for path in ("docs/extending.md", "tests/extension/hilt_example/pyproject.toml"))
    for group in trust.GROUPS:
        assert f"`{group}`" in page.read_text(), f"{page} says nothing of {group}"
        assert f'[project.entry-points."{group}"]' in package.read_text(), f"{package} has nothing for {group}"
    for example in ("docs/extending-learning.md", "docs/bring-your-own-device.md", "docs/bring-your-own-robot.md"):
        assert "what you get for free" in (root / example).read_text().lower()
