"""Figures of whole runs of post-training: what goes through the process that drives
the ranks, where the time of a step goes, and what rollouts during the update save."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.lab import Lab
from bench.report import Row, at_least, at_most

CHUNK, CHUNKS, PIXELS, CAMERAS = 8, 64, 224, 2
FUSED_CHANNELS, FLOAT_BYTES = 6, 4
"""Of OpenVLA's pixel_values, two normalizations of one picture, as SimpleVLA-RL puts them into a trajectory"""
STEPS, ROUNDS, EPOCHS = 12, 3, 4


def driver(lab: Lab) -> list[Row]:
    """A training step of two ranks in processes of their own, each with its simulators,
    as `hilt train` has it. The kernel counts."""
    from hilt.algos.config import Batching, PolicyGradient
    from hilt.distributed.group import open_group
    from hilt.distributed.placement import Placement
    from hilt.vla.collect import Collecting
    from hilt.vla.config import SimulatorSettings, Validation, Vla
    from hilt.vla.train import WORKER

    chunks = lab.pick(CHUNKS, 2)
    config = Vla(
        policy_options={"image_size": PIXELS, "width": 32, "depth": 1, "chunk": CHUNK},
        tasks=["tabletop/pick", "tabletop/stack"],  # one for each rank
        task_options={"image_size": PIXELS, "step_limit": chunks * CHUNK},
        pool=SimulatorSettings(workers=1, slots=2),
        collect=Collecting(group_size=2, data_batch_size=2),
        algorithm=PolicyGradient(batch=Batching(chunks_per_pass=16)),
        validation=Validation(before=False, period=0, after=False),
        placement=Placement(kind="processes", ranks=2),
    )
    config.check()
    group = open_group(config.placement, WORKER, (asdict(config), str(lab.new("driver").absolute())))
    try:
        lab.progress(f"driver: one step of {config.placement.ranks} ranks")
        before = _through_this_process()
        parts = group.call("collect", 0)
        group.call("update", 1.0, False)
        carried = _through_this_process() - before
    finally:
        group.close()
    cards = [card for part in parts for card in part["episodes"]]
    if wrong := [card["length"] for card in cards if card["length"] != chunks * CHUNK]:
        raise RuntimeError(f"an episode has {wrong[0]} steps instead of {chunks * CHUNK}")
    pictures, theirs = (chunks * PIXELS * PIXELS * each / 1e6 for each in (3 * CAMERAS, FUSED_CHANNELS * FLOAT_BYTES))
    return [
        Row(
            name="rollout_driver",
            ours=carried / len(cards) / 1e3,
            unit="kB",
            what=f"what the driver's process reads and writes for a trajectory of {chunks} chunks with "
            f"{CAMERAS} pictures of {PIXELS} pixels: a training step of {config.placement.ranks} ranks, "
            f"{len(cards)} trajectories, collected and learned from",
            targets=[at_most(100.0)],
            size=lab.size(chunks, CHUNKS, "chunks"),
            note=f"its pictures are {pictures:.1f} MB; SimpleVLA-RL sends {theirs:.1f} MB of "
            f"pixel_values (one picture, {FUSED_CHANNELS} channels, float32)",
        )
    ]


def _through_this_process() -> int:
    """Bytes that it has read and written so far, in files and in the pipes to its ranks. Torch's store, where they find
    each other, uses other calls, and is not in it."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def _trained(lab: Lab, name: str, steps: int, *more: str) -> list[dict[str, Any]]:
    """The metrics of the training steps of a run of `vla_tabletop`, but for the first one, which makes the simulators.
    Its policy has learned nothing."""
    from hilt.core.config import build
    from hilt.observe.metrics import read_metrics
    from hilt.recipes import vla_recipe
    from hilt.vla.train import begin_run, train

    run = lab.new(name)
    chosen = ["policy_options.action_dim=3", "collect.dynamic_sampling=false", "collect.when_exhausted=error"]
    chosen += [f"max_steps={steps}", "max_seconds=0", "checkpoint_period=1000"]
    never = [
        "validation.goal=0",
        "validation.hold=2",
        "validation.episodes=0",
        "validation.before=false",
        "validation.period=0",
        "validation.after=false",
    ]
    train(begin_run(run, "vla_tabletop", build(vla_recipe("vla_tabletop"), *chosen, *never, *more)), run)
    return [line for line in read_metrics(run, ["update"]) if "other_share" in line][1:]


def ahead(lab: Lab) -> list[Row]:
    """The same run with `collect.ahead` 0 and 1, in turns. The policy learns from each chunk several times, so that an
    update is about as long as a collection: where one of the two is short, there is little to overlap."""
    steps, rounds, epochs = lab.pick(STEPS // 2, 2), lab.pick(ROUNDS, 1), lab.pick(EPOCHS, 1)
    rates: dict[int, list[float]] = {0: [], 1: []}
    updates = list[float]()
    for number in range(rounds):
        for value, found in rates.items():
            lab.progress(f"ahead: round {number + 1} of {rounds}, collect.ahead={value}")
            name = f"ahead-{number}-{value}"
            lines = _trained(lab, name, steps, f"collect.ahead={value}", f"algorithm.epochs={epochs}", "pool.workers=1")
            found += [line["episodes"] / line["step_seconds"] for line in lines]
            if not value:
                updates += [line["update_share"] for line in lines]
    sync = statistics.median(rates[0])
    limits = [sync / max(part, 1 - part) for part in updates]
    return [
        Row(
            name="rollout_ahead",
            ours=statistics.median(rates[1]),
            spread=(min(rates[1]), max(rates[1])),
            unit="episodes/s",
            what="episodes rolled out and learned from, the next step's rollouts during the update; vla_tabletop, "
            f"96 episodes in a step, {epochs} epochs, one simulator process",
            targets=[at_least(1.0, "peer")],
            peers={"one after the other": sync},
            limit=statistics.median(limits),
            limit_name="the longer of the two alone",
            size=lab.size(rounds, ROUNDS, "rounds"),
            note=f"learning is {100 * statistics.median(updates):.0f}% of a step without it",
        )
    ]


def share(lab: Lab) -> list[Row]:
    """The recipe of `hilt demo vla`, from a policy that has learned nothing: every group is learned from, whatever came
    of it. A run that chooses its groups rolls out and writes more for each that it learns from."""
    from hilt.vla.train import DRAWN

    steps = lab.pick(STEPS, 2)
    lab.progress(f"share: {steps} training steps")
    found = _trained(lab, "share", steps)
    other = [100 * values["other_share"] for values in found]
    drawn = ", ".join(
        f"{name} {100 * statistics.median(values[f'{name}_share'] for values in found):.0f}%" for name in DRAWN
    )
    seconds = statistics.median(values["step_seconds"] for values in found)
    beside = 100 * statistics.median(values["beside_share"] for values in found)
    return [
        Row(
            name="rollout_other",
            ours=statistics.median(other),
            spread=(min(other), max(other)),
            unit="% of a step",
            what="what of a training step is spent neither in a simulator nor in the model, acting "
            "or learning; vla_tabletop, 96 episodes in a step, 64 in flight in 2 processes",
            targets=[at_most(10.0)],
            size=lab.size(steps, STEPS, "steps"),
            note=f"medians: {drawn}; a step takes {seconds:.2f} s. Another {beside:.1f}% of it this process "
            f"wrote logs while simulators worked, which is in their share: {statistics.median(other) + beside:.1f}% "
            "if that were counted here",
        )
    ]
