"""OpenVLA's checkpoint folders as files.

    policy = OpenVLAOFT.from_pretrained("folder", unnorm_key="libero_spatial", device="cuda:0", dtype=torch.bfloat16)
    policy.save_pretrained("another")

    config.json, model*.safetensors            upstream's; tensors under upstream's names
    dataset_statistics.json                    normalization by dataset; config.json's, where it is not there
    action_head--*_checkpoint.pt, proprio_projector--*, vision_backbone--*      parts that OpenVLA-OFT writes apart
    heads.safetensors                          ours: the heads that upstream does not have
    preprocessor_config.json, tokenizer*, ...  copied when a policy is saved

Nothing in a folder is run and nothing is written into it: the .py files in it are copied as any other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hilt.core.errors import ConfigError, FormatError, UnknownNameError
from hilt.core.files import new_folder
from hilt.policies.base import Policy
from hilt.policies.io.lora import merged
from hilt.policies.io.memory import weights_fit
from hilt.policies.io.tensor_files import (
    Tensors,
    check_device,
    check_dtype,
    load_into,
    read_json,
    read_pt,
    write_tensors,
)
from hilt.policies.vla.normalize import read_statistics, resolve_key
from hilt.policies.vla.openvla_config import OURS, OpenVLAConfig, OpenVLAOptions
from hilt.policies.vla.tokens import load_tokenizer, save_tokenizer

SEPARATE = ("action_head", "proprio_projector", "vision_backbone")
"""Parts that OpenVLA-OFT has in files of their own"""
HEADS_FILE, HEADS = "heads.safetensors", ("scale_head.", "value_head.")
COPIED = (".json", ".model", ".txt", ".jinja", ".py", ".md")
WRITTEN = ("config.json", "dataset_statistics.json", "model.safetensors.index.json")
PLATFORMS = {"libero": (8, "q99"), "bridge": (5, "q99"), "aloha": (25, "minmax"), "robotwin": (25, "minmax")}
"""Chunk and normalization of OpenVLA-OFT, by a word in the name of its dataset:
constants of upstream's code, which its folders lack"""
OPENED_WITH = {"unnorm_key", "device", "dtype", "tokenizer", "allow_untrained"}
TOLD_BY_FILES = {"norm_stats", "text_config", "upstream", "vit", "means", "stds"}
"""Beside the settings of a policy: the arguments for opening its folder; and those
of them that are never given by hand"""
MIN_MASS = 0.05
"""Of the probability on action tokens; an untrained head has 0.008 there, a trained one nearly all"""


def load_openvla(
    folder: str | os.PathLike[str],
    kinds: Mapping[str, Callable[..., Policy]],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    unnorm_key: str | None = None,
    tokenizer: object = None,
    allow_untrained: bool = False,
    **options: Any,
) -> Policy:
    """OpenVLA or OpenVLA-OFT from a folder, checked.

    `kinds` are the classes by variant, "ar" or "oft": a single one, or both, and the folder says which it is. `dtype`
    is that of the weights ("float32", ...), the files' unless given.
    `options` are fields of `OpenVLAOptions`, or of `OpenVLAConfig` if the folder does not contain them:
    variant, chunk, head, num_images. `allow_untrained` lets through a policy that has not learned to
    answer in tokens: to fine-tune it, or for a test.
    """
    folder, device, dtype = Path(folder), check_device(device), check_dtype(dtype)
    document, tensors, apart = read_json(folder / "config.json"), Tensors(folder), _apart(folder)
    if document.get("model_type") != "openvla":
        raise FormatError(
            f"{folder / 'config.json'}: its model_type is {document.get('model_type')!r}, not "
            "'openvla'. Use load_policy()."
        )
    stats = read_statistics(folder / WRITTEN[1]) if (folder / WRITTEN[1]).exists() else document.get("norm_stats") or {}
    changes = {"norm_stats": stats}
    unnorm_key = unnorm_key or document.get("unnorm_key")
    running = _running_options(options)
    if len(kinds) == 1:
        (changes["variant"],) = kinds
        if options.setdefault("variant", changes["variant"]) not in kinds:
            raise ConfigError(
                f"variant={options['variant']!r}, and this class is of {changes['variant']!r}: leave it out."
            )
    changes |= _found(document, apart, tensors, {**options, **changes}, resolve_key(stats, unnorm_key), folder)
    if (processor := folder / "preprocessor_config.json").exists():
        about = read_json(processor)
        changes |= {name: [list(row) for row in about[name]] for name in ("means", "stds") if about.get(name)}
    config = OpenVLAConfig.from_json(document, **{**changes, **options})
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    policy = kinds[config.variant](config, stats, tokenizer, unnorm_key, running)
    policy.source = folder
    dtype = dtype or next(iter(tensors.entries.values())).dtype
    weights_fit(policy, device, dtype)
    _load_weights(policy, folder, tensors, apart, device, dtype)
    if device.type == "meta":  # memory is estimated: there is nothing to try
        return policy
    policy.reset_buffers(device)
    policy.check_attention()
    if config.head == "tokens" and not allow_untrained and (mass := policy.action_token_mass()) < MIN_MASS:
        raise ConfigError(
            f"{folder}: only {mass:.1%} of the probability lies on action tokens, so this policy was not trained "
            "to answer in them (an L1 checkpoint without its action head, or random weights). Fine-tune it first with "
            "allow_untrained=True, or take another."
        )
    return policy


def _running_options(options: dict[str, Any]) -> OpenVLAOptions:
    """Takes the fields of `OpenVLAOptions` out of what was given by hand; the rest are fields of `OpenVLAConfig`."""
    running, built = ({field.name for field in fields(each)} for each in (OpenVLAOptions, OpenVLAConfig))
    for name in options:
        if name not in running | built:
            raise UnknownNameError("option of an OpenVLA", name, (running | built | OPENED_WITH) - TOLD_BY_FILES)
    return OpenVLAOptions(**{name: options.pop(name) for name in [*options] if name in running})


def _load_weights(
    policy: Policy, folder: Path, tensors: Tensors, apart: Mapping[str, Path], device: torch.device, dtype: torch.dtype
) -> None:
    """Reads the weights of a folder into a policy; heads that the folder lacks begin with random ones."""
    also = {f"{part}.{name}": tensor for part, file in apart.items() for name, tensor in _plain(read_pt(file)).items()}
    if (folder / HEADS_FILE).exists():
        also |= dict(Tensors(folder / HEADS_FILE))
    superseded = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.") if policy.config.film else ()
    load_into(policy, tensors, device=device, dtype=dtype, also=also, optional=(*HEADS, *superseded))
    for head in HEADS:
        lacking = [name for name, parameter in policy.named_parameters() if name.startswith(head) and parameter.is_meta]
        if lacking and device.type != "meta":
            policy.initialize(only=head, device=device, dtype=dtype)


def save_openvla(policy: Policy, folder: str | os.PathLike[str]) -> None:
    """A complete folder that `load_openvla` and upstream's loaders open. Adapters
    are merged on the way, shard by shard."""
    config, source = policy.config, policy.source
    state, value = merged(policy)
    whole = config.head == "tokens"  # SimpleVLA-RL has the proprio projector in the model, OpenVLA-OFT in a file
    apart = [
        part
        for part in SEPARATE
        if (part == "vision_backbone" and config.film) or (part != "vision_backbone" and not whole)
    ]
    document = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        **config.to_json(),
        "norm_stats": policy.norm_stats,
    }
    document["torch_dtype"] = str(policy.projector.fc1.weight.dtype).removeprefix("torch.")
    document["unnorm_key"] = policy.unnorm_key
    document["use_proprio"] = config.use_proprio and whole
    if not document["use_proprio"]:
        document.pop("proprio_dim", None)
    with new_folder(folder) as beside:
        for file in sorted(source.iterdir()) if source is not None else ():
            if file.suffix in COPIED and file.is_file() and file.name not in WRITTEN:
                shutil.copyfile(file, beside / file.name)
        if not (beside / "modeling_prismatic.py").exists():
            document.pop("auto_map", None)  # it would send upstream's loader to files that are not there
        if not (beside / "preprocessor_config.json").exists():
            _write_json(beside / "preprocessor_config.json", _processor(config))
        save_tokenizer(policy.tokenizer, beside)
        for part in apart:
            names = [name for name in state if name.startswith(f"{part}.")]
            if names:
                torch.save(
                    {name.removeprefix(f"{part}."): value(name).cpu() for name in names},
                    beside / f"{part}--0_checkpoint.pt",
                )
        heads = {name: tensor for name, tensor in state.items() if name.startswith(HEADS)}
        if heads:
            write_tensors(beside, heads, value=value, name=HEADS_FILE)
        # the shards of a policy with FiLM have its vision without: upstream's loader wants it before it adds FiLM
        plain = {
            _unfilmed(name): name
            for name in state
            if not name.startswith((*HEADS, *(f"{part}." for part in apart if part != SEPARATE[2])))
        }
        kept = {theirs: ours for theirs, ours in plain.items() if theirs}
        write_tensors(
            beside, {theirs: state[ours] for theirs, ours in kept.items()}, value=lambda name: value(kept[name])
        )
        _write_json(beside / "dataset_statistics.json", policy.norm_stats)
        document[OURS] |= {"action_dim": policy.action_dim}
        _write_json(beside / "config.json", document)


def _found(
    document: Mapping[str, Any],
    apart: Mapping[str, Path],
    tensors: Tensors,
    given: Mapping[str, Any],
    key: str,
    folder: Path,
) -> dict[str, Any]:
    """Returns settings that the files imply beyond config.json, and raises errors for impossible ones."""
    ours = document.get("hilt", {})
    regresses = "action_head" in apart or any(name.startswith("action_head.") for name in tensors)
    head = given.get("head", ours.get("head", "l1" if regresses else "tokens"))
    if head == "tokens" and regresses:
        raise ConfigError(
            f"{folder}: this checkpoint has an L1 action head, so its answers in tokens were never "
            "trained and a policy of them succeeds at nothing. Use head='l1', or head='laplace' to draw "
            "actions; for tokens take a checkpoint that was fine-tuned so."
        )
    if head != "tokens" and not regresses:
        raise ConfigError(
            f"{folder}: head={head!r} was asked for, and there is no action_head--*_checkpoint.pt. Use head='tokens'."
        )
    found: dict[str, Any] = {"head": head}
    variant = given.get("variant", ours.get("variant", "oft" if apart else ""))
    if not variant:
        raise ConfigError(
            f"{folder}: its files do not determine how it decodes: give variant='oft' (OpenVLA-OFT) or 'ar' (OpenVLA)."
        )
    found["variant"] = variant
    if "chunk" not in given and "chunk" not in ours:
        platform = next((word for word in PLATFORMS if word in key.lower()), "")
        if variant == "oft" and not platform:
            raise ConfigError(
                f"{folder}: the number of actions in a chunk is unknown. Give chunk=, and "
                "normalization= if it is not q99."
            )
        found["chunk"], found["normalization"] = PLATFORMS[platform] if variant == "oft" else (1, "q99")
    first = "proprio_projector.fc1.weight"
    if "proprio_projector" in apart:
        found |= {"use_proprio": True, "proprio_dim": read_pt(apart["proprio_projector"])["fc1.weight"].shape[1]}
    elif first in tensors:
        found |= {"use_proprio": True, "proprio_dim": tensors.entries[first].shape[1]}
    if "vision_backbone" in apart:
        found["film"] = True
    return found


def _apart(folder: Path) -> dict[str, Path]:
    found = {}
    for part in SEPARATE:
        files = sorted(folder.glob(f"{part}--*checkpoint.pt"))
        if len(files) > 1:
            raise FormatError(
                f"{folder}: it has {len(files)} files of the {part} "
                f"({', '.join(f.name for f in files)}). Leave only one there."
            )
        if files:
            found[part] = files[0]
    return found


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the adapters that OpenVLA-OFT leaves in its vision backbone with
    FiLM: they are merged, with its alpha."""
    plain = {}
    for name, tensor in state.items():
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (state[f"{stem}.lora_{side}.default.weight"].float() for side in "AB")
            plain[f"{stem}.weight"] = torch.addmm(tensor.float(), b, a, alpha=min(len(a), 16) / len(a)).to(tensor.dtype)
        elif ".lora_" not in name:
            plain[name.replace(".base_layer.", ".")] = tensor
    return plain


def _unfilmed(name: str) -> str:
    """The name of a tensor in a vision backbone without FiLM; empty for what only FiLM has."""
    inner = name.removeprefix("vision_backbone.vision_backbone.")
    if inner == name:
        return name
    return "" if ".scale." in inner or ".shift." in inner else "vision_backbone." + inner.replace(".block.", ".")


def _processor(config: Any) -> dict[str, Any]:
    """A preprocessor_config.json for upstream's image processor."""
    count, size = len(config.vits()), config.image_size
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "processor_class": "PrismaticProcessor",
        "use_fused_vision_backbone": count > 1,
        "image_resize_strategy": config.upstream.get("image_resize_strategy", "resize-naive"),
        "input_sizes": [[3, size, size]] * count,
        "interpolations": ["bicubic"] * count,
        "means": config.means,
        "stds": config.stds,
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
