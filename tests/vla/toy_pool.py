"""A pool of games with one number as an action, and a policy that throws dice: for tests of rollouts and collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hilt.policies.base import Evaluation, Policy
from hilt.policies.vla.observation_adapters import columns
from hilt.vla.episode import Start

GAME = columns({"state": "state"})
LIMIT = 6


@dataclass
class Answer:
    """What a pool replies."""

    slot: int
    observation: Any = None
    instruction: str = "win"
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    executed: int = 0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    error: str = ""


class ToyPool:
    """An action of at least `hard(start)` wins; after LIMIT actions a game is over.
    `lose(start)`: an error instead of the first step."""

    def __init__(
        self,
        slots: int = 4,
        hard: Callable[[Start], float] = lambda start: 0.7,
        lose: Callable[[Start], bool] = lambda start: False,
        broken: bool = False,
    ):
        self.slots, self._hard, self._lose, self._broken = slots, hard, lose, broken
        self._games: dict[int, tuple[Start, int]] = {}
        self._waiting: dict[int, Answer] = {}
        self.calls: list[tuple[str, Any]] = []
        self.started: list[Start] = []

    def start(self, slot: int, start: Start) -> None:
        assert slot not in self._waiting, "this slot has a reply that was not collected"
        self.calls.append(("start", slot))
        self.started.append(start)
        self._games[slot] = start, 0
        self._waiting[slot] = Answer(slot, self._frame(slot, extra=start.member if self._broken else 0))

    def step(self, slot: int, actions: np.ndarray) -> None:
        assert slot not in self._waiting
        self.calls.append(("step", slot))
        start, done = self._games[slot]
        if self._lose(start):
            self._waiting[slot] = Answer(slot, error="Traceback: the simulator of the toy fell over")
            return
        rewards: list[float] = []
        for action in actions[:, 0]:
            rewards.append(float(action >= self._hard(start)))
            if rewards[-1] or done + len(rewards) == LIMIT:
                break
        won, done = bool(rewards[-1]), done + len(rewards)
        self._games[slot] = start, done
        over = done >= LIMIT
        self._waiting[slot] = Answer(
            slot, self._frame(slot), "win", np.array(rewards, np.float32), len(rewards), won, over, won
        )

    def collect(self, slots: Sequence[int], timeout: float | None = None) -> list[Answer]:
        self.calls.append(("collect", tuple(slots)))
        return [self._waiting.pop(slot) for slot in slots]

    def describe(self, task: str) -> dict[str, Any]:
        return {"initial_states": {"train": 10, "eval": 5}}

    @property
    def idle(self) -> bool:
        return not self._waiting

    def _frame(self, slot: int, extra: int = 0) -> dict[str, np.ndarray]:
        start, done = self._games[slot]
        return {"state": np.array([start.state, done, extra], np.float32)}


class Dice(Policy):
    """Two throws of a die with ten sides. `fault(observation)`: "nan", "token" or "raise" instead."""

    chunk, action_dim, token_range = 2, 1, (0, 9)

    def __init__(self, fault: Callable[[Any], str] = lambda seen: ""):
        super().__init__()
        self.nothing, self._fault, self.asked = torch.nn.Parameter(torch.zeros(1)), fault, 0

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        faults = [self._fault(seen) for seen in observations]
        if "raise" in faults:
            raise RuntimeError("the dice are gone")
        self.asked += len(observations)
        shape = (len(observations), 2, 1)
        tokens = torch.randint(0, 10, shape, generator=generator) if sample else torch.full(shape, 5)
        tokens[[fault == "token" for fault in faults]] = 99
        actions = tokens.numpy().astype(np.float32) / 10
        actions[[fault == "nan" for fault in faults]] = np.nan
        state = np.stack([seen["state"] for seen in observations])
        return actions, {"tokens": tokens.int().numpy(), "state": state, "log_prob": np.zeros(shape, np.float32)}

    def evaluate(self, record: Any) -> Evaluation:
        raise NotImplementedError

    def supervised_loss(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError
