"""Rewinding in a run: a real actor beside a learner that receives, the log that comes of it, and batches from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hilt.algos.config import Rlpd
from hilt.core.trajectory import Source
from hilt.hil.moments import MAX_MOMENTS, Moments
from hilt.hil.stream.ended_episodes import EndedEpisodes
from hilt.replay.sampling import NStep, Sampler
from hilt.teleop.devices import Device, Reading
from hilt.teleop.intervene import TakeOver
from tests.hil.test_actor import Learner, acting, config
from tests.hil.toy import SPEED, Toy


class Saving(Toy):
    """A simulation that can be rewound; what it shows depends on its random generator, too."""

    def __init__(self) -> None:
        super().__init__(step_limit=9)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.point = self.point + 1e-3 * self.np_random.random(3)
        return (self._seen(), *result[1:])

    def snapshot(self) -> Any:
        return self.point.copy(), self.steps

    def restore(self, snapshot: Any) -> None:
        self.point, self.steps = snapshot


class Rewinder(Device):
    """Pauses after given readings, goes back to given steps, and then acts or leaves it to the policy."""

    gives_actions = rewinds = True
    made: ClassVar[list[Rewinder]] = []

    def __init__(self, plan: list[list[int]], engaged: bool = False):
        super().__init__()
        self._plan, self._engaged, self._readings = [tuple(one) for one in plan], engaged, 0
        self._paused, self._gone_back = False, False
        Rewinder.made.append(self)

    def read(self) -> Reading:
        self._readings += not self._paused
        act = {"action": np.zeros(3), "engaged": True} if self._engaged and self._gone_back else {}
        if self._paused:
            _, to = self._plan.pop(0)
            self._paused, self._gone_back = False, True
            return Reading(rewind=to if to >= 0 else None, **act)
        self._paused = bool(self._plan) and self._readings == self._plan[0][0]
        return Reading(paused=self._paused, **act)


def rewinding(plan: list[list[int]], **more: Any) -> dict[str, Any]:
    return {
        "task": f"{__name__}:Saving",
        "task_options": {},
        "operator": f"{__name__}:Rewinder",
        "operator_options": {"plan": plan, **more},
        "control_hz": 1000.0,
    }


def episodes(learner: Learner) -> list[dict[str, Any]]:
    found = []
    for number in learner.log.trajectories():
        read = learner.log.read(learner.log.trajectory_keys(number))
        points = [read[tree]["state"]["left"]["point"] for tree in ("observations", "next_observations")]
        found.append({"number": number, "before": points[0], "after": points[1], **read})
    return found


def reports(learner: Learner) -> list[dict[str, int]]:
    return [told for told in learner.told if "rewound_at" in told]


@pytest.fixture
def learner(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    learner = Learner(config(**request.param), tmp_path / "log")
    learner.publish(1, mean=0.0)
    yield learner
    learner.close()


@pytest.mark.parametrize("learner", [rewinding([[6, 2]])], indirect=True)
def test_rewound_episode_ends_truncated_and_another_begins_at_the_moment(learner: Learner, tmp_path: Path):
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(learner.log.trajectories()) >= 3, said=said)
    rewound, again, *_ = episodes(learner)
    assert rewound["truncated"].tolist() == [False] * 5 + [True] and not rewound["terminated"].any()
    assert np.array_equal(again["before"][0], rewound["before"][2])
    assert len(again["truncated"]) == 9 - 2 and again["truncated"].tolist() == [False] * 6 + [True], "the limit holds"
    drawn = [one["after"] - one["before"] - SPEED * one["actions"] for one in (rewound, again)]
    assert np.allclose(drawn[1][:4], drawn[0][2:6], atol=1e-6) and drawn[0].max() > 5e-4, "the same random numbers"
    assert "rewound from step 6 to step 2: tries again from there" in said
    assert [(told["rewound_at"], told["rewound_to"]) for told in reports(learner)] == [(5, 2)]
    assert (rewound["source"] == Source.POLICY).all() and (again["source"] == Source.POLICY).all()


@pytest.mark.parametrize("learner", [rewinding([[6, 2], [8, 1], [12, -1], [13, 99]], engaged=True)], indirect=True)
def test_rewind_again_beyond_the_first_moment_and_pauses_without_one(learner: Learner, tmp_path: Path):
    acting(learner, tmp_path / "actor", lambda: len(learner.log.trajectories()) >= 4)
    first, second, third, *_ = episodes(learner)
    assert [len(one["before"]) for one in (first, second)] == [6, 2]
    assert np.array_equal(second["before"][0], first["before"][2])
    assert np.array_equal(third["before"][0], first["before"][1]), "before the moment at which the second try began"
    assert len(third["before"]) == 9 - 1, "a pause without a moment, or with one that is not there, changes nothing"
    assert (third["source"] == Source.HUMAN).all() and first["truncated"][-1] and second["truncated"][-1]


@pytest.mark.parametrize("learner", [rewinding([[6, 2]])], indirect=True)
def test_batches_never_join_across_a_rewind(learner: Learner, tmp_path: Path):
    acting(learner, tmp_path / "actor", lambda: len(learner.log.trajectories()) >= 4)
    ends = {  # of each step, known by its action: what is seen three steps later, in its own episode
        tuple(one["actions"][t]): tuple(one["after"][min(t + 2, len(one["after"]) - 1)])
        for one in episodes(learner)
        for t in range(len(one["before"]))
    }
    assert len(ends) == len(learner.log)
    batch = Sampler(learner.log.all(), assembly=NStep(3, 0.9), seed=0).sample(512)
    after = batch["next_observations"]["state"]["left"]["point"]
    assert {tuple(action) for action in batch["actions"]} == {*ends}, "every step was drawn"
    for action, end in zip(batch["actions"], after, strict=True):
        assert tuple(end) == ends[tuple(action)]


@pytest.mark.parametrize("learner", [rewinding([[6, 2]])], indirect=True)
def test_learner_keeps_rewinds_as_facts_and_counts_no_failure(learner: Learner, tmp_path: Path):
    ended = EndedEpisodes(learner.log, Rlpd())
    acting(learner, tmp_path / "actor", lambda: len(learner.log.trajectories()) >= 4)
    for told in reports(learner):
        ended.rewinds[told["actor"], told["rewound_at"]] = told["rewound_to"]
    rewound, again, other = list(ended.finished())[:3]
    assert (rewound["success"], rewound["success_alone"], rewound["rewound_to"]) == (None, None, 2)
    assert again["success"] is False and again["success_alone"] is None and "rewound_to" not in again
    assert other["success_alone"] is False
    facts = learner.log.facts
    assert facts.about(rewound["trajectory"]) == {"rewound_to": 2}
    assert facts.about(again["trajectory"]) == {"rewound_from": rewound["trajectory"], "begins_at": 2}
    assert not facts.about(other["trajectory"]) and not ended.rewinds


def test_moments_are_offered_only_where_all_can_be_rewound():
    def offered(env: Any, device: Device, offer: bool = True) -> bool:
        return Moments(TakeOver(env, device), offer).offered

    device = Rewinder([])
    assert offered(Saving(), device) and not offered(Saving(), device, offer=False)
    assert not offered(Toy(), device), "it has no snapshots"

    class Screen(Device):
        gives_actions = True

    assert not offered(Saving(), Screen()), "nobody can choose a moment there"


def test_moments_keep_the_newest():
    env = TakeOver(Saving(), Rewinder([]))
    env.reset(options={"split": "train", "state": 0})
    moments = Moments(env, True)
    for step in range(MAX_MOMENTS + 5):
        moments.note(step, {}, 0, 0.0)
    assert [*moments._kept] == list(range(5, MAX_MOMENTS + 5))
    moments.begin()
    assert not moments._kept
