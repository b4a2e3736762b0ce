"""A tree of SimpleVLA-RL's settings (``ppo_trainer.yaml``, or a part of it) as
ours, by the recipe that reads its command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from hilt.core.errors import ConfigError
from hilt.recipes.simplevla_keys import ACTOR, AGREE, MODEL
from hilt.recipes.simplevla_run import SimpleVLARun, simplevla

FILLED_IN = "optim.total_training_steps"
"""What the trainer there writes into the settings of actor and critic; here it follows from the settings"""


def tree_of(config: object) -> dict[str, Any]:
    """A tree of dictionaries, of an OmegaConf tree or a mapping; ``${...}`` is filled in."""
    found = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"config is {type(config).__name__}: expected SimpleVLA-RL's settings as a tree, such as OmegaConf's."
        )
    return {str(name): value for name, value in found.items()}


def run_of(config: object, **more: Any) -> SimpleVLARun:
    """What the recipe makes of a whole tree. ``hilt`` in it has settings of ours, as
    ``hilt.KEY=VALUE`` has on the command line."""
    return _run({**dict(_leaves(tree_of(config))), **more})


def worker_run_of(part: str, config: object, **more: Any) -> SimpleVLARun:
    """The same of ``actor_rollout_ref`` or ``critic`` alone, for a worker in this
    process, whose advantages come with the data."""
    tree = tree_of(config)
    given = dict(_leaves({**({"hilt": tree.pop("hilt")} if "hilt" in tree else {}), part: tree})) | more
    given.setdefault("trainer.n_gpus_per_node", int(torch.cuda.is_available()))
    steps = max(int(given.get(f"{part}.{FILLED_IN}", given.get(f"{ACTOR}{FILLED_IN}", 1))), 1)
    mini = int(given.get(f"{ACTOR}ppo_mini_batch_size", given.get("critic.ppo_mini_batch_size", 256)))
    neutral = {"algorithm.adv_estimator": "grpo", "algorithm.kl_ctrl.kl_coef": 0.0, "trainer.logger": ["console"]}
    return _run({**neutral, "data.train_batch_size": mini, "trainer.total_training_steps": steps, **given})


def _run(given: dict[str, Any]) -> SimpleVLARun:
    given = {name: value for name, value in given.items() if not name.endswith(FILLED_IN)}
    for name, value in list(given.items()):
        while name := AGREE.get(name, ""):  # a part of the tree may have only the second of two equivalent keys
            given.setdefault(name, value)
    return simplevla([f"{name}={json.dumps(value)}" for name, value in given.items()])


def _leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and f"{before}{name}" != f"{MODEL}override_config":
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
