"""Soft actor-critic as HIL-SERL has it, with RLPD's options. One update, from top to bottom.

    critics:      y = r + discount^n * mask * min_i Q'_i(s', a'),   a' ~ pi(s')      loss = mean_i,B (Q_i(s, a) - y)^2
                  (backup_entropy: ... * (min_i Q'_i(s', a') - temperature * log pi(a' | s')))
    actor:        loss = -mean_B (mean_i Q_i(s, pi(s)) - temperature * log pi)
    temperature:  loss = temperature * (entropy - target_entropy), the entropy that of a'
    grasp critic: y = r + penalty + discount^n * mask * G'(s', argmax_g G(s', g))    loss = mean_B (G(s, g) - y)^2
    targets:      Q' <- Q' + tau * (Q - Q'), after every update of Q

`mask` is 0 where the task ended (terminated) and 1 elsewhere, so that a time limit (truncated) bootstraps. Critics that
state a distribution have another loss: `hilt.algos.value_heads`. Chunks of actions, and the choice of the best of
several, are in `hilt.algos.chunks`; the conservative term of the critics is in `hilt.algos.conservative`; actions
beside those of a frozen policy are in `hilt.algos.frozen.action_spaces`. States come as ``z``, made by an encoder: `z`
of the batch carries the graph back into it, so the critics' loss, and no other, trains it. All losses are taken at the
parameters before the update. A network that is not updated stays as it is, bit for bit.

The gradients are written out, down to those of the networks' outputs; the networks have their own (`run`, then
`gradients`). Autograd is left with what `z` comes from, and with imitation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from hilt.algos.adam import Adam
from hilt.algos.chunks import best_of, chunk_imitation_loss
from hilt.algos.config import Rlpd as Rlpd
from hilt.algos.conservative import conservative_gradients
from hilt.algos.frozen.action_spaces import ActionSpace, DecodedNoise
from hilt.algos.gaussian import sample, sample_backward
from hilt.algos.imitation import imitation_loss
from hilt.algos.tables import OffPolicyAlgorithm
from hilt.algos.value_heads import CriticHead, ScalarHead
from hilt.core.errors import NotFiniteError, SchemaError


@dataclass
class Networks:
    """What is trained, the slow copies, and one optimizer for each name."""

    actor: Any
    """z -> mean, std ``[B, A]``"""
    critic: Any
    """z, actions -> Q ``[E, B]``, or what `head` makes Q of"""
    target_critic: Any
    temperature: Any
    """-> a positive number"""
    optimizers: dict[str, Adam]
    """"critic" holds the parameters of the encoder too"""
    grasp_critic: Any = None
    """z -> Q ``[B, outcomes]``"""
    target_grasp_critic: Any = None
    encoder: Any = None
    target_encoder: Any = None
    average_actor: Any = None
    """A moving average of the actor, to be evaluated"""
    head: CriticHead = field(default_factory=ScalarHead)
    """What the outputs of the critics mean"""
    space: ActionSpace | None = None
    """How the actor's numbers become actions beside those of a frozen policy; none: they are the actions"""
    noise_critic: Any = None
    """z, noise -> ``[E, B, 2]``: see `hilt.algos.frozen.noise_critic`, which alone has one"""

    def __post_init__(self) -> None:
        pairs = {
            "critic": (self.target_critic, self.critic),
            "encoder": (self.target_encoder, self.encoder),
            "actor": (self.average_actor, self.actor),
            "grasp_critic": (self.target_grasp_critic, self.grasp_critic),
        }
        self._averages = {
            name: (list(slow.parameters()), list(quick.parameters()))
            for name, (slow, quick) in pairs.items()
            if slow is not None
        }

    def average(self, name: str, share: float) -> None:
        """The target network of this one, or its moving average, takes over a share of it; if there is any."""
        if name in self._averages:
            torch._foreach_lerp_(*self._averages[name], share)


@dataclass
class Transitions:
    """Rows of experience as tensors; ``B`` of them."""

    z: Tensor
    """The states, with the graph of the encoder"""
    next_z: Tensor
    """The next states by the encoder as it is"""
    target_z: Tensor
    """The same by its slow copy"""
    actions: Tensor
    """The continuous ones ``[B, A]``"""
    rewards: Tensor
    masks: Tensor
    """0 where the task ended, else 1"""
    n_steps: Tensor | None = None
    """How many rewards are summed in each row; none: one"""
    demo: Tensor | None = None
    """Which rows are demonstrations, bool"""
    groups: dict[str, Tensor] = field(default_factory=dict)
    """Masks of rows by source, for detailed metrics"""
    grasps: Tensor | None = None
    """What the grippers did, as a number"""
    grasp_penalty: Tensor | None = None
    """What the gripper's moves cost, summed over the same steps as the rewards"""
    returns: Tensor | None = None
    """What the log has from each step on to the end of the task, discounted; -infinity where it does not know"""
    valid: Tensor | None = None
    """Of chunks of actions: 1 where the critics learn from the row, else 0; none: from all"""
    taken: Tensor | None = None
    """Of chunks: which of the actions were executed, bool ``[B, h]``"""
    shown: Tensor | None = None
    """Of chunks: which of them are imitated where the row is a demonstration"""
    decoded: DecodedNoise | None = None
    """Beside a frozen policy: noise of its flow, and the actions that it became"""


class SoftActorCritic(OffPolicyAlgorithm):
    """`update`, by the name rlpd."""

    def update(
        self,
        networks: Networks,
        batch: Transitions,
        settings: Rlpd,
        generator: Generator,
        which: frozenset[str],
        actor_updates: int,
        target_entropy: float,
    ) -> dict[str, float]:
        found: dict[str, float] = update(networks, batch, settings, generator, which, actor_updates, target_entropy)
        return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def update(
    nets: Networks,
    batch: Transitions,
    settings: Rlpd,
    generator: Generator,
    which: frozenset[str],
    actor_updates: int,
    target_entropy: float,
) -> dict[str, float]:
    """One gradient step of each network in `which`. `actor_updates`: how many the actor has had."""
    warming = actor_updates < settings.critic_warmup
    which = which - {"temperature"} if settings.actor == "behavior" else which
    temperature = nets.temperature()
    gradients: dict[str, Sequence[Tensor]] = {}
    figures: dict[str, Tensor] = {}
    info: dict[str, float] = {}

    next_noise, subset, noise = draw(batch, settings, generator, which)
    choices = None
    if "critic" in which and settings.samples > 1:
        choices = _noise(batch.actions.expand(settings.samples, -1, -1), generator)
    policy = act(nets, batch, noise, next_noise)
    shared = nets.critic.of_states(batch.z) if {"critic", "actor"} <= which and _maximizes(settings, warming) else None
    if "critic" in which:
        pushed = conservative(nets, batch, settings, generator) if settings.conservative else None
        gradients["critic"], more, details = critic_loss(
            nets, batch, policy, shared, settings, temperature, subset, choices
        )
        figures |= more
        info |= details
        if pushed is not None:
            gradients["critic"] = [found + push for found, push in zip(gradients["critic"], pushed[0], strict=True)]
            figures |= pushed[1]
    if "grasp_critic" in which:
        figures["grasp_critic_loss"], figures["grasp_q"], gradients["grasp_critic"] = grasp_loss(nets, batch, settings)
    if "actor" in which:
        found, more = actor_loss(nets, batch, policy, shared, settings, temperature, actor_updates)
        if found is not None:
            gradients["actor"] = found
        figures |= more
    if "temperature" in which and not warming:  # while the actor imitates, no temperature can steer its entropy
        gradients["temperature"], figures["temperature_loss"] = temperature_loss(nets, policy, target_entropy)
    return stepped(nets, which, gradients, figures, info, settings)


def stepped(
    nets: Networks,
    which: frozenset[str],
    gradients: Mapping[str, Sequence[Tensor]],
    figures: Mapping[str, Tensor],
    info: dict[str, float],
    settings: Rlpd,
) -> dict[str, float]:
    """Takes the step of each gradient once all of them are known to be finite, and moves the slow copies of the
    networks in `which`. Returns the figures of the update."""
    info |= zip(figures, torch.stack([figure.mean() for figure in figures.values()]).tolist(), strict=True)
    check_finite(info, gradients)
    for name, each in gradients.items():
        nets.optimizers[name].step(each)
    for name in which & {"critic", "grasp_critic"}:
        nets.average(name, settings.tau)
    if "critic" in which:
        nets.average("encoder", settings.tau)
    if "actor" in which:
        nets.average("actor", settings.actor_average)
    return info | {"temperature": nets.temperature().item()}


def draw(
    batch: Transitions, settings: Rlpd, generator: Generator, which: frozenset[str]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Everything random of an update: the noise of the next actions, the critics that make the
    target, the noise of the actor's actions."""
    next_noise = _noise(batch.actions, generator) if which & {"critic", "temperature"} else None
    subset = None
    if "critic" in which and settings.subset:  # without repetition: two draws of one critic would be a subset of one
        subset = torch.randperm(settings.critics, generator=generator)[: settings.subset]
    return next_noise, subset, _noise(batch.actions, generator) if "actor" in which else None


class ActorOutputs(NamedTuple):
    """What the actor does in the states and in the next states, or in one of both: all in one pass."""

    tape: Any
    rows: int
    """How many are states; the next states come behind them"""
    noise: Tensor
    mean: Tensor
    std: Tensor
    actions: Tensor
    log_prob: Tensor
    own: Tensor
    """What the actor drew; the actions themselves, unless a space makes these of it"""

    def states(self) -> ActorOutputs:
        return ActorOutputs(self.tape, self.rows, *(part[: self.rows] for part in self[2:]))

    def next_states(self) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` and their log-probabilities ``[B]``."""
        return self.actions[self.rows :], self.log_prob[self.rows :]


def act(nets: Networks, batch: Transitions, noise: Tensor | None, next_noise: Tensor | None) -> Any:
    """The `ActorOutputs` in the states for which there is noise; None if there is none."""
    pairs = [(batch.z.detach(), noise), (batch.next_z, next_noise)]  # detached: the encoder learns by the critics alone
    given = [pair for pair in pairs if pair[1] is not None]
    if not given:
        return None
    states, drawn = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*given, strict=True))
    tape = nets.actor.run(states, learns=noise is not None)
    mean, std = nets.actor.gaussian(tape.out[0])
    own, log_prob = sample(mean, std, drawn)
    actions = own if nets.space is None else nets.space.compose(states, own)
    return ActorOutputs(tape, 0 if noise is None else len(noise), drawn, mean, std, actions, log_prob, own)


def critic_loss(
    nets: Networks,
    batch: Transitions,
    policy: ActorOutputs,
    shared: object,
    settings: Rlpd,
    temperature: Tensor,
    subset: Tensor | None,
    choices: Tensor | None = None,
    next_out: Tensor | None = None,
) -> tuple[Sequence[Tensor], dict[str, Tensor], dict[str, float]]:
    """The gradients of the critics' parameters, their figures, and the details by source, if the batch has groups.
    `choices`: the noise ``[N, B, A]`` of the actions that the best is chosen from; `next_out`: the outputs ``[E, B,
    outputs]`` of the next states, in place of those of the target critics."""
    details: dict[str, float] = {}
    next_actions, next_log_prob = policy.next_states()
    if choices is not None:
        drawn = torch.tanh(policy.mean[policy.rows :] + policy.std[policy.rows :] * choices)
        drawn = drawn if nets.space is None else nets.space.compose(batch.next_z, drawn)
        next_actions = best_of(nets.critic, nets.head, batch.next_z, drawn, settings.actor_q)
    if next_out is None:
        next_out = nets.target_critic.run(batch.target_z, next_actions, learns=False).out  # [E, B, outputs]
    next_out, head = next_out if subset is None else next_out[subset], nets.head
    backup = partial(backed_up, batch=batch, next_log_prob=next_log_prob, temperature=temperature, settings=settings)
    target = head.target(next_out, backup)
    tape = nets.critic.run(batch.z, batch.actions, shared)
    losses, dout = head.loss(tape.out, target)  # [E, B], [E, B, outputs]
    share: Tensor | float = 1 / losses.numel()
    if batch.valid is not None:
        losses, dout = losses * batch.valid, dout * batch.valid[:, None]
        share = 1 / (len(losses) * batch.valid.sum()).clamp(min=1)
    q, wanted = head.values(tape.out), head.mean(target)
    trained, earned = nets.optimizers["critic"].parameters, rewards(batch, settings)
    if batch.groups:
        details |= by_group(nets, batch, tape, q, q - wanted, dout * share, settings)
        ends = torch.stack([q.amax(), q.amin(), earned.amax(), earned.amin()]).tolist()
        details |= zip(("q_max", "q_min", "reward_max", "reward_min"), ends, strict=True)
    gradients = nets.critic.gradients(tape, dout * share, trained)
    figures = {
        "critic_loss": losses if batch.valid is None else losses.sum() * share,
        "q": q,
        "target_q": wanted,
        "reward": earned,
    }
    return gradients, figures | head.figures(next_out, backup), details


def conservative(
    nets: Networks, batch: Transitions, settings: Rlpd, generator: Generator
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients and figures of the conservative term: `hilt.algos.conservative`."""
    if settings.calibrated and batch.returns is None:
        raise SchemaError(
            "returns: the batch has no such column, which conservative with calibrated=true needs: the discounted sum "
            "of rewards from each step to the end of the task, -infinity if that is unknown. Or set calibrated=false."
        )
    returns = batch.returns if settings.calibrated else None
    return conservative_gradients(nets, batch, settings.conservative, settings.conservative_samples, returns, generator)


def backed_up(value: Tensor, batch: Transitions, next_log_prob: Tensor, temperature: Tensor, settings: Rlpd) -> Tensor:
    """Returns the targets of the critics from values of the next states, both ``[..., B]``."""
    if settings.backup_entropy:
        value = value - temperature * next_log_prob
    target = rewards(batch, settings) + discounted(value, batch, settings)
    return target if settings.target_range is None else target.clamp(*settings.target_range)


def rewards(batch: Transitions, settings: Rlpd) -> Tensor:
    """The rewards ``[B]`` with the bias, which each of `n_steps` rewards that were summed has had."""
    if not settings.reward_bias:
        return batch.rewards
    if batch.n_steps is None:
        return batch.rewards + settings.reward_bias
    steps = torch.arange(int(batch.n_steps.max()), device=batch.n_steps.device)
    counted = (settings.discount**steps * (steps < batch.n_steps[:, None])).sum(1)
    return batch.rewards + settings.reward_bias * counted


def discounted(value: Tensor, batch: Transitions, settings: Rlpd) -> Tensor:
    """What the next state's value ``[B]`` counts: nothing where the task ended, less the more rewards were summed."""
    factor = settings.discount if batch.n_steps is None else settings.discount**batch.n_steps
    return torch.where(batch.masks > 0, batch.masks * factor * value, 0.0)  # not 0 * value, which may be anything there


def actor_loss(
    nets: Networks,
    batch: Transitions,
    policy: ActorOutputs,
    shared: object,
    settings: Rlpd,
    temperature: Tensor,
    actor_updates: int,
) -> tuple[Sequence[Tensor] | None, dict[str, Tensor]]:
    """The gradients of the actor's parameters, none where it stays as it is; and its figures."""
    warming = settings.actor == "soft" and actor_updates < settings.critic_warmup
    tape, rows, noise, mean, std, actions, log_prob, own = policy.states()
    figures = {"actor_loss": mean.new_zeros(()), "entropy": -log_prob, "std": std}
    if warming and nets.space is not None:
        return None, figures  # it is the frozen policy, until the critics know what that is worth
    dmean = dstd = None
    if _maximizes(settings, warming):
        judged = nets.critic.judge(batch.z.detach(), actions, shared)
        value, dq = actor_value(nets.head.values(judged.out), settings)
        dactions = nets.critic.action_gradients(judged, nets.head.values_backward(judged.out, dq))
        figures["actor_loss"] = (temperature * log_prob - value).mean()
        if nets.space is not None:
            dactions, more = nets.space.backward(batch.z.detach(), own, actions, dactions)
            figures |= more
            figures["actor_loss"] = figures["actor_loss"] + more.get("pull_loss", 0.0)
        dmean, dstd = sample_backward(own, std, noise, dactions, temperature / rows)
    if settings.actor == "behavior":
        loss, dmean, dstd = imitation_gradients(settings, mean, std, batch, 1.0, nets.space, everything=True)
        figures |= {"imitation_loss": loss, "actor_loss": loss}
    weight = 1.0 if warming else imitation_weight(settings, actor_updates - settings.critic_warmup)
    if weight:
        if batch.demo is None:
            raise SchemaError(
                "demo: the batch has no such column, which marks the rows to imitate; or set critic_warmup "
                "and imitation_weight to 0."
            )
        if batch.demo.any():
            loss, *found = imitation_gradients(settings, mean, std, batch, weight, nets.space)
            figures |= {"imitation_loss": loss, "imitation_weight": loss.new_tensor(weight)}
            figures["actor_loss"] = figures["actor_loss"] + weight * loss
            dmean, dstd = (
                ours if before is None else before + ours for before, ours in zip((dmean, dstd), found, strict=True)
            )
    if dmean is None or dstd is None:
        return None, figures
    dout = nets.actor.gaussian_backward(tape.out[0, :rows], dmean, dstd)
    return nets.actor.gradients(tape, dout, nets.optimizers["actor"].parameters, rows), figures


def temperature_loss(nets: Networks, policy: ActorOutputs, target_entropy: float) -> tuple[Sequence[Tensor], Tensor]:
    """The gradient of the temperature, and its loss."""
    excess = -policy.next_states()[1].mean() - target_entropy
    found: Sequence[Tensor] = nets.temperature.gradients(excess)
    return found, nets.temperature() * excess


def actor_value(q: Tensor, settings: Rlpd) -> tuple[Tensor, Tensor]:
    """Returns the value ``[B]`` that the actor maximizes, and the gradient of minus
    its mean with respect to ``q [E, B]``."""
    if settings.actor_q == "mean":
        return q.mean(0), torch.full_like(q, -1 / q.numel())
    value, least = q.min(0)
    return value, torch.zeros_like(q).scatter_(0, least[None], -1 / len(value))


def imitation_gradients(
    settings: Rlpd,
    mean: Tensor,
    std: Tensor,
    batch: Transitions,
    weight: float,
    space: ActionSpace | None = None,
    everything: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of imitating the demonstrations, or `everything`, and `weight` of its gradients for mean and std
    ``[B, A]``."""
    counted = batch.taken if everything else batch.shown
    actions = batch.actions if space is None else space.own(batch.z.detach(), batch.actions)
    with torch.enable_grad():
        mean, std = mean.detach().requires_grad_(), std.detach().requires_grad_()
        if counted is None:
            losses = imitation_loss(settings.imitation_loss, mean, std, actions)
        else:
            losses = chunk_imitation_loss(settings.imitation_loss, mean, std, actions, counted)
        loss = (losses if everything else losses[batch.demo]).mean()
        dmean, dstd = torch.autograd.grad(weight * loss, [mean, std], materialize_grads=True)
    return loss.detach(), dmean, dstd


def _maximizes(settings: Rlpd, warming: bool) -> bool:
    """Whether the actor is trained by the critics."""
    return not warming and settings.actor == "soft"


def imitation_weight(settings: Rlpd, updates: int) -> float:
    left = 1 - updates / settings.imitation_updates if settings.imitation_updates else 1.0
    return settings.imitation_weight * max(0.0, left)


def grasp_loss(nets: Networks, batch: Transitions, settings: Rlpd) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Double DQN: the critic chooses, its target network judges. The loss and the values of
    what was done ``[B]``, and the gradients."""
    if batch.grasps is None or batch.grasp_penalty is None:
        raise SchemaError(
            "the batch has no 'grasp_penalty'; a learned gripper needs this column: 0 where there is none."
        )
    best = nets.grasp_critic.run(batch.next_z, learns=False).out[0].argmax(dim=1, keepdim=True)
    next_q = nets.target_grasp_critic.run(batch.target_z, learns=False).out[0].gather(1, best).squeeze(1)
    target = rewards(batch, settings) + batch.grasp_penalty + discounted(next_q, batch, settings)
    tape = nets.grasp_critic.run(batch.z.detach())
    q = tape.out[0].gather(1, batch.grasps[:, None]).squeeze(1)
    errors = q - target
    dout = torch.zeros_like(tape.out[0]).scatter_(1, batch.grasps[:, None], (2 / len(errors) * errors)[:, None])
    found = nets.grasp_critic.gradients(tape, dout[None], nets.optimizers["grasp_critic"].parameters)
    return errors.square(), q, found


def by_group(
    nets: Networks, batch: Transitions, tape: Any, q: Tensor, errors: Tensor, dout: Tensor, settings: Rlpd
) -> dict[str, float]:
    """Returns for the rows of each source: reward, Q, error, and the share of the critics' gradient. Q and its errors
    are ``[E, B]``, `dout` the gradient of the outputs."""
    details, norms, trained = {}, {}, nets.optimizers["critic"].parameters
    for name, rows in batch.groups.items():
        rows = rows.to(errors.dtype)
        n = rows.sum().clamp(min=1)
        if not rows.any():
            continue
        found = nets.critic.gradients(tape, dout * rows[:, None], trained, again=True)
        norms[name] = torch.cat([g.flatten() for g in found]).norm().item()
        details[f"rows/{name}"] = n.item()
        details[f"reward/{name}"] = (rewards(batch, settings) * rows).sum().item() / n.item()
        details[f"q/{name}"] = (q.mean(0) * rows).sum().item() / n.item()
        details[f"td_error/{name}"] = (errors.abs().mean(0) * rows).sum().item() / n.item()
    whole = sum(norms.get(name, 0.0) for name in ("online", "demo"))  # these two make up the batch
    return details | {f"gradient_share/{name}": norm / whole if whole else 0.0 for name, norm in norms.items()}


def check_finite(info: Mapping[str, float], gradients: Mapping[str, Sequence[Tensor]] | None = None) -> None:
    """Called before anything is changed: one bad number in a loss or a gradient would be in
    every weight. `gradients`: of each network."""
    found = dict(info)
    for name, each in (gradients or {}).items():
        found[f"the gradient of {name}"] = torch.stack(torch._foreach_norm(list(each))).sum().item()
    if bad := [name for name, value in found.items() if not math.isfinite(value)]:
        raise NotFiniteError(
            f"{bad[0]} is {found[bad[0]]}: a row of the batch is not finite, or learning diverged. Nothing was changed."
        )


def polyak(slow: nn.Module, quick: nn.Module, tau: float) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(slow.parameters()), list(quick.parameters()), tau)


def _noise(like: Tensor, generator: Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
