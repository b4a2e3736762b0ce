"""The settings of an agent. This module does not import torch, so that commands that only read settings are fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hilt.algos.config import CriticConfig, Rlpd, value_range
from hilt.core.errors import ConfigError
from hilt.core.names import ExtensionPoint
from hilt.core.validate import Need, setting
from hilt.policies.precision import PRECISIONS, of_former_name

SETUP_MODES = (
    "single-arm-fixed-gripper",
    "dual-arm-fixed-gripper",
    "single-arm-learned-gripper",
    "dual-arm-learned-gripper",
)
"""HIL-SERL's names; with a learned gripper a critic of its own decides when to close it"""

KINDS, TRAININGS, ACTIVATIONS = ("small", "resnet10", "none"), ("critic", "head", "frozen"), ("tanh", "relu")
"""What encoders there are, what of one is trained, and what lies between layers"""

CHUNK, CHUNK_INDEX = "chunk", "chunk_index"
"""Columns of steps: which chunk of the episode the action is of, and its place in it, -1 where it is of none"""

FROZEN_VLA = "frozen_vla"
"""The name of an agent beside a frozen policy, and of the policy that both are in a folder"""
AGENTS = ExtensionPoint(
    "agent",
    "hilt.agents",
    {
        "actor_critic": "hilt.policies.agent.agent:Agent",
        "vla": "hilt.hil.vla_agent:VlaAgent",
        FROZEN_VLA: "hilt.policies.frozen.noise_agent:FrozenVlaAgent",
    },
)
_IMAGES = Need("an encoder ({here}kind=small or resnet10)", lambda c: c.kind != "none")
_PRETRAINS = Need("{here}pretrain_updates", lambda c: c.pretrain_updates > 0)
_RESTS = Need("{here}training=frozen", lambda c: c.training == "frozen")


@dataclass
class EncoderConfig:
    """How images become numbers."""

    kind: str = setting("small", choices=KINDS, noun="encoder")
    """"small" (three convolutions per camera), "resnet10" (HIL-SERL's), or "none": images are not looked at"""
    weights: str = ""
    """A file that the trunk of "resnet10" begins with, such as HIL-SERL's resnet10_params.pkl; empty: random"""
    training: str = setting("critic", choices=TRAININGS, noun="encoder training", needs=_IMAGES)
    """What the critic's loss trains: "critic": all of it; "head": what comes after the trunk; "frozen": nothing"""
    features: int = setting(64, minimum=1, needs=_IMAGES)
    """Numbers that each camera becomes"""
    precision: str = setting("auto", choices=PRECISIONS, noun="encoder precision", needs=_IMAGES)
    """Of the convolutions: "float32", "bfloat16" (faster on processors that have it, far slower on others), or "auto":
    whichever is faster here, decided when a run begins"""
    pretrain_updates: int = setting(0, minimum=0)
    """Number of pretraining updates, which imitate the demonstrations before anything else"""
    pretrain_crop: int = setting(2, minimum=0, off=0, needs=(_IMAGES, _PRETRAINS))
    """Random shift of the images in pretraining, in pixels at most"""
    kept_shifts: int = setting(1, minimum=1, needs=(_IMAGES, _RESTS, _PRETRAINS))
    """With training=frozen: in how many shifts of each image its features are kept, by at most pretrain_crop pixels;
    each row of a batch has those of one of them. 1: those of the image as it is"""
    pretrain_batch: int = setting(128, minimum=1, needs=_PRETRAINS)
    """Batch size of pretraining, in steps"""
    pretrain_learning_rate: float = setting(1e-3, above=0, needs=_PRETRAINS)
    """Learning rate of pretraining: it rises over the first twentieth of the updates and falls to 0 along a cosine"""
    pretrain_predict: str = setting("", needs=(_IMAGES, _PRETRAINS))
    """A proprioception, such as state/tcp_pose, that pretraining predicts too: at
    the gripper's next command, and at the end"""
    pretrain_predict_weight: float = setting(
        1.0, minimum=0, needs=Need("{here}pretrain_predict", lambda c: c.pretrain_predict)
    )
    """Weight of the prediction loss beside that of imitation, in pretraining"""

    of_former_names = staticmethod(of_former_name)

    def conflicts(self, here: str) -> Iterator[str]:
        if self.weights and self.kind != "resnet10":
            yield f"{here}weights is {self.weights!r}, but only kind=resnet10 reads a file; kind is {self.kind!r}."
        if self.kept_shifts > (there := (2 * self.pretrain_crop + 1) ** 2):
            yield (
                f"{here}kept_shifts={self.kept_shifts} with {here}pretrain_crop={self.pretrain_crop}, which has "
                f"{there} shifts at most. Give a larger {here}pretrain_crop, or fewer."
            )
        if self.kind == "resnet10" and self.training != "critic" and not self.weights and not self.pretrain_updates:
            yield (
                f"{here}training={self.training} keeps a trunk that nothing has trained; set {here}weights "
                f"or {here}pretrain_updates."
            )


_NORMALISED = Need("{here}normalize_proprio=true", lambda c: c.normalize_proprio)
_LEARNS_GRIPPER = Need(
    "{here}setup_mode=...-learned-gripper", lambda c: c.setup_mode.endswith("learned-gripper"), of=("grasp_margin",)
)
_LOOKS = Need(
    "an encoder ({here}encoder.kind=small or resnet10)", lambda c: c.encoder.kind != "none", of=("random_crop",)
)
_TRAINED = Need("{here}encoder.training=critic or head", lambda c: c.encoder.training != "frozen", of=("random_crop",))
_FROZEN = Need(
    "{here}encoder.training=frozen",
    lambda c: c.encoder.kind != "none" and c.encoder.training == "frozen",
    of=("feature_noise",),
)


@dataclass
class AgentConfig:
    """The policy, and how it learns."""

    setup_mode: str = setting("single-arm-fixed-gripper", choices=SETUP_MODES)
    """One arm or two ("dual-arm"), and whether a critic of its own works the gripper ("learned")"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """How images become numbers"""
    action_indices: list[int] = field(default_factory=list)
    """Which numbers of an action the policy moves, the others being 0; empty: all"""
    pose_keys: list[str] = field(default_factory=list)
    """Proprioceptions that are poses, position and quaternion (x, y, z, w): two columns of
    the rotation are seen instead of the latter"""
    normalize_proprio: bool = False
    """Proprioception less the mean of the demonstrations, by their deviation, and within 5 of these"""
    proprio_floor: dict[str, float] = setting(factory=dict, above=0, needs=_NORMALISED)
    """The least deviation that one such as state/tcp_force is divided by, in its unit; 0.02 where none is given"""
    proprio_width: int = setting(64, minimum=0)
    """Numbers that proprioception becomes beside those of the images; 0: it is taken as it is"""
    hidden: list[int] = setting(factory=lambda: [256, 256], filled=True, minimum=1)
    """Widths of the layers of actor and critics"""
    activation: str = setting("tanh", choices=ACTIVATIONS)
    """Between them: "tanh", as HIL-SERL has it, or "relu"; LayerNorm comes before it"""
    actor_scale: float = setting(1.0, above=0)
    """The actor's last layer begins at this share of its usual size"""
    initial_std: float = setting(1.0, above=0)
    """The actor's standard deviation at the start, about"""
    std_range: list[float] = setting(factory=lambda: [1e-5, 5.0], length=2, above=0, ascending=True)
    """The least and the largest it may have"""
    device: str = "cpu"
    """Where it computes: a name of torch's, such as cuda:0"""
    rlpd: Rlpd = setting(factory=Rlpd, needs=(_LEARNS_GRIPPER, _LOOKS, _TRAINED, _FROZEN))
    """How it learns"""
    chunk: int = setting(1, minimum=1)
    """The number of actions that the policy decides at once, and executes one after the other without looking; its
    critics judge them together, with the rewards of all of them; 1: it looks before each"""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """What its critics are like"""
    kind: str = setting("actor_critic", known=AGENTS.check)
    """"actor_critic": an encoder, an actor and critics, as the settings above say; "vla": a vision-language-action
    policy, by imitation; "frozen_vla": an actor and critics beside such a policy, which stays as it is; or another
    agent by name or module:Class, which may use some of them"""
    options: dict[str, Any] = setting(
        factory=dict, needs=Need("another agent, {here}kind=module:Class", lambda c: c.kind != "actor_critic")
    )
    """Settings of another agent's own"""

    def conflicts(self, here: str) -> Iterator[str]:
        if self.chunk > 1 and self.setup_mode.endswith("learned-gripper"):
            yield (
                f"{here}chunk={self.chunk} with {here}setup_mode={self.setup_mode}: the critic of a learned gripper "
                f"judges one move. Give {here}chunk=1, or a setup_mode with a fixed gripper, whose last number is an "
                "action like the others."
            )
        if self.kind == FROZEN_VLA and self.setup_mode.endswith("learned-gripper"):
            yield (
                f"{here}setup_mode={self.setup_mode} with {here}kind={self.kind}: the frozen policy moves the gripper "
                "as it moves the arm. Give a setup_mode with a fixed gripper."
            )
        if self.kind == FROZEN_VLA and self.rlpd.conservative:
            yield (
                f"{here}rlpd.conservative={self.rlpd.conservative:g} with {here}kind={self.kind}: its term needs the "
                "density of actions, and the actor has that of its own numbers. Leave it out."
            )
        if self.kind == FROZEN_VLA and self.options.get("space") == "noise":
            yield from self._conflicts_of_noise(here)
        if self.critic.head != "scalar":
            try:
                value_range(self.critic, self.rlpd, here)
            except ConfigError as error:
                yield str(error)

    def _conflicts_of_noise(self, here: str) -> Iterator[str]:
        """Yields what an agent cannot do that decides the noise of a frozen policy's flow."""
        rlpd = self.rlpd
        if rlpd.imitation_weight or rlpd.actor != "soft" or self.encoder.pretrain_updates:
            yield (
                f"{here}options.space=noise with imitation: the noise of an action is not known, and cannot be "
                f"imitated. Leave {here}rlpd.imitation_weight, actor and "
                f"{here}encoder.pretrain_updates out."
            )
        if self.normalize_proprio:
            yield (
                f"{here}options.space=noise with {here}normalize_proprio=true: the flow takes features as they are. "
                "Leave it out."
            )
