"""Numbers of pi0, pi0.5 and SmolVLA as lerobot implements them, with tiny models
whose weights both sides make by one rule.

In float64 as for OpenVLA, and so is float32. A flow's loss is the square of an error of velocity, here up to 20, where
float32 is no finer than 2e-6; it is the error, its root, that is compared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.policies.vla import flow
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.pi0 import Pi0
from hilt.policies.vla.smolvla import SmolVLA
from tests import golden
from tests.golden.kinds.openvla import check_rounding, in_float64, near, weight


def matches(path: Path) -> Path | None:
    return path if path.suffix == ".npz" and path.parent.name == "pi0" else None


def compare(case: Path) -> golden.Result:
    with np.load(case) as file:
        values = dict(file)
    keys = json.loads(str(values["keys"]))
    theirs = {key[4:]: value for key, value in values.items() if key.startswith("out.")}
    inputs = {key[3:]: torch.from_numpy(value) for key, value in values.items() if key.startswith("in.")}
    policy = made(json.loads(str(values["config"])), keys, int(values["seed"]))
    ours, wide = numbers(policy, inputs), in_float64(numbers, policy, inputs)
    for side in (ours, wide, theirs):
        side["velocity_error"] = np.sqrt(side.pop("flow_loss"))
    result = golden.compare(wide, theirs, lambda key: near)
    check_rounding(result, policy, ours, wide, theirs)
    result.add("keys", golden.exact({name: list(value.shape) for name, value in policy.state_dict().items()}, keys))
    result.add(
        "parameters",
        golden.exact(sorted(name for name, _ in policy.named_parameters(remove_duplicate=False)), sorted(keys)),
    )
    result.add(
        "steps", golden.exact(policy.config.flow.steps, json.loads(str(values["config"]))["num_inference_steps"])
    )
    return result


def made(config: dict[str, Any], keys: dict[str, list[int]], seed: int) -> FlowPolicy:
    """The policy of a golden file's config, with the weights of the rule."""
    sizes: dict[str, Any] = {
        "vlm": StackConfig(**config["vlm"]),
        "expert": StackConfig(**config["expert"]),
        "vision": VisionConfig(**config["vision"]),
    }
    kind: type[FlowPolicy] = SmolVLA if config.get("type") == "smolvla" else Pi0
    if kind is SmolVLA:
        sizes["shuffle"] = config["shuffle"]
    ours = replace(kind.config_class.from_published(config, frozenset(keys)), vocabulary=keys[kind.tied[0]][0], **sizes)
    with torch.device("meta"):
        policy = kind(ours)
    # heads for words are not used, and are the largest tensors of all
    weights = {name: weight(name, tuple(shape), seed) for name, shape in keys.items() if "lm_head" not in name}
    state = {
        name: torch.from_numpy(weights[name]) if name in weights else torch.zeros(1).expand(shape)
        for name, shape in keys.items()
    }
    if kind is Pi0:
        state[kind.tied[0]] = state[kind.tied[1]]
    policy.load_state_dict(state, assign=True)
    return policy


@torch.no_grad()
def numbers(policy: FlowPolicy, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What `policy` makes of a golden file's inputs."""
    pictures, present = (
        torch.stack([given[f"{name}{slot}"] for slot in range(2)], 1) for name in ("image", "image_mask")
    )
    state = given.get("state", torch.zeros(len(pictures), policy.config.max_state_dim))  # pi0.5 has it in its words
    prefix = policy.prefix(pictures, present, given["tokens"], given["token_mask"], state)
    noise = given["noise"]
    drawn = flow.draw(
        policy._field(prefix), tuple(noise.shape), policy.config.flow, torch.ones(len(noise)), None, False, noise
    )
    loss = policy.flow_loss(prefix, given["actions"], noise, given["time"])
    return {"sample_actions": drawn.actions.numpy(), "flow_loss": loss.numpy()}
