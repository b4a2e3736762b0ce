"""Mixes: exact shares, whatever the ratios."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, EmptyError, SchemaError
from hilt.core.tree import flatten
from hilt.replay import Log, Mix, concat_batches
from tests.effort import rounds
from tests.replay.toy_steps import new_log, numbers, write


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sources by their numbers: policy 0-49, human 100-149, demo 200-249; nothing at random."""
    with new_log(tmp_path_factory.mktemp("mix")) as made:
        for source in range(3):
            write(made, numbers(100 * source, 50, source=source))
        yield made


def sources(log: Log, *names: str, **options: Any) -> dict[str, Any]:
    return {name: log.by_source(name).sampler(seed=i, **options) for i, name in enumerate(names)}


def origin(batch: Any) -> list[int]:
    return (batch["rewards"] // 100).astype(int).tolist()


def largest_remainder(batch_size: int, ratios: list[float]) -> list[int]:
    """The textbook rule, in exact arithmetic; of equal remainders the first gets one more."""
    exact = [batch_size * Fraction(r) / sum(map(Fraction, ratios)) for r in ratios]
    counts = [int(e) for e in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: batch_size - sum(counts)]:
        counts[i] += 1
    return counts


@settings(max_examples=rounds(50, 1000), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 300),
    st.lists(
        st.one_of(st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.7, 1.0, 2.0]), st.floats(0, 1e6)),
        min_size=3,
        max_size=3,
    ).filter(any),
)
def test_counts_are_exact(log: Log, batch_size: int, ratios: list[float]):
    names = ["policy", "human", "demo"]
    mix = Mix(sources(log, *names), dict(zip(names, ratios, strict=True)))
    counts = mix.counts(batch_size)
    assert sum(counts.values()) == batch_size
    assert list(counts.values()) == largest_remainder(batch_size, ratios)
    batch = mix.sample(batch_size, keys=["rewards"])
    assert origin(batch) == [0] * counts["policy"] + [1] * counts["human"] + [2] * counts["demo"]
    assert batch.counts == counts


def test_half_and_half_by_default(log: Log):
    mix = Mix(sources(log, "policy", "demo"))
    batch = mix.sample(256)
    assert origin(batch) == [0] * 128 + [2] * 128
    assert mix.counts(255) == {"policy": 128, "demo": 127}  # the first of equals
    assert Mix(sources(log, "policy", "human", "demo")).counts(256) == {"policy": 86, "human": 85, "demo": 85}


def test_the_order_is_that_of_the_sources(log: Log):
    mix = Mix(sources(log, "policy", "demo"), {"demo": 1, "policy": 1})
    assert mix.counts(3) == {"policy": 2, "demo": 1}
    assert list(mix.counts(3)) == ["policy", "demo"]


def test_views_are_sources_too(log: Log):
    assert (
        origin(Mix({"online": log.by_source("policy"), "demo": log.by_source("demo")}).sample(10)) == [0] * 5 + [2] * 5
    )


def test_the_parts_are_what_the_samplers_give_alone(log: Log):
    batch = Mix(sources(log, "policy", "demo")).sample(20)
    alone = [sampler.sample(10) for sampler in sources(log, "policy", "demo").values()]
    for path, values in flatten(batch).items():
        assert np.array_equal(values, np.concatenate([flatten(part)[path] for part in alone]))
    for name in ("steps", "probabilities", "weights"):
        assert np.array_equal(getattr(batch, name), np.concatenate([getattr(part, name) for part in alone]))


def test_one_source(log: Log):
    batch = Mix(sources(log, "human")).sample(4)
    assert origin(batch) == [1] * 4
    assert batch.counts == {"human": 4}


def test_an_empty_source(tmp_path: Path, log: Log):
    mix = Mix(sources(log, "policy", "random"))
    with pytest.raises(
        EmptyError,
        match=r"the source 'random' of this mix holds no step; fill it first, or make the mix with empty='share'\.",
    ):
        mix.sample(8)
    shared = Mix(sources(log, "policy", "random", "demo"), {"policy": 1, "random": 2, "demo": 3}, empty="share")
    assert shared.counts(8) == {"policy": 2, "random": 0, "demo": 6}
    assert origin(shared.sample(8)) == [0] * 2 + [2] * 6
    with pytest.raises(EmptyError, match="the source 'random' of this mix holds no step"):
        Mix(sources(log, "random"), empty="share").sample(1)
    # nobody asks for it
    assert origin(Mix(sources(log, "policy", "random"), {"policy": 1, "random": 0}).sample(3)) == [0] * 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ratios": {"policy": 1}}, "ratios are for policy, sources are policy, demo; name the same ones"),
        ({"ratios": {"policy": 1, "demo": -1}}, "ratios: expected numbers of 0 or more, not all 0, got"),
        ({"ratios": {"policy": 0, "demo": 0}}, "ratios: expected numbers of 0 or more, not all 0, got"),
        ({"ratios": {"policy": 1, "demo": float("nan")}}, "ratios: expected numbers of 0 or more"),
        ({"empty": "ignore"}, "empty='ignore': expected 'error' or 'share'"),
    ],
)
def test_bad_arguments(log: Log, arguments: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        Mix(sources(log, "policy", "demo"), **arguments)


def test_no_sources_and_no_elements(log: Log):
    with pytest.raises(ConfigError, match="a mix needs at least one source"):
        Mix({})
    with pytest.raises(ConfigError, match="batch_size: expected at least 1, got 0"):
        Mix(sources(log, "policy")).sample(0)


def test_state_and_stats(log: Log):
    mix, other = Mix(sources(log, "policy", "demo")), Mix(sources(log, "policy", "demo"))
    mix.sample(10)
    other.load_state(mix.state())
    assert (
        mix.stats()
        == other.stats()
        == {name: {"sampled": 5, "batches": 1, "stale_priorities": 0} for name in ("policy", "demo")}
    )
    assert np.array_equal(mix.sample(30).steps, other.sample(30).steps)
    with pytest.raises(ConfigError, match="this state is of the sources policy, demo, this mix has human"):
        Mix(sources(log, "human")).load_state(mix.state())


def test_a_source_that_empties_while_a_batch_is_drawn_is_shared_out(log: Log, monkeypatch: pytest.MonkeyPatch):
    """The last step of a source may be evicted after the shares were counted."""
    mix = Mix(sources(log, "policy", "demo"), empty="share")
    demo = mix.sources["demo"]

    def evicted(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(type(demo), "__len__", lambda self: 0 if self is demo else 50)
        raise EmptyError("the view holds no step yet")

    monkeypatch.setattr(demo, "sample", evicted)
    assert origin(mix.sample(6)) == [0] * 6


def test_batches_ahead(log: Log):
    batches = Mix(sources(log, "policy", "demo")).batches(6, keys=["rewards"])
    wanted = Mix(sources(log, "policy", "demo"))
    for _ in range(5):
        batch = next(batches)
        assert np.array_equal(batch["rewards"], wanted.sample(6)["rewards"])
        assert batch.counts == {"policy": 3, "demo": 3}
    other = Mix(sources(log, "policy", "demo"))
    other.load_state(batches.state())
    assert np.array_equal(other.sample(7).steps, wanted.sample(7).steps)
    batches.close()
    prioritized = Mix({"policy": log.by_source("policy"), "demo": log.by_source("demo").sampler("prioritized")})
    assert prioritized.position() is None


# -- concat_batches
# ------------------------------------------------------------------------------------------------------------------


def test_concat_batches():
    a = {"observations": {"x": np.zeros((2, 3)), "y": np.ones(2)}, "rewards": np.arange(2)}
    b = {"rewards": np.arange(3), "observations": {"y": np.ones(3), "x": np.ones((3, 3))}}
    both = concat_batches(a, b)
    assert both["rewards"].tolist() == [0, 1, 0, 1, 2]
    assert both["observations"]["x"].shape == (5, 3)
    wide = concat_batches({"x": np.zeros((2, 1))}, {"x": np.ones((2, 3))}, axis=1)
    assert wide["x"].tolist() == [[0, 1, 1, 1]] * 2
    # as HIL-SERL calls it
    assert concat_batches({"x": np.zeros((2, 1))}, {"x": np.ones((2, 3))}, 1)["x"].shape == (2, 4)


@pytest.mark.parametrize(
    ("a", "b", "where"), [({"x": 1, "y": {"z": 2}}, {"x": 1}, "first"), ({"x": 1}, {"x": 1, "y": {"z": 2}}, "second")]
)
def test_a_key_in_only_one_batch_is_named(a: Any, b: Any, where: str):
    """HIL-SERL takes the keys of the first and says nothing."""
    with pytest.raises(
        SchemaError, match=f"y/z: only the {where} batch has this field; sample both with the same keys"
    ):
        concat_batches(a, b)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(
        SchemaError, match=r"x/y: batches of shapes \(2, 3\) and \(2, 4\) cannot be joined along axis 0"
    ):
        concat_batches({"x": {"y": np.zeros((2, 3))}}, {"x": {"y": np.zeros((2, 4))}})


def test_tensors_are_joined_to_tensors():
    torch = pytest.importorskip("torch")
    both = concat_batches({"x": torch.zeros(2)}, {"x": np.ones(1, np.float32)})
    assert both["x"].tolist() == [0, 0, 1]
