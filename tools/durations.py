"""How long the tests take: ``python3 tools/durations.py`` runs `make test` and
writes docs/tests.md and tests/durations.tsv.

``python3 tools/durations.py RESULTS.xml`` makes them from a run that is already
there: ``make test ARGS=--junitxml=RESULTS.xml``.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE, TABLE = ROOT / "docs/tests.md", ROOT / "tests/durations.tsv"
SLOWEST = 50

HEAD = """# How long the tests take

`python3 tools/durations.py` made this page and `tests/durations.tsv`, from a run of `make test`: {count:,} tests,
{total:,.0f} s one after the other, {wall:,.0f} s as they ran, several at a time. Machine: {machine}.
Times include the fixtures that a test was the first to need.
How tests are chosen and ordered from it: [CONTRIBUTING.md](../CONTRIBUTING.md).
"""


def main() -> None:
    if len(sys.argv) > 2:
        raise SystemExit("usage: python3 tools/durations.py [RESULTS.xml]")
    if len(sys.argv) == 2:
        write(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        code = subprocess.run(["make", "test", f"ARGS=--junitxml={results}"], cwd=ROOT).returncode
        if not results.exists():
            raise SystemExit(f"make test ended with {code} and left no results")
        write(results)


def write(results: Path) -> None:
    suite = next(ElementTree.parse(results).getroot().iter("testsuite"))
    cases = [(name_of(case), float(case.get("time", "0"))) for case in suite.iter("testcase") if case.get("classname")]
    page = HEAD.format(
        count=len(cases),
        total=sum(taken for _, taken in cases),
        wall=float(suite.get("time", "0")),
        machine=f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}, Python "
        f"{platform.python_version()}",
    )
    page += "\n| folder | tests | seconds |\n|---|---:|---:|\n"
    folders: dict[str, list[float]] = defaultdict(list)
    for name, taken in cases:
        folders[folder_of(name)].append(taken)
    for folder, times in sorted(folders.items(), key=lambda item: -sum(item[1])):
        page += f"| {folder} | {len(times):,} | {sum(times):,.0f} |\n"
    page += f"\n## The {SLOWEST} slowest\n\n| seconds | test |\n|---:|---|\n"
    for name, taken in sorted(cases, key=lambda case: -case[1])[:SLOWEST]:
        page += f"| {taken:.1f} | `{name.removeprefix('tests/')}` |\n"
    PAGE.write_text(page)
    files: dict[str, list[float]] = defaultdict(list)
    for name, taken in cases:
        files[name.split("::")[0]].append(taken)
    rows = [f"{sum(times):.1f}\t{max(times):.1f}\t{len(times)}\t{file}\n" for file, times in sorted(files.items())]
    TABLE.write_text("# seconds, the longest test's, tests, file; written by tools/durations.py\n" + "".join(rows))
    print(f"wrote {PAGE.relative_to(ROOT)} and {TABLE.relative_to(ROOT)}: {len(cases)} tests in {len(rows)} files")


def name_of(case: ElementTree.Element) -> str:
    """As pytest names it on its command line; junit has the module with dots, and classes after it."""
    parts = case.get("classname", "").split(".")
    length = next(
        (i for i in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:i]).with_suffix(".py").exists()), len(parts)
    )
    return "::".join(["/".join(parts[:length]) + ".py", *parts[length:], case.get("name", "")])


def folder_of(name: str) -> str:
    parts = name.split("::")[0].split("/")
    return parts[1] + ("/" if len(parts) > 2 else "")


if __name__ == "__main__":
    main()
