"""Writes the table of extras in docs/install.md: ``python tools/extras.py``, in an environment that has them installed.

For each extra the packages that it brings and their size on disk, as this environment has them, beyond what
`pip install hilt` brings. An extra with a package that is not installed here keeps the row that it has.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "install.md"
MEANINGS = {
    "torch": "everything that learns",
    "images": "JPEG and PNG; a part of formats and teleop",
    "zstd": "logs compressed with zstd",
    "formats": "LeRobot, robomimic, LIBERO's and Minari's datasets",
    "array-record": "RLDS datasets in ArrayRecord files",
    "sim": "the tabletop suite in MuJoCo",
    "robot": "the robot server and its client",
    "realsense": "RealSense cameras",
    "teleop": "the browser's pages (`hilt record`, `hilt open`), gamepads, SpaceMouse",
    "serve": "`hilt serve-policy`, and policies behind ws://",
    "vla": "OpenVLA and LoRA",
    "cluster": "several machines, with Ray",
    "hub": "`hilt fetch` and `hilt push`",
    "remote": "copies of runs at a URL",
    "libero": "LIBERO's simulator: [libero](libero.md)",
    "metaworld": "what Meta-World needs: [Meta-World](metaworld.md)",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "trackio": "metrics in Trackio",
    "docs": "`make docs`",
}
"""The extras for users, and what each is for; the others are for tests and benches"""
ROW = re.compile(r"^\| `([\w-]+)` \|.*$", re.MULTILINE)


class NotInstalledError(Exception):
    """Raised for an extra with a package that this environment does not have."""


def closure(requirements: list[str], extra: str = "") -> set[str]:
    """The packages that requirements bring, and what those need."""
    found: set[str] = set()
    waiting = [(Requirement(line), extra) for line in requirements]
    while waiting:
        one, wanted = waiting.pop()
        if one.marker and not one.marker.evaluate({"extra": wanted}):
            continue
        try:
            package = importlib.metadata.distribution(one.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise NotInstalledError(one.name) from error
        inner = one.extras or {""}
        key = f"{one.name.lower()}[{','.join(sorted(one.extras))}]"
        if key not in found:
            found.add(key)
            waiting += [(Requirement(line), name) for line in package.requires or [] for name in inner]
    return found


def names_of(found: set[str]) -> set[str]:
    return {key.partition("[")[0].replace("_", "-") for key in found} - {"hilt"}


def size_of(names: set[str]) -> int:
    """Bytes of the files of packages, without what Python compiled of them."""
    files = (file for name in names for file in importlib.metadata.distribution(name).files or [])
    paths = (Path(str(file.locate())) for file in files if "__pycache__" not in file.parts)
    return sum(path.stat().st_size for path in paths if path.is_file())


def written(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 5e5 else f"{size / 1e3:.0f} kB"


def row(extra: str, before: dict[str, str], requirements: list[str], base: set[str]) -> str:
    try:
        if not any(re.search(rf"extra == ['\"]{extra}['\"]", line) for line in requirements):
            raise NotInstalledError(extra)  # an environment that was made before there was this extra
        added = names_of(closure(requirements, extra)) - base
    except NotInstalledError:
        return before.get(extra, f"| `{extra}` | {MEANINGS[extra]} | | not measured |")
    return f"| `{extra}` | {MEANINGS[extra]} | {len(added)} | {written(size_of(added))} |"


def main() -> None:
    text = PAGE.read_text()
    before = {found[1]: found[0] for found in ROW.finditer(text)}
    requirements = importlib.metadata.distribution("hilt").requires or []
    base = names_of(closure(requirements))
    rows = [row(extra, before, requirements, base) for extra in MEANINGS]
    first = f"| (none) | logs, wire, datasets in RLDS, the command line | {len(base)} | {written(size_of(base))} |"
    head, _, rest = text.partition("| extra |")
    _, _, tail = rest.partition("\n\n")
    PAGE.write_text(
        f"{head}| extra | for | packages | size |\n|---|---|---:|---:|\n" + "\n".join([first, *rows]) + f"\n\n{tail}"
    )
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
