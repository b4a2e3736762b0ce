"""The documentation that is installed with Hilt: pages, parts of them, a search, and pages for the browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli.guide import docs_command
from hilt.cli.guide.installed_pages import installed_pages, search_pages, sections
from hilt.core.errors import MissingFileError

ROOT = Path(__file__).parents[2]


def docs(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["docs", *words], env={"COLUMNS": "100"})


def test_without_a_topic_all_pages_are_listed():
    listed = docs().stdout
    assert all(f"hilt docs {page.stem}" in listed for page in (ROOT / "docs").glob("*.md"))
    assert "Training with a person in the loop" in listed


@pytest.mark.parametrize("name", ["training", "training.md", "docs/training.md"])
def test_a_page_is_printed_as_it_is_into_a_pipe(name: str):
    assert docs(name).stdout.strip() == (ROOT / "docs/training.md").read_text().strip()


def test_words_of_a_heading_choose_a_part_with_what_is_below_it():
    part = docs("questions", "driving").stdout
    assert part.startswith("## Driving and taking over") and "### My gripper never closes" in part
    assert "## Learning" not in part


def test_a_heading_that_is_not_there_is_an_error_with_those_that_are():
    result = docs("training", "nowhere")
    assert result.exit_code == 1 and "no heading of training named 'nowhere'" in result.stderr
    assert "4. Stop and resume" in result.stderr


def test_lines_of_code_are_no_headings():
    titles = [section.title for section in sections(ROOT / "docs/training.md")]
    assert titles[0] == "Training with a person in the loop" and "4. Stop and resume" in titles
    assert not [title for title in titles if "hilt train" in title]


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("how do I resume", "questions"),
        ("CUDA out of memory", "questions"),
        ("my gripper never closes", "questions"),
        ("take over", "open"),
        ("LeRobot", "questions"),
        ("emergency stop", "teleop"),
        ("real-time chunking", "vla"),
        ("which alarm", "alarms"),
        ("two machines", "training"),
        ("Two arms", "robot"),
    ],
)
def test_search_finds_the_page_among_the_first_three(question: str, page: str):
    assert page in [section.page for section in search_pages(question.split())[:3]]
    assert f"hilt docs {page}" in docs(*question.split()).stdout


def test_words_that_are_nowhere_are_an_error():
    result = docs("xyzzyq")
    assert result.exit_code == 1 and "'xyzzyq'" in result.stderr


def test_path_of_the_pages_is_printed():
    assert docs("--path").stdout.strip() == str(ROOT / "docs")
    assert docs("training", "--path").stdout.strip() == str(ROOT / "docs/training.md")


def test_pages_for_the_browser_link_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(docs_command.webbrowser, "open", opened.append)
    made = Path(docs("training", "--browser").stdout.strip())
    assert opened == [made.as_uri()] and made.is_relative_to(tmp_path)
    links = re.findall(r'href="([\w-]+\.html)(?:#([\w-]+))?"', made.read_text())
    assert ("learner.html", "") in links and ("alarms.html", "back-to-the-last-good-checkpoint") in links
    for page, anchor in links:
        assert (made.parent / page).is_file() and (not anchor or f'id="{anchor}"' in (made.parent / page).read_text())
    assert "<table>" in (made.parent / "observe.html").read_text()
    assert all(f"href='{name}.html'" in (made.parent / "index.html").read_text() for name in installed_pages())


def test_pictures_with_a_dark_form_are_markdown_to_a_reader(tmp_path: Path):
    """On the pages they are HTML, which a terminal would leave out with its text."""
    page = tmp_path / "page.md"
    source = '<source media="(prefers-color-scheme: dark)" srcset="runs-dark.png">'
    page.write_text(f'One.\n\n<picture>\n  {source}\n  <img alt="A table" src="runs.png">\n</picture>\n\nTwo.\n')
    assert docs_command._plain_pictures(page.read_text()) == "One.\n\n![A table](runs.png)\n\nTwo.\n"
    assert docs_command._relinked(page) == "One.\n\n*[picture: A table]*\n\nTwo.\n"
    (tmp_path / "runs.png").write_bytes(b"")
    assert docs_command._relinked(page) == f"One.\n\n![A table]({(tmp_path / 'runs.png').as_uri()})\n\nTwo.\n"


def test_an_unknown_page_for_the_browser_is_an_error_with_the_nearest():
    result = docs("trainin", "--browser")
    assert result.exit_code == 1 and "did you mean 'training'?" in result.stderr


def test_pages_that_are_not_installed_are_an_error_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.cli.guide.installed_pages.PACKAGE", tmp_path / "lib" / "hilt")
    with pytest.raises(MissingFileError, match="pip install --force-reinstall hilt"):
        installed_pages()
