"""The words of SimpleVLA-RL's command line: ``key=value`` is parsed, and compared in kind with the key's default."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hilt.core.errors import ConfigError
from hilt.recipes.simplevla_keys import AGREE, CRITIC, PASSING, PRIME, READ, SETTINGS

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}


def default_of(key: str) -> object:
    """Returns SimpleVLA-RL's default."""
    if key in AGREE:
        return default_of(AGREE[key])
    if key in PASSING:
        return next(iter(PASSING[key][0]), None)
    return READ[key] if key in READ else {**SETTINGS, **CRITIC, **PRIME}[key][0]


def kind_of(default: object) -> type | None:
    return next((kind for kind in KINDS if isinstance(default, kind)), None)


def is_of_kind(value: object, kind: type) -> bool:
    if value is None or kind is str:
        return not isinstance(value, (dict, list))
    if kind is list:
        return isinstance(value, (list, str))
    return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)


def parsed(word: str) -> tuple[str, object]:
    """``key=value`` as hydra reads it: also ``+key=value``; numbers, lists, true and null as in YAML."""
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r}: expected KEY=VALUE, such as data.n_samples=8.")
    try:
        # a reference, such as ${oc.env:HOME}, may stand for something else the next time
        given = _read(text) if "$" in text else copy.deepcopy(_known(text))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{word}: its value cannot be read ({str(error).splitlines()[0]}).") from None
    return key.lstrip("+"), None if given == "None" else given


def _read(text: str) -> Any:
    found = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)
    assert isinstance(found, dict)
    return found["value"]


_known = functools.lru_cache(maxsize=1_000)(_read)
"""Reading a text takes a millisecond, and most words of a script have the same few values"""


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns nested settings of dotted names."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree
