"""Copies of a policy that is trained: as it was at the start, and as it is now, for somebody who acts meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hilt.policies.base import Evaluation, Policy, Record


class ReferencePolicy(torch.nn.Module):
    """The policy as it was when this was made. Weights that are not trained are shared with it, and take no room twice,
    unless `share` is False; so with adapters the reference is nearly free. `offload`: its own weights lie in the host's
    memory but for passes (`on_device`)."""

    def __init__(self, policy: Policy, offload: bool, share: bool = True):
        super().__init__()
        self._device, self._offload, self._lent = policy.device, offload, False
        shared = _not_trained(policy) if share else {}
        self.module = copy.deepcopy(policy, {**shared}).eval().requires_grad_(False)
        self._own = [weight for weight in self.module.parameters() if id(weight) not in shared]
        if offload:
            self._move(torch.device("cpu"))

    def evaluate(self, record: Record) -> Evaluation:
        with self.on_device():
            result: Evaluation = self.module.evaluate(record)
            return result

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it the weights are where they are needed: around all passes, since weights that lie on the host are
        moved at its beginning and at its end."""
        if not self._offload or self._lent:
            yield
            return
        self._move(self._device)
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for weight in self._own:
            weight.data = weight.data.to(device)


def on_device(module: Any) -> AbstractContextManager[object]:
    """Goes around several passes of a module: a reference that lies on the host comes once for all of them."""
    return module.on_device() if isinstance(module, ReferencePolicy) else nullcontext()


def _not_trained(policy: Policy) -> dict[int, torch.nn.Parameter]:
    """Returns the weights that are not trained, by id, for `copy.deepcopy`, which then takes them as they are."""
    return {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}


class ActingCopy:
    """A policy with weights of its own for all that is trained, so that it acts as it was at the last `refresh` while
    the other one learns. Weights that are not trained are shared, and take no room twice."""

    def __init__(self, policy: Policy):
        self._learns = policy
        self.policy: Policy = copy.deepcopy(policy, _not_trained(policy)).eval().requires_grad_(False)

    def refresh(self) -> Policy:
        """Takes over the weights of now; gives the policy that acts by them."""
        with torch.no_grad():
            for own, learned in zip(self.policy.parameters(), self._learns.parameters(), strict=True):
                if own is not learned:
                    own.copy_(learned)
            for own, learned in zip(self.policy.buffers(), self._learns.buffers(), strict=True):
                own.copy_(learned)
        return self.policy

    def beside(self) -> AbstractContextManager[object]:
        """Within it a thread acts beside the one that trains: on CUDA in a stream of its own, which begins after what
        was asked of the device so far."""
        device = self.policy.device
        if device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        beside: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return beside
