"""The files that no program reads until it is too late: versions, extras, templates and the Dockerfile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tools import extras

import hilt

ROOT = Path(__file__).parent.parent


def test_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hilt.__version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_every_extra_for_users_is_in_the_table_with_its_meaning():
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    users, others = section.split("dev = [")
    known = set(re.findall(r"^([\w-]+) = \[", users, re.MULTILINE)) | {"docs"}
    assert extras.MEANINGS.keys() == known
    listed = extras.ROW.findall((ROOT / "docs/install.md").read_text())
    assert set(listed) == known and len(listed) == len(known), "each has one row"
    assert 'docs = ["' in others


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_templates_of_issues_have_a_name_and_ask_for_something(name: str):
    _, head, body = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head).keys() == {"name", "about"} and body.count("**") >= 6


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: (RUN, the rest), with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_dockerfile_keeps_the_rules_of_small_and_safe_images():
    """Those that hadolint checks: this runs where there is neither it nor docker."""
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "ARG", "ENTRYPOINT", "CMD", "USER"}
    stages, user = {}, {}
    for word, rest in instructions():
        assert word in known, word
        if word == "FROM":
            image, _, stage = rest.partition(" AS ")
            assert stage and (image in stages or (":" in image and not image.endswith(":latest"))), rest
            stages[stage] = image
            user[stage] = "root"
        elif word == "USER":
            user[[*stages][-1]] = rest
        elif word in ("ENTRYPOINT", "CMD"):
            assert rest.startswith('["'), "with a shell in between, signals do not arrive"
        elif word == "RUN" and "apt-get install" in rest:
            assert "apt-get update" in rest and "--no-install-recommends" in rest and "/var/lib/apt/lists" in rest
        elif word == "RUN" and "pip " in rest:
            assert "--no-cache-dir" in rest
        elif word == "COPY" and "--from" not in rest:
            assert all((ROOT / path).exists() for path in rest.split()[:-1]), rest
    assert {user["cpu"], user["cuda"]} == {"hilt"}


def test_extras_in_the_dockerfile_exist_and_what_it_copies_is_not_ignored():
    text = (ROOT / "Dockerfile").read_text()
    named = {extra for group in re.findall(r"whl\)\[([\w,-]+)\]", text) for extra in group.split(",")}
    assert named and named <= extras.MEANINGS.keys()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        path for word, rest in instructions() if word == "COPY" and "--from" not in rest for path in rest.split()[:-1]
    }
    assert copied == kept


@pytest.mark.long
def test_image_is_built_where_docker_runs():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("docker does not run here")
    built = subprocess.run(
        ["docker", "build", "--target", "cpu", "-q", ROOT], capture_output=True, text=True, timeout=800
    )
    assert built.returncode == 0, built.stderr
    shown = subprocess.run(
        ["docker", "run", "--rm", built.stdout.strip(), "--version"], capture_output=True, timeout=60
    )
    assert shown.stdout.decode() == f"hilt {hilt.__version__}\n"


def test_release_needs_its_version_in_the_changelog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")  # it is started as a script, beside its helpers
    import release_check

    (tmp_path / "src/hilt").mkdir(parents=True)
    (tmp_path / "src/hilt/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.1.0\n")
    changelog, citation = release_check.wrong_versions(tmp_path)
    assert "`## [1.2.0]`" in changelog and "`version: 1.2.0`" in citation
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2026-11-18\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.0\n")
    assert release_check.wrong_versions(tmp_path) == []
