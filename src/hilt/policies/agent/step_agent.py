"""What the learner, the actors and an evaluation ask of an agent that gives one action for
one observation. `Agent` is the built-in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.core.tree import Tree, flatten, unflatten
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.layout import ActionLayout

if TYPE_CHECKING:
    from gymnasium.spaces import Space

    from hilt.algos.tables import OffPolicyAlgorithm
    from hilt.policies.conditioned import Condition


class StepAgent(ABC):
    """An agent by the name ``agent.kind``. Those methods and properties that are
    not abstract may be left as they are."""

    layout: ActionLayout
    """Which numbers of an action it moves"""
    proprio: Sequence[str]
    """The paths of what it sees besides images, such as ``state/tcp_pose``"""
    updates: int = 0
    """How many updates it has made"""
    imitations: int = 0
    """How many updates of imitation it has made"""
    target_entropy: float = 0.0
    """In nats, which an alarm compares its entropy with"""
    chunk: int = 1
    """The number of actions that it decides at once"""
    version: int = -1
    """Of the weights that it was given last, where it acts; an actor sets it"""
    horizon: int = 0
    """Of an agent that imitates chunks: the number of actions, from that of a step on, that a batch has of each step;
    0: the step's own action"""

    @classmethod
    @abstractmethod
    def make(
        cls,
        observation_space: Space,
        action_space: Space,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> StepAgent:
        """One that has learned nothing. `hilt.policies.agent.layout.fit` says what there is to see in these spaces.
        `squashed`: it learns from rewards, and does not only imitate."""

    @abstractmethod
    def sample_actions(
        self, observations: Tree, seed: int | None = None, argmax: bool = False
    ) -> npt.NDArray[np.float32]:
        """The action for one observation, or for each of a batch; with `argmax` the likeliest, which draws nothing."""

    @abstractmethod
    def update(
        self, batch: Mapping[str, object], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[StepAgent, dict[str, float]]:
        """One gradient step from a batch: ``observations``, ``actions``, ``rewards``,
        ``next_observations``, ``masks`` (0 where the task ended), ``n_steps`` and ``demo``. Gives itself,
        and figures for the metrics. It counts `updates`."""

    @abstractmethod
    def acting_state(self, slow: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """The weights that an actor needs, as copies. `slow`: those that are evaluated, where they are others."""

    @abstractmethod
    def load_acting_state(self, state: Mapping[str, object]) -> None:
        """Takes over what `acting_state` of an agent of the same settings gave."""

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Everything, as tensors, numbers and text: one that loads it goes on bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None: ...

    def chunks(self, observations: Tree, seed: int = 0, argmax: bool = True, draws: int = 1) -> npt.NDArray[np.float32]:
        """Decides for each of a batch of observations `draws` times, one after the other, as in the first step of an
        episode, and returns ``[B * draws, chunk, actions]``. By default it asks `sample_actions`."""
        leaves = {path: np.repeat(np.asarray(leaf), draws, axis=0) for path, leaf in flatten(observations).items()}
        rows = len(next(iter(leaves.values())))
        actions = np.asarray(self.sample_actions(unflatten(leaves), seed, argmax), np.float32)
        if actions.shape != (rows, self.layout.actions):
            raise ConfigError(
                f"{type(self).__name__}.sample_actions gave an array of {list(actions.shape)} for {rows} observations; "
                f"expected [{rows}, {self.layout.actions}], an action for each."
            )
        return actions[:, None]

    # Acting in chunks, from instructions

    def use_instructions(self, instructions: Sequence[str]) -> None:  # noqa: B027  # nothing by default
        """What is to be done, in words, in each task of the run. By default words do not matter."""

    def begin(self, instruction: str = "", paced: bool = False) -> None:  # noqa: B027  # nothing by default
        """An episode begins. `paced`: there is a control rate to be kept, so that no step may wait for the policy."""

    def acted(self, source: Source, executed: npt.ArrayLike | None) -> dict[str, object]:
        """A step was made: by whom, and which action was executed. Returns further columns of the step."""
        return {}

    def step_columns(self) -> dict[str, object]:
        """The columns that `acted` returns besides those of every agent of its kind: trees of `ArraySpec`, with
        defaults."""
        return {}

    batch_columns: Sequence[str] = ()
    """The paths of columns that its batches have besides those of every agent and what it sees"""
    disagreement: float | None = None
    """How much its ensemble disagrees about the last decision of `sample_actions`; None where that is not measured"""

    def measure_disagreement(self, samples: int = 4) -> None:
        """From now on `disagreement` is measured where it acts, and `acting_state` has what that needs. `samples`: how
        many decisions are drawn, where those are what differs."""
        raise ConfigError(f"{type(self).__name__} has no ensemble that could disagree: leave help.quantile out.")

    def condition(self, by: Condition) -> None:
        """From now on its policy is asked for good actions, and learns which are: see `hilt.policies.conditioned`."""
        raise ConfigError(f"{type(self).__name__} reads no condition: give another algorithm than recap.")

    def planned(self) -> Any:
        """The chunk that it executes, a `hilt.envs.chunk_executor.ExecutedChunk` of the task's actions, for a person to
        see; None where it plans no further than a step."""
        return None

    def metrics(self) -> dict[str, float]:
        """Figures of acting, for what an actor reports."""
        return {}

    def close(self) -> None:  # noqa: B027  # nothing by default
        """Ends whatever runs besides the calls of its methods."""

    # Learning, and what is seen

    @property
    def image_paths(self) -> Sequence[str]:
        """The paths of the images that it looks at, such as ``images/front``."""
        return ()

    @property
    def critics(self) -> frozenset[str]:
        """The networks that are updated `cta_ratio` - 1 times more often than the others;
        without any, there is one update in a step."""
        return frozenset()

    @property
    def frozen(self) -> bool:
        """Whether what it makes of images never changes, so that `states` may be kept in memory."""
        return False

    @property
    def width(self) -> int:
        """Numbers in a row of `states`."""
        return 0

    @property
    def shifts(self) -> int:
        """The number of shifts of an observation's images of which `states` are kept."""
        return 1

    def states(self, observations: Tree, shift: int = 0) -> npt.NDArray[np.float32]:
        """Returns all that the networks of a `frozen` agent see of observations, ``[N, width]``, in one of the `shifts`
        of their images; 0: as they are."""
        raise ConfigError(f"{type(self).__name__} keeps no states: it is not frozen.")

    def imitate(self, batch: Mapping[str, object], encoder: bool = False) -> dict[str, float]:
        """One step of behavior cloning; it counts `imitations`."""
        raise ConfigError(
            f"{type(self).__name__} does not imitate: leave algorithm=bc, hg-dagger and "
            "agent.encoder.pretrain_updates out."
        )

    def health(self, batch: Mapping[str, object]) -> dict[str, float]:
        """Figures of whether its networks can still learn, from a batch of learning: see `hilt.policies.plasticity`. It
        draws nothing and changes nothing. By default there are none."""
        return {}

    @property
    def lacking(self) -> Mapping[str, str]:
        """Figures that the last look at its health could not take, and why."""
        return {}

    def fit_proprio(self, observations: Tree) -> None:
        """With agent.normalize_proprio, takes mean and deviation of proprioception from the demonstrations."""
        raise ConfigError(
            f"{type(self).__name__} does not normalize proprioception: leave agent.normalize_proprio out."
        )

    def begin_anew(self) -> None:
        """It is as it was made: it has learned nothing."""
        raise ConfigError(f"{type(self).__name__} cannot begin anew: leave collect_steps out.")

    def use_algorithm(self, algorithm: OffPolicyAlgorithm) -> None:
        """Updates are made by another algorithm than its own."""
        raise ConfigError(
            f"{type(self).__name__} has an update of its own: leave algorithm={type(algorithm).__name__} out."
        )
