"""Code written for agentlace runs here: its own tests, with our classes behind its
names; and where it loses steps, beside ours.

HILT_AGENTLACE is a checkout of https://github.com/youliangtan/agentlace. Where HILT_AGENTLACE_PYTHON is a Python that
can import it (it needs pyzmq, lz4, opencv-python-headless and numpy), the second test runs the original, too.

Its assertions are all evaluated; those that do not hold are compared with the list
of what is different here on purpose.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wire.processes import free_port

CHECKOUT = os.environ.get("HILT_AGENTLACE", "")
PYTHON = os.environ.get("HILT_AGENTLACE_PYTHON", "")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not CHECKOUT, reason="HILT_AGENTLACE is not set: give a checkout of https://github.com/youliangtan/agentlace"
    ),
]

COMPAT = '''
import hilt.replay, hilt.wire
from hilt.core.errors import UnknownNameError

class DataStoreBase: ...

class QueuedDataStore(hilt.replay.QueuedDataStore, DataStoreBase):
    """Its queue drops the oldest when it is full. Ours does so when it is told to, and counts them."""

    def __init__(self, capacity):
        super().__init__(capacity, full="drop_oldest")

    @property
    def _data_queue(self):
        return self.get_latest_data(-1)

TrainerConfig, TrainerServer = hilt.wire.TrainerConfig, hilt.wire.TrainerServer

class TrainerClient(hilt.wire.TrainerClient):
    """Its client takes 5 ms for a deadline of one message; ours has it for the connection, too."""

    def __init__(self, *given, **named):
        super().__init__(*given, **{"wait_for_server": 10.0, **named})
        self.req_rep_client = self  # somebody sets its timeout

    def __setattr__(self, name, value):
        name, value = ("timeout_s", value / 1e3) if name == "timeout_ms" else (name, value)
        super().__setattr__(name, value)

    def reset_socket(self): ...

    def request(self, type, payload):
        try:
            return super().request(type, payload)
        except UnknownNameError:  # here a type that was not declared is an error, not None
            return None
'''

ON_PURPOSE = {
    "An outbox lets go of what is acknowledged: its length is what still waits, not what was sent before.": [
        "len(ds_actor1) == 1",
        "len(ds_actor1) == 2",
        "len(ds_actor1) == CLIENT_CAPACITY",
        "len(ds_learner1) <= len(ds_actor1)",
        "len(ds_learner2) <= len(ds_actor2)",
        "len(ds_actor1) == len(ds_learner1)",
        "len(ds_actor2) == len(ds_learner2)",
    ],
    "What is inserted is sent by itself: it may have arrived before update() is called.": [
        "len(ds_trainer1) == 2",
        "len(ds_trainer2) == 0",
    ],
}
"""Assertions that need not hold here, and why."""


@pytest.fixture
def compat(tmp_path: Path) -> Path:
    """A folder with a package named agentlace in it."""
    package = tmp_path / "compat/agentlace"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data/__init__.py").write_text("")
    (package / "trainer.py").write_text(COMPAT)
    (package / "data/data_store.py").write_text("from agentlace.trainer import DataStoreBase, QueuedDataStore\n")
    return package.parent


class Recording(ast.NodeTransformer):
    """Makes each assertion a note of whether it held, and each fixed port a free one."""

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        note = ast.parse(f"_held({ast.unparse(node.test)!r}, None)").body[0]
        assert isinstance(note, ast.Expr) and isinstance(note.value, ast.Call)
        note.value.args[1] = self.visit(node.test)
        return ast.copy_location(note, node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in ("port_number", "broadcast_port") and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(self._ports.setdefault(node.value.value, free_port()))
        return node


def test_agentlace_own_tests(compat: Path, monkeypatch: pytest.MonkeyPatch, counted: Callable[[str], None]):
    monkeypatch.syspath_prepend(str(compat))
    source = Path(CHECKOUT) / "tests/test_trainer.py"
    tree = ast.fix_missing_locations(Recording().visit(ast.parse(source.read_text())))
    held: list[tuple[str, bool]] = []
    names: dict[str, Any] = {"__name__": "test_trainer", "_held": lambda text, value: held.append((text, bool(value)))}
    exec(compile(tree, str(source), "exec"), names)
    try:
        for test in ("test_queued_data_store", "test_trainer", "stress_test_trainer"):
            before = len(held)
            names[test]()
            assert len(held) > before
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "agentlace"]:
            del sys.modules[name]
    allowed = {text for texts in ON_PURPOSE.values() for text in texts}
    broken = {text for text, ok in held if not ok}
    assert broken <= allowed, f"these of its assertions do not hold: {sorted(broken - allowed)}"
    good = sum(ok for _, ok in held)
    counted(f"{good} of {len(held)} of agentlace's assertions hold; different on purpose: {'; '.join(sorted(broken))}")


SCENARIOS = """
import json, logging, sys, time
logging.disable(logging.CRITICAL)
import numpy as np
from agentlace.trainer import TrainerClient, TrainerConfig, TrainerServer
from agentlace.data.data_store import QueuedDataStore

kept = []  # the original waits for ever when one of its sockets is collected
ports = iter(range(int(sys.argv[1]), int(sys.argv[1]) + 100))

class Bench:
    def __init__(self):
        self.config = TrainerConfig(port_number=next(ports), broadcast_port=next(ports))
        self.buffer = QueuedDataStore(1000)
        self.clients = []
        kept.append(self)
        self.start()

    def start(self):
        self.server = TrainerServer(self.config, log_level=logging.CRITICAL)
        self.server.register_data_store("env", self.buffer)
        self.server.start(threaded=True)
        time.sleep(0.5)

    def actor(self, name="actor", capacity=1000):
        store = QueuedDataStore(capacity)
        client = TrainerClient(name, "127.0.0.1", self.config, data_stores={"env": store}, log_level=logging.CRITICAL)
        self.clients.append(client)
        return store, client

    def insert(self, store, first, count):
        for n in range(first, first + count):
            store.insert({"n": np.array([n])})

    def end(self, sent, said):
        time.sleep(0.5)
        numbers = [int(x["n"][0]) for x in self.buffer.get_latest_data(-1)]
        once = len(set(numbers))
        return {"sent": sent, "arrived": once, "twice": len(numbers) - once, "update": bool(said)}

def two_actors():
    bench = Bench()
    (a, first), (b, second) = bench.actor("a"), bench.actor("b")
    bench.insert(a, 0, 5); first.update()
    bench.insert(b, 100, 2); said = second.update()
    return bench.end(7, said)

def an_actor_that_starts_again():
    bench = Bench()
    store, client = bench.actor()
    bench.insert(store, 0, 50); client.update(); client.stop()
    store, client = bench.actor()
    bench.insert(store, 100, 6); said = client.update()
    return bench.end(56, said)

def a_queue_that_overflows():
    bench = Bench()
    store, client = bench.actor(capacity=3)
    bench.insert(store, 0, 10); said = client.update()
    return bench.end(10, said)

done = {}
for scenario in (two_actors, an_actor_that_starts_again, a_queue_that_overflows):
    try:
        done[scenario.__name__] = scenario()
    except Exception as error:
        done[scenario.__name__] = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(done), flush=True)
import os
os._exit(0)  # without stopping anything, of which the original dies or waits for ever
"""


def run(python: str, path: Path, script: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    done = subprocess.run(
        [python, str(script), str(free_port())], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_where_it_loses_steps(compat: Path, tmp_path: Path, counted: Callable[[str], None]):
    """The same program over both; ours with the queue that drops the oldest, as
    theirs does, and with our own default."""
    script = tmp_path / "scenarios.py"
    script.write_text(SCENARIOS)
    ours = run(sys.executable, compat, script)
    counted(f"ours: {ours}")
    assert ours["two_actors"] == {"sent": 7, "arrived": 7, "twice": 0, "update": True}
    assert ours["an_actor_that_starts_again"] == {"sent": 56, "arrived": 56, "twice": 0, "update": True}
    script.write_text(
        SCENARIOS.replace(
            "store = QueuedDataStore(capacity)", "store = __import__('hilt.replay').replay.QueuedDataStore(capacity)"
        )
    )
    spilling = run(sys.executable, compat, script)
    counted(f"ours, with what its queue does by itself (spill): {spilling}")
    assert spilling["a_queue_that_overflows"] == {"sent": 10, "arrived": 10, "twice": 0, "update": True}
    if not PYTHON:
        pytest.skip(
            "HILT_AGENTLACE_PYTHON is not set: give a Python that can import agentlace, and the "
            "original is run beside ours"
        )
    script.write_text(SCENARIOS)
    theirs = run(PYTHON, Path(CHECKOUT), script)
    counted(f"agentlace: {theirs}")
    assert theirs["two_actors"]["arrived"] < 7 and theirs["an_actor_that_starts_again"]["arrived"] < 56
