"""LoRA through `peft`: attach adapters, train them only, save them, and merge them as
they are written, without a second model in memory.

    trained = attach(policy, rank=32, alpha=16)     # parameters for the optimizer: adapters, and the heads in full
    save_adapter(policy, "adapter")                 # as peft writes it: upstream's loaders open it
    state, value = merged(policy)                   # for `write_tensors`: each weight is merged when it is written
    merge(policy)                                   # in place: the adapters become part of the weights

Adapters are in the type of the weights that they belong to, unless `dtype` is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hilt.core.errors import ConfigError, FormatError, UnknownNameError, optional_module
from hilt.core.files import new_folder
from hilt.policies.io.adapted_linear import adapted_layer
from hilt.policies.io.tensor_files import Tensors, read_json, write_tensors

ADAPTER = "default"
PREFIX = "base_model.model."
"""Before each name in a file of peft"""
FILE, FULL_FILE = "adapter_model.safetensors", "trained_in_full.safetensors"
CONDITIONED = "condition_embedding"
"""The name of `hilt.policies.condition_embedding` in a policy"""
HEADS = ("action_head", "scale_head", "value_head", "noise_head", "proprio_projector", CONDITIONED)
"""Small parts that begin untrained or nearly so: adapters would be too narrow for them, they are trained in full"""
NOT_ADAPTED = (*HEADS, "lm_head")


def attach(
    policy: nn.Module,
    rank: int = 32,
    alpha: float = 16,
    targets: str | Sequence[str] = "all-linear",
    full: Sequence[str] = HEADS,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Puts adapters on linear layers and freezes the rest but for the modules in
    `full`. Gives the parameters that are trained.

    `targets`: "all-linear" (every linear layer but the heads and the output over the vocabulary), or the ends of names,
    such as ["q_proj", "v_proj"], in which * stands for any letters: "gemma_expert.*_proj". An adapter begins as zero,
    so nothing changes before the first step.
    """
    if rank < 1 or alpha <= 0:
        raise ConfigError(f"rank is {rank} and alpha {alpha}; give a rank of at least 1 and an alpha above 0.")
    if adapted(policy):
        raise ConfigError("this policy has adapters already; merge them first, or go on with those that it has.")
    if (trained := getattr(getattr(policy, "config", None), "trained", "all")) != "all":
        raise ConfigError(
            f"trained={trained} would do nothing beside adapters; leave it out, and name the "
            "layers to adapt in targets."
        )
    names = _linear_layers(policy, targets)
    for number, (_, layer) in enumerate(_inject(policy, names, rank, alpha)):
        generator = torch.Generator().manual_seed(seed + number)
        shape = layer.lora_A[ADAPTER].weight.shape
        bound = shape[1] ** -0.5  # what kaiming_uniform_(a=sqrt(5)) gives, as peft begins with
        with torch.no_grad():
            layer.lora_A[ADAPTER].weight.copy_((torch.rand(shape, generator=generator) * 2 - 1) * bound)
        if dtype is not None:
            layer.lora_A[ADAPTER].to(dtype)
            layer.lora_B[ADAPTER].to(dtype)
    return _freeze(policy, full)


def adapted(policy: nn.Module) -> dict[str, nn.Module]:
    """The layers that have an adapter, by name."""
    return {
        name: module
        for name, module in policy.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def merged(policy: nn.Module) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """(the state dict under the names of a model without adapters, a function that
    gives a tensor of it with its adapter merged). The embedding of a condition is not part of the model: see
    `hilt.policies.conditioned`."""
    layers = adapted(policy)
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith(f"{CONDITIONED}.")}
    plain = {name: tensor for name, tensor in state.items() if not _of_adapter(name, layers)}
    places = {name.replace(".base_layer.", "."): name for name in plain}

    def value(name: str) -> Tensor:
        layer = layers.get(name.removesuffix(".weight"))
        return plain[places[name]] if layer is None or not name.endswith(".weight") else _sum(layer)

    return {name: plain[place] for name, place in places.items()}, value


def merge(policy: nn.Module) -> None:
    """Adds each adapter to its weight, in place, and takes it off. All that is
    needed besides is memory for one weight."""
    for name, layer in adapted(policy).items():
        with torch.no_grad():  # not through `data`: whoever has a copy of the weight sees that it has changed
            layer.base_layer.weight.copy_(_sum(layer))
        parent, _, child = name.rpartition(".")
        setattr(policy.get_submodule(parent), child, layer.base_layer)
    for leftover in ("peft_config", "_hf_peft_config_loaded"):
        if hasattr(policy, leftover):
            delattr(policy, leftover)


def save_adapter(policy: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Adapters and their config as peft writes them, and beside them what is
    trained in full. The folder must be new."""
    layers = adapted(policy)
    if not layers:
        raise ConfigError("this policy has no adapters to save; attach() makes them.")
    adapters, full = {}, {}
    for name, parameter in policy.named_parameters():
        if _of_adapter(name, layers):
            adapters[PREFIX + name.replace(f".{ADAPTER}.", ".")] = parameter.detach()
        elif parameter.requires_grad:
            full[name] = parameter.detach()
    with new_folder(folder) as beside:
        write_tensors(beside, adapters, name=FILE)
        if full:
            write_tensors(beside, full, name=FULL_FILE)
        config: Any = policy.peft_config
        config[ADAPTER].save_pretrained(str(beside))


def load_adapter(
    policy: nn.Module, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> list[nn.Parameter]:
    """Puts the adapters of a folder on a policy without any, also such as peft itself
    wrote. Gives the parameters that are trained."""
    folder = Path(folder)
    config = read_json(folder / "adapter_config.json")
    others = (
        "use_dora",
        "use_rslora",
        "modules_to_save",
        "alpha_pattern",
        "rank_pattern",
        "lora_bias",
        "fan_in_fan_out",
    )
    unlike = [name for name in others if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unlike:
        raise FormatError(
            f"{folder}: its adapter is not plain LoRA ({', '.join(unlike) or 'peft_type, bias'}). "
            "Merge it with peft first."
        )
    tensors = Tensors(folder / FILE)
    names = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    known = dict(policy.named_modules())
    if unknown := [name for name in names if name not in known]:
        raise UnknownNameError(
            f"layer to adapt, as {folder / FILE} has it,",
            unknown[0],
            (n for n, m in known.items() if isinstance(m, nn.Linear)),
        )
    for name, layer in _inject(policy, names, int(config["r"]), float(config["lora_alpha"])):
        for side in ("lora_A", "lora_B"):
            linear = getattr(layer, side)[ADAPTER]
            tensors.read(
                f"{PREFIX}{name}.{side}.weight", linear.to(dtype).weight if dtype is not None else linear.weight
            )
    full: list[str] = []
    if (folder / FULL_FILE).exists():
        parameters, heads = dict(policy.named_parameters()), Tensors(folder / FULL_FILE)
        for name in heads:
            if name not in parameters:
                raise UnknownNameError(f"parameter, as {folder / FULL_FILE} has it,", name, parameters)
            heads.read(name, parameters[name])
        full = sorted({name.split(".")[0] for name in heads})
    return _freeze(policy, full)


def _inject(policy: nn.Module, names: Sequence[str], rank: int, alpha: float) -> list[tuple[str, Any]]:
    peft = optional_module("peft", "LoRA", "vla")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(names), lora_dropout=0.0, bias="none")
    devices = [policy.device.index or 0] if getattr(policy, "device", torch.device("cpu")).type == "cuda" else []
    with torch.random.fork_rng(devices):  # peft draws its first weights from the global generators
        peft.inject_adapter_in_model(config, policy, ADAPTER)
    layers = list(adapted(policy).items())
    for _, layer in layers:
        if type(layer) is adapted_layer().__base__:
            layer.__class__ = adapted_layer()
    return layers


def _freeze(policy: nn.Module, full: Sequence[str]) -> list[nn.Parameter]:
    layers = adapted(policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(_of_adapter(name, layers) or any(part in name.split(".") for part in full))
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _linear_layers(policy: nn.Module, targets: str | Sequence[str]) -> list[str]:
    linear = [name for name, module in policy.named_modules() if isinstance(module, nn.Linear)]
    if targets == "all-linear":
        return [name for name in linear if not set(name.split(".")) & set(NOT_ADAPTED)]
    if isinstance(targets, str):
        raise ConfigError(
            f'targets is {targets!r}; give "all-linear" or a list of the ends of names, such as ["q_proj", "v_proj"].'
        )
    for target in targets:
        if not any(_ends_as(name, target) for name in linear):
            raise UnknownNameError("linear layer", target, {name.rpartition(".")[2] for name in linear})
    return [name for name in linear if any(_ends_as(name, target) for target in targets)]


def _ends_as(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _of_adapter(name: str, layers: dict[str, Any]) -> bool:
    return any(name.rpartition(side)[0] in layers for side in (".lora_A.", ".lora_B.") if side in name)


def _sum(layer: Any) -> Tensor:
    """Weight and adapter added in float32: rounded once."""
    weight, a, b = (part.weight.detach() for part in (layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]))
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[ADAPTER]).to(weight.dtype)
