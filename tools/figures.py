"""Copies measured figures from docs/benchmarks.md into the pages that quote them, so that no figure is typed twice.

    python tools/figures.py            writes the tables into the pages
    python tools/figures.py --check    lists the pages whose tables are not those of docs/benchmarks.md

A page says which rows of which bench it quotes; the lines between its two marks are written by this tool:

    <!-- figures: replay w1_sample_warm w3_sample -->
    <!-- figures: end -->

A table that no bench writes is quoted whole, by the name that it has between the marks ``table NAME: begin`` and
``table NAME: end`` of docs/benchmarks.md:

    <!-- quoted table: decisions -->
    <!-- quoted table: end -->
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "benchmarks.md"
QUOTED = re.compile(r"<!-- figures: (?P<bench>\w+) (?P<rows>[\w ]+) -->\n.*?<!-- figures: end -->", re.DOTALL)


QUOTED_TABLE = re.compile(r"<!-- quoted table: (?P<name>[\w-]+) -->\n.*?<!-- quoted table: end -->", re.DOTALL)


@dataclass(frozen=True)
class Bench:
    """The last run of a bench, as docs/benchmarks.md has it."""

    name: str
    section: str
    facts: dict[str, str]
    rows: dict[str, dict[str, str]]
    notes: dict[str, str]


def read(name: str, text: str) -> Bench:
    """The run between the marks of a bench."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", text, re.DOTALL)
    if found is None:
        known = re.findall(r"<!-- (\w+): begin -->", text)
        raise SystemExit(f"docs/benchmarks.md has no run of the bench {name!r}; expected one of {known}.")
    section = re.findall(r"^## (.+)$", text[: found.start()], re.MULTILINE)[-1]
    block = found[1]
    facts = dict(re.findall(r"^- (command|commit|machine): (.+)$", block, re.MULTILINE))
    lines = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    rows = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
    notes = dict(re.findall(r"^- `(\w+)`: (.+)$", block, re.MULTILINE))
    return Bench(name, section, facts, rows, notes)


def table(bench: Bench, names: list[str], page: Path) -> str:
    """The rows of a bench as a table, with the command and the machine above it."""
    if unknown := [name for name in names if name not in bench.rows]:
        raise SystemExit(f"the bench {bench.name} has no rows {unknown}; expected some of {list(bench.rows)}.")
    anchor = re.sub(r"[^\w\- ]", "", bench.section.lower()).replace(" ", "-")
    source = os.path.relpath(SOURCE, page.parent)
    commit = bench.facts["commit"].split(", ")[0]
    machine = ", ".join(bench.facts["machine"].split(", ")[:3])
    more = f"[All rows, and how they are measured]({source}#{anchor})."
    peers = {"best peer": "best peer", "its figure": "its figure", "to peer": "ours to peer"}
    if not any(bench.rows[name]["best peer"] for name in names):
        peers = {}
    titles = ["measured", "ours", "unit", *peers.values()]
    lines = [f"`python -m bench {bench.name}` at {commit}; {machine}. {more}", ""]
    lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name in names:
        row = bench.rows[name]
        what = re.split(r"\.(?: |$)", bench.notes[name])[0]
        spread = f" ({row['low - high']})" if row["low - high"] else ""
        cells = [f"`{name}`: {what}", row["ours"] + spread, row["unit"], *(row[column] for column in peers)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def named_table(name: str, page: Path, source: str) -> str:
    """A table of docs/benchmarks.md by its name, with a link to the section that says how it was measured."""
    found = re.search(rf"<!-- table {name}: begin -->\n+(.*?)\n+<!-- table {name}: end -->", source, re.DOTALL)
    if found is None:
        known = re.findall(r"<!-- table ([\w-]+): begin -->", source)
        raise SystemExit(f"docs/benchmarks.md has no table {name!r}; expected one of {known}.")
    section = re.findall(r"^###? (.+)$", source[: found.start()], re.MULTILINE)[-1]
    anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
    return f"{found[1]}\n\n[How it was measured]({os.path.relpath(SOURCE, page.parent)}#{anchor}).\n"


def filled(text: str, page: Path, source: str) -> str:
    """A page's text with its tables as docs/benchmarks.md has the figures."""

    def fill(found: re.Match[str]) -> str:
        begin = f"<!-- figures: {found['bench']} {found['rows']} -->\n\n"
        quoted = table(read(found["bench"], source), found["rows"].split(), page)
        return f"{begin}{quoted}\n<!-- figures: end -->"

    def copy(found: re.Match[str]) -> str:
        quoted = named_table(found["name"], page, source)
        return f"<!-- quoted table: {found['name']} -->\n\n{quoted}\n<!-- quoted table: end -->"

    return QUOTED_TABLE.sub(copy, QUOTED.sub(fill, text))


def pages() -> list[Path]:
    """Pages that may quote figures: in English, and in Chinese."""
    folders = [ROOT / "docs", ROOT / "docs/site", ROOT / "docs/zh"]
    return [ROOT / "README.md", ROOT / "README.zh.md", *(page for one in folders for page in sorted(one.glob("*.md")))]


def outdated() -> dict[Path, str]:
    """The pages whose tables are not up to date, and what they have to be."""
    source = SOURCE.read_text()
    texts = {page: (page.read_text(), filled(page.read_text(), page, source)) for page in pages()}
    return {page: new for page, (old, new) in texts.items() if new != old}


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies measured figures from docs/benchmarks.md into other pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    given = parser.parse_args()
    for page, text in (found := outdated()).items():
        print(page.relative_to(ROOT))
        if not given.check:
            page.write_text(text)
    if given.check and found:
        raise SystemExit("other figures than in docs/benchmarks.md: run python tools/figures.py")


if __name__ == "__main__":
    main()
