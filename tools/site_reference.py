"""The pages of the site that are written from the source: commands, settings, recipes, metrics, errors and the API.

`pages()` gives their texts by path, as Markdown, or reStructuredText where Sphinx reads docstrings.
`tools/build_site.py` puts them beside the pages of docs/.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hilt"
sys.path.insert(0, str(ROOT / "src"))

import typer  # noqa: E402

from hilt.cli import COMMANDS  # noqa: E402
from hilt.cli.help import EXAMPLES, joined  # noqa: E402
from hilt.cli.recipes import JOBS, described, meaning_of, named, written  # noqa: E402

MAX_MESSAGE = 400
"""Characters of an error's text that the catalogue shows"""


def pages() -> dict[str, str]:
    """Every generated page: its path below the site's source, and its text."""
    return {
        "reference/commands.md": commands(),
        **settings(),
        "reference/recipe-values.md": recipe_values(),
        "reference/alarms-and-curves.md": metrics(),
        **errors(),
        **api(),
    }


# Commands


def commands() -> str:
    """Every command with its arguments, options and examples, from the commands themselves."""
    parts = [
        "# Every command",
        "Made from the commands themselves. `hilt COMMAND --help` prints the same; [the command "
        "line](../command-line.md) "
        "is the overview. `hilt --debug COMMAND` shows the traceback of an error, `hilt --version` the version.",
    ]
    for name, command in all_commands():
        parts += [f"## hilt {name}", *described_command(name, command)]
    return "\n\n".join(parts) + "\n"


def all_commands() -> Iterator[tuple[str, Any]]:
    """The commands, and those below them: ("data convert", command)."""
    for name, (place, _) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        yield from below(name, typer.main.get_command(getattr(importlib.import_module(module), attribute or "app")))


def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, one in getattr(command, "commands", {}).items():
        yield from below(f"{name} {inner}", one)


def described_command(name: str, command: Any) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    params = [param for param in command.get_params(context) if not getattr(param, "hidden", False)]
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [plain(joined(inspect.cleandoc(command.help or "")) or ""), f"```text\nhilt {name} {usage}\n```"]
    rows = [row(param) for param in params if "--help" not in param.opts]
    if rows:
        parts.append("\n".join(["| argument or option | meaning | default |", "|---|---|---|", *rows]))
    if name in EXAMPLES:
        *examples, page = EXAMPLES[name]
        stem = Path(page).stem
        parts += ["```\n" + "\n".join(examples) + "\n```", f"Described in [{stem}](../{stem}.md)."]
    return parts


def row(param: Any) -> str:
    if param.param_type_name == "argument":
        names = f"`{param.metavar or param.name.upper()}`"
    else:
        names = ", ".join(f"`{one}`" for one in [*param.opts, *param.secondary_opts])
        if not param.is_flag:
            names += f" {cell(param.metavar or param.name.upper())}"
    default = param.default
    shown = "" if default in (None, False, ()) or param.required or callable(default) else f"`{default}`"
    return f"| {names} | {cell(getattr(param, 'help', '') or '')} | {cell(shown)} |"


# Settings

KINDS = {
    "settings-person": ("hil_debug", "Settings of a run with a person", "hilt train RECIPE", "tabletop_pick"),
    "settings-post-training": ("vla_debug", "Settings of post-training", "hilt train RECIPE", "vla_debug"),
    "settings-fine-tuning": ("sft_debug", "Settings of fine-tuning", "hilt train sft DATA", "sft_tabletop"),
    "settings-classifier": (
        "classifier",
        "Settings of the reward classifier",
        "hilt train classifier DATA",
        "classifier",
    ),
}
"""For each page a recipe that has these settings, the title, the command, and a recipe for the example"""


def settings() -> dict[str, str]:
    """Every setting of every kind of recipe, and of the file of a robot, from the dataclasses."""
    from hilt.robot.env import RobotConfig
    from hilt.value.value_config import ValueConfig

    made = {}
    for page, (recipe, title, command, example) in KINDS.items():
        kind = type(named(recipe))
        lead = (
            f"The fields of `{kind.__module__}.{kind.__name__}`, for `{command}`. `hilt settings "
            f"{example}` prints them "
            "in the terminal, with the values of that recipe; a recipe's own values are in [values of the "
            "recipes](recipe-values.md). Change one with `NAME=VALUE` behind the command."
        )
        made[f"reference/{page}.md"] = settings_page(title, lead, kind())
    lead = "What a file such as [examples/robot.yaml](../examples.md) can set: an arm behind `hilt serve-robot`."
    made["reference/settings-robot.md"] = settings_page("Settings of a robot's file", lead, RobotConfig())
    lead = (
        "The fields of `hilt.value.value_config.ValueConfig`, for `hilt train value`: [the value model](../value.md)."
    )
    made["reference/settings-value.md"] = settings_page("Settings of a value model", lead, ValueConfig())
    return made


def settings_page(title: str, lead: str, config: Any) -> str:
    parts, group = [f"# {title}", lead], None
    rows = described(config)
    for one in sorted(rows, key=lambda one: "." in one["setting"]):
        prefix = one["setting"].partition(".")[0] if "." in one["setting"] else ""
        if prefix != group:
            group = prefix
            parts.append(f"## {group}" if group else "## The run")
        expected = f"Expected: {plain(one['expected'])}. " if one["expected"] else ""
        needed = f"Needs: {plain('; and '.join(one['needs']))}." if one["needs"] else ""
        meaning = f"{plain(one['meaning']).rstrip('.')}. {expected}{needed}".strip()
        parts += [f"### {one['setting']}", f"{setting_line(one)}\\\n{meaning}"]
    return "\n\n".join(parts) + "\n"


def setting_line(one: dict[str, Any]) -> str:
    return f"`{one['setting']}={written(one['default'])}` · {cell(one['type'])}"


def recipe_values() -> str:
    """What each recipe sets: the values that differ from the default."""
    parts = [
        "# Values of the recipes",
        "What each recipe that ships with Hilt sets; every other setting has its default. `hilt "
        "settings RECIPE --changed` "
        "prints the same. [Recipes](../recipes.md) says when each of them ends.",
    ]
    for command, known, job in JOBS:
        parts += [f"## {job[0].upper()}{job[1:]}"]
        for name, place in known.items():
            changed = [one for one in described(named(name)) if one["value"] != one["default"]]
            rows = [
                f"| `{one['setting']}` | {code(written(one['value']))} | {code(written(one['default']))} |"
                for one in changed
            ]
            parts += [f"### {name}", f"{plain(meaning_of(place))}. Start it with `{command} {name}`."]
            parts.append("\n".join(["| setting | value | default |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


# Metrics


def metrics() -> str:
    """The curves that are drawn, and the alarms with their cures, from the tables in hilt.observe."""
    from hilt.observe.alarms import TABLE
    from hilt.observe.plots import PANELS

    jobs = {"vla": "post-training", "hil": "with a person", "sft": "fine-tuning"}
    jobs |= {"classifier": "reward classifier", "value": "value model"}
    parts = [
        "# Curves and alarms",
        "Made from the tables in `hilt.observe`. [observe](../observe.md#metrics-jsonl) lists "
        "every metric of a run with a "
        "person, [post-training](../post-training.md) those of post-training.",
        "## Curves",
        "`hilt plot` and `hilt open` draw those of these for which a run has records.",
        "| curve | unit | one value for each | lines |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {cell(panel.title.format(n='N'))} | {cell(panel.unit or '')} | {panel.kind} | "
            f"{cell(', '.join(filter(None, panel.curves)))} |"
            for panel in PANELS
        ),
        "## Alarms",
        "A run that goes wrong says so: in the table, in `metrics.jsonl` and in `run.json`. "
        "`stop_on=[NAME]` ends the run "
        "when that alarm is raised. [When each is raised](../alarms.md) has the limits.",
    ]
    for alarm in TABLE:
        parts += [f"### {alarm.name}", f"{', '.join(jobs[job] for job in alarm.jobs).capitalize()}."]
        parts += [f"Needs: {plain(alarm.needs[0])}."] if alarm.needs[0] else []
        parts += [f"Looks at: {', '.join(f'`{name}`' for name in alarm.figures)}.", f"Cure: {plain(alarm.cure)}"]
    return "\n\n".join(parts) + "\n"


# Errors


@dataclasses.dataclass(frozen=True)
class Message:
    """The text of an error, as the source has it."""

    error: str
    text: str
    file: str


def errors() -> dict[str, str]:
    """Every class of error with its meaning, and the texts with which it is raised."""
    from hilt.core.errors import HiltError

    found: dict[str, list[Message]] = {}
    for message in messages():
        found.setdefault(message.error, []).append(message)
    kinds = [kind for kind in vars(importlib.import_module("hilt.core.errors")).values() if is_error(kind, HiltError)]
    made, listed = {}, []
    for kind in kinds:
        name, bases = kind.__name__, [base.__name__ for base in kind.__bases__]
        listed.append(f"| [{name}]({name}.md) | {cell(first_sentence(kind))} | {len(found.get(name, []))} |")
        parts = [f"# {name}", plain(" ".join(inspect.getdoc(kind).split()))]
        parts += [f"`hilt.core.errors.{name}` is a {' and a '.join(f'`{base}`' for base in bases)}."]
        if found.get(name):
            parts.append(
                "The texts with which it is raised, by the part of Hilt that raises it. Each says what was "
                "given, what was "
                "expected and what to do; `{…}` stands for what was given."
            )
        for part in sorted({one.file.split("/")[0] for one in found.get(name, [])}):
            texts = sorted({one.text for one in found[name] if one.file.split("/")[0] == part})
            parts += [f"## {part}", "\n".join(f"- {plain(text)}" for text in texts)]
        made[f"reference/errors/{name}.md"] = "\n\n".join(parts) + "\n"
    index = [
        "# Errors",
        "Every error that Hilt raises on purpose is one of these, and says in one line what was "
        "given, what was expected and "
        "what to do. The command line prints that line as `error: …`, and the traceback only with `hilt --debug`. The "
        "texts are read from the source. Search for a part of yours that has no names or numbers "
        "of your own in it, or see "
        "[when something goes wrong](../../questions.md).",
        "| error | | texts |\n|---|---|---|\n" + "\n".join(listed),
        "```{toctree}\n:hidden:\n\n" + "\n".join(kind.__name__ for kind in kinds) + "\n```",
    ]
    return made | {"reference/errors/index.md": "\n\n".join(index) + "\n"}


def is_error(kind: object, base: type[Exception]) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == "hilt.core.errors"


def messages() -> Iterator[Message]:
    """The texts of `raise SomeError(f"...")` in the source, with what is filled in as `{…}`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and len(node.exc.args) == 1:
                text = literal(node.exc.args[0])
                if len(text.replace("{…}", "").split()) >= 3:
                    yield Message(ast.unparse(node.exc.func), shortened(text), path.relative_to(SOURCE).as_posix())


def literal(node: ast.expr) -> str:
    """The text of a string, or of an f-string with `{…}` for its values; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "{…}" for one in node.values)
    return ""


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"


def first_sentence(kind: object) -> str:
    return " ".join((inspect.getdoc(kind) or "").split()).partition("; ")[0].partition(". ")[0].rstrip(".")


# API


def public_names() -> dict[str, list[str]]:
    """For each module its public names: what a package lists in `__all__`, and what an example in docs/ imports."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("__init__.py")):
        module = ".".join(["hilt", *path.parent.relative_to(SOURCE).parts])
        names = [
            [ast.literal_eval(one) for one in node.value.elts]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", "") == "__all__"
            and isinstance(node.value, ast.List)
        ]
        found |= {module: names[0]} if names else {}
    for module, name in imported_by_examples():
        below = SOURCE.joinpath(*module.split(".")[1:], f"{name}.py")
        if below.is_file():  # a module: its functions and classes are used
            found.setdefault(f"{module}.{name}", defined_in(below))
        elif name not in found.setdefault(module, []):
            found[module].append(name)
    return found


def imported_by_examples() -> Iterator[tuple[str, str]]:
    """What the examples in docs/ and in README.md import of Hilt: (module, name)."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hilt."):
                    yield from ((node.module or "", alias.name) for alias in node.names)


def defined_in(path: Path) -> list[str]:
    """The public functions and classes of a file."""
    body = ast.parse(path.read_text()).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]


def api() -> dict[str, str]:
    """A page for each part, with the docstring and the signature of every public name."""
    parts: dict[str, dict[str, list[str]]] = {}
    for module, names in public_names().items():
        parts.setdefault(module.split(".")[1], {})[module] = names
    seen: dict[int, str] = {}
    made, listed = {}, []
    for part in sorted(parts):
        summary = first_sentence(importlib.import_module(f"hilt.{part}"))
        lines = [heading(f"hilt.{part}", "="), rst(inspect.getdoc(importlib.import_module(f"hilt.{part}")) or ""), ""]
        for module in sorted(parts[part]):
            lines += [] if module == f"hilt.{part}" else [heading(module, "-")]
            for name in parts[part][module]:
                lines += [documented(module, name, seen)]
        made[f"api/{part}.rst"] = "\n".join(lines) + "\n"
        listed.append(f"| [hilt.{part}]({part}.rst) | {cell(summary)} |")
    index = [
        "# API",
        "The public names of every part, from their docstrings, with links to the source: what a package lists in "
        "`__all__`, and what the examples of these pages import. Anything else may change without notice.",
        "| part | |\n|---|---|\n" + "\n".join(listed),
        "```{toctree}\n:hidden:\n\n" + "\n".join(sorted(parts)) + "\n```",
    ]
    return made | {"api/index.md": "\n\n".join(index) + "\n"}


def documented(module: str, name: str, seen: dict[int, str]) -> str:
    thing = getattr(importlib.import_module(module), name)
    full = f"{module}.{name}"
    shared = inspect.isclass(thing) or inspect.isroutine(thing)
    if shared and id(thing) in seen:
        kind = "class" if inspect.isclass(thing) else "function"
        return f".. py:{kind}:: {full}\n   :no-index:\n\n   The same as :py:obj:`{seen[id(thing)]}`.\n"
    seen |= {id(thing): full} if shared else {}
    if inspect.isclass(thing):
        return f".. autoclass:: {full}\n   :members:\n   :show-inheritance:\n"
    if inspect.isroutine(thing):
        return f".. autofunction:: {full}\n"
    return f".. autodata:: {full}\n   :no-value:\n"


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def rst(text: str) -> str:
    """A docstring as reStructuredText: an indented block after an empty line is code, and nothing but backticks is
    markup."""
    lines: list[str] = []
    before, in_code = "", False
    for line in ARGUMENTS.sub(arguments, text).splitlines():
        if not line.startswith(" "):
            in_code = in_code and not line
        elif not in_code and not lines[-1] and not before.startswith((" ", "- ", "* ")):
            in_code = True
            lines += [] if before.endswith("::") else ["::", ""]
        lines.append(line if in_code else escaped(line))
        before = line or before
    return "\n".join(lines)


ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n?)+)", re.MULTILINE)


def arguments(found: re.Match[str]) -> str:
    """The block ``Args:`` as a list of definitions, as the other docstrings have it."""
    rows = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", found[1], re.MULTILINE)
    return "".join(f"{name}\n    {' '.join(text.split())}\n" for name, text in rows)


def escaped(line: str) -> str:
    """Escapes what reStructuredText would take for markup, outside of backticks."""
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"(?<!^)[*|]|(?<=\w)_(?!\w)", lambda found: f"\\{found[0]}", parts[at])
        if at and parts[at][:1].isalnum():  # the s behind `Step`s
            parts[at] = f"\\ {parts[at]}"
    return "".join(parts)


# Text


def plain(text: str) -> str:
    """Text that is not Markdown, but for its backticks, as Markdown."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(
        part if at % 2 else re.sub(r"[*_<>|\[\]$#{}~]", lambda found: f"\\{found[0]}", part)
        for at, part in enumerate(parts)
    )


def cell(text: str) -> str:
    """Such text in a cell of a table, in one line."""
    text = " ".join(text.split())
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part.replace("|", "\\|") if at % 2 else plain(part) for at, part in enumerate(parts))


def code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"
