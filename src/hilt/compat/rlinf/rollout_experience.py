"""The learner's other store: RLinf's way from a rollout to a batch.

    ChunkStepResult ─► EmbodiedRolloutResult ─► Trajectory ─► Channel ─► TrajectoryReplayBuffer.add_trajectories ─► sample
    └──────────── the actor: RolloutSender ────────────┘      └──────────────── the learner: Rollouts ────────────────┘

Whole episodes travel, not steps. ``RUN/rollouts/`` has them in RLinf's own folders, written by the buffer's thread; what a person did is in
a second buffer beside the demonstrations, as RLinf does it. Batches are drawn with the same random numbers as from the log, so that the
same episodes in the same order give the same batches, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ClosedError, ConfigError, DeadlineError, EmptyError, HiltError, RefusedError
from hilt.core.files import DISK
from hilt.core.trajectory import Source
from hilt.core.tree import Array, flatten, unflatten
from hilt.envs.task import HasSpaces
from hilt.formats import rlinf_folder as folders
from hilt.hil.config import Hil, of_run
from hilt.hil.data import Batch, Foresight, demonstrated, finish, open_logs, split, told
from hilt.hil.importing import columns_for
from hilt.recording.recording_folder import GRASP, SUMMED
from hilt.replay import Channel, ChunkStepResult, EmbodiedRolloutResult, Schema, Trajectory, TrajectoryReplayBuffer, concat_batches
from hilt.replay import tensors as bridge
from hilt.runs.checkpoint import generator_state, set_generator_state

CHANNEL = "trajectories"
PUT_S = 5.0
"""How long one attempt to hand an episode over may take"""
FIELDS = {"terminated": "terminations", "truncated": "truncations", "policy_version": "versions", "rewards": "rewards"}
"""Numbers of a step that have a field of their own in a trajectory, [T, B, 1]"""
TREES = {"observations": "curr_obs", "next_observations": "next_obs"}
logger = logging.getLogger("hilt.compat")


class RolloutSender:
    """At the actor, instead of a spool: gathers the steps of an episode and hands it over, in a thread, when it has ended.

    What is not handed over yet is in memory: an actor that is killed loses it, and so does one whose learner stays away.
    """

    def __init__(self, client: Any, name: str = "actor", run: str = ""):
        self._channel, self._name, self._boot = client.channel(of_run(run, CHANNEL)), name, secrets.randbits(62)
        self._rollout, self._steps, self._sent = EmbodiedRolloutResult(), 0, 0
        self._waiting: Channel[dict[str, Any]] = Channel(name="episodes")
        self._under_way, self._closing = 0, threading.Event()
        self._thread = threading.Thread(target=self._send, name="hilt-rollouts", daemon=True)
        self._thread.start()

    def insert(self, step: Mapping[str, Any]) -> None:
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
        """Waits up to the timeout for episodes in transit; returns how many the learner did not get, including an unfinished one."""
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


class Rollouts:
    """`hilt.hil.data.Experience` with trajectory buffers underneath: one for what actors send, one for demonstrations and what
    people did."""

    def __init__(self, run: Path, config: Hil, env: HasSpaces, agent: Any, say: Callable[[str], None] = logger.info):
        self._config, self._agent, self._say, self._folder = config, agent, say, run / "rollouts" / "online"
        demos, log = open_logs(run, config, Schema.declare(columns_for(config, env)), say)
        log.close()
        self._check_same(run / "rollouts")
        kept = {"enable_cache": False, "sample_window_size": 0}
        self.online = TrajectoryReplayBuffer(config.seed, auto_save=True, auto_save_path=str(self._folder), **kept)  # type: ignore[arg-type]
        self.demo = TrajectoryReplayBuffer(config.seed + 1, **kept)  # type: ignore[arg-type]
        self._demonstrations = TrajectoryReplayBuffer(**kept)  # type: ignore[arg-type]  # without what people did
        self.channel: Channel[dict[str, Any]] = Channel(name=CHANNEL)
        self._states = _States(agent)
        self._alone, self._human = False, 0
        self._sizes: list[int] = []
        self._known: set[tuple[int, ...]] = set()
        self._finished: dict[int, dict[str, Any]] = {}
        self._versions: list[int] = []
        self.total = 0
        """Online steps so far"""
        self._foresight = Foresight(config.agent.encoder.pretrain_predict)
        with demos:
            self._demonstrated = demonstrated(demos, agent) if len(demos) else {}
            for number in demos.trajectories():
                columns = flatten(demos.read(demos.trajectory_keys(number)))
                columns["episode"] = np.full((len(columns["rewards"]), 2), [-1, number])
                shown = self._trajectory(columns, first=-1 - self.demo.total_samples, step=-1)
                if self._foresight.path:
                    self._foresight.add(_array(shown.forward_inputs["row"])[:, 0], columns)
                self.demo.add_trajectories([shown])
                self._demonstrations.add_trajectories([shown])
        if (self._folder / "metadata.json").exists():
            self._load()

    def _check_same(self, folder: Path) -> None:
        """Rewards are summed over `n_step` when an episode arrives: two ways cannot be in one folder."""
        DISK.make_folders(folder)
        now: dict[str, Any]
        card, now = folder / "rollouts.json", {"n_step": self._config.n_step, "discount": self._config.agent.rlpd.discount}
        if self._config.n_step > 1 and "learned" in self._config.agent.setup_mode:
            now["summed"] = sorted(SUMMED)  # older versions summed the rewards alone
        if card.exists() and (was := read_json(card)) != now:
            raise ConfigError(f"{folder} has rewards summed with {was}, and this run has {now}. Set it back, or begin another run.")
        write_json(card, now)

    def _load(self) -> None:
        """Goes on with what was there. What a person did is taken from it once more."""
        self.online.load_checkpoint(str(self._folder))
        index = folders.read_index(self._folder)
        for number, entry in index.entries.items():
            path = folders.find_file(self._folder, entry, index.trajectory_format)
            with contextlib.suppress(HiltError):  # of a damaged file: the buffer skips it with a warning
                if path is not None:
                    self._took(Trajectory.from_dict(folders.read_trajectory(path)), number, "")

    # What there is

    def register(self, server: Any, run: str) -> None:
        """Actors put whole episodes into this channel."""
        for name in {CHANNEL, of_run(run, CHANNEL)}:
            server.register_channel(name, self.channel)

    def take(self) -> None:
        """Episodes that arrived go into the buffers."""
        while len(self.channel):
            item = self.channel.get(timeout=0)
            columns = _columns(item["trajectory"])
            if tuple(columns["episode"][0].tolist()) not in self._known:  # else handed over once more to a learner that was restarted
                trajectory = self._trajectory(columns, self.total)
                self.online.add_trajectories([trajectory])
                self._took(trajectory, self.online.trajectory_counter - 1, str(item["actor"]))

    def _trajectory(self, columns: Mapping[str, Array], first: int, step: int = 1) -> Trajectory:
        """With n-step sums; rows are numbered, demonstrations below 0."""
        steps = n_step(columns, self._config.n_step, self._config.agent.rlpd.discount)
        trajectory = _trajectory({**steps, "row": first + step * np.arange(len(steps["rewards"]))})
        self._states.expect(trajectory)
        return trajectory

    def _took(self, trajectory: Trajectory, number: int, actor: str) -> None:
        """It is in the online buffer; what a person did in it goes to the demonstrations too."""
        columns = _columns({path: _array(value) for path, value in flatten(trajectory.to_dict()).items()})
        pieces = trajectory.extract_intervene_traj() or []
        self.demo.add_trajectories(pieces)
        self._human += sum(len(_array(piece.rewards)) for piece in pieces)
        if not actor:
            self._states.expect(trajectory)
        self._known.add(tuple(columns["episode"][0].tolist()))
        self._sizes.append(len(columns["row"]))
        self.total += self._sizes[-1]
        self._versions = [*self._versions, int(columns["policy_version"][-1])][-64:]
        facts = told({**columns, "rewards": columns["reward"]}, self._config.agent.rlpd)
        self._finished[number] = {"trajectory": number, **facts, "actor": actor}
        within = np.cumsum(self._sizes[::-1]) <= self._config.replay_buffer_capacity
        self.online.sample_window_size = max(1, int(within.sum()))

    def counts(self) -> dict[str, int]:
        kept = sum(self._sizes[-self.online.sample_window_size :])
        return {"log_steps": kept, "demo_steps": self.demo.total_samples, "human_steps": self._human}

    def newest_versions(self, trajectories: int) -> list[int]:
        return self._versions[-trajectories:]

    def demonstrated(self) -> dict[str, Any]:
        """The proprioception of all demonstrations."""
        return self._demonstrated or demonstrated({}, self._agent)  # type: ignore[arg-type]

    def finished(self) -> Iterator[dict[str, Any]]:
        finished, self._finished = self._finished, {}
        return iter(finished.values())

    def reported(self, trajectories: Sequence[int]) -> None:
        for number in trajectories:
            self._finished.pop(number, None)

    # Batches

    def sample(self, batch_size: int, part: str = "both", images: bool = False) -> Batch:
        """Samples a batch like `Experience.sample`."""
        demo = self._demonstrations if part == "demonstrations" else self.demo
        online = split(batch_size, part, demo.total_samples)
        if part == "both" and online == batch_size and not self._alone:
            self._say("there are no demonstrations and no take-overs yet: batches are all online")
            self._alone = True
        shared = self.demo.random_generator
        demo.random_generator.set_state(shared.get_state())  # one stream of random numbers for both
        parts = [*_drawn(self.online, online), *_drawn(demo, batch_size - online)]
        shared.set_state(demo.random_generator.get_state())
        drawn: Any = parts[0]
        for more in parts[1:]:
            drawn = concat_batches(drawn, more)
        return self._batch({path: value.numpy() for path, value in flatten(drawn).items()}, online, images)

    def _batch(self, drawn: Mapping[str, Array], online: int, images: bool) -> Batch:
        cached = self._agent.frozen and not images
        seen = [] if cached else [*self._agent.image_paths, *self._agent.proprio]
        columns = {f"{name}/{path}": drawn[f"{tree}/{path}"] for name, tree in TREES.items() for path in seen}
        columns |= {"actions": drawn["actions"], "rewards": drawn["rewards"][:, 0], "terminated": drawn["terminations"][:, 0]}
        columns |= {name: drawn[f"forward_inputs/{name}"] for name in ("source", "n_steps", GRASP) if f"forward_inputs/{name}" in drawn}
        if images and self._foresight.path and not online:
            columns["future"] = self._foresight.of(drawn["forward_inputs/row"])
        if cached:
            columns["observations/z"], columns["next_observations/z"] = self._states.of(drawn["forward_inputs/row"])
        return finish(columns, online)

    @property
    def torch_seconds(self) -> float:
        return self._states.seconds

    # Going on

    def state(self) -> dict[str, Any]:
        return {"draws": {"online": generator_state(self.online.random_generator), "demo": generator_state(self.demo.random_generator)}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self.online.random_generator, state["draws"]["online"])
        set_generator_state(self.demo.random_generator, state["draws"]["demo"])

    def close(self) -> None:
        for buffer in (self.online, self.demo, self._demonstrations):
            buffer.close()


class _States:
    """``z`` of each row's two observations, of a frozen encoder, by the row's number; made when a batch first needs it."""

    def __init__(self, agent: Any):
        self._agent = agent
        self._waiting: list[Trajectory] = []
        self._rows: dict[int, tuple[Array, Array]] = {}
        self.seconds = 0.0

    def expect(self, trajectory: Trajectory) -> None:
        if self._agent.frozen:
            self._waiting.append(trajectory)

    def of(self, rows: Array) -> tuple[Array, Array]:
        waiting, self._waiting = self._waiting, []
        for trajectory in waiting:
            seen = [{path: value[:, 0] for path, value in flatten(tree).items()} for tree in (trajectory.curr_obs, trajectory.next_obs)]
            began = time.perf_counter()
            made = [self._agent.states(tree) for tree in seen]
            self.seconds += time.perf_counter() - began
            self._rows.update(zip(trajectory.forward_inputs["row"][:, 0].tolist(), zip(*made, strict=True), strict=True))
        now, after = zip(*(self._rows[row] for row in rows.tolist()), strict=True)
        return np.stack(now), np.stack(after)


def _drawn(buffer: TrajectoryReplayBuffer, n: int) -> Iterator[dict[str, Any]]:
    """Yields `n` rows in parts: a buffer gives at most as many as it has."""
    if n and not len(buffer):
        raise EmptyError("there is no online step to draw yet; wait until there is one.")
    while n:
        part = buffer.sample(n)
        n -= len(part["actions"])
        yield part


def append(rollout: EmbodiedRolloutResult, step: Mapping[str, Any]) -> None:
    """One step of one environment, as a log has it, to a rollout."""
    given = flatten({name: value for name, value in step.items() if name not in TREES and name != "actions" and name not in FIELDS})
    one = {path: np.asarray(value)[None] for path, value in given.items()}
    numbers: Any = {field: np.asarray(step[name]).reshape(1, 1) for name, field in FIELDS.items()}
    done = numbers["terminations"] | numbers["truncations"]
    actions = np.asarray(step["actions"])[None]
    rollout.append_step_result(ChunkStepResult(actions=actions, dones=done, forward_inputs=unflatten(one), **numbers))
    human = bool(step["source"] == Source.HUMAN) and not bool(step["lost"])
    rollout.mark_last_step_with_intervene_flags(np.array([human]))
    seen = [unflatten({path: np.asarray(value)[None] for path, value in flatten(step[name]).items()}) for name in TREES]
    rollout.append_transitions(*seen)


def n_step(columns: Mapping[str, Array], n: int, discount: float) -> dict[str, Array]:
    """The columns ``[T, ...]`` of one episode with rewards (and the gripper's penalty) summed over up to `n` steps, as
    `hilt.replay.sampling.assembly.NStep` does it: what a sum ends with is what its row ends with. The rewards themselves are kept as
    ``reward``."""
    steps = len(columns["rewards"])
    goes_on = ~(columns["terminated"] | columns["truncated"]).astype(bool)
    for path in [path for path in columns if path.startswith("observations/")]:
        same = columns[path][1:] == columns[f"next_{path}"][:-1]
        goes_on[:-1] &= same.all(axis=tuple(range(1, same.ndim)))
    goes_on[-1:] = False
    window, inside = np.repeat(np.arange(steps)[:, None], n, axis=1), np.zeros((steps, n), bool)
    inside[:, 0] = True
    for i in range(1, n):
        inside[:, i] = inside[:, i - 1] & goes_on[window[:, i - 1]]
        window[:, i] = window[:, i - 1] + inside[:, i]
    taken = inside.sum(axis=1)
    powers = discount ** np.arange(n)
    totals = {
        path: (np.where(inside, column[window], 0) * powers).sum(axis=1).astype(column.dtype)
        for path, column in columns.items()
        if path in SUMMED
    }
    last = window[np.arange(steps), taken - 1]
    ends = {path: column[last] for path, column in columns.items() if path in ("terminated", "truncated") or path.startswith("next_obs")}
    return {
        **columns,
        **ends,
        "reward": columns["rewards"],
        **totals,
        "n_steps": taken.astype(np.int64),
    }


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
    return Trajectory.from_dict(unflatten({path: bridge.as_tensor(np.ascontiguousarray(value), path) for path, value in fields.items()}))


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
