"""What is known of many episodes, as columns of numbers: 100,000 of them take some ten megabytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hilt.core.tree import Array
from hilt.formats.episodes import INSTRUCTION, plain

UNKNOWN, NO, YES = -1, 0, 1
"""Values of the column ``success``."""
UNFINISHED, TERMINATED, TRUNCATED = 0, 1, 2
"""Values of the column ``end``."""
SOURCES = ("policy", "human", "demo", "random")
"""The columns that count the steps of each source, in the order of `hilt.core.trajectory.Source`."""

ROW = np.dtype(
    [
        ("group", "<i4"),
        ("number", "<i8"),
        ("lane", "<i4"),
        ("length", "<i4"),
        ("return", "<f8"),
        ("success", "i1"),
        *((source, "<i4") for source in SOURCES),
        ("version", "<i8"),
        ("first_version", "<i8"),
        ("date", "<f8"),
        ("end", "i1"),
        ("task", "<i4"),
        ("instruction", "<i4"),
        ("tags", "<i4"),
        ("problem", "<i4"),
        ("bad", "?"),
        ("deleted", "?"),
        ("read", "?"),
    ]
)
"""One episode. Texts are codes of a `Vocabulary`. ``group`` is the place of its source in the index, ``number`` that of
the trajectory or of the episode of a dataset, ``lane`` the row of a wide trajectory, ``version`` the newest of the
policy and ``first_version`` the oldest, -1 where none acted. ``read`` becomes true when its
steps were read: until then the return, the counts of sources and the date are unknown."""


class Vocabulary:
    """Texts that occur often, each stored once and referred to by a code. The code of the empty text is 0."""

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._codes: dict[str, int] = {"": 0}

    def code(self, text: str) -> int:
        """The code of a text, which gets one when it is new."""
        code = self._codes.get(text)
        if code is None:
            code = self._codes[text] = len(self._texts)
            self._texts.append(text)
        return code

    def __getitem__(self, code: int) -> str:
        return self._texts[code]

    def __len__(self) -> int:
        return len(self._texts)

    def matching(self, predicate: Callable[[str], bool]) -> Array:
        """``[code]`` booleans: for which texts the predicate holds."""
        return np.fromiter((predicate(text) for text in self._texts), bool, len(self._texts))

    def order(self) -> Array:
        """``[code]`` ranks of the texts in alphabetical order, without regard to upper and lower case."""
        ranks = np.empty(len(self._texts), np.int64)
        ranks[sorted(range(len(self._texts)), key=lambda code: self._texts[code].casefold())] = np.arange(len(ranks))
        return ranks


class FactColumn:
    """One fact of every episode, None where an episode does not have it."""

    def __init__(self, values: Iterable[Any], known: Callable[[], Iterable[str]] = tuple):
        self.values, self.known = list(values), known
        """The values, and a function that returns the names of all facts, for errors."""

    @cached_property
    def is_absent(self) -> bool:
        """Whether no episode has it."""
        return all(value is None for value in self.values)

    @cached_property
    def numbers(self) -> Array:
        """The values as numbers, NaN where one is none."""
        with contextlib.suppress(TypeError, ValueError):  # texts, or lists among them
            if (quick := np.array(self.values, np.float64)).ndim == 1:  # None becomes NaN
                return quick
        return np.array([as_number(value) for value in self.values], np.float64)


def as_number(value: Any) -> float:
    """A value, or a text that stands for a number, as such; NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def blank_rows(count: int) -> Array:
    """Rows in which nothing is known."""
    rows = np.zeros(count, ROW)
    rows["return"] = rows["date"] = np.nan
    rows["success"] = rows["version"] = rows["first_version"] = -1
    return rows


def tags_of(facts: Mapping[str, object]) -> tuple[str, ...]:
    """The tags of an episode: the fact ``tags`` as a list of texts."""
    tags = facts.get("tags")
    return tuple(str(tag) for tag in tags) if isinstance(tags, (list, tuple)) else ()


def instruction_of(facts: Mapping[str, object]) -> str:
    """The instruction as one text; where it changed within the episode, the texts one after the other."""
    text = facts.get(INSTRUCTION, "")
    if type(text) is str:
        return text
    if isinstance(text, Mapping):
        text = " → ".join(str(part) for part in text.get("texts", ()))
    return text if isinstance(text, str) else ""


def task_of(facts: Mapping[str, object]) -> str:
    """The name of the task; where there is none, the instruction."""
    task = facts.get("task")
    return str(task) if isinstance(task, (str, int)) and task != "" else instruction_of(facts)


def fill_facts(rows: Array, facts: Sequence[Mapping[str, object]], texts: Vocabulary) -> None:
    """Takes the facts of episodes into their rows, column by column."""
    codes: dict[str, int] = {}
    none = texts.code("")

    def code(text: str) -> int:
        return codes[text] if text in codes else codes.setdefault(text, texts.code(text))

    success, task, instruction = ([UNKNOWN] * len(facts), [none] * len(facts), [none] * len(facts))
    for place, about in enumerate(facts):
        if (known := about.get("success")) is not None:
            success[place] = YES if known else NO
        text = instruction_of(about)
        instruction[place] = code(text)
        name = about.get("task")
        task[place] = code(name if type(name) is str and name else task_of(about))
    rows["success"], rows["task"], rows["instruction"] = success, task, instruction
    rows["tags"] = [code(join_tags(tags_of(about))) if "tags" in about else none for about in facts]
    for name in ("bad", "deleted"):
        rows[name] = [bool(about[name]) if name in about else False for about in facts]


def join_tags(tags: Iterable[str]) -> str:
    """Tags as one text; the separator is no character that a person types."""
    return "\x1f".join(sorted(set(tags)))


def split_tags(text: str) -> list[str]:
    return text.split("\x1f") if text else []


def shown_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts as JSON takes them, without long ones that no person reads."""
    return {name: value for name, value in plain(facts).items() if len(str(value)) <= 2000}
