"""`hilt` and `python SCRIPT` for the commands of a shell, forked from a process that has imported torch.

A program of these names, in a folder that comes first on the PATH, asks a process beside it through a socket for the
fork, which writes where the program would have written. Signals are passed on to it, it ends when the program is
killed, and its exit code becomes the program's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.forked import ForkServer, become_hilt
from tests.forked_hilt import fork_sides

POLL_INTERVAL_S = 0.02
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
given = json.dumps([{words} + sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [len(given).to_bytes(8, "little")], [1, 2])
connection.sendall(given)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: connection.send(bytes([number])))
os._exit((connection.recv(1) or b"\\x01")[0])
"""


@contextmanager
def forked_commands(server: ForkServer) -> Iterator[Path]:
    """A folder with the programs `hilt` and `python`."""
    with tempfile.TemporaryDirectory() as made:  # the address of a socket is short
        folder, address = Path(made), f"{made}/socket"
        for name, words in (("hilt", '["hilt"]'), ("python", "[]")):
            (folder / name).write_text(PROGRAM.format(python=sys.executable, address=address, words=words))
            (folder / name).chmod(0o755)
        listener = server.listen(address)
        try:
            yield folder
        finally:
            listener.kill()
            listener.wait()


def listen(listening: socket.socket) -> None:
    """In a process of its own: answers all programs until it is killed."""
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            answer(connection)
        connection.close()
        with suppress(ChildProcessError):  # of those that have ended, the ones before
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> None:
    """In a process for one program: forks its command, and stays with it to the end."""
    header, files, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as reader:
        words, folder, environment = json.loads(reader.read(int.from_bytes(header, "little")))
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(words, folder, environment, files)
    for file in files:
        os.close(file)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if select.select([connection], [], [], POLL_INTERVAL_S)[0]:
            # without bytes the program is gone: it was killed
            for number in connection.recv(16) or bytes([signal.SIGKILL]):
                os.kill(pid, number)
    code = os.waitstatus_to_exitcode(ended[1])
    with suppress(OSError):
        connection.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def become(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """In the command's process: what the program would have, and then the command."""
    code = 1
    try:
        os.chdir(folder)
        sys.path[0] = str(Path(sys.executable).parent)  # as for the program `hilt`, and not the folder of the tests
        fork_sides()
        code = become_hilt(words[1:] if words[0] == "hilt" else words, *files, environment)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
