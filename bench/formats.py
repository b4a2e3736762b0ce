"""RLDS read, decoded and made a log, beside tensorflow_datasets and TF-Agents with a
real Reverb server, on the same files and cores."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import Group, Lab, remove
from bench.limits import PlainAppend
from bench.report import ROOT, Row, Target, at_least
from bench.sides import Side
from bench.timing import Rates, seconds_each
from hilt.formats.images import encode as encode_image
from hilt.formats.tensorflow_files.example import encode
from hilt.formats.tensorflow_files.tfrecord import RecordWriter

TFDS = ROOT / ".venv-reverb/bin/python"
LENGTH = 50
"""Steps of an episode"""
POOL = 40
"""Different pictures, each of which is decoded again and again"""
WAYS = ("nested", "flat", "episodes")
"""In which tensorflow_datasets is asked for the steps; the fastest one counts."""


def read(lab: Lab) -> list[Row]:
    return [_read(lab, "jpeg", 256, lab.pick(2_000, 400)), _read(lab, "png", 256, lab.pick(2_000, 200))]


def _read(lab: Lab, kind: str, size: int, steps: int) -> Row:
    """In every round each contender reads the same files, which are in the page cache."""
    rounds = lab.pick(5, 2)
    path = make(lab.new(f"read-{kind}"), kind, size, steps, shards=4)
    took: dict[str, list[float]] = {}
    checks: dict[str, set[Any]] = {}
    with ExitStack() as stack:
        reader, decoder = (stack.enter_context(Side("bench.formats_sides", role)) for role in ("reader", "decoder"))
        decoder.ask("start", path=str(path))
        peer, absent = _peer(stack, "reader")
        for number in range(rounds + 1):
            lab.progress(f"{kind}: round {number} of {rounds}")
            found = {"ours": reader.ask("read", path=str(path)), "bare": decoder.ask("decode")}
            if peer is not None:
                found |= {f"tfds, {way}": peer.ask("read", path=str(path), way=way, timeout=300) for way in WAYS}
            for name, result in found.items():
                assert result["steps"] == steps, (name, result)
                if number:  # the first one is not counted
                    took.setdefault(name, []).append(steps / result["seconds"])
                if "check" in result:
                    checks.setdefault(name, set()).add(result["check"])
    remove(path)
    assert "tfds, episodes" not in checks or checks["ours"] == checks["tfds, episodes"], f"other pixels: {checks}"
    rates = {name: Rates(found) for name, found in took.items()}
    best = max((name for name in rates if name.startswith("tfds")), key=lambda name: rates[name].median, default=None)
    ways = "; ".join(f"{name} {rate.median:,.0f}/s" for name, rate in rates.items() if name.startswith("tfds"))
    return Row(
        name=f"rlds_read_{kind}",
        ours=rates["ours"].median,
        spread=rates["ours"].spread,
        unit="steps/s",
        what=f"episodes of {LENGTH} steps with one {size}x{size}x3 {kind.upper()} image each, read from 4 "
        "TFRecord files and decoded, on two cores",
        targets=[at_least(1.5, "peer"), at_least(0.9, "limit")],
        enough="any",
        peers={"tensorflow_datasets": rates[best].median} if best else {},
        absent=absent,
        limit=rates["bare"].median,
        limit_name=f"the bare decoder ({'simplejpeg' if kind == 'jpeg' else 'Pillow'}): the same images in "
        "memory, two threads, an array for each episode",
        size=lab.size(steps, 2_000, "steps"),
        note=f"{ways}; every pixel is the same" if ways else "",
    )


def to_log(lab: Lab) -> list[Row]:
    """An image is the whole observation: of dictionaries TF-Agents makes nothing."""
    size, steps, rounds = 128, lab.pick(4_000, 200), lab.pick(7, 2)
    path = make(lab.new("to-log"), "jpeg", size, steps, shards=2)
    took: dict[str, list[float]] = {}
    plain = PlainAppend(lab.new("append"), [LENGTH * size * size * 3])
    with ExitStack() as stack:
        stack.callback(plain.close)
        logger = stack.enter_context(Side("bench.formats_sides", "logger"))
        peer, absent = _peer(stack, "pusher")
        for number in range(rounds + 1):
            lab.progress(f"to log: round {number} of {rounds}")
            found = {
                how: logger.ask(how, path=str(path), target=str(lab.new("log")), timeout=300)
                for how in ("convert", "push")
            }
            if peer is not None and number < lab.pick(4, 2):
                found["TF-Agents"] = peer.ask("push", path=str(path), most=2 * steps, timeout=300)
            found["plain"] = {"seconds": seconds_each(lambda _: plain(), range(steps // LENGTH)), "steps": steps}
            for name, result in found.items():
                assert result["steps"] == steps, (name, result)
                if number:
                    took.setdefault(name, []).append(steps / result["seconds"])
    remove(path)
    remove(lab.folder / "append")
    rates = {name: Rates(found) for name, found in took.items()}
    return [
        Row(
            name="rlds_to_log",
            ours=rates["convert"].median,
            spread=rates["convert"].spread,
            unit="steps/s",
            what=f"episodes of {LENGTH} steps with one {size}x{size}x3 JPEG image each, from a TFDS folder to "
            "a complete and synced log (hilt data convert), beside push_rlds_to_reverb to a Reverb server's "
            "table in memory, on two cores",
            targets=[at_least(10, "peer")],
            peers={"TF-Agents": rates["TF-Agents"].median} if "TF-Agents" in rates else {},
            absent=absent,
            limit=rates["plain"].median,
            limit_name="the decoded images appended to one plain file, with fsync after each episode",
            size=lab.size(steps, 4_000, "steps"),
            note=f"push_rlds_to_reverb of hilt.formats.rlds into a log: {rates['push'].median:,.0f}/s",
        )
    ]


def memory(lab: Lab) -> list[Row]:
    """The same shard twice and eight times: what reading takes must not follow the number of shards."""
    size, steps = 128, lab.pick(1_000, 200)
    peaks: dict[str, float] = {}
    absent: dict[str, str] = {}
    for shards in (2, 8):
        lab.progress(f"memory: {shards} shards")
        path = make(lab.new(f"memory-{shards}"), "jpeg", size, shards * steps, shards)
        with ExitStack() as stack:
            ours = [stack.enter_context(Side("bench.formats_sides", "reader")) for _ in range(lab.pick(5, 1))]
            peaks[f"ours {shards}"] = (
                float(np.median([side.ask("peak", path=str(path), timeout=300) for side in ours])) / 1e6
            )
            peer, absent = _peer(stack, "reader")
            if peer is not None:
                peaks[f"tfds {shards}"] = peer.ask("peak", path=str(path), timeout=300) / 1e6
        remove(path)
    beside = {
        "unit": "MB",
        "limit": steps * size * size * 3 / 1e6,
        "limit_name": "one shard, decoded",
        "absent": absent,
        "size": lab.size(steps, 1_000, "steps in a shard"),
    }
    return [
        Row(
            name="rlds_memory",
            ours=peaks["ours 8"],
            what=f"the most by which reading 8 shards of {steps:,} steps with 128x128x3 images raises the "
            "reader's memory (RssAnon)",
            targets=[Target("limit", "<=", 1.0)],
            peers={"tensorflow_datasets": peaks["tfds 8"]} if "tfds 8" in peaks else {},
            **beside,
        ),
        Row(
            name="rlds_memory_growth",
            ours=max(0.0, peaks["ours 8"] - peaks["ours 2"]),
            what="how much more that is than with 2 of these shards",
            targets=[Target("limit", "<=", 0.25)],
            peers={"tensorflow_datasets": peaks["tfds 8"] - peaks["tfds 2"]} if "tfds 8" in peaks else {},
            note=f"2 shards take {peaks['ours 2']:.0f} MB",
            **beside,
        ),
    ]


def _peer(stack: ExitStack, role: str) -> tuple[Side | None, dict[str, str]]:
    """(the side, why there is none by its name)"""
    name = "tensorflow_datasets" if role == "reader" else "TF-Agents"
    try:
        if not TFDS.exists():
            raise OSError("there is no .venv-reverb")
        side = stack.enter_context(Side("bench.formats_tfds", role, TFDS))
        side.ask("ready", timeout=300)
        return side, {}
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        return None, {name: f"{why}; make bench ARGS=formats installs it, with Python 3.10 or 3.11"}


def make(folder: Path, kind: str, size: int, steps: int, shards: int) -> Path:
    """A TFDS folder: an image as observation, a reward and an action in each step."""
    folder.mkdir(parents=True)
    pictures = [encode_image(picture, kind) for picture in scenes(size, POOL)]
    episodes, number = steps // LENGTH, 0
    lengths = [episodes // shards + (i < episodes % shards) for i in range(shards)]
    for i, length in enumerate(lengths):
        writer = RecordWriter(folder / f"bench-train.tfrecord-{i:05}-of-{shards:05}")
        for _ in range(length):
            writer.add(encode(_episode(number, pictures)))
            number += 1
        writer.close()
    (folder / "features.json").write_text(json.dumps(_features(kind, size)))
    split = {"name": "train", "shardLengths": [str(length) for length in lengths], "numBytes": "0"}
    split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    (folder / "dataset_info.json").write_text(
        json.dumps({"fileFormat": "tfrecord", "name": "bench", "splits": [split], "version": "1.0.0"})
    )
    return folder


def scenes(size: int, count: int) -> list[Any]:
    """Pictures that compress about as those of a camera do: a table, a few things
    on it that move, and the sensor's noise."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size
    table = np.stack([120 + 60 * y, 100 + 50 * x, 90 + 40 * x * y], axis=-1)
    things = [(rng.random(2), 0.05 + 0.1 * rng.random(), rng.integers(0, 255, 3)) for _ in range(12)]
    pictures = []
    for i in range(count):
        picture = table.copy()
        for (cy, cx), radius, color in things:
            inside = (y - cy - 0.1 * np.sin(i / 9)) ** 2 + (x - cx) ** 2 < radius**2
            picture[inside] = 0.6 * color + 0.4 * picture[inside]
        pictures.append((picture + rng.normal(scale=2.0, size=picture.shape)).clip(0, 255).astype(np.uint8))
    return pictures


def _episode(number: int, pictures: list[bytes]) -> dict[str, Any]:
    index = np.arange(LENGTH)
    last = index == LENGTH - 1
    return {
        "steps/observation": [pictures[(7 * number + i) % len(pictures)] for i in range(LENGTH)],
        "steps/action": np.sin(index[:, None] + np.arange(7)).astype(np.float32) * (number % 5),
        "steps/reward": last.astype(np.float32),
        "steps/discount": np.ones(LENGTH, np.float32),
        "steps/is_first": index == 0,
        "steps/is_last": last,
        "steps/is_terminal": last,
    }


def _features(kind: str, size: int) -> dict[str, Any]:
    prefix = "tensorflow_datasets.core.features."

    def tensor(dtype: str, *shape: int) -> dict[str, Any]:
        content = {
            "dtype": dtype,
            "encoding": "none",
            "shape": {"dimensions": [str(n) for n in shape]} if shape else {},
        }
        return {"pythonClassName": prefix + ("tensor_feature.Tensor" if shape else "scalar.Scalar"), "tensor": content}

    image = {"dtype": "uint8", "encodingFormat": kind, "shape": {"dimensions": [str(size), str(size), "3"]}}
    step = {
        "observation": {"pythonClassName": prefix + "image_feature.Image", "image": image},
        "action": tensor("float32", 7),
        "reward": tensor("float32"),
        "discount": tensor("float32"),
        **{name: tensor("bool") for name in ("is_first", "is_last", "is_terminal")},
    }
    inner = {"pythonClassName": prefix + "features_dict.FeaturesDict", "featuresDict": {"features": step}}
    steps = {"pythonClassName": prefix + "dataset_feature.Dataset", "sequence": {"feature": inner, "length": "-1"}}
    return {"pythonClassName": prefix + "features_dict.FeaturesDict", "featuresDict": {"features": {"steps": steps}}}


GROUPS = {
    "read": Group(("rlds_read_jpeg", "rlds_read_png"), read),
    "to_log": Group(("rlds_to_log",), to_log),
    "memory": Group(("rlds_memory", "rlds_memory_growth"), memory),
}
