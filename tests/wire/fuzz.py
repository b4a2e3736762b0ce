"""A fuzzer for every port of a running `TrainerServer`: bytes, ZMTP, multipart
frames, mutated and replayed messages, HTTP.

What is mutated was captured from real clients. Each lane is a thread with a seed and a connection of its own; after
some two hundred messages it asks the server something that only a live one answers.
"""

from __future__ import annotations

import copy
import itertools
import random
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq

from hilt.core.errors import FormatError
from hilt.wire import link, weights
from hilt.wire.codec import decode, encode
from hilt.wire.config import TrainerConfig
from hilt.wire.keys import ClientKeys
from hilt.wire.sockets import connect

BETWEEN_QUESTIONS = 200
DEADLINE_S = 120.0
Frames = list[bytes]


@dataclass
class Captured:
    """What real clients sent, newest last."""

    exact: deque[tuple[int, Frames]] = field(default_factory=lambda: deque(maxlen=400))
    """Of the good client, with the last step's number: for replays, never changed, for
    it would be as if that client had sent it."""
    templates: dict[str, deque[Frames]] = field(default_factory=dict)
    """Of the other one, by kind and type: to be changed."""
    acknowledged: Callable[[], int] = lambda: -1
    """The good client's last step that arrived."""

    def take(self, message: Mapping[str, Any], frames: Sequence[Any], good: bool) -> None:
        copied = [bytes(frame) for frame in frames]
        if good:
            steps = message.get("packed") or {"columns": {"": ()}}
            last = message.get("first", 0) + len(next(iter(steps["columns"].values()))) - 1
            self.exact.append((last if "first" in message else -1, copied))
        else:
            kind = f"{message.get('kind')}:{message.get('type', '')}"
            self.templates.setdefault(kind, deque(maxlen=30)).append(copied)

    def replayed(self, rng: random.Random) -> list[Frames]:
        """A hello of the good client, and steps of it that arrived: a replay cannot come before what it repeats."""
        exact = list(self.exact)
        hellos = [frames for last, frames in exact if last < 0]
        arrived = [frames for last, frames in exact if 0 <= last <= self.acknowledged()]
        return [rng.choice(hellos), *rng.sample(arrived, min(len(arrived), 5))] if hellos else []

    def pick(self, rng: random.Random, weights_port: bool) -> Frames:
        names = [name for name in self.templates if (name == "want:") == weights_port]
        often = [{"data:": 8, "bye:": 0.3}.get(name, 1) for name in names]
        return list(rng.choice(self.templates[rng.choices(names, often)[0]]))


@contextmanager
def capturing(is_good: Callable[[Mapping[str, Any]], bool]) -> Iterator[Captured]:
    """Everything that clients of this process send meanwhile."""
    captured = Captured()

    def recording(message: Mapping[str, Any]) -> list[Any]:
        frames = encode(message)
        captured.take(message, frames, is_good(message))
        return frames

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "encode", recording)
        patch.setattr(weights, "encode", recording)
        yield captured


# --- changing messages ---


def junk_value(rng: random.Random, depth: int = 0) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, 0, 1, -1, 255, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1]),
        lambda: rng.choice([0.0, -0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")]),
        lambda: rng.choice(
            ["", "x", "junk", "\x00", "../../etc", "é" * 50, "{}", "%s%n", "x" * rng.choice([300, 70_000])]
        ),
        lambda: rng.randbytes(rng.choice([0, 1, 8, 600])),
        lambda: np.zeros(
            rng.choice([(), (0,), (3,), (2, 0), (1, 1), (700,)]),
            rng.choice(["u1", "f4", "i8", ">f8", "?", "M8[s]", "U3"]),
        ),
        lambda: np.zeros(2, [("a", "i4"), ("b", "S2")]),
        lambda: rng.choice([np.float32(1), np.int64(-5), np.bool_(True)]),
    ]
    if depth < 3:
        makers += [
            lambda: [junk_value(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {rng.choice(["", "a", "kind", "b/c"]): junk_value(rng, depth + 1) for _ in range(rng.randrange(4))},
        ]
    return rng.choice(makers)()


_fresh = itertools.count(1)


def freshen(rng: random.Random, tree: dict[str, Any]) -> None:
    """As if it were sent for the first time: else most of it would be passed over as a repetition."""
    number = next(_fresh)
    if tree.get("kind") == "data":
        tree |= {"epoch": number, "n": 0, "first": tree["first"] + rng.choice([0, 1, 100 * number])}
    elif tree.get("kind") == "request":
        tree |= {
            "number": 1_000 + number,
            "oldest": rng.choice([0, 1_000 + number]),
            "seconds": rng.choice([0.0, 0.1, tree["seconds"]]),
        }
    elif tree.get("kind") == "hello" and rng.random() < 0.3:
        tree |= {"boot": f"boot-{number}", "actor": f"fuzz-{rng.randrange(20)}"}
    elif tree.get("kind") == "want":
        tree["seq"] = number


def change_fields(rng: random.Random, frames: Frames) -> Frames:
    """Well-formed, with one to three values that nobody expects."""
    tree = copy.deepcopy(decode(frames))
    if rng.random() < 0.8:
        freshen(rng, tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(tree))
        if not places:
            break
        node, key = rng.choice(places)
        how = rng.randrange(5)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[rng.choice(["kind", "extra", "x" * 200, ""])] = junk_value(rng)
        elif how == 2 and isinstance(node[key], np.ndarray) and node[key].size:
            node[key] = _other_array(rng, node[key])
        elif how == 3 and isinstance(node[key], int):
            node[key] = max(-(2**63), min(2**64 - 1, node[key] + rng.choice([-1, 1, 2, 1_000, -1_000_000])))
        else:
            node[key] = junk_value(rng)
    return [bytes(frame) for frame in encode(tree)]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _other_array(rng: random.Random, array: Any) -> Any:
    return rng.choice([
        lambda: array[:-1] if array.ndim else array,
        lambda: array.astype("i2") if array.dtype.kind in "iuf" else array,
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: np.full_like(array, np.nan) if array.dtype.kind == "f" else np.full_like(array, 1),
        lambda: np.concatenate([array, array]) if array.ndim else array,
    ])()  # fmt: skip


def change_bytes(rng: random.Random, frames: Frames) -> Frames:
    """Mostly no longer well-formed."""
    frames = list(frames)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(frames)) if rng.random() < 0.3 else 0
        data = bytearray(frames[at])
        how = rng.randrange(8)
        if how <= 2 and data:  # the header's own numbers are in its first bytes, and the most dangerous
            for _ in range(rng.choice([1, 1, 3, 20])):
                place = rng.randrange(min(len(data), rng.choice([16, 200, len(data)])))
                data[place] = rng.choice([0, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)])
        elif how == 3:
            del data[rng.randrange(len(data) + 1) :]
        elif how == 4:
            data += rng.randbytes(rng.choice([1, 10, 1_000]))
        elif how == 5 and data:
            start = rng.randrange(len(data))
            # list, map, bytes, text, extension
            huge = rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]) + b"\xff\xff\xff\xff"
            data[start : start + rng.randrange(9)] = rng.choice([huge, b""])
        elif how == 6:
            frames.insert(rng.randrange(len(frames) + 1), rng.choice([b"", rng.randbytes(20), frames[0]]))
            continue
        elif len(frames) > 1:
            del frames[at]
            continue
        frames[at] = bytes(data)
    return frames


def random_frames(rng: random.Random) -> Frames:
    how = rng.randrange(4)
    if how == 0:
        return [rng.randbytes(rng.choice([0, 1, 5, 100, 3_000])) for _ in range(rng.choice([1, 1, 2, 7, 40]))]
    if how == 1:
        return [b"HILT\x01" + rng.randbytes(rng.choice([0, 1, 8, 64, 500]))]
    if how == 2:
        return [
            b"HILT"
            + bytes([rng.randrange(256)])
            + bytes([rng.choice([0x81, 0x91, 0x80, 0xDE, 0xDF])] * rng.choice([1, 70, 5_000]))
        ]
    return [b""] * rng.choice([1, 2, 1_000])


# --- the lanes ---


class Lane:
    """Sends to one port as a ZeroMQ client, and sees that it still answers."""

    def __init__(self, config: TrainerConfig, weights_port: bool, seed: int, counts: Counter[str]):
        self.config, self.weights_port, self.counts = config, weights_port, counts
        self.rng = random.Random(seed)
        self._questions = itertools.count(1_000_000 * (seed + 1))
        self._context = zmq.Context()
        keys = ClientKeys.load(config.keys, config.key_name) if config.keys is not None else None
        self._port = config.broadcast_port if weights_port else config.port_number
        self._open = lambda: connect(self._context, config, "127.0.0.1", self._port, keys)
        self._socket = self._open()
        self._since = 0

    def close(self) -> None:
        self._context.destroy(0)

    def send(self, frames: Frames, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self._drain()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                break
            except zmq.Again:
                assert time.monotonic() < deadline, f"port {self._port} takes no more messages"
                self._socket.poll(5, zmq.POLLOUT)
        self.counts[what] += 1
        self._since += 1
        if self._since >= BETWEEN_QUESTIONS:
            self.ask()

    def renew(self) -> None:
        """Another connection; what was on its way on this one is dropped, perhaps in the middle of a message."""
        self._socket.close(0)
        self._socket = self._open()

    def ask(self) -> None:
        """A question that is answered once, after everything before it."""
        self._since = 0
        deadline = time.monotonic() + DEADLINE_S
        while True:
            number = next(self._questions)
            if self.weights_port:
                question = {"kind": "want", "seq": number, "have": 0, "instance": "", "name": "lane", "boot": "b"}
            else:  # refused with its own words
                question = {"kind": "hello", "actor": "lane", "boot": "b", "seen_version": 0, "stores": {}}
                question["agreement"] = {"version": f"#{number}#"}
            with suppress(zmq.Again):
                self._socket.send_multipart(encode(question), zmq.NOBLOCK)
            if self._answered(number, seconds=2):
                return
            assert time.monotonic() < deadline, f"port {self._port} answers no more"

    def _answered(self, number: int, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._socket.poll(50):
                try:
                    message = decode(self._socket.recv_multipart())
                except FormatError as error:
                    raise AssertionError(f"port {self._port} sent a malformed message: {error}") from None
                if message.get("seq") == number or f"#{number}#" in str(message.get("why")):
                    return True
        return False

    def _drain(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)


def fuzz_messages(lane: Lane, captured: Captured, count: int) -> None:
    """Frames, mutations and replays over good connections."""
    rng = lane.rng
    for i in range(count):
        if i % 10 == 0 and not lane.weights_port:  # what follows comes from a client that was let in
            lane.send(fresh_hello(rng, captured), "valid hello")
        how = rng.random()
        if how < 0.35:
            lane.send(change_fields(rng, captured.pick(rng, lane.weights_port)), "changed fields")
        elif how < 0.65:
            lane.send(change_bytes(rng, captured.pick(rng, lane.weights_port)), "changed bytes")
        elif how < 0.8:
            lane.send(random_frames(rng), "random frames")
        elif how < 0.97:
            for frames in captured.replayed(rng) if rng.random() < 0.1 else [captured.pick(rng, rng.random() < 0.5)]:
                lane.send(frames, "replays")
        elif how < 0.9995:
            lane.send(captured.pick(rng, lane.weights_port), "as captured")
        else:
            lane.send([bytes(lane.config.max_message_bytes + 1)], "oversized")  # which ends this connection
        if rng.random() < 0.002:
            lane.renew()
    lane.ask()


def fresh_hello(rng: random.Random, captured: Captured) -> Frames:
    hello = copy.deepcopy(decode(rng.choice(captured.templates["hello:"])))
    hello["actor"] = f"fuzz-{rng.randrange(20)}"
    return [bytes(frame) for frame in encode(hello)]


GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY


def zmtp_garbage(rng: random.Random, captured: Captured, most: int) -> tuple[bytes, int]:
    """What a connection sends after a good handshake, and how many messages that is."""
    parts: list[bytes] = []
    for _ in range(rng.choice([1, 20, 60])):
        how = rng.randrange(6)
        body = rng.randbytes(rng.choice([0, 1, 30, 254]))
        if how == 0:
            parts.append(bytes([0, len(body)]) + body)
        elif how == 1:  # a command: PING with a context, or one that nobody knows
            body = rng.choice([b"\x04PING\xff\xff" + body[:16], b"\x04PONG" + body[:16], b"\x09SUBSCRIBE" + body[:30]])
            parts.append(bytes([4, len(body)]) + body)
        elif how == 2:
            parts.append(b"".join(bytes([1, 1]) + b"x" for _ in range(rng.choice([1, 500]))) + bytes([0, 0]))
        elif how == 3:
            frames = captured.pick(rng, rng.random() < 0.5)
            parts.append(
                b"".join(
                    bytes([2 | (i < len(frames) - 1)]) + struct.pack(">Q", len(f)) + f for i, f in enumerate(frames)
                )
            )
        elif how == 4:
            frames = change_bytes(rng, captured.pick(rng, False))
            parts.append(
                b"".join(
                    bytes([2 | (i < len(frames) - 1)]) + struct.pack(">Q", len(f)) + f for i, f in enumerate(frames)
                )
            )
        else:
            parts.append(b"\x02" + struct.pack(">Q", len(body)) + body)
    last = rng.randrange(5)
    if last == 0:  # a size that nobody can mean, or may mean
        size = rng.choice([2**63, 2**64 - 1, 2**40, most + 1, most])
        parts.append(rng.choice([b"\x02", b"\x03"]) + struct.pack(">Q", size) + rng.randbytes(50))
    elif last == 1:  # cut in the middle
        parts[-1] = parts[-1][: rng.randrange(len(parts[-1]) + 1)]
    elif last == 2:
        parts.append(bytes([rng.randrange(8, 256), 5]) + b"flags")
    elif last == 3:  # a message without an end
        parts.append(bytes([1, 3]) + b"abc")
    return b"".join(parts), len(parts)


def fuzz_bytes(config: TrainerConfig, captured: Captured, count: int, seed: int, counts: Counter[str]) -> None:
    """Raw connections to the data port and the weights port: in turn a good handshake
    with garbage after it, and garbage at once."""
    rng = random.Random(seed)
    sent = 0
    while sent < count:
        address = ("127.0.0.1", rng.choice([config.port_number, config.broadcast_port]))
        what, messages = "ZMTP garbage", 1
        if rng.random() < 0.4 or config.keys is not None:
            what = "bytes of strangers"
            data = rng.choice(
                [
                    b"",
                    rng.randbytes(rng.choice([1, 64, 5_000])),
                    GREETING[: rng.randrange(64)],
                    GREETING[:10] + rng.randbytes(54),
                    GREETING + rng.randbytes(100),
                    GREETING + b"\x04\xff" + bytes(255),
                    GREETING.replace(b"NULL\0", b"CURVE") + rng.randbytes(300),
                    b"GET / HTTP/1.1\r\n\r\n",
                    GREETING + b"\x06" + struct.pack(">Q", 2**62) + READY_BODY,
                ]
            )
        else:
            garbage, messages = zmtp_garbage(rng, captured, config.max_message_bytes)
            data = GREETING + READY + garbage
        try:
            # Strangers have addresses of their own, as in life: their floods are dropped by address.
            source = f"127.0.0.{rng.randrange(2, 200)}" if what == "bytes of strangers" else "127.0.0.1"
            connection = socket.create_connection(address, timeout=2, source_address=(source, 0))
        except TimeoutError:
            counts["(not heard)"] += 1
            continue
        except ConnectionRefusedError:
            raise AssertionError(f"nobody listens at port {address[1]} any more") from None
        with connection, suppress(OSError):  # it may close on us at any byte
            connection.sendall(data)
            if rng.random() < 0.5:
                connection.recv(4_096)
        sent += messages
        counts[what] += messages


def fuzz_http(port: int, count: int, seed: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        line = rng.choice(
            [
                "GET /metrics",
                "GET /",
                "POST /metrics",
                "GET /%00",
                "GET /../../etc/passwd",
                "HEAD /metrics",
                "BREW /",
                "",
            ]
        )
        version, length = rng.choice(["1.0", "1.1", "9.9", "x", "-1.1"]), rng.choice(["-1", "5", "9" * 40, "x"])
        data = rng.choice([
            rng.randbytes(rng.choice([0, 1, 50, 2_000])),
            f"{line} HTTP/{version}\r\nContent-Length: {length}\r\n\r\n".encode(),
            f"{line}\r\n\r\n".encode(),
            b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * rng.choice([1, 99, 101]) + b"\r\n",
            b"GET /" + b"x" * rng.choice([10, 66_000]),
            b"GET /metrics HTTP/1.1\r\nx: " + rng.randbytes(70) + b"\r\n\r\n",
        ])  # fmt: skip
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10)
            while connection.recv(65_536):
                pass
        counts["HTTP"] += 1


def in_lanes(*lanes: Callable[[], None]) -> list[threading.Thread]:
    """Runs them side by side; `finish` waits for them and raises what one of them raised."""
    failed: list[BaseException] = []

    def run(lane: Callable[[], None]) -> None:
        try:
            lane()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            failed.append(error)

    threads = [threading.Thread(target=run, args=(lane,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.failed = failed  # type: ignore[attr-defined]
        thread.start()
    return threads


def finish(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if failed := thread.failed:  # type: ignore[attr-defined]
                raise failed[0]
            assert time.monotonic() < deadline, f"the fuzzer is not done after {seconds:g} s"
    for thread in threads:
        if failed := thread.failed:  # type: ignore[attr-defined]
            raise failed[0]
