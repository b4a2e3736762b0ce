"""An image of the camera is followed through a run: docs/life-of-an-observation.md names every file that it passes."""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import zmq

import hilt
from hilt.envs.tabletop.suite_env import TabletopEnv
from hilt.hil.actor import act
from hilt.hil.config import Wire
from hilt.hil.data import Experience
from hilt.hil.environment import spaces, trainer_config
from hilt.hil.make_agent import make_agent
from hilt.recipes.hil import hil_debug
from hilt.replay.step_encoder import BlockSteps, PackedBlock
from hilt.wire import TrainerServer
from tests.wire.processes import free_port

SOURCE = Path(hilt.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "life-of-an-observation.md").read_text()
HOP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
HELPER = re.compile(r"^\| `([\w/]+\.py)` \| (?!`)", re.MULTILINE)
FOLLOWED = 6
"""The observation that is followed, counted from the first one of the run"""
STEPS, DEADLINE_S = 12, 240.0
Place = tuple[str, int]
"""A file and the first line of a function in it"""


class Tracer:
    """Notes every function of Hilt that is given an image, or returns it."""

    def __init__(self) -> None:
        self.image, self.places = b"", list[Place]()
        self._looking = threading.local()

    @contextmanager
    def following(self) -> Iterator[None]:
        """In this thread, and in those that are started meanwhile."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, returned: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not self.image or getattr(self._looking, "now", False):
            return
        if not code.co_filename.startswith(f"{SOURCE}/"):
            return
        self._looking.now = True
        try:
            values = [returned] if event == "return" else _arguments(frame, code)
            if any(self.within(value) for value in values):
                file = Path(code.co_filename).relative_to(SOURCE).as_posix()
                self.places.append((file, code.co_firstlineno))
        finally:
            self._looking.now = False

    def within(self, value: Any, depth: int = 0) -> bool:
        """Whether the image is somewhere in a value."""
        if isinstance(value, np.ndarray):
            return value.nbytes >= len(self.image) and self.image in value.tobytes()
        if isinstance(value, bytes | bytearray | memoryview | zmq.Frame):
            return self.image in bytes(value)
        if depth > 4:
            return False
        if isinstance(value, dict):
            return any(self.within(each, depth + 1) for each in tuple(value.values()))
        if isinstance(value, list | tuple):
            return any(self.within(each, depth + 1) for each in tuple(value))
        if is_dataclass(value) and not isinstance(value, type):
            return any(self.within(getattr(value, each.name), depth + 1) for each in fields(value))
        packed = isinstance(value, PackedBlock | BlockSteps)
        return packed and any(self.within(each, depth + 1) for each in tuple(vars(value).values()))


def _arguments(frame: FrameType, code: CodeType) -> list[Any]:
    """What a function was called with, without its `self`."""
    more = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args and **kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]
    return [frame.f_locals.get(name) for name in names if name != "self"]


def place_of(file: str, name: str) -> Place:
    """Where a function begins, with its decorators: ``Class.function``, or ``function``."""
    body: list[Any] = ast.parse((SOURCE / file).read_text()).body
    node: Any = None
    for part in name.split("."):
        node = next(each for each in body if getattr(each, "name", "") == part)
        body = node.body
    return file, min([node.lineno, *(each.lineno for each in node.decorator_list)])


@pytest.fixture
def tracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """What follows the image of one observation, from the simulator to a batch that has it. The actor waits until the
    learner has a step before it makes the next one, as it comes about at the rate of an arm."""
    wire = Wire(port=free_port(), broadcast_port=free_port())
    config = replace(hil_debug(), wire=wire, demonstrations=0, training_starts=4, random_steps=1000, n_step=1)
    env = spaces(config)
    agent = make_agent(config, env, 0)
    experience = Experience(tmp_path, config, env, agent, lambda text: None)
    tracer, seen, observe = Tracer(), list[int](), TabletopEnv.observation
    deadline = time.monotonic() + DEADLINE_S

    def observation(self: TabletopEnv) -> dict[str, Any]:
        made = observe(self)
        # a new episode begins with one that is of no step yet, and the actor goes on until it is told to stop
        while len(experience.log) < min(len(seen) - 1, STEPS) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(0)
        if len(seen) == FOLLOWED:
            image = next(iter(made["images"].values()))
            image[...] = np.random.default_rng(0).integers(256, size=image.shape, dtype=np.uint8)
            tracer.image = image.tobytes()
        return made

    def answer(name: str, payload: object) -> dict[str, Any]:
        return {"stop": len(experience.log) >= STEPS, "update": 0, "online": len(experience.log), "run": "this run"}

    monkeypatch.setattr(TabletopEnv, "observation", observation)
    server = TrainerServer(trainer_config(config, learner=True), request_callback=answer)
    experience.register(server, "this run")
    with tracer.following():
        server.start(threaded=True)
        server.publish_network(agent.acting_state(), 1)
        act(config, tmp_path / "actor", stop=lambda: time.monotonic() > deadline)
        while not tracer.within(experience.next_batch(32)) and time.monotonic() < deadline:
            pass
    yield tracer
    server.stop()
    experience.close()


def test_the_page_names_every_hop_of_an_observation_in_order(tracer: Tracer):
    hops, helpers = HOP.findall(PAGE), set(HELPER.findall(PAGE))
    passed, at = tracer.places, 0
    for file, name in hops:
        place = place_of(file, name)
        assert place in passed, f"{file}: {name} was not given the image and did not return it"
        assert place in passed[at:], f"{file}: {name} comes earlier than the page says"
        at = passed.index(place, at) + 1
    unnamed = {file for file, _ in passed} - {file for file, _ in hops} - helpers
    assert not unnamed, "the image passed files that the page does not name"
    assert not helpers & {file for file, _ in hops} and all((SOURCE / file).is_file() for file in helpers)
