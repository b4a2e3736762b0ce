"""How a run's learner and actors are started in tests: forked, and not each with an import of torch, which takes
seconds. They are processes like any others: they have their own session and environment and can be killed.

Only the thread that forks goes on in a child, so the parent must not have used a simulator that draws, and its other
threads only show how far the run is: what they hold is held, or not used in the child.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hilt.cli.show import PROGRESS
from hilt.core.children import run_module
from hilt.core.signals import held_back
from hilt.hil import launch as train
from tests.forked import become_hilt


class Forked:
    """What `hilt.hil.launch` uses of `hilt.core.children.ChildProcess`."""

    def __init__(
        self, command: list[str], *, stdout: Any, stderr: Any, env: dict[str, str], start_new_session: bool
    ) -> None:
        assert command[: len(HILT)] == HILT and stderr is stdout and start_new_session
        assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "hilt-live", "hilt-progress"}
        self.returncode: int | None = None
        with PROGRESS._lock, held_back():  # as a `ChildProcess` is started
            self.pid = os.fork()
            if self.pid == 0:
                code = 1
                try:
                    code = become_hilt(command[len(HILT) :], stdout.fileno(), stdout.fileno(), env)
                finally:
                    os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        assert self.ends_within(60)


HILT = run_module("hilt")


def in_a_fork(function: Callable[..., None]) -> Callable[..., None]:
    """The function, called in a process of its own: what it draws with is not in
    this process, which forks others later."""

    def call(*given: Any) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        with PROGRESS._lock:
            pid = os.fork()
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
            return
        code = 1
        try:
            function(*given)
            code = 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    return call


def fork_sides() -> None:
    """From now on a run of this process forks its learner, its actors and the script that demonstrates."""
    train.ChildProcess = Forked  # type: ignore[assignment,misc]
    train.demonstrate = in_a_fork(train.demonstrate)
