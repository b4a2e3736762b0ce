from __future__ import annotations

import copy
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.replay.sampling import limiters as limiter_module
from hilt.replay.sampling.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from tests.replay.toy_table import replay_table, same

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/reverb/tables.json").read_text())["cases"]


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run ``call`` in a thread; the list gets its error, or None when it returned."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except (ClosedError, DeadlineError) as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


# -- the same answers as Reverb
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: "-".join(map(str, [*case["table"]["limiter"], case["table"]["sampler"][0]]))
)
def test_answers_of_the_real_reverb(case: dict[str, Any]):
    same(replay_table(case), case["steps"])


def test_one_changed_number_is_noticed():
    case = copy.deepcopy(next(case for case in GOLDEN if case["table"]["limiter"][0] == "SampleToInsertRatio"))
    case["steps"][7][-1] = case["steps"][7][-1].translate(str.maketrans("01", "10"))
    with pytest.raises(AssertionError, match="call 7"):
        same(replay_table(case), case["steps"])


@settings(deadline=None)
@given(
    st.floats(0.05, 8),
    st.integers(1, 9),
    st.floats(-20, 20),
    st.floats(0, 30),
    st.lists(st.tuples(st.sampled_from("isd"), st.integers(1, 5)), max_size=60),
)
def test_arithmetic(ratio: float, min_size: int, min_diff: float, width: float, calls: list[tuple[str, int]]):
    """Against the two inequalities written out, for any history, and without ever waiting."""
    limiter = RateLimiter(ratio, min_size, min_diff, min_diff + width)
    i = s = d = 0
    for call, n in calls:
        may_sample = i - d >= min_size and i * ratio - s - n >= min_diff
        may_insert = i + n - d <= min_size or (i + n) * ratio - s <= limiter.max_diff
        assert (limiter.can_sample(n), limiter.can_insert(n)) == (may_sample, may_insert)
        if call == "d":
            n = min(n, i - d)
            limiter.deleted(n)
            d += n
            continue
        wait, may = (limiter.await_insert, may_insert) if call == "i" else (limiter.await_sample, may_sample)
        if may:
            wait(n, timeout=0)
            i, s = (i + n, s) if call == "i" else (i, s + n)
        else:
            with pytest.raises(DeadlineError):
                wait(n, timeout=0)
        assert [limiter.stats()[name] for name in ("inserts", "samples", "deletes", "size")] == [i, s, d, i - d]
        assert limiter.stats()["diff"] == i * ratio - s


def test_constructors_choose_reverbs_numbers():
    def numbers(limiter: RateLimiter) -> tuple[float, ...]:
        return limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff

    largest = sys.float_info.max
    assert numbers(MinSize(7)) == (1.0, 7, -largest, largest)
    assert numbers(SampleToInsertRatio(2, 3, 4)) == (2.0, 3, 2.0, 10.0)
    assert numbers(SampleToInsertRatio(1.5, 2, (-1.0, 3.5))) == (1.5, 2, -1.0, 3.5)
    assert numbers(Queue(5)) == numbers(Stack(5)) == (1.0, 1, 0.0, 5.0)
    assert numbers(RateLimiter(1.0, 1, float("-inf"), float("inf"))) == numbers(MinSize(1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MinSize(0), r"min_size_to_sample \(0\) must be 1 or more"),
        (lambda: MinSize(2.5), r"min_size_to_sample \(2.5\) must be an integer"),  # type: ignore[arg-type]
        (lambda: SampleToInsertRatio(0, 1, 5), r"samples_per_insert \(0\) must be > 0"),
        (lambda: SampleToInsertRatio(float("nan"), 1, 5), "must be a number, not NaN"),
        (lambda: SampleToInsertRatio("2x", 1, 5), "'2x'.* must be a number"),  # type: ignore[arg-type]
        (
            lambda: SampleToInsertRatio(3, 1, 2.9),
            r"error_buffer \(2.9\) must be >= max\(1.0, samples_per_insert\) = 3 .* widen it",
        ),
        (lambda: SampleToInsertRatio(1, 1, (0, 1)), r"error_buffer \(\(0, 1\)\) must be >="),
        (
            lambda: SampleToInsertRatio(1, 5, (6, 20)),
            r"from 6, is above samples_per_insert \* min_size_to_sample = 5.*lower its first",
        ),
        (lambda: SampleToInsertRatio(1, 0, 5), r"min_size_to_sample \(0\) must be 1 or more"),
        (lambda: SampleToInsertRatio(1, 1, (1, 2, 3)), r"one number or a pair"),  # type: ignore[arg-type]
        (lambda: Queue(0), r"^size \(0\) must be 1 or more"),
        (lambda: RateLimiter(1, 1, 3, 2), r"min_diff \(3\) is above max_diff \(2\)"),
        (lambda: RateLimiter(float("inf"), 1, 0, 5), r"samples_per_insert \(inf\) must be > 0 and finite"),
        (lambda: MinSize(1).can_sample(0), r"n \(0\) must be 1 or more"),
        (lambda: MinSize(1).inserted(-1), r"n \(-1\) must be 0 or more"),
        (
            lambda: MinSize(1).await_sample(timeout=-1),
            r"timeout \(-1\) must be 0 or more seconds and finite; None waits 600 s",
        ),
        (lambda: MinSize(1).await_insert(timeout=float("inf")), r"timeout \(inf\) must be"),
    ],
)
def test_limiter_refuses_wrong_values(build: Any, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        build()
    assert isinstance(caught.value, ValueError)


def test_a_range_below_the_start_is_warned_of(caplog: pytest.LogCaptureFixture):
    SampleToInsertRatio(2, 5, (-10, 9))
    assert "up to 9, is below samples_per_insert * min_size_to_sample = 10" in caplog.text
    caplog.clear()
    SampleToInsertRatio(2, 5, 4)
    assert not caplog.text


# -- waiting
# ---------------------------------------------------------------------------------------------------------------------


def test_limiter_timeout_reports_what_was_missing():
    limiter = MinSize(100)
    limiter.inserted(45)
    limiter.deleted(5)
    start = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        limiter.await_sample(256, timeout=0.05)
    assert time.monotonic() - start >= 0.05
    assert "s to sample 256: 40 of 100 items needed are there; insert more or lower min_size_to_sample" in str(
        caught.value
    )
    assert isinstance(caught.value, TimeoutError)
    assert limiter.stats()["sample_expired"] == limiter.stats()["sample_blocked"] == 1
    assert limiter.stats()["samples"] == 0


def test_deadline_of_the_ratio_gives_the_sums():
    limiter = SampleToInsertRatio(2, 3, 4)
    limiter.inserted(5)
    sums = (
        "5 inserts × 2 - 0 samples = 10, which 1 more insert would make 12, above max_diff 10; "
        "sample 2 more or raise max_diff"
    )
    with pytest.raises(DeadlineError, match=sums):
        limiter.await_insert(timeout=0)
    limiter.await_sample(8, timeout=0)
    sums = (
        "5 inserts × 2 - 8 samples = 2, which 2 more samples would make 0, below min_diff 2; "
        "insert 1 more or lower min_diff"
    )
    with pytest.raises(DeadlineError, match=sums):
        limiter.await_sample(2, timeout=0)
    with pytest.raises(
        DeadlineError, match="9 at once do not fit between min_diff and max_diff: sample fewer at once or give a larger"
    ):
        limiter.await_sample(9, timeout=0)


def test_the_cure_in_the_message_works():
    limiter = SampleToInsertRatio(0.3, 5, 1.7)
    limiter.inserted(5)
    while True:
        try:
            limiter.await_insert(timeout=0)
        except DeadlineError as error:
            limiter.sampled(int(str(error).split("; sample ")[1].split()[0]))
            limiter.await_insert(timeout=0)
            break


def test_a_wait_ends_when_it_may():
    limiter = Queue(1)
    thread, ended = in_thread(lambda: limiter.await_sample(timeout=60))
    wait_until(lambda: limiter.stats()["sample_waiting"] == 1)
    assert not ended
    limiter.await_insert(timeout=0)
    thread.join(60)
    assert ended == [None]
    assert limiter.stats()["sample_wait_s"] > 0

    limiter.await_insert(timeout=0)
    limiter.deleted(0)
    thread, ended = in_thread(lambda: limiter.await_insert(timeout=60))
    wait_until(lambda: limiter.stats()["insert_waiting"] == 1)
    limiter.await_sample(timeout=0)
    thread.join(60)
    assert ended == [None]


@pytest.mark.parametrize("way", ["deleted", "reset", "load_state"])
def test_limiter_changes_wake_waiters(way: str):
    limiter = RateLimiter(5, 2, 0, 5)
    limiter.inserted(2)
    thread, ended = in_thread(lambda: limiter.await_insert(timeout=60))
    wait_until(lambda: limiter.stats()["insert_waiting"] == 1)
    if way == "deleted":
        limiter.deleted(1)
    elif way == "reset":
        limiter.reset()
    else:
        limiter.load_state(RateLimiter(5, 2, 0, 5).state())
    thread.join(60)
    assert ended == [None]


def test_close_wakes_everyone():
    limiter = SampleToInsertRatio(1, 1, 1)
    limiter.inserted(2)
    limiter.deleted(2)
    limiter.inserted(1)
    limiter.sampled(3)
    waits = [in_thread(lambda: limiter.await_sample(2, timeout=60)) for _ in range(3)]
    wait_until(lambda: limiter.stats()["sample_waiting"] == 3)
    limiter.close()
    limiter.close()
    for thread, ended in waits:
        thread.join(60)
        assert isinstance(ended[0], ClosedError)
        assert "closed while 2 items waited to sample; open the store again" in str(ended[0])
    with pytest.raises(ClosedError):
        limiter.await_insert(timeout=0)
    limiter.inserted(1)
    assert limiter.stats()["inserts"] == 4
    assert limiter.stats()["sample_waiting"] == 0


def test_no_timeout_means_the_default_one(monkeypatch: pytest.MonkeyPatch):
    assert limiter_module.DEFAULT_TIMEOUT_S == 600
    monkeypatch.setattr(limiter_module, "DEFAULT_TIMEOUT_S", 0.02)
    with pytest.raises(DeadlineError, match=r"waited [\d.]+ s to sample 1"):  # and not for 600
        MinSize(1).await_sample()


def test_an_item_is_counted_when_it_is_stored():
    limiter = SampleToInsertRatio(1, 1, (-1, 2))
    limiter.await_insert()
    with limiter.inserting():
        assert limiter.stats()["inserts"] == 1
        assert not limiter.can_insert()  # the room is taken
        assert limiter.can_sample(2) and not limiter.can_sample(3)  # but nothing can be sampled for it yet
        with pytest.raises(DeadlineError, match="2 inserts × 1 - 0 samples = 2, which 1 more insert would make 3"):
            limiter.await_insert(timeout=0)
    assert limiter.stats()["inserts"] == 2
    limiter.sampled(2)
    with pytest.raises(OSError, match="disk full"), limiter.inserting():
        raise OSError("disk full")
    assert limiter.stats()["inserts"] == 2
    with limiter.inserting(2) as reservation:
        reservation.stored = 1  # the other is not of this view
    assert limiter.stats()["inserts"] == 3
    assert limiter.can_insert(1) and not limiter.can_insert(2)


def test_a_large_batch_is_not_starved_by_small_ones():
    limiter = RateLimiter(1, 1, 0, 1000)
    limiter.inserted(1)
    thread, ended = in_thread(lambda: limiter.await_sample(50, timeout=60))
    wait_until(lambda: limiter.stats()["sample_waiting"] == 1)
    with pytest.raises(DeadlineError, match="1 call to sample came first and still waits; wait longer"):
        limiter.await_sample(1, timeout=0)
    small = [in_thread(lambda: limiter.await_sample(1, timeout=60)) for _ in range(3)]
    wait_until(lambda: limiter.stats()["sample_waiting"] == 4)
    limiter.inserted(49)
    thread.join(60)
    assert ended == [None]
    limiter.inserted(3)
    for other, _ in small:
        other.join(60)
    assert [e for _, e in small] == [[None]] * 3
    assert limiter.stats()["samples"] == 53


def test_many_threads_keep_the_ratio():
    limiter = SampleToInsertRatio(2, 10, 8)
    low, high = limiter.min_diff, limiter.max_diff
    outside: list[dict[str, float]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            stats = limiter.stats()
            if stats["size"] >= 10 and not low <= stats["diff"] <= high:
                outside.append(stats)

    inserters = [in_thread(lambda: [limiter.await_insert(timeout=60) for _ in range(500)]) for _ in range(4)]
    samplers = [in_thread(lambda: [limiter.await_sample(3, timeout=60) for _ in range(332)]) for _ in range(4)]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for thread, ended in inserters + samplers:
        thread.join(60)
        assert ended == [None]
    stop.set()
    watcher.join(60)
    assert not outside
    assert (limiter.stats()["inserts"], limiter.stats()["samples"]) == (2000, 3984)


# -- state
# ----------------------------------------------------------------------------------------------------------------------


def test_state_round_trip():
    limiter = SampleToInsertRatio(1.5, 4, 3.3)
    limiter.inserted(9)
    limiter.sampled(7)
    limiter.deleted(2)
    state = json.loads(json.dumps(limiter.state()))
    other = SampleToInsertRatio(1.5, 4, 3.3)
    other.load_state(state)
    assert other.state() == limiter.state()
    for n in range(1, 12):
        assert (other.can_insert(n), other.can_sample(n)) == (limiter.can_insert(n), limiter.can_sample(n))
    assert json.loads(json.dumps(MinSize(2).state()))["max_diff"] == sys.float_info.max


def test_a_state_of_other_parameters_is_refused():
    saved = SampleToInsertRatio(1, 4, 3).state()
    with pytest.raises(
        ConfigError, match=r"samples_per_insert 1.0 \(here 2.0\), min_diff 1.0 \(here 5.0\).*or reset\(\) it and count"
    ):
        SampleToInsertRatio(2, 4, 3).load_state(saved)
    del saved["deletes"]
    with pytest.raises(ConfigError, match="lacks deletes; give what state"):
        SampleToInsertRatio(1, 4, 3).load_state(saved)
    with pytest.raises(ConfigError, match=r"samples \(-1\) must be 0 or more"):
        MinSize(1).load_state(MinSize(1).state() | {"samples": -1})


def test_repr():
    limiter = MinSize(3)
    limiter.inserted(2)
    assert "MinSize(samples_per_insert=1.0, min_size_to_sample=3" in repr(limiter)
    assert "inserts=2, samples=0" in repr(limiter)


# -- sampling: counted when it is done
# ---------------------------------------------------------------------------------------------


def test_limiter_counts_samples_when_they_are_drawn():
    limiter = RateLimiter(1.0, 1, min_diff=0, max_diff=4)
    limiter.inserted(4)
    with limiter.sampling(3, timeout=0):
        assert limiter.stats()["samples"] == 0
        assert (limiter.can_sample(1), limiter.can_sample(2)) == (True, False)  # nobody else takes the three
        assert not limiter.can_insert(1)  # and no room is made before they are gone
        with pytest.raises(
            DeadlineError, match="4 inserts × 1 - 3 samples = 1, which 2 more samples would make -1, below min_diff 0"
        ):
            limiter.await_sample(2, timeout=0)
    assert limiter.stats()["samples"] == 3
    assert limiter.can_insert(3)


def test_a_draw_that_fails_is_not_counted_and_lets_others_go_on():
    limiter = RateLimiter(1.0, 1, min_diff=0, max_diff=9)
    limiter.inserted(2)
    with pytest.raises(ZeroDivisionError), limiter.sampling(2, timeout=0):
        thread, ended = in_thread(lambda: limiter.await_sample(1, timeout=60))
        wait_until(lambda: limiter.stats()["sample_waiting"])
        raise ZeroDivisionError
    thread.join(60)
    assert ended == [None]
    assert limiter.stats()["samples"] == 1
