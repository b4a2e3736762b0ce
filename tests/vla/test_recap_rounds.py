"""Rounds of acting, labeling and learning: a policy that is right in half of its episodes becomes right, and a run that
was interrupted goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError
from hilt.policies.conditioned import ConditionedPolicy
from hilt.replay import Log
from hilt.vla import sft
from hilt.vla.recap import recap_rounds
from hilt.vla.recap.recap_settings import Recap
from hilt.vla.sft import Sft
from tests.vla.signs import NAMES, TINY, means, write_signs

TASK = "tests.vla.signs:signs"


def config(log: Path, task: str = TASK, **recap: Any) -> Sft:
    made = Sft(data=[str(log)], columns=NAMES, tasks=[task], policy_options=TINY, validation=0.1, validation_period=50)
    made.max_steps, made.batch_size, made.learning_rate, made.successes_only = 200, 32, 3e-3, False
    value = {
        "encoder": "none",
        "hidden": 16,
        "steps": 30,
        "evaluate_every": 10,
        "batch_size": 32,
        "learning_rate": 3e-3,
    }
    made.recap = Recap(threshold=0.5, rounds=1, episodes=80, value=value, **recap)
    return made


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """What a new policy begins with: episodes that are right and wrong."""
    return write_signs(tmp_path / "shown", 30)


def test_a_round_makes_the_policy_right_and_goes_on_after_a_stop(shown: Path, tmp_path: Path):
    run, said = tmp_path / "run", list[str]()
    settled = sft.begin_run(run, "", config(shown))
    with pytest.raises(ConfigError, match=r"recap_rounds\.train trains such a run"):
        sft.train(settled, run)
    looks = iter(range(10**9))
    first = recap_rounds.train(settled, run, stop=lambda: next(looks) > 230, notify=said.append)  # while it acts
    assert first.reason == "stopped" and not (run / "policy").exists()
    done = recap_rounds.train(sft.resume_run(run, "", []), run, notify=said.append)
    assert done.reason in ("best", "max_steps")
    (result,) = read_json(run / "rounds.json")["rounds"]
    assert result["number"] == 1 and result["episodes"] == 80 and 20 < result["successes"] < 60
    assert any(line.startswith(f"round 1, {TASK}: {result['successes']} of 80 sampled episodes") for line in said)
    policy = sft.open_policy(run, settled).eval()
    assert isinstance(policy, ConditionedPolicy)
    low, high = means(policy)
    assert low < -0.2 and high > 0.2
    with Log.open(next((run / "rounds" / "1").glob("log-*")), "r") as log:
        assert len(log.trajectories()) == 80
        assert log.facts.about(3)["estimates"]["model"] == read_json(run / "rounds/1/value/value.json")["id"]


def test_what_cannot_work_is_refused(shown: Path):
    changed = config(shown)
    changed.tasks = []
    with pytest.raises(ConfigError, match=r"recap\.rounds=1: in which tasks"):
        changed.check()
    changed = config(shown)
    changed.recap.value = {"actions": 2}
    with pytest.raises(ConfigError, match="values of chunks give no advantages"):
        changed.check()
    changed.recap.value = {"stepz": 2}
    with pytest.raises(ConfigError, match=r"recap\.value: .*stepz"):
        changed.check()
