"""One trained model for the tests of its uses."""

from __future__ import annotations

import pytest

from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_model import ValueModel
from hilt.value.value_training import train_value
from tests.value.valued import BLIND, write_log


@pytest.fixture(scope="session")
def blind_model(tmp_path_factory: pytest.TempPathFactory) -> ValueModel:
    """Looks at the state alone, and has seen the episodes of `write_log(..., 16, pictures=False)`."""
    folder = tmp_path_factory.mktemp("blind")
    with ValueEpisodes([write_log(folder / "log", 16, pictures=False)]) as episodes:
        made = train_value(episodes, ValueConfig(**BLIND), folder / "model")
        assert made is not None
        return made
