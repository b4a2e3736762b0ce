"""Every Python example in docs/ and README runs as it stands, in an empty folder."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import architecture

from tests.forked import TIMEOUT_S, ForkServer

ROOT = Path(__file__).parent.parent
EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.exists()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "sys.argv" not in code  # those run with an argument: see test_format.py
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """A learner and actors that it starts are forked, too."""
    script = tmp_path / "example.py"
    script.write_text(code)
    done = fork_server.run(script, TIMEOUT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_where_nothing_is_imported_yet(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr


PAGES = {"hil": "training", "distributed": "cluster", "checks": "formats", "app": "open", "serving": "serve-policy"}
"""Parts whose page has another name than theirs"""


def test_every_part_has_a_page() -> None:
    parts = [
        p.name
        for p in (ROOT / "src" / "hilt").iterdir()
        if p.is_dir() and (p / "__init__.py").exists() and p.name != "cli"
    ]
    for part in parts:
        page = ROOT / "docs" / f"{PAGES.get(part, part)}.md"
        assert page.exists() and "```python" in page.read_text(), f"{page}: one page per part, with a complete example"


def test_the_architecture_page_and_its_picture_are_what_the_source_says() -> None:
    assert architecture.picture() == architecture.PICTURE.read_text(), "run: python tools/architecture.py"
    assert architecture.page(architecture.PAGE.read_text()) == architecture.PAGE.read_text(), (
        "run: python tools/architecture.py"
    )


HOP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


@pytest.mark.parametrize(("page", "files"), [("life-of-an-observation", 16), ("life-of-a-log-probability", 7)])
def test_every_hop_of_a_life_is_in_the_source(page: str, files: int) -> None:
    hops = HOP.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert len({file for file, _ in hops}) == files, "the page says how many files there are"
    for file, name in hops:
        owner, _, function = name.rpartition(".")
        tree = ast.parse((ROOT / "src" / "hilt" / file).read_text())
        nodes = (
            [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
            if owner
            else [tree]
        )
        assert any(getattr(one, "name", "") == function for node in nodes for one in ast.walk(node)), (
            f"{file} has no {name}"
        )
