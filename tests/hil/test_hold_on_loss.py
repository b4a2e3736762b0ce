"""The page, the policy server or the network is lost while the arm moves: after 0.1 s nothing but holding is executed.

Times are of one clock, `time.monotonic`, which the processes of a machine share. What is asserted is that each step
that began more than 0.1 s after the loss holds; how long anything takes is not, so that a machine may stand still."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from hilt.core.errors import DeadlineError, DeviceError, EmergencyStopError, RefusedError
from hilt.hil import vla_agent
from hilt.hil.config import Hil
from hilt.hil.environment import NullDevice
from hilt.hil.make_agent import make_agent
from hilt.policies.base import ObservedFields, Policy
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.robot import RobotServer
from hilt.robot.env import RobotConfig, RobotEnv
from hilt.robot.robot_client import RobotClient
from hilt.serving import PolicyServer, PolicyWire
from hilt.serving.policy_server import ServerAccess
from hilt.teleop.devices import Device, open_device
from hilt.teleop.intervene import TakeOver
from tests.effort import need
from tests.forked import with_torch
from tests.relay import Relay, relayed
from tests.teleop.test_browser import Client
from tests.wire.processes import free_port, free_ports_in_a_row

HOLD_S, DEADLINE_S, HZ = 0.1, 120.0, 20.0
PUSH = np.array([0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0], np.float32)


class Steady(Policy):
    """Answers with a long chunk, back or forth, so that the arm would go on moving for seconds."""

    chunk, action_dim = 60, 7

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def observed_fields(self) -> ObservedFields:
        return ObservedFields((), 7)

    def act(self, observations: Any, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return np.broadcast_to(PUSH * (-1) ** self.calls, (len(observations), self.chunk, 7)), {}

    def evaluate(self, record: Any) -> Any:
        raise NotImplementedError

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        raise NotImplementedError


def serve(ports: dict[str, int]) -> None:
    """Runs in a process of its own, until that is killed."""
    with PolicyServer(Steady(), access=ServerAccess(port=ports["ws"])) as server, PolicyWire(server, ports["hilt"]):
        threading.Event().wait(10 * DEADLINE_S)


@pytest.fixture(scope="module")
def fork() -> Iterator[Any]:
    with with_torch() as fork:
        yield fork


@pytest.fixture(scope="module")
def robot() -> Iterator[str]:
    with RobotServer("tests.envs.toy_arm:ToyArm", port=0) as server:
        yield server.urls[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy's folder, which the settings must name; an actor that asks a server loads nothing from it."""
    path = tmp_path_factory.mktemp("policy") / "small"
    sizes = {"cameras": ["full_image"], "image_size": 16, "state_dim": 7, "action_dim": 7, "chunk": 2}
    SmallVLA(SmallVLAConfig.from_json({**sizes, "width": 32, "depth": 1, "keypoints": 2})).save_pretrained(path)
    return path


def arm(url: str, device: Device | None = None) -> TakeOver:
    config = RobotConfig(url=url, hz=HZ, step_limit=10**9, instruction="go on", request_seconds=DEADLINE_S)
    env = TakeOver(RobotEnv(config), device or NullDevice())
    env.reset()
    return env


@dataclass
class Driven:
    """A control loop as an actor has it: each step with the time at which it began, and whether the arm held."""

    env: TakeOver
    act: Callable[[Any], Any]
    acted: Callable[[Any, Any], Any] = lambda source, executed: None
    steps: list[tuple[float, bool]] = field(default_factory=list)
    seen: Any = None

    def step(self) -> bool:
        began, action = time.monotonic(), self.act(self.seen)
        self.seen, *_, info = self.env.step(action)
        self.acted(info["source"], info["executed_action"])
        self.steps.append((began, not np.any(info["executed_action"][:6])))
        return self.steps[-1][1]

    def until(self, held: bool, count: int = 5) -> None:
        """Steps until so many in a row are that."""
        deadline, found = time.monotonic() + DEADLINE_S, 0
        while found < count:
            found = found + 1 if self.step() == held else 0
            assert time.monotonic() < deadline

    def holds_after(self, lost: float, back: float = float("inf")) -> int:
        """Asserts that nothing but holding began more than 0.1 s after the loss, until it was over; the count."""
        late = [held for began, held in self.steps if lost + HOLD_S < began < back]
        assert all(late), f"{late.count(False)} of {len(late)} steps moved the arm"
        return len(late)


@contextlib.contextmanager
def asking(url: str, robot: str, folder: Path) -> Iterator[Driven]:
    """An arm that is driven by the policy at that address."""
    config = Hil(algorithm="hg-dagger")
    config.agent.kind = "vla"
    options = {"policy": str(folder), "server": url, "columns": {"state": "state/tcp_pose"}, "mode": "asynchronous"}
    config.agent.options = options
    env = arm(robot)
    agent = make_agent(config, env)
    try:
        seen, _ = env.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vla_agent, "SERVER_TIMEOUT_S", DEADLINE_S)  # to connect may take longer on a busy machine
            agent.begin("go on", paced=True)
        agent._remote._link.timeout_s = vla_agent.SERVER_TIMEOUT_S
        yield Driven(env, agent.sample_actions, lambda source, executed: agent.acted(source, executed), seen=seen)
    finally:
        agent.close()
        env.close()


class Served:
    """The policy server, in a process that is killed and begun anew."""

    def __init__(self, fork: Any):
        self._fork = fork
        self.ports = {"ws": free_port(), "hilt": free_ports_in_a_row(2)}  # a wire takes two

    def __enter__(self) -> Served:
        self.begin()
        return self

    def begin(self) -> None:
        self._process = self._fork.Process(target=serve, args=(self.ports,), daemon=True)
        self._process.start()
        deadline = time.monotonic() + DEADLINE_S
        for port in self.ports.values():
            while not _answers(port):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> float:
        """From the time that is returned on it is gone."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        return time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S):
        return True
    return False


SCHEMES = ["ws", "hilt"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_arm_holds_when_the_policy_server_is_killed(fork: Any, robot: str, folder: Path, scheme: str):
    with Served(fork) as served, asking(f"{scheme}://127.0.0.1:{served.ports[scheme]}", robot, folder) as driven:
        driven.until(held=False)
        lost = served.kill()
        driven.until(held=True, count=20)
        assert driven.holds_after(lost) >= 15
        served.begin()
        driven.until(held=False)


@contextlib.contextmanager
def cut_off(fork: Any, robot: str, folder: Path, scheme: str = "ws") -> Iterator[tuple[Served, Relay, Driven]]:
    """An arm whose policy server is behind a network that can be cut."""
    with (
        Served(fork) as served,
        relayed(served.ports[scheme]) as relay,
        asking(f"{scheme}://127.0.0.1:{relay.port}", robot, folder) as driven,
    ):
        yield served, relay, driven


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_arm_holds_when_the_network_to_the_policy_server_is_cut(fork: Any, robot: str, folder: Path, scheme: str):
    with cut_off(fork, robot, folder, scheme) as (_, relay, driven):
        driven.until(held=False)
        lost = relay.cut()
        driven.until(held=True, count=20)
        assert driven.holds_after(lost) >= 15
        relay.mend()
        driven.until(held=False)


def test_the_arm_holds_when_the_network_to_the_robot_server_is_cut(robot: str):
    """As the robot server sees it: by its own clock, the arm holds 0.1 s after the last command."""
    watcher, ended = RobotClient(robot, request_seconds=DEADLINE_S), threading.Event()
    with relayed(int(robot.strip("/").rpartition(":")[2])) as relay:
        driven = Driven(arm(f"http://127.0.0.1:{relay.port}"), lambda seen: PUSH)

        def drive() -> None:
            with contextlib.suppress(DeadlineError, RefusedError):  # when the relay ends
                while not ended.is_set():
                    driven.step()

        loop = threading.Thread(target=drive)
        loop.start()
        modes: list[str] = []
        try:
            wait(lambda: len(driven.steps) > 5 and watcher.post("status")["mode"] == "follow")
            holds(watcher, relay.cut(), modes)
            at = watcher.post("getpos")
            time.sleep(2 * HOLD_S)
            assert watcher.post("getpos") == at and watcher.post("status")["mode"] == "hold"
            relay.mend()
            wait(lambda: watcher.post("status")["mode"] == "follow")
        finally:
            ended.set()
            relay.mend()
            loop.join(DEADLINE_S)
            driven.env.close()
            watcher.close()
    assert not loop.is_alive()


def holds(robot: RobotClient, lost: float, modes: list[str]) -> None:
    """Asserts that the arm holds at the second tick, at the latest, that began 0.1 s after the loss: the first one may
    have begun before, and was published late."""
    times: list[float] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(set(times)) < 3:
        status = robot.post("status")
        if status["time"] > lost + HOLD_S:
            times.append(status["time"])
            modes.append(status["mode"])
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [mode for time_, mode in zip(times, modes, strict=True) if time_ > times[0]][-1] == "hold"


def wait(met: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def page() -> Iterator[Any]:
    need("nicegui")
    with open_device("browser") as device:
        yield device


def test_the_arm_holds_while_the_pages_process_stands_still(robot: str, page: Any):
    """Whoever acts: nobody could take over, or press the emergency stop."""
    env = arm(robot, page)
    driven = Driven(env, lambda seen: PUSH)
    driven.until(held=False)
    os.kill(page._page.pid, signal.SIGSTOP)
    os.waitpid(page._page.pid, os.WUNTRACED)
    lost = time.monotonic()
    driven.until(held=True, count=20)
    assert driven.holds_after(lost) >= 15
    os.kill(page._page.pid, signal.SIGCONT)
    driven.until(held=False)
    env.close()


def test_the_arm_holds_when_the_pages_process_is_killed(robot: str, page: Any):
    env, watcher = arm(robot, page), RobotClient(robot, request_seconds=DEADLINE_S)
    driven = Driven(env, lambda seen: PUSH)
    driven.until(held=False)
    page._page.kill()
    wait(lambda: page._page.poll() is not None)
    lost = time.monotonic()
    with pytest.raises(DeviceError, match="the page ended"):
        driven.until(held=True)
    holds(watcher, lost, [])
    assert driven.holds_after(lost) == 0, "no step at all was made"
    watcher.close()
    env.close()


def test_emergency_stop_on_the_page_stops_the_arm_for_everybody(robot: str, page: Any):
    """Page, control loop and robot server in their processes: nothing moves, whatever anybody sends."""
    env, other = arm(robot, page), RobotClient(robot, request_seconds=DEADLINE_S)
    driven = Driven(env, lambda seen: PUSH)
    driven.until(held=False)
    viewer = Client(page, "a")
    viewer.press("estop", 1, 0)
    wait(lambda: driven.step() and other.post("status")["mode"] == "estop")
    at = other.post("getpos")
    for route, body in (("pose", {"arr": [0.5, 0.1, 0.3, 1, 0, 0, 0]}), ("close_gripper", None), ("jointreset", None)):
        with pytest.raises(EmergencyStopError, match="412: the emergency stop is latched"):
            other.post(route, body)
    with pytest.raises(EmergencyStopError, match="the emergency stop is latched"):
        env.reset()
    driven.until(held=True, count=10)
    assert other.post("getpos") == at, "not by a micrometer"
    viewer.press("release_estop", 2, 0)
    driven.until(held=False)
    assert other.post("status")["mode"] == "follow"
    for closed in (viewer, other, env):
        closed.close()


@pytest.mark.long
def test_the_arm_holds_at_every_loss_of_a_storm(fork: Any, robot: str, folder: Path, counted: Callable[[str], None]):
    """The server is killed, and the network cut, at random moments, also while the one before is not over."""
    draws, losses, held = random.Random(0), 0, 0
    with cut_off(fork, robot, folder) as (served, relay, driven):
        for _ in range(200):
            driven.until(held=False, count=draws.randint(1, 5))
            time.sleep(draws.uniform(0, 0.05))
            first = len(driven.steps)
            cut = draws.random() < 0.5
            lost = relay.cut() if cut else served.kill()
            if not cut and draws.random() < 0.3:
                relay.cut()
            for _ in range(draws.randint(1, 30)):
                driven.step()
            driven.steps = driven.steps[first:]
            held, losses = held + driven.holds_after(lost), losses + 1
            if not cut:
                served.begin()
            relay.mend()
    counted(f"{losses} losses, {held} steps after 0.1 s, all of them holding")
