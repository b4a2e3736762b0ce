"""Which action of which chunk is executed in each control step, by mode and delay; holds, interruptions and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError, NotFiniteError, SchemaError
from hilt.envs.chunk_executor import ChunkExecutor, ChunkSettings, ChunkStep, Planned

CHUNK, PATIENCE_S = 6, 60.0


class Counting:
    """A plan whose actions name their chunk and their index: [100 * number + index]."""

    def __init__(self, length: int = CHUNK):
        self.length = length
        self.asked: list[tuple[Any, list[float] | None, int]] = []

    def __call__(self, observation: Any, planned: Any, frozen: int) -> Any:
        number = len(self.asked)
        self.asked.append((observation, None if planned is None else planned[:, 0].tolist(), frozen))
        return [[100.0 * number + index] for index in range(self.length)]


def names(steps: list[ChunkStep]) -> list[str]:
    """Each step as "chunk.index", a hold as a dash."""
    for step in steps:
        assert step.held == (step.index < 0) and step.action.dtype == np.float32 and step.action.shape == (1,)
        assert step.action[0] == (0 if step.held else 100 * step.chunk + step.index)
    return ["-" if step.held else f"{step.chunk}.{step.index}" for step in steps]


def run(steps: int, **settings: Any) -> tuple[str, Counting, ChunkExecutor]:
    plan = Counting()
    executor = ChunkExecutor(plan, ChunkSettings(**settings), action_dim=1)
    return " ".join(names([executor.next(number) for number in range(steps)])), plan, executor


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"delay": 0}, "0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1 1.2"),
        ({"delay": 0, "execute": 2}, "0.0 0.1 1.0 1.1 2.0 2.1 3.0"),
        ({"delay": 2, "execute": 3}, "- - 0.0 0.1 0.2 - - 1.0 1.1 1.2 - - 2.0"),
        ({"delay": 1}, "- 0.0 0.1 0.2 0.3 0.4 0.5 - 1.0"),
    ],
)
def test_synchronous_holds_while_it_plans_and_begins_each_chunk_at_its_start(settings: Any, expected: str):
    found, plan, executor = run(len(expected.split()), **settings)
    assert found == expected
    assert all(planned is None and frozen == 0 for _, planned, frozen in plan.asked)
    assert executor.metrics()["held"] == expected.split().count("-") and executor.metrics()["late"] == 0


@pytest.mark.parametrize("mode", ["asynchronous", "rtc"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # the answer is there at once: as synchronous without a delay
        ({"delay": 0}, "0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1"),
        ({"delay": 0, "execute": 2}, "0.0 0.1 1.0 1.1 2.0 2.1"),
        # all of each chunk, asked for two steps before it ends: no hold but the first
        ({"delay": 2}, "- - 0.0 0.1 0.2 0.3 0.4 0.5 1.2 1.3 1.4 1.5 2.2 2.3"),
        # asked for at index 3; what was executed meanwhile is skipped
        ({"delay": 2, "execute": 3}, "- - 0.0 0.1 0.2 0.3 0.4 1.2 1.3 1.4 2.2 2.3 2.4 3.2"),
        # an answer that comes after more actions than are executed of a chunk is followed by the next question
        ({"delay": 3, "execute": 1}, "- - - 0.0 0.1 0.2 0.3 1.3 1.4 1.5 2.3 2.4 2.5 3.3"),
        # too few actions for the delay: the arm holds, and the chunk goes on where the last one ended
        ({"delay": 4, "execute": 5}, "- - - - 0.0 0.1 0.2 0.3 0.4 0.5 - - - 1.1 1.2 1.3 1.4 1.5 - - - 2.1"),
        # the delay is longer than the chunk: all of the second one is past when it comes, so the policy is asked again
        ({"delay": 8}, "- - - - - - - - 0.0 0.1 0.2 0.3 0.4 0.5 - - - - - - - - - - 2.0 2.1"),
    ],
)
def test_the_newest_chunk_takes_over_at_its_index(mode: str, settings: Any, expected: str):
    found, _, executor = run(len(expected.split()), mode=mode, **settings)
    assert found == expected
    assert executor.metrics()["held"] == expected.split().count("-") and executor.metrics()["late"] == 0
    assert executor.metrics()["delay_steps"] == settings["delay"]


def test_rtc_is_given_what_is_planned_and_how_much_of_it_is_certain():
    _, plan, _ = run(12, mode="rtc", delay=2, execute=3)
    assert plan.asked == [(0, None, 0), (5, [3, 4, 5], 2), (8, [103, 104, 105], 2), (11, [203, 204, 205], 2)]
    _, plan, _ = run(8, mode="rtc", delay=0, execute=2)
    assert plan.asked[1:3] == [(2, [2, 3, 4, 5], 1), (4, [102, 103, 104, 105], 1)], "one action at least is certain"
    _, plan, _ = run(10, mode="rtc", delay=4, execute=5)
    assert plan.asked[1] == (9, [5], 1), "no more are certain than there are"
    _, plan, _ = run(12, mode="asynchronous", delay=2, execute=3)
    assert [planned for _, planned, _ in plan.asked] == [None] * 4


def test_an_observation_with_which_a_plan_was_asked_for_is_marked():
    executor = ChunkExecutor(Counting(), ChunkSettings("asynchronous", 3, 1), action_dim=1)
    assert [executor.next(None).asked for _ in range(9)] == [0, -1, -1, -1, 1, -1, -1, 2, -1]


def test_interrupt_drops_the_rest_of_the_chunk_and_ignores_the_answer_under_way():
    plan = Counting()
    executor = ChunkExecutor(plan, ChunkSettings("asynchronous", 3, 2), action_dim=1)
    assert names([executor.next(number) for number in range(6)])[-1] == "0.3"  # chunk 1 is under way
    assert executor.interrupt() == 2 and executor.interrupt() == 0
    assert names([executor.next(number) for number in range(20, 25)]) == ["-", "-", "2.0", "2.1", "2.2"]
    assert plan.asked[-1][0] == 20, "it plans from where the person left"
    assert executor.metrics()["dropped"] == 2
    synchronous = ChunkExecutor(Counting(), ChunkSettings("synchronous", 4, 0), action_dim=1)
    synchronous.next(0)
    assert synchronous.interrupt() == 3, "those that would have been executed"


def test_reset_begins_with_a_new_chunk_and_counts_from_0():
    executor = ChunkExecutor(Counting(), ChunkSettings("asynchronous", 3, 1), action_dim=1)
    before = [executor.next(0) for _ in range(6)]
    executor.reset()
    after = [executor.next(0) for _ in range(6)]
    assert [(step.chunk, step.index, step.asked) for step in before] == [
        (step.chunk, step.index, step.asked) for step in after
    ]
    assert executor.metrics()["steps"] == 12 and executor.metrics()["dropped"] == 0


def test_hold_is_given_the_observation_and_the_last_action():
    given: list[tuple[Any, Any]] = []

    def hold(observation: Any, last: Any) -> Any:
        given.append((observation, None if last is None else last.tolist()))
        return np.array([-1.0]) if last is None else last

    executor = ChunkExecutor(Counting(2), ChunkSettings("synchronous", 0, 2), action_dim=1, hold=hold)
    assert [float(executor.next(number).action[0]) for number in range(6)] == [-1, -1, 0, 1, 1, 1]
    assert given == [(0, None), (1, [-1.0]), (4, [1.0]), (5, [1.0])]
    executor.interrupt(executed=[7.0])
    assert float(executor.next(6).action[0]) == 7, "from what the person did last"
    executor.reset()
    assert float(executor.next(7).action[0]) == -1
    executor = ChunkExecutor(Counting(), ChunkSettings(delay=1), action_dim=1, hold=lambda *_: np.zeros(2))
    with pytest.raises(SchemaError, match=r"hold\(\) returned \[0.0, 0.0\]; expected an action of 1 finite numbers"):
        executor.next(0)


# In real time


class Gated(Counting):
    """Each plan waits until the test opens its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.begun = ([threading.Event() for _ in range(8)] for _ in range(2))

    def __call__(self, observation: Any, planned: Any, frozen: int) -> Any:
        answer = super().__call__(observation, planned, frozen)
        self.begun[len(self.asked) - 1].set()
        assert self.gates[len(self.asked) - 1].wait(PATIENCE_S), "the control loop waits for the policy"
        return answer

    def answer(self, executor: ChunkExecutor, number: int) -> None:
        """Opens a gate and waits until the executor has the answer, which it uses in the next step."""
        request = executor._request
        assert request is not None
        self.gates[number].set()
        assert request.done.wait(PATIENCE_S)


@pytest.fixture
def gated() -> Iterator[Gated]:
    plan = Gated()
    yield plan
    for gate in plan.gates:
        gate.set()


def test_the_control_loop_does_not_wait_for_a_slow_policy(gated: Gated):
    with ChunkExecutor(gated, ChunkSettings("asynchronous", 3), action_dim=1) as executor:
        assert names([executor.next(0) for _ in range(3)]) == ["-"] * 3, "the policy has not answered, and time goes on"
        gated.answer(executor, 0)
        assert names([executor.next(0) for _ in range(4)]) == ["0.0", "0.1", "0.2", "0.3"]  # 1 is asked for at 0.3
        gated.answer(executor, 1)
        steps = [executor.next(0) for _ in range(3)]
        assert names(steps) == ["1.1", "1.2", "1.3"] and not any(step.late for step in steps)
        # it is slower than any answer before: the last chunk goes on to its end, then the arm holds
        assert names([executor.next(0) for _ in range(4)]) == ["1.4", "1.5", "-", "-"]
        gated.answer(executor, 2)
        step = executor.next(0)
        assert names([step]) == ["2.3"] and step.late
        found = executor.metrics()
        assert (found["held"], found["late"], found["chunks"], found["delay_steps"]) == (5, 1, 3, 5)
        assert found["planning_seconds_max"] >= found["planning_seconds"] > 0


def test_frozen_is_the_largest_of_the_last_delays(gated: Gated):
    gated.length = 12
    with ChunkExecutor(gated, ChunkSettings("rtc", 2), action_dim=1) as executor:
        executor.next(0)
        for number, steps in enumerate((2, 4, 1, 1)):
            for _ in range(steps - 1):
                executor.next(0)
            gated.answer(executor, number)
            while executor.next(0).asked < 0:
                pass
    assert [frozen for _, _, frozen in gated.asked[:4]] == [0, 2, 4, 4]


def test_all_of_a_chunk_is_executed_when_the_answer_comes_as_expected(gated: Gated):
    with ChunkExecutor(gated, ChunkSettings("asynchronous"), action_dim=1) as executor:
        assert names([executor.next(0) for _ in range(2)]) == ["-"] * 2
        gated.answer(executor, 0)
        assert names([executor.next(0) for _ in range(6)]) == [f"0.{index}" for index in range(6)]
        gated.answer(executor, 1)
        assert names([executor.next(0)]) == ["1.2"], "asked for two actions before the end, as the last answer took two"


def test_the_thread_reads_a_copy_of_the_observation():
    seen, gate = list[float](), threading.Event()

    def plan(observation: Any, planned: Any, frozen: int) -> Any:
        assert gate.wait(PATIENCE_S)
        seen.append(float(observation["state"][0]))
        return np.zeros((2, 1))

    with ChunkExecutor(plan, action_dim=1) as executor:
        arrays = {"state": np.array([1.0])}
        executor.next(arrays)
        arrays["state"][0] = 2.0
        gate.set()
        assert executor._request is not None and executor._request.done.wait(PATIENCE_S)
    assert seen == [1.0]


def test_an_answer_for_the_last_episode_is_ignored(gated: Gated):
    with ChunkExecutor(gated, action_dim=1) as executor:
        executor.next("old")
        assert gated.begun[0].wait(PATIENCE_S)
        executor.reset()
        assert executor.next("new").held
        gated.gates[0].set()
        gated.answer(executor, 1)
        step = executor.next("later")
        assert (step.chunk, step.index, float(step.action[0])) == (0, 0, 100)
        assert [observation for observation, _, _ in gated.asked] == ["old", "new"]


def test_a_question_that_was_withdrawn_before_it_was_read_is_not_asked(gated: Gated):
    with ChunkExecutor(gated, action_dim=1) as executor:
        for observation in ("first", "second", "third"):
            executor.next(observation)
            executor.interrupt()
        executor.next("last")
        for gate in gated.gates:
            gate.set()
        assert executor._request is not None and executor._request.done.wait(PATIENCE_S)
    assert {observation for observation, _, _ in gated.asked} <= {"first", "last"}


# Errors


@pytest.mark.parametrize("delay", [None, 3])
def test_what_the_policy_raises_is_raised_in_the_control_loop_with_its_cause(delay: int | None):
    def plan(observation: Any, planned: Any, frozen: int) -> Any:
        raise SystemExit("out of memory")

    with ChunkExecutor(plan, ChunkSettings(delay=delay), action_dim=1) as executor:
        error = "the policy failed while it planned chunk 0: SystemExit: out of memory"
        with pytest.raises(HiltError, match=error) as raised:
            executor.next(0)
            assert executor._request is not None and executor._request.done.wait(PATIENCE_S)
            executor.next(0)
        assert isinstance(raised.value.__cause__, SystemExit)


def test_ctrl_c_while_a_plan_is_made_in_the_calling_thread_stays_ctrl_c():
    def plan(observation: Any, planned: Any, frozen: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ChunkExecutor(plan, ChunkSettings(delay=0), action_dim=1).next(0)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (np.zeros((4, 6)), SchemaError, r"a chunk of the shape \[4, 6\]; the task needs \[actions, 7\], with one"),
        (np.zeros((0, 7)), SchemaError, r"a chunk of the shape \[0, 7\]; the task needs \[actions, 7\], with one"),
        (np.zeros(7), SchemaError, r"a chunk of the shape \[7\]; the task needs \[actions, 7\]"),
        (np.zeros((2, 7)), ConfigError, "execute=3: this policy answers with 2 actions; give 1 to 2, or 0 for all"),
        (
            [[0.0] * 7, [0.0] * 7, [float("nan")] * 7],
            NotFiniteError,
            r"action 2 of the chunk of 3 that the policy planned is \[nan, .*\]; expected finite numbers",
        ),
    ],
)
def test_a_chunk_that_does_not_fit_names_both_sides(answer: Any, kind: type[Exception], text: str):
    executor = ChunkExecutor(lambda *_: answer, ChunkSettings(execute=3, delay=0), action_dim=7)
    with pytest.raises(kind, match=text):
        executor.next(0)


def test_settings_out_of_range_are_refused():
    with pytest.raises(HiltError, match=r"no mode named 'parallel'. Known: asynchronous, ensemble, rtc, synchronous"):
        ChunkExecutor(Counting(), ChunkSettings("parallel"), action_dim=1)
    with pytest.raises(ConfigError, match="delay=-1: expected a whole number of at least 0"):
        ChunkExecutor(Counting(), ChunkSettings(delay=-1), action_dim=1)
    with pytest.raises(ConfigError, match="action_dim=0: expected a number of at least 1"):
        ChunkExecutor(Counting(), action_dim=0)


def test_close_has_a_deadline_and_a_closed_executor_is_not_used(gated: Gated):
    executor = ChunkExecutor(gated, action_dim=1)
    executor.next(0)
    assert gated.begun[0].wait(PATIENCE_S)
    with pytest.raises(DeadlineError, match=r"the policy has not returned from planning within 0.01 s"):
        executor.close(timeout=0.01)
    with pytest.raises(ClosedError, match="the chunk executor is closed; make another one"):
        executor.next(0)
    gated.gates[0].set()
    executor.close(timeout=PATIENCE_S)
    executor.close()


def test_a_note_of_a_chunk_is_in_its_first_step_with_the_delay():
    plan = Counting()
    noting = lambda *given: Planned(plan(*given), f"note {len(plan.asked) - 1}")  # noqa: E731
    settings = ChunkSettings(mode="asynchronous", execute=3, delay=2)
    with ChunkExecutor(noting, settings, action_dim=1) as executor:
        steps = [executor.next(number) for number in range(8)]
        assert [(step.note, step.since) for step in steps] == [
            *((None, 0), (None, 0), ("note 0", 2)),
            *((None, 0), (None, 0), (None, 0), (None, 0), ("note 1", 2)),
        ]
        executor.interrupt()  # of a chunk of which nothing was executed there is nothing to note
        assert executor.next(8).note is None


# Temporal ensembling


def predicted(length: int, decay: float, steps: int) -> list[float]:
    """The rule of the published code, written out: every step has a chunk, and a step's action is the mean of all that
    was predicted for it, the oldest first, with weights exp(-decay * i)."""
    table = np.full((steps, steps + length), np.nan)
    actions = []
    for now in range(steps):
        table[now, now : now + length] = [100.0 * now + index for index in range(length)]
        column = table[: now + 1, now]
        column = column[~np.isnan(column)]
        weights = np.exp(-decay * np.arange(len(column)))
        actions.append(float((column * weights / weights.sum()).sum()))
    return actions


@pytest.mark.parametrize("decay", [0.01, 0.0, 0.5, -0.3])
def test_an_ensemble_is_the_weighted_mean_of_all_chunks_of_a_step(decay: float):
    plan = Counting()
    executor = ChunkExecutor(plan, ChunkSettings("ensemble", delay=0, ensemble_decay=decay), action_dim=1)
    steps = [executor.next(number) for number in range(11)]
    np.testing.assert_allclose([step.action[0] for step in steps], predicted(CHUNK, decay, 11), rtol=1e-6)
    assert [(step.chunk, step.index, step.asked) for step in steps] == [(number, 0, number) for number in range(11)]
    assert [observation for observation, _, _ in plan.asked] == list(range(11))
    assert executor.metrics()["held"] == 0 and steps[0].action.dtype == np.float32


def test_an_ensemble_of_late_answers_is_asked_again_as_soon_as_one_is_there():
    plan = Counting()
    executor = ChunkExecutor(plan, ChunkSettings("ensemble", delay=2, ensemble_decay=0.0), action_dim=1)
    steps = [executor.next(number) for number in range(9)]
    # chunk 1 was asked for with the observation of step 3, after one action of chunk 0
    assert [(step.chunk, step.index) for step in steps] == [
        *((-1, -1), (-1, -1), (0, 0), (0, 1), (0, 2), (1, 2), (1, 3), (2, 2), (2, 3))
    ]
    assert [step.asked for step in steps] == [0, -1, -1, 1, -1, 2, -1, 3, -1]
    expected = [0, 0, 0, 1, 2, np.mean([3, 102]), np.mean([4, 103]), np.mean([5, 104, 202]), np.mean([105, 203])]
    np.testing.assert_allclose([step.action[0] for step in steps], expected, rtol=1e-6)


def test_an_ensemble_forgets_what_was_planned_before_a_person_or_an_episode():
    for forget in (ChunkExecutor.interrupt, ChunkExecutor.reset):
        executor = ChunkExecutor(Counting(), ChunkSettings("ensemble", delay=0), action_dim=1)
        for number in range(3):
            executor.next(number)
        forget(executor)
        assert float(executor.next(3).action[0]) == 300, "the mean of the new chunk alone"


def test_an_ensemble_asks_less_often_with_execute():
    executor = ChunkExecutor(Counting(), ChunkSettings("ensemble", 3, 0, 0.0), action_dim=1)
    steps = [executor.next(number) for number in range(7)]
    assert [step.asked for step in steps] == [0, -1, -1, 1, -1, -1, 2]
    np.testing.assert_allclose([step.action[0] for step in steps], [0, 1, 2, 51.5, 52.5, 53.5, 151.5], rtol=1e-6)


def test_a_decay_without_an_ensemble_is_refused():
    with pytest.raises(ConfigError, match=r"ensemble_decay=0.1 would do nothing: it needs mode=ensemble"):
        ChunkExecutor(Counting(), ChunkSettings("asynchronous", ensemble_decay=0.1), action_dim=1)
    with pytest.raises(ConfigError, match="ensemble_decay=11"):
        ChunkExecutor(Counting(), ChunkSettings("ensemble", ensemble_decay=11), action_dim=1)
