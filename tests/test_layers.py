"""The layers of the design, read from the syntax tree of every file under src/hilt.

The tables below are the rules; ``violations`` finds what breaks them, each as one line with its file and line number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.measure import measure, syntax_trees

SOURCE = Path(__file__).parent.parent / "src" / "hilt"

# A part may use every part on a line below its own, and on its own line only along an arrow.
#
#     app ─► cli ─► recipes ◄─ compat
#         │
#      hil     vla
#         │
#      recording ◄─ classifier, value    runs    distributed    serving
#         │
#      teleop ─► robot ─► envs   checks   policies ─► algos
#         │                                 │
#      formats ─► replay ◄─ wire        observe
#         │
#        core
LINES = [
    ["core"],
    ["formats", "replay", "wire", "observe"],
    ["teleop", "robot", "envs", "policies", "algos", "checks"],
    ["recording", "classifier", "value", "runs", "distributed", "serving"],
    ["hil", "vla"],
    ["app", "cli", "recipes", "compat"],
]
ARROWS = {
    *(
        ("teleop", "envs"),
        ("teleop", "robot"),
        ("robot", "envs"),
        ("policies", "algos"),
        ("formats", "replay"),
        ("wire", "replay"),
    ),
    *(
        ("classifier", "recording"),
        ("value", "recording"),
        ("app", "cli"),
        ("app", "recipes"),
        ("cli", "recipes"),
        ("compat", "recipes"),
    ),
}

# Narrower than their line: algos are torch and arithmetic, without files,
# environments or network; `import hilt` is quick.
NARROWER = {"algos": {"core"}, "__init__": {"core"}, "__main__": {"cli"}}

# A package from outside, and the only file or part that may import it.
ONLY_IN = {
    "ray": "distributed/cluster.py",
    "transformers": "policies/",
    "peft": "policies/",
    "libero": "envs/libero.py",
    "metaworld": "envs/metaworld/sawyer_env.py",
    "mujoco": "envs/tabletop/renderer.py",
    "pyrealsense2": "robot/cameras.py",
    "nicegui": ("teleop/page.py", "app/"),
    "pygame": "teleop/gamepad.py",
    "pyspacemouse": "teleop/spacemouse.py",
    "tensorflow": "formats/dataset.py",  # a tf.data.Dataset is asked for by name, and nothing else needs it
    **dict.fromkeys(
        ["wandb", "tensorboard", "tensorboardX", "torch.utils.tensorboard", "trackio", "mlflow"], "observe/sinks.py"
    ),
    **dict.fromkeys(["pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"], "core/unpickle.py"),
}

# Parts that do without torch, and the files of each that may import it: they begin so.
TORCH_ONLY_IN = {
    "core": None,
    "formats": None,
    "wire": None,
    "replay": ("replay/tensors.py", "replay/sampling/torch_dataset.py"),
}

# Nothing imports compat but what starts a program. These load a name of it when somebody
# asks for that: what their users know stays there.
PROMISED = ("replay/__init__.py", "policies/launcher.py", "hil/config.py")

MAY_PRINT = ("cli", "observe")
LINE_LIMIT = 600


def allowed_parts() -> dict[str, set[str]]:
    """For each part, the parts that it may import."""
    allowed: dict[str, set[str]] = {}
    below: set[str] = set()
    for line in LINES:
        for part in line:
            allowed[part] = below | {to for origin, to in ARROWS if origin == part}
        below = below | set(line)
    return allowed | NARROWER


def violations(source: Path) -> list[str]:
    found = []
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source).as_posix()
        text = file.read_text()
        if (length := len(text.splitlines())) > LINE_LIMIT:
            found.append(f"{path}: {length} lines, at most {LINE_LIMIT} are allowed")
        tree = syntax_trees(source)[file]
        for line, module in imports(tree, path):
            found += [f"{path}:{line}: {broken}" for broken in broken_by_import(path, module)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found += [f"{path}:{node.lineno}: {broken}" for broken in broken_by_call(path, node)]
            if (
                isinstance(node, ast.Constant)
                and str(node.value).startswith("hilt.compat")
                and not may_name_compat(path)
            ):
                found.append(f"{path}:{node.lineno}: names {node.value}, which only {', '.join(PROMISED)} may")
    return found


def part_of(path: str) -> str:
    """``replay/log.py`` → ``replay``; ``__init__.py`` → ``__init__``."""
    return path.split("/")[0].removesuffix(".py")


def imports(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Every module the file imports, anywhere in it: (line, absolute dotted name)."""
    package = ["hilt", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            # the names too, for `from hilt import replay` imports a part and `from os import path` a module
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func).split(".")[-1] in (
            "import_module",
            "optional_module",
            "__import__",
        ):
            yield from ((node.lineno, given.value) for given in node.args[:1] if isinstance(given, ast.Constant))


def broken_by_import(path: str, module: str) -> Iterator[str]:
    part, allowed = part_of(path), allowed_parts()
    if part not in allowed:
        yield f"{part!r} is not a part of the design"
        return
    target = module.split(".")[1] if module.startswith("hilt.") else ""
    if target in allowed.keys() - allowed[part] - {part} and not (target == "compat" and path in PROMISED):
        yield f"imports {module}; {part} may use only {', '.join(sorted(allowed[part])) or 'itself'}"
    places = ONLY_IN | ({"torch": TORCH_ONLY_IN[part]} if part in TORCH_ONLY_IN else {})
    for package, place in places.items():
        if within(module, package) and not (place and path.startswith(place)):
            yield (
                f"imports {module}; {package} belongs in "
                f"{place[0] if isinstance(place, tuple) else place or 'no file here'}"
            )


def may_name_compat(path: str) -> bool:
    return part_of(path) in ("cli", "compat") or path in PROMISED


def broken_by_call(path: str, call: ast.Call) -> Iterator[str]:
    name = name_of(call.func).removeprefix("builtins.")
    if name in ("eval", "exec"):
        yield f"calls {name}(); nothing may run text as code"
    if name == "print" and part_of(path) not in MAY_PRINT:
        yield f"calls print(); only {' and '.join(MAY_PRINT)} may"
    for keyword, value in (("allow_pickle", True), ("weights_only", False)):
        for given in call.keywords:
            if given.arg == keyword and isinstance(given.value, ast.Constant) and given.value.value is value:
                yield f"passes {keyword}={value}, which runs code that a file carries"


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def name_of(node: ast.expr) -> str:
    """``importlib.import_module`` for the expression that says so; empty for anything but dotted names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def test_source_keeps_the_layers():
    assert violations(SOURCE) == []


def test_allowed_parts_follow_the_drawing():
    allowed = allowed_parts()
    assert allowed["core"] == set()
    assert allowed["replay"] == {"core"}
    assert allowed["formats"] == allowed["wire"] == {"core", "replay"}
    assert allowed["teleop"] == {"core", "formats", "replay", "wire", "observe", "envs", "robot"}
    assert "teleop" not in allowed["envs"]
    assert allowed["cli"] >= {"hil", "vla", "envs", "core"}
    assert "cli" not in allowed["recipes"] | allowed["hil"]
    assert "hil" not in allowed["vla"] and "vla" not in allowed["hil"], "the two jobs share what is below them"
    assert not any("compat" in below for below in allowed.values())


@pytest.mark.parametrize(
    ("path", "text", "broken"),
    [
        ("core/tree.py", "import hilt.replay", "core/tree.py:1: imports hilt.replay; core may use only itself"),
        (
            "replay/log.py",
            "\nfrom hilt.wire.codec import pack",
            "replay/log.py:2: imports hilt.wire.codec.pack; replay may use only core",
        ),
        ("replay/log.py", "from hilt import observe", "imports hilt.observe"),
        ("replay/log.py", "from ..formats import rlds", "imports hilt.formats.rlds"),
        ("replay/log.py", "from .. import formats", "imports hilt.formats"),
        ("replay/log.py", "def late():\n    from hilt.hil import actor", "replay/log.py:2: imports hilt.hil.actor"),
        (
            "replay/log.py",
            "import importlib\nimportlib.import_module('hilt.wire')",
            "replay/log.py:2: imports hilt.wire",
        ),
        ("formats/video.py", "av = optional_module('torch', 'Reading', 'formats')", "torch belongs in no file here"),
        ("envs/pool.py", "import hilt.teleop.page", "imports hilt.teleop.page"),
        ("algos/kl.py", "import hilt.replay", "algos may use only core"),
        ("__init__.py", "import hilt.replay", "__init__ may use only core"),
        ("misc/thing.py", "import os", "'misc' is not a part of the design"),
        ("hil/actor.py", "import ray", "ray belongs in distributed/cluster.py"),
        ("algos/kl.py", "from transformers import AutoModel", "transformers belongs in policies/"),
        ("distributed/shard.py", "import peft", "peft belongs in policies/"),
        ("envs/task.py", "import libero.libero", "libero belongs in envs/libero.py"),
        ("formats/rlds.py", "import tensorflow as tf", "tensorflow belongs in formats/dataset.py"),
        ("hil/learner.py", "import wandb", "wandb belongs in observe/sinks.py"),
        (
            "observe/plots.py",
            "from torch.utils import tensorboard",
            "torch.utils.tensorboard belongs in observe/sinks.py",
        ),
        ("replay/view.py", "import torch", "torch belongs in replay/tensors.py"),
        ("vla/train.py", "from hilt.hil.config import Hil", "imports hilt.hil.config.Hil"),
        ("hil/actor.py", "NAME = 'hilt.compat.serl:SACAgent'", "names hilt.compat.serl:SACAgent"),
        ("wire/codec.py", "from torch import Tensor", "torch belongs in no file here"),
        ("formats/hilserl.py", "import pickle", "pickle belongs in core/unpickle.py"),
        ("wire/codec.py", "from pickle import loads", "imports pickle.loads"),
        ("core/config.py", "eval('1')", "calls eval()"),
        ("core/config.py", "import builtins\nbuiltins.exec('1')", "core/config.py:2: calls exec()"),
        ("core/config.py", "print('hello')", "calls print(); only cli and observe may"),
        ("replay/log.py", "numpy.load(file, allow_pickle=True)", "passes allow_pickle=True"),
        ("policies/vla/vit.py", "torch.load(file, weights_only=False)", "passes weights_only=False"),
        ("replay/log.py", "\n" * 601, "replay/log.py: 601 lines, at most 600 are allowed"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, path: str, text: str, broken: str):
    write(tmp_path, path, text)
    found = violations(tmp_path)
    assert len(found) == 1 and broken in found[0], found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "replay/log.py",
            "from . import segment\nfrom .view import View\nfrom hilt.core.errors import HiltError\nimport hilt",
        ),
        ("replay/tensors.py", "import torch"),
        ("wire/server.py", "from ..replay import log"),
        ("policies/vla/vit.py", "import torch, transformers\nfrom hilt.algos import kl\nmodel.eval()"),
        ("distributed/cluster.py", "import ray\nfrom hilt.envs import pool"),
        ("core/unpickle.py", "import pickle"),
        ("core/config.py", "import rayleigh\nlog.print('not the builtin')"),
        ("cli/data/data_commands.py", "print('hello')\nimport hilt.replay, torch"),
        ("replay/log.py", "\n" * 600),
    ],
)
def test_layers_allow_permitted_imports(tmp_path: Path, path: str, text: str):
    write(tmp_path, path, text)
    assert violations(tmp_path) == []


def write(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


COUNTERPARTS = {"Batch 2", "Trajectory 2"}
"""Classes with the name that another system has for the same, beside ours: verl's
`DataProto` and RLinf's and TF-Agents' trajectories"""


def test_names_and_folders_stay_readable():
    figures = measure(SOURCE)
    assert set(figures["class names used twice or more"]) == COUNTERPARTS
    assert figures["file names used twice or more"] == ["launcher"], (
        "it is HIL-SERL's, at the import line that its users know"
    )
    assert figures["folders with more than 20 files"] == []


def test_modules_do_not_import_each_other_in_circles():
    """Imports inside functions count, too: they hide a circle, and do not end it."""
    assert measure(SOURCE)["circles of imports"] == []


def test_measure_finds_what_it_counts(tmp_path: Path):
    body = "\n".join(f"    x = {number}" for number in range(60))
    write(tmp_path / "hilt", "a/one.py", f"class Twin: ...\ndef long():\n{body}\n")
    write(tmp_path / "hilt", "b/one.py", 'class Twin:\n    """Of the other."""\ntry: ...\nexcept Exception: ...\n')
    figures = measure(tmp_path / "hilt")
    assert figures["class names used twice or more"] == ["Twin 2"] and figures["file names used twice or more"] == [
        "one"
    ]
    assert (
        figures["functions over 60 lines"] == ["hilt/a/one.py: long"] and figures["docstrings that are fragments"] == 1
    )
    assert (
        figures["broad excepts that do not raise"] == ["hilt/b/one.py: module"]
        and figures["broad excepts with a reason"] == []
    )
    assert figures["circles of imports"] == []


def test_measure_finds_any_behind_an_alias(tmp_path: Path):
    write(tmp_path / "hilt", "a/names.py", "Row = dict[str, Any]\nThing: TypeAlias = Any\nArray = npt.NDArray[Any]\n")
    write(
        tmp_path / "hilt",
        "a/used.py",
        "from hilt.a.names import Array, Row, Thing\n"
        "def rows(x: Row): ...\ndef thing() -> Thing: ...\ndef array(x: Array): ...\ndef plain(x: int): ...\n",
    )
    figures = measure(tmp_path / "hilt")
    assert figures["public signatures that mention Any"] == "2 of 4 (50%)"
    assert figures["public signatures with a bare Any"] == "1 of 4 (25%)"


def test_measure_finds_functions_that_take_or_nest_too_much(tmp_path: Path):
    ten = ", ".join(f"x{number}" for number in range(10))
    write(
        tmp_path / "hilt",
        "a/wide.py",
        f"class One:\n    def most(self, {ten}): ...\n    def many(self, {ten}, x10): ...",
    )
    nested = "\n".join("    " * (level + 1) + "if x:" for level in range(5))
    write(
        tmp_path / "hilt",
        "a/deep.py",
        f"def flat(x):\n    if x: ...\n    elif not x: ...\ndef deep(x):\n{nested} ...\n",
    )
    figures = measure(tmp_path / "hilt")
    assert figures["functions with more than 10 parameters"] == ["hilt/a/wide.py: One.many"]
    assert figures["functions nested deeper than 4"] == ["hilt/a/deep.py: deep"]


def test_measure_finds_circles_of_imports_in_functions_too(tmp_path: Path):
    write(tmp_path / "hilt", "a/high.py", "from hilt.a import middle")
    write(tmp_path / "hilt", "a/middle.py", "import hilt.a.low")
    write(tmp_path / "hilt", "a/low.py", "def late():\n    from hilt.a.high import thing")
    write(
        tmp_path / "hilt", "a/typed.py", "from hilt.a.high import x\nif TYPE_CHECKING:\n    from hilt.a.other import y"
    )
    write(tmp_path / "hilt", "a/other.py", "from hilt.a.typed import z")
    assert measure(tmp_path / "hilt")["circles of imports"] == ["hilt.a.high - hilt.a.low - hilt.a.middle"]
