"""Runs that never were: metrics as a learner would write them, of which everything is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.files import DISK
from hilt.observe import Metrics


def make_run(
    folder: Path, seed: int = 0, minutes: float = 10.0, episodes: int = 200, evaluations: bool = True, **config: Any
) -> Path:
    """It learns: success rises, a person takes over less and less."""
    rng, skill = np.random.default_rng(seed), float(config.get("skill", 1.0))
    DISK.make_folders(folder)
    lines = {
        "task": "tabletop/pick",
        "seed": seed,
        "batch_size": 128,
        **{k: v for k, v in config.items() if k != "skill"},
    }
    (folder / "config.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in lines.items()) + "wire:\n  port: 5588\n"
    )
    step, update, clock = 0, 0, 1.7e9
    with Metrics(folder) as metrics:
        for episode in range(episodes):
            know = 1 / (1 + np.exp(-10 * (skill * episode / episodes - 0.4)))
            length = int(60 - 38 * know + rng.normal(0, 4))
            helped = int(length * 0.6) if rng.random() > know + 0.15 else 0
            success = bool(rng.random() < know or helped)
            step += length
            for _ in range(4):
                update += 10
                noise = rng.normal(0, 0.1, 8)
                per_source = {
                    f"{name}/{source}": value
                    for name, values in {
                        "q": (
                            0.2 + 0.6 * know + noise[0] / 5,
                            0.6 + 0.3 * know + noise[1] / 9,
                            0.4 + 0.5 * know + noise[2] / 6,
                        ),
                        "td_error": (0.1 + noise[0] ** 2, 0.2 * (1.2 - know) + noise[1] ** 2, 0.15 + noise[2] ** 2),
                        "gradient_share": (0.4 + 0.2 * know, 0.6 - 0.2 * know, 0.2 * (1 - know)),
                        "reward": (0.02 + 0.03 * know, 0.028, 0.02),
                    }.items()
                    for source, value in zip(("online", "demo", "human"), values, strict=True)
                }
                losses = {
                    "critic_loss": 0.02 + 0.05 * np.exp(-3 * know) + noise[3] ** 2,
                    "actor_loss": -0.2 - 0.6 * know + noise[4] / 9,
                }
                more = {
                    "temperature_loss": noise[5] / 20,
                    "temperature": 0.01 * np.exp(-know),
                    "entropy": -1 - know + noise[6],
                }
                rates = {
                    "updates_per_second": 104 + 40 * noise[7],
                    "env_steps_per_second": 18 + 6 * noise[0],
                    "staleness": 60 + 99 * abs(noise[1]),
                }
                sizes = {
                    "log_steps": step,
                    "demo_steps": 720,
                    "human_steps": helped,
                    "torch_share": 0.93,
                    "sample_wait_share": 0.03,
                }
                metrics.write("update", {**per_source, **losses, **more, **rates, **sizes}, update=update, step=step)
            values = {
                "trajectory": episode,
                "success": success,
                "return": float(success),
                "length": length,
                "seconds": length / 18,
                "actor": "actor-0",
            }
            metrics.write("episode", {**values, "intervention_steps": helped}, update=update, step=step)
    path, told = folder / "metrics.jsonl", []
    for number, line in enumerate(lines_ := path.read_text().splitlines()):
        when = clock + 60 * minutes * number / (len(lines_) - 1)
        told.append(line[: line.index('"time": ') + 8] + f"{when:.3f}" + line[line.index(', "update"') :])
    path.write_text("\n".join(told) + "\n")
    if evaluations:
        for part, rate in ((0.5, 0.55), (1.0, 0.97)):
            at = int(update * part)
            card = {
                "update": at,
                "success": rate,
                "low": rate - 0.1,
                "high": min(1.0, rate + 0.02),
                "episodes": 100,
                "split": "test",
            }
            DISK.make_folders(folder / "evaluations" / f"test-{at}")
            write_json(folder / "evaluations" / f"test-{at}" / "evaluation.json", card)
    return folder
