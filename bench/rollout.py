"""Rollouts: steps of environments that answer to chunks of actions, as the pool runs them, beside LIBERO's own
SubprocVectorEnv and beside one process for each trajectory, in LIBERO and in our tabletop suite. As many environments
as cores, the same tasks, states and actions. And two figures of whole runs (`bench.rollout_runs`)."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.lab import Group, Lab
from bench.report import Row, at_least
from bench.rollout_runs import ahead, driver, share
from bench.rollout_sides import SIZES, TASKS
from bench.sides import ROOT, Side
from bench.timing import Rates

LIBERO = Path(os.environ.get("HILT_LIBERO_PYTHON", ROOT / ".venv-libero/bin/python"))
"""The Python that has it, and where Hilt can be imported"""
CHUNK = 8
CHUNKS = {"libero": 27, "tabletop": 7}
"""Of an episode: OpenVLA's limit for libero_spatial, and that of pick"""
ROUNDS = {"libero": 3, "tabletop": 15}
SUBPROC, PROCESSES = "LIBERO's SubprocVectorEnv", "one process per trajectory"
CONTENDERS = {
    "ours": ("ours", True),
    "ours, cameras off": ("ours", False),
    SUBPROC: ("subproc", True),
    f"{SUBPROC}, cameras off": ("subproc", False),
    PROCESSES: ("processes", True),
}


def rollouts(suite: str, lab: Lab) -> list[Row]:
    envs = len(os.sched_getaffinity(0))
    chunks, rounds = lab.pick(CHUNKS[suite], 2), lab.pick(ROUNDS[suite], 1)
    rates: dict[str, list[tuple[float, float]]] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, (role, cameras) in CONTENDERS.items():
            try:
                python = LIBERO if LIBERO.exists() or suite == "libero" or role == "subproc" else Path(sys.executable)
                side = stack.enter_context(Side("bench.rollout_sides", role, python))
                side.ask("start", suite=suite, envs=envs, chunk=CHUNK, cameras=cameras)
                sides[name] = side
                side.ask("episodes", timeout=1200, first=0, chunks=1)  # makes the environments; not counted
            except (OSError, RuntimeError) as error:
                sides.pop(name, None)
                why = str(error).strip().splitlines()[-1]
                absent[name] = f"{why}; HILT_LIBERO_PYTHON names a Python that has LIBERO, see docs/libero.md"
        for number in range(rounds):
            lab.progress(f"{suite}: round {number + 1} of {rounds}")
            for name, side in sides.items():
                begin, steps = side.ask("episodes", timeout=1200, first=envs * number, chunks=chunks)
                count = envs * chunks * CHUNK
                rates.setdefault(name, []).append((count / steps, count / (begin + steps)))
    alone = {name: Rates([steps for steps, _ in found]) for name, found in rates.items()}
    whole = {name: Rates([all_of_it for _, all_of_it in found]) for name, found in rates.items()}
    size = ", ".join(
        part for part in (lab.size(chunks, CHUNKS[suite], "chunks"), lab.size(rounds, ROUNDS[suite], "rounds")) if part
    )
    scene = f"{TASKS[suite]}, {envs} environments on {envs} cores, chunks of {CHUNK}"
    pictures = f"two pictures of {SIZES[suite]} pixels"

    def row(name: str, ours: str, peer: str, found: dict[str, Rates], what: str, target: float) -> Row:
        return Row(
            name=f"rollout_{suite}{name}",
            ours=found[ours].median if ours in found else None,
            spread=found[ours].spread if ours in found else None,
            unit="steps/s",
            what=f"{what}; {scene}",
            targets=[at_least(target, "peer")],
            peers={peer: found[peer].median} if peer in found else {},
            absent={each: absent[each] for each in (ours, peer) if each in absent},
            size=size,
            note="others: "
            + ", ".join(f"{each} {rate.median:.3g}" for each, rate in found.items() if each not in (ours, peer)),
        )

    off = f"{SUBPROC}, cameras off"
    return [
        row(
            "",
            "ours",
            SUBPROC,
            alone,
            f"steps, without the beginning of episodes; {pictures} for a chunk, the peer's for each step",
            1.5,
        ),
        row("_blind", "ours, cameras off", off, alone, "the same without pictures on either side", 1.0),
        row(
            "_trajectories",
            "ours",
            PROCESSES,
            whole,
            f"steps of whole episodes, from their making or reset on; {pictures}",
            3.0,
        ),
    ]


GROUPS = {
    **{
        suite: Group([f"rollout_{suite}{name}" for name in ("", "_blind", "_trajectories")], partial(rollouts, suite))
        for suite in CHUNKS
    },
    "driver": Group(["rollout_driver"], driver),
    "share": Group(["rollout_other"], share),
    "ahead": Group(["rollout_ahead"], ahead),
}
