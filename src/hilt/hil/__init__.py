"""One arm with a person: actors that act, a person who takes over, and a learner that trains an agent from replay.

    config = begin_run(Path("run"), "tabletop_pick", Hil(task="tabletop_pick"))
    train(config, Path("run"))

`hilt.hil.evaluate.evaluate` measures the success of a checkpoint.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.hil.actor import Actor
    from hilt.hil.config import Goal, Hil, Wire
    from hilt.hil.launch import begin_run, resume_run, train
    from hilt.hil.learner import Learner

__all__ = [
    "Actor",
    "Goal",
    "Hil",
    "Learner",
    "Wire",
    "begin_run",
    "resume_run",
    "train",
]
__getattr__ = lazy_exports(__name__, __file__)
