"""What can follow the beginning of a command line: commands, options, recipes, settings and their values, tasks,
devices and pages. What takes long to find out, because torch is imported for it, is kept in a file of the user's cache.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import typer

from hilt import __version__
from hilt.cli.guide.installed_pages import PACKAGE, cache_folder, installed_pages, title_of
from hilt.cli.help import EXAMPLES
from hilt.core.errors import HiltError
from hilt.core.files import DISK
from hilt.recipes import COMMANDS as TRAIN_COMMANDS
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES, is_vla

MAX_MEANING = 70
"""Characters of a meaning that a shell shows"""
FINDS = {"hil": "hil_debug", "vla": "vla_debug", "sft": "sft_debug", "classifier": "classifier"}
"""For each job a recipe that has its settings"""


class Candidate(NamedTuple):
    """A word that may follow, and what it means."""

    value: str
    meaning: str = ""


def candidates(line: str) -> tuple[str, list[Candidate]]:
    """The word that is being typed, and what may stand for it: what begins as it does."""
    words, typed = split_line(line)
    found = followers(words[1:], typed) if words else []
    return typed, [one for one in found if one.value.startswith(typed)]


def split_line(line: str) -> tuple[list[str], str]:
    """The complete words of a line, and the last one, which is being typed."""
    for ending in ("", "'", '"'):
        try:
            words = shlex.split(line + ending)
        except ValueError:
            continue
        is_new = not line or (line[-1].isspace() and not ending)
        return (words, "") if is_new else (words[:-1], words[-1])
    return [], ""


def followers(words: Sequence[str], typed: str) -> list[Candidate]:
    """Returns the candidates for the word that follows `hilt` and these words."""
    words = [word for word in words if word != "--debug"]
    names = [" ".join(words[:n]) for n in (2, 1) if len(words) >= n]
    command = next((name for name in names if name in EXAMPLES), "")
    rest = words[len(command.split()) :]
    if typed.startswith("-"):
        return options(command)
    if rest and rest[-1] in VALUES_OF_OPTIONS:
        return VALUES_OF_OPTIONS[rest[-1]]()
    if rest and rest[-1].startswith("--") and takes_value(command, rest[-1]):
        return []  # a path, which the shell completes
    given = [word for word in rest if not word.startswith("-")]
    below = [] if given else commands_below(command)
    return below + (ARGUMENTS[command](given, typed) if command in ARGUMENTS else [])


def commands_below(command: str) -> list[Candidate]:
    """The commands that begin with this one, by their next word."""
    from hilt.cli import COMMANDS

    depth = len(command.split())
    names = [name.split() for name in EXAMPLES if name]
    found = dict.fromkeys(name[depth] for name in names if len(name) > depth and name[:depth] == command.split())
    helps = {name: text for name, (_, text) in COMMANDS.items()}
    return [Candidate(word, shortened(helps.get(f"{command} {word}".strip(), ""))) for word in found]


def options(command: str) -> list[Candidate]:
    return [Candidate(name, shortened(param.help or "")) for param in _params(command) for name in param.opts]


def command_options(command: str) -> list[str]:
    """The options of a command by all their names, ``--no-`` forms too."""
    return [name for param in _params(command) for name in (*param.opts, *param.secondary_opts)]


def takes_value(command: str, option: str) -> bool:
    return any(option in param.opts and not param.is_flag for param in _params(command))


def _params(command: str) -> list[Any]:
    """The options of a command, whose module is imported for it."""
    from hilt.cli import COMMANDS, app

    made: Any = typer.main.get_command(app)
    name = next((name for name in (command, command.split(" ")[0]) if name in COMMANDS), "")
    if name:
        module, _, attribute = COMMANDS[name][0].partition(":")
        made = typer.main.get_command(getattr(importlib.import_module(module), attribute or "app"))
        for word in command.split()[len(name.split()) :]:
            made = made.commands[word]
    return [param for param in made.params if param.param_type_name == "option" and not param.hidden]


# What the commands take


def _recipes(known: Iterable[str], job: str) -> Callable[[Sequence[str], str], list[Candidate]]:
    """What commands take that have a recipe as their argument, and settings behind it."""

    def found(given: Sequence[str], typed: str) -> list[Candidate]:
        return settings(job_of(given[0], job), typed) if given else [Candidate(name) for name in known]

    return found


def _settings(job: str) -> Callable[[Sequence[str], str], list[Candidate]]:
    return lambda given, typed: settings(job, typed)


def _tasks(given: Sequence[str], typed: str) -> list[Candidate]:
    return [] if given else tasks()


def _pages(given: Sequence[str], typed: str) -> list[Candidate]:
    return [] if given else [Candidate(name, shortened(title_of(path))) for name, path in installed_pages().items()]


def _shells(given: Sequence[str], typed: str) -> list[Candidate]:
    return [] if given else [Candidate(name) for name in ("bash", "zsh", "fish")]


ALL_RECIPES = (*RECIPES, *VLA_RECIPES)
ARGUMENTS: dict[str, Callable[[Sequence[str], str], list[Candidate]]] = {
    "train": _recipes(ALL_RECIPES, "hil"),
    "learner": _recipes(RECIPES, "hil"),
    "actor": _recipes(RECIPES, "hil"),
    "settings": _recipes((*ALL_RECIPES, *SFT_RECIPES, "classifier"), "hil"),
    "train sft": _recipes(SFT_RECIPES, "sft"),
    "train classifier": _settings("classifier"),
    "record": _tasks,
    "docs": _pages,
    "completion": _shells,
}
"""For each command what it takes, given the words that it has, and the word that is being typed"""


def job_of(recipe: str, otherwise: str) -> str:
    """The job whose settings a recipe has. Code of a user's is not imported for it."""
    if recipe in SFT_RECIPES or recipe in TRAIN_COMMANDS:
        return "sft" if recipe in SFT_RECIPES else recipe
    if recipe in VLA_RECIPES or (recipe.endswith((".yaml", ".yml")) and is_vla(recipe)):
        return "vla"
    return otherwise


def settings(job: str, typed: str) -> list[Candidate]:
    """The settings of a job, as ``name=``; behind the = the values that one may have."""
    rows = kept(job, lambda: _rows_of(job)) if job in FINDS else []
    name, equals, _ = typed.partition("=")
    if not equals:
        return [Candidate(f"{key}=", shortened(meaning)) for key, _, meaning in rows]
    if name in VALUES_OF_SETTINGS:
        return [Candidate(f"{name}={one.value}", one.meaning) for one in VALUES_OF_SETTINGS[name]()]
    return [Candidate(f"{name}={value}") for key, values, _ in rows if key == name for value in values]


def _rows_of(job: str) -> list[list[Any]]:
    """(name, values that it may have, meaning) of every setting."""
    from hilt.cli.recipes import described, named
    from hilt.core.validate import rules

    config = named(FINDS[job])
    allowed = rules(type(config))
    return [
        [
            row["setting"],
            ["true", "false"] if row["type"] == "bool" else list(allowed[row["setting"]].choices),
            row["meaning"],
        ]
        for row in described(config)
    ]


def tasks() -> list[Candidate]:
    """The tasks that ship with Hilt, and the prefixes of others."""
    return [Candidate(*row) for row in kept("tasks", _rows_of_tasks)]


def _rows_of_tasks() -> list[list[Any]]:
    from hilt.envs.task import TASKS

    rows = []
    try:
        rows += [[f"tabletop/{name}"] for name in importlib.import_module("hilt.envs.tabletop.suite").SUITE]
    except (ImportError, HiltError):  # without mujoco
        rows.append(["tabletop/"])
    return rows + [[f"{prefix}/"] for prefix in TASKS.known() if prefix != "tabletop"]


def devices() -> list[Candidate]:
    from hilt.teleop.devices import DEVICES

    return [Candidate(name) for name in DEVICES.known()]


def backends() -> list[Candidate]:
    from hilt.robot.backends import BACKENDS

    return [Candidate(name) for name in BACKENDS.known()]


VALUES_OF_OPTIONS: dict[str, Callable[[], list[Candidate]]] = {"--device": devices, "--backend": backends}
VALUES_OF_SETTINGS: dict[str, Callable[[], list[Candidate]]] = {"task": tasks, "operator": devices}


# What is kept


def kept(name: str, find: Callable[[], list[list[Any]]]) -> list[list[Any]]:
    """What `find` returns, from the cache if it is of this version and this code."""
    stamp = [__version__, max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))]
    path = cache_folder() / "completion.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    if known.get("stamp") != stamp:
        known = {"stamp": stamp}
    if name not in known:
        known[name] = find()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            DISK.replace(path, json.dumps(known), durable=False)
        except OSError:
            pass  # a home that cannot be written to: it is found again the next time
    found: list[list[Any]] = known[name]
    return found


def shortened(text: str) -> str:
    """The first sentence of a text, in one line."""
    text = " ".join(text.replace("`", "'").split()).partition(". ")[0].partition("; ")[0].rstrip(".")
    return text if len(text) <= MAX_MEANING else f"{text[: MAX_MEANING - 1]}…"
