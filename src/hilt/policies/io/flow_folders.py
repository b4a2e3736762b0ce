"""Folders of pi0 and SmolVLA: as openpi and lerobot write them, and ours, which both of them open.

    config.json, model.safetensors      theirs; the tensors may have the prefix ``model.``
    assets/<name>/norm_stats.json       statistics of openpi
    policy_preprocessor.json            statistics of lerobot, in a file that it names; older folders have them among
                                        the tensors
    hilt.json, heads.safetensors        ours, beside those: the whole configuration with statistics, and the
                                        heads for RL

All is read as data: nothing in a folder is run, and nothing is written into it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.files import inside, new_folder
from hilt.core.tree import JsonObject
from hilt.policies.io.lora import merged
from hilt.policies.io.memory import weights_fit
from hilt.policies.io.tensor_files import Tensors, check_device, check_dtype, load_into, read_json, write_tensors
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.flow_config import HEADS, IMAGES, FlowPolicyConfig
from hilt.policies.vla.gemma import RMSNorm
from hilt.policies.vla.tokens import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from hilt.policies.vla.flow_policy import FlowPolicy
    from hilt.policies.vla.tokens import TextTokenizer

Chosen = TypeVar("Chosen", bound="FlowPolicy")
T = TypeVar("T", bound="DataclassInstance")
OURS, HEADS_FILE = "hilt.json", "heads.safetensors"
KINDS = {"MEAN_STD": "mean_std", "QUANTILES": "q99", "MIN_MAX": "minmax", "IDENTITY": ""}
REFUSED = (
    *(
        "use_relative_actions",
        "use_visual_memory",
        "use_proprioceptive_memory",
        "adapt_to_pi_aloha",
        "use_delta_joint_actions_aloha",
    ),
    "add_image_special_tokens",
)
"""What changes the arithmetic of a published policy and is not built here."""
LEROBOT, OPENPI = {"observation.state": "state", "action": "action"}, {"state": "state", "action": "actions"}
"""What their statistics are called, to ours and the other way round"""
OLD_STATISTICS = ("normalize_", "unnormalize_")
"""Tensors of older folders of lerobot"""
NOT_KEPT = ("compute", "rollout_precision", "fp8_first_layer")
"""Settings of a run, which its policy is saved without"""
TIMES = {
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
}


def load(
    kind: type[Chosen],
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype | str,
    tokenizer: TextTokenizer | None,
    options: Mapping[str, Any],
) -> Chosen:
    """The policy of a folder. `options` change fields of its configuration; `asset` names one of several statistics of
    openpi. A ``value`` of "auto" is a value head where the policy's is published to be.

    With `dtype` bfloat16 the stacks of layers have it; projections, heads and norms stay in float32. `tokenizer` is
    one, or the folder of one; it may be left out if the policy's folder has one, or if no observation will be read.
    """
    device, dtype = check_device(device), check_dtype(dtype) or torch.float32
    if (acting := options.get("acting", "auto")) not in ("auto", "eager") and device.type != "cuda":
        raise ConfigError(
            f"acting={acting} makes CUDA graphs, and the policy is on {device}: give device=cuda, or leave acting out."
        )
    tensors = Tensors(folder)
    options = dict(options)
    asset = options.pop("asset", None)
    config, statistics = _settings(kind, folder, tensors, asset)
    known = {field.name for field in fields(config)}
    if unknown := sorted(set(options) - known):
        raise UnknownNameError(
            f"option of {kind.__name__}.from_pretrained", unknown[0], known | {"asset", "device", "dtype", "tokenizer"}
        )
    if options.get("value") == "auto":
        options["value"] = config.usual_value
    if isinstance(flow := options.get("flow"), Mapping):  # of a file, or of a command line
        options["flow"] = _flow(config.flow, flow)
    config = replace(
        config, **{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    )
    with torch.device("meta"):
        policy = kind(config, _tokenizer(tokenizer, folder), statistics)
    policy.source = folder
    weights_fit(policy, device, dtype)
    stacks = set(policy.get_submodule(policy.big).modules())
    for module in policy.modules():
        if module not in stacks or isinstance(module, RMSNorm):
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(
                    module, name, torch.nn.Parameter(torch.empty(weight.shape, device=device), weight.requires_grad)
                )
    policy.add_heads(device)
    _read_weights(policy, tensors, device, dtype)
    return policy


def set_dtype(policy: FlowPolicy, dtype: torch.dtype) -> None:
    """The stacks of layers get this type; projections, heads and norms stay in float32."""
    for module in policy.get_submodule(policy.big).modules():
        if not isinstance(module, RMSNorm):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(dtype)


def _flow(base: Flow, given: Mapping[str, Any]) -> Flow:
    known = {field.name for field in fields(base)}
    if unknown := sorted(set(given) - known):
        raise UnknownNameError("setting of a flow", unknown[0], known)
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    return replace(base, **changes)


def save(policy: FlowPolicy, folder: Path) -> None:
    """Writes a complete folder, under its name when all of it is there. Files for tokens and
    processors come from where the policy came."""
    config = policy.config
    with new_folder(folder) as beside:
        if policy.source:
            _copy_others(policy.source, beside)
            _write_statistics(policy.statistics, beside)
        save_tokenizer(policy.tokenizer, beside)
        one = policy.get_parameter(policy.tied[0]) is policy.get_parameter(policy.tied[1])
        state, value = merged(policy)  # adapters, if there are any, become part of what is written
        heads = {name: tensor for name, tensor in state.items() if name.startswith(HEADS)}
        prefix = policy.stored_prefix
        rest = {
            prefix + name: each
            for name, each in state.items()
            if name not in heads and not (one and name == policy.tied[1])
        }
        write_tensors(beside, rest, value=lambda name: value(name.removeprefix(prefix)))
        if heads:
            write_tensors(beside, heads, value=value, name=HEADS_FILE)
        (beside / "config.json").write_text(json.dumps(config.to_published(), indent=2) + "\n")
        kept = {name: value for name, value in asdict(config).items() if name not in NOT_KEPT}
        ours = {"config": kept, "statistics": policy.statistics}
        (beside / OURS).write_text(json.dumps(ours, indent=2) + "\n")


def published(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `FlowPolicyConfig` in a published config.json, with lerobot's or openpi's names."""
    for name in REFUSED:
        if given.get(name):
            raise ConfigError(
                f"the checkpoint has {name}={given[name]!r}, which is not built here. Choose one without it."
            )
    for name, value in TIMES.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"the checkpoint has {name}={given[name]!r}; flows are trained with {value} here. Leave it so."
            )
    horizon = given.get("chunk_size", given.get("action_horizon", 50))
    wide = given.get("max_action_dim", given.get("action_dim", 32))
    inputs, outputs = given.get("input_features") or {}, given.get("output_features") or {}
    cameras = [name for name, about in inputs.items() if about.get("type") == "VISUAL" and "empty_camera" not in name]
    found = {
        "chunk_size": horizon,
        "n_action_steps": min(given.get("n_action_steps", horizon), horizon),
        "max_action_dim": wide,
        "max_state_dim": given.get("max_state_dim", wide),
        "action_dim": outputs.get("action", {}).get("shape", [wide])[0],
        "state_dim": inputs.get("observation.state", {}).get("shape", [given.get("max_state_dim", wide)])[0],
        "flow": Flow(steps=given.get("num_inference_steps", given.get("num_steps", 10))),
    }
    found |= {name: given[name] for name in ("tokenizer_max_length", "min_period", "max_period") if name in given}
    for ours, theirs in (("state_normalization", "STATE"), ("action_normalization", "ACTION")):
        if mode := given.get("normalization_mapping", {}).get(theirs):
            if mode not in KINDS:
                raise UnknownNameError("mode of normalization", mode, KINDS)
            found[ours] = KINDS[mode]
    names = (
        IMAGES if len(cameras) <= len(IMAGES) else tuple(name.removeprefix("observation.images.") for name in cameras)
    )
    return found | ({"images": names[: len(cameras)]} if cameras else {})


def to_published(config: FlowPolicyConfig, **own: Any) -> JsonObject:
    """A config.json in lerobot's words."""
    modes = {ours: theirs for theirs, ours in KINDS.items()}
    picture = {"type": "VISUAL", "shape": [3, config.image_size, config.image_size]}
    return {
        **own,
        "n_obs_steps": 1,
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [config.state_dim]},
            **{f"observation.images.{name}": picture for name in config.images},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [config.action_dim]}},
        "normalization_mapping": {
            "VISUAL": "IDENTITY",
            "STATE": modes[config.state_normalization],
            "ACTION": modes[config.action_normalization],
        },
        **{name: getattr(config, name) for name in ("chunk_size", "n_action_steps", "max_state_dim", "max_action_dim")},
        **{name: getattr(config, name) for name in ("tokenizer_max_length", "min_period", "max_period")},
    }


def parse(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of dataclasses from JSON, in which every key is known."""
    hints = get_type_hints(kind)
    if unknown := sorted(set(given) - {field.name for field in fields(kind)}):
        raise UnknownNameError(f"key of {kind.__name__}", unknown[0], hints)
    return kind(
        **{
            name: parse(hints[name], value)
            if is_dataclass(hints[name])
            else tuple(value)
            if isinstance(value, list)
            else value
            for name, value in given.items()
        }
    )


# --- contents of a folder ---


def _settings(kind: type[FlowPolicy], folder: Path, tensors: Tensors, asset: str | None) -> tuple[Any, dict[str, Any]]:
    if (folder / OURS).is_file():
        ours = read_json(folder / OURS)
        return parse(kind.config_class, ours.get("config", {})), ours.get("statistics", {})
    names = frozenset(name.removeprefix("model.") for name in tensors)
    return kind.config_class.from_published(read_json(folder / "config.json"), names), _statistics(
        folder, tensors, asset
    )


def _statistics(folder: Path, tensors: Tensors, asset: str | None) -> dict[str, Any]:
    found = {
        file.parent.relative_to(folder / "assets").as_posix(): file
        for file in sorted((folder / "assets").rglob("norm_stats.json"))
    }
    if asset is not None and asset not in found:
        raise UnknownNameError("asset with statistics", asset, found)
    if len(found) > 1 and asset is None:
        raise ConfigError(f"{folder} has the statistics of {', '.join(found)}. Say which: asset=NAME.")
    if found:
        stats = read_json(found[asset or next(iter(found))]).get("norm_stats", {})
        return {ours: {**stats[theirs], "epsilon": 1e-6} for ours, theirs in OPENPI.items() if theirs in stats}
    if (folder / "policy_preprocessor.json").is_file():
        for step in read_json(folder / "policy_preprocessor.json").get("steps", []):
            if step.get("registry_name") == "normalizer_processor" and step.get("state_file"):
                state = inside(folder, str(step["state_file"]), str(folder / "policy_preprocessor.json"))
                return _grouped({name: value for name, value in Tensors(state).items() if value.ndim})
    old = {name: tensors[name] for name in tensors if name.startswith(OLD_STATISTICS)}
    return _grouped(
        {
            f"{name.split('.buffer_')[1].replace('observation_state', 'observation.state')}": each
            for name, each in old.items()
        }
    )


def _grouped(flat: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``observation.state.mean`` and the like, of the state and the action."""
    grouped: dict[str, Any] = {}
    for name, value in flat.items():
        feature, _, number = name.rpartition(".")
        if (ours := LEROBOT.get(feature)) and value.isfinite().all():
            grouped.setdefault(ours, {})[number] = value.double().tolist()
    return grouped


def _tokenizer(given: Any, folder: Path) -> Any:
    if isinstance(given, (str, Path)):
        return load_tokenizer(given)
    if given is None and any((folder / f"tokenizer{rest}").is_file() for rest in (".json", ".model", "_config.json")):
        return load_tokenizer(folder)
    return given


def _read_weights(policy: FlowPolicy, tensors: Tensors, device: torch.device, dtype: torch.dtype) -> None:
    """Every tensor in its place. The embedding of words and the head that is tied to it
    are one, and files may have either or both."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    first, second = (prefix + name for name in policy.tied)
    if (
        first in tensors
        and second in tensors
        and policy.get_parameter(policy.tied[0]) is policy.get_parameter(policy.tied[1])
    ):
        del tensors.entries[first]

    def stored(name: str) -> str:
        if name.startswith(HEADS):
            return name
        others = policy.tied if name in policy.tied else (policy.other_name(name),)
        return next((prefix + each for each in (name, *others) if prefix + each in tensors), prefix + name)

    load_into(policy, tensors, stored, device=device, dtype=dtype, optional=(*HEADS, *OLD_STATISTICS))
    if (tensors.path / HEADS_FILE).is_file():
        for name in HEADS:
            found = Tensors(tensors.path / HEADS_FILE)
            found.entries = {
                each.removeprefix(f"{name}."): entry for each, entry in found.entries.items() if each.startswith(name)
            }
            if found and hasattr(policy, name):
                load_into(getattr(policy, name), found)


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizers, processors and statistics: files of data in the folder itself, and the assets of openpi."""
    for file in sorted(source.iterdir()):
        data = file.suffix in (".json", ".model", ".txt") or (
            file.suffix == ".safetensors" and "processor" in file.name
        )
        if file.is_file() and data and not file.name.endswith("index.json"):
            shutil.copyfile(file, target / file.name)
    for file in sorted((source / "assets").rglob("norm_stats.json")):
        (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / file.relative_to(source))


def _write_statistics(statistics: Mapping[str, Any], folder: Path) -> None:
    """Into the copied files of lerobot and openpi: the policy may have been
    fine-tuned by others than those that came with it."""
    for file in (folder / "assets").rglob("norm_stats.json"):
        about = read_json(file)
        about["norm_stats"] = about.get("norm_stats", {}) | {
            theirs: {
                name: numbers for name, numbers in statistics[ours].items() if name in ("mean", "std", "q01", "q99")
            }
            for ours, theirs in OPENPI.items()
            if ours in statistics
        }
        file.write_text(json.dumps(about, indent=2) + "\n")
    new = {
        f"{theirs}.{name}": torch.tensor(numbers, dtype=torch.float32)
        for theirs, ours in LEROBOT.items()
        for name, numbers in statistics.get(ours, {}).items()
        if name not in ("mask", "epsilon")
    }
    for file in folder.glob("policy_*processor*normalizer_processor.safetensors"):
        write_tensors(folder, {**Tensors(file), **new}, name=file.name)
