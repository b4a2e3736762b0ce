"""Actors, learner and weights over the wire, beside a real Reverb server and bare ZeroMQ:
all on loopback, each in a process of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import Group, Lab, cpu_seconds, remove, resident
from bench.limits import PlainAppend, touch_memory
from bench.report import ROOT, Row, at_least, at_most, below
from bench.sides import Side
from bench.timing import Rates, seconds_of
from bench.workloads import W1, steps_of
from hilt.wire.keys import new_keys, read_key

REVERB = ROOT / ".venv-reverb/bin/python"
NO_AGENTLACE = "agentlace is on no package index and was not measured"
Turn = Callable[[list[int]], tuple[float, float]]
"""Sends these episodes; seconds until all were acknowledged, and until all were power-safe."""


def stream(lab: Lab) -> list[Row]:
    """W1 as fast as one actor can send it. In every round each contender sends the same
    episodes, made ready before its clock starts."""
    count, rounds = lab.pick(2_000, 200), lab.pick(9, 2)
    total = (rounds + 1) * count
    touch_memory(lab.folder, 600_000 * total)  # what all contenders together write
    lab.limits["disk write + fsync"] = f"{_disk_limit(lab):.2f} GB/s"
    took: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        contenders = {
            "memory": _ours(lab, stack, "memory"),
            "copies": _ours(lab, stack, "copies", own=True),
            "disk": _ours(lab, stack, "disk", spool=lab.new("spool")),
            "keys": _ours(lab, stack, "keys", keys=_new_keys(lab)),
            "zmq": _bare(stack),
        }
        found, absent = reverb_or_why_not(stack, total)
        contenders |= found
        for round_number in range(rounds + 1):
            lab.progress(f"stream: round {round_number} of {rounds}")
            first = round_number * count // W1.episode
            for name, turn in contenders.items():
                seconds = turn(list(range(first, first + count // W1.episode)))
                if round_number:  # the first one is not counted
                    took.setdefault(name, []).append(seconds)
    for path in ("log-memory", "log-copies", "log-disk", "log-keys", "spool", "keys"):
        remove(lab.folder / path)
    rates = {name: Rates([count / process for process, _ in found]) for name, found in took.items()}
    power = {name: Rates([count / power for _, power in found]).median for name, found in took.items()}
    lab.limits["zmq push/pull of one W1"] = f"{rates['zmq'].median * w1_bytes() / 1e9:.2f} GB/s"
    beside = {
        "unit": "transitions/s",
        "peers": {"Reverb": rates["Reverb"].median} if "Reverb" in rates else {},
        "limit": rates["zmq"].median,
        "limit_name": (
            f"zmq push/pull of {w1_bytes():,} bytes in one frame per transition: nothing kept, nothing acknowledged"
        ),
        "size": lab.size(total, W1().transitions, "transitions"),
    }
    return [
        Row(
            name="w1_stream",
            ours=rates["memory"].median,
            spread=rates["memory"].spread,
            what="W1 from the first insert into a memory spool until all are acknowledged process-safe, each "
            "exactly once in the learner's log on disk, which is synced at most every 10 ms",
            targets=[at_least(5_000), at_least(2, "peer")],
            absent=absent,
            note=f"{power['memory']:,.0f}/s until all are power-safe; {rates['copies'].median:,.0f}/s with "
            f"copies as next observations; Reverb's table is in memory; {NO_AGENTLACE}",
            **beside,
        ),
        Row(
            name="w1_stream_disk_spool",
            ours=rates["disk"].median,
            spread=rates["disk"].spread,
            what="the same through a spool on disk: an insert returns when the step is "
            "process-safe in the actor's own files",
            targets=[at_least(2_000)],
            note=f"{power['disk']:,.0f}/s until all are power-safe; spool and log are on one disk here",
            **beside,
        ),
        Row(
            name="w1_stream_keys",
            ours=rates["keys"].median,
            spread=rates["keys"].spread,
            what="as w1_stream, with keys: every byte is encrypted, as it is beyond loopback",
            note=f"{power['keys']:,.0f}/s until all are power-safe",
            **beside,
        ),
    ]


def _ours(
    lab: Lab, stack: ExitStack, name: str, own: bool = False, spool: Path | None = None, keys: str | None = None
) -> Turn:
    learner, ports = start_learner(lab, stack, name, keys=keys)
    actor = start_actor(stack, ports, f"actor-{name}", spool=spool, keys=keys)
    sent: list[int] = []

    def turn(episodes: list[int]) -> tuple[float, float]:
        actor.ask("prepare", episodes=episodes, own=own)
        found = actor.ask("stream", timeout=300)
        sent.extend(episodes)
        learner.ask("check", sent=sent)
        return found["end"] - found["start"], found["power"] - found["start"]

    return turn


def _new_keys(lab: Lab) -> str:
    new_keys(lab.new("keys"), ["learner", "actor"])
    return str(lab.folder / "keys")


def reverb_or_why_not(stack: ExitStack, total: int) -> tuple[dict[str, Turn], dict[str, str]]:
    """(the contender, why there is none), each by its name."""
    try:
        return {"Reverb": _reverb(stack, total)}, {}
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        return {}, {"Reverb": f"{why}; make bench ARGS=wire installs it, with Python 3.10 or 3.11"}


def _reverb(stack: ExitStack, total: int) -> Turn:
    if not REVERB.exists():
        raise OSError("there is no .venv-reverb")
    server, client = (stack.enter_context(Side("bench.wire_reverb", role, REVERB)) for role in ("server", "client"))
    client.ask("start", port=server.ask("start", transitions=total))
    sent: list[int] = []

    def turn(episodes: list[int]) -> tuple[float, float]:
        client.ask("prepare", episodes=episodes)
        found = client.ask("stream", timeout=300)
        sent.extend(episodes)
        client.ask("check", transitions=len(sent) * W1.episode)
        return found["end"] - found["start"], float("inf")

    return turn


def _bare(stack: ExitStack) -> Turn:
    push, pull = _side(stack, "socket"), _side(stack, "socket")
    push.ask("connect", kind="PUSH", ports=[pull.ask("bind", kind="PULL")])

    def turn(episodes: list[int]) -> tuple[float, float]:
        count = len(episodes) * W1.episode
        pull.tell("receive", nbytes=w1_bytes(), count=count)
        start = push.ask("send", nbytes=w1_bytes(), count=count)
        return pull.answer() - start, float("inf")

    return turn


def latency(lab: Lab) -> list[Row]:
    """One W1 at a time: nothing else is under way."""
    episodes, rounds = lab.pick(2, 1), lab.pick(9, 1)
    found: dict[str, list[list[float]]] = {"process": [], "power": [], "zmq": []}
    with ExitStack() as stack:
        learner, ports = start_learner(lab, stack, "latency")
        actor = start_actor(stack, ports, "actor")
        asking, answering = _side(stack, "socket"), _side(stack, "socket")
        asking.ask("connect", kind="REQ", ports=[answering.ask("bind", kind="REP")])
        sent: list[int] = []
        for round_number in range(rounds + 1):
            lab.progress(f"latency: round {round_number} of {rounds}")
            turns = {}
            for name in ("process", "power"):
                now = list(range(len(sent), len(sent) + episodes))
                sent += now
                actor.ask("prepare", episodes=now)
                turns[name] = actor.ask("latency", power=name == "power", timeout=300)
            count = episodes * W1.episode
            answering.tell("answer", count=count)
            turns["zmq"] = asking.ask("round_trips", nbytes=w1_bytes(), count=count)
            answering.answer()
            if round_number:
                for name, seconds in turns.items():
                    found[name].append([1000 * s for s in seconds])
        learner.ask("check", sent=sent)
    remove(lab.folder / "log-latency")
    counted = len(found["process"]) * len(found["process"][0])
    rows = []
    for name, share, target in (("process", 50, 2), ("process", 99, 10), ("power", 50, None), ("power", 99, None)):
        per_round = [float(np.percentile(turn, share)) for turn in found[name]]
        ours = float(np.percentile(found[name], share))
        rows.append(
            Row(
                name=f"w1_latency_{name}_p{share}",
                ours=ours,
                spread=(min(ours, *per_round), max(ours, *per_round)),
                unit="ms",
                what=f"one W1 from insert to its acknowledgment as {name}-safe, percentile {share}, one at a time"
                + ("; the learner's log is synced at most 10 ms after a write" if name == "power" else ""),
                targets=[at_most(target)] if target else [],
                limit=float(np.percentile(found["zmq"], share)),
                limit_name=f"zmq round trip: {w1_bytes():,} bytes there, 8 back; the same percentile",
                size=lab.size(counted, 9 * 200, "transitions"),
                note=f"of {counted:,}; the slowest took {np.max(found[name]):.3g} ms",
            )
        )
    return rows


def weights(lab: Lab) -> list[Row]:
    """50 MB to one subscriber and to four. In every round each contender carries the same arrays once."""
    rounds, nbytes = lab.pick(30, 3), 50_000_000
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ours, bare = {}, {}
        for count in (1, 4):
            learner, ports = start_learner(lab, stack, f"weights-{count}")
            subscribers = [_side(stack, "subscriber") for _ in range(count)]
            for i, subscriber in enumerate(subscribers):
                subscriber.ask("start", ports=ports, name=f"subscriber-{i}")
            ours[count] = learner, subscribers
            pulls = [_side(stack, "socket") for _ in range(count)]
            push = _side(stack, "socket")
            push.ask("connect", kind="PUSH", ports=[pull.ask("bind", kind="PULL") for pull in pulls])
            bare[count] = push, pulls
        for version in range(1, rounds + 2):
            lab.progress(f"weights: round {version - 1} of {rounds}")
            for count in (1, 4):
                learner, subscribers = ours[count]
                for subscriber in subscribers:
                    subscriber.tell("expect", version=version)
                start = learner.ask("publish", version=version)
                ends = [subscriber.answer() for subscriber in subscribers]
                push, pulls = bare[count]
                for pull in pulls:
                    pull.tell("receive", nbytes=nbytes, count=1)
                sent = push.ask("send", nbytes=nbytes, count=count)
                arrived = [pull.answer() for pull in pulls]
                if version > 1:
                    took.setdefault(f"ours {count}", []).append(1000 * (max(ends) - start))
                    took.setdefault(f"zmq {count}", []).append(1000 * (max(arrived) - sent))
    median = {name: float(np.median(found)) for name, found in took.items()}
    rows = []
    for count, name, most in ((1, "weights_50mb", 60.0), (4, "weights_50mb_4", 120.0)):
        rows.append(
            Row(
                name=name,
                ours=median[f"ours {count}"],
                spread=(min(took[f"ours {count}"]), max(took[f"ours {count}"])),
                unit="ms",
                what="50,000,000 bytes in 25 arrays from the call of publish_network until "
                f"{'the' if count == 1 else 'the last'} callback has them all, {count} "
                f"subscriber{'s' if count > 1 else ''} {'each ' if count > 1 else ''}in a process of its own",
                targets=[at_most(most)],
                limit=median[f"zmq {count}"],
                limit_name=f"zmq push of the same bytes in one frame to {count}",
                size=lab.size(rounds, 30, "rounds"),
                note=f"{median['ours 4'] / median['ours 1']:.2g}x weights_50mb; bare zmq "
                f"{median['zmq 4'] / median['zmq 1']:.2g}x"
                if count > 1
                else NO_AGENTLACE,
            )
        )
    for count in ours:
        remove(lab.folder / f"log-weights-{count}")
    return rows


def actors(lab: Lab) -> list[Row]:
    """Eight robots at 20 Hz: memory that stays as it is, and acknowledgments in time."""
    many, hz, seconds = 8, 20.0, lab.pick(600, 20)
    pool, warm = 256, seconds / 5
    capacity = int(many * hz * warm * 0.8)  # so that eviction is under way when the warm-up ends
    memory: dict[str, list[int]] = {}
    with ExitStack() as stack:
        learner, ports = start_learner(lab, stack, "actors", capacity=capacity, pool=pool)
        robots = [start_actor(stack, ports, f"actor-{i}", pool=pool) for i in range(many)]
        start, cpu = time.monotonic() + 0.5, cpu_seconds(learner.pid)
        for i, robot in enumerate(robots):
            # Spread over the period, as robots that know nothing of each other are.
            robot.tell("pace", hz=hz, start=start + i / (many * hz), seconds=seconds, first=1000 * i)
        while (at := time.monotonic() - start) < seconds:
            if at >= warm:
                for name, side in (("learner", learner), *((f"actor-{i}", robot) for i, robot in enumerate(robots))):
                    found = resident(side.pid)
                    memory.setdefault(name, []).append(found["RssAnon"] + found["RssShmem"])
            if int(at) % 60 == 0:
                lab.progress(f"actors: {at:.0f} of {seconds} s")
            time.sleep(seconds / 300)
        lags = 1000 * np.array([robot.answer() for robot in robots])
        busy = 100 * (cpu_seconds(learner.pid) - cpu) / seconds
        held = learner.ask("check")
        received = learner.ask("received")
    remove(lab.folder / "log-actors")
    assert received == lags.size, f"{received} steps were received, {lags.size} were acknowledged"
    # The least in a while: a block of steps that is on its way is no growth, and what leaks is never given back.
    grown = {
        name: (min(found[-(len(found) // 4) :]) - min(found[: len(found) // 4])) / 1e6 for name, found in memory.items()
    }
    most = max((name for name in grown if name != "learner"), key=grown.__getitem__)
    size = lab.size(seconds, 600, "seconds")
    return [
        Row(
            name="actors_8_lag_p99",
            ours=float(np.percentile(lags, 99)),
            spread=None,
            unit="ms",
            what="eight actors, each with W1 at 20 Hz for ten minutes: from when a step was due to be inserted "
            "until it is acknowledged process-safe, percentile 99",
            targets=[below(100)],
            size=size,
            note=f"p50 {np.median(lags):.3g} ms, slowest {lags.max():.3g} ms of {lags.size:,} steps; "
            f"nothing lost, nothing twice; the log holds {held:,} at a time; receiving, storing and syncing took the "
            f"learner {busy:.2g}% of a core",
        ),
        Row(
            name="actors_8_memory",
            ours=float(max(grown.values())),
            unit="MB",
            what="growth of the process that grew most, learner or actor (RssAnon + RssShmem): the least of the "
            "run's last fifth less that of its second, after eviction has begun",
            targets=[at_most(2)],
            size=size,
            note=f"the learner by {grown['learner']:.2g} MB from {memory['learner'][0] / 1e6:.0f}, of the "
            f"actors at most {most} by {grown[most]:.2g} MB from {memory[most][0] / 1e6:.0f}",
        ),
    ]


def strangers(lab: Lab) -> list[Row]:
    """What those cost who have no key: connections that say nothing, that have another
    server's key, and whose key is not on the list."""
    seconds, per_second = lab.pick(20, 3), 1_000
    shares: dict[str, float] = {}
    grown, made = 0.0, []
    with ExitStack() as stack:
        keys = _new_keys(lab)
        learner, ports = start_learner(lab, stack, "strangers", keys=keys)
        stranger = _side(stack, "stranger")
        server_key = read_key(Path(keys) / "learner.pub").public.decode()
        for port, name in zip(ports, ("data", "weights"), strict=True):
            for kind in ("connects only", "wrong server key", "unlisted key"):
                lab.progress(f"strangers: {kind}, {name} port")
                flood = {"kind": kind, "port": port, "server_key": server_key, "per_second": per_second}
                stranger.ask("flood", seconds=3, **flood)  # until all is allocated that is allocated once
                before, cpu = resident(learner.pid)["RssAnon"], cpu_seconds(learner.pid)
                made.append(stranger.ask("flood", seconds=seconds, timeout=300, **flood))
                shares[f"{kind}, {name} port"] = 100 * (cpu_seconds(learner.pid) - cpu) / seconds
                grown = max(grown, (resident(learner.pid)["RssAnon"] - before) / 1e6)
    for path in ("log-strangers", "keys"):
        remove(lab.folder / path)
    each = "; ".join(f"{kind} {share:.2g}%" for kind, share in shares.items())
    too_slow = "" if min(made) > 0.95 * per_second else f"{min(made):.0f} attempts/s instead of {per_second:,}"
    size = lab.size(seconds, 20, "seconds") or too_slow
    return [
        Row(
            name="strangers_cpu",
            ours=max(shares.values()),
            unit="% of a core",
            what="the learner's processor time while 1,000 connections a second come without a key that is on "
            "its list, the dearest kind",
            targets=[at_most(5)],
            size=size,
            note=f"{each}; all of the learner's own doing is in it",
        ),
        Row(
            name="strangers_memory",
            ours=grown,
            unit="MB",
            what="the most that its memory (RssAnon) grew in one of these floods",
            targets=[at_most(2)],
            size=size,
        ),
    ]


def start_learner(lab: Lab, stack: ExitStack, name: str, **settings: Any) -> tuple[Side, list[int]]:
    learner, ports = _side(stack, "learner"), free_ports(2)
    learner.ask("start", ports=ports, path=str(lab.new(f"log-{name}")), **settings)
    return learner, ports


def start_actor(stack: ExitStack, ports: list[int], name: str, spool: Path | None = None, **settings: Any) -> Side:
    actor = _side(stack, "actor")
    actor.ask("start", ports=ports, name=name, path=str(spool) if spool else None, **settings)
    return actor


def _side(stack: ExitStack, role: str) -> Side:
    return stack.enter_context(Side("bench.wire_sides", role))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def w1_bytes() -> int:
    """Returns the size in bytes of one transition as an actor holds it, with both observations."""
    step = steps_of(W1(pool=W1.episode).columns(0))[0]
    seen = [*step["observations"].values(), *step["next_observations"].values()]
    return sum(np.asarray(v).nbytes for v in [*seen, *(v for v in step.values() if not isinstance(v, dict))])


def _disk_limit(lab: Lab) -> float:
    """GB/s of 10 MB at a time."""
    append = PlainAppend(lab.new("append"), [49152] * 200)
    seconds = [seconds_of(append) for _ in range(lab.pick(20, 5))]
    append.close()
    remove(lab.folder / "append")
    return append.nbytes / float(np.median(seconds)) / 1e9


GROUPS = {
    "stream": Group(("w1_stream", "w1_stream_disk_spool", "w1_stream_keys"), stream),
    "latency": Group(
        tuple(f"w1_latency_{safe}_p{share}" for safe in ("process", "power") for share in (50, 99)), latency
    ),
    "weights": Group(("weights_50mb", "weights_50mb_4"), weights),
    "strangers": Group(("strangers_cpu", "strangers_memory"), strangers),
    "actors": Group(("actors_8_lag_p99", "actors_8_memory"), actors),
}
