"""The workers of a run on a Ray cluster: the only file that knows Ray.

    # each rank trains and rolls out
    placement = Placement(kind="ray", address="auto", ranks=4, gpus=1, strategy="SPREAD")
    # or eight roll out, and two train
    placement = Placement(kind="ray", address="auto", ranks=2, gpus=1, rollout_ranks=8)

A rank is an actor in a bundle of one placement group. Ranks that train join each other by torch.distributed; Ray
carries calls, answers, and between those that roll out and those that train: episodes and weights, from machine
to machine by reference, not through this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hilt.core import trust
from hilt.core.errors import ConfigError, DeadlineError, optional_module
from hilt.core.signals import held_back, leave_to_parent
from hilt.distributed.placement import Placement
from hilt.distributed.ranks import host_meeting
from hilt.distributed.remote_workers import (
    STOP_INTERVAL_S,
    Answer,
    CallProgress,
    Group,
    LostWorkerError,
    Remote,
    Stopped,
    Watch,
    WorkerHost,
    never,
)

ray = optional_module("ray", "placement.kind=ray", "cluster")

ROLLOUT = {"collect", "validate", "own", "load_own", "discard"}
"""Calls that are for the ranks that roll out, where others train; all else is for those that train"""
POLL_INTERVAL_S = 5.0
"""Seconds between two questions how far a rank is that is in a call"""
CHANGES = {"update", "load_shared"}
"""Calls after which the weights are others"""


def open_cluster(
    placement: Placement,
    factory: str,
    arguments: Sequence[object],
    device: str = "cpu",
    stop: Callable[[], bool] = never,
) -> Group:
    """The group that a placement with kind=ray asks for, on a cluster that runs
    already or on a new one of this machine."""
    session = Session(placement, stop)
    try:
        trainers = RayGroup(session, factory, arguments, placement, device, stop)
        if not placement.rollout_ranks:
            return trainers
        return Apart(
            session, trainers, RayGroup(session, factory, arguments, placement, device, stop, first=placement.ranks)
        )
    except BaseException:
        session.close()
        raise


class Session:
    """A connection to Ray, and the resources that are set aside there for all ranks."""

    def __init__(self, placement: Placement, stop: Callable[[], bool] = never):
        self._ours = not ray.is_initialized()
        wanted = placement.ranks + placement.rollout_ranks
        if self._ours:
            try:
                new = {"num_cpus": max(os.cpu_count() or 1, -(-wanted * placement.cpus // 1))}
                # the new cluster's processes, and their workers, have them blocked; Ray's
                # own handler here is taken back
                with held_back():
                    ray.init(
                        placement.address or "local",  # whatever the environment names
                        **({} if placement.address else {**new, "include_dashboard": False}),
                        logging_level=logging.WARNING,
                    )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"placement.address={placement.address}: no Ray cluster answers there "
                    f"({str(error).splitlines()[0]}). Start one with `ray start --head`, or leave the address out for "
                    "one of this machine alone."
                ) from error
        self.together = ray.util.placement_group([_bundle(placement)] * wanted, strategy=placement.strategy)
        end = time.monotonic() + placement.wait_seconds
        while not (there_now := self.together.wait(STOP_INTERVAL_S)) and time.monotonic() < end and not stop():
            continue
        if stop():
            self.close()
            raise Stopped
        if not there_now:
            there = ", ".join(
                f"{n:g} {name}" for name, n in sorted(ray.cluster_resources().items()) if name in ("CPU", "GPU")
            )
            nodes = sum(node["Alive"] for node in ray.nodes())
            self.close()
            raise DeadlineError(
                f"{wanted} ranks with {placement.cpus:g} CPU and {placement.gpus:g} GPU each, "
                f"{placement.strategy}, found no place within {placement.wait_seconds:g} s: the cluster has {there} "
                f"on {nodes} machines. Ask for less, or add machines."
            )

    def close(self) -> None:
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # the cluster may be what was lost
                ray.util.remove_placement_group(self.together)
            if self._ours:
                self._without_grace()
                ray.shutdown()

    def _without_grace(self) -> None:
        """Ray's processes have SIGTERM blocked, and `ray.shutdown` would wait a second for
        each to heed it before it kills them."""
        started = getattr(getattr(ray._private.worker, "_global_node", None), "all_processes", {})
        for process in [info.process for infos in started.values() for info in infos]:
            process.terminate = process.kill


@dataclass(frozen=True)
class StoredObject:
    """Something that a rank made and that lies in the object store of its machine. As an
    argument it is there when the worker sees it."""

    reference: Any
    rank: int


class RankActor:
    """The Ray actor of a rank: a `WorkerHost`, with methods that reach it."""

    def __init__(self, rank: int, size: int, trusted: Mapping[str, str]):
        leave_to_parent()
        trust.inherit(trusted)
        self._stopped = threading.Event()
        self._standing: CallProgress | None = None
        self._seat = WorkerHost(rank, size, self._stopped.is_set, self._hear)

    def host(self) -> str:
        """Makes the place where the ranks that train meet, at this machine's address in the cluster."""
        self._meeting, address = host_meeting(ray.util.get_node_ip_address())
        return address

    def where(self) -> str:
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def open(self, *given: Any, **further: Any) -> Answer:
        return self._seat.open(*given, **further)

    def do(self, method: str, arguments: Sequence[object], seconds: float) -> Answer:
        try:
            arguments = [_here(argument, time.monotonic() + seconds) for argument in arguments]
        except LostWorkerError as error:
            return Answer(error=error)
        return self._seat.do(method, arguments)

    def keep(self, method: str) -> tuple[Answer, Any]:
        """Returns the first of the two answers of a worker; the second stays in the store."""
        answer = self._seat.do(method, ())
        head, rest = answer.value if isinstance(answer.value, tuple) else (None, answer.value)
        return answer._replace(value=head), rest

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # it is heard while a call is under way
    def stop(self) -> None:
        self._stopped.set()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def standing(self) -> CallProgress | None:
        """Returns the last progress that the worker reported."""
        return self._standing

    def _hear(self, standing: CallProgress) -> None:
        self._standing = standing


class RayGroup(Remote):
    """Workers as Ray actors: those that train, joined; or, from bundle `first` on,
    those that only roll out, each for itself."""

    def __init__(
        self,
        session: Session,
        factory: str,
        arguments: Sequence[Any],
        placement: Placement,
        device: str,
        stop: Callable[[], bool] = never,
        first: int = 0,
    ):
        super().__init__(placement.rollout_ranks if first else placement.ranks, placement.call_seconds, stop)
        self._session, self._placement, self._device, self._first = session, placement, device, first
        self._made_from = (factory, arguments)
        self._role = "roll_out" if first else "train" if placement.rollout_ranks else "both"
        self._actors: list[Any] = []
        self._answering: dict[int, Any] = {}
        self.where: list[str] = []
        """The process and the machine of each rank"""
        self.restart()

    def keep(self, method: str) -> tuple[list[Any], list[StoredObject]]:
        """Calls a method of all workers; what they answer stays where they are. Of a pair,
        the first comes here: (firsts, rests)."""
        rests = []
        for rank, actor in enumerate(self._actors):
            self._answering[rank], rest = actor.keep.options(num_returns=2).remote(method)
            rests.append(StoredObject(rest, rank))
        return self._answers(method, self._call_seconds), rests

    def stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def close(self) -> None:
        super().close()
        if self._role == "both":
            self._session.close()

    def _begin(self) -> float:
        seconds, share = self._placement.wait_seconds, _bundle(self._placement)
        actor = ray.remote(concurrency_groups={"control": 1})(RankActor)
        for rank in range(self.size):
            bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._session.together, placement_group_bundle_index=self._first + rank
            )
            options = {
                "num_cpus": share["CPU"],
                "num_gpus": share.get("GPU", 0),
                "max_restarts": 0,
                "scheduling_strategy": bundle,
            }
            self._actors.append(actor.options(**options).remote(rank, self.size, trust.for_children()))
        self._answering = {rank: actor.where.remote() for rank, actor in enumerate(self._actors)}
        self.where = ["a process that did not start"] * self.size
        self.where = self._answers("start", seconds, self._asked)
        address = ray.get(self._actors[0].host.remote(), timeout=seconds) if not self._first else ""
        for rank, actor in enumerate(self._actors):
            self._answering[rank] = actor.open.remote(*self._made_from, address, seconds, self._device, role=self._role)
        return seconds + self._call_seconds

    def _send(self, rank: int, method: str, arguments: Sequence[Any]) -> None:
        self._answering[rank] = self._actors[rank].do.remote(method, list(arguments), self._placement.wait_seconds)

    def _ready(self, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        by_reference = {self._answering[rank]: rank for rank in ranks}
        answers, end = {}, time.monotonic() + min(seconds, POLL_INTERVAL_S)
        ready: list[Any] = []
        while not ready and (left := end - time.monotonic()) > 0:  # in short waits, between which signals are handled
            ready = ray.wait(list(by_reference), num_returns=1, timeout=min(left, STOP_INTERVAL_S))[0]
        if not ready and seconds >= POLL_INTERVAL_S:
            self._ask_standing(by_reference.values())
        for reference in ready:
            rank = by_reference[reference]
            try:
                answer = ray.get(reference)
                answers[rank] = answer if isinstance(answer, Answer) else Answer(answer)
            except ray.exceptions.RayTaskError as error:  # an answer that Ray cannot carry
                answers[rank] = Answer(error=error.as_instanceof_cause())
            except ray.exceptions.RayError as error:
                message = f"rank {rank} of {self.size} ({self._role}) is gone, {self.where[rank]}: {_in_short(error)}"
                answers[rank] = Answer(error=LostWorkerError(message, rank))
        return answers

    def _ask_standing(self, ranks: Iterable[int]) -> None:
        asked = {rank: self._actors[rank].standing.remote() for rank in ranks}
        for rank, reference in asked.items():
            with contextlib.suppress(ray.exceptions.RayError):  # it is busy, or gone, which its reply will show
                if (standing := ray.get(reference, timeout=POLL_INTERVAL_S)) is not None:
                    self.watch(rank, standing)

    def _end(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors, self._answering = [], {}


class Apart:
    """Two groups that look like one: ranks that train, and ranks that roll out.

    Before a collection those that roll out get the newest weights, with their version; before an update those that
    train get the episodes, each from the ranks whose number it is, counted round. ``begin_collect`` comes between the
    two: the ranks that roll out collect the next step while the others are in the update.
    """

    def __init__(self, session: Session, trainers: RayGroup, rollouts: RayGroup):
        self._session, self.trainers, self.rollouts, self.size = session, trainers, rollouts, trainers.size
        self._stale = True
        self._handed = self._begun = False  # this step's episodes are with the trainers, the next ones are under way
        self._early: list[Any] | None = None  # what a collection that was begun has answered
        self.version = -1
        """Of the weights that were last sent"""

    @property
    def watch(self) -> Watch:
        return self.trainers.watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self.trainers.watch = self.rollouts.watch = watch

    @property
    def carried(self) -> int:
        return self.trainers.carried + self.rollouts.carried

    def call(
        self, method: str, *arguments: Any, each: Sequence[object] | None = None, timeout: float | None = None
    ) -> list[Any]:
        if method == "begin_collect":
            self._hand_over(timeout)
            if self._stale:
                self._send_weights()
            self.rollouts.begin("collect", *arguments)
            self._begun = True
            return [None] * self.size
        if method in ROLLOUT:
            if self._begun:
                self._early, self._begun = self.rollouts.finish("collect", timeout), False
            if method == "collect" and self._early is not None:
                answers, self._early = self._early, None
                return answers
            if self._stale and method in ("collect", "validate"):
                self._send_weights()
            return self.rollouts.call(method, *arguments, each=each, timeout=timeout)
        if method == "update":
            self._hand_over(timeout)
            self._handed = False
        self._stale = self._stale or method in CHANGES
        return self.trainers.call(method, *arguments, each=each, timeout=timeout)

    def _hand_over(self, timeout: float | None) -> None:
        """Brings this step's episodes to the ranks that train, not before they are learned from: until then they are
        part of what a rank that rolls out would save."""
        if not self._handed:
            episodes = self.rollouts.keep("hand_out")[1]
            shares = [episodes[rank :: self.size] for rank in range(self.size)]
            self.trainers.call("take_in", each=shares, timeout=timeout)
            self._handed = True

    def stop(self) -> None:
        self.trainers.stop()
        self.rollouts.stop()

    def restart(self) -> None:
        self._stale, self._handed, self._begun, self._early = True, False, False, None
        self.trainers.restart()
        self.rollouts.restart()

    def close(self) -> None:
        self.rollouts.close()
        self.trainers.close()
        self._session.close()

    def _send_weights(self) -> None:
        (version, *_), (weights, *_) = self.trainers.keep("weights")
        self.rollouts.call("take_weights", version, weights, timeout=self.trainers._placement.wait_seconds)
        self.version, self._stale = version, False


def _bundle(placement: Placement) -> dict[str, float]:
    return {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})


def _here(value: Any, end: float) -> Any:
    """An argument, with what was kept elsewhere fetched to this machine before the deadline."""
    if isinstance(value, StoredObject):
        try:
            return ray.get(value.reference, timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise LostWorkerError(
                f"what rank {value.rank} has made did not arrive before the deadline.", value.rank
            ) from error
        except ray.exceptions.RayError as error:
            raise LostWorkerError(f"what rank {value.rank} has made is lost: {_in_short(error)}", value.rank) from error
    return [_here(each, end) for each in value] if isinstance(value, list) else value


def _in_short(error: Exception) -> str:
    """Returns Ray's message about a lost worker, without its numbers and its advice."""
    text = " ".join(str(error).split())
    return text.rpartition("The actor is dead because ")[2].partition(" Some common causes")[0][:400]
