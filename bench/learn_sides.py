"""Sides of the learning benchmark, each a process of its own: Stable-Baselines3's SAC on the same task with the same
demonstrations in its buffer, a loop that only sleeps, and the scripted operator alone."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")

import numpy as np

from bench.sides import serve

MAX_STEPS = 30_000
"""Of the replay buffer: at 64 pixels, two cameras and both observations of a step, 1.5 GB"""


class Sb3:
    """SAC of Stable-Baselines3 in the environment of one of our runs, with its sizes and its demonstrations. It sees
    what our policy sees: each camera, and the proprioception as one vector."""

    def start(
        self,
        run: str,
        learning_rate: float,
        updates_per_step: float,
        seed: int,
        shared: bool = False,
        shift: int = 0,
        own: bool = False,
    ) -> dict[str, Any]:
        """Gives its version, how many demonstrated steps are in its buffer, and the size of its encoder. `shared`:
        actor and critics have one encoder, which the critics train; `shift`: images are moved by up to so many pixels
        in updates; `own`: discount, tau, temperature, batch and updates a step are its defaults, not ours."""
        import stable_baselines3
        import torch

        from hilt.core.config import thaw
        from hilt.hil.config import Hil
        from hilt.hil.environment import make_env

        config = thaw(Hil, f"{run}/config.yaml")
        self.env = flat_env(make_env(config, operator=False), config, f"{run}/demos")
        # it has the machine for itself, as our processes have together
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        agent, rlpd = config.agent, config.agent.rlpd
        entropy = -self.env.action_space.shape[0] / 2 if rlpd.target_entropy is None else rlpd.target_entropy
        ours: dict[str, Any] = {
            "batch_size": config.batch_size,
            "tau": rlpd.tau,
            "gamma": rlpd.discount,
            "train_freq": max(1, round(1 / updates_per_step)),
            "gradient_steps": max(1, round(updates_per_step)),
            "ent_coef": f"auto_{rlpd.temperature}",
            "target_entropy": entropy,
        }
        self.model = stable_baselines3.SAC(
            "MultiInputPolicy",
            self.env,
            learning_rate=learning_rate,
            buffer_size=MAX_STEPS,
            learning_starts=config.training_starts,
            **({} if own else ours),
            policy_kwargs={
                "features_extractor_class": encoder_class(),
                "features_extractor_kwargs": {"features": agent.encoder.features, "shift": shift},
                "share_features_extractor": shared,
                "net_arch": list(agent.hidden),
            },
            seed=seed,
            device="cpu",
        )
        encoder = sum(parameter.numel() for parameter in self.model.critic.features_extractor.parameters())
        steps = self._preload(f"{run}/demos")
        return {"version": stable_baselines3.__version__, "demonstrated_steps": steps, "encoder_parameters": encoder}

    def _preload(self, demos: str) -> int:
        from hilt.replay import Log

        count, columns = 0, ["observations", "next_observations", "actions", "rewards", "terminated", "truncated"]
        with Log.open(demos, "r") as log:
            for trajectory in log.trajectories():
                steps = log.read(log.trajectory_keys(trajectory), columns)
                for t in range(len(steps["rewards"])):
                    before, after = (self._as_stored(steps[key], t) for key in ("observations", "next_observations"))
                    over = bool(steps["terminated"][t] or steps["truncated"][t])
                    limit = bool(steps["truncated"][t] and not steps["terminated"][t])
                    action, reward = steps["actions"][t][None, self.env.moved], np.array([steps["rewards"][t]])
                    self.model.replay_buffer.add(
                        before, after, action, reward, np.array([over]), [{"TimeLimit.truncated": limit}]
                    )
                    count += 1
        return count

    def _as_stored(self, observations: Any, t: int) -> dict[str, Any]:
        """Images with channels first, as its buffer has them."""
        flat = self.env.observation(_at(observations, t))
        return {key: (value.transpose(2, 0, 1) if value.ndim == 3 else value)[None] for key, value in flat.items()}

    def train(self, seconds: float) -> dict[str, float]:
        """Trains for this number of seconds from the first step on. Returns the numbers of steps and updates."""
        from stable_baselines3.common.callbacks import BaseCallback

        class Clock(BaseCallback):  # type: ignore[misc]
            def _on_training_start(self) -> None:
                self.until = time.monotonic() + seconds

            def _on_step(self) -> bool:
                return time.monotonic() < self.until

        start = time.monotonic()
        self.model.learn(10**9, callback=Clock(), progress_bar=False, log_interval=10**9)
        return {
            "seconds": time.monotonic() - start,
            "steps": self.model.num_timesteps,
            "updates": self.model._n_updates,
        }

    def evaluate(self, states: int, split: str = "test") -> list[int]:
        """The steps that each initial state took to success, 0 where there was
        none; its mean action, nobody takes over."""
        found = []
        for state in range(states):
            seen, _ = self.env.reset(options={"split": split, "state": state})
            steps, over, info = 0, False, {}
            while not over:
                action, _ = self.model.predict(seen, deterministic=True)
                seen, _, terminated, truncated, info = self.env.step(action)
                steps, over = steps + 1, terminated or truncated
            found.append(steps if info.get("succeed") else 0)
        return found

    def close(self) -> None:
        self.env.close()


def flat_env(env: Any, config: Any, demos: str) -> Any:
    """As Stable-Baselines3 takes it: observations are a flat dictionary, an action is the
    numbers that our policy moves, the others being
    0. Proprioception is what ours is: poses with columns of the rotation, normalized by the demonstrations."""
    import gymnasium
    import torch

    from hilt.core.tree import flatten
    from hilt.policies.agent.agent_inputs import rotation_columns
    from hilt.replay import Log

    def leaves(space: Any) -> Any:
        return {key: leaves(inner) for key, inner in space.spaces.items()} if hasattr(space, "spaces") else space

    flat = flatten(leaves(env.observation_space))
    pictures = [path for path, space in flat.items() if space.dtype == np.uint8]
    images = {path: path.replace("/", "_") for path in config.image_keys or pictures}
    proprio = sorted(config.proprio_keys or (path for path in flat if path not in pictures))

    def numbers(path: str, values: Any) -> Any:
        """[N, n]"""
        turned = rotation_columns(torch.as_tensor(values)).numpy() if path in config.agent.pose_keys else values
        return turned.reshape(len(turned), -1)

    sizes = {path: numbers(path, np.ones((1, *flat[path].shape), np.float32)).shape[1] for path in proprio}
    mean, deviation, clip = 0.0, 1.0, np.inf
    if config.agent.normalize_proprio:
        with Log.open(demos, "r") as log:
            shown = log.read(log.all().keys(), [f"observations/{path}" for path in proprio])
        columns = flatten(shown["observations"])
        rows = np.concatenate([numbers(path, columns[path]) for path in proprio], 1)
        floors = [np.full(sizes[path], config.agent.proprio_floor.get(path, 0.02)) for path in proprio]
        mean, deviation, clip = rows.mean(0), np.maximum(rows.std(0), np.concatenate(floors)), 5.0
    moved = config.agent.action_indices or list(range(env.action_space.shape[0]))

    class Flat(gymnasium.Wrapper):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(env)
            state = gymnasium.spaces.Box(-np.inf, np.inf, (sum(sizes.values()),), np.float32)
            self.observation_space = gymnasium.spaces.Dict(
                {**{name: flat[path] for path, name in images.items()}, "state": state}
            )
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (len(moved),), np.float32)
            self.moved = moved

        def observation(self, observation: Any) -> dict[str, Any]:
            seen = flatten(observation)
            state = np.concatenate([numbers(path, seen[path][None])[0] for path in proprio])
            state = np.clip((state - mean) / deviation, -clip, clip).astype(np.float32)
            return {**{name: seen[path] for path, name in images.items()}, "state": state}

        def reset(self, **given: Any) -> Any:
            observation, info = self.env.reset(**given)
            return self.observation(observation), info

        def step(self, action: Any) -> Any:
            whole = np.zeros(self.env.action_space.shape, np.float32)
            whole[moved] = action
            observation, *rest = self.env.step(whole)
            return self.observation(observation), *rest

    return Flat()


def encoder_class() -> Any:
    """Per camera the convolutions of our small encoder (`hilt.policies.agent.encoders`), and the proprioception beside.
    In training, images are moved at random by up to `shift` pixels, as ours are."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class Encoder(BaseFeaturesExtractor):  # type: ignore[misc]
        def __init__(self, observation_space: Any, features: int, shift: int = 0):
            cameras = [key for key, space in observation_space.spaces.items() if len(space.shape) == 3]
            super().__init__(observation_space, features * len(cameras) + observation_space["state"].shape[0])
            self.shift, self.cameras = shift, nn.ModuleDict()
            for key in cameras:
                layers = [nn.Conv2d(3, 32, 5, 4, 2), nn.Conv2d(32, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)]
                trunk = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Flatten())
                with torch.no_grad():
                    width = trunk(torch.zeros(1, *observation_space[key].shape)).shape[1]
                self.cameras[key] = nn.Sequential(trunk, nn.Linear(width, features), nn.LayerNorm(features), nn.Tanh())

        def forward(self, observations: Any) -> Any:
            seen = {
                key: self.moved(observations[key]) if self.shift and self.training else observations[key]
                for key in self.cameras
            }
            return torch.cat([*(net(seen[key]) for key, net in self.cameras.items()), observations["state"]], 1)

        def moved(self, images: Any) -> Any:
            """Each image of ``[B, C, H, W]`` by its own pixels, its edge repeated."""
            count, _, height, width = images.shape
            padded = nn.functional.pad(images, [self.shift] * 4, mode="replicate")
            rows, columns = torch.randint(0, 2 * self.shift + 1, (2, count, 1)) + torch.arange(max(height, width))
            pick = torch.arange(count)[:, None, None]
            return padded.permute(0, 2, 3, 1)[pick, rows[:, :height, None], columns[:, None, :width]].permute(
                0, 3, 1, 2
            )

    return Encoder


class Sleep:
    """A loop that does nothing at the actor's rate: how late the machine wakes a process up in this very minute."""

    def watch(self, hz: float, seconds: float) -> list[float]:
        """Returns the lateness of each period in milliseconds, measured against absolute deadlines."""
        late, start = [], time.monotonic()
        for tick in range(1, round(seconds * hz) + 1):
            deadline = start + tick / hz
            time.sleep(max(0.0, deadline - time.monotonic()))
            late.append(1e3 * (time.monotonic() - deadline))
        return late


class Operator:
    """The scripted operator without a policy to help: what a person who did everything would reach."""

    def alone(self, run: str, states: int) -> list[int]:
        """The steps to success of each test state, 0 where there was none. It watches a policy that stands still, and
        takes over by its rule, with the options of the run."""
        from hilt.core.config import thaw
        from hilt.hil.config import Hil
        from hilt.hil.environment import make_env

        env = make_env(thaw(Hil, f"{run}/config.yaml"), operator=True)
        still, found = np.zeros(env.action_space.shape, np.float32), []
        for state in range(states):
            env.reset(options={"split": "test", "state": state})
            steps, over, info = 0, False, {}
            while not over:
                *_, terminated, truncated, info = env.step(still)
                steps, over = steps + 1, terminated or truncated
            found.append(steps if info.get("succeed") else 0)
        env.close()
        return found


def _at(tree: Any, t: int) -> Any:
    return {key: _at(value, t) for key, value in tree.items()} if isinstance(tree, dict) else tree[t]


if __name__ == "__main__":
    serve({"sb3": Sb3, "sleep": Sleep, "operator": Operator})
