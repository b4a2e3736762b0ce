"""RLinf's way from a rollout to the learner.

    ChunkStepResult ─► EmbodiedRolloutResult ─► Trajectory ─► Channel ─► the log ─► batches
    └──────────── the actor: RolloutSender ────────────┘      └─ the learner: Rollouts ─┘

Whole episodes travel, not steps. The learner has them in its log and draws batches as it does from any other;
``RUN/rollouts/online`` has them besides in RLinf's own files, written by a thread, for
``TrajectoryReplayBuffer.load_checkpoint``, RLinf's and ours.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ClosedError, DeadlineError, HiltError, RefusedError, SchemaError
from hilt.core.trajectory import Source
from hilt.core.tree import Array, flatten, unflatten
from hilt.envs.env_protocol import HasSpaces
from hilt.formats import rlinf_folder as folders
from hilt.hil.config import Hil, of_run
from hilt.hil.data import Experience
from hilt.replay import Channel, ChunkStepResult, EmbodiedRolloutResult, Trajectory
from hilt.replay import tensors as bridge

if TYPE_CHECKING:
    from hilt.wire import TrainerServer

FOLDER = Path("rollouts") / "online"
"""Where a run has its episodes in RLinf's own files"""
CHANNEL = "trajectories"
PUT_S = 5.0
"""How long one attempt to hand an episode over may take"""
FIELDS = {"terminated": "terminations", "truncated": "truncations", "policy_version": "versions", "rewards": "rewards"}
"""Numbers of a step that have a field of their own in a trajectory, [T, B, 1]"""
TREES = {"observations": "curr_obs", "next_observations": "next_obs"}
logger = logging.getLogger("hilt.compat")


class RolloutSender:
    """At the actor, instead of a spool: gathers the steps of an episode and hands
    it over, in a thread, when it has ended.

    What is not handed over yet is in memory: an actor that is killed loses it, and
    so does one whose learner stays away.
    """

    def __init__(self, client: Any, name: str = "actor", run: str = ""):
        self._channel, self._name, self._boot = client.channel(of_run(run, CHANNEL)), name, secrets.randbits(62)
        self._rollout, self._steps, self._sent = EmbodiedRolloutResult(), 0, 0
        self._waiting: Channel[dict[str, Any]] = Channel(name="episodes")
        self._under_way, self._closing = 0, threading.Event()
        self._thread = threading.Thread(target=self._send, name="hilt-rollouts", daemon=True)
        self._thread.start()

    def insert(self, step: Mapping[str, object]) -> None:
        """One step, as it would go into a log. Never waits for the network."""
        ended = bool(step["terminated"]) or bool(step["truncated"])
        append(self._rollout, {**step, "episode": np.array([self._boot, self._sent], np.int64)})
        self._steps += 1
        if ended:
            fields = self._rollout.to_trajectory().to_dict()
            item = {"actor": self._name, "trajectory": {path: _array(value) for path, value in flatten(fields).items()}}
            self._rollout, self._steps, self._sent = EmbodiedRolloutResult(), 0, self._sent + 1
            self._waiting.put(item)

    def waiting(self) -> int:
        """Episodes that the learner has not taken yet."""
        return len(self._waiting) + self._under_way

    def close(self, seconds: float = 10.0) -> int:
        """Waits up to the timeout for episodes in transit; returns how many the learner did
        not get, including an unfinished one."""
        deadline = time.monotonic() + seconds
        while self.waiting() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closing.set()
        left = self.waiting() + (self._steps > 0)
        self._waiting.close()
        self._thread.join(PUT_S + 1)
        return left

    def _send(self) -> None:
        item = None
        while not self._closing.is_set():
            try:
                if item is None:
                    item = self._waiting.get(timeout=0.2)
                    self._under_way = 1
                self._channel.put(item, timeout=PUT_S)
                item, self._under_way = None, 0
            except (DeadlineError, RefusedError):
                continue  # nothing to send, or no receiver: the same item is put again, and arrives once
            except ClosedError:
                return
            except HiltError as error:
                logger.warning("an episode was refused by the learner: %s", error)
                item, self._under_way = None, 0


class Rollouts(Experience):
    """`hilt.hil.data.Experience` of whole episodes: they arrive in a channel, go into the
    log, and RLinf's folder has them besides."""

    def __init__(self, run: Path, config: Hil, env: HasSpaces, agent: Any, notify: Callable[[str], None] = logger.info):
        super().__init__(run, config, env, agent, notify)
        self.channel: Channel[dict[str, Any]] = Channel(name=CHANNEL)
        folder = run / FOLDER
        index = (
            folders.read_index(folder) if (folder / "metadata.json").exists() else folders.FolderIndex(seed=config.seed)
        )
        self._saver = folders.FolderSaver(folder, index)
        known = {number: self.log.facts.about(number).get("episode") for number in self.log.trajectories()}
        self._known = {number: tuple(episode) for number, episode in known.items() if episode}
        # of a process that was killed before it wrote them
        for number, columns in self.ended_episodes(set(index.entries)).items():
            if number in self._known:
                self._save(number, columns)

    def register(self, server: TrainerServer, run: str) -> None:
        """Actors put whole episodes into this channel."""
        for name in {CHANNEL, of_run(run, CHANNEL)}:
            server.register_channel(name, self.channel)

    def take(self) -> None:
        """Episodes that arrived go into the log."""
        while len(self.channel):
            item = self.channel.get(timeout=0)
            try:
                columns = _columns(item["trajectory"])
                episode = tuple(columns.pop("episode")[0].tolist())
                if episode in self._known.values():  # handed over once more to a learner that was restarted
                    continue
                steps = unflatten({path: column[:, None] for path, column in columns.items()})
                actor, facts = str(item["actor"]), {"episode": list(episode)}
                number = self.log.add(steps, actor=actor, boot=str(episode[0]), store=CHANNEL, facts=facts)
            except (SchemaError, LookupError) as error:
                self._notify(
                    f"an episode of {item.get('actor', 'an actor')} does not fit this run, and is left out: {error}"
                )
                continue
            self._known[number] = episode
            self._save(number, columns)

    def close(self) -> None:
        self._saver.close()
        super().close()

    def _save(self, number: int, columns: Mapping[str, Array]) -> None:
        identity = np.repeat([self._known[number]], len(columns["rewards"]), axis=0)
        trajectory = _trajectory({**columns, "episode": identity})
        self._saver.add(number, folders.new_entry(number, trajectory), trajectory.to_dict())


def append(rollout: EmbodiedRolloutResult, step: Mapping[str, Any]) -> None:
    """One step of one environment, as a log has it, to a rollout."""
    given = flatten(
        {name: value for name, value in step.items() if name not in TREES and name != "actions" and name not in FIELDS}
    )
    one = {path: np.asarray(value)[None] for path, value in given.items()}
    numbers: Any = {field: np.asarray(step[name]).reshape(1, 1) for name, field in FIELDS.items()}
    done = numbers["terminations"] | numbers["truncations"]
    actions = np.asarray(step["actions"])[None]
    rollout.append_step_result(ChunkStepResult(actions=actions, dones=done, forward_inputs=unflatten(one), **numbers))
    human = bool(step["source"] == Source.HUMAN) and not bool(step["lost"])
    rollout.mark_last_step_with_intervene_flags(np.array([human]))
    seen = [unflatten({path: np.asarray(value)[None] for path, value in flatten(step[name]).items()}) for name in TREES]
    rollout.append_transitions(*seen)


def _trajectory(columns: Mapping[str, Array]) -> Trajectory:
    """Columns ``[T, ...]`` of one environment as a trajectory ``[T, 1, ...]``."""
    fields: dict[str, Any] = {}
    for path, column in columns.items():
        head, _, rest = path.partition("/")
        if head in TREES:
            fields[f"{TREES[head]}/{rest}"] = column[:, None]
        elif path in FIELDS:
            fields[FIELDS[path]] = column.reshape(-1, 1, 1)
        else:
            fields["actions" if path == "actions" else f"forward_inputs/{path}"] = column[:, None]
    human = (columns["source"] == Source.HUMAN) & ~columns["lost"].astype(bool)
    fields["intervene_flags"] = np.repeat(human[:, None, None], columns["actions"].shape[-1], axis=2)
    fields["dones"] = fields["terminations"] | fields["truncations"]
    return Trajectory.from_dict(
        unflatten({path: bridge.as_tensor(np.ascontiguousarray(value), path) for path, value in fields.items()})
    )


def _columns(fields: Mapping[str, Any]) -> dict[str, Array]:
    """The columns ``[T, ...]`` that a trajectory of one environment was made of; `fields` by path."""
    trees, names = {tree: name for name, tree in TREES.items()}, {field: name for name, field in FIELDS.items()}
    out: dict[str, Array] = {}
    for path, value in fields.items():
        head, _, rest = path.partition("/")
        if head in trees:
            out[f"{trees[head]}/{rest}"] = value[:, 0]
        elif head == "forward_inputs" or path == "actions":
            out[rest or path] = value[:, 0]
        elif path in names:
            out[names[path]] = value[:, 0, 0]
    return out


def _array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value
