"""The task contract: every fault that check_task names has an environment with just
that fault; names, states, success."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.names import ExtensionPoint, load
from hilt.envs import adapters, rewards, wrappers
from hilt.envs.tabletop.suite import SUITE
from hilt.envs.task import as_task, check_task, make, register, success_of
from hilt.formats.episodes import INSTRUCTION
from hilt.recording.record import Settings, record
from hilt.replay import Log
from hilt.robot.backends import backend_class
from hilt.robot.robot_server import RobotServer
from hilt.teleop.operator import Script


class Good(gymnasium.Env):
    """A point that is pushed to 1 within five steps. Each fault below changes one thing of it."""

    action_space: Any = spaces.Box(-1, 1, (2,))
    observation_space: Any = spaces.Dict(
        {
            "state": spaces.Dict({"place": spaces.Box(-10, 10, (2,), np.float32)}),
            "images": spaces.Dict({"front": spaces.Box(0, 255, (6, 8, 3), np.uint8)}),
        }
    )
    instruction: Any = "push it to one"
    step_limit: Any = 5
    initial_states: Any = MappingProxyType({"train": 4, "eval": 4})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        split = (options or {}).get("split", "train")
        state = (options or {}).get("state", int(self.np_random.integers(4)))
        self.begin(split, state)
        self.t = 0
        return self.look(), {"succeed": False, "split": split, "state": state}

    def begin(self, split: str, state: int) -> None:
        self.place = np.random.default_rng([len(split), state]).normal(scale=0.1, size=2).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.place = np.clip(self.place + 0.3 * np.asarray(action, np.float32), -10, 10)
        self.t += 1
        succeed = bool(self.place[0] >= 1)
        return self.look(), float(succeed), succeed, self.t >= self.step_limit, {"succeed": succeed}

    def look(self) -> Any:
        return {"state": {"place": self.place.copy()}, "images": {"front": np.full((6, 8, 3), self.t_or_0, np.uint8)}}

    @property
    def t_or_0(self) -> int:
        return getattr(self, "t", 0)


def broken(**changed: Any) -> Any:
    """A Good with these attributes or methods instead."""
    return type("Broken", (Good,), changed)()


def ended(change: Callable[..., Any]) -> Any:
    """A Good whose step's results go through this."""

    def step(self: Good, action: Any) -> Any:
        return change(self, *Good.step(self, action))

    return broken(step=step)


def seen(**leaves: Any) -> Any:
    """A Good whose observation has other values, and whose space is as it was."""

    def look(self: Good) -> Any:
        observation = Good.look(self)
        for key, value in leaves.items():
            part = "images" if key == "front" else "state"
            observation[part].pop(key)
            if value is not None:
                observation[part][key] = value(self)
        return observation

    return broken(look=look)


def pictures(space: Any) -> Any:
    """A Good with another space for its picture, and pictures that fit it."""

    def look(self: Good) -> Any:
        return {"state": {"place": self.place.copy()}, "images": {"front": np.zeros(space.shape, space.dtype)}}

    place = Good.observation_space["state"]
    return broken(look=look, observation_space=spaces.Dict({"state": place, "images": spaces.Dict({"front": space})}))


def reusing() -> Any:
    """One buffer for all observations."""

    def look(self: Any) -> Any:
        self.buffer = getattr(self, "buffer", np.zeros(2, np.float32))
        self.buffer[:] = self.place
        return {"state": {"place": self.buffer}, "images": {"front": np.zeros((6, 8, 3), np.uint8)}}

    return broken(look=look)


def no_options() -> Any:
    return broken(reset=lambda self, seed=None: Good.reset(self, seed=seed))


def wanders(self: Any, split: str, state: int) -> None:
    self.drawn = getattr(self, "drawn", 0) + 1
    self.place = np.full(2, self.drawn / 100, np.float32)


def mutates(self: Good, action: Any) -> Any:
    action *= 0.5
    return Good.step(self, action)


def split_blind(self: Good, split: str, state: int) -> None:
    Good.begin(self, "train", state)


def coarse(self: Good, split: str, state: int) -> None:
    """As an arm that stands at home whatever lies on the table, give or take its sensors' noise, but for two states."""
    Good.begin(self, split, state)
    if state % 2 == 0:
        self.place = np.full(2, 1e-20 * (len(split) + state), np.float32)


def told_wrongly(self: Any, **given: Any) -> Any:
    observation, info = Good.reset(self, **given)
    return observation, {"succeed": False, "split": info["split"], "state": 0}


def no_limit(self: Good, action: Any) -> Any:
    return self.look(), 0.0, True, False, {"succeed": False}


def succeeded(self: Good, **given: Any) -> Any:
    observation, info = Good.reset(self, **given)
    return observation, info | {"succeed": True}


def floats() -> Any:
    return pictures(spaces.Box(0, 1, (6, 8, 3), np.float32))


FAULTS = [
    ("instruction is None; expected what is to be done, in words", lambda: broken(instruction=None)),
    ("instruction is '  '; expected what is to be done, in words", lambda: broken(instruction="  ")),
    (
        "step_limit is None; expected after how many steps an episode is truncated",
        lambda: broken(step_limit=None, step=no_limit),
    ),
    ("initial_states is None; expected how many each split has", lambda: broken(initial_states=None)),
    ("initial_states is {'train': 0}; expected how many each split has", lambda: broken(initial_states={"train": 0})),
    ("the action space is float64", lambda: broken(action_space=spaces.Box(-1, 1, (2,), np.float64))),
    ("observation/images/front is float32; pictures are uint8, 0 to 255.", floats),
    ("(3, 6, 8); pictures are [height, width, channels].", lambda: pictures(spaces.Box(0, 255, (3, 6, 8), np.uint8))),
    # resets
    ("reset does not take options", no_options),
    (
        "begin with one and the same observation: does reset use",
        lambda: broken(begin=lambda self, *_: Good.begin(self, "x", 0)),
    ),
    ("states train 0, train 2, eval 0, eval 2 begin with one and the same observation", lambda: broken(begin=coarse)),
    ("two resets to state 0 of 'train' begin differently", lambda: broken(begin=wanders)),
    ("the splits 'train' and 'eval' overlap", lambda: broken(begin=split_blind)),
    ("info of reset does not tell the split and state that were asked for", lambda: broken(reset=told_wrongly)),
    ("info reports success right after a reset", lambda: broken(reset=succeeded)),
    # success and ends
    ("info of step does not tell success: set info['succeed']", lambda: ended(lambda env, *most: (*most[:4], {}))),
    (
        "step: info['succeed'] is 'yes'; expected True or False",
        lambda: ended(lambda env, *most: (*most[:4], {"succeed": "yes"})),
    ),
    (
        "True or False, for one environment",
        lambda: ended(lambda env, *most: (*most[:4], {"success": np.zeros(2, bool)})),
    ),
    ("truncated is not True at step 5, the step limit.", lambda: ended(lambda env, *most: (*most[:3], False, most[4]))),
    (
        "truncated is True at step 3; the step limit is 5.",
        lambda: ended(lambda env, *most: (*most[:3], env.t >= 3, most[4])),
    ),
    (
        "at the step limit terminated is True and truncated is not",
        lambda: ended(lambda env, s, r, a, b, i: (s, r, a or b, False, i)),
    ),
    (
        "the reward is inf; expected one finite number.",
        lambda: ended(lambda env, seen, _, *most: (seen, float("inf"), *most)),
    ),
    ("terminated is 0; expected True or False.", lambda: ended(lambda env, s, r, end, *most: (s, r, int(end), *most))),
    ("step does not give five things", lambda: ended(lambda env, *most: most[:4])),
    ("reset does not give two things", lambda: broken(reset=lambda self, **given: Good.reset(self, **given)[0])),
    # what is seen and what is sent
    ("step changes the action that it is given", lambda: broken(step=mutates)),
    ("an observation that was returned is written into later", reusing),
    (
        "observation/state/place has values that are not finite.",
        lambda: seen(place=lambda env: env.place + np.float32([0, np.inf])),
    ),
    (
        "place is outside its space Box(-10.0, 10.0, (2,), float32).",
        lambda: seen(place=lambda env: env.place + np.float32(20)),
    ),
    (
        "place is float64 (2,); its space has float32 (2,).",
        lambda: seen(place=lambda env: env.place.astype(np.float64)),
    ),
    ("front is in the observation space and not in the observation.", lambda: seen(front=None)),
]


def test_a_good_environment_has_no_findings():
    assert check_task(Good()) == []
    assert (
        check_task(
            broken(observation_space=Good.observation_space["state"]["place"], look=lambda self: self.place.copy())
        )
        == []
    )


@pytest.mark.parametrize(("sentence", "faulty"), FAULTS)
def test_a_fault_is_named(sentence: str, faulty: Callable[[], Any]):
    """It, and nothing else."""
    found = check_task(faulty())
    assert len(found) == 1 and sentence in found[0], found


def test_actions_and_observations_may_be_nested_in_other_ways():
    class Nested(Good):
        action_space = spaces.Dict({"to": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(2)})
        observation_space = spaces.Tuple([Good.observation_space["state"]["place"], spaces.Discrete(9)])

        def look(self) -> Any:
            return self.place.copy(), self.t_or_0

        def step(self, action: Any) -> Any:
            return super().step(action["to"])

    assert check_task(Nested()) == []
    changed = type("Changed", (Nested,), {"step": lambda self, action: Nested.step(self, {"to": mutated(action)})})
    assert "step changes the action" in check_task(changed())[0]
    missing = type("Missing", (Nested,), {"look": lambda self: (self.place.copy(),)})
    assert "observation is outside its space Tuple" in check_task(missing())[0]


def mutated(action: Any) -> Any:
    action["to"] *= 0.5
    return action["to"]


def test_as_task_names_what_is_no_environment():
    assert check_task(object()) == [
        "object is no gymnasium.Env: derive it from one, or use an adapter of hilt.envs.adapters."
    ]


def test_a_gentle_policy_may_act():
    acted = []
    check_task(Good(), act=lambda observation: acted.append(observation) or np.zeros(2, np.float32))
    assert len(acted) == 5 and set(acted[0]) == {"state", "images"}


def test_a_real_arm_begins_nearly_alike():
    def begin(self: Any, split: str, state: int) -> None:
        Good.begin(self, split, state)
        self.drawn = getattr(self, "drawn", 0) + 1
        self.place = self.place + np.float32(1e-4 * self.drawn)

    (finding,) = check_task(broken(begin=begin))
    assert "begin differently" in finding
    assert check_task(broken(begin=begin), tolerance=0.01) == []
    assert "begin differently" in check_task(broken(begin=begin), tolerance=1e-5)[0]
    flickers = itertools.count()
    noisy = {"front": lambda env: np.full((6, 8, 3), next(flickers) % 7, np.uint8)}
    assert "begin differently" in check_task(seen(**noisy))[0]
    assert check_task(seen(**noisy), tolerance=0.01) == [], "a picture is never twice the same"


def test_success_is_read_in_order():
    assert success_of({}) is None and success_of({"success": None}) is None
    assert success_of({"success": True, "is_success": 0.0}) is False
    assert success_of({"is_success": True, "succeed": np.bool_(False)}) is False
    assert success_of({"success": np.array([1.0])}) is True
    with pytest.raises(SchemaError, match=r"info\['success'\] is 'yes'; expected True or False"):
        success_of({"success": "yes"})
    with pytest.raises(SchemaError, match=r"info\['succeed'\] is nan; expected True or False"):
        success_of({"succeed": float("nan")})


# ---- plain environments


def test_a_plain_environment_works_as_it_is():
    env = as_task(gymnasium.make("CartPole-v1"))
    assert (env.instruction, env.step_limit, env.initial_states) == (
        "cart pole",
        500,
        {"train": 50, "eval": 50, "test": 100},
    )
    _, info = env.reset(seed=0)
    assert info["split"] == "train" and 0 <= info["state"] < 50 and info["succeed"] is False
    assert success_of(env.step(0)[4]) is None, "it does not say, so nobody else does"
    assert check_task(as_task(env, success=lambda reward, terminated, truncated, info: truncated)) == []


def test_numbered_states_are_seeds_and_splits_are_disjoint():
    env = as_task(gymnasium.make("Pendulum-v1"), states={"train": 30, "test": 30})
    begins = {}
    for split in ("train", "test"):
        for state in range(30):
            observation, info = env.reset(seed=7, options={"split": split, "state": state})
            begins[split, state] = observation.tobytes()
            assert (info["split"], info["state"]) == (split, state)
    assert len(set(begins.values())) == 60
    assert env.reset(options={"split": "test", "state": 3})[0].tobytes() == begins["test", 3]
    drawn = [
        [env.reset(seed=1 if t == 0 else None, options={"split": "train"})[1]["state"] for t in range(20)]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 5, "by the seed, and no state leads to itself"
    with pytest.raises(UnknownNameError, match=r"no split named 'tset'; did you mean 'test'\? Known: test, train"):
        env.reset(options={"split": "tset"})
    with pytest.raises(ConfigError, match=r"state 30 of split 'train' was asked for; it has the states 0 to 29"):
        env.reset(options={"state": 30})
    for state in (1.5, "3", True):
        with pytest.raises(
            ConfigError, match=rf"state {state!r} of split 'train' was asked for; it has the states 0 to 29"
        ):
            env.reset(options={"state": state})


def test_as_task_keeps_both_ends_and_can_shorten_the_limit():
    env = as_task(gymnasium.make("MountainCar-v0"), step_limit=7, instruction="up the hill")
    env.reset(seed=0)
    assert [env.step(1)[2:4] for _ in range(7)] == [(False, False)] * 6 + [
        (False, True)
    ] and env.instruction == "up the hill"
    with pytest.raises(
        ConfigError, match=r"step_limit=300 cannot work: MountainCar-v0 ends an episode after 200 steps"
    ):
        as_task(gymnasium.make("MountainCar-v0"), step_limit=300)
    with pytest.raises(ConfigError, match=r"Plain has no step limit; give one: task_options\.step_limit=200 in a run"):
        as_task(type("Plain", (gymnasium.Env,), {})())
    with pytest.raises(ConfigError, match=r"states={'train': 0}: expected splits with 1 to 1,000,000 states"):
        as_task(gymnasium.make("MountainCar-v0"), states={"train": 0})


def test_as_task_keeps_what_a_task_has():
    env = Good()
    assert (
        as_task(env) is env
        and as_task(gymnasium.wrappers.TimeAwareObservation(gymnasium.make("CartPole-v1"))).step_limit == 500
    )
    other = as_task(env, instruction="shove it", step_limit=3)
    assert other.instruction == "shove it" and check_task(other) == [] and env.instruction == "push it to one"
    with pytest.raises(ConfigError, match="Good has numbered initial states of its own, so states= cannot be given"):
        as_task(env, states={"train": 3})
    with pytest.raises(ConfigError, match=r"as_task takes a gymnasium.Env, got int; hilt.envs.adapters has adapters"):
        as_task(3)


def test_a_simulator_of_one_environment_is_a_task_and_of_more_is_not():
    env = as_task(gymnasium.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync"), step_limit=100)
    assert env.reset()[0].shape == (4,) and env.step(np.int64(0))[0].shape == (4,)
    assert as_task(gymnasium.make_vec("CartPole-v1", num_envs=1)).step_limit == 500, "as its spec says"
    isaac = gymnasium.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync")
    isaac.max_episode_length = 30
    closed = []
    isaac.close = lambda: closed.append(True)
    env = as_task(isaac)
    env.close()
    assert env.step_limit == 30 and closed
    with pytest.raises(ConfigError, match="a task is one environment, and this simulator runs 2"):
        as_task(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))


# ---- names


def test_make_knows_gymnasium_factories_and_prefixes(monkeypatch: pytest.MonkeyPatch):
    assert make("Pendulum-v1", step_limit=20, g=5.0, instruction="swing up").unwrapped.g == 5.0
    assert make("Pendulum-v1", step_limit=300).step_limit == 300, "longer than gymnasium's own, too"
    assert make(f"{__name__}:Good").instruction == "push it to one"
    assert make(f"{__name__}:broken", instruction="changed", step_limit=2).step_limit == 2
    monkeypatch.setattr("hilt.envs.task.TASKS", ExtensionPoint("task", "hilt.tasks", {}))
    register("shelf", lambda rest, **options: broken(instruction=f"{rest} of {options}"))
    assert make("shelf/third/left", size=3).instruction == "third/left of {'size': 3}"
    register("shelf", f"{__name__}:from_name")
    assert make("shelf/top").instruction == "put it on the top shelf"
    with pytest.raises(ConfigError, match="expected a word without '/' and ':'"):
        register("a/b", Good)


def from_name(rest: str) -> Any:
    return broken(instruction=f"put it on the {rest} shelf")


def test_a_module_is_imported_for_its_environments(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "third_party.py").write_text(
        "import gymnasium\ngymnasium.register('third/Cart-v0', "
        "'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert make("third_party:third/Cart-v0").step_limit == 9
    assert "third_party" in sys.modules
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        make("half_there:factory")


class Rendering(CartPoleEnv):
    """Notes which renderer MuJoCo would take whenever it may be asked to make one."""

    def __init__(self):
        super().__init__(render_mode="rgb_array")
        self.spec = gymnasium.spec("CartPole-v1")
        self.found = [os.environ.get("MUJOCO_GL")]

    def reset(self, **options: Any):
        self.found.append(os.environ.get("MUJOCO_GL"))
        return super().reset(**options)

    def render(self):
        self.found.append(os.environ.get("MUJOCO_GL"))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "egl"), ({"MUJOCO_GL": "osmesa"}, "osmesa"), ({"DISPLAY": ":0"}, None)],
    ids=["none", "set", "screen"],
)
def test_mujoco_needs_no_screen(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch):
    """In somebody else's environment, too; the variables of this process are as before."""
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    task = make(f"{__name__}:Rendering")
    task.reset()
    task.render()
    assert task.unwrapped.found == [expected] * 3
    assert os.environ.get("MUJOCO_GL") == variables.get("MUJOCO_GL")


def test_task_names_may_be_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "our_lab.py").write_text(
        f"from {__name__} import Good\nfrom tests.envs.toy_arm import ToyArm\nclass Arm(ToyArm): pass\n"
    )
    (tmp_path / "colorsys.py").write_text("raise OSError('this hides a module of Python')\n")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.chdir(tmp_path)
    assert make("our_lab:Good").instruction == "push it to one"
    assert backend_class("our_lab:Arm").__name__ == "Arm"
    assert load("colorsys:rgb_to_hsv")


def test_task_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no task named 'CartPol-v1'; did you mean 'CartPole-v1'\?$"):
        make("CartPol-v1")
    with pytest.raises(
        ConfigError, match=r"no module 'nosuch', installed or in this folder \(/.*\); correct the name 'nosuch.module'"
    ):
        make("nosuch.module:factory")
    with pytest.raises(UnknownNameError, match=r"no task named 'pick'; did you mean 'tabletop/pick'\?$"):
        make("pick")
    with pytest.raises(
        UnknownNameError, match=r"no task named 'robot/'\. Known: robot/127.0.0.1:5000, robot/my_arm.yaml\.$"
    ):
        make("robot/")
    with pytest.raises(ConfigError, match=r"tests.envs.test_task has no 'Goood'; did you mean 'Good'\?"):
        make(f"{__name__}:Goood")


# ---- one line of a recipe


def recorded(name: str, folder: Path, **options: Any) -> Log:
    """What a recipe does with a task. Only the name says which one it is."""
    env = make(name, **options)
    settings = Settings(name, options, episodes=1, keep="all")
    record(env, Script(expert=lambda env: env.action_space.sample), folder, settings, videos=False)
    env.close()
    return Log.open(folder / "log", "r")


def test_an_arm_is_swapped_for_a_simulator_in_one_line(tmp_path: Path):
    columns = {}
    with RobotServer("tabletop", {"task": "reach"}, port=0) as server:
        address = server.urls[0].removeprefix("http://").rstrip("/")
        for name, options in ((f"robot/{address}", {}), ("tabletop/reach", {"image_size": None}), ("Pendulum-v1", {})):
            kind = name.partition("/")[0]
            with recorded(name, tmp_path / kind, step_limit=4, **options) as log:
                (number,) = log.trajectories()
                about = log.facts.about(number)
                assert len(log) == 4 and about["task"] == name and about[INSTRUCTION] and about["split"] == "train", (
                    name
                )
                steps = log.read(log.trajectory_keys(number))
                assert steps["truncated"].tolist() == [False] * 3 + [True] and np.abs(steps["actions"]).max() > 0, name
                columns[kind] = {path: str(spec) for path, spec in log.schema.columns.items()}
    assert columns["robot"] == columns["tabletop"] and "observations/state/tcp_pose" in columns["robot"], (
        "no difference in the data"
    )


# ---- the page


def test_the_table_of_tasks_is_true():
    page = (Path(__file__).parents[2] / "docs/envs.md").read_text()
    table = page.partition("<!-- tasks: begin -->\n")[2].partition("<!-- tasks: end -->")[0]
    rows = [f"| `{name}` | {task.instruction} | {task.step_limit} | {task.arms} |" for name, task in SUITE.items()]
    assert table == "\n".join(["| task | instruction | steps at most | arms |", "|---|---|---|---|", *rows, ""])
    for module in (adapters, rewards, wrappers):
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        wanted = [name for name in names if not name.startswith("_") and name not in ("BatchedEpisode", "OneOf")]
        assert [name for name in wanted if f"`{name}`" not in page and f"`{name}(" not in page] == []
