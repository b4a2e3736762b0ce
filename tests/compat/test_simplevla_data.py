"""The names of SimpleVLA-RL's scripts over our tasks and episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hilt.compat.simplevla import (
    Batch,
    BufferedDataLoader,
    LIBERO_Dataset,
    Robotwin_Dataset,
    collate_fn,
    rollout_batch,
    starts,
)
from hilt.core.errors import ConfigError, EmptyError, MissingFieldError, SchemaError, UnknownNameError
from hilt.policies.base import join
from hilt.vla.episode import RolloutEpisode, Start
from tests.policies.tiny_openvla import observations, tiny


def test_libero_dataset_states_held_out_on_request(caplog: pytest.LogCaptureFixture):
    train, valid = (LIBERO_Dataset("libero_10", 50, part, held_out=True) for part in ("train", "valid"))
    trials = [{int(row["trial_id"]) for row in dataset} for dataset in (train, valid)]
    assert len(train) == 10 * len(trials[0]) and len(valid) == 10 * len(trials[1]) and not trials[0] & trials[1]
    row = train[len(trials[0])]
    assert row["task_suite_name"] == "libero_10" and (row["task_id"].dtype, row["task_id"].tolist()) == (
        torch.int64,
        [1],
    )
    assert row["trial_seed"].tolist() == [-1]
    with caplog.at_level("INFO", "hilt.compat"):
        theirs = [LIBERO_Dataset("libero_90", 20, part) for part in ("train", "valid")]
    assert len(theirs[0]) == 90 * 20 and [row["trial_id"] for row in theirs[0]] == [
        row["trial_id"] for row in theirs[1]
    ]
    assert caplog.messages[1] == (
        "LIBERO_Dataset('libero_90', train_val='valid'): 1800 rows, initial states 0 to 19 of each of 90 "
        "tasks, the same in train and valid; held_out=True separates them"
    )
    assert "initial states 30 to 39 of each of 10 tasks, held out from the other dataset" in repr(valid)
    for wrong, expected in (
        (("libero_11",), r"no LIBERO suite named 'libero_11'; did you mean 'libero_10'\?.*libero_goal"),
        (("libero_10", 50, "test"), "no train_val named 'test'"),
        (("libero_10", 0), "num_trials_per_task=0: LIBERO stores 50 initial states; give 1 to 50"),
        (("libero_10", 51), "num_trials_per_task=51: LIBERO stores 50 initial states"),
        (
            ("libero_10", 20, "valid", True),
            "num_trials_per_task=20 leaves no state to valid: give 50, or held_out=False",
        ),
    ):
        with pytest.raises((ConfigError, UnknownNameError), match=expected):
            LIBERO_Dataset(*wrong)


def test_the_seeds_of_robotwin(tmp_path: Path):
    train, valid = (Robotwin_Dataset("robotwin_shoe_place", 3, part) for part in ("train", "valid"))
    assert [int(row["trial_seed"]) for row in train] == [100_000, 100_001, 100_002] and train[0][
        "task_id"
    ].tolist() == [-1]
    sources = [row["data_source"] for row in valid]
    assert sources == ["robotwin_shoe_place_train_iid"] * 128 + ["robotwin_shoe_place_eval_ood"] * 128
    assert int(valid[128]["trial_id"]) == 100_000_000
    files = {"train_seeds": str(tmp_path / "train.json"), "eval_seeds": str(tmp_path / "eval.json")}
    for path, first in zip(files.values(), (5, 900), strict=True):
        Path(path).write_text(json.dumps({"lift_pot": {"success_seeds": list(range(first, first + 130))}}))
    second = Robotwin_Dataset("robotwin2_lift_pot", 2, "train", **files)
    assert [int(row["trial_id"]) for row in second] == [5, 6] and len(
        Robotwin_Dataset("robotwin2_lift_pot", 2, "valid", **files)
    ) == 256
    with pytest.raises(ConfigError, match="robotwin2_lift_pot has 130 seeds of train, and 131 were asked for"):
        Robotwin_Dataset("robotwin2_lift_pot", 131, "train", **files)
    with pytest.raises(
        UnknownNameError, match=r"no RoboTwin task named 'robotwin2_lift_pots'; did you mean 'robotwin2_lift_pot'\?"
    ):
        Robotwin_Dataset("robotwin2_lift_pots")
    begun = starts(Batch.from_single_dict(collate_fn([second[1]])), 2, **files)
    assert begun == [Start("robotwin2/lift_pot", "train", 1, 6, 0, member) for member in (0, 1)]
    with pytest.raises(ConfigError, match="has no initial state 6; give the files of seeds"):
        starts(Batch.from_single_dict(collate_fn([second[1]])), 2)


def test_collate_and_the_loader():
    dataset = LIBERO_Dataset("libero_goal", 2)
    loader = BufferedDataLoader(DataLoader(dataset, batch_size=8, drop_last=True, collate_fn=collate_fn))
    assert (len(loader), loader.batch_size, loader.buffer_size()) == (2, 8, 0)
    with pytest.raises(ConfigError, match=r"call start_new_epoch\(\) before get_next_batch"):
        loader.get_next_batch()
    with pytest.raises(EmptyError, match=r"add_to_buffer\(\) comes first"):
        loader.get_from_buffer(1, 1)
    for _ in range(2):
        loader.start_new_epoch()
        batches = [loader.get_next_batch(), loader.get_next_batch()]
        with pytest.raises(StopIteration):
            loader.get_next_batch()
    prompts = Batch.from_single_dict(batches[0])
    assert (
        prompts.batch["task_id"].shape == (8, 1)
        and prompts.non_tensor_batch["task_suite_name"].tolist() == ["libero_goal"] * 8
    )
    begun = starts(prompts, n_samples=2, seed=7)
    assert [(start.task, start.split, start.state, start.group, start.member) for start in begun[:3]] == [
        ("libero_goal/0", "train", 0, 0, 0), ("libero_goal/0", "train", 0, 0, 1), ("libero_goal/0", "train", 1, 1, 0),
    ]  # fmt: skip
    assert len(begun) == 16 and {start.seed for start in begun} == {7}
    loader.add_to_buffer(prompts)
    loader.add_to_buffer(Batch.from_single_dict(batches[1]))
    assert loader.buffer_size() == 16 and len(loader.get_from_buffer(10, 4)) == 10
    rest = loader.get_from_buffer(10, 4)
    assert len(rest) == 4 and loader.buffer_size() == 2, "of six rows four divide among four ranks"
    assert rest.batch["trial_id"].flatten().tolist() == [0, 1, 0, 1] and rest.batch["task_id"].flatten().tolist() == [
        5,
        5,
        6,
        6,
    ]
    assert collate_fn([{"tree": [1, 2]}, {"tree": [3]}])["tree"].tolist() == [[1, 2], [3]]
    with pytest.raises(SchemaError, match="row 1 has b and row 0 has a"):
        collate_fn([{"a": 1}, {"b": 1}])


def episode(policy: Any, rows: int, seed: int, success: bool) -> RolloutEpisode:
    """As `roll_out` makes it: of the last chunk one action was carried out."""
    seen = observations(rows, seed, state=8)
    draws = torch.Generator().manual_seed(seed)
    record = join([policy.act([each], temperature=1.6, generator=draws)[1] for each in seen])
    executed = np.array([policy.chunk] * (rows - 1) + [1], np.int32)
    start = Start("libero_goal/1", "train", 0, 0, group=seed)
    return RolloutEpisode(
        start, record, executed, np.zeros(rows, np.float32), success, int(executed.sum()), not success, 0, b""
    )


def test_the_rollout_batch_is_upstreams():
    policy = tiny(use_proprio=True, proprio_dim=8, norm_stats={"libero_spatial": _wide()})
    episodes = [episode(policy, 3, 0, True), episode(policy, 2, 1, False)]
    batch = rollout_batch(episodes, policy)
    slots, length = policy.slots, batch.batch["input_ids"].shape[2]
    shapes = {name: (values.dtype, list(values.shape)) for name, values in batch.batch.items()}
    assert shapes == {
        "responses": (torch.int64, [2, 3, slots]),
        "input_ids": (torch.int64, [2, 3, length]),
        "attention_mask": (torch.int64, [2, 3, length]),
        "frames": (torch.uint8, [2, 3, 1, 28, 28, 3]),
        "proprio": (torch.float32, [2, 3, 8]),
        "old_log_probs": (torch.float32, [2, 3 * slots]),
        "complete": (torch.bool, [2]),
        "finish_step": (torch.int64, [2]),
    }
    assert batch.batch["complete"].tolist() == [True, False] and batch.batch["finish_step"].tolist() == [7, 4]
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    assert torch.equal(mask, ids.ne(32000).long()) and not mask[1, 2].any() and bool((mask.diff(dim=-1) >= 0).all()), (
        "padded on the left"
    )
    done = torch.arange(3 * slots) < batch.batch["finish_step"][:, None] * policy.action_dim
    assert torch.equal(batch.batch["old_log_probs"] != 0, done)
    assert batch.non_tensor_batch["uid"].tolist() == ["0", "1"]
    # what upstream's own arithmetic makes of it is what the policy said
    rows = slice(0, 3)
    pixels = policy.pixels(batch.batch["frames"][0, rows]).flatten(1, 2)
    inputs = policy.inputs_of(ids[0, rows], pixels, mask[0, rows], batch.batch["proprio"][0, rows])
    drawn = batch.batch["responses"][0, rows].view(-1, policy.chunk, policy.action_dim)
    with torch.no_grad():
        told = policy._judge(inputs, drawn, torch.full((3,), 1.6)).log_prob.flatten()
    assert torch.allclose(torch.where(done[0], told, 0), batch.batch["old_log_probs"][0], atol=1e-5)
    wide = rollout_batch(episodes, policy, max_prompt_length=length + 5, steps=4).batch
    assert wide["input_ids"].shape == (2, 4, length + 5) and torch.equal(wide["input_ids"][:, :3, 5:], ids)
    with pytest.raises(ConfigError, match="steps=2, and an episode needs 3"):
        rollout_batch(episodes, policy, steps=2)
    with pytest.raises(MissingFieldError, match="has no 'tokens': this batch is of policies that answer in them"):
        rollout_batch([RolloutEpisode(**{**vars(episodes[0]), "record": {"actions": np.zeros(1)}})], policy)


def _wide() -> dict[str, Any]:
    action = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    return {"action": action, "proprio": {"q01": [-2.0] * 8, "q99": [2.0] * 8}}
