"""A summary of a log in plain values, for ``hilt data inspect`` and for JSON."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.storage.lock import writer_of
from hilt.replay.storage.segment import ROWS, Segment

_CHUNK = 1 << 16
"""Steps whose small columns are read at once."""


def summarize(log: Log, newest: int = 5) -> dict[str, object]:
    """Everything `inspect` shows, with the last `newest` trajectories one by one."""
    quarantine = log.quarantine.list()
    return {
        "path": str(log.path),
        "format": log.settings["format"],
        "bytes_on_disk": _bytes_on_disk(log.path),
        "steps": len(log),
        "trajectories": len(log.trajectories()),
        **_count_steps(log),
        "capacity_steps": log.settings["capacity_steps"],
        "capacity_bytes": log.settings["capacity_bytes"],
        "durability": log.durability.words,
        "promise": log.durability.promise(),
        "writer": writer_of(log.path),
        "segments": {
            "sealed": sum(s.sealed is not None for s in log.segments),
            "growing": sum(s.sealed is None for s in log.segments),
        },
        "columns": _columns(log),
        "quarantine": {
            "steps": log.quarantine.steps(),
            "findings": [f"segment {d.segment:06d}, {d.what}" for d in quarantine],
        },
        "facts": _facts(log),
        "recovery": {
            "seconds_to_open": round(log.recovery.seconds, 4),
            "torn_bytes": sum(_torn_bytes(s) for s in log.segments if s.sealed is None) + log.facts.torn_bytes,
            "corrupt_facts": log.facts.corrupt,
        },
        "edits": _edits(log),
        "newest": [_trajectory(log, number) for number in log.trajectories()[-newest:]] if newest else [],
    }


def _count_steps(log: Log) -> dict[str, Any]:
    """Ends, sources and policy versions, from one pass over the rows."""
    sources: Counter[int] = Counter()
    terminated = truncated = ended = 0
    lowest, highest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    keys = log.all().keys()
    with log.reading() as steps:
        for first in range(0, len(keys), _CHUNK):
            names = ["source", "policy_version", "terminated", "truncated"]
            source, version, stop, cut = steps.fields(keys[first : first + _CHUNK], names)
            sources.update(source.tolist())
            terminated, truncated, ended = (
                terminated + int(stop.sum()),
                truncated + int(cut.sum()),
                ended + int((stop | cut).sum()),
            )
            versions = version[version >= 0]
            if len(versions):
                lowest, highest = min(lowest, versions.min()), max(highest, versions.max())
    entries = log.index.entries
    last = (
        np.r_[entries["key"][1:] >> OFFSET_BITS != entries["key"][:-1] >> OFFSET_BITS, True]
        if len(entries)
        else np.zeros(0, bool)
    )
    return {
        "episodes": {
            "ended": ended,
            "terminated": terminated,
            "truncated": truncated,
            "unfinished": int((~entries["ended"][last]).sum()),
        },
        "sources": {source.name.lower(): sources[source.value] for source in Source},
        "policy_versions": [int(lowest), int(highest)] if lowest <= highest else None,
    }


def _columns(log: Log) -> list[dict[str, Any]]:
    layout = log.schema.layout
    out = []
    for path, spec in log.schema.columns.items():
        frame = layout.frame_of.get(path)
        column: dict[str, Any] = {"column": path, "dtype": str(spec.dtype), "shape": list(spec.shape)}
        column["stored"] = "row" if frame is None else "frames"
        if frame is None:
            holding = [s for s in log.segments if path in s.schema.columns]
            column["bytes"] = spec.nbytes * sum(s.rows for s in holding)
        elif path == frame.name:
            column |= _frame_file(log, frame.name, frame.nbytes)
        else:
            column["shared_with"] = frame.name
        out.append(column)
    return out


def _frame_file(log: Log, name: str, nbytes: int) -> dict[str, Any]:
    """Frames of one column over all segments: how many, how large, and what compression saved where it was done."""
    raw = size = packed_raw = packed = frames = 0
    codecs: Counter[str] = Counter()
    for segment in log.segments:
        if name not in segment.frames:
            continue
        here = os.fstat(segment.fd(name)).st_size
        frames += segment.frames[name]
        raw, size = raw + segment.frames[name] * nbytes, size + here
        if name in segment.codecs:
            codecs[segment.codecs[name]["codec"]] += 1
            packed_raw, packed = packed_raw + segment.frames[name] * nbytes, packed + here
    return {
        "bytes": size,
        "frames": frames,
        "codec": log.settings["compression"].get(name) or next(iter(codecs), None),
        "compressed_segments": sum(codecs.values()),
        "compression_ratio": round(packed_raw / packed, 2) if packed else None,
    }


def _facts(log: Log) -> dict[str, Any]:
    verdicts = Counter(success_of(log, number) for number in log.trajectories())
    senders = [
        dict(zip(("actor", "boot", "store"), name, strict=True)) for name in log.facts.origins().values() if any(name)
    ]
    return {"successes": verdicts[True], "failures": verdicts[False], "unknown": verdicts[None], "senders": senders}


def _edits(log: Log) -> dict[str, int]:
    """How many edits there are, and what they hide: `steps` counts these steps too, `trajectories` does not."""
    made = sum("part" not in edit for edit in log.facts.edits.edits.values())
    hidden = len(log.trajectories(hidden=True)) - len(log.trajectories())
    return {"made": made, "hidden_trajectories": hidden, "hidden_steps": len(log) - len(log.all())}


def success_of(log: Log, trajectory: int) -> bool | None:
    """Whether a trajectory succeeded: as annotated, or else as a column ``success`` says; None when nothing says."""
    known = log.facts.success(trajectory)
    if known is None and "success" in log.schema.columns:
        return bool(_field(log, trajectory, "success").any())
    return known


def _trajectory(log: Log, number: int) -> dict[str, Any]:
    has_rewards = "rewards" in log.schema.layout.inline
    sources = Counter(_field(log, number, "source").tolist())
    with log.reading() as steps:
        keys = steps.trajectory(number)
        stop, cut = steps.fields(keys[-1:], ["terminated", "truncated"])
        width = int(steps.widths(keys[:1])[0])
    return {
        "trajectory": number,
        "steps": len(keys),
        "width": width,
        "return": float(_field(log, number, "rewards").sum()) / width if has_rewards else None,
        "success": success_of(log, number),
        "end": "terminated" if stop[0] else "truncated" if cut[0] else "unfinished",
        "sources": {source.name.lower(): sources[source.value] for source in Source if sources[source.value]},
        "facts": log.facts.about(number),
    }


def _field(log: Log, trajectory: int, name: str) -> Array:
    with log.reading() as steps:
        return steps.fields(steps.trajectory(trajectory), [name])[0]


def _torn_bytes(segment: Segment) -> int:
    """Bytes of a growing segment behind its last commit: of a killed writer, or of one at work."""
    sizes = {ROWS: segment.rows * segment.layout.row.itemsize}
    sizes |= {c.name: segment.frames[c.name] * c.nbytes for c in segment.layout.frames}
    return sum(max(0, os.fstat(segment.fd(name)).st_size - size) for name, size in sizes.items())


def _bytes_on_disk(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
