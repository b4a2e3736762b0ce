"""Every kind of damage in every kind of file: found, named, mended; and what is whole stays as it was."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    HiltError,
    LockedError,
    SchemaError,
    StorageError,
    VersionError,
)
from hilt.core.files import Files
from hilt.core.tree import ArraySpec
from hilt.replay import Log, Schema
from hilt.replay.maintenance.findings import LogReport, Span
from hilt.replay.maintenance.repair import merge, repair, split, verify
from tests.effort import rounds, sampled, some_of
from tests.replay import vandal

EPISODES, LENGTH = 6, 15
IMAGE = "observations.image.frames"


def step(episode: int, t: int, last: int = LENGTH - 1) -> dict[str, Any]:
    """Everything about a step is known from its episode and time."""

    def observation(at: int) -> dict[str, Any]:
        generator = np.random.default_rng((episode, at))
        tile = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        return {"image": np.tile(tile, (4, 4, 1)), "state": generator.normal(size=3).astype(np.float32)}

    return {
        "observations": observation(t),
        "actions": np.full(2, episode, np.float32),
        "rewards": np.float32(t),
        "next_observations": observation(t + 1),
        "truncated": np.bool_(t == last),
    }


def record(log: Log, episodes: range, length: int = LENGTH) -> None:
    for episode in episodes:
        with log.episode(actor=f"arm-{episode % 2}", boot="b") as running:
            for t in range(length):
                running.append(step(episode, t, length - 1), sequence=episode * length + t)
        log.annotate(running.trajectory, success=episode % 2 == 0, episode=episode)


CODECS = [None, "zlib", "zstd"]
each_codec = pytest.mark.parametrize("original", sampled(CODECS, None, "zstd"), indirect=True)
"""Of tests in which frames are damaged"""


@pytest.fixture(scope="module", params=sampled(CODECS, None))
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of three sealed segments and one that is not; the sealed ones compressed, or not."""
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    folder = tmp_path_factory.mktemp("original") / "log"
    compression = {"observations/image": request.param} if request.param else None
    with Log.create(folder, Schema.of(step(0, 0)), segment_bytes=80_000, compression=compression) as log:
        record(log, range(EPISODES))
        assert len(log.segments) == 4
    return folder


@pytest.fixture
def log_folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "log"))


@pytest.fixture(scope="module")
def original_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, never compressed."""
    folder = tmp_path_factory.mktemp("plain") / "log"
    with Log.create(folder, Schema.of(step(0, 0)), segment_bytes=80_000) as log:
        record(log, range(EPISODES))
    return folder


@pytest.fixture
def plain(original_plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original_plain, tmp_path / "log"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def steps_of(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Every step that the log shows, by trajectory and offset."""
    with Log.open(folder, "r") as log:
        keys = log.all().keys()
        batch = log.read(keys)
        return {
            (int(key) >> 32, int(key) & 0xFFFFFFFF): {
                "image": batch["observations"]["image"][i].tobytes(),
                "next_image": batch["next_observations"]["image"][i].tobytes(),
                "state": batch["observations"]["state"][i].tobytes(),
                "reward": float(batch["rewards"][i]),
            }
            for i, key in enumerate(keys)
        }


@functools.cache
def expected(episode: int, t: int) -> dict[str, Any]:
    made = step(episode, t)
    return {
        "image": made["observations"]["image"].tobytes(),
        "next_image": made["next_observations"]["image"].tobytes(),
        "state": made["observations"]["state"].tobytes(),
        "reward": float(t),
    }


def require_whole_but(folder: Path, lost: set[tuple[int, int]]) -> None:
    """The log shows exactly what was recorded, without the steps in `lost`."""
    shown = steps_of(folder)
    assert set(shown) == {(e, t) for e in range(EPISODES) for t in range(LENGTH)} - lost
    assert all(found == expected(*place) for place, found in shown.items())


def steps_named(report: LogReport) -> set[tuple[int, int]]:
    return {(s.trajectory, s.first + i) for f in report.of("damage") for s in f.steps for i in range(s.steps)}


def mend(folder: Path) -> LogReport:
    """Verify, repair; then nothing is wrong any more, and a second repair does nothing."""
    found = verify(folder)
    assert not found.ok
    repair(folder)
    assert verify(folder).ok
    assert repair(folder).mended == []
    return found


# --- verify
# ----------------------------------------------------------------------------------------------------------------------


def test_a_whole_log_has_no_findings(log_folder: Path):
    seen: list[tuple[int, int]] = []
    report = verify(log_folder, lambda done, total: seen.append((done, total)))
    assert (report.ok, report.findings) == (True, [])
    assert (report.steps, report.trajectories, report.segments) == (EPISODES * LENGTH, EPISODES, 4)
    assert report.frames >= EPISODES * (LENGTH + 1)
    assert report.facts == EPISODES + 2  # and the two senders
    assert report.bytes == sum(p.stat().st_size for p in log_folder.rglob("*") if p.is_file())
    assert seen[-1] == (report.bytes, report.bytes) and len(seen) == 5
    assert repair(log_folder).mended == []


@each_codec
@pytest.mark.parametrize("seed", range(rounds(2, 30)))
def test_a_flipped_bit_anywhere_is_found_named_and_mended(log_folder: Path, seed: int):
    """One bit in every file of the log, each time in a fresh copy."""
    generator = random.Random(seed)
    files = [
        p.relative_to(log_folder) for p in sorted(log_folder.rglob("*")) if p.is_file() and p.name != "writer.lock"
    ]
    generator.shuffle(files)
    for file in files[:4]:  # some, each time others
        folder = Path(shutil.copytree(log_folder, log_folder.with_name("copy")))
        flip(folder / file, generator.randrange((folder / file).stat().st_size), generator.randrange(8))
        found = mend(folder)
        assert any(str(file) == finding.file for finding in found.of("damage")), f"{file}: {found.findings}"
        lost = steps_named(found)
        assert bool(lost) == (file.name == "rows" or (".frames" in file.name and not _is_index(found)))
        require_whole_but(folder, lost)
        shutil.rmtree(folder)


def _is_index(report: LogReport) -> bool:
    return any("index" in finding.what for finding in report.findings)


def test_damage_in_a_frame_names_the_steps_that_show_it(plain: Path):
    flip(plain / "segments/000000" / IMAGE, 5 * 3072 + 17)
    (finding,) = verify(plain).findings
    assert (finding.kind, finding.file) == ("damage", f"segments/000000/{IMAGE}")
    assert finding.what == "frame 5 does not have its checksum"
    assert finding.steps == (Span(0, 4, 2),)
    assert str(finding) == f"segments/000000/{IMAGE}: frame 5 does not have its checksum (trajectory 0 steps 4-5)"
    report = repair(plain)
    assert report.mended == [f"{finding}: in quarantine"]
    require_whole_but(plain, {(0, 4), (0, 5)})
    with Log.open(plain) as log:
        assert log.recovery.corrupt_steps == 2
    after = verify(plain)
    assert after.ok and [f.kind for f in after.findings] == ["quarantined"]


@pytest.mark.parametrize("row", [0, 7, LENGTH - 1])
def test_damage_in_a_row_names_its_step_by_extents_or_by_neighbors(plain: Path, row: int):
    sealed, last = sorted((plain / "segments").iterdir())[0], sorted((plain / "segments").iterdir())[-1]
    size = (sealed / "rows").stat().st_size // read_json(sealed / "seal.json")["rows"]
    flip(sealed / "rows", row * size + 20)
    (finding,) = verify(plain).findings
    assert finding.steps == (Span(0, row, 1),)
    assert f"row {row} does not have its checksum" in finding.what
    (sealed / "seal.json").unlink()
    (sealed / "extents").unlink()
    (again,) = verify(plain).findings
    assert again.steps == finding.steps
    flip(last / "rows", (last / "rows").stat().st_size - 1)  # the last row of all: damage, not a torn tail
    assert verify(plain).of("damage")[-1].steps == (Span(EPISODES - 1, LENGTH - 1, 1),)
    mend(plain)
    require_whole_but(plain, {(0, row), (EPISODES - 1, LENGTH - 1)})


def test_bytes_that_are_restored_are_set_free(plain: Path):
    flip(plain / "segments/000000" / IMAGE, 5 * 3072)
    repair(plain)
    flip(plain / "segments/000000" / IMAGE, 5 * 3072)
    assert repair(plain).mended == ["quarantine.json: 2 steps are whole again and were set free"]
    require_whole_but(plain, set())


def test_a_report_is_readable_by_machines(plain: Path):
    flip(plain / "segments/000000" / IMAGE, 0)
    data = json.loads(json.dumps(verify(plain).to_json()))
    assert data["ok"] is False
    assert data["findings"][0]["steps"] == [{"trajectory": 0, "first": 0, "steps": 1}]


# --- what is rebuilt
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", sampled(["flip", "delete", "empty"], "flip", "delete"))
@pytest.mark.parametrize(
    "file", ["segments/000000/header.json", "segments/000000/seal.json", "segments/000000/extents", "log.json"]
)
def test_files_that_follow_from_others_are_rebuilt(log_folder: Path, file: str, damage: str):
    path = log_folder / file
    if damage == "flip":
        flip(path, path.stat().st_size // 2)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if damage == "delete" and path.name == "seal.json" and (log_folder / "segments/000000" / IMAGE).exists():
        assert verify(log_folder).ok  # a segment that was not sealed yet: nothing is lost
    else:
        mend(log_folder)
    require_whole_but(log_folder, set())
    with Log.open(log_folder) as log:
        record(log, range(EPISODES, EPISODES + 1))
    assert verify(log_folder).ok
    require_same_facts(log_folder)


def require_same_facts(folder: Path) -> None:
    with Log.open(folder, "r") as log:
        assert [log.facts.about(t)["success"] for t in range(EPISODES)] == [t % 2 == 0 for t in range(EPISODES)]


def test_repair_of_a_lost_log_json_reports_its_settings(plain: Path):
    with Log.open(plain, capacity_steps=5000, durability="every step"):
        pass
    (plain / "log.json").write_text((plain / "log.json").read_text().replace("5000", "5001"))
    with pytest.raises(CorruptError, match="run: hilt data repair"):
        Log.open(plain)
    report = repair(plain)
    assert 'The damaged file said capacity_steps 5001, durability "every step"' in report.mended[1]
    assert report.mended[0] == "log.json: kept as damaged/log.json"
    assert "5001" in (plain / "damaged/log.json").read_text()
    require_whole_but(plain, set())


def test_header_and_log_json_lost_together_leave_the_other_headers(plain: Path):
    flip(plain / "log.json", 30)
    flip(plain / "segments/000001/header.json", 30)
    mend(plain)
    require_whole_but(plain, set())


def test_repair_without_a_schema_is_an_error(plain: Path):
    flip(plain / "log.json", 30)
    for header in plain.glob("segments/*/header.json"):
        flip(header, 30)
    with pytest.raises(CorruptError, match=r"neither its header nor log.json tells the schema; restore one of them"):
        verify(plain)
    with pytest.raises(FormatError, match=r"no segment tells the schema, so log.json cannot be rebuilt"):
        repair(plain)


def test_repair_rebuilds_a_lost_quarantine(plain: Path):
    flip(plain / "segments/000001" / IMAGE, 0)
    repair(plain)
    flip(plain / "quarantine.json", 20)
    found = mend(plain)
    assert "quarantine.json" in {f.file for f in found.of("damage")}
    shown = steps_of(plain)
    assert len(shown) == EPISODES * LENGTH - 1


@each_codec
@pytest.mark.parametrize("file", ["rows", IMAGE])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_file_that_was_cut_costs_only_what_was_cut(log_folder: Path, file: str, share: float):
    (path,) = (log_folder / "segments/000001").glob(f"{file}*")
    with path.open("r+b") as opened:
        opened.truncate(int(path.stat().st_size * share))
    found = mend(log_folder)
    assert "segments/000001" in str(found.findings)
    lost = steps_named(found)
    assert lost or (share == 0.99 and path.suffix != ".frames")  # only the index of a compressed file
    require_whole_but(log_folder, lost)


@each_codec
@pytest.mark.parametrize("file", ["rows", IMAGE])
def test_a_missing_file_costs_its_segment_and_nothing_else(log_folder: Path, file: str):
    (path,) = (log_folder / "segments/000001").glob(f"{file}*")
    path.unlink()
    found = mend(log_folder)
    assert any(f.what == "the file is missing" for f in found.findings)
    lost = steps_named(found)
    assert lost and len(lost) < 40
    require_whole_but(log_folder, lost)
    assert (log_folder / "damaged/000001").exists() == (file == "rows")


def test_a_segment_that_no_schema_fits_is_set_aside(plain: Path):
    flip(plain / "segments/000001/header.json", 30)
    rows = plain / "segments/000001/rows"
    rows.write_bytes(b"x" * rows.stat().st_size)
    found = mend(plain)
    assert "no schema of this log fits the file" in [f.what for f in found.findings]
    assert len(steps_named(found)) == 25
    require_whole_but(plain, steps_named(found))
    assert (plain / "damaged/000001").exists()


def test_bytes_behind_the_end_are_cut(plain: Path):
    with (plain / "segments/000000/rows").open("ab") as rows:
        rows.write(b"x" * 100)
    with (plain / "segments/000003/rows").open("ab") as rows:
        rows.write(b"\0" * 50)
    found = verify(plain)
    assert found.ok and found.kinds() == {"leftover": 1, "torn": 1}
    assert found.of("torn")[0].what == "50 bytes, 1 steps behind the last commit, which were not acknowledged"
    cut = "segments/000003/rows: 50 bytes, 1 steps behind the last commit, which were not acknowledged: cut"
    assert repair(plain).mended == ["segments/000000/rows: 100 bytes behind its end were cut", cut]
    assert verify(plain).findings == []
    require_whole_but(plain, set())


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize("left", [0, 37, -37, -200])
@pytest.mark.parametrize("file", ["rows", IMAGE])
def test_a_closed_log_proves_what_it_holds(plain: Path, file: str, left: int):
    """The last segment is not sealed. Bytes that are gone from its end are damage, named by step, and no torn tail."""
    path = plain / "segments/000003" / file
    cut(path, left if left >= 0 else path.stat().st_size + left)
    found = mend(plain)
    lost = steps_named(found)
    assert lost and len(lost) == found.lost_steps and found.of("torn") == []
    assert f"segments/000003/{file}" in {finding.file for finding in found.of("damage")}
    require_whole_but(plain, lost)


@pytest.mark.parametrize("file", ["segments/000003", "annotations.jsonl"])
@pytest.mark.parametrize("opened", [False, True])
def test_repair_names_missing_segments(plain: Path, file: str, opened: bool):
    """Also after a writer opened and closed the log, which knows nothing of what was lost before."""
    if file == "annotations.jsonl":
        cut(plain / file, (plain / file).read_bytes().rindex(b"\n", 0, -1) + 1)
    else:
        shutil.rmtree(plain / file)
    if opened:
        Log.open(plain).close()
    found = mend(plain)
    (finding,) = [f for f in found.of("damage") if f.file == file]
    assert ("ends too early" if file == "annotations.jsonl" else "the segment is missing") in finding.what
    assert [f.file for f in verify(plain).of("quarantined")] == [file]


def test_a_merged_log_proves_what_it_holds(plain: Path, tmp_path: Path):
    merge([plain], tmp_path / "merged")
    last = sorted((tmp_path / "merged/segments").iterdir())[-1]
    cut(last / "rows", (last / "rows").stat().st_size - 37)
    assert not verify(tmp_path / "merged").ok


def test_verify_ignores_what_a_killed_writer_appended(plain: Path):
    """It goes on with a log that was closed: what it was not done with is torn, what was there before is proven."""
    closed = (plain / "closed.json").read_bytes()
    size = (plain / "segments/000003/rows").stat().st_size
    with Log.open(plain) as log:
        record(log, range(1), length=3)
    (plain / "closed.json").write_bytes(closed)
    for left, kinds in [(size + 37, {"torn": 2}), (size - 37, {"damage": 2})]:
        cut(plain / "segments/000003/rows", left)
        assert verify(plain).kinds() == kinds


def test_a_log_of_an_older_hilt_has_no_seal(plain: Path):
    """What it held is not known: a cut tail is a torn one, and the report says that nothing proves otherwise."""
    assert verify(plain).closed
    (plain / "closed.json").unlink()
    (plain / "segments/000003/extents.held").unlink()
    rows = plain / "segments/000003/rows"
    cut(rows, rows.stat().st_size - 37)
    found = verify(plain)
    assert (found.ok, found.closed, found.of("torn")[0].file) == (True, False, "segments/000003/rows")
    assert any(line.endswith(": cut") for line in repair(plain).mended)
    assert verify(plain).closed


@pytest.mark.parametrize("seed", range(rounds(4, 300)))
def test_repair_of_a_wreck_ends_well_or_in_a_named_refusal(log_folder: Path, seed: int):
    """Many faults at once. A second repair finds nothing, and every byte that is shown has its checksum."""
    vandal.damage(log_folder, random.Random(seed))
    try:
        verify(log_folder)
        repair(log_folder)
    except (CorruptError, FormatError) as error:
        assert "restore" in str(error) or "not a Hilt log" in str(error)
        return
    assert verify(log_folder).ok
    assert repair(log_folder).mended == []
    with Log.open(log_folder, "r", verify_reads="always") as log:
        log.read(log.all().keys())


@pytest.mark.parametrize("seed", range(rounds(6, 400)))
def test_a_crafted_log_is_refused_by_name(log_folder: Path, seed: int):
    """Every checksum is right, and the contents are not: an error of Hilt's that
    says which file, or a log that is whole."""
    generator = random.Random(seed)
    for _ in range(generator.randint(1, 3)):
        vandal.craft(log_folder, generator)
    for verify_reads in ("never", "always"):
        with contextlib.suppress(HiltError), Log.open(log_folder, "r", verify_reads=verify_reads) as log:
            for key in log.all().keys().tolist()[::5]:
                with contextlib.suppress(HiltError):
                    log.read([key])
            log.successes().keys()
            log.by_source("human").sample(4)
    with contextlib.suppress(HiltError):
        verify(log_folder)
        repair(log_folder)
        assert verify(log_folder).ok
        assert repair(log_folder).mended == []


@pytest.fixture
def two_cameras(tmp_path: Path) -> Path:
    """93 steps with two cameras, in several segments."""
    folder = tmp_path / "log"
    made = step(0, 0)
    made["observations"]["wrist"] = made["next_observations"]["wrist"] = made["observations"]["image"]
    with Log.create(folder, Schema.of(made), segment_bytes=150_000) as log:
        for episode in range(3):
            with log.episode() as running:
                for t in range(31):
                    made = step(episode, t, 30)
                    for name in ("observations", "next_observations"):
                        made[name]["wrist"] = 255 - made[name]["image"]
                    running.append(made)
    return folder


@pytest.mark.parametrize("repaired", [False, True])
def test_one_cameras_files_are_gone_and_the_other_is_kept(two_cameras: Path, tmp_path: Path, repaired: bool):
    for path in two_cameras.rglob("observations.wrist.frames"):
        path.unlink()
    found = verify(two_cameras)
    assert len(found.findings) <= 2 * found.segments + 3  # that the file is missing, and whose frames these were
    assert (found.lost_steps, found.damaged_columns()) == (93, ["observations/wrist"])
    if repaired:
        repair(two_cameras)
        assert verify(two_cameras).ok
    with Log.open(two_cameras, "r", without=["observations/wrist"]) as log:
        assert len(log) == 93 and "next_observations/wrist" not in log.schema.columns
    assert merge([two_cameras], tmp_path / "kept", without=["observations/wrist"]).steps == 93
    assert verify(tmp_path / "kept").findings == []
    with Log.open(tmp_path / "kept", "r") as log:
        batch = log.read(log.all().keys())
        for i in range(93):
            right = step(i // 31, i % 31)
            assert (batch["observations"]["image"][i] == right["observations"]["image"]).all()
            assert (batch["next_observations"]["image"][i] == right["next_observations"]["image"]).all()
    with pytest.raises(ConfigError, match="a writer needs every column"):
        Log.open(two_cameras, "a", without=["observations/wrist"])


# --- late facts
# -------------------------------------------------------------------------------------------------------------------


def test_a_damaged_fact_is_taken_out_and_kept_aside(plain: Path):
    path = plain / "annotations.jsonl"
    lines = path.read_bytes().split(b"\n")
    flip(path, len(b"\n".join(lines[:3])) + 15)
    (finding,) = verify(plain).findings
    assert finding.what.startswith("line 4 does not have its checksum")
    mend(plain)
    assert b"\n".join(lines[:3]) in (plain / "damaged/annotations.jsonl").read_bytes()
    assert len(path.read_bytes().splitlines()) == len(lines) - 2


@pytest.mark.parametrize("line", [2, -1])
def test_a_damaged_line_break_costs_no_fact(plain: Path, line: int):
    path = plain / "annotations.jsonl"
    before = path.read_bytes()
    breaks = [i for i, byte in enumerate(before) if byte == 10]
    flip(path, breaks[line], 3)
    mend(plain)
    assert path.read_bytes() == before


def test_a_lost_sender_gets_a_name_and_its_number_is_not_given_again(plain: Path):
    path = plain / "annotations.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"arm-1" not in line))
    found = mend(plain)
    assert found.of("damage")[0].what == "the names of the senders 2 are lost"
    with Log.open(plain) as log:
        assert log.facts.origins()[2] == ("lost sender 2", "", "")
        assert log.facts.origin("arm-1", "b", "") == 3


def test_torn_facts_are_not_damage(plain: Path):
    with (plain / "annotations.jsonl").open("ab") as file:
        file.write(b'12345678 {"facts"')
    found = verify(plain)
    assert found.ok and found.findings[0].kind == "torn"
    repair(plain)
    assert verify(plain).findings == []


# --- segments as wholes
# -----------------------------------------------------------------------------------------------------------


def test_a_missing_segment_is_named_and_then_known(plain: Path):
    """It held the end of one trajectory, a whole one, and the beginning of one that goes on: that one tells."""
    shutil.rmtree(plain / "segments/000001")
    whole, finding = verify(plain).findings
    held = read_json(plain / "closed.json")["segments"]["1"]["rows"]
    assert (whole.file, whole.what) == (
        "segments/000001",
        f"the segment is missing, with {held} steps, and the log held it when it was closed",
    )
    assert (finding.what, finding.steps) == ("a segment is missing", (Span(3, 0, 5),))
    mend(plain)
    with Log.open(plain, "r") as log:
        assert log.facts.about(3)["missing_steps"] == [[0, 5]]


def test_a_copied_segment_does_not_double_its_steps(plain: Path):
    shutil.copytree(plain / "segments/000001", plain / "segments/000007")
    found = mend(plain)
    assert "are steps that another segment has too" in found.of("damage")[0].what
    require_whole_but(plain, set())


def test_leftovers_go_and_foreign_files_stay(plain: Path):
    (plain / ".log.json.1.2.new").write_text("half")
    (plain / "segments/.000009.trash").mkdir()
    (plain / "segments/000000/.extents.1.2.new").write_text("half")
    (plain / "segments/000000/notes.txt").write_text("mine")
    (plain / "notes.txt").write_text("mine")
    found = verify(plain)
    assert found.ok and found.kinds() == {"leftover": 5}
    assert len(repair(plain).mended) == 3
    left = verify(plain).findings
    assert sorted(f.file for f in left) == ["notes.txt", "segments/000000/notes.txt"]
    assert {f.cure for f in left} == {"is left alone: it is not Hilt's"}


def test_evicted_and_deleted_steps_are_not_missed(tmp_path: Path):
    with Log.create(tmp_path / "log", Schema.of(step(0, 0)), segment_bytes=100_000, capacity_steps=300) as log:
        record(log, range(30))
        log.delete(log.trajectories()[3])
    report = verify(tmp_path / "log")
    assert report.findings == []


# --- who may look, and who may mend
# -----------------------------------------------------------------------------------------------


def test_verify_while_a_writer_is_at_work(plain: Path):
    with Log.open(plain) as log, log.episode() as running:
        running.append(step(90, 0))
        report = verify(plain)
        assert report.writing and report.findings == []
        assert report.steps == EPISODES * LENGTH + 1
        flip(plain / "segments/000000" / IMAGE, 0)
        assert [f.what for f in verify(plain).of("damage")] == ["frame 0 does not have its checksum"]
        with pytest.raises(LockedError, match=r"process \d+ on .* is writing to this log"):
            repair(plain)
    assert not verify(plain).writing


WRITER = """
import sys
from hilt.replay import Log
from tests.replay.test_repair import record
with Log.open(sys.argv[1], capacity_steps=200, compression={"observations/image": "zlib"}) as log:
    print("ready", flush=True)
    for episode in range(6, int(sys.argv[2])):
        record(log, range(episode, episode + 1))
"""


def test_verify_beside_a_busy_writer_finds_nothing(plain: Path):
    """The writer appends, seals, compresses, evicts and deletes segments meanwhile."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", WRITER, str(plain), str(rounds(40, 300))]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        looked = 0
        while writer.poll() is None and looked < 400:
            report = verify(plain)
            assert report.findings == []
            looked += report.writing
        writer.kill()
    assert looked >= 3


def test_a_foreign_folder_a_newer_format_and_no_folder(plain: Path, tmp_path: Path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/photo.png").write_bytes(b"x")
    for act in (verify, repair):
        with pytest.raises(FormatError, match=r"foreign: not a Hilt log \(no log.json in it\)"):
            act(tmp_path / "foreign")
        with pytest.raises(StorageError, match="Check the path"):
            act(tmp_path / "absent")
    assert sorted(p.name for p in (tmp_path / "foreign").iterdir()) == ["photo.png"]
    write_json(plain / "log.json", {**read_json(plain / "log.json"), "format": 99})
    for act in (verify, repair):
        with pytest.raises(VersionError, match="written in format 99"):
            act(plain)


class FailingFiles(Files):
    """A disk that fails at its n-th change."""

    def __init__(self, changes: int):
        self._good_for = changes
        self.changes: list[str] = []

    def _change(self, what: str) -> None:
        if len(self.changes) >= self._good_for:
            raise StorageError("the disk is gone")
        self.changes.append(what)

    def create(self, path: Path) -> int:
        self._change("create")
        return super().create(path)

    def truncate(self, fd: int, size: int) -> None:
        self._change("truncate")
        super().truncate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        self._change("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._change("remove")
        super().remove(path)


def damage_much(folder: Path) -> None:
    flip(folder / "log.json", 40)
    flip(folder / "segments/000000/header.json", 40)
    flip(folder / "segments/000001/extents", 3)
    (folder / "segments/000002/seal.json").write_bytes(b"{}")
    path = folder / "annotations.jsonl"
    flip(path, path.stat().st_size - 30)
    (frames,) = (folder / "segments/000001").glob(f"{IMAGE}*")
    with frames.open("r+b") as file:
        file.truncate(frames.stat().st_size // 2)


@each_codec
def test_an_interrupted_repair_is_run_again(log_folder: Path):
    damage_much(log_folder)
    lost = steps_named(verify(log_folder))
    assert lost
    whole = FailingFiles(10**6)
    repair(Path(shutil.copytree(log_folder, log_folder.with_name("whole"))), files=whole)
    assert 10 < len(whole.changes) < 100
    for changes in some_of(whole.changes, 6):
        folder = Path(shutil.copytree(log_folder, log_folder.with_name("copy")))
        # only the last change of all, the seal of the whole log, is not worth an error
        with contextlib.suppress(StorageError):
            repair(folder, files=FailingFiles(changes))
        repair(folder)
        assert verify(folder).ok, changes
        require_whole_but(folder, lost)
        shutil.rmtree(folder)


# --- merge and split
# --------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> list[tuple[Any, ...]]:
    """Per trajectory, oldest first: what was recorded, by whom, and what became known."""
    out = []
    with Log.open(folder, "r") as log:
        names = log.facts.origins()
        for trajectory in log.trajectories():
            keys = log.trajectory_keys(trajectory)
            batch = log.read(keys)
            with log.reading() as steps:
                sequence, origin, flags = steps.fields(keys, ["#sequence", "#origin", "#flags"])
            out.append(
                (
                    batch["observations"]["image"].tobytes(),
                    batch["next_observations"]["image"].tobytes(),
                    batch["rewards"].tolist(),
                    (keys & 0xFFFFFFFF).tolist(),
                    sequence.tolist(),
                    flags.tolist(),
                    names[int(origin[0])],
                    tuple(sorted(log.facts.about(trajectory).items())),
                )
            )
    return out


@pytest.fixture
def second(tmp_path: Path) -> Path:
    with Log.create(tmp_path / "second", Schema.of(step(0, 0))) as log:
        record(log, range(50, 54))
        log.relabel(1, "rewards", [5.0, 6.0], first=3)
        log.relabel(1, "rewards", [9.0], first=8)
        log.delete(2)
        log.add({name: value for name, value in _batch(60, 4, 2).items()}, actor="sim", sequence=7)
    return tmp_path / "second"


def _batch(episode: int, length: int, width: int) -> dict[str, Any]:
    """A [T, B, ...] trajectory."""

    def stack(*values: Any) -> Any:
        if isinstance(values[0], dict):
            return {key: stack(*(value[key] for value in values)) for key in values[0]}
        return np.stack(values)

    return stack(*(stack(*(step(episode + b, t, length - 1) for b in range(width))) for t in range(length)))


def test_merge_keeps_everything_but_the_numbers(log_folder: Path, second: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    made = merge([log_folder, second], tmp_path / "both", lambda done, total: seen.append((done, total)))
    assert contents(tmp_path / "both") == contents(log_folder) + contents(second)
    assert made.trajectories == EPISODES + 4 and made.steps == EPISODES * LENGTH + 3 * LENGTH + 8
    assert seen[-1] == (made.steps, made.steps)
    assert verify(tmp_path / "both").findings == []
    with Log.open(tmp_path / "both") as log:
        assert log.read(log.trajectory_keys(EPISODES + 1), ["rewards"])["rewards"].tolist()[3:9] == [
            5.0,
            6.0,
            5.0,
            6.0,
            7.0,
            9.0,
        ]
        assert log.durability.words == "every episode"
        record(log, range(70, 71))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_merging_leaves_damage_as_small_as_it_was(plain: Path, tmp_path: Path):
    merge([plain], tmp_path / "copy")
    rows = tmp_path / "copy/segments/000000/rows"
    flip(rows, 30)
    assert steps_named(verify(tmp_path / "copy")) == {(0, 0)}


def test_merge_skips_quarantine_and_keeps_the_gap(plain: Path, tmp_path: Path):
    flip(plain / "segments/000000" / IMAGE, 5 * 3072)
    repair(plain)
    merge([plain], tmp_path / "copy")
    require_whole_but(tmp_path / "copy", {(0, 4), (0, 5)})


@pytest.mark.parametrize("file", ["rows", IMAGE])
def test_merge_refuses_to_copy_damage(plain: Path, tmp_path: Path, file: str):
    flip(plain / "segments/000001" / file, 40)
    with pytest.raises(
        CorruptError, match=rf"segments/000001/{file}: (row|frame) 0 does not have its checksum; run: hilt data repair"
    ):
        merge([plain], tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]


def test_merge_refuses_another_schema_with_the_difference(plain: Path, tmp_path: Path):
    example = step(0, 0)
    example["actions"] = np.zeros(7, np.float32)
    example["extra"] = np.float32(0)
    with Log.create(tmp_path / "other", Schema.of(example)):
        pass
    difference = (
        r"extra: added \(float32 \(\)\); actions: float32 \(2,\) became float32 \(7,\). Merge "
        r"logs with the same columns"
    )
    with pytest.raises(SchemaError, match=difference):
        merge([plain, tmp_path / "other"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_merge_brings_older_segments_to_the_newest_schema(plain: Path, tmp_path: Path):
    columns = dict(Schema.of(step(0, 0)).columns)
    columns["gripper"] = ArraySpec(np.dtype(np.float32), (), default=0.5)
    columns["depth"] = ArraySpec(np.dtype(np.uint8), (40, 40), default=7)
    with Log.open(plain, schema=Schema.declare(columns)) as log, log.episode() as running:
        running.append({**step(80, 0), "gripper": np.float32(1), "depth": np.full((40, 40), 9, np.uint8)})
    merge([plain], tmp_path / "copy")
    assert verify(tmp_path / "copy").findings == []
    with Log.open(tmp_path / "copy", "r") as log:
        batch = log.read(log.all().keys(), ["gripper", "depth"])
    assert batch["gripper"].tolist() == [0.5] * EPISODES * LENGTH + [1.0]
    assert (batch["depth"][:-1] == 7).all() and (batch["depth"][-1] == 9).all()
    assert len(steps_of(tmp_path / "copy")) == EPISODES * LENGTH + 1


def test_an_interrupted_merge_leaves_nothing_that_looks_whole(plain: Path, tmp_path: Path):
    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([plain], tmp_path / "copy", stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]
    (tmp_path / ".copy.new").mkdir()  # of a process that was killed
    (tmp_path / ".copy.new/log.json").write_text("half")
    merge([plain], tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "log"]


def test_split_shares_out_by_trajectory(plain: Path, tmp_path: Path):
    whole = contents(plain)
    made = split(plain, [tmp_path / "train", tmp_path / "held"], ratios=[0.7, 0.3], seed=3)
    assert [(m.trajectories, m.steps) for m in made] == [(4, 60), (2, 30)]
    parts = [contents(tmp_path / name) for name in ("train", "held")]
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert [t for t in whole if t in parts[0]] == parts[0]  # in the order of the source
    split(plain, [tmp_path / "again", tmp_path / "rest"], ratios=[7, 3], seed=3)
    assert contents(tmp_path / "again") == parts[0]
    chosen = {tuple(t[-1] for t in parts[0])}
    for seed in range(4):
        split(plain, [tmp_path / f"a{seed}", tmp_path / f"b{seed}"], ratios=[0.7, 0.3], seed=seed)
        chosen.add(tuple(t[-1] for t in contents(tmp_path / f"a{seed}")))
    assert len(chosen) > 2


def test_merge_then_split_then_merge_gives_the_same_trajectories(log_folder: Path, second: Path, tmp_path: Path):
    merge([log_folder, second], tmp_path / "both")
    split(tmp_path / "both", [tmp_path / f"part-{i}" for i in range(3)])
    merge([tmp_path / f"part-{i}" for i in range(3)], tmp_path / "again")
    assert sorted(contents(tmp_path / "again")) == sorted(contents(log_folder) + contents(second))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda log, to: merge([], to), "merge needs at least one log"),
        (lambda log, to: merge([log, log], to), "the same log is given twice"),
        (lambda log, to: merge([log], log), "expected a new or empty folder"),
        (lambda log, to: split(log, []), "expected one ratio for each target, got 0 ratios for 0 targets"),
        (lambda log, to: split(log, [to, to]), "two targets are the same folder"),
        (lambda log, to: split(log, [to], ratios=[0.9, 0.1]), "got 2 ratios for 1 targets"),
        (lambda log, to: split(log, [to, log.with_name("b")], ratios=[0.9, -0.1]), "expected ratios above 0"),
        (
            lambda log, to: split(log, [to, log.with_name("b")], ratios=[99, 1]),
            "its share of 6 trajectories is none; give it a larger",
        ),
    ],
)
def test_merge_and_split_errors(plain: Path, tmp_path: Path, act: Callable[[Path, Path], object], message: str):
    with pytest.raises(ConfigError, match=message):
        act(plain, tmp_path / "to")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]
