"""Errors: one base class, messages in one line, and the same error in another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from hilt.core import errors
from hilt.core.errors import (
    ArgumentError,
    ConfigError,
    HiltError,
    MissingFieldError,
    MissingPackageError,
    SeveralErrors,
    UnknownNameError,
    explained_calls,
    optional_module,
    require_module,
    suggest,
)
from hilt.core.trajectory import Source, Step, ends_from_done_and_mask

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HiltError)]


def made(kind: type[HiltError]) -> HiltError:
    if kind is UnknownNameError:
        return UnknownNameError("column", "action", ["actions", "rewards"])
    if kind is MissingPackageError:
        return MissingPackageError("torch", "Sampling to a device", "torch")
    if kind is SeveralErrors:
        return SeveralErrors([ConfigError("what was given, what was expected, what to do.")])
    return kind("what was given, what was expected, what to do.")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_crosses_process_borders_unchanged(kind: type[HiltError]):
    """An exception in a worker reaches the user as that exception."""
    error = made(kind)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert str(other) == str(error)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_explained_and_prints_without_quotes(kind: type[HiltError]):
    assert kind.__doc__ and kind.__doc__.startswith(("Raised when ", "Base of "))
    assert "\n" not in str(made(kind)) or kind is SeveralErrors, "one line, but for a list of several"
    assert not str(made(kind)).startswith(("'", '"'))


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        ("ConfigError", ValueError),
        ("SchemaError", ValueError),
        ("MissingFieldError", KeyError),
        ("UnknownNameError", KeyError),
        ("DeadlineError", TimeoutError),
        ("StorageError", OSError),
        ("DiskFullError", OSError),
        ("MissingPackageError", ImportError),
    ],
)
def test_each_is_also_what_python_code_catches(kind: str, parent: type[Exception]):
    assert issubclass(getattr(errors, kind), parent)


def test_texts():
    assert str(made(UnknownNameError)) == "no column named 'action'; did you mean 'actions'? Known: actions, rewards."
    assert str(UnknownNameError("task", "zzz", [])) == "no task named 'zzz'. Known: none."
    expected = "Sampling to a device needs the package 'torch', which is not installed: pip install 'hilt[torch]'"
    assert str(made(MissingPackageError)) == expected
    require_module("json", "This", "nothing")
    with pytest.raises(MissingPackageError, match="This needs the package 'no_such_package', which is not installed"):
        require_module("no_such_package", "This", "nothing")
    assert str(MissingFieldError("x: absent.")) == "x: absent."


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("from json import HybridCache", r"cannot import name 'HybridCache' from 'json' \(.*\)"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_a_package_that_is_there_and_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
):
    """Such as one that is too old for another one."""
    (tmp_path / "broken_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        rf"^LoRA needs the package 'broken', which cannot be imported \({why}\): pip install --upgrade 'hilt\[vla\]'$"
    )
    with pytest.raises(MissingPackageError, match=text) as caught:
        optional_module("broken_package", "LoRA", "vla", "broken")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(
        MissingPackageError, match=r"'no_such_package\.part', which is not installed: pip install 'hilt\[vla\]'"
    ):
        optional_module("no_such_package.part", "LoRA", "vla")


def test_suggestions():
    assert suggest("wrist1", ["front", "wrist_1"]) == "; did you mean 'wrist_1'?"
    assert suggest("q", ["front", "wrist_1"]) == "."
    assert suggest("q", []) == "."
    assert suggest("pick", ["pack", "tabletop/pick"]) == "; did you mean 'tabletop/pick'?"
    assert suggest("sft", ["set", "sft_tabletop"]) == "; did you mean 'sft_tabletop'?"
    many = [f"task_{i}" for i in range(40)]
    assert str(UnknownNameError("task", "task_9x", many)) == "no task named 'task_9x'; did you mean 'task_9'?"
    told = pickle.loads(pickle.dumps(UnknownNameError("task", "task_9x", many, all_listed=True)))
    assert str(told) == f"no task named 'task_9x'; did you mean 'task_9'? Known: {', '.join(sorted(many))}."


# -- steps and who made them
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["human", "HUMAN", 1, Source.HUMAN])
def test_sources(value: str | int):
    assert Source.parse(value) is Source.HUMAN


def test_unknown_sources():
    with pytest.raises(
        UnknownNameError, match="no source named 'humn'; did you mean 'human'\\? Known: demo, human, policy, random"
    ):
        Source.parse("humn")
    with pytest.raises(errors.ConfigError, match="source 7 is not one of 0 \\(policy\\), 1 \\(human\\)"):
        Source.parse(7)


@pytest.mark.parametrize(
    ("done", "mask", "ends"), [(True, 0.0, (True, False)), (True, 1.0, (False, True)), (False, 1.0, (False, False))]
)
def test_ends_of_hil_serl(done: bool, mask: float, ends: tuple[bool, bool]):
    assert ends_from_done_and_mask(done, mask) == ends


def test_a_step_as_columns():
    step = Step(
        {"state": 1},
        2,
        0.5,
        {"state": 3},
        truncated=True,
        source=Source.DEMO,
        times={"sent": 1.5},
        extra={"grasp_penalty": 0.1},
    )
    assert step.columns() == {
        "observations": {"state": 1},
        "actions": 2,
        "rewards": 0.5,
        "next_observations": {"state": 3},
        "terminated": False,
        "truncated": True,
        "source": 2,
        "policy_version": -1,
        "times": {"sent": 1.5},
        "grasp_penalty": 0.1,
    }


@explained_calls
class Shelf:
    """A class as a user of Hilt sees one."""

    def __init__(self, width: int, *, colour: str = "white", **settings: Any):
        self.width, self.colour, self.settings = width, colour, settings

    def put(self, book: str, place: int = 0) -> str:
        """Puts a book there."""
        return book + 1 if book == "wrong inside" else f"{book} at {place}"  # type: ignore[operator]


def test_calls_that_fit_are_as_they_were():
    shelf = Shelf(3, depth=2)
    assert shelf.put("atlas", place=1) == "atlas at 1" and shelf.settings == {"depth": 2}
    assert Shelf.put.__doc__ == "Puts a book there." and Shelf.put.__name__ == "put"
    with pytest.raises(TypeError, match="can only concatenate") as caught:
        shelf.put("wrong inside")
    assert not isinstance(caught.value, ArgumentError), "the arguments fit: the error is about something else"


def test_calls_that_do_not_fit_show_the_call_that_was_expected():
    known = r"Expected Shelf.put\(book, place=0\)\.$"
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (Shelf(1).put, ("a",), {"plce": 1}, rf"^Shelf.put: no argument named 'plce'; did you mean 'place'\? {known}"),
        (Shelf(1).put, ("a",), {"q": 1}, rf"^Shelf.put: no argument named 'q'\. {known}"),
        (Shelf(1).put, (), {}, rf"^Shelf.put: missing a required argument: 'book'\. {known}"),
        (Shelf(1).put, ("a", 1, 2), {}, rf"^Shelf.put: too many positional arguments\. {known}"),
        (Shelf(1).put, ("a",), {"book": "b"}, rf"^Shelf.put: multiple values for argument 'book'\. {known}"),
        (
            Shelf,
            (),
            {"widht": 3},
            r"^Shelf: no argument named 'widht'; did you mean 'width'\? Expected Shelf\(width, \*, colour='white', ",
        ),
        (
            Shelf,
            (),
            {"finish": 3},
            r"^Shelf: missing a required argument: 'width'\. Expected Shelf\(width, \*, colour='white', \*\*set",
        ),
    ]
    for call, given, named, said in calls:
        with pytest.raises(ArgumentError, match=said) as caught:
            call(*given, **named)
        assert isinstance(caught.value, ConfigError) and isinstance(caught.value, TypeError), (
            "a script may catch either"
        )
