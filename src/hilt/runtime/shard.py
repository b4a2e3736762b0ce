"""A module in pieces: every rank has a part of each weight, of its gradient and of AdamW's moments (FSDP2, ``fully_shard``).

    trainee = Sharded(policy, optimiser, ranks, Sharding(enabled=True, units=["Block"]))
    with trainee.whole():            # all ranks enter together; inside, each uses the policy by itself, as often as it likes
        policy.act(observations)
    trainee.backward(policy.evaluate(record).log_prob.sum())      # outside: every pass is one of all ranks
    trainee.step(progress)

It gives the numbers of `Trainee`, and its checkpoints are the same: they open at any number of ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # what `fully_shard` imports at its first use: here it is imported once for all processes of a machine
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

from hilt.algos.config import Optimiser
from hilt.core.errors import ConfigError, MissingFieldError, UnknownNameError
from hilt.runtime.group import Sharding
from hilt.runtime.ranks import Joined, Ranks
from hilt.runtime.trainee import Trainee

METHODS = ("act", "evaluate", "supervised_loss")
"""Of a policy: what computes with all weights, as `forward` of other modules does"""


class Sharded(Trainee):
    """A `Trainee` whose ranks share the module among them. Every forward and backward pass is made by all together."""

    lockstep = True

    def __init__(self, module: nn.Module, settings: Optimiser, ranks: Ranks, sharding: Sharding):
        sharding.check()
        if not isinstance(ranks, Joined):
            raise ConfigError("sharding needs ranks that have joined: open the group with joined=True.")
        self.sharding, self.device = sharding, next(module.parameters()).device
        self._units = _shard(module, sharding, self.device, ranks.size)
        self._offloaded: dict[str, Tensor] = {}
        super().__init__(module, settings, ranks)
        self._adam.parameters = self._pieces()
        self._adam._steps = self._adam._steps.to(self._adam.parameters[0].device)
        self._adam._step_of = list(self._adam._steps.unbind())

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.sharding.offload_gradients:
            for name, parameter in self.trained.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.to_local().to("cpu", torch.float32)
                    self._offloaded[name] = self._offloaded[name].add_(gradient) if name in self._offloaded else gradient
                    parameter.grad = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All ranks enter and leave together. Meanwhile each has all weights, in the precision that they are computed with."""
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
        """As that of a module in one piece, at rank 0; the other ranks take part, and have nothing to keep."""
        adam = {
            name: tensor if name == "steps" else self._gathered(tensor, list(self.trained.values())[int(name.rpartition(".")[2])])
            for name, tensor in self._adam.tensors().items()
        }
        trained = {name: self._gathered(_piece(parameter), parameter) for name, parameter in self.trained.items()}
        return {"trained": trained, "adam": adam} if self.ranks.rank == 0 else {"trained": {}, "adam": {}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        pieces = dict(zip(self.trained, self._pieces(), strict=True))
        for part, known in (("trained", pieces), ("adam", self._adam.tensors())):
            if different := sorted(set(known) ^ set(state[part])):
                raise MissingFieldError(f"{part}: {different[0]} is in the checkpoint or in the module only; they are of two policies.")
            with torch.no_grad():
                for name, tensor in known.items():
                    tensor.copy_(state[part][name] if name == "steps" else self._part_of(state[part][name]))

    def _pieces(self) -> list[Tensor]:
        pieces = [_piece(parameter) for parameter in self.trained.values()]
        if self.sharding.offload_optimiser and not hasattr(self, "_adam"):  # moments are born on the CPU, like these, which take no memory
            return [torch.empty(1, dtype=piece.dtype).expand(piece.shape) for piece in pieces]
        return pieces

    def _gradients(self) -> list[Tensor | None]:
        """This rank's parts: the sum over ranks was made in the backward pass."""
        if self.sharding.offload_gradients:
            return [self._offloaded.get(name) for name in self.trained]
        return [None if p.grad is None else p.grad.to_local() for p in self.trained.values()]

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        squares = [gradient.double().square().sum().cpu() for gradient in gradients]
        return float(self.ranks.sum_(torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)).sqrt())

    def _move(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """With something on the CPU, one weight after the other, so that the device holds the moments of one."""
        self._adam.parameters = self._pieces()  # FSDP may have put them elsewhere
        self._adam.learning_rate = rate
        away = self.sharding.offload_gradients or self.sharding.offload_optimiser
        for i in range(len(gradients)) if away else []:
            if (gradient := gradients[i]) is not None:
                piece = self._adam.parameters[i]
                self._moments_to(piece.device, i)
                self._adam.step([gradient.to(piece) if j == i else None for j in range(len(gradients))])
                self._moments_to("cpu" if self.sharding.offload_optimiser else piece.device, i)
        if not away:
            self._adam.step(gradients)
        self._offloaded = {}

    def _moments_to(self, device: Any, only: int | None = None) -> None:
        for moments in (self._adam._first, self._adam._second):
            for i in range(len(moments)) if only is None else [only]:
                moments[i] = moments[i].to(device)

    def _gathered(self, piece: Tensor, parameter: Any) -> Tensor:
        at = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        whole = DTensor.from_local(piece.to(self.device), parameter.device_mesh, parameter.placements, **at).full_tensor()
        return whole.cpu() if self.ranks.rank == 0 else torch.empty(0)

    def _part_of(self, whole: Tensor) -> Tensor:
        """This rank's part, as FSDP2 divides: by rows, the last ranks having fewer or none."""
        parts = torch.chunk(whole, self.ranks.size)
        return parts[self.ranks.rank] if self.ranks.rank < len(parts) else whole[:0]


def _shard(module: nn.Module, sharding: Sharding, device: torch.device, size: int) -> list[FSDPModule]:
    """Divides the module over all ranks; what is gathered together, the whole last."""
    there = {type(part).__name__ for part in module.modules() if part is not module}
    for unit in sharding.units:
        if unit not in there:
            raise UnknownNameError("class of modules in this policy (sharding.units)", unit, there)
    settings = {
        "mesh": init_device_mesh(device.type, (size,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if sharding.offload_parameters else OffloadPolicy(),
    }
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)  # what goes on after a unit is float32
    policy = low if sharding.precision == "bfloat16" else MixedPrecisionPolicy()
    units = [part for part in module.modules() if type(part).__name__ in sharding.units]
    sharded = [fully_shard(unit, mp_policy=policy, **settings) for unit in units] + [fully_shard(module, **settings)]
    for unit in sharded:
        unit.set_gradient_divide_factor(1.0)  # losses of all ranks add up, as `Trainee` adds them
        unit.set_force_sum_reduction_for_comms(True)
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view")  # nobody writes into what a policy answers
    for name in METHODS:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return sharded


def _piece(parameter: Any) -> Tensor:
    return parameter.detach().to_local()
