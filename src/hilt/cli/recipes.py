"""``hilt recipes`` and ``hilt settings RECIPE``: what can be trained, and every
setting of it with its default and its meaning."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.help import quoted
from hilt.cli.show import heavy_module, table
from hilt.core import validate
from hilt.core.config import build, describe
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

recipes, settings = (typer.Typer(add_completion=False) for _ in range(2))

JOBS = [
    ("hilt train", RECIPES, "with a person in the loop, or a script that takes over like one"),
    ("hilt train", VLA_RECIPES, "post-training of a vision-language-action policy on its own rollouts"),
    ("hilt train sft", SFT_RECIPES, "fine-tuning of a vision-language-action policy on demonstrations"),
]
"""The command that takes recipes of a job, the recipes by name, and what the job is"""
CLASSIFIER = "classifier"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]
RECIPE = (
    "A name that hilt recipes lists, classifier, a file of settings such as RUN/config.yaml, or "
    "module:function of yours."
)
WORDS = (
    "Settings to change first; and texts: only settings with one of them in their name are "
    "shown, such as encoder or max_."
)


@recipes.command("recipes")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that ship with Hilt, by the command that takes them. Show the
    settings of one with: hilt settings RECIPE"""
    found = [
        {"recipe": name, "command": f"{command} {name}", "job": job, "meaning": meaning_of(place)}
        for command, known, job in JOBS
        for name, place in known.items()
    ]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    from rich.console import Console

    for job in dict.fromkeys(one["job"] for one in found):
        rows = [[one["command"], one["meaning"]] for one in found if one["job"] == job]
        Console().print(table("", "", rows=rows, title=f"\n{job[0].upper()}{job[1:]}"))
    typer.echo(
        "\nA recipe is also a file of settings (run.yaml), or a function of yours (module:function): docs/recipes.md"
    )
    typer.echo(
        "hilt settings RECIPE shows all settings of one; hilt train RECIPE KEY=VALUE changes "
        "them; --dry-run starts nothing"
    )


def meaning_of(place: str) -> str:
    """The first sentence below a recipe's function, read without importing it: some need torch."""
    module, _, function = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text("utf-8")).body
    text = (
        next(
            (ast.get_docstring(node) for node in body if isinstance(node, ast.FunctionDef) and node.name == function),
            None,
        )
        or ""
    )
    return (quoted(" ".join(text.split())) or "").partition(". ")[0].rstrip(".")


@settings.command("settings")
def show_settings(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE, show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]... [TEXT]...", help=WORDS, show_default=False)
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from their default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting of a recipe: its value, its default where that is another
    one, and what it means, with its unit."""
    config = build(named(recipe), *[word for word in words or [] if "=" in word])
    texts = [word for word in words or [] if "=" not in word]
    rows = [row for row in described(config) if row["value"] != row["default"] or not changed]
    shown = [row for row in rows if not texts or any(text in row["setting"] for text in texts)]
    if texts and not shown:
        raise ConfigError(
            f"no setting of {recipe} has {' or '.join(map(repr, texts))} in its name. Leave it "
            f"out to see all {len(rows)}."
        )
    if as_json:
        typer.echo(json.dumps(shown, indent=1, default=str))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for row in shown:
        default = "" if row["value"] == row["default"] else f"   (default: {written(row['default'])})"
        console.print(
            Text(row["setting"], "bold"), Text(f"= {written(row['value'])}{default}   {row['type']}"), soft_wrap=True
        )
        expected = f"Expected: {row['expected']}. " if row["expected"] else ""
        needed = f"Needs: {'; and '.join(row['needs'])}." if row["needs"] else ""
        for text in filter(None, (quoted(row["meaning"]), (expected + needed).strip())):
            lines = Text(text).wrap(console, max(20, console.width - 4))
            typer.echo(indent("\n".join(line.plain.rstrip() for line in lines), "    "))


def named(recipe: str) -> DataclassInstance:
    """The settings of a recipe of any job."""
    from hilt.recipes import is_sft, is_vla, sft_recipe, vla_recipe
    from hilt.recipes import recipe as hil_recipe

    if recipe == CLASSIFIER:
        heavy_module("torch", "hilt settings classifier", "torch", then="hilt.classifier.reward")
        from hilt.classifier.reward import ClassifierConfig

        return ClassifierConfig()
    known = {**RECIPES, **VLA_RECIPES, **SFT_RECIPES}
    if recipe not in known and ":" not in recipe and not recipe.endswith((".yaml", ".yml")):
        raise UnknownNameError("recipe", recipe, [*known, CLASSIFIER])
    post_training = is_vla(recipe)
    if post_training or recipe in SFT_RECIPES:
        heavy_module("torch", "hilt settings", "torch", then="hilt.vla.sft")
    if is_sft(recipe):
        return sft_recipe(recipe)
    return vla_recipe(recipe) if post_training else hil_recipe(recipe)


def described(config: DataclassInstance) -> list[dict[str, Any]]:
    """Each setting with its type, its default, the value it has here, its meaning, the
    values that it may have, and what it needs."""
    rules, needed = validate.rules(type(config)), list(validate.needs(type(config)))
    return [
        {
            "setting": key,
            "type": kind,
            "default": default,
            "value": validate.value_of(config, key),
            "meaning": meaning,
            "expected": str(rules[key]),
            "needs": [
                need.needed.replace("{here}", "") for name, need in needed if key == name or key.startswith(f"{name}.")
            ],
        }
        for key, kind, default, meaning in describe(type(config))
    ]


def written(value: object) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    return json.dumps(value, default=str) if isinstance(value, (bool, list, dict)) or value == "" else str(value)
