"""What a worker of `hilt.envs.pool` does: it makes environments, carries out what slots
ask, and writes what is seen for the pool to read.

One environment serves many slots when it can take snapshots of itself: 64 episodes
need no 64 models and graphics contexts then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import resource
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from hilt.core import platform
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.signals import leave_to_parent
from hilt.core.tree import Array, Observation
from hilt.envs.env_protocol import Env, success_of
from hilt.envs.task import make, register, step_chunk

OUTPUT_BYTES = 16_384
"""The number of bytes of a worker's last output that is reported when it dies"""


def work(config: dict[str, Any]) -> None:
    """The whole life of a worker process: it answers until its pool hangs up."""
    leave_to_parent()
    faulthandler.enable()  # a crash, and the signal that ends a hang, print where they happened
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the caller is gone, however it ended, the kernel ends this process where it
    # can: a thread of Python could be kept from it.
    platform.end_with_pipe(config["alive"], config["deadline"])
    for prefix, factory in config["factories"].items():
        if factory:
            register(prefix, factory)
    simulators = Simulators(config, {int(slot): Frames(descriptor) for slot, descriptor in config["frames"].items()})
    with Connection(config["pipe"]) as pipe, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            pipe.send_bytes(msgpack.packb(simulators.answer(msgpack.unpackb(pipe.recv_bytes()))))
            if os.lseek(2, 0, os.SEEK_CUR) > 64 * OUTPUT_BYTES:  # the file of what it prints does not grow for ever
                os.ftruncate(2, 0)
                os.lseek(2, 0, os.SEEK_SET)
    simulators.close()


@dataclass(eq=False)
class _Made:
    """An environment, and the slots that have an episode in it. One that can take snapshots serves many, in turns."""

    task: str
    env: Env
    shared: bool
    users: set[int] = field(default_factory=set)
    last: int = -1
    """The slot whose episode it is in now"""


class Simulators:
    """The environments of one process."""

    def __init__(self, config: Mapping[str, Any], frames: Mapping[int, Frames]):
        self._options, self._limit, self._frames = config["options"], config["envs"], frames
        self._made: list[_Made] = []
        """The one that was used last is at the end"""
        self._at: dict[int, _Made] = {}
        self._snapshots: dict[int, Any] = {}

    def answer(self, asked: Mapping[str, Any]) -> dict[str, object]:
        slot = asked["slot"]
        try:
            if "describe" in asked:
                env = self._environment(asked["task"], slot).env
                self._leave(slot)
                words, limit, states = (
                    env.get_wrapper_attr(name) for name in ("instruction", "step_limit", "initial_states")
                )
                about = {
                    "instruction": str(words),
                    "step_limit": int(limit),
                    "initial_states": {k: int(n) for k, n in states.items()},
                }
                if env.has_wrapper_attr("states_of_train"):
                    about["states_of_train"] = {k: int(n) for k, n in env.get_wrapper_attr("states_of_train").items()}
                return {"slot": slot, "about": {**about, "action_dim": int(np.prod(env.action_space.shape))}}
            if "task" in asked:
                return self._begin(slot, asked)
            return self._go_on(slot, np.frombuffer(asked["actions"], asked["dtype"]).reshape(asked["shape"]))
        except Exception as error:  # noqa: BLE001  # broad: environments may raise anything; it is reported to the caller
            reply = {"slot": slot, "error": traceback.format_exc(), "kind": type(error).__name__, "text": str(error)}
            self._forget(slot)
            return reply

    def close(self) -> None:
        for made in self._made:
            made.env.close()
        self._made.clear()

    def _begin(self, slot: int, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._leave(slot)
        made = self._environment(asked["task"], slot)
        self._put_away(made, slot)
        made.last = slot
        observation, info = made.env.reset(
            seed=asked["seed"], options={"split": asked["split"], "state": asked["state"]}
        )
        return self._seen(slot, made, observation, np.zeros(0, np.float32), False, False, info)

    def _go_on(self, slot: int, actions: Array) -> dict[str, Any]:
        made = self._at[slot]
        if made.last != slot:
            self._put_away(made, slot)
            made.env.get_wrapper_attr("restore")(self._snapshots.pop(slot))
            made.last = slot
        return self._seen(slot, made, *step_chunk(made.env, actions))

    def _seen(
        self,
        slot: int,
        made: _Made,
        observation: Any,
        rewards: Array,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> dict[str, Any]:
        if terminated or truncated:
            self._leave(slot)
        return {
            "slot": slot,
            "layout": self._frames[slot].write(observation),
            "instruction": str(made.env.get_wrapper_attr("instruction")),
            "rewards": np.asarray(rewards, np.float32).tobytes(),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "success": success_of(info),
        }

    def _environment(self, task: str, slot: int) -> _Made:
        """One that is free, or is shared, or is made now; then the least recently used idle ones may be closed."""
        found = next((made for made in self._made if made.task == task and (made.shared or not made.users)), None)
        if found is None:
            for made in [made for made in self._made if not made.users][: max(0, len(self._made) + 1 - self._limit)]:
                self._made.remove(made)
                made.env.close()
            env = self._make(task)
            found = _Made(task, env, hasattr(env, "snapshot") and hasattr(env, "restore"))
        else:
            self._made.remove(found)
        self._made.append(found)
        found.users.add(slot)
        self._at[slot] = found
        return found

    def _make(self, task: str) -> Any:
        try:
            return make(task, **self._options)
        except TypeError as error:
            if "argument" in str(error):
                raise ConfigError(f"{task} does not take task_options {self._options}: {error}.") from error
            raise

    def _put_away(self, made: _Made, slot: int) -> None:
        """The episode that a shared environment is in, so that another can go on."""
        if made.last != slot and made.last in made.users:
            self._snapshots[made.last] = made.env.get_wrapper_attr("snapshot")()

    def _leave(self, slot: int) -> None:
        self._snapshots.pop(slot, None)
        if (made := self._at.pop(slot, None)) is not None:
            made.users.discard(slot)

    def _forget(self, slot: int) -> None:
        """An environment that raised is thrown away. Other episodes that it served
        were put away, and go on in a new one."""
        made = self._at.get(slot)
        self._leave(slot)
        if made is None:
            return
        self._made.remove(made)
        with contextlib.suppress(Exception):  # it failed already, which was reported
            made.env.close()
        if made.users:
            fresh = _Made(made.task, self._make(made.task), True, made.users)
            self._made.append(fresh)
            self._at |= dict.fromkeys(made.users, fresh)


class Frames:
    """The last observation of a slot, in memory without a name that processes
    share; it is gone with the last of them."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._layout: list[Any] = []
        self._arrays: list[Array] = []
        weakref.finalize(self, os.close, descriptor)

    def write(self, observation: Observation) -> list[Any]:
        """Gives where what lies, for `read`."""
        leaves = _leaves(observation)
        layout: list[Any] = [[list(path), value.dtype.str, list(value.shape)] for path, value in leaves]
        if layout != self._layout:
            size, places = _places(layout)
            if size > os.fstat(self.descriptor).st_size:  # it never shrinks: somebody may still look at what it had
                platform.allocate(self.descriptor, size)  # what is not there is an error here, and no crash later
            memory = mmap.mmap(self.descriptor, size)
            self._arrays = [
                np.ndarray(shape, dtype, memory, place) for (_, dtype, shape), place in zip(layout, places, strict=True)
            ]
            self._layout = layout
        for array, (_, value) in zip(self._arrays, leaves, strict=True):
            np.copyto(array, value)
        return layout

    def read(self, layout: list[Any]) -> Any:
        if layout != self._layout:
            size, places = _places(layout)
            memory = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
            self._arrays = [
                np.ndarray(shape, dtype, memory, place) for (_, dtype, shape), place in zip(layout, places, strict=True)
            ]
            self._layout = layout
        tree: Any = {}
        for array, (path, _, _) in zip(self._arrays, layout, strict=True):
            if not path:
                return array
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = array
        return tree


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Array]]:
    """The arrays of an observation; keys may have slashes."""
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]
    array = np.asarray(tree) if not isinstance(tree, tuple) else np.array(None)
    if array.dtype.hasobject:
        raise SchemaError(
            f"{'/'.join(('observation', *path))} is {type(tree).__name__}; expected arrays of numbers, in dictionaries."
        )
    return [(path, array)]


def _places(layout: list[Any]) -> tuple[int, list[int]]:
    """(bytes in all, where each array begins)"""
    size, places = 0, []
    for _, dtype, shape in layout:
        places.append(size)
        size += -(-max(1, np.dtype(dtype).itemsize * int(np.prod(shape))) // 64) * 64
    return max(size, 64), places
