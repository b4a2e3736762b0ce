"""RLPD's update once more, slowly: numpy in float64, gradients by central differences,
Adam by hand. Shares no code with hilt.algos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Params = dict[str, np.ndarray]


def norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale + shift


def inputs(p: Params, z: np.ndarray, features: int) -> np.ndarray:
    if "inputs.proprio.linear.weight" not in p:
        return z
    x = z[:, features:] @ p["inputs.proprio.linear.weight"].T + p["inputs.proprio.linear.bias"]
    x = np.tanh(norm(x, p["inputs.proprio.norm.weight"], p["inputs.proprio.norm.bias"]))
    return np.concatenate([z[:, :features], x], 1)


def mlp(p: Params, x: np.ndarray) -> np.ndarray:
    for i in range(sum(key.startswith("mlp.layers") for key in p) // 2):
        x = x @ p[f"mlp.layers.{i}.weight"].T + p[f"mlp.layers.{i}.bias"]
        x = np.tanh(norm(x, p[f"mlp.norms.{i}.weight"], p[f"mlp.norms.{i}.bias"]))
    return x @ p["mlp.out.weight"].T + p["mlp.out.bias"]


def actor(
    p: Params, z: np.ndarray, features: int, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Actions, their log-probabilities, means and deviations."""
    mean, log_std = np.split(mlp(p, inputs(p, z, features)), 2, axis=1)
    std = np.clip(np.exp(log_std), 1e-5, 5.0)
    actions = np.tanh(mean + std * noise)
    density = np.exp(-0.5 * noise**2) / (std * np.sqrt(2 * np.pi)) / (1 - actions**2)
    return actions, np.log(density).sum(1), mean, std


def critics(p: Params, z: np.ndarray, actions: np.ndarray, features: int) -> np.ndarray:
    """The first output ``[E, B]`` of each critic."""
    return outputs(p, z, actions, features)[..., 0]


def outputs(p: Params, z: np.ndarray, actions: np.ndarray, features: int) -> np.ndarray:
    base = np.concatenate([inputs(p, z, features), actions], 1)
    layers = sum(key.startswith("weights.") for key in p)
    rows = []
    for member in range(len(p["weights.0"])):
        x = base
        for i in range(layers):
            x = x @ p[f"weights.{i}"][member] + p[f"biases.{i}"][member]
            if i + 1 < layers:
                x = np.tanh(norm(x, p[f"scales.{i}"][member], p[f"shifts.{i}"][member]))
        rows.append(x)
    return np.array(rows)


class Reference:
    """The networks as numbers, and an update of them."""

    def __init__(self, parts: dict[str, Params], settings: Any, features: int, target_entropy: float):
        self.p = {name: {key: value.astype(np.float64) for key, value in part.items()} for name, part in parts.items()}
        self.slow = {
            name: {key: value.copy() for key, value in self.p[name].items()} for name in self.p if "critic" in name
        }
        self.s, self.features, self.target_entropy = settings, features, target_entropy
        self.moments: dict[str, Any] = {name: None for name in self.p}
        self.actor_updates = 0
        # beside a frozen policy: actions of z and what the actor drew, its inverse, and a further loss of both
        self.compose: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda z, own: own
        self.invert: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda z, actions: actions
        self.pull: Callable[[np.ndarray, np.ndarray], float] = lambda z, actions: 0.0
        self.holds = False  # while warming up

    def update(
        self, b: dict[str, np.ndarray], which: set[str], next_noise: np.ndarray, noise: np.ndarray, members: list[int]
    ) -> None:
        s, f = self.s, self.features
        temperature = np.log1p(np.exp(self.p["temperature"]["raw"]))
        discount = b["masks"] * s.discount ** b["n_steps"]
        next_actions, next_log_prob, _, _ = actor(self.p["actor"], b["next_z"], f, next_noise)
        next_actions = self.compose(b["next_z"], next_actions)
        value = critics(self.slow["critic"], b["target_z"], next_actions, f)[members].min(0)
        if s.backup_entropy:
            value = value - temperature * next_log_prob
        bias = np.array([sum(s.reward_bias * s.discount**k for k in range(int(n))) for n in b["n_steps"]])
        target = b["rewards"] + bias + discount * value
        if s.target_range:
            target = np.clip(target, *s.target_range)
        warming = self.actor_updates < s.critic_warmup
        left = 1 - (self.actor_updates - s.critic_warmup) / s.imitation_updates if s.imitation_updates else 1.0
        weight = 1.0 if warming else s.imitation_weight * max(0.0, left)

        def critic_loss(p: Params) -> float:
            return float(((critics(p, b["z"], b["actions"], f) - target) ** 2).mean())

        def actor_loss(p: Params) -> float:
            actions, log_prob, mean, std = actor(p, b.get("actor_z", b["z"]), f, noise)
            actions = self.compose(b["z"], actions)
            q = critics(self.p["critic"], b["z"], actions, f)
            value = q.mean(0) if s.actor_q == "mean" else q.min(0)
            loss = 0.0 if warming else -(value - temperature * log_prob).mean() + self.pull(b["z"], actions)
            if weight:
                own = self.invert(b["z"], b["actions"])
                shown = np.clip(own, -1 + 1e-6, 1 - 1e-6)
                if s.imitation_loss == "mse":
                    rows = ((np.tanh(mean) - own) ** 2).mean(1)
                else:
                    raw = 0.5 * np.log((1 + shown) / (1 - shown))
                    rows = -np.log(
                        np.exp(-0.5 * ((raw - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) / (1 - shown**2)
                    ).sum(1)
                loss += weight * rows[b["demo"]].mean()
            return float(loss)

        def temperature_loss(p: Params) -> float:
            return float(np.log1p(np.exp(p["raw"])) * (-next_log_prob.mean() - self.target_entropy))

        losses: dict[str, Callable[[Params], float]] = {
            "critic": critic_loss,
            "actor": actor_loss,
            "temperature": temperature_loss,
        }
        if "grasp_critic" in self.p:
            chosen = mlp(self.p["grasp_critic"], inputs(self.p["grasp_critic"], b["next_z"], f)).argmax(1)
            slow = mlp(self.slow["grasp_critic"], inputs(self.slow["grasp_critic"], b["target_z"], f))
            every = np.arange(len(chosen))
            grasp_target = b["rewards"] + bias + b["grasp_penalty"] + discount * slow[every, chosen]
            losses["grasp_critic"] = lambda p: float(
                ((mlp(p, inputs(p, b["z"], f))[every, b["grasps"]] - grasp_target) ** 2).mean()
            )
        self.actor_updates += "actor" in which
        if warming:
            which = which - {"temperature"} - ({"actor"} if self.holds else set())
        gradients = {name: slopes(losses[name], self.p[name]) for name in which}
        for name, found in gradients.items():
            self.adam(name, found)
        for name in which & set(self.slow):
            for key in self.slow[name]:
                self.slow[name][key] = (1 - s.tau) * self.slow[name][key] + s.tau * self.p[name][key]

    def adam(self, name: str, gradients: Params) -> None:
        first, second, n = self.moments[name] or ({k: 0.0 for k in gradients}, {k: 0.0 for k in gradients}, 0)
        n += 1
        for key, g in gradients.items():
            first[key] = 0.9 * first[key] + 0.1 * g
            second[key] = 0.999 * second[key] + 0.001 * g**2
            mean, spread = first[key] / (1 - 0.9**n), second[key] / (1 - 0.999**n)
            self.p[name][key] = np.array(self.p[name][key] - self.s.learning_rate * mean / (np.sqrt(spread) + 1e-8))
        self.moments[name] = (first, second, n)


def slopes(loss: Callable[[Params], float], p: Params, width: float = 1e-5) -> Params:
    """The gradient, one number at a time."""
    found = {}
    for key, value in p.items():
        found[key] = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            kept = value[place]
            value[place] = kept + width
            above = loss(p)
            value[place] = kept - width
            below = loss(p)
            value[place] = kept
            found[key][place] = (above - below) / (2 * width)
    return found
