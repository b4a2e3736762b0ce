"""Document 004 (SimpleVLA-RL), compatibility of models: one that it does not know is registered, as in ``verl/models/registry.py``, or
named as ``module:Class``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hilt.policies import load_policy
from hilt.policies.registry import POLICIES
from hilt.policies.vla.small_vla import SmallVLA
from hilt.vla.train import begin_run, train
from tests.vla.toy_vla import UP, config


class OwnModel(SmallVLA):
    """Its folders say that they are of the model "own"."""

    def save_pretrained(self, folder: str | Path) -> None:
        super().save_pretrained(folder)
        card = Path(folder, "config.json")
        card.write_text(json.dumps({**json.loads(card.read_text()), "model_type": "own"}))


@pytest.mark.parametrize("name", ["own", f"{__name__}:OwnModel"])
def test_own_model_is_trained_by_its_registered_name_and_by_its_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(POLICIES, "own", OwnModel)
    quiet = ("validation.before=false", "validation.after=false", "validation.period=0")
    settings = config(f"policy={name}", "max_steps=1", *quiet, tasks=[UP])
    run = tmp_path / "run"
    begin_run(run, "toy", settings)
    assert train(settings, run).step == 1
    assert type(load_policy(run / "policy")) is OwnModel, "its folder names the registered model"
