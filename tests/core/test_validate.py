"""Settings state their range, their choices and what they need; everything that is
wrong is found at once, and said by its full name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hilt.core.config import build, override
from hilt.core.errors import ConfigError, HiltError, SeveralErrors, UnknownNameError
from hilt.core.validate import Need, check, check_values, defaults_of, needs, rules, setting


@dataclass
class Rate:
    highest: float = setting(1e-3, above=0, maximum=1)
    schedule: str = setting("constant", choices=("constant", "cosine"))
    final: float = setting(
        0.0, minimum=0, below=1, needs=Need("{here}schedule=cosine", lambda c: c.schedule == "cosine")
    )
    betas: list[float] = setting(factory=lambda: [0.9, 0.999], length=2, minimum=0, below=1)
    warmup: int | None = setting(None, minimum=1, hint="Leave it out for none.")


@dataclass
class Network:
    hidden: list[int] = setting(factory=lambda: [8], filled=True, minimum=1)
    bounds: list[float] = setting(factory=lambda: [0.0, 1.0], length=2, ascending=True)
    floors: dict[str, float] = setting(factory=dict, above=0)
    crop: int = setting(4, minimum=0, off=0)


@dataclass
class Run:
    steps: int = setting(10, minimum=1)
    learns: bool = True
    free: str = "anything"
    rate: Rate = setting(factory=lambda: Rate(final=0.0), needs=Need("learns=true", lambda c: c.learns))
    network: Network = setting(factory=Network, needs=Need("learns=true", lambda c: c.learns, of=("crop",)))
    other: Rate = field(default_factory=Rate)

    def conflicts(self, here: str) -> Iterator[str]:
        if 10 % self.steps:
            yield f"{here}steps={self.steps}: expected a divisor of 10."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps=0", "steps=0: expected a whole number of at least 1."),
        ("steps=3", "steps=3: expected a divisor of 10."),
        ("rate.highest=0", "rate.highest=0.0: expected a number above 0 and at most 1."),
        ("rate.highest=2", "rate.highest=2.0: expected a number above 0 and at most 1."),
        ("rate.highest=.inf", "rate.highest=inf: expected a number above 0 and at most 1."),
        ("rate.final=1", "rate.final=1.0: expected a number of at least 0 and below 1."),
        ("rate.warmup=0", "rate.warmup=0: expected a whole number of at least 1. Leave it out for none."),
        ("rate.betas=[0.5]", "rate.betas=[0.5]: expected 2 numbers, at least 0 and below 1."),
        ("rate.betas=[0.5,1]", "rate.betas=[0.5, 1.0]: expected 2 numbers, at least 0 and below 1."),
        ("network.hidden=[]", "network.hidden=[]: expected at least one, at least 1."),
        ("network.bounds=[1,0]", "network.bounds=[1.0, 0.0]: expected 2 numbers, in ascending order."),
        ("network.floors.a=-1", "network.floors={'a': -1.0}: expected a number above 0."),
        (
            "rate.schedule=cosin",
            "rate.schedule: no schedule named 'cosin'; did you mean 'cosine'? Known: constant, cosine.",
        ),
        (
            "other.final=0.5",
            "other.final=0.5 would do nothing: it needs other.schedule=cosine. Give that, or leave final out.",
        ),
    ],
)
def test_a_wrong_setting_is_said_with_what_was_expected(change: str, said: str):
    check(Run())
    with pytest.raises(HiltError) as error:
        check(build(Run(), change))
    assert str(error.value) == said and isinstance(error.value, ConfigError | UnknownNameError)


def test_everything_wrong_is_found_at_once_and_each_setting_is_named_once():
    wrong = build(Run(), "steps=0", "rate.highest=2", "other.schedule=linear", "other.final=0.5", "network.hidden=[0]")
    with pytest.raises(SeveralErrors) as error:
        check(wrong, "run")
    names = [str(one).partition(":")[0].partition("=")[0] for one in error.value.errors]
    assert names == ["run.steps", "run.rate.highest", "run.network.hidden", "run.other.schedule", "run.other.final"]


def test_a_section_that_would_do_nothing_is_refused_by_its_settings_and_what_is_off_passes():
    idle = build(Run(), "learns=false", "rate.highest=0.5", "network.crop=2", "network.hidden=[3]")
    with pytest.raises(SeveralErrors) as error:
        check(idle)
    assert [str(one).partition(" would")[0] for one in error.value.errors] == ["rate.highest=0.5", "network.crop=2"]
    check(build(Run(), "learns=false", "network.crop=0", "network.hidden=[3]"))


def test_needs_outside_of_a_config_are_checked_too():
    outside = {"highest": Need("an optimizer", lambda _: False)}
    check(Rate(), outside=outside)
    with pytest.raises(ConfigError, match=r"^highest=0\.5 would do nothing: it needs an optimizer"):
        check(Rate(highest=0.5), outside=outside)


def test_numbers_that_are_none_and_types_are_checked_where_nobody_built_the_config():
    for wrong in ("8", True, 1.5, None, math.nan):
        with pytest.raises(ConfigError, match=r"^steps=.*: expected a whole number of at least 1"):
            check(replace(Run(), steps=wrong))  # type: ignore[arg-type]
    check(replace(Run(), steps=np.int64(5)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"conflict|divisor|expected"):
        check(replace(Run(), steps="x"))  # type: ignore[arg-type]


def test_a_conflict_that_cannot_be_computed_is_raised_where_every_value_is_sound():
    class Broken(Run):
        def conflicts(self, here: str) -> Iterator[str]:
            yield str(1 // 0)

    with pytest.raises(ZeroDivisionError):
        check(Broken())
    with pytest.raises(ConfigError, match="steps=0"):
        check(Broken(steps=0))


def test_metadata_is_there_for_whoever_shows_settings():
    shown = {name: str(rule) for name, rule in rules(Run).items()}
    assert (
        shown["rate.schedule"] == "one of constant, cosine"
        and shown["free"] == ""
        and shown["rate.highest"] == "above 0 and at most 1"
    )
    needed = [(name, need.needed) for name, need in needs(Run)]
    assert ("network.crop", "learns=true") in needed and ("other.final", "{here}other.schedule=cosine") in needed
    assert all(need.there(Run()) is False for name, need in needs(Run) if name == "other.final")
    assert defaults_of(Run)["steps"] == 10


def test_override_takes_along_what_was_set_for_what_it_switches_off():
    base = build(Run(), "other.schedule=cosine", "other.final=0.5")
    assert override(base, "other.schedule=constant").other == Rate()
    with pytest.raises(ConfigError, match=r"other\.final=0\.2 would do nothing"):
        check(override(base, "other.schedule=constant", "other.final=0.2"))


def test_arguments_of_a_function_are_checked_by_name():
    check_values(minimum=1, workers=2, episodes=None)
    with pytest.raises(SeveralErrors, match=r"workers=0: expected a number of at least 1"):
        check_values(minimum=1, workers=0, slots=-1)
    with pytest.raises(ConfigError, match=r"^deadline=nan: expected a number above 0\.$"):
        check_values(above=0, deadline=math.nan)
