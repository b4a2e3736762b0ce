"""Python processes that Hilt starts, none of which looks for modules in the current folder.

``python -m`` and ``python -c`` put the current folder first on their path, and so do the processes of `multiprocessing` while they start:
in a folder that was downloaded, a ``random.py`` would be run. From Python 3.11 on, the option ``-P`` prevents it; before, code of ours.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import resource_tracker, util
from typing import Any

from hilt.core.signals import held_back

HAS_SAFE_PATH = sys.version_info >= (3, 11)
_WITHOUT_FOLDER = "import sys; sys.path.pop(0); "  # the current folder is the first entry; `sys` is built in, and no file is looked for
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


def process_context(start_method: str) -> Any:
    """The context of `multiprocessing` with this start method. Its processes get the path of this one as soon as they have started."""
    given: Any = vars(util)["_args_from_interpreter_flags"]
    if not hasattr(given, "is_safe"):

        def flags() -> list[str]:
            """Without ``-P``, ``-I``, which also ignores the environment's path: theirs comes from us anyway."""
            return list(dict.fromkeys([*given(), "-P" if HAS_SAFE_PATH else "-I"]))

        flags.is_safe = True  # type: ignore[attr-defined]
        vars(util)["_args_from_interpreter_flags"] = flags
    return multiprocessing.get_context(start_method)


def start_process(process: Any) -> None:
    """Starts a process of `process_context`, with the signals of `hilt.core.signals` blocked until it calls `leave_to_parent`. The fork
    server that it may come from has them blocked for good: it ends when this process does."""
    with held_back():
        resource_tracker.ensure_running()  # on its own: as it starts, it unblocks some of them here
    with held_back():
        process.start()
