"""Numbers of OpenVLA, OpenVLA-OFT and SimpleVLA-RL's variant of it, with tiny
models whose weights both sides make by one rule.

`in.*` are inputs, `out.*` what the originals made of them, in float32. Token ids
are exact. Everything else is compared twice:

Ours in float64 with theirs. Its own rounding is nothing (1e-15), so what is left is the original's, which is a
constant of the file and not of the machine: at most 1.2e-6 of the largest number of an array (or of 1 where all
are smaller), in all files of this kind and of `pi0`. Allowed are 2^-19 = 1.9e-6, or 32 roundings of float32.
The other GELU is four times too far off at least.

Ours in float32 with ours in float64: what a CPU makes of it by the order in which it adds. A sum of n
products, in whatever order, is within n * 2^-24 of the sum of their sizes (Higham, Accuracy and Stability of
Numerical Algorithms, 3.1); n: the longest of the policy.
"""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.policies.vla.openvla import OpenVLA, OpenVLAConfig, OpenVLAOFT, OpenVLAOptions
from tests import golden

TOLERANCE = 2.0**-19
ROUNDING = 2.0**-24
"""Of a number in float32, at most, as a share of it"""


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
    wide = in_float64(numbers, policy, inputs)
    result = golden.compare(wide, theirs, lambda key: golden.exact if "ids" in key else near)
    check_rounding(result, policy, numbers(policy, inputs), wide, theirs)
    result.add("keys", golden.exact(names, json.loads(str(values["keys"]))))
    return result


def near(ours: Any, theirs: Any) -> golden.Difference:
    """Ours, in float64, as far from theirs as float32 has rounded these."""
    return golden._arrays(ours, theirs.astype(ours.dtype), lambda apart: apart <= tolerance(theirs))


def in_float64(numbers: Callable[..., dict[str, Any]], policy: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The numbers of a copy of the policy with weights, inputs and all that it computes in float64."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    with _default(torch.float64):
        return numbers(copy.deepcopy(policy).double(), wide)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_rounding(
    result: golden.Result, policy: Any, ours: dict[str, Any], wide: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Adds to a result that ours in float32 is ours in float64, but for the order of its sums."""
    longest = max(parameter[0].numel() for parameter in policy.parameters() if parameter.ndim > 1)
    for key, value in ours.items():
        if value.dtype.kind == "f":
            allowed = longest * ROUNDING * max(1.0, float(np.abs(wide[key]).max(initial=0)))
            apart = float(np.abs(value - wide[key]).max(initial=0))
            narrow = value.dtype == theirs[key].dtype and value.shape == theirs[key].shape and apart <= allowed
            result.add(
                f"{key} in float32",
                (0.0, None if narrow else f": {apart:.1e} from float64 (allowed {allowed:.1e}), {value.dtype}"),
            )


def made(config: dict[str, Any], keys: dict[str, list[int]], seed: int, **options: Any) -> Any:
    """The policy of a golden file's config, with the weights of the rule. What is
    in it is told by its parameters' names."""
    causal = "use_proprio" not in config and not any(key.startswith("action_head") for key in keys)
    upstream = {key: value for key, value in config.items() if key not in ("vit", "num_images")}
    stats = {
        name: {**stats, "proprio": {"q01": [-1] * 8, "q99": [1] * 8}} for name, stats in config["norm_stats"].items()
    }
    head = (
        "laplace"
        if "scale_head.log_b_head.bias" in keys
        else "l1"
        if "action_head.model.fc1.bias" in keys
        else "tokens"
    )
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
            found["actions_l1_proprio"] = policy.generate_action_verl(
                *(part[:1] for part in rows[:2]), proprio=proprio
            )[0][0]
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
