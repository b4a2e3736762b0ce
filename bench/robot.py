"""The robot's side: our simulated bench beside gym-hil and bare MuJoCo, the robot
server's control loop under load, and the page."""

from __future__ import annotations

import http.client
import sys
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.lab import Group, Lab, remove
from bench.report import Row, Target, at_least
from bench.robot_sides import SIZE
from bench.sides import Side
from bench.timing import Rates

CONNECTIONS = 50
GYM_HIL = sys.executable
"""The Python that has it"""


def tabletop(lab: Lab) -> list[Row]:
    """In every round each contender runs for a while, on the same core, while the others wait."""
    states, rounds = lab.pick(10, 2), lab.pick(9, 2)
    took: dict[str, list[float]] = {}
    cpu: list[float] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Side("bench.robot_sides", "tabletop"))
        about = ours.ask("start", states=states)
        contenders = {
            name: (ours, name) for name in ("steps", "physics", "render", "bare", "bare with pictures", "stock render")
        }
        peer, version, absent = gym_hil_or_why_not(stack)
        if peer is not None:
            contenders |= {
                f"gym-hil, {name}": (peer, name) for name in ("as shipped", "shadows off", "without cameras")
            }
        for number in range(rounds + 1):
            lab.progress(f"tabletop: round {number} of {rounds}")
            for name, (side, contender) in contenders.items():
                rate, cpu_rate = side.ask("rate", name=contender, seconds=lab.seconds)
                if number:  # the first one is not counted
                    took.setdefault(name, []).append(rate)
                    cpu += [cpu_rate] if name == "steps" else []
    assert about["succeeded"], "the expert's episodes reach the step limit, so they are not what they are said to be"
    rates = {name: Rates(found) for name, found in took.items()}
    size = lab.size(rounds, 9, "rounds")
    gym_hil = {name: rates[name].median for name in rates if name.startswith("gym-hil")}
    note = f"{np.median(cpu):,.0f} in a second of processor time"
    note += (
        f"; gym-hil {version}, PandaPickCubeBase-v0: 50 substeps of 2 ms, its controller in Python"
        if peer is not None
        else ""
    )
    return [
        Row(
            name="tabletop_steps",
            ours=rates["steps"].median,
            spread=rates["steps"].spread,
            unit="steps/s",
            what=f"control steps at 10 Hz with two {SIZE}x{SIZE} pictures, episodes of pick as its expert acts, "
            "resets included, one core",
            targets=[at_least(250)],
            peers={name: rate for name, rate in gym_hil.items() if name != "gym-hil, without cameras"},
            absent=absent,
            limit=rates["bare with pictures"].median,
            limit_name=f"{about['substeps']} mj_steps of the same model and two pictures, nothing else",
            size=size,
            note=note,
        ),
        Row(
            name="tabletop_physics",
            ours=rates["physics"].median,
            spread=rates["physics"].spread,
            unit="steps/s",
            what="the same without pictures",
            peers={name: rate for name, rate in gym_hil.items() if name == "gym-hil, without cameras"},
            absent=absent,
            limit=rates["bare"].median,
            limit_name=f"{about['substeps']} mj_steps of the same model, the arm at rest",
            size=size,
        ),
        Row(
            name="tabletop_render",
            ours=rates["render"].median,
            spread=rates["render"].spread,
            unit="pictures/s",
            what=f"{SIZE}x{SIZE} pictures of the same scene, both cameras in turn, one core",
            peers={"mujoco.Renderer": rates["stock render"].median},
            size=size,
            note="mujoco.Renderer as it comes, with shadows, reflections and multisampling",
        ),
    ]


def gym_hil_or_why_not(stack: ExitStack) -> tuple[Side | None, str, dict[str, str]]:
    """(the side, its version, why there is none by its name)"""
    try:
        side = stack.enter_context(Side("bench.robot_sides", "gym-hil", GYM_HIL))
        return side, side.ask("start"), {}
    except (OSError, RuntimeError) as error:
        return None, "", {"gym-hil": f"{str(error).strip().splitlines()[-1]}; make bench ARGS=robot installs it"}


def server(lab: Lab) -> list[Row]:
    """The real ``hilt serve-robot``, first left alone, then asked by many at once; a
    bare application is asked likewise, in turns."""
    from tests.envs.robot_clients import Client, serve_robot
    from tests.envs.robot_load import load

    requests, rounds, idle_seconds = lab.pick(1_000, 100), lab.pick(3, 1), lab.pick(30, 2)
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        (url, *_) = stack.enter_context(serve_robot())
        bare = stack.enter_context(Side("bench.robot_sides", "bare")).ask("start")
        time.sleep(idle_seconds)
        idle = Client(url).post("/status", {"seconds": idle_seconds})["period"]
        alone = {name: latencies(at, lab.pick(2_000, 200)) for name, at in (("ours", url), ("bare", bare))}
        for number in range(rounds):
            lab.progress(f"server: round {number + 1} of {rounds}")
            result = load(url, CONNECTIONS, requests)
            # nonsense among it is refused, and nothing else
            assert set(result["answers"]) == {200, 400}, result["answers"]
            found.setdefault("p50", []).append(1e3 * result["period"]["p50"])
            found.setdefault("p99", []).append(1e3 * result["period"]["p99"])
            found.setdefault("max", []).append(1e3 * result["period"]["max"])
            found.setdefault("rate", []).append(result["requests"] / result["seconds"])
            result = load(bare, CONNECTIONS, requests)
            found.setdefault("bare", []).append(result["requests"] / result["seconds"])
    rates = {name: Rates(values) for name, values in found.items()}
    nominal = 1e3 * idle["nominal"]
    size = lab.size(CONNECTIONS * requests, 50_000, "requests")
    period: dict[str, Any] = {"unit": "ms", "limit": nominal, "limit_name": "the nominal period", "size": size}
    return [
        *(
            Row(
                name=f"server_period_idle_{name}",
                ours=1e3 * idle[name],
                what=f"period of the control loop, percentile {name[1:]}, for {idle_seconds} s in which nobody asks",
                **period,
            )
            for name in ("p50", "p99")
        ),
        *(
            Row(
                name=f"server_period_{name}",
                ours=rates[name].median,
                spread=rates[name].spread,
                what=f"the same while {CONNECTIONS} connections make {requests:,} requests each: state, "
                "poses, and one in ten nonsense",
                targets=[Target("limit", "<=", 1.2)] if name == "p99" else (),
                note=f"the longest was {max(found['max']):.1f} ms" if name == "p99" else "",
                **period,
            )
            for name in ("p50", "p99")
        ),
        Row(
            name="server_requests",
            ours=rates["rate"].median,
            spread=rates["rate"].spread,
            unit="requests/s",
            what="these requests, answered",
            limit=rates["bare"].median,
            limit_name="Starlette's routes with fixed values on uvicorn, the same client",
            size=size,
            note="the client takes a good part of the two cores",
        ),
        Row(
            name="server_getstate_p50",
            ours=float(np.median(alone["ours"])),
            unit="ms",
            what="one /getstate after the other on one connection; percentile 99 "
            f"{np.percentile(alone['ours'], 99):.2f} ms",
            limit=float(np.median(alone["bare"])),
            limit_name="the same application",
            size=size,
        ),
    ]


def page(lab: Lab) -> list[Row]:
    """The page in a real browser, two cameras of 128 pixels at 20 Hz."""
    from tests.teleop import chromium

    presses, rounds = lab.pick(40, 10), lab.pick(3, 1)
    absent = {"Chromium": why} if (why := chromium.absent()) else {}
    found: dict[str, list[float]] = {}
    for number in range(0 if absent else rounds):
        lab.progress(f"page: round {number + 1} of {rounds}")
        folder = lab.new(f"browser-{number}")
        folder.mkdir()
        for name, value in chromium.measure(folder, presses=presses).items():
            found.setdefault(name, []).append(value)
        remove(folder)
    what = {
        "frame_age": "age of a camera's frame when the browser has drawn it, from show() on",
        "key_latency": (
            "from the order to press a key in the browser to the reading that has it, the browser's driver included"
        ),
    }
    return [
        Row(
            name=f"page_{name}_{percentile}",
            ours=Rates(values).median if (values := found.get(f"{name}_{percentile}_ms")) else None,
            spread=Rates(values).spread if values else None,
            unit="ms",
            what=f"{text}, percentile {percentile[1:]}",
            absent=absent,
            size=lab.size(presses, 40, "presses"),
        )
        for name, text in what.items()
        for percentile in ("p50", "p95")
    ]


def latencies(url: str, count: int) -> list[float]:
    """Milliseconds of each request."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    took = []
    for _ in range(count):
        start = time.perf_counter()
        connection.request("POST", "/getstate", b"")
        connection.getresponse().read()
        took.append(1e3 * (time.perf_counter() - start))
    connection.close()
    return took


GROUPS = {
    "tabletop": Group(("tabletop_steps", "tabletop_physics", "tabletop_render"), tabletop),
    "server": Group(
        (
            "server_period_idle_p50",
            "server_period_idle_p99",
            "server_period_p50",
            "server_period_p99",
            "server_requests",
            "server_getstate_p50",
        ),
        server,
    ),
    "page": Group(tuple(f"page_{name}_{p}" for name in ("frame_age", "key_latency") for p in ("p50", "p95")), page),
}
