"""An actor as a process: inserts known transitions into two stores, at a pace, until it is told to stop or killed.

    python -m tests.wire.actor_main --number 1 --life 0 --port 5588 --broadcast 5589 --journal FILE [--spool FOLDER]

Its journal has, per store, `begin n` before an insert, `insert n number` after it returned, `ack
number` when everything up to that number is known to be process-safe at the learner; `weights version`
for weights that arrived, and `flushed` at the end.
"""

from __future__ import annotations

import argparse
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.replay import QueuedDataStore
from hilt.wire import TrainerClient, link, make_trainer_config
from tests.wire.journal import Journal, Stop, lines
from tests.wire.steps import STORES, Life, Told, transition, wanted_in

FLUSH_MS = 60_000


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--life", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--broadcast", type=int, required=True)
    parser.add_argument("--keys")
    parser.add_argument("--key-name")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--spool", type=Path, help="a folder for the spools; in memory without")
    parser.add_argument("--capacity", type=int, default=200, help="transitions that a spool keeps in memory")
    parser.add_argument("--hertz", type=float, default=50)
    parser.add_argument(
        "--eager", action="store_true", help="many messages are on their way at a time, as with large images"
    )
    parser.add_argument(
        "--epoch", type=float, default=0.0, help="the monotonic time that inserts are stamped relative to"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    journal = Journal(args.journal)
    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        act(args, journal, stop)
    except Exception as error:
        journal.write("error", repr(error), *traceback.format_exc().replace("\n", " | ").split())
        raise


def act(args: argparse.Namespace, journal: Journal, stop: Stop) -> None:
    if args.eager:
        link.WORTH_SENDING = 1
    spools = {
        store: QueuedDataStore(args.capacity, path=args.spool / store) if args.spool else QueuedDataStore(args.capacity)
        for store in STORES
    }
    journal.write("opened", *(len(spool) for spool in spools.values()))
    config = make_trainer_config(args.port, args.broadcast, keys=args.keys, key_name=args.key_name)
    client = TrainerClient(f"actor-{args.number}", args.host, config, data_stores=spools, wait_for_server=True)
    client.recv_network_callback(lambda weights: _got(journal, weights))
    journal.write("connected")
    acknowledged = dict.fromkeys(spools, -1)

    def look() -> None:
        for store, known in client.stats()["stores"].items():
            number = known["process_safe"]
            if number > acknowledged[store]:
                acknowledged[store] = number
                journal.write("ack", store, number)

    n, due = 0, time.monotonic()
    while not stop.is_set():
        step = transition(args.number, args.life, n, (time.monotonic() - args.epoch) * 1e3 if args.epoch else 0)
        for store, spool in spools.items():
            if wanted_in(store, n):
                journal.write("begin", store, n)
                number = spool.insert(step)
                journal.write("insert", store, n, number)
        look()
        n += 1
        due = max(due + 1 / args.hertz, time.monotonic() - 0.1)  # after a pause, no more than a few at once
        stop.wait(max(0.0, due - time.monotonic()))
    done = client.update(timeout_ms=FLUSH_MS)
    look()
    journal.write("flushed" if done else "unflushed", done, client.stats())
    client.stop()
    for spool in spools.values():
        spool.close()
    journal.write("stopped")


def _got(journal: Journal, weights: Any) -> None:
    version, values = int(weights["version"]), np.asarray(weights["values"])
    journal.write("weights", version, "whole" if (values == version).all() else f"torn {np.unique(values)}")


def told(journal: Path) -> dict[str, Told]:
    """What one process said, per store."""
    by_store = {store: Told() for store in STORES}
    for word, *rest in lines(journal):
        if word == "begin":
            by_store[rest[0]].begun = int(rest[1])
        elif word == "insert":
            by_store[rest[0]].inserted[int(rest[1])] = int(rest[2])
        elif word == "ack":
            by_store[rest[0]].acknowledged = int(rest[1])
    return by_store


def told_by(journals: dict[Life, Path]) -> dict[str, dict[Life, Told]]:
    """What all processes said: store -> life -> what."""
    found: dict[str, dict[Life, Told]] = {store: {} for store in STORES}
    for life, path in journals.items():
        for store, what in told(path).items():
            found[store][life] = what
    return found


if __name__ == "__main__":
    main()
