"""Samplers: which steps they draw, how often, and that they go on exactly where they were."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    DiskFullError,
    EmptyError,
    SchemaError,
    UnknownNameError,
)
from hilt.core.files import Files
from hilt.core.tree import flatten
from hilt.replay import Log, MinSize, Queue, RateLimiter, Sampler, SampleToInsertRatio, Schema
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.sampling.assembly import NStep
from hilt.replay.snapshot import Table
from tests.replay.toy_steps import check, new_log, numbers, step, trajectory, write
from tests.replay.toy_table import chi_square_is_plausible


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """Forty steps in ten episodes; the reward is the step's number."""
    with new_log(tmp_path) as made:
        for first in range(0, 40, 4):
            write(made, numbers(first, 4))
        yield made


def drawn(sampler: Sampler, n: int, **options: Any) -> list[int]:
    return sampler.sample(n, keys=["rewards"], **options)["rewards"].astype(int).tolist()


def counts(sampler: Sampler, size: int, batches: int = 100, n: int = 200) -> Any:
    return np.bincount(np.concatenate([drawn(sampler, n) for _ in range(batches)]), minlength=size)


# -- uniform
# ----------------------------------------------------------------------------------------------------------------------


def test_uniform_is_this_stream(log: Log):
    """A refactor that changes which steps a seed draws is a change that users see."""
    keys, rng = log.all().keys(), np.random.default_rng(7)
    sampler = log.all().sampler(seed=7)
    for n in (1, 64, 256):
        batch = sampler.sample(n)
        assert np.array_equal(batch.steps, keys[(rng.random(n) * 40).astype(int)])
        assert np.array_equal(batch.probabilities, np.full(n, 1 / 40))
        assert np.array_equal(batch.weights, np.ones(n))
        for i in range(n):
            number = int(batch["rewards"][i])
            assert batch.steps[i] == keys[number]
            check(batch, i, step(number))


def test_uniform_is_uniform(log: Log):
    assert chi_square_is_plausible(counts(log.all().sampler(seed=1), 40), np.full(40, 1 / 40))
    odd = log.where("rewards", lambda r: r.astype(int) % 2 == 1)
    assert chi_square_is_plausible(counts(odd.sampler(seed=2), 40), np.tile([0, 1 / 20], 20))


def test_a_torch_generator_as_seed_draws_what_randint_draws(log: Log):
    torch = pytest.importorskip("torch")
    keys, sampler, own = (
        log.all().keys(),
        log.all().sampler(seed=torch.Generator().manual_seed(5)),
        torch.Generator().manual_seed(5),
    )
    for n in (3, 100, 1):
        assert np.array_equal(
            sampler.sample(n, keys=["rewards"]).steps, keys[torch.randint(0, 40, (n,), generator=own).numpy()]
        )
    state, ahead = sampler.state(), drawn(sampler, 9)
    other = log.all().sampler(seed=torch.Generator())
    other.load_state(state)
    assert drawn(other, 9) == ahead
    with pytest.raises(
        ConfigError, match="a torch generator draws steps uniformly, with replacement and without a limit"
    ):
        log.all().sampler("fifo", seed=torch.Generator())


def test_a_generator_may_be_shared(log: Log):
    shared = np.random.default_rng(7)
    first, second, alone = log.all().sampler(seed=shared), log.all().sampler(seed=shared), log.all().sampler(seed=7)
    assert drawn(first, 5) + drawn(second, 6) == drawn(alone, 11)


def test_an_assembly_may_be_given(log: Log):
    batch = log.all().sampler(seed=0, assembly=NStep(2, 0.5, also=("policy_version",))).sample(50)
    ends = batch["n_steps"] == 1
    rewards = batch["observations"]["state"][:, 0]
    assert (
        np.array_equal(batch["rewards"], np.where(ends, rewards, 1.5 * rewards + 0.5)) and ends.any() and not ends.all()
    )
    assert np.array_equal(batch["policy_version"], batch["rewards"].astype(np.int64))


def test_seeds_and_the_global_generator(log: Log):
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    same = [drawn(log.all().sampler(seed=5), 30) for _ in range(2)]
    assert same[0] == same[1] != drawn(log.all().sampler(seed=6), 30)
    assert drawn(log.all().sampler(), 30) != drawn(log.all().sampler(), 30)
    assert np.random.get_state()[1].tolist() == before


# -- without replacement
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 40, 100])
def test_every_step_once_per_pass(log: Log, n: int):
    sampler = log.all().sampler(replace=False, seed=0)
    stream = [x for _ in range(120 // n + 1) for x in drawn(sampler, n)]
    passes = [stream[i : i + 40] for i in range(0, 120, 40)]
    assert [sorted(p) for p in passes] == [list(range(40))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_a_pass_leaves_out_what_was_evicted_and_meets_new_steps_next_time(log: Log):
    sampler = log.all().sampler(replace=False, seed=0)
    first = drawn(sampler, 10)
    log.delete(0)
    write(log, numbers(40, 2))
    rest = drawn(sampler, len(set(range(4, 40)) - set(first)))
    assert sorted(set(first) | set(rest)) == sorted(set(range(4, 40)) | (set(first) & {0, 1, 2, 3}))
    assert sorted(drawn(sampler, 38)) == list(range(4, 42))


def test_a_pass_costs_no_look_at_the_rest_of_it(log: Log, monkeypatch: pytest.MonkeyPatch):
    """Without a change to the view, a batch of a pass is a slice: not a search for every key that is still to come."""
    from hilt.replay.key_ranges import Runs

    sampler = log.all().sampler(replace=False, seed=0)
    drawn(sampler, 3)
    monkeypatch.setattr(Runs, "contains", lambda *_: pytest.fail("looked"))
    drawn(sampler, 3)


# -- prioritized
# -------------------------------------------------------------------------------------------------------------------


def test_prioritized_frequencies_and_weights(log: Log):
    sampler = log.all().sampler("prioritized", exponent=0.5, beta=0.7, seed=0)
    keys, priorities = log.all().keys(), np.arange(40.0) ** 2
    assert sampler.update_priorities(keys, priorities) == 40
    expected = np.arange(40) / np.arange(40).sum()
    assert chi_square_is_plausible(counts(sampler, 40), expected)
    batch = sampler.sample(50)
    number = batch["rewards"].astype(int)
    assert np.allclose(batch.probabilities, expected[number])
    weights = (40 * expected[number]) ** -0.7
    assert np.allclose(batch.weights, weights / weights.max())
    sampler.beta = 0.0
    assert np.array_equal(sampler.sample(5).weights, np.ones(5))


def test_new_steps_get_the_highest_priority(log: Log):
    sampler = log.all().sampler("prioritized", exponent=1.0, seed=0)
    sampler.update_priorities(log.all().keys(), np.r_[9.0, np.zeros(39)])
    (key,) = write(log, numbers(40, 1))
    assert set(drawn(sampler, 100)) == {0, 40}
    assert np.allclose(sampler.sample(20).probabilities, 0.5)
    sampler.update_priorities(np.array([key]), np.array([0.0]))
    assert set(drawn(sampler, 20)) == {0}


def test_priorities_of_what_was_evicted_are_passed_over(log: Log):
    sampler = log.all().sampler("prioritized", exponent=1.0, seed=0)
    keys = log.all().keys()
    log.delete(0)
    assert sampler.update_priorities(keys, np.r_[np.full(4, 1e6), np.ones(36)]) == 36
    assert sampler.stats()["stale_priorities"] == 4
    assert set(drawn(sampler, 300)) == set(range(4, 40))
    write(log, numbers(40, 1))  # gets the highest priority of what is there, which is 1
    assert np.allclose(sampler.sample(5).probabilities, 1 / 37)


def test_update_priorities_uses_the_last_of_duplicates(log: Log):
    sampler = log.all().sampler("prioritized", exponent=1.0, seed=0)
    key = log.all().keys()[3]
    others = np.delete(log.all().keys(), 3)
    sampler.update_priorities(others, np.zeros(39))
    sampler.update_priorities(np.array([key, key]), np.array([5.0, 0.0]))
    sampler.update_priorities(others[:1], np.array([1.0]))
    assert set(drawn(sampler, 20)) == {0}


@pytest.mark.parametrize(("bad", "said"), [(-1.0, "is -1.0"), (np.nan, "is nan"), (np.inf, "is inf")])
@pytest.mark.parametrize("evicted", [False, True])
def test_bad_priorities_are_refused_at_once_and_change_nothing(log: Log, bad: float, said: str, evicted: bool):
    sampler = log.all().sampler("prioritized", seed=0)
    keys = log.all().keys()[:3]
    if evicted:
        log.delete(0)
    before = pickle.dumps(sampler.state())
    with pytest.raises(
        ConfigError, match=f"the priority at position 1 .*{said}; a priority must be 0 or more and finite"
    ):
        sampler.update_priorities(keys, np.array([1.0, bad, 2.0]))
    assert pickle.dumps(sampler.state()) == before


def test_priorities_and_steps_that_do_not_match(log: Log):
    sampler = log.all().sampler("prioritized")
    with pytest.raises(ConfigError, match=r"expected one priority per step, got \(3,\) steps and \(2,\) priorities"):
        sampler.update_priorities(log.all().keys()[:3], np.ones(2))


@pytest.mark.parametrize("how", ["uniform", "fifo", "lifo"])
def test_update_priorities_without_priorities_is_an_error(log: Log, how: str):
    with pytest.raises(
        ConfigError, match=f"a {how} sampler has no priorities; use 'prioritized', 'min_heap' or 'max_heap'"
    ):
        log.all().sampler(how).update_priorities(log.all().keys()[:1], np.ones(1))


# -- in order
# ----------------------------------------------------------------------------------------------------------------------


def test_fifo_and_lifo(log: Log):
    assert drawn(log.all().sampler("fifo"), 5) == [0] * 5
    assert drawn(log.all().sampler("lifo"), 5) == [39] * 5
    assert drawn(log.all().sampler("fifo", max_times_sampled=1), 7) == list(range(7))
    lifo = log.all().sampler("lifo", max_times_sampled=2)
    assert drawn(lifo, 5) == [39, 39, 38, 38, 37]
    write(log, numbers(40, 1))
    assert drawn(lifo, 4) == [40, 40, 37, 36]


def test_heaps(log: Log):
    low, high = log.all().sampler("min_heap", max_times_sampled=1), log.all().sampler("max_heap", max_times_sampled=1)
    order = np.random.default_rng(0).permutation(40)
    for sampler in (low, high):
        sampler.update_priorities(log.all().keys(), order.astype(float))
    by_priority = np.argsort(order).tolist()
    assert drawn(low, 40) == by_priority
    assert drawn(high, 40) == by_priority[::-1]


def test_ordered_sampler_skips_steps_that_left_the_view(log: Log):
    fifo = log.all().sampler("fifo", max_times_sampled=1)
    assert drawn(fifo, 2) == [0, 1]
    log.delete(0)
    log.delete(1)
    assert drawn(fifo, 3) == [8, 9, 10]
    assert len(fifo) == 29


# -- max_times_sampled
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_step_is_drawn_so_often_and_no_more(log: Log, how: str, times: int):
    sampler = log.all().sampler(how, seed=0, max_times_sampled=times)
    stream = [x for _ in range(4 * times) for x in drawn(sampler, 10)]
    assert sorted(stream) == sorted(list(range(40)) * times)
    assert len(sampler) == 0
    with pytest.raises(
        EmptyError,
        match=rf"1 draws were asked for and only 0 are left \(max_times_sampled={times}\); ask for fewer or add",
    ):
        sampler.sample(1)
    write(log, numbers(40, 1))
    assert drawn(sampler, times) == [40] * times


@pytest.mark.parametrize("how", ["uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_batch_that_cannot_be_filled_changes_nothing(log: Log, how: str, times: int):
    sampler = log.all().sampler(how, seed=0, max_times_sampled=times)
    drawn(sampler, 40 * times - 6)
    before = pickle.dumps(sampler.state())
    with pytest.raises(EmptyError, match="7 draws were asked for and only 6 are left"):
        sampler.sample(7)
    assert pickle.dumps(sampler.state()) == before
    assert len(drawn(sampler, 6)) == 6


def test_max_times_is_kept_while_steps_come_and_go(log: Log):
    sampler = log.all().sampler("uniform", seed=0, max_times_sampled=2)
    seen: list[int] = []
    for i in range(20):
        seen += drawn(sampler, 6)
        write(log, numbers(40 + 4 * i, 4))
        log.delete(log.trajectories()[0])
    assert max(np.bincount(seen)) <= 2


# -- arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("unifrom", {}, "no sampler named 'unifrom'; did you mean 'uniform'"),
        (
            "fifo",
            {"replace": False},
            "replace=False is for uniform sampling, got how='fifo'; use max_times_sampled=1 instead",
        ),
        ("uniform", {"max_times_sampled": -1}, "max_times_sampled=-1: expected 0 or more"),
        ("uniform", {"max_times_sampled": 1, "replace": False}, "without episodes= and replace=False"),
        ("fifo", {"episodes": True}, "whole episodes are drawn uniformly with replacement, got how='fifo'"),
        (
            "uniform",
            {"exponent": 0.9},
            "exponent= and beta= are for prioritized sampling, got how='uniform'; leave them out",
        ),
        ("max_heap", {"beta": 0.9}, "exponent= and beta= are for prioritized sampling"),
        ("prioritized", {"exponent": -1}, r"exponent \(-1\) must be 0 or more and finite"),
        ("prioritized", {"beta": -0.1}, "beta=-0.1: expected 0"),
        ("uniform", {"discount": 0.9}, "discount= is only used with n_step=; give both"),
        ("uniform", {"n_step": 0}, "n-step: expected n >= 1 and a discount in"),
        ("uniform", {"n_step": 2, "discount": 1.5}, "n-step: expected n >= 1 and a discount in"),
        ("uniform", {"sequence_length": 0}, "sequences: expected a length of at least 1 step, got 0"),
        ("uniform", {"stack": (0, ["observations/image"])}, "stacked frames: expected at least 1 frame and 1 column"),
        (
            "uniform",
            {"n_step": 2, "episodes": True},
            "choose one of n_step, sequence_length, stack, episodes and assembly, got 2",
        ),
    ],
)
def test_options_that_cannot_work(log: Log, how: str, options: dict[str, Any], said: str):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        log.all().sampler(how, **options)


def test_sample_reports_wrong_arguments_before_drawing(log: Log):
    sampler = log.all().sampler("fifo", max_times_sampled=1)
    for call, said in [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"batch_size": 3, "keys": ["reward"]}, "no column named 'reward'; did you mean 'rewards'"),
        (
            {"batch_size": 3, "out": {"reward": np.zeros(3, np.float32)}},
            "no field of the batch for out= named 'reward'",
        ),
        (
            {"batch_size": 3, "keys": ["actions"], "out": {"rewards": np.zeros(3, np.float32)}},
            "no field of the batch for out= named 'rewards'",
        ),
        (
            {"batch_size": 3, "out": {"rewards": np.zeros(4, np.float32)}},
            r"out\['rewards'\]: expected contiguous float32 \(3,\), got float32 \(4,\)",
        ),
        ({"batch_size": 3, "out": {"rewards": np.zeros(3)}}, r"expected contiguous float32 \(3,\), got float64 \(3,\)"),
        ({"batch_size": 3, "out": {"rewards": np.zeros(6, np.float32)[::2]}}, "got float32 .* not contiguous"),
        (
            {"batch_size": 3, "out": {"rewards": [0.0] * 3}},
            r"expected float32 \(3,\), got list, which is not a numpy array",
        ),
    ]:
        with pytest.raises((ConfigError, UnknownNameError, SchemaError), match=said):
            sampler.sample(**call)
    assert drawn(sampler, 2) == [0, 1]
    assert sampler.stats() == {"sampled": 2, "batches": 1, "stale_priorities": 0}


def test_a_column_that_the_sampler_would_hide_is_refused(tmp_path: Path):
    schema = Schema.declare({"observations": (np.float32, (2,)), "rewards": (np.float32, ()), "mask": (bool, ())})
    with (
        new_log(tmp_path, schema) as log,
        pytest.raises(SchemaError, match="mask: this sampler adds a column of this name"),
    ):
        log.all().sampler(sequence_length=3)


# -- keys and out
# ------------------------------------------------------------------------------------------------------------------


def test_keys_reads_no_images(log: Log, monkeypatch: pytest.MonkeyPatch):
    gathered: list[str] = []
    real = Table.gather
    monkeypatch.setattr(
        Table, "gather", lambda self, column, *rest: (gathered.append(column.name), real(self, column, *rest))[1]
    )
    sampler = log.all().sampler(seed=0)
    batch = sampler.sample(8, keys=["observations/state", "actions"])
    assert set(flatten(batch)) == {"observations/state", "actions"}
    assert gathered == []
    assert set(flatten(sampler.sample(8, keys=["observations"]))) == {"observations/state", "observations/image"}
    assert gathered == ["observations/image"]


def test_out_takes_the_arrays(log: Log):
    out = {"rewards": np.zeros(16, np.float32), "observations": {"image": np.zeros((16, 20, 20, 3), np.uint8)}}
    sampler = log.all().sampler(seed=0)
    for _ in range(3):
        batch = sampler.sample(16, out=out)
        assert batch["rewards"] is out["rewards"]
        assert batch["observations"]["image"] is out["observations"]["image"]
        for i in range(16):
            check(batch, i, step(int(out["rewards"][i])))


def test_batches_that_are_held_are_not_overwritten(log: Log):
    """Memory of batches is used again, but not while somebody holds one, or a part of one."""
    sampler = log.all().sampler(seed=0)
    held = [sampler.sample(64) for _ in range(3)]
    parts = [sampler.sample(64)["observations"]["image"][5:9] for _ in range(20)]
    copies = [part.copy() for part in parts]
    for _ in range(30):
        sampler.sample(64)
    for batch in held:
        for i in range(64):
            check(batch, i, step(int(batch["rewards"][i])))
    assert all(np.array_equal(part, copy) for part, copy in zip(parts, copies, strict=True))


# -- state
# ----------------------------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"how": "uniform"},
    {"how": "uniform", "replace": False},
    {"how": "uniform", "max_times_sampled": 3},
    {"how": "prioritized", "exponent": 0.7, "beta": 0.5},
    {"how": "prioritized", "max_times_sampled": 2},
    {"how": "fifo", "max_times_sampled": 1},
    {"how": "lifo", "max_times_sampled": 2},
    {"how": "min_heap", "max_times_sampled": 2},
    {"how": "max_heap", "max_times_sampled": 3},
    {"how": "uniform", "episodes": True},
    {"how": "uniform", "n_step": 3},
]


def exercise(sampler: Sampler, rng: Any) -> list[Any]:
    """A few batches, with priorities in between; everything that must be the same in the end."""
    seen: list[Any] = []
    for _ in range(4):
        batch = sampler.sample(5)
        seen += [batch.steps.tolist(), batch.probabilities.tolist(), batch.weights.tolist(), batch["rewards"].tolist()]
        if sampler.how in ("prioritized", "min_heap", "max_heap"):
            sampler.update_priorities(batch.steps, rng.random(5))
    return seen


def in_another_process(path: str, states: str) -> None:
    """What the process of the next test does: opens the log, loads each state and goes on."""
    with Log.open(path) as log:
        ours = []
        for kind, state in zip(KINDS, pickle.loads(Path(states).read_bytes()), strict=True):
            sampler = log.all().sampler(**kind)
            sampler.load_state(state)
            write(log, numbers(1000, 3))
            ours.append(exercise(sampler, np.random.default_rng(1)))
            log.delete(log.trajectories()[-1])
        print(json.dumps(ours))


def test_a_sampler_goes_on_bit_for_bit_in_another_process(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=60) as log:
        for first in range(0, 80, 4):  # a quarter of them is evicted
            write(log, numbers(first, 4))
        samplers = [log.all().sampler(seed=3, **kind) for kind in KINDS]
        for sampler in samplers:
            exercise(sampler, np.random.default_rng(0))
        (tmp_path / "states").write_bytes(pickle.dumps([sampler.state() for sampler in samplers]))
        wanted = []
        for sampler in samplers:
            write(log, numbers(1000, 3))
            wanted.append(exercise(sampler, np.random.default_rng(1)))
            log.delete(log.trajectories()[-1])
    code = "import sys; from tests.replay.test_sampler import in_another_process; in_another_process(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log"), str(tmp_path / "states")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    shift = len(KINDS) << OFFSET_BITS  # the other process wrote its new trajectories behind these
    for kind, ours, their in zip(KINDS, wanted, theirs, strict=True):
        mine = [
            [k + shift if i % 4 == 0 and k >> OFFSET_BITS >= 20 else k for k in part] for i, part in enumerate(ours)
        ]
        assert mine == their, kind


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_states_are_plain_values_and_arrays(log: Log, kind: dict[str, Any]):
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(plain(v) for v in value)
        return isinstance(value, (int, float, str, bool, np.ndarray, type(None))) and not isinstance(value, np.generic)

    sampler = log.all().sampler(seed=0, **kind)
    state = sampler.state()
    assert plain(state)
    wanted = exercise(sampler, np.random.default_rng(0))
    sampler.load_state(state)  # a state is not changed by what comes after it
    assert exercise(sampler, np.random.default_rng(0)) == wanted


def test_sampler_follows_changes_of_the_log(log: Log):
    sampler = log.all().sampler("fifo", max_times_sampled=1)
    drawn(sampler, 6)
    state = sampler.state()
    log.delete(2)
    log.delete(1)
    write(log, numbers(40, 2))
    again = log.all().sampler("fifo", max_times_sampled=1)
    again.load_state(state)
    assert drawn(again, 30) == [*range(12, 40), 40, 41]


def test_the_state_of_another_kind_is_refused(log: Log):
    state = log.all().sampler("fifo", max_times_sampled=1).state()
    for how, options in [("lifo", {"max_times_sampled": 1}), ("fifo", {"max_times_sampled": 2}), ("fifo", {})]:
        said = r"this state is of a sampler with how='fifo', .*, and this one has how='.ifo', .*; make the same kind"
        with pytest.raises(ConfigError, match=said):
            log.all().sampler(how, **options).load_state(state)
    state = log.all().sampler("prioritized", exponent=0.5).state()
    with pytest.raises(ConfigError, match=r"exponent=0\.5, and this one has .*, exponent=0\.6; make the same kind"):
        log.all().sampler("prioritized").load_state(state)


def test_a_refused_state_changes_nothing(log: Log):
    sampler = log.all().sampler("prioritized", seed=1)
    before = pickle.dumps(sampler.state())
    state = log.all().sampler("prioritized", exponent=0.5, seed=2).state()
    with pytest.raises(ConfigError):
        sampler.load_state(state)
    assert pickle.dumps(sampler.state()) == before


# -- rate limiters
# -----------------------------------------------------------------------------------------------------------------


def test_min_size_limiter_blocks_and_reports(tmp_path: Path):
    with new_log(tmp_path) as log:
        limiter = MinSize(5)
        sampler = log.all().sampler(limiter=limiter)
        write(log, numbers(0, 3))
        with pytest.raises(
            DeadlineError, match="to sample 2: 3 of 5 items needed are there; insert more or lower min_size_to_sample"
        ):
            sampler.sample(2, timeout=0)
        assert sampler.stats()["sampled"] == 0
        thread = threading.Thread(target=lambda: sampler.sample(2, timeout=60))
        thread.start()
        while not limiter.stats()["sample_waiting"]:
            time.sleep(0.001)
        write(log, numbers(3, 2))
        thread.join(60)
        assert sampler.stats()["limiter"]["samples"] == 2 == sampler.stats()["sampled"]


def test_a_ratio_pushes_back_the_writer(tmp_path: Path):
    with new_log(tmp_path) as log:
        sampler = log.all().sampler(limiter=SampleToInsertRatio(2.0, 3, 4.0), seed=0)
        with log.episode() as episode:
            for n in range(5):  # as Reverb: diff in [2, 10]
                episode.append(step(n), timeout=0)
            with pytest.raises(
                DeadlineError,
                match=r"to insert 1: 5 inserts × 2 - 0 samples = 10, which 1 more insert would make 12, above",
            ):
                episode.append(step(5), timeout=0)
            for _ in range(4):
                sampler.sample(2, timeout=0)
            with pytest.raises(DeadlineError, match="below min_diff 2; insert 1 more or lower min_diff"):
                sampler.sample(2, timeout=0)
            assert len(log) == 5  # the refused step is not there
            key = episode.append(step(5), timeout=0)
            assert key == 5
        with pytest.raises(DeadlineError, match="to insert 40"):
            log.add(trajectory([numbers(0, 40)]), timeout=0)
        assert len(log) == 6
        assert sampler.stats()["limiter"]["inserts"] == 6


def test_a_filtered_view_counts_only_its_own_steps(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3, source=1))
        limiter = RateLimiter(1.0, 1, min_diff=-100, max_diff=4)
        sampler = log.by_source("human").sampler(limiter=limiter)
        assert limiter.stats()["inserts"] == 3
        for _ in range(5):
            write(log, numbers(10, 4))
        write(log, numbers(3, 1, source=1))
        assert limiter.stats()["inserts"] == 4 == len(sampler)
        with pytest.raises(DeadlineError):  # it is full, and whose step comes is only known afterwards
            log.episode().append(step(0), timeout=0)
        log.delete(0)
        assert (limiter.stats()["deletes"], limiter.stats()["size"]) == (3, 1)


def test_facts_that_change_a_view_change_its_limiter(tmp_path: Path):
    with new_log(tmp_path) as log:
        limiter = MinSize(4)
        log.successes().sampler(limiter=limiter)
        write(log, numbers(0, 4))
        write(log, numbers(10, 2))
        assert not limiter.can_sample()
        log.annotate(0, success=True)
        assert limiter.can_sample()
        log.annotate(1, success=True)
        assert limiter.stats()["size"] == 6
        log.annotate(0, success=False)
        assert (limiter.stats()["size"], limiter.can_sample()) == (2, False)


def test_evicted_steps_are_deletes(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=10) as log:
        limiter = MinSize(8)
        log.all().sampler(limiter=limiter)
        for i in range(7):
            write(log, numbers(10 * i, 3))
            assert limiter.stats()["size"] == len(log)
        log.add(trajectory([numbers(0, 4), numbers(100, 2) + numbers(200, 2)]))
        assert limiter.stats()["size"] == len(log)
        assert limiter.stats()["inserts"] == 29


def test_many_writers_are_counted_once_each(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=50) as log:
        limiter = MinSize(1)
        log.all().sampler(limiter=limiter)

        def run(first: int) -> None:
            for i in range(40):
                write(log, numbers(first + 10 * i, 3))

        threads = [threading.Thread(target=run, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert limiter.stats()["inserts"] == 480 == log.stats()["inserted"]
        assert limiter.stats()["size"] == len(log)


def test_steps_drawn_as_often_as_they_may_are_deletes(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=12) as log:
        limiter = RateLimiter(2.0, 1, min_diff=-1000, max_diff=1000)
        sampler = log.all().sampler("fifo", max_times_sampled=2, limiter=limiter)
        for i in range(3):
            write(log, numbers(4 * i, 4))
        drawn(sampler, 7)
        assert limiter.stats()["deletes"] == 3
        assert limiter.stats()["size"] == 9 == len(sampler)
        write(log, numbers(100, 4))  # evicts 0 to 3, three of which had been counted
        assert limiter.stats()["deletes"] == 4
        assert limiter.stats()["size"] == 12 == len(sampler) == len(log)
        drawn(sampler, 24)
        assert limiter.stats()["size"] == 0 == len(sampler)


def test_a_queue(tmp_path: Path):
    """First in, first out, each once, and writers wait while it is full."""
    with new_log(tmp_path) as log:
        sampler = log.all().sampler("fifo", max_times_sampled=1, limiter=Queue(3))
        with log.episode() as episode:
            for n in range(3):
                episode.append(step(n), timeout=0)
            with pytest.raises(DeadlineError, match="above max_diff 3"):
                episode.append(step(3), timeout=0)
            assert drawn(sampler, 2, timeout=0) == [0, 1]
            episode.append(step(3), timeout=0)
            assert drawn(sampler, 2, timeout=0) == [2, 3]
            with pytest.raises(DeadlineError, match="0 of 1 items needed are there"):
                sampler.sample(1, timeout=0)


def test_a_draw_that_fails_is_not_counted(tmp_path: Path):
    with new_log(tmp_path) as log:
        limiter = RateLimiter(1.0, 1, min_diff=-100, max_diff=100)
        sampler = log.all().sampler("fifo", max_times_sampled=1, limiter=limiter)
        write(log, numbers(0, 3))
        with pytest.raises(EmptyError):
            sampler.sample(4, timeout=0)
        assert (limiter.stats()["samples"], limiter.stats()["deletes"]) == (0, 0)
        assert drawn(sampler, 3, timeout=0) == [0, 1, 2]


def test_a_write_that_fails_is_not_counted(tmp_path: Path):
    with new_log(tmp_path) as log:
        limiter = MinSize(1)
        log.all().sampler(limiter=limiter)
        with pytest.raises(SchemaError):
            write(log, [step(0, rewards="x")])
        assert limiter.stats()["inserts"] == 0


def test_a_trajectory_that_is_taken_back_is_not_counted(tmp_path: Path):
    """Its first pieces were written when the disk was full."""

    class Full(Files):
        left = 10**9

        def write_all(self, fd: int, buffers: Any, offset: int) -> None:
            self.left -= sum(b.nbytes for b in buffers)
            if self.left < 0:
                raise DiskFullError("no room left")
            super().write_all(fd, buffers, offset)

    files = Full()
    with new_log(tmp_path, segment_bytes=8_000, files=files) as log:
        limiter = MinSize(1)
        sampler = log.all().sampler(limiter=limiter)
        write(log, numbers(0, 3))
        files.left = 20_000
        with pytest.raises(DiskFullError):
            log.add(trajectory([numbers(100, 40)]))
        files.left = 10**9
        assert (limiter.stats()["inserts"], limiter.stats()["deletes"]) == (3, 0)
        assert len(log) == 3 == len(sampler) == log.stats()["inserted"]
        log.add(trajectory([numbers(100, 40)]))
        assert (limiter.stats()["inserts"], limiter.stats()["size"]) == (43, 43)


def test_a_limiter_goes_on_where_it_was(tmp_path: Path):
    with new_log(tmp_path, capacity_steps=30) as log:
        limiter = SampleToInsertRatio(2.0, 3, (0.0, 40.0))
        sampler = log.all().sampler("fifo", max_times_sampled=2, limiter=limiter)
        write(log, numbers(0, 12))
        drawn(sampler, 9)
        state, stats = sampler.state(), limiter.stats()
    with Log.open(tmp_path / "log") as log:
        write(log, numbers(20, 5))
        again = SampleToInsertRatio(2.0, 3, (0.0, 40.0))
        sampler = log.all().sampler("fifo", max_times_sampled=2, limiter=again)
        sampler.load_state(state)
        assert again.stats()["inserts"] == stats["inserts"] + 5
        assert (again.stats()["samples"], again.stats()["deletes"]) == (9, 4)
        assert again.stats()["size"] == len(sampler) == 13
        log.delete(0)  # 12 steps, 4 of them counted before
        assert again.stats()["size"] == len(sampler) == 5
    with Log.open(tmp_path / "log") as log:  # the same, deleted before the state is loaded
        last = SampleToInsertRatio(2.0, 3, (0.0, 40.0))
        sampler = log.all().sampler("fifo", max_times_sampled=2, limiter=last)
        sampler.load_state(state)
        assert last.stats()["size"] == len(sampler) == 5


def test_a_view_without_a_rule_cannot_be_limited(log: Log):
    for view in (log.last(2), log.all() & log.by_source("human")):
        with pytest.raises(
            ConfigError, match=r"a rate limiter needs a view that steps enter one by one: all\(\), by_source\(\)"
        ):
            view.sampler(limiter=MinSize(1))


def test_a_limiter_belongs_to_one_sampler(log: Log):
    limiter, view = MinSize(1), log.all()
    view.sampler(limiter=limiter)
    for other, another in [(log.all(), limiter), (view, MinSize(1))]:
        with pytest.raises(ConfigError, match="this limiter, or this view, is another sampler's already; make a new"):
            other.sampler(limiter=another)


def test_closing_the_log_wakes_those_who_wait(tmp_path: Path):
    log = new_log(tmp_path)
    limiter = MinSize(5)
    sampler = log.all().sampler(limiter=limiter)
    ended: list[Exception] = []

    def run() -> None:
        try:
            sampler.sample(1)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not limiter.stats()["sample_waiting"]:
        time.sleep(0.001)
    log.close()
    thread.join(60)
    assert "closed while 1 item waited to sample" in str(ended[0])


# -- counting
# ----------------------------------------------------------------------------------------------------------------------


def test_stats(log: Log):
    sampler = log.all().sampler("prioritized", seed=0)
    sampler.sample(5)
    sampler.sample(7)
    assert sampler.stats() == {"sampled": 12, "batches": 2, "stale_priorities": 0}
    stats = log.stats()
    assert (stats["inserted"], stats["sampled"], stats["steps"], stats["trajectories"], stats["evicted"]) == (
        40,
        12,
        40,
        10,
        0,
    )
    assert stats["inserted_per_s"] > 0 and stats["sampled_per_s"] > 0
    assert len(sampler) == 40
