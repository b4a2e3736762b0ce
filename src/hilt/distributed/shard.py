"""A module in pieces: every rank has a part of each weight, of its gradient and of
AdamW's moments (FSDP2, ``fully_shard``).

    optimizer = Sharded(policy, optimizer, ranks, Sharding(enabled=True, units=["Block"]))
    # all ranks enter together; inside, each uses the policy by itself, as often as it likes
    with optimizer.whole():
        policy.act(observations)
    optimizer.backward(policy.evaluate(record).log_prob.sum())      # outside: every pass is one of all ranks
    optimizer.step(progress)

It gives the numbers of `DataParallelOptimizer`, and its checkpoints are the same:
they open at any number of ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# what `fully_shard` imports at its first use: here it is imported once for all processes of a machine
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hilt.algos.config import Optimizer
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.distributed.placement import Sharding
from hilt.distributed.ranks import Joined, Ranks

METHODS = ("act", "evaluate", "flow_error", "supervised_loss")
"""Of a policy: what computes with all weights, as `forward` of other modules does"""
VIEW_WARNING = r"FSDP2-wrapped module .* returned a view"


class Sharded(DataParallelOptimizer):
    """A `DataParallelOptimizer` whose ranks share the module among them. Every forward
    and backward pass is made by all together."""

    lockstep = True

    def __init__(
        self, module: nn.Module, settings: Optimizer, ranks: Ranks, sharding: Sharding, head: Optimizer | None = None
    ):
        sharding.check()
        if not isinstance(ranks, Joined):
            raise ConfigError("sharding needs ranks that have joined: open the group with joined=True.")
        self.sharding, self.device = sharding, next(module.parameters()).device
        self._units = _shard(module, sharding, self.device, ranks)
        self._offloaded: dict[str, Tensor] = {}
        self.moments_on = "cpu" if sharding.offload_optimizer else None
        super().__init__(module, settings, ranks, head)

    def backward(self, loss: Tensor) -> None:
        _returning_views(super().backward)(loss)  # checkpointed modules are computed again
        if self.sharding.offload_gradients:
            for name, parameter in self.trained.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.to_local().to("cpu", torch.float32)
                    self._offloaded[name] = (
                        self._offloaded[name].add_(gradient) if name in self._offloaded else gradient
                    )
                    parameter.grad = None

    def clear(self) -> None:
        super().clear()
        self._offloaded = {}

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All ranks enter and leave together. Meanwhile each has all weights, in the
        precision that they are computed with."""
        root = self._units[-1]
        root.set_reshard_after_forward(False)
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
                unit.set_reshard_after_forward(unit is not root, recurse=False)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns the state of a module in one piece, at rank 0; the other ranks
        take part, and have nothing to keep."""
        adam = {
            name: tensor
            if name == "steps"
            else self._gathered(tensor, list(self.trained.values())[int(name.rpartition(".")[2])])
            for name, tensor in self._adam.tensors().items()
        }
        trained = {name: self._gathered(_piece(parameter), parameter) for name, parameter in self.trained.items()}
        return {"trained": trained, "adam": adam} if self.ranks.rank == 0 else {"trained": {}, "adam": {}}

    def _pieces(self) -> list[Tensor]:
        return [_piece(parameter) for parameter in self.trained.values()]

    def _part_of(self, whole: Tensor) -> Tensor:
        """This rank's part, as FSDP2 divides: by rows, the last ranks having fewer or none."""
        parts = torch.chunk(whole, self.ranks.size)
        return parts[self.ranks.rank] if self.ranks.rank < len(parts) else whole[:0]

    def _gradients(self) -> list[Tensor | None]:
        """This rank's parts: the sum over ranks was made in the backward pass."""
        if self.sharding.offload_gradients:
            return [self._offloaded.get(name) for name in self.trained]
        return [None if p.grad is None else p.grad.to_local() for p in self.trained.values()]

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        squares = [gradient.double().square().sum().cpu() for gradient in gradients]
        return float(
            self.ranks.sum_(torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)).sqrt()
        )

    def _move(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """With something on the CPU, one weight after the other, so that the device holds the moments of one."""
        self._adam.parameters = self._pieces()  # FSDP may have put them elsewhere
        if not (self.sharding.offload_gradients or self.sharding.offload_optimizer):
            return super()._move(gradients, rate)
        for i, (gradient, piece) in enumerate(zip(gradients, self._adam.parameters, strict=True)):
            if gradient is not None:
                self._moments_to(piece.device, i)
                super()._move([gradient.to(piece) if j == i else None for j in range(len(gradients))], rate)
                self._moments_to(self.moments_on or piece.device, i)

    def _moments_to(self, device: Any, i: int) -> None:
        for moments in (self._adam._first, self._adam._second):
            moments[i] = moments[i].to(device)

    def _gathered(self, piece: Tensor, parameter: Any) -> Tensor:
        at = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        whole = DTensor.from_local(
            piece.to(self.device), parameter.device_mesh, parameter.placements, **at
        ).full_tensor()
        return whole.cpu() if self.ranks.rank == 0 else torch.empty(0)


def _shard(module: nn.Module, sharding: Sharding, device: torch.device, ranks: Joined) -> list[FSDPModule]:
    """Divides the module over all ranks; what is gathered together, the whole last."""
    there = {type(part).__name__ for part in module.modules() if part is not module}
    for unit in sharding.units:
        if unit not in there:
            raise UnknownNameError("class of modules in this policy (sharding.units)", unit, there)
    with ranks.connecting():
        mesh = init_device_mesh(device.type, (ranks.size,))
    settings = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if sharding.offload_parameters
        else OffloadPolicy(),
    }
    units, policy = [part for part in module.modules() if type(part).__name__ in sharding.units], MixedPrecisionPolicy()
    if sharding.precision == "bfloat16":
        # a unit answers in float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False)
        for part in units:
            part.register_forward_pre_hook(_lowered, with_kwargs=True)
    sharded = [fully_shard(unit, mp_policy=policy, **settings) for unit in units] + [fully_shard(module, **settings)]
    for unit in sharded:
        unit.set_gradient_divide_factor(1.0)  # losses of all ranks add up, as `DataParallelOptimizer` adds them
        unit.set_force_sum_reduction_for_comms(True)
    for name in METHODS:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
            setattr(module, name, _returning_views(getattr(module, name)))
    return sharded


def _returning_views(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without FSDP's warning that a module returned a view: the outputs of a
    policy's modules are not modified in place."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> object:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", VIEW_WARNING)
            return method(*arguments, **named)

    return call


def _lowered(unit: nn.Module, arguments: Any, named: Any) -> Any:
    """What a unit is given, in bfloat16. FSDP would cast it too, but up to torch 2.11 not
    where a checkpointed unit is computed again."""
    return tree_map(
        lambda x: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x, (arguments, named)
    )


def _piece(parameter: Any) -> Tensor:
    return parameter.detach().to_local()
