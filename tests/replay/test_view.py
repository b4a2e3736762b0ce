"""Views: which steps they show, that they stay up to date, and what is said when they cannot."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.core.tree import ArraySpec, Spec
from hilt.replay import Log, Schema
from hilt.replay.key_ranges import key_of
from tests.replay.toy_steps import SCHEMA, check, new_log, numbers, step, trajectory, write


def rewards(view: Any) -> list[int]:
    """The numbers of a view's steps."""
    return view.log.read(view.keys(), ["rewards"])["rewards"].astype(int).tolist()


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """Three episodes: policy 0-4, human 10-12, policy and human in turns 20-25."""
    with new_log(tmp_path) as made:
        write(made, numbers(0, 5))
        write(made, numbers(10, 3, source=1))
        write(made, [step(n, source=n % 2) for n in range(20, 26)])
        yield made


def test_view_all(log: Log):
    view = log.all()
    assert rewards(view) == [0, 1, 2, 3, 4, 10, 11, 12, 20, 21, 22, 23, 24, 25]
    assert len(view) == len(log) == 14
    assert view.trajectories() == log.trajectories() == [0, 1, 2]


def test_view_by_source(log: Log):
    assert rewards(log.by_source("human")) == [10, 11, 12, 21, 23, 25]
    assert rewards(log.by_source("human", "policy")) == rewards(log.all())
    assert rewards(log.by_source("demo", "random")) == []
    with pytest.raises(UnknownNameError, match="no source named 'robot'"):
        log.by_source("robot")
    with pytest.raises(ConfigError, match="by_source\\(\\) needs at least one of policy, human, demo, random"):
        log.by_source()


def test_last(log: Log):
    assert rewards(log.last(1)) == list(range(20, 26))
    assert rewards(log.last(2)) == [10, 11, 12, *range(20, 26)]
    assert rewards(log.last(99)) == rewards(log.all()) == rewards(log.last(0))
    assert rewards(log.by_source("policy").last(2)) == [0, 1, 2, 3, 4, 20, 22, 24]
    with pytest.raises(ConfigError, match=r"last\(-1\): expected how many trajectories, 0 for all"):
        log.last(-1)


def test_only_certain_trajectories(log: Log):
    numbers = log.trajectories()
    chosen = log.all().only([numbers[0], numbers[2], 10**6])
    assert chosen.trajectories() == [numbers[0], numbers[2]] and len(log.all().only([])) == 0
    log.delete(numbers[0])
    assert np.array_equal(chosen.keys(), log.trajectory_keys(numbers[2]))


def test_where(log: Log):
    assert rewards(log.where("rewards", lambda r: r > 11)) == [12, 20, 21, 22, 23, 24, 25]
    assert rewards(log.where("observations/image", lambda x: x[:, 5, 5, 0] == 21)) == [21]
    assert rewards(log.where("actions", lambda a: a[:, 0] < 1)) == [0, 1]
    with pytest.raises(UnknownNameError, match="no column named 'reward'; did you mean 'rewards'"):
        log.where("reward", lambda r: r > 0)
    with pytest.raises(
        SchemaError, match="observations: expected one column, got a subtree; choose one of observations/state, obs"
    ):
        log.where("observations", lambda x: x)


@pytest.mark.parametrize(("rule", "got"), [(lambda r: r, "float32 \\(5,\\)"), (lambda r: True, "bool \\(\\)")])
def test_a_predicate_that_gives_no_booleans(log: Log, rule: Any, got: str):
    with pytest.raises(SchemaError, match=f"the predicate on rewards: expected booleans of shape \\(5,\\), got {got}"):
        log.where("rewards", rule)


def test_combinations(log: Log):
    human, last = log.by_source("human"), log.last(1)
    assert rewards(human & last) == [21, 23, 25]
    assert rewards(human | last) == [10, 11, 12, *range(20, 26)]
    assert rewards(last - human) == [20, 22, 24]
    assert rewards((log.all() - human - last) | (human & last)) == [0, 1, 2, 3, 4, 21, 23, 25]
    assert rewards((human | last).last(1)) == list(range(20, 26))


def test_views_of_two_logs_are_not_one(log: Log):
    other = Log.anonymous(SCHEMA)
    with pytest.raises(ConfigError, match="views of two logs cannot be one view; sample both with Mix"):
        log.all() | other.all()
    other.close()


def test_successes_by_annotation(log: Log):
    good = log.successes()
    assert rewards(good) == []
    log.annotate(1, success=True)
    log.annotate(0, success=np.True_)
    assert rewards(good) == [0, 1, 2, 3, 4, 10, 11, 12]
    log.annotate(0, success=False)
    assert rewards(good) == [10, 11, 12] == rewards(log.successes())
    with pytest.raises(UnknownNameError, match=r"no trajectory named '7'. Known: 0, 1, 2"):
        log.annotate(7, success=True)


def test_successes_by_a_column(tmp_path: Path):
    schema = Schema.declare({**dict(SCHEMA.columns), "success": ArraySpec(np.dtype(bool))})
    with new_log(tmp_path, schema) as log:
        good = log.successes()
        write(log, [step(n, success=n == 2) for n in range(4)])
        write(log, [step(n, success=False) for n in range(10, 13)])
        running = log.episode()
        running.append(step(20, success=False))
        assert rewards(good) == [0, 1, 2, 3]
        running.append(step(21, success=True))
        assert rewards(good) == [0, 1, 2, 3, 20, 21]
        log.annotate(0, success=False)  # said afterwards, by a person: that counts
        assert rewards(good) == [20, 21] == rewards(log.successes())


def test_views_follow_whatever_happens_to_the_log(log: Log):
    views = {
        "all": log.all(),
        "human": log.by_source("human"),
        "odd": log.where("rewards", lambda r: r.astype(int) % 2 == 1),
        "last": log.last(2),
        "both": log.by_source("human") & log.last(2),
    }

    def check_all() -> None:
        made_again = {
            "all": log.all(),
            "human": log.by_source("human"),
            "odd": log.where("rewards", lambda r: r.astype(int) % 2 == 1),
            "last": log.last(2),
            "both": log.by_source("human") & log.last(2),
        }
        for name, view in views.items():
            assert rewards(view) == rewards(made_again[name]), name

    log.add(trajectory([numbers(30, 3, source=1), numbers(40, 3)]))
    check_all()
    log.relabel(0, "rewards", [7, 8], first=1)
    check_all()
    log.delete(1)
    check_all()
    write(log, numbers(50, 2, source=1))
    check_all()
    log.relabel(2, "source", [1] * 6)
    check_all()


def test_an_intervention_is_in_two_views_and_stored_once(log: Log):
    before = log.stats()["bytes"]
    assert set(rewards(log.by_source("human"))) < set(rewards(log.all()))
    assert log.stats()["bytes"] == before


def test_a_window_over_a_changing_combination_never_shows_an_old_one(log: Log):
    """A cache that knew sets by their address would take a new one for the one that lay there before."""
    window = (log.all() - log.by_source("demo")).last(1)
    for i in range(40):
        write(log, numbers(1000 + 10 * i, 2))
        for _ in range(i % 4):
            (log.all() - log.by_source("demo")).keys()
        assert rewards(window) == [1000 + 10 * i, 1001 + 10 * i]


def test_view_predicate_that_fails_does_not_disturb_writers(log: Log):
    def fussy(values: Any) -> Any:
        if (values == 99).any():
            raise ZeroDivisionError("not this one")
        return values > 11

    view, other = log.where("rewards", fussy), log.all()
    keys = write(log, numbers(98, 4))
    assert rewards(other)[-4:] == [98, 99, 100, 101]
    assert [key - keys[0] for key in keys] == [0, 1, 2, 3]
    for use in (view.keys, lambda: len(view), lambda: view.sample(1), lambda: (view | other).keys()):
        with pytest.raises(
            SchemaError, match="the rule of this view failed on a new step: ZeroDivisionError\\('not this one'\\)"
        ):
            use()


def test_view_without_references_is_freed(log: Log):
    asked: list[int] = []
    log.where("rewards", lambda r: asked.append(len(r)) or r > 0)  # type: ignore[func-returns-value]
    gc.collect()
    asked.clear()
    write(log, numbers(60, 2))
    assert asked == []


def test_sampling_an_empty_view(log: Log):
    with pytest.raises(
        EmptyError, match=r"the view of .*/log holds no step yet; add some, or wait with a rate limiter \(MinSize\)"
    ):
        log.by_source("demo").sample(4)


def test_stats(log: Log):
    view = log.by_source("human")
    assert view.stats() == {"steps": 6, "trajectories": 2}
    view.sample(5)
    assert view.stats() == {"steps": 6, "trajectories": 2, "sampled": 5, "batches": 1, "stale_priorities": 0}


# -- reading steps
# -----------------------------------------------------------------------------------------------------------------


def test_reading_by_key(log: Log):
    keys = log.all().keys()[[5, 0, 5]]
    batch = log.read(keys)
    for i, expected in enumerate([step(10, source=1), step(0), step(10, source=1)]):
        check(batch, i, expected)
    assert list(log.read(keys, ["actions", "observations/state"])) == ["actions", "observations"]
    assert list(log.read(keys, "actions")) == ["actions"]
    assert log.read([])["rewards"].shape == (0,)
    with pytest.raises(UnknownNameError, match="no step named '9:3'"):
        log.read(np.array([key_of(9, 3)]))
    with pytest.raises(UnknownNameError, match="no column named 'action'; did you mean 'actions'"):
        log.read(keys, ["action"])


def test_reading_into_arrays(log: Log):
    keys = log.all().keys()[:3]
    out = {"rewards": np.zeros(3, np.float32), "observations": {"image": np.zeros((3, 20, 20, 3), np.uint8)}}
    batch = log.read(keys, out=out)
    assert batch["rewards"] is out["rewards"]
    assert batch["observations"]["image"] is out["observations"]["image"]
    assert out["observations"]["image"][2, 5, 5, 0] == 2
    with pytest.raises(SchemaError, match=r"out\['rewards'\]: expected contiguous float32 \(3,\), got float32 \(4,\)"):
        log.read(keys, out={"rewards": np.zeros(4, np.float32)})
    with pytest.raises(UnknownNameError, match="no field of the batch for out= named 'reward'"):
        log.read(keys, out={"reward": np.zeros(3, np.float32)})


def test_relabeled_steps_are_checked(log: Log):
    for column, values, said in [
        ("rewards", [[1.0]], r"rewards: expected one value of shape \(\) per step, got an array of shape \(1, 1\)"),
        ("rewards", 1.0, r"rewards: expected one value of shape \(\) per step, got an array of shape \(\)"),
        ("source", [300], "source: expected uint8, got 300, which does not fit into it"),
        ("source", [9], r"source: expected one of 0 \(policy\), .*, got 9"),
        ("rewards", [], "rewards: expected one value or more from a whole offset on, got 0 from 0 on"),
        ("source", [0.5], r"source: expected uint8 \(1,\), got float64 \(1,\)"),
        ("observations/image", [1], "no column of numbers named 'observations/image'"),
        ("reward", [1], "no column of numbers named 'reward'; did you mean 'rewards'"),
        ("rewards", [1.0] * 4, r"trajectory 1 has the steps 0 to 2, and 0 to 3 were to get new values in rewards"),
    ]:
        with pytest.raises((SchemaError, UnknownNameError), match=said):
            log.relabel(1, column, values)
    with pytest.raises(SchemaError, match="trajectory 1 has the steps 0 to 2, and 2 to 3 were to get"):
        log.relabel(1, "rewards", [1, 2], first=2)
    with pytest.raises(SchemaError, match=r"got 1 from 0\.5 on"):
        log.relabel(1, "rewards", [1.0], first=0.5)  # type: ignore[arg-type]
    assert rewards(log.all())[5:8] == [10, 11, 12]


def test_the_newest_value_counts(log: Log):
    for value in (100, 200, 300):
        log.relabel(1, "rewards", [value], first=1)
        assert rewards(log.all())[5:8] == [10, value, 12]
    with Log.open(log.path, "r") as reader:
        assert rewards(reader.all())[5:8] == [10, 300, 12]


def test_relabeled_steps_where_the_schema_forbids_nan(tmp_path: Path):
    spec = Spec({**dict(SCHEMA.columns), "rewards": ArraySpec(np.dtype(np.float32), finite=True)})
    with new_log(tmp_path, Schema.declare(spec)) as log:
        write(log, numbers(0, 2))
        with pytest.raises(SchemaError, match="rewards: expected finite numbers, got nan at"):
            log.relabel(0, "rewards", [np.nan])
        with pytest.raises(SchemaError, match="rewards: expected finite numbers, got inf"):
            write(log, [step(0, rewards=np.float32(np.inf))])
        assert log.stats()["rejected"] == 1


def test_a_closed_log(log: Log):
    view, sampler = log.all(), log.all().sampler()
    log.close()
    for use in (
        lambda: view.sample(1),
        lambda: sampler.sample(1),
        lambda: log.read(np.array([0])),
        lambda: log.add({}),
        log.refresh,
    ):
        if use == log.refresh:
            continue
        with pytest.raises((ClosedError, SchemaError)):
            use()


# -- a reader beside the writer
# ----------------------------------------------------------------------------------------------------


def test_a_reader_shows_what_the_writer_shows(tmp_path: Path):
    """Also where episodes run while others are evicted: the writer spares running ones, and so must the reader."""
    with new_log(tmp_path, capacity_steps=40, segment_bytes=30_000) as log, Log.open(tmp_path / "log", "r") as reader:
        views = {
            "all": reader.all(),
            "human": reader.by_source("human"),
            "last": reader.last(3),
            "good": reader.successes(),
        }
        oldest = log.episode()
        oldest.append(step(0))
        for i in range(30):
            write(log, numbers(100 * i, 3 + i % 4, source=i % 2))
            log.annotate(log.trajectories()[-1], success=i % 3 == 0)
            if i % 5 == 0:
                oldest.append(step(1 + i // 5))
            reader.refresh()
            assert reader.all().keys().tolist() == log.all().keys().tolist()
            mirror = {"all": log.all(), "human": log.by_source("human"), "last": log.last(3), "good": log.successes()}
            for name, view in views.items():
                assert rewards(view) == rewards(mirror[name]), name
        assert log.stats()["evicted"] > 50
        assert reader.stats()["steps"] == log.stats()["steps"]
