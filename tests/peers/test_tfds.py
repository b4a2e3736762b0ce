"""Datasets with every kind of feature, freshly written by the real
tensorflow_datasets: every value as it reads them back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.formats.tensorflow_files.tfds import Shard, open_dataset, select
from tests.formats.values import differences, values

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-reverb" / "bin" / "python"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip(
            "tensorflow_datasets is not installed: make test-peers makes a venv for it, .venv-reverb, on Linux x86-64"
        )
    folder = tmp_path_factory.mktemp("tfds")
    subprocess.run(
        [PYTHON, "-m", "tests.peers.make_rlds", folder], cwd=ROOT, check=True, capture_output=True, timeout=500
    )
    return folder


def test_every_value_of_every_feature(made: Path):
    with np.load(made / "all_features_expected.npz") as theirs:
        assert differences(values(made / "all_features", whole=False), dict(theirs)) == []
        assert differences(values(made / "array_record" / "all_features", whole=False), dict(theirs)) == []


def test_values_without_a_fixed_shape(made: Path):
    with np.load(made / "ragged_features.npz") as theirs:
        assert differences(values(made / "ragged_features"), dict(theirs)) == []


def test_several_files(made: Path):
    dataset = open_dataset(made / "sharded" / "all_features", split="train")
    assert len({part.shard.path for part in dataset.parts}) == 3
    with np.load(made / "all_features_expected.npz") as theirs:
        assert differences(values(made / "sharded" / "all_features", whole=False), dict(theirs)) == []


def test_slices_are_rounded_as_the_real_library_does(made: Path):
    cases = json.loads((made / "splits.json").read_text())
    assert sum(bool(case["parts"]) for case in cases) > 100
    for case in cases:
        shards = [Shard(Path(f"{i}"), length) for i, length in enumerate(case["lengths"])]
        try:
            parts = [
                [int(part.shard.path.name), part.first, part.count] for part in select(case["spec"], {"train": shards})
            ]
        except ConfigError:
            parts = None
        if sum(case["lengths"]):  # an empty split is an error there
            assert parts == case["parts"], case
