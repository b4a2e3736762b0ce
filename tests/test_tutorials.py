"""The tutorials: each page is run from start to end in an empty folder, and so is its notebook."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tools import tutorials

from hilt.replay import Log
from tests.effort import is_long, need, need_rendering, rounds
from tests.forked import ForkServer
from tests.forked_shell import forked_commands
from tests.teleop import chromium
from tests.wire import hosts
from tests.wire.hosts import Hosts
from tests.wire.processes import free_port

PAGES = {page.stem: page for page in tutorials.pages()}
HEADINGS = ("What you will build", "What you need", "What to try next")
MIN_WORDS, MAX_WORDS = 600, 1200
PICTURE_BYTES = 150_000
PROGRAMS = Path(sys.executable).parent
"""Where `hilt` and `python` are installed"""


def prose(page: Path) -> str:
    return tutorials.BLOCK.sub("", page.read_text())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_it_builds_needs_and_leads_to(name: str):
    text = prose(PAGES[name])
    assert [heading for heading in HEADINGS if f"\n## {heading}\n" not in text] == []
    words = [line for line in text.splitlines() if not line.startswith("|")]
    assert MIN_WORDS <= len(" ".join(words).split()) <= MAX_WORDS
    assert f"[This page as a notebook]({name}.ipynb)" in text


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_small_picture_with_a_text_for_those_who_do_not_see_it(name: str):
    pictures = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", PAGES[name].read_text())
    assert pictures
    for text, target in pictures:
        assert len(text) > 40 and (PAGES[name].parent / target).stat().st_size < PICTURE_BYTES, target


def test_picture_is_cropped_and_made_smaller(tmp_path: Path):
    colors = np.zeros((40, 60, 3), np.uint8)
    colors[:, 20:] = 200
    Image.fromarray(colors).save(tmp_path / "source.png")
    tutorials.picture(tmp_path / "source.png", tmp_path / "made.png", crop=(20, 0, 60, 40), width=20)
    with Image.open(tmp_path / "made.png") as made:
        assert made.size == (20, 20) and np.all(np.asarray(made.convert("RGB")) == 200)


def test_a_block_without_a_name_that_is_not_a_command_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nprint(1)\n```\n")
    with pytest.raises(tutorials.TutorialError, match=r"page.md:3: a block of python without a name"):
        tutorials.blocks(page)


def test_a_command_that_fails_is_named_with_its_line_and_what_it_printed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n**a.txt**\n\n```yaml\nhere: 1\n```\n\n```bash\ncat a.txt\nfalse\necho never\n```\n")
    with pytest.raises(tutorials.TutorialError, match=r"page.md:9: .* ended with code 1:(?s:.*)lines:\nhere: 1$"):
        tutorials.TutorialRun(page, tmp_path).run()


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_has_the_blocks_of_its_page_and_no_outputs(name: str):
    """Also where jupytext is not installed."""
    cells = json.loads(PAGES[name].with_suffix(".ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    blocks = tutorials.blocks(PAGES[name])
    assert len(codes) == len(blocks)
    for cell, block in zip(codes, blocks, strict=True):
        assert "".join(cell["source"]).endswith(block.text.rstrip("\n"))


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_is_what_jupytext_makes_of_its_page(name: str):
    need("jupytext")
    assert PAGES[name].with_suffix(".ipynb").read_text() == tutorials.notebook(PAGES[name]), (
        "run: python tools/tutorials.py notebooks"
    )


WIRE = re.compile(r"^hilt train (?:hil-serl:|tabletop_|vla_person).*?(?= \\$|$)", re.MULTILINE)
"""Commands that start a learner and actors, which use the usual ports unless others are given"""


def own_copy(page: Path, folder: Path, quick: Mapping[str, str] | None = None) -> Path:
    """The page in another folder, with ports of its own: others may use the usual ones now. `quick` has more settings
    for commands that begin with its keys, behind those of the page, so that they count."""
    text = page.read_text()
    for port in sorted(set(re.findall(r"\b(?:50|55)\d\d\b", text))):
        text = text.replace(port, str(free_port()))
    text = WIRE.sub(lambda found: f"{found[0]} wire.port={free_port()} wire.broadcast_port={free_port()}", text)
    for command, settings in (quick or {}).items():
        # to the end of its last line, or to where its output goes
        pattern = re.compile(rf"^{re.escape(command)}(?:.*\\\n)*[^>\n]*", re.MULTILINE)
        text, count = pattern.subn(lambda found, settings=settings: f"{found[0].rstrip()} {settings} ", text)
        assert count, f"no command of {page.name} begins with {command!r}"
    folder.mkdir()
    (folder / page.name).write_text(text)
    return folder / page.name


def environment() -> dict[str, str]:
    """No person is there: where a page lets the reader choose, a script does the person's part."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "OPERATOR": "script"}


QUICK = {
    "three-machines": {
        "hilt learner ../settings.yaml": "control_hz=30 update_to_data=0.2 agent.encoder.pretrain_updates=4",
        "hilt actor ../settings.yaml": "control_hz=30 update_to_data=0.2 agent.encoder.pretrain_updates=4",
    },
    "teach-an-arm": {
        "hilt record tabletop/button": "--episodes 3",
        "hilt train tabletop_button": "agent.encoder.pretrain_updates=4 training_starts=40 max_steps=20 goal.period=20 "
        "goal.states=4 agent.rlpd.critic_warmup=4",
        "hilt eval runs/button": "--episodes 4",
    },
    "post-train-a-vla": {
        "hilt train sft": "demonstrations=2 max_steps=6 warmup_steps=2",
        "hilt eval runs/imitation": "--episodes 4",
        "hilt train vla_tabletop": "max_steps=1 collect.data_batch_size=8 collect.group_size=4 pool.slots=8 "
        "algorithm.batch.trajectories_per_step=4 validation.episodes=2 validation.period=1 "
        "collect.dynamic_sampling=false",
        "hilt eval runs/grpo": "--episodes 4",
    },
    "take-over-a-vla": {
        "hilt train sft": "demonstrations=2 max_steps=6 warmup_steps=2",
        "hilt eval runs/imitation": "--episodes 4",
        "hilt train vla_person": "max_steps=90 batch_size=8",
        "hilt eval runs/person": "--episodes 4",
    },
}
"""What `make test` adds to the commands of a page, so that they do little of everything. `make test-long` runs them as
they are"""
TEACHES = {"OPERATOR": "script operator_options.teaches=30 operator_options.window=3"}
"""As the page about taking over a VLA has it, for readers without time"""
Follow = Callable[..., str]


@pytest.fixture(scope="session")
def commands(fork_server: ForkServer) -> Iterator[Path]:
    """The folder of `hilt` and `python`: in `make test` they are forked from a process that has imported torch."""
    with nullcontext(PROGRAMS) if is_long() else forked_commands(fork_server) as folder:
        yield folder


@pytest.fixture
def follow(tmp_path: Path, commands: Path, counted: Callable[[str], None]) -> Follow:
    """Runs a page in an empty folder, and returns what its commands printed."""

    def followed(name: str, variables: Mapping[str, str] | None = None, **options: Any) -> str:
        quick = {} if is_long() else QUICK.get(name)
        options = {"commands": commands, **options}
        page, began = own_copy(PAGES[name], tmp_path / "page", quick), time.monotonic()
        (tmp_path / "work").mkdir()
        set_here = environment() | dict(variables or {})
        try:
            printed = tutorials.TutorialRun(page, tmp_path / "work", set_here, **options).run()
        except tutorials.TutorialError as error:
            for log in sorted((tmp_path / "work").glob("**/*.log")):  # of what a page runs in the background
                error.add_note(f"{log.name} in {log.parent}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
            raise
        counted(f"{time.monotonic() - began:.0f} s")
        return printed

    return followed


def test_check_a_dataset(follow: Follow):
    need("h5py", "av", "pyarrow")
    need_rendering()
    printed = follow("check-a-dataset")
    for fault in ("error  values", "warning  black-frames", "mixes millimeters and", "in every step as data.hdf5"):
        assert fault in printed, "the page promises that it is found"
    assert "exit code 1" in printed and re.search(r"ok: 0 errors, .* in 9 episodes", printed)


def test_own_robot(follow: Follow):
    need("uvicorn", "gymnasium")
    files = {block.name: block.text for block in tutorials.blocks(PAGES["own-robot"]) if block.is_file}
    lines = sum(files[name].count("\n") for name in ("my_arm.py", "arm.yaml", "my_expert.py"))
    assert f"have {lines} lines together" in PAGES["own-robot"].read_text() and lines <= 60
    printed = follow("own-robot")
    assert "is outside the workspace" in printed and "have 4 of 4 episodes" in printed and "ok: 0 errors" in printed


def test_teach_an_arm(follow: Follow):
    need("torch", "av")
    need_rendering()
    printed = follow("teach-an-arm")
    shown = rounds(3, 10)
    assert f"have {shown} of {shown} episodes" in printed and re.search(rf"ok: 0 errors.* in {shown} episodes", printed)
    assert "ended: runs/button" in printed and re.search(r"success +\d+ of \d+: ", printed)
    if is_long():
        assert "the policy that reached the goal is the last checkpoint" in printed


def test_post_train_a_vla(follow: Follow):
    need("torch", "av")
    need_rendering()
    printed = follow("post-train-a-vla")
    assert "runs/imitation/policy" in printed and "runs/grpo/policy" in printed
    successes = [float(share) for share in re.findall(r"^success +\d+ of \d+: ([\d.]+)%", printed, re.MULTILINE)]
    assert len(successes) == 2, "before and after"


def test_take_over_a_vla(follow: Follow):
    need("torch", "av")
    need_rendering()
    printed = follow("take-over-a-vla", variables=TEACHES)
    assert "ended: runs/person" in printed and "take-over.png" in printed
    acted = re.search(r"^steps +[\d,]+: ([\d,]+) policy, ([\d,]+) human", printed, re.MULTILINE)
    assert acted and int(acted[2].replace(",", "")) > 0
    successes = [float(share) for share in re.findall(r"^success +\d+ of \d+: ([\d.]+)%", printed, re.MULTILINE)]
    assert len(successes) == 2, "before and after"


def test_move_from_hil_serl(follow: Follow):
    need("torch", "gymnasium")
    need_rendering()
    printed = follow("move-from-hil-serl")
    assert re.search(r"format +hil-serl", printed) and "ok: 0 errors" in printed and "ended: runs/reach" in printed
    steps = re.search(r"^steps +\d+: .*\b40 demo", printed, re.MULTILINE)
    assert steps and re.search(r"^back/buffer/transitions_\d+\.pkl$", printed, re.MULTILINE)
    assert re.search(r"transitions: \d+ critic loss: \d", printed)


@pytest.fixture
def machines() -> Iterator[Hosts]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    made = Hosts("learner", "arm-1", "arm-2")
    yield made
    made.close()


def test_three_machines(follow: Follow, machines: Hosts):
    """Each of them has a network of its own, in which commands are not forked. The steps of the actor that was killed
    are counted by the episodes that it had reported."""
    need("torch", "gymnasium")
    need_rendering()
    where = {"LEARNER": machines.address["learner"]}
    printed = follow("three-machines", variables=where, on=machines.on, commands=PROGRAMS)
    before, _, after = printed.partition("stopped: ")
    first_life = before.split("arm-2: the learner is at")[1]
    shown = sum(int(steps) for steps in re.findall(r"^episode \d+: (\d+) steps", first_life, re.MULTILINE))
    ended = [int(steps) for steps in re.findall(r"^(?:stopped: )?(\d+) steps, \d+ episodes", after, re.MULTILINE)]
    found = re.search(r"^steps +([\d,]+): ", after, re.MULTILINE)
    assert found and len(ended) == 2 and shown > 0
    assert sum(ended) + shown <= int(found[1].replace(",", "")) < sum(ended) + shown + 60, "the step limit is 60"
    assert re.search(r"senders +arm(?s:.*)capacity", after)[0].count("/actor_env") == 3  # type: ignore[index]


class Visitor:
    """Opens each page whose address a block prints, takes over there, drives, and says that it was a success."""

    def __init__(self, browser: Any):
        self.browser, self.opened, self.began = browser, list[str](), 0.0

    def __call__(self, printed: str) -> None:
        addresses = re.findall(r"\bopen (http://127\.0\.0\.1:\S+)", printed)
        if not addresses:
            return
        if addresses[-1] not in self.opened:
            self.opened.append(addresses[-1])
            chromium.open_page(self.browser, addresses[-1])
        if self.browser.execute_script("return document.querySelector('.hilt').cockpit.online"):
            for name, down in [("t", True), ("t", False), ("q", True)]:
                chromium.key(self.browser, name, down)
            time.sleep(1.5)  # some steps of the arm
            for name, down in [("q", False), ("Enter", True), ("Enter", False)]:
                chromium.key(self.browser, name, down)


@pytest.mark.long
@pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")
def test_teach_an_arm_in_a_browser(tmp_path: Path, chromium_tab: Any):
    need("torch", "av", "nicegui")
    need_rendering()
    page, visitor = own_copy(PAGES["teach-an-arm"], tmp_path / "page", QUICK["teach-an-arm"]), Visitor(chromium_tab)
    (tmp_path / "work").mkdir()
    variables = {**environment(), "OPERATOR": "browser"}
    printed = tutorials.TutorialRun(page, tmp_path / "work", variables, watch=visitor).run()
    assert "have 3 of 3 episodes" in printed and "ended: runs/button" in printed
    assert len(visitor.opened) == 2, "the page of the recording, and that of the run"
    with Log.open(tmp_path / "work/runs/button/log", "r") as log:
        assert len(log.by_source("human")) > 5


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need("jupytext", "nbclient", "ipykernel")
    import nbformat
    from nbclient import NotebookClient

    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", tutorials.with_commands(os.environ["PATH"]))
    (tmp_path / "work").mkdir()
    page = own_copy(PAGES[name], tmp_path / "page", QUICK.get(name))
    made: Any = nbformat.reads(tutorials.notebook(page), as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    NotebookClient(made, timeout=int(tutorials.BLOCK_TIMEOUT_S), kernel_name="python3", resources=resources).execute()
