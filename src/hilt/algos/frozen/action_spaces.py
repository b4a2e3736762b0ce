"""What a small actor decides beside a frozen policy, whose chunk of actions b(s) is a part of the state.

The actor draws ``u = tanh(Gaussian)``, from -1 to 1, with the log-probability that the temperature of
`hilt.algos.rlpd` weighs. A space makes the actions ``a`` of it, which are executed, and which the critics judge: steps
of a person and demonstrations are rows like the others, whatever the actor could have decided there.

    residual (PLD, arXiv 2511.00091)    a = clip(b(s) + bound * u, -1, 1)

             The correction is at most `bound` in each number. The actor's gradient is bound * dL/da; where the sum was
             cut off at -1 or 1, it counts only if descending along it leads back inside.
             To imitate an action: u = clip((a - b(s)) / bound, -1, 1), the correction that comes nearest.

    edit (RL token, 2604.23073)         a = tanh(atanh(b(s)) + atanh(u))

             Any action can be reached, and u = 0 is that of the policy, from which the actor begins. da/du =
             (1 - a^2) / (1 - u^2). b(s) is kept within 0.99, and u within 1 - 1e-6, where atanh is finite. To imitate
             an action: u = tanh(atanh(a) - atanh(b(s))).

    noise (DSRL, 2506.15799)            a = flow(features(s), w),  w = bound * u

             The flow of the frozen policy begins at the noise w that the actor has drawn, and its weights are not
             trained. As in DSRL with noise aliasing, the critics judge actions, whatever noise they came from, or none;
             the actor's gradient is (da/du)^T dL/da, through the steps of the flow. Where an update cannot compute
             these, a second critic, of noise, is taught by the first and trains the actor, as DSRL has it:
             `hilt.algos.frozen.noise_critic`. u = 0 gives the policy's most likely actions. There is no inverse:
             nothing can be imitated.

In every space the actor is pulled to the policy: its loss has pull * mean (a - b(s))^2, the mean over the batch and the
numbers of an action. Where the critics cannot tell actions apart, as they can hardly in most steps of a long task with
a reward at its end, the pull is what decides. It may fade as they learn: after t updates of the actor it is

    pull * 2^(-t / halved_after)

All tensors of actions are ``[..., A]``, of one action or of the numbers of a chunk; `places` says where in ``z`` those
of the frozen policy are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hilt.core.errors import ConfigError

NEAREST, OWN_NEAREST = 0.99, 1 - 1e-6
"""The largest actions of a frozen policy, and numbers of the actor, that are edited: atanh of 1 is infinite"""


@dataclass(frozen=True)
class DecodedNoise:
    """In each state of a batch N draws of the noise of a flow, and the actions that the flow has made of them."""

    noise: Tensor
    """``[B, N, W]``, in standard deviations of the noise that the flow was trained with"""
    actions: Tensor
    """``[B, N, A]``: of one action, or of a chunk"""
    known: Tensor
    """``[B, N]``: 1 where the actions are those of the noise; 0 where a row has no such draw"""
    counted: Tensor
    """``[B, N, A]``: 1 of the numbers that were executed, 0 of those that an end left over"""


class ActionSpace(ABC):
    """How the actor's numbers become actions. `places`: where in ``z`` the frozen policy's actions are; `pull`: to
    them."""

    def __init__(self, places: Sequence[int], pull: float = 0.0):
        self.places, self.pull, self._first_pull = list(places), pull, pull

    def base(self, z: Tensor) -> Tensor:
        """Returns the actions of the frozen policy ``[..., A]``."""
        return z[..., self.places]

    def fade(self, updates: int, halved_after: int) -> None:
        """Lets the pull be what is left of it after this number of updates of the actor; `halved_after`: the number by
        which it halves."""
        self.pull = self._first_pull * 0.5 ** (updates / halved_after)

    @abstractmethod
    def compose(self, z: Tensor, own: Tensor) -> Tensor:
        """The actions ``[..., A]`` of what the actor drew, which may have further axes in front."""

    def backward(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of what the actor drew ``[B, A]`` from that of the actions that `compose` made of it, and
        figures; ``pull_loss`` is what the pull adds to the actor's loss."""
        away = actions - self.base(z)
        figures = {"pull_loss": self.pull * away.square().mean(), "correction": away.abs()}
        return self.through(z, own, actions, dactions + 2 * self.pull / away.numel() * away), figures

    @abstractmethod
    def through(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> Tensor:
        """The same gradient, of a loss whose gradient with respect to the actions is `dactions`."""

    @abstractmethod
    def own(self, z: Tensor, actions: Tensor) -> Tensor:
        """Returns what the actor would draw for these actions ``[B, A]``, to imitate them."""


class ResidualSpace(ActionSpace):
    """A correction of the frozen policy's actions, of at most `bound` in each number."""

    def __init__(self, places: Sequence[int], bound: float, pull: float = 0.0):
        super().__init__(places, pull)
        self.bound = bound

    def compose(self, z: Tensor, own: Tensor) -> Tensor:
        return (self.base(z) + self.bound * own).clamp(-1, 1)

    def through(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> Tensor:
        inside = (self.base(z) + self.bound * own).abs() <= 1
        leads_inside = dactions * actions > 0  # an action at 1 is lowered by descending, one at -1 is raised
        return self.bound * dactions.where(inside | leads_inside, dactions.new_zeros(()))

    def own(self, z: Tensor, actions: Tensor) -> Tensor:
        return ((actions - self.base(z)) / self.bound).clamp(-1, 1)


class EditSpace(ActionSpace):
    """Any action, from that of the frozen policy on."""

    def compose(self, z: Tensor, own: Tensor) -> Tensor:
        return torch.tanh(self._raw(z) + torch.atanh(own.clamp(-OWN_NEAREST, OWN_NEAREST)))

    def through(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> Tensor:
        return dactions * (1 - actions.square()) / (1 - own.clamp(-OWN_NEAREST, OWN_NEAREST).square())

    def own(self, z: Tensor, actions: Tensor) -> Tensor:
        return torch.tanh(torch.atanh(actions.clamp(-NEAREST, NEAREST)) - self._raw(z))

    def _raw(self, z: Tensor) -> Tensor:
        return torch.atanh(self.base(z).clamp(-NEAREST, NEAREST))


class NoiseSpace(ActionSpace):
    """The noise that the flow of a frozen policy begins with. `flow` makes actions ``[N, A]`` of features
    ``[N, width]``, the first numbers of ``z``, and noise ``[N, A]``."""

    def __init__(
        self,
        places: Sequence[int],
        width: int,
        bound: float,
        flow: Callable[[Tensor, Tensor], Tensor],
        pull: float = 0.0,
    ):
        super().__init__(places, pull)
        self.width, self.bound, self.flow = width, bound, flow

    def compose(self, z: Tensor, own: Tensor) -> Tensor:
        features = z[..., : self.width].expand(*own.shape[:-1], -1)
        found = self.flow(features.reshape(-1, self.width), self.bound * own.reshape(-1, own.shape[-1]))
        return found.view(own.shape)

    def through(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> Tensor:
        with torch.enable_grad():
            drawn = own.detach().requires_grad_()
            (down,) = torch.autograd.grad(self.compose(z, drawn), drawn, dactions)
        return down

    def own(self, z: Tensor, actions: Tensor) -> Tensor:
        raise ConfigError("agent.options.space=noise cannot imitate: the noise of an action is not known.")
