"""The documentation as a site: every page has its place, and `make test-long` builds it and asks its search."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import build_site, site_reference

from tests.effort import need
from tests.teleop import chromium

ROOT = Path(__file__).parent.parent
TOCTREE = re.compile(r"```\{toctree\}\n.*?\n\n(.*?)\n```", re.DOTALL)
GENERATED = {"api/index", "reference/errors/index", "reference/commands", "reference/recipe-values"}
GENERATED |= {"reference/alarms-and-curves", "reference/settings-robot", "reference/settings-value"}
GENERATED |= {f"reference/{page}" for page in site_reference.KINDS}


def test_every_page_has_one_place():
    pages = build_site.staged_pages()
    listed = (name for text in pages.values() for menu in TOCTREE.findall(text) for name in menu.split())
    placed = Counter(name.removeprefix("/") for name in listed)
    known = {name.removesuffix(".md") for name in pages} | GENERATED
    assert set(placed) == known - {"index"}, "list each page once, in a section of docs/site"
    assert {name: count for name, count in placed.items() if count > 1} == {}


def test_pictures_follow_the_switch_of_the_theme():
    """A drawing becomes a light and a dark file, and the theme shows one of them; any other picture stays as it is."""
    page = build_site.staged_pages()["zh/one-arm.md"]
    light, dark = re.findall(r"```\{image\} (\S+)\n:alt: \"(.{20,})\"\n:class: (\S+)\n```", page)
    assert (light[0], light[2]) == ("../learning-tasks.svg", "only-light")
    assert (dark[0], dark[2]) == ("../learning-tasks-dark.svg", "only-dark") and light[1] == dark[1]
    page = build_site.staged_pages()["zh/open.md"]
    assert "<picture>" not in page and "```{image} ../open-runs-dark.png\n" in page
    pictures = build_site.staged_pictures()
    assert b"prefers-color-scheme" not in pictures["learning-tasks.svg"] + pictures["learning-tasks-dark.svg"]
    assert pictures["learning-tasks.svg"] != pictures["learning-tasks-dark.svg"]
    assert "](learned.png)" in build_site.staged_pages()["index.md"] and "learned-dark.png" not in pictures


def test_every_command_is_in_the_reference():
    names = [name for name, _ in site_reference.all_commands()]
    page = site_reference.commands()
    assert {"train", "train sft", "data convert", "keys new"} <= set(names)
    assert re.findall(r"^## hilt (.+)$", page, re.MULTILINE) == names
    assert "| `--episodes`" in page and "hilt record tabletop/pick --device browser --episodes 20" in page


def test_texts_of_errors_are_found_in_the_source():
    found = list(site_reference.messages())
    assert len(found) > 900
    assert site_reference.Message(
        "ConfigError", "the recipe {…} gave {…}: expected a hilt.hil.config.Hil, or a function that returns one.",
        "recipes/__init__.py",
    ) in found  # fmt: skip


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("A *star* and name_ of `Step`s.", r"A \*star\* and name\_ of `Step`\ s."),
        ("Example:\n\n    x = 1 * 2\n\n    y = x_", "Example:\n\n::\n\n    x = 1 * 2\n\n    y = x_"),
        ("Such as::\n\n    x | y\n\nand on", "Such as::\n\n    x | y\n\nand on"),
        ("Args:\n    size: so\n        many\n    seed: one", "size\n    so many\nseed\n    one"),
        ("how\n    ``uniform`` or *not*\nseed\n    a number", "how\n    ``uniform`` or \\*not\\*\nseed\n    a number"),
    ],
)
def test_docstrings_become_restructured_text(docstring: str, expected: str):
    assert site_reference.rst(docstring) == expected


def test_chinese_sections_have_the_menus_of_the_english_ones():
    pages = build_site.staged_pages()
    english, chinese = (build_site.menu_of(pages[name]) for name in ("a-vla.md", "zh/a-vla.md"))
    assert chinese == [f"/zh/{name}" for name in english if f"zh/{name}.md" in pages] and "/zh/recap" in chinese
    assert "/zh/own-robot" in build_site.menu_of(pages["zh/tutorials.md"]), "a tutorial has no folder in Chinese"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("sphinx", "furo", "myst_parser")
    folder = tmp_path_factory.mktemp("site")
    build_site.stage(folder / "source")
    build_site.build(folder / "source", folder / "site")
    return folder / "site"


@pytest.mark.long
def test_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(site: Path):
    assert {"index.html", "training.html", "search.html", "api/replay.html"} <= {
        path.relative_to(site).as_posix() for path in site.rglob("*.html")
    }
    fetched = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc=["'](?:https?:)?//|<link[^>]*href=["'](?:https?:)?//""")
    styled = re.compile(r"""@import|url\(["']?(?:https?:)?//""")
    assert [path for path in site.rglob("*.html") if fetched.search(path.read_text())] == []
    assert [path for path in site.rglob("*.css") if styled.search(path.read_text())] == []
    replay = (site / "api/replay.html").read_text()
    assert "_modules/hilt/replay/log.html#Log" in replay, "links to the source"


QUESTIONS = {
    "resume": ("questions", "training"),
    "CUDA out of memory": ("questions",),
    "take over": ("questions", "teleop", "open"),
    "LeRobot": ("questions", "formats", "data"),
    "my gripper never closes": ("questions",),
    "emergency stop": ("teleop",),
    "two machines": ("training", "wire"),
    "own robot": ("bring-your-own-robot", "tutorials/own-robot"),
    "reward classifier": ("classifier",),
    "LoRA": ("vla", "fine-tuning"),
    "batch_size": ("reference/settings-person", "reference/settings-fine-tuning"),
    "Log.create": ("api/replay", "replay"),
}
"""What people look for, and the pages of which one is to be among the first three"""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


@pytest.mark.long
@pytest.mark.skipif(bool(chromium.absent()), reason=chromium.ABSENT)
@pytest.mark.parametrize("question", QUESTIONS)
def test_search_finds_the_page_among_the_first_three(question: str, address: str, chromium_tab: Any):
    hits = searched(chromium_tab, address, question)
    assert set(hits[:3]) & set(QUESTIONS[question]), hits[:8]


def searched(browser: Any, address: str, question: str) -> list[str]:
    """The pages that the site's search lists, best first."""
    browser.get(f"{address}/search.html?q={question.replace(' ', '+')}")
    chromium.wait(browser, "return /found|did not match/.test(document.querySelector('.search-summary')?.innerText)")
    links = browser.execute_script("return [...document.querySelectorAll('ul.search li > a')].map((a) => a.href)")
    return [link.removeprefix(f"{address}/").partition(".html")[0] for link in links]
