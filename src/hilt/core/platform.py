"""What differs between operating systems: every choice between Linux and the rest is made here, nowhere else in Hilt.

Linux has calls that make Hilt faster or safer and that other systems lack. Each function below uses the Linux call
where it is there, and otherwise its portable form, which is what macOS runs. ``HILT_PORTABLE=1`` in the environment
forces the portable forms on Linux too, in this process and in those that it starts: so the tests run what a Mac runs
(``make test-portable``). `FACILITIES` lists both forms and what the portable one costs; ``hilt doctor`` prints them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hilt.core.tree import Array

VARIABLE = "HILT_PORTABLE"
LINUX = sys.platform.startswith("linux")
MACOS = sys.platform == "darwin"
FORCED = os.environ.get(VARIABLE, "0") not in ("", "0")
NATIVE = LINUX and not FORCED
"""Whether the calls of Linux are used, as far as this kernel and this Python have them."""

# --- files ---

VECTORED = NATIVE and hasattr(os, "preadv") and hasattr(os, "pwritev")
NON_WAITING_READS = VECTORED and hasattr(os, "RWF_NOWAIT")
READ_AHEAD = NATIVE and hasattr(os, "posix_fadvise")


MAX_IO_BYTES = 1 << 30
"""Of one read or write. Linux stops at 2 GiB less a page; macOS refuses more than 2 GiB less a byte."""


def read_into(fd: int, buffer: bytearray | memoryview | Array, offset: int) -> int:
    """Reads from this offset into a contiguous buffer of bytes; returns the number of bytes
    read, smaller only at the end of the file."""
    if VECTORED:
        done = os.preadv(fd, [buffer], offset)
        if done == len(buffer):
            return done
    else:
        done = 0
    target = memoryview(buffer)
    while done < target.nbytes:  # one call reads 2 GiB at most, and may stop earlier
        part = target[done : done + MAX_IO_BYTES]
        if VECTORED:
            got = os.preadv(fd, [part], offset + done)
        else:
            data = os.pread(fd, part.nbytes, offset + done)
            got = len(data)
            part[:got] = data
        if not got:
            break
        done += got
    return done


def write_buffers(fd: int, buffers: Sequence[memoryview | Array], offset: int) -> int:
    """Writes up to 512 buffers one after the other; returns the number of bytes written,
    which is smaller if the system stopped early."""
    if VECTORED:
        return os.pwritev(fd, buffers, offset)
    written = 0
    for buffer in buffers:
        count = os.pwrite(fd, buffer, offset + written)
        written += count
        if count != memoryview(buffer).nbytes:
            break
    return written


def is_cached(fd: int, offset: int) -> bool | None:
    """Whether the byte at this offset is in memory, so that reading it does not wait for the
    disk; None where that cannot be found out."""
    if not NON_WAITING_READS:
        return None
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # not on this file system
        return None
    return True


def announce_read(fd: int, offset: int, size: int) -> None:
    """Lets the system begin to read what will be read soon. Only a hint."""
    if READ_AHEAD:
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


def start_writing(fd: int, offset: int, size: int) -> None:
    """Lets the disk begin with what will be synced soon. Only a hint: the sync waits for it."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, 2)  # SYNC_FILE_RANGE_WRITE


def sync(fd: int) -> None:
    """Returns when the file's bytes would survive a power cut. On macOS `fsync` leaves them in the disk's cache."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(fd, _FULL_SYNC)
            return
        except OSError as error:
            # those: not on this file system
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.ENODEV):
                raise
    os.fsync(fd)


def allocate(fd: int, size: int) -> None:
    """Makes a file this long, with room for all of it: no room is an error here, not a crash later."""
    if NATIVE and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    end = os.fstat(fd).st_size
    while end < size:
        end += os.pwrite(fd, bytes(min(size - end, 1 << 20)), end)


def anonymous_file(name: str) -> int:
    """A new file without a name, for processes that get it by `pass_fds`. It is gone with the last of them."""
    if NATIVE and hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def path_of(fd: int) -> Path | None:
    """The path of an open file; None where the system does not tell it."""
    if NATIVE:
        with contextlib.suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{fd}"))
    return None


def allow_open_files(count: int) -> None:
    """Raises this process's limit on open files, as far as the system lets it, if this number comes near it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 2 * count > soft != hard:
        return
    wanted = 4 * count if hard == resource.RLIM_INFINITY else min(hard, 4 * count)
    # macOS says that there is no limit, and refuses more than its kernel has room for
    for limit in (wanted, MAX_OPEN_FILES):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(limit, wanted)), hard))
            return


MAX_OPEN_FILES = 65_536 if LINUX else 10_240
"""Open files that a process may ask for on any machine of this system"""


def filesystem(folder: Path) -> str:
    """The type of a folder's file system, such as ``ext4``; ``unknown`` where the system lists no mounts."""
    device = os.stat(folder).st_dev
    mounts = _lines("/proc/self/mountinfo")
    found = (mount.partition(" - ") for mount in mounts)
    here = f"{os.major(device)}:{os.minor(device)}"
    return next((after.split()[0] for before, _, after in found if before.split()[2] == here), "unknown")


def boot_id() -> str:
    """An identifier of the time since this machine was started; empty where the system has none."""
    return "".join(_lines("/proc/sys/kernel/random/boot_id")).strip()


# --- memory ---

SIDE_BY_SIDE = NATIVE
"""Whether several files can be mapped side by side, into addresses that were reserved before."""
CONTAINER, CPU = Path("/sys/fs/cgroup"), Path("/proc/cpuinfo")
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FIXED = 0x10  # MAP_FIXED


def reserve_addresses(size: int) -> int:
    """The beginning of a stretch of addresses which read as zeros and take no memory. Raises `OSError`."""
    return _mmap(None, size, _RESERVE, -1)


def map_over(address: int, size: int, fd: int | None) -> None:
    """Shows a file, or zeros again, in a part of reserved addresses. Raises `OSError`."""
    if fd is None:
        _mmap(address, size, _RESERVE | _FIXED, -1)
    else:
        _mmap(address, size, mmap.MAP_SHARED | _FIXED, fd)


def map_whole(fd: int, size: int) -> mmap.mmap:
    """A map of a file's first bytes, in the form that all systems have."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, prot=mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)  # with a second descriptor of the file


def release_addresses(address: int, size: int) -> None:
    _libc.munmap(address, size)


def _mmap(address: int | None, size: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size, mmap.PROT_READ, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


_libc = ctypes.CDLL(None, use_errno=True)
if SIDE_BY_SIDE:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_sync_file_range = getattr(_libc, "sync_file_range", None) if NATIVE else None
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None) if MACOS else None


def give_memory_back(trim_bytes: int = 1 << 20, arenas: int = 2) -> bool:
    """Makes glibc return freed memory to the system. Returns whether the C library has such settings."""
    mallopt = getattr(_libc, "mallopt", None) if LINUX else None
    return bool(mallopt and mallopt(-1, trim_bytes) and mallopt(-8, arenas))  # M_TRIM_THRESHOLD, M_ARENA_MAX


def free_memory() -> int:
    """Bytes that processes can still have: what the machine and the container leave. Where
    only the size of the memory is known, that."""
    found = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    if NATIVE:
        with contextlib.suppress(OSError, ValueError):  # a container may have less than its host
            most, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
            kept = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
            # files that were read make room when it is needed
            found.append(max(0, most - used + int(kept.get("inactive_file", 0))))
    with contextlib.suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=sys.maxsize)  # unknown: nothing is refused


# --- processors and processes ---

START_METHOD = "forkserver" if NATIVE else "spawn"
"""How `multiprocessing` starts ranks: elsewhere, libraries of the system do not survive a fork."""
SCHEDULING = LINUX and hasattr(os, "sched_setscheduler")


def usable_cpus() -> int:
    """The number of processors that this process may use."""
    if NATIVE and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_instructions() -> set[str] | None:
    """Names of the processor's instruction sets, as Linux has them; None where the system does not list them."""
    for line in _lines(CPU):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return None


def take_real_time_priority() -> bool:
    """Requests real-time priority for this thread. Returns False on the many machines that do not allow it."""
    if not (NATIVE and SCHEDULING):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return False
    return True


def let_others_go_first(niceness: int) -> None:
    """Lowers the priority of the calling thread alone. Elsewhere than on Linux a thread
    has none of its own, and nothing happens."""
    if NATIVE:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


@contextlib.contextmanager
def scheduling_kept() -> Iterator[None]:
    """Undoes what a library does inside it to the scheduling of this process's
    threads (only on Linux do libraries do that)."""
    if not SCHEDULING:
        yield
        return
    before = os.sched_getscheduler(0)
    try:
        yield
    finally:
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                if os.sched_getscheduler(thread) != before:
                    os.sched_setscheduler(thread, before, os.sched_param(0))


def end_with_pipe(fd: int, deadline_s: float) -> None:
    """Ends this process when the other end of a pipe is closed, as it is when the
    process that holds it ends, however it ends.

    On Linux the kernel does it, at once. Elsewhere a thread does, which code that keeps Python's lock can keep from it:
    such a process ends when it was kept for `deadline_s`.
    """
    if NATIVE:
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC)
        return

    def watch() -> None:
        while True:
            faulthandler.dump_traceback_later(deadline_s, exit=True)  # its clock runs without Python's lock
            if select.select([fd], [], [], deadline_s / 4)[0] and not os.read(fd, 1):
                os._exit(1)

    threading.Thread(target=watch, name="hilt-caller", daemon=True).start()


def wait_for_hang_up(line: socket.socket, parent: int) -> None:
    """Returns when the process at the other end of the socket, which started this one,
    is gone; what it sent may still be unread."""
    if NATIVE:
        gone = select.poll()
        gone.register(line, 0)
        gone.poll()
        return
    while os.getppid() == parent:
        time.sleep(0.2)


# --- messages between threads, processes and machines ---

MESSAGE_PIPE_BYTES = 1 << 20


def message_pipe() -> tuple[Connection, Connection]:
    """`multiprocessing.Pipe`, with room for many unread messages: macOS has 8 KiB, unless it is asked for more."""
    from multiprocessing.connection import Connection

    ends = socket.socketpair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # more than this system allows
                end.setsockopt(socket.SOL_SOCKET, option, MESSAGE_PIPE_BYTES)
    here, there = (Connection(end.detach()) for end in ends)
    return here, there


def wake_descriptors() -> tuple[int, int]:
    """(to wait at, to write to): eight bytes written to the second make the first
    readable, until they are read. Neither waits."""
    if NATIVE and hasattr(os, "eventfd"):
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return event, event
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


SOCKET_FILTERS = NATIVE
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER


def filter_listener(descriptor: int, program: bytes | None) -> None:
    """Gives a listening socket a packet filter, or takes it away. Raises `OSError` where
    the kernel or a sandbox does not allow it."""
    if not SOCKET_FILTERS:
        return
    listener = socket.socket(fileno=descriptor)
    try:
        if program is None:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        else:
            code = ctypes.create_string_buffer(program, len(program))
            pointer = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
            listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)
    finally:
        listener.detach()  # it belongs to the caller


# --- pictures, devices and packages ---

DEVICE_NODES = LINUX
"""Whether input devices and cameras are files in /dev, with permissions of their own."""


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which environment variables are set, for a library that reads them; on exit, they are restored."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def renderer_variables() -> dict[str, str]:
    """The `environment` with which MuJoCo renders without a screen: on Linux by EGL, unless ``MUJOCO_GL`` names another
    renderer. On macOS its own choice, CGL, needs no screen."""
    return {} if MACOS else {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


def renderer_name() -> str:
    """The renderer that ``MUJOCO_GL`` names, or the default."""
    return os.environ.get("MUJOCO_GL", "").lower() or ("cgl" if MACOS else "egl")


def install_line(debian: str, homebrew: str) -> str:
    """The command that installs a system library."""
    return f"brew install {homebrew}" if MACOS else f"apt-get install {debian}"


def _lines(path: str | Path) -> list[str]:
    """The lines of a file in which Linux describes the system; none elsewhere."""
    if NATIVE:
        with contextlib.suppress(OSError):
            return Path(path).read_text().splitlines()
    return []


# --- what of this is in its portable form here ---


@dataclass(frozen=True)
class Facility:
    """Something that Linux does in its own way and other systems in the portable way."""

    name: str
    native: bool
    """Whether it is done here in the way of Linux."""
    linux: str
    portable: str
    cost: str
    """Of the portable form."""


FACILITIES = (
    Facility(
        "log in memory",
        SIDE_BY_SIDE,
        "all files of a log are mapped side by side (MAP_FIXED): a batch is one gather",
        "each file is mapped separately: one gather per file",
        "batches of images from memory take up to 1.5 times as long",
    ),
    Facility(
        "file reads",
        VECTORED,
        "preadv, into the batch",
        "pread, then a copy",
        "one more copy of each frame that is read",
    ),
    Facility(
        "file writes",
        VECTORED,
        "pwritev, many frames in a call",
        "pwrite, a frame in a call",
        "more calls for each episode",
    ),
    Facility(
        "cold reads",
        NON_WAITING_READS and READ_AHEAD,
        "frames on disk are read whole, with read-ahead (RWF_NOWAIT, posix_fadvise)",
        "the memory map fetches them page by page",
        "batches of frames that are not in memory take up to 4 times as long",
    ),
    Facility(
        "early write-back",
        _sync_file_range is not None,
        "sync_file_range: write-back starts while an episode is still being written",
        "write-back starts at the sync",
        "the sync at the end of a long episode takes longer",
    ),
    Facility(
        "power-safe sync",
        not MACOS,
        "fsync",
        "fcntl F_FULLFSYNC; fsync where the file system has none",
        "it flushes the whole cache of the disk: each sync takes milliseconds longer",
    ),
    Facility(
        "restart of the machine",
        NATIVE,
        "detected by boot_id in /proc",
        "assumed whenever a log is opened",
        "data closed without a sync are read and checked in full when the log is reopened",
    ),
    Facility(
        "shared memory",
        NATIVE and hasattr(os, "memfd_create"),
        "memfd_create, posix_fallocate",
        "a temporary file without a name",
        "frames of simulators use space on the disk of temporary files, and may be written to it",
    ),
    Facility(
        "waking a thread",
        NATIVE and hasattr(os, "eventfd"),
        "eventfd",
        "a pipe",
        "one more open file for each client",
    ),
    Facility(
        "flood guard",
        SOCKET_FILTERS,
        "a packet filter on the listening socket drops floods",
        "unknown peers are refused one by one",
        "0.2 to 0.6 ms of the learner's processor for each connection without a valid key",
    ),
    Facility(
        "real-time control",
        NATIVE and SCHEDULING,
        "SCHED_FIFO, if permitted",
        "normal priority",
        "the control loop of hilt serve-robot can be late on a busy machine",
    ),
    Facility(
        "priority of a thread",
        NATIVE,
        "setpriority",
        "the same priority for all threads",
        "evaluations of hilt demo during training take their full share of the processors",
    ),
    Facility(
        "end of a worker",
        NATIVE,
        "a signal from the kernel when its caller is gone (O_ASYNC)",
        "a thread that waits for it",
        "a simulator that hangs while holding the GIL ends at its timeout instead of immediately "
        "when its caller is killed",
    ),
    Facility(
        "end of the robot server",
        NATIVE,
        "poll",
        "the parent process is polled five times a second",
        "a control process whose backend hangs notices it 0.2 s later",
    ),
    Facility(
        "processors",
        NATIVE and hasattr(os, "sched_getaffinity"),
        "sched_getaffinity",
        "all of the machine's",
        "CPU affinity (taskset, cpusets) is ignored: set workers and OMP_NUM_THREADS yourself",
    ),
    Facility(
        "precision",
        NATIVE,
        "/proc/cpuinfo identifies most processors that are faster in bfloat16",
        "both are timed on every processor",
        "precision=auto takes a quarter of a second",
    ),
    Facility(
        "memory check",
        NATIVE,
        "/proc/meminfo and the limits of the container",
        "the size of the memory",
        "a policy that fits the machine but not its free memory is not rejected before loading",
    ),
    Facility(
        "start of ranks",
        NATIVE,
        "forkserver: torch is imported once",
        "spawn: each rank imports torch",
        "each rank starts a few seconds later",
    ),
    Facility("rendering", not MACOS, "EGL", "CGL, MuJoCo's own choice on macOS", "none known; not measured"),
)
"""Everything that this module chooses and that has a cost, in the order of `docs/core.md`."""


def in_portable_form() -> list[Facility]:
    return [facility for facility in FACILITIES if not facility.native]
