"""From HIL-SERL: a task's config there is a recipe here.

    hilt train hil-serl:experiments.usb_pickup_insertion.config:TrainConfig demo_path=demo_data/*.pkl

    def usb() -> Hil:                                        # or as a recipe of your own
        return from_hil_serl("experiments.usb_pickup_insertion.config:TrainConfig",
        demo_path=["demo_data/*.pkl"], batch_size=128)

Every key of ``DefaultTrainingConfig`` is carried over, or is refused with a sentence when it asks for what is not done
here: docs/hil-serl.md has the list. The environment is what the config's own ``get_environment`` makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy.typing as npt

from hilt.core import trust
from hilt.core.config import override
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.names import load
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Env, Info, StepResult, success_of
from hilt.hil.config import Hil
from hilt.policies.agent.config import EncoderConfig

SAME = (
    "batch_size",
    "buffer_period",
    "checkpoint_period",
    "cta_ratio",
    "log_period",
    "max_steps",
    "random_steps",
    "replay_buffer_capacity",
    "steps_per_update",
    "training_starts",
)
"""Keys that mean the same here"""
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "agent": (("drq",), "which agent it is follows from setup_mode, there as well; leave it out"),
    "eval_period": ((2000,), "nothing looks at it there; `hilt eval RUN` evaluates whenever you like; leave it out"),
    "eval_checkpoint_step": ((0,), "use `hilt eval RUN --checkpoint N`"),
    "eval_n_trajs": ((0, 5), "use `hilt eval RUN --episodes N`"),
}
"""Keys that do nothing in a run: the values that pass, and what to do instead of others"""
PRETRAINED = Path("~/.serl/resnet10_params.pkl")
"""Where HIL-SERL keeps the weights of "resnet-pretrained" """
UPSTREAM_LIMIT = 100
"""`max_traj_length` of ``DefaultTrainingConfig``"""


def from_hil_serl(config: object, **overrides: Any) -> Hil:
    """The run that a HIL-SERL config asks for; `overrides` are settings of `Hil`.

    `config` is "module:Class", an experiment's name in ``experiments.mappings``, or the class (or an instance) itself,
    which other processes must be able to import.
    """
    name = config if isinstance(config, str) else _name_of(config)
    # by the command, or by a recipe of the user's: their word either way
    trust.given(name if ":" in name else trust.EXPERIMENTS)
    given = _config(name)
    name = name if ":" in name else _name_of(given)
    trust.given(name)
    for key, (passing, cure) in NEUTRAL.items():
        if (value := getattr(given, key, passing[0])) not in passing:
            raise ConfigError(f"{name}: {key}={value!r} has no meaning here: {cure}.")
    if _is_own(given, "process_demos"):
        raise ConfigError(
            f"{name}: process_demos is never called, as in HIL-SERL; remove it, and use `hilt data convert` instead."
        )
    hil = Hil(task=f"{__name__}:HilSerlTask", task_options={"config": name})
    for key in SAME:
        setattr(hil, key, getattr(given, key, getattr(hil, key)))
    hil.agent.rlpd.discount = getattr(given, "discount", hil.agent.rlpd.discount)
    hil.agent.setup_mode = getattr(given, "setup_mode", hil.agent.setup_mode)
    hil.agent.encoder = encoder_of(overrides.pop("encoder_type", getattr(given, "encoder_type", "resnet-pretrained")))
    if hil.agent.encoder.kind != "none":
        hil.defaults = "images"  # the numbers of the config are the user's own
    # theirs are flattened into this one
    hil.image_keys, hil.proprio_keys = list(getattr(given, "image_keys", None) or []), ["state"]
    hil.demo_path = _listed(getattr(given, "demo_path", None))
    if _is_own(given, "max_traj_length"):
        hil.max_traj_length = given.max_traj_length
    if overrides.get("classifier"):
        hil.task_options["classifier"] = False  # ours takes its place
    return override(hil, {key: _listed(value) if key == "demo_path" else value for key, value in overrides.items()})


class HilSerlTask(gymnasium.Env[Any, Any]):
    """The environment of a HIL-SERL config. Its spaces are those of ``fake_env=True``, which moves
    nothing; the real one is made at the first reset. A time limit that it calls `done` is a truncation
    here, so that its value is not taken for nothing."""

    def __init__(self, config: str, classifier: bool = True, save_video: bool = False):
        if ":" not in config:
            raise ConfigError(
                f"task_options.config={config!r}: expected module:Class of a HIL-SERL config, "
                "as from_hil_serl writes it."
            )
        given = _config(config)
        self._make, self._options = given.get_environment, {"classifier": classifier, "save_video": save_video}
        self._env: Any = None
        fake = self._make(fake_env=True, save_video=False, classifier=False)
        self.observation_space, self.action_space, self.spec = fake.observation_space, fake.action_space, fake.spec
        self.step_limit: int = _limit_of(fake) or int(getattr(given, "max_traj_length", UPSTREAM_LIMIT))
        module = [part for part in config.partition(":")[0].split(".") if part != "config"]
        self.instruction = module[-1].replace("_", " ")
        if fake.has_wrapper_attr("control_hz"):
            self.control_hz = fake.get_wrapper_attr("control_hz")
        self._steps = 0
        with contextlib.suppress(AttributeError):  # a fake FrankaEnv has not what its close() closes
            fake.close()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        if self._env is None:
            self._env = self._make(fake_env=False, **self._options)
        self._steps = 0
        observation, info = self._env.reset(seed=seed, options=options)
        return observation, info

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, reward, done, truncated, info = self._env.step(action)
        self._steps += 1
        if done and not truncated and self._steps >= self.step_limit and not reward and not success_of(info):
            done, truncated = False, True
        return observation, reward, bool(done), bool(truncated), info

    def expert(self) -> object:
        """Where it has one, as simulations do."""
        if self._env is None or not self._env.has_wrapper_attr("expert"):
            raise ConfigError("this environment has no expert() of its own.")
        return self._env.get_wrapper_attr("expert")()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _config(name: str) -> Any:
    """An instance of a config."""
    if ":" in name:
        found = load(name)
    else:
        try:
            experiments = load(trust.EXPERIMENTS)
        except ConfigError as error:
            where = f"hil-serl:{name} is looked for in experiments/mappings.py"
            raise ConfigError(f"{where}, and {error} Or give hil-serl:MODULE:CLASS.") from None
        if name not in experiments:
            raise UnknownNameError("experiment in experiments.mappings", name, experiments)
        found = experiments[name]
    if not callable(getattr(found, "get_environment", None)):  # looked at before it is called
        raise ConfigError(
            f"{name} has no get_environment(fake_env, save_video, classifier); expected a config of a HIL-SERL task."
        )
    return found() if isinstance(found, type) else found


def _name_of(config: Any) -> str:
    kind = config if isinstance(config, type) else type(config)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise ConfigError(
            f"{kind.__qualname__} cannot be imported by the learner and the actor: put it into a "
            "module, on its top level."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_own(config: Any, name: str) -> bool:
    """Returns whether the task's own class defines it, rather than HIL-SERL's defaults."""
    return any(
        name in vars(kind) for kind in type(config).__mro__ if kind.__name__ != "DefaultTrainingConfig"
    ) or name in vars(config)


def _limit_of(env: Env) -> int | None:
    """An environment's own step limit: ours, gymnasium's, FrankaEnv's, or that of DualFrankaEnv's two."""
    if env.has_wrapper_attr("step_limit"):
        return int(env.get_wrapper_attr("step_limit"))
    if (spec := getattr(env, "spec", None)) is not None and spec.max_episode_steps:
        return int(spec.max_episode_steps)
    arms: list[Any] = [env.unwrapped, *(getattr(env.unwrapped, name, None) for name in ("env_left", "env_right"))]
    limits = [arm.max_episode_length for arm in arms if hasattr(arm, "max_episode_length")]
    return int(min(limits)) if limits else None


def _listed(paths: Any) -> list[str]:
    return [] if paths is None else [paths] if isinstance(paths, str) else [str(path) for path in paths]


def encoder_of(encoder_type: str, weights: str = "") -> EncoderConfig:
    """HIL-SERL's `encoder_type`; `weights` is the file of "resnet-pretrained", by default where HIL-SERL keeps it."""
    if encoder_type == "small":  # ours, quick without a GPU
        return EncoderConfig(kind="small")
    if encoder_type == "resnet":
        return EncoderConfig(kind="resnet10", training="critic", features=256)
    if encoder_type == "resnet-pretrained":
        path = Path(weights or PRETRAINED).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"encoder_type='resnet-pretrained' begins with the file {path}, which is not there: copy "
                "HIL-SERL's resnet10_params.pkl to it, or choose 'resnet' (from scratch) or "
                "'small' (quick without a GPU)."
            )
        return EncoderConfig(kind="resnet10", weights=str(path), training="head", features=256)
    raise ConfigError(
        f"encoder_type={encoder_type!r}: expected 'resnet-pretrained', 'resnet' or 'small'; there are no others here."
    )
