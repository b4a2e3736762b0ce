"""The figures of episodes that ended, read from the log of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hilt.algos.config import Rlpd
from hilt.core.errors import UnknownNameError
from hilt.core.trajectory import Source
from hilt.core.tree import Array, equal
from hilt.envs.env_protocol import TASK_SUCCESS
from hilt.hil.config import GROUP
from hilt.recording.recording_folder import SHAPING
from hilt.replay import Log
from hilt.replay.snapshot import Snapshot


class EndedEpisodes:
    """The figures of trajectories that ended. One that a restart of the learner has cut into several counts as one."""

    def __init__(self, log: Log, rlpd: Rlpd):
        self._log, self._rlpd = log, rlpd
        self.known: set[int] = {
            number for number in log.trajectories(hidden=True) if {"imported", GROUP} & log.facts.about(number).keys()
        }
        self.rewinds: dict[tuple[str, int], int] = {}
        """Steps that were the last ones before a person went back, by actor and number, and to which step"""
        self._rewound: dict[tuple[str, int], int] = {}  # the trajectories that they are the last ones of

    def finished(self) -> Iterator[dict[str, Any]]:
        with self._log.reading() as steps:
            ended = steps.ended_trajectories()
            new = [number for number in ended if number not in self.known]
            senders = steps.senders() if new else {}
        unended: dict[tuple[str, str, str], list[int]] = {}
        for earlier in senders.keys() - set(ended):
            unended.setdefault(senders[earlier], []).append(earlier)
        for number in new:
            cut = sorted((earlier for earlier in unended.get(senders[number], ()) if earlier < number), reverse=True)
            self.known.add(number)
            with contextlib.suppress(UnknownNameError):  # evicted meanwhile
                figures = self._figures(number, cut) | self._note_rewinds(number, senders[number][0])
                yield {"trajectory": number, **figures, "actor": senders[number][0]}

    def _note_rewinds(self, number: int, actor: str) -> dict[str, Any]:
        """Keeps in facts that a trajectory was rewound, or goes on from one that was. Returns figures that then are
        others: of one that was rewound nobody knows whether it would have succeeded, and one that a person has
        begun anew is not the policy's alone."""
        with self._log.reading() as steps:
            first, last = steps.sequences(steps.trajectory(number)[[0, -1]]).tolist()
        facts: dict[str, Any] = {}
        if (before := self._rewound.pop((actor, first - 1), None)) is not None:
            facts |= {"rewound_from": before, "begins_at": self.rewinds.pop((actor, first - 1))}
        if (to := self.rewinds.get((actor, last))) is not None:
            facts["rewound_to"] = to
            self._rewound[actor, last] = number
        if facts:
            self._log.annotate(number, **facts)
        unknown = {"success": None} if "rewound_to" in facts else {}
        return {**facts, **unknown, "success_alone": None} if facts else {}

    def _figures(self, number: int, unended: Sequence[int]) -> dict[str, Any]:
        with self._log.reading() as steps:
            keys = steps.trajectory(number)
            with contextlib.suppress(UnknownNameError):  # an earlier part was evicted meanwhile; the rest is reported
                for earlier in unended:
                    before = steps.trajectory(earlier)
                    if not _goes_on(steps, before[-1:], keys[:1]):
                        break
                    keys = np.concatenate([before, keys])
            truth = [TASK_SUCCESS] if TASK_SUCCESS in steps.schema.columns else []
            truth += [name for name in (GROUP, SHAPING) if name in steps.schema.columns]
            columns = ["rewards", "terminated", "source", "succeed", "lost", "times/observed", "times/applied", *truth]
            return episode_figures(steps.gather(keys, columns), self._rlpd)


def episode_figures(columns: Mapping[str, Array], rlpd: Rlpd) -> dict[str, object]:
    """The figures of an episode, from its columns. `return` is that of the task. `return_to_go` is what came after each
    of its steps, with a dense reward, discounted, on the average: what Q is to be. Where a time limit cut it,
    `cut_share` of a value beyond that limit is missing from it."""
    lost, success = columns["lost"].astype(bool), bool(columns["succeed"].any())
    human = (columns["source"] == Source.HUMAN) & ~lost
    rewards = columns["rewards"].astype(np.float64)
    learned = rewards + columns.get(SHAPING, np.zeros(1)).astype(np.float64) + rlpd.reward_bias
    after = list(accumulate(learned[::-1].tolist(), lambda ahead, reward: reward + rlpd.discount * ahead))
    return {
        "success": success,
        "success_alone": None if human.any() else success,
        "return": float(rewards.sum()),
        "return_to_go": sum(after) / len(after),
        "cut_share": 0.0
        if columns["terminated"][-1]
        else float(np.mean(rlpd.discount ** np.arange(1, len(after) + 1))),
        "length": len(human),
        "seconds": float(columns["times/applied"][-1] - columns["times/observed"][0]),
        "intervention_steps": int(human.sum()),
        "intervention_count": int((np.diff(human.astype(int), prepend=0) > 0).sum()),
        "lost_steps": int(lost.sum()),
        **(
            {TASK_SUCCESS: {-1: None, 0: False, 1: True}[int(columns[TASK_SUCCESS].max())]}
            if TASK_SUCCESS in columns
            else {}
        ),
        **({GROUP: int(columns[GROUP][0])} if GROUP in columns and columns[GROUP][0] >= 0 else {}),
    }


def _goes_on(steps: Snapshot, last: Array, first: Array) -> bool:
    """Whether a step is the next one of the same sender, and sees what the other one ended with."""
    numbers = steps.sequences(np.concatenate([last, first])).tolist()
    pairs = steps.schema.layout.pairs
    ended, begun = steps.gather(last, [after for _, after in pairs]), steps.gather(first, [now for now, _ in pairs])
    return numbers[1] == numbers[0] + 1 and all(equal(ended[after], begun[now]) for now, after in pairs)
