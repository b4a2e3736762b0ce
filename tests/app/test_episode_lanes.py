"""What a timeline shows of one episode: every number as it is stored, with its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.app.episodes.episode_lanes import episode_lanes
from hilt.formats.convert import convert
from hilt.replay import Edits, Log, Schema
from tests.app.episode_samples import make_log, trajectory


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("lanes") / "log", 4)


@pytest.fixture(scope="module")
def lanes(log: Path) -> Iterator[dict[str, Any]]:
    yield shown(log, 3)


def shown(path: Path, number: int) -> dict[str, Any]:
    index = EpisodeIndex([path])
    assert index.wait_until_opened(60)
    try:
        return json.loads(json.dumps(episode_lanes(index.sources[0], number), allow_nan=False))
    finally:
        index.close()


def test_lanes_have_every_number_exactly(lanes: dict[str, Any]):
    assert lanes["steps"] == 9 and lanes["source"] == [0] * 6 + [1] * 3
    by_name = {lane["name"]: lane for lane in lanes["lanes"]}
    assert by_name["rewards"]["values"] == [[0.0] * 8 + [1.0]]
    states = np.float32(by_name["observations/state"]["values"])
    assert np.array_equal(states.T[:, None], trajectory(3, 9)["observations"]["state"])
    assert by_name["terminated"]["kind"] == "flag" and by_name["terminated"]["values"] == [[False] * 8 + [True]]
    assert [camera["name"] for camera in lanes["cameras"]] == ["observations/front", "observations/wrist"]
    assert lanes["facts"]["task"] == "place"


def test_lanes_begin_with_rewards_and_actions_and_end_with_times(lanes: dict[str, Any]):
    names = [lane["name"] for lane in lanes["lanes"]]
    assert names[0] == "rewards" and names.index("actions") < names.index("observations/state")
    assert names[-2:] == ["interval", "latency"] and lanes["hz"] == pytest.approx(10, abs=1e-3)
    latency = lanes["lanes"][-1]
    assert latency["unit"] == "ms" and latency["values"][0] == pytest.approx([20] * 9, abs=1e-2)
    assert lanes["lanes"][-2]["values"][0][0] is None and lanes["gaps"] == []


def test_lanes_show_chunks_and_gaps(tmp_path: Path):
    rows = {
        "record": {"actions": np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 1, 4, 2), "wide": np.zeros((3, 1, 99))},
        "rewards": np.array([[1], [2], [3]], np.float32),
        "times": {"observed": 1e9 + np.array([[0.0], [0.1], [0.5]])},
        "extra": {"log_prob": np.array([[-1.5], [0.25], [-3]], np.float32)},
    }
    with Log.create(tmp_path / "log", Schema.of(rows, leading=2), durability="never") as log:
        log.add(rows)
    lanes = shown(tmp_path / "log", 0)
    names = [lane["name"] for lane in lanes["lanes"]]
    chunk = lanes["lanes"][names.index("record/actions")]
    assert (chunk["kind"], chunk["chunk"], len(chunk["parts"])) == ("chunk", 4, 8)
    assert chunk["values"][3] == [3.0, 11.0, 19.0]
    assert lanes["gaps"] == [2] and lanes["wide"] == {"record/wide": [99]}
    assert names.index("record/actions") < names.index("extra/log_prob")


def test_lanes_of_a_lerobot_dataset_have_its_names(log: Path, tmp_path: Path):
    convert(log, tmp_path / "data", to="lerobot", fps=10, codec="h264")
    info = tmp_path / "data/meta/info.json"
    described = json.loads(info.read_text())
    described["features"]["action"]["names"] = {"motors": ["shoulder", "elbow"]}
    info.write_text(json.dumps(described))
    lanes = shown(tmp_path / "data", 3)
    by_name = {lane["name"]: lane for lane in lanes["lanes"]}
    assert by_name["actions"]["parts"] == ["shoulder", "elbow"] and lanes["hz"] == 10


def test_lanes_of_a_value_model_come_first_and_follow_a_trim(tmp_path: Path):
    path = make_log(tmp_path / "log", 1)
    with Log.open(path, "r") as log:
        found = {"model": "m", "first": 0, "success": True, "value": [-0.5, -0.25, -0.125, 0.0, 0.5, 1.0]}
        Edits(log).estimates({0: {**found, "percentile": [10.0, 20.0]}})
        Edits(log).trim(0, first=1, last=4)
    lanes = shown(path, 0)
    first, second = lanes["lanes"][:2]
    assert (first["name"], first["values"]) == ("value", [[-0.25, -0.125, 0.0, 0.5]])
    assert (second["name"], second["unit"], second["values"]) == ("percentile", "%", [[20.0, None, None, None]])
    assert "estimates" not in lanes["facts"] and lanes["facts"]["value_model"] == "m"
