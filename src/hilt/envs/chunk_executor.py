"""Executes the chunks of a policy, one action for each control step, while the policy plans the next chunk.

    with ChunkExecutor(plan, ChunkSettings(mode="asynchronous"), action_dim=7) as executor:
        observation, info = env.reset()
        executor.reset()
        while not ended:
            step = executor.next(observation)
            observation, reward, terminated, truncated, info = env.step(step.action)

A policy that answers with a chunk of actions may need longer than a control step. What happens meanwhile is the mode:

- ``synchronous``: the arm holds, the policy plans, and the first ``execute`` actions of the chunk are executed.
- ``asynchronous``: the arm goes on with the last chunk. The new one takes over at the index that belongs to the step,
  the number of actions that were executed since its observation; where the two disagree, the command jumps.
- ``rtc`` (real-time chunking, Black et al., 2025): as asynchronous, but `plan` is given the actions that are planned
  already, and the number of them that are executed before its answer can arrive, so that the new chunk continues the
  last one. Which chunk comes of it is the policy's matter.
- ``ensemble`` (temporal ensembling, Zhao et al., 2023): as asynchronous, but the next plan is asked for in every step,
  or as soon as the last answer is there, and an action is the weighted mean of what all chunks predicted for its step,

      a_t = sum_i w_i a_t^(i) / sum_i w_i,    w_i = exp(-ensemble_decay * i),    i = 0 for the oldest chunk.

The control loop never waits for the policy: `plan` runs in a thread of its own, and where there is no action, the arm
holds. With ``delay``, for simulation, nothing depends on time: `plan` is called at once, in the calling thread, and its
answer is used that number of control steps later.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError, NotFiniteError, SchemaError
from hilt.core.tree import Array, Observation
from hilt.core.validate import Need, check, check_values, setting

MODES = ("synchronous", "asynchronous", "rtc", "ensemble")
DELAYS_KEPT = 10
"""The number of answers whose delays are kept: the next one is expected to be as late as the latest of them"""
CLOSE_S = 5.0
"""Seconds that a plan under way has to return when an executor is closed"""

Plan = Callable[[Observation, Array | None, int], "Array | Planned"]
"""``plan(observation, planned, frozen)`` returns a chunk, float32 [chunk, action_dim], or `Planned`. `planned`: in the
mode "rtc" the actions [n, action_dim] that are planned from this observation's step on, otherwise or if there are none,
None. `frozen`: the number of them that will be executed before the answer can arrive."""
Hold = Callable[[Observation, Array | None], Array]
"""``hold(observation, last)`` returns the action with which the arm stays as it is. `last`: the last action that was
executed in this episode, None before the first one."""


@dataclass(frozen=True)
class ChunkSettings:
    """How chunks are executed."""

    mode: str = setting("synchronous", choices=MODES)
    """What the arm does while the policy plans: it holds ("synchronous"), or goes on with the last chunk
    ("asynchronous", "rtc"), or with the mean of all chunks ("ensemble")"""
    execute: int = setting(0, minimum=0)
    """Number of actions of each chunk that are executed, counted from the chunk's observation, before the next plan is
    asked for; 0: all. Where the arm goes on meanwhile, 0 asks just early enough for the answer to be expected when the
    chunk ends; in the mode "ensemble" in every step"""
    delay: int | None = setting(None, minimum=0)
    """For simulation: control steps after which an answer is used, without a thread. None: in real time, when it
    arrives"""
    ensemble_decay: float = setting(
        0.01, minimum=-10, maximum=10, needs=Need("{here}mode=ensemble", lambda c: c.mode == "ensemble")
    )
    """How much less a chunk weighs than the one that was planned before it, as a rate of decay: 0 weighs all alike, and
    below 0 newer ones weigh more"""

    def to_json(self) -> dict[str, object]:
        """The settings that the mode uses."""
        return {
            name: value for name, value in asdict(self).items() if name != "ensemble_decay" or self.mode == "ensemble"
        }


class Planned(NamedTuple):
    """A chunk, and what is to be noted of it."""

    chunk: Any
    note: Any


@dataclass(frozen=True)
class ChunkStep:
    """What is to be done in one control step."""

    action: Array
    """float32 [action_dim]"""
    chunk: int
    """The number of the chunk in this episode, in the order in which plans were asked for, from 0; -1 when the arm
    holds"""
    index: int
    """Of the action in its chunk; -1 when the arm holds"""
    asked: int
    """The number of the chunk that was asked for with this observation; -1: none was"""
    late: bool
    """Whether an answer took over in this step that came later than expected"""
    note: Any = None
    """In the first step of a chunk: what `plan` noted of it"""
    since: int = 0
    """In the first step of a chunk: control steps since that with whose observation it was planned"""

    @property
    def held(self) -> bool:
        """Whether there was no action, so that the arm holds."""
        return self.chunk < 0


@dataclass(frozen=True)
class ExecutedChunk:
    """The chunk that a policy executes, for a person to see."""

    number: int
    """Of the chunk in this episode"""
    actions: Array
    """[actions, action_dim]"""
    done: int
    """How many of them were executed, the one of this step included"""
    confidence: float | None = None
    """The share of its plans so far of which the policy was less sure, from 0 to 1; None: it does not say"""


def zero_motion(action_dim: int) -> Hold:
    """Holding where actions are differences: no motion, and a gripper command of 0 leaves the gripper as it is."""
    return lambda observation, last: np.zeros(action_dim, np.float32)


@dataclass
class _Request:
    """A plan that was asked for."""

    number: int
    observation: Any
    planned: Array | None
    frozen: int
    step: int
    """The control step at which it was asked for"""
    expected: int
    """Control steps after which the answer was expected"""
    continues: bool
    """Whether there were actions left when it was asked for"""
    executed: int = 0
    """Actions that were executed since"""
    answer: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    ignored: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, plan: Plan) -> None:
        began = time.perf_counter()
        try:
            self.answer = plan(self.observation, self.planned, self.frozen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # broad: a policy may raise anything; the control loop raises it
            self.error = error
        finally:
            self.seconds = time.perf_counter() - began
            self.done.set()


class ChunkExecutor:
    """Asks `plan` for chunks and gives their actions one by one; see the module. `next` is called once for each control
    step, `reset` at the start of each episode, `interrupt` when a person takes over. For one loop, in one thread."""

    def __init__(self, plan: Plan, settings: ChunkSettings | None = None, *, action_dim: int, hold: Hold | None = None):
        """`action_dim`: the numbers in an action, which every chunk must have. `hold`: the action with which the arm
        stays as it is; by default no motion, for actions that are differences."""
        self.settings = settings or ChunkSettings()
        check(self.settings)
        check_values(minimum=1, action_dim=action_dim)
        self._plan, self._action_dim, self._hold = plan, action_dim, hold or zero_motion(action_dim)
        self._delays: deque[int] = deque(maxlen=DELAYS_KEPT)
        self._counts = {"steps": 0, "held": 0, "chunks": 0, "late": 0, "dropped": 0}
        self._planned_s = self._longest_s = 0.0
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._request: _Request | None = None
        self._first: tuple[Any, int] = (None, 0)  # the note of a chunk of which nothing was executed, and its delay
        self.reset()

    def reset(self) -> None:
        """An episode begins: nothing of the last one is executed."""
        self._forget()
        self._asked = 0
        self._last: Array | None = None

    def interrupt(self, executed: npt.ArrayLike | None = None) -> int:
        """Somebody else acts in this step: the rest of the chunk is dropped, and an answer under way will be ignored.
        Returns the number of actions that were dropped. `executed`: what was executed instead, as `plan` would give it,
        from which a hold goes on."""
        dropped = self._left()
        self._counts["dropped"] += dropped
        self._forget()
        self._last = None if executed is None else np.array(executed, np.float32)
        return dropped

    def next(self, observation: Observation) -> ChunkStep:
        """What is to be done in this control step. It never waits for a plan that runs in the thread; what a plan
        raised is raised here."""
        if self._closed:
            raise ClosedError("the chunk executor is closed; make another one.")
        late, asked = self._take_over(), -1
        if self._request is None and self._is_due():
            asked = self._ask(observation)
            late = self._take_over() or late  # with a delay of 0 the answer is there
        chunk = index = -1
        first: tuple[Any, int] = (None, 0)
        if self._left():
            first = self._first
            self._first = None, 0
            chunk, index = self._number, self._index
            action = self._mean() if self._predicted else self._chunk[index].copy()
            self._index += 1
            if self._request is not None:
                self._request.executed += 1
        else:
            action = self._checked_hold(self._hold(observation, self._last))
        self._step += 1
        self._last = action
        self._counts["steps"] += 1
        self._counts["held"] += chunk < 0
        return ChunkStep(action, chunk, index, asked, late, *first)

    def has_action(self) -> bool:
        """Whether the next step has an action of a chunk, as far as is known before the next answer."""
        return self._left() > 0

    @property
    def chunk(self) -> ExecutedChunk | None:
        """The chunk that is executed; None while the arm holds, or somebody else acts."""
        return ExecutedChunk(self._number, self._chunk, self._index) if self._number >= 0 else None

    def metrics(self) -> dict[str, float]:
        """Figures since the executor was made: control ``steps``, those of them that were ``held``, ``chunks`` that
        took over, those of them that were ``late``, actions ``dropped`` by `interrupt`, ``idle_share`` (held steps of
        all), ``delay_steps`` (the largest of the last answers), and the mean and the largest ``planning_seconds``."""
        counts = self._counts
        return {
            **{name: float(value) for name, value in counts.items()},
            "idle_share": counts["held"] / max(1, counts["steps"]),
            "delay_steps": float(max(self._delays, default=0)),
            "planning_seconds": self._planned_s / max(1, counts["chunks"]),
            "planning_seconds_max": self._longest_s,
        }

    def close(self, timeout: float = CLOSE_S) -> None:
        """Ends the thread. A plan under way has `timeout` seconds to return; after that it is left to itself, as a
        daemon thread, and `DeadlineError` is raised."""
        self._forget()
        self._closed = True
        if self._thread is None:
            return
        self._requests.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the policy has not returned from planning within {timeout:g} s after the chunk executor was closed; "
                "its thread goes on until it does, or until the process ends."
            )
        self._thread = None

    def __enter__(self) -> ChunkExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _forget(self) -> None:
        """Neither the chunk nor an answer under way is used any more."""
        if self._request is not None:
            self._request.ignored = True
        self._request = None
        self._chunk: Array = np.zeros((0, self._action_dim), np.float32)
        self._number, self._index = -1, 0
        self._predicted: list[Array] = []  # in the mode "ensemble", the actions of each chunk from this step on
        self._first = None, 0
        self._step = 0

    def _left(self) -> int:
        """Actions of the chunk that are still to be executed."""
        length = len(self._chunk)
        if self.settings.mode == "synchronous" and self.settings.execute:
            length = min(length, self.settings.execute)
        return max(0, length - self._index)

    def _expected(self) -> int:
        """Control steps after which the next answer is expected."""
        if self.settings.delay is not None:
            return self.settings.delay
        return max(self._delays, default=1)

    def _is_due(self) -> bool:
        """Whether the next plan is to be asked for."""
        left, settings = self._left(), self.settings
        if not left or settings.mode == "synchronous":
            return not left
        if settings.mode == "ensemble":
            return self._index >= max(1, settings.execute)
        return self._index >= settings.execute if settings.execute else left <= self._expected()

    def _mean(self) -> Array:
        """The weighted mean of what the chunks predicted for this step, the oldest first; the next step is theirs."""
        weights = np.exp(-self.settings.ensemble_decay * np.arange(len(self._predicted)))
        firsts = np.stack([rows[0] for rows in self._predicted])
        self._predicted = [rows[1:] for rows in self._predicted if len(rows) > 1]
        mean: Array = ((weights / weights.sum()) @ firsts).astype(np.float32)
        return mean

    def _ask(self, observation: Any) -> int:
        left, expected = self._left(), self._expected()
        planned, frozen = None, 0
        if self.settings.mode == "rtc" and left:
            planned, frozen = self._chunk[self._index :].copy(), min(left, max(1, expected))
        real_time = self.settings.delay is None
        # the caller may use its arrays again while the thread still reads them
        seen = copy.deepcopy(observation) if real_time else observation
        request = _Request(self._asked, seen, planned, frozen, self._step, expected, left > 0)
        self._request = request
        self._asked += 1
        if not real_time:
            request.run(self._plan)
            return request.number
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hilt-plan", daemon=True)
            self._thread.start()
        self._requests.put(request)
        return request.number

    def _work(self) -> None:
        """Runs in the thread, until the executor is closed."""
        while (request := self._requests.get()) is not None:
            if not request.ignored:
                request.run(self._plan)

    def _take_over(self) -> bool:
        """Uses the answer if it has arrived; returns whether it came later than expected."""
        request = self._request
        if request is None or not request.done.is_set():
            return False
        waited = self._step - request.step
        if request.error is None and waited < (self.settings.delay or 0):
            return False
        self._request = None
        if request.error is not None:
            error = request.error
            raise HiltError(
                f"the policy failed while it planned chunk {request.number}: {type(error).__name__}: {error}"
            ) from error
        answer = request.answer if isinstance(request.answer, Planned) else Planned(request.answer, None)
        self._chunk, self._number = self._checked(answer.chunk), request.number
        self._first = answer.note, waited
        self._index = min(request.executed, len(self._chunk))
        if self.settings.mode == "ensemble" and self._left():
            self._predicted.append(self._chunk[self._index :])
        self._delays.append(waited)
        self._planned_s += request.seconds
        self._longest_s = max(self._longest_s, request.seconds)
        late = request.continues and waited > request.expected
        self._counts["chunks"] += 1
        self._counts["late"] += late
        return late

    def _checked(self, answer: Any) -> Array:
        chunk = np.asarray(answer, np.float32)
        if chunk.ndim != 2 or chunk.shape[1] != self._action_dim or not len(chunk):
            raise SchemaError(
                f"the policy planned a chunk of the shape {list(chunk.shape)}; the task needs [actions, "
                f"{self._action_dim}], with one action at least."
            )
        if not np.isfinite(chunk).all():
            row = int(np.argmin(np.isfinite(chunk).all(1)))
            raise NotFiniteError(
                f"action {row} of the chunk of {len(chunk)} that the policy planned is {chunk[row].tolist()}; "
                "expected finite numbers."
            )
        if self.settings.execute > len(chunk):
            raise ConfigError(
                f"execute={self.settings.execute}: this policy answers with {len(chunk)} actions; give 1 to "
                f"{len(chunk)}, or 0 for all."
            )
        return chunk

    def _checked_hold(self, given: Any) -> Array:
        action = np.asarray(given, np.float32)
        if action.shape != (self._action_dim,) or not np.isfinite(action).all():
            raise SchemaError(
                f"hold() returned {action.tolist()}; expected an action of {self._action_dim} finite numbers."
            )
        return action
