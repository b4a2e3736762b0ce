"""How much memory a policy will need, before a byte of it is loaded.

    needs = estimate(lambda: OpenVLAOFT(config, ...), record, training=True, dtype=torch.bfloat16)
    needs.check("cuda:0")        # an error with what to change, if it does not fit

There is no formula to keep true: the policy is built of tensors without memory, its own code runs on them, and what is alive is
counted. So it holds for every policy, and for its options: checkpointing, adapters, precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilt.core.errors import ConfigError
from hilt.policies.base import Policy, Record

ADAM_BYTES = 8
"""Of an optimiser's state for each number that is trained: two float32"""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the policy's device at the worst moment."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    """What is alive besides at that moment"""
    largest: int
    """Bytes of the largest tensor: on the way to another device this much is on the host"""
    rows: int
    training: bool

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.activations

    def places(self, device: torch.device | str) -> dict[str, int]:
        """Bytes on each device that has a part in it."""
        name = str(device)
        return {name: self.total} | ({} if name.startswith("cpu") else {"cpu": self.largest})

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimiser": self.optimiser, "activations": self.activations}
        return f"{_size(self.total)}: " + ", ".join(f"{name} {_size(part)}" for name, part in parts.items() if part)

    def check(self, device: torch.device | str, free: int | None = None) -> None:
        """Raises `ConfigError` if a device has less free; `free` is for those that cannot be asked."""
        for place, needed in self.places(device).items():
            there = free_bytes(place) if free is None or place != str(device) else free
            if needed > there:
                cures = [f"fewer rows at a time than {self.rows}"] if self.activations > self.weights // 10 else []
                cures += ["gradient checkpointing", "LoRA"] if self.training else []
                doing = f"{'training' if self.training else 'acting'} with {self.rows} rows" if self.rows else "loading"
                what = self if place == str(device) else _size(needed)
                raise ConfigError(
                    f"{doing} needs {what} on {place}, which has {_size(there)} free. "
                    f"Try {', '.join([*cures, 'dtype=torch.bfloat16'])}, or a device with more memory."
                )


def estimate(
    build: Callable[[], Policy],
    record: Record,
    training: bool = False,
    dtype: torch.dtype | None = None,
    prepare: Callable[[Policy], Any] | None = None,
    optimiser_bytes: int = ADAM_BYTES,
) -> Estimate:
    """What `build`'s policy needs to evaluate a record like this, and with `training` for gradients and an optimiser too.

    `prepare` is called with the policy when it is built: ``lambda policy: lora.attach(policy)``, for one. The policy must be as it
    will be trained, so that gradients are counted for the right parameters.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = build()
        if dtype is not None:
            policy.to(dtype)
        if prepare is not None:
            prepare(policy)
        held = _held(policy)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad] if training else []
        with _Alive(policy) as alive, torch.set_grad_enabled(training):
            found = policy.evaluate(record)
            if training:
                loss = found.log_prob.sum() + found.entropy.sum() + (0 if found.value is None else found.value.sum())
                torch.autograd.backward(loss)
    gradients = sum(parameter.nbytes for parameter in trained)
    return Estimate(
        weights=sum(held.values()),
        gradients=gradients,
        optimiser=optimiser_bytes * sum(parameter.numel() for parameter in trained),
        activations=max(0, alive.most - gradients),
        largest=max(held.values(), default=0),
        rows=len(record["log_prob"]),
        training=training,
    )


def weights_fit(policy: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """The least that can be said without running anything: raises `ConfigError` if the weights alone do not fit on the device."""
    sizes = [dtype.itemsize * parameter.numel() for parameter in policy.parameters()]
    Estimate(sum(sizes), 0, 0, 0, max(sizes, default=0), rows=0, training=False).check(device)


def free_bytes(device: torch.device | str) -> int:
    """What a device has free now."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


class _Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that something still refers to."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.now = self.most = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in (*policy.parameters(), *policy.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, identity: int, size: int) -> None:
        self._seen.discard(identity)
        self.now -= size


def _held(policy: nn.Module) -> dict[int, int]:
    """Bytes of each tensor that the policy holds, counted once."""
    return {id(tensor): tensor.nbytes for tensor in (*policy.parameters(), *policy.buffers())}


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
