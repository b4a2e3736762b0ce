"""Document 002, a plan for distributed RLOO training, section by section, with its own code and changed imports.

Tasks by rank and in turn, initial states in a ring, exactly as many episodes as were asked for, its YAML, and its three
scenarios. The simulator is a toy of a few lines; `tests/peers/test_libero.py` has LIBERO's own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.compat import ript
from hilt.compat.ript import (
    DistributedInitialStateDataset,
    LIBEROEnvRunner,
    SmartSampler,
    compute_state_hash,
    distributed_collect_batches,
    get_distributed_tasks,
    smart_sample_init_state,
)
from hilt.core.errors import EmptyError
from hilt.distributed.ranks import Alone
from hilt.recipes.ript_run import rloo
from hilt.vla.collect import Collecting, Collector
from hilt.vla.worker import Worker
from tests.vla.test_collect import stored
from tests.vla.toy_pool import GAME, Dice, ToyPool
from tests.vla.toy_vla import config as toy_config

PLAN = """
task:
  benchmark_name: "libero_spatial"
  task_names_to_use: [0, 1, 2, 3, 4, 5, 6, 7, 8]  # 🔥 9个任务
  num_parallel_envs: 2
  rollouts_per_env: 2
  max_episode_length: 50

algo:
  rloo_batch_size: 2
  data_batch_size: 4          # 🔥 精确控制目标
  num_epochs: 1
  gradient_accumulation_steps: 1

training:
  num_train_steps: 6          # 🔥 6步测试任务轮询
"""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ript, "suite", lambda task: GAME)


def runner(tasks: Any, pool: ToyPool | None = None) -> LIBEROEnvRunner:
    made = LIBEROEnvRunner(Dice(), task_names_to_use=tasks, num_parallel_envs=2)
    made._pool = pool or ToyPool(slots=2)
    return made


def settings(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_parallel_envs": 2, "rloo_batch_size": 2, "data_batch_size": 4, "max_sampling_attempts": 5, **changes}
    )


# 目标逻辑, 1: tasks by rank


def test_nine_tasks_and_one_task_on_two_ranks():
    assert [get_distributed_tasks(range(9), rank, 2) for rank in (0, 1)] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert [get_distributed_tasks([9], rank, 2) for rank in (0, 1)] == [[9], []]


@pytest.mark.parametrize(("tasks", "ranks"), [(1, 4), (7, 3), (9, 2), (10, 1), (5, 5)])
def test_any_number_of_tasks_on_any_number_of_ranks(tasks: int, ranks: int):
    shares = [get_distributed_tasks(range(tasks), rank, ranks) for rank in range(ranks)]
    assert sorted(task for share in shares for task in share) == list(range(tasks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# 阶段1: the cursor of tasks; 测试场景1


def test_each_iteration_works_on_one_task_by_the_cursor():
    runners = [runner(get_distributed_tasks(range(9), rank, 2)) for rank in (0, 1)]
    assert all((one.task_cursor, one.current_task) == (0, None) for one in runners)
    seen = []
    for _iteration in range(6):
        seen.append(tuple(one.set_current_task_by_cursor() for one in runners))
        for one in runners:
            one.advance_task_cursor()
    # the document's text ends with (8, 7); its own rule, cursor % len(tasks), gives task
    # 3 at the second rank, which has four tasks
    assert seen == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 1), (0, 3)]
    idle = runner([])
    assert idle.set_current_task_by_cursor() is None and idle.assigned_tasks == []


# 阶段2: initial states in a ring; 测试场景2


def test_the_dataset_of_initial_states_as_it_is_written():
    init_dataset = DistributedInitialStateDataset(num_states=50, state_dim=8, rank=1, world_size=2)
    assert (init_dataset.rank, init_dataset.world_size, init_dataset.init_state_cursor, len(init_dataset.states)) == (
        1,
        2,
        0,
        50,
    )
    states = init_dataset.get_states_for_envs(num_parallel_envs=2, rloo_batch_size=2)
    assert states.shape == (4, 8) and states[:, 0].tolist() == [0, 1, 2, 3] and init_dataset.init_state_cursor == 4
    assert len(np.unique(init_dataset.sample_batch_circular(46), axis=0)) == 46 and init_dataset.init_state_cursor == 0


def test_ten_states_four_at_a_time():
    init_dataset = DistributedInitialStateDataset(num_states=10)
    drawn = [init_dataset.get_states_for_envs(2, 2)[:, 0].tolist() for _ in range(3)]
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_the_sampler_draws_different_states_for_all_environments_and_rollouts():
    sampler, init_dataset = SmartSampler(settings()), DistributedInitialStateDataset(10)
    init_states, state_hash = sampler.smart_sample_init_state(init_dataset)
    assert init_states[:, 0].tolist() == [0, 1, 2, 3]
    assert state_hash == sampler.compute_state_hash(init_states) == compute_state_hash(init_states)
    grouped, _ = smart_sample_init_state(init_dataset, 2, 2, init_state_mode="group")
    assert grouped[:, 0].tolist() == [4, 4, 5, 5], "one state for all members of a group is the option, for GRPO"


def test_rollouts_begin_in_the_states_of_the_dataset():
    one, init_dataset = runner([9]), DistributedInitialStateDataset(num_states=10, state_dim=8)
    rollouts = list(one.run_policy_in_env(env_name=9, all_init_states=init_dataset.get_states_for_envs(2, 2)))
    assert [data["start"].state for _, _, data in rollouts] == [0, 1, 2, 3]
    assert all(isinstance(success, bool) and total_reward == float(success) for success, total_reward, _ in rollouts)


# 阶段3: exactly as many episodes; 测试场景3


@pytest.mark.parametrize("data_batch_size", [1, 2, 3, 4, 5, 7, 8])
def test_a_batch_has_exactly_as_many_episodes_whatever_the_size_of_a_group(data_batch_size: int):
    config = settings(data_batch_size=data_batch_size)
    one, init_dataset = runner([9]), DistributedInitialStateDataset(10)
    one.set_current_task_by_cursor()
    episodes: list[dict[str, Any]] = []
    for iteration in range(4):
        (batch,) = distributed_collect_batches(one, None, init_dataset, SmartSampler(config), config, iteration)
        assert len(batch) == data_batch_size
        episodes += batch
    for low in range(0, len(episodes) - 1, 2):  # what a batch had no room for is at the beginning of the next one
        first, second = episodes[low : low + 2]
        assert (
            first["group_rewards"].tolist()
            == second["group_rewards"].tolist()
            == [first["total_reward"], second["total_reward"]]
        )
        assert first["start"].state == (second["start"].state - 1) % 10


def test_failed_attempts_leave_the_partial_batch_or_an_error(caplog: pytest.LogCaptureFixture):
    def collected(**changes: Any) -> list[Any]:
        one, config = (
            runner([9], ToyPool(2, lose=lambda start: start.state >= 4)),
            settings(data_batch_size=8, **changes),
        )
        one.set_current_task_by_cursor()
        return distributed_collect_batches(
            one, None, DistributedInitialStateDataset(10), SmartSampler(config), config, 0
        )

    (batch,) = collected(max_sampling_attempts=2)
    assert [episode["start"].state for episode in batch] == [0, 1, 2, 3]
    assert (
        "4 of 8 episodes after 2 attempts; 1 attempts failed" in caplog.text
        and "the simulator of the toy fell over" in caplog.text
    )
    with pytest.raises(EmptyError, match=r"4 of 8 episodes after 2 attempts(?s:.*)The last failure"):
        collected(max_sampling_attempts=2, when_exhausted="error")


def test_every_rank_logs_its_iteration_task_target_and_result(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "hilt.compat")
    config = settings()
    for rank, tasks in enumerate(([9], [])):
        one = runner(tasks)
        one.set_current_task_by_cursor()
        init_dataset = DistributedInitialStateDataset(10, rank=rank, world_size=2)
        batches = distributed_collect_batches(one, None, init_dataset, SmartSampler(config), config, 2)
        assert len(batches) == (rank == 0), "a rank without tasks has no batch, and takes part in the update"
    lines = [record.message for record in caplog.records if record.message.startswith("iteration")]
    assert lines == [
        "iteration 3, rank 0: task 9, target 4 episodes",
        "iteration 3, rank 0: task 9, collected 4 of 4 episodes",
        "iteration 3, rank 1: no task is assigned to this rank",
    ]


# 阶段4: the YAML, and the trainer itself (`hilt train rloo`)


def from_plan(folder: Path, text: str = PLAN) -> Any:
    (folder / "multi_task_distributed.yaml").write_text(text)
    return rloo(folder / "multi_task_distributed.yaml")


def trainers(collect: Collecting, tasks: list[str], ranks: int, said: list[str], pool: Any = None) -> list[Collector]:
    return [
        Collector(collect, tasks, pool or ToyPool(slots=2), GAME, rank=rank, ranks=ranks, seed=0, notify=said.append)
        for rank in range(ranks)
    ]


def test_the_plan_runs_as_its_scenarios_say_on_two_ranks(tmp_path: Path):
    plan, said = from_plan(tmp_path), list[str]()
    pool = ToyPool(slots=2)
    ranks = trainers(plan.collect, plan.tasks, 2, said, pool)
    tasks = []
    for iteration in range(plan.max_steps):
        pool.started.clear()
        found = [one.collect(Dice(), iteration) for one in ranks]
        assert [len(each.episodes) for each in found] == [4, 4], (
            "scenario 3: each iteration exactly four, no more and no less"
        )
        begun = [
            len({start.state for start in pool.started if start.task == each.episodes[0].start.task}) for each in found
        ]
        assert begun == [4, 4], "scenario 2: 2 environments x 2 rollouts have four different states"
        tasks.append(tuple(each.episodes[0].start.task for each in found))
    assert [tuple(int(task.rpartition("/")[2]) for task in pair) for pair in tasks] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
        (8, 1),
        (0, 3),
    ]
    assert said[:3] == [
        "iteration 1, rank 0: task libero_spatial/0, target 4 episodes, collected 4",
        "iteration 1, rank 1: task libero_spatial/1, target 4 episodes, collected 4",
        "iteration 2, rank 0: task libero_spatial/2, target 4 episodes, collected 4",
    ]


def test_the_debugging_yaml_with_one_task_leaves_the_second_rank_without_work(tmp_path: Path):
    plan, said = (
        from_plan(tmp_path, "task: {task_name: 9, num_parallel_envs: 2}\ntraining: {num_train_steps: 3}"),
        list[str](),
    )
    busy, idle = trainers(plan.collect, plan.tasks, 2, said)
    assert len(busy.collect(Dice(), 0).episodes) == 4 and idle.collect(Dice(), 0).episodes == []
    assert plan.tasks == ["libero_spatial/9"] and said[1] == (
        "iteration 1, rank 1: no task is assigned to this rank; it takes part in the update with zero weight"
    )


@pytest.mark.parametrize("data_batch_size", [1, 3, 5])
def test_the_trainer_takes_any_batch_size_and_resumes_in_the_middle_of_a_group(tmp_path: Path, data_batch_size: int):
    text = PLAN.replace("data_batch_size: 4", f"data_batch_size: {data_batch_size}").replace(
        "[0, 1, 2, 3, 4, 5, 6, 7, 8]", "[0]"
    )
    collect = from_plan(tmp_path, text).collect
    (through,) = trainers(collect, ["libero_spatial/0"], 1, said := list[str]())
    found = [through.collect(Dice(), iteration) for iteration in range(5)]
    stream = [episode.start for each in found for episode in each.episodes]
    assert [len(each.episodes) for each in found] == [data_batch_size] * 5
    assert [start.state for start in stream] == [number % 10 for number in range(len(stream))], (
        "each is learned from once"
    )
    for each in found:
        whole = {episode.start.group: 0 for episode in each.episodes}
        for episode in (*each.episodes, *each.beside):
            whole[episode.start.group] += 1
        assert set(whole.values()) == {2}, "every episode has its whole group to be compared with"
    assert "(1 of them carried over from the iteration before)" in "".join(said)

    (again,) = trainers(collect, ["libero_spatial/0"], 1, [])
    resumed: list[Any] = []
    for iteration in range(5):
        resumed += [episode.start for episode in again.collect(Dice(), iteration).episodes]
        state = stored(again.state_dict())
        (again,) = trainers(collect, ["libero_spatial/0"], 1, [])
        again.load_state_dict(state)
    assert resumed == stream


def test_advantages_of_a_group_that_a_batch_cuts_are_those_of_the_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = [
        "collect.data_batch_size=5",
        "collect.group_size=4",
        "algorithm.batch.trajectories_per_step=0",
        "algorithm.estimator=rloo",
    ]
    worker = Worker(toy_config(*sizes), tmp_path, Alone())
    worker.load_own([])
    scores: dict[int, dict[int, float]] = {}
    given: dict[tuple[int, int], float] = {}
    learn = worker.updater._learn

    def seen(rows: Any, *more: Any) -> Any:
        for place, episode in enumerate(rows.episodes):
            chunks = rows.of == place
            scores.setdefault(episode.start.group, {})[episode.start.member] = float(rows.rewards[chunks].sum())
            (advantage,) = {round(float(each), 5) for each in rows.advantage[chunks]}
            given[episode.start.group, episode.start.member] = advantage
        return learn(rows, *more)

    monkeypatch.setattr(worker.updater, "_learn", seen)
    for step in range(4):
        worker.collect(step)
        assert worker.update(1.0)["trajectories"] == 5
    worker.close()
    whole = {group: members for group, members in scores.items() if len(members) == 4}
    assert len(whole) == 5 == len(scores) and len({advantage for advantage in given.values()}) > 1
    for group, members in whole.items():
        for member, score in members.items():
            others = np.mean([each for other, each in members.items() if other != member])
            assert given[group, member] == pytest.approx(score - others, abs=1e-4)


@pytest.mark.parametrize("otherwise", ["partial", "error", "continue"])
def test_when_attempts_are_exhausted_the_trainer_learns_from_what_there_is(tmp_path: Path, otherwise: str):
    collect = from_plan(
        tmp_path, PLAN.replace("data_batch_size: 4", "data_batch_size: 8\n  max_sampling_attempts: 2")
    ).collect
    assert collect.when_exhausted == "partial", "as in the document; collect.when_exhausted=error is the other way"
    collect.when_exhausted, collect.retries = otherwise, 0
    said: list[str] = []
    (one,) = trainers(collect, ["libero_spatial/0"], 1, said, ToyPool(2, lose=lambda start: start.state >= 6))
    if otherwise == "error":
        with pytest.raises(
            EmptyError, match="rank 0 has 3 of 4 groups of libero_spatial/0 after max_sampling_attempts=2"
        ):
            one.collect(Dice(), 0)
        return
    found = one.collect(Dice(), 0)
    assert [episode.start.state for episode in found.episodes] == ([0, 1, 2, 3, 4, 5] if otherwise == "partial" else [])
    kept = "are learned from in this step" if otherwise == "partial" else "wait for the next step"
    assert any(f"3 of 4 groups {kept}" in line for line in said)
    assert said[-1].endswith(f"target 8 episodes, collected {len(found.episodes)}")
