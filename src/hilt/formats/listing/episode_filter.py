"""Filters of episodes as text: ``success=false source=human task~"red cube" steps>=100 level=3``.

All conditions must hold. A condition is a name, one of ``= != ~ < <= > >=`` and a value, in quotes where it has spaces;
``~`` means *contains*, without regard to upper and lower case. The names are those of `NAMES`; every other name is that
of a fact. ``hilt data`` takes such a text with ``--where``, and the app in its field, in addresses and in saved views.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.trajectory import VERSIONS_PER_START
from hilt.core.tree import Array
from hilt.formats.listing.episode_table import (
    NO,
    SOURCES,
    TERMINATED,
    TRUNCATED,
    UNFINISHED,
    UNKNOWN,
    YES,
    FactColumn,
    Vocabulary,
    as_number,
    split_tags,
)

COMPARISON = r"!=|<=|>=|=|~|<|>"
CONDITION = re.compile(rf"([A-Za-z_][\w.\-/]*)({COMPARISON})(.*)", re.DOTALL)
NUMBERS = {
    "trajectory": "number",
    "steps": "length",
    **{name: name for name in ("lane", "return", "version", *SOURCES)},
}
"""Names of numbers, and the column of each."""
WHOLE = r"\d+|\d{1,3}(?:[,.\u00a0\u202f’]\d{3})+"
VERSION = re.compile(rf"v?({WHOLE})(?:-v?({WHOLE}))?")
"""A version of the policy, or the oldest and newest of an episode, as the app shows it: ``v1,250``, ``1,250``,
``1250``, ``v1,200-1,250``. How a browser separates thousands depends on the language."""
TEXTS = ("task", "instruction", "problem")
WORDS: dict[str, dict[str, Any]] = {
    "success": {"yes": YES, "true": YES, "no": NO, "false": NO, "unknown": UNKNOWN},
    "end": {"unfinished": UNFINISHED, "terminated": TERMINATED, "truncated": TRUNCATED},
    **{name: {"yes": True, "true": True, "no": False, "false": False} for name in ("bad", "deleted")},
}
NAMES = (*NUMBERS, *TEXTS, *WORDS, "date", "tag", "mark", "source", "group")
HIDDEN = ("bad", "deleted")
"""Episodes that have one of these are left out, unless a condition is about it."""

FactsOf = Callable[[str], FactColumn]
"""Returns a fact of every row."""


@dataclass(frozen=True)
class EpisodeCondition:
    """One condition on an episode."""

    name: str
    comparison: str
    value: str

    def __str__(self) -> str:
        text = f"{self.name}{self.comparison}{self.value}"
        return text if re.fullmatch(r"[^\s'\"\\]+", text) else shlex.quote(text)


@dataclass(frozen=True)
class EpisodeFilter:
    """Conditions that must all hold."""

    conditions: tuple[EpisodeCondition, ...] = ()

    @classmethod
    def parse(cls, text: str) -> EpisodeFilter:
        """Raises `ConfigError` with what was expected where the text is no filter."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"filter {text!r}: a quote is not closed ({error}). Close it.") from None
        conditions = []
        for word in _without_spaces(words):
            match = CONDITION.fullmatch(word)
            if match is None:
                raise ConfigError(
                    f"filter {word!r}: expected a name, one of = != ~ < <= > >= and a value, such as success=false or "
                    'steps>=100; a value with spaces needs quotes: instruction~"red cube".'
                )
            condition = EpisodeCondition(*match.groups())
            _check(condition)
            conditions.append(condition)
        return cls(tuple(conditions))

    def __str__(self) -> str:
        return " ".join(map(str, self.conditions))

    def without(self, name: str) -> EpisodeFilter:
        """The same without the conditions about this name."""
        return EpisodeFilter(tuple(condition for condition in self.conditions if condition.name != name))

    def mask(
        self,
        rows: Array,
        texts: Vocabulary,
        groups: Sequence[str],
        fact: FactsOf,
        versions_per_start: Sequence[int] = (),
    ) -> Array:
        """``[row]`` booleans: for which episodes all conditions hold. Episodes that are marked as bad or deleted are
        left out, unless a condition is about that. `groups` and `versions_per_start` are those of each source."""
        mask = np.ones(len(rows), bool)
        for condition in self.conditions:
            if condition.name == "version":
                per_start = np.array([*versions_per_start, 0])[rows["group"]]  # of no source: it has no rows
                mask &= _version_holds(condition, rows, per_start)
            else:
                mask &= _holds(condition, rows, texts, groups, fact)
        named = {condition.name for condition in self.conditions}
        for hidden in HIDDEN:
            if hidden not in named:
                mask &= ~rows[hidden]
        return mask


def _without_spaces(words: Iterable[str]) -> list[str]:
    """Joins what spaces around a comparison have separated: ``steps < 20`` is one condition."""
    out: list[str] = []
    waits = False  # for the value behind a comparison that stood alone
    for word in words:
        begins = re.match(COMPARISON, word)
        if out and (waits or begins):
            out[-1] += word
        else:
            out.append(word)
        waits = begins is not None and begins.end() == len(word)
    return out


def _check(condition: EpisodeCondition) -> None:
    name, value = condition.name, condition.value
    if name not in NAMES:
        return  # a fact
    ordered = name in NUMBERS or name == "date"
    if condition.comparison in ("<", "<=", ">", ">=") and not ordered:
        raise ConfigError(f"filter {name}{condition.comparison}{value}: {name} has no order; use = or != or ~.")
    if condition.comparison == "~" and name not in (*TEXTS, "tag", "mark", "group"):
        raise ConfigError(f"filter {name}~{value}: {name} is not text; use = or !=.")
    if name == "version":
        _versions(condition)
    elif name in NUMBERS:
        _number(condition)
    elif name == "date":
        _seconds(value)
    elif name == "source" and value not in SOURCES:
        raise UnknownNameError("source", value, SOURCES, setting=f"filter {name}{condition.comparison}{value}")
    elif name in WORDS and value not in WORDS[name]:
        raise ConfigError(f"filter {name}{condition.comparison}{value}: expected one of {', '.join(WORDS[name])}.")


def _holds(condition: EpisodeCondition, rows: Array, texts: Vocabulary, groups: Sequence[str], fact: FactsOf) -> Any:
    name, value, comparison = condition.name, condition.value, condition.comparison
    if name not in NAMES:
        return _fact_holds(condition, fact(name))
    if name in NUMBERS:
        return _compare(rows[NUMBERS[name]], comparison, _number(condition))
    if name == "date":
        first, last = _seconds(value)
        days = rows["date"]
        if comparison in ("=", "!="):
            return ((days >= first) & (days < last)) == (comparison == "=")
        return _compare(days, comparison, first if comparison in ("<", ">=") else np.nextafter(last, first))
    if name == "source":
        return (rows[value] > 0) == (comparison == "=")
    if name in WORDS:
        return (rows[name] == WORDS[name][value]) == (comparison == "=")
    if name == "group":
        chosen = np.array([_text_holds(condition, group) for group in groups] or [False])
        return chosen[rows["group"]]
    wanted = EpisodeCondition(name, "=" if comparison == "!=" else comparison, value)
    if name == "mark":
        marks = (about if isinstance(about, dict) else {} for about in fact("marks").values)
        found = (any(_text_holds(wanted, mark) for mark in names) for names in marks)
        return np.fromiter(found, bool, len(rows)) == (comparison != "!=")
    if name == "tag":
        tagged = texts.matching(lambda text: any(_text_holds(wanted, tag) for tag in split_tags(text)))
        holds = tagged[rows["tags"]]
        return ~holds if comparison == "!=" else holds
    return texts.matching(lambda text: _text_holds(condition, text))[rows[name]]


def _version_holds(condition: EpisodeCondition, rows: Array, per_start: Array) -> Array:
    """Compares the newest version of each episode, counted as the app shows it: in a run since its start. A number from
    a million on is one as it is recorded, with its start."""
    first, last = _versions(condition)

    def compare(column: str, comparison: str, value: float) -> Array:
        recorded = rows[column]
        counted = (per_start > 0) & (recorded >= 0) & (value < VERSIONS_PER_START)
        return _compare(np.where(counted, recorded % np.maximum(per_start, 1), recorded), comparison, value)

    if first is None:
        return compare("version", condition.comparison, last)
    both: Array = compare("first_version", "=", first) & compare("version", "=", last)
    return both if condition.comparison == "=" else ~both


def _versions(condition: EpisodeCondition) -> tuple[float | None, float]:
    """The versions that a condition names: a newest one, and before it the oldest, if it names both."""
    if match := VERSION.fullmatch(condition.value):
        first, last = (None if part is None else float(re.sub(r"\D", "", part)) for part in match.groups())
        if last is None:
            first, last = None, first
        elif condition.comparison not in ("=", "!="):
            raise ConfigError(f"filter {condition}: an order needs one version, such as version>=v1,250.")
        return first, float(last or 0)
    value = as_number(condition.value)
    if math.isnan(value):
        raise ConfigError(
            f"filter {condition}: expected a version of the policy, as the list shows it or as a number, such as "
            "version=v1,250 or version>=1250."
        )
    return None, value


def _compare(values: Any, comparison: str, value: float) -> Array:
    with np.errstate(invalid="ignore"):
        result: Array = {
            "=": np.equal,
            "!=": np.not_equal,
            "<": np.less,
            "<=": np.less_equal,
            ">": np.greater,
            ">=": np.greater_equal,
        }[comparison](values, value)
    return result


def _text_holds(condition: EpisodeCondition, text: str) -> bool:
    if condition.comparison == "~":
        return condition.value.casefold() in text.casefold()
    return (text == condition.value) == (condition.comparison == "=")


def _fact_holds(condition: EpisodeCondition, column: FactColumn) -> Array:
    """Numbers are compared as numbers, everything else as the text that JSON would have of it."""
    values = column.values
    if values and column.is_absent:
        raise UnknownNameError(
            "property or fact of an episode", condition.name, {*NAMES, *column.known()}, True, f"filter {condition}"
        )
    comparison, wanted = condition.comparison, condition.value
    number = as_number(wanted)
    if comparison == "~" or math.isnan(number):
        if comparison in ("<", "<=", ">", ">="):
            raise ConfigError(f"filter {condition}: an order needs a number, such as {condition.name}{comparison}3.")
        spelled = {True: "true", False: "false"}
        wanted = {"yes": "true", "no": "false"}.get(wanted, wanted) if comparison != "~" else wanted
        as_text = EpisodeCondition(condition.name, comparison, wanted)
        return np.fromiter(
            (
                (value is not None and _text_holds(as_text, spelled[value] if isinstance(value, bool) else str(value)))
                or (value is None and comparison == "!=")
                for value in values
            ),
            bool,
            len(values),
        )
    return _compare(column.numbers, comparison, number)


def _number(condition: EpisodeCondition) -> float:
    value = as_number(condition.value)
    if math.isnan(value) or condition.comparison == "~":
        raise ConfigError(
            f"filter {condition.name}{condition.comparison}{condition.value}: expected a comparison with a number, "
            f"such as {condition.name}>=100."
        )
    return value


def _seconds(value: str) -> tuple[float, float]:
    """A day, or a moment, as seconds since the epoch: its beginning and its end."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigError(
            f"filter date {value!r}: expected a day or a moment, such as 2026-11-30 or 2026-11-30T14:00."
        ) from None
    long = 86400.0 if re.fullmatch(r"\d{4}-\d{2}-\d{2}", value) else 60.0 if value.count(":") == 1 else 1.0
    return moment.timestamp(), moment.timestamp() + long
