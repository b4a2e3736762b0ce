"""What success does when a run goes on from imitation and offline updates to online learning: critics that begin at
random, critics of offline updates, with CQL, with Cal-QL, and WSRL.

A run is one setting and one seed. Every run imitates the same disturbed episodes of an operator before; runs end after
a number of updates, so that no clock counts. The checkpoints on the way try the 100 states of `eval`, with the most
likely actions, and nobody takes over.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from bench.lab import Group, Lab, remove
from bench.learn_methods import LITTLE_EXPLORED, QUICK_RUN, Attempt, interval, recorded
from bench.report import Row

TASK = "peg"
SEEDS, STATES = 3, 100
OFFLINE = (3_000, 10)
"""Updates before the first online step, where there are any; and with --quick"""
UPDATES, EVERY = (10_000, 20), (1_000, 10)
"""Of a run online, and between two of its checkpoints; and with --quick"""
CONSERVATIVE = 0.05
WARM_UP = (2_000, 50)
"""Online steps before the first update online, of WSRL"""
SETTINGS = {
    "random": "critics begin at random, and the actor waits for them for 1,000 updates",
    "offline": "offline updates before",
    "cql": "the same with CQL's term, which stays",
    "cal_ql": "the same with Cal-QL's bound besides",
    "wsrl": "the same, but the term ends with the offline updates, and online steps alone follow",
}
ROWS = tuple(f"switch_{name}" for name in SETTINGS)


def words_of(lab: Lab, name: str) -> list[str]:
    """The settings of a run that differ from those of the others."""
    if name == "random":
        return []
    offline = lab.pick(*OFFLINE)
    words = [f"offline_updates={offline}"]
    if name != "offline":
        words += [f"agent.rlpd.conservative={CONSERVATIVE}", f"agent.rlpd.calibrated={str(name != 'cql').lower()}"]
    if name == "wsrl":
        words += [f"agent.rlpd.conservative_updates={offline}", "demo_share=0", "max_ahead=0"]
        words += [f"training_starts={lab.pick(*WARM_UP)}"]
    return words


def measured(lab: Lab, name: str, seed: int) -> dict[str, Any]:
    lab.progress(f"switch: {name}, seed {seed}")
    attempt = Attempt(lab, TASK, f"switch-{name}", seed)
    data = recorded(attempt, 0.85, "disturb")
    updates, every, states = lab.pick(*UPDATES), lab.pick(*EVERY), lab.pick(STATES, 2)
    entropy = -1.8 * len(attempt.recipe.agent.action_indices)
    smaller = [*QUICK_RUN, "agent.encoder.pretrain_updates=5", "agent.rlpd.critic_warmup=5"]
    attempt.hilt(
        "run",
        *("train", f"tabletop_{TASK}", "demonstrations=0", "demonstration_options={}", f"demo_path=[{','.join(data)}]"),
        *(f"task_options.image_size={attempt.image_size}", *LITTLE_EXPLORED, "agent.rlpd.discount=0.98"),
        *("agent.rlpd.imitation_weight=3", "agent.encoder.kept_shifts=8", f"agent.rlpd.target_entropy={entropy:g}"),
        *(smaller if lab.quick else ["agent.encoder.pretrain_updates=4000"]),
        *words_of(lab, name),
        *(f"max_steps={updates}", f"checkpoint_period={every}", "checkpoint_keep=1000"),
        *(f"seed={seed}", "goal.success=0", "max_seconds=0", "wire.port=0", "wire.broadcast_port=0", "--run", "run"),
    )
    curve = {}
    for update in range(0, updates + 1, every):
        tried = ("--checkpoint", update, "--split", "eval", "--episodes", states, "--json", "tried.json")
        attempt.hilt("test", "eval", "run", *tried)
        outcomes = json.loads((attempt.folder / "tried.json").read_text())["outcomes"]
        curve[str(update)] = [bool(one["success"]) for one in outcomes]
    remove(attempt.folder)
    shown = attempt.commands[: len(attempt.commands) - len(curve) + 1]
    return {"curve": curve, "phases": attempt.phases, "commands": shown}


def switch(lab: Lab) -> list[Row]:
    wanted = [name for name in SETTINGS if lab.wants("switch", f"switch_{name}")]
    if lab.quick and not lab.only:
        wanted = wanted[-1:]
    jobs = [(seed, name) for seed in lab.seed_range for name in wanted]
    runs = lab.side_by_side(
        lambda job: lab.once(f"switch_{job[1]}-{job[0]}", partial(measured, lab, job[1], job[0])), jobs
    )
    done = dict(zip(jobs, runs, strict=True))
    return [row(lab, name, [done[seed, name] for seed in lab.seed_range]) for name in wanted]


def row(lab: Lab, name: str, runs: list[dict[str, Any]]) -> Row:
    """The deepest dip: the lowest success of a checkpoint, the mean over seeds, less that at the switch."""
    curves = np.array([list(run["curve"].values()) for run in runs], float)  # [seeds, checkpoints, states]
    updates = list(runs[0]["curve"])
    rates = 100 * curves.mean(2)  # [seeds, checkpoints]
    lowest = int(rates[:, 1:].mean(0).argmin()) + 1
    dip, low, high = interval(curves[:, lowest] - curves[:, 0])
    points = ", ".join(f"{update}: {rate:.0f}" for update, rate in zip(updates, rates.mean(0), strict=True))
    size = [lab.size(len(runs), SEEDS, "seeds"), lab.size(curves.shape[2], STATES, "states")]
    return Row(
        name=f"switch_{name}",
        ours=100 * dip,
        unit="points",
        what=f"tabletop/{TASK}: the deepest dip of success after the switch to online learning; {SETTINGS[name]}",
        spread=(float((rates.min(1) - rates[:, 0]).min()), float((rates.min(1) - rates[:, 0]).max())),
        size=", ".join(part for part in size if part),
        note=f"95% interval {100 * low:.0f} to {100 * high:.0f}, at update {updates[lowest]}; % by update: {points}; "
        f"commands: {' && '.join(runs[0]['commands'])}",
    )


GROUPS = {"switch": Group(ROWS, switch)}
