"""Real TensorBoard, Weights & Biases (offline) and trackio (local) have what was
written to them. Run in a venv of their own:

make test-peers
"""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

WRITE = """if True:
    import sys
    from pathlib import Path
    from hilt.observe import Metrics

    first, sink = sys.argv[2] == "first", sys.argv[3]
    with Metrics(Path(sys.argv[1]), [sink], "pick") as metrics:
        if not first:
            metrics.resumed(20, 40)
        for update in (10, 20, 30) if first else (30, 40):
            values = {"critic_loss": update / 100 + (not first), "note": "text", "q/demo": float("nan")}
            metrics.write("update", values, update=update, step=2 * update)
        metrics.write("episode", {"success": not first, "return": 1.5}, update=30, step=70)
"""


def write(folder: Path, sink: str, **environment: str) -> str:
    """A run, and the same one resumed, each in a process of its own as it would be."""
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("seed: 7\nagent:\n  hidden: [256, 256]\n")
    said = ""
    for part in ("first", "second"):
        command = [sys.executable, "-c", WRITE, str(folder / "run"), part, sink]
        home = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environment}
        done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    return said


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """wandb keeps its records in LevelDB's log format, after seven bytes of its own: parts in blocks of 32 KiB."""
    place, whole = 0, b""
    while place + 7 <= len(data):
        if (rest := 32768 - (place + 7) % 32768) < 7:
            place += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or a last part
            yield whole
            whole = b""


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tests.observe.test_sinks import check_tensorboard

    check_tensorboard(tmp_path)


def test_wandb_offline(tmp_path: Path):
    """What `wandb sync` would send, read by its own reader: one run, with its settings,
    all values, and what they are drawn over."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    said = write(tmp_path, "wandb")
    assert f"wandb: offline; later: wandb sync {tmp_path}/run/wandb/offline-run-*" in said
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    ids, rows, axes, settings, steps = set(), [], {}, set(), []
    for file in files:
        for data in leveldb_records(file.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                settings |= {(item.key, item.value_json) for item in record.run.config.update}
            if kind == "metric":
                axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            if kind == "history":
                steps.append(record.history.step.num)
                rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
    assert len(ids) == 1 and ("seed", "7") in settings
    assert axes["update/*"] == "update" and axes["episode/*"] == "step"
    losses = [(float(row["update"]), float(row["update/critic_loss"])) for row in rows if "update/critic_loss" in row]
    assert losses == [(10, 0.1), (20, 0.2), (30, 0.3), (40, 1.4)], "30 was made again, and is there once"
    assert steps == sorted(set(steps)), "one history, also over two files that are synced later"
    assert [float(row["episode/success"]) for row in rows if "episode/success" in row] == [0.0, 1.0]
    assert not any("note" in name or "q/demo" in name for row in rows for name in row)


def test_trackio_on_this_machine(tmp_path: Path):
    pytest.importorskip("trackio")
    write(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    found = [(step, json.loads(values)) for _, step, values in rows]
    losses = [
        (step, values["update"], values["update/critic_loss"])
        for step, values in found
        if "update/critic_loss" in values
    ]
    assert losses == [(20, 10, 0.1), (40, 20, 0.2), (60, 30, 0.3), (80, 40, 1.4)], (
        "30 was made again, and is there once"
    )
    assert [values["episode/success"] for _, values in found if "episode/success" in values] == [0.0, 1.0]
