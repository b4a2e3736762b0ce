"""Policies are named by folder, by name, or as ``module:Class``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hilt.core import trust
from hilt.core.errors import ConfigError, UnknownNameError, UnsafeError
from hilt.policies.registry import (
    POLICIES,
    check_policy,
    document_of,
    is_new,
    kind_of,
    load_policy,
    policy_class,
    policy_sizes,
)
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

SMALL = SmallVLAConfig(image_size=16, state_dim=1, chunk=1, action_dim=1, width=16, heads=2, depth=1, keypoints=1)


class Mine(SmallVLA):
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SmallVLA(SMALL).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def renamed(folder: Path, kind: str) -> Path:
    card = folder / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "model_type": kind}))
    return folder


def test_a_name_and_a_class_are_new_and_a_folder_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(POLICIES, "mine", f"{__name__}:Mine")
    assert all(is_new(name) for name in ("small_vla", "mine", f"{__name__}:Mine"))
    assert not any(is_new(name) for name in (str(folder), "elsewhere", "hf:somebody/policy@main"))
    assert [policy_class(name) for name in ("small_vla", "mine", f"{__name__}:Mine", str(folder))] == [
        SmallVLA,
        Mine,
        Mine,
        SmallVLA,
    ]
    assert document_of(str(folder))["chunk"] == 1 and document_of("mine") == document_of("elsewhere") == {}


def test_policy_folder_that_is_called_like_a_published_policy_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_new("pi0")  # and refused: there is nothing to begin with
    for name in ("pi0", "small_vla"):
        Path(name).mkdir()
        Path(name, "config.json").write_text('{"model_type": "pi0"}')
    assert not is_new("pi0") and is_new("small_vla"), "of a small_vla a new one can be made"


def test_policy_folder_names_its_policy(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert kind_of(folder) == "small_vla"
    monkeypatch.setitem(POLICIES, "mine", f"{__name__}:Mine")
    assert type(load_policy(renamed(folder, "mine"))) is Mine
    with pytest.raises(
        UnknownNameError, match=r"no policy, as .*config\.json has it in model_type, named 'mien'; did you mean 'mine'"
    ):
        load_policy(renamed(folder, "mien"))


def test_code_that_a_folder_names_needs_trust_in_a_program_too(folder: Path):
    renamed(folder, f"{__name__}:Mine")
    with trust.command_line([]):
        with pytest.raises(UnsafeError, match=r"config\.json names .*nothing of it was run"):
            load_policy(folder)
        trust.trust(__name__)
        assert type(load_policy(folder)) is Mine


def test_policy_registry_refuses_what_is_no_policy(folder: Path):
    with pytest.raises(
        ConfigError, match=r"prime.policy=elsewhere: expected the folder of a checkpoint.* openvla, pi0, smolvla"
    ):
        check_policy("elsewhere", {}, "prime.policy")
    with pytest.raises(ConfigError, match=r"expected a subclass of hilt\.policies\.base\.Policy"):
        check_policy("pathlib:Path", {})
    with pytest.raises(ConfigError, match="a new SmolVLA cannot be made: give policy=FOLDER"):
        check_policy("smolvla", {})
    check_policy(str(folder), {})


def test_sizes_of_an_observation():
    import numpy as np

    row = {"full_image": np.zeros((40, 50, 3), np.uint8), "state": np.zeros(7), "instruction": "go"}
    assert policy_sizes(row, 7, 4) == {"cameras": ["full_image"], "image_size": 64, "state_dim": 7, "action_dim": 4}
    assert policy_sizes({"state": np.zeros(7)}, 7, 4)["cameras"] == []
