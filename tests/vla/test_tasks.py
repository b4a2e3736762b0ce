"""Shards, cursors and rings, as a plan of the field writes them down."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.vla.tasks import Agenda, Ring, Solved, chosen, shards

SUITE = [f"libero_spatial/{i}" for i in range(10)]


def agenda(tasks=("a", "b"), states=10, **options):
    return Agenda(list(tasks), lambda task: states, **options)


def states(drawn):
    return [start.state for start in drawn]


def test_shards_of_nine_tasks_and_of_one():
    assert shards(range(9), 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert shards([9], 2) == [[9], []]
    with pytest.raises(ConfigError, match="ranks=0: expected at least 1"):
        shards([1], 0)


@given(st.integers(0, 20), st.integers(1, 8))
def test_each_task_is_at_exactly_one_rank(tasks, ranks):
    dealt = shards(range(tasks), ranks)
    assert sorted(task for rank in dealt for task in rank) == list(range(tasks))
    assert len(dealt) == ranks and max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert all(task % ranks == rank for rank, own in enumerate(dealt) for task in own)


def test_nine_is_task_nine():
    assert (
        chosen(9, SUITE)
        == chosen("9", SUITE)
        == chosen([9], SUITE)
        == chosen("libero_spatial/9", SUITE)
        == ["libero_spatial/9"]
    )
    assert chosen(None, SUITE) == SUITE
    assert chosen([0, "libero_spatial/3"], SUITE) == ["libero_spatial/0", "libero_spatial/3"]
    with pytest.raises(ConfigError, match="task 10 was asked for; there are the tasks 0 to 9"):
        chosen(10, SUITE)
    with pytest.raises(ConfigError, match="name one twice"):
        chosen([1, "1"], SUITE)
    with pytest.raises(UnknownNameError, match="libero_spatial/3"):
        chosen("libero_spatial/33", SUITE)


def test_a_ring_of_ten_four_at_a_time():
    ring = Ring(range(10))
    assert [ring.take(4) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_six_iterations_on_two_ranks():
    ranks = [agenda(SUITE[:9], rank=rank, ranks=2) for rank in range(2)]
    seen = []
    for _ in range(6):
        seen.append(tuple(int(one.current[0].rpartition("/")[2]) for one in ranks))
        for one in ranks:
            one.begin()
            one.draw(1, 2)
            one.end()
    assert seen == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 1), (0, 3)]


def test_group_takes_two_states_where_distinct_takes_four():
    group, distinct = agenda(["a"]), agenda(["a"], mode="distinct")
    assert states(group.draw(2, 2)) == [0, 0, 1, 1] and states(group.draw(2, 2)) == [2, 2, 3, 3]
    assert [states(distinct.draw(2, 2)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    with pytest.raises(UnknownNameError, match="distinct"):
        agenda(mode="distinkt")


def test_members_of_a_group_share_all_but_their_number():
    drawn = agenda(["a"], rank=1, ranks=3, steal=True).draw(2, 3)
    assert len({start.place for start in drawn[:3]}) == 1 and [start.member for start in drawn[:3]] == [0, 1, 2]
    assert [start.group for start in drawn] == [1, 1, 1, 4, 4, 4]
    assert drawn[0].seed != drawn[3].seed


def test_all_tasks_in_turn_over_iterations():
    one = agenda(["a", "b", "c"], tasks_at_once=0)
    seen = []
    for _ in range(2):
        one.begin()
        seen.append([start.task for start in one.draw(2, 1)])
        one.end()
    assert seen == [["a", "b"], ["c", "a"]]
    two = agenda(["a", "b", "c"], tasks_at_once=2)
    two.begin()
    assert [start.task for start in two.draw(3, 1)] == ["a", "b", "a"]
    two.end()
    assert two.current == ["c", "a"]


def test_each_task_has_its_own_ring():
    one = agenda(["a", "b"], states=3)
    for expected in ([0, 1], [0, 1], [2, 0], [2, 0]):
        one.begin()
        assert states(one.draw(2, 1)) == expected
        one.end()


def test_an_idle_rank_has_nothing_or_steals_other_states():
    assert [agenda(["a"], rank=rank, ranks=3).tasks for rank in range(3)] == [["a"], [], []]
    thieves = [agenda(["a"], rank=rank, ranks=3, steal=True, states=7) for rank in range(3)]
    drawn = [set(states(one.draw(len(one.rings["a"].numbers), 1))) for one in thieves]
    assert sorted(state for own in drawn for state in own) == list(range(7))
    assert [one.tasks for one in (agenda(["a", "b"], rank=r, ranks=3, steal=True) for r in range(3))] == [
        ["a"],
        ["b"],
        ["a"],
    ]
    assert agenda(["a", "b", "c"], rank=1, ranks=2, steal=True).tasks == ["b"], "who has work steals none"
    with pytest.raises(ConfigError, match="a has no initial state in its split 'train'"):
        agenda(["a"], states=0)


def test_a_solved_state_is_passed_over_three_times_and_then_forgotten():
    one = agenda(["a"], states=2, solved=Solved(2))
    for start in one.draw(1, 2):
        one.ended(start, True)
    assert [states(one.draw(1, 1))[0] for _ in range(5)] == [1, 1, 1, 1, 0]
    assert one.state_dict()["solved"] == {"history": {}, "skips": {}, "total": 3}
    for success in (True, False):
        one.ended(one.draw(1, 1)[0], success)
    assert one.state_dict()["solved"]["history"] == {"a:1": [1], "a:0": [0]}, "one success is not two"


def test_an_agenda_goes_on_where_its_checkpoint_was():
    def go(one, count):
        drawn = []
        for _ in range(count):
            one.begin()
            drawn += one.draw(3, 2)
            for start in drawn[-6:]:
                one.ended(start, start.state % 2 == 0)
            one.end()
        return drawn

    first, again = agenda(states=5, solved=Solved(2)), agenda(states=5, solved=Solved(2))
    go(first, 3)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert go(again, 4) == go(first, 4)
    with pytest.raises(
        ConfigError, match="rank 0 has the tasks c, and the checkpoint is of a, b: resume with the same tasks"
    ):
        agenda(["c"]).load_state_dict(first.state_dict())
