"""What every other package of Hilt is built on: errors, settings, nested arrays, steps, files, signals and processes.

It imports nothing else of Hilt.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.core.config import build, describe
    from hilt.core.errors import ConfigError, HiltError, UnknownNameError
    from hilt.core.progress import Progress
    from hilt.core.trajectory import Source, Step
    from hilt.core.tree import ArraySpec, Spec
    from hilt.core.unpickle import safe_load

__all__ = [
    "ArraySpec",
    "ConfigError",
    "HiltError",
    "Progress",
    "Source",
    "Spec",
    "Step",
    "UnknownNameError",
    "build",
    "describe",
    "safe_load",
]
__getattr__ = lazy_exports(__name__, __file__)
