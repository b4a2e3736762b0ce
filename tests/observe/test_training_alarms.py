"""The alarms of the trainings of a classifier and of a value model."""

from __future__ import annotations

import math

import pytest

from hilt.core.errors import AlarmError, NotFiniteError, UnknownNameError
from hilt.observe.alarms import Record
from hilt.observe.training_alarms import MAX_SKIPPED, TrainingAlarms

NAN = NotFiniteError("the gradient of a loss of nan is not finite.")


def looked(*losses: float) -> list[Record]:
    """Looks at a training whose own loss falls."""
    return [{"loss": 1 / (1 + n), "validation_loss": loss} for n, loss in enumerate(losses)]


def taken(alarms: TrainingAlarms, records: list[Record], first: int = 1) -> list[str]:
    return [alarms.take(record, step) for step, record in enumerate(records, first)]


def test_a_held_out_loss_that_rises_for_three_looks_is_said_kept_and_ends_the_training():
    said: list[str] = []
    alarms = TrainingAlarms("value", ["validation"], said.append)
    ends = taken(alarms, looked(4, 3, 2, 2, 2, 5, 5, 5, 1, 1))
    [text] = [text for text in ends if text]
    assert ends.index(text) == 7 - 1
    assert text.startswith(
        "alarm validation: the held-out loss is 4, and was 2 (limit 3, means of 3 looks); in trainin"
    )
    assert said == [f"step 7: {text}", "step 10: alarm validation is over"]
    assert alarms.raised == [{"name": "validation", "step": 7, "text": text, "stops": True}]
    error = alarms.ended(text, "Nothing was written.")
    assert str(error) == f"{text} It was ended because stop_on names this alarm. Nothing was written."


def test_a_healthy_training_raises_none():
    losses = [0.69, 0.4, 0.3, 0.45, 0.25, 0.5, 0.3, 0.25, 0.2, 0.3]  # one bad look among few frames tells nothing
    for job in ("classifier", "value"):
        alarms = TrainingAlarms(job, [])
        assert not any(taken(alarms, looked(*losses))) and not alarms.raised


def test_steps_that_are_left_out_are_an_alarm_and_several_in_a_row_an_error():
    said: list[str] = []
    alarms = TrainingAlarms("classifier", [], said.append, 0.01)
    assert alarms.left_out(3, NAN) == "" and alarms.left_out(4, NAN) == ""
    assert said == [f"step 3: {alarms.raised[0]['text']}"] and "1 steps of the optimizer were left out" in said[0]
    alarms.learned(5)
    alarms.learned(6)
    assert said[1:] == ["step 5: alarm not_finite is over"]
    for step in range(MAX_SKIPPED - 1):
        alarms.left_out(6 + step, NAN)
    with pytest.raises(
        AlarmError,
        match=r"the last 5 steps were left out; of the last one, step 10, the gradient of a loss of nan is not finite. "
        r"Begin anew with a lower rate than 0.01: learning_rate=0.001. If that does not help, a number that is not",
    ):
        alarms.left_out(10, NAN)
    stops = TrainingAlarms("classifier", ["not_finite"])
    assert stops.left_out(3, NAN).startswith("alarm not_finite: ")


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_held_out_loss_that_is_not_finite_is_an_alarm_and_nothing_to_keep(loss: float | None):
    alarms = TrainingAlarms("value", ["not_finite"], learning_rate=1.0)
    assert taken(alarms, [*looked(3, 2), {"loss": 1.0, "validation_loss": loss}])[-1].startswith(
        "alarm not_finite: the"
    )
    alarms.check_finite(2.0, 40)
    with pytest.raises(
        AlarmError, match=r"not a finite number until step 40, so nothing was kept. Begin anew with a l"
    ):
        alarms.check_finite(math.inf, 40)


def test_a_training_that_goes_on_says_again_what_still_holds_and_resets_what_ended_it():
    records = looked(4, 3, 2, 5, 5, 5)
    for stop_on, again in (([], ["validation"]), (["validation"], [])):
        first = TrainingAlarms("value", stop_on)
        taken(first, records)
        assert len(first.raised) == 1 and first.raised[0]["stops"] == bool(stop_on)
        second = TrainingAlarms("value", [])
        second.resume(first.raised, enumerate(records, 1))
        taken(second, looked(5), 7)
        assert [one["name"] for one in second.raised[1:]] == again
        assert second.raised[0] == first.raised[0]


def test_names_that_are_no_alarms_of_such_a_training_are_refused():
    TrainingAlarms("classifier", ["validation", "ranking", "not_finite"])
    with pytest.raises(UnknownNameError, match="no alarm named 'rankin'; did you mean 'ranking'"):
        TrainingAlarms("value", ["rankin"])
    with pytest.raises(UnknownNameError, match="no alarm named 'plasticity'"):
        TrainingAlarms("value", ["plasticity"])
