"""The tests mirror the source: every source file has a test file of its name, or a
line in tests/README.md that names its tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "hilt"
PAGE = (TESTS / "README.md").read_text()
ROW = re.compile(r"^\| `(?P<file>[\w/.]+\.py)` \|(?: `(?P<tests>[\w/.]+\.py)` \|)? (?P<why>.+) \|$", re.MULTILINE)


def mirrored(file: str) -> Path:
    """``replay/sampling/sampler.py`` → ``tests/replay/test_sampler.py``"""
    part, *_, name = file.split("/")
    return TESTS / part / f"test_{name}"


def sources() -> list[str]:
    files = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    return sorted(file for file in files if not file.endswith(("__init__.py", "__main__.py")))


def rows() -> list[re.Match[str]]:
    return list(ROW.finditer(PAGE))


def test_every_source_file_has_tests_of_its_name_or_a_line_that_names_them():
    listed = {row["file"] for row in rows() if row["tests"]}
    assert [file for file in sources() if not mirrored(file).exists() and file not in listed] == []


def test_every_line_names_a_source_file_without_tests_of_its_name_and_a_test_file():
    known = set(sources())
    for row in rows():
        if row["tests"]:
            assert row["file"] in known, f"{row['file']}: there is no such source file"
            assert not mirrored(row["file"]).exists(), (
                f"{row['file']}: it has tests of its name by now, and needs no line"
            )
            assert (TESTS / row["tests"]).is_file(), f"{row['tests']}: there is no such test file"


def test_every_helper_has_a_line():
    files = (path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
    helpers = {file for file in files if not re.search(r"(^|/)(test_|__)[^/]*$", file) and "extension/" not in file}
    assert {row["file"] for row in rows() if not row["tests"]} == helpers
