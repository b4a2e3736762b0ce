"""Names in settings: what they stand for is found by a built-in name, by an entry
point, or as ``package.module:attribute``.

    SINKS = ExtensionPoint("sink", "hilt.sinks", {"tensorboard": "hilt.observe.sinks:TensorBoard"})
    SINKS.load("tensorboard")             # built in, and imported now
    SINKS.load("mlflow")                  # an entry point of the group hilt.sinks, of any installed package
    SINKS.load("my_package.sinks:Mine")   # if that code may be run: see `hilt.core.trust`

docs/extending.md has an example of each extension point, and `hilt.core.trust.GROUPS` lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from hilt.core import hub, trust
from hilt.core.errors import ConfigError, HiltError, UnknownNameError, UnsafeError, suggest

PAGE = "docs/extending.md"
T = TypeVar("T")


class ExtensionPoint(dict[str, object]):
    """What can be named of one kind: the built-in names, and those that a program adds, as a dictionary. A value is the
    thing itself, or ``module:attribute`` (or a module), which is imported when it is asked for. The names that
    installed packages register come besides."""

    def __init__(self, noun: str, group: str, built_in: Mapping[str, object]):
        """`noun`: what one of them is called in errors; `group`: of the entry
        points, one of `hilt.core.trust.GROUPS`."""
        if group not in trust.GROUPS:
            raise ConfigError(f"the group {group!r} of entry points: expected one of {', '.join(trust.GROUPS)}.")
        super().__init__(built_in)
        self.noun, self.group = noun, group

    def known(self) -> dict[str, object]:
        """All names but ``module:Class``, the built-in ones first."""
        return {**self, **{name: value for name, value in trust.registered(self.group).items() if name not in self}}

    def is_name(self, text: str) -> bool:
        """Whether a setting that may be a path, too, names one of these: a known name, or
        ``module:Class`` where there is no such file."""
        if text in self.known():
            return True
        return bool(trust.NAME.fullmatch(text)) and not text.startswith(hub.PREFIX) and not os.path.exists(text)

    def check(self, name: str) -> None:
        """Raises for what is neither a known name nor code that may be run. Imports nothing."""
        if name in self or name in trust.registered(self.group):
            return
        if not trust.NAME.fullmatch(name):
            raise UnknownNameError(self.noun, name, [*self.known(), "package.module:Class"])
        trust.permit(name)

    def load(self, name: str, *types: type) -> Any:
        """The thing of this name. `types`: see `load`."""
        self.check(name)
        try:
            if name not in (known := self.known()):
                return load(name, *types)
            found = known[name]
            return load_own(found) if isinstance(found, str) else found
        except (ImportError, ValueError) as error:
            if isinstance(error, HiltError) and not isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the {self.noun} {name!r} cannot be imported: {error}") from error

    def load_class(self, name: str, base: Callable[..., T]) -> type[T]:
        """The class of this name, which must be a subclass of `base`."""
        assert isinstance(base, type)  # mypy takes an abstract class for a callable, and not for a type
        found: type[T] = self.load(name, base)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(
                f"the {self.noun} {name!r}: expected a subclass of {base.__module__}.{base.__name__}, "
                f"got {found!r}; see {PAGE}."
            )
        return found


def load(name: str, *kinds: type) -> Any:
    """The object that ``package.module:attribute`` names, if its code may be run;
    `import_named` describes where modules are looked for.

    `kinds`: what a file asks to have called must be a subclass of one of these, or a function that is annotated to
    return one. What the user typed, or a program of theirs gives, is checked by the caller.
    """
    trust.permit(name)
    found = load_own(name)
    if kinds and trust.needs_type(name) and not _makes(found, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise UnsafeError(
            f"{trust.origin(name)} names {name!r}, which was not called: expected a subclass of {wanted}, or a "
            f"function that is annotated to return one. If it makes one, add --trust {name} to the command."
        )
    return found


def load_own(name: str) -> Any:
    """The same without asking for trust, for names in Hilt's own code and names that an installed package has
    registered. A name without an attribute is a module."""
    module, colon, attribute = name.partition(":")
    found = import_named(module)
    if not colon:
        return found
    if not hasattr(found, attribute):
        raise ConfigError(
            f"{module} has no {attribute!r}{suggest(attribute, vars(found))} Give a function or class of it."
        )
    return getattr(found, attribute)


def import_named(module: str) -> ModuleType:
    """A module that a user names: an installed one, or one in the current folder, which
    is looked in last so that it hides nothing."""
    folder = os.getcwd()
    is_ours = module.partition(".")[0] == "hilt"  # with ours, packages that are missing would be looked for there
    if trust.is_command() and not is_ours and folder not in sys.path:
        sys.path.append(folder)  # for good: a module of the user's may import its neighbors later
    try:
        with contextlib.nullcontext() if is_ours else import_path(folder):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ConfigError(
            f"there is no module {error.name!r}, installed or in this folder ({folder}); correct the name "
            f"{module!r}, or go to its folder."
        ) from error


@contextlib.contextmanager
def import_path(*folders: str) -> Iterator[None]:
    """A context in which modules in these folders can be imported. The folders come last on the path."""
    sys.path.extend(folders)
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):  # what was imported may have removed it
                # the last one: another thread, or the user, may have added it, too
                del sys.path[-1 - sys.path[::-1].index(folder)]


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
