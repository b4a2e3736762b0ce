"""A relay of TCP connections in a process of its own: stopped with SIGSTOP, it is a network that drops every packet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator


class Relay:
    """The process, and where it listens."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self._process, self.port = process, port

    def cut(self) -> float:
        """From the time that is returned on, of `time.monotonic`, nothing passes."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)
        return time.monotonic()

    def mend(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@contextlib.contextmanager
def relayed(port: int) -> Iterator[Relay]:
    """A relay to this port of this machine."""
    command = [sys.executable, "-m", "tests.relay", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Relay(process, int(process.stdout.readline()))
        finally:
            process.kill()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # nobody is there
            writer.close()
            return
        for end in (writer, far_writer):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
