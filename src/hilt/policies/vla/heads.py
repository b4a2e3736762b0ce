"""Three ways to answer: what a policy computed of an observation becomes a distribution over chunks of actions.

    tokens    every number of the chunk is one of `bins` values, evenly from -1 to 1, all drawn at once
    gaussian  every number has a mean, and a standard deviation that does not depend on what is seen
    flow      the whole chunk flows out of noise (policies/vla/flow.py); the field is a
              small network beside what was computed

All are of numbers from -1 to 1 and beyond, [B, chunk, action_dim]; log-probabilities and entropies are of each number.
Temperatures [B] divide the logits of tokens and multiply the noise of the others. The generator is a CPU one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from hilt.algos.offline.recap import guided
from hilt.core.errors import ConfigError
from hilt.policies.vla import flow
from hilt.policies.vla.flow import Flow, FlowStep, Given

STD_RANGE = (0.01, 2.0)
TIME_WIDTH = 32


class HeadSample(NamedTuple):
    """An answer, and what has to be remembered of it."""

    actions: Tensor
    memory: dict[str, Tensor]
    """What `evaluate` needs, by its name in the record"""
    log_prob: Tensor


class Head(Protocol):
    """What all three have, of the features [B, width]."""

    def draw(
        self,
        features: Tensor,
        temperature: Tensor,
        generator: Generator | None,
        sample: bool,
        given: Given | None = None,
    ) -> HeadSample:
        """Returns an answer. What is `given` is known to it if the head was trained so; else a flow is guided there."""
        ...

    def evaluate(
        self, features: Tensor, memory: Mapping[str, Tensor], temperature: Tensor, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies."""
        ...

    def loss(
        self, features: Tensor, target: Tensor, generator: Generator | None, given: Given | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the imitation loss of each number; and figures of each number, to show."""
        ...


class GivenActions(nn.Module):
    """What is seen, together with the actions at the start of the chunk that are given: features [B, width] to such.

    Rows that are given none have the features that they had. It begins with no influence at all."""

    def __init__(self, width: int, chunk: int, action_dim: int):
        super().__init__()
        self.enter = nn.Linear(width + chunk * (action_dim + 1), width)
        self.leave = nn.Linear(width, width)

    def forward(self, features: Tensor, given: Given) -> Tensor:
        known, which = torch.where(given.frozen, given.actions, 0.0), given.frozen.to(features.dtype)
        seen = torch.cat([features, known.flatten(1).to(features.dtype), which.flatten(1)], dim=-1)
        return features + which.amax(1) * self.leave(F.silu(self.enter(seen)))


class ActionHead(nn.Module):
    """What the three heads have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.given: GivenActions | None = None
        """Of a policy that is trained with given actions"""
        self._unconditioned: tuple[Tensor, float] | None = None

    @contextlib.contextmanager
    def guided(self, unconditioned: Tensor, weight: float) -> Iterator[None]:
        """Within it, what is drawn of features is guided away from what would be drawn of `unconditioned` ones, of the
        same rows: see `hilt.algos.offline.recap`."""
        self._unconditioned = unconditioned, weight
        try:
            yield
        finally:
            self._unconditioned = None

    def _guided(self, features: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """What is computed of features, with the guidance of now."""
        if self._unconditioned is None:
            return compute(features)
        without, weight = self._unconditioned
        return guided(compute(without), compute(features), weight)

    def _informed(self, features: Tensor, given: Given | None) -> Tensor:
        return features if self.given is None or given is None else self.given(features, given)


class TokensHead(ActionHead):
    """`decode` is what an answer without sampling is: the "mean" over the bins, or the "likeliest" one."""

    def __init__(
        self, width: int, chunk: int, action_dim: int, bins: int = 13, decode: str = "mean", smoothing: float = 1.0
    ):
        super().__init__()
        self.shape, self.decode, self.smoothing = (chunk, action_dim, bins), decode, smoothing
        self.out = nn.Linear(width, chunk * action_dim * bins)

    def draw(
        self,
        features: Tensor,
        temperature: Tensor,
        generator: Generator | None,
        sample: bool,
        given: Given | None = None,
    ) -> HeadSample:
        features = self._informed(features, given)
        logs = self._logs(features, temperature)
        if sample:
            uniform = torch.rand(logs.shape[:-1], generator=_drawing(generator)).to(logs.device)
            tokens = pick(logs, uniform)
        else:
            tokens = logs.argmax(-1)
        values = self._values(logs)
        mean = not sample and self.decode == "mean"
        actions = (
            (self._logs(features, torch.ones_like(temperature)).exp() * values).sum(-1) if mean else values[tokens]
        )
        return HeadSample(actions, {"tokens": tokens}, _taken(logs, tokens))

    def evaluate(
        self, features: Tensor, memory: Mapping[str, Tensor], temperature: Tensor, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        logs = self.log_probs(features, temperature, given)
        return _taken(logs, memory["tokens"]), -(logs.exp() * logs).sum(-1)

    def log_probs(self, features: Tensor, temperature: Tensor, given: Given | None = None) -> Tensor:
        """Returns the log-probabilities of all bins of each number, [B, chunk, action_dim, bins]."""
        return self._logs(self._informed(features, given), temperature)

    def loss(
        self, features: Tensor, target: Tensor, generator: Generator | None, given: Given | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logs = self._logs(self._informed(features, given), torch.ones_like(features[:, 0]))
        values = self._values(logs)
        away = (values - target.clamp(-1, 1)[..., None]) * (self.shape[-1] - 1) / 2  # in bins
        nearest = away.abs().argmin(-1)
        wanted = (
            torch.softmax(-0.5 * (away / self.smoothing).square(), -1)
            if self.smoothing
            else F.one_hot(nearest, self.shape[-1])
        )
        return -(wanted * logs).sum(-1), {"accuracy": (logs.argmax(-1) == nearest).float()}

    def _logs(self, features: Tensor, temperature: Tensor) -> Tensor:
        logits = self._guided(features, self.out).view(-1, *self.shape)
        return F.log_softmax(logits / temperature[:, None, None, None], dim=-1)

    def _values(self, like: Tensor) -> Tensor:
        return torch.linspace(-1, 1, self.shape[-1], device=like.device, dtype=like.dtype)


class GaussianHead(ActionHead):
    """`std`: of every number at the start."""

    def __init__(self, width: int, chunk: int, action_dim: int, std: float = 0.3):
        super().__init__()
        self.shape, self.std = (chunk, action_dim), std
        self.out = nn.Linear(width, chunk * action_dim)
        self.more = nn.Parameter(torch.zeros(chunk, action_dim))
        """The logarithm of by how much the deviation is larger than at the start"""

    def draw(
        self,
        features: Tensor,
        temperature: Tensor,
        generator: Generator | None,
        sample: bool,
        given: Given | None = None,
    ) -> HeadSample:
        mean, std = self._law(self._informed(features, given), temperature)
        actions = (
            mean + std * torch.randn(mean.shape, generator=_drawing(generator)).to(mean.device) if sample else mean
        )
        return HeadSample(actions, {"actions": actions}, flow.gaussian_log_prob(actions, mean, std))

    def evaluate(
        self, features: Tensor, memory: Mapping[str, Tensor], temperature: Tensor, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        mean, std = self._law(self._informed(features, given), temperature)
        return flow.gaussian_log_prob(memory["actions"], mean, std), flow.gaussian_entropy(std)

    def loss(
        self, features: Tensor, target: Tensor, generator: Generator | None, given: Given | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean, std = self._law(self._informed(features, given), torch.ones_like(features[:, 0]))
        return -flow.gaussian_log_prob(target, mean, std), {"error": (mean - target).abs()}

    def _law(self, features: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        mean = self._guided(features, self.out).view(-1, *self.shape)
        low, high = (math.log(bound / self.std) for bound in STD_RANGE)
        return mean, (self.std * self.more.clamp(low, high).exp() * temperature[:, None, None]).expand_as(mean)


class FlowHead(ActionHead):
    """The field of a flow: three layers that see the noisy chunk, the time and the features."""

    def __init__(self, width: int, chunk: int, action_dim: int, how: Flow, hidden: int = 256):
        super().__init__()
        self.shape, self.how = (chunk, action_dim), how
        size = chunk * action_dim
        self.seen = nn.Linear(width, hidden)
        self.noisy = nn.Linear(size + TIME_WIDTH, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, size)
        self.spread = nn.Linear(hidden, size) if how.kind == "noise" else None

    def draw(
        self,
        features: Tensor,
        temperature: Tensor,
        generator: Generator | None,
        sample: bool,
        given: Given | None = None,
        start: Tensor | None = None,
    ) -> HeadSample:
        """`start`: the noise that it begins with, in the place of one that is drawn."""
        field = self._field(features, given)
        if self._unconditioned is not None:
            field = flow.away_from(self._field(self._unconditioned[0], given), field, self._unconditioned[1])
        if given is not None and self.given is None:
            field = flow.guided(field, given)
        drawn = flow.draw(field, (len(features), *self.shape), self.how, temperature, generator, sample, start)
        return HeadSample(drawn.actions, {"chain": drawn.chain, "step": drawn.step}, drawn.log_prob)

    def evaluate(
        self, features: Tensor, memory: Mapping[str, Tensor], temperature: Tensor, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        found = flow.evaluate(self._field(features, given), memory["chain"], memory["step"], self.how, temperature)
        return found.log_prob, found.entropy

    def errors(
        self, features: Tensor, actions: Tensor, noise: Tensor, times: Tensor, given: Given | None = None
    ) -> Tensor:
        """Returns the errors of the velocity that leads to the actions: `flow.velocity_errors`."""
        return flow.velocity_errors(self._field(features, given), actions, noise, times, given)

    def loss(
        self, features: Tensor, target: Tensor, generator: Generator | None, given: Given | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        noise = torch.randn(target.shape, generator=_drawing(generator)).to(target)
        times = flow.training_times(len(target), _drawing(generator)).to(target)
        x, velocity = flow.toward(target, noise, times)
        return (self._field(features, given)(x, times).velocity - velocity).square(), {}

    def _field(self, features: Tensor, given: Given | None) -> flow.Field:
        seen = self.seen(self._informed(features, given))  # once for all the steps
        known = None if self.given is None else given

        def field(x: Tensor, times: Tensor) -> FlowStep:
            if known is not None:
                x = known.within(x)
            hidden = F.silu(seen + self.noisy(torch.cat([x.flatten(1), flow.embed_times(times, TIME_WIDTH)], dim=-1)))
            hidden = hidden + F.silu(self.middle(hidden))
            std = None if self.spread is None else flow.bounded_std(self.spread(hidden).view_as(x), self.how)
            return FlowStep(self.out(hidden).view_as(x), std)

        return field


def pick(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """The index [...] that each of `uniform` [...] in [0, 1) points to in the
    cumulated probabilities of [..., choices]."""
    reached = log_probs.double().exp().cumsum(-1)
    return (reached <= uniform[..., None].to(reached) * reached[..., -1:]).sum(-1)


def _drawing(generator: Generator | None) -> Generator:
    if generator is None:
        raise ConfigError("chance needs a generator: give one (torch.Generator, on the CPU), or sample=False.")
    return generator


def _taken(logs: Tensor, tokens: Tensor) -> Tensor:
    return logs.gather(-1, tokens.long()[..., None])[..., 0]
