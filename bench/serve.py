"""`hilt serve-policy`: what the way to the server adds to the policy's own time, and sixteen clients beside one process
that batches sixteen.

The server is a process of its own, as a user starts it, with one thread of torch; the clients are threads of another
process, on this machine.
"""

from __future__ import annotations

import numpy as np

from bench.lab import Group, Lab, remove
from bench.report import Row, at_least, at_most
from bench.serve_sides import make_policy, server, side

PIXELS, SMALL = 224, 64
CLIENTS, ANSWERS = 16, 500
ALONE = "one process that batches 16"


def round_trip(lab: Lab) -> list[Row]:
    """One client that asks as soon as it is answered."""
    pixels, seconds = lab.pick(PIXELS, 32), 1.0 if lab.quick else 30.0
    folder = make_policy(lab.new("round-trip"), pixels)
    with server(folder) as url:
        took = side("clients", url, 1, seconds, pixels)["added_ms"]
    remove(folder)
    what = (
        f"from an observation with two pictures of {pixels} pixels to its actions, packing and unpacking counted, "
        f"beyond the policy's own time; one client, {len(took):,} answers"
    )
    size = lab.size(pixels, PIXELS, "pixels") or ("" if len(took) >= ANSWERS else f"{len(took)} answers")
    spread = float(np.min(took)), float(np.max(took))
    return [
        Row(name, float(np.percentile(took, percentile)), "ms", f"{what}, percentile {percentile}", [at_most(3.0)],
            spread=spread, size=size)
        for name, percentile in (("round_trip", 50), ("round_trip_p99", 99))
    ]  # fmt: skip


def throughput(lab: Lab) -> list[Row]:
    """Sixteen clients on one server, in turns with the policy alone."""
    rows = []
    for name, full in (("throughput", PIXELS), ("throughput_small", SMALL)):
        pixels, rounds, seconds = lab.pick(full, 32), lab.pick(5, 1), 0.5 if lab.quick else 10.0
        if not lab.wants("throughput", name):
            continue
        folder = make_policy(lab.new(name), pixels)
        ours, alone, batches = [], [], []
        with server(folder) as url:
            for number in range(rounds):
                alone.append(side("alone", folder, CLIENTS, seconds, pixels)["rate"])
                served = side("clients", url, CLIENTS, seconds, pixels)
                ours.append(served["rate"])
                batches.append(served["batch"])
                lab.progress(f"{name}: round {number + 1} of {rounds}")
        remove(folder)
        rows.append(
            Row(
                name,
                float(np.median(ours)),
                "answers/s",
                f"{CLIENTS} clients on one small_vla with two pictures of {pixels} pixels",
                [at_least(0.9, "peer")] if name == "throughput" else [],
                peers={ALONE: float(np.median(alone))},
                spread=(min(ours), max(ours)),
                size=lab.size(pixels, full, "pixels"),
                note=f"{np.mean(batches):.1f} observations in a call on average",
            )
        )
    return rows


GROUPS = {
    "round_trip": Group(("round_trip", "round_trip_p99"), round_trip),
    "throughput": Group(("throughput", "throughput_small"), throughput),
}
