"""What the benchmark of `hilt serve-policy` drives: the server as a process of its own, clients in another one that
imports no torch, and the policy alone.

    python -m bench.serve_sides clients URL NUMBER SECONDS PIXELS
    python -m bench.serve_sides alone FOLDER ROWS SECONDS PIXELS
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench.sides import ROOT

START_S, ANSWER_S = 120.0, 60.0
STATE_DIM = 8


def observation(pixels: int, seed: int = 0) -> dict[str, Any]:
    """Two pictures, a state and an instruction, by openpi's names."""
    draws = np.random.default_rng(seed)
    return {
        "observation/image": draws.integers(0, 256, (pixels, pixels, 3), np.uint8),
        "observation/wrist_image": draws.integers(0, 256, (pixels, pixels, 3), np.uint8),
        "observation/state": draws.normal(size=STATE_DIM).astype(np.float32),
        "prompt": "put the bowl on the plate",
    }


def make_policy(folder: Path, pixels: int) -> Path:
    """Writes a small_vla that looks at two pictures of this size, and has learned nothing."""
    from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

    cameras = ("full_image", "wrist_image")
    SmallVLA(SmallVLAConfig(cameras=cameras, image_size=pixels, state_dim=STATE_DIM)).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(folder: Path, *words: str) -> Iterator[str]:
    """``hilt serve-policy`` as a user starts it; its address."""
    command = [sys.executable, "-m", "hilt", "serve-policy", str(folder), "--port", "0", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        assert process.stdout is not None
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        try:
            found = next((match for line in process.stdout if (match := re.search(r"ws://[\d.:]+", line))), None)
            timer.cancel()
            if found is None:
                raise OSError(f"hilt serve-policy did not begin within {START_S:g} s")
            yield found[0]
        finally:
            timer.cancel()
            process.send_signal(signal.SIGINT)
            process.wait(ANSWER_S)


def side(*words: object) -> dict[str, Any]:
    """Runs one of the commands above, and returns what it measured."""
    command = [sys.executable, "-m", "bench.serve_sides", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=600)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


# --- clients ---


def clients(url: str, number: int, seconds: float, pixels: int) -> dict[str, Any]:
    """Each asks as soon as it is answered. Returns answers a second, and milliseconds that each answer took beyond the
    policy's own time, without the first ones."""
    from websockets.sync.client import connect

    from hilt.serving.array_messages import unpack

    added: list[list[float]] = [[] for _ in range(number)]
    batches: list[list[int]] = [[] for _ in range(number)]
    together, ending = threading.Barrier(number + 1, timeout=ANSWER_S), threading.Event()

    def converse(place: int) -> None:
        seen = observation(pixels, place)
        with connect(url, compression=None, max_size=None) as socket:
            unpack(_bytes(socket.recv(ANSWER_S)))
            for _ in range(3):
                _ask(socket, seen)
            together.wait()
            while not ending.is_set():
                took, answer = _ask(socket, seen)
                added[place].append(took - answer["policy_timing"]["infer_ms"])
                batches[place].append(answer["server_timing"]["batch"])

    threads = [threading.Thread(target=converse, args=(place,)) for place in range(number)]
    for thread in threads:
        thread.start()
    together.wait()
    began = time.perf_counter()
    ending.wait(seconds)
    ending.set()
    for thread in threads:
        thread.join(ANSWER_S)
    took = time.perf_counter() - began
    count = sum(map(len, added))
    return {"rate": count / took, "added_ms": [*chain(*added)], "batch": float(np.mean([*chain(*batches)]))}


def _ask(socket: Any, seen: dict[str, Any]) -> tuple[float, Any]:
    from hilt.serving.array_messages import pack, unpack

    began = time.perf_counter()
    socket.send(pack(seen))
    answer = unpack(_bytes(socket.recv(ANSWER_S)))
    return 1e3 * (time.perf_counter() - began), answer


def _bytes(message: bytes | str) -> bytes:
    if isinstance(message, str):
        raise OSError(message)
    return message


# --- the policy alone ---


def alone(folder: str, rows: int, seconds: float, pixels: int) -> dict[str, Any]:
    """One process that calls the policy with this number of observations, again and again."""
    from hilt.core.threads import one_thread

    one_thread()
    from bench.timing import rate_of
    from hilt.policies.registry import load_policy
    from hilt.serving.observation_names import our_name

    policy = load_policy(folder).eval()
    seen = [{our_name(name): value for name, value in observation(pixels, place).items()} for place in range(rows)]
    for _ in range(3):
        policy.act(seen, sample=False)
    return {"rate": rows * rate_of(lambda: policy.act(seen, sample=False), seconds)}


def main(words: Sequence[str]) -> None:
    kind, first, number, seconds, pixels = words
    measure = {"clients": clients, "alone": alone}[kind]
    print(json.dumps(measure(first, int(number), float(seconds), int(pixels))))


if __name__ == "__main__":
    main(sys.argv[1:])
