"""The file of late facts: lines that are whole or absent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hilt.core.checksums import checksum
from hilt.core.errors import DiskFullError, SchemaError
from hilt.core.files import DISK, Files
from hilt.replay import Log
from hilt.replay.facts import Facts
from hilt.replay.storage import journal
from hilt.replay.storage.journal import Journal, format_line, parse_line, parse_lines
from tests.replay.known_steps import SPACING, make_log, trajectory


def test_every_flipped_bit_of_a_line_is_found():
    line = format_line({"trajectory": 3, "facts": {"success": True}})[:-1]
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        assert parse_line(bytes(flipped)) is None
    assert parse_line(line) == {"trajectory": 3, "facts": {"success": True}}


def test_a_fact_that_json_does_not_know_is_refused(tmp_path: Path):
    with make_log(tmp_path / "log") as log:
        number = log.add(trajectory(0, 2, 1))
        with pytest.raises(SchemaError, match=r"a fact cannot be written down .* give finite numbers"):
            log.annotate(number, success=float("nan"))
        with pytest.raises(SchemaError, match="a fact cannot be written down"):
            log.annotate(number, tags=[object()])
        with pytest.raises(SchemaError, match="fact 'who': expected a number, text, list or mapping, got object"):
            log.annotate(number, who=object())
        log.annotate(number, success=True)
        assert log.facts.about(number) == {"success": True}


def test_a_line_that_found_no_room_leaves_nothing(tmp_path: Path):
    class Full(Files):
        def write(self, fd: int, data: object, offset: int) -> None:
            if full:
                super().write(fd, bytes(memoryview(data))[:-5], offset)  # type: ignore[arg-type]
                raise DiskFullError("full")
            super().write(fd, data, offset)

    full, journal = False, Journal(tmp_path / "journal", Full(), write=True)
    journal.append({"a": 1})
    full = True
    with pytest.raises(DiskFullError):
        journal.append({"a": "x" * 100})
    full = False
    assert (tmp_path / "journal").read_bytes() == format_line({"a": 1})
    journal.append({"a": 2})
    assert journal.read_all() == [{"a": 1}, {"a": 2}]


def test_what_is_appended_during_a_sync_needs_the_next_one(tmp_path: Path):
    """And a second thread that syncs waits for the sync that is under way."""
    inside, go_on = threading.Event(), threading.Event()
    synced: list[int] = []

    class Slow(Files):
        def sync(self, fd: int) -> None:
            inside.set()
            assert go_on.wait(60)
            synced.append(journal.lines)

    journal = Journal(tmp_path / "journal", Slow(), write=True)
    journal.append({"a": 1})
    first = threading.Thread(target=journal.sync)
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=journal.sync)
    second.start()
    second.join(0.05)
    assert second.is_alive(), "a sync returned before the bytes were on the disk"
    journal.append({"a": 2})
    go_on.set()
    first.join(60)
    second.join(60)
    assert len(synced) == 2 and not journal.unsynced


def test_old_facts_are_compacted_and_readers_follow(tmp_path: Path):
    with make_log(tmp_path / "log", durability="never") as log:
        number = log.add(trajectory(0, 2, 1), actor="arm")
        gone = log.add(trajectory(SPACING, 2, 1))
        for i in range(2000):
            log.annotate(gone, tag=i)
        log.annotate(number, tag="kept")
        log.delete(gone)
    reader = Log.open(tmp_path / "log", "r")
    assert reader.facts.about(number) == {"tag": "kept"}
    before = (tmp_path / "log/annotations.jsonl").stat().st_size
    with Log.open(tmp_path / "log") as log:
        assert (tmp_path / "log/annotations.jsonl").stat().st_size < before / 100
        assert log.facts.about(number) == {"tag": "kept"}
        log.annotate(number, tag="newer")
        assert log.trajectories() == [number]
        reader.refresh()
        assert reader.facts.about(number) == {"tag": "newer"}
        assert reader.facts.corrupt == 0
        assert log.trajectories() == reader.trajectories() == [number]
        assert log.add(trajectory(2 * SPACING, 2, 1), actor="other") > gone
        assert log.facts.origins()[1] == ("arm", "", "")
    with Log.open(tmp_path / "log") as log:
        assert log.facts.about(number) == {"tag": "newer"}
        assert gone not in log.trajectories(), "its rows are still in the segment: the deletion must not be forgotten"
    reader.close()


def test_the_number_of_a_sender_whose_line_is_damaged_is_not_given_again(tmp_path: Path):
    with make_log(tmp_path / "log") as log:
        log.add(trajectory(0, 2, 1), actor="left")
        log.add(trajectory(SPACING, 2, 1), actor="right")
    path = tmp_path / "log/annotations.jsonl"
    path.write_bytes(path.read_bytes().replace(b"right", b"rjght"))
    with Log.open(tmp_path / "log") as log:
        assert log.facts.corrupt == 1 and log.facts.corrupt_lines == [2]
        assert log.facts.origin("new", "", "") == 3


def test_facts_are_read_by_a_reader_without_a_file(tmp_path: Path):
    facts = Facts(tmp_path / "none", DISK, write=False)
    assert facts.read_new() == set()


def test_lines_parsed_together_are_those_parsed_one_by_one():
    def line(body: bytes) -> bytes:
        return b"%08x " % checksum(body) + body

    about = [format_line({"trajectory": n, "facts": {"note": f"x{n}"}})[:-1] for n in range(4)]
    good = [*about, format_line({"edit": 1, "action": "a", "author": "b", "time": "c", "changes": []})[:-1]]
    torn, flipped = good[0][:-3], good[1][:12] + b"!" + good[1][13:]
    strange = [line(b""), line(b"[1"), line(b"2]"), line(b"{},{}"), line(b"3"), line(b"["), line(b'{"edit": true}')]
    for lines in (good, [*good, torn], [flipped, *good], [*good, *strange], strange, [*good, line(b"{},{}")], []):
        assert parse_lines(lines) == [parse_line(one) for one in lines]
    assert all(fact is not None for fact in parse_lines(good))


def test_damaged_lines_are_counted_across_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "BATCH_LINES", 3)
    lines = [format_line({"trajectory": n, "facts": {}}) for n in range(10)]
    lines[4] = b"0" * 9 + lines[4][9:]
    (tmp_path / "facts").write_bytes(b"".join(lines) + b"torn")
    read = Journal(tmp_path / "facts", DISK, write=False)
    assert [fact["trajectory"] for fact in read.read_new()] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert read.corrupt_lines == [5] and read.lines == 10 and read.torn_bytes == 4
    assert read.nbytes == sum(map(len, lines)) and read.crc == checksum(b"".join(lines))
    with (tmp_path / "facts").open("r+b") as file:
        file.seek(read.nbytes)
        file.write(lines[0])
    assert len(list(read.read_new())) == 1 and read.lines == 11 and read.crc == checksum(b"".join([*lines, lines[0]]))


def test_a_journal_that_was_rewritten_is_known_though_its_file_has_the_same_number(tmp_path: Path):
    """A file system gives the number of a file that is gone to the next one."""
    path = tmp_path / "facts.jsonl"
    path.write_bytes(b"".join(format_line({"trajectory": n, "facts": {"n": n}}) for n in range(3)))
    journal = Journal(path, DISK, write=False)
    assert len(list(journal.read_new())) == 3 and list(journal.read_new()) == []
    with path.open("ab") as file:
        file.write(format_line({"trajectory": 3, "facts": {"n": 3}}))
    assert [fact["trajectory"] for fact in journal.read_new()] == [3]
    inode, other = path.stat().st_ino, [format_line({"trajectory": n, "facts": {"n": -n}}) for n in range(10, 20)]
    for count in (10, 2):  # longer than what was read, and shorter
        path.write_bytes(b"".join(other[-count:]))
        assert path.stat().st_ino == inode
        assert [fact["trajectory"] for fact in journal.read_new()] == [
            *range(20 - count, 20)
        ] and journal.lines == count
