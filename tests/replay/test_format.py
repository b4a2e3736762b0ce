"""The format is what docs/format.md says: its script, which knows nothing of Hilt, reads a log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten
from hilt.replay import Log, Schema
from tests.replay.test_properties import SCHEMA, transition


def script() -> dict[str, Any]:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(code, "read_log.py", "exec"), names)
    return names


def test_the_script_reads_every_field(tmp_path: Path) -> None:
    steps = [transition(t, t + 1, source=t % 4, terminated=t % 7 == 6) for t in range(40)]
    with Log.create(tmp_path / "log", SCHEMA, segment_bytes=20_000) as log:
        episode = log.episode()
        for step in steps:
            if episode.ended:
                episode = log.episode()
            episode.append(step)
        segments = [segment.folder for segment in log.segments]
    read = [script()["read_segment"](folder) for folder in segments]
    assert len(read) > 1
    for path in flatten(steps[0]):
        values = np.concatenate([segment[path] for segment in read])
        assert np.array_equal(values, np.stack([np.asarray(flatten(step)[path]) for step in steps])), path


def test_the_script_reads_stacks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stacks = rng.integers(0, 255, (11, 2, 5, 5, 3), dtype=np.uint8)
    stacks[1:, 0] = stacks[:-1, 1]
    schema = Schema.of(
        {"observations": {"image": stacks[0]}, "next_observations": {"image": stacks[0]}},
        stacked=["observations/image"],
    )
    with Log.create(tmp_path / "log", schema) as log, log.episode() as episode:
        for t in range(10):
            episode.append({"observations": {"image": stacks[t]}, "next_observations": {"image": stacks[t + 1]}})
        folder = log.segments[0].folder
        assert log.segments[0].frames["observations/image"] == 12  # every frame of every stack once
    read = script()["read_segment"](folder)
    assert np.array_equal(read["observations/image"], stacks[:-1])
    assert np.array_equal(read["next_observations/image"], stacks[1:])
