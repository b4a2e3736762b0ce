"""The data of the page of value models: models that are found, the report, the worst episodes with links, commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.app.episodes.episode_shelf import EpisodeShelf
from hilt.app.value_models.value_data import KnownValueModel, report_of, value_models_of
from hilt.app.words import Words
from hilt.core.checksums import write_json
from hilt.core.errors import CorruptError
from hilt.formats.listing.episode_source import source_key
from tests.app.episode_samples import make_log
from tests.app.test_run_library import make_run

ALARM = {
    "name": "ranking",
    "step": 9,
    "text": "alarm ranking: on held-out data it predicts a constant, a probability of ",
}
ALARM["text"] += "success from 0.500 to 0.501. Do not use it"


def make_value_model(folder: Path, episodes: list[dict[str, Any]], **changed: Any) -> KnownValueModel:
    """A folder as `hilt train value` makes one, without its weights."""
    folder.mkdir(parents=True)
    counts = {"episodes": 4, "successes": 2, "initial_states": 4, "frames": 40, "by": "initial state"}
    after = {"auc": 0.75, "interval": [0.5, 1.0], "auc_within_tasks": None, "calibration_error": 0.1}
    held = {**counts, "after": [{"share": share, **after} for share in (0.25, 0.5, 0.75)], "calibration_error": 0.1}
    held |= {"reliability": [{"predicted": 0.4, "observed": 0.5, "count": 12}]}
    metadata = {"id": "abc", "inputs": {"chunk": None}, "tasks": {"tabletop/pick": {}}, "training": counts}
    write_json(folder / "value.json", {**metadata, "held_out": held, **changed})
    write_json(folder / "held_out.json", {"model": "abc", "episodes": episodes})
    return KnownValueModel("key", folder.name, folder)


def judged(log: Path, number: int, succeeded: bool, success: list[float]) -> dict[str, Any]:
    return {"log": str(log), "trajectory": number, "task": "a", "succeeded": succeeded, "success": success, "value": []}


def test_the_worst_judged_episodes_lead_to_themselves(tmp_path: Path):
    log = make_log(tmp_path / "log", 3)
    episodes = [
        judged(log, 0, True, [0.5, 0.6, 0.7, 0.9]),
        judged(log, 1, False, [0.5, 0.6, 0.9, 0.1]),
        judged(tmp_path / "elsewhere", 7, True, [0.4] * 200),
    ]
    model, shelf = make_value_model(tmp_path / "value", episodes), EpisodeShelf([log])
    try:
        found = report_of(model, shelf, Words("en"))
        [data] = shelf.listed()
        wrong, elsewhere, right = found["worst"]
        assert wrong["href"] == f"/episode?data={data.key}&source={source_key(log)}&number=1&step=2"
        assert (wrong["number"], wrong["after"], wrong["wrong"]) == (1, [0.6, 0.9, 0.1], True)
        assert (elsewhere["href"], len(elsewhere["curve"]), elsewhere["wrong"]) == ("", 67, True)
        assert right["number"] == 0 and not right["wrong"]
        assert found["tasks"] == found["alarms"] == [], "older models have none"
        assert found["commands"] == [
            f"hilt data value LOG --model {model.path}",
            f"hilt train tabletop_pick value.model={model.path}",
        ]
    finally:
        shelf.close()


def test_what_ranks_nothing_is_not_suggested_and_a_value_of_chunks_is_used_otherwise(tmp_path: Path):
    shelf = EpisodeShelf([tmp_path])
    counts = {"episodes": 4, "successes": 2, "frames": 40}
    useless = make_value_model(tmp_path / "useless", [], training={**counts, "alarms": [ALARM]})
    found = report_of(useless, shelf, Words("zh"))
    assert found["commands"] == [] and found["alarms"][0].startswith("警报 ranking：在留出数据上它的预测是常数")
    chunks = make_value_model(tmp_path / "chunks", [], inputs={"chunk": {"actions": 5}})
    [command] = report_of(chunks, shelf, Words("en"))["commands"]
    assert command == f"hilt eval RUN --best-of 8 --verifier {chunks.path}"
    broken = make_value_model(tmp_path / "broken", [], training={})
    with pytest.raises(CorruptError, match=r"broken: this is no report of a value model .* hilt train value"):
        report_of(broken, shelf, Words("en"))


def test_models_of_the_folders_and_of_runs_are_found_once(tmp_path: Path):
    shown = tmp_path / "shown"
    for folder in ("value", "run/rounds/2/value", "deeper/value"):
        make_value_model(shown / folder, [])
    used = make_value_model(tmp_path / "used", []).path
    for name in ("pick", "again"):
        run = make_run(shown / name)
        (run / "config.yaml").write_text(f"task: tabletop/button\nvalue:\n  model: {used}\n")
        make_log(run / "log", 1)
    shelf = EpisodeShelf([shown])
    try:
        found = value_models_of([shown, shown / "value"], shelf)
        assert {one.name for one in found} == {"value", "run/rounds/2/value", "used"} and len(found) == 4
        assert len({one.key for one in found}) == 4
        times = [(one.path / "value.json").stat().st_mtime for one in found]
        assert times == sorted(times, reverse=True)
        assert value_models_of([tmp_path / "nothing"], EpisodeShelf([tmp_path / "nothing"])) == []
    finally:
        shelf.close()
