"""Exactly so many episodes, in whole groups that began alike; what is dropped, lost
or left over is told, and resumed bit for bit."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.envs.pool import Pool
from hilt.policies.vla.observation_adapters import columns
from hilt.replay.tensors import save_pt
from hilt.vla.collect import Collecting, Collector
from tests.effort import need_rendering
from tests.vla.test_rollout import plain
from tests.vla.toy_pool import GAME, Dice, ToyPool

SMALL = Collecting(group_size=2, data_batch_size=4, retries=0)


def made(pool=None, tasks=("a", "b"), said=None, rank=0, ranks=1, **changes):
    tell = said.append if said is not None else (lambda text: None)
    return Collector(
        replace(SMALL, **changes), list(tasks), pool or ToyPool(), GAME, rank=rank, ranks=ranks, seed=3, notify=tell
    )


def steps(collector, count, policy=None, **options):
    return [
        [plain(episode) for episode in collector.collect(policy or Dice(), n, **options).episodes] for n in range(count)
    ]


def stored(state):
    """A checkpoint's way to the disk and back."""
    data = io.BytesIO()
    save_pt(state, data)
    data.seek(0)
    return torch.load(data, weights_only=True)


def by_state(*lost):
    return lambda start: start.state in lost


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_never_one_more_or_less_and_whole_groups_that_began_alike(data):
    size = data.draw(st.integers(1, 4))
    wanted = data.draw(st.integers(1, 4))
    at_once = data.draw(st.integers(0, 5))
    factor = 1.0 if at_once else data.draw(st.sampled_from([1.0, 1.5, 3.0]))
    lossy = ToyPool(data.draw(st.integers(1, 7)), lose=lambda start: start.state % 4 == 3 and start.member == 0)
    collector = made(
        lossy,
        group_size=size,
        data_batch_size=size * wanted,
        groups_at_once=at_once,
        oversample_factor=factor,
        dynamic_sampling=size > 1,
        max_sampling_attempts=200,
    )
    for version in range(3):
        kept = []
        got = collector.collect(Dice(), version, keep=kept.append)
        assert len(got.episodes) == size * wanted and got.figures["used_groups"] == wanted
        assert got.figures["episodes"] == len(kept)
        for low in range(0, len(got.episodes), size):
            group = got.episodes[low : low + size]
            assert len({(episode.start.place, episode.start.group, episode.first) for episode in group}) == 1
            assert [episode.start.member for episode in group] == list(range(size))
            assert size == 1 or 0 < sum(episode.success for episode in group) < size
            assert all(version - episode.version in range(3) for episode in group)


def test_one_task_a_step_and_idle_ranks():
    tasks = [str(task) for task in range(9)]
    ranks = [made(tasks=tasks, rank=rank, ranks=2, tasks_per_step=1) for rank in range(2)]
    seen = [
        tuple({episode.start.task for episode in one.collect(Dice()).episodes}.pop() for one in ranks) for _ in range(6)
    ]
    assert seen == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"), ("8", "1"), ("0", "3")]
    busy, idle = (made(tasks=["9"], rank=rank, ranks=2) for rank in range(2))
    there, none = busy.collect(Dice()), idle.collect(Dice())
    assert len(there.episodes) == 4 and none.episodes == [] and none.report == "nothing was rolled out"
    assert there.figures.keys() == none.figures.keys() and not any(none.figures.values())
    idle.load_state_dict(stored(idle.state_dict()))
    thief = made(tasks=["9"], rank=1, ranks=2, idle_ranks="steal").collect(Dice())
    owner = made(tasks=["9"], rank=0, ranks=2, idle_ranks="steal").collect(Dice())
    assert len(thief.episodes) == 4
    assert {e.start.state for e in thief.episodes} & {e.start.state for e in owner.episodes} == set()


def test_only_training_states_and_so_many_of_them():
    pool = ToyPool()
    collector = made(pool, tasks=["a"], states_per_task=3)
    steps(collector, 4)
    assert {start.state for start in pool.started} == {0, 1, 2} and {start.split for start in pool.started} == {"train"}
    with pytest.raises(ConfigError, match="states_per_task=11: a has 10 in its split 'train'"):
        made(states_per_task=11)
    with pytest.raises(UnknownNameError, match="no split of a named 'test'"):
        made(split="test")
    distinct = ToyPool()
    made(distinct, tasks=["a"], init_state_mode="distinct", groups_at_once=2).collect(Dice())
    assert sorted(start.state for start in distinct.started) == [0, 1, 2, 3]


def test_an_environment_that_does_not_begin_alike_is_found_out():
    with pytest.raises(
        SchemaError, match=r"members 0 and 1 of group 0 \(a, state 0\) did not begin with the same observation"
    ):
        made(ToyPool(broken=True)).collect(Dice())
    assert len(made(ToyPool(broken=True), same_first_frame=False).collect(Dice()).episodes) == 4
    assert len(made(ToyPool(broken=True), init_state_mode="distinct").collect(Dice()).episodes) == 4

    class Elsewhere(ToyPool):
        def start(self, slot, start):
            super().start(slot, replace(start, state=start.member))

    with pytest.raises(SchemaError, match="did not begin with the same observation"):
        made(Elsewhere()).collect(Dice())


def test_accuracy_bounds_are_inclusive():
    half = made(
        group_size=4,
        data_batch_size=8,
        filter_accuracy=True,
        accuracy_lower_bound=0.5,
        accuracy_upper_bound=0.5,
        max_sampling_attempts=50,
    )
    got = half.collect(Dice())
    shares = [np.mean([episode.success for episode in got.episodes[low : low + 4]]) for low in (0, 4)]
    assert shares == [0.5, 0.5] and got.figures["dropped_too_easy"] + got.figures["dropped_too_hard"] > 0
    sure = made(
        ToyPool(hard=lambda start: 0.0), filter_accuracy=True, accuracy_lower_bound=0.5, accuracy_upper_bound=1.0
    )
    assert sure.collect(Dice()).figures["attempts"] == 1


@pytest.mark.parametrize(
    ("hard", "words"),
    [(0.0, "all members succeeded.*The policy solves these"), (2.0, "all members failed.*solves none")],
)
def test_nothing_is_left_to_learn_from(hard, words):
    filtered = {"dynamic_sampling": True, "max_sampling_attempts": 3}
    collector = made(ToyPool(hard=lambda start: hard), rank=1, ranks=2, when_exhausted="error", **filtered)
    before = stored(collector.state_dict())
    counts = "rank 1 has 0 of 2 groups of b after max_sampling_attempts=3: 6 groups in 3 attempts, 6 dropped"
    with pytest.raises(EmptyError, match=rf"{counts} \({words}"):
        collector.collect(Dice())
    assert collector.state_dict()["agenda"] == before["agenda"], "as before the step that failed"
    said: list[str] = []
    got = made(ToyPool(hard=lambda start: hard), said=said, **filtered).collect(Dice())
    assert got.episodes == [] and got.figures["attempts"] == 3 and "Nothing is learned from in this step" in said[-1]
    assert ("begin with a better one" in said[-1]) == bool(hard), "what to do, unless all is solved"
    same = "groups_all_failed" if hard else "groups_all_succeeded"
    assert got.figures[same] == got.figures["groups"] == 6
    assert len(made(ToyPool(hard=lambda start: hard)).collect(Dice()).episodes) == 4, (
        "without the filter, such groups count"
    )


def by_turns(start):
    """Of three states, one whose members end differently."""
    return 0.0 if start.state % 3 else (0.0 if start.member else 2.0)


@pytest.mark.parametrize("greedy", [False, True])
def test_groups_of_an_incomplete_batch_wait_for_the_next_step(greedy):
    """They were thrown away with an error, or a batch of one group was learned from as if it were a whole one."""
    said: list[str] = []
    options = {"tasks": ["a"], "dynamic_sampling": True, "max_sampling_attempts": 3, "data_batch_size": 8}
    collector = made(ToyPool(hard=by_turns), said=said, **options)
    first, second = (collector.collect(Dice(), version, greedy=greedy) for version in range(2))
    assert (
        first.episodes == []
        and first.greedy == {}
        and first.figures["surplus_groups"] == 3
        and first.figures["used_groups"] == 0
    )
    assert (
        "has 3 of 4 groups of a after max_sampling_attempts=3: 8 groups" in said[0]
        and "wait for the next step" in said[0]
    )
    assert [episode.version for episode in second.episodes] == [0] * 6 + [1] * 2 and second.figures[
        "carried_groups"
    ] == 3
    assert len(second.greedy) == (4 if greedy else 0) and not said[1:]
    resumed = made(ToyPool(hard=by_turns), **options)
    resumed.load_state_dict(stored(collector.state_dict()))
    assert steps(resumed, 3) == steps(collector, 3), "what waits is in the checkpoint"


def test_a_solved_step_ends_before_its_attempts_do():
    said: list[str] = []
    collector = made(
        ToyPool(hard=lambda start: 0.0),
        said=said,
        dynamic_sampling=True,
        group_size=8,
        data_batch_size=128,
        max_sampling_attempts=20,
    )
    got = collector.collect(Dice())
    assert (
        got.figures["attempts"] == 2
        and got.figures["episodes"] == 256
        and "all members of all 32 groups of a, b succeeded" in said[0]
    )


def test_a_resumed_collector_may_have_groups_of_another_size():
    collector = made(groups_at_once=3, prefetch=True)
    collector.collect(Dice())
    collector.ahead()
    state = stored(collector.state_dict())
    other = made(groups_at_once=3, prefetch=True, group_size=4, data_batch_size=8)
    other.load_state_dict(state)
    got = other.collect(Dice())
    assert got.figures["carried_groups"] == 0 and [e.start.member for e in got.episodes] == [0, 1, 2, 3] * 2


CHANGED = {
    "group": ({"init_state_mode": "distinct"}, {}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}),
    "distinct": ({}, {"init_state_mode": "distinct"}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}),
    "states_per_task": ({}, {"states_per_task": 1}, {0}),
    "split": ({}, {"split": "eval"}, {0, 1, 2, 3, 4}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_resumed_collector_begins_where_its_settings_say_now(name):
    """What was planned ahead, and groups that were carried over, were of the settings
    before: other states, or members that differ."""
    before, after, states = CHANGED[name]
    collector, said = made(tasks=["a"], groups_at_once=3, prefetch=True, **before), []
    collector.collect(Dice())
    collector.ahead()
    state = stored(collector.state_dict())
    assert json.loads(state["planned"]) and state["surplus"]
    pool = ToyPool()
    other = made(
        pool, tasks=["a"], said=said, groups_at_once=3, prefetch=True, **(before | {"init_state_mode": "group"} | after)
    )
    other.load_state_dict(state)
    episodes = [episode for _ in range(2) for episode in other.collect(Dice()).episodes]
    assert len(said) == 1 and "rank 0: 1 groups that were carried over do not fit collect.* as it is set now" in said[0]
    assert {episode.start.split for episode in episodes} == {after.get("split", "train")}
    assert {start.state for start in pool.started} <= states and len(episodes) == 8
    for one, two in zip(episodes[::2], episodes[1::2], strict=True):
        assert (one.start.place != two.start.place) == (name == "distinct")


def test_an_idle_rank_may_begin_and_cease_to_steal_when_it_is_resumed():
    """It was refused: the checkpoint of the rank had a task, and the rank has none now, or the other way round."""
    kinds, numbers = ("zero", "steal", "zero", "steal"), []
    state = stored(made(tasks=["9"], rank=1, ranks=2, groups_at_once=3).state_dict())
    for kind in kinds:
        collector = made(tasks=["9"], rank=1, ranks=2, idle_ranks=kind, groups_at_once=3)
        collector.load_state_dict(state)
        episodes = collector.collect(Dice()).episodes
        assert len(episodes) == (4 if kind == "steal" else 0)
        numbers += [episode.start.group for episode in episodes[::2]]
        state = stored(collector.state_dict())
    assert len(set(numbers)) == len(numbers) == 4, "a group has its number alone in a run"


def test_truncated_and_ill_formed_groups_are_dropped():
    got = made(ToyPool(hard=lambda start: 0.9), filter_truncated=True, max_sampling_attempts=50).collect(Dice())
    assert not any(episode.truncated for episode in got.episodes) and got.figures["dropped_truncated"] > 0
    said: list[str] = []
    policy = Dice(lambda seen: "nan" if seen["state"][0] in (0, 2) else "")
    got = made(tasks=["a"], said=said).collect(policy)
    assert [episode.start.state for episode in got.episodes] == [1, 1, 3, 3] and got.figures["dropped_ill_formed"] == 2
    assert said == ["an ill-formed chunk in a, state 0: an action is not finite"]
    token = Dice(lambda seen: "token" if seen["state"][0] == 0 else "")
    got = made(ToyPool(hard=lambda start: 20.0), tasks=["a"], filter_format=False).collect(token)
    assert [episode.start.state for episode in got.episodes] == [0, 0, 1, 1] and got.episodes[0].ill_formed
    policy = Dice(lambda seen: "nan" if seen["state"][0] == 0 else "")  # from the first chunk on
    got = made(ToyPool(hard=lambda start: 20.0), tasks=["a"], filter_format=False).collect(policy)
    assert [episode.start.state for episode in got.episodes] == [0, 0, 1, 1] and got.figures["dropped_ill_formed"] == 0
    first = got.episodes[0]
    assert (
        first.ill_formed
        and not first.success
        and first.rows == 1
        and first.executed.tolist() == [0]
        and first.rewards.tolist() == [0]
    )
    assert all(np.isfinite(array).all() for array in first.record.values() if array.dtype.kind == "f"), (
        "no gradient becomes NaN by it"
    )
    with pytest.raises(RuntimeError, match="the dice are gone"):
        made(filter_format=False).collect(Dice(lambda seen: "raise"))
    with pytest.raises(
        EmptyError, match=r"a chunk was ill-formed\).*cannot be carried out(?s:.*)RuntimeError: the dice are gone"
    ):
        made(max_sampling_attempts=2).collect(Dice(lambda seen: "raise"))


def test_a_failed_rollout_is_an_attempt_and_is_told_with_its_traceback():
    said: list[str] = []
    got = made(ToyPool(lose=by_state(0)), tasks=["a"], said=said).collect(Dice())
    assert [episode.start.state for episode in got.episodes] == [1, 1, 2, 2]
    assert got.figures["attempts"] == 2 and got.figures["lost_episodes"] == 2 and got.figures["dropped_lost"] == 1
    assert said[0] == "rank 0: an episode of a, state 0, is lost:\nTraceback: the simulator of the toy fell over"
    with pytest.raises(
        EmptyError,
        match=r"4 dropped \(a member was lost with its simulator\), 8 episodes lost(?s:.*)Traceback: the sim",
    ):
        made(ToyPool(lose=lambda start: True), max_sampling_attempts=2).collect(Dice())
    once = iter([True])
    assert made(ToyPool(lose=lambda start: next(once, False)), retries=1).collect(Dice()).figures["attempts"] == 1


def test_the_surplus_is_used_in_the_next_step_or_thrown_away():
    collector = made(tasks=["a"], groups_at_once=3)
    first, second, third = (collector.collect(Dice(), version) for version in range(3))
    assert [episode.start.state for episode in first.episodes + second.episodes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [episode.version for episode in second.episodes] == [0, 0, 1, 1] and second.figures["carried_groups"] == 1
    assert third.figures["attempts"] == 0 and third.report == "nothing was rolled out", "two groups were left over"
    wasteful = made(tasks=["a"], groups_at_once=3, carry_over=False)
    assert [e.start.state for e in wasteful.collect(Dice()).episodes + wasteful.collect(Dice()).episodes] == [
        0,
        0,
        1,
        1,
        3,
        3,
        4,
        4,
    ]
    assert made(oversample_factor=1.5).collect(Dice()).figures["surplus_groups"] == 1


def test_a_step_that_a_surplus_fills_passes_no_task_over():
    collector = made(tasks=["a", "b", "c"], tasks_per_step=1, groups_at_once=4)
    seen = [[episode.start.task for episode in collector.collect(Dice()).episodes[::2]] for _ in range(4)]
    assert seen == [["a", "a"], ["a", "a"], ["b", "b"], ["b", "b"]]


OPTIONS = {
    "plain": {},
    "surplus": {"groups_at_once": 3, "dynamic_sampling": True, "max_sampling_attempts": 50},
    "prefetch": {"prefetch": True, "oversample_factor": 1.5, "dynamic_sampling": True, "max_sampling_attempts": 50},
    "solved": {"skip_solved": True, "states_per_task": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_goes_on_bit_for_bit_also_from_the_middle_of_a_collection(name):
    def go(collector, count):
        done = []
        for _ in range(count):
            collector.ahead()
            done += steps(collector, 1)
        return done

    whole = made(**OPTIONS[name])
    go(whole, 3)
    whole.ahead()
    state, rest = stored(whole.state_dict()), None
    resumed = made(**OPTIONS[name])
    resumed.load_state_dict(state)
    calls = iter([False] * 5 + [True])
    stopped = resumed.collect(Dice(), stop=lambda: next(calls, True))
    assert name == "surplus" or (stopped.stopped and stopped.episodes == [])
    if not stopped.stopped:
        resumed.load_state_dict(state)
    rest = go(whole, 3)
    assert go(resumed, 3) == rest
    assert str(stored(whole.state_dict())) == str(stored(resumed.state_dict()))


def test_the_surplus_may_be_stored_elsewhere():
    whole, resumed, log = made(groups_at_once=3), made(groups_at_once=3), []
    whole.collect(Dice())
    state = stored(whole.state_dict(store=lambda episode: {"number": log.append(episode) or len(log) - 1}))
    assert state["surplus"] == {"0": {"0": {"number": 0}, "1": {"number": 1}}}
    resumed.load_state_dict(state, find=lambda held: log[held["number"]])
    assert steps(resumed, 2) == steps(whole, 2)


def test_prefetch_changes_when_a_reset_begins_and_nothing_else():
    early, late = ToyPool(), ToyPool()
    ahead, usual = made(early, prefetch=True), made(late)
    for _ in range(2):
        assert steps(ahead, 1) == steps(usual, 1)
        ahead.ahead()
        usual.ahead()
    assert len(early.started) - len(late.started) == 4, "all slots"
    ahead.settle()
    assert early.idle
    got = ahead.collect(Dice())
    assert [plain(episode) for episode in got.episodes] == steps(usual, 1)[0]


def test_solved_states_are_passed_over():
    pool = ToyPool(hard=lambda start: 0.0 if start.state < 2 else 2.0)
    collector = made(pool, tasks=["a"], states_per_task=4, skip_solved=True)
    seen = [[episode.start.state for episode in collector.collect(Dice()).episodes[::2]] for _ in range(3)]
    assert seen == [[0, 1], [2, 3], [2, 3]]
    assert collector.collect(Dice()).figures["skipped_states"] == 2


def test_greedy_episodes_from_where_the_groups_began():
    kept: list = []
    got = made(ToyPool(hard=lambda start: 0.5 if start.state else 0.6)).collect(
        Dice(), 7, greedy=True, keep=kept.append
    )
    assert got.greedy.keys() == {episode.start.group for episode in got.episodes} and len(kept) == 6
    for episode in got.episodes:
        greedy = got.greedy[episode.start.group]
        assert greedy.start.place == episode.start.place and greedy.first == episode.first and greedy.version == 7
        assert greedy.success == (episode.start.state != 0)
    with pytest.raises(ConfigError, match="it needs init_state_mode=group"):
        made(init_state_mode="distinct").collect(Dice(), greedy=True)


def test_a_greedy_episode_that_is_lost_takes_its_group_with_it():
    said: list[str] = []
    lossy = ToyPool(lose=lambda start: start.member == 2 and start.state in (0, 2))
    collector = made(lossy, tasks=["a"], said=said, groups_at_once=3)
    got = collector.collect(Dice(), greedy=True)
    assert [episode.start.state for episode in got.episodes] == [1, 1, 3, 3] and len(got.greedy) == 2, (
        "others are in its place"
    )
    assert got.figures["dropped_lost"] == got.figures["lost_episodes"] == 2 and got.figures["attempts"] == 2
    assert (
        got.report.startswith("6 groups in 2 attempts, 2 dropped (a member was lost")
        and "state 0, is lost:\nTraceback" in said[0]
    )
    assert [episode.start.state for episode in collector.collect(Dice(), greedy=True).episodes] == [4, 4, 5, 5], (
        "the surplus is as it was"
    )
    with pytest.raises(
        EmptyError,
        match=r"has 0 of 2 groups of a after max_sampling_attempts=2(?s:.*)The simulator fails(?s:.*)Traceback",
    ):
        made(ToyPool(lose=lambda start: start.member == 2), tasks=["a"], max_sampling_attempts=2).collect(
            Dice(), greedy=True
        )
    calls = iter([False] * 9)
    before = made(tasks=["a"])
    assert before.collect(Dice(), greedy=True, stop=lambda: next(calls, True)).stopped


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accuracy_lower_bound": 0.1}, "accuracy_lower_bound=0.1 would do nothing: it needs filter_accuracy=true"),
        ({"filter_accuracy": True}, "filter_accuracy=True would do nothing: it needs a bound"),
        (
            {"accuracy_lower_bound": 0.9, "accuracy_upper_bound": 0.1, "filter_accuracy": True},
            "expected lower <= upper",
        ),
        (
            {"carry_over": False},
            "carry_over=False would do nothing: it needs oversample_factor above 1 or groups_at_once",
        ),
        ({"oversample_factor": 0.5}, "oversample_factor=0.5: expected a number of at least 1"),
        (
            {"groups_at_once": 2, "oversample_factor": 2.0},
            "oversample_factor=2.0 would do nothing: it needs groups_at_once=0",
        ),
        (
            {"group_size": 1, "dynamic_sampling": True},
            "dynamic_sampling=True would do nothing: it needs a group_size of at least 2",
        ),
        (
            {"groups_at_once": 1, "max_sampling_attempts": 1},
            "groups_at_once=1 in max_sampling_attempts=1 are 1 groups, and .* needs 2: raise",
        ),
        ({"init_state_mode": "destinct"}, "did you mean 'distinct'"),
        ({"idle_ranks": "join"}, "no idle_ranks named 'join'"),
        ({"temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"drawn_share": 0.0}, "drawn_share=0.0: expected a number above 0"),
        ({"drawn_share": 1.5}, "drawn_share=1.5: expected a number above 0 and at most 1"),
    ],
)
def test_what_cannot_work_or_would_do_nothing_is_refused(changes, words):
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        made(**changes)


def test_temperature_rows_at_once_and_execute_reach_the_policy():
    seen: list[tuple[int, float]] = []

    class Watched(Dice):
        def act(self, observations, sample=True, temperature=1.0, generator=None):
            seen.append((len(observations), temperature))
            return super().act(observations, sample, temperature, generator)

    got = made(ToyPool(slots=8), temperature=1.6, rows_at_once=1, execute=1).collect(Watched())
    assert set(seen) == {(1, 1.6)} and all(episode.executed.max() == 1 for episode in got.episodes)


def test_of_a_drawn_share_every_episode_that_is_collected_has_chunks_without_a_log_probability():
    found = made(ToyPool(slots=8), drawn_share=0.5).collect(Dice())
    masked = [np.isnan(episode.record["log_prob"]).mean() for episode in found.episodes]
    assert 0.2 < np.mean(masked) < 0.8
    assert all(np.isfinite(e.record["log_prob"]).all() for e in made(ToyPool(slots=8)).collect(Dice()).episodes)


def test_in_the_simulator_with_processes_or_without():
    need_rendering()

    class Arm(Dice):
        action_dim = 7

        def act(self, observations, *rest, **named):
            actions, record = super().act(observations, *rest, **named)
            return np.repeat(actions, 7, axis=-1), record

    found = []
    for workers in (0, 1):
        with Pool(workers, 2, task_options={"image_size": None, "step_limit": 8}) as pool:
            collector = Collector(SMALL, ["tabletop/reach"], pool, columns({"state": "state/tcp_pose"}), seed=3)
            found.append([plain(episode) for episode in collector.collect(Arm()).episodes])
    assert len(found[0]) == 4 and found[0] == found[1] and found[0][0][5] > 0
