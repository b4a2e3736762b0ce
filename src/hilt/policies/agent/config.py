"""The settings of an agent. This module does not import torch, so that commands that only read settings are fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hilt.algos.config import Rlpd
from hilt.algos.config import check as check_rlpd
from hilt.core.errors import ConfigError, Problems, UnknownNameError
from hilt.core.names import ExtensionPoint
from hilt.policies.precision import check_precision, of_former_name

SETUP_MODES = (
    "single-arm-fixed-gripper",
    "dual-arm-fixed-gripper",
    "single-arm-learned-gripper",
    "dual-arm-learned-gripper",
)
"""HIL-SERL's names; with a learned gripper a critic of its own decides when to close it"""

KINDS, TRAININGS, ACTIVATIONS = ("small", "resnet10", "none"), ("critic", "head", "frozen"), ("tanh", "relu")
"""What encoders there are, what of one is trained, and what lies between layers"""


AGENTS = ExtensionPoint("agent", "hilt.agents", {"actor_critic": "hilt.policies.agent.agent:Agent"})


@dataclass
class EncoderConfig:
    """How images become numbers."""

    kind: str = "small"
    """"small" (three convolutions per camera), "resnet10" (HIL-SERL's), or "none": images are not looked at"""
    weights: str = ""
    """A file that the trunk of "resnet10" begins with, such as HIL-SERL's resnet10_params.pkl; empty: random"""
    training: str = "critic"
    """What the critic's loss trains: "critic": all of it; "head": what comes after the trunk; "frozen": nothing"""
    features: int = 64
    """Numbers that each camera becomes"""
    precision: str = "auto"
    """Of the convolutions: "float32", "bfloat16" (faster on processors that have it, far slower on others), or "auto": whichever is
    faster here, decided when a run begins"""
    pretrain_updates: int = 0
    """Number of pretraining updates, which imitate the demonstrations before anything else"""
    pretrain_crop: int = 2
    """Random shift of the images in pretraining, in pixels at most"""
    pretrain_batch: int = 128
    """Batch size of pretraining, in steps"""
    pretrain_learning_rate: float = 1e-3
    """Learning rate of pretraining: it rises over the first twentieth of the updates and falls to 0 along a cosine"""
    pretrain_predict: str = ""
    """A proprioception, such as state/tcp_pose, that pretraining predicts too: at the gripper's next command, and at the end"""
    pretrain_predict_weight: float = 1.0
    """Weight of the prediction loss beside that of imitation, in pretraining"""

    of_former_names = staticmethod(of_former_name)


@dataclass
class AgentConfig:
    """The policy, and how it learns."""

    setup_mode: str = "single-arm-fixed-gripper"
    """One arm or two ("dual-arm"), and whether a critic of its own works the gripper ("learned")"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """How images become numbers"""
    action_indices: list[int] = field(default_factory=list)
    """Which numbers of an action the policy moves, the others being 0; empty: all"""
    pose_keys: list[str] = field(default_factory=list)
    """Proprioceptions that are poses, position and quaternion (x, y, z, w): two columns of the rotation are seen instead of the latter"""
    normalize_proprio: bool = False
    """Proprioception less the mean of the demonstrations, by their deviation, and within 5 of these"""
    proprio_floor: dict[str, float] = field(default_factory=dict)
    """The least deviation that one such as state/tcp_force is divided by, in its unit; 0.02 where none is given"""
    proprio_width: int = 64
    """Numbers that proprioception becomes beside those of the images; 0: it is taken as it is"""
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the layers of actor and critics"""
    activation: str = "tanh"
    """Between them: "tanh", as HIL-SERL has it, or "relu"; LayerNorm comes before it"""
    actor_scale: float = 1.0
    """The actor's last layer begins at this share of its usual size"""
    initial_std: float = 1.0
    """The actor's standard deviation at the start, about"""
    std_range: list[float] = field(default_factory=lambda: [1e-5, 5.0])
    """The least and the largest it may have"""
    device: str = "cpu"
    """Where it computes: a name of torch's, such as cuda:0"""
    rlpd: Rlpd = field(default_factory=Rlpd)
    """How it learns"""
    kind: str = "actor_critic"
    """"actor_critic": an encoder, an actor and critics, as the settings above say; or another agent by name or module:Class, which may use
    some of them"""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of another agent's own"""


def check(config: AgentConfig) -> None:
    """Refuse what cannot work, all of it at once."""
    problems = Problems()
    problems.check(check_rlpd, config.rlpd)
    problems.check(check_encoder, config.encoder)
    problems.check(_check_own, config)
    problems.check(AGENTS.check, config.kind)
    problems.report()


def _check_own(config: AgentConfig) -> None:
    limits = config.std_range
    for name, fits, wanted in (
        ("hidden", bool(config.hidden) and min(config.hidden) > 0, "at least one width above 0"),
        ("proprio_width", config.proprio_width >= 0, "0 or more"),
        ("proprio_floor", all(floor > 0 for floor in config.proprio_floor.values()), "deviations above 0"),
        ("actor_scale", config.actor_scale > 0, "above 0"),
        ("std_range", len(limits) == 2 and 0 < limits[0] < limits[1], "[least, largest], both above 0"),
        ("initial_std", config.initial_std > 0, "above 0"),
    ):
        if not fits:
            raise ConfigError(f"agent.{name} is {getattr(config, name)}; expected {wanted}.")
    for what, given, known in (("setup_mode", config.setup_mode, SETUP_MODES), ("activation", config.activation, ACTIVATIONS)):
        if given not in known:
            raise UnknownNameError(what, given, known)


def check_encoder(config: EncoderConfig) -> None:
    """The same for an encoder alone."""
    for name, given, known in (("encoder", config.kind, KINDS), ("encoder training", config.training, TRAININGS)):
        if given not in known:
            raise UnknownNameError(name, given, known)
    check_precision(config.precision, "encoder precision")
    if config.features < 1:
        raise ConfigError(f"encoder.features is {config.features}; a camera becomes at least one number.")
    if config.weights and config.kind != "resnet10":
        raise ConfigError(f"encoder.weights is {config.weights!r}, but only kind=resnet10 reads a file; kind is {config.kind!r}.")
    if config.kind == "resnet10" and config.training != "critic" and not config.weights and not config.pretrain_updates:
        raise ConfigError(f"encoder.training={config.training} keeps a trunk that nothing has trained; set weights or pretrain_updates.")
