"""Episodes of a run with a value model have the estimates of the model as soon as they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.trajectory import ESTIMATES
from hilt.hil.data import Experience
from hilt.hil.stream.episode_values import EpisodeValues
from hilt.replay import Edits
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import write_estimates
from hilt.value.value_model import load_value_model
from tests.hil.test_data import agent_for
from tests.hil.toy_run import config, fill, spaces
from tests.value.valued import save_untrained

POINT = {"observations/state/point": 3}


def experience_for(run: Path, model: Path, said: list[str], **changes: Any) -> Experience:
    settings = config(task="toy", value={"model": str(model)}, **changes)
    run.mkdir(exist_ok=True)
    return Experience(run, settings, spaces(), agent_for(settings), said.append)


def test_each_episode_has_its_curve_when_it_has_ended_and_hilt_data_value_finds_nothing_to_do(tmp_path: Path):
    model, said = save_untrained(tmp_path / "value", POINT, "toy"), list[str]()
    experience = experience_for(tmp_path / "run", model, said)
    fill(experience.log, range(3))
    for episode in experience.finished():
        experience.note_outcome(episode["trajectory"], episode["success"])
    curves = [experience.log.facts.about(number)[ESTIMATES] for number in experience.log.trajectories()]
    assert [len(curve["value"]) for curve in curves] == [5, 5, 5] and [one["success"] for one in curves] == [1, 0, 1]
    assert len(set(curves[0]["value"])) > 2 and curves[0]["model"] == load_value_model(model).id
    assert experience.log.facts.about(0)["value_last"] == curves[0]["value"][-1]
    experience.close()
    with ValueEpisodes([tmp_path / "run" / "log"]) as episodes:
        written = write_estimates(load_value_model(model), episodes)
    assert (written.episodes, written.known, said) == (0, 3, [])


@pytest.mark.parametrize(
    ("state", "task", "why"),
    [
        (POINT, "other", r"it was trained on 'other', and not on 'toy'"),
        ({"observations/state/speed": 3}, "toy", r"observations/state/speed has no numbers, expected 3"),
    ],
)
def test_a_model_that_cannot_value_the_log_is_told_of_and_the_run_goes_on(
    tmp_path: Path, state: dict[str, int], task: str, why: str
):
    said: list[str] = []
    experience = experience_for(tmp_path / "run", save_untrained(tmp_path / "value", state, task), said)
    fill(experience.log, range(1))
    experience.note_outcome(0, True)
    assert ESTIMATES not in experience.log.facts.about(0)
    [text] = said
    assert "there will be no values below the videos of this run: " in text and why in text
    experience.close()


def test_values_are_renewed_where_the_outcome_is_another(tmp_path: Path):
    model = load_value_model(save_untrained(tmp_path / "value", POINT, "toy"))
    experience = experience_for(tmp_path / "run", model.folder, [])
    fill(experience.log, range(1))
    experience.note_outcome(0, True)
    values = EpisodeValues(experience.log, model)
    first = values.known(0)
    assert first is not None and not values.write(0, values.find(0)), "they are facts already"
    Edits(experience.log).label([0], False)
    assert values.known(0) is None and values.write(0, values.find(0))
    assert values.known(0) != first and experience.log.facts.about(0)[ESTIMATES]["success"] is False
    experience.close()
