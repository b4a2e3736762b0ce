"""Several requests become one call of the policy, and each gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ClosedError, ConfigError, RequestError, SchemaError
from hilt.serving import Batcher, BatcherSettings
from hilt.serving.observation_names import ActRequest, read_request
from tests.serving.served_toy import CHUNK, DIM, WAIT_S, Known, seen


def request(number: float = 1.0, **changes: Any) -> ActRequest:
    return read_request(seen(number, **changes), None)


@pytest.fixture
def policy() -> Known:
    return Known()


@pytest.fixture
def batcher(policy: Known) -> Iterator[Batcher]:
    made = Batcher(policy, 7, BatcherSettings(max_batch=4, max_wait_s=10.0))
    yield made
    policy.go.set()
    made.close()


def first(answer: Future[Any]) -> float:
    return float(answer.result(WAIT_S).actions[0, 0])


def test_a_full_batch_is_one_call_and_each_gets_its_own(policy: Known, batcher: Batcher):
    answers = [batcher.submit(request(number)) for number in range(4)]
    assert [first(one) for one in answers] == [0.0, 1.0, 2.0, 3.0] and policy.calls == [4]
    whole = answers[0].result(WAIT_S)
    assert whole.actions.shape == (CHUNK, DIM) and (whole.version, whole.rows) == (7, 4)
    assert batcher.metrics.batches.value() == 1 and batcher.metrics.rows.value() == 4


def test_what_arrives_during_a_call_is_the_next_batch_of_at_most_max_batch(policy: Known):
    policy.go.clear()
    batcher = Batcher(policy, 0, BatcherSettings(max_batch=4, max_wait_s=0.0))
    answers = [batcher.submit(request(0))]
    while batcher._waiting:  # until the first is taken
        threading.Event().wait(0.001)
    answers += [batcher.submit(request(number)) for number in range(1, 7)]
    policy.go.set()
    assert [first(one) for one in answers] == list(range(7)) and policy.calls == [1, 4, 2]
    batcher.close()


def test_nobody_waits_for_more_clients_than_there_are(policy: Known):
    batcher = Batcher(policy, 0, BatcherSettings(max_batch=4, max_wait_s=10.0), clients=lambda: 1)
    assert first(batcher.submit(request(5))) == 5.0 and policy.calls == [1]
    batcher.close()


def test_requests_that_differ_in_sampling_are_calls_of_their_own(policy: Known, batcher: Batcher):
    asked = [request(1), request(2, sample=True), request(3), request(4, sample=True, temperature=2.0)]
    answers = [batcher.submit(one) for one in asked]
    assert first(answers[0]) == 1.0 and first(answers[2]) == 3.0
    batcher.close()
    assert policy.calls[0] == 2 and policy.settings[0] == (False, 1.0)


def test_requests_with_a_prefix_of_one_length_share_a_call(policy: Known, batcher: Batcher):
    policy.continues = True
    prefixes = [np.full((n, DIM), float(n), np.float32) for n in (2, 2, 1)]
    answers = [batcher.submit(request(n, prefix=p, frozen=1)) for n, p in enumerate(prefixes)]
    answers.append(batcher.submit(request(3)))
    assert first(answers[0]) == 0.0 and first(answers[1]) == 1.0
    batcher.close()
    given = policy.prefixes[0]
    assert given.actions.shape == (2, 2, DIM) and given.frozen.tolist() == [1, 1]


def test_a_prefix_that_does_not_fit_is_refused_at_once(policy: Known, batcher: Batcher):
    asked = request(prefix=np.zeros((1, DIM), np.float32), frozen=2)
    with pytest.raises(ConfigError, match="this Known cannot continue one"):
        batcher.submit(asked)
    policy.continues = True
    with pytest.raises(SchemaError, match="frozen of a prefix is 2 and the prefix has 1 actions"):
        batcher.submit(asked)


def test_a_policy_that_raises_fails_only_the_request(policy: Known, batcher: Batcher):
    answers = [batcher.submit(request(number, prompt="fail" if number == 2 else "x")) for number in range(4)]
    assert [first(answers[number]) for number in (0, 1, 3)] == [0.0, 1.0, 3.0]
    with pytest.raises(RequestError, match="the policy failed: ZeroDivisionError: the model is broken"):
        answers[2].result(WAIT_S)
    assert policy.calls == [4, 1, 1, 1, 1]


def test_numbers_that_are_not_finite_are_an_error_of_their_row(batcher: Batcher):
    answers = [batcher.submit(request(number, prompt="nan" if number == 1 else "x")) for number in range(4)]
    with pytest.raises(RequestError, match="not finite; no action was sent"):
        answers[1].result(WAIT_S)
    assert first(answers[3]) == 3.0


def test_a_chunk_of_another_length_is_refused(policy: Known, batcher: Batcher):
    policy.chunk = 5
    answers = [batcher.submit(request()) for _ in range(4)]
    with pytest.raises(RequestError, match=r"answered with \[1, 3, 2\] numbers; expected \[1, 5, 2\]"):
        answers[0].result(WAIT_S)


def test_newer_weights_are_taken_up_between_two_calls(policy: Known):
    policy.go.clear()
    batcher = Batcher(policy, 1, BatcherSettings(max_wait_s=0.0))
    before = batcher.submit(request(0))
    while batcher._waiting:
        threading.Event().wait(0.001)
    batcher.swap(2, {"weight": torch.full((1,), 10.0)})
    after = batcher.submit(request(0))
    policy.go.set()
    assert (first(before), before.result().version) == (0.0, 1)
    assert (first(after), after.result().version) == (10.0, 2) and batcher.metrics.swaps.value() == 1
    batcher.close()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"weight": torch.zeros(2)}, r"have weight \[2\], and the policy that is served has \[1\]"),
        ({"other": torch.zeros(1)}, r"have other \[1\], and the policy that is served has nothing of this name"),
    ],
)
def test_weights_of_another_policy_are_refused(batcher: Batcher, weights: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        batcher.swap(9, weights)
    assert batcher.version == 7


def test_a_cancelled_request_is_not_computed(policy: Known, batcher: Batcher):
    gone, *others = [batcher.submit(request(number)) for number in range(3)]
    assert gone.cancel()
    others.append(batcher.submit(request(3)))
    assert [first(one) for one in others] == [1.0, 2.0, 3.0] and policy.calls == [3]


def test_what_waits_when_it_is_closed_is_refused(batcher: Batcher):
    waiting = batcher.submit(request())
    batcher.close()
    with pytest.raises(ClosedError, match="the policy server has ended"):
        waiting.result(WAIT_S)
    with pytest.raises(ClosedError, match="is ending"):
        batcher.submit(request())


@pytest.mark.parametrize("settings", [{"max_batch": 0}, {"max_wait_s": -1.0}, {"seed": -1}])
def test_settings_that_cannot_work(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BatcherSettings(**settings)
