"""Code that is named as ``package.module:attribute``: tasks, devices and backends of one's own. `hilt.core.trust` says what may run."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing
from typing import Any

from hilt.core import trust
from hilt.core.errors import ConfigError, UnsafeError, suggest


def load(name: str, *kinds: type) -> Any:
    """The object that ``package.module:attribute`` names, if its code may be run; `import_named` says where modules are looked for.

    `kinds`: what a file asks to have called must be a subclass of one of these, or a function that is annotated to return one. What the
    user typed, or a program of theirs gives, is checked by whoever uses it.
    """
    trust.permit(name)
    found = load_own(name)
    if kinds and trust.needs_type(name) and not _makes(found, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise UnsafeError(
            f"{trust.origin(name)} names {name!r}, which was not called: expected a subclass of {wanted}, or a function that is annotated "
            f"to return one. If it makes one, add --trust {name} to the command."
        )
    return found


def load_own(name: str) -> Any:
    """The same without asking for trust, for names in Hilt's own code and names that an installed package has registered."""
    module, _, attribute = name.partition(":")
    found = import_named(module)
    if not hasattr(found, attribute):
        raise ConfigError(f"{module} has no {attribute!r}{suggest(attribute, vars(found))} Give a function or class of it.")
    return getattr(found, attribute)


def import_named(module: str) -> Any:
    """A module that a user names: an installed one, or one in the current folder, which is looked in last so that it hides nothing."""
    folder = os.getcwd()
    if module.partition(".")[0] != "hilt" and folder not in sys.path:  # with ours, packages that are missing would be looked for there
        sys.path.append(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ConfigError(
            f"there is no module {error.name!r}, installed or in this folder ({folder}); correct the name {module!r}, or go to its folder."
        ) from error


def _makes(found: Any, kinds: tuple[type, ...]) -> bool:
    """Whether calling it makes one of these, as far as that can be known without calling it."""
    if isinstance(found, type):
        return issubclass(found, kinds)
    if not inspect.isfunction(found):
        return False
    try:
        returned = typing.get_type_hints(found).get("return")
    except (NameError, TypeError):
        return False
    returned = typing.get_origin(returned) or returned
    return isinstance(returned, type) and issubclass(returned, kinds)
