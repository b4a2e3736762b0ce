"""DSRL with noise aliasing (arXiv 2506.15799), for a flow that an update cannot evaluate: the actor decides its initial
noise ``w = bound * u``, u = tanh(Gaussian), and learns from a critic of noise, which the critics of actions teach.

    critics of actions    y = r + discount^n * mask * min_i W_i(s', w'),  w' ~ pi(s')
                          loss = mean_i,B (Q_i(s, a) - y)^2

             of all steps, whoever made them: a is what was executed. The paper has y = ... Q'(s', flow(s', w')); W
             stands for Q'(s, flow(s, w)) here, so that no flow is evaluated.

    critics of noise      loss = mean_i (W_i(s, w) - Q'_i(s, a))^2 + (D_i(s, w) - |a - b(s)|^2)^2
                          over the draws (s, w, a) of which the flow's actions a are known

             Each critic of noise has one of actions as its teacher, by its slow copy Q', which is the only target
             network. D is the mean squared distance from the policy's most likely actions b(s). The draws are those of
             the noise that the actor has executed, and, in every state, some of the prior N(0, 1), within the bound,
             which were decoded where the state was seen. The latter are known of a person's steps as well.

    actor                 loss = -mean_B (W(s, w) - temperature * log pi(u) - pull * mean_i D_i(s, w)),  w ~ pi(s)

             W is the mean or the minimum of the critics (`actor_q`), and the temperature is learned, as in
             `hilt.algos.rlpd`. The pull to the policy is that of `hilt.algos.frozen.action_spaces`, as far as D knows.

DSRL's other variant, SAC whose action is the noise, needs (s, w, r, s') in every row: it could learn nothing from a
person's steps or from demonstrations, half of each batch here, and nothing from actions that other noise leads to as
well. Here the former teach Q, and what Q knows of an action holds for all noise that leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from hilt.algos import rlpd
from hilt.algos.config import Rlpd
from hilt.algos.frozen.action_spaces import ActionSpace, DecodedNoise
from hilt.algos.gaussian import sample_backward
from hilt.algos.rlpd import ActorOutputs, Networks, Transitions
from hilt.algos.tables import OffPolicyAlgorithm
from hilt.core.errors import ConfigError, SchemaError

OUTPUTS = 2
"""The outputs of a critic of noise: the value, and the squared distance from the policy's actions"""


class DrawnNoise(ActionSpace):
    """The noise itself, of at most `bound` in each number: what becomes of it is known only where the policy acts."""

    def __init__(self, places: Sequence[int], bound: float, pull: float = 0.0):
        super().__init__(places, pull)
        self.bound = bound

    def compose(self, z: Tensor, own: Tensor) -> Tensor:
        return self.bound * own

    def through(self, z: Tensor, own: Tensor, actions: Tensor, dactions: Tensor) -> Tensor:
        return self.bound * dactions

    def own(self, z: Tensor, actions: Tensor) -> Tensor:
        raise ConfigError("agent.options.space=noise cannot imitate: the noise of an action is not known.")


class NoiseAliasing(OffPolicyAlgorithm):
    """`update`, of an agent beside a frozen policy."""

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
    """One gradient step of each network in `which`; the critics of noise have theirs with "critic"."""
    decoded, warming = _decoded(batch), actor_updates < settings.critic_warmup
    next_noise, subset, noise = rlpd.draw(replace(batch, actions=decoded.noise[:, 0]), settings, generator, which)
    policy: ActorOutputs = rlpd.act(nets, batch, noise, next_noise)
    gradients: dict[str, Sequence[Tensor]] = {}
    figures: dict[str, Tensor] = {}
    info: dict[str, float] = {}
    if "critic" in which:
        judged = nets.noise_critic.run(batch.target_z, policy.next_states()[0], learns=False).out[..., :1]
        gradients["critic"], figures, info = rlpd.critic_loss(
            nets, batch, policy, None, settings, nets.temperature(), subset, next_out=judged
        )
        gradients["noise_critic"], more = taught(nets, batch.z.detach(), decoded)
        figures |= more
    if "actor" in which:
        found, more = actor_loss(nets, batch, policy, settings, warming)
        gradients |= {} if found is None else {"actor": found}
        figures |= more
    if "temperature" in which and not warming:
        gradients["temperature"], figures["temperature_loss"] = rlpd.temperature_loss(nets, policy, target_entropy)
    return rlpd.stepped(nets, which, gradients, figures, info, settings)


def taught(nets: Networks, z: Tensor, decoded: DecodedNoise) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
    """The gradients of the critics of noise in the states ``z [B, width]``, and their figures."""
    z = z.repeat_interleave(decoded.known.shape[1], 0)
    noise, actions, counted = (part.flatten(0, 1) for part in (decoded.noise, decoded.actions, decoded.counted))
    value = nets.head.values(nets.target_critic.run(z, actions, learns=False).out)  # [E, B * N]
    away = ((actions - nets.space.base(z)).square() * counted).sum(1) / counted.sum(1).clamp(min=1)  # type: ignore[union-attr]
    tape = nets.noise_critic.run(z, noise)
    known = decoded.known.flatten()
    errors = (tape.out - torch.stack([value, away.expand_as(value)], -1)) * known[:, None]  # [E, B * N, 2]
    share = 1 / (len(errors) * known.sum()).clamp(min=1)
    found = nets.noise_critic.gradients(tape, 2 * share * errors, nets.optimizers["noise_critic"].parameters)
    loss = errors.square().sum((0, 1)) * share
    return found, {"noise_critic_loss": loss[0], "distance_loss": loss[1], "decoded": known.mean()}


def actor_loss(
    nets: Networks, batch: Transitions, policy: ActorOutputs, settings: Rlpd, warming: bool
) -> tuple[Sequence[Tensor] | None, dict[str, Tensor]]:
    """The gradients of the actor's parameters, none where it stays as it is; and its figures."""
    assert nets.space is not None
    tape, rows, draws, mean, std, noise, log_prob, own = policy.states()
    figures = {"actor_loss": mean.new_zeros(()), "entropy": -log_prob, "std": std}
    if warming:
        return None, figures
    z, temperature, pull = batch.z.detach(), nets.temperature(), nets.space.pull
    judged = nets.noise_critic.judge(z, noise)
    q, away = judged.out.unbind(-1)  # [E, B]
    value, dq = rlpd.actor_value(q, settings)
    dnoise = nets.noise_critic.action_gradients(judged, torch.stack([dq, torch.full_like(q, pull / q.numel())], -1))
    figures |= {"pull_loss": pull * away.mean(), "correction": away.clamp(min=0).sqrt(), "noise": noise.abs()}
    figures["actor_loss"] = (temperature * log_prob - value).mean() + figures["pull_loss"]
    down = nets.space.through(z, own, noise, dnoise)
    dmean, dstd = sample_backward(own, std, draws, down, temperature / rows)
    dout = nets.actor.gaussian_backward(tape.out[0, :rows], dmean, dstd)
    return nets.actor.gradients(tape, dout, nets.optimizers["actor"].parameters, rows), figures


def _decoded(batch: Transitions) -> DecodedNoise:
    if batch.decoded is None:
        raise SchemaError("decoded: the batch has no noise of a flow with the actions that it became.")
    return batch.decoded
