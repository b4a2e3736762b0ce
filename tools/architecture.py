"""Draws the parts of Hilt from its real imports, and lists its files: ``python tools/architecture.py``.

    docs/architecture.svg   the parts as floors: a part imports only parts below it
    docs/architecture.md    the list of files between its two marks, each with the first sentence of its docstring

`tests/test_docs.py` fails when either is not what this makes.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, PAGE, PICTURE = ROOT / "src" / "hilt", ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
BEGIN, END = "<!-- files: made by tools/architecture.py -->", "<!-- end of files -->"
WIDTH, BOX, HEIGHT, FLOOR, MARGIN = 960, 128, 40, 92, 24


def parts() -> list[str]:
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def imports() -> dict[str, set[str]]:
    """For each part, the parts that it imports, anywhere in its files but for type checking."""
    known = set(parts())
    found: dict[str, set[str]] = {part: set() for part in known}
    for file in sorted(SOURCE.rglob("*.py")):
        part = file.relative_to(SOURCE).parts[0]
        if part in known:
            found[part] |= {name for name in _imported(ast.parse(file.read_text())) if name in known} - {part}
    return found


def _imported(tree: ast.AST) -> set[str]:
    """The parts of Hilt that a syntax tree imports."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # no import is within an expression
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "hilt":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hilt."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hilt.")}
        found |= _imported(node)
    return found


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The parts from the ground up: each stands one floor above the highest that it imports."""
    level: dict[str, int] = {}
    while len(level) < len(graph):
        ready = [part for part, below in graph.items() if part not in level and below <= level.keys()]
        if not ready:
            circle = ", ".join(sorted(graph.keys() - level.keys()))
            raise SystemExit(f"these parts import each other in a circle: {circle}. See tests/test_layers.py.")
        level |= {part: max((level[below] + 1 for below in graph[part]), default=0) for part in ready}
    return [sorted(part for part in graph if level[part] == number) for number in range(max(level.values()) + 1)]


def needed(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that do not follow from others: without them the picture says the same."""

    def reached(part: str) -> set[str]:
        return graph[part].union(*(reached(below) for below in graph[part]))

    return {
        (part, below)
        for part, all_below in graph.items()
        for below in all_below
        if not any(below in reached(other) for other in all_below - {below})
    }


def picture() -> str:
    graph = imports()
    rows = floors(graph)
    tall = 2 * MARGIN + FLOOR * len(rows)
    place = {}
    for number, row in enumerate(rows):
        gap = (WIDTH - 2 * MARGIN - BOX * len(row)) / (len(row) + 1)
        for column, part in enumerate(row):
            place[part] = (MARGIN + gap + column * (BOX + gap), tall - MARGIN - FLOOR * number - HEIGHT)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" '
        'font-family="sans-serif" font-size="15">',
        "<title>The parts of Hilt: each imports only parts below it</title>",
        "<style>.box{fill:#eef2f7;stroke:#4a5a70}.name{fill:#1c2733}.way{stroke:#8a97a8;fill:none}"
        "@media(prefers-color-scheme:dark){.box{fill:#263241;stroke:#93a4ba}"
        ".name{fill:#e8edf3}.way{stroke:#6d7d92}}</style>",
    ]
    for part, below in sorted(needed(graph)):
        (x, y), (u, v) = place[part], place[below]
        x, y, u, middle = x + BOX / 2, y + HEIGHT, u + BOX / 2, (y + HEIGHT + v) / 2
        lines.append(
            f'<path class="way" d="M{x:.0f} {y:.0f} C{x:.0f} {middle:.0f} {u:.0f} {middle:.0f} {u:.0f} {v:.0f}"/>'
        )
    for part, (x, y) in sorted(place.items()):
        lines.append(f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text class="name" x="{x + BOX / 2:.0f}" y="{y + 26:.0f}" text-anchor="middle">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


def files() -> str:
    """The list of all source files, by folder, with the first sentence of each docstring."""
    lines = ["```"]
    for folder in [SOURCE, *sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)]:
        name = "src/hilt/" + folder.relative_to(SOURCE).as_posix().removeprefix(".")
        lines += ["", f"{name.rstrip('/')}/   {_summary(folder / '__init__.py')}"]
        lines += [
            f"    {file.name:<26}{_summary(file)}" for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"
        ]
    return "\n".join([lines[0], *lines[2:], "```"])


def _summary(file: Path) -> str:
    text = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return sentence if len(sentence) <= 120 else sentence[:117].rsplit(" ", 1)[0] + " …"


def page(text: str) -> str:
    """The page with its list made anew."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{files()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    PICTURE.write_text(picture())
    PAGE.write_text(page(PAGE.read_text()))
    print(f"{PICTURE}\n{PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
