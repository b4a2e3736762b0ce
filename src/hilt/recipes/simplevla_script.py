"""A script of SimpleVLA-RL's, such as examples/run_openvla_oft_rl_libero.sh: its
variables and the keys of its command. It is not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.core.files import read

COMMAND = "verl.trainer.main_ppo"
_ASSIGNS = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def words_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """(the keys of the command, KEY=VALUE each; the variables of the script)"""
    try:
        text = read(path).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a script in UTF-8.") from None
    variables: dict[str, str] = {}
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        parts = _split(line, path)
        if COMMAND in parts:
            return [_filled(word, variables, path) for word in parts[parts.index(COMMAND) + 1 :]], variables
        if _ASSIGNS.match(line.strip()):
            name, _, value = next(part for part in parts if "=" in part).partition("=")
            variables[name] = _filled(value, variables, path)
    raise ConfigError(f"{path}: expected a script of SimpleVLA-RL, which calls {COMMAND}; there is no such call in it.")


def _split(line: str, path: Path) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}: {line.strip()[:60]!r} cannot be read as a line of a shell ({error}).") from None


def _filled(text: str, variables: dict[str, str], path: Path) -> str:
    """With the variables that the script has set before; nothing is run."""
    if "$(" in text or "`" in text:
        raise ConfigError(
            f"{path}: {text!r} runs a command, and a script is only read here: write its value, or "
            "give KEY=VALUE beside it."
        )

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise ConfigError(f"{path}: ${name} is not set in the script: set it there, or give KEY=VALUE beside it.")
        return variables[name]

    return _VARIABLE.sub(value, text)
