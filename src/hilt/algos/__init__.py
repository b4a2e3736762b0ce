"""The formulas of learning, as functions of tensors: no files, no environments, no network.

`hilt.algos.rlpd` is off-policy learning from replay, `hilt.algos.advantage` and `hilt.algos.surrogate` are on-policy
learning from groups of rollouts, `hilt.algos.imitation` is behavior cloning.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.algos.advantage import advantages, gae
    from hilt.algos.config import Batching, Kl, Optimizer, PolicyGradient, Prime, Rlpd
    from hilt.algos.imitation import imitation_loss
    from hilt.algos.kl import KLController, divergence
    from hilt.algos.surrogate import Surrogate, value_loss

__all__ = [
    "Batching",
    "KLController",
    "Kl",
    "Optimizer",
    "PolicyGradient",
    "Prime",
    "Rlpd",
    "Surrogate",
    "advantages",
    "divergence",
    "gae",
    "imitation_loss",
    "value_loss",
]
__getattr__ = lazy_exports(__name__, __file__)
