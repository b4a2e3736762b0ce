"""`python -m tests.golden PATH...`: compares, prints a table, and fails when anything differs."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden import FOLDER, find, run


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [FOLDER]
    if missing := [path for path in paths if not path.exists()]:
        print(f"{missing[0]}: there is no such file or folder.")
        return 2
    found, unknown = find(paths)
    results = {case: run(case, kind) for case, kind in found.items()}
    names = {case: f"{case.parent.name}/{case.name}" for case in results}
    width = max([4, *map(len, names.values())])
    if results:
        print(f"{'name':{width}}  {'cases':>6}  {'largest difference':>18}")
    for case, result in results.items():
        verdict = f"FAIL  {result.failures[0]}" if result.failures else "ok"
        more = f" (and {len(result.failures) - 1} more)" if len(result.failures) > 1 else ""
        print(f"{names[case]:{width}}  {result.cases:6}  {result.largest:18.6g}  {verdict}{more}")
    named = {path.resolve() for path in paths}
    for path in unknown:
        print(f"{path}: no kind of golden file that is known" + (" here." if path in named else " yet; passed over."))
    if not results:
        print("There is nothing to compare.")
    failed = sum(bool(result.failures) for result in results.values())
    return 1 if failed or not results or named & set(unknown) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
