"""What a learner and its actors agree on before they speak: ports, request types, keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hilt.core.errors import ConfigError
from hilt.core.validate import Need, check, setting

PROTOCOL = 1
"""The version of the messages; both sides must have the same."""
TRANSPORTS = ("tcp", "in-process")


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of `TrainerServer` and `TrainerClient`. Both sides need the same ports, request types and version."""

    port_number: int = setting(5588, minimum=1, maximum=65535)
    """The port for steps and requests."""
    broadcast_port: int = setting(5589, minimum=1, maximum=65535)
    """The port for weights."""
    request_types: Sequence[str] = ()
    """The custom requests that a client may make; the server's `request_callback` answers them."""
    rate_limit: float | None = setting(None, above=0, hint="It is in requests per second; None is any number.")
    """The maximum number of custom requests per second from one client; further ones are delayed. None for no limit."""
    version: str = ""
    """Your own label for what the two sides must agree on; a difference is refused at the handshake."""
    bind_ip: str | None = None
    """The address the server listens on. None: 127.0.0.1 without keys, every interface with them."""
    keys: str | None = None
    """A folder of keys made by ``hilt keys new``. Needed beyond loopback."""
    key_name: str | None = setting(
        None, needs=Need("keys=FOLDER, in which it names a key", lambda c: c.keys is not None)
    )
    """Which key in that folder is this side's own. None: ``learner`` for the
    server, the only other one for a client."""
    transport: str = setting("tcp", choices=TRANSPORTS)
    """``tcp``, or ``in-process`` for a learner and actors that are threads of one process: no port is opened."""
    metrics_port: int | None = setting(None, minimum=1, maximum=65535)
    """Where the server shows its counters to Prometheus, on loopback:
    ``http://127.0.0.1:PORT/metrics``. None for nowhere."""
    max_message_bytes: int = setting(1 << 30, minimum=1 << 16)
    """No single buffer of a message may be larger, either way; a larger one is
    refused before memory is taken for it."""
    experimental_pipeline_port: int | None = None
    """agentlace's second way to send, which delivered twice. Only None is accepted."""

    def __post_init__(self) -> None:
        if isinstance(self.request_types, str):
            raise ConfigError(
                f"request_types={self.request_types!r}: expected a list of names, such as [{self.request_types!r}]."
            )
        object.__setattr__(self, "request_types", tuple(self.request_types))
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        ports = [(name, getattr(self, name)) for name in ("port_number", "broadcast_port", "metrics_port")]
        if len({port for _, port in ports}) < len(ports):
            yield f"{', '.join(f'{here}{name}={port}' for name, port in ports)}: expected a port of its own for each."
        if self.transport == "in-process" and (self.keys, self.bind_ip) != (None, None):
            yield "transport='in-process' opens no port: keys= and bind_ip= are for tcp. Leave them out."
        if self.experimental_pipeline_port is not None:
            yield (
                "experimental_pipeline_port: there is one way to send here, and it needs no port "
                "of its own. Leave it out."
            )

    def agreement(self) -> dict[str, object]:
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
