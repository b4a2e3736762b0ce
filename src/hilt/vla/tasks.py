"""The tasks that a rank works on, and their initial states.

    shards([0, 1, 2, 3, 4, 5, 6, 7, 8], 2)         # [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    agenda = Agenda(["a", "b"], lambda task: 50, rank=0, ranks=1)
    agenda.begin()                                 # an iteration: task "a"
    agenda.draw(groups=2, group_size=4)            # states 0 and 1, each four times
    agenda.end()                                   # the next one: task "b"

A task cursor for each rank, and a ring cursor over the training states of each task: both are in a checkpoint. There is
no communication between ranks, and no two of them work on one initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.vla.episode import Start

T = TypeVar("T")
MODES = ("group", "distinct")
MAX_SKIPS = 3
"""So often a solved state is passed over before it is tried again"""


def shards(tasks: Sequence[T], ranks: int) -> list[list[T]]:
    """The tasks of each rank, dealt round: task i is rank i % ranks's. Each task is at
    exactly one; sizes differ by at most one."""
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: expected at least 1.")
    return [list(tasks[rank::ranks]) for rank in range(ranks)]


def chosen(use: object, suite: Sequence[str]) -> list[str]:
    """The tasks of a suite that are named: by number (9 is task nine, not nine tasks), by name, with or without the
    suite's, or by a list of these; None: all."""
    if use is None:
        return list(suite)
    found, named = [], {name.rpartition("/")[2]: name for name in suite} | {name: name for name in suite}
    for one in use if isinstance(use, Sequence) and not isinstance(use, str) else [use]:
        if isinstance(one, str) and one.isdecimal():
            one = int(one)
        if isinstance(one, int) and not isinstance(one, bool):
            if not 0 <= one < len(suite):
                raise ConfigError(f"task {one} was asked for; there are the tasks 0 to {len(suite) - 1}.")
            found.append(suite[one])
        elif one in named:
            found.append(named[one])
        else:
            raise UnknownNameError("task", str(one), suite)
    if len(set(found)) < len(found):
        raise ConfigError(f"the tasks {use} name one twice: name each once; all are visited in turn.")
    return found


@dataclass
class Ring:
    """Numbers in their order, and again from the first."""

    numbers: Sequence[int]
    cursor: int = 0

    def take(self, count: int) -> list[int]:
        """The next `count`; of 10, four at a time: 0-3, 4-7, then 8, 9, 0, 1."""
        taken = [self.numbers[(self.cursor + i) % len(self.numbers)] for i in range(count)]
        self.cursor = (self.cursor + count) % len(self.numbers)
        return taken


@dataclass
class Solved:
    """RIPT's memory of states: one whose last K rollouts all succeeded is passed
    over, three times at most, and then forgotten."""

    group_size: int
    history: dict[str, list[int]] = field(default_factory=dict)
    """Of each state, how its last K rollouts ended"""
    skips: dict[str, int] = field(default_factory=dict)
    total: int = 0
    """States that were passed over, each time"""

    def add(self, state: str, success: bool) -> None:
        self.history[state] = [*self.history.get(state, []), int(success)][-self.group_size :]

    def skip(self, state: str) -> bool:
        """Whether this state is passed over now."""
        last = self.history.get(state, [])
        if len(last) < self.group_size or not all(last):
            return False
        self.skips[state] = self.skips.get(state, 0) + 1
        if self.skips[state] <= MAX_SKIPS:
            self.total += 1
            return True
        del self.history[state], self.skips[state]
        return False


class Agenda:
    """The tasks of one rank, in turn, and where each stands in its ring."""

    def __init__(
        self,
        tasks: Sequence[str],
        states: Callable[[str], int],
        *,
        rank: int = 0,
        ranks: int = 1,
        steal: bool = False,
        split: str = "train",
        mode: str = "group",
        tasks_at_once: int = 1,
        seed: int = 0,
        solved: Solved | None = None,
    ):
        """`tasks`: those of all ranks. `states`: how many initial states one has. `steal`: a rank for which no
        task is left takes a share of the states of another's. `tasks_at_once`: the number of tasks of an
        iteration; 0: all, group by group in turn."""
        if mode not in MODES:
            raise UnknownNameError("init_state_mode", mode, MODES)
        self._rank, self._ranks, self._split, self._mode, self._seed = rank, ranks, split, mode, seed
        self._at_once, self._solved = tasks_at_once, solved
        self.tasks = shards(tasks, ranks)[rank]
        part, parts = 0, 1
        if steal and 0 < len(tasks) < ranks:
            owner = rank % len(tasks)
            self.tasks = [tasks[owner]]
            part, parts = rank // len(tasks), len(range(owner, ranks, len(tasks)))
        self.rings: dict[str, Ring] = {}
        for task in self.tasks:
            if not (numbers := range(states(task))):
                raise ConfigError(
                    f"{task} has no initial state in its split {split!r}; choose another split or leave the task out."
                )
            self.rings[task] = Ring(numbers[part::parts] or numbers)
        self.cursor, self._groups, self._turn = 0, 0, 0

    @property
    def current(self) -> list[str]:
        """The tasks of this iteration; none on an idle rank."""
        return [
            self.tasks[(self.cursor + i) % len(self.tasks)]
            for i in range(min(self._at_once or len(self.tasks), len(self.tasks)))
        ]

    def begin(self) -> None:
        self._turn = 0

    def end(self) -> None:
        """The cursor goes on to the next iteration's task; to the first that has not had its
        turn, where groups were fewer than tasks."""
        self.cursor += min(self._at_once or self._turn, self._turn)

    def draw(self, groups: int, group_size: int) -> list[Start]:
        """Returns the members of this number of groups, one group after the other. "group": one state for all of
        its members; "distinct": one for each."""
        drawn = []
        for _ in range(groups):
            task = self.current[self._turn % len(self.current)]
            number = self._groups * self._ranks + self._rank
            seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0] >> 1)
            states = [self._state(task) for _ in range(1 if self._mode == "group" else group_size)]
            members = range(group_size)
            drawn += [
                Start(task, self._split, states[member % len(states)], seed, number, member) for member in members
            ]
            self._turn, self._groups = self._turn + 1, self._groups + 1
        return drawn

    def _state(self, task: str) -> int:
        while True:  # a state is passed over three times at most
            (state,) = self.rings[task].take(1)
            if self._solved is None or not self._solved.skip(f"{task}:{state}"):
                return state

    def ended(self, start: Start, success: bool) -> None:
        """How a rollout ended, for who passes solved states over."""
        if self._solved is not None:
            self._solved.add(f"{start.task}:{start.state}", success)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, Any] = {"cursor": self.cursor, "groups": self._groups, "turn": self._turn}
        state["rings"] = {task: ring.cursor for task, ring in self.rings.items()}
        if self._solved is not None:
            state["solved"] = {
                "history": dict(self._solved.history),
                "skips": dict(self._solved.skips),
                "total": self._solved.total,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # a rank that has no task, or had none, may have begun or ceased to steal: it begins
        # with the first states of what it has now
        if state["rings"] and self.rings and set(state["rings"]) != set(self.rings):
            raise ConfigError(
                f"rank {self._rank} has the tasks {', '.join(self.rings) or 'none'}, and the checkpoint is of "
                f"{', '.join(state['rings']) or 'none'}: resume with the same tasks and the same number of ranks."
            )
        self.cursor, self._groups, self._turn = (int(state[name]) for name in ("cursor", "groups", "turn"))
        for task, ring in self.rings.items():
            ring.cursor = int(state["rings"].get(task, 0))
        if self._solved is not None:
            kept = state.get("solved", {"history": {}, "skips": {}, "total": 0})
            self._solved.history, self._solved.skips = dict(kept["history"]), dict(kept["skips"])
            self._solved.total = int(kept["total"])
