"""``hilt data``: look into logs and other datasets, turn one into another, check
every byte of a log, mend, merge and split logs.

Exit codes: 0 when all is well, 1 when `verify` finds damage, `check` finds an error or something fails, 2 when the
command line is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hilt.cli.data import data_check, edit_commands, score_command, strip, value_command
from hilt.cli.data import data_convert as dataset
from hilt.cli.show import human_bytes, progress_bar, table
from hilt.core.errors import SchemaError
from hilt.core.progress import printable
from hilt.core.trajectory import Source
from hilt.core.tree import flatten
from hilt.formats import detect, located, located_log
from hilt.formats.images import is_image
from hilt.replay.log import Log
from hilt.replay.maintenance.findings import Finding, LogReport
from hilt.replay.maintenance.merge import Copied, merge, split
from hilt.replay.maintenance.repair import repair, verify
from hilt.replay.schema import mate

app = typer.Typer(add_completion=False, no_args_is_help=True)

LOG_HELP = "The folder of a log, or of a recording or run, which has one."
LogPath = Annotated[Path, typer.Argument(metavar="LOG", help=LOG_HELP, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
MAX_FINDINGS = 30


@app.callback()
def data() -> None:
    """Look into logs and datasets of other systems, turn one into another; check
    logs, mend, merge, split and edit them."""


app.command("convert")(dataset.convert_dataset)
app.command("check")(data_check.check_data)
app.command("score")(score_command.score)
app.command("value")(value_command.value)
app.command("formats")(dataset.list_formats)
app.command("label")(edit_commands.label)
app.command("tag")(edit_commands.tag)
app.command("trim")(edit_commands.trim)
app.command("cut")(edit_commands.cut)
app.command("join")(edit_commands.join)
app.command("delete")(edit_commands.delete)
app.command("undo")(edit_commands.undo)
app.command("history")(edit_commands.history)


@app.command("inspect")
def inspect_data(
    path: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A log, recording, run or dataset of a known format.", show_default=False),
    ],
    as_json: AsJson = False,
    frames: Annotated[
        bool, typer.Option("--frames", help="Write a picture strip of one episode instead, as a PNG.")
    ] = False,
    trajectory: Annotated[
        int | None,
        typer.Option(
            "--trajectory", help="With --frames: which one.", show_default="the newest of a log, the first of a dataset"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --frames: the file to write.", show_default="in this folder")
    ] = None,
    format: dataset.Format = "auto",
    split: dataset.Split = None,
    options: dataset.Options = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not count the steps of a dataset that is not a log.")
    ] = False,
) -> None:
    """Show what a log or a dataset holds."""
    if not frames and (trajectory is not None or out is not None):
        raise typer.BadParameter("--trajectory and --out are for the picture strip: add --frames.")
    if frames and as_json:
        raise typer.BadParameter("--frames writes a picture; leave out --json.")
    given, path = path, located(path, format)
    name = detect(path) if format == "auto" else format
    if name != "log":
        dataset.inspect_dataset(path, name, split, options, as_json, quick, frames, trajectory, out)
        return
    if split is not None or options or quick:
        raise typer.BadParameter("--split, --option and --quick are for datasets that are not logs.")
    with progress_bar("opening the log and counting its steps"), Log.open(path, "r") as opened:
        if frames:
            typer.echo(write_strip(opened, trajectory, out))
            return
        from hilt.replay.maintenance.summary import summarize

        summary = summarize(opened)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        show_summary(summary)
        if path != given and (given / "demos" / "log.json").is_file():
            typer.echo(f"\nThe run's demonstrations: hilt data inspect {given / 'demos'}")


@app.command("verify")
def verify_log(log: LogPath, as_json: AsJson = False) -> None:
    """Read every byte of a log and name whatever is damaged; exit code 1 if anything is."""
    with progress_bar("reading", "bytes") as progress:
        report = verify(located_log(log), progress)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        show_report(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command("repair")
def repair_log(log: LogPath) -> None:
    """Put damaged steps into quarantine, rebuild what can be rebuilt, cut torn tails, remove leftovers."""
    with progress_bar("mending", "bytes") as progress:
        report = repair(log := located_log(log), progress)
    for line in report.mended:
        typer.echo(printable(line))
    if report.mended:
        typer.echo(
            f"mended: {report.steps:,} steps are whole, {report.lost_steps:,} were lost. Check "
            f"with: hilt data verify {log}"
        )
        show_way_out(report)
    else:
        typer.echo(f"nothing to mend: {describe_size(report)}")


@app.command("merge")
def merge_logs(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Logs with the same columns.", show_default=False)
    ],
    into: Annotated[Path, typer.Option("--into", help="The folder of the new log.", show_default=False)],
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="A column to leave out, as a damaged camera; repeatable.", show_default=False),
    ] = None,
) -> None:
    """Copy the trajectories of several logs into a new one, log after log, oldest first."""
    with progress_bar("copying", "trajectories") as progress:
        made = merge([located_log(log) for log in logs], into, progress, without=without or ())
    show_copied([made])


@app.command("split")
def split_log(
    log: LogPath,
    into: Annotated[
        list[Path] | None, typer.Argument(metavar="TARGET...", help="Folders of the new logs.", show_default=False)
    ] = None,
    ratios: Annotated[str, typer.Option("--ratios", help="Their shares, such as 0.9,0.1.", show_default="equal")] = "",
    parts: Annotated[
        int | None, typer.Option("--parts", help="Number of logs, named LOG-1, LOG-2, ...", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which trajectories go where.")] = 0,
) -> None:
    """Share out the trajectories of a log to several new ones, at random."""
    if (parts is None) == (not into):
        raise typer.BadParameter("give either the TARGET folders or --parts.")
    targets = into or [log.with_name(f"{log.name}-{i + 1}") for i in range(parts or 0)]
    shares = parse_ratios(ratios, len(targets))
    with progress_bar("copying", "trajectories") as progress:
        made = split(located_log(log), targets, shares, seed, progress)
    show_copied(made)


def parse_ratios(text: str, count: int) -> list[float] | None:
    if not text:
        return None
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--ratios {text!r}: expected numbers with commas between them, such as 0.9,0.1."
        ) from None
    if len(shares) != count:
        raise typer.BadParameter(f"--ratios {text!r}: expected {count} numbers, one for each target.")
    return shares


# --- showing
# ----------------------------------------------------------------------------------------------------------------------


def show_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(table("", "", rows=list(overview(summary).items())))
    console.print()
    shown, follows = without_mates(summary["columns"])
    columns: list[tuple[Any, ...]] = [
        (c["column"], c["dtype"], "×".join(map(str, c["shape"])) or "1", *_storage(c)) for c in shown
    ]
    headers = ["column", "dtype", "shape", "stored in", "bytes", "compression"]
    if all(column[-1] in ("", "none") for column in columns):
        headers, columns = headers[:-1], [column[:-1] for column in columns]
    console.print(table(*headers, rows=columns, right=[4]))
    for name, next_name in follows.items():
        same = (
            f"{next_name} has the same columns as {name}, a step later; bytes are of both, and an "
            "image of both is stored once."
        )
        console.print(printable(same), markup=False, highlight=False)
    if summary["newest"]:
        console.print()
        newest = [_trajectory_row(t) for t in summary["newest"]]
        console.print(
            table("trajectory", "steps", "return", "success", "end", "acted by", rows=newest, right=[0, 1, 2])
        )
        if facts := fact_rows([t["facts"] for t in summary["newest"]]):
            console.print()
            console.print(table("fact", "of these trajectories: one value, or one for each of them", rows=facts))
    if summary["quarantine"]["findings"]:
        console.print()
        console.print(
            table("in quarantine", rows=[[line] for line in summary["quarantine"]["findings"][:MAX_FINDINGS]])
        )


def without_mates(columns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Columns without those of next observations that are like those of the
    observations, and which of these there are."""
    by_name = {column["column"]: column for column in columns}
    pairs = {name: mate(name) for name in by_name if mate(name) in by_name}
    alike = {a: b for a, b in pairs.items() if all(by_name[a][key] == by_name[b][key] for key in ("dtype", "shape"))}
    if len(alike) < len(pairs):
        return columns, {}
    both = {a: by_name[a]["bytes"] + by_name[b].get("bytes", 0) for a, b in alike.items()}
    shown = [
        {**column, "bytes": both.get(name, column.get("bytes"))}
        for name, column in by_name.items()
        if name not in alike.values()
    ]
    return shown, {a.partition("/")[0]: b.partition("/")[0] for a, b in alike.items()}


def fact_rows(facts: list[dict[str, Any]]) -> list[list[str]]:
    """Each fact once: its value if all trajectories have the same, else the value of each."""
    rows = []
    # which has a column of its own
    for name in dict.fromkeys(name for known in facts for name in known if name != "success"):
        values = [dataset.short(known[name], 60) if name in known else "–" for known in facts]
        rows.append([name, values[0] if len(set(values)) == 1 else " · ".join(values)])
    return rows


def overview(s: dict[str, Any]) -> dict[str, str]:
    episodes, facts, recovery = s["episodes"], s["facts"], s["recovery"]
    sources = ", ".join(f"{count:,} {name}" for name, count in s["sources"].items() if count) or "none"
    versions = s["policy_versions"]
    senders = ", ".join("/".join(filter(None, sender.values())) for sender in facts["senders"])
    torn = f", {recovery['torn_bytes']:,} torn bytes behind the last commit" if recovery["torn_bytes"] else ""
    damaged = f", {recovery['corrupt_facts']} damaged facts" if recovery["corrupt_facts"] else ""
    return {
        "path": s["path"],
        "format": str(s["format"]),
        "size on disk": (
            f"{human_bytes(s['bytes_on_disk'])}, {human_bytes(s['bytes_on_disk'] / max(1, s['steps']))} per step"
        ),
        "steps": f"{s['steps']:,}: {sources}" if s["steps"] else "none",
        "trajectories": f"{s['trajectories']:,}, {episodes['unfinished']:,} of them unfinished",
        "episodes ended": (
            f"{episodes['ended']:,}: {episodes['terminated']:,} terminated, {episodes['truncated']:,} truncated"
        ),
        "policy versions": f"{versions[0]} to {versions[1]}" if versions else "none",
        "success": f"{facts['successes']:,} succeeded, {facts['failures']:,} failed, {facts['unknown']:,} unknown",
        "senders": senders or "unnamed",
        "capacity": _capacity(s),
        "durability": f"{s['durability']}: {s['promise']}",
        "segments": f"{s['segments']['sealed']} sealed, {s['segments']['growing']} growing",
        **({"edits": _edits(s["edits"])} if s["edits"]["made"] else {}),
        "quarantine": f"{s['quarantine']['steps']:,} steps",
        "opened": f"in {recovery['seconds_to_open']:.3f} s{torn}{damaged}",
        "writer": s["writer"] or "none at work",
    }


def _edits(edits: dict[str, int]) -> str:
    hidden = f"{edits['hidden_trajectories']:,} trajectories and {edits['hidden_steps']:,} steps in all"
    return f"{edits['made']:,}, which hide {hidden}; hilt data history shows them"


def _capacity(s: dict[str, Any]) -> str:
    limits = [f"{s['capacity_steps']:,} steps"] if s["capacity_steps"] is not None else []
    limits += [human_bytes(s["capacity_bytes"])] if s["capacity_bytes"] is not None else []
    return ", ".join(limits) or "no limit"


def _storage(column: dict[str, Any]) -> tuple[str, str, str]:
    """Where a column is stored, its size, and its compression."""
    if column["stored"] == "row":
        return "row", human_bytes(column["bytes"]), ""
    if "shared_with" in column:
        return f"the frames of {column['shared_with']}", "", ""
    count = column.get("compressed_segments")
    ratio = (
        f", {column['compression_ratio']}×, {count} segment{'s' * (count != 1)}" if column["compression_ratio"] else ""
    )
    return (
        f"{column['frames']:,} frames",
        human_bytes(column["bytes"]),
        f"{column['codec']}{ratio}" if column["codec"] else "none",
    )


def _trajectory_row(t: dict[str, Any]) -> list[object]:
    success = {True: "yes", False: "no", None: "unknown"}[t["success"]]
    steps = f"{t['steps']:,}" if t["width"] == 1 else f"{t['steps'] // t['width']:,} × {t['width']}"
    acted = ", ".join(f"{count} {name}" for name, count in t["sources"].items())
    return [t["trajectory"], steps, "" if t["return"] is None else f"{t['return']:.3g}", success, t["end"], acted]


def show_report(report: LogReport) -> None:
    from rich.console import Console
    from rich.text import Text

    color = {"damage": "red", "quarantined": "yellow", "torn": "yellow", "leftover": "dim"}
    rows: list[list[object]] = [
        [Text(f.kind, color[f.kind]), f.file, f.what, _steps(f), f.cure] for f in report.findings[:MAX_FINDINGS]
    ]
    if rows:
        Console().print(table("", "file", "what", "steps", "what repair does", rows=rows))
    if len(report.findings) > MAX_FINDINGS:
        typer.echo(f"and {len(report.findings) - MAX_FINDINGS} more; --json lists all")
    if not report.closed and not report.writing:
        how = "the process that wrote it was killed, or it was written before logs were sealed"
        typer.echo(f"not closed: {how}. Whether steps are missing at its end is unknown.")
    if report.ok:
        typer.echo(f"ok: {describe_size(report)}")
    else:
        typer.echo(
            f"damaged: {len(report.of('damage'))} findings; {describe_size(report)}. Run: hilt "
            f"data repair {report.path}"
        )
        show_way_out(report)


def show_way_out(report: LogReport) -> None:
    """When only some columns are damaged: how to keep the others of every step."""
    if columns := report.damaged_columns():
        drop = " ".join(f"--without {column}" for column in columns)
        typer.echo(f"only frames of {', '.join(columns)} are damaged. To keep every step without them:")
        typer.echo(f"  hilt data merge {report.path} --into NEW {drop}")


def _steps(finding: Finding) -> str:
    shown = ", ".join(map(str, finding.steps[:3]))
    return shown + (f" and {len(finding.steps) - 3} more" if len(finding.steps) > 3 else "")


def describe_size(report: LogReport) -> str:
    whole = (
        f"{report.steps:,} steps, {report.trajectories:,} trajectories, {report.frames:,} frames and "
        f"{report.facts:,} facts are whole"
    )
    meanwhile = ", a writer is at work" if report.writing else ""
    return f"{whole} ({human_bytes(report.bytes)} read in {report.seconds:.1f} s{meanwhile})"


def show_copied(made: list[Copied]) -> None:
    from rich.console import Console

    rows = [(str(copied.path), f"{copied.trajectories:,}", f"{copied.steps:,}") for copied in made]
    Console().print(table("log", "trajectories", "steps", rows=rows, right=[1, 2]))


# --- the picture strip
# ------------------------------------------------------------------------------------------------------------


def write_strip(log: Log, trajectory: int | None, out: Path | None) -> Path:
    """Writes the strip of one trajectory and returns the file's path."""
    cameras = [
        p
        for p, spec in log.schema.columns.items()
        if is_image(spec) and p not in dict(log.schema.layout.pairs).values()
    ]
    if not cameras:
        raise SchemaError(
            f"{log.path}: no column of it is an image (uint8, height × width, with 1 or 3 channels or none)."
        )
    log.all().require_steps()
    number = log.trajectories()[-1] if trajectory is None else trajectory
    keys = log.trajectory_keys(number, hidden=log.facts.edits.shown.hides(number))
    with log.reading() as steps:
        keys = keys[:: int(steps.widths(keys[:1])[0])]
    chosen = keys[np.linspace(0, len(keys) - 1, min(strip.FRAMES, len(keys))).round().astype(int)]
    batch = flatten(log.read(chosen, cameras))
    target = out if out is not None else Path(f"{log.path.name}-trajectory-{number}.png")
    return strip.save(
        target, _title(log, number, len(keys)), {path: batch[path] for path in cameras}, _labels(log, chosen)
    )


def _title(log: Log, number: int, length: int) -> str:
    from hilt.replay.maintenance.summary import success_of

    verdict = {True: ", success", False: ", failure", None: ""}[success_of(log, number)]
    return f"{log.path.name} trajectory {number}: {length} steps{verdict}"


def _labels(log: Log, keys: Any) -> list[tuple[str, bool]]:
    with log.reading() as steps:
        (sources,) = steps.fields(keys, ["source"])
        width = int(steps.widths(keys[:1])[0])
    return [
        strip.label((key & 0xFFFFFFFF) // width, Source(source))
        for key, source in zip(keys.tolist(), sources.tolist(), strict=True)
    ]
