"""The names that the field knows, as faces of a log: HIL-SERL's buffer and RLinf's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.lab import Group, Lab, remove
from bench.limits import touch_memory
from bench.report import Row
from bench.timing import Rates, in_turns, seconds_each, seconds_of
from bench.workloads import BATCH, W1, for_peers, steps_of
from hilt.replay import MemoryEfficientReplayBufferDataStore, Trajectory, TrajectoryReplayBuffer


@dataclass
class Box:
    """As much of a Gymnasium space as the buffers look at."""

    shape: tuple[int, ...]
    dtype: Any = np.float32


@dataclass
class Spaces:
    spaces: Mapping[str, Box] = field(default_factory=dict)


def hilserl(lab: Lab) -> list[Row]:
    """W1 through `MemoryEfficientReplayBufferDataStore`, as HIL-SERL's learner uses it."""
    work = W1(transitions=lab.pick(20_000, 300))
    size = lab.size(work.transitions, W1().transitions, "transitions")
    lab.progress("hilserl: filling")
    touch_memory(lab.folder, 100_000 * work.transitions)
    image = Box((1, 128, 128, 3), np.uint8)
    observations = Spaces({**dict.fromkeys(work.cameras, image), "state": Box((19,))})
    path = lab.new("hilserl")
    buffer = MemoryEfficientReplayBufferDataStore(
        observations, Box((7,)), capacity=work.transitions, image_keys=work.cameras, path=path, durability="never"
    )
    rates = []
    for e in range(work.episodes):
        transitions = [_transition(step, work) for step in steps_of(work.columns(e))]
        rates.append(len(transitions) / seconds_each(buffer.insert, transitions))
    inserted = Rates(rates[1:])
    ways = {"plain": lambda: buffer.sample(BATCH), "packed": lambda: buffer.sample(BATCH, pack_obs_and_next_obs=True)}
    sampled = in_turns(ways, lab.rounds, lab.seconds)
    buffer.close()
    remove(path)
    face = "MemoryEfficientReplayBufferDataStore"
    return [
        Row(
            name="hilserl_insert",
            ours=inserted.median,
            spread=inserted.spread,
            unit="transitions/s",
            what=f"W1 through {face}.insert, process-safe, on disk",
            size=size,
        ),
        Row(
            name="hilserl_sample",
            ours=sampled["plain"].median,
            spread=sampled["plain"].spread,
            unit="batches/s",
            what=f"W1 through {face}.sample(256): contiguous observations and next observations (50.4 MB)",
            size=size,
        ),
        Row(
            name="hilserl_sample_packed",
            ours=sampled["packed"].median,
            spread=sampled["packed"].spread,
            unit="batches/s",
            what="the same with pack_obs_and_next_obs=True: both in one stack (50.4 MB)",
            size=size,
        ),
    ]


def _transition(step: dict[str, Any], work: W1) -> dict[str, Any]:
    """A step as HIL-SERL's actor sends it: images are stacks of one."""
    flat = for_peers({k: v for k, v in step.items() if not isinstance(v, dict)})
    for key in ("observations", "next_observations"):
        flat[key] = {k: v[None] if k in work.cameras else v for k, v in step[key].items()}
    return flat


def disk_reads(lab: Lab) -> list[Row]:
    """RLinf's buffer: how many trajectories are read from disk for one sample, by window and cache."""
    count, full = lab.pick(120, 12), 120
    names = [(window, cache) for window in (0, 10, 100) for cache in (0, 5, 50)]
    try:
        import torch
    except ImportError as error:
        return [_no_reads(window, cache, f"{error}; install it: pip install 'hilt[torch]'") for window, cache in names]
    rows = []
    for window, cache in names:
        folder = lab.new("rlinf")
        buffer = TrajectoryReplayBuffer(
            seed=0,
            enable_cache=cache > 0,
            cache_size=max(1, cache),
            sample_window_size=window,
            auto_save=True,
            auto_save_path=str(folder),
        )
        generator = torch.Generator().manual_seed(0)
        for start in range(0, count, 10):
            buffer.add_trajectories([_rlinf_trajectory(torch, generator) for _ in range(start, min(count, start + 10))])
        samples = lab.pick(40, 5)
        buffer.sample(BATCH)
        before = buffer.stats()["disk_reads"]
        seconds = seconds_each(buffer.sample, [BATCH] * samples)
        reads = buffer.stats()["disk_reads"] - before
        buffer.close()
        remove(folder)
        rows.append(
            Row(
                name=f"disk_reads_window_{window}_cache_{cache}",
                ours=reads / samples,
                unit="reads/sample",
                what="of the 256 chunk steps of one sample, those read from the log's files because the "
                f"cache did not have them; {count} trajectories [16, 4] of 32x32 images, window "
                f"{window or 'all'}, cache of {cache}",
                size=lab.size(count, full, "trajectories"),
                note=f"{samples / seconds:.0f} samples/s",
            )
        )
    return rows


def auto_save(lab: Lab) -> list[Row]:
    """RLinf's buffer: what writing its own files besides costs the one who adds."""
    name, full = "rlinf_add_auto_save", 60
    try:
        import torch
    except ImportError as error:
        why = f"{error}; install it: pip install 'hilt[torch]'"
        return [Row(name=name, ours=None, unit="trajectories/s", what="not measured", note=why)]
    count = lab.pick(full, 12)
    generator = torch.Generator().manual_seed(0)
    trajectories = [_rlinf_trajectory(torch, generator) for _ in range(count)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(lab.rounds):
        for saved in rates:
            folder = lab.new("rlinf")
            options = {"auto_save": True, "auto_save_path": str(folder)} if saved else {}
            buffer = TrajectoryReplayBuffer(seed=0, **options)
            rates[saved].append(count / seconds_of(_add_and_flush, buffer, trajectories))
            buffer.close()
            remove(folder)
    with_files, without = Rates(rates[True]), Rates(rates[False])
    return [
        Row(
            name=name,
            ours=with_files.median,
            spread=with_files.spread,
            unit="trajectories/s",
            what="add_trajectories with auto_save=True until every file is power-safe; "
            "trajectories [16, 4] of 32x32 images",
            size=lab.size(count, full, "trajectories"),
            note=f"with auto_save=False {without.median:.0f} trajectories/s, "
            f"{without.median / with_files.median:.1f}x as many",
        )
    ]


def _add_and_flush(buffer: TrajectoryReplayBuffer, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        buffer.add_trajectories([trajectory])
    buffer.flush()


def _no_reads(window: int, cache: int, why: str) -> Row:
    return Row(
        name=f"disk_reads_window_{window}_cache_{cache}", ours=None, unit="reads/sample", what="not measured", note=why
    )


def _rlinf_trajectory(torch: Any, generator: Any) -> Trajectory:
    axes = (16, 4)
    return Trajectory(
        max_episode_length=16,
        model_weights_id="00000000-0000-5000-8000-000000000000",
        actions=torch.rand(*axes, 7, generator=generator),
        rewards=torch.rand(*axes, 1, generator=generator),
        curr_obs={"main_images": torch.randint(0, 255, (*axes, 32, 32, 3), dtype=torch.uint8, generator=generator)},
        next_obs={"main_images": torch.randint(0, 255, (*axes, 32, 32, 3), dtype=torch.uint8, generator=generator)},
    )


FACE_GROUPS = {
    "hilserl": Group(("hilserl_insert", "hilserl_sample", "hilserl_sample_packed"), hilserl),
    "auto_save": Group(("rlinf_add_auto_save",), auto_save),
    "disk_reads": Group(
        tuple(f"disk_reads_window_{w}_cache_{c}" for w in (0, 10, 100) for c in (0, 5, 50)), disk_reads
    ),
}
