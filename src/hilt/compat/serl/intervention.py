"""`SpacemouseIntervention`: HIL-SERL's wrapper by its own name, over
`hilt.teleop.intervene.TakeOver` and our SpaceMouse."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium

from hilt.teleop.devices import Device, open_device
from hilt.teleop.intervene import TakeOver


class SpacemouseIntervention(TakeOver):
    """While a person moves the SpaceMouse, their action replaces the policy's, and ``info["intervene_action"]`` has it.

    The episode's ``intervention_count`` and ``intervention_steps`` are in ``info`` too; see `TakeOver` for the rest.
    """

    def __init__(
        self, env: gymnasium.Env, action_indices: Sequence[int] | None = None, *, device: Device | None = None
    ):
        """`action_indices`: the only dimensions that a person moves. `device`: another device
        than the first SpaceMouse that is found."""
        super().__init__(env, open_device("spacemouse") if device is None else device, action_indices=action_indices)
