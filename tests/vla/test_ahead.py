"""collect.ahead=1: the next step's episodes are rolled out beside the update, by the weights from before it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.distributed.ranks import Alone
from hilt.observe.metrics import read_metrics
from hilt.policies.copies import ActingCopy
from hilt.replay import Log
from hilt.vla.worker import Worker
from tests.effort import devices
from tests.vla.test_train import Stop, resumed, started, told
from tests.vla.toy_vla import config, weights

UNTRIED = ("validation.before=false", "validation.after=false", "validation.period=0")
AHEAD = ("collect.ahead=1", "pool.workers=1", *UNTRIED)


def facts(run: Path) -> list[dict[str, Any]]:
    with Log.open(run / "rollouts" / "rank-0", "r") as log:
        return [log.facts.about(trajectory) for trajectory in log.trajectories()]


@pytest.mark.parametrize("device", devices())
def test_episodes_beside_an_update_are_by_the_weights_from_before_it(device: str, tmp_path: Path):
    worker = Worker(config(*AHEAD, f"device={device}"), tmp_path, Alone())
    try:
        worker.load_own([])
        assert worker.collect(0)["version"] == 0
        before, stood = ActingCopy(worker.policy).refresh(), worker._standing()
        worker.begin_collect(1, version=0)
        worker.update(0.5)
        own = worker.own()
        assert own["agenda"] == stood["agenda"] and own["log_end"] == stood["log_end"] == 15, "as the step began"
        answer = worker.collect(1)
        assert answer["version"] == 0 and len(answer["episodes"]) == 16 == len(worker.episodes)
        assert {episode.version for episode in worker.episodes} == {0}
        for policy, alike in ((before, True), (worker.policy, False)):
            for episode in worker.episodes:
                with torch.no_grad():
                    found = policy.evaluate(episode.record).log_prob.cpu().numpy()
                given = episode.record["log_prob"]
                there = np.isfinite(given)
                assert np.allclose(found[there], given[there], atol=1e-4) == alike
    finally:
        worker.close()


def test_validation_leaves_a_collection_that_is_under_way_and_it_is_made_again(tmp_path: Path):
    worker = Worker(config(*AHEAD), tmp_path, Alone())
    try:
        worker.load_own([])
        worker.collect(0)
        worker.begin_collect(1, version=0)
        worker.update(0.5)
        assert len(worker.validate(1)["outcomes"]) == 10
        assert worker.collect(1)["version"] == 1
    finally:
        worker.close()
    assert Counter((one["training_step"], one["version"]) for one in facts(tmp_path)) == {(0, 0): 16, (1, 1): 16}


def test_a_run_is_one_version_behind_and_the_same_with_any_number_of_simulators(tmp_path: Path):
    for workers in (1, 2):
        started(tmp_path / str(workers), "max_steps=5", *AHEAD, f"pool.workers={workers}")
    one, two = tmp_path / "1", tmp_path / "2"
    assert told(one) == told(two)
    made, again = weights(one), weights(two)
    assert all(np.array_equal(array, again[name]) for name, array in made.items())
    stale = [record["staleness"] for record in read_metrics(one, ["update"]) if "policy_loss" in record]
    assert stale == [0, 1, 1, 1, 1]
    versions = Counter((fact["training_step"], fact["version"]) for fact in facts(one))
    assert versions == {(step, max(0, step - 1)): 16 for step in range(5)}


def test_interrupted_beside_an_update_a_run_goes_on_and_has_every_episode_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop = Stop(monkeypatch)
    stop.after = 40  # in the collection of the third step, beside the second update
    assert started(tmp_path, "max_steps=5", *AHEAD).reason == "stopped"
    stop.fail_in = 3
    with pytest.raises(RuntimeError, match="the power went"):
        resumed(tmp_path)
    stop.fail_in = -1
    assert resumed(tmp_path).reason == "max_steps"
    assert Counter(fact["training_step"] for fact in facts(tmp_path)) == dict.fromkeys(range(5), 16)
    updates = [record for record in read_metrics(tmp_path, ["update"]) if "policy_loss" in record]
    assert [record["update"] for record in updates] == [1, 2, 3, 4, 5]
