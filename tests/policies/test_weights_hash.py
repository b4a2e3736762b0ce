"""The hash of a policy's folder: of each kind of folder, whatever changes what the policy computes changes it."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.core.tree import ArraySpec
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.policies.conditioned import ConditionedPolicy
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import BASE_POLICY, frozen_options
from hilt.policies.frozen.frozen_policy import FrozenVlaPolicy
from hilt.policies.io.weights_hash import former_weights_hash, weights_hash
from hilt.policies.registry import load_policy
from hilt.value.policy_features import FrozenFeatures
from tests.policies import test_conditioned, test_pi0, tiny_openvla

torch.set_num_threads(1)
NAMES = {"full_image": "image", "state": "state"}
KINDS = ("plain", "openvla", "pi0", "recap_words", "recap_embedding", "frozen_vla", "frozen_recap")


def frozen(base: FrozenBase) -> FrozenVlaPolicy:
    """An agent that has learned nothing, beside a frozen policy."""
    row = test_conditioned.seen()
    shapes = {name: ArraySpec(column.dtype, column.shape[1:]) for name, column in base.columns([row]).items()}
    config = AgentConfig(kind="frozen_vla", encoder=EncoderConfig(kind="none"), hidden=[8], proprio_width=4)
    config = replace(config, options={"policy": base.options.policy, "columns": NAMES})
    action = ArraySpec(np.dtype(np.float32), (1,))
    return FrozenVlaPolicy.of(FrozenAgent.make({BASE_POLICY: {base.weights: shapes}}, action, config), base)


def saved(kind: str, path: Path, seed: int = 0) -> Path:
    """The folder of a policy of a kind."""
    policy: Any
    if kind == "openvla":
        policy = tiny_openvla.tiny(seed)
    elif kind == "pi0":
        policy = test_pi0.made("sde", seed)
    elif kind.startswith("frozen"):
        inside = saved("recap_words" if kind == "frozen_recap" else "plain", path.with_name(f"{path.name}-base"), seed)
        policy = frozen(FrozenBase(frozen_options({"policy": str(inside), "columns": NAMES})))
    else:
        policy = test_conditioned.made(seed)
        if kind.startswith("recap"):
            policy = ConditionedPolicy(policy, kind=kind.removeprefix("recap_"))
    policy.save_pretrained(path)
    return path


def changed(path: Path) -> None:
    """Changes one number of a file."""
    content = bytearray(path.read_bytes())
    place = len(content) - 1
    if path.suffix == ".json":
        place = max(content.rfind(str(digit).encode()) for digit in range(10))
        content[place] = ord("7") if content[place] != ord("7") else ord("3")
    else:
        content[place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_content_has_the_same_hash_and_one_number_changes_it(kind: str, tmp_path: Path):
    folder = saved(kind, tmp_path / "policy")
    known = weights_hash(folder)
    assert len(known) == 12 and known == weights_hash(shutil.copytree(folder, tmp_path / "elsewhere"))
    files = [path for path in folder.rglob("*") if path.is_file() and re.search(rb"\d", path.read_bytes())]
    if kind == "plain":
        files.remove(folder / "config.json")
    hashes = {known}
    for path in files:
        before = path.read_bytes()
        changed(path)
        hashes.add(weights_hash(folder))
        path.write_bytes(before)
    assert len(hashes) == 1 + len(files), f"all of {', '.join(path.name for path in files)}"
    assert weights_hash(folder) == known and weights_hash(saved(kind, tmp_path / "other", seed=1)) != known
    if not kind.startswith("frozen"):  # which names the folder of its base
        assert weights_hash(saved(kind, tmp_path / "again")) == known, "a policy that is saved again"


def test_a_folder_of_weights_and_their_sizes_has_the_hash_of_its_weights(tmp_path: Path):
    # that of earlier versions, by which logs and runs know the features of a small_vla
    folder = saved("plain", tmp_path / "policy")
    content = b"model.safetensors" + (folder / "model.safetensors").read_bytes()
    assert weights_hash(folder) == hashlib.sha256(content).hexdigest()[:12]


@pytest.mark.parametrize("kind", ["words", "embedding"])
def test_a_policy_with_a_condition_is_frozen_and_valued_like_any_other(kind: str, tmp_path: Path):
    folders = [saved(f"recap_{kind}", tmp_path / str(seed), seed) for seed in (0, 1)]
    bases = [FrozenBase(frozen_options({"policy": str(folder), "columns": NAMES})) for folder in folders]
    found = [base.columns([test_conditioned.seen()]) for base in bases]
    assert bases[0].weights != bases[1].weights and (found[0]["features"] != found[1]["features"]).any()
    features = FrozenFeatures(str(folders[0])).of([test_conditioned.seen()])
    np.testing.assert_allclose(features.numpy(), found[0]["features"], atol=1e-6)


def test_an_exported_folder_is_opened_with_the_hash_of_its_base(tmp_path: Path):
    folder = saved("frozen_recap", tmp_path / "policy")
    rows = [test_conditioned.seen()]
    assert load_policy(folder).act(rows, sample=False)[0].shape == (1, 1, 1)
    (folder / "base" / "policy" / "model.safetensors").write_bytes(
        (saved("plain", tmp_path / "other", seed=1) / "model.safetensors").read_bytes()
    )
    with pytest.raises(ConfigError, match=r"weights have the hash .*convert LOG NEW --drop observations/base"):
        load_policy(folder)


def test_a_folder_that_was_exported_with_the_hash_of_earlier_versions_is_opened(tmp_path: Path):
    inside = saved("plain", tmp_path / "inside")
    (inside / "dataset_statistics.json").write_text("{}")  # as openvla, pi0 and smolvla have files besides
    content = b"model.safetensors" + (inside / "model.safetensors").read_bytes()
    former, newer = hashlib.sha256(content).hexdigest()[:12], weights_hash(inside)
    assert former_weights_hash(inside) == former != newer and former_weights_hash(tmp_path) == ""
    folder = tmp_path / "policy"
    frozen(FrozenBase(frozen_options({"policy": str(inside), "columns": NAMES}))).save_pretrained(folder)
    rows = [test_conditioned.seen()]
    wanted = load_policy(folder).act(rows, sample=False)[0]
    document = (folder / "config.json").read_text()
    assert document.count(newer) >= 3
    (folder / "config.json").write_text(document.replace(newer, former))
    np.testing.assert_array_equal(load_policy(folder).act(rows, sample=False)[0], wanted)
    other = saved("plain", tmp_path / "other", seed=1) / "model.safetensors"
    (folder / "base" / "model.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(ConfigError, match=f"policy have {former}"):
        load_policy(folder)


def test_other_files_and_hidden_folders_make_no_difference(tmp_path: Path):
    for kind in ("plain", "pi0", "recap_words"):
        folder = saved(kind, tmp_path / kind)
        known = weights_hash(folder)
        for name in ("notes.txt", "log.json", ".cache/config.json", ".cache/huggingface/x.safetensors"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("seen 3 times")
            assert weights_hash(folder) == known, f"{kind}: {name}"


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"there are no weights in it\. Give the folder of a checkpoint"):
        weights_hash(tmp_path)


def test_the_folder_of_a_run_is_refused_with_the_place_of_its_policy(tmp_path: Path):
    saved("plain", tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"there are no weights in it\. This is a run; its policy is .*policy"):
        weights_hash(tmp_path)
