"""Recording: a person or a script drives a task, and a log keeps the episodes.

An episode counts when its facts are written, in one line, after its last step: then it is power-safe.
Whatever ends this process before leaves steps without facts, which the next session in the same folder
drops before it goes on. An error drops them at once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from hilt.core.errors import (
    ConfigError,
    EmergencyStopError,
    HiltError,
    MissingPackageError,
    SchemaError,
    UnknownNameError,
)
from hilt.core.trajectory import Source, Step
from hilt.envs.env_protocol import Env, success_of
from hilt.envs.rate import Rate
from hilt.envs.task import as_task
from hilt.formats.episodes import INSTRUCTION
from hilt.recording.buffered_device import BufferedDevice, GoesOn, Waits, as_hil_serl
from hilt.recording.disturbed import Disturbed
from hilt.recording.film import Filmer, cameras
from hilt.recording.recording_folder import (
    DEMONSTRATIONS,
    GRASP,
    LABELED,
    LABELS,
    TIMES,
    nested_copy,
    open_recording,
    with_penalty,
)
from hilt.replay import Log
from hilt.replay.writer import EpisodeWriter
from hilt.teleop.devices import Device
from hilt.teleop.intervene import TakeOver, attribute

RATE_HZ = 10.0
"""Control rate of a task that has none, when a person drives it."""
FAILURES_IN_A_ROW = 20
"""So often a script may fail before recording ends with an error: it would never end otherwise."""
NO_CAMERAS = (
    "NO CAMERAS: observations have no images, so there are no videos. Give a simulation's with -o "
    '\'cameras=["front", "wrist"]\', an arm\'s in its settings, such as cameras: {front: {kind: opencv, source: "0"}}'
)
SUCCESS_FRAMES = 20
"""Labeled frames: the number of steps that a script continues after success, to get many of them."""


@dataclass(frozen=True)
class Settings:
    """What is to be recorded."""

    task: str
    """Its name, for `hilt.envs.task.make`"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `make` was given besides"""
    episodes: int = 20
    """How many the log is to have in the end, those of earlier sessions included"""
    keep: str = "successes"
    """Which episodes stay and count: "successes", or "all", marked"""
    successes_needed: int = 0
    """Above 0, frames for a reward classifier are recorded instead, until this number is marked as success"""
    split: str = "train"
    """Where the initial states come from"""
    states: Sequence[int] = ()
    """Their numbers; empty: all of the split, in an order that follows from the seed"""
    seed: int = 0
    """Of that order, and of whatever else is random"""
    mode: str = "hold"
    """When a person acts: "hold" or "toggle", as `TakeOver` means it"""
    observations: str = "nested"
    """As the environment gives them; or "hil-serl", as that one's wrappers make
    them (`as_hil_serl`), with its actions"""
    disturb: float = 0.0
    """Standard deviation of noise that is added to the motions when they are executed; the log has them without it"""

    def __post_init__(self) -> None:
        if self.keep not in ("successes", "all"):
            raise UnknownNameError("rule of what to keep", self.keep, ["all", "successes"])
        if self.observations not in ("nested", "hil-serl"):
            raise UnknownNameError("kind of observations", self.observations, ["hil-serl", "nested"])
        if self.episodes < 1 or self.successes_needed < 0 or self.seed < 0:
            given = f"{self.episodes} episodes, {self.successes_needed} successes needed, seed {self.seed}"
            raise ConfigError(f"{given}: expected at least 1, 0 and 0.")


@dataclass
class RecordingSummary:
    """What this session has done so far, and what the log has."""

    path: Path
    wanted: int
    have: int = 0
    """Of what is wanted: episodes, or frames marked as success"""
    episodes: int = 0
    """All that are in the log, and"""
    successes: int = 0
    """those of them that succeeded"""
    attempts: int = 0
    """Episodes that began in this session"""
    discarded: Counter[str] = field(default_factory=Counter)
    """Those of them that did not stay, by the reason"""
    unfinished: int = 0
    """Episodes that an earlier session left when it was killed; they were dropped"""
    step: int = 0
    """Of the running episode"""
    hint: str = ""
    """What begins it: a person is awaited"""
    steps: int = 0
    """Of this session"""
    stopped: bool = False
    """By the stop button, or from outside"""
    videos: int = 0
    """That are there"""
    notes: list[str] = field(default_factory=list)
    """Further notes"""
    timing: Mapping[str, float] | None = None
    """Of the control rate, as `Rate.timing` has it; None for scripts in simulation, which go as fast as they can"""
    seconds: float = 0.0
    """Spent in episodes, without resets"""

    @property
    def complete(self) -> bool:
        return self.have >= self.wanted

    def rate(self) -> str:
        """The control rate and its jitter, in words."""
        if self.timing is None:
            return f"{self.steps / self.seconds:.0f} steps/s, as fast as it went" if self.steps else "no step"
        p50, p99, most = (1000 * self.timing[name] for name in ("p50", "p99", "max"))
        nominal, missed = 1000 * self.timing["nominal"], round(self.timing["missed"])
        lost = f"{missed} period{'s' * (missed != 1)} lost"
        return f"period {nominal:.1f} ms: p50 {p50:.1f}, p99 {p99:.1f}, at most {most:.1f} ms; {lost}"


@dataclass(frozen=True)
class Recorded:
    """One episode that came to its end."""

    trajectory: int
    """Its number in the log"""
    steps: int
    success: bool | None
    """None if the environment does not report it, and no person marked it"""
    dropped: str
    """Why it did not stay, in words; empty when it did, and is power-safe"""


class RecordingWatch(Protocol):
    """An observer of the recording: called once, after each step (and while a person is awaited, with
    step 0), after each episode, and again and again
    while the last videos are waited for."""

    def begin(self, summary: RecordingSummary) -> None: ...
    def step(self, summary: RecordingSummary) -> None: ...
    def episode(self, recorded: Recorded, summary: RecordingSummary) -> None: ...
    def end(self, summary: RecordingSummary) -> None: ...


def record(
    env: gymnasium.Env,
    device: Device,
    folder: Path,
    settings: Settings,
    *,
    watch: RecordingWatch | None = None,
    stop: Callable[[], bool] = lambda: False,
    videos: bool = True,
) -> RecordingSummary:
    """Records until the log has what is wanted, `stop()` is true, or somebody
    presses stop. `env` and `device` stay open."""
    recorder = Recorder(env, device, folder, settings, watch, stop)
    try:
        recorder.begin(videos)
        recorder.run()
    except BaseException:
        recorder.close(wait=False)  # the error is to be seen now; the next session makes the videos
        raise
    recorder.close()
    return recorder.summary


class Recorder:
    """One session; `record` is all that others need."""

    def __init__(
        self,
        env: Env,
        device: Device,
        folder: Path,
        settings: Settings,
        watch: RecordingWatch | None,
        stop: Callable[[], bool],
    ):
        self._settings, self._watch, self._stop, self._device = settings, watch, stop, device
        self._person = device.source == Source.HUMAN
        self._labels = settings.successes_needed > 0
        env = as_task(env)
        if settings.disturb:
            env = Disturbed(env, settings.disturb)
        if self._labels:
            env = GoesOn(env, None if self._person else SUCCESS_FRAMES)
        self._seat = BufferedDevice(device, marks=self._labels, toggles=settings.mode == "toggle")
        self._control = TakeOver(env, self._seat, mode=settings.mode, policy=False)  # type: ignore[arg-type]
        self._hz = float(attribute(env, "control_hz", 0) or RATE_HZ)
        self._env: Any = Waits(self._control, self._seat, self._begun, self._hz) if self._person else self._control
        if settings.observations == "hil-serl":
            self._env = as_hil_serl(self._env)
        self._states = _states(settings, attribute(env, "initial_states", {}))
        self._tries: Counter[int] = Counter()
        self._seeds: set[int] = set()
        # one clock that never goes back, whatever happens to the computer's
        self._began = time.time() - time.perf_counter()
        self._nothing = _nothing(env.action_space)
        self._timing = attribute(env, "timing", None)  # of an environment that keeps its rate itself
        self._rate = Rate(self._hz) if self._person and self._timing is None else None
        self._filmer: Filmer | None = None
        self.summary = RecordingSummary(folder, settings.successes_needed or settings.episodes)
        attribute(env, "connect", lambda: None)()  # an arm that is not there leaves no folder behind
        self._log = open_recording(
            folder, settings.task, settings.options, settings.observations, self._env, self._labels
        )

    def begin(self, videos: bool) -> None:
        """Counts what the log has; what a killed session left in it goes. Starts the process that makes videos."""
        for trajectory in self._log.trajectories():
            facts = self._log.facts.about(trajectory)
            if "task" in facts:
                self._tries[facts.get("state", 0)] += facts.get("split", self._settings.split) == self._settings.split
                self._seeds.add(facts["seed"])
                self._count(trajectory, facts.get("success"))
            else:
                self._log.delete(trajectory)
                self.summary.unfinished += 1
        if self._settings.task.startswith("robot/") and not cameras(self._log):
            self.summary.notes.append(NO_CAMERAS)
        elif videos:
            try:
                self._filmer = Filmer(self._log, self.summary.path / "videos", self._hz)
            except (MissingPackageError, ConfigError) as error:
                self.summary.notes.append(f"no videos: {error}")

    def run(self) -> None:
        s, failures = self.summary, 0
        self._control.message = self._progress()
        if self._watch is not None:
            self._watch.begin(s)
        while not s.complete and not s.stopped:
            if self._stop():
                s.stopped = True
            elif (done := self._episode()) is not None:
                if self._watch is not None:
                    self._watch.episode(done, s)
                failures = 0 if done.success else failures + 1
                if not (self._person or s.stopped) and self._settings.keep == "successes":
                    self._check_script(done, failures)
        self._seat.tell(f"Recording has ended: {s.have} of {s.wanted}.")

    def _check_script(self, done: Recorded, failures: int) -> None:
        """It would go on for ever when nothing of it can stay."""
        if done.success is None:
            raise HiltError(
                f"{self._settings.task} does not report success in info, so nothing would be kept. Give --keep all."
            )
        if failures == FAILURES_IN_A_ROW:
            who = f"{self._settings.task}: the device {self._device.name}"
            raise HiltError(
                f"{who} failed {failures} times one after the other. Keep all with --keep all, and look at them."
            )

    def close(self, wait: bool = True) -> None:
        """Everything is on the disk when this returns; a video that takes too long is made by the next session."""
        try:
            timing = self._timing if self._rate is None else self._rate.timing
            if timing is not None and self.summary.steps:
                self.summary.timing = timing()
            if self._filmer is not None:
                tell = wait and self._watch is not None and self.summary.attempts
                self._filmer.close(self._log.trajectories(), wait, self._filmed if tell else lambda made: None)
                self.summary.videos = self._filmer.made
                self.summary.notes += self._filmer.notes
        finally:
            self._log.close()

    def _filmed(self, made: int) -> None:
        assert self._watch is not None
        self.summary.videos = made
        self._watch.end(self.summary)

    # One episode

    def _episode(self) -> Recorded | None:
        """Records one; None when it was stopped before its first step."""
        s = self.summary
        start, seed = self._next_start()
        s.attempts, s.step = s.attempts + 1, 0
        # of a person it ends when they act: until then no step limit runs
        try:
            observation, _ = self._env.reset(seed=seed, options=start)
        except EmergencyStopError:
            self._await_release()
            return None
        if self._rate is not None:
            self._rate.restart()
        began = time.perf_counter()
        running: list[EpisodeWriter] = []
        try:
            info, marked, lost, ended = self._steps(observation, running)
            success = bool(marked) if self._labels else success_of(info)
        except Exception:
            with contextlib.suppress(HiltError):  # a full disk; the next session drops it
                for episode in running:
                    episode.end()
                    self._log.delete(episode.trajectory)
            raise
        s.seconds += time.perf_counter() - began
        if not running:
            return None
        running[0].end()
        if success is None and self._person:
            success = False  # they have a button for it
        people = {name: int(info[name]) for name in ("intervention_count", "intervention_steps")}
        settled = self._settle(running[0], success, ended, lost, {**start, "seed": seed, "steps": s.step, **people})
        self._control.message = (
            f"{f'Dropped, {settled.dropped}' if settled.dropped else 'Recorded'}: {s.have} of {s.wanted}."
        )
        self._seat.tell(self._control.message)
        return settled

    def _steps(self, observation: Any, running: list[EpisodeWriter]) -> tuple[dict[str, Any], int, int, bool]:
        """Records steps into `running`, which the first one begins: the last info, how many were marked, how many
        without contact, and whether the episode ended."""
        s, info, marked, lost, ended = self.summary, {}, 0, 0, False
        before = nested_copy(observation)
        while not ended:
            if self._stop():
                s.stopped = True
                break
            observed = self._now()
            if self._rate is not None:
                self._rate.wait()
            sent = self._now()
            self._control.message = self._progress(marked)
            observation, reward, terminated, truncated, info = self._env.step(self._nothing)
            times = dict(zip(TIMES, (observed, sent, self._now()), strict=True))
            after, label, ended = nested_copy(observation), self._label(info), bool(terminated or truncated)
            if not running:
                running.append(self._begin_episode(info))
            elif GRASP in info and GRASP not in self._log.schema.columns:
                raise SchemaError(
                    f"{self._settings.task}: {GRASP} is not in every info. Give it in each "
                    "step, 0.0 where there is none."
                )
            extra = {LABELS: np.int32(label), GRASP: np.float32(info.get(GRASP, 0.0))}
            step = Step(
                before,
                np.asarray(info["executed_action"], self._log.schema.columns["actions"].dtype),
                np.float32(reward),  # type: ignore[arg-type]
                after,
                bool(terminated),
                bool(truncated),
                Source(info["source"]),
                times=times,
                extra={name: value for name, value in extra.items() if name in self._log.schema.columns},
            )
            running[0].append(step.columns())
            before, marked, lost = after, marked + label, lost + bool(info.get("lost"))
            s.step, s.steps, s.stopped = s.step + 1, s.steps + 1, bool(info.get("stop"))
            self._tell()
            if info.get("estop") and not ended:
                self._await_release()
        return info, marked, lost, ended

    def _await_release(self) -> None:
        """No step is made while the emergency stop is latched, but for two: the one that finds it, and the first one
        after it."""
        while not self._stop() and (reading := self._control.poll()).estop and not self.summary.stopped:
            self.summary.stopped = "stop" in reading.events
            self._tell()
            time.sleep(1 / self._hz)
        if self._rate is not None:
            self._rate.restart()

    def _progress(self, marked: int = 0) -> str:
        return (
            f"{self.summary.have + marked} of {self.summary.wanted} {'frames marked' if self._labels else 'recorded'}"
        )

    def _begun(self) -> bool:
        """Whether somebody acts or presses something, or the session is stopped."""
        begun = self._stop() or self._seat.begins()
        self.summary.hint = "" if begun else self._seat.hint
        if not begun:
            self._tell()
        return begun

    def _now(self) -> float:
        """Seconds since 1970."""
        return self._began + time.perf_counter()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch.step(self.summary)

    def _begin_episode(self, info: Mapping[str, Any]) -> EpisodeWriter:
        """Only the first step shows whether the environment has a penalty for the
        gripper; the log then gains a column for it."""
        if GRASP in info and GRASP not in self._log.schema.columns:
            path, schema = self._log.path, with_penalty(self._log.schema)
            self._log.close()
            self._log = Log.open(path, schema=schema)
        return self._log.episode(actor=self._device.name)

    def _settle(
        self, running: EpisodeWriter, success: bool | None, ended: bool, lost: int, facts: dict[str, Any]
    ) -> Recorded:
        """The episode stays, or goes."""
        reason = ""
        if not ended or (self.summary.stopped and not success):
            reason = "stopped"
        elif lost > facts["steps"] / 2:
            reason = "contact lost"
        elif not facts["intervention_steps"] and not (self._labels and success):
            reason = "no person acted"
        elif not success and not self._labels and self._settings.keep == "successes":
            reason = "no success"
        if reason:
            self._log.delete(running.trajectory)
            self.summary.discarded[reason] += 1
        else:
            known = {} if success is None else {"success": success}
            self._log.annotate(running.trajectory, **known, **self._facts(), **facts)  # power-safe when it returns
            self._count(running.trajectory, success)
            if self._filmer is not None:
                self._filmer.ask(running.trajectory)
        return Recorded(running.trajectory, running.steps, success, reason)

    def _facts(self) -> dict[str, Any]:
        """What all episodes of a session have in common, and what is needed to play them again."""
        packages = ("hilt", "gymnasium", "mujoco", "numpy")
        return {
            "recorded_as": LABELED if self._labels else DEMONSTRATIONS,
            "task": self._settings.task,
            "options": dict(self._settings.options),
            **({"settings": dict(settings)} if (settings := attribute(self._env, "settings", None)) else {}),
            INSTRUCTION: str(attribute(self._env, "instruction", "")),
            "fps": self._hz,  # of a video of it, as LeRobot's files want to know
            "device": self._device.name,
            "mode": self._settings.mode,
            **({"disturb": self._settings.disturb} if self._settings.disturb else {}),
            "recorded_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "versions": {name: str(sys.modules[name].__version__) for name in packages if name in sys.modules},
        }

    def _count(self, trajectory: int, success: bool | None) -> None:
        s = self.summary
        s.episodes, s.successes = s.episodes + 1, s.successes + bool(success)
        if self._labels:
            s.have += int(self._log.read(self._log.trajectory_keys(trajectory), [LABELS])[LABELS].sum())
        else:
            s.have += bool(success) or self._settings.keep == "all"

    def _next_start(self) -> tuple[dict[str, Any], int]:
        """An initial state that was tried least, and a seed for whatever else is random."""
        state = min(self._states, key=lambda number: self._tries[number])
        while True:
            seed = int(np.random.SeedSequence([self._settings.seed, state, self._tries[state]]).generate_state(1)[0])
            self._tries[state] += 1
            if seed not in self._seeds:  # an earlier session's, which would be the same episode once more
                return {"split": self._settings.split, "state": state}, seed

    def _label(self, info: Mapping[str, Any]) -> int:
        """Whether this step is marked as success: by the person, or for a script by the environment."""
        if not self._labels:
            return 0
        return int(self._seat.marked if self._person else bool(success_of(info)))


def _states(settings: Settings, known: Mapping[str, int]) -> list[int]:
    """The initial states to begin from."""
    if settings.split not in known:
        raise UnknownNameError("split", settings.split, known)
    count = known[settings.split]
    if wrong := [number for number in settings.states if not 0 <= number < count]:
        raise ConfigError(
            f"initial state {wrong[0]} of {settings.split}: {settings.task} has {count} there, counted from 0."
        )
    return list(settings.states) or np.random.default_rng(settings.seed).permutation(count).tolist()


def _nothing(space: Any) -> Any:
    """Returns an action without motion."""
    zero = np.zeros(space.shape, space.dtype)
    return np.clip(zero, space.low, space.high) if isinstance(space, gymnasium.spaces.Box) else zero[()]
