"""A learner as a process: takes steps into two buffers on disk, looks at some of
them, and publishes weights now and then.

    python -m tests.wire.learner_main --folder FOLDER --port 5588 --broadcast 5589 --journal FILE

Started again on the same folder it goes on where the one before was, whatever ended that one. Its journal has `ready`,
`published version`, `look bytes_of_memory steps` now and then, `lag milliseconds`, and `stats` at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.wire import TrainerServer, make_trainer_config
from tests.wire.journal import Journal, Stop, said
from tests.wire.steps import STORES, check_pixels, make_buffer

WEIGHTS = 50_000
"""Numbers in what is published."""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--broadcast", type=int, required=True)
    parser.add_argument("--bind")
    parser.add_argument("--keys")
    parser.add_argument("--key-name")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--publish", type=float, default=0.5, help="seconds between two versions of the weights")
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
        learn(args, journal, stop)
    except Exception as error:
        journal.write("error", repr(error), *traceback.format_exc().replace("\n", " | ").split())
        raise


def learn(args: argparse.Namespace, journal: Journal, stop: Stop) -> None:
    version = max((int(line[1]) for line in said(args.journal, "published")), default=0)
    buffers = {store: make_buffer(args.folder / store, args.capacity, seed=0) for store in STORES}
    config = make_trainer_config(args.port, args.broadcast, keys=args.keys, key_name=args.key_name, bind_ip=args.bind)
    lags: list[float] = []

    def arrived(store: str, payload: dict[str, Any]) -> None:
        if args.epoch:
            now = (time.monotonic() - args.epoch) * 1e3
            lags.extend(now - float(np.asarray(step["actions"])[1]) for step in payload["data"])

    server = TrainerServer(config, data_callback=arrived)
    for store, buffer in buffers.items():
        server.register_data_store(store, buffer)
    server.start(threaded=True)
    journal.write("ready", *(len(buffer) for buffer in buffers.values()))
    due = look_at = time.monotonic()
    while not stop.wait(0.02):
        now = time.monotonic()
        if args.publish and now >= due:
            version += 1
            # first: nobody may have seen a version that is given again after a kill
            journal.write("published", version)
            server.publish_network(
                {"version": version, "values": np.full(WEIGHTS, version, np.float32)}, version=version
            )
            due = now + args.publish
        if now >= look_at:
            for buffer in buffers.values():
                if len(buffer):
                    check_pixels(buffer.sample(8))
            if lags:
                taken, lags[:] = lags[:], []
                journal.write("lag", *(f"{value:.1f}" for value in np.percentile(taken, [50, 99, 100])), len(taken))
            look_at = now + 0.25
    server.stop()
    journal.write("stats", json.dumps(server.stats(), default=str).replace(" ", ""))
    for buffer in buffers.values():
        buffer.close()
    journal.write("stopped")


if __name__ == "__main__":
    main()
