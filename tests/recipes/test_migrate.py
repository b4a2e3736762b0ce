"""HIL-SERL's task configs as recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.envs.task import make
from hilt.hil.config import Hil
from hilt.recipes.migrate import SAME, from_hil_serl


class Arm(gymnasium.Env[Any, Any]):
    """Like FrankaEnv: no spec, a limit in `max_episode_length`, and `done` when that is reached."""

    made: list[dict[str, Any]]

    def __init__(self, **given: Any):
        type(self).made.append(given)
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-1, 1, (1, 3), np.float32), "wrist_1": spaces.Box(0, 255, (1, 8, 8, 3), np.uint8)}
        )
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)
        self.max_episode_length, self._steps = 3, 0

    def reset(self, **options: Any) -> Any:
        self._steps = 0
        return self.observation_space.sample(), {"succeed": False}

    def close(self) -> None:
        if type(self).made[-1]["fake_env"]:
            raise AttributeError("'Arm' object has no attribute 'img_queue'")

    def step(self, action: Any) -> Any:
        self._steps += 1
        reward = bool(action[0] > 0.9)
        return self.observation_space.sample(), int(reward), self._steps >= 3 or reward, False, {"succeed": reward}


class DefaultTrainingConfig:
    """Upstream's, as far as a task leaves it alone."""

    agent = "drq"
    max_traj_length = 100
    batch_size = 256
    eval_period = 2000
    eval_checkpoint_step = 0
    eval_n_trajs = 5
    encoder_type = "resnet-pretrained"
    demo_path = None

    def process_demos(self, demo: Any) -> Any:
        raise NotImplementedError


class TrainConfig(DefaultTrainingConfig):
    image_keys = ("wrist_1",)
    proprio_keys = ("tcp_pose",)
    encoder_type = "resnet"
    setup_mode = "single-arm-learned-gripper"
    discount = 0.98
    demo_path = "demo_data/usb.pkl"

    def get_environment(self, fake_env: bool = False, save_video: bool = False, classifier: bool = False) -> Any:
        return Arm(fake_env=fake_env, save_video=save_video, classifier=classifier)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("usb_task")
    Arm.made = []
    made.TrainConfig = type("TrainConfig", (TrainConfig,), {"__module__": "usb_task"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "usb_task", made)
    return made


def changed(module: ModuleType, **values: Any) -> Hil:
    module.Changed = type("Changed", (TrainConfig,), {"__module__": "usb_task", **values})  # type: ignore[attr-defined]
    return from_hil_serl("usb_task:Changed")


def test_hil_serl_config_is_carried_over(module: ModuleType):
    hil = from_hil_serl("usb_task:TrainConfig", seed=7)
    assert from_hil_serl(module.TrainConfig, seed=7) == from_hil_serl(module.TrainConfig(), seed=7) == hil
    assert hil.agent.setup_mode == "single-arm-learned-gripper" and hil.agent.rlpd.discount == 0.98
    assert (hil.agent.encoder.kind, hil.agent.encoder.training) == ("resnet10", "critic")
    assert hil.image_keys == ["wrist_1"] and hil.proprio_keys == ["state"] and hil.demo_path == ["demo_data/usb.pkl"]
    assert hil.seed == 7 and hil.max_traj_length == 0 and hil.batch_size == 256
    assert {key: getattr(Hil(), key) for key in SAME} == {key: getattr(hil, key) for key in SAME}, (
        "defaults are the same in both"
    )
    assert not Arm.made, "nothing is made to read a config"


@pytest.mark.parametrize("key", SAME)
def test_each_key_of_the_same_name_counts(key: str, module: ModuleType):
    assert getattr(changed(module, **{key: 17}), key) == 17


def test_a_limit_that_a_task_sets_itself_counts(module: ModuleType):
    assert changed(module, max_traj_length=100).max_traj_length == 100


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("agent", "sac", "follows from setup_mode"),
        ("eval_period", 10, "hilt eval RUN"),
        ("eval_checkpoint_step", 5000, "hilt eval RUN --checkpoint N"),
        ("eval_n_trajs", 20, "hilt eval RUN --episodes N"),
    ],
)
def test_hil_serl_settings_without_meaning_are_refused(key: str, value: Any, cure: str, module: ModuleType):
    with pytest.raises(ConfigError, match=f"usb_task:Changed: {key}={value!r} has no meaning here: .*{cure}"):
        changed(module, **{key: value})


def test_demonstrations_are_not_processed(module: ModuleType):
    with pytest.raises(ConfigError, match="process_demos is never called"):
        changed(module, process_demos=lambda self, demo: demo)


def test_settings_of_ours_may_be_given(module: ModuleType):
    hil = from_hil_serl(
        "usb_task:TrainConfig", demo_path="all.pkl", encoder_type="small", agent={"hidden": [8]}, classifier="looks"
    )
    assert hil.demo_path == ["all.pkl"] and hil.agent.encoder.kind == "small" and list(hil.agent.hidden) == [8]
    assert hil.task_options["classifier"] is False, "ours takes the place of theirs"
    with pytest.raises(ConfigError, match="no setting named 'batchsize'; did you mean 'batch_size'"):
        from_hil_serl("usb_task:TrainConfig", batchsize=3)


def test_hil_serl_env_connects_at_the_first_reset(module: ModuleType):
    hil = from_hil_serl("usb_task:TrainConfig")
    env = make(hil.task, **hil.task_options)
    assert Arm.made == [{"fake_env": True, "save_video": False, "classifier": False}]
    assert (
        env.observation_space["wrist_1"].shape == (1, 8, 8, 3) and env.step_limit == 3 and env.instruction == "usb task"
    )
    env.reset(options={"split": "train", "state": 0})
    assert Arm.made[1:] == [{"fake_env": False, "save_video": False, "classifier": True}]


def test_hil_serl_time_limit_with_done_is_a_truncation(module: ModuleType):
    hil = from_hil_serl("usb_task:TrainConfig")
    env = make(hil.task, **hil.task_options)
    env.reset()
    ends = [env.step(np.zeros(7, np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    env.reset()
    for action in (0, 0, 1):  # success on the last step is success
        *_, done, _, info = env.step(np.full(7, action, np.float32))
    assert done and info["succeed"]


def test_hil_serl_name_without_a_class_reports_where_it_was_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"usb_task is looked for in experiments/mappings\.py, and .*Or give hil-serl:MODULE:CLASS"
    ):
        from_hil_serl("usb_task")


def test_an_experiment_by_its_name(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    mappings = ModuleType("experiments.mappings")
    mappings.CONFIG_MAPPING = {"usb_pickup": module.TrainConfig}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments", ModuleType("experiments"))
    monkeypatch.setitem(sys.modules, "experiments.mappings", mappings)
    assert from_hil_serl("usb_pickup").task_options == {"config": "usb_task:TrainConfig"}
    with pytest.raises(
        UnknownNameError, match=r"no experiment in experiments\.mappings named 'usb_pikup'; did you mean 'usb_pickup'"
    ):
        from_hil_serl("usb_pikup")


def test_hil_serl_object_that_is_no_config_is_refused(module: ModuleType, tmp_path: Path):
    module.Empty = type("Empty", (), {"__module__": "usb_task"})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"usb_task:Empty has no get_environment\(fake_env, save_video, classifier\)"):
        from_hil_serl("usb_task:Empty")

    class Local(TrainConfig):
        pass

    with pytest.raises(ConfigError, match="cannot be imported by the learner and the actor: put it into a module"):
        from_hil_serl(Local)
