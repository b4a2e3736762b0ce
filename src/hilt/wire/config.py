"""What a learner and its actors agree on before they speak: ports, request types, keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hilt.core.errors import ConfigError

PROTOCOL = 1
"""The version of the messages; both sides must have the same."""
TRANSPORTS = ("tcp", "in-process")


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of `TrainerServer` and `TrainerClient`. Both sides need the same ports, request types and version."""

    port_number: int = 5588
    """The port for steps and requests."""
    broadcast_port: int = 5589
    """The port for weights."""
    request_types: Sequence[str] = ()
    """The custom requests that a client may make; the server's `request_callback` answers them."""
    rate_limit: float | None = None
    """The maximum number of custom requests per second from one client; further ones are delayed. None for no limit."""
    version: str = ""
    """Your own label for what the two sides must agree on; a difference is refused at the handshake."""
    bind_ip: str | None = None
    """The address the server listens on. None: 127.0.0.1 without keys, every interface with them."""
    keys: str | None = None
    """A folder of keys made by ``hilt keys new``. Needed beyond loopback."""
    key_name: str | None = None
    """Which key in that folder is this side's own. None: ``learner`` for the server, the only other one for a client."""
    transport: str = "tcp"
    """``tcp``, or ``in-process`` for a learner and actors that are threads of one process: no port is opened."""
    metrics_port: int | None = None
    """Where the server shows its counters to Prometheus, on loopback: ``http://127.0.0.1:PORT/metrics``. None for nowhere."""
    max_message_bytes: int = 1 << 30
    """No single buffer of a message may be larger, either way; a larger one is refused before memory is taken for it."""
    experimental_pipeline_port: int | None = None
    """agentlace's second way to send, which delivered twice. Only None is accepted."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r}: expected one of {', '.join(TRANSPORTS)}.")
        if isinstance(self.request_types, str):
            raise ConfigError(f"request_types={self.request_types!r}: expected a list of names, such as [{self.request_types!r}].")
        object.__setattr__(self, "request_types", tuple(self.request_types))
        ports = [(name, getattr(self, name)) for name in ("port_number", "broadcast_port", "metrics_port")]
        for name, port in ports:
            if not (isinstance(port, int) and 0 < port < 65536) and not (name == "metrics_port" and port is None):
                raise ConfigError(f"{name}={port!r}: expected a port from 1 to 65535.")
        if len({port for _, port in ports}) < len(ports):
            raise ConfigError(f"{', '.join(f'{name}={port}' for name, port in ports)}: expected a port of its own for each.")
        if self.rate_limit is not None and not self.rate_limit > 0:
            raise ConfigError(f"rate_limit={self.rate_limit!r}: expected requests per second, above 0, or None for any number.")
        if self.max_message_bytes < 1 << 16:
            raise ConfigError(f"max_message_bytes={self.max_message_bytes}: expected at least 65536.")
        if self.transport == "in-process" and (self.keys, self.bind_ip) != (None, None):
            raise ConfigError("transport='in-process' opens no port: keys= and bind_ip= are for tcp. Leave them out.")
        if self.key_name is not None and self.keys is None:
            raise ConfigError(f"key_name={self.key_name!r} names a key in the folder keys=, and none was given.")
        if self.experimental_pipeline_port is not None:
            raise ConfigError("experimental_pipeline_port: there is one way to send here, and it needs no port of its own. Leave it out.")

    def agreement(self) -> dict[str, Any]:
        """What both sides must have alike."""
        return {
            "protocol": PROTOCOL,
            "version": self.version,
            "request_types": sorted(self.request_types),
            "max_message_bytes": self.max_message_bytes,
        }


def make_trainer_config(
    port_number: int = 5588, broadcast_port: int = 5589, request_types: Sequence[str] = ("send-stats",), **settings: Any
) -> TrainerConfig:
    """The settings that HIL-SERL's scripts use; `settings` are further fields of `TrainerConfig`."""
    return TrainerConfig(port_number, broadcast_port, request_types, **settings)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
