"""The commands that turn the episodes of a filter into a dataset, and train from it."""

from __future__ import annotations

from collections.abc import Iterable

from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.cli.data.data_convert import learn_from
from hilt.cli.show import shell
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats import FORMATS, options_of
from hilt.formats.listing.episode_filter import EpisodeFilter

MAX_CHARACTERS = 20_000
"""Of the numbers in one command: more do not fit into every shell."""


def export_formats() -> list[str]:
    """The formats that can be written."""
    out = []
    for name in FORMATS.known():
        try:
            options_of(name, "create")
        except ConfigError:
            continue
        out.append(name)
    return out


def export_commands(index: EpisodeIndex, chosen: EpisodeFilter, to: str) -> list[str]:
    """One command for each log with an episode that the filter admits. Of a dataset of another system, the first
    command copies it to a log, in which its episodes have the same numbers."""
    if to not in export_formats():
        raise UnknownNameError("format that can be written", to, export_formats())
    rows = index.rows_of(index.select(chosen))
    commands, targets = [], []
    for group, source in enumerate(index.sources):
        belongs = rows["group"] == group
        numbers = rows["number"][belongs].tolist()
        if not numbers:
            continue
        log, target = source.path, source.path.with_name(f"{source.path.name}-{to}")
        if not source.editable:
            log = source.path.with_name(f"{source.path.name}-copy")
            commands.append(shell("hilt", "data", "convert", source.path, log))
        text = ranges(numbers)
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(
                f"{len(numbers):,} episodes are too many single numbers for one command: narrow the filter, or tag "
                "them and export the tag."
            )
        commands.append(shell("hilt", "data", "convert", log, target, "--to", to, "-o", f"trajectories={text}"))
        targets.append(target)
    return [*commands, *(command for target in targets[:1] for command in learn_from(target, to))]


def is_export(command: str) -> bool:
    """Whether a command only writes a dataset, so that it may be run by a button."""
    return command.startswith("hilt data convert ")


def where_commands(index: EpisodeIndex, chosen: EpisodeFilter, tag: str = "chosen") -> list[str]:
    """One command for each log with an episode that the filter admits, which lists them, and without ``--dry-run`` tags
    them: the same filter after ``--where``. The part of a run is named by the log."""
    rows, where = index.rows_of(index.select(chosen)), str(chosen.without("group")) or "steps>0"
    paths = [source.path for group, source in enumerate(index.sources) if source.editable and group in rows["group"]]
    return [shell("hilt", "data", "tag", path, tag, "--dry-run", "--where", where) for path in paths]


def ranges(numbers: Iterable[int]) -> str:
    """``0,2,5-9`` of these numbers."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
