"""A log's settings: what each promises, and that it holds while others read."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, FormatError, LockedError, ReadOnlyError, SchemaError, UnknownNameError
from hilt.core.tree import ArraySpec
from hilt.replay import Log, Schema
from hilt.replay.maintenance.repair import verify
from hilt.replay.storage import scan
from hilt.replay.storage.scan import scan_file
from hilt.replay.storage.segment import Segment
from tests.effort import rounds
from tests.replay.toy_steps import IMAGE, SCHEMA, check, new_log, numbers, observation, step, trajectory, write


def folder_bytes(path: Path) -> int:
    """Of all files; one that goes while we look does not count."""
    sizes = []
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size if file.is_file() else 0)
    return sum(sizes)


def check_all(log: Log) -> None:
    keys = np.random.default_rng(0).permutation(log.all().keys())
    batch = log.read(keys)
    for i in range(len(keys)):
        check(batch, i, step(int(batch["policy_version"][i])))


# -- schema evolution
# ----------------------------------------------------------------------------------------------------------------


def grown(**columns: ArraySpec) -> Schema:
    return Schema.declare({**dict(SCHEMA.columns), **columns})


EXTRA = {
    "grasp_penalty": ArraySpec(np.dtype(np.float32), default=-0.5),
    "force": ArraySpec(np.dtype(np.int16), (3,), default=7),
    "depth": ArraySpec(np.dtype(np.uint8), (40, 40), default=9),  # large: stored as frames
}


def with_extra(n: int) -> dict[str, Any]:
    return step(
        n, grasp_penalty=np.float32(n), force=np.full(3, n, np.int16), depth=np.full((40, 40), n % 251, np.uint8)
    )


@pytest.mark.parametrize(
    "name", ["rows", "seal.json", "extents", "header.json", ".hidden", "a b", "b\u00e4r", "closed.json"]
)
def test_a_column_may_have_the_name_of_a_file(tmp_path: Path, name: str):
    values = [np.full(300, number, np.float32) for number in range(20)]
    with Log.create(tmp_path / "log", Schema.of({name: values[0], "n": np.float32(0)}), segment_bytes=9_000) as log:
        with log.episode() as episode:
            for number, value in enumerate(values):
                episode.append({name: value, "n": np.float32(number)})
        assert len(log.segments) > 1
    with Log.open(tmp_path / "log") as log:
        batch = log.read(log.all().keys())
        assert (batch[name] == values).all() and (batch["n"] == range(20)).all()
    assert verify(tmp_path / "log").findings == []


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a\0b": (np.float32, ())}, "expected a name that a file can have"),
        ({"a\udc80": (np.float32, (300,))}, "expected a name that a file can have"),
        (
            {"a.b": (np.float32, (300,)), "a": {"b": (np.float32, (300,))}},
            "a.b and a/b: two large columns would be stored in one file",
        ),
        ({"x" * 300: (np.float32, (300,))}, "at most 200 bytes of name, got 307"),
    ],
)
def test_names_that_no_file_can_have_are_refused(columns: dict[str, Any], said: str):
    with pytest.raises(SchemaError, match=said):
        Schema.declare(columns)


@pytest.mark.parametrize("segment_bytes", [None, 8_000])
def test_a_log_gains_columns_and_old_steps_show_their_defaults(tmp_path: Path, segment_bytes: int | None):
    with new_log(tmp_path, segment_bytes=segment_bytes) as log:
        write(log, numbers(0, 12))
    with Log.open(tmp_path / "log", schema=grown(**EXTRA)) as log:  # before there is a step with the new columns
        for batch in (log.read(log.all().keys()), log.all().sampler(seed=0).sample(50)):
            assert (
                (batch["force"] == 7).all() and (batch["depth"] == 9).all() and (batch["grasp_penalty"] == -0.5).all()
            )
    for again in range(2):
        with Log.open(tmp_path / "log", schema=grown(**EXTRA)) as log:
            write(log, [with_extra(n) for n in range(20 + 20 * again, 32 + 20 * again)])
            keys = np.random.default_rng(0).permutation(log.all().keys())
            for batch in (log.read(keys), log.all().sampler(seed=0).sample(50)):
                for i, number in enumerate(batch["policy_version"].tolist()):
                    old = {
                        "grasp_penalty": np.float32(-0.5),
                        "force": np.full(3, 7, np.int16),
                        "depth": np.full((40, 40), 9, np.uint8),
                    }
                    check(batch, i, with_extra(number) if number >= 20 else step(number) | old)
            out = {"depth": np.zeros((len(keys), 40, 40), np.uint8)}
            assert log.read(keys, ["depth"], out=out)["depth"] is out["depth"]
            with pytest.raises(SchemaError, match=r"out\['depth'\]: expected contiguous uint8"):
                log.read(keys, ["depth"], out={"depth": np.zeros((len(keys), 40, 41), np.uint8)})
            assert len(log.where("grasp_penalty", lambda x: x == -0.5)) == 12
            assert len(log.where("depth", lambda x: x[:, 0, 0] == 9)) == 12
            sampler = log.all().sampler(n_step=2, seed=0)
            assert set(sampler.sample(40)["force"][:, 0].tolist()) >= {7}
    with Log.open(tmp_path / "log", "r") as log:  # the log remembers
        assert len(log) == 36
        assert list(log.schema.columns) == list(grown(**EXTRA).columns)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (grown(extra=ArraySpec(np.dtype(np.float32))), "extra: added without a default"),
        (
            Schema.declare({k: v for k, v in SCHEMA.columns.items() if k != "actions"}),
            r"actions: removed (was float32 (3,))",
        ),
        (grown(actions=ArraySpec(np.dtype(np.float32), (4,))), "actions: float32 (3,) became float32 (4,)"),
        (grown(actions=ArraySpec(np.dtype(np.float64), (3,))), "actions: float32 (3,) became float64 (3,)"),
        (grown(rewards=ArraySpec(np.dtype(np.float32), finite=True)), "rewards: finite=False became finite=True"),
        (
            Schema.declare(dict(SCHEMA.columns), stacked=["observations/image"]),
            "stacked: () became ('observations/image',)",
        ),
    ],
    ids=["no default", "removed", "shape", "dtype", "finite", "stacked"],
)
def test_log_schema_change_is_refused_with_the_difference(tmp_path: Path, schema: Schema, said: str):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
    before = (tmp_path / "log/log.json").read_bytes()
    with pytest.raises(
        SchemaError,
        match="this log has another schema: .*" + re.escape(said) + ".* A log may gain columns that have a default",
    ):
        Log.open(tmp_path / "log", schema=schema)
    assert (tmp_path / "log/log.json").read_bytes() == before
    with Log.open(tmp_path / "log", schema=SCHEMA) as log:
        check_all(log)


def test_a_default_that_changes_is_refused(tmp_path: Path):
    with new_log(tmp_path, grown(extra=ArraySpec(np.dtype(np.float32), default=1.0))):
        pass
    with pytest.raises(SchemaError, match=r"extra: default 1\.0 became 2\.0"):
        Log.open(tmp_path / "log", schema=grown(extra=ArraySpec(np.dtype(np.float32), default=2.0)))


# -- compression
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zlib", "zstd"])
def test_compressed_frames_come_back_byte_for_byte(tmp_path: Path, codec: str):
    if codec == "zstd":
        pytest.importorskip("zstandard")
    with new_log(tmp_path, compression={"observations/image": codec}, segment_bytes=30_000) as log:
        for first in range(0, 120, 10):
            write(log, numbers(first, 10))
        log.compress()
        check_all(log)
        compressed = [s for s in log.segments if s.codecs]
        assert len(compressed) >= 3
        for segment in compressed:
            made = segment.codecs["observations/image"]
            assert made["codec"] == codec
            assert made["bytes"] < 0.2 * segment.frames["observations/image"] * np.prod(IMAGE)  # flat pictures
            assert not (segment.folder / "observations.image.frames").exists()
        assert log.stats()["bytes"] < 0.5 * 120 * np.prod(IMAGE)
    with Log.open(tmp_path / "log", "r") as log:
        check_all(log)
        batch = log.all().sampler(sequence_length=4, seed=0).sample(20)
        assert batch["mask"].any()


def test_log_compression_blocks_neither_readers_nor_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Off the hot path: steps are written and read while a segment is being compressed."""
    begun, may_end = threading.Event(), threading.Event()
    real = Segment.compress

    def slow(self: Segment, codecs: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return real(self, codecs)

    monkeypatch.setattr(Segment, "compress", slow)
    with new_log(tmp_path, compression={"observations/image": "zlib"}, segment_bytes=30_000) as log:
        for first in range(0, 60, 10):
            write(log, numbers(first, 10))
        assert begun.wait(60)
        write(log, numbers(60, 10))
        check_all(log)
        assert not any(s.codecs for s in log.segments)
        with log.reading() as steps:  # a batch under way is not disturbed
            keys = log.all().keys()
            may_end.set()
            log.compress()
            assert any(s.codecs for s in log.segments)
            batch = steps.gather(keys, ["observations/image"])["observations/image"]
        for i, key in enumerate(keys.tolist()):
            number = 10 * (key >> 32) + (key & 0xFFFFFFFF)
            assert np.array_equal(batch[i], observation(number)["image"])
        check_all(log)


def test_looking_for_damage_while_segments_are_compressed_and_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_begin, real, looked = threading.Event(), Segment.compress, []

    def later(self: Segment, codecs: Any) -> Any:
        assert may_begin.wait(60)
        return real(self, codecs)

    def look(segment: Segment, *rest: Any) -> Any:
        if not looked:  # all that can happen to segments happens behind the first look
            may_begin.set()
            log.compress()
            log.delete(log.trajectories()[-1])
            log.delete(log.trajectories()[-1])
        looked.append(segment.number)
        return scan_file(segment, *rest)

    monkeypatch.setattr(Segment, "compress", later)
    monkeypatch.setattr(scan, "scan_file", look)
    with new_log(tmp_path, compression={"observations/image": "zlib"}, segment_bytes=30_000) as log:
        for first in range(0, 80, 20):
            write(log, numbers(first, 20))
        assert log.damage() == []
        assert len(looked) >= 4
        check_all(log)


def test_eviction_while_compressing(tmp_path: Path):
    with new_log(tmp_path, compression={"observations/image": "zlib"}, segment_bytes=20_000, capacity_steps=40) as log:
        for first in range(0, 600, 10):
            write(log, numbers(first, 10))
        log.compress()
        check_all(log)


def test_unknown_codecs_and_columns(tmp_path: Path):
    with pytest.raises((ConfigError, UnknownNameError), match="gzip"):
        new_log(tmp_path, compression={"observations/image": "gzip"})
    with pytest.raises((ConfigError, UnknownNameError), match="rewards"):
        new_log(tmp_path, compression={"rewards": "zlib"})
    assert not (tmp_path / "log").exists()


# -- cache_bytes
# ---------------------------------------------------------------------------------------------------------------------


def test_a_bounded_map_gives_the_same_batches(tmp_path: Path):
    with new_log(tmp_path, segment_bytes=30_000) as log:
        for first in range(0, 200, 10):
            write(log, numbers(first, 10))
        wanted = log.all().sampler(seed=0).sample(100)["observations"]["image"]
    for cache_bytes in (0, 2_000_000, 20_000_000):
        with Log.open(tmp_path / "log", cache_bytes=cache_bytes) as log:
            check_all(log)
            assert np.array_equal(log.all().sampler(seed=0).sample(100)["observations"]["image"], wanted)
            mapped = sum(
                size
                for table in log.catalog.segments.tables
                for slots in table._mapped.values()
                for size in slots.values()
            )
            assert mapped <= cache_bytes
            assert (log.stats()["disk_reads"] > 0) == (cache_bytes == 0)
    with Log.open(tmp_path / "log", cache_bytes=100_000) as log:
        for first in range(1000, 1200, 10):
            write(log, numbers(first, 10))
        check_all(log)


def test_a_map_that_makes_room_disturbs_no_batch(tmp_path: Path):
    """A segment that loses its place in the map is still read from by whoever began before."""
    with new_log(tmp_path, segment_bytes=30_000, cache_bytes=2_000_000) as log:
        for first in range(0, 60, 10):
            write(log, numbers(first, 10))
        keys = log.all().keys()
        with log.reading() as steps:
            table = log.catalog.segments.tables[0]
            mapped = dict(table._mapped["observations/image"])
            before = {slot: table.frame(table.layout.frame_of["observations/image"], slot, 0).copy() for slot in mapped}
            for first in range(60, 160, 10):
                write(log, numbers(first, 10))
            assert set(mapped) - set(table._mapped["observations/image"])  # some had to go
            arena = table._frames["observations/image"]
            for slot, frame in before.items():
                assert np.array_equal(arena.item(slot * table.rows_per_slot), frame)
            steps.gather(keys, ["observations/image"])
        check_all(log)


def test_the_segment_of_a_running_episode_keeps_its_place_in_the_map(tmp_path: Path):
    """Its next step is compared with the last frame where that lies."""
    with new_log(tmp_path, segment_bytes=30_000, cache_bytes=2_000_000) as log:
        running = log.episode()
        running.append(step(5000))
        for first in range(0, 150, 10):
            write(log, numbers(first, 10))
        assert running._active.slot in log.catalog.segments.tables[0]._mapped["observations/image"]
        running.append(step(5001))
        running.end()
        with log.reading() as steps:
            assert steps.fields(log.trajectory_keys(running.trajectory), ["#flags"])[0].tolist() == [0, 1]


def test_sampling_with_a_bounded_map_while_segments_come_and_go(tmp_path: Path):
    with new_log(tmp_path, segment_bytes=20_000, cache_bytes=2_000_000, capacity_steps=300) as log:
        write(log, numbers(0, 10))
        stop, wrong = threading.Event(), []

        def sample() -> None:
            sampler = log.all().sampler(seed=0)
            while not stop.is_set():
                batch = sampler.sample(64, keys=["observations/image", "policy_version"])
                number = batch["policy_version"]
                if not np.array_equal(batch["observations"]["image"][:, 5, 5, 0], number % 251):
                    wrong.append(number)

        threads = [threading.Thread(target=sample) for _ in range(2)]
        for thread in threads:
            thread.start()
        for first in range(10, rounds(1200, 3000), 10):
            write(log, numbers(first, 10))
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not wrong


# -- capacity
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, {"observations/image": "zlib"}])
def test_capacity_in_bytes_bounds_the_folder(tmp_path: Path, compression: Any):
    limit = 400_000
    with new_log(tmp_path, capacity_bytes=limit, compression=compression) as log:
        sizes = []
        for first in range(0, rounds(1500, 3000) if compression is None else 3000, 10):
            write(log, numbers(first, 10))
            sizes.append(folder_bytes(tmp_path / "log"))
        log.compress()
        # a segment exists twice while it is compressed
        assert max(sizes) <= limit * (1 if compression is None else 1.4)
        assert len(log) > 100
        assert log.stats()["segments_deleted"] > 10
        check_all(log)
        assert folder_bytes(tmp_path / "log") <= limit


def test_capacity_in_bytes_with_segments_that_are_larger(tmp_path: Path):
    with new_log(tmp_path, capacity_bytes=300_000, segment_bytes=10_000_000) as log:
        for first in range(0, 1000, 10):
            write(log, numbers(first, 10))
            assert folder_bytes(tmp_path / "log") <= 300_000
        assert len(log) > 80
        check_all(log)


def test_one_episode_larger_than_the_capacity_in_bytes(tmp_path: Path):
    with new_log(tmp_path, capacity_bytes=300_000) as log:
        with log.episode() as episode:
            for n in range(600):
                episode.append(step(n))
                assert n % 5 or folder_bytes(tmp_path / "log") <= 330_000
        check_all(log)
        assert len(log) > 80


def test_capacity_in_steps(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=50, segment_bytes=30_000) as log:
        for first in range(0, 1000, 10):
            write(log, numbers(first, 10))
            assert len(log) <= 50
        assert log.stats()["evicted"] == 950
        assert folder_bytes(tmp_path / "log") < 300_000
        assert [t for t in log.trajectories()] == [95, 96, 97, 98, 99]
        check_all(log)


# -- settings
# ----------------------------------------------------------------------------------------------------------------------


def test_settings_change_when_a_log_is_opened(tmp_path: Path):
    with new_log(tmp_path) as log:
        for first in range(0, 100, 10):
            write(log, numbers(first, 10))
    with Log.open(tmp_path / "log", capacity_steps=30, durability="every step", segment_bytes=20_000) as log:
        assert len(log) == 30
        assert log.durability.words == "every step"
        write(log, numbers(100, 30))
        assert log.stats()["power_safe"] == 30
        assert max(s.rows for s in log.segments[1:]) == 20_000 // SCHEMA.layout.step_bytes
    with Log.open(tmp_path / "log") as log:  # they stay
        assert log.settings["capacity_steps"] == 30
        assert log.durability.words == "every step"
        write(log, numbers(130, 10))
        assert len(log) <= 30
        check_all(log)
    with Log.open(tmp_path / "log", capacity_steps=None) as log:
        before = len(log)
        write(log, numbers(140, 100))
        assert len(log) == before + 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capacity_steps": 0}, "capacity_steps: expected a number above 0 or None, got 0"),
        ({"capacity_bytes": -5}, "capacity_bytes: expected a number above 0 or None, got -5"),
        ({"segment_bytes": 0}, "segment_bytes: expected a number above 0 or None, got 0"),
        ({"durability": "sometimes"}, "durability 'sometimes': expected 'every step', 'every episode', 'at most N ms'"),
        ({"capacity": 5}, "no setting named 'capacity'; did you mean 'capacity_"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], said: str):
    with new_log(tmp_path):
        pass
    before = (tmp_path / "log/log.json").read_bytes()
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        Log.open(tmp_path / "log", **settings)
    assert (tmp_path / "log/log.json").read_bytes() == before
    if "capacity" not in settings:
        with pytest.raises(ConfigError, match=said):
            Log.create(tmp_path / "other", SCHEMA, **settings)
        assert not (tmp_path / "other").exists()


def test_opening(tmp_path: Path):
    with pytest.raises(
        FormatError, match=r"not a Hilt log \(no log\.json in it\)\. Give the folder that Log\.create made"
    ):
        Log.open(tmp_path)
    with pytest.raises(ConfigError, match="mode 'w': expected 'r' to read or 'a' to append"):
        Log.open(tmp_path, "w")  # type: ignore[arg-type]
    with new_log(tmp_path) as log:
        with pytest.raises(ConfigError, match=r"a log is there already; open it with Log\.open"):
            new_log(tmp_path)
        with pytest.raises(LockedError):
            Log.open(tmp_path / "log")
        with Log.open(tmp_path / "log", "r") as reader:
            for call in (
                lambda: write(reader, numbers(0, 1)),
                lambda: reader.add(trajectory([numbers(0, 1)])),
                lambda: reader.delete(0),
            ):
                with pytest.raises(ReadOnlyError, match="opened for reading; open it with mode='a' to write"):
                    call()
        with pytest.raises(
            ConfigError,
            match="capacity_steps: a log that is opened for reading keeps its settings; open it with mode='a'",
        ):
            Log.open(tmp_path / "log", "r", capacity_steps=3)
        write(log, numbers(0, 2))
    with pytest.raises(ConfigError, match="expected a new or empty folder, got one that holds"):
        Log.create(tmp_path, SCHEMA)


def test_log_is_freed_with_its_last_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No part of it refers back to it: a temporary log is removed at once, without the garbage collector."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.disable()
    try:
        log = Log.anonymous(
            SCHEMA, capacity_steps=100, segment_bytes=30_000, compression={"observations/image": "zlib"}
        )
        for first in range(0, 60, 10):
            write(log, numbers(first, 10))
        log.by_source("policy").sampler().sample(4)
        log.compress()
        assert list(tmp_path.iterdir()) == [log.path]
        del log
        deadline = time.monotonic() + 60  # a thread that read ahead may still end
        while list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()


def test_a_log_without_a_path(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.INFO, "hilt.replay"):
        log = Log.anonymous(SCHEMA)
    assert "no path was given: steps are kept in" in caplog.text
    write(log, numbers(0, 3))
    check_all(log)
    assert log.path.exists()
    log.close()
    assert list(tmp_path.iterdir()) == []
    log = Log.anonymous(SCHEMA)
    del log
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="capacity_steps"):
        Log.anonymous(SCHEMA, capacity_steps=-1)
    assert list(tmp_path.iterdir()) == []


# -- frames are stored once
# ----------------------------------------------------------------------------------------------------------


def test_each_frame_is_stored_once(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 10))
        log.add(trajectory([numbers(100, 10), numbers(200, 10)]))
        assert sum(s.frames["observations/image"] for s in log.segments) == 11 + 22
        check_all(log)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("stack", [1, 2, 4])
def test_each_frame_of_a_stack_is_stored_once(tmp_path: Path, stack: int, whole: bool):
    spec = ArraySpec(np.dtype(np.float32), (stack, 3))
    schema = Schema.declare(
        {"observations": {"image": spec}, "next_observations": {"image": spec}}, stacked=["observations/image"]
    )
    frames = np.arange(60, dtype=np.float32).reshape(20, 3) - 10  # among them 0.0 and a -0.0
    frames[5, 0] = -0.0
    stacks = np.stack([[frames[max(0, k)] for k in range(n - stack + 1, n + 1)] for n in range(20)])
    with new_log(tmp_path, schema) as log:
        if whole:
            log.add({"observations": {"image": stacks[:-1, None]}, "next_observations": {"image": stacks[1:, None]}})
        else:
            write(
                log,
                [
                    {"observations": {"image": stacks[n]}, "next_observations": {"image": stacks[n + 1]}}
                    for n in range(19)
                ],
            )
        keys = log.all().keys()
        batch = log.read(keys)
        assert batch["observations"]["image"].tobytes() == stacks[:-1].tobytes()
        assert batch["next_observations"]["image"].tobytes() == stacks[1:].tobytes()
        assert log.segments[0].frames["observations/image"] == stack + 19
        with log.reading() as steps:
            packed = steps.gather_packed(keys, schema.layout.frame_of["observations/image"])
        assert np.array_equal(packed, np.concatenate([stacks[:-1], stacks[1:, -1:]], axis=1))


def test_a_frame_that_equals_in_number_but_not_in_bytes_is_another_one(tmp_path: Path):
    spec = ArraySpec(np.dtype(np.float32), (2, 3))
    schema = Schema.declare({"observations": {"x": spec}, "next_observations": {"x": spec}}, stacked=["observations/x"])
    zero = np.zeros((1, 3), np.float32)
    one = {
        "observations": {"x": np.concatenate([zero + 1, zero])},
        "next_observations": {"x": np.concatenate([-zero, zero + 2])},
    }
    with new_log(tmp_path, schema) as log:
        write(log, [one])
        log.add({name: {"x": value["x"][None, None]} for name, value in one.items()})
        for name, value in one.items():
            assert log.read(log.all().keys())[name]["x"].tobytes() == 2 * value["x"].tobytes()


# -- facts while others read
# ---------------------------------------------------------------------------------------------------------


def test_relabeling_while_others_sample(tmp_path: Path):
    with new_log(tmp_path) as log:
        for first in range(0, 100, 10):
            write(log, numbers(first, 10))
        stop, errors = threading.Event(), []

        def sample() -> None:
            sampler = log.all().sampler(seed=0)
            while not stop.is_set():
                try:
                    batch = sampler.sample(32, keys=["rewards", "actions", "policy_version"])
                    shift = batch["rewards"] - batch["policy_version"]
                    assert set(np.unique(shift).tolist()) <= {0.0, 1000.0, 2000.0, 3000.0}, shift
                except Exception as error:  # noqa: BLE001  # reported by the test
                    errors.append(error)
                    return

        threads = [threading.Thread(target=sample) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(3):
            for trajectory_number in range(10):
                for offset in range(10):
                    value = 1000 * (turn + 1) + 10 * trajectory_number + offset
                    log.relabel(trajectory_number, "rewards", [value], first=offset)
                    log.relabel(trajectory_number, "actions", np.zeros((1, 3), np.float32), first=offset)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert errors == []


def test_closing_while_others_sample(tmp_path: Path):
    """A batch is right or an error, also when the log is closed in the middle of it."""
    log = new_log(tmp_path, segment_bytes=200_000)
    for first in range(0, 500, 10):
        write(log, numbers(first, 10))
    wrong: list[Any] = []
    begun = threading.Barrier(4)

    def sample() -> None:
        sampler = log.all().sampler(seed=0)
        begun.wait(60)
        while True:
            try:
                batch = sampler.sample(256, keys=["observations/image", "policy_version"])
            except Exception as error:  # noqa: BLE001  # reported by the test
                if type(error).__name__ != "ClosedError":
                    wrong.append(error)
                return
            if not np.array_equal(batch["observations"]["image"][:, 5, 5, 0], batch["policy_version"] % 251):
                wrong.append("zeros")

    threads = [threading.Thread(target=sample) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    threading.Event().wait(0.05)
    log.close()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_log_facts_of_evicted_trajectories_are_forgotten(tmp_path: Path):
    """A log that runs for months: neither its file of facts nor its memory grows with what is gone."""
    schema = Schema.declare({"observations": (np.float32, (2,)), "rewards": (np.float32, ())})
    count = rounds(4_000, 12_000)
    with new_log(tmp_path, schema, capacity_steps=200) as log, Log.open(tmp_path / "log", "r") as reader:
        for n in range(count):
            with log.episode(actor="a") as episode:
                episode.append({"observations": np.float32([n, -n]), "rewards": n})
            if n % 3 == 0:
                log.annotate(episode.trajectory, success=True)
            if n % 5 == 0:
                log.relabel(episode.trajectory, "rewards", [n + 0.5])
        assert log.facts.lines < count
        assert len(log.facts.deleted) < count
        assert len(log.facts.relabeled["rewards"]) < count // 10
        wanted = [n + 0.5 * (n % 5 == 0) for n in range(count - 200, count)]
        assert log.read(log.all().keys())["rewards"].tolist() == wanted
        assert len(log.successes()) == sum(n % 3 == 0 for n in range(count - 200, count))
        reader.refresh()
        assert reader.read(reader.all().keys())["rewards"].tolist() == wanted
    with Log.open(tmp_path / "log") as log:
        assert log.read(log.all().keys())["rewards"].tolist() == wanted
        assert log.all().keys()[0] >> 32 == count - 200


def test_trajectories_that_ended_who_sent_them_and_what_follows_what(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3), actor="a", boot="1", store="s")  # ends without having terminated
        with log.episode(actor="b", boot="2", store="s") as running:
            for sequence, each in enumerate([*numbers(10, 2), step(20), step(21, terminated=True)], 5):
                running.append(each, sequence=sequence)
        write(log, [step(30, truncated=True)])
        first, second, third = log.trajectories()
        with log.reading() as steps:
            assert steps.ended_trajectories() == [second, third]
            assert steps.senders() == {first: ("a", "1", "s"), second: ("b", "2", "s"), third: ("", "", "")}
            keys = log.trajectory_keys(second)
            assert steps.follows(keys).tolist() == [False, True, False, True] and steps.sequences(keys).tolist() == [
                5,
                6,
                7,
                8,
            ]
