"""Requests of several robots become one call of the policy, and each gets its own answer.

The first request that waits opens a batch. The batch is closed when it is full, when every client that could still ask
is in it, or when its first request has waited for `max_wait_s`. What arrives while the policy computes is in the next
batch. One thread calls the policy; newer weights are taken up between two calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hilt.core.errors import ClosedError, ConfigError, HiltError, RequestError
from hilt.core.validate import check, setting
from hilt.policies.base import Policy, Prefix, check_prefix
from hilt.serving.observation_names import ActRequest
from hilt.serving.serving_metrics import ServingMetrics

if TYPE_CHECKING:
    from torch import Tensor

POLL_INTERVAL_S = 1.0
CLOSE_S = 10.0
"""The timeout for the thread to end, in seconds"""
FIGURE_MEANINGS = {
    "best_of": "Chunks that are drawn for each plan, of which a verifier chooses one.",
    "plans": "Plans that were chosen.",
    "draw_ms": "Milliseconds to draw the chunks of a plan, on average.",
    "judge_ms": "Milliseconds of the verifier for each plan, on average.",
    "gain": "How much more the chosen chunk is worth than a drawn one, on average, by the verifier.",
    "likeliest": "Share of the plans in which the likeliest chunk was chosen.",
}
"""What `Policy.acting_figures` counts, as the metrics explain it"""


@dataclass(frozen=True)
class BatcherSettings:
    """When a batch is closed, and what is random in it."""

    max_batch: int = setting(16, minimum=1)
    """Observations in one call of the policy"""
    max_wait_s: float = setting(0.005, minimum=0, maximum=10)
    """Seconds that the first request of a batch waits for others"""
    seed: int = setting(0, minimum=0)
    """Seeds the actions that are sampled"""

    def __post_init__(self) -> None:
        check(self)


class BatchAnswer(NamedTuple):
    """What the policy answered to one request."""

    actions: np.ndarray
    """float32 [chunk, action_dim]"""
    version: int
    """The version of the weights that gave them"""
    rows: int
    """Observations that were in the same call"""
    wait_s: float
    """Seconds from the request to the call"""
    act_s: float
    """Seconds of the call"""


@dataclass
class _Pending:
    request: ActRequest
    arrived: float
    answer: Future[BatchAnswer]

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)


class Batcher:
    """Owns a policy and the thread that calls it."""

    def __init__(
        self,
        policy: Policy,
        version: int = 0,
        settings: BatcherSettings | None = None,
        *,
        clients: Callable[[], int] | None = None,
        metrics: ServingMetrics | None = None,
    ):
        """`clients`: returns the number of clients that may ask, so that nobody waits for more of them than there
        are."""
        self.policy, self.version, self.settings = policy, version, settings or BatcherSettings()
        self.metrics = metrics or ServingMetrics()
        self._clients = clients or (lambda: self.settings.max_batch)
        self._waiting: list[_Pending] = []
        self._newer: tuple[int, Mapping[str, Any]] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._draws = torch.Generator().manual_seed(self.settings.seed)
        self.metrics.show("weights_version", "Number of the weights that answer.", lambda: float(self.version))
        self.metrics.show("waiting_requests", "Requests that wait.", lambda: float(len(self._waiting)))
        for name in policy.acting_figures():
            self.metrics.show(name, FIGURE_MEANINGS.get(name, "A figure of the policy."), partial(self._figure, name))
        self._thread = threading.Thread(target=self._run, name="hilt-batcher", daemon=True)
        self._thread.start()

    def submit(self, request: ActRequest) -> Future[BatchAnswer]:
        """Adds a request to the next batch. One whose answer is cancelled before it is closed is not computed. A prefix
        that the policy cannot continue is refused now."""
        if request.prefix is not None:
            given = Prefix(request.prefix[None], np.array([request.frozen]))
            check_prefix(self.policy, given, 1, request.sample)
        pending = _Pending(request, time.monotonic(), Future())
        with self._changed:
            if self._closed:
                raise ClosedError("the policy server is ending; ask another one.")
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending.answer

    def swap(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Takes up newer weights after the call that is under way. Names and shapes are checked now."""
        own = dict(self.policy.named_parameters())
        for name, tensor in weights.items():
            if name not in own or tuple(own[name].shape) != tuple(tensor.shape):
                there = list(own[name].shape) if name in own else "nothing of this name"
                raise ConfigError(
                    f"the weights of version {version} have {name} {list(tensor.shape)}, and the policy that is served "
                    f"has {there}: they are of another policy. Serve its run with a new `hilt serve-policy`."
                )
        with self._changed:
            self._newer = version, weights
            self._changed.notify_all()

    def close(self) -> None:
        """Ends after the call that is under way; requests that wait are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _figure(self, name: str) -> float:
        return self.policy.acting_figures().get(name, 0.0)

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._newer or self._closed):
                    self._changed.wait(POLL_INTERVAL_S)
                newer, self._newer = self._newer, None
                batch = [] if newer or self._closed else self._next_batch()
                if self._closed:
                    left, self._waiting = [*batch, *self._waiting], []
                    break
            if newer is not None:
                self._take_up(*newer)
            if batch:
                self._answer(batch)
        for pending in left:
            pending.fail(ClosedError("the policy server has ended; ask another one."))

    def _next_batch(self) -> list[_Pending]:
        """Waits until the batch is closed, and takes it. All of it is answered in one way: others wait."""
        first = self._waiting[0]
        until = first.arrived + self.settings.max_wait_s
        while not self._closed and self._newer is None:
            enough = max(1, min(self.settings.max_batch, self._clients()))
            left = until - time.monotonic()
            if len(self._waiting) >= enough or left <= 0:
                break
            self._changed.wait(left)
        alike = [one for one in self._waiting if one.request.kind == first.request.kind][: self.settings.max_batch]
        taken = set(map(id, alike))
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        return [one for one in alike if one.answer.set_running_or_notify_cancel()]

    def _take_up(self, version: int, weights: Mapping[str, Any]) -> None:
        own = dict(self.policy.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(torch.as_tensor(tensor))
        self.version = version
        self.metrics.swaps.add()

    def _answer(self, batch: Sequence[_Pending]) -> None:
        """One call for all of them; where it fails, one for each, so that the fault is its sender's alone."""
        began = time.monotonic()
        try:
            actions = self._act([one.request for one in batch])
        except Exception as error:  # noqa: BLE001  # broad: a policy may raise anything, and the server goes on
            if len(batch) > 1:
                for one in batch:
                    self._answer([one])
            else:
                known = isinstance(error, HiltError)
                batch[0].fail(error if known else RequestError(f"the policy failed: {type(error).__name__}: {error}"))
            return
        took = time.monotonic() - began
        self.metrics.batches.add()
        self.metrics.rows.add(len(batch))
        self.metrics.act_seconds.add(took)
        for one, row in zip(batch, actions, strict=True):
            self.metrics.wait_seconds.add(began - one.arrived)
            if np.isfinite(row).all():
                one.answer.set_result(BatchAnswer(row, self.version, len(batch), began - one.arrived, took))
            else:
                one.fail(RequestError("the policy answered with numbers that are not finite; no action was sent."))

    def _act(self, requests: Sequence[ActRequest]) -> np.ndarray:
        first = requests[0]
        observations = [request.observation for request in requests]
        options: dict[str, Any] = {}  # a policy that continues no prefix may lack the argument
        if first.prefix is not None:
            given = np.stack([request.prefix for request in requests if request.prefix is not None])
            options["prefix"] = Prefix(given, np.array([request.frozen for request in requests], np.int64))
        answer = self.policy.act(observations, first.sample, first.temperature, self._draws, **options)
        actions = np.asarray(answer[0], dtype=np.float32)
        expected = (len(requests), self.policy.chunk, self.policy.action_dim)
        if actions.shape != expected:
            raise RequestError(f"the policy answered with {list(actions.shape)} numbers; expected {list(expected)}.")
        return actions
