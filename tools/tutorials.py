"""The tutorials in docs/tutorials: what their pages contain, their notebooks, and a run of a page from start to end.

    python tools/tutorials.py notebooks           writes the notebook of each page, NAME.ipynb beside NAME.md
    python tools/tutorials.py run NAME [FOLDER]   runs the blocks of a page in order, in a new folder
    python tools/tutorials.py picture SOURCE NAME.png [--crop LEFT,TOP,RIGHT,BOTTOM] [--width PIXELS]
                                                  writes a picture that a command made into docs/tutorials, smaller

A page is Markdown. Its blocks of code mean the following, to readers, to this program and in the notebook:

- ``bash``: commands. Each block is a process of its own, in the folder of the tutorial. After a line with a name,
  ``**arm-1**``, it belongs to a machine of that name, whose files are in a folder of that name.
- any other language, after a line with a file name, ``**my_arm.py**``: a file that is saved.
- ``text``: what is printed, or something else to look at; it is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
BLOCK = re.compile(
    r"^(?:\*\*(?P<name>[\w./-]+)\*\*\n\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
HEADER = "---\njupyter:\n  kernelspec:\n    display_name: Python 3\n    language: python\n    name: python3\n---\n\n"
"""Tells jupytext that cells are Python, so that blocks of another language get a line like %%bash"""
SHOWN = "text"
BLOCK_TIMEOUT_S = 900.0
TAIL_LINES = 40
COLORS = 128
"""Of a picture: as many as curves and pages need, in a third of the bytes"""


@dataclass(frozen=True)
class Block:
    """A block of a page that is run, or saved as a file: `name` is that of the file, or of the machine."""

    language: str
    name: str
    text: str
    line: int

    @property
    def is_file(self) -> bool:
        return self.language != "bash"


class TutorialError(Exception):
    """A block cannot be run, or its command failed."""


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that are run or saved, in order."""
    text, found = page.read_text(), []
    for one in BLOCK.finditer(text):
        line = text.count("\n", 0, one.start("language")) + 1
        language, name = one["language"], one["name"] or ""
        if language == SHOWN:
            continue
        if language != "bash" and not name:
            raise TutorialError(
                f"{page.name}:{line}: a block of {language or 'no language'} without a name. Put a line with its file "
                "name before it, **my_arm.py**, or call it `text` if it is only shown."
            )
        found.append(Block(language, name, one["text"], line))
    return found


def notebook(page: Path) -> str:
    """The text of the notebook that belongs to a page, by jupytext: no cell has an output."""
    import jupytext  # for development only

    made = jupytext.reads(HEADER + BLOCK.sub(_as_cell, page.read_text()), fmt="md")
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    made.nbformat, made.nbformat_minor = 4, 5
    for number, cell in enumerate(made.cells):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
        if cell["cell_type"] == "code":
            cell["source"] = re.sub(r"^%%bash$", "%%bash -e", cell["source"], count=1, flags=re.MULTILINE)
            cell["execution_count"], cell["outputs"] = None, []
    return json.dumps(json.loads(jupytext.writes(made, fmt="ipynb")), indent=1, ensure_ascii=False) + "\n"


def _as_cell(found: re.Match[str]) -> str:
    """A block of a page as jupytext makes a cell of it: files and folders of machines are commands of the notebook."""
    language, name, text = found["language"], found["name"], found["text"]
    if language == SHOWN or not name:
        return found[0]
    if language == "bash":
        return f"**{name}**\n\n```bash\nmkdir -p {name} && cd {name}\n{text}```"
    return f"**{name}**\n\n```python\n%%writefile {name}\n{text}```"


@dataclass
class TutorialRun:
    """A run of the blocks of a page in a folder."""

    page: Path
    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    on: Callable[[str], Sequence[str]] = lambda machine: ()
    """The words to put before a command to run it on a machine of this name"""
    commands: Path = Path(sys.executable).parent
    """The folder with the commands `hilt` and `python`, which comes first on the PATH"""
    watch: Callable[[str], object] = lambda printed: None
    """Called twice a second with what the running block has printed so far"""
    notify: Callable[[str], object] = lambda line: None
    printed: str = ""
    """What all blocks have printed"""
    _started: list[int] = field(default_factory=list)

    def run(self) -> str:
        """Runs all blocks, and returns what they printed. What they left running in the background is ended."""
        try:
            for block in blocks(self.page):
                if block.is_file:
                    (self.folder / block.name).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / block.name).write_text(block.text)
                else:
                    self._run(block)
        finally:
            for group in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
        return self.printed

    def _run(self, block: Block) -> None:
        """Runs the commands of one block. What they print goes to a file, so that nobody waits for a process in the
        background."""
        folder, began, code = self.folder / block.name, time.monotonic(), None
        folder.mkdir(parents=True, exist_ok=True)
        words = [*(self.on(block.name) if block.name else ()), "bash", "-e", "-c", block.text]
        environment = {
            **self.environment,
            "PATH": with_commands(self.environment.get("PATH", os.defpath), self.commands),
        }
        with tempfile.NamedTemporaryFile("w+") as output:
            to = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **to)
            self._started.append(process.pid)
            while code is None and time.monotonic() < began + BLOCK_TIMEOUT_S:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.5)
                self.watch(Path(output.name).read_text())
            text = Path(output.name).read_text()
        where, seconds = f"{self.page.name}:{block.line}", time.monotonic() - began
        if code != 0:
            ended = f"did not end within {BLOCK_TIMEOUT_S:g} s" if code is None else f"ended with code {code}"
            tail = "\n".join(text.splitlines()[-TAIL_LINES:])
            raise TutorialError(f"{where}: this block {ended}:\n{block.text}Its last lines:\n{tail}")
        self.printed += text
        self.notify(f"{where}: {seconds:.1f} s")


def with_commands(path: str, commands: Path = Path(sys.executable).parent) -> str:
    """A PATH that begins with this folder: by default that of this Python, where `hilt` is."""
    return os.pathsep.join([str(commands), path])


def picture(source: Path, made: Path, crop: Sequence[int] = (), width: int = 0) -> None:
    """Writes a part of a picture with at most this number of pixels in a row, in few colors."""
    from PIL import Image

    with Image.open(source) as opened:
        part = opened.convert("RGB").crop(tuple(crop)) if crop else opened.convert("RGB")
    if 0 < width < part.width:
        part = part.resize((width, round(part.height * width / part.width)), Image.Resampling.LANCZOS)
    part.quantize(COLORS, dither=Image.Dither.NONE).save(made, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the notebooks of the tutorials, or runs a tutorial.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("notebooks", help="write the notebook of each page")
    runs = commands.add_parser("run", help="run the blocks of a page in order")
    runs.add_argument("name", choices=[page.stem for page in pages()])
    runs.add_argument("folder", nargs="?", type=Path, help="a new folder; without it a temporary one")
    drawn = commands.add_parser("picture", help="write a picture into docs/tutorials, smaller")
    drawn.add_argument("source", type=Path)
    drawn.add_argument("name")
    drawn.add_argument("--crop", default="", metavar="LEFT,TOP,RIGHT,BOTTOM", help="only this part, in pixels")
    drawn.add_argument("--width", type=int, default=0, metavar="PIXELS", help="at most this wide")
    given = parser.parse_args()
    if given.command == "picture":
        crop = [int(word) for word in given.crop.split(",") if word]
        picture(given.source, FOLDER / given.name, crop, given.width)
        print(FOLDER / given.name)
        return
    if given.command == "notebooks":
        for page in pages():
            page.with_suffix(".ipynb").write_text(notebook(page))
            print(page.with_suffix(".ipynb"))
        return
    folder = given.folder or Path(tempfile.mkdtemp(prefix="hilt-tutorial-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    made = TutorialRun(FOLDER / f"{given.name}.md", folder.resolve(), notify=lambda line: print(line, flush=True))
    print(made.run())
    print(f"{given.name}: {time.monotonic() - began:.0f} s, in {folder}")


if __name__ == "__main__":
    main()
