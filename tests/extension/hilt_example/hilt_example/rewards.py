"""Rewards: functions of an observation."""

from __future__ import annotations

from typing import Any

from hilt.envs.rewards import RewardFunction


def lit(observation: Any) -> float:
    """1 where the lamp was changed by more than 0.5 the right way, which is less than the task asks for; a success."""
    change, sign = observation["state"]
    return float(change * sign > 0.5)


class Shaped(RewardFunction):
    """How far the lamp was changed, and success by the same rule."""

    def __call__(self, observation: Any) -> tuple[float, bool]:
        change, sign = observation["state"]
        return float(change * sign), bool(change * sign > 0.5)
