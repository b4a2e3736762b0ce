"""Processes, of multiprocessing and scripts, forked from one that has imported what
is slow to import: torch takes seconds in each."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600  # only so that nothing hangs


def find_tests_in_fork_servers() -> None:
    """Let every fork server of multiprocessing find the tests, in whichever folder it is started.

    Up to Python 3.12 it does not take over this process' path, and a module that it is told to import and does not find
    it leaves out without a word: then each of its children imports that module, and torch, by itself.
    """
    server = multiprocessing.forkserver._forkserver
    ensure_running = type(server).ensure_running

    def with_path() -> None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *([before] if before else [])])
        try:
            ensure_running(server)
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    server.ensure_running = with_path


def tell_modules(pipe: Any) -> None:
    """What a child of a fork server has imported before it does anything."""
    pipe.send(sorted(sys.modules))


@contextmanager
def preloaded(*modules: str) -> Iterator[Any]:
    """The context ``forkserver`` of multiprocessing, with a new server that imports these
    modules and nothing else that tests did here. The one before goes on afterwards."""
    server, context = multiprocessing.forkserver._forkserver, multiprocessing.get_context("forkserver")
    before = dict(vars(server))
    vars(server).update(_forkserver_address=None, _forkserver_alive_fd=None, _forkserver_pid=None)
    context.set_forkserver_preload(list(modules))
    server.ensure_running()
    try:
        yield context
    finally:
        server._stop()
        vars(server).update(before)


# an optimizer of torch imports torch._dynamo, which takes more than a second
WITH_TORCH = ["torch", "torch._dynamo", "gymnasium", "pytest", "hypothesis", "tests.wire.processes", "hilt.cli"]
WITH_TORCH += ["hilt.hil.actor", "hilt.hil.launch", "hilt.distributed.shard"]
WITH_TORCH += ["hilt.hil.learner", "hilt.hil.evaluate", "hilt.vla.sft", "hilt.vla.train", "hilt.serving.policy_server"]
_with_torch: int | None = None


@contextmanager
def with_torch() -> Iterator[Any]:
    """The same, with a server that has imported torch and the parts of Hilt that use it. It is one for all modules of
    this process, and goes on after them: a process imports the module of its test by itself."""
    global _with_torch
    server, context = multiprocessing.forkserver._forkserver, multiprocessing.get_context("forkserver")
    if server._forkserver_pid is None or server._forkserver_pid != _with_torch:
        before = server._preload_modules
        server._stop()
        context.set_forkserver_preload(WITH_TORCH)
        server.ensure_running()
        server._preload_modules, _with_torch = before, server._forkserver_pid
    yield context


SLOW_IMPORTS = ["torch", "torch._dynamo", "torch.distributed", "mujoco", "gymnasium", "tests.forked_hilt"]
SLOW_IMPORTS += ["hilt.policies.agent.agent", "hilt.vla.train", "hilt.classifier.reward", "hilt.hil.launch"]
SLOW_IMPORTS += ["hilt.cli.train_hil", "hilt.hil.learner", "hilt.hil.actor"]
HILT_SCRIPT = """
import os, sys
if __name__ == "__main__":
    os.environ.clear()
    os.environ.update({environment!r})
    sys.path[1:1] = {places!r}
    sys.argv = ["hilt", *{words!r}]
{first}
    from hilt import cli
    cli.main()
"""


class ForkServer:
    """Runs one script at a time, and commands of Hilt's beside it. The imported modules must not have started threads:
    only the thread that forks goes on in a child."""

    def __init__(self, modules: Sequence[str] = SLOW_IMPORTS) -> None:
        command = [sys.executable, "-m", "tests.forked", *modules]
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, script: Path, timeout: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """As ``python script`` in a folder, by default that of the script; after ``timeout``
        seconds the script and what it started are killed."""
        status = self._ask("run", str(script), timeout, str(folder or script.parent))
        return subprocess.CompletedProcess(
            [str(script)], status, *(script.with_suffix(end).read_text() for end in (".out", ".err"))
        )

    def hilt(
        self, words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, first: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """As ``hilt WORDS`` in this folder, with this environment, but that a learner and actors are forked; ``first``
        is a line of Python that is run before."""
        environment = dict(os.environ if env is None else env)
        places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
        with tempfile.TemporaryDirectory() as beside:
            script = Path(beside) / "hilt_command.py"
            given = {"environment": environment, "places": places, "words": [str(word) for word in words]}
            script.write_text(HILT_SCRIPT.format(**given, first=f"    {first}"))
            return self.run(script, TIMEOUT_S, folder)

    def start(self, words: Sequence[object], env: Mapping[str, str] | None = None) -> ForkedCommand:
        """As ``subprocess.Popen(["hilt", *WORDS], stdout=PIPE)`` or, where the first word is the name of a script in
        this folder, ``[python, *WORDS]``. Its errors go where those of this process go."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            os.mkfifo(output)
            return ForkedCommand(self, self._start(output, words, env, False), output.open())

    def start_run(self, words: Sequence[object], output: Path, env: Mapping[str, str] | None = None) -> ForkedCommand:
        """As ``hilt WORDS >> output 2>&1`` in the background, but that a learner and actors are forked."""
        output.touch()
        return ForkedCommand(self, self._start(output, words, env, True))

    def listen(self, address: str) -> ForkedCommand:
        """A process that forks commands for programs which ask for them at this socket: see `tests.forked_shell`."""
        return ForkedCommand(self, self._ask("listen", address))

    def _start(self, output: Path, words: Sequence[object], env: Mapping[str, str] | None, is_run: bool) -> int:
        environment = dict(os.environ if env is None else env)
        return self._ask("start", str(output), [str(word) for word in words], os.getcwd(), environment, is_run)

    def _ask(self, *words: Any) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(words), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


@dataclass
class ForkedCommand:
    """What tests use of `subprocess.Popen`, for a command that a `ForkServer` has started."""

    _server: ForkServer
    pid: int
    stdout: TextIO | None = None
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and not self._server._ask("runs", self.pid):
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Its exit code; after ``timeout`` seconds it is killed."""
        if self.returncode is None:
            self.returncode = self._server._ask("wait", self.pid, timeout)
            if self.stdout is not None:
                self.stdout.close()
        return self.returncode


def serve(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # what children share with this process is not looked through, and so not copied
    for line in sys.stdin:
        asked, *given = json.loads(line)
        print({"run": run, "start": start, "runs": runs, "wait": wait, "listen": listen}[asked](*given), flush=True)
    os._exit(0)  # to take the imported modules apart would take half a second


def run(script: str, timeout: float, folder: str) -> int:
    child = multiprocessing.get_context("fork").Process(target=become, args=(Path(script), timeout, folder))
    child.start()
    child.join()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.exitcode


def start(output: str, words: list[str], folder: str, environment: dict[str, str], is_run: bool) -> int:
    """The number of a process that is forked and becomes a command of Hilt's, or a script. The errors of a run go where
    its output goes, and its learner and actors are forked."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.chdir(folder)
        out = os.open(output, os.O_WRONLY | os.O_APPEND)
        if is_run:
            sys.modules["tests.forked_hilt"].fork_sides()
        code = become_hilt(words, out, out if is_run else 2, environment)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def listen(address: str) -> int:
    """The number of a process that listens at this address from now on."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    if pid := os.fork():
        listening.close()
        return pid
    try:
        import_module("tests.forked_shell").listen(listening)
    finally:
        os._exit(1)


def runs(pid: int) -> int:
    """Whether a process has not ended. It remains until `wait` asks for its exit code."""
    return int(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None)


def wait(pid: int, timeout: float) -> int:
    """The exit code of a process, which is killed after this many seconds."""
    deadline = time.monotonic() + timeout
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def become_hilt(words: list[str], out: int, err: int, environment: dict[str, str]) -> int:
    """In the child: what `hilt` would have, and then `hilt`, or a script in the same way; returns its exit code."""
    from hilt import cli

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((0, nothing), (1, out), (2, err)):
        os.dup2(target, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    is_script = words[0].endswith(".py")
    sys.argv = words if is_script else ["hilt", *words]
    atexit._clear()
    try:
        if is_script:
            sys.path[0] = os.getcwd()
            runpy.run_path(words[0], run_name="__main__")
        else:
            cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    return code


def become(script: Path, timeout: float, folder: str) -> None:
    """In the child: what ``python script`` would have, and then the script. A learner and
    actors that it starts are forked, too."""
    os.setsid()
    signal.setitimer(signal.ITIMER_REAL, timeout)  # SIGALRM ends a process that does not expect it
    os.chdir(folder)
    for descriptor, target in ((0, os.devnull), (1, script.with_suffix(".out")), (2, script.with_suffix(".err"))):
        opened = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv, sys.path[0] = [script.name], folder
    atexit._clear()
    if forked_hilt := sys.modules.get("tests.forked_hilt"):
        forked_hilt.fork_sides()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    serve(sys.argv[1:])
