"""Value models: how an episode will end, from what is seen; trained on all episodes of logs, and written back as late
facts."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.value.value_config import ValueConfig
    from hilt.value.value_episodes import ValueEpisodes
    from hilt.value.value_facts import write_estimates
    from hilt.value.value_model import ValueModel, load_value_model
    from hilt.value.value_training import train_value

__all__ = [
    "ValueConfig",
    "ValueEpisodes",
    "ValueModel",
    "load_value_model",
    "train_value",
    "write_estimates",
]
__getattr__ = lazy_exports(__name__, __file__)
