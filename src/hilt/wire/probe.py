"""Diagnoses why an address does not reply: a separate connection, which sees what ZeroMQ hides.

A ZeroMQ socket begins with a greeting of 64 bytes, in which the name of its mechanism, NULL or CURVE,
lies in clear text (https://rfc.zeromq.org/spec/23, section 2.2). Two sides of which one has keys and the
other has none hear nothing of each other otherwise.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

GREETING_BYTES = 64
VERSION = b"\x03\x01"
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MECHANISM = slice(12, 32)
TIMEOUT_S = 1.0


class ProbeResult(NamedTuple):
    """What was found at an address."""

    reason: str
    """In words; empty: nothing is wrong there"""
    final: bool = False
    """Whether waiting cannot help"""


def probe(host: str, port: int, has_keys: bool, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """What listens there, as far as a stranger can tell within the timeout in seconds."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            # no more: who has another mechanism hangs up before it names its own
            connection.sendall(SIGNATURE + VERSION)
            greeting = _read(connection)
    except OSError as error:
        number = error.errno or 0
        return ProbeResult(f"nothing can be reached there ({os.strerror(number) if number > 0 else error})")
    if greeting[:1] != SIGNATURE[:1] or greeting[9:10] != SIGNATURE[9:]:
        return ProbeResult("something listens there that does not greet as a learner does: check the port")
    their_keys = greeting[MECHANISM].rstrip(b"\0") == b"CURVE"
    if their_keys and not has_keys:
        return ProbeResult(
            "the learner there has keys and lets in who has one, and this side has none: give this one's key "
            "with wire.keys=FOLDER (in Python, keys='FOLDER'). `hilt keys new learner ACTOR...` "
            "makes them, at the learner",
            final=True,
        )
    if has_keys and not their_keys and len(greeting) == GREETING_BYTES:
        reason = "this side has keys, and the learner there has none: give both sides wire.keys, or neither"
        return ProbeResult(reason, final=True)
    doubt = (
        "the learner there is busy, or keys do not match: its folder of keys needs this side's .pub, and "
        "this side's its learner.pub"
    )
    return ProbeResult(doubt if has_keys else "")


def _read(connection: socket.socket) -> bytes:
    """The greeting, or what came of it."""
    data = b""
    try:
        while len(data) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES - len(data))):
            data += more
    except (TimeoutError, ConnectionError):
        pass
    return data
