"""Document 003, RLinf's trajectory buffer, section by section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hilt.compat.rlinf import (  # noqa: E402
    Channel,
    ChunkStepResult,
    EmbodiedRolloutResult,
    Trajectory,
    TrajectoryCache,
    TrajectoryReplayBuffer,
)
from hilt.core.errors import FormatError, SchemaError  # noqa: E402
from hilt.wire.remote import TRAJECTORY  # noqa: E402
from tests.wire.pair import Pair  # noqa: E402

T, B = 4, 2


def rollout(number: int = 0, steps: int = T) -> Trajectory:
    """What the rollout worker of the document accumulates: [obs_t, obs_t+1] and a ChunkStepResult for each step."""
    result = EmbodiedRolloutResult(max_episode_length=10)
    for t in range(steps):
        states = [torch.full((B, 3), 100.0 * number + t + after) for after in (0, 1)]
        seen = [
            {"states": state, "images": torch.full((B, 4, 4, 3), t + after).byte()}
            for after, state in enumerate(states)
        ]
        result.append_step_result(
            ChunkStepResult(
                actions=torch.full((B, 7), float(t)),
                rewards=torch.full((B, 1), 100.0 * number + t),
                dones=torch.tensor([[t == steps - 1]] * B),
                prev_logprobs=torch.full((B, 7), -float(t)).bfloat16(),
                versions=torch.full((B, 1), number),
            )
        )
        result.append_transitions(*seen)
    return result.to_trajectory()


@pytest.fixture
def buffer() -> Iterator[TrajectoryReplayBuffer]:
    made = TrajectoryReplayBuffer(seed=0, sample_window_size=0)
    yield made
    made.close()


@pytest.fixture
def pair(memory_path: Path) -> Iterator[Pair]:
    made = Pair(memory_path)
    yield made
    made.close()


# Core data structures: index and metadata


@pytest.mark.parametrize("trajectory_format", ["pt", "pkl"])
def test_index_and_metadata_have_the_fields_of_the_document(tmp_path: Path, trajectory_format: str):
    """And so Storage and Async Writing: both formats, written by one thread, the index after the writes."""
    made = TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=str(tmp_path), trajectory_format=trajectory_format
    )
    made.add_trajectories([rollout(0), rollout(1)])
    made.close()
    index = json.loads((tmp_path / "trajectory_index.json").read_text())
    entries = index.get("trajectory_index", index)
    first = next(iter(entries.values()))
    assert {"uuid", "trajectory_id", "num_samples", "shape", "max_episode_length"} <= first.keys()
    assert (first["trajectory_id"], first["num_samples"], first["max_episode_length"], first["shape"][:2]) == (
        0,
        T * B,
        10,
        [T, B],
    )
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert (metadata["total_samples"], metadata["trajectory_format"], metadata["seed"]) == (
        2 * T * B,
        trajectory_format,
        0,
    )
    assert len(list(tmp_path.glob(f"*.{trajectory_format}"))) == 2


# Trajectory cache


def test_the_cache_keeps_the_newest_trajectories_flattened():
    cache = TrajectoryCache(max_size=2)
    for number in range(3):
        cache.put(number, {"rewards": torch.full((T * B, 1), float(number))})
    assert cache.get(0) is None and [cache.get(number)["rewards"].shape for number in (1, 2)] == [(T * B, 1)] * 2


# Sampling flow


def test_a_sample_has_so_many_chunks_of_the_newest_trajectories(buffer: TrajectoryReplayBuffer):
    buffer.add_trajectories([rollout(number) for number in range(5)])
    batch = buffer.sample(num_chunks=32)
    assert batch["rewards"].shape == (32, 1) and batch["curr_obs"]["states"].shape == (32, 3)
    assert torch.equal(batch["next_obs"]["states"], batch["curr_obs"]["states"] + 1), (
        "rows of one transition stay together"
    )
    assert len(set((batch["rewards"] // 100).int().flatten().tolist())) > 2
    buffer.sample_window_size = 1
    assert set((buffer.sample(8)["rewards"] // 100).int().flatten().tolist()) == {4}


# Data flow: rollout worker, channel, actor worker


def test_rollout_to_channel_to_buffer_in_one_process(buffer: TrajectoryReplayBuffer):
    channel: Channel[Trajectory] = Channel(maxsize=8, name="trajectories")
    channel.put(rollout(3))
    buffer.add_trajectories([channel.get()])
    assert (buffer.size, buffer.total_samples, buffer.trajectory_counter) == (1, T * B, 1)


def test_rollout_to_channel_to_buffer_over_the_wire(pair: Pair, buffer: TrajectoryReplayBuffer):
    server = pair.server(stores={})
    channel: Channel[Any] = Channel(8, "trajectories")
    server.register_channel("trajectories", channel)
    remote = pair.client(stores={}).channel("trajectories")

    sent = rollout(3)
    remote.put(sent, timeout=60)
    got = channel.get(timeout=60)
    assert isinstance(got, Trajectory) and (got.max_episode_length, got.model_weights_id) == (10, sent.model_weights_id)
    assert got.prev_logprobs.dtype == torch.bfloat16 and torch.equal(got.prev_logprobs, sent.prev_logprobs)
    assert got.dones.dtype == torch.bool and torch.equal(got.dones, sent.dones) and got.prev_values is None
    assert torch.equal(got.curr_obs["images"], sent.curr_obs["images"]) and got.shape == sent.shape
    buffer.add_trajectories([got])
    assert buffer.sample(4)["rewards"].shape == (4, 1)

    channel.put(sent)  # and back: an actor worker on another machine
    back = remote.get(timeout=60)
    assert isinstance(back, Trajectory) and torch.equal(back.next_obs["states"], sent.next_obs["states"])
    remote.put([rollout(1), rollout(2)], timeout=60)
    several = channel.get(timeout=60)
    assert [each.versions.max().item() for each in several] == [1, 2]
    buffer.add_trajectories(several)
    remote.put({"plain": np.arange(3)}, timeout=60)
    assert channel.get(timeout=60)["plain"].tolist() == [0, 1, 2], "other items are handed over as before"


def test_a_trajectory_that_is_none_is_refused_at_the_learner(pair: Pair):
    server = pair.server(stores={})
    channel: Channel[Any] = Channel(8, "trajectories")
    server.register_channel("trajectories", channel)
    remote = pair.client(stores={}).channel("trajectories")
    with pytest.raises(SchemaError, match="a trajectory has no field 'reward'; did you mean 'rewards'"):
        remote.put({TRAJECTORY: {"reward": np.zeros(3)}}, timeout=60)
    with pytest.raises(FormatError, match="a trajectory came as int"):
        remote.put({TRAJECTORY: 3}, timeout=60)
    assert len(channel) == 0


# Checkpoint and distributed loading; usage tips


def test_a_checkpoint_is_shared_out_over_ranks_and_needs_no_auto_save(tmp_path: Path, buffer: TrajectoryReplayBuffer):
    buffer.add_trajectories([rollout(number) for number in range(5)])
    buffer.save_checkpoint(str(tmp_path))
    whole = TrajectoryReplayBuffer(load_path=str(tmp_path))
    assert (whole.size, whole.total_samples, whole.trajectory_counter) == (5, 5 * T * B, 5)
    seen: list[int] = []
    for local_rank in range(2):
        part = TrajectoryReplayBuffer(load_path=str(tmp_path), is_distributed=True, local_rank=local_rank, world_size=2)
        seen += sorted(set((part.sample(64)["rewards"] // 100).int().flatten().tolist()))
        assert part.total_samples == part.size * T * B
        part.close()
    whole.close()
    assert sorted(seen) == [0, 1, 2, 3, 4]
