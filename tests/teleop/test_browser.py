"""The browser device and the page's process, over real sockets, without a browser: who gets in, and what arrives."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import gymnasium
import numpy as np
import pytest

pytest.importorskip("websockets", reason="the page needs nicegui, which brings websockets: pip install 'hilt[teleop]'")
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from hilt.core.errors import ConfigError, DeviceError, SchemaError
from hilt.teleop import browser
from hilt.teleop.browser import Browser
from hilt.teleop.devices import Status, open_device
from hilt.teleop.intervene import TakeOver
from hilt.teleop.page import IN_FLIGHT, VIEWERS
from tests.effort import need
from tests.teleop.played import until

need("nicegui")

PICTURE = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)


class Client:
    """A viewer that says exactly what a test wants."""

    def __init__(self, device: Browser, name: str):
        place = urlsplit(device.url).netloc
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(connect(f"ws://{place}/drive", origin=f"http://{place}"))
        with contextlib.suppress(ConnectionClosed):  # it may be refused before it has said who it is
            self.socket.send(json.dumps({"viewer": name}))
        self.seen = 0

    def close(self) -> None:
        self._open.close()

    def receive(self, timeout: float = 60) -> dict[str, Any]:
        data = self.socket.recv(timeout)
        self.seen += 1
        length = int.from_bytes(data[:4], "little")
        header = json.loads(data[4 : 4 + length])
        header["bytes"] = data[4 + length :]
        return header

    def hold(
        self, motion: list[float] | None = None, gripper: int = 0, sent: float | None = None, arm: int = 0
    ) -> None:
        state = {"motion": motion or [0.0] * 6, "gripper": gripper, "arm": arm, "seen": self.seen}
        self.socket.send(json.dumps(state | {"sent": time.monotonic() if sent is None else sent}))

    def press(self, event: str, number: int, episode: int) -> None:
        self.socket.send(json.dumps({"event": event, "number": number, "episode": episode}))


@pytest.fixture(scope="module")
def device() -> Iterator[Browser]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser, "PATIENCE", 2.5)  # a busy machine stands still for longer than a second
        with open_device("browser") as device:
            assert isinstance(device, Browser)
            yield device


@pytest.fixture
def viewer(device: Browser) -> Iterator[Callable[[str], Client]]:
    """Makes viewers; nobody has the wheel afterwards."""
    device.reset()
    device.show({"front": PICTURE}, Status("policy", episode=1))
    made: list[Client] = []
    test = secrets.token_hex(8)

    def make(name: str) -> Client:
        made.append(Client(device, f"{name} {test}"))
        return made[-1]

    yield make
    for client in made:  # one of them may have the wheel
        with contextlib.suppress(ConnectionClosed):
            client.press("give", 10**9, 0)
        client.close()
    last = Client(device, f"last {test}")
    until(device, lambda reading: not reading.engaged, each=lambda: last.press("give", time.monotonic_ns(), 0))
    last.close()


def heard(client: Client, device: Browser) -> int:
    """The episode, as soon as the page knows of it: what is pressed in an earlier one does not count."""
    while (episode := client.receive()["episode"]) != device._episode:
        client.hold()
    return int(episode)


def events(device: Browser, count: int) -> list[str]:
    """What was pressed, without the toggles: so many, and what comes in the moments after that."""
    found, quiet, deadline = list[str](), 0, time.monotonic() + 120
    while quiet < 30:
        found += [event for event in device.read().events if event != "toggle"]
        quiet += len(found) >= count
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_the_driver_is_read_and_others_are_not(device: Browser, viewer: Callable[[str], Client]):
    driver, other = viewer("a"), viewer("b")
    assert not device.read().engaged and not device.read().lost
    driver.press("take", 1, 0)
    reading = until(device, lambda r: r.engaged, each=driver.hold)
    assert reading.events == ("toggle",) and not reading.motion.any()  # with no key held it holds still
    other.press("take", 1, 0)
    other.hold([1, 1, 1, 1, 1, 1])
    motion = [0.5, -1, 0, 0.25, 0, 1]
    reading = until(device, lambda r: r.motion.any(), each=lambda: driver.hold(motion, -1))
    assert reading.motion.tolist() == motion and reading.gripper == -1 and reading.engaged and not reading.lost
    driver.press("give", 2, 0)
    reading = until(device, lambda r: not r.engaged)
    assert reading.events == ("toggle",) and not reading.motion.any() and reading.gripper == 0
    other.press("take", 2, 0)  # now that it is free
    assert until(device, lambda r: r.motion.any(), each=lambda: other.hold([1, 0, 0, 0, 0, 0])).motion[0] == 1


def test_pause_and_rewind_are_read_where_they_are_offered(device: Browser, viewer: Callable[[str], Client]):
    a, b = viewer("a"), viewer("b")
    episode = heard(a, device)
    a.press("pause", 1, episode)
    assert not heard_status(a)["paused"] and not device.read().paused, "this environment cannot be rewound"
    device.show({"front": PICTURE}, Status("policy", episode=1, step=7, rewind=True))
    while heard_status(a)["status"]["step"] != 7:
        pass
    a.press("pause", 2, episode)
    until(device, lambda reading: reading.paused, each=a.hold)
    b.socket.send(json.dumps({"event": "rewind", "number": 1, "episode": episode, "step": 1}))
    a.socket.send(json.dumps({"event": "rewind", "number": 3, "episode": episode, "step": 4}))
    reading = until(device, lambda reading: reading.rewind is not None, each=a.hold)
    assert reading.rewind == 4, "of the one who paused"
    assert until(device, lambda reading: not reading.paused, each=a.hold).rewind is None, "once"


def heard_status(client: Client) -> dict[str, Any]:
    client.hold()
    return client.receive()


def test_silence_is_lost_until_the_driver_is_back_or_another_one_takes_over(
    device: Browser, viewer: Callable[[str], Client]
):
    driver, other = viewer("a"), viewer("b")
    driver.press("take", 1, 0)
    until(device, lambda r: r.motion.any(), each=lambda: driver.hold([1] * 6, 1))
    reading = until(device, lambda r: r.lost)
    assert reading.engaged and not reading.motion.any() and reading.gripper == 0
    until(device, lambda r: not r.lost, each=lambda: driver.hold([1] * 6))  # contact is back: goes on
    until(device, lambda r: r.lost)
    other.press("take", 1, 0)
    until(
        device, lambda r: not r.lost, each=lambda: other.press("take", int(time.monotonic() * 1e6), 0)
    )  # the seat is free


def test_a_backlog_is_old_when_it_arrives(device: Browser, viewer: Callable[[str], Client]):
    """States that a stalled network kept for a second do not count as what the driver holds now."""
    driver = viewer("a")
    driver.press("take", 1, 0)
    # the clocks were compared, by a state that was fresh
    until(device, lambda r: r.motion.any(), each=lambda: driver.hold([1] * 6))
    until(device, lambda r: r.engaged and not r.motion.any(), each=driver.hold)
    for _ in range(20):
        driver.hold([1] * 6, sent=time.monotonic() - 1)
        assert not device.read().motion.any()
        time.sleep(0.02)


def test_events_arrive_each_once_and_in_order(device: Browser, viewer: Callable[[str], Client]):
    client = viewer("a")
    episode = heard(client, device)
    for number, event in enumerate(["reset", "success", "fail"], 1):
        for _ in range(3):  # sent again, as after a broken connection
            client.press(event, number, episode)
    client.close()
    again = viewer("a")
    again.press("fail", 3, episode)
    again.press("reset", 4, episode)
    assert events(device, 4) == ["reset", "success", "fail", "reset"]


def test_browser_events_of_a_finished_episode_are_ignored(device: Browser, viewer: Callable[[str], Client]):
    client = viewer("a")
    episode = heard(client, device)
    client.press("success", 1, episode)
    client.press("stop", 2, episode)
    time.sleep(0.3)
    device.reset()
    client.press("success", 3, episode)  # the page had not heard of the reset yet
    client.press("fail", 4, episode + 1)
    assert events(device, 2) == ["stop", "fail"]


def test_marks_are_the_drivers_and_stop_is_everybodys(device: Browser, viewer: Callable[[str], Client]):
    driver, other = viewer("a"), viewer("b")
    episode = heard(driver, device)
    driver.press("take", 1, episode)
    until(device, lambda r: r.engaged)
    for number, event in enumerate(["success", "fail", "reset", "stop"], 1):
        other.press(event, number, episode)
    driver.press("success", 2, episode)
    assert sorted(events(device, 2)) == ["stop", "success"]


def test_emergency_stop_is_everybodys_and_its_release_the_drivers(device: Browser, viewer: Callable[[str], Client]):
    driver, other = viewer("a"), viewer("b")
    episode = heard(driver, device)
    driver.press("take", 1, episode)
    until(device, lambda r: r.engaged)
    other.press("estop", 1, episode - 1)  # whichever episode it was pressed in
    other.press("release_estop", 2, episode)
    deadline = time.monotonic() + 60
    while not device.is_estop_pressed():  # asked while an arm resets, without a reading
        assert time.monotonic() < deadline
        time.sleep(0.005)
    device.reset()
    driver.press("release_estop", 2, episode)
    assert events(device, 2) == ["estop", "release_estop"]


def test_browser_slow_viewer_misses_images_without_delaying_others(device: Browser, viewer: Callable[[str], Client]):
    slow = viewer("slow")
    time.sleep(0.3)
    for step in range(50):
        device.show({"front": PICTURE}, Status("policy", step=step))
        time.sleep(0.005)
    time.sleep(0.3)
    for _ in range(IN_FLIGHT):
        slow.receive()
    with pytest.raises(TimeoutError):
        slow.receive(0.5)
    slow.hold()
    newest = slow.receive()
    while newest["status"]["step"] != 49:  # on a busy machine it was on its way
        slow.hold()
        newest = slow.receive()
    assert newest["pictures"] == [["front", len(newest["bytes"])]] and slow.seen < 25
    assert newest["bytes"].startswith(b"\xff\xd8") and 0 <= newest["age"] < 120, "in seconds, of the same clock"


def test_an_answer_is_not_answered(device: Browser, viewer: Callable[[str], Client]):
    """A viewer acknowledges each message; if that brought the next one, both would talk as fast as they can."""
    client, count = viewer("a"), 0
    client.hold()
    began = time.monotonic()
    while time.monotonic() < began + 1:
        client.receive()
        client.hold()
        count += 1
    assert count < 30 * (time.monotonic() - began)  # ten beats in a second, nothing else happens


def test_the_status_may_have_numpys_numbers(device: Browser, viewer: Callable[[str], Client]):
    device.show({}, Status("human", "lift", np.int64(3), reward=np.float32(0.5), message="hello"))
    client = viewer("a")
    header = client.receive()
    while header["status"]["instruction"] != "lift":
        client.hold()
        header = client.receive()
    assert (
        header["status"]["episode"] == 3
        and header["status"]["reward"] == 0.5
        and header["status"]["message"] == "hello"
    )


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        json.dumps({"sent": 1, "seen": 0, "motion": [0] * 5, "gripper": 0, "arm": 0}),
        '{"sent": 1, "seen": 0, "motion": [NaN, 0, 0, 0, 0, 0], "gripper": 0, "arm": 0}',
        json.dumps({"sent": 1, "seen": 0, "motion": [0] * 6, "gripper": 7, "arm": 0}),
        json.dumps({"sent": 1, "seen": 0, "motion": [0] * 6, "gripper": 0, "arm": -1}),
        json.dumps({"event": "explode", "number": 1, "episode": 0}),
        json.dumps({"event": "toggle", "number": 1, "episode": 0}),
        '{"event": "stop", "number": Infinity, "episode": 0}',
        "[" * 100_000,
        json.dumps([1, 2]),
    ],
)
def test_a_malformed_message_ends_that_connection_only(device: Browser, viewer: Callable[[str], Client], text: str):
    client, good = viewer("bad"), viewer("good")
    client.socket.send(text)
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.receive()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    assert good.receive()["viewers"] >= 1


@pytest.mark.parametrize("mode", ["hold", "toggle"])
def test_take_over_means_the_same_in_both_modes(device: Browser, viewer: Callable[[str], Client], mode: Any):
    """The person acts from take to give, over a reset too, and after a loss that was given back they do not."""
    env = TakeOver(Still(), device, mode=mode)
    env.reset()
    driver, other = viewer("a"), viewer("b")

    def step_until(wanted: Callable[[dict[str, Any]], bool], each: Callable[[], None], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not wanted(env.step(np.full(7, 0.5, np.float32))[4]):
            assert time.monotonic() < deadline
            each()
            time.sleep(0.02)

    def acts(info: dict[str, Any]) -> bool:
        return "intervene_action" in info and not info.get("lost")

    driver.press("take", 1, 0)
    step_until(acts, driver.hold)
    env.reset()
    step_until(acts, driver.hold)
    for _ in range(5):
        driver.hold()
        assert "intervene_action" in env.step(np.full(7, 0.5, np.float32))[4]
    step_until(lambda info: bool(info.get("lost")), lambda: None)
    step_until(lambda info: "lost" not in info, lambda: other.press("give", time.monotonic_ns(), 0))
    for _ in range(5):
        assert "intervene_action" not in env.step(np.full(7, 0.5, np.float32))[4]
        time.sleep(0.05)
    other.press("take", time.monotonic_ns(), 0)
    step_until(acts, other.hold)
    other.press("give", time.monotonic_ns(), 0)
    step_until(lambda info: "intervene_action" not in info, other.hold)


class Still(gymnasium.Env[Any, Any]):
    """Nothing happens in it."""

    action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, **_: Any) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def code_of(client: Client) -> int:
    """With what the page ends this connection."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.receive()
    return 0 if closed.value.rcvd is None else closed.value.rcvd.code


def test_browser_limits_viewers_with_and_without_a_name(device: Browser):
    place = urlsplit(device.url).netloc
    with contextlib.ExitStack() as nameless:
        for _ in range(VIEWERS):
            nameless.enter_context(connect(f"ws://{place}/drive", origin=f"http://{place}"))
        assert code_of(Client(device, "one more")) == 1013


def test_a_viewer_has_one_connection(device: Browser):
    former = Client(device, "the same")
    former.receive()
    latter = Client(device, "the same")
    assert code_of(former) == 1008 and latter.receive()["viewers"] == 1
    latter.close()


def test_an_image_that_is_none_is_refused_before_it_is_sent(device: Browser):
    with pytest.raises(SchemaError, match=r"image 'front' is float64 \(4, 4, 3\): a page shows uint8"):
        device.show({"front": np.zeros((4, 4, 3))}, Status())


# Who gets in


def get(device: Any, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    place = urlsplit(device.url)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{place.port}", **headers})
    return connection.getresponse()


SOCKETS = ["/drive", "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"]


def upgrade(device: Any, path: str, origin: str | None = "", **headers: str) -> int:
    """The status of a websocket's handshake, 101 when it was let in."""
    host = headers.pop("Host", f"127.0.0.1:{urlsplit(device.url).port}")
    place = urlsplit(device.url)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    wanted = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    wanted |= {} if origin is None else {"Origin": origin or f"http://{host}"}
    connection.request("GET", path, headers={"Host": host, **wanted, **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def test_browser_on_loopback_accepts_only_this_machine_and_page(device: Browser):
    port = urlsplit(device.url).port
    assert device.token == "" and device.url.startswith("http://127.0.0.1:")
    good = get(device)
    assert good.status == 200 and good.headers["X-Frame-Options"] == "DENY"
    assert get(device, Host=f"localhost:{port}").status == 200
    assert get(device, Host="[::1].evil.example").status == get(device, Host="[::1]x").status == 403
    assert get(device, Host="localhost:9000").status == 200  # through a tunnel
    for host in ("evil.example", f"evil.example:{port}", "192.168.1.5", "", "[", f"127.0.0.1.evil.example:{port}"):
        refused = get(device, Host=host)
        assert refused.status == 403 and b"is not this machine" in refused.read()
    refused = get(device, Origin="http://evil.example")
    assert refused.status == 403 and b"is not this page" in refused.read()
    for path in SOCKETS:
        assert upgrade(device, path) == 101
        assert upgrade(device, path, Host=f"localhost:{port}") == 101
        assert upgrade(device, path, origin="http://evil.example") == 403
        assert upgrade(device, path, origin=f"http://127.0.0.1:{port + 1}") == 403
        assert upgrade(device, path, origin="null") == 403
        assert upgrade(device, path, origin=None) == 403
        assert upgrade(device, path, Host="evil.example") == 403
    with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{port}/drive", origin="http://evil.example"):
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    """A device beyond loopback, in a process of its own that may be killed."""
    program = """
import json
from hilt.teleop.browser import Browser
device = Browser("0.0.0.0")
found = {"url": device.url, "token": device.token, "page": device._page.pid, "folder": str(device._folder)}
print(json.dumps(found), flush=True)
input()
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    yield SimpleNamespace(**json.loads(owner.stdout.readline()), owner=owner)
    owner.kill()
    owner.communicate(timeout=600)


def test_beyond_loopback_the_token_is_needed(elsewhere: Any):
    device = elsewhere
    assert len(device.token) >= 20 and device.url.endswith(f"/?token={device.token}")
    command = Path(f"/proc/{device.page}/cmdline").read_bytes()
    assert device.token.encode() not in command
    refused = get(device)
    assert refused.status == 403 and b"needs its token" in refused.read()
    assert get(device, "/?token=wrong").status == 403
    assert get(device, Cookie=f"hilt-{device.token[:6]}=wrong").status == 403
    assert get(device, "/_nicegui/anything").status == 403
    entered = get(device, f"/?token={device.token}")
    cookie = entered.headers["Set-Cookie"]
    assert (
        entered.status == 200
        and "HttpOnly" in cookie
        and "samesite=strict" in cookie.lower()
        and b"url=/" in entered.read()
    )
    cookie = cookie.partition(";")[0]
    assert get(device, Cookie=cookie).status == 200
    assert get(device, Cookie=f"other=1; {cookie}", Host="192.168.1.5:80").status == 200
    assert get(device, Cookie=cookie, Host="evil.example").status == 403
    for path in SOCKETS:
        assert upgrade(device, path) == 403
        assert upgrade(device, path, Cookie=f"hilt-{device.token[:6]}=wrong") == 403
        assert upgrade(device, path, Cookie=cookie) == 101
        assert upgrade(device, path, Cookie=cookie, origin="http://evil.example") == 403


# The process


def test_browser_port_in_use_is_reported(device: Browser):
    port = urlsplit(device.url).port
    assert port is not None
    with pytest.raises(
        ConfigError, match=rf"127.0.0.1 port {port}: cannot listen here \(Address already in use\). Give another port"
    ):
        Browser(port=port)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid port 0: cannot listen here"):
        Browser("no.such.host.invalid")


def test_browser_sockets_are_in_a_private_folder(device: Browser):
    assert device._folder.stat().st_mode & 0o777 == 0o700


def test_browser_page_that_cannot_start_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nicegui").mkdir()
    (tmp_path / "nicegui/__init__.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"exit status 1 \(RuntimeError: broken on purpose\)") as error:
        Browser()
    assert "Traceback" in str(error.value)


def test_the_page_ends_with_its_parent_and_leaves_nothing(elsewhere: Any):
    folder = Path(elsewhere.folder)
    assert folder.exists() and running(elsewhere.page)
    elsewhere.owner.kill()
    elsewhere.owner.wait(60)
    deadline = time.monotonic() + 120
    while (folder.exists() or running(elsewhere.page)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists() and not running(elsewhere.page)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_browser_page_that_dies_is_reported_with_its_output(device: Browser):
    """The last one: the device is of no use afterwards."""
    device._page.send_signal(signal.SIGKILL)
    with pytest.raises(DeviceError, match=r"the page ended with exit status -9 .* Start the run again"):
        until(device, lambda reading: False)
    device.close()
    assert not device._folder.exists()
