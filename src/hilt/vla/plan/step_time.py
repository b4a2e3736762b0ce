"""How long a training step will take on this machine, before anything starts: acting, simulation, learning, optimizer.

    calibration = Calibration.load("cpu")           # made once by: hilt doctor --calibrate
    predicted = predict(config, calibration)
    predicted.total, predicted.lines()

The policy's own operations are counted (`hilt.policies.cost.op_counts`) for one call of `act` and for one pass with
gradients, and multiplied by how often a step makes them:

    episodes rolled out   a = data_batch_size, filled up to whole groups, times oversample_factor
    chunks of an episode  c = step limit / actions of a chunk that are executed, rounded up: none ends early
    acting                a c / rows   calls of `act` with rows = half the slots, or rows_at_once
    simulation            a (start + c observe + limit step) / processes
    learning              epochs * data_batch_size * c chunks with gradients, in passes of chunks_per_pass; and once
                          without gradients for each of: log-probabilities that are recomputed, a reference, values
    optimizer             steps of Adam over all numbers that are trained

With processes for simulators (pool.workers), the policy acts while they simulate: the longer of the two counts. With
collect.ahead=1 the next rollouts run beside learning: again the longer counts. Episodes that succeed early, groups that
filters drop, work on the host, communication between ranks, PRIME and imitation are not in it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hilt.algos.tables import estimator
from hilt.core.errors import ConfigError
from hilt.envs.pool import Pool
from hilt.policies.base import Policy, Record
from hilt.policies.cost.machine_speed import CAPTURED, COMPILED, WAYS, Calibration, SimulatorTime, simulator_key
from hilt.policies.cost.op_counts import OpCounts, counted
from hilt.policies.registry import policy_class
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.openvla import LARGE, OpenVLAOFT
from hilt.vla.config import Vla
from hilt.vla.episode import Start
from hilt.vla.footprint import blank_record, new_sizes
from hilt.vla.worker import attach_adapters, first_policy

MEASURE = "hilt doctor --calibrate"
CHUNK = 8
"""Actions of the chunk by which simulators are measured"""


@dataclass(frozen=True)
class TaskLength:
    """How long an episode of the first task may be, and how it is called."""

    steps: int
    instruction: str


@dataclass(frozen=True)
class PolicyTimes:
    """Seconds of single calls."""

    act_s: float
    """`act` with `act_rows` observations"""
    act_rows: int
    gradient_s: float
    """`evaluate` and the backward pass of `pass_rows` chunks"""
    look_s: float
    """`evaluate` of as many without gradients"""
    pass_rows: int
    trained: int
    """Numbers that the optimizer moves"""
    adam_s: float
    chunk: int


@dataclass(frozen=True)
class StepTime:
    """The seconds of each part of a training step, and what they are of."""

    seconds: dict[str, float]
    notes: dict[str, str]
    total: float
    machine: str

    def lines(self) -> list[str]:
        """A table."""
        rows = [f"  {part:<12}{seconds:>9.2f} s   {self.notes[part]}" for part, seconds in self.seconds.items()]
        return [f"time of a training step on {self.machine}: {self.total:.2f} s", *rows]


def predicted_lines(config: Vla) -> list[str]:
    """What a dry run shows; how to measure the machine, where it has not been."""
    if not (kind := policy_class(config.policy)).__module__.startswith("hilt."):
        return [f"time of a training step: it is not predicted for {kind.__name__}, a policy of another package"]
    calibration = Calibration.load(config.device)
    if calibration is None:
        return [f"time of a training step: not predicted, since this machine is not measured yet: {MEASURE}"]
    return predict(config, calibration).lines()


def predict(config: Vla, calibration: Calibration) -> StepTime:
    """Predicts the time of a training step of one rank."""
    length = task_length(config)
    times = policy_times(config, calibration, length)
    return step_time(config, calibration, times, length)


def step_time(config: Vla, calibration: Calibration, times: PolicyTimes, length: TaskLength) -> StepTime:
    """The arithmetic of a step, from the times of single calls."""
    collect, algorithm, batch = config.collect, config.algorithm, config.algorithm.batch
    groups = math.ceil(math.ceil(collect.data_batch_size / collect.group_size) * collect.oversample_factor)
    acted, learned = groups * collect.group_size, collect.data_batch_size
    chunks = math.ceil(length.steps / (collect.execute or times.chunk))
    calls = math.ceil(acted * chunks / times.act_rows)
    seconds = {"acting": calls * times.act_s}
    notes = {"acting": f"{acted * chunks} chunks ({acted} episodes of {chunks}) in {calls} calls of {times.act_rows}"}
    simulator, workers = _simulator(config, calibration), max(1, min(config.pool.workers, config.pool.slots))
    if simulator is None:
        cure = f"{MEASURE} --task {config.tasks[0]}"
        cure += "".join(f" --option {name}={value}" for name, value in config.task_options.items())
        notes["simulation"], seconds["simulation"] = f"not measured, and not in the sum: {cure}", 0.0
    else:
        one = simulator.start_s + chunks * simulator.observe_s + length.steps * simulator.step_s
        seconds["simulation"] = acted * one / workers
        where = f" in {workers} processes" if config.pool.workers else ""
        notes["simulation"] = f"{acted} starts and {acted * length.steps} steps{where}"
    passes = algorithm.epochs * learned * chunks / times.pass_rows
    looks = _looks(config) * learned * chunks / times.pass_rows
    judged = 2 if config.critic.kind == "separate" else 1
    seconds["learning"] = judged * passes * times.gradient_s + looks * times.look_s
    notes["learning"] = f"{learned * chunks} chunks, {passes:.4g} passes of {times.pass_rows} with gradients" + (
        f", {looks:.4g} without" * bool(looks)
    )
    each = batch.trajectories_per_step or config.episodes
    steps = algorithm.epochs * math.ceil(config.episodes / each)
    seconds["optimizer"] = judged * steps * times.adam_s
    notes["optimizer"] = f"{steps} steps of {times.trained:,} numbers"
    both = (seconds["acting"], seconds["simulation"])
    rollout = max(both) if config.pool.workers else sum(both)
    update = seconds["learning"] + seconds["optimizer"]
    total = max(rollout, update) if collect.ahead else rollout + update
    return StepTime(seconds, notes, total, f"{config.device} ({calibration.machine})")


def policy_times(config: Vla, calibration: Calibration, length: TaskLength) -> PolicyTimes:
    """The times of single calls of the policy of a run, from its own operations."""
    sizes, collect, batch = new_sizes(config), config.collect, config.algorithm.batch

    def build() -> Policy:
        return first_policy(config, sizes, device="meta")

    def prepare(policy: Policy) -> None:
        attach_adapters(policy, config)

    with torch.device("meta"):
        policy = build()
        prepare(policy)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    half = max(1, config.pool.slots // 2)
    rows = min(collect.rows_at_once or half, half, max(1, collect.data_batch_size))
    counts, record = _acting(build, prepare, rows, length.instruction)
    tokens = record["prompt"].shape[1] + policy.chunk * policy.action_dim
    passed = max(1, batch.tokens_per_pass // tokens) if batch.tokens_per_pass else batch.chunks_per_pass
    passed = min(passed, max(1, collect.data_batch_size * math.ceil(length.steps / (collect.execute or policy.chunk))))
    several = {name: np.repeat(array[:1], passed, axis=0) for name, array in record.items()}

    def look(policy: Any) -> torch.Tensor:
        found = policy.evaluate(several)
        value = 0 if found.value is None else found.value.sum()
        return (found.log_prob.sum() + found.entropy.sum() + value).reshape(1)

    ways = pass_ways(config, policy, calibration)
    return PolicyTimes(
        act_s=calibration.seconds(counts, ways.acting),
        act_rows=rows,
        gradient_s=calibration.seconds(counted(build, look, prepare, training=True), ways.gradient),
        look_s=calibration.seconds(counted(build, look, prepare), ways.look),
        pass_rows=passed,
        trained=trained,
        adam_s=calibration.adam_seconds(trained),
        chunk=policy.chunk,
    )


class PassWays(NamedTuple):
    """The measured layers that those of a policy are like: see `hilt.policies.cost.machine_speed.WAYS`."""

    acting: str
    """In `act`"""
    gradient: str
    """In `evaluate` and its backward pass"""
    look: str
    """In `evaluate` without gradients"""


def pass_ways(config: Vla, policy: Policy, calibration: Calibration) -> PassWays:
    """How a policy goes through its layers on the device of a run, as its options have it. What the calibration has
    not measured, since torch came without Triton, is taken as if it were not compiled."""
    whole = config.device.startswith("cuda") and not config.sharding.enabled  # else nothing is compiled
    act, learn = _forms(policy) if whole else ("", "")
    named = (act + WAYS[0], learn + WAYS[1], learn + WAYS[0])
    return PassWays(*(way if way in calibration.fits else way.replace(COMPILED, "") for way in named))


def _forms(policy: Policy) -> tuple[str, str]:
    """What is made of a policy's layers on CUDA where it acts, and where it learns."""
    if isinstance(policy, FlowPolicy):
        acting, learning = policy.config.acting, policy.config.learning
        act = {"eager": "", "captured": CAPTURED}.get(acting, CAPTURED + COMPILED)
        return act, "" if learning == "eager" else COMPILED
    if isinstance(policy, OpenVLAOFT):
        layers = policy.options.layers
        compiles = layers == "compiled" or (layers == "auto" and policy.config.width >= LARGE)
        learn = COMPILED * compiles
        return CAPTURED * (policy.options.acting == "captured") + learn, learn
    return "", ""


def _acting(build: Any, prepare: Any, rows: int, instruction: str) -> tuple[OpCounts, Record]:
    """The operations of a call of `act`, and a record of it. Of a policy whose `act` cannot run on tensors without
    memory: those of `evaluate`."""
    made: list[Record] = []

    def act(policy: Any) -> None:
        observed = policy.observed_fields()
        side = policy.config.image_size
        seen: dict[str, Any] = {name: np.zeros((side, side, 3), np.uint8) for name in observed.cameras}
        seen |= {"state": np.zeros(observed.state_dim, np.float32), "instruction": instruction}
        generator = torch.Generator().manual_seed(0)
        made.append(policy.act([seen] * rows, generator=generator)[1])

    try:
        return counted(build, act, prepare), made[0]
    except (RuntimeError, NotImplementedError):  # numbers that decide what comes next
        with torch.device("meta"):
            record = blank_record(build(), rows)
        return counted(build, lambda policy: policy.evaluate(record), prepare), record


def task_length(config: Vla) -> TaskLength:
    """The length of the first task, from its simulator."""
    with contextlib.closing(Pool(0, 1, task_options=config.task_options)) as pool:
        described = pool.describe(config.tasks[0])
    return TaskLength(int(described["step_limit"]), str(described["instruction"]))


def _looks(config: Vla) -> int:
    """How often all chunks are evaluated without gradients."""
    algorithm, batch = config.algorithm, config.algorithm.batch
    needs_values = estimator(algorithm.estimator).needs_critic
    steps = algorithm.epochs * math.ceil(config.episodes / (batch.trajectories_per_step or config.episodes))
    once = steps == 1 and not (config.has_reference or config.prime.coefficient or needs_values)
    values = needs_values and (config.critic.kind == "separate" or algorithm.recompute_log_prob)
    return (algorithm.recompute_log_prob and not once) + (algorithm.kl.where != "none") + values


# --- simulators ---


def measure_simulator(
    task: str, options: dict[str, Any], episodes: int = 3, device: str = "cpu"
) -> tuple[str, SimulatorTime]:
    """Times one environment of a task in this process; returns it with the key under which a calibration has it. Beside
    a GPU, which may render, the time of the clock counts; else that of the process, so that other programs count
    little."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    with contextlib.closing(Pool(0, 1, task_options=options)) as pool:
        described = pool.describe(task)
        start = Start(task, next(iter(described["initial_states"])), 0, 0)
        actions = np.zeros((CHUNK, int(described["action_dim"])), np.float32)
        asked: dict[str, Callable[[], None]] = {
            "start": lambda: pool.start(0, start),
            "single": lambda: pool.step(0, actions[:1]),
            "chunk": lambda: pool.step(0, actions),
        }
        rows = [{name: _seconds(pool, ask, clock) for name, ask in asked.items()} for _ in range(episodes + 1)]
    # the first makes the environment
    start_s, single, chunk = (float(np.median([row[name] for row in rows[1:]])) for name in asked)
    step = max(0.0, (chunk - single) / (CHUNK - 1))
    return simulator_key(task, options), SimulatorTime(start_s, step, max(0.0, single - step))


def _seconds(pool: Pool, ask: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds from what is asked of the simulator to its reply."""
    began = clock()
    ask()
    (reply,) = pool.collect([0])
    if reply.error:
        raise ConfigError(f"the simulator cannot be measured: {reply.error}")
    return clock() - began


def _simulator(config: Vla, calibration: Calibration) -> SimulatorTime | None:
    """That of the first task, or of another one of the same suite with the same options."""
    wanted = simulator_key(config.tasks[0], config.task_options)
    if wanted in calibration.simulators:
        return calibration.simulators[wanted]
    suite, options = wanted.split("/")[0], wanted.split(" ")[1:]
    alike = [
        one
        for key, one in calibration.simulators.items()
        if key.split("/")[0] == suite and key.split(" ")[1:] == options
    ]
    return alike[0] if alike else None
