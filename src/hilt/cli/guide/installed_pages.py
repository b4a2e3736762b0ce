"""The pages of the documentation as they are installed: Markdown, without the pictures; and a search in them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hilt.core.errors import MissingFileError

PACKAGE = Path(__file__).resolve().parents[2]
HEADING = re.compile(r"^(#{1,6}) (.+)$")
TITLE, IN_TITLE, IN_TEXT = 20, 8, 1
"""What a word counts in the search: in a heading that has all words, in a heading, in the text"""
MAX_IN_TEXT = 5
"""So often a word counts in the text of a section"""
COMMON = frozenset(
    re.findall(r"\w+", "a an and at be can do does for from how i in is it my not of on the to what when where why")
)
"""Words that say nothing of what is looked for"""

LAST = ("architecture", "benchmarks", "tests")
"""Pages with lists of everything, which are found after the others"""


@dataclass(frozen=True)
class PageSection:
    """A heading of a page, and the text below it up to the next heading."""

    page: str
    title: str
    level: int
    text: str


def pages_folder() -> Path:
    """The folder of the installed pages; in a clone of the repository, docs/."""
    for folder in (PACKAGE / "docs", PACKAGE.parents[1] / "docs"):
        if (folder / "command-line.md").is_file():
            return folder
    raise MissingFileError(
        f"{PACKAGE / 'docs'}: the pages of the documentation are not installed. Install hilt from a wheel: "
        "pip install --force-reinstall hilt."
    )


def cache_folder() -> Path:
    """The folder for what can be made again: below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hilt"


def installed_pages() -> dict[str, Path]:
    """The pages by name."""
    return {path.stem: path for path in sorted(pages_folder().glob("*.md"))}


def sections(path: Path) -> list[PageSection]:
    """A page cut at its headings; lines of code that begin with # are none."""
    found: list[tuple[str, int, list[str]]] = []
    in_code = False
    for line in path.read_text("utf-8").splitlines():
        in_code ^= line.startswith("```")
        heading = None if in_code else HEADING.match(line)
        if heading or not found:
            found.append((heading[2] if heading else path.stem, len(heading[1]) if heading else 1, []))
        found[-1][2].append(line)
    return [PageSection(path.stem, title, level, "\n".join(lines) + "\n") for title, level, lines in found]


def title_of(path: Path) -> str:
    """What a page is about: its first heading."""
    return plain_title(sections(path)[0].title)


def plain_title(title: str) -> str:
    return title.replace("`", "").strip()


def part_of_page(path: Path, words: Sequence[str]) -> str:
    """The sections of a page with all these words in their heading, and what is below them; all of it without words."""
    if not words:
        return path.read_text("utf-8")
    shown, inside = [], 7
    for section in sections(path):
        if section.level <= inside:
            inside = section.level if _has_all(section.title, words) else 7
        shown += [section.text] if inside < 7 else []
    return "\n".join(shown)


def search_pages(words: Sequence[str], most: int = 10) -> list[PageSection]:
    """The sections in which words occur, best first: those that have all of them, before others."""
    looked_for = [word for word in map(_stem, words) if word not in COMMON] or list(map(_stem, words))
    scored = []
    for path in installed_pages().values():
        for section in sections(path):
            title, text = section.title.lower(), section.text.lower()
            there = [word for word in looked_for if word in text]
            score = sum(
                IN_TITLE * (word in title) + IN_TEXT * min(text.count(word), MAX_IN_TEXT) for word in looked_for
            )
            score += TITLE * all(word in title for word in looked_for)
            if there:
                scored.append((len(there), score, section))
    scored.sort(key=lambda one: (one[2].page in LAST, -one[0], -one[1], one[2].page, one[2].level))
    return [section for _, _, section in scored[:most]]


def line_with(section: PageSection, words: Sequence[str]) -> str:
    """The first line of a section, below its heading, with one of these words."""
    lines = [line.strip() for line in section.text.splitlines()[1:] if line.strip()]
    looked_for = [word for word in map(_stem, words) if word not in COMMON]
    return next((line for line in lines if any(word in line.lower() for word in looked_for)), next(iter(lines), ""))


def _has_all(title: str, words: Sequence[str]) -> bool:
    return all(_stem(word) in title.lower() for word in words)


def _stem(word: str) -> str:
    """A word without the ending of its plural, so that both forms are found."""
    word = word.lower().strip("?!.,:;\"'")
    return word[:-1] if len(word) > 4 and word.endswith("s") and not word.endswith("ss") else word
