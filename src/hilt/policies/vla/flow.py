"""Flow policies: actions out of noise along a learned velocity, with log-probabilities, so that RL can train them.

Time runs from 1 (noise) to 0 (action): ``x_t = t * noise + (1 - t) * action``, and the field is taught
``v = noise - action``. An Euler step from t to s = t - d is ``x - d v``. With ``clean = x - t v`` and
``noise = x + (1 - t) v``, a step that is drawn has

    sde     mean = (1 - s) clean + (s - sigma^2 d / (2 t)) noise,  std = sigma sqrt(d),  sigma = level sqrt(t / (1 - t))
    cps     mean = (1 - s) clean + s cos(pi level / 2) noise,      std = s sin(pi level / 2)
    noise   mean = x - d v,                                        std learned, within two bounds

(Flow-SDE, Flow-GRPO 2025; coefficients-preserving sampling, 2025; Flow-Noise, ReinFlow 2025. At t = 1, sigma has
the second time in ``1 - t``.) Either one step of each row is drawn, at random, and the others are Euler's: then
the log-probability is that step's. Or all are (`joint`): then it is the mean over all steps and the initial
noise. It is a density for each number of the action.

A chunk can continue actions that are executed while it is computed (real-time chunking). A field that was not trained
for it is `guided`: each Euler step also moves ``clean`` toward the given actions, by the product of the difference with
the Jacobian of ``clean`` with respect to ``x`` (Black, Galliker and Levine 2025, arXiv 2506.07339). A field that was
trained for it has the given actions in ``x``, and their time is 0 (arXiv 2512.05964).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hilt.algos.offline.recap import guided as weighted
from hilt.core.errors import ConfigError
from hilt.core.validate import Need, check, setting

KINDS = ("sde", "cps", "noise")
MAX_GUIDANCE = 5.0
"""The largest factor of the guidance; without a limit few steps would overshoot"""


_FIXED = Need('kind "sde" or "cps"', lambda c: c.kind != "noise")
_LEARNED = Need('kind "noise"', lambda c: c.kind == "noise")


@dataclass(frozen=True)
class Flow:
    """How a field is followed, and where chance comes in."""

    kind: str = setting("sde", choices=KINDS, noun="kind of flow")
    """"sde", "cps" or "noise": what a drawn step is like"""
    steps: int = setting(10, minimum=2)
    """Steps from noise to action"""
    level: float = setting(0.5, above=0, needs=_FIXED)
    """Of the noise of "sde" and "cps"; the temperature of a draw multiplies it, so
    that it may change as training goes on"""
    std_range: tuple[float, float] = setting((0.08, 0.16), length=2, above=0, needs=_LEARNED)
    """The least and the largest standard deviation of "noise"; the temperature multiplies it too"""
    joint: bool | None = None
    """All steps are drawn, or one of them; None: as published, all of "noise" and one of the others"""
    shift: float = 1.0
    """Above 1, the steps are shorter near the noise and longer near the action"""

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        if self.kind == "cps" and self.level > 1:
            yield f"the noise level of cps is {self.level}; it is above 0 and at most 1."
        if self.std_range[0] > self.std_range[1]:
            yield f"{here}std_range is {self.std_range}; give a least above 0 and a largest that is not less."

    @property
    def drawn(self) -> int:
        """Steps of each row that are drawn."""
        joint = self.kind == "noise" if self.joint is None else self.joint
        return self.steps if joint else 1


def check_entropy(coefficient: float, kind: str) -> None:
    """Raises for an entropy coefficient that no weight of a flow can answer to."""
    if coefficient and kind != "noise":
        raise ConfigError(
            f"algorithm.entropy={coefficient:g} would do nothing: the noise of a flow of kind {kind} is "
            "fixed, and so is its entropy. Leave it out, or give policy_options.flow.kind=noise, "
            "whose deviation is learned."
        )


def check_flow(loss: str, kind: str | None) -> None:
    """Raises for a policy without a flow, whose velocity this loss would learn."""
    if kind is None:
        raise ConfigError(
            f"algorithm.loss={loss} learns the velocity of a flow, and this policy answers without one. Give a policy "
            "with a flow: small_vla with policy_options.head=flow, pi0, pi0.5 or SmolVLA; or algorithm.loss=clipped."
        )


class FlowStep(NamedTuple):
    """The output of a vector field for `x` [B, ...] at the times [B]."""

    velocity: Tensor
    """[B, ...]"""
    std: Tensor | None = None
    """[B, ...], of "noise": see `bounded_std`"""
    value: Tensor | None = None
    """[B], of a critic that looks at what the field computes"""


Field = Callable[[Tensor, Tensor], FlowStep]


class FlowSample(NamedTuple):
    """Actions, and what `evaluate` needs to know of how they came about."""

    actions: Tensor
    """[B, ...]"""
    chain: Tensor
    """[B, drawn + 1, ...]: where the drawn steps began and ended"""
    step: Tensor
    """int64 [B]: the first of them; -1 where none was drawn"""
    log_prob: Tensor
    """[B, ...]"""
    value: Tensor | None
    """[B]"""


class Evaluated(NamedTuple):
    """The evaluation of a policy, in the shape of the action."""

    log_prob: Tensor
    entropy: Tensor
    """Of "noise". What no weight can change counts as 0"""
    value: Tensor | None


class Draws(NamedTuple):
    """All that is random in a draw, so that what follows computes and draws nothing."""

    start: Tensor
    """[B, ...]: the noise, or 0, that the flow begins at"""
    first: Tensor
    """int64 [B]: the first step that is drawn; -1 where none is"""
    noise: Tensor | None
    """[drawn, B, ...]: the noise of the drawn steps; None where none is"""

    def to(self, device: torch.device) -> Draws:
        return Draws(*(None if each is None else each.to(device) for each in self))


def draw(
    field: Field,
    shape: tuple[int, ...],
    flow: Flow,
    temperature: Tensor,
    generator: torch.Generator | None,
    sample: bool = True,
    start: Tensor | None = None,
) -> FlowSample:
    """Actions of this shape [B, ...] at the temperatures [B], which also name the device.

    The generator is a CPU one. Without `sample` all steps are Euler's; they begin at noise, or at 0 if there is no
    generator. `start` is noise to begin with instead.
    """
    return follow(field, draws(shape, flow, generator, sample, start).to(temperature.device), flow, temperature)


def draws(
    shape: tuple[int, ...],
    flow: Flow,
    generator: torch.Generator | None,
    sample: bool = True,
    start: Tensor | None = None,
) -> Draws:
    """The random numbers of `draw`, on the CPU."""
    if sample and generator is None:
        raise ConfigError("to sample, a flow needs a generator: give act() one, or sample=False.")
    if start is None:
        start = torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)
    if not sample:
        return Draws(start, torch.full(shape[:1], -1), None)
    if flow.drawn > 1:
        first = torch.zeros(shape[:1], dtype=torch.int64)
    else:  # the last step of "cps" has no noise
        first = torch.randint(flow.steps - (flow.kind == "cps"), shape[:1], generator=generator)
    return Draws(start, first, torch.stack([torch.randn(shape, generator=generator) for _ in range(flow.drawn)]))


def follow(field: Field | Sequence[Field], draws: Draws, flow: Flow, temperature: Tensor) -> FlowSample:
    """Follows the field from the noise in `draws` to actions. `field` is one for all steps, or one for each.

    Nothing here waits for the device, so that all of it can be captured as one CUDA graph."""
    x, first, noise = draws
    rows, device = len(x), x.device
    times = schedule(flow, x)
    path, log_prob, value = [x], _start(x, flow).log_prob, None
    for i in range(flow.steps):
        output = (field if callable(field) else field[i])(x, times[i].expand(rows))
        here = first.clamp(min=0) == i if flow.drawn == 1 else torch.ones_like(first, dtype=torch.bool)
        after = x - (times[i] - times[i + 1]) * output.velocity
        if noise is not None:
            mean, std = transition(x, output, torch.full_like(first, i), flow, temperature)
            after = torch.where(_like(here, x), mean + std * noise[0 if flow.drawn == 1 else i], after)
            log_prob = log_prob + torch.where(_like(here, x), gaussian_log_prob(after, mean, std), 0.0)
        value = _plus(value, None if output.value is None else torch.where(here, output.value, 0.0))
        x = after
        path.append(x)
    places = first.clamp(min=0)[:, None] + torch.arange(flow.drawn + 1, device=device)
    chain = torch.stack(path, dim=1)[torch.arange(rows, device=device)[:, None], places]
    return FlowSample(x, chain, first, _mean(log_prob, first, flow), None if value is None else value / flow.drawn)


class Given(NamedTuple):
    """Actions of a chunk that are known before it is drawn, normalized as the model's."""

    actions: Tensor
    """[B, chunk, dim]; 0 where none is known"""
    frozen: Tensor
    """bool [B, chunk, 1]: which of them are executed for certain, always the first ones"""
    weights: Tensor
    """[B, chunk, dim]: how much each number counts when a field is guided, from 0 to 1"""

    def within(self, x: Tensor) -> Tensor:
        """`x` [B, chunk, dim] with the frozen actions in their places."""
        return torch.where(self.frozen, self.actions, x)

    def apart(self, x: Tensor) -> Tensor:
        """`x` [B, chunk, dim] with 0 in the places of the frozen actions, which nothing decides any more."""
        return torch.where(self.frozen, 0.0, x)


def given_actions(actions: Tensor, frozen: Tensor, chunk: int, dim: int) -> Given:
    """Known actions [B, n, numbers], of which [B] are `frozen`, in a chunk of actions of `dim` numbers.

    The weights are 1 where an action is frozen and fall exponentially from there to the end of what is known.
    """
    length, numbers = actions.shape[1:]
    place = torch.arange(chunk, device=actions.device)
    fade = ((length - place) / (length - frozen[:, None] + 1).to(actions.dtype)).clamp(0, 1)
    first = place < frozen[:, None]
    weights = torch.where(first, 1.0, fade * torch.expm1(fade) / math.expm1(1.0))[..., None].expand(-1, -1, numbers)
    room = (0, dim - numbers)
    return Given(
        F.pad(actions, (*room, 0, chunk - length)),
        first[..., None],
        F.pad(weights, room),
    )


def guided(field: Field, given: Given) -> Field:
    """The field whose Euler steps also lead to the given actions, for draws without `sample`."""

    def corrected(x: Tensor, times: Tensor) -> FlowStep:
        t = _like(times, x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = field(x, times)
            clean = x - t * output.velocity
            missing = (given.weights * (given.actions - clean)).detach()
            (correction,) = torch.autograd.grad(clean, x, missing)
        factor = ((1 - t).square() + t.square()) / (t * (1 - t)).clamp(min=1e-6)
        velocity = output.velocity - factor.clamp(max=MAX_GUIDANCE) * correction
        return FlowStep(*(None if each is None else each.detach() for each in (velocity, output.std, output.value)))

    return corrected


def away_from(without: Field, conditioned: Field, weight: float) -> Field:
    """The field of guidance by a condition (`hilt.algos.offline.recap`), of the fields without it and with it."""

    def field(x: Tensor, times: Tensor) -> FlowStep:
        output = conditioned(x, times)
        return output._replace(velocity=weighted(without(x, times).velocity, output.velocity, weight))

    return field


def evaluate(field: Field, chain: Tensor, step: Tensor, flow: Flow, temperature: Tensor) -> Evaluated:
    """The log-probability under the field of now of what was drawn then: one call of the field for each drawn step.

    Rows of which nothing was drawn have 0. The value is the mean of the field's values at these steps.
    """
    times = schedule(flow, chain)
    log_prob, entropy, value = _start(chain[:, 0], flow)
    for i in range(flow.drawn):
        place = step.clamp(min=0) + i
        output = field(chain[:, i], times[place])
        mean, std = transition(chain[:, i], output, place, flow, temperature)
        log_prob = log_prob + gaussian_log_prob(chain[:, i + 1], mean, std)
        if flow.kind == "noise":
            entropy = entropy + gaussian_entropy(std)
        value = _plus(value, output.value)
    return Evaluated(
        _mean(log_prob, step, flow), _mean(entropy, step, flow), None if value is None else value / flow.drawn
    )


def transition(x: Tensor, output: FlowStep, place: Tensor, flow: Flow, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the drawn step that begins at
    ``times[place]``, `place` and `temperature` being [B]."""
    times = schedule(flow, x)
    t, s, heat = (_like(each, x) for each in (times[place], times[place + 1], temperature))
    v = output.velocity
    if flow.kind == "noise":
        if output.std is None:
            raise ConfigError("a flow of kind noise needs a field that also returns a standard deviation.")
        return x - (t - s) * v, output.std * heat
    clean, noise, level = x - t * v, x + (1 - t) * v, flow.level * heat
    if flow.kind == "cps":
        return (1 - s) * clean + s * torch.cos(math.pi / 2 * level) * noise, s * torch.sin(math.pi / 2 * level)
    sigma = level * torch.sqrt(t / (1 - torch.where(t == 1, times[1], t)))
    return (1 - s) * clean + (s - sigma**2 * (t - s) / (2 * t)) * noise, sigma * torch.sqrt(t - s)


def schedule(flow: Flow, like: Tensor) -> Tensor:
    """The times of the steps, from 1 to 0, of the kind and on the device of a tensor: [steps + 1]."""
    even = torch.linspace(1, 0, flow.steps + 1, device=like.device, dtype=torch.float64)
    # the nearest number: a quick sine tells them apart
    return (flow.shift * even / (1 + (flow.shift - 1) * even)).to(like.dtype)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns the log-probability of each number; 0 where the standard deviation is."""
    still = std == 0
    width = torch.where(still, 1.0, std)
    log_prob = -0.5 * ((x - mean) / width).square() - width.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(still, 0.0, log_prob)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Returns the entropy of each number: ``log(2 pi e std^2) / 2``."""
    return std.log() + 0.5 * math.log(2 * math.pi * math.e)


def bounded_std(raw: Tensor, flow: Flow) -> Tensor:
    """The head of "noise": the logarithm of the standard deviation between those of `std_range`, by tanh."""
    low, high = (math.log(bound) for bound in flow.std_range)
    return torch.exp(low + (high - low) * (torch.tanh(raw) + 1) / 2)


def training_times(rows: int, generator: torch.Generator) -> Tensor:
    """[B] times to teach the field at: Beta(1.5, 1), by its inverse, within 0.001 and 1. On the CPU."""
    return torch.rand(rows, generator=generator) ** (1 / 1.5) * 0.999 + 0.001


def training_delays(mask: np.ndarray, max_delay: int, generator: torch.Generator | None) -> Tensor:
    """int64 [B]: the number of actions that each row is given, from 0 to `max_delay`, the smaller of two draws, so that
    the first actions of a chunk are learned often enough. On the CPU.

    One at least of the actions that `mask` [B, chunk] lets through is left to learn."""
    if generator is None:
        raise ConfigError(
            f"max_delay={max_delay} gives actions at random: give supervised_loss a generator of the CPU."
        )
    drawn = torch.randint(max_delay + 1, (2, len(mask)), generator=generator).amin(0)
    return torch.minimum(drawn, torch.from_numpy(mask.sum(1)) - 1).clamp(min=0)


def toward(actions: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """``x_t`` and the velocity that the field is taught there; the loss is the mean square. Times are [B], or of
    each action, [B, chunk]."""
    t = _like(times, actions)
    return t * noise + (1 - t) * actions, noise - actions


def velocity_errors(field: Field, actions: Tensor, noise: Tensor, times: Tensor, given: Given | None) -> Tensor:
    """The velocity of the field less the one that leads to the actions [B, ...], at each of K draws: noise [B, K, ...]
    and times [B, K]. It is 0 where an action was given."""
    found = []
    for draw in range(times.shape[1]):
        x, velocity = toward(actions, noise[:, draw], times[:, draw])
        error = field(x, times[:, draw]).velocity - velocity
        found.append(error if given is None else given.apart(error))
    return torch.stack(found, dim=1)


def embed_times(times: Tensor, width: int, shortest: float = 4e-3, longest: float = 4.0) -> Tensor:
    """[..., width]: sines, then cosines, of times [...]; their periods rise geometrically between these two."""
    periods = shortest * (longest / shortest) ** torch.linspace(
        0, 1, width // 2, dtype=torch.float64, device=times.device
    )
    turns = 2 * math.pi / periods * times[..., None].double()
    return torch.cat([turns.sin(), turns.cos()], dim=-1).to(times.dtype)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Layers draw their weights from the global generator, which is given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """[B] as [B, 1, ...], so that it meets `x` row by row; so with [B, chunk]."""
    return rows.reshape(*rows.shape, *([1] * (x.ndim - rows.ndim)))


def _start(noise: Tensor, flow: Flow) -> Evaluated:
    """What the sums over the steps begin with: the initial noise, where all steps count."""
    zero, one = torch.zeros_like(noise), noise.new_ones(())
    if flow.drawn == 1:
        return Evaluated(zero, zero, None)
    return Evaluated(
        gaussian_log_prob(noise, zero, one), zero + gaussian_entropy(one) if flow.kind == "noise" else zero, None
    )


def _mean(total: Tensor, step: Tensor, flow: Flow) -> Tensor:
    return torch.where(_like(step >= 0, total), total / (flow.drawn + 1 if flow.drawn > 1 else 1), 0.0)


def _plus(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return term if total is None or term is None else total + term
