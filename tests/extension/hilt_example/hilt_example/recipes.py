"""Recipes: complete settings of runs, which a command line changes in places. `hilt
train hilt_example.recipes:lamps` begins one."""

from __future__ import annotations

from hilt.hil.config import Hil
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla


def lamps() -> Vla:
    """Post-training of the linear policy on both lamps, in a second."""
    return Vla(
        policy="linear",
        tasks=["example/up", "example/down"],
        columns={"state": "state"},
        pool=SimulatorSettings(slots=4),
        collect=Collecting(group_size=4, data_batch_size=8),
        validation=Validation(episodes=2, period=0),
        max_steps=2,
    )


def lamp_with_a_person() -> Hil:
    """A run with a person in the loop, or a device in their place, in a second of learning."""
    agent = AgentConfig(hidden=[16], encoder=EncoderConfig(kind="none"))
    return Hil(
        task="example/up", agent=agent, defaults="images", max_steps=20, training_starts=8, log_period=5, batch_size=16
    )
