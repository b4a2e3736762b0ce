"""The commands that turn the episodes of a filter, or those that are selected, into a dataset, and train from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.app.error_words import PageError
from hilt.cli.data.data_convert import learn_from
from hilt.cli.show import shell
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats import FORMATS, options_of
from hilt.formats.listing.episode_filter import NAMES, EpisodeFilter
from hilt.formats.listing.episode_source import EpisodeSource

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


def export_commands(
    index: EpisodeIndex, chosen: EpisodeFilter, to: str, selected: Mapping[str, Sequence[int]] | None = None
) -> list[str]:
    """One command for each log with an episode that the filter admits, which has the filter after ``--where``; with
    `selected`, with one of these, given by the keys of their sources, and it has their numbers. Of a dataset of another
    system, the first command copies it to a log, in which its episodes have the same numbers."""
    if to not in export_formats():
        raise UnknownNameError("format that can be written", to, export_formats())
    commands, targets = [], []
    for source, numbers in _episodes(index, chosen, selected):
        log, target = source.path, source.path.with_name(f"{source.path.name}-{to}")
        if not source.editable:
            log = source.path.with_name(f"{source.path.name}-copy")
            commands.append(shell("hilt", "data", "convert", source.path, log))
        words = _where(source, chosen) if selected is None else None
        if words is None:
            words = ["-o", f"trajectories={ranges(numbers)}"]
            if len(words[1]) > MAX_CHARACTERS:
                raise PageError("error.export_numbers", count=f"{len(numbers):,}")
        commands.append(shell("hilt", "data", "convert", log, target, "--to", to, *words))
        targets.append(target)
    return [*commands, *(command for target in targets[:1] for command in learn_from(target, to))]


def _where(source: EpisodeSource, chosen: EpisodeFilter) -> list[str] | None:
    """The words with which a command chooses the episodes of a log that a filter admits; none where it admits all. None
    where the filter means something else there: for a dataset, and with a fact that no episode of this log has, which
    is an error for one log alone."""
    own = chosen.without("group")
    facts = {condition.name for condition in own.conditions} - {*NAMES}
    known = source.known_facts(source.rows["number"].tolist()) if facts else ()
    if not source.editable or not facts <= {name for about in known for name in about}:
        return None
    return ["--where", str(own)] if own.conditions else []


def is_export(command: str) -> bool:
    """Whether a command only writes a dataset, so that it may be run by a button."""
    return command.startswith("hilt data convert ")


def where_commands(
    index: EpisodeIndex,
    chosen: EpisodeFilter,
    tag: str = "chosen",
    selected: Mapping[str, Sequence[int]] | None = None,
) -> list[str]:
    """One command for each log with an episode that the filter admits, which lists them, and without ``--dry-run`` tags
    them: the same filter after ``--where``. The part of a run is named by the log. With `selected`, the numbers of
    these episodes stand in place of the filter."""
    found = [(source.path, numbers) for source, numbers in _episodes(index, chosen, selected) if source.editable]
    where = ("--dry-run", "--where", str(chosen.without("group")) or "steps>0")
    return [
        shell("hilt", "data", "tag", path, tag, *(where if selected is None else (ranges(numbers), "--dry-run")))
        for path, numbers in found
    ]


def numbers_by_source(index: EpisodeIndex, episodes: Mapping[str, Sequence[int]]) -> list[tuple[str, list[int]]]:
    """The numbers of each source, in the order of the sources; of wide trajectories each number once."""
    if not isinstance(episodes, Mapping) or not any(episodes.values()):
        raise ConfigError(f"episodes {episodes!r}: expected the numbers of one episode or more, by source.")
    for key in episodes:
        index.source(key)
    found = ((source.key, episodes.get(source.key, ())) for source in index.sources)
    return [(key, sorted({int(number) for number in numbers})) for key, numbers in found if numbers]


def _episodes(
    index: EpisodeIndex, chosen: EpisodeFilter, selected: Mapping[str, Sequence[int]] | None
) -> list[tuple[EpisodeSource, list[int]]]:
    """The sources that have episodes to export, with the numbers of these."""
    if selected is not None:
        return [(index.source(key), numbers) for key, numbers in numbers_by_source(index, selected)]
    rows = index.rows_of(index.select(chosen))
    found = [(source, rows["number"][rows["group"] == group].tolist()) for group, source in enumerate(index.sources)]
    return [(source, numbers) for source, numbers in found if numbers]


def ranges(numbers: Iterable[int]) -> str:
    """``0,2,5-9`` of these numbers."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
