"""Batches made ahead: the same ones, errors where they are awaited, no thread left behind."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, EmptyError
from hilt.core.tree import flatten
from hilt.replay import Log, MinSize
from hilt.replay.sampling import prefetch
from hilt.replay.sampling.prefetch import Prefetch
from tests.replay.toy_steps import check, new_log, numbers, step, write

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with new_log(tmp_path) as made:
        write(made, numbers(0, 30))
        yield made


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "hilt-prefetch"]


def await_no_threads() -> None:
    deadline = time.monotonic() + 120
    while threads():
        assert time.monotonic() < deadline, "the thread is still there"
        time.sleep(0.005)


def test_the_same_batches_as_without(log: Log):
    batches, plain = log.all().sampler(seed=0).batches(8, prefetch=3), log.all().sampler(seed=0)
    for _ in range(20):
        ahead, wanted = next(batches), plain.sample(8)
        assert np.array_equal(ahead.steps, wanted.steps)
        for i in range(8):
            check(ahead, i, step(int(wanted["rewards"][i])))
    batches.close()
    await_no_threads()


def test_prefetch_iterator_options(log: Log):
    batches = log.all().sampler(seed=0).batches(4, keys=["rewards"])
    for batch, _ in zip(batches, range(3), strict=False):
        assert set(batch) == {"rewards"}
    batches.close()


def test_no_more_than_asked_are_made_ahead(log: Log):
    sampler = log.all().sampler(seed=0)
    batches = sampler.batches(1, prefetch=2)
    deadline = time.monotonic() + 120
    while sampler.stats()["batches"] < 3:  # two ready, and one in the thread's hands
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.02)
    assert sampler.stats()["batches"] == 3
    batches.close()
    with pytest.raises(ConfigError, match="prefetch: expected at least 1 batch, got 0"):
        sampler.batches(1, prefetch=0)


def test_an_error_surfaces_in_next_and_stays(log: Log):
    batches = log.all().sampler("fifo", max_times_sampled=1).batches(20, keys=["rewards"])
    assert next(batches)["rewards"].tolist() == list(range(20))
    for _ in range(2):
        with pytest.raises(EmptyError, match="20 draws were asked for and only 10 are left"):
            next(batches)
    await_no_threads()


def test_prefetch_raises_whatever_its_function_raises():
    """Selectors and assemblies may be the user's: an error of theirs must not end the
    thread while somebody waits for its batch."""

    class OwnError(BaseException):
        pass

    def fail() -> Any:
        raise OwnError("no batch")

    batches = Prefetch(fail, 1)
    with pytest.raises(OwnError, match="no batch"):
        next(batches)
    batches.close()
    await_no_threads()


def test_prefetch_limiter_timeout_reports_what_it_awaited(log: Log):
    batches = log.all().sampler(limiter=MinSize(31)).batches(2, timeout=0.01)
    with pytest.raises(DeadlineError, match="30 of 31 items needed are there"):
        next(batches)


def test_a_thread_that_is_stuck_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefetch, "_DEADLINE_S", 0.05)
    free = threading.Event()
    batches = Prefetch(lambda: free.wait(60), 1)
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the next batch; the sampling thread is stuck"):
        next(batches)
    free.set()
    batches.close()
    await_no_threads()


def test_closing_ends_the_thread(log: Log):
    batches = log.all().sampler().batches(4)
    next(batches)
    batches.close()
    assert threads() == []
    batches.close()
    with pytest.raises(ClosedError, match="this iterator was closed; make another one"):
        next(batches)


def test_closing_while_the_limiter_holds_back(log: Log):
    """Nobody waits ten minutes for a step that will not come, and nothing is drawn afterwards."""
    limiter = MinSize(31)
    sampler = log.all().sampler("fifo", max_times_sampled=1, limiter=limiter)
    batches = sampler.batches(4)
    while not limiter.stats()["sample_waiting"]:
        time.sleep(0.001)
    batches.close()
    assert threads() == []
    write(log, numbers(30, 5))
    assert sampler.stats()["sampled"] == 0 == limiter.stats()["samples"]
    assert sampler.sample(1, keys=["rewards"], timeout=0)["rewards"].tolist() == [0]


def test_prefetch_iterator_without_references_ends_its_thread(log: Log):
    batches = log.all().sampler().batches(4)
    next(batches)
    del batches
    gc.collect()
    await_no_threads()


def test_a_closed_log_is_an_error_in_next(tmp_path: Path):
    log = new_log(tmp_path)
    write(log, numbers(0, 5))
    batches = log.all().sampler().batches(4, prefetch=1)
    next(batches)
    log.close()
    with pytest.raises(ClosedError, match="this log is closed; open it again"):
        for _ in range(5):
            next(batches)


# -- what nobody took
# ---------------------------------------------------------------------------------------------------------------


def test_the_state_is_that_after_the_last_batch_that_was_taken(log: Log):
    for kind in ({}, {"n_step": 2}, {"episodes": True}):
        ahead, plain, other = (log.all().sampler(seed=4, **kind) for _ in range(3))
        batches = ahead.batches(6, prefetch=3)
        for _ in range(4):
            next(batches)
            plain.sample(6)
        state = batches.state()
        assert state["rng"] == plain.state()["rng"] and state["counts"] == plain.state()["counts"]
        other.load_state(state)
        wanted = [plain.sample(6).steps for _ in range(2)]
        assert all(np.array_equal(other.sample(6).steps, steps) for steps in wanted)
        batches.close()  # and the sampler goes on as if nothing had been made ahead
        assert all(np.array_equal(ahead.sample(6).steps, steps) for steps in wanted)
        with pytest.raises(ClosedError, match="there is no state of these batches"):
            batches.state()


def test_before_the_first_batch_was_taken_nothing_was_drawn(log: Log):
    sampler = log.all().sampler(seed=4)
    sampler.batches(6).close()
    assert np.array_equal(sampler.sample(6).steps, log.all().sampler(seed=4).sample(6).steps)


def test_prefetch_of_a_prioritized_sampler_is_discarded_by_state(log: Log):
    sampler = log.all().sampler("prioritized", seed=4)
    batches = sampler.batches(6, prefetch=1)
    next(batches)
    deadline = time.monotonic() + 120
    while sampler.stats()["batches"] < 3:  # one taken, one ready, one in the thread's hands
        assert time.monotonic() < deadline
        time.sleep(0.001)
    batches.close()
    assert sampler.position() is None and sampler.state()["counts"]["batches"] == 3


# -- devices
# ----------------------------------------------------------------------------------------------------------------------


def test_torch_tensors(log: Log):
    torch = pytest.importorskip("torch")
    batches, plain = (
        log.all().sampler("prioritized", seed=0).batches(8, device="cpu"),
        log.all().sampler("prioritized", seed=0),
    )
    for _ in range(3):
        batch, wanted = next(batches), plain.sample(8)
        for path, tensor in flatten(batch).items():
            assert isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
            assert np.array_equal(tensor.numpy(), flatten(wanted)[path])
        assert np.array_equal(batch.steps, wanted.steps)  # what update_priorities takes
        assert np.allclose(batch.weights, wanted.weights) and isinstance(batch.weights, torch.Tensor)
    batches.close()


def test_a_list_of_devices_gets_a_copy_each(log: Log):
    torch = pytest.importorskip("torch")
    batches = log.all().sampler(seed=0).batches(8, device=["cpu", torch.device("cpu")])
    first, second = next(batches)
    assert np.array_equal(first["rewards"], second["rewards"])
    assert np.array_equal(first.steps, second.steps)
    batches.close()


@pytest.mark.parametrize(
    ("device", "said"),
    [(3, "device is a builtins.int"), ("gpu", "device 'gpu' is no torch device"), ([], "an empty list")],
)
def test_a_device_of_a_wrong_kind_is_refused_at_once(log: Log, device: Any, said: str):
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match=said):
            log.all().sampler().batches(8, device=device)
        gc.collect()
    assert threads() == []
