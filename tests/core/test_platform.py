"""Both forms of what differs between systems do the same; and a Python that takes
itself for one on macOS runs what must run there.

No Mac was at hand: `tests/core/mac` pretends to be one, which shows that nothing of
Linux is needed, not that macOS has no surprise.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import mmap
import os
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.cli import doctor
from hilt.core import files, platform
from hilt.core.errors import StorageError
from hilt.replay import Log
from hilt.replay.storage.arena import Arena, SeparateMaps, side_by_side
from hilt.wire.sockets import DRAIN_BYTES, Bell
from tests.effort import need_rendering
from tests.replay.toy_steps import SCHEMA, step

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "hilt"
FLAGS = ("NATIVE", "VECTORED", "NON_WAITING_READS", "READ_AHEAD", "SIDE_BY_SIDE", "SOCKET_FILTERS")


@pytest.fixture(params=["native", "portable"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "portable":
        make_portable(monkeypatch)
    elif not platform.NATIVE:
        pytest.skip("the portable forms are forced, or this is not Linux")
    return str(request.param)


def make_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        monkeypatch.setattr(platform, flag, False)
    monkeypatch.setattr(platform, "_sync_file_range", None)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_reads_and_writes_go_on_where_the_system_stopped(form: str, file: int, monkeypatch: pytest.MonkeyPatch):
    """One call takes 2 GiB at most, and may take less: what is left is no end of the file."""
    pwrite, pread, preadv = os.pwrite, os.pread, getattr(os, "preadv", None)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, memoryview(data).cast("B")[:700], offset))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 900), offset))
    if preadv is not None:
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, offset, *flags: preadv(fd, [memoryview(buffers[0])[:800]], offset, *flags)
        )
    data = np.random.default_rng(0).integers(0, 255, 10_000, dtype=np.uint8)
    files.DISK.write(file, data, 5)
    out = np.zeros(20_000, np.uint8)
    assert platform.read_into(file, out, 5) == len(data)
    assert (out[: len(data)] == data).all() and not out[len(data) :].any()


@pytest.mark.long
def test_a_file_above_2_gib_is_read_whole(form: str, file: int):
    size = (2 << 30) + (100 << 20)
    os.ftruncate(file, size)  # a sparse file: it takes no room on the disk
    os.pwrite(file, b"end", size - 3)
    out = np.empty(size, np.uint8)
    assert platform.read_into(file, out, 0) == size and out[-3:].tobytes() == b"end"


# --- each facility, in both forms
# -------------------------------------------------------------------------------------------------


def test_buffers_are_written_and_read(form: str, file: int):
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert platform.write_buffers(file, list(rows), 2) == 12
    assert os.pread(file, 99, 0) == b"\0\0" + rows.tobytes()
    found = np.zeros(8, np.uint8)
    assert platform.read_into(file, found, 2) == 8 and found.tolist() == list(range(8))
    assert platform.read_into(file, found, 10) == 4 and found.tolist() == [8, 9, 10, 11, 4, 5, 6, 7], (
        "less at the end of the file"
    )
    platform.announce_read(file, 0, 8)
    platform.start_writing(file, 0, 8)
    platform.sync(file)
    assert platform.is_cached(file, 3) in (True, None)
    assert platform.is_cached(file, 3) is None or form == "native"


def test_platform_short_write_returns_its_size(file: int, monkeypatch: pytest.MonkeyPatch):
    make_portable(monkeypatch)
    sizes = iter([4, 1, 4])
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[: next(sizes)], offset))
    assert platform.write_buffers(file, [b"abcd", b"efgh", b"ijkl"], 0) == 5


def test_allocated_files_are_filled_with_zeros_and_keep_what_they_have(form: str, file: int):
    os.pwrite(file, b"abc", 0)
    platform.allocate(file, 3_000_000)
    assert os.fstat(file).st_size == 3_000_000 and os.pread(file, 5, 0) == b"abc\0\0"
    assert os.fstat(file).st_blocks * 512 >= 3_000_000, "room is taken, not promised"


def test_a_file_without_a_name_is_shared_with_a_child(form: str):
    fd = platform.anonymous_file("hilt-test")
    platform.allocate(fd, mmap.PAGESIZE)
    ours = mmap.mmap(fd, mmap.PAGESIZE)
    code = "import mmap, sys; mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE)[:5] = b'child'"
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True, timeout=60)
    assert ours[:5] == b"child"
    assert os.fstat(fd).st_nlink == 0 and not os.get_inheritable(fd)
    os.close(fd)


def test_a_bell_rings_until_it_is_quiet(form: str):
    bell = Bell()
    assert not bell.quiet()
    for times in (1, DRAIN_BYTES // 8, DRAIN_BYTES, 20_000):  # the last ones are more than a pipe has room for
        for _ in range(times):
            bell.ring()
        assert select.select([bell], [], [], 0)[0]
        assert bell.quiet() and not bell.quiet() and not select.select([bell], [], [], 0)[0]
    bell.close()
    bell.ring()


def test_errors_name_the_file(form: str, tmp_path: Path):
    path = tmp_path / "full"
    fd = files.DISK.create(path)
    with pytest.raises(StorageError, match=str(path)):
        files.DISK.truncate(fd, -1)
    files.DISK.close(fd)
    assert fd not in files._NAMES


def test_platform_description(form: str, tmp_path: Path):
    assert 1 <= platform.usable_cpus() <= (os.cpu_count() or 1)
    assert 1 << 20 < platform.free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert bool(platform.boot_id()) == (form == "native")
    assert (platform.filesystem(tmp_path) == "unknown") == (form == "portable")
    if form == "portable":
        before = os.getpriority(os.PRIO_PROCESS, 0)
        assert platform.take_real_time_priority() is False
        platform.let_others_go_first(19)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_platform_pipe_holds_unread_messages():
    here, there = platform.message_pipe()
    for number in range(200):
        here.send_bytes(number.to_bytes(400, "little"))
    assert [int.from_bytes(there.recv_bytes(), "little") for _ in range(200)] == list(range(200))
    here.close()
    with pytest.raises(EOFError):
        there.recv_bytes()
    there.close()


CHILD = """
import os, sys, time
from hilt.core import platform
platform.end_with_pipe(int(sys.argv[1]), float(sys.argv[2]))
print("begun", flush=True)
{}
"""
HANGS_WITH_THE_LOCK = "import ctypes; ctypes.PyDLL(None).pause()"  # a PyDLL does not let go of Python's lock


@pytest.mark.parametrize(
    ("portable", "hangs", "deadline"),
    [("", HANGS_WITH_THE_LOCK, 600), ("1", "time.sleep(1000)", 600), ("1", HANGS_WITH_THE_LOCK, 0.5)],
    ids=["by the kernel", "by a thread", "at its deadline"],
)
def test_a_worker_ends_with_its_caller(portable: str, hangs: str, deadline: float):
    if not portable and not platform.LINUX:
        pytest.skip("not Linux")
    theirs, ours = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(hangs), str(theirs), str(deadline)],
        pass_fds=[theirs],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, platform.VARIABLE: portable},
    )
    os.close(theirs)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        if deadline > 1:
            time.sleep(0.1)
            assert worker.poll() is None
        os.close(ours)
        assert worker.wait(60) != 0
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()  # type: ignore[union-attr]


def test_the_end_of_the_parent_is_noticed(monkeypatch: pytest.MonkeyPatch):
    make_portable(monkeypatch)
    parents = iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    here, there = socket.socketpair()
    with here, there:
        platform.wait_for_hang_up(here, parent=7)
        assert next(parents, None) is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        platform.wait_for_hang_up(here, parent=7)  # it had gone before anybody asked


def test_a_hang_up_is_noticed_behind_what_is_unread():
    if not platform.NATIVE:
        pytest.skip("the portable form asks for the parent")
    here, there = socket.socketpair()
    with here:
        there.sendall(b"unread")
        there.close()
        platform.wait_for_hang_up(here, os.getppid())


def test_a_sync_on_macos_empties_the_disks_cache(file: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(platform, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: asked.append((fd, command)))
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append("fsync"))
    platform.sync(file)
    assert asked == [(file, 51)]

    def refuse(code: int) -> Any:
        def call(fd: int, command: int) -> None:
            raise OSError(code, os.strerror(code))

        return call

    monkeypatch.setattr(fcntl, "fcntl", refuse(errno.ENOTSUP))
    platform.sync(file)
    assert asked[1:] == ["fsync"], "a file system without it"
    monkeypatch.setattr(fcntl, "fcntl", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        platform.sync(file)
    assert asked[1:] == ["fsync"], "a fault of the disk is no reason to try the weaker one"


def test_open_files_as_far_as_the_kernel_lets(monkeypatch: pytest.MonkeyPatch):
    """macOS says that there is no limit and refuses what is over its own."""
    given: list[int] = []

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        given.append(limits[0])
        if limits[0] > 12_000:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    monkeypatch.setattr(platform, "MAX_OPEN_FILES", 10_240)
    platform.allow_open_files(100)
    platform.allow_open_files(1_000)
    platform.allow_open_files(5_000)
    assert given == [4_000, 20_000, 10_240], "100 do not come near it"


def test_the_renderer_is_not_chosen_on_macos(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(platform, "MACOS", True)
    assert platform.renderer_variables() == {} and platform.renderer_name() == "cgl"
    assert platform.install_line("libx0", "x") == "brew install x"
    monkeypatch.setattr(platform, "MACOS", False)
    assert platform.renderer_variables() == {"MUJOCO_GL": "egl"} and platform.renderer_name() == "egl"
    assert platform.install_line("libx0", "x") == "apt-get install libx0"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert platform.renderer_variables() == {"MUJOCO_GL": "osmesa"}, "what is set stays"


# --- a log whose files are not mapped
# ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not platform.SIDE_BY_SIDE, reason="files are not mapped side by side here")
def test_nothing_is_mapped_into_addresses_that_were_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The garbage collector may finalize the addresses before the log that unmaps its files from them."""
    arena = Arena(48, 4096)
    with open(tmp_path / "file", "w+b") as file:
        arena.map(0, file.fileno())
        arena._holder.__del__()
        monkeypatch.setattr(platform, "map_over", lambda *_: pytest.fail("they may be anybody's by now"))
        arena.close()


@pytest.mark.skipif(not platform.SIDE_BY_SIDE, reason="nothing to compare with")
def test_files_are_read_alike_side_by_side_and_each_for_itself(tmp_path: Path):
    per_slot = 4096
    for item in (48, 2048):  # small rows, and frames
        arena, maps = Arena(item, per_slot), SeparateMaps(item, per_slot)
        rng = np.random.default_rng(0)
        fds = {}
        for slot, rows in {0: 500, 1: per_slot, 3: 100}.items():
            fds[slot] = os.open(tmp_path / f"{slot}-{item}", os.O_RDWR | os.O_CREAT)
            os.write(fds[slot], rng.integers(256, size=rows * item, dtype=np.uint8).tobytes())
            arena.map(slot, fds[slot])
            maps.map(slot, fds[slot])

        def agree(index: Any, arena: Any = arena, maps: Any = maps, item: int = item) -> None:
            one, other = np.ones((2, len(index), item), np.uint8)
            arena.take(index, one)
            maps.take(index, other)
            assert np.array_equal(one, other)
            assert all(np.array_equal(arena.item(i), maps.item(i)) for i in index[:5].tolist())

        agree(rng.integers(per_slot, 2 * per_slot, size=50))  # of one file
        agree(
            np.concatenate([rng.integers(500, size=20), [3 * per_slot + 99, 7, 7], np.arange(per_slot, per_slot + 5)])
        )
        agree(np.zeros(0, np.int64))
        os.pwrite(fds[0], b"x" * item, 500 * item)  # a file that has grown since it was mapped
        agree(np.array([500, 0, 3 * per_slot]))
        kept = maps.item(3)
        maps.unmap(0)
        assert np.array_equal(kept, arena.item(3)), "what was taken before stays valid"
        arena.close()
        for fd in fds.values():
            os.close(fd)


def test_a_log_from_a_machine_with_smaller_pages_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages have 4, 16 or 64 KiB, by the processor and the kernel; a file is mapped at the beginning of one."""
    with Log.create(tmp_path / "log", SCHEMA, segment_bytes=30_000) as log:
        with log.episode() as episode:
            for n in range(60):
                episode.append(step(n))
        before = log.all().sampler(seed=0).sample(100)
        room = log.catalog.segments.tables[0].rows_per_slot
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 24)
    assert not side_by_side(room * SCHEMA.layout.row.itemsize)
    with Log.open(tmp_path / "log", mode="r") as log:
        after = log.all().sampler(seed=0).sample(100)
    assert np.array_equal(after["rewards"], before["rewards"])
    assert np.array_equal(after["observations"]["image"], before["observations"]["image"])
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    row = SCHEMA.layout.row.itemsize
    assert SCHEMA.layout.room(100) * row % (1 << 16) == 0, (
        "new segments begin on the pages of the machine that writes them"
    )


# --- nothing of Linux elsewhere, and nothing missing on macOS
# ---------------------------------------------------------------------

LINUX_ONLY = {
    "os": (
        "preadv",
        "pwritev",
        "posix_fadvise",
        "posix_fallocate",
        "memfd_create",
        "eventfd",
        "sched_",
        "SCHED_",
        "setpriority",
        "fdatasync",
        "fsync",
        "pidfd_open",
        "splice",
        "copy_file_range",
        "pipe2",
        "getrandom",
        "RWF_",
        "MFD_",
        "EFD_",
        "O_ASYNC",
        "O_DIRECT",
        "O_TMPFILE",
    ),
    "select": ("poll", "epoll"),
    "signal": ("SIGIO", "sigtimedwait", "sigwaitinfo", "pidfd_send_signal"),
    "fcntl": ("F_SETOWN", "F_SETSIG", "F_ADD_SEALS", "F_FULLFSYNC"),
    "sys": ("platform",),
    "ctypes": ("CDLL", "PyDLL"),
    "threading": ("get_native_id",),
    "mmap": ("MAP_",),
}

MENTIONS = re.compile(
    "|".join([rf"{module}\.({'|'.join(names)})" for module, names in LINUX_ONLY.items()] + ["/proc", "/sys/", "fork"])
)


def uses_of_linux(path: Path) -> Iterator[str]:
    """Lines of a file that name what other systems lack."""
    text = path.read_text()
    if not MENTIONS.search(text):  # most files: reading their syntax takes seconds
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for name in LINUX_ONLY.get(node.value.id, ()):
                if node.attr == name or (name.endswith("_") and node.attr.startswith(name)):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}: {node.value.id}.{node.attr}"
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("/proc", "/sys/"))
        ):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: {node.value}"
        elif isinstance(node, ast.Constant) and node.value in ("fork", "forkserver"):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: start method {node.value}"


def test_every_choice_of_a_system_is_made_in_one_place():
    found = [use for path in sorted(SOURCE.rglob("*.py")) if path.name != "platform.py" for use in uses_of_linux(path)]
    assert found == [], "use hilt.core.platform"
    assert len(list(uses_of_linux(SOURCE / "core" / "platform.py"))) > 20, "the search finds what is there"


REPRESENTATIVE = (
    "tests/replay/test_log.py::test_a_bounded_map_gives_the_same_batches",
    "tests/core/test_files.py",
    "tests/wire/test_client.py::test_update_reports_success",
    "tests/wire/test_flood_guard.py::test_flood_guard_closes_and_opens_and_logs_once",
    "tests/robot/test_control.py::test_shared_state_is_read_again_when_written_meanwhile",
    "tests/envs/test_pool.py::test_pool_replies_are_read_only_and_valid_until_the_next_request",
)


@pytest.mark.timeout(900)
def test_forced_portable_forms_pass_tests_of_every_part():
    environment = {**os.environ, platform.VARIABLE: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *REPRESENTATIVE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_a_python_that_takes_itself_for_one_on_macos(tmp_path: Path):
    """It imports every module, writes and samples a log, sends steps, steps
    simulators and the tabletop, and serves a robot."""
    need_rendering()
    environment = {name: value for name, value in os.environ.items() if name != platform.VARIABLE}
    found = [
        str(Path(__file__).parent / "mac"),
        str(ROOT / "src"),
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment |= {"PYTHONPATH": ":".join(found), "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
    command = [sys.executable, "-m", "tests.core.mac.life", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    modules, system = done.stdout.splitlines()
    assert int(modules.split()[0]) > 200
    assert f"{len(platform.FACILITIES)} of {len(platform.FACILITIES)} facilities in their portable form" in system


# --- what is said of it
# -----------------------------------------------------------------------------------------------------------


def test_the_doctor_names_what_is_portable_and_what_it_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code = (
        "from hilt.cli.doctor import check_system; from pathlib import Path; [print(f) for f "
        "in check_system(Path('.'))]"
    )
    environment = {**os.environ, platform.VARIABLE: "1"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    ).stdout
    assert "facilities in their portable form, forced by HILT_PORTABLE" in told
    assert (
        "found='pread, then a copy (Linux: preadv, into the batch)', cure='cost: one more copy "
        "of each frame that is read'" in told
    )
    monkeypatch.setattr(platform, "in_portable_form", lambda: [])
    (system,) = doctor.check_system(tmp_path)
    assert (system.status, system.found) == ("ok", f"{os.uname().sysname} {os.uname().machine}: all native")


def test_the_docs_have_every_facility():
    lines = [line for line in (ROOT / "docs" / "core.md").read_text().splitlines() if line.startswith("| ")]
    for facility in platform.FACILITIES:
        assert f"| {facility.name} | {facility.linux} | {facility.portable} | {facility.cost} |" in lines, (
            "docs/core.md, Systems"
        )


def test_environment_is_set_for_a_while_and_as_before_after_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HILT_TEST_A", "before")
    monkeypatch.delenv("HILT_TEST_B", raising=False)
    with pytest.raises(KeyError), platform.environment({"HILT_TEST_A": "1", "HILT_TEST_B": "2"}):
        assert (os.environ["HILT_TEST_A"], os.environ["HILT_TEST_B"]) == ("1", "2")
        raise KeyError
    assert os.environ["HILT_TEST_A"] == "before" and "HILT_TEST_B" not in os.environ
