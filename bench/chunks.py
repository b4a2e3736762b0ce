"""Policies of chunks that need several control steps for an answer: success, jumps of the command and idle steps, by
how their chunks are executed (`hilt.envs.ChunkExecutor`), with injected delays on three tabletop tasks, for each head
of small_vla. And how late a loop of 20 Hz is whose policy plans in a thread.

One policy for each head, trained by imitation of scripted demonstrations of all three tasks; the demonstrations, and
the states that are tried, are the same for all. `--keep FOLDER` keeps what is trained and measured, and does not repeat
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.lab import Group, Lab
from bench.report import Row, at_most
from bench.sides import Side

TASKS = ("tabletop/reach", "tabletop/button", "tabletop/drawer")
HEADS = ("tokens", "gaussian", "flow")
DELAYS = (0, 1, 2, 4, 8)
WAYS = {
    "synchronous": ("synchronous", 0),
    "asynchronous": ("asynchronous", 0),
    "rtc": ("rtc", 0),
    "trained": ("rtc", 8),
}
"""By name: the mode, and `max_delay`, with which the policy is trained; "rtc" guides a flow, "trained" needs no flow"""
HZ, CHUNK, EXECUTE = 20.0, 16, 8
"""Control steps in a second; actions of a chunk, and how many of them are executed before the next one is asked for"""
DEMONSTRATIONS, STEPS, STATES = 200, 8000, 100
"""The full size: of each task, gradient steps, and states of the split test of each task"""
COMPARED = 4
"""The delay whose success is a row's figure"""
POINTS = 3.0
"""Of success that rtc may lose at that delay, against none"""
PLAN_S, WATCH_S = 0.2, 60
"""Seconds that the slow policy plans, and that the loop is watched"""
TASK_OPTIONS: dict[str, Any] = {"image_size": 64, "control_hz": HZ}


def delays(lab: Lab) -> list[Row]:
    heads = [head for head in HEADS if any(lab.wants("delays", f"chunks_{head}_{way}") for way in WAYS)]
    logs = demonstrations(lab)
    rows: list[Row] = []
    for head in heads[-1:] if lab.quick else heads:
        ways = [way for way in WAYS if lab.wants("delays", f"chunks_{head}_{way}")]
        cells = measured(lab, head, logs, ways)
        rows += [row(lab, head, way, cells) for way in ways]
    return rows


def demonstrations(lab: Lab) -> list[str]:
    """Logs of scripted demonstrations, one for each task; those that are there are not recorded again."""
    from hilt.envs.fitted import open_task
    from hilt.recording.record import Settings
    from hilt.recording.script import record_with_script

    folder, logs = lab.kept("chunks-demonstrations"), []
    for task in TASKS[:1] if lab.quick else TASKS:
        log = folder / task.replace("/", "-")
        wanted = Settings(task, TASK_OPTIONS, lab.pick(DEMONSTRATIONS, 2), seed=0)
        record_with_script(
            wanted, log, partial(open_task, task, TASK_OPTIONS), {"speed": 0.7, "noise": 0.1}, lab.progress
        )
        logs.append(str(log / "log"))
    return logs


def measured(lab: Lab, head: str, logs: list[str], ways: list[str]) -> dict[str, Any]:
    """By way and delay: the figures of all episodes, and the success of each task."""
    policies = {max_delay: trained(lab, head, logs, max_delay) for max_delay in {WAYS[way][1] for way in ways}}
    cells = dict[str, Any]()
    for delay in (0, COMPARED) if lab.quick else sorted(DELAYS, key=lambda delay: (delay not in (0, COMPARED), delay)):
        for way in ways:
            mode, policy = WAYS[way][0], policies[WAYS[way][1]]
            if mode == "rtc" and not policy.takes_prefix:
                continue
            # without a delay, nothing is executed while the policy plans
            name = f"{head}-{'synchronous' if way == 'asynchronous' and not delay else way}-{delay}"
            cells[f"{way} {delay}"] = lab.once(
                f"chunks-{name}", partial(cell, lab, name, policy, TASKS[: len(logs)], mode, delay)
            )
    return cells


def cell(lab: Lab, name: str, policy: Any, tasks: tuple[str, ...], mode: str, delay: int) -> dict[str, Any]:
    lab.progress(f"chunks: {name}")
    each = {task: tried(policy, task, mode, delay, lab.pick(STATES, 1)) for task in tasks}
    everything = figures([one for made in each.values() for one in made])
    return {**everything, "tasks": {task: figures(made)["success"] for task, made in each.items()}}


def trained(lab: Lab, head: str, logs: list[str], max_delay: int) -> Any:
    """The policy with this head that has imitated the demonstrations, with up to `max_delay` given actions. It is
    trained on a GPU where there is one, and acts on the CPU."""
    import torch

    from hilt.core.config import build
    from hilt.vla.sft import POLICY, RESULT, Sft, begin_run, open_policy, train

    run = lab.kept(f"chunks-{head}-run" + f"-{max_delay}" * bool(max_delay))
    options: dict[str, Any] = {"chunk": CHUNK, "head": head, "width": 96, "depth": 2, "shift": 2}
    steps = lab.pick(STEPS, 2)
    config = build(
        Sft(),
        {
            **{
                "data": logs,
                "tasks": list(TASKS[: len(logs)]),
                "task_options": TASK_OPTIONS,
                "policy_options": options,
            },
            **{"validation": 0.0, "max_steps": steps, "warmup_steps": min(50, steps - 1), "schedule": "cosine"},
            **{"learning_rate": 1e-3, "batch_size": lab.pick(64, 4), "max_delay": max_delay},
        },
    )
    if not (run / RESULT).is_file():
        lab.progress(f"chunks: training {head}, max_delay={max_delay}")
        where = "cuda" if torch.cuda.is_available() else "cpu"
        train(begin_run(run, "", replace(config, device=where)), run)
    assert (run / POLICY).is_dir()
    return open_policy(run, config).eval()


def tried(policy: Any, task: str, mode: str, delay: int, states: int) -> list[dict[str, float]]:
    """Each episode: success, steps, share of held steps, and the largest jump of the commanded motion."""
    from hilt.envs import ChunkSettings, make
    from hilt.policies.vla.observation_adapters import suite
    from hilt.vla.rollout import ChunkAgent

    made = []
    with closing(make(task, **{**TASK_OPTIONS, "image_size": None})) as env:
        agent = ChunkAgent(
            policy, suite(task), env.get_wrapper_attr("instruction"), ChunkSettings(mode, EXECUTE, delay)
        )
        for state in range(states):
            observation, info = env.reset(seed=state, options={"split": "test", "state": state})
            draws = np.random.default_rng(state)
            agent.begin()
            commands, ended = list[np.ndarray](), False
            while not ended:
                seen = {**observation, "images": RenderedImages(env.unwrapped.world, TASK_OPTIONS["image_size"])}
                commands.append(
                    np.asarray(agent.sample_actions(seen, seed=int(draws.integers(2**31)), argmax=True)).clip(-1, 1)
                )
                observation, _, terminated, truncated, info = env.step(commands[-1])
                ended = terminated or truncated
            made.append(episode(np.stack(commands), agent.chunks, bool(info["succeed"])))
    return made


class RenderedImages(Mapping[str, Any]):
    """The images of an observation, rendered when the policy looks at them: it does not in most steps."""

    def __init__(self, world: Any, size: int):
        self._world, self._size = world, size

    def __getitem__(self, camera: str) -> Any:
        return self._world.render(camera, self._size, self._size)

    def __contains__(self, camera: object) -> bool:
        return camera in self._world.cameras

    def __iter__(self) -> Iterator[str]:
        return iter(self._world.cameras)

    def __len__(self) -> int:
        return len(self._world.cameras)


def episode(commands: np.ndarray, chunks: list[int], success: bool) -> dict[str, float]:
    """`commands`: [steps, 7], the motion of each step as a share of the largest; `chunks`: whose they are, -1: held. A
    jump is the difference of the motion of two steps, in millimeters in a step; at a seam, two chunks are involved."""
    from hilt.envs.tabletop.suite import ACTION_SCALE

    motion = 1e3 * ACTION_SCALE[0] * 10.0 / HZ * commands[:, :3]
    jumps = np.linalg.norm(np.diff(motion, axis=0, prepend=np.zeros((1, 3))), axis=1)
    owners = np.array(chunks)
    seams = jumps[1:][(owners[1:] != owners[:-1]) & (owners[:-1] >= 0)]
    return {
        "success": float(success),
        "steps": float(len(commands)),
        "held": float((owners < 0).sum()),
        "jump": float(jumps.max()),
        "seam": float(seams.mean()) if len(seams) else 0.0,
    }


def figures(made: list[dict[str, float]]) -> dict[str, Any]:
    """Figures of episodes: success and idle steps in percent, the means of the largest jump and of the jumps at seams,
    and the steps of a success."""
    steps = [one["steps"] for one in made if one["success"]]
    return {
        "episodes": len(made),
        "success": 100 * float(np.mean([one["success"] for one in made])),
        "idle": 100 * sum(one["held"] for one in made) / sum(one["steps"] for one in made),
        "jump": float(np.mean([one["jump"] for one in made])),
        "seam": float(np.mean([one["seam"] for one in made])),
        "steps": float(np.mean(steps)) if steps else 0.0,
    }


def row(lab: Lab, head: str, way: str, found: dict[str, Any]) -> Row:
    cells = {
        delay: found[f"{way} {delay}"] for delay in DELAYS if f"{way} {delay}" in found
    }  # fmt: skip
    name, what = f"chunks_{head}_{way}", "points of success in three tabletop tasks that a delay of four steps costs"
    if not cells:
        return Row(
            name,
            None,
            "points",
            what,
            note=f"small_vla with the head {head} continues a chunk only if it was trained to",
        )
    none, some = cells[0]["success"], cells[COMPARED]["success"]
    parts = [
        f"delay {delay}: {cell['success']:.0f}% in {cell['steps']:.0f} steps, largest jump {cell['jump']:.1f} mm, at "
        f"seams {cell['seam']:.1f} mm, idle {cell['idle']:.0f}%"
        for delay, cell in cells.items()
    ]
    episodes = cells[0]["episodes"]
    return Row(
        name=name,
        ours=none - some,
        unit="points",
        what=f"{what}: {WAYS[way][0]}, max_delay={WAYS[way][1]}, {EXECUTE} of {CHUNK} actions at {HZ:g} Hz, {head}",
        targets=[at_most(POINTS)] if WAYS[way][0] == "rtc" else [],
        size=lab.size(episodes, STATES * len(TASKS), "episodes"),
        note="; ".join(parts),
    )


def control(lab: Lab) -> list[Row]:
    """A loop that keeps its rate while a policy plans in the thread of its executor, and one that only sleeps, in the
    same time."""
    from hilt.envs import ChunkExecutor, ChunkSettings
    from hilt.envs.rate import Rate

    seconds = lab.pick(WATCH_S, 2)
    lab.progress(f"control: {seconds} s")
    observation = {"state": np.zeros(10, np.float32), "image": np.zeros((2, 64, 64, 3), np.uint8)}
    loop = Rate(HZ)
    with (
        Side("bench.learn_sides", "sleep") as side,
        ChunkExecutor(slow_policy(), ChunkSettings("asynchronous", EXECUTE), action_dim=7) as executor,
    ):
        side.ask("watch", hz=HZ, seconds=0.1)
        side.tell("watch", hz=HZ, seconds=seconds)
        loop.restart()
        for _ in range(round(seconds * HZ)):
            executor.next(observation)
            loop.wait()
        idle = np.array(side.answer(seconds + 60))
        found, timing = executor.metrics(), loop.timing()
    late, sleeping = 1e3 * timing["late_p99"], float(np.percentile(idle, 99))
    return [
        Row(
            name="chunks_lateness_p99",
            ours=late - sleeping,
            unit="ms",
            what=f"99th percentile of how late a loop of {HZ:g} Hz is whose policy plans in a thread, beyond that of a "
            "loop that only sleeps, at the same time on the same machine",
            targets=[at_most(2)],
            size=lab.size(seconds, WATCH_S, "seconds"),
            note=f"the loop's {late:.2f} ms, the sleeping one's {sleeping:.2f} ms; {timing['missed']} periods lost of "
            f"{timing['steps']}; the policy, a small_vla with a flow, planned for "
            f"{1e3 * found['planning_seconds']:.0f} ms, {found['chunks']:.0f} chunks; "
            f"held {found['held']:.0f} steps, {found['late']:.0f} late answers",
        )
    ]


def slow_policy() -> Any:
    """A plan of a small_vla that computes as often as it can in `PLAN_S` seconds, as a larger policy would once."""
    import torch

    from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

    policy = SmallVLA(SmallVLAConfig(state_dim=10, chunk=CHUNK, head="flow"), seed=0).eval()
    row = {"full_image": np.zeros((64, 64, 3), np.uint8), "state": np.zeros(10, np.float32), "instruction": "go"}
    busy = threading.Lock()

    def plan(observation: Any, planned: Any, frozen: int) -> Any:
        with busy, torch.no_grad():
            end, actions = time.monotonic() + PLAN_S, policy.act([row], sample=False)[0]
            while time.monotonic() < end:
                actions = policy.act([row], sample=False)[0]
        return actions[0]

    return plan


GROUPS = {
    "delays": Group([f"chunks_{head}_{way}" for head in HEADS for way in WAYS], delays),
    "control": Group(["chunks_lateness_p99"], control),
}
