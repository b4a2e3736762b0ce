"""Copies of a policy that is trained: as it was at the start, and as it is now, for somebody who acts meanwhile."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hilt.policies.base import Evaluation, Policy, Record


class ReferencePolicy(torch.nn.Module):
    """The policy as it was when this was made. `offload`: its weights lie in the
    host's memory until they are needed."""

    def __init__(self, policy: Policy, offload: bool):
        super().__init__()
        self._device, self._offload = policy.device, offload
        self.module = copy.deepcopy(policy).eval().requires_grad_(False)
        if offload:
            self.module.to("cpu")

    def evaluate(self, record: Record) -> Evaluation:
        result: Evaluation
        if not self._offload:
            result = self.module.evaluate(record)
            return result
        self.module.to(self._device)
        try:
            result = self.module.evaluate(record)
            return result
        finally:
            self.module.to("cpu")


class ActingCopy:
    """A policy with weights of its own for all that is trained, so that it acts as it was at the last `refresh` while
    the other one learns. Weights that are not trained are shared, and take no room twice."""

    def __init__(self, policy: Policy):
        self._learns = policy
        shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
        self.policy: Policy = copy.deepcopy(policy, shared).eval().requires_grad_(False)

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
