"""Why nobody answers, as a stranger can tell from the greeting."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from hilt.core.errors import RefusedError
from hilt.wire import TrainerClient, TrainerServer, make_trainer_config
from hilt.wire.keys import new_keys
from hilt.wire.probe import probe
from hilt.wire.remote import UnansweredError
from tests.wire.pair import eventually
from tests.wire.processes import free_port


def test_probe_reports_keys_on_one_side_only(tmp_path: Path):
    new_keys(tmp_path / "keys", ["learner", "arm"])
    keyed = make_trainer_config(free_port(), free_port(), keys=str(tmp_path / "keys"))
    bare = make_trainer_config(keyed.port_number, keyed.broadcast_port)
    with TrainerServer(keyed, request_callback=lambda *_: {}) as server:
        server.start(threaded=True)
        with pytest.raises(
            RefusedError, match=r"no learner at 127\.0\.0\.1:\d+ lets 'arm' in: the learner there has keys"
        ):
            TrainerClient("arm", "127.0.0.1", bare, wait_for_server=30)
        # a machine that stands still greets too late: asked again
        said = "needs this side's .pub, and this side's its learner.pub"
        eventually(lambda: said in probe("127.0.0.1", keyed.port_number, True).reason, "the greeting")
        assert not probe("127.0.0.1", keyed.port_number, True).final
    with TrainerServer(bare, request_callback=lambda *_: {}) as server:
        server.start(threaded=True)
        with pytest.raises(RefusedError, match="this side has keys, and the learner there has none: give both sides"):
            TrainerClient("arm", "127.0.0.1", keyed, wait_for_server=30)
        eventually(lambda: probe("127.0.0.1", bare.port_number, False) == ("", False), "the greeting")


def test_probe_recognizes_other_servers():
    port = free_port()
    assert "nothing can be reached there (Connection refused)" in probe("127.0.0.1", port, False).reason
    with pytest.raises(
        UnansweredError, match=r"Nothing can be reached there \(Connection refused\)\. Check that it runs"
    ):
        TrainerClient("arm", "127.0.0.1", make_trainer_config(port, free_port()), wait_for_server=0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(
            target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True
        ).start()
        found = probe("127.0.0.1", other.getsockname()[1], False)
        assert "does not greet as a learner does" in found.reason and not found.final
        assert "does not greet" in probe("127.0.0.1", other.getsockname()[1], False, timeout_s=0.05).reason, (
            "it says nothing at all"
        )
