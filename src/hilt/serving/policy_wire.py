"""A policy server on the keyed wire of learner and actors, beside its websocket.

    with PolicyServer(policy) as server, PolicyWire(server, port=5590, keys="keys"):
        ...

`hilt keys new` makes the keys. Requests go through the same checks and the same batches; each is carried out at most
once, and a client that lost its answer gets it again.
"""

from __future__ import annotations

import logging
from typing import Any

from hilt.core.errors import ConfigError
from hilt.core.web import is_loopback
from hilt.serving.policy_links import METADATA, WIRE, wire_config
from hilt.serving.policy_server import PolicyServer
from hilt.wire import TrainerServer


class PolicyWire:
    """Answers at `port`, and takes the next port as well. Without `keys`, a folder, only on this machine."""

    def __init__(self, server: PolicyServer, port: int, keys: str = "", host: str = "127.0.0.1"):
        if not keys and not is_loopback(host):
            raise ConfigError(
                f"the wire at {host} port {port} is reached from other machines, and has no keys: make them with "
                "`hilt keys new learner ROBOT`, and give --keys keys."
            )
        self._server = server
        self.url = f"{WIRE}://{f'[{host}]' if ':' in host else host}:{port}"
        self._wire = TrainerServer(
            wire_config(port, keys, host), request_callback=self._asked, log_level=logging.WARNING
        )
        self._wire.start(threaded=True)

    def __enter__(self) -> PolicyWire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wire.stop()

    def _asked(self, kind: str, payload: Any) -> dict[str, Any]:
        return self._server.metadata() if kind == METADATA else self._server.ask(payload)
