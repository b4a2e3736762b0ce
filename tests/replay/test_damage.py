"""Damage of every kind, in every file of a log: it is found and named, the damaged
steps are put aside, the rest is right.

Each test damages a copy of one log that has everything: sealed segments with raw and with compressed frames, one that
is not sealed, late facts, and steps that are in quarantine already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import CorruptError, FormatError, HiltError, StorageError, UnknownNameError, VersionError
from hilt.replay import Log
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.maintenance.repair import repair, verify
from hilt.replay.storage.records import FORMAT
from hilt.replay.storage.segment import Segment
from tests.effort import is_long, rounds, sampled
from tests.replay.known_steps import IMAGE, SPACING, all_keys, check_contents, columns, length, make_log, trajectory
from tests.replay.writers import DEADLINE_S, Writer

FLIPS = rounds(2, 30)
"""Bits that are flipped per file, one at a time."""


class Pristine:
    """The log that is damaged, and what is in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        seeds = iter(range(0, 10**6, SPACING))
        with make_log(folder) as log:  # raw segments
            for _ in range(3):
                log.add(trajectory(next(seeds), 4, 3), actor="batch")
            spoilt = log.add(trajectory(next(seeds), 2, 5), actor="batch")
            log.annotate(0, success=True)
        self.quarantined = self._spoil(spoilt)
        with Log.open(folder, compression={IMAGE: "zlib"}) as log:  # compressed ones
            for _ in range(3):
                log.add(trajectory(next(seeds), 4, 3), actor="other", facts={"tag": 1})
            log.compress()
            episode, seed = log.episode(actor="arm"), next(seeds)  # and one that is not sealed
            for t in range(length(seed) - 1):
                episode.append(columns(seed, t))
            log.annotate(1, success=False)
            log.relabel(2, "shape", np.full((3, 2), (4, 3), np.int32))
            self.keys = set(all_keys(log))
            self.facts = {number: log.facts.about(number) for number in log.trajectories()}
            self.sealed = [s.folder.name for s in log.segments if s.sealed]
            self.compressed = [s.folder.name for s in log.segments if s.codecs]
            self.open_segment = next(s.folder.name for s in log.segments if s.sealed is None)

    def _spoil(self, number: int) -> set[int]:
        """One frame of this trajectory is damaged, and the log repaired."""
        with Log.open(self.folder, "r") as log:
            entry = log.index.entries[log.index.places_of(number)[0]]
            path = self.folder / f"segments/{int(entry['segment']):06d}" / "observations.image.frames"
            keys = set(all_keys(log))
        raw = bytearray(path.read_bytes())
        raw[-10] ^= 4
        path.write_bytes(raw)
        repair(self.folder)
        with Log.open(self.folder, "r") as log:
            gone = keys - set(all_keys(log))
        assert 1 <= len(gone) <= 2
        return gone

    def files(self) -> list[str]:
        """Every file, by its path in the folder."""
        found = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "writer.lock"]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.folder, target)
        return target


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return Pristine(tmp_path_factory.mktemp("damage") / "log")


KINDS = {
    "log.json": "log.json",
    "facts": "annotations.jsonl",
    "quarantine": "quarantine.json",
    "what it held when it was closed": "closed.json",
    "what an open segment held": "{open}/extents.held",
    "header of a sealed segment": "{sealed}/header.json",
    "header of an open segment": "{open}/header.json",
    "seal": "{sealed}/seal.json",
    "seal of a compressed segment": "{compressed}/seal.json",
    "extents": "{sealed}/extents",
    "extents of a compressed segment": "{compressed}/extents",
    "rows of a sealed segment": "{sealed}/rows",
    "rows of a compressed segment": "{compressed}/rows",
    "rows of an open segment": "{open}/rows",
    "raw frames": "{sealed}/observations.image.frames",
    "raw frames of an open segment": "{open}/observations.image.frames",
    "compressed frames": "{compressed}/observations.image.frames.zlib",
}


def path_of(kind: str, pristine: Pristine) -> str:
    named = {"sealed": pristine.sealed[0], "compressed": pristine.compressed[0], "open": pristine.open_segment}
    path = KINDS[kind].format(**named)
    return path if "/" not in path else f"segments/{path}"


def test_the_kinds_are_all_there_are(pristine: Pristine):
    assert {path_of(kind, pristine).rpartition("/")[2] for kind in KINDS} == {
        path.rpartition("/")[2] for path in pristine.files()
    }
    with Log.open(pristine.folder, "r") as log:
        assert set(check_contents(log, whole=False)) == pristine.keys
        assert len(log.damage()) == log.stats()["corrupt"] == len(pristine.quarantined)


def flips(raw: bytes, rng: np.random.Generator) -> list[int]:
    """Some bits of a file: its last, others anywhere, and its first where there are many."""
    return [8 * len(raw) - 1, *rng.integers(8 * len(raw), size=FLIPS - 1).tolist(), *[0] * is_long()]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "log.json"])
def test_a_flipped_bit(kind: str, pristine: Pristine, memory_path: Path, counted: Callable[[str], None]):
    file = path_of(kind, pristine)
    original = (pristine.folder / file).read_bytes()
    rng, lost = np.random.default_rng(len(kind)), 0
    for number, bit in enumerate(flips(original, rng)):
        folder = pristine.copy(memory_path / str(number))
        raw = bytearray(original)
        raw[bit // 8] ^= 1 << bit % 8
        (folder / file).write_bytes(raw)
        lost += check_damaged(folder, file, pristine, kind)
        shutil.rmtree(folder)
    counted(f"{number + 1} flipped bits, each found and named; {lost} steps lost in all")


def check_damaged(folder: Path, file: str, pristine: Pristine, kind: str) -> int:
    """A reader and a writer open it; what they do not show is damaged and counted,
    what they show after a repair is right."""
    with Log.open(folder, "r") as reader:
        found = named(reader)
        assert file in found, f"{file} is not named in {found}"
        seen = check_rest(reader, pristine, kind, everything=not damaged_steps(kind))
    with Log.open(folder) as writer:
        assert file in found | named(writer)
        check_rest(writer, pristine, kind, everything=not damaged_steps(kind))
    report = repair(folder)
    with Log.open(folder) as log:
        present = set(check_contents(log, whole=False))
        gone = pristine.keys - present
        assert len(gone) <= LOST[damaged_steps(kind)], f"{len(gone)} steps are lost"
        assert not present - pristine.keys
        assert log.stats()["corrupt"] >= len(gone)
        assert {d.what for d in log.damage()} == {d.what for d in log.quarantine.list()}, report.findings
        log.add(trajectory(10**7 * SPACING, 4, 3))
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) >= present
    assert seen is not None
    return len(gone)


LOST = {"": 0, "frame": 2, "block": 12}
"""How many steps one bit may cost: a frame belongs to two steps, and rows are
checked in blocks, here of one trajectory."""


def damaged_steps(kind: str) -> str:
    return "frame" if "frames" in kind else "block" if "rows" in kind else ""


def named(log: Log) -> set[str]:
    """Every file that opening the log or reading all of it found damaged, by its path in the folder."""
    files = {str(path.relative_to(log.path)) for path in log.path.rglob("*")}
    found = {f"segments/{d.segment:06d}/{d.what.partition(':')[0]}" for d in log.damage()}
    found |= {file for file in files for text in log.recovery.mended if file in text}
    if log.facts.corrupt_lines or log.facts.torn_bytes or log.recovery.torn_bytes:
        found.add("annotations.jsonl")
    return found


def check_rest(log: Log, pristine: Pristine, kind: str, everything: bool) -> list[int]:
    """Before a repair: every step is there and right that a damaged file does not concern."""
    bad = {key for damage in log.damage() for key in keys_of(log, damage.segment, damage.first, damage.rows)}
    present = set(all_keys(log))
    good = sorted(present - bad)
    check_contents(log, good)
    assert not present - pristine.keys, "steps appear that nobody wrote"
    assert not present & pristine.quarantined, "a step in quarantine is shown again"
    assert pristine.keys - present - bad == set() or not everything
    assert len(pristine.keys - set(good)) <= LOST[damaged_steps(kind)]
    if kind == "facts":
        kept = [number for number, facts in pristine.facts.items() if log.facts.about(number) == facts]
        assert len(kept) >= len(pristine.facts) - 2
    else:
        assert {number: log.facts.about(number) for number in pristine.facts} == pristine.facts
    return good


def keys_of(log: Log, segment: int, first: int, rows: int) -> list[int]:
    """The keys of the steps that lie in some rows of a segment."""
    keys = []
    for entry in log.index.entries[log.index.entries["segment"] == segment]:
        start = int(entry["at"]) % next(s.room for s in log.segments if s.number == segment)
        keys += [
            int(entry["key"]) + row - start
            for row in range(max(start, first), min(start + int(entry["steps"]), first + rows))
        ]
    return keys


def test_a_flipped_bit_in_the_settings(pristine: Pristine, tmp_path: Path):
    """Without its settings a log does not open; the error names the file, and a repair brings it back."""
    folder = pristine.copy(tmp_path / "log")
    raw = bytearray((folder / "log.json").read_bytes())
    raw[100] ^= 1
    (folder / "log.json").write_bytes(raw)
    for mode in ("r", "a"):
        with pytest.raises(CorruptError, match=r"log\.json: .*restore it from a copy or run: hilt data repair"):
            Log.open(folder, mode)  # type: ignore[arg-type]
    repair(folder)
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) == pristine.keys


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.startswith(("header", "seal", "extents", "quarantine"))]
)
@pytest.mark.parametrize("how", sampled(["missing", "empty", "garbage"], "missing", "garbage"))
def test_a_small_file_is_rebuilt(
    kind: str, how: str, pristine: Pristine, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, file = pristine.copy(tmp_path / "log"), path_of(kind, pristine)
    if how == "missing":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(b"" if how == "empty" else b"garbage" * 100)
    if (kind, how) == ("quarantine", "missing"):
        return  # there is nothing that tells that it ever was
    if (kind, how) == ("seal", "missing"):
        with Log.open(folder) as log:  # it is as if its writer had been killed before it sealed it
            assert set(check_contents(log, whole=False)) == pristine.keys
        return
    with Log.open(folder, "r") as log, caplog.at_level(logging.WARNING):
        assert set(check_contents(log, whole=False)) == pristine.keys
        assert any(file in text for text in log.recovery.mended)
    caplog.clear()
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) == pristine.keys
        assert any(file in text for text in log.recovery.mended)
        assert file in caplog.text
    with Log.open(folder) as log:
        assert log.recovery.mended == []
        assert set(check_contents(log, whole=False)) == pristine.keys
        assert verify(folder).ok


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "frames" in kind or "rows" in kind])
@pytest.mark.parametrize("how", sampled(["missing", "empty", "half"], "missing", "half"))
def test_a_cut_or_missing_data_file(kind: str, how: str, pristine: Pristine, tmp_path: Path):
    """Its steps are gone and counted; those of the other segments, and those before the cut, are right."""
    folder, file = pristine.copy(tmp_path / "log"), path_of(kind, pristine)
    path = folder / file
    path.unlink() if how == "missing" else os.truncate(path, 0 if how == "empty" else path.stat().st_size // 2)
    segment = path.parent.name
    with Log.open(pristine.folder, "r") as log:
        mine = {
            int(e["key"]) + i
            for e in log.index.entries
            if int(e["segment"]) == int(segment)
            for i in range(int(e["steps"]))
        }
    for mode in ("r", "a", "a"):
        with Log.open(folder, mode) as log:  # type: ignore[arg-type]
            present = set(check_contents(log, whole=False))
            assert present >= pristine.keys - mine and not present - pristine.keys
            assert log.stats()["corrupt"] >= len(pristine.keys - present) or "rows of an open" in kind
            if how == "half" and "frames" in kind:
                assert present & mine, "the steps before the cut are whole"
    with Log.open(folder) as log:
        log.add(trajectory(10**7 * SPACING, 4, 3))


def test_unreadable_segment_is_set_aside(pristine: Pristine, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder, segment = pristine.copy(tmp_path / "log"), pristine.sealed[1]
    (folder / "segments" / segment / "rows").write_bytes(os.urandom(3000))
    (folder / "segments" / segment / "header.json").write_bytes(b"?")
    with Log.open(folder, "r") as log:
        assert log.recovery.set_aside == [segment]
        seen = set(check_contents(log, whole=False))
        assert (
            log.stats()["corrupt"]
            == len(pristine.quarantined) + 12
            == len(pristine.quarantined) + len(pristine.keys - seen)
        )
        log.refresh()
        assert set(all_keys(log)) == seen
    assert (folder / "segments" / segment).exists(), "a reader changes nothing"
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) == seen
        assert log.recovery.set_aside == [segment]
        assert f"segments set aside: {segment}" in caplog.text
        added = log.add(trajectory(10**7 * SPACING, 4, 3))
    assert (folder / "damaged" / segment / "rows").exists()
    with Log.open(folder) as log:
        assert log.recovery.set_aside == [segment], "it is named for as long as it lies there"
        assert log.stats()["corrupt"] == len(pristine.quarantined) + 12
        assert added in log.trajectories()
        assert int(segment) not in [s.number for s in log.segments]


def test_the_newest_segment_set_aside_keeps_its_number(tmp_path: Path):
    with make_log(tmp_path / "log") as log:
        log.add(trajectory(0, 4, 3))
    (tmp_path / "log/segments/000000/rows").unlink()
    with Log.open(tmp_path / "log") as log:
        log.add(trajectory(SPACING, 4, 3))
        assert [s.number for s in log.segments] == [1]
        assert log.recovery.set_aside == ["000000"]


def test_damage_under_an_open_log_is_found(pristine: Pristine, tmp_path: Path):
    """`damage()` reads the files, not what it remembers of them."""
    folder = pristine.copy(tmp_path / "log")
    with Log.open(folder) as log:
        before = {(d.segment, d.what) for d in log.damage()}
        for file in ("header.json", "seal.json", "extents", "observations.image.frames", "rows"):
            path = folder / "segments" / pristine.sealed[0] / file
            with path.open("r+b") as stream:
                stream.seek(40)
                byte = stream.read(1)
                stream.seek(40)
                stream.write(bytes([byte[0] ^ 16]))
            found = {(d.segment, d.what) for d in log.damage()} - before
            assert [what for _, what in found if what.startswith(f"{file}:")], f"{file} is not in {found}"
            before |= found


def test_only_the_steps_of_a_damaged_frame_are_lost(tmp_path: Path):
    """In the middle of an episode: the step that ends with the frame and the one that begins with it."""
    folder = tmp_path / "log"
    with make_log(folder) as log, log.episode() as episode:
        for t in range(8):
            episode.append(columns(10 * SPACING, t))
    path = folder / "segments/000000/observations.image.frames"
    raw = bytearray(path.read_bytes())
    raw[4 * 3072 + 17] ^= 1
    path.write_bytes(raw)
    with Log.open(folder) as log:
        assert [key & 0xFFFFFFFF for key in check_contents(log)] == [0, 1, 2, 5, 6, 7]
        assert log.recovery.corrupt_steps == 2
        assert [d.what for d in log.quarantine.list()] == 2 * [
            "observations.image.frames: frame 4 does not have its checksum"
        ]
        sequences = log.all().sampler(sequence_length=8, seed=0).sample(64)
        assert sequences["mask"].sum(axis=1).max() == 3, "a window never crosses the gap"


# Cut while somebody reads


def read_when_told(pipe: object, folder: Path, column: str) -> None:
    """Samples, waits, samples again, and reports the error of that.

    The file is cut between two batches: in the moment between a batch's look at the sizes and its read, the system
    would end the process, as docs/replay.md says.
    """
    from multiprocessing.connection import Connection

    assert isinstance(pipe, Connection)
    try:
        log = Log.open(folder, "r")
        sampler = log.all().sampler(seed=0)
        batch = sampler.sample(16, keys=[column])
        pipe.send(("sampled", len(batch)))
        assert pipe.recv() == "go"
        sampler.sample(64, keys=[column])
    except HiltError as error:
        pipe.send(("error", type(error).__name__, str(error)))


@pytest.mark.parametrize("size", [0, 5000])
@pytest.mark.parametrize(("file", "column"), [("rows", "rewards"), ("observations.image.frames", "observations/image")])
def test_a_file_cut_under_a_reader_is_an_error_and_no_crash(file: str, column: str, size: int, tmp_path: Path):
    folder = tmp_path / "log"
    with make_log(folder, segment_bytes=10**6) as log:
        for i in range(10):
            log.add(trajectory(i * SPACING, 4, 4))
    reader = Writer(read_when_told, folder, column)
    reader.listen(DEADLINE_S, "sampled")
    os.truncate(folder / "segments/000000" / file, size)
    reader.pipe.send("go")
    reader.listen(DEADLINE_S, "error")
    assert reader.reports[-1][:2] == ("error", "CorruptError"), reader.reports[-1]
    assert f"{file}: the file ends too early" in reader.reports[-1][2]
    assert reader.join() == 0


def append_when_told(pipe: object, folder: Path) -> None:
    from multiprocessing.connection import Connection

    assert isinstance(pipe, Connection)
    try:
        log = make_log(folder, segment_bytes=10**7)
        episode = log.episode()
        for t in range(10):
            episode.append(columns(10 * SPACING, t))
        pipe.send(("written",))
        assert pipe.recv() == "go"
        episode.append(columns(10 * SPACING, 10))
    except HiltError as error:
        pipe.send(("error", type(error).__name__, str(error)))


def test_a_file_cut_under_the_writer_is_an_error_and_no_crash(tmp_path: Path):
    """It compares each observation with the frame before, in the map of the file."""
    folder = tmp_path / "log"
    writer = Writer(append_when_told, folder)
    writer.listen(DEADLINE_S, "written")
    os.truncate(folder / "segments/000000/observations.image.frames", 0)
    writer.pipe.send("go")
    writer.listen(DEADLINE_S, "error")
    assert "the file ends too early" in writer.reports[-1][2]
    assert writer.join() == 0


# What is not ours


def test_foreign_files_are_left_alone(pristine: Pristine, tmp_path: Path):
    folder = pristine.copy(tmp_path / "log")
    strangers = ["notes.txt", ".DS_Store", "segments/readme", "segments/.hidden", "segments/123"]
    strangers.append(f"segments/{pristine.sealed[0]}/thumbs.db")
    for name in strangers:
        (folder / name).write_text("mine")
    (folder / "segments/old copies").mkdir()
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) == pristine.keys
        log.add(trajectory(10**7 * SPACING, 4, 3))
    for name in strangers:
        assert (folder / name).read_text() == "mine"
    assert (folder / "segments/old copies").exists()


def test_an_empty_segment_folder_of_somebody_is_set_aside(pristine: Pristine, tmp_path: Path):
    folder = pristine.copy(tmp_path / "log")
    (folder / "segments/000500").mkdir()
    with Log.open(folder, "r") as log:
        assert set(check_contents(log, whole=False)) == pristine.keys
    with Log.open(folder) as log:
        assert set(check_contents(log, whole=False)) == pristine.keys
        assert log.recovery.set_aside == ["000500"]
        log.add(trajectory(10**7 * SPACING, 4, 3))


def test_settings_that_are_another_files(pristine: Pristine, tmp_path: Path):
    folder = pristine.copy(tmp_path / "log")
    shutil.copy(folder / "segments" / pristine.open_segment / "header.json", folder / "log.json")
    with pytest.raises(FormatError, match=r"not a Hilt log \(no format version or schema in it\)"):
        Log.open(folder, "r")


@pytest.mark.parametrize("file", ["rows", "header.json", "seal.json"])
def test_a_file_that_cannot_be_read_is_an_error_of_ours(file: str, pristine: Pristine, tmp_path: Path):
    """A folder in its place, or a link to itself."""
    for how in ("folder", "link"):
        path = pristine.copy(tmp_path / how) / "segments" / pristine.open_segment / file
        path.unlink(missing_ok=True)
        path.mkdir() if how == "folder" else path.symlink_to(path)
        if file == "rows":
            (path.parent / "header.json").write_text("{}")
        with contextlib.suppress(HiltError), Log.open(tmp_path / how, "r") as log:
            check_contents(log, whole=False)


@pytest.mark.parametrize("kind", ["rows of a sealed segment", "raw frames"])
def test_a_folder_in_the_place_of_a_data_file_is_an_error_of_ours(kind: str, pristine: Pristine, memory_path: Path):
    """Some file systems cannot tell how long a folder is."""
    path = pristine.copy(memory_path / "log") / path_of(kind, pristine)
    path.unlink()
    path.mkdir()
    with pytest.raises(HiltError, match="a folder is where this file was; run: hilt data repair"):
        Log.open(memory_path / "log", "r").close()


def test_a_newer_log_is_refused(pristine: Pristine, tmp_path: Path):
    folder = pristine.copy(tmp_path / "log")
    write_json(folder / "log.json", {**read_json(folder / "log.json"), "format": FORMAT + 1})
    text = f"log: written in format {FORMAT + 1}, this Hilt reads up to {FORMAT}. Upgrade: pip install -U hilt"
    with pytest.raises(VersionError, match=text):
        Log.open(folder)


def test_a_newer_segment_is_refused_and_not_set_aside(pristine: Pristine, tmp_path: Path):
    folder = pristine.copy(tmp_path / "log")
    header = folder / "segments" / pristine.sealed[0] / "header.json"
    write_json(header, {**read_json(header), "format": FORMAT + 1})
    for mode in ("r", "a"):
        with pytest.raises(VersionError, match=f"{pristine.sealed[0]}: written in format {FORMAT + 1}"):
            Log.open(folder, mode)  # type: ignore[arg-type]
    assert header.exists()


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"\x00" * 50, b'{"format": 1}', json.dumps({"format": 1, "schemas": []}).encode()]
)
def test_a_foreign_log_json_is_refused(text: bytes, tmp_path: Path):
    (tmp_path / "log.json").write_bytes(text)
    with pytest.raises(CorruptError, match=r"log\.json: "):
        Log.open(tmp_path)


def test_opening_what_is_no_log_is_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        FormatError, match=r"folder: not a Hilt log \(no log.json in it\). Give the folder that Log.create made"
    ):
        Log.open(tmp_path / "folder")
    with pytest.raises(StorageError, match="file: Not a directory"):
        Log.open(tmp_path / "file")
    with pytest.raises(StorageError, match=r"absent: No such file or directory\. Check the path"):
        Log.open(tmp_path / "absent")


def test_reading_a_damaged_compressed_frame_is_an_error(pristine: Pristine, tmp_path: Path):
    """Not a wrong picture, and not an error of zlib."""
    folder, segment = pristine.copy(tmp_path / "log"), pristine.compressed[1]
    path = folder / "segments" / segment / "observations.image.frames.zlib"
    raw = bytearray(path.read_bytes())
    raw[1:20] = bytes(19)
    path.write_bytes(raw)
    with Log.open(folder, "r") as log:
        entry = next(e for e in log.index.entries if int(e["segment"]) == int(segment) and e["steps"] == 12)
        with pytest.raises(
            CorruptError, match=r"frame 0 of observations/image does not decompress .*; run: hilt data repair"
        ):
            log.read(np.array([int(entry["key"])]), columns=["observations"])
        rest = [int(entry["key"]) + i for i in range(8, 12)]
        check_contents(log, rest)


def test_a_sealed_segment_lists_no_row_twice(pristine: Pristine):
    with Log.open(pristine.folder, "r") as log:
        for segment in log.segments:
            assert isinstance(segment, Segment)
            if segment.sealed:
                extents = segment.extents()
                rows = np.concatenate([np.arange(e["row"], e["row"] + e["steps"]) for e in extents])
                assert len(np.unique(rows)) == len(rows)
                assert (extents["trajectory"] << OFFSET_BITS >= 0).all()


@pytest.mark.parametrize("verify_reads", ["always", "sampled"])
def test_no_flipped_bit_gives_a_wrong_batch(
    verify_reads: str, pristine: Pristine, memory_path: Path, counted: Callable[[str], None]
):
    """Read without a look at the rest: a damaged row is an error, and so is a
    damaged frame, at once or after some batches."""
    rng, errors = np.random.default_rng(5), 0
    for kind in ("rows of a sealed segment", "rows of a compressed segment", "raw frames", "compressed frames"):
        original = (pristine.folder / path_of(kind, pristine)).read_bytes()
        for number in range(rounds(6, 40)):
            folder = pristine.copy(memory_path / f"{kind} {number}")
            raw = bytearray(original)
            raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
            (folder / path_of(kind, pristine)).write_bytes(raw)
            with Log.open(folder, "r", verify_reads=verify_reads) as log:
                keys = np.array(all_keys(log))
                try:
                    for _ in range(100 if kind == "raw frames" and verify_reads == "sampled" else 1):
                        log.read(keys)
                except CorruptError as error:
                    assert f"hilt data repair {folder}" in str(error)
                    assert f"segments/{path_of(kind, pristine).split('/')[1]}" in str(error)
                    errors += 1
                else:  # a bit that no step refers to
                    check_contents(log, keys.tolist())
            shutil.rmtree(folder)
    counted(f"{errors} of {4 * rounds(6, 40)} flipped bits were errors, the others in nothing that is read")
    assert errors >= rounds(12, 80)


def test_verify_reads_never_still_checks_the_bounds(pristine: Pristine, tmp_path: Path):
    """A frame number beyond the file would end the process, or show the frame of another segment."""
    folder = pristine.copy(tmp_path / "log")
    segment = folder / "segments" / pristine.sealed[0]
    row = Segment.open(segment).layout.row
    rows = np.fromfile(segment / "rows", row)
    for wrong in (10**9, 10**15, -1, 2**62):
        rows["observations/image"]["frame"][0] = wrong
        rows.tofile(segment / "rows")
        said = f"refers to frame {wrong}, and there are"
        with Log.open(folder, "r", verify_reads="never") as log, pytest.raises(CorruptError, match=said):
            log.read(all_keys(log))
    with pytest.raises(UnknownNameError, match="verify_reads"):
        Log.open(folder, "r", verify_reads="sometimes")
