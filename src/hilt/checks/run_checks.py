"""Runs the checks over a dataset, episode by episode; a damaged episode is a finding, and the next one follows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.checks.action_checks import ConstantActions, SaturatedActions, ShiftedActions
from hilt.checks.camera_checks import BlackFrames, CameraSync, FrozenFrames
from hilt.checks.dataset_findings import CheckReport, DatasetFinding, Severity
from hilt.checks.episode_columns import Check, EpisodeColumns
from hilt.checks.motion_checks import Idle, Jerk, Timestamps
from hilt.checks.population_checks import Outliers, Rotations, Statistics, Units
from hilt.checks.record_checks import Counts, Duplicates, Ends, Language, Values
from hilt.core.errors import ConfigError, CorruptError, FormatError, SchemaError, StorageError, UnknownNameError
from hilt.formats import detect, located, open_dataset
from hilt.formats.convert import EpisodeChange, decode
from hilt.formats.episodes import Dataset
from hilt.replay.maintenance.repair import verify

Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is."""

FILES = "files"
KINDS: tuple[type[Check], ...] = (
    *(Counts, Values, Ends, Language, Duplicates),
    *(Timestamps, Jerk, Idle),
    *(BlackFrames, FrozenFrames, CameraSync),
    *(ConstantActions, SaturatedActions, ShiftedActions),
    *(Outliers, Units, Rotations, Statistics),
)
CHECKS = (FILES, *(kind.name for kind in KINDS))
"""The names of all checks. The first one is done by the readers of the formats, and of a log by `verify`."""
_UNREADABLE = (CorruptError, FormatError, SchemaError, StorageError)
"""What a reader raises for data that it cannot read."""
_LOG_SEVERITY: dict[str, Severity] = {"damage": "error", "quarantined": "warning", "torn": "info", "leftover": "info"}


def check_dataset(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
    bytes_progress: Progress | None = None,
    **options: Any,
) -> CheckReport:
    """Checks a dataset of any format, or a log, and returns everything that was found. Changes nothing.

    `only` and `skip` choose checks by name. `options` are those of the format, such as ``split=`` of RLDS. `progress`
    gets the episodes done and those in all; `bytes_progress` the bytes of a log while its checksums are compared.
    """
    names = chosen_checks(only, skip)
    began, place = time.monotonic(), located(path, format)
    name = detect(place) if format == "auto" else format
    report = CheckReport(str(path), name, names)
    if name == "log" and FILES in names:
        with _reported(report):
            _verify_log(place, report, bytes_progress)
    with _reported(report):
        dataset = open_dataset(place, name, **options)
        with contextlib.closing(dataset.log) if hasattr(dataset, "log") else contextlib.nullcontext():
            check_episodes(dataset, report, workers, progress)
    report.seconds = time.monotonic() - began
    return report


def chosen_checks(only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """The names of the checks to run."""
    for name in (*only, *skip):
        if name not in CHECKS:
            raise UnknownNameError("check", name, CHECKS)
    names = [name for name in CHECKS if (not only or name in only) and name not in skip]
    if not names:
        raise ConfigError("no check is left: choose others with --only, or leave out fewer with --skip.")
    return names


def check_episodes(
    dataset: Dataset, report: CheckReport, workers: int | None = None, progress: Progress | None = None
) -> None:
    """Runs the checks that a report names over an open dataset, and adds what they find to the report."""
    checks = [kind(dataset) for kind in KINDS if kind.name in report.checks]
    images = FILES in report.checks or any(check.images for check in checks)
    total = len(dataset)
    for number, done in enumerate(decode(dataset, 0, EpisodeChange(), workers, images)):
        try:
            episode = done.result()[0]
        except _UNREADABLE as error:
            report.damaged += 1
            _add_unreadable(report, error, number, dataset.label(number))
            episode = None
        if episode is not None:
            report.episodes, report.steps = report.episodes + 1, report.steps + len(episode)
            columns = EpisodeColumns(number, dataset.label(number), episode, dataset.first_step(number))
            for check in checks:
                _add(report, check.look(columns))
        if progress is not None:
            progress(number + 1, total)
    for check in checks:
        _add(report, check.finish(complete=not report.damaged))


def _verify_log(path: Path, report: CheckReport, progress: Progress | None) -> None:
    """The findings of `hilt data verify`, which compares every byte of a log with its checksum."""
    found = verify(path, progress)
    for finding in found.findings:
        span = finding.steps[0] if finding.steps else None
        named = DatasetFinding(
            _LOG_SEVERITY[finding.kind],
            "files.log",
            {"damage": str(finding), "cure": f"hilt data repair {path}: {finding.cure}"},
            label=f"trajectory {span.trajectory}" if span else "",
            first=span.first if span else None,
            last=span.first + span.steps - 1 if span else None,
            column=finding.column,
        )
        report.add(named)


@contextlib.contextmanager
def _reported(report: CheckReport) -> Iterator[None]:
    """What keeps the whole dataset from being read is a finding."""
    try:
        yield
    except _UNREADABLE as error:
        _add_unreadable(report, error)


def _add_unreadable(report: CheckReport, error: Exception, number: int | None = None, label: str = "") -> None:
    if report.format == "log" and any(f.check == FILES and f.severity == "error" for f in report.findings):
        return  # `verify` has named the same damage
    text = "files.dataset" if number is None else "files.episode"
    report.add(DatasetFinding("error", text, {"error": str(error)}, episode=number, label=label))


def _add(report: CheckReport, findings: Iterable[DatasetFinding]) -> None:
    with np.errstate(all="ignore"):  # numbers that are not finite are findings of their own
        for finding in findings:
            report.add(finding)
