"""Compares the Chinese pages with the English pages that they were translated from.

    python tools/translations.py              lists the stale pages, and the pages without a translation
    python tools/translations.py sync         copies code blocks from the English pages, and adjusts links
    python tools/translations.py done PAGE    the same for one page, which is also recorded as up to date

README.zh.md is the translation of README.md, docs/zh/NAME.md the one of docs/NAME.md (or of a page of that name in
docs/site or docs/tutorials), and docs/zh/examples.md that of examples/README.md. A Chinese page ends with a comment
that has a hash of the English text. Code blocks and the numbers in tables have to be equal, section by section; so do
the targets of links, where a link to a page that has a translation goes to it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
OWN = {"glossary.md"}
"""Chinese pages that are nobody's translation"""
FOLDERS = ("docs", "docs/site", "docs/tutorials")
"""Folders of English pages, in which a Chinese page's English one is looked for in this order"""
UNTRANSLATED = {"docs/architecture.md", "docs/tests.md", "docs/site/chinese.md"}
"""Pages that a program writes, and the list of the Chinese pages"""
SWITCH = re.compile(r"^(?:English · \[中文\]\([^)]+\)|\[English\]\([^)]+\) · 中文)\n\n", re.MULTILINE)
STAMP = re.compile(r"\n*<!-- translated from (?P<page>\S+), sha256 (?P<hash>[0-9a-f]{16}) -->\n*\Z")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HTML_TARGET = re.compile(r'\b(?:src|srcset)="([^"]+)"')
TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
PARSER = MarkdownIt("commonmark").enable("table")


@dataclass
class Section:
    """What a heading and the text up to the next heading contain."""

    level: str
    title: str
    anchor: str
    code: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    spans: set[str] = field(default_factory=set)
    numbers: Counter[str] = field(default_factory=Counter)
    rows: list[Counter[str]] = field(default_factory=list)
    items: int = 0
    unclosed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Translation:
    """A Chinese page and the English page that it was made from."""

    root: Path
    chinese: Path
    english: Path

    @property
    def name(self) -> str:
        return self.chinese.relative_to(self.root).as_posix()

    def stale(self) -> bool:
        """Whether the English text has changed since it was translated."""
        stamp = STAMP.search(self.chinese.read_text())
        return stamp is None or stamp["hash"] != text_hash(self.english)


def translations(root: Path = ROOT) -> list[Translation]:
    found = [Translation(root, root / "README.zh.md", root / "README.md")]
    for chinese in sorted((root / "docs" / "zh").glob("*.md")):
        if chinese.name not in OWN:
            choices = [root / folder / chinese.name for folder in FOLDERS]
            choices += [root / "examples" / "README.md"] if chinese.name == "examples.md" else []
            found.append(Translation(root, chinese, next((path for path in choices if path.exists()), choices[0])))
    return [pair for pair in found if pair.chinese.exists()]


def untranslated(root: Path = ROOT) -> list[str]:
    """The English pages that no Chinese page was made from."""
    pages = [page for folder in FOLDERS for page in sorted((root / folder).glob("*.md"))]
    pages = [root / "README.md", *pages, root / "examples/README.md"]
    done = {pair.english for pair in translations(root)}
    names = [page.relative_to(root).as_posix() for page in pages if page.exists() and page not in done]
    return [name for name in names if name not in UNTRANSLATED]


def text_hash(english: Path) -> str:
    return hashlib.sha256(SWITCH.sub("", english.read_text(), count=1).encode()).hexdigest()[:16]


def sections(text: str) -> list[Section]:
    """What a page contains, heading by heading. The line that switches languages is left out."""
    found = [Section("", "the beginning of the page", "")]
    cells: Counter[str] | None = None
    anchors: Counter[str] = Counter()
    tokens = PARSER.parse(SWITCH.sub("", STAMP.sub("\n", text), count=1))
    for before, token in zip([Token("", "", 0), *tokens], tokens, strict=False):
        if token.type == "inline" and before.type == "heading_open":
            title = "".join(part.content for part in token.children or [])
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors[anchor] += 1
            suffix = f"-{anchors[anchor] - 1}" if anchors[anchor] > 1 else ""
            found.append(Section(before.tag, title, anchor + suffix))
        section = found[-1]
        if _is_code(token):
            section.code.append(f"{token.info}\n{token.content}")
        elif token.type == "list_item_open":
            section.items += 1
        elif token.type in ("tr_open", "tr_close"):
            cells = Counter() if token.type == "tr_open" else None
            section.rows += [cells] if cells is not None else []
        elif token.type == "inline":
            for part in token.children or []:
                if part.type == "text":
                    (section.numbers if cells is None else cells).update(NUMBER.findall(part.content))
                    section.unclosed += [part.content] if "**" in part.content else []
                elif part.type == "code_inline":
                    section.spans.add(part.content)
                elif part.type in ("link_open", "image"):
                    section.targets.append(unquote(str(part.attrs.get("href") or part.attrs.get("src"))))
        elif token.type == "html_block":
            section.targets += HTML_TARGET.findall(token.content)
    return found


def _is_code(token: Token) -> bool:
    """A code block; the site's tables of contents, which are English, are none."""
    return token.type in ("fence", "code_block") and not token.info.startswith("{toctree}")


def problems(pair: Translation) -> Iterator[str]:
    """What the Chinese page has otherwise than the English one."""
    if not pair.english.exists():
        yield f"{pair.name}: there is no {pair.english.relative_to(pair.root)}, which it would be the translation of"
        return
    english, chinese = sections(pair.english.read_text()), sections(pair.chinese.read_text())
    levels = [[section.level for section in page] for page in (english, chinese)]
    if levels[0] != levels[1]:
        yield f"{pair.name}: the headings are {levels[1][1:]}, and {levels[0][1:]} on the English page"
        return
    for ours, theirs in zip(chinese, english, strict=True):
        place = f"{pair.name}, {ours.title!r} ({theirs.title!r})"
        if ours.code != theirs.code:
            yield f"{place}: other code blocks; `python tools/translations.py sync` copies them if none is missing"
        if ours.items != theirs.items:
            yield f"{place}: {ours.items} items in lists instead of {theirs.items}"
        if ours.rows != theirs.rows:
            yield f"{place}: other numbers in tables: {_differing(ours.rows, theirs.rows)}"
        yield from _difference(f"{place}: links", _targets(pair, ours, False), _targets(pair, theirs, True))
        yield from _difference(f"{place}: `...`", Counter(ours.spans), Counter(theirs.spans))
        if len(ours.unclosed) > len(theirs.unclosed):
            yield f"{place}: `**` that makes nothing bold, as behind a full stop: {ours.unclosed}"
        if missing := theirs.numbers - ours.numbers:
            yield f"{place}: without the numbers {sorted(missing)}"
    text = pair.chinese.read_text()
    if text != linked(pair, text) or not SWITCH.search(text) or not SWITCH.search(pair.english.read_text()):
        yield f"{pair.name}: links or the line of languages are not as `python tools/translations.py sync` sets them"


def _difference(what: str, ours: Counter[str], theirs: Counter[str]) -> Iterator[str]:
    if ours != theirs:
        yield f"{what}: without {sorted(theirs - ours)}; the English page is without {sorted(ours - theirs)}"


def _differing(ours: list[Counter[str]], theirs: list[Counter[str]]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} rows instead of {len(theirs)}"
    pairs = [(list(one.elements()), list(other.elements())) for one, other in zip(ours, theirs, strict=True)]
    return "; ".join(f"{one} instead of {other}" for one, other in pairs if one != other)


def _targets(pair: Translation, section: Section, english: bool) -> Counter[str]:
    """The targets of a section's links, as paths from the root to English pages, with the number of the heading."""
    page = pair.english if english else pair.chinese
    return Counter(_english_target(pair.root, page, target) for target in section.targets)


def _english_target(root: Path, page: Path, target: str) -> str:
    path, mark, anchor = target.partition("#")
    if ":" in path:
        return target
    file = Path(os.path.normpath(page.parent / path)) if path else page
    known = {pair.chinese: pair.english for pair in translations(root)}
    if anchor and file.suffix == ".md" and file.exists():
        anchors = [section.anchor for section in sections(file.read_text())]
        anchor = str(anchors.index(anchor)) if anchor in anchors else f"{anchor} (no such heading)"
    return os.path.relpath(known.get(file, file), root) + mark + anchor


def linked(pair: Translation, text: str) -> str:
    """A Chinese text whose links lead to the Chinese pages, where there are any, and to the English ones elsewhere.
    They may be written as on the English page."""
    known = {one.english: one.chinese for one in translations(pair.root)}

    def target(found: re.Match[str]) -> str:
        path, mark, anchor = found[0].partition("#")
        if ":" in path:
            return found[0]
        choices = [os.path.normpath(page.parent / path) if path else page for page in (pair.chinese, pair.english)]
        file = next((Path(choice) for choice in choices if Path(choice).exists()), Path(choices[0]))
        english = next((one.english for one in translations(pair.root) if one.chinese == file), file)
        file = known.get(english, english)
        if anchor and file != english:
            ours, theirs = ([one.anchor for one in sections(page.read_text())] for page in (file, english))
            anchor = ours[theirs.index(anchor)] if anchor in theirs and len(ours) == len(theirs) else anchor
        shown = "" if file == pair.chinese else os.path.relpath(file, pair.chinese.parent)
        return f"{shown}{mark}{anchor}"

    head = SWITCH.search(text)
    beginning = text[: head.end()] if head else ""
    return beginning + _outside_code(text[len(beginning) :], lambda part: TARGET.sub(target, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies a function to the lines that are not in code blocks."""
    lines, blocks = text.splitlines(keepends=True), code_blocks(text)
    within = {number for first, last in blocks for number in range(first, last)}
    return "".join(line if number in within else change(line) for number, line in enumerate(lines))


def code_blocks(text: str) -> list[tuple[int, int]]:
    """The first line of each code block, and the one after its last."""
    found = [token.map for token in PARSER.parse(text) if _is_code(token) and token.map]
    return [(first, last) for first, last in found]


def with_code_of(english: str, chinese: str) -> str:
    """The Chinese text with the code blocks of the English one, if they are as many."""
    ours, theirs = code_blocks(chinese), code_blocks(english)
    if len(ours) != len(theirs):
        return chinese
    lines, source = chinese.splitlines(keepends=True), english.splitlines(keepends=True)
    for (first, last), (begin, end) in reversed(list(zip(ours, theirs, strict=True))):
        lines[first:last] = source[begin:end]
    return "".join(lines)


def with_switch(text: str, line: str) -> str:
    """A page with the line that switches languages below its title."""
    title, _, rest = SWITCH.sub("", text, count=1).partition("\n\n")
    return f"{title}\n\n{line}\n\n{rest}"


def sync(pair: Translation) -> None:
    """Copies the code blocks of the English page and adjusts links; writes the line of languages into both pages."""
    there, back = (
        os.path.relpath(one, other.parent)
        for one, other in [(pair.chinese, pair.english), (pair.english, pair.chinese)]
    )
    english = with_switch(pair.english.read_text(), f"English · [中文]({there})")
    chinese = with_switch(with_code_of(english, pair.chinese.read_text()), f"[English]({back}) · 中文")
    pair.english.write_text(english)
    pair.chinese.write_text(linked(pair, chinese))


def record(pair: Translation) -> None:
    """Records that the Chinese page is a translation of the English text as it is."""
    page, text = pair.english.relative_to(pair.root).as_posix(), STAMP.sub("", pair.chinese.read_text()).rstrip("\n")
    pair.chinese.write_text(f"{text}\n\n<!-- translated from {page}, sha256 {text_hash(pair.english)} -->\n")


def report(pairs: Iterable[Translation], missing: Iterable[str]) -> Iterator[str]:
    for pair in pairs:
        if pair.english.exists() and pair.stale():
            yield f"stale: {pair.name}: {pair.english.relative_to(pair.root)} has changed since"
    for name in missing:
        yield f"no translation: {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the Chinese pages with the English ones.")
    parser.add_argument("action", nargs="?", choices=["list", "sync", "done"], default="list")
    parser.add_argument("page", nargs="*", help="Chinese pages that are up to date: docs/zh/training.md")
    given = parser.parse_args()
    pairs = translations()
    if given.action == "list":
        for line in report(pairs, untranslated()):
            print(line)
        return
    chosen = [pair for pair in pairs if pair.name in given.page]
    if given.action == "done" and len(chosen) != len(given.page):
        raise SystemExit(f"{given.page}: expected Chinese pages, of {[pair.name for pair in pairs]}.")
    for pair in chosen:
        if given.action == "done":
            record(pair)
    for pair in pairs:
        sync(pair)
    for pair in pairs:
        for problem in problems(pair):
            print(problem)


if __name__ == "__main__":
    main()
