"""Code that a user names: ``package.module:attribute``, for tasks, devices and backends of their own."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from hilt.core.errors import ConfigError, suggest


def load(name: str) -> Any:
    """What a user names by ``package.module:attribute``; see `import_named` for where it may be."""
    module, _, attribute = name.partition(":")
    found = import_named(module)
    if not hasattr(found, attribute):
        raise ConfigError(f"{module} has no {attribute!r}{suggest(attribute, vars(found))} Give a function or class of it.")
    return getattr(found, attribute)


def import_named(module: str) -> Any:
    """A module that a user names: an installed one, or one in the current folder, which is looked in last so that it hides nothing."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ConfigError(
            f"there is no module {error.name!r}, installed or in this folder ({folder}); correct the name {module!r}, or go to its folder."
        ) from error
