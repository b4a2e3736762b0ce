"""A run with a real actor in simulation that a person takes over in the browser, in a process that can be ended."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from hilt.hil.actor import act
from hilt.hil.config import Hil, Wire
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.teleop import browser
from tests.hil.test_actor import Learner
from tests.wire.processes import free_port

TASK = {"image_size": None, "render_size": 64, "step_limit": 10_000}


def operated(**changes: Any) -> Hil:
    """Settings of a run whose policy holds still, with an operator in the browser."""
    agent = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[8])
    wire = Wire(port=free_port(), broadcast_port=free_port())
    given = {"task": "tabletop/reach", "task_options": TASK, "operator": "browser", "control_hz": 10.0}
    return Hil(**{**given, "agent": agent, "wire": wire, **changes})


def act_until_asked_to_end(config: Hil, run: Path) -> None:
    """The learner and the actor of a run, until SIGTERM."""
    browser.PATIENCE = 5.0  # a busy machine stands still for longer than a second
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    learner = Learner(config, run / "log")
    learner.publish(1, mean=0.0)
    try:
        act(config, run / "actors" / "actor-1", "actor-1", stop=over.is_set)
    finally:
        learner.close()
