"""Rounds of acting, labeling and learning: a policy that is right in half of its episodes becomes right, and a run that
was interrupted goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError
from hilt.core.files import DISK
from hilt.policies.conditioned import ConditionedPolicy
from hilt.policies.io.weights_hash import weights_hash
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
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


class Tried:
    """In the place of `record_episodes`: episodes of which some failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int):
        self.failures = failures
        monkeypatch.setattr(recap_rounds, "record_episodes", self)

    def __call__(self, policy: Any, suite: Any, plan: Any, path: Path, *given: Any) -> tuple[int, int]:
        if path.exists():
            DISK.remove(path)
        with Log.open(write_signs(path, plan.episodes, good=True), "a") as log:
            for number in range(self.failures):
                log.annotate(number, success=False)
        return plan.episodes, plan.episodes - self.failures


@pytest.fixture
def good_policy(tmp_path: Path) -> str:
    sizes = {"cameras": ("full_image",), "image_size": 16, "state_dim": 1, "action_dim": 1}
    SmallVLA(SmallVLAConfig.from_json({**sizes, **TINY})).save_pretrained(tmp_path / "good")
    return str(tmp_path / "good")


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        (0, "all 12 episodes succeeded, and there is nothing to tell apart"),
        (1, "too few episodes to hold some out: 11 successes and 1 failures"),
        (2, "too few episodes to hold some out: 10 successes and 2 failures"),
        (12, "all 12 episodes failed, and a value that has seen no successes cannot rank"),
    ],
)
def test_rounds_end_with_the_policy_as_it_was_where_too_few_failed_and_go_on_with_more(
    failures: int, why: str, good_policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, said, tried = tmp_path / "run", list[str](), Tried(monkeypatch, failures)
    asked = config(tmp_path)
    asked.data, asked.policy, asked.policy_options, asked.max_steps = [], good_policy, {}, 2
    asked.recap.episodes = 12
    done = recap_rounds.train(sft.begin_run(run, "", asked), run, notify=said.append)
    assert (
        done.reason == recap_rounds.KEPT
        and done.step == 0
        and read_json(run / "run.json")["ended"]["reason"] == recap_rounds.KEPT
    )
    assert why in said[-1] and said[-1].endswith(f"hilt train sft --run {run} --resume recap.episodes=24")
    assert weights_hash(run / "policy") == weights_hash(Path(good_policy)) and not (run / "rounds.json").exists()
    if failures == 1:
        tried.failures = 8
        more = recap_rounds.train(sft.resume_run(run, "", ["recap.episodes=24"]), run, notify=said.append)
        assert more.reason == "max_steps" and isinstance(sft.open_policy(run, asked), ConditionedPolicy)
        assert [one["successes"] for one in read_json(run / "rounds.json")["rounds"]] == [16]


def test_more_episodes_are_those_of_the_rounds_whose_policy_is_not_trained(
    good_policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, said, tried = tmp_path / "run", list[str](), Tried(monkeypatch, 8)
    asked = config(tmp_path)
    asked.data, asked.policy, asked.policy_options, asked.max_steps = [], good_policy, {}, 2
    asked.recap.episodes, asked.recap.rounds = 24, 2
    first, wanted = recap_rounds._Rounds._round, list[tuple[str, int]]()

    def all_succeed_in_the_second(self: Any, number: int, *given: str) -> str | None:
        tried.failures = 8 if number == 1 or len(wanted) > 2 else 0
        return first(self, number, *given)

    def noted(policy: Any, suite: Any, plan: Any, path: Path, *given: Any) -> tuple[int, int]:
        wanted.append((path.parent.name, plan.episodes))
        if plan.episodes == 0:
            return 24, 16
        return tried(policy, suite, plan, path, *given)

    monkeypatch.setattr(recap_rounds, "record_episodes", noted)
    monkeypatch.setattr(recap_rounds._Rounds, "_round", all_succeed_in_the_second)
    recap_rounds.train(sft.begin_run(run, "", asked), run, notify=said.append)
    assert wanted == [("1", 24), ("2", 24)] and said[-1].endswith("recap.episodes=48")
    recap_rounds.train(sft.resume_run(run, "", ["recap.episodes=48"]), run, notify=said.append)
    assert wanted[2:] == [("1", 0), ("2", 48)], "the first round has been learned from"
    assert [one["episodes"] for one in read_json(run / "rounds.json")["rounds"]] == [24, 48]


def test_a_value_model_without_an_auc_labels_all_the_same(shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said, written = list[str](), list[Any]()
    model = SimpleNamespace(metadata={"held_out": {"after": [{"auc": 0.5}, {"auc": None}]}})
    monkeypatch.setattr(recap_rounds, "train_value", lambda *given: model)
    monkeypatch.setattr(recap_rounds, "write_estimates", lambda model, episodes, report: written.append(model))
    rounds = recap_rounds._Rounds(config(shown), tmp_path / "run", lambda: False, said.append)
    assert rounds._labeled(tmp_path / "run") is None and written == [model]
    assert said[-1].endswith("too few held-out episodes last half as long, so no AUC is known")


def test_what_cannot_work_is_refused(shown: Path):
    changed = config(shown)
    changed.tasks = []
    with pytest.raises(ConfigError, match=r"recap\.rounds=1: in which tasks"):
        changed.check()
    changed = config(shown)
    changed.recap.value = {"actions": 2}
    with pytest.raises(ConfigError, match="values of chunks give no advantages"):
        changed.check()
    changed.recap.value = {"stop_on": ["ranking"]}
    with pytest.raises(
        ConfigError, match=r"value.stop_on=\['ranking'\]: alarms of the value model are said, and end no r"
    ):
        changed.check()
    changed.recap.value = {"stepz": 2}
    with pytest.raises(ConfigError, match=r"recap\.value: .*stepz"):
        changed.check()
