"""The agent that a learner trains and an actor carries.

    agent = Agent.make(env.observation_space, env.action_space, AgentConfig(), seed=0)
    action = agent.sample_actions(observation)  # a batch of observations gives a batch of actions
    agent, info = agent.update(batch, networks_to_update=frozenset({"critic"}))

It knows what observations look like; the arithmetic is in `hilt.algos`. Its random
numbers come from generators of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hilt.algos import chunks, rlpd
from hilt.algos.adam import Adam
from hilt.algos.chunks import best_of, chunk_imitation_loss
from hilt.algos.frozen.action_spaces import ActionSpace
from hilt.algos.imitation import grasp_margin_loss, imitation_loss
from hilt.algos.schedule import learning_rate_factor
from hilt.algos.tables import OffPolicyAlgorithm
from hilt.algos.value_heads import CategoricalHead, critic_head, disagreement
from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.core.tree import ArraySpec, Tree, flatten
from hilt.policies.agent.actor_critic import (
    ActorNetwork,
    Body,
    Critics,
    GraspCritic,
    NormedMlp,
    ProprioNormalizer,
    Temperature,
)
from hilt.policies.agent.agent_inputs import FEATURES, STATES, AgentInputs
from hilt.policies.agent.agent_state import check_range, copied, found, load
from hilt.policies.agent.chunk_plan import ChunkPlan
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.policies.agent.encoders import Encoder, initialize
from hilt.policies.agent.layout import ActionLayout, fit
from hilt.policies.agent.residual_critics import ResidualCritics, make_critics
from hilt.policies.agent.step_agent import StepAgent
from hilt.policies.plasticity import LayerWatch, PolicyLooks
from hilt.replay.tensors import check_device, generator

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from typing_extensions import Self

__all__ = ["Agent", "AgentConfig", "EncoderConfig"]

ACTING = ("encoder", "proprio", "actor", "grasp_critic")
"""The networks that an actor needs; also the critics, if they choose among several actions"""
TRAINED = ("actor", "critic", "temperature", "grasp_critic")
"""Those that an update may name"""
PRETRAIN_WARMUP = 0.05
"""Share of an encoder's pretraining in which its learning rate rises"""
FLOOR = 0.02
"""The minimum divisor of normalized proprioception, unless the config overrides it"""


class Agent(StepAgent):
    """Encoder, actor, critics and what trains them. `make` builds one."""

    def __init__(
        self,
        shapes: Mapping[str, ArraySpec],
        images: list[str],
        proprio: list[str],
        actions: int,
        config: AgentConfig,
        seed: int,
        squashed: bool = True,
    ):
        self.squashed = squashed
        """Whether an action is the tanh of the actor's Gaussian; else, for imitation, its own number, cut off at 1"""
        self.config, self.shapes, self.images, self.proprio, self.seed = config, dict(shapes), images, proprio, seed
        self.layout = ActionLayout(config.setup_mode, actions, config.action_indices)
        self.moving = self.layout.continuous * config.chunk
        """Numbers that the actor decides at once: those of one action, or of a chunk"""
        self.chunk, self.device = config.chunk, check_device(config.device)
        self.generator = generator(seed)
        self.updates = self.actor_updates = self.imitations = 0
        """How often each kind of update was made"""
        self.encoder = Encoder({path: shapes[path].shape for path in images}, config.encoder, self.generator)
        self.inputs = AgentInputs(self.shapes, proprio, config, self.encoder, self.device, self.generator)
        self.head = critic_head(config.critic, config.rlpd)
        self.networks = self._make_networks()
        self.inputs.normalizer = self.networks["proprio"]
        followed = {"critic", "grasp_critic"} | ({"encoder"} if self.encoder.trained_by_critic() else set())
        followed |= {"actor"} if config.rlpd.actor_average else set()
        self.targets = {
            name: copy.deepcopy(net).requires_grad_(False) for name, net in self.networks.items() if name in followed
        }
        """The target networks"""
        self.optimizers = self._make_optimizers()
        self._trained = rlpd.Networks(
            actor=self.networks["actor"],
            critic=self.networks["critic"],
            target_critic=self.targets["critic"],
            temperature=self.networks["temperature"],
            optimizers=self.optimizers,
            grasp_critic=self.networks.get("grasp_critic"),
            target_grasp_critic=self.targets.get("grasp_critic"),
            encoder=self.encoder,
            target_encoder=self.targets.get("encoder"),
            average_actor=self.targets.get("actor"),
            head=self.head,
        )
        self.algorithm: OffPolicyAlgorithm = rlpd.SoftActorCritic()
        self.space: ActionSpace | None = None
        """How its numbers become actions beside a frozen policy's; none: they are the actions"""
        wanted = config.rlpd.target_entropy
        self.target_entropy = config.chunk * (-self.layout.continuous / 2 if wanted is None else wanted)
        self._plan = ChunkPlan()
        self._looks, self._disagrees = PolicyLooks(), False  # whether disagreement is measured

    def _make_networks(self) -> dict[str, nn.Module]:
        """The networks by name, on the agent's device, with weights drawn from its generator in this order."""
        config, moving, draws, body = self.config, self.moving, self.generator, self._body()
        networks: dict[str, nn.Module] = {
            "encoder": self.encoder,
            "proprio": ProprioNormalizer(sum(self.inputs.sizes.values())),
            "actor": ActorNetwork(body, moving, draws, config.actor_scale, config.initial_std, config.std_range),
            "critic": self._make_critics(),
            "temperature": Temperature(config.rlpd.temperature),
        }
        if self.layout.outcomes:
            networks["grasp_critic"] = GraspCritic(body, self.layout.outcomes, draws)
        if foreseen := config.encoder.pretrain_predict:
            networks["forecast"] = NormedMlp(
                body.features + body.proprio, [128], 2 * self.inputs.sizes[foreseen], "relu"
            )
            initialize(networks["forecast"], draws)
        for network in networks.values():
            network.to(self.device)
        return networks

    def _body(self) -> Body:
        config = self.config
        proprio = sum(self.inputs.sizes.values())
        return Body(self.encoder.width, proprio, config.proprio_width, config.hidden, config.activation)

    def _make_critics(self) -> Critics | ResidualCritics:
        members, bias = self.config.rlpd.critics, self.head.bias
        return make_critics(self.config.critic, self._body(), self.moving, self.generator, members, bias)

    def _make_optimizers(self) -> dict[str, Adam]:
        """An optimizer for each kind of update, and which parameters it changes."""
        trained = {name: list(net.parameters()) for name, net in self.networks.items() if name in TRAINED}
        trained["critic"] += self.encoder.trained_by_critic()
        imitating = [
            p for name in ("actor", "forecast") if name in self.networks for p in self.networks[name].parameters()
        ]
        trained["imitation"] = [*self.encoder.trained_by_imitation(), *imitating]
        rate, decay = self.config.rlpd.learning_rate, self.config.critic.weight_decay
        made = {name: Adam(parameters, rate) for name, parameters in trained.items()}
        if decay:
            decayed = cast("Critics | ResidualCritics", self.networks["critic"]).matrices()
            made["critic"] = Adam(trained["critic"], rate, decay, decayed=decayed)
        return made

    @classmethod
    def make(
        cls,
        observation_space: Space,
        action_space: Space,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> Self:
        """An agent for these spaces (Gymnasium's, or specs). Keys are paths such as
        ``images/front``; empty: all there are.

        An image is uint8 ``[(stack,) H, W, 3]``; everything else is proprioception. One that is not `squashed` only
        imitates: its actor is a plain Gaussian.
        """
        config = config or AgentConfig()
        return cls(*fit(observation_space, action_space, config, image_keys, proprio_keys), config, seed, squashed)

    def use_algorithm(self, algorithm: OffPolicyAlgorithm) -> None:
        self.algorithm = algorithm
        algorithm.setup(self._trained, self.width, self.moving, self.seed)

    @property
    def image_paths(self) -> list[str]:
        return self.encoder.paths

    @property
    def critics(self) -> frozenset[str]:
        return frozenset(name for name in self.networks if name in ("critic", "grasp_critic"))

    @property
    def frozen(self) -> bool:
        """Whether the images' features never change under `update`, so that they may be cached."""
        return self.inputs.frozen

    @property
    def width(self) -> int:
        """Numbers that the networks see of an observation: features of the images, and proprioception."""
        return self.inputs.width

    # Acting

    def sample_actions(
        self, observations: Tree, seed: int | None = None, argmax: bool = False
    ) -> npt.NDArray[np.float32]:
        """The action for one observation, or for each of a batch. Draws from the agent's
        own generator, or from a new one of `seed`.

        With `argmax` it draws nothing: the likeliest action, by the slow copy of the actor where there is one. With
        `rlpd.samples` it chooses among as many, of which the likeliest is one.

        With `chunk`, for one observation: the next action of the chunk that was begun, which is decided anew when it is
        used up, when `begin` was called, and after `acted` by somebody else. For a batch: the first action of each.
        """
        self.disagreement = None
        leaves, single = self.inputs.leaves(observations), False
        known = {path: len(shape.shape) for path, shape in self.shapes.items()} | {FEATURES: 1, STATES: 1}
        if leaves and all(leaf.ndim == known[path] for path, leaf in leaves.items()):
            leaves, single = {path: leaf[None] for path, leaf in leaves.items()}, True
        if not single or self.config.chunk == 1:
            actions = self._decide(leaves, seed, argmax)[:, 0]
            return actions[0] if single else actions
        return self._plan.next(lambda: self._decide(leaves, seed, argmax)[0], self.version)

    def chunks(self, observations: Tree, seed: int = 0, argmax: bool = True, draws: int = 1) -> npt.NDArray[np.float32]:
        leaves = self.inputs.leaves(observations)
        return self._decide(self.inputs.repeated(self.encoder, leaves, draws) if draws > 1 else leaves, seed, argmax)

    def _decide(self, leaves: Mapping[str, Tensor], seed: int | None, argmax: bool) -> npt.NDArray[np.float32]:
        """Chunks of actions ``[B, chunk, A]``."""
        decided, grasps = self._draw(leaves, seed, argmax)
        actions = self.layout.join(decided.reshape(-1, self.layout.continuous), grasps)
        array: npt.NDArray[np.float32] = actions.float().cpu().numpy()
        return array.reshape(len(decided), self.config.chunk, -1)

    def _draw(self, leaves: Mapping[str, Tensor], seed: int | None, argmax: bool) -> tuple[Tensor, Tensor | None]:
        """What the actor decides, ``[B, numbers]``, and what the grippers do."""
        settings, choices = self.config.rlpd, self.config.rlpd.samples
        # what the critics keep for their passes may not be made in inference mode, for updates use it too
        with torch.no_grad() if choices > 1 or self._disagrees else torch.inference_mode():
            z = self.inputs.encode(self.encoder, leaves)
            mean, std = (self.targets if argmax and "actor" in self.targets else self.networks)["actor"](z)
            if choices > 1:
                source = generator(seed or 0) if argmax or seed is not None else self.generator
                noise = torch.randn(choices, *mean.shape, generator=source).to(mean.device)
                if argmax:
                    noise[0] = 0
                drawn = self._action(mean + std * noise, z)
                decided = best_of(self.networks["critic"], self.head, z, drawn, settings.actor_q)
            else:
                source = self.generator if seed is None else generator(seed)
                plain = 0.0 if argmax else std * torch.randn(mean.shape, generator=source).to(mean.device)
                decided = self._action(mean + plain, z)
            if self._disagrees and not argmax:
                self.disagreement = disagreement(self.networks["critic"], self.head, z, decided)
            grasps = self.networks["grasp_critic"](z).argmax(dim=1) if self.layout.outcomes else None
        return decided, grasps

    def measure_disagreement(self, samples: int = 4) -> None:
        """The standard deviation of Q over the critics, of the action or chunk that was decided last."""
        self._disagrees = True

    def begin(self, instruction: str = "", paced: bool = False) -> None:
        self._plan.begin()

    def acted(self, source: Source, executed: npt.ArrayLike | None) -> dict[str, object]:
        return self._plan.acted(source) if self.config.chunk > 1 else {}

    def _action(self, raw: Tensor, z: Tensor | None = None) -> Tensor:
        """From a number of the actor's Gaussian; in the states `z`, beside a frozen policy's."""
        own = torch.tanh(raw) if self.squashed else raw.clamp(-1, 1)
        return own if self.space is None or z is None else self.space.compose(z, own)

    # Learning

    def update(
        self, batch: Mapping[str, object], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[Agent, dict[str, float]]:
        """One gradient step of each network named; by default of all. Returns the agent itself, and what to log.

        `details` adds figures for each source of rows: ``q/online``,
        ``td_error/demo``, ``gradient_share/human`` and so on.
        """
        if not self.squashed:
            raise ConfigError(
                "update: this agent was made with squashed=False, to imitate. Call "
                "imitate(batch), or make one without it."
            )
        known = self.optimizers.keys() & set(TRAINED)
        which = frozenset(known if networks_to_update is None else networks_to_update)
        if unknown := which - known:
            raise UnknownNameError("network to update", sorted(unknown)[0], known)
        which = self._with_resets(which)
        if not which:  # the actor's update alone, and it holds still after a reset
            self.updates += 1
            return self, {}
        now, then = self.inputs.cropped(batch, "observations"), self.inputs.cropped(batch, "next_observations")
        learns = "critic" in which and bool(self.encoder.trained_by_critic())
        with torch.set_grad_enabled(learns):
            z = self.inputs.encode(
                self.encoder, now, self.generator if learns else None, trunk=self.config.encoder.training == "critic"
            )
        with torch.no_grad():
            next_z = self.inputs.encode(self.encoder, then)
            z, next_z = self.inputs.blurred(z), self.inputs.blurred(next_z)
            target_z = self.inputs.encode(self.targets["encoder"], then) if "encoder" in self.targets else next_z
        rows = self._rows(batch, z, next_z, target_z, details)
        settings = self.config.rlpd
        if settings.conservative and 0 < settings.conservative_updates <= self.updates:
            settings = replace(settings, conservative=0.0)
        info = self.algorithm.update(
            self._trained, rows, settings, self.generator, which, self.actor_updates, self.target_entropy
        )
        self.updates += 1
        self.actor_updates += "actor" in which
        return self, info

    def _with_resets(self, which: frozenset[str]) -> frozenset[str]:
        """With agent.critic.reset_period, resets the critics where it is time. Returns the networks to update: after
        a reset, not the actor and the temperature for a while."""
        how = self.config.critic
        if not how.reset_period or self.updates < how.reset_period:
            return which
        since = self.updates % how.reset_period
        if since == 0:
            fresh, critics = self._make_critics().to(self.device), self.networks["critic"]
            rlpd.polyak(critics, fresh, 1.0)
            rlpd.polyak(self.targets["critic"], fresh, 1.0)
            self.optimizers["critic"].forget(critics.parameters())
        return which - {"actor", "temperature"} if since < how.reset_hold else which

    def imitate(self, batch: Mapping[str, object], encoder: bool = False) -> dict[str, float]:
        """One step of behavior cloning on all rows of a batch, or on those that are ``imitated`` where it has such a
        column: of the actor (and the grasp critic), and of the encoder if asked.

        With `encoder` the encoder moves even if updates leave it frozen. Where the config has `pretrain_updates`
        this is pretraining, with its own crop and learning rate; else it is behavior cloning, at
        `rlpd.learning_rate` and with `rlpd.random_crop`.
        """
        settings, how = self.config.rlpd, self.config.encoder
        pretrains = encoder and how.pretrain_updates > 0
        leaves = self.inputs.cropped(batch, "observations", how.pretrain_crop if pretrains else None)
        with torch.set_grad_enabled(encoder):
            z = self.inputs.encode(
                self.encoder, leaves, self.generator if encoder else None, trunk=not self.encoder.trunk_rests
            )
        z = z if encoder else self.inputs.blurred(z)
        continuous, grasps, _, parts = self._actions(batch)
        continuous = continuous if self.space is None else self.space.own(z.detach(), continuous)
        shown = self.inputs.column(batch, "imitated").float() if "imitated" in batch else None

        def average(rows: Tensor) -> Tensor:
            return rows.mean() if shown is None else (rows * shown).sum() / shown.sum().clamp(min=1)

        mean, std = self.networks["actor"](z)
        if parts is None:
            losses = imitation_loss(settings.imitation_loss, mean, std, continuous, self.squashed)
            squares = (self._action(mean) - continuous).square().mean(1)
        else:
            losses, squares = (
                chunk_imitation_loss(kind, mean, std, continuous, parts, self.squashed)
                for kind in (settings.imitation_loss, "mse")
            )
        loss = average(losses)
        info = {"imitation_loss": loss.item(), "mse": average(squares).item()}
        if encoder and "forecast" in self.networks:
            future = self.inputs.normalized_future(self.inputs.column(batch, "future"))
            foreseen = (self.networks["forecast"](z) - future).square().mean()
            info["forecast_loss"] = foreseen.item()
            loss = loss + how.pretrain_predict_weight * foreseen
        losses = {"imitation" if encoder else "actor": loss}
        if grasps is not None:
            q = self.networks["grasp_critic"](z.detach())
            losses["grasp_critic"] = average(grasp_margin_loss(q, grasps, settings.grasp_margin))
            accuracy = average((q.argmax(dim=1) == grasps).float()).item()
            info |= {"grasp_loss": losses["grasp_critic"].item(), "grasp_accuracy": accuracy}
        gradients = {name: torch.autograd.grad(each, self.optimizers[name].parameters) for name, each in losses.items()}
        rlpd.check_finite(info, gradients)
        if pretrains:
            factor = learning_rate_factor((self.imitations + 1) / how.pretrain_updates, PRETRAIN_WARMUP)
            self.optimizers["imitation"].learning_rate = how.pretrain_learning_rate * factor
        for name, each in gradients.items():
            self.optimizers[name].step(each)
        for name in ("encoder", "actor", "grasp_critic"):
            if name in self.targets and (encoder or name != "encoder"):
                share = settings.actor_average if name == "actor" and not encoder else 1.0
                rlpd.polyak(self.targets[name], self.networks[name], share)
        self.imitations += 1
        return info

    def health(self, batch: Mapping[str, object]) -> dict[str, float]:
        """``dead_relus``, ``effective_rank`` (of the critics' features; of an agent that imitates, the actor's), and
        ``policy_kl``: how far each number of the policy has moved since the last call."""
        watch = LayerWatch(self.config.rlpd.critics)
        with torch.no_grad(), watch:
            z = self.inputs.encode(self.encoder, self.inputs.leaves(found(batch, "observations")))
            now = self.networks["actor"](z)
            if self.squashed:
                self.networks["critic"](z, self._actions(batch)[0])
        return watch.figures() | self._looks.moved(self.networks["actor"], z, now)

    def fit_proprio(self, observations: Tree) -> None:
        """Computes mean and deviation of proprioception from these observations ``[N,
        ...]``, if `normalize_proprio` is set."""
        if not self.config.normalize_proprio or not self.proprio:
            return
        given, normal, floors = (
            flatten(observations),
            cast(ProprioNormalizer, self.networks["proprio"]),
            self.config.proprio_floor,
        )
        columns = [
            self.inputs.seen(path, self.inputs.tensor(found(given, path), path)).double() for path in self.proprio
        ]
        least = torch.cat([torch.full((self.inputs.sizes[path],), floors.get(path, FLOOR)) for path in self.proprio])
        whole = torch.cat(columns, dim=1)
        with torch.no_grad():
            normal.mean.copy_(whole.mean(0))
            normal.scale.copy_(torch.maximum(whole.std(0, correction=0), least.to(whole)))

    @property
    def shifts(self) -> int:
        """The number of shifts of each image of which `states` are kept; `kept_shifts` of a frozen encoder."""
        return self.inputs.shifts

    def trunk_features(self, images: Tree, shift: int = 0) -> npt.NDArray[np.float32]:
        """``[N, features of all cameras]`` of images ``{path: uint8 [N, ...]}``, to be given as "features" in batches.

        An image's features are the same, bit for bit, whatever other images are in the call.
        """
        return self.inputs.trunk_features(images, shift)

    def states(self, observations: Tree, shift: int = 0) -> npt.NDArray[np.float32]:
        """``z [N, width]``, all that the networks see of observations ``{path: [N, ...]}``, given as "z" in batches.
        `shift`: the number of one of the `shifts` of images; 0: the images as they are.

        It is the same, bit for bit, whatever other observations are in the call.
        """
        leaves = {path: self.inputs.tensor(found(observations, path), path) for path in self.proprio}
        with torch.no_grad():
            z = self.inputs.encode(
                self.encoder,
                {FEATURES: self.inputs.tensor(self.trunk_features(observations, shift), FEATURES), **leaves},
            )
        return np.asarray(z.cpu().numpy())

    # Keeping

    def acting_state(self, slow: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """All that an actor needs, by name: copies, which later updates leave alone. `slow`: with the slow copy of the
        actor, which is what `sample_actions` with `argmax` uses, where there is one."""
        return {key: tensor.numpy() for key, tensor in copied(self._acting(slow)).items()}

    def load_acting_state(self, state: Mapping[str, object]) -> None:
        """Take over what `acting_state` of an agent of the same making returned. The
        slow copy of the actor is the same then."""
        load(self._acting(), state, "these weights are")
        if "actor" in self.targets:
            rlpd.polyak(self.targets["actor"], self.networks["actor"], 1.0)

    def _acting(self, slow: bool = False) -> dict[str, Tensor]:
        names = [*ACTING, *(["critic"] if self.config.rlpd.samples > 1 or self._disagrees else [])]
        networks = {name: self.networks[name] for name in names if name in self.networks}
        networks |= {"actor": self.targets["actor"]} if slow and "actor" in self.targets else {}
        return {f"{name}.{key}": tensor for name, net in networks.items() for key, tensor in net.state_dict().items()}

    def state_dict(self) -> dict[str, object]:
        """Everything: an agent that loads it goes on bit for bit. Tensors, numbers and text only; copies."""
        kept = {
            part: {name: copied(tensors) for name, tensors in owners.items()} for part, owners in self._owners().items()
        }
        numbers = {
            "updates": self.updates,
            "actor_updates": self.actor_updates,
            "imitations": self.imitations,
            "squashed": self.squashed,
            **self._value_range(),
        }
        own = {"algorithm": state} if (state := self.algorithm.state_dict()) else {}
        return {**kept, "generator": self.generator.get_state(), **numbers, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of an agent of the same making returned."""
        if (squashed := bool(state.get("squashed", True))) != self.squashed:
            kinds = {True: "the tanh-Gaussian of reinforcement learning", False: "the plain Gaussian of imitation"}
            cure = (
                "Behavior cloning of an older version of Hilt had the former; train it again."
                if squashed
                else "Check algorithm=."
            )
            raise SchemaError(
                f"this state is of an actor with {kinds[squashed]}, and this agent's has {kinds[self.squashed]}. {cure}"
            )
        check_range(self._value_range(), state)
        ours, theirs = flatten(self._owners()), flatten({part: found(state, part) for part in self._owners()})
        load(ours, theirs, "this state is")
        self.generator.set_state(found(state, "generator"))
        if own := state.get("algorithm"):
            self.algorithm.load_state_dict(own)
        self.updates, self.actor_updates, self.imitations = (
            int(found(state, key)) for key in ("updates", "actor_updates", "imitations")
        )

    def _value_range(self) -> dict[str, float]:
        """The range of categorical critics: their outputs mean nothing without it."""
        head = self.head
        return {"lowest_value": head.low, "highest_value": head.high} if isinstance(head, CategoricalHead) else {}

    def begin_anew(self) -> None:
        """It is as it was made: it has learned nothing."""
        made = type(self)(
            self.shapes, self.images, list(self.proprio), self.layout.actions, self.config, self.seed, self.squashed
        )
        self.load_state_dict(made.state_dict())
        self.algorithm.setup(self._trained, self.width, self.moving, self.seed)

    def _owners(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Every tensor that learning changes."""
        return {
            "networks": {name: net.state_dict() for name, net in self.networks.items()},
            "targets": {name: net.state_dict() for name, net in self.targets.items()},
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
        }

    def _rows(
        self, batch: Mapping[str, Any], z: Tensor, next_z: Tensor, target_z: Tensor, details: bool
    ) -> rlpd.Transitions:
        continuous, grasps, taken, shown = self._actions(batch)
        masks = self.inputs.column(batch, "masks").float()
        optional = {
            name: self.inputs.column(batch, name)
            for name in ("n_steps", "grasp_penalty", "demo", "source", "returns")
            if name in batch
        }
        demo = optional["demo"].bool() if "demo" in optional else None
        groups: dict[str, Tensor] = {}
        if details and demo is not None:
            groups |= {"online": ~demo, "demo": demo}
        if details and "source" in optional:
            source = optional["source"]
            groups["human"] = (source if taken is None else source[:, 0]) == Source.HUMAN
        valid = None
        if taken is not None:
            valid = chunks.valid(optional["n_steps"], masks, self.config.chunk)
            continuous = chunks.filled(continuous, taken, self.generator)
        return rlpd.Transitions(
            z=z,
            next_z=next_z,
            target_z=target_z,
            actions=continuous,
            rewards=self.inputs.column(batch, "rewards").float(),
            masks=masks,
            n_steps=optional.get("n_steps"),
            demo=demo,
            groups=groups,
            grasps=grasps,
            grasp_penalty=optional.get("grasp_penalty"),
            returns=optional.get("returns"),
            valid=valid,
            taken=taken,
            shown=shown,
        )

    def _actions(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The continuous numbers of the actions, what the grippers did, and, of chunks, which of the actions were
        executed ``[B, h]``, and which of these by the one who made the first."""
        actions, steps = self.inputs.column(batch, "actions"), self.config.chunk
        if steps == 1:
            return *self.layout.split(actions), None, None
        if actions.ndim != 3 or actions.shape[1:] != (steps, self.layout.actions):
            raise SchemaError(
                f"actions: expected chunks [B, {steps}, {self.layout.actions}], as agent.chunk={steps} says, "
                f"got {tuple(actions.shape)}."
            )
        continuous, _ = self.layout.split(actions.flatten(0, 1))
        taken = chunks.executed(self.inputs.column(batch, "n_steps"), steps)
        source = self.inputs.column(batch, "source") if "source" in batch else None
        shown = taken if source is None else chunks.uninterrupted(taken, source)
        return continuous.reshape(len(actions), -1), None, taken, shown
