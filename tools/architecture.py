"""Draws the parts of Hilt from its real imports, and lists its files: ``python tools/architecture.py``.

    docs/architecture.svg   the parts as floors: a part imports only parts below it
    docs/architecture.md    the list of files between its two marks, each with the first sentence of its docstring

`tests/test_docs.py` fails when either is not what this makes.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.drawing import Drawing, text_width
from tools.measure import SOURCE, syntax_trees

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
BEGIN, END = "<!-- files: made by tools/architecture.py -->", "<!-- end of files -->"
WIDTH, BOX, HEIGHT, FLOOR, HEAD, MARGIN = 960, 118, 40, 84, 112, 24
GROUPS = [  # as docs/architecture.md describes them: title, color, parts
    ("the ground", "blue", ["core", "replay", "wire", "formats", "observe"]),
    ("what acts and learns", "amber", ["envs", "robot", "teleop", "policies", "algos"]),
    (
        "shared by the jobs",
        "",
        ["recording", "classifier", "value", "distributed", "runs", "checks", "serving"],
    ),
    ("the jobs and the top", "teal", ["hil", "vla", "recipes", "compat", "cli", "app"]),
]


def parts() -> list[str]:
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def imports() -> dict[str, set[str]]:
    """For each part, the parts that it imports, anywhere in its files but for type checking."""
    known = set(parts())
    found: dict[str, set[str]] = {part: set() for part in known}
    for file, tree in syntax_trees(SOURCE).items():
        part = file.relative_to(SOURCE).parts[0]
        if part in known:
            found[part] |= {name for name in _imported(tree) if name in known} - {part}
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


Node = str | tuple[str, str, int]
"""A part, or the place where the line from one part to another crosses a floor (from, to, floor)"""


def picture() -> str:
    """Draws the parts as floors, and the imports that do not follow from others as lines around them."""
    graph = imports()
    rows, ways = _ordered(floors(graph), needed(graph))
    across = _placed(rows, ways)
    tall = HEAD + FLOOR * len(rows)
    on = Drawing("The parts of Hilt: each imports only parts below it", WIDTH, tall)
    on.text(MARGIN, 42, on.title, 21, bold=True)
    at = MARGIN
    for title, color, _ in GROUPS:
        on.rect(at, 62, 16, 16, f"{color}-pale" if color else "panel", color or "line", 4)
        on.text(at + 24, 75, title, 14, "soft")
        at += round(text_width(title, 14)) + 46
    floor_of = {node: tall - FLOOR * (number + 1) + 12 for number, row in enumerate(rows) for node in row}
    for way in sorted(ways):
        on.curve([(across[node], floor_of[node] + HEIGHT / 2) for node in ways[way]])
    colors = {part: color for _, color, named in GROUPS for part in named}
    for part in sorted(graph):
        color, x, y = colors.get(part, ""), across[part], floor_of[part]
        on.rect(x - BOX / 2, y, BOX, HEIGHT, f"{color}-pale" if color else "panel", color or "line")
        on.text(x, y + HEIGHT / 2 + 5.5, part, 15.5, anchor="middle", bold=True)
    return on.svg()


def _ordered(
    rows: Sequence[Sequence[str]], edges: set[tuple[str, str]]
) -> tuple[list[list[Node]], dict[tuple[str, str], list[Node]]]:
    """The floors in an order in which few lines cross, with the places where a line passes a floor, and those of each
    line from the top down."""
    level = {part: number for number, row in enumerate(rows) for part in row}
    ways: dict[tuple[str, str], list[Node]] = {}
    for upper, lower in sorted(edges):
        passed: list[Node] = [(upper, lower, floor) for floor in range(level[upper] - 1, level[lower], -1)]
        ways[upper, lower] = [upper, *passed, lower]
    floors_: list[list[Node]] = [list(row) for row in rows]
    for way in ways.values():
        for node in way[1:-1]:
            floors_[node[2]].append(node)  # type: ignore[index]
    best = floors_
    for sweep in range(24):
        floors_ = _swept(floors_, ways, downwards=sweep % 2 == 0)
        if _crossings(floors_, ways) < _crossings(best, ways):
            best = floors_
    return best, ways


def _swept(rows: list[list[Node]], ways: Mapping[tuple[str, str], Sequence[Node]], downwards: bool) -> list[list[Node]]:
    """Each floor in the order of the mean places of what it is joined with, on the floor above, or below."""
    beside = _neighbours(ways, downwards)
    place = {node: number / len(row) for row in rows for number, node in enumerate(row)}
    swept = [list(row) for row in rows]
    for row in reversed(swept) if downwards else swept:
        near = {node: [place[other] for other in beside.get(node, [node])] for node in row}
        wanted = {node: sum(places) / len(places) for node, places in near.items()}
        row.sort(key=wanted.__getitem__)
        place |= {node: number / len(row) for number, node in enumerate(row)}
    return swept


def _neighbours(ways: Mapping[tuple[str, str], Sequence[Node]], above: bool) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for way in ways.values():
        for upper, lower in itertools.pairwise(way):
            node, other = (lower, upper) if above else (upper, lower)
            found.setdefault(node, []).append(other)
    return found


def _crossings(rows: list[list[Node]], ways: Mapping[tuple[str, str], Sequence[Node]]) -> int:
    place = {node: (floor, number) for floor, row in enumerate(rows) for number, node in enumerate(row)}
    pieces = [(place[upper], place[lower]) for way in ways.values() for upper, lower in itertools.pairwise(way)]
    return sum(
        a[0] == c[0] and (a[1] - c[1]) * (b[1] - d[1]) < 0 for (a, b), (c, d) in itertools.combinations(pieces, 2)
    )


def _placed(rows: list[list[Node]], ways: Mapping[tuple[str, str], Sequence[Node]]) -> dict[Node, float]:
    """The middle of each box, and of each place where a line passes, across the picture: near what it is joined with,
    in the order of its floor, and not upon another."""
    beside = [_neighbours(ways, above) for above in (True, False)]
    x = {node: WIDTH * (number + 1) / (len(row) + 1) for row in rows for number, node in enumerate(row)}
    for _ in range(60):
        for row in rows:
            wanted = []
            for node in row:
                near = [(x[other], _pull(node, other)) for joined in beside for other in joined.get(node, [])]
                wanted.append(sum(at * pull for at, pull in near) / sum(pull for _, pull in near))
            x |= dict(zip(row, _apart(wanted, [_half(node) for node in row]), strict=True))
    shift = (
        WIDTH - max(at + _half(node) for node, at in x.items()) - min(at - _half(node) for node, at in x.items())
    ) / 2
    return {node: round(at + shift) for node, at in x.items()}


def _pull(node: Node, other: Node) -> int:
    """How much a line is kept straight: most of all where it passes floors."""
    return 1 + 3 * isinstance(node, tuple) * isinstance(other, tuple)


def _half(node: Node) -> float:
    return BOX / 2 + 11 if isinstance(node, str) else 11


def _apart(wanted: Sequence[float], halves: Sequence[float]) -> list[float]:
    """Places in this order that are far enough from each other and within the picture, near those that are wanted: the
    mean of those found from the left and from the right."""
    reach = [WIDTH - at for at in reversed(wanted)]
    mirrored = [WIDTH - at for at in reversed(_from_left(reach, halves[::-1]))]
    return [(one + other) / 2 for one, other in zip(_from_left(wanted, halves), mirrored, strict=True)]


def _from_left(wanted: Sequence[float], halves: Sequence[float]) -> list[float]:
    places, edge = list(wanted), MARGIN / 2
    for at, half in enumerate(halves):
        places[at] = max(places[at], edge + half)
        edge = places[at] + half
    edge = WIDTH - MARGIN / 2
    for at in reversed(range(len(places))):
        places[at] = min(places[at], edge - halves[at])
        edge = places[at] - halves[at]
    return places


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
    text = (ast.get_docstring(syntax_trees(SOURCE)[file]) or "").split("\n\n")[0].replace("\n", " ")
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
