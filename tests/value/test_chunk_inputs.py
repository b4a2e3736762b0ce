"""What a value of chunks looks at: observations and actions by the names of a policy, of whole chunks alone."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, UnknownNameError
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from tests.value.chosen import COLUMNS, write_choices
from tests.value.valued import write_log

SEEN = {"full_image": "images/front", "state": "state"}


def test_observations_and_actions_have_the_names_of_a_policy(tmp_path: Path):
    path = write_log(tmp_path / "log", 4)
    with ValueEpisodes([path]) as episodes:
        inputs = episodes.inputs(ValueConfig(actions=3, columns=SEEN))
        assert inputs.cameras == {"full_image": (16, 16)} and inputs.state == {"state": 2}
        assert inputs.chunk is not None and (inputs.chunk.actions, inputs.chunk.action_dim) == (3, 2)
        rows = np.array([[3, 5], [0, 2]])
        batch = episodes.batch(rows, inputs)
        for place, (number, step) in enumerate(rows.tolist()):
            one = episodes.episodes[number]
            read = one.log.read(one.keys[step : step + 3], ["observations", "actions"])
            assert (batch.images["full_image"][place] == read["observations"]["images"]["front"][0]).all()
            assert (batch.state[place] == read["observations"]["state"][0]).all()
            assert batch.actions is not None and (batch.actions[place] == read["actions"]).all()
        blind = episodes.inputs(ValueConfig(actions=3, columns=SEEN, encoder="none"))
        assert not blind.cameras and blind.state == {"state": 2}


def test_what_does_not_fit_is_refused(tmp_path: Path):
    path = write_log(tmp_path / "log", 4)
    other = write_choices(tmp_path / "other", 4)
    with ValueEpisodes([path]) as episodes:
        with pytest.raises(
            ConfigError, match=r"no suite named 'lift'.* Give suite=NAME, or the names by which"
        ) as found:
            episodes.inputs(ValueConfig(actions=3))
        given = re.search(r"'columns=\{(.*)\}'", str(found.value))
        assert given is not None
        named = dict(one.split(": ") for one in given[1].split(", "))
        assert named == SEEN and episodes.inputs(ValueConfig(actions=3, columns=named)).cameras
        with pytest.raises(MissingFieldError, match=r"Give suite=NAME, or columns="):
            episodes.inputs(ValueConfig(actions=3, columns={"full_image": "images/top"}))
        with pytest.raises(UnknownNameError, match="camera"):
            episodes.inputs(ValueConfig(actions=3, columns=SEEN, image_keys=["images/front"]))
    with ValueEpisodes([path, other]) as episodes, pytest.raises(SchemaError, match=r"other.*state is 1, expected 2"):
        episodes.inputs(ValueConfig(actions=3, columns=COLUMNS, encoder="none"))
