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
    """Of these: it rises over the first twentieth of them and falls to 0 along a cosine; as it is where pretrain_updates is 0"""
    pretrain_predict: str = ""
    """A proprioception, such as state/tcp_pose, that is to be foreseen in these: at the gripper's next command, and at the end"""
    pretrain_predict_weight: float = 1.0
    """What foreseeing counts beside imitating"""


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
    normalise_proprio: bool = False
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
