"""Two hosts on this machine: network namespaces with a switch between them, whose
cables can be pulled. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

DEADLINE_S = 120


def why_not() -> str:
    """Why there can be no such hosts here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip`: apt install iproute2"
    probe = f"hilt-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=DEADLINE_S)
    if made.returncode:
        return f"this machine allows no network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Hosts:
    """`names` are hosts with addresses 10.77.0.1, 10.77.0.2, ...: each has a cable to one switch."""

    def __init__(self, *names: str):
        self._switch = f"hilt-{os.getpid()}-switch"
        self._spaces = {name: f"hilt-{os.getpid()}-{name}" for name in names}
        self.address = {name: f"10.77.0.{place}" for place, name in enumerate(names, 1)}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, space in self._spaces.items():
            _ip("netns", "add", space)
            _ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", self._switch, "link", "set", name, "master", "bridge", "up")
            _ip("-n", space, "address", "add", f"{self.address[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def on(self, name: str) -> list[str]:
        """What to put before a command to run it on this host."""
        return ["ip", "netns", "exec", self._spaces[name]]

    def pull(self, name: str) -> None:
        """Pulls the cable of a host out of the switch: the host sees that it is gone, its peers see silence."""
        _ip("-n", self._switch, "link", "set", name, "down")

    def plug(self, name: str) -> None:
        _ip("-n", self._switch, "link", "set", name, "up")

    def close(self) -> None:
        for space in (self._switch, *self._spaces.values()):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=DEADLINE_S)
