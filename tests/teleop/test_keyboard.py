"""Keys through a real pseudo-terminal, of both kinds: one that tells releases
(kitty's protocol) and one that sends characters."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import pytest

from hilt.core.errors import ConfigError, DeviceError
from hilt.teleop import keyboard
from hilt.teleop.devices import open_device
from hilt.teleop.keyboard import ALIVE, ASK, KITTY_OFF, KITTY_ON, Keyboard
from tests.teleop.played import Noting, until

PLAIN, KITTY = b"\x1b[?62;22c", b"\x1b[?0u\x1b[?62;22c"


class Terminal:
    """The other end of a terminal: answers the question that every terminal answers, and types."""

    def __init__(self, answer: bytes = PLAIN):
        self.master, self.slave = pty.openpty()
        self.name = os.ttyname(self.slave)
        self.seen, self.answers = b"", True
        self._answer, self._open = answer, True
        self._thread = threading.Thread(target=self._screen, daemon=True)
        self._thread.start()

    def _screen(self) -> None:
        while self._open:
            if select.select([self.master], [], [], 0.02)[0]:
                self.seen += os.read(self.master, 1024)
                if self.answers and self.seen.endswith(ALIVE):
                    os.write(self.master, self._answer if self.seen.endswith(ASK) else PLAIN)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def screen_after(self, text: bytes) -> bytes:
        """All that was written, when it ends with this."""
        deadline = time.monotonic() + 120
        while not self.seen.endswith(text):
            assert time.monotonic() < deadline, self.seen
            time.sleep(0.01)
        return self.seen

    @property
    def mode(self) -> list:
        return termios.tcgetattr(self.slave)

    def close(self) -> None:
        self._open = False
        self._thread.join(timeout=60)
        os.close(self.master)
        with contextlib.suppress(OSError):
            os.close(self.slave)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(keyboard, "HELD_SECONDS", 1.5)  # not missed on a machine that is busy
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def kitty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(keyboard, "ANSWER_SECONDS", 60.0)  # this one answers, in a thread of a busy machine
    terminal = Terminal(KITTY)
    yield terminal
    terminal.close()


# --- a terminal that tells releases
# -----------------------------------------------------------------------------------------------


def test_kitty_keys_are_held_until_they_are_released(kitty: Terminal):
    with Keyboard(terminal=kitty.name) as keys:
        assert keys.tells_releases and not keys.read().engaged
        kitty.type(b"\x1b[119;1:1u\x1b[1;1:1D")  # w and arrow left, pressed
        assert until(keys, lambda r: r.motion[1] == 1).motion.tolist() == [1, 1, 0, 0, 0, 0]
        time.sleep(3 * keyboard.HELD_SECONDS)
        assert keys.read().motion.tolist() == [1, 1, 0, 0, 0, 0] and keys.read().engaged
        kitty.type(b"\x1b[119;1:2u\x1b[119;1:3u\x1b[99;1:1u")  # w repeats, is released; c
        assert until(keys, lambda r: r.gripper != 0).gripper == -1
        assert keys.read().motion.tolist() == [0, 1, 0, 0, 0, 0]
        kitty.type(b"\x1b[O")  # the window loses the keyboard: no news of releases will come
        until(keys, lambda r: not r.engaged)


def test_kitty_a_terminal_that_is_out_of_reach_while_a_key_is_held_is_lost(kitty: Terminal):
    with Keyboard(terminal=kitty.name) as keys:
        kitty.type(b"\x1b[119;1:1u")
        until(keys, lambda r: r.engaged and kitty.seen.count(ALIVE) > 2 and not r.lost)
        kitty.answers = False  # ssh, and the network is gone
        assert until(keys, lambda r: r.lost).engaged
        kitty.type(b"\x1b[119;1:3u")
        until(keys, lambda r: not r.lost and not r.engaged)
        asked = kitty.seen.count(ALIVE)
        time.sleep(1.2 * keyboard.SILENT_SECONDS)
        assert not keys.read().lost and kitty.seen.count(ALIVE) <= asked + 1  # nothing is held: nothing is asked


def test_kitty_a_key_with_control_or_alt_is_not_for_the_arm(kitty: Terminal):
    with Keyboard(terminal=kitty.name) as keys:
        kitty.type(b"\x1b[119;5:1u\x1b[115;3:1u\x1b[1;5:1A\x1b[101;1:1u")  # control w, alt s, control up; e
        assert until(keys, lambda r: r.engaged).motion.tolist() == [0, 0, 1, 0, 0, 0]
        kitty.type(b"\x1b[57442;5:1u")  # control itself: what comes next is a command, and so are the releases
        until(keys, lambda r: not r.engaged)


def test_kitty_a_tap_between_two_readings_counts(kitty: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keyboard, "HELD_SECONDS", 1.5)
    with Keyboard(terminal=kitty.name) as keys:
        kitty.type(b"\x1b[119;1:1u\x1b[119;1:3u")
        until(keys, lambda r: r.engaged)
        until(keys, lambda r: not r.engaged)


def test_kitty_modes_are_on_while_it_is_open(kitty: Terminal):
    before = kitty.mode
    with Keyboard(terminal=kitty.name):
        assert kitty.mode != before
    assert kitty.screen_after(KITTY_OFF) == ASK + KITTY_ON + KITTY_OFF
    assert kitty.mode == before


def test_kitty_ctrl_c_sends_sigint(kitty: Terminal):
    """A handler of the test's own: a KeyboardInterrupt that is raised while Python collects garbage is ignored."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with Keyboard(terminal=kitty.name):
            kitty.type(b"\x1b[99;5u")
            deadline = time.monotonic() + 120
            while not received and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]


# --- a terminal that sends characters
# ---------------------------------------------------------------------------------------------


def test_a_character_counts_for_a_moment(plain: Terminal, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), Keyboard(speed=0.5, terminal=plain.name) as keys:
        assert not keys.tells_releases
        assert "does not tell when a key is released: a key counts as held for 1.50 s" in caplog.text
        plain.type(b"e")
        assert until(keys, lambda r: r.engaged).motion.tolist() == [0, 0, 0.5, 0, 0, 0]
        until(keys, lambda r: not r.engaged)
        plain.type(b"\x1b[A")
        assert until(keys, lambda r: r.engaged).motion.tolist() == [0.5, 0, 0, 0, 0, 0]
        plain.type(b"\x1bOB")
        until(keys, lambda r: not r.engaged)


def test_buttons(plain: Terminal):
    with Keyboard(terminal=plain.name) as keys:
        keys.attach(Noting(14))
        plain.type(b"\r\x7frt g\t")
        reading = keys.read()
        events: list[str] = list(reading.events)
        while len(events) < 6:
            events += until(keys, lambda r: r.events != ()).events
        assert events == ["success", "fail", "reset", "toggle", "estop", "release_estop"]
        until(keys, lambda r: r.arm == 1)
        # alt and x, F1, F5, a late answer, é: none of them is the escape key
        plain.type(b"\x1bx\x1bOP\x1b[15~\x1b[?62c\xc3\xa9")
        plain.type(b"\t")
        assert until(keys, lambda r: r.arm == 0).events == ()
        plain.type(b"\x1b")
        assert until(keys, lambda r: r.events != ()).events == ("stop",)


def test_without_a_gripper_its_keys_are_nobodys(plain: Terminal):
    with Keyboard(terminal=plain.name) as keys:
        keys.attach(Noting(6))
        plain.type(b"v\r")
        until(keys, lambda r: r.events != ())
        assert not keys.read().engaged
        keys.attach(Noting(7))
        plain.type(b"v")
        assert until(keys, lambda r: r.engaged).gripper == 1


def test_a_terminal_that_answers_nothing_is_a_plain_one():
    terminal = Terminal(b"")
    with Keyboard(terminal=terminal.name) as keys:
        assert not keys.tells_releases
        until(keys, lambda r: r.engaged, each=lambda: terminal.type(b"w"))
    terminal.close()


def test_a_terminal_that_hangs_up_is_lost(plain: Terminal):
    with Keyboard(terminal=plain.name) as keys:
        plain._open = False
        plain._thread.join(timeout=60)
        os.close(plain.master)
        until(keys, lambda r: r.lost)
        plain.master = os.open(os.devnull, os.O_RDONLY)


# --- no terminal, and a terminal given back
# ---------------------------------------------------------------------------------------


def test_keyboard_without_a_terminal_is_reported_with_the_fix(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(
            DeviceError, match=r"the keyboard needs a terminal, and here is none .*: use the device browser"
        ):
            open_device("keyboard", terminal=str(path))


def test_a_speed_that_cannot_work_is_refused():
    for speed in (0, -1, 1.5):
        with pytest.raises(ConfigError, match=r"the keyboard's speed is .*: expected a share of full speed"):
            Keyboard(speed=speed)


PROGRAM = """
import os, sys, time
from hilt.teleop import keyboard
keyboard.ANSWER_SECONDS = 60.0
keys = keyboard.Keyboard()
os.write(1, b"ready")
if sys.argv[1] == "raise":
    raise ValueError("not closed")
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["raise", "interrupt"])
def test_the_terminal_is_restored_however_the_program_ends(kitty: Terminal, end: str):
    before = kitty.mode
    command = [sys.executable, "-c", "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + PROGRAM, end]
    program = subprocess.Popen(
        command, stdin=kitty.slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert program.stdout is not None and program.stdout.read(5) == b"ready"
    if end == "interrupt":
        assert kitty.mode != before
        program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=600)
    assert (b"KeyboardInterrupt" if end == "interrupt" else b"ValueError: not closed") in stderr
    assert kitty.mode == before
    assert kitty.screen_after(KITTY_OFF)
