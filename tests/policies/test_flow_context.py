"""A chunk from given noise: what `act` makes of the same draw, whatever policy has a flow, and observations that are
read once for several draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, SchemaError
from hilt.policies.flow_context import LastContext
from tests.policies import test_act_policy, test_pi0, test_small_vla

torch.set_num_threads(1)
NAMES = [*test_pi0.POLICIES, "small_vla", "small_vla with knots", "small_vla with max_delay", "pi0 with max_delay"]


def made(name: str) -> tuple[Any, list[dict[str, Any]]]:
    if name in test_pi0.POLICIES:
        return test_pi0.made(name), test_pi0.seen(3)
    if name == "pi0 with max_delay":
        return test_pi0.made("sde", max_delay=1), test_pi0.seen(3)
    more: dict[str, Any] = {
        "small_vla with knots": {"chunk": 4, "knots": 2},
        "small_vla with max_delay": {"max_delay": 1},
    }
    return test_small_vla.made("sde", **more.get(name, {})), test_small_vla.seen(3)


def noise(policy: Any, rows: int, seed: int = 5) -> np.ndarray:
    return torch.randn(rows, *policy.start_shape, generator=torch.Generator().manual_seed(seed)).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_given_noise_leads_to_what_act_makes_of_the_same_draw(name: str) -> None:
    policy, rows = made(name)
    drawn, _ = policy.act(rows, sample=False, generator=torch.Generator().manual_seed(5))
    start = noise(policy, 3)
    found = policy.act_from(rows, start)
    assert np.array_equal(found, drawn) and found.shape == (3, policy.chunk, policy.action_dim)
    assert np.array_equal(policy.act_from(rows, start), found), "nothing is drawn"
    most_likely, _ = policy.act(rows, sample=False)
    assert np.array_equal(policy.act_from(rows, np.zeros_like(start)), most_likely)
    start[1] += 1.0
    other = policy.act_from(rows, start)
    assert np.array_equal(other[[0, 2]], found[[0, 2]]) and np.abs(other[1] - found[1]).max() > 1e-4


@pytest.mark.parametrize("name", ["sde", "pi05", "smolvla"])
def test_equal_observations_are_read_once_where_the_context_is_kept(name: str) -> None:
    policy, rows = made(name)
    start, read, once = noise(policy, 3), [], policy.prefix
    expected = [policy.act_from(rows, start), policy.act_from(rows, 0.5 * start)]
    policy.keeps_context = policy.keeps_features = True
    policy.prefix = lambda *given, **named: read.append(1) or once(*given, **named)
    _, record = policy.act(rows, sample=False)
    assert np.array_equal(policy.act_from(rows, start), expected[0])
    assert np.array_equal(policy.act_from(rows, 0.5 * start), expected[1]) and len(read) == 1
    changed = [dict(rows[0]), *rows[1:]]
    changed[0]["state"] = np.asarray(rows[0]["state"]) + 1
    other = policy.act_from(changed, start)
    assert len(read) == 2 and not np.array_equal(other[0], expected[0][0])
    _, again = policy.act(rows, sample=False)
    np.testing.assert_array_equal(again["features"], record["features"])
    policy.forget_context()
    policy.act_from(rows, start)
    assert len(read) == 4
    policy.to(torch.float64).to(torch.float32)  # weights are moved
    policy.act_from(rows, start)
    assert len(read) == 5


@pytest.mark.parametrize("name", ["sde", "pi05", "smolvla"])
def test_decisions_that_are_captured_begin_with_given_noise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up to sizes that have a graph; on a device without graphs the same function is called without one."""
    policy, rows = made(name)
    start = noise(policy, 3)
    expected = policy.act_from(rows, start)
    policy.keeps_context = True
    monkeypatch.setattr(policy, "_captures", lambda: True)
    monkeypatch.setattr(policy, "_captured_decision", lambda asked, acting, float8: policy._decide(asked))
    drawn, _ = policy.act(rows, sample=False, generator=torch.Generator().manual_seed(5))
    found = policy.act_from(rows, start)
    assert np.array_equal(found, drawn)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert policy._last._last is None, "what a graph has read is not kept"


def test_a_context_is_made_anew_where_something_differs() -> None:
    kept, read = LastContext(), []

    def context() -> Any:
        read.append(object())
        return read[-1]

    given = [{"a": 1.0}, {"a": 1.0}, {"a": 2.0}, {"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 2.0}]
    found = [kept.of({name: torch.tensor([x]) for name, x in each.items()}, context) for each in given]
    assert [read.index(each) for each in found] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("name", ["sde", "small_vla"])
def test_noise_of_another_shape_is_refused(name: str) -> None:
    policy, rows = made(name)
    with pytest.raises(SchemaError, match=r"noise of the shape \[3, 1, 1\]; this \w+ takes \[3, \d, \d\] for 3"):
        policy.act_from(rows, np.zeros((3, 1, 1), np.float32))
    bad = noise(policy, 3)
    bad[2, 0, 0] = np.nan
    with pytest.raises(SchemaError, match="the initial noise of observation 2 has NaN or infinity"):
        policy.act_from(rows, bad)


def test_policies_without_a_flow_refuse_noise() -> None:
    for policy in (test_small_vla.made("tokens"), test_small_vla.made("gaussian"), test_act_policy.made()):
        assert policy.start_shape is None
        with pytest.raises(ConfigError, match="does not begin with noise: give a policy with a flow, such as pi0"):
            policy.act_from([], np.zeros((0, 1, 1), np.float32))
