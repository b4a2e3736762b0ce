"""Measures how the source reads: ``python tools/measure.py [SOURCE]`` prints a
table, so that two states of it can be compared.

What is counted, and why, is said in the docstring of each function below.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "hilt"
LONG_FUNCTION, MANY_PARAMETERS, DEEP, FULL_FOLDER, LONG_FILE = 60, 10, 4, 20, 600
OWN_WORDS = ("told", "say", "says", "said", "so many", "so long", "so-manieth", "nobody", "whoever")
"""Words of ours where the field has its own"""
ARRAYS = r"(np|npt|numpy)\.(NDArray|ndarray|dtype)\[Any(, (Any|np\.dtype\[Any\]))?\]"
"""How an array, or a dtype, of any element type is written"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def measure(source: Path) -> dict[str, object]:
    files = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    trees, broadly = syntax_trees(source), broad_excepts(source)
    functions = {
        f"{name(path, source)}: {one}": node for path, tree in trees.items() for one, node in functions_of(tree)
    }
    annotated = [
        annotations(node, aliases)
        for path, aliases in any_aliases(trees, source).items()
        for _, node in functions_of(trees[path])
        if not node.name.startswith("_")
    ]
    docstrings = [text for tree in trees.values() for text in documented(tree)]
    everything = "\n".join(files.values()).lower()
    return {
        "files": len(files),
        "lines": sum(len(text.splitlines()) for text in files.values()),
        f"lines over {LONG_FILE} in a file": [
            name(path, source) for path, text in files.items() if len(text.splitlines()) > LONG_FILE
        ],
        f"folders with more than {FULL_FOLDER} files": [
            f"{folder} {count}"
            for folder, count in Counter(name(path.parent, source) for path in files).items()
            if count > FULL_FOLDER
        ],
        "class names used twice or more": twice(trees),
        "file names used twice or more": sorted(
            stem
            for stem, count in Counter(path.stem for path in files).items()
            if count > 1 and stem not in ("__init__", "config")
        ),
        f"functions over {LONG_FUNCTION} lines": [
            where for where, one in functions.items() if length(one) > LONG_FUNCTION
        ],
        f"functions with more than {MANY_PARAMETERS} parameters": [
            where for where, one in functions.items() if parameters(one) > MANY_PARAMETERS
        ],
        f"functions nested deeper than {DEEP}": [where for where, one in functions.items() if depth(one) > DEEP],
        "circles of imports": circles(import_graph(trees, source)),
        "public signatures that mention Any": share([any(map(mentions_any, one)) for one in annotated]),
        "public signatures with a bare Any": share(["Any" in one for one in annotated]),
        "broad excepts that do not raise": [place for place, reason in broadly if not reason],
        "broad excepts with a reason": [place for place, reason in broadly if reason],
        "docstrings": len(docstrings),
        "docstrings that are fragments": sum(fragment(text) for text in docstrings),
        **{f"word: {word}": len(re.findall(rf"\b{re.escape(word)}\b", everything)) for word in OWN_WORDS},
    }


@functools.cache
def syntax_trees(source: Path) -> dict[Path, ast.Module]:
    """The syntax tree of every file."""
    gc.disable()  # it would look through millions of nodes again and again, and finds nothing to free
    try:
        return {path: ast.parse(path.read_text(), path.as_posix()) for path in sorted(source.rglob("*.py"))}
    finally:
        gc.freeze()
        gc.enable()


def name(path: Path, source: Path) -> str:
    return path.relative_to(source.parent).as_posix()


def statements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The statements directly below a node, handlers and cases among them, each with the field that it is in.
    Expressions, which are most of a tree, are left out."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, field, ())
        if isinstance(below, list):  # the body of a lambda or of a conditional expression is none
            yield from ((field, child) for child in below)


def all_statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all statements below it."""
    yield node
    for _, child in statements(node):
        yield from all_statements(child)


def functions_of(node: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """All functions with their qualified names, such as ``Log.append``."""
    for _, child in statements(node):
        if isinstance(child, Function):
            yield f"{within}{child.name}", child
        yield from functions_of(
            child, f"{within}{child.name}." if isinstance(child, ast.ClassDef | Function) else within
        )


def import_graph(trees: dict[Path, ast.Module], source: Path) -> dict[str, set[str]]:
    """For each module, the modules that it imports, anywhere in its file but for type checking."""
    modules = {
        name(path, source).removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in trees.items()
    }
    return {module: set(imported(tree, set(modules))) - {module} for module, tree in modules.items()}


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The known modules that a syntax tree imports; ``from package import module`` is an import of the module."""
    for _, node in statements(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from known & {one if one in known else str(node.module) for one in named}
        elif isinstance(node, ast.Import):
            yield from known & {alias.name for alias in node.names}
        yield from imported(node, known)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next and the last the first: none can be
    understood, or moved, without all the others."""
    reached = {module: reachable(graph, module) for module in graph}
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return sorted(" - ".join(sorted(circle)) for circle in found)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that one imports, itself or through others."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def documented(tree: ast.Module) -> Iterator[str]:
    """The docstrings of modules, classes and functions."""
    for node in all_statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield text


def twice(trees: dict[Path, ast.Module]) -> list[str]:
    """Public classes of one name in several files: a reader who meets the name does not know which is meant."""
    homes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    return sorted(f"{one} {len(paths)}" for one, paths in homes.items() if len(paths) > 1)


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> int:
    given = function.args
    return len([one for one in (*given.posonlyargs, *given.args, *given.kwonlyargs) if one.arg not in ("self", "cls")])


def depth(node: ast.AST, level: int = 0) -> int:
    """How many loops, conditions and contexts lie in each other; an elif is no deeper than its if."""
    deepest = level
    for field, child in statements(node):
        nests = isinstance(child, ast.If | ast.For | ast.While | ast.With | ast.Try)
        is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If) and len(node.orelse) == 1
        deepest = max(deepest, depth(child, level + (nests and not is_elif)))
    return deepest


def annotations(function: Function, aliases: dict[str, str]) -> list[str]:
    """The types of all parameters and of the result; an alias that stands for Any, or mentions it, is written out."""
    given = function.args
    types = [one.annotation for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + [function.returns]
    texts = [ast.unparse(one) for one in types if one is not None]
    return [re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda word: aliases.get(word[0], word[0]), text) for text in texts]


def mentions_any(annotation: str) -> bool:
    return bool(re.search(r"\bAny\b", annotation))


def any_aliases(trees: dict[Path, ast.Module], source: Path) -> dict[Path, dict[str, str]]:
    """For each file, the names of types in it that mention Any, its own and those that it imports, with what they stand
    for: ``Row = dict[str, Any]`` hides Any from a reader. An array of any element type is a type like others."""
    own = {
        name(path, source).removesuffix(".py").replace("/", "."): alias_definitions(tree)
        for path, tree in trees.items()
    }
    return {
        path: {
            **{
                alias.asname or alias.name: own[str(node.module)][alias.name]
                for node in all_statements(tree)
                if isinstance(node, ast.ImportFrom) and node.module in own
                for alias in node.names
                if alias.name in own[str(node.module)]
            },
            **own[name(path, source).removesuffix(".py").replace("/", ".")],
        }
        for path, tree in trees.items()
    }


def alias_definitions(tree: ast.Module) -> dict[str, str]:
    found = {}
    for node in all_statements(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        is_type = isinstance(node, ast.Assign) or (
            isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
        )
        if is_type and node.value is not None and isinstance(target, ast.Name) and target.id[:1].isupper():
            text = node.value.value if isinstance(node.value, ast.Constant) else ast.unparse(node.value)
            if re.search(r"\bAny\b", re.sub(ARRAYS, "", str(text))) and "TypeVar" not in str(text):
                found[target.id] = str(text)
    return found


def broad(node: ast.AST) -> bool:
    """``except Exception`` (or everything) without a raise in it."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = ast.unparse(node.type) if node.type is not None else "BaseException"
    return caught in ("Exception", "BaseException") and not any(isinstance(one, ast.Raise) for one in ast.walk(node))


def broad_excepts(source: Path) -> list[tuple[str, str]]:
    """Where broad excepts are that do not raise, as ``hilt/file.py: function``, each with
    the reason in a comment ``# broad: ...``."""
    found = []
    for path, tree in syntax_trees(source).items():
        nodes, lines = list(all_statements(tree)), path.read_text().splitlines()
        for node in nodes:
            if isinstance(node, ast.ExceptHandler) and broad(node):
                around = [
                    one
                    for one in nodes
                    if isinstance(one, Function) and one.lineno <= node.lineno <= (one.end_lineno or 0)
                ]
                function = min(around, key=length).name if around else "module"
                found.append((f"{name(path, source)}: {function}", lines[node.lineno - 1].partition("# broad: ")[2]))
    return sorted(found)


def fragment(text: str) -> bool:
    """A docstring that begins in the middle of a sentence."""
    return bool(re.match(r"(Of|So|What it|As|By|And|Or|But|Nor|To whom|Which|Told|Whose)\b", text))


def share(values: list[bool]) -> str:
    return f"{sum(values)} of {len(values)} ({100 * sum(values) / max(1, len(values)):.0f}%)"


def main(source: Path = SOURCE) -> None:
    for what, value in measure(source).items():
        shown = (
            f"{len(value)}: {', '.join(map(str, value[:40]))}{', …' * (len(value) > 40)}"
            if isinstance(value, list)
            else value
        )
        print(f"{what:<42}{shown}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
