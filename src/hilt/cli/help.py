"""What ``--help`` shows: no type behind a flag, and commands in quotes, since a terminal renders no backticks."""

from __future__ import annotations

from typing import Any


def tidy(command: Any) -> Any:
    """The same command, and the commands below it, with tidy help."""
    command.help = quoted(command.help)
    get_params = command.get_params

    def tidied(ctx: Any) -> list[Any]:
        return tidy_params(get_params(ctx))

    command.get_params = tidied  # the option --help is made when it is asked for
    for below in getattr(command, "commands", {}).values():
        tidy(below)
    return command


def tidy_params(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # some versions of typer show <bool>
        if getattr(param, "help", None):
            param.help = quoted(param.help)
    return params


def quoted(text: str | None) -> str | None:
    return text and text.replace("`", "'")
