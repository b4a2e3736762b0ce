"""How much memory a rank of a run will need, before a byte of its policy is loaded:
`policies/io/memory.py`, for the settings of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.envs.pool import Pool
from hilt.policies.base import Policy, Record
from hilt.policies.float8 import SAME, float8_bytes
from hilt.policies.io.memory import Estimate, estimate, free_bytes, readable_size
from hilt.policies.registry import is_new, policy_class
from hilt.vla.config import Vla
from hilt.vla.demonstrations import words
from hilt.vla.worker import attach_adapters, first_policy, sizes_of

PROMPT = 40
"""Tokens of an instruction, about"""
TOO_LITTLE = "that is too little"


def footprint(config: Vla, run: Path = Path(), roles: Mapping[str, Estimate] | None = None) -> Iterator[str]:
    """A line for each role: what a rank needs where it trains; what the disk will hold; and at the end what the device
    has free, which must be on this machine. `roles`: the estimates, where they have been made before."""
    if not (kind := policy_class(config.policy)).__module__.startswith("hilt."):
        yield f"memory: it is not estimated for {kind.__name__}, a policy of another package"
        return
    options = new_sizes(config)
    roles = roles or needs(config, options)
    share = (
        f", of which each of {config.placement.ranks} ranks has a part"
        if config.sharding.enabled and config.placement.ranks > 1
        else ""
    )
    yield from (f"memory of the {role} with {one.rows} chunks in a pass: {one}{share}" for role, one in roles.items())
    if config.policy_options.get("rollout_precision", SAME) != SAME:
        yield _float8_copies(config, options)
    yield from disk(config, options, run)
    if config.memory_limit_gb:
        yield f"memory that a rank may use on {config.device} (memory_limit_gb): {config.memory_limit_gb:.1f} GB"
    yield f"memory that {config.device} has free here: {free_bytes(config.device) / 1e9:.1f} GB"


def new_sizes(config: Vla) -> dict[str, Any]:
    """The sizes of a new policy, from its first task; empty for the policy of a folder, which has its own."""
    if not is_new(config.policy):
        return {}
    with contextlib.closing(Pool(0, 1, task_options=config.task_options)) as pool:
        return sizes_of(config.tasks[0], pool, words(config))


def needs(config: Vla, options: dict[str, Any]) -> dict[str, Estimate]:
    """The estimate of each role that a rank has; `options` are the sizes of a new policy."""
    batch = config.algorithm.batch
    rows = 0 if batch.tokens_per_pass else batch.chunks_per_pass
    roles = {"policy, in training": _needs(config, options, rows, training=True)}
    if config.has_reference:
        held = _needs(config, options, batch.log_prob_chunks_per_pass or rows, training=False)
        if not config.sharding.enabled:  # of its own are the weights that are trained, of which each has a gradient
            held = replace(held, weights=roles["policy, in training"].gradients)
        roles["reference" + ", on the host but for its passes" * config.reference.offload] = held
    if config.prime.coefficient:
        roles["reward policy, in training"] = _needs(config, options, rows, training=True)
    if config.critic.kind == "separate":
        roles["critic, in training"] = _needs(config, options, rows, training=True, value="shared")
    return roles


def _float8_copies(config: Vla, sizes: dict[str, Any]) -> str:
    """The memory of the float8 copies of weights that act, in a line."""
    with torch.device("meta"):
        policy: Any = first_policy(config, sizes, device="meta")
    copies, ahead = float8_bytes(policy.float8_layers()), config.collect.ahead
    beside = ", once for the policy that acts and once for the one that learns" * bool(ahead)
    return f"memory of the float8 copies for rollouts: {readable_size((2 if ahead else 1) * copies)}{beside}"


def disk(config: Vla, sizes: dict[str, Any], run: Path, begins: bool = False) -> Iterator[str]:
    """What the disk will hold besides the episodes, in lines: what every run writes (as it begins, only if there is too
    little room for it), and the checkpoint folders of `export_period`."""
    if not policy_class(config.policy).__module__.startswith("hilt."):
        return
    with torch.device("meta"):
        policy = first_policy(config, sizes, device="meta")
        whole = sum(tensor.nbytes for tensor in policy.state_dict().values())
        attach_adapters(policy, config)
        trained = sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)
    above = next((folder for folder in (run, *run.absolute().parents) if folder.exists()), Path())
    free = shutil.disk_usage(above).free
    learn = 1 + (config.critic.kind == "separate") + bool(config.prime.coefficient)
    checkpoint, kept = 3 * learn * trained, config.checkpoint_keep + 1
    parts = f"{kept} checkpoints of {readable_size(checkpoint)} while one is written, "
    parts += f"{readable_size(trained)} for the best weights so far, {readable_size(whole)} for the policy at the end"
    needed = kept * checkpoint + trained + whole
    there = (path for name in ("checkpoints", "best", "policy") for path in (run / name).rglob("*") if path.is_file())
    held = sum(path.stat().st_size for path in there)  # by a run that goes on
    cure = f"; {TOO_LITTLE}, give --run a folder of a larger disk" if needed > free + held else ""
    if cure or not begins:
        yield f"disk for the run: {readable_size(needed)} ({parts}); {readable_size(free)} are free{cure}"
    if config.export_period:
        yield _exported(config, run, whole + trained * bool(config.lora.rank), free)


def _exported(config: Vla, run: Path, each: int, free: int) -> str:
    made = config.max_steps // config.export_period
    kept = min(made, config.export_keep or made)
    rule = f"the newest {kept} stay" if config.export_keep else "all of them stay"
    line = f"checkpoint folders: one every {config.export_period} training steps, {made} in all, of which {rule}"
    line += f": {kept} x {readable_size(each)} = {readable_size(kept * each)} of disk in {run / 'actor'}"
    line += f", and the same at {config.copy_to}" * bool(config.copy_to)
    line += f"; {readable_size(free)} are free"
    if kept * each > free:
        line += f"; {TOO_LITTLE}, export_keep={max(1, free // max(each, 1) - 1)} would fit"
    return line


def _needs(config: Vla, options: dict[str, Any], rows: int, training: bool, value: str = "") -> Estimate:
    """The number of chunks in a pass; 0: limited by batch.tokens_per_pass."""

    def build() -> Policy:
        return first_policy(config, options, value=value, device="meta")

    with torch.device("meta"):
        policy = build()
        tokens = PROMPT + policy.chunk * policy.action_dim
        record = blank_record(policy, rows or max(1, config.algorithm.batch.tokens_per_pass // tokens))
    return estimate(build, record, training, prepare=lambda policy: attach_adapters(policy, config))


def blank_record(policy: Policy, rows: int) -> Record:
    """A record of zeros with the shapes of what `act` gives."""
    config, chunk, horizon = policy.config, (rows, policy.chunk, policy.action_dim), getattr(policy, "horizon", 0)
    openvla = hasattr(config, "num_images")
    drawn = (rows, getattr(config, "knots", 0) or policy.chunk, policy.action_dim)
    pictures = config.num_images if openvla else len(config.images if horizon else config.cameras)
    record = {
        "images": np.zeros((rows, pictures, config.image_size, config.image_size, 3), np.uint8),
        "prompt": np.zeros((rows, PROMPT), np.int32),
        "prompt_length": np.full(rows, PROMPT, np.int32),
        "state": np.zeros((rows, config.proprio_dim if openvla else config.state_dim), np.float32),
        "temperature": np.ones(rows, np.float32),
        "log_prob": np.zeros(chunk, np.float32),
    }
    if horizon:
        record["image_mask"] = np.ones((rows, pictures), bool)
    else:
        record |= {
            "tokens": np.full(drawn, policy.token.first if openvla else 0, np.int32),
            "actions": np.zeros(drawn, np.float32),
        }
    if not openvla:  # it may answer by a flow
        states = config.flow.steps + 1 if config.flow.kind == "noise" else 2
        shape = (rows, states, horizon, config.max_action_dim) if horizon else (rows, states, *drawn[1:])
        record |= {"chain": np.zeros(shape, np.float32), "step": np.zeros(rows, np.int32)}
    return record
