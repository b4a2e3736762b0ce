"""Recipes: functions that return the complete settings of a run. The command line only overrides them.

config = build(recipe("tabletop_pick"), "max_seconds=300")
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hilt.core import trust
from hilt.core.config import build, read_yaml
from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.core.names import load
from hilt.hil.config import Hil

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from hilt.vla.config import Vla
    from hilt.vla.sft import Sft

T = TypeVar("T", bound="DataclassInstance")
COMMANDS = ("sft", "classifier", "value", "rloo", "simplevla")
"""What `hilt train` takes in the place of a recipe"""
TABLETOP = ("button", "pick", "pick_red", "drawer", "push", "insert", "peg")
RECIPES = {
    name: f"hilt.recipes.hil:{name}"
    for name in ("hil_debug", *(f"tabletop_{task}" for task in TABLETOP), "wsrl", "vla_person", "frozen_vla")
}
"""Name to "module:function". Add your own, or give "module:function" where a recipe is asked for."""
SFT_RECIPES = {
    name: f"hilt.recipes.fine_tuning:{name}"
    for name in ("sft_debug", "sft_tabletop", "act", "flow_bc", "recap_debug", "recap_tabletop", "distill")
} | {name: f"hilt.recipes.libero_runs:{name}" for name in ("sft_libero", "sft_libero_six")}
"""The same, for `hilt train sft`"""
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
LIBERO = (*SUITES, "libero_debug", "libero_learned", "libero_six")
PUBLISHED = ("pi0_ppo", "pi05_ppo", "pi0_grpo", "oft_ppo", "oft_grpo")
VLA_RECIPES = {
    "vla_debug": "hilt.recipes.vla:vla_debug",
    "vla_tabletop": "hilt.recipes.vla_tabletop:vla_tabletop",
    **{name: f"hilt.recipes.libero_runs:{name}" for name in LIBERO},
    **{name: f"hilt.recipes.published:{name}" for name in PUBLISHED},
    **{name: f"hilt.recipes.pi0_loop:{name}" for name in ("pi0_rloo", "pi0_rloo_24gb")},
}
"""The same, for post-training: `hilt train` knows from the recipe what is to be done"""


def file_of(name: str) -> Path:
    """A file of settings, as it is named; or, where there is none, the one of examples/ that is installed with Hilt."""
    path, installed = Path(name), Path(__file__).parents[1] / name
    return installed if name.startswith("examples/") and not path.exists() and installed.exists() else path


def is_vla(name: str) -> bool:
    """Whether a recipe is of post-training: one of `VLA_RECIPES`, a file that names
    `tasks`, or a function that returns a `Vla`."""
    if name.endswith((".yaml", ".yml")):
        try:
            return "tasks" in list(read_yaml(file_of(name)))
        except HiltError:
            return False  # reading it raises the error
    if name in VLA_RECIPES or ":" not in name or name.startswith("hil-serl:"):
        return name in VLA_RECIPES
    return type(_made(name)).__name__ == "Vla"


def is_sft(name: str) -> bool:
    """Whether a recipe is of fine-tuning: one of `SFT_RECIPES`, or a file with its settings."""
    return name in SFT_RECIPES or (
        name.endswith((".yaml", ".yml")) and _used_by(Hil, name).startswith("hilt train sft")
    )


def vla_recipe(name: str) -> Vla:
    """The settings that a name stands for: one of `VLA_RECIPES`, a YAML file, or a function of yours."""
    from hilt.vla.config import Vla

    if name.endswith((".yaml", ".yml")):
        return _of_file(Vla, name)
    made = _made(VLA_RECIPES.get(name, name))
    if not isinstance(made, Vla):
        raise ConfigError(
            f"the recipe {name} gave {made!r}: expected a hilt.vla.config.Vla, or a function that returns one."
        )
    return made


def sft_recipe(name: str) -> Sft:
    """The settings that a name stands for: one of `SFT_RECIPES`, a YAML file, or a function of yours."""
    from hilt.vla.sft import Sft

    if name.endswith((".yaml", ".yml")):
        return _of_file(Sft, name)
    if name not in SFT_RECIPES and ":" not in name:
        raise UnknownNameError("recipe of hilt train sft", name, SFT_RECIPES)
    made = _made(SFT_RECIPES.get(name, name))
    if not isinstance(made, Sft):
        raise ConfigError(
            f"the recipe {name} gave {made!r}: expected a hilt.vla.sft.Sft, or a function that returns one."
        )
    return made


def recipe(name: str) -> Hil:
    """The settings that a name stands for: one of `RECIPES`, a YAML file of settings (``run.yaml``), a function of
    yours (``module:function``), or a task config of HIL-SERL's (``hil-serl:module:Class``)."""
    if name.endswith((".yaml", ".yml")):
        return _of_file(Hil, name)
    if name.startswith("hil-serl:"):
        from hilt.recipes.migrate import from_hil_serl

        return from_hil_serl(name.removeprefix("hil-serl:"))
    if name in SFT_RECIPES:
        raise ConfigError(f"{name} is a recipe of fine-tuning: hilt train sft {name}.")
    if name not in RECIPES and ":" not in name:
        raise UnknownNameError("recipe", name, [*RECIPES, *VLA_RECIPES, *COMMANDS])
    made = _made(RECIPES.get(name, name))
    if not isinstance(made, Hil):
        raise ConfigError(
            f"the recipe {name} gave {made!r}: expected a hilt.hil.config.Hil, or a function that returns one."
        )
    return made


def recipe_of(task: str) -> str:
    """The name of our recipe that learns a task, but for the short ones that only
    try every part; empty when there is none."""
    return next((name for name in RECIPES if not name.endswith("_debug") and recipe(name).task == task), "")


def _of_file(kind: type[T], name: str) -> T:
    """The settings in a file; if they belong to another job, the error names the command for it."""
    try:
        return build(kind(), file_of(name))
    except ConfigError:
        if use := _used_by(kind, name):
            raise ConfigError(f"{name} has the settings of another job: {use}.") from None
        raise


def _used_by(kind: type[Any], name: str) -> str:
    """What takes a file whose names are not those of `kind`; empty when they are, and when it is not known."""
    from hilt.robot.env import RobotConfig

    try:
        names = set(map(str, read_yaml(file_of(name))))
    except HiltError:
        return ""
    if names <= _names(kind):
        return ""
    if "algo" in names:
        return f"hilt train rloo --config {name}"
    if names <= _names(RobotConfig):
        return f"it describes an arm, and a run has it as its task: task: robot/{name}"
    with contextlib.suppress(ImportError):  # without torch nothing is known of these
        from hilt.vla.config import Vla
        from hilt.vla.sft import Sft

        if names <= _names(Vla):
            return f"hilt train {name}"
        if names <= _names(Sft):
            return f"hilt train sft {name}"
    return ""


def _names(kind: type[Any]) -> set[str]:
    return {item.name for item in dataclasses.fields(kind)}


def _made(place: str) -> Any:
    made = load(place)
    made = made() if callable(made) else made
    trust.given(*trust.named_in(made))
    return made
