"""The networks that decide and judge: a tanh-Gaussian actor, an ensemble of
critics, and a critic of the gripper's moves.

Each of them takes ``z [B, features + proprio]``: what the encoder made of the images, then the proprioception. Each has
its own branch for the latter: Linear, LayerNorm, tanh.

A call is for autograd. An update of RLPD uses `run` and `gradients` instead, which do
without (`hilt.policies.agent.mlp`); what `z` comes from, such as an encoder that is
trained, has its gradients by autograd there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from hilt.policies.agent.encoders import Linear, Projection, initialize
from hilt.policies.agent.mlp import LAYER_NORM_EPS, MlpLayer, Network, Tape

PROPRIO_MOST = 5.0
"""Deviations from the mean beyond which normalized proprioception is cut off"""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": F.relu}


@dataclass(frozen=True)
class Body:
    """What the networks of an agent have in common."""

    features: int
    """Numbers that the encoder makes"""
    proprio: int
    """Numbers of proprioception"""
    proprio_width: int
    """What these become; 0: they stay"""
    hidden: Sequence[int]
    activation: str


class BranchInputs(nn.Module):
    """``z`` with its proprioception through a branch."""

    def __init__(self, body: Body):
        super().__init__()
        branch = body.proprio > 0 and body.proprio_width > 0
        self.features, self.width = body.features, body.features + (body.proprio_width if branch else body.proprio)
        self.proprio = Projection(body.proprio, body.proprio_width) if branch else None

    def forward(self, z: Tensor) -> Tensor:
        return (
            z
            if self.proprio is None
            else torch.cat([z[:, : self.features], self.proprio(z[:, self.features :])], dim=1)
        )


class ProprioNormalizer(nn.Module):
    """Proprioception less a mean and by a deviation, cut off beyond 5."""

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, proprio: Tensor) -> Tensor:
        return ((proprio - self.mean) / self.scale).clamp(-PROPRIO_MOST, PROPRIO_MOST)


class NormedMlp(nn.Module):
    """Linear, LayerNorm, activation for each width; then a linear layer."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, act: str):
        super().__init__()
        self.act = ACTIVATIONS[act]
        sizes = [inputs, *hidden]
        self.layers = nn.ModuleList([Linear(a, b) for a, b in pairwise(sizes)])
        self.norms = nn.ModuleList([nn.LayerNorm(size, eps=LAYER_NORM_EPS) for size in hidden])
        self.out = Linear(sizes[-1], outputs)
        pairs = zip(self.layers, self.norms, strict=True)
        layers = [MlpLayer(layer.weight, layer.bias, norm.weight, norm.bias) for layer, norm in pairs]
        self.network = Network([*layers, MlpLayer(self.out.weight, self.out.bias)], act)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.act(norm(layer(x)))
        return self.out(x)


class BranchedNetwork(nn.Module):
    """A network with a branch for proprioception, and its gradients without autograd."""

    inputs: BranchInputs
    network: Network

    def run(
        self, z: Tensor, more: Tensor | None = None, first: Sequence[Tensor] | None = None, learns: bool = True
    ) -> Tape:
        """A pass; `gradients` may be asked for if it `learns`. `first`: what `of_states` made of the same `z`."""
        return self.network.run(self._inputs(z, learns), more, first)

    def of_states(self, z: Tensor) -> list[Tensor]:
        """Returns the first layer's part of the states alone, which several passes with the same `z` share."""
        return self.network.first(self._inputs(z, learns=False))

    def gradients(
        self, tape: Tape, dout: Tensor, parameters: Sequence[Tensor], rows: int | None = None, again: bool = False
    ) -> list[Tensor]:
        """Returns the gradients of these parameters, its own and those that `z` comes from, from the gradient of the
        outputs ``[E, B, outputs]``, or of the first
        `rows` of them where the others have none. They are valid until the next call.
        `again`: there will be one for the same tape."""
        dx = self.network.backward(tape, dout, rows, of_x=tape.x.requires_grad)
        found = self.network.gradients
        if rest := [parameter for parameter in parameters if id(parameter) not in found]:
            with torch.enable_grad():
                # its gradient is dx; given dx itself, torch would import sympy first, in half a second of each learner
                product = (tape.x[:rows] * dx).sum()
            further = torch.autograd.grad(product, rest, retain_graph=again)
            found = found | {id(parameter): gradient for parameter, gradient in zip(rest, further, strict=True)}
        return [found[id(parameter)] for parameter in parameters]

    def _inputs(self, z: Tensor, learns: bool) -> Tensor:
        if self.inputs.proprio is None:
            return z
        with torch.set_grad_enabled(learns):
            branched: Tensor = self.inputs(z)
        return branched


class ActorNetwork(BranchedNetwork):
    """The mean and the standard deviation of a Gaussian whose tanh is the action."""

    def __init__(
        self,
        body: Body,
        actions: int,
        generator: Generator,
        scale: float = 1.0,
        std: float = 1.0,
        limits: Sequence[float] = (1e-5, 5.0),
    ):
        super().__init__()
        self.inputs = BranchInputs(body)
        self.mlp = NormedMlp(self.inputs.width, body.hidden, 2 * actions, body.activation)
        self.network = self.mlp.network
        self.limits = tuple(limits)
        initialize(self, generator)
        with torch.no_grad():
            for half in self.mlp.out.weight.chunk(2):  # two layers in one: each begins as one of its own would
                nn.init.xavier_uniform_(half, generator=generator)
            self.mlp.out.weight *= scale
            self.mlp.out.bias[actions:] = math.log(std)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.gaussian(self.mlp(self.inputs(z)))

    def gaussian(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation ``[B, A]`` from the outputs of the last layer ``[B, 2 A]``."""
        mean, log_std = out.chunk(2, dim=-1)
        return mean, log_std.exp().clamp(*self.limits)

    def gaussian_backward(self, out: Tensor, dmean: Tensor, dstd: Tensor) -> Tensor:
        """The gradient of the outputs ``[1, B, 2 A]`` from those of mean and deviation; the
        latter has none where it is at a limit."""
        std = out.chunk(2, dim=-1)[1].exp()
        return torch.cat([dmean, torch.where(std == std.clamp(*self.limits), dstd * std, 0.0)], dim=-1)[None]


class Critics(BranchedNetwork):
    """An ensemble: ``Q [E, B]`` of states and actions. All of them are one batched product. `bias`: what the last layer
    begins with, a number for each output; with several outputs, they are ``[E, B, outputs]``."""

    def __init__(self, body: Body, actions: int, generator: Generator, members: int, bias: Sequence[float] = (0.0,)):
        super().__init__()
        self.inputs = BranchInputs(body)
        initialize(self, generator)
        self.act = ACTIVATIONS[body.activation]
        sizes = [self.inputs.width + actions, *body.hidden, len(bias)]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for a, b in pairwise(sizes):
            bound = math.sqrt(6 / (a + b))
            self.weights.append(torch.empty(members, a, b).uniform_(-bound, bound, generator=generator))
            self.biases.append(torch.zeros(members, 1, b))
        self.biases[-1].data += torch.tensor(bias)
        for size in body.hidden:
            self.scales.append(torch.ones(members, 1, size))
            self.shifts.append(torch.zeros(members, 1, size))
        layers = [MlpLayer(*parts) for parts in zip_longest(self.weights, self.biases, self.scales, self.shifts)]
        self.network = Network(layers, body.activation, further=actions)

    def forward(self, z: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([self.inputs(z), actions], dim=1).expand(len(self.weights[0]), -1, -1)  # [E, B, inputs]
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if number < len(self.scales):
                x = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)
                x = self.act(torch.addcmul(self.shifts[number], x, self.scales[number]))
        return x.squeeze(-1)

    def matrices(self) -> list[Tensor]:
        """The parameters that weight decay is for."""
        return list(self.weights)

    def judge(self, z: Tensor, actions: Tensor, first: Sequence[Tensor] | None = None) -> Tape:
        """A pass of which `action_gradients` may be asked for."""
        return self.run(z, actions, first, learns=False)

    def action_gradients(self, tape: Tape, dout: Tensor) -> Tensor | None:
        """The gradient of the actions ``[B, A]``, from that of the outputs ``[E, B, outputs]``."""
        return self.network.backward(tape, dout, learns=False, of_more=True)


class GraspCritic(BranchedNetwork):
    """``Q [B, outcomes]`` of what the grippers can do: 3 outcomes for one, 9 for two."""

    def __init__(self, body: Body, outcomes: int, generator: Generator):
        super().__init__()
        self.inputs = BranchInputs(body)
        self.mlp = NormedMlp(self.inputs.width, body.hidden, outcomes, body.activation)
        self.network = self.mlp.network
        initialize(self, generator)

    def forward(self, z: Tensor) -> Tensor:
        return self.mlp(self.inputs(z))


class Temperature(nn.Module):
    """The weight of the entropy, kept positive as the softplus of a free number."""

    def __init__(self, value: float):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(math.expm1(value))))

    def forward(self) -> Tensor:
        return F.softplus(self.raw)

    def gradients(self, dvalue: Tensor) -> list[Tensor]:
        """Returns the gradient of its free number, from that of its value."""
        return [dvalue * torch.sigmoid(self.raw.detach())]
