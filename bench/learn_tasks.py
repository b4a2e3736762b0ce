"""Every task of the tabletop suite that has a recipe, with a budget that is fixed before anything is looked at.

The budget of a task is its recipe's number of updates (`max_steps`), the same for every seed, whatever the
machine; no run ends earlier because it succeeds, and none is made longer because it does not. Test states
are tried once, when all runs have ended: the policy of the last update, and the one that only imitates.
Intervals take seeds and scenes for samples, both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from bench.lab import Lab, remove
from bench.report import Row
from bench.sides import ROOT

RECIPES = ("button", "pick", "pick_red", "drawer", "push", "insert", "peg")
ROWS = tuple(f"task_{name}" for name in RECIPES)
SEEDS, STATES = 5, 100
"""The full size"""
QUICK = [
    "task_options.image_size=32",
    "demonstrations=2",
    "agent.encoder.pretrain_updates=5",
    "training_starts=50",
    "log_period=1",
]
QUICK_UPDATES, MAX_SECONDS = 20, 3600.0


def tasks(lab: Lab) -> list[Row]:
    names = [name for name in RECIPES if lab.wants("tasks", f"task_{name}")]
    names, seeds = (names[:1] if lab.quick else names), range(lab.seeds)
    jobs = [(name, seed) for seed in seeds for name in names]
    done = lab.side_by_side(lambda job: lab.once(f"task_{job[0]}-{job[1]}", partial(learned, lab, *job)), jobs)
    return [row(lab, name, [run for (task, _), run in zip(jobs, done, strict=True) if task == name]) for name in names]


def learned(lab: Lab, name: str, seed: int) -> dict[str, Any]:
    """One run, to the end of its budget; then the test states, of the policy that only imitates and of the last one."""
    from bench import learn  # which lists this group among its own

    run, start = lab.new(f"{name}-{seed}"), time.monotonic()
    lab.progress(f"tasks: {name}, seed {seed}")
    limits = [
        "goal.success=0",
        f"max_seconds={MAX_SECONDS:g}",
        *([f"max_steps={QUICK_UPDATES}", *QUICK] if lab.quick else []),
    ]
    words = [
        sys.executable,
        "-m",
        "hilt",
        "train",
        f"tabletop_{name}",
        f"seed={seed}",
        *limits,
        "wire.port=0",
        "wire.broadcast_port=0",
    ]
    done = subprocess.run(
        [*words, "--run", str(run)], cwd=ROOT, capture_output=True, text=True, timeout=MAX_SECONDS + 900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"hilt train tabletop_{name} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    seconds = time.monotonic() - start
    states = lab.pick(STATES, 2)
    before, after = (learn.evaluated(run, states, checkpoint=checkpoint) for checkpoint in (0, None))
    updates = learn.made_by(run).updates
    person = sum(int(one.get("intervention_steps", 0)) for one in learn.metrics(run, "episode"))
    remove(run)
    outcomes = {"before": [steps > 0 for steps in before.steps], "after": [steps > 0 for steps in after.steps]}
    return {**outcomes, "seconds": round(seconds), "updates": updates, "person": person}


def row(lab: Lab, name: str, runs: list[dict[str, Any]]) -> Row:
    from hilt.observe.statistics import crossed

    before, after = (np.array([run[which] for run in runs], float) for which in ("before", "after"))
    (share, low, high), (gain, least, most) = crossed(after), crossed(after - before)
    each = [f"{100 * one:.0f}" for one in after.mean(1)]
    spent = [f"{run['updates']:,}" for run in runs]
    size = ", ".join(
        part for part in (lab.size(len(after), SEEDS, "seeds"), lab.size(after.shape[1], STATES, "states")) if part
    )
    return Row(
        name=f"task_{name}",
        ours=100 * share,
        unit="%",
        what=f"success of tabletop_{name} in {after.shape[1]} test states after its budget of updates, "
        f"mean of {len(after)} seeds",
        spread=(100 * float(after.mean(1).min()), 100 * float(after.mean(1).max())),
        size=size,
        note=f"95% interval over seeds and scenes {100 * max(low, 0.0):.0f} - {100 * high:.0f}; seeds "
        f"{', '.join(each)}%; imitation alone {100 * before.mean():.0f}%, gain {100 * gain:+.0f} "
        f"points ({100 * least:+.0f} to {100 * most:+.0f}, paired); updates {', '.join(spent)}; "
        f"{np.mean([run['seconds'] for run in runs]):.0f} s each; the operator made "
        f"{np.mean([run['person'] for run in runs]):,.0f} steps",
    )
