"""Python processes that Hilt starts, by a command or by a function. None of them
looks for modules in the current folder.

``python -m`` and ``python -c`` put the current folder first on their path, and so do the processes of
`multiprocessing` while they start: in a folder that was downloaded, a ``random.py`` would be run. From Python 3.11
on, the option ``-P`` prevents it; before, code of ours.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker, util
from typing import Any

from hilt.core import trust
from hilt.core.signals import held_back

KILL_TIMEOUT_S = 60.0
"""How long a process may take to be gone after it was killed"""
HAS_SAFE_PATH = sys.version_info >= (3, 11)
# the current folder is the first entry; `sys` is built in, and no file is looked for
_WITHOUT_FOLDER = "import sys; sys.path.pop(0); "
_MODULE = "sys.argv.pop(0); import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def run_module(module: str, *arguments: str) -> list[str]:
    """The command ``python -m MODULE ARGUMENT...``"""
    if HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _WITHOUT_FOLDER + _MODULE, module, *arguments]


def run_code(code: str, *arguments: str) -> list[str]:
    """The command ``python -c CODE ARGUMENT...``"""
    if HAS_SAFE_PATH:
        return [sys.executable, "-P", "-c", code, *arguments]
    return [sys.executable, "-c", _WITHOUT_FOLDER + code, *arguments]


def final_error(lines: Sequence[str]) -> str:
    """The error with which the output of a command of Hilt's ends, in a line: that after ``error:``, or the exception
    of a traceback. Empty if the output goes on after it, as that of a process that was started again."""
    for number in reversed(range(len(lines))):
        if lines[number].startswith("error: "):
            return lines[number].removeprefix("error: ")
        if lines[number].startswith("Traceback (most recent call last)"):
            return next((line for line in lines[number + 1 :] if line[:1].strip()), "")
        if re.match(r"\d\d:\d\d:\d\d ", lines[number]):  # a line of the log
            return ""
    return ""


def process_context(start_method: str) -> Any:
    """The context of `multiprocessing` with this start method. Its processes get the path
    of this one as soon as they have started."""
    given: Any = vars(util)["_args_from_interpreter_flags"]
    if not hasattr(given, "is_safe"):

        def flags() -> list[str]:
            """Without ``-P``, ``-I``, which also ignores the environment's path: theirs comes from us anyway."""
            return list(dict.fromkeys([*given(), "-P" if HAS_SAFE_PATH else "-I"]))

        flags.is_safe = True  # type: ignore[attr-defined]
        vars(util)["_args_from_interpreter_flags"] = flags
    return multiprocessing.get_context(start_method)


class ChildProcess(subprocess.Popen[Any]):
    """A program that this process starts, looks after and ends; its command comes from `run_module` or `run_code`."""

    def __init__(
        self, command: Sequence[str], leaves_signals: bool = True, env: Mapping[str, str] | None = None, **options: Any
    ):
        """`leaves_signals`: it calls `leave_to_parent` first, and until then the signals of `hilt.core.signals` are
        blocked in it. `env` is its environment, by default that of this process; the names that this process trusts are
        added. The `options` are those of `subprocess.Popen`; its input is empty unless they say otherwise."""
        environment = {**(os.environ if env is None else env), **trust.for_children()}
        with held_back() if leaves_signals else contextlib.nullcontext():
            super().__init__(list(command), env=environment, **{"stdin": subprocess.DEVNULL, **options})

    def ends_within(self, seconds: float) -> bool:
        """Whether it is gone, waiting at most this long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(max(0.0, seconds))
        return self.returncode is not None

    def end(self, seconds: float = 0.0) -> int:
        """Waits at most this long for it to end by itself, then kills it. Returns its exit code."""
        if not self.ends_within(seconds):
            self.kill()
            self.ends_within(KILL_TIMEOUT_S)
        # the system may be slow to take it away
        return -signal.SIGKILL if self.returncode is None else int(self.returncode)


class PipedProcess:
    """A process of `multiprocessing` that runs ``target(pipe, *arguments)``, which calls
    `leave_to_parent` first; and the other end of its pipe."""

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: Any,
        name: str,
        start_method: str = "spawn",
        daemon: bool = True,
        preload: str = "",
    ):
        """`preload`: a module that the fork server, where there is one, imports once for all of its processes."""
        context = process_context(start_method)
        if preload:
            context.set_forkserver_preload([preload])
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(trust.for_children(), target, theirs, *arguments), name=name, daemon=daemon
        )
        with held_back():
            resource_tracker.ensure_running()  # on its own: as it starts, it unblocks some of them here
        # the fork server that it may come from has them blocked for good: it ends when this process does
        with held_back():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def exit_code(self, seconds: float) -> int | None:
        """Waits at most this long for the process to end. Returns its exit code, or None if it is still running."""
        self._process.join(seconds)
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        """Kills it, and does not wait: see `end`."""
        self._process.kill()

    def end(self) -> None:
        """Kills it, waits until it is gone, and closes the pipe."""
        self._process.kill()
        self._process.join(KILL_TIMEOUT_S)
        self.pipe.close()


def _run(trusted: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> None:
    trust.inherit(trusted)
    target(*arguments)
