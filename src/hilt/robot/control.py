"""The control process: it moves the arms at a fixed rate, whatever happens to those who ask.

The process that serves HTTP starts it with two open files: a socket, on which commands come and answers go as lines of
JSON, and a piece of shared memory with the newest state. It watches two things itself: commands that cease (the arm
holds where it is) and the socket's end (the other process is gone: the arms hold and this one ends).
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from hilt.core import platform
from hilt.core.checksums import checksum
from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    EmergencyStopError,
    HiltError,
    RefusedError,
    RequestError,
)
from hilt.envs.rotations import Array, normalized
from hilt.robot.backends import STATE_SIZE, Backend, Box, RobotState, open_backend, slew
from hilt.robot.jerk_limit import MAX_WINDOW_S, JerkLimit, window_seconds

ESTOP = "estop"
MODES = ("hold", "follow", "reset", "wrench", "stopped", ESTOP)
LATCHED = (
    "the emergency stop is latched: nothing moves until a person has seen that it is safe and releases it, on the page "
    "or with POST /release_estop."
)
CURES = {
    "stopped": "POST /startimp first",
    "reset": "ask again when it is at home",
    "wrench": "POST /stopwrench first",
    "follow": "ask again when poses have ceased for a heartbeat",
}
PERIOD_WINDOW_S = 120
# periods that a call of the backend may take; a warning is logged if three calls within WARN_INTERVAL_S took more
SLOW, WARN_INTERVAL_S = 2, 10.0
# of each period, for others on this core: with real-time priority they would else
# have nothing when a backend is too slow
SPARE = 0.1
MAX_LINE_BYTES = 1 << 20
ESTOP_STATUS = 412
"""Of the answer to a command while the emergency stop is latched"""
RESET_DEADLINE_S = 30.0
START_S = 60.0
STOP_S = 5.0


@dataclass(frozen=True)
class ArmLimits:
    """The limits of the server, for all clients."""

    max_speed: float = 0.6
    "Meters per second at which the commanded tool point moves at most"
    max_turn: float = 3.0
    "Radians per second at which it turns at most"
    max_jerk: float = 1000.0
    "Meters per second cubed: the largest change of acceleration of the commanded tool point"
    max_turn_jerk: float = 5000.0
    "Radians per second cubed: the same of its rotation"
    heartbeat: float = 0.3
    "Seconds without a command after which the arm holds where it is, and another controller may take it"
    rate: float = 100.0
    "Ticks of the control loop per second, 1000 at most"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name}={value!r}: expected a number above 0.")
        if self.rate > 1000:
            raise ConfigError(f"rate={self.rate}: expected at most 1000 ticks per second.")
        for name, speed in (("max_jerk", self.max_speed), ("max_turn_jerk", self.max_turn)):
            jerk = getattr(self, name)
            if (late := window_seconds(speed, jerk)) > MAX_WINDOW_S:
                raise ConfigError(
                    f"{name}={jerk:g}: the arm would come {late:.2g} s after what it is sent to, and at most "
                    f"{MAX_WINDOW_S:g} s are allowed; give {math.ceil(4 * speed / MAX_WINDOW_S**2)} or more, or a "
                    "lower speed."
                )

    @property
    def window_ticks(self) -> int:
        """The ticks over which targets are averaged, twice, so that they keep the limits of jerk."""
        windows = window_seconds(self.max_speed, self.max_jerk), window_seconds(self.max_turn, self.max_turn_jerk)
        return math.ceil(max(windows) * self.rate - 1e-9)


class ControlledArm:
    """Brings one arm to the pose that was asked for, within the limits of speed and jerk, and holds it when commands
    cease. To hold is not smoothed: that would be later."""

    def __init__(self, backend: Backend, arm: int, limits: ArmLimits):
        self._backend, self._arm, self._limits = backend, arm, limits
        self._box: Box = backend.workspace(arm)
        self.heard = 0.0  # when the last command came
        self._give_up = 0.0
        self.waiting: list[int] = []  # numbers of the requests that are answered when a reset is over
        self.outcome: HiltError | None = None  # of that reset
        self._smooth = JerkLimit(limits.window_ticks)
        self._turn = limits.max_turn * self._smooth.turn_share(limits.max_turn / limits.rate)
        self._stands = limits.heartbeat  # seconds, of the last pose
        self._before = "hold"  # the mode to which the release of an emergency stop returns
        self.hold()

    def hold(self) -> None:
        self._backend.hold(self._arm)
        self._setpoint = self._goal = self._backend.state(self._arm).pose.copy()
        self._smooth.restart(self._setpoint)
        self.mode = "hold"

    def follow(self, pose: list[float], stands: float | None = None) -> None:
        """Goes there. `stands`: the seconds after which the arm holds if no other command has come; a heartbeat at
        most."""
        self._need("follow", "hold")
        self._stands = min(self._limits.heartbeat, stands or math.inf)
        self._goal = np.concatenate([np.clip(pose[:3], *self._box), normalized(pose[3:])])
        self.mode = "follow"

    def wrench(self, wrench: list[float]) -> None:
        self._need("wrench", "hold")
        if self._strays():
            raise RefusedError(
                f"arm {self._arm} is outside the workspace or faster than its limits: wait, or "
                "bring it back with /pose."
            )
        self._backend.wrench(np.array(wrench), self._arm)
        self.mode = "wrench"

    def reset(self) -> None:
        self._need("follow", "hold", "wrench")
        self.hold()
        self._backend.reset_joints(self._arm)
        self.mode, self._give_up = "reset", self.heard + RESET_DEADLINE_S
        self.outcome = RefusedError(
            f"arm {self._arm}: the joint reset was ended by another command, or its client left."
        )

    def release(self) -> None:
        """Ends whatever motion there is; a stopped arm is not commanded to hold, which could start it."""
        if self.mode not in ("stopped", ESTOP):
            self.hold()

    def estop(self) -> None:
        """Holds at once, and takes no command until `release_estop`. A stopped arm stays stopped."""
        if self.mode == "reset":
            self.outcome = EmergencyStopError(LATCHED)
        if self.mode != ESTOP:
            self._before = "stopped" if self.mode == "stopped" else "hold"
            self.release()
        self.mode = ESTOP

    def release_estop(self) -> None:
        """Takes commands again, from where the arm is now."""
        if self.mode == ESTOP:
            self.mode = self._before
            self.release()

    def stop(self) -> None:
        self.release()
        self._backend.stop(self._arm)
        self.mode = "stopped"

    def start(self) -> None:
        self._backend.start(self._arm)
        self.hold()

    def tick(self, now: float, seconds: float) -> None:
        silent = now - self.heard > (self._stands if self.mode == "follow" else self._limits.heartbeat)
        if (self.mode in ("follow", "wrench") and silent) or (self.mode == "wrench" and self._strays()):
            self.hold()
        if self.mode == "reset" and not self._backend.busy(self._arm):
            self.outcome = None
            self.hold()
        if self.mode == "reset" and now > self._give_up:
            self.outcome = DeadlineError(
                f"arm {self._arm}: the joint reset was not at its end after {RESET_DEADLINE_S:.0f} s."
            )
            self.hold()
        if self.mode == "follow":
            self._setpoint = slew(self._setpoint, self._goal, self._limits.max_speed * seconds, self._turn * seconds)
            self._backend.command(self._smooth.next(self._setpoint), self._arm)

    def _strays(self) -> bool:
        """Whether a push has brought the arm where no pose may bring it, or made it as fast as none may."""
        state = self._backend.state(self._arm)
        speed, turn = np.linalg.norm(state.vel[:3]), np.linalg.norm(state.vel[3:])
        outside = (state.pose[:3] < self._box[0]).any() or (state.pose[:3] > self._box[1]).any()
        return bool(outside or speed > self._limits.max_speed or turn > self._limits.max_turn)

    def _need(self, *modes: str) -> None:
        if self.mode not in modes:
            raise RefusedError(f"arm {self._arm} is in mode {self.mode!r}: {CURES[self.mode]}.")


class Timed:
    """A backend, and which of its calls took longest."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.slowest = (0.0, "")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found) or name == "scene":  # a simulation may take its time to begin anew
            return found

        def call(*values: Any, **named: Any) -> object:
            began = time.monotonic()
            try:
                return found(*values, **named)
            finally:
                self.slowest = max(self.slowest, (time.monotonic() - began, name))

        return call


class Periods:
    """How long the last ticks really took, from beginning to beginning."""

    def __init__(self, nominal: float):
        self._nominal = nominal
        self._ring = np.zeros(max(1, round(PERIOD_WINDOW_S / nominal)))
        self._count = 0

    def add(self, seconds: float) -> None:
        self._ring[self._count % len(self._ring)] = seconds
        self._count += 1

    def summary(self, seconds: float) -> dict[str, Any]:
        """Over the last `seconds`, at most two minutes."""
        number = min(self._count, len(self._ring), max(1, round(seconds / self._nominal)))
        last = np.take(self._ring, np.arange(self._count - number, self._count), mode="wrap")
        if not number:
            return {"nominal": self._nominal, "count": 0}
        p50, p99 = np.percentile(last, [50, 99])
        late = int(np.count_nonzero(last > 1.2 * self._nominal))
        return {
            "nominal": self._nominal,
            "p50": float(p50),
            "p99": float(p99),
            "max": float(last.max()),
            "count": number,
            "late": late,
        }


# --- what two processes share
# -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class News:
    """The newest state of everything: of one tick."""

    time: float
    modes: tuple[str, ...]
    states: tuple[RobotState, ...]
    snapshot: Array


class Board:
    """The newest `News`, in memory that two processes share, without locks.

    A reader that reads during a write gets bytes that do not match their checksum, and reads again.
    """

    HEADER = struct.Struct("<III")  # checksum, then the number of arms and of values
    SIZE = 1 << 17

    def __init__(self, file: int):
        self._memory = mmap.mmap(file, self.SIZE)

    @classmethod
    def create(cls) -> int:
        """An open file without a name: it goes when the last process that has it goes."""
        file = platform.anonymous_file("hilt-robot")
        platform.allocate(file, cls.SIZE)
        return file

    def write(self, news: News) -> None:
        modes = [float(MODES.index(mode)) for mode in news.modes]
        values = np.concatenate([[news.time], modes, *(state.to_vector() for state in news.states), news.snapshot])
        data = values.tobytes()
        self._memory[: self.HEADER.size + len(data)] = (
            self.HEADER.pack(checksum(data), len(news.modes), len(values)) + data
        )

    def read(self, timeout_s: float = 1.0) -> News:
        deadline = time.monotonic() + timeout_s
        while True:
            expected, arms, count = self.HEADER.unpack_from(self._memory)
            data = self._memory[self.HEADER.size : self.HEADER.size + 8 * count]
            if arms and checksum(data) == expected:
                break
            if time.monotonic() > deadline:
                raise DeadlineError(f"no whole state was published in {timeout_s} s.")
        values = np.frombuffer(data)
        states, snapshot = np.split(values[1 + arms :], [arms * STATE_SIZE])
        modes = tuple(MODES[int(mode)] for mode in values[1 : 1 + arms])
        return News(
            float(values[0]), modes, tuple(RobotState.from_vector(part) for part in states.reshape(arms, -1)), snapshot
        )


# --- the process
# ------------------------------------------------------------------------------------------------------------------


class Loop:
    """Commands, then motion, then the news, at each tick."""

    def __init__(self, backend: Backend, limits: ArmLimits, line: socket.socket, board: Board):
        self._backend = cast(Any, Timed(backend))
        self._limits, self._line, self._board = limits, line, board
        self.arms = [ControlledArm(self._backend, number, limits) for number in range(backend.arms)]
        self._warned_at = -WARN_INTERVAL_S
        self._slow = deque([-math.inf] * 3, maxlen=3)  # when calls were slow
        self._periods = Periods(1 / limits.rate)
        self._received = b""
        self.ended = False
        line.setblocking(False)

    def run(self) -> None:
        period = 1 / self._limits.rate
        self._publish()
        self._backend.slowest = (0.0, "")
        due = began = time.monotonic()
        while not self.ended:
            # after a late tick: go on from here, and do not hurry after the lost ones
            due = max(due + period, time.monotonic() + SPARE * period)
            self._listen(due)
            now = time.monotonic()
            self._periods.add(now - began)
            began = now
            self._move(now, period)
            self._backend.tick(period)
            self._publish()
            self._tell(now, period)

    def _tell(self, now: float, period: float) -> None:
        (seconds, name), self._backend.slowest = self._backend.slowest, (0.0, "")
        if seconds <= SLOW * period:
            return
        self._slow.append(now)
        if now - self._slow[0] < WARN_INTERVAL_S < now - self._warned_at:
            self._warned_at = now
            warning = (
                f"the backend's {name}() took {seconds:.2g} s, and a tick of the control loop is "
                f"{period:g} s: no method may wait."
            )
            with contextlib.suppress(OSError):
                send_line(self._line, {"warning": warning})

    def _move(self, now: float, period: float) -> None:
        for arm in self.arms:
            arm.tick(now, period)
            if arm.mode != "reset":
                for number in arm.waiting:
                    self._reply(number, arm.outcome)
                arm.waiting.clear()

    def _publish(self) -> None:
        states = tuple(self._backend.state(arm) for arm in range(len(self.arms)))
        self._board.write(
            News(time.monotonic(), tuple(arm.mode for arm in self.arms), states, self._backend.snapshot())
        )

    def _listen(self, until: float) -> None:
        """Takes commands as they come, until the next tick is due; and once, however late it is."""
        left = 1.0
        while left > 0 and not self.ended:
            left = until - time.monotonic()
            if select.select([self._line], [], [], max(left, 0.0))[0]:
                data = self._line.recv(1 << 16)
                self.ended = not data
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        number = message.pop("id")
        try:
            answer = self._do(number, **message)
        except (ConfigError, RequestError, RefusedError) as error:
            self._reply(number, error)
        else:
            if answer is not NotImplemented:  # else it comes later
                self._reply(number, answer)

    def _do(self, number: int, do: str, arm: int, **values: Any) -> Any:
        if do == "period":
            return self._periods.summary(**values)
        if do in ("estop", "release_estop"):  # of all arms: they share a world
            for each in self.arms:
                getattr(each, do)()
            self._publish()
            return None
        asks = do == "release" or (do == "scene" and values["split"] is None)
        if not asks and any(each.mode == ESTOP for each in self.arms):
            raise EmergencyStopError(LATCHED)
        if do == "scene":
            facts = self._backend.scene(**values)
            if values["split"] is not None:
                for each in self.arms:
                    each.release()  # and hold where it is now
                self._publish()
            return facts
        self.arms[arm].heard = time.monotonic()  # from here on they are commands; to ask is not to command
        if do in ("follow", "wrench", "reset", "start", "stop", "release"):
            getattr(self.arms[arm], do)(**values)
        elif do in ("grip", "clear_errors", "activate_gripper", "reset_gripper", "set_parameters", "set_load"):
            getattr(self._backend, do)(**values, arm=arm)
        else:
            raise RequestError(f"the control process knows no command {do!r}.")
        if do == "reset":
            self.arms[arm].waiting.append(number)
        return NotImplemented if do == "reset" else None

    def _reply(self, number: int, answer: Any) -> None:
        if isinstance(answer, HiltError):
            status = 409 if isinstance(answer, RefusedError) else 501 if isinstance(answer, RequestError) else 400
            status = 504 if isinstance(answer, DeadlineError) else status
            status = ESTOP_STATUS if isinstance(answer, EmergencyStopError) else status
            send_line(self._line, {"id": number, "status": status, "error": str(answer)})
        else:
            send_line(self._line, {"id": number, "answer": answer})


def send_line(line: socket.socket, message: dict[str, Any]) -> None:
    line.settimeout(1.0)  # answers are short; a peer that does not read one within this time counts as disconnected
    try:
        line.sendall(json.dumps(message).encode() + b"\n")
    finally:
        line.setblocking(False)


def receive_line(line: socket.socket, timeout_s: float) -> dict[str, Any]:
    """One line, and nothing of the next."""
    line.settimeout(timeout_s)
    data = b""
    while not data.endswith(b"\n"):
        part = line.recv(1)
        if not part or len(data) > MAX_LINE_BYTES:
            raise EOFError
        data += part
    result: dict[str, Any] = json.loads(data)
    return result


def end_with(line: socket.socket, parent: int) -> None:
    """Ends this process when the other one has gone and the loop, in a backend that hangs, does not notice it."""
    platform.wait_for_hang_up(line, parent)
    time.sleep(STOP_S)
    os._exit(1)


def main() -> None:
    """``python -m hilt.robot.control SOCKET BOARD PARENT``: two open files, and the process that started this one."""
    line, board = socket.socket(fileno=int(sys.argv[1])), Board(int(sys.argv[2]))
    threading.Thread(target=end_with, args=(line, int(sys.argv[3])), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held: list[bool] = []
    try:
        order = receive_line(line, START_S)
        limits = ArmLimits(**order["limits"])
        with contextlib.ExitStack() as at_the_end:  # each of these is tried, whatever becomes of the others
            backend = open_backend(order["backend"], order["options"])
            at_the_end.callback(backend.close)
            loop = Loop(backend, limits, line, board)
            for arm in loop.arms:
                at_the_end.callback(_hold, arm, held)
            boxes = [[side.tolist() for side in backend.workspace(arm)] for arm in range(backend.arms)]
            hello = {
                "arms": backend.arms,
                "simulation": backend.simulation,
                "cameras": list(backend.cameras),
                "workspaces": boxes,
            }
            gc.freeze()
            send_line(line, {**hello, "realtime": platform.take_real_time_priority()})
            loop.run()
    except Exception as error:  # noqa: BLE001 - reported to the process that started this one, which raises it
        expected = f"{error}" if isinstance(error, HiltError) else ""
        with contextlib.suppress(OSError):  # if the parent process is gone
            send_line(line, {"failed": expected, "traceback": traceback.format_exc()})
        raise SystemExit(1) from None
    finally:
        if held and all(held):  # otherwise it is not reported
            with contextlib.suppress(OSError):
                send_line(line, {"held": True})


def _hold(arm: ControlledArm, held: list[bool]) -> None:
    held.append(False)
    arm.release()
    held[-1] = True


if __name__ == "__main__":
    main()
