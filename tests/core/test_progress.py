"""What is shown of the phases of a long command, with a clock that only the test moves."""

from __future__ import annotations

import io
import itertools
import sys
import threading

import pytest

from hilt.core import progress as module
from hilt.core.progress import LINE_S, Phase, Progress, elapsed, paced, silent, spell


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(out: io.StringIO, clock: Clock) -> Progress:
    return Progress(out, clock, beat=False)


def test_a_pipe_gets_a_line_every_ten_seconds_and_a_last_one(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("exam, before", total=100) as move:
        for done in range(1, 101):
            clock.time += 0.25
            move(done)
    assert out.getvalue().splitlines() == [
        "exam, before: 40 of 100, about 15 s left",
        "exam, before: 80 of 100, about 5 s left",
        "exam, before: 100 of 100, done in 25 s",
    ]


def test_a_short_phase_is_silent_and_short_phases_together_are_not(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("the first", total=3) as move:
        clock.time += 6
        move(3)
    assert out.getvalue() == ""
    with progress.phase("the second", total=3) as move:
        clock.time += 3
        move(1)
        clock.time += 1
        move(2, note="loss 0.1")
    assert out.getvalue().splitlines() == [
        "the second: 2 of 3, loss 0.1, about 2 s left",
        "the second: 2 of 3, done in 4 s",
    ]


def test_progress_joins_its_thread_after_the_last_phase(out: io.StringIO, clock: Clock):
    def looking() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hilt-progress"]

    before, progress = looking(), Progress(out, clock)
    with progress.phase("the first"):
        with progress.phase("a part of it"):
            pass
        assert len(looking()) == len(before) + 1
    assert looking() == before
    with progress.phases() as report:
        report("the second", 1, 2)
        assert len(looking()) == len(before) + 1
    assert looking() == before
    with pytest.raises(ZeroDivisionError), progress.phase("the third"):
        raise ZeroDivisionError
    assert looking() == before


def test_progress_phase_without_a_count_shows_seconds(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("importing torch"):
        for _ in range(25):
            clock.time += 1
            progress.tick()
    assert out.getvalue().splitlines() == [
        "importing torch, 10 s so far",
        "importing torch, 20 s so far",
        "importing torch: done in 25 s",
    ]


def test_no_line_comes_twice_however_long_it_takes(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("importing torch"):
        for _ in range(500):
            clock.time += LINE_S
            progress.tick()
    lines = out.getvalue().splitlines()
    assert len(set(lines)) == 501 and lines[12] == "importing torch, 2:10 min so far"


def test_progress_announces_blocking_phases(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("importing torch", announce=True):
        clock.time += 3
    assert out.getvalue() == "importing torch ...\n"


def test_no_line_comes_twice_although_nothing_moves(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phase("copying", total=1_000_000) as move:
        clock.time += 1
        move(500_000)
        for _ in range(100):
            clock.time += LINE_S
            progress.tick()
        progress.notify("a line", err=True)
        progress.notify("a line", err=True)
    lines = out.getvalue().splitlines()
    assert len(lines) == 102 and all(one != other for one, other in itertools.pairwise(lines))
    assert lines[0] == "copying: 500,000 of 1,000,000, about 11 s left", "the rate falls while nothing moves"


def test_the_rate_is_that_of_the_last_minute(clock: Clock):
    phase = Phase("learning", total=1000, now=clock)
    assert phase.left() is None and phase.text() == "learning: 0 of 1,000"
    for done in range(1, 11):
        clock.time += 30
        phase.move(done)
    assert phase.left() == 990 * 30
    for done in range(20, 620, 5):
        clock.time += 1
        phase.move(done)
    assert phase.left() == pytest.approx((1000 - 615) / 5, rel=0.05)


def test_progress_rate_ignores_earlier_work(clock: Clock):
    phase = Phase("imitation", total=1000, done=900, unit="updates", now=clock)
    clock.time += 10
    phase.move(910)
    assert phase.left() == 90 and phase.text() == "imitation: 910 of 1,000 updates, about 90 s left"
    phase.move(1000)
    assert phase.text() == "imitation: 1,000 of 1,000 updates, 10 s so far", "all is done, and it has not ended"
    phase.move(10)  # from scratch
    clock.time += 2
    phase.move(20)
    assert phase.left() == 980 * 2 / 10


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with Progress(out, clock, beat=False).phase("reading", total=4) as move:
        clock.time += 10
        move(1)
    assert out.getvalue() == "reading: 1 of 4, about 30 s left\nreading: 1 of 4, done in 10 s\n"


def test_progress_phases_of_a_function(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phases() as report:
        report("recording", 0, 20)
        clock.time += 10
        report("recording", 5, 20)
        report("learning")
        clock.time += 10
        report("learning")
        report("writing")
    assert out.getvalue().splitlines() == [
        "recording: 5 of 20, about 30 s left",
        "learning, 10 s so far",
        "learning: done in 10 s",
    ]
    silent("recording", 1, 2, note="nobody looks")


def test_a_phase_that_was_interrupted_goes_on_with_its_rate(progress: Progress, out: io.StringIO, clock: Clock):
    with progress.phases() as report:
        for step in range(1, 7):
            clock.time += 4
            report("training", step, 6)
            if step % 2 == 0:
                report("validating")
                clock.time += 5
    assert out.getvalue().splitlines() == [
        "training: 3 of 6, about 20 s left",
        "training: 5 of 6, about 6 s left",
        "training: 6 of 6, done in 30 s",
    ], "the time of validation counts"


def test_progress_lines_in_a_pipe(clock: Clock):
    said: list[str] = []
    report = paced(said.append, 5.0, clock)
    for done in range(21):
        report("importing demos.pkl", done, 20)
        clock.time += 0.5
    report("importing demos.pkl", 20, 20)
    report("")
    report("features")
    assert said == [
        "importing demos.pkl: 0 of 20",
        "importing demos.pkl: 10 of 20, about 5 s left",
        "importing demos.pkl: 20 of 20, 10 s so far",
        "features",
    ]


def test_the_innermost_phase_is_shown_and_none_after_an_error(progress: Progress, out: io.StringIO, clock: Clock):
    with pytest.raises(ValueError, match="broken"), progress.phase("outside"):
        with progress.phase("inside"):
            clock.time += 10
            progress.tick()
        with progress.phases() as report:
            report("last")
            clock.time += 10
            progress.tick()
            raise ValueError("broken")
    clock.time += 100
    progress.tick()
    assert out.getvalue().splitlines() == ["inside, 10 s so far", "inside: done in 10 s", "last, 10 s so far"]


def test_progress_thread_shows_a_stalled_phase(out: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LINE_S", 0.0)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)
    there = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            there.set()
            return super().write(text)

    heard = Heard()
    with Progress(heard).phase("waiting for the learner"):
        assert there.wait(60)
    assert heard.getvalue().startswith("waiting for the learner")
    assert not [one for one in threading.enumerate() if one.name == "hilt-progress" and not one.daemon]


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch, clock: Clock, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    progress = Progress(out, clock)
    with progress.phase("exam, before", total=100) as move, progress.phase("importing torch"):
        clock.time += 10
        move(50)
        progress.notify("a word", err=True)
        progress.notify("into a pipe")
        print("this too", file=sys.stdout)
        progress._screen.refresh()
    text = out.getvalue()
    assert (
        "exam, before: 50 of 100, about 10 s left" in text
        and "importing torch, 10 s so far" in text
        and "a word" in text
    )
    assert capsys.readouterr().out == "into a pipe\nthis too\n", (
        "the standard output is a pipe: what it is given stays there"
    )
    monkeypatch.setattr(sys, "stdout", out)
    with progress.phase("exam, after"):
        progress.notify("above the bar")
    assert "above the bar" in out.getvalue().replace("\x1b", "\n").replace("K", "\n").splitlines()
    with progress.phases() as report:
        report("again", 1, 2)
        progress._screen.refresh()
    assert "again: 1 of 2" in out.getvalue()


def test_a_new_command_was_not_silent_before(progress: Progress, out: io.StringIO, clock: Clock):
    for _ in range(20):
        clock.time += 5
        progress.restart()
        with progress.phase("reading", total=2) as move:
            clock.time += 1
            move(1)
    assert out.getvalue() == ""


def test_progress_time_between_phases_is_not_counted(progress: Progress, out: io.StringIO, clock: Clock):
    for _ in range(3):
        clock.time += 100
        with progress.phase("reading", total=2) as move:
            clock.time += 1
            move(1)
    assert out.getvalue() == ""


def test_seconds_as_words():
    assert [spell(s) for s in (0.4, 45, 99, 100, 420, 5400, 9000)] == [
        "0 s",
        "45 s",
        "99 s",
        "2 min",
        "7 min",
        "90 min",
        "2.5 h",
    ]
    assert [elapsed(s) for s in (0.4, 99, 100, 3735)] == ["0 s", "99 s", "1:40 min", "1:02:15 h"]
