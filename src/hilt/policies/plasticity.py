"""Whether networks can still learn: the share of their ReLUs that are dead, and the effective rank of their features.

    dead ReLUs       units of ReLU layers whose output is 0 for every row of a batch: no gradient reaches their weights
                     (Lu et al., 2019, arXiv 1903.06733; dormant neurons with threshold 0 of Sokar et al., 2023,
                     arXiv 2302.12902)
    effective rank   srank_d(F) = min {k: s_1 + ... + s_k >= (1 - d) (s_1 + ... + s_n)},   d = 0.01,   s the singular
                     values, in descending order, of the features F [rows, width] that the last layer takes in
                     (Kumar et al., 2021, arXiv 2010.14498)

    watch = LayerWatch()
    with watch:
        policy.evaluate(record)        # a pass that is made anyway, or one more
    watch.dead, watch.relus, watch.rank()

A watch sees the calls of torch's own functions, so it needs nothing of a network; a network that is compiled or
captured in a graph is not looked into, and must not be called within it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hilt.core.errors import ConfigError
from hilt.policies.base import Observation, Policy, Record

LEFT_OUT = 0.01
"""The share of the sum of the singular values that the effective rank leaves out"""
MAX_ROWS = 256
"""Rows of features that are looked at, at even distances"""
MOVED_ROWS = 16
"""Observations by which it is measured how far a policy that answers with chunks moves"""
COMPILED = "the passes of the policy are compiled or captured in graphs, which are not looked into"
RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
PRODUCTS = {F.linear: 0, torch.addmm: 1, torch.baddbmm: 1}
"""Matrix products, and which of their arguments is the input"""


class LayerWatch(TorchFunctionMode):
    """Looks at a pass through a network while it is entered; each time that it is entered again the pass is of further
    rows, of the same network. `members`: of an ensemble whose layers are one product, ``[members, rows, width]``; 0
    where there is none."""

    def __init__(self, members: int = 0):
        super().__init__()
        self._members = members
        self._largest: list[Tensor] = []  # of each ReLU layer, by unit, over all rows
        self._called = 0  # ReLU layers of this pass so far
        self._features: list[Tensor | None] = []  # of each pass

    @property
    def relus(self) -> int:
        """Units of ReLU layers."""
        return sum(largest.numel() for largest in self._largest)

    @property
    def dead(self) -> int:
        """Those of them that were 0 for all rows."""
        return sum(int((largest == 0).sum()) for largest in self._largest)

    def __enter__(self) -> LayerWatch:
        self._called, self._features = 0, [*self._features, None]
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in RELUS:
            self._count(made.detach())
        elif func in PRODUCTS and len(args) > PRODUCTS[func]:
            self._features[-1] = args[PRODUCTS[func]].detach()
        return made

    def _count(self, out: Tensor) -> None:
        if out.ndim < 2 or not out.numel():
            return
        channels = {4: 1}.get(out.ndim, out.ndim - 1)  # a convolution's are second, as torch has them
        units = [channels, *([0] if out.ndim == 3 and out.shape[0] == self._members else [])]
        largest = out.abs().amax([dim for dim in range(out.ndim) if dim not in units])
        if self._called < len(self._largest):
            self._largest[self._called] = torch.maximum(self._largest[self._called], largest)
        else:
            self._largest.append(largest)
        self._called += 1

    def rank(self) -> int:
        """The effective rank of what the last product took in, of an ensemble's first member; 0: there was none."""
        seen = [self._rows(features) for features in self._features if features is not None]
        return effective_rank(torch.cat(seen)) if seen else 0

    def _rows(self, features: Tensor) -> Tensor:
        first = features[0] if features.ndim == 3 and features.shape[0] == self._members else features
        return first.reshape(-1, first.shape[-1])

    def figures(self) -> dict[str, float]:
        """``effective_rank``, and ``dead_relus`` where there are ReLUs."""
        return {"effective_rank": float(self.rank()), **({"dead_relus": self.dead / self.relus} if self.relus else {})}


class PolicyLooks:
    """How far a Gaussian policy moves between two looks at it."""

    def __init__(self) -> None:
        self._former: nn.Module | None = None

    def moved(self, actor: nn.Module, z: Tensor, now: tuple[Tensor, Tensor]) -> dict[str, float]:
        """``policy_kl``, from the actor at the last look to what it gives for `z` `now`; nothing at the first one."""
        with torch.no_grad():
            found = {} if self._former is None else {"policy_kl": float(policy_change(self._former(z), now))}
        self._former = copy.deepcopy(actor).requires_grad_(False)
        return found


class ChunkLooks:
    """Looks at a policy that imitates chunks, with the same draws every time: ``effective_rank`` and ``dead_relus`` of
    a pass of its supervised loss; and, where its records have log-probabilities, ``policy_kl``, the mean of
    log pi_before(a) - log pi_now(a) over the numbers a that it drew at the look before, and their ``entropy``, of each
    number in nats. Where its passes are compiled or captured in graphs, what would need one more of these is left out.
    `least`: samples with fewer of which there is no figure of a pass, for the rank is that of the samples then.
    """

    def __init__(self, seed: int = 0, least: int = 0) -> None:
        self._seed, self._least = seed, least
        self._former: Record | None = None
        self.lacking: dict[str, str] = {}
        """Figures that the last look could not take, and why"""

    def look(
        self,
        policy: Policy,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        at_once: int = 0,
    ) -> dict[str, float]:
        """The figures of this look; leaves the policy as it is, gradients and draws of the run included. `at_once`:
        samples of a pass; 0: all of them."""
        trains, draws = policy.training, torch.Generator().manual_seed(self._seed)
        some = observations[:: -(-len(observations) // MOVED_ROWS)]
        self.lacking = {}
        policy.eval()
        try:
            with torch.no_grad():
                found = self._passed(policy, (observations, actions, mask), at_once or len(observations), draws)
                return found | self._moved(policy, some, draws)
        finally:
            policy.train(trains)

    def _passed(
        self, policy: Policy, imitated: tuple[Any, ...], at_once: int, draws: torch.Generator
    ) -> dict[str, float]:
        samples = len(imitated[0])
        if any_part(policy, "_compiles"):
            return self._left_out(COMPILED, "effective_rank", "dead_relus")
        if samples < self._least:
            few = f"there are {samples} samples to look at, and it takes {self._least}"
            return self._left_out(few, "effective_rank", "dead_relus")
        watch = LayerWatch()
        for first in range(0, samples, at_once):
            with watch:
                observations, actions, mask = (part[first : first + at_once] for part in imitated)
                policy.supervised_loss(observations, actions, mask, draws)
        return watch.figures()

    def _left_out(self, why: str, *figures: str) -> dict[str, float]:
        self.lacking |= dict.fromkeys(figures, why)
        return {}

    def _moved(self, policy: Policy, observations: Sequence[Observation], draws: torch.Generator) -> dict[str, float]:
        if getattr(policy, "guidance", 1) != 1 or not policy.has_log_prob:
            return self._left_out("the policy that learns has no log-probabilities, or is guided", "policy_kl")
        if any_part(policy, "_compiles", "_captures"):
            return self._left_out(COMPILED, "policy_kl")
        found, before = dict[str, float](), self._former
        if before is not None:
            now, decides = policy.evaluate(before), slice(None) if policy.decides is None else policy.decides
            moved = torch.from_numpy(before["log_prob"]).to(now.log_prob) - now.log_prob
            found = {"policy_kl": float(moved[:, decides].mean()), "entropy": float(now.entropy[:, decides].mean())}
        record: Record = {}
        with contextlib.suppress(ConfigError):  # of a policy that draws no actions, such as an L1 head
            _, record = policy.act(observations, sample=True, generator=draws)
        self._former = record if np.any(record.get("log_prob", 0)) else None
        if self._former is None:
            self._left_out("the policy draws no actions", "policy_kl")
        return found


def any_part(module: nn.Module, *questions: str) -> bool:
    """Whether a module, or one within it, answers one of these methods of it with yes."""
    return any(getattr(part, name)() for part in module.modules() for name in questions if hasattr(part, name))


class WatchedPasses:
    """Looks at the first pass of each update, and at no other. All ranks ask for its figures at the same time."""

    def __init__(self) -> None:
        self._watch: LayerWatch | None = None

    def first(self, module: nn.Module, rows: int) -> AbstractContextManager[object]:
        """What a pass of this number of rows is made within."""
        compiles: Callable[[], bool] = getattr(module, "_compiles", lambda: False)
        if self._watch is not None or not rows or compiles():
            return contextlib.nullcontext()
        self._watch = LayerWatch()
        return self._watch

    def figures(self, total: Callable[..., list[float]]) -> dict[str, float]:
        """Those of all ranks since the last call; `total` adds numbers up over ranks."""
        watch, self._watch = self._watch, None
        mine = (0, 0, 0) if watch is None else (watch.dead, watch.relus, watch.rank())
        dead, relus, ranks, looked = total(*mine, bool(mine[2]))
        shown = {"dead_relus": dead / relus} if relus else {}
        return {**shown, **({"effective_rank": ranks / looked} if looked else {})}


def effective_rank(features: Tensor, left_out: float = LEFT_OUT) -> int:
    """The effective rank of features ``[rows, width]``: `MAX_ROWS` of them at even distances, where there are more."""
    some = features[:: -(-len(features) // MAX_ROWS) or 1].detach().double().cpu()
    if not some.numel() or not some.isfinite().all():
        return 0
    small = some @ some.T if len(some) <= some.shape[1] else some.T @ some
    sizes = torch.linalg.eigvalsh(small).clamp(min=0).sqrt().flip(0)
    if not sizes.sum() > 0:
        return 0
    return 1 + int((sizes.cumsum(0) < (1 - left_out) * sizes.sum()).sum())


def policy_change(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> Tensor:
    """KL(before || now) of diagonal Gaussians given as mean and deviation ``[B, A]``, the mean of all numbers, in nats.
    That of their tanh is the same."""
    (mean, std), (new_mean, new_std) = before, now
    moved = (std.square() + (mean - new_mean).square()) / (2 * new_std.square())
    return ((new_std / std).log() + moved - 0.5).mean()


__all__ = ["ChunkLooks", "LayerWatch", "PolicyLooks", "WatchedPasses", "any_part", "effective_rank", "policy_change"]
