"""GRPO with and without PRIME's process reward on the cheapest task of the
repository: ``python -m tests.vla.prime_run [SEEDS]``.

A light is to be turned up within four steps, in two chunks; a policy of some thousand parameters begins
untrained. Prints the share of training episodes that succeeded, by fifths of the run, and the success on
validation states at the end. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from hilt.core.files import temporary_folder
from hilt.observe.metrics import read_metrics
from hilt.vla.train import begin_run, train
from tests.vla.toy_vla import UP, config

STEPS, PARTS = 20, 5
SETTINGS = {
    "grpo": [],
    "grpo, prime by chunk": ["prime.coefficient=0.5", "prime.beta=0.3"],
    "grpo, prime by token": ["prime.coefficient=0.5", "prime.beta=0.3", "prime.granularity=token"],
}


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    for name, changes in SETTINGS.items():
        curves, ends, accuracies, began = [], [], [], time.process_time()
        for seed in range(seeds):
            with temporary_folder("hilt-prime-") as folder:
                run = Path(folder) / "run"
                quiet = ("validation.before=false", "validation.period=0", "solved_steps=5", "checkpoint_period=1000")
                settings = config(
                    f"max_steps={STEPS}",
                    "optimizer.learning_rate=3e-3",
                    f"tasks=[{UP}]",
                    f"seed={seed}",
                    *quiet,
                    *changes,
                )
                begin_run(run, "toy", settings)
                ends.append(train(settings, run).success)
                episodes = read_metrics(run, ["episode"])
                steps = np.array([record["training_step"] for record in episodes])
                won = np.array([float(record["success"]) for record in episodes])
                curves.append([won[(steps - 1) * PARTS // STEPS == part].mean() for part in range(PARTS)])
                accuracies += [
                    record["prime_accuracy"] for record in read_metrics(run, ["update"]) if "prime_accuracy" in record
                ][-5:]
        curve = ", ".join(f"{100 * x:.0f}%" for x in np.mean(curves, 0))
        end = ", ".join(f"{100 * x:.0f}%" for x in ends)
        told = f"; its accuracy at the end {100 * np.mean(accuracies):.0f}%" if accuracies else ""
        spent = f"{time.process_time() - began:.0f} CPU-s"
        print(
            f"{name}: training {curve}; validation {end} (mean {100 * np.mean(ends):.0f}%){told}; {spent}", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
