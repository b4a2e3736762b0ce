"""Random RLDS episodes, right and malformed, and what TF-Agents makes of them, written down step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

TERMINAL = "Terminal step must be the last step of an episode."
MID = "Mid step should not be followed by a first step."
LAST = "Last step of an episode must be followed by a first step."


def step(n: float, first: bool = False, last: bool = False, terminal: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "observation": np.array([n, -n], np.float32),
        "action": np.float32(10 * n),
        "reward": np.float32(n),
        "discount": np.float32(0.5),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        "is_terminal": np.bool_(terminal),
        **changes,
    }


def episode(first: int, length: int, terminal: bool = True, **metadata: Any) -> dict[str, Any]:
    """A whole one; its steps count from `first`."""
    last = length - 1
    return {"steps": [step(first + i, i == 0, i == last, terminal and i == last) for i in range(length)], **metadata}


def random_episodes(rng: np.random.Generator, spoil: float) -> list[dict[str, Any]]:
    """Some episodes; of their flags, a share `spoil` is turned round."""
    episodes = []
    for _ in range(rng.integers(1, 5)):
        made = episode(int(rng.integers(100)), int(rng.integers(1, 7)), bool(rng.integers(2)))
        for one in made["steps"]:
            one["discount"] = np.float32(rng.choice([0.0, 0.5, 0.99, 1.0]))
            for flag in ("is_first", "is_last", "is_terminal"):
                one[flag] = np.bool_(one[flag] ^ (rng.random() < spoil))
        episodes.append(made)
    return episodes


def expected(episodes: Iterable[dict[str, Any]]) -> tuple[list[tuple[Any, ...]], str | None]:
    """(step_type, observation, action, policy_info, next_step_type, reward, discount) of
    each trajectory, up to the error, and that."""
    flat = [one for made in episodes for one in made["steps"]]
    found: list[tuple[Any, ...]] = []
    for now, after in zip(flat, [*flat[1:], step(0, first=True)], strict=True):
        if now["is_terminal"] and not now["is_last"]:
            return found, TERMINAL
        if not now["is_last"] and not now["is_first"] and after["is_first"]:
            return found, MID
        if now["is_last"] and not after["is_first"]:
            return found, LAST
        types = [0 if one["is_first"] else 2 if one["is_last"] else 1 for one in (now, after)]
        types = [2, 2] if types == [0, 0] else types
        discount = 0.0 if now["is_last"] and now["is_terminal"] else float(now["discount"])
        found.append(
            (types[0], now["observation"].tolist(), float(now["action"]), (), types[1], float(now["reward"]), discount)
        )
    return found, None


def as_numbers(trajectory: Any) -> tuple[Any, ...]:
    """A trajectory of such episodes in the same form."""
    step_type, observation, action, info, next_type, reward, discount = (
        np.asarray(x).tolist() if not isinstance(x, tuple) else x for x in trajectory
    )
    return step_type, observation, action, info, next_type, reward, discount
