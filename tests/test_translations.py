"""The Chinese pages have the code, links and numbers of the English ones, and the tool finds those that are stale."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools import translations
from tools.translations import ROOT, Translation

PAIRS = translations.translations()
ENGLISH = """# Training

English · [中文](zh/training.md)

Read [the recipes](recipes.md#settings) for 20 minutes; `hilt train` starts a run.

```
hilt train hil_debug
```

| seconds | of |
|---|---|
| 1.5 | starting |

```{toctree}
recipes
```
"""
CHINESE = """# 训练

[English](../training.md) · 中文

花 20 分钟读一下[配方](recipes.md#设置)；`hilt train` 启动一次训练。

```
hilt train hil_debug
```

| 秒 | 用于 |
|---|---|
| 1.5 | 启动 |
"""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_chinese_page_has_the_code_links_and_numbers_of_the_english_one(pair: Translation):
    assert list(translations.problems(pair)) == []


def test_the_first_pages_are_translated():
    first = {"README.zh.md", "docs/zh/start.md", "docs/zh/training.md", "docs/zh/fine-tuning.md", "docs/zh/formats.md"}
    assert first <= {pair.name for pair in PAIRS}


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A README and two pages, translated and up to date."""
    (tmp_path / "docs/zh").mkdir(parents=True)
    for name, text in [
        *(("docs/training.md", ENGLISH), ("docs/zh/training.md", CHINESE)),
        *(
            ("docs/recipes.md", "# Recipes\n\n## Settings\n\nText.\n"),
            ("docs/zh/recipes.md", "# 配方\n\n## 设置\n\n文字。\n"),
        ),
        *(("README.md", "# Hilt\n\nText.\n"), ("README.zh.md", "# Hilt\n\n文字。\n")),
    ]:
        (tmp_path / name).write_text(text)
    for pair in translations.translations(tmp_path):
        translations.record(pair)
        translations.sync(pair)
    return tmp_path


def test_translated_pages_have_no_problems_and_are_not_stale(pages: Path):
    pairs = translations.translations(pages)
    assert [pair.name for pair in pairs] == ["README.zh.md", "docs/zh/recipes.md", "docs/zh/training.md"]
    assert [problem for pair in pairs for problem in translations.problems(pair)] == []
    assert list(translations.report(pairs, translations.untranslated(pages))) == []
    assert (pages / "docs/zh/training.md").read_text().startswith(CHINESE.rstrip())


def test_changed_english_text_makes_the_translation_stale(pages: Path):
    page = pages / "docs/training.md"
    page.write_text(page.read_text().replace("starts a run", "starts or resumes a run"))
    (pages / "docs/wire.md").write_text("# Wire\n")
    pairs = translations.translations(pages)
    assert list(translations.report(pairs, translations.untranslated(pages))) == [
        "stale: docs/zh/training.md: docs/training.md has changed since",
        "no translation: docs/wire.md",
    ]
    assert [problem for pair in pairs for problem in translations.problems(pair)] == []


@pytest.mark.parametrize(
    ("given", "changed", "expected"),
    [
        ("hil_debug", "tabletop_pick", "other code blocks"),
        ("| 1.5 |", "| 15 |", "other numbers in tables: ['15'] instead of ['1.5']"),
        ("20", "二十", "without the numbers ['20']"),
        ("recipes.md#设置", "recipes.md", "links: without ['docs/recipes.md#2']"),
        ("recipes.md#设置", "recipes.md#settings", "no such heading"),
        ("recipes.md#设置", "../recipes.md#settings", "not as `python tools/translations.py sync` sets them"),
        ("`hilt train`", "`hilt eval`", "without ['hilt train']; the English page is without ['hilt eval']"),
        ("花 20 分钟", "**花 20 分钟。**再", "`**` that makes nothing bold"),
        ("# 训练", "## 训练", "the headings are ['h2'], and ['h1'] on the English page"),
        ("[English](../training.md) · 中文\n\n", "", "the line of languages"),
    ],
)
def test_difference_in_structure_is_found(pages: Path, given: str, changed: str, expected: str):
    page = pages / "docs/zh/training.md"
    assert given in page.read_text()
    page.write_text(page.read_text().replace(given, changed))
    pair = next(one for one in translations.translations(pages) if one.chinese == page)
    assert any(expected in problem for problem in translations.problems(pair)), list(translations.problems(pair))


def test_pictures_in_html_are_compared(pages: Path):
    """A picture with a dark form is HTML, as GitHub shows it."""
    html = '\n<picture>\n  <source srcset="runs-dark.png">\n  <img alt="runs" src="runs.png">\n</picture>\n'
    (pages / "docs/recipes.md").write_text((pages / "docs/recipes.md").read_text() + html)
    pair = next(pair for pair in translations.translations(pages) if pair.name == "docs/zh/recipes.md")
    assert "without ['docs/runs-dark.png', 'docs/runs.png']" in " ".join(translations.problems(pair))
    there = html.replace('srcset="', 'srcset="../').replace('src="', 'src="../')
    text = pair.chinese.read_text().replace("\n\n<!--", f"\n{there}\n<!--")
    pair.chinese.write_text(text)
    assert list(translations.problems(pair)) == []


def test_page_without_its_english_page_is_found(pages: Path):
    (pages / "docs/training.md").unlink()
    found = [problem for pair in translations.translations(pages) for problem in translations.problems(pair)]
    assert found == ["docs/zh/training.md: there is no docs/training.md, which it would be the translation of"]


def test_sync_copies_code_and_adjusts_links(pages: Path):
    page = pages / "docs/training.md"
    page.write_text(page.read_text().replace("hil_debug", "tabletop_pick"))
    chinese = pages / "docs/zh/training.md"
    chinese.write_text(chinese.read_text().replace("recipes.md#设置", "../recipes.md#settings"))
    pair = next(one for one in translations.translations(pages) if one.chinese == chinese)
    translations.sync(pair)
    assert "hilt train tabletop_pick\n" in chinese.read_text() and "](recipes.md#设置)" in chinese.read_text()
    assert list(translations.problems(pair)) == []
    assert pair.stale(), "that its words are up to date is said by `done` only"
    translations.record(pair)
    assert not pair.stale()


def test_command_lists_stale_pages(tmp_path: Path):
    """In a copy of this repository's pages"""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    (tmp_path / "tools").mkdir()
    for name in ("README.md", "README.zh.md", "tools/translations.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "README.md").open("a") as readme:
        readme.write("\nOne more sentence.\n")
    command = [sys.executable, "tools/translations.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "stale: README.zh.md: README.md has changed since" in done.stdout.splitlines()
    assert "no translation: docs/benchmarks.md" in done.stdout.splitlines()
