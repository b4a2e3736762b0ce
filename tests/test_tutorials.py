"""The tutorials: each page is run from start to end in an empty folder, and so is its notebook."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools import tutorials

from tests.effort import need, need_rendering
from tests.wire.processes import free_port

PAGES = {page.stem: page for page in tutorials.pages()}
HEADINGS = ("What you will build", "What you need", "What to try next")
MIN_WORDS, MAX_WORDS = 600, 1200
PICTURE_BYTES = 150_000


def prose(page: Path) -> str:
    return tutorials.BLOCK.sub("", page.read_text())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_it_builds_needs_and_leads_to(name: str):
    text = prose(PAGES[name])
    assert [heading for heading in HEADINGS if f"\n## {heading}\n" not in text] == []
    words = [line for line in text.splitlines() if not line.startswith("|")]
    assert MIN_WORDS <= len(" ".join(words).split()) <= MAX_WORDS
    assert f"[This page as a notebook]({name}.ipynb)" in text


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_small_picture_with_a_text_for_those_who_do_not_see_it(name: str):
    pictures = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", PAGES[name].read_text())
    assert pictures
    for text, target in pictures:
        assert len(text) > 40 and (PAGES[name].parent / target).stat().st_size < PICTURE_BYTES, target


def test_a_block_without_a_name_that_is_not_a_command_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nprint(1)\n```\n")
    with pytest.raises(tutorials.TutorialError, match=r"page.md:3: a block of python without a name"):
        tutorials.blocks(page)


def test_a_command_that_fails_is_named_with_its_line_and_what_it_printed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n**a.txt**\n\n```yaml\nhere: 1\n```\n\n```bash\ncat a.txt\nfalse\necho never\n```\n")
    with pytest.raises(tutorials.TutorialError, match=r"page.md:9: .* ended with code 1:(?s:.*)lines:\nhere: 1$"):
        tutorials.TutorialRun(page, tmp_path).run()


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_has_the_blocks_of_its_page_and_no_outputs(name: str):
    """Also where jupytext is not installed."""
    cells = json.loads(PAGES[name].with_suffix(".ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    blocks = tutorials.blocks(PAGES[name])
    assert len(codes) == len(blocks)
    for cell, block in zip(codes, blocks, strict=True):
        assert "".join(cell["source"]).endswith(block.text.rstrip("\n"))


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_is_what_jupytext_makes_of_its_page(name: str):
    need("jupytext")
    assert PAGES[name].with_suffix(".ipynb").read_text() == tutorials.notebook(PAGES[name]), (
        "run: python tools/tutorials.py notebooks"
    )


WIRE = re.compile(r"^(hilt train (?:hil-serl:|tabletop_|vla_person).*?)(?= \\\\$|$)", re.MULTILINE)
"""Commands that start a learner and actors, which use the usual ports unless others are given"""


def own_copy(page: Path, folder: Path) -> Path:
    """The page in another folder, with ports of its own: others may use the usual ones now."""
    text = page.read_text()
    for port in sorted(set(re.findall(r"\b(?:50|55)\d\d\b", text))):
        text = text.replace(port, str(free_port()))
    text = WIRE.sub(lambda found: f"{found[0]} wire.port={free_port()} wire.broadcast_port={free_port()}", text)
    folder.mkdir()
    (folder / page.name).write_text(text)
    return folder / page.name


def environment() -> dict[str, str]:
    """No person is there: where a page lets the reader choose, a script takes over."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "OPERATOR": "script"}


Follow = Callable[..., str]


@pytest.fixture
def follow(tmp_path: Path, counted: Callable[[str], None]) -> Follow:
    """Runs a page in an empty folder, and returns what its commands printed."""

    def followed(name: str, **options: Any) -> str:
        page, began = own_copy(PAGES[name], tmp_path / "page"), time.monotonic()
        (tmp_path / "work").mkdir()
        printed = tutorials.TutorialRun(page, tmp_path / "work", environment(), **options).run()
        counted(f"{time.monotonic() - began:.0f} s")
        return printed

    return followed


def test_check_a_dataset(follow: Follow):
    need("h5py", "av", "pyarrow")
    need_rendering()
    printed = follow("check-a-dataset")
    for fault in ("error  values", "warning  black-frames", "mixes millimeters and", "in every step as data.hdf5"):
        assert fault in printed, "the page promises that it is found"
    assert "exit code 1" in printed and re.search(r"ok: 0 errors, .* in 9 episodes", printed)


def test_own_robot(follow: Follow):
    need("uvicorn", "gymnasium")
    files = {block.name: block.text for block in tutorials.blocks(PAGES["own-robot"]) if block.is_file}
    lines = sum(files[name].count("\n") for name in ("my_arm.py", "arm.yaml", "my_expert.py"))
    assert f"have {lines} lines together" in PAGES["own-robot"].read_text() and lines <= 60
    printed = follow("own-robot")
    assert "is outside the workspace" in printed and "have 4 of 4 episodes" in printed and "ok: 0 errors" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need("jupytext", "nbclient", "ipykernel")
    import nbformat
    from nbclient import NotebookClient

    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", tutorials.with_commands(os.environ["PATH"]))
    (tmp_path / "work").mkdir()
    made: Any = nbformat.reads(tutorials.notebook(own_copy(PAGES[name], tmp_path / "page")), as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    NotebookClient(made, timeout=int(tutorials.BLOCK_TIMEOUT_S), kernel_name="python3", resources=resources).execute()
