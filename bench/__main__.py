"""``python -m bench replay|wire|formats|robot|learn|vla|rollout|chunks|open|serve [--quick] [--json
FILE] [--markdown FILE] [--only NAME ...]``"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.lab import Group, Lab, remove
from bench.limits import is_on_disk
from bench.peers import one_torch_thread
from bench.report import Report, Row

SUITES = ("replay", "wire", "formats", "robot", "learn", "vla", "rollout", "chunks", "open", "serve")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Ours, peers and the machine's limits from one run, as ratios."
    )
    parser.add_argument("suite", choices=SUITES, help="which part to measure")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under a minute; no target counts as met")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write one object per row")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write the table, between the marks of a page that has them"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this row or group of rows; may be given again"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk, for the data (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="learn: number of seeds (5, 1 with --quick)")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="learn: minutes of learning for each (5, a few seconds with --quick)"
    )
    parser.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="learn: each run on N cores of its own, side by side (all, one at a time)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="learn: keep the result of each run of the groups pick, tasks, methods and state here, and do "
        "not repeat those that are; chunks: what is recorded, trained and measured",
    )
    parser.add_argument("--first-seed", type=int, metavar="N", help="methods of learn: the seeds are from N on (0)")
    parser.add_argument(
        "--no-runs", action="store_true", help="methods of learn: run nothing, print what --keep FOLDER has"
    )
    parser.add_argument("--list", action="store_true", help="list the groups and rows")
    given = parser.parse_args(arguments)
    groups = load_groups(given.suite)
    if given.list:
        for name, group in groups.items():
            print(f"{name}: {', '.join(group.rows)}")
        return 0
    known = {*groups, *(row for group in groups.values() for row in group.rows)}
    if unknown := [name for name in given.only if name not in known]:
        parser.error(f"no row or group is called {unknown[0]!r}; choose from {', '.join(sorted(known))}")
    if given.suite != "learn" and (given.seeds, given.minutes, given.cores) != (None, None, None):
        parser.error("--seeds, --minutes and --cores are for the suite learn")
    if given.suite not in ("learn", "chunks") and given.keep is not None:
        parser.error("--keep is for the suites learn and chunks")
    if given.first_seed is not None or given.no_runs:
        of_methods = {"methods", *groups["methods"].rows} if given.suite == "learn" else set()
        if not given.only or not of_methods.issuperset(given.only) or (given.no_runs and given.keep is None):
            parser.error("--first-seed and --no-runs are for learn --only methods, the latter with --keep FOLDER")
    most = len(os.sched_getaffinity(0))
    if given.cores is not None and not 1 <= given.cores <= most:
        parser.error(f"--cores {given.cores}, but there are {most} to choose from; give 1 to {most}")
    if not is_on_disk(given.dir):
        parser.error(f"{given.dir} is in memory, and these rows are about disks; choose a folder on a disk with --dir")
    one_torch_thread()
    given.dir.mkdir(parents=True, exist_ok=True)
    lab = Lab(Path(tempfile.mkdtemp(prefix="hilt-bench-", dir=given.dir)), given.quick)
    lab.seeds, lab.minutes = given.seeds or lab.pick(5, 1), given.minutes or (0.1 if given.quick else 5.0)
    lab.first_seed, lab.measures = given.first_seed or 0, not given.no_runs
    lab.cores, lab.keep, lab.only = given.cores or 0, given.keep and given.keep.absolute(), frozenset(given.only)
    report = Report(
        shlex.join(["python", "-m", "bench", *(arguments if arguments is not None else sys.argv[1:])]), [], lab.limits
    )
    try:
        for row in measure(lab, groups):
            report.rows.append(row)
            lab.progress(f"{row.name}: not measured" if row.ours is None else f"{row.name}: {row.ours:.4g} {row.unit}")
            if given.json:  # after each row, so that a run that is cut off leaves what it has measured
                report.write_json(given.json)
    finally:
        remove(lab.folder)
        report.print()
    if given.markdown:
        report.write_markdown(given.markdown, given.suite)
    return 0


def load_groups(suite: str) -> dict[str, Group]:
    """The groups of a suite; each suite is a module with GROUPS."""
    import importlib

    return importlib.import_module(f"bench.{suite}").GROUPS  # type: ignore[no-any-return]


def measure(lab: Lab, groups: dict[str, Group]) -> Iterator[Row]:
    for name, group in groups.items():
        if not any(lab.wants(name, row) for row in group.rows):
            continue
        started = time.perf_counter()
        yield from (row for row in group.run(lab) if lab.wants(name, row.name))
        lab.progress(f"{name}: done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
