"""Run by `tests/core/test_platform.py` where Python takes itself for one on macOS:
imports everything and uses what must work there.

``python -m tests.core.mac.life FOLDER``, with the folder of this file in
``PYTHONPATH``: then `sitecustomize` was imported first.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import numpy as np

import hilt
from hilt.cli import doctor
from hilt.core import platform
from hilt.envs.pool import Pool
from hilt.envs.task import make
from hilt.replay import Log
from hilt.robot.robot_server import RobotServer
from tests.envs.robot_clients import Client
from tests.envs.test_pool import COUNTING, Begin, episodes
from tests.replay.toy_steps import SCHEMA, step
from tests.wire.pair import FLUSH_MS, Pair
from tests.wire.steps import ENV, transition

NOT_HERE = ("hilt.__main__", "hilt.distributed.cluster", "hilt.policies.fused_layer")
"""The command line itself; Ray, whose own copy of psutil chooses its compiled half by ``sys.platform``; and kernels for
NVIDIA's GPUs, which macOS has not, and Triton neither"""


def import_everything() -> int:
    names = [module.name for module in pkgutil.walk_packages(hilt.__path__, "hilt.") if module.name not in NOT_HERE]
    for name in names:
        importlib.import_module(name)
    return len(names)


def write_and_sample(folder: Path) -> None:
    with Log.create(folder / "log", SCHEMA, segment_bytes=30_000) as log:
        with log.episode() as episode:
            for n in range(60):
                episode.append(step(n))
        batch = log.all().sampler(seed=0).sample(100)
    with Log.open(folder / "log", mode="r") as log:
        again = log.all().sampler(seed=0).sample(100)
    for seen in (batch, again):
        numbers = seen["rewards"].astype(int)
        assert np.array_equal(
            seen["observations"]["image"], np.stack([step(n)["observations"]["image"] for n in numbers])
        )
    assert np.array_equal(batch["rewards"], again["rewards"])


def send_steps(folder: Path) -> None:
    pair = Pair(folder)
    try:
        pair.server()
        spool = pair.spool()
        client = pair.client(stores={ENV: spool})
        for n in range(30):
            spool.insert(transition(1, 0, n))
        assert client.update(FLUSH_MS).acknowledged == 30
    finally:
        pair.close()


def simulate() -> None:
    begins = [Begin(COUNTING, i % 3, seed=i) for i in range(64)]
    with Pool(1, 64) as pool:  # more questions in flight than fit into a socket of 8 KiB
        assert len(episodes(pool, begins, chunk=20)) == 64
    env = make("tabletop/pick")
    env.reset(seed=0, options={"split": "train", "state": 0})
    seen, *_ = env.step(env.action_space.sample())
    assert seen
    env.close()


def serve() -> None:
    with RobotServer("tests.envs.toy_arm:ToyArm", {}, port=0) as server:
        client = Client(server.urls[0])
        assert len(client.post("/getpos")["pose"]) == 7
        client.close()


def main() -> None:
    folder = Path(sys.argv[1])
    assert platform.MACOS and not platform.NATIVE and platform.in_portable_form() == list(platform.FACILITIES)
    sys.stdout.write(f"{import_everything()} modules\n")
    write_and_sample(folder)
    send_steps(folder)
    simulate()
    serve()
    system = next(doctor.check_system(folder))
    sys.stdout.write(f"{system.found}\n")


if __name__ == "__main__":
    main()
