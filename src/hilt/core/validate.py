"""One declarative checker of settings: the fields of a dataclass state their range, their choices and what they need.

    @dataclass
    class Training:
        tau: float = setting(0.005, above=0, maximum=1)
        schedule: str = setting("constant", choices=("constant", "cosine"))
        final_rate: float = setting(0.0, minimum=0,
        needs=Need("{here}schedule=cosine", lambda c: c.schedule == "cosine"))

        def conflicts(self, here: str) -> Iterator[str]:
            "Yields sentences about settings that do not fit together. `here` stands before their names."

    check(Training(tau=2))        # ConfigError: tau=2: expected a number above 0 and at most 1.

`check` raises for everything that it finds, sections included, in one error. A range applies to each number of a list
or a mapping. Numbers must be finite, and where the type is int, whole. A setting that has another value than its
default is refused if what it needs is missing, since it would do nothing. `hilt settings` shows the same metadata.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from hilt.core.errors import ConfigError, HiltError, Problems, UnknownNameError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RULE = "hilt.rule"


@dataclass(frozen=True)
class Need:
    """What a setting needs, without which it would do nothing."""

    needed: str
    """In words, such as "{here}schedule=cosine"; {here} stands for where the config lies in another"""
    there: Callable[[Any], Any]
    """Whether the config that has the field provides it"""
    of: tuple[str, ...] = ()
    """Of a section: the settings in it that need this, by their dotted names; empty: all of it"""


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """A minimum that is not reached itself"""
    below: float | None = None
    """A maximum that is not reached itself"""
    choices: tuple[str, ...] = ()
    known: Callable[[str], Any] | None = None
    """Instead of choices: a function that raises for a name that is not known, such
    as one of `hilt.core.names.ExtensionPoint`"""
    noun: str = ""
    """What the choices are, for the error; empty: the name of the setting"""
    length: int | None = None
    """The number of elements of a list"""
    filled: bool = False
    """Whether a list must have an element"""
    ascending: bool = False
    """Whether each element of a list must be larger than the one before"""
    off: float | None = None
    """A value that switches something off, and passes where what the setting needs is missing"""
    hint: str = ""
    """A sentence at the end of the error"""
    needs: tuple[Need, ...] = ()

    def __str__(self) -> str:
        """What is expected, such as "from 0 to 1"; empty where everything passes."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        many = f"{self.length} numbers" if self.length is not None else "at least one" if self.filled else ""
        order = "in ascending order" if self.ascending else ""
        return ", ".join(filter(None, (many, self._bounds(), order)))

    def _bounds(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"from {self.minimum} to {self.maximum}"
        words = (("at least", self.minimum), ("above", self.above), ("at most", self.maximum), ("below", self.below))
        return " and ".join(f"{word} {bound}" for word, bound in words if bound is not None)

    @property
    def restricts(self) -> bool:
        """Whether it refuses any value by itself."""
        return bool(self.choices or self.known or self.filled or self.ascending) or any(
            bound is not None for bound in (self.minimum, self.maximum, self.above, self.below, self.length)
        )

    def error(self, name: str, value: object, whole: bool = False) -> HiltError | None:
        """The error for a value that does not fit, if it does not. `whole`: it must be a whole number."""
        if self.choices:
            fits, noun = value in self.choices, self.noun or _leaf(name)
            return (
                None if fits else UnknownNameError(noun, str(value), self.choices, setting=name if noun != name else "")
            )
        if self.known is not None:
            problems = Problems()
            problems.check(self.known, value)
            return problems.errors[0] if problems.errors else None
        if not self.fits(value, whole):
            several, wanted = self.length is not None or self.filled or self.ascending, str(self)
            kind = "" if several else f"a {'whole ' if whole else ''}number {'of ' if wanted.startswith('at ') else ''}"
            return ConfigError(f"{name}={value!r}: expected {kind}{wanted}.{f' {self.hint}' if self.hint else ''}")
        return None

    def fits(self, value: Any, whole: bool = False) -> bool:
        several = isinstance(value, Sequence | Mapping) and not isinstance(value, str)
        if self.length is not None or self.filled or self.ascending or several:
            found = list(value.values() if isinstance(value, Mapping) else value) if several else None
            return found is not None and self._row_fits(found) and all(self._number_fits(one, whole) for one in found)
        return self._number_fits(value, whole)

    def _row_fits(self, found: list[Any]) -> bool:
        rises = not self.ascending or all(low < high for low, high in itertools.pairwise(found))
        return (self.length is None or len(found) == self.length) and (bool(found) or not self.filled) and rises

    def _number_fits(self, value: Any, whole: bool) -> bool:
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Integral if whole else numbers.Real)
            or not math.isfinite(value)
        ):
            return False
        number = float(value)
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def setting(default: Any = MISSING, *, factory: Any = MISSING, needs: Need | Sequence[Need] = (), **rule: Any) -> Any:
    """A field of a dataclass with a rule; `rule` has the fields of `Rule`."""
    metadata = {_RULE: Rule(needs=(needs,) if isinstance(needs, Need) else tuple(needs), **rule)}
    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(
    config: DataclassInstance, section: str = "", outside: Mapping[str, Need] | None = None, idle: bool = True
) -> None:
    """Raises for all settings that cannot work, or that would do nothing. `section`: where the config lies in another,
    such as "optimizer". `outside`: what fields need of something else than the config. Without `idle`, settings that
    would do nothing pass: for a part that is used by itself, where its caller may do what a run does not."""
    problems = Problems()
    problems.errors += findings(config, f"{section}." if section else "", outside or {}, idle)
    problems.report()


def check_values(minimum: float | None = None, above: float | None = None, **values: float | None) -> None:
    """Raises for arguments of a function, by name, that are out of range. None passes."""
    problems, rule = Problems(), Rule(minimum=minimum, above=above)
    problems.errors += [
        error for name, value in values.items() if value is not None and (error := rule.error(name, value))
    ]
    problems.report()


def findings(config: DataclassInstance, prefix: str, outside: Mapping[str, Need], idle: bool) -> list[HiltError]:
    """Every problem of a config and of the sections in it: values out of range,
    settings that would do nothing, and conflicts."""
    found = _out_of_range(config, prefix)
    for name, error in _idle(config, prefix, outside).items() if idle else ():
        found.setdefault(name, error)
    # a setting is named once
    conflicts = [one for one in _conflicts(config, prefix) if str(one).partition("=")[0] not in found]
    return [*found.values(), *conflicts]


def needs(kind: type[DataclassInstance]) -> Iterator[tuple[str, Need]]:
    """The settings of a dataclass that need others, by name; the same name may come several
    times. `Need.there` takes the whole config."""
    for item in dataclasses.fields(kind):
        for need in _rule(item).needs:
            yield from ((f"{item.name}.{name}", need) for name in need.of) if need.of else ((item.name, need),)
        if (section := _section(item)) is not None:
            yield from ((f"{item.name}.{name}", _inside(item.name, need)) for name, need in needs(section))


def rules(kind: type[DataclassInstance], prefix: str = "") -> dict[str, Rule]:
    """The rule of every setting of a dataclass, by its dotted name."""
    found: dict[str, Rule] = {}
    for item in dataclasses.fields(kind):
        section = _section(item)
        found |= {f"{prefix}{item.name}": _rule(item)} if section is None else rules(section, f"{prefix}{item.name}.")
    return found


def value_of(config: object, name: str) -> Any:
    """The setting with a dotted name."""
    return reduce(getattr, name.split("."), config) if name else config


def defaults_of(kind: type[DataclassInstance]) -> dict[str, object]:
    """The default of every field that has one."""
    known = {item.name: default(item) for item in dataclasses.fields(kind)}
    return {name: value for name, value in known.items() if value is not MISSING}


def default(item: dataclasses.Field[Any]) -> object:
    """The default of a field of a dataclass; MISSING where it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _out_of_range(config: Any, prefix: str) -> dict[str, HiltError]:
    found: dict[str, HiltError] = {}
    for item in dataclasses.fields(config):
        value, name, rule = getattr(config, item.name), f"{prefix}{item.name}", _rule(item)
        if _is_section(value):
            found |= _out_of_range(value, f"{name}.")
        elif rule.restricts and not (value is None and "None" in str(item.type)):
            error = rule.error(name, value, whole=str(item.type).startswith("int"))
            found |= {name: error} if error is not None else {}
    return found


def _idle(config: Any, prefix: str, outside: Mapping[str, Need]) -> dict[str, HiltError]:
    """The settings that would do nothing, each once."""
    found: dict[str, HiltError] = {}
    for item in dataclasses.fields(config):
        value, usual = getattr(config, item.name), default(item)
        if _is_section(value):
            found = {**_idle(value, f"{prefix}{item.name}.", {}), **found}
        for need in (
            [*_rule(item).needs, *([outside[item.name]] if item.name in outside else [])]
            if usual is not MISSING
            else ()
        ):
            for name in _names(item.name, value, need) if not _is_there(need, config) else ():
                given, off = value_of(config, name), _rule_of(config, name).off
                if given != value_of(usual, name.partition(".")[2]) and (off is None or given != off):
                    needed = need.needed.replace("{here}", prefix)
                    wrong = (
                        f"{prefix}{name}={given} would do nothing: it needs {needed}. Give that, "
                        f"or leave {_leaf(name)} out."
                    )
                    found.setdefault(f"{prefix}{name}", ConfigError(wrong))
    return found


def _conflicts(config: Any, prefix: str) -> Iterator[HiltError]:
    for item in dataclasses.fields(config):
        if _is_section(value := getattr(config, item.name)):
            yield from _conflicts(value, f"{prefix}{item.name}.")
    if hasattr(config, "conflicts"):
        try:
            yield from map(ConfigError, config.conflicts(prefix))
        except (ArithmeticError, LookupError, TypeError, ValueError, HiltError):
            if not _out_of_range(config, prefix):  # values that are out of range need not be comparable with others
                raise


def _names(field: str, value: Any, need: Need) -> Iterator[str]:
    """The settings that a need is about: of a section, those that are named, or all."""
    if not _is_section(value):
        yield field
    elif need.of:
        yield from (f"{field}.{name}" for name in need.of)
    else:
        for item in dataclasses.fields(value):
            yield from (f"{field}.{name}" for name in _names(item.name, getattr(value, item.name), need))


def _is_there(need: Need, config: Any) -> bool:
    """Whether what is needed is there. Where that is unknown because another
    setting is wrong, only that setting is an error."""
    try:
        return bool(need.there(config))
    except HiltError:
        return True


def _inside(field: str, need: Need) -> Need:
    """A need of a section, asked of the config that has the section."""
    return Need(
        need.needed.replace("{here}", "{here}" + f"{field}."), lambda config: need.there(getattr(config, field))
    )


def _rule(item: dataclasses.Field[Any]) -> Rule:
    rule: Rule = item.metadata.get(_RULE, ANYTHING)
    return rule


def _rule_of(config: Any, name: str) -> Rule:
    owner, _, leaf = name.rpartition(".")
    return next(_rule(item) for item in dataclasses.fields(value_of(config, owner)) if item.name == leaf)


def _section(item: dataclasses.Field[Any]) -> Any:
    """The dataclass of a field that is a section; None for a plain setting."""
    usual = default(item)
    return type(usual) if _is_section(usual) else None


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


ANYTHING = Rule()
