"""Which steps are good: by advantages of one value model, by task, and always where a person acted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE
from hilt.policies.vla.observation_adapters import columns
from hilt.replay import Edits, Log
from hilt.vla.demonstrations import Demonstrations
from hilt.vla.recap.advantage_labels import advantage_labels
from tests.vla.signs import NAMES, write_advantages, write_signs


def lessons_of(*paths: Path) -> Demonstrations:
    return Demonstrations(list(paths), paths[0].parent / "data", columns(NAMES), successes_only=False)


def test_steps_above_the_threshold_and_those_of_a_person_are_good(tmp_path: Path):
    policy, person = write_signs(tmp_path / "policy", 20), write_signs(tmp_path / "person", 3, Source.DEMO, seed=1)
    write_advantages(policy)  # of a person, none is needed
    lessons, said = lessons_of(policy, person), list[str]()
    lessons.labels = advantage_labels(lessons, 0.4, said.append)
    outcomes = [one.log.facts.about(number)["success"] for one, number in zip(lessons.lessons, range(20), strict=False)]
    assert [label.tolist() for label in lessons.labels[:20]] == [[success] * 2 for success in outcomes]
    assert all(label.all() and label.shape == (2,) for label in lessons.labels[20:])
    share = np.mean(outcomes)
    assert said == [
        f"signs: 40 steps of the policy, {share:.0%} of them with an advantage above -0.5000; 6 steps of a person"
    ]
    rows = np.array([[outcomes.index(False), 1], [21, 0]])
    assert [row[ADVANTAGE] for row in lessons.batch(rows, 2)[0]] == [NEGATIVE, POSITIVE]
    lessons.close()


def test_a_correction_within_an_episode_is_good(tmp_path: Path):
    path = write_signs(tmp_path / "log", 6, [Source.POLICY, Source.HUMAN])
    write_advantages(path)
    lessons = lessons_of(path)
    outcomes = [lessons.lessons[0].log.facts.about(number)["success"] for number in range(6)]
    assert [label.tolist() for label in advantage_labels(lessons, 0.2)] == [[success, True] for success in outcomes]
    lessons.close()


def test_a_chunk_ends_where_a_person_takes_over_or_hands_back(tmp_path: Path):
    # else the steps before a take-over, which are bad, would show the person's actions
    sources = [Source.POLICY, Source.POLICY, Source.HUMAN, Source.DEMO, Source.RANDOM, Source.POLICY]
    with Log.open(write_signs(tmp_path / "log", 3, sources), "r") as log:
        found = {number: {"model": "m", "first": 0, "success": None, "value": [0.0] * 6} for number in range(3)}
        Edits(log).estimates({number: {**one, "advantage": [-1.0, -1, 9, 9, 1, -1]} for number, one in found.items()})
    lessons = lessons_of(tmp_path / "log")
    rows = lessons.rows([1])
    whole, _, plain = lessons.batch(rows, 4)
    assert plain.sum(1).tolist() == [4, 4, 4, 3, 2, 1], "imitation alone goes on with what the person did"
    lessons.labels = advantage_labels(lessons, 0.5)
    labelled, actions, mask = lessons.batch(rows, 4)
    assert mask.sum(1).tolist() == [2, 1, 2, 1, 2, 1] and (np.diff(mask.astype(int)) <= 0).all()
    assert [row[ADVANTAGE] == POSITIVE for row in labelled] == [False, False, True, True, True, False]
    own = lessons.lessons[1].actions
    for step, count in enumerate(mask.sum(1)):
        last = min(step + count, 6) - 1
        assert (actions[step] == own[np.minimum(np.arange(step, step + 4), last)]).all(), "the last one is repeated"
    assert all(np.array_equal(a["state"], b["state"]) for a, b in zip(whole, labelled, strict=True))
    lessons.close()


def test_a_trimmed_episode_keeps_the_advantages_of_its_steps(tmp_path: Path):
    path = write_signs(tmp_path / "log", 6)
    with Log.open(path, "r") as log:
        found = {
            number: {"model": "m", "first": 0, "success": None, "value": [0.0, 0.0], "advantage": [float(number), -9.0]}
            for number in log.trajectories()
        }
        Edits(log).estimates(found)
        Edits(log).trim(5, first=1)
    lessons = lessons_of(path)
    good = advantage_labels(lessons, 0.6)
    assert [len(label) for label in good] == [2, 2, 2, 2, 2, 1] and not good[5][0]
    assert [bool(label[0]) for label in good[:5]] == [False, True, True, True, True]  # 0 is the quantile
    lessons.close()


def test_what_is_missing_is_named(tmp_path: Path):
    path = write_signs(tmp_path / "log", 6)
    write_advantages(path, skip=4)
    with pytest.raises(
        ConfigError, match=r"log, trajectory 4: it has no advantages.*hilt train value .*hilt data value"
    ):
        advantage_labels(lessons_of(path), 0.5)
    other = write_signs(tmp_path / "other", 4, seed=1)
    write_advantages(other, "n")
    write_advantages(path, "m")
    with pytest.raises(ConfigError, match=r"values of 2 models \(m, n\).*hilt data value LOG"):
        advantage_labels(lessons_of(path, other), 0.5)
    shown = write_signs(tmp_path / "shown", 4, Source.DEMO)
    with pytest.raises(ConfigError, match="a person acted in all steps"):
        advantage_labels(lessons_of(shown), 0.5)


def test_a_log_without_failures_is_named(tmp_path: Path):
    path, said = write_signs(tmp_path / "log", 6, good=True), list[str]()
    write_advantages(path)
    advantage_labels(lessons_of(path), 0.5, said.append)
    assert said[0].startswith("CAUTION: no episode of the policy failed") and "log with failures" in said[0]
