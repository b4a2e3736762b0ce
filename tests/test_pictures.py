"""The pictures of the pages are what their sources say, can be read on a light and on a dark page, and have a text."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tools import architecture, drawing, pictures

from hilt.observe import statistics
from hilt.replay import Log, QueuedDataStore, Schema
from hilt.wire import TrainerClient, TrainerServer, link, make_trainer_config, server
from tests.wire.processes import DEADLINE_S, free_port

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md")),
    *(page for folder in (".", "site", "tutorials", "zh") for page in sorted((DOCS / folder).glob("*.md"))),
]
DRAWN = {**pictures.PICTURES, "architecture": architecture.picture}


@functools.cache
def drawn(name: str) -> str:
    return DRAWN[name]()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_what_its_source_says(name: str):
    assert drawn(name) == (DOCS / f"{name}.svg").read_text(), f"run: python tools/pictures.py {name}"


def test_an_unknown_picture_is_an_error():
    with pytest.raises(SystemExit, match=r"no pictures named \['life'\]; expected some of \['life-of-an-observation'"):
        pictures.main(["life"])


@pytest.mark.parametrize("name", DRAWN)
def test_every_text_is_within_its_picture(name: str):
    root = ElementTree.fromstring(drawn(name))
    wide = float(root.attrib["width"])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if "transform" in text.attrib:
            continue
        words = text.text or ""
        length = drawing.text_width(words, float(text.attrib["font-size"]), "m" in text.attrib["class"].split())
        left = float(text.attrib["x"]) - {"middle": 0.5, "end": 1.0}.get(text.attrib.get("text-anchor", ""), 0) * length
        assert left >= 6 and left + length <= wide - 6, f"{words!r} does not fit into the picture"


@pytest.mark.parametrize("plan", [pictures.OBSERVATION, pictures.LOG_PROBABILITY], ids=lambda plan: plan.page)
def test_every_hop_is_in_a_column(plan: pictures.Life):
    columns = pictures.columns_of(plan)
    hops = pictures.hops(plan.page)
    assert list(itertools.chain(*columns)) == hops
    assert all(columns) and [column[0].function for column in columns] == [column.first for column in plan.columns]
    assert all(
        f"{number} {hop.function}<" in drawn(plan.page) for number, hop in enumerate(pictures.hops(plan.page), 1)
    )


def test_every_part_of_the_architecture_has_a_group():
    grouped = [part for _, _, parts in architecture.GROUPS for part in parts]
    assert sorted(grouped) == architecture.parts(), "tools/architecture.py: GROUPS colors the parts"


# The names on the wire

WIRE = {path.name: path.read_text() for path in sorted((ROOT / "src/hilt/wire").glob("*.py"))}
SENT_BY = {
    pictures.CLIENT: WIRE["link.py"] + WIRE["weights.py"],
    pictures.SERVER: WIRE["server.py"] + WIRE["weights.py"],
}
CALLED = {  # what a lane stands for in the source
    pictures.QUEUE: ["replay/transfer/queue.py"],
    pictures.CLIENT: ["replay/transfer/queue.py"],  # it is called back by the queue
    pictures.LOG: ["replay/log.py", "replay/writer.py", "replay/transfer/delivered.py"],
}
MESSAGES = [move for scene in pictures.WIRE for move in scene.moves if isinstance(move, pictures.Message)]


def over_the_network(move: pictures.Message) -> bool:
    return {move.sender, move.receiver} == {pictures.CLIENT, pictures.SERVER}


def names_in(source: str) -> set[str]:
    """The functions and attributes that a file defines."""
    tree = ast.parse(source)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return functions | {target.attr for target in targets if isinstance(target, ast.Attribute)}


@pytest.mark.parametrize("move", MESSAGES, ids=lambda move: move.kind)
def test_messages_of_the_sequence_are_those_of_the_wire(move: pictures.Message):
    if over_the_network(move):
        source = SENT_BY[move.sender]
        assert f'"kind": "{move.kind}"' in source, f"{move.sender} sends no {move.kind}"
        for name in re.findall(r"\b(\w+)=|^(\w+),", move.fields):
            assert f'"{"".join(name)}":' in source, f"{move.kind} has no {name}"
    else:
        known = set().union(*(names_in((ROOT / "src/hilt" / file).read_text()) for file in CALLED[move.receiver]))
        assert move.kind in known


def test_lanes_of_the_sequence_are_classes():
    classes = {
        node.name
        for path in (ROOT / "src/hilt").rglob("*.py")
        if path.parent.name in ("wire", "replay", "transfer")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert {lane.name for lane in pictures.LANES} - classes == {pictures.LOOP}


def test_the_wire_sends_what_the_sequence_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps that are stored, and a learner that is started again: the guarantees 2 and 4 of the picture."""
    sent: list[str] = []

    def listen(module: object) -> None:
        encode = module.encode  # type: ignore[attr-defined]

        def heard(message: dict[str, object]) -> object:
            sent.append(str(message.get("kind")))
            return encode(message)

        monkeypatch.setattr(module, "encode", heard)

    listen(link), listen(server)
    step = {"observations": {"state": np.zeros(2, np.float32)}, "rewards": np.float32(0)}
    log = Log.create(tmp_path / "log", Schema.of(step), durability="every step")
    config = make_trainer_config(free_port(), free_port())
    learner, queue = _learner(config, log), QueuedDataStore(100, path=str(tmp_path / "spool"))
    client = TrainerClient("actor", "127.0.0.1", config, data_stores={"env": queue}, wait_for_server=True)
    try:
        queue.insert(step)
        assert client.update(timeout_ms=1000 * DEADLINE_S)
        assert _in_order(["hello", "welcome", "data", "ack"], iter(sent)), sent
        learner.stop()
        log.close()
        sent.clear()
        log = Log.open(tmp_path / "log")
        learner = _learner(config, log)
        queue.insert(step)
        assert client.update(timeout_ms=1000 * DEADLINE_S) and len(log) == 2
        assert _in_order(["stranger", "hello", "welcome", "data", "ack"], iter(sent)), sent
    finally:
        client.stop()
        learner.stop()
        log.close()


def _learner(config: object, log: Log) -> TrainerServer:
    made = TrainerServer(config)  # type: ignore[arg-type]
    made.register_data_store("env", log)
    made.start(threaded=True)
    return made


def _in_order(wanted: list[str], sent: Iterator[str]) -> bool:
    return all(kind in sent for kind in wanted)


# Success by seed


def test_means_are_those_of_the_benchmarks():
    """The table of docs/benchmarks.md was printed by the bench from the same files."""
    table = (DOCS / "benchmarks.md").read_text()
    for row in map(pictures.task_row, ("button", "pick", "peg")):
        before, after = row.runs
        shares = ", ".join(f"{share:.0f}" for share in after.shares)
        assert f"| {row.label} | {row.note.removesuffix(' updates')} | 5 | {shares}% |" in table
        assert re.search(rf"^\| {row.label} \|.*\| {before.mean:.0f}% \| \+", table, re.MULTILINE)


@pytest.mark.parametrize(("successes", "episodes"), [(0, 20), (12, 20), (20, 20), (99, 100)])
def test_intervals_are_those_of_an_evaluation(successes: int, episodes: int):
    expected = [100 * bound for bound in statistics.wilson(successes, episodes)]
    assert pictures.wilson(successes, episodes) == pytest.approx(expected, abs=0.01)


def test_results_that_are_missing_are_an_error():
    with pytest.raises(SystemExit, match=r"no results bench/results/task_none-\*\.json; expected one of each seed"):
        pictures.results("task_none-*.json")


# Light and dark


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colors_can_be_read(dark: bool):
    """By WCAG 2.2 a text has a contrast of at least 4.5, and a line that matters of at least 3."""
    color = {name: pair[dark] for name, pair in drawing.COLORS.items()}
    grounds = [name for name in color if name in ("paper", "panel") or name.endswith("-pale")]
    for ground, text in itertools.product(grounds, ("ink", "soft")):
        assert contrast(color[text], color[ground]) >= 4.5, (text, ground)
    for ground, text in itertools.product(("paper", "panel"), ("teal", "blue", "amber", "red")):
        assert contrast(color[text], color[ground]) >= 4.5, (text, ground)
    assert min(contrast(color["line"], color[ground]) for ground in ("paper", "panel")) >= 3


@pytest.mark.parametrize("name", DRAWN)
def test_picture_has_a_light_and_a_dark_form(name: str):
    light, dark = drawing.themed(drawn(name), dark=False), drawing.themed(drawn(name), dark=True)
    assert drawing.DARK in drawn(name) and "prefers-color-scheme" not in light + dark
    assert "@media not all" in light and "@media all" in dark
    ElementTree.fromstring(light), ElementTree.fromstring(dark)


# Texts for those who do not see them

IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|<img alt=\"([^\"]*)\" src=\"([^\"]+)\"")


def images() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for found in IMAGE.findall(page.read_text()):
            yield page, found[0] or found[2], found[1] or found[3]


def words(text: str) -> float:
    """How many words a text has; two Chinese characters are about one."""
    chinese = re.findall(r"[\u4e00-\u9fff]", text)
    return len(chinese) / 2 + len(re.findall(r"[A-Za-z0-9][\w'-]*", text))


def test_every_picture_has_a_text():
    short = [f"{page.relative_to(ROOT)}: {target} has {text!r}" for page, text, target in images() if words(text) < 5]
    assert short == [], "the text says what is to be seen, in five words or more"


def test_dark_forms_are_beside_the_light_ones():
    for page in PAGES:
        for dark, light in re.findall(r'srcset="([^"]+)">\s*<img alt="[^"]*" src="([^"]+)"', page.read_text()):
            assert dark == f"{light[:-4]}-dark.png" and (page.parent / dark).is_file(), f"{page.name}: {dark}"


def test_every_picture_is_shown():
    shown = {(page.parent / target).resolve() for page, _, target in images()}
    files = {
        path for folder in (DOCS, DOCS / "tutorials") for path in folder.iterdir() if path.suffix in (".svg", ".png")
    }
    assert sorted(path.name for path in shown - files) == [], "pages show files that are not there"
    twins = {path for path in files if path.stem.endswith("-dark") and path.with_stem(path.stem[:-5]) in shown}
    assert sorted(path.name for path in files - shown - twins) == [], "files that no page shows"
