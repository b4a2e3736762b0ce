"""The names of a distributed RLOO trainer's plan, and the three scenarios that it is to be tested by."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hilt.compat import ript
from hilt.compat.ript import DistributedInitialStateDataset, LIBEROEnvRunner, SmartSampler, get_distributed_tasks
from hilt.core.errors import ConfigError, EmptyError, HiltError, SchemaError, UnknownNameError
from hilt.envs.pool import Pool
from tests.vla.toy_pool import GAME, Dice, ToyPool

SIZES = {"num_parallel_envs": 2, "rloo_batch_size": 2, "data_batch_size": 4, "max_sampling_attempts": 3}


@pytest.fixture
def game(monkeypatch):
    """A runner in the toy's games instead of LIBERO's simulator."""
    monkeypatch.setattr(ript, "suite", lambda task: GAME)

    def made(pool=None, tasks=(9,), policy=None):
        runner = LIBEROEnvRunner(policy or Dice(), tasks, num_parallel_envs=2)
        runner._pool = pool or ToyPool(slots=2)
        runner.set_current_task_by_cursor()
        return runner

    return made


def collect(runner, states=None, reward=None, **changes):
    config = SimpleNamespace(**{**SIZES, **changes})
    return ript.distributed_collect_batches(
        runner, reward, states or DistributedInitialStateDataset(10), SmartSampler(config), config, 0
    )


def test_scenario_one_tasks_in_turn():
    assert [get_distributed_tasks(range(9), rank, 2) for rank in range(2)] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert [get_distributed_tasks([9], rank, 2) for rank in range(2)] == [[9], []]
    runners = [LIBEROEnvRunner(None, get_distributed_tasks(range(9), rank, 2)) for rank in range(2)]
    seen = [tuple(runner.set_current_task_by_cursor() for runner in runners)]
    seen += [tuple(runner.advance_task_cursor() for runner in runners) for _ in range(5)]
    assert seen == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 1), (0, 3)]
    idle = LIBEROEnvRunner(None, [])
    assert (
        idle.set_current_task_by_cursor() is None and idle.advance_task_cursor() is None and idle.assigned_tasks == []
    )


def test_scenario_two_states_in_a_ring():
    states = DistributedInitialStateDataset(num_states=10, state_dim=0)
    assert [states.get_states_for_envs(2, 2).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert states.init_state_cursor == 2
    other = DistributedInitialStateDataset(num_states=10, state_dim=0)
    other.load_state_dict(states.state_dict())
    assert other.sample_batch_circular(2).tolist() == [2, 3]
    own = DistributedInitialStateDataset(states=np.arange(12.0).reshape(4, 3), state_dim=3)
    assert own.sample_batch_circular(2).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match=r"states have the shape \[4, 3\]; expected \[N, 8\]"):
        DistributedInitialStateDataset(states=np.zeros((4, 3)), state_dim=8)
    with pytest.raises(ConfigError, match="rank 1 of 2 was given no initial states"):
        DistributedInitialStateDataset(0, rank=1, world_size=2)


def test_a_group_takes_two_states_where_distinct_takes_four():
    states = DistributedInitialStateDataset(10, state_dim=0)
    config = SimpleNamespace(**SIZES, init_state_mode="group")
    group, name = SmartSampler(config).smart_sample_init_state(states)
    assert group.tolist() == [0, 0, 1, 1] and states.init_state_cursor == 2
    config.init_state_mode = "distinct"
    distinct, other = SmartSampler(config).smart_sample_init_state(states)
    assert distinct.tolist() == [2, 3, 4, 5]
    assert name == SmartSampler(config).compute_state_hash(group) != other and len(name) == 64
    with pytest.raises(UnknownNameError, match="group"):
        ript.smart_sample_init_state(states, 2, 2, "groups")


def test_scenario_three_exactly_so_many(game):
    for wanted in (2, 4, 6):
        (batch,) = collect(game(), data_batch_size=wanted)
        assert len(batch) == wanted
        assert [episode["start"].state for episode in batch] == list(range(wanted))
        assert all(episode["start"].task == "libero_spatial/9" for episode in batch)
        assert all(episode["total_reward"] == episode["success"] == episode["rewards"].sum() for episode in batch)
    assert collect(game(tasks=())) == [], "a rank without tasks has no batch, and goes on"
    (judged,) = collect(game(), reward=lambda episode: 10.0 * episode["steps"])
    assert [episode["total_reward"] for episode in judged] == [10.0 * episode["steps"] for episode in judged]
    (mixed,) = collect(game(), enable_dynamic_sampling=True, max_sampling_attempts=50)
    assert len(mixed) == 4 and all(mixed[low]["success"] != mixed[low + 1]["success"] for low in (0, 2))


def test_a_failed_rollout_counts_and_is_told(game, caplog):
    (batch,) = collect(game(ToyPool(2, lose=lambda start: start.state == 0)))
    assert [episode["start"].state for episode in batch] == [4, 5, 6, 7]
    assert (
        "an attempt at task 9 failed" in caplog.text and "Traceback: the simulator of the toy fell over" in caplog.text
    )
    counts = "iteration 1, rank 0, task 9: 0 of 4 episodes after 3 attempts; 3 attempts failed"
    with pytest.raises(EmptyError, match=rf"{counts}(?s:.*)the simulator of the toy fell over"):
        collect(game(ToyPool(2, lose=lambda start: True)), when_exhausted="error")
    with pytest.raises(SchemaError, match="did not begin with the same observation"):
        collect(game(ToyPool(2, broken=True)), init_state_mode="group")
    assert len(collect(game(ToyPool(2, broken=True)))[0]) == 4
    with pytest.raises(SchemaError, match=r"initial states are float64 \[4, 3\]"):  # a mistake is no failed rollout
        collect(game(), DistributedInitialStateDataset(states=np.ones((4, 3)), state_dim=3))
    with pytest.raises(
        ConfigError, match=r"state 11 of libero_spatial/9 .* has the states 0 to 9: give .*num_states=10"
    ):
        collect(game(), DistributedInitialStateDataset(50), data_batch_size=12)
    with pytest.raises(UnknownNameError, match="no when_exhausted named 'partially'; did you mean 'partial'"):
        collect(game(), when_exhausted="partially")


def test_rollouts_come_in_the_order_of_their_states_and_may_be_left_early(game):
    pool = ToyPool(2)
    runner = game(pool)
    rollouts = runner.run_policy_in_env(9, np.array([5, 3, 8, 1]))
    success, total, data = next(rollouts)
    assert data["start"].state == 5 and total == float(success) and data["episode"].rows == len(data["executed"])
    rollouts.close()
    assert pool.idle
    assert [data["start"].state for _, _, data in runner.run_single_task("libero_goal/2", [5, 3, 8, 1])] == [5, 3, 8, 1]
    assert pool.started[-1].task == "libero_goal/2"
    with pytest.raises(SchemaError, match=r"initial states are float64 \[2, 92\]; expected their numbers"):
        next(runner.run_policy_in_env(9, np.ones((2, 92))))
    with pytest.raises(HiltError, match="a rollout of libero_spatial/9, state 5, failed:\nTraceback"):
        game(ToyPool(2, lose=lambda start: True)).run_single_task(9, [5])


def test_its_environments_stay_and_are_closed():
    runner = LIBEROEnvRunner(None, ["reach"], "tabletop", num_parallel_envs=2, max_episode_length=7, workers=0)
    pool = runner.create_parallel_envs("reach")
    assert isinstance(pool, Pool) and pool is runner.create_parallel_envs("reach") and pool.slots == 2
    assert pool.describe("tabletop/reach")["step_limit"] == 7
    runner.close()
    assert runner.create_parallel_envs() is not pool
    runner.close()
