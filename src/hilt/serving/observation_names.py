"""Observations by our names and by openpi's, and what a policy server checks in a request before the policy sees it.

| ours | openpi's |
|---|---|
| ``full_image`` | ``observation/image`` |
| ``wrist_image`` | ``observation/wrist_image`` |
| another picture, NAME | ``observation/NAME`` |
| ``state`` | ``observation/state`` |
| ``instruction`` | ``prompt`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hilt.core.errors import FormatError, MissingFieldError, RefusedError, SchemaError
from hilt.policies.base import Observation, ObservedFields

PREFIX = "observation/"
PROTOCOL = 1
"""The version of what Hilt adds to openpi's protocol: the fields below, and what the metadata and answers have"""
EXTRAS = ("protocol", "sample", "temperature", "prefix", "frozen")
"""Fields of a request that are not of the observation"""


class ActRequest(NamedTuple):
    """One observation, and how the policy is to answer it."""

    observation: Observation
    sample: bool
    temperature: float
    prefix: np.ndarray | None = None
    """float32 [n, action_dim]: actions that are executed while the policy computes, see `hilt.policies.base.Prefix`"""
    frozen: int = 0
    """The number of them that are executed for certain"""

    @property
    def kind(self) -> tuple[bool, float, int]:
        """Requests of one kind can be answered in one call."""
        return self.sample, self.temperature, 0 if self.prefix is None else len(self.prefix)


def our_name(name: str) -> str:
    """``observation/image`` → ``full_image``; our names stay as they are."""
    if name == "prompt":
        return "instruction"
    if name.startswith(PREFIX):
        rest = name.removeprefix(PREFIX)
        return "full_image" if rest == "image" else rest
    return name


def openpi_name(name: str) -> str:
    """``full_image`` → ``observation/image``"""
    if name == "instruction":
        return "prompt"
    return PREFIX + ("image" if name == "full_image" else name)


def read_request(message: object, fields: ObservedFields | None, sample: bool = False) -> ActRequest:
    """Checks a request and returns its observation by our names. `fields`: what the policy looks at, None where it
    checks that itself. `sample`: whether actions are sampled where the request does not say it. Errors name what was
    given as the sender named it, and what was expected by both names."""
    if not isinstance(message, Mapping) or not all(isinstance(name, str) for name in message):
        raise FormatError(f"a request is a {type(message).__name__}; expected one map of names to arrays and texts.")
    sample, temperature = _settings(message, sample)
    given: dict[str, str] = {}
    for name in message:
        if name in EXTRAS:
            continue
        ours = our_name(name)
        if ours in given:
            raise SchemaError(f"{given[ours]!r} and {name!r} are two names of one field; expected one of them.")
        given[ours] = name
    if "instruction" not in given:
        raise _missing("instruction", given)
    _check_cameras(given, fields)
    observation: dict[str, Any] = {}
    for ours, name in given.items():
        value = message[name]
        if ours == "instruction":
            if not isinstance(value, str):
                raise SchemaError(f"{name!r} is {_shown(value)}; expected a text.")
            observation[ours] = value
        elif ours == "state":
            observation[ours] = _state(value, name, fields)
        elif fields is None:
            observation[ours] = value
        elif ours in fields.cameras:  # other pictures of the robot are not looked at
            observation[ours] = _picture(value, name)
    return ActRequest(observation, sample, temperature, *_prefix(message))


def is_protocol(version: object) -> bool:
    """Whether what the other side gave as its protocol, which may be anything, is this one."""
    return isinstance(version, int) and version == PROTOCOL


def _settings(message: Mapping[str, Any], sample: bool) -> tuple[bool, float]:
    if not is_protocol(version := message.get("protocol", PROTOCOL)):
        raise RefusedError(
            f"the request is of protocol {_shown(version)}; this server speaks {PROTOCOL}. Install the same version of "
            "Hilt on both sides, or leave 'protocol' out, as openpi's client does."
        )
    sampled, temperature = message.get("sample", sample), message.get("temperature", 1.0)
    if not isinstance(sampled, bool):
        raise SchemaError(f"'sample' is {_shown(sampled)}; expected true or false.")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
        raise SchemaError(f"'temperature' is {_shown(temperature)}; expected a number above 0.")
    return sampled, float(temperature)


def _prefix(message: Mapping[str, Any]) -> tuple[np.ndarray | None, int]:
    """The actions to continue; whether they fit the policy is for `hilt.policies.base.check_prefix`."""
    if "prefix" not in message:
        if "frozen" in message:
            raise SchemaError("'frozen' was given without 'prefix', the actions that it counts; expected both or none.")
        return None, 0
    actions, frozen = message["prefix"], message.get("frozen")
    if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f" or actions.ndim != 2 or not actions.size:
        raise SchemaError(f"'prefix' is {_shown(actions)}; expected actions, floating [n, action_dim].")
    if isinstance(frozen, bool) or not isinstance(frozen, int | np.integer):
        raise SchemaError(f"'frozen' is {_shown(frozen)}; expected a whole number from 0 to {len(actions)}.")
    return actions.astype(np.float32), int(frozen)


def _check_cameras(given: Mapping[str, str], fields: ObservedFields | None) -> None:
    if fields is None:
        return
    missing = [name for name in fields.cameras if name not in given]
    if missing and (fields.all_cameras or len(missing) == len(fields.cameras)):
        raise _missing(missing[0], given)
    if fields.state_dim and "state" not in given:
        raise _missing("state", given)


def _missing(name: str, given: Mapping[str, str]) -> MissingFieldError:
    there = ", ".join(repr(one) for one in given.values()) or "nothing"
    return MissingFieldError(
        f"the request has no {name!r} (openpi: {openpi_name(name)!r}), which the policy looks at; it has {there:.400}."
    )


def _picture(value: Any, name: str) -> np.ndarray:
    if (
        not isinstance(value, np.ndarray)
        or value.dtype != np.uint8
        or value.ndim != 3
        or value.shape[2] != 3
        or not value.size
    ):
        raise SchemaError(f"{name!r} is {_shown(value)}; expected a picture, uint8 [H, W, 3].")
    return value


def _state(value: Any, name: str, fields: ObservedFields | None) -> np.ndarray:
    expected = f"floating [{fields.state_dim}]" if fields is not None and fields.state_dim else "floating [N]"
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.ndim != 1:
        raise SchemaError(f"{name!r} is {_shown(value)}; expected {expected}.")
    if fields is not None and fields.state_dim and len(value) != fields.state_dim:
        raise SchemaError(f"{name!r} is {_shown(value)}; expected {expected}.")
    with np.errstate(over="ignore"):
        state: np.ndarray = value.astype(np.float32)
    if not np.isfinite(state).all():
        place = int(np.argmin(np.isfinite(state)))
        raise SchemaError(f"{name!r} has {value[place]} at place {place}; expected finite numbers.")
    return state


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, bytes | str | Mapping | list) else repr(value)[:60]
