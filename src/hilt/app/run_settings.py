"""The settings of runs: how a run differs from its recipe, and runs from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hilt.app.run_library import RunSummary
from hilt.core.config import thaw
from hilt.observe.sinks import config_of
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES
from hilt.runs.folder import CONFIG, differences


def changed_from_recipe(run: RunSummary) -> list[tuple[str, str, str]] | None:
    """(setting, its value in the run, its value in the recipe) of those that differ; None if the recipe is not one
    that ships with Hilt: no code of others is run to show a page."""
    if run.recipe not in {**RECIPES, **VLA_RECIPES, **SFT_RECIPES}:
        return None
    from hilt.cli.recipes import named

    recipe = named(run.recipe)
    found = differences(thaw(type(recipe), run.path / CONFIG), recipe)
    return [(key, written(value), written(usual)) for key, (value, usual) in sorted(found.items())]


def flat_settings(run: Path) -> dict[str, str]:
    """All settings of a run, by their dotted keys."""
    return {key: written(value) for key, value in _flat(config_of(run)).items()}


def differing(runs: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Exactly the settings in which runs differ, each with its value in each run; "–" where a run has none."""
    found = [flat_settings(run) for run in runs]
    keys = sorted({key for settings in found for key in settings})
    rows = [(key, [settings.get(key, "–") for settings in found]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def written(value: object) -> str:
    """A value as a command line takes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(one) for one in value)}]"
    return str(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat
