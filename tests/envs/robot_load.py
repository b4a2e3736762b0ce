"""Load on a robot server: many connections that ask without a pause, and what the control loop's period was meanwhile.

python -m tests.envs.robot_load            50 connections, 1,000 requests each, against `hilt serve-robot`
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from tests.envs.robot_clients import Client, serve_robot

TIMEOUT_S = 60.0


def load(url: str, connections: int = 50, requests: int = 1000) -> dict[str, Any]:
    """Reads the state, and now and then commands a pose or sends nonsense; ends with the
    period of the control loop over that time."""
    pose = Client(url).post("/getpos")["pose"]
    began = time.monotonic()
    answers = asyncio.run(_all(url, connections, requests, pose))
    seconds = time.monotonic() - began
    period = Client(url).post("/status", {"seconds": seconds})["period"]
    return {
        "connections": connections,
        "requests": connections * requests,
        "seconds": seconds,
        "answers": dict(answers),
        "period": period,
        "p99_of_nominal": period["p99"] / period["nominal"],
    }


async def _all(url: str, connections: int, requests: int, pose: list[float]) -> Counter[int]:
    answers: Counter[int] = Counter()
    await asyncio.gather(*(_one(url, requests, pose, answers) for _ in range(connections)))
    return answers


async def _one(url: str, requests: int, pose: list[float], answers: Counter[int]) -> None:
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    for number in range(requests):
        path, body = "/getstate", b""
        if number % 10 == 1:
            path, body = "/pose", json.dumps({"arr": pose}).encode()
        elif number % 10 == 6:
            path, body = "/pose", b'{"arr": [1, 2, NaN]}'
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        length = next(
            int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
        )
        await asyncio.wait_for(reader.readexactly(length), TIMEOUT_S)
        answers[int(head.split()[1])] += 1
    writer.close()


if __name__ == "__main__":
    with serve_robot(*sys.argv[1:]) as urls:
        print(json.dumps(load(urls[0]), indent=1))
