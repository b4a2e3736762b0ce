"""Chunks that a small VLA decides at a few knots: the arithmetic, and the protocol with every head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos.adam import Adam
from hilt.core.errors import ConfigError
from hilt.policies.knots import Knots
from hilt.policies.registry import load_policy
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.vla.episode import RolloutEpisode, Start, token_mask
from hilt.vla.footprint import blank_record

HEADS: dict[str, dict[str, Any]] = {
    "tokens": {"head": "tokens"},
    "gaussian": {"head": "gaussian"},
    "flow": {"head": "flow", "flow": Flow(steps=3)},
    "noise": {"head": "flow", "flow": Flow("noise", steps=3)},
}
SIZES: dict[str, Any] = {
    "cameras": ("full_image",), "image_size": 16, "state_dim": 2, "chunk": 7, "knots": 3, "action_dim": 2,
    "width": 16, "depth": 1, "heads": 2, "keypoints": 2,
}  # fmt: skip


def made(head: str, **more: Any) -> SmallVLA:
    return SmallVLA(SmallVLAConfig(**SIZES | HEADS[head] | more), seed=1)


def seen(rows: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {
            "full_image": random.integers(0, 256, (16, 16, 3), np.uint8),
            "state": random.normal(size=2).astype(np.float32),
            "instruction": "open",
        }
        for _ in range(rows)
    ]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# The arithmetic


@pytest.mark.parametrize(("chunk", "count"), [(2, 2), (5, 2), (7, 3), (10, 4), (10, 10), (50, 6)])
def test_a_chunk_goes_in_straight_lines_through_its_knots(chunk: int, count: int) -> None:
    knots, drawn = Knots(chunk, count), torch.randn(4, count, 3, generator=generator())
    places = np.linspace(0, chunk - 1, count)
    expected = [[np.interp(np.arange(chunk), places, row[:, i]) for i in range(3)] for row in drawn.double().numpy()]
    np.testing.assert_allclose(knots.actions(drawn).numpy(), np.swapaxes(expected, 1, 2), atol=1e-5)


@pytest.mark.parametrize(("chunk", "count"), [(5, 2), (7, 3), (10, 4), (10, 10)])
def test_each_knot_counts_from_the_first_action_that_depends_on_it(chunk: int, count: int) -> None:
    knots = Knots(chunk, count)
    for knot, first in enumerate(knots.first.tolist()):
        moved = knots.actions(torch.eye(count)[knot][None, :, None])[0, :, 0]
        assert not moved[:first].any() and moved[first] > 0
    assert knots.decides.sum() == count and knots.decides[knots.first].all()
    numbers = torch.randn(2, 5, count, 3, generator=generator())
    placed = knots.placed(numbers)
    assert placed.shape == (2, 5, chunk, 3) and torch.equal(placed[..., knots.first, :], numbers)
    assert placed.count_nonzero() == numbers.numel()


def test_what_is_imitated_is_the_nearest_chunk_by_least_squares() -> None:
    knots, random = Knots(9, 4), np.random.default_rng(0)
    actions, mask = random.normal(size=(3, 9, 2)), np.ones((3, 9), bool)
    mask[1, 5:], mask[2, 1:] = False, False
    found, share = knots.shown(torch.from_numpy(actions).float(), torch.from_numpy(mask).float())
    weights = knots.weights.double().numpy()
    for row, shown in ((0, 9), (1, 5)):
        known = share[row].numpy() > 0
        expected = np.linalg.lstsq(weights[:shown, known], actions[row, :shown], rcond=None)[0]
        ours = weights[:shown, known] @ found[row].numpy()[known]
        np.testing.assert_allclose(ours, weights[:shown, known] @ expected, atol=2e-3)
    np.testing.assert_allclose(share[0], 1)
    np.testing.assert_allclose(share[1], weights[:5].sum(0) / weights.sum(0), atol=1e-6)
    np.testing.assert_allclose(share[2], [1 / weights[:, 0].sum(), 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(found[2, 0], actions[2, 0], atol=1e-3)


def test_a_chunk_that_has_knots_is_found_again() -> None:
    knots, drawn = Knots(10, 4), torch.randn(5, 4, 3, generator=generator())
    found, share = knots.shown(knots.actions(drawn), torch.ones(5, 10))
    torch.testing.assert_close(found, drawn, atol=1e-3, rtol=0)
    torch.testing.assert_close(share, torch.ones(5, 4))


# The policy


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sample", [True, False])
def test_log_probabilities_are_of_the_knots_alone(head: str, sample: bool) -> None:
    policy = made(head)
    policy.fit(np.zeros((2, 2)), np.array([[-1.0, -2.0], [1.0, 2.0]]))
    actions, record = policy.act(seen(5), sample, 0.8, generator())
    found = policy.evaluate(record)
    assert actions.shape == record["log_prob"].shape == found.entropy.shape == (5, 7, 2)
    np.testing.assert_allclose(found.log_prob.detach().numpy(), record["log_prob"], atol=1e-6)
    assert policy.decides is not None and policy.decides.tolist() == [True, True, False, False, True, False, False]
    assert not record["log_prob"][:, ~policy.decides].any()
    assert record["log_prob"][:, policy.decides].all() == (sample or head in ("tokens", "gaussian"))
    bends = np.abs(np.diff(actions, 2, axis=1)).max((0, 2))  # in the middle of three actions
    assert bends[2] > 1e-4 and np.delete(bends, 2).max() < 1e-5


@pytest.mark.parametrize("head", HEADS)
def test_it_learns_what_is_shown(head: str) -> None:
    policy, observations = made(head), seen(6)
    lines = np.linspace([-0.8, 0.6], [0.4, -0.2], 7)
    actions = np.stack([lines * (1 - 0.3 * row % 2) for row in range(6)])
    mask = np.ones((6, 7), bool)
    mask[3, 4:] = False
    policy.fit(np.zeros((2, 2)), np.array([[-1.0, -1.0], [1.0, 1.0]]))
    trained = [parameter for name, parameter in policy.named_parameters() if "spread" not in name]
    optimizer, losses = Adam(trained, 3e-3), []
    for _ in range(60):
        loss, _ = policy.supervised_loss(observations, actions, mask, generator())
        optimizer.descend(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    if head in ("tokens", "gaussian"):
        answer, _ = policy.act(observations, sample=False)
        assert np.abs(answer - actions)[mask].mean() < 0.15


def test_what_a_success_cut_off_was_not_decided() -> None:
    policy = made("tokens")
    _, record = policy.act(seen(3), True, 1.0, generator())
    executed = np.array([7, 2, 1])
    start = Start("a/b", "train", 0, 0)
    episode = RolloutEpisode(start, record, executed, np.zeros(3, np.float32), True, 10, False, 0, b"")
    counted = token_mask(episode, 2, policy.decides)[..., 0]
    yes, no = True, False
    assert counted.tolist() == [
        [yes, yes, no, no, yes, no, no],
        [yes, yes, no, no, no, no, no],
        [yes, no, no, no, no, no, no],
    ]


def test_velocities_of_a_flow_are_compared_at_the_knots() -> None:
    policy = made("flow")
    policy.keeps_answers = True
    _, record = policy.act(seen(4), True, 1.0, generator())
    assert record["answer"].shape == (4, 3, 2)
    error = policy.flow_error(record, torch.randn(4, 2, 3, 2, generator=generator()), torch.full((4, 2), 0.5))
    assert error.shape == (4, 2, 7, 2) and policy.decides is not None
    assert not error[:, :, ~policy.decides].any() and error[:, :, policy.decides].all()


def test_its_folder_and_its_memory_are_those_of_the_knots(tmp_path: Path) -> None:
    policy = made("tokens")
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert np.array_equal(policy.act(seen(2), sample=False)[0], again.act(seen(2), sample=False)[0])
    assert policy.evaluate(blank_record(policy, 2)).log_prob.shape == (2, 7, 2)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="knots is 9 and chunk is 7: give 2 to 7, or 0 to decide each action"):
        made("tokens", knots=9)
    with pytest.raises(ConfigError, match="knots is 1 and chunk is 7: give 2 to 7"):
        made("tokens", knots=1)
    with pytest.raises(ConfigError, match=r"max_delay=2 gives the head the first actions .* knots=3"):
        made("tokens", max_delay=2)
    assert not made("flow").takes_prefix and made("flow", knots=0).takes_prefix
