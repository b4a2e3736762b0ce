"""Recipes: functions that return the complete settings of a run. The command line only overrides them.

config = build(recipe("tabletop_pick"), "max_seconds=300")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hilt.core.config import build
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.names import load
from hilt.runtime.config import Hil

if TYPE_CHECKING:
    from hilt.runtime.sft import Sft

TABLETOP = ("button", "pick", "pick_red", "drawer", "push", "insert", "peg")
RECIPES = {name: f"hilt.recipes.hil:{name}" for name in ("hil_debug", *(f"tabletop_{task}" for task in TABLETOP))}
"""Name to "module:function". Add your own, or give "module:function" where a recipe is asked for."""
SFT_RECIPES = {name: f"hilt.recipes.sft:{name}" for name in ("sft_debug", "sft_tabletop")}
"""The same, for `hilt train sft`"""


def sft_recipe(name: str) -> Sft:
    """The settings that a name stands for: one of `SFT_RECIPES`, a YAML file, or a function of yours."""
    from hilt.runtime.sft import Sft

    if name.endswith((".yaml", ".yml")):
        return build(Sft(), Path(name))
    if name not in SFT_RECIPES and ":" not in name:
        raise UnknownNameError("recipe of hilt train sft", name, SFT_RECIPES)
    made = load(SFT_RECIPES.get(name, name))
    made = made() if callable(made) else made
    if not isinstance(made, Sft):
        raise ConfigError(f"the recipe {name} gave {made!r}: expected a hilt.runtime.sft.Sft, or a function that returns one.")
    return made


def recipe(name: str) -> Hil:
    """The settings that a name stands for: one of `RECIPES`, a YAML file of settings (``run.yaml``), a function of yours
    (``module:function``), or a task config of HIL-SERL's (``hil-serl:module:Class``)."""
    if name.endswith((".yaml", ".yml")):
        return build(Hil(), Path(name))
    if name.startswith("hil-serl:"):
        from hilt.recipes.migrate import from_hil_serl

        return from_hil_serl(name.removeprefix("hil-serl:"))
    if name not in RECIPES and ":" not in name:
        raise UnknownNameError("recipe", name, RECIPES)
    made = load(RECIPES.get(name, name))
    made = made() if callable(made) else made
    if not isinstance(made, Hil):
        raise ConfigError(f"the recipe {name} gave {made!r}: expected a hilt.runtime.config.Hil, or a function that returns one.")
    return made
