"""Every error a user of Hilt can meet.

One base class, one class per cause. A message says what was given, what was expected and what to do, in one line;
the command line prints that line, and the traceback only with ``--debug``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

MAX_LISTED = 20
"""Known names that are listed beside the one that was probably meant"""


class HiltError(Exception):
    """Base of every error that Hilt raises on purpose."""


class ConfigError(HiltError, ValueError):
    """Raised when a setting or an argument has a value that cannot work."""


class ArgumentError(ConfigError, TypeError):
    """Raised when a call has an argument that the function does not have, or lacks one; the
    message shows the call that was expected."""


class SeveralErrors(ConfigError):
    """Raised when several things cannot work: each is one line of the message."""

    def __init__(self, errors: Iterable[HiltError]):
        self.errors = list(errors)
        super().__init__(
            "\n".join(
                [f"{len(self.errors)} things cannot work as they are:", *(f"  - {error}" for error in self.errors)]
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class OutcomesError(ConfigError):
    """Raised when episodes have too few successes or failures for a value to be learned of them."""


class Problems:
    """Collects what is wrong, so that all of it is reported at once, and not one thing for each try.

    Example:

        problems = Problems()
        problems.check(check_sizes, config)
        with problems.collected():
            ...
        problems.report()
    """

    def __init__(self) -> None:
        self.errors: list[HiltError] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """An error of Hilt's that ends the block is kept; any other is raised."""
        try:
            yield
        except HiltError as error:
            known = {str(one) for one in self.errors}
            self.errors += [
                one for one in (error.errors if isinstance(error, SeveralErrors) else [error]) if str(one) not in known
            ]

    def check(self, function: Callable[..., object], *given: Any) -> bool:
        """Calls the function; returns whether it raised nothing."""
        with self.collected():
            function(*given)
            return True
        return False

    def report(self) -> None:
        """Raises what was found: one error as it is, several as one that lists them."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(self.errors)


class SchemaError(HiltError, ValueError):
    """Raised when data does not have the fields, types or shapes that were declared for it."""


class NotFiniteError(SchemaError):
    """Raised when a loss or a gradient is not finite, before anything was changed by it."""


class AlarmError(HiltError, RuntimeError):
    """Raised when a run ends itself because learning goes wrong; the message says what
    was measured, the cure, and how to go on."""


class MissingFieldError(SchemaError, KeyError):
    """Raised when a declared field is absent."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class UnknownNameError(HiltError, KeyError):
    """Raised when something is asked for by a name that does not exist."""

    __str__ = Exception.__str__

    def __init__(self, kind: str, name: str, known: Iterable[str], all_listed: bool = False, setting: str = ""):
        """`all_listed`: also beside a near name, however many they are. `setting`: where the
        name was given, such as ``image_keys``."""
        known = sorted(known)
        self._made_from = (kind, name, known, all_listed, setting)
        near = suggest(name, known)
        cut = near != "." and len(known) > MAX_LISTED and not all_listed
        listed = "" if cut else f" Known: {', '.join(known) or 'none'}."
        super().__init__(f"{setting}: " * bool(setting) + f"no {kind} named {name!r}{near}{listed}")

    def __reduce__(self) -> tuple[Any, ...]:  # so that it passes from one process to another
        return type(self), self._made_from


class EmptyError(HiltError, RuntimeError):
    """Raised when a sample is asked of something that holds nothing."""


class DeadlineError(HiltError, TimeoutError):
    """Raised when a wait passed its deadline; the message says what was awaited."""


class ClosedError(HiltError, RuntimeError):
    """Raised when a closed log, spool or iterator is used."""


class RefusedError(HiltError, RuntimeError):
    """Raised when the other side of a connection refuses this one; the message says what differs."""


class EmergencyStopError(RefusedError):
    """Raised when something is to move and the emergency stop is latched."""


class RequestError(HiltError, RuntimeError):
    """Raised when a request reached the other side and failed there; the message has the error's type and text."""


class DeviceError(HiltError, RuntimeError):
    """Raised when a device that a person drives with is not there or may not be used; the message has the cure."""


class LockedError(HiltError, RuntimeError):
    """Raised when a second writer opens a log that already has one."""


class ReadOnlyError(HiltError, RuntimeError):
    """Raised when a log that was opened for reading is written to."""


class StorageError(HiltError, OSError):
    """Raised when the operating system refuses to read or write a file."""


class MissingFileError(StorageError, FileNotFoundError):
    """Raised when a file that must be there is not."""


class DiskFullError(StorageError):
    """Raised when a write found no room; nothing of that write was kept."""


class CorruptError(HiltError, ValueError):
    """Raised when bytes on disk are not the bytes that were written."""


class FormatError(HiltError, ValueError):
    """Raised when a file or folder is not of the format it should be."""


class VersionError(FormatError):
    """Raised when a file was written by a newer version of Hilt."""


class UnsafeError(FormatError):
    """Raised when loading a file would run code that it carries."""


class MissingPackageError(HiltError, ImportError):
    """Raised when an optional package is needed and missing, or broken; the message
    has the pip line that installs it."""

    def __init__(self, package: str, purpose: str, extra: str, broken: str = "", command: str = ""):
        """`broken`: why it cannot be imported; `command`: what installs it, where an extra alone does not."""
        self._made_from = (package, purpose, extra, broken, command)
        state, cure = (f"cannot be imported ({broken})", "--upgrade ") if broken else ("is not installed", "")
        command = command or f"pip install {cure}'hilt[{extra}]'"
        super().__init__(f"{purpose} needs the package {package!r}, which {state}: {command}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_from


def optional_module(name: str, purpose: str, extra: str, package: str = "") -> ModuleType:
    """A module of a package that not everybody has installed; `package` is its name there, when it is another one."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (
            isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name.partition(".")[0]
        )
        raise MissingPackageError(package or name, purpose, extra, "" if missing else str(error)) from error


def require_module(name: str, purpose: str, extra: str) -> None:
    """Refuses to go on without such a package, and does not import it, which may take seconds."""
    if importlib.util.find_spec(name) is None:
        raise MissingPackageError(name, purpose, extra)


def suggest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'X'?`` when a known name is near, else a full stop."""
    known = list(known)
    near = [k for k in known if k.endswith(f"/{name}") or (name and k.startswith(f"{name}_"))]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else "."


def explained_calls(kind: type[T]) -> type[T]:
    """A decorator of classes: a call of the constructor, or of a public method of the class, whose arguments do not fit
    raises `ArgumentError`, and no bare TypeError. Every other error, and what a call costs, stays as it is."""
    for name, function in list(vars(kind).items()):
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            setattr(
                kind, name, _explained(function, kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}")
            )
    return kind


def refuse_unknown(call: str, given: Iterable[str], known: Iterable[str], expected: str = "") -> None:
    """Refuses the first name that is not known, with the one that was probably
    meant. `expected`: how the call is written."""
    known = list(known)
    for name in given:
        if name not in known:
            listed = expected or f"Known: {', '.join(known) or 'none'}."
            raise ArgumentError(f"{call}: no argument named {name!r}{suggest(name, known)} {listed}")


def _explained(function: Callable[P, T], call: str) -> Callable[P, T]:
    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        try:
            return function(*given, **named)
        except TypeError:
            _check_call(function, call, given, named)
            raise  # the arguments fit: it is about something else

    return called


def _check_call(function: Callable[..., Any], call: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    plain = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in parameters], return_annotation=signature.empty
    )
    try:
        plain.bind(*given[1:], **named)
    except TypeError as error:
        known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        expected = f"Expected {call}{plain}."
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        refuse_unknown(
            call, [name for name in named if not open_ended or "did you mean" in suggest(name, known)], known, expected
        )
        raise ArgumentError(f"{call}: {error}. {expected}") from None
