"""The names of HIL-SERL's ``serl_launcher.utils.launcher`` and of its agents, so
that its scripts move over by their import lines.

    agent = make_sac_pixel_agent(seed=0, sample_obs=env.observation_space.sample(),
    sample_action=env.action_space.sample(),
                                 image_keys=["wrist_1"], encoder_type="resnet-pretrained", discount=0.97)
    server.publish_network(agent.state.params)
    agent = agent.replace(state=agent.state.replace(params=params))

Each is `hilt.policies.agent.agent.Agent` with that face; an agent changes in place,
and `replace` and `update` give it back.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError
from hilt.core.files import DISK
from hilt.core.tree import Tree, flatten, unflatten
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig
from hilt.recipes.migrate import encoder_of
from hilt.replay.tensors import load_pt, save_pt

if TYPE_CHECKING:
    from typing_extensions import Self

MadeAgent = TypeVar("MadeAgent", bound=Agent)


class _Face(Agent):
    """`state.params` are the weights that an actor needs. They may be replaced in a
    thread of the wire's while another one acts."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._one_at_a_time = threading.Lock()

    @property
    def state(self) -> Self:
        return self

    @property
    def params(self) -> dict[str, np.ndarray]:
        return self.acting_state()

    def replace(self, *, state: object = None, params: Mapping[str, object] | None = None) -> Self:
        if state not in (None, self):
            raise ConfigError(
                f"replace(state=…) takes agent.state.replace(params=…), and got a {type(state).__name__}."
            )
        if params is not None:
            with self._one_at_a_time:
                self.load_acting_state(params)
        return self

    def sample_actions(self, observations: Tree, seed: int | None = None, argmax: bool = False) -> np.ndarray:
        with self._one_at_a_time:
            return super().sample_actions(unflatten(observations), seed=seed, argmax=argmax)


class _SAC(_Face):
    def update(
        self, batch: Mapping[str, object], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[Agent, dict[str, float]]:
        """(the agent, what is to be logged). Batches may be packed, as ``pack_obs_and_next_obs=True`` makes them."""
        return super().update(unpacked(batch), networks_to_update, details)


class SACAgent(_SAC):
    """For both setup modes with a fixed gripper."""


class SACAgentHybridSingleArm(_SAC):
    """For ``single-arm-learned-gripper``."""


class SACAgentHybridDualArm(_SAC):
    """For ``dual-arm-learned-gripper``."""


class BCAgent(_Face):
    """Imitates, by a Gaussian without tanh, as upstream; for `train_bc.py` and `train_hgdagger.py`."""

    def update(self, batch: Mapping[str, object]) -> tuple[Self, dict[str, float]]:  # type: ignore[override]
        return self, self.imitate(unpacked(batch), encoder=True)


def make_sac_pixel_agent(seed: int, sample_obs: Tree, sample_action: npt.ArrayLike, **options: Any) -> SACAgent:
    """The options of all three: `image_keys`, `encoder_type`, `reward_bias`,
    `target_entropy`, `discount`, as upstream has them."""
    arms = "dual" if len(np.shape(sample_action)) == 1 and np.shape(sample_action)[0] > 7 else "single"
    return _make(SACAgent, f"{arms}-arm-fixed-gripper", seed, sample_obs, sample_action, **options)


def make_sac_pixel_agent_hybrid_single_arm(
    seed: int, sample_obs: object, sample_action: object, **options: Any
) -> SACAgentHybridSingleArm:
    return _make(SACAgentHybridSingleArm, "single-arm-learned-gripper", seed, sample_obs, sample_action, **options)


def make_sac_pixel_agent_hybrid_dual_arm(
    seed: int, sample_obs: object, sample_action: object, **options: Any
) -> SACAgentHybridDualArm:
    return _make(SACAgentHybridDualArm, "dual-arm-learned-gripper", seed, sample_obs, sample_action, **options)


def make_bc_agent(seed: int, sample_obs: object, sample_action: object, **options: Any) -> BCAgent:
    """`image_keys` and `encoder_type` as upstream, and its three layers of 512; there is no dropout between them here.
    The loss is upstream's: the negative log-likelihood of a Gaussian without tanh, at a learning rate of 3e-4."""
    return _make(
        BCAgent,
        "single-arm-fixed-gripper",
        seed,
        sample_obs,
        sample_action,
        hidden=[512, 512, 512],
        squashed=False,
        **options,
    )


class checkpoints:  # flax has a module of this name
    """The part of ``flax.training.checkpoints`` that the scripts use: files
    ``checkpoint_{step}``, each whole or not there. They hold all that
    goes on learning; `target` is ``agent.state``, and is changed in place."""

    @staticmethod
    def save_checkpoint(ckpt_dir: str | os.PathLike[str], target: Agent, step: int, keep: int = 1) -> str:
        folder, contents = Path(ckpt_dir), io.BytesIO()
        save_pt(target.state_dict(), contents)
        DISK.make_folders(folder)
        DISK.replace(folder / f"checkpoint_{step}", contents.getvalue())
        for old in _numbered(folder)[:-keep]:
            DISK.remove(old)
        return str(folder / f"checkpoint_{step}")

    @staticmethod
    def latest_checkpoint(ckpt_dir: str | os.PathLike[str]) -> str | None:
        found = _numbered(Path(ckpt_dir))
        return str(found[-1]) if found else None

    @staticmethod
    def restore_checkpoint(ckpt_dir: str | os.PathLike[str], target: Any, step: int | None = None) -> Any:
        found = _numbered(Path(ckpt_dir))
        if found or step is not None:
            target.load_state_dict(load_pt(found[-1] if step is None else Path(ckpt_dir) / f"checkpoint_{step}"))
        return target


def _numbered(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdigit()]
    if flax := [path for path in found if path.is_dir()]:
        raise ConfigError(
            f"{flax[0]} is a checkpoint of flax, whose weights are not read here; its buffers "
            "are: see docs/hil-serl.md."
        )
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def unpacked(batch: Mapping[str, Any]) -> dict[str, object]:
    """``observations[image]`` of a packed batch has the stack and the frame after
    it; both observations have their own here."""
    seen, after = flatten(batch["observations"]), flatten(batch["next_observations"])
    for path in seen.keys() - after.keys():
        both = seen[path]
        seen[path], after[path] = both[:, :-1], both[:, 1:]
    return {**batch, "observations": unflatten(seen), "next_observations": unflatten(after)}


def _make(
    kind: type[MadeAgent],
    setup_mode: str,
    seed: int,
    sample_obs: Any,
    sample_action: Any,
    image_keys: Sequence[str] = ("image",),
    encoder_type: str = "resnet-pretrained",
    hidden: Sequence[int] = (256, 256),
    squashed: bool = True,
    **rlpd: Any,
) -> MadeAgent:
    known = ("reward_bias", "target_entropy", "discount")
    if unknown := sorted(rlpd.keys() - set(known)):
        raise ConfigError(
            f"{unknown[0]}: not an argument of this function; expected image_keys, encoder_type, {', '.join(known)}."
        )
    config = AgentConfig(setup_mode=setup_mode, encoder=encoder_of(encoder_type), hidden=list(hidden))
    for name, value in rlpd.items():
        setattr(config.rlpd, name, value)
    proprio = [key for key in ("state",) if key in sample_obs]
    space = _space(unflatten(sample_obs))  # a slash in a key, such as left/wrist, is a level here
    keys = {"image_keys": list(image_keys), "proprio_keys": proprio}
    return kind.make(space, _space(sample_action), config, **keys, seed=seed, squashed=squashed)


def _space(sample: Any) -> Any:
    """What a space of such samples tells: an array has a shape and a dtype itself."""
    if isinstance(sample, Mapping):
        return SimpleNamespace(spaces={key: _space(value) for key, value in sample.items()})
    return np.asarray(sample)
