from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, EmptyError, UnknownNameError
from hilt.replay.sampling import sumtree
from hilt.replay.sampling.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    OrderedSelector,
    Prioritized,
    Selector,
    Uniform,
    importance_weights,
)
from hilt.replay.sampling.sumtree import SumTree
from tests.effort import rounds
from tests.replay.toy_table import chi_square_is_plausible, replay_remover, same

GOLDEN = Path(__file__).parent.parent / "golden/reverb"
REMOVERS = json.loads((GOLDEN / "removers.json").read_text())["cases"]
PRIORITIZED = json.loads((GOLDEN / "prioritized.json").read_text())["cases"]

MAKERS: dict[str, Callable[[], Any]] = {
    "Uniform": Uniform,
    "Prioritized 0": lambda: Prioritized(0),
    "Prioritized 0.5": lambda: Prioritized(0.5),
    "Prioritized 1": lambda: Prioritized(1),
    "Prioritized 2": lambda: Prioritized(2),
    "Fifo": Fifo,
    "Lifo": Lifo,
    "MinHeap": MinHeap,
    "MaxHeap": MaxHeap,
}
ORDERED = ("Fifo", "Lifo", "MinHeap", "MaxHeap")


def ints(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MAKERS[request.param]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build levels at once, so that a few keys go through all of the code."""
    monkeypatch.setattr(sumtree, "TOP", 16)
    return


# -- the same answers as Reverb (orders and max_times_sampled: also in test_limiter.py)
# -----------------------------------------------


@pytest.mark.parametrize("case", REMOVERS, ids=lambda case: case["table"]["remover"][0])
def test_removers_of_the_real_reverb(case: dict[str, Any]):
    same(replay_remover(case), case["steps"])


def test_one_changed_number_is_noticed():
    case = copy.deepcopy(REMOVERS[0])
    case["steps"][9][2][0] += 1
    with pytest.raises(AssertionError, match="call 9"):
        same(replay_remover(case), case["steps"])


@pytest.mark.parametrize(
    "case", PRIORITIZED, ids=lambda case: f"{case['exponent']}-{len(case['rounds'][0]['priorities'])}"
)
def test_probabilities_of_the_real_reverb(case: dict[str, Any]):
    """Ours and its own are the formula's to the last bits, and its counts, like ours, are plausible for them."""
    for round_ in case["rounds"]:
        keys, priorities = ints(*dict(round_["priorities"])), floats(*dict(round_["priorities"]).values())
        ours = Prioritized(case["exponent"])
        ours.insert(keys, priorities)
        sampled, probabilities = ours.sample(case["draws"], rng(len(keys)))
        weights = (
            [p ** case["exponent"] if p else 0.0 for p in priorities.tolist()]
            if priorities.any()
            else [1.0] * len(keys)
        )
        expected = np.array(weights) / math.fsum(weights)
        np.testing.assert_allclose(probabilities, expected[keys.searchsorted(sampled)], rtol=1e-15)
        real = dict(round_["probabilities"])
        np.testing.assert_allclose(list(real.values()), expected[keys.searchsorted(list(real))], rtol=1e-14)
        assert chi_square_is_plausible(np.array([count for _, count in round_["counts"]]), expected)
        assert chi_square_is_plausible((sampled[:, None] == keys).sum(axis=0), expected)


# -- against a plain model
# -------------------------------------------------------------------------------------------------------


class Model:
    """Keys as a dict and every order by sorting."""

    def __init__(self, name: str):
        self.name, _, exponent = name.partition(" ")
        self.exponent = float(exponent or 0)
        self.items: dict[int, tuple[float, int, int]] = {}  # priority, arrival, touch
        self.clock = 0

    def insert(self, keys: list[int], priorities: list[float]) -> bool:
        if len(set(keys)) < len(keys) or any(key in self.items for key in keys):
            return False
        for key, priority in zip(keys, priorities, strict=True):
            self.items[key] = (priority, self.clock, self.clock)
            self.clock += 1
        return True

    def update(self, keys: list[int], priorities: list[float]) -> bool:
        if any(key not in self.items for key in keys):
            return False
        for key, priority in zip(keys, priorities, strict=True):
            self.items[key] = (priority, self.items[key][1], self.clock)
            self.clock += 1
        return True

    def delete(self, keys: list[int]) -> bool:
        if len(set(keys)) < len(keys) or any(key not in self.items for key in keys):
            return False
        for key in keys:
            del self.items[key]
        return True

    def order(self) -> list[int]:
        rank = {
            "Fifo": lambda item: item[1],
            "Lifo": lambda item: -item[1],
            "MinHeap": lambda item: (item[0], item[2]),
            "MaxHeap": lambda item: (-item[0], item[2]),
        }[self.name]
        return sorted(self.items, key=lambda key: rank(self.items[key]))

    def probabilities(self) -> dict[int, float]:
        weights = {key: p**self.exponent if p else 0.0 for key, (p, _, _) in self.items.items()}
        if self.name == "Uniform" or not sum(weights.values()):
            weights = dict.fromkeys(self.items, 1.0)
        total = sum(weights.values())
        return {key: weight / total for key, weight in weights.items()}


def check(ours: Any, model: Model, seed: int) -> None:
    assert len(ours) == len(model.items)
    wanted = np.arange(-40, 80)
    assert ours.contains(wanted).tolist() == [key in model.items for key in wanted.tolist()]
    if not model.items:
        return
    assert next(iter(model.items)) in ours
    keys, probabilities = ours.sample(9, rng(seed))
    if model.name in ORDERED:
        order = model.order()
        assert keys.tolist() == [order[0]] * 9
        assert probabilities.tolist() == [1.0] * 9
        for n in (1, 3, len(order), len(order) + 5):
            assert ours.peek(n).tolist() == order[:n]
        assert ours.sample(1, rng())[0] == order[0]  # looking changes nothing
    else:
        expected = model.probabilities()
        for key, probability in zip(keys.tolist(), probabilities.tolist(), strict=True):
            assert probability == pytest.approx(expected[key], rel=1e-14)
            assert probability > 0
        fresh = type(ours)(*([ours.exponent] if isinstance(ours, Prioritized) else []))
        fresh.load_state(ours.state())
        assert fresh.sample(9, rng(seed))[0].tolist() == keys.tolist()  # nothing that was drawn from is out of date


KEYS = st.lists(st.integers(-30, 60), max_size=12)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("rising"), st.integers(1, 40)),
        st.tuples(st.just("insert"), KEYS),
        st.tuples(st.just("update"), st.lists(st.integers(0, 10**6), max_size=8)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 10**6), max_size=30)),
        st.tuples(st.sampled_from(["delete raw", "update raw"]), KEYS),
        st.tuples(st.just("restore"), st.none()),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("small")
def test_any_history(name: str):
    @settings(deadline=None, max_examples=rounds(15, 100))
    @given(CALLS, st.randoms(use_true_random=False))
    def run(calls: list[tuple[str, Any]], chance: Any) -> None:
        ours, model = MAKERS[name](), Model(name)
        following = 0
        for step, (call, argument) in enumerate(calls):
            known = sorted(model.items)
            if call == "clear":
                ours.clear()
                model.items.clear()
            elif call == "restore":
                state, ours = ours.state(), MAKERS[name]()
                ours.load_state(state)
            else:
                if call == "rising":
                    keys = list(range(following, following + argument))
                    following += argument
                elif call in ("insert", "delete raw", "update raw"):
                    keys = argument
                else:
                    keys = [known[number % len(known)] for number in argument] if known else []
                verb = {"rising": "insert"}.get(call, call.split()[0])
                priorities = [chance.choice([0.0, 0.25, 1.0, 1.0, 3.5]) for _ in keys]
                arguments = (keys,) if verb == "delete" else (keys, priorities)
                real = (ints(*keys),) if verb == "delete" else (ints(*keys), floats(*priorities))
                if getattr(model, verb)(*arguments):
                    getattr(ours, verb)(*real)
                else:
                    with pytest.raises(ConfigError, match=r"key -?\d+ .*(twice|already there|not among)"):
                        getattr(ours, verb)(*real)
            check(ours, model, step)

    run()


@pytest.mark.parametrize("name", MAKERS)
def test_thousands_of_keys_out_of_order(name: str):
    """Interleaved actors, random keys and eviction, at the sizes at which the index tidies up by itself."""
    ours, model = MAKERS[name](), Model(name)
    generator = rng(5)
    for turn in range(12):
        if turn % 3:
            keys = (generator.permutation(400) % 7 << 32) | (turn * 400 + np.arange(400))
        else:
            keys = np.unique(generator.integers(-(2**63), 2**63 - 1, 300))
            generator.shuffle(keys)
        priorities = generator.integers(0, 4, len(keys)).astype(np.float64)
        assert model.insert(keys.tolist(), priorities.tolist())
        if turn % 2:
            ours.insert(keys, priorities)
        else:
            for at in range(len(keys)):
                ours.insert(keys[at : at + 1], priorities[at : at + 1])
        gone = generator.choice(np.array(sorted(model.items)), len(model.items) // 3, replace=False)
        assert model.delete(gone.tolist())
        ours.delete(gone)
        changed = generator.choice(np.array(sorted(model.items)), 100)
        assert model.update(changed.tolist(), [2.0] * 100)
        ours.update(changed, np.full(100, 2.0))
        check(ours, model, turn)
    assert len(ours) > 500
    assert ours.contains(np.array(list(model.items))).all()


# -- distributions
# ---------------------------------------------------------------------------------------------------------------


def test_uniform_draws_every_key_alike():
    ours = Uniform()
    ours.insert(np.arange(100))
    ours.delete(np.arange(0, 100, 3))
    keys, probabilities = ours.sample(66_000, rng(1))
    left = np.setdiff1d(np.arange(100), np.arange(0, 100, 3))
    assert (probabilities == 1 / 66).all()
    assert chi_square_is_plausible((keys[:, None] == left).sum(axis=0), np.full(66, 1 / 66))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("size", [50, 20_000, 300_000])
def test_prioritized_draws_by_weight(exponent: float, size: int):
    """In one, two and three levels, after updates and deletes; counted by class of priority and by place."""
    generator = rng(size)
    ours = Prioritized(exponent)
    priorities = generator.choice([0.0, 0.1, 1.0, 5.0], size)
    ours.insert(np.arange(size), np.ones(size))
    ours.update(np.arange(size), priorities)
    ours.delete(np.arange(0, size, 5))
    alive = np.arange(size) % 5 != 0
    weights = np.where((priorities > 0) & alive, np.where(priorities > 0, priorities, 1) ** exponent, 0)
    keys, probabilities = ours.sample(100_000, generator)
    np.testing.assert_allclose(probabilities, weights[keys] / weights.sum(), rtol=1e-13)
    for classes in (priorities * 10, np.arange(size) * 40 // size):
        counts = np.bincount(classes.astype(int)[keys], minlength=51)
        assert chi_square_is_plausible(counts, np.bincount(classes.astype(int), weights, minlength=51) / weights.sum())


def test_the_rest_of_a_huge_priority_is_still_right():
    """Reverb's own rounding case, and worse: what is left after a sum of 1e200 has
    gone is as if it had never been there."""
    ours = Prioritized(1)
    ours.insert(ints(0), floats(1e-15))
    ours.insert(np.arange(1, 10_001), np.full(10_000, 0.3))
    ours.insert(ints(20_000), floats(1e200))
    assert (ours.sample(100, rng())[0] == 20_000).all()
    ours.delete(ints(20_000))
    assert ours.sample(5, rng())[1] == pytest.approx(0.3 / 3000, rel=1e-13)
    ours.delete(np.arange(1, 10_001))
    keys, probabilities = ours.sample(3, rng())
    assert keys.tolist() == [0, 0, 0] and probabilities.tolist() == [1.0, 1.0, 1.0]


@settings(deadline=None, max_examples=rounds(15, 100))
@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_a_tree_is_the_one_built_from_its_weights(seed: int, steps: int):
    """Bit for bit, whatever was done to it: so a restored selector draws what the first would have drawn."""
    generator = rng(seed)
    size = 70_000
    tree = SumTree(64)
    tree.grow(2**17)
    for turn in range(steps % 7):
        slots = generator.integers(0, size, steps)
        tree.set(slots, generator.random(steps) * 10.0 ** generator.integers(-200, 200, steps))
        if turn % 2:
            tree.total()
        tree.set(np.arange(turn, turn + 100), generator.random(100))
    fresh = SumTree(2**17)
    fresh.set(np.arange(size), tree.weights[:size])
    assert tree.total() == fresh.total()
    if tree.total():
        drawn = tree.draw(200, rng(seed))
        assert (drawn == fresh.draw(200, rng(seed))).all()
        assert (tree.weights[drawn] > 0).all()


@pytest.mark.parametrize("weight", [5e-324, 1e-310, 1e-20, 1.0, 1e290])
def test_a_weight_of_zero_is_never_drawn(weight: float):
    tree = SumTree(2**19)
    tree.set(np.array([3, 17, 40_000, 99_999]), np.full(4, weight))
    assert set(tree.draw(5000, rng()).tolist()) <= {3, 17, 40_000, 99_999}


class Loaded:
    """A generator that gives one number for ever."""

    def __init__(self, number: float):
        self.number = number

    def random(self, n: int) -> np.ndarray:
        return np.full(n, self.number)


@pytest.mark.parametrize("size", [64, 2**15, 2**19])
def test_a_weight_of_zero_is_not_drawn_at_the_very_ends_either(size: int):
    """0 and the largest number below 1; sums of sixteen are rounded otherwise than
    running sums, and may be above their last."""
    generator = rng(size)
    for _ in range(200):
        weights = generator.random(16)
        weights[[0, 15]] = 0
        tree = SumTree(size)
        tree.set(size // 2 // 16 * 16 + np.arange(16), weights)
        for number in (0.0, 1 - 2**-53):
            slot = tree.draw(1, Loaded(number))[0]  # type: ignore[arg-type]
            assert tree.weights[slot] > 0
            assert slot % 16 == (1 if number == 0 else 14)


# -- what is refused changes nothing
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1.0, -1e-300, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [1, 3])
def test_a_bad_priority_is_an_error_at_once(make: Callable[[], Any], bad: float, count: int):
    ours = make()
    ours.insert(ints(1, 2), floats(1, 2))
    before = ours.state()
    priorities = np.append(np.ones(count - 1), bad)
    with pytest.raises(
        ConfigError, match=rf"priority at position {count - 1} \(key {9 + count}\) is {bad}.*0 or more and finite"
    ):
        ours.insert(np.arange(10, 10 + count), priorities)
    with pytest.raises(ConfigError, match=rf"position {count - 1} \(key 2\) is {bad}"):
        ours.update(np.array([1] * (count - 1) + [2]), priorities)
    np.testing.assert_equal(ours.state(), before)


def test_keys_that_cannot_be_right(make: Callable[[], Any]):
    ours = make()
    ours.insert(ints(5, 7, 6))
    before = ours.state()
    for call, message in [
        (
            lambda: ours.insert(ints(9, 5), floats(1, 1)),
            r"key 5 at position 1 is already there; update\(\) changes its priority",
        ),
        (lambda: ours.insert(ints(5), floats(1)), r"key 5 at position 0 is already there"),
        (lambda: ours.insert(ints(9, 8, 9)), "key 9 is given twice, at positions 0 and 2; give each key once"),
        (lambda: ours.delete(ints(5, 8)), r"key 8 at position 1 is not among the 3 keys here; ask contains\(\) before"),
        (lambda: ours.delete(ints(5, 6, 5)), "key 5 is given twice, at positions 0 and 2"),
        (lambda: ours.update(ints(4), floats(1)), "key 4 at position 0 is not among the 3 keys here"),
        (
            lambda: ours.insert(ints(1, 2), floats(1)),
            r"got 2 keys and priorities of shape \(1,\); give one priority for each key",
        ),
        (lambda: ours.insert(ints(1), floats(1, 2)), r"got 1 keys and priorities of shape \(2,\)"),
        (lambda: ours.insert(np.array([1.5])), "one-dimensional array of int64, got shape .* of float64"),
        (lambda: ours.insert(np.array([[1]])), r"got shape \(1, 1\)"),
        (
            lambda: ours.insert(np.array([2**63], np.uint64)),
            "key 9223372036854775808 at position 0 does not fit into int64",
        ),
        (lambda: ours.sample(0, rng()), "0 keys were asked of a .* selector; ask for 1 or more"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
        np.testing.assert_equal(ours.state(), before)
    assert "9" not in ours and 2**70 not in ours and 5 in ours and np.int64(5) in ours
    assert repr(ours).endswith("(3 keys)")


def test_selector_of_an_empty_view(make: Callable[[], Any]):
    ours = make()
    with pytest.raises(EmptyError, match=r"4 keys were asked of a \w+ selector that holds none; insert\(\) some first"):
        ours.sample(4, rng())
    ours.insert(ints(1))
    ours.delete(ints(1))
    ours.delete(ints())
    ours.update(ints(), floats())
    ours.insert(ints(), floats())
    with pytest.raises(EmptyError):
        ours.sample(1, rng())


def test_plain_lists_are_taken(make: Callable[[], Any]):
    ours = make()
    ours.insert([3, 1])
    ours.insert([2], [0.5])
    ours.update([1, 2], [4, 4])
    ours.delete([3])
    assert ours.contains([1, 2, 3]).tolist() == [True, True, False]


@pytest.mark.parametrize(("exponent", "priority"), [(1, 1e291), (2, 1e200), (2, 1e146)])
def test_a_priority_too_large_to_sum(exponent: float, priority: float):
    ours = Prioritized(exponent)
    for keys in (ints(1), ints(1, 2)):
        with pytest.raises(
            ConfigError, match=rf"position 0 is {priority}".replace("+", r"\+") + ".*too large to be summed; scale"
        ):
            ours.insert(keys, np.full(len(keys), priority))
    assert len(ours) == 0
    ours.insert(np.arange(1000), np.full(1000, 1e290 ** (1 / exponent) * 0.999))
    assert ours.sample(1, rng())[1] == pytest.approx(1e-3)


@pytest.mark.parametrize("exponent", [-0.1, float("nan"), float("inf")])
def test_exponents(exponent: float):
    with pytest.raises(ConfigError, match=r"exponent \(.*\) must be 0 or more and finite"):
        Prioritized(exponent)


def test_a_key_given_twice_among_many_is_found_at_once():
    ours = Uniform()
    with pytest.raises(ConfigError, match="key 0 is given twice, at positions 0 and 1000000"):
        ours.insert(np.append(np.arange(1_000_000), 0))


def test_protocols(make: Callable[[], Any]):
    assert isinstance(make(), Selector)
    assert isinstance(make(), OrderedSelector) == (type(make()).__name__ in ORDERED)


# -- state
# ----------------------------------------------------------------------------------------------------------------------


def test_a_restored_selector_goes_on_alike(make: Callable[[], Any]):
    generator = rng(3)
    first = make()
    first.insert(generator.permutation(3000).astype(np.int64), generator.integers(0, 5, 3000).astype(float))
    first.update(np.arange(100), np.ones(100))
    first.delete(np.arange(500, 2500, 3))
    state = first.state()
    second = make()
    second.insert(ints(77))
    second.load_state(copy.deepcopy(state))
    np.testing.assert_equal(second.state(), state)
    assert all(isinstance(value, (np.ndarray, str, int, float)) for value in state.values())
    for turn in range(20):
        keys = np.arange(3000 + 10 * turn, 3010 + 10 * turn)
        for selector in (first, second):
            selector.insert(keys, np.full(10, turn / 4))
            selector.update(np.arange(turn, 100, 7), np.full(len(range(turn, 100, 7)), 1.0))
            selector.delete(np.arange(100 + turn * 10, 105 + turn * 10))
        for ours, theirs in zip(first.sample(50, rng(turn)), second.sample(50, rng(turn)), strict=True):
            assert (ours == theirs).all()
    np.testing.assert_equal(second.state(), first.state())
    assert len(state["keys"]) == 3000 - len(range(500, 2500, 3))  # what was given out is no window into the selector


def test_states_that_do_not_fit():
    heap = MinHeap()
    heap.insert(ints(1, 2), floats(1, 2))
    with pytest.raises(
        ConfigError, match="state of a MinHeap selector, and a MaxHeap was to take it; build the same class"
    ):
        MaxHeap().load_state(heap.state())
    with pytest.raises(
        ConfigError, match=r"saved with exponent 0\.5, and this selector has 1\.0; build it with the saved"
    ):
        Prioritized(1).load_state(Prioritized(0.5).state())
    with pytest.raises(ConfigError, match="lacks keys; give what state"):
        Fifo().load_state({"selector": "Fifo"})
    with pytest.raises(ConfigError, match=r"different lengths: keys \(2,\), priorities \(2,\), touches \(1,\)"):
        MinHeap().load_state(heap.state() | {"touches": ints(0)})
    with pytest.raises(ConfigError, match="not distinct numbers from 0 to 1"):
        MinHeap().load_state(heap.state() | {"touches": ints(0, 7)})
    with pytest.raises(ConfigError, match="key 1 is given twice"):
        heap.load_state(heap.state() | {"keys": ints(1, 1)})
    assert heap.peek(5).tolist() == [1, 2]


# -- upkeep
# ----------------------------------------------------------------------------------------------------------------------


def test_the_last_key_may_be_deleted_and_come_back(make: Callable[[], Any]):
    ours = make()
    ours.insert(np.arange(10))
    ours.delete(ints(9, 8))
    ours.insert(ints(9, 8, 10))
    assert ours.contains(np.arange(12)).tolist() == [True] * 11 + [False]
    ours.delete(ints(9))
    ours.insert(ints(9))
    assert len(ours) == 11


@pytest.mark.parametrize("size", [100, 10_000])
def test_keys_inserted_after_a_delete_are_drawn(size: int):
    ours = Prioritized(1)
    ours.insert(np.arange(size))
    ours.sample(1, rng())
    ours.delete(np.arange(10, size))
    ours.insert(ints(size), floats(1e9))
    assert (ours.sample(100, rng())[0] == size).all()


def test_the_order_of_deletes_decides_nothing(make: Callable[[], Any]):
    one, other = make(), make()
    for ours, gone in ((one, ints(3, 40, 7, 99, 12)), (other, ints(99, 12, 3, 7, 40))):
        ours.insert(np.arange(100), np.arange(100) % 7 + 1.0)
        ours.delete(gone)
    np.testing.assert_equal(one.state(), other.state())
    if isinstance(one, OrderedSelector) and not isinstance(one, Lifo):
        # a state is in order, whatever the heap looks like inside
        assert one.state()["keys"].tolist() == one.peek(100).tolist()


def test_stale_entries_of_a_heap_are_dropped():
    heap = MinHeap()
    heap.insert(np.arange(100))
    for turn in range(200):
        heap.update(np.arange(100), np.full(100, float(turn % 3)))
    assert len(heap._heap) <= 2 * 100 + 1024
    heap.delete(np.arange(99))
    assert heap.peek(3).tolist() == [99]


# -- importance weights
# ----------------------------------------------------------------------------------------------------------------


def test_importance_weights():
    p = floats(0.1, 0.4, 0.2)
    np.testing.assert_allclose(importance_weights(p, 5, 1.0, "none"), [2.0, 0.5, 1.0])
    np.testing.assert_allclose(importance_weights(p, 5, 1.0), [1.0, 0.25, 0.5])
    np.testing.assert_allclose(importance_weights(p, 5, 0.5), [1.0, 0.5, 0.5**0.5])
    assert importance_weights(p, 5, 0).tolist() == [1, 1, 1]
    assert importance_weights(floats(), 5, 1).tolist() == []


def test_importance_weights_undo_the_bias():
    ours = Prioritized(0.7)
    value = rng(0).random(200)
    ours.insert(np.arange(200), value + 0.01)
    keys, probabilities = ours.sample(400_000, rng(1))
    assert abs(value[keys].mean() - value.mean()) > 0.1
    weights = importance_weights(probabilities, len(ours), 1.0, "none")
    assert (weights * value[keys]).mean() == pytest.approx(value.mean(), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0.5, 0.0], 3, 1), ConfigError, "probability at position 1 is 0.0, expected above 0"),
        (([0.5, float("nan")], 3, 1), ConfigError, "probability at position 1 is nan"),
        (([1.5], 3, 1), ConfigError, "position 0 is 1.5"),
        (([0.5], 0, 1), ConfigError, r"size \(0\) must be 1 or more"),
        (([0.5], 3, -1), ConfigError, r"beta \(-1\) must be 0 or more"),
        (([0.5], 3, 1, "batch-max"), UnknownNameError, "no normalization named 'batch-max'; did you mean 'batch max'"),
    ],
)
def test_importance_weights_refuse(arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        importance_weights(*arguments)
