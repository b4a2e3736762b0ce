"""Document 004 (SimpleVLA-RL), the lengths of prompts and answers:
`max_prompt_length`, `max_response_length`, `filter_truncated`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hilt.compat.simplevla import LIBERO_Dataset, RobHFRollout, collate_fn, rollout_batch
from hilt.compat.simplevla.batch import Batch
from hilt.core.errors import ConfigError
from hilt.envs import task
from hilt.observe.metrics import read_metrics
from hilt.policies.vla.openvla import OpenVLAOptions
from tests.cli.test_train_simplevla import COMMAND, MODEL, StandIn, folder, run  # noqa: F401 - a fixture
from tests.policies.tiny_openvla import observations, tiny
from tests.seeds.test_004_simplevla import CONFIG, ROLLOUT, LiberoStandIn, episode_of, lines_of, settings_of

# --- 数据过滤与格式 ---


def test_filter_truncated_cuts_episodes_off_at_max_response_length():
    plain, cut = settings_of(), settings_of("data.filter_truncated=True", "data.max_response_length=300")
    assert plain.task_options["step_limit"] == 512 and not plain.collect.filter_truncated
    assert cut.task_options["step_limit"] == 300 and cut.collect.filter_truncated
    assert cut.algorithm.batch.log_prob_chunks_per_pass == 4 * 38, "a trajectory has 38 chunks of 8 actions"
    said = lines_of("data.filter_truncated=True", "data.max_response_length=300")
    assert (
        "an episode is cut off after 300 actions (data.max_response_length), in validation too; a "
        "group with one is dropped" in said
    )
    one = settings_of(
        "data.task_suite_name=robotwin2_lift_pot", "data.num_trials_per_task=1000", "data.filter_truncated=True"
    )
    assert one.task_options["step_limit"] == 128
    twin = ["data.task_suite_name=robotwin2_lift_pot", f"{MODEL}action_token_len=14", f"{MODEL}action_chunks_len=25"]
    assert settings_of(*twin, "data.num_trials_per_task=1000").policy_options["chunk"] == 25, (
        "its script for RoboTwin has 128 beside it"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.max_response_length=7"], "data.max_response_length=7 actions: an answer has 8. Give 8 or more"),
        (
            ["data.filter_truncated=True", "data.max_response_length=600"],
            "an episode has 512 actions. Give 512 at most",
        ),
        (
            ["data.filter_truncated=True", "data.task_suite_name=tabletop/reach"],
            "tabletop/reach has a step limit of its own. Leave",
        ),
        (["data.max_prompt_length=0"], "data.max_prompt_length=0: expected a whole number from 1 on"),
    ],
)
def test_lengths_that_could_not_take_effect_are_refused(words: list[str], expected: str):
    with pytest.raises(ConfigError, match=expected):
        settings_of(*words)


def test_max_prompt_length_refuses_longer_prompts():
    assert settings_of().policy_options["max_prompt_length"] == 256
    assert settings_of(f"{ROLLOUT}max_prompt_length=64").policy_options["max_prompt_length"] == 64
    policy = tiny(options=OpenVLAOptions(max_prompt_length=60))
    with pytest.raises(ConfigError, match=r"a prompt has \d+ tokens, and max_prompt_length=60: give \d+, or 0"):
        policy.act(observations(1))
    tiny(options=OpenVLAOptions(max_prompt_length=512)).act(observations(1))


class Limited(StandIn):
    """Ends an episode at its step limit, as LIBERO does; else after ten actions."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, done, _, info = super().step(action)
        return seen, reward, done, not done and self._steps >= self.step_limit, info


def test_a_run_drops_groups_that_were_cut_off_at_max_response_length(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(task.TASKS, "libero_goal", Limited)
    given = [*COMMAND, f"{MODEL}path={folder}", "trainer.total_training_steps=1", "data.filter_truncated=True"]
    tries = ["hilt.collect.max_sampling_attempts=2", "hilt.collect.when_exhausted=error"]
    said = run(*given, *tries, "data.max_response_length=9", "--run", tmp_path / "cut", code=1)
    assert (
        "4 groups in 2 attempts, 4 dropped (a member was truncated)" in said
        and "leave filter_truncated out, or raise" in said
    )
    run(*given, "data.max_response_length=10", "--run", tmp_path / "whole")
    (update,) = read_metrics(tmp_path / "whole", ["update"])
    assert update["dropped_truncated"] == 0 and update["used_episodes"] == 8


# --- 多模态对齐: "左侧 padding 到 `max_prompt_length`"; `input_ids`/`attention_mask`: `[B, S, max_prompt_length]` ---


def test_prompts_are_padded_on_the_left_to_max_prompt_length_and_log_probabilities_stay():
    policy = tiny()
    episodes = [episode_of(policy, 3, 0, True), episode_of(policy, 2, 1, False)]
    most = max(int(episode.record["prompt_length"].max()) for episode in episodes)
    judged = []
    for width in (most, 256):
        batch = rollout_batch(episodes, policy, width, pixel_values=True).batch
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 3, width)
        for place, episode in enumerate(episodes):
            for row, length in enumerate(episode.record["prompt_length"]):
                ids, mask = batch["input_ids"][place, row], batch["attention_mask"][place, row]
                assert ids[width - length :].tolist() == episode.record["prompt"][row, :length].tolist()
                assert bool((ids[: width - length] == 32000).all()) and mask.tolist() == [0] * (width - length) + [
                    1
                ] * int(length)
        inputs = policy.inputs_of(*(batch[name][0] for name in ("input_ids", "pixel_values", "attention_mask")))
        drawn = batch["responses"][0].view(-1, policy.chunk, policy.action_dim)
        with torch.no_grad():
            judged.append(policy._judge(inputs, drawn, torch.full((3,), 1.6)).log_prob.numpy())
        np.testing.assert_allclose(judged[-1], episodes[0].record["log_prob"], atol=1e-5)
    np.testing.assert_array_equal(*judged)
    with pytest.raises(ConfigError, match=f"max_prompt_length={most - 1}, and an episode needs {most}: give as many"):
        rollout_batch(episodes, policy, most - 1)


def test_a_rollout_pads_prompts_to_max_prompt_length_and_refuses_longer_ones_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(task.TASKS, "libero_goal", LiberoStandIn)
    policy = tiny()
    rows = Batch.from_single_dict(collate_fn([LIBERO_Dataset("libero_goal")[0]]), meta_info={"pixel_values": False})
    responses = []
    for width in (90, 256):
        one = {"num_images_in_input": 1, "use_proprio": False, "max_prompt_length": width}
        rollout = RobHFRollout(policy, OmegaConf.merge(CONFIG, one))
        made = rollout.generate_sequences(rows).batch
        assert made["input_ids"].shape == made["attention_mask"].shape == (1, 171, width)
        responses.append(made["responses"])
        seen = rollout._obs_to_input(LiberoStandIn("0").reset(options={"state": 0})[0])
        step = rollout.process_input([seen], ["push the plate"])
        assert torch.equal(step["input_ids"], made["input_ids"][:, 0]), "a loop of one's own has the same prompts"
        rollout.close()
    assert torch.equal(*responses)
    rollout.config.max_prompt_length = 40
    monkeypatch.setattr(policy, "act", lambda *_, **__: pytest.fail("it rolled out"))
    expected = r"a prompt has (\d+) tokens, and max_prompt_length=40: give at least \1\."
    for refused in (
        lambda: rollout.generate_sequences(rows),
        lambda: rollout.process_input([seen], ["push the plate"]),
    ):
        with pytest.raises(ConfigError, match=expected):
            refused()
    rollout.close()
