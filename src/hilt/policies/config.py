"""What an agent is told. Without torch, so that a command line that only reads settings is quick."""

from __future__ import annotations

from dataclasses import dataclass, field

from hilt.algos.config import Rlpd

SETUP_MODES = (
    "single-arm-fixed-gripper",
    "dual-arm-fixed-gripper",
    "single-arm-learned-gripper",
    "dual-arm-learned-gripper",
)
"""HIL-SERL's names; with a learned gripper a critic of its own decides when to close it"""


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
    bfloat16: bool = False
    """Convolutions with 8 bits of precision: 1.5 to 2 times as fast on processors that have them"""
    pretrain_updates: int = 0
    """Updates by imitation of the demonstrations before anything else"""
    pretrain_crop: int = 2
    """Images are moved by up to so many pixels in these"""
    pretrain_batch: int = 128
    """Steps in each of these"""
    pretrain_learning_rate: float = 1e-3
    """Of these"""


@dataclass
class AgentConfig:
    """The policy, and how it learns."""

    setup_mode: str = "single-arm-fixed-gripper"
    """One arm or two ("dual-arm"), and whether a critic of its own works the gripper ("learned")"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """How images become numbers"""
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the layers of actor and critics"""
    activation: str = "tanh"
    """Between them: "tanh", as HIL-SERL has it, or "relu"; LayerNorm comes before it"""
    device: str = "cpu"
    """Where it computes: a name of torch's, such as cuda:0"""
    rlpd: Rlpd = field(default_factory=Rlpd)
    """How it learns"""
