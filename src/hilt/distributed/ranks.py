"""The ranks of a run: what one may ask of the others.

A rank is one process that trains. `Alone` is the only one; `Joined` ranks reduce through torch.distributed, with gloo
between CPUs and NCCL between GPUs. The rule of every caller: **all ranks make the same calls in the same order,
whatever each has to do**; one with nothing to add, adds zeros. No wait is for ever: it ends at its deadline or as soon
as another rank leaves, and the error names that rank.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError
from hilt.core.platform import environment
from hilt.core.tree import Json

LOOPBACK = "127.0.0.1"
CONSEQUENCE = "it lost another: "
"""How the words of a rank begin that left because another one had"""
REASON_SECONDS = 2.0
"""How long a rank whose connection closed waits for the reason of the one that closed it"""


class LostRankError(HiltError, RuntimeError):
    """Raised at a rank that waited for another one which is gone: a consequence, never the cause of a failure."""


class LateRankError(LostRankError, DeadlineError):
    """Raised at a rank that waited for another one until the deadline."""


class Ranks(Protocol):
    """One rank among `size`, numbered from 0."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds the tensors of all ranks, in place; the result has the same bits everywhere."""

    def max(self, value: int) -> int:
        """The largest of a number that each rank gives."""

    def any(self, value: bool) -> bool:
        """Whether it is so at any rank."""
        return self.max(value) > 0

    def gather(self, tree: Json) -> list[Any]:
        """A small tree of JSON from each rank, in their order, at every rank."""

    def barrier(self) -> None:
        """Returns when all ranks are here."""
        self.max(0)


class Alone(Ranks):
    """The only rank, which never waits."""

    rank, size = 0, 1

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, value: int) -> int:
        return int(value)

    def gather(self, tree: Json) -> list[Any]:
        return [json.loads(json.dumps(tree))]  # as the others would see it


class Unjoined(Ranks):
    """A rank that has its number, and does nothing together with others: one that only rolls out."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def sum_(self, tensor: Tensor) -> Tensor:
        raise ClosedError(
            f"rank {self.rank} of {self.size} only rolls out: it has joined no group, and "
            "cannot take part in reductions."
        )

    def max(self, value: int) -> int:
        return int(self.sum_(torch.tensor(value)))

    def gather(self, tree: Json) -> list[Any]:
        return [self.max(0)]


class Joined(Ranks):
    """A rank of torch.distributed's group of this process. `join` makes it, and `leave` is its end."""

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float, host: str = LOOPBACK):
        """`host`: the address at which the ranks have met."""
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._store, self._calls, self._left, self._host = store, 0, False, host

    def connecting(self) -> contextlib.AbstractContextManager[None]:
        """Within it, process groups are made: gloo reads which network interface it connects by. If the ranks have met
        at the loopback address, it is that interface; gloo's own choice would be the computer's outer address."""
        if self._host != LOOPBACK:
            return contextlib.nullcontext()
        return environment(
            {"GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo"))}
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        self._do("sum_", lambda: dist.all_reduce(tensor))
        return tensor

    def max(self, value: int) -> int:
        return self._largest("max", value)

    def any(self, value: bool) -> bool:
        return self._largest("any", value) > 0

    def gather(self, tree: Json) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        self._do("gather", lambda: dist.all_gather(sizes, torch.tensor(text.numel())))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: text.numel()] = text
        rows = [torch.zeros_like(padded) for _ in range(self.size)]
        self._do("gather", lambda: dist.all_gather(rows, padded))
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        self._largest("barrier", 0)

    def leave(self, why: str) -> None:
        """Leaves permanently, with a reason. The others' waits end as soon as no reference to the group is
        left here (a sharded module has one)."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(RuntimeError):  # the store may be gone, or its host be the one that died
            self._store.set(f"left/{self.rank}", why)
        if dist.is_initialized():
            for backend in {
                dist.distributed_c10d._get_default_group()._get_backend(torch.device(d)) for d in _devices()
            }:
                with contextlib.suppress(RuntimeError):
                    backend.abort()
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def fail(self, what: str, error: Exception) -> Exception:
        """Leaves because of an error, which is returned unchanged, except that an error of
        torch.distributed names the rank that was lost."""
        known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if known or (
            type(error) is RuntimeError
            and any(word in str(error).lower() for word in ("gloo/", "timed out", "timeout"))
        ):
            error = self.explain(what, error)
        self.leave(f"{CONSEQUENCE}{error}" if isinstance(error, LostRankError) else f"{type(error).__name__}: {error}")
        return error

    def explain(self, what: str, error: BaseException) -> LostRankError:
        """Returns the error of a rank that waited in vain, from the status of the others."""
        late = "timeout" in str(error).lower() or "timed out" in str(error).lower()
        try:
            stands = {r: self._status(f"at/{r}") for r in range(self.size) if r != self.rank}
            left = self._left_by(list(stands), 0 if late else min(REASON_SECONDS, self.timeout_seconds / 2))
        except RuntimeError:
            return LostRankError(
                f"rank {self.rank} in {what}: the ranks' meeting place does not answer; the "
                "process that kept it is gone."
            )
        behind = [r for r, at in stands.items() if int((at or "0").split()[0]) < self._calls] or list(stands)
        if left:
            rank, why = min(left.items(), key=lambda item: item[1].startswith(CONSEQUENCE))
            return LostRankError(f"rank {self.rank} in {what}: rank {rank} left: {why.removeprefix(CONSEQUENCE)}")
        names = " and ".join(f"rank {r} (last seen in {(stands[r] or '0 nothing').split(' ', 1)[1]})" for r in behind)
        if late:
            return LateRankError(f"rank {self.rank} in {what} waited {self.timeout_seconds:g} s for {names}.")
        return LostRankError(f"rank {self.rank} in {what}: {names} is gone: the connection closed.")

    def at(self, what: str) -> None:
        """Tells the others where this rank stands, for their errors."""
        self._calls += 1
        self._store.set(f"at/{self.rank}", f"{self._calls} {what}")

    def _largest(self, what: str, value: int) -> int:
        largest = torch.tensor(int(value))
        self._do(what, lambda: dist.all_reduce(largest, dist.ReduceOp.MAX))
        return int(largest)

    def _do(self, what: str, collective: Callable[[], Any]) -> None:
        try:
            self.at(what)
            collective()
        except RuntimeError as error:
            # all that torch.distributed raises: also its own DistBackendError and DistNetworkError
            # nothing more can be done in this group, and others may wait for this rank
            raise self.fail(what, error) from error

    def _left_by(self, ranks: list[int], seconds: float) -> dict[int, str]:
        """The ranks that left, with their reasons; it waits so long for the first one. A rank whose own wait is over
        closes its connections before it can give its reason, and those whose connection closes then would
        otherwise name the wrong rank."""
        deadline = time.monotonic() + seconds
        while True:
            left = {rank: why for rank in ranks if (why := self._status(f"left/{rank}"))}
            if left or time.monotonic() >= deadline:
                return left
            time.sleep(0.05)

    def _status(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def host_meeting(host: str = LOOPBACK) -> tuple[Any, str]:
    """A place where ranks meet, at a free port of this address and no other: keep the
    first, give the second (an address) to `join`."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, f"{host}:{port}"


def join(
    address: str, rank: int, size: int, *, name: str = "0", timeout_seconds: float = 600.0, device: str = "cpu"
) -> Joined:
    """Meets the others at the address. A group that lost a rank meets again under
    another `name`; every wait has this deadline.

    On a GPU its tensors go through NCCL and small figures still through gloo, which tells who is late.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: ranks are numbered from 0; give one below {size}.")
    host, port = address.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        store = dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False, timeout=timeout))
        joined = Joined(store, rank, size, timeout_seconds, host)
        joined.at("join")
        with joined.connecting():
            dist.init_process_group(
                backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=timeout
            )
        dist.all_reduce(torch.zeros(1))  # gloo connects when it has to: from now on, who goes is noticed
    except RuntimeError as error:
        absent = []
        with contextlib.suppress(RuntimeError, UnboundLocalError):
            absent = [r for r in range(size) if not store.check([f"at/{r}"])]
        who = f"rank {', '.join(map(str, absent))} of {size} did not come" if absent else "not all ranks came"
        raise LateRankError(f"rank {rank} waited {timeout_seconds:g} s at {address}: {who} ({error}).") from error
    return joined


def _devices() -> list[str]:
    return ["cpu", "cuda"] if "nccl" in str(dist.get_backend_config()) else ["cpu"]
