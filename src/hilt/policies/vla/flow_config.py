"""The settings that policies with a flow have in common, pi0's and SmolVLA's; a
folder of theirs has them in its config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hilt.core.validate import Need, check, setting
from hilt.policies.float8 import ACTS_IN_FLOAT8, FIRST_LAYER, ROLLOUT_PRECISIONS
from hilt.policies.precision import BFLOAT16, FLOAT32
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.normalize import KINDS

if TYPE_CHECKING:
    from typing_extensions import Self

IMAGES = ("full_image", "wrist_image", "right_wrist_image")
"""The default names of image slots in observations."""
HEADS = ("value_head", "noise_head")
"""What RL adds to a published model."""
VALUES = ("", "actions", "prefix")
TRAINED = ("all", "no_vision", "expert")
ACTING = ("auto", "eager", "captured", "compiled", "fused")
LEARNING = ("auto", "eager", "compiled")


@dataclass(frozen=True, kw_only=True)
class FlowPolicyConfig(ABC):
    """What all of these policies have."""

    action_dim: int = setting(7, minimum=1)
    """Numbers in one action of the robot"""
    state_dim: int = setting(8, minimum=1)
    """Numbers in the state of the robot"""
    chunk_size: int = 50
    """Actions that are predicted"""
    n_action_steps: int = setting(50, minimum=1)
    """Actions that are answered, from the first on; log-probabilities are of these"""
    max_action_dim: int = 32
    """Numbers in an action of the model; beyond the robot's they are 0"""
    max_state_dim: int = 32
    """Numbers in a state of the model"""
    tokenizer_max_length: int = 48
    """Words of a prompt; longer ones are cut, as in training"""
    min_period: float = 4e-3
    """Of the embedding of the flow's time"""
    max_period: float = 4.0
    """Of the embedding of the flow's time"""
    state_normalization: str = setting("mean_std", choices=("", *KINDS))
    """"mean_std", "q99", "minmax", or "" for none"""
    action_normalization: str = setting("mean_std", choices=("", *KINDS))
    """"mean_std", "q99", "minmax", or "" for none"""
    images: tuple[str, ...] = IMAGES
    """Pictures of an observation, in the order of the model's slots. One that an observation has not is masked"""
    flow: Flow = field(default_factory=Flow)
    """How noise becomes actions"""
    value: str = setting("", choices=VALUES)
    """What a value head looks at: "actions" (the expert's output, as in pi0), "prefix" (the
    language model's, as in pi0.5), "" for none"""
    detach_value: bool = setting(False, needs=Need("a value head, value=actions or value=prefix", lambda c: c.value))
    """The value's gradient stops at its head"""
    trained: str = setting("all", choices=TRAINED)
    """"all" parameters, all but those of the tower for pictures ("no_vision"), or only
    what is not the language model ("expert")"""
    gradient_checkpointing: float = setting(0.0, minimum=0, maximum=1)
    """Share of the layers of each stack that are computed once more for the gradient instead of being remembered: less
    memory. True is 1, False is 0; a run of post-training may have "auto" """
    acting: str = setting("auto", choices=ACTING)
    """How `act` goes through its layers: "eager"; "captured" as CUDA graphs, one for each number of rows and length of
    prompt; "compiled" and captured, whose first call takes a minute; "fused", the same with kernels of our own where
    there are few rows; "auto": fused on CUDA, eager elsewhere"""
    learning: str = setting("auto", choices=LEARNING)
    """How `evaluate` and `supervised_loss` go through them: "eager"; "compiled", whose first call takes a minute, and
    the vision tower computed once more in the backward pass; "auto": compiled on CUDA, eager elsewhere"""
    compute: str = setting("float32", choices=(FLOAT32, BFLOAT16))
    """In which precision the layers multiply where weights are float32, as those are that a run trains. In "bfloat16"
    they take half of the time or less on GPUs; projections beside the layers, norms, heads and losses stay float32"""
    rollout_precision: str = setting("same", choices=ROLLOUT_PRECISIONS)
    """Of the language model's products while it acts: "same" as it learns; "fp8" on GPUs that have it; "fp8_emulated",
    its numbers on any device, slower. A run corrects for the difference: algorithm.recompute_log_prob=true"""
    fp8_first_layer: int = setting(FIRST_LAYER, minimum=0, needs=ACTS_IN_FLOAT8)
    """The first layer of the language model that acts in float8. Errors of early layers grow in all later ones: a
    higher number is nearer to the policy that learns, and slower"""
    augment: bool = False
    """In imitation pictures are cropped, turned and in other colors, at random, as openpi does; never when it acts"""

    max_delay: int = setting(0, minimum=0)
    """In imitation up to this many actions at the start of a chunk are given, at random, so that an answer can continue
    what is executed meanwhile; 0: none, and `act` is guided toward a prefix instead"""

    def __post_init__(self) -> None:
        if isinstance(self.gradient_checkpointing, bool):  # as it was before there were shares
            object.__setattr__(self, "gradient_checkpointing", float(self.gradient_checkpointing))
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        for less, more in (
            ("n_action_steps", "chunk_size"),
            ("action_dim", "max_action_dim"),
            ("state_dim", "max_state_dim"),
        ):
            if getattr(self, less) > getattr(self, more):
                yield (
                    f"{here}{less} is {getattr(self, less)} and {more} is {getattr(self, more)}: it is from 1 to that."
                )

        if self.max_delay >= self.n_action_steps:
            yield (
                f"{here}max_delay is {self.max_delay} and n_action_steps is {self.n_action_steps}: an answer has more "
                "actions than are given. Give a smaller max_delay."
            )

    @classmethod
    @abstractmethod
    def from_published(cls, given: Mapping[str, Any], names: frozenset[str]) -> Self:
        """From the config.json of openpi or lerobot, and the names of the tensors beside it."""

    @abstractmethod
    def to_published(self) -> dict[str, Any]:
        """A config.json in lerobot's words."""

    @property
    @abstractmethod
    def image_size(self) -> int:
        """The size of the square images that the tower sees."""

    @property
    def usual_value(self) -> str:
        """Returns the input of the value head in the published models."""
        return "actions"

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """The widths of the language model and of the expert."""
