"""Other interfaces as tasks; batches of environments step for step beside the same environments run singly."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorWrapper

from hilt.core.errors import ConfigError, SchemaError
from hilt.envs.adapters import Batched, from_custom, one_of, to_numpy
from hilt.envs.task import check_task, success_of


class Reach:
    """An episode in the interface of VLA code: move a point to 1. Each row of a chunk is a step."""

    step_lim = 10

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.place = self.rng.normal(scale=0.1, size=2)
        self.eval_success = False
        self.calls: list[Any] = []
        self.closed = False

    def get_obs(self) -> dict[str, Any]:
        return {"head_camera": {"rgb": np.full((8, 8, 3), 7, np.uint8)}, "state": self.place}

    def get_instruction(self) -> str:
        return f"go to one from {self.place[0]:.2f}"

    def take_action(self, action: Any) -> None:
        self.calls.append(action)
        for row in np.atleast_2d(action):
            self.place = self.place + 0.2 * row
            self.eval_success = bool(self.place[0] >= 1)

    def close(self) -> None:
        self.closed = True


class ReachByStep(Reach):
    """The same with ``step`` and a method that tells success."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.eval_success = lambda: self.place[0] >= 1  # type: ignore[assignment]
        self.step = lambda action: setattr(self, "place", self.place + 0.2 * action)

    take_action = property()  # type: ignore[assignment]


ACTIONS = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize("interface", [Reach, ReachByStep])
def test_the_custom_interface_is_a_task(interface: Any):
    env = from_custom(interface, ACTIONS)
    assert check_task(env) == []
    seen, info = env.reset(options={"split": "eval", "state": 3})
    assert info == {"succeed": False, "split": "eval", "state": 3} and env.instruction.startswith("go to one from")
    needed = int(np.ceil((1 - seen["state"][0]) / 0.2))
    ends = [env.step(np.array([1, 0], np.float32))[1:] for _ in range(needed)]
    assert ends[:-1] == [(0, False, False, {"succeed": False})] * (needed - 1)
    assert ends[-1] == (1, True, False, {"succeed": True})
    env.reset()
    assert [env.step(np.zeros(2, np.float32))[2:4] for _ in range(10)] == [(False, False)] * 9 + [(False, True)]


def test_chunks_are_handed_over_whole_and_end_at_the_limit():
    made: list[Reach] = []
    env = from_custom(lambda seed: made.append(Reach(seed)) or made[-1], ACTIONS, chunk=4)
    assert env.action_space.shape == (4, 2) and env.step_limit == 3, "10 steps in chunks of 4"
    assert check_task(env) == []
    env.reset(seed=1)
    for _ in range(3):
        *_, truncated, _ = env.step(np.zeros((4, 2), np.float32))
    assert truncated and [len(call) for call in made[-1].calls] == [4, 4, 2], "no step is taken beyond the limit"


def test_a_new_episode_has_a_new_environment_and_the_old_one_is_closed():
    made: list[Reach] = []
    env = from_custom(lambda seed: made.append(Reach(seed)) or made[-1], ACTIONS)
    env.reset(seed=1)
    env.reset(seed=2)
    assert [one.closed for one in made] == [True, True, False]
    env.close()
    assert made[-1].closed
    again = Reach(0)
    one = from_custom(lambda seed: again, ACTIONS)
    one.reset()
    assert not again.closed, "one that begins again is kept"


def test_errors_of_a_custom_environment_are_not_swallowed():
    class Broken(Reach):
        def take_action(self, action: Any) -> None:
            raise OSError("the driver is gone")

    env = from_custom(Broken, ACTIONS)
    env.reset()
    with pytest.raises(OSError, match="the driver is gone"):
        env.step(np.zeros(2, np.float32))

    class Blind(Reach):
        def get_obs(self) -> dict[str, Any]:
            raise OSError("no camera")

    with pytest.raises(OSError, match="no camera"):
        from_custom(Blind, ACTIONS)


def test_from_custom_reports_missing_members():
    lacking = (
        r"dict has no get_obs, get_instruction, eval_success, step_lim, step or take_action; from_custom needs them"
    )
    with pytest.raises(ConfigError, match=lacking):
        from_custom(lambda seed: {}, ACTIONS)
    with pytest.raises(ConfigError, match=r"Reach has no action space; give one of a single action"):
        from_custom(Reach)

    class Talks(Reach):
        def get_obs(self) -> dict[str, Any]:
            return {"state": self.place, "note": "hello"}

    with pytest.raises(SchemaError, match=r"an observation has 'hello' in it; expected numbers, arrays or tensors"):
        from_custom(Talks, ACTIONS)
    env = from_custom(
        Talks, ACTIONS, observe=lambda seen: {"state": seen["state"].astype(np.float32)}, states={"train": 2}
    )
    assert env.reset()[0]["state"].dtype == np.float32 and env.initial_states == {"train": 2}


# ---- batches


class Count(gymnasium.Env):
    """Counts up from its seed; ends by itself at a length that the seed decides, or at 12
    steps. Dictionary observations, success told."""

    observation_space = spaces.Dict(
        {"n": spaces.Box(-np.inf, np.inf, (2,), np.float32), "image": spaces.Box(0, 255, (4, 4, 3), np.uint8)}
    )
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = self.np_random.normal(size=2).astype(np.float32)
        self.length, self.t = int(self.np_random.integers(3, 20)), 0
        return self._look(), {"succeed": False}

    def step(self, action: Any) -> Any:
        self.n = (self.n + action).astype(np.float32)
        self.t += 1
        over = self.t == self.length
        return (
            self._look(),
            float(self.n[0]),
            over,
            self.t >= 12,
            {"succeed": bool(over and self.length % 2), "steps": self.t},
        )

    def _look(self) -> Any:
        return {"n": self.n, "image": np.full((4, 4, 3), self.t, np.uint8)}


class Tensors(VectorWrapper):
    """What a batched simulator on torch gives, which writes into the same tensors at each step as Isaac Lab does."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.torch = pytest.importorskip("torch")
        self.buffers: Any = None

    def reset(self, **given: Any) -> Any:
        observation, infos = self.env.reset(**given)
        return self._reused(observation), infos

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, self.torch.Tensor)
        observation, *ends, infos = self.env.step(actions.numpy())
        return self._reused(observation), *(self.torch.as_tensor(end) for end in ends), infos

    def _reused(self, observation: Any) -> Any:
        if self.buffers is None:
            self.buffers = {key: self.torch.as_tensor(value).clone() for key, value in observation.items()}
        for key, value in observation.items():
            self.buffers[key].copy_(self.torch.as_tensor(value))
        return self.buffers


class ManiSkill(Tensors):
    """The same with ManiSkill's names: whole batches under final_observation and final_info, and tensors in them."""

    def step(self, actions: Any) -> Any:
        observation, rewards, terminated, truncated, infos = super().step(actions)
        over = (terminated | truncated).numpy()
        if "final_obs" in infos:
            seen = {key: value.clone() for key, value in observation.items()}
            told = {"success": self.torch.zeros(self.num_envs, dtype=bool)}
            for i in np.flatnonzero(over):
                for key, value in infos["final_obs"][i].items():
                    seen[key][i] = self.torch.as_tensor(value)
                told["success"][i] = bool(infos["final_info"]["succeed"][i])
            infos = {"final_observation": seen, "_final_observation": over, "final_info": told, "_final_info": over}
        return observation, rewards, terminated, truncated, infos


gymnasium.register("HiltCount-v0", entry_point=Count)
KINDS = {"sync": lambda env: env, "async": lambda env: env, "torch": Tensors, "maniskill": ManiSkill}
CASES = [
    *(
        (name, kind, mode)
        for name in ("HiltCount-v0", "CartPole-v1")
        for kind in ("sync", "async")
        for mode in AutoresetMode
    ),
    *(("HiltCount-v0", "torch", mode) for mode in AutoresetMode),
    ("HiltCount-v0", "maniskill", AutoresetMode.SAME_STEP),
]


def action_of(space: Any, env: int, t: int) -> Any:
    rng = np.random.default_rng([env, t])
    return (
        rng.uniform(-1, 1, space.shape).astype(np.float32) if isinstance(space, spaces.Box) else rng.integers(space.n)
    )


def singly(name: str, env: int, seed: int, episodes: int) -> list[Any]:
    """The episodes of one environment that is run alone, with the actions of its own steps."""
    one, t, found = gymnasium.make(name), 0, []
    for episode in range(episodes):
        observation, _ = one.reset(seed=seed if episode == 0 else None)
        steps: list[Any] = []
        over = False
        while not over:
            action = action_of(one.action_space, env, t)
            after, reward, terminated, truncated, info = one.step(action)
            steps.append((observation, action, reward, after, terminated, truncated))
            observation, t, over = after, t + 1, terminated or truncated
        found.append((steps, info.get("succeed")))
    return found


def same(seen: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return seen.keys() == wanted.keys() and all(same(seen[key], wanted[key]) for key in wanted)
    return isinstance(seen, np.ndarray) and seen.dtype == wanted.dtype and np.array_equal(seen, wanted)


@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
def test_episodes_of_a_batch_are_those_of_single_environments(name: str, kind: str, mode: AutoresetMode):
    """Every observation, the last of an episode among them, action, reward, end and
    success; whatever the batch's habits are."""
    how = "async" if kind == "async" else "sync"
    env = gymnasium.make_vec(name, num_envs=3, vectorization_mode=how, vector_kwargs={"autoreset_mode": mode})
    batch = Batched(KINDS[kind](env))
    acted = np.zeros(3, int)
    found: list[list[Any]] = [[], [], []]
    running: list[list[Any]] = [[], [], []]
    batch.reset(seed=40)
    while min(len(episodes) for episodes in found) < 3:
        for i, step in enumerate(batch.step(np.stack([action_of(batch.action_space, i, acted[i]) for i in range(3)]))):
            if step is not None:
                acted[i] += 1
                running[i].append(step)
                if step.terminated or step.truncated:
                    found[i].append((running[i], success_of(batch.infos[i])))
                    running[i] = []
    batch.close()
    ended = set()
    for i in range(3):
        for (steps, success), (expected, succeeded) in zip(found[i][:3], singly(name, i, 40 + i, 3), strict=True):
            assert len(steps) == len(expected) and success is succeeded
            for step, (before, action, reward, after, terminated, truncated) in zip(steps, expected, strict=True):
                assert same(step.observation, before) and same(step.next_observation, after)
                assert np.array_equal(step.action, action) and step.reward == pytest.approx(reward)
                assert (step.terminated, step.truncated) == (terminated, truncated)
            ended.add((steps[-1].terminated, steps[-1].truncated, success))
    if name == "HiltCount-v0":
        assert {(True, False, True), (False, True, False)} <= ended, "both ends occur, and both answers"


def test_a_wrapper_around_a_batch_counts():
    bare = gymnasium.make_vec("HiltCount-v0", num_envs=2, vectorization_mode="sync")
    batch = Batched(gymnasium.wrappers.vector.FlattenObservation(bare))
    assert batch.observation_space.shape == (50,) and batch.reset(seed=0).shape == (2, 50)
    actions = np.ones((2, 2), np.float32)
    first, _ = batch.step(actions)
    actions[:] = 7
    assert first is not None and first.action.tolist() == [1, 1], "whoever acts may use the same array again"


def test_each_environment_gives_equally_many_episodes():
    batch = Batched(gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"))
    rng = np.random.default_rng(0)
    episodes = list(batch.episodes(lambda observation: rng.integers(0, 2, 3), per_env=2, seed=0))
    assert sorted(episode.env for episode in episodes) == [0, 0, 1, 1, 2, 2]
    for episode in episodes:
        assert [step.terminated or step.truncated for step in episode.steps] == [False] * (len(episode.steps) - 1) + [
            True
        ]
        assert episode.success is None, "CartPole does not tell"
        assert all(
            np.array_equal(a.next_observation, b.observation)
            for a, b in zip(episode.steps, episode.steps[1:], strict=False)
        )
    batch.close()


def test_a_single_environment_is_no_batch():
    with pytest.raises(ConfigError, match=r"CartPoleEnv has no num_envs.*: it steps one environment.*as_task"):
        Batched(gymnasium.make("CartPole-v1"))


def test_a_batch_that_hides_the_last_observation_is_refused_with_the_cure():
    class Silent(VectorWrapper):
        def step(self, actions: Any) -> Any:
            *most, infos = self.env.step(actions)
            return *most, {key: value for key, value in infos.items() if "final" not in key}

    batch = Batched(Silent(gymnasium.vector.SyncVectorEnv([Count] * 2, autoreset_mode="SameStep")))
    batch.reset(seed=0)
    with pytest.raises(
        SchemaError, match=r"Silent begins a new episode inside step, .* has no 'final_obs'.*compute_final_obs=True"
    ):
        for _ in range(12):
            batch.step(np.zeros((2, 2), np.float32))
    with pytest.raises(ConfigError, match=r"autoreset='sometimes': expected one of NextStep, SameStep, Disabled"):
        Batched(batch.env, autoreset="sometimes")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_batch_of_one_is_a_task(mode: AutoresetMode):
    env = one_of(
        Tensors(gymnasium.vector.SyncVectorEnv([Count], autoreset_mode=mode)), step_limit=12, instruction="count"
    )
    assert check_task(env) == []
    first, _ = env.reset(options={"split": "test", "state": 1})
    alone = Count()
    assert all(np.array_equal(first[key], value) for key, value in alone.reset(seed=2_000_001)[0].items())
    over = False
    while not over:
        action = env.action_space.sample()
        seen, _, terminated, truncated, info = env.step(action)
        wanted, _, *ends, told = alone.step(action)
        assert all(np.array_equal(seen[key], value) for key, value in wanted.items())
        assert [terminated, truncated] == ends and info["succeed"] == told["succeed"]
        over = terminated or truncated
    with pytest.raises(ConfigError, match=r"the episode is over; call reset\(\) before the next step"):
        env.step(action)
    env.close()
    with pytest.raises(
        ConfigError, match="a task is one environment, and this simulator runs 2: make it with one, or use Batched"
    ):
        one_of(gymnasium.vector.SyncVectorEnv([Count] * 2))


def test_arrays_are_copies_and_keep_their_types():
    given = {"a": np.arange(3, dtype=np.int16), "b": {"c": np.zeros(2, np.float32)}}
    taken = to_numpy(given)
    given["a"][:] = 9
    assert taken["a"].tolist() == [0, 1, 2] and taken["a"].dtype == np.int16 and taken["b"]["c"].dtype == np.float32
