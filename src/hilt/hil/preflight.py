"""Everything that can be known of a run before anything is made or started, found at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hilt.core.errors import ConfigError, Problems
from hilt.core.trust import check_names
from hilt.hil.config import RECAP, Hil, check
from hilt.hil.defaults import DefaultsChoice, chosen
from hilt.hil.environment import TAKES, Spaces, check_fit, open_reward, open_value, spaces
from hilt.hil.importing import check_imports, other_rates
from hilt.observe.sinks import check_sinks
from hilt.teleop.devices import check_device

logger = logging.getLogger("hilt.hil")


def check_begin(
    config: Hil,
    *more: Callable[[], Any],
    whole: bool = False,
    make_task: bool = True,
    notify: Callable[[str], None] = logger.warning,
) -> tuple[Hil, DefaultsChoice | None]:
    """Refuses a run that cannot work: its settings, what they name, and whether that fits the task; and what `more`
    checks object to. `whole`: it is to be started with its actors, which have no terminal of their own then. Makes
    nothing but the task, once; without `make_task` not even that, and what has to fit the task is left unchecked.
    `notify` gets what is possible and probably not meant. Gives the settings with their defaults chosen by what the
    policy sees, and that choice, where the task was made."""
    problems, made = Problems(), None
    make_task &= problems.check(check_names, config)
    for one in more:
        problems.check(one)
    sound = problems.check(check, config)
    problems.check(check_sinks, config.sinks)
    if config.operator:
        problems.check(check_operator, config, whole)
    if sound and make_task:
        with problems.collected():
            made = spaces(config)
            for check_part in (
                check_fit,
                check_imports,
                check_demonstrations,
                check_classifier,
                check_value,
                check_recap,
            ):
                problems.check(check_part, config, made)
    problems.report()
    if made is None:
        return config, None
    for line in other_rates(config, made):
        notify(line)
    config, choice = chosen(config, made)
    check(config)
    return config, choice


def check_operator(config: Hil, whole: bool) -> None:
    options = {name: value for name, value in config.operator_options.items() if name not in TAKES}
    try:
        check_device(config.operator, **options)
    except KeyError as error:
        raise ConfigError(
            f"operator={config.operator}: {error} Leave it empty (operator=) if no one takes over."
        ) from None
    if whole and config.operator == "keyboard":
        raise ConfigError(
            "operator=keyboard needs a terminal of its own, which hilt train does not give its actors: use "
            "operator=browser, or start `hilt learner` here and `hilt actor` in another terminal."
        )


def check_demonstrations(config: Hil, made: Spaces) -> None:
    """Refuses demonstrations that no script of the task can record."""
    if config.demonstrations and not made.has_expert and "expert" not in config.demonstration_options:
        raise ConfigError(
            f"demonstrations={config.demonstrations}: {config.task} has no script that could record them. "
            "Give demonstrations=0 and demo_path=[PATH], such as a recording of hilt record, or "
            "demonstration_options.expert=module:function."
        )


def check_classifier(config: Hil, made: Spaces) -> None:
    if config.classifier:
        open_reward(config, made.observation_space)


def check_value(config: Hil, made: Spaces) -> None:
    if config.value.model:
        open_value(config, made.observation_space)


def check_recap(config: Hil, made: Spaces) -> None:
    """Refuses a value model that cannot judge the episodes of the run."""
    if config.algorithm == RECAP:
        from hilt.hil.stream.advantage_stream import open_model  # needs torch

        open_model(config, made.observation_space)
