"""Soft actor-critic as HIL-SERL has it, with RLPD's options. One update, from top to bottom.

    critics:      y = r + discount^n * mask * min_i Q'_i(s', a'),   a' ~ pi(s')      loss = mean_i,B (Q_i(s, a) - y)^2
                  (backup_entropy: ... * (min_i Q'_i(s', a') - temperature * log pi(a' | s')))
    actor:        loss = -mean_B (mean_i Q_i(s, pi(s)) - temperature * log pi)
    temperature:  loss = temperature * (entropy - target_entropy), the entropy that of a'
    grasp critic: y = r + penalty + discount^n * mask * G'(s', argmax_g G(s', g))    loss = mean_B (G(s, g) - y)^2
    targets:      Q' <- Q' + tau * (Q - Q'), after every update of Q

`mask` is 0 where the task ended (terminated) and 1 elsewhere, so that a time limit (truncated) bootstraps. States come as ``z``, made by
an encoder: `z` of the batch carries the graph back into it, so the critics' loss, and no other, trains it. All losses are taken at the
parameters before the update. A network that is not updated stays as it is, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from hilt.algos.adam import Adam
from hilt.algos.config import Rlpd as Rlpd
from hilt.algos.gaussian import sample
from hilt.algos.imitation import imitation_loss
from hilt.core.errors import SchemaError


@dataclass
class Networks:
    """What is trained, the slow copies, and one optimiser for each name."""

    actor: Any
    """z -> mean, std ``[B, A]``"""
    critic: Any
    """z, actions -> Q ``[E, B]``"""
    target_critic: Any
    temperature: Any
    """-> a positive number"""
    optimisers: dict[str, Adam]
    """"critic" holds the parameters of the encoder too"""
    grasp_critic: Any = None
    """z -> Q ``[B, outcomes]``"""
    target_grasp_critic: Any = None
    encoder: Any = None
    target_encoder: Any = None
    average_actor: Any = None
    """A slow copy of the actor, to be evaluated"""


@dataclass
class Batch:
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
    """Rows by source, bool, of which details are told"""
    grasps: Tensor | None = None
    """What the grippers did, as a number"""
    grasp_penalty: Tensor | None = None


def update(
    nets: Networks, batch: Batch, settings: Rlpd, generator: Generator, which: frozenset[str], actor_updates: int, target_entropy: float
) -> dict[str, float]:
    """One gradient step of each network in `which`. `actor_updates`: how many the actor has had."""
    warming = actor_updates < settings.critic_warmup
    temperature = nets.temperature().detach()
    gradients: dict[str, tuple[Tensor, ...]] = {}
    info: dict[str, float] = {}

    if which & {"critic", "temperature"}:
        with torch.no_grad():
            next_actions, next_log_prob = sample(*_with_noise(nets.actor(batch.next_z), generator))
    if "critic" in which:
        with torch.no_grad():
            next_q = nets.target_critic(batch.target_z, next_actions)  # [E, B]
            target = critic_target(batch, next_q, next_log_prob, temperature, settings, generator)  # [B]
        q = nets.critic(batch.z, batch.actions)  # [E, B]
        errors = (q - target).square().mean(0)  # [B]
        loss = errors.mean()
        trained = nets.optimisers["critic"].parameters
        if batch.groups:
            info |= by_group(batch, q, target, errors, trained, settings)
        gradients["critic"] = torch.autograd.grad(loss, trained)
        info |= {"critic_loss": loss.item(), "q": q.mean().item(), "target_q": target.mean().item()}
        info["reward"] = rewards(batch, settings).mean().item()
    if "grasp_critic" in which:
        loss, values = grasp_loss(nets, batch, settings)
        gradients["grasp_critic"] = torch.autograd.grad(loss, nets.optimisers["grasp_critic"].parameters)
        info |= {"grasp_critic_loss": loss.item(), "grasp_q": values.mean().item()}
    if "actor" in which:
        loss, told = actor_loss(nets, batch, settings, temperature, generator, actor_updates)
        if loss.requires_grad:  # not where there is nothing to imitate
            gradients["actor"] = torch.autograd.grad(loss, nets.optimisers["actor"].parameters)
        info |= {"actor_loss": loss.item(), **told}
    if "temperature" in which and not warming:  # while the actor imitates, no temperature can steer its entropy
        loss = nets.temperature() * (-next_log_prob.mean() - target_entropy)
        gradients["temperature"] = torch.autograd.grad(loss, nets.optimisers["temperature"].parameters)
        info["temperature_loss"] = loss.item()

    check_finite(info)
    for name, found in gradients.items():
        nets.optimisers[name].step(found)
    if "critic" in which:
        polyak(nets.target_critic, nets.critic, settings.tau)
        if nets.target_encoder is not None:
            polyak(nets.target_encoder, nets.encoder, settings.tau)
    if "actor" in which and nets.average_actor is not None:
        polyak(nets.average_actor, nets.actor, settings.actor_average)
    if "grasp_critic" in which:
        polyak(nets.target_grasp_critic, nets.grasp_critic, settings.tau)
    return info | {"temperature": nets.temperature().item()}


def critic_target(batch: Batch, next_q: Tensor, next_log_prob: Tensor, temperature: Tensor, settings: Rlpd, generator: Generator) -> Tensor:
    """What the critics are told to say, ``[B]``."""
    if settings.subset:  # without repetition: two draws of one critic would be a subset of one
        next_q = next_q[torch.randperm(len(next_q), generator=generator)[: settings.subset]]
    value = next_q.min(dim=0).values
    if settings.backup_entropy:
        value = value - temperature * next_log_prob
    target = rewards(batch, settings) + discounted(value, batch, settings)
    return target if settings.target_range is None else target.clamp(*settings.target_range)


def rewards(batch: Batch, settings: Rlpd) -> Tensor:
    """The rewards ``[B]`` with the bias, which each of `n_steps` rewards that were summed has had."""
    if batch.n_steps is None or not settings.reward_bias:
        return batch.rewards + settings.reward_bias
    steps = torch.arange(int(batch.n_steps.max()), device=batch.n_steps.device)
    counted = (settings.discount**steps * (steps < batch.n_steps[:, None])).sum(1)
    return batch.rewards + settings.reward_bias * counted


def discounted(value: Tensor, batch: Batch, settings: Rlpd) -> Tensor:
    """What the next state's value ``[B]`` counts: nothing where the task ended, less the more rewards were summed."""
    factor = settings.discount if batch.n_steps is None else settings.discount**batch.n_steps
    return torch.where(batch.masks > 0, batch.masks * factor * value, 0.0)  # not 0 * value, which may be anything there


def actor_loss(
    nets: Networks, batch: Batch, settings: Rlpd, temperature: Tensor, generator: Generator, actor_updates: int
) -> tuple[Tensor, dict[str, float]]:
    z = batch.z.detach()  # the encoder learns by the critics alone
    mean, std = nets.actor(z)
    warming = actor_updates < settings.critic_warmup
    actions, log_prob = sample(*_with_noise((mean, std), generator))
    told = {"entropy": -log_prob.mean().item(), "std": std.mean().item()}
    loss = torch.zeros(())
    if not warming:
        q = nets.critic(z, actions)
        loss = -((q.mean(0) if settings.actor_q == "mean" else q.min(0).values) - temperature * log_prob).mean()
    weight = 1.0 if warming else imitation_weight(settings, actor_updates - settings.critic_warmup)
    if weight:
        if batch.demo is None:
            raise SchemaError(
                "demo: the batch has no such column, which says whom to imitate; or set critic_warmup and imitation_weight to 0."
            )
        if batch.demo.any():
            imitated = imitation_loss(settings.imitation_loss, mean, std, batch.actions)[batch.demo].mean()
            told |= {"imitation_loss": imitated.item(), "imitation_weight": weight}
            loss = loss + weight * imitated
    return loss, told


def imitation_weight(settings: Rlpd, updates: int) -> float:
    left = 1 - updates / settings.imitation_updates if settings.imitation_updates else 1.0
    return settings.imitation_weight * max(0.0, left)


def grasp_loss(nets: Networks, batch: Batch, settings: Rlpd) -> tuple[Tensor, Tensor]:
    """Double DQN: the critic chooses, its slow copy judges. Also the values that it gives to what was done."""
    if batch.grasps is None or batch.grasp_penalty is None:
        raise SchemaError("the batch has no 'grasp_penalty'; a learned gripper needs this column: 0 where there is none.")
    with torch.no_grad():
        best = nets.grasp_critic(batch.next_z).argmax(dim=1, keepdim=True)
        next_q = nets.target_grasp_critic(batch.target_z).gather(1, best).squeeze(1)
        target = rewards(batch, settings) + batch.grasp_penalty + discounted(next_q, batch, settings)
    q = nets.grasp_critic(batch.z.detach()).gather(1, batch.grasps[:, None]).squeeze(1)
    return (q - target).square().mean(), q


def by_group(batch: Batch, q: Tensor, target: Tensor, errors: Tensor, trained: list[Tensor], settings: Rlpd) -> dict[str, float]:
    """Of the rows of each source: reward, Q, error, and the share of the critics' gradient."""
    told, norms = {}, {}
    for name, rows in batch.groups.items():
        rows = rows.to(q.dtype)
        n = rows.sum().clamp(min=1)
        if not rows.any():
            continue
        found = torch.autograd.grad((errors * rows).sum() / len(rows), trained, retain_graph=True)
        norms[name] = torch.cat([g.flatten() for g in found]).norm().item()
        told[f"rows/{name}"] = n.item()
        told[f"reward/{name}"] = (rewards(batch, settings) * rows).sum().item() / n.item()
        told[f"q/{name}"] = (q.mean(0) * rows).sum().item() / n.item()
        told[f"td_error/{name}"] = ((q - target).abs().mean(0) * rows).sum().item() / n.item()
    whole = sum(norms.get(name, 0.0) for name in ("online", "demo"))  # these two make up the batch
    return told | {f"gradient_share/{name}": norm / whole if whole else 0.0 for name, norm in norms.items()}


def check_finite(info: dict[str, float]) -> None:
    """Called before anything is changed: one bad number in a loss would be in every weight."""
    if bad := [name for name, value in info.items() if not math.isfinite(value)]:
        raise SchemaError(f"{bad[0]} is {info[bad[0]]}: a row of the batch is not finite, or learning diverged. Nothing was changed.")


def polyak(slow: nn.Module, quick: nn.Module, tau: float) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(slow.parameters()), list(quick.parameters()), tau)


def _with_noise(gaussian: tuple[Tensor, Tensor], generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    mean, std = gaussian
    return mean, std, torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
