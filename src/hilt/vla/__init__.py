"""Vision-language-action policies: supervised fine-tuning, and reinforcement learning on their own rollouts.

`hilt.vla.train.train` is the training run, and `hilt.vla.sft.train` the fine-tuning run.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.vla.collect import Collecting, Collector
    from hilt.vla.config import Critic, Imitation, Reference, Rewards, Validation, Vla
    from hilt.vla.episode import RolloutEpisode, Start
    from hilt.vla.rollout import RolloutSettings, roll_out
    from hilt.vla.sft import Lora, Sft
    from hilt.vla.update import Updater

__all__ = [
    "Collecting",
    "Collector",
    "Critic",
    "Imitation",
    "Lora",
    "Reference",
    "Rewards",
    "RolloutEpisode",
    "RolloutSettings",
    "Sft",
    "Start",
    "Updater",
    "Validation",
    "Vla",
    "roll_out",
]
__getattr__ = lazy_exports(__name__, __file__)
