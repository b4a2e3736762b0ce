"""What goes wrong around a log: a full disk, a forbidden folder, a second writer,
readers beside a writer, too many files, bad input.

Each is an error that says what to do; afterwards the log goes on, and nothing promised is lost.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ClosedError,
    ConfigError,
    DiskFullError,
    EmptyError,
    HiltError,
    LockedError,
    MissingFieldError,
    ReadOnlyError,
    SchemaError,
    StorageError,
    UnknownNameError,
)
from hilt.core.files import Files
from hilt.core.tree import ArraySpec
from hilt.replay import Log, Schema
from hilt.replay.key_ranges import key_of
from hilt.replay.maintenance.repair import verify
from tests.effort import rounds
from tests.replay.known_steps import (
    IMAGE,
    SCHEMA,
    SPACING,
    all_keys,
    check_contents,
    columns,
    length,
    make_log,
    same,
    trajectory,
)
from tests.replay.writers import DEADLINE_S, Writer

ROOT = os.geteuid() == 0

# Full disks


class Promised:
    """Writes whatever it can, and remembers what it was promised."""

    def __init__(self, log: Log):
        self.log, self.keys, self.errors = log, set[int](), list[DiskFullError]()
        self._seeds = iter(range(0, 10**9, SPACING))
        self._episode: Any = None
        self._seed = 0

    def step(self) -> None:
        if self._episode is None or self._episode.steps == length(self._seed):
            self._episode, self._seed = self.log.episode(actor="arm"), next(self._seeds)
        self.keys.add(self._episode.append(columns(self._seed, self._episode.steps)))

    def trajectory(self, steps: int = 3, width: int = 2) -> None:
        number = self.log.add(trajectory(next(self._seeds), steps, width))
        self.keys |= {key_of(number, offset) for offset in range(steps * width)}

    def everything(self) -> None:
        """Steps, trajectories that fit a segment and that do not, and facts; what finds no room is counted."""
        actions: list[Callable[[], None]] = [
            *3 * [self.step],
            self.trajectory,
            self.step,
            lambda: self.trajectory(5, 4),
            self.fact,
        ]
        for action in actions:
            try:
                action()
            except DiskFullError as error:
                self.errors.append(error)

    def fact(self) -> None:
        if self.log.trajectories():
            self.log.annotate(self.log.trajectories()[-1], tag=1)

    def check(self) -> None:
        """Everything promised is there, once, and nothing else: a call that failed left nothing."""
        assert set(check_contents(self.log)) == self.keys


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        not ROOT
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small disk needs root; test_no_room_at_any_call covers the same in another way")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("durability", ["every step", "never"])
@pytest.mark.parametrize("compression", ["raw", "zlib"])
def test_a_full_disk(durability: str, compression: str, small_disk: Path):
    """It fills up, space is freed and used up again, several times; then it is opened anew."""
    settings = {"compression": {IMAGE: "zlib"}} if compression == "zlib" else {}
    log = make_log(small_disk / "log", durability=durability, **settings)
    writer, ballast = Promised(log), small_disk / "ballast"
    ballast.write_bytes(bytes(150_000))
    for _ in range(3):
        for _ in range(6):
            writer.everything()
        writer.check()
        if ballast.exists():
            ballast.unlink()
    log.compress()
    assert len(writer.errors) >= 5
    assert f"{small_disk / 'log'}" in str(writer.errors[0])
    assert "no room left to write (No space left on device); nothing of this write was kept" in str(writer.errors[0])
    before = len(writer.keys)
    oldest = log.trajectories()[: len(log.trajectories()) // 2]
    for number in oldest:
        try:
            log.delete(number)
        except DiskFullError:  # the line that says so finds no room either: it is not deleted
            continue
        writer.keys = {key for key in writer.keys if key >> 32 != number}
    assert len(writer.keys) < before
    writer.everything()
    writer.check()
    log.close()
    writer.log = Log.open(small_disk / "log")
    writer.check()
    assert writer.log.damage() == []
    writer.log.close()


class Running(Files):
    """Finds no room at one call, in the middle of a write; then there is room again."""

    def __init__(self) -> None:
        self.calls = 0
        self.full_at = -1
        self._lock = threading.Lock()

    def _room(self) -> bool:
        with self._lock:
            self.calls += 1
            return self.calls != self.full_at

    def _full(self, what: object) -> DiskFullError:
        return DiskFullError(f"{what}: no room left to write (pretended); nothing of this write was kept.")

    def create(self, path: Path) -> int:
        if not self._room():
            raise self._full(path)
        return super().create(path)

    def write(self, fd: int, data: Any, offset: int) -> None:
        if not self._room():
            raw = bytes(memoryview(data).cast("B"))
            super().write(fd, raw[: len(raw) // 2], offset)
            raise self._full(fd)
        super().write(fd, data, offset)

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int) -> None:
        self.write(fd, b"".join(bytes(memoryview(b).cast("B")) for b in buffers), offset)

    def make_folder(self, path: Path) -> None:
        if not self._room():
            raise self._full(path)
        super().make_folder(path)


@pytest.mark.parametrize("durability", ["every episode", "never"])
def test_no_room_at_any_call(durability: str, memory_path: Path, counted: Callable[[str], None]):
    """At each call of a session in turn. What the failing call was writing is not there, everything else is."""
    refused = 0
    for full_at in range(1, 10**6, rounds(6, 1)):
        files = Running()
        log = make_log(memory_path / "log", files, durability=durability)
        files.calls, files.full_at = 0, full_at
        writer = Promised(log)
        writer.everything()
        writer.everything()
        writer.check()
        calls = files.calls
        files.full_at = -1
        writer.everything()
        writer.check()
        log.close()
        writer.log = Log.open(memory_path / "log")
        writer.check()
        assert writer.log.damage() == []
        writer.log.close()
        refused += len(writer.errors)
        shutil.rmtree(memory_path / "log")
        if calls < full_at:
            break
    counted(f"no room at any of {full_at - 1} calls, {refused} times a write was refused")
    assert refused > rounds(2, 20)


def test_no_room_for_compression_leaves_the_frames_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class NoRoom(Files):
        def create(self, path: Path) -> int:
            if path.name.endswith(".zlib.new"):
                raise DiskFullError(f"{path}: no room")
            return super().create(path)

    with make_log(tmp_path / "log", NoRoom(), compression={IMAGE: "zlib"}) as log:
        for i in range(3):
            log.add(trajectory(i * SPACING, 4, 3))
        log.compress()
        assert "not compressed, its frames stay as they are" in caplog.text
        assert len(check_contents(log)) == 36
    with Log.open(tmp_path / "log") as log:
        assert len(check_contents(log)) == 36


def write_beyond_limit(pipe: Connection, folder: Path) -> None:
    """A file may have 30 kB: what is larger fails in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    log = make_log(folder, segment_bytes=10**6)
    written = 0
    try:
        while True:
            log.add(trajectory(written * SPACING, 2, 2))
            written += 1
    except DiskFullError as error:
        pipe.send(("full", str(error), written))
    check_contents(log)
    pipe.send(("steps", len(log)))


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path):
    writer = Writer(write_beyond_limit, tmp_path / "log")
    writer.listen(DEADLINE_S, "steps")
    (_, text, written), (_, steps) = writer.reports
    assert "observations.image.frames: no room left to write (File too large); nothing of this write was kept" in text
    assert steps == 4 * written > 0
    writer.join()
    with Log.open(tmp_path / "log") as log:
        assert len(check_contents(log)) == steps
        assert log.recovery.torn_steps == 0


# Disks that fail


class Failing(Files):
    """Its disk refuses the next sync, and then works as if nothing had been: what
    it could not write, it has forgotten."""

    def __init__(self) -> None:
        self.fail = False

    def sync(self, fd: int) -> None:
        if self.fail:
            self.fail = False
            raise StorageError("rows: Input/output error. The disk reports a fault")
        super().sync(fd)


def test_a_sync_that_failed_promises_nothing_any_more(tmp_path: Path):
    """A second sync would succeed, for the system has dropped the bytes that it could not write."""
    files = Failing()
    log = make_log(tmp_path / "log", files, durability="every step")
    episode = log.episode()
    episode.append(columns(10 * SPACING, 0))
    files.fail = True
    for t in range(1, 3):
        with pytest.raises(StorageError, match="The disk reports a fault"):
            episode.append(columns(10 * SPACING, t))
        assert log.synced == 1
    with pytest.raises(StorageError, match="The disk reports a fault"):
        log.close()
    with Log.open(tmp_path / "log") as log:  # the lock is free, and the steps are process-safe
        assert len(check_contents(log)) == 3


def test_a_sync_in_the_background_that_failed_stops_the_next_write(tmp_path: Path):
    files = Failing()
    log = make_log(tmp_path / "log", files, durability="at most 5 ms")
    log.add(trajectory(0, 2, 1))
    log.sync()
    files.fail = True
    log.add(trajectory(SPACING, 2, 1))
    end = time.monotonic() + DEADLINE_S
    while log._syncer.error is None and time.monotonic() < end:
        time.sleep(0.001)
    for action in (lambda: log.add(trajectory(2 * SPACING, 2, 1)), lambda: log.annotate(0, success=True), log.episode):
        with pytest.raises(StorageError, match="The disk reports a fault"):
            action()
    assert len(log) == 4, "what was refused was not kept"
    with pytest.raises(StorageError, match="The disk reports a fault"):
        log.close()
    with Log.open(tmp_path / "log") as log:
        assert len(check_contents(log)) == 4


def test_durability_at_most_n_milliseconds(tmp_path: Path):
    """Each step becomes power-safe without another word. A sync begins after half of the
    time; how long it takes is the disk's matter."""
    with make_log(tmp_path / "log", durability="at most 20 ms") as log, log.episode() as episode:
        assert log._syncer._pause == 0.010
        for t in range(10):
            episode.append(columns(10 * SPACING, t))
            end = time.monotonic() + DEADLINE_S
            while log.synced <= t:
                assert time.monotonic() < end
                time.sleep(0.001)
        assert log.stats()["power_safe"] == 10


# Folders that cannot be used


def as_nobody(pipe: Connection, action: str, folder: Path) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        make_log(folder) if action == "create" else Log.open(folder, "r" if action == "read" else "a")
        pipe.send(("fine",))
    except HiltError as error:
        pipe.send(("error", type(error).__name__, str(error)))


@pytest.mark.skipif(not ROOT, reason="becomes another user")
@pytest.mark.parametrize("action", ["create", "read", "append"])
def test_a_forbidden_folder(action: str, tmp_path: Path):
    for folder in [*tmp_path.parents, tmp_path][2:]:
        folder.chmod(0o755)
    with make_log(tmp_path / "log") as log:
        log.add(trajectory(0, 2, 1))
    if action == "read":
        (tmp_path / "log").chmod(0o700)
    target = tmp_path / "other" if action == "create" else tmp_path / "log"
    writer = Writer(as_nobody, action, target)
    writer.listen(DEADLINE_S, "error")
    assert writer.reports[-1][:2] == ("error", "StorageError")
    assert str(target) in writer.reports[-1][2]
    assert "Permission denied. Check the owner and permissions of this path." in writer.reports[-1][2]


@pytest.mark.skipif(ROOT, reason="root may do everything")
def test_a_forbidden_folder_as_a_user(tmp_path: Path):
    make_log(tmp_path / "log").close()
    (tmp_path / "log").chmod(0o000)
    with pytest.raises(StorageError, match=r"log: Permission denied\. Check the owner and permissions of this path"):
        Log.open(tmp_path / "log")
    (tmp_path / "log").chmod(0o755)


def test_a_file_in_place_of_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"file: Not a directory\. A part of this path is a file, not a folder"):
        make_log(tmp_path / "file" / "log")
    with pytest.raises(StorageError, match=r"file: Not a directory\. A part of this path is a file, not a folder"):
        make_log(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_file_system(small_disk: Path):
    with make_log(small_disk / "log") as log:
        log.add(trajectory(0, 4, 3))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        StorageError, match=r"Read-only file system\. The file system is read-only: choose another folder"
    ):
        Log.open(small_disk / "log")
    with pytest.raises(StorageError, match="The file system is read-only: choose another folder"):
        make_log(small_disk / "other")
    with Log.open(small_disk / "log", "r") as log:
        assert len(check_contents(log)) == 12


def test_a_folder_with_other_things_in_it(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        ConfigError, match=r"expected a new or empty folder, got one that holds thesis\.tex\. Choose another path"
    ):
        make_log(tmp_path)
    make_log(tmp_path / "log").close()
    with pytest.raises(ConfigError, match=r"a log is there already; open it with Log\.open\('.*/log'\)"):
        make_log(tmp_path / "log")


# One writer


def hold(pipe: Connection, folder: Path) -> None:
    log = Log.open(folder)
    pipe.send(("holding", os.getpid()))
    pipe.recv()
    log.close()


def test_log_second_writer_error_names_the_first(tmp_path: Path):
    make_log(tmp_path / "log").close()
    first = Writer(hold, tmp_path / "log")
    first.listen(DEADLINE_S, "holding")
    text = (
        rf"log: process {first.reports[-1][1]} on .*, since .*, is writing to this log\. Open it with "
        r"mode='r', or end that process"
    )
    with pytest.raises(LockedError, match=text):
        Log.open(tmp_path / "log")
    with pytest.raises(LockedError, match=text):
        Log.open(tmp_path / "log", capacity_steps=7)
    with Log.open(tmp_path / "log", "r") as log:
        assert log.settings["capacity_steps"] is None, "the settings were changed without the lock"
    first.kill()
    Log.open(tmp_path / "log").close()


def test_a_second_writer_in_the_same_process(tmp_path: Path):
    log = make_log(tmp_path / "log")
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        Log.open(tmp_path / "log")
    log.close()
    Log.open(tmp_path / "log").close()


def fork_and_linger(pipe: Connection, folder: Path) -> None:
    """The parent is killed, its forked child lives on."""
    log = Log.open(folder)
    log.add(trajectory(0, 2, 1))
    child = os.fork()
    if child == 0:
        try:
            log.add(trajectory(SPACING, 2, 1))
            pipe.send(("child", child, "wrote"))
        except ReadOnlyError as error:
            log.close()
            pipe.send(("child", os.getpid(), str(error)))
        time.sleep(DEADLINE_S)
        os._exit(0)
    time.sleep(DEADLINE_S)


def test_a_forked_process_neither_writes_nor_holds_the_lock(tmp_path: Path):
    make_log(tmp_path / "log").close()
    parent = Writer(fork_and_linger, tmp_path / "log")
    parent.listen(DEADLINE_S, "child")
    _, child, text = parent.reports[-1]
    try:
        assert "writes to this log, and this one was forked from it; open it with mode='r'" in text
        parent.kill()
        with Log.open(tmp_path / "log") as log:
            assert len(check_contents(log)) == 2
    finally:
        os.kill(child, 9)


def test_a_forked_process_does_not_remove_a_temporary_log():
    log = Log.anonymous(SCHEMA)
    log.add(trajectory(0, 2, 1))
    child = os.fork()
    if child == 0:
        log.close()
        del log
        os._exit(0)
    os.waitpid(child, 0)
    assert log.path.exists()
    assert len(check_contents(log)) == 2
    log.close()
    assert not log.path.exists()


def fork_among_writers(pipe: Connection, folder: Path, forks: int) -> None:
    """Three threads write all the time; forked processes read, find the log as it
    is between two changes, and close it."""
    log, stop = Log.open(folder), threading.Event()

    def write(thread: int) -> None:
        seed = thread
        while not stop.is_set():
            log.add(trajectory((thread + 3 * (seed := seed + 1)) * SPACING, 2, 1))

    threads = [threading.Thread(target=write, args=(thread,), daemon=True) for thread in range(3)]
    for thread in threads:
        thread.start()
    sampler = log.all().sampler(seed=0)
    for _ in range(forks):
        child = os.fork()
        if child == 0:
            try:
                check_contents(log, whole=False)
                if len(log):
                    sampler.sample(8)
                log.close()
                os._exit(0)
            finally:
                os._exit(1)
        end, status = time.monotonic() + DEADLINE_S / 2, (0, 0)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, 9)
        pipe.send(("child", "hangs" if status[0] == 0 else os.waitstatus_to_exitcode(status[1])))
        if status[0] == 0:
            break
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    log.close()
    pipe.send(("done",))


def test_a_fork_while_threads_write_does_not_hang_the_child(tmp_path: Path):
    make_log(tmp_path / "log", durability="never").close()
    forks = rounds(5, 25)
    parent = Writer(fork_among_writers, tmp_path / "log", forks)
    parent.listen(4 * DEADLINE_S, "done")
    assert [report[1] for report in parent.reports if report[0] == "child"] == [0] * forks
    parent.kill()
    assert verify(tmp_path / "log").ok


# Readers beside the writer


def append_and_evict(pipe: Connection, folder: Path, seconds: float) -> None:
    try:
        with Log.open(folder) as log:
            rng, end, seed = np.random.default_rng(0), time.monotonic() + seconds, 0
            episode, episode_seed = log.episode(), 0
            pipe.send(("writing",))
            # likewise, some 1,300 steps
            while time.monotonic() < end or (seed < 300 * SPACING and time.monotonic() < end + 40):
                seed += SPACING
                if rng.random() < 0.3:
                    number = log.add(trajectory(seed, 4, 3))
                    if rng.random() < 0.2:
                        log.delete(number)
                else:
                    if episode.steps == length(episode_seed):
                        episode, episode_seed = log.episode(), seed
                    episode.append(columns(episode_seed, episode.steps))
                time.sleep(0.0005)
            log.compress()
            pipe.send(("done", log.stats()["inserted"], log.stats()["evicted"], log.stats()["segments_deleted"]))
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


def sample_and_check(pipe: Connection, folder: Path, seconds: float, seed: int) -> None:
    try:
        end, batches, seen = time.monotonic() + seconds, 0, 0
        with Log.open(folder, "r", cache_bytes=None if seed else 200_000) as log:
            sampler = log.all().sampler(seed=seed)
            # on a machine that stands still
            while time.monotonic() < end or (batches <= 20 and time.monotonic() < end + 30):
                log.refresh()
                keys = all_keys(log)
                assert len(keys) == len(set(keys)) == len(log)
                try:
                    batch = sampler.sample(16)
                except EmptyError:
                    time.sleep(0.001)
                    continue
                check_batch(batch)
                batches, seen = batches + 1, max(seen, keys[-1] >> 32)
        pipe.send(("done", batches, int(seen)))
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


def check_batch(batch: Any) -> None:
    given = {name: batch[name] for name in columns(0, 0)}
    seed, t = given["policy_version"], given["actions"][:, 0].astype(np.int64)
    same(given, {**columns(seed, t), "shape": given["shape"]}, np.arange(len(seed)))


@pytest.mark.parametrize("compression", ["raw", "zlib"])
def test_readers_beside_a_writer_that_appends_evicts_and_compresses(
    compression: str, tmp_path: Path, counted: Callable[[str], None]
):
    """Every field of every batch is right, no key is there twice, and readers come after the writer."""
    settings = {"compression": {IMAGE: "zlib"}} if compression == "zlib" else {}
    make_log(tmp_path / "log", capacity_steps=300, durability="never", **settings).close()
    seconds = rounds(0.8, 10.0)
    writer = Writer(append_and_evict, tmp_path / "log", 1.2 * seconds)
    writer.listen(DEADLINE_S, "writing")  # a process may take seconds to start
    readers = [Writer(sample_and_check, tmp_path / "log", seconds, seed) for seed in range(3)]
    for process in [writer, *readers]:
        process.listen(DEADLINE_S, "done")
        assert process.reports and process.reports[-1][0] == "done", process.reports
    _, inserted, evicted, deleted = writer.reports[-1]
    assert inserted > 500 and evicted > 200 and deleted > 10
    assert all(reader.reports[-1][1] > 20 for reader in readers), [reader.reports for reader in readers]
    counted(
        f"{inserted} steps in, {evicted} evicted, {deleted} segments deleted; batches checked "
        f"{[r.reports[-1][1] for r in readers]}"
    )


def test_a_reader_follows_everything_a_writer_does(tmp_path: Path):
    writer = make_log(tmp_path / "log", capacity_steps=100)
    reader = Log.open(tmp_path / "log", "r")
    view = reader.successes()
    episode = writer.episode()
    for i in range(20):
        if i < 10:
            episode.append(columns(10 * SPACING, i))
        number = writer.add(trajectory((20 + i) * SPACING, 4, 3))
        writer.annotate(number, success=i % 2 == 0)
        if i % 5 == 4:
            writer.delete(number)
        reader.refresh()
        assert all_keys(reader) == all_keys(writer)
        assert set(view.trajectories()) == set(writer.successes().trajectories())
        check_contents(reader)
    writer.close()
    reader.refresh()
    writer = Log.open(tmp_path / "log")
    writer.add(trajectory(0, 4, 3))
    reader.refresh()
    assert all_keys(reader) == all_keys(writer)
    check_contents(reader)
    writer.close()
    reader.close()


def test_a_reader_that_finds_nothing_new_leaves_its_index_alone(tmp_path: Path):
    """A look at an unchanged log costs the same, however long it is."""
    writer = make_log(tmp_path / "log")
    for i in range(4):
        writer.add(trajectory(i * SPACING, 2, 2))
    reader = Log.open(tmp_path / "log", "r")
    kept, version = reader.index.entries, reader.index.version
    reader.refresh()
    assert reader.index.entries.base is kept.base and reader.index.version == version
    writer.delete(1)
    writer.add(trajectory(9 * SPACING, 2, 2))
    reader.refresh()
    assert reader.trajectories() == [0, 2, 3, 4] == writer.trajectories() and reader.index.version > version
    check_contents(reader)
    writer.close()
    reader.close()


def test_a_reader_keeps_its_places_when_a_segment_is_sealed_and_compressed(tmp_path: Path):
    """Nothing leaves a view and comes back: priorities and counts of samples stay."""
    writer = make_log(tmp_path / "log", compression={IMAGE: "zlib"})
    for i in range(3):
        writer.add(trajectory(i * SPACING, 2, 2))
    reader = Log.open(tmp_path / "log", "r")
    view = reader.all()
    for i in range(3, 9):
        writer.add(trajectory(i * SPACING, 2, 2))
        writer.compress()
        reader.refresh()
        assert view.selection is not None and view.selection.left == 0
        assert len(check_contents(reader)) == 4 * (i + 1)
    writer.close()
    reader.close()


def test_log_reader_notices_a_recreated_log(tmp_path: Path):
    """Another log in the same place, with segments of the same numbers."""
    with make_log(tmp_path / "log") as log:
        log.add(trajectory(0, 4, 3))
    reader = Log.open(tmp_path / "log", "r")
    assert len(check_contents(reader)) == 12
    shutil.rmtree(tmp_path / "log")
    with make_log(tmp_path / "log") as log:
        log.add(trajectory(SPACING, 2, 2))
    reader.refresh()
    assert set(check_contents(reader).values()) == {(SPACING, 0), (SPACING + 1, 0), (SPACING, 1), (SPACING + 1, 1)}
    reader.close()


# Closed and read-only logs


def test_log_closed_is_an_error(tmp_path: Path):
    log = make_log(tmp_path / "log")
    number = log.add(trajectory(0, 2, 1))
    episode, view = log.episode(), log.all()
    episode.append(columns(10 * SPACING, 0))
    log.close()
    log.close()
    actions: list[Callable[[], object]] = [
        lambda: log.add(trajectory(SPACING, 2, 1)),
        lambda: episode.append(columns(10 * SPACING, 1)),
        lambda: log.annotate(number, success=True),
        lambda: log.delete(number),
        lambda: log.read(np.array([key_of(number)])),
        lambda: view.sample(4),
        log.episode,
        log.sync,
    ]
    for action in actions:
        with pytest.raises(ClosedError, match=r"log: this log is closed; open it again"):
            action()


def test_a_log_opened_for_reading_is_not_written_to(tmp_path: Path):
    with make_log(tmp_path / "log") as log:
        number = log.add(trajectory(0, 2, 1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "log").rglob("*")}
    with Log.open(tmp_path / "log", "r") as log:
        add, annotate, delete = (
            lambda: log.add(trajectory(SPACING, 2, 1)),
            lambda: log.annotate(number, a=1),
            lambda: log.delete(number),
        )
        for action in (add, annotate, delete, log.episode):
            with pytest.raises(ReadOnlyError, match=r"log: opened for reading; open it with mode='a' to write"):
                action()
        check_contents(log)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "log").rglob("*")} == before
    with pytest.raises(
        ConfigError, match="capacity_steps: a log that is opened for reading keeps its settings; open it with mode='a'"
    ):
        Log.open(tmp_path / "log", "r", capacity_steps=5)
    with pytest.raises(ConfigError, match="mode 'w': expected 'r' to read or 'a' to append"):
        Log.open(tmp_path / "log", "w")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"no setting named 'capacity_step'; did you mean 'capacity_steps'\?"):
        Log.open(tmp_path / "log", capacity_step=5)


# Too many open files


def open_with_few_files(pipe: Connection, folder: Path, limit: int) -> None:
    np.ma.is_masked(np.zeros(1))  # numpy imports this part when it needs it, from files
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        log = Log.open(folder)
        pipe.send(("opened", len(log)))
    except HiltError as error:
        pipe.send(("error", type(error).__name__, str(error)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        pipe.send(("files", len(os.listdir("/proc/self/fd"))))


def test_log_with_too_many_open_files(tmp_path: Path):
    with make_log(tmp_path / "log", durability="never") as log:
        for i in range(60):
            log.add(trajectory(i * SPACING, 4, 3))
    few = Writer(open_with_few_files, tmp_path / "log", 60)
    few.listen(DEADLINE_S, "files")
    few.join()
    kind, name, text = few.reports[0]
    assert (kind, name) == ("error", "StorageError")
    assert "Too many open files: raise the limit with ulimit -n" in text
    assert few.reports[1][1] < 30, "files stay open after the error"
    enough = Writer(open_with_few_files, tmp_path / "log", 400)
    enough.listen(DEADLINE_S, "opened")
    enough.join()
    assert enough.reports == [("opened", 720)]
    with Log.open(tmp_path / "log") as log:
        assert len(check_contents(log)) == 720
        assert log.recovery.set_aside == [], "a segment that could not be opened is not damaged"


def write_with_few_files(pipe: Connection, folder: Path) -> None:
    log = make_log(folder, durability="never")
    writer = Promised(log)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    refused, holes = 0, [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    for _ in range(30):
        try:
            writer.trajectory(4, 3)
        except StorageError as error:
            refused, text = refused + 1, str(error)
            if holes:
                os.close(holes.pop())
    writer.check()
    pipe.send(("done", refused, text, len(log)))


def test_log_with_too_many_open_files_while_writing(tmp_path: Path):
    """A segment that cannot be opened is not begun; with a file closed elsewhere, writing goes on."""
    writer = Writer(write_with_few_files, tmp_path / "log")
    writer.listen(DEADLINE_S, "done")
    writer.join()
    _, refused, text, steps = writer.reports[-1]
    assert refused > 3 and "Too many open files: raise the limit with ulimit -n" in text
    with Log.open(tmp_path / "log") as log:
        assert len(check_contents(log)) == steps


# Bad input


FINITE = Schema.declare(
    {
        "observations": {"image": (np.uint8, (32, 32, 3)), "state": ArraySpec(np.dtype(np.float32), (3,), finite=True)},
        "actions": (np.float32, (2,)),
        "rewards": ArraySpec(np.dtype(np.float32), (), finite=True),
    }
)


def good_step() -> dict[str, Any]:
    observation = {"image": np.zeros((32, 32, 3), np.uint8), "state": np.zeros(3, np.float32)}
    return {"observations": observation, "actions": np.zeros(2, np.float32), "rewards": np.float32(0)}


def changed(**leaves: Any) -> dict[str, Any]:
    step = good_step()
    for path, value in leaves.items():
        parent, _, name = path.rpartition("__")
        node = step[parent] if parent else step
        if value is None:
            del node[name]
        else:
            node[name] = value
    return step


BAD_STEPS = {
    "dtype": (
        changed(observations__image=np.zeros((32, 32, 3), np.float32)),
        SchemaError,
        (
            r"observations/image: expected uint8 \(32, 32, 3\), got float32 \(32, 32, 3\)\. Convert it "
            r"with \.astype\(np\.uint8\)"
        ),
    ),
    "shape": (
        changed(observations__image=np.zeros((32, 32), np.uint8)),
        SchemaError,
        r"observations/image: expected uint8 \(32, 32, 3\), got uint8 \(32, 32\)",
    ),
    "missing": (
        changed(observations__state=None),
        MissingFieldError,
        r"observations/state: expected float32 \(3,\), got nothing.* Add this field",
    ),
    "missing subtree": (
        changed(observations=None),
        MissingFieldError,
        r"observations/image: expected uint8 \(32, 32, 3\), got nothing",
    ),
    "extra": (
        changed(reward=np.float32(1)),
        SchemaError,
        r"reward: not a field of this schema; did you mean 'rewards'\? Remove it or declare it",
    ),
    "extra inside": (
        changed(observations__depth=np.zeros(4)),
        SchemaError,
        r"observations/depth: not a field of this schema",
    ),
    "nan": (
        changed(observations__state=np.array([0, np.nan, 0], np.float32)),
        SchemaError,
        r"observations/state: expected finite numbers, got nan at \(1,\)",
    ),
    "infinite": (changed(rewards=np.float32(np.inf)), SchemaError, r"rewards: expected finite numbers, got inf"),
    "a mapping": (
        changed(actions={"arm": np.zeros(2)}),
        SchemaError,
        r"actions: expected float32 \(2,\), got a mapping with arm",
    ),
    "text": (changed(actions="left"), SchemaError, r"actions: expected float32 \(2,\), got"),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_bad_step_is_refused_by_name_and_leaves_nothing(what: str, tmp_path: Path):
    step, kind, text = BAD_STEPS[what]
    with make_log(tmp_path / "log", schema=FINITE) as log, log.episode() as episode:
        episode.append(good_step())
        with pytest.raises(kind, match=text):
            episode.append(step)
        whole = {name: _batched(value) for name, value in step.items()}
        with pytest.raises(SchemaError):
            log.add(whole)
        assert log.stats()["rejected"] == 2 and log.stats()["inserted"] == 1
        key = episode.append(good_step())
        assert key & 0xFFFFFFFF == 1, "the refused step took no place"
    with Log.open(tmp_path / "log") as log:
        assert len(log) == 2


def _batched(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _batched(inner) for name, inner in value.items()}
    return np.broadcast_to(np.asarray(value), (3, 2, *np.shape(value)))


def test_a_bad_trajectory_is_refused_by_name(tmp_path: Path):
    with make_log(tmp_path / "log", schema=FINITE) as log:
        good = {name: _batched(value) for name, value in good_step().items()}
        with pytest.raises(
            SchemaError, match=r"actions: expected leading axes \(3, 2\) as observations/image has, got \(3, 1\)"
        ):
            log.add({**good, "actions": good["actions"][:, :1]})
        with pytest.raises(SchemaError, match="a trajectory needs at least one step, got T=0 and B=2"):
            log.add({name: _first(value, 0) for name, value in good.items()})
        late = np.array(good["rewards"])
        late[2, 1] = np.nan
        with pytest.raises(
            SchemaError,
            match=r"rewards: expected finite numbers, got nan at \(2, 1\)\. Drop this step or mend its source",
        ):
            log.add({**good, "rewards": late})
        log.add(good)
        assert len(log) == 6 and log.stats()["rejected"] >= 2


def _first(value: Any, count: int) -> Any:
    return {name: _first(inner, count) for name, inner in value.items()} if isinstance(value, dict) else value[:count]
