"""What every page keeps to: links lead somewhere, commands and settings exist, pages are short, and words are plain."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import figures

from hilt.cli.guide.candidates import command_options
from hilt.cli.help import EXAMPLES
from tests.effort import need

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = [
    *DOCS,
    *TUTORIALS,
    *sorted((ROOT / "docs/site").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")),
    *(ROOT / name for name in ("CHANGELOG.md", "examples/README.md", "tests/README.md")),
]
WRITTEN = [page for page in PAGES if page.name not in ("CHANGELOG.md", "architecture.md")]
"""Pages that say how things are now, and that people write: the changelog has names of the past"""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    titles = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in shown}


GENERATED = re.compile(
    r"(api|reference)/|zh/overview\.md|(overview|examples|contributing|changelog|security|code-of-conduct)\.md$"
)
"""What the sections of the site link to, and `make docs` makes"""


def test_links_within_the_repository_lead_somewhere():
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", prose(page)):
            if ":" in target or (page.parent.name == "site" and GENERATED.match(target)):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                broken.append(f"{named(page)}: no file {target}")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path) | {anchor_of_sphinx(path, anchor)}:
                broken.append(f"{named(page)}: no heading #{anchor} in {target or 'itself'}")
    assert broken == []


def anchor_of_sphinx(page: Path, anchor: str) -> str:
    """Sections of the site may name a heading as Sphinx does: ``metrics-jsonl`` for ``metrics.jsonl``."""
    return anchor if anchor.replace("-", "") in {one.replace("-", "") for one in anchors(page)} else ""


def test_pages_that_texts_name_are_there():
    pages = {page.name for page in DOCS}
    texts = [*WRITTEN, *sorted((ROOT / "src/hilt").rglob("*.py")), *sorted((ROOT / "examples").glob("*"))]
    named_pages = {
        (name, named(path))
        for path in texts
        if path.is_file()
        for name in re.findall(r"\bdocs/([\w-]+\.md)", path.read_text())
    }
    assert {(name, place) for name, place in named_pages if name not in pages} == set()


def test_tools_that_pages_name_are_there():
    found = {(name, named(page)) for page in WRITTEN for name in re.findall(r"\btools/(\w+\.py)", page.read_text())}
    assert {(name, place) for name, place in found if not (ROOT / "tools" / name).is_file()} == set()


COMMAND = re.compile(r"^(?:\s*[\w-]*\$)?\s*(hilt (?!─)[^\n#]*)|`(hilt [^`\n]+)`", re.MULTILINE)


def commands() -> Iterator[tuple[str, str]]:
    """The commands in blocks of code and in the text: (page, command)."""
    for page in WRITTEN:
        text = page.read_text().replace("\\\n", " ")
        blocks = [*re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
        blocks += re.findall(r"^    \S.*$", text, re.MULTILINE) + re.findall(r"`hilt [^`\n]+`", text)
        for block in blocks:
            for found in COMMAND.finditer(block):
                line = (found[1] or found[2]).strip()
                yield named(page), re.split(r"  +| \| | && |; | > ", line)[0]


def parsed(command: str) -> tuple[str, list[str]]:
    """The name of a command, and the words behind it."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # an apostrophe of the text beside it
        words = command.split()[1:]
    words = [word for word in words if word not in ("--debug", "--")]
    names = [" ".join(words[:n]) for n in (2, 1) if len(words) >= n]
    name = next((name for name in names if name in EXAMPLES and name), "")
    return name, words[len(name.split()) :]


PLACEHOLDERS = ("", "COMMAND", "--help", "--version", "-h", "...", "…")


PAST = ("hilt demo vla --play 0 --minutes 0 --demonstrations N --steps S",)
"""Commands of an earlier version, with which a figure was measured: the page names the commit"""


def test_commands_in_the_pages_exist_with_their_options():
    wrong, count = [], 0
    for page, command in commands():
        name, words = parsed(command)
        first = (words or [""])[0].rstrip(",.:;")
        count += 1
        if command in PAST:
            continue
        if not name:
            wrong += [] if first in PLACEHOLDERS or first in EXAMPLES else [f"{page}: {command}"]
            continue
        known = {*command_options(name), "--help", "-h"}
        given = {re.split(r"[=\]),|]", word.strip("[](),"))[0] for word in words if word.lstrip("[").startswith("--")}
        wrong += [f"{page}: {command}: no option {one}" for one in sorted(given - known)]
    assert count > 300 and wrong == []


@functools.cache
def settings() -> frozenset[str]:
    """Every setting that a command or a file can have, by its dotted name; and the sections."""
    from hilt.classifier.reward import ClassifierConfig
    from hilt.core.config import describe
    from hilt.hil import Hil
    from hilt.robot.env import RobotConfig
    from hilt.vla import Sft, Vla

    names = {key for kind in (Hil, Vla, Sft, ClassifierConfig, RobotConfig) for key, *_ in describe(kind)}
    return frozenset(names | {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)})


NO_SETTINGS = {"agent.update", "agent.replace", "agent.state.params", "lora.load_adapter", "pool.counts", "agent.enc"}
"""Methods and attributes of an object that has the name of a section, and a name that is not typed to its end"""
FREE = re.compile(r"(^|\.)\w*(options|columns|proprio_floor|proprio_scale)\.")
"""Settings below which names are those of a task, a device or a policy"""


def test_settings_in_commands_exist():
    need("torch")
    wrong = []
    for page, command in commands():
        name, words = parsed(command)
        if name not in ("train", "train sft", "train classifier", "learner", "actor") or "simplevla" in page:
            continue
        keys = [word.partition("=")[0] for word in words if re.match(r"[a-z_][\w.]*=", word)]
        wrong += [
            f"{page}: {command}: {key}" for key in keys if key not in {*settings(), "key"} and not FREE.search(key)
        ]
    assert wrong == []


def test_settings_with_a_section_exist():
    """`agent.rlpd.tau` in the text: where the first part is a section of the settings, the rest is there too."""
    need("torch")
    sections = {
        name for name in settings() if "." not in name and any(one.startswith(f"{name}.") for one in settings())
    }
    wrong = []
    for page in WRITTEN:
        if page.name in ("simplevla.md", "rloo.md", "algos.md"):  # names of other systems beside ours
            continue
        for key in re.findall(r"`([a-z_]+(?:\.(?!json`|yaml`|md`)[a-z_]+)+)(?:=[^`]*)?`", prose(page)):
            known = {key, f"agent.{key}"} & (settings() | NO_SETTINGS)
            if key.split(".")[0] in sections and not known and not FREE.search(key):
                wrong.append(f"{named(page)}: {key}")
    assert wrong == []


def test_figures_that_pages_quote_are_those_of_the_benchmarks():
    assert [named(page) for page in figures.outdated()] == [], "run python tools/figures.py"
    quoting = {page.name for page in figures.pages() if figures.QUOTED.search(page.read_text())}
    assert quoting >= {"compare-one-arm.md", "compare-vla.md", "compare-data.md"}


def test_quoted_figures_follow_the_benchmarks():
    source = figures.SOURCE.read_text()
    page = ROOT / "docs/example.md"
    text = "<!-- figures: replay w3_sample -->\n<!-- figures: end -->\n"
    row = figures.read("replay", source).rows["w3_sample"]
    filled = figures.filled(text, page, source)
    assert f"| {row['best peer']} | {row['its figure']} | {row['to peer']} |" in filled
    assert "](benchmarks.md#the-last-full-run)" in filled and figures.filled(filled, page, source) == filled
    changed = source.replace(f"| {row['its figure']} |", "| 12,345 |")
    assert "| 12,345 |" in figures.filled(filled, page, changed)


def test_quoted_tables_follow_the_benchmarks():
    source = figures.SOURCE.read_text()
    page, text = ROOT / "docs/example.md", "<!-- quoted table: decisions -->\n<!-- quoted table: end -->\n"
    filled = figures.filled(text, page, source)
    assert "\n| `eager` | " in filled and "](benchmarks.md#pi0-pi05-and-smolvla)" in filled
    assert figures.filled(filled, page, source) == filled
    assert "| 12,345 |" in figures.filled(filled, page, re.sub(r"(\| `eager` .*?\| )\d+ \|", r"\g<1>12,345 |", source))
    with pytest.raises(SystemExit, match="no table 'cooking'"):
        figures.filled(text.replace("decisions", "cooking"), page, source)


def test_quoted_figures_without_a_peer_have_no_columns_of_peers():
    page = ROOT / "docs/zh/example.md"
    text = "<!-- figures: replay rlinf_add_auto_save -->\n<!-- figures: end -->\n"
    filled = figures.filled(text, page, figures.SOURCE.read_text())
    assert "| measured | ours | unit |\n|---|---|---|\n| `rlinf_add_auto_save`: " in filled
    assert "](../benchmarks.md#the-last-full-run)" in filled and page.parent in {one.parent for one in figures.pages()}


def retyped(text: str, rows: dict[str, str]) -> list[str]:
    """Rows of a bench that a text names together with their figure, outside of what the tool copies."""
    text = figures.QUOTED_TABLE.sub("", figures.QUOTED.sub("", text))
    pairs = [(line, name, figure) for line in text.splitlines() for name, figure in rows.items() if f"`{name}`" in line]
    return [name for line, name, figure in pairs if re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,]\d)", line)]


def test_figures_of_a_bench_are_not_typed_again():
    source = figures.SOURCE.read_text()
    benches = [figures.read(name, source) for name in re.findall(r"^<!-- (\w+): begin -->$", source, re.MULTILINE)]
    rows = {name: row["ours"] for bench in benches for name, row in bench.rows.items() if row["ours"]}
    pages = [page for page in figures.pages() if page != figures.SOURCE]
    assert {named(page): found for page in pages if (found := retyped(page.read_text(), rows))} == {}
    name, figure = next(iter(rows.items()))
    assert retyped(f"It makes {figure} a second (`{name}`).", rows) == [name]


@pytest.mark.parametrize(
    ("given", "expected"), [("replay w9", "no rows ['w9']"), ("cooking w3_sample", "no run of the bench 'cooking'")]
)
def test_unknown_figures_are_an_error(given: str, expected: str):
    text = f"<!-- figures: {given} -->\n<!-- figures: end -->\n"
    with pytest.raises(SystemExit, match=re.escape(expected)):
        figures.filled(text, ROOT / "docs/example.md", figures.SOURCE.read_text())


MAX_WORDS = 1500
REFERENCES = ("benchmarks", "architecture", "tests")
"""Pages in which one looks something up: the only ones that may be longer"""


def test_pages_are_short():
    """Words of the text, without tables and blocks of code."""
    lengths = {}
    for page in [*DOCS, *TUTORIALS, *sorted((ROOT / "docs/site").glob("*.md"))]:
        lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "    "))]
        lengths[page.stem] = len(" ".join(lines).split())
    assert {page: count for page, count in lengths.items() if count > MAX_WORDS and page not in REFERENCES} == {}


def test_spelling():
    need("codespell_lib")
    pages = [str(page) for page in PAGES]
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", "capcity", *pages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "", done.stdout


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of this project's own, or one that says nothing, and what to write instead."""

    pattern: str
    instead: str


WORDS = [
    Word("slow copy", "target network"),
    Word("climbs Q", "maximises Q"),
    Word("length of the gradient", "gradient norm"),
    Word("ratios that are clipped", "clip fraction"),
    Word("so-manieth|every so many", "every N-th"),
    Word("so many|so long as", "a number, or a time in seconds"),
    Word("workplace", "environment"),
    Word("is told|are told|was told", "is reported"),
    Word("trainee(?!`)", "optimizer, or policy"),
    Word("give as many", "must match"),
    Word("expected is a", "expected a"),
    Word("simply|obviously|of course|needless to say", "nothing"),
    Word("effortlessly|seamless(ly)?|blazing(ly)?|cutting-edge|state-of-the-art", "a figure, or nothing"),
    Word("leverag(e|es|ing)|utiliz(e|es|ing)", "use"),
    Word("in order to", "to"),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.instead)
def test_words_are_plain(word: Word):
    found = []
    for page in WRITTEN:
        text = re.sub(r"`[^`\n]*`", "", prose(page))
        found += [f"{named(page)}: {hit[0]}" for hit in re.finditer(rf"\b({word.pattern})\b", text, re.IGNORECASE)]
    assert found == [], f"write {word.instead} instead"
