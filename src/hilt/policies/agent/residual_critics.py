"""Critics of residual blocks with LayerNorm, which stay trainable where they are wide and updated often.

    simba    x = W s,                       x <- x + W2 relu(W1 LN(x)),             Q = W LN(x)     (arXiv 2410.09754)
    bro      x = relu(LN(W s)),             x <- x + LN(W2 relu(LN(W1 x))),         Q = W x         (arXiv 2405.16158)

``s`` are the states and the actions. W1 of SimBa has four times as many outputs as inputs, that of BRO as many.

They have the methods of `hilt.policies.agent.actor_critic.Critics`; their gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from hilt.algos.config import CriticConfig
from hilt.policies.agent.actor_critic import Body, BranchInputs, Critics
from hilt.policies.agent.encoders import initialize
from hilt.policies.agent.mlp import LAYER_NORM_EPS

WIDER = {"simba": 4, "bro": 1}
"""How many times as wide as its input the middle of a block is"""


class ResidualTape(NamedTuple):
    """A pass, for its gradients."""

    more: Tensor
    """The actions ``[B, A]``, from which the graph begins in `ResidualCritics.judge`"""
    out: Tensor
    """``[E, B, outputs]``, with its graph"""


class EnsembleLinear(nn.Module):
    """A linear layer of each of E members: ``[E, B, inputs]`` to ``[E, B, outputs]``."""

    def __init__(self, members: int, inputs: int, outputs: int, generator: Generator):
        super().__init__()
        bound = math.sqrt(6 / (inputs + outputs))
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class EnsembleNorm(nn.Module):
    """LayerNorm with a scale and a shift of each member's own."""

    def __init__(self, members: int, width: int):
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.ones(members, 1, width)),
            nn.Parameter(torch.zeros(members, 1, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS), self.scale)


class SimbaBlock(nn.Module):
    """``x + W2 relu(W1 LN(x))``."""

    def __init__(self, members: int, width: int, generator: Generator):
        super().__init__()
        self.norm = EnsembleNorm(members, width)
        self.first = EnsembleLinear(members, width, WIDER["simba"] * width, generator)
        self.second = EnsembleLinear(members, WIDER["simba"] * width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(self.norm(x))))


class BroBlock(nn.Module):
    """``x + LN(W2 relu(LN(W1 x)))``."""

    def __init__(self, members: int, width: int, generator: Generator):
        super().__init__()
        self.first = EnsembleLinear(members, width, WIDER["bro"] * width, generator)
        self.first_norm = EnsembleNorm(members, WIDER["bro"] * width)
        self.second = EnsembleLinear(members, WIDER["bro"] * width, width, generator)
        self.second_norm = EnsembleNorm(members, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))


class ResidualCritics(nn.Module):
    """An ensemble: ``Q [E, B]`` of states and actions, or ``[E, B, outputs]`` where `bias`, with which the last layer
    begins, has several numbers. `kind`: "simba" or "bro"."""

    def __init__(
        self,
        body: Body,
        actions: int,
        generator: Generator,
        members: int,
        kind: str,
        width: int,
        depth: int,
        bias: Sequence[float] = (0.0,),
    ):
        super().__init__()
        self.inputs, self.members = BranchInputs(body), members
        initialize(self, generator)
        block = SimbaBlock if kind == "simba" else BroBlock
        first = EnsembleLinear(members, self.inputs.width + actions, width, generator)
        blocks = [block(members, width, generator) for _ in range(depth)]
        before = [] if kind == "simba" else [EnsembleNorm(members, width), nn.ReLU()]
        behind = [EnsembleNorm(members, width)] if kind == "simba" else []
        last = EnsembleLinear(members, width, len(bias), generator)
        last.bias.data += torch.tensor(bias)
        self.body = nn.Sequential(first, *before, *blocks, *behind, last)

    def forward(self, z: Tensor, actions: Tensor) -> Tensor:
        return self._outputs(z, actions).squeeze(-1)

    def matrices(self) -> list[Tensor]:
        """The parameters that weight decay is for."""
        return [module.weight for module in self.modules() if isinstance(module, EnsembleLinear)]

    def run(self, z: Tensor, more: Tensor, first: None = None, learns: bool = True) -> ResidualTape:
        """A pass; `gradients` may be asked for if it `learns`."""
        with torch.set_grad_enabled(learns):
            return ResidualTape(more, self._outputs(z, more))

    def of_states(self, z: Tensor) -> None:
        """Nothing: no part of a pass is shared with another one."""

    def judge(self, z: Tensor, actions: Tensor, first: None = None) -> ResidualTape:
        """A pass of which `action_gradients` may be asked for."""
        with torch.enable_grad():
            return self.run(z, actions.detach().requires_grad_())

    def action_gradients(self, tape: ResidualTape, dout: Tensor) -> Tensor:
        """The gradient of the actions ``[B, A]``, from that of the outputs ``[E, B, outputs]``."""
        return self._gradients(tape, dout, [tape.more])[0]

    def gradients(
        self, tape: ResidualTape, dout: Tensor, parameters: Sequence[Tensor], again: bool = False
    ) -> list[Tensor]:
        """Returns the gradients of these parameters, its own and those that `z` comes from, from the gradient of the
        outputs ``[E, B, outputs]``. `again`: there will be a further call for the same tape."""
        return self._gradients(tape, dout, parameters, again)

    @staticmethod
    def _gradients(tape: ResidualTape, dout: Tensor, of: Sequence[Tensor], again: bool = False) -> list[Tensor]:
        with torch.enable_grad():
            product = (tape.out * dout).sum()
        return list(torch.autograd.grad(product, of, retain_graph=again))

    def _outputs(self, z: Tensor, actions: Tensor) -> Tensor:
        made: Tensor = self.body(torch.cat([self.inputs(z), actions], dim=1).expand(self.members, -1, -1))
        return made


def make_critics(
    how: CriticConfig, body: Body, actions: int, generator: Generator, members: int, bias: Sequence[float]
) -> Critics | ResidualCritics:
    """The critics that the settings of an agent ask for."""
    if how.network == "mlp":
        return Critics(body, actions, generator, members, bias)
    return ResidualCritics(body, actions, generator, members, how.network, how.width, how.depth, bias)
