"""How much memory a policy will need, before a byte of it is loaded.

    needs = estimate(lambda: OpenVLAOFT(config, ...), record, training=True, dtype=torch.bfloat16)
    needs.check("cuda:0")        # an error with what to change, if it does not fit

There is no formula to keep true: the policy is built of tensors without memory, its own code runs on them, and what is
alive is counted. So it holds for every policy, and for its options: checkpointing, adapters, precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilt.core import platform
from hilt.core.errors import ConfigError
from hilt.policies.base import Policy, Record
from hilt.policies.io.tensor_files import check_device

ADAM_BYTES = 8
"""Of an optimizer's state for each number that is trained: two float32"""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the policy's device at the worst moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What is alive besides at that moment"""
    largest: int
    """Bytes of the largest tensor: on the way to another device this much is on the host"""
    rows: int
    training: bool

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def places(self, device: torch.device | str) -> dict[str, int]:
        """Bytes on each device that has a part in it."""
        name = str(device)
        return {name: self.total} | ({} if name.startswith("cpu") else {"cpu": self.largest})

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
        }
        return f"{readable_size(self.total)}: " + ", ".join(
            f"{name} {readable_size(part)}" for name, part in parts.items() if part
        )

    def check(self, device: torch.device | str, free: int | None = None) -> None:
        """Raises `ConfigError` if a device has less free; `free` is for those that cannot be asked."""
        for place, needed in self.places(device).items():
            there = free_bytes(place) if free is None or place != str(device) else free
            if needed > there:
                cures = [f"fewer rows at a time than {self.rows}"] if self.activations > self.weights // 10 else []
                cures += ["gradient checkpointing", "LoRA"] if self.training else []
                doing = f"{'training' if self.training else 'acting'} with {self.rows} rows" if self.rows else "loading"
                what = self if place == str(device) else readable_size(needed)
                raise ConfigError(
                    f"{doing} needs {what} on {place}, which has {readable_size(there)} free. "
                    f"Try {', '.join([*cures, 'dtype=torch.bfloat16'])}, or a device with more memory."
                )


def estimate(
    build: Callable[[], Policy],
    record: Record,
    training: bool = False,
    dtype: torch.dtype | None = None,
    prepare: Callable[[Policy], object] | None = None,
    optimizer_bytes: int = ADAM_BYTES,
) -> Estimate:
    """What `build`'s policy, with weights of `dtype`, needs to evaluate a record like this; with `training`,
    for gradients and an optimizer too. `build` and `prepare` (``lambda policy: lora.attach(policy)``, for
    one) are called with nothing but the meta device: the policy must be as it will be trained, so that
    gradients are counted for the right parameters.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        policy = build()
        if prepare is not None:
            prepare(policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        held = without_memory(policy, dtype)
        with _Alive(policy, training) as alive, torch.set_grad_enabled(training):
            found = policy.evaluate(record)
            loss = found.log_prob.sum() + found.entropy.sum() + (0 if found.value is None else found.value.sum())
            wanted = [parameter for parameter in policy.parameters() if parameter.requires_grad and training]
            trained = (
                [each for each in torch.autograd.grad(loss, wanted, allow_unused=True) if each is not None]
                if training
                else []
            )
    gradients = sum(gradient.nbytes for gradient in trained)
    return Estimate(
        weights=sum(held),
        gradients=gradients,
        optimizer=optimizer_bytes * sum(gradient.numel() for gradient in trained),
        activations=max(0, alive.most - gradients),
        largest=max(held, default=0),
        rows=len(next(iter(record.values()))),
        training=training,
    )


def weights_fit(policy: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """A lower bound without running anything: raises `ConfigError` if the weights alone do not fit on the device."""
    if str(device) == "meta":  # it is only estimated
        return
    sizes = [dtype.itemsize * parameter.numel() for parameter in policy.parameters()]
    Estimate(sum(sizes), 0, 0, 0, max(sizes, default=0), rows=0, training=False).check(device)


def free_bytes(device: torch.device | str) -> int:
    """What a device has free now."""
    place = check_device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    return platform.free_memory()


def limit_memory(device: torch.device | str, gigabytes: float) -> None:
    """This process may use this much of a GPU from now on; beyond that an allocation fails. Elsewhere nothing limits
    it. 0: no limit."""
    place = check_device(device)
    if gigabytes and place.type == "cuda":
        number = torch.cuda.current_device() if place.index is None else place.index
        total = torch.cuda.get_device_properties(number).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), number)


class _Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that something still refers to."""

    def __init__(self, policy: nn.Module, training: bool):
        super().__init__()
        self.now = self.most = 0
        self._training = training
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in (*policy.parameters(), *policy.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._sizes:
                size = storage.nbytes()
                if func is torch.ops.aten.add.Tensor and self._training and not torch.is_grad_enabled():
                    # Two gradients of one tensor: autograd adds the one to the other in place, though
                    # not with tensors like these.
                    first = args[0].untyped_storage()._cdata
                    self.now -= self._sizes.get(first, 0)
                    self._sizes[first] = 0
                self._sizes[storage._cdata] = size
                self.now += size
                weakref.finalize(storage, self._gone, storage._cdata)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, identity: int) -> None:
        self.now -= self._sizes.pop(identity)


def without_memory(policy: nn.Module, dtype: torch.dtype | None = None) -> list[int]:
    """Gives every parameter and buffer a tensor on the CPU that has no memory, and
    returns how many bytes each would have."""
    made: dict[int, torch.Tensor] = {}
    for module in policy.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None and id(old) not in made:
                    kind = (
                        dtype
                        if dtype is not None and held is module._parameters and old.is_floating_point()
                        else old.dtype
                    )
                    new = torch.empty(old.shape, dtype=kind, device="cpu")
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if held is module._parameters else new
                if old is not None:
                    held[name] = made[id(old)]
    return [tensor.nbytes for tensor in made.values()]


def readable_size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def peak_memory(device: torch.device | str, most: Callable[[int], int]) -> dict[str, float]:
    """`gpu_memory_gb`: the most that tensors of a rank had on its GPU since the last call; nothing on a CPU. `most`:
    the largest of a number that each rank gives."""
    place = check_device(device)
    if place.type != "cuda":
        return {}
    found = most(torch.cuda.max_memory_allocated(place))
    torch.cuda.reset_peak_memory_stats(place)
    return {"gpu_memory_gb": found / 1e9}
