"""``hilt data convert``, ``hilt data formats``, and ``hilt data inspect`` for datasets that are not logs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer

from hilt.cli.data import strip
from hilt.cli.data.edit_commands import Where
from hilt.cli.show import human_bytes, progress_bar, shell, show_next, table
from hilt.core.errors import ConfigError, HiltError, SchemaError
from hilt.core.progress import printable
from hilt.core.trajectory import Source
from hilt.core.tree import ArraySpec, flatten
from hilt.formats import FORMATS, detect, located, meaning_of, open_dataset, options_of
from hilt.formats.convert import ConversionSummary, Progress, convert, success_of, survey
from hilt.formats.episodes import Dataset, Episode
from hilt.formats.images import is_image

MAX_NOTES = 30
LARGEST = 8192
"""Pixels along one side of an image"""
Format = Annotated[str, typer.Option("--from", help="The format of the source; `hilt data formats` lists them.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of a format.", show_default=False),
]
Split = Annotated[
    str | None,
    typer.Option("--split", help="Of RLDS: such as train[:10%]. The same as -o split=...", show_default=False),
]


def convert_dataset(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A dataset of any known format, a recording or a run.", show_default=False),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.", show_default=False)],
    format: Format = "auto",
    to: Annotated[str, typer.Option("--to", help="The format to write.")] = "log",
    split: Split = None,
    options: Options = None,
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="Pass over damaged episodes, and count them.")
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop",
            metavar="COLUMN",
            help="Leave out a column and all below it; of an observation also the next observation.",
            show_default=False,
        ),
    ] = None,
    image_size: Annotated[
        str, typer.Option("--image-size", metavar="HxW", help="Make all images this size.", show_default=False)
    ] = "",
    where: Where = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads that decode.", show_default="one per core")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a dataset into a log, or into another format. Stopped with Ctrl-C, the same command goes on where it was."""
    source = located(source, format)
    name = detect(source) if format == "auto" else format
    given = read_options(
        options, split, {**options_of(name, "open_dataset"), **options_of(to, "create")}, f"from {name} to {to}:"
    )
    given |= {"where": " ".join(where)} if where else {}
    size = parse_size(image_size)
    try:
        with progress_bar("converting", "episodes") as show, between_episodes(show) as progress:
            summary = convert(
                source,
                target,
                format=name,
                to=to,
                skip_corrupt=skip_corrupt,
                drop=drop or (),
                image_size=size,
                workers=workers,
                progress=progress,
                **given,
            )
    except KeyboardInterrupt:
        typer.echo("stopped; what was converted is kept: the same command goes on from there", err=True)
        raise
    show_converted(summary, target, to, as_json)


def show_converted(summary: ConversionSummary, target: Path, to: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary.to_json(), indent=1))
    else:
        show_summary(summary)
        show_next(shell("hilt", "data", "inspect", target), *learn_from(target, to))


def learn_from(path: Path, format: str) -> list[str]:
    """The commands that train from a log; other formats are written for other programs."""
    if format != "log":
        return []
    return [
        shell("hilt", "train", "RECIPE", "demonstrations=0", f"demo_path=[{path}]"),
        shell("hilt", "train", "sft", path, "suite=NAME", "--dry-run"),
    ]


@contextlib.contextmanager
def between_episodes(progress: Progress) -> Iterator[Progress]:
    """Ctrl-C stops when the episode at hand is written; a second one stops at once."""
    asked = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    def step(done: int, total: int) -> None:
        progress(done, total)
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield step
    finally:
        signal.signal(signal.SIGINT, before)


def list_formats() -> None:
    """List the formats that can be read and written, with their options."""
    from rich.console import Console

    rows = []
    for name in FORMATS.known():
        for deed, function in (("read", "open_dataset"), ("write", "create")):
            try:
                options = options_of(name, function)
            except ConfigError:
                continue
            given = [f"{option.name}={'' if option.default is None else option.default}" for option in options.values()]
            rows.append([name, deed, ", ".join(given) or "none", meaning_of(name, function).replace("`", "")])
    Console().print(table("format", "", "options (-o NAME=VALUE)", "", rows=rows))


def inspect_dataset(
    path: Path,
    format: str,
    split: str | None,
    options: list[str] | None,
    as_json: bool,
    quick: bool,
    frames: bool,
    number: int | None,
    out: Path | None,
) -> None:
    """What `hilt data inspect` does for everything that is not a log."""
    dataset = open_dataset(path, format, **read_options(options, split, options_of(format, "open_dataset"), format))
    if frames:
        typer.echo(write_strip(dataset, number or 0, out))
        return
    if quick:
        counted = ConversionSummary(str(path), dataset.format, episodes=len(dataset))
    else:
        with progress_bar("counting", "episodes") as progress:
            counted = survey(dataset, progress)
    described = dataset.describe()
    columns = _columns(dataset)
    if as_json:
        shown = {
            "path": str(path),
            "format": dataset.format,
            "counted": not quick,
            **counted.to_json(),
            "columns": columns,
            "described": described,
        }
        typer.echo(json.dumps(shown, indent=1))
        return
    from rich.console import Console

    console = Console()
    rows = [["path", str(path)], ["format", dataset.format], *_counts(counted, quick)]
    rows += [[name, short(value)] for name, value in described.items() if name != "features"]  # the columns show it
    console.print(table("", "", rows=rows))
    console.print()
    console.print(
        table(
            "column",
            "dtype",
            "shape",
            rows=[(c["column"], c["dtype"], "×".join(map(str, c["shape"])) or "1") for c in columns],
        )
    )
    show_notes(counted)
    show_next(shell("hilt", "data", "convert", path, "LOG"))


def read_options(
    given: list[str] | None, split: str | None, known: dict[str, inspect.Parameter], where: str
) -> dict[str, object]:
    """``-o NAME=VALUE`` as values of the types that the options have."""
    out: dict[str, Any] = {}
    for text in [*(given or []), *([f"split={split}"] if split is not None else [])]:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {text!r}: expected NAME=VALUE.")
        kind = known[name].annotation if name in known else str
        kinds = [k for k in get_args(kind) if k is not type(None)] or [kind]
        out[name.replace("-", "_")] = _parsed(name, value, kinds[0])
    return out


def _parsed(name: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise typer.BadParameter(f"--option {name}={value}: expected true or false.")
        return value.lower() == "true"
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:
        raise typer.BadParameter(f"--option {name}={value}: expected a number.") from None


def parse_size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and 0 < int(height) <= LARGEST and 0 < int(width) <= LARGEST):
        raise typer.BadParameter(f"--image-size {text!r}: expected height x width, such as 128x128, up to {LARGEST:,}.")
    return int(height), int(width)


# --- showing
# ----------------------------------------------------------------------------------------------------------------------


def show_summary(s: ConversionSummary) -> None:
    from rich.console import Console

    per_second = (
        f", {s.steps / s.seconds:,.0f} steps/s" if not s.went_on_from else f", going on from episode {s.went_on_from:,}"
    )
    rows = [
        ["from", f"{s.source} ({s.source_format}, {human_bytes(s.source_bytes)})"],
        ["to", f"{s.target} ({s.target_format}, {human_bytes(s.target_bytes)})"],
        *_counts(s),
        ["took", f"{s.seconds:.1f} s{per_second}"],
    ]
    Console().print(table("", "", rows=rows))
    show_notes(s)


def _counts(s: ConversionSummary, quick: bool = False) -> list[list[str]]:
    if quick:
        return [["episodes", f"{s.episodes:,}"], ["steps", "not counted (--quick)"]]
    lost = [f"{s.damaged:,} damaged"] * bool(s.damaged) + [f"{s.empty:,} without a transition"] * bool(s.empty)
    return [
        ["episodes", f"{s.episodes:,}" + (f"; left out: {', '.join(lost)}" if lost else "")],
        ["steps", f"{s.steps:,}"],
        ["success", f"{s.successes:,} succeeded, {s.failures:,} failed, {s.unknown:,} unknown"],
    ] + ([["size", human_bytes(s.source_bytes)]] if not s.target else [])


def show_notes(s: ConversionSummary) -> None:
    if not s.notes:
        return
    typer.echo("\nnot carried over as it was:" if s.target else "\na conversion would change or leave out:")
    for sentence, times in s.notes.most_common(MAX_NOTES):
        typer.echo(f"  {printable(sentence)}" + (f" ({times:,} times)" if times > 1 else ""))
    if len(s.notes) > MAX_NOTES:
        typer.echo(f"  and {len(s.notes) - MAX_NOTES:,} more; --json lists all")


def short(value: object, length: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _columns(dataset: Dataset) -> list[dict[str, Any]]:
    """The columns that an episode has: of the first that can be read."""
    for job in dataset.jobs():
        try:
            episode = job()
        except HiltError:
            continue
        if episode is not None:
            leaves = flatten(episode.columns)
            return [
                {"column": p, "dtype": str(x.dtype), "shape": list(x.shape[1:])}
                for p, x in leaves.items()
                if not p.startswith("next_obs")
            ]
    return []


# --- the picture strip
# ------------------------------------------------------------------------------------------------------------


def write_strip(dataset: Dataset, number: int, out: Path | None) -> Path:
    """Writes the strip of one episode and returns the file's path."""
    job = next(itertools.islice(dataset.jobs(number), 1), None) if number >= 0 else None
    episode = job() if job is not None else None
    if episode is None:
        raise ConfigError(
            f"{dataset.path}: no episode {number} with a transition; it has {len(dataset):,} episodes, counted from 0."
        )
    images = {
        p: x
        for p, x in flatten(episode.columns).items()
        if not p.startswith("next_") and is_image(ArraySpec(x.dtype, x.shape[1:]))
    }
    if not images:
        raise SchemaError(
            f"{dataset.path}: no column of it is an image (uint8, height × width, with 1 or 3 channels or none)."
        )
    chosen = np.linspace(0, len(episode) - 1, min(strip.FRAMES, len(episode))).round().astype(int)
    verdict = {True: ", success", False: ", failure", None: ""}[success_of(episode)]
    place = dataset.path.resolve()
    name = f"{place.parent.name}-{place.name}" if place.name[:1].isdigit() else place.name  # a version is not a name
    title = f"{name} episode {number}: {len(episode)} steps{verdict}"
    target = out if out is not None else Path(f"{name}-episode-{number}.png")
    return strip.save(target, title, {p: x[chosen] for p, x in images.items()}, _labels(episode, chosen))


def _labels(episode: Episode, chosen: Any) -> list[tuple[str, bool]]:
    sources = episode.columns.get("source", np.zeros(len(episode), np.uint8))
    return [strip.label(int(step), Source(int(sources[step]))) for step in chosen]
