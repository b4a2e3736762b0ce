"""Sides of the rollout benchmark: episodes of the same tasks, states and actions, as the pool runs them, as
LIBERO's SubprocVectorEnv does, and with one process for each trajectory, as SimpleVLA-RL has it. Nobody has a
policy: all time is the environments' and the way to them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("MUJOCO_GL", "egl")
# What is best where each core has an environment, for everybody: ours would have it without this, and LIBERO's
# pictures, too, take a fifth less of a core than with the renderer's own threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LP_NUM_THREADS", "0")

import numpy as np

from bench.sides import serve

TASKS = {"libero": "libero_spatial/0", "tabletop": "tabletop/pick"}
SIZES = {"libero": 256, "tabletop": 64}
"""Pixels of a picture's side; two cameras each"""
WAITS = 10
"""Steps that LIBERO's episodes begin with, in which things fall to rest"""
DEADLINE_S = 300.0


class Begin(NamedTuple):
    task: str
    state: int
    seed: int = 0
    split: str = "train"


def actions_of(state: int, chunks: int, chunk: int) -> Any:
    """[chunks, chunk, 7]: small motions, the gripper open, so that no episode ends early."""
    moves = np.random.default_rng(state).uniform(-0.3, 0.3, (chunks, chunk, 7)).astype(np.float32)
    moves[..., 6] = 0.0
    return moves


class Contender:
    """Runs episodes side by side from given states, and measures (seconds until all
    had begun, seconds of their steps)."""

    def start(self, suite: str, envs: int, chunk: int, cameras: bool) -> None:
        self.suite, self.envs, self.chunk = suite, envs, chunk
        self.size = SIZES[suite] if cameras else None
        self.open()

    def open(self) -> None: ...

    def episodes(self, first: int, chunks: int) -> tuple[float, float]:
        states = range(first, first + self.envs)
        plans = np.stack([actions_of(state, chunks, self.chunk) for state in states], 1)  # [chunks, envs, chunk, 7]
        start = time.perf_counter()
        self.begin(list(states))
        begun = time.perf_counter()
        for actions in plans:
            self.act(actions)
        self.end()
        return begun - start, time.perf_counter() - begun

    def begin(self, states: list[int]) -> None: ...

    def act(self, actions: Any) -> None: ...

    def end(self) -> None: ...


class Ours(Contender):
    """The pool, with a worker for each environment."""

    def open(self) -> None:
        from hilt.envs.pool import Pool

        # no episode ends here, as no peer's does
        options: dict[str, Any] = {"image_size": self.size, "step_limit": 100_000}
        if self.suite == "libero":
            options["shadows"] = True  # the pictures are then those that the peers give
        deadlines = {"start_s": DEADLINE_S, "step_s": DEADLINE_S}  # a busy machine is slow, and loses nothing
        self.pool, self.all = Pool(self.envs, self.envs, task_options=options, **deadlines), list(range(self.envs))

    def begin(self, states: list[int]) -> None:
        for slot, state in enumerate(states):
            self.pool.start(slot, Begin(TASKS[self.suite], state))
        self._collect(0)

    def act(self, actions: Any) -> None:
        for slot in self.all:
            self.pool.step(slot, actions[slot])
        self._collect(self.chunk)

    def _collect(self, executed: int) -> None:
        for reply in self.pool.collect(self.all):
            if reply.error or reply.executed != executed:
                raise RuntimeError(reply.error or f"{reply.executed} actions of {executed} were carried out")

    def close(self) -> None:
        self.pool.close()


class Subproc(Contender):
    """LIBERO's own vector environment: persistent processes, one message and, with
    cameras, two pictures for each step."""

    def open(self) -> None:
        from hilt.envs.libero import _libero

        _libero()
        from libero.libero.envs.venv import SubprocVectorEnv

        self.env = SubprocVectorEnv([maker(self.suite, self.size)] * self.envs)

    def begin(self, states: list[int]) -> None:
        if self.suite == "libero":
            self.env.reset()
            self.env.set_init_state(stored(states))
            for _ in range(WAITS):
                self.env.step(np.array([[0, 0, 0, 0, 0, 0, -1.0]] * self.envs))
        else:
            for number, state in enumerate(states):
                self.env.workers[number].send(None, options={"split": "train", "state": state})
            for worker in self.env.workers:
                worker.recv()

    def act(self, actions: Any) -> None:
        for number in range(self.chunk):
            self.env.step(actions[:, number])

    def close(self) -> None:
        self.env.close()


class Processes(Contender):
    """A process for each trajectory: it makes its environment, puts what it sees into a queue after every chunk, and
    ends. It is forked, as SimpleVLA-RL's are, from a process that has imported everything."""

    def open(self) -> None:
        self.context = multiprocessing.get_context("fork")
        imported(self.suite)

    def begin(self, states: list[int]) -> None:
        self.orders, self.seen = [self.context.Queue() for _ in states], [self.context.Queue() for _ in states]
        ways = zip(states, self.orders, self.seen, strict=True)
        self.running = [
            self.context.Process(target=trajectory, args=(self.suite, self.size, *way), daemon=True) for way in ways
        ]
        for process in self.running:
            process.start()
        self._wait()

    def act(self, actions: Any) -> None:
        for orders, chunk in zip(self.orders, actions, strict=True):
            orders.put(chunk)
        self._wait()

    def end(self) -> None:
        for orders in self.orders:
            orders.put(None)
        for process in self.running:
            process.join(DEADLINE_S)

    def _wait(self) -> None:
        for seen in self.seen:
            seen.get(timeout=DEADLINE_S)


def trajectory(suite: str, size: int | None, state: int, orders: Any, seen: Any) -> None:
    env = maker(suite, size)()
    if suite == "libero":
        env.reset()
        observation = env.set_init_state(stored([state])[0])
        for _ in range(WAITS):
            observation = env.step([0, 0, 0, 0, 0, 0, -1.0])[0]
    else:
        observation, _ = env.reset(options={"split": "train", "state": state})
    seen.put(observation)
    while (actions := orders.get(timeout=DEADLINE_S)) is not None:
        for action in actions:
            observation = env.step(action)[0]
        seen.put(observation)
    env.close()


def imported(suite: str) -> Any:
    """Imports a suite with everything it needs, and returns the function that makes its environments."""
    import importlib

    if suite == "tabletop":
        return importlib.import_module("hilt.envs.tabletop.suite_env").TabletopEnv
    from hilt.envs import libero

    libero._libero()
    importlib.import_module("libero.libero")._assets_path_cache = str(libero.assets_folder())
    return importlib.import_module("libero.libero.envs.env_wrapper")


def maker(suite: str, size: int | None) -> Callable[[], Any]:
    """Makes an environment as its own project has it: LIBERO's with shadows and a hard reset."""

    def make() -> Any:
        if suite == "tabletop":
            return imported(suite)(TASKS[suite].partition("/")[2], image_size=size, step_limit=100_000)
        from hilt.envs import libero

        wrapper, (name, _, number) = imported(suite), TASKS[suite].partition("/")
        bddl = libero._root() / "bddl_files" / name / f"{libero.task_names(name)[int(number)]}.bddl"
        if size is None:
            env = wrapper.ControlEnv(bddl_file_name=str(bddl), use_camera_obs=False, has_offscreen_renderer=False)
        else:
            env = wrapper.OffScreenRenderEnv(bddl_file_name=str(bddl), camera_heights=size, camera_widths=size)
        env.seed(0)
        return env

    return make


def stored(states: list[int]) -> Any:
    from hilt.envs.libero import stored_states

    suite, _, number = TASKS["libero"].partition("/")
    found = stored_states(suite, int(number))
    return found[[state % len(found) for state in states]]


if __name__ == "__main__":
    serve({"ours": Ours, "subproc": Subproc, "processes": Processes})
