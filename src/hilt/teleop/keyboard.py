"""The keyboard of a terminal, without any package.

Terminals send characters, not keys: nothing tells that a key was released. Those that know kitty's keyboard
protocol (kitty, foot, WezTerm, Ghostty, Konsole, iTerm2 and others) do tell when asked, and then keys are held
exactly as long as they are held. For the others a key counts as held for a moment after its last character; of
several keys that are held, they repeat the last one only.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import select
import signal
import termios
import threading
import time

from hilt.core.errors import ConfigError, DeviceError
from hilt.envs.env_protocol import Env
from hilt.teleop.devices import KEYS, Device, Reading, acting, arms_and_gripper, motion_of_keys

logger = logging.getLogger("hilt.teleop")

HELD_SECONDS = 0.15
"""How long a key counts as held after its character, and a tapped key at least; keys repeat every 30 to 60 ms."""
ANSWER_SECONDS = 0.5
"""How long a terminal has to answer whether it tells releases. All answer the
second question, so this is not waited out."""
SILENT_SECONDS = 0.5
"""While a key is held, a terminal that tells releases is asked whether it is there. One that does not answer is out of
reach, as over ssh when the network breaks: the release would not come either."""
ESCAPE_SECONDS = 0.05
"""How long the rest of a sequence may take after its first byte; a lone escape is the escape key."""

ALIVE = b"\x1b[c"  # every terminal answers that
ASK = b"\x1b[?u" + ALIVE
# 1: no ambiguous sequences, 2: tell repeats and releases, 8: of every key; 1004:
# tell when the window loses the keyboard
KITTY_ON, KITTY_OFF = b"\x1b[>11u\x1b[?1004h", b"\x1b[?1004l\x1b[<u"
SEQUENCE = re.compile(
    rb"\x1b\[(?P<code>\d*)[\d:]*(?:;(?P<modifiers>\d*)(?::(?P<event>\d))?)?[\d:;]*(?P<final>[@-~])"
    rb"|\x1bO(?P<arrow>.)|(?P<character>[^\x1b])|\x1b\[[ -?]*[@-~]|\x1b[^\[O\x1b]"  # the last two: unknown sequences
)
NAMES = {9: "tab", 13: "enter", 27: "escape", 127: "backspace", 8: "backspace", 10: "enter"}
ARROWS = {b"A": "arrowup", b"B": "arrowdown", b"C": "arrowright", b"D": "arrowleft"}
CONTROL, COMMANDS = 4, 2 | 4 | 8 | 32  # bits of modifiers: alt, control, super, meta


class Keyboard(Device):
    """Keys as in :data:`hilt.teleop.devices.KEYS`; `speed` is the motion of a held key, of 1."""

    name = "keyboard"

    def __init__(self, speed: float = 1.0, terminal: str = "/dev/tty"):
        super().__init__()
        if not 0 < speed <= 1:
            raise ConfigError(f"the keyboard's speed is {speed}: expected a share of full speed, above 0 and up to 1")
        self.speed, self._arms, self._gripper, self._arm = speed, 1, True, 0
        self._held: dict[str, tuple[float, float]] = {}  # key: since and until when, by time.monotonic
        try:
            self._fd = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
            self._before = termios.tcgetattr(self._fd)
        except (OSError, termios.error) as error:
            raise DeviceError(
                f"the keyboard needs a terminal, and here is none ({error}): use the device browser"
            ) from error
        self._closing = threading.Event()
        self._lost = False
        self._asked: float | None = None  # since when the terminal owes an answer
        atexit.register(self.close)
        try:
            self._raw()
            self.tells_releases = self._ask()
        except BaseException:
            self.close()
            raise
        if not self.tells_releases:
            logger.warning(
                "this terminal does not tell when a key is released: a key counts as held for %.2f s after "
                "each character, and one key at a time. A terminal with kitty's keyboard protocol does better, and "
                "so does the device browser.",
                HELD_SECONDS,
            )
        self._thread = threading.Thread(target=self._listen, name="keyboard", daemon=True)
        self._thread.start()

    def attach(self, env: Env) -> None:
        self._arms, self._gripper = arms_and_gripper(env)

    def read(self) -> Reading:
        now = time.monotonic()
        motion, gripper = motion_of_keys([key for key, (_, until) in list(self._held.items()) if until > now])
        gripper *= self._gripper
        lost = self._lost or now - (self._asked or now) > SILENT_SECONDS
        return Reading(motion * self.speed, gripper, acting(motion, gripper), lost, self.take_events(), self._arm)

    def close(self) -> None:
        """The terminal is as it was before."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if thread := getattr(self, "_thread", None):
            thread.join(timeout=2)
        try:
            if getattr(self, "tells_releases", False):
                os.write(self._fd, KITTY_OFF)
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)
        except (OSError, termios.error):
            pass  # the terminal itself is gone
        os.close(self._fd)

    def _raw(self) -> None:
        """Switches to unbuffered input without echo. Ctrl-C still interrupts; Ctrl-Z does not,
        because the arm would be without control."""
        mode = termios.tcgetattr(self._fd)
        mode[0] &= ~(termios.ICRNL | termios.IXON)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        mode[6][termios.VSUSP] = bytes([os.fpathconf(self._fd, "PC_VDISABLE")])
        termios.tcsetattr(self._fd, termios.TCSAFLUSH, mode)

    def _ask(self) -> bool:
        """Whether the terminal tells releases; then it is asked to."""
        os.write(self._fd, ASK)
        answer, deadline = b"", time.monotonic() + ANSWER_SECONDS
        while not re.search(rb"\x1b\[\?[\d;]*c", answer) and (left := deadline - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                answer += os.read(self._fd, 1024)
        known = re.search(rb"\x1b\[\?\d+u", answer) is not None
        if known:
            os.write(self._fd, KITTY_ON)
        return known

    def _listen(self) -> None:
        text, next_question = b"", 0.0
        try:
            while not self._closing.is_set():
                now = time.monotonic()
                if (
                    self._asked is None
                    and now > next_question
                    and any(until == math.inf for _, until in self._held.values())
                ):
                    self._asked, next_question = now, now + SILENT_SECONDS / 4
                    os.write(self._fd, ALIVE)
                if ready := select.select([self._fd], [], [], ESCAPE_SECONDS)[0]:
                    new = os.read(self._fd, 1024)
                    if not new:
                        return  # hung up
                    text += new
                    self._asked = None
                text = self._take(text, whole=not ready)
        except OSError:
            return  # hung up, as Linux tells it
        finally:
            self._lost = True  # whatever ended it

    def _take(self, text: bytes, whole: bool) -> bytes:
        """Note every key in the text; what may be the beginning of a sequence comes back, unless the text is whole."""
        at = 0
        while at < len(text):
            if match := SEQUENCE.match(text, at):
                self._sequence(**match.groupdict())
                at = match.end()
            elif whole or len(text) - at > 64:
                self._key("escape")
                at += 1
            else:
                break
        return text[at:]

    def _sequence(
        self, code: bytes, modifiers: bytes, event: bytes, final: bytes, arrow: bytes, character: bytes
    ) -> None:
        event = event or b"1" if self.tells_releases else b""
        if character:
            self._key(NAMES.get(character[0]) or chr(character[0]).lower())
        elif final == b"O" and not code:
            self._held.clear()  # the keyboard goes elsewhere, and with it the news of releases
        elif (command := (int(modifiers or 1) - 1) & COMMANDS) and event != b"3":  # not for the arm
            self._held.clear()
            if code == b"99" and command & CONTROL:  # Ctrl-C arrives as a key when all keys do
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif (arrow or final) in ARROWS:
            self._key(ARROWS[arrow or final], event)
        elif final == b"u" and code:
            self._key(NAMES.get(int(code)) or chr(min(int(code), 0x10FFFF)).lower(), event)

    def _key(self, key: str, event: bytes = b"") -> None:
        """One key event: pressed 1, repeated 2, released 3; empty where the terminal tells characters only."""
        meaning = KEYS.get(key)
        if meaning is None:
            return
        if meaning[0] in "+-" or meaning in ("close", "open"):
            now = time.monotonic()
            since, until = self._held.get(key, (now, 0.0))
            if until < now:
                since = now
            if event == b"3":
                self._held[key] = since, since + HELD_SECONDS  # a tap between two readings counts too
            else:
                self._held[key] = since, math.inf if event else now + HELD_SECONDS
        elif event in (b"1", b""):
            if meaning == "arm":
                self._arm = (self._arm + 1) % self._arms
            else:
                self.press(meaning)
