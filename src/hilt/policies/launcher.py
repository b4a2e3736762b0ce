"""HIL-SERL's launcher and agents, which are in `hilt.compat.serl.launcher`: its users know them by this import line."""

from typing import Any

from hilt.core.names import import_named


def __getattr__(name: str) -> Any:
    return getattr(import_named("hilt.compat.serl.launcher"), name)
