"""SIGINT, SIGTERM and SIGHUP, which ask a program to end, and which of its processes answers them.

The process that the user started, the controller, does: within `stop_signals` it learns of them and ends in order. A
terminal, `timeout`, Slurm and Kubernetes send them to other processes of the program, too, and those leave them to the
controller, which still needs them: it starts each of them within `held_back`, and each calls `leave_to_parent` first.
They end when the controller tells them, or is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; `kill`, `timeout`, Slurm and Kubernetes; a terminal or a connection that is closed"""
ASK_TO_END = signal.SIGUSR1
"""With this signal a controller asks a process of its own to end in order; it is not sent to process groups"""

_interrupts: list[int] = []
"""Those that have raised `KeyboardInterrupt`"""


def remember_interrupts() -> None:
    """From now on `stop_signals` raises a `KeyboardInterrupt` that was lost before it. Python drops exceptions in
    callbacks, such as those of its imports, and a program that imports torch spends seconds in them.

    A program that was started within `held_back` gets the signals that have arrived until now, and those to come.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _remember(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def stop_signals(second_ends: bool = False) -> Iterator[list[int]]:
    """Yields a list of the signals that have arrived, in order: the program ends in order once it is not empty.

    Signals after the first change nothing, so that none prevents a checkpoint from being written; the second prints how
    to end at once. With `second_ends`, for programs that save nothing when they are stopped, the second one has its
    usual effect. SIGHUP stays ignored where it is ignored already, as by `nohup`.
    """
    if _interrupts:
        _interrupts.clear()
        raise KeyboardInterrupt
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if number == signal.SIGHUP:
            _forget_terminal()
        if second_ends:
            restore()
        elif len(stopped) == 2:
            _print(
                "\nit is ending in order, and saves first. To end it at once, without saving: "
                f"kill -KILL {os.getpid()}\n"
            )

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    wanted = [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield stopped
    finally:
        restore()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Around the start of a process, which then begins with these signals blocked:
    none ends it before it calls `leave_to_parent`.

    A signal that arrives here meanwhile is delivered at the end. Handlers that the code within installs
    for them, as `ray.init` does, are taken back.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    ours = (
        {number: signal.getsignal(number) for number in ENDING}
        if threading.current_thread() is threading.main_thread()
        else {}
    )
    try:
        yield
    finally:
        for number, handler in ours.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def hold_back_signals() -> None:
    """From now on these signals wait, in a process whose last act is to end: that may take seconds (Ray's do)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def leave_to_parent() -> None:
    """From now on these signals do nothing in this process, and end no call of the system. Programs that it starts, and
    processes that it forks, have them as usual: code of others ends its own processes by SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may: where others have it, as in an actor of Ray, they stay blocked
    own = os.getpid()

    def nothing(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGHUP:
            _forget_terminal()

    for number in ENDING:
        signal.signal(number, nothing)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _forget_terminal() -> None:
    """Where the terminal of the output is closed, writing to it would raise an error in the
    middle of ending: it goes nowhere instead."""
    for descriptor in (1, 2):
        try:
            os.ttyname(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _print(text: str) -> None:
    """From within a handler, where a lock of the usual output may be held by the code that was interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
