"""Makes a Python on Linux as much like one on macOS as it can be: what Hilt finds there is what it finds here.

Python imports this module at its start when this folder is in ``PYTHONPATH``, in child processes too. Calls that macOS
lacks are gone, Hilt cannot read /proc and /sys, sockets between processes are as small as macOS makes them, and
``sys.platform`` is that of a Mac. It is no Mac: the kernel, the file system and all libraries are still those of Linux.
"""

import ctypes.util  # noqa: F401  (while it is Linux: libraries are found in its way, and pictures are rendered)
import os
import select
import signal
import socket
import sys
import sysconfig
import types

GONE = (
    "copy_file_range",
    "eventfd",
    "eventfd_read",
    "eventfd_write",
    "memfd_create",
    "pidfd_open",
    "pipe2",
    "posix_fadvise",
    "posix_fallocate",
    "preadv",
    "pwritev",
    "sched_getaffinity",
    "sched_getparam",
    "sched_getscheduler",
    "sched_rr_get_interval",
    "sched_setaffinity",
    "sched_setparam",
    "sched_setscheduler",
    "setresuid",
    "splice",
    "fdatasync",
    "getrandom",
    "getxattr",
)
PREFIXES = ("EFD_", "GRND_", "MFD_", "POSIX_FADV_", "RWF_", "SCHED_", "SPLICE_")
HIDDEN = ("/proc", "/sys/")


def asked_by_hilt() -> bool:
    """Not by a library that is itself built for Linux: whose code it is that is
    nearest to the call, but for Python's own."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/src/hilt/" in file or "/site-packages/hilt/" in file:
            return True
        if "/site-packages/" in file:
            return False
        frame = frame.f_back
    return False


def pretend() -> None:
    for name in dir(os):
        if name in GONE or name.startswith(PREFIXES):
            delattr(os, name)
    del select.epoll
    for name in ("sigtimedwait", "sigwaitinfo"):
        delattr(signal, name)
    real_link, real_pair = os.readlink, socket.socketpair

    def hide(event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(HIDDEN) and asked_by_hilt():
            raise FileNotFoundError(2, "macOS has no such file", str(arguments[0]))

    def readlink(path, *, dir_fd=None):
        hide("open", [os.fspath(path)])
        return real_link(path, dir_fd=dir_fd)

    def socketpair(*arguments):
        ends = real_pair(*arguments)
        for end in ends:
            # which Linux doubles; macOS: net.local.stream.sendspace is 8192
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ends

    os.readlink, socket.socketpair = readlink, socketpair
    sys.addaudithook(hide)
    proxies = types.ModuleType("_scproxy")  # a module of a Mac's Python that urllib imports there
    proxies._get_proxy_settings = proxies._get_proxies = dict
    sys.modules["_scproxy"] = proxies
    # how this Python was built; there is none of a Mac
    os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = sysconfig._get_sysconfigdata_name()
    sys.platform = "darwin"


pretend()
