"""A policy whose answers are known, and a client that speaks openpi's protocol by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import torch

from hilt.policies.base import ObservedFields, Policy

WAIT_S = 60.0
CHUNK, DIM, STATE = 3, 2, 4


class Known(Policy):
    """Answers with the sum of the state, plus its only weight; `calls` has the number of rows of each call."""

    chunk, action_dim = CHUNK, DIM

    def __init__(self, fields: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.begun: list[int] = []
        self.calls: list[int] = []
        self.settings: list[tuple[bool, float]] = []
        self.fields = ObservedFields(("full_image", "wrist_image"), STATE) if fields else None
        self.prefixes: list[Any] = []
        self.continues = False
        self.go = threading.Event()
        self.go.set()

    def observed_fields(self) -> ObservedFields | None:
        return self.fields

    @property
    def takes_prefix(self) -> bool:
        return self.continues

    def act(
        self,
        observations: Any,
        sample: bool = True,
        temperature: float = 1.0,
        generator: Any = None,
        prefix: Any = None,
    ) -> Any:
        self.begun.append(len(observations))
        assert self.go.wait(WAIT_S)
        self.prefixes.append(prefix)
        self.calls.append(len(observations))
        self.settings.append((sample, temperature))
        if any(seen["instruction"] == "fail" for seen in observations):
            raise ZeroDivisionError("the model is broken")
        sums = np.array([np.sum(seen["state"]) for seen in observations], np.float32) + float(self.weight.detach())
        for row, seen in enumerate(observations):
            if seen["instruction"] == "nan":
                sums[row] = np.nan
        return np.broadcast_to(sums[:, None, None], (len(sums), CHUNK, DIM)), {}

    def evaluate(self, record: Any) -> Any:
        raise NotImplementedError

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        raise NotImplementedError


def seen(number: float = 1.0, **changes: Any) -> dict[str, Any]:
    """An observation by openpi's names, to which `Known` answers with `number`; None leaves a field out."""
    picture = np.zeros((8, 8, 3), np.uint8)
    state = np.zeros(STATE, np.float32)
    state[0] = number
    all_of_it = {
        "observation/image": picture,
        "observation/wrist_image": picture,
        "observation/state": state,
        "prompt": "do it",
    }
    return {name: value for name, value in {**all_of_it, **changes}.items() if value is not None}


def packed(message: Any) -> bytes:
    """As openpi's client packs it, written once more: the server's own packing is not what is tested."""

    def array(value: np.ndarray) -> Any:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}

    return msgpack.packb(message, default=array)


def unpacked(data: bytes) -> Any:
    def array(found: dict[Any, Any]) -> Any:
        if b"__ndarray__" not in found:
            return found
        return np.ndarray(found[b"shape"], np.dtype(found[b"dtype"]), found[b"data"])

    return msgpack.unpackb(data, object_hook=array)


class OpenpiClient:
    """A client as openpi's: metadata first, then one answer for each observation."""

    def __init__(self, socket: Any):
        self.socket = socket
        self.metadata = unpacked(self.socket.recv(WAIT_S))

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes | str) else packed(message))

    def answer(self) -> Any:
        """A map, or the text of an error."""
        given = self.socket.recv(WAIT_S)
        return given if isinstance(given, str) else unpacked(given)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.answer()


@contextmanager
def connected(url: str, **options: Any) -> Iterator[OpenpiClient]:
    from websockets.sync.client import connect

    limits = {"compression": None, "max_size": None, "open_timeout": WAIT_S, "close_timeout": 5}
    with connect(url, **limits, **options) as socket:
        yield OpenpiClient(socket)
