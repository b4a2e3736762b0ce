"""Names that a package offers, and imports only when they are used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path


def lazy_exports(package: str, file: str) -> Callable[[str], object]:
    """Returns the `__getattr__` of a package whose ``__init__.py`` lists its API under ``if TYPE_CHECKING:``::

        if TYPE_CHECKING:
            from hilt.policies.agent.agent import Agent

        __all__ = ["Agent"]
        __getattr__ = lazy_exports(__name__, __file__)

    ``from hilt.policies import Agent`` then imports that module at its first use. A package lists its
    API in this way where importing all of it would take seconds, or would import a part above its own.
    Type checkers and editors see ordinary imports.
    """

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules()[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return get
