"""Numbers of OpenVLA, OpenVLA-OFT and SimpleVLA-RL's variant of it, with tiny models whose weights both sides make by one rule.

`in.*` are inputs, `out.*` what the originals made of them. Token ids are exact. Everything else is within 3e-6 of the largest number of
its array, or of 1 where all are smaller: a sum in another order, as another CPU or another torch makes it, rounds by the size of what was
added, also where the sum is small. Seen: less than half of that, on aarch64. The other GELU is three to sixty times too far off.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.policies.openvla import OpenVLA, OpenVLAConfig, OpenVLAOFT, OpenVLAOptions
from tests import golden

TOLERANCE = 3e-6


def tolerance(theirs: Any) -> float:
    return TOLERANCE * max(1.0, float(np.abs(theirs).max(initial=0)))


def matches(path: Path) -> Path | None:
    return path if path.suffix == ".npz" and path.parent.name == "openvla" else None


def compare(case: Path) -> golden.Result:
    with np.load(case) as file:
        values = dict(file)
    theirs = {key[4:]: value for key, value in values.items() if key.startswith("out.")}
    inputs = {key[3:]: torch.from_numpy(np.array(value)) for key, value in values.items() if key.startswith("in.")}
    policy = made(json.loads(str(values["config"])), json.loads(str(values["keys"])), int(values["seed"]))
    names = {name: list(value.shape) for name, value in policy.state_dict().items()}
    result = golden.compare(numbers(policy, inputs), theirs, lambda key: golden.exact if "ids" in key else near)
    result.add("keys", golden.exact(names, json.loads(str(values["keys"]))))
    return result


def near(ours: Any, theirs: Any) -> golden.Difference:
    return golden._arrays(ours, theirs, lambda apart: apart <= tolerance(theirs))


def made(config: dict[str, Any], keys: dict[str, list[int]], seed: int, **options: Any) -> Any:
    """The policy of a golden file's config, with the weights of the rule. What is in it is told by its parameters' names."""
    causal = "use_proprio" not in config and not any(key.startswith("action_head") for key in keys)
    upstream = {key: value for key, value in config.items() if key not in ("vit", "num_images")}
    stats = {name: {**stats, "proprio": {"q01": [-1] * 8, "q99": [1] * 8}} for name, stats in config["norm_stats"].items()}
    head = "laplace" if "scale_head.log_b_head.bias" in keys else "l1" if "action_head.model.fc1.bias" in keys else "tokens"
    ours = OpenVLAConfig.from_json(
        upstream,
        norm_stats=stats,
        variant="ar" if causal else "oft",
        head=head,
        chunk=1 if causal else 8,
        num_images=config["num_images"],
        use_proprio=any(key.startswith("proprio_projector") for key in keys),
        proprio_dim=8,
        film=any(key.startswith("vision_backbone.vision_backbone") for key in keys),
        vit=[config["vit"]["featurizer"], config["vit"]["fused_featurizer"]],
    )
    policy = (OpenVLA if causal else OpenVLAOFT)(ours, options=OpenVLAOptions(**options))
    state = {name: torch.from_numpy(weight(name, tuple(shape), seed)) for name, shape in keys.items()}
    policy.load_state_dict(state, strict=True, assign=True)
    return policy.reset_buffers("cpu")


def weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The rule by which a parameter's name is its value."""
    x = np.random.default_rng(zlib.crc32(name.encode()) + seed).standard_normal(shape, dtype=np.float32)
    if len(shape) >= 2:
        return x * np.float32(1.0 if "embed_tokens" in name else 0.5 / np.sqrt(shape[-1]))
    return 1 + np.float32(0.1) * x if "norm" in name and name.endswith("weight") else np.float32(0.1) * x


@torch.no_grad()
def numbers(policy: Any, given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """What `policy` makes of a golden file's inputs."""
    side = "_leftpad" if "input_ids" not in given else ""
    rows = given[f"input_ids{side}"], given["pixel_values"], given.get(f"attention_mask{side}")
    proprio = given.get("proprio")
    whole = policy.inputs_of(*rows, proprio if proprio is not None and proprio.ndim == 2 else None)
    found: dict[str, Any] = {"patch_features": policy.patch_features(whole)}
    found["projected"] = policy.projector(found["patch_features"])
    if policy.causal:
        policy.options.support = "vocabulary"
        found["logits_action_range"] = policy._logits(policy.prefix_of(whole)[0][:, -4:])
        actions, found["generated_ids"] = policy.generate_action_verl(*rows)
        found["actions"] = actions[:, 0]
    elif policy.action_head is None:
        found["action_logits"] = policy._logits(policy.slots_of(whole))
        padded = given["input_ids_leftpad"], given["pixel_values"], given["attention_mask_leftpad"]
        found["leftpad_actions_greedy"], ids = policy.generate_action_verl(*padded, padding_idx=32000, proprio=proprio)
        drawn = ids.view(-1, policy.chunk, policy.action_dim)
        told = policy._judge(policy.inputs_of(*padded, proprio), drawn, torch.full((len(ids),), 1.6))
        found["leftpad_response_ids"], found["leftpad_logp_temperature_1p6"] = ids, told.log_prob.flatten(1)
    else:
        found["action_hidden"] = policy.slots_of(whole)
        if side:
            found["actions_l1"] = policy.generate_action_verl(*rows, proprio=proprio)[0]
        else:  # its head was asked for the first row only; and its slots were read as tokens, without proprioception
            found["actions_l1_proprio"] = policy.generate_action_verl(*(part[:1] for part in rows[:2]), proprio=proprio)[0][0]
            policy.config.head, policy.options.support = "tokens", "vocabulary"
            found["actions_discrete"] = policy.generate_action_verl(*rows[:2])[0]
        if policy.scale_head is not None:
            found |= _laplace(policy, whole, given)
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def _laplace(policy: Any, whole: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    one = torch.ones(len(given["actions"]))
    found = {"log_scale": policy.scale_head(policy.slots_of(whole))}
    found["laplace_log_prob"] = policy._judge(whole, given["actions"], one).log_prob
    policy.options.log_scale_range = tuple(given["log_scale_range"].tolist())
    return found | {"laplace_log_prob_clipped": policy._judge(whole, given["actions"], one).log_prob}
