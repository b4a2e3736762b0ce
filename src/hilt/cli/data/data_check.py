"""``hilt data check``: what would harm training in a dataset of any format, where it is, and what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from hilt.checks import CHECKS, CheckReport, check_dataset
from hilt.checks.dataset_findings import MAX_FINDINGS, SEVERITIES
from hilt.cli.data.data_convert import Format, Options, Split, read_options
from hilt.cli.show import progress_bar, table
from hilt.core.progress import printable
from hilt.formats import detect, located, options_of

EXAMPLES = 3
"""Findings of each check that are shown without --all."""
COLORS = {"error": "red", "warning": "yellow", "info": "dim"}
TERMINAL = {"error": "red", "warning": "yellow", "info": "bright_black"}


def check_data(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET", help="A log, recording, run or dataset of a known format.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="List every finding, not the worst three of each check.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help=f"Run this check only; repeatable: {', '.join(CHECKS)}."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="NAME", help="Leave out this check; repeatable.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    format: Format = "auto",
    split: Split = None,
    options: Options = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads that decode.", show_default="one per core")
    ] = None,
) -> None:
    """Look for damage, wrong counts and suspicious episodes in a dataset of any format; exit code 1 for an error.

    Every finding has a severity, its place (episode, steps, camera or column) and what to do about it. Nothing is
    changed. Of a log, the check `files` is what `hilt data verify` does."""
    place = located(path, format)
    name = detect(place) if format == "auto" else format
    given = read_options(options, split, options_of(name, "open_dataset"), name)
    with progress_bar("comparing checksums", "bytes") as of_bytes, progress_bar("checking", "episodes") as of_episodes:
        report = check_dataset(
            path,
            name,
            only=only or (),
            skip=skip or (),
            workers=workers,
            progress=of_episodes,
            bytes_progress=of_bytes,
            **given,
        )
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        (show_all if every else show_groups)(report)
        show_total(report)
    if not report.ok or (strict and report.counts["warning"]):
        raise typer.Exit(1)


def show_all(report: CheckReport) -> None:
    """Every finding as a row of a table."""
    from rich.console import Console
    from rich.text import Text

    rows: list[list[object]] = [
        [Text(f.severity, COLORS[f.severity]), f.check, f.place, f.what, f.cure] for f in report.sorted()
    ]
    if rows:
        Console().print(table("", "check", "where", "what", "what to do", rows=rows))
    if (more := report.counts.total() - len(rows)) > 0:
        typer.echo(f"and {more:,} more; at most {MAX_FINDINGS:,} of each check are kept")


def show_groups(report: CheckReport) -> None:
    """Per check: how many findings of each severity, the worst of them, and what to do."""
    for check, findings in report.grouped().items():
        counts = Counter(finding.severity for finding in findings)
        severity = findings[0].severity
        total = report.by_check[check]
        several = ", ".join(f"{counts[name]:,} {plural(name, counts[name])}" for name in SEVERITIES if counts[name])
        more = f", {total - len(findings):,} more" if total > len(findings) else ""
        typer.echo(f"{typer.style(severity, fg=TERMINAL[severity])}  {check}: {several}{more}")
        shown = findings[:EXAMPLES]
        for finding in shown:
            typer.echo(printable(f"    {finding.place}: {finding.what}"))
        if total > len(shown):
            typer.echo(f"    and {total - len(shown):,} more: --all or --json")
        for cure in dict.fromkeys(finding.cure for finding in shown):
            typer.echo(printable(f"    What to do: {cure}"))
        typer.echo("")


def show_total(report: CheckReport) -> None:
    damaged = f", {report.damaged:,} damaged" if report.damaged else ""
    looked = f"{report.episodes:,} episodes{damaged}, {report.steps:,} steps, {len(report.checks)} checks"
    found = [f"{report.counts[name]:,} {plural(name, report.counts[name])}" for name in SEVERITIES]
    typer.echo(printable(f"{'ok' if report.ok else 'faulty'}: {', '.join(found)} in {looked} ({report.seconds:.1f} s)"))


def plural(severity: str, count: int) -> str:
    return severity + "s" * (severity != "info" and count != 1)
