"""A learner's views and channels from another machine: batches, priorities, and hand-over, with deadlines.

Example:

    sampler = client.sampler("actor_env", "prioritized", sources=["human"], seed=0)
    batch = sampler.sample(256)
    sampler.update_priorities(batch.steps, td_error)
    client.channel("trajectories").put(trajectory, timeout=10)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, DeadlineError, FormatError, RefusedError, UnknownNameError
from hilt.core.names import load_own
from hilt.core.tree import Array, flatten, unflatten
from hilt.replay.sampling.assembly import Batch
from hilt.replay.sampling.sampler import Sampler
from hilt.replay.tensors import as_tensor, from_raw_array
from hilt.replay.transfer.channel import DEADLINE_S, Channel
from hilt.replay.view import View
from hilt.wire.codec import ML_NAMES
from hilt.wire.requests import Handler

if TYPE_CHECKING:
    from hilt.wire.ingest import DataSink

SAMPLERS = 256
"""Samplers that a server keeps for its clients; the one that was not used longest goes first."""
GRACE_S = 2.0
"""What a client waits longer than it lets the server wait, so that the server's own answer arrives."""

TRAJECTORY_CLASS = "hilt.formats.rlinf_trajectory:Trajectory"
TRAJECTORY = "hilt/trajectory"
"""The only key of a dictionary that stands for a `Trajectory` on the way"""
TORCH_TYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""Types of tensors that numpy does not have"""

Ask = Callable[[str, Any, float, "int | None"], Any]


class RemoteSampler:
    """Batches from a view of a learner's store, as `View.sampler` gives them there."""

    def __init__(self, ask: Ask, name: str, selection: Mapping[str, Any]):
        self._ask, self._what = ask, {"name": name, "id": np.random.default_rng().bytes(8).hex(), **selection}

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """A batch. Waits at most `timeout` seconds, rate limiters included."""
        seconds = DEADLINE_S if timeout is None else timeout
        asked = {**self._what, "batch_size": batch_size, "keys": None if keys is None else list(keys)}
        got = self._ask("hilt/sample", asked, seconds, None)
        batch = Batch(got["batch"])
        batch.steps, batch.probabilities, batch.weights = got["steps"], got["probabilities"], got["weights"]
        return batch

    def update_priorities(self, steps: Array, priorities: Array, timeout: float | None = None) -> int:
        """New priorities of steps by key; returns how many of them were still there."""
        asked = {**self._what, "steps": np.asarray(steps, np.int64), "priorities": np.asarray(priorities, np.float64)}
        return int(self._ask("hilt/priorities", asked, DEADLINE_S if timeout is None else timeout, None))

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return int(self._ask("hilt/size", self._what, DEADLINE_S, None))


class RemoteChannel:
    """A channel of the learner. An item is handed over exactly once, whatever happens on the way.

    Items are nested arrays, tensors, numbers and text, which arrive as arrays; a
    `Trajectory`, or a list of them, arrives as what it is.
    """

    def __init__(self, ask: Ask, new_number: Callable[[], int], name: str):
        self.name = name
        self._ask, self._new_number = ask, new_number
        self._putting: tuple[int, Any] | None = None
        self._getting: int | None = None
        self._lock = threading.Lock()

    def put(self, item: object, *, timeout: float | None = None) -> None:
        """Hands an item over. After a `DeadlineError` because of the network, putting the same
        item again goes on with the same put."""
        seconds = DEADLINE_S if timeout is None else timeout
        with self._lock:
            if self._putting is None or self._putting[1] is not item:
                self._putting = (self._new_number(), item)
            with self._answered("_putting"):
                self._ask("hilt/put", {"name": self.name, "item": _sent(item)}, seconds, self._putting[0])

    def get(self, *, timeout: float | None = None) -> Any:
        """The oldest item. One that was taken from the channel and did not arrive
        in time is what the next `get` returns."""
        seconds = DEADLINE_S if timeout is None else timeout
        with self._lock:
            if self._getting is None:
                self._getting = self._new_number()
            with self._answered("_getting"):
                return _received(self._ask("hilt/get", {"name": self.name}, seconds, self._getting))

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """Unless an answer came, and be it an error, the next call goes on with the same question."""
        try:
            yield
        except (UnansweredError, RefusedError, KeyboardInterrupt):
            raise
        except BaseException:
            setattr(self, what, None)
            raise
        setattr(self, what, None)


class Samplers:
    """The server's side of `RemoteSampler`."""

    def __init__(self, sinks: Mapping[str, DataSink]):
        self._sinks = sinks
        self._given: dict[str, Sampler] = {}
        self._made: OrderedDict[str, Sampler] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, name: str, sampler: Sampler) -> None:
        self._given[name] = sampler

    def handlers(self) -> dict[str, Handler]:
        return {
            "hilt/sample": self._sample,
            "hilt/priorities": self._priorities,
            "hilt/size": lambda asked, _: len(self._of(asked)),
        }

    def _sample(self, asked: Any, seconds: float) -> dict[str, Any]:
        batch = self._of(asked).sample(asked["batch_size"], asked["keys"], timeout=max(0.0, seconds))
        return {
            "batch": dict(batch),
            "steps": batch.steps,
            "probabilities": batch.probabilities,
            "weights": batch.weights,
        }

    def _priorities(self, asked: Any, _: float) -> int:
        return self._of(asked).update_priorities(asked["steps"], asked["priorities"])

    def _of(self, asked: Any) -> Sampler:
        if (
            not isinstance(asked, dict)
            or not isinstance(asked.get("name"), str)
            or not isinstance(asked.get("id"), str)
        ):
            raise FormatError("a request for a batch without a name.")
        name = asked["name"]
        if name in self._given:
            return self._given[name]
        with self._lock:
            if asked["id"] not in self._made:
                self._made[asked["id"]] = self._make(name, asked)
            self._made.move_to_end(asked["id"])
            while len(self._made) > SAMPLERS:
                self._made.popitem(last=False)
            return self._made[asked["id"]]

    def _make(self, name: str, asked: Mapping[str, Any]) -> Sampler:
        log = self._sinks[name].log if name in self._sinks else None
        if name not in self._sinks:
            raise UnknownNameError("data store or sampler at the learner", name, [*self._sinks, *self._given])
        if log is None:
            raise ConfigError(
                f"{name}: this store keeps no log, so there is no view to draw from. Register one "
                "of hilt.replay's buffers."
            )
        view: View = log.by_source(*asked["sources"]) if asked.get("sources") else log.all()
        if asked.get("successes"):
            view = view & log.successes()
        if asked.get("last") is not None:
            view = view.last(asked["last"])
        return view.sampler(asked.get("how", "uniform"), **asked.get("options", {}))


def channel_requests(channels: Mapping[str, Channel[Any]]) -> dict[str, Handler]:
    """The server's side of `RemoteChannel`."""

    def of(asked: object) -> Channel[Any]:
        name = str(asked.get("name") if isinstance(asked, dict) else None)
        if name not in channels:
            raise UnknownNameError("channel at the learner", name, channels)
        return channels[name]

    def put(asked: Any, seconds: float) -> None:
        of(asked).put(_received(asked["item"]), timeout=max(0.0, seconds))

    def get(asked: object, seconds: float) -> Any:
        return _sent(of(asked).get(timeout=max(0.0, seconds)))

    return {"hilt/put": put, "hilt/get": get}


def _sent(item: Any) -> Any:
    """What goes over the wire for an item of a channel."""
    if _is_trajectory(item):
        return {TRAJECTORY: item.to_dict()}
    if isinstance(item, list | tuple) and any(map(_is_trajectory, item)):
        return [_sent(each) for each in item]
    return item


def _is_trajectory(item: Any) -> bool:
    """Returns whether an item is a `Trajectory`, without importing its class."""
    return any(f"{kind.__module__}:{kind.__qualname__}" == TRAJECTORY_CLASS for kind in type(item).__mro__)


def _received(item: Any) -> Any:
    """The item that `_sent` was given."""
    if isinstance(item, dict) and item.keys() == {TRAJECTORY}:
        if not isinstance(item[TRAJECTORY], dict):
            raise FormatError(
                f"a trajectory came as {type(item[TRAJECTORY]).__name__}; expected a dictionary of its fields."
            )
        fields = unflatten({path: _field(path, value) for path, value in flatten(item[TRAJECTORY]).items()})
        return load_own(TRAJECTORY_CLASS).from_dict(fields)
    if isinstance(item, list) and any(isinstance(each, dict) and each.keys() == {TRAJECTORY} for each in item):
        return [_received(each) for each in item]
    return item


def _field(path: str, value: Any) -> Any:
    """A field of a trajectory: a tensor, also of a type that numpy does not have; or the number or text that it is."""
    if not isinstance(value, np.ndarray):
        return value
    if (name := ML_NAMES.get(value.dtype.type, "")) in TORCH_TYPES:
        return from_raw_array(value.view({1: np.uint8, 2: np.int16}[value.itemsize]).copy(), name)
    return as_tensor(value, path)


class UnansweredError(DeadlineError):
    """It is unknown whether the request was executed."""

    reason = ""
    """Why there is no reply, if that is known"""


def no_answer(what: str, seconds: float, server: str, reason: str = "") -> UnansweredError:
    found = f"{reason[:1].upper()}{reason[1:]}. " if reason else ""
    error = UnansweredError(
        f"{what}: no answer from the learner at {server} within {seconds:g} s. "
        f"{found}Check that it runs and that the network between lets its ports through."
    )
    error.reason = reason
    return error
