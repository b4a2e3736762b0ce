"""Asks a real Reverb server what its tables do, and writes the answers to tests/golden/reverb.

Runs where `dm-reverb` is installed (tests/golden/reverb/README.md has the versions), from the root of the repository:

    python -m tests.peers.make_reverb_golden tests/golden/reverb

Only public calls are used. A priority is never negative here: the real client would wait for ever.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import reverb

TABLE = "table"
AHEAD = 4
"""`can_insert(n)` and `can_sample(n)` are asked for n from 1 to this."""
PRIORITIES = (0.0, 0.5, 1.0, 1.0, 2.0, 3.0)
"""Few values, so that many items are equal."""

LIMITERS: list[list[Any]] = [
    ["MinSize", 1],
    ["MinSize", 3],
    ["SampleToInsertRatio", 1.0, 1, 1.0],
    ["SampleToInsertRatio", 2.0, 3, 4.0],
    ["SampleToInsertRatio", 0.5, 4, 3.0],
    ["SampleToInsertRatio", 1.5, 2, [-1.0, 3.5]],
    ["SampleToInsertRatio", 0.3, 5, 1.7],
    ["SampleToInsertRatio", 4.0, 2, [0.0, 9.0]],
    ["Queue", 3],
    ["Stack", 3],
    ["RateLimiter", 1.5, 2, -1.0, 3.0],
    ["RateLimiter", 0.1, 1, -2.5, 0.7],
]
DETERMINISTIC = ("Fifo", "Lifo", "MinHeap", "MaxHeap")


class RealTable:
    """One table on a real server; items are known by the number that is their data."""

    def __init__(self, spec: dict[str, Any]):
        limiter, *arguments = spec["limiter"]
        self.table = reverb.Table(
            TABLE,
            getattr(reverb.selectors, spec["sampler"][0])(*spec["sampler"][1:]),
            getattr(reverb.selectors, spec["remover"][0])(*spec["remover"][1:]),
            spec["max_size"],
            getattr(reverb.rate_limiters, limiter)(*arguments),
            max_times_sampled=spec["max_times_sampled"],
        )
        self.server = reverb.Server([self.table])
        self.client = self.server.localhost_client()
        self.keys: dict[int, int] = {}  # of the items that were sampled at least once

    def insert(self, number: int, priority: float) -> None:
        assert priority >= 0 and self.table.can_insert(1)
        self.client.insert(np.int64(number), {TABLE: priority})

    def sample(self, count: int = 1) -> list[tuple[int, Any]]:
        assert self.table.can_sample(count)
        samples = [(int(step[0].data[0]), step[0].info) for step in self.client.sample(TABLE, count)]
        self.keys.update({number: info.key for number, info in samples})
        return samples

    def mutate(self, updates: dict[int, float], deletes: list[int]) -> None:
        self.client.mutate_priorities(
            TABLE, {self.keys[number]: p for number, p in updates.items()}, [self.keys[n] for n in deletes]
        )
        for number in deletes:
            del self.keys[number]

    def reset(self) -> None:
        self.client.reset(TABLE)
        self.keys.clear()

    def counts(self) -> list[Any]:
        """Size, inserts, samples, and what could be inserted and sampled now, as zeros and ones."""
        info = self.client.server_info(30)[TABLE]
        asked = [self.table.can_insert(n) for n in range(1, AHEAD + 1)] + [
            self.table.can_sample(n) for n in range(1, AHEAD + 1)
        ]
        limits = info.rate_limiter_info
        return [
            info.current_size,
            limits.insert_stats.completed,
            limits.sample_stats.completed,
            "".join(str(int(a)) for a in asked),
        ]

    def present(self) -> list[int]:
        """All items of a Uniform table, found by sampling until each was seen."""
        size = self.client.server_info(30)[TABLE].current_size
        seen: set[int] = set()
        while len(seen) < size:
            seen |= {number for number, _ in self.sample(4 * size)}
        return sorted(seen)

    def close(self) -> None:
        self.server.stop()


def random_spec(rng: random.Random, limiter: list[Any]) -> dict[str, Any]:
    """A table with this limiter whose every sample is determined."""
    sampler = {"Queue": "Fifo", "Stack": "Lifo"}.get(limiter[0], rng.choice(DETERMINISTIC))
    return {
        "sampler": [sampler],
        "remover": [rng.choice(DETERMINISTIC)],
        "max_size": rng.choice((3, 6, 20)) if limiter[0] not in ("Queue", "Stack") else limiter[1],
        "max_times_sampled": 1 if limiter[0] in ("Queue", "Stack") else rng.choice((0, 0, 1, 2, 3)),
        "limiter": limiter,
    }


def table_case(spec: dict[str, Any], rng: random.Random, steps: int) -> dict[str, Any]:
    """Random calls on a table, each with its answer and the counts after it."""
    real = RealTable(spec)
    done: list[list[Any]] = []
    number = 0
    try:
        while len(done) < steps:
            call = rng.choices(("insert", "sample", "update", "delete", "reset"), (40, 40, 12, 7, 1))[0]
            known = sorted(real.keys)
            if call == "insert" and real.table.can_insert(1):
                priority = rng.choice(PRIORITIES)
                real.insert(number, priority)
                done.append(["insert", number, priority, *real.counts()])
                number += 1
            elif call == "sample" and real.table.can_sample(1):
                ((sampled, info),) = real.sample()
                answer = [sampled, info.probability, info.priority, info.times_sampled, info.table_size]
                done.append(["sample", answer, *real.counts()])
            elif call == "update" and known:
                updates = {n: rng.choice(PRIORITIES) for n in rng.sample(known, min(len(known), rng.randint(1, 3)))}
                real.mutate(updates, [])
                done.append(["update", list(updates.items()), *real.counts()])
            elif call == "delete" and known:
                deletes = sorted(rng.sample(known, 1))
                real.mutate({}, deletes)
                done.append(["delete", deletes, *real.counts()])
            elif call == "reset":
                real.reset()
                done.append(["reset", *real.counts()])
    finally:
        real.close()
    return {"table": spec, "steps": done}


def remover_case(remover: str, rng: random.Random, steps: int) -> dict[str, Any]:
    """Random inserts, updates and deletes on a small table, with what is in it after each."""
    spec = {
        "sampler": ["Uniform"],
        "remover": [remover],
        "max_size": 5,
        "max_times_sampled": 0,
        "limiter": ["MinSize", 1],
    }
    real = RealTable(spec)
    done: list[list[Any]] = []
    present: list[int] = []
    try:
        for number in range(steps):
            call = rng.choices(("insert", "update", "delete"), (60, 30, 10))[0] if len(present) > 1 else "insert"
            if call == "insert":
                priority = rng.choice(PRIORITIES)
                real.insert(number, priority)
                arguments: list[Any] = [number, priority]
            elif call == "update":
                arguments = [(n, rng.choice(PRIORITIES)) for n in rng.sample(present, rng.randint(1, len(present)))]
                real.mutate(dict(arguments), [])
            else:
                arguments = rng.sample(present, 1)
                real.mutate({}, arguments)
            present = real.present()
            real.keys = {n: real.keys[n] for n in present}
            done.append([call, arguments, present])
    finally:
        real.close()
    return {"table": spec, "steps": done}


def prioritized_case(exponent: float, priorities: list[float], rng: random.Random, draws: int) -> dict[str, Any]:
    """How often each item is drawn and with what stated probability; then again after updates and deletes."""
    size = len(priorities)
    sampler = ["Prioritized", exponent]
    real = RealTable(
        {"sampler": sampler, "remover": ["Fifo"], "max_size": size, "max_times_sampled": 0, "limiter": ["MinSize", 1]}
    )
    rounds = []
    try:
        for number, priority in enumerate(priorities):
            real.insert(number, priority)
        now = dict(enumerate(priorities))
        for _ in range(2):
            counts = dict.fromkeys(now, 0)
            probabilities: dict[int, float] = {}
            for number, info in real.sample(draws):
                counts[number] += 1
                probabilities[number] = info.probability
            columns = {"priorities": now, "counts": counts, "probabilities": probabilities}
            rounds.append({name: sorted(column.items()) for name, column in columns.items()})
            deletes = rng.sample(sorted(probabilities), min(2, len(probabilities) - 1))
            updates = {n: rng.choice((0.0, 0.1, 1.0, 7.0)) for n in sorted(set(probabilities) - set(deletes))[::2]}
            real.mutate(updates, deletes)
            now = {n: updates.get(n, p) for n, p in now.items() if n not in deletes}
    finally:
        real.close()
    return {"exponent": exponent, "draws": draws, "rounds": rounds}


def write(folder: Path, name: str, cases: list[dict[str, Any]]) -> None:
    versions = {package: importlib.metadata.version(package) for package in ("dm-reverb", "tensorflow", "numpy")}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / name).write_text(f'{{"versions":{json.dumps(versions)},"cases":[\n{lines}\n]}}\n')


def main(folder: Path) -> None:
    rng = random.Random(20260)
    tables = []
    for limiter in LIMITERS:  # each limiter at least twice
        for _ in range(2):
            tables.append(table_case(random_spec(rng, limiter), rng, 40))
    for sampler in DETERMINISTIC:  # each order, long
        spec = {
            "sampler": [sampler],
            "remover": ["Fifo"],
            "max_size": 30,
            "max_times_sampled": 0,
            "limiter": ["MinSize", 1],
        }
        tables.append(table_case(spec, rng, 120))
        tables.append(table_case(spec | {"max_times_sampled": 2}, rng, 60))
    write(folder, "tables.json", tables)
    write(folder, "removers.json", [remover_case(remover, rng, 60) for remover in DETERMINISTIC for _ in range(2)])
    spread = [0.0, 1.0, 4.0, 9.0, 0.0, 2.5, 1e-3, 30.0, 1.0, 0.7]
    cases = [prioritized_case(exponent, spread, rng, 20_000) for exponent in (0.0, 0.5, 1.0, 2.0)]
    cases.append(prioritized_case(0.5, [0.0, 1.0, 4.0, 9.0], rng, 20_000))
    cases.append(prioritized_case(1.0, [0.0] * 6, rng, 20_000))
    write(folder, "prioritized.json", cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
